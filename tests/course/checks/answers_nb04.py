"""Answers to the exercises of lesson 04."""

import functools
import itertools

import torch
from answers import half_mended, named, ruled

from rlcourse.advantages import group_centered, group_normalized
from rlcourse.course.checks import nb02
from rlcourse.course.checks.nb04 import DRIFTS, PLANTED, STEP_MISTAKES, drift_by_loop, step_loss


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


def divided_by_std(k, n, ddof):
    centered, p = group_weights(k, n)[0], k / n
    return torch.stack([centered, centered / (p * (1 - p) * n / (n - ddof)).sqrt()])


RIGHT = {"q1": nb02.clipped_loss, "q2": by_cosine, "q3": group_weights}
WRONG = {
    "q1": {name: entry for name, entry in named(nb02.clipped_loss, nb02.CLIPPED).items() if name != "log-prob"},
    "q2": {
        "swapped": (lambda *a: by_cosine(*a).flip(0), "wrong order"),
        "lengths alone": (lambda *a: by_cosine(*a, stds=False), "by the deviation"),
        "deviations alone": (lambda *a: by_cosine(*a, lengths=False), "by the length"),
        "None": (lambda *a: None, "is None"),
    },
    "q3": {
        "order": (lambda k, n: group_weights(k, n).flip(0), "in the wrong order"),
        "one answer": (lambda k, n: group_weights(k, n) / n, "the weight of one answer"),
        "right ones": (lambda k, n: group_weights(k, n) / 2, "the right answers alone"),
        "no scale": (lambda k, n: torch.stack([k / n * (1 - k / n), (k / n * (1 - k / n)).sqrt()]), "p (1 - p)"),
        "0 / 0": (functools.partial(divided_by_std, ddof=1), "not finite"),
        "n": (functools.partial(divided_by_std, ddof=0), "n - 1 in its denominator"),
    },
    "q4": half_mended(step_loss, PLANTED)
    | named(step_loss, STEP_MISTAKES)
    | {"detached": (lambda logits, *rest: step_loss(logits.detach(), *rest), "no gradient flows")},
    "q5": ruled(drift_by_loop, DRIFTS, "wrong"),
}
