"""Which device computes, and settings of torch that are given back."""

import os
import platform
import re
import subprocess
import sys

import pytest
import torch

from rlcourse.config import make_config
from rlcourse.device import autocast, find_device, wanted_device


@pytest.mark.parametrize("gpu", [True, False])
def test_auto_is_a_gpu_where_there_is_one(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert find_device(make_config()).type == ("cuda" if gpu else "cpu")
    assert find_device(make_config(device="cpu")).type == "cpu"


def test_bfloat16_asks_for_a_gpu_by_itself(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert wanted_device(make_config(dtype="bfloat16")) == "cuda"
    assert wanted_device(make_config(device="cuda")) == "cuda" and wanted_device(make_config()) == "cpu"


def test_autocast_is_for_bfloat16_alone():
    a = torch.ones(2, 2)
    for dtype in ("float32", "bfloat16"):
        with autocast(dtype, torch.device("cpu")):
            assert (a @ a).dtype == getattr(torch, dtype)
            assert dtype == "float32" or not torch.is_autocast_cache_enabled()


def openmp() -> str | None:
    """The OpenMP library that torch has loaded here."""
    with open("/proc/self/maps") as file:
        return next((line.split()[-1] for line in file if "libgomp" in line), None)


def spins(loadavg: str, **environment: str) -> int:
    """How often a waiting thread of OpenMP looks before it sleeps, in a process that imports the package, then loads
    torch's OpenMP (alone: torch takes two seconds).

    loadavg: what the system says of its load (see man 5 proc): the fourth field counts what runs now.
    """
    ours = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in ours} | environment
    code = f"""
import builtins, ctypes, io, os
kept, os.cpu_count = builtins.open, lambda: 2
builtins.open = lambda path, *rest: io.StringIO({loadavg!r}) if path == "/proc/loadavg" else kept(path, *rest)
import rlcourse
ctypes.CDLL({openmp()!r})
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment | {"OMP_DISPLAY_ENV": "verbose"})
    assert done.returncode == 0, done.stderr
    return int(re.search(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)[1])


@pytest.mark.skipif(platform.system() != "Linux" or openmp() is None, reason="OpenMP of another compiler")
def test_threads_that_wait_sleep_where_another_program_runs_unless_the_user_says_otherwise():
    idle, busy = "1.90 2.00 2.00 1/80 7", "0.00 0.00 0.00 2/80 7"
    assert spins(busy) == 0 < spins(idle) == spins("nonsense")
    assert spins(busy, OMP_WAIT_POLICY="active") > 0 == spins(idle, OMP_WAIT_POLICY="passive")
