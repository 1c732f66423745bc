"""The functions of a notebook, called in a process of their own as `rlcourse.course.checks.Local` calls one in this."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlcourse.course.checks import OutOfTime, time_limit
from rlcourse.course.grading.notebook import Cell
from rlcourse.course.grading.wire import MAX_BYTES, Unreadable, decode, receive, send

START_SECONDS = 120  # for the libraries to load
CELL_SECONDS = 10  # for one statement of a cell; a whole cell may take twice that
MAX_DEADLY_CELLS = 8  # so many may end or hang the process before the rest are left out
KEPT = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH")  # of the environment, in which there may be secrets
ROOT = str(Path(__file__).resolve().parents[3])


class Died(Exception):
    """The process ended, hung, or wrote what nobody can read."""


class Worker:
    """A process that runs cells and calls functions. memory_bytes: what they may take beyond the libraries."""

    def __init__(self, seed: int, memory_bytes: int):
        self.connection, theirs = socket.socketpair()
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        code = (
            f"import sys; sys.path.insert(0, {ROOT!r})\nfrom rlcourse.course.grading.worker import main\n"
            f"sys.path.remove({ROOT!r}); main({theirs.fileno()})"
        )
        environment = {name: os.environ[name] for name in KEPT if name in os.environ}
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "agg"}
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd=self.folder.name,
            env=environment,
        )
        theirs.close()
        try:
            self.ask([seed, memory_bytes], START_SECONDS)
        except (Died, TimeoutError):
            raise RuntimeError("The process for the notebook's code did not start: is torch installed?") from None

    def ask(self, request: list, seconds: float) -> Any:
        """The answer to a request. Where there is none, the process is killed: what it writes later is lost.

        Raises TimeoutError after `seconds`, Died with a sentence where the process ended or cannot be understood.
        """
        deadline, message = time.monotonic() + seconds, pickle.dumps(request)
        try:
            if seconds <= 0:
                raise TimeoutError
            send(self.connection, message, seconds)
            return decode(receive(self.connection, deadline - time.monotonic(), MAX_BYTES))
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise
            if isinstance(error, EOFError | OSError):
                raise Died("ended the process") from None
            if isinstance(error, Unreadable):
                raise Died(str(error)) from None
            raise

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        """Kill the process and what it started. Nothing happens the second time."""
        if self.connection.fileno() == -1:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        self.folder.cleanup()


class Student:
    """A notebook's cells in a worker that `start` replaces where it died. errors: by cell, why it failed."""

    def __init__(self, cells: list[Cell], seed: int, memory_bytes: int):
        self.cells, self.seed, self.memory_bytes = cells, seed, memory_bytes
        self.worker: Worker | None = None
        self.deadly: dict[int, str] = {}
        self.failed: dict[int, str] = {}

    def start(self) -> None:
        """See to it that a worker lives and has run the cells, but for those that end or hang it."""
        if self.worker is None or not self.worker.alive:
            while not self._run_cells():
                pass

    def _run_cells(self) -> bool:
        """Run all cells in a new worker; False if one, which is left out from now on, ended or hung it."""
        self.close()
        self.worker, self.failed = Worker(self.seed, self.memory_bytes), {}
        for cell in self.cells:
            if cell.number in self.deadly:
                continue
            if len(self.deadly) >= MAX_DEADLY_CELLS:
                self.failed[cell.number] = "not run: too many cells ended or hung the process"
                continue
            try:
                request = ["cell", cell.number, cell.source, cell.whole, CELL_SECONDS]
                error = str(value(self.worker.ask(request, 2 * CELL_SECONDS)))
            except AssertionError as refused:
                error = str(refused)
            except (TimeoutError, Died) as death:
                self.deadly[cell.number] = str(death) or "took too long: is there a loop that never ends?"
                return False
            if error:
                self.failed[cell.number] = error
        return True

    @property
    def errors(self) -> list[str]:
        """A sentence for each cell that failed."""
        return [f"code cell {number}: {error}" for number, error in sorted((self.deadly | self.failed).items())]

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()


class Remote:
    """One function of the notebook, for the cases of one question.

    A call raises NotImplementedError for a hole, AssertionError with a sentence for everything else that goes wrong.
    A case that ends or hangs the process takes the rest of the question with it.
    """

    def __init__(self, student: Student, name: str):
        self.student, self.name = student, name
        self.deadline = 0.0

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """The time that a case may take."""
        if not self.student.worker.alive:
            raise AssertionError("not tried: a case before it ended or hung the process")
        self.deadline = time.monotonic() + seconds
        with time_limit(seconds):
            yield

    def __call__(self, *arguments, **options) -> Any:
        return self._ask("call", arguments, options)

    def gradient(self, *arguments, wrt: int = 0, **options) -> Any:
        """As `rlcourse.course.checks.Local.gradient`."""
        return self._ask("gradient", arguments, options | {"wrt": wrt})

    def _ask(self, kind: str, arguments: tuple, options: dict) -> Any:
        try:
            answer = self.student.worker.ask([kind, self.name, arguments, options], self.deadline - time.monotonic())
        except TimeoutError:
            raise OutOfTime from None
        except Died as death:
            raise AssertionError(str(death)) from None
        if isinstance(answer, dict) and "undefined" in answer:
            raise AssertionError("; ".join([f"`{self.name}` is not defined", *self.student.errors]))
        return value(answer)


def value(answer: Any) -> Any:
    """What a call returned. Raises NotImplementedError for a hole, AssertionError for everything else it raised."""
    match answer:
        case {"value": found}:
            return found
        case {"error": ["NotImplementedError", *_]}:
            raise NotImplementedError
        case {"error": ["AssertionError" | "Unreadable", str(message)]}:
            raise AssertionError(message)
        case {"error": [str(kind), str(message)]}:
            raise AssertionError(f"{kind}: {message}")
    raise AssertionError("the result could not be read")
