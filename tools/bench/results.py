"""The rows of a benchmark as they are measured, its record's name, and what isn't good enough to be recorded."""

import statistics
from collections.abc import Callable
from typing import Any

from tools.bench.options import Options
from tools.records import results_there, write_record

WIDEST_SPREAD = 0.2  # a measurement whose interquartile range is a larger share of its median isn't recorded

Rows = list[dict[str, Any]]


class Results:
    """The setup of a benchmark, and its rows so far, in the order in which they are measured."""

    def __init__(self):
        self.setup: dict[str, Any] = {}
        self.rows: Rows = []

    def begin(self, setup: dict[str, Any]) -> None:
        """Before the first row: the setup of all of them."""
        self.setup = setup

    def measure(self, what: dict[str, Any], run: Callable[..., dict[str, Any]], *args: Any) -> None:
        """Add the row of `what`, the variant and whatever else tells it from others, and `run(*args)`."""
        self.rows.append(what | run(*args))


class KeptResults(Results):
    """Results that are written to the record one by one, so that a long benchmark can be stopped and continued.

    Rows that the record of this machine, its versions and this setup has are not measured again.
    """

    def __init__(self, benchmark: str):
        super().__init__()
        self.benchmark = benchmark

    def begin(self, setup: dict[str, Any]) -> None:
        super().begin(setup)
        self.rows = results_there(record_name(self.benchmark, setup), setup)

    def measure(self, what: dict[str, Any], run: Callable[..., dict[str, Any]], *args: Any) -> None:
        """A row that varied too much isn't kept, and so measured again next time."""
        if any(what.items() <= row.items() for row in self.rows):
            return
        super().measure(what, run, *args)
        if varied(self.rows[-1]):
            print(f"Not kept: {too_wide([self.rows.pop()])}. Run the command again.")
            return
        write_record(record_name(self.benchmark, self.setup), self.setup, self.rows, add=True)


def record(benchmark: str, setup: dict[str, Any], rows: Rows) -> None:
    """Write the record. Raises ValueError if a row failed or varied too much."""
    failed = [row["variant"] for row in rows if row.get("error")]
    if failed:
        raise ValueError(f"Not recorded: {', '.join(failed)} failed.")
    wide = [row for row in rows if varied(row)]
    if wide:
        raise ValueError(f"Not recorded: {too_wide(wide)}.")
    print(f"Recorded in {write_record(record_name(benchmark, setup), setup, rows)}.")


def record_name(benchmark: str, setup: dict[str, Any]) -> str:
    """The benchmark's, with the lengths and the shape if they are not the default."""
    name = benchmark if setup.get("lengths", "equal") == "equal" else f"{benchmark}-{setup['lengths']}"
    return name + shape_suffix(setup)


def shape_suffix(setup: dict[str, Any]) -> str:
    """What comes after a name for a shape that is not the default."""
    return "" if setup.get("shape", Options.shape) == Options.shape else f"-{setup['shape']}"


def varied(row: dict[str, Any]) -> bool:
    """Whether its repetitions differ too much to be recorded."""
    return row.get("spread", 0) > WIDEST_SPREAD


def too_wide(rows: Rows) -> str:
    """What is wrong with rows that `varied`."""
    return f"{', '.join(row['variant'] for row in rows)} varied by over {WIDEST_SPREAD:.0%} between repetitions"


def median_and_spread(values: list[float]) -> tuple[float, float]:
    """The median, and the interquartile range as a share of it (0 for fewer than three values)."""
    median = statistics.median(values)
    if len(values) < 3:
        return median, 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return median, (high - low) / median
