"""The gradients of RMSNorm, float32: of x row by row, and of the weight, which is a sum over all rows.

A warp is a block and takes every `programs`-th row. Each of its threads owns some columns and adds up their part of the
weight's gradient in registers, so no two threads ever add to one number; the parts [programs, hidden] are added last.
"""

from dataclasses import dataclass

from rlcourse.course.kernels.common import LANES, check_width, load, store
from rlcourse.kernels.arguments import Argument
from rlcourse.kernels.dsl import Float32, cute, range_constexpr
from rlcourse.kernels.kernel import Kernel

VECTOR = 4  # float32 numbers in 16 bytes
MOST_PIECES = 16  # of 16 bytes: a thread holds four rows' worth of them, in 255 registers


@dataclass(frozen=True)
class RMSNormBackward(Kernel):
    """dx [rows, hidden], and partial [programs, hidden], whose sum over programs is the gradient of weight [hidden]."""

    hidden: int
    eps: float = 1e-6

    threads = LANES

    def __post_init__(self):
        check_width(self, self.hidden, VECTOR * LANES, MOST_PIECES * VECTOR * LANES)

    @property
    def pieces(self) -> int:
        return self.hidden // (VECTOR * LANES)

    def arguments(self) -> tuple:
        x, dy = (Argument(name, "float32", ("rows", self.hidden)) for name in ("x", "dy"))
        dx = Argument("dx", "float32", ("rows", self.hidden), output=True)
        partial = Argument("partial", "float32", ("programs", self.hidden), output=True)
        return x, Argument("weight", "float32", (self.hidden,)), dy, dx, partial

    def grid(self, x, weight, dy, dx, partial):
        return partial.shape[0], 1, 1

    @cute.kernel
    def kernel(self, x: cute.Tensor, weight: cute.Tensor, dy: cute.Tensor, dx: cute.Tensor, partial: cute.Tensor):
        lane, _, _ = cute.arch.thread_idx()
        program, _, _ = cute.arch.block_idx()
        held, grad, scale, sums = (cute.make_rmem_tensor((VECTOR, self.pieces), Float32) for _ in range(4))
        load(weight, scale, lane)
        sums.fill(0.0)
        for row in range(program, x.shape[0], partial.shape[0]):
            load(x[row, None], held, lane)
            load(dy[row, None], grad, lane)
            squares, along = Float32(0.0), Float32(0.0)
            for i in range_constexpr(self.pieces):
                value = held[None, i].load()
                squares += (value * value).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
                slope = grad[None, i].load() * scale[None, i].load()
                along += (slope * value).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            squares = cute.arch.warp_reduction_sum(squares)
            along = cute.arch.warp_reduction_sum(along)
            inverse = cute.math.rsqrt(squares * (1 / self.hidden) + self.eps)
            pull = along * inverse * inverse * inverse * (1 / self.hidden)
            for i in range_constexpr(self.pieces):
                value, slope = held[None, i].load(), grad[None, i].load()
                sums[None, i].store(sums[None, i].load() + slope * value * inverse)
                grad[None, i].store(slope * scale[None, i].load() * inverse - value * pull)
            store(grad, dx[row, None], lane)
        store(sums, partial[program, None], lane)
