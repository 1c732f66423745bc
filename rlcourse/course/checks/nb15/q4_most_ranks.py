"""q4: how far one batch can be split."""

from fractions import Fraction

import torch

from rlcourse.course.checks import Question, compare, draw

q4 = Question(
    "q4", "most_ranks", hint="How long does a step take on P ranks, and how long would it take without a loss?"
)

MISTAKES = {
    "equal work": "You leave every rank all rows: here the rows are split.",
    "one way": "A ring goes round twice: once to add, once to copy.",
    "all bytes": "Each rank sends 2 (P - 1) / P of the gradient, not all of it twice.",
    "divisors": "The number of ranks has to divide the rows.",
    "first": "Look at all numbers of ranks: the largest that is good enough is asked for.",
    "no start": "The seconds that every step takes, however few its rows, do not get shorter.",
}


def most(rows, start_s, row_s, gradient_bytes, bytes_per_s, least, mistake: str = "") -> int:
    """By trying all, without rounding."""
    start, row, least = Fraction(start_s), Fraction(row_s), Fraction(least)
    ring = Fraction(gradient_bytes) / Fraction(bytes_per_s)
    good = []
    for n in range(1, rows + 1):
        if rows % n and mistake != "divisors":
            continue
        mine = rows if mistake == "equal work" else Fraction(rows, n)
        begin = start / n if mistake == "no start" else start
        share = {"one way": Fraction(n - 1, n), "all bytes": Fraction(2 if n > 1 else 0)}
        seconds = begin + row * mine + ring * share.get(mistake, Fraction(2 * (n - 1), n))
        wasted = seconds * (1 if mistake == "equal work" else n)
        if start + row * rows >= least * wasted:
            good.append(n)
        elif mistake == "first":
            break
    if mistake == "first":
        return good[1] if len(good) > 1 else good[0]
    return max(good)


def check_most(f, rows: int, start_s: float, row_s: float, gradient: int, bytes_per_s: float, least: float) -> None:
    given = (rows, start_s, row_s, gradient, bytes_per_s, least)
    mistakes = {sentence: torch.tensor(most(*given, mistake)) for mistake, sentence in MISTAKES.items()}
    compare(f(*given), torch.tensor(most(*given)), mistakes, what="the number of ranks")


def between(low: float, high: float) -> float:
    return low + (high - low) * torch.rand((), dtype=torch.float64).item()


def edge(rows: int, start_s: float, row_s: float, gradient: int, bytes_per_s: float, ranks: int, above: float) -> float:
    """An efficiency a little above or below that of `ranks` ranks."""
    seconds = start_s + row_s * rows / ranks + 2 * (ranks - 1) / ranks * gradient / bytes_per_s
    return (start_s + row_s * rows) / (ranks * seconds) * above


@q4.case("communication that is nearly free")
def _(f):
    for ranks in (2 ** draw(1, 2), 2 ** draw(3, 5)):
        given = (64, between(0.05, 0.2), between(0.002, 0.01), 10**6, 1e12)
        check_most(f, *given, edge(*given, ranks, 0.98))


@q4.case("no seconds that every step takes")
def _(f):
    for ranks in (2 ** draw(1, 2), 2 ** draw(3, 4)):
        given = (128, 0.0, between(0.002, 0.01), draw(10**8, 10**9), between(2e10, 5e10))
        check_most(f, *given, edge(*given, ranks, 0.99))


@q4.case("both, and rows that many numbers divide")
def _(f):
    for rows in (96, 120, 180):
        given = (rows, between(0.05, 0.2), between(0.002, 0.01), draw(10**8, 10**9), between(1e10, 5e10))
        for ranks in (4, 6, 12):
            check_most(f, *given, edge(*given, ranks, between(0.9, 0.99)))


@q4.case("a bar that two ranks do not reach")
def _(f):
    given = (6 * draw(4, 9), between(0.5, 0.9), between(0.002, 0.01), draw(10**8, 10**9), between(1e10, 5e10))
    check_most(f, *given, edge(*given, 2, 1.01))
    check_most(f, *given, edge(*given, 3, 0.99))
