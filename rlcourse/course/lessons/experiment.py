"""Training step by step, for runs that are measured from within."""

from typing import Any

import torch

from rlcourse.collect import Completions, RewardFunction, answer_rewards
from rlcourse.config import TrainConfig
from rlcourse.evaluation import answer_problems, load_all, summarize
from rlcourse.learner import Learner
from rlcourse.policy import Policy
from rlcourse.rollout import make_engine
from rlcourse.tasks import Problem
from rlcourse.tasks.prompts import PromptSampler
from rlcourse.train import train_step


class Experiment:
    """The policy of a config, or one that is in memory, with all that trains it. done: steps so far."""

    def __init__(self, config: TrainConfig, policy: Policy | None = None):
        torch.manual_seed(config.seed)
        self.config, self.done = config, 0
        self.policy, self.engine, self.task = load_all(config)
        if policy is not None:
            self.policy, self.engine = policy, make_engine(policy, config.engine, getattr(torch, config.dtype))
        self.learner = Learner(self.policy, config)
        self.prompts = PromptSampler(self.task.problems("train"), config.seed)

    def train(self, reward_function: RewardFunction = answer_rewards) -> tuple[dict[str, Any], Completions]:
        """The next training step; see `train_step`."""
        self.done += 1
        return train_step(self.learner, self.engine, self.task, self.prompts, self.done - 1, reward_function)

    def evaluate(self, problems: list[Problem]) -> dict[str, float]:
        """What greedy answers to the problems say; see `summarize`."""
        answers = answer_problems(self.policy, self.engine, self.task, problems, self.config.max_new_tokens)
        return summarize(answers)
