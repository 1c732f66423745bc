"""Answers to the exercises of lesson 00."""

import math
import re

import torch
from answers import solution, solved

NUMBER = r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?"


def number(text: str) -> float:
    return float(text.replace(",", ""))


def searched(pattern: str, which: int = -1):
    """A reader that takes one of all matches of a pattern."""

    def read(text):
        found = re.findall(pattern, text, re.M)
        return number(found[which]) if found else math.nan

    return read


def share(right):
    return right.double().mean(1)


def floating(n, k):
    """How many ways there are to choose k of n, in an order, of floats that overflow."""
    return math.gamma(n + 1) / math.gamma(n - k + 1) if n >= k else 0.0


def in_order(before, after):
    now, brings = before.clone(), torch.zeros_like(before)
    for i in range(len(before)):
        was = now.prod()
        now[i] = after[i]
        brings[i] = now.prod() - was
    return brings


WRONG = {
    "q3": {
        "one order": (in_order, "a single order"),
        "sum": (lambda old, new: solution("nb00", "q3")(old, new) * math.factorial(len(old)), "added up the orders"),
        "sign": (solved("nb00", "q3", lambda credit: -credit), "The sign is wrong"),
        "equal shares": lambda before, after: (after.prod() - before.prod()).expand(len(before)) / len(before),
        "the gain": lambda before, after: after.prod() - before.prod(),
    },
    "q1": {
        "the first line": (searched(rf"^#### +({NUMBER}) *$", 0), "the last one counts"),
        "any number": (searched(rf"({NUMBER})"), "no `####` announces"),
        "something behind": (searched(rf"^#### +({NUMBER})"), "something behind it"),
        "something before": (searched(rf"#### +({NUMBER}) *$"), "something before it"),
        "no space": (searched(rf"^#### *({NUMBER}) *$"), "at least one space"),
        "no minus": (searched(r"^#### +-?([0-9,.]*[0-9]) *$"), "lost the minus sign"),
        "no commas": (searched(r"^#### +(-?[0-9]+(?:\.[0-9]+)?) *$"), "1,234 is one number"),
        "no decimals": (searched(r"^#### +(-?[0-9,]*[0-9])(?:\.[0-9]+)? *$"), "lost the decimal part"),
        "commas anywhere": (searched(r"^#### +(-?[0-9][0-9,]*(?:\.[0-9]+)?) *$"), "groups by threes"),
        "the next line": (searched(rf"^####\s+({NUMBER}) *$"), "not in the next"),
        "a plus": (searched(rf"^#### +\+?({NUMBER}) *$"), "not `+5`"),
        "no digit before the point": (searched(rf"^#### +({NUMBER}|-?\.[0-9]+) *$"), "not `.5`"),
        "a long first group": (searched(r"^#### +(-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?) *$"), "at most three digits"),
        "integers as text": solved("nb00", "q1", lambda found: f"{found}!"),
        "None": (lambda text: None, "gives None"),
    },
    "q2": {
        "shortcut": (lambda right, k: (1 - (1 - share(right)) ** k).mean(), "biased shortcut"),
        "first k": (lambda right, k: right[:, :k].any(1).double().mean(), "first k samples alone"),
        "pass@1": (lambda right, k: share(right).mean(), "That is pass@1"),
        "all wrong": (solved("nb00", "q2", lambda share: 1 - share), "take it from 1"),
        "sum": (lambda right, k: solution("nb00", "q2")(right, k) * len(right), "take their mean"),
        "one a problem": lambda right, k: torch.tensor([float(solution("nb00", "q2")(row[None], k)) for row in right]),
        "float factorials": lambda right, k: (
            1 - sum(floating(right.shape[1] - c, k) / floating(right.shape[1], k) for c in right.sum(1)) / len(right)
        ),
    },
}
