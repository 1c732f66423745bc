import importlib.util
import os
import sys

import pytest

from rlcourse.course import lab


@pytest.mark.parametrize(("user", "more"), [(1000, []), (0, ["--allow-root"])])
def test_jupyterlab_starts_in_the_folder_of_the_notebooks_for_this_machine_alone(user, more, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    (tmp_path / "notebooks").mkdir()
    assert lab.command(8890, tmp_path) == [
        sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={tmp_path}", "--ip=127.0.0.1", "--port=8890", *more,
    ]  # fmt: skip
