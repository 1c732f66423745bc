"""The checks of lesson 13 pass what is right, kill what is wrong, and name the mistake."""

import itertools
from fractions import Fraction

import torch
from answers import common_tests

from rlcourse.course.checks.nb13 import QUESTIONS
from rlcourse.course.checks.nb13.q1_diagnose import MISTAKES as ROWS
from rlcourse.course.checks.nb13.q2_keep_apart import MISTAKES as PLACES
from rlcourse.course.checks.nb13.q4_merge import MISTAKES as MERGES
from rlcourse.course.checks.nb13.q5_steps_to_start import MISTAKES as WAITS

# q1: what is wrong with a row --------------------------------------------------------------------------------------


def diagnose(ids, labels, prompts, lengths, eos, lax=""):
    """All rows at once; each fact is a bool [rows]."""
    place = torch.arange(ids.shape[1])
    learned = labels != -100
    ends = lengths[:, None]
    if lax == "pads by id":
        ends = ((ids != eos) & (ids != 0)).long().cumsum(1).amax(1, keepdim=True)
    off = (learned & (labels != ids)).any(1) & (lax != "presence")
    edge = prompts[:, None] - (1 if lax == "the prompt's last" else 0)
    before = learned & (place < edge)
    before = (before[:, :1] if lax == "the prompt's first" else before).any(1)
    behind = (learned & (place >= ends)).any(1)
    last = (lengths - 1)[:, None]
    unended = torch.zeros_like(off)
    if lax != "cut off":
        unended |= ids.gather(1, last)[:, 0] != eos
    if lax != "end ignored":
        unended |= ~learned.gather(1, last)[:, 0]
    late = ~learned.gather(1, prompts[:, None])[:, 0]
    found = torch.zeros(len(ids), dtype=torch.long)
    for code, broken in ((5, late), (3, unended), (2, behind), (1, before), (4, off)):
        found[broken] = code
    return found


def by_the_right_labels(ids, labels, prompts, lengths, eos):
    """Builds the labels that should be there and looks at the first place that differs, and at where it is."""
    found = []
    for row in range(len(ids)):
        p, n = int(prompts[row]), int(lengths[row])
        right = [-100] * p + ids[row, p:n].tolist() + [-100] * (ids.shape[1] - n)
        has = labels[row].tolist()
        wrong = [t for t in range(len(right)) if has[t] != right[t]]
        if ids[row, n - 1] != eos or wrong == [n - 1]:
            found.append(3)
        elif not wrong:
            found.append(0)
        elif has[:-1] == right[1:]:
            found.append(4)
        elif wrong == [p]:
            found.append(5)
        else:
            found.append(1 if wrong[0] < p else 2)
    return found


# q2: examples in one row -------------------------------------------------------------------------------------------


def keep_apart(lengths, answers, width, lax=""):
    n = int(lengths.sum())
    owner = torch.cat([torch.repeat_interleave(torch.arange(len(lengths)), lengths), -1 - torch.arange(width - n)])
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    positions = torch.cat([torch.arange(n) - starts, torch.zeros(width - n, dtype=torch.long)])
    begin = torch.cat([torch.repeat_interleave(lengths - answers, lengths), torch.zeros(width - n, dtype=torch.long)])
    learned = (positions >= begin) & (owner >= 0)
    if lax == "prompt":
        learned = owner >= 0
    follows = torch.cat([owner[1:] == owner[:-1], torch.tensor([False])])
    predicts = torch.cat([learned[1:], torch.tensor([False])])
    predicts = predicts if lax == "border" else learned if lax == "not shifted" else predicts & follows
    if lax == "last":
        predicts |= (owner >= 0) & ~follows
    same = owner[:, None] == owner
    if lax == "causal":
        same |= (owner[:, None] >= 0) & (owner >= 0)
    if lax == "padding":
        same &= owner[:, None] >= 0
    if lax == "padding together":
        same |= (owner[:, None] < 0) & (owner < 0)
    sees = same if lax == "both ways" else same.tril(-1) if lax == "not itself" else same.tril()
    if lax == "positions":
        positions[:n] = torch.arange(n)
    return positions, sees, predicts


def keep_apart_by_loops(lengths, answers, width):
    positions = torch.zeros(width, dtype=torch.long)
    sees, predicts = torch.eye(width, dtype=torch.bool), torch.zeros(width, dtype=torch.bool)
    start = 0
    for length, answer in zip(lengths.tolist(), answers.tolist(), strict=True):
        for t in range(length):
            positions[start + t] = t
            sees[start + t, start : start + t + 1] = True
        first = max(length - answer, 1)
        predicts[start + first - 1 : start + length - 1] = True
        start += length
    return [positions, sees, predicts]


# q3: ranks from one budget -----------------------------------------------------------------------------------------


def ranks(updates, budget):
    values = torch.linalg.svdvals(updates)
    chosen = values.flatten().topk(budget).indices // values.shape[1]
    return torch.bincount(chosen, minlength=len(updates))


def ranks_by_threshold(updates, budget):
    values = [torch.linalg.svdvals(matrix).tolist() for matrix in updates]
    least = sorted(itertools.chain(*values), reverse=True)[budget - 1]
    return torch.tensor([sum(v >= least for v in of) for of in values])


def one_by_one(worth):
    def found(updates, budget):
        values, way = torch.linalg.svdvals(updates), [0] * len(updates)
        for _ in range(budget):
            left = [i for i in range(len(way)) if way[i] < values.shape[1]]
            way[max(left, key=lambda i: worth(values[i], way[i]).item())] += 1
        return torch.tensor(way)

    return found


def alike(updates, budget):
    n = len(updates)
    return torch.tensor([budget // n + (i < budget % n) for i in range(n)])


# q4: merging -------------------------------------------------------------------------------------------------------


def merge(weight, adapters, lax=""):
    total = weight.float()
    for a, b, alpha in adapters[-1:] if lax == "last" else adapters:
        rank = adapters[0][0].shape[0] if lax == "first rank" else a.shape[0]
        scale = {"alpha": alpha, "no scale": 1.0, "root": alpha / rank**0.5}.get(lax, alpha / rank)
        product = scale * (b @ a)
        total = total + (product.to(weight.dtype).float() if lax == "product" else product)
        total = total.to(weight.dtype).float() if lax == "each" else total
    return total if lax == "dtype" else total.to(weight.dtype)


def merge_joined(weight, adapters):
    """All adapters as one of larger rank."""
    a = torch.cat([a for a, _, _ in adapters])
    b = torch.cat([b * (alpha / a.shape[0]) for a, b, alpha in adapters], dim=1)
    return torch.addmm(weight.float(), b, a).to(weight.dtype)


def transposed(weight, adapters):
    total = weight.float()
    for a, b, alpha in adapters:
        added = alpha / a.shape[0] * (b @ a)
        total = total + (added.T if added.shape[0] == added.shape[1] else added)
    return total.to(weight.dtype)


# q5: the wait ------------------------------------------------------------------------------------------------------


def steps_to_start(rates, group, prompts, lax=""):
    p = rates.double()
    if lax == "mean rate":
        p = p.mean().reshape(1)
    if lax == "one answer":
        return 1 / (1 - (1 - p.mean()) ** prompts)
    signal = -torch.expm1(group * torch.log1p(-p)) - (0 if lax == "all right" else p**group)
    q = signal.mean()
    if lax in ("a prompt", "expected groups", "every group"):
        return 1 / {"a prompt": q, "expected groups": q * prompts, "every group": q**prompts}[lax]
    return -1 / torch.expm1(prompts * torch.log1p(-q))


def in_fractions(rates, group, prompts):
    """Without rounding."""
    p = [Fraction(float(rate)) for rate in rates]
    q = sum(1 - (1 - x) ** group - x**group for x in p) / len(p)
    chance = 1 - (1 - q) ** prompts
    return float(1 / chance) if chance else float("inf")


def rounded_away(rates, group, prompts):
    """The formula as it stands, in float64."""
    return 1 / (1 - (1 - (1 - (1 - rates) ** group - rates**group).mean()) ** prompts)


RIGHT = {
    "q1": [diagnose, by_the_right_labels],
    "q2": [keep_apart, keep_apart_by_loops],
    "q3": [ranks, ranks_by_threshold],
    "q4": [merge, merge_joined],
    "q5": [steps_to_start, in_fractions],
}

WRONG = {
    "q1": {
        **{lax: lambda *x, lax=lax: diagnose(*x, lax=lax) for lax in ROWS},
        "fine": lambda ids, *_: torch.zeros(len(ids), dtype=torch.long),
        "fine or not": lambda *x: diagnose(*x).clamp(max=1),
    },
    "q2": {lax: lambda *x, lax=lax: keep_apart(*x, lax=lax) for lax in PLACES},
    "q3": {
        "alike": alike,
        "shares": one_by_one(lambda v, r: v[r] ** 2 / (v**2).sum()),
        "whole": one_by_one(lambda v, r: (v**2).sum() / (r + 1)),
        "left": one_by_one(lambda v, r: (v[r:] ** 2).sum()),
        "small": one_by_one(lambda v, r: -v[r]),
        "one more": lambda u, b: ranks(u, b + 1),
        "of the first": lambda u, b: torch.tensor([b] + [0] * (len(u) - 1)),
    },
    "q4": {
        **{lax: lambda *x, lax=lax: merge(*x, lax=lax) for lax in [*MERGES, "dtype"]},
        "transposed": transposed,
        "nothing": lambda weight, adapters: weight,
    },
    "q5": {
        **{lax: lambda *x, lax=lax: steps_to_start(*x, lax=lax) for lax in WAITS},
        "rounded away": rounded_away,
        "one less": lambda *x: steps_to_start(*x) - 1,
    },
}

NAMED = {
    **{("q1", lax): sentence for lax, sentence in ROWS.items()},
    **{("q2", lax): sentence for lax, (_, sentence) in PLACES.items()},
    ("q3", "alike"): "All ranks alike",
    ("q3", "shares"): "shares of each matrix",
    ("q3", "whole"): "the whole size",
    ("q3", "left"): "leaves out in all",
    ("q3", "small"): "the small singular values",
    **{("q4", lax): sentence for lax, sentence in MERGES.items()},
    ("q4", "dtype"): "dtype torch.float32",
    ("q4", "transposed"): "the transpose",
    **{("q5", lax): sentence for lax, sentence in WAITS.items()},
    ("q5", "rounded away"): "tiny rates are lost",
}

globals().update(common_tests(QUESTIONS, RIGHT, WRONG, NAMED))
