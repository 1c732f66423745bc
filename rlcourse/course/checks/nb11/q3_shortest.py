"""q3: the request that a scheduler never finishes."""

import torch

from rlcourse.course.checks import Question, compare, draw

q3 = Question("q3", "shortest", hint="Write one step of her rule first. When is it sure that it goes on for ever?")

MOST, FEWEST, YOUNGEST = "most", "fewest", "youngest"


def ends(capacity: int, rows: int, length: int, rule: str = MOST) -> bool:
    """Whether some answer ends: if a state comes back before, none ever does. rule: who is sent back."""
    held: dict[int, int] = {}  # tokens of those that run
    seen = set()
    while True:
        for row in range(rows):
            if row not in held and sum(held.values()) + len(held) + 1 <= capacity:
                held[row] = 0
        while sum(held.values()) + len(held) > capacity:
            order = sorted(held, key=lambda row: (held[row], -row))
            held.pop({MOST: order[-1], FEWEST: order[0], YOUNGEST: max(held)}[rule])
        held = {row: tokens + 1 for row, tokens in held.items()}
        if length in held.values():
            return True
        state = tuple(sorted(held.items()))
        if state in seen:
            return False
        seen.add(state)


def least(capacity: int, rows: int, rule: str = MOST) -> int:
    """The smallest length at which no answer ends; capacity + 1 if one always does."""
    return next((n for n in range(1, capacity + 1) if not ends(capacity, rows, n, rule)), capacity + 1)


def check_shortest(f, low: int, high: int, *rows: int) -> None:
    for count in rows:
        capacity = draw(low, high)
        while least(capacity, count) > capacity:
            capacity += 1
        mistakes = {
            "An answer of that length fits alone, but so does a shorter one that never ends.": torch.tensor(capacity),
            "That is the first length at which somebody is sent back. It ends all the same.": torch.tensor(
                capacity // count + 1
            ),
            "That is the greatest length at which one still ends: one more.": torch.tensor(least(capacity, count) - 1),
            "The one that holds most is sent back: you send back one that holds less.": torch.tensor(
                least(capacity, count, FEWEST)
            ),
            "Three quarters is near, but it depends on how the steps fall: run it.": torch.tensor(3 * capacity // 4),
        }
        compare(f(capacity, count), torch.tensor(least(capacity, count)), mistakes)


@q3.case("two answers, little room")
def _(f):
    check_shortest(f, 8, 20, 2, 2, 2)


@q3.case("two answers, more room")
def _(f):
    check_shortest(f, 21, 60, 2, 2, 2)


@q3.case("three answers")
def _(f):
    check_shortest(f, 12, 40, 3, 3, 3)


@q3.case("more of them")
def _(f):
    check_shortest(f, 20, 40, 4, 5, 4)
