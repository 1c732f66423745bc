"""The experiment on partial rollouts, made small."""

import pytest

from rlcourse.course.lessons import partial_rollouts
from rlcourse.course.lessons.partial_rollouts import VARIANTS, run


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_says_how_old_its_tokens_were_and_for_what_it_waited(variant, monkeypatch):
    monkeypatch.setattr(partial_rollouts, "EVAL_PROBLEMS", 4)
    found = run(variant, 0, num_prompts=2, num_generations=2, steps=3)
    assert [row["step"] for row in found["evals"]] == [0]
    steps = found["steps"]
    assert all(len(values) == 3 for values in steps.values())
    if variant == "whole":
        assert steps["staleness_max"] == [0.0] * 3
        assert all(waited >= length for waited, length in zip(steps["decode_steps"], steps["length"], strict=True))
    else:
        assert steps["staleness_max"][0] == 0 and all(waited <= 3 * 80 for waited in steps["decode_steps"])
        assert sum(steps["decode_steps"]) > 0
