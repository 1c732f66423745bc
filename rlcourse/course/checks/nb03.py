"""Checks of the exercises of lesson 03: GRPO in the loop, a silent data set, a KL penalty, the mean of an estimate."""

import itertools
import math

import torch
from torch import Tensor

from rlcourse.course.checks import Question, between, compare, draw
from rlcourse.course.checks.builders import expect_loss, ragged_mask
from rlcourse.course.checks.comparison import as_tensor

EPS = 1e-4

q1 = Question("q1", "grpo", hint="Lesson 02's minimum and the KL per token, then a mean along rows, and one over them.")
LOSS = "no clip", "minimum", "upside down", "sequence", "ref in ratio", "sign", "tokens", "width", "sum"
expect_loss(q1, *LOSS, "no kl", "kl sign", "k1", "mirrored", "old in kl", grpo=True)


def check_grpo(f, apart: float, A: float = 1.0) -> None:
    mask, old = ragged_mask(6, 7), -torch.rand(6, 7) - 0.5
    new, ref = (old + apart * torch.randn(6, 7) for _ in range(2))
    q1.check(f, *(x * mask for x in (new, old, ref)), A * torch.randn(6, 1), mask)


q1.case("policies apart, some tokens clipped")(lambda f: check_grpo(f, 0.6))
q1.case("only the KL: all advantages are 0")(lambda f: check_grpo(f, 0.6, A=0.0))

q2 = Question("q2", "data_set", hint="Which problems are silent in groups of any size? Which are most rarely silent?")
MOST, CLOSE = 1000, 0.01


def check_data(f, n: int, low: float, high: float) -> None:
    """A share of silent groups from `low` to `high` of the way from the least that is possible to 1."""
    mean = between(0.25, 0.42) if draw(0, 1) else between(0.58, 0.75)
    least = mean**n + (1 - mean) ** n
    share = least + (1 - least) * between(low, high)
    found = as_tensor(f(mean, share, n)).double()
    if found.dim() != 1 or not 1 <= len(found) <= MOST:
        raise AssertionError(f"the result has shape {list(found.shape)}: return 1 to {MOST} success rates")
    if not ((found >= 0) & (found <= 1)).all():
        raise AssertionError("a success rate is a probability: all must lie between 0 and 1")
    got_mean, got = found.mean().item(), sum(p**n + (1 - p) ** n for p in found.tolist()) / len(found)
    wanted = f"asked for are mean {mean:.3f} and {share:.1%}"
    if max(abs(got_mean - mean), abs(got - share)) > CLOSE:
        raise AssertionError(f"your problems have mean {got_mean:.3f} and {got:.1%} silent groups of {n}; {wanted}")


q2.case("half of the way from the fewest silent groups to all, in pairs, too, where even the middle is often silent")(
    lambda f: [check_data(f, n, 0.3, 0.7) for n in (8, 4, 2)]
)
q2.case("nearly all groups silent, and few of them")(
    lambda f: [check_data(f, 8, *ends) for ends in ((0.9, 0.96), (0.08, 0.15))]
)

q3 = Question("q3", "penalty", hint="Which of the three has the value that is wanted, and which has the gradient?")


def two_policies(tokens: int, distance: float = 1.0) -> tuple[Tensor, Tensor]:
    ref = torch.randn(tokens).log_softmax(0)
    return (ref + distance * torch.randn(tokens)).log_softmax(0), ref


def values_of(f, pi: Tensor, ref: Tensor) -> Tensor:
    """AssertionError unless there is a finite number for each token."""
    found = as_tensor(f(pi, ref)).double()
    said = f"the result has shape {list(found.shape)}, expected {list(pi.shape)}: a finite number, one for each token"
    assert found.shape == pi.shape and found.isfinite().all(), said
    return found


@q3.case("its value: right on average")
def _(f):
    for distance in (0.5, 1.5):
        pi, ref = two_policies(draw(5, 9), distance)
        weights, d = pi.exp().double(), (pi - ref).double()
        mistakes = {
            "That is the KL the other way round: d is logprobs - ref_logprobs.": weights @ (d.exp() - 1 - d),
            "That is k2: its value is biased.": weights @ d**2 / 2,
        }
        compare(weights @ values_of(f, pi, ref), weights @ d, mistakes, what="the mean over tokens")


@q3.case("its value: never negative, 0 where the two agree, and not flat")
def _(f):
    pi, ref = two_policies(draw(5, 9))
    found = values_of(f, pi, ref)
    assert (found > -1e-6).all(), f"The value is negative, as k1 can be: {found.min():.4f} at a token."
    assert values_of(f, ref, ref).abs().max() < 1e-6, "Where policy and reference agree the value should be 0."
    assert (found[(pi - ref).abs() > 0.05] > 0).all(), "The value is 0 where policy and reference differ."
    some = torch.randint(len(pi), (draw(2, 4),))  # a batch holds a few tokens of a vocabulary, some of them twice
    said = "What you say of a token depends on the others in the batch: use its own two log-probs."
    assert torch.allclose(values_of(f, pi[some], ref[some]), found[some], atol=1e-6), said


@q3.case("its gradient: that of the KL, on average")
def _(f):
    for tokens in (draw(4, 6), draw(7, 9)):
        pi, ref = two_policies(tokens)
        weights, d = pi.exp().double(), (pi - ref).double()
        of_kl, of_k3 = weights * (d - weights @ d), weights - ref.exp().double()  # in the logits
        mistakes = {
            "The mean gradient is 0: that is k1, and it pulls nowhere.": torch.zeros_like(weights),
            "That is the gradient of k3, which is that of the KL in the other direction.": of_k3,
            "The gradient has the wrong sign: it pushes the policy away from the reference.": -of_kl,
            "The two gradients are added up: detach what is there for its value alone.": of_kl + of_k3,
        }
        by_token = weights * as_tensor(f.gradient(pi, ref, wrt=0)).double()
        compare(by_token - weights * by_token.sum(), of_kl, mistakes, what="the mean gradient in the logits")


q4 = Question("q4", "expected_gradients", hint="All actions^G groups, their probabilities, and the estimate of each.")


@q4.expects({
    "not divided": "You did not divide by the deviation in the second row.",
    "population": "You divided by n inside the deviation: that of a sample has n - 1.",
    "no baseline": "You did not subtract the mean of the group.",
    "no eps": "The second row is nearly right: add 1e-4 to the deviation, in every group.",
    "sum": "You added up over the group: take the mean of its answers.",
    "repeats": "You went through each collection of actions once: every order in which it is drawn is a group.",
})  # fmt: skip
def group_gradients(logits: Tensor, rewards: Tensor, n: int, wrong: str = "") -> Tensor:
    """Expected gradients with group-centred and with normalised advantages, or with a mistake: [2, actions], float64.
    By how often each action occurs in a group."""
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
    return found if wrong == "sum" else found / n


def apart(actions: int) -> Tensor:
    """Rewards that differ, all of them eighths."""
    return torch.randperm(33)[:actions] / 8


q4.case("two to four actions in groups of 2, 3, 4 and 6")(lambda f: [
    q4.check(f, torch.randn(actions), apart(actions) - 0.5, n)
    for actions, n in ((2, 3), (2, 2), (2, 6), (3, 4), (4, 3))
])  # fmt: skip
q4.case("rewards all alike: no gradient at all")(lambda f: [
    compare(f(torch.randn(3), torch.ones(3), 3), torch.zeros(2, 3), what="the gradient"),
    q4.check(f, torch.randn(3), apart(3), 3),
])  # fmt: skip
