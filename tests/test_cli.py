"""The command line: every setting is an option, errors are one sentence, and the trainer gets what was asked for."""

import os
import shlex
import subprocess
import sys
from dataclasses import fields

import pytest
import typer
from typer.testing import CliRunner

from rlcourse import cli, doctor, evaluation, memory
from rlcourse import train as trainer
from rlcourse.config import EVALUATION, TrainConfig, make_config
from rlcourse.measure.shapes import model_shape
from rlcourse.settings import field_type
from rlcourse.sft import trainer as fine_tuning
from rlcourse.sft.config import make_config as make_sft_config

RESULT = {"accuracy": 0.4, "accuracy_lenient": 0.5, "pass@8": 0.75, "tokens": 20.0}
SUMMARY = {
    **{"eval_problems": 1000, "wall_seconds": 90.0, "steps": 60, "steps_that_changed_weights": 60, "folder": "runs/x"},
    **{"warnings": {}, "metrics": {"accuracy": ".1%", "accuracy_lenient": ".1%"}, "before": RESULT},
    "after": RESULT | {"samples": [{"question": "1+1?", "gold": "2", "text": "[2]\n#### 2", "right": True}]},
}


def invoke(*arguments, width=200):
    return CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": str(width), "TERMINAL_WIDTH": str(width)})


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """Outputs are tried before anything is trained: in a folder of their own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def trained(monkeypatch):
    """What reaches the trainer: the config of a new run, the settings of one to resume."""
    calls = []
    monkeypatch.setattr(trainer, "train", lambda config, began: calls.append(config) or SUMMARY)
    monkeypatch.setattr(trainer, "resume", lambda **settings: calls.append(settings) or SUMMARY)
    return calls


def other_value(f):
    """A valid value of a field that differs from its default, as typed and as Python."""
    if f.metadata["choices"]:
        return next(choice for choice in f.metadata["choices"] if choice != f.default)
    special = {"preset": "h200", "algorithm": "ppo", "num_generations": 4, "surrogate": "cispo", "task": "gsm8k"}
    special |= {"engine": "vllm@http://host:8000", "judge": "model@http://host:8000/v1"}
    if f.name in special:
        return special[f.name]
    kind = field_type(f)
    return "text" if kind is str else not f.default if kind is bool else f.default + 1 if kind is int else 0.25


@pytest.mark.parametrize("f", fields(TrainConfig), ids=lambda f: f.name)
def test_every_setting_can_be_set(f, trained):
    value, flag = other_value(f), "--" + f.name.replace("_", "-")
    arguments = [flag, str(value)]
    if field_type(f) is bool:
        arguments = [flag if value else "--no-" + flag[2:]]
    result = invoke("train", *arguments)
    assert result.exit_code == 0, result.output
    [config] = trained
    assert getattr(config, f.name) == value
    assert config == make_config(**{f.name: value})  # and nothing else has changed


def test_resume_gets_what_was_said_and_nothing_else(trained):
    invoke("train", "--steps", "90", "--no-compile", "--resume")
    invoke("train", "--resume")
    assert trained == [{"steps": 90, "compile": False}, {}]


def test_dry_run_prints_config_and_memory_and_trains_nothing(trained):  # a GPU's preset, on whatever machine this is
    result = invoke("train", "--preset", "a10g", "--lr", "0.25", "--dry-run")
    assert result.exit_code == 0 and trained == []
    cells = [[cell.strip() for cell in line.split("│")] for line in result.output.splitlines() if "│" in line]
    rows = {name: value for _, name, value, *_ in cells}
    config = make_config("a10g", lr=0.25)
    assert {f.name: str(getattr(config, f.name)) for f in fields(TrainConfig)}.items() <= rows.items()
    needed = memory.estimate(config, model_shape(config.model), "cuda")
    assert f"update {needed.update / 1e9:.3g} GB" in result.output
    assert "494,032,768 parameters" in result.output


def test_dry_run_of_several_ranks_says_what_each_has_to_hold(trained, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    result = invoke("train", "--preset", "h200", "--num-prompts", "32", "--dry-run")  # one rank has 11
    config = make_config("h200", num_prompts=11)
    needed = memory.estimate(config, model_shape(config.model), "cuda")
    assert f"rollout {needed.rollout / 1e9:.3g} GB" in result.output and "each of 3 processes" in result.output


def test_torchrun_is_refused_for_what_has_one_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = invoke("sft")
    assert result.exit_code == 2 and "start this command without it" in result.stderr


@pytest.mark.parametrize(("healthy", "code"), [(True, 0), (False, 1)])
def test_doctor_exits_with_1_if_something_required_is_missing(monkeypatch, healthy, code):
    check = {"name": "x", "ok": healthy, "required": True, "detail": "", "mend": "mend it"}
    facts = doctor.gather() | {"checks": [check]}
    monkeypatch.setattr(doctor, "gather", lambda: facts)
    result = invoke("doctor")
    assert result.exit_code == code and ("mend it" in result.output)


def test_eval_measures_the_model_that_was_asked_for(monkeypatch):
    seen = []
    result = {"problems": 7, "accuracy": 0.25, "speedup": 1.25, "share": None, "pass@4": 0.5, "tokens": 21.25}
    result |= {"metrics": {"accuracy": ".1%", "speedup": ".2f", "share": ".1%"}}
    result["samples"] = [{"question": "What is [1]?", "text": "It is [/x].", "right": False}]
    monkeypatch.setattr(evaluation, "evaluate", lambda config: seen.append(config) or result)
    done = invoke("eval", "--model", "some/folder", "--eval-problems", "7")
    assert done.exit_code == 0 and seen == [make_config(model="some/folder", eval_problems=7)]
    sample, *rows = [[cell.strip() for cell in line.split("│")] for line in done.output.splitlines() if "│" in line]
    assert sample[1:4] == ["What is [1]?", "It is [/x].", "no"]
    assert [row[2] for row in rows] == ["25.0%", "1.25", "–", "50.0%", "21.2"]


def test_eval_takes_the_settings_that_it_reads_and_refuses_the_others():
    seen = set()

    class Config(TrainConfig):
        def __getattribute__(self, name):
            seen.add(name)
            return super().__getattribute__(name)

    evaluation.evaluate(Config(eval_problems=2, pass_k=2, max_new_tokens=2))
    read = seen & {f.name for f in fields(TrainConfig)}
    of_training = {"num_prompts", "shard", "reward_format"}  # read on the way, and of no effect
    assert read - of_training == {*EVALUATION} - {"preset"}
    offered = invoke("eval", "--help").output
    for name in ("lr", "steps", "kl_coef", "shard"):
        flag = "--" + name.replace("_", "-")
        assert flag not in offered and flag in invoke("train", "--help").output
        done = invoke("eval", flag, *["1"] * (name != "shard"))
        assert done.exit_code == 2 and done.stderr == f"{flag} has no effect here: leave it out.\n"


def test_the_numbers_of_a_table_stay_whole_in_a_narrow_terminal(trained, monkeypatch):
    monkeypatch.setattr(evaluation, "evaluate", lambda config: RESULT | {"problems": 7, "metrics": SUMMARY["metrics"]})
    monkeypatch.setattr(fine_tuning, "fine_tune", lambda config: LEARNED)
    numbers = {"train": ("40.0%", "75.0%", "20.0"), "eval": ("40.0%", "20.0"), "sft": ("0.125", "100.0%")}
    for command, expected in numbers.items():
        output = invoke(command, width=20).output
        assert all(number in output for number in expected), output


LEARNED = {"examples": 4000, "learned": 4000, "held_out": 200, "wall_seconds": 9.0}
LEARNED |= {"steps": 63, "steps_that_changed_weights": 60}
LEARNED |= {"folder": "runs/[sft]", "warnings": {"known": "It knew [all] of it."}, "metrics": SUMMARY["metrics"]}
LEARNED |= {
    "before": {"loss": 0.5, "accuracy": 0.25, "accuracy_lenient": 0.25},
    "after": {"loss": 0.125, "accuracy": 0.75, "accuracy_lenient": 1.0},
}


@pytest.mark.parametrize(
    ("steps", "changed", "said"),
    [(1, 1, "1 step in 90 s. The weights changed in the one step."), (1, 0, "changed in 0 of 1 step."),
     (60, 60, "60 steps in 90 s. The weights changed in all 60 steps.")],
)  # fmt: skip
def test_a_run_of_one_step_is_not_called_steps(steps, changed, said, monkeypatch):
    summary = SUMMARY | {"steps": steps, "steps_that_changed_weights": changed}
    monkeypatch.setattr(trainer, "train", lambda config, began: summary)
    assert said in invoke("train").output


def test_sft_takes_its_options_and_says_what_it_achieved(monkeypatch):
    calls = []
    monkeypatch.setattr(fine_tuning, "fine_tune", lambda config: calls.append(config) or LEARNED)
    done = invoke("sft", "--data", "chats.jsonl", "--lora-rank", "8", "--no-packing", "--task", "gsm8k", "--seed", "9")
    options = {"data": "chats.jsonl", "lora_rank": 8, "packing": False, "task": "gsm8k", "seed": 9}
    assert calls == [make_sft_config(**options)]
    for text in ("0.500", "0.125", "25.0%", "75.0%", "runs/[sft]", "1 warning is above", "changed in 60 of 63"):
        assert text in done.output
    assert "examples: 4,000 learned" in done.output
    monkeypatch.setattr(fine_tuning, "resume", lambda **settings: calls.append(settings) or LEARNED)
    assert invoke("sft", "--resume", "--name", "mine", "--steps", "80").exit_code == 0
    assert calls[1:] == [{"name": "mine", "steps": 80}]  # and nothing that wasn't said


def test_sft_counts_the_examples_that_its_steps_got_to_and_prints_no_empty_table(monkeypatch):
    summary = LEARNED | {"learned": 640}
    monkeypatch.setattr(fine_tuning, "fine_tune", lambda config: summary)
    assert "examples: 640 of 4,000 learned" in invoke("sft", "--steps", "10").output
    summary |= {"before": {}, "after": {}}
    output = invoke("sft").output
    assert "measure" not in output and "63 steps in 9 s." in output


def test_doctor_survives_an_install_without_torch():
    code = "import sys; sys.modules['torch'] = None; from rlcourse import cli; cli.main()"
    done = subprocess.run([sys.executable, "-c", code, "doctor"], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "ModuleNotFoundError" in done.stdout and "pip install" in done.stdout


def test_no_command_at_all_prints_the_help_and_no_error():
    done = invoke()
    assert done.exit_code == 2 and "Commands" in done.stdout and done.stderr == ""


def test_a_commands_help_breaks_lines_where_the_terminal_ends_and_its_example_works():
    for name, command in typer.main.get_command(cli.app).commands.items():
        assert "\n" not in command.help.replace("\n\n", ""), name
        program, called, *arguments = shlex.split(command.epilog.removeprefix("Example: "))
        assert (program, called) == ("rlcourse", name)
        command.make_context(name, arguments)
