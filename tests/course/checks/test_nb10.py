"""The checks of lesson 10 pass what is right, kill what is wrong, and name the mistake."""

import torch
from answers import common_tests

from rlcourse.course.checks.nb10 import QUESTIONS


def gain(attention, rest, faster, added, **change):
    """Right but for what is given: a function of the three numbers, or other inputs."""
    before, after = (attention + rest).sum(), (attention / faster + rest + added).sum()
    numbers = [before / after, before / (len(attention) * rest), (attention - attention / faster).mean()]
    for place, value in change.items():
        numbers[["gain", "bound", "room"].index(place)] = value
    return torch.stack([torch.as_tensor(n) for n in numbers])


def gain_by_means(attention, rest, faster, added):
    mean = float(attention.mean())
    old, new = mean + rest, mean / faster + rest + added
    return torch.tensor([old / new, 1 + mean / rest, mean * (1 - 1 / faster)])


def each(attention, rest, faster, added):
    return (attention + rest) / (attention / faster + rest + added)


def inverse(attention, rest, faster, added):
    right = gain(attention, rest, faster, added)
    return torch.stack([1 / right[0], 1 / right[1], right[2]])


def pieces_loop(codes, guards, limit, **change):
    """Right but for: `limit` of all together, what is looked at, what happens over the limit."""
    there = {}
    for _ in range(2):
        compiled = eager = 0
        for code, guard in zip(codes.tolist(), guards.tolist(), strict=True):
            code, guard = change.get("key", lambda c, g: (c, g))(code, guard)
            versions = there.setdefault(code, [])
            if guard not in versions and len(versions) < limit:
                versions.append(guard)
            elif guard not in versions and change.get("evict"):
                versions.pop(0)
                versions.append(guard)
            compiled, eager = compiled + (guard in versions), eager + (guard not in versions)
    return torch.tensor([sum(map(len, there.values())), compiled, eager])


def pieces_sets(codes, guards, limit):
    graphs = runs = 0
    for code in codes.unique():
        own = guards[codes == code]
        known = list(dict.fromkeys(own.tolist()))[:limit]
        graphs, runs = graphs + len(known), runs + int(torch.isin(own, torch.tensor(known)).sum())
    return torch.tensor([graphs, runs, len(codes) - runs])


def pieces_all_or_nothing(codes, guards, limit):
    graphs = runs = 0
    for code in codes.unique():
        own = guards[codes == code]
        known = len(own.unique())
        if known <= limit:
            graphs, runs = graphs + known, runs + len(own)
    return torch.tensor([graphs, runs, len(codes) - runs])


def slots(mask, first=None, last=None):
    if mask is None:
        raise ValueError("no mask")
    seen = mask[:, 0, 0] if mask.dtype == torch.bool else mask[:, 0, 0] == 0
    start = seen.long().argmax(1)
    end = start + seen.sum(1) - 1
    return torch.stack([start if first is None else first(seen), end if last is None else last(seen)])


def slots_by_nonzero(mask):
    if mask is None:
        raise ValueError("no mask")
    rows = [row.nonzero() if row.dtype == torch.bool else (row > -1).nonzero() for row in mask[:, 0, 0]]
    return torch.tensor([[int(row[0]) for row in rows], [int(row[-1]) for row in rows]])


def slots_guess(mask):
    return torch.zeros(2, 1, dtype=torch.long) if mask is None else slots(mask)


def slots_as_truth(mask):
    if mask is None:
        raise ValueError("no mask")
    return slots(mask.bool())


def fake(q, keys, values, **change):
    shape = (*q.shape[:2], values.shape[-1])
    out = change.get("out", q.new_empty(shape))
    logsum = change.get("logsum", q.new_empty(shape[:2], dtype=torch.float32))
    return out, logsum, list(out.stride())


def fake_zeros(q, keys, values):
    rows, heads, _ = q.shape
    out = torch.zeros(rows, heads, values.shape[-1], dtype=q.dtype)
    return out, torch.zeros(rows, heads), out.stride()


def table(rows, us, **change):
    ms, floor, busy, kernels, launches = rows.T
    working = (1 - busy) * ms if change.get("idle") else ms if change.get("step") else busy * ms
    waits = busy > 0.5 if change.get("idle") else busy < 0.5
    verdict = torch.full_like(ms, 4)
    verdict[kernels * us / (1 if change.get("unit") else 1e3) > working / 2] = 3
    verdict[waits] = 2
    verdict[waits & (launches > change.get("many", kernels / 2))] = 1
    if not change.get("no_floor"):
        verdict[ms <= 2 * floor] = 0
    return verdict.long()


def table_loop(rows, us):
    found = []
    for ms, floor, busy, kernels, launches in rows.tolist():
        if ms <= 2 * floor:
            found.append(0)
        elif busy < 0.5:
            found.append(1 if 2 * launches > kernels else 2)
        else:
            found.append(3 if 2 * kernels * us > 1e3 * busy * ms else 4)
    return torch.tensor(found)


RIGHT = {
    "q1": [gain, gain_by_means],
    "q2": [pieces_loop, pieces_sets],
    "q3": [slots, slots_by_nonzero],
    "q4": [fake, fake_zeros],
    "q5": [table, table_loop],
}

WRONG = {
    "q1": {
        "mean of gains": lambda *x: gain(*x, gain=each(*x).mean()),
        "first": lambda *x: gain(*x, gain=each(*x)[0]),
        "last": lambda *x: gain(*x, gain=each(*x)[-1]),
        "kernel": lambda *x: gain(*x, gain=x[2]),
        "nothing added": lambda a, r, f, d: gain(a, r, f, d, gain=gain(a, r, f, 0.0)[0]),
        "added once": lambda a, r, f, d: gain(a, r, f, d, gain=gain(a, r, f, d / len(a))[0]),
        "inverse": inverse,
        "bound with added": lambda a, r, f, d: gain(a, r, f, d, bound=gain(a, r + d, f, d)[1] - d / (r + d)),
        "bound of kernel": lambda a, r, f, d: gain(a, r, f, d, bound=gain(a, r, f, 0.0)[0]),
        "room of rollout": lambda a, r, f, d: gain(a, r, f, d, room=(a - a / f).sum()),
        "room of all attention": lambda a, r, f, d: gain(a, r, f, d, room=a.mean()),
    },
    "q2": {
        "one too high": lambda c, g, n: pieces_loop(c, g, n + 1),
        "one too low": lambda c, g, n: pieces_loop(c, g, n - 1),
        "limit of all": lambda c, g, n: pieces_loop(c, g, n, key=lambda c, g: (0, (c, g))),
        "all or nothing": pieces_all_or_nothing,
        "values do not matter": lambda c, g, n: pieces_loop(c, g, n, key=lambda c, g: (c, 0)),
        "functions do not matter": lambda c, g, n: pieces_loop(c, g, n, key=lambda c, g: (0, g)),
        "no limit": lambda c, g, n: pieces_loop(c, g, 1000),
        "versions as runs": lambda c, g, n: pieces_loop(c, g, n)[[0, 0, 2]],
        "wrong way round": lambda c, g, n: pieces_loop(c, g, n)[[0, 2, 1]],
        "oldest goes": lambda c, g, n: pieces_loop(c, g, n, evict=True),
    },
    "q3": {
        "count": lambda m: slots(m, last=None if m is None else lambda s: s.sum(1) - 1),
        "behind": lambda m: slots(m) + torch.tensor([[0], [1]]),
        "end of the cache": lambda m: slots(m, last=lambda s: torch.full((len(s),), s.shape[1] - 1)),
        "all hidden": lambda m: slots(m, first=lambda s: (~s).sum(1)),
        "first row": lambda m: slots(m, first=lambda s: s.long().argmax(1)[:1].expand(len(s))),
        "no padding": lambda m: slots(m, first=lambda s: torch.zeros(len(s), dtype=torch.long)),
        "wrong way round": lambda m: slots(m).flip(0),
        "numbers as truths": slots_as_truth,
        "guess": slots_guess,
        "floats": lambda m: slots(m).float(),
    },
    "q4": {
        "empty_like": lambda q, k, v: fake(q, k, v, out=torch.empty_like(q)),
        "strides of q": lambda q, k, v: fake(q, k, v, out=q.new_empty(q.shape[1], len(q), v.shape[-1]).transpose(0, 1)),
        "float32 output": lambda q, k, v: fake(q, k, v, out=torch.empty(*q.shape[:2], v.shape[-1])),
        "half log-sum": lambda q, k, v: fake(q, k, v, logsum=q.new_empty(q.shape[:2])),
        "log-sum with a size": lambda q, k, v: fake(q, k, v, logsum=torch.empty(*q.shape[:2], 1)),
        "heads of the cache": lambda q, k, v: fake(q, k, v, out=q.new_empty(len(q), v.shape[1], v.shape[-1])),
        "shape of the cache": lambda q, k, v: fake(q, k, v, out=q.new_empty(v.shape)),
        "output alone": lambda q, k, v: fake(q, k, v)[0],
        "no strides": lambda q, k, v: fake(q, k, v)[:2],
    },
    "q5": {
        "microseconds": lambda r, us: table(r, us, unit=True),
        "of the step": lambda r, us: table(r, us, step=True),
        "idle for busy": lambda r, us: table(r, us, idle=True),
        "no floor": lambda r, us: table(r, us, no_floor=True),
        "fixed number": lambda r, us: table(r, us, many=100),
        "always pieces": lambda r, us: torch.where(table(r, us) == 2, 1, table(r, us)),
        "never waits": lambda r, us: torch.where(table(r, us) == 2, 4, table(r, us)),
    },
}

# The sentence, or a part of it, that a wrong implementation must be told.
NAMED = {
    ("q1", "mean of gains"): "averaged the gains",
    ("q1", "first"): "first step",
    ("q1", "last"): "last step",
    ("q1", "kernel"): "attention alone",
    ("q1", "nothing added"): "left out",
    ("q1", "added once"): "in every step, not once",
    ("q1", "inverse"): "turn it round",
    ("q1", "bound of kernel"): "bound is for free attention",
    ("q1", "room of rollout"): "milliseconds a step",
    ("q1", "room of all attention"): "less attention after",
    ("q2", "one too high"): "one too high",
    ("q2", "one too low"): "one too low",
    ("q2", "limit of all"): "by itself",
    ("q2", "all or nothing"): "keeps the versions it has",
    ("q2", "values do not matter"): "its own value alone",
    ("q2", "functions do not matter"): "share nothing",
    ("q2", "no limit"): "no limit in your count",
    ("q2", "versions as runs"): "not of versions",
    ("q2", "wrong way round"): "wrong way round",
    ("q3", "count"): "padded on the left",
    ("q3", "behind"): "not the one behind",
    ("q3", "end of the cache"): "holds nothing yet",
    ("q3", "all hidden"): "no padding",
    ("q3", "first row"): "first row",
    ("q3", "no padding"): "Padding is forgotten",
    ("q3", "wrong way round"): "wrong way round",
    ("q3", "numbers as truths"): "-inf is hidden",
    ("q3", "guess"): "returned something",
    ("q3", "floats"): "whole numbers",
    ("q4", "empty_like"): "empty_like",
    ("q4", "float32 output"): "that of the queries",
    ("q4", "half log-sum"): "float32",
    ("q4", "heads of the cache"): "as many heads",
    ("q4", "shape of the cache"): "one token a row",
    ("q4", "output alone"): "return three things",
    ("q5", "microseconds"): "microseconds",
    ("q5", "of the step"): "half of the busy time",
    ("q5", "idle for busy"): "share in which the GPU works",
    ("q5", "no floor"): "floor first",
    ("q5", "fixed number"): "fixed number",
    ("q5", "never waits"): "that is 2",
}

test_right_answers_pass, test_wrong_answers_are_killed, test_the_mistake_is_named, test_a_hole_shows_the_hint = (
    common_tests(QUESTIONS, RIGHT, WRONG, NAMED)
)
