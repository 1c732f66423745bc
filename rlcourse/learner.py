"""What learns: the policy, what an algorithm needs beside it, and the optimizer; and what it computes for a step."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlcourse import advantages as adv
from rlcourse.batch import Batch, Minibatch, Rollout, batches_of
from rlcourse.collect import Completions
from rlcourse.config import TrainConfig
from rlcourse.dist import ALONE, OneProcess, is_sharded
from rlcourse.exact.weights import fused_weights, is_exact, may_be_exact, unknown_part
from rlcourse.logprobs import PlainPass
from rlcourse.lora import has_adapter
from rlcourse.measure.timing import PhaseTimer
from rlcourse.policy import Policy, ValueHead
from rlcourse.rollout import RolloutEngine

VALUE_LR = 1e-3  # of PPO's value head
GAMMA, GAE_LAMBDA = 1.0, 0.95  # of PPO


class Learner:
    """The policy, PPO's value head and the frozen reference where the config asks for them, and AdamW over the first
    two. Weights and moments are float32. With an adapter, only it trains, and its base is the reference.

    initial: the model that becomes the reference; by default a copy of the policy as it is.
    """

    def __init__(
        self, policy: Policy, config: TrainConfig, initial: PreTrainedModel | None = None, world: OneProcess = ALONE
    ):
        self.policy, self.config, self.world, self.reference = policy, config, world, None
        if config.needs_reference and has_adapter(policy.model):
            self.reference = policy.model
        elif config.needs_reference:
            self.reference = (initial or copy.deepcopy(policy.model)).eval().requires_grad_(False)
        self.policy_pass = model_pass(policy.model, config, config.compile)
        if self.reference is not None:
            self.reference_pass = model_pass(self.reference, config, as_base=True)
        groups = [{"params": [p for p in policy.model.parameters() if p.requires_grad], "peak_lr": config.lr}]
        self.value_head = None
        if config.advantage == "gae":
            head = ValueHead(policy.model.config.get_text_config().hidden_size)
            self.value_head = world.shard(head.to(policy.device))
            groups.append({"params": list(self.value_head.parameters()), "peak_lr": VALUE_LR})
        self.optimizer = new_optimizer(groups, config)
        self.parameters = [p for group in groups for p in group["params"]]

    def logprobs_and_values(self, rollout: Rollout) -> tuple[Tensor, Tensor | None]:
        """Each completion token's log-prob, and with a value head the value of the state before it: [rows, T]."""
        config = self.config
        logprobs, hidden = self.policy_pass.token_logprobs(rollout, config.sampling, config.logprob_chunk)
        return logprobs, None if self.value_head is None else self.value_head(hidden)

    @property
    def exact(self) -> bool:
        """Whether the log-probs are those of the exact engine, to the last bit."""
        return self.policy_pass.exact

    def values(self, rollout: Rollout) -> Tensor:
        """The value of the state before each completion token, [rows, T], 0 beyond a completion."""
        one, head = self.policy_pass, self.value_head
        return self._by_rows(rollout, one.exact, lambda part: head(one.hidden_states(part)) * part.completion_mask)

    def reference_logprobs(self, rollout: Rollout) -> Tensor:
        """The frozen reference's log-prob of each completion token, [rows, T]."""
        one, how = self.reference_pass, (self.config.sampling, self.config.logprob_chunk)
        return self._by_rows(rollout, one.exact, lambda part: one.token_logprobs(part, *how)[0])

    @torch.no_grad()
    def _by_rows(self, rollout: Rollout, exact: bool, compute: Callable[[Rollout], Tensor]) -> Tensor:
        """What `compute` returns of each micro-batch, together: [rows, T]. Ranks share the rows."""
        found = torch.zeros_like(rollout.logprobs)
        every = torch.arange(len(rollout.lengths), device=rollout.ids.device)
        for rows in batches_of(every, rollout, self.config, exact, self.world):
            of_rows = compute(rollout[rows])
            found[rows, : of_rows.shape[1]] = of_rows
        return self.world.all_reduce(found)


def new_optimizer(groups: list[dict[str, Any]], config: Any) -> torch.optim.AdamW:
    """AdamW over groups of parameters, each with its `peak_lr`."""
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def model_pass(model: PreTrainedModel, config: TrainConfig, compile: bool = False, as_base: bool = False) -> Any:
    """The forward pass of training: a `ShardedPass` for a sharded model; the `ExactPass`, whose log-probs are the fast
    engine's bit for bit, where GPU and model allow it; else a `PlainPass`.

    as_base: the model below its adapter, whose weights the engine doesn't keep, so its pass is plain.
    """
    if is_sharded(model):
        from rlcourse.distributed.sharded import ShardedPass

        return ShardedPass(model, config.dtype, compile)
    dtype, below_adapter = getattr(torch, config.dtype), as_base and has_adapter(model)
    could = dtype != torch.float32 and may_be_exact(model.device) and not unknown_part(model) and not below_adapter
    if not could or not is_exact(fused_weights(model, dtype)):  # the latter takes memory
        return PlainPass(model, config.dtype, compile, as_base)
    from rlcourse.exact.model import ExactPass  # only where there is Triton

    return ExactPass(model, dtype, config.gradient_checkpointing)


@torch.no_grad()
def make_batch(learner: Learner, completions: Completions, timer: PhaseTimer) -> Batch:
    """The step's batch: advantages, and reference log-probs, values and returns if configured; each timed apart."""
    config, rollout, rewards = learner.config, completions.rollout, completions.rewards
    mask, ref_logprobs, values, returns = rollout.completion_mask, None, None, None
    loss_mask = mask & rollout.finished[:, None] if config.mask_truncated else mask
    if learner.reference is not None:
        with timer("reference"):
            ref_logprobs = learner.reference_logprobs(rollout)
    if learner.value_head is not None:
        with timer("values"):
            values = learner.values(rollout)
    with timer("advantages"):
        if values is None:
            advantages = adv.completion_advantages(rewards, config.advantage, config.num_generations)[:, None] * mask
        else:
            estimated, returns = adv.gae(adv.token_rewards(rewards, mask), values, mask, GAMMA, GAE_LAMBDA)
            advantages = adv.whiten(estimated, loss_mask)
    return Batch(rollout, advantages, loss_mask, ref_logprobs, values, returns)


@torch.no_grad()
def compute_old_logprobs(
    learner: Learner, engine: RolloutEngine, batch: Batch, minibatches: list[Minibatch]
) -> Tensor | None:
    """The trainer's own log-probs [rows, T] before the first of several updates: the old policy of the importance
    ratio. None for one update alone, whose forward pass has them.

    Where engine and trainer are exact, they're the sampler's. Elsewhere micro-batches are those of the first epoch, so
    that the same kernels round alike: in bfloat16 other ones differ by more than GSPO's clip range.
    """
    if len(minibatches) == 1:
        return None
    if engine.exact and learner.exact:
        return batch.rollout.logprobs
    old_logprobs = torch.zeros_like(batch.rollout.logprobs)
    for minibatch in minibatches[: learner.config.minibatches]:
        for rows in minibatch.micro_batches:
            logprobs, _ = learner.logprobs_and_values(batch.rollout[rows])
            old_logprobs[rows, : logprobs.shape[1]] = logprobs
    return learner.world.all_reduce(old_logprobs)


def lr_factor(step: int, config: Any) -> float:
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
