"""What learns: the policy, what an algorithm needs beside it, and the optimizer."""

import math
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlcourse.batch import Rollout
from rlcourse.config import TrainConfig
from rlcourse.distributed import is_sharded, whole
from rlcourse.distributed.world import ALONE, World
from rlcourse.exact.weights import fused_weights, is_exact, may_be_exact, unknown_part
from rlcourse.logprobs import PlainPass
from rlcourse.lora import has_adapter
from rlcourse.micro_batches import batches_of
from rlcourse.policy import Policy, ValueHead, frozen_copy

VALUE_LR = 1e-3  # of PPO's value head
MAX_GRAD_NORM = 1.0  # gradients of a larger norm are scaled down to it


class Learner:
    """The policy, PPO's value head and the frozen reference where the config asks for them, and AdamW over the first
    two. Weights and moments are float32. Of a policy with an adapter only that learns, and the reference is its base.

    start: the model that the reference is a copy of; the policy as it is now if not given. Of a sharded policy it must
    be given, and is the reference itself. world: who shares the work.
    """

    def __init__(
        self,
        policy: Policy,
        config: TrainConfig,
        start: PreTrainedModel | None = None,
        world: World = ALONE,
    ):
        self.policy, self.config, self.world = policy, config, world
        self.reference = None
        if config.needs_reference:
            adapted = has_adapter(policy.model)
            if is_sharded(policy.model):
                self.reference = start.eval().requires_grad_(False)
            else:
                self.reference = policy.model if adapted else frozen_copy(start or policy.model)
        self.policy_pass = model_pass(policy.model, config, config.compile)
        if self.reference is not None:
            self.reference_pass = model_pass(self.reference, config, as_base=True)
        hidden_size = policy.model.config.get_text_config().hidden_size
        gae = config.advantage == "gae"
        self.value_head = world.shard(ValueHead(hidden_size).to(policy.device)) if gae else None
        groups = [{"params": [p for p in policy.model.parameters() if p.requires_grad], "peak_lr": config.lr}]
        if self.value_head is not None:
            groups.append({"params": list(self.value_head.parameters()), "peak_lr": VALUE_LR})
        self.optimizer = new_optimizer(groups, config)

    def logprobs_and_values(self, rollout: Rollout) -> tuple[Tensor, Tensor | None]:
        """Of each completion token its log-prob, and with a value head the value of the state before it: [rows, T]."""
        config = self.config
        logprobs, hidden = self.policy_pass.token_logprobs(rollout, config.sampling, config.logprob_chunk)
        return logprobs, None if self.value_head is None else self.value_head(hidden)

    @property
    def exact(self) -> bool:
        """Whether the log-probs are those of the exact engine, to the last bit."""
        return self.policy_pass.exact

    @property
    def lr(self) -> float:
        """The policy's learning rate in the last update."""
        return self.optimizer.param_groups[0]["lr"]

    @torch.no_grad()
    def values(self, rollout: Rollout) -> Tensor:
        """The value of the state before each completion token, [rows, T], 0 beyond a completion."""
        values = torch.zeros_like(rollout.logprobs)
        for rows in self._micro_batches(rollout, self.policy_pass):
            part = rollout[rows]
            hidden = self.policy_pass.hidden_states(part)
            values[rows, : hidden.shape[1]] = self.value_head(hidden) * part.completion_mask
        return self.world.total(values)

    @torch.no_grad()
    def reference_logprobs(self, rollout: Rollout) -> Tensor:
        """The frozen reference's log-prob of each completion token, [rows, T]."""
        config, logprobs = self.config, torch.zeros_like(rollout.logprobs)
        for rows in self._micro_batches(rollout, self.reference_pass):
            part = rollout[rows]
            found, _ = self.reference_pass.token_logprobs(part, config.sampling, config.logprob_chunk)
            logprobs[rows, : found.shape[1]] = found
        return self.world.total(logprobs)

    def _micro_batches(self, rollout: Rollout, model_pass: Any) -> tuple[Tensor, ...]:
        """All rows of the rollout; of several ranks this one's."""
        every = torch.arange(len(rollout.lengths), device=rollout.ids.device)
        return batches_of(every, rollout, self.config, model_pass.exact, self.world)

    def update(self, step: int) -> float:
        """One optimizer step with the gradients that there are, at the learning rate of training step `step` (from 0).
        Returns the norm of the gradient before it was clipped.

        Raises RuntimeError, drops the gradients and leaves the weights alone if the gradient is not finite.
        """
        self.world.add_gradients(parameters_of(self.optimizer))
        return update(self.optimizer, self.config, step)


def new_optimizer(groups: list[dict[str, Any]], config: Any) -> torch.optim.AdamW:
    """AdamW over groups of parameters, each with its `peak_lr`."""
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def update(optimizer: torch.optim.Optimizer, config: Any, step: int) -> float:
    """See `Learner.update`. config: that of any training, with what `lr_factor` reads."""
    grad_norm = whole(torch.nn.utils.clip_grad_norm_(parameters_of(optimizer), MAX_GRAD_NORM)).item()
    if not math.isfinite(grad_norm):
        optimizer.zero_grad(set_to_none=True)  # or a caller who goes on would add to them
        raise RuntimeError("The gradient is not finite, so the weights were left alone: try a lower --lr.")
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * lr_factor(step, config)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return grad_norm


def model_pass(model: PreTrainedModel, config: TrainConfig, compile: bool = False, as_base: bool = False) -> Any:
    """What computes log-probs in training: the pass whose numbers are those of the fast engine where there is one,
    else a `PlainPass`. There is none of a sharded model, of which no rank has all weights, nor of what lies below an
    adapter, whose weights the engine does not hold.

    as_base: of a model with an adapter, what it is without it.
    """
    if is_sharded(model):
        from rlcourse.distributed.sharded import ShardedPass

        return ShardedPass(model, config.dtype, compile)
    dtype, plain = getattr(torch, config.dtype), PlainPass(model, config.dtype, compile, as_base)
    below_adapter = as_base and has_adapter(model)
    if dtype == torch.float32 or not may_be_exact(model.device) or unknown_part(model) or below_adapter:
        return plain  # before memory is taken
    if not is_exact(fused_weights(model, dtype)):
        return plain
    from rlcourse.exact.model import ExactPass  # only where there is Triton

    return ExactPass(model, dtype, config.gradient_checkpointing)


def lr_factor(step: int, config: Any) -> float:
    """Learning rate of training step `step` (from 0) as a share of its peak: linear warm-up, then the schedule.

    config: with steps, warmup_steps and schedule.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    match config.schedule:
        case "linear":
            return 1.0 - progress
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0
