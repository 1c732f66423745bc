"""The functions that a notebook defines, as the cases of a question call them: each call is asked of its worker."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlcourse.course.calls import OutOfTime, time_limit

GRACE_SECONDS = 2  # a call that ends by itself when its time is up needs so long to say so


class Died(Exception):
    """The process ended, hung, or wrote what nobody can read."""


class Remote:
    """The function that a notebook checks, for the cases of one question. A call raises NotImplementedError for a hole,
    AssertionError with a sentence for everything else that goes wrong. A case that ends the process, or hangs so that
    nothing stops it, takes the rest of the question with it. missing: why there is no such function, if there is none;
    every case then fails with that sentence."""

    def __init__(self, run: Any, missing: str = ""):
        self.run, self.missing, self.deadline = run, missing, 0.0
        self.late = False  # a call was not done in its time

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        if self.missing:
            raise AssertionError(self.missing)
        if not self.run.worker.alive:
            raise AssertionError("not tried: a case before it ended or hung the process")
        self.deadline = time.monotonic() + min(seconds, self.run.left)
        with time_limit(seconds + 2 * GRACE_SECONDS):
            yield

    def __call__(self, *arguments, **options) -> Any:
        return self._ask("call", arguments, options)

    def gradient(self, *arguments, wrt: int = 0, **options) -> Any:  # and `pieces`: see `checks.Local`
        return self._ask("gradient", arguments, options | {"wrt": wrt})

    def pieces(self, *arguments) -> Any:
        return self._ask("pieces", arguments, {})

    def _ask(self, kind: str, arguments: tuple, options: dict) -> Any:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise OutOfTime
        try:
            return value(self.run.worker.ask([kind, left, arguments, options], left + GRACE_SECONDS))
        except (TimeoutError, OutOfTime):
            self.late = True
            raise OutOfTime from None
        except Died as death:
            if time.monotonic() >= self.deadline:  # compilers do not take it well to be told that time is up
                raise OutOfTime from None
            raise AssertionError(str(death)) from None


class RemoteMaker(Remote):
    """The class of kernels that a notebook checks. Of the tensors on which one runs, its process learns the shapes."""

    def __call__(self, *arguments, **options) -> Any:
        from rlcourse.course.checks.kernels import read_facts  # it loads the compiler, and few notebooks have kernels

        match self._ask("trace", arguments, options):
            case {"kernel": number, "facts": facts}:
                return read_facts(facts, lambda tensors: self._ask("blocks", (number, tensors), {}), self.run.line)
        raise AssertionError("the kernel could not be read")


def value(answer: Any) -> Any:
    match answer:
        case {"value": found}:
            return found
        case {"error": ["NotImplementedError", *_]}:
            raise NotImplementedError
        case {"error": ["OutOfTime", *_]}:
            raise OutOfTime
        case {"error": ["AssertionError" | "Unreadable", str(message)]}:
            raise AssertionError(message)
        case {"error": [str(kind), str(message)]}:
            raise AssertionError(f"{kind}: {message}")
    raise AssertionError("the result could not be read")
