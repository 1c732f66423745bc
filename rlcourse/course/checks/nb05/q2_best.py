"""q2: the best of several checkpoints."""

import itertools
import math

import torch

from rlcourse.course.checks import Question, compare, draw
from rlcourse.course.checks.nb05.q1_credit import share

q2 = Question("q2", "overstated", hint="When is the best of k scores at most c? When all of them are.")


def chances(p: float, n: int) -> list[float]:
    """The chance of each number of right answers, 0 to n."""
    return [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]


def best_by_pairs(p: float, n: int, k: int) -> float:
    """The mean of the best of k counts, by taking one more checkpoint at a time."""
    one = chances(p, n)
    best = one
    for _ in range(k - 1):
        both = [0.0] * (n + 1)
        for a, b in itertools.product(range(n + 1), repeat=2):
            both[max(a, b)] += best[a] * one[b]
        best = both
    return sum(c * chance for c, chance in enumerate(best))


def check_best(f, p: float, n: int, k: int) -> None:
    mean, se = best_by_pairs(p, n, k), math.sqrt(p * (1 - p) / n)
    lowest = n - best_by_pairs(1 - p, n, k)
    mistakes = {
        "That is the best measured accuracy itself: take the true one off.": mean / n,
        "That is a number of problems: divide by how many there are.": mean - n * p,
        "That is one standard error of one accuracy: how far the best lies out depends on how many there are.": se,
        "That is the worst of them: the best is at most 60 when each is at most 60.": lowest / n - p,
        "That is how far the worst of them lies below.": p - lowest / n,
        "That is a standard error for each checkpoint: the best of ten does not lie ten times as far out.": k * se,
        "That is half an interval of 95 %, however many there are to choose from.": 1.96 * se,
    }
    tensors = {sentence: torch.tensor(value, dtype=torch.float64) for sentence, value in mistakes.items()}
    found = f(p, n, k)
    compare(found, torch.tensor(mean / n - p, dtype=torch.float64), tensors, "the overstatement", atol=2e-5)


@q2.case("two and three checkpoints, few problems")
def _(f):
    for k in (2, 3):
        check_best(f, share(0.2, 0.8), draw(4, 9), k)


@q2.case("one checkpoint is not overstated")
def _(f):
    p, n = share(0.2, 0.8), draw(5, 20)
    check_best(f, p, n, 1)
    check_best(f, p, n, draw(4, 6))


@q2.case("one problem: the best is right unless all are wrong")
def _(f):
    for k in (2, draw(5, 9)):
        p = share(0.1, 0.9)
        compare(f(p, 1, k), torch.tensor(1 - (1 - p) ** k - p, dtype=torch.float64), what="the overstatement with n 1")


@q2.case("ten checkpoints, a hundred problems")
def _(f):
    check_best(f, share(0.3, 0.9), draw(90, 110), 10)
