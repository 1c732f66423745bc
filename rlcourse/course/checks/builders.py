"""What checks of several lessons share: inputs drawn from the seed, planted mistakes, and the losses of the loop."""

import functools
import itertools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rlcourse.course.checks import Question

Names = tuple[str, ...]  # the mistakes in a function


def lengths_mask(lengths: list[int], width: int) -> Tensor:
    """Of answers of these lengths: bool [rows, width]."""
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def ragged_mask(rows: int, width: int) -> Tensor:
    """Of answers of different lengths, the first of one token and the last full: bool [rows, width]."""
    return lengths_mask([1, *torch.randint(2, width, (rows - 2,)).tolist(), width], width)


def drawn_until(fits: Callable[..., bool], make: Callable[[], tuple], tries: int = 300) -> tuple:
    """Inputs of `make()` for which `fits(*inputs)`, or the last ones tried."""
    for _ in range(tries):
        inputs = make()
        if fits(*inputs):
            break
    return inputs


def whole_number(found, low: int, high: int) -> int:
    """A result as an int from `low` to `high`. Raises AssertionError for anything else."""
    assert found is not None, "the result is None: does every path return a number?"
    if isinstance(found, Tensor) and found.numel() == 1:
        found = found.item()
    if isinstance(found, bool) or not isinstance(found, int | float) or not low <= found <= high or found % 1:
        raise AssertionError(f"the result is {found!r:.40}: return a whole number from {low} to {high}")
    return int(found)


def left_in(function: Callable, planted: Mapping[str, str]) -> dict[str, Callable]:
    """`function` with every choice of the planted mistakes, by what a card says of it."""
    found = {}
    for count in range(1, len(planted) + 1):
        left = "A mistake is left" if count == 1 else f"{count} mistakes are left, one of them"
        for names in itertools.combinations(planted, count):
            found[f"{left}: {planted[names[0]]} ({', '.join(names)})."] = functools.partial(function, wrong=names)
    return found


def pick(wrong: Names, options: Mapping, right):
    """The option of the first of the mistakes that has one, else what is right."""
    return next((options[name] for name in wrong if name in options), right)


# The losses of the loop, row by row in float64, right or with usual mistakes: what lessons 01 to 04 ask for.
LIMIT, CLIP, BETA = 80, 0.2, 0.04  # of the exercises
SAID = {
    "sign": "The sign is wrong: an optimizer minimises, so what earned more must lower the loss.",
    "mask": "Tokens outside the answer count, too: multiply by the mask.",
    "tokens": "You divided by the number of tokens in the batch, which changes with what was drawn.",
    "lengths": "You divided each answer by its length: that's GRPO.",
    "width": "You divided by the width of the batch.",
    "rows": "You added up the rows: divide by their number, too.",
    "sum": "You added up the tokens of each answer, and divided by the rows alone.",
    "log-prob": "That's lesson 01's loss: the ratio is missing.",
    "no clip": "Nothing is clipped.",
    "minimum": "A token that has moved far the wrong way has no gradient: take the minimum of both products.",
    "upside down": "The ratio is upside down: it's new over old.",
    "sequence": "Your ratio is that of the whole answer: each token has its own.",
    "ref in ratio": "Your ratio is taken to ref: it belongs to the policy that sampled, old.",
    "no kl": "The KL is missing: BETA times k3 of each token.",
    "kl sign": "The KL has the wrong sign: it's a price, so it is added to the loss.",
    "k1": "That KL is k1, the plain difference: take k3.",
    "mirrored": "Your k3 is mirrored: it has to be steep where a token has become less probable than in the reference.",
    "old in kl": "Your KL is taken to old: it belongs to ref.",
}


def policy_loss(
    new, old, ref, A, mask, wrong: Names = (), clip: float | None = CLIP, grpo: bool = False, limit: int = LIMIT
) -> Tensor:
    """A scalar from log-probs [rows, width] and advantages [rows, 1 or width]. clip: None for REINFORCE; grpo: with a
    KL, and the mean of each answer in place of its sum over `limit`."""
    total, (rows, width) = torch.zeros((), dtype=torch.float64), mask.shape
    for i, real in enumerate(mask):
        keep = torch.ones_like(real) if "mask" in wrong else real
        now, was, start, a = (x.double().expand(mask.shape)[i][keep] for x in (new, old, ref, A))
        apart = now - (start if "ref in ratio" in wrong else was)
        ratio = pick(wrong, {"upside down": -apart, "sequence": apart.sum()}, apart).exp()
        gain = a * now
        if clip and "log-prob" not in wrong:
            gain = a * torch.where(a > 0, ratio.clamp(max=1 + clip), ratio.clamp(min=1 - clip))
            gain = pick(wrong, {"no clip": ratio * a, "minimum": ratio.clamp(1 - clip, 1 + clip) * a}, gain)
        d = now - (was if "old in kl" in wrong else start)
        kl = (-d).exp() - 1 + d
        kl = pick(wrong, {"k1": d, "mirrored": d.exp() - 1 - d, "kl sign": -kl, "no kl": 0 * kl}, kl)
        counts = {"tokens": mask.sum(), "lengths": rows * real.sum(), "width": rows * width, "rows": limit, "sum": rows}
        count = pick(wrong, counts, rows * (real.sum() if grpo else limit))
        total = total + (gain - BETA * kl if grpo else gain).sum() / count
    return total if "sign" in wrong else -total


def said_of(*names: str) -> dict[Names, str]:
    return {(name,): SAID[name] for name in names}


def expect_loss(question: Question, *mistakes: str, **options) -> None:
    """Have a question compare a loss with `policy_loss`, and with these mistakes in it."""
    parts = {"the gradient": 0, "the loss": None}
    question.expects(said_of(*mistakes), parts=parts, atol=1e-6)(functools.partial(policy_loss, **options))
