"""q6: a norm's backward pass, to be mended."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw

q6 = Question("q6", "mended", hint="Her test has weights of zero. Try others, and compare both gradients.")


def gradients(x: Tensor, weight: Tensor, g: Tensor, eps: float, mistake: str = "") -> tuple[Tensor, Tensor]:
    """Of a norm with 1 + weight over the last dimension of x [rows, heads, d], by autograd in float64."""
    x, weight = (t.double().requires_grad_() for t in (x, weight))
    scale = (x.square().mean(-1, keepdim=True) + (0.0 if mistake == "eps" else eps)).rsqrt()
    if mistake == "held still":
        scale = scale.detach()
    factor = weight if mistake == "no one" else 1 + weight
    dx, dw = torch.autograd.grad((x * scale * factor * g.double()).sum(), (x, weight))
    if mistake == "hers":
        s = scale.detach()
        wide = x.detach()
        along = (g.double() * wide).sum(-1, keepdim=True)
        dx = s * g.double() * (1 + weight.detach()) - wide * s**3 * along / x.shape[-1]
    if mistake == "all heads":
        s, wide = scale.detach(), x.detach()
        along = (g.double() * (1 + weight.detach()) * wide).sum((-2, -1), keepdim=True)
        dx = s * g.double() * (1 + weight.detach()) - wide * s**3 * along / x.shape[-1]
    if mistake == "a mean":
        dw = dw / (x.shape[0] * x.shape[1])
    return dx, dw


MISTAKES = {
    "hers": "It is still hers: try weights that are not 0. Where does the factor stand that y has?",
    "held still": "The scale depends on x: its part of the gradient is missing.",
    "no one": "The factor is 1 + weight.",
    "eps": "eps is missing.",
    "all heads": "Each head has a norm of its own: nothing is summed over heads in the gradient of x.",
    "a mean": "The gradient of the weight is a sum over rows and heads, not a mean.",
}


def check_norm(f, rows: int, heads: int, weight_size: float, x_size: float = 1.0) -> None:
    d, eps = draw(6, 12), 1e-3
    x, g = x_size * torch.randn(rows, heads, d), torch.randn(rows, heads, d)
    weight = weight_size * torch.randn(d)
    found = f(x, weight, g, eps)
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise AssertionError("two tensors are asked for: the gradients of x and of weight")
    expected = gradients(x, weight, g, eps)
    for place, name in enumerate(("the gradient of x", "the gradient of weight")):
        mistakes = {said: gradients(x, weight, g, eps, m)[place].float() for m, said in MISTAKES.items()}
        right = expected[place].float()
        compare(found[place], right, mistakes, what=name, atol=1e-4 * max(1.0, right.abs().max().item()))


@q6.case("weights of zero, as her test has them")
def _(f):
    check_norm(f, 3, 2, 0.0)


@q6.case("weights that have been trained")
def _(f):
    check_norm(f, draw(2, 5), 1, 0.5)


@q6.case("several heads")
def _(f):
    check_norm(f, draw(2, 4), draw(2, 4), 0.5)


@q6.case("small numbers: eps counts")
def _(f):
    check_norm(f, 2, 2, 0.5, x_size=0.03)
