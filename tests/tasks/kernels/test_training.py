"""The preset `kernels`, through the trainer that every task uses."""

import json

import pytest

from rlcourse.config import make_config
from rlcourse.trainer import train

SMALL = {"steps": 2, "num_prompts": 2, "num_generations": 4, "eval_every": 0, "eval_problems": 6, "pass_k": 0}


@pytest.mark.parametrize("task", ["kernels", "rlcourse.tasks.kernels.task:stale"])
def test_the_preset_trains_and_its_summary_has_the_metrics(task, tmp_path):
    config = make_config("kernels", **SMALL, task=task, output=str(tmp_path), name="run")
    summary = train(config)
    for when in ("before", "after"):
        names = ("compiled", "correct", "speedup", "share_of_optimum", "fast_1", "fast_1.5", "fast_2")
        assert all(0 <= summary[when][name] <= 10 for name in names)
    assert summary["before"]["correct"] == 1 and summary["before"]["speedup"] == pytest.approx(1)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 <= row["correct"] <= 1 for row in rows)
    assert ("hacked" in rows[0]) == (task != "kernels")
    assert (tmp_path / "run" / "curve.png").exists()
