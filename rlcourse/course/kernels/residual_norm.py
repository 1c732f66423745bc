"""RMSNorm and the residual addition before it, in training: the gradients of the sum and the weight. The sum's gradient
has two parts, one through the norm and one along the residual stream. Each warp takes every so many rows and sums its
part of the weight's gradient in registers, as in `rms_norm_backward.py`. For speed, while a warp works on a row,
`cp.async` copies the next one into shared memory (the compiler would put off loads into registers), and the warps of a
block add up their parts there, which leaves few for `column_sum`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlcourse.course.kernels.common import LANES, VECTOR, check_width, load, store
from rlcourse.course.kernels.rms_norm import RMSNorm, rms_norm_reference
from rlcourse.kernels.arguments import Argument, type_name
from rlcourse.kernels.dsl import Float32, Int32, const_expr, cute, cutlass, range_constexpr
from rlcourse.kernels.kernel import Kernel, operation, registers
from rlcourse.kernels.toolchain import launch

MOST_PIECES = 8  # of 16 bytes: a thread keeps two rows' worth of them, one in float32, and has 255 registers
PROGRAMS = 264  # two for each processor of an H200
SUM_WARPS, AHEAD = 32, 12  # of a column sum: warps of a block, and numbers of a thread that are on their way


def residual_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """total = x + residual, rounded to its dtype, and its RMSNorm; all [rows, hidden] but weight [hidden]."""
    total = (x.float() + residual.float()).to(x.dtype)
    return total, rms_norm_reference(total, weight, eps)


@dataclass(frozen=True)
class ResidualNormBackward(Kernel):
    """dx [rows, hidden], and partial [programs, hidden], whose sum over programs is the gradient of weight [hidden]."""

    hidden: int
    dtype: str
    eps: float = 1e-6

    def __post_init__(self):
        super().__post_init__()
        check_width(self, self.hidden, most=VECTOR * LANES * MOST_PIECES)

    @property
    def pieces(self) -> int:
        """16-byte pieces of a row that a lane looks after; of the last ones, some lanes have none."""
        return -(-self.hidden // (VECTOR * LANES))

    @property
    def warps(self) -> int:
        """Of a block: two rows of three tensors for each fit into the 99 KB of shared memory that every GPU has."""
        return 8 if self.pieces <= 4 else 4

    @property
    def threads(self) -> int:
        return self.warps * LANES

    def arguments(self) -> tuple:
        rows = ("rows", self.hidden)
        total, dtotal, dy = (Argument(name, self.dtype, rows, free=1) for name in ("total", "dtotal", "dy"))
        dx = Argument("dx", self.dtype, rows, free=1, output=True)
        partial = Argument("partial", "float32", ("programs", self.hidden), output=True)
        return total, Argument("weight", self.dtype, (self.hidden,)), dtotal, dy, dx, partial

    def grid(self, total, weight, dtotal, dy, dx, partial):
        return partial.shape[0], 1, 1

    @cute.kernel
    def kernel(self, total, weight, dtotal, dy, dx, partial):
        (thread, _, _), (program, _, _) = cute.arch.thread_idx(), cute.arch.block_idx()
        warp, lane, rows = thread // LANES, thread % LANES, total.shape[0]
        room = cute.make_layout((self.hidden, 3, 2, self.warps))
        slots = cutlass.memory.SmemAllocator().allocate_tensor(total.element_type, room, 16)
        # A lane that has no last piece keeps zeros there, which change no sum.
        held, along, grad, scale = (registers(total.element_type, VECTOR, self.pieces) for _ in range(4))
        sums = registers(Float32, VECTOR, self.pieces)
        first, step, turn = program * self.warps + warp, partial.shape[0] * self.warps, Int32(0)
        given = total, dy, dtotal  # of each a row, in each of a warp's two slots
        fetch(given, first, slots[None, None, turn, warp], lane)
        load(weight, scale, lane, full=False)
        for row in range(first, rows, step):
            fetch(given, row + step, slots[None, None, 1 - turn, warp], lane)
            cute.arch.cp_async_wait_group(1)  # for all but the latest one
            slot = slots[None, None, turn, warp]
            load(slot[None, 0], held, lane, full=False)
            load(slot[None, 1], grad, lane, full=False)
            squares, product = sums_over_row(held, grad, scale)
            inverse = cute.math.rsqrt(squares * (1 / self.hidden) + self.eps)
            pull = product * inverse * inverse * inverse * (1 / self.hidden)
            cute.arch.sync_warp()  # else the compiler keeps the row in float32, in more registers than there are
            load(slot[None, 0], held, lane, full=False)
            load(slot[None, 1], grad, lane, full=False)
            load(slot[None, 2], along, lane, full=False)
            for i in range_constexpr(held.shape[1]):
                value, slope = held[None, i].load().to(Float32), grad[None, i].load().to(Float32)
                sums[None, i].store(sums[None, i].load() + slope * value * inverse)
                through = slope * scale[None, i].load().to(Float32) * inverse - value * pull
                grad[None, i].store((through + along[None, i].load().to(Float32)).to(total.element_type))
            store(grad, dx[row, None], lane, full=False)
            turn = 1 - turn
        # Of its two slots, a warp needs a third for its sums, once none of its lanes reads there any more.
        cute.arch.sync_warp()
        layout = cute.make_layout((self.hidden, self.warps), stride=(1, self.hidden * 3))
        parts = cute.make_tensor(cute.recast_ptr(slots.iterator, dtype=Float32), layout)
        store(sums, parts[None, warp], lane, full=False)
        cute.arch.sync_threads()
        add_parts(parts, partial[program, None], thread, self.threads)


@cute.jit
def fetch(tensors, row, slot, lane):
    """Asks for a lane's pieces of a row of each tensor, if there is such a row, into slot [hidden, tensors] of shared
    memory. A lane asks for what it will read itself, so it is enough that it waits itself, without a barrier."""
    copies = cute.nvgpu.cpasync
    past_l1 = copies.CopyG2SOp(copies.LoadCacheMode.GLOBAL)  # nobody reads these bytes again
    copy = cute.make_copy_atom(past_l1, slot.element_type, num_bits_per_copy=128)
    count = const_expr(slot.shape[0] // VECTOR)
    if row < tensors[0].shape[0]:
        for t in range_constexpr(len(tensors)):
            source = cute.tiled_divide(tensors[t][row, None], (VECTOR,))
            target = cute.tiled_divide(slot[None, t], (VECTOR,))
            for i in range_constexpr(-(-count // LANES)):
                if i * LANES + lane < count:
                    cute.copy_atom_call(copy, source[None, i * LANES + lane], target[None, i * LANES + lane])
    cute.arch.cp_async_commit_group()


@cute.jit
def sums_over_row(held, grad, scale):
    """Of x * x and of x * weight * dy, for all lanes of a warp."""
    squares, product = Float32(0.0), Float32(0.0)
    for i in range_constexpr(held.shape[1]):
        value, slope = held[None, i].load().to(Float32), grad[None, i].load().to(Float32)
        squares += (value * value).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        slope *= scale[None, i].load().to(Float32)
        product += (slope * value).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
    return cute.arch.warp_reduction_sum(squares), cute.arch.warp_reduction_sum(product)


@cute.jit
def add_parts(parts, total, thread, threads: cutlass.Constexpr):
    """total [hidden] = the sum of parts [hidden, warps], always in the same order."""
    added, part = (cute.make_rmem_tensor(4, Float32) for _ in range(2))
    for piece in range(thread, total.shape[0] // 4, threads):
        added.fill(0.0)
        for warp in range_constexpr(parts.shape[1]):
            cute.autovec_copy(cute.tiled_divide(parts[None, warp], (4,))[None, piece], part)
            added.store(added.load() + part.load())
        cute.autovec_copy(added, cute.tiled_divide(total, (4,))[None, piece])


@dataclass(frozen=True)
class ColumnSum(Kernel):
    """total [columns] = parts [rows, columns].sum(0), float32: how the blocks' parts of a weight's gradient become one,
    in one order. A block takes 32 columns, a lane one of them; its warps share the rows."""

    columns: int

    threads = LANES * SUM_WARPS

    def arguments(self) -> tuple:
        total = Argument("total", "float32", (self.columns,), output=True)
        return Argument("parts", "float32", ("rows", self.columns)), total

    def grid(self, parts, total):
        return -(-self.columns // LANES), 1, 1

    @cute.kernel
    def kernel(self, parts, total):
        (thread, _, _), (block, _, _) = cute.arch.thread_idx(), cute.arch.block_idx()
        warp, lane = thread // LANES, thread % LANES
        column, added = block * LANES + lane, Float32(0.0)
        held = cute.make_rmem_tensor(AHEAD, Float32)
        by_warp = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout((LANES, SUM_WARPS)), 4)
        if column < self.columns:
            for base in range(warp, parts.shape[0], SUM_WARPS * AHEAD):
                held.fill(0.0)
                for i in range_constexpr(AHEAD):
                    if base + i * SUM_WARPS < parts.shape[0]:
                        held[i] = parts[base + i * SUM_WARPS, column]
                added += held.load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        by_warp[lane, warp] = added
        cute.arch.sync_threads()
        if thread < LANES and column < self.columns:
            added = Float32(0.0)
            for other in range_constexpr(SUM_WARPS):
                added += by_warp[lane, other]
            total[column] = added


def column_sum(parts: Tensor) -> Tensor:
    """parts [rows, columns].sum(0), float32, in one launch. Raises KernelError."""
    total = parts.new_empty(parts.shape[1])
    launch(ColumnSum(parts.shape[1]), parts, total)
    return total


@operation()
def residual_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`residual_norm_reference` in one launch, with gradients; bfloat16, float16; rows' strides free. Raises
    KernelError."""
    total, y = x.new_empty(x.shape), x.new_empty(x.shape)
    launch(RMSNorm(x.shape[1], type_name(x), eps, add=True, apart=True), x, residual, weight, y, total)
    return total, y


@operation()
def residual_norm_backward(
    total: Tensor, weight: Tensor, dtotal: Tensor, dy: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The gradient of x, which is that of residual, in total's dtype, and that of weight, float32, from those of both
    results: one launch, and one for the sum over rows. Raises KernelError."""
    dx = total.new_empty(total.shape)
    partial = total.new_empty(min(PROGRAMS, total.shape[0]), total.shape[1], dtype=torch.float32)
    launch(ResidualNormBackward(total.shape[1], type_name(total), eps), total, weight, dtotal, dy, dx, partial)
    return dx, column_sum(partial)


def _keep(ctx, inputs, output):
    _, _, weight, ctx.eps = inputs
    ctx.save_for_backward(output[0], weight)


def _gradients(ctx, dtotal, dy):
    total, weight = ctx.saved_tensors
    dx, dweight = residual_norm_backward(total, weight, dtotal.contiguous(), dy.contiguous(), ctx.eps)
    return dx, dx, dweight.to(weight.dtype), None


residual_norm.register_autograd(_gradients, setup_context=_keep)
