"""What the checks of several lessons share: inputs drawn from the seed, losses with mistakes, and readable results."""

import functools
import itertools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Names = tuple[str, ...]  # the mistakes in a function


def lengths_mask(lengths: list[int], width: int) -> Tensor:
    """Of answers of these lengths: bool [rows, width]."""
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def ragged_mask(rows: int, width: int) -> Tensor:
    """Of answers of different lengths, the first of one token and the last full: bool [rows, width]."""
    return lengths_mask([1, *torch.randint(2, width, (rows - 2,)).tolist(), width], width)


def drawn_until(fits: Callable[..., bool], make: Callable[[], tuple], tries: int = 300) -> tuple:
    """Inputs of `make()` for which `fits(*inputs)`, or the last ones tried."""
    for _ in range(tries):
        inputs = make()
        if fits(*inputs):
            break
    return inputs


def whole_number(found, low: int, high: int) -> int:
    """A result as an int from `low` to `high`. Raises AssertionError for anything else."""
    assert found is not None, "the result is None: does every path return a number?"
    if isinstance(found, Tensor) and found.numel() == 1:
        found = found.item()
    if isinstance(found, bool) or not isinstance(found, int | float) or not low <= found <= high or found % 1:
        raise AssertionError(f"the result is {found!r:.40}: return a whole number from {low} to {high}")
    return int(found)


def left_in(function: Callable, planted: Mapping[str, str]) -> dict[str, Callable]:
    """`function` with every choice of the planted mistakes, by what a card says of it."""
    found = {}
    for count in range(1, len(planted) + 1):
        left = "A mistake is left" if count == 1 else f"{count} mistakes are left, one of them"
        for names in itertools.combinations(planted, count):
            found[f"{left}: {planted[names[0]]} ({', '.join(names)})."] = functools.partial(function, wrong=names)
    return found


def pick(wrong: Names, options: Mapping, right):
    """The option of the first of the mistakes that has one, else what is right."""
    return next((options[name] for name in wrong if name in options), right)
