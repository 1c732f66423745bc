"""Figures used in more than one place. Each is drawn on its own Figure, without a window or global state. Colours are
those of Okabe and Ito, which colour-blind readers can tell apart; line styles and markers differ, too."""

import itertools
import math
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from rlcourse.measure.roofline import Machine, Work

ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE, BLACK = (
    "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#000000",
)  # fmt: skip

LABELS = {"reinforce": "REINFORCE", "reinforce_baseline": "REINFORCE, batch mean", "dr_grpo": "Dr. GRPO"}

VALIDATION_STYLES = ((BLUE, "-"), (SKY, "--"), (GREEN, ":"), (VERMILION, "-."), (PURPLE, "--"), (BLACK, ":"))
WINDOW = 5  # steps of the moving means

# What is drawn of a run beside its validation: a metric, its title and unit.
RL = (
    ("reward", "Training reward", "mean of a step"),
    ("length", "Completion length", "tokens, mean of a step"),
    ("entropy", "Entropy of the policy", "nats per token"),
)
FINE_TUNING = (("loss", "Loss", "nats per token of an answer"),)


def plot_run(
    metrics: list[dict[str, Any]], evals: list[dict[str, Any]], path: Path, measured: dict[str, str], curves=RL
) -> None:
    """One run as a picture, over its steps: validation, if anything was measured there, and `curves`.

    metrics, evals: rows of metrics.jsonl and evals.jsonl, each with its step. path: the PNG to write. measured: the
    task's metrics and their formats; the first is drawn, and the others in percent if it is in percent.
    """
    count = len(curves) + bool(measured)
    rows, columns = math.ceil(count / 2), min(count, 2)
    figure = Figure(figsize=(4.5 * columns, 3 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, sharex=True, squeeze=False).flat)
    for axes in panels[-columns:]:
        axes.set_xlabel("step")
    if measured:
        _draw_validation(panels.pop(0), evals, measured)
    for axes, (key, title, unit), color in zip(panels, curves, (ORANGE, GREEN, PURPLE), strict=False):
        steps, values = _series(metrics, key)
        axes.plot(steps, values, color=color, linewidth=0.9, alpha=0.5, label="each step")
        means = [fmean(values[max(0, i - WINDOW) : i]) for i in range(1, len(values) + 1)]
        axes.plot(steps, means, color=color, linewidth=2, label=f"mean of the last {WINDOW}")
        steps, values = _series(evals, key)
        if steps:
            axes.plot(steps, values, color=BLUE, linewidth=2, marker="o", markersize=4, label="held out")
        finish(axes, title, unit)
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    panels[0].legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def _draw_validation(axes: Axes, evals: list[dict[str, Any]], measured: dict[str, str]) -> None:
    """The first metric, and beside it, if it is a share, the task's other shares, all in percent."""
    headline, *others = measured
    share = measured[headline].endswith("%")
    names = [headline, *(name for name in others if share and measured[name].endswith("%"))]
    for name, (color, linestyle) in zip(names, itertools.cycle(VALIDATION_STYLES), strict=False):
        steps, values = _series(evals, name)
        style = {"color": color, "linestyle": linestyle, "label": name.replace("_", " ")}
        size = {"linewidth": 2, "marker": "o", "markersize": 4} if name == headline else {"linewidth": 1.2}
        axes.plot(steps, [100 * value if share else value for value in values], **style, **size)
    finish(axes, "Validation", f"greedy, {'%' if share else headline.replace('_', ' ')}")
    if share:
        axes.set_ylim(0, 100)
    axes.legend(loc="lower right", frameon=False, fontsize=9)


def seed_band(seeds: list[dict[str, Any]]) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps at which every seed was evaluated, and the least, mean and greatest accuracy there. seeds: the results of a
    learning curve's record."""
    by_seed = [{row["step"]: row["accuracy"] for row in seed["evals"]} for seed in seeds]
    steps = sorted(set.intersection(*map(set, by_seed)))
    columns = [[accuracy[step] for accuracy in by_seed] for step in steps]
    return steps, [min(c) for c in columns], [sum(c) / len(c) for c in columns], [max(c) for c in columns]


def draw_roofline(axes: Axes, machine: "Machine", points: list[tuple[str, "Work", float]]) -> None:
    """A machine's roof, and where programs stand under it, on logarithmic axes. points: (label, what had to be done,
    seconds it took)."""
    intensities = [work.intensity for _, work, _ in points] + [machine.ridge]
    left, right = min(intensities) / 3, max(intensities) * 3
    roof = [left, machine.ridge, right]
    heights = [min(machine.bytes_per_s * x, machine.flops_per_s) / 1e9 for x in roof]
    axes.plot(roof, heights, color=BLACK, linewidth=2, label=f"{machine.name}, {machine.dtype}")
    axes.axvline(machine.ridge, color=BLACK, linestyle=":", linewidth=1)
    styles = zip((BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY), "osDv^P", strict=True)
    for (label, work, seconds), (color, marker) in zip(points, itertools.cycle(styles), strict=False):
        reached = work.total_flops / seconds / 1e9
        share = 100 * machine.floor_seconds(work) / seconds
        label = f"{label}: {share:.0f}% of the roof"
        axes.plot(work.intensity, reached, marker=marker, linestyle="", markersize=8, color=color, label=label)
    axes.set(xscale="log", yscale="log")
    finish(axes, "Roofline", "billion operations a second")
    axes.set_xlabel("FLOP/byte", fontsize=11)
    axes.legend(frameon=False, fontsize=9, loc="lower right")


def _series(rows: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    pairs = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def finish(axes: Axes, title: str, unit: str) -> None:
    """Title, unit of the y axis, a light grid, no box."""
    axes.set_title(title, fontsize=13)
    axes.set_ylabel(unit, fontsize=11)
    axes.tick_params(labelsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
