"""A faster kernel in the training loop, by every way in: decode step, launches and whole training step, in one run."""

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rlcourse.policy import Policy
from rlcourse.rollout import RolloutEngine
from rlcourse.rollout.hf import HFEngine
from rlcourse.rollout.torch_engine import TorchEngine
from rlcourse.tasks import load_task
from tools.bench import cute
from tools.bench.decode import look_inside, measure_rung, random_prompts
from tools.bench.models import write_random_model
from tools.bench.results import Rows
from tools.bench.step import WARMUP, step_trainer, time_steps

UNCOMPILED = ("hf-dynamic", "hf-static-eager")
RAISED = "hf-static-breaks-raised"  # the breaking kernel, and a recompile limit that no layer reaches
RECOMPILE_LIMIT = 64
DECODE_ONLY = (*UNCOMPILED, RAISED)  # no whole training steps: they take long, and their decode step says it


def engines(policy: Policy, longest: int) -> dict[str, Callable[[], RolloutEngine]]:
    """How to make each engine. longest: tokens that a static cache has room for. With `RAISED` goes a higher limit."""
    from rlcourse.course.lessons import generate_attention  # registers its attention with transformers
    from rlcourse.kernels.decode_ops import decode_attention  # that of lesson 09
    from rlcourse.rollout.gpu_engine import GPUEngine  # only where there is Triton

    def static(attention: str, compile: bool = True) -> RolloutEngine:
        return HFEngine(policy, torch.bfloat16, "static", compile, attention, longest)

    return {
        "hf-dynamic": lambda: HFEngine(policy, torch.bfloat16),
        "hf-static-eager": lambda: static("sdpa", compile=False),
        "hf-static": lambda: static("sdpa"),
        "hf-static-breaks": lambda: static(generate_attention.BREAKS),
        RAISED: lambda: static(generate_attention.BREAKS),
        "hf-static-operation": lambda: static(generate_attention.OPERATION),
        "graph-attention": lambda: TorchEngine(policy, torch.bfloat16, attention=decode_attention),
        "graph": lambda: GPUEngine(policy, torch.bfloat16),
    }


def story(
    shape: str, rows: list[int], prompt_tokens: int = 128, new_tokens: int = 256, repeats: int = 5
) -> tuple[dict[str, Any], Rows]:
    """For attention alone (`micro-...`) microseconds; for each engine milliseconds of a decode step, kernels and
    launches in it, and, but for `DECODE_ONLY`, seconds of a whole Dr. GRPO step. Static caches have room for the
    longest prompt that the trainer takes. `hf-static` is `generate` as it compiles itself, `hf-static-eager` the same
    with nothing compiled. Training steps are without cuDNN's attention, as the trainer has it; all else is with it.

    Raises ValueError without a GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError("The story needs a GPU, and no CUDA GPU was found: `rlcourse doctor` says what runs here.")
    device, results = torch.device("cuda"), []
    task = load_task("gsm8k")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_random_model(shape, task, model)
        for count in rows:
            trainer = step_trainer(str(model), task.name, count, new_tokens, folder)
            longest = trainer.config.max_prompt_tokens + new_tokens  # room in the cache, as the trainer gives it
            with torch.no_grad():
                micro = cute.measure_case(cute.attention(count, longest, prompt_tokens + new_tokens // 2), repeats)
            results += [{**row, "variant": f"micro-{row['variant']}", "rows": count} for row in micro]
            vocabulary = trainer.policy.model.config.vocab_size
            policy = dataclasses.replace(trainer.policy, eos_ids=[vocabulary])  # every answer has its full length
            prompts = random_prompts(count, prompt_tokens, vocabulary)
            time_steps(trainer, 1)  # compiles the update, which is the same for all
            trainer.engine.sleep()
            for name, make in engines(policy, longest).items():
                torch._dynamo.reset()  # what one engine had compiled must not count for the next
                trainer.engine = make()
                limit = RECOMPILE_LIMIT if name == RAISED else torch._dynamo.config.recompile_limit
                row = {"variant": name, "rows": count, "cache_tokens": None if name == "hf-dynamic" else longest}
                with torch._dynamo.config.patch(recompile_limit=limit):
                    row |= measure_rung(trainer.engine, prompts, len(prompts), new_tokens, repeats, device)[0]
                    row |= look_inside(trainer.engine, prompts, new_tokens, device)
                if name not in DECODE_ONLY:
                    step = time_steps(trainer, repeats, WARMUP if name == "graph" else 1)
                    row |= {key: step[key] for key in ("step_s", "rollout_s", "update_s")}
                results.append(row)
                trainer.engine.sleep()
    setup = {"shape": shape, "dtype": "bfloat16", "rows_a_prompt": 8, "prompt_tokens": prompt_tokens}
    setup |= {"new_tokens": new_tokens, "repeats": repeats, "raised_recompile_limit": RECOMPILE_LIMIT}
    return setup, results
