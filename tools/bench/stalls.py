"""What the warps of decode attention wait for, by Nsight Compute: its warp stall reasons, kernel by kernel.

`python -m tools.bench.stalls WAY` launches one kernel for the profiler, which `stalls` starts with it.
"""

import csv
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tools.bench.cute import attention
from tools.bench.results import Rows

SHAPE = (256, 1024, 1024)  # rows, slots, tokens in use, as in the record cute
WAYS = ("simple", "split", "split-ahead", "cute")
REASON = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
METRICS = {
    "us": "gpu__time_duration.sum",
    "issue_active": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "warps": "smsp__warps_active.avg.per_cycle_active",
    "instructions": "smsp__inst_executed.sum",
}


def stalls() -> tuple[dict[str, Any], Rows]:
    """Of each kernel: its microseconds, the share of cycles in which a scheduler issues, warps per scheduler,
    instructions, and for each reason how many warps per issued instruction are stalled by it.

    Raises ValueError without a GPU, without Nsight Compute, or where it may not read the GPU's counters.
    """
    if not torch.cuda.is_available():
        raise ValueError("The kernels need a GPU, and no CUDA GPU was found: `rlcourse doctor` says what runs here.")
    if shutil.which("ncu") is None:
        raise ValueError("Nsight Compute's `ncu` isn't on the PATH: it comes with the CUDA toolkit.")
    return {"dtype": "bfloat16", "tokens": SHAPE[2]}, [
        {"variant": f"attention-{way}", "shape": [SHAPE[0], SHAPE[2]]} | profiled(way) for way in WAYS
    ]


def profiled(way: str) -> dict[str, float]:
    """The numbers of a way's longest kernel."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.csv")
        command = [
            "ncu",
            "--csv",
            "--page",
            "raw",
            "--section",
            "WarpStateStats",
            "--metrics",
            ",".join(METRICS.values()),
        ]
        command += ["--print-units", "base", "--clock-control", "none", "--profile-from-start", "off"]
        command += ["--log-file", str(log), sys.executable, "-m", "tools.bench.stalls", way]
        done = subprocess.run(command, capture_output=True, text=True)
        text = log.read_text() if log.exists() else ""
    table = [line for line in text.splitlines() if line.startswith('"')]
    if done.returncode or len(table) < 3:
        raise ValueError(f"ncu measured nothing: {(text + done.stdout + done.stderr)[-2000:]}")
    return longest(table)


def longest(table: list[str]) -> dict[str, float]:
    """Of a table in CSV (names, units, a row for each launch) the row that took longest."""
    names, _, *rows = csv.reader(table)
    launches = [dict(zip(names, row, strict=True)) for row in rows]
    found = max(launches, key=lambda launch: number(launch[METRICS["us"]]))
    reasons = {match[1]: number(value) for name, value in found.items() if (match := REASON.fullmatch(name))}
    numbers = {name: number(found[metric]) for name, metric in METRICS.items()}
    return numbers | {"us": numbers["us"] / 1e3} | dict(sorted(reasons.items(), key=lambda item: -item[1]))


def number(text: str) -> float:
    return float(text.replace(",", ""))


def launch_one(way: str) -> None:
    case = attention(*SHAPE)
    tensors = case.make()
    case.ways[way](*tensors)  # compiles
    torch.empty(256 << 20, dtype=torch.uint8, device="cuda").fill_(0)  # nothing of the tensors stays in the cache
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    case.ways[way](*tensors)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    with torch.no_grad():
        launch_one(sys.argv[1])
