"""Judges in processes of their own: one that hangs, dies or takes all memory costs its candidate alone.

    pool = JudgePool("rlcourse.tasks.boxed:compare", processes=4, seconds=5)
    results = pool.map(items)  # in their order; a Failed where there is none

The function is named, not given, so that a process imports it and nothing else: no torch, no GPU, nothing of the
caller's main program. This keeps slow and broken judges apart; it is not a sandbox for code that means harm.
"""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

START_SECONDS = 300  # for the imports of a process, on a busy machine
GRACE = 5  # seconds more, after which a process ends by itself, should nobody be left to end it


@dataclass(frozen=True)
class Failed:
    """What came of an item that was not judged, in words."""

    reason: str


class JudgePool:
    """Calls `function` ("module:name") on items, in at most `processes` at a time, for `seconds` each.

    memory_gb: address space that a process may take. Processes start when they are needed and wait for the next items;
    they end with the pool or with this process.
    """

    def __init__(self, function: str, processes: int, seconds: float, memory_gb: float | None = None):
        self.workers = [Worker(function, memory_gb, seconds) for _ in range(processes)]
        self.close = weakref.finalize(self, _stop, self.workers)

    def map(self, items: list) -> list[Any]:
        """The function's result for each item, or `Failed`. Items and results must be picklable."""
        idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self.workers:
            idle.put(worker)

        def judge(item):
            worker = idle.get()
            try:
                return worker.call(item)
            finally:
                idle.put(worker)

        with ThreadPoolExecutor(len(self.workers)) as threads:
            return list(threads.map(judge, items))


class Worker:
    """One process, started again after each end."""

    def __init__(self, function: str, memory_gb: float | None, seconds: float):
        self.function, self.memory_gb, self.seconds = function, memory_gb, seconds
        self.process: subprocess.Popen | None = None

    def call(self, item: Any) -> Any:
        """The function's result, or `Failed`."""
        if self.process is None or self.process.poll() is not None:
            self._start()
        answer = self._ask(item, self.seconds)
        if isinstance(answer, str):
            code = self.stop(patience=1.0 if answer == "ended" else 0.0)  # it may be just about to end by itself
            return Failed(f"took longer than {self.seconds:g} s" if answer == "late" else f"its process ended ({code})")
        ok, value = answer
        return value if ok else Failed(value)

    def stop(self, patience: float = 0.0) -> int | None:
        """End the process and all that it started, in `patience` seconds. Its exit code, negative for a signal."""
        process, self.process = self.process, None
        if process is None:
            return None
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait()

    def _start(self) -> None:
        self.stop()
        ours, theirs = socket.socketpair()
        code = f"from rlcourse.tasks.pool import serve; serve({theirs.fileno()})"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment, start_new_session=True,
            )  # fmt: skip
        self.connection = Connection(ours.detach())
        answer = self._ask((self.function, self.memory_gb, self.seconds), START_SECONDS)
        if answer != (True, None):
            self.stop()
            why = f"its process is {answer}" if isinstance(answer, str) else answer[1]
            raise RuntimeError(f"The judge {self.function} cannot be loaded: {why}.")

    def _ask(self, item: Any, seconds: float) -> tuple[bool, Any] | str:
        """The process's answer, (whether it could judge, what it found), else "late" or "ended"."""
        try:
            self.connection.send(item)
            return self.connection.recv() if self.connection.poll(seconds) else "late"
        except (EOFError, OSError):
            return "ended"


def serve(file_descriptor: int) -> None:
    """What a process does: load the function, then answer items until there are none."""
    connection = Connection(file_descriptor)
    place, memory_gb, seconds = connection.recv()
    try:
        from rlcourse.tasks import object_at

        if memory_gb is not None:
            import resource

            resource.setrlimit(resource.RLIMIT_AS, (int(memory_gb * 1e9),) * 2)
        function = object_at(place)
        connection.send((True, None))
    except Exception as error:
        connection.send((False, f"{type(error).__name__}: {error}"))
        return
    with contextlib.suppress(EOFError):
        while True:
            item = connection.recv()
            signal.alarm(int(seconds + GRACE))
            try:
                connection.send((True, function(item)))
            except Exception as error:
                connection.send((False, f"{type(error).__name__}: {error}"))
            signal.alarm(0)


def _stop(workers: list[Worker]) -> None:
    for worker in workers:
        worker.stop()
