"""The benchmarks of `rlcourse bench NAME`; `--record` keeps what was measured in `data/measurements/`.

Each returns the setup and the rows of a measurement record: `decode`, `kernels`, `learn` and `step`, in files of their
names. `peers.py` has what is measured beside ours. The record of a shape other than `Options.shape` has it in its name.
"""

from rich.console import Console

from rlcourse.bench.options import Options
from rlcourse.bench.results import Results, Rows, record_name, too_wide, varied
from rlcourse.config import TrainConfig
from rlcourse.files import try_folder
from rlcourse.measure.records import device_name, results_table, write_record
from rlcourse.paths import data_folder

IN_PARTS = ("decode", "step")  # those whose rows are kept as they are measured


def run_bench(what: str, config: TrainConfig, options: Options, record: bool, add: bool = False) -> None:
    """Run the benchmark `what`, print its table and, with `record` or `add`, write the measurement record.

    add: measure only what the record of this machine, its versions and this setup lacks, and write each row at once, so
    that a long benchmark can run in parts. Raises ValueError for options that make no sense, or a spread too wide to
    record; OSError if the record can't be written.
    """
    options.check(what)
    results = start(what, record, add, IN_PARTS)
    shape, counts, repeats = options.shape, list(options.rows), options.repeats
    match what:
        case "learn":
            from rlcourse.bench.learn import learn

            setup, rows = learn(config)
        case "decode":
            from rlcourse.bench.decode import decode

            setup, rows = decode(
                shape, counts, options.prompt_tokens, options.new_tokens, options.lengths, repeats, results
            )
        case "kernels":
            from rlcourse.bench.kernels import kernels

            setup, rows = kernels(shape, counts, repeats)
        case "step":
            from rlcourse.bench.step import step

            setup, rows = step(shape, counts, options.new_tokens, repeats, results=results)
    finish(what, setup, rows, record, add)


def start(what: str, record: bool, add: bool, in_parts: tuple[str, ...]) -> Results:
    """Where the rows of a benchmark go. in_parts: the benchmarks that `add` is for.

    Raises ValueError for an `add` of another benchmark, OSError if no record can be written.
    """
    if add and what not in in_parts:
        raise ValueError(f"--add is for {' and '.join(in_parts)}: use --record.")
    if record or add:
        try_folder(data_folder() / "measurements", "install the package where you may write")
    return Results(what if add else None)


def finish(what: str, setup: dict, rows: Rows, record: bool, add: bool) -> None:
    """Print the rows as a table and write the record. Raises ValueError if a row failed or varied too much."""
    table = results_table(rows, f"{what} on {device_name()}")
    Console(width=max(Console().width, 200)).print(table)  # a pipe has 80 columns, too few
    if add:
        print(f"The record {record_name(what, setup)!r} has {len(rows)} rows.")
    elif record:
        failed = [row["variant"] for row in rows if row.get("error")]
        if failed:
            raise ValueError(f"Not recorded: {', '.join(failed)} failed.")
        wide = [row for row in rows if varied(row)]
        if wide:
            raise ValueError(f"Not recorded: {too_wide(wide)}.")
        print(f"Recorded in {write_record(record_name(what, setup), setup, rows)}.")
