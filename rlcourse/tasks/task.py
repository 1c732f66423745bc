"""What a task is: problems, prompts for them, and who says how good an answer is.

Nothing else knows what a task measures: step, evaluation, logs and pictures take the metrics that its verdicts have. So
a task of your own is an object with what `Task` lists; `MathTask` is one.
"""

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, Protocol

from rlcourse.tasks.verify import CUT_OFF, Readings, verify

if TYPE_CHECKING:
    from rlcourse.config import TrainConfig
    from rlcourse.policy import Policy

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Problem:
    """One question, a worked answer if there is one, and what is right, as text. A task may have a class of its own,
    with at least `question`, `gold` and `level`. level: evaluations also say how good answers are at each."""

    question: str
    answer: str
    gold: str
    level: int | None = None


@dataclass(frozen=True)
class Attempt:
    """What the policy wrote for a problem. tokens: how many, the one that ends it included; finished: it was ended, not
    cut off at the token limit."""

    problem: Problem
    text: str
    tokens: int
    finished: bool


class Verdict(Protocol):
    """What a task says of an attempt.

    right: what pass@k counts. metrics: the task's, by name, None where there is nothing to measure; logs hold their
    means over those that are not None. words: the verdict for a reader, such as "wrong".
    """

    right: bool
    metrics: dict[str, float | None]
    words: str

    def reward(self, config: "TrainConfig") -> float:
        """What training pays for it."""
        ...


@dataclass(frozen=True)
class Judgement:
    """A `Verdict` whose reward needs no settings, for tasks that have no class of their own for it."""

    right: bool
    metrics: dict[str, float | None]
    earned: float
    words: str

    def reward(self, config: "TrainConfig") -> float:
        return self.earned


@dataclass(frozen=True)
class Answer(Attempt):
    """An attempt and the verdict on it."""

    verdict: Verdict

    right = property(attrgetter("verdict.right"))
    # If the verdict has two `Readings`: right in the form that was asked for, right in any form, and in that form.
    strict = property(attrgetter("verdict.strict"))
    lenient = property(attrgetter("verdict.lenient"))
    formatted = property(attrgetter("verdict.formatted"))


class Task(Protocol):
    """What the trainer needs of a task.

    metrics: the names of what its verdicts measure, each with the format in which it is printed, such as ".1%" for a
    share and ".2f" for a ratio. The first says in one number how good a policy is.
    """

    name: str
    metrics: dict[str, str]

    def problems(self, split: Split) -> list[Problem]: ...

    def prompt(self, problem: Problem, policy: "Policy") -> list[int]:
        """The token ids that the policy continues."""
        ...

    def judge(self, attempts: list[Attempt], training: bool) -> list[Verdict]:
        """A verdict on each attempt; `training` is False in an evaluation, which may look more closely."""
        ...


class ListTask:
    """A task that has a list of problems for each split, as attributes of these names."""

    def problems(self, split: Split) -> list[Problem]:
        if split not in ("train", "validation", "test"):
            raise ValueError(f"Unknown split {split!r}: use train, validation or test.")
        return getattr(self, split)


@dataclass(frozen=True)
class MathTask(ListTask):
    """A task whose answers are numbers, judged by `rlcourse.tasks.verify`.

    instruction: the system turn of a prompt; "" for none. examples: problems whose worked answers come before the
    question. rewarded: the reading that counts, see `Readings`.
    """

    name: str
    instruction: str
    train: list[Problem]
    validation: list[Problem]
    test: list[Problem]
    examples: tuple[Problem, ...] = ()
    rewarded: str = "strict"

    def with_settings(self, config: "TrainConfig") -> "MathTask":
        """The task with the config's reading, and its first training problems as examples, which then don't train.

        Raises ValueError if there are not enough worked answers to show.
        """
        shown, rest = self.train[: config.examples], self.train[config.examples :]
        if len(shown) < config.examples or not all(problem.answer.strip() for problem in shown):
            raise ValueError(f"Task {self.name} has no {config.examples} worked answers to show: use --examples 0.")
        return replace(self, train=rest, examples=tuple(shown), rewarded=config.reward_parser)

    @property
    def metrics(self) -> dict[str, str]:
        return dict.fromkeys(replace(CUT_OFF, rewarded=self.rewarded).metrics, ".1%")

    def prompt(self, problem: Problem, policy: "Policy") -> list[int]:
        return policy.prompt(problem.question, self.instruction, self.shown)

    @property
    def shown(self) -> list[tuple[str, str]]:
        return [(example.question, example.answer) for example in self.examples]

    def verify(self, text: str, gold: str) -> Readings:
        return replace(verify(text, gold), rewarded=self.rewarded)

    def judge(self, attempts: list[Attempt], training: bool) -> list[Readings]:
        """An unfinished attempt is never right: its 12 may have been about to become 125."""
        cut_off = replace(CUT_OFF, rewarded=self.rewarded)
        return [self.verify(a.text, a.problem.gold) if a.finished else cut_off for a in attempts]


def prompts_of(task: Task, problems: list[Problem], policy: "Policy") -> list[list[int]]:
    """The task's prompt for each problem."""
    if getattr(task.prompt, "__func__", None) is MathTask.prompt:  # all at once is faster
        task = task.prompt.__self__  # which another task may wrap
        return policy.prompts([problem.question for problem in problems], task.instruction, task.shown)
    return [task.prompt(problem, policy) for problem in problems]


def mean_metrics(answers: list[Answer]) -> dict[str, float | None]:
    """The mean of each metric over the answers that have it; None if none has. At least one answer."""
    means = {}
    for name in answers[0].verdict.metrics:
        values = [a.verdict.metrics[name] for a in answers if a.verdict.metrics[name] is not None]
        means[name] = sum(values) / len(values) if values else None
    return means


def in_format(value: float | None, form: str) -> str:
    """A metric as it is printed; a dash for None."""
    return "–" if value is None else format(value, form)
