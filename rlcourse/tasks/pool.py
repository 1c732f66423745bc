"""Judges in processes of their own: one that hangs, dies or takes all memory costs its candidate alone.

    pool = JudgePool("rlcourse.tasks.boxed:compare", processes=4, seconds=5)
    results = pool.map(items)  # in their order; a Failed where there is none

The function is named, not given, so that a process imports it and nothing else: no torch, no GPU, nothing of the
caller's main program. This keeps slow and broken judges apart; it is not a sandbox for code that means harm.
"""

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

START_SECONDS = 300  # for the imports of a process, on a busy machine
GRACE = 5  # seconds more, after which a process ends by itself
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)


@dataclass(frozen=True)
class Failed:
    """What came of an item that was not judged, in words."""

    reason: str


class JudgePool:
    """Calls `function` ("module:name") on items, in at most `processes` at a time, for `seconds` each.

    memory_gb: address space that a process may take, where the system can limit it. Processes start when they are
    needed and wait for the next items; they end with the pool or with this process.
    """

    def __init__(self, function: str, processes: int, seconds: float, memory_gb: float | None = None):
        self.processes = processes
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

        with ThreadPoolExecutor(self.processes) as threads:
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
        done, result = self._exchange(item, self.seconds)
        if not done:
            code = self.stop(patience=1.0)  # one that has closed its end is about to end by itself
            return Failed(f"took longer than {self.seconds:g} s" if result == "late" else f"its process ended ({code})")
        ok, value = result
        return value if ok else Failed(value)

    def stop(self, patience: float = 0.0) -> int | None:
        """End the process and all that it started, in `patience` seconds. Returns its exit code, negative for a
        signal."""
        process, self.process = self.process, None
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        _kill(process)
        with contextlib.suppress(OSError):  # of what was not sent
            process.stdin.close()
        process.stdout.close()
        return process.wait()

    def _start(self) -> None:
        self.stop()
        command = [sys.executable, "-P", "-c", "from rlcourse.tasks.pool import serve; serve()"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
            start_new_session=True,
        )  # fmt: skip
        done, result = self._exchange((self.function, self.memory_gb, self.seconds), START_SECONDS)
        if not done or not result[0]:
            self.stop()
            why = result[1] if done else "its process ended" if result == "ended" else "it did not start"
            raise RuntimeError(f"The judge {self.function} cannot be loaded: {why}.")

    def _exchange(self, item: Any, seconds: float) -> tuple[bool, Any]:
        """(True, the answer), or (False, "late" or "ended")."""
        late, process = threading.Event(), self.process

        def too_late():
            late.set()
            _kill(process)

        timer = threading.Timer(seconds, too_late)
        timer.start()
        try:
            process.stdin.write(pickle.dumps(item))
            process.stdin.flush()
            return True, pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            return False, "late" if late.is_set() else "ended"
        finally:
            timer.cancel()
            timer.join()
            if late.is_set():  # perhaps just after the answer
                process.wait()


def serve() -> None:
    """What a process does: load the function, then answer items until there are none. What the function prints goes
    nowhere, and it cannot read the items that wait."""
    items, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    place, memory_gb, seconds = pickle.load(items)
    try:
        from rlcourse.tasks import object_at

        if memory_gb is not None:
            _limit_memory(int(memory_gb * 1e9))
        function = object_at(place)
        _answer(answers, True, None)
    except Exception as error:
        _answer(answers, False, f"{type(error).__name__}: {error}")
        return
    while True:
        try:
            item = pickle.load(items)
        except EOFError:
            return
        try:
            if hasattr(signal, "alarm"):  # for the case that nobody is left to end this process
                signal.alarm(int(seconds + GRACE))
            _answer(answers, True, function(item))
        except Exception as error:
            _answer(answers, False, f"{type(error).__name__}: {error}")
        finally:
            if hasattr(signal, "alarm"):
                signal.alarm(0)


def _answer(answers, ok: bool, value: Any) -> None:
    content = pickle.dumps((ok, value))  # whole, or an error, before a byte of it is written
    answers.write(content)
    answers.flush()


def _limit_memory(size: int) -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _kill(process: subprocess.Popen) -> None:
    """The process and whatever it started."""
    try:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, KILL)
        else:
            process.kill()
    except (ProcessLookupError, PermissionError):  # it has ended
        pass


def _stop(workers: list[Worker]) -> None:
    for worker in workers:
        worker.stop()
