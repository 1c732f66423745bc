"""Learning curves of the algorithms on the embedded task, three seeds each: `python -m tools.lessons.curves`.

Takes names of algorithms, or does the usual six. Writes the record `<algorithm>` for each, and draws what is there in
`data/curves/curves.png`.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from rlcourse.config import ALGORITHMS, make_config
from rlcourse.course.lessons.curve_records import load_curve
from rlcourse.measure.plots import plot_curves
from rlcourse.paths import data_folder
from rlcourse.runs import read_lines
from rlcourse.trainer import train
from tools.lessons.recording import record_seeds

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


if __name__ == "__main__":
    for name in sys.argv[1:] or DEFAULT:
        record(name)
        plot_curves(recorded_algorithms(), data_folder() / "curves" / "curves.png")
