"""Check modules of the tests' own, in which every question asks for twice a number."""

import sys
import tempfile

import pytest

import rlcourse.course.checks

ONE = """
import torch
from rlcourse.course.checks import Question, compare

q1 = Question("q1", "double", hint="add it to itself", seconds=3)
@q1.case("random numbers", points=2)
def _(f):
    x = torch.randn(5)
    compare(f(x), 2 * x, {"You squared it.": x * x})
"""
CHECKS = f"""{ONE}
q2 = Question("q2", "square", hint="multiply it by itself", seconds=3)

@q2.case("random numbers")
def _(f):
    x = torch.randn(5)
    compare(f(x), x * x)

@q2.case("its gradient")
def _(f):
    x = torch.randn(5)
    compare(f.gradient(x), 2 * x)
"""
COPIES = """
import copy
for number in range(1, 100):
    globals()[f"q{number}"] = q = copy.copy(q1)
    q.name, q.seconds = f"q{number}", 5
"""
KERNELS = "from rlcourse.course.checks.nb08 import q1\n"


@pytest.fixture(autouse=True)
def checks(tmp_path, monkeypatch):
    """nb90 has two questions, nb91 the first alone, nb92 ninety-nine times; nb93 has 08's first kernel as often."""
    folder = tmp_path / "checks"
    folder.mkdir()
    names = {"nb90": CHECKS, "nb91": ONE, "nb92": ONE + COPIES, "nb93": KERNELS + COPIES}
    for name, text in names.items():
        (folder / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, f"rlcourse.course.checks.{name}", raising=False)
    monkeypatch.setattr(rlcourse.course.checks, "__path__", [*rlcourse.course.checks.__path__, str(folder)])
    yield
    for name in names:
        sys.modules.pop(f"rlcourse.course.checks.{name}", None)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A folder of its own for all temporary files, to see what is left behind."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder
