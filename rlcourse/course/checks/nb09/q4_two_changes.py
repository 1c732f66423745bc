"""q4: two changes at once."""

import math

import torch

from rlcourse.course.checks import Question, compare, draw

q4 = Question(
    "q4", "two_changes", hint="Write one function for the longest of the three times, and call it four times."
)


def check_changes(f, bytes_us: float, issue_us: tuple[float, float], waiting_us: tuple[float, float]) -> None:
    """A card and two kernels of which each of the three times is known, and what the function makes of them."""
    data, latency = 1e6 * draw(1, 200), 0.4 + torch.rand(()).item()
    ghz, sms = 1 + torch.rand(()).item(), draw(40, 140)
    gb_s = data / 1e9 / (bytes_us * 1e-6)
    issue_a_second = 4 * sms * ghz * 1e9
    instructions = torch.tensor([t * 1e-6 * issue_a_second for t in issue_us], dtype=torch.float64)
    flight = torch.tensor([data * latency / t for t in waiting_us], dtype=torch.float64)

    def answers(combine=max, of=((0, 0), (1, 0), (0, 1), (1, 1)), swap=False, issue=1.0, memory=1.0, fixed=False):
        waits = [latency, latency] if fixed else waiting_us
        times = [combine([memory * bytes_us, issue * issue_us[i], waits[w]]) for i, w in of]
        verdict = 2 if math.isclose(times[1], times[2]) else int(times[1] > times[2])
        return torch.tensor([*times, 1 - verdict if swap and verdict < 2 else verdict], dtype=torch.float64)

    mistakes = {
        "The three do not follow one another: the time is the longest of them, not their sum.": answers(sum),
        "The time is the longest of the three, not the shortest.": answers(min),
        "An SM has four schedulers.": answers(issue=4.0),
        "All SMs issue instructions at the same time.": answers(issue=float(sms)),
        "The units: a GB/s is a thousand bytes a µs.": answers(memory=1e3),
        "The units: a GHz is a thousand cycles a µs.": answers(issue=1e3),
        "In each latency `flight` bytes arrive, and `data` are wanted: it is waited for more than once.": answers(
            fixed=True
        ),
        "The second number is with the new instructions, the third with the new bytes in flight.": answers(
            of=((0, 0), (0, 1), (1, 0), (1, 1))
        ),
        "The times are right, the verdict is the wrong way round: first what saves more.": answers(swap=True),
    }
    arguments = instructions, flight, gb_s, ghz, sms, latency
    compare(f(data, *arguments), answers(), mistakes, atol=1e-3)


def times(low: float, high: float) -> float:
    return low + (high - low) * torch.rand(()).item()


@q4.case("the old kernel waits for memory")
def _(f):
    check_changes(f, times(5, 10), (times(20, 30), times(2, 4)), (times(50, 90), times(5, 10)))
    check_changes(f, times(5, 10), (times(20, 30), times(11, 14)), (times(50, 90), times(5, 10)))


@q4.case("the old kernel is bound by its instructions")
def _(f):
    check_changes(f, times(5, 10), (times(50, 90), times(2, 4)), (times(20, 30), times(5, 10)))


@q4.case("the bytes take longest, whatever changes")
def _(f):
    check_changes(f, times(60, 90), (times(20, 40), times(2, 4)), (times(20, 40), times(5, 10)))


@q4.case("any card and any kernel")
def _(f):
    for _ in range(5):
        check_changes(f, times(1, 60), (times(30, 90), times(1, 30)), (times(30, 90), times(1, 30)))
