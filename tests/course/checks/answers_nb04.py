"""Answers to the exercises of lesson 04."""

import functools
import itertools

import torch
from answers import half_mended, named, ruled

from rlcourse.advantages import group_centered, group_normalized
from rlcourse.course.checks.nb04 import DRIFTS, LOSS_MISTAKES, PADDING, PLANTED, dr_grpo_loss, drift_by_loop


# q1: which divisions a gradient shows
def by_cosine(gradient, rewards, mask, n, lengths=True, stds=True):
    """The kind that the gradient points along most; with `lengths` or `stds` off that division is not considered."""
    found = {}
    for by_length, by_std in itertools.product((0, 1), repeat=2):
        advantages = (group_normalized if by_std else group_centered)(rewards, n)
        expected = advantages[:, None] * mask / (mask.sum(1, keepdim=True).clamp(min=1) if by_length else 1)
        found[by_length * lengths, by_std * stds] = -(expected * gradient).sum() / expected.norm() / gradient.norm()
    return torch.tensor(max(found, key=found.get))


# q2: the weight of a prompt
def group_weights(k, n):
    p = k / n
    return torch.stack([2 * n * p * (1 - p), 2 * (n * (n - 1) * p * (1 - p)).sqrt()])


def divided_by_std(k, n, ddof):
    centered, p = group_weights(k, n)[0], k / n
    return torch.stack([centered, centered / (p * (1 - p) * n / (n - ddof)).sqrt()])


# q3: a loss with five mistakes
def loss_with(logprobs, old, rewards, mask, n, limit, clip=0.2, wrong=()):
    """The loss of the exercise with some of its mistakes left in."""
    if "padding" not in wrong:
        logprobs, old = logprobs.masked_fill(~mask, 0.0), old.masked_fill(~mask, 0.0)
    advantages = rewards - (rewards.mean() if "baseline" in wrong else rewards.view(-1, n).mean(1).repeat_interleave(n))
    if "std" in wrong:
        advantages = advantages / (rewards.std() + 1e-4)
    a, ratio = advantages[:, None], (logprobs - old).exp()
    gain = ratio.clamp(1 - clip, 1 + clip) * a
    if "clip" not in wrong:
        gain = torch.minimum(gain, ratio * a)
    return -(gain * mask).sum() / (mask.sum() if "divisor" in wrong else len(mask) * limit)


RIGHT = {"q1": by_cosine, "q2": group_weights, "q3": loss_with}
WRONG = {
    "q1": {
        "swapped": (lambda *a: by_cosine(*a).flip(0), "wrong order"),
        "lengths alone": (lambda *a: by_cosine(*a, stds=False), "by the deviation"),
        "deviations alone": (lambda *a: by_cosine(*a, lengths=False), "by the length"),
        "None": (lambda *a: None, "is None"),
    },
    "q2": {
        "order": (lambda k, n: group_weights(k, n).flip(0), "in the wrong order"),
        "one answer": (lambda k, n: group_weights(k, n) / n, "the weight of one answer"),
        "right ones": (lambda k, n: group_weights(k, n) / 2, "the right answers alone"),
        "no scale": (lambda k, n: torch.stack([k / n * (1 - k / n), (k / n * (1 - k / n)).sqrt()]), "p (1 - p)"),
        "0 / 0": (functools.partial(divided_by_std, ddof=1), "not finite"),
        "n": (functools.partial(divided_by_std, ddof=0), "n - 1 in its denominator"),
    },
    "q3": half_mended(loss_with, PLANTED | {"padding": PADDING})
    | named(dr_grpo_loss, LOSS_MISTAKES)
    | {
        "GRPO": (functools.partial(dr_grpo_loss, wrong=("group std", "length")), "Both of GRPO's divisions"),
        "detached": (lambda lp, *a: loss_with(lp.detach(), *a), "no gradient flows"),
    },
    "q4": ruled(drift_by_loop, DRIFTS, "wrong"),
}
