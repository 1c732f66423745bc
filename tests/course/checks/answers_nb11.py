"""Answers to the exercises of lesson 11."""

import itertools
from functools import partial

import torch
from answers import ruled, solved

from rlcourse.course.checks.nb11 import ADMISSION, PARTED, RULES, admitted, broken


# q1: an auditor
def overlooking(trace, number, rule):
    tables = {}
    return next((i for i, entry in enumerate(trace) if broken(entry, tables, number, rule)), -1)


def free_at_first_drop(trace, number):
    """The manager's own mistake: a block is nobody's once one table has dropped it."""
    held = set()
    for place, (kind, _, blocks) in enumerate(trace):
        if (kind == "give") == bool(held & set(blocks)) and kind != "write":
            return place
        held = held | set(blocks) if kind == "give" else held - set(blocks) if kind == "drop" else held
    return -1


# q2: an admission rule
def admit_with(running, prompts, group, free, block, steps, rule):
    line = [(number, tokens) for number, tokens in enumerate(prompts.tolist()) for _ in range(group)]
    return admitted(running.tolist(), line, group, free, block, steps, rule)


# q4: a probe
def whole(x):
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def first_to_part(results, differs=None):
    differs = differs or (lambda call, before, _: not torch.equal(whole(call[:-1]), whole(before)))
    found = []
    for calls in results:
        parted = [len(call) for before, call in itertools.pairwise(calls) if differs(call, before, calls)]
        found.append(parted[0] if parted else 0)
    return torch.tensor(found)


RIGHT = {"q4": first_to_part}

WRONG = {
    "q1": {
        **ruled(overlooking, RULES),
        "free at the first drop": free_at_first_drop,
        "the last": (lambda t, n: len(t) - 1, "the first is asked for"),
    },
    "q2": ruled(admit_with, ADMISSION) | {"one more": solved("nb11", "q2", lambda count: count + 1)},
    "q3": {
        "capacity": (lambda c, r: c, "so does a shorter one"),
        "first sent back": (lambda c, r: c // r + 1, "It ends all the same"),
        "still ends": (solved("nb11", "q3", lambda length: length - 1), "one more"),
        "three quarters": lambda c, r: 3 * c // 4,
    },
    "q4": {
        **{said: (partial(first_to_part, differs=differs), said) for said, differs in PARTED.items()},
        "the call before": (lambda x: (first_to_part(x) - 1).clamp(min=0), "before the one that parts"),
    },
}
