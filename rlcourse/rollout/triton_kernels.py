"""The kernels of a decode step in Triton, five a layer. `rlcourse.rollout.fused` launches them.

R rows of d features, H query and K key-value heads of size D. The residual stream x [R, d] is float32. A norm is split
in two: whoever writes x also writes y = x * weight in the weights' dtype and the tile's sum of squares `ss` [R, tiles];
whoever reads y multiplies its result by 1 / rms, which a matrix product allows. So no norm costs a kernel.

EARLY is programmatic dependent launch (Hopper and later): a kernel may begin while the one before it still runs, loads
its weights, which nobody writes, into registers, and only then waits for what the one before it computes.
"""

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # the name of older releases
    from triton.language.extra.cuda.gdc import gdc_launch_dependents, gdc_wait


@triton.jit
def embed_kernel(
    token, position, tick, embedding, norm, inv_freq, x, y, ss, cos, sin,
    d: tl.constexpr, B: tl.constexpr, T: tl.constexpr, half: tl.constexpr,
):  # fmt: skip
    """A row: its token's embedding, the first norm's parts, and the angles of its position. Counts the step."""
    row = tl.program_id(0)
    if row == 0:
        tl.store(tick, tl.load(tick) + 1)
    o = tl.arange(0, B)
    m = o < d
    v = tl.load(embedding + tl.load(token + row) * d + o, mask=m, other=0.0).to(tl.float32)
    tl.store(x + row * d + o, v, mask=m)
    tl.store(y + row * d + o, (v * tl.load(norm + o, mask=m, other=0.0)).to(y.dtype.element_ty), mask=m)
    t = tl.arange(0, 256)
    tl.store(ss + row * T + t, tl.where(t == 0, tl.sum(v * v, 0), 0.0), mask=t < T)
    c = tl.arange(0, half)
    angle = tl.load(position + row).to(tl.float32) * tl.load(inv_freq + c)
    tl.store(cos + row * half + c, tl.cos(angle))
    tl.store(sin + row * half + c, tl.sin(angle))


@triton.jit
def inverse_rms(ss, rows, R, eps, d: tl.constexpr, T: tl.constexpr):
    """1 / rms of rows of x [BM, 1], from the sums of squares of its tiles."""
    t = tl.arange(0, 256)
    parts = tl.load(ss + rows[:, None] * T + t[None, :], mask=(rows < R)[:, None] & (t < T)[None, :], other=0.0)
    return tl.rsqrt(tl.sum(parts, 1) / d + eps)[:, None]


@triton.jit
def two_products(
    y, first, second, rows, R,
    d: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [rows, d] times two tiles of weights [BN, d], at pointers `first` and `second` [BN, BK]: two [BM, BN]."""
    ks = tl.arange(0, BK)
    m = (rows < R)[:, None]
    a1 = tl.zeros((BM, BN), tl.float32)
    a2 = tl.zeros((BM, BN), tl.float32)
    yp = y + rows[:, None] * d + ks[None, :]
    if EARLY:
        w1 = ()
        w2 = ()
        for k in tl.static_range(d // BK):
            w1 = w1 + (tl.load(first + k * BK),)  # noqa: RUF005 (Triton knows no unpacking)
            w2 = w2 + (tl.load(second + k * BK),)  # noqa: RUF005
        if PDL:
            gdc_wait()
        for k in tl.static_range(d // BK):
            a = tl.load(yp + k * BK, mask=m, other=0.0)
            a1 = tl.dot(a, tl.trans(w1[k]), a1, input_precision="ieee")
            a2 = tl.dot(a, tl.trans(w2[k]), a2, input_precision="ieee")
    else:
        if PDL:
            gdc_wait()
        for k in range(0, d, BK):
            a = tl.load(yp + k, mask=m, other=0.0)
            a1 = tl.dot(a, tl.trans(tl.load(first + k)), a1, input_precision="ieee")
            a2 = tl.dot(a, tl.trans(tl.load(second + k)), a2, input_precision="ieee")
    return a1, a2


@triton.jit
def head_norm(v1, v2, weight, cols, D: tl.constexpr, eps):
    """RMSNorm over a head whose halves are v1 and v2 [BM, D / 2]: Qwen3's norm of queries and keys."""
    scale = tl.rsqrt((tl.sum(v1 * v1, 1) + tl.sum(v2 * v2, 1)) / D + eps)[:, None]
    return v1 * scale * tl.load(weight + cols)[None, :], v2 * scale * tl.load(weight + D // 2 + cols)[None, :]


@triton.jit
def qkv_kernel(
    y, ss, w, bias, q_norm, k_norm, cos, sin, position, q_out, cache, R, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, d: tl.constexpr, stride_kv, stride_row, stride_head,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, T: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A head: its projection, rotated; queries go to q_out [R, H * D], keys and values into the cache at `position`."""
    half: tl.constexpr = D // 2
    head = tl.program_id(0)
    cols = tl.arange(0, half)
    if PDL:
        gdc_launch_dependents()
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    first = w + (head * D + cols)[:, None] * d + tl.arange(0, BK)[None, :]
    v1, v2 = two_products(y, first, first + half * d, rows, R, d, BM, half, BK, EARLY, PDL)
    m = (rows < R)[:, None]
    scale = inverse_rms(ss, rows, R, eps, d, T)
    v1 = v1 * scale
    v2 = v2 * scale
    if HAS_BIAS:
        v1 += tl.load(bias + head * D + cols).to(tl.float32)[None, :]
        v2 += tl.load(bias + head * D + half + cols).to(tl.float32)[None, :]
    if HAS_NORM:
        if head < H:
            v1, v2 = head_norm(v1, v2, q_norm, cols, D, eps)
        elif head < H + K:
            v1, v2 = head_norm(v1, v2, k_norm, cols, D, eps)
    if head < H + K:
        c = tl.load(cos + rows[:, None] * half + cols[None, :], mask=m, other=0.0)
        s = tl.load(sin + rows[:, None] * half + cols[None, :], mask=m, other=0.0)
        v1, v2 = v1 * c - v2 * s, v2 * c + v1 * s
    if head < H:
        p = q_out + rows[:, None] * (H * D) + head * D + cols[None, :]
    else:
        at = tl.load(position + rows, mask=rows < R, other=0)
        base = cache + ((head - H) // K).to(tl.int64) * stride_kv + ((head - H) % K) * stride_head
        p = base + rows[:, None].to(tl.int64) * stride_row + at[:, None] * D + cols[None, :]
    tl.store(p, v1.to(cache.dtype.element_ty), mask=m)
    tl.store(p + half, v2.to(cache.dtype.element_ty), mask=m)


@triton.jit
def attention_kernel(
    q, cache, position, part, part_ml, arrived, out, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, stride_kv, stride_row, stride_head,
    SPLITS: tl.constexpr, BS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One query token of a row against a share of its cache, the query heads of a key-value head together, by online
    softmax (Milakov and Gimelshein 2018, arXiv:1805.02867); the last program of a row and head puts the shares together
    (Flash-Decoding)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = H // K
    G16: tl.constexpr = 16 if G <= 16 else 32
    g = tl.arange(0, G16)
    ds = tl.arange(0, D)
    length = tl.load(position + row).to(tl.int32) + 1
    share = tl.cdiv(tl.cdiv(length, SPLITS), 16) * 16
    end = tl.minimum(split * share + share, length)
    heads = row * (H * D) + (kv_head * G + g)[:, None] * D + ds[None, :]
    query = tl.load(q + heads, mask=(g < G)[:, None], other=0.0)
    top = tl.full((G16,), -1e30, tl.float32)
    mass = tl.zeros((G16,), tl.float32)
    mixed = tl.zeros((G16, D), tl.float32)
    base = cache + row.to(tl.int64) * stride_row + kv_head * stride_head
    for s in range(split * share, end, BS):
        at = s + tl.arange(0, BS)
        seen = at < end
        keys = tl.load(base + at[None, :] * D + ds[:, None], mask=seen[None, :], other=0.0)
        values = tl.load(base + stride_kv + at[:, None] * D + ds[None, :], mask=seen[:, None], other=0.0)
        scores = tl.dot(query, keys, input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp(scores - higher[:, None])
        shrink = tl.exp(top - higher)
        mass = mass * shrink + tl.sum(p, 1)
        mixed = mixed * shrink[:, None] + tl.dot(p.to(values.dtype), values, input_precision="ieee")
        top = higher
    if SPLITS > 1:
        pair = row * K + kv_head
        mine = (pair * SPLITS + split) * G16
        tl.store(part + (mine + g)[:, None] * D + ds[None, :], mixed)
        tl.store(part_ml + 2 * mine + g, top)
        tl.store(part_ml + 2 * mine + G16 + g, mass)
        tl.debug_barrier()
        if tl.atomic_add(arrived + pair, 1, sem="acq_rel") == SPLITS - 1:
            top = tl.full((G16,), -1e30, tl.float32)
            for s in range(SPLITS):
                top = tl.maximum(top, tl.load(part_ml + 2 * (pair * SPLITS + s) * G16 + g, cache_modifier=".cg"))
            mass = tl.zeros((G16,), tl.float32)
            mixed = tl.zeros((G16, D), tl.float32)
            for s in range(SPLITS):
                its = (pair * SPLITS + s) * G16
                weight = tl.exp(tl.load(part_ml + 2 * its + g, cache_modifier=".cg") - top)
                mass += weight * tl.load(part_ml + 2 * its + G16 + g, cache_modifier=".cg")
                piece = tl.load(part + (its + g)[:, None] * D + ds[None, :], cache_modifier=".cg")
                mixed += weight[:, None] * piece
            tl.store(out + heads, (mixed / mass[:, None]).to(out.dtype.element_ty), mask=(g < G)[:, None])
            tl.store(arrived + pair, 0)
    else:
        tl.store(out + heads, (mixed / mass[:, None]).to(out.dtype.element_ty), mask=(g < G)[:, None])


@triton.jit
def add_kernel(
    a, w, x, norm, y, ss, part, arrived, R,
    N: tl.constexpr, KD: tl.constexpr, SPLITS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x += a @ w.T for a tile of columns, then y and ss of the next norm. KD is split between programs; the last one
    that arrives adds the pieces up in a fixed order, so that the sum is the same each time."""
    tile, split, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    cols = tile * BN + tl.arange(0, BN)
    rows = block * BM + tl.arange(0, BM)
    ks = tl.arange(0, BK)
    per: tl.constexpr = (KD // BK + SPLITS - 1) // SPLITS
    begin = split * per * BK
    m = (rows < R)[:, None]
    if PDL:
        gdc_launch_dependents()
    acc = tl.zeros((BM, BN), tl.float32)
    wp = w + cols[:, None] * KD + ks[None, :]
    ap = a + rows[:, None] * KD + ks[None, :]
    if EARLY:
        held = ()
        for b in tl.static_range(per):
            k = begin + b * BK
            held = held + (tl.load(wp + k, mask=(k + ks < KD)[None, :], other=0.0),)  # noqa: RUF005
        if PDL:
            gdc_wait()
        for b in tl.static_range(per):
            k = begin + b * BK
            piece = tl.load(ap + k, mask=m & (k + ks < KD)[None, :], other=0.0)
            acc = tl.dot(piece, tl.trans(held[b]), acc, input_precision="ieee")
    else:
        if PDL:
            gdc_wait()
        for k in range(begin, tl.minimum(begin + per * BK, KD), BK):
            piece = tl.load(ap + k, mask=m, other=0.0)
            acc = tl.dot(piece, tl.trans(tl.load(wp + k)), acc, input_precision="ieee")
    xp = x + rows[:, None] * N + cols[None, :]
    done = True
    if SPLITS > 1:
        place = block * (N // BN) + tile
        pieces = part + place * SPLITS * BM * BN + tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        tl.store(pieces + split * BM * BN, acc)
        tl.debug_barrier()
        done = tl.atomic_add(arrived + place, 1, sem="acq_rel") == SPLITS - 1
        if done:
            acc = tl.zeros((BM, BN), tl.float32)
            for s in range(SPLITS):
                acc += tl.load(pieces + s * BM * BN, cache_modifier=".cg")
            tl.store(arrived + place, 0)
    if done:
        total = tl.load(xp, mask=m, other=0.0) + acc
        tl.store(xp, total, mask=m)
        scaled = total * tl.load(norm + cols)[None, :]
        tl.store(y + rows[:, None] * N + cols[None, :], scaled.to(y.dtype.element_ty), mask=m)
        tl.store(ss + rows * (N // BN) + tile, tl.sum(total * total, 1), mask=rows < R)


@triton.jit
def gate_up_kernel(
    y, ss, w, h, R, eps, inner: tl.constexpr, d: tl.constexpr, T: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up for a tile of columns: h [R, inner]."""
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    if PDL:
        gdc_launch_dependents()
    first = w + cols[:, None] * d + tl.arange(0, BK)[None, :]
    gate, up = two_products(y, first, first + inner * d, rows, R, d, BM, BN, BK, EARLY, PDL)
    scale = inverse_rms(ss, rows, R, eps, d, T)
    gate = gate * scale
    up = up * scale
    value = (gate * tl.sigmoid(gate) * up).to(h.dtype.element_ty)
    tl.store(h + rows[:, None] * inner + cols[None, :], value, mask=(rows < R)[:, None])


@triton.jit
def norm_kernel(y, ss, out, eps, d: tl.constexpr, B: tl.constexpr, T: tl.constexpr):
    """The rest of the last norm: out = y / rms."""
    row = tl.program_id(0)
    t = tl.arange(0, 256)
    scale = tl.rsqrt(tl.sum(tl.load(ss + row * T + t, mask=t < T, other=0.0), 0) / d + eps)
    o = tl.arange(0, B)
    v = tl.load(y + row * d + o, mask=o < d, other=0.0).to(tl.float32)
    tl.store(out + row * d + o, (v * scale).to(out.dtype.element_ty), mask=o < d)
