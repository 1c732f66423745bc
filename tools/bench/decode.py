"""The ladder of decoding: from no cache to one CUDA graph per step, every rung on the same rows in one run."""

import dataclasses
import heapq
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcourse.measure.profiling import Profile, profile
from rlcourse.measure.roofline import Machine, decode_step, measure_machine
from rlcourse.measure.shapes import ModelShape
from rlcourse.measure.timing import measure, seconds
from rlcourse.policy import Policy, load_policy
from rlcourse.rollout import RolloutEngine
from rlcourse.rollout.decoder import Attention
from rlcourse.rollout.hf import HFEngine
from rlcourse.rollout.tiles import cute_wins
from rlcourse.rollout.torch_engine import TorchEngine
from rlcourse.sampling import Sampling
from rlcourse.tasks import load_task
from tools.bench.models import write_random_model
from tools.bench.options import Options
from tools.bench.results import Results, Rows, median_and_spread

GROUP = 8  # rows that share a prompt
ROUNDS = 8  # of skewed answers: so many times more than are decoded at once
DRAWS = 8  # of such a rollout: with few rows, a late long answer decides how well the slots of one are used
MEDIAN = 120  # tokens of skewed answers
WHOLE_LADDER = (Options.shape, "embedded", "tiny")  # shapes; of others our own kernels are measured alone


def ladder(policy: Policy, dtype: torch.dtype, rows: int, kept: str) -> dict[str, Callable[[], RolloutEngine]]:
    """How to make each engine, slowest first. kept: "all"; "cached", those with a cache; "fast", the best of
    `generate` and our own; "ours", our own kernels alone. These decode `rows` at once."""

    def in_pytorch(compile: bool = False, attention: Attention | None = None) -> RolloutEngine:
        return TorchEngine(policy, dtype, compile, attention)

    def with_kernels(cute: bool) -> RolloutEngine:
        from rlcourse.rollout.gpu_engine import GPUEngine  # only where there is Triton

        return GPUEngine(policy, dtype, max_slots=rows, cute=cute)

    def with_attention() -> RolloutEngine:
        from rlcourse.kernels.decode_ops import decode_attention  # only where there is CuTe DSL

        return in_pytorch(attention=decode_attention)

    rungs = {
        "hf-none": lambda: HFEngine(policy, dtype, "none"),
        "hf-dynamic": lambda: HFEngine(policy, dtype, "dynamic"),
        "hf-static": lambda: HFEngine(policy, dtype, "static", compile=False),
        "hf-static-compiled": lambda: HFEngine(policy, dtype, "static"),
        "graph-eager": in_pytorch,
        "graph-compiled": lambda: in_pytorch(compile=True),
        "graph-attention": with_attention,
        "graph-triton": lambda: with_kernels(cute=False),
        "graph-exact": lambda: with_kernels(cute=True),
        "fast": in_pytorch,
    }
    on_gpu = policy.device.type == "cuda"
    ours = ["graph-triton", "graph-exact"] if on_gpu else ["fast"]
    in_pytorch_too = ["graph-eager", "graph-compiled", "graph-attention"]  # our step, as a CUDA graph
    left_out = ["fast"] if on_gpu else ["hf-static-compiled", *in_pytorch_too, "graph-triton", "graph-exact"]
    left_out += [] if on_gpu and cute_wins(policy.device) else ["graph-attention", "graph-triton"]
    left_out += [] if kept == "all" else ["hf-none"]
    left_out += [name for name in rungs if name not in ours] if kept == "ours" else []
    if kept == "fast":
        left_out += ["hf-static"] + (["hf-dynamic", *in_pytorch_too, "graph-triton"] if on_gpu else [])
    return {name: make for name, make in rungs.items() if name not in left_out}


def random_prompts(rows: int, tokens: int, vocabulary: int) -> list[list[int]]:
    """A prompt for each group of rows, of 3/4 of `tokens` to `tokens`, so that there is padding. Seeded."""
    generator = torch.Generator().manual_seed(0)
    count = rows // GROUP
    lengths = [tokens, *torch.randint(3 * tokens // 4, tokens + 1, (count - 1,), generator=generator).tolist()]
    return [torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def skewed_share(median: int) -> float:
    """Of the vocabulary, that ends an answer, so that half the answers of random weights end by token `median`."""
    return 1 - 0.5 ** (1 / median)


def skewed(vocabulary: int, median: int = MEDIAN) -> list[int]:
    """Ids of tokens that end an answer: with random weights, lengths are geometric with this median."""
    generator = torch.Generator().manual_seed(1)
    count = max(1, round(skewed_share(median) * vocabulary))
    return torch.randperm(vocabulary, generator=generator)[:count].tolist()


def decode(
    shape: str,
    rows: list[int],
    prompt_tokens: int = 128,
    new_tokens: int = 256,
    lengths: str = "equal",
    repeats: int = 5,
    results: Results | None = None,
) -> tuple[dict[str, Any], Rows]:
    """Tokens/s and milliseconds a decode step of every rung, and the byte floor of the step on this machine.

    shape: "embedded", or a known shape with random weights. lengths: "equal", every answer has `new_tokens`;
    "skewed", answers end by themselves, tokens after their end do not count, and there are `ROUNDS` times as many
    answers as rows are decoded at once; ours does so `DRAWS` times, with other random numbers. Beside their speed are
    `schedule_steps` of ours, all rollouts together. A step's time is that of a rollout less that of one token, by the
    number of steps: prefill does not count. Of the shapes that are not in `WHOLE_LADDER`, our kernels alone.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    machine = measure_machine(device)
    kept = "fast" if lengths == "skewed" else "all" if new_tokens <= 64 else "cached"
    kept = kept if shape in WHOLE_LADDER else "ours"
    results = results or Results()
    setup = {"shape": shape, "dtype": str(dtype).split(".")[1], "lengths": lengths, "rows_a_prompt": GROUP}
    setup |= {"temperature": 1.0, "repeats": repeats, "copy_gb_per_s": machine.bytes_per_s / 1e9}
    results.begin(setup | ({"rollouts": DRAWS} if lengths == "skewed" else {}))
    with tempfile.TemporaryDirectory() as folder:
        if shape != "embedded":
            write_random_model(shape, load_task("minigsm"), Path(folder))
        policy = load_policy("embedded" if shape == "embedded" else folder, device)
        vocabulary = policy.model.config.vocab_size
        policy = dataclasses.replace(policy, eos_ids=[vocabulary] if lengths == "equal" else skewed(vocabulary))
        rounds = 1 if lengths == "equal" else ROUNDS
        prompts = {count: random_prompts(count * rounds, prompt_tokens, vocabulary) for count in rows}
        for count in rows:
            what = {"rows": count, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
            for variant, make in ladder(policy, dtype, count, kept).items():
                rung = (make, policy, dtype, machine, prompts[count], count, new_tokens, lengths, repeats)
                results.measure({"variant": variant} | what, _rung, *rung)
    return results.setup, results.rows


def _rung(
    make: Callable[[], RolloutEngine], policy: Policy, dtype: torch.dtype, machine: Machine, prompts: list[list[int]],
    rows: int, new_tokens: int, lengths: str, repeats: int,
) -> dict[str, Any]:  # fmt: skip
    """One rung at one number of rows."""
    device, engine = policy.device, make()
    ours, batch = not isinstance(engine, HFEngine | TorchEngine), rows // GROUP
    some = prompts if ours else prompts[: 2 * batch]  # others do one batch like the other
    draws = DRAWS if ours and lengths == "skewed" else 1
    row, done = measure_rung(engine, some, len(some) if ours else batch, new_tokens, repeats, device, draws)
    if lengths == "equal":
        mean_context = sum(map(len, prompts)) / len(prompts) + new_tokens / 2
        sizes = ModelShape.from_config(policy.model.config)
        work = decode_step(sizes, rows, mean_context, torch.finfo(dtype).bits // 8)
        row |= {"floor_ms": 1e3 * machine.floor_seconds(work)} | look_inside(engine, prompts, new_tokens, device)
    else:
        row["schedule_steps"] = sum(schedule_steps(answers.tolist(), rows) for answers in done)
    engine.sleep()
    return row


def measure_rung(
    engine: RolloutEngine, prompts: list[list[int]], batch: int, new_tokens: int, repeats: int, device: torch.device,
    draws: int = 1,
) -> tuple[dict[str, Any], list[Tensor]]:  # fmt: skip
    """Speed of one engine, and the lengths of the answers of each call: tokens/s of `draws` rollouts in sequence, each
    with a seed of its own, `batch` prompts in a call; milliseconds of a decode step, if all answers are equally long;
    tokens that count in a row."""
    done: list[Tensor] = []

    def generate(limit: int) -> None:
        for seed in range(draws):
            torch.manual_seed(seed)
            for first in range(0, len(prompts), batch):
                rollout = engine.generate(prompts[first : first + batch], GROUP, limit, Sampling())
                done.append(rollout.completion_lengths)

    def run(limit: int) -> float:
        done.clear()
        return seconds(lambda: generate(limit), device)

    whole, spread = median_and_spread(measure(lambda: run(new_tokens), repeats))
    answers, lengths, steps = list(done), torch.cat(done), len(done) * (new_tokens - 1)
    per_step = None
    if (lengths == new_tokens).all():
        first, _ = median_and_spread(measure(lambda: run(1), repeats))
        per_step = 1e3 * (whole - first) / steps
    row = {
        "tokens_per_s": lengths.sum().item() / whole,
        "ms_per_step": per_step,
        "tokens_a_row": lengths.float().mean().item(),
        "spread": spread,
    }
    return row, answers


def schedule_steps(lengths: list[int], slots: int) -> int:
    """Decode steps of answers of these lengths that begin in their order, each as soon as one of the slots is free. An
    answer's first token comes from its prompt, without a step."""
    ends = [0] * slots
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length - 1)
    return max(ends)


def look_inside(
    engine: RolloutEngine, prompts: list[list[int]], new_tokens: int, device: torch.device
) -> dict[str, float | None]:
    """What the profiler sees in a decode step: the share of time in which the GPU works, kernels (operators on a CPU),
    and how often the host starts something on the GPU."""
    steps = min(new_tokens - 1, 32)

    def look(limit: int) -> Profile:
        return profile(lambda: engine.generate(prompts, GROUP, limit, Sampling()), device, repeats=3)

    one, more = look(1), look(1 + steps)
    busy = more.busy  # of decode steps without prefill: of what `more` did and `one` did not; times vary
    if busy is not None:
        busy = min(1.0, (more.busy * more.seconds - one.busy * one.seconds) / (more.seconds - one.seconds))
    return {
        "busy": busy,
        "kernels_a_step": (more.kernels - one.kernels) / steps,
        "launches_a_step": (more.launches - one.launches) / steps,
    }
