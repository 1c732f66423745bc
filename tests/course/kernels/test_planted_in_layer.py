"""Do the checks of the kernels of a layer find mistakes? Each kernel is broken on purpose and must be found out."""

import importlib
import math

import pytest
import torch
from thorough import thinned

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from launching import assert_close, spread
from test_planted_in_kernels import found_out, planted

from rlcourse.course.kernels import attention, embedding, residual_norm, residual_norm_backward, rotate, token_logprob
from rlcourse.course.kernels.adamw import adamw_reference
from rlcourse.course.kernels.swiglu_backward import swiglu_backward_reference
from rlcourse.course.kernels.token_logprob_backward import token_logprob_backward_reference
from rlcourse.kernels.toolchain import simulate

NAN, HALF = torch.nan, torch.bfloat16


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


def check_swiglu_backward(module, **order):
    gate_up, dy = spread((2 * torch.randn(3, 80)).half(), 88), spread(torch.randn(3, 40).half(), 48)
    gate_up[0, 0] = -6e4
    found = torch.full((3, 80), NAN, dtype=torch.float16)
    simulate(module.SwigluBackward(40, "float16"), gate_up, dy, found, **order)
    assert_close(found, swiglu_backward_reference(gate_up, dy))


def check_rotate(module, **order):
    angle, position = torch.outer(torch.arange(9), torch.linspace(1, 0.1, 16)), torch.tensor([8, 0, 3])
    x = torch.randn(3, 5, 32).to(HALF)
    for back in (False, True):
        found = torch.full((3, 4, 32), NAN, dtype=HALF)
        tables = angle.cos(), angle.sin(), position
        simulate(module.Rotate(4, 32, "bfloat16", back, threads=32), x[:, :4], *tables, found, **order)
        assert_close(found, rotate.rotate_reference(x[:, :4], *tables, back))


def logits_case():
    logits = spread((4 * torch.randn(3, 613)).to(HALF), 624)
    logits[0] += 200
    return logits, torch.tensor([612, -1, 5]), torch.randn(3)


def check_token_logprob(module, **order):
    logits, target, _ = logits_case()
    logits[2, 16:] = -torch.inf
    found = [torch.full((3,), NAN) for _ in range(2)]
    simulate(module.TokenLogprob("bfloat16", threads=64), logits, target, *found, **order)
    for ours, right in zip(found, token_logprob.token_logprob_reference(logits, target), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-4)


def check_token_logprob_backward(module, **order):
    logits, target, grad = logits_case()
    log_sum, expected = logits.float().logsumexp(-1), token_logprob_backward_reference(logits, target, grad)
    simulate(module.TokenLogprobBackward("bfloat16", threads=64), logits, target, log_sum, grad, **order)
    assert logits.as_strided((3, 11), (624, 1), 613).isnan().all()  # what lies between the rows
    torch.testing.assert_close(logits, expected, rtol=2**-7, atol=1e-4)


def check_adamw(module, **order):
    n, beta1, beta2, lr, decay = 531, 0.8, 0.9, 0.1, 0.5
    tensors = [
        torch.randn(n).to(HALF),
        torch.randn(n),
        torch.randn(n),
        torch.rand(n),
        torch.full((n,), NAN, dtype=HALF),
    ]
    expected = [t.clone() for t in tensors]
    kernel = module.AdamW("bfloat16", "bfloat16", beta1, beta2, 1e-2, threads=32)
    simulate(kernel, *tensors, lr / (1 - beta1**3), (1 - beta2**3) ** -0.5, 1 - lr * decay, **order)
    adamw_reference(*expected, 3, lr, beta1, beta2, 1e-2, decay)
    for found, right in zip(tensors, expected, strict=True):
        torch.testing.assert_close(found, right, rtol=2**-8 if right.dtype == HALF else 1e-5, atol=1e-6)


def check_embedding(module, **order):
    token, table = torch.tensor([5, 2, 5, 5, 9, 0, 2, 5, 5, 5]), torch.randn(10, 24).to(HALF)
    y = torch.full((10, 24), NAN, dtype=HALF)
    simulate(module.Embedding(24, "bfloat16", threads=32), table, token, y, **order)
    assert torch.equal(y, table[token])
    token = torch.cat([token, torch.tensor([7] * 40 + [8] * 32 + [1] * 100 + [3] * 33)])[torch.randperm(215)]
    dy, dtable = spread(torch.randn(215, 24).to(HALF), 32), torch.randn(10, 24)
    expected, sums = dtable.clone(), torch.full((7, 2, 24), NAN)
    *lists, source = module.runs(token)
    simulate(module.EmbeddingBackward(24, "bfloat16", threads=32), *lists, source, dy, dtable, sums, **order)
    simulate(module.LongRuns(24, threads=32), *lists, sums, dtable, **order)
    embedding.embedding_backward_reference(token, dy, expected)
    torch.testing.assert_close(dtable, expected, rtol=1e-5, atol=1e-5)


def norm_case():
    x, residual, dtotal, dy = (torch.randn(37, 264).to(HALF) for _ in range(4))  # up to three rows for each of 16 warps
    x[2] *= 1e-3  # eps counts
    residual[2] *= 1e-3
    return x, residual, dtotal, dy, (1 + torch.rand(264)).to(HALF)


def check_residual_norm(module, **order):
    x, residual, _, _, weight = norm_case()
    found = [torch.full_like(x, NAN) for _ in range(2)]
    simulate(module.ResidualNorm(264, "bfloat16"), x, residual, weight, *found, **order)
    expected = residual_norm.residual_norm_reference(x, residual, weight, 1e-6)
    assert torch.equal(found[0], expected[0])
    assert_close(found[1], expected[1])


def check_residual_norm_backward(module, **order):
    total, _, dtotal, dy, weight = norm_case()
    dx, partial = torch.full_like(total, NAN), torch.full((2, 264), NAN)
    simulate(module.ResidualNormBackward(264, "bfloat16"), total, weight, dtotal, dy, dx, partial, **order)
    expected = residual_norm_backward.residual_norm_backward_reference(total, weight, dtotal, dy, 1e-6)
    size = expected[0].abs().amax(-1, keepdim=True).float()
    assert ((dx.float() - expected[0].float()).abs() <= 2**-8 * expected[0].abs() + 1e-5 * size).all()
    torch.testing.assert_close(partial.sum(0), expected[1], rtol=1e-5, atol=1e-4)


def check_column_sum(module, **order):
    parts, total = torch.randn(450, 40), torch.full((40,), NAN)
    simulate(module.ColumnSum(40), parts, total, **order)
    torch.testing.assert_close(total, parts.double().sum(0).float(), rtol=1e-5, atol=1e-4)


def attention_case():
    starts = torch.tensor([0, 5, 24, 41])  # the last of three tiles has one token
    q, k, v, dout = (torch.randn(41, heads, 64).half() for heads in (4, 2, 2, 4))
    wide = [t.double().requires_grad_() for t in (2 * q, k, v)]
    exact = attention.attention_reference(*wide, starts)
    return 2 * q, k, v, dout, attention.sequence_of(41, starts), exact, wide


def assert_near(found, exact, step):
    assert found.isfinite().all() and (found.double() - exact).abs().max() <= step * exact.abs().max()


def log_sums(q, k, start):
    """To base 2, of the scores of each query with the keys from its start to itself: [H, tokens]."""
    scores, place = torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(2, 1)) / 8, torch.arange(41)
    seen = (place <= place[:, None]) & (place >= start[:, None])
    return scores.masked_fill(~seen, -torch.inf).logsumexp(-1).div(math.log(2)).float()


def check_attention(module, **order):
    q, k, v, _, (start, _), exact, _ = attention_case()
    out, log_sum = torch.full_like(q, NAN), torch.full((4, 41), NAN)
    simulate(module.Attention(4, 2, 64, "float16"), q, k, v, start, out, log_sum, **order)
    assert_near(out, exact, 2**-10)
    torch.testing.assert_close(log_sum, log_sums(q, k, start), rtol=1e-5, atol=1e-5)


def check_attention_backward(module, **order):
    q, k, v, dout, bounds, exact, wide = attention_case()
    expected = torch.autograd.grad(exact, wide, dout.double())
    delta = (dout.double() * exact.detach()).sum(-1).T.float().contiguous()
    given = q, k, v, *bounds, log_sums(q, k, bounds[0]), delta, dout
    dq, dk, dv = (torch.full_like(t, NAN) for t in (q, k, v))
    simulate(module.AttentionBackwardQueries(4, 2, 64, "float16"), *given, dq, **order)
    simulate(module.AttentionBackwardKeys(4, 2, 64, "float16"), *given, dk, dv, **order)
    for found, right in zip((dq, dk, dv), expected, strict=True):
        assert_near(found, right, 2**-9)


CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}

MISTAKES = [  # (module, what stands there, what is put there instead)
    ("swiglu_backward", "1.0 + g * (1.0 - sigmoid)", "1.0 + g * sigmoid"),
    ("swiglu_backward", "through = d * sigmoid", "through = u * sigmoid"),
    ("rotate", "sin[at, None]", "sin[token, None]"),
    ("token_logprob", "for step in range_constexpr(5)", "for step in range_constexpr(4)"),
    ("token_logprob", "held.fill(-math.inf)", "held.fill(0.0)"),
    ("token_logprob_backward", "hot - power(", "power("),
    ("token_logprob_backward", "            if piece * VECTOR + i < row.shape[0]", "            if i < 8"),
    ("adamw", "cute.math.sqrt(square[i]) * correction", "cute.math.sqrt(square[i] * correction)"),
    ("adamw", "(square, v), (weight, rounded)", "(weight, rounded)"),
    ("embedding", "row, piece = index", "piece, row = index"),
    ("embedding", "held.store(held.load() + added.load())", "held.store(added.load())"),
    ("embedding", " and last - first > CHUNK", ""),
    ("embedding", "< last:\n                cute.autovec", "<= last:\n                cute.autovec"),
    ("attention", "above, mass[half] * shrink", "above, mass[half]"),
    ("attention", "head // const_expr(self.heads // self.kv_heads)", "head % const_expr(self.kv_heads)"),
    ("attention_backward", " & (query < tokens)", ""),
    ("attention_backward", "            factors.fill(1.0)\n", ""),
    ("residual_norm", "if row < x.shape[0]", "if row <= x.shape[0]"),
    ("residual_norm_backward", " - value * pull", ""),
    ("residual_norm_backward", "partial[program, None], thread", "partial[0, None], thread"),
    ("residual_norm_backward", "cp_async_wait_group(1)", "cp_async_wait_group(2)"),
    ("residual_norm_backward", "in range_constexpr(parts.shape[1])", "in range_constexpr(1, parts.shape[1])"),
    ("column_sum", "        cute.arch.sync_threads()\n", ""),
]  # fmt: skip


@pytest.mark.parametrize("name", thinned(CHECKS, every=4))
def test_sound_kernels_of_a_layer_pass(name):
    assert not found_out(CHECKS[name], importlib.import_module(f"rlcourse.course.kernels.{name}"))


@pytest.mark.parametrize(
    ("name", "old", "new"), thinned(MISTAKES, every=8), ids=[f"{name}: {old}" for name, old, _ in MISTAKES]
)
def test_mistakes_in_the_layer_are_found(name, old, new, tmp_path, monkeypatch):
    assert found_out(CHECKS[name], planted(name, old, new, tmp_path, monkeypatch))
