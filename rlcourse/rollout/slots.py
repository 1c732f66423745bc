"""Continuous batching over fixed slots: the rollout of the graph engine where a step is captured in a CUDA graph.

A slot is a row of the batch with its own part of the cache. Each completion gets a slot; when it is finished the next
one that waits takes the slot over, and when none waits the live ones move together and a smaller step goes on. So
nobody waits for the longest. What a step reads and writes stays at the same addresses.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlcourse.rollout.decoder import Decoder
from rlcourse.sampling import Sampling, draw

STEPS_BETWEEN_LOOKS = 16  # decode steps between two reads of the flags; each read stops the host
SMALLEST = 8  # slots of the smallest step


@dataclass
class Slots:
    """R slots, or the first of them (`first`), and the outputs of all completions.

    row [R]: the completion that a slot works on; token [R]: its last token; position [R]: tokens in its cache, which is
    where the next one goes; count [R]: tokens of the completion so far; done [R] bool; limit [1]: tokens at most; cache
    [layers, 2, R, K, S, D], filled from slot 0 on; tokens [completions, T] int64 and logprobs [completions, T] float32.
    """

    row: Tensor
    token: Tensor
    position: Tensor
    count: Tensor
    done: Tensor
    limit: Tensor
    cache: Tensor
    tokens: Tensor
    logprobs: Tensor

    @classmethod
    def empty(cls, decoder: Decoder, slots: int, length: int, completions: int, max_new_tokens: int) -> "Slots":
        """Slots with a cache of `length` tokens each, all done."""
        device = decoder.embedding.device

        def zeros(*shape, dtype=torch.long):
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            row=zeros(slots),
            token=zeros(slots),
            position=zeros(slots),
            count=zeros(slots),
            done=torch.ones(slots, dtype=torch.bool, device=device),
            limit=zeros(1),
            cache=decoder.new_cache(slots, length),
            tokens=zeros(completions, max_new_tokens),
            logprobs=zeros(completions, max_new_tokens, dtype=torch.float32),
        )

    def first(self, size: int) -> "Slots":
        """The first `size` slots: views of the same memory."""
        views = {name: getattr(self, name)[:size] for name in ("row", "token", "position", "count", "done")}
        return replace(self, cache=self.cache[:, :, :size], **views)


def step(slots: Slots, decoder: Decoder, draw_tokens: Callable, eos: Tensor) -> None:
    """One decode step in PyTorch: the next token of every slot. draw_tokens: logits → tokens and log-probs."""
    logits = decoder.decode_rows(slots.token, slots.position, slots.cache)
    tokens, logprobs = draw_tokens(logits)
    alive = ~slots.done
    where = (slots.row, slots.count.clamp(max=slots.tokens.shape[1] - 1))
    slots.tokens.index_put_(where, torch.where(alive, tokens, slots.tokens[where]))
    slots.logprobs.index_put_(where, torch.where(alive, logprobs, slots.logprobs[where]))
    slots.position += alive
    slots.count += alive
    slots.token.copy_(torch.where(alive, tokens, slots.token))
    slots.done |= (tokens[:, None] == eos).any(1) | (slots.count >= slots.limit)


@dataclass
class Prompts:
    """Prefilled prompts: cache [layers, 2, prompts, K, P, D] from slot 0 on, lengths [prompts], and the logits
    [prompts, vocabulary] of the first token of their completions."""

    cache: Tensor
    lengths: Tensor
    logits: Tensor

    @classmethod
    def prefill(cls, decoder: Decoder, ids: Tensor, mask: Tensor, tokens_at_once: int) -> "Prompts":
        """ids, mask: [prompts, P], padded on the right."""
        at_once = max(1, tokens_at_once // ids.shape[1])
        pieces = [decoder.prefill(ids[i : i + at_once], mask[i : i + at_once]) for i in range(0, len(ids), at_once)]
        logits, caches = zip(*pieces, strict=True)
        return cls(torch.cat(caches, dim=2), mask.sum(1), torch.cat(logits))


def run(
    slots: Slots,
    prompts: Prompts,
    num_generations: int,
    max_new_tokens: int,
    sampling: Sampling,
    eos: Tensor,
    step_of: Callable[[int], Callable[[], None]],
) -> Tensor:
    """Complete every prompt `num_generations` times; returns the lengths [completions]. Outputs are in `slots`.

    step_of(size): a function that does one step of the first `size` slots.
    """
    completions = len(prompts.lengths) * num_generations
    lengths = torch.zeros(completions, dtype=torch.long, device=slots.token.device)
    slots.limit.fill_(max_new_tokens)
    size, waiting = min(len(slots.row), completions), completions
    done = [True] * size
    while True:
        free = [slot for slot, is_done in enumerate(done) if is_done]
        taken = free[:waiting]
        if taken:
            first = completions - waiting
            start(slots, taken, range(first, first + len(taken)), prompts, num_generations, sampling, eos)
            waiting -= len(taken)
            free = free[len(taken) :]
        size = shrink(slots, size, free)
        if size == 0:
            return lengths
        next_step = step_of(size)
        for _ in range(STEPS_BETWEEN_LOOKS if max_new_tokens > 1 else 0):
            next_step()
        live = slots.first(size)
        lengths[live.row] = live.count  # of finished ones for good, of the others for now
        done = live.done.tolist()


def start(
    slots: Slots, taken: list[int], rows: range, prompts: Prompts, num_generations: int, sampling: Sampling, eos: Tensor
) -> None:
    """Give the slots `taken` to the completions `rows`: the prompt's cache, and the first token, drawn here."""
    device = slots.token.device
    at, row = torch.tensor(taken, device=device), torch.tensor(list(rows), device=device)
    prompt = row // num_generations
    width = prompts.cache.shape[4]
    slots.cache[:, :, at, :, :width] = prompts.cache[:, :, prompt]
    tokens, logprobs = draw(prompts.logits[prompt], sampling)
    slots.row[at], slots.token[at], slots.position[at] = row, tokens, prompts.lengths[prompt]
    slots.tokens[row, 0], slots.logprobs[row, 0] = tokens, logprobs
    slots.count[at] = 1
    slots.done[at] = (tokens[:, None] == eos).any(1) | (slots.limit <= 1)


def shrink(slots: Slots, size: int, free: list[int]) -> int:
    """The smallest half, quarter, ... of `size` that holds the live slots, after those behind it have moved into free
    ones before it. 0 where none lives."""
    alive = size - len(free)
    if alive == 0:
        return 0
    smaller = size
    while smaller > SMALLEST and alive <= smaller // 2:
        smaller //= 2
    if smaller == size:
        return size
    empty = set(free)
    movers = [slot for slot in range(smaller, size) if slot not in empty]
    if movers:
        device = slots.token.device
        source = torch.tensor(movers, device=device)
        target = torch.tensor([slot for slot in free if slot < smaller][: len(movers)], device=device)
        slots.cache[:, :, target] = slots.cache[:, :, source]
        for name in ("row", "token", "position", "count", "done"):
            values = getattr(slots, name)
            values[target] = values[source]
    return smaller
