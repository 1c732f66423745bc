"""Records behind the lessons: saved with what made them, loaded by name, and every one that ships has several seeds."""

import json

import pytest

from rlcourse.course.lessons import curve_records as lessons
from rlcourse.course.lessons import lesson02, lesson03, lesson04, lesson05
from rlcourse.paths import data_folder

RECORDS = sorted((data_folder() / "curves").glob("lesson0[2-5]_*.json"))


def test_a_record_says_how_it_was_made_and_comes_back(tmp_path, monkeypatch):
    monkeypatch.setattr(lessons, "data_folder", lambda: tmp_path)
    lessons.save("lesson04", ["slow", "grpo"], {"lr": 1e-5}, [{"seed": 0, "evals": [{"accuracy": 1 / 3}]}])
    found = lessons.load("lesson04", ["slow", "grpo"])
    assert found["command"] == "python -m rlcourse.course.lessons.lesson04 slow grpo" and found["settings"] == {
        "lr": 1e-5
    }
    assert found["seeds"] == [{"seed": 0, "evals": [{"accuracy": 0.33333}]}]
    assert (tmp_path / "curves" / "lesson04_slow_grpo.json").exists()


def test_a_record_that_is_not_there_is_asked_for_by_its_command():
    with pytest.raises(FileNotFoundError, match=r"lesson02_all_of_it\.json is missing: make it with `python -m"):
        lessons.load("lesson02", ["all_of_it"])


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_that_ships_has_three_seeds_and_its_command(path):
    record = json.loads(path.read_text())
    seeds = [seed["seed"] for seed in record["seeds"]]
    assert len(seeds) >= 3 and len(set(seeds)) == len(seeds)
    module, *names = record["command"].removeprefix("python -m rlcourse.bench.").split()
    assert "_".join([module, *names]) == path.stem and record["date"] and record["device"]


def test_every_variant_of_a_lesson_has_been_recorded():
    for load, names in (
        (lesson02.load, lesson02.VARIANTS),
        (lesson03.load, [*lesson03.SHAPES, "dynamic", "noise"]),
        (lesson05.load, lesson05.RUNS),
    ):
        assert all(load(name)["seeds"] for name in names)
    for kind in lesson04.SETTINGS:
        for variant in lesson04.FATES if kind == "isolated" else lesson04.SWITCHES:
            assert lesson04.load(kind, variant)["seeds"]
