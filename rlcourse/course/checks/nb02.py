"""Checks of the exercises of lesson 02: a loss to mend, GAE across a tool, a bound, a KL penalty."""

import itertools

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw

DIVIDED = "You divided by all places: take the mean over the real tokens."
UNMASKED = "The mask is not used: padding counts."
BY_ROW = "You took the mean over each row first: take one mean over all real tokens."
NAN = "nan: 0 * nan and inf - inf are nan, so pick out the real tokens, or fill the padding, before you compute."


def sample_mask(rows: int, length: int) -> Tensor:
    """A mask with an answer of one token, a full one, and others in between: bool [rows, length]."""
    lengths = torch.randint(2, length, (rows,))
    lengths[0], lengths[-1] = 1, length
    return torch.arange(length) < lengths[:, None]


def junk(tensor: Tensor, mask: Tensor, value: float) -> Tensor:
    """The tensor with `value` in its padding, where nothing may look."""
    return tensor.masked_fill(~mask, value)


def compare_finite(found, expected: Tensor, mistakes: dict[str, Tensor], what: str, atol: float = 1e-5) -> None:
    """`compare`, and a sentence of its own for nan that came from the padding."""
    if found is not None and torch.as_tensor(found).isnan().any():
        raise AssertionError(NAN)
    compare(found, expected, mistakes, what, atol)


q1 = Question(
    "q1", "mended_loss", hint="One of the three mistakes shows in the curves. Which curve is where it cannot belong?"
)

# The planted mistakes, in the order in which a card names those that are left.
PLANTED = {
    "critic": "its advantage: the policy's part has a gradient in the values, and pulls them away from the returns",
    "minimum": "its clip: without the minimum a token that moved the wrong way has no gradient to call it back",
    "padding": "its mean: it divides by all places, also by those behind the end of an answer",
}


def loss_parts(step: tuple[Tensor, ...], clip: float, wrong: tuple[str, ...] = (), pick=None) -> tuple[Tensor, ...]:
    """Value of the loss, and its gradients in log-probs and values, with some of the mistakes in it; float64.

    step: new and old log-probs, values, returns, mask. pick: what takes the place of the minimum.
    """
    new, old, values, returns = (x.double() for x in step[:4])
    mask = step[4]
    pick = pick or (clip_alone if "minimum" in wrong else torch.minimum)
    ratio = (new - old).exp()
    leaf = ratio.clone().requires_grad_()
    advantage = returns - values
    objective = pick(leaf * advantage, leaf.clamp(1 - clip, 1 + clip) * advantage)
    [slope] = torch.autograd.grad(objective.sum(), leaf)
    count = mask.numel() if "padding" in wrong else mask.sum()
    value = ((-objective.detach() + (values - returns) ** 2 / 2) * mask).sum() / count
    of_values = values - returns
    if "critic" in wrong:
        pulled = torch.where(slope == 0, ratio.clamp(1 - clip, 1 + clip), ratio)
        of_values = of_values + pulled
    return value, -slope * ratio * mask / count, of_values * mask / count


def true_parts(step: tuple[Tensor, ...], clip: float) -> tuple[Tensor, ...]:
    """The same without mistakes, token by token."""
    new, old, values, returns, mask = step
    count, total = int(mask.sum()), 0.0
    of_new, of_values = (torch.zeros(mask.shape, dtype=torch.float64) for _ in range(2))
    for i, t in mask.nonzero().tolist():
        a = returns[i, t].double().item() - values[i, t].double().item()
        r = (new[i, t].double() - old[i, t].double()).exp().item()
        cut = r > 1 + clip if a > 0 else r < 1 - clip
        total += (a**2 / 2 - a * ((1 + clip if a > 0 else 1 - clip) if cut else r)) / count
        of_new[i, t], of_values[i, t] = 0.0 if cut else -a * r / count, -a / count
    return torch.tensor(total, dtype=torch.float64), of_new, of_values


def clip_alone(unclipped: Tensor, limited: Tensor) -> Tensor:
    return limited


def no_clip(unclipped: Tensor, limited: Tensor) -> Tensor:
    return unclipped


def loss_mistakes(step: tuple[Tensor, ...], clip: float) -> list[dict[str, Tensor]]:
    """Value and gradients of usual mistakes, by the sentence that names what is left."""
    found = {}
    for count in range(1, len(PLANTED) + 1):
        for wrong in itertools.combinations(PLANTED, count):
            found[f"A mistake is left: {PLANTED[wrong[0]]} ({', '.join(wrong)})."] = loss_parts(step, clip, wrong)
    value, of_new, of_values = loss_parts(step, clip)
    swapped = (step[1], step[0], *step[2:])
    zero, critic = torch.zeros_like(of_new), ((step[2] - step[3]).double() ** 2 / 2)[step[4]].mean()
    mask, count = step[4], step[4].sum()
    rows = mask.sum(1, keepdim=True) * len(mask)
    by_row = [x * count / rows for x in (of_new, of_values)]
    found |= {
        "You took the larger of the two: that frees the tokens that have moved far enough.": loss_parts(
            step, clip, pick=torch.maximum
        ),
        "Nothing is clipped any more.": loss_parts(step, clip, pick=no_clip),
        "The ratio is upside down: exp(logprobs - old_logprobs).": (
            loss_parts(swapped, clip)[0], -loss_parts(swapped, clip)[1], of_values
        ),
        "The sign of the policy's part is wrong: optimizers minimise.": (2 * critic - value, -of_new, of_values),
        "Nothing trains the critic: the squared error of the values is missing.": (value - critic, of_new, zero),
        "The half of the value loss is missing.": (value + critic, of_new, 2 * of_values),
        "The policy's part is missing.": (critic, zero, of_values),
        "You added the tokens up: take their mean.": tuple(x * count for x in (value, of_new, of_values)),
        BY_ROW: (torch.tensor(torch.nan), *by_row),
        UNMASKED: loss_parts((*step[:4], torch.ones_like(mask)), clip),
    }  # fmt: skip
    return [{sentence: parts[i] for sentence, parts in found.items()} for i in range(3)]


def check_loss(f, step: tuple[Tensor, ...], clip: float) -> None:
    """Compare the gradients, then the value."""
    expected, mistakes = true_parts(step, clip), loss_mistakes(step, clip)
    try:
        of_values = f.gradient(*step, clip, wrt=2)
    except AssertionError:
        f.gradient(*step, clip, wrt=0)  # says what is wrong if nothing has a gradient at all
        raise AssertionError("Nothing trains the critic: no gradient reaches the values.") from None
    compare(of_values, expected[2], mistakes[2], what="the gradient in the values", atol=1e-6)
    compare(f.gradient(*step, clip, wrt=0), expected[1], mistakes[1], what="the gradient in the log-probs", atol=1e-6)
    compare(f(*step, clip), expected[0], mistakes[0], what="the loss")


def sample_loss(rows: int, length: int, full: bool = False) -> tuple[Tensor, ...]:
    """New and old log-probs, values, returns, mask, with junk in the padding. full: there is none."""
    mask = torch.ones(rows, length, dtype=torch.bool) if full else sample_mask(rows, length)
    old = -torch.rand(rows, length) - 0.5
    new, values, returns = old + 0.4 * torch.randn(rows, length), torch.rand(rows, length), torch.rand(rows, length)
    return junk(new, mask, -0.3), junk(old, mask, -2.0), junk(values, mask, 3.0), junk(returns, mask, -2.0), mask


@q1.case("answers that fill the batch")
def _(f):
    for clip in (0.1, 0.3):
        check_loss(f, sample_loss(4, 5, full=True), clip)


@q1.case("answers of different lengths")
def _(f):
    check_loss(f, sample_loss(6, 7), 0.2)


@q1.case("ratios far up and far down, better and worse than expected")
def _(f):
    moved = torch.tensor([0.7, -0.7, 0.7, -0.7]) * (1 + torch.rand(4))
    returns = torch.tensor([1.0, 1.0, 0.0, 0.0])
    values = 0.3 + 0.4 * torch.rand(4)
    step = [x[None] for x in (moved - 2, torch.full((4,), -2.0), values, returns)]
    check_loss(f, (*step, torch.ones(1, 4, dtype=torch.bool)), 0.2)


q2 = Question("q2", "gae_with_tool", hint="What should a token that is not the policy's own change in what you carry?")


def gae_sums(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, carry: float | None = None):
    """GAE as a double sum over the policy's own tokens, as if there were no others: [rows, length], float64.

    carry: the factor in place of gamma * lam.
    """
    carry = gamma * lam if carry is None else carry
    found = torch.zeros(mask.shape, dtype=torch.float64)
    for row in range(len(mask)):
        places = mask[row].nonzero()[:, 0].tolist()
        r, v = rewards[row, places].double().tolist(), [*values[row, places].double().tolist(), 0.0]
        deltas = [r[k] + gamma * v[k + 1] - v[k] for k in range(len(places))]
        for k, t in enumerate(places):
            found[row, t] = sum(carry ** (j - k) * deltas[j] for j in range(k, len(places)))
    return found


def gae_columns(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, fill: bool, decay: bool):
    """GAE over the columns as the lesson's, which knows of no gaps. fill: the tool's values are 0, else they stand;
    decay: what is carried fades on the tool's tokens, else on one's own alone."""
    clean = values.double().masked_fill(~mask, 0.0) if fill else values.double()
    r, found = rewards.double().masked_fill(~mask, 0.0), torch.zeros(mask.shape, dtype=torch.float64)
    carried = after = torch.zeros(len(mask), dtype=torch.float64)
    for t in reversed(range(mask.shape[1])):
        delta = r[:, t] + gamma * after - clean[:, t]
        if not decay:
            delta = torch.where(mask[:, t], delta, 0.0)
        carried = delta + (gamma * lam if decay else torch.where(mask[:, t], gamma * lam, 1.0)) * carried
        found[:, t], after = torch.where(mask[:, t], carried, 0.0), clean[:, t]
    return found


def gae_from_last(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """What comes after the last own token is taken to be worth its value again."""
    longer = rewards.clone()
    for row in range(len(mask)):
        places = mask[row].nonzero()[:, 0]
        if len(places):
            longer[row, places[-1]] += gamma * values[row, places[-1]]
    return gae_sums(longer, values, mask, gamma, lam)


def gae_fading(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """The right TD errors, but what is carried fades on the tool's tokens too."""
    deltas = gae_sums(rewards, values, mask, gamma, 0.0)
    return gae_columns(deltas, torch.zeros_like(values), mask, gamma, lam, fill=True, decay=True)


def gae_mistakes(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> dict[str, Tensor]:
    """What usual mistakes give: [rows, length]."""
    given = (rewards, values, mask, gamma, lam)
    right, every = gae_sums(*given), torch.ones_like(mask)
    deltas = gae_sums(rewards, values, mask, gamma, 0.0)
    forward = gae_sums(deltas.flip(1), torch.zeros_like(values), mask.flip(1), 1.0, gamma * lam).flip(1)
    returns = right + values.double().masked_fill(~mask, 0.0)
    no_gamma = gae_sums(rewards, values, mask, 1.0, lam, carry=gamma * lam)
    return {
        "The tool's words end the answer for you: the next value is that before the next token of one's own.": (
            gae_columns(*given, fill=True, decay=True)
        ),
        "What you carry fades on the tool's words: it should fade on the policy's own tokens alone.": gae_fading(
            *given
        ),
        "The value before a tool's word is not the next value: take that before the next token of one's own.": (
            gae_columns(*given, fill=False, decay=False)
        ),
        "You bootstrapped from the last value: after the last token of one's own the value is 0.": gae_from_last(
            *given
        ),
        "The tool's words have advantages: they must be 0 where mask is False.": gae_sums(
            rewards, values, every, gamma, lam
        ),
        "You let the tool's words count as the policy's own.": gae_sums(rewards, values, every, gamma, lam) * mask,
        "You returned advantages plus values: these are the returns.": returns,
        "You ran forwards: an advantage holds what comes later, so start at the end.": forward,
        "The sign of the values is wrong: r_t + gamma V_next - V_t.": gae_sums(rewards, -values, mask, gamma, lam),
        "The TD error lacks its gamma: r_t + gamma V_next - V_t.": no_gamma,
        "These are the TD errors alone: carry the advantage.": deltas,
        "You carried it with lam alone, not gamma * lam.": gae_sums(*given, carry=lam),
        "lam is not used: you carried it with gamma alone.": gae_sums(rewards, values, mask, gamma, 1.0),
    }


def with_gaps(rows: int, length: int) -> Tensor:
    """Masks of answers in which a tool speaks, once at least, and padding: bool [rows, length]."""
    mask = torch.rand(rows, length) < 0.6
    mask[:, 0], mask[:, 1:3] = True, False
    mask[:, 3], mask[:, -1] = True, False
    return mask


def check_gae(f, mask: Tensor, gamma: float, lam: float) -> None:
    rewards, values = (junk(torch.randn(mask.shape), mask, value) for value in (5.0, -4.0))
    given = (rewards, values, mask, gamma, lam)
    compare(f(*given), gae_sums(*given), gae_mistakes(*given))


@q2.case("one tool call in the middle")
def _(f):
    own = draw(2, 3)
    row = [True] * own + [False] * draw(2, 4) + [True] * 2
    check_gae(f, torch.tensor([row]), 0.9, 0.7)


@q2.case("several calls, and padding; lam = 0 and lam = 1")
def _(f):
    for gamma, lam in ((0.9, 0.7), (1.0, 0.0), (1.0, 1.0)):
        check_gae(f, with_gaps(5, 9), gamma, lam)


@q2.case("no call at all, a tool that has the last word, and a row without a token of one's own")
def _(f):
    mask = with_gaps(5, 7)
    mask[0] = torch.arange(7) < draw(2, 5)
    mask[1] = torch.arange(7) < 3
    mask[2] = False
    check_gae(f, mask, 0.95, 0.8)


@q2.case("nan among the tool's words does no harm")
def _(f):
    mask = with_gaps(3, 6)
    rewards, values = torch.randn(3, 6), torch.randn(3, 6)
    found = f(junk(rewards, mask, torch.nan), junk(values, mask, torch.nan), mask, 0.9, 0.7)
    given = (rewards, values, mask, 0.9, 0.7)
    compare_finite(found, gae_sums(*given), gae_mistakes(*given), "the result")


q3 = Question(
    "q3", "bounded_loss", hint="The gradient of a token is a weight times A times its score. Write the weight."
)


def weights_of(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, clip: float, most: float) -> Tensor:
    """What -A times the score of each token is multiplied with, by a loop: [rows, length], float64."""
    found = torch.zeros(mask.shape, dtype=torch.float64)
    for i, t in mask.nonzero().tolist():
        a, r = advantages[i, t].item(), (new[i, t].double() - old[i, t].double()).exp().item()
        cut = r > 1 + clip if a > 0 else r < 1 - clip
        found[i, t] = 0.0 if cut else min(r, most)
    return found


def bound_mistakes(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, clip: float, most: float) -> dict:
    """Gradients of usual mistakes: [rows, length]."""
    r, a = (new.double() - old.double()).exp(), advantages.double()
    right = weights_of(new, old, advantages, mask, clip, most)
    cut = torch.where(a > 0, r > 1 + clip, r < 1 - clip)
    plain, inside = r.masked_fill(cut, 0.0), (r - 1).abs() <= clip
    leak = right * (1 + new.double() * (r < most))
    wrong = {
        "That is PPO as it was: a bad token that became far more probable still has a weight above `most`.": plain,
        "You took the gradient of a bad token away above `most`: it should be kept, and bounded, or nothing calls the "
        "token back.": plain.masked_fill(r > most, 0.0),
        "You left the minimum out: outside of the range no token has a gradient, also not those to be called back.": (
            r.masked_fill(~inside, 0.0)
        ),
        "Nothing is clipped: a good token above 1 + clip and a bad one below 1 - clip have no gradient.": r.clamp(
            max=most
        ),
        "The weight lies between 1 - clip and 1 + clip, and never stops: that is no clip of PPO's.": r.clamp(
            1 - clip, 1 + clip
        ),
        "The weight is 1 or 0: where it is not clipped it is the ratio.": (~cut).double(),
        "You bounded good tokens and bad ones at 1 + clip: the bound of a bad one is `most`.": plain.clamp(
            max=1 + clip
        ),
        "The weight has a gradient of its own: detach it.": leak,
        "The sign is wrong: optimizers minimise.": -right,
    }
    count = mask.sum()
    found = {sentence: -weight * a * mask / count for sentence, weight in wrong.items()}
    rows = mask.sum(1, keepdim=True).clamp(min=1) * len(mask)
    return found | {
        "You added the tokens up: take their mean.": -right * a,
        DIVIDED: -right * a / mask.numel(),
        BY_ROW: -right * a / rows,
        UNMASKED: -weights_of(new, old, advantages, torch.ones_like(mask), clip, most) * a / mask.numel(),
    }


def check_bound(f, step: tuple[Tensor, ...], clip: float, most: float) -> None:
    _, _, advantages, mask = step
    expected = -weights_of(*step, clip, most) * advantages.double() * mask / mask.sum()
    found = f.gradient(*step, clip, most, wrt=0)
    compare(found, expected, bound_mistakes(*step, clip, most), what="the gradient in the log-probs", atol=1e-6)


def sample_step(rows: int, length: int, spread: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """New and old log-probs, advantages, mask, with junk in the padding."""
    mask = sample_mask(rows, length)
    new = -torch.rand(rows, length) - 0.5
    old = new + spread * torch.randn(rows, length)
    return junk(new, mask, -0.3), junk(old, mask, -1.0), junk(torch.randn(rows, length), mask, -3.0), mask


@q3.case("tokens that moved a little, and some that moved far")
def _(f):
    for clip, most in ((0.2, 3.0), (0.1, 2.0)):
        check_bound(f, sample_step(6, 7, 0.9), clip, most)


@q3.case("the four corners, and a bad token that became far more probable")
def _(f):
    moved = torch.tensor([0.7, -0.7, 0.7, -0.7, 3.0]) * (1 + 0.3 * torch.rand(5))
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0]) * (0.5 + torch.rand(5))
    new = -1 - torch.rand(5)
    step = [x[None] for x in (new, new - moved, advantages)]
    check_bound(f, (*step, torch.ones(1, 5, dtype=torch.bool)), 0.2, 4.0)


@q3.case("-inf in the padding does no harm")
def _(f):
    new, old, advantages, mask = sample_step(4, 5, 0.9)
    expected = -weights_of(new, old, advantages, mask, 0.2, 3.0) * advantages.double() * mask / mask.sum()
    step = (junk(new, mask, -torch.inf), junk(old, mask, -torch.inf), advantages, mask)
    found = f.gradient(*step, 0.2, 3.0, wrt=0)
    mistakes = bound_mistakes(new, old, advantages, mask, 0.2, 3.0)
    compare_finite(found, expected, mistakes, "the gradient in the log-probs", atol=1e-6)


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


QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4}
