"""The gradient of a token's log-prob, which takes the place of the logits.

The forward pass has left the log of the row's sum, so each logit's gradient needs that logit alone, and no thread needs
another.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlcourse.course.kernels.token_logprob import LOG2_E, VECTOR, load, power
from rlcourse.kernels.arguments import Argument, need_dtype, type_name
from rlcourse.kernels.dsl import Float32, cute, cutlass, range_constexpr
from rlcourse.kernels.toolchain import launch


@torch.enable_grad()
def token_logprob_backward_reference(logits: Tensor, target: Tensor, grad: Tensor) -> Tensor:
    """The gradient of logits [rows, vocabulary] from those of the log-probs, grad [rows]: grad * (one-hot - softmax) by
    autograd in float64; zeros for a row that does not count."""
    wide, counts = logits.double().requires_grad_(), target >= 0
    logprob = wide.log_softmax(-1).gather(1, target.clamp(min=0)[:, None])[:, 0]
    (found,) = torch.autograd.grad(logprob, wide, torch.where(counts, grad.double(), 0.0))
    return found.to(logits.dtype)


@dataclass(frozen=True)
class TokenLogprobBackward:
    """`token_logprob_backward_reference` in the place of the logits, from the log_sum of `TokenLogprob`; a block a
    row."""

    dtype: str
    threads: int = 256

    def __post_init__(self):
        need_dtype(self)

    def arguments(self) -> tuple:
        logits = Argument("logits", self.dtype, ("rows", "vocabulary"), free=1)
        log_sum, grad = (Argument(name, "float32", ("rows",), align=4) for name in ("log_sum", "grad"))
        return logits, Argument("target", "int64", ("rows",), align=8), log_sum, grad

    def grid(self, logits, *_):
        return logits.shape[0], 1, 1

    @cute.jit
    def __call__(self, logits: cute.Tensor, target: cute.Tensor, log_sum: cute.Tensor, grad: cute.Tensor, stream):
        launched = self.kernel(logits, target, log_sum, grad)
        launched.launch(grid=self.grid(logits), block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, logits: cute.Tensor, target: cute.Tensor, log_sum: cute.Tensor, grad: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        token, total, slope = target[row], log_sum[row] * LOG2_E, grad[row]
        if token < 0:
            slope = Float32(0.0)
        held = cute.make_rmem_tensor(VECTOR, logits.element_type)
        for piece in cutlass.range(thread, cute.ceil_div(logits.shape[1], VECTOR), self.threads):
            load(logits[row, None], piece, held)
            for i in range_constexpr(VECTOR):
                hot = Float32(1.0) if token == piece * VECTOR + i else Float32(0.0)
                held[i] = (slope * (hot - power(held[i].to(Float32) * LOG2_E - total))).to(held.element_type)
            store(held, logits[row, None], piece)


@cute.jit
def store(held: cute.Tensor, row: cute.Tensor, piece):
    """The way back of `load`."""
    if (piece + 1) * VECTOR <= row.shape[0]:
        cute.autovec_copy(held, cute.tiled_divide(row, (VECTOR,))[None, piece])
    else:
        for i in range_constexpr(VECTOR):
            if piece * VECTOR + i < row.shape[0]:
                row[piece * VECTOR + i] = held[i]


@torch.library.custom_op("rlcourse::token_logprob_backward", mutates_args=("logits",))
def token_logprob_backward(logits: Tensor, target: Tensor, log_sum: Tensor, grad: Tensor) -> None:
    """Put the gradient in the place of the logits, which are gone then: no second tensor of that size. As
    `token_logprob_backward_reference`; log_sum is the second result of `token_logprob`. Raises KernelError."""
    if len(logits):
        launch(TokenLogprobBackward(type_name(logits)), logits, target, log_sum, grad)


@token_logprob_backward.register_fake
def _(logits, target, log_sum, grad):
    return None


EXAMPLES = (TokenLogprobBackward("bfloat16"),)
