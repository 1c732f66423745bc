"""The recorded runs of lesson 05, three seeds each: one that goes well, those that fail on purpose, and two that start
from a model that answers in words: `python -m tools.lessons.lesson05`.

Takes names of `RUNS`, or does them all. Writes the record `lesson05_<name>` of each.
"""

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from rlcourse.config import make_config
from rlcourse.course.lessons.demonstrations import Mix
from rlcourse.policy import load_policy
from rlcourse.runs import read_lines
from rlcourse.train import train
from tools.embedded import save_halved
from tools.embedded.minigsm import Stage, run_stage
from tools.lessons.recording import record_seeds

SEEDS = (0, 1, 2)
IN_WORDS = "the embedded model after 40 supervised steps on answers of which most end in words"
COMMON = {"steps": 40, "minibatches": 2, "kl_coef": 0.0, "pass_k": 0, "save_every": 0}

# What differs from COMMON, which itself differs from the laptop preset.
RUNS: dict[str, dict[str, Any]] = {
    "healthy": {},
    "format": {"reward_format": 1.0},
    "half_format": {"reward_format": 0.5},
    "collapse": {"lr": 4e-3},
    "truncation": {"max_new_tokens": 24},
    "still": {"lr": 4e-8},
    "words_strict": {"model": IN_WORDS},
    "words_lenient": {"model": IN_WORDS, "reward_parser": "lenient"},
}


def record(name: str) -> None:
    """Train the run called `name` with each seed and write its record."""
    settings = COMMON | RUNS[name]
    with tempfile.TemporaryDirectory() as scratch:
        used = settings
        if settings.get("model") == IN_WORDS:
            write_model_in_words(Path(scratch) / "model")
            used = settings | {"model": str(Path(scratch) / "model")}
        record_seeds(f"lesson05_{name}", [name], settings, SEEDS, lambda seed: one_run(used, seed, Path(scratch)))


def one_run(settings: dict[str, Any], seed: int, scratch: Path) -> dict[str, Any]:
    """What one seed leaves behind: metrics by name, validations, accuracy before and after, last answers."""
    summary = train(make_config("laptop", **settings, seed=seed, output=str(scratch), name=f"run-{seed}"))
    run = scratch / f"run-{seed}"
    lines = {name: read_lines(run / f"{name}.jsonl") for name in ("metrics", "evals")}
    names = dict.fromkeys(key for line in lines["metrics"] for key in line if key != "timing")
    when = ("before", "after")
    kept = ("problems", "accuracy", "accuracy_lenient", "formatted", "finished")
    return {
        "metrics": {name: [line.get(name) for line in lines["metrics"]] for name in names},
        "evals": lines["evals"],
        "summary": {w: {key: summary[w][key] for key in kept} for w in when},
        "samples": [s for s in read_lines(run / "samples.jsonl") if s["step"] == settings["steps"]],
    }


def write_model_in_words(folder: Path) -> None:
    """The embedded model, taught for a moment to work a problem out and to end most answers in words."""
    mix = Mix(worked=0.06, guess=0.14, prose=0.80)
    policy = load_policy("embedded")
    run_stage(policy, Stage("in words", 40, lr=4e-4, warmup_steps=5, mix_of=lambda _: mix), 64, random.Random(5))
    save_halved(policy, folder)


if __name__ == "__main__":
    for name in sys.argv[1:] or RUNS:
        record(name)
