"""What the matmul kernels of a decode step on Hopper share. Rows [R, K] times weights [N, K] transposed. One warp of
each block only loads: tiles of both factors, by TMA, and weights even before the previous kernel has ended. The other
warps multiply by wgmma, whose first factor, which comes in 64s, is weights (but see `gate_up.py`). A tile of the result
has one accumulator, so its bits are those of every other kernel of the package (`rlcourse.exact.products`). What
follows must round as in Triton: what the compiler would contract, or round otherwise, is one inline PTX instruction."""

from dataclasses import dataclass

from rlcourse.kernels import KernelError
from rlcourse.kernels.arguments import Argument
from rlcourse.kernels.dsl import Float32, Int32, Int64, const_expr, cute, cutlass, range_constexpr
from rlcourse.kernels.kernel import Kernel, registers

DEPTH = 64  # of a tile in shared memory: 128 bytes of 16-bit numbers, the widest pattern without bank conflicts
GROUP = 32  # columns of the residual stream whose squares are added first
QUAD, OCTET = 4, 8  # neighbouring columns that one instruction reads or writes, of 32 bits and of 16
SHARED_BYTES = 227 << 10  # that a Hopper block may have
BARRIER_BYTES = 1 << 10  # of barriers, as tiles are aligned to it


class Tiled(Kernel):
    """Base of a kernel that multiplies the rows of its first argument by the weights of argument number `weights`. A
    block computes a tile of the result, of `tile_columns` (64 per four warps) and `tile_rows` (a multiple of 16 up to
    256), with `stages` tiles of both factors in shared memory. `columns`: rows of the weights."""

    weights = 1
    shares = 1  # blocks that have a tile together, and share its depth
    cluster = None  # of blocks, in x, y and z
    rows_first = False  # whether rows, and not weights, are wgmma's first factor

    @property
    def workers(self) -> int:  # threads that multiply: four warps for each 64 of the first factor
        return 2 * (self.tile_rows if self.rows_first else self.tile_columns)

    @property
    def threads(self) -> int:
        return self.workers + 32

    def check(self, whole: bool, result: int, others: int = 0) -> None:
        """Raise KernelError unless dtype and shapes fit (`whole`), and shared memory is large enough for `others` bytes
        beside the tiles, and that of the weights for `result`, the bytes of a tile's result."""
        super().__post_init__()
        of_weights, of_rows = (2 * DEPTH * self.stages * size for size in (self.tile_columns, self.tile_rows))
        needed = BARRIER_BYTES + of_weights + of_rows + others
        if not whole or result > of_weights or needed > SHARED_BYTES:
            raise KernelError(f"{self} does not come in whole tiles that fit into shared memory.")

    def grid(self, a, *others):
        return -(-self.columns // self.tile_columns), -(-a.shape[0] // self.tile_rows), self.shares

    def arranged(self, w):  # the weights' rows in the order in which a tile takes them
        return w

    def instructions(self, dtype):
        """The wgmma of a tile, and the layouts of weights and rows in shared memory."""
        helpers, by_rows = cutlass.utils.hopper_helpers, cutlass.utils.LayoutEnum.ROW_MAJOR
        sizes = (self.tile_rows, self.tile_columns) if self.rows_first else (self.tile_columns, self.tile_rows)
        major, tile = by_rows.sm90_mma_major_mode(), (*sizes, DEPTH)
        atoms, shape = (sizes[0] // 64, 1, 1), (64, sizes[1])
        mma = helpers.make_trivial_tiled_mma(dtype, dtype, major, major, Float32, atoms, shape)
        makers = helpers.make_smem_layout_a, helpers.make_smem_layout_b
        layouts = [make(by_rows, tile, dtype, self.stages) for make in makers]
        return mma, *(reversed(layouts) if self.rows_first else layouts)

    @cute.jit
    def __call__(self, *arguments):
        tensors, stream = arguments[:-1], arguments[-1]
        a, w = tensors[0], self.arranged(tensors[self.weights])
        mma, layout_w, layout_a = self.instructions(a.element_type)
        factors = *copies(w, layout_w, self.tile_columns), *copies(a, layout_a, self.tile_rows)
        others = tensors[1 : self.weights] + tensors[self.weights + 1 :]
        launched = self.kernel(*factors, *others, mma, layout_w, layout_a)
        sizes = {"grid": self.grid(*tensors), "block": [self.threads, 1, 1], "cluster": self.cluster}
        launched.launch(**sizes, stream=stream, use_pdl=True)

    @cute.jit
    def begin(self, dtype: cutlass.Constexpr, layout_w, layout_a):
        """A block's column and row tile and number in its cluster; a thread's number, and whether it multiplies; and
        shared memory: both factors' tiles, the place of the weights' (free after the product), and two barriers per
        stage: `full` when its tiles are there, `empty` when they have been used."""
        cute.arch.griddepcontrol_launch_dependents()
        column_tile, row_tile, share = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        works = cute.arch.make_warp_uniform(cute.arch.warp_idx()) < const_expr(self.workers // 32)
        memory = cutlass.memory.SmemAllocator()
        full, empty = (memory.allocate_array(Int64, self.stages) for _ in range(2))
        place = memory.allocate_array(dtype, const_expr(cute.cosize(layout_w)), byte_alignment=1024)
        tiles_w = cute.make_tensor(cute.recast_ptr(place, layout_w.inner, dtype), layout_w.outer)
        tiles_a = memory.allocate_tensor(dtype, layout_a.outer, 1024, layout_a.inner)
        if thread == 0:
            for stage in range_constexpr(self.stages):
                cute.arch.mbarrier_init(full + stage, 1)
                cute.arch.mbarrier_init(empty + stage, const_expr(self.workers // 32))
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        return column_tile, row_tile, share, thread, works, (tiles_w, tiles_a, place, full, empty)


def pairs_of_rows(w, half: int):
    """The rows of w in turns: eight of a first half, the eight that lie `half` rows behind them, and so on, for each
    pair of halves. Of 16 rows a thread of wgmma holds i and i + 8, so it holds both numbers of a pair."""
    rows, depth = w.shape
    shape, stride = (8, 2, half // 8, rows // (2 * half)), (depth, half * depth, 8 * depth, 2 * half * depth)
    return cute.make_tensor(w.iterator, cute.make_layout((shape, depth), stride=(stride, 1)))


def rows_in_turns(w, half: int):
    """The rows of w in turns, one of each half: a thread of wgmma holds neighbouring columns, so both of a pair."""
    _, depth = w.shape
    return cute.make_tensor(w.iterator, cute.make_layout(((2, half), depth), stride=((half * depth, depth), 1)))


def copies(tensor, layout, tile_size: int):
    """How tiles of a matrix come into shared memory by TMA, and the matrix as TMA sees it."""
    tma, one = cute.nvgpu.cpasync, cute.slice_(layout, (None, None, 0))
    return tma.make_tiled_tma_atom(tma.CopyBulkTensorTileG2SOp(), tensor, one, (tile_size, DEPTH), num_multicast=1)


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
def stripe(copy, matrix, tiles, number):
    """Places of tiles in shared memory by stage, and what comes there: tiles of a stripe of the matrix, by depth."""
    size = const_expr(cute.size(tiles, mode=[0]))
    tiled = cute.local_tile(matrix, (size, DEPTH), (number, None))
    target, source = (cute.group_modes(tensor, 0, 2) for tensor in (tiles, tiled))
    return cute.nvgpu.cpasync.tma_partition(copy, 0, cute.make_layout(1), target, source)


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
def write_lines(made, out, thread, column_tile, row_tile, workers: cutlass.Constexpr):
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
def quad(tensor, row, column, width: cutlass.Constexpr = QUAD):
    """Neighbouring columns of a row, four of them or `width`, which one instruction reads or writes."""
    pointer = tensor.iterator + row.to(Int64) * tensor.stride[0] + column
    return cute.make_tensor(pointer.align(width * tensor.element_type.width // 8), cute.make_layout(width))


@cute.jit
def rounded(instruction: cutlass.Constexpr, *values):
    """The result of one PTX instruction on float32, which the compiler does not change or join with another."""
    ptx = f"{instruction} {{$w0}}" + "".join(f", {{$r{i}}}" for i in range(len(values))) + ";"
    return cute.arch.inline_ptx(ptx, write_only_types=[Float32], read_only_args=[*values])


@cute.jit
def inverse_rms(squares, row, eps: cutlass.Constexpr):
    """1 / rms of a row of the residual stream, from its sums of squares [R, d / 32], neighbours first."""
    groups = const_expr(squares.shape[1])
    padded = const_expr(1 << (groups - 1).bit_length())
    parts = registers(Float32, padded)
    for first in range_constexpr(0, groups, QUAD):
        cute.autovec_copy(quad(squares, row, first), cute.make_tensor(parts.iterator + first, cute.make_layout(QUAD)))
    for level in range_constexpr(padded.bit_length() - 1):
        for i in range_constexpr(padded >> (level + 1)):
            parts[i] = parts[2 * i] + parts[2 * i + 1]
    return inverse_root(parts[0], groups * GROUP, eps)


@cute.jit
def inverse_rms_of_rows(scales, squares, eps: cutlass.Constexpr, thread, row_tile, all_rows, workers):
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


@dataclass(frozen=True)
class Product(Tiled):
    """The kernel of a product alone, out = a @ w.T. With many columns, such as a vocabulary, and few rows it is faster
    than the library's, since its weights do not wait for the kernel before it. columns, depth: of w."""

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
    def kernel(self, copy_w, w, copy_a, a, out, mma, layout_w, layout_a):
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
