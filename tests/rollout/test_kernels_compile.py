"""The kernels compile for GPUs that are not here, fit their shared memory, and keep what they hold in registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is there on Linux alone")

SHARED = {86: 99 * 1024, 90: 227 * 1024}  # bytes a block can have: A10G, H100 and H200
NAMES = {"embed", "qkv", "attention", "out", "down", "gate_up", "tile", "pick", "refill"}


def programs(capability: int, *which: str) -> dict[str, dict]:
    """What each of those kernels needs, by name."""
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = [sys.executable, str(script), str(capability), *which]
    done = subprocess.run(run, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


QWEN = "qwen2.5-0.5b"
CASES = [(90, 256, QWEN), (86, 64, QWEN), (90, 16, "qwen3-0.6b")]


@pytest.mark.parametrize(("capability", "rows", "shape"), CASES)
@pytest.mark.thorough
def test_kernels_compile_and_fit(capability, rows, shape):
    found = programs(capability, str(rows), shape)
    assert found.keys() == NAMES
    for name, needs in found.items():
        assert needs["shared"] <= SHARED[capability], name
        assert needs["spilled"] <= 64, name  # of the up to 900 bytes of weights that a thread holds
        assert needs["waits"] == (capability >= 90), name  # a kernel may begin before its turn
        # the first one lets the next begin when the step before has ended
        assert needs["early"] == (capability >= 90 and name != "embed"), name
        assert not needs["added into"], name


@pytest.mark.thorough
@pytest.mark.parametrize("which", ["attention", "rest"])
def test_kernels_of_the_training_pass_and_of_prefill_compile_and_fit(which):
    for name, needs in programs(90, which).items():
        most = 16 if name == "heads, neither, backward" else 0  # bytes of a stack, in a kernel with registers to spare
        assert needs["shared"] <= SHARED[90] and needs["spilled"] <= most, (name, needs)
