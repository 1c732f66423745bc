"""The recorded runs of lesson 03, three seeds each: `python -m rlcourse.course.lessons.lesson03 [NAMES...]`.

`64x2` to `2x64` train GRPO with 128 rows a step, split into prompts x answers in different ways; `dynamic` is 16x8 with
dynamic sampling. `noise` measures how much of a gradient is signal at each split, before and after some training.
`bonus_normalized` and `bonus_centered` are the loop of the lesson, 4x8, with a thousandth of a point for brevity, where
the advantage is divided by the deviation of its group and where it is not.
Writes the record `lesson03_<name>` of each. A seed takes about a minute on one CPU core.
"""

import sys
from typing import Any

import torch

from rlcourse.batch import Batch
from rlcourse.collect import answer_rewards, collect, rollout_metrics
from rlcourse.config import TrainConfig, make_config
from rlcourse.course.lessons.curve_records import write_curve
from rlcourse.course.lessons.experiment import Experiment
from rlcourse.learner import Learner
from rlcourse.losses import aggregate, token_loss
from rlcourse.step import make_batch, rows_that_train
from rlcourse.tasks import Answer

SEEDS = (0, 1, 2)
SHAPES = {"64x2": (64, 2), "32x4": (32, 4), "16x8": (16, 8), "8x16": (8, 16), "2x64": (2, 64)}
SETTINGS: dict[str, Any] = {"algorithm": "grpo", "lr": 2e-5, "steps": 40}
EVAL_EVERY, VALIDATION = 5, 200
KEPT = ("reward", "length", "groups_without_signal", "grad_norm")
BONUS = {"bonus_normalized": "group_normalized", "bonus_centered": "group_centered"}
BONUS_SETTINGS: dict[str, Any] = {"num_prompts": 4, "num_generations": 8, "lr": 4e-5, "steps": 25}
MOST_BONUS = 0.001  # points, for an answer of no tokens; none for one of all that are allowed
BATCHES, TRAINED = 8, (0, 20)  # independent gradients at each split; training steps before they are measured


def settings_of(name: str) -> dict[str, Any]:
    """The settings of a variant, on top of `SETTINGS`."""
    if name in BONUS:
        return BONUS_SETTINGS | {"advantage": BONUS[name]}
    prompts, generations = SHAPES.get(name, (16, 8))
    return {"num_prompts": prompts, "num_generations": generations, "dynamic_sampling": name == "dynamic"}


def training_run(name: str, seed: int, **overrides) -> dict[str, Any]:
    """Train one variant: validation accuracy, what each step says, and the rows it sampled."""
    experiment = Experiment(make_config(**(SETTINGS | settings_of(name) | {"seed": seed} | overrides)))
    validation, prompts = experiment.task.problems("validation")[:VALIDATION], experiment.prompts
    positions = [0]

    def rows_sampled(_) -> dict[str, int]:
        positions.append(prompts.position)
        return {"rows_sampled": (positions[-1] - positions[-2]) * experiment.config.num_generations}

    return experiment.run(
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


def gradient(learner: Learner, batch: Batch, config: TrainConfig) -> torch.Tensor:
    """The gradient of GRPO's loss on a batch, at the policy that sampled it, as one vector.

    Rows of advantage 0 add nothing and are not computed; they count as rows.
    """
    part = batch[rows_that_train(batch, config).nonzero()[:, 0]]
    mask = part.loss_mask
    logprobs, _ = learner.logprobs_and_values(part.rollout)
    switches = {"surrogate": "clip", "ratio": "token", "clip_low": 0.2, "clip_high": 0.2}
    loss, _ = token_loss(logprobs, part.rollout.logprobs, part.advantages, mask, **switches)
    counts = {"rows": config.rows, "tokens": int(mask.sum()), "max_new_tokens": config.max_new_tokens}
    total = aggregate(loss, mask, "sequence_mean", **counts)
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, list(learner.policy.model.parameters()))])


def signal_share(gradients: torch.Tensor) -> float:
    """How much of the squared length of a gradient is common to all: E[g_i . g_j] / E[g_i . g_i], i != j.

    gradients: [batches, parameters], of independent batches. 1 without noise, 0 for noise alone.
    """
    products = gradients @ gradients.T
    own = products.diagonal()
    n = len(products)
    return (((products.sum() - own.sum()) / (n * (n - 1))) / own.mean()).item()


def noise(seed: int) -> list[dict[str, Any]]:
    """Train 16x8 for the steps of `TRAINED`; at each, the signal share at every split, and of silent groups."""
    experiment = Experiment(make_config(**(SETTINGS | settings_of("16x8") | {"seed": seed})))
    found = []
    for step in range(max(TRAINED) + 1):
        for shape in SHAPES if step in TRAINED else ():
            found.append({"step": step, "shape": shape} | noise_of(shape, experiment))
            print("noise", seed, found[-1], flush=True)
        experiment.train(step)
    return found


def noise_of(shape: str, experiment: Experiment) -> dict[str, float]:
    """The signal share of `BATCHES` gradients at one split, and their mean share of silent groups."""
    config, learner, gradients, silent = make_config(**(SETTINGS | settings_of(shape))), experiment.learner, [], []
    for _ in range(BATCHES):
        completions, _ = collect(learner.policy, experiment.engine, experiment.task, experiment.prompts, config)
        gradients.append(gradient(learner, make_batch(learner, completions), config))
        silent.append(rollout_metrics(completions, config)["groups_without_signal"])
    return {"signal": signal_share(torch.stack(gradients)), "silent": sum(silent) / BATCHES}


def record(name: str) -> None:
    """Run every seed and write the record."""
    seeds = {}
    for seed in SEEDS:
        seeds[seed] = {"shapes": noise(seed)} if name == "noise" else training_run(name, seed)
        print(name, seed, seeds[seed].get("evals", "")[-1:], flush=True)
    settings = SETTINGS | ({"batches": BATCHES} if name == "noise" else settings_of(name))
    write_curve(f"lesson03_{name}", [name], settings, seeds)


if __name__ == "__main__":
    for name in sys.argv[1:] or (*SHAPES, "dynamic", "noise", *BONUS):
        record(name)
