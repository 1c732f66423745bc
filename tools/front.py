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
from rlcourse.measure.plots import BLUE, PURPLE, SKY
from rlcourse.measure.records import load_record
from rlcourse.paths import data_folder
from tools.gsm8k import VARIANTS

H100 = "nvidia-h100-80gb-hbm3"


def gsm8k(variant: str) -> dict[str, Any]:
    """Test accuracy as it is rewarded, before and after, and minutes since the command began: one value per seed."""
    rows = [
        row for row in load_record("gsm8k", H100)["results"] if row["variant"] == variant and row["split"] == "test"
    ]
    read = "accuracy_lenient" if VARIANTS[variant].get("reward_parser") == "lenient" else "accuracy"
    ends = [row for row in rows if row["step"]]
    before = [row[read] for row in rows if not row["step"]]
    return {"before": before[0], "after": [row[read] for row in ends], "minutes": [row["seconds"] / 60 for row in ends]}


def headline() -> str:
    """What two CPU cores show, and what a GPU does with a real model."""
    runs = [row["summary"] for row in load_curve("dr_grpo")["results"]]
    preset, ten, small, trl = map(gsm8k, ("dr_grpo", "ten minutes", "small", "trl"))
    assert abs(fmean(small["after"]) - fmean(trl["after"])) < 0.01, "not the same accuracy"
    seconds = max(run["wall_seconds"] for run in runs)
    assert len(small["after"]) == len(trl["after"]) == 1, "say how many runs"
    times = fmean(trl["minutes"]) / fmean(small["minutes"])
    return (
        f"On two CPU cores, a pretrained 0.9M-weight model goes from {runs[0]['accuracy_before']:.0%} to "
        f"{between([run['accuracy_after'] for run in runs])} of 1,000 new templated word problems in under "
        f"{10 * -(-seconds // 10):.0f} seconds. On one H100, Qwen2.5-Coder-0.5B-Instruct goes from "
        f"{preset['before']:.0%} to {between(preset['after'])} of GSM8K's test problems in "
        f"{max(preset['minutes']):.1f} minutes, once compiled; if any final number counts, "
        f"from {ten['before']:.0%} to {between(ten['after'])} in {fmean(ten['minutes']):.0f} minutes. "
        f"TRL with vLLM took {times:.0f} times as long for 100 steps "
        f"(both {fmean(small['after']):.0%}; one run each).\n"
    )


def between(shares: list[float]) -> str:
    """Least to most: '85–87%'."""
    return f"{100 * min(shares):.0f}–{max(shares):.0%}"


def draw(path: Path) -> None:
    """Write the picture, and into its metadata a digest of the records that it shows."""
    runs = [row["summary"] for row in load_curve("dr_grpo")["results"]]
    preset, small, ten, trl = map(gsm8k, ("dr_grpo", "small", "ten minutes", "trl"))
    with rc_context(STYLE):
        figure = Figure(figsize=(11, 3.2), layout="constrained")
        laptop, real, loose, race = figure.subplots(1, 4, width_ratios=(0.7, 1.1, 0.75, 0.8))
        rate = {"before": [runs[0]["accuracy_before"]], "60 steps later": [run["accuracy_after"] for run in runs]}
        bars(laptop, rate, "{:.0%}", [SKY, BLUE])
        laptop.set_title("Two CPU cores: word problems")
        rate = {"before": [preset["before"]]} | {later(run): run["after"] for run in (small, preset)}
        bars(real, rate, "{:.0%}", [SKY, BLUE, BLUE])
        real.set_title("One H100: GSM8K's test problems")
        bars(loose, {"before": [ten["before"]], later(ten): ten["after"]}, "{:.0%}", [SKY, BLUE])
        loose.set_title("The same, any number counts")
        for axes in (real, loose):
            axes.set_ylim(laptop.get_ylim())
        bars(race, {"rlcourse": small["minutes"], "TRL with vLLM": trl["minutes"]}, "{:.1f}", [BLUE, PURPLE])
        race.set_title(f"Minutes to {fmean(small['after']):.0%}: 100 steps")
        figure.savefig(path, dpi=DPI, metadata={"Description": digest()})


def later(run: dict[str, Any]) -> str:
    return f"{fmean(run['minutes']):.1f} minutes\nlater"


def bars(axes: Axes, values: dict[str, list[float]], form: str, colors: list[str]) -> None:
    """One bar per name with its mean on top, and a dot per seed."""
    means = [fmean(seeds) for seeds in values.values()]
    drawn = axes.bar(values.keys(), means, color=colors, width=0.65)
    axes.bar_label(drawn, [form.format(mean) for mean in means], padding=6)
    for name, seeds in values.items():
        axes.plot([name] * len(seeds), seeds, "k.", markersize=4)
    axes.set(yticks=[], ylim=(0, 1.2 * max(means)))
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="x", length=0)


def digest() -> str:
    """Changes with the records that the picture shows."""
    folder = data_folder()
    records = [next(folder.glob("curves/*/dr_grpo.json"))]
    records.append(folder / "measurements" / H100 / "gsm8k.json")
    return hashlib.sha256(b"".join(record.read_bytes() for record in records)).hexdigest()


def shown(path: Path) -> str:
    """The digest of the records that a picture shows, "" if there is none."""
    if not path.exists():
        return ""
    with Image.open(path) as image:
        return image.info.get("Description", "")
