"""q4: name a failure from its curves."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question
from rlcourse.course.checks.nb05.q3_engine import one_of_five
from rlcourse.course.lessons.curve_records import load_curve

q4 = Question("q4", "diagnose", hint="Compare the mean of the first five steps with that of the last five.")

NAMES = ("HEALTHY", "STILL", "COLLAPSED", "CUT_OFF", "HACKED")
HEALTHY, STILL, COLLAPSED, CUT_OFF, HACKED = range(5)
METRICS = ("reward", "accuracy", "truncated", "kl")


def recorded(name: str) -> list[tuple[Tensor, ...]]:
    """The four metrics of each seed of a recorded run of the lesson."""
    none = float("nan")
    runs = load_curve(f"lesson05_{name}")["results"]
    return [tuple(torch.tensor([none if v is None else v for v in run["metrics"][m]]) for m in METRICS) for run in runs]


def expect(f, run: tuple[Tensor, ...], right: int, what: str) -> None:
    """Raise AssertionError, with what the metrics did, unless f gives the run its right name."""
    found = one_of_five(f(*run))
    if found == right:
        return
    reward, accuracy, truncated = ((m[:5].mean().item(), m[-5:].mean().item()) for m in run[:3])
    kl = run[3][~run[3].isnan()]
    largest = f"largest KL {kl.max():.2g}" if len(kl) else "no KL"
    raise AssertionError(
        f"{what} is {NAMES[right]}, not {NAMES[found]}: reward {reward[0]:.2f} to {reward[1]:.2f}, "
        f"accuracy {accuracy[0]:.2f} to {accuracy[1]:.2f}, truncated {truncated[0]:.2f} to {truncated[1]:.2f} "
        f"(means of the first and the last five steps), {largest} in {len(kl)} of {len(run[3])} steps that have one"
    )


RECORDED = {
    "healthy": HEALTHY,
    "half_format": HEALTHY,
    "words_strict": HEALTHY,
    "format": HACKED,
    "collapse": COLLAPSED,
    "truncation": CUT_OFF,
    "still": STILL,
}


def recorded_case(name: str, right: int) -> None:
    @q4.case(f"recorded: {name}, three seeds")
    def _(f):
        for reward, accuracy, *others in recorded(name):
            reward, accuracy = (m + 0.002 * torch.randn(len(m)) for m in (reward, accuracy))
            expect(f, (reward, accuracy, *others), right, f"the recorded run {name!r}")
        expect_other(f, right)


for _name, _right in RECORDED.items():
    recorded_case(_name, _right)


def expect_other(f, right: int) -> None:
    """Whoever gives every run one name is wrong: a run that is made up, and not what the case is about."""
    if right == HEALTHY:
        run = line(0.8, 0.1), line(0.6, 0.1), line(0.0, 0.0), drift(0.5)
        expect(f, run, COLLAPSED, "a run whose reward falls")
    else:
        run = line(0.1, 0.8), line(0.1, 0.8), line(0.05, 0.0), drift(0.1)
        expect(f, run, HEALTHY, "a run that learns")


def line(start: float, end: float, steps: int = 30) -> Tensor:
    """A metric that goes from `start` to `end` in a straight line, with a little noise."""
    return (torch.linspace(start, end, steps) + 0.01 * torch.randn(steps)).clamp(0, 1)


def drift(end: float, steps: int = 30) -> Tensor:
    """A KL that grows to `end`."""
    return torch.linspace(0, end, steps)


@q4.case("one bad step at the end is noise")
def _(f):
    accuracy = line(0.2, 0.8)
    accuracy[-1] = 0.2
    expect(f, (accuracy, accuracy, line(0.05, 0.0), drift(0.1)), HEALTHY, "a run with one bad step at the end")
    expect_other(f, HEALTHY)


@q4.case("answers cut off at the start only are no failure")
def _(f):
    truncated = line(0.6, 0.0)
    expect(f, (line(0.1, 0.7), line(0.1, 0.7), truncated, drift(0.1)), HEALTHY, "a run that learns to end its answers")
    expect_other(f, HEALTHY)


@q4.case("a reward that pays for something else, accuracy flat")
def _(f):
    run = line(0.3, 0.9), line(0.2, 0.2), line(0.0, 0.0), drift(0.3)
    expect(f, run, HACKED, "a run whose reward rises alone")
    expect_other(f, HACKED)


@q4.case("a collapse into short answers: nothing is cut off")
def _(f):
    fallen = torch.cat([line(0.3, 0.4, 10), torch.zeros(20)])
    kl = torch.cat([drift(5.0, 10), torch.full((20,), float("nan"))])
    expect(f, (fallen, fallen, torch.zeros(30), kl), COLLAPSED, "a run that fell to answers without an end or a number")
    expect_other(f, COLLAPSED)


@q4.case("standing still, with steps in which the KL was not measured")
def _(f):
    accuracy = 0.15 + 0.04 * torch.rand(30)
    kl = 1e-8 * torch.rand(30)
    kl[::4] = float("nan")
    expect(f, (accuracy, accuracy, line(0.3, 0.3), kl), STILL, "a run whose KL stays at rounding level")
    expect_other(f, STILL)


@q4.case("a run without a KL: the other three must do")
def _(f):
    none = torch.full((30,), float("nan"))
    expect(f, (line(0.1, 0.8), line(0.1, 0.8), line(0.05, 0.0), none), HEALTHY, "a run that learns, its KL unknown")
    expect(f, (line(0.8, 0.1), line(0.6, 0.1), line(0.0, 0.0), none), COLLAPSED, "a run whose reward falls, KL unknown")
