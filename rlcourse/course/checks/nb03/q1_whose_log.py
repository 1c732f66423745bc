"""q1: which trainer wrote a log."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, draw

EPS = 1e-4

q1 = Question("q1", "whose_log", hint="Which numbers does each trainer make of these rewards, up to a factor?")

TRAINERS = ("rewards as they are", "less the batch mean", "less the group mean", "GRPO", "GRPO on the wrong groups")


def weights_of(trainer: int, rewards: Tensor, n: int) -> Tensor:
    """What a trainer multiplies the log-probs with, by loops over groups: [rows], float64."""
    rows = rewards.double().tolist()
    if trainer == 0:
        return torch.tensor(rows, dtype=torch.float64)
    if trainer == 1:
        return torch.tensor([r - sum(rows) / len(rows) for r in rows], dtype=torch.float64)
    prompts, found = len(rows) // n, [0.0] * len(rows)
    for k in range(prompts):
        members = range(k, len(rows), prompts) if trainer == 4 else range(k * n, k * n + n)
        group = [rows[i] for i in members]
        mean = sum(group) / n
        deviation = (sum((r - mean) ** 2 for r in group) / (n - 1)) ** 0.5
        for i in members:
            found[i] = (rows[i] - mean) / (1.0 if trainer == 2 else deviation + EPS)
    return torch.tensor(found, dtype=torch.float64)


def check_log(f, rewards: Tensor, n: int, factors: tuple[float, float]) -> None:
    """Write a log of each trainer, each with its own unknown factor, and ask whose it is; in drawn order."""
    low, high = factors
    for trainer in torch.randperm(len(TRAINERS)).tolist():
        factor = low * (high / low) ** torch.rand(()).item()
        exact = factor * weights_of(trainer, rewards, n)
        step = 10.0 ** torch.floor(torch.log10(exact.abs().max()) - 2)  # three digits of the largest
        log = ((exact / step).round() * step).float()
        found = f(rewards, log, n)
        if found is None:
            raise AssertionError("the result is None: is there a `return`?")
        try:
            number = torch.as_tensor(found)
            number = int(number) if number.numel() == 1 and number == number.round() else -1
        except (TypeError, ValueError, RuntimeError):
            number = -1
        if not 0 <= number < len(TRAINERS):
            raise AssertionError(f"the result is {found!r:.40}: return a number from 0 to {len(TRAINERS) - 1}")
        if number != trainer:
            said = f"a log of trainer {trainer} ({TRAINERS[trainer]}), you say {number} ({TRAINERS[number]})"
            raise AssertionError(f"{said}. {told_apart(trainer, number)}")


def told_apart(trainer: int, number: int) -> str:
    """A sentence on what tells two trainers apart."""
    pair = {trainer, number}
    if pair == {0, 1}:
        return "Both keep the order of all rewards; look at what the weights add up to."
    if pair <= {0, 1, 2}:
        return "Look at the sum of the weights in each group."
    if pair == {2, 3}:
        return "The weights of every group add up to 0 in both; compare the sizes of the groups."
    return "Remember that the factor is unknown and the digits are few: compare directions, and take the nearest."


@q1.case("rewards of 0 and 1")
def _(f):
    for n in (4, 8):
        counts = torch.tensor([1, n // 2, n // 2, n - 1, n, draw(0, n)])[torch.randperm(6)]  # right answers of a group
        order = torch.rand(6, n).argsort(1)
        check_log(f, (order < counts[:, None]).float().flatten(), n, (0.5, 2.0))


@q1.case("partial credit, spread differently from prompt to prompt")
def _(f):
    for prompts, n in ((3, 5), (8, 4)):
        spread = torch.linspace(0.1, 1.0, prompts)[torch.randperm(prompts), None]
        rewards = torch.rand(prompts, 1) + spread * torch.rand(prompts, n)
        check_log(f, rewards.flatten(), n, (0.5, 2.0))


@q1.case("a factor from a thousandth to a thousand")
def _(f):
    for prompts in (4, 6):
        n = draw(3, 7)
        spread = torch.linspace(0.1, 1.0, prompts)[torch.randperm(prompts), None]
        check_log(f, (torch.rand(prompts, 1) + spread * torch.rand(prompts, n)).flatten(), n, (1e-3, 1e3))
