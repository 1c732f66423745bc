"""The task `kernels` with measured times: programs are lowered to Triton and run on the GPU of this machine.

    rlcourse train --preset kernels --task tools.measured:load

A program must be correct for `rlcourse/tasks/kernels/judge.py` and on the GPU. The reward is as for counted times, with
measured speed-ups.
"""

import importlib.util
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from rlcourse.tasks.kernels import task as counted
from rlcourse.tasks.kernels.clock import H200
from rlcourse.tasks.kernels.judge import Finding, agrees, draw_inputs, reference
from rlcourse.tasks.kernels.language import Computation, Statement, eager, parse
from rlcourse.tasks.kernels.lowering import lower
from rlcourse.tasks.pool import JudgePool
from rlcourse.tasks.task import Attempt, Judgement
from tools.bench.graphs import graph_seconds

Program = list[Statement]

TEST_SEED = 5
COMPILERS = min(16, os.cpu_count() or 1)  # processes
SECONDS = 60  # for one of them to compile a program and run it
CALLS, REPEATS = 5, 5  # of a program in one CUDA graph, and of timings
METRICS = {"measured_speedup": ".2f", "measured_fast_1.5": ".1%", "measured_fast_2": ".1%"}  # the first of correct ones


def run_of(computation: Computation, program: Program) -> Callable[..., Tensor]:
    """The lowered program, a function of the computation's inputs, [rows, columns] float32, that returns y."""
    with tempfile.TemporaryDirectory() as folder:  # Triton reads the text of its kernels from a file
        path = Path(folder) / "lowered.py"
        path.write_text(lower(program, computation))
        spec = importlib.util.spec_from_file_location("lowered", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module.run


def is_right(candidate: tuple[Computation, Program]) -> bool:
    """Whether the lowered program agrees with the reference, on a few rows of the clock's width."""
    computation, program = candidate
    inputs = draw_inputs(computation, TEST_SEED, H200.columns)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    y = run_of(computation, program)(*(torch.tensor(inputs[name], device=device) for name in computation.inputs))
    return agrees(y.cpu().numpy(), reference(computation, inputs)["y"])


class Stopwatch:
    """Times lowered programs, each once."""

    def __init__(self):
        self.pool = JudgePool("tools.measured:is_right", COMPILERS, SECONDS)
        self.taken: dict[tuple[Computation, tuple[Statement, ...]], float | None] = {}

    def us(self, candidates: list[tuple[Computation, Program]]) -> list[float | None]:
        """Microseconds of each for matrices of the clock's size; None for one whose result is wrong."""
        asked = [(computation, tuple(program)) for computation, program in candidates]
        new = [candidate for candidate in dict.fromkeys(asked) if candidate not in self.taken]
        # The processes also fill Triton's cache on disk.
        right = self.pool.map([(computation, list(program)) for computation, program in new])
        for (computation, program), found in zip(new, right, strict=True):
            self.taken[computation, program] = time_us(computation, list(program)) if found is True else None
        return [self.taken[candidate] for candidate in asked]


def time_us(computation: Computation, program: Program) -> float:
    """Microseconds of a program in a CUDA graph, a median."""
    run = run_of(computation, program)
    inputs = [torch.randn(H200.rows, H200.columns, device="cuda") for _ in computation.inputs]

    def calls() -> None:
        for _ in range(CALLS):
            run(*inputs)

    return 1e6 * graph_seconds(calls, REPEATS)[0] / CALLS


@dataclass(frozen=True)
class MeasuredTask(counted.KernelTask):
    """The task `kernels`, whose rewards are measured times. Counted times stay among the metrics."""

    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    @property
    def metrics(self) -> dict[str, str]:
        return super().metrics | METRICS

    def judge(self, attempts: list[Attempt], training: bool) -> list[Judgement]:
        verdicts = super().judge(attempts, training)
        correct = [i for i, verdict in enumerate(verdicts) if verdict.right]
        asked = [attempts[i].problem.computation for i in correct]
        eager_us = self.stopwatch.us([(computation, eager(computation)) for computation in asked])
        own_us = self.stopwatch.us([(attempts[i].problem.computation, parse(attempts[i].text)) for i in correct])
        speedups = [0.0] * len(attempts)
        for i, slow, fast in zip(correct, eager_us, own_us, strict=True):
            speedups[i] = slow / fast if slow and fast else 0.0
        return [with_measured(verdict, speedup) for verdict, speedup in zip(verdicts, speedups, strict=True)]


def with_measured(verdict: Judgement, speedup: float) -> Judgement:
    """The verdict with its reward by the measured speed-up, 0 for a program that is wrong on the GPU."""
    metrics = dict(zip(METRICS, (speedup or None, float(speedup >= 1.5), float(speedup >= 2)), strict=True))
    if verdict.metrics["correct"] is None:  # of a long problem, which is measured apart
        metrics = dict.fromkeys(METRICS)
    right = speedup > 0
    return Judgement(right, verdict.metrics | metrics, Finding(right, right, speedup).reward, verdict.words)


def load(data_dir: str | None = None) -> MeasuredTask:
    """The task with the problems of `data_dir`, or those that ship. Raises ValueError without a GPU."""
    if not torch.cuda.is_available():
        raise ValueError("Programs are timed on a GPU, and no CUDA GPU was found: use --task kernels, which counts.")
    task = counted.load(data_dir)
    return MeasuredTask("kernels-measured", task.train, task.validation, task.test)
