"""Immediate feedback for exercises: `check.q1(your_function)` shows a card that says what passed and what did not.

A `Question` holds cases; each tries the reader's function and fails with a sentence that names the mistake where it is
a usual one. A check never raises, so that Run All always completes, unless RLCOURSE_STRICT=1 asks for it. The grader
(`rlcourse.course.grading`) runs the same cases against a function in another process.
"""

import functools
import html
import importlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from rlcourse.course.calls import OutOfTime, gradient, pieces, time_limit, where
from rlcourse.course.checks.comparison import compare, compare_all
from rlcourse.sandbox.wire import Unreadable, plain


class CheckFailed(AssertionError):
    """A check that did not pass, under RLCOURSE_STRICT=1."""


class Case(NamedTuple):
    """One promise about the reader's function: `test` takes a `Local` or remote function and raises if it is broken."""

    name: str
    test: Callable
    points: float
    hidden: bool


class CaseResult(NamedTuple):
    """What a case found, and what it is worth."""

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
        color, verdict = ("#1a7f37", "passed") if self.passed else ("#cf222e", "not yet")
        rows = ""
        for c in self.cases:
            below = f"<br><span style='margin-left:1.6em'>{html.escape(c.message)}</span>" if c.message else ""
            rows += f"<li>{'✅' if c.passed else '❌'} {html.escape(c.name)}{below}</li>"
        hint = f"<p style='margin:4px 0 0'>💡 {html.escape(self.hint)}</p>" if self.hint else ""
        return (
            f"<div class='rlcourse-card' data-passed='{str(self.passed).lower()}' "
            f"style='border-left:4px solid {color};padding:4px 12px'>"
            f"<b style='color:{color}'>{html.escape(self.question)} · <code>{html.escape(self.function)}</code> · "
            f"{verdict}</b>"
            f"<ul style='list-style:none;padding-left:0;margin:4px 0'>{rows}</ul>{hint}</div>"
        )


class Local:
    """The reader's function in this process. What it returns is taken as the grader takes it from another. kernels:
    whether it makes kernels, which need a compiler (`rlcourse.course.checks.kernels`)."""

    kernels = False

    def __init__(self, function: Callable):
        self.function = function
        self.limited = time_limit  # a context in which a case may take so many seconds

    def __call__(self, *arguments, **options):
        return received(self.function(*copied(arguments), **copied(options)))

    def gradient(self, *arguments, wrt: int = 0, **options) -> Tensor:
        """Gradient of the sum of the result with respect to argument number `wrt`."""
        return gradient(self.function, *copied(arguments), wrt=wrt, **copied(options))

    def pieces(self, *arguments) -> list[list[str]]:  # see `rlcourse.course.calls`
        return pieces(self.function, *copied(arguments))


def received(value):
    """A value as the grader gets it from another process. Raises AssertionError for what cannot get there."""
    try:
        return plain(value)
    except Unreadable as refused:
        raise AssertionError(str(refused)) from None


def copied(value):
    """The same value with tensors copied, so that a function that writes into its arguments harms nothing else."""
    return tree_map_only(Tensor, Tensor.clone, value)


class Question:
    """One exercise. name: as in `check.q1`; function: what the reader writes; hint: shown while nothing is written.
    seconds: how long one case may take; all of them together may take three times that. caller: how the function is
    called in a notebook."""

    def __init__(self, name: str, function: str, hint: str, seconds: float = 10, caller: type | None = None):
        self.name, self.function, self.hint, self.seconds = name, function, hint, seconds
        self.caller = caller or Local
        self.cases: list[Case] = []
        self.reference, self.mistakes, self.parts, self.options = None, {}, {}, {}  # see `expects`
        self.passed = False  # at the last call: `if check.q1.passed:` guards a cell that uses the reader's function

    def case(self, name: str, points: float = 1.0, hidden: bool = False) -> Callable:
        """Decorator: add a case. The test takes the function and fails with AssertionError."""

        def add(test: Callable) -> Callable:
            self.cases.append(Case(name, test, points, hidden))
            return test

        return add

    def cases_of(self, table: Mapping[str, Any]) -> Callable:
        """Decorator: a case for each name in a table, whose test takes the function and the table's entry."""

        def add(test: Callable) -> Callable:
            for name, given in table.items():
                self.case(name)(lambda f, given=given: test(f, given))
            return test

        return add

    def expects(
        self, wrong: Mapping = {}, also: Mapping = {}, parts: Mapping = {"the result": None}, **options
    ) -> Callable:
        """Decorator: the independent implementation that `check` compares a function with. wrong: what the card says of
        each mistake that it makes if the mistake's name is its last argument; also, by what the card says of it: the
        keywords that make a mistake of it, or another function. parts: what is compared, in words (several where a
        function returns several tensors): the number of the argument of a gradient, or None for the result. options:
        those of `compare`."""

        def add(reference: Callable) -> Callable:
            self.reference, self.parts, self.options = reference, parts, options
            self.mistakes = {said: lambda *given, name=name: reference(*given, name) for name, said in wrong.items()}
            for said, mistake in also.items():
                self.mistakes[said] = mistake if callable(mistake) else functools.partial(reference, **mistake)
            return reference

        return add

    def check(self, function, *given, **options) -> None:
        """Compare a function's result, or its gradient, with the reference's, and name the mistake where it is a usual
        one."""
        for what, place in self.parts.items():

            def result(of: Callable, place=place):
                return of(*copied(given)) if place is None else gradient(of, *given, wrt=place)

            found = function(*given) if place is None else function.gradient(*given, wrt=place)
            comparison = compare_all if isinstance(what, tuple) else compare
            right = result(self.reference)
            try:
                comparison(found, right, {}, what, **self.options | options)
            except AssertionError:  # now the mistakes are worth their time
                named = {said: result(wrong) for said, wrong in self.mistakes.items()}
                comparison(found, right, named, what, **self.options | options)

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
        tried = functools.cache(function) if self.caller.kernels else function  # compiles once for all cases
        for case in self.cases:
            start = time.perf_counter()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                message = self._message(
                    lambda case=case: case.test(tried), function.limited, deadline - time.monotonic()
                )
            found = message is None, (message or "")[:MAX_MESSAGE]
            result.cases.append(CaseResult(case.name, *found, case.points, case.hidden, time.perf_counter() - start))
            if message == NOT_IMPLEMENTED:
                result.hint = self.hint
        return result

    def _message(self, test: Callable, limited: Callable, left: float) -> str | None:
        """What went wrong in a case, None for nothing. left: the seconds that are left for the question."""
        if left <= 0:
            return "not tried: the cases before it took too long"
        try:
            with limited(min(self.seconds, left)):
                test()
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
    """A whole number from `low` to `high`, drawn from the seed of the check."""
    return int(torch.randint(low, high + 1, ()))


def between(low: float, high: float) -> float:
    """A number, drawn in the same way."""
    return low + (high - low) * torch.rand((), dtype=torch.float64).item()
