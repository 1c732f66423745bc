"""The losses of the loop, row by row in float64, right or with usual mistakes: what lessons 01 to 04 ask for."""

from functools import partial

import torch
from torch import Tensor

from rlcourse.course.checks import Question
from rlcourse.course.checks.builders import Names, pick

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
    question.expects(said_of(*mistakes), parts=parts, atol=1e-6)(partial(policy_loss, **options))
