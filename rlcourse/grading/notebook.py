"""What the grader takes from a submitted notebook: which exercises it holds, and which of its cells to run."""

import ast
import importlib.util
import json
import re
from pathlib import Path

DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def read_notebook(path: Path) -> dict:
    """The notebook's JSON. Raises FileNotFoundError, or ValueError for a file that is no notebook."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no notebook {path}.")
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        cells = [(cell["cell_type"], source(cell)) for cell in notebook["cells"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{path} is not a Jupyter notebook.") from None
    if not all(isinstance(text, str) for _, text in cells):
        raise ValueError(f"{path} is not a Jupyter notebook.")
    return notebook


def source(cell: dict) -> str:
    """A cell's text, which a notebook may keep as lines."""
    return cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])


def checks_module(notebook: dict, path: Path) -> str:
    """The module of `rlcourse.checks` that belongs to a notebook, such as "nb02".

    Found by the notebook's metadata, else by its import of the checks, else by its file name. Raises ValueError.
    """
    metadata = notebook.get("metadata")
    named = metadata.get("rlcourse", {}) if isinstance(metadata, dict) else {}
    text = "\n".join(source(cell) for cell in notebook["cells"] if cell["cell_type"] == "code")
    found = [
        re.match(r"(\d\d)_", str(named.get("name", "")) if isinstance(named, dict) else ""),
        re.search(r"^from rlcourse\.checks import nb(\d\d)\b", text, re.MULTILINE),
        re.match(r"(\d\d)_", path.name),
    ]
    numbers = [match[1] for match in found if match]
    if numbers and importlib.util.find_spec(f"rlcourse.checks.nb{numbers[0]}") is not None:
        return f"nb{numbers[0]}"
    raise ValueError(f"{path} is not an exercise notebook of the course: no checks belong to it.")


def student_cells(notebook: dict) -> list[str]:
    """The code to run: cells tagged `exercise` whole, of the others imports, definitions and constants alone.

    Lines of IPython's own (`%pip`, `!ls`) are left out.
    """
    kept = []
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        lines = source(cell).split("\n")
        text = "\n".join("pass" if line.lstrip().startswith(("%", "!")) else line for line in lines)
        kept.append(text if "exercise" in tags(cell) else definitions(text))
    return kept


def tags(cell: dict) -> list:
    metadata = cell.get("metadata")
    found = metadata.get("tags", []) if isinstance(metadata, dict) else []
    return found if isinstance(found, list) else []


def definitions(text: str) -> str:
    """The imports, definitions and constants of a cell; all of one that cannot be parsed, for its error's sake."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text
    kept = [node for node in tree.body if isinstance(node, DEFINITIONS) or is_constant(node)]
    tree.body = [node for node in kept if not is_of_the_course(node)]
    return ast.unparse(tree)


def is_of_the_course(node: ast.stmt) -> bool:
    """Whether a statement imports `rlcourse`, which the worker does not have: every notebook does, for its checks."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    return any(name.split(".")[0] == "rlcourse" for name in names)


def is_constant(node: ast.stmt) -> bool:
    """Whether a statement gives a name to a number, a text or a list of those."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return False
    try:
        ast.literal_eval(node.value)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True
