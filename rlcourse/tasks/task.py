"""What a task is: problems, prompts for them, and a judge. Only the task knows what it measures: step, evaluation, logs
and figures use the metrics of its verdicts."""

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
    """A question, a worked answer or "", and the right answer. A task may have a class of its own with `question`,
    `gold` and `level`, by which evaluations report metrics as well."""

    question: str
    answer: str
    gold: str
    level: int | None = None


@dataclass(frozen=True)
class Attempt:
    """What the policy wrote. tokens: their number, with EOS; finished: whether it ended before the token limit."""

    problem: Problem
    text: str
    tokens: int
    finished: bool


@dataclass(frozen=True)
class Judgement:
    """A task's verdict on an attempt; anything with these attributes will do. right: what pass@k counts. metrics: None
    where there is nothing to measure. reward: what training maximizes. words: the verdict for a reader, such as
    "wrong"."""

    right: bool
    metrics: dict[str, float | None]
    reward: float
    words: str


@dataclass(frozen=True)
class Answer(Attempt):
    """An attempt and its verdict."""

    verdict: Judgement

    right = property(attrgetter("verdict.right"))
    # If the verdict is `Readings`: right in the form asked for, right in any form, and in the form asked for.
    strict = property(attrgetter("verdict.strict"))
    lenient = property(attrgetter("verdict.lenient"))
    formatted = property(attrgetter("verdict.formatted"))


class Task(Protocol):
    """What the trainer needs of a task. metrics: each with its format, such as ".1%"; the first one rates a policy."""

    name: str
    metrics: dict[str, str]

    def problems(self, split: Split) -> list[Problem]: ...

    def prompt(self, problem: Problem, policy: "Policy") -> list[int]: ...

    def judge(self, attempts: list[Attempt], training: bool) -> list[Judgement]:
        """A verdict per attempt; an evaluation (`training` is False) may look more closely."""
        ...


class ListTask:
    """A task with lists of problems as attributes named after the splits."""

    def problems(self, split: Split) -> list[Problem]:
        if split not in ("train", "validation", "test"):
            raise ValueError(f"Unknown split {split!r}: use train, validation or test.")
        return getattr(self, split)


@dataclass(frozen=True)
class MathTask(ListTask):
    """A task whose answers are numbers, judged by `rlcourse.tasks.verify`. instruction: the prompt's system turn, ""
    for none. examples: shown before the question with their worked answers. rewarded and reward_format: see
    `Readings`."""

    name: str
    instruction: str
    train: list[Problem]
    validation: list[Problem]
    test: list[Problem]
    examples: tuple[Problem, ...] = ()
    rewarded: str = "strict"
    reward_format: float = 0.0

    def with_settings(self, config: "TrainConfig") -> "MathTask":
        """The task with the config's rewards, and its first training problems as examples. Raises ValueError if they
        are too few."""
        shown, rest = self.train[: config.examples], self.train[config.examples :]
        if len(shown) < config.examples or not all(problem.answer.strip() for problem in shown):
            raise ValueError(f"Task {self.name} has no {config.examples} worked answers to show: use --examples 0.")
        paid = {"rewarded": config.reward_parser, "reward_format": config.reward_format}
        return replace(self, train=rest, examples=tuple(shown), **paid)

    @property
    def metrics(self) -> dict[str, str]:
        return dict.fromkeys(replace(CUT_OFF, rewarded=self.rewarded).metrics, ".1%")

    def prompt(self, problem: Problem, policy: "Policy") -> list[int]:
        return policy.prompt(problem.question, self.instruction, self.shown)

    @property
    def shown(self) -> list[tuple[str, str]]:
        return [(example.question, example.answer) for example in self.examples]

    def verify(self, text: str, gold: str) -> Readings:
        return replace(verify(text, gold), rewarded=self.rewarded, reward_format=self.reward_format)

    def judge(self, attempts: list[Attempt], training: bool) -> list[Readings]:
        """An unfinished attempt is never right: its 12 may have become 125."""
        cut_off = replace(CUT_OFF, rewarded=self.rewarded)
        return [self.verify(a.text, a.problem.gold) if a.finished else cut_off for a in attempts]


def prompts_of(task: Task, problems: list[Problem], policy: "Policy") -> list[list[int]]:
    """The task's prompt for each problem."""
    if getattr(task.prompt, "__func__", None) is MathTask.prompt:  # all at once is faster
        task = task.prompt.__self__  # which another task may wrap
        return policy.prompts([problem.question for problem in problems], task.instruction, task.shown)
    return [task.prompt(problem, policy) for problem in problems]


def mean_metrics(answers: list[Answer]) -> dict[str, float | None]:
    """The mean of each metric over the answers that have it, None if none has. At least one answer."""
    means = {}
    for name in answers[0].verdict.metrics:
        values = [a.verdict.metrics[name] for a in answers if a.verdict.metrics[name] is not None]
        means[name] = sum(values) / len(values) if values else None
    return means


def in_format(value: float | None, form: str) -> str:
    """A metric as printed; a dash for None."""
    return "–" if value is None else format(value, form)
