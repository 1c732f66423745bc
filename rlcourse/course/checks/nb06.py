"""Checks of the exercises of lesson 06: busy fraction, free rows, a plan within a budget."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, between, compare, draw
from rlcourse.course.checks.builders import Names, drawn_until, left_in
from rlcourse.course.checks.comparison import as_tensor

q1 = Question("q1", "busy_fraction", hint="Each of the three examples shows one mistake: begin with the first.")
PLANTED = {
    "window": "an interval counts with the part that lies inside the window, at both edges",
    "latest": "compare with the latest end so far, not with the end of the interval before",
    "clock": "float32 can't tell moments apart in a time of billions of microseconds: keep float64",
}


def wrong_busy(starts: Tensor, ends: Tensor, begin: float, end: float, wrong: Names) -> float:
    """With some of the planted mistakes."""
    if "clock" in wrong:
        starts, ends = starts.float(), ends.float()
    if "window" not in wrong:
        starts, ends = starts.clamp(begin, end), ends.clamp(begin, end)
    total, until = 0.0, begin
    for i in starts.argsort().tolist():
        start, stop = starts[i].item(), ends[i].item()
        total += max(0.0, stop - max(start, until))
        until = stop if "latest" in wrong else max(until, stop)
    return total / (end - begin)


@q1.expects(also=left_in(wrong_busy, PLANTED) | {
    "You added up the durations: where intervals overlap, time counts once.": lambda starts, ends, begin, end: (
        (ends.clamp(begin, end) - starts.clamp(begin, end)).sum().item() / (end - begin)
    ),
    "That is the idle share: take it from 1.": lambda *given: 1 - busy(*given),
    "Divide by the length of the window.": lambda *given: busy(*given) * (given[3] - given[2]),
}, parts={"the share": None}, atol=2e-6)  # fmt: skip
def busy(starts: Tensor, ends: Tensor, begin: float, end: float) -> float:
    """By cutting at every border and looking at the middle of each piece."""
    borders = torch.cat([starts, ends, torch.tensor([begin, end]).double()]).clamp(begin, end).unique()
    middles = (borders[:-1] + borders[1:])[:, None] / 2
    covered = ((starts < middles) & (middles < ends)).any(1)
    return (borders.diff() @ covered.double()).item() / (end - begin)


def check_busy(f, starts: list[float] | Tensor, ends: list[float] | Tensor, begin: float, end: float) -> None:
    order = torch.randperm(len(starts))
    q1.check(f, *(torch.as_tensor(x, dtype=torch.float64)[order] for x in (starts, ends)), begin, end)


def random_intervals(begin: float) -> tuple[Tensor, Tensor]:
    """Twelve that begin in the 25 after `begin` or shortly before it."""
    starts = begin - 5 + 30 * torch.rand(12, dtype=torch.float64)
    return starts, starts + 0.2 + 3 * torch.rand(12, dtype=torch.float64)


@q1.case("intervals over the edges of the window, and outside it; all idle, all busy, touching")
def _(f):
    for begin in (0.0, 40.0, 105.0):
        check_busy(f, *random_intervals(begin), begin, begin + 22.0)
    middle = between(1, 8)
    for starts, ends in (([-1.0], [30.0]), ([0.0, middle], [middle, middle + 1]), ([20.0], [30.0])):
        check_busy(f, starts, ends, 0.0, 10.0)


@q1.case("a machine that has been up for two hours")
def _(f):
    later = 7.2e9 + 1e6 * draw(0, 900)  # microseconds
    check_busy(f, *random_intervals(later + 6), later, later + 40.0)


q2 = Question("q2", "free_rows", hint="How long does one row take, how long may the step take, and which times grow?")


@q2.expects({
    "no host": "You left out the host: one row takes as long as its launches, if that is the longest.",
    "bytes alone": "You looked at bytes alone: operations grow with the rows, two for each weight and row.",
    "operations alone": "You looked at operations alone: each row has a cache of its own to read.",
    "one operation": "A weight costs two operations per row: a multiplication and an addition.",
    "added": "You added the times up: all three go on at once, and the longest counts.",
    "weights per row": "A step reads the weights once, not once for each row.",
    "no slack": "You left the slack out: the step may take slack times as long.",
}, parts={"the number of rows": None})  # fmt: skip
def most_rows(weights, cache, element, launches, host, copy, compute, slack, wrong: str = "") -> int:
    """By halving the step; `wrong` names a usual mistake."""

    def longest(n: int, first: bool = False) -> float:
        read = element * weights * (n if wrong == "weights per row" else 1) + n * cache
        times = {"host": launches * host, "bytes": read / copy}
        times["operations"] = (1 if wrong == "one operation" else 2) * weights * n / compute
        left_out = {"no host": "host"} | ({} if first else {"bytes alone": "operations", "operations alone": "bytes"})
        times.pop(left_out.get(wrong, ""), 0)
        return sum(times.values()) if wrong == "added" else max(times.values())

    limit = (1.0 if wrong == "no slack" else slack) * longest(1, first=True) * (1 + 1e-12)
    rows = 0
    for step in (2**power for power in range(40, -1, -1)):
        rows += step if longest(rows + step) <= limit else 0
    return rows


def half_a_billion(cache: float, launches: int, host: float) -> tuple:
    return between(4e8, 6e8), cache, 2, launches, host, between(3.5e12, 4.5e12), between(7e14, 9e14)


q2.case("a slow host before a fast machine: one row takes as long as its launches")(lambda f: [
    q2.check(f, *half_a_billion(cache, draw(900, 1300), 8e-6), between(1.05, 1.4))
    for cache in (between(1e6, 2e6), between(9e6, 2e7))
])  # fmt: skip
q2.case("one launch: long caches, and none yet")(lambda f: [
    q2.check(f, *half_a_billion(between(4e6, 6e6), 1, 2e-5), between(1.2, 1.8)),
    q2.check(f, *half_a_billion(0.0, 1, 2e-5), between(1.05, 1.5)),
])  # fmt: skip


@q2.case("slow processors: in float32, and one where the operations of one row take the longest")
def _(f):
    machine = 4, 1, 2e-5, between(1.5e10, 2.5e10), between(8e10, 1.2e11)
    q2.check(f, between(9e5, 1e6), between(2e4, 4e4), *machine, between(2.5, 4.0))
    machine = 2, 1, 1e-5, between(9e11, 1e12), between(4e11, 6e11)
    q2.check(f, between(1e8, 2e8), between(1e4, 1e5), *machine, between(3.2, 7.8))


q3 = Question("q3", "best_plan", hint="No change has a worth of its own. How many choices of yes and no are there?")


def step_times(plans: Tensor, seconds: Tensor, phase: Tensor, speedups: Tensor) -> Tensor:
    """Seconds of a step with the changes of each plan: plans [n, changes] bool, result [n] float64."""
    factors = torch.where(plans, speedups.double(), 1.0)
    return sum(s.double() / factors[:, phase == j].prod(1) for j, s in enumerate(seconds))


@q3.expects({
    "largest": "You took the largest speed-up first: it matters of how much time.",
    "per day": "You took what saves most per day first: what is left over may not fit, or be worth less by then.",
    "added": "You added up what each change saves alone: the second change to a phase saves less.",
    "next": "You took the change that helps most next: two others may fit into its days.",
})  # fmt: skip
def plan_by(seconds, phase, speedups, days, budget: int, rule: str = "") -> Tensor:
    """The best plan, or the one that a rule gives: [changes] bool."""
    alone = seconds[phase] * (1 - 1 / speedups)
    if rule in ("", "added"):
        plans = torch.cartesian_prod(*[torch.tensor([False, True])] * len(days))
        plans = plans[(plans * days).sum(1) <= budget]
        return plans[((plans * alone).sum(1) if rule else -step_times(plans, seconds, phase, speedups)).argmax()]
    plan = torch.zeros(len(days), dtype=torch.bool)
    while True:  # one change after the other
        now, after = (step_times(p, seconds, phase, speedups) for p in (plan[None], plan | torch.eye(len(days)).bool()))
        worth = {"largest": speedups - 1, "per day": alone / days.clamp(min=1e-3), "next": now - after}[rule]
        worth = worth.masked_fill(plan | (days > budget - days[plan].sum()), 0.0)
        if worth.max() <= 0:
            return plan
        plan[worth.argmax()] = True


def drawn_changes(large: float) -> tuple:
    """Eight changes to three phases, the first `large`: one change makes its phase slower, and one costs no day."""
    seconds, phase = 0.2 + torch.rand(3), torch.randint(0, 3, (8,))
    speedups, days = 1.1 + 3 * torch.rand(8) ** 2, torch.randint(1, 6, (8,))
    worse, gift = torch.randperm(8)[:2]
    seconds[0], speedups[worse], days[gift] = between(0.2, 1.2) * large, between(0.3, 0.8), 0
    return seconds, phase, speedups, days, draw(4, 9)


@q3.cases_of({  # case: how large the first phase is, and the rules that, like all or nothing, do not give the best plan
    "a large phase, and large speed-ups of small ones": (4.0, "largest"),
    "many changes to one phase: the second saves less": (1.5, "added"),
    "what is best per day does not fit": (1.0, "per day", "largest"),
    "what helps most next is not part of the best plan": (1.0, "per day", "added", "next"),
})  # fmt: skip
def _(f, wanted):
    large, *rules = wanted

    def misleading(*inputs) -> bool:
        *given, days, budget = inputs
        plans = [plan_by(*inputs, rule=rule) for rule in ("", *rules)] + [torch.zeros(len(days)).bool()]
        best, *others = step_times(torch.stack(plans), *given)
        return days.sum() > budget and min(others) > best * 1.001

    *given, days, budget = drawn_until(misleading, lambda: drawn_changes(large))
    plan = as_tensor(f(*given, days, budget), "the plan")
    said = f"return [changes] bool: True or False for each of the {len(days)} changes."
    assert plan.dtype == torch.bool and plan.shape == days.shape, said
    assert days[plan].sum() <= budget, f"your plan takes {days[plan].sum()} days, there are {budget}."
    plans = torch.stack([plan, *(by(*given, days, budget) for by in (plan_by, *q3.mistakes.values()))])
    took, best, *others = step_times(plans, *given).tolist()
    compare(took, best, dict(zip(q3.mistakes, others, strict=True)), "the seconds of a step with your plan")
