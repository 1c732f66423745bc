"""Grade exercise notebooks: the reader's functions run in a process of their own, the tests in this one.

What comes back from that process is data, never code, so that nothing a notebook redefines, overwrites or patches
changes a verdict. `rlcourse grade` is the command; `rlcourse.grading.report` writes what it finds.
"""

import importlib
import json
import os
import pickle
import random
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rlcourse.checks import Result
from rlcourse.grading.notebook import checks_module, read_notebook, student_cells
from rlcourse.grading.wire import Unreadable, decode, frame, read_frame

START_SECONDS = 60  # to start a worker and to run one cell; a cell that can be interrupted is stopped sooner
MEMORY_BYTES = 12 * 10**9  # of address space, of which torch alone takes several


@dataclass
class Report:
    """What one notebook earned. errors: a sentence for each cell that failed."""

    submission: str
    notebook: str
    seed: int
    results: list[Result] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def score(self) -> float:
        return sum(result.score for result in self.results)

    @property
    def possible(self) -> float:
        return sum(result.possible for result in self.results)


class Worker:
    """A process that has run a notebook's cells. Raises WorkerDied if it ends or hangs while it runs them."""

    def __init__(self, cells: list[str], skip: set[int], memory_bytes: int):
        to_worker, from_worker = os.pipe(), os.pipe()
        root = str(Path(__file__).resolve().parents[2])
        code = (
            f"import sys; sys.path.insert(0, {root!r})\n"
            "from rlcourse.grading.worker import main\n"
            f"sys.path.remove({root!r}); main({to_worker[0]}, {from_worker[1]}, {memory_bytes})"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", code],
            pass_fds=(to_worker[0], from_worker[1]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        os.close(to_worker[0])
        os.close(from_worker[1])
        self.sink, self.source = os.fdopen(to_worker[1], "wb"), from_worker[0]
        self._send((cells, skip))
        cell = None
        try:
            while "ready" not in (message := json.loads(self._receive(START_SECONDS))):
                cell = int(message["running"])
            self.errors = {int(number): str(text) for number, text in message["errors"].items()}
            self.names = {str(name) for name in message["names"]}
        except WorkerDied as death:
            raise WorkerDied(str(death), cell) from None
        except (ValueError, KeyError, TypeError, AttributeError, Unreadable):
            self.close()
            raise WorkerDied("wrote what nobody can read", cell) from None

    def call(self, request: tuple, seconds: float):
        """The value that a function returned. Raises what `Remote` describes."""
        self._send(request)
        reply = self._receive(seconds)
        if reply[:1] == b"V":
            return decode(reply[1:])
        try:
            kind, message = (str(part) for part in json.loads(reply[1:]))
        except (ValueError, TypeError):
            raise Unreadable("the result could not be read") from None
        if kind == "NotImplementedError":
            raise NotImplementedError
        raise AssertionError(message if kind == "AssertionError" else f"{kind}: {message}")

    def _send(self, request: tuple) -> None:
        try:
            self.sink.write(frame(pickle.dumps(request)))
            self.sink.flush()
        except BrokenPipeError:
            raise WorkerDied("ended the process") from None

    def _receive(self, seconds: float) -> bytes:
        """The next message. Raises WorkerDied after `seconds`, or if the process ended; Unreadable for one too long."""
        deadline = time.monotonic() + seconds

        def read(count: int) -> bytes:
            found = b""
            while len(found) < count:
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([self.source], [], [], left)[0]:
                    self.close()
                    raise WorkerDied("took too long: is there a loop that never ends?")
                piece = os.read(self.source, min(count - len(found), 1 << 20))
                if not piece:
                    break
                found += piece
            return found

        message = read_frame(read)
        if message is None:
            self.close()
            raise WorkerDied("ended the process")
        return message

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        """Kill the process and whatever it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class WorkerDied(AssertionError):
    """The reader's code ended its process or did not come back; in which cell, if it was running one."""

    def __init__(self, what: str, cell: int | None = None):
        super().__init__(what)
        self.cell = cell


class Student:
    """A notebook's functions, in workers that are started anew whenever one dies."""

    def __init__(self, cells: list[str], memory_bytes: int):
        self.cells, self.memory_bytes = cells, memory_bytes
        self.skip: dict[int, str] = {}
        self.worker: Worker | None = None

    def start(self) -> Worker:
        """The living worker, or a new one; a cell that kills its worker is left out of the next."""
        while self.worker is None or not self.worker.alive:
            try:
                self.worker = Worker(self.cells, set(self.skip), self.memory_bytes)
            except WorkerDied as death:
                if death.cell is None or death.cell in self.skip:
                    raise WorkerDied(f"the notebook's cells could not be run: {death}") from None
                self.skip[death.cell] = str(death)
        return self.worker

    @property
    def errors(self) -> list[str]:
        """A sentence for each cell that failed."""
        failed = self.skip | (self.worker.errors if self.worker is not None else {})
        return [f"code cell {number + 1}: {error}" for number, error in sorted(failed.items())]

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()


class Remote:
    """A function of the notebook, called as `rlcourse.checks.Local` calls one in the same process.

    Raises NotImplementedError for a hole, AssertionError with a sentence for everything else that goes wrong.
    """

    def __init__(self, student: Student, name: str):
        self.student, self.name = student, name
        self.deadline = 0.0

    @contextmanager
    def limited(self, seconds: float):
        """The time that the calls of a case may take together. A dead worker is replaced before the clock starts."""
        self.student.start()
        self.deadline = time.monotonic() + seconds
        yield

    def __call__(self, *arguments, **options):
        return self._call(arguments, options, None)

    def gradient(self, *arguments, wrt: int = 0, **options):
        """As `rlcourse.checks.Local.gradient`."""
        return self._call(arguments, options, wrt)

    def _call(self, arguments: tuple, options: dict, wrt: int | None):
        worker = self.student.start()
        if self.name not in worker.names:
            raise AssertionError("; ".join([f"`{self.name}` is not defined", *self.student.errors]))
        try:
            return worker.call((self.name, arguments, options, wrt), self.deadline - time.monotonic())
        except Unreadable as error:
            worker.close()  # whatever else it wrote is not the answer to the next call
            raise AssertionError(str(error)) from None


def grade(path: Path, hidden: Path | None = None, seed: int | None = None, memory_bytes: int = MEMORY_BYTES) -> Report:
    """Grade one notebook.

    hidden: a folder whose `nbNN.py` adds cases to the questions of that notebook. seed: of the random inputs; drawn
    anew if not given. Raises ValueError or FileNotFoundError in one sentence for what is no exercise notebook.
    """
    if os.name == "nt":
        raise ValueError("Grading needs Linux or macOS: on Windows, run it in WSL.")
    start = time.perf_counter()
    notebook = read_notebook(path)
    name = checks_module(notebook, path)
    questions = importlib.import_module(f"rlcourse.checks.{name}").QUESTIONS
    if hidden is not None:
        add_hidden_cases(hidden, name)
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    report = Report(str(path), name, seed)
    student = Student(student_cells(notebook), memory_bytes)
    try:
        for question in questions.values():
            report.results.append(question.run(Remote(student, question.function), seed))
        report.errors = student.errors
    finally:
        student.close()
    report.seconds = time.perf_counter() - start
    return report


def add_hidden_cases(folder: Path, name: str) -> None:
    """Run `folder/nbNN.py`, which adds cases with `@q1.case(..., hidden=True)`; once, however often it is called."""
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder} of hidden tests.")
    file = (folder / f"{name}.py").resolve()
    if file.exists() and file not in _added:
        _added.add(file)
        exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), {"__name__": f"hidden_{name}"})


_added: set[Path] = set()


def grade_folder(folder: Path, **options) -> list[Report]:
    """Grade every notebook of a folder, in the order of their names; one that cannot be graded earns nothing.

    Raises ValueError for a folder without notebooks.
    """
    notebooks = sorted(folder.glob("*.ipynb"))
    if not notebooks:
        raise ValueError(f"There is no notebook (.ipynb) in {folder}.")
    reports = []
    for path in notebooks:
        try:
            reports.append(grade(path, **options))
        except (ValueError, FileNotFoundError) as error:
            reports.append(Report(str(path), "", 0, errors=[str(error)]))
    return reports
