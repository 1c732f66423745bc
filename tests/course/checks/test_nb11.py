"""The checks of lesson 11 pass what is right, kill what is wrong, and name the mistake."""

import itertools
from collections import Counter

import pytest
import torch
from answers import common_tests

from rlcourse.course.checks.nb11 import QUESTIONS
from rlcourse.course.checks.nb11.q1_audit import RULES, some_trace
from rlcourse.course.checks.nb11.q2_admit import ADMISSION
from rlcourse.course.checks.nb11.q3_shortest import YOUNGEST, ends, least

# q1: an auditor --------------------------------------------------------------------------------------------------


def audit(trace, number, lax=""):
    """Right but for one rule."""
    tables = {}
    for place, (kind, name, blocks) in enumerate(trace):
        mine = tables.setdefault(name, set())
        others = Counter(block for other, held in tables.items() if other != name for block in held)
        for i, block in enumerate(blocks):
            wrong = {
                "give": {
                    "nobody's": not 1 <= block < number,
                    "held": bool(others[block]) or block in mine - set(blocks[:i]),
                    "given twice": block in blocks[:i],
                },
                "share": {"ghost": not others[block] and block not in mine, "shared with itself": block in mine},
                "write": {
                    "foreign write": block not in mine and others[block] > 0,
                    "unheld write": block not in mine and not others[block],
                    "shared write": block in mine and others[block] > 0,
                },
                "drop": {
                    "foreign drop": block not in mine and others[block] > 0 and block not in blocks[:i],
                    "unheld drop": block not in mine and not others[block] and block not in blocks[:i],
                    "dropped twice": block in blocks[:i],
                },
            }[kind]
            if any(broken for rule, broken in wrong.items() if rule != lax):
                return place
            if kind in ("give", "share"):
                mine.add(block)
            if kind == "drop":
                mine.discard(block)
    return -1


def audit_by_counts(trace, number):
    """Holders of each block as a matrix [tables, blocks]."""
    names = sorted({name for _, name, _ in trace})
    holds = torch.zeros(len(names), number + 50, dtype=torch.long)
    for place, (kind, name, blocks) in enumerate(trace):
        row = names.index(name)
        for block in blocks:
            mine, all_of_it = int(holds[row, block]), int(holds[:, block].sum())
            fine = {
                "give": all_of_it == 0 and 0 < block < number,
                "share": all_of_it > 0 and mine == 0,
                "write": mine == 1 and all_of_it == 1,
                "drop": mine == 1,
            }[kind]
            if not fine:
                return torch.tensor(place)
            holds[row, block] += {"give": 1, "share": 1, "write": 0, "drop": -1}[kind]
    return torch.tensor(-1)


def free_at_first_drop(trace, number):
    """The manager's own mistake: a block is nobody's once one table has dropped it."""
    held = set()
    for place, (kind, _, blocks) in enumerate(trace):
        if (kind == "give") == bool(held & set(blocks)) and kind != "write":
            return place
        held = held | set(blocks) if kind == "give" else held - set(blocks) if kind == "drop" else held
    return -1


# q2: an admission rule -------------------------------------------------------------------------------------------


def up(tokens, block):
    return -(-tokens // block)


def admit(running, prompts, group, free, block, steps, rule=""):
    running, prompts = running.tolist(), prompts.tolist()
    for tokens in running:
        grown = tokens + steps * (rule != "running")
        free -= up(grown, block) - up(tokens, block) * (rule != "counted twice")
    count = 0
    for tokens in prompts:
        full = 0 if rule == "alone" else up(tokens, block) if rule == "partly" else tokens // block
        own = up(tokens + steps * (rule != "new"), block) - full
        for i in range(group):
            need = own + full * (i == 0)
            if need > free:
                if rule == "skipped":
                    continue
                return count // group * group if rule == "whole groups" else count
            free -= need
            count += 1
    return count


def admit_by_cumsum(running, prompts, group, free, block, steps):
    grow = ((running + steps + block - 1) // block - (running + block - 1) // block).sum()
    full = prompts // block
    need = ((prompts + steps + block - 1) // block - full)[:, None].repeat(1, group)
    need[:, 0] += full
    return (need.flatten().cumsum(0) + grow <= free).sum()


def pooled(running, prompts, group, free, block, steps):
    line = [(i, tokens) for i, tokens in enumerate(prompts.tolist()) for _ in range(group)]
    for count in range(len(line) + 1):
        some = line[:count]
        later = int(running.sum()) + steps * (len(running) + count) + sum(dict(some).values())
        if up(later, block) - up(int(running.sum()), block) > free:
            return count - 1
    return len(line)


# q3: a schedule that never ends ----------------------------------------------------------------------------------


def never_ends(capacity, rows, length, sends=None, patience=4000):
    """Step by step, with a list of tokens; -1 waits."""
    tokens = [-1] * rows
    for _ in range(patience):
        for row in range(rows):
            running = [t for t in tokens if t >= 0]
            if tokens[row] < 0 and sum(running) + len(running) + 1 <= capacity:
                tokens[row] = 0
        while sum(t + 1 for t in tokens if t >= 0) > capacity:
            tokens[(sends or (lambda tokens: tokens.index(max(tokens))))(tokens)] = -1
        tokens = [t + 1 if t >= 0 else t for t in tokens]
        if max(tokens) == length:
            return False
    return True


def shortest(capacity, rows, **rule):
    return next((n for n in range(1, capacity + 1) if never_ends(capacity, rows, n, **rule)), capacity + 1)


def by_the_longest(capacity, rows):
    """One run in which nobody ends: nobody ever gets further than the most that any answer holds."""
    tokens, most = [-1] * rows, 0
    for _ in range(4000):
        for row in range(rows):
            if tokens[row] < 0 and sum(t + 1 for t in tokens if t >= 0) < capacity:
                tokens[row] = 0
        while sum(t + 1 for t in tokens if t >= 0) > capacity:
            tokens[max(range(rows), key=lambda row: (tokens[row], -row))] = -1
        tokens = [t + 1 if t >= 0 else t for t in tokens]
        most = max(most, *tokens)
    return torch.tensor(most + 1)


def fewest(tokens):
    return min((row for row in range(len(tokens)) if tokens[row] >= 0), key=lambda row: tokens[row])


# q4: a probe -----------------------------------------------------------------------------------------------------


def whole(x):
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def first_to_part(results, differs=None):
    differs = differs or (lambda call, before, _: not torch.equal(whole(call[: len(before)]), whole(before)))
    found = []
    for calls in results:
        parted = [len(call) for before, call in itertools.pairwise(calls) if differs(call, before, calls)]
        found.append(parted[0] if parted else 0)
    return torch.tensor(found)


def with_the_first_call(results):
    """Each row beside what it was in the smallest call that has it, by bytes."""
    found = []
    for calls in results:
        least = 0
        for i, call in itertools.product(range(len(calls)), calls):
            same = i >= len(call) or bytes(whole(call[i]).numpy()) == bytes(whole(calls[i][i]).numpy())
            least = least if same or (least and least <= len(call)) else len(call)
        found.append(least)
    return torch.tensor(found)


def earlier(results):
    return (first_to_part(results) - 1).clamp(min=0)


RIGHT = {
    "q1": [audit, audit_by_counts],
    "q2": [admit, admit_by_cumsum],
    "q3": [shortest, by_the_longest],
    "q4": [first_to_part, with_the_first_call],
}

WRONG = {
    "q1": {
        **{rule: lambda t, n, rule=rule: audit(t, n, rule) for rule in RULES},
        "free at the first drop": free_at_first_drop,
        "the last": lambda t, n: len(t) - 1,
        "from one on": lambda t, n: audit(t, n) + 1,
        "always fine": lambda t, n: -1,
    },
    "q2": {
        **{rule: lambda *x, rule=rule: admit(*x, rule=rule) for rule in ADMISSION if rule != "pooled"},
        "pooled": pooled,
        "one more": lambda *x: admit(*x) + 1,
        "all": lambda running, prompts, group, *_: len(prompts) * group,
    },
    "q3": {
        "capacity": lambda c, r: c,
        "first sent back": lambda c, r: c // r + 1,
        "still ends": lambda c, r: shortest(c, r) - 1,
        "fewest": lambda c, r: shortest(c, r, sends=fewest),
        "three quarters": lambda c, r: 3 * c // 4,
        "impatient": lambda c, r: shortest(c, r, patience=c // r + 3),
    },
    "q4": {
        "nan": lambda x: first_to_part(x, lambda call, before, _: bool((call[:-1] != before).any())),
        "tolerance": lambda x: first_to_part(
            x, lambda call, before, _: not torch.allclose(call[:-1], before, equal_nan=True)
        ),
        "equal": lambda x: first_to_part(
            x, lambda call, before, _: not torch.equal(call[:-1].nan_to_num(), before.nan_to_num())
        ),
        "row 0": lambda x: first_to_part(x, lambda call, before, _: not torch.equal(whole(call[0]), whole(before[0]))),
        "the last call": lambda x: first_to_part(
            x, lambda call, _, calls: not torch.equal(whole(call), whole(calls[-1][: len(call)]))
        ),
        "the call before": earlier,
        "never": lambda x: torch.zeros(len(x), dtype=torch.long),
    },
}

NAMED = {
    **{("q1", rule): sentence for rule, sentence in RULES.items()},
    ("q1", "the last"): "the first is asked for",
    **{("q2", rule): sentence for rule, sentence in ADMISSION.items()},
    ("q3", "capacity"): "so does a shorter one",
    ("q3", "first sent back"): "It ends all the same",
    ("q3", "still ends"): "one more",
    ("q3", "fewest"): "holds less",
    ("q3", "three quarters"): "run it",
    ("q4", "nan"): "nan is not equal",
    ("q4", "tolerance"): "tolerance",
    ("q4", "equal"): "0.0 and -0.0",
    ("q4", "row 0"): "row 0 alone",
    ("q4", "the last call"): "the last call",
    ("q4", "the call before"): "the call before the one",
}

globals().update(common_tests(QUESTIONS, RIGHT, WRONG, NAMED))


@pytest.mark.parametrize("rule", [*RULES, "none"])
def test_a_trace_is_broken_where_it_was_planted(rule):
    for seed in range(30):
        torch.manual_seed(seed)
        trace, place = some_trace(rule, 10)
        assert (place == -1) == (rule == "none") and audit(trace, 10) == place


@pytest.mark.parametrize("capacity, rows", [(12, 2), (20, 3), (24, 4)])
def test_who_sends_back_the_youngest_always_ends(capacity, rows):
    assert all(ends(capacity, rows, length, YOUNGEST) for length in range(1, capacity + 1))
    assert not ends(capacity, rows, least(capacity, rows))
