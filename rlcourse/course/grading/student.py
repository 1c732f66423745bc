"""A notebook's run, seen from the grader: cells go to the worker one by one, and questions are judged as it gets there.
A worker that ends, hangs or writes nonsense is replaced by a new one, which runs the cells again without the one that
was to blame; what was judged stays judged."""

import hashlib
import pickle
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from rlcourse.course.calls import OutOfTime, time_limit
from rlcourse.course.checks import MAX_MESSAGE, Question, Result
from rlcourse.course.grading import isolation
from rlcourse.sandbox.process import Child
from rlcourse.sandbox.wire import MAX_BYTES, Unreadable, decode, receive, send

START_SECONDS = 120  # for the libraries to load
CELL_SECONDS = 20  # for one statement of a cell; a whole cell may take twice that
NOTEBOOK_SECONDS = 180  # for all cells and questions
MAX_WORKERS = 12  # so many may be started for a notebook
MAX_CHECKS = 10  # of one question in a run of the notebook
DECODE_SECONDS = 5  # for one reply
GRACE_SECONDS = 2  # a call that ends by itself when its time is up needs so long to say so


class Cell(NamedTuple):
    number: int  # its place among the code cells, from 1
    source: str


class Worker(Child):
    """A process that runs cells and calls functions. setup: as `worker.prepare` and `worker.Notebook` take it."""

    def __init__(self, way: str, setup: dict):
        super().__init__(way, isolation.box(setup["memory_bytes"]))
        self.last_words = ""
        try:
            self.ask(setup, START_SECONDS)
        except (Died, TimeoutError):
            raise RuntimeError(f"The process for the notebook's code did not start. {self.last_words}") from None

    def ask(self, request: Any, seconds: float) -> Any:
        """The answer to a request. Where there is none, the process is ended. Raises TimeoutError after `seconds`, Died
        with a sentence where the process ended or cannot be understood."""
        deadline, message = time.monotonic() + seconds, pickle.dumps(request)
        try:
            if seconds <= 0:
                raise TimeoutError
            send(self.connection, message, seconds)
            data = receive(self.connection, deadline - time.monotonic(), MAX_BYTES)
            with time_limit(DECODE_SECONDS):
                return decode(data)
        except BaseException as error:
            self.last_words = self.close()
            if isinstance(error, EOFError | OSError) and not isinstance(error, TimeoutError):
                raise Died("ended the process") from None
            if isinstance(error, Unreadable | OutOfTime):
                raise Died(str(error) or "the result takes too long to read") from None
            raise

    @property
    def alive(self) -> bool:
        return self.connection.fileno() != -1


class Run:
    """A notebook, run for its questions. results: by question, the last where it's checked several times. setup: what
    every worker is told."""

    def __init__(self, cells: list[Cell], questions: list[Question], way: str, setup: dict):
        self.cells, self.questions, self.way = cells, {q.name: q for q in questions}, way
        self.seed, self.setup = setup["seed"], setup | {"seed": derived(setup["seed"], "the notebook")}
        self.deadline = time.monotonic() + NOTEBOOK_SECONDS
        self.results: dict[str, Result] = {}
        self.verdicts: dict[tuple[str, int], bool] = {}  # of the question, how many times it was reached before
        self.deadly: dict[int, str] = {}
        self.said: dict[int, list[str]] = {}

    def run(self) -> None:
        for _ in range(MAX_WORKERS):
            if self.left <= 0 or self._from_the_top():
                break
        late = f"the notebook took longer than {NOTEBOOK_SECONDS} s" if self.left <= 0 else "its code ended the process"
        for name, question in self.questions.items():
            if name not in self.results:
                self.results[name] = question.run(Remote(self, f"not reached: {late}"), self.seed)

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def line(self, file: str, number: int) -> str:
        """A line of a cell, by the name that the worker has for it; '' for everything else."""
        text = next((cell.source for cell in self.cells if file == f"<cell {cell.number}>"), "")
        return "".join(text.splitlines()[number - 1 : number])

    def errors(self) -> list[str]:
        found = {**self.said, **{number: [why] for number, why in self.deadly.items()}}
        return [f"code cell {number}: {text}" for number, texts in sorted(found.items()) for text in texts]

    def _from_the_top(self) -> bool:
        """Run all cells in a new worker, then judge what no cell asked to check. False if the worker was lost."""
        self.said, reached = {}, Counter()
        try:
            with Worker(self.way, self.setup) as self.worker:
                for cell in self.cells:
                    if cell.number not in self.deadly:
                        self._run_cell(cell, reached)
                for name, question in self.questions.items():
                    if name not in self.results:
                        self._follow(["judge", name, question.function], reached)
                return True
        except (TimeoutError, Died, JudgedToDeath):
            return False

    def _run_cell(self, cell: Cell, reached: Counter) -> None:
        try:
            said = self._follow(["cell", cell.number, cell.source, CELL_SECONDS], reached)
            self.said[cell.number] = [str(line)[:MAX_MESSAGE] for line in said[:4]]
        except (TimeoutError, Died) as death:
            self.deadly[cell.number] = str(death) or "took too long: is there a loop that never ends?"
            raise

    def _follow(self, request: list, reached: Counter) -> list:
        """Send a request, judge the questions reached on the way, and return what is to be said of it."""
        seconds = 2 * CELL_SECONDS
        answer = self.worker.ask(request, min(seconds, self.left))
        while isinstance(answer, dict) and (name := str(answer.get("check"))) in self.questions:
            passed = self._judge(name, reached[name], answer.get("defined") is True)
            reached[name] += 1
            if not self.worker.alive:
                raise JudgedToDeath
            answer = self.worker.ask(["verdict", passed], min(seconds, self.left))
        match answer:
            case {"value": [*said]}:
                return said
            case {"error": [str(kind), str(message)]}:
                return [f"{kind}: {message}"]
        return ["the result could not be read"]

    def _judge(self, name: str, times: int, defined: bool) -> bool:
        """Whether a question passes that is reached for the time `times`."""
        if times >= MAX_CHECKS:
            return self.results[name].passed
        if (name, times) not in self.verdicts:
            question = self.questions[name]
            missing = "" if defined else "; ".join([f"`{question.function}` is not defined", *self.errors()])
            remote = (RemoteMaker if question.caller.kernels else Remote)(self, missing)
            # Inputs of its own, or what one check says of them would answer the next.
            result = question.run(remote, derived(self.seed, f"{name}, check {times}"))
            self.results[name] = result
            if remote.late:  # processes and threads that it started may go on, and take time and memory from the next
                self.worker.close()
            self.verdicts[name, times] = result.passed
        return self.verdicts[name, times]


def derived(seed: int, name: str) -> int:
    """A seed that follows from `seed` and a name, from which nobody finds `seed` or those of other names: the process
    of a notebook has one, and must not know the inputs of a question before."""
    return int.from_bytes(hashlib.pbkdf2_hmac("sha256", str(seed).encode(), name.encode(), 50_000)[:4])


class JudgedToDeath(Exception):
    """The worker was lost while a question was judged, which is to blame: the cell runs again."""


class Died(Exception):
    """The process ended, hung, or wrote what nobody can read."""


class Remote:
    """The function that a notebook checks, for the cases of one question. A call raises NotImplementedError for a hole,
    AssertionError with a sentence for everything else that goes wrong. A case that ends the process, or hangs so that
    nothing stops it, takes the rest of the question with it. missing: why there is no such function, if there is none;
    every case then fails with that sentence."""

    def __init__(self, run: Run, missing: str = ""):
        self.run, self.missing, self.deadline = run, missing, 0.0
        self.late = False  # a call was not done in its time

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        if self.missing:
            raise AssertionError(self.missing)
        if not self.run.worker.alive:
            raise AssertionError("not tried: a case before it ended or hung the process")
        self.deadline = time.monotonic() + min(seconds, self.run.left)
        with time_limit(seconds + 2 * GRACE_SECONDS):
            yield

    def __call__(self, *arguments, **options) -> Any:
        return self._ask("call", arguments, options)

    def gradient(self, *arguments, wrt: int = 0, **options) -> Any:  # and `pieces`: see `checks.Local`
        return self._ask("gradient", arguments, options | {"wrt": wrt})

    def pieces(self, *arguments) -> Any:
        return self._ask("pieces", arguments, {})

    def _ask(self, kind: str, arguments: tuple, options: dict) -> Any:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise OutOfTime
        try:
            return value(self.run.worker.ask([kind, left, arguments, options], left + GRACE_SECONDS))
        except (TimeoutError, OutOfTime):
            self.late = True
            raise OutOfTime from None
        except Died as death:
            if time.monotonic() >= self.deadline:  # compilers do not take it well to be told that time is up
                raise OutOfTime from None
            raise AssertionError(str(death)) from None


class RemoteMaker(Remote):
    """The class of kernels that a notebook checks. Of the tensors on which one runs, its process learns the shapes."""

    def __call__(self, *arguments, **options) -> Any:
        from rlcourse.course.checks.kernels import read_facts  # it loads the compiler, and few notebooks have kernels

        match self._ask("trace", arguments, options):
            case {"kernel": number, "facts": facts}:
                return read_facts(facts, lambda tensors: self._ask("blocks", (number, tensors), {}), self.run.line)
        raise AssertionError("the kernel could not be read")


def value(answer: Any) -> Any:
    match answer:
        case {"value": found}:
            return found
        case {"error": ["NotImplementedError", *_]}:
            raise NotImplementedError
        case {"error": ["OutOfTime", *_]}:
            raise OutOfTime
        case {"error": ["AssertionError" | "Unreadable", str(message)]}:
            raise AssertionError(message)
        case {"error": [str(kind), str(message)]}:
            raise AssertionError(f"{kind}: {message}")
    raise AssertionError("the result could not be read")
