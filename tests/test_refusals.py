"""What the command line refuses: one sentence on stderr, another exit code than 0, before anything is loaded; and what
lies there already stays."""

import json
import logging
import os
import subprocess
import sys
import time
import warnings

import pytest
import torch
from typer.testing import CliRunner

from rlcourse import cli, evaluation
from rlcourse import train as trainer
from rlcourse.config import make_config
from rlcourse.course import lab
from rlcourse.course.grading import report
from rlcourse.sft import trainer as fine_tuning


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch, tmp_path):
    """Whoever gets so far as to load or compute something fails."""

    def reached(*_, **__):
        raise AssertionError("reached")

    monkeypatch.chdir(tmp_path)
    loading = {trainer: "train resume", evaluation: "evaluate", fine_tuning: "fine_tune resume"}
    loading |= {report: "run_grade", lab: "lab"}
    for place, names in loading.items():
        for name in names.split():
            monkeypatch.setattr(place, name, reached)


def refused(*arguments: str, code: int = 2) -> str:
    """The one sentence with which a command line is refused."""
    done = CliRunner().invoke(cli.app, list(arguments))
    assert done.exit_code == code, (done.output, done.exception)
    assert done.stdout == "" and done.stderr.count("\n") == 1 and done.stderr.endswith(".\n"), done.output
    return done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("eval --temperature nan", "temperature must be from 0.01 to 100, not nan."),
        ("train --resume --name ../x", "name must be that of a folder in --output"),
        ("sft --lora-rank -1 --resume", "lora_rank must be from 0"),
        ("lab --port 99999", "Invalid value for '--port': "),
        ("speedrun x.py --seeds 0", "Invalid value for '--seeds': "),
        ("train --steps many", "Invalid value for '--steps': "),
        ("merge", "Missing argument "),
        ("train --dry-run --resume", "--dry-run previews a new run"),
        ("train --dry-run --model nowhere", "nowhere is not a folder here"),  # without the settings
        ("sft --steps 3 --epochs 2", "--steps ends a run whatever --epochs says"),
        ("sft --subset main", "--subset and --split are for a data set on the hub"),
        ("sft --data x.jsonl --split test", "--subset and --split are for a data set on the hub"),
        ("sft --data x.jsonl --eval-problems 9", "--eval-problems and --max-new-tokens are for the answers to a task"),
    ],
)
def test_what_once_got_through_is_refused(arguments, sentence):
    assert refused(*arguments.split()).startswith(sentence)


# Outputs are tried first


@pytest.mark.parametrize("option", ["--junit", "--csv"])
def test_a_report_that_cannot_be_written_is_refused_before_anything_is_graded(option, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "(a file is in its place): name another file." in refused("grade", "x.ipynb", option, "file/report", code=1)
    assert "(Is a directory): name another file." in refused("grade", "x.ipynb", option, str(tmp_path), code=1)
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "mine"


def test_an_output_of_a_model_that_cannot_be_written_is_refused_before_it_is_merged(tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "file is not an empty folder" in refused("merge", "x", "--output", "file")
    said = refused("merge", "x", "--output", "file/model", code=1)
    assert "(a file is in its place): choose another --output." in said
    if os.path.exists("/proc/self"):
        assert "cannot be written to /proc/self/model" in refused("merge", "x", "--output", "/proc/self/model", code=1)


OVER_INPUTS = ["grade d/1.ipynb --junit d/1.ipynb", "grade d --csv d/1.ipynb"]
OVER_INPUTS += ["grade x.ipynb --hidden d --junit d/nb01.py", "merge e.writing --output e"]  # written there at first


@pytest.mark.parametrize("arguments", OVER_INPUTS)
def test_no_command_overwrites_what_it_reads(arguments, tmp_path):
    for name in ("d/1.ipynb", "d/nb01.py", "e.writing/adapter_config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    assert "would overwrite" in refused(*arguments.split())
    assert {path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == {"mine"}


@pytest.fixture
def real_trainer(monkeypatch):
    """The trainer's own functions, which have no model to load."""
    monkeypatch.undo()
    monkeypatch.setattr(trainer, "Trainer", None)
    monkeypatch.setattr(fine_tuning, "FineTuning", None)


@pytest.mark.parametrize("command", ["train", "sft"])
def test_an_output_of_a_run_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    command, tmp_path, real_trainer
):
    (tmp_path / "file").write_text("mine")
    sentence = refused(command, "--device", "cpu", "--output", str(tmp_path / "file"), code=1)
    assert "(a file is in its place): choose another --output." in sentence


# The folder of a run


def test_a_run_whose_config_holds_what_cannot_be_is_not_resumed(tmp_path, real_trainer):
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "config.json"
    file.write_text(json.dumps(make_config(name="run", output=str(tmp_path)).to_dict() | {"num_generations": 1}))
    said = refused("train", "--resume", "--output", str(tmp_path), "--name", "run")
    assert said.startswith("advantage 'group_centered' compares")


# How a command ends


@pytest.mark.parametrize(
    ("error", "sentence", "code"),
    [
        (FileNotFoundError("No run at [runs]/x: start it."), "No run at [runs]/x: start it.\n", 2),
        (ConnectionError("The hub is away."), "The hub is away.\n", 1),
        (RuntimeError("Broken.\nC++ stack"), "Broken. (RLCOURSE_TRACEBACK=1 shows where.)\n", 1),
        (
            ImportError("No module named 'x'"),
            "No module named 'x': install it, or see `rlcourse doctor` for what is missing.\n",
            1,
        ),
        (ValueError(), "ValueError\n", 2),
        (KeyError("step"), "KeyError: 'step' (RLCOURSE_TRACEBACK=1 shows where.)\n", 1),
        (OSError(28, "No space", "runs/x/metrics.jsonl"), "No space: runs/x/metrics.jsonl.\n", 1),
        (SystemExit(0), "The code that was run ended the process by sys.exit(0).\n", 1),  # which is no success
        (MemoryError(), "There is not enough memory. Lower --micro-batch-tokens", 1),
        (torch.OutOfMemoryError("CUDA out of memory."), "CUDA out of memory. Lower --micro-batch-tokens", 1),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "There is not enough memory. Lower", 1),
    ],
)
def test_any_error_is_one_sentence(error, sentence, code, monkeypatch):
    def train(config, began):
        raise error

    monkeypatch.setattr(trainer, "train", train)
    done = CliRunner().invoke(cli.app, ["train"])
    assert done.exit_code == code and done.stderr.startswith(sentence) and done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", ["--version", "doctor"])
def test_a_pipe_that_nobody_reads_ends_a_command_quietly(arguments, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-m", "rlcourse", *arguments.split()]
    with os.fdopen(theirs, "w") as pipe:
        assert subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, timeout=100).stderr == b""


def test_what_libraries_log_and_warn_of_is_held_back_and_comes_back_afterwards(monkeypatch, caplog, recwarn):
    def train(config, began):
        logging.getLogger("transformers").warning("ten lines of advice")
        warnings.warn("and more of them", stacklevel=1)
        raise ValueError("Ours.")

    monkeypatch.setattr(trainer, "train", train)
    assert refused("train") == "Ours.\n"
    assert caplog.records == [] and len(recwarn) == 0
    assert logging.root.manager.disable == logging.NOTSET


def test_a_refusal_comes_at_once_and_loads_no_torch():
    start = time.perf_counter()
    code = "import sys; from rlcourse import cli; sys.modules['torch'] = None; cli.main()"
    for arguments in (["train", "--lr", "nan"], ["eval", "--eval-problems", "0"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert time.perf_counter() - start < 40
