"""q8: a layout without bank conflicts."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question

BANKS = 32
q8 = Question(
    "q8", "place", hint="Leave each element in its row: which column goes where, and what does that depend on?"
)
ACCESSES = {  # name: which of 32 accesses an element belongs to, from its row and column
    "row": lambda row, column: row,
    "column": lambda row, column: column,
    "sub-tile of 4 x 8": lambda row, column: row // 4 * 4 + column // 8,
}


def check_place(f, access: str) -> None:
    """All words of the tile are used, each once, and the 32 elements of each access lie in 32 banks."""
    element = torch.randperm(BANKS * BANKS)
    row, column = element // BANKS, element % BANKS
    word = f(row, column)
    if not isinstance(word, Tensor) or word.shape != row.shape or word.dtype.is_floating_point:
        raise AssertionError("place must return a whole number for each element, in a tensor of the shape of row")
    if not bool(((word >= 0) & (word < BANKS * BANKS)).all()):
        at = int(((word < 0) | (word >= BANKS * BANKS)).nonzero()[0])
        raise AssertionError(
            f"({row[at]}, {column[at]}) goes to word {word[at]}, and the tile has {BANKS * BANKS}: there is no room to "
            "pad rows."
        )
    order = word.argsort()
    if bool((word[order].diff() == 0).any()):
        at = int((word[order].diff() == 0).nonzero()[0])
        one, two = order[at], order[at + 1]
        raise AssertionError(
            f"({row[one]}, {column[one]}) and ({row[two]}, {column[two]}) both go to word {word[one]}."
        )
    banks = [set() for _ in range(BANKS)]
    for which, bank in zip(ACCESSES[access](row, column).tolist(), (word % BANKS).tolist(), strict=True):
        banks[which].add(bank)
    fewest = min(range(BANKS), key=lambda which: len(banks[which]))
    if len(banks[fewest]) < BANKS:
        raise AssertionError(
            f"The 32 elements of {access} number {fewest} lie in {len(banks[fewest])} banks: a warp takes "
            f"{-(-BANKS // len(banks[fewest]))} or more turns for them."
        )


@q8.case("a warp takes a row")
def _(f):
    check_place(f, "row")


@q8.case("a warp takes a column")
def _(f):
    check_place(f, "column")


@q8.case("a warp takes a sub-tile of 4 x 8")
def _(f):
    check_place(f, "sub-tile of 4 x 8")
