"""q2: how many rows are free."""

import math

import torch
from torch import Tensor

from rlcourse.course.checks import Question, draw

q2 = Question("q2", "free_rows", hint="How long does one row take, how long may the step take, and which times grow?")


def three_times(n: int, weights, cache, element, launches, host, copy, compute) -> tuple[float, float, float]:
    """Seconds of host, bytes and operations of a step of n rows."""
    return launches * host, (element * weights + cache * n) / copy, 2 * weights * n / compute


def most_rows(fits) -> float:
    """The largest n for which `fits(n)`, by doubling and then halving the step; inf if there is none below 2^40."""
    if not fits(1):
        return 0.0
    step = 1
    while fits(1 + 2 * step):
        step *= 2
        if step > 2**40:
            return math.inf
    n = 1
    while step:
        if fits(n + step):
            n += step
        else:
            step //= 2
    return float(n)


def free(numbers: tuple, slack: float, first=max, later=max) -> float:
    """The most rows whose `later` of the three times is within slack of the `first` of those of one row."""
    limit = slack * first(three_times(1, *numbers)) * (1 + 1e-12)
    return most_rows(lambda n: later(three_times(n, *numbers)) <= limit)


def free_mistakes(numbers: tuple, slack: float) -> dict[str, float]:
    weights, cache, element, _, host, copy, compute = numbers
    right = free(numbers, slack)
    no_host = (weights, cache, element, 0, host, copy, compute)
    limit = slack * max(three_times(1, *numbers))
    by_bytes = (limit * copy - element * weights) / cache if cache else math.inf
    by_flops = limit * compute / (2 * weights)
    return {
        "You left out the host: one row takes as long as its launches, if that is the longest.": free(no_host, slack),
        "One row needs its operations, too: the longest of three times counts.": free(
            numbers, slack, first=lambda t: max(t[:2])
        ),
        "You looked at bytes alone: operations grow with the rows, two for each weight and row.": most_rows(
            lambda n: n <= by_bytes
        ),
        "You looked at operations alone: each row has a cache of its own to read.": most_rows(lambda n: n <= by_flops),
        "A weight costs two operations a row: a multiplication and an addition.": most_rows(
            lambda n: n <= min(by_bytes, 2 * by_flops)
        ),
        "Weights are numbers: multiply by element_bytes.": free((weights, cache, 1, *numbers[3:]), slack),
        "You added the times up: all three go on at once, and the longest counts.": free(numbers, slack, sum, sum),
        "A step reads the weights once, not once for each row.": most_rows(
            lambda n: n * (element * weights + cache) / copy <= limit and n <= by_flops
        ),
        "The limit is slack times the longest time, not slack times the rows.": float(int(slack)),
        "Rounded up, the step takes longer than it may: round down.": right + 1,
        "You left the slack out: the step may take slack times as long.": free(numbers, 1.0),
    }


def check_free(f, numbers: tuple, slack: float) -> None:
    found = f(*numbers, slack)
    if isinstance(found, Tensor) and found.numel() == 1:
        found = found.item()
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise AssertionError(f"return a whole number, not {type(found).__name__}.")
    mistakes = {said: torch.tensor(v, dtype=torch.float64) for said, v in free_mistakes(numbers, slack).items()}
    expected = torch.tensor(free(numbers, slack), dtype=torch.float64)
    found = torch.tensor(float(found), dtype=torch.float64)
    for said, wrong in mistakes.items():
        if found == wrong != expected:
            raise AssertionError(said)
    if found != expected:
        raise AssertionError(f"the number of rows is {found.item():,.10g}, expected {expected.item():,.0f}")


def some(low: float, high: float) -> float:
    return low + (high - low) * torch.rand((), dtype=torch.float64).item()


def half_a_billion(cache: float, launches: int, host: float) -> tuple:
    return (some(4e8, 6e8), cache, 2, launches, host, some(3.5e12, 4.5e12), some(7e14, 9e14))


@q2.case("a slow host before a fast machine: one row takes as long as its launches")
def _(f):
    check_free(f, half_a_billion(some(1e6, 2e6), draw(900, 1300), 8e-6), some(1.05, 1.4))
    check_free(f, half_a_billion(some(9e6, 2e7), draw(900, 1300), 8e-6), some(1.05, 1.4))


@q2.case("one launch: long caches")
def _(f):
    check_free(f, half_a_billion(some(4e6, 6e6), 1, 2e-5), some(1.2, 1.8))


@q2.case("one launch: no cache yet")
def _(f):
    check_free(f, half_a_billion(0.0, 1, 2e-5), some(1.05, 1.5))


@q2.case("a slow processor in float32")
def _(f):
    check_free(
        f, (some(9e5, 1e6), some(2e4, 4e4), 4, 1, 2e-5, some(1.5e10, 2.5e10), some(8e10, 1.2e11)), some(2.5, 4.0)
    )


@q2.case("a machine whose arithmetic is so slow that one row takes its operations")
def _(f):
    check_free(f, (some(1e8, 2e8), some(1e4, 1e5), 2, 1, 1e-5, some(9e11, 1e12), some(4e11, 6e11)), some(3.2, 7.8))
