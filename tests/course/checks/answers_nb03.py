"""Answers to the exercises of lesson 03."""

import torch
from answers import given, half_mended, named, ruled

from rlcourse.course.checks.nb03 import (
    EPS,
    GRADIENT_MISTAKES,
    LOSS_MISTAKES,
    PLANTED,
    TRAINERS,
    group_gradients,
    grpo_loss,
)
from rlcourse.losses import aggregate, kl_estimate, token_loss


# q1: whose log
def candidates(rewards, n):
    groups, wrong = rewards.view(-1, n), rewards.view(n, -1)
    centered, mixed = groups - groups.mean(1, keepdim=True), wrong - wrong.mean(0)
    return [
        rewards,
        rewards - rewards.mean(),
        centered.flatten(),
        (centered / (groups.std(1, keepdim=True) + EPS)).flatten(),
        (mixed / (wrong.std(0) + EPS)).flatten(),
    ]


def by_direction(rewards, weights, n, known=range(5)):
    cosines = [torch.cosine_similarity(weights, c, dim=0) for c in candidates(rewards, n)]
    return max(known, key=lambda k: cosines[k].item())


# q2: a data set
def mixture(mean, share, n, least=None, problems=1000):
    least = mean**n + (1 - mean) ** n if least is None else least
    extreme = round(problems * (share - least) / (1 - least))
    solved = round(extreme * mean)
    return torch.tensor([1.0] * solved + [0.0] * (extreme - solved) + [mean] * (problems - extreme))


# q3: a loss
def loss_by_package(
    new, old, ref, advantages, mask, clip, beta, ratio="token", how="sequence_mean", estimator="k3", sign=1
):
    loss, _ = token_loss(new, old, advantages, mask, surrogate="clip", ratio=ratio, clip_low=clip, clip_high=clip)
    kl = kl_estimate(new.masked_fill(~mask, 0.0), ref.masked_fill(~mask, 0.0), estimator)
    counts = {"rows": len(mask), "tokens": int(mask.sum()), "max_new_tokens": mask.shape[1]}
    return aggregate(loss + sign * beta * kl, mask, how, **counts)


RIGHT = {"q1": by_direction, "q2": mixture, "q3": loss_by_package}
WRONG = {
    "q1": {
        "groups are rows": (lambda r, w, n: by_direction(r, w, n, known=(0, 1, 2, 3)), "a log of trainer 4"),
        "no deviation": (lambda r, w, n: by_direction(r, w, n, known=(0, 1, 2, 4)), "compare the sizes of the groups"),
        "no batch mean": (lambda r, w, n: by_direction(r, w, n, known=(0, 2, 3, 4)), "a log of trainer 1"),
        "no rewards": (lambda r, w, n: by_direction(r, w, n, known=(1, 2, 3, 4)), "add up to"),
        "by size": (
            lambda r, w, n: min(range(5), key=lambda k: (w - candidates(r, n)[k]).norm()),
            "compare directions",
        ),
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
    "q3": half_mended(grpo_loss, PLANTED)
    | named(grpo_loss, LOSS_MISTAKES)
    | {
        "the colleague's": (given("nb03", "colleague"), "that is DAPO"),
        "padding": (
            lambda new, old, ref, a, mask, *x: loss_by_package(new, old, ref, a, mask, *x) + (0 * new).sum(),
            "fill the masked places",
        ),
        "the package's k2": lambda *x: loss_by_package(*x, estimator="k2"),
        "the package's Dr. GRPO": (lambda *x: loss_by_package(*x, how="constant"), "all places of the matrix"),
        "GSPO": lambda *x: loss_by_package(*x, ratio="sequence"),
    },
    "q4": ruled(group_gradients, GRADIENT_MISTAKES, "wrong")
    | {"exact": lambda logits, rewards, n: (logits.softmax(0) * (rewards - logits.softmax(0) @ rewards)).expand(2, -1)},
}
