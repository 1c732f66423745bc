"""KernelBench (Ouyang et al. 2025, arXiv:2502.10517) as a task, with its problems or others in its format: a text with
a class `Model`, `get_inputs()` and `get_init_inputs()`, here `question`, and a name, here `gold`. An answer is a text
with a class `ModelNew` that computes the same by kernels of its own. Threads wait for the processes that judge."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlcourse.hub import load_rows
from rlcourse.tasks.kernelbench.judging import Settings, judge_of
from rlcourse.tasks.task import Attempt, Judgement, ListTask, Problem

if TYPE_CHECKING:
    from rlcourse.policy import Policy

HUB = "ScalingIntelligence/KernelBench"
TEST_SHARE = 0.2
PROMPT = """Write Triton kernels (functions under @triton.jit) that compute what this PyTorch module computes, faster.

```python
{source}
```

Answer with one block of Python code that defines `class ModelNew(nn.Module)` with the same `__init__` and `forward` \
arguments. Its `forward` may allocate tensors and change their view; everything else your kernels compute, for other \
batch sizes too.
"""
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


def load_problems(folder: str | None = None) -> tuple[list[Problem], list[Problem]]:
    """Level 1's problems to train on, 80%, and to test, 20% by a hash of the name, each sorted by number. folder: one
    that contains `level1/1_NAME.py` and so on, instead of the hub. Raises FileNotFoundError or ConnectionError."""
    if folder:
        level = Path(folder) / "level1"
        named = [(path, *path.stem.split("_", 1)) for path in level.glob("*_*.py")]
        found = [(int(number), name, path.read_text("utf-8")) for path, number, name in named if number.isdigit()]
        if not found:
            raise FileNotFoundError(f"There is no problem in {level}: expected level1/1_NAME.py.")
    else:
        rows = load_rows(HUB, "give a folder that contains level1/1_NAME.py", split="level_1")
        found = [(int(row["problem_id"]), row["name"], row["code"]) for row in rows]
    problems = [Problem(source, "", name) for _, name, source in sorted(found)]
    ordered = sorted(problems, key=lambda problem: hashlib.blake2b(problem.gold.encode()).digest())
    test = set(ordered[: round(TEST_SHARE * len(ordered))])
    return [p for p in problems if p not in test], [p for p in problems if p in test]


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
