"""A run's folder: config.json, metrics.jsonl, evals.jsonl, samples.jsonl, curve.png, summary.json, checkpoints/."""

import importlib.util
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from rlcourse.batch import Completions
from rlcourse.config import TrainConfig, check_config, make_config

MAY_DIFFER = ("steps", "output", "name", "device", "save_every", "log_to")  # settings that --resume may change
SAMPLES_A_STEP = 4


def new_run(config: TrainConfig) -> "RunFolder":
    """A new folder for a run of `config`. A default name that is taken gets a number.

    Raises ValueError for a name given by hand that is taken, or a missing tracker.
    """
    check_tracker(config)
    root = Path(config.output).expanduser()
    taken = _numbered(root, config.run_name)
    if config.name and taken:
        raise ValueError(f"{taken[0]} exists: go on with --resume, or choose another --name.")
    path = root / (config.run_name if not taken else f"{config.run_name}-{len(taken) + 1}")
    path.mkdir(parents=True)
    write_json(path / "config.json", config.to_dict())
    return RunFolder(path, config)


def run_to_resume(settings: dict[str, Any]) -> "RunFolder":
    """The folder of a run to go on with, and its settings as they were saved, but for those in `settings`.

    settings: what the user says explicitly. `output` and `name` find the run; without a name it is the last one with
    the default name that preset, algorithm and seed make. Raises ValueError for a setting that differs and may not,
    FileNotFoundError for no such run.
    """
    asked = make_config(**settings)
    root = Path(asked.output).expanduser()
    taken = _numbered(root, asked.run_name)[: 1 if asked.name else None]
    if not taken:
        raise FileNotFoundError(f"No run to resume at {root / asked.run_name}: start it without --resume.")
    path = taken[-1]
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} is not the folder of a run: it has no config.json.")
    saved = read_json(path / "config.json")
    fixed = [name for name in settings if name not in MAY_DIFFER and saved.get(name) != getattr(asked, name)]
    if fixed:
        changes = "; ".join(f"{name} was {saved.get(name)!r}, is {getattr(asked, name)!r}" for name in fixed)
        raise ValueError(f"{path} was started with other settings ({changes}): resume with the same ones.")
    if set(saved) != set(asked.to_dict()):
        raise ValueError(f"{path} was made by another version of rlcourse: start a new run.")
    config = TrainConfig(**(saved | {name: getattr(asked, name) for name in settings if name in MAY_DIFFER}))
    check_config(config)
    check_tracker(config)
    write_json(path / "config.json", config.to_dict())
    return RunFolder(path, config)


def check_tracker(config: TrainConfig) -> None:
    """Raise ValueError if `log_to` names a tracker that is not installed."""
    if config.log_to != "none" and importlib.util.find_spec(config.log_to) is None:
        raise ValueError(f"{config.log_to} is not installed: `python -m pip install {config.log_to}`.")


def _numbered(root: Path, name: str) -> list[Path]:
    """The runs called name, name-2, name-3, ... that exist, in that order."""
    found, path = [], root / name
    while path.exists():
        found.append(path)
        path = root / f"{name}-{len(found) + 1}"
    return found


class RunFolder:
    """Where a run writes what it measures: to files always, to TensorBoard or W&B if asked for."""

    def __init__(self, path: Path, config: TrainConfig):
        self.path, self.config = path, config
        self.tracker = make_tracker(path, config)

    def log_step(self, metrics: dict[str, Any], completions: Completions) -> None:
        """One line of metrics, and some of the step's completions."""
        append_json(self.path / "metrics.jsonl", metrics)
        answers = completions.answers
        every = max(1, len(answers) // SAMPLES_A_STEP)
        for i in range(0, len(answers), every)[:SAMPLES_A_STEP]:
            sample = {
                "step": metrics["step"],
                "question": answers[i].problem.question,
                "gold": answers[i].problem.gold,
                "text": answers[i].text,
                "reward": completions.rewards[i].item(),
            }
            append_json(self.path / "samples.jsonl", sample)
        self.tracker(metrics["step"], "train", metrics | metrics["timing"])

    def log_eval(self, metrics: dict[str, Any]) -> None:
        """One line of a validation."""
        append_json(self.path / "evals.jsonl", metrics)
        self.tracker(metrics["step"], "validation", metrics)

    def has_eval(self, step: int) -> bool:
        """Whether the validation of a step has been written down."""
        return any(line["step"] == step for line in read_lines(self.path / "evals.jsonl"))

    def remove_unless_begun(self) -> None:
        """Delete a folder without a step or a checkpoint, so that its name is free for the next try."""
        if not (self.path / "metrics.jsonl").exists() and not (self.path / "checkpoints").exists():
            shutil.rmtree(self.path)

    def forget_after(self, step: int) -> None:
        """Drop the lines of steps that a checkpoint at `step` has not seen; they will be written again."""
        for name in ("metrics.jsonl", "evals.jsonl", "samples.jsonl"):
            path = self.path / name
            if path.exists():
                kept = [line for line in read_lines(path) if line["step"] <= step]
                write_text(path, "".join(json.dumps(line) + "\n" for line in kept))

    def finish(self, summary: dict[str, Any]) -> None:
        """Write summary.json and curve.png."""
        from rlcourse.measure.plots import plot_run

        write_json(self.path / "summary.json", summary)
        plot_run(
            read_lines(self.path / "metrics.jsonl"), read_lines(self.path / "evals.jsonl"), self.path / "curve.png"
        )

    def resume_command(self) -> str:
        """The command line of this process with --resume."""
        arguments = [a for a in sys.argv[1:] if a != "--resume"]
        return shlex.join(["rlcourse", *arguments, "--resume"])


def make_tracker(path: Path, config: TrainConfig):
    """A function (step, group, metrics) that passes numbers on to TensorBoard or W&B, or does nothing."""

    def numbers(metrics: dict[str, Any]) -> dict[str, float]:
        return {name: value for name, value in metrics.items() if isinstance(value, int | float)}

    if config.log_to == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(path))

        def track(step: int, group: str, metrics: dict[str, Any]) -> None:
            for name, value in numbers(metrics).items():
                writer.add_scalar(f"{group}/{name}", value, step)

        return track
    if config.log_to == "wandb":
        import wandb

        run = wandb.init(project="rlcourse", name=path.name, config=config.to_dict(), dir=str(path))
        return lambda step, group, metrics: run.log({f"{group}/{k}": v for k, v in numbers(metrics).items()}, step=step)
    return lambda step, group, metrics: None


def append_json(path: Path, value: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write aside and rename, so that the file is never half there."""
    aside = path.with_name(path.name + ".writing")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def write_json(path: Path, value: dict[str, Any]) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The values of a JSON-lines file; a last line that a kill cut short is left out."""
    values = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            values.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return values
