"""How exact and how lean: sampling against training log-probs, and the memory of log-probs in chunks."""

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlcourse.batch import Rollout
from rlcourse.config import TrainConfig
from rlcourse.device import autocast
from rlcourse.exact.weights import may_be_exact
from rlcourse.head import chunked_logprobs
from rlcourse.learner import model_pass
from rlcourse.measure.timing import median_seconds
from rlcourse.policy import Policy
from rlcourse.rollout import make_engine, vllm
from rlcourse.sampling import Sampling
from tools.bench.prompts import policy_and_prompts
from tools.bench.results import Rows


def mismatch(config: TrainConfig) -> tuple[dict[str, Any], Rows]:
    """Mean and maximum of |log-prob when sampled - log-prob in training| for the config's model: for each engine, then
    for the fast engine by what may make it large: the token's probability, its place, padding, digits.

    `sampler_error_mean` and `trainer_error_mean` are the distances to the same model in float32.
    """
    policy, prompts = policy_and_prompts(config)
    dtype, rows = getattr(torch, config.dtype), []
    for name in ("hf-dynamic", "hf-static", *(["vllm"] if vllm.runs_on(policy.device) else []), "fast"):
        engine = make_engine(policy, name, dtype, False)
        torch.manual_seed(config.seed)
        rollout = engine.generate(prompts, config.num_generations, config.max_new_tokens, config.sampling)
        trained, exact = (_trainer_logprobs(policy, rollout, config, dtype) for dtype in (config.dtype, "float32"))
        rows.append({"variant": name} | _gap(rollout, trained, exact, rollout.completion_mask))
    for group, chosen in token_groups(policy, rollout, exact).items():
        rows.append({"variant": f"fast, {group}"} | _gap(rollout, trained, exact, chosen & rollout.completion_mask))
    setup = {"model": config.model, "task": config.task, "dtype": config.dtype, "temperature": config.temperature}
    return setup | {"rows": config.rows}, [row for row in rows if row["tokens"]]


@torch.no_grad()
def _trainer_logprobs(policy: Policy, rollout: Rollout, config: TrainConfig, dtype: str) -> Tensor:
    trained = model_pass(policy.model, dataclasses.replace(config, dtype=dtype))
    return trained.token_logprobs(rollout, config.sampling, config.logprob_chunk)[0]


def _gap(rollout: Rollout, trained: Tensor, exact: Tensor, chosen: Tensor) -> dict[str, float]:
    """Means and maximum over the tokens that are `chosen` [rows, T]."""
    gap = (trained - rollout.logprobs)[chosen].abs()
    if not len(gap):
        return {"tokens": 0}
    return {
        "tokens": len(gap),
        "mismatch_mean": gap.mean().item(),
        "mismatch_max": gap.max().item(),
        "sampler_error_mean": (rollout.logprobs - exact)[chosen].abs().mean().item(),
        "trainer_error_mean": (trained - exact)[chosen].abs().mean().item(),
    }


def token_groups(policy: Policy, rollout: Rollout, exact: Tensor) -> dict[str, Tensor]:
    """Groups of tokens, each a mask [rows, T]; exact: their log-probs in float32."""
    p, place = exact.exp(), torch.arange(exact.shape[1], device=exact.device).expand_as(exact)
    edges = (0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 1.01)
    groups = {f"p {low:g} to {min(high, 1):g}": (p >= low) & (p < high) for low, high in itertools.pairwise(edges)}
    for low, high in ((0, 10), (10, 30), (30, exact.shape[1])):
        groups[f"tokens {low + 1} to {high}"] = (place >= low) & (place < high)
    lengths = rollout.prompt_lengths + rollout.completion_lengths
    padded = (lengths <= lengths.float().median()).expand(exact.shape[1], -1).T
    groups |= {"more padding than most": padded, "less padding than most": ~padded}
    vocabulary = policy.tokenizer.convert_ids_to_tokens(range(len(policy.tokenizer)))
    digits = torch.tensor([i for i, token in enumerate(vocabulary) if token.strip("Ġ ").isdigit()])
    is_digit = torch.isin(rollout.completion_ids, digits.to(exact.device))
    return groups | {"digits": is_digit, "no digits": ~is_digit}


def logprobs(
    rows: int = 64, length: int = 512, vocabulary: int = 151936, hidden_size: int = 896, repeats: int = 5
) -> tuple[dict, Rows]:
    """Peak GPU memory and seconds (median) of log-probs, forward and backward, in chunks and all at once; those of the
    exact pass where there is one. Their rate counts 8 operations for each token, number of its state and word of the
    vocabulary: a product forward, the same again, and two for the gradients.

    Raises ValueError without a GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError("This measures GPU memory, and no CUDA GPU was found.")
    n = rows * length
    ways = {f"chunks of {chunk}": (_plain, chunk) for chunk in (1024, 4096)} | {"all at once": (_plain, n)}
    if may_be_exact(torch.device("cuda")):
        ways |= {f"exact, chunks of {chunk}": (_exact, chunk) for chunk in (1024, 2048, 4096)}
    results = []
    for variant, (way, chunk) in ways.items():
        torch.manual_seed(0)
        hidden = torch.randn(n, hidden_size, device="cuda", requires_grad=True)
        head = (0.02 * torch.randn(vocabulary, hidden_size, device="cuda")).requires_grad_()
        targets = torch.randint(vocabulary, (n,), device="cuda")
        forward = way(hidden, head, targets, chunk)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        row = {"variant": variant, "rows": rows, "tokens": n}
        run = partial(_forward_and_backward, hidden, head, forward)
        try:
            row |= {"seconds": median_seconds(run, hidden.device, repeats)}
            row |= {"peak_memory_bytes": torch.cuda.max_memory_allocated() - before}
            row |= {"tflops": 8 * n * hidden_size * vocabulary / row["seconds"] / 1e12}
        except torch.OutOfMemoryError:
            row |= {"seconds": None, "peak_memory_bytes": None, "tflops": None}
        results.append(row)
        del hidden, head, targets, forward, run
        torch.cuda.empty_cache()
    setup = {"rows": rows, "length": length, "vocabulary": vocabulary, "hidden_size": hidden_size, "dtype": "bfloat16"}
    return setup | {"repeats": repeats}, results


def _plain(hidden: Tensor, head: Tensor, targets: Tensor, chunk: int) -> Callable[[], Tensor]:
    """How the plain pass computes log-probs, from hidden states."""

    def forward() -> Tensor:
        with autocast("bfloat16", hidden.device):
            return chunked_logprobs(hidden, head, targets, Sampling(), chunk)

    return forward


def _exact(hidden: Tensor, head: Tensor, targets: Tensor, chunk: int) -> Callable[[], Tensor]:
    """How the exact pass does, from the residual stream: the last norm and its gradients are part of it."""
    from rlcourse.exact.head import LogProbs  # only where there is Triton

    norm = torch.ones(hidden.shape[1], device=hidden.device, requires_grad=True)
    weights = SimpleNamespace(norm=norm.detach(), head=head.detach().bfloat16(), dtype=torch.bfloat16, eps=1e-6)
    return lambda: LogProbs.apply(hidden, targets, weights, 1.0, chunk, norm, head)


def _forward_and_backward(hidden: Tensor, head: Tensor, forward: Callable[[], Tensor]) -> None:
    hidden.grad = head.grad = None
    forward().mean().backward()
