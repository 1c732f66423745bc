"""A product that is added to the residual stream, for Hopper: x += a @ w.T, and the parts of the norm that follows. The
product after SwiGLU is deep and narrow, so up to four blocks, a cluster, share the depth of a tile, as
`rlcourse.exact.products` cuts it. Each leaves its sum in its own shared memory, and when all have, each reads a part of
the tile from all of them, adds up, and writes."""

from dataclasses import dataclass

from rlcourse.kernels.arguments import Argument
from rlcourse.kernels.dsl import Float32, Int32, const_expr, cute, cutlass, range_constexpr
from rlcourse.kernels.products import DEPTH, GROUP, QUAD, Tiled, load, multiply, product, quad


@dataclass(frozen=True)
class AddProduct(Tiled):
    """The kernel. columns, depth: of w. share: of the depth, for each block of a cluster, of at most 4."""

    columns: int
    depth: int
    share: int
    tile_columns: int = 64
    tile_rows: int = 64
    stages: int = 6
    dtype: str = "bfloat16"

    def __post_init__(self):
        whole = self.columns % self.tile_columns == self.share % DEPTH == self.depth % 8 == 0
        self.check(whole and self.shares <= 4, 4 * self.tile_rows * (self.tile_columns + 4))

    @property
    def shares(self) -> int:
        return -(-self.depth // self.share)

    @property
    def cluster(self) -> tuple[int, int, int]:
        return 1, 1, self.shares

    def arguments(self):
        return (
            Argument("a", self.dtype, ("rows", self.depth)),
            Argument("w", self.dtype, (self.columns, self.depth)),
            Argument("x", "float32", ("rows", self.columns)),
            Argument("norm", "float32", (self.columns,)),
            Argument("y", self.dtype, ("rows", self.columns), output=True),
            Argument("squares", "float32", ("rows", self.columns // GROUP), output=True),
        )

    @cute.kernel
    def kernel(self, copy_w, w, copy_a, a, x, norm, y, squares, mma, layout_w, layout_a):
        column_tile, row_tile, share, thread, works, shared = self.begin(y.element_type, layout_w, layout_a)
        tiles_w, tiles_a, place, full, empty = shared
        pitch = const_expr(self.tile_columns + 4)  # 4 floats more, so that the lanes of a warp meet different banks
        by_columns = cute.make_layout((self.tile_columns, self.tile_rows), stride=(1, pitch))
        sums = cute.make_tensor(cute.recast_ptr(place, dtype=Float32), by_columns)
        at = (share, column_tile, row_tile, x.shape[0])
        before = cute.make_rmem_tensor((QUAD, self.turns), Float32)
        first = share * const_expr(self.share // DEPTH)
        count = cutlass.min(const_expr(self.share // DEPTH), const_expr(-(-self.depth // DEPTH)) - first)
        if works:
            cute.arch.griddepcontrol_wait()
            for turn in range_constexpr(self.turns):
                row, column, _, _, there = self.place_of(thread, turn, at)
                if there:
                    cute.autovec_copy(quad(x, row, column), before[None, turn])
            mine = mma.get_slice(thread).partition_C(sums)
            acc = cute.make_rmem_tensor(mine.shape, Float32)
            multiply(mma, tiles_w, tiles_a, acc, full, empty, thread, count, self.workers)
            for i in range_constexpr(cute.size(acc)):
                mine[i] = acc[i]
        else:
            load(copy_w, w, tiles_w, column_tile, copy_a, a, tiles_a, row_tile, full, empty, first, count)
        self.wait_for_all()
        if works:
            for turn in range_constexpr(self.turns):
                self.add_up(sums, before[None, turn], norm, x, y, squares, self.place_of(thread, turn, at))
        if const_expr(self.shares > 1):  # none goes while another reads its sums
            self.wait_for_all()

    @property
    def turns(self) -> int:
        """How often a thread adds up four columns of a row: the blocks of a cluster share the rows."""
        return -(-(-(-self.tile_rows // self.shares) * self.tile_columns) // (QUAD * self.workers))

    @cute.jit
    def place_of(self, thread, turn, at):
        """Where a thread adds up: row and first column, the same within the tile, and whether there is such a row."""
        share, column_tile, row_tile, rows = at
        across = const_expr(self.tile_columns // QUAD)
        number = thread + turn * self.workers
        row, column = number // across * self.shares + share, number % across * QUAD
        of_all = row_tile * self.tile_rows + row
        there = row < self.tile_rows and of_all < rows
        return of_all, column_tile * self.tile_columns + column, row, column, there

    @cute.jit
    def wait_for_all(self):
        """For all threads of the cluster."""
        if const_expr(self.shares > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def add_up(self, sums, before, norm, x, y, squares, where):
        """x + ((s0 + s1) + (s2 + s3)), and the norm's parts."""
        row, column, tile_row, tile_column, there = where
        parts = cute.make_rmem_tensor((QUAD, self.shares), Float32)
        total, scale = (cute.make_rmem_tensor(QUAD, Float32) for _ in range(2))
        scaled = cute.make_rmem_tensor(QUAD, y.element_type)
        total.fill(0.0)
        if there:
            own = (sums.iterator + sums.layout((tile_column, tile_row))).align(16)
            for p in range_constexpr(self.shares):
                source = cute.arch.map_dsmem_ptr(own, Int32(p)) if const_expr(self.shares > 1) else own
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(QUAD)), parts[None, p])
            cute.autovec_copy(cute.make_tensor((norm.iterator + column).align(16), cute.make_layout(QUAD)), scale)
            for e in range_constexpr(QUAD):
                pairs = [parts[e, p] + parts[e, p + 1] for p in range(0, self.shares - 1, 2)]
                pairs += [parts[e, self.shares - 1]] if self.shares % 2 else []
                total[e] = before[e] + (pairs[0] + pairs[1] if const_expr(len(pairs) == 2) else pairs[0])
                scaled[e] = (total[e] * scale[e]).to(y.element_type)
            cute.autovec_copy(total, quad(x, row, column))
            cute.autovec_copy(scaled, quad(y, row, column))
        a, b, c, d = (product(total[e], total[e]) for e in range(QUAD))
        square = (a + b) + (c + d)
        for level in range_constexpr(3):  # eight threads have 32 columns; neighbours first
            square += cute.arch.shuffle_sync_bfly(square, offset=1 << level)
        if there and column % GROUP == 0:
            squares[row, column // GROUP] = square
