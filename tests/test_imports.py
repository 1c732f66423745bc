"""The modules of the package import each other in one direction."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def modules() -> dict[str, Path]:
    """The package's modules by name."""
    paths = (ROOT / "rlcourse").rglob("*.py")
    return {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}


def imported(source: str, names: set[str]) -> set[str]:
    """Those of `names` that a source imports anywhere, within functions and for types alone, too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner if inner <= names else inner | {node.module}
    return found & names


def check(sources: dict[str, str]) -> None:
    """Raise CycleError, which names the modules, if they import each other in a circle."""
    TopologicalSorter({name: imported(source, set(sources)) for name, source in sources.items()}).prepare()


def test_no_modules_import_each_other_in_a_circle():
    check({name: path.read_text(encoding="utf-8") for name, path in modules().items()})


def test_a_circle_is_found_within_functions_and_for_types():
    with pytest.raises(CycleError):
        check({"a": "def f():\n    from b import c", "b.c": "import d", "d": "if TYPE_CHECKING:\n    from a import f"})
