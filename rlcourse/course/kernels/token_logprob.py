"""The log-prob of one token a row under softmax(logits): what a loss over a vocabulary is made of.

A block reads a row once: each thread keeps the largest logit that it met and the sum of 2^(logit - largest), and these
pairs are merged (Milakov and Gimelshein 2018, arXiv:1805.02867). Logits carry the factor log2(e) where powers are
taken, since a GPU computes powers and logarithms of 2.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcourse.kernels.arguments import Argument, need_dtype, type_name
from rlcourse.kernels.dsl import Float32, const_expr, cute, cutlass, range_constexpr
from rlcourse.kernels.toolchain import launch

VECTOR = 8  # 16-bit numbers in 16 bytes
LOG2_E = math.log2(math.e)
LOWEST = -1e30  # a running maximum begins here and not at -inf, since -inf - -inf is nan


def token_logprob_reference(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The log-prob of each row's target under softmax(logits), and the log of the row's sum of powers; float32 [rows],
    computed in float64.

    logits [rows, vocabulary]; target int64 [rows]. A negative target says that the row does not count: its log-prob is
    0. A target outside of the vocabulary has log-prob nan.
    """
    wide, (_, vocabulary) = logits.double(), logits.shape
    log_sum = wide.logsumexp(-1)
    logprob = wide.gather(1, target.clamp(0, vocabulary - 1)[:, None])[:, 0] - log_sum
    logprob = torch.where(target < vocabulary, logprob, torch.nan)
    return torch.where(target < 0, 0.0, logprob).float(), log_sum.float()


@dataclass(frozen=True)
class TokenLogprob:
    """`token_logprob_reference`, a block a row."""

    dtype: str
    threads: int = 256

    def __post_init__(self):
        need_dtype(self)

    def arguments(self) -> tuple:
        logits = Argument("logits", self.dtype, ("rows", "vocabulary"), free=1)
        found = (Argument(name, "float32", ("rows",), align=4, output=True) for name in ("logprob", "log_sum"))
        return logits, Argument("target", "int64", ("rows",), align=8), *found

    def grid(self, logits, *_):
        return logits.shape[0], 1, 1

    @cute.jit
    def __call__(self, logits: cute.Tensor, target: cute.Tensor, logprob: cute.Tensor, log_sum: cute.Tensor, stream):
        launched = self.kernel(logits, target, logprob, log_sum)
        launched.launch(grid=self.grid(logits), block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, logits: cute.Tensor, target: cute.Tensor, logprob: cute.Tensor, log_sum: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        warps = const_expr(self.threads // 32)
        shared = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout((2, warps)), 16)
        largest, mass = Float32(LOWEST), Float32(0.0)
        held = cute.make_rmem_tensor(VECTOR, logits.element_type)
        for piece in cutlass.range(thread, cute.ceil_div(logits.shape[1], VECTOR), self.threads):
            load(logits[row, None], piece, held)
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


@cute.jit
def power(x: Float32):
    return cute.math.exp2(x, fastmath=True)


@cute.jit
def merge(largest: Float32, mass: Float32, other: Float32, more: Float32):
    """Two parts of a sum of powers, each told relative to the largest logit of its own, as one."""
    above = cute.arch.fmax(largest, other)
    return above, mass * power(largest - above) + more * power(other - above)


@cute.jit
def load(row: cute.Tensor, piece, held: cute.Tensor):
    """A 16-byte piece of a row; past the end of one that pieces do not divide, -inf."""
    if (piece + 1) * VECTOR <= row.shape[0]:
        cute.autovec_copy(cute.tiled_divide(row, (VECTOR,))[None, piece], held)
    else:
        held.fill(-math.inf)
        for i in range_constexpr(VECTOR):
            if piece * VECTOR + i < row.shape[0]:
                held[i] = row[piece * VECTOR + i]


@torch.library.custom_op("rlcourse::token_logprob", mutates_args=())
def token_logprob(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """`token_logprob_reference` in one launch; logits bfloat16 or float16, their rows a multiple of 16 bytes apart.
    Raises KernelError."""
    logprob, log_sum = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(2))
    if len(logits):
        launch(TokenLogprob(type_name(logits)), logits, target, logprob, log_sum)
    return logprob, log_sum


@token_logprob.register_fake
def _(logits, target):
    return tuple(logits.new_empty(len(logits), dtype=torch.float32) for _ in range(2))


EXAMPLES = (TokenLogprob("bfloat16"),)
