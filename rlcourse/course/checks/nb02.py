"""Checks of the exercises of lesson 02: a loss to mend, GAE across a tool, a bound on weights, a KL penalty."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, as_tensor, compare, draw
from rlcourse.course.checks.builders import Names, compare_loss, compare_named, pick, ragged_mask, sentences

NAN = "nan: 0 * nan and inf - inf are nan, so pick out the real tokens, or fill the padding, before you compute."

q1 = Question(
    "q1", "mended_loss", hint="One of the three mistakes shows in the curves. Which curve is where it cannot be?"
)

# The planted mistakes, in the order in which a card names those that are left.
PLANTED = {
    "critic": "its advantage: the policy's part has a gradient in the values, and pulls them away from the returns",
    "minimum": "its clip: without the minimum a token that moved the wrong way has no gradient to call it back",
    "padding": "its mean: it divides by all places, also by those after the end of an answer",
}
LOSS_MISTAKES = {
    "no clip": "Nothing is clipped any more.",
    "upside down": "The ratio is upside down: exp(logprobs - old_logprobs).",
    "sign": "The sign of the policy's part is wrong: optimizers minimise.",
    "no critic": "Nothing trains the critic: the squared error of the values is missing.",
    "no half": "The half of the value loss is missing.",
    "sum": "You added the tokens up: take their mean.",
}


def ppo_loss(new, old, values, returns, mask, clip: float, wrong: Names = ()) -> Tensor:
    """The loss in float64, its clip by the sign of the advantage, with mistakes: a scalar."""
    new, old, values, returns = (x[mask].double() for x in (new, old, values, returns))
    a = returns - (values if "critic" in wrong else values.detach())
    ratio = (old - new if "upside down" in wrong else new - old).exp()
    free, near = ratio * a, ratio.clamp(1 - clip, 1 + clip) * a
    clipped = torch.where(a > 0, ratio.clamp(max=1 + clip), ratio.clamp(min=1 - clip)) * a
    gain = pick(wrong, {"minimum": near, "no clip": free}, clipped)
    error = (values - returns) ** 2 * pick(wrong, {"no critic": 0.0, "no half": 1.0}, 0.5)
    count = pick(wrong, {"padding": mask.numel(), "sum": 1}, mask.sum())
    return ((error + gain if "sign" in wrong else error - gain) / count).sum()


def check_loss(f, new, old, values, returns, mask, clip: float) -> None:
    parts = {"the loss": None, "the gradient in the values": 2, "the gradient in the log-probs": 0}
    said = sentences(PLANTED, LOSS_MISTAKES)
    compare_loss(f, (new, old, values, returns, mask, clip), ppo_loss, said, parts)


def sample_loss(mask: Tensor) -> tuple[Tensor, ...]:
    """New and old log-probs, values, returns, mask, with junk in the padding."""
    old, values, returns = -torch.rand(mask.shape) - 0.5, torch.rand(mask.shape), torch.rand(mask.shape)
    step = zip((old + 0.4 * torch.randn(mask.shape), old, values, returns), (-0.3, -2.0, 3.0, -2.0), strict=True)
    return *(x.masked_fill(~mask, junk) for x, junk in step), mask


@q1.case("answers that fill the batch")
def _(f):
    for clip in (0.1, 0.3):
        check_loss(f, *sample_loss(torch.ones(4, 5, dtype=torch.bool)), clip)


q1.case("answers of different lengths")(lambda f: check_loss(f, *sample_loss(ragged_mask(6, 7)), 0.2))


@q1.case("ratios far up and far down, better and worse than expected")
def _(f):
    moved = torch.tensor([[0.7, -0.7, 0.7, -0.7]]) * (1 + torch.rand(1, 4))
    values, returns = 0.3 + 0.4 * torch.rand(1, 4), torch.tensor([[1.0, 1.0, 0.0, 0.0]])
    check_loss(f, moved - 2, torch.full((1, 4), -2.0), values, returns, torch.ones(1, 4, dtype=torch.bool), 0.2)


q2 = Question("q2", "gae_with_tool", hint="What should a token that is not the policy's own change in what you carry?")

GAE_MISTAKES = {
    "gap": "The tool's words end the answer for you: the next value is that before the next token of one's own.",
    "fading": "What you carry fades on the tool's words: it should fade on the policy's own tokens alone.",
    "tool's value": "The next value is that before the next token of one's own, not that before a tool's word.",
    "bootstrap": "You bootstrapped from the last value: after the last token of one's own the value is 0.",
    "TD errors": "These are the TD errors alone: carry the advantage.",
    "lam": "You carried it with lam alone, not gamma * lam.",
    "gamma": "lam is not used: you carried it with gamma alone.",
}


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
    given = (*(torch.randn(mask.shape).masked_fill(~mask, value) for value in junk), mask, gamma, lam)
    compare_named(f, gae_sums, given, GAE_MISTAKES, not_finite=NAN)


def with_gaps(rows: int, length: int) -> Tensor:
    """Masks of answers in which a tool speaks, once at least, and padding: bool [rows, length]."""
    mask = torch.rand(rows, length) < 0.6
    mask[:, 0], mask[:, 1:3] = True, False
    mask[:, 3], mask[:, -1] = True, False
    return mask


q2.case("one tool call in the middle")(
    lambda f: check_gae(f, torch.tensor([[True] * draw(2, 3) + [False] * draw(2, 4) + [True] * 2]), 0.9, 0.7)
)


q2.case("several calls, and padding; lam = 0 and lam = 1")(
    lambda f: [check_gae(f, with_gaps(5, 9), *two) for two in ((0.9, 0.7), (1.0, 0.0), (1.0, 1.0))]
)


@q2.case("no call at all, a tool that has the last word, and a row without a token of one's own")
def _(f):
    mask = with_gaps(5, 7)
    mask[:3] = torch.arange(7) < torch.tensor([draw(2, 5), 3, 0])[:, None]
    check_gae(f, mask, 0.95, 0.8)


q2.case("nan among the tool's words does no harm")(
    lambda f: check_gae(f, with_gaps(3, 6), 0.9, 0.7, junk=(torch.nan, torch.nan))
)


q3 = Question(
    "q3", "bounded_loss", hint="The gradient of a token is a weight times A times its score. Write the weight."
)

BOUND_MISTAKES = {
    "PPO": "That is PPO as it was: a bad token that became far more probable still has a weight above `most`.",
    "flat": "You took the gradient of a bad token away above `most`: keep it, bounded, to call the token back.",
    "clip alone": "You left the minimum out: tokens that moved the wrong way need a gradient outside of the range.",
    "no clip": "Nothing is clipped: a good token above 1 + clip and a bad one below 1 - clip have no gradient.",
    "one": "The weight is 1 or 0: where it is not clipped it is the ratio.",
    "leak": "The weight has a gradient of its own: detach it.",
    "sign": "The sign is wrong: optimizers minimise.",
    "sum": "You added the tokens up: take their mean.",
    "places": "You divided by all places: take the mean over the real tokens.",
}


def bounded(new, old, advantages, mask, clip: float, most: float, wrong: Names = ()) -> Tensor:
    """REINFORCE with bounded weights in float64, with mistakes: a scalar of which the gradient counts."""
    new, old, a = (x[mask].double() for x in (new, old, advantages))
    ratio = (new - old).exp()
    silent = a * (ratio - 1) > clip * a.abs()  # moved far enough in the direction of its advantage
    silent = pick(wrong, {"clip alone": (ratio - 1).abs() > clip, "no clip": torch.zeros_like(silent)}, silent)
    bounds = {"PPO": ratio, "flat": ratio * (ratio <= most), "one": ratio**0}
    weight = pick(wrong, bounds, ratio.clamp(max=most)) * ~silent
    gain = (weight if "leak" in wrong else weight.detach()) * a * new
    total = (gain if "sign" in wrong else -gain).sum()
    return total / pick(wrong, {"sum": 1, "places": mask.numel()}, mask.sum())


def check_bound(f, *step) -> None:
    said = sentences({}, BOUND_MISTAKES)
    compare_loss(f, step, bounded, said, {"the gradient in the log-probs": 0}, not_finite=NAN)


def sample_step(rows: int, length: int, *junk: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """New and old log-probs, with `junk` in their padding, advantages, mask."""
    mask, new = ragged_mask(rows, length), -torch.rand(rows, length) - 0.5
    old = new + 0.9 * torch.randn(rows, length)
    new, old = (x.masked_fill(~mask, value) for x, value in zip((new, old), junk, strict=True))
    return new, old, torch.randn(rows, length).masked_fill(~mask, -3.0), mask


q3.case("tokens that moved a little, and some that moved far")(
    lambda f: [check_bound(f, *sample_step(6, 7, -0.3, -1.0), *two) for two in ((0.2, 3.0), (0.1, 2.0))]
)


@q3.case("the four corners, and a bad token that became far more probable")
def _(f):
    moved = torch.tensor([[0.7, -0.7, 0.7, -0.7, 3.0]]) * (1 + 0.3 * torch.rand(1, 5))
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0, -1.0]]) * (0.5 + torch.rand(1, 5))
    new = -1 - torch.rand(1, 5)
    check_bound(f, new, new - moved, advantages, torch.ones(1, 5, dtype=torch.bool), 0.2, 4.0)


q3.case("-inf in the padding does no harm")(
    lambda f: check_bound(f, *sample_step(4, 5, -torch.inf, -torch.inf), 0.2, 3.0)
)


q4 = Question("q4", "penalty", hint="Which of the three has the value that is wanted, and which has the gradient?")


def two_policies(tokens: int, distance: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs of all tokens of a small vocabulary, under the policy and under the reference."""
    ref = torch.randn(tokens).log_softmax(0)
    return (ref + distance * torch.randn(tokens)).log_softmax(0), ref


def values_of(f, pi: Tensor, ref: Tensor) -> Tensor:
    """What a function says of each token; AssertionError unless that is a finite number for each."""
    found = as_tensor(f(pi, ref)).double()
    said = f"the result has shape {list(found.shape)}, expected {list(pi.shape)}: a finite number, one for each token"
    assert found.shape == pi.shape and found.isfinite().all(), said
    return found


@q4.case("its value: right on average")
def _(f):
    for distance in (0.5, 1.5):
        pi, ref = two_policies(draw(5, 9), distance)
        weights, d = pi.exp().double(), (pi - ref).double()
        mistakes = {
            "That is the KL the other way round: d is logprobs - ref_logprobs.": weights @ (d.exp() - 1 - d),
            "That is k2: its value is biased.": weights @ d**2 / 2,
        }
        compare(weights @ values_of(f, pi, ref), weights @ d, mistakes, what="the mean over tokens")


@q4.case("its value: never negative, 0 where the two agree, and not flat")
def _(f):
    pi, ref = two_policies(draw(5, 9))
    found = values_of(f, pi, ref)
    assert (found > -1e-6).all(), f"The value is negative, as k1 can be: {found.min():.4f} at a token."
    assert values_of(f, ref, ref).abs().max() < 1e-6, "Where policy and reference agree the value should be 0."
    assert (found[(pi - ref).abs() > 0.05] > 0).all(), "The value is 0 where policy and reference differ."
    some = torch.randint(len(pi), (draw(2, 4),))  # a batch holds a few tokens of a vocabulary, some of them twice
    said = "What you say of a token depends on the others in the batch: use its own two log-probs."
    assert torch.allclose(values_of(f, pi[some], ref[some]), found[some], atol=1e-6), said


@q4.case("its gradient: that of the KL, on average")
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


QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4}
