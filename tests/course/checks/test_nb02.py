"""The checks of lesson 02 pass what is right, kill what is wrong, and name the mistake."""

import functools
import itertools

import pytest
import torch
from answers import common_tests

from rlcourse.course.checks import Local
from rlcourse.course.checks.nb02 import QUESTIONS
from rlcourse.course.checks.nb02.q1_loss import PLANTED
from rlcourse.course.checks.nb02.q2_gae import gae_columns, gae_from_last, gae_sums

# q1: a loss with three mistakes ----------------------------------------------------------------------------------


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


def loss_of_real_tokens(new, old, values, returns, mask, clip):
    new, old, values, returns = (x[mask] for x in (new, old, values, returns))
    a, r = (returns - values).detach(), torch.exp(new - old)
    policy = torch.max(-a * r, -a * torch.clamp(r, 1 - clip, 1 + clip))
    return (policy + 0.5 * (values - returns).square()).mean()


def loss_by_where(new, old, values, returns, mask, clip):
    with torch.no_grad():
        a, r = returns - values, (new - old).exp()
        cut = torch.where(a > 0, r > 1 + clip, r < 1 - clip)
        edge = torch.where(a > 0, 1 + clip, 1 - clip)
    ratio = torch.where(cut, edge, (new - old).exp())
    return ((0.5 * (values - returns) ** 2 - ratio * a) * mask).sum() / mask.sum()


def loss_by_rows(new, old, values, returns, mask, clip):
    rows = [loss_with(*(x[[i]] for x in (new, old, values, returns, mask)), clip) for i in range(len(mask))]
    return torch.stack(rows).mean()


SUBSETS = [wrong for count in (1, 2, 3) for wrong in itertools.combinations(PLANTED, count)]

# q2: GAE across a tool's words -----------------------------------------------------------------------------------


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


# q3: a bound -----------------------------------------------------------------------------------------------------


def bound_weight(new, old, advantages, mask, clip, most, upper=None, cut=None, detach=True, weight=None):
    """REINFORCE with weights; the arguments at the end put mistakes in."""
    new, old, a = new[mask], old[mask], advantages[mask]
    r = (new - old).exp()
    r = r.detach() if detach else r
    gone = ((a > 0) & (r > 1 + clip)) | ((a < 0) & (r < 1 - clip)) if cut is None else cut(r)
    w = r.clamp(max=most if upper is None else upper) if weight is None else weight(r)
    return -(w * ~gone * a * new).mean()


def bound_surrogate(new, old, advantages, mask, clip, most):
    """PPO's minimum, and a straight line where the bound is at work."""
    clean = torch.where(mask, new, 0.0), torch.where(mask, old, 0.0), torch.where(mask, advantages, 0.0)
    new, old, a = clean
    r = (new - old).exp()
    ppo = torch.minimum(r * a, r.clamp(1 - clip, 1 + clip) * a)
    objective = torch.where((a < 0) & (r > most), most * a * new, ppo)
    return -objective.sum() / mask.sum()


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


# q4: a penalty ---------------------------------------------------------------------------------------------------


def k1(new, ref):
    return new - ref


def k2(new, ref):
    return (new - ref) ** 2 / 2


def k3(new, ref):
    return (ref - new).exp() - 1 - (ref - new)


def value_and_gradient(new, ref, value=k3, gradient=k2):
    return value(new, ref).detach() + gradient(new, ref) - gradient(new, ref).detach()


def with_score(new, ref):
    d = (new - ref).detach()
    return torch.expm1(-d) + d + d * (new - new.detach())


class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, new, ref):
        ctx.save_for_backward(new - ref)
        return k3(new, ref)

    @staticmethod
    def backward(ctx, out):
        return out * (ctx.saved_tensors[0] + 1), None  # one more in all places: a score, and its mean is 0


RIGHT = {
    "q1": [loss_with, loss_of_real_tokens, loss_by_where],
    "q2": [gae_where, gae_packed],
    "q3": [bound_weight, bound_surrogate],
    "q4": [value_and_gradient, with_score, Both.apply],
}
WRONG = {
    "q1": {"+".join(wrong): functools.partial(loss_with, wrong=wrong) for wrong in SUBSETS}
    | {
        "larger": functools.partial(loss_with, pick=torch.maximum),
        "no clip": functools.partial(loss_with, pick=lambda plain, near: plain),
        "upside down": lambda n, o, *rest: loss_with(o.detach(), n, *rest),
        "sign": lambda n, o, v, r, m, c: loss_with(n, o, v, r, m, c) * -1 + ((v - r) ** 2)[m].mean(),
        "no critic": lambda n, o, v, *rest: loss_with(n, o, v.detach(), *rest),
        "no half": lambda n, o, v, r, m, c: loss_with(n, o, v, r, m, c) + ((v - r) ** 2)[m].mean() / 2,
        "critic alone": lambda n, o, v, r, m, c: ((v - r) ** 2)[m].mean() / 2 + 0 * n.sum(),
        "rows": loss_by_rows,
        "sum": lambda *a: loss_with(*a) * a[4].sum(),
        "unmasked": lambda n, o, v, r, m, c: loss_with(n, o, v, r, torch.ones_like(m), c),
        "detached": lambda n, o, v, *rest: loss_with(n.detach(), o, v.detach(), *rest),
        "old moves": lambda n, o, v, *rest: loss_with(n, n.detach(), v, *rest),
        "nan": lambda n, o, v, *rest: (n + v).sum() * torch.nan,
        "zero": lambda n, o, v, *rest: 0 * (n + v).sum(),
    },
    "q2": {
        "pasted": gae_lesson,
        "an answer by itself": gae_ends,
        "fading": lambda r, v, m, g, lam: gae_columns(
            gae_sums(r, v, m, g, 0.0), 0 * v, m, g, lam, fill=True, decay=True
        ),
        "the tool's value": lambda *a: gae_columns(*a, fill=False, decay=False),
        "bootstrap": gae_from_last,
        "bootstrap, packed": functools.partial(gae_packed, end=1.0),
        "the tool's words": lambda r, v, m, g, lam: gae_packed(r, v, torch.ones_like(m), g, lam),
        "the tool's words, masked": lambda r, v, m, g, lam: gae_packed(r, v, torch.ones_like(m), g, lam) * m,
        "returns": lambda r, v, m, *a: gae_where(r, v, m, *a) + v.masked_fill(~m, 0.0),
        "forward": gae_forward,
        "sign": lambda r, v, m, *a: gae_packed(r, -v, m, *a),
        "TD errors": lambda r, v, m, g, lam: gae_where(r, v, m, g, 0.0),
        "lam alone": lambda r, v, m, g, lam: gae_sums(r, v, m, g, lam, carry=lam),
        "gamma alone": lambda r, v, m, g, lam: gae_where(r, v, m, g, 1.0),
        "no gamma": lambda r, v, m, g, lam: gae_sums(r, v, m, 1.0, lam, carry=g * lam),
        "multiplied": gae_multiplied,
        "minus": lambda *a: -gae_where(*a),
    },
    "q3": {
        "PPO": bound_ppo,
        "dual clip": bound_dual,
        "clip alone": lambda *a: bound_weight(*a, cut=lambda r: (r - 1).abs() > a[4]),
        "nothing clipped": lambda *a: bound_weight(*a, cut=lambda r: r < 0),
        "clamped": lambda *a: bound_weight(*a, cut=lambda r: r < 0, weight=lambda r: r.clamp(1 - a[4], 1 + a[4])),
        "one or none": lambda *a: bound_weight(*a, weight=torch.ones_like),
        "bound at the clip": lambda *a: bound_weight(*a, upper=1 + a[4]),
        "weight with gradient": lambda *a: bound_weight(*a, detach=False),
        "sign": lambda *a: -bound_weight(*a),
        "sum": lambda *a: bound_weight(*a) * a[3].sum(),
        "all places": lambda *a: bound_weight(*a) * a[3].sum() / a[3].numel(),
        "unmasked": lambda n, o, a, m, *rest: bound_weight(n, o, a, torch.ones_like(m), *rest),
        "multiplied": bound_multiplied,
        "detached": lambda n, *rest: bound_weight(n.detach(), *rest),
        "REINFORCE": lambda n, o, a, m, *rest: -(a[m] * n[m]).mean(),
    },
    "q4": {
        "k1": k1,
        "k2": k2,
        "k3": k3,
        "swapped": lambda new, ref: k3(ref, new).detach() + k2(new, ref) - k2(new, ref).detach(),
        "sum of two": lambda new, ref: k3(new, ref) + k2(new, ref) - k2(new, ref).detach(),
        "the other way": functools.partial(value_and_gradient, value=k2, gradient=k3),
        "k1 with the gradient": functools.partial(value_and_gradient, value=k1),
        "no half": functools.partial(value_and_gradient, gradient=lambda new, ref: (new - ref) ** 2),
        "wrong sign": lambda new, ref: k3(new, ref).detach() - k2(new, ref) + k2(new, ref).detach(),
        "detached": lambda new, ref: k3(new, ref).detach(),
        "abs": lambda new, ref: (new - ref).abs(),
        "clamped": lambda new, ref: (new - ref).clamp(min=0),
        "mean": lambda new, ref: value_and_gradient(new, ref).mean(),
        "the whole vocabulary": functools.partial(
            value_and_gradient, value=lambda new, ref: (new.exp() * (new - ref)).sum()
        ),
    },
}

# The sentence, or a part of it, that a wrong implementation must be told.
NAMED = {("q1", "+".join(wrong)): f"({wrong[0]}" for wrong in SUBSETS}
NAMED |= {
    ("q1", "larger"): "took the larger",
    ("q1", "no clip"): "Nothing is clipped",
    ("q1", "upside down"): "upside down",
    ("q1", "sign"): "sign of the policy's part",
    ("q1", "no critic"): "Nothing trains the critic",
    ("q1", "no half"): "half of the value loss",
    ("q1", "critic alone"): "policy's part is missing",
    ("q1", "rows"): "over each row first",
    ("q1", "sum"): "added the tokens up",
    ("q1", "unmasked"): "padding counts",
    ("q2", "pasted"): "end the answer for you",
    ("q2", "fading"): "fades on the tool's words",
    ("q2", "the tool's value"): "is not the next value",
    ("q2", "bootstrap"): "bootstrapped from the last value",
    ("q2", "bootstrap, packed"): "bootstrapped from the last value",
    ("q2", "the tool's words"): "tool's words have advantages",
    ("q2", "the tool's words, masked"): "count as the policy's own",
    ("q2", "returns"): "these are the returns",
    ("q2", "forward"): "ran forwards",
    ("q2", "sign"): "sign of the values",
    ("q2", "TD errors"): "TD errors alone",
    ("q2", "lam alone"): "with lam alone",
    ("q2", "gamma alone"): "lam is not used",
    ("q2", "no gamma"): "lacks its gamma",
    ("q2", "multiplied"): "0 * nan",
    ("q3", "PPO"): "PPO as it was",
    ("q3", "dual clip"): "nothing calls the token back",
    ("q3", "clip alone"): "left the minimum out",
    ("q3", "nothing clipped"): "Nothing is clipped",
    ("q3", "clamped"): "no clip of PPO's",
    ("q3", "one or none"): "1 or 0",
    ("q3", "bound at the clip"): "the bound of a bad one",
    ("q3", "weight with gradient"): "detach it",
    ("q3", "sign"): "sign is wrong",
    ("q3", "sum"): "added the tokens up",
    ("q3", "all places"): "divided by all places",
    ("q3", "unmasked"): "padding counts",
    ("q3", "multiplied"): "inf - inf",
    ("q3", "detached"): "no gradient flows",
    ("q4", "k1"): "that is k1",
    ("q4", "k2"): "That is k2",
    ("q4", "k3"): "gradient of k3",
    ("q4", "swapped"): "the other way round",
    ("q4", "sum of two"): "added up",
    ("q4", "no half"): "has no half",
    ("q4", "wrong sign"): "wrong sign",
    ("q4", "clamped"): "The value is 0 where",
    ("q4", "mean"): "one for each token",
    ("q4", "the whole vocabulary"): "the others in the batch",
}

globals().update(common_tests(QUESTIONS, RIGHT, WRONG, NAMED))


@pytest.mark.parametrize("wrong", SUBSETS[3:], ids="+".join)
def test_a_half_mended_loss_is_told_of_no_mistake_that_has_been_mended(wrong):
    result = QUESTIONS["q1"](functools.partial(loss_with, wrong=wrong))
    messages = " ".join(case.message for case in result.cases)
    assert not any(PLANTED[name] in messages for name in PLANTED if name not in wrong), messages


def test_clipping_without_the_minimum_is_never_said_to_take_the_larger():
    for question, wrong in (("q1", "minimum"), ("q3", "clip alone")):
        result = QUESTIONS[question].run(Local(WRONG[question][wrong]), seed=0)
        messages = [case.message for case in result.cases if not case.passed]
        assert messages and all("the minimum" in message for message in messages), messages


def test_no_question_gives_a_point_for_what_needs_no_thought():
    for name in ("nan", "zero", "detached"):
        assert QUESTIONS["q1"].run(Local(WRONG["q1"][name]), seed=0).score == 0
