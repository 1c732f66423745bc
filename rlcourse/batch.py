"""What flows through a training step: sampled completions, judged completions, and the batch that trains.

One layout for all. Each row of `ids` is a prompt, its completion, then padding; two lengths a row say which is which.
Values by token are [rows, T] and aligned with the completions: column t belongs to completion token t. Nothing here is
ever modified.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcourse.tasks import Answer, Attempt, Problem, Task

if TYPE_CHECKING:
    from rlcourse.policy import Policy


def completion_lengths(completion_ids: Tensor, eos_ids: Iterable[int]) -> Tensor:
    """Tokens of each completion, up to and including its first EOS; all of them if there is none.

    completion_ids: [rows, T] int64; eos_ids: the ids that end a completion. Returns [rows] int64.
    """
    is_eos = torch.isin(completion_ids, torch.tensor(list(eos_ids), device=completion_ids.device))
    return (is_eos.cumsum(1) - is_eos.long() == 0).sum(1)  # tokens with no EOS strictly before them


def completion_mask(lengths: Tensor, width: int) -> Tensor:
    """Which of `width` tokens a row's completion has: True on the first `lengths`, EOS included. bool [rows, width]."""
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
    def tensors(self) -> dict[str, Tensor]:
        """The fields by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

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
        chosen = {name: tensor[rows] for name, tensor in self.tensors.items()}
        width = max((chosen["prompt_lengths"] + chosen["completion_lengths"]).tolist(), default=0)
        longest = max(chosen["completion_lengths"].tolist(), default=0)
        columns = {"ids": width, "logprobs": longest}
        return Rollout(
            **{name: tensor[:, : columns[name]] if name in columns else tensor for name, tensor in chosen.items()}
        )


def right_pad(rows: list[list], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of numbers, such as token ids, as a tensor [rows, longest] with zeros behind each; their lengths [rows]."""
    longest = max(map(len, rows))
    numbers = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    return numbers, torch.tensor([len(row) for row in rows], device=device)


def join_rows(
    prompt_ids: Tensor, prompt_lengths: Tensor, completion_ids: Tensor, lengths: Tensor, pad_id: int
) -> tuple[Tensor, Tensor]:
    """Prompts and their completions as `Rollout` has them: (ids [rows, W], prompt_lengths [rows]).

    prompt_ids [prompts, P] and completion_ids [rows, T] with anything behind their tokens; prompt_lengths [prompts],
    each for a group of rows / prompts; lengths [rows].
    """
    group = len(completion_ids) // len(prompt_ids)
    prompt_lengths = prompt_lengths.repeat_interleave(group)
    ends = prompt_lengths + lengths
    width = int(ends.max())
    ids = F.pad(prompt_ids, (0, width - prompt_ids.shape[1])).repeat_interleave(group, dim=0)
    column = torch.arange(width, device=ids.device)
    of_completion = column - prompt_lengths[:, None]
    completed = completion_ids.gather(1, of_completion.clamp(0, completion_ids.shape[1] - 1))
    return torch.where(of_completion < 0, ids, completed).masked_fill(column >= ends[:, None], pad_id), prompt_lengths


def make_rollout(
    policy: "Policy", prompts: list[list[int]], completion_ids: Tensor, lengths: Tensor, logprobs: Tensor
) -> Rollout:
    """A rollout of these completions, as wide as the longest.

    completion_ids [rows, T or more] int64, logprobs as many float32, with anything behind a completion's tokens;
    lengths [rows] int64.
    """
    longest = int(lengths.max())
    completion_ids, logprobs = completion_ids[:, :longest], logprobs[:, :longest]
    ids, prompt_lengths = join_rows(*right_pad(prompts, lengths.device), completion_ids, lengths, policy.pad_id)
    last = completion_ids.gather(1, lengths[:, None] - 1)[:, 0]
    return Rollout(
        ids=ids,
        prompt_lengths=prompt_lengths,
        completion_lengths=lengths,
        logprobs=logprobs.masked_fill(~completion_mask(lengths, longest), 0.0),
        finished=torch.isin(last, torch.tensor(policy.eos_ids, device=last.device)),
    )


def concatenate(rollouts: list[Rollout]) -> Rollout:
    """One rollout of all rows, padded to the widest."""

    def joined(name: str) -> Tensor:
        pieces = [getattr(r, name) for r in rollouts]
        if pieces[0].dim() == 2:
            widest = max(piece.shape[1] for piece in pieces)
            pieces = [F.pad(piece, (0, widest - piece.shape[1])) for piece in pieces]
        return torch.cat(pieces)

    return Rollout(**{name: joined(name) for name in rollouts[0].tensors})


def judge(policy: "Policy", task: Task, problems: list[Problem], rollout: Rollout, training: bool) -> list[Answer]:
    """The answer in each row of a rollout, judged. Rows are group-major, equally many for each problem.

    Raises ValueError if the task's verdicts are not one for each row, with the metrics that it names.
    """
    texts = policy.texts(rollout.completion_ids, rollout.completion_mask)
    lengths, finished = rollout.completion_lengths.tolist(), rollout.finished.tolist()
    asked = [problems[row * len(problems) // len(texts)] for row in range(len(texts))]
    attempts = [Attempt(*row) for row in zip(asked, texts, lengths, finished, strict=True)]
    verdicts = task.judge(attempts, training)
    if len(verdicts) != len(attempts):
        raise ValueError(f"Task {task.name} gave {len(verdicts)} verdicts on {len(attempts)} attempts.")
    for verdict in verdicts:
        if list(verdict.metrics) != list(task.metrics):
            measured, named = (", ".join(names) or "nothing" for names in (verdict.metrics, task.metrics))
            raise ValueError(f"A verdict of task {task.name} measures {measured}; its metrics are {named}.")
    rows = zip(asked, texts, lengths, finished, verdicts, strict=True)
    return [Answer(*row) for row in rows]


@dataclass(frozen=True)
class Completions:
    """A rollout with what each row answered and the reward that it earned: rewards [rows] float32."""

    rollout: Rollout
    answers: list[Answer]
    rewards: Tensor

    def __getitem__(self, rows: Tensor) -> "Completions":
        """The rows with these indices."""
        return Completions(self.rollout[rows], [self.answers[i] for i in rows.tolist()], self.rewards[rows])


def join_completions(parts: list[Completions]) -> Completions:
    """All rows, one part after the other."""
    answers = [answer for part in parts for answer in part.answers]
    return Completions(concatenate([p.rollout for p in parts]), answers, torch.cat([p.rewards for p in parts]))


@dataclass(frozen=True)
class Batch:
    """What the loss of one step is made of; all but `rollout` is [rows, T] and constant.

    advantages float32; loss_mask bool: the tokens that train; ref_logprobs with a reference, values and returns with a
    value head, else None.
    """

    rollout: Rollout
    advantages: Tensor
    loss_mask: Tensor
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None

    def __getitem__(self, rows: Tensor) -> "Batch":
        """Some rows, without columns that are padding in all of them."""
        rollout = self.rollout[rows]
        width = rollout.logprobs.shape[1]
        others = {f.name: getattr(self, f.name) for f in fields(self)[1:]}
        return Batch(rollout, **{n: None if value is None else value[rows, :width] for n, value in others.items()})
