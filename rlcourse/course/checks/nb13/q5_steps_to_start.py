"""q5: how long RL waits for its first signal."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw

q5 = Question("q5", "steps_to_start", hint="When do all answers of a group get the same reward?")


def waiting(rates: Tensor, group: int, prompts: int, mistake: str = "") -> Tensor:
    """Expected number of steps up to the first with a signal, float64."""
    p = rates.double()
    if mistake == "mean rate":
        p = p.mean()[None]
    none = torch.log1p(-p).mul(group).exp() if mistake != "one answer" else 1 - p
    if mistake == "one answer":
        group = 1
        all_right = torch.zeros_like(p)
    else:
        all_right = torch.zeros_like(p) if mistake == "all right" else p**group
    # without a signal: nobody is right, or everybody is. Written so that a rate of 1e-18 is not lost.
    signal = torch.where(p < 1, -torch.expm1(group * torch.log1p(-p.clamp(max=0.5))), 1 - none)
    signal = torch.where(p > 0.5, 1 - none, signal) - all_right
    q = signal.mean()
    if mistake == "a prompt":
        return 1 / q
    if mistake == "every group":
        return 1 / q**prompts
    if mistake == "expected groups":
        return 1 / (q * prompts)
    at_least_one = -torch.expm1(prompts * torch.log1p(-q))
    return 1 / at_least_one if at_least_one > 0 else torch.tensor(torch.inf, dtype=torch.float64)


MISTAKES = {
    "all right": "A group in which all are right has no signal either.",
    "mean rate": "You put the mean rate into the formula: take the mean of what the formula says of each problem.",
    "one answer": "That is the time to the first problem that one answer solves: a group has more than one.",
    "a prompt": "That counts groups: a step has several.",
    "expected groups": "That is 1 / the expected number of groups with a signal: a step may have two of them.",
    "every group": "One group with a signal is enough for a step to learn.",
}


def check_waiting(f, rates: Tensor, group: int, prompts: int) -> None:
    expected = waiting(rates, group, prompts)
    mistakes = {sentence: waiting(rates, group, prompts, mistake) for mistake, sentence in MISTAKES.items()}
    found = f(rates, group, prompts)
    number = isinstance(found, Tensor | float | int) and torch.as_tensor(found).shape == expected.shape
    if expected > 1e5 and number:
        if not torch.allclose(torch.as_tensor(found).double(), expected, rtol=1e-2):
            said = "tiny rates are lost: 1 - (1 - p) ** group is 0 in rounding; use log1p and expm1"
            raise AssertionError(f"{said} (got {float(found):.4g}, expected {expected.item():.4g})")
        return
    compare(found, expected, mistakes, what="the number of steps")


@q5.case("all problems of one rate")
def _(f):
    for rate in (0.02, 0.6):
        check_waiting(f, torch.full((draw(4, 9),), rate + 0.1 * torch.rand(()).item(), dtype=torch.float64), 4, 2)


@q5.case("easy and hopeless problems")
def _(f):
    for group, prompts in ((draw(2, 4), 1), (8, draw(2, 3))):
        rates = torch.cat([torch.zeros(draw(20, 30)), 0.8 + 0.15 * torch.rand(draw(2, 4))]).double()
        check_waiting(f, rates, group, prompts)


@q5.case("hopeless problems, and some that always work")
def _(f):
    rates = torch.cat([torch.zeros(draw(5, 9)), torch.ones(draw(5, 9)), 0.3 * torch.rand(3)]).double()
    check_waiting(f, rates, draw(3, 6), 2)


@q5.case("nothing but zeros and ones")
def _(f):
    rates = torch.cat([torch.zeros(draw(2, 5)), torch.ones(draw(0, 5))]).double()
    found = torch.as_tensor(f(rates, draw(2, 8), draw(1, 8)))
    if not (found == torch.inf).all() or found.numel() != 1:
        raise AssertionError(f"no group ever has a signal: the result should be inf, not {found.tolist()}")
    check_waiting(f, torch.rand(draw(4, 8)).double() * 0.1, draw(3, 5), 2)


@q5.case("a rate of 1e-18")
def _(f):
    rates = torch.full((draw(3, 5),), 1e-18, dtype=torch.float64) * (1 + torch.rand(1).double())
    check_waiting(f, rates, draw(4, 8), draw(2, 4))
