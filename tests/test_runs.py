"""A run's folder: its name, its lines, and what of them survives a kill."""

import json
import sys
from unittest.mock import Mock

import pytest
import torch

from rlcourse.collect import Completions
from rlcourse.config import make_config
from rlcourse.files import read_lines, write_json
from rlcourse.runs import RunFolder, make_tracker, new_run, run_to_resume
from rlcourse.sft.config import SFTConfig
from rlcourse.tasks import Answer, Problem
from rlcourse.tasks.verify import verify


@pytest.fixture
def config(tmp_path):
    return make_config(output=str(tmp_path))


@pytest.fixture
def run(tmp_path, config) -> RunFolder:
    return RunFolder(tmp_path, config)


def completions(rows: int) -> Completions:
    """Rows that can be told apart: row i asks i."""
    problems = [Problem(f"question {i}", "#### 1", str(i)) for i in range(rows)]
    answers = [Answer(p, f"text {i}", 1, True, verify("#### 1", "1")) for i, p in enumerate(problems)]
    return Completions(None, answers, torch.arange(rows) / 2)


def metrics(step: int):
    return {"step": step, "reward": 0.5, "length_right": None, "timing": {"step_s": 1.0}}


NAME = "laptop-dr_grpo-seed0"


def settings_of(tmp_path, **more):
    return {"output": str(tmp_path)} | more


def saved(path):
    return json.loads((path / "config.json").read_text())


def test_a_default_name_that_is_taken_gets_a_number(config, tmp_path):
    paths = [new_run(config).path for _ in range(3)]
    assert paths == [tmp_path / NAME, tmp_path / f"{NAME}-2", tmp_path / f"{NAME}-3"]
    assert saved(paths[2]) == config.to_dict()


def test_a_name_given_by_hand_that_is_taken_is_refused(tmp_path):
    config = make_config(output=str(tmp_path), name="mine")
    assert new_run(config).path == tmp_path / "mine"
    with pytest.raises(ValueError, match="mine exists: go on with --resume, or choose another --name"):
        new_run(config)


def test_resume_without_a_name_finds_the_latest_run_by_preset_algorithm_and_seed(tmp_path):
    found = {"preset": "a10g", "algorithm": "ppo", "seed": 3}
    first, second = (new_run(make_config(**settings_of(tmp_path, **found))).path for _ in range(2))
    new_run(make_config(**settings_of(tmp_path)))
    assert run_to_resume(settings_of(tmp_path, **found)).path == second
    assert run_to_resume(settings_of(tmp_path, name=first.name)).path == first
    with pytest.raises(FileNotFoundError, match=r"No run to resume at .*a10g-ppo-seed4: add its --name, or"):
        run_to_resume(settings_of(tmp_path, **found | {"seed": 4}))
    with pytest.raises(FileNotFoundError, match=r"No run to resume at .*frist: check the name and --output\."):
        run_to_resume(settings_of(tmp_path, name="frist"))


def test_what_is_said_on_resuming_is_held_against_the_run_and_not_against_the_defaults(tmp_path):
    """PPO may have one completion a prompt, the default algorithm may not."""
    settings = settings_of(tmp_path, name="x", algorithm="ppo", num_generations=1)
    new_run(make_config(**settings))
    said = settings_of(tmp_path, name="x", num_generations=1, steps=90)
    assert run_to_resume(said).config == make_config(**settings | {"steps": 90})
    with pytest.raises(ValueError, match="steps must be from 1"):
        run_to_resume(said | {"steps": 0})


def test_settings_that_do_not_change_the_metrics_may_change(tmp_path):
    change = {"steps": 90, "save_every": 5, "device": "cpu"}
    path = new_run(make_config(**settings_of(tmp_path, lr=0.25))).path
    run = run_to_resume(settings_of(tmp_path, **change))
    assert run.path == path and run.config == make_config(**settings_of(tmp_path, lr=0.25, **change))
    assert saved(path) == make_config(**settings_of(tmp_path, lr=0.25)).to_dict()  # nothing has been loaded yet
    run.keep_config()
    assert saved(path) == run.config.to_dict()


def test_settings_that_change_the_metrics_may_not(tmp_path):
    path = new_run(make_config(**settings_of(tmp_path, name="x"))).path
    before, change = saved(path), {"top_k": 7, "num_prompts": 3, "steps": 9}
    sentence = r"x was started with other settings \(top_k was 0, is 7; num_prompts was 16, is 3\): resume with the"
    with pytest.raises(ValueError, match=sentence):
        run_to_resume(settings_of(tmp_path, name="x", **change))
    assert saved(path) == before


def test_a_run_of_another_version_is_not_resumed(tmp_path):
    path = new_run(make_config(**settings_of(tmp_path, name="x"))).path
    by_rows = {"micro_batch_rows" if k == "micro_batch_tokens" else k: v for k, v in saved(path).items()}
    for changed in (saved(path) | {"old_setting": 1}, {k: v for k, v in saved(path).items() if k != "lr"}, by_rows):
        write_json(path / "config.json", changed)
        with pytest.raises(ValueError, match="was made by another version of rlcourse: start a new run"):
            run_to_resume(settings_of(tmp_path, name="x"))
    with pytest.raises(ValueError, match=r"x is a run of `rlcourse train`: resume it with that\.$"):
        run_to_resume(settings_of(tmp_path, name="x"), SFTConfig)


@pytest.mark.parametrize(("rows", "expected"), [(1, [0]), (4, [0, 1, 2, 3]), (7, [0, 1, 2, 3]), (12, [0, 3, 6, 9])])
def test_up_to_four_samples_a_step_are_kept_each_with_its_own_reward(run, rows, expected):
    run.log_step(metrics(1), completions(rows))
    assert read_lines(run.path / "samples.jsonl") == [
        {"step": 1, "question": f"question {i}", "gold": str(i), "text": f"text {i}", "reward": i / 2} for i in expected
    ]


def test_a_warning_that_a_kill_cut_short_is_said_again(run):
    run.warn(1, {"a": "A."})
    with (run.path / "warnings.jsonl").open("a") as file:
        file.write('{"step": 2, "ki')
    run.log_step(metrics(1), completions(1))
    assert run.go_on_from(1) == [metrics(1)]
    run.warn(3, {"b": "B."})
    assert run.warned() == {"a": "A.", "b": "B."}


def test_a_run_that_is_killed_while_it_draws_is_not_finished(run, monkeypatch):
    def kill(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("rlcourse.measure.plots.plot_run", kill)
    with pytest.raises(KeyboardInterrupt):
        run.finish({"metrics": {}}, "RL")
    assert not (run.path / "summary.json").exists()


def test_a_tracker_gets_numbers_alone(tmp_path, monkeypatch):
    wandb = Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    track = make_tracker(tmp_path, make_config(log_to="wandb"))
    track(4, "train", {"a": 1.5, "b": None, "c": {"d": 1}, "e": 2})
    wandb.init.return_value.log.assert_called_once_with({"train/a": 1.5, "train/e": 2}, step=4)
