"""SwiGLU, silu(gate) * up, and its gradient, elementwise: each thread takes 16 bytes of a row's gate and the 16 bytes
of its up that belong to them. The backward pass computes the sigmoid again, which costs less than reading it would."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlcourse.course.kernels.common import VECTOR, PerPiece
from rlcourse.kernels.arguments import type_name
from rlcourse.kernels.dsl import Float32, const_expr, cute, range_constexpr
from rlcourse.kernels.kernel import LOG2_E, operation
from rlcourse.kernels.toolchain import can_begin_early, launch


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [rows, inner] of gate_up [rows, 2 * inner], in float32, rounded once (Shazeer 2020,
    arXiv:2002.05202)."""
    gate, up = gate_up.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


@dataclass(frozen=True)
class Swiglu(PerPiece):
    """out [rows, inner] = silu(gate) * up for gate_up [rows, 2 * inner]. early: see `toolchain.can_begin_early`."""

    early: bool = False

    threads = 1024

    def arguments(self) -> tuple:
        return self.argument("gate_up", 2 * self.width, free=1), self.argument("out", self.width, output=True)

    @cute.kernel
    def kernel(self, gate_up, out):
        if const_expr(self.early):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        row, piece = self.place()
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


class SwigluBackward(PerPiece):
    """dgate_up [rows, 2 * inner] from gate_up [rows, 2 * inner] and dy [rows, inner]; inside, float32."""

    def arguments(self) -> tuple:
        gate_up, dy = self.argument("gate_up", 2 * self.width, free=1), self.argument("dy", self.width, free=1)
        return gate_up, dy, self.argument("dgate_up", 2 * self.width, free=1, output=True)

    @cute.kernel
    def kernel(self, gate_up, dy, dgate_up):
        row, piece = self.place()  # a thread for each 16-byte piece of the gate
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


@operation()
def swiglu(gate_up: Tensor) -> Tensor:
    """`swiglu_reference` in one launch, with a gradient; bfloat16, float16; rows' stride free. Raises KernelError."""
    inner = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], inner)
    launch(Swiglu(inner, type_name(gate_up), early=can_begin_early(gate_up.device)), gate_up, out)
    return out


@operation()
def swiglu_backward(gate_up: Tensor, dy: Tensor) -> Tensor:
    """The gradient of gate_up [rows, 2 * inner] from dy [rows, inner] in one launch; as `swiglu`."""
    dgate_up = gate_up.new_empty(gate_up.shape)
    launch(SwigluBackward(gate_up.shape[-1] // 2, type_name(gate_up)), gate_up, dy, dgate_up)
    return dgate_up


swiglu.register_autograd(
    lambda ctx, dy: swiglu_backward(*ctx.saved_tensors, dy.contiguous()),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
