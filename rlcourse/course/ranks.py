"""Several processes for a notebook, each a rank of one `torch.distributed` group on the CPU (gloo). dill, which comes
with datasets, packs a notebook's function with what it refers to."""

import io
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import dill


class Ranks:
    """`size` processes of one thread each, which start at the first `run` and stay until `close`, an error, or the end
    of this process. seconds: how long a run may take."""

    def __init__(self, size: int, seconds: float = 120.0):
        if size < 1:
            raise ValueError(f"{size} ranks cannot do anything: ask for 1 or more.")
        self.size, self.seconds = size, seconds
        self.processes: list[multiprocessing.Process] = []
        self.pipes: list[Connection] = []
        self.meeting: tempfile.TemporaryDirectory | None = None  # where they find each other

    def run(self, function: Callable, *arguments: Any) -> list[Any]:
        """What `function(rank, *arguments)` returns on each rank; what it prints there is printed here. Raises
        RuntimeError if it fails on a rank, TimeoutError if it takes too long; all processes are then ended."""
        work = dill.dumps((function, arguments), recurse=True)
        try:
            if not self.processes:
                self._start()
            for pipe in self.pipes:
                pipe.send_bytes(work)
            answers = self._answers()
        except BaseException:
            self.close()
            raise
        for rank, (_, printed) in enumerate(answers):
            for line in printed.splitlines():
                print(f"rank {rank}: {line}")
        return [value for value, _ in answers]

    def _start(self) -> None:
        start, self.meeting = multiprocessing.get_context("spawn"), tempfile.TemporaryDirectory()
        for rank in range(self.size):
            ours, theirs = start.Pipe()
            process = start.Process(target=serve, args=(rank, self.size, self.meeting.name, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def _answers(self) -> list[tuple[Any, str]]:
        """(returned, printed) of all ranks. The first error counts: the others may wait for that rank for ever."""
        found: dict[int, tuple[Any, str]] = {}
        until = time.monotonic() + self.seconds
        while len(found) < self.size:
            open_ones = [pipe for rank, pipe in enumerate(self.pipes) if rank not in found]
            ready = wait(open_ones, max(0.0, until - time.monotonic()))
            if not ready:
                late = ", ".join(str(rank) for rank in range(self.size) if rank not in found)
                hint = "does it wait for what nobody sends?"
                raise TimeoutError(f"No answer from rank {late} after {self.seconds:g} s: {hint}")
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    value, printed, error = dill.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    error = "its process has ended"
                if error:
                    raise RuntimeError(f"Rank {rank} failed: {error}.")
                found[rank] = value, printed
        return [found[rank] for rank in range(self.size)]

    def close(self) -> None:
        """End the processes. A later `run` starts others."""
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join()
            pipe.close()
        if self.meeting is not None:
            self.meeting.cleanup()
        self.processes, self.pipes = [], []


def serve(rank: int, size: int, folder: str, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a notebook's stop button reaches all: the first process ends us
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(days=1))
    while True:
        try:
            work = pipe.recv_bytes()
        except EOFError:
            os._exit(0)  # without waiting for other ranks
        pipe.send_bytes(answer(work, rank))


def answer(work: bytes, rank: int) -> bytes:
    """(returned, printed, error) of a packed function on a rank."""
    printed = io.StringIO()
    try:
        function, arguments = dill.loads(work)
        with redirect_stdout(printed):
            value = function(rank, *arguments)
        return dill.dumps((value, printed.getvalue(), ""))
    except (Exception, SystemExit) as failed:
        error = f"{type(failed).__name__}: {failed}".splitlines()[0].rstrip(".")
        return dill.dumps((None, printed.getvalue(), error))
