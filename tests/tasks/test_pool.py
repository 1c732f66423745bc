"""Judges in processes: results in their order, and whatever one does, the others are judged."""

import contextlib
import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlcourse.tasks.pool import Failed, JudgePool

DOUBLES = [("double", n) for n in range(12)]


@pytest.fixture(scope="module")
def pool():
    patch = pytest.MonkeyPatch()
    patch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    pool = JudgePool("judges:judge", processes=2, seconds=2.0)
    yield pool
    pool.close()
    patch.undo()


def test_results_come_in_the_order_of_the_items_and_may_be_large(pool):
    assert pool.map(DOUBLES) == [2 * n for _, n in DOUBLES]
    assert pool.map([("double", "x" * 10**6)]) == ["x" * 2 * 10**6]
    assert pool.map([]) == []


def test_two_are_judged_at_a_time_in_processes_that_stay_and_hold_no_torch(pool):
    pool.map(DOUBLES)
    assert len(set(pool.map([("sleep", 0.6), ("sleep", 0.6)]))) == 2
    found = set(pool.map([("who",)] * 8)) | set(pool.map([("who",)] * 8))
    assert len(found) <= 2 and not any(torch for _, torch in found)
    assert os.getpid() not in {pid for pid, _ in found}


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (("hang",), "took longer than 2 s"),
        (("die", 0), "its process ended (0)"),
        (("raise",), "ValueError: what a judgement"),
    ],
)
def test_a_judge_that_fails_costs_its_candidate_alone(item, reason, pool):
    items = [*DOUBLES[:5], item, *DOUBLES[5:]]
    expected = [2 * n for _, n in DOUBLES]
    assert pool.map(items) == [*expected[:5], Failed(reason), *expected[5:]]
    assert pool.map(DOUBLES) == expected


def test_what_a_judge_prints_and_reads_disturbs_nothing(pool):
    assert pool.map([("print",), *DOUBLES[:3], ("print",)]) == ["", 0, 2, 4, ""]


def test_a_process_that_ended_while_it_was_idle_costs_nobody(pool):
    for pid in {pid for pid, _ in pool.map([("who",)] * 9)}:
        os.kill(pid, 9)
    for worker in pool.workers:
        if worker.process is not None:
            worker.process.wait(5)
    assert pool.map(DOUBLES) == [2 * n for _, n in DOUBLES]


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "fork"), reason="alarms are Unix's")
def test_a_process_whose_caller_was_killed_ends_by_itself(pool, tmp_path):
    file = tmp_path / "pid"
    source = "import sys; from rlcourse.tasks.pool import JudgePool\n"
    source += "JudgePool('judges:judge', processes=1, seconds=1).map([('note', sys.argv[1])])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    caller = subprocess.Popen([sys.executable, "-P", "-c", source, str(file)], env=environment)
    for _ in range(600):
        if file.exists() and file.read_text():
            break
        time.sleep(0.1)
    caller.kill()
    caller.wait()
    worker = int(file.read_text())
    try:
        with pytest.raises(ProcessLookupError):
            for _ in range(300):
                os.kill(worker, 0)
                time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, 9)


def test_what_a_late_judge_started_ends_with_it(pool, tmp_path):
    file = tmp_path / "pid"
    assert pool.map([("child", str(file))]) == [Failed("took longer than 2 s")]
    group = int(file.read_text())
    with pytest.raises(ProcessLookupError):
        for _ in range(50):  # until the system has cleared them away
            os.killpg(group, 0)
            time.sleep(0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_memory_is_limited_where_that_is_asked_for(pool):
    small = JudgePool("judges:judge", processes=1, seconds=20, memory_gb=1.0)
    assert small.map([("fill", 2 * 10**9), ("fill", 10**6)]) == [Failed("MemoryError: "), 10**6]


def test_a_judge_that_cannot_be_loaded_ends_the_run(pool):
    with pytest.raises(RuntimeError, match="The judge judges:nothing cannot be loaded: ValueError: There is no 'noth"):
        JudgePool("judges:nothing", processes=1, seconds=1).map([1])


def test_the_processes_end_with_the_pool(pool):
    other = JudgePool("judges:judge", processes=1, seconds=5)
    [(pid, _)] = other.map([("who",)])
    process = other.workers[0].process
    del other
    gc.collect()
    assert process.wait(5) == -9
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
