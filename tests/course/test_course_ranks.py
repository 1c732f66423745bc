"""Ranks for notebooks: they talk to each other, say what went wrong in one sentence, and leave no process behind."""

import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from rlcourse.course.ranks import Ranks


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def ranks():
    found = Ranks(2, seconds=60)
    yield found
    found.close()


def test_they_add_up_print_and_use_what_is_defined_around_them(ranks, capsys):
    factor = torch.tensor(3.0)

    def scaled(numbers):
        return factor * numbers

    def work(rank, numbers):
        mine = scaled(numbers + rank)
        dist.all_reduce(mine)
        print("my rank is", dist.get_rank(), "of", dist.get_world_size())
        return mine, os.getpid()

    (first, pid), (second, other) = ranks.run(work, torch.arange(4.0))
    assert torch.equal(first, 3.0 * (2 * torch.arange(4.0) + 1)) and torch.equal(first, second)
    assert capsys.readouterr().out == "rank 0: my rank is 0 of 2\nrank 1: my rank is 1 of 2\n"
    assert len({pid, other, os.getpid()}) == 3
    assert [again for _, again in ranks.run(work, torch.arange(4.0))] == [pid, other]  # the same processes


@pytest.mark.thorough
def test_one_that_fails_or_dies_ends_those_that_wait_for_it_and_the_next_run_starts_anew(ranks):
    def work(rank, how):
        if rank == 1 and how == "fails":
            raise ValueError("no gradient here.\nNot at all.")
        if rank == 1 and how == "dies":
            os._exit(3)
        dist.barrier()
        return os.getpid()

    for how, said in {
        "fails": r"^Rank 1 failed: ValueError: no gradient here\.$",
        "dies": r"^Rank \d failed: ",
    }.items():
        before = ranks.run(work, "")
        with pytest.raises(RuntimeError, match=said):
            ranks.run(work, how)
        assert not any(map(alive, before))
        assert not set(ranks.run(work, "")) & set(before)


def test_a_rank_that_waits_for_ever_is_said(ranks, monkeypatch):
    def waits(rank):
        if rank == 0:
            dist.recv(torch.zeros(1), 1)

    with pytest.raises(ValueError, match="ask for 1 or more"):
        Ranks(0)
    ranks.run(lambda rank: dist.barrier())
    monkeypatch.setattr(ranks, "seconds", 1.0)
    with pytest.raises(TimeoutError, match="No answer from rank 0 after 1 s"):
        ranks.run(waits)
    assert ranks.processes == []


@pytest.mark.thorough
def test_no_rank_outlives_a_process_that_is_killed():
    code = (
        "import os, signal, torch.distributed as dist\nfrom rlcourse.course.ranks import Ranks\n"
        "if __name__ == '__main__':\n"
        "    print(*Ranks(2).run(lambda rank: __import__('os').getpid()), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    pids = [int(pid) for pid in done.stdout.split()]
    until = time.monotonic() + 30
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.1)
    assert len(pids) == 2 and not any(map(alive, pids))
