"""q3: a bound on what a token may weigh in the gradient."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare
from rlcourse.course.checks.nb02.padding import BY_ROW, DIVIDED, UNMASKED, compare_finite, junk, sample_mask

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
