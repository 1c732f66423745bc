"""The tensors of the slots, and what the device does with them: prefill, start, move, and one decode step in PyTorch.

Who is in which slot is `scheduler.py`'s business. Every tensor is made once and written in place, so that a captured
step finds it where it was.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcourse.batch import Rollout, completion_mask, join_rows, right_pad
from rlcourse.exact import KEYS as BLOCK_TOKENS
from rlcourse.rollout.decoder import Decoder
from rlcourse.sampling import Sampling, sample_tokens

SAMPLED_AT_ONCE = 256  # first tokens sampled at once: their logits are in float32
OF_A_SLOT = ("completion", "token", "position", "num_tokens", "done")


@dataclass(frozen=True)
class Room:
    """What slots have room for: `slots` of `tokens` each, and `prompts` of `prompt_tokens`, together `completions` of
    `new_tokens` each."""

    slots: int
    tokens: int
    prompts: int
    prompt_tokens: int
    completions: int
    new_tokens: int

    def holds(self, other: "Room") -> bool:
        return self == self.joined(other)

    def joined(self, other: "Room") -> "Room":
        """Room for either."""
        return Room(*(max(getattr(self, f.name), getattr(other, f.name)) for f in fields(Room)))


@dataclass
class Slots:
    """R slots, or the first of them (`first`), and prompts and outputs of all completions. int64 unless said otherwise.

    Of each slot [R]: completion, the number of the one decoded in it; token, its last one; position, tokens in the
    slot's cache, which is where the next one goes; num_tokens of the completion so far; done bool. cache [layers, 2, R,
    K, S, D], filled from the front; or paged (`blocks.py`) [layers, 2, num_blocks, K, BLOCK_TOKENS, D].
    For all [1]: max_new_tokens; next_completion, the first that has not started; num_completions; num_generations, how
    many share a prompt.
    Of each prompt: prompt_ids [prompts, P], prompt_lengths [prompts], prompt_cache [layers, 2, prompts, K, P, D].
    Of each completion: tokens [completions + 1, T + 1], logprobs as many float32, lengths [completions + 1], and ended
    bool. Column T takes what slots write that are done; the last row is nobody's, for slots without a completion.
    block_table [completions + 1, W] int32 says which blocks of a paged cache a completion has; else it is None.
    """

    completion: Tensor
    token: Tensor
    position: Tensor
    num_tokens: Tensor
    done: Tensor
    cache: Tensor
    max_new_tokens: Tensor
    next_completion: Tensor
    num_completions: Tensor
    num_generations: Tensor
    prompt_ids: Tensor
    prompt_lengths: Tensor
    prompt_cache: Tensor
    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    ended: Tensor
    block_table: Tensor | None

    @classmethod
    def empty(cls, decoder: Decoder, room: Room, paged: Tensor | None = None) -> "Slots":
        """Free slots and no completions. paged: the cache, if it is a paged one; else each slot gets one of
        `room.tokens`, and each prompt one of `room.prompt_tokens`."""
        device, outputs = decoder.embedding.device, (room.completions + 1, room.new_tokens + 1)
        table = (room.completions + 1, -(-room.tokens // BLOCK_TOKENS))

        def zeros(*shape, dtype=torch.long):
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            completion=zeros(room.slots),
            token=zeros(room.slots),
            position=zeros(room.slots),
            num_tokens=zeros(room.slots),
            done=torch.ones(room.slots, dtype=torch.bool, device=device),
            cache=decoder.new_cache(room.slots, room.tokens) if paged is None else paged,
            max_new_tokens=zeros(1),
            next_completion=zeros(1),
            num_completions=zeros(1),
            num_generations=zeros(1),
            prompt_ids=zeros(room.prompts, room.prompt_tokens),
            prompt_lengths=zeros(room.prompts),
            prompt_cache=decoder.new_cache(room.prompts if paged is None else 0, room.prompt_tokens),
            tokens=zeros(*outputs),
            logprobs=zeros(*outputs, dtype=torch.float32),
            lengths=zeros(room.completions + 1),
            ended=zeros(room.completions + 1, dtype=torch.bool),
            block_table=None if paged is None else zeros(*table, dtype=torch.int32),
        )

    def first(self, size: int) -> "Slots":
        """The first `size` slots: views of the same memory."""
        if size == len(self.done):
            return self
        views = {name: getattr(self, name)[:size] for name in OF_A_SLOT}
        if self.block_table is None:
            views["cache"] = self.cache[:, :, :size]
        return replace(self, **views)

    def unstarted(self, completions: Tensor) -> "Slots":
        """These completions [n] as if each were in a slot, and had no token yet: for sampling their first ones."""
        token, position, num_tokens = torch.zeros(3, len(completions), dtype=torch.long, device=completions.device)
        done = torch.zeros(len(completions), dtype=torch.bool, device=completions.device)
        return replace(self, completion=completions, token=token, position=position, num_tokens=num_tokens, done=done)

    def begin(self, prompts: list[list[int]], width: int, num_generations: int, max_new_tokens: int) -> None:
        """New prompts, padded on the right to `width`, and none of their completions started."""
        ids, lengths = right_pad(prompts, self.prompt_ids.device)
        self.prompt_ids[: len(prompts), :width] = F.pad(ids, (0, width - ids.shape[1]))
        self.prompt_lengths[: len(prompts)] = lengths
        self.max_new_tokens.fill_(max_new_tokens)
        self.next_completion.zero_()
        self.num_completions.fill_(len(prompts) * num_generations)
        self.num_generations.fill_(num_generations)

    def start(self, starts: list[tuple[int, int]], num_generations: int) -> None:
        """Give slots to completions, (slot, completion) each: the prompt's cache and the first token."""
        slot, completion = torch.tensor(starts, device=self.token.device).unbind(1)
        prompt, width = completion // num_generations, self.prompt_cache.shape[4]
        cache, first, last = self.cache[:, :, :, :, :width], starts[0][0], starts[-1][0]
        if last - first + 1 == len(starts):  # neighbours, as at the beginning: one copy does it
            torch.index_select(self.prompt_cache, 2, prompt, out=cache[:, :, first : last + 1])
        else:
            cache.index_copy_(2, slot, self.prompt_cache.index_select(2, prompt))
        self.completion[slot], self.num_tokens[slot] = completion, 1
        self.token[slot], self.done[slot] = self.tokens[completion, 0], self.ended[completion]
        self.position[slot] = self.prompt_lengths[prompt]
        self.next_completion += len(starts)

    def move(self, moves: list[tuple[int, int]], length: int) -> None:
        """Move slots, (source, target) each, with the first `length` tokens of their caches."""
        source, target = torch.tensor(moves, device=self.token.device).unbind(1)
        used = self.cache[:, :, :, :, :length]
        used.index_copy_(2, target, used.index_select(2, source))
        for name in OF_A_SLOT:
            values = getattr(self, name)
            values[target] = values[source]

    def record(self, tokens: Tensor, logprobs: Tensor, eos: Tensor) -> None:
        """Each slot's next token [R] and its log-prob. Of a slot that is done nothing is kept."""
        alive = ~self.done
        place = (self.completion, self.num_tokens.masked_fill(self.done, self.tokens.shape[1] - 1))
        self.tokens[place], self.logprobs[place] = tokens, logprobs
        self.token.copy_(tokens)
        self.position += alive
        self.num_tokens += alive
        self.done |= (tokens[:, None] == eos).any(1) | (self.num_tokens >= self.max_new_tokens)
        self.lengths[self.completion], self.ended[self.completion] = self.num_tokens, self.done


def rollout_of(slots: Slots, prompts: int, completions: int, pad: int, eos: Tensor) -> Rollout:
    """What the slots wrote down of the first so many completions, of so many prompts, as wide as the longest."""
    lengths = slots.lengths[:completions].clone()
    longest = int(lengths.max())
    tokens, logprobs = slots.tokens[:completions, :longest], slots.logprobs[:completions, :longest]
    ids, prompt_lengths = join_rows(slots.prompt_ids[:prompts], slots.prompt_lengths[:prompts], tokens, lengths, pad)
    return Rollout(
        ids=ids,
        prompt_lengths=prompt_lengths,
        completion_lengths=lengths,
        logprobs=logprobs.masked_fill(~completion_mask(lengths, longest), 0.0),
        finished=(tokens.gather(1, lengths[:, None] - 1) == eos).any(1),
    )


def prefill(slots: Slots, pass_over: Callable, prompts: int, width: int, tokens_at_once: int) -> Tensor:
    """The prompts' keys and values into `prompt_cache`; what `pass_over` says after their last tokens, [prompts, ...].

    pass_over: ids, lengths and their cache → what it says; prompts: how many there are; width: of the longest;
    tokens_at_once: of one pass, padding included.
    """
    ids, lengths = slots.prompt_ids[:prompts, :width], slots.prompt_lengths[:prompts]
    cache, at_once = slots.prompt_cache[:, :, :prompts], max(1, tokens_at_once // width)
    pieces = zip(ids.split(at_once), lengths.split(at_once), cache.split(at_once, dim=2), strict=True)
    return torch.cat([pass_over(*piece) for piece in pieces])


def sample_first_tokens(slots: Slots, prompts: int, num_generations: int, sample: Callable, eos: Tensor) -> None:
    """The first token of every completion, its log-prob, and whether it ends the completion.

    sample: numbers of prompts [n], one for each completion → tokens and log-probs [n].
    """
    for rows in torch.arange(prompts * num_generations, device=slots.tokens.device).split(SAMPLED_AT_ONCE):
        tokens, logprobs = sample(rows // num_generations)
        slots.tokens[rows, 0], slots.logprobs[rows, 0], slots.lengths[rows] = tokens, logprobs, 1
        slots.ended[rows] = (tokens[:, None] == eos).any(1)


def sample_at(logits: Tensor, temperature: Tensor, at_one: Sampling) -> tuple[Tensor, Tensor]:
    """`sample_tokens` at a temperature [1] that is a tensor: compiled, it is one program for all temperatures.

    at_one: the rest of the sampling, at temperature 1 (or greedy).
    """
    return sample_tokens(logits.float() / temperature, at_one)


def decode_step(slots: Slots, decoder: Decoder, sample: Callable, eos: Tensor, length: int) -> None:
    """The next token of every slot, in PyTorch. A slot that is done computes one too, and nothing of it is kept.

    sample: logits [R, vocabulary] → tokens and log-probs [R]; length: more than any slot that is not done has in its
    cache.
    """
    slots.record(*sample(decoder.decode(slots.token, slots.position, slots.cache, length)), eos)
