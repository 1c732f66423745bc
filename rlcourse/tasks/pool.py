"""Judges in processes of their own: one that hangs, dies or takes all memory costs its candidate alone. The function is
named, not given, so that a process imports only its module: no torch, no GPU. This keeps slow and broken judges apart;
it is not a sandbox for code that means harm."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any

from rlcourse.tasks import object_at

START_SECONDS = 300  # for a process's imports, on a busy machine
GRACE = 5  # seconds after its time until a process ends itself, in case nobody is left to end it


@dataclass(frozen=True)
class Failed:
    """The result for an item that could not be judged."""

    reason: str


class JudgePool:
    """Calls `function` ("module:name") on items, in at most `processes` at a time, for `seconds` each. memory_gb:
    address space per process. Processes start when needed and end with the pool or with this process."""

    def __init__(self, function: str, processes: int, seconds: float, memory_gb: float | None = None):
        object_at(function)  # raises ValueError here, where somebody reads it, if there is no such function
        self.workers = [Worker(function, memory_gb, seconds) for _ in range(processes)]
        self.close = weakref.finalize(self, lambda workers: [worker.stop() for worker in workers], self.workers)

    def map(self, items: list) -> list[Any]:
        """The function's result for each item, or `Failed`. Items and results must be picklable."""
        own, workers = threading.local(), iter(self.workers)  # each thread's worker
        with ThreadPoolExecutor(
            len(self.workers), initializer=lambda: setattr(own, "worker", next(workers))
        ) as threads:
            return list(threads.map(lambda item: own.worker.call(item), items))


class Worker:
    """One process, restarted after each end."""

    def __init__(self, function: str, memory_gb: float | None, seconds: float):
        self.function, self.memory_gb, self.seconds = function, memory_gb, seconds
        self.process: subprocess.Popen | None = None

    def call(self, item: Any) -> Any:
        """The function's result, or `Failed`."""
        if self.process is None or self.process.poll() is not None:
            self._start()
        with contextlib.suppress(OSError):  # it has just ended, which `_receive` notices
            self.connection.send(item)
        return self._receive(self.seconds)

    def stop(self) -> None:
        """End the process and all that it started."""
        if self.process is None:
            return
        self.connection.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None

    def _start(self) -> None:
        self.stop()
        self.connection, theirs = Pipe()
        serve = f"serve({theirs.fileno()}, {self.function!r}, {self.memory_gb!r}, {self.seconds!r})"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from rlcourse.tasks.pool import serve; {serve}"],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()], env=environment, start_new_session=True,
            )  # fmt: skip
        started = self._receive(START_SECONDS)
        if isinstance(started, Failed):
            raise RuntimeError(f"The judge {self.function} cannot be started: {started.reason}.")

    def _receive(self, seconds: float) -> Any:
        """The process's next answer, or `Failed`; a process that doesn't answer is ended."""
        try:
            if self.connection.poll(seconds):
                ok, value = self.connection.recv()
                return value if ok else Failed(value)
            reason = f"took longer than {seconds:g} s"
        except (EOFError, OSError):
            reason = "its process ended"
        self.stop()
        return Failed(reason)


def serve(file_descriptor: int, function: str, memory_gb: float | None, seconds: float) -> None:
    """What a process does: load the function, then answer items until there are none."""
    connection, call = Connection(file_descriptor), object_at(function)
    if memory_gb is not None:
        import resource  # Windows has none

        resource.setrlimit(resource.RLIMIT_AS, (int(memory_gb * 1e9),) * 2)
    connection.send((True, "started"))
    with contextlib.suppress(EOFError):
        while True:
            item = connection.recv()
            signal.alarm(int(seconds + GRACE))
            try:
                connection.send((True, call(item)))
            except Exception as error:
                connection.send((False, f"{type(error).__name__}: {error}"))
            signal.alarm(0)
