"""What the matmul kernels of a decode step on Hopper share. Rows [R, K] times weights [N, K] transposed.

A decode step has few rows, so its matmuls are memory-bound: they wait for weights. One warp of each block only loads.
It copies tiles of both factors into shared memory by TMA, and weights even before the previous kernel has ended, since
nobody writes them. The other warps multiply by wgmma. Weights are its first factor, which comes in 64s, since there may
be fewer rows (but see `gate_up.py`).

A tile of the result has one accumulator, which runs over the depth from first to last, so its bits are those of every
other kernel of the package (`rlcourse.exact.products`). What follows must round as the kernels in Triton do; what the
compiler would contract, or round otherwise, is one inline PTX instruction here.
"""

from rlcourse.kernels import KernelError
from rlcourse.kernels.arguments import need_dtype
from rlcourse.kernels.dsl import Float32, Int32, Int64, const_expr, cute, cutlass, range_constexpr

DEPTH = 64  # of a tile in shared memory: 128 bytes of 16-bit numbers, the widest pattern without bank conflicts
GROUP = 32  # columns of the residual stream whose squares are added first
QUAD = 4  # neighbouring columns that one instruction reads or writes
OCTET = 8  # the same of 16 bits
SHARED_BYTES = 227 << 10  # of shared memory that a block of a Hopper GPU may have
BARRIER_BYTES = 1 << 10  # for the barriers: tiles begin at multiples of this


class Tiled:
    """Base of a kernel that multiplies the rows of its first argument by the weights of argument number `weights`.

    A block computes a tile of the result, of `tile_columns` (64 per four warps) and `tile_rows` (a multiple of 16 up to
    256), with `stages` tiles of both factors in shared memory. `columns`: rows of the weights.
    """

    weights = 1
    shares = 1  # blocks that have a tile together, and share its depth
    cluster = None  # of blocks, in x, y and z
    rows_first = False  # whether rows, and not weights, are wgmma's first factor

    @property
    def workers(self) -> int:
        """Threads that multiply: four warps for each 64 of the first factor."""
        return 2 * (self.tile_rows if self.rows_first else self.tile_columns)

    @property
    def threads(self) -> int:
        return self.workers + 32

    def check(self, whole: bool, result: int, others: int = 0) -> None:
        """Raise KernelError unless dtype and shapes fit (`whole`), and shared memory is large enough for `others`
        bytes beside the tiles, and that of the weights for `result`, the bytes of a tile's result."""
        need_dtype(self)
        of_weights, of_rows = (2 * DEPTH * self.stages * size for size in (self.tile_columns, self.tile_rows))
        needed = BARRIER_BYTES + of_weights + of_rows + others
        if not whole or result > of_weights or needed > SHARED_BYTES:
            raise KernelError(f"{self} does not come in whole tiles that fit into shared memory.")

    def grid(self, a, *others):
        return -(-self.columns // self.tile_columns), -(-a.shape[0] // self.tile_rows), self.shares

    def arranged(self, w):
        """The weights' rows in the order in which a tile takes them."""
        return w

    @cute.jit
    def __call__(self, *arguments):
        tensors, stream = arguments[:-1], arguments[-1]
        a, w, dtype = tensors[0], self.arranged(tensors[self.weights]), tensors[0].element_type
        if const_expr(self.rows_first):
            mma, layout_a, layout_w = instructions(dtype, self.tile_rows, self.tile_columns, self.stages)
        else:
            mma, layout_w, layout_a = instructions(dtype, self.tile_columns, self.tile_rows, self.stages)
        factors = *copies(w, layout_w, self.tile_columns), *copies(a, layout_a, self.tile_rows)
        others = tensors[1 : self.weights] + tensors[self.weights + 1 :]
        launched = self.kernel(*factors, *others, mma, layout_w, layout_a)
        block = [self.threads, 1, 1]
        launched.launch(grid=self.grid(*tensors), block=block, cluster=self.cluster, stream=stream, use_pdl=True)

    @cute.jit
    def begin(self, dtype: cutlass.Constexpr, layout_w, layout_a):
        """A block's column and row tile and number in its cluster; a thread's number, and whether it multiplies; and
        what `allocate` gives."""
        cute.arch.griddepcontrol_launch_dependents()
        column_tile, row_tile, share = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        works = cute.arch.make_warp_uniform(cute.arch.warp_idx()) < const_expr(self.workers // 32)
        shared = allocate(dtype, layout_w, layout_a, self.stages, self.workers)
        return column_tile, row_tile, share, thread, works, shared


def instructions(dtype, first: int, second: int, stages: int):
    """The wgmma of a tile, and the layouts of both factors in shared memory."""
    helpers, by_rows = cutlass.utils.hopper_helpers, cutlass.utils.LayoutEnum.ROW_MAJOR
    major, tile = by_rows.sm90_mma_major_mode(), (first, second, DEPTH)
    mma = helpers.make_trivial_tiled_mma(
        dtype, dtype, major, major, Float32, (first // 64, 1, 1), tiler_mn=(64, second)
    )
    of_first = helpers.make_smem_layout_a(by_rows, tile, dtype, stages)
    return mma, of_first, helpers.make_smem_layout_b(by_rows, tile, dtype, stages)


def pairs_of_rows(w, half: int):
    """The rows of w in turns: eight of a first half, the eight that lie `half` rows behind them, and so on, for each
    pair of halves. Of 16 rows a thread of wgmma holds i and i + 8, so it holds both numbers of a pair."""
    rows, depth = w.shape
    shape, stride = (8, 2, half // 8, rows // (2 * half)), (depth, half * depth, 8 * depth, 2 * half * depth)
    return cute.make_tensor(w.iterator, cute.make_layout((shape, depth), stride=(stride, 1)))


def rows_in_turns(w, half: int):
    """The rows of w in turns: one of the first half, one that lies `half` rows behind it, and so on. A thread of wgmma
    holds neighbouring columns of the result, so it holds both numbers of a pair."""
    _, depth = w.shape
    return cute.make_tensor(w.iterator, cute.make_layout(((2, half), depth), stride=((half * depth, depth), 1)))


def copies(tensor, layout, tile_size: int):
    """How tiles of a matrix come into shared memory by TMA, and the matrix as TMA sees it."""
    operation = cute.nvgpu.cpasync.CopyBulkTensorTileG2SOp()
    one = cute.slice_(layout, (None, None, 0))
    return cute.nvgpu.cpasync.make_tiled_tma_atom(operation, tensor, one, (tile_size, DEPTH), num_multicast=1)


@cute.jit
def allocate(dtype, layout_w: cute.ComposedLayout, layout_a: cute.ComposedLayout, stages: cutlass.Constexpr, workers):
    """Shared memory of a block: both factors' tiles, the place of the weights' (free after the product), and two
    barriers per stage: `full` when its tiles are there, `empty` when they have been used."""
    memory = cutlass.memory.SmemAllocator()
    full, empty = (memory.allocate_array(Int64, stages) for _ in range(2))
    place = memory.allocate_array(dtype, const_expr(cute.cosize(layout_w)), byte_alignment=1024)
    tiles_w = cute.make_tensor(cute.recast_ptr(place, layout_w.inner, dtype), layout_w.outer)
    tiles_a = memory.allocate_tensor(dtype, layout_a.outer, 1024, layout_a.inner)
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        for stage in range_constexpr(stages):
            cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init(empty + stage, const_expr(workers // 32))
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    return tiles_w, tiles_a, place, full, empty


@cute.jit
def load(copy_w, w, tiles_w, column_tile, copy_a, a, tiles_a, row_tile, full, empty, first, count):
    """What the loading warp does: the tiles of a stripe of w and one of a, `count` of them from tile `first` on."""
    to_w, from_w = stripe(copy_w, w, tiles_w, column_tile)
    to_a, from_a = stripe(copy_a, a, tiles_a, row_tile)
    stages = const_expr(cute.size(tiles_w, mode=[2]))
    size = const_expr(2 * DEPTH * (cute.size(tiles_w, mode=[0]) + cute.size(tiles_a, mode=[0])))
    at_once = cutlass.min(count, stages)
    for k in cutlass.range(at_once, unroll=1):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + k, size)
        cute.copy(copy_w, from_w[None, first + k], to_w[None, k], tma_bar_ptr=full + k)
    cute.arch.griddepcontrol_wait()
    for k in cutlass.range(at_once, unroll=1):
        cute.copy(copy_a, from_a[None, first + k], to_a[None, k], tma_bar_ptr=full + k)
    stage, phase = Int32(0), Int32(0)
    for k in cutlass.range(at_once, count, unroll=1):
        cute.arch.mbarrier_wait(empty + stage, phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, size)
        cute.copy(copy_w, from_w[None, first + k], to_w[None, stage], tma_bar_ptr=full + stage)
        cute.copy(copy_a, from_a[None, first + k], to_a[None, stage], tma_bar_ptr=full + stage)
        stage, phase = following(stage, phase, stages)


@cute.jit
def stripe(copy: cute.CopyAtom, matrix: cute.Tensor, tiles: cute.Tensor, number):
    """Places of tiles in shared memory by stage, and what comes there: tiles of a stripe of the matrix, by depth."""
    size = const_expr(cute.size(tiles, mode=[0]))
    tiled = cute.local_tile(matrix, (size, DEPTH), (number, None))
    whole = cute.make_layout(1)
    return cute.nvgpu.cpasync.tma_partition(
        copy, 0, whole, cute.group_modes(tiles, 0, 2), cute.group_modes(tiled, 0, 2)
    )


@cute.jit
def multiply(mma, tiles_w, tiles_a, acc, full, empty, thread, count, workers: cutlass.Constexpr):
    """What the other warps do: acc becomes the product of the tiles that come. Afterwards all have read the last."""
    groups = cute.make_layout(workers // 128, stride=128)
    group = mma.get_slice(groups(cute.arch.make_warp_uniform(thread // 128)))
    factor_w = mma.make_fragment_A(group.partition_A(tiles_w))
    factor_a = mma.make_fragment_B(group.partition_B(tiles_a))
    stages = const_expr(cute.size(tiles_w, mode=[2]))
    acc.fill(0.0)
    mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, True)
    stage, phase, last = Int32(0), Int32(0), Int32(0)
    for k in cutlass.range(count, unroll=1):
        cute.arch.mbarrier_wait(full + stage, phase)
        cute.nvgpu.warpgroup.fence()
        for part in range_constexpr(cute.size(factor_w, mode=[2])):
            cute.gemm(mma, acc, factor_w[None, None, part, stage], factor_a[None, None, part, stage], acc)
        cute.nvgpu.warpgroup.commit_group()
        cute.nvgpu.warpgroup.wait_group(1)
        if k > 0:  # the tiles before have been used
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(empty + last)
        last = stage
        stage, phase = following(stage, phase, stages)
    cute.nvgpu.warpgroup.wait_group(0)
    cute.arch.barrier(barrier_id=1, number_of_threads=workers)


@cute.jit
def write_lines(made: cute.Tensor, out: cute.Tensor, thread, column_tile, row_tile, workers: cutlass.Constexpr):
    """A tile [rows, columns] from shared memory, when all have written their part of it, to its place in out."""
    rows, columns = made.shape
    cute.arch.barrier(barrier_id=1, number_of_threads=workers)
    across = const_expr(columns // OCTET)
    piece = cute.make_rmem_tensor(OCTET, out.element_type)
    for turn in range_constexpr(-(-rows * across // workers)):
        number = thread + turn * workers
        tile_row, tile_column = number // across, number % across * OCTET
        row, column = row_tile * rows + tile_row, column_tile * columns + tile_column
        if tile_row < rows and row < out.shape[0] and column < out.shape[1]:
            cute.autovec_copy(quad(made, tile_row, tile_column, OCTET), piece)
            cute.autovec_copy(piece, quad(out, row, column, OCTET))


@cute.jit
def following(stage, phase, stages: cutlass.Constexpr):
    """The next place of a ring, and how often, modulo 2, one has been round."""
    stage += 1
    if stage == stages:
        stage, phase = Int32(0), phase ^ 1
    return stage, phase


@cute.jit
def quad(tensor: cute.Tensor, row, column, width: cutlass.Constexpr = QUAD):
    """Neighbouring columns of a row, four of them or `width`, which one instruction reads or writes."""
    pointer = tensor.iterator + row.to(Int64) * tensor.stride[0] + column
    return cute.make_tensor(pointer.align(width * tensor.element_type.width // 8), cute.make_layout(width))


@cute.jit
def rounded(instruction: cutlass.Constexpr, *values):
    """The result of one PTX instruction on float32, which the compiler does not change or join with another."""
    operands = "".join(f", {{$r{i}}}" for i in range(len(values)))
    return cute.arch.inline_ptx(
        f"{instruction} {{$w0}}{operands};", write_only_types=[Float32], read_only_args=[*values]
    )


@cute.jit
def inverse_rms(squares: cute.Tensor, row, eps: cutlass.Constexpr):
    """1 / rms of a row of the residual stream, from its sums of squares [R, d / 32], neighbours first."""
    groups = const_expr(squares.shape[1])
    padded = const_expr(1 << (groups - 1).bit_length())
    parts = cute.make_rmem_tensor(padded, Float32)
    parts.fill(0.0)
    for first in range_constexpr(0, groups, QUAD):
        cute.autovec_copy(quad(squares, row, first), cute.make_tensor(parts.iterator + first, cute.make_layout(QUAD)))
    for level in range_constexpr(padded.bit_length() - 1):
        for i in range_constexpr(padded >> (level + 1)):
            parts[i] = parts[2 * i] + parts[2 * i + 1]
    return inverse_root(parts[0], groups * GROUP, eps)


@cute.jit
def inverse_rms_of_rows(
    scales: cute.Tensor, squares: cute.Tensor, eps: cutlass.Constexpr, thread, row_tile, all_rows, workers
):
    """1 / rms of each row of a tile to `scales`, in shared memory."""
    rows = const_expr(cute.size(scales))
    for turn in range_constexpr(-(-rows // workers)):
        number = thread + turn * workers
        row = row_tile * rows + number
        if number < rows and row < all_rows:
            scales[number] = inverse_rms(squares, row, eps)


@cute.jit
def inverse_root(total, count: cutlass.Constexpr, eps: cutlass.Constexpr):
    """1 / sqrt(total / count + eps)."""
    mean = rounded("div.full.f32", total, Float32(count))
    return rounded("rsqrt.approx.ftz.f32", rounded("add.rn.f32", mean, Float32(eps)))


@cute.jit
def product(a, b):
    """a * b, rounded by itself."""
    return rounded("mul.rn.f32", a, b)
