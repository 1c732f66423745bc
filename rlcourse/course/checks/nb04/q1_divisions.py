"""q1: what a gradient was divided by."""

import itertools

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw
from rlcourse.course.checks.nb04.masks import lengths_mask

q1 = Question("q1", "divisions", hint="Take an unknown factor out first. Which two tokens would you compare?")

KINDS = tuple(itertools.product((0, 1), repeat=2))  # divided by the length, by the deviation


def gradient_of(kind: tuple[int, int], rewards: Tensor, lengths: list[int], n: int, factor: float) -> Tensor:
    """The gradient by token of a loss with these divisions, by loops: [rows, longest]."""
    found = torch.zeros(len(rewards), max(lengths), dtype=torch.float64)
    for i, length in enumerate(lengths):
        group = rewards[i // n * n : i // n * n + n].double()
        advantage = (rewards[i].double() - group.mean()).item()
        if kind[1] and group.std() > 0:
            advantage /= group.std().item()
        for t in range(length):
            found[i, t] = -factor * advantage / (length if kind[0] else 1)
    return found.float()


def check_kinds(f, rewards: Tensor, lengths: list[int], n: int) -> None:
    """All four kinds, in an order that is drawn, each with a factor of its own."""
    mask = lengths_mask(lengths, max(lengths))
    for place in torch.randperm(4).tolist():
        kind = KINDS[place]
        factor = 10 ** (4 * torch.rand(()).item() - 4)
        expected = torch.tensor(kind)
        mistakes = {"The two answers are in the wrong order: first the length, then the deviation.": expected.flip(0)}
        truth = f"{('not ', '')[kind[0]]}divided by the length and {('not ', '')[kind[1]]}by the deviation"
        found = f(gradient_of(kind, rewards, lengths, n, factor), rewards, mask, n)
        if isinstance(found, Tensor):
            found = found.round().long() if found.is_floating_point() and found.isfinite().all() else found.long()
        elif isinstance(found, list | tuple):
            found = torch.tensor([int(value) for value in found])
        compare(found, expected, mistakes, what=f"the answer for a gradient that was {truth}")


def unlike(n: int, groups: int) -> Tensor:
    """Rewards 0 and 1 of groups whose numbers of right answers all differ, none 0 or n, nor mirrored: [groups * n]."""
    counts = (1 + torch.randperm(n // 2))[:groups]
    return torch.cat([(torch.randperm(n) < k).float() for k in counts.tolist()])


def unlike_lengths(rows: int, high: int = 30) -> list[int]:
    return (2 + torch.randperm(high - 2)[:rows]).tolist()


@q1.case("rewards 0 and 1, three groups of eight")
def _(f):
    check_kinds(f, unlike(8, 3), unlike_lengths(24), 8)


@q1.case("groups without signal among them, the first too")
def _(f):
    signal = unlike(6, 2)
    rewards = torch.cat([torch.ones(6), signal[:6], torch.zeros(6), signal[6:]])
    check_kinds(f, rewards, unlike_lengths(24), 6)


@q1.case("rewards of any size, and an answer without a token")
def _(f):
    rewards = torch.cat([0.1 * torch.rand(4), torch.rand(4), 5 * torch.rand(4) - 2])
    lengths = unlike_lengths(12)
    lengths[draw(0, 11)] = 0
    check_kinds(f, rewards, lengths, 4)


@q1.case("answers to one prompt that are all of one length")
def _(f):
    check_kinds(f, unlike(8, 3), [length for length in unlike_lengths(3, 60) for _ in range(8)], 8)
