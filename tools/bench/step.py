"""A whole training step."""

import gc
import tempfile
from pathlib import Path
from typing import Any

import torch

from rlcourse.config import TrainConfig, make_config
from rlcourse.device import find_device
from rlcourse.measure.timing import measure
from rlcourse.rollout import vllm
from rlcourse.runs import new_run
from rlcourse.tasks import Answer, load_task
from rlcourse.train import Trainer, train_step
from tools.bench.models import write_random_model
from tools.bench.results import Results, Rows, median_and_spread

WARMUP = 5  # steps: prompts of several lengths, so that what is captured for each is there


def step(
    shape: str,
    completions: list[int],
    new_tokens: int = 256,
    repeats: int = 5,
    results: Results | None = None,
) -> tuple[dict[str, Any], Rows]:
    """Seconds of a whole Dr. GRPO step on GSM8K with random weights of `shape`, and the same with vLLM as its engine
    where that is installed.

    Random weights never end an answer, so every completion has `new_tokens` tokens, and they earn nothing; rewards are
    coin flips instead, so that every group has a gradient.
    """
    task = load_task("gsm8k" if shape != "tiny" else "minigsm")
    results = results or Results()
    results.begin(
        {"shape": shape, "task": task.name, "num_generations": 8, "new_tokens": new_tokens, "repeats": repeats}
    )
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_random_model(shape, task, model)
        for count in completions:
            sizes = (count, new_tokens, repeats)
            results.measure({"variant": "rlcourse", "rows": count}, our_step, str(model), task.name, *sizes)
            if vllm.runs_on(find_device(make_config())):
                what = {"variant": "rlcourse, vllm", "rows": count}
                results.measure(what, our_step, str(model), task.name, *sizes, "vllm")
    return results.setup, results.rows


def our_step(
    model: str, task: str, completions: int, new_tokens: int, repeats: int, engine: str = "fast", **settings: Any
) -> dict[str, Any]:
    """Our step, as `time_steps` gives it. settings: of the config."""
    with tempfile.TemporaryDirectory() as folder:
        found = time_steps(step_trainer(model, task, completions, new_tokens, folder, engine, **settings), repeats)
    if engine == "vllm":
        vllm.free_memory()
    return found


def time_steps(trainer: Trainer, repeats: int, warmup: int = WARMUP) -> dict[str, Any]:
    """Median seconds of a step and its phases, the gap between sampling and training log-probs, and the most memory: of
    tensors, and with all that PyTorch holds besides, graphs' memory too. The first `warmup` steps do not count."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        gc.collect()  # of a trainer before
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    measured = []

    def run() -> float:
        metrics, _ = train_step(trainer.learner, trainer.engine, trainer.task, trainer.data_sampler, 1, coin_flips)
        measured.append(metrics | metrics["timing"])
        return measured[-1]["step_s"]

    step_s, spread = median_and_spread(measure(run, repeats, warmup))
    timed = measured[warmup:]
    return {
        "step_s": step_s,
        "rollout_s": median_and_spread([m["rollout_s"] for m in timed])[0],
        "update_s": median_and_spread([m["update_s"] for m in timed])[0],
        "spread": spread,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "reserved_memory_bytes": torch.cuda.max_memory_reserved() if on_gpu else None,
        "mismatch_mean": max(m["mismatch_mean"] for m in timed),
        "mismatch_max": max(m["mismatch_max"] for m in timed),
    }


def step_trainer(
    model: str, task: str, completions: int, new_tokens: int, folder: str, engine: str = "fast", **settings: Any
) -> Trainer:
    """A trainer with `step_config`."""
    config = step_config(model, task, completions, new_tokens, folder, engine, **settings)
    return Trainer(new_run(config), find_device(config))


def step_config(
    model: str, task: str, completions: int, new_tokens: int, folder: str, engine: str = "fast", **settings: Any
) -> TrainConfig:
    """Of a run whose step has `completions` rows in groups of 8. settings: others."""
    return make_config(
        "h200" if torch.cuda.is_available() else "laptop",
        model=model,
        task=task,
        num_prompts=completions // 8,
        num_generations=8,
        max_new_tokens=new_tokens,
        output=folder,
        engine=engine,
        name=f"step-{engine}-{completions}",
        warmup_steps=1,
        **settings,
    )


def coin_flips(answers: list[Answer], config: TrainConfig) -> list[float]:
    """Rewards, one a row: half of each group is right, in random places."""
    order = torch.rand(config.num_prompts, config.num_generations).argsort(1)
    return (order < config.num_generations // 2).float().flatten().tolist()
