"""q1: a loss of PPO with three mistakes to mend."""

import itertools

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare
from rlcourse.course.checks.nb02.padding import BY_ROW, UNMASKED, junk, sample_mask

q1 = Question(
    "q1", "mended_loss", hint="One of the three mistakes shows in the curves. Which curve is where it cannot be?"
)

# The planted mistakes, in the order in which a card names those that are left.
PLANTED = {
    "critic": "its advantage: the policy's part has a gradient in the values, and pulls them away from the returns",
    "minimum": "its clip: without the minimum a token that moved the wrong way has no gradient to call it back",
    "padding": "its mean: it divides by all places, also by those after the end of an answer",
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
