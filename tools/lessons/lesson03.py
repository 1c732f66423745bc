"""The recorded runs of lesson 03, three seeds each: `python -m tools.lessons.lesson03 [NAMES...]`.

`64x2` to `2x64` train GRPO with 128 rows a step, split into prompts x answers in different ways; `dynamic` is 16x8 with
dynamic sampling. `bonus_normalized` and `bonus_centered` are the loop of the lesson, 4x8, with a thousandth of a point
for brevity, where the advantage is divided by the deviation of its group and where it is not; `bonus_leashed` and
`bonus_short_leash` are the first of these with a KL to the reference in the loss.
Writes the record `lesson03_<name>` of each. A seed takes about a minute on one CPU core.
"""

import sys
from typing import Any

from rlcourse.collect import answer_rewards
from rlcourse.config import TrainConfig, make_config
from rlcourse.course.lessons.experiment import Experiment
from rlcourse.tasks import Answer
from tools.lessons.recording import measured, record_seeds

SEEDS = (0, 1, 2)
SHAPES = {"64x2": (64, 2), "32x4": (32, 4), "16x8": (16, 8), "8x16": (8, 16), "2x64": (2, 64)}
SETTINGS: dict[str, Any] = {"algorithm": "grpo", "lr": 2e-5, "steps": 40}
EVAL_EVERY, VALIDATION = 5, 200
KEPT = ("reward", "length", "groups_without_signal", "grad_norm")
BONUS: dict[str, dict[str, Any]] = {
    "bonus_normalized": {"advantage": "group_normalized"},
    "bonus_centered": {"advantage": "group_centered"},
    "bonus_leashed": {"advantage": "group_normalized", "kl_coef": 0.04},
    "bonus_short_leash": {"advantage": "group_normalized", "kl_coef": 0.4},
}
BONUS_SETTINGS: dict[str, Any] = {"num_prompts": 4, "num_generations": 8, "lr": 4e-5, "steps": 25}
MOST_BONUS = 0.001  # points, for an answer of no tokens; none for one of all that are allowed


def settings_of(name: str) -> dict[str, Any]:
    """The settings of a variant, on top of `SETTINGS`."""
    if name in BONUS:
        return BONUS_SETTINGS | BONUS[name]
    prompts, generations = SHAPES.get(name, (16, 8))
    return {
        "num_prompts": prompts,
        "num_generations": generations,
        "leave_out": "groups" if name == "dynamic" else "nothing",
    }


def training_run(name: str, seed: int, **overrides) -> dict[str, Any]:
    """Train one variant: validation accuracy, what each step says, and the rows it sampled."""
    experiment = Experiment(make_config(**(SETTINGS | settings_of(name) | {"seed": seed} | overrides)))
    validation, prompts = experiment.task.problems("validation")[:VALIDATION], experiment.prompts
    positions = [0]

    def rows_sampled(_) -> dict[str, int]:
        positions.append(prompts.position)
        return {"rows_sampled": (positions[-1] - positions[-2]) * experiment.config.num_generations}

    return measured(
        experiment,
        EVAL_EVERY,
        evaluate=lambda: {"accuracy": experiment.evaluate(validation)["accuracy"]},
        kept=KEPT,
        measure=rows_sampled,
        reward_function=brief_rewards if name in BONUS else answer_rewards,
    )


def brief_rewards(answers: list[Answer], config: TrainConfig) -> list[float]:
    """1 for a right answer, and up to `MOST_BONUS` for brevity, right or wrong."""
    saved = [MOST_BONUS * (1 - answer.tokens / config.max_new_tokens) for answer in answers]
    return [reward + bonus for reward, bonus in zip(answer_rewards(answers, config), saved, strict=True)]


def record(name: str) -> None:
    """Run every seed and write the record."""
    setup = SETTINGS | settings_of(name)
    record_seeds(f"lesson03_{name}", [name], setup, SEEDS, lambda seed: training_run(name, seed))


if __name__ == "__main__":
    for name in sys.argv[1:] or (*SHAPES, "dynamic", *BONUS):
        record(name)
