"""Answers to the exercises of lesson 13."""

import torch
from answers import ruled

from rlcourse.course.checks.nb13 import MERGES, PLACES, ROWS, WAITS


# q1: what is wrong with a row
def diagnose(ids, labels, prompts, lengths, eos, rule=""):
    """All rows at once; each fact is a bool [rows]."""
    place = torch.arange(ids.shape[1])
    learned = labels != -100
    ends = lengths[:, None]
    if rule == "pads by id":
        ends = ((ids != eos) & (ids != 0)).long().cumsum(1).amax(1, keepdim=True)
    off = (learned & (labels != ids)).any(1) & (rule != "presence")
    edge = prompts[:, None] - (1 if rule == "the prompt's last" else 0)
    before = learned & (place < edge)
    before = (before[:, :1] if rule == "the prompt's first" else before).any(1)
    behind = (learned & (place >= ends)).any(1)
    last = (lengths - 1)[:, None]
    unended = torch.zeros_like(off)
    if rule != "cut off":
        unended |= ids.gather(1, last)[:, 0] != eos
    if rule != "end ignored":
        unended |= ~learned.gather(1, last)[:, 0]
    late = ~learned.gather(1, prompts[:, None])[:, 0]
    found = torch.zeros(len(ids), dtype=torch.long)
    for code, broken in ((5, late), (3, unended), (2, behind), (1, before), (4, off)):
        found[broken] = code
    return found


# q2: examples in one row
def keep_apart(lengths, answers, width, rule=""):
    n = int(lengths.sum())
    owner = torch.cat([torch.repeat_interleave(torch.arange(len(lengths)), lengths), -1 - torch.arange(width - n)])
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    positions = torch.cat([torch.arange(n) - starts, torch.zeros(width - n, dtype=torch.long)])
    begin = torch.cat([torch.repeat_interleave(lengths - answers, lengths), torch.zeros(width - n, dtype=torch.long)])
    learned = (positions >= begin) & (owner >= 0)
    if rule == "prompt":
        learned = owner >= 0
    follows = torch.cat([owner[1:] == owner[:-1], torch.tensor([False])])
    predicts = torch.cat([learned[1:], torch.tensor([False])])
    predicts = predicts if rule == "border" else learned if rule == "not shifted" else predicts & follows
    if rule == "last":
        predicts |= (owner >= 0) & ~follows
    same = owner[:, None] == owner
    if rule == "causal":
        same |= (owner[:, None] >= 0) & (owner >= 0)
    if rule == "padding":
        same &= owner[:, None] >= 0
    if rule == "padding together":
        same |= (owner[:, None] < 0) & (owner < 0)
    sees = same if rule == "both ways" else same.tril(-1) if rule == "not itself" else same.tril()
    if rule == "positions":
        positions[:n] = torch.arange(n)
    return positions, sees, predicts


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
def merge(weight, adapters, rule=""):
    total = weight.float()
    for a, b, alpha in adapters[-1:] if rule == "last" else adapters:
        rank = adapters[0][0].shape[0] if rule == "first rank" else a.shape[0]
        scale = {"alpha": alpha, "no scale": 1.0, "root": alpha / rank**0.5}.get(rule, alpha / rank)
        product = scale * (b @ a)
        product = product.to(weight.dtype).float() if rule == "product" else product
        total = total + (product.T if rule == "transposed" and total.shape[0] == total.shape[1] else product)
        total = total.to(weight.dtype).float() if rule == "each" else total
    return total if rule == "dtype" else total.to(weight.dtype)


# q5: the wait
def steps_to_start(rates, group, prompts, rule=""):
    p = rates.double()
    if rule == "mean rate":
        p = p.mean().reshape(1)
    if rule == "one answer":
        return 1 / (1 - (1 - p.mean()) ** prompts)
    signal = -torch.expm1(group * torch.log1p(-p)) - (0 if rule == "all right" else p**group)
    q = signal.mean()
    if rule in ("a prompt", "expected groups", "every group"):
        return 1 / {"a prompt": q, "expected groups": q * prompts, "every group": q**prompts}[rule]
    return -1 / torch.expm1(prompts * torch.log1p(-q))


def rounded_away(rates, group, prompts):
    """The formula as it stands, in float64."""
    return 1 / (1 - (1 - (1 - (1 - rates) ** group - rates**group).mean()) ** prompts)


RIGHT = {"q1": diagnose, "q2": keep_apart, "q3": ranks, "q4": merge, "q5": steps_to_start}

WRONG = {
    "q1": {
        **ruled(diagnose, ROWS),
        "fine": lambda ids, *_: torch.zeros(len(ids), dtype=torch.long),
    },
    "q2": ruled(keep_apart, PLACES),
    "q3": {
        "shares": (one_by_one(lambda v, r: v[r] ** 2 / (v**2).sum()), "compared shares"),
        "whole": (one_by_one(lambda v, r: (v**2).sum() / (r + 1)), "the whole size"),
        "left": (one_by_one(lambda v, r: (v[r:] ** 2).sum()), "ONE more rank"),
        "small": (one_by_one(lambda v, r: -v[r]), "the small singular values"),
        "one more": lambda u, b: ranks(u, b + 1),
    },
    "q4": {
        **ruled(merge, MERGES | {"dtype": "dtype torch.float32"}),
        "nothing": lambda weight, adapters: weight,
    },
    "q5": {
        **ruled(steps_to_start, WAITS),
        "rounded away": (rounded_away, "tiny rates are lost"),
        "one less": lambda *x: steps_to_start(*x) - 1,
    },
}
