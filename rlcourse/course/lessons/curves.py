"""Learning curves of the algorithms on the embedded task, three seeds each: `python -m rlcourse.course.lessons.curves`.

Takes names of algorithms, or does the usual six. Writes `data/curves/<algorithm>.json` for each, and
draws what is there in `data/curves/curves.png`.
"""

import datetime
import json
import sys
import tempfile
from pathlib import Path

from rlcourse.config import ALGORITHMS, make_config
from rlcourse.measure.plots import plot_curves
from rlcourse.measure.records import device_name
from rlcourse.paths import data_folder
from rlcourse.runs import read_json, read_lines, write_json
from rlcourse.trainer import train

SEEDS = (0, 1, 2)
DEFAULT = ("dr_grpo", "grpo", "rloo", "ppo", "reinforce_baseline", "reinforce")
SUMMARY = ("accuracy_before", "accuracy_after", "eval_problems", "wall_seconds", "peak_memory_bytes")


def record(algorithm: str) -> None:
    """Train with each seed at the laptop preset's settings and write the algorithm's record."""
    runs = []
    config = make_config("laptop", algorithm=algorithm).to_dict()
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            summary = train(make_config("laptop", algorithm=algorithm, seed=seed, output=folder))
            [run] = Path(folder).iterdir()
            evals = [{"step": e["step"], "accuracy": e["accuracy"]} for e in read_lines(run / "evals.jsonl")]
            rewards = [m["reward"] for m in read_lines(run / "metrics.jsonl")]
        kept = {name: summary[name] for name in SUMMARY}
        runs.append({"seed": seed, "evals": evals, "rewards": rewards, "summary": kept})
        print(algorithm, seed, json.dumps(kept), flush=True)
    folder = data_folder() / "curves"
    folder.mkdir(exist_ok=True)
    record = {"algorithm": algorithm, "device": device_name(), "date": datetime.date.today().isoformat()}
    write_json(folder / f"{algorithm}.json", record | {"config": config, "seeds": runs})


def draw() -> None:
    """Draw every recorded algorithm, in the order of the config, in one figure."""
    folder = data_folder() / "curves"
    curves = [read_json(folder / f"{name}.json") for name in ALGORITHMS if (folder / f"{name}.json").exists()]
    plot_curves(curves, folder / "curves.png")


if __name__ == "__main__":
    for name in sys.argv[1:] or DEFAULT:
        record(name)
        draw()
