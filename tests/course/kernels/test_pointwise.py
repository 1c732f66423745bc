"""Kernels that take one place after the other: a + b, SwiGLU and its gradient, AdamW."""

import pytest
import torch
from thorough import thorough

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from launching import assert_close, launch, run, slopes, spread

from rlcourse.course.kernels.adamw import AdamW, adamw, adamw_reference
from rlcourse.course.kernels.swiglu import Swiglu, swiglu, swiglu_reference
from rlcourse.course.kernels.swiglu_backward import SwigluBackward, swiglu_backward, swiglu_backward_reference
from rlcourse.course.kernels.vector_add import VectorAdd, vector_add_reference
from rlcourse.kernels import KernelError

LR, DECAY = 3e-3, 0.1


@pytest.mark.parametrize("n", [1, 4, 1023, 1030])
def test_every_element_is_added_and_nothing_beside_them(n):
    torch.manual_seed(n)
    a, b, c = torch.randn(n), torch.randn(n), torch.full((n,), torch.nan)
    launch(VectorAdd(), a, b, c)
    assert torch.equal(c, vector_add_reference(a, b)) and torch.equal(c, a + b)


@pytest.mark.parametrize(
    ("rows", "inner", "gap", "dtype"),
    [(1, 8, 0, "float16"), (3, 40, 1, "bfloat16"), thorough((9, 1040, 2, "float16"))],
)
def test_swiglu_and_its_gradient_are_those_of_the_same_place(rows, inner, gap, dtype):
    torch.manual_seed(rows * inner)
    gate_up = spread((2 * torch.randn(rows, 2 * inner)).to(getattr(torch, dtype)), 2 * inner + 8 * gap)
    dy = spread(torch.randn(rows, inner).to(gate_up.dtype), inner + 8 * gap)
    out, found = (torch.full((rows, width), torch.nan, dtype=gate_up.dtype) for width in (inner, 2 * inner))
    launch(Swiglu(inner, dtype), gate_up, out)
    launch(SwigluBackward(inner, dtype), gate_up, dy, found)
    assert_close(out, swiglu_reference(gate_up))
    assert_close(found, swiglu_backward_reference(gate_up, dy))


def test_the_gradient_of_swiglu_is_that_of_finite_differences():
    torch.manual_seed(0)
    gate_up, dy = torch.randn(2, 16).bfloat16(), torch.randn(2, 8).bfloat16()

    def gradient(x, dy):
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(swiglu(leaf), leaf, dy)[0]

    def loss(x):
        return (x[:, :8] / (1 + (-x[:, :8]).exp()) * x[:, 8:] * dy.double()).sum()

    found = run(gradient, gate_up, dy)
    torch.testing.assert_close(found.double(), slopes(loss, gate_up), rtol=2**-7, atol=1e-6)


def test_large_gates_end_in_a_line_and_in_zero():
    gate = torch.tensor([-3e38, -1e4, -90.0, -88.0, 88.0, 1e4, 1e30, 1e38], dtype=torch.bfloat16)
    found = run(swiglu, torch.cat([gate, torch.ones_like(gate)])[None])[0]
    assert not found[:4].float().abs().gt(1e-30).any() and torch.equal(found[4:], gate[4:])
    found = run(swiglu_backward, torch.cat([gate, torch.full_like(gate, 3.0)])[None], torch.ones_like(gate)[None])[0]
    assert not found[:4].float().abs().gt(1e-30).any() and (found[4:8] == 3).all()
    assert not found[8:12].float().abs().gt(1e-30).any() and torch.equal(found[12:], gate[4:])


def adamw_state(n):
    torch.manual_seed(0)
    return [torch.randn(n), torch.zeros(n), torch.zeros(n), torch.full((n,), torch.nan, dtype=torch.bfloat16)]


def step_of_adamw(*arguments):
    """The operation, which gives nothing back; it changes its tensors."""
    run(lambda *t: (adamw(*t), t[1])[1], *arguments)


@pytest.mark.parametrize(
    ("n", "steps", "dtype"), [(1, 3, torch.float32), (7, 3, torch.float16), (1031, 10, torch.bfloat16)]
)
def test_many_steps_of_adamw_are_those_of_torch(n, steps, dtype):
    master, mean, square, weight = adamw_state(n)
    theirs = master.double().requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=LR, betas=(0.9, 0.95), weight_decay=DECAY)
    for step in range(1, steps + 1):
        theirs.grad = (torch.randn(n) * 10.0 ** torch.randint(-4, 2, (n,))).to(dtype).double()
        optimizer.param_groups[0]["lr"] = lr = LR / step  # as a schedule does
        optimizer.step()
        step_of_adamw(theirs.grad.to(dtype), master, mean, square, weight, step, lr, 0.9, 0.95, 1e-8, DECAY)
        assert torch.equal(weight, master.bfloat16())
    torch.testing.assert_close(master.double(), theirs.detach(), rtol=1e-5, atol=1e-6)
    kept = optimizer.state[theirs]
    torch.testing.assert_close(mean.double(), kept["exp_avg"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(square.double(), kept["exp_avg_sq"], rtol=1e-5, atol=0)


def test_a_step_of_adamw_is_that_of_the_reference_where_eps_counts():
    ours, grad = adamw_state(300), torch.randn(300).bfloat16()
    ours[1].normal_()
    ours[2].uniform_()
    expected = [t.clone() for t in ours]
    step_of_adamw(grad, *ours, 4, LR, 0.8, 0.99, 1e-3, DECAY)
    adamw_reference(grad, *expected, 4, LR, 0.8, 0.99, 1e-3, DECAY)
    for found, right in zip(ours, expected, strict=True):
        torch.testing.assert_close(found, right, rtol=2**-8 if right.dtype == torch.bfloat16 else 1e-5, atol=1e-6)


def test_adamw_touches_nothing_beside_its_buffer_and_counts_from_1():
    ours, grad = adamw_state(1003 + 96), torch.randn(1003 + 96).bfloat16()
    before = [t[1003:].clone() for t in ours]
    launch(AdamW("bfloat16", "bfloat16"), *(t[:1003] for t in (grad, *ours)), 1e-3, 1.0, 1.0)
    for whole, rest in zip(ours, before, strict=True):
        assert torch.equal(whole[1003:].nan_to_num(), rest.nan_to_num()) and whole[:1003].isfinite().all()
    with pytest.raises(KernelError, match="counts steps from 1 and got 0"):
        step_of_adamw(grad, *ours, 0, LR)
