"""KernelBench as a task of the trainer: prompts from problems, verdicts from `judging`, side by side in threads.

A candidate's process does the work, so a thread is all that waits for it.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rlcourse.tasks.kernelbench.judging import judge_of
from rlcourse.tasks.kernelbench.problems import HUB, Problem, load_problems
from rlcourse.tasks.kernelbench.verdict import Settings
from rlcourse.tasks.task import Attempt, Judgement, Split

if TYPE_CHECKING:
    from rlcourse.policy import Policy

METRICS = {
    "fast_1": ".1%",
    "compiled": ".1%",
    "correct": ".1%",
    "correctness_rate": ".1%",  # of those that compile
    "refused": ".1%",
    "fast_1.5": ".1%",
    "fast_2": ".1%",
    "speedup": ".2f",  # of right ones, as what follows
    "speedup_over_compiled": ".2f",  # where torch.compile is timed: in an evaluation
    "ms": ".3f",
    "eager_ms": ".3f",
}
TRAINING_TRIALS = 20  # that are timed while training; an evaluation has all of them


def load(data_dir: str | None = None) -> "KernelTask":
    """Level 1: the paper's 80:20 split into problems to train on, a tenth of which is for validation, and to test.

    data_dir: a folder as `load_problems` takes it, instead of the hub.
    """
    source = data_dir or HUB
    train, test = load_problems(source, split="train"), load_problems(source, split="test")
    held = max(1, len(train) // 10)
    return KernelTask(train[:-held], train[-held:], test)


@dataclass(frozen=True)
class KernelTask:
    """Problems, the language that answers are asked for in, and how they are judged, `processes` at a time."""

    train: list[Problem]
    validation: list[Problem]
    test: list[Problem]
    language: str = "triton"
    settings: Settings = field(default_factory=Settings)
    processes: int = 4
    name: str = "kernelbench"

    @property
    def metrics(self) -> dict[str, str]:
        return METRICS

    def problems(self, split: Split) -> list[Problem]:
        if split not in ("train", "validation", "test"):
            raise ValueError(f"Unknown split {split!r}: use train, validation or test.")
        return getattr(self, split)

    def prompt(self, problem: Problem, policy: "Policy") -> list[int]:
        return policy.prompt(problem.prompt(self.language), "")

    def judge(self, attempts: list[Attempt], training: bool) -> list[Judgement]:
        """An attempt that was cut off earns nothing, nor one whose problem this machine cannot judge."""
        settings = self.settings
        if training:
            settings = replace(settings, trials=min(TRAINING_TRIALS, settings.trials), torch_compile=False)
        with ThreadPoolExecutor(self.processes) as threads:
            return list(threads.map(lambda attempt: judge_attempt(attempt, settings), attempts))


def judge_attempt(attempt: Attempt, settings: Settings) -> Judgement:
    """The judgement of one attempt. Metrics are None where nothing was measured, 0 for shares of what failed."""
    if not attempt.finished:
        return Judgement(False, no_metrics(0.0), 0.0, "cut off")
    try:
        verdict = judge_of(attempt.problem, settings).judge(attempt.text)
    except (RuntimeError, ValueError) as error:  # of the problem or the machine, not of the attempt
        return Judgement(False, no_metrics(None), 0.0, f"not judged: {error}")
    right = verdict.metrics["correct"] == 1.0
    metrics = no_metrics(0.0) | {name: value for name, value in verdict.metrics.items() if name in METRICS}
    metrics["correctness_rate"] = metrics["correct"] if metrics["compiled"] else None
    return Judgement(right, metrics, verdict.reward(settings), verdict.reason or "right")


def no_metrics(share: float | None) -> dict[str, float | None]:
    """Every metric: shares of all attempts as given, and None for what only compiled or right kernels have."""
    shares = {name for name, form in METRICS.items() if form.endswith("%")} - {"correctness_rate"}
    return {name: share if name in shares else None for name in METRICS}
