"""KernelBench as the trainer sees it."""

from dataclasses import replace

import pytest
import torch
from texts import POINTWISE, fenced, pointwise_problem, pointwise_triton

from rlcourse.tasks import Attempt, load_task
from rlcourse.tasks.kernelbench import task as kernel_task
from rlcourse.tasks.kernelbench.judging import Settings, Verdict
from rlcourse.tasks.kernelbench.task import METRICS, KernelTask

RIGHT = fenced(pointwise_triton(POINTWISE["relu"][1]))


def attempt(text: str, finished: bool = True, problem=None) -> Attempt:
    return Attempt(problem or pointwise_problem("relu"), text, 10, finished)


def test_the_task_is_found_by_name_and_shares_out_a_folder(tmp_path):
    (tmp_path / "level1").mkdir()
    for number in range(1, 21):
        (tmp_path / "level1" / f"{number}_p{number}.py").write_text(f"# {number}\n")
    task = load_task(f"kernelbench@{tmp_path}")
    sizes = [len(task.problems(split)) for split in ("train", "validation", "test")]
    assert sizes == [15, 1, 4] and len({*task.train, *task.validation, *task.test}) == 20


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


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU test_gpu.py judges the same")
def test_attempts_are_judged_side_by_side():
    task = KernelTask([], [], [], settings=Settings(cases=1, trials=2, timing_seconds=1), processes=2)
    texts = [RIGHT, RIGHT.replace("tl.maximum(x, 0.0)", "x"), RIGHT.replace("tl.maximum", "tl.nothing")]
    right, wrong, broken = task.judge([attempt(text) for text in texts], training=True)
    assert [(found.right, found.words) for found in (right, wrong)] == [(True, "right"), (False, "wrong")]
    assert right.reward > wrong.reward == pytest.approx(0.1) and not broken.right
