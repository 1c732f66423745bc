"""A candidate's process as the judge sees it: asked, timed by the judge's clock, and ended. A process that dies, hangs,
takes too much memory or writes nonsense is refused for that."""

import fcntl
import functools
import glob
import os
import random
import select
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlcourse.measure.timing import seconds
from rlcourse.sandbox.process import Box, Child, find_way
from rlcourse.sandbox.wire import Unreadable, decode, encode, receive, send

# Files of the package that a candidate's process imports.
MODULES = ("sandbox/namespaces.py", "sandbox/wire.py", "tasks/kernelbench/cases.py", "tasks/kernelbench/worker.py")
UNREADABLE = "its process wrote what nobody can read"
SMALL = 1 << 20  # bytes of an answer without outputs
START_SECONDS = 120
# Triton compiles a launcher in C.
COMPILERS = ("/usr/bin", "/bin", "/usr/sbin", "/sbin", "/usr/include", "/usr/libexec", "/etc/alternatives")
LIMITS = {"CPU": 600, "FSIZE": 1 << 28, "NOFILE": 1024, "CORE": 0, "MSGQUEUE": 0, "NPROC": 128}
LIMITS |= {"folder_bytes": 1 << 29, "files": 16384}
COMPILE_ERRORS = ("triton.compiler", "cutlass")  # modules whose errors mean that a kernel does not compile


class Refused(Exception):
    """Ends a candidate. reason: what is wrong, as a name; the message has the details."""

    def __init__(self, reason: str, text: str = ""):
        super().__init__(text or reason)
        self.reason = reason


class Candidate(Child):
    """A process that runs one text. The GPU's memory is watched from here, by what is left on the device. seed: of its
    weights. reference: the model that it is compared with, which never enters the process."""

    def __init__(self, way: str, device: torch.device, memory_bytes: int, gpu_bytes: int):
        self.device, self.gpu_bytes, self.seed = device, gpu_bytes, new_seed()
        self.reference: torch.nn.Module | None = None
        self.watch_gpu()
        super().__init__(way, box(device, memory_bytes))
        try:
            self.receive(START_SECONDS, SMALL)
        except Refused as error:
            raise RuntimeError(f"The process for kernels did not start. {error}") from None
        except BaseException:
            self.close()
            raise

    def watch_gpu(self) -> None:
        """Blame the candidate for all GPU memory that is taken from now on."""
        self.gpu_before = gpu_taken() if self.device.type == "cuda" else 0

    def ask(self, request: list, seconds: float, limit: int = SMALL) -> tuple[Any, float]:
        """The answer to a request, and the seconds it took. Raises Refused, and ends the process, without one."""
        message, start = encode(request), time.perf_counter()
        data = self.receive(seconds, limit, message)
        took = time.perf_counter() - start
        match data:
            case {"value": value}:
                return value, took
            case {"error": [str(kind), str(module), str(message)]}:
                raise Refused("compile" if module.startswith(COMPILE_ERRORS) else "error", f"{kind}: {message}")
        self.lost("nonsense", UNREADABLE)

    def receive(self, seconds: float, limit: int, message: bytes | None = None) -> Any:
        """What the process says, to a message if there is one."""
        deadline = time.monotonic() + seconds
        try:
            if message is not None:
                send(self.connection, message, seconds)
            while not select.select([self.connection], [], [], 0.1)[0]:
                if time.monotonic() > deadline:
                    raise TimeoutError
                if self.device.type == "cuda" and gpu_taken() - self.gpu_before > self.gpu_bytes:
                    self.lost("gpu memory", "it took too much of the GPU's memory")
            return decode(receive(self.connection, max(deadline - time.monotonic(), 1e-3), limit))
        except TimeoutError:
            self.lost("hang", f"no answer after {seconds:g} s")
        except (EOFError, OSError):
            self.lost("died", "it ended its process")
        except Unreadable as error:
            self.lost("nonsense", str(error))

    def lost(self, reason: str, text: str) -> None:
        """End the process and raise Refused."""
        last_line = self.close()
        if "too much memory" in last_line:
            raise Refused("memory", last_line)
        raise Refused(reason, f"{text} ({last_line})" if last_line and reason == "died" else text)


def gpu_taken() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def box(device: torch.device, memory_bytes: int) -> Box:
    """A candidate sees Python, its libraries, compilers, and the GPU if there is one."""
    include = sysconfig.get_path("include")
    system = [*COMPILERS, include, os.path.realpath(include)]
    devices, allowed, own_limits = [], [], {}
    if device.type == "cuda":
        system += [*driver_folders(), "/sys"]
        devices = ["/dev/zero", *(path for path in glob.glob("/dev/nvidia*") if not os.path.isdir(path))]
        allowed = ["memfd_create", "sched_setaffinity"]  # which the driver and its libraries may call
    else:
        own_limits = {"DATA": memory_bytes}  # on a GPU, CUDA reserves far more than it takes
    return Box(
        MODULES, "from rlcourse.tasks.kernelbench.worker import main; main(wire, folder, limits)",
        functools.partial(variables, device=device), LIMITS | {"memory_bytes": memory_bytes}, own_limits,
        devices=devices, allowed=allowed, system=tuple(system),
    )  # fmt: skip


def driver_folders() -> list[str]:
    torch.cuda.init()
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split()[-1] for line in lines if "/libcuda" in line or "/libnvidia" in line}
    return sorted({os.path.dirname(path) for path in paths})


def variables(folder: str, device: torch.device) -> dict[str, str]:
    """The process's environment: nothing of the judge's own, which may hold secrets."""
    found = {"HOME": folder, "TMPDIR": folder, "USER": "candidate", "LANG": "C.UTF-8"}
    found |= {"OMP_NUM_THREADS": "1", "PATH": "/usr/local/bin:/usr/bin:/bin", "TRITON_CACHE_DIR": f"{folder}/triton"}
    if device.type != "cuda":
        return found | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    found["LD_LIBRARY_PATH"] = ":".join(driver_folders())
    for libcuda in [folder for folder in driver_folders() if os.path.exists(f"{folder}/libcuda.so.1")][:1]:
        found["TRITON_LIBCUDA_PATH"] = libcuda
    return found


@functools.cache
def way() -> tuple[str, str]:
    """How this system isolates a candidate, and why it doesn't if it doesn't."""
    return find_way(box(torch.device("cuda" if torch.cuda.is_available() else "cpu"), 1 << 32))


@contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """Check and time while no other judge on this machine does, without advancing torch's random numbers."""
    path = Path(tempfile.gettempdir(), f"rlcourse-kernelbench-{os.getuid()}.lock")
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with torch.random.fork_rng(devices):
            yield


def new_seed() -> int:
    return random.SystemRandom().randrange(2**31)


@functools.cache
def bandwidth(device: torch.device) -> float:
    """1.25 times a copy's bytes per second: no kernel is faster than memory."""
    size = 1 << 30 if device.type == "cuda" else 1 << 26
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 1.25 * 2 * size / min(seconds(lambda: target.copy_(source), device) for _ in range(5))
