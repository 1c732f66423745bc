"""What the GPU engine's kernels read and write: slots, prompts, and the tokens that have been sampled. Every tensor is
made once and written in place, so that a captured step finds it where it was."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from rlcourse.batch import right_pad
from rlcourse.exact import KEYS as BLOCK_TOKENS

OF_A_SLOT = ("completion", "token", "position", "num_tokens", "done")


@dataclass(frozen=True)
class Room:
    """What `Slots` have room for; tokens: of a prompt and its completion, new_tokens: of a completion."""

    slots: int
    tokens: int
    prompts: int
    prompt_tokens: int
    completions: int
    new_tokens: int

    def joined(self, other: "Room") -> "Room":
        return Room(*(max(getattr(self, f.name), getattr(other, f.name)) for f in fields(Room)))


@dataclass
class Slots:
    """R slots, and prompts and outputs of all completions. int64 unless said otherwise. Of each slot [R]: completion,
    the number of the one decoded in it; token, its last one; position, tokens that it has in the cache, which is where
    the next one goes; num_tokens of the completion so far; done bool. For all [1]: max_new_tokens; next_completion, the
    first that has not started; num_completions, those that may start; num_generations, how many share a prompt. Of each
    prompt: prompt_ids [prompts, P], prompt_lengths [prompts]. Of each completion: tokens [completions + 1, T + 1],
    logprobs as many float32, lengths [completions + 1], and ended bool; block_table [completions + 1, W] int32, its
    blocks of the cache. Column T takes what slots write that are done; the last row is nobody's, for slots without a
    completion."""

    completion: Tensor
    token: Tensor
    position: Tensor
    num_tokens: Tensor
    done: Tensor
    max_new_tokens: Tensor
    next_completion: Tensor
    num_completions: Tensor
    num_generations: Tensor
    prompt_ids: Tensor
    prompt_lengths: Tensor
    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    ended: Tensor
    block_table: Tensor

    @classmethod
    def empty(cls, room: Room, device: torch.device) -> "Slots":
        def zeros(*shape, dtype=torch.long):
            return torch.zeros(shape, dtype=dtype, device=device)

        rows, columns = room.completions + 1, room.new_tokens + 1
        numbers = ("max_new_tokens", "next_completion", "num_completions", "num_generations")
        return cls(
            **{name: zeros(room.slots) for name in OF_A_SLOT if name != "done"},
            **{name: zeros(1) for name in numbers},
            done=torch.ones(room.slots, dtype=torch.bool, device=device),
            prompt_ids=zeros(room.prompts, room.prompt_tokens), prompt_lengths=zeros(room.prompts),
            tokens=zeros(rows, columns), logprobs=zeros(rows, columns, dtype=torch.float32),
            lengths=zeros(rows), ended=zeros(rows, dtype=torch.bool),
            block_table=zeros(rows, -(-room.tokens // BLOCK_TOKENS), dtype=torch.int32),
        )  # fmt: skip

    @property
    def no_completion(self) -> int:
        return len(self.lengths) - 1

    def first(self, size: int) -> "Slots":
        """The first `size` slots: views of the same memory."""
        return replace(self, **{name: getattr(self, name)[:size] for name in OF_A_SLOT})

    def unstarted(self, completions: Tensor) -> "Slots":
        """These completions [n] as if each were in a slot, and had no token yet: for sampling their first ones."""
        token, position, num_tokens = torch.zeros(3, len(completions), dtype=torch.long, device=completions.device)
        done = torch.zeros(len(completions), dtype=torch.bool, device=completions.device)
        return replace(self, completion=completions, token=token, position=position, num_tokens=num_tokens, done=done)

    def begin(self, prompts: list[list[int]], num_generations: int, max_new_tokens: int) -> None:
        """New prompts, nobody in a slot, no blocks and nothing sampled."""
        ids, lengths = right_pad(prompts, self.prompt_ids.device)
        self.prompt_ids[: len(prompts), : ids.shape[1]] = ids
        self.prompt_lengths[: len(prompts)] = lengths
        self.max_new_tokens.fill_(max_new_tokens)
        self.num_generations.fill_(num_generations)
        for name in ("next_completion", "lengths", "ended", "block_table", "token", "position", "num_tokens"):
            getattr(self, name).zero_()
        self.completion.fill_(self.no_completion)
        self.done.fill_(True)

    def admit(self, admitted: int) -> None:
        """Completions below `admitted` may be in slots; others leave theirs."""
        beyond = self.completion >= admitted
        self.completion.masked_fill_(beyond, self.no_completion)
        self.done |= beyond
        self.next_completion.clamp_(max=admitted)
        self.num_completions.fill_(admitted)

    def compact(self) -> None:
        """The slots that are not done come first."""
        order = self.done.to(torch.int8).argsort(stable=True)
        for name in OF_A_SLOT:
            getattr(self, name).copy_(getattr(self, name)[order])

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
