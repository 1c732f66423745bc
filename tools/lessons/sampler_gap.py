"""A sampler that lags behind the policy: `python -m tools.lessons.sampler_gap`.

The engine takes over the policy's weights every `LAG` steps only, as where sampling and training run side by side.
Training then learns from answers that are not quite the policy's own; truncated importance sampling weighs them. Writes
the record `sampler_gap`.
"""

import itertools
import sys
from typing import Any

import torch

from rlcourse.config import make_config
from rlcourse.course.lessons.experiment import Experiment
from rlcourse.rollout import make_engine
from rlcourse.rollout.torch_engine import TorchEngine
from tools.lessons.recording import measured, record_variants

SEEDS = (0, 1, 2)
LAG = 8  # steps for which the lagging sampler keeps its weights
SETTINGS: dict[str, Any] = {"algorithm": "dr_grpo", "steps": 80, "lr": 1e-4}
VARIANTS = {
    "in step": {"sampler_correction": "off"},
    "lagging, off": {"sampler_correction": "off"},
    "lagging, token": {"sampler_correction": "token"},
    "lagging, sequence": {"sampler_correction": "sequence"},
}
EVAL_EVERY, EVAL_PROBLEMS = 5, 300  # steps between evaluations; validation problems in each


def lag_behind(engine: TorchEngine, lag: int) -> None:
    """Let the engine take over the policy's weights at the first of every `lag` rollouts alone."""
    take_over, rollouts = engine.decoder.sync, itertools.count()

    def sync() -> None:
        if next(rollouts) % lag == 0:
            take_over()

    engine.decoder.sync = sync


def run(variant: str, seed: int, **overrides) -> dict[str, Any]:
    """Train with one seed: evaluations, by an engine that is in step, and the widest gap of any step, mean and maximum
    over its tokens."""
    experiment = Experiment(make_config(**(SETTINGS | VARIANTS[variant] | {"seed": seed} | overrides)))
    sampler, in_step = experiment.engine, make_engine(experiment.policy, "fast", torch.float32)
    if variant.startswith("lagging"):
        lag_behind(sampler, LAG)
    problems = experiment.task.problems("validation")[:EVAL_PROBLEMS]

    def evaluate() -> dict[str, float]:
        experiment.engine = in_step
        accuracy = experiment.evaluate(problems)["accuracy"]
        experiment.engine = sampler
        return {"accuracy": accuracy}

    trained = measured(experiment, EVAL_EVERY, evaluate, ("mismatch_mean", "mismatch_max"))
    return {"evals": trained["evals"]} | {name: max(values) for name, values in trained["steps"].items()}


if __name__ == "__main__":
    record_variants("sampler_gap", SETTINGS, sys.argv[1:] or list(VARIANTS), SEEDS, run)
