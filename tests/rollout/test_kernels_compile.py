"""The kernels compile for GPUs that are not here, fit their shared memory, and keep what they hold in registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is there on Linux alone")

SHARED = {86: 99 * 1024, 90: 227 * 1024}  # bytes a block can have: A10G, H100 and H200
STEP = {"embed", "qkv", "attention", "add", "gate_up", "mass", "pick", "refill"}  # launched first
PASS = {"norm", "rope", "prefill_attention", "swiglu", "logprob", "scale", "logit_gradient", "norm_backward"}
PASS |= {"swiglu_backward", "query_gradient", "key_gradient", "rope_backward"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("capability", "rows", "shape"),
    [(90, 256, "qwen2"), (86, 64, "qwen2"), (90, 16, "qwen3"), (90, 64, "llama"), (90, 16, "small")],
)
def test_kernels_compile_and_fit(capability, rows, shape):
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = [sys.executable, str(script), str(capability), str(rows), shape]
    done = subprocess.run(run, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name.split("_kernel")[0] for name in found} == STEP | PASS
    for name, needs in found.items():
        kind, number = name.split("_kernel ")
        of_step = kind in STEP and (number == "0" or kind == "add")
        assert needs["shared"] <= SHARED[capability], name
        # Of the up to 900 bytes of weights that a thread holds; or, in the exact pass, which is Hopper's, of a stack.
        assert needs["spilled"] <= (64 if of_step or capability < 90 else 16), name
        early = of_step and capability >= 90
        assert needs["waits"] == early, name  # a kernel may begin before its turn
        assert needs["early"] == (early and kind != "embed"), name  # the first lets the next begin when its turn comes
        assert not needs["added into"], name
