"""q1: what several ranks did to their gradients."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw

q1 = Question("q1", "divided_by", hint="Which six vectors could a colleague have? Which of them is this one's?")

RIGHT, OWN_MEANS, NOT_AVERAGED, NOT_SENT, ROWS, TWICE = range(6)

MISTAKES = {
    "last": "Where two ways give the same vector, the lower number is asked for.",
    "direction": "You compare directions: a vector that is only too long or too short has a fault, too.",
    "rows for tokens": "You took rows where tokens are meant: the loss is a mean over tokens.",
    "ranks left out": "Own means are averaged over ranks, not added up.",
}


def vector(way: int, sums: Tensor, tokens: list[int], rows: list[int], mistake: str = "") -> Tensor:
    """What a colleague of that kind has: [d]. By a loop over ranks."""
    counted = rows if mistake == "rows for tokens" else tokens
    total, means = torch.zeros_like(sums[0]), torch.zeros_like(sums[0])
    for rank, own in enumerate(sums):
        total += own
        means += own / counted[rank]
    ranks = 1 if mistake == "ranks left out" else len(sums)
    return {
        RIGHT: total / sum(counted),
        OWN_MEANS: means / ranks,
        NOT_AVERAGED: means,
        NOT_SENT: sums[0] / counted[0],
        ROWS: total / sum(rows),
        TWICE: total / sum(counted) / len(sums),
    }[way]


def judged(sums: Tensor, tokens: list[int], rows: list[int], found: Tensor, mistake: str = "") -> Tensor:
    """The lowest number that fits, for each row of `found`."""
    numbers = []
    for one in found:
        fits = []
        for way in range(6):
            expected = vector(way, sums, tokens, rows, mistake)
            a, b = (one, expected) if mistake != "direction" else (one / one.norm(), expected / expected.norm())
            if (a - b).norm() < 1e-3 * b.norm():
                fits.append(way)
        numbers.append((fits[-1] if mistake == "last" else fits[0]) if fits else 0)
    return torch.tensor(numbers)


def check_colleagues(f, ranks: int, tokens: list[int], ways: list[int]) -> None:
    rows = torch.randperm(30)[:ranks].add(1).tolist()
    sums = torch.randn(ranks, 40, dtype=torch.float64) * 30
    # own means are right in the first number, which by itself does not tell
    sums[:, 0] = torch.tensor(tokens) * draw(20, 40) / max(tokens)
    found = torch.stack([vector(way, sums, tokens, rows) for way in ways])
    found = found * (1 + 1e-6 * torch.randn(found.shape, dtype=torch.float64))  # sums taken in another order
    expected = judged(sums, tokens, rows, found)
    mistakes = {sentence: judged(sums, tokens, rows, found, m) for m, sentence in MISTAKES.items()}
    compare(f(sums, torch.tensor(tokens), torch.tensor(rows), found), expected, mistakes, what="the list of faults")


def uneven(ranks: int) -> list[int]:
    return (100 + 20 * torch.randperm(40)[:ranks] + draw(0, 9)).tolist()


def shuffled(ways: list[int]) -> list[int]:
    return [ways[i] for i in torch.randperm(len(ways))]


@q1.case("own means, and nothing sent, on two ranks")
def _(f):
    check_colleagues(f, 2, uneven(2), shuffled([OWN_MEANS, RIGHT, NOT_SENT, OWN_MEANS]))


@q1.case("vectors of the wrong length")
def _(f):
    ranks = draw(3, 5)
    check_colleagues(f, ranks, uneven(ranks), shuffled([RIGHT, ROWS, TWICE, NOT_AVERAGED]))


@q1.case("all of them")
def _(f):
    ranks = draw(3, 6)
    check_colleagues(f, ranks, uneven(ranks), shuffled([*range(6), *range(6)]))


@q1.case("equally many tokens on each rank")
def _(f):
    ranks = draw(2, 4)
    check_colleagues(f, ranks, [draw(50, 90)] * ranks, shuffled([OWN_MEANS, NOT_AVERAGED, OWN_MEANS, TWICE]))
