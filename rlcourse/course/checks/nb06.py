"""Checks of the exercises of lesson 06: busy fraction, free rows, a plan within a budget, self time."""

import itertools
import math

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


q2 = Question("q2", "free_rows", hint="How long does one row take, how long may the step take, and which times grow?")


def three_times(n: int, weights, cache, element, launches, host, copy, compute) -> tuple[float, float, float]:
    """Seconds of host, bytes and operations of a step of n rows."""
    return launches * host, (element * weights + cache * n) / copy, 2 * weights * n / compute


def most_rows(fits) -> float:
    """The largest n for which `fits(n)`, by doubling and then halving the step; inf if there is none below 2^40."""
    if not fits(1):
        return 0.0
    step = 1
    while fits(1 + 2 * step):
        step *= 2
        if step > 2**40:
            return math.inf
    n = 1
    while step:
        if fits(n + step):
            n += step
        else:
            step //= 2
    return float(n)


def free(numbers: tuple, slack: float, first=max, later=max) -> float:
    """The most rows whose `later` of the three times is within slack of the `first` of those of one row."""
    limit = slack * first(three_times(1, *numbers)) * (1 + 1e-12)
    return most_rows(lambda n: later(three_times(n, *numbers)) <= limit)


def free_mistakes(numbers: tuple, slack: float) -> dict[str, float]:
    weights, cache, element, _, host, copy, compute = numbers
    right = free(numbers, slack)
    no_host = (weights, cache, element, 0, host, copy, compute)
    limit = slack * max(three_times(1, *numbers))
    by_bytes = (limit * copy - element * weights) / cache if cache else math.inf
    by_flops = limit * compute / (2 * weights)
    return {
        "You left out the host: one row takes as long as its launches, if that is the longest.": free(no_host, slack),
        "One row needs its operations, too: the longest of three times counts.": free(
            numbers, slack, first=lambda t: max(t[:2])
        ),
        "You looked at bytes alone: operations grow with the rows, two for each weight and row.": most_rows(
            lambda n: n <= by_bytes
        ),
        "You looked at operations alone: each row has a cache of its own to read.": most_rows(lambda n: n <= by_flops),
        "A weight costs two operations a row: a multiplication and an addition.": most_rows(
            lambda n: n <= min(by_bytes, 2 * by_flops)
        ),
        "Weights are numbers: multiply by element_bytes.": free((weights, cache, 1, *numbers[3:]), slack),
        "You added the times up: all three go on at once, and the longest counts.": free(numbers, slack, sum, sum),
        "A step reads the weights once, not once for each row.": most_rows(
            lambda n: n * (element * weights + cache) / copy <= limit and n <= by_flops
        ),
        "The limit is slack times the longest time, not slack times the rows.": float(int(slack)),
        "Rounded up, the step takes longer than it may: round down.": right + 1,
        "You left the slack out: the step may take slack times as long.": free(numbers, 1.0),
    }


def check_free(f, numbers: tuple, slack: float) -> None:
    found = f(*numbers, slack)
    if isinstance(found, Tensor) and found.numel() == 1:
        found = found.item()
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise AssertionError(f"return a whole number, not {type(found).__name__}.")
    mistakes = {said: torch.tensor(v, dtype=torch.float64) for said, v in free_mistakes(numbers, slack).items()}
    expected = torch.tensor(free(numbers, slack), dtype=torch.float64)
    found = torch.tensor(float(found), dtype=torch.float64)
    for said, wrong in mistakes.items():
        if found == wrong != expected:
            raise AssertionError(said)
    if found != expected:
        raise AssertionError(f"the number of rows is {found.item():,.10g}, expected {expected.item():,.0f}")


def some(low: float, high: float) -> float:
    return low + (high - low) * torch.rand((), dtype=torch.float64).item()


def half_a_billion(cache: float, launches: int, host: float) -> tuple:
    return (some(4e8, 6e8), cache, 2, launches, host, some(3.5e12, 4.5e12), some(7e14, 9e14))


@q2.case("a slow host before a fast machine: one row takes as long as its launches")
def _(f):
    check_free(f, half_a_billion(some(1e6, 2e6), draw(900, 1300), 8e-6), some(1.05, 1.4))
    check_free(f, half_a_billion(some(9e6, 2e7), draw(900, 1300), 8e-6), some(1.05, 1.4))


@q2.case("one launch: long caches")
def _(f):
    check_free(f, half_a_billion(some(4e6, 6e6), 1, 2e-5), some(1.2, 1.8))


@q2.case("one launch: no cache yet")
def _(f):
    check_free(f, half_a_billion(0.0, 1, 2e-5), some(1.05, 1.5))


@q2.case("a slow processor in float32")
def _(f):
    check_free(
        f, (some(9e5, 1e6), some(2e4, 4e4), 4, 1, 2e-5, some(1.5e10, 2.5e10), some(8e10, 1.2e11)), some(2.5, 4.0)
    )


@q2.case("a machine whose arithmetic is so slow that one row takes its operations")
def _(f):
    check_free(f, (some(1e8, 2e8), some(1e4, 1e5), 2, 1, 1e-5, some(9e11, 1e12), some(4e11, 6e11)), some(3.2, 7.8))


q3 = Question("q3", "best_plan", hint="No change has a worth of its own. How many choices of yes and no are there?")


Plan = tuple[bool, ...]


def step_after(plan: Plan, seconds: list, phase: list, speedups: list) -> float:
    """Seconds of a step with the changes of a plan, change by change."""
    parts = list(seconds)
    for chosen, j, speedup in zip(plan, phase, speedups, strict=True):
        if chosen:
            parts[j] /= speedup
    return sum(parts)


def spent(plan: Plan, days: list) -> int:
    return sum(d for d, chosen in zip(days, plan, strict=True) if chosen)


def choices(days: list, budget: int) -> list[Plan]:
    """All plans within the budget."""
    return [plan for plan in itertools.product((False, True), repeat=len(days)) if spent(plan, days) <= budget]


def in_order(worth: list, days: list, budget: int) -> Plan:
    """The plan that takes changes by falling worth, as long as the days last."""
    plan, left = [False] * len(days), budget
    for i in sorted(range(len(days)), key=lambda i: -worth[i]):
        if days[i] <= left and worth[i] > 0:
            plan[i], left = True, left - days[i]
    return tuple(plan)


def best_next(seconds: list, phase: list, speedups: list, days: list, budget: int) -> Plan:
    """The plan that takes the change that helps most now, again and again."""
    plan = (False,) * len(days)
    while True:
        more = [(*plan[:i], True, *plan[i + 1 :]) for i in range(len(days)) if not plan[i]]
        more = [p for p in more if spent(p, days) <= budget]
        best = min(more, key=lambda p: step_after(p, seconds, phase, speedups), default=plan)
        if step_after(best, seconds, phase, speedups) >= step_after(plan, seconds, phase, speedups):
            return plan
        plan = best


def plan_mistakes(seconds: list, phase: list, speedups: list, days: list, budget: int) -> dict[str, Plan]:
    """Plans that usual rules give, by the sentence that names them."""
    alone = [seconds[j] * (1 - 1 / speedup) for j, speedup in zip(phase, speedups, strict=True)]
    within, every = choices(days, budget), choices(days, sum(days))

    def total(plan: Plan) -> float:
        return sum(saved for saved, chosen in zip(alone, plan, strict=True) if chosen)

    def product(plan: Plan) -> float:
        return math.prod(speedup for speedup, chosen in zip(speedups, plan, strict=True) if chosen)

    by_day = [saved / max(d, 1e-3) for saved, d in zip(alone, days, strict=True)]
    by_share = [seconds[j] + 1e-6 * speedup for j, speedup in zip(phase, speedups, strict=True)]
    unlimited = min(every, key=lambda plan: step_after(plan, seconds, phase, speedups))
    return {
        "You took the largest speed-up first: it matters of how much time.": in_order(
            [speedup - 1 for speedup in speedups], days, budget
        ),
        "You multiplied all speed-ups: each holds for its own phase alone.": max(within, key=product),
        "You took what saves most a day first: what is left over may not fit, or be worth less by then.": in_order(
            by_day, days, budget
        ),
        "You took what saves most first, and the days ran out.": in_order(alone, days, budget),
        "You added up what each change saves alone: the second change to a phase saves less.": max(within, key=total),
        "You went by the share of the phase alone: it matters how much of it goes away.": in_order(
            by_share, days, budget
        ),
        "You took the change that helps most next: two others may fit into its days.": best_next(
            seconds, phase, speedups, days, budget
        ),
        "That would be best if you had the days.": unlimited,
    }


def as_lists(*tensors: Tensor) -> list[list]:
    return [tensor.tolist() for tensor in tensors]


def check_plan(f, seconds: Tensor, phase: Tensor, speedups: Tensor, days: Tensor, budget: int) -> None:
    found = f(seconds, phase, speedups, days, budget)
    plan = found.tolist() if isinstance(found, Tensor) and found.dtype == torch.bool else found
    *given, days = as_lists(seconds, phase, speedups, days)
    count = len(days)
    if not isinstance(plan, list | tuple) or len(plan) != count or not all(isinstance(x, bool) for x in plan):
        raise AssertionError(f"return [changes] bool: True or False for each of the {count} changes.")
    plan = tuple(plan)
    best = min(step_after(p, *given) for p in choices(days, budget))
    took, needs = step_after(plan, *given), spent(plan, days)
    right = needs <= budget and took <= best * (1 + 1e-5)
    said = [said for said, wrong in plan_mistakes(*given, days, budget).items() if plan == wrong]
    if said and not right:
        raise AssertionError(" Or: ".join(said))
    if needs > budget:
        raise AssertionError(f"your plan takes {needs} days, there are {budget}.")
    if not right:
        raise AssertionError(f"your plan gives a step of {took:.4g} seconds, the best one {best:.4g}.")


def fooled(make, *names: str) -> tuple:
    """Inputs of `make()` on which neither the rules whose sentences hold one of `names` nor all or nothing is best."""
    for _ in range(300):
        inputs = make()
        *given, days = as_lists(*inputs[:4])
        budget = inputs[4]
        best = min(step_after(p, *given) for p in choices(days, budget))
        found = plan_mistakes(*given, days, budget)
        rules = [plan for said, plan in found.items() if any(name in said for name in names)]
        rules += [(False,) * len(days), (True,) * len(days)]
        if all(step_after(p, *given) > best * 1.001 for p in rules if spent(p, days) <= budget) and sum(days) > budget:
            return inputs
    return inputs


def made(phases: int, changes: int, large: float = 1.0):
    """A maker of random inputs; large: how much of a step the first phase is, beside the others."""

    def make() -> tuple:
        seconds = 0.2 + torch.rand(phases)
        seconds[0] *= large
        speedups = 1.1 + 3 * torch.rand(changes) ** 2
        days = torch.randint(1, 6, (changes,))
        return seconds, torch.randint(0, phases, (changes,)), speedups, days, draw(4, 9)

    return make


@q3.case("a large phase, and large speed-ups of small ones")
def _(f):
    def make() -> tuple:
        seconds = torch.tensor([5.0, 0.3, 0.02]) * (0.8 + 0.4 * torch.rand(3))
        speedups = torch.cat([1.3 + torch.rand(2), 3 + 5 * torch.rand(2), 20 + 50 * torch.rand(2)])
        return seconds, torch.tensor([0, 0, 1, 1, 2, 2]), speedups, torch.randint(1, 4, (6,)), draw(3, 5)

    check_plan(f, *fooled(make, "largest speed-up", "multiplied all", "share of the phase"))


@q3.case("many changes to one phase: the second saves less")
def _(f):
    check_plan(f, *fooled(made(2, 7, large=1.5), "added up", "saves most first"))
    check_plan(f, *fooled(made(2, 7, large=1.5), "added up"))


@q3.case("what is best a day does not fit")
def _(f):
    check_plan(f, *fooled(made(3, 8), "saves most a day", "largest speed-up"))
    check_plan(f, *fooled(made(3, 8), "helps most next"))


@q3.case("a change that makes it slower, and one that costs no day")
def _(f):
    def make() -> tuple:
        seconds, phase, speedups, days, budget = made(3, 8, large=2.0)()
        worse, gift = torch.randperm(8)[:2].tolist()
        speedups[worse], speedups[gift] = 0.3 + 0.5 * torch.rand(()), 1.2 + torch.rand(())
        days[worse], days[gift] = 1, 0
        return seconds, phase, speedups, days, budget

    check_plan(f, *fooled(make, "added up", "share of the phase"))
    check_plan(f, *fooled(make, "multiplied all", "helps most next"))


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


QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4}
