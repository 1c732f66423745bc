"""A sampler that lags behind the policy, for lesson 15."""

import copy
from collections import deque
from dataclasses import replace

import torch

from rlcourse.batch import Rollout
from rlcourse.policy import Policy
from rlcourse.rollout import make_engine
from rlcourse.sampling import Sampling

COMMON = {"num_prompts": 8, "num_generations": 8, "steps": 36, "lr": 1e-4, "warmup_steps": 1}


class LaggingEngine:
    """An engine that samples with the weights of `lag` updates ago; before that many updates, with the first ones.

    It expects one call of `generate` before each update, as in the trainer.
    """

    exact = False

    def __init__(self, policy: Policy, lag: int):
        self.policy, self.seen = policy, deque(maxlen=lag + 1)
        self.old = replace(policy, model=copy.deepcopy(policy.model))
        self.engine = make_engine(self.old, "fast", torch.float32)

    def generate(
        self, prompts: list[list[int]], num_generations: int, max_new_tokens: int, sampling: Sampling
    ) -> Rollout:
        """See `RolloutEngine`."""
        self.seen.append({name: value.clone() for name, value in self.policy.model.state_dict().items()})
        self.old.model.load_state_dict(self.seen[0])  # the oldest: the deque drops what's older than `lag` updates
        return self.engine.generate(prompts, num_generations, max_new_tokens, sampling)
