"""Checks of the exercises of lesson 04: gradients to identify, groups to weigh, a loss to mend, a drift to compute. The
references are loops over single tokens and answers, in float64."""

import itertools
import math

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw


def lengths_mask(lengths: list[int], width: int) -> Tensor:
    """bool [rows, width], True on the first tokens of each row."""
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def tokens(mask: Tensor) -> list[tuple[int, int]]:
    """Places of the tokens that count."""
    return [tuple(place) for place in mask.nonzero().tolist()]


# q1 --------------------------------------------------------------------------------------------------------------

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


# q2 --------------------------------------------------------------------------------------------------------------

q2 = Question("q2", "group_weights", hint="With p = k / n: k answers have |A| = 1 - p, the other n - k have |A| = p.")


def weights_by_group(successes: list[int], n: int, ddof: int = 1) -> Tensor:
    """Sum of |A| of a group with k right answers, centered and divided by the std: from the rewards themselves."""
    rows = []
    for k in successes:
        rewards = [1.0] * k + [0.0] * (n - k)
        mean = sum(rewards) / n
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (n - ddof))
        total = sum(abs(r - mean) for r in rewards)
        rows.append([total, total / std if std > 0 else 0.0])
    return torch.tensor(rows).T


def weight_mistakes(successes: list[int], n: int) -> dict[str, Tensor]:
    expected, p = weights_by_group(successes, n), torch.tensor(successes) / n
    variance = p * (1 - p)
    scales = {"p (1 - p)": 1, "n p (1 - p)": n, "2 p (1 - p)": 2}
    unscaled = {
        f"You have {name} and a root like it: the right shapes, but not the sums of |A|.": torch.stack(
            [factor * variance, factor * variance.sqrt()]
        )
        for name, factor in scales.items()
    }
    return unscaled | {
        "The std is that of a sample: n - 1 in its denominator.": weights_by_group(successes, n, ddof=0),
        "The two rows are in the wrong order: Dr. GRPO first.": expected.flip(0),
        "You took the weight of one answer: add up the group.": expected / n,
        "You counted the right answers alone: the wrong ones weigh as much again.": expected / 2,
        "You divided by the variance: GRPO divides by its root.": torch.stack(
            [expected[0], (expected[0] / (variance * n / (n - 1))).nan_to_num(0.0)]
        ),
    }


@q2.case("a group of eight: every number of right answers from 1 to 7")
def _(f):
    k = (1 + torch.randperm(7)).tolist()
    compare(f(torch.tensor(k), 8), weights_by_group(k, 8), weight_mistakes(k, 8))


@q2.case("groups that are all wrong or all right weigh 0 in both")
def _(f):
    n = draw(4, 400)
    k = [0, n, draw(1, n - 1)]
    compare(f(torch.tensor(k), n), weights_by_group(k, n), weight_mistakes(k, n))


@q2.case("other sizes of group")
def _(f):
    for n in (2, 5, draw(64, 400)):
        k = [1, draw(1, n - 1), n - 1]
        compare(f(torch.tensor(k), n), weights_by_group(k, n), what=f"the weight for n = {n}", atol=1e-4)


# q3 --------------------------------------------------------------------------------------------------------------

q3 = Question("q3", "mended_loss", hint="Take the complaints one by one: each points at one line.")

# The planted mistakes, in the order in which a card names those that are left.
PLANTED = {
    "padding": "its padding: what stands there is set to 0 only after the exponential, and 0 times infinity is nan",
    "baseline": "its baseline: the mean reward is that of the batch and not of the prompt's group",
    "std": "its advantages: they are still divided by a deviation, so the size of the rewards is lost",
    "clip": "its clip: it takes the clipped product even where the other is smaller, and wrong tokens get away",
    "divisor": "its divisor: the number of tokens of this batch is drawn with the answers and is no constant",
}
LIMIT = 10


def loss_by_loop(logprobs, old_logprobs, rewards, mask, n, limit, clip=0.2, wrong=()) -> Tensor:
    """The loss token by token in float64, with some of the mistakes in it; `wrong` knows others too."""
    total, rewards = torch.zeros((), dtype=torch.float64), rewards.double()
    for i, t in tokens(mask):
        peers = rewards if "baseline" in wrong else rewards[i // n * n : i // n * n + n]
        advantage = rewards[i] - peers.mean()
        if "std" in wrong:
            advantage = advantage / (rewards.std() + 1e-4)
        if "group std" in wrong:
            advantage = advantage / (peers.std() + 1e-4)
        ratio = (logprobs[i, t].double() - old_logprobs[i, t].double()).exp()
        clipped = ratio.clamp(1 - clip, 1 + clip) * advantage
        gain = clipped if "clip" in wrong else torch.minimum(ratio * advantage, clipped)
        by = mask.sum() if "divisor" in wrong else len(mask) * limit
        if "length" in wrong:
            by = len(mask) * mask[i].sum()
        if "width" in wrong:
            by = len(mask) * mask.shape[1]
        total = total - gain / by
    return total


NAMED = {  # mistakes of readers, which the colleague did not make
    "You divided each answer by its own length: that is GRPO's, and the other deletion.": ("length",),
    "Both of GRPO's divisions are back: the deviation of the group and the length of the answer.": (
        "group std",
        "length",
    ),
    "You divide by the deviation of the group: that is GRPO's, and to be deleted too.": ("group std",),
    "You divided by the width of the batch: the constant is max_new_tokens.": ("width",),
}


def loss_mistakes(arguments) -> dict[str, Tensor]:
    """Losses with every choice of the planted mistakes and with others, by the sentence that names what is left."""
    found, finite = {}, [name for name in PLANTED if name != "padding"]
    for count in range(1, len(finite) + 1):
        for wrong in itertools.combinations(finite, count):
            left = "One mistake is left" if count == 1 else f"{count} mistakes are left, one of them"
            found[f"{left}: {PLANTED[wrong[0]]} ({', '.join(wrong)})."] = loss_by_loop(*arguments, wrong=wrong)
    found |= {sentence: loss_by_loop(*arguments, wrong=wrong) for sentence, wrong in NAMED.items()}
    logprobs, old, *rest = arguments
    right = loss_by_loop(*arguments)
    return found | {
        "The sign is wrong: the loss is minus what should grow.": -right,
        "You forgot to divide by the number of rows.": right * len(rest[1]),
        "You forgot to divide by max_new_tokens.": right * rest[3],
        "The ratio is upside down: it is new over old.": loss_by_loop(old, logprobs, *rest),
    }


def drawn(moved: float):
    """Six answers in two groups of three; the policy has moved by about `moved` since it sampled."""
    mask = lengths_mask([3, 7, 1, 5, 2, 7], 7)
    old = -torch.rand(6, 7) * 3
    rewards = torch.tensor([1.0, 1, 0, 0, 1, 0]) + 0.3 * torch.rand(6)
    return (old + moved * torch.randn(6, 7)) * mask, old * mask, rewards, mask, 3, LIMIT


def check_loss(f, arguments) -> None:
    """Compare the value, then the gradient, with those of the loop."""
    compare(f(*arguments), loss_by_loop(*arguments), loss_mistakes(arguments), what="the loss", atol=1e-6)
    leaf = arguments[0].clone().requires_grad_()
    [expected] = torch.autograd.grad(loss_by_loop(leaf, *arguments[1:]), leaf)
    found = f.gradient(*arguments, wrt=0)
    compare(found, expected, what="the gradient", atol=1e-6)


@q3.case("a policy that has moved, some tokens clipped")
def _(f):
    check_loss(f, drawn(0.5))


@q3.case("an easy prompt and a hard one, rewards of any size")
def _(f):
    logprobs, old, rewards, mask, n, limit = drawn(0.3)
    check_loss(f, (logprobs, old, 4 * rewards + torch.tensor([5.0, 5, 5, 0, 0, 0]), mask, n, limit + draw(1, 80)))


@q3.case("a token of a wrong answer that has become three times as probable is still pushed down")
def _(f):
    old = -1.5 - torch.rand(2, 4)
    logprobs = old + torch.tensor([[1.1, 0.16, -0.6, -0.16]]) * (1 + 0.1 * torch.rand(2, 4))
    mask, rewards, clip = (
        torch.ones(2, 4, dtype=torch.bool),
        torch.tensor([1.0, 0.0]),
        0.1 + 0.04 * torch.rand(()).item(),
    )
    ratio, a = (logprobs - old).exp(), torch.tensor([[0.5], [-0.5]])

    def gradient_with(clip: float) -> Tensor:
        return -a * ratio * torch.where(a > 0, ratio < 1 + clip, ratio > 1 - clip) / 8

    inside = (ratio < 1 + clip) & (ratio > 1 - clip)
    mistakes = {
        f"One mistake is left: {PLANTED['clip']} (clip).": -a * ratio * inside / 8,
        "No token is clipped: is the minimum taken with the clipped product?": -a * ratio / 8,
        "You clip at 0.2 whatever is asked for: use the argument `clip`.": gradient_with(0.2),
    }
    found = f.gradient(logprobs, old, rewards, mask, 2, 4, clip, wrt=0)
    compare(found, gradient_with(clip), mistakes, "the gradient", atol=1e-6)


@q3.case("padding of minus infinity: the loss and its gradient are finite, and 0 there")
def _(f):
    logprobs, old, rewards, mask, n, limit = drawn(0.5)
    filled = [x.masked_fill(~mask, value) for x, value in ((logprobs, -math.inf), (old, -math.inf))]
    leaf = logprobs.clone().requires_grad_()
    right = loss_by_loop(leaf, old, rewards, mask, n, limit)
    [expected] = torch.autograd.grad(right, leaf)
    for new, before in (filled, (logprobs.masked_fill(~mask, 200.0), old), (logprobs, filled[1])):
        value = torch.as_tensor(f(new, before, rewards, mask, n, limit))
        found = f.gradient(new, before, rewards, mask, n, limit, wrt=0)
        if not (torch.isfinite(value).all() and torch.isfinite(found).all()):
            raise AssertionError(f"One mistake is left: {PLANTED['padding']} (padding).")
        arguments = (logprobs, old, rewards, mask, n, limit)
        compare(value, right.detach(), loss_mistakes(arguments), what="the loss", atol=1e-6)
        compare(found, expected, what="the gradient", atol=1e-6)


# q4 --------------------------------------------------------------------------------------------------------------

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


QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4}
