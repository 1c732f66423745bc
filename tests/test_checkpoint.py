"""Checkpoints: whole or not there, two of them, and every bit of the state comes back."""

import pytest
import torch

from rlcourse import checkpoint, files
from rlcourse.checkpoint import latest_checkpoint, load_state, save_checkpoint

STATE = {"step": 3, "seconds": 1.25, "before": {"accuracy": 1 / 3, "samples": [{"text": "a", "right": True}]}}


def test_only_the_newest_are_kept_and_a_folder_with_another_name_is_left_alone(policy, tmp_path):
    mine = [tmp_path / "checkpoints" / f"step-{name}" for name in ("000001.best", "2000009-copy", "x", "")]
    for folder in mine:
        folder.mkdir(parents=True)
    for step in (2, 999_999, 1_000_000, 20):  # by number, not by name or age
        save_checkpoint(tmp_path, step, policy, {"step": step})
    assert latest_checkpoint(tmp_path).name == "step-1000000"
    assert load_state(latest_checkpoint(tmp_path)) == {"step": 1_000_000}
    found = {folder.name for folder in (tmp_path / "checkpoints").iterdir()}
    assert found == {"step-999999", "step-1000000", *(folder.name for folder in mine)}


@pytest.mark.parametrize("what", ["weights", "value_head", "moments"])
def test_a_number_that_is_not_finite_is_not_saved(what, policy, tmp_path):
    numbers = torch.tensor([1.0, torch.nan])
    state = {"value_head": {"weight": numbers}} if what == "value_head" else {}
    if what == "moments":
        state = {"optimizer": {"state": {0: {"exp_avg": numbers}}}}
    if what == "weights":
        with torch.no_grad():
            policy.model.get_input_embeddings().weight[0, 0] = torch.nan
    with pytest.raises(RuntimeError, match="The weights are no longer finite"):
        save_checkpoint(tmp_path, 3, policy, state)
    assert not (tmp_path / "checkpoints").exists()


def test_an_interrupted_save_leaves_the_old_checkpoint_usable(policy, tmp_path, monkeypatch):
    """The weights of the new one are on disk already when a kill, which leaves them there, stops it."""
    save_checkpoint(tmp_path, 3, policy, STATE)

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint.torch, "save", stop)
        patch.setattr(files.shutil, "rmtree", lambda *_, **__: None)
        save_checkpoint(tmp_path, 4, policy, STATE)
    assert any((tmp_path / "checkpoints").glob("step-000004.writing/*"))
    assert latest_checkpoint(tmp_path).name == "step-000003" and load_state(latest_checkpoint(tmp_path)) == STATE
    for step in (5, 4):  # what lies about is deleted
        save_checkpoint(tmp_path, step, policy, {"step": step})
        assert not any((tmp_path / "checkpoints").glob("*.writing"))


def test_a_checkpoint_is_never_replaced_so_that_no_kill_finds_it_away(policy, tmp_path, monkeypatch):
    saved = save_checkpoint(tmp_path, 3, policy, {"seconds": 1})
    monkeypatch.setattr(files.os, "replace", None)
    assert save_checkpoint(tmp_path, 3, policy, {"seconds": 2}) == saved and load_state(saved) == {"seconds": 1}
