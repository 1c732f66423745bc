"""q10: a kernel with shared memory."""

import functools

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw
from rlcourse.course.checks.kernels import SECONDS, Maker, execute
from rlcourse.course.checks.nb08.common import loads

q10 = Question(
    "q10",
    "RowNorm",
    hint="Shuffle within a warp, shares[warp] = sum, barrier, add up; and one more.",
    seconds=SECONDS,
    caller=Maker,
)
HIDDEN = 512


def check_row_norm(f, rows: int, **order) -> None:
    x = torch.randn(rows, HIDDEN)
    y = torch.full((rows,), torch.nan)
    report = execute(f, {"x": x, "y": y}, **order)
    squares = x.double().square()
    mistakes = {
        "You forgot the root.": squares.sum(1).float(),
        "This is the root mean square: the norm has no mean.": squares.mean(1).sqrt().float(),
        "Only the first warp's share is in it: add up all of shares.": by_warps(squares)[:, 0].sqrt().float(),
        "Only the last warp's share is in it: add up all of shares.": by_warps(squares)[:, -1].sqrt().float(),
        "The sum of a warp needs all its lanes: this is lane 0's own.": squares[:, ::32].sum(1).sqrt().float(),
    }
    if y.isnan().any():
        raise AssertionError(f"{rows} rows: number {int(y.isnan().nonzero()[0])} of y was never written")
    compare(y, squares.sum(1).sqrt().float(), mistakes, what=f"y for {rows} rows", atol=1e-3)
    if loads(report) > rows * HIDDEN // 32:
        raise AssertionError(
            f"Your warps executed {loads(report)} loads for {rows} rows, where {rows * HIDDEN // 32} are enough: share "
            "each row among all threads."
        )


def by_warps(squares: Tensor) -> Tensor:
    """Sums of the four warps if thread t takes elements t, t + 128, ...: [rows, 4]."""
    return squares.view(len(squares), -1, 4, 32).sum((1, 3))


@q10.case("one row: what crosses from warp to warp")
def _(f):
    check_row_norm(f, 1)


@q10.case("two rows of a block: shared memory is used again")
def _(f):
    check_row_norm(f, 4)


@q10.case("an odd number of rows: the last block has one")
def _(f):
    check_row_norm(f, 2 * draw(1, 3) + 1)


@q10.case("in every order")
def _(f):
    kept = functools.cache(lambda: f())
    for order in ("warp", "serial", "random"):
        check_row_norm(kept, 4, order=order)
    for _ in range(3):
        check_row_norm(kept, 3, order="random", seed=draw(0, 10**6))
