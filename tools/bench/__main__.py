"""`python -m tools.bench NAME`: measure, print a table and, with `--record`, write the measurement record."""

from typing import Annotated, Any

import typer
from rich.console import Console

from rlcourse.cli_shared import takes_settings, user_errors
from rlcourse.config import TrainConfig, make_config
from rlcourse.files import try_folder
from rlcourse.measure.records import device_name
from rlcourse.measure.traces import trace_path
from rlcourse.paths import data_folder
from tools.bench.events import write_trace
from tools.bench.options import LENGTHS, Options
from tools.bench.results import KeptResults, Results, Rows, shape_suffix
from tools.bench.results import record as write
from tools.records import results_table

BENCHMARKS = (
    "cute", "decode", "exact", "gap", "kernels", "layer", "learn", "logprobs", "lowered", "mismatch", "paged",
    "rollout", "scale", "stalls", "step", "story", "trace", "update",
)  # fmt: skip
IN_PARTS = ("decode", "exact", "step", "update")  # those whose rows can be kept as they are measured


def measured(
    what: str, config: TrainConfig, options: Options, gpus: list[int], results: Results
) -> tuple[dict[str, Any], Rows, dict[str, Any]]:
    """Setup and rows of a benchmark, and traces by name. config: for gap, learn, mismatch and rollout."""
    shape, rows, repeats = options.shape, list(options.rows), options.repeats
    tokens = options.prompt_tokens, options.new_tokens
    match what:
        case "decode":
            from tools.bench import peers
            from tools.bench.decode import decode

            decode(shape, rows, *tokens, options.lengths, repeats, results)
            peers.beside(what, options, results)
            return results.setup, results.rows, {}
        case "step":
            from tools.bench import peers
            from tools.bench.step import step

            step(shape, rows, options.new_tokens, repeats, results)
            peers.beside(what, options, results)
            return results.setup, results.rows, {}
        case "cute":
            from tools.bench.cute import cute

            return *cute(repeats), {}
        case "exact":
            from tools.bench.exact import exact

            return *exact(shape, rows, options.new_tokens, repeats, results), {}
        case "gap":
            from tools.bench.gap import gap

            return *gap(config), {}
        case "kernels":
            from tools.bench.kernels import kernels

            return *kernels(shape, rows, repeats), {}
        case "layer":
            from tools.bench.layer import layer

            return *layer(repeats), {}
        case "learn":
            from tools.bench.learn import learn

            return *learn(config), {}
        case "logprobs":
            from tools.bench.numerics import logprobs

            return *logprobs(repeats=repeats), {}
        case "lowered":
            from tools.bench.lowered import lowered

            return *lowered(repeats), {}
        case "mismatch":
            from tools.bench.numerics import mismatch

            return *mismatch(config), {}
        case "paged":
            from tools.bench.paged import paged

            return *paged(shape, tokens[0], repeats), {}
        case "rollout":
            from tools.bench.speed import rollout

            return *rollout(config, repeats), {}
        case "scale":
            from tools.bench.scale import scale

            return *scale(shape, rows[-1], options.new_tokens, gpus, repeats), {}
        case "stalls":
            from tools.bench.stalls import stalls

            return *stalls(), {}
        case "story":
            from tools.bench.story import story

            return *story(shape, rows, *tokens, repeats), {}
        case "trace":
            from tools.bench.trace import trace

            return trace(shape, rows, *tokens, repeats)
        case "update":
            from tools.bench.speed import update

            return *update(shape, rows, options.new_tokens, repeats, results), {}


@takes_settings
def bench(
    settings: dict[str, Any],
    what: Annotated[str, typer.Argument(help=", ".join(BENCHMARKS))],
    shape: Annotated[str, typer.Option("--shape", help="Random weights of this shape")] = Options.shape,
    rows: Annotated[str, typer.Option("--rows", help="scale takes the last")] = "16,64",
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens")] = Options.prompt_tokens,
    new_tokens: Annotated[int, typer.Option("--new-tokens")] = Options.new_tokens,
    lengths: Annotated[str, typer.Option("--lengths", help="decode: equal, or skewed (median 120)")] = Options.lengths,
    gpus: Annotated[str, typer.Option("--gpus", help="scale: numbers of ranks, one GPU each")] = "1,2",
    repeats: Annotated[int, typer.Option("--repeats", help="Timed repetitions")] = Options.repeats,
    record: Annotated[bool, typer.Option("--record", help="Keep the result in data/measurements/.")] = False,
    add: Annotated[bool, typer.Option("--add", help="The same, row by row: what is there stays.")] = False,
):
    """Measure what the lessons and RECORDS.md show, or something like it on this machine.

    Weights are random unless the benchmark takes the settings of a run. Rows are multiples of the group of 8.
    """
    with user_errors():
        if what not in BENCHMARKS:
            raise ValueError(f"Unknown benchmark {what!r}: use one of {', '.join(BENCHMARKS)}.")
        if lengths not in LENGTHS:
            raise ValueError(f"Unknown lengths {lengths!r}: use {' or '.join(LENGTHS)}.")
        options = Options(shape, tuple(map(int, rows.split(","))), prompt_tokens, new_tokens, lengths, repeats)
        if any(count < 8 or count % 8 for count in options.rows):
            raise ValueError(f"--rows takes multiples of 8, the group, not {rows}.")
        if add and what not in IN_PARTS:
            raise ValueError(f"--add is for {', '.join(IN_PARTS[:-1])} and {IN_PARTS[-1]}: use --record.")
        if record or add:
            try_folder(data_folder() / "measurements", "install the package where you may write")
        results = KeptResults(what) if add else Results()
        setup, found, traces = measured(what, make_config(**settings), options, [*map(int, gpus.split(","))], results)
        table = results_table(found, f"{what} on {device_name()}")
        Console(width=max(Console().width, 200)).print(table)  # a pipe has 80 columns, too few
        if record:
            write(what, setup, found)
        for variant, events in traces.items() if record else ():
            write_trace(events, trace_path(f"{variant}{shape_suffix(setup)}"))


if __name__ == "__main__":
    typer.run(bench)
