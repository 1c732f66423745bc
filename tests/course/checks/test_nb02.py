"""The checks of lesson 02 pass what is right, kill what is wrong, and name the mistake."""

import torch
from answers import common_tests

from rlcourse.course.checks.nb02 import QUESTIONS


def gae_columns(rewards, values, mask, gamma, lam, carry=None, bootstrap=True, sign=1.0, keep_padding=False):
    """Backwards over the columns; the arguments at the end put mistakes in."""
    clean_rewards, clean = (x if keep_padding else x.masked_fill(~mask, 0.0) for x in (rewards, values))
    found, running = torch.zeros_like(values), torch.zeros(len(values))
    for t in range(values.shape[1] - 1, -1, -1):
        after = clean[:, t + 1] if t + 1 < values.shape[1] else torch.zeros(len(values))
        delta = clean_rewards[:, t] + (gamma if bootstrap else 1.0) * sign * after - sign * clean[:, t]
        running = delta + (gamma * lam if carry is None else carry) * running
        found[:, t] = running
    return found


def gae_matrix(rewards, values, mask, gamma, lam):
    rewards, values = rewards.masked_fill(~mask, 0.0), values.masked_fill(~mask, 0.0)
    n = values.shape[1]
    deltas = rewards + gamma * torch.cat([values[:, 1:], torch.zeros(len(values), 1)], 1) - values
    gap = torch.arange(n)[None, :] - torch.arange(n)[:, None]  # k - t
    weights = torch.where(gap >= 0, torch.tensor(gamma * lam) ** gap.clamp(min=0), 0.0)
    return deltas @ weights.T


def gae_rows(rewards, values, mask, gamma, lam):
    found = torch.zeros_like(values)
    for i in range(len(values)):
        n, running, after = int(mask[i].sum()), 0.0, 0.0
        for t in reversed(range(n)):
            running = rewards[i, t] + gamma * after - values[i, t] + gamma * lam * running
            found[i, t], after = running, values[i, t]
    return found


def gae_padding_value(rewards, values, mask, gamma, lam):
    deltas = rewards + gamma * torch.cat([values[:, 1:], torch.zeros(len(values), 1)], 1) - values
    return gae_rows(deltas, torch.zeros_like(values), mask, 1.0, gamma * lam)


def gae_forward(rewards, values, mask, gamma, lam):
    deltas = rewards + gamma * torch.cat([values[:, 1:], torch.zeros(len(values), 1)], 1) - values
    return gae_columns(deltas.flip(1), 0 * values, torch.ones_like(mask), 1.0, gamma * lam).flip(1)


def gae_multiplied(rewards, values, mask, gamma, lam):
    return gae_columns(rewards * mask, values * mask, torch.ones_like(mask), gamma, lam)


def pieces(new, old, advantages, mask, low, high, ratio=None):
    """Unclipped and clipped surrogate of the real tokens."""
    r = (new[mask] - old[mask]).exp() if ratio is None else ratio(new[mask], old[mask])
    a = advantages[mask]
    return r * a, r.clamp(1 - low, 1 + high) * a


def clip_where(new, old, advantages, mask, low, high):
    r = (new - old).masked_fill(~mask, 0.0)
    r = torch.where(mask, torch.where(mask, new, 0.0) - torch.where(mask, old, 0.0), r.detach() * 0).exp()
    limit = torch.where(advantages > 0, r.clamp(max=1 + high), r.clamp(min=1 - low))
    return -(limit * advantages.masked_fill(~mask, 0.0)).sum() / mask.sum()


def clip_max_of_losses(*step):
    plain, near = pieces(*step)
    return torch.max(-plain, -near).sum() / step[3].sum()


def clip_all_places(new, old, advantages, mask, low, high):
    return clip_where(new, old, advantages, mask, low, high) * mask.sum() / mask.numel()


def clip_rows(new, old, advantages, mask, low, high):
    step = (new, old, advantages, mask)
    rows = [clip_max_of_losses(*(x[[i]] for x in step), low, high) for i in range(len(mask))]
    return torch.stack(rows).mean()


def clip_unmasked(new, old, advantages, mask, low, high):
    return clip_max_of_losses(new, old, advantages, torch.ones_like(mask), low, high)


def clip_multiplied(new, old, advantages, mask, low, high):
    r = (new - old).exp()
    smaller = torch.minimum(r * advantages, r.clamp(1 - low, 1 + high) * advantages)
    return -(smaller * mask).sum() / mask.sum()


def d_of(new, ref):
    return new - ref


def stack(k1, k2, k3):
    return torch.stack([k1, k2, k3])


def kl_right(new, ref):
    d = d_of(new, ref)
    return stack(d, 0.5 * d * d, torch.expm1(-d) + d)


def kl_ratio(new, ref):
    ratio = (ref - new).exp()
    return stack(-ratio.log(), ratio.log().square() / 2, ratio - 1 - ratio.log())


def reward_index(rewards, new, ref, mask, beta):
    found = -beta * torch.where(mask, new - ref, 0.0)
    rows = mask.any(1).nonzero()[:, 0]
    found[rows, mask.sum(1)[rows] - 1] += rewards[rows]
    return found


def reward_loop(rewards, new, ref, mask, beta):
    found = torch.zeros(mask.shape)
    for i, t in mask.nonzero().tolist():
        found[i, t] = beta * (ref[i, t] - new[i, t]) + rewards[i] * float(not mask[i, t + 1 :].any())
    return found


def reward_only(rewards, new, ref, mask, beta):
    return reward_index(rewards, 0 * mask, 0 * mask, mask, 0.0)


def reward_last_column(rewards, new, ref, mask, beta):
    found = -beta * torch.where(mask, new - ref, 0.0)
    found[:, -1] += rewards
    return found


def reward_replaced(rewards, new, ref, mask, beta):
    final, both = reward_only(rewards, new, ref, mask, beta), reward_index(rewards, new, ref, mask, beta)
    return torch.where(final != 0, final, both)


def reward_at_end(rewards, new, ref, mask, beta):
    return reward_only(rewards - beta * torch.where(mask, new - ref, 0.0).sum(1), new, ref, mask, beta)


def value_errors(values, old, returns, mask, clip):
    v, o, r = values[mask], old[mask], returns[mask]
    return (v - r) ** 2, (torch.clamp(v, o - clip, o + clip) - r) ** 2


def value_right(*step):
    return torch.maximum(*value_errors(*step)).mean() / 2


def value_where(values, old, returns, mask, clip):
    near = old + (values - old).clamp(-clip, clip)
    worse = torch.where((near - returns).abs() > (values - returns).abs(), near, values)
    return (0.5 * (worse - returns).square()).masked_fill(~mask, 0.0).sum() / mask.sum()


def value_unmasked(values, old, returns, mask, clip):
    return value_right(values, old, returns, torch.ones_like(mask), clip)


RIGHT = {
    "q1": [gae_columns, gae_matrix, gae_rows],
    "q2": [clip_where, clip_max_of_losses],
    "q3": [kl_right, kl_ratio],
    "q4": [reward_index, reward_loop],
    "q5": [value_right, value_where],
}
WRONG = {
    "q1": {
        "returns": lambda r, v, m, *a: gae_rows(r, v, m, *a) + v.masked_fill(~m, 0.0),
        "TD errors": lambda r, v, m, g, lam: gae_rows(r, v, m, g, 0.0),
        "lam alone": lambda r, v, m, g, lam: gae_columns(r, v, m, g, lam, carry=lam),
        "gamma alone": lambda r, v, m, g, lam: gae_columns(r, v, m, g, lam, carry=g),
        "no gamma in delta": lambda *a: gae_columns(*a, bootstrap=False),
        "sign of the values": lambda *a: gae_columns(*a, sign=-1.0),
        "value in the padding": gae_padding_value,
        "padding": lambda *a: gae_columns(*a, keep_padding=True),
        "forward": gae_forward,
        "multiplied": gae_multiplied,
        "minus": lambda *a: -gae_rows(*a),
    },
    "q2": {
        "sign": lambda *a: -clip_max_of_losses(*a),
        "larger": lambda *a: -torch.maximum(*pieces(*a)).mean(),
        "no minimum": lambda *a: -pieces(*a)[1].mean(),
        "no clip": lambda *a: -pieces(*a)[0].mean(),
        "upside down": lambda *a: -torch.minimum(*pieces(*a, ratio=lambda n, o: (o - n).exp())).mean(),
        "difference": lambda *a: -torch.minimum(*pieces(*a, ratio=lambda n, o: n - o)).mean(),
        "swapped": lambda n, o, a, m, low, high: clip_max_of_losses(n, o, a, m, high, low),
        "one range": lambda n, o, a, m, low, high: clip_max_of_losses(n, o, a, m, low, low),
        "all places": clip_all_places,
        "rows first": clip_rows,
        "unmasked": clip_unmasked,
        "multiplied": clip_multiplied,
        "detached": lambda n, *a: clip_max_of_losses(n.detach(), *a),
        "sum": lambda *a: clip_max_of_losses(*a) * a[3].sum(),
    },
    "q3": {
        "swapped": lambda n, r: kl_right(r, n),
        "sign of k1": lambda n, r: stack(r - n, *kl_right(n, r)[1:]),
        "no half": lambda n, r: stack(n - r, (n - r) ** 2, kl_right(n, r)[2]),
        "ratio in k3": lambda n, r: stack(*kl_right(n, r)[:2], kl_right(r, n)[2]),
        "sign in k3": lambda n, r: stack(*kl_right(n, r)[:2], (r - n).exp() - 1 - (n - r)),
        "no minus one": lambda n, r: kl_right(n, r) + torch.tensor([[0.0], [0.0], [1.0]]),
        "abs": lambda n, r: stack((n - r).abs(), *kl_right(n, r)[1:]),
        "clamped": lambda n, r: stack((n - r).clamp(min=0), *kl_right(n, r)[1:]),
        "means": lambda n, r: kl_right(n, r).mean(1),
        "transposed": lambda n, r: kl_right(n, r).T,
        "detached": lambda n, r: kl_right(n.detach(), r),
        "ratio detached": lambda n, r: stack(*kl_right(n, r)[:2], torch.expm1(r - n.detach()) + n - r),
    },
    "q4": {
        "sign": lambda r, n, ref, m, b: reward_index(r, ref, n, m, b),
        "last column": reward_last_column,
        "every token": lambda r, n, ref, m, b: reward_index(0 * r, n, ref, m, b) + r[:, None] * m,
        "padding": lambda r, n, ref, m, b: reward_only(r, n, ref, m, b) - b * (n - ref),
        "replaced": reward_replaced,
        "at the end": reward_at_end,
        "no beta": lambda r, n, ref, m, b: reward_index(r, n, ref, m, 1.0),
        "abs": lambda r, n, ref, m, b: reward_only(r, n, ref, m, b) - b * torch.where(m, (n - ref).abs(), 0.0),
        "no reward": lambda r, n, ref, m, b: reward_index(0 * r, n, ref, m, b),
        "no penalty": reward_only,
        "multiplied": lambda r, n, ref, m, b: reward_only(r, n, ref, m, b) - b * (n - ref) * m,
        "k3": lambda r, n, ref, m, b: reward_only(r, n, ref, m, b) - b * torch.where(m, kl_right(n, ref)[2], 0.0),
    },
    "q5": {
        "smaller": lambda *a: torch.minimum(*value_errors(*a)).mean() / 2,
        "no clip": lambda *a: value_errors(*a)[0].mean() / 2,
        "clipped alone": lambda *a: value_errors(*a)[1].mean() / 2,
        "no half": lambda *a: value_right(*a) * 2,
        "value clipped": lambda v, o, r, m, c: value_right(v, 0 * o, r, m, c),
        "near the return": lambda v, o, r, m, c: value_right(v, r, r, m, c),
        "unmasked": value_unmasked,
        "all places": lambda v, o, r, m, c: value_right(v, o, r, m, c) * m.sum() / m.numel(),
        "detached": lambda v, *a: value_right(v.detach(), *a),
        "sum": lambda *a: value_right(*a) * a[3].sum(),
    },
}

# The sentence, or a part of it, that a wrong implementation must be told.
NAMED = {
    ("q1", "returns"): "these are the returns",
    ("q1", "TD errors"): "TD errors alone",
    ("q1", "lam alone"): "with lam alone",
    ("q1", "gamma alone"): "lam is not used",
    ("q1", "no gamma in delta"): "lacks its gamma",
    ("q1", "sign of the values"): "sign of the values",
    ("q1", "value in the padding"): "used the value in the padding",
    ("q1", "padding"): "padding has advantages",
    ("q1", "forward"): "ran forwards",
    ("q1", "multiplied"): "0 * nan",
    ("q2", "sign"): "The sign is wrong",
    ("q2", "larger"): "took the larger",
    ("q2", "no minimum"): "left the minimum out",
    ("q2", "no clip"): "Nothing is clipped",
    ("q2", "upside down"): "upside down",
    ("q2", "difference"): "take its exponential",
    ("q2", "swapped"): "are swapped",
    ("q2", "all places"): "divided by all places",
    ("q2", "rows first"): "over each row first",
    ("q2", "unmasked"): "padding counts",
    ("q2", "multiplied"): "inf - inf",
    ("q2", "detached"): "no gradient flows",
    ("q3", "swapped"): "swapped policy and reference",
    ("q3", "sign of k1"): "sign of k1",
    ("q3", "no half"): "lacks its half",
    ("q3", "ratio in k3"): "upside down",
    ("q3", "sign in k3"): "sign of the last term",
    ("q3", "no minus one"): "lacks its - 1",
    ("q3", "abs"): "leave its sign alone",
    ("q3", "clamped"): "cut it off",
    ("q3", "means"): "take no mean",
    ("q3", "transposed"): "rows are tokens",
    ("q4", "sign"): "sign of the KL",
    ("q4", "last column"): "last column",
    ("q4", "every token"): "Each token got",
    ("q4", "padding"): "penalty in the padding",
    ("q4", "replaced"): "replaced the penalty",
    ("q4", "at the end"): "each token pays its own",
    ("q4", "no beta"): "beta is not used",
    ("q4", "abs"): "without abs",
    ("q4", "no reward"): "reward is missing",
    ("q4", "no penalty"): "penalty is missing",
    ("q4", "multiplied"): "inf - inf",
    ("q5", "smaller"): "took the smaller",
    ("q5", "no clip"): "Nothing is clipped",
    ("q5", "clipped alone"): "clipped error alone",
    ("q5", "no half"): "half is missing",
    ("q5", "value clipped"): "clipped the value itself",
    ("q5", "unmasked"): "padding counts",
    ("q5", "all places"): "divided by all places",
    ("q5", "detached"): "no gradient flows",
}

test_right_answers_pass, test_wrong_answers_are_killed, test_the_mistake_is_named, test_a_hole_shows_the_hint = (
    common_tests(QUESTIONS, RIGHT, WRONG, NAMED, first=True)
)
