"""The gradients of `pass_kernels.py`, in Triton. They need not be the same bits in two places, so they are the fastest.
With y = x * weight and s = 1 / rms(x), a layer's product is s * (y @ W.T). `dy` is the gradient of y with s held still,
so the gradient of s is sum(dy * y) / s, and that of x has a second part: -s^2 * x * sum(dy * y) / d."""

import triton
import triton.language as tl

from rlcourse.exact.operations import inverse_rms_of_row
from rlcourse.exact.pass_kernels import load_heads, load_sequence, place_of


@triton.jit
def norm_backward_kernel(
    x, weight, squares, dy, beside, dx, rounded, y, partial, N, eps, d: tl.constexpr, B: tl.constexpr
):
    """dx [N, d] float32: what comes through the norm and, if there is something, beside it; rounded, the same; y again,
    which the forward pass did not keep. partial [programs, d]: each program's part of the weight's gradient."""
    o = tl.arange(0, B)
    m = o < d
    w = tl.load(weight + o, mask=m, other=0.0)
    dw = tl.zeros((B,), tl.float32)
    for n in range(tl.program_id(0).to(tl.int64), N, tl.num_programs(0)):
        row = n * d + o
        value = tl.load(x + row, mask=m, other=0.0)
        g = tl.load(dy + row, mask=m, other=0.0).to(tl.float32)
        scale = inverse_rms_of_row(squares, n, eps, d)
        through_scale = scale * scale * tl.sum(g * value * w, 0) / d
        result = g * w - value * through_scale
        if beside is not None:
            result += tl.load(beside + row, mask=m, other=0.0)
        tl.store(dx + row, result, mask=m)
        tl.store(rounded + row, result.to(rounded.dtype.element_ty), mask=m)
        tl.store(y + row, (value * w).to(y.dtype.element_ty), mask=m)
        dw += g * value
    tl.store(partial + tl.program_id(0) * d + o, dw, mask=m)


@triton.jit
def swiglu_backward_kernel(raw, squares, dh, draw, h, eps, inner: tl.constexpr, d: tl.constexpr, B: tl.constexpr):
    """draw [N, 2 inner] from dh [N, inner]; h again, which the forward pass did not keep."""
    n, o = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    m = o < inner
    scale = inverse_rms_of_row(squares, n, eps, d)
    gate = tl.load(raw + n * (2 * inner) + o, mask=m, other=0.0).to(tl.float32) * scale
    up = tl.load(raw + n * (2 * inner) + inner + o, mask=m, other=0.0).to(tl.float32) * scale
    g = tl.load(dh + n * inner + o, mask=m, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    dgate = g * up * sigmoid * (1.0 + gate * (1.0 - sigmoid)) * scale
    dup = g * gate * sigmoid * scale
    tl.store(draw + n * (2 * inner) + o, dgate.to(draw.dtype.element_ty), mask=m)
    tl.store(draw + n * (2 * inner) + inner + o, dup.to(draw.dtype.element_ty), mask=m)
    tl.store(h + n * inner + o, (gate * sigmoid * up).to(h.dtype.element_ty), mask=m)


@triton.jit
def query_gradient_kernel(
    g, q, k, v, out, lse, delta, dq, table, longest, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dq [N, H, D] of BM queries of a head and sequence, from g, the gradient of `out`; see `attention_kernel`. With p
    the weight of a key, that of its score is p * (g . v - g . out). delta [S, H, longest] float32: g . out."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    L, shared, source, own = load_sequence(table, sequence)
    if (block * BM >= L) | (block * BM + BM <= shared):
        return
    rows, at, ds = block * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, D)
    mine = (rows >= shared) & (rows < L)
    places = (own - shared + rows)[:, None] * (H * D) + head * D + ds[None, :]
    query = tl.load(q + places, mask=mine[:, None], other=0.0)
    gradient = tl.load(g + places, mask=mine[:, None], other=0.0)
    output = tl.load(out + places, mask=mine[:, None], other=0.0)
    dot = tl.sum(gradient.to(tl.float32) * output.to(tl.float32), 1)
    here = (sequence * H + head) * longest + rows
    tl.store(delta + here, dot, mask=mine)
    mass = tl.load(lse + here, mask=mine, other=0.0) * 1.4426950408889634
    k += head // (H // K) * D
    v += head // (H // K) * D
    acc = tl.zeros((BM, D), tl.float32)
    for first in range(0, tl.minimum(block * BM + BM, L), BN):
        keys_at = first + at
        token = place_of(keys_at, shared, source, own)[:, None] * (K * D) + ds[None, :]
        keys = tl.load(k + token, mask=(keys_at < L)[:, None], other=0.0)
        values = tl.load(v + token, mask=(keys_at < L)[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * (scale * 1.4426950408889634)
        p = tl.where(keys_at[None, :] <= rows[:, None], tl.exp2(scores - mass[:, None]), 0.0)
        through = p * (tl.dot(gradient, tl.trans(values), input_precision="ieee") - dot[:, None])
        acc += tl.dot(through.to(keys.dtype), keys, input_precision="ieee")
    tl.store(dq + places, (acc * scale).to(dq.dtype.element_ty), mask=mine[:, None])


@triton.jit
def key_gradient_kernel(
    g, q, k, v, lse, delta, dk, dv, table, longest, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dk and dv [S, longest, K, D] of BN keys of a head and sequence, from that sequence's own queries and `delta`."""
    first, kv_head, sequence = tl.program_id(0) * BN, tl.program_id(1), tl.program_id(2).to(tl.int64)
    L, shared, source, own = load_sequence(table, sequence)
    if first >= L:
        return
    at, queries, ds = first + tl.arange(0, BN), tl.arange(0, BM), tl.arange(0, D)
    token = place_of(at, shared, source, own)[:, None] * (K * D) + kv_head * D + ds[None, :]
    keys = tl.load(k + token, mask=(at < L)[:, None], other=0.0)
    values = tl.load(v + token, mask=(at < L)[:, None], other=0.0)
    key_sum, value_sum = tl.zeros((BN, D), tl.float32), tl.zeros((BN, D), tl.float32)
    begin = tl.maximum(first, shared.to(tl.int32)) // BM
    blocks = tl.cdiv(L, BM) - begin  # of queries; those of one head after those of the other
    for turn in range(blocks * (H // K)):
        head, rows = kv_head * (H // K) + turn // blocks, (begin + turn % blocks) * BM + queries
        mine = (rows >= shared) & (rows < L)
        places = (own - shared + rows)[:, None] * (H * D) + head * D + ds[None, :]
        query = tl.load(q + places, mask=mine[:, None], other=0.0)
        gradient = tl.load(g + places, mask=mine[:, None], other=0.0)
        here = (sequence * H + head) * longest + rows
        mass = tl.load(lse + here, mask=mine, other=0.0) * 1.4426950408889634
        dot = tl.load(delta + here, mask=mine, other=0.0)
        scores = tl.dot(keys, tl.trans(query), input_precision="ieee") * (scale * 1.4426950408889634)
        p = tl.where(at[:, None] <= rows[None, :], tl.exp2(scores - mass[None, :]), 0.0)
        value_sum += tl.dot(p.to(gradient.dtype), gradient, input_precision="ieee")
        through = p * (tl.dot(values, tl.trans(gradient), input_precision="ieee") - dot[None, :])
        key_sum += tl.dot(through.to(query.dtype), query, input_precision="ieee")
    target = (sequence * longest + at)[:, None] * (K * D) + kv_head * D + ds[None, :]
    tl.store(dk + target, (key_sum * scale).to(dk.dtype.element_ty), mask=(at < L)[:, None])
    tl.store(dv + target, value_sum.to(dv.dtype.element_ty), mask=(at < L)[:, None])


@triton.jit
def gradient_heads(source, heads, cols, H: tl.constexpr, D: tl.constexpr):
    """Halves [B, D / 2] of the heads that are 0 to H - 1, zeros for the others."""
    m = ((heads >= 0) & (heads < H))[:, None]
    o = heads[:, None] * D + cols[None, :]
    first = tl.load(source + o, mask=m, other=0.0).to(tl.float32)
    return first, tl.load(source + o + D // 2, mask=m, other=0.0).to(tl.float32)


@triton.jit
def rope_backward_kernel(
    dq, dk, dv, places, copies, longest, raw, squares, q_norm, k_norm, cos, sin, draw, partial_bias, partial_q,
    partial_k, N, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, d: tl.constexpr, B: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """draw [N, (H + 2 K) D] from the gradients of q [N, H, D], and of k and v [..., K, D], where tokens have `places`
    [N], and also `longest` further on, as often as a token has `copies` [N]. Each program's part of the gradients of
    the bias, [programs, (H + 2 K) D], and of the norms of queries and keys, [programs, D]."""
    half: tl.constexpr = D // 2
    all_heads: tl.constexpr = H + 2 * K
    heads, cols, program = tl.arange(0, B), tl.arange(0, half), tl.program_id(0)
    is_query, turns = (heads < H)[:, None], (heads < H + K)[:, None]
    m = (heads < all_heads)[:, None]
    o = heads[:, None] * D + cols[None, :]
    bias1, bias2 = tl.zeros((B, half), tl.float32), tl.zeros((B, half), tl.float32)
    if HAS_NORM:
        w1 = tl.where(is_query, tl.load(q_norm + cols)[None, :], tl.load(k_norm + cols)[None, :])
        w2 = tl.where(is_query, tl.load(q_norm + half + cols)[None, :], tl.load(k_norm + half + cols)[None, :])
    for token in range(program.to(tl.int64), N, tl.num_programs(0)):
        scale = inverse_rms_of_row(squares, token, eps, d)
        place = tl.load(places + token)
        q1, q2 = gradient_heads(dq + token * (H * D), heads, cols, H, D)
        k1, k2 = gradient_heads(dk + place * (K * D), heads - H, cols, K, D)
        v1, v2 = gradient_heads(dv + place * (K * D), heads - H - K, cols, K, D)
        g1, g2 = q1 + k1 + v1, q2 + k2 + v2  # of each head two of the three are zeros
        for _copy in range(tl.load(copies + token)):
            place += longest
            k1, k2 = gradient_heads(dk + place * (K * D), heads - H, cols, K, D)
            v1, v2 = gradient_heads(dv + place * (K * D), heads - H - K, cols, K, D)
            g1, g2 = g1 + k1 + v1, g2 + k2 + v2
        c, s = tl.load(cos + token * half + cols)[None, :], tl.load(sin + token * half + cols)[None, :]
        r1, r2 = tl.where(turns, g1 * c + g2 * s, g1), tl.where(turns, g2 * c - g1 * s, g2)
        if HAS_NORM:
            u1, u2 = load_heads(raw, raw, scale, token, heads, cols, all_heads, D, False)
            inverse = tl.rsqrt((tl.sum(u1 * u1, 1) + tl.sum(u2 * u2, 1)) / D + eps)[:, None]
            n1, n2 = u1 * inverse, u2 * inverse
            bias1 += r1 * n1  # here of the norms' weights: Qwen3 has no bias
            bias2 += r2 * n2
            mean = ((tl.sum(r1 * w1 * n1, 1) + tl.sum(r2 * w2 * n2, 1)) / D)[:, None]
            r1 = tl.where(turns, (r1 * w1 - n1 * mean) * inverse, r1)
            r2 = tl.where(turns, (r2 * w2 - n2 * mean) * inverse, r2)
        elif HAS_BIAS:
            bias1 += r1
            bias2 += r2
        tl.store(draw + token * (all_heads * D) + o, (r1 * scale).to(draw.dtype.element_ty), mask=m)
        tl.store(draw + token * (all_heads * D) + o + half, (r2 * scale).to(draw.dtype.element_ty), mask=m)
    if HAS_BIAS:
        tl.store(partial_bias + program * (all_heads * D) + o, bias1, mask=m)
        tl.store(partial_bias + program * (all_heads * D) + o + half, bias2, mask=m)
    if HAS_NORM:
        is_key = turns & (heads >= H)[:, None]
        at = program * D + cols
        tl.store(partial_q + at, tl.sum(tl.where(is_query, bias1, 0.0), 0))
        tl.store(partial_q + at + half, tl.sum(tl.where(is_query, bias2, 0.0), 0))
        tl.store(partial_k + at, tl.sum(tl.where(is_key, bias1, 0.0), 0))
        tl.store(partial_k + at + half, tl.sum(tl.where(is_key, bias2, 0.0), 0))


@triton.jit
def logit_gradient_kernel(
    logits, targets, squares, log_mass, gradient, V, inverse_temperature, eps, d: tl.constexpr, B: tl.constexpr
):
    """The gradient of a tile of a row's raw logits, in their place: (1 at the target - p) * gradient * scale."""
    row, o = tl.program_id(0), tl.program_id(1) * B + tl.arange(0, B)
    scale = inverse_rms_of_row(squares, row, eps, d) * inverse_temperature
    at = logits + row.to(tl.int64) * V + o
    p = tl.exp(tl.load(at, mask=o < V, other=0.0).to(tl.float32) * scale - tl.load(log_mass + row))
    hit = (o == tl.load(targets + row)).to(tl.float32)
    tl.store(at, ((hit - p) * (tl.load(gradient + row) * scale)).to(logits.dtype.element_ty), mask=o < V)
