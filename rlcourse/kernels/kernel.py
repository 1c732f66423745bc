"""What kernels and their operations share: the host function, small device functions, and how PyTorch gets to know
an operation."""

import math
from collections.abc import Callable

import torch

from rlcourse.kernels.arguments import HALVES, need_dtype
from rlcourse.kernels.dsl import Float32, cute

LOG2_E = math.log2(math.e)  # a GPU computes powers and logarithms of 2
LOWEST = -1e30  # a running maximum begins here and not at -inf, since -inf - -inf is nan


class Kernel:
    """Base of a kernel: its host function launches `kernel` once, on `grid(*tensors)` blocks of `threads`."""

    early = False  # see `toolchain.can_begin_early`
    dtypes = HALVES  # of those that have a field `dtype`

    def __post_init__(self):
        if hasattr(self, "dtype"):
            need_dtype(self, self.dtypes)

    @cute.jit
    def __call__(self, *arguments):
        tensors, stream = arguments[:-1], arguments[-1]
        launched = self.kernel(*tensors)
        launched.launch(grid=self.grid(*tensors), block=[self.threads, 1, 1], stream=stream, use_pdl=self.early)


@cute.jit
def power(x: Float32):
    """2^x."""
    return cute.math.exp2(x, fastmath=True)


def registers(dtype, *shape) -> cute.Tensor:
    """Zeros in registers, elements next to each other from the first dimension on."""
    room = cute.make_rmem_tensor(cute.make_layout(shape), dtype)
    room.fill(0.0)
    return room


@cute.jit
def tensor_cores(operand: cute.Tensor):
    """mma.sync m16n8k16 for operands of this dtype and sums in float32."""
    return cute.make_tiled_mma(cute.nvgpu.warp.MmaF16BF16Op(operand.element_type, Float32, (16, 8, 16)))


def operation(mutates: tuple[str, ...] = (), fake: Callable | None = None) -> Callable:
    """Decorator: the function becomes `torch.ops.rlcourse.NAME`, which torch.compile keeps as one node.

    fake: what gives results of the right shapes without computing them. By default it is the function itself: `launch`
    does nothing with the fake tensors of torch.compile.
    """

    def register(function: Callable):
        found = torch.library.custom_op(f"rlcourse::{function.__name__}", function, mutates_args=mutates)
        found.register_fake(fake or function)
        return found

    return register
