"""A run's folder: config.json, metrics.jsonl, evals.jsonl, samples.jsonl, curve.png, summary.json, checkpoints/."""

import importlib.util
import json
import os
import shlex
import shutil
import sys
import textwrap
import time
from contextlib import AbstractContextManager
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from rlcourse.collect import Completions
from rlcourse.config import TrainConfig
from rlcourse.dist import launched
from rlcourse.files import append_json, read_json, read_lines, try_folder, write_json, write_text
from rlcourse.interrupts import say
from rlcourse.settings import Settings

FIND_A_RUN = ("preset", "algorithm", "data", "seed", "output", "name")  # settings that say which run --resume means
MAY_DIFFER = ("steps", "output", "name", "engine", "device", "shard", "save_every", "log_to")  # that it may change
SAMPLES_A_STEP = 4
LOGS = "metrics.jsonl", "evals.jsonl", "samples.jsonl", "warnings.jsonl"


def new_run(config: TrainConfig) -> "RunFolder":
    """A new folder for a run of `config`; a number is added to a default name that's taken. Raises ValueError if a name
    given by hand is, OSError if `output` can't be written to."""
    check_tracker(config)
    root = Path(config.output).expanduser()
    try_folder(root, "choose another --output")
    taken = _numbered(root, config.run_name)
    if config.name and taken:
        raise ValueError(f"{taken[0]} exists: go on with --resume, or choose another --name.")
    path = root / (config.run_name if not taken else f"{config.run_name}-{len(taken) + 1}")
    path.mkdir(parents=True)
    write_json(path / "config.json", config.to_dict())
    return RunFolder(path, config)


def run_to_resume(settings: dict[str, Any], kind: type[Settings] = TrainConfig) -> "RunFolder":
    """The folder of a run to continue, with its saved settings, overridden by `settings`, those that the user gave.

    Without a name it's the latest in `output` with the default name of the settings in `FIND_A_RUN`. Raises ValueError
    for a setting that can't change or a config.json that can't be used, FileNotFoundError if there's no such run.
    Writes nothing.
    """
    settings = kind.check_settings(settings)
    wanted = kind(**{name: settings[name] for name in FIND_A_RUN if name in settings})
    root = Path(wanted.output).expanduser()
    taken = _numbered(root, wanted.run_name)
    if not taken:
        remedy = "check the name and --output" if wanted.name else "add its --name, or the settings in its name"
        raise FileNotFoundError(f"No run to resume at {root / wanted.run_name}: {remedy}.")
    path = taken[0 if wanted.name else -1]
    saved = read_json(path / "config.json", "name the folder of a run, or start a new one")
    if (other := "train" if "algorithm" in saved else "sft") != kind.command:
        raise ValueError(f"{path} is a run of `rlcourse {other}`: resume it with that.")
    if set(saved) != set(wanted.to_dict()):
        raise ValueError(f"{path} was made by another version of rlcourse: start a new run.")
    fixed = [name for name in settings if name not in MAY_DIFFER and saved.get(name) != settings[name]]
    if fixed:
        changes = "; ".join(f"{name} was {saved.get(name)!r}, is {settings[name]!r}" for name in fixed)
        raise ValueError(f"{path} was started with other settings ({changes}): resume with the same ones.")
    config = kind(**(saved | settings))
    config.check()
    check_tracker(config)
    try_folder(path, "choose another --output")
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


class RunFolder(AbstractContextManager):
    """Where a run logs: to files, and to TensorBoard or W&B if asked. Until its context ends, it's this process's
    alone."""

    def __init__(self, path: Path, config: TrainConfig):
        self.path, self.config, self.lock = path, config, locked(path)
        self.checkpoint: Path | None = None  # to go on from
        self.began = time.perf_counter()  # when the clock of the run started
        self.tracker = make_tracker(path, config)

    def __exit__(self, *_) -> None:
        self.lock.close()

    def keep_config(self) -> None:
        write_json(self.path / "config.json", self.config.to_dict())

    def log_step(self, metrics: dict[str, Any], completions: Completions | None) -> None:
        append_json(self.path / "metrics.jsonl", metrics)
        self.tracker(metrics["step"], "train", metrics | metrics["timing"])
        answers = completions.answers if completions else []
        every = max(1, len(answers) // SAMPLES_A_STEP)
        for i in range(0, len(answers), every)[:SAMPLES_A_STEP]:
            of = {"question": answers[i].problem.question, "gold": answers[i].problem.gold, "text": answers[i].text}
            sample = {"step": metrics["step"], **of, "reward": completions.rewards[i].item()}
            append_json(self.path / "samples.jsonl", sample)

    def log_eval(self, metrics: dict[str, Any]) -> None:
        append_json(self.path / "evals.jsonl", metrics)
        self.tracker(metrics["step"], "validation", metrics)

    def warn(self, step: int, warnings: dict[str, str]) -> None:
        """Say warnings, by kind, each kind once, and keep them in warnings.jsonl."""
        for kind, text in warnings.items():
            if kind not in self.warned():
                say(textwrap.fill(f"Warning: {text}", width=100))
                append_json(self.path / "warnings.jsonl", {"step": step, "kind": kind, "text": text})

    def warned(self) -> dict[str, str]:
        """The warnings said so far, by kind."""
        return {line["kind"]: line["text"] for line in read_lines(self.path / "warnings.jsonl")}

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The lines of one of the run's JSON-lines files. Raises ValueError for one without its step."""
        found = read_lines(self.path / name)
        if not all(type(line.get("step")) is int for line in found):
            raise ValueError(f"{self.path / name} has a line without its step: take it out, or start a new run.")
        return found

    def remove_unless_begun(self) -> None:
        """Delete the folder if it has no step and no checkpoint, so that the next try can have its name."""
        if not (self.path / "metrics.jsonl").exists() and not (self.path / "checkpoints").exists():
            shutil.rmtree(self.path)

    def go_on_from(self, step: int) -> list[dict[str, Any]]:
        """The metrics of each step up to `step`, that of a checkpoint. Lines after it are dropped; they'll be logged
        again. Raises ValueError unless metrics.jsonl has each of these steps once."""
        kept = {log: [line for line in self.lines(log) if line["step"] <= step] for log in LOGS}
        if [line["step"] for line in kept["metrics.jsonl"]] != [*range(1, step + 1)]:
            file = self.path / "metrics.jsonl"
            raise ValueError(f"{file} doesn't have each step from 1 to {step} once: restore it, or start a new run.")
        for log, lines in kept.items():  # all of them are read before one is written
            self.rewrite(self.path / log, lines)
        return kept["metrics.jsonl"]

    def rewrite(self, log: Path, lines: list[dict[str, Any]]) -> None:
        if log.exists():
            write_text(log, "".join(json.dumps(line) + "\n" for line in lines))

    def finish(self, summary: dict[str, Any], curves: str) -> None:
        """Write curve.png (curves: a name in `rlcourse.measure.plots`), then summary.json: the run is finished."""
        from rlcourse.measure import plots

        metrics, evals = self.lines("metrics.jsonl"), self.lines("evals.jsonl")
        aside = self.path / "writing.png"
        plots.plot_run(metrics, evals, aside, summary["metrics"], getattr(plots, curves))
        os.replace(aside, self.path / "curve.png")
        write_json(self.path / "summary.json", summary)

    def resume_command(self) -> str:
        """This process's command line, with --resume."""
        start, (_, size) = ["rlcourse"], launched()
        if size > 1:
            here = os.environ.get("LOCAL_WORLD_SIZE", str(size))
            start = ["torchrun", "--nproc-per-node", here, "-m", "rlcourse"]
        return shlex.join([*start, *(a for a in sys.argv[1:] if a != "--resume"), "--resume"])


def locked(path: Path) -> TextIOWrapper:
    """A file in the run's folder that this process locks until it's closed or the process ends, where the system has
    locks. Raises ValueError if another process has it."""
    file = (path / ".lock").open("w")
    try:
        import fcntl  # Windows has none

        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise ValueError(f"Another process is training in {path}: wait until it has ended, or stop it.") from None
    except (ImportError, OSError):
        pass
    return file


def make_tracker(path: Path, config: TrainConfig):
    """A function (step, group, metrics) that logs numbers to TensorBoard or W&B, or does nothing."""

    def numbers(group: str, metrics: dict[str, Any]) -> dict[str, float]:
        return {f"{group}/{name}": value for name, value in metrics.items() if isinstance(value, int | float)}

    if config.log_to == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        add = SummaryWriter(str(path)).add_scalar
        return lambda step, group, metrics: [add(*item, step) for item in numbers(group, metrics).items()]
    if config.log_to == "wandb":
        import wandb

        run = wandb.init(project="rlcourse", name=path.name, config=config.to_dict(), dir=str(path))
        return lambda step, group, metrics: run.log(numbers(group, metrics), step=step)
    return lambda step, group, metrics: None
