"""Answers to the exercises of lesson 03."""

import itertools

import torch
from answers import given, ruled

from rlcourse.course.checks.nb03.q1_whose_log import EPS, TRAINERS
from rlcourse.course.checks.nb03.q4_gradients import gradients_off
from rlcourse.losses import aggregate, kl_estimate, token_loss


# q1: whose log
def candidates(rewards, n, eps=EPS):
    groups, wrong = rewards.view(-1, n), rewards.view(n, -1)
    centered, mixed = groups - groups.mean(1, keepdim=True), wrong - wrong.mean(0)
    return [
        rewards,
        rewards - rewards.mean(),
        centered.flatten(),
        (centered / (groups.std(1, keepdim=True) + eps)).flatten(),
        (mixed / (wrong.std(0) + eps)).flatten(),
    ]


def by_direction(rewards, weights, n, known=range(5), eps=EPS):
    cosines = [torch.cosine_similarity(weights, c, dim=0) for c in candidates(rewards, n, eps)]
    return max(known, key=lambda k: cosines[k].item())


# q2: a data set
def mixture(mean, share, n, least=None, problems=1000):
    least = mean**n + (1 - mean) ** n if least is None else least
    extreme = round(problems * (share - least) / (1 - least))
    solved = round(extreme * mean)
    return torch.tensor([1.0] * solved + [0.0] * (extreme - solved) + [mean] * (problems - extreme))


# q3: a loss
def loss_by_package(
    logprobs, old, ref, advantages, mask, clip, beta, ratio="token", how="sequence_mean", estimator="k3", sign=1
):
    new = logprobs
    loss, _ = token_loss(new, old, advantages, mask, surrogate="clip", ratio=ratio, clip_low=clip, clip_high=clip)
    kl = kl_estimate(new.masked_fill(~mask, 0.0), ref.masked_fill(~mask, 0.0), estimator)
    counts = {"rows": len(mask), "tokens": int(mask.sum()), "max_new_tokens": mask.shape[1]}
    return aggregate(loss + sign * beta * kl, mask, how, **counts)


def loss_by_rows(new, old, ref, a, mask, clip, beta, gain=None, kl=None, empty=True, over=None):
    """Row by row. gain(ratio, advantage), kl(log-prob less the reference's): others than the right ones; over: what is
    divided by in place of the row's tokens."""
    rows = []
    for i in range(len(mask)):
        n, o, f = (x[i][mask[i]] for x in (new, old, ref))
        r, d = (n - o).exp(), n - f
        earned = torch.minimum(r * a[i], r.clamp(1 - clip, 1 + clip) * a[i]) if gain is None else gain(r, a[i])
        price = (-d).exp() - 1 + d if kl is None else kl(d)
        if len(n) or empty:
            rows.append((beta * price - earned).sum() / (max(len(n), 1) if over is None else over))
    return torch.stack(rows).mean()


# q4: expected gradients
def gradients(logits, rewards, n, advantage=None, second=True, mean=True):
    pi = logits.softmax(0)
    total = torch.zeros(2, len(pi))
    for group in itertools.product(range(len(pi)), repeat=n):
        group = torch.tensor(group)
        r = rewards[group]
        a = r - r.mean() if advantage is None else advantage(r)
        both = torch.stack([a, a / (a.std() + EPS) if second else a])
        total += pi[group].prod() * both @ (torch.eye(len(pi))[group] - pi) / (n if mean else 1)
    return total


RIGHT = {"q1": by_direction, "q2": mixture, "q3": loss_by_rows, "q4": gradients}
WRONG = {
    "q1": {
        "groups are rows": (lambda r, w, n: by_direction(r, w, n, known=(0, 1, 2, 3)), "a log of trainer 4"),
        "no deviation": (lambda r, w, n: by_direction(r, w, n, known=(0, 1, 2, 4)), "a log of trainer 3"),
        "no batch mean": (lambda r, w, n: by_direction(r, w, n, known=(0, 2, 3, 4)), "a log of trainer 1"),
        "no rewards": (lambda r, w, n: by_direction(r, w, n, known=(1, 2, 3, 4)), "add up to"),
        "eps of one": (lambda r, w, n: by_direction(r, w, n, eps=100.0), "compare the sizes of the groups"),
        "the name": (lambda r, w, n: TRAINERS[by_direction(r, w, n)], "return a number"),
    },
    "q2": {
        "all alike": (lambda mean, share, n: torch.full((100,), mean), "as rarely silent as"),
        "the ends alone": (lambda mean, share, n: mixture(mean, 1.0, n), "always silent"),
        "a share of ends": (lambda mean, share, n: mixture(mean, share, n, least=0.0), "silent sometimes, too"),
        "swapped": (lambda mean, share, n: mixture(share, mean, n, least=0.0), "the share that was asked for"),
        "mirrored": (lambda mean, share, n: 1 - mixture(mean, share, n), "1 minus the mean"),
        "too many": (lambda mean, share, n: mixture(mean, share, n, problems=100_000), "return 1 to 1000"),
        "not probabilities": (lambda mean, share, n: torch.tensor([mean - 2.0, mean + 2.0]), "between 0 and 1"),
    },
    "q3": {
        "the colleague's": (given("nb03", "colleague"), "that is DAPO"),
        "sign": (lambda *x: -loss_by_rows(*x), "The sign is wrong"),
        "constant": (lambda *x: loss_by_package(*x, how="constant"), "all places of the matrix"),
        "sum of a row": (lambda *x: loss_by_rows(*x, over=1), "added up the tokens"),
        "sum of rows": (lambda *x: loss_by_rows(*x) * len(x[0]), "added up the rows"),
        "k1": (lambda *x: loss_by_package(*x, estimator="k1"), "k1"),
        "k2": (lambda *x: loss_by_package(*x, estimator="k2"), "k2"),
        "mirrored": (lambda *x: loss_by_rows(*x, kl=lambda d: d.exp() - 1 - d), "mirrored"),
        "kl sign": (lambda *x: loss_by_package(*x, sign=-1), "KL has the wrong sign"),
        "no kl": (lambda *x: loss_by_rows(*x[:-1], 0.0), "KL is missing"),
        "no clip": (lambda *x: loss_by_rows(*x, gain=lambda r, a: r * a), "clip is missing"),
        "GSPO": lambda *x: loss_by_package(*x, ratio="sequence"),
        "inverse": (lambda new, old, *x: loss_by_rows(new, 2 * new - old, *x), "upside down"),
        "ref in ratio": (lambda new, old, ref, *x: loss_by_package(new, ref, ref, *x), "taken to the reference"),
        "old in kl": (lambda new, old, ref, *x: loss_by_package(new, old, old, *x), "taken to old_logprobs"),
        "empty rows left out": (lambda *x: loss_by_rows(*x, empty=False), "still counts as a row"),
    },
    "q4": {
        "flipped": (lambda *x: gradients(*x).flip(0), "wrong way round"),
        "summed": (lambda *x: gradients(*x, mean=False), "take the mean of its answers"),
        "not divided": (lambda *x: gradients(*x, second=False), "did not divide"),
        "sign": (lambda *x: -gradients(*x), "The sign is wrong"),
        "exact": lambda logits, rewards, n: (logits.softmax(0) * (rewards - logits.softmax(0) @ rewards)).expand(2, -1),
    }
    | ruled(
        gradients_off,
        {
            "combinations": "combinations",
            "repeats": "every order in which it is drawn",
            "all": "one deviation over all groups",
            "population": "divided by n inside the deviation",
            "alike": "the same probability",
            "no baseline": "did not subtract the mean of the group",
            "no eps": "add 1e-4 to the deviation",
        },
        "wrong",
    ),
}
