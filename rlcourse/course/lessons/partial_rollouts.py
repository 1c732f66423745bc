"""What partial rollouts change: `python -m rlcourse.course.lessons.partial_rollouts`.

The embedded model is trained on whole answers, and on answers that grow by `TOKENS` a rollout, with and without
truncated importance sampling for what older weights have sampled. Writes the record `partial_rollouts`.
"""

import sys
from typing import Any

from rlcourse.batch import Completions
from rlcourse.collect import staleness
from rlcourse.config import make_config
from rlcourse.course.lessons.curve_records import record_variants
from rlcourse.course.lessons.experiment import Experiment

SEEDS = (0, 1, 2)
TOKENS = 16
SETTINGS: dict[str, Any] = {"algorithm": "dr_grpo", "steps": 32, "lr": 1e-4, "num_prompts": 8}
VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "partial, off": {"partial_rollout_tokens": TOKENS},
    "partial, token": {"partial_rollout_tokens": TOKENS, "sampler_correction": "token"},
}
EVAL_EVERY, EVAL_PROBLEMS = 16, 250  # steps between evaluations; validation problems in each


def run(variant: str, seed: int, **overrides) -> dict[str, Any]:
    """Train with one seed: evaluations; of each step the mean reward, the length of answers, how old their tokens were
    and how many decode steps it waited for, the longest answer of each of its rollouts."""
    experiment = Experiment(make_config(**(SETTINGS | VARIANTS[variant] | {"seed": seed} | overrides)))
    problems = experiment.task.problems("validation")[:EVAL_PROBLEMS]
    generate, waited, done = experiment.engine.generate, [], []

    def timed(*arguments):
        rollout = generate(*arguments)
        waited.append(rollout.logprobs.shape[1])
        return rollout

    def evaluate() -> dict[str, float]:
        experiment.engine.generate = generate
        accuracy = experiment.evaluate(problems)["accuracy"]
        experiment.engine.generate = timed
        return {"accuracy": accuracy}

    def measure(completions: Completions) -> dict[str, float]:
        late = staleness(completions.rollout, len(done)) or {"staleness_mean": 0.0, "staleness_max": 0.0}
        done.append(sum(waited))
        waited.clear()
        return late | {"decode_steps": done[-1]}

    return experiment.run(EVAL_EVERY, evaluate, ("reward", "length", "truncated", "sampler_ratio_max"), measure)


if __name__ == "__main__":
    setup = SETTINGS | {"partial_rollout_tokens": TOKENS, "eval_problems": EVAL_PROBLEMS}
    record_variants("partial_rollouts", setup, sys.argv[1:] or list(VARIANTS), SEEDS, run)
