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


def loss_by_rows(new, old, values, returns, mask, clip):
    rows = [loss_with(*(x[[i]] for x in (new, old, values, returns, mask)), clip) for i in range(len(mask))]
    return torch.stack(rows).mean()


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


def gae_packed(rewards, values, mask, gamma, lam, end=0.0):
    """Each row without the tool's words, and back. end: the share of the last value that follows it."""
    found = torch.zeros_like(values)
    for i in range(len(mask)):
        r, v = rewards[i][mask[i]], values[i][mask[i]]
        following = torch.cat([v[1:], end * v[-1:]])
        carried, out = 0.0, []
        for delta in (r + gamma * following - v).flip(0):
            carried = delta + gamma * lam * carried
            out.append(carried)
        if out:
            found[i, mask[i]] = torch.stack(out[::-1])
    return found


def gae_lesson(rewards, values, mask, gamma, lam):
    """The lesson's function, pasted: it takes the mask to have no gaps."""
    values, following = values * mask, torch.cat([values[:, 1:] * mask[:, 1:], torch.zeros(len(values), 1)], 1)
    deltas, found = rewards * mask + gamma * following - values, torch.zeros_like(values)
    carried = torch.zeros(len(values))
    for t in reversed(range(values.shape[1])):
        carried = deltas[:, t] + gamma * lam * carried
        found[:, t] = carried
    return found * mask


def gae_ends(rewards, values, mask, gamma, lam):
    """Each stretch of own tokens is an answer by itself."""
    found, starts = torch.zeros_like(values), mask.long().diff(dim=1, prepend=torch.zeros_like(mask[:, :1].long()))
    number = (starts == 1).cumsum(1)
    for n in range(1, int(number.max()) + 1):
        part = mask & (number == n)
        found += gae_packed(rewards, values, part, gamma, lam)
    return found


def gae_forward(rewards, values, mask, gamma, lam):
    deltas = gae_packed(rewards, values, mask, gamma, 0.0)
    return gae_packed(deltas.flip(1), 0 * values, mask.flip(1), 1.0, gamma * lam).flip(1)


def gae_multiplied(rewards, values, mask, gamma, lam):
    return gae_where(rewards, values, mask, gamma, lam) + 0.0 * rewards * values


# q3: a bound


def bound_weight(new, old, advantages, mask, clip, most, upper=None, cut=None, detach=True, weight=None):
    """REINFORCE with weights; the arguments at the end put mistakes in."""
    new, old, a = new[mask], old[mask], advantages[mask]
    r = (new - old).exp()
    r = r.detach() if detach else r
    gone = ((a > 0) & (r > 1 + clip)) | ((a < 0) & (r < 1 - clip)) if cut is None else cut(r)
    w = r.clamp(max=most if upper is None else upper) if weight is None else weight(r)
    return -(w * ~gone * a * new).mean()


def bound_ppo(new, old, advantages, mask, clip, most):
    r, a = (new[mask] - old[mask]).exp(), advantages[mask]
    return -torch.minimum(r * a, r.clamp(1 - clip, 1 + clip) * a).mean()


def bound_dual(new, old, advantages, mask, clip, most):
    """Dual-clip PPO: flat above the bound."""
    r, a = (new[mask] - old[mask]).exp(), advantages[mask]
    objective = torch.minimum(r * a, r.clamp(1 - clip, 1 + clip) * a)
    return -torch.where(a < 0, torch.maximum(objective, most * a), objective).mean()


def bound_multiplied(new, old, advantages, mask, clip, most):
    r = (new - old).exp().detach()
    gone = ((advantages > 0) & (r > 1 + clip)) | ((advantages < 0) & (r < 1 - clip))
    return -(r.clamp(max=most) * ~gone * advantages * new * mask).sum() / mask.sum()


# q4: a penalty


def k1(new, ref):
    return new - ref


def k2(new, ref):
    return (new - ref) ** 2 / 2


def k3(new, ref):
    return (ref - new).exp() - 1 - (ref - new)


def value_and_gradient(new, ref, value=k3, gradient=k2):
    return value(new, ref).detach() + gradient(new, ref) - gradient(new, ref).detach()


RIGHT = {"q1": loss_with, "q2": gae_where, "q3": bound_weight, "q4": value_and_gradient}
WRONG = {
    "q1": half_mended(loss_with, PLANTED)
    | {
        "larger": (functools.partial(loss_with, pick=torch.maximum), "took the larger"),
        "no clip": (functools.partial(loss_with, pick=lambda plain, near: plain), "Nothing is clipped"),
        "upside down": (lambda n, o, *rest: loss_with(o.detach(), n, *rest), "upside down"),
        "sign": (
            lambda n, o, v, r, m, c: loss_with(n, o, v, r, m, c) * -1 + ((v - r) ** 2)[m].mean(),
            "sign of the policy's part",
        ),
        "no critic": (lambda n, o, v, *rest: loss_with(n, o, v.detach(), *rest), "Nothing trains the critic"),
        "no half": (
            lambda n, o, v, r, m, c: loss_with(n, o, v, r, m, c) + ((v - r) ** 2)[m].mean() / 2,
            "half of the value loss",
        ),
        "critic alone": (
            lambda n, o, v, r, m, c: ((v - r) ** 2)[m].mean() / 2 + 0 * n.sum(),
            "policy's part is missing",
        ),
        "rows": (loss_by_rows, "over each row first"),
        "sum": (lambda *a: loss_with(*a) * a[4].sum(), "added the tokens up"),
        "unmasked": (lambda n, o, v, r, m, c: loss_with(n, o, v, r, torch.ones_like(m), c), "padding counts"),
        "old moves": lambda n, o, v, *rest: loss_with(n, n.detach(), v, *rest),
        "nan": lambda n, o, v, *rest: (n + v).sum() * torch.nan,
    },
    "q2": {
        "pasted": (gae_lesson, "end the answer for you"),
        "an answer by itself": gae_ends,
        "fading": (
            lambda r, v, m, g, lam: gae_columns(gae_sums(r, v, m, g, 0.0), 0 * v, m, g, lam, fill=True, decay=True),
            "fades on the tool's words",
        ),
        "the tool's value": (lambda *a: gae_columns(*a, fill=False, decay=False), "is not the next value"),
        "bootstrap": (gae_from_last, "bootstrapped from the last value"),
        "the tool's words": (
            lambda r, v, m, g, lam: gae_packed(r, v, torch.ones_like(m), g, lam),
            "tool's words have advantages",
        ),
        "the tool's words, masked": (
            lambda r, v, m, g, lam: gae_packed(r, v, torch.ones_like(m), g, lam) * m,
            "count as the policy's own",
        ),
        "returns": (lambda r, v, m, *a: gae_where(r, v, m, *a) + v.masked_fill(~m, 0.0), "these are the returns"),
        "forward": (gae_forward, "ran forwards"),
        "sign": (lambda r, v, m, *a: gae_packed(r, -v, m, *a), "sign of the values"),
        "TD errors": (lambda r, v, m, g, lam: gae_where(r, v, m, g, 0.0), "TD errors alone"),
        "lam alone": (lambda r, v, m, g, lam: gae_sums(r, v, m, g, lam, carry=lam), "with lam alone"),
        "gamma alone": (lambda r, v, m, g, lam: gae_where(r, v, m, g, 1.0), "lam is not used"),
        "no gamma": (lambda r, v, m, g, lam: gae_sums(r, v, m, 1.0, lam, carry=g * lam), "lacks its gamma"),
        "multiplied": (gae_multiplied, "0 * nan"),
    },
    "q3": {
        "PPO": (bound_ppo, "PPO as it was"),
        "dual clip": (bound_dual, "nothing calls the token back"),
        "clip alone": (lambda *a: bound_weight(*a, cut=lambda r: (r - 1).abs() > a[4]), "left the minimum out"),
        "nothing clipped": (lambda *a: bound_weight(*a, cut=lambda r: r < 0), "Nothing is clipped"),
        "clamped": (
            lambda *a: bound_weight(*a, cut=lambda r: r < 0, weight=lambda r: r.clamp(1 - a[4], 1 + a[4])),
            "no clip of PPO's",
        ),
        "one or none": (lambda *a: bound_weight(*a, weight=torch.ones_like), "1 or 0"),
        "bound at the clip": (lambda *a: bound_weight(*a, upper=1 + a[4]), "the bound of a bad one"),
        "weight with gradient": (lambda *a: bound_weight(*a, detach=False), "detach it"),
        "sign": (lambda *a: -bound_weight(*a), "sign is wrong"),
        "sum": (lambda *a: bound_weight(*a) * a[3].sum(), "added the tokens up"),
        "all places": (lambda *a: bound_weight(*a) * a[3].sum() / a[3].numel(), "divided by all places"),
        "unmasked": (lambda n, o, a, m, *rest: bound_weight(n, o, a, torch.ones_like(m), *rest), "padding counts"),
        "multiplied": (bound_multiplied, "inf - inf"),
        "detached": (lambda n, *rest: bound_weight(n.detach(), *rest), "no gradient flows"),
        "REINFORCE": lambda n, o, a, m, *rest: -(a[m] * n[m]).mean(),
    },
    "q4": {
        "k1": (k1, "that is k1"),
        "k2": (k2, "That is k2"),
        "k3": (k3, "gradient of k3"),
        "swapped": (
            lambda new, ref: k3(ref, new).detach() + k2(new, ref) - k2(new, ref).detach(),
            "the other way round",
        ),
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
