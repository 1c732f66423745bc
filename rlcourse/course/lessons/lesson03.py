"""The recorded runs of lesson 03, three seeds each: `python -m rlcourse.course.lessons.lesson03 [NAMES...]`.

`64x2` to `2x64` train GRPO with 128 rows a step, split into prompts x answers in different ways; `dynamic` is 16x8 with
dynamic sampling. `noise` measures how much of a gradient is signal at each split, before and after some training.
Writes `data/curves/lesson03_<name>.json`. A seed takes about a minute on one CPU core.
"""

import sys
from typing import Any

import torch

from rlcourse.config import TrainConfig, make_config
from rlcourse.course.lessons import curve_records as lessons
from rlcourse.evaluation import answer_problems, load_all, summarize
from rlcourse.experience import Experience, PromptOrder, add_advantages, collect, trim
from rlcourse.logprobs import token_logprobs
from rlcourse.losses import aggregate, token_loss
from rlcourse.measure.profiling import PhaseTimer
from rlcourse.policy import Policy
from rlcourse.trainer import rollout_metrics
from rlcourse.update import Update

SEEDS = (0, 1, 2)
SHAPES = {"64x2": (64, 2), "32x4": (32, 4), "16x8": (16, 8), "8x16": (8, 16), "2x64": (2, 64)}
SETTINGS: dict[str, Any] = {"algorithm": "grpo", "lr": 2e-5, "steps": 40}
EVAL_EVERY, VALIDATION = 5, 200
KEPT = ("reward", "length", "groups_without_signal", "grad_norm")
BATCHES, TRAINED = 8, (0, 20)  # independent gradients at each split; training steps before they are measured


def settings_of(name: str) -> dict[str, Any]:
    """The settings of a variant, on top of `SETTINGS`."""
    prompts, generations = SHAPES.get(name, (16, 8))
    return {"num_prompts": prompts, "num_generations": generations, "dynamic_sampling": name == "dynamic"}


def training_run(name: str, seed: int, **overrides) -> dict[str, Any]:
    """Train one variant: validation accuracy, what each step says, and the rows it sampled."""
    config = make_config(**(SETTINGS | settings_of(name) | {"seed": seed} | overrides))
    torch.manual_seed(seed)
    policy, engine, task = load_all(config)
    update, order, timer = (
        Update(policy, None, config),
        PromptOrder(task.problems("train"), seed),
        PhaseTimer(policy.device),
    )
    validation, steps, evals = task.problems("validation")[:VALIDATION], [], []
    for step in range(config.steps + 1):
        if step % EVAL_EVERY == 0:
            answers = answer_problems(policy, engine, task, validation, config.max_new_tokens)
            evals.append({"step": step, "accuracy": summarize(answers)["accuracy"]})
        if step < config.steps:
            before = order.position
            experience = collect(policy, engine, task, order, config, timer)
            add_advantages(experience, policy, None, None, config)
            metrics = rollout_metrics(experience) | update(experience, step)
            metrics["rows_sampled"] = (order.position - before) * config.num_generations
            steps.append({key: metrics[key] for key in (*KEPT, "rows_sampled")})
    return {"evals": evals, "steps": {key: [row[key] for row in steps] for key in steps[0]}}


def gradient(policy: Policy, batch: Experience, config: TrainConfig) -> torch.Tensor:
    """The gradient of GRPO's loss on a batch, at the policy that sampled it, as one vector.

    Rows of advantage 0 add nothing and are not computed; they count as rows.
    """
    rows = batch.advantages.ne(0).any(1).nonzero()[:, 0]
    rollout = trim(batch.rollout[rows])
    mask, advantages = rollout.completion_mask, batch.advantages[rows, : rollout.completion_ids.shape[1]]
    logprobs, _, _ = token_logprobs(policy.model, rollout, config.sampling, config.logprob_chunk)
    switches = {"surrogate": "clip", "ratio": "token", "clip_low": 0.2, "clip_high": 0.2}
    loss, _ = token_loss(logprobs, rollout.logprobs, advantages, mask, **switches)
    counts = {"rows": config.rows, "tokens": int(mask.sum()), "max_new_tokens": config.max_new_tokens}
    total = aggregate(loss, mask, "sequence_mean", **counts)
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, list(policy.model.parameters()))])


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
    config = make_config(**(SETTINGS | settings_of("16x8") | {"seed": seed}))
    torch.manual_seed(seed)
    policy, engine, task = load_all(config)
    update, order, timer = (
        Update(policy, None, config),
        PromptOrder(task.problems("train"), seed),
        PhaseTimer(policy.device),
    )
    found = []
    for step in range(max(TRAINED) + 1):
        for shape in SHAPES if step in TRAINED else ():
            split, gradients, silent = make_config(**(SETTINGS | settings_of(shape))), [], []
            for _ in range(BATCHES):
                batch = collect(policy, engine, task, order, split, timer)
                add_advantages(batch, policy, None, None, split)
                gradients.append(gradient(policy, batch, split))
                silent.append(1 - batch.groups_with_signal)
            share = signal_share(torch.stack(gradients))
            found.append({"step": step, "shape": shape, "signal": share, "silent": sum(silent) / BATCHES})
            print("noise", seed, found[-1], flush=True)
        experience = collect(policy, engine, task, order, config, timer)
        add_advantages(experience, policy, None, None, config)
        update(experience, step)
    return found


def record(name: str) -> None:
    """Run every seed and write `data/curves/lesson03_<name>.json`."""
    seeds = []
    for seed in SEEDS:
        run = {"shapes": noise(seed)} if name == "noise" else training_run(name, seed)
        seeds.append({"seed": seed} | run)
        print(name, seed, run.get("evals", "")[-1:], flush=True)
    settings = SETTINGS | ({"batches": BATCHES} if name == "noise" else settings_of(name))
    lessons.save("lesson03", [name], settings, seeds)


def load(name: str) -> dict[str, Any]:
    """The record of a variant; see `lessons.load`."""
    return lessons.load("lesson03", [name])


if __name__ == "__main__":
    for name in sys.argv[1:] or (*SHAPES, "dynamic", "noise"):
        record(name)
