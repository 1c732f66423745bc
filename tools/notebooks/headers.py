"""The first two cells of every notebook: title, the badge that opens it in Colab, difficulty, what it takes to read and
to run; and the cell that installs the package.

Run time and memory are those of the run that made the notebook's outputs; `tools.notebooks.build` measures them.
"""

import math
import re

from nbformat import NotebookNode

from rlcourse import __version__
from rlcourse.course import REPOSITORY
from rlcourse.course.contents import COURSE, Lesson

BADGE = "https://colab.research.google.com/assets/colab-badge.svg"
TAG = f"v{__version__}"  # that notebooks install
WORDS_A_MINUTE, LINES_A_MINUTE = 150, 12  # of technical prose, and of code that is not folded away

# The second cell of every notebook. It changes nothing where the package is installed already.
BOOTSTRAP = f"""\
import importlib.util
if importlib.util.find_spec("rlcourse") is None:  # on Colab: the course alone, nothing that Colab ships is replaced
    %pip install --quiet --no-deps "rlcourse @ git+https://github.com/{REPOSITORY}@{TAG}"
from rlcourse.course import start
start("{__version__}")"""


def colab_url(path: str) -> str:
    """Where Colab opens a notebook of the repository."""
    return f"https://colab.research.google.com/github/{REPOSITORY}/blob/{TAG}/{path}"


def header(notebook: NotebookNode, run: dict) -> str:
    """Markdown of the first cell. run: as in `measured`.

    Raises ValueError for a notebook that `COURSE` does not list.
    """
    name, kind = notebook.metadata["rlcourse"]["name"], notebook.metadata["rlcourse"]["kind"]
    if name not in COURSE:
        raise ValueError(f"{name} is not part of the course yet: add it to COURSE in rlcourse/course/contents.py.")
    lesson = COURSE[name]
    path = f"{kind}/{name}.ipynb"
    title = f"# {name[:2]} · {lesson.title}" + ("" if kind == "notebooks" else f": {kind}")
    badge = f"[![Open in Colab]({BADGE})]({colab_url(path)}) [`{path}`](https://github.com/{REPOSITORY})"
    minutes = stated_minutes(notebook) if kind == "exercises" else reading_minutes(notebook)
    return f"{title}\n\n{badge}\n\n{measured(lesson, run, minutes, 'solve' if kind == 'exercises' else 'read')}"


def reading_minutes(notebook: NotebookNode) -> int:
    """Minutes that a reader needs for the words and for the code that is in view, to the next five."""
    words = lines = 0
    for cell in notebook.cells[2:]:  # behind the header and the cell that installs the package
        if cell.cell_type == "markdown":
            words += len(re.findall(r"\w+", cell.source))
        elif "source_hidden" not in cell.metadata.get("jupyter", {}):
            lines += sum(bool(line.strip()) for line in cell.source.splitlines())
    return 5 * math.ceil((words / WORDS_A_MINUTE + lines / LINES_A_MINUTE) / 5)


def stated_minutes(notebook: NotebookNode) -> int:
    """Minutes of all exercises, as each says: `●●○○○ · 10 minutes`."""
    text = "\n".join(cell.source for cell in notebook.cells[1:] if cell.cell_type == "markdown")
    return sum(map(int, re.findall(r"○* · (\d+) minutes", text)))


def measured(lesson: Lesson, run: dict, minutes: int, what: str) -> str:
    """A table of difficulty, the reader's minutes, and minutes and peak memory of a run.

    run: {seconds, peak_memory_bytes, device, date} of the run that made the outputs. what: what the reader does.
    """
    running = "under 1" if run["seconds"] < 60 else f"{run['seconds'] / 60:.0f}"
    memory = f"{run['peak_memory_bytes'] / 1e9:.1f} GB"
    dots = "●" * lesson.difficulty + "○" * (5 - lesson.difficulty)
    return (
        f"| difficulty | minutes to {what} | minutes to run on 2 CPU cores | on a T4 or an A10G | peak memory |\n"
        "| --- | --- | --- | --- | --- |\n"
        f"| {dots} | {minutes} | {running} | not measured | {memory} |\n\n"
        f"Run time and memory: one run of all cells on {run['device']}, {run['date']}."
    )
