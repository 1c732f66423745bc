"""What the checks of several lessons share: inputs drawn from the seed, losses with mistakes, and readable results."""

import itertools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rlcourse.course.calls import gradient
from rlcourse.course.checks import compare

Names = tuple[str, ...]  # the mistakes in a function


def lengths_mask(lengths: list[int], width: int) -> Tensor:
    """Mask of answers of these lengths: bool [rows, width]."""
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def ragged_mask(rows: int, width: int) -> Tensor:
    """Mask of answers of different lengths, the first of one token and the last full: bool [rows, width]."""
    return lengths_mask([1, *torch.randint(2, width, (rows - 2,)).tolist(), width], width)


def drawn_until(fits: Callable[..., bool], make: Callable[[], tuple], tries: int = 300) -> tuple:
    """Inputs of `make()` for which `fits(*inputs)`, or the last ones tried."""
    for _ in range(tries):
        inputs = make()
        if fits(*inputs):
            break
    return inputs


def whole_number(found, low: int, high: int, said: str) -> int:
    """A result as an int from `low` to `high`. Raises AssertionError(said) for anything else."""
    if found is None:
        raise AssertionError("the result is None: does every path return a number?")
    if isinstance(found, Tensor) and found.numel() == 1:
        found = found.item()
    if isinstance(found, bool) or not isinstance(found, int | float) or not low <= found <= high or found % 1:
        raise AssertionError(f"the result is {found!r:.40}: {said}")
    return int(found)


def sentences(planted: Mapping[str, str], others: Mapping[str, str]) -> dict[Names, str]:
    """What a card says of a function with mistakes, by their names: every choice of planted ones, and each other."""
    found = {}
    for count in range(1, len(planted) + 1):
        left = "A mistake is left" if count == 1 else f"{count} mistakes are left, one of them"
        for names in itertools.combinations(planted, count):
            found[names] = f"{left}: {planted[names[0]]} ({', '.join(names)})."
    return found | {(name,): said for name, said in others.items()}


def pick(wrong: Names, options: Mapping, right):
    """The option of the first of the mistakes that has one, else what is right."""
    return next((options[name] for name in wrong if name in options), right)


def compare_named(
    f, right: Callable, given: tuple, said: Mapping[str, str], what: str = "the result", also: Mapping = {}, **options
) -> None:
    """Compare f(*given) with right(*given), and with right(*given, mistake) for each mistake that `said` names.

    also: results of other mistakes, by sentence; options: those of `compare`.
    """
    mistakes = {sentence: right(*given, mistake) for mistake, sentence in said.items()}
    compare(f(*given), right(*given), {**mistakes, **also}, what, **options)


def compare_loss(
    f, arguments: tuple, loss: Callable, said: Mapping[Names, str], parts: Mapping[str, int | None], **options
) -> None:
    """Compare value and gradients of a loss with those of another implementation, and with its mistakes.

    loss: takes `arguments` and `wrong`, the mistakes in it, and can be differentiated; said: what names them;
    parts: {what is compared: number of the argument of a gradient, None for the value}.
    """
    for what, place in parts.items():

        def part_of(wrong: Names, place=place) -> Tensor:
            if place is None:
                return loss(*arguments, wrong=wrong).detach()
            return gradient(loss, *arguments, wrt=place, wrong=wrong)

        found = f(*arguments) if place is None else f.gradient(*arguments, wrt=place)
        mistakes = {sentence: part_of(wrong) for wrong, sentence in said.items()}
        compare(found, part_of(()), mistakes, what, atol=1e-6, **options)
