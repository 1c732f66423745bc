"""What README and site open with, from the records: the headline's sentences, and its picture, `data/headline.png`."""

import hashlib
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from rlcourse.course.figures import DPI, STYLE
from rlcourse.course.lessons.curve_records import load_curve
from rlcourse.measure.plots import BLUE, ORANGE, PURPLE, SKY
from rlcourse.measure.records import load_record
from rlcourse.paths import data_folder
from tools.gsm8k import VARIANTS

H100, H200 = "nvidia-h100-80gb-hbm3", "nvidia-h200"
ROWS = 64
STEPS = {
    "trl-default": "TRL", "trl-static-compiled": "TRL,\ncompiled", "trl-vllm": "TRL\nwith vLLM", "rlcourse": "rlcourse",
}  # fmt: skip
GSM8K = {  # ways to train the real model: a name, a color, and where the name goes, in points from its results
    "small": ("100 steps", BLUE, (8, -4)),
    "dr_grpo": ("350 steps: --preset h200", BLUE, (8, -2)),
    "ten minutes": ("any final number counts,\n440 steps", ORANGE, (-125, -8)),
    "trl": ("TRL with vLLM,\n100 steps", PURPLE, (-40, -26)),
}


def gsm8k(variant: str) -> dict[str, Any]:
    """Test accuracy as it is rewarded, before and after, and minutes since the command began: one value per seed."""
    rows = [
        row for row in load_record("gsm8k", H100)["results"] if row["variant"] == variant and row["split"] == "test"
    ]
    read = "accuracy_lenient" if VARIANTS[variant].get("reward_parser") == "lenient" else "accuracy"
    ends = [row for row in rows if row["step"]]
    before = [row[read] for row in rows if not row["step"]]
    return {"before": before[0], "after": [row[read] for row in ends], "minutes": [row["seconds"] / 60 for row in ends]}


def step_seconds() -> dict[str, float]:
    """Seconds of a training step at ROWS rows on the H200, by the names that readers see."""
    rows = load_record("step", H200)["results"]
    measured = {row["variant"]: row["step_s"] for row in rows if row["rows"] == ROWS}
    return {name: measured[variant] for variant, name in STEPS.items()}


def headline() -> str:
    """Two sentences: what two CPU cores show, and what a GPU does with a real model."""
    runs = [row["summary"] for row in load_curve("dr_grpo")["results"]]
    after, preset, ten, small, trl = (
        sorted(run["accuracy_after"] for run in runs),
        *map(gsm8k, ("dr_grpo", "ten minutes", "small", "trl")),
    )
    assert abs(fmean(small["after"]) - fmean(trl["after"])) < 0.01, "not the same accuracy"
    to = fmean(preset["after"])
    seconds = max(run["wall_seconds"] for run in runs)
    times = fmean(trl["minutes"]) / fmean(small["minutes"])
    return (
        f"On two CPU cores, a 0.9M-weight model goes from {runs[0]['accuracy_before']:.0%} to {100 * after[0]:.0f}–"
        f"{after[-1]:.0%} of 1,000 unseen word problems in under {10 * -(-seconds // 10):.0f} seconds. On one H100, "
        f"Qwen2.5-Coder-0.5B goes from {preset['before']:.0%} to {to:.0%} of GSM8K's 1,319 test "
        f"problems in {max(preset['minutes']):.1f} minutes, or from {ten['before']:.0%} to {fmean(ten['after']):.0%} "
        f"in "
        f"{fmean(ten['minutes']):.0f} if any final number counts. TRL with vLLM takes {times:.0f} times as long to the "
        f"same {fmean(small['after']):.0%}.\n"
    )


def draw(path: Path) -> None:
    """Write the picture, and into its metadata a digest of the records that it shows."""
    with rc_context(STYLE):
        figure = Figure(figsize=(11, 3.2), layout="constrained")
        laptop, real, step = figure.subplots(1, 3, width_ratios=(0.7, 1.5, 1))
        draw_laptop(laptop)
        draw_gsm8k(real)
        bars(step, step_seconds(), "{:.2f}", [SKY, ORANGE, PURPLE, BLUE])
        step.set_title("One H200: seconds per training step")
        figure.savefig(path, dpi=DPI, metadata={"Description": digest()})


def draw_laptop(axes: Axes) -> None:
    """Test accuracy before and after; a dot per seed."""
    runs = [row["summary"] for row in load_curve("dr_grpo")["results"]]
    ends = {when: [100 * run[f"accuracy_{when}"] for run in runs] for when in ("before", "after")}
    bars(axes, {when: fmean(values) for when, values in ends.items()}, "{:.0f}%", [SKY, BLUE])
    axes.plot(["after"] * len(runs), ends["after"], "k.", markersize=4)
    axes.set_xlabel("1,000 test problems, 3 seeds")
    axes.set_title("Two CPU cores")


def draw_gsm8k(axes: Axes) -> None:
    """Test accuracy over minutes: a line from the start to each seed's end."""
    for variant, (name, color, offset) in GSM8K.items():
        found = gsm8k(variant)
        for minutes, after in zip(found["minutes"], found["after"], strict=True):
            axes.plot([0, minutes], [100 * found["before"], 100 * after], color=color, alpha=0.3, lw=1, ls=":")
            axes.plot([0, minutes], [100 * found["before"], 100 * after], color=color, marker="o", markersize=5, lw=0)
        where = max(found["minutes"]), 100 * fmean(found["after"])
        axes.annotate(name, where, offset, textcoords="offset points", color=color, fontsize=8)
    axes.set(
        title="One H100: Qwen2.5-Coder-0.5B on GSM8K, a dot per seed",
        xlabel="minutes since the command began",
        xlim=(-0.3, 12.5),
        ylim=(0, 52),
    )
    axes.set_ylabel("test problems right, %")
    axes.grid()


def bars(axes: Axes, values: dict[str, float], form: str, colors: list[str]) -> None:
    """One bar per name, with its value on top."""
    drawn = axes.bar(values.keys(), values.values(), color=colors, width=0.65)
    axes.bar_label(drawn, [form.format(value) for value in values.values()], padding=2)
    axes.set(yticks=[], ylim=(0, 1.15 * max(values.values())))
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="x", length=0)


def digest() -> str:
    """Changes with the records that the picture shows."""
    folder = data_folder()
    records = [next(folder.glob("curves/*/dr_grpo.json"))]
    records += [folder / "measurements" / device / f"{name}.json" for device, name in ((H100, "gsm8k"), (H200, "step"))]
    return hashlib.sha256(b"".join(record.read_bytes() for record in records)).hexdigest()


def shown(path: Path) -> str:
    """The digest of the records that a picture shows, "" if there is none."""
    if not path.exists():
        return ""
    with Image.open(path) as image:
        return image.info.get("Description", "")
