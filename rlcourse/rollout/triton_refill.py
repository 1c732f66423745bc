"""Free slots go to waiting completions within the step, in Triton: no slot idles until the host looks."""

import triton
import triton.language as tl

from rlcourse.exact.pdl import gdc_launch_dependents, gdc_wait


@triton.jit
def refill_kernel(
    completion, token, position, num_tokens, done, num_refilled, refilled, next_completion, num_completions,
    num_generations, tokens, lengths, ended, prompt_lengths, R, T, B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The free slots in their order take the next completions in theirs. One program for all, so that a run can be
    repeated: who gets what does not depend on who came first. num_refilled [1]: how many slots took one;
    refilled [R]: which."""
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
    tl.store(refilled + takes - started, slot.to(tl.int64), mask=take)
    how_many = tl.sum(take.to(tl.int64), 0)
    tl.store(num_refilled, how_many)
    tl.store(next_completion, started + how_many)


@triton.jit
def copy_kernel(
    completion, num_refilled, refilled, num_generations, source, target, source_kv, source_row, source_head, target_kv,
    target_row, target_head, length, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The cache of its prompt to each slot that has just taken a completion: a head's keys or values of a layer.
    The programs of the first axis share the slots. Layer and kind lie at the same distance from each other, so they
    count as one."""
    if PDL:
        gdc_wait()
    share, kind, head = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    source += kind * source_kv + head * source_head
    target += kind * target_kv + head * target_head
    for i in range(share, tl.load(num_refilled), tl.num_programs(0)):
        slot = tl.load(refilled + i)
        prompt = tl.load(completion + slot) // tl.load(num_generations)
        for at in range(0, length, BLOCK):
            o = at + tl.arange(0, BLOCK)
            values = tl.load(source + prompt * source_row + o, mask=o < length)
            tl.store(target + slot * target_row + o, values, mask=o < length)
