"""q4: the mean of two estimates of the gradient."""

import itertools

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare
from rlcourse.course.checks.nb03.q1_whose_log import EPS

q4 = Question("q4", "expected_gradients", hint="All actions^G groups, their probabilities, and the estimate of each.")


def group_gradients(logits: Tensor, rewards: Tensor, n: int) -> Tensor:
    """Expected gradients with group-centred and with normalised advantages: [2, actions], float64.

    The first in closed form, (1 - 1/n) pi (R - V); the second by how often each action occurs in a group.
    """
    pi, rewards = logits.double().softmax(0), rewards.double()
    first = (1 - 1 / n) * pi * (rewards - pi @ rewards)
    second = torch.zeros_like(pi)
    for counts in itertools.product(range(n + 1), repeat=len(pi)):
        if sum(counts) == n:
            c = torch.tensor(counts, dtype=torch.float64)
            ways = (torch.lgamma(torch.tensor(n + 1.0).double()) - torch.lgamma(c + 1).sum()).exp()
            mean = c @ rewards / n
            deviation = (c @ (rewards - mean) ** 2 / (n - 1)).sqrt()
            weight = c * (rewards - mean) / (deviation + EPS)  # summed advantage of each action
            second += ways * (pi**c).prod() * (weight - weight.sum() * pi) / n
    return torch.stack([first, second])


def gradients_off(logits: Tensor, rewards: Tensor, n: int, wrong: str) -> Tensor:
    """The same by going through groups, with a mistake: [2, actions], float64."""
    pi, rewards = logits.double().softmax(0), rewards.double()
    choose = {"combinations": itertools.combinations, "repeats": itertools.combinations_with_replacement}.get(wrong)
    every = list(choose(range(len(pi)), n) if choose else itertools.product(range(len(pi)), repeat=n))
    if not every:
        return torch.zeros(2, len(pi), dtype=torch.float64)
    groups = torch.tensor(every)
    chance = torch.ones(len(groups)).double() / len(groups) if wrong == "alike" else pi[groups].prod(1)
    a = rewards[groups] - rewards[groups].mean(1, keepdim=True)
    if wrong == "no baseline":
        a = rewards[groups]
    std = a.std() if wrong == "all" else a.std(1, correction=int(wrong != "population"), keepdim=True)
    scores = (torch.eye(len(pi)).double() - pi)[groups]  # [groups, n, actions]
    eps = 1e-9 if wrong == "no eps" else EPS
    estimates = [(x[..., None] * scores).mean(1) for x in (a, a / (std + eps))]
    return torch.stack([(chance[:, None] * estimate).sum(0) for estimate in estimates])


def gradient_mistakes(logits: Tensor, rewards: Tensor, n: int) -> dict[str, Tensor]:
    """What usual mistakes give: [2, actions]."""
    right = group_gradients(logits, rewards, n)
    named = {
        "combinations": "You went through combinations: draws are independent, so the same action may come twice, and "
        "every order is a group of its own.",
        "repeats": "You went through each collection of actions once: every order in which it is drawn is a group of "
        "its own.",
        "all": "You divided by one deviation over all groups: each group is divided by its own.",
        "population": "You divided by n inside the deviation: that of a sample has n - 1.",
        "alike": "You gave all groups the same probability: it is the product of their actions' probabilities.",
        "no baseline": "You did not subtract the mean of the group.",
        "no eps": "The second row is nearly right: add 1e-4 to the deviation, in every group.",
    }
    return {
        "The rows are the wrong way round: first centred, then normalised.": right.flip(0),
        "You added up over the group: take the mean of its answers.": right * n,
        "The first row leaves the own reward out of the mean.": torch.stack([right[0] * n / (n - 1), right[1]]),
        "You did not divide by the deviation in the second row.": right[:1].repeat(2, 1),
        "The sign is wrong: this is the gradient of the expected reward, to be climbed.": -right,
    } | {sentence: gradients_off(logits, rewards, n, wrong) for wrong, sentence in named.items()}


def check_gradients(f, logits: Tensor, rewards: Tensor, n: int) -> None:
    compare(f(logits, rewards, n), group_gradients(logits, rewards, n), gradient_mistakes(logits, rewards, n))


def apart(actions: int) -> Tensor:
    """Rewards that differ, all of them eighths: the mean of equal ones does not round."""
    return torch.randperm(33)[:actions] / 8


@q4.case("two actions in groups of 2, 3 and 6")
def _(f):
    for n in (3, 2, 6):
        check_gradients(f, torch.randn(2), torch.tensor([1.0, 0.0]), n)


@q4.case("three and four actions, any rewards")
def _(f):
    check_gradients(f, torch.randn(3), apart(3), 4)
    check_gradients(f, torch.randn(4), apart(4) - 0.5, 3)


@q4.case("rewards all alike: no gradient at all")
def _(f):
    compare(f(torch.randn(3), torch.ones(3), 3), torch.zeros(2, 3), what="the gradient")
    check_gradients(f, torch.randn(3), apart(3), 3)
