"""q9: a kernel to mend."""

import functools
import re

import torch
from torch import Tensor

import ptx_interpreter as ptx
from ptx_interpreter.report import Access
from rlcourse.course.checks import Question, draw
from rlcourse.course.checks.kernels import SECONDS, Maker
from rlcourse.course.checks.nb08.common import check_kernel

q9 = Question(
    "q9",
    "ReluSquared",
    hint="Copy the colleague's lines, then let the card tell you which of the four mistakes comes next.",
    seconds=SECONDS,
    caller=Maker,
)


def relu_squared(gate: Tensor, up: Tensor) -> Tensor:
    """relu(gate)^2 * up in float64, rounded once."""
    return (gate.double().clamp(min=0) ** 2 * up.double()).to(gate.dtype)


def check_relu_squared(f, n: int, **order) -> ptx.Report:
    gate, up = (torch.randn(n).to(torch.bfloat16) for _ in range(2))
    positive = gate.float().clamp(min=0)
    expected, without = relu_squared(gate, up), (gate.float() ** 2 * up.float()).to(torch.bfloat16)
    whole = torch.arange(n) < n // 8 * 8
    mistakes = {
        "It rounds to bfloat16 on the way: round once, at the end.": (
            positive.square().to(torch.bfloat16) * up
        ).float(),
        "The elements after the last whole piece have no relu.": torch.where(whole, expected, without).float(),
        "The square is missing.": (positive * up.float()).to(torch.bfloat16).float(),
        "The relu is missing: negative gates give 0.": without.float(),
        "The product with up is missing.": positive.square().to(torch.bfloat16).float(),
        "That is the square of up, not of the gate.": (positive * up.float() ** 2).to(torch.bfloat16).float(),
    }
    return check_kernel(f, {"gate": gate, "up": up}, expected, mistakes, f"n = {n}", **order)


@q9.case("the numbers, where n is a multiple of 8 x threads")
def _(f):
    check_relu_squared(f, 1024 * draw(1, 3))


@q9.case("any n: the last thread has less to do")
def _(f):
    kept = functools.cache(lambda: f())
    for n in (draw(1, 7), 8 * draw(1, 20), 8 * draw(1, 20) + draw(1, 7), 1024 + draw(1, 7)):
        check_relu_squared(kept, n)


def bytes_a_lane(access: Access) -> int:
    """What one lane moves in a load or store: the opcode says how many values of how many bits."""
    many, bits = re.search(r"(?:\.v(\d))?\.[a-z]+(\d+)$", access.text.split()[0]).groups()
    return int(many or 1) * int(bits) // 8


@q9.case("16 bytes at once, each number once")
def _(f):
    n = 1024 * draw(2, 4)
    report = check_relu_squared(f, n)
    used = [access for access in report.accesses.values() if access.warps]
    narrow = [access for access in used if bytes_a_lane(access) < 16]
    if narrow and sum(access.bytes for access in narrow) < sum(access.bytes for access in used) / 8:
        raise AssertionError(
            f"n = {n} is a multiple of 8, and its last 8 elements went through the branch for the rest: is it < where "
            "<= belongs?"
        )
    if narrow:
        raise AssertionError(
            f"A lane moves {bytes_a_lane(narrow[0])} bytes at once ({narrow[0].text.split()[0]}): copy whole pieces, "
            "as she does with the gate."
        )
    for name in ("gate", "up"):
        if report.read[name] != 2 * n:
            raise AssertionError(f"{name} has {2 * n} bytes and {report.read[name]} were read: load each number once.")
