"""The run of lesson 01: what a constant added to every reward does, with and without a baseline, five seeds each.

`python -m rlcourse.course.lessons.lesson01 [LABELS...]` trains on the embedded task with few completions a step, writes
`data/curves/lesson01_offset.json`; with labels of `VARIANTS` it makes these anew and keeps the others that are there.
"""

import datetime
import sys
import tempfile
from pathlib import Path
from typing import Any

from rlcourse.config import make_config
from rlcourse.measure.records import device_name
from rlcourse.paths import data_folder
from rlcourse.runs import read_json, read_lines, write_json
from rlcourse.trainer import train

SEEDS = (0, 1, 2, 3, 4)
FEW = {
    "num_prompts": 4,
    "num_generations": 8,
    "steps": 40,
    "eval_every": 5,
    "eval_validation": 200,
    "eval_problems": 1,  # the validation curve is what is recorded
    "pass_k": 0,
    "save_every": 0,
}
VARIANTS = {
    "reinforce": ("reinforce", 0.0),
    "reinforce, every reward + 1": ("reinforce", 1.0),
    "reinforce, every reward - 1": ("reinforce", -1.0),
    "reinforce_baseline, every reward + 1": ("reinforce_baseline", 1.0),
    "rloo, every reward + 1": ("rloo", 1.0),
}


def offset_settings(offset: float) -> dict[str, float]:
    """The rewards 1 for a right answer and 0 for any other, with `offset` added to both."""
    return {"reward_correct": 1 + offset, "reward_format": offset, "reward_neither": offset}


def measure(label: str) -> dict[str, Any]:
    """Train the variant with every seed: validation accuracy, and the mean reward of each step."""
    algorithm, offset = VARIANTS[label]
    runs = []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            train(make_config(algorithm=algorithm, seed=seed, output=folder, **FEW, **offset_settings(offset)))
            [run] = Path(folder).iterdir()
            evals = [{"step": e["step"], "accuracy": e["accuracy"]} for e in read_lines(run / "evals.jsonl")]
            rewards = [round(step["reward"], 4) for step in read_lines(run / "metrics.jsonl")]
        runs.append({"seed": seed, "evals": evals, "rewards": rewards})
        print(label, seed, evals[-1], flush=True)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"label": label, "algorithm": algorithm, "offset": offset, "date": date, "seeds": runs}


def record(labels: list[str]) -> None:
    """Measure the variants called `labels` and write the record."""
    path = data_folder() / "curves" / "lesson01_offset.json"
    curves = {curve["label"]: curve for curve in read_json(path)["curves"]} if path.exists() else {}
    for label in labels:
        curves[label] = measure(label)
        ordered = [curves[known] for known in VARIANTS if known in curves]
        config = make_config(algorithm="reinforce", **FEW).to_dict()
        command = "python -m rlcourse.course.lessons.lesson01"
        write_json(path, {"device": device_name(), "command": command, "config": config, "curves": ordered})


if __name__ == "__main__":
    record(sys.argv[1:] or list(VARIANTS))
