"""One step of AdamW over a flat buffer, so one launch updates the whole model: float32 weights, and the 16-bit copy
that the model computes with. It is memory-bound: 28 bytes per parameter with 16-bit gradients."""

import math
from dataclasses import dataclass

from torch import Tensor

from rlcourse.kernels import KernelError
from rlcourse.kernels.arguments import Argument, Scalar, type_name
from rlcourse.kernels.dsl import Float32, cute, range_constexpr
from rlcourse.kernels.kernel import Kernel, operation
from rlcourse.kernels.toolchain import launch

VECTOR = 4  # float32 numbers in 16 bytes; of 16-bit ones, neighbouring threads read 8 bytes each


def adamw_reference(
    grad: Tensor, master: Tensor, mean: Tensor, square: Tensor, weight: Tensor, step: int, lr: float,
    beta1: float, beta2: float, eps: float, weight_decay: float,
) -> None:  # fmt: skip
    """One step in place, in float32 (Loshchilov and Hutter 2019, arXiv:1711.05101): the moments take in grad [n];
    master [n] decays by lr * weight_decay and moves by lr against mean / (sqrt(square) + eps), both corrected for their
    start at zero; weight [n] is master in its dtype. step counts from 1."""
    g = grad.float()
    mean.copy_(beta1 * mean + (1 - beta1) * g)
    square.copy_(beta2 * square + (1 - beta2) * g * g)
    move = mean / (1 - beta1**step) / ((square / (1 - beta2**step)).sqrt() + eps)
    master.copy_(master * (1 - lr * weight_decay) - lr * move)
    weight.copy_(master)


@dataclass(frozen=True)
class AdamW(Kernel):
    """`adamw_reference`. rate: lr / (1 - beta1^step); correction: (1 - beta2^step)^(-1/2); keep: 1 - lr * decay."""

    grad_dtype: str
    dtype: str
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    threads: int = 256

    def arguments(self) -> tuple:
        master, mean, square = (Argument(name, "float32", ("n",)) for name in ("master", "mean", "square"))
        weight = Argument("weight", self.dtype, ("n",), output=True)
        scalars = (Scalar(name, "float32") for name in ("rate", "correction", "keep"))
        return Argument("grad", self.grad_dtype, ("n",)), master, mean, square, weight, *scalars

    def grid(self, grad, *_):
        return -(-grad.shape[0] // (VECTOR * self.threads)), 1, 1

    @cute.kernel
    def kernel(self, grad, master, mean, square, weight, rate: Float32, correction: Float32, keep: Float32):
        (thread, _, _), (block, _, _) = cute.arch.thread_idx(), cute.arch.block_idx()
        piece = block * self.threads + thread
        g, rounded = (cute.make_rmem_tensor(VECTOR, t.element_type) for t in (grad, weight))
        w, m, v = (cute.make_rmem_tensor(VECTOR, Float32) for _ in range(3))
        if (piece + 1) * VECTOR <= grad.shape[0]:
            for whole, held in ((grad, g), (master, w), (mean, m), (square, v)):
                cute.autovec_copy(cute.tiled_divide(whole, (VECTOR,))[None, piece], held)
            for i in range_constexpr(VECTOR):
                self.move(g, w, m, v, rounded, i, rate, correction, keep)
            for whole, held in ((master, w), (mean, m), (square, v), (weight, rounded)):
                cute.autovec_copy(held, cute.tiled_divide(whole, (VECTOR,))[None, piece])
        else:  # the last thread that has anything to do: up to 3 parameters
            for i in range_constexpr(VECTOR):
                at = piece * VECTOR + i
                if at < grad.shape[0]:
                    g[i], w[i], m[i], v[i] = grad[at], master[at], mean[at], square[at]
                    self.move(g, w, m, v, rounded, i, rate, correction, keep)
                    master[at], mean[at], square[at], weight[at] = w[i], m[i], v[i], rounded[i]

    @cute.jit
    def move(self, grad, master, mean, square, weight, i, rate: Float32, correction: Float32, keep: Float32):
        g = grad[i].to(Float32)
        mean[i] = mean[i] * self.beta1 + g * (1 - self.beta1)
        square[i] = square[i] * self.beta2 + g * g * (1 - self.beta2)
        root = cute.math.sqrt(square[i]) * correction + self.eps
        master[i] = master[i] * keep - rate * mean[i] / root
        weight[i] = master[i].to(weight.element_type)


@operation(mutates=("master", "mean", "square", "weight"))
def adamw(
    grad: Tensor, master: Tensor, mean: Tensor, square: Tensor, weight: Tensor, step: int, lr: float,
    beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01,
) -> None:  # fmt: skip
    """`adamw_reference` in one launch: grad [n] bfloat16, float16 or float32; master, mean, square float32 [n]; weight
    bfloat16 or float16 [n]. step and lr are part of the launch: a CUDA graph would keep them. Raises KernelError."""
    if step < 1:
        raise KernelError(f"AdamW counts steps from 1 and got {step}.")
    kernel = AdamW(type_name(grad), type_name(weight), beta1, beta2, eps)
    rate, correction = lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step)
    launch(kernel, grad, master, mean, square, weight, rate, correction, 1 - lr * weight_decay)
