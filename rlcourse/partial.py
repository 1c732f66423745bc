"""Partial rollouts: the longest answers do not hold up a step, they go on in the next (Kimi k1.5, arXiv:2501.12599).

An answer grows by at most `partial_rollout_tokens` in one rollout. What has not ended waits, with its tokens, their
log-probs and the version of the weights that sampled each, and the weights of the next step go on from there. A group
trains when all its answers are done, and a step trains on the first `num_prompts` groups that are: each rollout begins
as many, until there are enough. A run begins as many groups as its steps train on, so that each trains once and none is
left at the end. A step's `tokens_per_s` counts the tokens that train, whenever they were sampled.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from rlcourse.batch import Rollout, completion_mask, join_rows, right_pad
from rlcourse.config import TrainConfig
from rlcourse.policy import Policy
from rlcourse.rollout import RolloutEngine
from rlcourse.tasks import Problem, Task
from rlcourse.tasks.prompts import PromptSampler


@dataclass
class Answer:
    """What has been sampled of a completion: token ids, of each its log-prob and the steps that the weights had behind
    them that sampled it. ended: by EOS."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    ended: bool = False

    def done(self, config: TrainConfig) -> bool:
        return self.ended or len(self.tokens) >= config.max_new_tokens


@dataclass
class Group:
    """The answers to one prompt. position: where its problem stands in the order of problems."""

    position: int
    prompt: list[int]
    answers: list[Answer]

    def done(self, config: TrainConfig) -> bool:
        return all(answer.done(config) for answer in self.answers)


def roll_out_partly(
    policy: Policy, engine: RolloutEngine, task: Task, prompts: PromptSampler, config: TrainConfig
) -> tuple[list[Problem], Rollout]:
    """The next `num_prompts` groups that train, in the order in which they were begun: their problems, and the rollout
    with the versions of its tokens. `prompts.waiting` holds the others that have been begun."""
    version = (prompts.position - len(prompts.waiting)) // config.num_prompts  # each step has trained on as many
    while len(ready := [g for g in prompts.waiting if g.done(config)]) < config.num_prompts:
        _begin(policy, task, prompts, config)
        _grow(engine, [a for g in prompts.waiting for a in _open(g, config)], config, version)
    ready = ready[: config.num_prompts]
    prompts.waiting = [g for g in prompts.waiting if all(g is not other for other in ready)]
    return [prompts.at(g.position) for g in ready], _rollout_of(ready, policy)


def _begin(policy: Policy, task: Task, prompts: PromptSampler, config: TrainConfig) -> None:
    """Begin `num_prompts` groups, if the run's steps train on as many more, and as many as this step needs at least."""
    left = config.steps * config.num_prompts - prompts.position
    begun = max(min(config.num_prompts, left), config.num_prompts - len(prompts.waiting))
    for position, problem in enumerate(prompts.sample(max(0, begun)), prompts.position - max(0, begun)):
        prompt = task.prompt(problem, policy)
        prompts.waiting.append(Group(position, prompt, [Answer() for _ in range(config.num_generations)]))


def _open(group: Group, config: TrainConfig) -> Iterable[tuple[list[int], Answer]]:
    return [(group.prompt, answer) for answer in group.answers if not answer.done(config)]


def _grow(engine: RolloutEngine, unfinished: list[tuple[list[int], Answer]], config: TrainConfig, version: int) -> None:
    """Sample up to `partial_rollout_tokens` more tokens of each answer, all in one rollout."""
    so_far = [prompt + answer.tokens for prompt, answer in unfinished]
    rollout = engine.generate(so_far, 1, config.partial_rollout_tokens, config.sampling)
    rows = rollout.completion_ids, rollout.logprobs, rollout.completion_lengths, rollout.finished
    for (_, answer), tokens, logprobs, length, ended in zip(unfinished, *(r.tolist() for r in rows), strict=True):
        answer.tokens += tokens[:length]
        answer.logprobs += logprobs[:length]
        answer.versions += [version] * length
        answer.ended = ended


def _rollout_of(groups: list[Group], policy: Policy) -> Rollout:
    answers = [answer for group in groups for answer in group.answers]
    lengths = torch.tensor([len(answer.tokens) for answer in answers])
    mask = completion_mask(lengths, int(lengths.max()))

    def padded(name: str, dtype: torch.dtype) -> torch.Tensor:
        values = torch.tensor([value for answer in answers for value in getattr(answer, name)], dtype=dtype)
        return torch.zeros(mask.shape, dtype=dtype).masked_scatter(mask, values).to(policy.device)

    lengths = lengths.to(policy.device)
    prompts = right_pad([group.prompt for group in groups], policy.device)
    ids, prompt_lengths = join_rows(*prompts, padded("tokens", torch.int64), lengths, policy.pad_id)
    ended = torch.tensor([answer.ended for answer in answers], device=policy.device)
    logprobs, versions = padded("logprobs", torch.float32), padded("versions", torch.int64)
    return Rollout(ids, prompt_lengths, lengths, logprobs, ended, versions)


def waiting_state(prompts: PromptSampler) -> list[dict[str, Any]]:
    """The groups that wait, for `load_waiting`."""
    return [asdict(group) for group in prompts.waiting]


def load_waiting(state: list[dict[str, Any]], prompts: PromptSampler, steps: int, config: TrainConfig) -> None:
    """Let the groups of a run wait again that has done `steps` steps. Raises ValueError if groups or answers are
    missing."""
    groups = [Group(g["position"], g["prompt"], [Answer(**answer) for answer in g["answers"]]) for g in state]
    begun = prompts.position if config.partial_rollout_tokens else steps * config.num_prompts
    answers = {len(group.answers) for group in groups}
    if len(groups) != begun - steps * config.num_prompts or answers - {config.num_generations}:
        raise ValueError("groups that were begun are missing")
    prompts.waiting = groups
