"""What the decode step and the training pass both compute, each operation written once, in Triton. A sum of floats
depends on its order. Here every order is fixed, whatever the tile, the number of warps and the rows beside: squares are
added in a tree, neighbours first, over 32 columns and then over these groups; attention takes keys in tiles of 128 that
stand at fixed positions, and joins them in order; sums over a tile's weights are products with ones, since tensor cores
add in the order of the depth. All kernels that call these are launched with `EXACT`: a multiplication and an addition
are two roundings in each, not one in some of them."""

import triton
import triton.language as tl

try:  # programmatic dependent launch (Hopper and later), by the names of Triton's releases
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # older ones
    from triton.language.extra.cuda.gdc import gdc_launch_dependents, gdc_wait  # noqa: F401


@triton.jit
def row_sum(x, A: tl.constexpr, B: tl.constexpr, LEVELS: tl.constexpr):
    """Sums [A] of the rows of x [A, B], neighbours first. LEVELS: log2(B)."""
    for level in tl.static_range(LEVELS):
        first, second = tl.split(x.reshape(A, B >> (level + 1), 2))
        x = first + second
    return x.reshape(A)


@triton.jit
def group_squares(x, A: tl.constexpr, B: tl.constexpr):
    """Sums of squares [A, B / 32] of each 32 neighbouring columns of x [A, B]."""
    return row_sum((x * x).reshape(A * (B // 32), 32), A * (B // 32), 32, 5).reshape(A, B // 32)


@triton.jit
def inverse_rms(squares, rows, seen, eps, A: tl.constexpr, d: tl.constexpr):
    """1 / rms [A] of rows of x (numbers `rows` [A]; those not `seen` mean nothing), from `squares` [R, d / 32]."""
    if A <= 16 and d % 128 == 0 and d < 1024:  # short rows, each by one thread: several would wait for each other
        total = sum_of_fours(squares, rows, seen, A, d)
    else:
        T: tl.constexpr = d // 32
        B: tl.constexpr = 32 if T <= 32 else 64 if T <= 64 else 256
        t = tl.arange(0, B)[None, :]
        parts = tl.load(squares + rows[:, None] * T + t, mask=seen[:, None] & (t < T), other=0.0)
        total = row_sum(parts, A, B, 5 if B == 32 else 6 if B == 64 else 8)
    return tl.rsqrt(total / d + eps)


@triton.jit
def sum_of_fours(squares, rows, seen, A: tl.constexpr, d: tl.constexpr):
    """The sum [A] of a row's `squares`, neighbours first, which come to a thread four at once."""
    FOURS: tl.constexpr = d // 128
    sums = ()
    for t in tl.static_range(FOURS):
        four = squares + rows[:, None] * (d // 32) + 4 * t + tl.arange(0, 4)[None, :]
        sums = sums + (row_sum(tl.load(four, mask=seen[:, None], other=0.0), A, 4, 2),)  # noqa: RUF005
    for level in tl.static_range(6):
        longer = ()
        for t in tl.static_range(FOURS):
            if t + (1 << level) < FOURS:  # noqa: SIM108
                longer = longer + (sums[t] + sums[t + (1 << level)],)  # noqa: RUF005
            else:
                longer = longer + (sums[t],)  # noqa: RUF005
        sums = longer
    return sums[0]


@triton.jit
def inverse_rms_of_row(squares, row, eps, d: tl.constexpr):
    """`inverse_rms` of one row, as a number."""
    one = row + tl.arange(0, 1)
    return tl.max(inverse_rms(squares, one, one >= 0, eps, 1, d), 0)


@triton.jit
def write_norm(x, weight, y, squares, row, o, d: tl.constexpr, B: tl.constexpr):
    """What a norm leaves of a row x [B], zeros from d on: y = x * weight, and the sums of squares of its groups."""
    m = o < d
    tl.store(y + row * d + o, (x * tl.load(weight + o, mask=m, other=0.0)).to(y.dtype.element_ty), mask=m)
    t = tl.arange(0, B // 32)
    tl.store(squares + row * (d // 32) + t, group_squares(x.reshape(1, B), 1, B).reshape(B // 32), mask=t < d // 32)


@triton.jit
def scaled(product, scale, dtype: tl.constexpr):
    """A product with y, rounded as a matrix product leaves it in memory, times 1 / rms."""
    return product.to(dtype).to(tl.float32) * scale


@triton.jit
def head_norm(v1, v2, weight, cols, A: tl.constexpr, D: tl.constexpr, LEVELS: tl.constexpr, eps):
    """RMSNorm over a head whose halves are v1 and v2 [A, D / 2]: Qwen3's of queries and keys. LEVELS: log2(D / 2)."""
    scale = tl.rsqrt(row_sum(v1 * v1 + v2 * v2, A, D // 2, LEVELS) / D + eps)[:, None]
    return v1 * scale * tl.load(weight + cols)[None, :], v2 * scale * tl.load(weight + D // 2 + cols)[None, :]


@triton.jit
def rotated(v1, v2, cos, sin):
    """RoPE of the halves v1 and v2 of heads."""
    return v1 * cos - v2 * sin, v2 * cos + v1 * sin


@triton.jit
def swiglu(gate, up):
    """silu(gate) * up, float32 of one shape."""
    return gate * tl.sigmoid(gate) * up


@triton.jit
def attend(query, keys, values, seen, scale, MASKED: tl.constexpr):
    """Attention to one tile of keys: (m, l, acc), the largest score, the sum of exponentials relative to it, and the
    values weighted by them. query [M, D], keys [D, 128], values [128, D]; seen: which keys, broadcast to [M, 128];
    scale: 1 / sqrt(D) times log2(e). m of a row that sees none is -inf, l and acc are 0."""
    scores = tl.dot(query, keys, input_precision="ieee")
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    m = tl.max(scores, 1)
    shift = tl.where(m == float("-inf"), 0.0, m) * -scale
    weights = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + scale, tl.zeros_like(scores) + shift[:, None]))
    weights = weights.to(values.dtype)
    ones = tl.full((values.shape[0], 16), 1.0, values.dtype)
    l = tl.max(tl.dot(weights, ones, input_precision="ieee"), 1)
    return m, l, tl.dot(weights, values, input_precision="ieee")


@triton.jit
def join(m, l, acc, tile_m, tile_l, tile_acc, scale):
    """Attention to the tiles so far and to the next one as one (Milakov and Gimelshein 2018, arXiv:1805.02867)."""
    highest = tl.maximum(m, tile_m)
    a, b = tl.exp2((m - highest) * scale), tl.exp2((tile_m - highest) * scale)
    return highest, l * a + tile_l * b, acc * a[:, None] + tile_acc * b[:, None]


@triton.jit
def total_mass(tile_max, tile_sum, row, TILES: tl.constexpr, B: tl.constexpr):
    """Of a row's logits the largest by tile [B], the mass by tile relative to the largest of all, that, and the sum."""
    o = tl.arange(0, B)
    largest = tl.load(tile_max + row * TILES + o, mask=o < TILES, other=float("-inf"))
    highest = tl.max(largest, 0)
    by_tile = tl.load(tile_sum + row * TILES + o, mask=o < TILES, other=0.0) * tl.exp(largest - highest)
    return largest, by_tile, highest, tl.sum(by_tile, 0)
