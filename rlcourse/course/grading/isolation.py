"""Where a notebook's code runs: which files it sees, and how its process is started.

On Linux that is in namespaces of its own: `namespaces.py` makes them, or bubblewrap where a system allows that alone.
Elsewhere it is an ordinary process with a guard (`guard.py`), and `way` says why.
"""

import functools
import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path

import torch

from rlcourse.paths import data_folder

PACKAGE = Path(__file__).resolve().parents[2]
COURSE, DATA = "/course", "/data"  # where an isolated process finds what `stage` made, and the course's records
# What of the package is there. No function that an exercise asks for stands in these files.
VISIBLE = (
    "__init__.py",
    "files.py",
    "paths.py",
    "course/__init__.py",
    "course/start.py",
    "course/calls.py",
    "course/figures.py",
    "course/kernels/__init__.py",
    "course/kernels/trace.py",
    "course/wire.py",
    "course/grading/__init__.py",
    "course/grading/namespaces.py",
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
)
SYSTEM = ("/usr/lib", "/usr/lib64", "/usr/lib32", "/lib", "/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
COPIES = ("rlcourse", "*/rlcourse", "*/*/rlcourse")  # of the package among installed libraries
NAMESPACES_SCRIPT = "course/grading/namespaces.py"
NAMESPACES, BUBBLEWRAP, GUARD = "namespaces", "bubblewrap", "guard"
# Of each process: seconds, bytes of a file, open files, and nothing of what no answer needs.
LIMITS = {"CPU": 300, "FSIZE": 1 << 26, "NOFILE": 256, "CORE": 0, "MSGQUEUE": 0, "MEMLOCK": 0}
OWN_BYTES = 1 << 30  # what libraries hold in memory
MISSING = (
    "Not isolated: a notebook's code runs as your own user, with your files, processes and network; a guard closes "
    "simple ways to the answers only. ({why})"
)


def stage(folder: Path, isolated: bool) -> None:
    """Put what a notebook's code may see of the course into `folder / "course"`."""
    (folder / "root").mkdir()
    folder = folder / "course"
    for name in VISIBLE:
        target = folder / "rlcourse" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PACKAGE / name, target)
    (folder / "data").symlink_to(DATA if isolated else data_folder())
    (folder / "matplotlib").mkdir()
    for fonts in font_lists():
        shutil.copyfile(fonts, folder / "matplotlib" / fonts.name)


def font_lists() -> list[Path]:
    """Matplotlib's lists of fonts, which take seconds to make again."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "matplotlib"
    folders = [Path(os.environ["MPLCONFIGDIR"])] if os.environ.get("MPLCONFIGDIR") else []
    return next((found for place in [*folders, cache] if (found := sorted(place.glob("fontlist*.json")))), [])


def start(way: str, staged: Path, wire: int, memory_bytes: int) -> subprocess.Popen:
    """Start the worker, which answers on the file descriptor `wire`; its errors come from the process's stderr."""
    if way == GUARD:
        work = Path(tempfile.mkdtemp(dir=staged))
        return launch(worker_command(str(staged / "course"), wire), wire, work, environment(str(work)))
    command = worker_command(COURSE, wire)
    return launch(isolated(way, staged, command, wire, memory_bytes), wire, staged, {})


def launch(command: list[str], wire: int, folder: Path, variables: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        command,
        pass_fds=[wire],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        cwd=folder,
        env=variables,
    )


def end(process: subprocess.Popen) -> str:
    """End a worker and all that it started. The last line of what it had to say before it was ready."""
    process.terminate()  # which `namespaces.py` answers by ending everything first
    by_hand = str(PACKAGE / NAMESPACES_SCRIPT) in process.args
    with suppress(subprocess.TimeoutExpired):
        process.wait(10 if by_hand else 0)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with suppress(ValueError):  # it is read already
        os.set_blocking(process.stderr.fileno(), False)
        said = (process.stderr.read() or b"").decode(errors="replace").strip()
        process.stderr.close()
        return said.splitlines()[-1] if said else ""
    return ""


@functools.cache
def way() -> tuple[str, str]:
    """How this system isolates a process, tried with one that does nothing; and, where it does not, why."""
    reasons = ["this is not Linux"]
    if sys.platform == "linux":
        reasons = []
        for found in (NAMESPACES, BUBBLEWRAP):
            reason = tried(found)
            if not reason:
                return found, ""
            reasons.append(reason)
    return GUARD, "; ".join(reasons)


def tried(way: str) -> str:
    """Try a way to isolate a process. Nothing if it works, else what goes wrong."""
    if way == BUBBLEWRAP and shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    ours, theirs = os.pipe()
    needed = [torch.__file__, f"{COURSE}/rlcourse/__init__.py"]
    code = f"import os\nfor name in {needed!r}: open(name).close()\nos.write({theirs}, b'ready')"
    with tempfile.TemporaryDirectory(prefix="rlcourse-") as folder:
        stage(Path(folder), isolated=True)
        command = isolated(way, Path(folder), [python(), "-I", "-S", "-c", code], theirs, 0)
        process = launch(command, theirs, Path(folder), {})
        os.close(theirs)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        said = end(process)
    ready = os.read(ours, 5) == b"ready"
    os.close(ours)
    return "" if ready else f"{way}: {said or 'it does not start'}"


def python() -> str:
    """The interpreter itself, not a virtual environment's link to it."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def libraries() -> list[str]:
    """Python's own folders, and those of `sys.path` that hold installed libraries, or lie in one that does, as those of
    CuTe DSL do."""
    own = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    dynamic = [path for path in sys.path if path.endswith("lib-dynload")]
    kept = [path for path in sys.path if re.search(r"/(site|dist)-packages(/|$)", path) and os.path.isdir(path)]
    return list(dict.fromkeys([*own, *dynamic, *kept]))


def worker_command(course: str, wire: int) -> list[str]:
    """The command that runs `worker.py`, with the libraries but without the package: what is staged stands for it."""
    code = (
        f"import sys; sys.path[:] = {[course, *libraries()]!r}\n"
        f"from rlcourse.course.grading.worker import main; main({wire}, {course!r})"
    )
    return [python(), "-I", "-S", "-c", code]


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


def isolated(way: str, staged: Path, command: list[str], wire: int, memory_bytes: int) -> list[str]:
    """The command that runs `command` in namespaces."""
    read, hidden, links = files()
    read = [*read, [str(staged / "course"), COURSE], [str(data_folder()), DATA]]
    limits = LIMITS | {"NPROC": 32, "folder_bytes": 1 << 28, "files": 4096, "memory_bytes": memory_bytes + OWN_BYTES}
    plan = {"read": read, "hidden": hidden, "links": links, "command": command, "keep": wire, "limits": limits}
    plan |= {"root": str(staged / "root"), "environment": environment("/tmp")}
    if way == NAMESPACES:
        return [python(), "-I", "-S", str(PACKAGE / NAMESPACES_SCRIPT), json.dumps(plan)]
    inside = [python(), "-I", "-S", f"{COURSE}/rlcourse/{NAMESPACES_SCRIPT}", "--inside", json.dumps(plan)]
    return bubblewrap(plan) + inside


def bubblewrap(plan: dict) -> list[str]:
    """What `namespaces.py` does by itself, as options of bubblewrap."""
    options = "--unshare-all --unshare-user --disable-userns --uid 1000 --gid 1000 --cap-drop ALL --die-with-parent"
    found = [shutil.which("bwrap"), *options.split(), "--as-pid-1", "--clearenv", "--hostname", "grader"]
    size = str(plan["limits"]["folder_bytes"])
    found += ["--size", size, "--tmpfs", "/tmp"]  # first: libraries may stand in a folder of /tmp
    for source, target in plan["read"]:
        found += ["--ro-bind", source, target]
    for path in plan["hidden"]:
        found += ["--tmpfs", path, "--remount-ro", path]
    for path, target in plan["links"].items():
        found += ["--symlink", target, path]
    found += ["--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    return [*found, "--chdir", "/tmp", "--remount-ro", "/", "--"]


def files() -> tuple[list[list[str]], list[str], dict[str, str]]:
    """[[path, where it is seen]] to read, folders in them to hide, links."""
    links = {path: os.readlink(path) for path in SYSTEM if os.path.islink(path)}
    wanted = [path for path in SYSTEM if not os.path.islink(path)]
    wanted += [os.path.realpath(path) for path in [python(), sys.base_prefix + "/lib", *libraries()]]
    found: list[str] = []
    for path in sorted(set(wanted), key=len):
        if os.path.exists(path) and not within(path, found):
            found.append(path)
    for path in libraries():  # one that is reached by a link
        if os.path.realpath(path) != path and not within(path, [*found, *links]):
            links[path] = os.path.realpath(path)
    hidden = {copy for path in found for pattern in COPIES for copy in glob.glob(f"{path}/{pattern}/")}
    return [[path, path] for path in found], sorted(path.rstrip("/") for path in hidden), links


def within(path: str, folders: list[str]) -> bool:
    return any(path.startswith(folder + "/") for folder in folders)
