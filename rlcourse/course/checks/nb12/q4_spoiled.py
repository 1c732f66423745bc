"""q4: what leaks in a packed row."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw

q4 = Question("q4", "spoiled", hint="Whose token is it? Then one layer after the other; then: who predicts token t?")


def walk(positions, seen, learned, layers: int, mistake: str = "") -> Tensor:
    """Which log-probs are spoiled, token by token and layer by layer."""
    starts = [i for i, position in enumerate(positions.tolist()) if position == 0]
    owner = [sum(start <= i for start in starts) for i in range(len(positions))]
    looks = (seen.T if mistake == "turned" else seen).tolist()
    bad = [False] * len(owner)
    for _ in range({"one layer": 1, "for ever": len(owner)}.get(mistake, layers)):
        before = list(bad)
        for i in range(len(owner)):
            for j in range(len(owner)):
                if looks[i][j] and (owner[i] != owner[j] or before[j]):
                    bad[i] = True
    result = []
    for t in range(len(owner)):
        if t == 0:
            found = False
        elif mistake == "no shift":
            found = bad[t]
        else:
            found = bad[t - 1] or (owner[t - 1] != owner[t] and mistake != "first tokens")
        result.append(found and (bool(learned[t]) or mistake == "not learned"))
    if mistake == "all of it":
        hit = {owner[t] for t in range(len(owner)) if result[t]}
        result = [owner[t] in hit and bool(learned[t]) for t in range(len(owner))]
    return torch.tensor(result)


MISTAKES = {
    "one layer": "What a token has seen in one layer others see in the next.",
    "for ever": "There are only so many layers: what needs more to get there does not arrive.",
    "no shift": "The log-prob of token t is read where token t - 1 stands.",
    "first tokens": "The first token of an answer is predicted by the last token of another.",
    "not learned": "Tokens that are not learned have no log-prob to be spoiled.",
    "turned": "seen[i, j] says that i sees j, not the other way round.",
    "all of it": "Not all of an answer is spoiled with one of its tokens.",
}


def some_row(window: int, leaks: int) -> tuple[Tensor, Tensor, Tensor]:
    """positions, seen and learned of a row of three to four answers; each token sees `window` before it, of its own."""
    sizes = [draw(4, 7) for _ in range(draw(3, 4))]
    positions = torch.cat([torch.arange(n) for n in sizes])
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    place = torch.arange(len(owner))
    back = place[:, None] - place
    seen = (owner[:, None] == owner) & (back >= 0) & (back <= window)
    for _ in range(leaks):
        i = draw(sizes[0], len(owner) - 1)
        j = draw(0, i - positions[i].item() - 1)
        seen[i, j] = True
    return positions, seen, (torch.rand(len(owner)) < 0.8) & (place > 0)


def check_row(f, window: int, leaks: int, layers: int) -> None:
    for _ in range(4):
        row = some_row(window, leaks)
        mistakes = {said: walk(*row, layers, mistake) for mistake, said in MISTAKES.items()}
        compare(f(*row, layers), walk(*row, layers), mistakes)


@q4.case("nothing leaks through attention")
def _(f):
    check_row(f, draw(2, 9), 0, 3)


@q4.case("one layer")
def _(f):
    check_row(f, draw(1, 3), draw(2, 4), 1)


@q4.case("from layer to layer")
def _(f):
    check_row(f, 1, draw(1, 3), draw(2, 3))


@q4.case("many layers")
def _(f):
    check_row(f, draw(1, 3), draw(1, 2), draw(4, 8))
