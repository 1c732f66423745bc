"""Ways in which people write a right answer in a notebook: all of them earn their points."""

from pathlib import Path

import nbformat
import pytest
from submissions import IMPORTS, catalogue, many, write
from thorough import thinned

from rlcourse.course.grading import isolation, report
from rlcourse.course.grading.grade import grade
from rlcourse.sandbox.process import GUARD

DOUBLE = "def double(x):\n    return x + x"
RIGHT = catalogue("right", answer=DOUBLE) | {"Windows line ends": [DOUBLE.replace("\n", "\r\n")]}


@pytest.mark.thorough
@pytest.mark.parametrize("way", [isolation.way()[0], GUARD])
def test_right_answers_of_every_kind_earn_their_points(way, tmp_path, monkeypatch):
    monkeypatch.setattr(isolation, "way", lambda: (way, "as the test wants it"))
    path, asked = many(tmp_path, RIGHT)
    result = grade(path)
    failed = {asked[r.question]: r.cases[0].message for r in result.results if r.question in asked and not r.passed}
    assert not failed, failed


def test_what_is_left_out_is_said(tmp_path):
    cells = [IMPORTS.format(number=91), *RIGHT["output of a command"], "check.q1(double)"]
    result = grade(write(tmp_path / "91_command.ipynb", cells))
    assert result.score == 2 and "code cell 2: not run: files = !ls" in report.as_text(result)


def test_cells_that_run_the_interpreter_are_skipped(tmp_path):
    """Even where it is installed among the libraries: the grader runs kernels, not the notebook."""
    cells = ["import sys\nassert sys.modules['ptx_interpreter'] is None"]
    cells += ["from rlcourse.kernels.toolchain import simulate", "report = simulate(None)", "print(report)"]
    result = grade(write(tmp_path / "91_kernels.ipynb", [*cells, *PLACES["the check cell is gone"]]))
    assert result.score == 2 and result.errors == []


PLACES = {
    "the check cell is gone": ["import torch", DOUBLE],
    "the checks are imported by name": ["from rlcourse.course.checks.nb91 import q1", DOUBLE, "q1(double)"],
    "the checks are imported whole": ["import rlcourse.course.checks.nb91 as check", DOUBLE, "check.q1(double)"],
    "all in one cell": [IMPORTS.format(number=91) + "\n" + DOUBLE + "\ncheck.q1(double)"],
    "another answer ended the process before": [
        IMPORTS.format(number=91), "import os\nos._exit(0)", DOUBLE, "check.q1(double)",
    ],
}  # fmt: skip


@pytest.mark.parametrize("place", thinned(PLACES, every=5))
def test_a_right_answer_is_found_wherever_it_is_checked(place, tmp_path):
    assert grade(write(tmp_path / "91_place.ipynb", PLACES[place])).score == 2


SOLUTIONS = sorted((Path(__file__).parents[3] / "solutions").glob("*.ipynb"))


@pytest.mark.parametrize("path", thinned(SOLUTIONS, every=len(SOLUTIONS)), ids=lambda path: path.name)
def test_the_solutions_earn_every_point(path):
    result = grade(path)
    assert result.score == result.possible > 0, report.as_text(result)
    assert not result.errors, result.errors
    assert len(nbformat.read(path, as_version=4).cells) > 10
