"""Answers to the exercises of lesson 06."""

import functools
import itertools
import math

import torch
from answers import half_mended

from rlcourse.course.checks.nb06.q1_busy import PLANTED, wrong_busy


# q1: a busy fraction
def busy_sweep(starts, ends, begin, end):
    starts, ends = starts.clamp(begin, end), ends.clamp(begin, end)
    order = starts.argsort()
    starts, ends = starts[order], ends[order].cummax(0).values
    before = torch.cat([starts[:1], ends[:-1]])
    return (ends - torch.maximum(starts, before)).clamp(min=0).sum() / (end - begin)


# q2: free rows
def bound(weights, cache, element, launches, host, copy, compute, n, first=max):
    return first([launches * host, (element * weights + n * cache) / copy, 2 * weights * n / compute])


def free_by_search(*numbers, pick=max):
    *numbers, slack = numbers
    limit, low, high = slack * bound(*numbers, 1, pick), 1, 1
    while bound(*numbers, high, pick) <= limit:
        high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bound(*numbers, middle, pick) <= limit else (low, middle)
    return low


def free_with(
    *numbers, first=None, operations=True, bytes_too=True, per_row=2, rounding=math.floor, weights_a_row=False
):
    """By formula, with something done wrongly. first: which of the three times of one row count."""
    weights, cache, element, launches, host, copy, compute, slack = numbers
    times = [launches * host, (element * weights + cache) / copy, 2 * weights / compute]
    limit = slack * max(times[i] for i in first or (0, 1, 2))
    found = [limit * compute / (per_row * weights)] if operations else []
    if bytes_too and weights_a_row:
        found.append(limit * copy / (element * weights + cache))
    elif bytes_too and cache:
        found.append((limit * copy - element * weights) / cache)
    return rounding(min(found, default=2**50))


# q3: a plan
def time_with(plan, seconds, phase, speedups):
    return sum(s.item() / math.prod(speedups[i].item() for i in plan if phase[i] == j) for j, s in enumerate(seconds))


def plans(days, budget):
    for size in range(len(days) + 1):
        for plan in itertools.combinations(range(len(days)), size):
            if sum(days[i].item() for i in plan) <= budget:
                yield plan


def as_bools(plan, days):
    return torch.tensor([i in plan for i in range(len(days))])


def plan_by_sets(seconds, phase, speedups, days, budget):
    return as_bools(min(plans(days, budget), key=lambda p: time_with(p, seconds, phase, speedups)), days)


def greedy(worth):
    """Takes changes by falling worth while the days last. worth: (seconds of the phase, speed-up, days) → number."""

    def function(seconds, phase, speedups, days, budget):
        value = [worth(seconds[phase[i]].item(), speedups[i].item(), days[i].item()) for i in range(len(days))]
        plan, left = set(), budget
        for i in sorted(range(len(days)), key=lambda i: -value[i]):
            if days[i] <= left and value[i] > 0:
                plan, left = plan | {i}, left - days[i].item()
        return as_bools(plan, days)

    return function


# q4: self times
def parents(starts, ends):
    """Index of each event's parent, -1 for none: the shortest event that holds it."""
    found = []
    for i in range(len(starts)):
        holding = [
            j for j in range(len(starts)) if j != i and starts[j] <= starts[i] and ends[i] <= ends[j]
        ]  # equal intervals do not occur
        found.append(min(holding, key=lambda j: (ends[j] - starts[j]).item(), default=-1))
    return found


def self_by_parents(starts, ends):
    own = ends - starts
    for i, parent in enumerate(parents(starts, ends)):
        if parent >= 0:
            own[parent] -= ends[i] - starts[i]
    return own


def start_alone(starts, ends):
    """A child ends with its parent; here the stack is popped where it ends before or with the next start only by <."""
    own, stack = ends - starts, []
    for i in starts.argsort(stable=True).tolist():
        while stack and ends[stack[-1]] < starts[i]:
            stack.pop()
        if stack:
            own[stack[-1]] -= ends[i] - starts[i]
        stack.append(i)
    return own


RIGHT = {"q1": busy_sweep, "q2": free_by_search, "q3": plan_by_sets, "q4": self_by_parents}
WRONG = {
    "q1": half_mended(wrong_busy, PLANTED)
    | {
        "idle": (lambda *a: 1 - busy_sweep(*a), "idle share"),
        "seconds": (lambda starts, ends, b, e: busy_sweep(starts, ends, b, e) * (e - b), "length of the window"),
    },
    "q2": {
        "no host": (functools.partial(free_with, first=(1, 2)), "left out the host"),
        "first row without operations": (functools.partial(free_with, first=(0, 1)), "longest of three times"),
        "bytes alone": (functools.partial(free_with, operations=False), "operations grow with the rows"),
        "operations alone": (functools.partial(free_with, bytes_too=False), "cache of its own"),
        "one operation": (functools.partial(free_with, per_row=1), "two operations a row"),
        "weights a row": (functools.partial(free_with, weights_a_row=True), "weights once"),
        "rounded up": (functools.partial(free_with, rounding=math.ceil), "round down"),
        "added": (functools.partial(free_by_search, pick=sum), "the longest counts"),
        "no slack": (lambda *numbers: free_by_search(*numbers[:-1], 1.0), "left the slack out"),
        "no case without a cache": lambda *n: math.floor(free_with(*n) / (1 if n[1] else 0)),
    },
    "q3": {
        "largest speed-up": (greedy(lambda seconds, speedup, days: speedup - 1), "largest speed-up first"),
        "largest share": (greedy(lambda seconds, speedup, days: seconds + 1e-6 * speedup), "share of the phase alone"),
        "saves most": (greedy(lambda seconds, speedup, days: seconds * (1 - 1 / speedup)), "days ran out"),
        "everything": (lambda seconds, phase, speedups, days, budget: days > -1, "days, there are"),
        "numbers": (lambda *a: plan_by_sets(*a).nonzero()[:, 0], "True or False for each"),
    },
    "q4": {
        "durations": (lambda starts, ends: ends - starts, "whole duration"),
        "children": (lambda starts, ends: ends - starts - self_by_parents(starts, ends), "time of the children"),
        "float32": (lambda starts, ends: self_by_parents(starts.float(), ends.float()), "keep float64"),
        "touching counts as nested": start_alone,
    },
}
