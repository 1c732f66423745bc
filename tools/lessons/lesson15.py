"""The recorded runs of lesson 15, three seeds each: `python -m tools.lessons.lesson15`.

`lag_K` trains the model that ships on answers sampled with the weights of K updates ago; `lag_K_token` weighs their
tokens by truncated importance sampling. Takes names of `RUNS`, or does them all, and writes the record
`lesson15_<name>` of each.
"""

import sys
from typing import Any

from rlcourse.config import make_config
from rlcourse.course.lessons.experiment import Experiment
from rlcourse.course.lessons.lesson15 import COMMON, LaggingEngine
from tools.lessons.recording import measured, record_seeds

SEEDS = (0, 1, 2)
ASKED, EVERY = 200, 6  # validation problems, answered greedily every so many steps
KEPT = ("reward", "entropy", "grad_norm", "mismatch_mean")

RUNS: dict[str, dict[str, Any]] = {
    "lag_0": {"lag": 0},
    **{f"lag_{lag}": {"lag": lag} for lag in (1, 4, 16)},
    **{f"lag_{lag}_token": {"lag": lag, "sampler_correction": "token"} for lag in (1, 4, 16)},
}


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

    return measured(experiment, EVERY, accuracy, KEPT)


def record(name: str) -> None:
    """Run `name` with every seed and write its record."""
    settings = RUNS[name]
    record_seeds(f"lesson15_{name}", [name], COMMON | settings, SEEDS, lambda seed: one_run(seed, **settings))


if __name__ == "__main__":
    for chosen in sys.argv[1:] or RUNS:
        record(chosen)
