"""Learning curves as records: `data/curves/<device>/<name>.json`, one row of results a seed.

`name` is that of an algorithm, recorded by `rlcourse.course.lessons.curves`, `lessonNN_...`, recorded by
`rlcourse.course.lessons.lessonNN`, or that of a module there, `OF_MODULES`.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rlcourse.measure.records import load_record, write_record
from rlcourse.paths import data_folder

OF_MODULES = ("sampler_gap",)  # with a row for each variant and seed


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
    command = " ".join([_command(name), *arguments])
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
    return write_record(name, setup, results, command=_command(name), folder=data_folder() / "curves")


def load_curve(name: str, device: str | None = None) -> dict[str, Any]:
    """The record called `name`; see `rlcourse.measure.records.load_record`."""
    return load_record(name, device, data_folder() / "curves", _command(name))


def _command(name: str) -> str:
    lesson = name.split("_")[0]
    module = name if name in OF_MODULES else lesson if lesson.startswith("lesson") else "curves"
    return f"python -m rlcourse.course.lessons.{module}"


def significant(value: Any) -> Any:
    """The same value with its numbers to five significant digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, list):
        return [significant(v) for v in value]
    return {k: significant(v) for k, v in value.items()} if isinstance(value, dict) else value
