"""Checks of the exercises of lesson 04: gradients to identify, groups to weigh, a loss to mend, a drift to compute."""

import itertools
import math

import torch
from torch import Tensor

from rlcourse.course.checks import Question, as_tensor, between, compare, draw
from rlcourse.course.checks.builders import Names, compare_loss, compare_named, lengths_mask, pick, sentences

q1 = Question("q1", "divisions", hint="Take an unknown factor out first. Which two tokens would you compare?")


def gradient_of(by_length: int, by_std: int, rewards: Tensor, lengths: list[int], n: int) -> Tensor:
    """The gradient by token of a loss with these divisions and a drawn factor, by loops: [rows, longest]."""
    factor = 10 ** between(-4, 0)
    found = torch.zeros(len(rewards), max(lengths), dtype=torch.float64)
    for i, length in enumerate(lengths):
        group = rewards[i // n * n : i // n * n + n].double()
        advantage = (rewards[i].double() - group.mean()).item()
        if by_std and group.std() > 0:
            advantage /= group.std().item()
        for t in range(length):
            found[i, t] = -factor * advantage / (length if by_length else 1)
    return found.float()


def check_kinds(f, rewards: Tensor, lengths: list[int], n: int) -> None:
    """All four kinds, in an order that is drawn."""
    kinds, mask = list(itertools.product((0, 1), repeat=2)), lengths_mask(lengths, max(lengths))
    for place in torch.randperm(4).tolist():
        by_length, by_std = kinds[place]
        truth = f"{('not ', '')[by_length]}divided by the length and {('not ', '')[by_std]}by the deviation"
        what = f"the answer for a gradient that was {truth}"
        found = as_tensor(f(gradient_of(by_length, by_std, rewards, lengths, n), rewards, mask, n), what)
        swapped = "The two answers are in the wrong order: first the length, then the deviation."
        mistakes = {swapped: torch.tensor([by_std, by_length])}
        compare(found.double().round().long(), torch.tensor([by_length, by_std]), mistakes, what)


def unlike(n: int, groups: int) -> Tensor:
    """Rewards 0 and 1 of groups whose numbers of right answers all differ, none 0 or n, nor mirrored: [groups * n]."""
    counts = (1 + torch.randperm(n // 2))[:groups]
    return torch.cat([(torch.randperm(n) < k).float() for k in counts.tolist()])


def unlike_lengths(rows: int, high: int = 30) -> list[int]:
    return (2 + torch.randperm(high - 2)[:rows]).tolist()


q1.case("rewards 0 and 1, three groups of eight")(lambda f: check_kinds(f, unlike(8, 3), unlike_lengths(24), 8))


@q1.case("groups without signal among them, the first too")
def _(f):
    signal = unlike(6, 2)
    rewards = torch.cat([torch.ones(6), signal[:6], torch.zeros(6), signal[6:]])
    check_kinds(f, rewards, unlike_lengths(24), 6)


@q1.case("rewards of any size, and an answer without a token")
def _(f):
    lengths = unlike_lengths(12)
    lengths[draw(0, 11)] = 0
    check_kinds(f, torch.cat([0.1 * torch.rand(4), torch.rand(4), 5 * torch.rand(4) - 2]), lengths, 4)


q1.case("answers to one prompt that are all of one length")(
    lambda f: check_kinds(f, unlike(8, 3), [length for length in unlike_lengths(3, 60) for _ in range(8)], 8)
)


q2 = Question("q2", "group_weights", hint="With p = k / n: k answers have |A| = 1 - p, the other n - k have |A| = p.")


def weights_by_group(successes: list[int], n: int, ddof: int = 1) -> Tensor:
    """Sum of |A| of a group with k right answers, centered and divided by the std: from the rewards themselves."""
    rewards = (torch.arange(n) < torch.tensor(successes)[:, None]).double()
    total = (rewards - rewards.mean(1, keepdim=True)).abs().sum(1)
    return torch.stack([total, total / rewards.std(1, correction=ddof)]).nan_to_num()


def check_weights(f, successes: list[int], n: int) -> None:
    expected, p = weights_by_group(successes, n), torch.tensor(successes) / n
    shapes = torch.stack([p * (1 - p), (p * (1 - p)).sqrt()])
    mistakes = {
        "You have p (1 - p) and its root: the right shapes, but not the sums of |A|.": shapes,
        "The std is that of a sample: n - 1 in its denominator.": weights_by_group(successes, n, ddof=0),
        "The two rows are in the wrong order: Dr. GRPO first.": expected.flip(0),
        "You took the weight of one answer: add up the group.": expected / n,
        "You counted the right answers alone: the wrong ones weigh as much again.": expected / 2,
    }
    compare(f(torch.tensor(successes), n), expected, mistakes, what=f"the weights for n = {n}", atol=1e-4)


q2.case("a group of eight: every number of right answers from 1 to 7")(
    lambda f: check_weights(f, (1 + torch.randperm(7)).tolist(), 8)
)
q2.case("groups that are all wrong or all right weigh 0 in both")(
    lambda f: [check_weights(f, [0, n, draw(1, n - 1)], n) for n in (draw(4, 400),)]
)
q2.case("other sizes of group")(
    lambda f: [check_weights(f, [1, draw(1, n - 1), n - 1], n) for n in (2, 5, draw(64, 400))]
)

q3 = Question("q3", "mended_loss", hint="Take the complaints one by one: each points at one line.")

# The planted mistakes, in the order in which a card names those that are left.
PLANTED = {
    "baseline": "its baseline: the mean reward is that of the batch and not of the prompt's group",
    "std": "its advantages: they are still divided by a deviation, so the size of the rewards is lost",
    "clip": "its clip: it takes the clipped product even where the other is smaller, and wrong tokens get away",
    "divisor": "its divisor: the number of tokens of this batch is drawn with the answers and is no constant",
}
PADDING = "its padding: what stands there is set to 0 only after the exponential, and 0 times infinity is nan"
LOSS_MISTAKES = {
    "length": "You divided each answer by its own length: that is GRPO's, and the other deletion.",
    "group std": "You divide by the deviation of the group: that is GRPO's, and to be deleted too.",
    "width": "You divided by the width of the batch: the constant is max_new_tokens.",
    "no rows": "You forgot to divide by the number of rows.",
    "no limit": "You forgot to divide by max_new_tokens.",
    "sign": "The sign is wrong: the loss is minus what should grow.",
    "upside down": "The ratio is upside down: it is new over old.",
    "no clip": "No token is clipped: is the minimum taken with the clipped product?",
}
BOTH = {("group std", "length"): "Both of GRPO's divisions are back: the group's deviation and the answer's length."}


def dr_grpo_loss(logprobs, old, rewards, mask, n: int, limit: int, clip: float = 0.2, wrong: Names = ()) -> Tensor:
    """The loss over the real tokens in float64, its clip by the sign of the advantage, with mistakes: a scalar."""
    row, r = mask.nonzero()[:, 0], rewards.double()
    peers = r.expand(len(r), -1) if "baseline" in wrong else r.view(-1, n).repeat_interleave(n, 0)
    a = (r - peers.mean(1)) / pick(wrong, {"std": r.std() + 1e-4, "group std": peers.std(1) + 1e-4}, 1)
    a, new, old = a[row], logprobs[mask].double(), old[mask].double()
    ratio = (old - new if "upside down" in wrong else new - old).exp()
    gain = torch.where(a > 0, ratio.clamp(max=1 + clip), ratio.clamp(min=1 - clip)) * a
    gain = pick(wrong, {"clip": ratio.clamp(1 - clip, 1 + clip) * a, "no clip": ratio * a}, gain)
    rows, lengths = len(mask), mask.sum(1)[row]
    counts = {"divisor": mask.sum(), "length": rows * lengths, "width": mask.numel()}
    count = pick(wrong, counts | {"no rows": limit, "no limit": rows}, rows * limit)
    return ((gain if "sign" in wrong else -gain) / count).sum()


def check_loss(f, *arguments) -> None:
    said, parts = BOTH | sentences(PLANTED, LOSS_MISTAKES), {"the loss": None, "the gradient": 0}
    compare_loss(f, arguments, dr_grpo_loss, said, parts, not_finite=f"One mistake is left: {PADDING} (padding).")


def drawn(moved: float):
    """Six answers in two groups of three; the policy has moved by about `moved` since it sampled."""
    mask = lengths_mask([3, 7, 1, 5, 2, 7], 7)
    old = -torch.rand(6, 7) * 3
    rewards = torch.tensor([1.0, 1, 0, 0, 1, 0]) + 0.3 * torch.rand(6)
    return (old + moved * torch.randn(6, 7)) * mask, old * mask, rewards, mask, 3, 10


q3.case("a policy that has moved, some tokens clipped")(lambda f: check_loss(f, *drawn(0.5)))


@q3.case("an easy prompt and a hard one, rewards of any size")
def _(f):
    logprobs, old, rewards, mask, n, limit = drawn(0.3)
    check_loss(f, logprobs, old, 4 * rewards + torch.tensor([5.0, 5, 5, 0, 0, 0]), mask, n, limit + draw(1, 80))


@q3.case("a token of a wrong answer that has become three times as probable is still pushed down")
def _(f):
    old = -1.5 - torch.rand(2, 4)
    new = old + torch.tensor([1.1, 0.16, -0.6, -0.16]) * (1 + 0.1 * torch.rand(2, 4))
    check_loss(f, new, old, torch.tensor([1.0, 0.0]), torch.ones(2, 4, dtype=torch.bool), 2, 4, between(0.1, 0.14))


@q3.case("padding of minus infinity: the loss and its gradient are finite, and 0 there")
def _(f):
    new, old, rewards, mask, *sizes = drawn(0.5)
    for junk in ((-math.inf, -math.inf), (200.0, 0.0), (0.0, -math.inf)):
        check_loss(f, *(x.masked_fill(~mask, j) for x, j in zip((new, old), junk, strict=True)), rewards, mask, *sizes)


q4 = Question("q4", "drift", hint="How probable is an answer of L tokens, and what is the derivative of its log-prob?")

DRIFTS = {
    "no cut": "You left out the answers that are cut off: they have no end token, but they have a score.",
    "cut as ended": "An answer that is cut off never stopped: its score is that of going on, limit times.",
    "by q": "That is the derivative with respect to q. Asked for is theta, with q = sigmoid(theta).",
    "mean of tokens": "The weights are those of each token already: don't divide by the length once more.",
    "not weighed by chance": "You added up the answers as if all were equally likely: weigh each by its probability.",
    "sign": "The sign is wrong: positive means that the policy learns to stop more often.",
}


def drift_by_loop(weights: Tensor, cut: float, q: float, wrong: str = "") -> float:
    """The drift by going through all answers, each token's score by itself; `wrong` names a usual mistake."""
    limit, total = len(weights), 0.0
    cases = [(length, True, weights[length - 1].item()) for length in range(1, limit + 1)] + [(limit, False, cut)]
    for length, ended, weight in cases:
        chance = (1 - q) ** (length - 1) * (q if ended else 1 - q)
        stops = ended or wrong == "cut as ended"
        score = sum(1 - q if stops and t == length else -q for t in range(1, length + 1))
        factors = {"by q": 1 / (q * (1 - q)), "mean of tokens": 1 / length, "not weighed by chance": 1 / chance}
        factors |= {"sign": -1, "no cut": ended}
        total += chance * weight * score * factors.get(wrong, 1)
    return total


def check_drift(f, *given) -> None:
    compare_named(f, drift_by_loop, given, DRIFTS, what=f"the drift at q = {given[-1]:.3f}", atol=1e-6)


q4.case("any weights, a short limit")(
    lambda f: [check_drift(f, torch.rand(n) + 0.1, between(0, 1), between(0.1, 0.6)) for n in (2, 5)]
)
q4.case("GRPO's weights, 1 / length, and a longer limit")(
    lambda f: [check_drift(f, 1 / torch.arange(1, n + 1), 1 / n, between(0.03, 0.23)) for n in (draw(20, 60),)]
)


@q4.case("answers that are cut off are left out, and an answer of one token at most")
def _(f):
    check_drift(f, torch.full((draw(4, 30),), between(0, 1)), 0.0, between(0.05, 0.15))
    check_drift(f, torch.rand(1), between(0, 1), between(0.2, 0.8))


@q4.case("a constant, whatever it is: no drift")
def _(f):
    constant, q, limit = between(0.1, 1.1), between(0.05, 0.55), draw(3, 40)
    for cut in (constant, constant / 2):
        check_drift(f, torch.full((limit,), constant), cut, q)


QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4}
