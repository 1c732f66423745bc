"""Where a notebook's code runs: which files it sees, and how its process is started.

On Linux that is in namespaces of its own (`rlcourse.sandbox`). Elsewhere it is an ordinary process with a guard
(`guard.py`), and `way` says why.
"""

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from rlcourse.paths import data_folder
from rlcourse.sandbox import process
from rlcourse.sandbox.process import BUBBLEWRAP, GUARD, NAMESPACES, PACKAGE, STAGED, Box

__all__ = ["BUBBLEWRAP", "GUARD", "NAMESPACES", "PACKAGE", "VISIBLE", "stage", "start", "way"]

DATA = "/data"  # where an isolated process finds the course's records
# What of the package is there. No function that an exercise asks for stands in these files.
VISIBLE = (
    "__init__.py",
    "files.py",
    "openmp.py",
    "paths.py",
    "course/__init__.py",
    "course/start.py",
    "course/calls.py",
    "course/figures.py",
    "course/kernels/__init__.py",
    "course/kernels/trace.py",
    "course/grading/__init__.py",
    "course/grading/worker.py",
    "course/grading/cells.py",
    "course/grading/guard.py",
    "course/lessons/__init__.py",
    "course/lessons/curve_records.py",
    "kernels/__init__.py",
    "kernels/arguments.py",
    "kernels/cubin.py",
    "kernels/dsl.py",
    "kernels/toolchain.py",
    "measure/__init__.py",
    "measure/machine.py",
    "measure/plots.py",
    "measure/records.py",
    "sandbox/__init__.py",
    "sandbox/namespaces.py",
    "sandbox/wire.py",
)
# Of each process: seconds, bytes of a file, open files, and nothing of what no answer needs.
LIMITS = {"CPU": 300, "FSIZE": 1 << 26, "NOFILE": 256, "CORE": 0, "MSGQUEUE": 0, "MEMLOCK": 0}
OWN_BYTES = 1 << 30  # what libraries hold in memory
MISSING = (
    "Not isolated: a notebook's code runs as your own user, with your files, processes and network; a guard closes "
    "simple ways to the answers only. ({why})"
)


def stage(folder: Path, isolated: bool) -> None:
    """Put what a notebook's code may see of the course into `folder / "course"`."""
    place = process.stage(folder, VISIBLE)
    (place / "data").symlink_to(DATA if isolated else data_folder())
    (place / "matplotlib").mkdir()
    for fonts in font_lists():
        shutil.copyfile(fonts, place / "matplotlib" / fonts.name)


def font_lists() -> list[Path]:
    """Matplotlib's lists of fonts, which take seconds to make again."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "matplotlib"
    folders = [Path(os.environ["MPLCONFIGDIR"])] if os.environ.get("MPLCONFIGDIR") else []
    return next((found for place in [*folders, cache] if (found := sorted(place.glob("fontlist*.json")))), [])


def start(way: str, staged: Path, wire: int, memory_bytes: int) -> subprocess.Popen:
    """Start the worker, which answers on the file descriptor `wire`; its errors come from the process's stderr."""
    if way == GUARD:
        work = Path(tempfile.mkdtemp(dir=staged))
        return process.launch(worker_command(str(staged / "course"), wire), wire, work, environment(str(work)))
    command = process.isolated(way, box(staged, memory_bytes), worker_command(STAGED, wire), wire)
    return process.launch(command, wire, staged, {})


def box(staged: Path, memory_bytes: int) -> Box:
    limits = LIMITS | {"NPROC": 32, "folder_bytes": 1 << 28, "files": 4096, "memory_bytes": memory_bytes + OWN_BYTES}
    return Box(staged, environment("/tmp"), limits, read=[[str(data_folder()), DATA]])


@functools.cache
def way() -> tuple[str, str]:
    """How this system isolates a process, tried with one that does nothing; and, where it does not, why."""
    return process.find_way(tried)


def tried(way: str) -> str:
    """Try a way to isolate a process. Nothing if it works, else what goes wrong."""
    with tempfile.TemporaryDirectory(prefix="rlcourse-") as folder:
        stage(Path(folder), isolated=True)
        return process.attempt(way, box(Path(folder), 0), [torch.__file__, f"{STAGED}/rlcourse/__init__.py"])


def worker_command(course: str, wire: int) -> list[str]:
    """The command that runs `worker.py`."""
    code = f"from rlcourse.course.grading.worker import main; main({wire}, {course!r})"
    return process.python_command(course, code)


def environment(folder: str) -> dict[str, str]:
    """The variables of the worker: none of the grader's own, in which there may be secrets."""
    return {
        "HOME": folder,
        "TMPDIR": folder,
        "MPLCONFIGDIR": folder + "/matplotlib",
        "MPLBACKEND": "agg",
        "LANG": "C.UTF-8",
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",  # torch.compile and torch.jit.script give back what they were given: it runs
        "PYTORCH_JIT": "0",  # as Python, without a compiler
        "RLCOURSE_PROFILE": "smoke",
    }
