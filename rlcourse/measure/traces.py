"""Traces of a GPU in the format of Chrome, as `profile(..., trace=...)` writes them. An event is a dict with a name, a
category `cat`, a start `ts` and a duration `dur` in microseconds. What the host starts on the GPU carries a number,
`args["correlation"]`, and so does what then runs there; all kernels of a CUDA graph carry that of its one launch."""

import gzip
import json
from pathlib import Path
from typing import Any

from rlcourse.measure.profiling import LAUNCHES
from rlcourse.measure.records import device_name, slug
from rlcourse.paths import data_folder

Event = dict[str, Any]
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
BY_HOST = ("cuda_runtime", "cuda_driver")


def on_gpu(events: list[Event]) -> list[Event]:
    """What ran on the GPU, by start."""
    return sorted((event for event in events if event.get("cat") in ON_GPU), key=lambda event: event["ts"])


def launches(events: list[Event], of: list[Event] | None = None) -> list[Event]:
    """The host's calls that start something on the GPU, by start: all, or those that started these, however early."""
    found = [e for e in events if e.get("cat") in BY_HOST and e["name"].startswith(LAUNCHES)]
    if of is not None:
        numbers = {event["args"]["correlation"] for event in of}
        found = [event for event in found if event["args"]["correlation"] in numbers]
    return sorted(found, key=lambda event: event["ts"])


def read_trace(path: Path) -> list[Event]:
    """The events of a trace, packed by gzip or not."""
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]


def trace_path(name: str, device: str | None = None) -> Path:
    """Where the trace `name` of a device stands in data/traces; of the device at hand if not given."""
    return data_folder() / "traces" / slug(device or device_name()) / f"{name}.json.gz"
