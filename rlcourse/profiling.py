"""How long each phase of a step takes, and how much memory the process has used at most."""

import sys
import time
from collections import defaultdict
from contextlib import contextmanager

import torch


class PhaseTimer:
    """Adds up wall seconds by phase: `with timer("rollout"): ...`. Waits for the GPU at both ends of a phase."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str):
        start = self._now()
        try:
            yield
        finally:
            self.seconds[phase] += self._now() - start

    def _now(self) -> float:
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def take(self) -> dict[str, float]:
        """The seconds by phase since the last call, as `{phase}_s`."""
        taken = {f"{phase}_s": seconds for phase, seconds in self.seconds.items()}
        self.seconds.clear()
        return taken


def peak_memory_bytes(device: torch.device) -> int | None:
    """The most memory held so far: of the GPU's allocator, or of this process (None where the system does not say)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
