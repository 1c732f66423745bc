"""What flows through a training step: sampled completions, the batch that trains, its mini-batches and micro-batches.

One layout for all: each row of `ids` is a prompt, its completion, then padding; two lengths per row say which is which.
Values by token are [rows, T]: column t belongs to completion token t. Nothing here is ever modified.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcourse.config import TrainConfig
from rlcourse.dist import ALONE, OneProcess

if TYPE_CHECKING:
    from rlcourse.policy import Policy

Prompts = list[list[int]]  # token ids
MAX_SLOTS = 256  # completions decoded at once on a GPU, where each has blocks for its full length; more wait their turn
PREFILL_TOKENS = 16384  # prompts are prefilled so many tokens at a time; decoding waits for them
STEPS_BETWEEN_LOOKS = 16  # decode steps on a GPU before the host looks which rows have ended, and so waits for it


def completion_lengths(completion_ids: Tensor, eos_ids: Iterable[int]) -> Tensor:
    """Tokens of each completion [rows, T] int64, up to and including its first EOS; all of them if there is none."""
    is_eos = torch.isin(completion_ids, torch.tensor(list(eos_ids), device=completion_ids.device))
    return (is_eos.cumsum(1) - is_eos.long() == 0).sum(1)  # tokens with no EOS strictly before them


def completion_mask(lengths: Tensor, width: int) -> Tensor:
    """True on the first `lengths` of `width` tokens, EOS included: bool [rows, width]."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


@dataclass(frozen=True)
class Rollout:
    """Sampled completions. Rows are group-major: row i answers prompt i // num_generations.

    ids [rows, W] int64: prompt, completion, padding; prompt_lengths, completion_lengths [rows] int64, the latter with
    EOS; logprobs [rows, T] float32: of each completion token under the distribution it was sampled from, 0 beyond the
    completion; finished [rows] bool: EOS was sampled within the limit. T is the longest completion.
    """

    ids: Tensor
    prompt_lengths: Tensor
    completion_lengths: Tensor
    logprobs: Tensor
    finished: Tensor

    @property
    def lengths(self) -> Tensor:
        """[rows] int64, tokens of prompt and completion."""
        return self.prompt_lengths + self.completion_lengths

    @property
    def completion_mask(self) -> Tensor:
        """[rows, T] bool, True up to and including EOS."""
        return completion_mask(self.completion_lengths, self.logprobs.shape[1])

    @property
    def completion_ids(self) -> Tensor:
        """[rows, T] int64, 0 beyond the completion."""
        columns = self.prompt_lengths[:, None] + torch.arange(self.logprobs.shape[1], device=self.ids.device)
        ids = self.ids.gather(1, columns.clamp(max=self.ids.shape[1] - 1))
        return ids.masked_fill(~self.completion_mask, 0)

    def __getitem__(self, rows) -> "Rollout":
        """Some rows (a slice, indices or a mask), without columns that are padding in all of them."""
        some = Rollout(**{name: tensor[rows] for name, tensor in vars(self).items()})
        width, longest = (max(of.tolist(), default=0) for of in (some.lengths, some.completion_lengths))
        return replace(some, ids=some.ids[:, :width], logprobs=some.logprobs[:, :longest])


def right_pad(rows: list[list], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of numbers, such as token ids, as a tensor [rows, longest] with zeros behind each; their lengths [rows]."""
    longest = max(map(len, rows))
    numbers = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    return numbers, torch.tensor([len(row) for row in rows], device=device)


def make_rollout(
    policy: "Policy", prompts: list[list[int]], completion_ids: Tensor, lengths: Tensor, logprobs: Tensor
) -> Rollout:
    """A rollout of these completions, rows / prompts of each prompt, as wide as the longest. completion_ids int64 and
    logprobs float32 are [rows, T or more], with anything behind a completion's tokens; lengths [rows] int64."""
    longest, group = int(lengths.max()), len(lengths) // len(prompts)
    prompt_ids, prompt_lengths = (x.repeat_interleave(group, dim=0) for x in right_pad(prompts, lengths.device))
    ends = prompt_lengths + lengths
    width = int(ends.max())
    column = torch.arange(width, device=ends.device)
    of_completion = column - prompt_lengths[:, None]
    completed = completion_ids.gather(1, of_completion.clamp(0, longest - 1))
    ids = torch.where(of_completion < 0, F.pad(prompt_ids, (0, width - prompt_ids.shape[1])), completed)
    last = completion_ids.gather(1, lengths[:, None] - 1)[:, 0]
    finished = torch.isin(last, torch.tensor(policy.eos_ids, device=last.device))
    logprobs = logprobs[:, :longest].masked_fill(~completion_mask(lengths, longest), 0.0)
    return Rollout(ids.masked_fill(column >= ends[:, None], policy.pad_id), prompt_lengths, lengths, logprobs, finished)


def concatenate(rollouts: list[Rollout]) -> Rollout:
    """One rollout of all rows, padded to the widest."""

    def joined(name: str) -> Tensor:
        pieces = [getattr(r, name) for r in rollouts]
        if pieces[0].dim() == 2:
            widest = max(piece.shape[1] for piece in pieces)
            pieces = [F.pad(piece, (0, widest - piece.shape[1])) for piece in pieces]
        return torch.cat(pieces)

    return Rollout(**{name: joined(name) for name in vars(rollouts[0])})


@dataclass(frozen=True)
class Batch:
    """What the loss of one step is made of; all but `rollout` is [rows, T] and constant.

    loss_mask bool: the tokens that train; ref_logprobs with a reference, values and returns with a value head,
    old_logprobs (the policy's before the first of several updates) with more than one, else None.
    """

    rollout: Rollout
    advantages: Tensor
    loss_mask: Tensor
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    old_logprobs: Tensor | None = None

    def __getitem__(self, rows: Tensor) -> "Batch":
        """Some rows, without columns that are padding in all of them."""
        rollout, (_, *others) = self.rollout[rows], vars(self).values()
        width = rollout.logprobs.shape[1]
        return Batch(rollout, *(None if value is None else value[rows, :width] for value in others))


@dataclass(frozen=True)
class Minibatch:
    """The rows of one optimizer step, as micro-batches of row indices. counts: what `aggregate` divides by."""

    micro_batches: tuple[Tensor, ...]
    counts: dict[str, int]


def plan_minibatches(
    batch: Batch, config: TrainConfig, packed: bool = False, world: OneProcess = ALONE
) -> list[Minibatch]:
    """The mini-batches of all epochs: the rows in a new random order each time, cut into micro-batches (`batches_of`)
    of those that train; the others still count as rows."""
    train = rows_that_train(batch, config)
    planned = []
    for _ in range(config.inner_epochs):
        order = torch.randperm(len(train)).to(train.device)
        for rows in order.tensor_split(config.minibatches):
            tokens = int(batch.loss_mask[rows].sum())
            counts = {"rows": len(rows), "tokens": tokens, "max_new_tokens": config.max_new_tokens}
            together = batches_of(rows[train[rows]], batch.rollout, config, packed, world)
            planned.append(Minibatch(together, counts))
    return planned


def rows_that_train(batch: Batch, config: TrainConfig) -> Tensor:
    """Rows whose loss has a gradient, bool [rows]: without KL and value loss, one of zero advantage adds exactly 0."""
    if batch.values is not None or config.kl_coef:
        return torch.ones_like(batch.rollout.finished)
    return (batch.advantages * batch.loss_mask).ne(0).any(1)


def batches_of(
    rows: Tensor, rollout: Rollout, config: TrainConfig, packed: bool, world: OneProcess = ALONE
) -> tuple[Tensor, ...]:
    """These rows of the rollout, int64 [n], in micro-batches of `config.micro_batch_tokens`.

    packed: for a pass that leaves out padding and computes a prompt once for all its answers in a micro-batch
    (`rlcourse.exact`). So those stay together, where a padded pass wants rows of one length.
    """
    if not packed:
        return micro_batches(rows, rollout.lengths, config.micro_batch_tokens, world)

    def cut(rows: Tensor) -> list[int]:
        """As many rows each as fit, in this order, but a longer one goes alone. A row is its answer's tokens, and the
        first of its group in a micro-batch its prompt's, too."""
        counts, tokens, before = [], 0, None
        lengths = rollout.prompt_lengths[rows].tolist(), rollout.completion_lengths[rows].tolist()
        groups = (rows // config.num_generations).tolist()  # rows are group-major
        for group, prompt, answer in zip(groups, *lengths, strict=True):
            tokens += answer if group == before else prompt + answer
            if counts and tokens <= config.micro_batch_tokens:
                counts[-1] += 1
            else:
                counts.append(1)
                tokens = prompt + answer
            before = group
        return counts

    return world.split_rows(rows.sort().values, cut)


def micro_batches(rows: Tensor, lengths: Tensor, most_tokens: int, world: OneProcess = ALONE) -> tuple[Tensor, ...]:
    """For a pass with padding: the rows (indices int64 [n] into lengths) in order of length, cut by `rows_together`; of
    several ranks those of this one, maybe none. All ranks call it."""
    rows = rows[lengths[rows].argsort(stable=True)]
    return world.split_rows(rows, lambda some: rows_together(lengths[some].tolist(), most_tokens))


def rows_together(lengths: list[int], most_tokens: int) -> list[int]:
    """How many rows each micro-batch has, of rows with these lengths, the shortest first.

    n rows padded to their longest are n x longest tokens: `most_tokens` at most, but a longer row goes alone. The
    fewest micro-batches that this allows, and of such cuts the one with the fewest tokens.
    """
    best = [(0, 0, 0)]  # of the first n rows: micro-batches, tokens, and how many rows the last micro-batch has
    most = [0]  # by number of micro-batches: how many of the first rows they can hold
    for n, longest in enumerate(lengths, start=1):
        first = n - min(n, max(1, most_tokens // longest))  # where the last micro-batch may begin, or later, as long
        before = best[first][0]  # as those before it are no more
        found = min((best[m][1] + (n - m) * longest, n - m) for m in range(first, most[before] + 1))
        best.append((before + 1, *found))
        most[before + 1 :] = [n]
    counts, left = [], len(lengths)
    while left:
        counts.append(best[left][2])
        left -= counts[-1]
    return counts[::-1]
