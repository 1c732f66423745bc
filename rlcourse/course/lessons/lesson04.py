"""The recorded runs of lesson 04, five seeds each: `python -m rlcourse.course.lessons.lesson04 [KIND [VARIANTS...]]`.

`isolated` shows the length bias of GRPO alone: training in which nothing but the opening of an answer decides what it
earns. `default` and `slow` are ordinary training, at the default settings and with small steps, with neither, one or
both of the deletions that make GRPO Dr. GRPO. Writes `data/curves/lesson04_<kind>_<variant>.json`. A seed takes less
than a minute on a GPU and one to six minutes on one CPU core.
"""

import sys
from typing import Any

import torch

from rlcourse import advantages as adv
from rlcourse.config import TrainConfig, make_config
from rlcourse.course.embedded.demonstrations import THINK
from rlcourse.course.lessons import curve_records as lessons
from rlcourse.evaluation import answer_problems, summarize
from rlcourse.experience import Experience, PromptOrder, add_advantages, collect
from rlcourse.measure.profiling import PhaseTimer
from rlcourse.policy import Policy, find_device, load_policy
from rlcourse.rollout import RolloutEngine, make_engine
from rlcourse.tasks import Problem, load_task
from rlcourse.trainer import rollout_metrics
from rlcourse.update import Update

SEEDS = (0, 1, 2, 3, 4)
NORMALIZED, CENTERED = {"advantage": "group_normalized"}, {"advantage": "group_centered"}
MEAN, CONSTANT = {"aggregation": "sequence_mean"}, {"aggregation": "constant"}

# The length bias in isolation: 16 problems x (4 + 4) answers a step, whose opening decides what they earn.
ISOLATED = {"num_prompts": 16, "num_generations": 8, "max_new_tokens": 96, "steps": 60, "lr": 2e-5}
FATES: dict[str, tuple[dict[str, str], str]] = {  # the switches, and what decides the reward
    "grpo": (NORMALIZED | MEAN, "worked earns 1"),
    "dr_grpo": (CENTERED | CONSTANT, "worked earns 1"),
    "token_mean": (CENTERED | {"aggregation": "token_mean"}, "worked earns 1"),
    "grpo_swapped": (NORMALIZED | MEAN, "filler earns 1"),
    "grpo_coin": (NORMALIZED | MEAN, "a coin"),
}
PROBE_EVERY, PROBES = 5, 32  # steps between two measurements of the lengths; problems in each

# Ordinary training with neither, one or both of the deletions: at the default settings, and with small steps.
SWITCHES: dict[str, dict[str, str]] = {
    "grpo": NORMALIZED | MEAN,
    "no_length": NORMALIZED | CONSTANT,
    "no_std": CENTERED | MEAN,
    "dr_grpo": CENTERED | CONSTANT,
}
DEFAULT: dict[str, Any] = {}
SLOW = {"lr": 1e-5, "steps": 120, "max_new_tokens": 160}
KEPT = ("reward", "length", "length_right", "length_wrong", "truncated", "grad_norm", "groups_without_signal")
EVAL_EVERY = 10  # steps between two evaluations of ordinary training


def forced_prompts(policy: Policy, problems: list[Problem]) -> list[list[int]]:
    """Two prompts a problem whose answer has already begun: with filler, then with the first line of the working."""
    prompts = []
    for problem in problems:
        for opening in (THINK, problem.answer.split("\n")[0]):
            ids = policy.tokenizer(opening + "\n", add_special_tokens=False)["input_ids"]
            prompts.append(policy.prompt(problem.question) + ids)
    return prompts


def fated_rewards(fate: str, problems: int, each: int) -> torch.Tensor:
    """Rewards [problems * 2 * each] that nothing but the opening decides, or a coin; the two openings in turn."""
    worked = torch.arange(2).repeat_interleave(each).repeat(problems).float()
    if fate == "a coin":
        return torch.rand(len(worked)).argsort().lt(len(worked) // 2).float()
    return worked if fate == "worked earns 1" else 1 - worked


def forced_experience(
    policy: Policy, engine: RolloutEngine, problems: list[Problem], fate: str, config: TrainConfig
) -> Experience:
    """One step's training data: half of each group begins with filler, half with working, the rest is sampled."""
    each = config.num_generations // 2
    rollout = engine.generate(forced_prompts(policy, problems), each, config.max_new_tokens, config.sampling)
    rewards = fated_rewards(fate, len(problems), each).to(policy.device)
    of = adv.group_normalized if config.advantage == "group_normalized" else adv.group_centered
    mask = rollout.completion_mask
    advantages = of(rewards, config.num_generations)[:, None] * mask
    return Experience(rollout, problems, [], [], rewards, 1.0, advantages, mask)


@torch.no_grad()
def forced_lengths(policy: Policy, engine: RolloutEngine, problems: list[Problem], limit: int) -> dict[str, float]:
    """Mean tokens of the answers after each opening, and the share that is cut off at `limit`; 4 answers a problem."""
    with torch.random.fork_rng([policy.device] if policy.device.type == "cuda" else []):
        torch.manual_seed(0)
        rollout = engine.generate(forced_prompts(policy, problems), 4, limit, make_config().sampling)
    lengths, finished = rollout.lengths.view(-1, 2, 4).float(), rollout.finished.view(-1, 2, 4).float()
    found = {}
    for i, name in enumerate(("filler", "worked")):
        found[name] = lengths[:, i].mean().item()
        found[f"{name}_cut"] = 1 - finished[:, i].mean().item()
    return found


def isolated_run(variant: str, seed: int, **overrides) -> list[dict[str, float]]:
    """Train with fated rewards; the lengths after each opening, measured every `PROBE_EVERY` steps."""
    switches, fate = FATES[variant]
    config = make_config(**(ISOLATED | switches | {"seed": seed} | overrides))
    torch.manual_seed(seed)
    policy, task = load_policy("embedded", find_device(config)), load_task("minigsm")
    engine, update = make_engine(policy, "graph", torch.float32), Update(policy, None, config)
    order, probes = PromptOrder(task.problems("train"), seed), task.problems("validation")[:PROBES]
    rows = []
    for step in range(config.steps + 1):
        if step % PROBE_EVERY == 0:
            rows.append({"step": step} | forced_lengths(policy, engine, probes, config.max_new_tokens))
        if step < config.steps:
            experience = forced_experience(policy, engine, order.take(config.num_prompts), fate, config)
            metrics = update(experience, step)
            rows[-1].setdefault("grad_norm", metrics["grad_norm"])
    return rows


def ordinary_run(variant: str, seed: int, **settings) -> dict[str, Any]:
    """Train with the switches of `variant`: what the rollouts and evaluations say, and test accuracy by level."""
    config = make_config(**(SWITCHES[variant] | {"seed": seed} | settings))
    torch.manual_seed(seed)
    policy, task = load_policy("embedded", find_device(config)), load_task("minigsm")
    engine, update = make_engine(policy, "graph", torch.float32), Update(policy, None, config)
    order, timer = PromptOrder(task.problems("train"), seed), PhaseTimer(policy.device)
    steps, evals = [], []
    for step in range(config.steps + 1):
        if step % EVAL_EVERY == 0:
            answers = answer_problems(policy, engine, task, task.problems("validation")[:200], config.max_new_tokens)
            forced = forced_lengths(policy, engine, task.problems("validation")[:PROBES], config.max_new_tokens)
            evals.append({"step": step, "accuracy": summarize(answers)["accuracy"]} | forced)
        if step < config.steps:
            experience = collect(policy, engine, task, order, config, timer)
            add_advantages(experience, policy, None, None, config)
            metrics = rollout_metrics(experience) | update(experience, step)
            steps.append({name: metrics[name] for name in KEPT})
    test = summarize(answer_problems(policy, engine, task, task.problems("test"), config.max_new_tokens))
    return {"evals": evals, "test": test, "steps": {name: [row[name] for row in steps] for name in steps[0]}}


SETTINGS = {"isolated": ISOLATED, "default": DEFAULT, "slow": SLOW}


def run(kind: str, variant: str, seed: int) -> dict[str, Any]:
    """One seed of a record."""
    if kind == "isolated":
        return {"evals": isolated_run(variant, seed)}
    return ordinary_run(variant, seed, **SETTINGS[kind])


def record(kind: str, variant: str) -> None:
    """Train with every seed and write `data/curves/lesson04_<kind>_<variant>.json`."""
    seeds = []
    for seed in SEEDS:
        seeds.append({"seed": seed} | run(kind, variant, seed))
        print(kind, variant, seed, [round(row["filler"], 1) for row in seeds[-1]["evals"]], flush=True)
    switches = FATES[variant][0] if kind == "isolated" else SWITCHES[variant]
    lessons.save("lesson04", [kind, variant], SETTINGS[kind] | switches, seeds)


def load(kind: str, variant: str) -> dict[str, Any]:
    """The record of a variant; see `lessons.load`."""
    return lessons.load("lesson04", [kind, variant])


if __name__ == "__main__":
    kinds = sys.argv[1:2] or list(SETTINGS)
    for kind in kinds:
        for variant in sys.argv[2:] or (FATES if kind == "isolated" else SWITCHES):
            record(kind, variant)
