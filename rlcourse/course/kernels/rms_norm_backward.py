"""The gradients of RMSNorm, float32: of x row by row, and of the weight, which is a sum over all rows.

A warp is a block and takes every `programs`-th row. Each of its threads owns some columns and adds up their part of the
weight's gradient in registers, so no two threads ever add to one number; the parts [programs, hidden] are added last.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlcourse.course.kernels.column_sum import column_sum
from rlcourse.kernels import KernelError
from rlcourse.kernels.arguments import Argument
from rlcourse.kernels.dsl import Float32, cute, range_constexpr
from rlcourse.kernels.toolchain import launch

VECTOR, LANES = 4, 32  # numbers in 16 bytes, threads of a row
MOST_PIECES = 16  # of 16 bytes: a thread holds four rows' worth of them, in 255 registers
PROGRAMS = 1056  # eight for each processor of an H200: a warp waits for its row, and others work meanwhile


@torch.enable_grad()
def rms_norm_backward_reference(x: Tensor, weight: Tensor, dy: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of x [rows, hidden] and weight [hidden], by autograd in float64; dy [rows, hidden] is the gradient of
    x / sqrt(mean(x^2) + eps) * weight."""
    x, weight = (t.double().requires_grad_() for t in (x, weight))
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    dx, dw = torch.autograd.grad(y, (x, weight), dy.double())
    return dx.float(), dw.float()


@dataclass(frozen=True)
class RMSNormBackward:
    """dx [rows, hidden], and partial [programs, hidden], whose sum over programs is the gradient of weight [hidden]."""

    hidden: int
    eps: float = 1e-6

    threads = LANES

    def __post_init__(self):
        if self.hidden % (VECTOR * LANES) or self.pieces > MOST_PIECES:
            raise KernelError(f"RMSNormBackward cannot cut rows of {self.hidden}: multiples of 128 up to 2048.")

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

    @cute.jit
    def __call__(self, x: cute.Tensor, weight: cute.Tensor, dy: cute.Tensor, dx: cute.Tensor, partial: cute.Tensor,
                 stream):  # fmt: skip
        launched = self.kernel(x, weight, dy, dx, partial)
        launched.launch(grid=self.grid(x, weight, dy, dx, partial), block=[LANES, 1, 1], stream=stream)

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


@cute.jit
def load(row: cute.Tensor, held: cute.Tensor, lane):
    """A thread's pieces of a row, 16 bytes each; neighbouring threads take neighbouring pieces."""
    pieces = cute.tiled_divide(row, (VECTOR,))
    for i in range_constexpr(held.shape[1]):
        cute.autovec_copy(pieces[None, i * LANES + lane], held[None, i])


@cute.jit
def store(held: cute.Tensor, row: cute.Tensor, lane):
    """The way back of `load`."""
    pieces = cute.tiled_divide(row, (VECTOR,))
    for i in range_constexpr(held.shape[1]):
        cute.autovec_copy(held[None, i], pieces[None, i * LANES + lane])


@torch.library.custom_op("rlcourse::rms_norm_backward", mutates_args=())
def rms_norm_backward(x: Tensor, weight: Tensor, dy: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of x [rows, hidden] and weight [hidden] of an RMSNorm, from that of its result, dy [rows, hidden]; all
    float32. As `rms_norm_backward_reference`. Raises KernelError."""
    dx = torch.empty_like(x)
    if not len(x):
        return dx, torch.zeros_like(weight)
    partial = x.new_empty(min(PROGRAMS, len(x)), x.shape[1])
    launch(RMSNormBackward(x.shape[1], eps), x, weight, dy, dx, partial)
    return dx, column_sum(partial)


@rms_norm_backward.register_fake
def _(x, weight, dy, eps):
    return torch.empty_like(x), torch.empty_like(weight)


EXAMPLES = (RMSNormBackward(896), RMSNormBackward(1024))  # Qwen2.5-0.5B, Qwen3-0.6B
