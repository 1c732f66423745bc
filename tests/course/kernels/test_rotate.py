"""Rotary positions in training: against complex numbers in float64, and the gradient against autograd."""

import contextlib

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from launching import DEVICE, assert_close, launch, run

from rlcourse.course.kernels.rotate import Rotate, rotate, rotate_reference
from rlcourse.kernels import KernelError
from rlcourse.kernels.toolchain import interpreted


def case(tokens, heads, head, dtype, positions=50, others=0):
    """x with `others` heads beside it in each token's row, which are nan; tables; positions in no order."""
    torch.manual_seed(tokens * heads)
    wide = torch.full((tokens, heads + others, head), torch.nan, dtype=dtype)
    x = wide[:, :heads].copy_(torch.randn(tokens, heads, head))
    angle = torch.outer(torch.arange(positions), 1e4 ** -torch.linspace(0, 1, head // 2))
    return x, angle.cos(), angle.sin(), torch.randint(positions, (tokens,))


def by_complex_numbers(x, cos, sin, position, back):
    first, second = x.double().chunk(2, -1)
    turn = torch.complex(cos.double(), sin.double())[position][:, None]
    turned = torch.complex(first, second) * (turn.conj() if back else turn)
    return torch.cat([turned.real, turned.imag], -1).to(x.dtype)


@pytest.mark.parametrize(("tokens", "heads", "head", "others"), [(1, 1, 16, 0), (5, 3, 64, 2), (33, 2, 128, 1)])
@pytest.mark.parametrize("back", [False, True], ids=["on", "back"])
def test_heads_are_turned_as_complex_numbers_are(tokens, heads, head, others, back):
    dtype = torch.float16 if others == 1 else torch.bfloat16
    x, *tables = case(tokens, heads, head, dtype, others=others)
    found = torch.full((tokens, heads, head), torch.nan, dtype=dtype)
    launch(Rotate(heads, head, str(dtype).removeprefix("torch."), back), x, *tables, found)
    # A difference of two products can be far smaller than they are: it has their error.
    torch.testing.assert_close(found, by_complex_numbers(x, *tables, back), rtol=2**-7, atol=1e-5)
    assert_close(found, rotate_reference(x, *tables, back))


def test_back_undoes_it_and_position_0_changes_nothing():
    x, cos, sin, position = case(4, 2, 32, torch.bfloat16)
    there = run(rotate, x, cos, sin, position)
    assert not torch.equal(there, x)
    torch.testing.assert_close(run(rotate, there, cos, sin, position, True), x, rtol=2**-7, atol=2**-6)
    assert torch.equal(run(rotate, x, cos, sin, torch.zeros(4, dtype=torch.int64)), x)


@pytest.mark.parametrize("back", [False, True], ids=["on", "back"])
def test_the_gradient_is_that_of_autograd(back):
    x, *tables = case(3, 2, 32, torch.bfloat16)
    dy = torch.randn(3, 2, 32).bfloat16()
    leaf = x.clone().to(DEVICE).requires_grad_()
    with interpreted() if DEVICE == "cpu" else contextlib.nullcontext():
        rotate(leaf, *(t.to(DEVICE) for t in tables), back).backward(dy.to(DEVICE))
    wide = x.double().requires_grad_()
    first, second = wide.chunk(2, -1)
    c, s = (t.double()[tables[2]][:, None] for t in tables[:2])
    s = -s if back else s
    turned = torch.cat([first * c - second * s, second * c + first * s], -1)
    (expected,) = torch.autograd.grad(turned, wide, dy.double())
    torch.testing.assert_close(leaf.grad.cpu(), expected.bfloat16(), rtol=2**-7, atol=1e-5)


def test_no_tokens_and_odd_heads():
    x, *tables = case(2, 2, 32, torch.bfloat16)
    assert run(rotate, x[:0], *tables[:2], tables[2][:0]).shape == (0, 2, 32)
    with pytest.raises(KernelError, match="cannot cut heads of 24"):
        Rotate(2, 24, "bfloat16")
