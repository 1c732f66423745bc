"""Start a process for somebody else's code: what it sees, what it may take, and how it ends.

On Linux it gets namespaces of its own, from `namespaces.py` or, where the system allows only that, from bubblewrap.
Elsewhere it is an ordinary process, which the caller may guard.
"""

import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
STAGED = "/course"  # where an isolated process finds what `stage` made
NAMESPACES_SCRIPT = "sandbox/namespaces.py"
NAMESPACES, BUBBLEWRAP, GUARD = "namespaces", "bubblewrap", "guard"
SYSTEM = ("/usr/lib", "/usr/lib64", "/usr/lib32", "/lib", "/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
COPIES = ("rlcourse", "*/rlcourse", "*/*/rlcourse")  # of the package among installed libraries


@dataclass(frozen=True)
class Box:
    """What a process may see and take."""

    folder: Path  # as `stage` made it
    variables: dict[str, str]
    limits: dict[str, int]  # of `namespaces.py`
    read: list[list[str]] = field(default_factory=list)  # [path, where it is seen], beside Python and what is staged
    devices: list[str] = field(default_factory=list)  # files of /dev beside those of every box
    allowed: list[str] = field(default_factory=list)  # system calls that `namespaces.py` refuses otherwise
    system: tuple[str, ...] = ()  # folders beside SYSTEM, seen where they are


def stage(folder: Path, modules: Iterable[str]) -> Path:
    """Copy these files of the package to `folder / "course"`, and return that; packages are empty unless named.

    Beside it is `root`, which a box covers.
    """
    (folder / "root").mkdir()
    place = folder / "course"
    for name in modules:
        target = place / "rlcourse" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PACKAGE / name, target)
        for parent in Path(name).parents:
            (place / "rlcourse" / parent / "__init__.py").touch()
    return place


def launch(command: list[str], wire: int, folder: Path, variables: dict[str, str]) -> subprocess.Popen:
    null = subprocess.DEVNULL
    return subprocess.Popen(
        command, pass_fds=[wire], stdin=null, stdout=null, stderr=subprocess.PIPE, start_new_session=True, cwd=folder,
        env=variables,
    )  # fmt: skip


def end(process: subprocess.Popen) -> str:
    """End a process and all that it started. The last line of what it had to say on standard error."""
    process.terminate()  # which `namespaces.py` answers by ending everything first
    with suppress(subprocess.TimeoutExpired):
        process.wait(10 if str(PACKAGE / NAMESPACES_SCRIPT) in process.args else 0)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stderr.closed:  # it is read already
        return ""
    with process.stderr:
        os.set_blocking(process.stderr.fileno(), False)
        said = (process.stderr.read() or b"").decode(errors="replace").strip()
    return said.splitlines()[-1] if said else ""


def remove(folder: Path) -> None:
    """Remove a folder, however deep and whatever its rights: Python's own recursion would end in a deep one."""
    if folder.exists():
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run([*command, "--", str(folder)], check=False, capture_output=True)


def find_way(tried: Callable[[str], str]) -> tuple[str, str]:
    """How this system isolates a process, the first way for which `tried` has nothing to say; or why there is none."""
    if sys.platform != "linux":
        return GUARD, "this is not Linux"
    reasons = []
    for way in (NAMESPACES, BUBBLEWRAP):
        reasons.append(tried(way))
        if not reasons[-1]:
            return way, ""
    return GUARD, "; ".join(reasons)


def attempt(way: str, box: Box, needed: list[str]) -> str:
    """Try a way with a program that opens the files `needed`. Nothing if it works, else what goes wrong."""
    if way == BUBBLEWRAP and shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    ours, theirs = os.pipe()
    code = f"import os\nfor name in {needed!r}: open(name).close()\nos.write({theirs}, b'ready')"
    process = launch(isolated(way, box, [python(), "-I", "-S", "-c", code], theirs), theirs, box.folder, {})
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
    kept = [path for path in sys.path if re.search(r"/lib-dynload$|/(site|dist)-packages(/|$)", path)]
    return list(dict.fromkeys([*own, *filter(os.path.isdir, kept)]))


def python_command(staged: str, code: str) -> list[str]:
    """The command that runs `code`, with the libraries but without the package: what is staged stands for it."""
    return [python(), "-I", "-S", "-c", f"import sys; sys.path[:] = {[staged, *libraries()]!r}\n{code}"]


def isolated(way: str, box: Box, command: list[str], wire: int) -> list[str]:
    """The command that runs `command` in namespaces."""
    read, hidden, links = files(box.system)
    plan = {"read": [*read, [str(box.folder / "course"), STAGED], *box.read], "hidden": hidden, "links": links}
    plan |= {"command": command, "keep": wire, "limits": box.limits, "root": str(box.folder / "root")}
    plan |= {"environment": box.variables, "devices": box.devices, "allowed": box.allowed}
    if way == NAMESPACES:
        return [python(), "-I", "-S", str(PACKAGE / NAMESPACES_SCRIPT), json.dumps(plan)]
    inside = [python(), "-I", "-S", f"{STAGED}/rlcourse/{NAMESPACES_SCRIPT}", "--inside", json.dumps(plan)]
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
    found += ["--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/dev/shm"]
    for path in plan["devices"]:
        found += ["--dev-bind", path, path]
    return [*found, "--remount-ro", "/dev", "--chdir", "/tmp", "--remount-ro", "/", "--"]


def files(more: Iterable[str] = ()) -> tuple[list[list[str]], list[str], dict[str, str]]:
    """[[path, where it is seen]] to read, folders in them to hide, links. more: paths beside SYSTEM."""
    system = dict.fromkeys([*SYSTEM, *more])
    links = {path: os.readlink(path) for path in system if os.path.islink(path)}
    wanted = [path for path in system if not os.path.islink(path)]
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


def within(path: str, folders: Iterable[str]) -> bool:
    return any(path.startswith(folder + "/") for folder in folders)
