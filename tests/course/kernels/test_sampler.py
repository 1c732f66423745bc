"""The sampler's random numbers against their published test values, and what its cases among the others leave out."""

import math
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from launching import launch, run

from rlcourse.course.kernels.philox import gumbel, gumbel_reference, philox_reference
from rlcourse.course.kernels.sampler import sample, sample_reference, splits_for
from rlcourse.kernels.arguments import Argument
from rlcourse.kernels.dsl import Uint32, cute
from rlcourse.kernels.kernel import Kernel

SEED = torch.tensor([1234567890123456789])


def test_philox_gives_the_published_numbers():
    published = {  # kat_vectors of Random123: four words of the counter and two of the key
        (0,) * 6: "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        (0xFFFFFFFF,) * 6: "408f276d 41c83b0e a20bc7c6 6d5451fd",
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0): "d16cfe09 94fdcceb 5001e420 24126ea1",
    }
    for numbers, words in published.items():
        *counter, low, high = map(torch.tensor, numbers)
        assert [f"{int(word):08x}" for word in philox_reference(counter, [low, high])] == words.split()


def test_frequencies_are_those_of_the_softmax():
    torch.manual_seed(0)
    draws, temperature = 100_000, 0.8
    row = 1.5 * torch.randn(24)
    counter = torch.arange(draws) + (torch.arange(draws) % 3 << 32)  # both words of the counter count
    token, logprob, entropy = sample_reference(row.expand(draws, 24), temperature, SEED, counter)
    pi = (row / temperature).softmax(0)
    torch.testing.assert_close(logprob, pi.log()[token], atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, -(pi * pi.log()).sum().expand(draws), atol=1e-5, rtol=0)
    expected, counts = draws * pi, torch.bincount(token, minlength=24)
    likely = expected > 5
    chi = ((counts - expected).square() / expected)[likely].sum()
    freedom = int(likely.sum()) - 1
    assert chi < freedom + 4 * math.sqrt(2 * freedom)


def test_nan_is_seen():
    logits = torch.randn(3, 1304)
    logits[1, 800] = torch.nan
    token, logprob, entropy = run(sample, logits, 0.5, SEED, torch.arange(3))
    assert logprob.isnan().tolist() == entropy.isnan().tolist() == [False, True, False]
    assert 0 <= token[1] < 1304


def test_a_few_rows_are_split_among_all_processors():
    assert [splits_for(rows, 151936, 132) for rows in (1, 16, 64, 256, 1024)] == [32, 32, 16, 4, 1]
    assert splits_for(1, 50, 132) == 1


@dataclass(frozen=True)
class Noise(Kernel):
    """Noise for 32 words of random bits, which are chosen here."""

    threads: int = 32

    def arguments(self):
        return Argument("bits", "int32", (32,)), Argument("noise", "float32", (32,), output=True)

    def grid(self, *_):
        return 1, 1, 1

    @cute.kernel
    def kernel(self, bits: cute.Tensor, noise: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        noise[thread] = gumbel(bits[thread].to(Uint32))


def test_noise_is_finite_for_any_bits_and_its_tail_is_fine():
    ends = torch.tensor([0, 1, 2, 2**24, 2**27 - 1, 2**27, 2**31, 2**32 - 256, 2**32 - 128, 2**32 - 2, 2**32 - 1])
    bits = torch.cat([ends, torch.randint(0, 2**32, (32 - len(ends),))])
    noise, expected = torch.full((32,), torch.nan), gumbel_reference(bits)
    launch(Noise(), torch.where(bits < 2**31, bits, bits - 2**32).int(), noise)
    assert expected.isfinite().all() and noise.isfinite().all()
    assert expected[0] > 22 and expected[0] - expected[1] > 1  # one draw in 2^32 is that large
    common = bits < 2**32 - 256  # float32 cannot tell the last 256 of u from each other: the smallest noise of all
    torch.testing.assert_close(noise[common] * math.log(2), expected[common].float(), atol=2e-5, rtol=0)
    assert (noise[~common] < -4).all()
