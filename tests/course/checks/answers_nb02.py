"""Answers to the exercises of lesson 02."""

import functools

import torch
from answers import half_mended

from rlcourse.course.checks.nb02.q1_loss import PLANTED
from rlcourse.course.checks.nb02.q2_gae import gae_columns, gae_from_last, gae_sums


# q1: a loss with three mistakes
def clip_alone(plain, near):
    return near


def loss_with(new, old, values, returns, mask, clip, wrong=(), pick=torch.minimum):
    """The loss of the exercise with some of its mistakes left in."""
    advantages = returns - (values if "critic" in wrong else values.detach())
    ratio = (new - old).exp()
    pick = clip_alone if "minimum" in wrong else pick
    objective = pick(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    losses = (-objective + (values - returns) ** 2 / 2) * mask
    return losses.mean() if "padding" in wrong else losses.sum() / mask.sum()


# q2: GAE across a tool's words
def gae_where(rewards, values, mask, gamma, lam):
    """The columns backwards; on the tool's words everything that is carried stays."""
    found, zero = torch.zeros_like(values), torch.zeros(len(values))
    carried, after = zero, zero
    for t in range(values.shape[1] - 1, -1, -1):
        own = mask[:, t]
        new = rewards[:, t] + gamma * after - values[:, t] + gamma * lam * carried
        found[:, t] = torch.where(own, new, 0.0)
        carried, after = torch.where(own, new, carried), torch.where(own, values[:, t], after)
    return found


# q3: a bound
def bound_weight(new, old, advantages, mask, clip, most, upper=None, cut=None, detach=True, weight=None):
    """REINFORCE with weights; the arguments at the end put mistakes in."""
    new, old, a = new[mask], old[mask], advantages[mask]
    r = (new - old).exp()
    r = r.detach() if detach else r
    gone = ((a > 0) & (r > 1 + clip)) | ((a < 0) & (r < 1 - clip)) if cut is None else cut(r)
    w = r.clamp(max=most if upper is None else upper) if weight is None else weight(r)
    return -(w * ~gone * a * new).mean()


# q4: a penalty
def k2(new, ref):
    return (new - ref) ** 2 / 2


def k3(new, ref):
    return (ref - new).exp() - 1 - (ref - new)


def value_and_gradient(new, ref, value=k3, gradient=k2):
    return value(new, ref).detach() + gradient(new, ref) - gradient(new, ref).detach()


def gae_lesson(rewards, values, mask, gamma, lam):
    """The lesson's function, pasted: it takes the mask to have no gaps."""
    values, following = values * mask, torch.cat([values[:, 1:] * mask[:, 1:], torch.zeros(len(values), 1)], 1)
    deltas, found = rewards * mask + gamma * following - values, torch.zeros_like(values)
    carried = torch.zeros(len(values))
    for t in reversed(range(values.shape[1])):
        carried = deltas[:, t] + gamma * lam * carried
        found[:, t] = carried
    return found * mask


def bound_ppo(new, old, advantages, mask, clip, most):
    r, a = (new[mask] - old[mask]).exp(), advantages[mask]
    return -torch.minimum(r * a, r.clamp(1 - clip, 1 + clip) * a).mean()


RIGHT = {"q1": loss_with, "q2": gae_where, "q3": bound_weight, "q4": value_and_gradient}
WRONG = {
    "q1": half_mended(loss_with, PLANTED)
    | {
        "larger": (functools.partial(loss_with, pick=torch.maximum), "took the larger"),
        "no clip": (functools.partial(loss_with, pick=lambda plain, near: plain), "Nothing is clipped"),
        "upside down": (lambda n, o, *rest: loss_with(o.detach(), n, *rest), "upside down"),
        "no critic": (lambda n, o, v, *rest: loss_with(n, o, v.detach(), *rest), "Nothing trains the critic"),
        "sum": (lambda *a: loss_with(*a) * a[4].sum(), "added the tokens up"),
        "unmasked": (lambda n, o, v, r, m, c: loss_with(n, o, v, r, torch.ones_like(m), c), "padding counts"),
        "old moves": lambda n, o, v, *rest: loss_with(n, n.detach(), v, *rest),
    },
    "q2": {
        "pasted": (gae_lesson, "end the answer for you"),
        "the tool's value": (lambda *a: gae_columns(*a, fill=False, decay=False), "is not the next value"),
        "bootstrap": (gae_from_last, "bootstrapped from the last value"),
        "returns": (lambda r, v, m, *a: gae_where(r, v, m, *a) + v.masked_fill(~m, 0.0), "these are the returns"),
        "TD errors": (lambda r, v, m, g, lam: gae_where(r, v, m, g, 0.0), "TD errors alone"),
        "lam alone": (lambda r, v, m, g, lam: gae_sums(r, v, m, g, lam, carry=lam), "with lam alone"),
        "gamma alone": (lambda r, v, m, g, lam: gae_where(r, v, m, g, 1.0), "lam is not used"),
        "no gamma": (lambda r, v, m, g, lam: gae_sums(r, v, m, 1.0, lam, carry=g * lam), "lacks its gamma"),
    },
    "q3": {
        "PPO": (bound_ppo, "PPO as it was"),
        "clip alone": (lambda *a: bound_weight(*a, cut=lambda r: (r - 1).abs() > a[4]), "left the minimum out"),
        "nothing clipped": (lambda *a: bound_weight(*a, cut=lambda r: r < 0), "Nothing is clipped"),
        "one or none": (lambda *a: bound_weight(*a, weight=torch.ones_like), "1 or 0"),
        "bound at the clip": (lambda *a: bound_weight(*a, upper=1 + a[4]), "the bound of a bad one"),
        "weight with gradient": (lambda *a: bound_weight(*a, detach=False), "detach it"),
        "sign": (lambda *a: -bound_weight(*a), "sign is wrong"),
        "sum": (lambda *a: bound_weight(*a) * a[3].sum(), "added the tokens up"),
        "all places": (lambda *a: bound_weight(*a) * a[3].sum() / a[3].numel(), "divided by all places"),
        "unmasked": (lambda n, o, a, m, *rest: bound_weight(n, o, a, torch.ones_like(m), *rest), "padding counts"),
        "detached": (lambda n, *rest: bound_weight(n.detach(), *rest), "no gradient flows"),
        "REINFORCE": lambda n, o, a, m, *rest: -(a[m] * n[m]).mean(),
    },
    "q4": {
        "k2": (k2, "That is k2"),
        "k3": (k3, "gradient of k3"),
        "sum of two": (lambda new, ref: k3(new, ref) + k2(new, ref) - k2(new, ref).detach(), "added up"),
        "no half": (functools.partial(value_and_gradient, gradient=lambda new, ref: (new - ref) ** 2), "has no half"),
        "wrong sign": (lambda new, ref: k3(new, ref).detach() - k2(new, ref) + k2(new, ref).detach(), "wrong sign"),
        "clamped": (lambda new, ref: (new - ref).clamp(min=0), "The value is 0 where"),
        "mean": (lambda new, ref: value_and_gradient(new, ref).mean(), "one for each token"),
        "the whole vocabulary": (
            functools.partial(value_and_gradient, value=lambda new, ref: (new.exp() * (new - ref)).sum()),
            "the others in the batch",
        ),
    },
}
