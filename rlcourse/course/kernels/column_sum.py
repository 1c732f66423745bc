"""Sums over the rows of a tall, narrow matrix: how the blocks' parts of a weight's gradient become one.

There is little to read, so latency counts: the warps of a block share the rows, and a thread loads several of its
numbers before it adds the first. The order of the sum is always the same.
"""

from dataclasses import dataclass

from torch import Tensor

from rlcourse.kernels.arguments import Argument
from rlcourse.kernels.dsl import Float32, cute, cutlass, range_constexpr
from rlcourse.kernels.kernel import Kernel
from rlcourse.kernels.toolchain import launch

LANES, WARPS = 32, 32
AHEAD = 12  # numbers of a thread that are on their way


@dataclass(frozen=True)
class ColumnSum(Kernel):
    """total [columns] = parts [rows, columns].sum(0), float32. A block takes 32 columns, a lane one of them."""

    columns: int

    threads = LANES * WARPS

    def arguments(self) -> tuple:
        total = Argument("total", "float32", (self.columns,), output=True)
        return Argument("parts", "float32", ("rows", self.columns)), total

    def grid(self, parts, total):
        return -(-self.columns // LANES), 1, 1

    @cute.kernel
    def kernel(self, parts: cute.Tensor, total: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp, lane = thread // LANES, thread % LANES
        column, added = block * LANES + lane, Float32(0.0)
        held = cute.make_rmem_tensor(AHEAD, Float32)
        by_warp = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout((LANES, WARPS)), 4)
        if column < self.columns:
            for base in range(warp, parts.shape[0], WARPS * AHEAD):
                held.fill(0.0)
                for i in range_constexpr(AHEAD):
                    if base + i * WARPS < parts.shape[0]:
                        held[i] = parts[base + i * WARPS, column]
                added += held.load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        by_warp[lane, warp] = added
        cute.arch.sync_threads()
        if thread < LANES and column < self.columns:
            added = Float32(0.0)
            for other in range_constexpr(WARPS):
                added += by_warp[lane, other]
            total[column] = added


def column_sum(parts: Tensor) -> Tensor:
    """parts [rows, columns].sum(0), float32, in one launch. Raises KernelError."""
    total = parts.new_empty(parts.shape[1])
    launch(ColumnSum(parts.shape[1]), parts, total)
    return total
