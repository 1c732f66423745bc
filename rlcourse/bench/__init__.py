"""Benchmarks that ship: `rlcourse bench NAME`, and `--record` to keep what was measured in `data/measurements/`.

Each returns the setup and the result rows of a measurement record: `decode` in `decode.py`; `kernels` in `kernels.py`;
`cute` in `cute.py`; `story` in `story.py`; `trace` in `trace.py`, with traces that are kept in `data/traces/`; `paged`
in `paged.py`; `serve` in `serve.py`; `rollout`, `step` and `update` in `speed.py`; `scale` in `scale.py`; `mismatch`
and `logprobs` in `numerics.py`; peers that are measured beside ours in `peers.py`. A record of another shape than
`Options.shape` has it in its name.
"""

from dataclasses import dataclass

from rich.console import Console

from rlcourse.config import TrainConfig
from rlcourse.files import try_folder
from rlcourse.measure.records import device_name, results_table, write_record
from rlcourse.paths import data_folder

POSITIONS = {  # shapes, and the tokens of their longest row
    "qwen2.5-0.5b": 32768, "qwen2.5-1.5b": 32768, "qwen3-0.6b": 32768, "tiny": 32768, "embedded": 512,
}  # fmt: skip
LENGTHS = ("equal", "skewed")
BENCHMARKS = (
    "learn", "decode", "kernels", "cute", "story", "trace", "rollout", "step", "scale", "update", "mismatch",
    "exact", "paged", "serve", "logprobs",
)  # fmt: skip
WIDEST_SPREAD = 0.2  # a measurement whose interquartile range is a larger share of its median is not recorded


@dataclass(frozen=True)
class Options:
    """The options of the command besides the config. Each benchmark takes those that it needs."""

    shape: str = "qwen2.5-0.5b"
    rows: tuple[int, ...] = (16, 64)
    prompt_tokens: int = 128
    new_tokens: int = 256
    lengths: str = "equal"
    repeats: int = 5
    gpus: tuple[int, ...] = (1, 2)

    def check(self, what: str) -> None:
        """Raise ValueError, before anything is loaded, for options that the benchmark `what` cannot run with."""
        if what not in BENCHMARKS:
            raise ValueError(f"Unknown benchmark {what!r}: use {', '.join(BENCHMARKS[:-1])} or {BENCHMARKS[-1]}.")
        shapes = [shape for shape in POSITIONS if shape != "embedded" or what == "decode"]
        if self.shape not in shapes:
            raise ValueError(f"Unknown shape {self.shape!r}: use one of {', '.join(shapes)}.")
        if self.lengths not in LENGTHS:
            raise ValueError(f"Unknown lengths {self.lengths!r}: use {' or '.join(LENGTHS)}.")
        tokens, positions = self.prompt_tokens + self.new_tokens, POSITIONS[self.shape]
        if tokens > positions:
            raise ValueError(
                f"--prompt-tokens and --new-tokens are {tokens:,} together, and {self.shape} has {positions:,} "
                "positions: lower one."
            )


def run_bench(what: str, config: TrainConfig, options: Options, record: bool) -> None:
    """Run the benchmark `what`, print its table and, with `record`, write the measurement record.

    Raises ValueError for options that make no sense, or a spread too wide to be recorded; OSError if the record cannot
    be written.
    """
    options.check(what)
    if record:
        try_folder(data_folder() / "measurements", "install the package where you may write")
    from rlcourse.bench import numerics, speed
    from rlcourse.bench.decode import decode

    shape, counts, repeats, traces = options.shape, list(options.rows), options.repeats, {}
    match what:
        case "learn":
            from rlcourse.bench.learn import learn

            setup, rows = learn(config)
        case "decode":
            setup, rows = decode(shape, counts, options.prompt_tokens, options.new_tokens, options.lengths, repeats)
        case "kernels":
            from rlcourse.bench.kernels import kernels

            setup, rows = kernels(shape, counts, repeats)
        case "cute":
            from rlcourse.bench.cute import cute

            setup, rows = cute(repeats)
        case "story":
            from rlcourse.bench.story import story

            setup, rows = story(shape, counts, options.prompt_tokens, options.new_tokens, repeats)
        case "trace":
            from rlcourse.bench.trace import trace

            setup, rows, traces = trace(shape, counts, options.prompt_tokens, options.new_tokens, repeats)
        case "rollout":
            setup, rows = speed.rollout(config, repeats)
        case "step":
            setup, rows = speed.step(shape, counts, options.new_tokens, repeats)
        case "scale":
            from rlcourse.bench.scale import scale

            setup, rows = scale(shape, counts[-1], options.new_tokens, list(options.gpus), repeats)
        case "exact":
            from rlcourse.bench.exact import exact

            setup, rows = exact(shape, counts, options.new_tokens, repeats)
        case "paged":
            from rlcourse.bench.paged import paged

            setup, rows = paged(shape, counts, options.prompt_tokens, options.new_tokens, repeats)
        case "serve":
            from rlcourse.bench.serve import serve

            setup, rows = serve(shape, repeats)
        case "update":
            setup, rows = speed.update(shape, counts, options.new_tokens, repeats)
        case "mismatch":
            setup, rows = numerics.mismatch(config)
        case "logprobs":
            setup, rows = numerics.logprobs()
    table = results_table(rows, f"{what} on {device_name()}")
    Console(width=max(Console().width, 200)).print(table)  # a pipe has 80 columns, too few
    if record:
        _record(what, setup, rows, traces)


def _record(what: str, setup: dict, rows: list[dict], traces: dict[str, list[dict]]) -> None:
    failed = [row["variant"] for row in rows if row.get("error")]
    if failed:
        raise ValueError(f"Not recorded: {', '.join(failed)} failed.")
    wide = [row["variant"] for row in rows if row.get("spread", 0) > WIDEST_SPREAD]
    if wide:
        raise ValueError(f"Not recorded: {', '.join(wide)} varied by over {WIDEST_SPREAD:.0%} between repetitions.")
    name = what if setup.get("lengths", "equal") == "equal" else f"{what}-{setup['lengths']}"
    suffix = "" if setup.get("shape", Options.shape) == Options.shape else f"-{setup['shape']}"
    name += suffix
    print(f"Recorded in {write_record(name, setup, rows)}.")
    if traces:
        from rlcourse.measure.traces import trace_path, write_trace

        for variant, events in traces.items():
            write_trace(events, trace_path(f"{variant}{suffix}"))
