"""Sampling tokens in Triton, whether a completion is done, and who takes its slot. A row takes one random number:
`mass_kernel` of the training pass adds up the mass of each tile of the vocabulary, and `pick_kernel` looks up in which
tile a uniform number falls, then where in that tile. The last norm is split like all others (`triton_kernels.py`):
logits are multiplied with its 1 / rms and 1 / temperature at once."""

import triton
import triton.language as tl

from rlcourse.exact.operations import gdc_launch_dependents, gdc_wait, inverse_rms_of_row, total_mass


@triton.jit
def first_above(mass, goal, B: tl.constexpr):
    """The first place where the running sum of `mass` [B] exceeds `goal`, and the sum before it. Where rounding leaves
    none, the last place with mass."""
    o = tl.arange(0, B)
    above = (tl.cumsum(mass, 0) > goal) & (mass > 0)
    place = tl.minimum(tl.min(tl.where(above, o, B), 0), tl.max(tl.where(mass > 0, o, 0), 0))
    return place, tl.sum(tl.where(o < place, mass, 0.0), 0)


@triton.jit
def pick_kernel(
    logits, squares, tile_max, tile_sum, seed, eos, max_new_tokens, completion, token, position, num_tokens, done,
    tokens, logprobs, lengths, ended, V, width, inverse_temperature, eps, eos_ids, d: tl.constexpr,
    BN: tl.constexpr, TILES: tl.constexpr, B: tl.constexpr, E: tl.constexpr, GREEDY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sample a slot's token, write it and its log-prob down if the slot is alive, and see whether it is done. The
    random number is that of the completion's token: in which slot it is decoded, and when, changes nothing."""
    slot = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    o = tl.arange(0, B)
    largest, by_tile, highest, total = total_mass(tile_max, tile_sum, slot, TILES, B)
    number, so_far = tl.load(completion + slot), tl.load(num_tokens + slot)
    zero = slot * 0
    bits, _, _, _ = tl.philox(tl.load(seed), number.to(tl.int32), so_far.to(tl.int32), zero, zero)
    goal = tl.uint_to_uniform_float(bits) * total
    if GREEDY:
        tile = tl.min(tl.where(largest == highest, o, B), 0)
        before = 0.0
    else:
        tile, before = first_above(by_tile, goal, B)
    c = tl.arange(0, BN)
    cols = tile * BN + c
    values = tl.load(logits + slot.to(tl.int64) * V + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
    values = values * (inverse_rms_of_row(squares, slot, eps, d) * inverse_temperature)
    if GREEDY:
        i = tl.min(tl.where(values == tl.max(values, 0), c, BN), 0)
    else:
        i, _ = first_above(tl.exp(values - highest), goal - before, BN)
    sampled = (tile * BN + i).to(tl.int64)
    logprob = tl.sum(tl.where(c == i, values, 0.0), 0) - highest - tl.log(total)
    if tl.load(done + slot) == 0:
        at = number * width + so_far
        tl.store(tokens + at, sampled)
        tl.store(logprobs + at, logprob)
        tl.store(token + slot, sampled)
        tl.store(position + slot, tl.load(position + slot) + 1)
        tl.store(num_tokens + slot, so_far + 1)
        tl.store(lengths + number, so_far + 1)
        e = tl.arange(0, E)
        ends = tl.sum((tl.load(eos + e, mask=e < eos_ids, other=-1) == sampled).to(tl.int32), 0) > 0
        is_last = (ends | (so_far + 1 >= tl.load(max_new_tokens))).to(tl.int8)
        tl.store(done + slot, is_last)
        tl.store(ended + number, is_last)


@triton.jit
def refill_kernel(
    completion, token, position, num_tokens, done, next_completion, num_completions, num_generations, tokens, lengths,
    ended, prompt_lengths, R, T, B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The free slots in order take the next completions in theirs: by one program, so that runs can be repeated."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.arange(0, B)
    here = slot < R
    free = here & (tl.load(done + slot, mask=here, other=0) != 0)
    started = tl.load(next_completion)
    takes = started + tl.cumsum(free.to(tl.int64), 0) - 1
    take = free & (takes < tl.load(num_completions))
    its_prompt = takes // tl.load(num_generations)
    tl.store(completion + slot, takes, mask=take)
    so_far = tl.load(lengths + takes, mask=take, other=1)  # one, or more of a completion that was sent back
    tl.store(token + slot, tl.load(tokens + takes * T + so_far - 1, mask=take, other=0), mask=take)
    tl.store(position + slot, tl.load(prompt_lengths + its_prompt, mask=take, other=0) + so_far - 1, mask=take)
    tl.store(num_tokens + slot, so_far, mask=take)
    tl.store(done + slot, tl.load(ended + takes, mask=take, other=0), mask=take)
    tl.store(next_completion, started + tl.sum(take.to(tl.int64), 0))
