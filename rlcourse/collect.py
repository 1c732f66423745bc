"""The first half of a training step: sample problems, let the policy answer them, judge and reward its answers."""

from collections.abc import Callable

import torch

from rlcourse.advantages import has_signal
from rlcourse.batch import Completions, join_completions, judge
from rlcourse.config import TrainConfig
from rlcourse.measure.timing import PhaseTimer
from rlcourse.policy import Policy
from rlcourse.rollout import RolloutEngine
from rlcourse.tasks import Answer, Task, mean_metrics, prompts_of
from rlcourse.tasks.prompts import PromptSampler
from rlcourse.watch import check_rewards

DYNAMIC_ROUNDS = 4  # rollouts of dynamic sampling in one step at most

RewardFunction = Callable[[list[Answer], TrainConfig], list[float]]


def answer_rewards(answers: list[Answer], config: TrainConfig) -> list[float]:
    """What each answer earns by the verdict of its task."""
    return [answer.verdict.reward(config) for answer in answers]


def collect(
    policy: Policy,
    engine: RolloutEngine,
    task: Task,
    prompts: PromptSampler,
    config: TrainConfig,
    reward_function: RewardFunction = answer_rewards,
    timer: PhaseTimer | None = None,
) -> tuple[Completions, Completions]:
    """Roll out and judge `num_prompts` groups. Returns (those that train, all that were sampled), usually the same.

    With dynamic sampling (DAPO, arXiv:2503.14476, section 3.2) groups whose rewards are all equal are replaced by fresh
    ones, for at most `DYNAMIC_ROUNDS` rounds; if too few have signal even then, groups without it fill the gap.
    """
    timer = timer or PhaseTimer(policy.device)

    def round_of_groups() -> Completions:
        return roll_out(policy, engine, task, prompts, config, reward_function, timer)

    rounds = [round_of_groups()]
    if not config.dynamic_sampling:
        return rounds[0], rounds[0]
    while _groups_with_signal(rounds, config) < config.num_prompts and len(rounds) < DYNAMIC_ROUNDS:
        rounds.append(round_of_groups())
    sampled = join_completions(rounds)
    return sampled[_rows_with_signal_first(sampled, config)], sampled


def roll_out(
    policy: Policy,
    engine: RolloutEngine,
    task: Task,
    prompts: PromptSampler,
    config: TrainConfig,
    reward_function: RewardFunction,
    timer: PhaseTimer,
) -> Completions:
    """`num_generations` completions of each of `num_prompts` problems, judged and rewarded."""
    with timer("rollout"):
        problems = prompts.sample(config.num_prompts)
        asked = prompts_of(task, problems, policy)
        rollout = engine.generate(asked, config.num_generations, config.max_new_tokens, config.sampling)
    with timer("reward"):
        answers = judge(policy, task, problems, rollout, training=True)
        rewards = torch.tensor(reward_function(answers, config), dtype=torch.float32, device=rollout.ids.device)
        check_rewards(rewards, answers, task.name)
    return Completions(rollout, answers, rewards)


def _groups_with_signal(rounds: list[Completions], config: TrainConfig) -> int:
    return sum(int(has_signal(r.rewards, config.num_generations).sum()) for r in rounds)


def _rows_with_signal_first(sampled: Completions, config: TrainConfig) -> torch.Tensor:
    """The rows of the first `num_prompts` groups, those with signal before the others."""
    signal = has_signal(sampled.rewards, config.num_generations)
    groups = torch.argsort(~signal, stable=True)[: config.num_prompts]
    members = torch.arange(config.num_generations, device=groups.device)
    return (groups[:, None] * config.num_generations + members).flatten()


def rollout_metrics(sampled: Completions, config: TrainConfig) -> dict[str, float | None]:
    """Means over all sampled completions of a step: reward, the task's metrics, lengths of right and wrong answers,
    and the policy's entropy in nats a token, estimated as -log p of the sampled tokens."""
    answers = sampled.answers

    def mean(values: list) -> float | None:
        return sum(values) / len(values) if values else None

    return {
        "reward": sampled.rewards.mean().item(),
        "reward_std": (sampled.rewards - sampled.rewards[0]).std(unbiased=False).item(),
        **mean_metrics(answers),
        "truncated": mean([not a.finished for a in answers]),
        "length": mean([a.tokens for a in answers]),
        "length_right": mean([a.tokens for a in answers if a.right]),
        "length_wrong": mean([a.tokens for a in answers if not a.right]),
        "groups_without_signal": 1.0 - has_signal(sampled.rewards, config.num_generations).float().mean().item(),
        "entropy": -sampled.rollout.logprobs[sampled.rollout.completion_mask].mean().item(),
    }
