"""Training runs that are measured from within."""

from collections.abc import Callable
from typing import Any

import torch

from rlcourse.collect import Completions, RewardFunction, answer_rewards
from rlcourse.config import TrainConfig
from rlcourse.evaluation import answer_problems, load_all, summarize
from rlcourse.learner import Learner
from rlcourse.tasks import Problem
from rlcourse.tasks.prompts import PromptSampler
from rlcourse.train import train_step


class Experiment:
    """The policy of a config with all that trains it."""

    def __init__(self, config: TrainConfig):
        torch.manual_seed(config.seed)
        self.config = config
        self.policy, self.engine, self.task = load_all(config)
        self.learner = Learner(self.policy, config)
        self.prompts = PromptSampler(self.task.problems("train"), config.seed)

    def train(self, step: int, reward_function: RewardFunction = answer_rewards) -> tuple[dict[str, Any], Completions]:
        """Training step number `step` (from 0); see `train_step`."""
        return train_step(self.learner, self.engine, self.task, self.prompts, step, reward_function)

    def evaluate(self, problems: list[Problem]) -> dict[str, float]:
        """What greedy answers to the problems say; see `summarize`."""
        answers = answer_problems(self.policy, self.engine, self.task, problems, self.config.max_new_tokens)
        return summarize(answers)

    def run(
        self,
        every: int,
        evaluate: Callable[[], dict[str, float]],
        kept: tuple[str, ...],
        measure: Callable[[Completions], dict[str, float]] = lambda completions: {},
        reward_function: RewardFunction = answer_rewards,
    ) -> dict[str, Any]:
        """Train for the config's steps.

        Returns evals: what `evaluate` says before the first step, after every `every` steps; steps: for each name in
        `kept` and each that `measure` gives after a step, its value in all steps.
        """
        evals, steps = [], []
        for step in range(self.config.steps + 1):
            if step % every == 0:
                evals.append({"step": step} | evaluate())
            if step < self.config.steps:
                metrics, completions = self.train(step, reward_function)
                steps.append({name: metrics[name] for name in kept} | measure(completions))
        return {"evals": evals, "steps": {name: [row[name] for row in steps] for name in steps[0]}}
