"""The order of every sum that decode step and training pass share, bit for bit, in Triton's interpreter. On a GPU
test_bits.py compares the two with each other."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is there on Linux alone")

import triton
import triton.language as tl
from policies import DEVICE
from small import small_policy
from steps import new_step
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.testing import assert_close

from rlcourse.exact import EXACT, KEYS, LOG2_E, head, layers, operations, pass_kernels
from rlcourse.exact.products import add_shares, share_of
from rlcourse.exact.sequences import Sequences
from rlcourse.exact.weights import fused_weights
from rlcourse.rollout import tiles, triton_step
from rlcourse.rollout.triton_step import TritonStep
from rlcourse.sampling import GREEDY, Sampling

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="In float32, by IEEE's roots and exponentials")


def tree(x: torch.Tensor) -> torch.Tensor:
    """The sum over the last axis, a power of two long, neighbours first."""
    while x.shape[-1] > 1:
        x = x[..., ::2] + x[..., 1::2]
    return x[..., 0]


def inverse_root(x: torch.Tensor) -> torch.Tensor:
    """1 / sqrt(x) in float32, each rounded as IEEE says: PyTorch's root need not be."""
    return torch.from_numpy(1 / np.sqrt(x.numpy()))


def wide(*shape, seed: int = 0) -> torch.Tensor:
    """Numbers of very different sizes, whose sum is another in another order."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 4.0 ** torch.randint(-3, 4, shape, generator=generator)
    return torch.randn(shape, generator=generator) * sizes


@triton.jit
def sums_kernel(x, y, A: tl.constexpr, B: tl.constexpr, LEVELS: tl.constexpr):
    rows = tl.arange(0, A)
    block = tl.load(x + rows[:, None] * B + tl.arange(0, B)[None, :])
    tl.store(y + rows, operations.row_sum(block, A, B, LEVELS))


@triton.jit
def scales_kernel(squares, y, R, eps, A: tl.constexpr, d: tl.constexpr):
    rows = tl.arange(0, A)
    tl.store(y + rows, operations.inverse_rms(squares, rows, rows < R, eps, A, d), mask=rows < R)


@triton.jit
def head_norm_kernel(v, weight, y, eps, A: tl.constexpr, D: tl.constexpr, LEVELS: tl.constexpr):
    cols = tl.arange(0, D // 2)
    at = tl.arange(0, A)[:, None] * D + cols[None, :]
    first, second = operations.head_norm(tl.load(v + at), tl.load(v + at + D // 2), weight, cols, A, D, LEVELS, eps)
    tl.store(y + at, first)
    tl.store(y + at + D // 2, second)


@triton.jit
def scaled_kernel(product, scale, y, B: tl.constexpr):
    o = tl.arange(0, B)
    tl.store(y + o, operations.scaled(tl.load(product + o), tl.load(scale), tl.float16))


def test_a_product_is_rounded_as_in_memory_before_it_is_scaled():
    product, scale, found = wide(64), wide(1), torch.empty(64)
    scaled_kernel[(1,)](product, scale, found, 64, **EXACT)
    assert torch.equal(found, product.half().float() * scale)


@pytest.mark.parametrize("width", [2, 32, 256])
def test_a_row_is_added_up_neighbours_first(width):
    x, found = wide(4, width), torch.empty(4)
    sums_kernel[(1,)](x, found, 4, width, width.bit_length() - 1, **EXACT)
    assert torch.equal(found, tree(x))


@pytest.mark.parametrize("d", [128, 896, 1024, 4096])
def test_squares_are_added_up_in_groups_and_then_the_groups(d):
    x, weight, eps = wide(3, d), torch.rand(d), 0.03
    y, squares = layers.normed(x, weight, torch.float32)
    assert torch.equal(y, (x * weight))
    assert torch.equal(squares, tree((x * x).unflatten(1, (-1, 32))))
    groups = torch.nn.functional.pad(squares, (0, 256 - d // 32))  # zeros behind change no tree
    expected = inverse_root(tree(groups) / d + eps)
    by_row = head.inverse_rms(type("Weights", (), {"eps": eps}), squares)[:, 0]
    assert torch.equal(by_row, expected)
    for rows in (4, 32):  # of a few short ones, a thread adds up each; of others, several do
        together = torch.empty(3)
        scales_kernel[(1,)](squares, together, 3, eps, rows, d, **EXACT)
        assert torch.equal(together, by_row)
    assert_close(expected, x.double().square().mean(1).add(eps).rsqrt().float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("D", [32, 64, 128])
def test_the_norm_of_a_head_adds_its_halves_and_then_neighbours(D):
    v, weight, found = wide(4, D), torch.rand(D), torch.empty(4, D)
    head_norm_kernel[(1,)](v, weight, found, 0.03, 4, D, (D // 2).bit_length() - 1, **EXACT)
    first, second = v.chunk(2, 1)
    scale = inverse_root(tree(first * first + second * second) / D + 0.03)
    assert torch.equal(found, v * scale[:, None] * weight)


def step_of(rows: int, room: int = 8, shape: str = "qwen2") -> TritonStep:
    return new_step(fused_weights(small_policy(shape).model, torch.float32), rows, room)


@pytest.mark.parametrize(("depth", "pair"), [(128, 1), (192, 2), (384, 1), (448, 2)])
def test_shares_of_a_product_are_added_in_pairs(depth, pair):
    """Sums within a share are exact here, whatever their order; sums of shares are not."""
    share, step, rows = share_of(depth), step_of(3), 3
    generator = torch.Generator().manual_seed(depth)
    a, w = (torch.randint(-31, 32, (n, depth), generator=generator).float() for n in (rows, step.hidden))
    sizes = 2.0 ** -torch.tensor([0, 16, 5, 21])[torch.arange(depth) // share]
    a = a * sizes
    x, norm = wide(rows, step.hidden), torch.rand(step.hidden)
    parts = [i @ j.T for i, j in zip(a.split(share, 1), w.split(share, 1), strict=True)]
    assert len(parts) == -(-depth // share) <= 4
    pairs = [sum(parts[i + 1 : i + 2], parts[i]) for i in range(0, len(parts), 2)]
    expected = x + sum(pairs[1:], pairs[0])
    assert torch.equal(add_shares(x, a, w), expected)
    if len(parts) > 1:  # another order shows
        assert not torch.equal(sum(pairs if len(parts) > 2 else parts, x), expected)
        assert len(parts) < 4 or not torch.equal(x + sum(parts[1:], parts[0]), expected)
    step.x.copy_(x)
    tile = tiles.MatmulTile(16, 32, 64, stages=2, preloaded=1, shares=pair)
    step._add_by_triton(a, w, norm, rows, tile, shared=True)
    assert torch.equal(step.x, expected) and torch.equal(step.y[:rows], expected * norm)
    assert torch.equal(step.squares, tree((expected * expected).unflatten(1, (-1, 32))))
    assert not step.arrived.any()


PLACES = [0, 126, 127, 128, 255, 256, 319]  # of the newest token: first, last and only one of a tile


@triton.jit
def attend_kernel(q, k, v, ms, ls, accs, seen, scale, D: tl.constexpr, KEYS: tl.constexpr):
    g, at, ds = tl.arange(0, 16), tl.arange(0, KEYS), tl.arange(0, D)
    keys, values = tl.load(k + at[None, :] * D + ds[:, None]), tl.load(v + at[:, None] * D + ds[None, :])
    query = tl.load(q + g[:, None] * D + ds[None, :])
    m, mass, acc = operations.attend(query, keys, values, (at < seen)[None, :], scale, True)
    tl.store(ms + g, m)
    tl.store(ls + g, mass)
    tl.store(accs + g[:, None] * D + ds[None, :], acc)


def joined(q, k, v, scale) -> torch.Tensor:
    """Attention of q [G, D] to all of k and v [S, D]: tile by tile, joined in order, in NumPy."""
    D, out = q.shape[1], None
    query = torch.zeros(16, D, dtype=q.dtype)
    query[: len(q)] = q
    for first in range(0, len(k), KEYS):
        keys, values = (torch.zeros(KEYS, D, dtype=q.dtype) for _ in range(2))
        seen = min(KEYS, len(k) - first)
        keys[:seen], values[:seen] = k[first : first + KEYS], v[first : first + KEYS]
        m, mass, acc = (torch.empty(n) for n in (16, 16, 16 * D))
        attend_kernel[(1,)](query, keys, values, m, mass, acc, seen, scale, D, KEYS, **EXACT)
        m, mass, acc = m.numpy(), mass.numpy(), acc.view(16, D).numpy()
        if out is None:
            out = np.full(16, -np.inf, np.float32), np.zeros(16, np.float32), np.zeros((16, D), np.float32)
        highest = np.maximum(out[0], m)
        a, b = (np.exp2((x - highest) * np.float32(scale)) for x in (out[0], m))
        out = highest, out[1] * a + mass * b, out[2] * a[:, None] + acc * b[:, None]
    return torch.from_numpy(out[2] / out[1][:, None])[: len(q)]


@pytest.mark.parametrize("shape", ["qwen2", "qwen3"])
def test_attention_joins_tiles_in_order_however_they_are_split(shape):
    length = max(PLACES) + 1
    step = step_of(len(PLACES), length, shape)
    weights, cache = step.weights, step.cache[0]
    heads, kv_heads, D = weights.heads, weights.kv_heads, weights.head_dim
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(length, n, D, generator=generator) for n in (heads, kv_heads, kv_heads))
    q = 3 * q  # so that a few keys have most of the weight
    for part, tokens in zip(cache, (k, v), strict=True):  # of each row in its blocks
        blocks = pad(tokens, (0, 0, 0, 0, 0, -length % KEYS)).unflatten(0, (-1, KEYS)).transpose(1, 2)
        part.copy_(blocks.repeat(len(PLACES), 1, 1, 1))
    step.q.copy_(q[PLACES].flatten(1))
    step.slots.position.copy_(torch.tensor(PLACES))
    found = []
    for splits in (1, 2, 4):
        step.mixed.fill_(float("nan"))
        step._attention(cache, len(PLACES), tiles.AttentionTile(splits, stages=1))
        assert not step.arrived.any()
        found.append(step.mixed.clone().unflatten(1, (heads, D)))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    group, scale = heads // kv_heads, LOG2_E * D**-0.5
    for row, place in enumerate(PLACES):
        expected = joined(q[place, :group], k[: place + 1, 0], v[: place + 1, 0], scale)
        assert torch.equal(found[0][row, :group], expected)
    out, lse = layers.attention(q, k, v, Sequences.of(torch.tensor([length]), torch.tensor([0]), length, q.device))
    parts = [x.transpose(0, 1) for x in (q, k, v)]
    exact = scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True).transpose(0, 1)
    assert_close(out, exact, atol=5e-6, rtol=0)
    assert_close(found[0], out[PLACES], atol=5e-6, rtol=0)
    scores = torch.einsum("qhd,khd->hqk", parts[0].transpose(0, 1), k.repeat_interleave(group, 1)) * D**-0.5
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    assert_close(lse[0], scores.masked_fill(~seen, float("-inf")).logsumexp(-1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.7)])
def test_the_logprob_of_a_sampled_token_is_that_of_the_pass(sampling, monkeypatch):
    rows, vocabulary, tile = 6, 150, 64
    monkeypatch.setattr(triton_step, "VOCABULARY_TILE", tile)
    monkeypatch.setattr(head, "VOCABULARY_TILE", tile)
    step = step_of(rows)
    torch.manual_seed(0)
    step.squares.uniform_(10, 60)
    step.vocabulary, step.vocabulary_tiles = vocabulary, -(-vocabulary // tile)
    step.logits = 2 * torch.randn(rows, vocabulary)
    step.new_seed()
    step._sample(step.slots, step.logits, step.squares, sampling)
    tokens, (logprobs, mass) = step.slots.tokens[:rows, 0].contiguous(), torch.empty(2, rows)
    inverse = 1.0 if sampling.greedy else 1 / sampling.temperature
    head._logprobs(step.weights, step.logits, step.squares, tokens, inverse, logprobs, mass)
    assert torch.equal(step.slots.logprobs[:rows, 0], logprobs)
    logits = step.logits.double() * inverse / (step.squares.double().sum(1, keepdim=True) / step.hidden).sqrt()
    assert_close(logprobs.double(), logits.log_softmax(1).gather(1, tokens[:, None])[:, 0], atol=2e-5, rtol=0)
    assert_close(mass.double(), logits.logsumexp(1), atol=2e-5, rtol=0)
    if sampling.greedy:
        assert torch.equal(tokens, logits.argmax(1))


@pytest.mark.parametrize("count", [1, 1024, 1500])
def test_add_up_adds_in_one_order(count):
    x, first, second = torch.randn(3, count + 1, device=DEVICE)
    expected, kept = x[:count] + (first[:count] + second[:count]), first[count].item()
    pass_kernels.add_up_kernel[(-(-count // 1024),)](x, first, second, count, 1024, **EXACT)
    assert torch.equal(first[:count], expected) and first[count].item() == kept
