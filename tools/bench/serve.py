"""Requests of many lengths through our engine and vLLM: all there at once, as nano-vllm measures, or one by one."""

import dataclasses
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from rlcourse.bench.models import write_random_model
from rlcourse.bench.results import Rows
from rlcourse.config import make_config
from rlcourse.device import find_device
from rlcourse.measure.timing import median_and_spread
from rlcourse.policy import Policy, load_policy
from rlcourse.rollout.arrivals import Request
from rlcourse.rollout.serve import ServingEngine
from rlcourse.sampling import Sampling
from rlcourse.tasks import load_task
from tools.bench.vllm_serve import vllm_serve

REQUESTS, SHORTEST, LONGEST = 256, 100, 1024  # requests; tokens of a prompt, and of an answer
LARGEST_ID = 10_000  # of a prompt's tokens
TEMPERATURE = 0.6
RATE = 32.0  # requests a second, where they come one by one
LOOKS = (16, 4)  # decode steps between two looks of our host
DTYPE = torch.bfloat16
Seen = list[list[tuple[float, int]]]  # of each request: (seconds from the start, tokens that came then)
Serve = Callable[[list[Request]], Iterator[tuple[int, int]]]  # (number of a request, how many tokens it has got)


class Watched(ServingEngine):
    """Counts decode steps."""

    steps = 0

    def _run(self, plan, *arguments):
        self.steps += plan.steps
        return super()._run(plan, *arguments)


def queued_requests(vocabulary: int) -> list[Request]:
    """Those of nano-vllm's bench.py, from the same random numbers, if the vocabulary has all of its ids."""
    rng, largest = random.Random(0), min(LARGEST_ID, vocabulary - 1)
    prompts = [[rng.randint(0, largest) for _ in range(rng.randint(SHORTEST, LONGEST))] for _ in range(REQUESTS)]
    return [Request(prompt, rng.randint(SHORTEST, LONGEST)) for prompt in prompts]


def arriving(requests: list[Request]) -> list[Request]:
    """The same, as a Poisson process brings them: `RATE` a second on average, the first after a wait, too."""
    rng, now, found = random.Random(1), 0.0, []
    for request in requests:
        now += rng.expovariate(RATE)
        found.append(dataclasses.replace(request, arrival_s=now))
    return found


def serve(shape: str, repeats: int = 5) -> tuple[dict[str, Any], Rows]:
    """(setup, rows): tokens/s of `REQUESTS` requests, which end at their own limits alone, all queued at the start or
    one by one; milliseconds to the first token and for each later one (see `measure_serving`). Ours, for each of
    `LOOKS`, in a cache that has room for all of full length; vLLM where it is installed.

    Raises ValueError without a GPU, and where our kernels do not run.
    """
    if not torch.cuda.is_available():
        raise ValueError("Serving needs a GPU, and no CUDA GPU was found: `rlcourse doctor` says what runs here.")
    device, sampling = find_device(make_config()), Sampling(TEMPERATURE)
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(shape, load_task("minigsm"), Path(folder))
        policy = load_policy(folder, device)
        vocabulary = policy.model.config.vocab_size
        policy = dataclasses.replace(policy, eos_ids=[vocabulary])
        queued = queued_requests(vocabulary)
        traffic, found = {"queued": queued, "Poisson": arriving(queued)}, []
        for looks in LOOKS:
            engine = Watched(policy, DTYPE, budget_gb(policy), REQUESTS, looks)
            for arrivals, requests in traffic.items():
                row = {"variant": "rlcourse", "arrivals": arrivals, "steps_between_looks": looks}
                found.append(row | our_row(engine, requests, sampling, repeats))
            engine.sleep()
        found += vllm_rows(folder, traffic, repeats)
    setup = {"shape": shape, "dtype": "bfloat16", "requests": REQUESTS, "tokens": [SHORTEST, LONGEST]}
    setup |= {"prompt_tokens": sum(len(request.prompt) for request in queued), "requests_per_s": RATE}
    return setup | {"temperature": TEMPERATURE, "repeats": repeats, "budget_gb": budget_gb(policy)}, found


def budget_gb(policy: Policy) -> float:
    """GB of a cache for all requests of full length, and its block that is nobody's."""
    config = policy.model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = config.num_hidden_layers * 2 * config.num_key_value_heads * size * torch.finfo(DTYPE).bits // 8
    return (REQUESTS + 1) * 2 * LONGEST * token / 1e9


def our_row(engine: Watched, requests: list[Request], sampling: Sampling, repeats: int) -> dict[str, Any]:
    def run(requests: list[Request]) -> Iterator[tuple[int, int]]:
        torch.manual_seed(0)
        engine.steps = 0
        engine.blocks = None  # prompts are as if never seen
        return ((number, len(tokens)) for number, tokens, _ in engine.serve(requests, sampling))

    row = measure_serving(run, requests, repeats, warmup=2)
    later = row["tokens"] - len(requests)  # the first ones come from prefill
    return row | {"rows_at_once": later / engine.steps}


def vllm_rows(folder: str, traffic: dict[str, list[Request]], repeats: int) -> Rows:
    """For each kind of arrivals; and, where all is queued, vLLM's `generate`, which tells nobody of single tokens."""
    found = []
    with vllm_serve(folder, 2 * LONGEST, REQUESTS, TEMPERATURE) as vllm:
        if vllm is None:
            return []
        for arrivals, requests in traffic.items():
            row = measure_serving(vllm.serve, requests, repeats)
            found.append({"variant": "vllm", "arrivals": arrivals} | row | {"rows_at_once": row["tokens"] / vllm.steps})
        row = measure_serving(vllm.generate, traffic["queued"], repeats)
        kept = ("seconds", "tokens_per_s", "tokens", "spread")
        found.append({"variant": "vllm generate", "arrivals": "queued"} | {key: row[key] for key in kept})
    return found


def measure_serving(run: Serve, requests: list[Request], repeats: int, warmup: int = 1) -> dict[str, Any]:
    """Seconds until the last token and tokens/s, medians of `repeats` runs; of all their requests the median and the
    99th percentile of milliseconds from arrival to the first token (`first_ms`), and of those for each token after what
    came first (`ms_a_token`).

    Raises ValueError if a request got another number of tokens than it asked for.
    """
    took: list[float] = []
    first: list[float] = []
    later: list[float] = []
    for number in range(warmup + repeats):
        seen: Seen = [[] for _ in requests]
        answers, start = run(requests), time.perf_counter()
        for request, tokens in answers:
            seen[request].append((time.perf_counter() - start, tokens))
        if [sum(n for _, n in parts) for parts in seen] != [request.max_new_tokens for request in requests]:
            raise ValueError("A request got more or fewer tokens than it asked for.")
        if number >= warmup:
            took.append(max(parts[-1][0] for parts in seen))
            first += [parts[0][0] - request.arrival_s for parts, request in zip(seen, requests, strict=True)]
            later += [(parts[-1][0] - parts[0][0]) / sum(n for _, n in parts[1:]) for parts in seen if len(parts) > 1]
    seconds, spread = median_and_spread(took)
    tokens = sum(request.max_new_tokens for request in requests)
    row = {"seconds": seconds, "tokens_per_s": tokens / seconds, "tokens": tokens, "spread": spread}
    return row | _percentiles("first_ms", first) | _percentiles("ms_a_token", later)


def _percentiles(name: str, values: list[float]) -> dict[str, float | None]:
    if len(values) < 2:
        return {}
    high = statistics.quantiles(values, n=100, method="inclusive")[-1]
    return {f"{name}_median": 1e3 * statistics.median(values), f"{name}_p99": 1e3 * high}
