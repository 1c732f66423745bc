"""Measure learning curves and write their records, which `rlcourse.course.lessons.curve_records` reads."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rlcourse.collect import Completions, RewardFunction, answer_rewards
from rlcourse.course.lessons.curve_records import command_of
from rlcourse.course.lessons.experiment import Experiment
from rlcourse.paths import data_folder
from tools.records import write_record


def measured(
    experiment: Experiment,
    every: int,
    evaluate: Callable[[], dict[str, float]],
    kept: tuple[str, ...],
    measure: Callable[[Completions], dict[str, float]] = lambda completions: {},
    reward_function: RewardFunction = answer_rewards,
) -> dict[str, Any]:
    """Train for the config's steps.

    Returns evals: what `evaluate` says before the first step, after every `every` steps; steps: for each name in
    `kept` and each that `measure` gives after a step, its value in all steps.
    """
    evals, steps = [], []
    for step in range(experiment.config.steps + 1):
        if step % every == 0:
            evals.append({"step": step} | evaluate())
        if step < experiment.config.steps:
            metrics, completions = experiment.train(reward_function)
            steps.append({name: metrics[name] for name in kept} | measure(completions))
    return {"evals": evals, "steps": {name: [row[name] for row in steps] for name in steps[0]}}


def record_seeds(
    name: str, arguments: list[str], setup: dict[str, Any], seeds: Iterable[int], run: Callable[[int], dict[str, Any]]
) -> None:
    """Write the record of what `run` measures with each seed. name, arguments, setup: see `write_curve`."""
    found = {}
    for seed in seeds:
        start = time.perf_counter()
        found[seed] = run(seed)
        print(name, seed, found[seed]["evals"][-1], f"{time.perf_counter() - start:.0f} s", flush=True)
    write_curve(name, arguments, setup, found)


def write_curve(name: str, arguments: list[str], setup: dict[str, Any], seeds: dict[int, dict[str, Any]]) -> Path:
    """Write a record and return its path. arguments: what the module's command was told; setup: the settings that the
    seeds share; seeds: what each measured, its numbers written to five significant digits."""
    results = [{"variant": f"seed {seed}"} | significant(measured) for seed, measured in seeds.items()]
    command = " ".join([command_of(name), *arguments])
    return write_record(name, setup, results, command=command, folder=data_folder() / "curves")


def record_variants(
    name: str, setup: dict[str, Any], variants: list[str], seeds: Iterable[int],
    run: Callable[[str, int], dict[str, Any]],
) -> Path:  # fmt: skip
    """Write the record of what `run` measures of each variant with each seed, and return its path."""
    results = []
    for variant in variants:
        for seed in seeds:
            results.append({"variant": variant, "seed": seed} | significant(run(variant, seed)))
            print(variant, seed, [round(row["accuracy"], 3) for row in results[-1]["evals"]], flush=True)
    return write_record(name, setup, results, command=command_of(name), folder=data_folder() / "curves")


def significant(value: Any) -> Any:
    """The same value with its numbers to five significant digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, list):
        return [significant(v) for v in value]
    return {k: significant(v) for k, v in value.items()} if isinstance(value, dict) else value
