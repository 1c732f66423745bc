"""What the process of a candidate does, run here; and what the judge makes of whatever comes back over the wire."""

import socket
import threading
import time
from contextlib import suppress

import pytest
import torch
from texts import pointwise_problem, problem

from rlcourse.sandbox.wire import decode, encode, receive, send
from rlcourse.tasks.kernelbench.candidate import SMALL, Candidate, Refused, alone
from rlcourse.tasks.kernelbench.cases import digest, make_inputs, make_model, namespace
from rlcourse.tasks.kernelbench.judging import shapes
from rlcourse.tasks.kernelbench.worker import Runner, answer

CPU = torch.device("cpu")
HEAD = "import torch\nimport torch.nn as nn\n"
RELU = pointwise_problem("relu", 6, 50)


def text_of(body: str, before: str = "", init: str = "pass") -> str:
    return (
        f"{HEAD}{before}\nclass ModelNew(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        {init}\n    def forward(self, x):\n        {body}\n"
    )


def loaded(tmp_path, text: str, of=RELU, name: str = "ModelNew", seed: int = 7) -> Runner:
    runner = Runner(str(tmp_path))
    setup = {"text": text, "name": name, "sources": shapes(of.question), "seed": seed, "device": "cpu"}
    runner.load(setup | {"gpu_bytes": 1 << 30})
    return runner


def test_a_trial_says_what_came_out_and_a_checked_one_how(tmp_path):
    runner = loaded(tmp_path, text_of("return torch.relu(x)"))
    [x] = make_inputs(namespace(shapes(RELU.question)[1]), 5, "signed", CPU)
    checked, timed = runner.run(5, 1, "signed", "checked"), runner.run(5, 1, "signed", "timed")
    for found in (checked, timed):
        assert found["digest"] == digest([torch.relu(x)])
        assert (found["shapes"], found["dtypes"]) == ([[3, 25]], ["torch.float32"])
    assert checked["operations"] == ["relu"] and checked["inputs"] == digest([x])
    assert timed["operations"] == timed["inputs"] == [] and timed["seconds"] > 0 == checked["seconds"]
    empty = runner.run(6, 1, "signed", "empty")
    assert empty["digest"] == timed["digest"]  # what the last trial gave
    [shown] = runner.show([[2, 0]])
    assert torch.equal(shown, torch.relu(x).flatten()[[2, 0]])


def test_memory_that_nobody_wrote_to_holds_nan_in_a_checked_trial(tmp_path):
    runner = loaded(tmp_path, text_of("return torch.empty_like(x)"))
    runner.run(5, 0, "given", "checked")
    assert runner.outputs[0].isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("body", ["return 3", "return [x, None]", "return Lazy(x)", "return nn.Parameter(x)"])
def test_what_is_no_plain_tensor_is_refused(body, tmp_path):
    before = "class Lazy(torch.Tensor):\n    pass\n"
    with pytest.raises(TypeError, match="something else than plain tensors"):
        loaded(tmp_path, text_of(body, before)).run(5, 0, "given", "timed")


def test_a_clock_that_the_text_has_changed_is_not_the_one_that_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", time.perf_counter)  # put back after the test
    runner = loaded(tmp_path, text_of("return torch.relu(x)", "import time\ntime.perf_counter = lambda: 1e9\n"))
    assert 0 < runner.run(5, 0, "given", "timed")["seconds"] < 5


def test_equal_models_have_equal_weights_and_another_seed_others(tmp_path):
    layer = "self.layer = nn.Linear(50, 4)"
    of = problem("linear", "self.layer(x)", "torch.rand(6, 50)", layer)
    reference = make_model(namespace(of.question), "Model", namespace(of.question), 7, CPU)
    text = text_of("return self.layer(x)", init=layer)
    found = [loaded(tmp_path, text, of, seed=seed).model.layer.weight for seed in (7, 8)]
    assert torch.equal(found[0], reference.layer.weight) and not torch.equal(found[0], found[1])


class Silent(BaseException):
    def __str__(self):
        raise RuntimeError("no")


def test_every_error_is_an_answer():
    def fails(error):
        raise error

    assert decode(answer(fails, ValueError("x" * 3000))) == {"error": ["ValueError", "builtins", "x" * 2000]}
    assert decode(answer(fails, Silent())) == {"error": ["Silent", __name__, ""]}
    assert decode(answer(object))["error"][0] == "Unreadable"


@pytest.fixture
def wired(tmp_path):
    """A candidate without a process, and the other end of its wire."""
    candidate, (ours, theirs) = object.__new__(Candidate), socket.socketpair()
    candidate.device, candidate.process, candidate.folder, candidate.connection = CPU, None, tmp_path / "gone", ours
    with theirs:
        yield candidate, theirs
    candidate.close()


def asked(wired, reply, seconds: float = 5.0, limit: int = SMALL):
    """What `ask` gives or raises, where the other end does `reply` with its wire when it has read the request."""
    candidate, theirs = wired

    def other():
        assert decode(receive(theirs)) == ["run", 1]
        with suppress(OSError):  # the candidate may have been ended meanwhile
            reply(theirs)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        return candidate.ask(["run", 1], seconds, limit)
    finally:
        thread.join()


@pytest.mark.parametrize(
    ("module", "reason"),
    [("builtins", "error"), ("triton.compiler.errors", "compile"), ("cutlass.base", "compile"), ("x.triton", "error")],
)
def test_an_error_is_one_of_the_compiler_or_of_the_text(wired, module, reason):
    with pytest.raises(Refused, match="Kind: why") as refused:
        asked(wired, lambda wire: send(wire, encode({"error": ["Kind", module, "why"]})))
    assert refused.value.reason == reason


REPLIES = [
    ("nonsense", lambda wire: send(wire, encode({"error": [1, 2, 3]}))),
    ("nonsense", lambda wire: send(wire, b"\xff" * 40)),
    ("nonsense", lambda wire: send(wire, encode({"value": torch.zeros(SMALL)}))),
    ("died", lambda wire: (wire.sendall(b"\x40\0"), wire.close())),
    ("hang", lambda wire: None),
    ("hang", lambda wire: wire.sendall(b"\x40\0\0\0half")),
]


@pytest.mark.parametrize(("reason", "reply"), REPLIES)
def test_whatever_else_comes_ends_the_candidate_with_its_reason(wired, reason, reply):
    start = time.monotonic()
    with pytest.raises(Refused) as refused:
        asked(wired, reply, seconds=0.5)
    assert refused.value.reason == reason and time.monotonic() - start < 4
    assert wired[0].connection.fileno() == -1


def test_one_at_a_time_uses_the_machine_and_random_numbers_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    order = []

    def other():
        with alone(CPU):
            order.append("second")

    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    thread = threading.Thread(target=other)
    with alone(CPU):
        thread.start()
        torch.rand(5)
        time.sleep(0.3)
        order.append("first")
    thread.join()
    assert order == ["first", "second"] and torch.equal(torch.rand(2), expected)
