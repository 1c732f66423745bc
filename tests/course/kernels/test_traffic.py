"""What the kernels move: each byte once, 16 bytes a thread, in whole sectors. More than that no GPU can make good."""

import pytest
import torch
from thorough import thinned

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from rlcourse.course.kernels.rms_norm import RMSNorm
from rlcourse.course.kernels.sampler import MOST_SPLITS, SIZE, Sampler
from rlcourse.course.kernels.swiglu import Swiglu
from rlcourse.course.kernels.vector_add import VectorAdd
from rlcourse.kernels.toolchain import simulate

ROWS = 16


def half(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


def moved(kernel, *tensors):
    """Bytes read and written by name, after a look at the accesses of all that is large."""
    report = simulate(kernel, *tensors)
    for access in report.accesses.values():
        if access.bytes > 1024:
            assert ".v4.b32" in access.text and access.bytes == 512 * access.warps, access
            assert access.efficiency >= 1, access
    return dict(report.read), dict(report.written)


@pytest.mark.parametrize("hidden", thinned([896, 1024, 4096], every=3))
def test_rms_norm_moves_a_row_once(hidden):
    x, size = half(ROWS, hidden), ROWS * hidden * 2
    read, written = moved(RMSNorm(hidden, "bfloat16"), x, None, half(hidden), x.clone())
    assert (read["x"], written) == (size, {"y": size})
    read, written = moved(RMSNorm(hidden, "bfloat16", add=True), x, x.clone(), half(hidden), x.clone())
    assert (read["x"], read["residual"], written) == (size, size, {"residual": size, "y": size})


def test_swiglu_moves_a_row_once():
    size = ROWS * 896 * 2
    found = moved(Swiglu(896, "bfloat16"), half(ROWS, 2 * 896), half(ROWS, 896))
    assert found == ({"gate_up": 2 * size}, {"out": size})


def test_a_sum_moves_each_number_once():
    size = 4 * 4096
    found = moved(VectorAdd(), *(torch.zeros(4096) for _ in range(3)))
    assert found == ({"a": size, "b": size}, {"c": size})


def test_the_sampler_reads_its_logits_once():
    vocabulary, numbers = 8192, [torch.zeros(2) for _ in range(2)]
    logits, arrived = torch.zeros(2, vocabulary, dtype=torch.float16), torch.zeros(2, dtype=torch.int32)
    counter, shares = torch.arange(2), torch.zeros(2, MOST_SPLITS, SIZE)
    report = simulate(
        Sampler("float16"), logits, 1.0, 4, torch.tensor([1]), counter, counter.clone(), *numbers, shares, arrived
    )
    assert report.read["logits"] == 2 * 2 * vocabulary
    (access,) = (a for a in report.accesses.values() if a.bytes == 2 * 2 * vocabulary)
    assert ".v4.b32" in access.text and access.efficiency == 1
