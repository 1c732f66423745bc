"""Lesson 08's first program, exactly as the lesson has it, in a file of its own: it needs nothing of this course."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

LESSON = Path(__file__).resolve().parents[3] / "notebooks" / "_src" / "08_first_kernels.py"
CHECK = """
exact = a.double().cpu() + b.double().cpu()
error = (c.double().cpu() - exact).abs().max().item()
print("device:", torch.cuda.get_device_name() if device == "cuda" else device)
print("equal to a + b:", torch.equal(c, a + b), "| largest error against float64:", error)
"""


def program() -> str:
    """The code cell that defines `add_kernel`."""
    cells = re.split(r"^# %%.*\n", LESSON.read_text(encoding="utf-8"), flags=re.MULTILINE)
    (cell,) = (cell for cell in cells if "def add_kernel" in cell)
    return cell


@pytest.mark.thorough
def test_the_program_of_lesson_08_runs_alone(tmp_path):
    """Without a GPU it is compiled and not launched, and c keeps its random numbers."""
    path = tmp_path / "add.py"
    path.write_text(program() + CHECK)
    assert "rlcourse" not in program()
    without = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if not Path(p, "rlcourse").is_dir()]
    run = subprocess.run(
        [sys.executable, path], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(without)},
    )  # fmt: skip
    print(run.stdout)
    assert run.returncode == 0, run.stderr
    assert f"equal to a + b: {torch.cuda.is_available()}" in run.stdout
    if torch.cuda.is_available():
        assert float(run.stdout.split()[-1]) < 1e-6
