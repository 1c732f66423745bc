"""Rotary positions (RoPE): turns every token's queries and keys, and turns their gradients back: the gradient of a
rotation is the rotation by minus the angle, so one kernel is both passes. A thread takes 16 bytes of each half of a
head."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlcourse.course.kernels.common import VECTOR, check_width
from rlcourse.kernels.arguments import Argument, type_name
from rlcourse.kernels.dsl import Float32, const_expr, cute
from rlcourse.kernels.kernel import Kernel, operation
from rlcourse.kernels.toolchain import launch


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, back: bool = False) -> Tensor:
    """Each head of x [tokens, heads, head] turned by its token's position, or with `back` by minus that, in float32,
    rounded once, at the end. cos, sin float32 [positions, head / 2]: of the angles position / base^(2 i / head) (Su et
    al. 2021, arXiv:2104.09864; element i turns with element i + head / 2, as in Qwen). position int64 [tokens]."""
    first, second = x.float().chunk(2, -1)
    c, s = cos[position][:, None], sin[position][:, None]
    s = -s if back else s
    return torch.cat([first * c - second * s, second * c + first * s], -1).to(x.dtype)


@dataclass(frozen=True)
class Rope(Kernel):
    """`rope_reference` for a number of heads and a head size."""

    heads: int
    head: int
    dtype: str
    back: bool = False
    threads: int = 256

    def __post_init__(self):
        super().__post_init__()
        check_width(self, self.head, 2 * VECTOR)

    @property
    def pieces(self) -> int:
        return self.head // (2 * VECTOR)

    def arguments(self) -> tuple:
        shape, table = ("tokens", self.heads, self.head), ("positions", self.head // 2)
        cos, sin = (Argument(name, "float32", table) for name in ("cos", "sin"))
        position = Argument("position", "int64", ("tokens",), align=8)
        y = Argument("y", self.dtype, shape, free=1, output=True)
        return Argument("x", self.dtype, shape, free=1), cos, sin, position, y

    def grid(self, x, *_):
        return -(-x.shape[0] * self.heads * self.pieces // self.threads), 1, 1

    @cute.kernel
    def kernel(self, x, cos, sin, position, y):
        (thread, _, _), (block, _, _) = cute.arch.thread_idx(), cute.arch.block_idx()
        index = block * self.threads + thread
        token, head, piece = index // (self.heads * self.pieces), index // self.pieces % self.heads, index % self.pieces
        if token < x.shape[0]:
            source = cute.tiled_divide(x[token, head, None], (VECTOR,))
            first, second = (cute.make_rmem_tensor(VECTOR, x.element_type) for _ in range(2))
            c, s = (cute.make_rmem_tensor(VECTOR, Float32) for _ in range(2))
            cute.autovec_copy(source[None, piece], first)
            cute.autovec_copy(source[None, self.pieces + piece], second)
            at = position[token]
            cute.autovec_copy(cute.tiled_divide(cos[at, None], (VECTOR,))[None, piece], c)
            cute.autovec_copy(cute.tiled_divide(sin[at, None], (VECTOR,))[None, piece], s)
            if const_expr(self.back):
                s.store(-s.load())
            u, v = first.load().to(Float32), second.load().to(Float32)
            first.store((u * c.load() - v * s.load()).to(x.element_type))
            second.store((v * c.load() + u * s.load()).to(x.element_type))
            target = cute.tiled_divide(y[token, head, None], (VECTOR,))
            cute.autovec_copy(first, target[None, piece])
            cute.autovec_copy(second, target[None, self.pieces + piece])


@operation()
def rope(x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, back: bool = False) -> Tensor:
    """`rope_reference` in one launch, with a gradient for x [tokens, heads, head]: bfloat16 or float16, the stride of
    tokens free. Positions must be within the tables. Raises KernelError."""
    y = x.new_empty(x.shape)
    launch(Rope(x.shape[1], x.shape[2], type_name(x), back), x, cos, sin, position, y)
    return y


def _keep(ctx, inputs, output):
    _, *tables, ctx.back = inputs
    ctx.save_for_backward(*tables)


def _turn_back(ctx, dy):
    return rope(dy.contiguous(), *ctx.saved_tensors, not ctx.back), None, None, None, None


rope.register_autograd(_turn_back, setup_context=_keep)
