"""The rows of a benchmark, kept as they are measured, so that a long one can be stopped and gone on with."""

from collections.abc import Callable
from typing import Any

from rlcourse.bench.options import Options
from rlcourse.measure.records import results_there, write_record

Rows = list[dict[str, Any]]
WIDEST_SPREAD = 0.2  # a measurement whose interquartile range is a larger share of its median is not recorded


class Results:
    """The rows that a benchmark measures, and its setup.

    benchmark: its name, if each row is to be written to the record at once, and those that the record has, of this
    machine, its versions and this setup, are not to be measured again.
    """

    def __init__(self, benchmark: str | None = None):
        self.benchmark = benchmark
        self.setup: dict[str, Any] = {}
        self.rows: Rows = []

    def begin(self, setup: dict[str, Any]) -> None:
        """Before the first row: the setup of all of them."""
        self.setup = setup
        if self.benchmark is not None:
            self.rows = results_there(record_name(self.benchmark, setup), setup)

    def measure(self, what: dict[str, Any], run: Callable[..., dict[str, Any]], *args: Any) -> None:
        """Add the row of `what`, the variant and whatever else tells it from others, and `run(*args)`, unless it is
        there. One that varied too much is not kept in the record, and so measured again next time."""
        if any(what.items() <= row.items() for row in self.rows):
            return
        row = what | run(*args)
        if self.benchmark is not None and varied(row):
            print(f"Not kept: {too_wide([row])}. Run the command again.")
            return
        self.rows.append(row)
        if self.benchmark is not None:
            write_record(record_name(self.benchmark, self.setup), self.setup, self.rows, add=True)


def record_name(benchmark: str, setup: dict[str, Any]) -> str:
    """The benchmark's, with the lengths and the shape if they are not the default."""
    name = benchmark if setup.get("lengths", "equal") == "equal" else f"{benchmark}-{setup['lengths']}"
    return name + shape_suffix(setup)


def shape_suffix(setup: dict[str, Any]) -> str:
    """What stands behind a name for a shape that is not the default."""
    return "" if setup.get("shape", Options.shape) == Options.shape else f"-{setup['shape']}"


def varied(row: dict[str, Any]) -> bool:
    """Whether its repetitions differ too much to be recorded."""
    return row.get("spread", 0) > WIDEST_SPREAD


def too_wide(rows: Rows) -> str:
    """What is wrong with rows that `varied`."""
    return f"{', '.join(row['variant'] for row in rows)} varied by over {WIDEST_SPREAD:.0%} between repetitions"
