"""The process in which a notebook's cells run, one after another, and their functions are called for the grader. A cell
that reaches `check.q1(function)` stops there: the grader is told, and calls `function` through the wire for the cases
of q1, as the card does in a notebook. Then the cell goes on. Nothing that decides on points is in here."""

import ast
import asyncio
import builtins
import codeop
import importlib.util
import inspect
import linecache
import os
import pickle
import re
import resource
import signal
import socket
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlcourse.course.calls import OutOfTime, gradient, pieces, time_limit, where
from rlcourse.sandbox import namespaces
from rlcourse.sandbox.wire import encode, receive, send

CHECKS = "rlcourse.course.checks"
TRAINING = "rlcourse.course.own"  # a reader's loop isn't trained here: its page has the answers
NOT_HERE = TRAINING, "ptx_interpreter"  # the grader has the interpreter
KEPT = ("%%time", "%%capture", "%%prun", "%%debug")  # cell magics whose cell runs in the notebook's own names
LINE = re.compile(
    r"^(?P<indent>\s*)(?P<name>[A-Za-z_][\w.,\s\[\]\"']*=(?!=)\s*)?(?P<mark>[%!?])(?P<rest>.*)$", re.DOTALL
)
TIMED = re.compile(r"^(time|prun)\s+(?!-)(?P<code>\S.*)$", re.DOTALL)
HELP = re.compile(r"^(?P<indent>\s*)[^#\n]*\?{1,2}\s*(#.*)?$")


def main(wire: int, limits: dict[str, int]) -> None:
    """Answer requests, each a pickled list, until the grader is gone. limits: those to set where nobody else does."""
    connection = socket.socket(fileno=wire)
    setup = pickle.loads(receive(connection))
    prepare(setup, limits)
    notebook = Notebook(connection, setup)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what is wrong until here the grader reads, and nothing from here on
    send(connection, encode("ready"))
    while True:
        try:
            kind, *details = pickle.loads(receive(connection))
        except EOFError:
            return
        send(connection, reply({"cell": notebook.run_cell, "judge": notebook.judge_by_name}[kind], *details))


def prepare(setup: dict, limits: dict[str, int]) -> None:
    """Limit this process. setup: `seed`, `memory_bytes`; `kernels`, whether the compiler is wanted, `ungraded`, whether
    it's missing."""
    torch.set_num_threads(1)
    if setup["kernels"]:
        import rlcourse.course.kernels.trace  # noqa: F401  before memory is limited
    sys.modules["ptx_interpreter"] = None  # not importable, even where it's installed: kernels run at the grader's
    if setup["ungraded"]:
        sys.modules["rlcourse.kernels"] = None
    torch.manual_seed(setup["seed"])
    taken = Path("/proc/self/statm")
    if taken.exists():  # elsewhere the system does not keep the limit
        limit = int(taken.read_text().split()[0]) * resource.getpagesize() + setup["memory_bytes"]
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    namespaces.set_limits(limits)
    if limits and sys.platform == "linux":  # nothing else ends it with the grader
        namespaces.call("prctl", namespaces.SET_PDEATHSIG, 9, 0, 0, 0)


def reply(function: Callable, *arguments, **options) -> bytes:
    """{"value": ...} or {"error": [kind, message]}, encoded."""
    try:
        return encode({"value": function(*arguments, **options)})
    except BaseException as error:  # SystemExit and KeyboardInterrupt are the reader's as well
        return encode({"error": [type(error).__name__[:100], sentence(error)]})


def sentence(error: BaseException) -> str:
    try:
        return str(error)[:500] + where(error)
    except BaseException:  # the reader's own class of error may say anything
        return ""


class Check:
    """`check.q1` while grading; what it gives back says whether the question passed at the last call."""

    def __init__(self, judge: Callable[[Any], bool]):
        self.judge, self.passed = judge, False

    def __call__(self, function: Any = None) -> "Check":
        self.passed = self.judge(function)
        return self


class Notebook:
    """The names of a notebook and what its cells do. setup: `checks`, the questions that are graded; `ungraded`,
    kernels that are not; `module`, that of the checks."""

    def __init__(self, connection: socket.socket, setup: dict):
        self.connection, self.setup, self.judging = connection, setup, False
        self.compiler = codeop.Compile()  # which remembers `from __future__ import ...`, as a notebook does
        self.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        self.left_out = set(NOT_HERE)  # on purpose, and the names that come of it
        self.kernels: list = []
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        self.names = module.__dict__
        nothing = {name: lambda *_, **__: None for name in ("run_line_magic", "run_cell_magic", "system", "getoutput")}
        builtins.display, builtins.get_ipython = (lambda *_, **__: None), (lambda: types.SimpleNamespace(**nothing))
        self._make_checks()
        sys.meta_path.append(Absent)

    def _make_checks(self) -> None:
        package = types.ModuleType(CHECKS)
        package.__path__ = []
        module = types.ModuleType(f"{CHECKS}.{self.setup['module']}")
        for question in self.setup["checks"]:
            setattr(module, question, Check(partial(self.judge, question)))
        for question in self.setup["ungraded"]:
            setattr(module, question, Check(lambda function: False))
        setattr(package, self.setup["module"], module)
        for made in (package, module):
            made.__spec__ = importlib.util.spec_from_loader(made.__name__, loader=None)
            sys.modules[made.__name__] = made

    def judge_by_name(self, question: str, name: str) -> str:
        """Of a question that no cell asked to check."""
        self.judge(question, self.names.get(name))
        return ""

    def judge(self, question: str, function: Any) -> bool:
        """Tell the grader that a question is reached, and answer its calls until it has judged. Whether it passed."""
        if self.judging:  # a function that checks itself
            return False
        self.judging = True
        left, _ = signal.setitimer(signal.ITIMER_REAL, 0)  # the cell's time stands still
        calls = {"call": function, "gradient": partial(gradient, function), "pieces": partial(pieces, function)}
        calls |= {"trace": partial(self.trace, function), "blocks": self.blocks}
        try:
            send(self.connection, encode({"check": question, "defined": callable(function)}))
            while True:
                kind, *details = pickle.loads(receive(self.connection))
                if kind == "verdict":
                    return details[0]
                seconds, arguments, options = details
                send(self.connection, within(seconds, calls[kind], *arguments, **options))
        finally:
            self.judging = False
            signal.setitimer(signal.ITIMER_REAL, left)

    def trace(self, make: Callable, *arguments, **options) -> dict:
        """A kernel as data (`rlcourse.course.kernels.trace`), and its number."""
        from rlcourse.course.kernels import trace

        kernel, facts = trace.trace(make, *arguments, **options)
        self.kernels.append(kernel)
        return {"kernel": len(self.kernels) - 1, "facts": facts}

    def blocks(self, number: int, tensors: list) -> list[int]:
        from rlcourse.course.kernels import trace

        return trace.blocks(self.kernels[number], tensors)

    def run_cell(self, number: int, source: str, seconds: float) -> list[str]:
        """Run a cell, each statement by itself. What is to be said of it: its first error, and what was left out."""
        name = f"<cell {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        try:
            found, skipped = statements(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return [f"{type(error).__name__}: {error}"]
        said = [f"not run: {line[:80]}" for line in skipped if not line.startswith(("%pip", "!pip", "%matplotlib"))]
        errors = [error for statement in found if (error := self._run(statement, name, seconds))]
        return said[:3] + errors[:1]

    def _run(self, statement: ast.stmt, cell: str, seconds: float) -> str:
        """What went wrong in one statement, '' for nothing."""
        try:
            with time_limit(seconds):
                found = eval(self.compiler(ast.Module([statement], []), cell, "exec"), self.names)
                if inspect.iscoroutine(found):
                    asyncio.run(found)
        except OutOfTime:
            return f"took longer than {seconds:g} seconds: is there a loop that never ends?"
        except BaseException as error:
            missing = (error.name or "") if isinstance(error, ImportError | NameError) else ""
            no_kernels = bool(self.setup["ungraded"]) and missing.startswith("rlcourse.kernels")
            if missing in self.left_out or no_kernels:
                self.left_out |= bound(statement)
                return ""
            return f"{type(error).__name__}: {sentence(error)}"
        return ""


def statements(source: str) -> tuple[list[ast.stmt], list[str]]:
    """A cell's statements, and the IPython lines of it that are left out. Raises SyntaxError for what is neither."""
    source, skipped = without_cell_magic(source)
    while True:
        try:
            return ast.parse(source).body, skipped
        except SyntaxError as error:
            lines = source.split("\n")
            number = (error.lineno or 0) - 1
            mended = python_of(lines, number) if 0 <= number < len(lines) else None
            if mended is None:
                raise
            first, last, line = mended
            skipped.append(lines[first].strip())
            lines[first : last + 1] = [line] + [""] * (last - first)  # all others keep their numbers
            source = "\n".join(lines)


def without_cell_magic(source: str) -> tuple[str, list[str]]:
    """A cell without its `%%` line; nothing of it where its text is no Python, or runs in names of its own."""
    lines = source.split("\n")
    first = next((i for i, line in enumerate(lines) if line.strip()), 0)
    if not lines[first].startswith("%%"):
        return source, []
    kept = lines[first].split()[0] in KEPT
    return ("\n" * (first + 1) + "\n".join(lines[first + 1 :]) if kept else ""), [lines[first].strip()]


def python_of(lines: list[str], number: int) -> tuple[int, int, str] | None:
    """(first line, last line, what stands there in Python) of the IPython command on a line; None if it has none."""
    last = number
    while lines[last].endswith("\\") and last + 1 < len(lines):
        last += 1
    text = "\n".join(lines[number : last + 1])
    found = LINE.match(text)
    if found is None:
        asked = HELP.match(text)
        return (number, last, asked["indent"] + "pass") if asked else None
    indent, name = found["indent"], found["name"] or ""
    timed = TIMED.match(found["rest"]) if found["mark"] == "%" else None
    if timed:
        return number, last, f"{indent}{name}{timed['code']}"
    return number, last, f"{indent}{name}[]" if name else f"{indent}pass"


def bound(statement: ast.stmt) -> set[str]:
    """The names that a definition, an import, or the assignments of a statement are for."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    stored = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return stored | {alias.asname or alias.name for alias in ast.walk(statement) if isinstance(alias, ast.alias)}


def within(seconds: float, function: Callable, *arguments, **options) -> bytes:
    """What a call gives within its time, encoded. A call that swallows the signal is ended by the grader."""
    try:
        with time_limit(seconds):
            return reply(function, *arguments, **options)
    except OutOfTime:
        return encode({"error": ["OutOfTime", ""]})


class Absent:
    """The last to be asked for a module: those of the course that are not there say why."""

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> None:
        if name.partition(".")[0] == "rlcourse":
            message = f"{name} is not there while grading: use torch alone, or write it yourself"
            raise ModuleNotFoundError(message, name=name)
