"""q3: a plan of changes within a budget."""

import itertools
import math

import torch
from torch import Tensor

from rlcourse.course.checks import Question, draw

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
