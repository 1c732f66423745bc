"""The recorded runs of lesson 04: `python -m tools.lessons.lesson04 [KIND [VARIANTS...]]`.

`isolated` shows the length bias of GRPO alone: training in which nothing but the opening of an answer decides what it
earns. `default` and `slow` are ordinary training, 60 steps at the default settings and more with small steps, with
neither, one or both of the deletions that make GRPO Dr. GRPO. All of these have five seeds. `kinds` is the beginning of
`slow` with three, and says what kind of answers the policy writes. Writes the record `lesson04_<kind>_<variant>` of
each. A seed takes less than a minute on a GPU and one to six minutes on one CPU core.
"""

import sys
from typing import Any

import torch

from rlcourse.batch import Rollout
from rlcourse.collect import Completions, RewardFunction
from rlcourse.config import TrainConfig, make_config
from rlcourse.course.lessons import gain
from rlcourse.course.lessons.experiment import Experiment
from rlcourse.course.lessons.lesson04 import BEGINNING, ISOLATED, SLOW, forced_lengths, forced_prompts
from rlcourse.evaluation import answer_problems
from rlcourse.policy import Policy
from rlcourse.rollout import RolloutEngine
from rlcourse.sampling import Sampling
from rlcourse.tasks import Answer, Problem
from tools.lessons.recording import measured, record_seeds

SEEDS = (0, 1, 2, 3, 4)
NORMALIZED, CENTERED = {"advantage": "group_normalized"}, {"advantage": "group_centered"}
MEAN, CONSTANT = {"aggregation": "sequence_mean"}, {"aggregation": "constant"}

# The length bias in isolation: 16 problems x (4 + 4) answers a step, whose opening decides what they earn.
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
DEFAULT = {"steps": 60}
KEPT = ("reward", "length", "length_right", "length_wrong", "truncated", "grad_norm", "groups_without_signal")
KIND_SEEDS, KINDS_EVERY = (0, 1, 2), 5
EVAL_EVERY = 10  # steps between two evaluations of ordinary training


class ForcedOpenings:
    """An engine whose answers have already begun: half of each group with filler, half with working.

    The opening belongs to the prompt, so nothing of it is trained or counted. problems: those it may be asked about.
    """

    def __init__(self, policy: Policy, engine: RolloutEngine, problems: list[Problem]):
        self.engine = engine
        self.begun = {tuple(policy.prompt(problem.question)): forced_prompts(policy, [problem]) for problem in problems}

    def generate(
        self, prompts: list[list[int]], num_generations: int, max_new_tokens: int, sampling: Sampling
    ) -> Rollout:
        begun = [forced for prompt in prompts for forced in self.begun[tuple(prompt)]]
        return self.engine.generate(begun, num_generations // 2, max_new_tokens, sampling)


def fated_rewards(fate: str) -> RewardFunction:
    """Rewards that nothing but the opening decides, or a coin that falls on each side equally often."""

    def rewards(answers: list[Answer], config: TrainConfig) -> list[float]:
        if fate == "a coin":
            return torch.rand(len(answers)).argsort().lt(len(answers) // 2).float().tolist()
        half, groups = config.num_generations // 2, len(answers) // config.num_generations
        filler, worked = (0.0, 1.0) if fate == "worked earns 1" else (1.0, 0.0)
        return ([filler] * half + [worked] * half) * groups

    return rewards


def isolated_run(variant: str, seed: int, **overrides) -> dict[str, Any]:
    """Train with fated rewards; the lengths after each opening, measured every `PROBE_EVERY` steps."""
    switches, fate = FATES[variant]
    experiment = Experiment(make_config(**(ISOLATED | switches | {"seed": seed} | overrides)))
    policy, engine, task = experiment.policy, experiment.engine, experiment.task
    experiment.engine = ForcedOpenings(policy, engine, task.problems("train"))
    probes, limit = task.problems("validation")[:PROBES], experiment.config.max_new_tokens
    return measured(
        experiment,
        PROBE_EVERY,
        evaluate=lambda: forced_lengths(policy, engine, probes, limit),
        kept=("grad_norm",),
        reward_function=fated_rewards(fate),
    )


def ordinary_run(variant: str, seed: int, **settings) -> dict[str, Any]:
    """Train with the switches of `variant`: what the rollouts and evaluations say, and test accuracy by level."""
    experiment = Experiment(make_config(**(SWITCHES[variant] | {"seed": seed} | settings)))
    policy, engine, task = experiment.policy, experiment.engine, experiment.task
    validation, limit = task.problems("validation"), experiment.config.max_new_tokens

    def evaluate() -> dict[str, float]:
        accuracy = experiment.evaluate(validation[:200])["accuracy"]
        return {"accuracy": accuracy} | forced_lengths(policy, engine, validation[:PROBES], limit)

    curves = measured(experiment, EVAL_EVERY, evaluate, KEPT)
    return curves | {"test": experiment.evaluate(task.problems("test"))}


def kinds_run(variant: str, seed: int, **overrides) -> dict[str, Any]:
    """The beginning of `slow`: the shares of each kind of answer, greedy and sampled, and how long the samples are."""
    experiment = Experiment(make_config(**(SWITCHES[variant] | {"seed": seed} | BEGINNING | overrides)))
    policy, engine, task = experiment.policy, experiment.engine, experiment.task

    def evaluate() -> dict[str, float]:
        problems, limit = task.problems("validation")[:200], experiment.config.max_new_tokens
        answers = [answer for [answer] in answer_problems(policy, engine, task, problems, limit)]
        return {"accuracy": sum(a.strict for a in answers) / len(answers)} | kind_shares(answers)

    def measure(completions: Completions) -> dict[str, float]:
        lengths = completions.rollout.completion_lengths.tolist()
        garbage = [n for a, n in zip(completions.answers, lengths, strict=True) if gain.kind(a) == "garbage"]
        return kind_shares(completions.answers) | {"garbage_length": sum(garbage) / max(len(garbage), 1)}

    return measured(experiment, KINDS_EVERY, evaluate, ("reward",), measure)


def kind_shares(answers: list[Answer]) -> dict[str, float]:
    """The share of each of `gain.KINDS` among some answers."""
    kinds = [gain.kind(answer) for answer in answers]
    return {name: kinds.count(name) / len(kinds) for name in gain.KINDS}


SETTINGS = {"isolated": ISOLATED, "default": DEFAULT, "slow": SLOW, "kinds": BEGINNING}
VARIANTS = {"isolated": FATES, "default": SWITCHES, "slow": SWITCHES, "kinds": ("dr_grpo", "grpo")}


def run(kind: str, variant: str, seed: int) -> dict[str, Any]:
    """One seed of a record."""
    if kind == "kinds":
        return kinds_run(variant, seed)
    return isolated_run(variant, seed) if kind == "isolated" else ordinary_run(variant, seed, **SETTINGS[kind])


def record(kind: str, variant: str) -> None:
    """Train with every seed and write the record."""
    switches = FATES[variant][0] if kind == "isolated" else SWITCHES[variant]
    seeds = KIND_SEEDS if kind == "kinds" else SEEDS
    record_seeds(
        f"lesson04_{kind}_{variant}", [kind, variant], SETTINGS[kind] | switches, seeds,
        lambda seed: run(kind, variant, seed),
    )  # fmt: skip


if __name__ == "__main__":
    kinds = sys.argv[1:2] or list(SETTINGS)
    for kind in kinds:
        for variant in sys.argv[2:] or VARIANTS[kind]:
            record(kind, variant)
