"""Learning curves of the algorithms on the embedded task, three seeds each: `python -m tools.lessons.curves`.

Takes names of algorithms, or does the usual six. Writes the record `<algorithm>` for each, and draws what is there in
`data/curves/curves.png`.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from rlcourse.config import ALGORITHMS, make_config
from rlcourse.course.lessons.curve_records import load_curve
from rlcourse.measure.plots import BLACK, BLUE, GREEN, LABELS, ORANGE, PURPLE, SKY, VERMILION, finish, seed_band
from rlcourse.paths import data_folder
from rlcourse.runs import read_lines
from rlcourse.train import train
from tools.lessons.recording import record_seeds

# Colour, line style and marker of each algorithm, the same in every figure.
STYLES = {
    "reinforce": (BLACK, ":", "o"),
    "reinforce_baseline": (PURPLE, (0, (1, 1)), "s"),
    "rloo": (SKY, "-.", "^"),
    "ppo": (ORANGE, "--", "D"),
    "grpo": (GREEN, (0, (5, 1)), "v"),
    "dr_grpo": (BLUE, "-", "o"),
    "dapo": (VERMILION, (0, (3, 1, 1, 1)), "P"),
    "gspo": (PURPLE, "-.", "X"),
    "cispo": (BLACK, "--", "*"),
}

SEEDS = (0, 1, 2)
STEPS = 60  # more than the preset's, to show where the curves flatten
DEFAULT = ("dr_grpo", "grpo", "rloo", "ppo", "reinforce_baseline", "reinforce")
SUMMARY = ("accuracy_before", "accuracy_after", "eval_problems", "wall_seconds", "peak_memory_bytes")


def train_and_read(**settings: Any) -> dict[str, Any]:
    """Train in a folder of its own: validation accuracy, the mean reward of each step, and the summary."""
    with tempfile.TemporaryDirectory() as folder:
        summary = train(make_config(**settings, output=folder))
        [run] = Path(folder).iterdir()
        evals = [{"step": e["step"], "accuracy": e["accuracy"]} for e in read_lines(run / "evals.jsonl")]
        rewards = [step["reward"] for step in read_lines(run / "metrics.jsonl")]
    return {"evals": evals, "rewards": rewards, "summary": {name: summary[name] for name in SUMMARY}}


def record(algorithm: str) -> None:
    """Train with each seed at the laptop preset's settings, for `STEPS` steps, and write the algorithm's record."""
    settings = {"algorithm": algorithm, "steps": STEPS}
    setup = make_config(**settings).to_dict()
    record_seeds(algorithm, [algorithm], setup, SEEDS, lambda seed: train_and_read(**settings, seed=seed))


def recorded_algorithms() -> list[dict[str, Any]]:
    """The records of the algorithms that have one, in the order of the config."""
    names = {path.stem for path in (data_folder() / "curves").glob("*/*.json")}
    return [load_curve(name) for name in ALGORITHMS if name in names]


def plot_curves(records: list[dict[str, Any]], path: Path) -> None:
    """Held-out accuracy of several algorithms over training steps: the mean over seeds, and a band from least to most.

    records: one for each line, named after its algorithm; see `seed_band`. path: the PNG to write. Raises ValueError
    if there are no records.
    """
    if not records:
        raise ValueError("There are no curves to draw: train at least one algorithm first.")
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    for record in records:
        algorithm = record["name"]
        color, linestyle, marker = STYLES.get(algorithm, (BLACK, "-", "o"))
        steps, low, mean, high = seed_band(record["results"])
        low, mean, high = ([100 * value for value in values] for values in (low, mean, high))
        axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
        label = LABELS.get(algorithm, algorithm.upper())
        axes.plot(steps, mean, color=color, linestyle=linestyle, marker=marker, markersize=5, linewidth=2, label=label)
    seeds = sorted({len(record["results"]) for record in records})
    finish(axes, "Accuracy on held-out problems during training", "greedy, % right")
    axes.set_ylim(0, 100)
    axes.set_xlabel("training step")
    legend_title = f"mean of {' or '.join(map(str, seeds))} seeds, band: min to max"
    axes.legend(title=legend_title, loc="lower right", frameon=False, fontsize=11, title_fontsize=11, handlelength=3.5)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    for name in sys.argv[1:] or DEFAULT:
        record(name)
        plot_curves(recorded_algorithms(), data_folder() / "curves" / "curves.png")
