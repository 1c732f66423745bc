"""What a trace of a GPU says about a decode step."""

import json

import pytest

from rlcourse.measure import traces
from rlcourse.measure.traces import account, cut, read_trace, step_marks, trace_path, write_trace


def kernel(name, ts, dur, correlation, cat="kernel"):
    args = {"correlation": correlation, "stream": 7, "device": 0, "host": "secret"}
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur, "args": args}


def call(name, ts, dur, correlation, cat="cuda_runtime"):
    args = {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "pid": 41, "tid": 42, "ts": ts, "dur": dur, "args": args}


def steps(count=6, step=100.0):
    """A prefill, then steps of a CUDA graph of two kernels that overlap by 5 µs, a copy, and a kernel of its own. Each
    is launched 30 µs before it runs; every second step has another short kernel."""
    events = [kernel("void prefill<float>(int)", 10 * i, 5, 900 + i) for i in range(count)]
    events += [call("cudaLaunchKernel", 10 * i - 5, 1, 900 + i) for i in range(count)]
    for i in range(count):
        at = 1000 + step * i
        events += [kernel("void at::native::matmul_kernel<4>(float*)", at, 20, 10 * i)]
        events += [kernel("decode_attention", at + 15, 25, 10 * i)]
        events += [kernel("Memcpy DtoH (Device -> Pinned)", at + 50, 2, 10 * i + 1, "gpu_memcpy")]
        events += [kernel("decode_attention", at + 60, 10, 10 * i + 2)]
        events += [call("cudaGraphLaunch", at - 30, 8, 10 * i), call("cudaMemcpyAsync", at + 20, 3, 10 * i + 1)]
        events += [call("cuLaunchKernelEx", at + 30, 4, 10 * i + 2, "cuda_driver")]
        events += [call("cudaStreamSynchronize", at + 40, 12, 10 * i + 1)]  # starts nothing
        if i % 2:
            events += [kernel("even", at + 80, 1, 10 * i + 3), call("cudaLaunchKernel", at + 70, 2, 10 * i + 3)]
    return events


def test_steps_begin_with_a_kernel_that_runs_once_in_each():
    first = [kernel("void at::native::matmul_kernel<4>(float*)", 500, 20, 77)]  # one that the first token has, too
    for events in (steps(), steps() + first):
        assert step_marks(events, 6) == [1000 + 100 * i for i in range(6)]
    with pytest.raises(ValueError, match="No kernel of this trace ran once in each of 4 steps"):
        step_marks(steps(), 4)


def test_time_is_a_kernels_once_and_adds_up_to_busy():
    """Attention begins 5 µs before the product ends: it adds 20 of its 25 µs, and later 10 more."""
    events = steps()
    kernels, step = account(events, step_marks(events, 6)[1:])
    assert kernels == [
        ("decode_attention", 2.0, 30.0),
        ("matmul_kernel", 1.0, 20.0),
        ("Memcpy DtoH", 1.0, 2.0),
        ("even", 0.5, 0.5),
    ]
    assert step["step_us"] == 100 and step["busy_us"] == 52.5 == sum(us for _, _, us in kernels)
    assert step["kernels"] == 4.5 and step["gaps"] == 3.5
    # launches of what ran, however early they were
    assert step["launches"] == 3.5 and step["launch_us"] == 8 + 3 + 4 + 2 / 2


def test_what_is_cut_out_begins_at_0_and_names_no_machine():
    events = steps()
    events += [{"ph": "M", "name": "process_name", "pid": 41, "tid": 0, "ts": 3.0, "args": {"name": "python3"}}]
    events += [{"ph": "M", "name": "thread_name", "pid": 41, "tid": 99, "ts": 3.0, "args": {"name": "elsewhere"}}]
    events += [{"ph": "X", "cat": "python_function", "name": "secret.py", "pid": 41, "tid": 42, "ts": 1210, "dur": 1}]
    for correlation, sent, received in ((1, 1201, 1202), (2, 1100, 1203)):
        arrow = {"cat": "ac2g", "name": "ac2g", "id": correlation, "pid": 0, "tid": 7}
        events += [arrow | {"ph": "s", "ts": sent}, arrow | {"ph": "f", "ts": received, "bp": "e"}]
    found = cut(events, 1200, 1400)
    timed = [event for event in found if event["ph"] != "M"]
    assert min(e["ts"] for e in timed) == 0 and max(e["ts"] for e in timed) < 200
    assert sum(event.get("cat") == "kernel" for event in found) == 3 + 4
    assert [event["name"] for event in found if event["ph"] == "M"] == ["process_name"]
    assert [(event["ph"], event["id"]) for event in found if event.get("cat") == "ac2g"] == [("s", 1), ("f", 1)]
    assert "secret" not in json.dumps(found)


def test_a_trace_is_kept_and_read(tmp_path, monkeypatch):
    monkeypatch.setattr(traces, "data_folder", lambda: tmp_path)
    path, events = trace_path("graph", "NVIDIA H200"), steps()
    assert path == tmp_path / "traces" / "nvidia-h200" / "graph.json.gz"
    write_trace(events, path)
    packed = path.read_bytes()
    write_trace(events, path)
    assert read_trace(path) == events and path.read_bytes() == packed
