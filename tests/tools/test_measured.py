"""The task `kernels` with measured times: a stand-in for the clock where there is no GPU."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is there on Linux alone")

from rlcourse.tasks import Attempt, load_task
from rlcourse.tasks.kernels.language import eager, parse, read_computation, write
from rlcourse.tasks.kernels.lowering import lower
from rlcourse.tasks.kernels.task import KernelProblem
from tools import measured

CHAIN = KernelProblem(read_computation("a = add u v ; b = relu a ; y = mul b w"))
EAGER = write(eager(CHAIN.computation))
MERGED = "a = add u v put ; b = relu a end put ; y = mul b w end put ;"
TIMES = {1: 4.0, 2: 5.0, 3: 12.0, 6: 30.0}  # microseconds of so many launches


@pytest.fixture
def clock(monkeypatch):
    """The task with a clock that gives `TIMES`, and a list of what it has timed."""
    timed = []

    def time_us(computation, program):
        timed.append(write(program))
        return TIMES[lower(program, computation).count("@triton.jit")]

    monkeypatch.setattr(measured, "time_us", time_us)
    monkeypatch.setattr(measured, "COMPILERS", 1)
    with monkeypatch.context() as there:
        there.setattr(torch.cuda, "is_available", lambda: True)
        task = load_task("tools.measured:load")
    return replace(task, stopwatch=measured.Stopwatch()), timed


def judged(task, problem, *texts, training=True):
    return task.judge([Attempt(problem, text, 10, True) for text in texts], training)


def test_the_reward_is_by_measured_times_and_each_program_is_timed_once(clock):
    task, timed = clock
    texts = [EAGER, MERGED, CHAIN.gold, MERGED, "y = add u v end put ;", "nonsense"]
    verdicts = judged(task, CHAIN, *texts)
    assert [v.metrics["measured_speedup"] for v in verdicts] == [1.0, 12 / 5, 12 / 4, 12 / 5, None, None]
    assert [v.reward for v in verdicts] == pytest.approx([0.2, 1.6, 2.2, 1.6, 0, 0])
    assert [v.right for v in verdicts] == [True] * 4 + [False] * 2
    assert [v.metrics["measured_fast_2"] for v in verdicts] == [0, 1, 1, 1, 0, 0]
    assert verdicts[1].metrics["speedup"] not in (0, 1, 12 / 5)  # what is counted stays what it is
    assert all(list(v.metrics) == list(task.metrics) for v in verdicts)
    assert sorted(timed) == sorted(texts[:3])
    judged(task, CHAIN, *texts, training=False)
    assert len(timed) == 3


def test_what_is_wrong_on_the_gpu_earns_nothing_and_is_not_timed(clock, monkeypatch):
    task, timed = clock
    honest, wrong = measured.run_of, parse(MERGED)

    def run_of(computation, program):
        run = honest(computation, program)
        return (lambda *inputs: run(*inputs) + 1) if program == wrong else run

    monkeypatch.setattr(measured, "run_of", run_of)
    monkeypatch.setattr(task.stopwatch.pool, "map", lambda candidates: list(map(measured.is_right, candidates)))
    broken, right = judged(task, CHAIN, MERGED, CHAIN.gold)
    assert not broken.right and broken.reward == 0 and broken.metrics["measured_speedup"] is None
    assert right.right and right.reward == pytest.approx(2.2)
    assert MERGED not in timed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="times programs on a GPU")
def test_on_a_gpu_the_optimum_is_faster_than_eager():
    task = load_task("tools.measured:load")
    problems = [problem for problem in task.test if not problem.is_long][:8]
    verdicts = [verdict for problem in problems for verdict in judged(task, problem, problem.gold, training=False)]
    assert all(v.right for v in verdicts)
    assert all(v.metrics["measured_speedup"] > 1.2 for v in verdicts if v.metrics["speedup"] > 1.5)
