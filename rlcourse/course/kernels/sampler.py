"""Sampling the next token: temperature, Gumbel-max (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030), its log-prob
and the entropy, in one pass over the logits. Blocks can split a row's vocabulary; the last block to arrive merges their
shares. `philox` makes the noise from seed, counter and token, wherever a row is in the batch."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcourse.course.kernels.common import load_logits
from rlcourse.course.kernels.philox import gumbel, gumbel_reference, philox, random_bits_reference
from rlcourse.kernels.arguments import Argument, Scalar, type_name
from rlcourse.kernels.dsl import Float32, Int32, Int64, Uint32, const_expr, cute, cutlass, range_constexpr
from rlcourse.kernels.kernel import HALVES, LOG2_E, LOWEST, Kernel, operation, power
from rlcourse.kernels.toolchain import launch, workspace

FLOOR = -1000.0  # 2^FLOOR is 0 and 0 * FLOOR is no nan
MOST_SPLITS = 32  # of a row's vocabulary: one for each thread of the warp that puts them together

# What is known of a share of the vocabulary, in float32: its largest logit, the sums of 2^(logit - largest) and of
# 2^(logit - largest) * (logit - largest), and the winner's logit with noise, index (exact below 2^24) and logit.
LARGEST, MASS, MEAN, KEY, INDEX, LOGIT = range(6)
SIZE = 8  # room for these in whole 16-byte pieces


def sample_reference(
    logits: Tensor, temperature: float, seed: Tensor, counter: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A token of softmax(logits / temperature) for each row, its log-prob and the entropy of that distribution. logits
    [rows, vocabulary]; temperature 0 takes the largest logit, the first of equals, and both numbers are those at
    temperature 1. seed int64 [1] and counter int64 [rows] fix the random numbers, so each step of each completion needs
    its own counter. Returns token int64, logprob and entropy float32, each [rows]; nan where a logit is."""
    scaled = logits.double() / (temperature or 1.0)
    logprobs = scaled.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).nan_to_num(0.0).sum(-1)  # 0 * -inf: a token that cannot be drawn
    noise = gumbel_reference(random_bits_reference(seed, counter, logits.shape[1])) if temperature else 0.0
    token = (scaled + noise).argmax(-1)
    return token, logprobs.gather(1, token[:, None])[:, 0].float(), entropy.float()


@dataclass(frozen=True)
class Sampler(Kernel):
    """`sample_reference`, in `splits` blocks per row. greedy: temperature 0."""

    dtype: str
    greedy: bool = False
    threads: int = 128

    dtypes = (*HALVES, "float32")

    @property
    def vector(self) -> int:
        """Logits in 16 bytes."""
        return 16 // getattr(torch, self.dtype).itemsize

    def arguments(self) -> tuple:
        return (
            Argument("logits", self.dtype, ("rows", "vocabulary"), free=1),
            Scalar("inverse_temperature", "float32"),
            Scalar("splits", "int32"),
            Argument("seed", "int64", (1,), align=8),
            Argument("counter", "int64", ("rows",), align=8),
            Argument("token", "int64", ("rows",), align=8, output=True),
            Argument("logprob", "float32", ("rows",), align=4, output=True),
            Argument("entropy", "float32", ("rows",), align=4, output=True),
            Argument("shares", "float32", ("rows", MOST_SPLITS, SIZE), output=True),
            Argument("arrived", "int32", ("rows",), align=4),
        )

    def grid(self, logits, inverse_temperature, splits, *_):
        return logits.shape[0], splits, 1  # of rows there may be more than the 65,535 that y and z allow

    @cute.kernel
    def kernel(
        self, logits, inverse_temperature: Float32, splits: Int32, seed, counter, token, logprob, entropy, shares,
        arrived,
    ):  # fmt: skip
        (thread, _, _), (row, split, _) = cute.arch.thread_idx(), cute.arch.block_idx()
        warps = const_expr(self.threads // 32)
        smem = cutlass.memory.SmemAllocator()
        by_warp = smem.allocate_tensor(Float32, cute.make_layout((SIZE, warps)), 16)
        order = smem.allocate_tensor(Int32, cute.make_layout(1), 4)

        share, other = (cute.make_rmem_tensor(SIZE, Float32) for _ in range(2))
        begin(share)
        pieces = cute.ceil_div(logits.shape[1], self.vector)
        scale = inverse_temperature * LOG2_E
        for piece in cutlass.range(split * self.threads + thread, pieces, splits * self.threads):
            self.take(share, logits[row, None], piece, scale, seed[0], counter[row])
        merge_warp(share)
        if thread % 32 == 0:
            cute.autovec_copy(share, by_warp[None, thread // 32])
        cute.arch.sync_threads()
        if thread == 0:
            for warp in range_constexpr(1, warps):
                cute.autovec_copy(by_warp[None, warp], other)
                merge(share, other)
            cute.autovec_copy(share, shares[row, split, None])
            # Releases this block's share, and acquires those of the blocks that were here before.
            order[0] = cute.arch.atomic_add(arrived.iterator + row, Int32(1), sem="acq_rel", scope="gpu")
        cute.arch.sync_threads()
        if order[0] == splits - 1 and thread < 32:  # the last of the row's blocks puts the shares together
            begin(share)
            if thread < splits:
                cute.autovec_copy(shares[row, thread, None], share)
            merge_warp(share)
            if thread == 0:
                log_mass = cute.math.log2(share[MASS], fastmath=True)
                token[row] = share[INDEX].to(Int64)
                logprob[row] = (share[LOGIT] - share[LARGEST] - log_mass) * math.log(2)
                entropy[row] = (log_mass - share[MEAN] / share[MASS]) * math.log(2)
                arrived[row] = Int32(0)  # ready for the next launch

    @cute.jit
    def take(self, share, row, piece, scale, seed, counter):
        """Add a 16-byte piece of a row to a thread's share."""
        first, vector = piece * self.vector, const_expr(self.vector)
        held = cute.make_rmem_tensor(vector, row.element_type)
        load_logits(row, piece, held)
        logits = cute.make_rmem_tensor(vector, Float32)
        largest = share[LARGEST]
        for i in range_constexpr(vector):
            logits[i] = held[i].to(Float32) * scale
            largest = cute.arch.fmax(largest, logits[i])
        rescale(share, largest)
        for i in range_constexpr(vector):
            below = logits[i] - largest
            below = Float32(FLOOR) if below < FLOOR else below  # unlike fmax, this keeps nan, and nan should be seen
            mass = power(below)
            share[MASS] += mass
            share[MEAN] += mass * below
        noise = cute.make_rmem_tensor(vector, Float32)
        noise.fill(0.0)
        if const_expr(not self.greedy):
            for four in range_constexpr(vector // 4):
                words = philox(Uint32(piece * (vector // 4) + four), counter, seed)
                for i in range_constexpr(4):
                    noise[four * 4 + i] = gumbel(words[i])
        for i in range_constexpr(vector):
            keep_better(share, logits[i] + noise[i], Float32(first + i), logits[i])


@cute.jit
def begin(share):
    """A share of nothing."""
    share.fill(0.0)
    share[LARGEST] = Float32(LOWEST)
    share[KEY] = -Float32.inf


@cute.jit
def rescale(share, largest: Float32):
    """The same share, told relative to a larger logit."""
    below = cute.arch.fmax(share[LARGEST] - largest, Float32(FLOOR))
    shrink = power(below)
    share[MEAN] = (share[MEAN] + share[MASS] * below) * shrink
    share[MASS] = share[MASS] * shrink
    share[LARGEST] = largest


@cute.jit
def keep_better(share, key: Float32, index: Float32, logit: Float32):
    """The winner of two; of equals the one that stands first in the vocabulary."""
    better = (key > share[KEY]) | ((key == share[KEY]) & (index < share[INDEX]))
    share[KEY] = key if better else share[KEY]
    share[INDEX] = index if better else share[INDEX]
    share[LOGIT] = logit if better else share[LOGIT]


@cute.jit
def merge(share, other):
    """Add another share of the same row."""
    largest = cute.arch.fmax(share[LARGEST], other[LARGEST])
    rescale(share, largest)
    rescale(other, largest)
    share[MASS] += other[MASS]
    share[MEAN] += other[MEAN]
    keep_better(share, other[KEY], other[INDEX], other[LOGIT])


@cute.jit
def merge_warp(share):
    """The 32 shares of a warp become one, which all its threads hold."""
    other = cute.make_rmem_tensor(SIZE, Float32)
    for step in range_constexpr(5):
        for i in range_constexpr(LOGIT + 1):
            other[i] = cute.arch.shuffle_sync_bfly(share[i], offset=1 << step)
        merge(share, other)


def splits_for(rows: int, vocabulary: int, processors: int) -> int:
    """Blocks per row, so that even a few rows put 8 blocks on each processor."""
    return max(1, min(MOST_SPLITS, 8 * processors // rows, vocabulary // 2048))


@operation(fake=lambda logits, *_: _outputs(logits))
def sample(logits: Tensor, temperature: float, seed: Tensor, counter: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`sample_reference` in one launch, computed in float32. logits [rows, vocabulary] are bfloat16, float16 or
    float32, their rows a multiple of 16 bytes apart. Safe in a CUDA graph, where seed and counter are read anew at each
    replay; call it once before capturing. Calls on several streams at once would share a workspace. Raises KernelError.
    """
    (rows, vocabulary), device, outputs = logits.shape, logits.device, _outputs(logits)
    if rows:
        processors = torch.cuda.get_device_properties(device).multi_processor_count if logits.is_cuda else 2
        numbers = 1 / (temperature or 1), splits_for(rows, vocabulary, processors)
        shares = workspace((rows, MOST_SPLITS, SIZE), torch.float32, device, "sample")
        arrived = workspace((rows,), torch.int32, device, "sample")
        kernel = Sampler(type_name(logits), greedy=temperature == 0)
        launch(kernel, logits, *numbers, seed, counter, *outputs, shares, arrived)
    return outputs


def _outputs(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(logits.new_empty(len(logits), dtype=dtype) for dtype in (torch.int64, torch.float32, torch.float32))
