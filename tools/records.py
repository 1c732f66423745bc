"""Write and print records: what was measured, on which machine, when, and with which command.

Host names and folders are never stored.
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
from rlcourse.measure.records import KEYS, device_name, slug
from rlcourse.paths import data_folder

PATH = re.compile(r"(?<![\w.)\]/])(?:~|[A-Za-z]:)?[/\\][\w.][^\s'\"]*")  # absolute, or in somebody's home


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
    """What you type to run it: for a package, `python -m NAME`."""
    if path.name != "__main__.py":
        return [path.name]
    return ["python", "-m", f"{path.parents[1].name}.{path.parent.name}"]


def _without_paths(value: Any) -> Any:
    """The same value with each absolute path in its strings cut down to its last part."""
    if isinstance(value, dict):
        return {key: _without_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_paths(item) for item in value]
    if isinstance(value, str):
        return PATH.sub(lambda match: re.split(r"[/\\]", match[0].rstrip("/\\"))[-1], value)
    return value


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
