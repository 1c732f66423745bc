"""q3: a reward under which the best kind of program is the one that is wanted."""

from dataclasses import dataclass

import torch

from rlcourse.course.checks import Question, draw

q3 = Question("q3", "reward", hint="What does the empty program earn on average, and what a correct one in twenty?")


@dataclass(frozen=True)
class Kind:
    """A kind of program: outcomes (share, compiled, correct, measured speed-up), and what it is."""

    words: str
    outcomes: tuple[tuple[float, float, float, float], ...]


def kind(words: str, correct: float, speedup: float, compiled: float = 1.0, when_wrong: float | None = None) -> Kind:
    """A kind that is right so often; `compiled` of those that are wrong compile, and seem so fast."""
    wrong = 1 - correct
    fast = speedup if when_wrong is None else when_wrong
    outcomes = (
        (correct, 1.0, 1.0, speedup),
        (wrong * compiled, 1.0, 0.0, fast),
        (wrong * (1 - compiled), 0.0, 0.0, 0.0),
    )
    return Kind(words, tuple(o for o in outcomes if o[0] > 0))


def percent(low: int, high: int) -> float:
    return draw(low, high) / 100


def means(f, kinds: list[Kind]) -> list[float]:
    """The mean reward of each kind, from one call with all outcomes, shuffled."""
    rows = torch.tensor([outcome[1:] for k in kinds for outcome in k.outcomes])
    order = torch.randperm(len(rows))
    found = f(*rows[order].T.contiguous())
    assert found is not None, "the reward is None: is there a `return`?"
    assert torch.is_tensor(found) and found.shape == rows.shape[:1], (
        f"expected one reward for each of {len(rows)} programs"
    )
    found = found.double()
    assert found.isfinite().all(), "a reward is not finite"
    earned = torch.empty_like(found)
    earned[order] = found
    shares = torch.tensor([outcome[0] for k in kinds for outcome in k.outcomes], dtype=torch.float64)
    parts = (shares * earned).split([len(k.outcomes) for k in kinds])
    return [part.sum().item() for part in parts]


def basics() -> list[tuple[Kind, Kind]]:
    """Pairs of kinds, the better one first, that every reward has to tell apart."""
    eager = kind("right, as fast as eager", 1.0, 1.0)
    return [
        (eager, kind("wrong, and fast", 0.0, float(draw(20, 90)))),
        (kind("right, twice as fast and more", 1.0, 2 + percent(0, 90)), eager),
        (eager, kind("compiles, computes nothing", 0.0, 1.0)),
    ]


def check_reward(f, *pairs: tuple[Kind, Kind]) -> None:
    for better, worse in [*pairs, *basics()]:
        high, low = means(f, [better, worse])
        assert high > low + 1e-6 * (1 + abs(low)), (
            f"training ends with the kind “{worse.words}”, whose mean reward is {low:.3g}, and not with "
            f"“{better.words}”, which has {high:.3g}"
        )


@q3.case("the empty program, where few others are right")
def _(f):
    drawn = [(percent(5, 8), percent(50, 60)) for _ in range(2)]
    for correct, compiled in [(0.05, 0.5), *drawn]:  # first the edge of what is asked for
        honest = kind("an attempt at the whole, seldom right", correct, 1.0, compiled=compiled)
        check_reward(f, (honest, kind("compiles, computes nothing", 0.0, 1.0)))


@q3.case("a first kernel, slower than eager")
def _(f):
    for _ in range(3):
        slow = kind("right, slower than eager", 1.0, percent(20, 60))
        check_reward(
            f, (slow, kind("wrong, as fast as eager", 0.0, 1.0)), (slow, Kind("no code", ((1.0, 0.0, 0.0, 0.0),)))
        )


@q3.case("speed is worth a risk, far up")
def _(f):
    drawn = [(percent(75, 85), percent(67, 72), 7 + percent(0, 99)) for _ in range(2)]
    for three_in_four, two_in_three, speedup in [(0.75, 0.67, 7.0), *drawn]:
        fused = kind("2.5 times as fast, right three times in four", three_in_four, 2.5)
        bold = kind("7 times as fast and more, right two times in three", two_in_three, speedup)
        check_reward(
            f, (fused, kind("right, as fast as eager", 1.0, 1.0)), (bold, kind("right, 4 times as fast", 1.0, 4.0))
        )


@q3.case("a clock that is wrong now and then")
def _(f):
    for _ in range(3):
        rare, huge = 0.01, float(draw(2_000, 10_000))
        glitch = Kind(
            "as fast as eager, now and then measured as a wonder", ((1 - rare, 1.0, 1.0, 1.0), (rare, 1.0, 1.0, huge))
        )
        check_reward(f, (kind("right, twice as fast", 1.0, 2.0), glitch))


@q3.case("a fast program that is seldom right")
def _(f):
    for _ in range(3):
        gamble = kind("seldom right, faster then", percent(6, 10), 2 + percent(0, 90), when_wrong=float(draw(20, 60)))
        check_reward(f, (kind("right, as fast as eager", 1.0, 1.0), gamble))
