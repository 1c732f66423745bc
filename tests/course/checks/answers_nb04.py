"""Answers to the exercises of lesson 04."""

import itertools

import torch

from rlcourse.advantages import group_centered, group_normalized
from rlcourse.course.checks.builders import policy_loss
from rlcourse.course.checks.nb04 import step_loss


# q2: which divisions a gradient shows
def by_cosine(gradient, rewards, mask, n, lengths=True, stds=True):
    """The kind that the gradient points along most; with `lengths` or `stds` off that division is not considered."""
    found = {}
    for by_length, by_std in itertools.product((0, 1), repeat=2):
        advantages = (group_normalized if by_std else group_centered)(rewards, n)
        expected = advantages[:, None] * mask / (mask.sum(1, keepdim=True).clamp(min=1) if by_length else 1)
        found[by_length * lengths, by_std * stds] = -(expected * gradient).sum() / expected.norm() / gradient.norm()
    return torch.tensor(max(found, key=found.get))


# q3: the weight of a prompt
def group_weights(k, n):
    p = k / n
    return torch.stack([2 * n * p * (1 - p), 2 * (n * (n - 1) * p * (1 - p)).sqrt()])


def divided_by_zero(k, n):
    centered, p = group_weights(k, n)[0], k / n
    return torch.stack([centered, centered / (p * (1 - p) * n / (n - 1)).sqrt()])


RIGHT = {"q1": policy_loss, "q2": by_cosine, "q3": group_weights}
WRONG = {
    "q2": {
        "swapped": (lambda *a: by_cosine(*a).flip(0), "wrong order"),
        "lengths alone": (lambda *a: by_cosine(*a, stds=False), "by the deviation"),
        "deviations alone": (lambda *a: by_cosine(*a, lengths=False), "by the length"),
        "None": (lambda *a: None, "is None"),
    },
    "q3": {"0 / 0": (divided_by_zero, "not finite")},
    "q4": {"detached": (lambda logits, *rest: step_loss(logits.detach(), *rest), "no gradient flows")},
}
