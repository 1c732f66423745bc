"""Queries, keys and values of a decode step, for Hopper: their projection, the norm of heads if there is one, RoPE, and
keys and values to their place in the cache. A tile takes dimension i of a head and i + D / 2, which RoPE turns with it,
in turns (`pairs_of_rows`), so that a thread has both."""

from dataclasses import dataclass

from rlcourse.kernels import products as tiled
from rlcourse.kernels.arguments import Argument
from rlcourse.kernels.dsl import Float32, Int32, Int64, const_expr, cute, cutlass, range_constexpr


@dataclass(frozen=True)
class QKV(tiled.Tiled):
    """The kernel. depth: of y. bias, norm: whether there is one, of queries and keys by head: then a tile is whole
    heads. block: tokens of a block of the cache."""

    heads: int
    kv_heads: int
    head_size: int
    depth: int
    eps: float = 1e-6
    bias: bool = True
    norm: bool = False
    block: int = 128
    tile_columns: int = 64
    tile_rows: int = 64
    stages: int = 6
    dtype: str = "bfloat16"

    weights = 2

    def __post_init__(self):
        whole = (self.heads + 2 * self.kv_heads) * self.head_size % self.tile_columns == 0
        whole &= not self.norm or self.tile_columns % self.head_size == 0
        whole &= self.depth % (4 * tiled.GROUP) == self.head_size % 16 == 0 and self.depth <= 64 * tiled.GROUP
        of_a_row = 4 + 8 + (self.tile_columns // 16 * 4 if self.norm else 0)  # its scale, place, and sums of squares
        self.check(whole, 2 * self.tile_rows * (self.tile_columns + tiled.OCTET), others=of_a_row * self.tile_rows)

    @property
    def half(self) -> int:
        return self.head_size // 2

    @property
    def columns(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_size

    def arguments(self):
        norm = (Argument(name, "float32", (self.head_size,)) if self.norm else None for name in ("q_norm", "k_norm"))
        return (
            Argument("y", self.dtype, ("rows", self.depth)),
            Argument("squares", "float32", ("rows", self.depth // tiled.GROUP)),
            Argument("w", self.dtype, (self.columns, self.depth)),
            Argument("bias", self.dtype, (self.columns,)) if self.bias else None,
            *norm,
            Argument("cos", "float32", ("positions", self.half)),
            Argument("sin", "float32", ("positions", self.half)),
            Argument("position", "int64", ("rows",), free=1, align=8),
            Argument("completion", "int64", ("rows",), align=8),
            Argument("table", "int32", ("completions", "width"), free=1, align=4),
            Argument("q", self.dtype, ("rows", self.heads * self.head_size), output=True),
            Argument("cache", self.dtype, (2, "parts", self.kv_heads, "tokens", self.head_size), free=3, output=True),
        )

    def arranged(self, w):
        return tiled.pairs_of_rows(w, self.half)

    @cute.kernel
    def kernel(
        self, copy_w, w, copy_y, y, squares, bias, q_norm, k_norm, cos, sin, position, completion, table, q, cache, mma,
        layout_w, layout_a,
    ):  # fmt: skip
        column_tile, row_tile, _, thread, works, shared = self.begin(q.element_type, layout_w, layout_a)
        tiles_w, tiles_y, place, full, empty = shared
        memory = cutlass.memory.SmemAllocator()
        scales = memory.allocate_tensor(Float32, cute.make_layout(self.tile_rows), 16)
        offsets = memory.allocate_tensor(Int64, cute.make_layout(self.tile_rows), 16)
        by_head = cute.make_layout((self.tile_columns // 16, self.tile_rows))
        sums = memory.allocate_tensor(Float32, by_head, 16) if const_expr(self.norm) else None
        first, count = Int32(0), Int32(self.depth // tiled.DEPTH)
        if works:
            # the pairs of a warp are of one head, and a thread has one column of them, at rows 2c, 2c + 1, + 8, ...
            number = column_tile * const_expr(self.tile_columns // 2) + thread // 32 * 8 + thread % 32 // 4
            head, column = number // self.half, number % self.half
            turn = cute.make_rmem_tensor((2, self.tile_rows // 4), Float32)
            for i in range_constexpr(self.tile_rows // 4):
                row = row_tile * self.tile_rows + i // 2 * 8 + thread % 4 * 2 + i % 2
                at = position[cutlass.min(row, q.shape[0] - 1)]
                turn[0, i], turn[1, i] = cos[at, column], sin[at, column]
            self.places(offsets, position, completion, table, cache, thread, row_tile)
            cute.arch.griddepcontrol_wait()
            tiled.inverse_rms_of_rows(scales, squares, self.eps, thread, row_tile, q.shape[0], self.workers)
            tile = cute.make_identity_tensor((self.tile_columns, self.tile_rows))
            acc = cute.make_rmem_tensor(mma.get_slice(thread).partition_C(tile).shape, Float32)
            tiled.multiply(mma, tiles_w, tiles_y, acc, full, empty, thread, count, self.workers)
            self.finish(acc, scales, bias, thread, head, column, q.element_type)
            if const_expr(self.norm):
                self.norm_heads(acc, sums, q_norm, k_norm, thread, head, column)
            if head < self.heads + self.kv_heads:
                rotate(acc, turn)
            self.write(acc, offsets, place, q, cache, thread, column_tile, row_tile)
        else:
            tiled.load(copy_w, w, tiles_w, column_tile, copy_y, y, tiles_y, row_tile, full, empty, first, count)

    @cute.jit
    def places(self, offsets, position, completion, table, cache, thread, row_tile):
        """Where in the cache, from its beginning, the new token of each row of the tile is."""
        for i in range_constexpr(-(-self.tile_rows // self.workers)):
            number = thread + i * self.workers
            row = row_tile * self.tile_rows + number
            if number < self.tile_rows and row < position.shape[0]:
                at = position[row]
                part = table[completion[row], at // self.block].to(Int64)
                offsets[number] = part * cache.stride[1] + at % self.block * self.head_size

    @cute.jit
    def finish(self, acc, scales, bias, thread, head, column, dtype: cutlass.Constexpr):
        """The projection: the product, rounded as in memory, times 1 / rms, and the bias."""
        for half in range_constexpr(2):
            more = Float32(0.0)
            if const_expr(self.bias):
                more = bias[head * self.head_size + half * self.half + column].to(Float32)
            for i in range_constexpr(self.tile_rows // 4):
                scale = scales[i // 2 * 8 + thread % 4 * 2 + i % 2]
                value = tiled.product(acc[(i % 2, half, i // 2), 0, 0].to(dtype).to(Float32), scale)
                acc[(i % 2, half, i // 2), 0, 0] = value + more if const_expr(self.bias) else value

    @cute.jit
    def norm_heads(self, acc, sums, q_norm, k_norm, thread, head, column):
        """RMSNorm of queries and keys: squares are added neighbours first, eight by a warp's lanes, then the warps'."""
        for i in range_constexpr(self.tile_rows // 4):
            a, b = acc[(i % 2, 0, i // 2), 0, 0], acc[(i % 2, 1, i // 2), 0, 0]
            square = tiled.product(a, a) + tiled.product(b, b)
            for level in range_constexpr(3):
                square += cute.arch.shuffle_sync_bfly(square, offset=4 << level)
            if thread % 32 // 4 == 0:
                sums[thread // 32, i // 2 * 8 + thread % 4 * 2 + i % 2] = square
        cute.arch.barrier(barrier_id=1, number_of_threads=self.workers)
        warps = const_expr(self.half // 8)
        first = thread // 32 // warps * warps
        for i in range_constexpr(self.tile_rows // 4):
            total = [sums[first + w, i // 2 * 8 + thread % 4 * 2 + i % 2] for w in range(warps)]
            while const_expr(len(total) > 1):
                total = [total[w] + total[w + 1] for w in range(0, len(total), 2)]
            scale = tiled.inverse_root(total[0], self.head_size, self.eps)
            for half in range_constexpr(2):
                value = acc[(i % 2, half, i // 2), 0, 0]
                if head < self.heads:
                    value = tiled.product(tiled.product(value, scale), q_norm[half * self.half + column])
                elif head < self.heads + self.kv_heads:
                    value = tiled.product(tiled.product(value, scale), k_norm[half * self.half + column])
                acc[(i % 2, half, i // 2), 0, 0] = value

    @cute.jit
    def write(self, acc, offsets, place, q, cache, thread, column_tile, row_tile):
        """To shared memory, where the tiles of weights were, and from there in whole lines."""
        columns = const_expr(self.tile_columns // 2)
        pitch = const_expr(self.tile_columns + tiled.OCTET)  # so that the lanes of a warp meet different banks
        made = cute.make_tensor(place, cute.make_layout((self.tile_rows, self.tile_columns), stride=(pitch, 1)))
        own = thread // 32 * 8 + thread % 32 // 4
        for half in range_constexpr(2):
            for i in range_constexpr(self.tile_rows // 4):
                value = acc[(i % 2, half, i // 2), 0, 0].to(q.element_type)
                made[i // 2 * 8 + thread % 4 * 2 + i % 2, half * columns + own] = value
        cute.arch.barrier(barrier_id=1, number_of_threads=self.workers)
        across = const_expr(self.tile_columns // tiled.OCTET)
        piece = cute.make_rmem_tensor(tiled.OCTET, q.element_type)
        for turn in range_constexpr(-(-self.tile_rows * across // self.workers)):
            number = thread + turn * self.workers
            tile_row, tile_column = number // across, number % across * tiled.OCTET
            row, pair = row_tile * self.tile_rows + tile_row, column_tile * columns + tile_column % columns
            head, column = pair // self.half, pair % self.half + tile_column // columns * self.half
            if tile_row < self.tile_rows and row < q.shape[0]:
                cute.autovec_copy(tiled.quad(made, tile_row, tile_column, tiled.OCTET), piece)
                if head < self.heads:
                    cute.autovec_copy(piece, tiled.quad(q, row, head * self.head_size + column, tiled.OCTET))
                else:
                    which, kv_head = (head - self.heads) // self.kv_heads, (head - self.heads) % self.kv_heads
                    offset = which * cache.stride[0] + kv_head * cache.stride[2] + offsets[tile_row] + column
                    target = (cache.iterator + offset).align(2 * tiled.OCTET)
                    cute.autovec_copy(piece, cute.make_tensor(target, cute.make_layout(tiled.OCTET)))


@cute.jit
def rotate(acc, turn):
    """RoPE of the pairs that a thread has, by the cosines and sines of its rows."""
    for i in range_constexpr(cute.size(turn, mode=[1])):
        a, b = acc[(i % 2, 0, i // 2), 0, 0], acc[(i % 2, 1, i // 2), 0, 0]
        acc[(i % 2, 0, i // 2), 0, 0] = tiled.product(a, turn[0, i]) - tiled.product(b, turn[1, i])
        acc[(i % 2, 1, i // 2), 0, 0] = tiled.product(b, turn[0, i]) + tiled.product(a, turn[1, i])
