"""What the grader takes from a submitted notebook. The file is read as JSON and nothing in it is trusted. Its code is
not even parsed here, but by the worker."""

import importlib.util
import json
import re
from pathlib import Path
from typing import NamedTuple

MAX_BYTES = 50_000_000  # of a notebook


class Cell(NamedTuple):
    number: int  # its place among the code cells, from 1
    source: str


def read_notebook(path: Path) -> dict:
    """The notebook's JSON. Raises FileNotFoundError, or ValueError for a file that is no notebook."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no notebook {path}.")
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} is over {MAX_BYTES // 1_000_000} MB: clear its outputs.")
    try:
        notebook = json.loads(path.read_text(encoding="utf-8-sig"))
        student_cells(notebook)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is not a Jupyter notebook.") from None
    return notebook


def student_cells(notebook: dict) -> list[Cell]:
    found = [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [
        Cell(number, source if isinstance(source, str) else "".join(source)) for number, source in enumerate(found, 1)
    ]


def checks_module(notebook: dict, path: Path) -> str:
    """The module of checks that belongs to a notebook, such as "nb02": by its metadata, else by its import of the
    checks, else by its file name. Raises ValueError."""
    metadata = notebook.get("metadata")
    named = metadata.get("rlcourse") if isinstance(metadata, dict) else None
    named = named if isinstance(named, dict) else {}
    if named.get("kind") == "notebooks":
        raise ValueError(f"{path} is a lesson: its exercises are in exercises/{path.name}.")
    text = "\n".join(cell.source for cell in student_cells(notebook))
    found = [
        re.match(r"([0-9]{2})_", str(named.get("name", ""))),
        re.search(r"^[ \t]*from rlcourse\.course\.checks import nb([0-9]{2})\b", text, re.MULTILINE),
        re.match(r"([0-9]{2})_", path.name),
    ]
    for name in (f"nb{match[1]}" for match in found if match):
        if importlib.util.find_spec(f"rlcourse.course.checks.{name}") is not None:
            return name
    raise ValueError(
        f"{path} is not an exercise notebook of the course: neither its metadata, nor an import of "
        "rlcourse.course.checks, nor its name says which."
    )
