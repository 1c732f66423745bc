"""Benchmarks that ship: `rlcourse bench NAME`, and `--record` to keep what was measured in `data/measurements/`.

Each returns the setup and the result rows of a measurement record: `decode` in `decode.py`; `kernels` in `kernels.py`;
`cute` in `cute.py`; `story` in `story.py`; `trace` in `trace.py`, with traces that are kept in `data/traces/`; `paged`
in `paged.py`; `serve` in `serve.py`; `rollout`, `step` and `update` in `speed.py`; `scale` in `scale.py`; `mismatch`
and `logprobs` in `numerics.py`; `exact`, `gap`, `layer`, `learn` and `lowered` in files of their names; peers that are
measured beside ours in `peers.py`. A record of another shape than `Options.shape` has it in its name.
"""

from rich.console import Console

from rlcourse.bench.options import Options
from rlcourse.bench.results import Results, record_name, shape_suffix, too_wide, varied
from rlcourse.config import TrainConfig
from rlcourse.files import try_folder
from rlcourse.measure.records import device_name, results_table, write_record
from rlcourse.paths import data_folder

IN_PARTS = ("decode", "exact", "step", "update")  # those with rows that are kept as they are measured


def run_bench(what: str, config: TrainConfig, options: Options, record: bool, add: bool = False) -> None:
    """Run the benchmark `what`, print its table and, with `record` or `add`, write the measurement record. add: only
    what the record of this machine, its versions and this setup lacks is measured, and each row is written at once: so
    that a long benchmark can be run in parts.

    Raises ValueError for options that make no sense, or a spread too wide to be recorded; OSError if the record cannot
    be written.
    """
    options.check(what)
    if add and what not in IN_PARTS:
        raise ValueError(f"--add is for {', '.join(IN_PARTS[:-1])} and {IN_PARTS[-1]}: use --record.")
    if record or add:
        try_folder(data_folder() / "measurements", "install the package where you may write")
    from rlcourse.bench import numerics, speed
    from rlcourse.bench.decode import decode

    shape, counts, repeats, traces = options.shape, list(options.rows), options.repeats, {}
    results = Results(what if add else None)
    match what:
        case "learn":
            from rlcourse.bench.learn import learn

            setup, rows = learn(config)
        case "decode":
            setup, rows = decode(
                shape, counts, options.prompt_tokens, options.new_tokens, options.lengths, repeats, results
            )
        case "kernels":
            from rlcourse.bench.kernels import kernels

            setup, rows = kernels(shape, counts, repeats)
        case "cute":
            from rlcourse.bench.cute import cute

            setup, rows = cute(repeats)
        case "layer":
            from rlcourse.bench.layer import layer

            setup, rows = layer(repeats)
        case "lowered":
            from rlcourse.bench.lowered import lowered

            setup, rows = lowered(repeats)
        case "story":
            from rlcourse.bench.story import story

            setup, rows = story(shape, counts, options.prompt_tokens, options.new_tokens, repeats)
        case "trace":
            from rlcourse.bench.trace import trace

            setup, rows, traces = trace(shape, counts, options.prompt_tokens, options.new_tokens, repeats)
        case "rollout":
            setup, rows = speed.rollout(config, repeats)
        case "step":
            setup, rows = speed.step(shape, counts, options.new_tokens, repeats, results=results)
        case "scale":
            from rlcourse.bench.scale import scale

            setup, rows = scale(shape, counts[-1], options.new_tokens, list(options.gpus), repeats)
        case "exact":
            from rlcourse.bench.exact import exact

            setup, rows = exact(shape, counts, options.new_tokens, repeats, results)
        case "gap":
            from rlcourse.bench.gap import gap

            setup, rows = gap(config)
        case "paged":
            from rlcourse.bench.paged import paged

            setup, rows = paged(shape, counts, options.prompt_tokens, options.new_tokens, repeats)
        case "serve":
            from rlcourse.bench.serve import serve

            setup, rows = serve(shape, repeats)
        case "update":
            setup, rows = speed.update(shape, counts, options.new_tokens, repeats, results)
        case "mismatch":
            setup, rows = numerics.mismatch(config)
        case "logprobs":
            setup, rows = numerics.logprobs(repeats=repeats)
    table = results_table(rows, f"{what} on {device_name()}")
    Console(width=max(Console().width, 200)).print(table)  # a pipe has 80 columns, too few
    if add:
        print(f"The record {record_name(what, setup)!r} has {len(rows)} rows.")
    elif record:
        _record(what, setup, rows, traces)


def _record(what: str, setup: dict, rows: list[dict], traces: dict[str, list[dict]]) -> None:
    failed = [row["variant"] for row in rows if row.get("error")]
    if failed:
        raise ValueError(f"Not recorded: {', '.join(failed)} failed.")
    wide = [row for row in rows if varied(row)]
    if wide:
        raise ValueError(f"Not recorded: {too_wide(wide)}.")
    print(f"Recorded in {write_record(record_name(what, setup), setup, rows)}.")
    if traces:
        from rlcourse.measure.traces import trace_path, write_trace

        for variant, events in traces.items():
            write_trace(events, trace_path(f"{variant}{shape_suffix(setup)}"))
