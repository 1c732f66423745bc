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
from collections.abc import Callable, Iterator
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
    """`change` edits a function's tree, or `wrapper(function)` takes its place."""

    text: str
    change: Callable[[ast.AST], None] | None = None
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


@dataclass
class Slot:
    """A node and where it is: an attribute of another node, or an item of a list."""

    holder: Any
    key: Any
    node: ast.AST

    def put(self, node: ast.AST) -> None:
        if isinstance(self.holder, list):
            self.holder[self.key] = node
        else:
            setattr(self.holder, self.key, node)


def slots(node: ast.AST) -> Iterator[Slot]:
    """Every node under this one, in the order of the source."""
    for field, value in ast.iter_fields(node):
        items = list(enumerate(value)) if isinstance(value, list) else [(field, value)]
        for key, child in items:
            if isinstance(child, ast.AST):
                yield Slot(value if isinstance(value, list) else node, key, child)
                yield from slots(child)


def pick(tree: ast.AST, number: int | None, fits: Callable[[ast.AST], bool]) -> Slot:
    """The slot of that number among those that fit. Raises Gone if there is none, or several and no number."""
    found = [slot for slot in slots(tree) if fits(slot.node)]
    if len(found) < (number or 1) or (number is None and len(found) > 1):
        raise Gone(f"it fits {len(found)} places")
    return found[(number or 1) - 1]


def expression(source: str) -> ast.AST:
    return ast.parse(source, mode="eval").body


def dotted(node: ast.AST) -> str:
    """`.a.b` for the expression a.b."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return f".{node.id}" if isinstance(node, ast.Name) else ""


def calls(name: str) -> Callable[[ast.AST], bool]:
    return lambda node: isinstance(node, ast.Call) and dotted(node.func).endswith("." + name)


def edit(text: str, number: int | None, fits: Callable[[ast.AST], bool], how: Callable[[Slot], None]) -> Rule:
    return Rule(f"{text} ({number})" if number else text, lambda tree: how(pick(tree, number, fits)))


def op(old: str, new: str, number: int | None = None) -> Rule:
    """Another operator, by the names of `ast`."""
    operator = getattr(ast, new)()
    return edit(f"{old} becomes {new}", number, lambda n: type(n).__name__ == old, lambda slot: slot.put(operator))


def keep(old: str, operand: int, number: int | None = None) -> Rule:
    """Only one operand of an operation: 0 is the left one."""

    def only(slot: Slot) -> None:
        node = slot.node
        slot.put((node.values if isinstance(node, ast.BoolOp) else [node.left, node.right])[operand])

    return edit(f"operand {operand} of {old}", number, lambda n: type(getattr(n, "op", None)).__name__ == old, only)


def no(number: int | None = None) -> Rule:
    """Without `not`, `~` or a minus."""
    return edit("no negation", number, lambda n: isinstance(n, ast.UnaryOp), lambda slot: slot.put(slot.node.operand))


def when(value: bool, number: int | None = None) -> Rule:
    """The condition of an `if` or `while` always has this value."""
    kinds = ast.If | ast.IfExp | ast.While
    constant = ast.Constant(value)
    return edit(
        f"if {value}", number, lambda n: isinstance(n, kinds), lambda slot: setattr(slot.node, "test", constant)
    )


def const(old: Any, new: Any, number: int | None = None) -> Rule:
    fits = lambda n: isinstance(n, ast.Constant) and type(n.value) is type(old) and n.value == old  # noqa: E731
    return edit(f"{old!r} becomes {new!r}", number, fits, lambda slot: slot.put(ast.Constant(new)))


def name(old: str, new: str, number: int | None = None) -> Rule:
    """Another variable, attribute or function."""

    def rename(slot: Slot) -> None:
        setattr(slot.node, "attr" if isinstance(slot.node, ast.Attribute) else "id", new)

    return edit(f"{old} becomes {new}", number, lambda n: old == getattr(n, "attr", getattr(n, "id", None)), rename)


def drop(called: str, number: int | None = None) -> Rule:
    """Without a call. `x.f(y)` leaves x; what is named with a dot, `module.f(y)`, and `f(y)` leave y."""

    def leave(slot: Slot) -> None:
        method = isinstance(slot.node.func, ast.Attribute) and "." not in called
        slot.put(slot.node.func.value if method else [*slot.node.args, ast.Constant(None)][0])

    return edit(f"no {called}", number, calls(called), leave)


def arg(called: str, place: int, value: str, number: int | None = None) -> Rule:
    """A call with another argument."""
    text, new = f"argument {place} of {called} is {value}", expression(value)
    return edit(text, number, calls(called), lambda slot: slot.node.args.__setitem__(place, new))


def kw(called: str, keyword: str, value: str | None = None, number: int | None = None) -> Rule:
    """A call without a keyword, or with this value for it."""

    def replace(slot: Slot) -> None:
        slot.node.keywords = [k for k in slot.node.keywords if k.arg != keyword]
        slot.node.keywords += [ast.keyword(keyword, expression(value))] if value is not None else []

    return edit(f"{keyword}={value} for {called}", number, calls(called), replace)


def swap(called: str, first: int = 0, second: int = 1, number: int | None = None) -> Rule:
    """A call with two arguments in each other's place."""

    def exchange(slot: Slot) -> None:
        args = slot.node.args
        args[first], args[second] = args[second], args[first]

    return edit(f"arguments {first} and {second} of {called} swapped", number, calls(called), exchange)


def unsliced(number: int | None = None) -> Rule:
    """x instead of `x[a:b]`."""
    fits = lambda node: isinstance(getattr(node, "slice", None), ast.Slice)  # noqa: E731
    return edit("no slice", number, fits, lambda slot: slot.put(slot.node.value))


def unset(attribute: str, number: int | None = None) -> Rule:
    """Without the assignment to an attribute, or to an item `[attribute]`."""

    def fits(node: ast.AST) -> bool:
        target = getattr(node, "target", None) or [*getattr(node, "targets", []), None][0]
        target = target.slice if isinstance(target, ast.Subscript) else target
        return isinstance(node, ast.stmt) and attribute == getattr(target, "attr", getattr(target, "id", None))

    return edit(f"{attribute} not set", number, fits, lambda slot: slot.put(ast.Pass()))


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
def functions(path: Path) -> dict[str, ast.AST]:
    """The trees of a file's functions and methods, by NAME or CLASS.NAME."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        prefix, members = (f"{node.name}.", node.body) if isinstance(node, ast.ClassDef) else ("", [node])
        found |= {prefix + member.name: member for member in members if isinstance(member, ast.FunctionDef)}
    return found


def locate(where: str) -> tuple[Path, str]:
    """The file and the name of a function. Raises Gone unless there is exactly one."""
    file, _, qualname = where.rpartition(":")
    paths = [path for path in files().get(qualname.split(".")[-1], []) if str(path).endswith(f"{file}.py")]
    found = [path for path in paths if qualname in functions(path)]
    if len(found) != 1:
        places = ", ".join(str(path.relative_to(PACKAGE)) for path in found) or "nowhere"
        raise Gone(f"{where}: wanted is one function, found {places}")
    return found[0], qualname


def spoiled(mistake: Mistake) -> ast.AST:
    """The function's tree with the mistake. Raises Gone if that changes nothing."""
    path, qualname = locate(mistake.where)
    before = functions(path)[qualname]
    tree = pickle.loads(pickle.dumps(before))  # a copy, five times as fast as deepcopy
    try:
        if mistake.rule.change is not None:
            mistake.rule.change(tree)
    except (Gone, IndexError) as error:
        raise Gone(f"{mistake}: {error}") from error
    if mistake.rule.change is not None and ast.dump(tree) == ast.dump(before):
        raise Gone(f"{mistake}: it changes nothing")
    return ast.fix_missing_locations(tree)


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
    tree = spoiled(mistake)
    if mistake.rule.wrapper is not None:
        _wrap(found, mistake.rule.wrapper)
    elif hasattr(found, "rewriter"):  # a kernel in Triton's interpreter, which compiles its own version of the source
        tree.decorator_list, found.rewriter.filename, found.rewriter.def_file_lineno = [], str(path), 1
        rewritten = found.rewriter._transform_ast(ast.unparse(tree))
        found.rewritten_fn[found.fn] = found.rewriter._compile_and_exec(rewritten)
    else:
        module = ast.parse(path.read_text(encoding="utf-8"))
        pick(module, 1, lambda n: type(n) is type(tree) and (n.name, n.lineno) == (tree.name, tree.lineno)).put(tree)
        found.__code__ = code_of(compile(module, str(path), "exec"), qualname)


def _wrap(function: FunctionType, wrapper: Callable[[Callable], Callable]) -> None:
    code = function.__code__
    original = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    original.__kwdefaults__ = function.__kwdefaults__
    sys.modules["planted"] = wrapper(original)  # the new code sees no names but those of the function's module

    def instead(*args, **kwargs):
        import sys

        return sys.modules["planted"](*args, **kwargs)

    function.__code__ = instead.__code__.replace(co_freevars=code.co_freevars)
