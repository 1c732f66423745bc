"""The checks of lesson 00 pass what is right, kill what is wrong, and name the mistake."""

import itertools
import math
import re

import pytest
import torch
from answers import common_tests

from rlcourse.course.checks.nb00 import QUESTIONS, by_counting

NUMBER = r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?"


def number(text: str) -> float:
    return float(text.replace(",", ""))


def searched(pattern: str, which: int = -1):
    """A reader that takes one of all matches of a pattern."""

    def read(text):
        found = re.findall(pattern, text, re.M)
        return number(found[which]) if found else math.nan

    return read


def by_lines(text):
    numbers = [number(m[1]) for line in text.split("\n") if (m := re.fullmatch(rf"#### +({NUMBER}) *", line))]
    return numbers[-1] if numbers else math.nan


def by_hand(text):
    """Without regular expressions for the whole line."""
    for line in text.split("\n")[::-1]:
        head, _, rest = line.partition(" ")
        whole, dot, decimals = rest.strip(" ").removeprefix("-").partition(".")
        groups = whole.split(",")
        grouped = len(groups) == 1 or (1 <= len(groups[0]) <= 3 and all(len(g) == 3 for g in groups[1:]))
        digits = all(g.isascii() and g.isdigit() for g in groups + ([decimals] if dot else []))
        if head == "####" and grouped and digits:
            return float(rest.strip(" ").replace(",", ""))
    return math.nan


def gives_up(text):
    lines = [line for line in text.split("\n") if line.startswith("####")]
    return by_lines(lines[-1]) if lines else math.nan


def binomial(right, k):
    """1 - product of (n - c - i) / (n - i)."""
    n, total = right.shape[1], 0.0
    for row in right:
        wrong = n - int(row.sum())
        missed = 1.0
        for i in range(k):
            missed *= max(0, wrong - i) / (n - i)
        total += 1 - missed
    return total / len(right)


def stable(right, k):
    """Chen et al. 2021, as their code has it, on tensors."""
    n, c = right.shape[1], right.sum(1)
    values = [1.0 if n - m < k else 1.0 - torch.prod(1.0 - k / torch.arange(n - m + 1.0, n + 1.0)).item() for m in c]
    return torch.tensor(values).mean()


def share(right):
    return right.double().mean(1)


def pooled(right, k):
    n, c = right.numel(), int(right.sum())
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def exact(right, k):
    n = right.shape[1]
    return [1 - math.comb(n - c, k) / math.comb(n, k) for c in right.sum(1).tolist()]


def mean_count(right, k):
    n = right.shape[1]
    return 1 - math.comb(round(n - right.sum(1).double().mean().item()), k) / math.comb(n, k)


def over_orders(before, after):
    total, orders = torch.zeros(len(before)), list(itertools.permutations(range(len(before))))
    for order in orders:
        for place, i in enumerate(order):
            rest = torch.tensor([(after if j in order[:place] else before)[j] for j in range(len(before)) if j != i])
            total[i] += rest.prod() * (after[i] - before[i])
    return total / len(orders)


def by_recursion(before, after):
    """The last in an order is each with the same probability; those before it share as if it were not there."""
    k = len(before)
    if k == 1:
        return after - before
    total = torch.zeros(k)
    for last in range(k):
        others = [j for j in range(k) if j != last]
        total[last] += after[others].prod() * (after[last] - before[last]) / k
        total[others] += before[last] * by_recursion(before[others], after[others]) / k
    return total


def in_order(before, after):
    now, brings = before.clone(), torch.zeros_like(before)
    for i in range(len(before)):
        was = now.prod()
        now[i] = after[i]
        brings[i] = now.prod() - was
    return brings


def each_alone(before, after):
    return before.prod() / before * (after - before)


def each_last(before, after):
    return after.prod() / after * (after - before)


def by_logs(before, after):
    return (after / before).log() / (after / before).log().sum() * (after.prod() - before.prod())


RIGHT = {"q1": [by_lines, by_hand], "q2": [binomial, stable], "q3": [over_orders, by_recursion]}
WRONG = {
    "q3": {
        "one order": in_order,
        "the other order": lambda before, after: in_order(before.flip(0), after.flip(0)).flip(0),
        "alone": each_alone,
        "last": each_last,
        "first and last": lambda before, after: (each_alone(before, after) + each_last(before, after)) / 2,
        "logs": by_logs,
        "sum": lambda before, after: over_orders(before, after) * math.factorial(len(before)),
        "sign": lambda before, after: over_orders(after, before),
        "difference": lambda before, after: after - before,
        "equal shares": lambda before, after: (after.prod() - before.prod()).expand(len(before)) / len(before),
        "zero": lambda before, after: torch.zeros_like(before),
        "nan": lambda before, after: torch.full_like(before, math.nan),
        "identity": lambda before, after: before,
        "the gain": lambda before, after: after.prod() - before.prod(),
    },
    "q1": {
        "the first line": searched(rf"^#### +({NUMBER}) *$", 0),
        "any number": searched(rf"({NUMBER})"),
        "something behind": searched(rf"^#### +({NUMBER})"),
        "something before": searched(rf"#### +({NUMBER}) *$"),
        "no space": searched(rf"^#### *({NUMBER}) *$"),
        "no minus": searched(r"^#### +-?([0-9,.]*[0-9]) *$"),
        "no commas": searched(r"^#### +(-?[0-9]+(?:\.[0-9]+)?) *$"),
        "no decimals": searched(r"^#### +(-?[0-9,]*[0-9])(?:\.[0-9]+)? *$"),
        "commas anywhere": searched(r"^#### +(-?[0-9][0-9,]*(?:\.[0-9]+)?) *$"),
        "the next line": searched(rf"^####\s+({NUMBER}) *$"),
        "a space before": searched(rf"^ *#### +({NUMBER}) *$"),
        "a full stop": searched(rf"^#### +({NUMBER})\.? *$"),
        "a plus": searched(rf"^#### +\+?({NUMBER}) *$"),
        "no digit before the point": searched(rf"^#### +({NUMBER}|-?\.[0-9]+) *$"),
        "a long first group": searched(r"^#### +(-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?) *$"),
        "gives up": gives_up,
        "integers as text": lambda text: str(by_lines(text)) + "!",
        "None": lambda text: None,
        "zero for nothing": lambda text: 0.0 if math.isnan(by_lines(text)) else by_lines(text),
    },
    "q2": {
        "shortcut": lambda right, k: (1 - (1 - share(right)) ** k).mean(),
        "first k": lambda right, k: right[:, :k].any(1).double().mean(),
        "pass@1": lambda right, k: share(right).mean(),
        "pooled": pooled,
        "mean of the counts": mean_count,
        "all wrong": lambda right, k: 1 - sum(exact(right, k)) / len(right),
        "sum": lambda right, k: sum(exact(right, k)),
        "one a problem": lambda right, k: torch.tensor(exact(right, k)),
        "float factorials": lambda right, k: (
            sum(
                1
                - math.exp(math.lgamma(n - c + 1) - math.lgamma(n - c - k + 1))
                / (math.gamma(n + 1) / math.gamma(n - k + 1))
                if n - c >= k
                else 1.0
                for n, c in [(right.shape[1], int(row.sum())) for row in right]
            )
            / len(right)
        ),
    },
}

# The sentence, or a part of it, that a wrong implementation must be told.
NAMED = {
    ("q3", "one order"): "a single order",
    ("q3", "the other order"): "a single order",
    ("q3", "alone"): "brings alone",
    ("q3", "last"): "missing without",
    ("q3", "first and last"): "in between",
    ("q3", "logs"): "by logarithms",
    ("q3", "sum"): "added up the orders",
    ("q3", "sign"): "The sign is wrong",
    ("q1", "the first line"): "the last one counts",
    ("q1", "any number"): "no `####` announces",
    ("q1", "something behind"): "something behind it",
    ("q1", "something before"): "something before it",
    ("q1", "no space"): "at least one space",
    ("q1", "no minus"): "lost the minus sign",
    ("q1", "no commas"): "1,234 is one number",
    ("q1", "no decimals"): "lost the decimal part",
    ("q1", "commas anywhere"): "groups by threes",
    ("q1", "the next line"): "not in the next",
    ("q1", "a space before"): "something before it",
    ("q1", "a full stop"): "something behind it",
    ("q1", "a plus"): "not `+5`",
    ("q1", "no digit before the point"): "not `.5`",
    ("q1", "a long first group"): "at most three digits",
    ("q1", "gives up"): "You gave up",
    ("q1", "None"): "gives None",
    ("q2", "shortcut"): "biased shortcut",
    ("q2", "first k"): "first k samples alone",
    ("q2", "pass@1"): "That is pass@1",
    ("q2", "pooled"): "one pot",
    ("q2", "mean of the counts"): "averaged the counts",
    ("q2", "all wrong"): "take it from 1",
    ("q2", "sum"): "take their mean",
}

globals().update(common_tests(QUESTIONS, RIGHT, WRONG, NAMED))


def test_no_question_gives_a_point_for_what_needs_no_thought():
    q1 = [lambda text: 0.0, lambda text: math.nan, lambda text: text, lambda text: 5.0]
    q2 = [lambda right, k: 0.0, lambda right, k: 1.0, lambda right, k: math.nan, lambda right, k: right]
    for question, functions in (("q1", q1), ("q2", q2), ("q3", [WRONG["q3"][n] for n in ("zero", "nan", "identity")])):
        for place, function in enumerate(functions):
            assert QUESTIONS[question](function).score == 0, (question, place)


def test_counting_agrees_with_a_list_of_all_ways():
    flags = [True, False, False, True]
    ways = [any(way) for way in itertools.combinations(flags, 2)]
    assert by_counting(torch.tensor([flags]), 2).item() == pytest.approx(sum(ways) / len(ways))
