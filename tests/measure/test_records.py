"""Measurement records: read by name and device, and refused where they are missing."""

import json

import pytest

from rlcourse.measure.records import KEYS, load_record, provenance, slug

RECORD = dict.fromkeys(KEYS) | {"device": "CPU x", "date": "2020-01-02", "results": [{"variant": "graph"}]}


SLUGS = {
    "NVIDIA H200": "nvidia-h200", "NVIDIA A10G": "nvidia-a10g", "CPU AMD EPYC": "cpu-amd-epyc",
    "CPU AMD EPYC 7763 64-Core Processor": "cpu-amd-epyc-7763", "CPU Intel(R) Xeon(R) CPU @ 2.20GHz": "cpu-intel-xeon",
}  # fmt: skip


def test_device_folders_are_short():
    assert {device: slug(device) for device in SLUGS} == SLUGS and set(map(slug, SLUGS.values())) == set(SLUGS.values())


def test_a_record_is_found_by_its_name_and_by_its_device(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"measure it with `python -m tools\.bench decode --record`"):
        load_record("decode", folder=tmp_path)
    for device in ("cpu-x", "nvidia-h200"):
        (tmp_path / device).mkdir()
        (tmp_path / device / "decode.json").write_text(json.dumps(RECORD | {"device": device}))
    assert load_record("decode", "NVIDIA H200", tmp_path)["device"] == "nvidia-h200"
    with pytest.raises(ValueError, match="recorded on cpu-x, nvidia-h200: say which device"):
        load_record("decode", folder=tmp_path)


def test_every_day_of_a_record_is_told():
    rows = [{"variant": "graph", "date": "2020-01-01"}, {"variant": "graph"}]
    assert provenance(RECORD | {"results": rows}) == "recorded on CPU x, 2020-01-01 and 2020-01-02"
