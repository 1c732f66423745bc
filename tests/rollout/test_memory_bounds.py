"""What a kernel reads and never stores: only memory that nobody may read shows that."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is there on Linux alone")

BEHIND = """
import ctypes, mmap, torch
from rlcourse.exact import EXACT
from rlcourse.rollout.triton_kernels import gate_up_kernel

rows, hidden, inner, columns, more = 2, 64, 152, 32, 8
taken = -(-2 * inner * hidden * 4 // mmap.PAGESIZE) * mmap.PAGESIZE
memory = mmap.mmap(-1, taken + mmap.PAGESIZE)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + taken), mmap.PAGESIZE, 0) == 0  # nobody may read it
w = torch.frombuffer(memory, dtype=torch.float32, count=taken // 4)[-2 * inner * hidden :]
y, squares, h = torch.ones(rows, hidden), torch.ones(rows, hidden // 32), torch.empty(rows, inner)
sizes = rows, 1e-6, inner, hidden, 16, columns, more, 32, 0, False
gate_up_kernel[(-(-inner // (columns + more)), 1)](y, squares, w, h, *sizes, **EXACT)
"""


@pytest.mark.thorough
def test_no_program_reads_behind_the_weights_of_gate_and_up():
    """Their columns are no multiple of a program's. A child, since such a read ends the process."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run(
        [sys.executable, "-c", BEHIND], env=environment, cwd=Path(__file__).parent, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr or f"ended by signal {-found.returncode}"
