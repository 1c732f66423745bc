"""The kernels of a decode step in Triton: all but attention and sampling. `rlcourse.rollout.triton_step` launches them.

R rows of d features, H query and K key-value heads of size D. The residual stream x [R, d] is float32. A norm is split
in two: whoever writes x also writes y = x * weight in the weights' dtype and the tile's sum of squares `ss` [R, tiles];
whoever reads y multiplies its result by 1 / rms, which a matrix product allows. So no norm costs a kernel.

PDL is programmatic dependent launch (Hopper and later): a kernel may begin while the one before it still runs. It loads
weights, which nobody writes, or the cache of earlier steps into registers, and only then waits for what the one before
it computes. What is needed after a product is asked for before it. The first kernel is launched without PDL, so a step
begins when the one before has ended.
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
    t = tl.arange(0, 32 if T <= 32 else 256)
    parts = tl.load(ss + rows[:, None] * T + t[None, :], mask=(rows < R)[:, None] & (t < T)[None, :], other=0.0)
    return tl.rsqrt(tl.sum(parts, 1) / d + eps)[:, None]


@triton.jit
def preload(w, begin, end, BK: tl.constexpr, PRELOADED: tl.constexpr):
    """The first PRELOADED blocks [BN, BK] of the weights at pointers `w`, from depth begin on."""
    preloaded = ()
    for b in tl.static_range(PRELOADED):
        seen = begin + b * BK + tl.arange(0, BK) < end
        preloaded = preloaded + (tl.load(w + begin + b * BK, mask=seen[None, :], other=0.0),)  # noqa: RUF005
    return preloaded


@triton.jit
def product(
    a, w, preloaded, rows, R, begin, end,
    width: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRELOADED: tl.constexpr,
):  # fmt: skip
    """Rows of a [R, width] times a tile of weights at pointers `w` [BN, BK], over the depth from begin to end.

    The weights of the first PRELOADED blocks are there already.
    """
    ks = begin + tl.arange(0, BK)
    m = (rows < R)[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    ap = a + rows[:, None] * width + ks[None, :]
    for b in tl.static_range(PRELOADED):
        piece = tl.load(ap + b * BK, mask=m & (b * BK + ks < end)[None, :], other=0.0)
        acc = tl.dot(piece, tl.trans(preloaded[b]), acc, input_precision="ieee")
    for k in range(PRELOADED * BK, end - begin, BK):
        piece = tl.load(ap + k, mask=m, other=0.0)
        acc = tl.dot(piece, tl.trans(tl.load(w + begin + k)), acc, input_precision="ieee")
    return acc


@triton.jit
def pair_of_tiles(w, distance, d: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Pointers [2 * BN, BK] to BN rows of weights at `w` and BN at `distance` rows behind it, in turns: so they are one
    product, and `pair` finds both results of a column with the same thread."""
    turn = tl.arange(0, 2 * BN)
    return w + ((turn % 2) * distance + turn // 2)[:, None] * d + tl.arange(0, BK)[None, :]


@triton.jit
def pair(acc, BM: tl.constexpr, BN: tl.constexpr):
    """The two results [BM, BN] of a product with a pair of tiles."""
    return tl.split(acc.reshape(BM, BN, 2))


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
    BM: tl.constexpr, BK: tl.constexpr, T: tl.constexpr, PRELOADED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A head: its projection, rotated; queries go to q_out [R, H * D], keys and values into the cache at `position`."""
    half: tl.constexpr = D // 2
    head = tl.program_id(0)
    cols = tl.arange(0, half)
    if PDL:
        gdc_launch_dependents()
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    m = (rows < R)[:, None]
    wp = pair_of_tiles(w + head * D * d, half, d, half, BK)
    preloaded = preload(wp, 0, d, BK, PRELOADED)
    if PDL:
        gdc_wait()
    scale = inverse_rms(ss, rows, R, eps, d, T)  # what is needed after the product is asked for before it
    c = tl.load(cos + rows[:, None] * half + cols[None, :], mask=m, other=0.0)
    s = tl.load(sin + rows[:, None] * half + cols[None, :], mask=m, other=0.0)
    at = tl.load(position + rows, mask=rows < R, other=0)
    v1, v2 = pair(product(y, wp, preloaded, rows, R, 0, d, d, BM, D, BK, PRELOADED), BM, half)
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
        v1, v2 = v1 * c - v2 * s, v2 * c + v1 * s
    if head < H:
        p = q_out + rows[:, None] * (H * D) + head * D + cols[None, :]
    else:
        base = cache + ((head - H) // K).to(tl.int64) * stride_kv + ((head - H) % K) * stride_head
        p = base + rows[:, None].to(tl.int64) * stride_row + at[:, None] * D + cols[None, :]
    tl.store(p, v1.to(cache.dtype.element_ty), mask=m)
    tl.store(p + half, v2.to(cache.dtype.element_ty), mask=m)


@triton.jit
def add_kernel(
    a, w, x, norm, y, ss, partial, arrived, R,
    N: tl.constexpr, KD: tl.constexpr, SPLITS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRELOADED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x += a @ w.T for a tile of columns, then y and ss of the next norm. KD is split between programs; the last one
    that arrives adds the pieces up in a fixed order, so that the sum is the same each time."""
    tile, split, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    cols = tile * BN + tl.arange(0, BN)
    rows = block * BM + tl.arange(0, BM)
    per: tl.constexpr = (KD // BK + SPLITS - 1) // SPLITS * BK
    begin = split * per
    m = (rows < R)[:, None]
    if PDL:
        gdc_launch_dependents()
    wp = w + cols[:, None] * KD + tl.arange(0, BK)[None, :]
    end = tl.minimum(begin + per, KD)
    preloaded = preload(wp, begin, end, BK, PRELOADED)
    scale = tl.load(norm + cols)[None, :]
    if PDL:
        gdc_wait()
    xp = x + rows[:, None] * N + cols[None, :]
    before = tl.load(xp, mask=m, other=0.0)
    acc = product(a, wp, preloaded, rows, R, begin, end, KD, BM, BN, BK, PRELOADED)
    done = True
    if SPLITS > 1:
        place = block * (N // BN) + tile
        pieces = partial + place * SPLITS * BM * BN + tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        tl.store(pieces + split * BM * BN, acc)
        tl.debug_barrier()
        done = tl.atomic_add(arrived + place, 1, sem="acq_rel") == SPLITS - 1
        if done:
            acc = tl.zeros((BM, BN), tl.float32)
            for s in range(SPLITS):
                acc += tl.load(pieces + s * BM * BN, cache_modifier=".cg")
            tl.store(arrived + place, 0)
    if done:
        total = before + acc
        tl.store(xp, total, mask=m)
        tl.store(y + rows[:, None] * N + cols[None, :], (total * scale).to(y.dtype.element_ty), mask=m)
        tl.store(ss + rows * (N // BN) + tile, tl.sum(total * total, 1), mask=rows < R)


@triton.jit
def gate_up_kernel(
    y, ss, w, h, R, eps, inner: tl.constexpr, d: tl.constexpr, T: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRELOADED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up for a tile of columns: h [R, inner]."""
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    if PDL:
        gdc_launch_dependents()
    wp = pair_of_tiles(w + tl.program_id(0) * BN * d, inner, d, BN, BK)
    preloaded = preload(wp, 0, d, BK, PRELOADED)
    if PDL:
        gdc_wait()
    scale = inverse_rms(ss, rows, R, eps, d, T)
    gate, up = pair(product(y, wp, preloaded, rows, R, 0, d, d, BM, 2 * BN, BK, PRELOADED), BM, BN)
    gate = gate * scale
    up = up * scale
    value = (gate * tl.sigmoid(gate) * up).to(h.dtype.element_ty)
    tl.store(h + rows[:, None] * inner + cols[None, :], value, mask=(rows < R)[:, None])
