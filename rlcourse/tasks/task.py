"""What a task is: problems, and who says whether an answer is right."""

from dataclasses import dataclass
from typing import Literal, Protocol

from rlcourse.tasks.verify import Verdict, verify

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Problem:
    """One question, a worked answer that ends in a line `#### NUMBER`, and that number as text."""

    question: str
    answer: str
    gold: str
    level: int | None = None


@dataclass(frozen=True)
class Answer:
    """What the policy wrote for a problem, and the verdict. An unfinished answer is never right: its 12 may have been
    about to become 125. tokens: how many, the one that ends it included."""

    problem: Problem
    text: str
    tokens: int
    finished: bool
    verdict: Verdict

    @property
    def strict(self) -> bool:
        """Right, and in the form that was asked for."""
        return self.finished and self.verdict.strict

    @property
    def lenient(self) -> bool:
        """Right, in any form."""
        return self.finished and self.verdict.lenient

    @property
    def formatted(self) -> bool:
        """In the form that was asked for, right or wrong."""
        return self.finished and self.verdict.formatted


class Task(Protocol):
    """What the trainer needs of a task."""

    name: str
    instruction: str  # stands in the system turn; "" for none

    def problems(self, split: Split) -> list[Problem]: ...

    def verify(self, text: str, gold: str) -> Verdict: ...


@dataclass(frozen=True)
class MathTask:
    """A task whose answers are numbers: three lists of problems and the verifier of `rlcourse.tasks.verify`."""

    name: str
    instruction: str
    train: list[Problem]
    validation: list[Problem]
    test: list[Problem]

    def problems(self, split: Split) -> list[Problem]:
        if split not in ("train", "validation", "test"):
            raise ValueError(f"Unknown split {split!r}: use train, validation or test.")
        return getattr(self, split)

    def verify(self, text: str, gold: str) -> Verdict:
        return verify(text, gold)
