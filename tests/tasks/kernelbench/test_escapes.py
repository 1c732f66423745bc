"""Code that breaks out costs itself alone, within its time, and leaves nothing behind. The rules are not asked."""

import os
import re
import socket
import time

import pytest
from cheats import ESCAPES, SAID
from texts import pointwise_problem

from rlcourse.sandbox.process import GUARD
from rlcourse.tasks.kernelbench.candidate import way
from rlcourse.tasks.kernelbench.judging import COMPILED, Settings, judge_of

LIMITS = {"timing_seconds": 4, "compile_seconds": 10, "first_seconds": 10, "run_seconds": 10, "memory_bytes": 1 << 30}
SETTINGS = Settings(cases=1, trials=6, **LIMITS)
pytestmark = pytest.mark.skipif(way()[0] == GUARD, reason="needs namespaces")


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


@pytest.mark.thorough
@pytest.mark.parametrize("name", ESCAPES)
def test_an_escape_costs_its_candidate_alone(name, tmp_path, listener, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    text, reasons = ESCAPES[name]
    text = text.replace("OUTSIDE", str(tmp_path / "outside")).replace("PORT", str(listener.getsockname()[1]))
    judged = judge_of(pointwise_problem("relu"), SETTINGS)
    before, start = children(), time.monotonic()
    verdict = judged.run(text)
    assert verdict.reason in reasons, (verdict.reason, verdict.text)
    assert re.search(SAID.get(name, ""), verdict.text), verdict.text
    assert verdict.metrics["correct"] == 0 and verdict.reward <= COMPILED
    assert time.monotonic() - start < 90
    assert not (tmp_path / "outside").exists()
    with pytest.raises(BlockingIOError):
        listener.accept()
    assert children() == before
    assert [path.suffix for path in (tmp_path / "temporary").iterdir()] in ([], [".lock"])


def children() -> set[int]:
    """The processes that this one has started, and still has."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return {int(number) for number in file.read().split()}
