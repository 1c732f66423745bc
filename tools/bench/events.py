"""Where a decode step's time goes in a trace, and a few steps cut out, kept as data for ui.perfetto.dev."""

import gzip
import itertools
import json
import re
from pathlib import Path

from rlcourse.measure.traces import BY_HOST, ON_GPU, Event, launches, on_gpu

KEPT = (*ON_GPU, *BY_HOST, "cpu_op", "user_annotation")  # categories that a viewer needs
DETAILS = ("correlation", "stream", "grid", "block", "registers per thread", "shared memory", "bytes")


def within(events: list[Event], begin: float, end: float) -> list[Event]:
    """Those that begin in begin..end."""
    return [event for event in events if begin <= event["ts"] < end]


def step_marks(events: list[Event], steps: int) -> list[float]:
    """When each of the last `steps` steps began on the GPU: the starts of a kernel that runs once a step.

    Such a kernel ran `steps` times, or once more where the first token's step has it too. Of several, the one that
    comes most regularly. Raises ValueError if there is none.
    """
    by_name: dict[str, list[float]] = {}
    for event in on_gpu(events):
        by_name.setdefault(event["name"], []).append(event["ts"])
    once = [times[-steps:] for times in by_name.values() if len(times) in (steps, steps + 1)]
    if not once:
        raise ValueError(f"No kernel of this trace ran once in each of {steps} steps.")
    return max(once, key=lambda times: min(b - a for a, b in itertools.pairwise(times)))


def account(events: list[Event], marks: list[float]) -> tuple[list[tuple[str, float, float]], dict[str, float]]:
    """Where the GPU's time goes from the first mark to the last, for one step of those between them.

    Returns (name, calls, microseconds) by kernel, longest first, and the step: `step_us` in the trace, `busy_us` of it,
    `gaps` between kernels, `kernels`, `launches` by the host and `launch_us` that these took. A kernel's microseconds
    are what it adds to those that began before it, so that they add up to `busy_us` where kernels overlap.
    """
    begin, end, steps = marks[0], marks[-1], len(marks) - 1
    inside = within(on_gpu(events), begin, end)
    calls: dict[str, int] = {}
    added: dict[str, float] = {}
    until, gaps = begin, 0
    for event in inside:
        gaps += event["ts"] > until
        name, stop = short_name(event["name"]), min(event["ts"] + event["dur"], end)
        calls[name] = calls.get(name, 0) + 1
        added[name] = added.get(name, 0.0) + max(0.0, stop - max(event["ts"], until))
        until = max(until, stop)
    launched = launches(events, of=inside)
    kernels = [(name, calls[name] / steps, added[name] / steps) for name in sorted(added, key=lambda n: -added[n])]
    return kernels, {
        "step_us": (end - begin) / steps,
        "busy_us": sum(added.values()) / steps,
        "gaps": (gaps + (until < end)) / steps,
        "kernels": len(inside) / steps,
        "launches": len(launched) / steps,
        "launch_us": sum(event["dur"] for event in launched) / steps,
    }


def short_name(name: str) -> str:
    """A kernel's name without return type, namespaces, template arguments and parameters."""
    plain = name.replace("(anonymous namespace)::", "")
    if plain.startswith(("Memcpy", "Memset")):
        return plain.partition(" (")[0]
    while plain != (plain := re.sub(r"<[^<>]*>", "", plain)):  # from the innermost out
        pass
    parts = plain.partition("(")[0].split()[-1].split("::")
    return "::".join(parts[-2:]) if parts[-1] == "kernel" else parts[-1]


def cut(events: list[Event], begin: float, end: float) -> list[Event]:
    """The events that begin in begin..end, with what a viewer needs to show them, times from `begin` on.

    Names of processes and threads stay, arrows from a launch to its kernel where both ends do, and nothing about the
    machine.
    """
    inside = [e for e in events if e.get("ph") == "X" and e.get("cat") in KEPT and begin <= e["ts"] < end]
    lanes = {(event["pid"], event["tid"]) for event in inside}
    arrows = [e for e in events if e.get("cat") == "ac2g" and begin <= e["ts"] < end]
    both = {e["id"] for e in arrows if e["ph"] == "s"} & {e["id"] for e in arrows if e["ph"] == "f"}
    names = [e for e in events if e.get("ph") == "M" and e["pid"] in {pid for pid, _ in lanes}]
    names = [e for e in names if not e["name"].startswith("thread") or (e["pid"], e["tid"]) in lanes]
    moved = []
    for event in [*inside, *(e for e in arrows if e["id"] in both)]:
        kept = {key: value for key, value in event.items() if key != "args"} | {"ts": round(event["ts"] - begin, 3)}
        if "args" in event:
            kept["args"] = {key: event["args"][key] for key in DETAILS if key in event["args"]}
        moved.append(kept)
    return [{key: value for key, value in event.items() if key != "ts"} for event in names] + moved


def write_trace(events: list[Event], path: Path) -> None:
    """A trace that ui.perfetto.dev opens. The same events give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
