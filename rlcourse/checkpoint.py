"""Checkpoints: a transformers model folder, or an adapter's in peft's format, plus `trainer.pt`; written under another
name and then renamed, so that none is ever incomplete."""

import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rlcourse.dist import local_tensor
from rlcourse.files import digest_of, new_folder, reason
from rlcourse.lora import ALL_LINEAR, ALPHA, add_adapter, has_adapter
from rlcourse.model_files import PROBES
from rlcourse.policy import Policy, digest, load_policy
from rlcourse.runs import RunFolder

FULL = 1_000_000  # bytes: with less, a disk is full
KEPT = 2  # checkpoints that stay; older ones are deleted


def belongs_to(training: Any, model: PreTrainedModel) -> dict[str, str | None]:
    """Digests of what a run must go on with, by name. model: its own, perhaps gathered."""
    tokenizer = training.policy.tokenizer
    tokens = tokenizer([*PROBES], add_special_tokens=False)["input_ids"]
    words = digest_of([tokenizer.chat_template, training.policy.eos_ids, tokens])
    named = {"tokenizer or chat template": words, "data": training.data_digest, "base model": training.reference_digest}
    return named | {"saved model or its base": digest(model)}


def save(training: Any) -> None:
    """Write a checkpoint of a `TrainingLoop`. All ranks call it."""
    with saving_in_background(training):
        pass


@contextmanager
def saving_in_background(training: Any) -> Iterator[None]:
    """Write a checkpoint while something else runs that leaves model and optimizer alone."""
    training.seconds = time.perf_counter() - training.clock
    began, head = time.perf_counter(), training.value_head
    state = {"step": training.step, "seconds": training.seconds, "before": training.test_before}
    state |= {"optimizer": training.optimizer.state_dict(), "value_head": head and head.state_dict()}
    state |= {"sampled": training.data_sampler.position, "spent": dict(training.spent.seconds)}
    state["random"] = {"cpu": torch.get_rng_state()}
    if training.device.type == "cuda":
        state["random"]["cuda"] = torch.cuda.get_rng_state(training.device)
    policy, state = training.world.gather_state(training.policy, state)
    with ThreadPoolExecutor(1) as aside:
        writing = []
        if training.world.rank == 0:  # the others have the same
            state["belongs_to"] = belongs_to(training, policy.model)
            writing = [aside.submit(save_checkpoint, training.run.path, training.step, policy, state)]
        busy = time.perf_counter()
        yield
        busy = time.perf_counter() - busy
        for written in writing:
            written.result()
    training.spent.seconds["saving"] += time.perf_counter() - began - busy


def restore(training: Any) -> None:
    """Take back what `save` wrote, but for the policy's weights. Raises ValueError for a state that doesn't fit."""
    checkpoint = training.run.checkpoint
    state, optimizer = load_state(checkpoint), training.optimizer
    try:
        state = training.world.shard_state(state, optimizer)
        if state["step"] != step_of(checkpoint):
            raise ValueError("the folder is another step's")
        training.step, training.seconds, training.test_before = state["step"], state["seconds"], state["before"]
        optimizer.load_state_dict(state["optimizer"])
        if training.value_head is not None:
            training.value_head.load_state_dict(state["value_head"])
        training.data_sampler.position = state["sampled"]
        had = state["belongs_to"]
        training.spent.seconds |= state["spent"]
        torch.set_rng_state(state["random"]["cpu"])
        if training.device.type == "cuda":
            torch.cuda.set_rng_state(state["random"]["cuda"], training.device)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError):
        raise damaged(checkpoint, "trainer.pt does not fit the model and the run") from None
    for what, now in belongs_to(training, training.policy.model).items():
        if now != had.get(what):
            raise ValueError(f"The {what} is not what {training.run.path} had: bring that back, or start a new run.")


def save_checkpoint(run_folder: Path, step: int, policy: Policy, state: dict[str, Any]) -> Path:
    """Write `checkpoints/step-000020` with the model, its tokenizer and `state`, then delete all but the newest `KEPT`.
    Raises RuntimeError if a number isn't finite, OSError if it can't be written; earlier ones are left alone."""
    optimizer, value_head = state.get("optimizer") or {"state": {}}, state.get("value_head") or {}
    moments = [tensor for of_one in optimizer["state"].values() for tensor in of_one.values()]
    tensors = [*policy.model.parameters(), *value_head.values(), *moments]
    if not all(local_tensor(tensor).isfinite().all() for tensor in tensors):
        raise RuntimeError(
            "The weights are no longer finite, so they were not saved, and earlier checkpoints stay as they are: start "
            "a new run with a lower --lr."
        )
    final = run_folder / "checkpoints" / f"step-{step:06d}"
    if final.exists():  # the run went on from it, and has made no step since
        return final
    try:
        with new_folder(final) as aside:
            if has_adapter(policy.model):
                from rlcourse.adapters import save_adapter

                save_adapter(policy.model, aside)
            else:
                policy.model.save_pretrained(aside)
            policy.tokenizer.save_pretrained(aside)
            torch.save(state, aside / "trainer.pt")
    except Exception as error:  # of safetensors and torch, which say nothing of a full disk
        why = reason(error) if isinstance(error, OSError) else str(error).split("\n")[0]
        why = "the disk is full" if shutil.disk_usage(run_folder).free < FULL else why
        raise OSError(
            f"The checkpoint of step {step} cannot be written to {final.parent} ({why}): make room there, and go on "
            "from the last one, if there is one, with --resume."
        ) from error
    for old in [*_checkpoints(run_folder)[:-KEPT], *final.parent.glob("step-*.writing")]:  # and what a kill left
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


def at_checkpoint(run: RunFolder) -> RunFolder:
    """The run, to go on from its last checkpoint. Raises ValueError if it has done more steps than asked for."""
    run.checkpoint, steps = latest_checkpoint(run.path), run.config.steps
    if steps is not None and steps < (done := step_of(run.checkpoint)):
        raise ValueError(f"{run.path} has done {done} steps, more than --steps {steps}: ask for more.")
    return run


def step_of(checkpoint: Path) -> int:
    """The training step after which a checkpoint was saved."""
    return int(checkpoint.name.removeprefix("step-"))


def policy_of_run(config: Any, device: torch.device, checkpoint: Path | None = None) -> Policy:
    """The policy that a run starts with, or goes on with from a checkpoint; with `lora_rank`, the base with an adapter
    that learns. Raises ValueError if it can't be read."""
    adapted = bool(config.lora_rank)
    base = load_policy(config.model, device) if adapted or checkpoint is None else None
    if checkpoint is None:
        if adapted:
            add_adapter(base.model, config.model, config.lora_rank, ALPHA, ALL_LINEAR)
        return base
    try:
        if not adapted:
            return load_policy(str(checkpoint), device)
        from rlcourse.adapters import load_adapter

        load_adapter(base.model, checkpoint)
    except (ValueError, FileNotFoundError) as error:
        raise damaged(checkpoint, str(error).rpartition(": ")[0]) from error
    return base


def load_state(checkpoint: Path) -> dict[str, Any]:
    """What is in a checkpoint's trainer.pt, tensors on the CPU. Raises ValueError if it can't be read."""
    try:
        return dict(torch.load(checkpoint / "trainer.pt", map_location="cpu", weights_only=True))
    except Exception:  # not there, cut short, another format, or a pickle of something else: each fails in its own way
        raise damaged(checkpoint, "trainer.pt cannot be read") from None


def damaged(checkpoint: Path, why: str) -> ValueError:
    """The error for a checkpoint that can't be used."""
    others = [path.name for path in _checkpoints(checkpoint.parent.parent) if path != checkpoint]
    remedy = f"delete that folder to go on from {others[-1]}" if others else "start a new run"
    return ValueError(f"The checkpoint {checkpoint} is damaged ({why}): {remedy}.")


def _checkpoints(run_folder: Path) -> list[Path]:
    found = [path for path in (run_folder / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d{6,}", path.name)]
    return sorted(found, key=step_of)
