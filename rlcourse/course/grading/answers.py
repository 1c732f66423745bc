"""Where the course keeps its answers: what the guard refuses to open, and code that must not run in a notebook."""

import ast
import functools
import json
import os
import types
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rlcourse.course.grading.cells import statements
from rlcourse.course.grading.guard import digest
from rlcourse.course.grading.isolation import VISIBLE
from rlcourse.course.grading.notebook import student_cells
from rlcourse.sandbox.process import PACKAGE

MOST = 20_000  # files that are looked at
SHORT = 40  # bytes of code below which a function may well be written twice
BESIDE = ("solutions", "exercises", "notebooks", "tests")  # the package, in a clone of the repository


def files(private: Iterable[Path]) -> set[tuple[int, int]]:
    """(device, inode) of the course's files and folders and of those in the folders `private`."""
    found: set[tuple[int, int]] = set()
    beside = BESIDE if (PACKAGE.parent / "pyproject.toml").is_file() else ()
    for folder in [PACKAGE, *(PACKAGE.parent / name for name in beside), *private]:
        for place, _, names in os.walk(folder):
            for path in (place, *(os.path.join(place, name) for name in names)):
                with suppress(OSError):
                    status = os.stat(path)
                    found.add((status.st_dev, status.st_ino))
            if len(found) > MOST:
                break
    return found


@functools.cache
def digests() -> frozenset[tuple]:
    """Digests of the functions in the package, without those that the worker runs itself, and in the solutions."""
    visible = {PACKAGE / name for name in VISIBLE}
    sources = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if path not in visible]
    for path in (PACKAGE.parent / "solutions").glob("*.ipynb"):
        sources += [cell.source for cell in student_cells(json.loads(path.read_text(encoding="utf-8")))]
    return frozenset(digests_of(sources))


def digests_of(sources: list[str]) -> set[tuple]:
    """Digests of the functions that are defined in these texts, but for short ones."""
    found: set[tuple] = set()
    for source in sources:
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            inner = [compile(ast.Module([statement], []), "", "exec") for statement in statements(source)[0]]
            while inner:
                parts = [part for part in inner.pop().co_consts if isinstance(part, types.CodeType)]
                inner += parts
                named = [part for part in parts if not part.co_name.startswith(("__", "<"))]
                found |= {digest(part) for part in named if len(part.co_code) >= SHORT}
    return found
