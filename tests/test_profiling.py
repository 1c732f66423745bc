"""Times by phase and the most memory."""

import sys
import time

import pytest
import torch

from rlcourse import profiling
from rlcourse.profiling import PhaseTimer, peak_memory_bytes

CPU = torch.device("cpu")


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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_is_that_of_the_process_in_bytes():
    with open("/proc/self/status") as status:
        kilobytes = int(next(line for line in status if line.startswith("VmHWM")).split()[1])
    assert peak_memory_bytes(CPU) == pytest.approx(1024 * kilobytes, rel=0.02)


def test_peak_memory_of_a_gpu_is_that_of_its_allocator(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 123)
    assert peak_memory_bytes(torch.device("cuda")) == 123


def test_a_system_that_does_not_say_gives_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)
    assert profiling.peak_memory_bytes(CPU) is None
