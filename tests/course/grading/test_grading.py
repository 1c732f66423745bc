"""What a submission can do wrong: it earns nothing for that question, and the others are graded all the same."""

import csv
import xml.etree.ElementTree as ElementTree

import nbformat
import pytest
from submissions import IMPORTS, write
from thorough import thinned
from typer.testing import CliRunner

from rlcourse.cli import app
from rlcourse.course.grading import report, student
from rlcourse.course.grading.grade import grade, grade_folder

RIGHT = {"q1": "def double(x):\n    return x + x", "q2": "def square(x):\n    return x ** 2"}


def submission(folder, *answers, other=(), name="90_try.ipynb"):
    """A notebook as a reader hands it in: an answer to q1, and one to q2."""
    start = "%pip install something\nfrom rlcourse.course import start\nstart('0.1.0')"
    imports = IMPORTS.format(number=name[:2]) if name[0] == "9" else "import torch"
    cells = [start, imports, *other]
    for answer, check in zip(answers, ("check.q1(double)", "check.q2(square)"), strict=False):
        cells += [answer, check if name[0] == "9" else ""]
    return write(folder / name, cells)


ALONE = "91_alone.ipynb"


def scores(result):
    return [r.score for r in result.results]


BAD = {
    "a hole": ("def double(x):\n    raise NotImplementedError", "not implemented yet"),
    "a usual mistake": ("def double(x):\n    return x * x", "You squared it."),
    "a syntax error": ("def double(x:\n    return x + x", "`double` is not defined; code cell 3: SyntaxError"),
    "too much memory": ("def double(x):\n    return torch.zeros(10**12)", "RuntimeError"),
    "a result too large": ("def double(x):\n    return torch.zeros(3 * 10**8, dtype=torch.int8)", "too large"),
    "a patched library": (
        "torch.allclose = torch.equal = lambda *a, **k: True\ndef double(x):\n    return x * 0",
        "the result is",
    ),
    "overwritten checks": (
        "class Question:\n    passed = True\nclass check:\n    q1 = lambda f: 'PASSED'\ndef double(x):\n    return x",
        "the result is",
    ),
    "an object that equals everything": (
        "class Yes:\n    shape = (5,)\n    __eq__ = lambda *a: True\n    __array__ = lambda *a, **k: 1\n"
        "def double(x):\n    return Yes()",
        "the result is Yes, expected a tensor or a number",
    ),
    "the reference, imported": (
        "from rlcourse.course.checks import nb90\ndef double(x):\n    return nb90.torch.add(x, x)",
        "module 'rlcourse.course.checks.nb90' has no attribute 'torch'",
    ),
    "the package, imported late": (
        "def double(x):\n    import rlcourse.losses\n    return x + x",
        "rlcourse.losses is not there while grading",
    ),
}


@pytest.mark.parametrize("bad", thinned(BAD, every=6))
def test_a_bad_answer_earns_nothing_and_stops_nothing(bad, tmp_path):
    cell, sentence = BAD[bad]
    result = grade(submission(tmp_path, cell, RIGHT["q2"]))
    assert scores(result) == [0, 2], report.as_text(result)
    assert sentence in result.results[0].cases[0].message


@pytest.mark.thorough
def test_an_endless_loop_in_a_cell_is_stopped_and_the_other_cells_run(tmp_path, monkeypatch):
    monkeypatch.setattr(student, "CELL_SECONDS", 2)
    result = grade(submission(tmp_path, "while True: pass\n" + RIGHT["q1"], RIGHT["q2"]))
    assert scores(result) == [2, 2] and "a loop that never ends" in result.errors[0]


@pytest.mark.thorough
def test_what_a_function_does_to_its_arguments_does_not_reach_the_test(tmp_path):
    result = grade(submission(tmp_path, "def double(x):\n    x *= 0\n    return x", RIGHT["q2"]))
    assert scores(result) == [0, 2]


@pytest.mark.thorough
def test_the_seed_decides_the_random_inputs(tmp_path):
    path = submission(tmp_path, "def double(x):\n    return 0 * x + 7", name=ALONE)
    reports = [grade(path, seed=seed) for seed in (1, 1, None)]
    messages = [report.results[0].cases[0].message for report in reports]
    assert messages[0] == messages[1] != messages[2]
    assert reports[2].seed not in (None, 1)


@pytest.mark.thorough
def test_hidden_tests_count_and_do_not_tell(tmp_path):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "nb91.py").write_text(
        "import torch\nfrom rlcourse.course.checks.nb91 import q1\nfrom rlcourse.course.checks import compare\n"
        "@q1.case('zero', points=3, hidden=True)\ndef _(f):\n    compare(f(torch.zeros(2)), torch.zeros(2))\n"
    )
    path = submission(tmp_path, "def double(x):\n    return x + x if x.any() else x + 1", name=ALONE)
    result = grade(path, hidden=hidden)
    assert [r.possible for r in result.results] == [5] and scores(result) == [2]
    assert "a hidden test" in report.as_text(result) and "[1.0, 1.0]" not in report.as_text(result)
    assert scores(grade(path, hidden=hidden)) == [2]  # added once
    (hidden / "nb91.py").write_text("import sys; sys.exit(0)")
    with pytest.raises(ValueError, match=r"The hidden tests in .* fail"):
        grade(path, hidden=hidden)
    assert [r.possible for r in grade(path).results] == [2]  # the public questions are what they were


def test_what_the_command_prints_and_writes_says_the_same(tmp_path):
    path = submission(tmp_path, BAD["a usual mistake"][0], RIGHT["q2"])
    done = CliRunner().invoke(app, ["grade", str(path), "--seed", "3", "--junit", str(tmp_path / "r.xml")])
    assert done.exit_code == 0 and "2 of 4 points, seed 3" in done.output
    [suite] = ElementTree.parse(tmp_path / "r.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("3", "1")
    assert [c.find("failure").text for c in suite if c.find("failure") is not None] == ["You squared it."]


def test_a_class_is_a_line_a_submission(tmp_path):
    folder = tmp_path / "class"
    folder.mkdir()
    submission(folder, RIGHT["q1"], RIGHT["q2"], name="90_anna.ipynb")
    submission(folder, RIGHT["q1"], name="90_ben.ipynb")
    (folder / "carl.ipynb").write_text("no notebook")
    report.write_csv(list(grade_folder(folder)), tmp_path / "grades.csv")
    lines = list(csv.DictReader((tmp_path / "grades.csv").open()))
    assert [(line["submission"], line["nb90 q1"], line["total"]) for line in lines] == [
        ("90_anna.ipynb", "2", "4"),
        ("90_ben.ipynb", "2", "2"),
        ("carl.ipynb", "", "0"),
    ]
    assert "is not a Jupyter notebook" in lines[2]["errors"]
    with pytest.raises(ValueError, match="There is no notebook"):
        list(grade_folder(tmp_path / "checks"))


def test_a_row_is_written_before_its_line_is_printed(tmp_path, monkeypatch):
    def closed(*_, **__):
        raise BrokenPipeError

    (tmp_path / "91_broken.ipynb").write_text("")
    monkeypatch.setattr("builtins.print", closed)
    with pytest.raises(BrokenPipeError):
        report.run_grade(tmp_path, csv_file=tmp_path / "grades.csv")
    assert len((tmp_path / "grades.csv").read_text().splitlines()) == 2


def test_the_checks_are_found_by_metadata_then_import_then_name(tmp_path):
    path = submission(tmp_path, RIGHT["q1"], name="mine.ipynb")
    with pytest.raises(ValueError, match="is not an exercise notebook of the course"):
        grade(path)
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata["rlcourse"] = {"name": "91_alone"}
    nbformat.write(notebook, path)
    assert scores(grade(path)) == [2]
    notebook.metadata["rlcourse"]["kind"] = "notebooks"
    nbformat.write(notebook, path)
    with pytest.raises(ValueError, match=r"is a lesson: its exercises are in exercises/mine\.ipynb"):
        grade(path)
    imported = "from rlcourse.course.checks import nb91 as check"
    assert scores(grade(submission(tmp_path, RIGHT["q1"], other=[imported], name="mine.ipynb"))) == [2]
