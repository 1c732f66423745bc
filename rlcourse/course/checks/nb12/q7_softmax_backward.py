"""q7: the backward pass of a softmax, a kernel to mend."""

import functools

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw
from rlcourse.course.checks.kernels import SECONDS, Maker, execute

q7 = Question(
    "q7",
    "SoftmaxBackward",
    hint="Copy the colleague's lines, then let the card tell you which mistake comes next.",
    seconds=SECONDS,
    caller=Maker,
)


def gradient(z: Tensor, g: Tensor) -> Tensor:
    """Of z [rows, n] from the gradient of its softmax, g [rows, n], by autograd in float64."""
    wide = z.double().requires_grad_()
    (found,) = torch.autograd.grad(wide.softmax(1), wide, g.double())
    return found.float()


def mistaken(z: Tensor, g: Tensor) -> dict[str, Tensor]:
    """What usual mistakes give, by what is said of them."""
    p = z.double().softmax(1)
    product, n = p * g, z.shape[1]
    own = torch.cat([product[:, i::32].sum(1, keepdim=True) for i in range(min(n, 32))], 1)
    whole = product[:, : n // 32 * 32].sum(1, keepdim=True)
    return {
        "A lane's part of the sum is not the sum: add up over all lanes.": p * (g - own[:, torch.arange(n) % 32]),
        "The columns after the last whole 32 have no part in the sum.": p * (g - whole),
        "The sum over the row is missing: all probabilities depend on each logit.": product,
        "The probability in front is missing.": g - product.sum(1, keepdim=True),
        "The sum is added: it is to be taken off.": p * (g + product.sum(1, keepdim=True)),
        "The sum is over g times the probability, not over g alone.": p * (g - g.sum(1, keepdim=True)),
        "It is a sum, not divided by n: the probabilities are the weights of the mean.": p
        * (g - product.mean(1, keepdim=True)),
    }


def check_kernel(f, rows: int, n: int, offset: float = 0.0) -> None:
    """offset: is added to all logits, which changes no probability."""
    z, g = 2 * torch.randn(rows, n) + offset, torch.randn(rows, n)
    dz = torch.full_like(z, torch.nan)
    log_sum = z.double().logsumexp(1).float()
    execute(f, {"z": z, "log_sum": log_sum, "g": g, "dz": dz})
    where = f"for {rows} rows of {n}" + (f" with logits of about {offset:.0f}" if offset else "")
    if dz.isnan().any() and offset:
        raise AssertionError(
            f"There is nan in dz {where}: a power of a large number is infinite, and infinity is lost."
        )
    if dz.isnan().any():
        raise AssertionError(f"{int(dz.isnan().sum())} of {dz.numel()} elements of dz are nan or never written {where}")
    mistakes = {said: found.float() for said, found in mistaken(z, g).items()}
    compare(dz, gradient(z, g), mistakes, what=f"dz {where}", atol=1e-4)


@q7.case("what she tested: rows two by two, of 32, 64 or 96")
def _(f):
    check_kernel(f, 2 * draw(1, 3), 32 * draw(1, 3))


@q7.case("rows of any length")
def _(f):
    kept = functools.cache(lambda: f())
    for n in (draw(2, 31), 32 * draw(1, 2) + draw(1, 31)):
        check_kernel(kept, 2, n)


@q7.case("any number of rows")
def _(f):
    kept = functools.cache(lambda: f())
    for rows in (1, 2 * draw(1, 3) + 1):
        check_kernel(kept, rows, 64)


@q7.case("logits far above zero, and far below it")
def _(f):
    kept = functools.cache(lambda: f())
    for offset in (draw(120, 400), -draw(120, 400)):
        check_kernel(kept, 2, 64, offset)
