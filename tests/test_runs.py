"""A run's folder: its name, its lines, and what of them survives a kill."""

import json
import shlex
import sys

import pytest
import torch

from rlcourse.config import make_config
from rlcourse.experience import Experience
from rlcourse.runs import RunFolder, open_run, read_lines, write_json, write_text
from rlcourse.tasks import Problem
from rlcourse.tasks.verify import verify


@pytest.fixture
def config(tmp_path):
    return make_config(output=str(tmp_path))


@pytest.fixture
def run(tmp_path, config) -> RunFolder:
    return RunFolder(tmp_path, config)


def experience(rows: int) -> Experience:
    """Rows that can be told apart: row i asks i."""
    problems = [Problem(f"question {i}", "#### 1", str(i)) for i in range(rows)]
    texts, verdicts = [f"text {i}" for i in range(rows)], [verify("#### 1", "1")] * rows
    return Experience(None, problems, texts, verdicts, torch.arange(rows) / 2, groups_with_signal=1.0)


def metrics(step: int):
    return {"step": step, "reward": 0.5, "length_right": None, "timing": {"step_s": 1.0}}


def test_a_default_name_that_is_taken_gets_a_number(config, tmp_path):
    paths = [open_run(config, resume=False).path for _ in range(3)]
    name = "laptop-dr_grpo-seed0"
    assert paths == [tmp_path / name, tmp_path / f"{name}-2", tmp_path / f"{name}-3"]
    assert json.loads((paths[2] / "config.json").read_text()) == config.to_dict()


def test_resume_without_a_name_takes_the_latest_run(config):
    paths = [open_run(config, resume=False).path for _ in range(2)]
    assert open_run(config, resume=True).path == paths[1]


def test_resume_with_a_name_takes_that_very_run(config, tmp_path):
    first, _ = [open_run(config, resume=False).path for _ in range(2)]
    assert open_run(make_config(output=str(tmp_path), name=first.name), resume=True).path == first


@pytest.mark.parametrize("change", [{"steps": 90}, {"save_every": 5}, {"device": "cpu"}])
def test_settings_that_do_not_change_the_metrics_may_change(change, config, tmp_path):
    path = open_run(config, resume=False).path
    changed = make_config(output=str(tmp_path), **change)
    assert open_run(changed, resume=True).path == path
    assert json.loads((path / "config.json").read_text()) == changed.to_dict()


@pytest.mark.parametrize("change", [{"lr": 0.1}, {"algorithm": "ppo"}, {"num_prompts": 3, "name": "laptop-x"}])
def test_settings_that_change_the_metrics_may_not(change, tmp_path):
    name = {"name": change.get("name", "laptop-x")}
    open_run(make_config(output=str(tmp_path), **name), resume=False)
    with pytest.raises(ValueError, match="was started with other settings"):
        open_run(make_config(output=str(tmp_path), **(name | change)), resume=True)


def test_a_folder_that_is_no_run_is_not_resumed(tmp_path):
    (tmp_path / "notes").mkdir()
    with pytest.raises(FileNotFoundError, match="notes is not the folder of a run: it has no config"):
        open_run(make_config(output=str(tmp_path), name="notes"), resume=True)


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed_is_named_and_leaves_no_run(tracker, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"{tracker} is not installed: `python -m pip install {tracker}`"):
        open_run(make_config(output=str(tmp_path), log_to=tracker), resume=False)
    assert not list(tmp_path.iterdir())


def test_trackers_get_the_numbers_of_steps_and_validations(run):
    seen = []
    run.tracker = lambda *call: seen.append(call)
    run.log_step(metrics(3), experience(2))
    run.log_eval({"step": 3, "accuracy": 0.25})
    assert [(step, group) for step, group, _ in seen] == [(3, "train"), (3, "validation")]
    assert seen[0][2]["step_s"] == 1.0 and seen[1][2]["accuracy"] == 0.25


@pytest.mark.parametrize(("rows", "expected"), [(1, [0]), (4, [0, 1, 2, 3]), (7, [0, 1, 2, 3]), (12, [0, 3, 6, 9])])
def test_up_to_four_samples_a_step_are_kept_each_with_its_own_reward(run, rows, expected):
    run.log_step(metrics(1), experience(rows))
    assert read_lines(run.path / "samples.jsonl") == [
        {"step": 1, "question": f"question {i}", "gold": str(i), "text": f"text {i}", "reward": i / 2} for i in expected
    ]


def test_lines_after_a_checkpoint_are_forgotten(run):
    for step in (1, 2, 3, 4):
        run.log_step(metrics(step), experience(2))
    for step in (0, 2, 4):
        run.log_eval({"step": step, "accuracy": 0.5})
    run.forget_after(2)
    assert read_lines(run.path / "metrics.jsonl") == [metrics(1), metrics(2)]
    assert [line["step"] for line in read_lines(run.path / "samples.jsonl")] == [1, 1, 2, 2]
    assert [line["step"] for line in read_lines(run.path / "evals.jsonl")] == [0, 2]
    assert run.has_eval(2) and not run.has_eval(4) and not run.has_eval(1)


def test_a_last_line_that_a_kill_cut_short_is_left_out_and_lost_on_resume(run):
    path = run.path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "rew')
    assert read_lines(path) == [{"step": 1}, {"step": 2}]
    run.forget_after(3)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_lines_of_a_file_that_is_not_there_are_none(tmp_path):
    assert read_lines(tmp_path / "metrics.jsonl") == []


def test_numbers_come_back_to_the_last_digit(tmp_path):
    value = {"a": 0.1 + 0.2, "b": 1e-300, "c": None}
    write_json(tmp_path / "x.json", value)
    assert json.loads((tmp_path / "x.json").read_text()) == value


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    write_text(tmp_path / "x.json", "old")
    monkeypatch.setattr("os.replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_text(tmp_path / "x.json", "new")
    assert (tmp_path / "x.json").read_text() == "old"


def test_a_folder_is_removed_only_if_its_run_never_began(run):
    for name in ("metrics.jsonl", "checkpoints"):
        (run.path / name).mkdir()
        run.remove_unless_begun()
        assert run.path.exists()
        (run.path / name).rmdir()
    run.remove_unless_begun()
    assert not run.path.exists()


def test_the_resume_command_repeats_the_command_line(run, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/rlcourse", "train", "--resume", "--name", "my run"])
    assert shlex.split(run.resume_command()) == ["rlcourse", "train", "--name", "my run", "--resume"]


def test_finish_writes_the_summary_and_the_curve(run):
    run.log_step(metrics(1) | {"length": 3.0, "entropy": None}, experience(1))
    run.finish({"accuracy_after": 0.5})
    assert json.loads((run.path / "summary.json").read_text()) == {"accuracy_after": 0.5}
    assert (run.path / "curve.png").stat().st_size > 1000
