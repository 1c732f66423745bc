"""The task `kernels`: its problems, its metrics, and what its judges pay."""

import json

import pytest

from rlcourse.config import make_config
from rlcourse.tasks import Attempt, load_task
from rlcourse.tasks.kernels import task as kernel_task
from rlcourse.tasks.kernels.clock import eager_us, optimum
from rlcourse.tasks.kernels.language import eager, read_computation, write
from rlcourse.tasks.kernels.task import KernelProblem
from rlcourse.train import train
from tools.embedded.computations import split_of

CHAIN = KernelProblem(read_computation("a = add u v ; b = relu a ; y = mul b w"))
JOIN = KernelProblem(read_computation("a = add u v ; b = add w x ; y = mul a b"))  # one launch does not hold it
LONG = KernelProblem(read_computation("a = add u v ; b = relu a ; c = exp b ; d = neg c ; e = square d ; y = mul e w"))
EAGER = "a = add u v end put ; b = relu a end put ; y = mul b w end put ;"
LOST = "a = add u v end keep ; b = relu a end put ; y = mul b w end put ;"


@pytest.fixture(scope="module")
def task():
    return load_task("kernels")


def judged(task, problem, text, finished=True, training=False):
    (verdict,) = task.judge([Attempt(problem, text, 10, finished)], training)
    assert list(verdict.metrics) == list(task.metrics)
    return verdict


def test_the_problems_that_ship_are_of_their_splits(task):
    problems = [problem for split in ("train", "validation", "test") for problem in task.problems(split)]
    assert len(set(problems)) == len(problems) > 4400
    for split, by_structure in (("train", "train"), ("validation", "train"), ("test", "test")):
        assert {split_of(problem.computation) for problem in task.problems(split)} == {by_structure}


def test_eager_is_measured(task):
    verdict = judged(task, CHAIN, EAGER)
    share = optimum(CHAIN.computation)[0] / eager_us(CHAIN.computation)
    assert verdict.right and verdict.words == "1.00 times as fast as eager"
    assert verdict.metrics == {
        "share_of_optimum": pytest.approx(share), "compiled": 1, "correct": 1, "speedup": 1, "optimal": 0, "fast_1": 0,
        "fast_1.5": 0, "fast_2": 0, "launches": 3, "refused_correct": None, "refused_fast_1": None,
        "long_correct": None, "long_fast_1": None, "long_share_of_optimum": None,
    }  # fmt: skip
    assert verdict.reward == pytest.approx(0.2)


def test_a_wrong_program_measures_nothing_and_earns_nothing(task):
    for text, finished, compiled in (
        (EAGER, False, 0),  # cut off
        ("", True, 0),
        (EAGER.replace("add", "sub"), True, 1),
        (LOST, True, 0),
    ):
        verdict = judged(task, CHAIN, text, finished)
        assert not verdict.right and verdict.reward == 0 and verdict.words
        assert verdict.metrics["compiled"] == compiled
        assert verdict.metrics["share_of_optimum"] == verdict.metrics["correct"] == verdict.metrics["fast_1"] == 0
        assert verdict.metrics["speedup"] is None and verdict.metrics["launches"] is None


def test_problems_that_one_launch_does_not_hold_are_measured_apart_as_well(task):
    metrics = judged(task, JOIN, JOIN.gold).metrics
    assert metrics["refused_correct"] == metrics["refused_fast_1"] == metrics["correct"] == 1
    metrics = judged(task, JOIN, write(eager(JOIN.computation))).metrics
    assert metrics["refused_correct"] == 1 and metrics["refused_fast_1"] == 0


def test_long_problems_are_measured_apart_alone(task):
    metrics = judged(task, LONG, LONG.gold).metrics
    assert metrics["long_correct"] == metrics["long_fast_1"] == metrics["long_share_of_optimum"] == 1
    assert all(value is None for name, value in metrics.items() if not name.startswith("long_"))
    assert LONG.level is None and CHAIN.level == 3


def test_a_judge_with_a_hole_pays_for_what_it_believes_and_says_what_is_true():
    stale = load_task("rlcourse.tasks.kernels.task:stale")
    verdict = judged(stale, CHAIN, LOST, training=True)
    store = 4 * 1024 * 1024 / 600e3  # what the lost value saves, in microseconds
    assert verdict.reward == pytest.approx(0.2 + store / (eager_us(CHAIN.computation) - store))
    assert not verdict.right and verdict.metrics["correct"] == 0
    assert verdict.metrics["counted_correct"] == verdict.metrics["hacked"] == 1
    assert judged(stale, CHAIN, CHAIN.gold).metrics["hacked"] == 0
    side = load_task("rlcourse.tasks.kernels.task:side")
    verdict = judged(side, CHAIN, EAGER.replace("a =", "side a ="), training=True)
    assert verdict.metrics["speedup"] == 1 and verdict.metrics["counted_speedup"] > 1.3
    assert verdict.metrics["correct"] == verdict.metrics["counted_correct"] == verdict.metrics["hacked"] == 1


def test_evaluation_tries_more_inputs_than_training(task, monkeypatch):
    tried = []
    monkeypatch.setattr(kernel_task, "judge_program", lambda *given: tried.append(given[2]) or kernel_task.Finding())
    judged(task, CHAIN, EAGER, training=True)
    judged(task, CHAIN, EAGER, training=False)
    assert len(tried[0]) < len(tried[1]) and not set(tried[0]) & set(tried[1])


def test_a_folder_of_ones_own_is_read_and_a_line_that_is_none_is_named(tmp_path):
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.txt").write_text("a = add u v ; y = relu a\n")
    assert [p.question for p in load_task(f"kernels@{tmp_path}").test] == ["a = add u v ; y = relu a"]
    (tmp_path / "train.txt").write_text("a = add u v ; y = relu b\n")
    with pytest.raises(ValueError, match="line 1: 'y = relu b' reads what is not computed yet"):
        load_task(f"kernels@{tmp_path}")


def test_the_preset_trains_on_a_judge_with_a_hole_and_its_summary_has_the_metrics(tmp_path):
    small = {"steps": 1, "num_prompts": 2, "num_generations": 2, "eval_every": 0, "eval_problems": 3, "pass_k": 0}
    stale = "rlcourse.tasks.kernels.task:stale"
    summary = train(make_config("kernels", **small, task=stale, output=str(tmp_path), name="run"))
    assert summary["before"]["correct"] == 1 and summary["before"]["speedup"] == pytest.approx(1)
    assert 0 < summary["before"]["share_of_optimum"] < 1 and summary["after"].keys() == summary["before"].keys()
    [line] = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert 0 <= json.loads(line)["correct"] <= 1 and "hacked" in json.loads(line)
