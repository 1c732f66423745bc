"""A product of a decode step, for Hopper: out = a @ w.T. With many columns, such as a vocabulary, and few rows it is
faster than the library's, since its weights do not wait for the kernel before it.
"""

from dataclasses import dataclass

from torch import Tensor

from rlcourse.kernels import KernelError
from rlcourse.kernels.arguments import Argument, need_dtype
from rlcourse.kernels.dsl import Float32, Int32, const_expr, cute, range_constexpr
from rlcourse.kernels.products import DEPTH, OCTET, Tiled, allocate, copies, instructions, load, multiply, write_lines


def product_reference(a: Tensor, w: Tensor) -> Tensor:
    """a [R, K] @ w.T [K, N] in a's dtype, bfloat16 or float16; sums in float32."""
    return (a.float() @ w.float().T).to(a.dtype)


@dataclass(frozen=True)
class Product(Tiled):
    """The kernel. columns, depth: of w. tile_columns, tile_rows, stages: as of `AddProduct`."""

    columns: int
    depth: int
    tile_columns: int = 64
    tile_rows: int = 64
    stages: int = 6
    dtype: str = "bfloat16"

    def __post_init__(self):
        need_dtype(self)
        if self.columns % OCTET or self.depth % OCTET:
            raise KernelError(
                f"A product of {self.columns} columns, {self.depth} deep: take a multiple of {OCTET} of both."
            )
        self.need_room(2 * self.tile_rows * (self.tile_columns + OCTET))

    def arguments(self):
        return (
            Argument("a", self.dtype, ("rows", self.depth)),
            Argument("w", self.dtype, (self.columns, self.depth)),
            Argument("out", self.dtype, ("rows", self.columns), output=True),
        )

    def grid(self, a, *others):
        return -(-self.columns // self.tile_columns), -(-a.shape[0] // self.tile_rows), 1

    @cute.jit
    def __call__(self, a, w, out, stream):
        mma, layout_w, layout_a = instructions(a.element_type, self.tile_columns, self.tile_rows, self.stages)
        copy_w, w = copies(w, layout_w, self.tile_columns)
        copy_a, a = copies(a, layout_a, self.tile_rows)
        blocks = (-(-self.columns // self.tile_columns), cute.ceil_div(out.shape[0], self.tile_rows), 1)
        launched = self.kernel(copy_w, w, copy_a, a, out, mma, layout_w, layout_a)
        launched.launch(grid=blocks, block=[self.threads, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(
        self, copy_w: cute.CopyAtom, w: cute.Tensor, copy_a: cute.CopyAtom, a: cute.Tensor, out: cute.Tensor,
        mma: cute.TiledMma, layout_w: cute.ComposedLayout, layout_a: cute.ComposedLayout,
    ):  # fmt: skip
        cute.arch.griddepcontrol_launch_dependents()
        column_tile, row_tile, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        works = cute.arch.make_warp_uniform(cute.arch.warp_idx()) < const_expr(self.workers // 32)
        tiles_w, tiles_a, place, full, empty = allocate(out.element_type, layout_w, layout_a, self.stages, self.workers)
        first, count = Int32(0), Int32(-(-self.depth // DEPTH))
        if works:
            cute.arch.griddepcontrol_wait()
            pitch = const_expr(self.tile_columns + OCTET)  # so that the lanes of a warp meet different banks
            by_columns = cute.make_layout((self.tile_columns, self.tile_rows), stride=(1, pitch))
            mine = mma.get_slice(thread).partition_C(cute.make_tensor(place, by_columns))
            acc = cute.make_rmem_tensor(mine.shape, Float32)
            multiply(mma, tiles_w, tiles_a, acc, full, empty, thread, count, self.workers)
            for i in range_constexpr(cute.size(acc)):
                mine[i] = acc[i].to(out.element_type)
            made = cute.make_tensor(place, cute.make_layout((self.tile_rows, self.tile_columns), stride=(pitch, 1)))
            write_lines(made, out, thread, column_tile, row_tile, self.workers)
        else:
            load(copy_w, w, tiles_w, column_tile, copy_a, a, tiles_a, row_tile, full, empty, first, count)
