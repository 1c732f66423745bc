"""q4: the drift of the length of answers."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw

q4 = Question("q4", "drift", hint="How probable is an answer of L tokens, and what is the derivative of its log-prob?")


def drift_by_loop(weights: Tensor, cut: float, q: float, wrong: str = "") -> Tensor:
    """The drift by going through all answers, each token's score by itself; `wrong` names a usual mistake."""
    limit, total = len(weights), 0.0
    cases = [(length, True, weights[length - 1].item()) for length in range(1, limit + 1)] + [(limit, False, cut)]
    for length, ended, weight in cases:
        if wrong == "no cut" and not ended:
            continue
        chance = (1 - q) ** (length - 1) * (q if ended else 1 - q)
        stops = ended or wrong == "cut as ended"
        score = sum(1 - q if stops and t == length else -q for t in range(1, length + 1))
        if wrong == "by q":
            score = score / (q * (1 - q))
        if wrong == "one token":
            score = 1 - q if ended else -q
        if wrong == "mean of tokens":
            score = score / length
        if wrong == "not weighed by chance":
            chance = 1.0
        if wrong == "one more":
            weight = weights[min(length, limit - 1)].item() if ended else cut
        total += chance * weight * score
    return torch.tensor(total, dtype=torch.float64)


DRIFTS = {
    "no cut": "You left out the answers that are cut off: they have no end token, but they have a score.",
    "cut as ended": "An answer that is cut off never stopped: its score is that of going on, limit times.",
    "by q": "That is the derivative with respect to q. Asked for is theta, with q = sigmoid(theta).",
    "one token": "Every token of an answer has a score, not only its last.",
    "mean of tokens": "The weights are those of each token already: don't divide by the length once more.",
    "not weighed by chance": "You added up the answers as if all were equally likely: weigh each by its probability.",
    "one more": "weights[0] is for answers of one token: the place of a length is one less than the length.",
}


def check_drift(f, weights: Tensor, cut: float, q: float) -> None:
    expected = drift_by_loop(weights, cut, q)
    mistakes = {sentence: drift_by_loop(weights, cut, q, wrong) for wrong, sentence in DRIFTS.items()}
    mistakes["The sign is wrong: positive means that the policy learns to stop more often."] = -expected
    compare(f(weights, cut, q), expected, mistakes, what=f"the drift at q = {q:.3f}", atol=1e-6)


@q4.case("any weights, a short limit")
def _(f):
    for limit in (2, 5):
        check_drift(f, torch.rand(limit) + 0.1, torch.rand(()).item(), 0.1 + 0.5 * torch.rand(()).item())


@q4.case("GRPO's weights, 1 / length, and a longer limit")
def _(f):
    limit = draw(20, 60)
    check_drift(f, 1 / torch.arange(1, limit + 1), 1 / limit, 0.03 + 0.2 * torch.rand(()).item())


@q4.case("answers that are cut off are left out, and an answer of one token at most")
def _(f):
    check_drift(f, torch.rand(()) * torch.ones(draw(4, 30)), 0.0, 0.05 + 0.1 * torch.rand(()).item())
    check_drift(f, torch.rand(1), torch.rand(()).item(), 0.2 + 0.6 * torch.rand(()).item())


@q4.case("a constant, whatever it is: no drift")
def _(f):
    constant, q = 0.1 + torch.rand(()).item(), 0.05 + 0.5 * torch.rand(()).item()
    limit = draw(3, 40)
    check_drift(f, torch.full((limit,), constant), constant, q)
    check_drift(f, torch.full((limit,), constant), constant / 2, q)
