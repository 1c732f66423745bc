"""q4: adapters merged into a weight."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw

q4 = Question("q4", "merge", hint="What does one adapter add to the weight? When is the sum rounded?")


def merged(weight: Tensor, adapters: list, mistake: str = "") -> Tensor:
    """W + sum of alpha / r B A, entry by entry in float64, which holds every sum here without an error."""
    total = weight.double()
    for a, b, alpha in adapters:
        rank = adapters[0][0].shape[0] if mistake == "first rank" else a.shape[0]
        scale = alpha if mistake == "alpha" else 1.0 if mistake == "no scale" else alpha / rank
        scale = alpha / rank**0.5 if mistake == "root" else scale
        added = scale * torch.einsum("or,ri->oi", b.double(), a.double())
        if mistake == "product":
            added = added.to(weight.dtype).double()
        total = total + (added.T if mistake == "transposed" else added)
        if mistake == "each":
            total = total.to(weight.dtype).double()
    if mistake == "last":
        a, b, alpha = adapters[-1]
        total = weight.double() + alpha / a.shape[0] * b.double() @ a.double()
    return total.float() if mistake == "dtype" else total.to(weight.dtype)


MISTAKES = {
    "alpha": "You multiplied by alpha: the product counts alpha / rank.",
    "no scale": "You left alpha / rank out.",
    "root": "alpha / sqrt(rank) is another method (rsLoRA): here it is alpha / rank.",
    "first rank": "Each adapter has a rank of its own.",
    "last": "You merged the last adapter alone.",
    "each": "You rounded after each adapter: small ones vanish that together do not. Round once.",
    "product": "You rounded B A before it was added: add in float32, and round once.",
}


def grid(*shape: int) -> Tensor:
    """Small whole numbers over 64: products and sums of them are exact in float32, in any order, and not in bf16."""
    return torch.randint(-32, 33, shape) / 64


def adapter(rows: int, columns: int, rank: int, scale: float = 1.0) -> tuple[Tensor, Tensor, float]:
    return grid(rank, columns), scale * grid(rows, rank), float(rank * 2 ** draw(1, 3))


def check_merge(f, weight: Tensor, adapters: list) -> None:
    expected = merged(weight, adapters)
    found = f(weight, adapters)
    mistakes = {
        sentence: wrong
        for name, sentence in MISTAKES.items()
        if (wrong := merged(weight, adapters, name)).shape == expected.shape
    }
    if weight.shape[0] == weight.shape[1]:
        mistakes["You added the transpose of B A."] = merged(weight, adapters, "transposed")
    if isinstance(found, Tensor) and found.dtype != weight.dtype:
        raise AssertionError(f"the result has dtype {found.dtype}, the weight {weight.dtype}")
    if isinstance(found, Tensor) and not torch.equal(found, expected) and found.shape == expected.shape:
        for sentence, wrong in mistakes.items():
            if not torch.equal(wrong, expected) and torch.equal(found, wrong):
                raise AssertionError(sentence)
    compare(found, expected, mistakes, what="the merged weight", atol=0.0)
    if not torch.equal(found, expected):
        raise AssertionError("the merged weight is off in the last bit: add in float32, and round once")


@q4.case("one adapter")
def _(f):
    check_merge(f, grid(6, 4), [adapter(6, 4, draw(2, 3))])


@q4.case("a square weight, three adapters of several ranks")
def _(f):
    check_merge(f, grid(5, 5), [adapter(5, 5, rank) for rank in (4, draw(1, 2), 8)])


@q4.case("bf16")
def _(f):
    check_merge(f, (1 + grid(24, 16)).bfloat16(), [adapter(24, 16, draw(3, 5))])


@q4.case("bf16, small adapters that add up")
def _(f):
    a, b, _ = adapter(24, 16, 2, 2**-8)
    check_merge(f, (1 + grid(24, 16).abs()).bfloat16(), [(a, b, 8.0)] * draw(5, 8))
