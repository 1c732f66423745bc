"""One training step: rollout → reward → advantages → loss → optimizer."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlcourse import advantages as adv
from rlcourse.batch import Batch, Completions
from rlcourse.collect import RewardFunction, answer_rewards, collect, rollout_metrics
from rlcourse.config import TrainConfig
from rlcourse.device import without_cudnn_attention
from rlcourse.distributed.world import ALONE, World
from rlcourse.learner import Learner
from rlcourse.losses import aggregate, kl_estimate, sampler_correction, token_loss, value_loss
from rlcourse.measure.profiling import peak_memory_bytes
from rlcourse.measure.timing import PhaseTimer
from rlcourse.micro_batches import batches_of
from rlcourse.rollout import RolloutEngine
from rlcourse.tasks import Task
from rlcourse.tasks.prompts import PromptSampler

SAMPLER_CAP = 2.0  # the largest weight that makes up for a sampler's log-probs
GAMMA, GAE_LAMBDA = 1.0, 0.95  # of PPO, as the next line
VALUE_CLIP, VALUE_COEF = 0.2, 0.5


def train_step(
    learner: Learner,
    engine: RolloutEngine,
    task: Task,
    prompts: PromptSampler,
    step: int,
    reward_function: RewardFunction = answer_rewards,
) -> tuple[dict[str, Any], Completions]:
    """Training step number `step` (from 0), with the settings of `learner.config`. Returns what was measured, and the
    completions that it trained on.

    Measured are means over tokens or rows: of all that was sampled (`rollout_metrics`), of the batch (`kl`, by the
    sampler's log-probs, whose rounding in bfloat16 it holds too), and of the rows that train (`policy_loss`,
    `clip_fraction`, `value_loss`, and of a token before the trainer updates `mismatch`, the distance of its log-prob in
    the sampler from that in the trainer, and `sampler_ratio`, how much more probable it is to the trainer). A mean over
    nothing is None. `timing` has the seconds of each phase.
    """
    config = learner.config
    timer, means, grad_norms = PhaseTimer(learner.policy.device), Means(), []
    with without_cudnn_attention(), timer("step"):
        completions, sampled = collect(learner.policy, engine, task, prompts, config, reward_function, timer)
        if config.sleep:
            engine.sleep()
        with timer("advantages"):
            batch = make_batch(learner, completions)
        with timer("update"):
            minibatches = plan_minibatches(batch, config, learner.exact, learner.world)
            old = old_logprobs(learner, engine, batch, minibatches)
            for minibatch in minibatches:
                for rows in minibatch.micro_batches:
                    part = batch[rows]
                    mask, share = part.loss_mask, minibatch.share
                    logprobs, values = learner.logprobs_and_values(part.rollout)
                    before = logprobs.detach() if old is None else old[rows, : mask.shape[1]]
                    losses, clipped = token_loss(
                        logprobs, before, part.advantages, mask, surrogate=config.surrogate, ratio=config.ratio,
                        clip_low=config.clip_low, clip_high=config.clip_high,
                    )  # fmt: skip
                    sampler = part.rollout.logprobs
                    weights = sampler_correction(before, sampler, mask, config.sampler_correction, SAMPLER_CAP)
                    loss = aggregate(weights * losses, mask, config.aggregation, **share)
                    if config.kl_coef:
                        kl = kl_estimate(logprobs, part.ref_logprobs, "k3")
                        loss = loss + config.kl_coef * aggregate(kl, mask, config.aggregation, **share)
                    if values is not None:
                        errors = value_loss(values, part.values, part.returns, mask, VALUE_CLIP)
                        loss = loss + VALUE_COEF * aggregate(errors, mask, "token_mean", **share)
                        means.add("value_loss", errors, mask)
                    loss.backward()
                    means.add("policy_loss", losses, mask)
                    means.add("clip_fraction", clipped, mask)
                    means.add("mismatch", (before - sampler).abs(), part.rollout.completion_mask)
                    means.add("sampler_ratio", (before - sampler).exp(), part.rollout.completion_mask)
                grad_norms.append(learner.update(step))
    metrics = {"step": step + 1} | step_metrics(batch, sampled, config, means.together(learner.world))
    metrics |= {"grad_norm": sum(grad_norms) / len(grad_norms), "lr": learner.lr, "timing": step_timing(timer, sampled)}
    return metrics, completions


@torch.no_grad()
def make_batch(learner: Learner, completions: Completions) -> Batch:
    """Rewards as advantages, with the reference's log-probs, values and returns where the config asks for them."""
    config, rollout, rewards = learner.config, completions.rollout, completions.rewards
    mask = rollout.completion_mask
    loss_mask = mask & rollout.finished[:, None] if config.mask_truncated else mask
    ref_logprobs = None if learner.reference is None else learner.reference_logprobs(rollout)
    if config.advantage == "gae":
        values = learner.values(rollout)
        estimated, returns = adv.gae(adv.token_rewards(rewards, mask), values, mask, GAMMA, GAE_LAMBDA)
        return Batch(rollout, adv.whiten(estimated, mask), loss_mask, ref_logprobs, values, returns)
    advantages = completion_advantages(rewards, config)[:, None] * mask
    return Batch(rollout, advantages, loss_mask, ref_logprobs)


def completion_advantages(rewards: Tensor, config: TrainConfig) -> Tensor:
    """One advantage a completion from one reward a completion: [rows] → [rows]."""
    match config.advantage:
        case "reward":
            return rewards
        case "batch_centered":
            return adv.batch_centered(rewards)
        case "leave_one_out":
            return adv.leave_one_out(rewards, config.num_generations)
        case "group_centered":
            return adv.group_centered(rewards, config.num_generations)
        case "group_normalized":
            return adv.group_normalized(rewards, config.num_generations)
    raise ValueError(f"Advantage {config.advantage!r} is not one a completion.")


@dataclass(frozen=True)
class Minibatch:
    """The rows of one optimizer step, as micro-batches of row indices. share: what `aggregate` counts in all of it."""

    micro_batches: tuple[Tensor, ...]
    share: dict[str, int]


def plan_minibatches(batch: Batch, config: TrainConfig, packed: bool = False, world: World = ALONE) -> list[Minibatch]:
    """The mini-batches of all epochs: the rows in a new random order each time, cut into micro-batches (`batches_of`).
    These hold only rows that train; those that don't still count as rows."""
    train = rows_that_train(batch, config)
    planned = []
    for _ in range(config.inner_epochs):
        order = torch.randperm(len(train)).to(train.device)
        for rows in order.tensor_split(config.minibatches):
            tokens = int(batch.loss_mask[rows].sum())
            share = {"rows": len(rows), "tokens": tokens, "max_new_tokens": config.max_new_tokens}
            together = batches_of(rows[train[rows]], batch.rollout, config, packed, world)
            planned.append(Minibatch(together, share))
    return planned


def rows_that_train(batch: Batch, config: TrainConfig) -> Tensor:
    """Rows whose loss has a gradient, bool [rows]: without KL and value loss, one of zero advantage adds exactly 0."""
    if batch.values is not None or config.kl_coef:
        return torch.ones_like(batch.rollout.finished)
    return (batch.advantages * batch.loss_mask).ne(0).any(1)


@torch.no_grad()
def old_logprobs(learner: Learner, engine: RolloutEngine, batch: Batch, minibatches: list[Minibatch]) -> Tensor | None:
    """The trainer's own log-probs [rows, T] of the rows that train, before the first of several updates: the old policy
    of the importance ratio. None for one update alone, whose forward pass has them.

    Where engine and trainer are exact, they are the sampler's. Elsewhere those differ, in bfloat16 by more than GSPO's
    clip range; micro-batches are then those of the first epoch, so that the same kernels round alike.
    """
    if len(minibatches) == 1:
        return None
    if engine.exact and learner.exact:
        return batch.rollout.logprobs
    old = torch.zeros_like(batch.rollout.logprobs)
    for minibatch in minibatches[: learner.config.minibatches]:
        for rows in minibatch.micro_batches:
            logprobs, _ = learner.logprobs_and_values(batch.rollout[rows])
            old[rows, : logprobs.shape[1]] = logprobs
    return learner.world.total(old)


class Means:
    """Means over tokens that come in parts. Nothing waits for the GPU before `mean` or `max`."""

    def __init__(self):
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}
        self.largest: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Count the values [rows, T] where `mask` is True."""
        if not len(values):
            return
        values = values.detach().double().masked_fill(~mask, 0.0)
        zero = values.new_zeros(())
        self.sums[name] = self.sums.get(name, zero) + values.sum()
        self.counts[name] = self.counts.get(name, zero) + mask.sum()
        self.largest[name] = torch.maximum(self.largest.get(name, zero), values.max())

    def together(self, world: World) -> "Means":
        """What all ranks have counted. A rank without a micro-batch has counted nothing, under no name."""
        if world.size == 1:
            return self
        found = Means()
        for part in world.gather([{n: v.cpu() for n, v in d.items()} for d in vars(self).values()]):
            joins = torch.add, torch.add, torch.maximum
            for into, numbers, join in zip(vars(found).values(), part, joins, strict=True):
                for name, number in numbers.items():
                    into[name] = join(into[name], number) if name in into else number
        return found

    def mean(self, name: str) -> float | None:
        return (self.sums[name] / self.counts[name]).item() if self.max(name) is not None else None

    def max(self, name: str) -> float | None:
        """The largest value, 0 if all are negative; None of nothing."""
        return self.largest[name].item() if name in self.counts and self.counts[name] > 0 else None


def step_metrics(batch: Batch, sampled: Completions, config: TrainConfig, means: Means) -> dict[str, float | None]:
    """What was measured, by name; the names are the same in every step."""
    metrics = rollout_metrics(sampled, config)
    if batch.ref_logprobs is not None:
        kl = kl_estimate(batch.rollout.logprobs, batch.ref_logprobs, "k3")
        metrics["kl"] = kl[batch.rollout.completion_mask].mean().item()
    names = ["policy_loss", "clip_fraction"] + ([] if batch.values is None else ["value_loss"])
    metrics |= {name: means.mean(name) for name in names}
    metrics |= {"mismatch_mean": means.mean("mismatch"), "mismatch_max": means.max("mismatch")}
    return metrics | {
        "sampler_ratio_mean": means.mean("sampler_ratio"),
        "sampler_ratio_max": means.max("sampler_ratio"),
    }


def step_timing(timer: PhaseTimer, sampled: Completions) -> dict[str, float]:
    """Seconds of each phase, `{phase}_s`; sampled tokens a second of rollout; the most memory held so far."""
    timing = timer.take()
    tokens = int(sampled.rollout.completion_lengths.sum())
    memory = peak_memory_bytes(sampled.rollout.ids.device)
    return timing | {"tokens_per_s": tokens / timing["rollout_s"], "peak_memory_bytes": memory}
