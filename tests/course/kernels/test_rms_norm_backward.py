"""The gradients of RMSNorm against autograd in float64."""

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from launching import launch, run

from rlcourse.course.kernels.rms_norm_backward import (
    RMSNormBackward,
    rms_norm_backward,
    rms_norm_backward_reference,
)
from rlcourse.kernels import KernelError

EPS = 1e-6


def case(rows, hidden, scale=1.0):
    torch.manual_seed(rows * hidden)
    return scale * torch.randn(rows, hidden), 1 + 0.3 * torch.randn(hidden), torch.randn(rows, hidden)


@pytest.mark.parametrize(("rows", "hidden", "programs"), [(1, 128, 1), (5, 896, 2), (3, 256, 4), (6, 128, 3)])
@pytest.mark.parametrize("order", ["lockstep", "random"])
def test_gradients_are_those_of_autograd(rows, hidden, programs, order):
    x, weight, dy = case(rows, hidden)
    x[0] *= 1e-3  # eps counts
    dx, partial = torch.full_like(x, torch.nan), torch.full((programs, hidden), torch.nan)
    launch(RMSNormBackward(hidden, EPS), x, weight, dy, dx, partial, order=order)
    expected_x, expected_weight = rms_norm_backward_reference(x, weight, dy, EPS)
    torch.testing.assert_close(dx, expected_x, rtol=1e-5, atol=1e-5 * expected_x.abs().max().item())
    torch.testing.assert_close(partial.sum(0), expected_weight, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_row_is_that_of_finite_differences():
    x, weight, dy = case(1, 128)
    found, _ = run(rms_norm_backward, x, weight, dy, EPS)

    def loss(x):
        return (x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double() * dy.double()).sum()

    step = 1e-6 * torch.eye(128, dtype=torch.float64)
    slopes = [(loss(x.double() + e) - loss(x.double() - e)) / 2e-6 for e in step]
    torch.testing.assert_close(found[0].double(), torch.stack(slopes), rtol=1e-4, atol=1e-5)


def test_the_operation_takes_no_rows_and_refuses_what_it_cannot_cut():
    x, weight, dy = case(3, 128)
    found, expected = run(rms_norm_backward, x, weight, dy, EPS), rms_norm_backward_reference(x, weight, dy, EPS)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    none, zeros = run(rms_norm_backward, x[:0], weight, dy[:0], EPS)
    assert none.shape == (0, 128) and not zeros.any()
    for hidden in (100, 192, 4096):
        with pytest.raises(KernelError, match=f"cannot cut rows of {hidden}"):
            RMSNormBackward(hidden)
