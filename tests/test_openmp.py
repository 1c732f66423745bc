"""Threads that wait on a busy CPU, and a package whose import changes nothing."""

import builtins
import io
import os
import subprocess
import sys

import pytest

from rlcourse import openmp


@pytest.mark.parametrize(
    ("loadavg", "waits"), [("0.0 0.0 0.0 2/80 7", "passive"), ("1.9 2.0 2.0 1/80 7", None), ("?", None)]
)
def test_threads_that_wait_sleep_where_another_program_runs(loadavg, waits, monkeypatch):
    """loadavg: what the system says of its load (see man 5 proc): the fourth field counts what runs now."""
    keep = builtins.open
    monkeypatch.setattr(openmp.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(openmp.os, "environ", {})
    monkeypatch.setattr(
        builtins, "open", lambda path, *rest: io.StringIO(loadavg) if path == "/proc/loadavg" else keep(path, *rest)
    )
    openmp.spare_busy_cores()
    assert os.environ.get("OMP_WAIT_POLICY") == waits
    os.environ["OMP_WAIT_POLICY"] = "active"
    openmp.spare_busy_cores()
    assert os.environ["OMP_WAIT_POLICY"] == "active"  # as the user says


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
