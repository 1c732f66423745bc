"""q2: an all-reduce in few rounds, fewest of them between machines."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, draw, received

q2 = Question("q2", "partners", hint="With two ranks one round is enough. What do four ranks know after that round?")


def scattered(machines: int, of_each: int) -> Tensor:
    """The machine of each rank, in no order; machines have names from a wide range."""
    names = torch.randperm(90)[:machines] + 5
    return names.repeat_interleave(of_each)[torch.randperm(machines * of_each)]


def check_plan(f, machines: int, of_each: int) -> None:
    """Play the plan: `terms[i, j]` is how often rank i has rank j's numbers in its sum."""
    machine = scattered(machines, of_each)
    size, rounds = len(machine), (machines * of_each).bit_length() - 1
    plan = received(f(machine))
    if not isinstance(plan, Tensor) or plan.dtype != torch.int64 or plan.dim() != 2 or plan.shape[1] != size:
        raise AssertionError(f"the plan should be an int64 tensor [rounds, {size}]")
    if len(plan) != rounds:
        raise AssertionError(f"{size} ranks need {rounds} rounds, and the plan has {len(plan)}")
    if ((plan < 0) | (plan >= size)).any():
        raise AssertionError(f"partners are ranks, 0 to {size - 1}")
    terms, across = torch.eye(size, dtype=torch.long), 0
    for number, partner in enumerate(plan):
        own = torch.arange(size)
        if (partner == own).any():
            raise AssertionError(f"in round {number} rank {int((partner == own).nonzero()[0])} swaps with itself")
        if not torch.equal(partner[partner], own):
            raise AssertionError(f"in round {number} a rank's partner has another partner")
        terms = terms + terms[partner]
        across += int((machine[partner] != machine).any())
    if (terms > 1).any():
        rank, term = (terms > 1).nonzero()[0].tolist()
        raise AssertionError(f"in the end rank {rank} has the numbers of rank {term} more than once in its sum")
    if (terms < 1).any():
        rank, term = (terms < 1).nonzero()[0].tolist()
        raise AssertionError(f"the numbers of rank {term} never get to rank {rank}")
    if across > machines.bit_length() - 1:
        raise AssertionError(f"{across} rounds go between machines, and {machines.bit_length() - 1} are enough")


@q2.case("two machines with two ranks each")
def _(f):
    for _ in range(4):  # a lucky order of ranks proves nothing
        check_plan(f, 2, 2)


@q2.case("one machine")
def _(f):
    check_plan(f, 1, 2 ** draw(1, 2))
    check_plan(f, 1, 8)


@q2.case("machines with one rank each")
def _(f):
    check_plan(f, 2 ** draw(1, 2), 1)
    check_plan(f, 8, 1)


@q2.case("several machines")
def _(f):
    for _ in range(3):
        check_plan(f, 2 ** draw(1, 2), 2 ** draw(2, 3))
        check_plan(f, 2 ** draw(2, 3), 2 ** draw(1, 2))
