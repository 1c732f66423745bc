"""Records of learning curves: their rows, their digits, and the command that says how they were made."""

import json

from rlcourse.course.lessons import curve_records


def measured(seed: int) -> dict:
    return {"evals": [{"step": 0, "accuracy": 0.123456789 + seed}]}


def test_a_row_for_each_variant_and_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(curve_records, "data_folder", lambda: tmp_path)
    curve_records.record_variants("sampler_gap", {"lr": 0.1}, ["a", "b"], (1, 2), lambda _, seed: measured(seed))
    [path] = tmp_path.glob("curves/*/*.json")
    record = json.loads(path.read_text())
    assert [(row["variant"], row["seed"]) for row in record["results"]] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    assert record["results"][3]["evals"] == [{"step": 0, "accuracy": 2.1235}] and record["setup"] == {"lr": 0.1}
    assert record["command"] == "python -m rlcourse.course.lessons.sampler_gap"
