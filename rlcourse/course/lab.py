"""`rlcourse lab`: JupyterLab in the folder of the course."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def command(port: int, root: Path = ROOT) -> list[str]:
    """The command that starts JupyterLab in `root`, for this machine alone. Raises one sentence without JupyterLab or
    the notebooks."""
    if not (root / "notebooks").is_dir():
        raise FileNotFoundError(
            "The notebooks are not part of an installed package: clone the repository, install it with "
            "`python -m pip install -e '.[notebooks]'` there, and run `rlcourse lab` again."
        )
    if importlib.util.find_spec("jupyterlab") is None:
        raise ValueError("JupyterLab is not installed: run `python -m pip install -e '.[notebooks]'`.")
    options = [f"--ServerApp.root_dir={root}", "--ip=127.0.0.1", f"--port={port}"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.append("--allow-root")  # in a container everybody is root, and nobody else reaches this address
    return [sys.executable, "-m", "jupyterlab", *options]


def lab(port: int) -> int:
    """Run JupyterLab until it is stopped, and return its exit status."""
    return subprocess.run(command(port)).returncode
