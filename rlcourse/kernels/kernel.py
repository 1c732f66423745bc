"""What kernels and their operations share: the host function, small device functions, and how PyTorch knows an
operation."""

import math
from collections.abc import Callable

import torch

from rlcourse.kernels import KernelError
from rlcourse.kernels.dsl import Float32, cute

LOG2_E = math.log2(math.e)  # a GPU computes powers and logarithms of 2
HALVES = ("bfloat16", "float16")  # what models are run in
LOWEST = -1e30  # a running maximum begins here and not at -inf, since -inf - -inf is nan


class Kernel:
    """Base of a kernel: its host function launches `kernel` once, on `grid(*tensors)` blocks of `threads`."""

    early = False  # see `toolchain.can_begin_early`
    dtypes = HALVES  # of those that have a field `dtype`

    def __post_init__(self):
        if getattr(self, "dtype", self.dtypes[0]) not in self.dtypes:
            name, dtypes = type(self).__name__, " or ".join(self.dtypes)
            raise KernelError(f"{name} is for {dtypes} and not for {self.dtype}: convert with .to().")

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
def tensor_cores(operand):
    """mma.sync m16n8k16 for operands of this dtype and sums in float32."""
    return cute.make_tiled_mma(cute.nvgpu.warp.MmaF16BF16Op(operand.element_type, Float32, (16, 8, 16)))


def operation(mutates: tuple[str, ...] = (), fake: Callable | None = None) -> Callable:
    """Decorator: the function becomes `torch.ops.rlcourse.NAME`, one node for torch.compile. fake: gives results of the
    right shapes without computing them; by default the function itself, as `launch` does nothing with fake tensors."""

    def register(function: Callable):
        found = torch.library.custom_op(f"rlcourse::{function.__name__}", function, mutates_args=mutates)
        found.register_fake(fake or function)
        return found

    return register
