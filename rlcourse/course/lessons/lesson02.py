"""Lesson 02, PPO with one safeguard removed: `python -m rlcourse.course.lessons.lesson02 [VARIANTS...]`.

Every rollout serves eight optimizer steps, so that safeguards have something to guard against; variants called `fast`
have twice the learning rate. Writes `data/curves/lesson02_<variant>.json`. A seed takes one minute on one CPU core.
"""

import sys
import time
from typing import Any

import torch

from rlcourse.config import TrainConfig, make_config
from rlcourse.course.lessons import curve_records as lessons
from rlcourse.evaluation import answer_problems, summarize
from rlcourse.experience import Experience, PromptOrder, add_advantages, collect, in_micro_batches
from rlcourse.measure.profiling import PhaseTimer
from rlcourse.policy import Policy, ValueHead, find_device, frozen_copy, load_policy
from rlcourse.rollout import make_engine
from rlcourse.tasks import load_task
from rlcourse.trainer import rollout_metrics
from rlcourse.update import Update

SEEDS = (0, 1, 2)
SETTING: dict[str, Any] = {
    "algorithm": "ppo",
    "num_prompts": 8,
    "num_generations": 8,
    "steps": 16,
    "inner_epochs": 2,
    "minibatches": 4,
    "lr": 4e-5,
    "reference": True,
}
EVERYTHING = 1e9  # a limit that nothing reaches
REMOVED: dict[str, dict[str, Any]] = {
    "all": {},
    "no_clip": {"clip_low": EVERYTHING, "clip_high": EVERYTHING},
    "no_critic": {"value_coef": 0.0, "value_lr": 0.0, "gae_lambda": 1.0},  # V stays 0: every token gets the reward
    "no_norm": {"max_grad_norm": EVERYTHING},
}
FAST = {"lr": 8e-5}  # twice the default
VARIANTS = REMOVED | {f"fast_{name}": FAST | REMOVED[name] for name in ("all", "no_clip")}
KEPT = ("reward", "accuracy", "length", "truncated", "entropy", "kl", "clip_fraction", "value_loss", "grad_norm")
EVAL_EVERY, EVAL_PROBLEMS = 4, 150  # steps between evaluations; validation problems in each


@torch.no_grad()
def moved(policy: Policy, experience: Experience, config: TrainConfig) -> dict[str, float]:
    """How far a whole update moved the policy on its own rollout: share of ratios off by over 0.2, and the largest."""
    mask = experience.rollout.completion_mask
    new, _ = in_micro_batches(policy.model, experience.rollout, config)
    ratio = (new - experience.rollout.logprobs)[mask].exp()
    return {"outside": ((ratio - 1).abs() > 0.2).float().mean().item(), "largest_ratio": ratio.max().item()}


def run(variant: str, seed: int, **overrides) -> dict[str, Any]:
    """Train with one seed: evaluations, and what was measured in each step."""
    config = make_config(**(SETTING | VARIANTS[variant] | {"seed": seed} | overrides))
    torch.manual_seed(seed)
    policy, task = load_policy("embedded", find_device(config)), load_task("minigsm")
    reference = frozen_copy(policy.model)
    critic = ValueHead(policy.model.config.hidden_size).to(policy.device)
    engine, update = make_engine(policy, "graph", torch.float32), Update(policy, critic, config)
    order, timer = PromptOrder(task.problems("train"), seed), PhaseTimer(policy.device)
    steps, evals = [], []
    for step in range(config.steps + 1):
        if step % EVAL_EVERY == 0:
            problems = task.problems("validation")[:EVAL_PROBLEMS]
            answers = answer_problems(policy, engine, task, problems, config.max_new_tokens)
            evals.append({"step": step, "accuracy": summarize(answers)["accuracy"]})
        if step < config.steps:
            experience = collect(policy, engine, task, order, config, timer)
            add_advantages(experience, policy, reference, critic, config)
            metrics = rollout_metrics(experience) | update(experience, step)
            steps.append({name: metrics[name] for name in KEPT} | moved(policy, experience, config))
    return {"seed": seed, "evals": evals, "steps": {name: [row[name] for row in steps] for name in steps[0]}}


def record(variant: str) -> None:
    """Train with every seed and write `data/curves/lesson02_<variant>.json`."""
    seeds = []
    for seed in SEEDS:
        start = time.perf_counter()
        seeds.append(run(variant, seed))
        curve = [round(row["accuracy"], 3) for row in seeds[-1]["evals"]]
        print(variant, seed, curve, f"{time.perf_counter() - start:.0f} s", flush=True)
    lessons.save("lesson02", [variant], SETTING | VARIANTS[variant], seeds)


def load(variant: str) -> dict[str, Any]:
    """The record of a variant; see `lessons.load`."""
    return lessons.load("lesson02", [variant])


if __name__ == "__main__":
    for name in sys.argv[1:] or VARIANTS:
        record(name)
