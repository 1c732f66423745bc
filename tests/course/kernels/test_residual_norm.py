"""RMSNorm with the addition before it: against float32, autograd in float64 and finite differences."""

import contextlib

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from launching import DEVICE, assert_close, launch, run, spread

from rlcourse.course.kernels.residual_norm import ResidualNorm, residual_norm, residual_norm_reference
from rlcourse.course.kernels.residual_norm_backward import (
    ResidualNormBackward,
    residual_norm_backward,
    residual_norm_backward_reference,
)
from rlcourse.kernels import KernelError
from rlcourse.kernels.toolchain import compiled, interpreted

EPS = 1e-6


def case(rows, hidden, dtype=torch.bfloat16):
    """x, residual, dtotal and dy, whose rows lie apart, and a weight; in the first row eps counts."""
    torch.manual_seed(rows * hidden)
    x, residual, dtotal, dy = (spread(torch.randn(rows, hidden).to(dtype), hidden + 8 * i) for i in range(4))
    x[0] *= 1e-3
    residual[0] *= 1e-3
    return x, residual, dtotal, dy, (1 + 0.3 * torch.randn(hidden)).to(dtype)


@pytest.mark.parametrize(
    ("rows", "hidden", "programs", "dtype", "order"),
    [
        (1, 8, 1, torch.bfloat16, "lockstep"),
        (5, 264, 2, torch.float16, "random"),
        (3, 896, 4, torch.bfloat16, "lockstep"),
        (6, 256, 3, torch.bfloat16, "warp"),
        (37, 8, 2, torch.float16, "random"),  # up to three rows for each warp
        (5, 1536, 1, torch.bfloat16, "warp"),  # of two rows for each of four warps
        pytest.param(9, 2048, 2, torch.bfloat16, "random", marks=pytest.mark.thorough),
    ],
)
def test_sum_norm_and_gradients_are_right(rows, hidden, programs, dtype, order):
    x, residual, dtotal, dy, weight = case(rows, hidden, dtype)
    total, y, dx = (torch.full((rows, hidden), torch.nan, dtype=dtype) for _ in range(3))
    partial, name = torch.full((programs, hidden), torch.nan), str(dtype).removeprefix("torch.")
    launch(ResidualNorm(hidden, name, EPS), x, residual, weight, total, y, order=order)
    expected_total, expected_y = residual_norm_reference(x, residual, weight, EPS)
    assert torch.equal(total, expected_total)
    assert_close(y, expected_y)
    launch(ResidualNormBackward(hidden, name, EPS), total, weight, dtotal, dy, dx, partial, order=order)
    expected_x, expected_weight = residual_norm_backward_reference(total, weight, dtotal, dy, EPS)
    # Two parts that cancel leave the rounding of float32, which is that of the parts.
    torch.testing.assert_close(dx.float(), expected_x.float(), rtol=2**-7, atol=1e-6 * expected_x.abs().max().item())
    torch.testing.assert_close(partial.sum(0), expected_weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hidden", [896, pytest.param(1536, marks=pytest.mark.thorough)])
def test_an_h200_has_room_for_two_blocks_at_a_time(hidden):
    """So that while one waits the other one works, and `PROGRAMS` blocks are all there at once."""
    kernel = ResidualNormBackward(hidden, "bfloat16")
    code = compiled(kernel, "sm_90a")
    assert 2 * code.registers * kernel.threads <= 65536 and 2 * (code.shared_bytes + 1024) <= 228 * 1024


def test_the_gradients_of_the_operation_are_those_of_finite_differences():
    x, residual, dtotal, dy, weight = case(2, 16)
    leaves = [t.clone().to(DEVICE).requires_grad_() for t in (x, residual, weight)]
    with interpreted() if DEVICE == "cpu" else contextlib.nullcontext():
        total, y = residual_norm(*leaves, EPS)
        torch.autograd.backward([total, y], [dtotal.to(DEVICE), dy.to(DEVICE)])
    found_x, found_residual, found_weight = (leaf.grad.cpu() for leaf in leaves)
    assert torch.equal(found_x, found_residual)
    base, w = total.detach().cpu().double(), weight.double()

    def loss(x, w):
        y = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * w
        return (y * dy.double() + x * dtotal.double()).sum()

    step = 1e-7
    steps = step * torch.eye(32, dtype=torch.float64).view(32, 2, 16)
    slopes = torch.stack([(loss(base + s, w) - loss(base - s, w)) / (2 * step) for s in steps]).view(2, 16)
    torch.testing.assert_close(found_x.double(), slopes, rtol=2**-7, atol=1e-6 * slopes.abs().max().item())
    steps = 1e-5 * torch.eye(16, dtype=torch.float64)
    slopes = torch.stack([(loss(base, w + s) - loss(base, w - s)) / 2e-5 for s in steps])
    torch.testing.assert_close(found_weight.double(), slopes, rtol=2**-7, atol=1e-6)


def test_no_rows_and_widths_that_do_not_fit():
    x, residual, dtotal, dy, weight = (t[:0] if t.dim() == 2 else t for t in case(1, 64))
    assert [len(t) for t in run(residual_norm, x, residual, weight, EPS)] == [0, 0]
    dx, dweight = run(residual_norm_backward, x, weight, dtotal, dy, EPS)
    assert dx.shape == (0, 64) and dweight.dtype == torch.float32 and not dweight.any()
    for kernel in (ResidualNorm, ResidualNormBackward):
        for hidden in (100, 2056):
            with pytest.raises(KernelError, match=f"{kernel.__name__} cannot cut rows of {hidden}"):
                kernel(hidden, "bfloat16")
