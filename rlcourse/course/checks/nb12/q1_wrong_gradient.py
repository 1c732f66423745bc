"""q1: one wrong gradient among three."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw

q1 = Question("q1", "wrong_gradient", hint="A right gradient fits at some step; a wrong one at none.")

STEPS = torch.tensor([10.0**-k for k in range(8)], dtype=torch.float64)
NUMBERS = 6  # that each function takes


def values(frequency: Tensor, phase: Tensor, x: Tensor) -> Tensor:
    """Of points x [..., n]: a function whose gradient is known."""
    return (frequency * x + phase).sin().sum(-1) + 0.5 * x.prod(-1)


def table(scales: list[float], offset: list[float], curved: list[float]) -> tuple[Tensor, ...]:
    """(plus, minus, claims, place) of three functions, in random order: how large each is, what is added to it in that
    measure, how curved it is. The claim at `place` is wrong in one number."""
    place, shape, order = draw(0, 2), (3, NUMBERS), torch.randperm(3)
    scale, added, bend = (torch.tensor(each).double()[order] for each in (scales, offset, curved))
    frequency = bend[:, None] * (0.5 + torch.rand(shape)).double()
    phase, x = (6.28 * torch.rand(shape)).double(), (0.6 + 0.8 * torch.rand(shape)).double()
    gradient = frequency * (frequency * x + phase).cos() + 0.5 * x.prod(-1, keepdim=True) / x
    moves = STEPS[:, None, None] * torch.eye(NUMBERS).double()  # [S, n, n]
    sides = [
        torch.stack([scale[k] * (values(frequency[k], phase[k], x[k] + side * moves) + added[k]) for k in range(3)])
        for side in (1, -1)
    ]
    claims = gradient * scale[:, None]
    size = claims[place].abs().max() * (0.06 + 0.04 * torch.rand(()))
    claims[place, draw(0, NUMBERS - 1)] += size * (2 * draw(0, 1) - 1)
    return sides[0].float(), sides[1].float(), claims.float(), torch.tensor(place)


def errors(plus: Tensor, minus: Tensor, claims: Tensor, relative: bool = True) -> Tensor:
    """How far each claim is from central differences, its worst number: [3, S]."""
    slopes = (plus.double() - minus.double()) / (2 * STEPS[:, None])
    apart = (slopes - claims.double()[:, None]).abs().amax(-1)
    return apart / claims.double().abs().amax(-1)[:, None] if relative else apart


def check_tables(f, scales: list[float], offset: list[float], curved: list[float], count: int = 8) -> None:
    """So many tables at once: one alone leaves too few answers to tell one mistake from another."""
    tables = [table(scales, offset, curved) for _ in range(count)]
    results = [f(STEPS, *given) for *given, _ in tables]
    if any(result is None for result in results):
        raise AssertionError("the result is None: is there a `return`?")
    off = [errors(*given) for *given, _ in tables]
    absolute = [errors(*given, relative=False) for *given, _ in tables]
    mistakes = {
        "At the smallest step rounding is all that is left.": torch.stack([e[:, -1].argmax() for e in off]),
        "At the largest step you see curvature, not a mistake.": torch.stack([e[:, 0].argmax() for e in off]),
        "Their sizes differ: ask how wrong a gradient is for its size.": torch.stack(
            [e.amin(1).argmax() for e in absolute]
        ),
        "That one is right: it fits best.": torch.stack([e.amin(1).argmin() for e in off]),
        "Differences of all steps in one mean are those of the worst step.": torch.stack(
            [e.mean(1).argmax() for e in off]
        ),
    }
    for k in range(1, len(STEPS) - 1):
        said = f"No one step tells for all three: that is what a step of {STEPS[k]:g} says."
        mistakes[said] = torch.stack([e[:, k].argmax() for e in off])
    found = torch.stack([torch.as_tensor(result) for result in results])
    compare(found, torch.stack([place for *_, place in tables]), mistakes, what=f"the place, for {count} tables,")


@q1.case("three functions of one size")
def _(f):
    check_tables(f, [1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0])


@q1.case("sizes that differ")
def _(f):
    check_tables(f, [0.01, 1.0, 100.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0])


@q1.case("functions that are much curved")
def _(f):
    check_tables(f, [1.0, 2.0, 4.0], [0.0, 0.0, 0.0], [6.0, 6.0, 6.0])


@q1.case("values far from zero")
def _(f):
    check_tables(f, [1.0, 3.0, 9.0], [60.0, 60.0, 60.0], [0.7, 0.7, 0.7])


@q1.case("one much curved, one far from zero: each needs a step of its own")
def _(f):
    check_tables(f, [1.0, 1.0, 1.0], [0.0, 1000.0, 0.0], [600.0, 0.7, 1.0], count=16)
