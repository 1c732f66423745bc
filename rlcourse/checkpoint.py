"""Checkpoints: a transformers model folder plus `trainer.pt`, written aside and renamed, so that none is ever half
there."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from rlcourse.policy import Policy

KEPT = 2  # checkpoints of a run that stay on disk


def save_checkpoint(run_folder: Path, step: int, policy: Policy, state: dict[str, Any]) -> Path:
    """Write `checkpoints/step-000020` with the model, its tokenizer and `state`, then drop all but the newest two."""
    checkpoints = run_folder / "checkpoints"
    final = checkpoints / f"step-{step:06d}"
    aside = checkpoints / f".writing-step-{step:06d}"
    replaced = checkpoints / f".replaced-step-{step:06d}"
    for leftover in (aside, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    aside.mkdir(parents=True)
    policy.model.save_pretrained(aside)
    policy.tokenizer.save_pretrained(aside)
    torch.save(state, aside / "trainer.pt")
    if final.exists():  # moved, not deleted here: a kill would leave half of it, under the name of the latest
        os.replace(final, replaced)
    os.replace(aside, final)
    shutil.rmtree(replaced, ignore_errors=True)
    for old in _checkpoints(run_folder)[:-KEPT]:
        shutil.rmtree(old)
    return final


def latest_checkpoint(run_folder: Path) -> Path:
    """The newest complete checkpoint of a run. Raises FileNotFoundError if there is none."""
    found = _checkpoints(run_folder)
    if not found:
        raise FileNotFoundError(
            f"{run_folder} was stopped before its first checkpoint: delete the folder and start without --resume."
        )
    return found[-1]


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The `state` that `save_checkpoint` was given, tensors on the CPU."""
    return torch.load(checkpoint / "trainer.pt", map_location="cpu", weights_only=True)


def _checkpoints(run_folder: Path) -> list[Path]:
    return sorted((run_folder / "checkpoints").glob("step-*"))


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """State of torch's global generators."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
