"""q4: a KL penalty with the right value and the right gradient."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw

q4 = Question("q4", "penalty", hint="Which of the three has the value that is wanted, and which has the gradient?")


def kl_estimators(logprobs: Tensor, ref_logprobs: Tensor) -> dict[str, Tensor]:
    """k1, k2 and k3 of each token, from the ratio of the probabilities."""
    ratio = (ref_logprobs - logprobs).exp()
    return {"k1": -ratio.log(), "k2": ratio.log() ** 2 / 2, "k3": ratio - 1 - ratio.log()}


def two_policies(tokens: int, distance: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs of all tokens of a small vocabulary, under the policy and under the reference."""
    ref = torch.randn(tokens).log_softmax(0)
    return (ref + distance * torch.randn(tokens)).log_softmax(0), ref


def values_of(f, pi: Tensor, ref: Tensor) -> Tensor:
    """What a function says of each token; AssertionError unless that is a number for each."""
    found = f(pi, ref)
    if found is None:
        raise AssertionError("the result is None: is there a `return`?")
    try:
        found = torch.as_tensor(found).detach().double()
    except (TypeError, ValueError, RuntimeError):
        raise AssertionError(f"the result should be a tensor, not {type(found).__name__}") from None
    if found.shape != pi.shape:
        raise AssertionError(f"the result has shape {list(found.shape)}, expected {list(pi.shape)}: one for each token")
    if not found.isfinite().all():
        raise AssertionError("the result has values that are not finite")
    return found


@q4.case("its value: right on average")
def _(f):
    for distance in (0.5, 1.5):
        pi, ref = two_policies(draw(5, 9), distance)
        weights, all_k = pi.exp().double(), kl_estimators(pi.double(), ref.double())
        mistakes = {
            "On average that is the KL of the reference from the policy, the other way round: d is logprobs - "
            "ref_logprobs.": (weights * kl_estimators(ref.double(), pi.double())["k3"]).sum(),
            "That is k2: its value is biased.": (weights * all_k["k2"]).sum(),
            "Your value is 0 on average.": torch.zeros((), dtype=torch.float64),
        }
        exact = (weights * (pi - ref).double()).sum()
        compare((weights * values_of(f, pi, ref)).sum(), exact, mistakes, what="the mean over tokens")


@q4.case("its value: never negative, 0 where the two agree, and not flat")
def _(f):
    pi, ref = two_policies(draw(5, 9))
    found = values_of(f, pi, ref)
    if (found < -1e-6).any():
        where = "that is k1" if same_as(found, pi - ref) else f"{found.min():.4f} at a token"
        raise AssertionError(f"The value is negative: {where}.")
    if not same_as(values_of(f, ref, ref), torch.zeros_like(ref)):
        raise AssertionError("Where policy and reference agree the value should be 0.")
    if (found[(pi - ref).abs() > 0.05] <= 0).any():
        raise AssertionError("The value is 0 where policy and reference differ.")
    some = torch.randint(len(pi), (draw(2, 4),))  # a batch holds a few tokens of a vocabulary, some of them twice
    if not same_as(values_of(f, pi[some], ref[some]), found[some]):
        raise AssertionError("What you say of a token depends on the others in the batch: use its own two log-probs.")


def same_as(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), atol=1e-6)


@q4.case("its gradient: that of the KL, on average")
def _(f):
    for tokens in (draw(4, 6), draw(7, 9)):
        pi, ref = two_policies(tokens)
        weights, d = pi.exp().double(), (pi - ref).double()
        by_token = f.gradient(pi, ref, wrt=0)
        if by_token is None or torch.as_tensor(by_token).shape != pi.shape:
            raise AssertionError("one number for each token is asked for, with a gradient in its log-prob")
        of_kl, found = in_logits(weights * d, weights), in_logits(weights * by_token.detach().double(), weights)
        mistakes = {
            "The mean gradient is 0: that is k1, and it pulls nowhere.": torch.zeros_like(weights),
            "That is the gradient of k3, which is that of the KL in the other direction.": weights - ref.exp().double(),
            "The gradient has the wrong sign: it pushes the policy away from the reference.": -of_kl,
            "The two gradients are added up: detach what is there for its value alone.": of_kl
            + weights
            - ref.exp().double(),
            "The gradient is twice as long: d * d has no half.": 2 * of_kl,
        }
        compare(found, of_kl, mistakes, what="the mean gradient in the logits", atol=1e-5)


def in_logits(by_logprob: Tensor, weights: Tensor) -> Tensor:
    """A gradient in the log-probs of all tokens as one in their logits."""
    return by_logprob - weights * by_logprob.sum()
