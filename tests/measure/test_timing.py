"""Seconds of calls and of phases."""

import time

import pytest
import torch

from rlcourse.measure.timing import PhaseTimer, measure, median_and_spread, median_seconds, seconds

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """A clock that stands still but for what is added to its one number."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_seconds_are_those_of_the_call(clock):
    assert seconds(lambda: clock.__setitem__(0, clock[0] + 2.5), CPU) == 2.5


def test_the_median_leaves_the_first_call_out(clock):
    waits = iter([100.0, 1.0, 3.0, 2.0])

    def run():
        clock[0] += next(waits)

    assert median_seconds(run, CPU, repeats=3) == 2.0


def test_what_warms_up_does_not_count():
    values = iter(range(10))
    assert measure(lambda: next(values), repeats=3, warmup=2) == [2, 3, 4]


def test_the_spread_is_the_interquartile_range_as_a_share_of_the_median():
    assert median_and_spread([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, 2.0 / 3.0)
    assert median_and_spread([4.0, 2.0]) == (3.0, 0.0)


@pytest.fixture
def timer(monkeypatch) -> PhaseTimer:
    """A timer by a clock that each look moves on by one second."""
    ticks = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    return PhaseTimer(CPU)


def test_a_phase_that_comes_again_adds_up(timer):
    for _ in range(3):
        with timer("rollout"):
            pass
    with timer("update"):
        time.perf_counter()
    assert timer.take() == {"rollout_s": 3.0, "update_s": 2.0}


def test_a_phase_around_others_holds_them(timer):
    with timer("step"):
        with timer("rollout"):
            pass
        with timer("update"):
            pass
    assert timer.take() == {"rollout_s": 1.0, "update_s": 1.0, "step_s": 5.0}


def test_what_was_taken_starts_again_at_nothing(timer):
    with timer("rollout"):
        pass
    assert timer.take() and timer.take() == {}


def test_a_phase_that_fails_is_timed_all_the_same(timer):
    with pytest.raises(ZeroDivisionError), timer("update"):
        raise ZeroDivisionError
    assert timer.take() == {"update_s": 1.0}


@pytest.mark.parametrize(("device", "waits"), [("cpu", 0), ("cuda", 2)])
def test_the_gpu_is_waited_for_at_both_ends_of_a_phase(device, waits, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append(1))
    with PhaseTimer(torch.device(device))("rollout"):
        pass
    assert len(calls) == waits
