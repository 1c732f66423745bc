"""What is measured: of a training step, and of a run.

The metrics of a step are means over tokens or rows. Of all that was sampled: reward, the task's metrics, lengths,
`entropy`. Of the batch: `kl`, by the sampler's log-probs, whose rounding in bfloat16 it contains. Of the rows that
train: `policy_loss`, `clip_fraction`, `value_loss`, and per token before the trainer updates `mismatch`, the distance
between its log-probs in sampler and trainer, and `sampler_ratio`, the trainer's probability over the sampler's. A mean
over nothing is None. The names are the same in every step.
"""

import time
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from rlcourse.advantages import has_signal
from rlcourse.batch import Batch
from rlcourse.collect import Completions
from rlcourse.config import TrainConfig
from rlcourse.dist import ALONE, OneProcess
from rlcourse.losses import kl_estimate
from rlcourse.measure.timing import PhaseTimer, peak_memory_bytes
from rlcourse.tasks import mean_metrics


class Means:
    """Means over tokens that come in parts. Nothing waits for the GPU before `together`."""

    def __init__(self):
        self.parts: dict[str, list[Tensor]] = defaultdict(list)  # by name: sum, count and largest value, float64 [3]

    def add(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Count the values [rows, T] where `mask` is True."""
        if len(values):
            values = values.detach().double().masked_fill(~mask, 0.0)
            self.parts[name].append(torch.stack([values.sum(), mask.sum().double(), values.max()]))

    def together(self, world: OneProcess = ALONE) -> dict[str, tuple[float, float]]:
        """Mean and largest value (0 if all are negative) of what all ranks have counted, by name, if it's anything."""
        parts, found = defaultdict(list), {}
        for of_rank in world.all_gather({name: torch.stack(few).tolist() for name, few in self.parts.items()}):
            for name, few in of_rank.items():
                parts[name] += few
        for name, few in parts.items():
            totals, counts, largest = zip(*few, strict=True)
            if sum(counts):
                found[name] = sum(totals) / sum(counts), max(0.0, *largest)
        return found


def rollout_metrics(sampled: Completions, config: TrainConfig) -> dict[str, float | None]:
    """Means over all sampled completions of a step. `entropy` is in nats per token, estimated as -log p of the sampled
    tokens."""
    answers, rewards, rollout = sampled.answers, sampled.rewards, sampled.rollout

    def length(some: list) -> float | None:
        return sum(a.tokens for a in some) / len(some) if some else None

    return {
        "reward": rewards.mean().item(),
        "reward_std": (rewards - rewards[0]).std(unbiased=False).item(),
        **mean_metrics(answers),
        "truncated": sum(not a.finished for a in answers) / len(answers),
        "length": length(answers),
        "length_right": length([a for a in answers if a.right]),
        "length_wrong": length([a for a in answers if not a.right]),
        "groups_without_signal": 1.0 - has_signal(rewards, config.num_generations).float().mean().item(),
        "entropy": -rollout.logprobs[rollout.completion_mask].mean().item(),
    }


def step_metrics(
    batch: Batch, sampled: Completions, config: TrainConfig, means: dict[str, tuple[float, float]]
) -> dict[str, float | None]:
    metrics, nothing = rollout_metrics(sampled, config), (None, None)
    if batch.ref_logprobs is not None:
        mask = batch.rollout.completion_mask
        metrics["kl"] = kl_estimate(batch.rollout.logprobs, batch.ref_logprobs, mask)[mask].mean().item()
    for name in ["policy_loss", "clip_fraction"] + ([] if batch.values is None else ["value_loss"]):
        metrics[name], _ = means.get(name, nothing)
    for name in ("mismatch", "sampler_ratio"):
        metrics[f"{name}_mean"], metrics[f"{name}_max"] = means.get(name, nothing)
    return metrics


def step_timing(timer: PhaseTimer, sampled: Completions) -> dict[str, float]:
    """Seconds of each phase, `{phase}_s`; sampled tokens per second of rollout; the most memory held so far."""
    timing = timer.take()
    tokens = int(sampled.rollout.completion_lengths.sum())
    memory = peak_memory_bytes(sampled.rollout.ids.device)
    return timing | {"tokens_per_s": tokens / timing["rollout_s"], "peak_memory_bytes": memory}


def run_summary(training: Any, after: dict[str, Any]) -> dict[str, Any]:
    """What every `summary.json` has. training: a `TrainingLoop` that's done; after: its last test."""
    changed = sum(line["grad_norm"] > 0 and line["lr"] > 0 for line in training.steps)
    summary = {"wall_seconds": time.perf_counter() - training.clock, "seconds": dict(training.spent.seconds)}
    summary |= {"peak_memory_bytes": peak_memory_bytes(training.device), "seed": training.config.seed}
    summary |= {"steps": training.step, "steps_that_changed_weights": changed, "warnings": training.run.warned()}
    summary |= {"folder": str(training.run.path), "metrics": training.metrics}
    return summary | {"before": training.test_before, "after": after}
