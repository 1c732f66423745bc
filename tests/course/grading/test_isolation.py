"""What a notebook's process finds, and what the grader does where it cannot be isolated."""

import ast
import re
import sys
from pathlib import Path

import pytest
from submissions import IMPORTS, write

from rlcourse.course.checks import questions
from rlcourse.course.grading import isolation, report
from rlcourse.course.grading.grade import grade
from rlcourse.course.grading.isolation import VISIBLE
from rlcourse.course.grading.worker import TRAINING
from rlcourse.sandbox import process
from rlcourse.sandbox.process import BUBBLEWRAP, GUARD, NAMESPACES, PACKAGE

EXERCISES = sorted((PACKAGE.parent / "exercises" / "_src").glob("*.py"))
WAYS = [NAMESPACES, BUBBLEWRAP, GUARD]


def modules(path: Path) -> set[str]:
    """The modules of the course that a notebook imports."""
    found = set(re.findall(r"^\s*(?:from|import) (rlcourse[\w.]*)", path.read_text(), re.MULTILINE))
    return {name for name in found if not name.startswith("rlcourse.course.checks")}


@pytest.mark.parametrize("path", EXERCISES, ids=lambda path: path.stem)
def test_what_an_exercise_imports_is_there_while_grading(path):
    files = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in VISIBLE}
    assert {name.removeprefix("rlcourse.") for name in modules(path) - {TRAINING}} <= files


def test_nothing_that_is_there_while_grading_answers_a_question():
    asked = set()
    for path in EXERCISES:
        asked |= {question.function for question in questions(f"nb{path.name[:2]}")}
    for name in VISIBLE:
        tree = ast.parse((PACKAGE / name).read_text())
        assert not asked & {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}, (
            name
        )


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_start_a_process_grades(way, tmp_path, monkeypatch, temporary):
    if way != GUARD and (why := process.attempt(way, isolation.box(0))):
        pytest.skip(why)
    monkeypatch.setattr(isolation, "way", lambda: (way, "as the test wants it"))
    cells = [IMPORTS.format(number=90), "def double(x):\n    return x + x", "check.q1(double)"]
    cells += ["import os\ndef square(x):\n    os._exit(1)", "check.q2(square)"]
    result = grade(write(tmp_path / "90_way.ipynb", cells))
    assert [r.score for r in result.results] == [2, 0]
    assert ("Not isolated" in report.as_text(result)) == (way == GUARD)
    assert list(temporary.iterdir()) == []


def test_a_system_that_refuses_namespaces_is_named(monkeypatch):
    monkeypatch.setattr(process, "NAMESPACES_SCRIPT", "course/grading/report.py")  # stands for a refusal
    assert process.attempt(NAMESPACES, isolation.box(0)).startswith("namespaces: ")
    monkeypatch.setattr(process.shutil, "which", lambda name: None)
    assert process.attempt(BUBBLEWRAP, isolation.box(0)) == "bubblewrap is not installed"
    isolation.way.cache_clear()
    way, why = isolation.way()
    isolation.way.cache_clear()
    assert way == GUARD and "namespaces: " in why and "\n" not in why


def test_a_copy_of_the_package_among_the_libraries_is_hidden(tmp_path, monkeypatch):
    libraries = tmp_path / "site-packages"
    (libraries / "rlcourse").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [*sys.path, str(libraries)])
    read, hidden, _ = process.files()
    assert [str(libraries)] * 2 in read and str(libraries / "rlcourse") in hidden
    assert not any(source == str(PACKAGE.parent) or source == str(PACKAGE) for source, _ in read)
