"""What a notebook may try instead of an answer. Nothing earns a point, and nothing is left behind."""

import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from submissions import IMPORTS, catalogue, many, workers, write
from thorough import thorough
from typer.testing import CliRunner

import rlcourse
from rlcourse.cli import app
from rlcourse.course.calls import time_limit
from rlcourse.course.grading import isolation, report, student
from rlcourse.course.grading.grade import grade, grade_folder, read_notebook
from rlcourse.sandbox.process import GUARD

PACKAGE = Path(rlcourse.__file__).parent
ANSWER = str(PACKAGE / "advantages.py")
SOLUTION = str(PACKAGE.parent / "solutions" / "01_policy_gradient.ipynb")
RIGHT = "def double(x):\n    return x + x"
on_linux = pytest.mark.skipif(isolation.way()[0] == GUARD, reason="needs namespaces")

# How to read the text of a file `path` that holds an answer; whoever can, answers right.
READERS = {kind: cells[0] for kind, cells in catalogue("readers").items()}
TOOLS = textwrap.dedent(
    """
    import ctypes, gc, glob, inspect, os, subprocess, sys
    repository = {repository!r}

    def c_read(path):
        libc, data = ctypes.CDLL(None), ctypes.create_string_buffer(20000)
        libc.read(libc.open(path.encode(), 0), data, 20000)
        return data.value.decode()
    """
)
STOLEN = """
def double(x):
    here, path, port = os.getcwd(), {path!r}, {port}
    kept, modules, finders = list(sys.path), dict(sys.modules), list(sys.meta_path)
    try:
        text = {reader}
    finally:
        os.chdir(here)
        sys.path[:], sys.meta_path[:] = kept, finders
        sys.modules.update(modules)
    return x + x if 'def ' in text else None
"""


def stolen(folder: Path, path: str) -> dict[str, str]:
    """What the readers of a file earn, by the message that each got."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as nameless:
        port = server.getsockname()[1]
        nameless.bind(f"\0rlcourse-{port}")
        nameless.listen()
        kinds = {kind: [STOLEN.format(path=path, port=port, reader=reader)] for kind, reader in READERS.items()}
        submitted, asked = many(folder, kinds, start=TOOLS.format(repository=str(PACKAGE.parent)))
        result = grade(submitted)
    return {asked[r.question]: r.cases[0].message for r in result.results if r.question in asked and r.passed}


@on_linux
@pytest.mark.thorough
@pytest.mark.parametrize("path", [ANSWER, SOLUTION], ids=["package", "solution"])
def test_no_way_leads_to_the_answers(path, tmp_path):
    assert Path(path).is_file() and stolen(tmp_path, path) == {}


HARM = {kind: cells[0] for kind, cells in catalogue("harm", answer="def double(x):\n    return x").items()}


@on_linux
@pytest.mark.parametrize("harm", [kind if kind == "an exit" else thorough(kind) for kind in HARM])
def test_harm_earns_nothing_ends_and_leaves_nothing_behind(harm, tmp_path, temporary, monkeypatch):
    monkeypatch.setattr(student, "CELL_SECONDS", 3)
    monkeypatch.setattr(student, "NOTEBOOK_SECONDS", 25)
    start = time.monotonic()
    cells = [
        IMPORTS.format(number=90),
        HARM[harm],
        "check.q1(double)",
        "def square(x):\n    return x * x",
        "check.q2(square)",
    ]
    result = grade(write(tmp_path / "90_harm.ipynb", cells))
    assert result.results[0].score == 0, report.as_text(result)
    assert time.monotonic() - start < 40
    assert list(temporary.iterdir()) == [] and workers() == {}
    if harm not in ("checks without end", "closed descriptors", "a stopped group"):
        assert result.results[1].score == 2 or "patched" in harm, report.as_text(result)


class Says:
    """A worker that answers what it's told to, instead of running cells."""

    alive, answer = True, {}

    def __init__(self, *_):
        pass

    def ask(self, request, seconds):
        return self.answer(request) if callable(self.answer) else self.answer

    def close(self):
        self.alive = False

    __enter__, __exit__ = (lambda self: self), lambda self, *_: self.close()


LARGE = "x" * 10**6
ANSWERS = [3, [], {}, {"check": ["q1"]}, {"check": {}}, {1: "q1"}, {"error": 3}, {"error": [[], {}]}]
ANSWERS += [{"error": ["NotImplementedError"]}, {"error": ["OutOfTime", ""]}, {"error": ["E", LARGE]}]
ANSWERS += [{"value": LARGE}, {"value": {}}, {"value": [LARGE, [LARGE], torch.ones(9), *[{}] * 10**5]}]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: str(answer)[:20])
def test_whatever_is_on_the_wire_costs_a_cell_alone_and_little_memory(answer, tmp_path, monkeypatch):
    monkeypatch.setattr(Says, "answer", answer)
    monkeypatch.setattr(student, "Worker", Says)
    said, kept = [], student.Run.errors
    monkeypatch.setattr(student.Run, "errors", lambda run: said.extend(kept(run)) or said)
    assert grade(write(tmp_path / "91_wire.ipynb", ["1", "2"])).score == 0
    assert len(said) <= 8 and all(len(text) < 1100 for text in said)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_grader_that_is_stopped_within_a_case_or_between_two_gives_no_verdict(number, tmp_path, monkeypatch):
    def at(when):
        def answer(request):
            if request[0] == when:
                signal.raise_signal(number)
            return {"check": "q1", "defined": True} if request[0] == "cell" else {"value": None}

        return staticmethod(answer)

    monkeypatch.setattr(student, "Worker", Says)
    path = write(tmp_path / "91_stopped.ipynb", ["1"])
    for when in ("cell", "call", "verdict"):
        monkeypatch.setattr(Says, "answer", at(when))
        done = CliRunner().invoke(app, ["grade", str(path)])
        assert (done.exit_code, done.output) == (128 + number, "")


def test_a_million_blank_lines_cost_milliseconds(tmp_path):
    path = write(tmp_path / "91_blank.ipynb", ["\n" * 10**6])
    with time_limit(2):
        assert read_notebook(path)[0] == "nb91"


def test_checking_a_question_again_tells_nothing_of_its_inputs(tmp_path, monkeypatch):
    asked = []

    def answer(request):
        if request[0] == "call":
            asked.append(request[2][0])
        return {"check": "q1", "defined": True} if request[0] == "cell" else {"value": None}

    monkeypatch.setattr(Says, "answer", staticmethod(answer))
    monkeypatch.setattr(student, "Worker", Says)
    path = write(tmp_path / "91_again.ipynb", ["1", "2"])
    for _ in range(2):
        grade(path, seed=5)
    assert torch.equal(asked[0], asked[2]) and not torch.equal(asked[0], asked[1])


LINGERS = """
import os, time
def double(x):
    if os.fork() == 0:
        time.sleep(3)
        os.kill(os.getppid(), 9)
    time.sleep(100)
"""


@pytest.mark.thorough
@on_linux
def test_what_a_late_call_started_does_not_outlive_its_question(tmp_path, monkeypatch):
    monkeypatch.setattr(student, "CELL_SECONDS", 2)
    slow = "time.sleep(1.5)\ndef square(x):\n    return x * x"
    cells = [IMPORTS.format(number=90), LINGERS, "check.q1(double)", slow, "check.q2(square)"]
    assert [r.score for r in grade(write(tmp_path / "90_lingers.ipynb", cells)).results] == [0, 2]


@pytest.mark.thorough
@on_linux
def test_a_notebook_has_a_limit_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(student, "CELL_SECONDS", 2)
    monkeypatch.setattr(student, "NOTEBOOK_SECONDS", 8)
    start = time.monotonic()
    cells = [IMPORTS.format(number=91), *["while True: pass"] * 20, RIGHT, "check.q1(double)"]
    result = grade(write(tmp_path / "91_slow.ipynb", cells))
    assert time.monotonic() - start < 20
    assert "not reached: the notebook took longer than 8 s" in result.results[0].cases[0].message


@pytest.mark.thorough
def test_a_class_is_graded_whatever_one_of_it_holds(tmp_path):
    folder = tmp_path / "class"
    folder.mkdir()
    write(folder / "91_a.ipynb", ["import os\nos._exit(0)"])
    (folder / "91_b.ipynb").write_text("[" * 10**6)
    write(folder / "91_c.ipynb", [RIGHT])
    write(folder / "91_d.ipynb", ["x = 1\x00", "def double(x:"])
    (folder / "91_e.ipynb").mkdir()
    (folder / "91_f.ipynb").symlink_to(folder / "91_c.ipynb")
    write(folder / "91_g\n91_c.ipynb: 9 of 2 points.ipynb", ["raise ValueError('x\\n91_c.ipynb: 9 of 2 points')"] * 99)
    reports = list(grade_folder(folder))
    assert [r.score for r in reports] == [0, 0, 2, 0, 0, 0, 0]
    assert "link" in reports[5].errors[0] and len(reports[6].errors) == 51
    assert all("\n" not in line for r in reports for line in [r.submission, *r.errors, report.as_line(r)])


def runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes() != b""  # of one that has ended and is not yet collected
    except OSError:
        return False


@on_linux
@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_a_grader_that_is_ended_leaves_no_process(number, tmp_path):
    cells = ["import os, time\nopen('ready', 'w')\nfor _ in range(3):\n    os.fork()\nwhile True: pass"]
    path = write(tmp_path / "01_loop.ipynb", cells)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "rlcourse", "grade", str(path)]
    grader = subprocess.Popen(command, env={"TMPDIR": str(temporary), "PATH": "/usr/bin:/bin"})
    deadline = time.monotonic() + 60
    while not workers(grader.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(4)
    started = workers(grader.pid)
    assert started
    grader.send_signal(number)
    grader.wait(30)
    deadline = time.monotonic() + 10
    while (left := [process for process in started if runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
    if number != signal.SIGKILL:
        assert list(temporary.iterdir()) == []
