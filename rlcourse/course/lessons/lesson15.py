"""The recorded runs of lesson 15, three seeds each: `python -m rlcourse.course.lessons.lesson15`.

`lag_K` trains the model that ships on answers sampled with the weights of K updates ago; `lag_K_token` weighs their
tokens by truncated importance sampling. Takes names of `RUNS`, or does them all, and writes the record
`lesson15_<name>` of each.
"""

import copy
import sys
from collections import deque
from dataclasses import replace
from typing import Any

import torch

from rlcourse.batch import Rollout
from rlcourse.config import make_config
from rlcourse.course.lessons.curve_records import record_seeds
from rlcourse.course.lessons.experiment import Experiment
from rlcourse.policy import Policy
from rlcourse.rollout import make_engine
from rlcourse.sampling import Sampling

SEEDS = (0, 1, 2)
COMMON = {"num_prompts": 8, "num_generations": 8, "steps": 36, "lr": 1e-4, "warmup_steps": 1}
ASKED, EVERY = 200, 6  # validation problems, answered greedily every so many steps
KEPT = ("reward", "entropy", "grad_norm", "mismatch_mean")

RUNS: dict[str, dict[str, Any]] = {
    "lag_0": {"lag": 0},
    **{f"lag_{lag}": {"lag": lag} for lag in (1, 4, 16)},
    **{f"lag_{lag}_token": {"lag": lag, "sampler_correction": "token"} for lag in (1, 4, 16)},
}


class LaggingEngine:
    """An engine that samples with the weights of `lag` updates ago, before there are so many with the first ones.

    It is asked for one rollout before each update, as the trainer does.
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
        self.old.model.load_state_dict(self.seen[0])
        return self.engine.generate(prompts, num_generations, max_new_tokens, sampling)


def one_run(seed: int, lag: int, **settings: Any) -> dict[str, Any]:
    """Train with a lag: evals, greedy `accuracy` of the policy as it is now; steps, what each step measured."""
    experiment = Experiment(make_config("laptop", **COMMON | settings, seed=seed, device="cpu"))
    now, experiment.engine = experiment.engine, LaggingEngine(experiment.policy, lag)
    problems = experiment.task.problems("validation")[:ASKED]

    def accuracy() -> dict[str, float]:
        lagging, experiment.engine = experiment.engine, now
        found = experiment.evaluate(problems)["accuracy"]
        experiment.engine = lagging
        return {"accuracy": found}

    return experiment.run(EVERY, accuracy, KEPT)


def record(name: str) -> None:
    """Run `name` with every seed and write its record."""
    settings = RUNS[name]
    record_seeds(f"lesson15_{name}", [name], COMMON | settings, SEEDS, lambda seed: one_run(seed, **settings))


if __name__ == "__main__":
    for chosen in sys.argv[1:] or RUNS:
        record(chosen)
