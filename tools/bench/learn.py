"""Does it learn with every setting? Trains the embedded model on this machine, end to end, with each combination."""

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from rlcourse.config import ALGORITHMS, TrainConfig, make_config
from rlcourse.device import find_device
from rlcourse.files import read_lines
from rlcourse.runs import new_run
from rlcourse.train import Trainer
from tools.bench.results import Rows

THREE_SEEDS = ("dr_grpo", "gspo")
LEFT_OUT = {"top_k": 20, "top_p": 0.95, "temperature": 0.9}  # sampling that our kernels do not do


def combinations(on_gpu: bool) -> list[dict[str, Any]]:
    """What is trained, as settings: every engine with every arithmetic, every algorithm, three seeds of two."""
    best = {"algorithm": "dr_grpo", "dtype": "bfloat16" if on_gpu else "float32", "compile": on_gpu, "engine": "fast"}
    found = []
    if on_gpu:
        engines = ("fast", "hf-dynamic", "hf-static")
        for engine, dtype, compiled in itertools.product(engines, ("bfloat16", "float32"), (False, True)):
            found.append(best | {"engine": engine, "dtype": dtype, "compile": compiled})
        for algorithm, dtype, compiled in itertools.product(
            ("grpo", "gspo", "ppo"), ("bfloat16", "float32"), (False, True)
        ):
            found.append(best | {"algorithm": algorithm, "dtype": dtype, "compile": compiled})
    else:
        found += [best | {"engine": engine} for engine in ("fast", "hf-dynamic", "hf-static")]
        found += [best | {"algorithm": algorithm} for algorithm in ("grpo", "gspo", "ppo")]
    rest = [name for name in ALGORITHMS if name not in ("dr_grpo", "grpo", "gspo", "ppo")]
    found += [best | {"algorithm": algorithm} for algorithm in rest]
    found += [best | {"algorithm": "gspo", "minibatches": 1}, best | LEFT_OUT]
    return found + [best | {"algorithm": name, "seed": seed} for name in THREE_SEEDS for seed in (1, 2)]


def learn(config: TrainConfig) -> tuple[dict[str, Any], Rows]:
    """For each combination, accuracy before and after, seconds, the gap between sampler and trainer, and the share of
    clipped tokens; an `error` instead if it fails. config: sizes and steps, which the combination overrides."""
    common = {
        "steps": config.steps,
        "eval_problems": min(config.eval_problems, 500),
        "eval_every": 20,
        "pass_k": 0,
        "save_every": 0,
    }
    rows: Rows = []
    for settings in combinations(torch.cuda.is_available()):
        row = describe(settings)
        try:
            row |= one_run(common | settings)
        except Exception as error:  # goes into the table: the other combinations still say something
            row |= {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]}
        rows.append(row)
        Console(width=200).print(row, highlight=False)
    return {"model": "embedded", "task": "minigsm"} | common, rows


def describe(settings: dict[str, Any]) -> dict[str, Any]:
    """The columns that name a combination; settings that the algorithm would set otherwise stand in `variant`."""
    named = ("algorithm", "dtype", "compile", "engine", "seed")
    others = [f"{name} {value}" for name, value in settings.items() if name not in named]
    row = {name: settings.get(name, 0) for name in named}
    words = [row["algorithm"], row["engine"], row["dtype"], "compiled" if row["compile"] else "", *others]
    return {"variant": ", ".join(word for word in words if word)} | row


def one_run(settings: dict[str, Any], change: Callable[[Trainer], None] = lambda trainer: None) -> dict[str, Any]:
    """Train once, from nothing that an earlier run compiled. change: what is done to the trainer before it begins."""
    torch._dynamo.reset()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config = make_config("laptop", **settings, output=folder, name="learn")
        trainer = Trainer(new_run(config), find_device(config))
        change(trainer)
        summary = trainer.run_all()
        steps = read_lines(Path(folder) / "learn" / "metrics.jsonl")

    def seen(name: str) -> list[float]:
        """Of all steps in which something trained."""
        return [step[name] for step in steps if step[name] is not None]

    return {
        "accuracy_before": summary["accuracy_before"],
        "accuracy_after": summary["accuracy_after"],
        "seconds": time.perf_counter() - start,
        "step_s": statistics.median(step["timing"]["step_s"] for step in steps),
        "mismatch_mean": statistics.fmean(seen("mismatch_mean")) if seen("mismatch_mean") else None,
        "mismatch_max": max(seen("mismatch_max"), default=None),
        "clip_fraction": statistics.fmean(seen("clip_fraction")) if seen("clip_fraction") else None,
    }
