"""SwiGLU against float32."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from launching import assert_close, launch, run, spread

from rlcourse.course.kernels.swiglu import Swiglu, swiglu, swiglu_reference
from rlcourse.kernels import KernelError


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(rows=st.integers(1, 9), inner=st.integers(1, 130).map(lambda n: 8 * n), gap=st.integers(0, 2))
def test_gate_and_up_are_those_of_the_same_place(dtype, rows, inner, gap):
    torch.manual_seed(rows * inner)
    gate_up = spread((2 * torch.randn(rows, 2 * inner)).to(dtype), 2 * inner + 8 * gap)
    out = torch.full((rows, inner), torch.nan, dtype=dtype)
    launch(Swiglu(inner, str(dtype).removeprefix("torch.")), gate_up, out)
    assert_close(out, swiglu_reference(gate_up))


def test_large_gates_end_at_the_gate_and_at_zero():
    gate = torch.tensor([-3e38, -1e4, -90.0, -88.0, -0.0, 88.0, 1e4, 1e38], dtype=torch.bfloat16)
    found = run(swiglu, torch.cat([gate, torch.ones(8, dtype=gate.dtype)])[None])[0]
    assert not found[:5].float().abs().gt(1e-30).any() and torch.equal(found[5:], gate[5:])


def test_no_rows_and_odd_widths():
    assert run(swiglu, torch.empty(0, 64, dtype=torch.float16)).shape == (0, 32)
    with pytest.raises(KernelError, match="cannot cut rows of 12"):
        Swiglu(12, "bfloat16")
