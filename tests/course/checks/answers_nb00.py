"""Answers to the exercises of lesson 00."""

import math
import re

import torch
from answers import solved

NUMBER = r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?"


def searched(pattern: str, which: int = -1):
    """A reader that takes one of all matches of a pattern."""

    def read(text):
        found = re.findall(pattern, text, re.M)
        return float(found[which].replace(",", "")) if found else math.nan

    return read


def best(right, score):
    """How often the sample with the highest score is right."""
    return right.gather(1, score.argmax(1, keepdim=True)).double().mean()


def floating(n, k):
    """How many ways there are to choose k of n, in an order, of floats that overflow."""
    return math.gamma(n + 1) / math.gamma(n - k + 1) if n >= k else 0.0


def weighed(weight):
    """An answer to q2 in which the sample of rank r has `weight(r, k, n)`."""

    def share(right, score, k):
        n = right.shape[1]
        return (right.gather(1, score.argsort(1)) * torch.tensor([weight(r, k, n) for r in range(n)])).sum(1).mean()

    return share


WRONG = {
    "q1": {
        "the first line": (searched(rf"^#### +({NUMBER}) *$", 0), "No, wait"),
        "any number": searched(rf"({NUMBER})"),
        "something behind": searched(rf"^#### +({NUMBER})"),
        "something before": searched(rf"#### +({NUMBER}) *$"),
        "no space": searched(rf"^#### *({NUMBER}) *$"),
        "no minus": searched(r"^#### +-?([0-9,.]*[0-9]) *$"),
        "no commas": searched(r"^#### +(-?[0-9]+(?:\.[0-9]+)?) *$"),
        "no decimals": searched(r"^#### +(-?[0-9,]*[0-9])(?:\.[0-9]+)? *$"),
        "commas anywhere": searched(r"^#### +(-?[0-9][0-9,]*(?:\.[0-9]+)?) *$"),
        "the next line": searched(rf"^####\s+({NUMBER}) *$"),
        "a plus": searched(rf"^#### +\+?({NUMBER}) *$"),
        "no digit before the point": searched(rf"^#### +({NUMBER}|-?\.[0-9]+) *$"),
        "a long first group": searched(r"^#### +(-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?) *$"),
        "integers as text": (solved("nb00", "q1", lambda found: f"{found}!"), "return a float"),
    },
    "q2": {
        "the first k": (lambda right, score, k: best(right[:, :k], score[:, :k]), "first k"),
        "all n": (lambda right, score, k: best(right, score), "best of all"),
        "float factorials": weighed(lambda r, k, n: floating(r, k - 1) * k / floating(n, k)),
        "one rank too many": weighed(lambda r, k, n: math.comb(r + 1, k - 1) / math.comb(n, k)),
    },
    "q3": {"equal shares": lambda before, after: (after.prod() - before.prod()).expand(len(before)) / len(before)},
}
