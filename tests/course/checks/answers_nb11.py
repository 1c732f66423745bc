"""Answers to the exercises of lesson 11."""

import itertools
from functools import partial

import torch
from answers import ruled

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
def up(tokens, block):
    return -(-tokens // block)


def admit(running, prompts, group, free, block, steps):
    for tokens in running.tolist():
        free -= up(tokens + steps, block) - up(tokens, block)
    count = 0
    for tokens in prompts.tolist():
        full = tokens // block
        for i in range(group):
            free -= up(tokens + steps, block) - full + full * (i == 0)
            if free < 0:
                return count
            count += 1
    return count


def admit_with(running, prompts, group, free, block, steps, rule):
    line = [(number, tokens) for number, tokens in enumerate(prompts.tolist()) for _ in range(group)]
    return admitted(running.tolist(), line, group, free, block, steps, rule)


# q3: a schedule that never ends
def never_ends(capacity, rows, length, patience=4000):
    """Step by step, with a list of tokens; -1 waits."""
    tokens = [-1] * rows
    for _ in range(patience):
        for row in range(rows):
            running = [t for t in tokens if t >= 0]
            if tokens[row] < 0 and sum(running) + len(running) + 1 <= capacity:
                tokens[row] = 0
        while sum(t + 1 for t in tokens if t >= 0) > capacity:
            tokens[tokens.index(max(tokens))] = -1
        tokens = [t + 1 if t >= 0 else t for t in tokens]
        if max(tokens) == length:
            return False
    return True


def shortest(capacity, rows, **rule):
    return next((n for n in range(1, capacity + 1) if never_ends(capacity, rows, n, **rule)), capacity + 1)


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


RIGHT = {"q2": admit, "q3": shortest, "q4": first_to_part}

WRONG = {
    "q1": {
        **ruled(overlooking, RULES),
        "free at the first drop": free_at_first_drop,
        "the last": (lambda t, n: len(t) - 1, "the first is asked for"),
    },
    "q2": {
        **ruled(admit_with, ADMISSION),
        "one more": lambda *x: admit(*x) + 1,
    },
    "q3": {
        "capacity": (lambda c, r: c, "so does a shorter one"),
        "first sent back": (lambda c, r: c // r + 1, "It ends all the same"),
        "still ends": (lambda c, r: shortest(c, r) - 1, "one more"),
        "three quarters": lambda c, r: 3 * c // 4,
        "impatient": lambda c, r: shortest(c, r, patience=c // r + 3),
    },
    "q4": {
        **{said: (partial(first_to_part, differs=differs), said) for said, differs in PARTED.items()},
        "the call before": (lambda x: (first_to_part(x) - 1).clamp(min=0), "before the one that parts"),
    },
}
