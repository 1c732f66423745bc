"""KernelBench as the trainer sees it: problems from a folder, their shapes, an answer's code, verdicts."""

from dataclasses import replace

import pytest
import torch
from texts import POINTWISE, ROW_PROBLEMS, fenced, pointwise_problem, pointwise_triton

from rlcourse.tasks import Attempt, load_task
from rlcourse.tasks.kernelbench import task as kernel_task
from rlcourse.tasks.kernelbench.cases import KINDS, digest, make_inputs, namespace, signed
from rlcourse.tasks.kernelbench.judging import Settings, Verdict, shapes
from rlcourse.tasks.kernelbench.rules import parse_answer
from rlcourse.tasks.kernelbench.task import METRICS, KernelTask, load_problems


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "level1").mkdir()
    for number in range(1, 101):
        (tmp_path / "level1" / f"{number}_problem_{number}.py").write_text(f"# {number}\n")
    (tmp_path / "level1" / "notes.py").write_text("")
    return tmp_path


def test_a_folder_as_kernelbench_has_it_is_split_80_to_20_by_a_hash(folder):
    train, test = load_problems(str(folder))
    assert (len(train), len(test)) == (80, 20) and not set(train) & set(test)
    numbers = [int(problem.gold.removeprefix("problem_")) for problem in train]
    assert numbers == sorted(numbers) and train[3].question == f"# {numbers[3]}\n"
    assert [problem.gold for problem in test[:3]] == ["problem_3", "problem_5", "problem_9"]  # the same everywhere
    task = load_task(f"kernelbench@{folder}")
    assert (len(task.train), len(task.validation), task.test) == (72, 8, test)


def test_a_folder_without_problems_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no problem in .*level1: expected level1/1_NAME\.py"):
        load_problems(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("first\n```\na\n```\nthen\n```python\nb\n```\nthat was it", "b\n"),
        ("```cuda\r\nx\r\n```\r\n", "x\n"),
        ("  ```python\n  x\n  ```", "  x\n"),
        ("```python\nnever closed", None),
    ],
)
def test_the_last_fenced_block_is_the_answer(text, code):
    assert parse_answer(text) == code


def test_other_shapes_halve_what_the_inputs_alone_depend_on():
    first, second = (make_inputs(namespace(text), 0, "given", torch.device("cpu"))[0] for text in shapes(
        ROW_PROBLEMS["layer_norm"].question))  # fmt: skip
    assert first.shape == (12, 200) and second.shape == (6, 200)  # `dim` is the weights' as well
    a, b = make_inputs(namespace(shapes(ROW_PROBLEMS["matmul"].question)[1]), 0, "given", torch.device("cpu"))
    assert a.shape == (24, 64) and b.shape == (64, 24)
    assert all("class Model" not in text for text in shapes(ROW_PROBLEMS["matmul"].question))
    assert len(shapes("def get_inputs():\n    return []\n")) == 1


def test_inputs_follow_from_seed_and_kind_and_keep_their_structure():
    problem, device = namespace(pointwise_problem("relu").question), torch.device("cpu")
    first = {kind: make_inputs(problem, 5, kind, device)[0] for kind in KINDS}
    for kind in KINDS:
        assert torch.equal(first[kind], make_inputs(problem, 5, kind, device)[0])
        assert not torch.equal(first[kind], make_inputs(problem, 6, kind, device)[0])
    assert (first["given"] >= 0).all() and (first["signed"] < 0).any()
    assert torch.equal(first["scaled"], 4 * first["signed"])
    square = torch.rand(8, 8)
    kept = signed(square + square.T)
    assert torch.equal(kept, kept.T) and torch.equal(signed(square.triu()).tril(-1), torch.zeros(8, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bool, torch.int64, torch.uint8])
@pytest.mark.parametrize("count", [1, 257, 100_000])
def test_a_digest_sees_every_number_of_every_tensor(dtype, count):
    tensor = (torch.rand(count) * 9 - 3).to(dtype)
    assert digest([tensor]) == digest([tensor.clone()])
    for place in {0, count // 2, count - 1}:
        other = tensor.clone()
        other[place] = not other[place] if dtype == torch.bool else other[place] + 1
        assert digest([other]) != digest([tensor])
    if dtype == torch.float32 and count > 1:
        assert digest([-tensor]) != digest([tensor])


RIGHT = fenced(pointwise_triton(POINTWISE["relu"][1]))


def attempt(text: str, finished: bool = True, problem=None) -> Attempt:
    return Attempt(problem or pointwise_problem("relu"), text, 10, finished)


def test_what_cannot_be_judged_is_not_measured_and_what_was_cut_off_is_wrong(monkeypatch):
    task = KernelTask([], [], [])
    flat = pointwise_problem("relu")
    flat = replace(flat, question=flat.question.replace("torch.relu(x)", "x + 0"), gold="flat")
    cut, unknown, none = task.judge([attempt(RIGHT, False), attempt(RIGHT, problem=flat), attempt("no idea")], True)
    assert (cut.words, cut.reward, cut.metrics["compiled"], cut.metrics["speedup"]) == ("cut off", 0.0, 0.0, None)
    assert unknown.words.startswith("not judged: flat") and set(unknown.metrics.values()) == {None}
    assert (none.words, none.reward, none.metrics["correct"]) == ("no code", 0.0, 0.0)


def test_training_times_less_than_an_evaluation(monkeypatch):
    asked = []

    class Judge:
        def judge(self, text):
            return Verdict(metrics={"compiled": 1.0, "correct": 1.0, "refused": 0.0, "speedup": 2.5, "fast_2": 1.0})

    monkeypatch.setattr(kernel_task, "judge_of", lambda problem, settings: asked.append(settings) or Judge())
    task = KernelTask([], [], [], settings=Settings(trials=100))
    for training in (True, False):
        [found] = task.judge([attempt(RIGHT)], training)
        assert found.right and found.words == "right" and found.reward == pytest.approx(0.1 + 0.3 + 2.5)
        assert set(found.metrics) == set(METRICS) and found.metrics["speedup"] == 2.5 and found.metrics["ms"] is None
    assert [settings.trials for settings in asked] == [20, 100]
