"""The preset `kernels`, through the trainer that every task uses."""

import json

import pytest

from rlcourse.config import make_config
from rlcourse.train import train

SMALL = {"steps": 1, "num_prompts": 2, "num_generations": 2, "eval_every": 0, "eval_problems": 3, "pass_k": 0}


def test_the_preset_trains_on_a_judge_with_a_hole_and_its_summary_has_the_metrics(tmp_path):
    stale = "rlcourse.tasks.kernels.task:stale"
    config = make_config("kernels", **SMALL, task=stale, output=str(tmp_path), name="run")
    summary = train(config)
    for when in ("before", "after"):
        names = ("compiled", "correct", "speedup", "share_of_optimum", "fast_1", "fast_1.5", "fast_2")
        assert all(0 <= summary[when][name] <= 10 for name in names)
    assert summary["before"]["correct"] == 1 and summary["before"]["speedup"] == pytest.approx(1)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1]
    assert 0 <= rows[0]["correct"] <= 1 and "hacked" in rows[0]
    assert (tmp_path / "run" / "curve.png").exists()
