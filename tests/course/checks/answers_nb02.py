"""Answers to the exercises of lesson 02."""

import functools

import torch
from answers import half_mended, named, ruled

from rlcourse.course.checks.nb02 import (
    BOUND_MISTAKES,
    GAE_MISTAKES,
    LOSS_MISTAKES,
    PLANTED,
    bounded,
    gae_sums,
    ppo_loss,
)


# q1: a loss with three mistakes
def loss_with(new, old, values, returns, mask, clip, wrong=()):
    """The loss of the exercise with some of its mistakes left in."""
    advantages = returns - (values if "critic" in wrong else values.detach())
    ratio = (new - old).exp()
    objective = ratio.clamp(1 - clip, 1 + clip) * advantages
    if "minimum" not in wrong:
        objective = torch.minimum(ratio * advantages, objective)
    losses = (-objective + (values - returns) ** 2 / 2) * mask
    return losses.mean() if "padding" in wrong else losses.sum() / mask.sum()


# q2: GAE across a tool's words
def gae_lesson(rewards, values, mask, gamma, lam):
    """The lesson's function, pasted: it takes the mask to have no gaps."""
    values, following = values * mask, torch.cat([values[:, 1:] * mask[:, 1:], torch.zeros(len(values), 1)], 1)
    deltas, found = rewards * mask + gamma * following - values, torch.zeros_like(values)
    carried = torch.zeros(len(values))
    for t in reversed(range(values.shape[1])):
        carried = deltas[:, t] + gamma * lam * carried
        found[:, t] = carried
    return found * mask


# q3: a bound
def bound_weight(new, old, advantages, mask, clip, most):
    """REINFORCE with weights."""
    new, old, a = new[mask], old[mask], advantages[mask]
    r = (new - old).exp().detach()
    gone = ((a > 0) & (r > 1 + clip)) | ((a < 0) & (r < 1 - clip))
    return -(r.clamp(max=most) * ~gone * a * new).mean()


def bound_ppo(new, old, advantages, mask, clip, most):
    r, a = (new[mask] - old[mask]).exp(), advantages[mask]
    return -torch.minimum(r * a, r.clamp(1 - clip, 1 + clip) * a).mean()


# q4: a penalty
def k2(new, ref):
    return (new - ref) ** 2 / 2


def k3(new, ref):
    return (ref - new).exp() - 1 - (ref - new)


def value_and_gradient(new, ref, value=k3, gradient=k2):
    return value(new, ref).detach() + gradient(new, ref) - gradient(new, ref).detach()


RIGHT = {"q1": loss_with, "q3": bound_weight, "q4": value_and_gradient}
WRONG = {
    "q1": half_mended(loss_with, PLANTED)
    | named(ppo_loss, LOSS_MISTAKES)
    | {
        "values detached": (lambda n, o, v, *rest: loss_with(n, o, v.detach(), *rest), "no gradient flows"),
        "old moves": lambda n, o, v, *rest: loss_with(n, n.detach(), v, *rest),
    },
    "q2": ruled(gae_sums, GAE_MISTAKES, "wrong") | {"pasted": (gae_lesson, "end the answer for you")},
    "q3": named(bounded, BOUND_MISTAKES)
    | {
        "the package's PPO": (bound_ppo, "PPO as it was"),
        "detached": (lambda n, *rest: bound_weight(n.detach(), *rest), "no gradient flows"),
        "REINFORCE": lambda n, o, a, m, *rest: -(a[m] * n[m]).mean(),
    },
    "q4": {
        "reversed": (lambda new, ref: k3(ref, new), "the other way round"),
        "k1": (lambda new, ref: new - ref, "The value is negative, as k1"),
        "k2": (k2, "That is k2"),
        "k3": (k3, "gradient of k3"),
        "sum of two": (lambda new, ref: k3(new, ref) + k2(new, ref) - k2(new, ref).detach(), "added up"),
        "no half": functools.partial(value_and_gradient, gradient=lambda new, ref: (new - ref) ** 2),
        "wrong sign": (lambda new, ref: k3(new, ref).detach() - k2(new, ref) + k2(new, ref).detach(), "wrong sign"),
        "clamped": (lambda new, ref: (new - ref).clamp(min=0), "The value is 0 where"),
        "mean": (lambda new, ref: value_and_gradient(new, ref).mean(), "one for each token"),
        "the whole vocabulary": (
            functools.partial(value_and_gradient, value=lambda new, ref: (new.exp() * (new - ref)).sum()),
            "the others in the batch",
        ),
    },
}
