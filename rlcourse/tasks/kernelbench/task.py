"""KernelBench as a task: prompts from problems, verdicts from `judging`, in threads that wait for processes."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rlcourse.tasks.kernelbench.judging import Settings, judge_of
from rlcourse.tasks.kernelbench.problems import PROMPT, load_problems
from rlcourse.tasks.task import Attempt, Judgement, ListTask, Problem

if TYPE_CHECKING:
    from rlcourse.policy import Policy

SHARES = {"fast_1": ".1%", "compiled": ".1%", "correct": ".1%", "refused": ".1%", "fast_1.5": ".1%", "fast_2": ".1%"}
METRICS = SHARES | {
    "correctness_rate": ".1%",  # of those that compile
    "speedup": ".2f",  # of right ones, as what follows
    "ms": ".3f",
    "eager_ms": ".3f",
}
TRAINING_TRIALS = 20  # that are timed while training; an evaluation has all of them


def load(data_dir: str | None = None) -> "KernelTask":
    """Level 1, split 80:20 into training and test; a tenth of training is for validation. data_dir: a folder as for
    `load_problems`."""
    train, test = load_problems(data_dir)
    held = max(1, len(train) // 10)
    return KernelTask(train[:-held], train[-held:], test)


@dataclass(frozen=True)
class KernelTask(ListTask):
    train: list[Problem]
    validation: list[Problem]
    test: list[Problem]
    settings: Settings = field(default_factory=Settings)
    processes: int = 4  # candidates judged at once
    name: str = "kernelbench"
    metrics = METRICS

    def prompt(self, problem: Problem, policy: "Policy") -> list[int]:
        return policy.prompt(PROMPT.format(source=problem.question.strip()))

    def judge(self, attempts: list[Attempt], training: bool) -> list[Judgement]:
        settings = self.settings
        if training:
            settings = replace(settings, trials=min(TRAINING_TRIALS, settings.trials))
        with ThreadPoolExecutor(self.processes) as threads:
            return list(threads.map(lambda attempt: judge_attempt(attempt, settings), attempts))


def judge_attempt(attempt: Attempt, settings: Settings) -> Judgement:
    """Metrics are None where nothing was measured, and 0 for the shares of an attempt that failed."""
    failed = dict.fromkeys(METRICS) | dict.fromkeys(SHARES, 0.0)
    if not attempt.finished:
        return Judgement(False, failed, 0.0, "cut off")
    try:
        verdict = judge_of(attempt.problem, settings).judge(attempt.text)
    except (RuntimeError, ValueError) as error:  # of the problem or the machine, not of the attempt
        return Judgement(False, dict.fromkeys(METRICS), 0.0, f"not judged: {error}")
    metrics = failed | {name: value for name, value in verdict.metrics.items() if name in METRICS}
    metrics["correctness_rate"] = metrics["correct"] if metrics["compiled"] else None
    return Judgement(metrics["correct"] == 1.0, metrics, verdict.reward, verdict.reason or "right")
