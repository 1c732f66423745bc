"""What kernels and their operations would otherwise repeat: the host function, and how PyTorch gets to know them."""

from collections.abc import Callable

import torch

from rlcourse.kernels.arguments import HALVES, need_dtype
from rlcourse.kernels.dsl import cute


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
