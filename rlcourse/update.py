"""From training data to new weights: mini-batches, micro-batches, the loss, and the optimizer step."""

import math
from collections import defaultdict

import torch
from torch import Tensor

from rlcourse.config import TrainConfig
from rlcourse.experience import Experience, trim
from rlcourse.logprobs import token_logprobs
from rlcourse.losses import aggregate, kl_estimate, token_loss, value_loss
from rlcourse.policy import Policy, ValueHead, autocast


def make_optimizer(policy: Policy, value_head: ValueHead | None, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the policy and, with its own learning rate, the value head. Weights and moments are float32."""
    groups = [{"params": list(policy.model.parameters()), "lr": config.lr, "peak_lr": config.lr}]
    if value_head is not None:
        groups.append({"params": list(value_head.parameters()), "lr": config.value_lr, "peak_lr": config.value_lr})
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True)


def lr_factor(step: int, config: TrainConfig) -> float:
    """Learning rate of training step `step` (from 0) as a share of its peak: linear warm-up, then the schedule."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    match config.schedule:
        case "linear":
            return 1.0 - progress
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0


class Update:
    """The update phase. Calling it trains on one step's experience and returns the means of what it measured.

    Entropy, KL and the mismatch between sampling and training are means over the completions that train: those without
    any gradient are not computed at all. None stands for a mean over nothing.
    """

    def __init__(self, policy: Policy, value_head: ValueHead | None, config: TrainConfig):
        self.policy, self.value_head, self.config = policy, value_head, config
        self.optimizer = make_optimizer(policy, value_head, config)

    def __call__(self, experience: Experience, step: int) -> dict[str, float | None]:
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * lr_factor(step, self.config)
        sums: dict[str, float] = defaultdict(float)
        rows = len(experience.rewards)
        for epoch in range(self.config.inner_epochs):
            order = torch.randperm(rows).to(experience.rewards.device)
            for number, minibatch in enumerate(order.tensor_split(self.config.minibatches)):
                first = epoch == 0 and number == 0  # the policy is still the one that sampled
                self._minibatch(experience, minibatch, sums, first)
        passes = self.config.inner_epochs * self.config.minibatches
        sums["grad_norm"] /= passes
        return self._means(sums) | {"lr": self.optimizer.param_groups[0]["lr"]}

    def _minibatch(self, experience: Experience, rows: Tensor, sums: dict[str, float], first: bool) -> None:
        """One optimizer step. Micro-batches hold rows of like length, so that little padding is computed."""
        tokens = int(experience.loss_mask[rows].sum())
        training = self._rows_that_train(experience, rows)
        lengths = experience.rollout.prompt_mask.sum(1) + experience.rollout.lengths
        by_length = training[lengths[training].argsort(stable=True)]
        for micro in by_length.split(self.config.micro_batch_rows):
            if len(micro):
                loss = self._loss(experience, micro, len(rows), tokens, sums, first)
                loss.backward()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm).item()
        if not math.isfinite(grad_norm):
            raise RuntimeError("The gradient is not finite, so the weights were left alone: try a lower --lr.")
        sums["grad_norm"] += grad_norm
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _rows_that_train(self, experience: Experience, rows: Tensor) -> Tensor:
        """Rows whose loss has a gradient: without KL and value loss, a row of zero advantage adds exactly nothing."""
        if self.value_head is not None or (self.config.kl_coef and self.config.kl_in == "loss"):
            return rows
        return rows[(experience.advantages * experience.loss_mask)[rows].ne(0).any(1)]

    def _loss(self, experience: Experience, micro: Tensor, rows: int, tokens: int, sums, first: bool) -> Tensor:
        """The micro-batch's share of the loss of a mini-batch of `rows` rows and `tokens` tokens."""
        config = self.config
        rollout = trim(experience.rollout[micro])
        length = rollout.completion_ids.shape[1]

        def part(tensor: Tensor) -> Tensor:
            return tensor[micro, :length]

        mask = part(experience.loss_mask)
        share = {"how": config.aggregation, "rows": rows, "tokens": tokens, "max_new_tokens": config.max_new_tokens}
        with autocast(config.dtype, self.policy.device):
            logprobs, entropy, hidden = token_logprobs(
                self.policy.model, rollout, config.sampling, config.logprob_chunk, config.compile
            )
        policy_loss, clipped = token_loss(
            logprobs,
            rollout.logprobs,
            part(experience.advantages),
            mask,
            surrogate=config.surrogate,
            ratio=config.ratio,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
        )
        loss = aggregate(policy_loss, mask, **share)
        self._measure(sums, "policy_loss", policy_loss, mask)
        self._measure(sums, "clip_fraction", clipped, mask)
        self._measure(sums, "entropy", entropy, rollout.completion_mask)
        if first:
            gap = (logprobs.detach() - rollout.logprobs).abs()
            self._measure(sums, "mismatch_mean", gap, rollout.completion_mask)
            sums["mismatch_max"] = max(sums["mismatch_max"], gap[rollout.completion_mask].max().item())
        if experience.ref_logprobs is not None:
            ref_logprobs = part(experience.ref_logprobs)
            self._measure(sums, "kl", kl_estimate(logprobs.detach(), ref_logprobs, "k3"), rollout.completion_mask)
            if config.kl_coef and config.kl_in == "loss":
                kl = kl_estimate(logprobs, ref_logprobs, config.kl_estimator)
                loss = loss + config.kl_coef * aggregate(kl, mask, **share)
        if self.value_head is not None:
            values = self.value_head(hidden)
            errors = value_loss(values, part(experience.values), part(experience.returns), mask, config.value_clip)
            loss = loss + config.value_coef * aggregate(errors, mask, **share | {"how": "token_mean"})
            self._measure(sums, "value_loss", errors, mask)
        return loss

    def _measure(self, sums: dict[str, float], name: str, values: Tensor, mask: Tensor) -> None:
        """Add a mean over tokens to `sums`, as a sum and a count."""
        sums[name] += values.detach()[mask].double().sum().item()
        sums[name + "/tokens"] += int(mask.sum())

    def _means(self, sums: dict[str, float]) -> dict[str, float | None]:
        """Sums and counts as means; every name is there in every step."""
        names = ["policy_loss", "clip_fraction", "entropy", "mismatch_mean"]
        names += ["kl"] if self.config.needs_reference else []
        names += ["value_loss"] if self.value_head is not None else []
        means = {name: sums[name] / sums[name + "/tokens"] if sums[name + "/tokens"] else None for name in names}
        largest = None if means["mismatch_mean"] is None else sums["mismatch_max"]
        return means | {"mismatch_max": largest, "grad_norm": sums["grad_norm"]}
