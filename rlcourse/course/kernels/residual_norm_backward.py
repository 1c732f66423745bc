"""The gradients of RMSNorm and of the addition before it, in 16 bits: of what was added, and of the norm's weight.

The gradient of the sum has two parts, one through the norm and one along the residual stream, and is that of both of
its terms. As in `rms_norm_backward.py`, a warp is a block, takes every `programs`-th row, and adds up its part of the
weight's gradient in registers, in float32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlcourse.kernels import KernelError
from rlcourse.kernels.arguments import Argument, need_dtype, type_name
from rlcourse.kernels.dsl import Float32, const_expr, cute, range_constexpr
from rlcourse.kernels.toolchain import launch

VECTOR, LANES = 8, 32  # 16-bit numbers in 16 bytes, threads of a row
# Of 16 bytes: a thread holds five rows' worth of them, one in float32, in 255 registers. On Ampere the compiler may put
# two registers of a row of 1024 or 1536 into memory all the same; with 8 pieces it would be forty, everywhere.
MOST_PIECES = 6
PROGRAMS = 528  # four for each processor of an H200


@torch.enable_grad()
def residual_norm_backward_reference(
    total: Tensor, weight: Tensor, dtotal: Tensor, dy: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The gradient of x, which is that of residual, in total's dtype, and that of weight [hidden], float32, from those
    of both results: by autograd in float64."""
    x, w = (t.double().requires_grad_() for t in (total, weight))
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w
    dx, dw = torch.autograd.grad(y, (x, w), dy.double())
    return (dx + dtotal.double()).to(total.dtype), dw.float()


@dataclass(frozen=True)
class ResidualNormBackward:
    """dx [rows, hidden], and partial [programs, hidden], whose sum over programs is the gradient of weight [hidden]."""

    hidden: int
    dtype: str
    eps: float = 1e-6

    threads = LANES

    def __post_init__(self):
        check_shape(self)

    def arguments(self) -> tuple:
        total, dtotal, dy = (
            Argument(name, self.dtype, ("rows", self.hidden), free=1) for name in ("total", "dtotal", "dy")
        )
        dx = Argument("dx", self.dtype, ("rows", self.hidden), free=1, output=True)
        partial = Argument("partial", "float32", ("programs", self.hidden), output=True)
        return total, Argument("weight", self.dtype, (self.hidden,)), dtotal, dy, dx, partial

    def grid(self, total, weight, dtotal, dy, dx, partial):
        return partial.shape[0], 1, 1

    @cute.jit
    def __call__(self, total: cute.Tensor, weight: cute.Tensor, dtotal: cute.Tensor, dy: cute.Tensor, dx: cute.Tensor,
                 partial: cute.Tensor, stream):  # fmt: skip
        launched = self.kernel(total, weight, dtotal, dy, dx, partial)
        launched.launch(grid=(partial.shape[0], 1, 1), block=[LANES, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, total: cute.Tensor, weight: cute.Tensor, dtotal: cute.Tensor, dy: cute.Tensor, dx: cute.Tensor,
               partial: cute.Tensor):  # fmt: skip
        lane, _, _ = cute.arch.thread_idx()
        program, _, _ = cute.arch.block_idx()
        held, along, grad, scale = (zeros(pieces_of(self), total.element_type) for _ in range(4))
        sums = zeros(pieces_of(self), Float32)
        load(weight, scale, lane)
        for row in range(program, total.shape[0], partial.shape[0]):
            load(total[row, None], held, lane)
            load(dy[row, None], grad, lane)
            load(dtotal[row, None], along, lane)
            squares, product = Float32(0.0), Float32(0.0)
            for i in range_constexpr(held.shape[1]):
                value, slope = held[None, i].load().to(Float32), grad[None, i].load().to(Float32)
                squares += (value * value).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
                slope *= scale[None, i].load().to(Float32)
                product += (slope * value).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            squares = cute.arch.warp_reduction_sum(squares)
            product = cute.arch.warp_reduction_sum(product)
            inverse = cute.math.rsqrt(squares * (1 / self.hidden) + self.eps)
            pull = product * inverse * inverse * inverse * (1 / self.hidden)
            for i in range_constexpr(held.shape[1]):
                value, slope = held[None, i].load().to(Float32), grad[None, i].load().to(Float32)
                sums[None, i].store(sums[None, i].load() + slope * value * inverse)
                through = slope * scale[None, i].load().to(Float32) * inverse - value * pull
                grad[None, i].store((through + along[None, i].load().to(Float32)).to(total.element_type))
            store(grad, dx[row, None], lane)
        store(sums, partial[program, None], lane)


def check_shape(kernel) -> None:
    """Raises KernelError for a dtype or a width that these kernels cannot do."""
    need_dtype(kernel)
    if kernel.hidden % VECTOR or pieces_of(kernel) > MOST_PIECES:
        name = type(kernel).__name__
        most = VECTOR * LANES * MOST_PIECES
        raise KernelError(f"{name} cannot cut rows of {kernel.hidden}: it takes multiples of {VECTOR} up to {most}.")


def pieces_of(kernel) -> int:
    """16-byte pieces of a row that a lane looks after; of the last ones, some lanes have none."""
    return -(-kernel.hidden // (VECTOR * LANES))


def zeros(pieces: int, dtype) -> cute.Tensor:
    """Pieces in registers [8, pieces]. A lane that has no last piece keeps zeros there, which change no sum."""
    room = cute.make_rmem_tensor((VECTOR, pieces), dtype)
    room.fill(0.0)
    return room


@cute.jit
def load(row: cute.Tensor, held: cute.Tensor, lane):
    """A lane's pieces of a row, 16 bytes each; neighbouring lanes take neighbouring pieces."""
    pieces, count = cute.tiled_divide(row, (VECTOR,)), const_expr(row.shape[0] // VECTOR)
    for i in range_constexpr(held.shape[1]):
        if i * LANES + lane < count:
            cute.autovec_copy(pieces[None, i * LANES + lane], held[None, i])


@cute.jit
def store(held: cute.Tensor, row: cute.Tensor, lane):
    """The way back of `load`."""
    pieces, count = cute.tiled_divide(row, (VECTOR,)), const_expr(row.shape[0] // VECTOR)
    for i in range_constexpr(held.shape[1]):
        if i * LANES + lane < count:
            cute.autovec_copy(held[None, i], pieces[None, i * LANES + lane])


@torch.library.custom_op("rlcourse::residual_norm_backward", mutates_args=())
def residual_norm_backward(
    total: Tensor, weight: Tensor, dtotal: Tensor, dy: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`residual_norm_backward_reference` in one launch and a sum. Raises KernelError."""
    dx = total.new_empty(total.shape)
    if not len(total):
        return dx, torch.zeros_like(weight, dtype=torch.float32)
    partial = total.new_empty(min(PROGRAMS, len(total)), total.shape[1], dtype=torch.float32)
    launch(ResidualNormBackward(total.shape[1], type_name(total), eps), total, weight, dtotal, dy, dx, partial)
    return dx, partial.sum(0)


@residual_norm_backward.register_fake
def _(total, weight, dtotal, dy, eps):
    return total.new_empty(total.shape), torch.empty_like(weight, dtype=torch.float32)


EXAMPLES = (ResidualNormBackward(896, "bfloat16"),)  # Qwen2.5-0.5B
