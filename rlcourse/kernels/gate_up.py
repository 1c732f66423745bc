"""SwiGLU of a product, for Hopper: h = silu(gate) * up, both products with rows y whose 1 / rms is still missing.

Gate and up are the two halves of the weights' rows, which a tile takes in turns, so that a thread has both numbers that
make one of h. With many rows these can be wgmma's first factor, and the weights its second, which comes in 16s and not
in 64s: then there can be nearly as many blocks as run on the GPU at once.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from rlcourse.kernels.arguments import Argument
from rlcourse.kernels.dsl import Float32, Int32, const_expr, cute, cutlass, range_constexpr
from rlcourse.kernels.kernel import LOG2_E
from rlcourse.kernels.products import (
    DEPTH,
    GROUP,
    OCTET,
    Tiled,
    inverse_rms_of_rows,
    load,
    multiply,
    pairs_of_rows,
    product,
    rounded,
    rows_in_turns,
    write_lines,
)


def gate_up_reference(y: Tensor, squares: Tensor, w: Tensor, eps: float) -> Tensor:
    """silu(gate) * up [R, I] of the halves of y @ w.T times 1 / rms, the product rounded to y's dtype before.

    y [R, d] and w [2 * I, d], bfloat16 or float16; squares [R, d / 32] float32, whose sum is d times the mean square.
    """
    inverse = (squares.sum(1, keepdim=True) / y.shape[1] + eps).rsqrt()
    gate, up = ((y.float() @ w.float().T).to(y.dtype).float() * inverse).chunk(2, 1)
    return (F.silu(gate) * up).to(y.dtype)


@dataclass(frozen=True)
class GateUp(Tiled):
    """The kernel. inner, depth: of h and of y. A tile has half as many columns of h as of the product. rows_first: with
    tile_rows a multiple of 64, and tile_columns of 16."""

    inner: int
    depth: int
    eps: float = 1e-6
    tile_columns: int = 64
    tile_rows: int = 64
    stages: int = 6
    dtype: str = "bfloat16"
    rows_first: bool = False

    weights = 2

    def __post_init__(self):
        whole = self.inner % OCTET == self.depth % (4 * GROUP) == 0 and self.depth <= 64 * GROUP
        whole &= not self.rows_first or self.tile_rows % 64 == self.tile_columns % 16 == 0
        self.check(whole, 2 * self.tile_rows * (self.tile_columns // 2 + OCTET), others=4 * self.tile_rows)

    @property
    def columns(self) -> int:
        return 2 * self.inner

    def arguments(self):
        return (
            Argument("y", self.dtype, ("rows", self.depth)),
            Argument("squares", "float32", ("rows", self.depth // GROUP)),
            Argument("w", self.dtype, (2 * self.inner, self.depth)),
            Argument("h", self.dtype, ("rows", self.inner), output=True),
        )

    def arranged(self, w):
        return rows_in_turns(w, self.inner) if self.rows_first else pairs_of_rows(w, self.inner)

    @cute.kernel
    def kernel(
        self, copy_w: cute.CopyAtom, w: cute.Tensor, copy_y: cute.CopyAtom, y: cute.Tensor, squares: cute.Tensor,
        h: cute.Tensor, mma: cute.TiledMma, layout_w: cute.ComposedLayout, layout_y: cute.ComposedLayout,
    ):  # fmt: skip
        column_tile, row_tile, _, thread, works, shared = self.begin(h.element_type, layout_w, layout_y)
        tiles_w, tiles_y, place, full, empty = shared
        scales = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(self.tile_rows), 16)
        first, count = Int32(0), Int32(self.depth // DEPTH)
        if works:
            cute.arch.griddepcontrol_wait()
            inverse_rms_of_rows(scales, squares, self.eps, thread, row_tile, h.shape[0], self.workers)
            tiles = (tiles_y, tiles_w) if const_expr(self.rows_first) else (tiles_w, tiles_y)
            tile = cute.make_identity_tensor((cute.size(tiles[0], mode=[0]), cute.size(tiles[1], mode=[0])))
            acc = cute.make_rmem_tensor(mma.get_slice(thread).partition_C(tile).shape, Float32)
            multiply(mma, *tiles, acc, full, empty, thread, count, self.workers)
            self.write(acc, scales, place, h, thread, column_tile, row_tile)
        else:
            load(copy_w, w, tiles_w, column_tile, copy_y, y, tiles_y, row_tile, full, empty, first, count)

    @cute.jit
    def write(self, acc, scales, place, h, thread, column_tile, row_tile):
        """h of the tile: to shared memory, where the tiles of weights were, and from there in whole lines."""
        columns = const_expr(self.tile_columns // 2)
        pitch = const_expr(columns + OCTET)  # so that the lanes of a warp meet different banks
        made = cute.make_tensor(place, cute.make_layout((self.tile_rows, columns), stride=(pitch, 1)))
        warp, lane = thread // 32, thread % 32
        if const_expr(self.rows_first):
            for half in range_constexpr(2):
                row = 16 * warp + 8 * half + lane // 4
                for j in range_constexpr(columns // 4):
                    gate, up = acc[(0, half, j), 0, 0], acc[(1, half, j), 0, 0]
                    made[row, 4 * j + lane % 4] = swiglu(gate, up, scales[row], h.element_type)
        else:
            for j in range_constexpr(self.tile_rows // 8):
                for i in range_constexpr(2):
                    row = 8 * j + lane % 4 * 2 + i
                    gate, up = acc[(i, 0, j), 0, 0], acc[(i, 1, j), 0, 0]
                    made[row, 8 * warp + lane // 4] = swiglu(gate, up, scales[row], h.element_type)
        write_lines(made, h, thread, column_tile, row_tile, self.workers)


@cute.jit
def swiglu(gate: Float32, up: Float32, scale: Float32, dtype: cutlass.Constexpr):
    """silu(gate) * up, of the products rounded to dtype and times scale, with the instructions that Triton makes of
    it."""
    gate, up = gate.to(dtype).to(Float32) * scale, up.to(dtype).to(Float32) * scale
    power = rounded("ex2.approx.f32", product(-gate, Float32(LOG2_E)))
    sigmoid = rounded("div.full.f32", Float32(1.0), rounded("add.rn.f32", power, Float32(1.0)))
    return product(product(gate, sigmoid), up).to(dtype)
