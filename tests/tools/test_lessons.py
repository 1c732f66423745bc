"""What lies behind the lessons' figures: records with several seeds and a command, made by the package's own step."""

import json
import re

import pytest

from rlcourse.config import ALGORITHMS
from rlcourse.course.lessons import gain
from rlcourse.course.lessons.curve_records import load_curve
from rlcourse.measure.records import KEYS
from rlcourse.paths import data_folder
from rlcourse.policy import load_policy
from tools.lessons import (
    curves,
    lesson02,
    lesson03,
    lesson04,
    lesson13,
    lesson14,
    lesson15,
)

CURVES = sorted((data_folder() / "curves").glob("*/*.json"))
RECORDS = [path for path in CURVES if path.stem.startswith("lesson") or path.stem in ALGORITHMS]
SMALL = {"num_prompts": 2, "num_generations": 4, "max_new_tokens": 12, "steps": 1}


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_curve_that_ships_has_three_seeds_and_its_command(path):
    record = load_curve(path.stem)
    assert record == json.loads(path.read_text()) and record.keys() == set(KEYS)
    seeds = [row["variant"] for row in record["results"]]
    assert len(seeds) >= 3 and len(set(seeds)) == len(seeds) and all(seed.startswith("seed ") for seed in seeds)
    module, *names = re.fullmatch(r"python -m (?:rlcourse\.course|tools)\.lessons\.(.*)", record["command"])[1].split()
    assert record["name"] == path.stem == "_".join(names if module == "curves" else [module, *names])


@pytest.mark.thorough
def test_a_run_leaves_what_its_record_holds(monkeypatch, tmp_path):
    """One tiny run of each lesson that has runs of its own kind."""
    for module, name, value in (
        (lesson02, "EVAL_PROBLEMS", 2), (lesson03, "VALIDATION", 2), (lesson04, "PROBES", 2), (lesson13, "ASKED", 2),
        (lesson13, "SAMPLED", 2), (lesson13, "HELD_OUT", 4), (lesson14, "FOLDER", tmp_path), (lesson15, "ASKED", 2),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    problems = lesson14.held_out()[:2]
    monkeypatch.setattr(lesson14, "held_out", lambda: problems)
    few = {"num_prompts": 2, "num_generations": 4, "steps": 1, "eval_validation": 2, "eval_problems": 2}
    base = load_policy("embedded")
    for name, found in {
        "lesson02_all": lesson02.run("all", 0, **SMALL),
        "lesson03_16x8": lesson03.training_run("16x8", 0, **SMALL),
        "lesson04_isolated_grpo": lesson04.isolated_run("grpo", 0, **SMALL),
        "lesson13_lora_1": lesson13.lora(base, 0, sft_steps=1, rank=1, seconds=1e-3, every=1.0),
        "lesson14_side_open": lesson14.one_run("side_open", 4, **few),
        "lesson15_lag_1_token": lesson15.one_run(0, **lesson15.RUNS["lag_1_token"] | SMALL),
    }.items():
        recorded = load_curve(name)["results"][0]
        assert found.keys() - {"steps"} <= recorded.keys(), name
        assert found["evals"][0].keys() <= recorded["evals"][0].keys(), name


def test_what_the_readme_says_of_the_gain():
    """Choice brings most, about half; the rest is less garbage and better numbers."""
    found = gain.summary(load_curve("lesson00_gain"))
    whole = found["accuracy"]["points"]
    assert 0.4 * whole < found["choice"]["points"] < 0.6 * whole
    assert found["clean"]["points"] + found["arithmetic"]["points"] > 0.4 * whole
    assert found["choice"]["points"] > max(found["clean"]["points"], found["arithmetic"]["points"])
    assert sum(found[name]["points"] for name in (*gain.FACTORS, "luck")) == pytest.approx(whole)


def test_curves_are_drawn_in_percent(tmp_path):
    curves.plot_curves([load_curve("grpo"), load_curve("dr_grpo")], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no curves"):
        curves.plot_curves([], tmp_path / "curves.png")
