"""Immediate feedback for exercises: `check.q1(your_function)` shows a card that says what passed and what did not.

A `Question` holds cases; each tries the reader's function and fails with a sentence that names the mistake where it is
a usual one. A check never raises, so that Run All always completes, unless RLCOURSE_STRICT=1 asks for it. The grader
(`rlcourse.course.grading`) runs the same cases against a function in another process.
"""

import html
import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlcourse.course.calls import OutOfTime, gradient, pieces, time_limit, where
from rlcourse.sandbox.wire import Unreadable, plain


class CheckFailed(AssertionError):
    """A check that did not pass, under RLCOURSE_STRICT=1."""


@dataclass(frozen=True)
class Case:
    """One promise about the reader's function: `test` takes a `Local` or remote function and raises if it is broken."""

    name: str
    test: Callable
    points: float
    hidden: bool


@dataclass(frozen=True)
class CaseResult:
    name: str
    passed: bool
    message: str
    points: float
    hidden: bool
    seconds: float


@dataclass
class Result:
    """What a check found. In a notebook it shows as a card, elsewhere as text."""

    question: str
    function: str
    cases: list[CaseResult] = field(default_factory=list)
    hint: str = ""

    @property
    def passed(self) -> bool:
        return bool(self.cases) and all(case.passed for case in self.cases)

    @property
    def possible(self) -> float:
        return sum(case.points for case in self.cases)

    @property
    def score(self) -> float:
        return sum(case.points for case in self.cases if case.passed)

    def __repr__(self) -> str:
        head = f"{'PASSED' if self.passed else 'NOT YET'}  {self.question} {self.function}"
        lines = [f"  {'ok' if c.passed else 'no'}  {c.name}{': ' + c.message if c.message else ''}" for c in self.cases]
        return "\n".join([head, *lines, *([f"  hint: {self.hint}"] if self.hint else [])])

    def _repr_html_(self) -> str:
        color = "#1a7f37" if self.passed else "#cf222e"
        rows = "".join(
            f"<li>{'✅' if c.passed else '❌'} {html.escape(c.name)}"
            + (f"<br><span style='margin-left:1.6em'>{html.escape(c.message)}</span>" if c.message else "")
            + "</li>"
            for c in self.cases
        )
        hint = f"<p style='margin:4px 0 0'>💡 {html.escape(self.hint)}</p>" if self.hint else ""
        verdict = "passed" if self.passed else "not yet"
        return (
            f"<div class='rlcourse-card' data-passed='{str(self.passed).lower()}' "
            f"style='border-left:4px solid {color};padding:4px 12px'>"
            f"<b style='color:{color}'>{html.escape(self.question)} · <code>{html.escape(self.function)}</code> · "
            f"{verdict}</b>"
            f"<ul style='list-style:none;padding-left:0;margin:4px 0'>{rows}</ul>{hint}</div>"
        )


class Local:
    """The reader's function in this process. What it returns is taken as the grader takes it from another.

    kernels: whether it makes kernels, which need a compiler (`rlcourse.course.checks.kernels`).
    """

    kernels = False

    def __init__(self, function: Callable):
        self.function = function
        self.limited = time_limit  # a context in which a case may take so many seconds

    def __call__(self, *arguments, **options):
        return received(self.function(*copied(arguments), **copied(options)))

    def gradient(self, *arguments, wrt: int = 0, **options) -> Tensor:
        """Gradient of the sum of the function's result with respect to argument number `wrt`, of its shape."""
        return gradient(self.function, *copied(arguments), wrt=wrt, **copied(options))

    def pieces(self, *arguments) -> list[list[str]]:
        """The graphs that Dynamo makes of a call, as `rlcourse.course.calls.pieces` has them."""
        return pieces(self.function, *copied(arguments))


def received(value):
    """A value as the grader gets it from another process. Raises AssertionError for what cannot get there."""
    try:
        return plain(value)
    except Unreadable as refused:
        raise AssertionError(str(refused)) from None


def copied(value):
    """The same value with tensors copied, so that a function that writes into its arguments harms nothing else."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, tuple | list):
        return type(value)(copied(v) for v in value)
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    return value


class Question:
    """One exercise. name: as in `check.q1`; function: what the reader writes; hint: shown while nothing is written.

    seconds: how long one case may take; all of them together may take three times that. caller: how the function is
    called in a notebook.
    """

    def __init__(self, name: str, function: str, hint: str, seconds: float = 10, caller: type | None = None):
        self.name, self.function, self.hint, self.seconds = name, function, hint, seconds
        self.caller = caller or Local
        self.cases: list[Case] = []
        self.passed = False  # at the last call: `if check.q1.passed:` guards a cell that uses the reader's function

    def case(self, name: str, points: float = 1.0, hidden: bool = False) -> Callable:
        """Decorator: add a case to the question. The test takes the function and fails with AssertionError."""

        def add(test: Callable) -> Callable:
            self.cases.append(Case(name, test, points, hidden))
            return test

        return add

    def __call__(self, function: Callable) -> Result:
        """Check `function` and return the card. Raises CheckFailed only under RLCOURSE_STRICT=1."""
        result = self.run(self.caller(function), seed=0)
        self.passed = result.passed
        if os.environ.get("RLCOURSE_STRICT") == "1" and not result.passed:
            raise CheckFailed(repr(result))
        return result

    def run(self, function, seed: int) -> Result:
        """Try every case. Random inputs come from `seed`; the random numbers of the caller stay what they were."""
        result = Result(self.name, self.function)
        deadline = time.monotonic() + 3 * self.seconds
        for case in self.cases:
            start = time.perf_counter()
            with torch.random.fork_rng(devices=[]):
                message = self._message(case, function, seed, deadline - time.monotonic())
            passed = message is None
            seconds = time.perf_counter() - start
            message = (message or "")[:MAX_MESSAGE]
            result.cases.append(CaseResult(case.name, passed, message, case.points, case.hidden, seconds))
            if message == NOT_IMPLEMENTED:
                result.hint = self.hint
        return result

    def _message(self, case: Case, function, seed: int, left: float) -> str | None:
        """What went wrong in a case, None for nothing. left: the seconds that are left for the question."""
        torch.manual_seed(seed)
        if left <= 0:
            return "not tried: the cases before it took too long"
        try:
            with function.limited(min(self.seconds, left)):
                case.test(function)
        except NotImplementedError:
            return NOT_IMPLEMENTED
        except AssertionError as error:
            return str(error).strip() or "wrong result"
        except OutOfTime:
            return f"took longer than {min(self.seconds, left):.3g} seconds: is there a loop that never ends?"
        except (Exception, SystemExit) as error:
            return f"{type(error).__name__}: {error}{where(error)}"
        return None


def questions(lesson: str) -> list[Question]:
    """The questions of a module of checks, such as "nb02", in order."""
    module = importlib.import_module(f"{__name__}.{lesson}")
    found = {value.name: value for value in vars(module).values() if isinstance(value, Question)}
    return sorted(found.values(), key=lambda question: int(question.name[1:]))


NOT_IMPLEMENTED = "not implemented yet"
MAX_MESSAGE = 1000  # characters that are kept of what a case or a cell says


def draw(low: int, high: int) -> int:
    """A whole number from `low` to `high`, both included, drawn from the seed of the check."""
    return int(torch.randint(low, high + 1, ()))


def between(low: float, high: float) -> float:
    """A number from `low` to `high`, drawn in the same way."""
    return low + (high - low) * torch.rand((), dtype=torch.float64).item()


def as_tensor(found, what: str = "the result") -> Tensor:
    """What a function returned, as a tensor. Raises AssertionError for what is none."""
    if found is None:
        raise AssertionError(f"{what} is None: is there a `return`?")
    try:
        return torch.as_tensor(found).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise AssertionError(f"{what} should be a tensor, not {type(found).__name__}") from None


def compare(
    found,
    expected: Tensor | float | list[int],
    mistakes: Mapping[str, Tensor | float | list[int]] | None = None,
    what: str = "the result",
    atol: float = 1e-5,
    not_finite: str = "",
) -> None:
    """Raise AssertionError unless `found` is `expected` in shape and, to `atol` + 1e-5 relative, in value.

    mistakes: results of usual mistakes by the sentence that names them. One that does not differ from `expected` on
    this input says nothing and is skipped; where several fit, the card names each, since any of them may be the cause.
    not_finite: the sentence for nan and infinity, in place of the usual one.
    """
    found = as_tensor(found, what)
    expected = exactly(expected)
    if not same(found, expected, atol) and (fit := [s for s, v in (mistakes or {}).items() if same(found, v, atol)]):
        single = [sentence for sentence in fit if "mistakes are left" not in sentence]
        raise AssertionError(" Or: ".join(single or fit[:1]))
    if not expected.dtype.is_floating_point and expected.dtype != torch.bool and found.dtype.is_floating_point:
        raise AssertionError(f"{what} has dtype {found.dtype}, expected whole numbers: {expected.dtype}")
    if found.shape != expected.shape:
        raise AssertionError(f"{what} has shape {list(found.shape)}, expected {list(expected.shape)}")
    if not same(found, expected, atol):
        if not torch.isfinite(found).all() and torch.isfinite(expected).all():
            usual = f"{what} has values that are not finite: a division or a log of zero, an overflow, or inf - inf?"
            raise AssertionError(not_finite or usual)
        if expected.numel() > 12:
            worst = (found.double() - expected.double()).abs().argmax().item()
            i = tuple(int(k) for k in torch.unravel_index(torch.tensor(worst), expected.shape))
            raise AssertionError(f"{what} is wrong: at {list(i)} got {found[i]:.5g}, expected {expected[i]:.5g}")
        raise AssertionError(f"{what} is {rounded(found)}, expected {rounded(expected)}")


def compare_all(found, expected: Sequence, mistakes: Mapping, names: Sequence[str], atol: float = 1e-5) -> None:
    """`compare` for a function that returns several tensors, of these names; `mistakes` are as many each."""
    if not isinstance(found, tuple | list) or len(found) != len(names):
        raise AssertionError(f"the result should be {len(names)} tensors: {', '.join(names)}")
    for part, name in enumerate(names):
        compare(found[part], expected[part], {said: wrong[part] for said, wrong in mistakes.items()}, name, atol)


def same(a: Tensor | float, b: Tensor | float, atol: float) -> bool:
    """Whether two tensors agree in shape and value."""
    a, b = exactly(a), exactly(b)
    both = torch.promote_types(a.dtype, b.dtype)  # a float is no integer, and none of its digits is cut off
    return a.shape == b.shape and torch.allclose(a.to(both), b.to(both), rtol=1e-5, atol=atol)


def exactly(value: Tensor | float) -> Tensor:
    """A value as a tensor that keeps all digits of a float."""
    return torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def rounded(tensor: Tensor):
    """A tensor as numbers short enough for a sentence."""
    if tensor.dtype.is_floating_point:
        tensor = (tensor.double() * 1e4).round() / 1e4
    return tensor.tolist()
