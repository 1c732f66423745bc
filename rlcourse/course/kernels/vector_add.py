"""The first kernel: c = a + b, and all that a kernel needs around it.

A thread adds 4 floats, since 16 bytes are the most that it can load at once. Neighbouring threads take neighbouring
pieces, so that a warp loads 512 bytes in a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlcourse.kernels.dsl import Float32, cute, range_constexpr
from rlcourse.kernels.toolchain import Argument, launch

VECTOR = 4  # floats in 16 bytes


def vector_add_reference(a: Tensor, b: Tensor) -> Tensor:
    """a + b."""
    return a + b


@dataclass(frozen=True)
class VectorAdd:
    """c = a + b; float32 [n], any n."""

    threads: int = 256

    def arguments(self) -> tuple:
        a, b = (Argument(name, "float32", ("n",)) for name in "ab")
        return a, b, Argument("c", "float32", ("n",), output=True)

    def grid(self, a, b, c):
        return -(-a.shape[0] // (VECTOR * self.threads)), 1, 1

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream):
        self.kernel(a, b, c).launch(grid=self.grid(a, b, c), block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        first = (block * self.threads + thread) * VECTOR
        if first + VECTOR <= a.shape[0]:
            x, y = cute.make_rmem_tensor(VECTOR, Float32), cute.make_rmem_tensor(VECTOR, Float32)
            piece = first // VECTOR
            cute.autovec_copy(cute.tiled_divide(a, (VECTOR,))[None, piece], x)
            cute.autovec_copy(cute.tiled_divide(b, (VECTOR,))[None, piece], y)
            x.store(x.load() + y.load())
            cute.autovec_copy(x, cute.tiled_divide(c, (VECTOR,))[None, piece])
        else:  # the last thread that has anything to do: up to 3 floats
            for i in range_constexpr(VECTOR):
                if first + i < a.shape[0]:
                    c[first + i] = a[first + i] + b[first + i]


@torch.library.custom_op("rlcourse::vector_add", mutates_args=())
def vector_add(a: Tensor, b: Tensor) -> Tensor:
    """a + b; float32 [n], contiguous, on a GPU. Raises KernelError."""
    c = torch.empty_like(a)
    if len(a):
        launch(VectorAdd(), a, b, c)
    return c


@vector_add.register_fake
def _(a, b):
    return torch.empty_like(a)


EXAMPLES = (VectorAdd(),)
