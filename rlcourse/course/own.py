"""`my_loop.py`, the reader's own training loop: saved from the functions of a notebook, found again by later lessons.
The page that it starts from is `rlcourse/course/loop.py`, which also stands in for readers who have not written one."""

import ast
import importlib.util
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType

from rlcourse.files import write_text

OURS = Path(__file__).with_name("loop.py")


def loop_file() -> Path:
    """Where the reader's loop is: RLCOURSE_MY_LOOP, or `my_loop.py` beside the notebooks' folder, or else here."""
    root = OURS.parents[2]
    return Path(
        os.environ.get("RLCOURSE_MY_LOOP") or (root if (root / "notebooks").is_dir() else Path.cwd()) / "my_loop.py"
    )


def load_loop() -> ModuleType:
    """A fresh copy of the reader's loop, or of ours where there is none, and a line that says which."""
    path = loop_file()
    print(f"training with your {path.name}" if path.exists() else "training with our loop: rlcourse/course/loop.py")
    return imported(path if path.exists() else OURS)


def save_loop(**functions: Callable) -> ModuleType:
    """Put functions into the reader's loop, each in the place of the one that its keyword names, with what they use of
    their notebook, and load it. Raises ValueError for a name that the loop does not have and for a function whose
    source cannot be found."""
    path = loop_file()
    text = (path if path.exists() else OURS).read_text(encoding="utf-8")
    known = defined(OURS.read_text(encoding="utf-8"))
    replaceable = [name for name, node in known.items() if isinstance(node, ast.FunctionDef)]
    for name, function in functions.items():
        if name not in replaceable:
            raise ValueError(f"The loop has no function {name}: it has {', '.join(replaceable)}.")
        source = renamed(function, name)
        for helper, of_helper in needed(function, set(known)).items():
            text = put(text, helper, of_helper, before=name)
        text = put(text, name, source)
    write_text(path, text)
    print(f"saved {', '.join(functions)} in {path.name}")
    return imported(path)


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("my_loop", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["my_loop"] = module
    spec.loader.exec_module(module)
    return module


def defined(text: str) -> dict[str, ast.stmt]:
    """What a module's statements define or import, by name."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {name.id: node for name in ast.walk(node) if isinstance(name, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name: node for alias in node.names}
    return found


def put(text: str, name: str, source: str, before: str = "") -> str:
    """The text with `source` in the place of the statement that defines `name`; if none does, `before` another."""
    there, lines = defined(text), text.split("\n")
    node = there.get(name)
    first, last = (node.lineno, node.end_lineno) if node else (there[before].lineno, there[before].lineno - 1)
    gap = [] if node else ["", ""]
    return "\n".join([*lines[: first - 1], *source.rstrip().split("\n"), *gap, *lines[last:]])


def renamed(function: Callable, name: str) -> str:
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        raise ValueError(f"The source of {name} cannot be found: define it with `def` in a cell of its own.") from None
    return re.sub(rf"\bdef {re.escape(function.__name__)}\(", f"def {name}(", source, count=1)


def needed(function: Callable, known: set[str]) -> dict[str, str]:
    """Source, by name, of what a function uses of its notebook beyond what is `known`, what needs others last."""
    found = {}
    used = {node.id for node in ast.walk(ast.parse(renamed(function, "f"))) if isinstance(node, ast.Name)}
    for name in sorted((used - known) & function.__globals__.keys() - {function.__name__}):
        value = function.__globals__[name]
        if isinstance(value, ModuleType):
            found[name] = f"import {value.__name__} as {name}"
        elif isinstance(value, int | float | str):
            found[name] = f"{name} = {value!r}"
        elif isinstance(value, FunctionType) and value.__module__ == function.__module__:
            found |= needed(value, known | {function.__name__}) | {name: renamed(value, name)}
        elif hasattr(value, "__module__") and hasattr(value, "__name__"):
            found[name] = f"from {value.__module__} import {value.__name__} as {name}"
    return found
