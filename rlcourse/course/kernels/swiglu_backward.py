"""The gradients of SwiGLU. What the forward pass computed from gate and up is computed again: that costs less than
keeping and reading it would.

As in the forward pass nothing is shared: a thread reads 16 bytes of gate, of up and of dy, and writes 16 bytes of each
gradient.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlcourse.kernels import KernelError
from rlcourse.kernels.arguments import Argument, need_dtype, type_name
from rlcourse.kernels.dsl import Float32, cute, range_constexpr
from rlcourse.kernels.toolchain import launch

VECTOR = 8  # 16-bit numbers in 16 bytes
LOG2_E = 1.4426950408889634


@torch.enable_grad()
def swiglu_backward_reference(gate_up: Tensor, dy: Tensor) -> Tensor:
    """The gradient of gate_up [rows, 2 * inner] from that of silu(gate) * up, dy [rows, inner]: by autograd in float64,
    rounded once, at the end."""
    wide = gate_up.double().requires_grad_()
    gate, up = wide.chunk(2, -1)
    (found,) = torch.autograd.grad(torch.nn.functional.silu(gate) * up, wide, dy.double())
    return found.to(gate_up.dtype)


@dataclass(frozen=True)
class SwigluBackward:
    """dgate_up [rows, 2 * inner] from gate_up [rows, 2 * inner] and dy [rows, inner]; inside, float32."""

    inner: int
    dtype: str
    threads: int = 256

    def __post_init__(self):
        need_dtype(self)
        if self.inner % VECTOR:
            raise KernelError(f"SwigluBackward cannot cut rows of {self.inner}: it takes multiples of {VECTOR}.")

    @property
    def pieces(self) -> int:
        return self.inner // VECTOR

    def arguments(self) -> tuple:
        gate_up = Argument("gate_up", self.dtype, ("rows", 2 * self.inner), free=1)
        dy = Argument("dy", self.dtype, ("rows", self.inner), free=1)
        return gate_up, dy, Argument("dgate_up", self.dtype, ("rows", 2 * self.inner), free=1, output=True)

    def grid(self, gate_up, dy, dgate_up):
        return -(-gate_up.shape[0] * self.pieces // self.threads), 1, 1

    @cute.jit
    def __call__(self, gate_up: cute.Tensor, dy: cute.Tensor, dgate_up: cute.Tensor, stream):
        launched = self.kernel(gate_up, dy, dgate_up)
        launched.launch(grid=self.grid(gate_up, dy, dgate_up), block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, gate_up: cute.Tensor, dy: cute.Tensor, dgate_up: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        index = block * self.threads + thread
        row, piece = index // self.pieces, index % self.pieces
        if row < gate_up.shape[0]:
            both = cute.tiled_divide(gate_up[row, None], (VECTOR,))
            gate, up, slope = (cute.make_rmem_tensor(VECTOR, dy.element_type) for _ in range(3))
            cute.autovec_copy(both[None, piece], gate)
            cute.autovec_copy(both[None, self.pieces + piece], up)
            cute.autovec_copy(cute.tiled_divide(dy[row, None], (VECTOR,))[None, piece], slope)
            for i in range_constexpr(VECTOR):
                g, u, d = gate[i].to(Float32), up[i].to(Float32), slope[i].to(Float32)
                sigmoid = cute.arch.rcp_approx(cute.math.exp2(g * -LOG2_E, fastmath=True) + 1.0)
                # d * sigmoid comes first: where sigmoid is 0, a large g must find a 0 and no infinity.
                through = d * sigmoid
                gate[i] = (through * u * (1.0 + g * (1.0 - sigmoid))).to(dy.element_type)
                up[i] = (through * g).to(dy.element_type)
            out = cute.tiled_divide(dgate_up[row, None], (VECTOR,))
            cute.autovec_copy(gate, out[None, piece])
            cute.autovec_copy(up, out[None, self.pieces + piece])


@torch.library.custom_op("rlcourse::swiglu_backward", mutates_args=())
def swiglu_backward(gate_up: Tensor, dy: Tensor) -> Tensor:
    """The gradient of gate_up [rows, 2 * inner] from dy [rows, inner], of one dtype, bfloat16 or float16; the strides
    of rows are free. As `swiglu_backward_reference`. Raises KernelError."""
    dgate_up = gate_up.new_empty(gate_up.shape)
    if dgate_up.numel():
        launch(SwigluBackward(gate_up.shape[-1] // 2, type_name(gate_up)), gate_up, dy, dgate_up)
    return dgate_up


@swiglu_backward.register_fake
def _(gate_up, dy):
    return gate_up.new_empty(gate_up.shape)


EXAMPLES = (SwigluBackward(4864, "bfloat16"),)  # Qwen2.5-0.5B
