"""What `rlcourse doctor` finds: whole and broken installs, caches, GPUs; never a traceback, never the network."""

import io
import json
import socket

import pytest
from rich.console import Console

from rlcourse import doctor
from rlcourse.measure import machine

GB = 10**9


@pytest.fixture(autouse=True)
def clean_machine(monkeypatch, tmp_path):
    """No GPU, an empty home, no network: a connection that is tried fails the test."""
    monkeypatch.setattr(machine, "gpus", list)
    monkeypatch.setattr(machine, "driver", lambda: None)
    monkeypatch.delenv("RLCOURSE_GSM8K_DIR", raising=False)
    for name in ("HF_DATASETS_CACHE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))

    def refuse(*_):
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def found(facts, name):
    return next(check for check in facts["checks"] if check["name"] == name)


def report(facts) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    doctor.print_report(facts, console)
    return console.export_text()


def test_the_name_of_the_host_is_no_fact(monkeypatch):
    name = "host-of-somebody"
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    monkeypatch.setattr(doctor.platform, "node", lambda: name)
    uname = doctor.platform.uname()
    monkeypatch.setattr(doctor.platform, "uname", lambda: uname._replace(node=name))
    assert name not in json.dumps(doctor.gather())


def test_every_missing_thing_but_a_gpu_has_a_command(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    for check in doctor.gather()["checks"]:
        assert check["ok"] or check["mend"] or check["name"] == "GPU", check
        assert not (check["ok"] and check["mend"])


def test_a_broken_torch_and_a_missing_library_are_reported_without_traceback(monkeypatch):
    def broken():
        raise OSError("libtorch.so: cannot open shared object file\nmore")

    monkeypatch.setattr(machine, "versions", lambda: {"python": "3.11.1", "torch": "2.13.0", "datasets": None})
    monkeypatch.setattr(machine, "gpus", broken)
    facts = doctor.gather()
    assert found(facts, "torch works")["detail"] == "OSError: libtorch.so: cannot open shared object file"
    assert "pip install" in found(facts, "torch works")["mend"]
    assert facts["presets"] == [] and found(facts, "torch works")["required"]
    assert "cannot open shared object" in report(facts)
    assert found(facts, "libraries")["detail"] == "missing: datasets"


@pytest.mark.parametrize(("size", "fits"), [(12, [False] * 3), (24, [True, False, False]), (140, [True] * 3)])
def test_presets_fit_a_gpu_that_is_large_enough(monkeypatch, size, fits):
    gpu = {"name": "NVIDIA X", "memory_bytes": size * GB, "capability": "9.0"}
    monkeypatch.setattr(machine, "gpus", lambda: [gpu])
    facts = doctor.gather()
    assert [row["fits"] for row in facts["presets"][1:4]] == fits
    assert found(facts, "GPU")["ok"] and "capability 9.0" in report(facts)


def test_a_driver_that_torch_cannot_use_is_a_wrong_build_of_torch(monkeypatch):
    monkeypatch.setattr(machine, "driver", lambda: "580.1")
    check = found(doctor.gather(), "GPU")
    assert not check["ok"] and "pip install --force-reinstall torch" in check["mend"]


def test_memory_is_limited_by_the_container(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    real_open = open
    monkeypatch.setattr(
        "builtins.open", lambda path, *a: real_open(limit if str(path).endswith("memory.max") else path, *a)
    )
    limit.write_text("123456\n")
    assert machine.memory_bytes() == 123456
    limit.write_text("max\n")
    assert machine.memory_bytes() > 123456
