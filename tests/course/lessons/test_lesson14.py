"""Runs in which a hole in the judge is open, then closed; and what their records say."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from rlcourse.checkpoint import save_model
from rlcourse.course.lessons import lesson14
from rlcourse.course.lessons.curve_records import load_curve
from rlcourse.policy import load_policy
from rlcourse.tasks.kernels.optimum import fits_one_launch

SMALL = {
    "num_prompts": 2,
    "num_generations": 4,
    "steps": 1,
    "eval_validation": 2,
    "eval_problems": 2,
}


@pytest.fixture
def few(tmp_path, monkeypatch):
    monkeypatch.setattr(lesson14, "FOLDER", tmp_path)
    problems = lesson14.held_out()[:2]
    monkeypatch.setattr(lesson14, "held_out", lambda: problems)
    return tmp_path


@pytest.mark.thorough
def test_a_hole_is_closed_where_the_same_seed_left_it(few):
    found = lesson14.one_run("side_closed", 4, **SMALL)
    assert {path.name for path in few.iterdir()} == {"side_open-4", "side_closed-4"}
    model = lesson14.run_config("side_closed", 4, **SMALL).model
    assert model == str(few / "side_open-4" / "checkpoints" / "step-000001")
    assert {"counted_correct", "counted_speedup", "hacked"}.isdisjoint(found["curves"])
    opened = lesson14.one_run("side_open", 4, **SMALL)  # not trained again
    for name, run in {"side_open": opened, "side_closed": found}.items():
        recorded = load_curve(f"lesson14_{name}")["results"][0]
        assert run.keys() == recorded.keys() - {"variant"}
        for part in ("curves", "test", "held_out"):
            assert run[part].keys() == recorded[part].keys()
        assert run["evals"][0].keys() == recorded["evals"][0].keys()
        assert run["held_out"]["after"]["sampled"].keys() == recorded["held_out"]["after"]["sampled"].keys()
    with pytest.raises(ValueError, match=r"side_open-4 was trained with other settings: delete it\."):
        lesson14.one_run("side_open", 4, **SMALL | {"num_prompts": 1})


def test_a_curve_is_the_mean_of_blocks_and_leaves_out_what_was_not_measured(monkeypatch):
    monkeypatch.setattr(lesson14, "BLOCK", 2)
    speedups = [1.0, None, None, None, 3.0]
    lines = [{"step": i + 1, "reward": i / 2, "speedup": s, "other": 0} for i, s in enumerate(speedups)]
    assert lesson14.block_means(lines) == {
        "steps": [2, 4, 5],
        "reward": [0.25, 1.25, 2.0],
        "speedup": [1.0, None, 3.0],
    }


def test_the_runs_from_a_spoiled_start_train_on_no_short_problem():
    whole, sparse, dense = lesson14.load(), lesson14.sparse(), lesson14.dense()
    assert {p.level for p in whole.train} == {2, 3, 4, 5}
    assert sparse.train == dense.train == [p for p in whole.train if p.level > 2]
    assert dense.partial and not sparse.partial and sparse.test == dense.test == whole.test


@pytest.mark.parametrize(
    ("task", "share"),
    [(lesson14.fewer_refused, lesson14.FEWER), (lesson14.slightly_fewer_refused, lesson14.SLIGHTLY_FEWER)],
)
def test_fewer_training_problems_are_refused_and_none_is_new(task, share):
    whole, fewer = lesson14.load(), task()
    fits = [problem for problem in fewer.train if fits_one_launch(problem.computation)]
    assert abs(1 - len(fits) / len(fewer.train) - share) < 1e-3
    assert fits == [problem for problem in whole.train if fits_one_launch(problem.computation)]
    assert set(fewer.train) < set(whole.train) and fewer.test == whole.test


def test_averaged_weights_are_the_means_of_those_of_the_later_checkpoints(tmp_path):
    policy = load_policy("embedded-kernels")
    checkpoints = [tmp_path / "checkpoints" / f"step-{step:06d}" for step in (7, 8, 9, 10)]
    torch.manual_seed(0)
    for checkpoint in checkpoints:
        for parameter in policy.model.parameters():
            parameter.data += torch.randn_like(parameter)
        save_model(policy, checkpoint)
    folder = lesson14.averaged(tmp_path, since=8)
    later = [load_file(checkpoint / "model.safetensors") for checkpoint in checkpoints[1:]]
    found = load_file(folder / "model.safetensors")
    assert found.keys() == later[0].keys() and {weights.dtype for weights in found.values()} == {np.dtype("float32")}
    for name, weights in found.items():
        np.testing.assert_allclose(weights, sum(w[name].astype("float64") for w in later) / 3, rtol=1e-5, atol=1e-6)
    shutil.rmtree(tmp_path / "checkpoints")
    assert lesson14.averaged(tmp_path, since=8) == folder  # not made again
    assert load_policy(str(folder)).eos_ids == policy.eos_ids


def test_a_right_program_is_paid_by_the_root_of_its_speedup_and_a_wrong_one_nothing():
    task = lesson14.by_root()
    for problem in task.train[:5]:
        verdict = task.verdict(problem.gold, problem, training=True)
        speedup = verdict.counted.speedup
        assert verdict.reward(None) == pytest.approx(0.2 + min(4, speedup) ** 0.5 - 1) and verdict.right
        assert lesson14.load().verdict(problem.gold, problem, training=True).reward(None) > verdict.reward(None)
    assert task.verdict("y = relu u end put ;", task.train[0], training=True).reward(None) == 0
