"""q5: how many steps a bf16 weight needs before it moves."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw

q5 = Question(
    "q5", "steps_to_move", hint="Where is the next number in the direction of the step, and how far half-way?"
)
UNIT = 2.0**-22  # steps are multiples: then w + k step is exact in float32


def least(weights: Tensor, step: float) -> Tensor:
    """Each by bisection: the sum, exact, is rounded as a processor does it."""

    def moves(weight: float, count: int) -> bool:
        return torch.tensor(weight + count * step, dtype=torch.float32).bfloat16().item() != weight

    found = []
    for weight in weights.tolist():
        low, high = 0, 1
        while not moves(weight, high):
            high *= 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if moves(weight, middle) else (middle, high)
        found.append(high)
    return torch.tensor(found)


def gaps(weights: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """(distance to the next bf16 number in the step's direction, that away from zero), float64."""
    bits = weights.view(torch.int16)
    outwards = (bits + 1).view(torch.bfloat16).double() - weights.double()
    inwards = weights.double() - (bits - 1).view(torch.bfloat16).double()
    return torch.where(weights.double().sign() * step > 0, outwards, inwards).abs(), outwards.abs()


def check_steps(f, weights: Tensor, *steps: int) -> None:
    for units in steps:
        step = units * UNIT
        gap, outer = gaps(weights, step)
        size = abs(step)
        even = weights.view(torch.int16) % 2 == 0
        mistakes = {
            "That is the whole way to the next number: half of it is enough, and then it is rounded there.": (
                gap / size
            )
            .ceil()
            .long(),
            "Half-way is a tie, and a tie goes to the number that is even: sometimes that is the weight itself.": (
                gap / 2 / size
            )
            .ceil()
            .long(),
            "On a tie an odd number gives way: it goes to its even neighbour.": (gap / 2 / size).floor().long() + 1,
            "Below a power of two numbers are twice as dense as above it: mind the direction.": torch.where(
                even, (outer / 2 / size).floor() + 1, (outer / 2 / size).ceil()
            ).long(),
            "bf16 has 8 bits of precision, float16 has 11.": (gap / 16 / size).ceil().long(),
        }
        compare(f(weights, step), least(weights, step), mistakes)


def some(low: float, high: float, count: int = 9) -> Tensor:
    """bf16 weights of both signs, none of them a power of two."""
    sizes = (low + (high - low) * torch.rand(count)).bfloat16()
    powers = sizes.float().log2() == sizes.float().log2().round()
    sizes = (sizes.view(torch.int16) + powers.to(torch.int16)).view(torch.bfloat16)
    return sizes * (2 * torch.randint(0, 2, (count,)) - 1).bfloat16()


@q5.case("weights of the usual size")
def _(f):
    check_steps(f, some(0.004, 0.1), draw(1, 3) * 2 + 1, -draw(2, 5) * 2 - 1)


@q5.case("large weights")
def _(f):
    check_steps(f, some(0.5, 1.9), draw(2, 6) * 2 + 1, -draw(2, 6) * 2 - 1)


@q5.case("half-way exactly")
def _(f):
    check_steps(f, some(0.01, 0.2), 2 ** draw(0, 3), -(2 ** draw(0, 3)))


@q5.case("powers of two")
def _(f):
    weights = torch.tensor([2.0 ** -draw(1, 7) * (2 * draw(0, 1) - 1) for _ in range(6)]).bfloat16()
    check_steps(f, weights, draw(1, 3) * 2 + 1, -draw(1, 3) * 2 - 1)
