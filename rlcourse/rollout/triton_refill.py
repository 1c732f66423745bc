"""Free slots go to waiting completions within the step, in Triton: no slot idles until the host looks."""

import triton
import triton.language as tl


@triton.jit
def take_kernel(
    row, token, position, count, done, prompt, plan, tokens, over, prompt_lengths, R, T, B: tl.constexpr
):  # fmt: skip
    """The free slots in their order take the next completions in theirs. One program for all, so that a run can be
    repeated: who gets what does not depend on who came first. prompt [R]: whose cache a slot needs now, else -1."""
    slot = tl.arange(0, B)
    here = slot < R
    free = here & (tl.load(done + slot, mask=here, other=0) != 0)
    started = tl.load(plan)
    takes = started + tl.cumsum(free.to(tl.int64), 0) - 1
    take = free & (takes < tl.load(plan + 1))
    its_prompt = takes // tl.load(plan + 2)
    tl.store(row + slot, takes, mask=take)
    tl.store(token + slot, tl.load(tokens + takes * T, mask=take, other=0), mask=take)
    tl.store(position + slot, tl.load(prompt_lengths + its_prompt, mask=take, other=0), mask=take)
    tl.store(count + slot, tl.full((B,), 1, tl.int64), mask=take)
    tl.store(done + slot, tl.load(over + takes, mask=take, other=0), mask=take)
    tl.store(prompt + slot, tl.where(take, its_prompt, -1), mask=here)
    tl.store(plan, started + tl.sum(take.to(tl.int64), 0))


@triton.jit
def copy_kernel(
    prompt, source, target, source_kv, source_row, source_head, target_kv, target_row, target_head, length,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The cache of its prompt to each slot that has one to fetch: a head's keys or values of a layer. Layer and kind
    lie at the same distance from each other, so they count as one."""
    slot, kind, head = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    its_prompt = tl.load(prompt + slot)
    if its_prompt >= 0:
        source += kind * source_kv + its_prompt * source_row + head * source_head
        target += kind * target_kv + slot.to(tl.int64) * target_row + head * target_head
        for at in range(0, length, BLOCK):
            o = at + tl.arange(0, BLOCK)
            tl.store(target + o, tl.load(source + o, mask=o < length), mask=o < length)
