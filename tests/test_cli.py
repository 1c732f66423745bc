"""The command line: every setting is an option, errors are one sentence, and the trainer gets what was asked for."""

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from rlcourse import cli, doctor, memory, trainer
from rlcourse.config import ALGORITHMS, TrainConfig, field_type, make_config

RESULT = {"accuracy": 0.4, "accuracy_lenient": 0.5, "pass@8": 0.75, "tokens": 20.0}
SUMMARY = {
    "eval_problems": 1000,
    "wall_seconds": 90.0,
    "steps": 60,
    "before": RESULT,
    "after": RESULT
    | {"accuracy": 0.91, "samples": [{"question": "1+1?", "gold": "2", "text": "[2]\n#### 2", "right": True}]},
}


def invoke(*arguments, width=200):
    return CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": str(width), "TERMINAL_WIDTH": str(width)})


@pytest.fixture
def trained(monkeypatch):
    """The configs and resume flags that reach the trainer."""
    calls = []
    monkeypatch.setattr(trainer, "train", lambda config, resume: calls.append((config, resume)) or SUMMARY)
    return calls


def raising(monkeypatch, error):
    def train(config, resume):
        raise error

    monkeypatch.setattr(trainer, "train", train)


def other_value(f):
    """A valid value of a field that differs from its default, as typed and as Python."""
    if f.metadata["choices"]:
        return next(choice for choice in f.metadata["choices"] if choice != f.default)
    special = {"preset": "h200", "algorithm": "ppo", "top_p": 0.5, "num_generations": 4, "surrogate": "cispo"}
    if f.name in special:
        return special[f.name]
    kind = field_type(f)
    return "text" if kind is str else not f.default if kind is bool else f.default + kind(1)


@pytest.mark.parametrize("f", fields(TrainConfig), ids=lambda f: f.name)
def test_every_setting_can_be_set(f, trained):
    value, flag = other_value(f), "--" + f.name.replace("_", "-")
    arguments = [flag, str(value)]
    if field_type(f) is bool:
        arguments = [flag if value else "--no-" + flag[2:]]
    result = invoke("train", *arguments)
    assert result.exit_code == 0, result.output
    [(config, resume)] = trained
    assert getattr(config, f.name) == value and resume is False
    assert config == make_config(**{f.name: value})  # and nothing else has changed


def test_train_alone_is_the_laptop_preset(trained):
    assert invoke("train").exit_code == 0
    assert trained == [(make_config("laptop"), False)]


def test_what_is_set_by_hand_wins_over_algorithm_and_preset(trained):
    invoke("train", "--preset", "h200", "--algorithm", "gspo", "--clip-low", "0.1", "--no-compile-rollout", "--resume")
    [(config, resume)] = trained
    assert config == make_config("h200", algorithm="gspo", clip_low=0.1, compile=False) and resume
    assert config.num_prompts == 32 and config.ratio == "sequence"


def test_help_shows_every_option_with_help_choices_and_the_default_of_the_laptop_preset():
    text = re.sub(r"[\s│]+", " ", invoke("train", "--help").output)
    laptop = make_config("laptop")
    for f in fields(TrainConfig):
        assert "--" + f.name.replace("_", "-") in text
        assert f.metadata["help"] in text
        if f.metadata["choices"]:
            assert ", ".join(f.metadata["choices"]) in text
        assert getattr(laptop, f.name) == f.default  # which is what the help shows
    assert "(default: dr_grpo)" in text and all(algorithm in text for algorithm in ALGORITHMS)
    assert "(default: off)" in text and "(default: 6e-05)" in text


def test_help_panels_follow_the_sections_of_the_config():
    text = (Path(cli.__file__).parent / "config.py").read_text()
    sections = re.findall(r"^    # (.+)\n    (\w+): ", text, flags=re.MULTILINE)
    assert {name: title for title, name in sections} == cli.PANELS


def test_dry_run_prints_config_and_memory_and_trains_nothing(trained):
    result = invoke("train", "--preset", "a10g", "--lr", "0.25", "--dry-run")
    assert result.exit_code == 0 and trained == []
    cells = [[cell.strip() for cell in line.split("│")] for line in result.output.splitlines() if "│" in line]
    rows = {name: value for _, name, value, *_ in cells}
    config = make_config("a10g", lr=0.25)
    assert {f.name: str(getattr(config, f.name)) for f in fields(TrainConfig)}.items() <= rows.items()
    needed = memory.estimate(config, memory.model_shape(config.model), "cuda")
    assert rows["weights"] == "1.98 GB" and rows["update phase"] == f"{needed.update / 1e9:.3g} GB"
    assert "494,032,768 parameters" in result.output


def test_summary_shows_before_and_after_and_a_sample(trained):
    output = invoke("train").output
    row = next(line for line in output.splitlines() if " accuracy " in line)
    assert "40.0%" in row and "91.0%" in row
    assert "75.0%" in output and "[2]" in output and "60 steps in 90 s" in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--steps", "0"], "steps must be at least 1, not 0."),
        (["--preset", "b200"], "Unknown preset 'b200': use one of laptop, a10g, h200."),
        (["--algorithm", "magic"], "Unknown algorithm 'magic'"),
        (["--task", "poetry"], "task must be one of minigsm, gsm8k, not 'poetry'."),
    ],
)
def test_a_wrong_setting_is_one_sentence_on_stderr_and_exit_code_2(arguments, sentence):
    result = invoke("train", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(sentence) and result.stderr.count("\n") == 1 and result.stdout == ""


@pytest.mark.parametrize("arguments", [["--steps", "many"], ["--stepz", "3"]])
def test_usage_errors_are_explained_with_exit_code_2(arguments):
    result = invoke("train", *arguments)
    assert result.exit_code == 2 and "Traceback" not in result.output and arguments[0] in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (FileNotFoundError("No run to resume at [runs]/x: start it."), 2, "No run to resume at [runs]/x: start it.\n"),
        (ConnectionError("The hub is away."), 1, "The hub is away.\n"),
        (RuntimeError("Broken.\nC++ stack"), 1, "Broken. (RLCOURSE_TRACEBACK=1 shows where.)\n"),
        (ImportError("No module named 'x'"), 1, "No module named 'x' `rlcourse doctor` says what is missing.\n"),
        (ValueError(), 2, "ValueError\n"),
    ],
)
def test_errors_of_a_run_are_one_sentence(monkeypatch, error, code, sentence):
    raising(monkeypatch, error)
    result = invoke("train")
    assert (result.exit_code, result.stderr) == (code, sentence)


def test_out_of_memory_says_what_to_lower(monkeypatch):
    import torch

    raising(monkeypatch, torch.OutOfMemoryError("CUDA out of memory."))
    result = invoke("train")
    assert result.exit_code == 1 and "--micro-batch-rows" in result.stderr


def test_developers_get_the_traceback(monkeypatch):
    monkeypatch.setenv("RLCOURSE_TRACEBACK", "1")
    raising(monkeypatch, ValueError("from the depth"))
    result = invoke("train")
    assert isinstance(result.exception, ValueError)


def test_ctrl_c_exits_with_130_and_adds_nothing(monkeypatch):
    raising(monkeypatch, KeyboardInterrupt())
    result = invoke("train")
    assert result.exit_code == 130 and result.output == ""


def test_a_commands_own_exit_code_passes_through():
    with pytest.raises(typer.Exit), cli.user_errors():
        raise typer.Exit(3)


@pytest.mark.parametrize(("healthy", "code"), [(True, 0), (False, 1)])
def test_doctor_exits_with_1_if_something_required_is_missing(monkeypatch, healthy, code):
    check = {"name": "x", "ok": healthy, "required": True, "detail": "", "mend": "mend it"}
    facts = doctor.gather() | {"checks": [check]}
    monkeypatch.setattr(doctor, "gather", lambda: facts)
    result = invoke("doctor")
    assert result.exit_code == code and ("mend it" in result.output)
    assert '"mend": "mend it"' in invoke("doctor", "--json").output


def test_help_and_version_answer_without_loading_torch():
    code = "import sys; from rlcourse import cli; sys.modules['torch'] = None; cli.main()"
    for argument, word in (("--help", "doctor"), ("--version", "rlcourse 0.")):
        done = subprocess.run([sys.executable, "-c", code, argument], capture_output=True, text=True, env=os.environ)
        assert done.returncode == 0 and word in done.stdout, done.stderr


def test_doctor_survives_an_install_without_torch():
    code = "import sys; sys.modules['torch'] = None; from rlcourse import cli; cli.main()"
    done = subprocess.run([sys.executable, "-c", code, "doctor"], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "ModuleNotFoundError" in done.stdout and "pip install" in done.stdout
