"""The first half of a training step: sample problems, let the policy answer them, judge and reward its answers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcourse.advantages import has_signal
from rlcourse.batch import Rollout, concatenate
from rlcourse.config import TrainConfig
from rlcourse.measure.timing import PhaseTimer
from rlcourse.policy import Policy
from rlcourse.rollout import RolloutEngine
from rlcourse.settings import shown
from rlcourse.tasks import Answer, Attempt, Problem, Task, prompts_of
from rlcourse.tasks.prompts import PromptSampler
from rlcourse.watch import check_rewards

DYNAMIC_ROUNDS = 4  # rollouts of dynamic sampling in one step at most

RewardFunction = Callable[[list[Answer], TrainConfig], list[float]]


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
    answers = [answer for part in parts for answer in part.answers]
    return Completions(concatenate([p.rollout for p in parts]), answers, torch.cat([p.rewards for p in parts]))


def answer_rewards(answers: list[Answer], config: TrainConfig) -> list[float]:
    """The reward of each answer: its task's, which `Task.judge` gave it."""
    return [answer.verdict.reward for answer in answers]


def collect(
    policy: Policy,
    engine: RolloutEngine,
    task: Task,
    prompts: PromptSampler,
    config: TrainConfig,
    reward_function: RewardFunction = answer_rewards,
    timer: PhaseTimer | None = None,
) -> tuple[Completions, Completions]:
    """Sample, judge and reward `num_prompts` groups: (those that train, all that were sampled), usually the same.

    With dynamic sampling (DAPO, arXiv:2503.14476, section 3.2) groups whose rewards are all equal are replaced by fresh
    ones, for at most `DYNAMIC_ROUNDS` rounds; groups without signal fill the gap that's left.
    """
    timer = timer or PhaseTimer(policy.device)

    def roll_out() -> Completions:
        with timer("rollout"):
            problems = prompts.sample(config.num_prompts)
            asked = prompts_of(task, problems, policy)
            rollout = engine.generate(asked, config.num_generations, config.max_new_tokens, config.sampling)
        with timer("reward"):
            answers = judge(policy, task, problems, rollout, training=True)
            rewards = reward_function(answers, config)
            if reward_function is not answer_rewards:  # those `judge` has checked
                check_rewards(rewards, answers, "reward function")
        rewards = torch.tensor(rewards, dtype=torch.float32, device=rollout.ids.device)
        return Completions(rollout, answers, rewards)

    sampled, rounds = roll_out(), 1
    if not config.dynamic_sampling:
        return sampled, sampled
    while (signal := has_signal(sampled.rewards, config.num_generations)).sum() < config.num_prompts:
        if rounds == DYNAMIC_ROUNDS:
            break
        sampled, rounds = join_completions([sampled, roll_out()]), rounds + 1
    groups = torch.argsort(~signal, stable=True)[: config.num_prompts]  # those with signal first
    members = torch.arange(config.num_generations, device=groups.device)
    return sampled[(groups[:, None] * config.num_generations + members).flatten()], sampled


def judge(policy: Policy, task: Task, problems: list[Problem], rollout: Rollout, training: bool) -> list[Answer]:
    """The answer in each row of a rollout, judged. Rows are group-major, equally many for each problem.

    Raises ValueError if the task's verdicts aren't one for each row, with the metrics that it names, all numbers.
    """
    texts = policy.texts(rollout.completion_ids, rollout.completion_mask)
    lengths, finished = rollout.completion_lengths.tolist(), rollout.finished.tolist()
    asked = [problems[row * len(problems) // len(texts)] for row in range(len(texts))]
    attempts = [Attempt(*row) for row in zip(asked, texts, lengths, finished, strict=True)]
    verdicts = task.judge(attempts, training)
    if len(verdicts) != len(attempts):
        raise ValueError(f"Task {task.name} gave {len(verdicts)} verdicts on {len(attempts)} attempts.")
    for verdict in verdicts:
        if getattr(verdict, "right", None) not in (True, False) or not isinstance(verdict.metrics, dict):
            raise ValueError(
                f"The judge of task {task.name} gave {shown(verdict)}, not a Judgement that is right or wrong: fix it."
            )
        if list(verdict.metrics) != list(task.metrics):
            measured, named = (", ".join(names) or "nothing" for names in (verdict.metrics, task.metrics))
            raise ValueError(f"A verdict of task {task.name} measures {measured}; its metrics are {named}.")
    answers = [Answer(*row) for row in zip(asked, texts, lengths, finished, verdicts, strict=True)]
    check_rewards([verdict.reward for verdict in verdicts], answers, f"judge of task {task.name}")
    return answers
