"""Checks of the exercises of lesson 03: whose log it is, a silent data set, a loss to mend, the mean of an estimate."""

import itertools
import math

import torch
from torch import Tensor

from rlcourse.course.checks import Question, as_tensor, between, compare, draw
from rlcourse.course.checks.builders import (
    Names,
    compare_loss,
    compare_named,
    pick,
    ragged_mask,
    sentences,
    whole_number,
)

EPS = 1e-4

q1 = Question("q1", "whose_log", hint="Which numbers does each trainer make of these rewards, up to a factor?")

TRAINERS = ("rewards as they are", "less the batch mean", "less the group mean", "GRPO", "GRPO on the wrong groups")
IN_GROUPS = "Look at the sum of the weights in each group."
TOLD_APART = {
    (0, 1): "Both keep the order of all rewards; look at what the weights add up to.",
    (0, 2): IN_GROUPS,
    (1, 2): IN_GROUPS,
    (2, 3): "The weights of every group add up to 0 in both; compare the sizes of the groups.",
}


def weights_of(trainer: int, rewards: Tensor, n: int) -> Tensor:
    """What a trainer multiplies the log-probs with, row by row: [rows], float64."""
    rows, prompts = rewards.double().tolist(), len(rewards) // n
    found = []
    for i, reward in enumerate(rows):
        group = rows[i % prompts :: prompts] if trainer == 4 else rows[i // n * n : i // n * n + n]
        mean = sum(group) / n
        deviation = (sum((r - mean) ** 2 for r in group) / (n - 1)) ** 0.5 + EPS
        less_mean = reward - mean
        found.append((reward, reward - sum(rows) / len(rows), less_mean, less_mean / deviation)[min(trainer, 3)])
    return torch.tensor(found, dtype=torch.float64)


def check_log(f, rewards: Tensor, n: int, largest: float) -> None:
    """Write a log of each trainer, each with its own unknown factor, and ask whose it is; in drawn order."""
    for trainer in torch.randperm(len(TRAINERS)).tolist():
        exact = largest ** between(-1, 1) * weights_of(trainer, rewards, n)
        step = 10.0 ** torch.floor(torch.log10(exact.abs().max()) - 2)  # three digits of the largest
        found = f(rewards, ((exact / step).round() * step).float(), n)
        number = whole_number(found, 0, 4, "return a number from 0 to 4")
        if number != trainer:
            usual = "Remember that the factor is unknown and the digits are few: compare directions, take the nearest."
            said = f"a log of trainer {trainer} ({TRAINERS[trainer]}), you say {number} ({TRAINERS[number]})"
            raise AssertionError(f"{said}. {TOLD_APART.get((min(trainer, number), max(trainer, number)), usual)}")


@q1.case("rewards of 0 and 1")
def _(f):
    for n in (4, 8):
        counts = torch.tensor([1, n // 2, n // 2, n - 1, n, draw(0, n)])[torch.randperm(6)]  # right answers of a group
        order = torch.rand(6, n).argsort(1)
        check_log(f, (order < counts[:, None]).float().flatten(), n, largest=2.0)


@q1.case("partial credit, spread differently from prompt to prompt; a factor from a thousandth to a thousand")
def _(f):
    for prompts, n, largest in ((3, 5, 2.0), (8, 4, 2.0), (draw(4, 6), draw(3, 7), 1e3)):
        spread = torch.linspace(0.1, 1.0, prompts)[torch.randperm(prompts), None]
        check_log(f, (torch.rand(prompts, 1) + spread * torch.rand(prompts, n)).flatten(), n, largest)


q2 = Question(
    "q2", "data_set", hint="Which problems are silent whatever the group size? And which as rarely as can be?"
)

MOST, CLOSE = 1000, 0.01


def check_data(f, n: int, low: float, high: float) -> None:
    """Ask for a share of silent groups from `low` to `high` of the way from the least that is possible to 1."""
    mean = between(0.25, 0.42) if draw(0, 1) else between(0.58, 0.75)
    least = mean**n + (1 - mean) ** n
    share = least + (1 - least) * between(low, high)
    found = as_tensor(f(mean, share, n)).double()
    if found.dim() != 1 or not 1 <= len(found) <= MOST:
        raise AssertionError(f"the result has shape {list(found.shape)}: return 1 to {MOST} success rates")
    if not ((found >= 0) & (found <= 1)).all():
        raise AssertionError("a success rate is a probability: all must lie between 0 and 1")
    wanted = f"asked for are mean {mean:.3f} and {share:.1%} silent groups of {n}"
    got_mean, got = found.mean().item(), sum(p**n + (1 - p) ** n for p in found.tolist()) / len(found)
    if abs(got_mean - mean) > CLOSE:
        why = " That is the share that was asked for." if abs(got_mean - share) < CLOSE else ""
        why = " That is 1 minus the mean." if abs(got_mean - (1 - mean)) < CLOSE else why
        raise AssertionError(f"your problems have a mean success rate of {got_mean:.3f}; {wanted}.{why}")
    usual = {
        least: " Problems that are all alike are as rarely silent as a data set of this mean can be.",
        1.0: " Problems that are always or never solved are always silent: you need others, too.",
        share + (1 - share) * least: " Problems in between are silent sometimes, too: you counted those at the ends.",
    }
    if abs(got - share) > CLOSE:
        why = next((said for wrong, said in usual.items() if abs(got - wrong) < CLOSE / 2), "")
        raise AssertionError(f"{got:.1%} of your groups are silent; {wanted}.{why}")


q2.case("half of the way from the fewest silent groups to all")(
    lambda f: [check_data(f, n, 0.35, 0.65) for n in (8, 4)]
)
q2.case("pairs, where even the middle is often silent")(lambda f: [check_data(f, 2, 0.3, 0.7) for _ in range(2)])
q2.case("nearly all groups silent, and few of them")(
    lambda f: [check_data(f, 8, *ends) for ends in ((0.9, 0.96), (0.08, 0.15))]
)

q3 = Question("q3", "mended_loss", hint="Begin with the nan: what is there after the end of an answer?")

NAN = "nan or infinity: 0 * inf is nan, so fill the masked places before any arithmetic."
PLANTED = {
    "clip alone": "a token that has moved far the wrong way has no gradient: take the min of rho A and clip(rho) A",
    "mirrored": "your k3 is steep where a token has become less probable than in the reference: it is mirrored",
    "tokens": "you take the mean over all tokens: that is DAPO. GRPO takes the mean of each row first",
}
LOSS_MISTAKES = {
    "kl sign": "The KL has the wrong sign: it is a price, so it is added to the loss.",
    "sign": "The sign is wrong: optimizers minimise, and rows of positive advantage must become more probable.",
    "sum": "You added up the tokens of a row: take their mean.",
    "constant": "You divide by all places of the matrix: GRPO takes the mean over the real tokens of each row.",
    "real rows": "You took the mean over rows that have tokens: an empty row adds 0 and still counts as a row.",
    "no clip": "The clip is missing.",
    "inverse": "Your ratio is upside down: the new policy stands above the old one.",
    "sequence": "Your ratio is that of the whole row: each token has its own.",
    "ref in ratio": "Your ratio is taken to the reference: it belongs to the policy that sampled, old_logprobs.",
    "old in kl": "Your KL is taken to old_logprobs: it belongs to the reference.",
    "k1": "That KL is k1, the plain difference: take k3.",
}


def grpo_loss(logprobs, old, ref, advantages, mask, clip: float, beta: float, wrong: Names = ()) -> Tensor:
    """The loss row by row in float64, without what is masked, with mistakes: a scalar."""
    total, rows = torch.zeros((), dtype=torch.float64), len(mask)
    for i, keep in enumerate(mask):
        new, was, start = (x[i][keep].double() for x in (logprobs, old, ref))
        a, length = advantages[i].double(), max(1, len(new))
        apart = new - (start if "ref in ratio" in wrong else was)
        ratio = pick(wrong, {"inverse": -apart, "sequence": apart.sum()}, apart).exp()
        clipped = a * (ratio.clamp(max=1 + clip) if a > 0 else ratio.clamp(min=1 - clip))
        gain = pick(wrong, {"no clip": ratio * a, "clip alone": ratio.clamp(1 - clip, 1 + clip) * a}, clipped)
        d = new - (was if "old in kl" in wrong else start)
        kl = (-d).exp() - 1 + d
        kl = pick(wrong, {"k1": d, "mirrored": d.exp() - 1 - d, "kl sign": -kl}, kl)
        counts = {"tokens": mask.sum(), "sum": rows, "constant": mask.numel()}
        count = pick(wrong, counts | {"real rows": length * mask.any(1).sum()}, rows * length)
        total = total + (beta * kl - gain).sum() / count
    return -total if "sign" in wrong else total


def batch(rows: int = 5, length: int = 6, apart: float = 0.4, empty: bool = False) -> tuple[Tensor, ...]:
    """Log-probs of three policies, `apart` from each other, advantages of both signs, and a mask."""
    mask, new = ragged_mask(rows, length), -torch.rand(rows, length) * 2 - 0.1
    mask[rows // 2] &= not empty
    old, ref = (new + apart * torch.randn(rows, length) for _ in range(2))
    return new, old, ref, torch.randn(rows) + torch.tensor([1.0, -1.0] + [0.0] * (rows - 2)), mask


def check_loss(f, *arguments) -> None:
    parts = {"the loss": None, "the gradient in logprobs": 0}
    compare_loss(f, arguments, grpo_loss, sentences(PLANTED, LOSS_MISTAKES), parts, not_finite=NAN)


@q3.case("the first update: all three policies are one")
def _(f):
    new, _, _, *rest = batch()
    check_loss(f, new, new, new, *rest, 0.2, 0.05)


q3.case("policies apart, no KL: ratio and clip")(lambda f: [check_loss(f, *batch(), clip, 0.0) for clip in (0.2, 0.5)])


@q3.case("policies apart, with the KL")
def _(f):
    check_loss(f, *batch(), 0.2, 0.5)
    check_loss(f, *batch(3, 9, apart=0.1), 0.3, 0.04)


@q3.case("only the KL: all advantages are 0")
def _(f):
    *logprobs, advantages, mask = batch()
    check_loss(f, *logprobs, 0 * advantages, mask, 0.2, 0.1)


q3.case("a row without tokens adds 0 and counts as a row")(lambda f: check_loss(f, *batch(empty=True), 0.2, 0.1))


@q3.case("inf and nan after the end do no harm")
def _(f):
    *logprobs, advantages, mask = batch()
    junk = zip(logprobs, (-torch.inf, torch.nan, torch.inf), strict=True)
    check_loss(f, *(x.masked_fill(~mask, value) for x, value in junk), advantages, mask, 0.2, 0.1)


q4 = Question("q4", "expected_gradients", hint="All actions^G groups, their probabilities, and the estimate of each.")

GRADIENT_MISTAKES = {
    "not divided": "You did not divide by the deviation in the second row.",
    "population": "You divided by n inside the deviation: that of a sample has n - 1.",
    "no baseline": "You did not subtract the mean of the group.",
    "no eps": "The second row is nearly right: add 1e-4 to the deviation, in every group.",
    "flipped": "The rows are the wrong way round: first centred, then normalised.",
    "sum": "You added up over the group: take the mean of its answers.",
    "repeats": "You went through each collection of actions once: every order in which it is drawn is a group.",
}


def group_gradients(logits: Tensor, rewards: Tensor, n: int, wrong: str = "") -> Tensor:
    """Expected gradients with group-centred and with normalised advantages, or with a mistake: [2, actions], float64.

    By how often each action occurs in a group.
    """
    pi, rewards = logits.double().softmax(0), rewards.double()
    found, eps = torch.zeros(2, len(pi), dtype=torch.float64), 1e-9 if wrong == "no eps" else EPS
    for counts in itertools.product(range(n + 1), repeat=len(pi)):
        if sum(counts) == n:
            c = torch.tensor(counts, dtype=torch.float64)
            ways = 1 if wrong == "repeats" else math.factorial(n) / math.prod(map(math.factorial, counts))
            apart = rewards - c @ rewards / n
            deviation = (c @ apart**2 / (n - (wrong != "population"))).sqrt() + eps
            advantages = rewards if wrong == "no baseline" else apart
            weights = c * torch.stack([advantages, advantages / (1 if wrong == "not divided" else deviation)])
            found += ways * (pi**c).prod() * (weights - weights.sum(1, keepdim=True) * pi)
    found = found if wrong == "sum" else found / n
    return found.flip(0) if wrong == "flipped" else found


def check_gradients(f, logits: Tensor, rewards: Tensor, n: int) -> None:
    compare_named(f, group_gradients, (logits, rewards, n), GRADIENT_MISTAKES)


def apart(actions: int) -> Tensor:
    """Rewards that differ, all of them eighths: the mean of equal ones does not round."""
    return torch.randperm(33)[:actions] / 8


q4.case("two actions in groups of 2, 3 and 6")(
    lambda f: [check_gradients(f, torch.randn(2), torch.tensor([1.0, 0.0]), n) for n in (3, 2, 6)]
)


@q4.case("three and four actions, any rewards")
def _(f):
    check_gradients(f, torch.randn(3), apart(3), 4)
    check_gradients(f, torch.randn(4), apart(4) - 0.5, 3)


@q4.case("rewards all alike: no gradient at all")
def _(f):
    compare(f(torch.randn(3), torch.ones(3), 3), torch.zeros(2, 3), what="the gradient")
    check_gradients(f, torch.randn(3), apart(3), 3)


QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4}
