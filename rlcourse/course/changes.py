"""Ours of what readers change in their loop after lesson 01: the losses of lessons 02 to 04, as `loop.loss` is called.
new, old, ref: log-probs under the policy (with gradient), the one that sampled and the one before training, [rows,
width - 1], 0 where mask is False; A: advantages, [rows, 1] or [rows, width - 1]. Each returns a scalar."""

import torch
from torch import Tensor

from rlcourse.course.loop import LIMIT

CLIP, BETA = 0.2, 0.04  # PPO's clip range; weight of the KL in DeepSeekMath's GRPO


def surrogate(new: Tensor, old: Tensor, A: Tensor) -> Tensor:
    """PPO's objective of each token, to be made large: [rows, width - 1]."""
    ratio = (new - old).exp()
    return torch.minimum(ratio * A, ratio.clamp(1 - CLIP, 1 + CLIP) * A)


def clipped(new: Tensor, old: Tensor, ref: Tensor, A: Tensor, mask: Tensor) -> Tensor:
    """Lesson 02: lesson 01's sum, of PPO's objective."""
    return -(surrogate(new, old, A) * mask).sum() / (len(mask) * LIMIT)


def grpo(new: Tensor, old: Tensor, ref: Tensor, A: Tensor, mask: Tensor) -> Tensor:
    """Lesson 03: the mean over the tokens of each answer, then over answers, and BETA times k3."""
    k3 = torch.expm1(ref - new) - (ref - new)
    by_token = (BETA * k3 - surrogate(new, old, A)) * mask
    return (by_token.sum(1) / mask.sum(1)).mean()


def dr_grpo(new: Tensor, old: Tensor, ref: Tensor, A: Tensor, mask: Tensor) -> Tensor:
    """Lesson 04: GRPO without the KL, the lengths deleted."""
    return clipped(new, old, ref, A, mask)
