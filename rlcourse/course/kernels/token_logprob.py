"""The log-prob of one token per row under softmax(logits), which is minus the cross-entropy, and its gradient. Forward,
each thread keeps the largest logit that it met and the sum of 2^(logit - largest), and these pairs are merged (Milakov
and Gimelshein 2018, arXiv:1805.02867). Backward each logit's gradient needs that logit and the row's sum, and takes its
place."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcourse.course.kernels.common import VECTOR, load_logits
from rlcourse.kernels.arguments import Argument, type_name
from rlcourse.kernels.dsl import Float32, const_expr, cute, cutlass, range_constexpr
from rlcourse.kernels.kernel import LOG2_E, LOWEST, Kernel, operation, power
from rlcourse.kernels.toolchain import launch


def token_logprob_reference(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The log-prob of each row's target [rows] int64 under softmax(logits [rows, vocabulary]), and the log of the row's
    sum of powers; float32 [rows]. 0 for a negative target, which does not count, nan for one outside of the vocabulary.
    """
    wide, (_, vocabulary) = logits.double(), logits.shape
    log_sum = wide.logsumexp(-1)
    logprob = wide.gather(1, target.clamp(0, vocabulary - 1)[:, None])[:, 0] - log_sum
    logprob = torch.where(target < vocabulary, logprob, torch.nan)
    return torch.where(target < 0, 0.0, logprob).float(), log_sum.float()


@dataclass(frozen=True)
class BlockPerRow(Kernel):
    """Base of both kernels."""

    dtype: str
    threads: int = 256

    def arguments(self) -> tuple:
        logits = Argument("logits", self.dtype, ("rows", "vocabulary"), free=1)
        return logits, Argument("target", "int64", ("rows",), align=8), *self.per_row()

    def grid(self, logits, *_):
        return logits.shape[0], 1, 1


class TokenLogprob(BlockPerRow):
    """`token_logprob_reference`."""

    def per_row(self) -> tuple:
        return tuple(Argument(name, "float32", ("rows",), align=4, output=True) for name in ("logprob", "log_sum"))

    @cute.kernel
    def kernel(self, logits, target, logprob, log_sum):
        (thread, _, _), (row, _, _) = cute.arch.thread_idx(), cute.arch.block_idx()
        warps = const_expr(self.threads // 32)
        shared = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout((2, warps)), 16)
        largest, mass = Float32(LOWEST), Float32(0.0)
        held = cute.make_rmem_tensor(VECTOR, logits.element_type)
        for piece in cutlass.range(thread, cute.ceil_div(logits.shape[1], VECTOR), self.threads):
            load_logits(logits[row, None], piece, held)
            above = largest
            for i in range_constexpr(VECTOR):
                above = cute.arch.fmax(above, held[i].to(Float32) * LOG2_E)
            mass *= power(largest - above)
            for i in range_constexpr(VECTOR):
                mass += power(held[i].to(Float32) * LOG2_E - above)
            largest = above
        for step in range_constexpr(5):
            other, more = (cute.arch.shuffle_sync_bfly(number, offset=1 << step) for number in (largest, mass))
            largest, mass = merge(largest, mass, other, more)
        if thread % 32 == 0:
            shared[0, thread // 32], shared[1, thread // 32] = largest, mass
        cute.arch.sync_threads()
        if thread == 0:
            for warp in range_constexpr(1, warps):
                largest, mass = merge(largest, mass, shared[0, warp], shared[1, warp])
            total = (largest + cute.math.log2(mass, fastmath=True)) * math.log(2)
            token, found = target[row], Float32(0.0)
            if token >= 0:
                found = Float32(math.nan)
                if token < logits.shape[1]:
                    found = logits[row, token].to(Float32) - total
            logprob[row], log_sum[row] = found, total


class TokenLogprobBackward(BlockPerRow):
    """The gradient of logits, in their place: grad * (one-hot - softmax); zeros in a row with a negative target."""

    def per_row(self) -> tuple:
        return tuple(Argument(name, "float32", ("rows",), align=4) for name in ("log_sum", "grad"))

    @cute.kernel
    def kernel(self, logits, target, log_sum, grad):
        (thread, _, _), (row, _, _) = cute.arch.thread_idx(), cute.arch.block_idx()
        token, total, slope = target[row], log_sum[row] * LOG2_E, grad[row]
        if token < 0:
            slope = Float32(0.0)
        held = cute.make_rmem_tensor(VECTOR, logits.element_type)
        for piece in cutlass.range(thread, cute.ceil_div(logits.shape[1], VECTOR), self.threads):
            load_logits(logits[row, None], piece, held)
            for i in range_constexpr(VECTOR):
                hot = Float32(1.0) if token == piece * VECTOR + i else Float32(0.0)
                held[i] = (slope * (hot - power(held[i].to(Float32) * LOG2_E - total))).to(held.element_type)
            store(held, logits[row, None], piece)


@cute.jit
def merge(largest: Float32, mass: Float32, other: Float32, more: Float32):
    """Two parts of a sum of powers, each relative to its own largest logit, as one."""
    above = cute.arch.fmax(largest, other)
    return above, mass * power(largest - above) + more * power(other - above)


@cute.jit
def store(held, row, piece):
    """The way back of `load_logits`."""
    if (piece + 1) * VECTOR <= row.shape[0]:
        cute.autovec_copy(held, cute.tiled_divide(row, (VECTOR,))[None, piece])
    else:
        for i in range_constexpr(VECTOR):
            if piece * VECTOR + i < row.shape[0]:
                row[piece * VECTOR + i] = held[i]


@operation()
def token_logprob(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """`token_logprob_reference` in one launch; bfloat16 or float16, rows multiples of 16 bytes apart. Raises
    KernelError."""
    logprob, log_sum = (logits.new_empty(logits.shape[0], dtype=torch.float32) for _ in range(2))
    launch(TokenLogprob(type_name(logits)), logits, target, logprob, log_sum)
    return logprob, log_sum


@operation(mutates=("logits",))
def token_logprob_backward(logits: Tensor, target: Tensor, log_sum: Tensor, grad: Tensor) -> None:
    """The gradient of logits [rows, vocabulary], in their place, from that of the log-probs, grad [rows], and log_sum,
    the second result of `token_logprob`. Raises KernelError."""
    launch(TokenLogprobBackward(type_name(logits)), logits, target, log_sum, grad)
