"""Traces of a GPU: what ran there, and what the host did to start it."""

from rlcourse.measure import traces


def test_launches_are_found_by_what_they_started_however_early():
    """In the recorded steps of our engine."""
    events = traces.read_trace(traces.trace_path("graph", "NVIDIA H200"))
    kernels = traces.on_gpu(events)
    assert kernels and [e["ts"] for e in kernels] == sorted(e["ts"] for e in kernels)
    one = traces.launches(events, of=kernels[-1:])
    assert [e["args"]["correlation"] for e in one] == [kernels[-1]["args"]["correlation"]]
    assert len(traces.launches(events)) < len(kernels)  # one of a graph starts many
