"""Lesson 08's first program, exactly as the lesson has it, in a file of its own: it needs nothing of this course."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

LESSON = Path(__file__).resolve().parents[3] / "notebooks" / "_src" / "08_first_kernels.py"
CHECK = """
if device == "cuda":
    assert torch.equal(c, a + b)
print("it ran")
"""


@pytest.mark.thorough
def test_the_program_of_lesson_08_runs_alone(tmp_path):
    """Without a GPU it is compiled and not launched."""
    cells = re.split(r"^# %%.*\n", LESSON.read_text(encoding="utf-8"), flags=re.MULTILINE)
    (program,) = (cell for cell in cells if "def add_kernel" in cell)
    assert "rlcourse" not in program
    path = tmp_path / "add.py"
    path.write_text(program + CHECK)
    without = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if not Path(p, "rlcourse").is_dir()]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(without)}
    run = subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert run.returncode == 0 and run.stdout.endswith("it ran\n"), run.stderr
