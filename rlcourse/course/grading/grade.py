"""Grade one exercise notebook, or a folder of them. On Linux a notebook's code runs where there is nothing to steal or
to break (`isolation`). Elsewhere the report says what is not isolated: hostile code belongs in a container there. The
file is read as JSON and nothing in it is trusted: its code is not even parsed here, but by the worker."""

import copy
import importlib.util
import json
import os
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import starmap
from pathlib import Path
from typing import Any

from rlcourse.course.calls import OutOfTime
from rlcourse.course.checks import Question, Result, questions
from rlcourse.course.grading import isolation
from rlcourse.course.grading.student import Cell, Run
from rlcourse.sandbox.process import GUARD
from rlcourse.settings import MEMORY_GB

MAX_BYTES = 50_000_000  # of a notebook
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
    name, cells = read_notebook(path)
    report = Report(printable(str(path)), name, new_seed() if seed is None else seed)
    asked = load_questions(name, hidden)
    kernels = [question for question in asked if question.caller.kernels]
    way, why = isolation.way()
    if way == GUARD:
        report.notes.append(isolation.MISSING.format(why=why))
    missing = no_kernels(way) if kernels else ""
    if missing:
        names = ", ".join(f"{question.name} {question.function}" for question in kernels)
        report.notes.append(f"Not graded: {names}: {missing}.")
        asked = [question for question in asked if question not in kernels]
    setup = {"seed": report.seed, "module": name, "memory_bytes": int(memory_gb * 1e9)}
    setup |= {"kernels": bool(kernels) and not missing, "checks": [question.name for question in asked]}
    setup |= {"ungraded": [question.name for question in kernels] if missing else []}
    run = Run(cells, asked, way, setup)
    run.run()
    report.results = [run.results[question.name] for question in asked]
    errors = [printable(error) for error in run.errors()]
    more = [f"and {len(errors) - MOST_ERRORS} more"] if len(errors) > MOST_ERRORS else []
    report.errors = [*errors[:MOST_ERRORS], *more]
    return report


def read_notebook(path: Path) -> tuple[str, list[Cell]]:
    """A notebook's module of checks, such as "nb02", and its code cells. Raises FileNotFoundError, or ValueError for
    what is no exercise notebook."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no notebook {path}.")
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} is over {MAX_BYTES // 1_000_000} MB: clear its outputs.")
    try:
        notebook = json.loads(path.read_text(encoding="utf-8-sig"))
        sources = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is not a Jupyter notebook.") from None
    return checks_module(notebook.get("metadata"), "\n".join(sources), path), list(starmap(Cell, enumerate(sources, 1)))


def checks_module(metadata: Any, text: str, path: Path) -> str:
    """The module of checks that belongs to a notebook: by its metadata, else by its import of the checks in the text of
    its cells, else by its file name. Raises ValueError."""
    named = metadata.get("rlcourse") if isinstance(metadata, dict) else None
    named = named if isinstance(named, dict) else {}
    if named.get("kind") == "notebooks":
        raise ValueError(f"{path} is a lesson: its exercises are in exercises/{path.name}.")
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
