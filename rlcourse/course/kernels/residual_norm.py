"""RMSNorm and the addition to the residual stream before it, with gradients: what stands between two layers in
training.

`rms_norm.py` adds in place, which is right where nothing is learned: the backward pass of the norm needs the sum as it
was, and the next layer would have added to it. Here the sum is a result of its own. The backward
pass is `residual_norm_backward.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlcourse.course.kernels.residual_norm_backward import (
    LANES,
    check_shape,
    load,
    pieces_of,
    residual_norm_backward,
    store,
    zeros,
)
from rlcourse.kernels.arguments import Argument, type_name
from rlcourse.kernels.dsl import Float32, cute
from rlcourse.kernels.toolchain import launch


def residual_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """total = x + residual, rounded to its dtype, and y = total / sqrt(mean(total^2) + eps) * weight, rounded once, at
    the end; all [rows, hidden] but weight [hidden]."""
    total = (x.float() + residual.float()).to(x.dtype)
    wide = total.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return total, y.to(x.dtype)


@dataclass(frozen=True)
class ResidualNorm:
    """`residual_norm_reference`: a warp takes a row."""

    hidden: int
    dtype: str
    eps: float = 1e-6
    threads: int = 128

    def __post_init__(self):
        check_shape(self)

    def arguments(self) -> tuple:
        x, residual = (Argument(name, self.dtype, ("rows", self.hidden), free=1) for name in ("x", "residual"))
        total, y = (Argument(name, self.dtype, ("rows", self.hidden), free=1, output=True) for name in ("total", "y"))
        return x, residual, Argument("weight", self.dtype, (self.hidden,)), total, y

    def grid(self, x, *_):
        return -(-x.shape[0] // (self.threads // LANES)), 1, 1

    @cute.jit
    def __call__(self, x: cute.Tensor, residual: cute.Tensor, weight: cute.Tensor, total: cute.Tensor, y: cute.Tensor,
                 stream):  # fmt: skip
        launched = self.kernel(x, residual, weight, total, y)
        launched.launch(grid=self.grid(x), block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, residual: cute.Tensor, weight: cute.Tensor, total: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row, lane = block * (self.threads // LANES) + thread // LANES, thread % LANES
        if row < x.shape[0]:  # the same for all lanes of a warp
            held, other, scale = (zeros(pieces_of(self), x.element_type) for _ in range(3))
            load(x[row, None], held, lane)
            load(residual[row, None], other, lane)
            load(weight, scale, lane)
            held.store((held.load().to(Float32) + other.load().to(Float32)).to(x.element_type))
            store(held, total[row, None], lane)
            wide = held.load().to(Float32)
            squares = cute.arch.warp_reduction_sum((wide * wide).reduce(cute.ReductionOp.ADD, Float32(0.0), 0))
            inverse = cute.math.rsqrt(squares * (1 / self.hidden) + self.eps)
            held.store((scale.load().to(Float32) * inverse * wide).to(x.element_type))
            store(held, y[row, None], lane)


@torch.library.custom_op("rlcourse::residual_norm", mutates_args=())
def residual_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`residual_norm_reference` in one launch, with gradients; bfloat16 or float16, the strides of rows free. Raises
    KernelError."""
    total, y = x.new_empty(x.shape), x.new_empty(x.shape)
    if len(x):
        launch(ResidualNorm(x.shape[1], type_name(x), eps), x, residual, weight, total, y)
    return total, y


@residual_norm.register_fake
def _(x, residual, weight, eps):
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _keep(ctx, inputs, output):
    _, _, weight, ctx.eps = inputs
    ctx.save_for_backward(output[0], weight)


def _gradients(ctx, dtotal, dy):
    total, weight = ctx.saved_tensors
    dx, dweight = residual_norm_backward(total, weight, dtotal.contiguous(), dy.contiguous(), ctx.eps)
    return dx, dx, dweight.to(weight.dtype), None


residual_norm.register_autograd(_gradients, setup_context=_keep)

EXAMPLES = tuple(ResidualNorm(hidden, "bfloat16") for hidden in (1536, 2048))  # Qwen2.5-1.5B and 3B
