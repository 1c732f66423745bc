"""Lesson 02, the loop and PPO with one safeguard removed: `python -m tools.lessons.lesson02 [VARIANTS...]`.

Every rollout serves eight optimizer steps, so that safeguards have something to guard against; variants called `fast`
have twice the learning rate, those called `loop` are of the reader's loop. Writes the record `lesson02_<variant>` of
each. A seed takes one minute on one CPU core.
"""

import sys
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch

from rlcourse.collect import Completions
from rlcourse.config import make_config
from rlcourse.course import changes, loop
from rlcourse.course.lessons.experiment import Experiment
from rlcourse.learner import Learner
from tools.lessons.recording import measured, record_seeds

SEEDS = (0, 1, 2)
SETTING: dict[str, Any] = {
    "algorithm": "ppo",
    "num_prompts": 8,
    "num_generations": 8,
    "steps": 16,
    "inner_epochs": 2,
    "minibatches": 4,
    "lr": 4e-5,
    "kl_coef": 0.0,  # measured
}
EVERYTHING = 1e9  # a limit that nothing reaches
REMOVED: dict[str, dict[str, Any]] = {
    "all": {},
    "no_clip": {"clip_low": EVERYTHING, "clip_high": EVERYTHING},
    "no_critic": {},
    "no_norm": {},
}
CONSTANTS = {  # of the package, while a variant runs
    "no_critic": {"train.VALUE_COEF": 0.0, "learner.GAE_LAMBDA": 1.0},  # V stays 0: every token gets the reward
    "no_norm": {"train.MAX_GRAD_NORM": EVERYTHING},
}
FAST = {"lr": 8e-5}  # twice the default
VARIANTS = REMOVED | {f"fast_{name}": FAST | REMOVED[name] for name in ("all", "no_clip")}
LOOP: dict[str, Any] = {"steps": 10, "updates": 8, "every": 2, "problems": 200}  # as the lesson runs it, seed 0
LOSSES = {"loop_log_prob": loop.loss, "loop_clip": changes.clipped}
KEPT = ("reward", "accuracy", "length", "truncated", "entropy", "kl", "clip_fraction", "value_loss", "grad_norm")
EVAL_EVERY, EVAL_PROBLEMS = 4, 150  # steps between evaluations; validation problems in each


@torch.no_grad()
def moved(learner: Learner, completions: Completions) -> dict[str, float]:
    """How far a whole update moved the policy on its own rollout: share of ratios off by over 0.2, and the largest."""
    rollout = completions.rollout
    new, _ = learner.logprobs_and_values(rollout)
    ratio = (new - rollout.logprobs)[rollout.completion_mask].exp()
    return {"outside": ((ratio - 1).abs() > 0.2).float().mean().item(), "largest_ratio": ratio.max().item()}


def run(variant: str, seed: int, **overrides) -> dict[str, Any]:
    """Train with one seed: evaluations, and what was measured in each step."""
    experiment = Experiment(make_config(**(SETTING | VARIANTS[variant] | {"seed": seed} | overrides)))
    problems = experiment.task.problems("validation")[:EVAL_PROBLEMS]
    with ExitStack() as stack:
        for name, value in CONSTANTS.get(variant, {}).items():
            stack.enter_context(mock.patch(f"rlcourse.{name}", value))
        return measured(
            experiment,
            EVAL_EVERY,
            evaluate=lambda: {"accuracy": experiment.evaluate(problems)["accuracy"]},
            kept=KEPT,
            measure=lambda completions: moved(experiment.learner, completions),
        )


def loop_run(variant: str, seed: int, **overrides) -> dict[str, Any]:
    """Train the loop with one seed: evaluations."""
    with mock.patch.object(loop, "loss", LOSSES[variant]):
        _, log = loop.train(seed=seed, **LOOP | overrides)
    known = [row for row in log if row["accuracy"] is not None]
    return {"evals": [{"step": row["step"], "accuracy": row["accuracy"]} for row in known]}


def record(variant: str) -> None:
    """Train with every seed and write the variant's record."""
    if variant in LOSSES:
        record_seeds(f"lesson02_{variant}", [variant], LOOP, (1, 2, 3, 4), lambda seed: loop_run(variant, seed))
        return
    setup = SETTING | VARIANTS[variant]
    record_seeds(f"lesson02_{variant}", [variant], setup, SEEDS, lambda seed: run(variant, seed))


if __name__ == "__main__":
    for name in sys.argv[1:] or [*VARIANTS, *LOSSES]:
        record(name)
