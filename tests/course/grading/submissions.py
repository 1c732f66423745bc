"""Notebooks as readers hand them in, for the tests of the grader."""

import os
import pickle
import re
from pathlib import Path

import nbformat

from rlcourse.course.grading.worker import within
from rlcourse.sandbox.wire import decode

IMPORTS = "import torch\nfrom rlcourse.course.checks import nb{number} as check"


def catalogue(name: str, answer: str = "") -> dict[str, list[str]]:
    """The cells of each kind in a text file: a kind begins with `=== NAME`, its cells are separated by `---`.

    answer: what follows in the last cell of a kind that has none: that never says `double` or CHECK.
    """
    text = Path(__file__).with_name(f"{name}.txt").read_text(encoding="utf-8")
    found = {}
    for part in re.split(r"^=== ", text, flags=re.MULTILINE)[1:]:
        kind, _, body = part.partition("\n")
        missing = "\n" + answer if answer and not re.search("double|CHECK", body) else ""
        found[kind] = (body.rstrip("\n") + missing).split("\n---\n")
    return found


def write(path: Path, cells: list[str]) -> Path:
    """A notebook of these code cells."""
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells]), path)
    return path


def many(
    folder: Path, kinds: dict[str, list[str]], start: str = "", number: int = 92, function: str = "double"
) -> tuple[Path, dict[str, str]]:
    """A notebook in which every kind of answer has its own cells, names and question; and the kind of each question.

    start: what all of them share; number, function: of the check module, and what all of its questions ask for.
    """
    cells, asked = ["\n".join([IMPORTS.format(number=number), start, "KEPT = {*globals(), 'KEPT'}"])], {}
    forget = "for name in set(globals()) - KEPT:\n    del globals()[name]"
    for question, (kind, texts) in ((f"q{i}", entry) for i, entry in enumerate(kinds.items(), 1)):
        asked[question] = kind
        cells.append(forget)
        cells += [text.replace("CHECK", f"check.{question}") for text in texts]
        if not any("CHECK" in text for text in texts):
            cells.append(f"check.{question}({function})")
    return write(folder / f"{number}_many.ipynb", [*cells, forget]), asked


class Loopback:
    """A worker in this process: the same bytes both ways, the same calls, {kind: function}."""

    alive = True

    def __init__(self, calls):
        self.calls = calls

    def ask(self, request, seconds):
        kind, left, arguments, options = pickle.loads(pickle.dumps(request))
        return decode(within(left, self.calls[kind], *arguments, **options))


def workers(grader: int | None = None) -> dict[int, str]:
    """Numbers and command lines of the processes that run a notebook's code for a grader, this process by default, or
    are left without a parent. Other graders may be at work on this machine."""
    lines, parents = {}, {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            lines[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            parents[int(place.name)] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {process for process, line in lines.items() if "rlcourse.course.grading.worker" in line}

    def owner(process: int) -> int:
        parent = parents.get(process, 1)
        return owner(parent) if parent in found else parent

    return {process: lines[process][:200] for process in found if owner(process) in (grader or os.getpid(), 1)}
