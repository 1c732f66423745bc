"""What the kernels of attention over packed sequences share: products of tiles of 16 rows, without shared memory.

All of them multiply with mma.sync m16n8k16, in two forms:

    products     scores [16, 16] = a [16, D] times b^T [D, 16]
    accumulate   acc [16, D] += weights [16, 16] times b [16, D]

Dimensions are numbered such that what a lane needs are 16 bytes that lie together, as in
`rlcourse/kernels/decode_attention.py`. Lane 4 g + c, with g in 0..7 and c in 0..3, holds

    of rows (a, and b of `products`)   dimensions 8c..8c+7 of each 32, of rows g and g + 8
    of columns (b of `accumulate`)     dimensions 8g..8g+7 of each 64, of rows 2c, 2c + 1, 2c + 8, 2c + 9
    of scores and weights              rows g and g + 8; columns 2c, 2c + 1, 2c + 8, 2c + 9
    of acc                             rows g and g + 8; dimensions 16c..16c+15 of each 64

A tile is read in both layouts where both are needed: the second time it comes from the cache.
"""

from dataclasses import dataclass

from rlcourse.kernels import KernelError
from rlcourse.kernels.arguments import Argument
from rlcourse.kernels.decode_attention import load_keys, load_values, multiply_keys
from rlcourse.kernels.dsl import Float32, const_expr, cute, range_constexpr
from rlcourse.kernels.kernel import Kernel, registers, tensor_cores

HEAD = 64  # its size
TILE = 16  # rows of a tile: queries or keys
WARPS = 4  # of a block; each has a tile of its own


@dataclass(frozen=True)
class AttentionKernel(Kernel):
    """Base of a kernel in which each warp has a tile of 16 queries of a head, or of 16 keys of a key-value head."""

    heads: int
    kv_heads: int
    dtype: str = "bfloat16"

    threads = 32 * WARPS

    def __post_init__(self):
        super().__post_init__()
        if self.heads % self.kv_heads:
            raise KernelError(f"{self.heads} query heads cannot share {self.kv_heads} key-value heads equally.")

    def argument(self, name: str, heads: int, output: bool = False) -> Argument:
        """[tokens, heads, 64]; an input may be a part of a packed projection."""
        return Argument(name, self.dtype, ("tokens", heads, HEAD), free=1, output=output)

    def qkv(self) -> tuple[Argument, ...]:
        return self.argument("q", self.heads), *(self.argument(name, self.kv_heads) for name in "kv")

    def per_row(self, name: str, output: bool = False) -> Argument:
        """A number for each query of each head."""
        return Argument(name, "float32", (self.heads, "tokens"), free=1, align=4, output=output)

    def grid(self, q, *_):
        return -(-q.shape[0] // (TILE * WARPS)), self.heads, 1


@cute.jit
def own_tile():
    """The first row of this warp's tile, and the lane's g and c."""
    (thread, _, _), (block, _, _) = cute.arch.thread_idx(), cute.arch.block_idx()
    return (block * WARPS + thread // 32) * TILE, thread % 32 // 4, thread % 4


@cute.jit
def load_rows(x, base, g, c):
    """Rows base..base+15 of x in the layout of rows: [8, D / 32, rows g and g + 8]. Past the end, the last row."""
    held = registers(x.element_type, 8, x.shape[2] // 4, 2)
    load_keys(held, x, base, x.shape[1], g, c)
    return held


@cute.jit
def left_operand(x, base, g, c):
    """Rows base..base+15 of x as left operand of `products`: ((pair, row g or g + 8, half of 16), 1, D / 16)."""
    rows = load_rows(x, base, g, c)
    steps = const_expr(2 * rows.shape[1])
    operand = registers(rows.element_type, (2, 2, 2), 1, steps)
    for i in range_constexpr(4 * steps):
        for half in range_constexpr(2):
            operand[(i % 2, half, i // 2 % 2), 0, i // 4] = rows[i % 8, i // 8, half]
    return operand


@cute.jit
def products(left, x, base, g, c):
    """Scores ((column pair, row g or g + 8), 1, columns 0-7 or 8-15): of rows of `left` and rows base..base+15 of x."""
    scores = registers(Float32, (2, 2), 1, 2)
    multiply_keys(scores, left, load_rows(x, base, g, c))
    return scores


@cute.jit
def accumulate(acc, weights, x, base, g, c):
    """acc ((column pair, row g or g + 8), 1, D / 8) += weights times rows base..base+15 of x. A register of the right
    operand holds one dimension of two rows, those that came hold two dimensions of one: hence the moves."""
    dtype, tiles = x.element_type, const_expr(x.shape[2])
    columns = registers(dtype, 8, tiles // 8, 4)
    load_values(columns, x, base, x.shape[1], g, c)
    left, right = registers(dtype, (2, 2, 2), 1), registers(dtype, (2, 2), tiles)
    for i in range_constexpr(8):
        pair, row, half = i % 2, i // 2 % 2, i // 4
        left[(pair, row, half), 0] = weights[(pair, row), 0, half].to(dtype)
    for tile in range_constexpr(tiles):
        for i in range_constexpr(4):
            right[(i % 2, i // 2), tile] = columns[tile % 8, tile // 8, i]
    cute.gemm(tensor_cores(columns), acc, left, right, acc)


@cute.jit
def write_rows(out, acc, factors, base, g, c):
    """Rows of acc, each times its factor, to a head's rows base..base+15, rounded once; none past the end."""
    chunk = cute.make_rmem_tensor(8, out.element_type)
    for half in range_constexpr(2):
        row = base + g + 8 * half
        if row < out.shape[1]:
            for j in range_constexpr(acc.shape[2] // 8):
                for p in range_constexpr(2):
                    for e in range_constexpr(8):
                        chunk[e] = (acc[(p, half), 0, 8 * j + e] * factors[half]).to(out.element_type)
                    cute.autovec_copy(chunk, out[None, row, 8 * j + 2 * c + p])
