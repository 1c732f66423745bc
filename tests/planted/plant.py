"""Mistakes planted in functions of the package, which are found by their names.

A mistake is a function, a rule that spoils it, and the tests that have to notice. Most rules edit the syntax tree: they
swap an operator, drop a call, change a constant. So code may be reformatted, its locals may be renamed, and a function
may move to another file. If a rule fits several places, it needs the number of one, from 1.
"""

import ast
import importlib
import inspect
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import rlcourse

PACKAGE = Path(rlcourse.__file__).parent
TESTS = Path(__file__).resolve().parents[1]


class Gone(LookupError):
    """The mistake can no longer be made."""


@dataclass(frozen=True)
class Rule:
    """The node of that number, from 1, among those that fit becomes `new(node)`; or `wrapper(function)` takes the
    function's place. Without a number one node may fit."""

    text: str
    number: int | None = None
    fits: Callable[[ast.AST], bool] | None = None
    new: Callable[[Any], ast.AST] | None = None
    wrapper: Callable[[Callable], Callable] | None = None


@dataclass(frozen=True)
class Mistake:
    """where: NAME or CLASS.NAME, after FILE: if several files have one. tests: see `mistakes.py`."""

    where: str
    rule: Rule
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.where}: {self.rule.text}"

    @property
    def selection(self) -> list[tuple[Path, str]]:
        """The files of its tests, each with the word that their names must have."""
        parts = [test.partition(" -k ") for test in self.tests]
        return [((TESTS / path).with_name(f"test_{Path(path).name}.py"), word) for path, _, word in parts]


class Edit(ast.NodeTransformer):
    """Applies a rule to the nodes under a tree, in the order of the source."""

    def __init__(self, rule: Rule):
        self.rule, self.seen = rule, 0

    def visit(self, node: ast.AST) -> ast.AST:
        fits = self.rule.fits(node)
        self.seen += fits
        here = fits and self.seen == (self.rule.number or 1)
        node = self.generic_visit(node)
        return self.rule.new(node) if here else node

    def apply(self, tree: ast.AST) -> None:
        """Raises Gone if no node of that number fits, or several do and there is no number."""
        self.generic_visit(tree)
        if self.seen < (self.rule.number or 1) or (self.rule.number is None and self.seen > 1):
            raise Gone(f"it fits {self.seen} places")


def expression(source: str) -> ast.AST:
    return ast.parse(source, mode="eval").body


def dotted(node: ast.AST) -> str:
    """`.a.b` for the expression a.b."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return f".{node.id}" if isinstance(node, ast.Name) else ""


def calls(name: str) -> Callable[[ast.AST], bool]:
    return lambda node: isinstance(node, ast.Call) and dotted(node.func).endswith("." + name)


def edit(text: str, number: int | None, fits: Callable[[ast.AST], bool], new: Callable[[Any], ast.AST]) -> Rule:
    return Rule(f"{text} ({number})" if number else text, number, fits, new)


def op(old: str, new: str, number: int | None = None) -> Rule:
    """Another operator, by the names of `ast`."""
    return edit(f"{old} becomes {new}", number, lambda n: type(n).__name__ == old, lambda _: getattr(ast, new)())


def keep(old: str, operand: int, number: int | None = None) -> Rule:
    """Only one operand of an operation: 0 is the left one."""

    def only(node) -> ast.AST:
        return (node.values if isinstance(node, ast.BoolOp) else [node.left, node.right])[operand]

    return edit(f"operand {operand} of {old}", number, lambda n: type(getattr(n, "op", None)).__name__ == old, only)


def no(number: int | None = None) -> Rule:
    """Without `not`, `~` or a minus."""
    return edit("no negation", number, lambda n: isinstance(n, ast.UnaryOp), lambda n: n.operand)


def changed(node: ast.AST, **fields) -> ast.AST:
    """The node with other values in these fields."""
    vars(node).update(fields)
    return node


def when(value: bool, number: int | None = None) -> Rule:
    """The condition of an `if` or `while` always has this value."""
    fits = lambda node: isinstance(node, ast.If | ast.IfExp | ast.While)  # noqa: E731
    return edit(f"if {value}", number, fits, lambda node: changed(node, test=ast.Constant(value)))


def const(old: Any, new: Any, number: int | None = None) -> Rule:
    fits = lambda n: isinstance(n, ast.Constant) and type(n.value) is type(old) and n.value == old  # noqa: E731
    return edit(f"{old!r} becomes {new!r}", number, fits, lambda _: ast.Constant(new))


def name(old: str, new: str, number: int | None = None) -> Rule:
    """Another variable, attribute or function."""

    renamed = lambda n: changed(n, **{"attr" if isinstance(n, ast.Attribute) else "id": new})  # noqa: E731
    return edit(f"{old} becomes {new}", number, lambda n: old == getattr(n, "attr", getattr(n, "id", None)), renamed)


def drop(called: str, number: int | None = None) -> Rule:
    """Without a call. `x.f(y)` leaves x; what is named with a dot, `module.f(y)`, and `f(y)` leave y."""

    def left(node) -> ast.AST:
        method = isinstance(node.func, ast.Attribute) and "." not in called
        return node.func.value if method else [*node.args, ast.Constant(None)][0]

    return edit(f"no {called}", number, calls(called), left)


def arg(called: str, place: int, value: str, number: int | None = None) -> Rule:
    """A call with another argument."""
    put = lambda n: changed(n, args=[*n.args[:place], expression(value), *n.args[place + 1 :]])  # noqa: E731
    return edit(f"argument {place} of {called} is {value}", number, calls(called), put)


def kw(called: str, keyword: str, value: str | None = None, number: int | None = None) -> Rule:
    """A call without a keyword, or with this value for it."""
    added = [] if value is None else [ast.keyword(keyword, expression(value))]
    put = lambda n: changed(n, keywords=[*(k for k in n.keywords if k.arg != keyword), *added])  # noqa: E731
    return edit(f"{keyword}={value} for {called}", number, calls(called), put)


def swap(called: str, first: int = 0, second: int = 1, number: int | None = None) -> Rule:
    """A call with two arguments in each other's place."""

    def exchange(node) -> ast.AST:
        node.args[first], node.args[second] = node.args[second], node.args[first]
        return node

    return edit(f"arguments {first} and {second} of {called} swapped", number, calls(called), exchange)


def unsliced(number: int | None = None) -> Rule:
    """x instead of `x[a:b]`."""
    fits = lambda node: isinstance(getattr(node, "slice", None), ast.Slice)  # noqa: E731
    return edit("no slice", number, fits, lambda n: n.value)


def unset(attribute: str, number: int | None = None) -> Rule:
    """Without the assignment to an attribute, or to an item `[attribute]`."""

    def fits(node: ast.AST) -> bool:
        target = getattr(node, "target", None) or [*getattr(node, "targets", []), None][0]
        target = target.slice if isinstance(target, ast.Subscript) else target
        return isinstance(node, ast.stmt) and attribute == getattr(target, "attr", getattr(target, "id", None))

    return edit(f"{attribute} not set", number, fits, lambda _: ast.Pass())


def wrong(wrapper: Callable[[Callable], Callable], text: str) -> Rule:
    """`wrapper(f)` instead of f."""
    return Rule(text, wrapper=wrapper)


def returns(spoil: Callable[[Any], Any], text: str) -> Rule:
    return wrong(lambda f: lambda *args, **kwargs: spoil(f(*args, **kwargs)), text)


@lru_cache
def files() -> dict[str, list[Path]]:
    """By the name of a function the files that define one."""
    found: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for defined in set(re.findall(r"\bdef (\w+)", path.read_text(encoding="utf-8"))):
            found.setdefault(defined, []).append(path)
    return found


@lru_cache
def tree_of(path: Path) -> bytes:
    """A file's tree, pickled, of which copies are fast to make."""
    return pickle.dumps(ast.parse(path.read_text(encoding="utf-8")))


def functions(module: ast.Module) -> dict[str, ast.AST]:
    """The trees of a module's functions and methods, by NAME or CLASS.NAME."""
    found = {}
    for node in module.body:
        prefix, members = (f"{node.name}.", node.body) if isinstance(node, ast.ClassDef) else ("", [node])
        found |= {prefix + member.name: member for member in members if isinstance(member, ast.FunctionDef)}
    return found


def locate(where: str) -> tuple[Path, str]:
    """The file and the name of a function. Raises Gone unless there is exactly one."""
    file, _, qualname = where.rpartition(":")
    paths = [path for path in files().get(qualname.split(".")[-1], []) if str(path).endswith(f"{file}.py")]
    found = [path for path in paths if qualname in functions(pickle.loads(tree_of(path)))]
    if len(found) != 1:
        places = ", ".join(str(path.relative_to(PACKAGE)) for path in found) or "nowhere"
        raise Gone(f"{where}: wanted is one function, found {places}")
    return found[0], qualname


def spoiled(mistake: Mistake) -> tuple[ast.Module, ast.AST]:
    """The module's tree with the mistake, and the function's in it. Raises Gone if that changes nothing."""
    path, qualname = locate(mistake.where)
    module = pickle.loads(tree_of(path))
    function = functions(module)[qualname]
    if mistake.rule.wrapper is None:
        before = ast.dump(function)
        try:
            Edit(mistake.rule).apply(function)
        except (Gone, IndexError) as error:
            raise Gone(f"{mistake}: {error}") from error
        if ast.dump(function) == before:
            raise Gone(f"{mistake}: it changes nothing")
    return ast.fix_missing_locations(module), function


def module_of(mistake: Mistake) -> str:
    path = locate(mistake.where)[0].relative_to(PACKAGE.parent).with_suffix("")
    return ".".join(path.parts).removesuffix(".__init__")


def code_of(code: CodeType, qualname: str) -> CodeType | None:
    """The code object of that name inside another one."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    found = (c if c.co_qualname == qualname else code_of(c, qualname) for c in inner)
    return next((c for c in found if c is not None), None)


def plant(mistake: Mistake) -> None:
    """Make the mistake in this process. The function gets another code object, so all who have imported it see it."""
    path, qualname = locate(mistake.where)
    found: Any = importlib.import_module(module_of(mistake))
    for part in qualname.split("."):
        found = inspect.getattr_static(found, part)
    found = inspect.unwrap(getattr(found, "__func__", getattr(found, "fget", found)))
    module, tree = spoiled(mistake)
    if mistake.rule.wrapper is not None:
        wrap(found, mistake.rule.wrapper)
    elif hasattr(found, "rewriter"):  # a kernel in Triton's interpreter, which compiles its own version of the source
        tree.decorator_list, found.rewriter.filename, found.rewriter.def_file_lineno = [], str(path), 1
        rewritten = found.rewriter._transform_ast(ast.unparse(tree))
        found.rewritten_fn[found.fn] = found.rewriter._compile_and_exec(rewritten)
    else:
        found.__code__ = code_of(compile(module, str(path), "exec"), qualname)


def wrap(function: FunctionType, wrapper: Callable[[Callable], Callable]) -> None:
    code = function.__code__
    original = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    original.__kwdefaults__ = function.__kwdefaults__
    sys.modules["planted"] = wrapper(original)  # the new code sees no names but those of the function's module

    def instead(*args, **kwargs):
        import sys

        return sys.modules["planted"](*args, **kwargs)

    function.__code__ = instead.__code__.replace(co_freevars=code.co_freevars)
