"""Records are written with where they come from, give nobody's machine away, and can grow."""

import json
import sys

import pytest

from rlcourse.measure.records import load_record
from tools import records
from tools.bench.results import KeptResults, median_and_spread, record
from tools.records import results_there, write_record

RESULTS = [{"variant": "hf-dynamic", "rows": 16, "tokens_per_s": 751.6}]


def test_paths_of_the_machine_are_cut_down_to_their_last_part(tmp_path, monkeypatch):
    folder = "/".join(["", "home", "somebody"])
    monkeypatch.setattr(sys, "argv", [f"{folder}/bin/rlcourse", "bench", f"--output={folder}/runs", f"{folder}/model"])
    setup = {"model": f"{folder}/qwen", "home": ["~/x/y", r"C:\data\z"], "unit": "tokens/s", "ratio": "1 / 2"}
    setup["hub"] = "Qwen/Qwen2.5-0.5B"
    record = json.loads(write_record("decode", setup, RESULTS, device="CPU x", folder=tmp_path).read_text())
    assert record["command"] == "rlcourse bench --output=runs model"
    assert record["setup"] == setup | {"model": "qwen", "home": ["y", "z"]}
    monkeypatch.setattr(sys, "argv", [f"{folder}/tools/bench/__main__.py", "exact", "--record"])
    record = json.loads(write_record("decode", {}, RESULTS, device="CPU x", folder=tmp_path).read_text())
    assert record["command"] == "python -m tools.bench exact --record"


def add(rows, command, folder, **setup):
    """Add results for these numbers of rows to what is there; what was."""
    there = results_there("decode", setup, device="CPU x", folder=folder)
    new = [{"variant": "graph", "rows": count} for count in rows]
    path = write_record("decode", setup, there + new, device="CPU x", command=command, folder=folder, add=True)
    return path, [row["rows"] for row in there], json.loads(path.read_text())["command"]


def test_results_of_the_same_machine_and_setup_can_be_added_to(tmp_path):
    assert add([16, 64], "a", tmp_path, repeats=3, copy_gb_per_s=1.5)[1:] == ([], "a")
    assert add([256], "b", tmp_path, repeats=3, copy_gb_per_s=1.6)[1:] == ([16, 64], "a; b")
    assert add([8], "b", tmp_path, repeats=3, copy_gb_per_s=1.6)[1:] == ([16, 64, 256], "a; b")
    assert add([64], "c", tmp_path, repeats=5, copy_gb_per_s=1.6)[1:] == ([], "c")  # measured in another way
    path = next(tmp_path.glob("*/decode.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"driver": "1"}))
    assert add([16], "e", tmp_path, repeats=5, copy_gb_per_s=1.6)[1:] == ([], "e")  # on another machine


@pytest.mark.parametrize("spread", [0.2, 0.21])
def test_only_what_was_steady_is_recorded(spread, monkeypatch, tmp_path):
    monkeypatch.setattr(records, "data_folder", lambda: tmp_path)
    rows, kept = [{"variant": "engine 1", "spread": spread}], KeptResults("decode")
    kept.begin({})
    kept.measure({"variant": "engine 1"}, lambda: {"spread": spread})
    if spread > 0.2:
        with pytest.raises(ValueError, match="Not recorded: engine 1 varied by over 20% between repetitions"):
            record("decode", {}, rows)
        assert kept.rows == [] and not list(tmp_path.rglob("*.json"))
    else:
        assert kept.rows == rows == load_record("decode", folder=tmp_path / "measurements")["results"]
        kept.measure({"variant": "engine 1"}, None)  # it is there, so nothing runs


def test_the_spread_is_the_interquartile_range_as_a_share_of_the_median():
    assert median_and_spread([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, 2.0 / 3.0)
    assert median_and_spread([4.0, 2.0]) == (3.0, 0.0)
