"""What lies behind the lessons' figures: records with several seeds and a command, made by the package's own step."""

import json
import re

import pytest

from rlcourse.config import ALGORITHMS
from rlcourse.course.lessons import gain
from rlcourse.course.lessons.curve_records import load_curve
from rlcourse.measure.records import KEYS
from rlcourse.paths import data_folder
from tools.lessons import curves

CURVES = sorted((data_folder() / "curves").glob("*/*.json"))
RECORDS = [path for path in CURVES if path.stem.startswith("lesson") or path.stem in ALGORITHMS]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_curve_that_ships_has_three_seeds_and_its_command(path):
    record = load_curve(path.stem)
    assert record == json.loads(path.read_text()) and record.keys() == set(KEYS)
    seeds = [row["variant"] for row in record["results"]]
    assert len(seeds) >= 3 and len(set(seeds)) == len(seeds) and all(seed.startswith("seed ") for seed in seeds)
    module, *names = re.fullmatch(r"python -m (?:rlcourse\.course|tools)\.lessons\.(.*)", record["command"])[1].split()
    assert record["name"] == path.stem == "_".join(names if module == "curves" else [module, *names])


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
