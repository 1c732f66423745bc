"""The checks of lesson 06 pass what is right, kill what is wrong, and name the mistake."""

import functools
import itertools
import math
from itertools import pairwise

import pytest
import torch
from answers import common_tests

from rlcourse.course.checks.nb06 import QUESTIONS
from rlcourse.course.checks.nb06.q1_busy import PLANTED, wrong_busy
from rlcourse.course.checks.nb06.q4_self_time import own_times

# q1: a busy fraction ---------------------------------------------------------------------------------------------


def busy_sweep(starts, ends, begin, end):
    starts, ends = starts.clamp(begin, end), ends.clamp(begin, end)
    order = starts.argsort()
    starts, ends = starts[order], ends[order].cummax(0).values
    before = torch.cat([starts[:1], ends[:-1]])
    return (ends - torch.maximum(starts, before)).clamp(min=0).sum() / (end - begin)


def busy_count(starts, ends, begin, end):
    """Plus one at a start, minus one at an end: busy where the running count is positive."""
    times = torch.cat([starts.clamp(begin, end), ends.clamp(begin, end)])
    change = torch.cat([torch.ones(len(starts)), -torch.ones(len(ends))])
    order = times.argsort()
    running = change[order].cumsum(0)[:-1] > 0.5
    return (times[order].diff() * running).sum() / (end - begin)


def busy_last_end_only(starts, ends, begin, end):
    """Compares with the end of the one before, which may end earlier than one before that."""
    order = starts.argsort()
    starts, ends = starts[order].clamp(begin, end), ends[order].clamp(begin, end)
    before = torch.cat([starts[:1], ends[:-1]])
    return (ends - torch.maximum(starts, before)).clamp(min=0).sum() / (end - begin)


def busy_unsorted(starts, ends, begin, end):
    total, until = 0.0, begin
    for start, stop in zip(starts.tolist(), ends.tolist(), strict=True):
        start, stop = max(start, until), min(stop, end)
        total += max(0.0, stop - start)
        until = max(until, stop)
    return torch.tensor(total / (end - begin))


def summed(starts, ends, begin, end):
    return (ends.clamp(begin, end) - starts.clamp(begin, end)).sum() / (end - begin)


def half_mended(starts, ends, begin, end, wrong):
    return wrong_busy(starts, ends, begin, end, wrong)


SUBSETS = [wrong for count in (1, 2, 3) for wrong in itertools.combinations(PLANTED, count)]

# q2: free rows ---------------------------------------------------------------------------------------------------


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


def free_by_formula(weights, cache, element, launches, host, copy, compute, slack):
    limit = slack * max(launches * host, (element * weights + cache) / copy, 2 * weights / compute)
    found = [limit * compute / (2 * weights)]
    if cache:
        found.append((limit * copy - element * weights) / cache)
    return torch.tensor(math.floor(min(found)))


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


def without_element(weights, cache, element, *rest):
    return free_by_search(weights, cache, 1, *rest)


# q3: a plan ------------------------------------------------------------------------------------------------------


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


def plan_by_logs(seconds, phase, speedups, days, budget):
    """With bits of a number for a plan, and logarithms of the speed-ups."""
    best = (math.inf, 0)
    one_hot = torch.nn.functional.one_hot(phase, len(seconds)).double()
    for number in range(2 ** len(days)):
        chosen = torch.tensor([number >> i & 1 for i in range(len(days))]).double()
        if (chosen @ days.double()).item() <= budget:
            best = min(
                best,
                ((seconds.double() * (-((chosen * speedups.double().log()) @ one_hot)).exp()).sum().item(), number),
            )
    return [bool(best[1] >> i & 1) for i in range(len(days))]


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


def greedy_again(seconds, phase, speedups, days, budget):
    """The best next change, with the others as they are by then."""
    plan = ()
    while True:
        now = time_with(plan, seconds, phase, speedups)
        spent = sum(days[i].item() for i in plan)
        more = [(*plan, i) for i in range(len(days)) if i not in plan and spent + days[i] <= budget]
        if not more or min(time_with(p, seconds, phase, speedups) for p in more) >= now:
            return as_bools(plan, days)
        plan = min(more, key=lambda p: time_with(p, seconds, phase, speedups))


def additive(seconds, phase, speedups, days, budget):
    saved = [(seconds[phase[i]] * (1 - 1 / speedups[i])).item() for i in range(len(days))]
    return as_bools(max(plans(days, budget), key=lambda p: sum(saved[i] for i in p)), days)


def product(seconds, phase, speedups, days, budget):
    return as_bools(max(plans(days, budget), key=lambda p: math.prod(speedups[i].item() for i in p)), days)


# q4: self times --------------------------------------------------------------------------------------------------


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


def self_by_pieces(starts, ends):
    """Cut the time at every border; each piece belongs to the shortest event that holds it."""
    borders = torch.cat([starts, ends]).unique()
    own = torch.zeros_like(starts)
    for left, right in pairwise(borders):
        holding = (starts <= left) & (right <= ends)
        if holding.any():
            own[torch.where(holding, ends - starts, torch.inf).argmin()] += right - left
    return own


def held_by(starts, ends):
    """[parent, child] True where an event lies within another."""
    return (starts[:, None] <= starts) & (ends <= ends[:, None]) & ~torch.eye(len(starts), dtype=torch.bool)


def without_sorting(starts, ends):
    own, stack = ends - starts, []
    for i in range(len(starts)):
        while stack and ends[stack[-1]] <= starts[i]:
            stack.pop()
        if stack:
            own[stack[-1]] -= ends[i] - starts[i]
        stack.append(i)
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


def child_first(starts, ends):
    """Of events that begin together the shorter first: gives 6 and -10 where the longer lasts 10."""
    own, stack = ends - starts, []
    for i in sorted(range(len(starts)), key=lambda i: (starts[i].item(), ends[i].item())):
        while stack and ends[stack[-1]] <= starts[i]:
            stack.pop()
        if stack:
            own[stack[-1]] -= ends[i] - starts[i]
        stack.append(i)
    return own


def ties_as_they_come(starts, ends):
    """Sorted by start alone, and of equal starts whichever stands first."""
    own, stack = ends - starts, []
    for i in starts.argsort(stable=True).tolist():
        while stack and ends[stack[-1]] <= starts[i]:
            stack.pop()
        if stack:
            own[stack[-1]] -= ends[i] - starts[i]
        stack.append(i)
    return own


RIGHT = {
    "q1": [busy_sweep, busy_count],
    "q2": [free_by_search, free_by_formula],
    "q3": [plan_by_sets, plan_by_logs],
    "q4": [self_by_parents, self_by_pieces],
}
WRONG = {
    "q1": {"+".join(wrong): functools.partial(half_mended, wrong=wrong) for wrong in SUBSETS}
    | {
        "summed": summed,
        "not cut": lambda starts, ends, b, e: busy_sweep(starts, ends, -1e6, 1e6) * 2e6 / (e - b),
        "summed, not cut": lambda starts, ends, b, e: (ends - starts).sum() / (e - b),
        "idle": lambda *a: 1 - busy_sweep(*a),
        "seconds": lambda starts, ends, b, e: busy_sweep(starts, ends, b, e) * (e - b),
        "only inside": lambda s, t, b, e: (
            busy_sweep(s[(s >= b) & (t <= e)], t[(s >= b) & (t <= e)], b, e) if ((s >= b) & (t <= e)).any() else 0.0
        ),
        "last end only": busy_last_end_only,
        "unsorted": busy_unsorted,
        "by ends": lambda starts, ends, b, e: busy_unsorted(starts[ends.argsort()], ends[ends.argsort()], b, e),
        "capped": lambda *a: summed(*a).clamp(max=1.0),
    },
    "q2": {
        "no host": functools.partial(free_with, first=(1, 2)),
        "host alone": functools.partial(free_with, first=(0,)),
        "first row without operations": functools.partial(free_with, first=(0, 1)),
        "bytes alone": functools.partial(free_with, operations=False),
        "operations alone": functools.partial(free_with, bytes_too=False),
        "one operation": functools.partial(free_with, per_row=1),
        "weights a row": functools.partial(free_with, weights_a_row=True),
        "rounded up": functools.partial(free_with, rounding=math.ceil),
        "no element size": without_element,
        "added": functools.partial(free_by_search, pick=sum),
        "no slack": lambda *numbers: free_by_search(*numbers[:-1], 1.0),
        "seconds": lambda *numbers: numbers[-1] * bound(*numbers[:-1], 1),
        "slack": lambda *numbers: int(numbers[-1]),
        "no case without a cache": lambda *n: math.floor(free_with(*n) / (1 if n[1] else 0)),
    },
    "q3": {
        "largest speed-up": greedy(lambda seconds, speedup, days: speedup - 1),
        "largest share": greedy(lambda seconds, speedup, days: seconds + 1e-6 * speedup),
        "saves most": greedy(lambda seconds, speedup, days: seconds * (1 - 1 / speedup)),
        "saves most a day": greedy(lambda seconds, speedup, days: seconds * (1 - 1 / speedup) / max(days, 1e-3)),
        "again": greedy_again,
        "additive": additive,
        "product": product,
        "everything": lambda seconds, phase, speedups, days, budget: days > -1,
        "nothing": lambda seconds, phase, speedups, days, budget: days < -1,
        "cheapest": greedy(lambda seconds, speedup, days: 10 - days),
        "no budget": lambda seconds, phase, speedups, days, budget: plan_by_sets(seconds, phase, speedups, days, 10**6),
        "numbers": lambda *a: plan_by_sets(*a).nonzero()[:, 0],
        "the time": lambda *a: torch.tensor(min(time_with(p, *a[:3]) for p in plans(*a[3:]))),
    },
    "q4": {
        "durations": lambda starts, ends: ends - starts,
        "descendants": lambda starts, ends: ends - starts - held_by(starts, ends).double() @ (ends - starts),
        "children": lambda starts, ends: ends - starts - self_by_parents(starts, ends),
        "float32": lambda starts, ends: self_by_parents(starts.float(), ends.float()),
        "not sorted": without_sorting,
        "child first": child_first,
        "ties as they come": ties_as_they_come,
        "touching counts as nested": start_alone,
    },
}

# The sentence, or a part of it, that a wrong implementation must be told.
NAMED = {("q1", "+".join(wrong)): f"({', '.join(wrong)})" for wrong in SUBSETS if len(wrong) == 1}
NAMED |= {
    ("q1", "last end only"): "latest end so far",
    ("q1", "summed"): "time counts once",
    ("q1", "only inside"): "part inside",
    ("q1", "idle"): "idle share",
    ("q1", "seconds"): "length of the window",
    ("q2", "no host"): "left out the host",
    ("q2", "first row without operations"): "longest of three times",
    ("q2", "bytes alone"): "operations grow with the rows",
    ("q2", "operations alone"): "cache of its own",
    ("q2", "one operation"): "two operations a row",
    ("q2", "weights a row"): "weights once",
    ("q2", "rounded up"): "round down",
    ("q2", "no element size"): "element_bytes",
    ("q2", "added"): "the longest counts",
    ("q2", "no slack"): "left the slack out",
    ("q3", "largest speed-up"): "largest speed-up first",
    ("q3", "largest share"): "share of the phase alone",
    ("q3", "saves most"): "days ran out",
    ("q3", "saves most a day"): "a day first",
    ("q3", "additive"): "the second change to a phase",
    ("q3", "again"): "helps most next",
    ("q3", "product"): "multiplied all speed-ups",
    ("q3", "no budget"): "if you had the days",
    ("q3", "everything"): "days, there are",
    ("q3", "numbers"): "True or False for each",
    ("q4", "durations"): "whole duration",
    ("q4", "descendants"): "all descendants",
    ("q4", "children"): "time of the children",
    ("q4", "float32"): "keep float64",
    ("q4", "child first"): "longest comes first",
    ("q4", "ties as they come"): "longest comes first",
    ("q4", "not sorted"): "any order",
}

globals().update(common_tests(QUESTIONS, RIGHT, WRONG, NAMED))


@pytest.mark.parametrize("wrong", SUBSETS[3:], ids="+".join)
def test_a_half_mended_busy_fraction_is_told_one_mistake_that_is_left(wrong):
    """And none that has been mended."""
    result = QUESTIONS["q1"](functools.partial(half_mended, wrong=wrong))
    messages = " ".join(case.message for case in result.cases)
    assert not any(PLANTED[name] in messages for name in PLANTED if name not in wrong), messages
    assert any(PLANTED[name] in messages for name in wrong), messages


def test_self_time_of_a_child_that_stands_before_its_parent():
    starts, ends = torch.tensor([0.0, 0.0]).double(), torch.tensor([4.0, 10.0]).double()
    assert own_times(starts, ends).tolist() == [4.0, 6.0]
    assert child_first(starts, ends).tolist() == [-6.0, 10.0]
