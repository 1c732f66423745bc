"""How long things take: a call, several calls, the phases of a step; and the most memory they took."""

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager

import torch


def now(device: torch.device) -> float:
    """The time in seconds, once the GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Wall seconds of one call, the GPU's work included."""
    start = now(device)
    run()
    return now(device) - start


def measure(run: Callable[[], float], repeats: int, warmup: int = 1) -> list[float]:
    """What `run` returns in `repeats` calls, after `warmup` calls that do not count."""
    for _ in range(warmup):
        run()
    return [run() for _ in range(repeats)]


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median wall seconds of a call, after one that does not count."""
    return statistics.median(measure(lambda: seconds(run, device), repeats))


def peak_memory_bytes(device: torch.device) -> int | None:
    """The most memory held so far: by the GPU's allocator, or by this process (None if the system does not say)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class PhaseTimer:
    """Adds up wall seconds by phase: `with timer("rollout"): ...`. It waits for the GPU at both ends of a phase."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str):
        start = now(self.device)
        try:
            yield
        finally:
            self.seconds[phase] += now(self.device) - start

    def take(self) -> dict[str, float]:
        """The seconds by phase since the last call, as `{phase}_s`."""
        taken = {f"{phase}_s": seconds for phase, seconds in self.seconds.items()}
        self.seconds.clear()
        return taken
