"""q2: a data set with a given share of silent groups."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question

q2 = Question(
    "q2", "data_set", hint="Which problems are silent whatever the group size? And which as rarely as can be?"
)

MOST, CLOSE = 1000, 0.01


def silence(success: Tensor, n: int) -> float:
    """Expected share of silent groups, by a loop over problems."""
    found = [p**n + (1 - p) ** n for p in success.double().tolist()]
    return sum(found) / len(found)


def check_data(f, mean: float, n: int, share: float) -> None:
    found = f(mean, share, n)
    if found is None:
        raise AssertionError("the result is None: is there a `return`?")
    try:
        found = torch.as_tensor(found).double()
    except (TypeError, ValueError, RuntimeError):
        raise AssertionError(f"the result should be a tensor, not {type(found).__name__}") from None
    if found.dim() != 1 or not 1 <= len(found) <= MOST:
        raise AssertionError(f"the result has shape {list(found.shape)}: return 1 to {MOST} success rates")
    if not ((found >= 0) & (found <= 1)).all():
        raise AssertionError("a success rate is a probability: all must lie between 0 and 1")
    wanted = f"asked for are mean {mean:.3f} and {share:.1%} silent groups of {n}"
    got_mean, got = found.mean().item(), silence(found, n)
    if abs(got_mean - mean) > CLOSE:
        swapped = " That is the share that was asked for." if abs(got_mean - share) < CLOSE else ""
        mirrored = " That is 1 minus the mean." if abs(got_mean - (1 - mean)) < CLOSE else ""
        raise AssertionError(f"your problems have a mean success rate of {got_mean:.3f}; {wanted}.{swapped}{mirrored}")
    if abs(got - share) > CLOSE:
        least = mean**n + (1 - mean) ** n
        why = ""
        if abs(got - least) < 1e-3:
            why = " Problems that are all alike are as rarely silent as a data set of this mean can be."
        elif got > 1 - 1e-3:
            why = " Problems that are always or never solved are always silent: you need others, too."
        elif abs(got - (share + (1 - share) * least)) < CLOSE:
            why = " The problems in between are silent sometimes, too: you counted only those at the ends."
        raise AssertionError(f"{got:.1%} of your groups are silent; {wanted}.{why}")


def a_mean() -> float:
    """Between 0.25 and 0.42 or between 0.58 and 0.75."""
    mean = 0.25 + 0.17 * torch.rand(()).item()
    return mean if torch.rand(()) < 0.5 else 1 - mean


def a_share(mean: float, n: int, low: float, high: float) -> float:
    """Between what is possible: a part `low` to `high` of the way from the least share to 1."""
    least = mean**n + (1 - mean) ** n
    return least + (1 - least) * (low + (high - low) * torch.rand(()).item())


@q2.case("half of the way from the fewest silent groups to all")
def _(f):
    for n in (8, 4):
        mean = a_mean()
        check_data(f, mean, n, a_share(mean, n, 0.35, 0.65))


@q2.case("pairs, where even the middle is often silent")
def _(f):
    for _ in range(2):
        mean = a_mean()
        check_data(f, mean, 2, a_share(mean, 2, 0.3, 0.7))


@q2.case("nearly all groups silent, and few of them")
def _(f):
    for low, high in ((0.9, 0.96), (0.08, 0.15)):
        mean = a_mean()
        check_data(f, mean, 8, a_share(mean, 8, low, high))
