"""Building notebooks: an exercise gets holes, a rebuild changes nothing, and numbers in the prose are the kernel's."""

import sys
from pathlib import Path

import nbformat
import pytest

from tools.notebooks import build

NAME = "01_policy_gradient"
EXERCISE = """\
# %% tags=["exercise"]
def double(x):
    # BEGIN SOLUTION
    return 2 * x
    # END SOLUTION

# %%
print(double(4))
"""
LESSON = """\
# %%
import os, sys
print(sys.executable, os.environ["RLCOURSE_STATIC"], os.environ["RLCOURSE_STRICT"])
x = 3

# %% [markdown]
# It is {{ x }}, which is odd. {{ assert x % 2 == 1 }} Not $\\binom{n}{{k}}$.

# %% tags=["gpu"]
raise SystemExit("there is no GPU")
"""


@pytest.fixture
def master(tmp_path, monkeypatch):
    """A repository of its own. `master(kind, text)` writes a master and returns its path."""
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "BOOTSTRAP", "pass")
    monkeypatch.setattr(build.torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("RLCOURSE_PROFILE", raising=False)

    def write(kind: str, text: str) -> Path:
        path = tmp_path / kind / "_src" / f"{NAME}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


@pytest.fixture
def runs(monkeypatch):
    """In place of a kernel: every cell that runs prints how many runs there were. Returns the list of runs."""
    seen = []

    def execute(notebook, left_out, root):
        seen.append(notebook)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.execution_count, cell.outputs = 1, [nbformat.v4.new_output("stream", text=f"run {len(seen)}\n")]
        run = {"seconds": 70, "peak_memory_bytes": 10**9, "device": "CPU Test", "date": "2026-01-01"}
        return {"run": run | {"profile": build.profile()}, "values": {"x": "3"}}

    monkeypatch.setattr(build, "execute", execute)
    return seen


def read(root: Path, kind: str) -> list:
    return nbformat.read(root / kind / f"{NAME}.ipynb", as_version=4).cells


def test_exercises_have_holes_and_no_outputs(master, runs, tmp_path):
    path = master("exercises", EXERCISE)
    build.build(path)
    exercise, solution = read(tmp_path, "exercises"), read(tmp_path, "solutions")
    assert exercise[2].source == "def double(x):\n    # YOUR CODE HERE\n    raise NotImplementedError"
    assert solution[2].source == "def double(x):\n    return 2 * x"
    assert all(not cell.get("outputs") for cell in exercise) and solution[3].outputs[0].text == "run 1\n"
    path.write_text(EXERCISE.replace("    # END SOLUTION\n", ""))
    with pytest.raises(ValueError, match="BEGIN SOLUTION and END SOLUTION must come in pairs"):
        build.assemble(path, "exercises")


def test_a_rebuild_without_a_change_runs_nothing_and_is_byte_identical(master, runs, tmp_path):
    paths = [master("notebooks", LESSON), master("exercises", EXERCISE)]
    for path in paths:
        build.build(path)
    before = {path: path.read_bytes() for path in tmp_path.glob("*/*.ipynb")}
    for path in paths:
        build.build(path)
    assert len(before) == 3 and len(runs) == 2
    assert {path: path.read_bytes() for path in tmp_path.glob("*/*.ipynb")} == before


def test_a_kernel_runs_the_lesson_and_a_false_sentence_stops_the_build(master, tmp_path):
    [note] = build.build(master("notebooks", LESSON))
    assert "no output of a GPU" in note
    cells = read(tmp_path, "notebooks")
    assert cells[2].outputs[0].text.split() == [sys.executable, "1", "1"]
    assert cells[3].source == "It is 3, which is odd. Not $\\binom{n}{{k}}$."
    with pytest.raises(Exception, match="The text says what is no longer so: x % 2 == 1"):
        build.build(master("notebooks", LESSON.replace("x = 3", "x = 4")))
