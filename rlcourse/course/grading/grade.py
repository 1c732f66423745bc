"""Grade one exercise notebook, or a folder of them. On Linux a notebook's code runs where there is nothing to steal or
to break (`isolation`). Elsewhere the report says what is not isolated: hostile code belongs in a container there."""

import copy
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rlcourse.course.calls import OutOfTime
from rlcourse.course.checks import Question, Result, questions
from rlcourse.course.grading import isolation
from rlcourse.course.grading.notebook import checks_module, read_notebook, student_cells
from rlcourse.course.grading.student import Run
from rlcourse.sandbox.process import GUARD
from rlcourse.settings import MEMORY_GB

MOST_ERRORS = 50  # that a report lists


@dataclass
class Report:
    """What one notebook earned. notebook: its check module; errors: a sentence for each cell that failed."""

    submission: str
    notebook: str
    seed: int
    results: list[Result] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def score(self) -> float:
        return sum(result.score for result in self.results)

    @property
    def possible(self) -> float:
        return sum(result.possible for result in self.results)


def grade(path: Path, hidden: Path | None = None, seed: int | None = None, memory_gb: float = 2.0) -> Report:
    """Grade one notebook. hidden: a folder whose `nbNN.py` adds cases. seed: of the random inputs; drawn anew if not
    given. memory_gb: what the notebook may take beyond the libraries. Raises ValueError or FileNotFoundError for what
    is no exercise notebook, and for hidden cases that are not there."""
    check_possible(memory_gb)
    start = time.perf_counter()
    notebook = read_notebook(path)
    name, cells = checks_module(notebook, path), student_cells(notebook)
    report = Report(printable(str(path)), name, new_seed() if seed is None else seed)
    asked = load_questions(name, hidden)
    kernels = [question for question in asked if question.caller.kernels]
    way, why = isolation.way()
    setup = {"seed": report.seed, "module": name, "memory_bytes": int(memory_gb * 1e9), "kernels": bool(kernels)}
    setup["ungraded"] = []
    if way == GUARD:
        report.notes.append(isolation.MISSING.format(why=why))
    if kernels and (missing := no_kernels(way)):
        names = ", ".join(f"{question.name} {question.function}" for question in kernels)
        report.notes.append(f"Not graded: {names}: {missing}.")
        asked = [question for question in asked if question not in kernels]
        setup |= {"kernels": False, "ungraded": [question.name for question in kernels]}
    setup["checks"] = [question.name for question in asked]
    run = Run(cells, asked, way, setup)
    run.run()
    report.results = [run.results[question.name] for question in asked]
    errors = [printable(error) for error in run.errors()]
    more = [f"and {len(errors) - MOST_ERRORS} more"] if len(errors) > MOST_ERRORS else []
    report.errors = [*errors[:MOST_ERRORS], *more]
    report.seconds = time.perf_counter() - start
    return report


def check_possible(memory_gb: float) -> None:
    """Raise OSError or ValueError, in one sentence, where nothing can be graded."""
    if os.name == "nt":
        raise OSError("Grading needs Linux or macOS: on Windows, run it in WSL.")
    MEMORY_GB.check("--memory", memory_gb)


def new_seed() -> int:
    return random.SystemRandom().randrange(2**31)


def printable(text: str) -> str:
    """Somebody else's text on one line, at most 1000 characters, without those that steer a terminal, break XML, or
    look like the next line of a report."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text[:1000])


def no_kernels(way: str) -> str:
    """Why kernels cannot be graded here; '' if they can."""
    from rlcourse.kernels import dsl  # which loads the compiler

    if not dsl.INSTALLED:
        return "kernels need CuTe DSL, which is not installed here (pip install 'rlcourse[kernels]')"
    if way == GUARD:
        return "the compiler of kernels runs in an isolated process alone, and there is none here"
    return ""


def load_questions(name: str, hidden: Path | None) -> list[Question]:
    """The questions of a check module, with the cases that `hidden/nbNN.py` adds by `@q1.case(..., hidden=True)`; the
    module itself stays as it is. Raises FileNotFoundError without such a file, ValueError if it fails."""
    asked = questions(name)
    public = [list(question.cases) for question in asked]
    try:
        if hidden is not None:
            add_hidden_cases(hidden / f"{name}.py")
        return copy.deepcopy(asked)
    finally:
        for question, cases in zip(asked, public, strict=True):
            question.cases[:] = cases


def add_hidden_cases(file: Path) -> None:
    if not file.is_file():
        raise FileNotFoundError(f"There are no hidden tests at {file}.")
    try:
        exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), {"__name__": f"hidden_{file.stem}"})
    except (Exception, SystemExit) as error:
        raise ValueError(f"The hidden tests in {file} fail: {type(error).__name__}: {error}") from None


def grade_folder(folder: Path, hidden: Path | None = None, seed: int | None = None, **options) -> Iterator[Report]:
    """Grade every notebook in a folder and those in it, by name, all with one seed. One that cannot be graded earns
    nothing, and its report says why. Raises ValueError for a folder without notebooks, FileNotFoundError where `hidden`
    is no folder."""
    check_possible(options.get("memory_gb", 2.0))
    notebooks = sorted(path for path in folder.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
    if not notebooks:
        raise ValueError(f"There is no notebook (.ipynb) in {folder}.")
    if hidden is not None and not hidden.is_dir():
        raise FileNotFoundError(f"There is no folder {hidden} of hidden tests.")
    seed = new_seed() if seed is None else seed
    for path in notebooks:
        try:
            if path.is_symlink():
                raise ValueError(f"{path} is a link: it may lead to somebody else's notebook.")
            report = grade(path, hidden, seed, **options)
        except (Exception, OutOfTime) as error:  # whatever a notebook holds, those behind it are graded
            report = Report("", "", seed, errors=[printable(str(error) or type(error).__name__)])
        report.submission = printable(str(path.relative_to(folder)))
        yield report
