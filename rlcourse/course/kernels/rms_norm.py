"""RMSNorm, alone or with the residual addition before it, in place (inference) or not (training): one read and one
write of each row. Up to 32 threads keep a row in registers, and all of a thread's loads are issued before one is used.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlcourse.course.kernels.common import LANES, VECTOR, load, store
from rlcourse.kernels import KernelError
from rlcourse.kernels.arguments import Argument, type_name
from rlcourse.kernels.dsl import Float32, const_expr, cute, range_constexpr
from rlcourse.kernels.kernel import Kernel, operation
from rlcourse.kernels.toolchain import can_begin_early, launch

MOST_PIECES = 20  # of 16 bytes that a thread can hold and still have registers to work with
HELD_EARLY = 10  # pieces of the weights for which there are registers while the row comes


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, in float32, rounded once (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x, rounded to its dtype, and the RMSNorm of that."""
    residual.copy_(residual.float() + x.float())
    return rms_norm_reference(residual, weight, eps)


@dataclass(frozen=True)
class RMSNorm(Kernel):
    """y = RMSNorm(x) * weight for x [rows, hidden]. With `add`, residual += x comes first and its norm is taken; with
    `apart` as well, the sum goes into `total` and residual stays. early: see `toolchain.can_begin_early`."""

    hidden: int
    dtype: str
    eps: float = 1e-6
    add: bool = False
    threads: int = 64
    early: bool = False
    apart: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.hidden % VECTOR or self.pieces > MOST_PIECES:
            raise KernelError(f"RMSNorm cannot cut rows of {self.hidden}: it takes multiples of 256 up to 5120.")

    @property
    def lanes(self) -> int:
        """Threads of a row: the largest power of two that divides its 16-byte pieces, at most a warp."""
        return min(LANES, (self.hidden // VECTOR) & -(self.hidden // VECTOR))

    @property
    def pieces(self) -> int:
        return self.hidden // VECTOR // self.lanes

    def arguments(self) -> tuple:
        x, residual = (Argument(name, self.dtype, ("rows", self.hidden), free=1) for name in ("x", "residual"))
        weight = Argument("weight", self.dtype, (self.hidden,))
        y, total = (Argument(name, self.dtype, ("rows", self.hidden), output=True) for name in ("y", "total"))
        return x, residual if self.add else None, weight, y, *((total,) if self.apart else ())

    def grid(self, x, *_):
        return -(-x.shape[0] // (self.threads // self.lanes)), 1, 1

    @cute.kernel
    def kernel(self, x, residual, weight, y, total=None):
        if const_expr(self.early):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        (thread, _, _), (block, _, _) = cute.arch.thread_idx(), cute.arch.block_idx()
        row, lane = block * (self.threads // self.lanes) + thread // self.lanes, thread % self.lanes
        held, scale = (cute.make_rmem_tensor((VECTOR, self.pieces), x.element_type) for _ in range(2))
        if const_expr(self.pieces <= HELD_EARLY):
            load(weight, scale, lane, self.lanes)
        squares = Float32(0.0)
        if row < x.shape[0]:
            load(x[row, None], held, lane, self.lanes)
            if const_expr(self.add):
                before = cute.make_rmem_tensor((VECTOR, self.pieces), x.element_type)
                load(residual[row, None], before, lane, self.lanes)
                added = held.load().to(Float32) + before.load().to(Float32)
                held.store(added.to(x.element_type))  # the norm is of what the next layer will read
                store(held, (total if const_expr(self.apart) else residual)[row, None], lane, self.lanes)
            for i in range_constexpr(self.pieces):
                piece = held[None, i].load().to(Float32)
                squares += (piece * piece).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        # Outside of the condition: a shuffle waits for all 32 threads of the warp.
        squares = cute.arch.warp_reduction_sum(squares, threads_in_group=self.lanes)
        inverse = cute.math.rsqrt(squares * (1 / self.hidden) + self.eps, fastmath=True)
        if row < x.shape[0]:
            if const_expr(self.pieces > HELD_EARLY):
                load(weight, scale, lane, self.lanes)
            for i in range_constexpr(self.pieces):
                piece = scale[None, i].load().to(Float32) * inverse * held[None, i].load().to(Float32)
                held[None, i].store(piece.to(x.element_type))
            store(held, y[row, None], lane, self.lanes)


@operation()
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm_reference` of x [rows, hidden], whose stride of rows is free; bfloat16, float16. Raises KernelError."""
    y = x.new_empty(x.shape)
    launch(RMSNorm(x.shape[-1], type_name(x), eps, early=can_begin_early(x.device)), x, None, weight, y)
    return y


@operation(mutates=("residual",))
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`add_rms_norm_reference`: what stands between two layers of Qwen. Raises KernelError."""
    y = x.new_empty(x.shape)
    kernel = RMSNorm(x.shape[-1], type_name(x), eps, add=True, early=can_begin_early(x.device))
    launch(kernel, x, residual, weight, y)
    return y
