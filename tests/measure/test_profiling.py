"""Times by phase, the most memory, and traces of a GPU: what ran there, and what the host did to start it."""

import json
import sys

import pytest
import torch

from rlcourse.measure import profiling, traces
from rlcourse.measure.timing import peak_memory_bytes

CPU = torch.device("cpu")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_is_that_of_the_process_in_bytes():
    with open("/proc/self/status") as status:
        kilobytes = int(next(line for line in status if line.startswith("VmHWM")).split()[1])
    assert peak_memory_bytes(CPU) == pytest.approx(1024 * kilobytes, rel=0.02)


def test_a_profile_counts_what_one_call_does_and_leaves_a_trace_that_a_viewer_reads(tmp_path):
    a = torch.randn(64, 64)
    calls = []
    trace = tmp_path / "trace.json"
    found = profiling.profile(lambda: calls.append((a @ a).relu().sum()), CPU, repeats=3, trace=trace)
    assert len(calls) == 1 + 3 + 3  # once to warm up, then for the time, then under the profiler
    assert found.kernels == 3 and found.busy is None and found.launches == 0 and found.seconds > 0
    assert any(event.get("name") == "aten::relu" for event in json.loads(trace.read_text())["traceEvents"])


@pytest.mark.parametrize(
    ("spans", "total"),
    [([], 0), ([(0, 2), (5, 6)], 3), ([(0, 4), (1, 2)], 4), ([(3, 5), (0, 4)], 5), ([(0, 1), (1, 2)], 2)],
)
def test_kernels_that_overlap_count_once(spans, total):
    assert profiling.covered(spans) == total


def test_launches_are_found_by_what_they_started_however_early():
    """In the recorded steps of our engine."""
    events = traces.read_trace(traces.trace_path("graph", "NVIDIA H200"))
    kernels = traces.on_gpu(events)
    assert kernels and [e["ts"] for e in kernels] == sorted(e["ts"] for e in kernels)
    one = traces.launches(events, of=kernels[-1:])
    assert [e["args"]["correlation"] for e in one] == [kernels[-1]["args"]["correlation"]]
    assert len(traces.launches(events)) < len(kernels)  # one of a graph starts many
