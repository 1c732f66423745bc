"""A product of a decode step, for Hopper: out = a @ w.T. With many columns, such as a vocabulary, and few rows it is
faster than the library's, since its weights do not wait for the kernel before it.
"""

from dataclasses import dataclass

from torch import Tensor

from rlcourse.kernels.arguments import Argument
from rlcourse.kernels.dsl import Float32, Int32, const_expr, cute, range_constexpr
from rlcourse.kernels.products import DEPTH, OCTET, Tiled, load, multiply, write_lines


def product_reference(a: Tensor, w: Tensor) -> Tensor:
    """a [R, K] @ w.T [K, N] in a's dtype, bfloat16 or float16; sums in float32."""
    return (a.float() @ w.float().T).to(a.dtype)


@dataclass(frozen=True)
class Product(Tiled):
    """The kernel. columns, depth: of w."""

    columns: int
    depth: int
    tile_columns: int = 64
    tile_rows: int = 64
    stages: int = 6
    dtype: str = "bfloat16"

    def __post_init__(self):
        whole = self.columns % OCTET == self.depth % OCTET == 0
        self.check(whole, 2 * self.tile_rows * (self.tile_columns + OCTET))

    def arguments(self):
        return (
            Argument("a", self.dtype, ("rows", self.depth)),
            Argument("w", self.dtype, (self.columns, self.depth)),
            Argument("out", self.dtype, ("rows", self.columns), output=True),
        )

    @cute.kernel
    def kernel(
        self, copy_w: cute.CopyAtom, w: cute.Tensor, copy_a: cute.CopyAtom, a: cute.Tensor, out: cute.Tensor,
        mma: cute.TiledMma, layout_w: cute.ComposedLayout, layout_a: cute.ComposedLayout,
    ):  # fmt: skip
        column_tile, row_tile, _, thread, works, shared = self.begin(out.element_type, layout_w, layout_a)
        tiles_w, tiles_a, place, full, empty = shared
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
