"""How exact and how lean: sampling against training log-probs, and the memory of log-probs in chunks."""

from typing import Any

import torch

from rlcourse.config import TrainConfig
from rlcourse.experience import PromptOrder
from rlcourse.logprobs import chunked_logprobs, token_logprobs
from rlcourse.policy import autocast, find_device, load_policy
from rlcourse.rollout import make_engine
from rlcourse.sampling import Sampling
from rlcourse.tasks import load_task

Rows = list[dict[str, Any]]


def mismatch(config: TrainConfig) -> tuple[dict[str, Any], Rows]:
    """Mean and maximum of |log-prob when sampled - log-prob in training| for each engine, with the config's model."""
    device = find_device(config)
    task = load_task(config.task, config.data_dir)
    policy = load_policy(config.model, device)
    problems = PromptOrder(task.problems("train"), config.seed).take(config.num_prompts)
    prompts = [policy.prompt(problem.question, task.instruction) for problem in problems]
    rows = []
    for name in ("hf-dynamic", "hf-static", "graph"):
        engine = make_engine(policy, name, getattr(torch, config.dtype), False)
        torch.manual_seed(config.seed)
        rollout = engine.generate(prompts, config.num_generations, config.max_new_tokens, config.sampling)
        with torch.no_grad(), autocast(config.dtype, device):
            logprobs, _, _ = token_logprobs(policy.model, rollout, config.sampling, config.logprob_chunk)
        gap = (logprobs - rollout.logprobs)[rollout.completion_mask].abs()
        rows.append(
            {
                "variant": name,
                "rows": config.rows,
                "tokens": len(gap),
                "mismatch_mean": gap.mean().item(),
                "mismatch_max": gap.max().item(),
            }
        )
    setup = {"model": config.model, "task": config.task, "dtype": config.dtype, "temperature": config.temperature}
    return setup, rows


def logprobs(rows: int = 64, length: int = 512, vocabulary: int = 151936, hidden_size: int = 896) -> tuple[dict, Rows]:
    """Peak GPU memory and seconds of log-probs, forward and backward, in chunks and all at once.

    Raises ValueError without a GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError("This measures GPU memory, and no CUDA GPU was found.")
    n = rows * length
    results = []
    for chunk in (1024, 4096, n):
        torch.manual_seed(0)
        hidden = torch.randn(n, hidden_size, device="cuda", requires_grad=True)
        head = (0.02 * torch.randn(vocabulary, hidden_size, device="cuda")).requires_grad_()
        targets = torch.randint(vocabulary, (n,), device="cuda")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        row = {"variant": "all at once" if chunk == n else f"chunks of {chunk}", "rows": rows, "tokens": n}
        try:
            start.record()
            with autocast("bfloat16", hidden.device):
                values, _ = chunked_logprobs(hidden, head, targets, Sampling(), chunk)
            values.mean().backward()
            end.record()
            torch.cuda.synchronize()
            row |= {"seconds": start.elapsed_time(end) / 1e3}
            row |= {"peak_memory_bytes": torch.cuda.max_memory_allocated() - before}
        except torch.OutOfMemoryError:
            row |= {"seconds": None, "peak_memory_bytes": None}
        results.append(row)
        del hidden, head, targets
        torch.cuda.empty_cache()
    setup = {"rows": rows, "length": length, "vocabulary": vocabulary, "hidden_size": hidden_size, "dtype": "bfloat16"}
    return setup, results
