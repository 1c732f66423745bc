"""The rollout engines side by side, and the update phase of a training step."""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from rlcourse.config import TrainConfig
from rlcourse.measure import roofline
from rlcourse.measure.shapes import ModelShape
from rlcourse.measure.timing import measure, median_seconds, seconds
from rlcourse.rollout import make_engine, vllm
from rlcourse.tasks import load_task
from rlcourse.tasks.prompts import PromptSampler
from rlcourse.train import Trainer
from tools.bench.models import write_random_model
from tools.bench.prompts import policy_and_prompts
from tools.bench.results import Results, Rows, median_and_spread
from tools.bench.step import our_step, step_trainer, time_steps


def rollout(config: TrainConfig, repeats: int = 5) -> tuple[dict[str, Any], Rows]:
    """Tokens/s of each engine with the config's model, prompts and sampling, one engine after the other.

    Tokens count up to EOS. Each row also has its speed relative to `hf-dynamic`.
    """
    policy, prompts = policy_and_prompts(config)
    device, dtype = policy.device, getattr(torch, config.dtype)
    variants = {name: (name, False) for name in ("hf-dynamic", "hf-static", "fast")}
    if device.type == "cuda":
        variants["fast-compiled"] = ("fast", True)
    if vllm.runs_on(device):
        variants["vllm"] = ("vllm", False)
    rows = []
    for variant, (name, compiled) in variants.items():
        engine = make_engine(policy, name, dtype, compiled)

        def run(engine=engine) -> float:
            torch.manual_seed(config.seed)
            done = []
            took = seconds(
                lambda: done.append(
                    engine.generate(prompts, config.num_generations, config.max_new_tokens, config.sampling)
                ),
                device,
            )
            return int(done[0].completion_lengths.sum()) / took

        tokens_per_s, spread = median_and_spread(measure(run, repeats))
        rows.append({"variant": variant, "rows": config.rows, "tokens_per_s": tokens_per_s, "spread": spread})
    for row in rows:
        row["speedup"] = row["tokens_per_s"] / rows[0]["tokens_per_s"]
    setup = {
        "model": config.model,
        "task": config.task,
        "dtype": config.dtype,
        "prompts": config.num_prompts,
        "num_generations": config.num_generations,
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "repeats": repeats,
    }
    return setup, rows


def update(
    shape: str, completions: list[int], new_tokens: int = 256, repeats: int = 5, results: Results | None = None
) -> tuple[dict[str, Any], Rows]:
    """Seconds of the update phase of a step on random weights of `shape`, and what the operations it needs would take
    at the rate of a large matrix product on this machine; the seconds of the step, and its memory; what these are with
    gradient checkpointing; and, on a GPU, what it takes to bring the batch's token ids and mask there from ordinary
    memory, and from pinned memory without waiting."""
    task = load_task("gsm8k" if shape != "tiny" else "minigsm")
    results = results or Results()
    results.begin({"shape": shape, "task": task.name, "new_tokens": new_tokens, "repeats": repeats})
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_random_model(shape, task, model)
        for count in completions:
            results.measure(
                {"variant": "rlcourse", "rows": count}, our_update, str(model), task.name, count, new_tokens, repeats
            )
    return results.setup, results.rows


def our_update(model: str, task: str, completions: int, new_tokens: int, repeats: int) -> dict[str, Any]:
    """Our update, as `update` gives it."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = step_trainer(model, task, completions, new_tokens, folder)
        machine = roofline.measure_machine(trainer.policy.device)
        took = time_steps(trainer, repeats)
    length, device = mean_length(trainer, completions) + new_tokens, trainer.policy.device
    sizes = ModelShape.from_config(trainer.policy.model.config)
    work = roofline.update(sizes, completions, length, new_tokens)
    del trainer
    again = our_step(model, task, completions, new_tokens, repeats, gradient_checkpointing=True)
    return {
        "tokens": completions * length,
        "update_s": took["update_s"],
        "step_s": took["step_s"],
        "spread": took["spread"],
        "peak_memory_bytes": took["peak_memory_bytes"],
        "reserved_memory_bytes": took["reserved_memory_bytes"],
        "floor_s": work.total_flops / machine.flops_per_s + work.total_bytes / machine.bytes_per_s,
        "tflops": work.total_flops / took["update_s"] / 1e12,
        "peak_tflops": machine.flops_per_s / 1e12,
        **{f"checkpointed_{name}": again[name] for name in ("update_s", "step_s", "peak_memory_bytes")},
    } | batch_copies(completions, length, device, repeats)


def batch_copies(rows: int, length: int, device: torch.device, repeats: int) -> dict[str, float]:
    """Seconds to copy token ids and mask, both int64 [rows, length], to a GPU: `copy_s` as one does, `pinned_copy_s`
    from pinned memory with `non_blocking`, and `host_pinned_copy_s` until the host goes on. Nothing on a CPU."""
    if device.type != "cuda":
        return {}
    batch = [torch.zeros(rows, length, dtype=torch.long) for _ in range(2)]
    pinned = [part.pin_memory() for part in batch]
    asked = []

    def without_waiting() -> None:
        start = time.perf_counter()
        kept = [part.to(device, non_blocking=True) for part in pinned]
        asked.append(time.perf_counter() - start)
        del kept

    many = 20 * repeats  # each takes microseconds
    return {
        "copy_s": median_seconds(lambda: [part.to(device) for part in batch], device, many),
        "pinned_copy_s": median_seconds(without_waiting, device, many),
        "host_pinned_copy_s": statistics.median(asked),
    }


def mean_length(trainer: Trainer, count: int) -> int:
    """Mean length, in tokens, of the prompts that the trainer samples."""
    problems = PromptSampler(trainer.data_sampler.problems, seed=0).sample(count)
    return round(sum(len(trainer.task.prompt(p, trainer.policy)) for p in problems) / count)
