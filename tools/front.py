"""What README and site open with, from the records: the headline's sentences, and its picture, `data/headline.png`."""

import hashlib
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from rlcourse.course.figures import DPI, STYLE
from rlcourse.course.lessons.curve_records import load_curve
from rlcourse.measure.plots import BLUE, ORANGE, PURPLE, SKY, seed_band
from rlcourse.measure.records import load_record
from rlcourse.paths import data_folder

ROWS = 64
# graph-triton trains where there is no CuTe DSL; graph-exact, which trains where there is, was not in this ladder yet,
# and `graph`, with attention in CuTe DSL, runs in benchmarks alone
DECODERS = {
    "hf-dynamic": "generate", "hf-static-compiled": "generate,\ncompiled", "vllm": "vLLM", "graph-triton": "rlcourse",
}  # fmt: skip
TRAINERS = {
    "trl-default": "TRL", "trl-static-compiled": "TRL,\ncompiled", "trl-vllm": "TRL\nwith vLLM", "rlcourse": "rlcourse",
}  # fmt: skip
COLORS = {"generate": SKY, "TRL": SKY, "vLLM": PURPLE, TRAINERS["trl-vllm"]: PURPLE, "rlcourse": BLUE}


def found(name: str, column: str, variants: dict[str, str]) -> dict[str, float]:
    """A column of an H200 record at ROWS rows, by the names that readers see, without peers that were not there."""
    rows = {row["variant"]: row for row in load_record(name, "nvidia-h200")["results"] if row["rows"] == ROWS}
    return {label: rows[variant][column] for variant, label in variants.items() if variant in rows}


def headline() -> str:
    """What two CPU cores show, and what a GPU does: decoding, then a whole training step."""
    record = load_curve("dr_grpo")
    runs = [row["summary"] for row in record["results"]]
    after = sorted(run["accuracy_after"] for run in runs)
    rate, step = found("decode", "tokens_per_s", DECODERS), found("step", "step_s", TRAINERS)
    [new_tokens] = set(found("decode", "new_tokens", DECODERS).values())
    compiled = "generate,\ncompiled"
    beside = f"{rate['rlcourse'] / rate['vLLM']:.1f} times vLLM, " if "vLLM" in rate else ""
    slow, with_vllm = step[TRAINERS["trl-static-compiled"]], TRAINERS["trl-vllm"]
    between = f"{step[with_vllm]:.2f} s with vLLM, " if with_vllm in step else ""
    return (
        f"On two CPU cores, in {record['setup']['steps']} training steps and at most "
        f"{max(run['wall_seconds'] for run in runs):.0f} s, a small model goes from "
        f"{runs[0]['accuracy_before']:.0%} of 1,000 test problems right to between {after[0]:.0%} and "
        f"{after[-1]:.0%} ({len(runs)} seeds).\n"
        f"On an H200, a model of Qwen2.5-0.5B's shape (random weights) writes {ROWS} answers of "
        f"{new_tokens:.0f} tokens side by side at {rate['rlcourse']:,.0f} tokens a second: {beside}"
        f"{rate['rlcourse'] / rate[compiled]:.1f} times `generate` compiled with a static cache, "
        f"{rate['rlcourse'] / rate['generate']:.0f} times `generate` as it comes. "
        f"A whole training step takes {step['rlcourse']:.2f} s; TRL takes {between}{slow:.2f} s compiled and "
        f"{step['TRL']:.2f} s as it comes.\n"
    )


def draw(path: Path) -> None:
    """Write the picture, and into its metadata a digest of the records that it shows."""
    with rc_context(STYLE):
        figure = Figure(figsize=(11, 3.2), layout="constrained")
        curve, decode, step = figure.subplots(1, 3, width_ratios=(1.3, 1, 1))
        steps, low, mean, high = ([*values] for values in seed_band(load_curve("dr_grpo")["results"]))
        curve.fill_between(steps, *([100 * v for v in values] for values in (low, high)), color=BLUE, alpha=0.2, lw=0)
        curve.plot(steps, [100 * v for v in mean], color=BLUE, marker="o")
        curve.set(title="Two CPU cores: greedy answers, 3 seeds", xlabel="training step", ylim=(0, 100))
        curve.set_ylabel("validation, % right")
        curve.grid()
        bars(decode, found("decode", "tokens_per_s", DECODERS), "{:,.0f}")
        decode.set(title="An H200: tokens sampled a second")
        bars(step, found("step", "step_s", TRAINERS), "{:.2f}")
        step.set(title="An H200: seconds a training step")
        figure.savefig(path, dpi=DPI, metadata={"Description": digest()})


def bars(axes: Axes, values: dict[str, float], form: str) -> None:
    """One bar a name, with its value on top."""
    colors = [COLORS.get(name, ORANGE) for name in values]  # ORANGE for what is compiled
    drawn = axes.bar(values.keys(), values.values(), color=colors, width=0.65)
    axes.bar_label(drawn, [form.format(value) for value in values.values()], padding=2)
    axes.set(yticks=[], ylim=(0, 1.15 * max(values.values())))
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="x", length=0)


def digest() -> str:
    """Changes with the records that the picture shows."""
    folder = data_folder()
    records = [next(folder.glob("curves/*/dr_grpo.json"))]
    records += [folder / "measurements" / "nvidia-h200" / f"{name}.json" for name in ("decode", "step")]
    return hashlib.sha256(b"".join(record.read_bytes() for record in records)).hexdigest()


def shown(path: Path) -> str:
    """The digest of the records that a picture shows, "" if there is none."""
    if not path.exists():
        return ""
    with Image.open(path) as image:
        return image.info.get("Description", "")
