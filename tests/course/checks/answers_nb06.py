"""Answers to the exercises of lesson 06."""

import functools
import itertools
import math

import torch
from answers import half_mended, ruled

from rlcourse.course.checks.nb06 import (
    FREE_MISTAKES,
    PLANTED,
    RULES,
    SELF_MISTAKES,
    most_rows,
    own_times,
    plan_by,
    wrong_busy,
)


# q1: a busy fraction
def busy_sweep(starts, ends, begin, end):
    starts, ends = starts.clamp(begin, end), ends.clamp(begin, end)
    order = starts.argsort()
    starts, ends = starts[order], ends[order].cummax(0).values
    before = torch.cat([starts[:1], ends[:-1]])
    return (ends - torch.maximum(starts, before)).clamp(min=0).sum() / (end - begin)


# q2: free rows
def free_by_formula(weights, cache, element, launches, host, copy, compute, slack):
    limit = slack * max(launches * host, (element * weights + cache) / copy, 2 * weights / compute)
    by_bytes = (limit * copy - element * weights) / cache if cache else math.inf
    return math.floor(min(by_bytes, limit * compute / (2 * weights)))


# q3: a plan
def plan_by_sets(seconds, phase, speedups, days, budget):
    def time(plan):
        return sum(s / math.prod(speedups[i] for i in plan if phase[i] == j) for j, s in enumerate(seconds))

    sets = itertools.chain(*(itertools.combinations(range(len(days)), size) for size in range(len(days) + 1)))
    best = min((plan for plan in sets if sum(days[i] for i in plan) <= budget), key=time)
    return torch.tensor([i in best for i in range(len(days))])


# q4: self times
def by_stack(starts, ends, touching=False):
    """By the starts alone: of events that begin together a child may take its parent for its own child. touching: an
    event that begins where another ends is taken for its child."""
    own, stack = ends - starts, []
    for i in starts.argsort(stable=True).tolist():
        while stack and (ends[stack[-1]] < starts[i] if touching else ends[stack[-1]] <= starts[i]):
            stack.pop()
        if stack:
            own[stack[-1]] -= ends[i] - starts[i]
        stack.append(i)
    return own


RIGHT = {"q1": busy_sweep, "q2": free_by_formula, "q3": plan_by_sets}
WRONG = {
    "q1": half_mended(wrong_busy, PLANTED)
    | {
        "idle": (lambda *a: 1 - busy_sweep(*a), "idle share"),
        "seconds": (lambda starts, ends, b, e: busy_sweep(starts, ends, b, e) * (e - b), "length of the window"),
        "summed": (
            lambda starts, ends, b, e: (ends.clamp(b, e) - starts.clamp(b, e)).sum() / (e - b),
            "added up the durations",
        ),
    },
    "q2": ruled(most_rows, FREE_MISTAKES, "wrong")
    | {
        "rounded up": lambda *n: free_by_formula(*n) + 1,
        "not rounded": (lambda *n: free_by_formula(*n) + 0.5, "a whole number"),
        "no case without a cache": lambda *n: math.floor(free_by_formula(*n) / (1 if n[1] else 0)),
    },
    "q3": ruled(plan_by, RULES)
    | {
        "everything": (lambda seconds, phase, speedups, days, budget: days > -1, "days, there are"),
        "numbers": (lambda *a: plan_by_sets(*a).nonzero()[:, 0], "True or False for each"),
    },
    "q4": ruled(own_times, SELF_MISTAKES, "wrong")
    | {"ties": by_stack, "touching counts as nested": functools.partial(by_stack, touching=True)},
}
