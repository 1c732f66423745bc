"""Records of learning curves: their rows, their digits, and the command that says how they were made."""

import json

import pytest

from rlcourse.course.lessons import curve_records


def measured(seed: int) -> dict:
    return {"evals": [{"step": 0, "accuracy": 0.123456789 + seed}]}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(curve_records, "data_folder", lambda: tmp_path)


def read(folder) -> dict:
    [path] = folder.glob("curves/*/*.json")
    return json.loads(path.read_text())


def test_a_row_for_each_variant_and_seed(tmp_path):
    curve_records.record_variants("sampler_gap", {"lr": 0.1}, ["a", "b"], (1, 2), lambda _, seed: measured(seed))
    record = read(tmp_path)
    assert [(row["variant"], row["seed"]) for row in record["results"]] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    assert record["results"][3]["evals"] == [{"step": 0, "accuracy": 2.1235}] and record["setup"] == {"lr": 0.1}
    assert record["command"] == "python -m rlcourse.course.lessons.sampler_gap"


@pytest.mark.parametrize(
    ("name", "command"),
    [("lesson03_2x64", "lesson03 2x64"), ("rloo", "curves 2x64"), ("lesson15_lag_0", "lesson15 2x64")],
)
def test_a_row_for_each_seed(tmp_path, name, command):
    curve_records.record_seeds(name, ["2x64"], {}, (0, 3), measured)
    record = read(tmp_path)
    assert [row["variant"] for row in record["results"]] == ["seed 0", "seed 3"]
    assert record["command"] == f"python -m rlcourse.course.lessons.{command}"
    assert curve_records.load_curve(name)["results"][0]["evals"] == [{"step": 0, "accuracy": 0.12346}]
