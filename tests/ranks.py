"""Ranks of a run as forks of the process that tests, which need no second to start; and an engine whose samples depend
on nothing but the prompt and the weights, so that runs of any number of ranks can be compared."""

import faulthandler
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from policies import BruteForce
from tqdm import tqdm

from rlcourse.batch import concatenate

SECONDS = 120  # no rank takes longer, or it waits for one that will never come


def fork(work, printed=os.devnull) -> int:
    """Start `work` in a fork of this process, which prints to a file; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        sys.stdout = sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        tqdm.set_lock(threading.RLock())  # its own is shared with forks, and one that is killed never gives it back
        work()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.stderr.flush()
        os._exit(code)


class KeyedByPrompt(BruteForce):
    """Takes one number from the global random state, as `SharedEngine` does, whatever it is asked."""

    def generate(self, prompts, num_generations, max_new_tokens, sampling):
        torch.randint(2**62, ())
        rollouts = []
        for prompt in prompts:
            with torch.random.fork_rng([]):
                torch.manual_seed(sum(prompt) * len(prompt))
                rollouts.append(super().generate([prompt], num_generations, max_new_tokens, sampling))
        return concatenate(rollouts)


class Ranks:
    """`work(rank)` in `size` processes, as torchrun would start them: what it returns is in `results`, what was printed
    in `printed`, how they ended in `codes`; a negative code is a signal."""

    def __init__(self, size: int, work, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.size, self.work, self.folder = size, work, folder
        self.environment = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
        self.environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        # The store has a thread. A fork made while that thread answers another rank may inherit a lock that nobody ever
        # opens, so all ranks are there before it starts, and are told its port. As with torchrun it outlives them.
        self.port, tell = os.pipe()
        self.pids = [self._start(rank) for rank in range(size)]
        self.store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(tell, f"{self.store.port:5}".encode() * size)
        os.close(tell)
        os.close(self.port)

    def _start(self, rank: int) -> int:
        def work() -> None:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(SECONDS)
            faulthandler.dump_traceback_later(SECONDS - 5, file=sys.stderr)
            os.environ |= self.environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            os.environ["MASTER_PORT"] = os.read(self.port, 5).decode().strip()
            torch.save(self.work(rank), self.folder / f"{rank}.pt")

        return fork(work, self.folder / f"{rank}.txt")

    def end(self) -> "Ranks":
        """Wait for all of them. One that ends by an error does not end the others: they find out, or not."""
        self.codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]
        self.printed = "".join((self.folder / f"{rank}.txt").read_text() for rank in range(self.size))
        found = [self.folder / f"{rank}.pt" for rank in range(self.size)]
        self.results = [torch.load(path, weights_only=False) if path.exists() else None for path in found]
        return self


def on_ranks(size: int, work, folder: Path) -> list:
    """What `work(rank)` returns on each of them, all of which end well."""
    ranks = Ranks(size, work, folder).end()
    assert ranks.codes == [0] * size, ranks.printed
    return ranks.results


def wait_for(condition) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)


def near(line: dict, **tolerance) -> dict:
    """What a line of a log equals that says the same but for rounding."""
    return {name: value if value is None else pytest.approx(value, **tolerance) for name, value in line.items()}
