"""The kernels of a decode step in Triton: all but attention and sampling. `rlcourse.rollout.triton_step` launches them.

R rows of d features, H query and K key-value heads of size D; the residual stream x [R, d] is float32. A norm needs no
kernel: the one that writes x also writes y = x * weight in the weights' dtype and the sums of squares of each 32
columns, `squares` [R, d / 32], and the one that reads y multiplies its product by 1 / rms. Every sum is in the order of
the training pass (`rlcourse/exact/operations.py`).

PDL is programmatic dependent launch (Hopper and later): a kernel may begin while the one before it still runs. It loads
weights, or the cache of earlier steps, into registers, and only then waits for what the one before computes. The first
kernel waits before it lets the next one begin: so a step begins when the one before has ended, whose last kernels write
positions and prompts to the cache.
"""

import triton
import triton.language as tl

from rlcourse.exact import operations as ops


@triton.jit
def embed_kernel(
    token, embedding, norm, x, y, squares, d: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row: its token's embedding and the first norm's parts."""
    if PDL:
        ops.gdc_wait()
        ops.gdc_launch_dependents()
    row = tl.program_id(0)
    o = tl.arange(0, B)
    v = tl.load(embedding + tl.load(token + row) * d + o, mask=o < d, other=0.0).to(tl.float32)
    tl.store(x + row * d + o, v, mask=o < d)
    ops.write_norm(v, norm, y, squares, row, o, d, B)


@triton.jit
def preload(w, begin, end, BK: tl.constexpr, PRELOADED: tl.constexpr):
    """The first PRELOADED blocks [BN, BK] of the weights at pointers `w`, from depth begin on."""
    preloaded = ()
    for b in tl.static_range(PRELOADED):
        seen = begin + b * BK + tl.arange(0, BK) < end
        preloaded = preloaded + (tl.load(w + begin + b * BK, mask=seen[None, :], other=0.0),)  # noqa: RUF005
    return preloaded


@triton.jit
def ask(a, rows, R, begin, end, width: tl.constexpr, BK: tl.constexpr, BLOCKS: tl.constexpr):
    """The first BLOCKS blocks of rows of a [R, width], from depth begin on: all are on their way before one is used."""
    ks = begin + tl.arange(0, BK)
    pieces = ()
    for b in tl.static_range(BLOCKS):
        seen = (rows < R)[:, None] & (b * BK + ks < end)[None, :]
        pieces = pieces + (tl.load(a + rows[:, None] * width + b * BK + ks[None, :], mask=seen, other=0.0),)  # noqa: RUF005
    return pieces


@triton.jit
def product(
    a, w, pieces, preloaded, rows, R, begin, end,
    width: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRELOADED: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """Rows of a [R, width] times a tile of weights at pointers `w` [BN, BK], over the depth from begin to end, which is
    MOST at most. The first PRELOADED blocks of both are there already."""
    acc = tl.zeros((BM, BN), tl.float32)
    for b in tl.static_range(PRELOADED):
        acc = tl.dot(pieces[b], tl.trans(preloaded[b]), acc, input_precision="ieee")
    # A loop of no rounds takes time, too. But a single product would begin with what it is added to, in other bits.
    if PRELOADED == 1 or PRELOADED * BK < MOST:
        ap = a + rows[:, None] * width + begin + tl.arange(0, BK)[None, :]
        for k in range(PRELOADED * BK, end - begin, BK):
            piece = tl.load(ap + k, mask=(rows < R)[:, None], other=0.0)
            acc = tl.dot(piece, tl.trans(tl.load(w + begin + k)), acc, input_precision="ieee")
    return acc


@triton.jit
def pair_of_tiles(w, first, last, distance, d: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Pointers [2 * BN, BK] to rows of weights from `first` on, `last` at most, and to as many `distance` rows behind
    them, in turns: so they are one product, and `pair` finds both results of a column with the same thread."""
    turn = tl.arange(0, 2 * BN)
    row = tl.minimum(first + turn // 2, last)
    return w + ((turn % 2) * distance + row)[:, None] * d + tl.arange(0, BK)[None, :]


@triton.jit
def pair(acc, BM: tl.constexpr, BN: tl.constexpr):
    """The two results [BM, BN] of a product with a pair of tiles."""
    return tl.split(acc.reshape(BM, BN, 2))


@triton.jit
def block_of(table, completion, W, rows, R, at, BLOCK: tl.constexpr):
    """The block that has token `at` of each row: row `completion` of the table [completions, W] names it."""
    owner = tl.load(completion + rows, mask=rows < R, other=0)
    return tl.load(table + owner * W + at // BLOCK, mask=rows < R, other=0)


@triton.jit
def qkv_kernel(
    y, squares, w, bias, q_norm, k_norm, cos, sin, position, q_out, cache, table, completion, W, R, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, d: tl.constexpr, stride_kv, stride_block, stride_head,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRELOADED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN columns of a head's first half and those they are rotated with: their projection, rotated; queries go to q_out
    [R, H * D], keys and values into the cache at `position`. With a norm BN is the half: it adds over the head.
    BLOCK: tokens of a block of the cache."""
    half: tl.constexpr = D // 2
    head, part_of_head = tl.program_id(0) // (half // BN), tl.program_id(0) % (half // BN)
    cols = part_of_head * BN + tl.arange(0, BN)
    if PDL:
        ops.gdc_launch_dependents()
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    m = (rows < R)[:, None]
    first = head * D + part_of_head * BN
    wp = pair_of_tiles(w, first, first + BN, half, d, BN, BK)
    preloaded = preload(wp, 0, d, BK, PRELOADED)
    at = tl.load(position + rows, mask=rows < R, other=0)  # written when the step before ended
    turn = at[:, None] * half + cols[None, :]
    if PRELOADED > 0:  # with few rows time is latency; with many a thread has no room to hold them
        c, s = tl.load(cos + turn, mask=m, other=0.0), tl.load(sin + turn, mask=m, other=0.0)
        block = block_of(table, completion, W, rows, R, at, BLOCK)
    if PDL:
        ops.gdc_wait()
    pieces = ask(y, rows, R, 0, d, d, BK, PRELOADED)
    # Asked for before the product, which it follows.
    scale = ops.inverse_rms(squares, rows, rows < R, eps, BM, d)[:, None]
    v1, v2 = pair(product(y, wp, pieces, preloaded, rows, R, 0, d, d, BM, 2 * BN, BK, PRELOADED, d), BM, BN)
    v1 = ops.scaled(v1, scale, y.dtype.element_ty)
    v2 = ops.scaled(v2, scale, y.dtype.element_ty)
    if HAS_BIAS:
        v1 += tl.load(bias + head * D + cols).to(tl.float32)[None, :]
        v2 += tl.load(bias + head * D + half + cols).to(tl.float32)[None, :]
    if HAS_NORM:
        if head < H:
            v1, v2 = ops.head_norm(v1, v2, q_norm, cols, BM, D, LEVELS, eps)
        elif head < H + K:
            v1, v2 = ops.head_norm(v1, v2, k_norm, cols, BM, D, LEVELS, eps)
    if PRELOADED == 0:
        block = block_of(table, completion, W, rows, R, at, BLOCK)
        c, s = tl.load(cos + turn, mask=m, other=0.0), tl.load(sin + turn, mask=m, other=0.0)
    if head < H + K:
        v1, v2 = ops.rotated(v1, v2, c, s)
    if head < H:
        p = q_out + rows[:, None] * (H * D) + head * D + cols[None, :]
    else:
        base = cache + ((head - H) // K).to(tl.int64) * stride_kv + ((head - H) % K) * stride_head
        p = base + block[:, None].to(tl.int64) * stride_block + (at % BLOCK)[:, None] * D + cols[None, :]
    both = p[:, :, None] + half * tl.arange(0, 2)[None, None, :]
    tl.store(both, tl.join(v1, v2).to(cache.dtype.element_ty), mask=m[:, :, None])


@triton.jit
def sum_of_pair(pieces, first: tl.constexpr, SPLITS: tl.constexpr, SHARES: tl.constexpr, SIZE: tl.constexpr):
    """The sum of two shares: one piece where a program had both, else the pieces `first` and, if there is one, next."""
    acc = tl.load(pieces + first * SIZE, cache_modifier=".cg")
    if SHARES == 1 and first + 1 < SPLITS:
        acc += tl.load(pieces + (first + 1) * SIZE, cache_modifier=".cg")
    return acc


@triton.jit
def add_kernel(
    a, w, x, norm, y, squares, partial, arrived, R,
    N: tl.constexpr, KD: tl.constexpr, SHARE: tl.constexpr, SPLITS: tl.constexpr, SHARES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRELOADED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x += a @ w.T for a tile of columns, then y and squares of the next norm. KD comes in up to four shares, which are
    added up in pairs. A program has SHARES of them, one or a pair; the last of SPLITS programs adds what all left."""
    tile, split, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    cols = tile * BN + tl.arange(0, BN)
    rows = block * BM + tl.arange(0, BM)
    begin = split * SHARES * SHARE
    m = (rows < R)[:, None]
    if PDL:
        ops.gdc_launch_dependents()
    wp = w + cols[:, None] * KD + tl.arange(0, BK)[None, :]
    end = tl.minimum(begin + SHARE, KD)
    preloaded = preload(wp, begin, end, BK, PRELOADED)
    scale = tl.load(norm + cols)[None, :]
    if PDL:
        ops.gdc_wait()
    xp = x + rows[:, None] * N + cols[None, :]
    total = tl.load(xp, mask=m, other=0.0)
    pieces = ask(a, rows, R, begin, end, KD, BK, PRELOADED)
    acc = product(a, wp, pieces, preloaded, rows, R, begin, end, KD, BM, BN, BK, PRELOADED, SHARE)
    if SHARES == 2:
        begin += SHARE
        acc += product(a, wp, (), (), rows, R, begin, tl.minimum(begin + SHARE, KD), KD, BM, BN, BK, 0, SHARE)
    done = True
    if SPLITS == 1:
        total += acc
    else:
        place = block * (N // BN) + tile
        pieces = partial + place * SPLITS * BM * BN + tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        tl.store(pieces + split * BM * BN, acc)
        tl.debug_barrier()
        done = tl.atomic_add(arrived + place, 1, sem="acq_rel") == SPLITS - 1
        if done:
            both = sum_of_pair(pieces, 0, SPLITS, SHARES, BM * BN)
            if SPLITS * SHARES > 2:
                both += sum_of_pair(pieces, 3 - SHARES, SPLITS, SHARES, BM * BN)
            total += both
            tl.store(arrived + place, 0)
    if done:
        tl.store(xp, total, mask=m)
        tl.store(y + rows[:, None] * N + cols[None, :], (total * scale).to(y.dtype.element_ty), mask=m)
        t = tile * (BN // 32) + tl.arange(0, BN // 32)
        tl.store(squares + rows[:, None] * (N // 32) + t[None, :], ops.group_squares(total, BM, BN), mask=m)


@triton.jit
def gate_up_kernel(
    y, squares, w, h, R, eps, inner: tl.constexpr, d: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BX: tl.constexpr, BK: tl.constexpr, PRELOADED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up for a tile of columns: h [R, inner]. The tile is BN columns and, where BX is not 0, BX more: with
    powers of two alone the programs seldom are as many as the processors."""
    first = tl.program_id(0) * (BN + BX)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    if PDL:
        ops.gdc_launch_dependents()
    wp = pair_of_tiles(w, first, inner - 1, inner, d, BN, BK)
    preloaded = preload(wp, 0, d, BK, PRELOADED)
    if BX > 0:
        xp = pair_of_tiles(w, first + BN, inner - 1, inner, d, BX, BK)
    if PDL:
        ops.gdc_wait()
    pieces = ask(y, rows, R, 0, d, d, BK, PRELOADED)
    scale = ops.inverse_rms(squares, rows, rows < R, eps, BM, d)[:, None]
    if BX > 0:  # nothing is preloaded
        acc = tl.zeros((BM, 2 * BN), tl.float32)
        acc_x = tl.zeros((BM, 2 * BX), tl.float32)
        yp = y + rows[:, None] * d + tl.arange(0, BK)[None, :]
        for k in range(0, d, BK):
            piece = tl.load(yp + k, mask=(rows < R)[:, None], other=0.0)
            acc = tl.dot(piece, tl.trans(tl.load(wp + k)), acc, input_precision="ieee")
            acc_x = tl.dot(piece, tl.trans(tl.load(xp + k)), acc_x, input_precision="ieee")
        store_inner(h, acc_x, scale, rows, R, first + BN, inner, BM, BX)
    else:
        acc = product(y, wp, pieces, preloaded, rows, R, 0, d, d, BM, 2 * BN, BK, PRELOADED, d)
    store_inner(h, acc, scale, rows, R, first, inner, BM, BN)


@triton.jit
def store_inner(h, acc, scale, rows, R, first, inner: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """silu(gate) * up from their products, acc [BM, 2 * BN], to the columns of h from `first` on."""
    gate, up = pair(acc, BM, BN)
    dtype: tl.constexpr = h.dtype.element_ty
    value = ops.swiglu(ops.scaled(gate, scale, dtype), ops.scaled(up, scale, dtype)).to(dtype)
    cols = first + tl.arange(0, BN)
    tl.store(h + rows[:, None] * inner + cols[None, :], value, mask=(rows < R)[:, None] & (cols < inner)[None, :])
