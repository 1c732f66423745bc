"""Masters to notebooks: what each kind holds, that a rebuild changes nothing, what is run again and what is refused."""

import json
import os
import sys
from pathlib import Path

import nbformat
import pytest

from tools.notebooks import build, headers

NAME = "01_policy_gradient"

EXERCISE = '''\
# %% [markdown]
# Write a function.

# %% tags=["exercise"]
def double(x):
    """Twice x."""
    # BEGIN SOLUTION
    if x:
        return 2 * x
    return 0
    # END SOLUTION

# %%
print(double(4))

# %% tags=["exercise-only"]
print("only before")

# %% [markdown] tags=["solution"]
# Why it is so.
'''

LESSON = """\
# %% [markdown]
# A lesson.

# %%
x = 1
print(x)

# %% tags=["gpu"]
print("fast", x)
"""


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A repository of its own. `course(kind, text)` writes a master and returns its path."""
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "BOOTSTRAP", "pass")
    monkeypatch.setattr(build.torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("RLCOURSE_PROFILE", raising=False)
    return lambda kind, text: write_master(tmp_path, kind, text)


def write_master(root: Path, kind: str, text: str) -> Path:
    path = root / kind / "_src" / f"{NAME}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def runs(monkeypatch):
    """In place of a kernel: every cell that runs prints how many runs there were. Returns the list of runs."""
    seen = []

    def execute(notebook, left_out, root):
        seen.append([c.source for c in notebook.cells if c.cell_type == "code" and not any(c is o for o in left_out)])
        for i, cell in enumerate(notebook.cells):
            if cell.cell_type == "code" and not any(cell is other for other in left_out):
                cell.execution_count = i
                cell.outputs = [nbformat.v4.new_output("stream", text=f"run {len(seen)}\n")]
        run = {"seconds": 70, "peak_memory_bytes": 10**9, "device": "CPU Test", "date": "2026-01-01"}
        return {"run": run | {"profile": build.profile()}}

    monkeypatch.setattr(build, "execute", execute)
    return seen


def read(root: Path, kind: str) -> nbformat.NotebookNode:
    return nbformat.read(root / kind / f"{NAME}.ipynb", as_version=4)


def code(notebook) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def texts(notebook) -> list[str]:
    return ["".join(o.get("text", "") for o in c.outputs) for c in notebook.cells if c.cell_type == "code"]


def test_exercises_have_holes_and_no_outputs_and_solutions_have_neither_holes_nor_marks(course, runs, tmp_path):
    build.build(course("exercises", EXERCISE))
    exercises, solutions = read(tmp_path, "exercises"), read(tmp_path, "solutions")
    hole = 'def double(x):\n    """Twice x."""\n    # YOUR CODE HERE\n    raise NotImplementedError'
    whole = 'def double(x):\n    """Twice x."""\n    if x:\n        return 2 * x\n    return 0'
    assert code(exercises) == ["pass", hole, "print(double(4))", 'print("only before")']
    assert code(solutions) == ["pass", whole, "print(double(4))"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in exercises.cells)
    assert texts(solutions) == ["run 1\n"] * 3
    assert exercises.cells[3].metadata == {"tags": ["exercise"]}  # by which the grader finds it
    assert ["Why it is so." in [cell.source for cell in made.cells] for made in (exercises, solutions)] == [False, True]
    made = build.assemble(tmp_path / "exercises" / "_src" / f"{NAME}.py", "exercises")
    assert exercises.cells[0].source == headers.header(made, solutions.metadata["rlcourse"]["run"])


@pytest.mark.parametrize("solution", ["# BEGIN SOLUTION\n    return 1", "return 1\n    # END SOLUTION"])
def test_a_solution_that_is_not_closed_is_refused_and_not_given_away(solution, course, tmp_path):
    master = course("exercises", f"# %%\ndef f():\n    {solution}\n")
    with pytest.raises(ValueError, match=r"01_policy_gradient\.py: BEGIN SOLUTION and END SOLUTION must come in pairs"):
        build.assemble(master, "exercises")


def test_a_rebuild_without_a_change_runs_nothing_and_is_byte_identical(course, runs, tmp_path):
    lesson, exercise = course("notebooks", LESSON), course("exercises", EXERCISE)
    for master in (lesson, exercise):
        build.build(master)
    files = sorted(tmp_path.glob("*/*.ipynb"))
    before = [path.read_bytes() for path in files]
    for master in (lesson, exercise):
        build.build(master)
    assert len(files) == 3 and len(runs) == 2
    assert [path.read_bytes() for path in files] == before


def test_a_change_of_text_runs_nothing_and_keeps_ids_and_a_change_of_code_runs(course, runs, tmp_path):
    build.build(course("notebooks", LESSON))
    before = {cell.source: cell.id for cell in read(tmp_path, "notebooks").cells}
    build.build(course("notebooks", LESSON.replace("# A lesson.", "# A better lesson.")))
    after = {cell.source: cell.id for cell in read(tmp_path, "notebooks").cells}
    assert len(runs) == 1 and texts(read(tmp_path, "notebooks"))[1] == "run 1\n"
    assert {source for source, number in after.items() if before.get(source) != number} == {"A better lesson."}
    assert len({*after.values()}) == len(after)
    build.build(course("notebooks", LESSON.replace("x = 1", "x = 2")))
    assert len(runs) == 2 and texts(read(tmp_path, "notebooks"))[1] == "run 2\n"
    build.build(course("notebooks", LESSON.replace("x = 1", "x = 2")), force=True)
    assert len(runs) == 3 and texts(read(tmp_path, "notebooks"))[1] == "run 3\n"


# With a kernel ---------------------------------------------------------------------------------------------------

NOISE = """\
# %%
import os, sys
print(sys.executable)
print(os.environ["RLCOURSE_STATIC"], os.environ["RLCOURSE_STRICT"])

# %%
from tqdm import tqdm
print("before")
for _ in tqdm(range(3), desc="steps"):
    pass
for _ in tqdm(iter(range(3))):
    pass
print("behind", file=sys.stderr)

# %%
rewards = [0, 1, 1]

# %% [markdown]
# Of {{ len(rewards) }} answers {{ 100 * sum(rewards) / len(rewards):.0f }} % are
# right, more than half. {{ assert sum(rewards) * 2
# > len(rewards) }} Not $\\binom{n}{{k}}$.

# %%
from matplotlib import pyplot as plt
rewards = None
plt.plot([0, 1])
plt.show()

# %% tags=["gpu"]
raise SystemExit("there is no GPU")
"""


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """A lesson built by a kernel, in a place where a kernel called python3 is installed that cannot start."""
    root = tmp_path_factory.mktemp("course")
    kernel = root / "jupyter" / "kernels" / "python3" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    kernel.write_text(json.dumps({"argv": ["false", "{connection_file}"], "display_name": "x", "language": "python"}))
    environment = dict(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "ROOT", root)
        patch.setattr(build, "BOOTSTRAP", "pass")
        patch.setattr(build.torch.cuda, "is_available", lambda: False)
        patch.setenv("JUPYTER_PATH", str(root / "jupyter"))
        notes = build.build(write_master(root, "notebooks", NOISE))
    return read(root, "notebooks"), notes, environment == dict(os.environ)


def test_a_lesson_is_run_by_this_python_with_strict_checks(noisy):
    """Whatever kernels are installed; the environment of the build stays what it was."""
    notebook, notes, unchanged = noisy
    assert texts(notebook)[1].splitlines()[:2] == [sys.executable, "1 1"] and unchanged
    run = notebook.metadata["rlcourse"]["run"]
    assert run.keys() == {"seconds", "peak_memory_bytes", "device", "date", "profile"}
    assert 0 < run["seconds"] < 60 and 2e7 < run["peak_memory_bytes"] < 4e8  # of the kernel, which loaded no torch
    assert notebook.cells[-1].outputs == [] and len(notes) == 1, "a cell for a GPU is not run without one"


def test_numbers_in_the_prose_are_those_of_the_kernel_at_that_place(noisy):
    assert noisy[0].cells[5].source == "Of 3 answers 67 % are\nright, more than half. Not $\\binom{n}{{k}}$."
    values = {"len(rewards)": "3", "100 * sum(rewards) / len(rewards):.0f": "67"}
    assert noisy[0].metadata["rlcourse"]["values"] == values
    # The reader sees no gap where the build has asked.
    code = [cell for cell in noisy[0].cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [1, 2, 3, 4, 5, None]


CLAIM = """\
# %%
x = 3

# %% [markdown]
# It is {{ x }}, which is odd. {{ assert x % 2 == 1 }}
"""


def test_a_sentence_that_is_no_longer_true_stops_the_build(course, tmp_path, monkeypatch):
    build.build(course("notebooks", CLAIM))
    assert read(tmp_path, "notebooks").cells[-1].source == "It is 3, which is odd."
    false = course("notebooks", CLAIM.replace("x = 3", "x = 4"))
    with pytest.raises(Exception, match="The text says what is no longer so: x % 2 == 1"):
        build.build(false)
    monkeypatch.setenv("RLCOURSE_PROFILE", "smoke")  # whose runs are too small to bear what the text says
    build.build(false)
    assert read(tmp_path, "notebooks").cells[-1].source == "It is 4, which is odd."
