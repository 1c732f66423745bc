"""A run as a whole, on the embedded model with tiny sizes: what it leaves behind, how it stops and how it goes on."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from rlcourse import cli
from rlcourse.checkpoint import latest_checkpoint
from rlcourse.config import make_config
from rlcourse.paths import data_folder
from rlcourse.runs import RunFolder, read_lines
from rlcourse.tasks.minigsm import load
from rlcourse.trainer import StopAfterStep, train
from rlcourse.update import Update

EMBEDDED = data_folder() / "minigsm" / "model"
TINY = {
    "num_prompts": 3,
    "num_generations": 4,
    "max_new_tokens": 40,
    "steps": 7,
    "lr": 1e-3,
    "save_every": 3,
    "eval_every": 2,
    "eval_validation": 4,
    "eval_problems": 6,
    "pass_k": 2,
    "pass_k_problems": 3,
    "name": "run",
    "device": "cpu",  # what a resumed run repeats to the last digit
}
ON_A_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def tiny(output, **overrides):
    return make_config(**(TINY | {"output": str(output)} | overrides))


def start_process(output, **overrides) -> subprocess.Popen:
    """`rlcourse train` with the tiny settings, in a process of its own."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in (TINY | {"output": output} | overrides).items()]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-m", "rlcourse.cli", "train", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for_step(process: subprocess.Popen, run: Path, step: int) -> None:
    for _ in range(24000):
        if len(read_lines(run / "metrics.jsonl")) >= step:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    pytest.fail("the run does not get on")


def lines(run: Path) -> dict[str, list[dict]]:
    """All that a run has logged but its times."""
    logged = {name: read_lines(run / f"{name}.jsonl") for name in ("metrics", "evals", "samples")}
    for line in logged["metrics"]:
        del line["timing"]
    return logged


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> Path:
    """The folder of an uninterrupted run."""
    output = tmp_path_factory.mktemp("whole")
    train(tiny(output))
    return output / "run"


def test_a_run_killed_and_resumed_equals_an_uninterrupted_one_to_the_last_digit(whole_run, tmp_path):
    process = start_process(tmp_path)
    wait_for_step(process, tmp_path / "run", 4)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert latest_checkpoint(tmp_path / "run").name == "step-000003"
    assert 4 <= len(read_lines(tmp_path / "run" / "metrics.jsonl")) < 6  # between two checkpoints
    train(tiny(tmp_path), resume=True)
    assert lines(tmp_path / "run") == lines(whole_run)
    assert sum(line["grad_norm"] > 0 for line in lines(whole_run)["metrics"][3:]) >= 2  # there was something to learn


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("ppo", {"inner_epochs": 2, "minibatches": 2, "schedule": "cosine"}),  # value head, optimizer, random states
        ("dapo", {"kl_coef": 0.1, "num_prompts": 2}),  # uneven draws of problems; the reference is the first policy
    ],
)
def test_a_run_that_dies_and_is_resumed_equals_an_uninterrupted_one(algorithm, options, tmp_path, monkeypatch):
    class PowerCut(BaseException):
        pass

    original = RunFolder.log_step

    def log_step(self, metrics, experience):
        original(self, metrics, experience)
        if metrics["step"] == 3:
            raise PowerCut

    options |= {"steps": 5, "save_every": 2, "pass_k": 0}
    whole, cut = (tiny(tmp_path / name, algorithm=algorithm, **options) for name in ("whole", "cut"))
    train(whole)
    with monkeypatch.context() as patch, pytest.raises(PowerCut):
        patch.setattr(RunFolder, "log_step", log_step)
        train(cut)
    torch.manual_seed(12345)
    train(cut, resume=True)
    assert lines(tmp_path / "cut" / "run") == lines(tmp_path / "whole" / "run")


def test_ctrl_c_finishes_the_step_saves_and_says_how_to_go_on(whole_run, tmp_path):
    process = start_process(tmp_path)
    wait_for_step(process, tmp_path / "run", 2)
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate()
    assert process.returncode == 130 and "Traceback" not in errors
    step, command = re.search(r"Stopped at step (\d+)\. Go on with: (rlcourse train .*--resume)", said).groups()
    assert latest_checkpoint(tmp_path / "run").name == f"step-{int(step):06d}"
    assert [line["step"] for line in lines(tmp_path / "run")["metrics"]] == list(range(1, int(step) + 1))
    assert int(step) < TINY["steps"] and not (tmp_path / "run" / "summary.json").exists()
    result = CliRunner().invoke(cli.app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    assert lines(tmp_path / "run") == lines(whole_run)  # the validation that was still due included


def test_a_second_ctrl_c_stops_at_once_and_saves_no_half_step(tmp_path, monkeypatch, capsys):
    original, calls = Update.__call__, []

    def interrupted(self, experience, step):
        calls.append(step)
        if step == 4:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return original(self, experience, step)

    monkeypatch.setattr(Update, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(tmp_path))
    assert calls == [0, 1, 2, 3, 4]
    assert latest_checkpoint(tmp_path / "run").name == "step-000003"
    said = capsys.readouterr().out
    assert "Finishing this step" in said and "Stopped within step 5" in said


def test_ctrl_c_waits_inside_a_step_alone():
    done = []
    with pytest.raises(KeyboardInterrupt), StopAfterStep() as stop:
        with stop.delayed():
            signal.raise_signal(signal.SIGINT)
            done.append("the step")
        done.append("what comes after")
    assert done == ["the step"]
    with pytest.raises(KeyboardInterrupt), StopAfterStep():
        signal.raise_signal(signal.SIGINT)
        done.append("what comes after")
    assert done == ["the step"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_before_the_first_step_can_be_resumed(whole_run, tmp_path, monkeypatch):
    original = Update.__call__
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("rlcourse.trainer.summarize", lambda answers: signal.raise_signal(signal.SIGINT))
        train(tiny(tmp_path))
    assert Update.__call__ is original and latest_checkpoint(tmp_path / "run").name == "step-000000"
    train(tiny(tmp_path), resume=True)
    assert lines(tmp_path / "run") == lines(whole_run)


def test_the_folder_holds_what_a_run_leaves(whole_run):
    names = {path.name for path in whole_run.iterdir()}
    files = {"config.json", "metrics.jsonl", "samples.jsonl", "evals.jsonl", "curve.png", "summary.json"}
    assert names == files | {"checkpoints"}
    assert sorted(path.name for path in (whole_run / "checkpoints").iterdir()) == ["step-000006", "step-000007"]
    assert json.loads((whole_run / "config.json").read_text()) == tiny(whole_run.parent).to_dict()
    assert (whole_run / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_metrics_evals_and_samples_are_logged_when_they_should_be(whole_run):
    logged = lines(whole_run)
    assert [line["step"] for line in logged["metrics"]] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["step"] for line in logged["evals"]] == [0, 2, 4, 6]
    assert [line["step"] for line in logged["samples"]] == [step for step in range(1, 8) for _ in range(4)]
    for line in read_lines(whole_run / "metrics.jsonl"):
        for name in ("reward", "accuracy", "accuracy_lenient", "grad_norm", "groups_without_signal", "lr", "length"):
            assert line[name] >= 0
        timing = line["timing"]
        phases = sum(timing[f"{phase}_s"] for phase in ("rollout", "reward", "advantages", "update"))
        assert 0.9 * timing["step_s"] < phases <= timing["step_s"]


def test_the_mean_length_lies_between_that_of_right_and_wrong_answers(whole_run):
    for line in lines(whole_run)["metrics"]:
        right, wrong = line["length_right"], line["length_wrong"]
        assert (right is None) == (line["accuracy"] == 0) and (wrong is None) == (line["accuracy"] == 1)
        expected = line["accuracy"] * (right or 0) + (1 - line["accuracy"]) * (wrong or 0)
        assert line["length"] == pytest.approx(expected)


def test_the_summary_says_how_it_went(whole_run):
    summary = json.loads((whole_run / "summary.json").read_text())
    assert summary["eval_problems"] == 6 and summary["seed"] == 0 and summary["steps"] == 7
    assert 0 < summary["wall_seconds"] < 120 and summary["peak_memory_bytes"] > 10**8
    for when in ("before", "after"):
        samples = summary[when]["samples"]
        assert summary[f"accuracy_{when}"] == sum(sample["right"] for sample in samples) / 6
        assert {"pass@1", "pass@2", "accuracy_lenient"} <= summary[when].keys()
    assert [sample["question"] for sample in summary["after"]["samples"]] == [p.question for p in load().test[:6]]


def test_the_trained_checkpoint_loads_with_transformers_and_writes_the_same_greedy_answers(whole_run):
    checkpoint = latest_checkpoint(whole_run)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    assert not torch.equal(model.lm_head.weight, AutoModelForCausalLM.from_pretrained(EMBEDDED).lm_head.weight)
    for sample in json.loads((whole_run / "summary.json").read_text())["after"]["samples"]:
        messages = [{"role": "user", "content": sample["question"]}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        ids = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert tokenizer.decode(ids, skip_special_tokens=True) == sample["text"]


def test_a_learning_rate_of_zero_leaves_every_bit_of_the_weights(tmp_path):
    train(tiny(tmp_path, lr=0.0, steps=3, eval_every=0, pass_k=0))
    trained = AutoModelForCausalLM.from_pretrained(latest_checkpoint(tmp_path / "run"), dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).state_dict()
    assert any(line["grad_norm"] > 0 for line in lines(tmp_path / "run")["metrics"])
    assert all(torch.equal(before[name], value) for name, value in trained.state_dict().items())


def test_another_seed_is_another_run(whole_run, tmp_path):
    train(tiny(tmp_path, seed=1, steps=1, eval_every=0, pass_k=0))
    [first] = [line for line in lines(whole_run)["samples"][:1]]
    assert lines(tmp_path / "run")["samples"][0]["question"] != first["question"]


@ON_A_GPU
def test_a_preset_in_bfloat16_needs_a_gpu():
    with pytest.raises(ValueError, match=r"'h200' computes in bfloat16, which needs a CUDA GPU.*`rlcourse doctor`"):
        train(make_config("h200"))


@ON_A_GPU
def test_device_cuda_needs_a_gpu(tmp_path):
    with pytest.raises(ValueError, match="No CUDA GPU was found"):
        train(tiny(tmp_path, device="cuda"))


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [("tokenizer.json", "No tokenizer in .*: copy"), ("config.json", "No model in .*: a model folder holds config")],
)
def test_a_model_folder_that_lacks_a_file_is_named_and_leaves_no_run(missing, sentence, model_folder, tmp_path):
    shutil.copytree(model_folder, tmp_path / "model")
    (tmp_path / "model" / missing).unlink()
    with pytest.raises(FileNotFoundError, match=sentence):
        train(tiny(tmp_path / "runs", model=str(tmp_path / "model")))
    assert not (tmp_path / "runs" / "run").exists()  # so the same command works once the file is there


def test_prompts_that_are_all_too_long_are_counted(tmp_path):
    with pytest.raises(ValueError, match="Only 0 of 4000 training problems have at most 5 prompt tokens: raise"):
        train(tiny(tmp_path, max_prompt_tokens=5))
    assert not (tmp_path / "run").exists()


def test_completions_that_exceed_the_models_positions_are_refused(tmp_path):
    with pytest.raises(ValueError, match="exceed the model's 512 positions"):
        train(tiny(tmp_path, max_new_tokens=512))
    assert not (tmp_path / "run").exists()


def test_a_run_that_does_not_exist_cannot_be_resumed(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"No run to resume at .*run: start it without --resume"):
        train(tiny(tmp_path), resume=True)


def test_a_run_without_a_checkpoint_cannot_be_resumed(tmp_path):
    RunFolder(tmp_path / "run", tiny(tmp_path)).path.mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps(tiny(tmp_path).to_dict()))
    with pytest.raises(FileNotFoundError, match="stopped before its first checkpoint: delete the folder and start"):
        train(tiny(tmp_path), resume=True)
    assert (tmp_path / "run").exists()


def test_a_run_is_not_resumed_with_other_settings(whole_run):
    with pytest.raises(ValueError, match=r"other settings \(top_k was 0, is 7; lr was 0.001, is 0.5\)"):
        train(tiny(whole_run.parent, lr=0.5, top_k=7), resume=True)


def test_a_name_that_is_taken_is_refused(whole_run):
    with pytest.raises(ValueError, match="run exists: go on with --resume, or choose another --name"):
        train(tiny(whole_run.parent))


def test_a_finished_run_can_be_given_more_steps(whole_run, tmp_path):
    shutil.copytree(whole_run, tmp_path / "run")
    summary = train(tiny(tmp_path, steps=8), resume=True)
    assert summary["steps"] == 8
    assert lines(tmp_path / "run")["metrics"][:7] == lines(whole_run)["metrics"]
    assert [line["step"] for line in lines(tmp_path / "run")["evals"]] == [0, 2, 4, 6, 8]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["steps"] == 8
