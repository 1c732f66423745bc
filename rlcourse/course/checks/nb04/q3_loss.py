"""q3: a loss to mend."""

import itertools
import math

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw
from rlcourse.course.checks.nb04.masks import lengths_mask, tokens

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
        "You divided by nothing: the constant is rows times max_new_tokens.": right * len(rest[1]) * rest[3],
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
