"""q1: the share of a window in which a kernel ran."""

import itertools

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw

q1 = Question("q1", "busy_fraction", hint="Each of the three examples shows one mistake: begin with the first.")

UPTIME = 7_200_000_000.0  # microseconds

# The planted mistakes, in the order in which a card names those that are left.
PLANTED = {
    "window": "an interval counts with the part that lies inside the window, at both edges",
    "latest": "compare with the latest end so far, not with the end of the interval before",
    "clock": "float32 can't tell moments apart in a time of billions of microseconds: keep float64",
}


def busy(starts: Tensor, ends: Tensor, begin: float, end: float) -> Tensor:
    """Share of the window that some interval covers: cut at every border, look at the middle of each piece."""
    borders = torch.cat([starts.double(), ends.double(), torch.tensor([begin, end], dtype=torch.float64)])
    borders = borders.clamp(begin, end).unique()
    total = 0.0
    for left, right in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        middle = (left + right) / 2
        total += (right - left) * bool(((starts < middle) & (middle < ends)).any())
    return torch.tensor(total / (end - begin), dtype=torch.float64)


def wrong_busy(starts: Tensor, ends: Tensor, begin: float, end: float, wrong: tuple[str, ...]) -> Tensor:
    """The share with some of the planted mistakes in it."""
    if "clock" in wrong:
        starts, ends = starts.float(), ends.float()
    if "window" not in wrong:
        starts, ends = starts.clamp(begin, end), ends.clamp(begin, end)
    total, until = 0.0, begin
    for i in starts.argsort().tolist():
        start, stop = starts[i].item(), ends[i].item()
        total += max(0.0, stop - max(start, until))
        until = stop if "latest" in wrong else max(until, stop)
    return torch.tensor(total / (end - begin), dtype=torch.float64)


def busy_mistakes(starts: Tensor, ends: Tensor, begin: float, end: float) -> dict[str, Tensor]:
    """What planted and other mistakes give: scalars, by the sentence that names them."""
    found = {}
    for count in range(1, len(PLANTED) + 1):
        for wrong in itertools.combinations(PLANTED, count):
            left = "One mistake is left" if count == 1 else f"{count} mistakes are left, one of them"
            found[f"{left}: {PLANTED[wrong[0]]} ({', '.join(wrong)})."] = wrong_busy(starts, ends, begin, end, wrong)
    starts, ends, window = starts.double(), ends.double(), end - begin
    right = busy(starts, ends, begin, end)
    cut = (ends.clamp(begin, end) - starts.clamp(begin, end)).sum()
    inside = (starts >= begin) & (ends <= end)
    held = busy(starts[inside], ends[inside], begin, end) if inside.any() else torch.zeros(())
    everywhere = busy(starts, ends, starts.min().item(), ends.max().item()) * (ends.max() - starts.min())
    return found | {
        "You added up the durations: where intervals overlap, time counts once.": cut / window,
        "You added up the durations and did not cut them to the window.": (ends - starts).sum() / window,
        "You did not cut the intervals to the window.": everywhere / window,
        "An interval that reaches over an edge of the window counts with the part inside.": held,
        "That is the idle share: take it from 1.": 1 - right,
        "Divide by the length of the window.": right * window,
    }


def check_busy(f, starts: list[float] | Tensor, ends: list[float] | Tensor, begin: float, end: float) -> None:
    starts, ends = torch.as_tensor(starts, dtype=torch.float64), torch.as_tensor(ends, dtype=torch.float64)
    order = torch.randperm(len(starts))
    starts, ends = starts[order], ends[order]
    mistakes = busy_mistakes(starts, ends, begin, end)
    compare(f(starts, ends, begin, end), busy(starts, ends, begin, end), mistakes, atol=2e-6)


def check_random(f, begin: float = 105.0, end: float = 127.0) -> None:
    """Twelve random intervals around a window."""
    starts = begin - 5 + 30 * torch.rand(12, dtype=torch.float64)
    check_busy(f, starts, starts + 0.2 + 3 * torch.rand(12, dtype=torch.float64), begin, end)


@q1.case("some overlap, with a gap")
def _(f):
    a, b = torch.rand(2).tolist()
    check_busy(f, [6.0, 1.0, 2.5], [7.0 + a, 3.0, 3.5 + b], 0.0, 10.0)


@q1.case("short ones within a long one")
def _(f):
    a, b = torch.rand(2).tolist()
    check_busy(f, [1.0, 2.0, 4.0, 7.0], [6.0, 2.5 + a / 2, 4.5 + b, 9.0], 0.0, 12.0)
    check_busy(f, [1.0, *(2 + 3 * torch.rand(5)).tolist()], [6.0 + a] * 2 + [5.5] * 4, 0.0, 12.0 + b)


@q1.case("intervals over the edges of the window, and outside it")
def _(f):
    a, b = torch.rand(2).tolist()
    check_busy(f, [-3.0, -1.0, 4.0, 8.0, 12.0], [-2.0, 1.0 + a, 6.0, 11.0 + b, 14.0], 0.0, 10.0)
    check_random(f, begin=0.0, end=10.0)


@q1.case("a machine that has been up for two hours")
def _(f):
    starts = 30 * torch.rand(8, dtype=torch.float64)
    ends = starts + 0.5 + 2 * torch.rand(8, dtype=torch.float64)
    later = UPTIME + 1e6 * draw(0, 900)
    check_busy(f, later + starts, later + ends, later - 1.0, later + 40.0)


@q1.case("a window that does not begin at 0, random intervals")
def _(f):
    check_random(f)
    check_random(f, begin=40.0, end=62.0)


@q1.case("all idle, all busy, touching")
def _(f):
    check_busy(f, [-1.0], [30.0], 0.0, 10.0)
    middle = 1 + 7 * torch.rand(()).item()
    check_busy(f, [0.0, middle], [middle, middle + 1], 0.0, 10.0)
    check_busy(f, [20.0], [30.0], 0.0, 10.0)
