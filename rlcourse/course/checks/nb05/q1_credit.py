"""q1: how kind a verifier may be."""

import math

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare

q1 = Question("q1", "largest_credit", hint="What does an answer that works earn on average, and one that guesses?")


def pay(right: float, readable: float, credit: float) -> float:
    """What a way of answering earns on average."""
    return right * 1.0 + (readable - right) * credit


def by_bisection(right_worked: float, readable_worked: float, right_guessed: float, readable_guessed: float) -> Tensor:
    """The largest credit up to 1 at which working still earns at least as much."""
    low, high = 0.0, 1.0

    def works(credit: float) -> bool:
        return pay(right_worked, readable_worked, credit) >= pay(right_guessed, readable_guessed, credit)

    if works(1.0):
        return torch.tensor(1.0, dtype=torch.float64)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return torch.tensor(low, dtype=torch.float64)


def check_credit(f, right_worked: float, readable_worked: float, right_guessed: float, readable_guessed: float) -> None:
    shares = right_worked, readable_worked, right_guessed, readable_guessed
    ahead, read_more = right_worked - right_guessed, readable_guessed - readable_worked
    steeper = (readable_guessed - right_guessed) - (readable_worked - right_worked)

    def over(below: float) -> float:
        return ahead / below if below else math.inf

    mistakes = {
        "A right answer earns 1 and no credit on top: the credit is for wrong answers that can be read.": over(
            read_more
        ),
        "A credit is at most 1: where working pays at any credit, the answer is 1.": over(steeper),
        "It is the other way up: what working is ahead stands above the line.": steeper / ahead,
        "That is how far working is ahead at credit 0: how much faster does guessing gain as the credit grows?": ahead,
        "Some of the guesses that can be read are right: take them off before you count the credits.": over(
            readable_guessed - (readable_worked - right_worked)
        ),
        "Some of the worked answers are wrong and can be read: they earn the credit, too.": over(
            readable_guessed - right_guessed
        ),
        "That is 1 less the largest credit.": 1 - over(steeper),
    }
    tensors = {sentence: torch.tensor(float(value), dtype=torch.float64) for sentence, value in mistakes.items()}
    compare(f(*shares), by_bisection(*shares), tensors, what="the credit")


def share(low: float, high: float) -> float:
    """A number from low to high, of three decimals."""
    return round(low + (high - low) * torch.rand(()).item(), 3)


@q1.case("working is right more often, guessing is read more often")
def _(f):
    for _ in range(3):
        right = share(0.3, 0.6)
        check_credit(f, right, right + share(0.02, 0.2), share(0.01, 0.15), share(0.9, 1.0))


@q1.case("guessing is hardly ever right")
def _(f):
    right = share(0.05, 0.1)
    check_credit(f, right, right + share(0.1, 0.3), 0.0, share(0.95, 1.0))


@q1.case("working is read as often: no credit is too much")
def _(f):
    check_credit(f, share(0.5, 0.8), share(0.9, 1.0), share(0.01, 0.1), share(0.5, 0.8))
    right = share(0.3, 0.6)
    check_credit(f, right, right + 0.05, share(0.01, 0.1), share(0.9, 1.0))


@q1.case("most of the worked answers are read and wrong: working gains faster, and the lines never cross")
def _(f):
    check_credit(f, share(0.3, 0.4), share(0.95, 1.0), share(0.01, 0.1), share(0.4, 0.5))
    right = share(0.3, 0.6)
    check_credit(f, right, right + 0.05, share(0.01, 0.1), share(0.9, 1.0))
