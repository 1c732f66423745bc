"""The benchmarks of `rlcourse bench NAME`, in files of their names. Each returns its setup and rows."""

from typing import Any

from rich.console import Console

from rlcourse.bench.options import Options
from rlcourse.bench.results import Results, Rows
from rlcourse.measure.records import device_name, results_table


def run_bench(what: str, options: Options) -> None:
    """Run the benchmark `what` and print its table. Raises ValueError for options that make no sense."""
    options.check(what)
    _, rows = measured(what, options, Results())
    show(what, rows)


def measured(what: str, options: Options, results: Results) -> tuple[dict[str, Any], Rows]:
    """Setup and rows of a benchmark. results: where it puts each row as it measures it."""
    shape, counts, repeats = options.shape, list(options.rows), options.repeats
    if what == "decode":
        from rlcourse.bench.decode import decode

        sizes = counts, options.prompt_tokens, options.new_tokens, options.lengths, repeats
        return decode(shape, *sizes, results)
    from rlcourse.bench.step import step

    return step(shape, counts, options.new_tokens, repeats, results)


def show(what: str, rows: Rows) -> None:
    """Print the rows as a table."""
    table = results_table(rows, f"{what} on {device_name()}")
    Console(width=max(Console().width, 200)).print(table)  # a pipe has 80 columns, too few
