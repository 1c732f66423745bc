"""The gradient of SwiGLU against autograd in float64 and finite differences."""

import contextlib

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from launching import DEVICE, assert_close, launch, run, spread

from rlcourse.course.kernels.swiglu import swiglu
from rlcourse.course.kernels.swiglu_backward import SwigluBackward, swiglu_backward, swiglu_backward_reference
from rlcourse.kernels import KernelError
from rlcourse.kernels.toolchain import interpreted


@pytest.mark.parametrize(("rows", "inner", "gap"), [(1, 8, 0), (3, 40, 1), (9, 264, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_are_those_of_autograd(dtype, rows, inner, gap):
    torch.manual_seed(rows * inner)
    gate_up = spread((2 * torch.randn(rows, 2 * inner)).to(dtype), 2 * inner + 8 * gap)
    dy = spread(torch.randn(rows, inner).to(dtype), inner + 8 * gap)
    found = torch.full((rows, 2 * inner), torch.nan, dtype=dtype)
    launch(SwigluBackward(inner, str(dtype).removeprefix("torch.")), gate_up, dy, found)
    assert_close(found, swiglu_backward_reference(gate_up, dy))


def test_gradients_are_those_of_finite_differences():
    torch.manual_seed(0)
    gate_up, dy = torch.randn(2, 16).bfloat16(), torch.randn(2, 8).bfloat16()
    found = run(swiglu_backward, gate_up, dy).double()

    def loss(x):
        return (x[:, :8] / (1 + (-x[:, :8]).exp()) * x[:, 8:] * dy.double()).sum()

    steps = 1e-5 * torch.eye(32, dtype=torch.float64).view(32, 2, 16)
    slopes = torch.stack([(loss(gate_up.double() + s) - loss(gate_up.double() - s)) / 2e-5 for s in steps])
    torch.testing.assert_close(found, slopes.view(2, 16), rtol=2**-7, atol=1e-6)


def test_large_gates_have_the_gradients_of_a_line_and_of_zero():
    gate = torch.tensor([-3e38, -1e4, -90.0, -88.0, 88.0, 1e4, 1e30, 3e38], dtype=torch.bfloat16)
    found = run(swiglu_backward, torch.cat([gate, torch.full_like(gate, 3.0)])[None], torch.ones_like(gate)[None])[0]
    assert not found[:4].float().abs().gt(1e-30).any() and (found[4:8] == 3).all()
    assert not found[8:12].float().abs().gt(1e-30).any() and torch.equal(found[12:], gate[4:])


def test_backward_of_the_operation_is_this_kernel():
    torch.manual_seed(0)
    gate_up, dy = torch.randn(3, 32).bfloat16(), torch.randn(3, 16).bfloat16()
    leaf = gate_up.to(DEVICE).requires_grad_()
    with interpreted() if DEVICE == "cpu" else contextlib.nullcontext():
        swiglu(leaf).backward(dy.to(DEVICE))
    assert_close(leaf.grad.cpu(), swiglu_backward_reference(gate_up, dy))


def test_no_rows_and_odd_widths():
    assert run(swiglu_backward, torch.empty(0, 64).half(), torch.empty(0, 32).half()).shape == (0, 64)
    with pytest.raises(KernelError, match="cannot cut rows of 12"):
        SwigluBackward(12, "bfloat16")
    with pytest.raises(KernelError, match="dy of SwigluBackward must be bfloat16 and is float32"):
        run(swiglu_backward, torch.zeros(1, 16).bfloat16(), torch.zeros(1, 8))
