"""Continuous batching over fixed slots: the rollout of the graph engine where a step is captured in a CUDA graph.

A slot is a row of the batch with its own part of the cache. Each completion gets a slot; when it is finished the next
one that waits takes the slot over, and when none waits the live ones move together and a smaller step goes on. So
nobody waits for the longest. What a step reads and writes stays at the same addresses. The host looks at the flags only
every few steps. Kernels can give a free slot away without it, in the same step (`triton_refill.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlcourse.rollout.decoder import Decoder
from rlcourse.sampling import Sampling, draw

STEPS_BETWEEN_LOOKS = 16  # decode steps between two reads of the flags; each read stops the host
SMALLEST = 8  # slots of the smallest step
FIRST_AT_ONCE = 256  # first tokens drawn at once: their logits are in float32


@dataclass
class Slots:
    """R slots, or the first of them (`first`), and the outputs of all completions.

    row [R]: the completion that a slot works on; token [R]: its last token; position [R]: tokens in its cache, which is
    where the next one goes; count [R]: tokens of the completion so far; done [R] bool; cache [layers, 2, R, K, S, D],
    filled from its beginning. For all: limit [1], tokens at most; plan [3], the completion that starts next, how many
    there are, and how many a prompt; prompt_cache [layers, 2, prompts, K, P, D] and prompt_lengths [prompts]; tokens
    [completions, T] int64, logprobs [completions, T] float32, lengths [completions], and over [completions] bool, those
    that end with their first token.
    """

    row: Tensor
    token: Tensor
    position: Tensor
    count: Tensor
    done: Tensor
    cache: Tensor
    limit: Tensor
    plan: Tensor
    prompt_cache: Tensor
    prompt_lengths: Tensor
    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    over: Tensor

    @classmethod
    def empty(
        cls, decoder: Decoder, slots: int, length: int, completions: int, max_new_tokens: int, prompts: int, width: int
    ) -> "Slots":
        """Slots with a cache of `length` tokens each, all done, and room for `prompts` of `width` tokens."""
        device = decoder.embedding.device

        def zeros(*shape, dtype=torch.long):
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            row=zeros(slots),
            token=zeros(slots),
            position=zeros(slots),
            count=zeros(slots),
            done=torch.ones(slots, dtype=torch.bool, device=device),
            cache=decoder.new_cache(slots, length),
            limit=zeros(1),
            plan=zeros(3),
            prompt_cache=decoder.new_cache(prompts, width),
            prompt_lengths=zeros(prompts),
            tokens=zeros(completions, max_new_tokens),
            logprobs=zeros(completions, max_new_tokens, dtype=torch.float32),
            lengths=zeros(completions),
            over=zeros(completions, dtype=torch.bool),
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
    slots.lengths[slots.row] = slots.count
    slots.token.copy_(torch.where(alive, tokens, slots.token))
    slots.done |= (tokens[:, None] == eos).any(1) | (slots.count >= slots.limit)


def prefill(slots: Slots, decoder: Decoder, ids: Tensor, mask: Tensor, tokens_at_once: int) -> Tensor:
    """Keys and values of the prompts into `slots`; logits [prompts, vocabulary] of the first tokens after them.

    ids, mask: [prompts, P], padded on the right.
    """
    prompts, width = ids.shape
    at_once = max(1, tokens_at_once // width)
    pieces = []
    for some in torch.arange(prompts).split(at_once):
        first, last = int(some[0]), int(some[-1]) + 1
        logits, cache = decoder.prefill(ids[first:last], mask[first:last])
        slots.prompt_cache[:, :, first:last, :, :width] = cache
        pieces.append(logits)
    slots.prompt_lengths[:prompts] = mask.sum(1)
    return torch.cat(pieces)


def run(
    slots: Slots,
    logits: Tensor,
    num_generations: int,
    max_new_tokens: int,
    sampling: Sampling,
    eos: Tensor,
    step_of: Callable[[int, bool], Callable[[], None]],
    refills: bool,
) -> None:
    """Complete every prompt `num_generations` times. Prompts and outputs are in `slots`; logits: see `prefill`.

    step_of(size, refill): a function that does one step of the first `size` slots, and with `refill` gives those that
    became free to completions that wait. refills: whether it can; else the host does it when it looks.
    """
    completions = len(logits) * num_generations
    slots.limit.fill_(max_new_tokens)
    slots.plan.copy_(torch.tensor([0, completions, num_generations]))
    draw_first(slots, logits, num_generations, sampling, eos)
    size = min(len(slots.row), completions) if max_new_tokens > 1 else 0
    started, done = 0, [True] * size
    while size:
        free = [slot for slot, is_done in enumerate(done) if is_done]
        if free and (started == 0 or (started < completions and not refills)):
            taken = free[: completions - started]
            start(slots, taken, started)
            started += len(taken)
            free = free[len(taken) :]
            ahead = max_new_tokens  # steps after which all are over at the latest
        if started == completions:
            size = shrink(slots, size, free)
        if size:
            refill, steps = refills and started < completions, min(STEPS_BETWEEN_LOOKS, ahead)
            started, done = look_while_working(slots, size, steps, step_of(size, refill))
            ahead = max_new_tokens if refill else ahead - steps


def look_while_working(slots: Slots, size: int, steps: int, next_step: Callable[[], None]) -> tuple[int, list[bool]]:
    """`steps` steps of the first `size` slots: how many completions have started, and which slots were done before the
    last step. That one is under way while the host looks, so a GPU does not wait for it."""
    for _ in range(steps - 1):
        next_step()
    flags = torch.cat([slots.plan[:1], slots.done[:size]]).to("cpu", non_blocking=True)
    copied = torch.cuda.Event() if slots.done.is_cuda else None
    if copied:
        copied.record()
    next_step()
    if copied:
        copied.synchronize()
    started, *done = flags.tolist()
    return started, done


def draw_first(slots: Slots, logits: Tensor, num_generations: int, sampling: Sampling, eos: Tensor) -> None:
    """The first token of every completion, its log-prob, and whether it is the last as well."""
    for rows in torch.arange(len(logits) * num_generations, device=logits.device).split(FIRST_AT_ONCE):
        tokens, logprobs = draw(logits[rows // num_generations], sampling)
        slots.tokens[rows, 0], slots.logprobs[rows, 0], slots.lengths[rows] = tokens, logprobs, 1
        slots.over[rows] = (tokens[:, None] == eos).any(1)


def start(slots: Slots, taken: list[int], first: int) -> None:
    """Give the slots `taken` to the completions from number `first` on: the prompt's cache and the first token."""
    device, width = slots.token.device, slots.prompt_cache.shape[4]
    at, row = torch.tensor([taken, range(first, first + len(taken))], device=device)
    prompt = row // slots.plan[2]
    slots.cache[:, :, at, :, :width] = slots.prompt_cache[:, :, prompt]
    slots.row[at], slots.token[at], slots.done[at] = row, slots.tokens[row, 0], slots.over[row]
    slots.position[at], slots.count[at] = slots.prompt_lengths[prompt], 1
    slots.plan[:1] += len(taken)


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
