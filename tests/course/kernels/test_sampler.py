"""Draws, log-probs and entropies against float64; the random numbers against their published test values."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import thorough

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from launching import DEVICE, anywhere, launch, run, spread

from rlcourse.course.kernels import sampler
from rlcourse.course.kernels.philox import gumbel, gumbel_reference, philox_reference, random_bits_reference
from rlcourse.course.kernels.sampler import MOST_SPLITS, SIZE, Sampler, sample, sample_reference
from rlcourse.kernels.arguments import Argument
from rlcourse.kernels.dsl import Uint32, cute
from rlcourse.kernels.kernel import Kernel

SEED = torch.tensor([1234567890123456789])
ORDERS = ["lockstep", "serial", "warp", "random"] if DEVICE == "cpu" else ["lockstep"]


def draw(logits, temperature=1.0, counter=None, seed=SEED, splits=2, **order):
    """What the kernel finds for `splits` blocks a row. Counters are checked to be ready for the next launch."""
    rows = len(logits)
    counter = torch.arange(rows) if counter is None else counter
    token = torch.full((rows,), -1)
    numbers = [torch.full((rows,), torch.nan) for _ in range(2)]
    shares, arrived = torch.full((rows, MOST_SPLITS, SIZE), torch.nan), torch.zeros(rows, dtype=torch.int32)
    kernel = Sampler(str(logits.dtype).removeprefix("torch."), greedy=temperature == 0)
    inverse = 1 / (temperature or 1)
    launch(kernel, logits, inverse, splits, seed, counter, token, *numbers, shares, arrived, **order)
    assert not arrived.any()
    return token, *numbers


def assert_same(found, logits, temperature, counter, seed=SEED):
    token, logprob, entropy = found
    assert ((token >= 0) & (token < logits.shape[1])).all()
    scaled = logits.double() / (temperature or 1)
    noise = gumbel_reference(random_bits_reference(seed, counter, logits.shape[1])) if temperature else 0
    keys = scaled + noise
    won, best = keys.gather(1, token[:, None])[:, 0], keys.amax(1)
    assert (best - won <= 2e-5 * (1 + best.abs())).all()  # two as good as equal may change places
    logprobs = scaled.log_softmax(-1)
    torch.testing.assert_close(logprob, logprobs.gather(1, token[:, None])[:, 0].float(), atol=2e-5, rtol=2e-6)
    _, _, expected = sample_reference(logits, temperature, seed, counter)
    torch.testing.assert_close(entropy, expected, atol=2e-5, rtol=1e-5)


def test_philox_gives_the_published_numbers():
    published = {  # kat_vectors of Random123: four words of the counter and two of the key
        (0,) * 6: "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        (0xFFFFFFFF,) * 6: "408f276d 41c83b0e a20bc7c6 6d5451fd",
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0): "d16cfe09 94fdcceb 5001e420 24126ea1",
    }
    for numbers, words in published.items():
        *counter, low, high = map(torch.tensor, numbers)
        assert [f"{int(word):08x}" for word in philox_reference(counter, [low, high])] == words.split()


@pytest.mark.parametrize("dtype", [torch.bfloat16, thorough(torch.float16), torch.float32], ids=str)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.integers(1, 3000), st.integers(1, 5), st.sampled_from([0.0, 0.3, 1.0, 1.7]))
def test_draws_are_those_of_float64(dtype, rows, vocabulary, splits, temperature):
    torch.manual_seed(vocabulary)
    logits = spread((4 * torch.randn(rows, vocabulary)).to(dtype), -(-vocabulary // 8) * 8 + 8)
    counter = torch.randint(-(2**62), 2**62, (rows,))
    assert_same(draw(logits, temperature, counter, splits=splits), logits, temperature, counter)


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_and_warps_may_take_turns_in_any_way(order):
    torch.manual_seed(3)
    logits = torch.randn(3, 2100)
    assert_same(draw(logits, 1.0, splits=5, order=order, seed=SEED), logits, 1.0, torch.arange(3))


def test_frequencies_are_those_of_the_softmax():
    torch.manual_seed(0)
    draws, temperature = 100_000 if DEVICE == "cuda" else 1000, 0.8
    row = 1.5 * torch.randn(24)
    counter = torch.arange(draws) + (torch.arange(draws) % 3 << 32)  # both words of the counter count
    token, logprob, _ = draw(row.expand(draws, 24).contiguous(), temperature, counter, splits=1)
    pi = (row / temperature).softmax(0)
    torch.testing.assert_close(logprob, pi.log()[token], atol=1e-5, rtol=0)
    expected, counts = draws * pi, torch.bincount(token, minlength=24)
    likely = expected > 5
    chi = ((counts - expected).square() / expected)[likely].sum()
    freedom = int(likely.sum()) - 1
    assert chi < freedom + 4 * math.sqrt(2 * freedom)


def test_a_draw_depends_on_seed_counter_and_logits_alone():
    torch.manual_seed(1)
    logits, counter = torch.randn(6, 500), torch.arange(6)
    tokens, *numbers = draw(logits, splits=1)
    again, *others = draw(logits.flip(0), counter=counter.flip(0), splits=3)
    assert torch.equal(again.flip(0), tokens)
    for one, other in zip(numbers, others, strict=True):
        torch.testing.assert_close(other.flip(0), one, atol=1e-5, rtol=0)
    for change in ({"counter": counter + 6}, {"counter": counter + 2**32}, {"seed": SEED + 1}, {"seed": SEED + 2**32}):
        assert not torch.equal(draw(logits, splits=1, **change)[0], tokens)


def test_of_equal_logits_the_greedy_token_is_the_first():
    for place in (3, 130, 1100, 1200):
        logits = spread(torch.zeros(2, 1201), 1204)
        logits[:, place:] = 2.5
        assert draw(logits, 0.0)[0].tolist() == [place] * 2


def test_tokens_without_mass_are_never_drawn_one_with_all_of_it_always_and_nan_is_seen():
    logits = torch.full((40, 1300), -math.inf)
    logits[:, [3, 700, 1299]] = torch.tensor([0.0, 1.0, 0.5])
    token, _, entropy = draw(logits)
    assert set(token.tolist()) == {3, 700, 1299}
    pi = torch.tensor([0.0, 1.0, 0.5]).softmax(0)
    torch.testing.assert_close(entropy, torch.full((40,), float(-(pi * pi.log()).sum())), atol=1e-5, rtol=0)
    logits = torch.full((3, 1300), -30000.0)
    logits[:, 99] = 30000.0
    logits[1, 800] = torch.nan
    token, logprob, entropy = draw(logits, 0.5)
    assert logprob.isnan().tolist() == entropy.isnan().tolist() == [False, True, False]
    assert token[::2].tolist() == [99] * 2 and 0 <= token[1] < 1300
    assert logprob[::2].abs().max() < 1e-6 and entropy[::2].abs().max() < 1e-6


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


def test_the_operation_draws_and_gives_all_three():
    torch.manual_seed(2)
    logits, counter = torch.randn(3, 2304).to(torch.bfloat16), torch.arange(3)
    found = run(sample, logits, 0.7, SEED, counter)
    assert [f.dtype for f in found] == [torch.int64, torch.float32, torch.float32]
    assert_same(found, logits, 0.7, counter)
    assert [len(f) for f in run(sample, logits[:0], 0.7, SEED, counter[:0])] == [0, 0, 0]
    with anywhere():
        torch.library.opcheck(sample, (logits[:, :40].to(DEVICE), 0.9, SEED.to(DEVICE), counter.to(DEVICE)))
    assert [sampler.splits_for(rows, 151936, 132) for rows in (1, 16, 64, 256, 1024)] == [32, 32, 16, 4, 1]
    assert sampler.splits_for(1, 50, 132) == 1
