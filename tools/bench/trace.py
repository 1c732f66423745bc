"""Two decode steps under the profiler: a fast kernel that breaks the step which `generate` compiles, and our graph."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch

from rlcourse.config import make_config
from rlcourse.measure.profiling import profile
from rlcourse.measure.traces import Event, launches, on_gpu, read_trace
from rlcourse.policy import Policy, load_policy
from rlcourse.rollout import RolloutEngine
from rlcourse.sampling import Sampling
from rlcourse.tasks import load_task
from tools.bench.decode import GROUP, measure_rung, random_prompts
from tools.bench.events import account, cut, step_marks, within
from tools.bench.models import write_random_model
from tools.bench.results import Rows
from tools.bench.story import engines

STEPS = 10  # under the profiler
SKIPPED = 2  # of them, for the GPU to be in step
KEPT = 3  # in the trace that is kept
NAMED = 12  # kernels with a row of their own


def trace(
    shape: str, rows: list[int], prompt_tokens: int = 128, new_tokens: int = 256, repeats: int = 5
) -> tuple[dict[str, Any], Rows, dict[str, list[Event]]]:
    """For each engine a row of the step, one for each kernel and one for the time in which none runs; and by engine the
    events of a few steps.

    A step's milliseconds are taken without the profiler, kernels with it: it slows down the host and not the GPU. What
    no kernel fills of the step without it is the row `no kernel`. Raises ValueError without a GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError("The trace needs a GPU, and no CUDA GPU was found: `rlcourse doctor` says what runs here.")
    count, results, traces = rows[0], [], {}
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(shape, load_task("minigsm"), Path(folder))
        policy = load_policy(folder, torch.device("cuda"))
        policy = dataclasses.replace(policy, eos_ids=[policy.model.config.vocab_size])  # answers have their full length
        prompts = random_prompts(count, prompt_tokens, policy.model.config.vocab_size)
        ways = engines(policy, make_config("h200").max_prompt_tokens + new_tokens)  # with the room of the story
        for name in ("hf-static-breaks", "graph"):
            torch._dynamo.reset()
            engine = ways[name]()
            rung, _ = measure_rung(engine, prompts, len(prompts), new_tokens, repeats, policy.device)
            events = look(engine, prompts, policy, Path(folder) / "trace.json")
            found, traces[name] = one_engine(events, rung["ms_per_step"])
            head = {"variant": name, "rows": count}
            results += [head | {"part": "step", "spread": rung["spread"]} | found[0]]
            results += [head | row for row in found[1:]]
            engine.sleep()
    setup = {"shape": shape, "dtype": "bfloat16", "rows_a_prompt": GROUP, "prompt_tokens": prompt_tokens}
    setup |= {"new_tokens": new_tokens, "repeats": repeats, "steps_in_trace": KEPT}
    return setup, results, traces


def look(engine: RolloutEngine, prompts: list[list[int]], policy: Policy, path: Path) -> list[Event]:
    """The events of a rollout of `STEPS` decode steps."""
    profile(lambda: engine.generate(prompts, GROUP, 1 + STEPS, Sampling()), policy.device, repeats=1, trace=path)
    return read_trace(path)


def one_engine(events: list[Event], ms_per_step: float) -> tuple[Rows, list[Event]]:
    """The rows of one engine, that of the step first, and a trace of its last steps, which begins where the host starts
    the first thing in them; `kept_steps_from_us` says when they themselves begin in it."""
    marks = step_marks(events, STEPS)
    kernels, step = account(events, marks[SKIPPED:])
    step_us = 1e3 * ms_per_step
    rows: Rows = [
        {
            "ms_per_step": ms_per_step,
            "profiled_ms": step["step_us"] / 1e3,
            "us_a_step": step_us,
            "share": 1.0,
            "busy_us": step["busy_us"],
            "gaps_a_step": step["gaps"],
            "calls_a_step": step["kernels"],
            "launches_a_step": step["launches"],
            "launch_us": step["launch_us"],
        }
    ]
    rest = kernels[NAMED:]
    named = [*kernels[:NAMED], ("other kernels", sum(k[1] for k in rest), sum(k[2] for k in rest))]
    for part, calls, us in named if rest else kernels:
        rows.append({"part": part, "calls_a_step": calls, "us_a_step": us, "share": us / step_us})
    gap = max(0.0, step_us - step["busy_us"])
    rows.append({"part": "no kernel", "us_a_step": gap, "share": gap / step_us})
    started = launches(events, of=within(on_gpu(events), marks[-1 - KEPT], marks[-1]))
    begin = min(marks[-1 - KEPT], started[0]["ts"])
    rows[0]["kept_steps_from_us"] = marks[-1 - KEPT] - begin
    return rows, cut(events, begin, marks[-1])
