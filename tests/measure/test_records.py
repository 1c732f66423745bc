"""Measurement records: what is written can be read, says where it comes from, and gives nobody's machine away."""

import json
import re
import sys

import pytest

from rlcourse.measure.records import (
    KEYS,
    load_record,
    provenance,
    results_there,
    slug,
    write_record,
)

RESULTS = [
    {"variant": "hf-dynamic", "rows": 16, "tokens_per_s": 751.6, "ms_per_step": 21.04},
    {"variant": "graph", "rows": 16, "tokens_per_s": 11047.2, "floor_ms": 0.2446},
]


def write(folder, name="decode", device="NVIDIA H200", **more):
    return write_record(name, {"model": "Qwen2.5-0.5B"}, RESULTS, device=device, folder=folder, **more)


def test_what_is_written_is_read_back(tmp_path):
    path = write(tmp_path, command="rlcourse bench decode --record")
    assert path == tmp_path / "nvidia-h200" / "decode.json"
    record = load_record("decode", folder=tmp_path)
    assert record.keys() == set(KEYS)
    assert record["results"] == RESULTS and record["device"] == "NVIDIA H200"
    assert record["command"] == "rlcourse bench decode --record"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"]) and record["versions"]["torch"]
    assert load_record("decode", "NVIDIA H200", tmp_path) == load_record("decode", "nvidia-h200", tmp_path) == record


@pytest.mark.parametrize(
    ("device", "folder"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("NVIDIA A10G", "nvidia-a10g"),
        ("CPU AMD EPYC", "cpu-amd-epyc"),
        ("CPU AMD EPYC 7763 64-Core Processor", "cpu-amd-epyc-7763"),
        ("CPU Intel(R) Xeon(R) CPU @ 2.20GHz", "cpu-intel-xeon"),
    ],
)
def test_device_folders_are_short(device, folder):
    assert slug(device) == folder == slug(folder)


def test_paths_of_the_machine_are_cut_down_to_their_last_part(tmp_path, monkeypatch):
    folder = "/".join(["", "home", "somebody"])
    monkeypatch.setattr(sys, "argv", [f"{folder}/bin/rlcourse", "bench", f"--output={folder}/runs", f"{folder}/model"])
    setup = {"model": f"{folder}/qwen", "home": ["~/x/y", r"C:\data\z"], "unit": "tokens/s", "ratio": "1 / 2"}
    setup["hub"] = "Qwen/Qwen2.5-0.5B"
    record = json.loads(write_record("decode", setup, RESULTS, device="CPU x", folder=tmp_path).read_text())
    assert record["command"] == "rlcourse bench --output=runs model"
    assert record["setup"] == setup | {"model": "qwen", "home": ["y", "z"]}
    monkeypatch.setattr(sys, "argv", [f"{folder}/rlcourse/__main__.py", "bench"])  # python -m rlcourse
    record = json.loads(write_record("decode", {}, RESULTS, device="CPU x", folder=tmp_path).read_text())
    assert record["command"] == "rlcourse bench"
    monkeypatch.setattr(sys, "argv", [f"{folder}/tools/bench/__main__.py", "exact", "--record"])
    record = json.loads(write(tmp_path).read_text())
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


def test_results_that_are_added_to_another_days_have_their_dates(tmp_path):
    for rows, day in (([16], "2020-01-01"), ([64, 128], "2020-01-02"), ([256], "2020-01-03")):
        path = add(rows, "a", tmp_path)[0]
        path.write_text(json.dumps(json.loads(path.read_text()) | {"date": day}))
    record = json.loads(path.read_text())
    dates = {row["rows"]: row.get("date") for row in record["results"]}
    assert dates == {16: "2020-01-01", 64: "2020-01-02", 128: "2020-01-02", 256: None}
    assert provenance(record) == "recorded on CPU x, 2020-01-01, 2020-01-02 and 2020-01-03"


def test_a_missing_record_says_how_to_measure_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="rlcourse bench decode --record"):
        load_record("decode", folder=tmp_path)
