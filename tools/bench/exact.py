"""Whether sampler and trainer compute bitwise-equal log-probs, and what that costs."""

import tempfile
from pathlib import Path
from typing import Any

import torch

from rlcourse.logprobs import PlainPass
from rlcourse.tasks import load_task
from tools.bench.models import write_random_model
from tools.bench.options import Options
from tools.bench.results import Results
from tools.bench.step import step_trainer, time_steps


def exact(
    shape: str, completions: list[int], new_tokens: int = 256, repeats: int = 5, results: Results | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Seconds of a training step and the gap between sampling and training log-probs, of random weights of `shape`, and
    beside Qwen2.5-0.5B's of the embedded model: with bitwise-equal kernels, and with separate ones, transformers'
    layers, compiled, in the trainer.

    Raises ValueError on a GPU where the two are not known to agree.
    """
    task, results = load_task("minigsm"), results or Results()
    results.begin(
        {"shape": shape, "task": task.name, "num_generations": 8, "new_tokens": new_tokens, "repeats": repeats}
    )
    with tempfile.TemporaryDirectory() as folder:
        for found in ("embedded", shape) if shape == Options.shape else (shape,):
            model = "embedded" if found == "embedded" else str(Path(folder) / "model")
            if found != "embedded":
                write_random_model(found, task, Path(model))
            for count in completions:
                for variant in ("bitwise-equal", "separate"):
                    what = {"variant": variant, "shape": found, "rows": count}
                    results.measure(what, _step, model, task.name, count, new_tokens, repeats, variant == "separate")
                    torch.cuda.empty_cache()
    return results.setup, results.rows


def _step(model: str, task: str, count: int, new_tokens: int, repeats: int, separate: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        trainer = step_trainer(model, task, count, new_tokens, folder)
        if not trainer.learner.exact:
            raise ValueError("Sampler and trainer agree only on Hopper in 16 bits: measure `mismatch` instead.")
        if separate:
            trainer.learner.policy_pass = PlainPass(trainer.policy.model, trainer.config.dtype, trainer.config.compile)
            trainer.engine.exact = False
        return time_steps(trainer, repeats)
