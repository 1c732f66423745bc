"""Queries, keys and values of a decode step, for Hopper: their projection, the norm of heads if there is one, RoPE, and
keys and values to their place in the cache.

RoPE turns dimension i of a head with dimension i + D / 2, so that a tile takes these in turns (`pairs_of_rows`), and a
thread has both.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlcourse.kernels.arguments import Argument
from rlcourse.kernels.dsl import Float32, Int32, Int64, const_expr, cute, cutlass, range_constexpr
from rlcourse.kernels.products import (
    DEPTH,
    GROUP,
    OCTET,
    Tiled,
    inverse_rms_of_rows,
    inverse_root,
    load,
    multiply,
    pairs_of_rows,
    product,
    quad,
)


def qkv_reference(
    y: Tensor, squares: Tensor, w: Tensor, bias: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None,
    cos: Tensor, sin: Tensor, heads: int, kv_heads: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries [R, H, D], keys and values [R, K, D] in y's dtype: y @ w.T times 1 / rms, the bias, norm and RoPE.

    y [R, d] and w [(H + 2 K) D, d], bfloat16 or float16; squares [R, d / 32], whose sum is d times the mean square;
    cos, sin [R, D / 2] at the rows' positions. The product is rounded to y's dtype, the rest is float32.
    """
    inverse = (squares.sum(1, keepdim=True) / y.shape[1] + eps).rsqrt()
    made = (y.float() @ w.float().T).to(y.dtype).float() * inverse
    made = made if bias is None else made + bias.float()
    parts = list(made.unflatten(1, (heads + 2 * kv_heads, -1)).split([heads, kv_heads, kv_heads], dim=1))
    for i, norm in enumerate((q_norm, k_norm)):
        if norm is not None:
            parts[i] = parts[i] * (parts[i].square().mean(-1, keepdim=True) + eps).rsqrt() * norm
        a, b = parts[i].chunk(2, -1)
        parts[i] = torch.cat([a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]], -1)
    return tuple(part.to(y.dtype) for part in parts)


@dataclass(frozen=True)
class QKV(Tiled):
    """The kernel. depth: of y. bias: whether there is one; norm: whether queries and keys have one, by head.

    block: tokens of a block, of a paged cache; 0 where each row has its own part. With a norm a tile is whole heads.
    """

    heads: int
    kv_heads: int
    head_size: int
    depth: int
    eps: float = 1e-6
    bias: bool = True
    norm: bool = False
    block: int = 0
    tile_columns: int = 64
    tile_rows: int = 64
    stages: int = 6
    dtype: str = "bfloat16"

    weights = 2

    def __post_init__(self):
        whole = (self.heads + 2 * self.kv_heads) * self.head_size % self.tile_columns == 0
        whole &= not self.norm or self.tile_columns % self.head_size == 0
        whole &= self.depth % (4 * GROUP) == self.head_size % 16 == 0 and self.depth <= 64 * GROUP
        of_a_row = 4 + 8 + (self.tile_columns // 16 * 4 if self.norm else 0)  # its scale, place, and sums of squares
        self.check(whole, 2 * self.tile_rows * (self.tile_columns + OCTET), others=of_a_row * self.tile_rows)

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
            Argument("squares", "float32", ("rows", self.depth // GROUP)),
            Argument("w", self.dtype, (self.columns, self.depth)),
            Argument("bias", self.dtype, (self.columns,)) if self.bias else None,
            *norm,
            Argument("cos", "float32", ("positions", self.half)),
            Argument("sin", "float32", ("positions", self.half)),
            Argument("position", "int64", ("rows",), free=1, align=8),
            Argument("completion", "int64", ("rows",), align=8) if self.block else None,
            Argument("table", "int32", ("completions", "width"), free=1, align=4) if self.block else None,
            Argument("q", self.dtype, ("rows", self.heads * self.head_size), output=True),
            Argument("cache", self.dtype, (2, "parts", self.kv_heads, "tokens", self.head_size), free=3, output=True),
        )

    def arranged(self, w):
        return pairs_of_rows(w, self.half)

    @cute.kernel
    def kernel(
        self, copy_w: cute.CopyAtom, w: cute.Tensor, copy_y: cute.CopyAtom, y: cute.Tensor, squares: cute.Tensor,
        bias: cute.Tensor, q_norm: cute.Tensor, k_norm: cute.Tensor, cos: cute.Tensor, sin: cute.Tensor,
        position: cute.Tensor, completion: cute.Tensor, table: cute.Tensor, q: cute.Tensor, cache: cute.Tensor,
        mma: cute.TiledMma, layout_w: cute.ComposedLayout, layout_a: cute.ComposedLayout,
    ):  # fmt: skip
        column_tile, row_tile, _, thread, works, shared = self.begin(q.element_type, layout_w, layout_a)
        tiles_w, tiles_y, place, full, empty = shared
        memory = cutlass.memory.SmemAllocator()
        scales = memory.allocate_tensor(Float32, cute.make_layout(self.tile_rows), 16)
        offsets = memory.allocate_tensor(Int64, cute.make_layout(self.tile_rows), 16)
        by_head = cute.make_layout((self.tile_columns // 16, self.tile_rows))
        sums = memory.allocate_tensor(Float32, by_head, 16) if const_expr(self.norm) else None
        first, count = Int32(0), Int32(self.depth // DEPTH)
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
            inverse_rms_of_rows(scales, squares, self.eps, thread, row_tile, q.shape[0], self.workers)
            tile = cute.make_identity_tensor((self.tile_columns, self.tile_rows))
            acc = cute.make_rmem_tensor(mma.get_slice(thread).partition_C(tile).shape, Float32)
            multiply(mma, tiles_w, tiles_y, acc, full, empty, thread, count, self.workers)
            self.finish(acc, scales, bias, thread, head, column, q.element_type)
            if const_expr(self.norm):
                self.norm_heads(acc, sums, q_norm, k_norm, thread, head, column)
            if head < self.heads + self.kv_heads:
                rotate(acc, turn)
            self.write(acc, offsets, place, q, cache, thread, column_tile, row_tile)
        else:
            load(copy_w, w, tiles_w, column_tile, copy_y, y, tiles_y, row_tile, full, empty, first, count)

    @cute.jit
    def places(self, offsets, position, completion, table, cache, thread, row_tile):
        """Where in the cache, from its beginning, the new token of each row of the tile is."""
        for i in range_constexpr(-(-self.tile_rows // self.workers)):
            number = thread + i * self.workers
            row = row_tile * self.tile_rows + number
            if number < self.tile_rows and row < position.shape[0]:
                at, part = position[row], row.to(Int64)
                if const_expr(self.block > 0):
                    part = table[completion[row], at // self.block].to(Int64)
                    at = at % self.block
                offsets[number] = part * cache.stride[1] + at * self.head_size

    @cute.jit
    def finish(self, acc, scales, bias, thread, head, column, dtype: cutlass.Constexpr):
        """The projection: the product, rounded as in memory, times 1 / rms, and the bias."""
        for half in range_constexpr(2):
            more = Float32(0.0)
            if const_expr(self.bias):
                more = bias[head * self.head_size + half * self.half + column].to(Float32)
            for i in range_constexpr(self.tile_rows // 4):
                scale = scales[i // 2 * 8 + thread % 4 * 2 + i % 2]
                value = product(acc[(i % 2, half, i // 2), 0, 0].to(dtype).to(Float32), scale)
                acc[(i % 2, half, i // 2), 0, 0] = value + more if const_expr(self.bias) else value

    @cute.jit
    def norm_heads(self, acc, sums, q_norm, k_norm, thread, head, column):
        """RMSNorm of queries and keys: squares are added neighbours first, eight by a warp's lanes, then the warps'."""
        for i in range_constexpr(self.tile_rows // 4):
            a, b = acc[(i % 2, 0, i // 2), 0, 0], acc[(i % 2, 1, i // 2), 0, 0]
            square = product(a, a) + product(b, b)
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
            scale = inverse_root(total[0], self.head_size, self.eps)
            for half in range_constexpr(2):
                value = acc[(i % 2, half, i // 2), 0, 0]
                if head < self.heads:
                    value = product(product(value, scale), q_norm[half * self.half + column])
                elif head < self.heads + self.kv_heads:
                    value = product(product(value, scale), k_norm[half * self.half + column])
                acc[(i % 2, half, i // 2), 0, 0] = value

    @cute.jit
    def write(self, acc, offsets, place, q, cache, thread, column_tile, row_tile):
        """To shared memory, where the tiles of weights were, and from there in whole lines."""
        columns = const_expr(self.tile_columns // 2)
        pitch = const_expr(self.tile_columns + OCTET)  # so that the lanes of a warp meet different banks
        made = cute.make_tensor(place, cute.make_layout((self.tile_rows, self.tile_columns), stride=(pitch, 1)))
        own = thread // 32 * 8 + thread % 32 // 4
        for half in range_constexpr(2):
            for i in range_constexpr(self.tile_rows // 4):
                value = acc[(i % 2, half, i // 2), 0, 0].to(q.element_type)
                made[i // 2 * 8 + thread % 4 * 2 + i % 2, half * columns + own] = value
        cute.arch.barrier(barrier_id=1, number_of_threads=self.workers)
        across = const_expr(self.tile_columns // OCTET)
        piece = cute.make_rmem_tensor(OCTET, q.element_type)
        for turn in range_constexpr(-(-self.tile_rows * across // self.workers)):
            number = thread + turn * self.workers
            tile_row, tile_column = number // across, number % across * OCTET
            row, pair = row_tile * self.tile_rows + tile_row, column_tile * columns + tile_column % columns
            head, column = pair // self.half, pair % self.half + tile_column // columns * self.half
            if tile_row < self.tile_rows and row < q.shape[0]:
                cute.autovec_copy(quad(made, tile_row, tile_column, OCTET), piece)
                if head < self.heads:
                    cute.autovec_copy(piece, quad(q, row, head * self.head_size + column, OCTET))
                else:
                    which, kv_head = (head - self.heads) // self.kv_heads, (head - self.heads) % self.kv_heads
                    offset = which * cache.stride[0] + kv_head * cache.stride[2] + offsets[tile_row] + column
                    target = cute.make_tensor((cache.iterator + offset).align(2 * OCTET), cute.make_layout(OCTET))
                    cute.autovec_copy(piece, target)


@cute.jit
def rotate(acc, turn):
    """RoPE of the pairs that a thread has, by the cosines and sines of its rows."""
    for i in range_constexpr(cute.size(turn, mode=[1])):
        a, b = acc[(i % 2, 0, i // 2), 0, 0], acc[(i % 2, 1, i // 2), 0, 0]
        acc[(i % 2, 0, i // 2), 0, 0] = product(a, turn[0, i]) - product(b, turn[1, i])
        acc[(i % 2, 1, i // 2), 0, 0] = product(b, turn[0, i]) + product(a, turn[1, i])
