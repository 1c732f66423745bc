"""Grade exercise notebooks: the reader's functions run in a process of their own, the tests in this one.

What comes back from that process is data, never code, so that nothing a notebook redefines, overwrites or patches
changes a verdict. A function that hangs or ends its process costs its question, never another one.

This is no sandbox: a notebook's code may do what its user may do, but for what `worker` refuses. Code that is hostile,
not merely wrong, belongs in a container. `rlcourse grade` is the command; `report` writes what it finds.
"""

import copy
import importlib
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rlcourse.course.checks import Question, Result
from rlcourse.course.grading.notebook import checks_module, read_notebook, student_cells
from rlcourse.course.grading.student import Remote, Student


@dataclass
class Report:
    """What one notebook earned. notebook: its check module; errors: a sentence for each cell that failed."""

    submission: str
    notebook: str
    seed: int
    results: list[Result] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def score(self) -> float:
        return sum(result.score for result in self.results)

    @property
    def possible(self) -> float:
        return sum(result.possible for result in self.results)


def grade(path: Path, hidden: Path | None = None, seed: int | None = None, memory_gb: float = 2.0) -> Report:
    """Grade one notebook.

    hidden: a folder whose `nbNN.py` adds cases to the questions of that notebook. seed: of the random inputs; drawn
    anew if not given. memory_gb: what the notebook may take beyond what the libraries take. Raises ValueError or
    FileNotFoundError in one sentence for what is no exercise notebook, and for hidden cases that are not there.
    """
    if os.name == "nt":
        raise OSError("Grading needs Linux or macOS: on Windows, run it in WSL.")
    start = time.perf_counter()
    notebook = read_notebook(path)
    name = checks_module(notebook, path)
    questions = load_questions(name, hidden)
    seed = new_seed() if seed is None else seed
    report = Report(printable(str(path)), name, seed)
    student = Student(student_cells(notebook), seed, int(memory_gb * 1e9))
    try:
        for question in questions:
            student.start()
            report.results.append(question.run(Remote(student, question.function), seed))
        report.errors = [printable(error) for error in student.errors]
    finally:
        student.close()
    report.seconds = time.perf_counter() - start
    return report


def new_seed() -> int:
    return random.SystemRandom().randrange(2**31)


def printable(text: str) -> str:
    """A text of somebody else's, at most 1000 characters of it, without those that steer a terminal or break XML."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text[:1000])


def load_questions(name: str, hidden: Path | None) -> list[Question]:
    """The questions of a check module with the cases that `hidden/nbNN.py` adds: `@q1.case(..., hidden=True)`.

    The module itself stays as it is. Raises FileNotFoundError without such a file, ValueError if it fails.
    """
    questions = list(importlib.import_module(f"rlcourse.course.checks.{name}").QUESTIONS.values())
    public = [list(question.cases) for question in questions]
    try:
        if hidden is not None:
            add_hidden_cases(hidden / f"{name}.py")
        found = [copy.copy(question) for question in questions]
        for question in found:
            question.cases = list(question.cases)
        return found
    finally:
        for question, cases in zip(questions, public, strict=True):
            question.cases[:] = cases


def add_hidden_cases(file: Path) -> None:
    if not file.is_file():
        raise FileNotFoundError(f"There are no hidden tests at {file}.")
    try:
        exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), {"__name__": f"hidden_{file.stem}"})
    except Exception as error:
        raise ValueError(f"The hidden tests in {file} fail: {type(error).__name__}: {error}") from None


def grade_folder(folder: Path, hidden: Path | None = None, seed: int | None = None, **options) -> Iterator[Report]:
    """Grade every notebook in a folder and the folders in it, by name, all with one seed.

    One that cannot be graded earns nothing, and its report says why. Raises ValueError for a folder without notebooks,
    FileNotFoundError where `hidden` is no folder.
    """
    notebooks = sorted(path for path in folder.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
    if not notebooks:
        raise ValueError(f"There is no notebook (.ipynb) in {folder}.")
    if hidden is not None and not hidden.is_dir():
        raise FileNotFoundError(f"There is no folder {hidden} of hidden tests.")
    seed = new_seed() if seed is None else seed
    for path in notebooks:
        try:
            report = grade(path, hidden, seed, **options)
        except Exception as error:  # whatever a notebook holds, those behind it are graded
            report = Report("", "", seed, errors=[printable(str(error) or type(error).__name__)])
        report.submission = printable(str(path.relative_to(folder)))
        yield report
