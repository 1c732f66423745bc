"""The forward pass over whole sequences, in Triton: all but its matrix products, which are PyTorch's. N tokens of
several sequences, one after the other; H query and K key-value heads of size D."""

import triton
import triton.language as tl

from rlcourse.exact import operations as ops


@triton.jit
def norm_kernel(x, weight, y, squares, d: tl.constexpr, B: tl.constexpr):
    """A row of x [N, d] float32: see `write_norm`."""
    row, o = tl.program_id(0).to(tl.int64), tl.arange(0, B)
    ops.write_norm(tl.load(x + row * d + o, mask=o < d, other=0.0), weight, y, squares, row, o, d, B)


@triton.jit
def load_heads(raw, bias, scale, n, heads, cols, H: tl.constexpr, D: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The halves of H heads [B, D / 2] of token n as they leave the projection."""
    half: tl.constexpr = D // 2
    o = heads[:, None] * D + cols[None, :]
    m = (heads < H)[:, None]
    v1 = tl.load(raw + n * (H * D) + o, mask=m, other=0.0).to(tl.float32) * scale
    v2 = tl.load(raw + n * (H * D) + o + half, mask=m, other=0.0).to(tl.float32) * scale
    if HAS_BIAS:
        v1 += tl.load(bias + o, mask=m, other=0.0).to(tl.float32)
        v2 += tl.load(bias + o + half, mask=m, other=0.0).to(tl.float32)
    return v1, v2


@triton.jit
def rope_kernel(
    raw, squares, bias, q_norm, k_norm, cos, sin, q, k, v, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, d: tl.constexpr, B: tl.constexpr, LEVELS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """A token: its projection raw [N, (H + 2 K) D], scaled and rotated by its angles, cos and sin [N, D / 2], into q
    [N, H, D], k and v [N, K, D]."""
    n, heads, cols = tl.program_id(0).to(tl.int64), tl.arange(0, B), tl.arange(0, D // 2)
    half: tl.constexpr = D // 2
    scale = ops.inverse_rms_of_row(squares, n, eps, d)
    v1, v2 = load_heads(raw, bias, scale, n, heads, cols, H + 2 * K, D, HAS_BIAS)
    if HAS_NORM:
        q1, q2 = ops.head_norm(v1, v2, q_norm, cols, B, D, LEVELS, eps)
        k1, k2 = ops.head_norm(v1, v2, k_norm, cols, B, D, LEVELS, eps)
        is_query, is_key = (heads < H)[:, None], (heads < H + K)[:, None]
        v1 = tl.where(is_query, q1, tl.where(is_key, k1, v1))
        v2 = tl.where(is_query, q2, tl.where(is_key, k2, v2))
    c = tl.load(cos + n * half + cols)[None, :]
    s = tl.load(sin + n * half + cols)[None, :]
    r1, r2 = ops.rotated(v1, v2, c, s)
    turns = (heads < H + K)[:, None]
    r1, r2 = tl.where(turns, r1, v1), tl.where(turns, r2, v2)
    store_heads(q + n * (H * D), r1, r2, heads, cols, H, D)
    store_heads(k + n * (K * D), r1, r2, heads - H, cols, K, D)
    store_heads(v + n * (K * D), r1, r2, heads - H - K, cols, K, D)


@triton.jit
def store_heads(target, v1, v2, heads, cols, H: tl.constexpr, D: tl.constexpr):
    """Those of the heads that are 0 to H - 1."""
    m = ((heads >= 0) & (heads < H))[:, None]
    o = heads[:, None] * D + cols[None, :]
    tl.store(target + o, v1.to(target.dtype.element_ty), mask=m)
    tl.store(target + o + D // 2, v2.to(target.dtype.element_ty), mask=m)


@triton.jit
def load_sequence(table, sequence):
    """(length, shared, source, own) of a sequence, int64 but the first: see `Sequences`."""
    table += sequence * 4
    shared, source, own = tl.load(table + 1), tl.load(table + 2), tl.load(table + 3)
    return tl.load(table), shared.to(tl.int64), source.to(tl.int64), own.to(tl.int64)


@triton.jit
def place_of(position, shared, source, own):
    """Where tokens of a sequence stand among those that are computed."""
    return position + tl.where(position < shared, source, own - shared)


@triton.jit
def attention_kernel(
    q, k, v, out, lse, table, longest, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Causal attention of BM queries of a head and sequence: out [N, H, D], lse [S, H, longest] in nats; those of
    tokens that a sequence shares are computed where they stand. table [S, 4]: see `Sequences`."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    kv_head = head // (H // K)
    L, shared, source, own = load_sequence(table, sequence)
    if (block * BM >= L) | (block * BM + BM <= shared):
        return
    rows, at, ds = block * BM + tl.arange(0, BM), tl.arange(0, KEYS), tl.arange(0, D)
    mine = ((rows >= shared) & (rows < L))[:, None]
    places = (own - shared + rows)[:, None] * (H * D) + head * D + ds[None, :]
    k += kv_head * D
    v += kv_head * D
    query = tl.load(q + places, mask=mine, other=0.0)
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    whole = (block * BM) // KEYS * KEYS  # keys of tiles that all of these queries see
    for first in range(0, whole, KEYS):
        token = place_of(first + at, shared, source, own)
        keys = tl.load(k + token[None, :] * (K * D) + ds[:, None])
        values = tl.load(v + token[:, None] * (K * D) + ds[None, :])
        tile_m, tile_l, tile_acc = ops.attend(query, keys, values, True, scale, False)
        m, l, acc = ops.join(m, l, acc, tile_m, tile_l, tile_acc, scale)
    for first in range(whole, tl.minimum(block * BM + BM, L), KEYS):
        here = first + at
        token = place_of(here, shared, source, own)
        keys = tl.load(k + token[None, :] * (K * D) + ds[:, None], mask=(here < L)[None, :], other=0.0)
        values = tl.load(v + token[:, None] * (K * D) + ds[None, :], mask=(here < L)[:, None], other=0.0)
        seen = here[None, :] <= rows[:, None]
        tile_m, tile_l, tile_acc = ops.attend(query, keys, values, seen, scale, True)
        m, l, acc = ops.join(m, l, acc, tile_m, tile_l, tile_acc, scale)
    tl.store(out + places, (acc / l[:, None]).to(out.dtype.element_ty), mask=mine)
    lse += (sequence * H + head) * longest
    tl.store(lse + rows[:, None], (m * (scale * 0.6931471805599453) + tl.log(l))[:, None], mask=mine)


@triton.jit
def swiglu_kernel(raw, squares, h, eps, inner: tl.constexpr, d: tl.constexpr, B: tl.constexpr):
    """silu(gate) * up of a token and a tile of columns: raw [N, 2 inner] → h [N, inner]."""
    n, o = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    scale = ops.inverse_rms_of_row(squares, n, eps, d)
    gate = ops.scaled(tl.load(raw + n * (2 * inner) + o, mask=o < inner, other=0.0), scale, raw.dtype.element_ty)
    up = ops.scaled(tl.load(raw + n * (2 * inner) + inner + o, mask=o < inner, other=0.0), scale, raw.dtype.element_ty)
    tl.store(h + n * inner + o, ops.swiglu(gate, up).to(h.dtype.element_ty), mask=o < inner)


@triton.jit
def scale_kernel(squares, scale, eps, d: tl.constexpr):
    """1 / rms of a row."""
    row = tl.program_id(0)
    tl.store(scale + row, ops.inverse_rms_of_row(squares, row, eps, d))


@triton.jit
def mass_kernel(
    logits, squares, tile_max, tile_sum, V, inverse_temperature, eps,
    d: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of a tile of a row's logits the largest, and the sum of exp(logit - largest). A program is one warp: so all who
    launch it add in one order."""
    tile, slot = tl.program_id(0), tl.program_id(1)
    if PDL:
        ops.gdc_launch_dependents()
        ops.gdc_wait()
    cols = tile * BN + tl.arange(0, BN)
    values = tl.load(logits + slot.to(tl.int64) * V + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
    values = values * (ops.inverse_rms_of_row(squares, slot, eps, d) * inverse_temperature)
    largest = tl.max(values, 0)
    tl.store(tile_max + slot * TILES + tile, largest)
    tl.store(tile_sum + slot * TILES + tile, tl.sum(tl.exp(values - largest), 0))


@triton.jit
def add_up_kernel(x, first, second, count, B: tl.constexpr):
    """first = x + (first + second), all [count] float32."""
    o = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    m = o < count
    total = tl.load(first + o, mask=m) + tl.load(second + o, mask=m)
    tl.store(first + o, tl.load(x + o, mask=m) + total, mask=m)


@triton.jit
def logprob_kernel(
    logits, targets, squares, tile_max, tile_sum, logprobs, log_mass, V, inverse_temperature, eps,
    d: tl.constexpr, TILES: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The log-prob of a row's target, and the logarithm of the mass that its logits, scaled, have together."""
    row = tl.program_id(0)
    _, _, highest, total = ops.total_mass(tile_max, tile_sum, row, TILES, B)
    scale = ops.inverse_rms_of_row(squares, row, eps, d) * inverse_temperature
    value = tl.load(logits + row.to(tl.int64) * V + tl.load(targets + row)).to(tl.float32) * scale
    tl.store(logprobs + row, value - highest - tl.log(total))
    tl.store(log_mass + row, highest + tl.log(total))
