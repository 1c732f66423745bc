"""Judges in processes: results in their order, and whatever one does, the others are judged."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlcourse.tasks.pool import Failed, JudgePool


def judge(item):
    """In another process: does what the item says."""
    what, *rest = item
    if what == "double":
        return 2 * rest[0]
    if what == "sleep":
        time.sleep(rest[0])
        return os.getpid(), "torch" in sys.modules
    if what == "hang":  # deaf to all but SIGKILL, in C, and with a child; says who it is
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "1000"])
        Path(rest[0]).write_text(str(os.getpid()))
        return len(str(9 ** (9**9)))
    if what == "die":
        os._exit(0)
    if what == "raise":
        raise ValueError("what a judgement")
    if what == "print":
        print("{" * 100_000, file=sys.stdout, flush=True)
        os.write(1, b"noise")
        return sys.stdin.read()
    if what == "fill":
        return len(bytearray(rest[0]))


DOUBLES = [("double", n) for n in range(12)]
DOUBLED = [2 * n for _, n in DOUBLES]


@pytest.fixture(scope="module")
def pool():
    patch = pytest.MonkeyPatch()
    patch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    pool = JudgePool("test_pool:judge", processes=2, seconds=2.0)
    yield pool
    pool.close()
    patch.undo()


def test_results_come_in_the_order_of_the_items_and_may_be_large(pool):
    assert pool.map(DOUBLES) == DOUBLED
    assert pool.map([("double", "x" * 10**6)]) == ["x" * 2 * 10**6]
    assert pool.map([]) == []


def test_two_are_judged_at_a_time_in_processes_that_stay_and_hold_no_torch(pool):
    found = [set(pool.map([("sleep", 0.6), ("sleep", 0.6)])) for _ in range(2)]
    assert found[0] == found[1] and len(found[0]) == 2 and not any(torch for _, torch in found[0])
    assert os.getpid() not in {pid for pid, _ in found[0]}


@pytest.mark.parametrize(
    ("item", "reason"),
    [("hang", "took longer than 2 s"), ("die", "its process ended"), ("raise", "ValueError: what a judgement")],
)
def test_a_judge_that_fails_costs_its_candidate_alone_and_leaves_nothing_running(item, reason, pool, tmp_path):
    assert pool.map([*DOUBLES[:5], (item, tmp_path / "pid"), *DOUBLES[5:]]) == [
        *DOUBLED[:5],
        Failed(reason),
        *DOUBLED[5:],
    ]
    assert pool.map(DOUBLES) == DOUBLED
    if item == "hang":
        wait_for_end(os.killpg, int((tmp_path / "pid").read_text()))


def wait_for_end(kill, process: int, seconds: float = 5):
    with pytest.raises(ProcessLookupError):
        for _ in range(int(10 * seconds)):  # until the system has cleared it away
            kill(process, 0)
            time.sleep(0.1)


def test_what_a_judge_prints_and_reads_disturbs_nothing(pool):
    assert pool.map([("print",), *DOUBLES[:3], ("print",)]) == ["", 0, 2, 4, ""]


def test_a_process_that_ended_while_it_was_idle_costs_nobody(pool):
    for pid, _ in pool.map([("sleep", 0.1)] * 2):
        os.kill(pid, 9)
    time.sleep(0.2)
    assert pool.map(DOUBLES) == DOUBLED


@pytest.mark.thorough
def test_a_process_whose_caller_was_killed_ends_by_itself(pool, tmp_path):
    file = tmp_path / "pid"
    source = "import sys; from rlcourse.tasks.pool import JudgePool\n"
    source += "JudgePool('test_pool:judge', processes=1, seconds=1).map([('hang', sys.argv[1])])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    caller = subprocess.Popen([sys.executable, "-P", "-c", source, str(file)], env=environment)
    while caller.poll() is None and not (file.exists() and file.read_text()):
        time.sleep(0.02)
    caller.kill()
    caller.wait()
    worker = int(file.read_text())
    try:
        wait_for_end(os.kill, worker, seconds=30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker, 9)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_memory_is_limited_where_that_is_asked_for(pool):
    small = JudgePool("test_pool:judge", processes=1, seconds=20, memory_gb=1.0)
    assert small.map([("fill", 2 * 10**9), ("fill", 10**6)]) == [Failed("MemoryError: "), 10**6]


def test_a_judge_that_cannot_be_loaded_ends_the_run(pool):
    with pytest.raises(ValueError, match="There is no 'nothing' in test_pool"):
        JudgePool("test_pool:nothing", processes=1, seconds=1)


def test_the_processes_end_with_the_pool(pool):
    other = JudgePool("test_pool:judge", processes=1, seconds=5)
    [(pid, _)] = other.map([("sleep", 0)])
    del other
    gc.collect()
    wait_for_end(os.kill, pid)
