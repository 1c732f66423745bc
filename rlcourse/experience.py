"""From a policy to training data: draw problems, roll out, judge, and turn rewards into advantages."""

from dataclasses import dataclass, fields
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from rlcourse import advantages as adv
from rlcourse.config import TrainConfig
from rlcourse.logprobs import token_logprobs
from rlcourse.losses import kl_estimate
from rlcourse.policy import Policy, ValueHead, autocast
from rlcourse.rollout import Rollout, RolloutEngine
from rlcourse.tasks import Problem, Task
from rlcourse.tasks.verify import Verdict, reward

DYNAMIC_ROUNDS = 4  # rollouts of dynamic sampling in one step at most


class PromptOrder:
    """Goes through the problems in a new random order each epoch; its whole state is `position`, problems drawn."""

    def __init__(self, problems: list[Problem], seed: int):
        self.problems, self.seed, self.position = problems, seed, 0

    def take(self, count: int) -> list[Problem]:
        """The next `count` problems."""
        taken = []
        for position in range(self.position, self.position + count):
            epoch, index = divmod(position, len(self.problems))
            taken.append(self.problems[self._permutation(epoch)[index]])
        self.position += count
        return taken

    @lru_cache(maxsize=2)  # noqa: B019 (the object lives as long as the run)
    def _permutation(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(len(self.problems), generator=generator).tolist()


@dataclass
class Experience:
    """One step's training data; rows are group-major.

    problems: one a row; rewards [rows] float32; verdicts and texts: one a row; advantages [rows, T] float32; loss_mask
    [rows, T] bool: the tokens that train; values, returns [rows, T] for PPO, ref_logprobs [rows, T] with a reference,
    else None. groups_with_signal: share of the groups first drawn whose rewards differ.
    """

    rollout: Rollout
    problems: list[Problem]
    texts: list[str]
    verdicts: list[Verdict]
    rewards: Tensor
    groups_with_signal: float
    advantages: Tensor | None = None
    loss_mask: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    ref_logprobs: Tensor | None = None


def collect(
    policy: Policy, engine: RolloutEngine, task: Task, order: PromptOrder, config: TrainConfig, timer
) -> Experience:
    """Roll out `num_prompts` groups and judge them.

    With dynamic sampling (DAPO, arXiv:2503.14476, section 3.2) groups whose rewards are all the same are replaced by
    fresh ones, for a few rounds; what is still missing then is filled with groups without signal.
    """
    first = _judged_rollout(policy, engine, task, order.take(config.num_prompts), config, timer)
    if not config.dynamic_sampling:
        return first
    rounds, found = [first], round(first.groups_with_signal * config.num_prompts)
    while found < config.num_prompts and len(rounds) < DYNAMIC_ROUNDS:
        rounds.append(_judged_rollout(policy, engine, task, order.take(config.num_prompts), config, timer))
        found += round(rounds[-1].groups_with_signal * config.num_prompts)
    return _with_signal_first(rounds, config)


def _judged_rollout(policy, engine, task, problems, config: TrainConfig, timer) -> Experience:
    with timer("rollout"):
        prompts = [policy.prompt(problem.question, task.instruction) for problem in problems]
        rollout = engine.generate(prompts, config.num_generations, config.max_new_tokens, config.sampling)
    with timer("reward"):
        texts = policy.texts(rollout.completion_ids, rollout.completion_mask)
        problems = [problem for problem in problems for _ in range(config.num_generations)]
        verdicts = [task.verify(text, problem.gold) for text, problem in zip(texts, problems, strict=True)]
        scheme = {
            "parser": config.reward_parser,
            "correct": config.reward_correct,
            "format": config.reward_format,
            "neither": config.reward_neither,
        }
        rewards = [reward(v, done, **scheme) for v, done in zip(verdicts, rollout.finished.tolist(), strict=True)]
    rewards = torch.tensor(rewards, device=rollout.finished.device)
    signal = adv.has_signal(rewards, config.num_generations).float().mean().item()
    return Experience(rollout, problems, texts, verdicts, rewards, signal)


def _with_signal_first(rounds: list[Experience], config: TrainConfig) -> Experience:
    """The first `num_prompts` groups of several rollouts, those with signal before the others."""
    rewards = torch.cat([r.rewards for r in rounds])
    signal = adv.has_signal(rewards, config.num_generations)
    groups = torch.argsort(~signal, stable=True)[: config.num_prompts]
    rows = (
        groups[:, None] * config.num_generations + torch.arange(config.num_generations, device=groups.device)
    ).flatten()
    chosen = rows.tolist()

    def pick(name: str) -> list:
        items = [item for r in rounds for item in getattr(r, name)]
        return [items[i] for i in chosen]

    return Experience(
        rollout=concatenate([r.rollout for r in rounds])[rows],
        problems=pick("problems"),
        texts=pick("texts"),
        verdicts=pick("verdicts"),
        rewards=rewards[rows],
        groups_with_signal=rounds[0].groups_with_signal,
    )


def concatenate(rollouts: list[Rollout]) -> Rollout:
    """One rollout of all rows: prompts padded on the left, completions on the right, to the widest."""
    width = max(r.prompt_ids.shape[1] for r in rollouts)
    length = max(r.completion_ids.shape[1] for r in rollouts)

    def joined(name: str) -> Tensor:
        pieces = []
        for r in rollouts:
            value = getattr(r, name)
            if name.startswith("prompt"):
                value = F.pad(value, (width - value.shape[1], 0))
            elif value.dim() == 2:
                value = F.pad(value, (0, length - value.shape[1]))
            pieces.append(value)
        return torch.cat(pieces)

    return Rollout(**{f.name: joined(f.name) for f in fields(Rollout)})


def trim(rollout: Rollout) -> Rollout:
    """The same rollout without columns that are padding in every row."""
    length = int(rollout.lengths.max())
    start = int(rollout.prompt_mask.any(0).long().argmax())
    trimmed = {}
    for name, value in vars(rollout).items():
        if value.dim() == 2:
            value = value[:, start:] if name.startswith("prompt") else value[:, :length]
        trimmed[name] = value
    return Rollout(**trimmed)


@torch.no_grad()
def add_advantages(
    experience: Experience,
    policy: Policy,
    reference: PreTrainedModel | None,
    value_head: ValueHead | None,
    config: TrainConfig,
) -> None:
    """Fill in the reference's log-probs, values and returns where the config asks for them, and the advantages."""
    rollout, rewards = experience.rollout, experience.rewards
    mask = rollout.completion_mask
    experience.loss_mask = mask & rollout.finished[:, None] if config.mask_truncated else mask
    if reference is not None:
        experience.ref_logprobs = in_micro_batches(reference, rollout, config)[0]
    kl = None
    if config.kl_coef and config.kl_in == "reward":
        kl = config.kl_coef * kl_estimate(rollout.logprobs, experience.ref_logprobs, "k1")
    if config.advantage == "gae":
        rewards = adv.token_rewards(rewards, mask) - (0.0 if kl is None else kl)
        experience.values = in_micro_batches(policy.model, rollout, config, value_head)[1] * mask
        estimated, experience.returns = adv.gae(rewards, experience.values, mask, config.gamma, config.gae_lambda)
        experience.advantages = adv.whiten(estimated, mask)
        return
    rewards = rewards - (0.0 if kl is None else kl.sum(1))
    experience.advantages = row_advantages(rewards, config)[:, None] * mask


def row_advantages(rewards: Tensor, config: TrainConfig) -> Tensor:
    """One advantage a completion from one reward a completion: [rows] → [rows]."""
    match config.advantage:
        case "reward":
            return rewards
        case "batch_centered":
            return adv.batch_centered(rewards)
        case "leave_one_out":
            return adv.leave_one_out(rewards, config.num_generations)
        case "group_centered":
            return adv.group_centered(rewards, config.num_generations)
        case "group_normalized":
            return adv.group_normalized(rewards, config.num_generations)


def in_micro_batches(
    model: PreTrainedModel, rollout: Rollout, config: TrainConfig, value_head: ValueHead | None = None
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [rows, T] of a rollout and, with a value head, values [rows, T]; without gradient."""
    logprobs = torch.zeros_like(rollout.logprobs)
    values = None if value_head is None else torch.zeros_like(rollout.logprobs)
    for rows in torch.arange(len(logprobs), device=logprobs.device).split(config.micro_batch_rows):
        piece = trim(rollout[rows])
        length = piece.completion_ids.shape[1]
        with autocast(config.dtype, logprobs.device):
            piece_logprobs, _, hidden = token_logprobs(model, piece, config.sampling, config.logprob_chunk)
        logprobs[rows, :length] = piece_logprobs
        if value_head is not None:
            values[rows, :length] = value_head(hidden)
    return logprobs, values
