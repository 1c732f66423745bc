"""What the grader takes from a submitted notebook: which exercises it holds, and which of its cells to run.

The file is read as JSON and nothing in it is trusted. Its code is not even parsed here, but by the worker.
"""

import importlib.util
import json
import re
from pathlib import Path
from typing import NamedTuple

MAX_BYTES = 50_000_000  # of a notebook


class Cell(NamedTuple):
    """A code cell. number: its place among the code cells, from 1; whole: whether it is an exercise."""

    number: int
    source: str
    whole: bool


def read_notebook(path: Path) -> dict:
    """The notebook's JSON. Raises FileNotFoundError, or ValueError for a file that is no notebook."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no notebook {path}.")
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} is over {MAX_BYTES // 1_000_000} MB: clear its outputs.")
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        student_cells(notebook)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is not a Jupyter notebook.") from None
    return notebook


def student_cells(notebook: dict) -> list[Cell]:
    """The code cells. Those tagged `exercise` are run whole, of the others only imports and definitions."""
    found = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [Cell(number, source(cell), "exercise" in tags(cell)) for number, cell in enumerate(found, 1)]


def source(cell: dict) -> str:
    """The text of a cell, which a notebook may keep as lines."""
    return cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])


def tags(cell: dict) -> list:
    found = cell.get("metadata", {}).get("tags", [])
    return found if isinstance(found, list) else []


def checks_module(notebook: dict, path: Path) -> str:
    """The module of `rlcourse.course.checks` that belongs to a notebook, such as "nb02".

    Found by the notebook's metadata, else by its import of the checks, else by its file name. Raises ValueError.
    """
    metadata = notebook.get("metadata")
    named = metadata.get("rlcourse") if isinstance(metadata, dict) else None
    name = str(named.get("name", "")) if isinstance(named, dict) else ""
    text = "\n".join(cell.source for cell in student_cells(notebook))
    found = [
        re.match(r"([0-9]{2})_", name),
        re.search(r"^from rlcourse\.course\.checks import nb([0-9]{2})\b", text, re.MULTILINE),
        re.match(r"([0-9]{2})_", path.name),
    ]
    for module in [f"nb{match[1]}" for match in found if match]:
        if importlib.util.find_spec(f"rlcourse.course.checks.{module}") is not None:
            return module
    raise ValueError(
        f"{path} is not an exercise notebook of the course: neither its metadata, nor an import of "
        "rlcourse.course.checks, nor its name says which."
    )
