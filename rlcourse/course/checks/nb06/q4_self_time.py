"""q4: self times of nested events."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare

q4 = Question(
    "q4", "self_times", hint="The parent of an event is the shortest one that holds it; take its time off there."
)


def own_times(starts: Tensor, ends: Tensor) -> Tensor:
    """Duration less that of the direct children; the parent is the shortest event that holds one: [events], float64."""
    starts, ends = starts.double(), ends.double()
    found = ends - starts
    for i in range(len(starts)):
        holding = (starts <= starts[i]) & (ends[i] <= ends)
        holding[i] = False
        if holding.any():
            parent = torch.where(holding, ends - starts, torch.inf).argmin()
            found[parent] -= ends[i] - starts[i]
    return found


def child_first(starts: Tensor, ends: Tensor, key) -> Tensor:
    """By a stack over the events in another order: of those that begin together not the longest first."""
    found, stack = (ends - starts).double(), []
    for i in sorted(range(len(starts)), key=key):
        while stack and ends[stack[-1]] <= starts[i]:
            stack.pop()
        if stack:
            found[stack[-1]] -= (ends[i] - starts[i]).double()
        stack.append(i)
    return found


def own_mistakes(starts: Tensor, ends: Tensor) -> dict[str, Tensor]:
    """What usual mistakes give: [events]."""
    rounded = own_times(starts.float(), ends.float())
    starts, ends = starts.double(), ends.double()
    duration = ends - starts
    holds = (starts[:, None] <= starts) & (ends <= ends[:, None]) & ~torch.eye(len(starts), dtype=torch.bool)
    right = own_times(starts, ends)
    ties = "Of events that begin together the longest comes first: a child took its parent for its own child."
    return {
        "That is the whole duration: take the children's off.": duration,
        "You took all descendants off: a grandchild is within a child already.": duration - holds.double() @ duration,
        "That is the time of the children: take it off the duration.": duration - right,
        ties: child_first(starts, ends, lambda i: (starts[i].item(), ends[i].item())),
        f"{ties} ": child_first(starts, ends, lambda i: starts[i].item()),
        "Events come in any order: sort them by their start first.": child_first(starts, ends, lambda i: i),
        "Times of a trace are large: keep float64, float32 rounds them.": rounded,
    }


def check_own(f, starts: Tensor, ends: Tensor) -> None:
    compare(f(starts, ends), own_times(starts, ends), own_mistakes(starts, ends), atol=1e-4)


def tree(depth: int, begin: float, end: float) -> list[tuple[float, float]]:
    """Nested events: a few children with gaps between them, down to `depth`."""
    found = [(begin, end)]
    cuts = (begin + (end - begin) * torch.rand(4, dtype=torch.float64).sort().values).tolist()
    for left, right in (cuts[:2], cuts[2:]) if depth else ():
        found += tree(depth - 1, left, right)
    return found


def events(pairs: list[tuple[float, float]], shuffled: bool = False) -> tuple[Tensor, Tensor]:
    table = torch.tensor(pairs, dtype=torch.float64)
    table = table[torch.randperm(len(table))] if shuffled else table
    return table[:, 0].clone(), table[:, 1].clone()


@q4.case("a grandchild, and a sibling of its parent")
def _(f):
    a, b = (4 * torch.rand(2)).tolist()
    check_own(f, *events([(0.0, 100.0), (10.0, 40.0 + a), (15.0, 25.0 + b), (50.0, 90.0)]))


@q4.case("children that begin with their parents, and stand before them")
def _(f):
    a, b = (1 + torch.rand(2)).tolist()
    check_own(f, *events([(0.0, 4.0 - a), (0.0, 10.0), (20.0, 20.0 + b), (20.0, 25.0), (20.0, 31.0)]))
    check_own(f, *events([(5.0, 6.0 + a), (5.0, 9.0 + b), (1.0, 40.0), (1.0, 20.0)]))


@q4.case("siblings that touch; a child that ends with its parent")
def _(f):
    a = torch.rand(()).item()
    check_own(f, *events([(0.0, 10.0), (1.0, 4.0), (4.0, 10.0), (4.5, 5.0 + a), (10.0, 12.0)]))


@q4.case("a deep random tree, shuffled: events come in any order")
def _(f):
    check_own(f, *events(tree(3, 0.0, 1000.0) + tree(2, 1000.0, 1500.0), shuffled=True))


@q4.case("times as in a trace: microseconds since the machine was started")
def _(f):
    starts, ends = events(tree(2, 0.0, 50.0), shuffled=True)
    check_own(f, starts + 6_839_553_812.0, ends + 6_839_553_812.0)
