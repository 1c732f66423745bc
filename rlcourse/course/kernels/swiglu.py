"""SwiGLU: silu(gate) * up, where one matrix product has made gate and up side by side.

Nothing is shared between threads: each takes 16 bytes of a row's gate and the 16 bytes of its up that belong to them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlcourse.course.kernels.swiglu_backward import swiglu_backward
from rlcourse.kernels import KernelError
from rlcourse.kernels.arguments import Argument, need_dtype, type_name
from rlcourse.kernels.dsl import Float32, const_expr, cute, range_constexpr
from rlcourse.kernels.toolchain import can_begin_early, launch

VECTOR = 8  # 16-bit numbers in 16 bytes
LOG2_E = 1.4426950408889634


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [rows, 2 * inner], gate first, in float32, rounded once, at the end (Shazeer 2020,
    arXiv:2002.05202). Returns [rows, inner]."""
    gate, up = gate_up.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


@dataclass(frozen=True)
class Swiglu:
    """out [rows, inner] = silu(gate) * up for gate_up [rows, 2 * inner]. early: see `toolchain.can_begin_early`."""

    inner: int
    dtype: str
    threads: int = 1024
    early: bool = False

    def __post_init__(self):
        need_dtype(self)
        if self.inner % VECTOR:
            raise KernelError(f"Swiglu cannot cut rows of {self.inner}: it takes multiples of {VECTOR}.")

    @property
    def pieces(self) -> int:
        return self.inner // VECTOR

    def arguments(self) -> tuple:
        gate_up = Argument("gate_up", self.dtype, ("rows", 2 * self.inner), free=1)
        return gate_up, Argument("out", self.dtype, ("rows", self.inner), output=True)

    def grid(self, gate_up, out):
        return -(-gate_up.shape[0] * self.pieces // self.threads), 1, 1

    @cute.jit
    def __call__(self, gate_up: cute.Tensor, out: cute.Tensor, stream):
        launched = self.kernel(gate_up, out)
        launched.launch(grid=self.grid(gate_up, out), block=[self.threads, 1, 1], stream=stream, use_pdl=self.early)

    @cute.kernel
    def kernel(self, gate_up: cute.Tensor, out: cute.Tensor):
        if const_expr(self.early):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        index = block * self.threads + thread
        row, piece = index // self.pieces, index % self.pieces
        if row < gate_up.shape[0]:
            both = cute.tiled_divide(gate_up[row, None], (VECTOR,))
            gate, up = (cute.make_rmem_tensor(VECTOR, out.element_type) for _ in range(2))
            cute.autovec_copy(both[None, piece], gate)
            cute.autovec_copy(both[None, self.pieces + piece], up)
            for i in range_constexpr(VECTOR):
                g = gate[i].to(Float32)
                # Powers and reciprocals of the special function unit: an exact division costs ten times as much.
                sigmoid = cute.arch.rcp_approx(cute.math.exp2(g * -LOG2_E, fastmath=True) + 1.0)
                gate[i] = (g * sigmoid * up[i].to(Float32)).to(out.element_type)
            cute.autovec_copy(gate, cute.tiled_divide(out[row, None], (VECTOR,))[None, piece])


@torch.library.custom_op("rlcourse::swiglu", mutates_args=())
def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [rows, 2 * inner], whose rows' stride is free; bfloat16 or float16; with a gradient.
    As `swiglu_reference`. Returns [rows, inner]. Raises KernelError."""
    inner = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], inner)
    if out.numel():
        launch(Swiglu(inner, type_name(gate_up), early=can_begin_early(gate_up.device)), gate_up, out)
    return out


@swiglu.register_fake
def _(gate_up):
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


swiglu.register_autograd(lambda ctx, dy: swiglu_backward(*ctx.saved_tensors, dy.contiguous()), setup_context=_keep)

EXAMPLES = (Swiglu(4864, "bfloat16"), Swiglu(4864, "float16"), Swiglu(3072, "bfloat16"))  # Qwen2.5-0.5B, Qwen3-0.6B
