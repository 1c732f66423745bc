"""Measurement records: what was measured once on a GPU or a CPU, kept as data and shown where it cannot be measured.

A record is a file, `<device>/<name>.json`, in `data/measurements` for what `rlcourse bench` measures, in `data/curves`
for learning curves. Host names and folders are never stored.
"""

import datetime
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from rlcourse.files import read_json, write_json
from rlcourse.measure import machine
from rlcourse.paths import data_folder

KEYS = ("name", "device", "driver", "versions", "date", "command", "setup", "results")

BENCHMARKS = ("learn", "decode", "kernels", "step")  # of `rlcourse bench`; others are in `tools/bench/`

loaded: set[Path] = set()  # the files that `load_record` has read: a notebook is stale if one of them changes

PATH = re.compile(r"(?<![\w.)\]/])(?:~|[A-Za-z]:)?[/\\][\w.][^\s'\"]*")  # absolute, or in somebody's home


def device_name() -> str:
    """The device that measurements here belong to: the first GPU, else the processor."""
    gpus = machine.gpus()
    return gpus[0]["name"] if gpus else f"CPU {machine.cpu_model()}"


def slug(device: str) -> str:
    """The folder name of a device: 'NVIDIA H200' → 'nvidia-h200', 'CPU AMD EPYC Processor' → 'cpu-amd-epyc'."""
    text = re.sub(r"@.*|\((R|TM|tm)\)|\b\d+-Core\b|\bProcessor\b|(?<=\S)\s+CPU\b", " ", device)
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def write_record(
    name: str,
    setup: dict[str, Any],
    results: list[dict[str, Any]],
    device: str | None = None,
    command: str | None = None,
    folder: Path | None = None,
    add: bool = False,
) -> Path:
    """Write a record of this machine, today, and return its path.

    setup: what was run (model, shapes, dtype, repeats). results: one dict for each variant, with its name as 'variant';
    the key of a number has its unit (tokens_per_s, ms_per_step). device: `device_name()` if not given; a 'CPU ...' has
    no driver. command: this process's command line if not given. folder: data/measurements if not given. add: the
    results are `results_there` and more; the commands of those stand before this one. Any path of this machine is cut
    down to its last part. Raises ValueError for results without a variant.
    """
    record = _new_record(name, setup, results, device, command)
    check_record(record, f"record {name!r}")
    path = _path(record, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    before = _like(record, path) if add else None
    if before is not None:
        record["command"] = "; ".join(dict.fromkeys([*before["command"].split("; "), record["command"]]))
    write_json(path, record)
    return path


def results_there(
    name: str, setup: dict[str, Any], device: str | None = None, folder: Path | None = None
) -> list[dict[str, Any]]:
    """The results in the record `name` of this machine, if of what `write_record` would write now only the day, the
    command and what was measured for the setup (a float) differ. Those of another day have its date."""
    record = _new_record(name, setup, [], device)
    before = _like(record, _path(record, folder))
    if before is None:
        return []
    day = {} if before["date"] == record["date"] else {"date": before["date"]}
    return [day | row for row in before["results"]]


def _new_record(
    name: str, setup: dict[str, Any], results: list[dict[str, Any]], device: str | None, command: str | None = None
) -> dict[str, Any]:
    device = device or device_name()
    record = {
        "name": name,
        "device": device,
        "driver": None if device.startswith("CPU") else machine.driver(),
        "versions": machine.versions(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command or shlex.join([*_program(Path(sys.argv[0])), *sys.argv[1:]]),
        "setup": setup,
        "results": results,
    }
    return _without_paths(record)


def _path(record: dict[str, Any], folder: Path | None) -> Path:
    return (folder or data_folder() / "measurements") / slug(record["device"]) / f"{record['name']}.json"


def _like(record: dict[str, Any], path: Path) -> dict[str, Any] | None:
    """The record in `path`, if it is of the same machine, versions and setup."""

    def same(record: dict[str, Any]) -> list[Any]:
        asked = {key: value for key, value in record["setup"].items() if not isinstance(value, float)}
        return [asked, *(record[key] for key in KEYS if key not in ("date", "command", "setup", "results"))]

    before = read_json(path, "record it again") if path.exists() else None
    return before if before is not None and same(before) == same(record) else None


def _program(path: Path) -> list[str]:
    """What you type to run it: `rlcourse` even for `python -m rlcourse`, and `python -m tools.bench`."""
    if path.name != "__main__.py" or path.parent.name == "rlcourse":
        return [path.parent.name if path.name == "__main__.py" else path.name]
    return ["python", "-m", f"{path.parents[1].name}.{path.parent.name}"]


def load_record(
    name: str, device: str | None = None, folder: Path | None = None, command: str | None = None
) -> dict[str, Any]:
    """The record `name` of `device`, a device's name or folder name; of the only device that has one if not given.

    folder: data/measurements if not given. command: what makes the record; if not given, the benchmark of that name.
    Raises FileNotFoundError if there is none, ValueError if there are several to choose from or the file is malformed.
    """
    folder = folder or data_folder() / "measurements"
    found = sorted(folder.glob(f"{slug(device) if device else '*'}/{name}.json"))
    bench = "rlcourse bench" if name.partition("-")[0] in BENCHMARKS else "python -m tools.bench"
    remedy = f"measure it with `{command or f'{bench} {name} --record'}`"
    if not found:
        raise FileNotFoundError(f"{name!r} has not been recorded{f' on {device}' if device else ''}: {remedy}.")
    if len(found) > 1:
        devices = ", ".join(path.parent.name for path in found)
        raise ValueError(f"{name!r} has been recorded on {devices}: say which device.")
    label = f"{found[0].parent.name}/{found[0].name}"
    record = read_json(found[0], remedy)
    check_record(record, label)
    loaded.add(found[0])
    return record


def check_record(record: dict[str, Any], label: str) -> None:
    """Raise ValueError, naming `label`, unless the record has every key and each of its results a variant."""
    missing = [key for key in KEYS if key not in record]
    if missing:
        raise ValueError(f"{label} lacks {', '.join(missing)}: a record has {', '.join(KEYS)}.")
    results = record["results"]
    if not isinstance(results, list) or not results:
        raise ValueError(f"{label} has no results: they are a list with one object for each variant.")
    if not all(isinstance(row, dict) and "variant" in row for row in results):
        raise ValueError(f"{label} has a result without a 'variant': each says what was measured.")


def provenance(record: dict[str, Any]) -> str:
    """'recorded on NVIDIA H200, 2026-01-31', with every day of several: beside each figure that comes from a record."""
    days = sorted({record["date"], *(row.get("date", record["date"]) for row in record["results"])})
    *others, last = days
    return f"recorded on {record['device']}, {', '.join(others)}{' and ' if others else ''}{last}"


def results_table(results: list[dict[str, Any]], title: str) -> Table:
    """The results as a rich table, with a column for each key."""
    columns, table = columns_of(results), Table(title=title)
    for column in columns:
        numeric = any(isinstance(row.get(column), int | float) for row in results)
        table.add_column(column, justify="right" if numeric else "left", no_wrap=True)
    for row in results:
        table.add_row(*(format_cell(row.get(column)) for column in columns))
    return table


def columns_of(results: list[dict[str, Any]]) -> list[str]:
    """Every key of the results, in the order in which they first appear."""
    return list(dict.fromkeys(key for row in results for key in row))


def format_cell(value: Any) -> str:
    """Three significant digits, thousands apart; '' for what was not measured."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return " x ".join(map(str, value)) if isinstance(value, list) else str(value)


def _without_paths(value: Any) -> Any:
    """The same value with each absolute path in its strings cut down to its last part."""
    if isinstance(value, dict):
        return {key: _without_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_paths(item) for item in value]
    if isinstance(value, str):
        return PATH.sub(lambda match: re.split(r"[/\\]", match[0].rstrip("/\\"))[-1], value)
    return value
