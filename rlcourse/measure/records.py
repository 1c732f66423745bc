"""Measurement records: what was measured once on a GPU or a CPU, kept as data and shown where it cannot be measured. A
record is a file, `<device>/<name>.json`, in `data/measurements` for what benchmarks measure, in `data/curves` for
learning curves. `tools/records.py` writes them."""

import re
from pathlib import Path
from typing import Any

from rlcourse.files import read_json
from rlcourse.measure import machine
from rlcourse.paths import data_folder

KEYS = ("name", "device", "driver", "versions", "date", "command", "setup", "results")

loaded: set[Path] = set()  # the files that `load_record` has read: a notebook is stale if one of them changes


def device_name() -> str:
    """The device that measurements here belong to: the first GPU, else the processor."""
    gpus = machine.gpus()
    return gpus[0]["name"] if gpus else f"CPU {machine.cpu_model()}"


def slug(device: str) -> str:
    """The folder name of a device: 'NVIDIA H200' → 'nvidia-h200', 'CPU AMD EPYC Processor' → 'cpu-amd-epyc'."""
    text = re.sub(r"@.*|\((R|TM|tm)\)|\b\d+-Core\b|\bProcessor\b|(?<=\S)\s+CPU\b", " ", device)
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def load_record(
    name: str, device: str | None = None, folder: Path | None = None, command: str | None = None
) -> dict[str, Any]:
    """The record `name` of `device`, a device's name or folder name; of the only device that has one if not given.
    folder: data/measurements if not given. command: what makes it. Raises FileNotFoundError if there is none,
    ValueError if there are several to choose from or the file isn't JSON."""
    folder = folder or data_folder() / "measurements"
    found = sorted(folder.glob(f"{slug(device) if device else '*'}/{name}.json"))
    remedy = f"measure it with `{command or f'python -m tools.bench {name} --record'}`"
    if not found:
        raise FileNotFoundError(f"{name!r} has not been recorded{f' on {device}' if device else ''}: {remedy}.")
    if len(found) > 1:
        devices = ", ".join(path.parent.name for path in found)
        raise ValueError(f"{name!r} has been recorded on {devices}: say which device.")
    loaded.add(found[0])
    return read_json(found[0], remedy)


def provenance(record: dict[str, Any]) -> str:
    """'recorded on NVIDIA H200, 2026-01-31', or both of two days, the first and last of more: beside each figure that
    comes from a record."""
    first, *others = sorted({record["date"], *(row.get("date", record["date"]) for row in record["results"])})
    until = f"{' and ' if len(others) == 1 else ' to '}{others[-1]}" if others else ""
    return f"recorded on {record['device']}, {first}{until}"
