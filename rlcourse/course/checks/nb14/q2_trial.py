"""q2: inputs on which no wrong program looks right, and every right one does."""

from collections.abc import Callable

import numpy as np
import torch

from rlcourse.course.checks import Question, draw
from rlcourse.tasks.kernels.interpret import LARGEST, agrees
from rlcourse.tasks.kernels.language import OPERATIONS, Computation, read_computation

q2 = Question("q2", "trial", hint="List the kinds of rows first: what must be in a row to expose each wrong program?")

MOST = 64  # numbers of an input
Arrays = dict[str, np.ndarray]


def sigmoid_near_0(v: np.ndarray) -> np.ndarray:
    return 0.5 + v / 4 - v**3 / 48


WRONG = {  # by case: op, what a wrong program computes instead, what that is
    "signs": [
        ("abs", lambda v: v, "leaves out an `abs`"),
        ("relu", lambda v: v, "leaves out a `relu`"),
        ("abs", lambda v: -v, "takes `neg` for `abs`"),
        ("relu", lambda v: v * 0, "takes 0 for `relu`"),
        ("neg", lambda v: -np.abs(v), "takes `neg` of `abs` for `neg`"),
    ],
    "reductions": [
        ("rowsum", lambda v: v.max(1, keepdims=True), "takes `rowmax` for `rowsum`"),
        ("rowmax", lambda v: v[:, :1], "takes the first number of a row for its largest"),
        ("rowmax", lambda v: v[:, -1:], "takes the last number of a row for its largest"),
        ("rowsum", lambda v: v[:, :4].sum(1, keepdims=True), "adds up four columns at most"),
        ("rowmax", lambda v: np.abs(v).max(1, keepdims=True), "takes the largest size for the largest number"),
        ("rowmax", lambda v: np.maximum(v.max(1, keepdims=True), 0), "starts its search for the largest at 0"),
    ],
    "operands": [
        ("sub", lambda v, w: w - v, "subtracts the wrong way round"),
        ("div", lambda v, w: w / v, "divides the wrong way round"),
        ("max", lambda v, w: v, "takes the first operand for the larger one"),
        ("max", lambda v, w: w, "takes the second operand for the larger one"),
        ("min", lambda v, w: v, "takes the first operand for the smaller one"),
        ("mul", lambda v, w: v * v, "multiplies an operand by itself"),
        ("add", lambda v, w: 2 * w, "adds an operand to itself"),
    ],
    "large and small": [
        ("sigmoid", lambda v: (v > 0) * 1.0, "has a step for `sigmoid`"),
        ("sigmoid", sigmoid_near_0, "has a sigmoid that is right near 0 alone"),
        ("sigmoid", lambda v: 1 / (1 + np.exp(-np.clip(v, -2, 2))), "has a sigmoid that is flat beyond 2"),
        ("max", lambda v, w: np.minimum(np.maximum(v, w), 3), "has no value above 3"),
        ("abs", lambda v: np.minimum(np.abs(v), 3), "has no value above 3"),
    ],
}


def computation_with(op: str) -> Computation:
    """A computation that has this operation, of inputs that are drawn."""
    u, v, w = (list("uvwx")[i] for i in torch.randperm(4)[:3])
    unary = {"abs", "relu", "neg", "sigmoid", "rowsum", "rowmax"}
    inner = f"a = {op} {u}" if op in unary else f"a = {op} {u} {v}"
    join = ("add", "sub")[draw(0, 1)]
    return read_computation(f"{inner} ; y = {join} a {w if draw(0, 1) or op in unary else v}")


def outcome(computation: Computation, inputs: Arrays, op: str = "", instead: Callable | None = None, dtype=np.float64):
    """y in a dtype, with something else in the place of one operation."""
    values = {name: value.astype(dtype) for name, value in inputs.items()}
    with np.errstate(all="ignore"):
        for line in computation.lines:
            run = instead if line.op == op else OPERATIONS[line.op]
            values[line.name] = run(*(values[name] for name in line.args))
    return values["y"]


def asked(f, computation: Computation) -> Arrays:
    """The inputs that `f` draws. Raises AssertionError if they are none, or are the same for another seed."""
    names, seed = list(computation.inputs), draw(0, 10**6)
    found = []
    for number in (seed, seed + draw(1, 50)):
        values = f(names, number)
        shape = list(values.shape) if torch.is_tensor(values) else type(values).__name__
        assert torch.is_tensor(values) and values.dim() == 3 and len(values) == len(names), (
            f"expected a tensor [{len(names)} inputs, rows, columns], got {shape}"
        )
        most = values[0].numel()
        assert 0 < most <= MOST, f"an input has {most} numbers, and at most {MOST} are tried"
        assert values.isfinite().all(), "all inputs must be finite"
        found.append(values)
    first, second = found
    same = first.shape == second.shape and bool((first == second).flatten(1).float().mean(1).max() > 0.5)
    assert not same, "another seed gives the same numbers: a program that has seen them could know the answers by heart"
    return {name: value.double().numpy().astype(np.float32) for name, value in zip(names, first, strict=True)}


def check_trial(f, kind: str) -> None:
    for op, instead, words in WRONG[kind]:
        computation = computation_with(op)
        inputs = asked(f, computation)
        y = outcome(computation, inputs)
        compared = np.isfinite(y) & (np.abs(y) <= LARGEST)
        assert compared.mean() > 0.5, f"{computation}: most results are too large to be compared"
        right = outcome(computation, inputs, dtype=np.float32)
        assert agrees(right, y), f"{computation}: float32 is not exact enough there, so a right program is refused"
        survives = agrees(outcome(computation, inputs, op, instead), y)
        assert not survives, f"{computation}: a program that {words} is not found out"


@q2.case("signs")
def _(f):
    check_trial(f, "signs")


@q2.case("reductions")
def _(f):
    check_trial(f, "reductions")


@q2.case("which operand is which")
def _(f):
    check_trial(f, "operands")


@q2.case("large and small numbers")
def _(f):
    check_trial(f, "large and small")
