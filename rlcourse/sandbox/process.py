"""Start a process for somebody else's code: what it sees, what it may take, and how it ends. On Linux it gets
namespaces of its own, from `namespaces.py` or, where the system allows only that, from bubblewrap. Elsewhere it is an
ordinary process, which the caller may guard."""

import glob
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
STAGED = "/course"  # where an isolated process finds what is staged for it
NAMESPACES_SCRIPT = "sandbox/namespaces.py"
NAMESPACES, BUBBLEWRAP, GUARD = "namespaces", "bubblewrap", "guard"
SYSTEM = ("/usr/lib", "/usr/lib64", "/usr/lib32", "/lib", "/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
COPIES = ("rlcourse", "*/rlcourse", "*/*/rlcourse")  # of the package among installed libraries


@dataclass(frozen=True)
class Box:
    """What a process runs, what it sees, and its limits."""

    modules: tuple[str, ...]  # files of the package that it may import; an `__init__.py` that is not named is empty
    code: str  # with the names `wire`, a file descriptor; `folder`, to write to; `limits`, which it sets itself
    variables: Callable[[str], dict[str, str]]  # its environment, by `folder`
    limits: dict[str, int]  # of `namespaces.py`
    own_limits: dict[str, int] = field(default_factory=dict)  # more limits for a process that is not isolated
    folders: dict[str, Path] = field(default_factory=dict)  # folders to read beside the package, by name
    devices: list[str] = field(default_factory=list)  # more files of /dev
    allowed: list[str] = field(default_factory=list)  # system calls that `namespaces.py` otherwise refuses
    system: tuple[str, ...] = ()  # more paths like SYSTEM


class Child(AbstractContextManager):
    """A process in a box, with a socket to it: `connection`."""

    def __init__(self, way: str, box: Box):
        self.folder = Path(tempfile.mkdtemp(prefix="rlcourse-"))
        self.connection, theirs = socket.socketpair()
        self.process: subprocess.Popen | None = None
        try:
            with theirs:
                self.process = start(way, box, self.folder, theirs.fileno())
        except BaseException:
            self.close()
            raise

    def close(self) -> str:
        """End the process and what it started, and remove its folder. Returns the last line of its standard error."""
        self.connection.close()
        last_line = end(self.process) if self.process is not None else ""
        self.process = None
        remove(self.folder)
        return last_line

    def __exit__(self, *_) -> None:
        self.close()


def start(way: str, box: Box, folder: Path, wire: int) -> subprocess.Popen:
    """Start a box's code, with its part of the package staged in `folder`."""
    stage(folder, box, isolated=way != GUARD)
    if way == GUARD:
        place = tempfile.mkdtemp(dir=folder)
        limits = {name: value for name, value in box.limits.items() if name != "NPROC"}  # counts all of the user's
        command = python_command(f"{folder}{STAGED}", box.code, wire, place, limits | box.own_limits)
        variables = box.variables(place)
    else:
        place, command, variables = folder, isolated(way, box, folder, wire), {}
    null = subprocess.DEVNULL
    return subprocess.Popen(
        command, pass_fds=[wire], stdin=null, stdout=null, stderr=subprocess.PIPE, start_new_session=True, cwd=place,
        env=variables,
    )  # fmt: skip


def stage(folder: Path, box: Box, isolated: bool) -> None:
    """Copy a box's modules to STAGED in `folder`, beside `root`, where an isolated box's file system is mounted."""
    (folder / "root").mkdir()
    place = Path(f"{folder}{STAGED}")
    for name in box.modules:
        target = place / "rlcourse" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PACKAGE / name, target)
        for parent in Path(name).parents:
            (place / "rlcourse" / parent / "__init__.py").touch()
    for name, path in box.folders.items():
        (place / name).mkdir() if isolated else (place / name).symlink_to(path)


def end(process: subprocess.Popen) -> str:
    """End a process and all that it started. Returns the last line of its standard error."""
    process.terminate()  # `namespaces.py` then ends everything inside first
    with suppress(subprocess.TimeoutExpired):
        process.wait(10 if str(PACKAGE / NAMESPACES_SCRIPT) in process.args else 0)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with process.stderr:
        os.set_blocking(process.stderr.fileno(), False)
        lines = (process.stderr.read() or b"").decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def remove(folder: Path) -> None:
    """Remove a folder, however deep and whatever its permissions: shutil.rmtree fails on a very deep one."""
    if folder.exists():
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run([*command, "--", str(folder)], check=False, capture_output=True)


def find_way(box: Box) -> tuple[str, str]:
    """The first way to isolate a process that works here; or GUARD, and why none does."""
    if sys.platform != "linux":
        return GUARD, "this is not Linux"
    reasons = []
    for way in (NAMESPACES, BUBBLEWRAP):
        reasons.append(attempt(way, box))
        if not reasons[-1]:
            return way, ""
    return GUARD, "; ".join(reasons)


def attempt(way: str, box: Box) -> str:
    """Try a way with a program that opens torch and the box's modules. Returns what goes wrong, "" if nothing."""
    if way == BUBBLEWRAP and shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    needed = [importlib.util.find_spec("torch").origin, *(f"{STAGED}/rlcourse/{name}" for name in box.modules)]
    code = f"import os\nfor name in {needed!r}: open(name).close()\nos.write(wire, b'ready')"
    child = Child(way, replace(box, code=code))
    child.connection.settimeout(20)
    with suppress(OSError):
        if child.connection.recv(5) == b"ready":
            child.close()
            return ""
    return f"{way}: {child.close() or 'it does not start'}"


def python() -> str:
    """The interpreter itself, not a virtual environment's link to it."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def libraries() -> list[str]:
    """Python's own folders, and those of `sys.path` with installed libraries, or inside one, like CuTe DSL's."""
    own = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    kept = [path for path in sys.path if re.search(r"/lib-dynload$|/(site|dist)-packages(/|$)", path)]
    return list(dict.fromkeys([*own, *filter(os.path.isdir, kept)]))


def python_command(staged: str, code: str, wire: int, folder: str, limits: dict[str, int]) -> list[str]:
    """The command that runs a box's code, with the libraries and, instead of the package, what is staged."""
    given = f"import sys; sys.path[:] = {[staged, *libraries()]!r}; wire, folder, limits = {(wire, folder, limits)!r}"
    return [python(), "-I", "-S", "-c", f"{given}\n{code}"]


def isolated(way: str, box: Box, folder: Path, wire: int) -> list[str]:
    """The command that runs a box's code in namespaces."""
    read, hidden, links = files(box.system)
    read += [[f"{folder}{STAGED}", STAGED], *([str(path), f"{STAGED}/{name}"] for name, path in box.folders.items())]
    plan = {"root": str(folder / "root"), "read": read, "hidden": hidden, "links": links}
    plan |= {"devices": box.devices, "allowed": box.allowed, "limits": box.limits, "keep": wire}
    plan |= {"command": python_command(STAGED, box.code, wire, "/tmp", {}), "environment": box.variables("/tmp")}
    if way == NAMESPACES:
        return [python(), "-I", "-S", str(PACKAGE / NAMESPACES_SCRIPT), json.dumps(plan)]
    inside = [python(), "-I", "-S", f"{STAGED}/rlcourse/{NAMESPACES_SCRIPT}", "--inside", json.dumps(plan)]
    return bubblewrap(plan) + inside


def bubblewrap(plan: dict) -> list[str]:
    """The plan as options of bubblewrap."""
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
    found += ["--dev-bind", "/dev/null", "/dev/zero"]  # see DEVICES of `namespaces.py`
    for path in plan["devices"]:
        found += ["--dev-bind", path, path]
    return [*found, "--remount-ro", "/dev", "--chdir", "/tmp", "--remount-ro", "/", "--"]


def files(more: Iterable[str] = ()) -> tuple[list[list[str]], list[str], dict[str, str]]:
    """The plan's `read`, `hidden` and `links`. more: paths like SYSTEM."""
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
