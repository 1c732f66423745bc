"""The runs of lesson 00: what becomes of the sampled answers while the laptop preset trains, three seeds.

`python -m tools.lessons.lesson00 gain [SEEDS...]` counts the kinds of answers (see `gain.py`) along the way
and writes the record `lesson00_gain`. Seeds that are recorded already, with the same setup, are kept.
"""

import sys
from typing import Any

from rlcourse.config import TrainConfig, make_config
from rlcourse.course.lessons.curve_records import load_curve
from rlcourse.course.lessons.experiment import Experiment
from rlcourse.course.lessons.gain import Counts, accuracy, count
from rlcourse.evaluation import answer_problems
from tools.lessons.recording import write_curve

SEEDS = (0, 1, 2)
STEPS = (0, 2, 5, 10, 15, 20, 30, 40, 50, 60)
SAMPLES, SAMPLES_AT_START = 4, 32  # a problem; at the start answers that work are rare
PROBLEMS = 500  # of the validation problems
SETUP = make_config(steps=STEPS[-1]).to_dict() | {
    "samples": SAMPLES,
    "samples_at_start": SAMPLES_AT_START,
    "split": "validation",
}


def sampled(experiment: Experiment, samples: int) -> Counts:
    """Kinds of sampled answers to the validation problems."""
    config, problems = experiment.config, experiment.task.problems("validation")[:PROBLEMS]
    policy, engine, task = experiment.policy, experiment.engine, experiment.task
    answers = answer_problems(policy, engine, task, problems, config.max_new_tokens, config.sampling, samples)
    return count(answer for group in answers for answer in group)


def run(seed: int, at: tuple[int, ...] = STEPS, **settings: Any) -> dict[str, Any]:
    """Train with a seed. Returns evals: at each step in `at` the accuracy of samples and the counts it is made of."""
    experiment, evals = Experiment(make_config(seed=seed, **settings)), []
    for step in range(at[-1] + 1):
        if step in at:
            counts = sampled(experiment, SAMPLES if step else SAMPLES_AT_START)
            evals.append({"step": step, "accuracy": accuracy(counts), "counts": counts})
        if step < at[-1]:
            experiment.train()
    return {"evals": evals}


def is_this_setup(setup: dict[str, Any]) -> bool:
    """Whether a record's setup is `SETUP`. Settings that the record does not know yet must be at their defaults; those
    that are gone had the values that are constants now."""
    known = TrainConfig().to_dict() | {name: value for name, value in setup.items() if name in SETUP}
    return known | {"kl_coef": known["kl_coef"] or None} == SETUP  # it was 0 where there was no reference


def recorded() -> dict[int, dict[str, Any]]:
    """What is recorded with this setup, by seed."""
    try:
        record = load_curve("lesson00_gain")
    except FileNotFoundError:
        return {}
    rows = record["results"] if is_this_setup(record["setup"]) else []
    return {int(row.pop("variant").removeprefix("seed ")): row for row in rows}


if __name__ == "__main__":
    for seed in map(int, sys.argv[2:] or SEEDS):
        seeds = recorded() | {seed: run(seed)}
        print(seed, [(e["step"], round(e["accuracy"], 3)) for e in seeds[seed]["evals"]], flush=True)
        write_curve("lesson00_gain", ["gain"], SETUP, dict(sorted(seeds.items())))
