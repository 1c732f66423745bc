"""SwiGLU of a product, for Hopper: h = silu(gate) * up, both products with rows y whose 1 / rms is still missing. A
tile takes the two halves of the weights' rows in turns, so that a thread has both numbers that make one of h. With many
rows these can be wgmma's first factor, and the weights its second, which comes in 16s and not in 64s: then there can be
nearly as many blocks as run on the GPU at once."""

from dataclasses import dataclass

from rlcourse.kernels import products as tiled
from rlcourse.kernels.arguments import Argument
from rlcourse.kernels.dsl import Float32, Int32, const_expr, cute, cutlass, range_constexpr
from rlcourse.kernels.kernel import LOG2_E


@dataclass(frozen=True)
class GateUp(tiled.Tiled):
    """The kernel. inner, depth: of h and of y. rows_first: with tile_rows a multiple of 64, and tile_columns of 16."""

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
        whole = self.inner % tiled.OCTET == self.depth % (4 * tiled.GROUP) == 0 and self.depth <= 64 * tiled.GROUP
        whole &= not self.rows_first or self.tile_rows % 64 == self.tile_columns % 16 == 0
        self.check(whole, 2 * self.tile_rows * (self.tile_columns // 2 + tiled.OCTET), others=4 * self.tile_rows)

    @property
    def columns(self) -> int:
        return 2 * self.inner

    def arguments(self):
        return (
            Argument("y", self.dtype, ("rows", self.depth)),
            Argument("squares", "float32", ("rows", self.depth // tiled.GROUP)),
            Argument("w", self.dtype, (2 * self.inner, self.depth)),
            Argument("h", self.dtype, ("rows", self.inner), output=True),
        )

    def arranged(self, w):
        return tiled.rows_in_turns(w, self.inner) if self.rows_first else tiled.pairs_of_rows(w, self.inner)

    @cute.kernel
    def kernel(self, copy_w, w, copy_y, y, squares, h, mma, layout_w, layout_y):
        column_tile, row_tile, _, thread, works, shared = self.begin(h.element_type, layout_w, layout_y)
        tiles_w, tiles_y, place, full, empty = shared
        scales = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(self.tile_rows), 16)
        first, count = Int32(0), Int32(self.depth // tiled.DEPTH)
        if works:
            cute.arch.griddepcontrol_wait()
            tiled.inverse_rms_of_rows(scales, squares, self.eps, thread, row_tile, h.shape[0], self.workers)
            tiles = (tiles_y, tiles_w) if const_expr(self.rows_first) else (tiles_w, tiles_y)
            tile = cute.make_identity_tensor((cute.size(tiles[0], mode=[0]), cute.size(tiles[1], mode=[0])))
            acc = cute.make_rmem_tensor(mma.get_slice(thread).partition_C(tile).shape, Float32)
            tiled.multiply(mma, *tiles, acc, full, empty, thread, count, self.workers)
            self.write(acc, scales, place, h, thread, column_tile, row_tile)
        else:
            tiled.load(copy_w, w, tiles_w, column_tile, copy_y, y, tiles_y, row_tile, full, empty, first, count)

    @cute.jit
    def write(self, acc, scales, place, h, thread, column_tile, row_tile):
        """h of the tile: to shared memory, where the tiles of weights were, and from there in whole lines."""
        columns = const_expr(self.tile_columns // 2)
        pitch = const_expr(columns + tiled.OCTET)  # so that the lanes of a warp meet different banks
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
        tiled.write_lines(made, h, thread, column_tile, row_tile, self.workers)


@cute.jit
def swiglu(gate: Float32, up: Float32, scale: Float32, dtype: cutlass.Constexpr):
    """silu(gate) * up, of the products rounded to dtype and times scale, by the instructions that Triton makes."""
    gate, up = gate.to(dtype).to(Float32) * scale, up.to(dtype).to(Float32) * scale
    power = tiled.rounded("ex2.approx.f32", tiled.product(-gate, Float32(LOG2_E)))
    sigmoid = tiled.rounded("div.full.f32", Float32(1.0), tiled.rounded("add.rn.f32", power, Float32(1.0)))
    return tiled.product(tiled.product(gate, sigmoid), up).to(dtype)
