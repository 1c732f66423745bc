"""Answers to the exercises of lesson 13."""

import torch
from answers import ruled

from rlcourse.course.checks.nb13 import MERGES, PLACES, ROWS, WAITS, by_places, judged, merged, waiting


# q1: what is wrong with a row
def diagnose_with(ids, labels, prompts, lengths, eos, mistake):
    rows = zip(*(each.tolist() for each in (ids, labels, prompts, lengths)), strict=True)
    return torch.tensor([judged(*row, mistake=mistake) for row in rows])


# q2: examples in one row
def keep_apart(lengths, answers, width):
    n = int(lengths.sum())
    owner = torch.cat([torch.repeat_interleave(torch.arange(len(lengths)), lengths), -1 - torch.arange(width - n)])
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    positions = torch.cat([torch.arange(n) - starts, torch.zeros(width - n, dtype=torch.long)])
    begin = torch.cat([torch.repeat_interleave(lengths - answers, lengths), torch.zeros(width - n, dtype=torch.long)])
    learned = (positions >= begin) & (owner >= 0)
    predicts = torch.cat([learned[1:] & (owner[1:] == owner[:-1]), torch.tensor([False])])
    return positions, (owner[:, None] == owner).tril(), predicts


def keep_apart_with(lengths, answers, width, mistake):
    return by_places(lengths.tolist(), answers.tolist(), width, mistake)


def not_itself(*given):
    positions, sees, predicts = keep_apart(*given)
    return positions, sees.tril(-1), predicts


# q3: ranks from one budget
def ranks(updates, budget):
    values = torch.linalg.svdvals(updates)
    chosen = values.flatten().topk(budget).indices // values.shape[1]
    return torch.bincount(chosen, minlength=len(updates))


def one_by_one(worth):
    def found(updates, budget):
        values, way = torch.linalg.svdvals(updates), [0] * len(updates)
        for _ in range(budget):
            left = [i for i in range(len(way)) if way[i] < values.shape[1]]
            way[max(left, key=lambda i: worth(values[i], way[i]).item())] += 1
        return torch.tensor(way)

    return found


# q4: merging
def merge(weight, adapters):
    return (weight.float() + sum(alpha / len(a) * (b @ a) for a, b, alpha in adapters)).to(weight.dtype)


def root(weight, adapters):
    return merge(weight, [(a, b, alpha * len(a) ** 0.5) for a, b, alpha in adapters])


# q5: the wait
def steps_to_start(rates, group, prompts):
    q = (-torch.expm1(group * torch.log1p(-rates)) - rates**group).mean()
    return -1 / torch.expm1(prompts * torch.log1p(-q))


def rounded_away(rates, group, prompts):
    """The formula as it stands, in float64."""
    return 1 / (1 - (1 - (1 - (1 - rates) ** group - rates**group).mean()) ** prompts)


RIGHT = {"q2": keep_apart, "q3": ranks, "q4": merge, "q5": steps_to_start}

WRONG = {
    "q1": ruled(diagnose_with, ROWS, "mistake"),
    "q2": ruled(keep_apart_with, PLACES, "mistake") | {"not itself": not_itself},
    "q3": {
        "shares": (one_by_one(lambda v, r: v[r] ** 2 / (v**2).sum()), "compared shares"),
        "whole": one_by_one(lambda v, r: (v**2).sum() / (r + 1)),
        "left": (one_by_one(lambda v, r: (v[r:] ** 2).sum()), "ONE more rank"),
        "small": one_by_one(lambda v, r: -v[r]),
        "one more": lambda u, b: ranks(u, b + 1),
    },
    "q4": ruled(merged, MERGES, "mistake")
    | {
        "root": root,
        "dtype": (lambda weight, adapters: merge(weight, adapters).float(), "dtype torch.float32"),
    },
    "q5": ruled(waiting, WAITS, "mistake")
    | {
        "rounded away": (rounded_away, "tiny rates are lost"),
        "one less": lambda *x: steps_to_start(*x) - 1,
    },
}
