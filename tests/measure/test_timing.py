"""Seconds of calls and of phases."""

import time

import pytest
import torch

from rlcourse.measure.timing import PhaseTimer, measure, median_seconds, seconds

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """A clock that stands still but for what is added to its one number."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_seconds_are_those_of_the_calls_after_the_first(clock):
    waits = iter([100.0, 1.0, 3.0, 2.0, 2.5])

    def run():
        clock[0] += next(waits)

    assert median_seconds(run, CPU, repeats=3) == 2.0
    assert seconds(run, CPU) == 2.5
    values = iter(range(10))
    assert measure(lambda: next(values), repeats=3, warmup=2) == [2, 3, 4]


@pytest.fixture
def timer(monkeypatch) -> PhaseTimer:
    """A timer by a clock that each look moves on by one second."""
    ticks = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    return PhaseTimer(CPU)


def test_phases_that_come_again_or_fail_add_up_within_those_around_them(timer):
    with timer("step"):
        for _ in range(3):
            with timer("rollout"):
                pass
        with pytest.raises(ZeroDivisionError), timer("update"):
            time.perf_counter()
            raise ZeroDivisionError
    assert timer.take() == {"rollout_s": 3.0, "update_s": 2.0, "step_s": 10.0}
    assert timer.take() == {}


@pytest.mark.parametrize(("device", "waits"), [("cpu", 0), ("cuda", 2)])
def test_the_gpu_is_waited_for_at_both_ends_of_a_phase(device, waits, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append(1))
    with PhaseTimer(torch.device(device))("rollout"):
        pass
    assert len(calls) == waits
