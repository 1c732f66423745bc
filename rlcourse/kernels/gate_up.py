"""SwiGLU of a product, for Hopper: h = silu(gate) * up, both products with rows y whose 1 / rms is still missing.

Gate and up are the two halves of the weights' rows, which a tile takes in turns, so that a thread has both numbers that
make one of h. With many rows these can be wgmma's first factor, and the weights its second, which comes in 16s and not
in 64s: then there can be nearly as many blocks as run on the GPU at once.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from rlcourse.kernels import KernelError
from rlcourse.kernels.arguments import Argument, need_dtype
from rlcourse.kernels.decode_common import LOG2_E
from rlcourse.kernels.dsl import Float32, Int32, const_expr, cute, cutlass, range_constexpr
from rlcourse.kernels.products import (
    DEPTH,
    GROUP,
    OCTET,
    Tiled,
    allocate,
    copies,
    instructions,
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
    """The kernel. inner, depth: of h and of y. tile_columns: rows of w that a block takes, 64 for each four warps that
    multiply; half as many columns of h. tile_rows, stages: as of `AddProduct`. rows_first: rows are the first factor,
    64 of them for each four warps; tile_columns a multiple of 16."""

    inner: int
    depth: int
    eps: float = 1e-6
    tile_columns: int = 64
    tile_rows: int = 64
    stages: int = 6
    dtype: str = "bfloat16"
    rows_first: bool = False

    def __post_init__(self):
        need_dtype(self)
        if self.inner % OCTET or self.depth % (4 * GROUP) or self.depth > 64 * GROUP:
            raise KernelError(
                f"SwiGLU of {self.inner} columns and {self.depth} features: this kernel takes a multiple of {OCTET} "
                f"columns and of {4 * GROUP} features, {64 * GROUP} at most; use the kernel in Triton."
            )
        if self.rows_first and (self.tile_rows % 64 or self.tile_columns % 16):
            raise KernelError(
                f"A tile of {self.tile_columns} columns and {self.tile_rows} rows: where rows are first, they are a "
                "multiple of 64 and columns of 16; take other tiles, or the kernel in Triton."
            )
        self.need_room(2 * self.tile_rows * (self.tile_columns // 2 + OCTET), others=4 * self.tile_rows)

    @property
    def workers(self) -> int:
        return 2 * (self.tile_rows if self.rows_first else self.tile_columns)

    def arguments(self):
        return (
            Argument("y", self.dtype, ("rows", self.depth)),
            Argument("squares", "float32", ("rows", self.depth // GROUP)),
            Argument("w", self.dtype, (2 * self.inner, self.depth)),
            Argument("h", self.dtype, ("rows", self.inner), output=True),
        )

    def grid(self, y, *others):
        return -(-2 * self.inner // self.tile_columns), -(-y.shape[0] // self.tile_rows), 1

    @cute.jit
    def __call__(self, y, squares, w, h, stream):
        if const_expr(self.rows_first):
            mma, layout_y, layout_w = instructions(y.element_type, self.tile_rows, self.tile_columns, self.stages)
            copy_w, w = copies(rows_in_turns(w, self.inner), layout_w, self.tile_columns)
        else:
            mma, layout_w, layout_y = instructions(y.element_type, self.tile_columns, self.tile_rows, self.stages)
            copy_w, w = copies(pairs_of_rows(w, self.inner), layout_w, self.tile_columns)
        copy_y, y = copies(y, layout_y, self.tile_rows)
        blocks = (-(-2 * self.inner // self.tile_columns), cute.ceil_div(h.shape[0], self.tile_rows), 1)
        launched = self.kernel(copy_w, w, copy_y, y, squares, h, mma, layout_w, layout_y)
        launched.launch(grid=blocks, block=[self.threads, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(
        self, copy_w: cute.CopyAtom, w: cute.Tensor, copy_y: cute.CopyAtom, y: cute.Tensor, squares: cute.Tensor,
        h: cute.Tensor, mma: cute.TiledMma, layout_w: cute.ComposedLayout, layout_y: cute.ComposedLayout,
    ):  # fmt: skip
        cute.arch.griddepcontrol_launch_dependents()
        column_tile, row_tile, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        works = cute.arch.make_warp_uniform(cute.arch.warp_idx()) < const_expr(self.workers // 32)
        tiles_w, tiles_y, place, full, empty = allocate(h.element_type, layout_w, layout_y, self.stages, self.workers)
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
