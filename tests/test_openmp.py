"""Threads that wait on a busy CPU, and a package whose import changes nothing."""

import os
import platform
import re
import subprocess
import sys

import pytest
import torch  # noqa: F401  loads the OpenMP that the tests look at


def openmp() -> str | None:
    """The OpenMP library that torch has loaded here."""
    with open("/proc/self/maps") as file:
        return next((line.split()[-1] for line in file if "libgomp" in line), None)


def spins(loadavg: str, **environment: str) -> int:
    """How often a waiting thread of OpenMP looks before it sleeps, in a process that spares busy cores, then loads
    torch's OpenMP (alone: torch takes two seconds).

    loadavg: what the system says of its load (see man 5 proc): the fourth field counts what runs now.
    """
    ours = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in ours} | environment
    code = f"""
import builtins, ctypes, io, os
kept, os.cpu_count = builtins.open, lambda: 2
builtins.open = lambda path, *rest: io.StringIO({loadavg!r}) if path == "/proc/loadavg" else kept(path, *rest)
from rlcourse.openmp import spare_busy_cores
spare_busy_cores()
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


def test_importing_the_package_changes_no_variable_and_loads_nothing_of_its_own():
    code = """
import os, sys, time
environment, modules, time.sleep = dict(os.environ), set(sys.modules), None
import rlcourse
assert dict(os.environ) == environment
assert set(sys.modules) - modules == {"rlcourse"}, set(sys.modules) - modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
