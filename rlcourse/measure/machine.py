"""What this machine is: processor, memory, GPUs, driver and library versions, None where it cannot be found. Nothing
names the host or a folder."""

import contextlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from typing import Any

PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "numpy")
PEERS = ("trl", "vllm", "flashinfer-python")  # measured beside ours where they are installed


def cpu_model() -> str:
    """The processor's name, such as 'AMD EPYC 7763 64-Core Processor'; the architecture where it has none."""
    try:
        if platform.system() == "Darwin":
            return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def cpu_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Main memory in bytes, or the container's limit if that is lower; None if the system does not say."""
    sizes = []
    if hasattr(os, "sysconf"):
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError), open(limit) as file:  # no such file, or the word "max"
            sizes.append(int(file.read()))
    return min(sizes, default=None)


def versions() -> dict[str, str | None]:
    """Installed versions of Python and the main libraries, None for one that is missing; and peers that are there."""
    found = {"python": platform.python_version()} | dict.fromkeys(PACKAGES)
    for package in (*PACKAGES, *PEERS):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def gpus() -> list[dict[str, Any]]:
    """The CUDA devices that torch can use: name, memory in bytes, capability. Raises whatever importing torch
    raises."""
    import torch

    if not torch.cuda.is_available():
        return []
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [{"name": d.name, "memory_bytes": d.total_memory, "capability": f"{d.major}.{d.minor}"} for d in devices]


def driver() -> str | None:
    """The NVIDIA driver's version, None without one."""
    if not shutil.which("nvidia-smi"):
        return None
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0].strip() or None


def format_bytes(count: int) -> str:
    """3_400_000_000 → '3.4 GB', in powers of ten."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count / size < 1000 else f"{count / size:,.0f} {unit}"
    return f"{count} B"


def _output(*command: str) -> str:
    """What a command prints; '' if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
