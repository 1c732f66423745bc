"""Attention over packed sequences and its gradients, against float64, one sequence after the other."""

import contextlib
import math

import pytest
import torch
from thorough import thinned

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from launching import DEVICE, launch, run

from rlcourse.course.kernels.attention import Attention, attention_reference, packed_attention, sequence_of
from rlcourse.kernels.toolchain import interpreted

STEPS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # weights are rounded to the dtype before they multiply
CASES = [  # where sequences begin, query heads, key-value heads, dtype
    ([0, 5, 5, 38, 39, 41], 4, 2, torch.float16),  # tiles of several sequences, one empty, one of one token
    ([0, 1], 1, 1, torch.bfloat16),
    ([0, 16, 48], 2, 2, torch.bfloat16),
    ([0, 37], 7, 1, torch.bfloat16),
]


def case(starts, heads, kv_heads, dtype):
    """q, k and v as parts of a packed projection, where sequences begin, and dout."""
    torch.manual_seed(starts[-1])
    packed = torch.randn(starts[-1], heads + 2 * kv_heads, 64).to(dtype)
    q, k, v = packed.split([heads, kv_heads, kv_heads], 1)
    return 1.5 * q, k, v, torch.tensor(starts), torch.randn(starts[-1], heads, 64).to(dtype)


def close(found, exact, step):
    """Errors are those of the largest numbers, of which sums are made."""
    assert found.isfinite().all()
    assert (found.double() - exact).abs().max() <= step * exact.abs().max()


def gradients(q, k, v, starts, dout):
    """dq, dk and dv by the operation."""
    leaves = [t.clone().to(DEVICE).requires_grad_() for t in (q, k, v)]
    with interpreted() if DEVICE == "cpu" else contextlib.nullcontext():
        packed_attention(*leaves, starts.to(DEVICE))[0].backward(dout.to(DEVICE))
    return [leaf.grad.cpu() for leaf in leaves]


@pytest.mark.parametrize(("starts", "heads", "kv_heads", "dtype"), thinned(CASES, every=4))
def test_attention_and_its_gradients_are_those_of_float64(starts, heads, kv_heads, dtype):
    q, k, v, starts, dout = case(starts, heads, kv_heads, dtype)
    out, log_sum = run(packed_attention, q, k, v, starts)
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    exact = attention_reference(*wide, starts)
    close(out, exact.detach(), STEPS[dtype])
    expected = torch.autograd.grad(exact, wide, dout.double())
    for found, right in zip(gradients(q, k, v, starts, dout), expected, strict=True):
        close(found, right, 2 * STEPS[dtype])
    first = sequence_of(len(q), starts)[0]
    keys = k.double().repeat_interleave(heads // kv_heads, 1)
    for token in (0, len(q) // 2, len(q) - 1):
        scores = torch.einsum("hd,thd->ht", q[token].double(), keys[first[token] : token + 1]) / 8
        torch.testing.assert_close(log_sum[:, token].double(), scores.logsumexp(-1) / math.log(2), rtol=1e-5, atol=1e-5)


def test_no_token_sees_a_later_one_or_another_sequence():
    q, k, v, starts, _ = case([0, 7, 30], 2, 1, torch.bfloat16)
    out, _ = run(packed_attention, q, k, v, starts)
    k, v = k.clone(), v.clone()
    k[:7], v[:7], k[20:], v[20:] = 50.0, 50.0, -50.0, 50.0
    changed, _ = run(packed_attention, q, k, v, starts)
    assert torch.equal(changed[7:20], out[7:20]) and not torch.equal(changed[20:], out[20:])


def test_one_token_gets_its_value_and_large_scores_are_no_trouble():
    q, k, v, starts, _ = case([0, 1, 2, 19], 2, 2, torch.bfloat16)
    out, _ = run(packed_attention, 300 * q, 300 * k, v, starts)
    assert torch.equal(out[:2], v[:2]) and out.isfinite().all()


def test_the_order_of_warps_changes_no_bit():
    q, k, v, starts, _ = case([0, 40, 90], 2, 1, torch.bfloat16)
    found = []
    for order in ("lockstep", "random"):
        out, log_sum = torch.full(q.shape, torch.nan, dtype=q.dtype), torch.full((2, 90), torch.nan)
        launch(Attention(2, 1, 64), q, k, v, sequence_of(90, starts)[0], out, log_sum, order=order)
        found.append((out, log_sum))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
