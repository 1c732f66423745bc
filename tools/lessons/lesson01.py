"""The runs of lesson 01: what a constant added to every reward does, with and without a baseline, five seeds each.

`python -m tools.lessons.lesson01 [VARIANTS...]` trains on the embedded task with few completions a step and
writes the record `lesson01_<variant>` of each.
"""

import sys
from typing import Any
from unittest import mock

from rlcourse.tasks.verify import Readings
from tools.lessons.curves import train_and_read
from tools.lessons.recording import record_seeds

SEEDS = (0, 1, 2, 3, 4)
FEW = {
    "num_prompts": 4,
    "num_generations": 8,
    "steps": 40,
    "eval_every": 5,
    "eval_validation": 200,
    "eval_problems": 1,  # the validation curve is what is recorded
    "pass_k": 0,
    "save_every": 0,
}


VARIANTS: dict[str, dict[str, Any]] = {  # offset: added to the rewards, 1 for a right answer and 0 for any other
    "reinforce": {"algorithm": "reinforce", "offset": 0.0},
    "reinforce_plus": {"algorithm": "reinforce", "offset": 1.0},
    "reinforce_plus_5": {"algorithm": "reinforce", "offset": 5.0},
    "reinforce_minus": {"algorithm": "reinforce", "offset": -1.0},
    "baseline_plus": {"algorithm": "reinforce_baseline", "offset": 1.0},
    "rloo_plus": {"algorithm": "rloo", "offset": 1.0},
}


def record(variant: str) -> None:
    """Train with every seed: validation accuracy, and the mean reward of each step."""
    setup = FEW | VARIANTS[variant]
    settings, offset = {name: value for name, value in setup.items() if name != "offset"}, setup["offset"]

    def run(seed: int) -> dict[str, Any]:
        with mock.patch.object(Readings, "reward", property(lambda self: self.right + offset)):
            measured = train_and_read(**settings, seed=seed)
        return {key: measured[key] for key in ("evals", "rewards")}

    record_seeds(f"lesson01_{variant}", [variant], setup, SEEDS, run)


if __name__ == "__main__":
    for name in sys.argv[1:] or VARIANTS:
        record(name)
