"""The checks of lesson 03 pass what is right, kill what is wrong, and name the mistake."""

import itertools

import torch
from answers import common_tests

from rlcourse.advantages import group_normalized
from rlcourse.course.checks.nb03 import QUESTIONS
from rlcourse.losses import aggregate, kl_estimate, token_loss


def groups_of(r, n):
    return r.view(-1, n)


def shifted(r, n):
    groups = groups_of(r, n)
    return groups - groups[:, :1]


def centered(r, n):
    return shifted(r, n) - shifted(r, n).mean(1, keepdim=True)


def std(r, n):
    return centered(r, n).std(1, keepdim=True)


def advantages_by_loop(r, n, eps):
    found = torch.zeros_like(r)
    for rows in torch.arange(len(r)).split(n):
        group = r[rows]
        if (group != group[0]).any():
            found[rows] = (group - group.mean()) / (group.std() + eps)
    return found


def strided(r, n, eps):
    return group_normalized(r.view(n, -1).T.flatten(), n, eps).view(-1, n).T.flatten()


def naive(r, n, eps):
    groups = groups_of(r, n)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + eps)).flatten()


def share(p, r, n, expected=None, measured=None):
    groups = groups_of(r, n)
    expected = (p**n + (1 - p) ** n).mean() if expected is None else expected
    measured = (groups == groups[:, :1]).all(1).float().mean() if measured is None else measured
    return torch.stack([expected, measured])


def share_by_loops(p, r, n):
    silent = [len(set(group.tolist())) == 1 for group in r.split(n)]
    return torch.tensor([sum(q**n + (1 - q) ** n for q in p.tolist()) / len(p), sum(silent) / len(silent)])


def share_of_range(p, r, n):
    groups = groups_of(r, n)
    return share(p, r, n, measured=(groups.amax(1) == groups.amin(1)).float().mean())


def loss_by_package(new, old, ref, a, mask, clip, beta, how="sequence_mean", estimator="k3", ratio="token", sign=1):
    loss, _ = token_loss(new, old, a, mask, surrogate="clip", ratio=ratio, clip_low=clip, clip_high=clip)
    kl = kl_estimate(new.masked_fill(~mask, 0.0), ref.masked_fill(~mask, 0.0), estimator)
    counts = {"rows": len(mask), "tokens": int(mask.sum()), "max_new_tokens": mask.shape[1]}
    return aggregate(loss + sign * beta * kl, mask, how, **counts)


def loss_by_rows(new, old, ref, a, mask, clip, beta, surrogate=None, kl=None, empty=True, total=False):
    rows = []
    for i in range(len(mask)):
        n, o, f = (x[i][mask[i]] for x in (new, old, ref))
        r, d = (n - o).exp(), n - f
        gain = torch.minimum(r * a[i], r.clamp(1 - clip, 1 + clip) * a[i]) if surrogate is None else surrogate(r, a[i])
        price = (-d).exp() - 1 + d if kl is None else kl(d)
        if len(n) or empty:
            rows.append((beta * price - gain).sum() / (1 if total else max(len(n), 1)))
    return torch.stack(rows).mean()


def loss_masked_late(new, old, ref, a, mask, clip, beta):
    r, d, a = (new - old).exp(), new - ref, a[:, None]
    loss = -torch.minimum(r * a, r.clamp(1 - clip, 1 + clip) * a) + beta * ((-d).exp() - 1 + d)
    return ((loss * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def loss_divided_by_zero(new, old, ref, a, mask, clip, beta):
    new, old, ref = (x.masked_fill(~mask, 0.0) for x in (new, old, ref))
    r, d, a = (new - old).exp(), new - ref, a[:, None]
    loss = -torch.minimum(r * a, r.clamp(1 - clip, 1 + clip) * a) + beta * ((-d).exp() - 1 + d)
    return (loss.masked_fill(~mask, 0.0).sum(1) / mask.sum(1)).mean()


def gradients(logits, rewards, n, advantage=None, second=True, weighted=True, mean=True):
    pi = logits.softmax(0)
    total = torch.zeros(2, len(pi))
    for group in itertools.product(range(len(pi)), repeat=n):
        group = torch.tensor(group)
        r = rewards[group]
        a = r - r.mean() if advantage is None else advantage(r)
        weight = pi[group].prod() if weighted else 1 / len(pi) ** n
        both = torch.stack([a, a / (a.std() + 1e-4) if second else a])
        scores = torch.eye(len(pi))[group] - pi
        total += weight * both @ scores / (n if mean else 1)
    return total


def gradients_in_doubles(logits, rewards, n):
    pi, rewards = logits.double().softmax(0), rewards.double()
    groups = torch.cartesian_prod(*[torch.arange(len(pi))] * n)
    a = rewards[groups] - rewards[groups].mean(1, keepdim=True)
    counts = torch.nn.functional.one_hot(groups, len(pi)).double()
    both = [a, a / (a.std(1, keepdim=True) + 1e-4)]
    sums = [torch.einsum("g,gi,gia->a", pi[groups].prod(1), x, counts - pi) / n for x in both]
    return torch.stack(sums).float()


def leave_one_out(r):
    return (r - r.mean()) * len(r) / (len(r) - 1)


RIGHT = {
    "q1": [group_normalized, advantages_by_loop],
    "q2": [share_by_loops, share_of_range],
    "q3": [loss_by_package, loss_by_rows],
    "q4": [gradients, gradients_in_doubles],
}
WRONG = {
    "q1": {
        "Dr. GRPO": lambda r, n, eps: centered(r, n).flatten(),
        "population": lambda r, n, eps: (
            centered(r, n) / (centered(r, n).std(1, correction=0, keepdim=True) + eps)
        ).flatten(),
        "whole batch": lambda r, n, eps: (r - r.mean()) / (r.std() + eps),
        "variance": lambda r, n, eps: (centered(r, n) / (std(r, n) ** 2 + eps)).flatten(),
        "eps in the root": lambda r, n, eps: (centered(r, n) / (std(r, n) ** 2 + eps).sqrt()).flatten(),
        "no eps": lambda r, n, eps: (centered(r, n) / std(r, n)).nan_to_num(0.0).flatten(),
        "nan": lambda r, n, eps: (centered(r, n) / std(r, n)).flatten(),
        "no mean": lambda r, n, eps: (groups_of(r, n) / (std(r, n) + eps)).flatten(),
        "strided": strided,
        "left out": lambda r, n, eps: group_normalized(r, n, eps) * n / (n - 1),
        "sign": lambda r, n, eps: -group_normalized(r, n, eps),
        "as groups": lambda r, n, eps: group_normalized(r, n, eps).view(-1, n),
        "rounds": naive,
    },
    "q2": {
        "mean first": lambda p, r, n: share(p, r, n, expected=p.mean() ** n + (1 - p.mean()) ** n),
        "all right": lambda p, r, n: share(p, r, n, expected=(p**n).mean()),
        "all wrong": lambda p, r, n: share(p, r, n, expected=((1 - p) ** n).mean()),
        "with signal": lambda p, r, n: 1 - share_by_loops(p, r, n),
        "0 and 1 alone": lambda p, r, n: share(
            p, r, n, measured=((groups_of(r, n) == 0).all(1) | (groups_of(r, n) == 1).all(1)).float().mean()
        ),
        "zeros alone": lambda p, r, n: share(p, r, n, measured=(groups_of(r, n) == 0).all(1).float().mean()),
        "count": lambda p, r, n: share_by_loops(p, r, n) * torch.tensor([1.0, len(r) // n]),
        "strided": lambda p, r, n: share(p, r, n, measured=(r.view(n, -1) == r.view(n, -1)[0]).all(0).float().mean()),
        "swapped": lambda p, r, n: share_by_loops(p, r, n).flip(0),
        "expected alone": lambda p, r, n: share_by_loops(p, r, n)[0],
    },
    "q3": {
        "sign": lambda *x: -loss_by_rows(*x),
        "token mean": lambda *x: loss_by_package(*x, how="token_mean"),
        "constant": lambda *x: loss_by_package(*x, how="constant"),
        "sum of a row": lambda *x: loss_by_rows(*x, total=True),
        "sum of rows": lambda *x: loss_by_rows(*x) * len(x[0]),
        "k1": lambda *x: loss_by_package(*x, estimator="k1"),
        "k2": lambda *x: loss_by_package(*x, estimator="k2"),
        "mirrored": lambda *x: loss_by_rows(*x, kl=lambda d: d.exp() - 1 - d),
        "kl sign": lambda *x: loss_by_package(*x, sign=-1),
        "no kl": lambda *x: loss_by_rows(*x[:-1], 0.0),
        "no clip": lambda *x: loss_by_rows(*x, surrogate=lambda r, a: r * a),
        "clip alone": lambda *x: loss_by_rows(*x, surrogate=lambda r, a: r.clamp(1 - x[5], 1 + x[5]) * a),
        "max": lambda *x: loss_by_rows(
            *x, surrogate=lambda r, a: torch.maximum(r * a, r.clamp(1 - x[5], 1 + x[5]) * a)
        ),
        "GSPO": lambda *x: loss_by_package(*x, ratio="sequence"),
        "wide clip": lambda *x: loss_by_rows(*x[:5], 2 * x[5], x[6]),
        "inverse": lambda new, old, ref, a, mask, clip, beta: loss_by_rows(
            new, 2 * new - old, ref, a, mask, clip, beta
        ),
        "ref in ratio": lambda new, old, ref, *x: loss_by_package(new, ref, ref, *x),
        "old in kl": lambda new, old, ref, *x: loss_by_package(new, old, old, *x),
        "empty rows left out": lambda *x: loss_by_rows(*x, empty=False),
        "nan": loss_masked_late,
        "nan in empty rows": loss_divided_by_zero,
        "detached": lambda new, *x: loss_by_rows(new.detach(), *x),
    },
    "q4": {
        "flipped": lambda *x: gradients(*x).flip(0),
        "summed": lambda *x: gradients(*x, mean=False),
        "RLOO": lambda *x: torch.stack([gradients(*x, advantage=leave_one_out)[0], gradients(*x)[1]]),
        "not divided": lambda *x: gradients(*x, second=False),
        "all alike": lambda *x: gradients(*x, weighted=False),
        "sign": lambda *x: -gradients(*x),
        "no baseline": lambda *x: gradients(*x, advantage=lambda r: r),
        "exact": lambda logits, rewards, n: (logits.softmax(0) * (rewards - logits.softmax(0) @ rewards)).expand(2, -1),
    },
}

# The sentence, or a part of it, that a wrong implementation must be told.
NAMED = {
    ("q1", "Dr. GRPO"): "that is Dr. GRPO",
    ("q1", "population"): "divided by n inside the deviation",
    ("q1", "whole batch"): "whole batch",
    ("q1", "variance"): "square root",
    ("q1", "eps in the root"): "under the root",
    ("q1", "no eps"): "eps is not added",
    ("q1", "nan"): "eps is not added",
    ("q1", "no mean"): "did not take their mean off",
    ("q1", "strided"): "not the right rows",
    ("q1", "left out"): "left the own reward out",
    ("q1", "sign"): "The sign is wrong",
    ("q1", "as groups"): "flatten it",
    ("q1", "rounds"): "the mean of equal floats may round",
    ("q2", "mean first"): "powers first",
    ("q2", "all right"): "all right alone",
    ("q2", "all wrong"): "all wrong alone",
    ("q2", "with signal"): "WITH signal",
    ("q2", "0 and 1 alone"): "other numbers than 0 and 1",
    ("q2", "zeros alone"): "measured: you counted groups that are all wrong alone",
    ("q2", "count"): "a number of groups",
    ("q2", "strided"): "row i belongs to prompt",
    ("q2", "swapped"): "swapped",
    ("q3", "sign"): "The sign is wrong",
    ("q3", "token mean"): "that is DAPO",
    ("q3", "sum of a row"): "added up the tokens",
    ("q3", "sum of rows"): "added up the rows",
    ("q3", "k1"): "k1",
    ("q3", "k2"): "k2",
    ("q3", "mirrored"): "mirrored",
    ("q3", "kl sign"): "KL has the wrong sign",
    ("q3", "no kl"): "KL is missing",
    ("q3", "no clip"): "clip is missing",
    ("q3", "clip alone"): "not the clipped one alone",
    ("q3", "max"): "You took the larger",
    ("q3", "inverse"): "upside down",
    ("q3", "ref in ratio"): "taken to the reference",
    ("q3", "old in kl"): "taken to old_logprobs",
    ("q3", "empty rows left out"): "still counts as a row",
    ("q3", "nan"): "fill the masked places",
    ("q4", "flipped"): "wrong way round",
    ("q4", "summed"): "take the mean of its answers",
    ("q4", "RLOO"): "leaves the own reward out",
    ("q4", "not divided"): "did not divide",
    ("q4", "sign"): "The sign is wrong",
}

test_right_answers_pass, test_wrong_answers_are_killed, test_the_mistake_is_named, test_a_hole_shows_the_hint = (
    common_tests(QUESTIONS, RIGHT, WRONG, NAMED, first=True, slow=["q3"])
)
