"""Judges in processes: results in their order, and whatever one does, the others are judged."""

import gc
import os
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
        (("sleep", 60), "took longer than 2 s"),
        (("die", 3), "its process ended (3)"),
        (("die", 0), "its process ended (0)"),
        (("signal",), "its process ended (-11)"),
        (("raise",), "ValueError: what a judgement"),
        (("unknown",), "NotImplementedError: unknown"),
    ],
)
def test_a_judge_that_fails_costs_its_candidate_alone(item, reason, pool):
    items = [*DOUBLES[:5], item, *DOUBLES[5:]]
    expected = [2 * n for _, n in DOUBLES]
    assert pool.map(items) == [*expected[:5], Failed(reason), *expected[5:]]
    assert pool.map(DOUBLES) == expected


def test_a_result_that_cannot_be_sent_is_a_failure(pool):
    [failed] = pool.map([("unpicklable",)])
    assert isinstance(failed, Failed) and "pickle" in failed.reason
    assert pool.map(DOUBLES[:2]) == [0, 2]


def test_what_a_judge_prints_and_reads_disturbs_nothing(pool):
    assert pool.map([("print",), *DOUBLES[:3], ("print",)]) == ["", 0, 2, 4, ""]


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


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("judges:nothing", "There is no 'nothing' in judges"),
        ("no_such_module:judge", "There is no module 'no_such_module'"),
    ],
)
def test_a_judge_that_cannot_be_loaded_ends_the_run(place, why, pool):
    with pytest.raises(RuntimeError, match=f"The judge {place} cannot be loaded: ValueError: {why}"):
        JudgePool(place, processes=1, seconds=1).map([1])


def test_the_processes_end_with_the_pool(pool):
    other = JudgePool("judges:judge", processes=1, seconds=5)
    [(pid, _)] = other.map([("who",)])
    process = other.workers[0].process
    del other
    gc.collect()
    assert process.wait(5) == -9
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
