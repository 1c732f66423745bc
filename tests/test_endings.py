"""How a run ends where it must, and which of its files cannot be gone on from: nothing that was saved is lost."""
# ruff: noqa: F811 (fixtures of toy.py)

import errno
import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from toy import TOY, assert_same_run, at_step, end_of, folder, fork, lines, tiny, use_the_toy, whole_run  # noqa: F401

from rlcourse import files
from rlcourse import train as trainer
from rlcourse.checkpoint import latest_checkpoint, load_state
from rlcourse.config import make_config
from rlcourse.policy import load_policy
from rlcourse.tasks import Problem
from rlcourse.train import resume, train


@pytest.fixture(autouse=True)
def _toy(monkeypatch):
    use_the_toy(monkeypatch)


@pytest.fixture
def run(whole_run, tmp_path):
    """A copy of a finished run of 7 steps, with checkpoints of steps 6 and 7, that a test may break."""
    return shutil.copytree(whole_run, tmp_path / "run")


def contents(folder) -> dict[str, bytes]:
    """Every file, but for the process that is asking."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def refusal(run, kind=ValueError, **settings) -> str:
    """The one sentence with which a run is not resumed; all of its files stay as they are."""
    before = contents(run)
    with pytest.raises(kind) as caught:
        resume(name="run", output=str(run.parent), **settings)
    assert "\n" not in str(caught.value) and str(run) in str(caught.value)
    assert contents(run) == before
    return str(caught.value)


# What stops being finite


def test_a_number_that_is_not_finite_ends_the_run_and_the_last_good_checkpoint_stays(tiny, tmp_path, monkeypatch):
    original = trainer.train_step

    def step(*arguments):
        metrics, completions = original(*arguments)
        return metrics | ({"entropy": float("inf")} if arguments[-1] == 4 else {}), completions

    monkeypatch.setattr(trainer, "train_step", step)
    with pytest.raises(RuntimeError, match=r"^Step 5 ended the run: entropy stopped being finite\..* lower --lr\.$"):
        train(make_config(**tiny))
    assert [line["step"] for line in lines(tmp_path / "run")["metrics"]] == [1, 2, 3, 4]
    assert latest_checkpoint(tmp_path / "run").name == "step-000003"
    assert not (tmp_path / "run" / "summary.json").exists()
    load_policy(str(latest_checkpoint(tmp_path / "run")))


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(whole_run, tiny, tmp_path, monkeypatch):
    kind = type(load_policy(tiny["model"]).model)
    keep = kind.save_pretrained

    def full_at_step_6(model, path):
        if "6" in str(path).rpartition("step-")[2]:
            raise OSError(errno.ENOSPC, "No space left on device")
        keep(model, path)

    sentence = r"^The checkpoint of step 6 cannot be written to .*/run/checkpoints \(.*\): make room there, and go on"
    with monkeypatch.context() as patch, pytest.raises(OSError, match=sentence):
        patch.setattr(kind, "save_pretrained", full_at_step_6)
        train(make_config(**tiny))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000003"]
    resume(name="run", output=str(tmp_path))  # once there is room
    assert_same_run(tmp_path / "run", whole_run)


def test_a_disk_without_room_for_a_checkpoint_is_found_before_training(tiny, tmp_path, monkeypatch):
    usage = files.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    monkeypatch.setattr(trainer, "train_step", None)
    with pytest.raises(OSError, match=r"0\.1 MB are free, 0\.\d MB are needed\): choose another --output"):
        train(make_config(**tiny))
    assert not (tmp_path / "run").exists()


# Damaged runs


DAMAGE = {
    "missing": lambda file: file.unlink(),
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", ["trainer.pt", "model.safetensors"])
def test_a_damaged_checkpoint_is_named_with_the_way_on(name, how, run, tmp_path):
    checkpoint = latest_checkpoint(run)
    DAMAGE[how](checkpoint / name)
    why = f"No weights in {checkpoint}" if (name, how) == ("model.safetensors", "missing") else f"{name} cannot be read"
    said = refusal(run)
    assert said.startswith(f"The checkpoint {checkpoint} is damaged (") and why in said
    assert said.endswith("): delete that folder to go on from step-000006.")
    shutil.rmtree(checkpoint)
    assert resume(name="run", output=str(tmp_path))["steps"] == 7


def test_a_run_that_needs_far_more_memory_than_there_is_ends_before_it_computes(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("rlcourse.memory.machine.memory_bytes", lambda: 10**8)
    monkeypatch.setattr(trainer, "train_step", None)
    with pytest.raises(ValueError, match=r"^This run needs up to .* of memory, and there are 100 MB: lower --num-"):
        train(make_config(**tiny))
    assert not (tmp_path / "run").exists()


def test_a_pickle_of_something_else_is_refused_and_not_run(run, tmp_path):
    class Foreign:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "was run"),)

    torch.save({"step": 7, "optimizer": Foreign()}, latest_checkpoint(run) / "trainer.pt")
    assert "trainer.pt cannot be read" in refusal(run)
    assert not (tmp_path / "was run").exists()


CHANGES = {
    "another step": lambda state: state.update(step=3),
    "no seconds": lambda state: state.pop("seconds"),
    "no random state": lambda state: state.update(random={"cpu": torch.zeros(3)}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_training_state_that_does_not_fit_is_named(change, run):
    state = load_state(latest_checkpoint(run))
    CHANGES[change](state)
    torch.save(state, latest_checkpoint(run) / "trainer.pt")
    assert "is damaged (trainer.pt does not fit the model and the run): delete that folder" in refusal(run)


def with_problems(change):
    return lambda patch, run, tiny: patch.setattr(trainer, "task_of", lambda config: replace(TOY, **change(TOY)))


def add_to_the_weights(folder) -> None:
    policy = load_policy(str(folder))
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[::2] += 0.1
    policy.model.save_pretrained(folder)


OTHERS = {
    "a problem less": (with_problems(lambda toy: {"train": toy.train[:-1]}), "data"),
    "another order": (with_problems(lambda toy: {"train": toy.train[::-1]}), "data"),
    "another gold answer of a test": (
        with_problems(lambda toy: {"test": [*toy.test[:-1], Problem("34", "", "1", 0)]}),
        "data",
    ),
    "another instruction": (with_problems(lambda toy: {"instruction": "Count."}), "data"),
    "another template": (
        lambda patch, run, tiny: (latest_checkpoint(run) / "chat_template.jinja").write_text(
            "{{ messages[0].content }}"
        ),
        "tokenizer or chat template",
    ),
    "other weights": (lambda patch, run, tiny: add_to_the_weights(latest_checkpoint(run)), "saved model or its base"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_run_does_not_go_on_with_something_else(what, run, tiny, monkeypatch):
    change, name = OTHERS[what]
    change(monkeypatch, run, tiny)
    assert refusal(run) == f"The {name} is not what {run} had: bring that back, or start a new run."


@pytest.mark.parametrize(
    ("options", "name"),
    [({"lora_rank": 2}, "saved model or its base"), ({"algorithm": "grpo", "kl_coef": 0.1}, "base model")],
)
def test_a_run_does_not_go_on_with_another_base(options, name, folder, tiny, tmp_path):
    base = shutil.copytree(folder, tmp_path / "base")
    train(make_config(**tiny | options | {"model": str(base), "steps": 1, "eval_every": 0, "pass_k": 0}))
    add_to_the_weights(base)
    assert f"The {name} is not what" in refusal(tmp_path / "run", steps=2)


@pytest.mark.parametrize("change", [lambda lines: lines[1:], lambda lines: lines + lines[-1:], lambda lines: []])
def test_a_run_without_the_log_of_a_step_does_not_go_on(change, run):
    file = run / "metrics.jsonl"
    file.write_text("".join(change(file.read_text().splitlines(keepends=True))))
    said = refusal(run, steps=9)
    assert said == f"{file} doesn't have each step from 1 to 7 once: restore it, or start a new run."


def test_a_line_of_a_log_without_its_step_is_refused(run):
    with (run / "evals.jsonl").open("a") as file:
        file.write('{"accuracy": 1.0}\n')
    assert refusal(run) == f"{run / 'evals.jsonl'} has a line without its step: take it out, or start a new run."


def test_fewer_steps_than_a_run_has_done_are_refused(run):
    assert refusal(run, steps=2).endswith("run has done 7 steps, more than --steps 2: ask for more.")
    assert json.loads((run / "config.json").read_text())["steps"] == 7
