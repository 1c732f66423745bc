"""Where time goes: what the GPU does in a call."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from rlcourse.measure.timing import seconds


@dataclass(frozen=True)
class Profile:
    """What one call did, a mean over several. seconds: wall time, without the profiler. busy: share of it in which the
    GPU worked, None on a CPU. kernels: GPU kernels, or operators on a CPU. launches: times the host told the GPU to
    start something."""

    seconds: float
    busy: float | None
    kernels: float
    launches: float


LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")


def profile(
    run: Callable[[], object], device: torch.device, repeats: int = 5, trace: str | Path | None = None
) -> Profile:
    """Time `run` without the profiler, which slows the host down, then run it under `torch.profiler`. trace: where to
    write a Chrome trace, for ui.perfetto.dev."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler writes notes of its own on stderr
    run()
    elapsed = seconds(lambda: [run() for _ in range(repeats)], device) / repeats
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with torch_profile(activities=activities, acc_events=True) as recorded:
        for _ in range(repeats):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize()
    if trace is not None:
        recorded.export_chrome_trace(str(trace))
    events = recorded.events()
    launches = sum(event.name.startswith(LAUNCHES) for event in events) / repeats
    if device.type != "cuda":
        return Profile(elapsed, None, sum(event.cpu_parent is None for event in events) / repeats, launches)
    kernels = [event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
    spans = [(event.time_range.start, event.time_range.end) for event in kernels]
    busy = min(1.0, covered(spans) / 1e6 / repeats / elapsed)
    return Profile(elapsed, busy, len(kernels) / repeats, launches)


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of intervals: kernels that overlap count once."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
