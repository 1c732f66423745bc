"""Philox 4x32-10, random numbers by counter instead of by state (Salmon et al. 2011, "Parallel random numbers: as easy
as 1, 2, 3"; the generator of cuRAND and PyTorch): a 64-bit key and a 128-bit counter give 128 random bits, so any
thread can make any number again. And Gumbel noise from them.
"""

import math

import torch
from torch import Tensor

from rlcourse.kernels.dsl import Float32, Uint32, Uint64, cute, range_constexpr

MULTIPLIERS, STEPS, ROUNDS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 10
WORD = 0xFFFFFFFF


def philox_reference(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """Four words of random bits for four words of a counter and two of a key. All are 32 bits wide, held in int64."""
    a, b, c, d = counter
    low, high = key
    for _ in range(ROUNDS):
        # A product of 64 bits wraps around in int64, and has the right bits.
        first, second = MULTIPLIERS[0] * a, MULTIPLIERS[1] * c
        a, b, c, d = (second >> 32 & WORD) ^ b ^ low, second & WORD, (first >> 32 & WORD) ^ d ^ high, first & WORD
        low, high = low + STEPS[0] & WORD, high + STEPS[1] & WORD
    return [a, b, c, d]


def random_bits_reference(seed: Tensor, counter: Tensor, size: int) -> Tensor:
    """32 random bits for each row and place: int64 [rows, size]. seed int64 [1] is the key, counter int64 [rows] are
    words 1 and 2 of the counter. Word 0 is the place divided by 4; the remainder chooses one of the four words."""
    four = torch.arange(-(-size // 4), device=counter.device)
    row = counter[:, None]
    words = [four, row & WORD, row >> 32 & WORD, torch.zeros_like(row)]
    bits = philox_reference([w.expand(len(row), len(four)) for w in words], [seed & WORD, seed >> 32 & WORD])
    return torch.stack(bits, -1).flatten(1)[:, :size]


def gumbel_reference(bits: Tensor) -> Tensor:
    """Gumbel noise from 32 random bits, in float64: -ln(-ln(1 - u)) for u = (bits + 1/2) / 2^32, never 0 and never 1.
    Large noise comes from small u, which are finely spaced; with -ln(-ln(u)) rare tokens would never be drawn."""
    return -torch.log(-torch.log1p(-(bits.double() + 0.5) / 2**32))


@cute.jit
def philox(place: Uint32, row, seed):
    """Four random words for word 0 of the counter, a row's counter and a seed, both Int64."""
    a, b, c, d = place, row.to(Uint32), (row >> 32).to(Uint32), Uint32(0)
    low, high = seed.to(Uint32), (seed >> 32).to(Uint32)
    for _ in range_constexpr(ROUNDS):
        first, second = Uint64(MULTIPLIERS[0]) * a.to(Uint64), Uint64(MULTIPLIERS[1]) * c.to(Uint64)
        a, b = (second >> 32).to(Uint32) ^ b ^ low, second.to(Uint32)
        c, d = (first >> 32).to(Uint32) ^ d ^ high, first.to(Uint32)
        low, high = low + Uint32(STEPS[0]), high + Uint32(STEPS[1])
    return a, b, c, d


@cute.jit
def gumbel(bits: Uint32):
    """`gumbel_reference` times log2(e), which is -log2 of the exponential noise -ln(1 - u)."""
    u = cute.arch.fmin(bits.to(Float32) * 2.0**-32 + 2.0**-33, Float32(1 - 2.0**-24))
    small = u * (1.0 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4))))  # 1 - u has lost the last digits of a small u
    large = cute.math.log2(1.0 - u, fastmath=True) * -math.log(2)
    return -cute.math.log2(small if u < 2.0**-5 else large, fastmath=True)
