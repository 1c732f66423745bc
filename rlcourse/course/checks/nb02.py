"""Checks of the exercises of lesson 02: the clip of the loop, GAE across a tool, a bound on weights."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, draw
from rlcourse.course.checks.builders import expect_loss, ragged_mask

NAN = "nan: 0 * nan and inf - inf are nan, so pick out the real tokens, or fill the padding, before you compute."
CLIPPED = "log-prob", "no clip", "minimum", "upside down", "sign", "tokens", "lengths", "width", "mask"

q1 = Question("q1", "clipped", hint="The ratio first. Then two products with A, and the smaller one of each token.")
expect_loss(q1, *CLIPPED)


def sample_update(moved: float, per_token: bool) -> tuple[Tensor, ...]:
    """What a loss of the loop is called with; the policy has moved by about `moved` since it sampled."""
    mask = ragged_mask(6, 7)
    old = -torch.rand(6, 7) - 0.5
    A = torch.randn(6, 7 if per_token else 1)
    return old + moved * torch.randn(6, 7), old, old + torch.randn(6, 7), A, mask


q1.case("a policy that has moved, some tokens clipped, and one that has hardly moved, advantages by token")(
    lambda f: [q1.check(f, *sample_update(*how)) for how in ((0.5, False), (0.1, True))]
)


@q1.case("ratios far up and far down, good and bad tokens")
def _(f):
    moved = torch.tensor([[0.7, -0.7], [0.7, -0.7]]) * (1 + torch.rand(2, 2))
    A = torch.tensor([[1.0], [-1.0]]) * (0.5 + torch.rand(2, 1))
    old = -2 - torch.rand(2, 2)
    q1.check(f, old + moved, old, old, A, torch.ones(2, 2, dtype=torch.bool))


q2 = Question("q2", "gae_with_tool", hint="What should a token that is not the policy's own change in what you carry?")


@q2.expects({
    "gap": "The tool's words end the answer for you: the next value is that before the next token of one's own.",
    "fading": "What you carry fades on the tool's words: it should fade on the policy's own tokens alone.",
    "tool's value": "The next value is that before the next token of one's own, not that before a tool's word.",
    "bootstrap": "You bootstrapped from the last value: after the last token of one's own the value is 0.",
    "TD errors": "These are the TD errors alone: carry the advantage.",
    "lam": "You carried it with lam alone, not gamma * lam.",
    "gamma": "lam is not used: you carried it with gamma alone.",
}, not_finite=NAN)  # fmt: skip
def gae_sums(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, wrong: str = "") -> Tensor:
    """GAE as a double sum over the policy's own tokens: [rows, length], float64. wrong: a mistake in it."""
    if wrong == "gap":  # the lesson's function, which knows of no gaps
        rewards, values = rewards.masked_fill(~mask, 0.0), values.masked_fill(~mask, 0.0)
        return gae_sums(rewards, values, torch.ones_like(mask), gamma, lam) * mask
    carry = {"lam": lam, "gamma": gamma, "TD errors": 0.0}.get(wrong, gamma * lam)
    found = torch.zeros(mask.shape, dtype=torch.float64)
    for row in range(len(mask)):
        places = mask[row].nonzero()[:, 0].tolist()
        r, v = rewards[row].double().tolist(), [*values[row].double().tolist(), 0.0]
        following = [t + 1 for t in places] if wrong == "tool's value" else [*places[1:], len(r)][: len(places)]
        if places and wrong == "bootstrap":
            following[-1] = places[-1]
        deltas = [r[t] + gamma * v[n] - v[t] for t, n in zip(places, following, strict=True)]
        for k, t in enumerate(places):
            ages = [places[j] - t if wrong == "fading" else j - k for j in range(k, len(places))]
            found[row, t] = sum(carry**age * delta for age, delta in zip(ages, deltas[k:], strict=True))
    return found


def check_gae(f, mask: Tensor, gamma: float, lam: float, junk: tuple[float, float] = (5.0, -4.0)) -> None:
    q2.check(f, *(torch.randn(mask.shape).masked_fill(~mask, value) for value in junk), mask, gamma, lam)


def with_gaps(rows: int, length: int) -> Tensor:
    """Masks of answers in which a tool speaks, once at least, and padding: bool [rows, length]."""
    mask = torch.rand(rows, length) < 0.6
    mask[:, 0], mask[:, 1:3] = True, False
    mask[:, 3], mask[:, -1] = True, False
    return mask


q2.case("several calls of a tool, and padding; lam = 0 and lam = 1")(
    lambda f: [check_gae(f, with_gaps(5, 9), *two) for two in ((0.9, 0.7), (1.0, 0.0), (1.0, 1.0))]
)


@q2.case("no call, a tool that has the last word, no token of one's own, nan among the tool's words")
def _(f):
    mask = with_gaps(5, 7)
    mask[:3] = torch.arange(7) < torch.tensor([draw(2, 5), 3, 0])[:, None]
    for junk in (5.0, -4.0), (torch.nan, torch.nan):
        check_gae(f, mask, 0.95, 0.8, junk)


q3 = Question("q3", "bounded_loss", hint="A token's gradient is a weight times A times its score. Write the weight.")


@q3.expects({
    "PPO": "That is PPO as it was: a bad token that became far more probable still has a weight above `most`.",
    "flat": "You took the gradient of a bad token away above `most`: keep it, bounded, to call the token back.",
    "clip alone": "You left the minimum out: tokens that moved the wrong way need a gradient outside of the range.",
    "no clip": "Nothing is clipped: a good token above 1 + clip and a bad one below 1 - clip have no gradient.",
    "one": "The weight is 1 or 0: where it is not clipped it is the ratio.",
    "leak": "The weight has a gradient of its own: detach it.",
    "sign": "The sign is wrong: optimizers minimise.",
    "sum": "You added the tokens up: take their mean.",
    "places": "You divided by all places: take the mean over the real tokens.",
}, parts={"the gradient in the log-probs": 0}, atol=1e-6, not_finite=NAN)  # fmt: skip
def bounded(new, old, advantages, mask, clip: float, most: float, wrong: str = "") -> Tensor:
    """REINFORCE with bounded weights in float64, with a mistake: a scalar of which the gradient counts."""
    new, old, a = (x[mask].double() for x in (new, old, advantages))
    ratio = (new - old).exp()
    silent = a * (ratio - 1) > clip * a.abs()  # moved far enough in the direction of its advantage
    silent = {"clip alone": (ratio - 1).abs() > clip, "no clip": torch.zeros_like(silent)}.get(wrong, silent)
    bounds = {"PPO": ratio, "flat": ratio * (ratio <= most), "one": ratio**0}
    weight = bounds.get(wrong, ratio.clamp(max=most)) * ~silent
    gain = (weight if wrong == "leak" else weight.detach()) * a * new
    total = (gain if wrong == "sign" else -gain).sum()
    return total / {"sum": 1, "places": mask.numel()}.get(wrong, mask.sum())


def sample_step(rows: int, length: int, *junk: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """New and old log-probs, with `junk` in their padding, advantages, mask."""
    mask, new = ragged_mask(rows, length), -torch.rand(rows, length) - 0.5
    old = new + 0.9 * torch.randn(rows, length)
    new, old = (x.masked_fill(~mask, value) for x, value in zip((new, old), junk, strict=True))
    return new, old, torch.randn(rows, length).masked_fill(~mask, -3.0), mask


q3.case("tokens that moved a little, some that moved far, and -inf in the padding")(lambda f: [
    q3.check(f, *sample_step(6, 7, *junk), *two)
    for junk, *two in (((-0.3, -1.0), 0.2, 3.0), ((-torch.inf, -torch.inf), 0.1, 2.0))
])  # fmt: skip


@q3.case("the four corners, and a bad token that became far more probable")
def _(f):
    moved = torch.tensor([[0.7, -0.7, 0.7, -0.7, 3.0]]) * (1 + 0.3 * torch.rand(1, 5))
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0, -1.0]]) * (0.5 + torch.rand(1, 5))
    new = -1 - torch.rand(1, 5)
    q3.check(f, new, new - moved, advantages, torch.ones(1, 5, dtype=torch.bool), 0.2, 4.0)
