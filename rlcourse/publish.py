"""Models for others: a run's, as a folder or a repository on the hub that transformers, peft and vLLM load; an adapter
merged into its base."""

import shutil
import tempfile
from dataclasses import fields, replace
from pathlib import Path

import torch
from huggingface_hub import HfApi
from huggingface_hub.utils import validate_repo_id
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlcourse.adapters import save_adapter
from rlcourse.checkpoint import latest_checkpoint, policy_of_run, step_of
from rlcourse.config import TrainConfig
from rlcourse.files import new_folder, read_json, try_empty_folder, try_folder
from rlcourse.lora import NAME
from rlcourse.model_card import PRIVATE, Run, license_of, model_card, public
from rlcourse.model_files import is_adapter
from rlcourse.paths import EMBEDDED_MODELS
from rlcourse.policy import Policy, load_policy, low_precision_copy
from rlcourse.sft.config import SFTConfig

QUESTION = "Tom has 3 apples and buys 12 more. How many apples does Tom have?"
MAY_DIFFER = (*PRIVATE, "seed", "device", "save_every")  # settings that may differ between seeds


def publish(paths: list[Path], to: Path | None, hub: str | None) -> str:
    """Publish the first run's last checkpoint; the other runs are other seeds of it. Returns what to tell the user.
    Raises ValueError or OSError for runs that can't be published or a place that can't be written to, RuntimeError if
    what was written doesn't match the checkpoint."""
    if to is None and hub is None:
        raise ValueError("Say where to publish: --to FOLDER, --hub NAME, or both.")
    runs = [read_run(path) for path in paths]
    check_seeds(runs)
    hub, to = hub and full_name(hub), to and to.expanduser().resolve()
    if to:
        try_empty_folder(to, "choose another --to", *paths)
        to.rmdir()  # the rename below makes it again
    with tempfile.TemporaryDirectory() as temporary:
        folder = to or Path(temporary) / "model"
        with new_folder(folder) as aside:
            write_all(runs, aside, hub or to.name)
        if hub:
            HfApi().create_repo(hub, exist_ok=True)
            HfApi().upload_folder(repo_id=hub, folder_path=folder, commit_message="Publish with rlcourse")
    run, places = runs[0], " and ".join(str(place) for place in (to, hub) if place)
    unfinished = "" if run.summary else f" The run isn't finished: `rlcourse {run.config.command} --resume` goes on."
    local = is_adapter(run.checkpoint) and run.base not in EMBEDDED_MODELS and Path(run.base).exists()
    merge = f"`rlcourse merge {paths[0]} --output FOLDER` makes a model that needs no base."
    missing = f" The adapter's base is only on this machine, in {run.base}: {merge}" if local else ""
    return f"The model from {run.path.name}, {run.steps}, is in {places}.{unfinished}{missing}"


def read_run(path: Path) -> Run:
    """What is in a run's folder. Raises FileNotFoundError or ValueError if it isn't one or has no checkpoint."""
    path = path.expanduser().resolve()
    saved = read_json(path / "config.json", "name the folder of a run, such as runs/laptop-dr_grpo-seed0")
    kind = TrainConfig if "algorithm" in saved else SFTConfig if "batch_size" in saved else None
    if kind is None:
        raise ValueError(f"{path} isn't the folder of a run: name the one with metrics.jsonl and checkpoints.")
    checkpoint = latest_checkpoint(path)
    written = (path / "summary.json").exists()
    summary = read_json(path / "summary.json", "finish the run again with --resume") if written else {}
    finished = summary.get("steps") == step_of(checkpoint)  # else it was resumed after that, and stopped
    config = kind(**{f.name: saved[f.name] for f in fields(kind) if f.name in saved})  # other versions have others
    return Run(path, config, checkpoint, summary if finished else {})


def check_seeds(runs: list[Run]) -> None:
    """Raise ValueError unless several runs are all finished and differ only in their seeds."""
    settings = [run.config.to_dict() | dict.fromkeys(MAY_DIFFER) for run in runs]
    differ = [name for name in settings[0] if any(other.get(name) != settings[0][name] for other in settings)]
    if differ:
        raise ValueError(f"These runs differ in {', '.join(differ)}: only seeds may differ.")
    if len({run.config.seed for run in runs}) < len(runs):
        raise ValueError("Two of these runs have the same seed: name runs with different seeds.")
    if len(runs) > 1 and not all(run.summary for run in runs):
        raise ValueError("Not all of these runs are finished: finish them, or leave them out.")


def write_all(runs: list[Run], folder: Path, name: str) -> None:
    """Write the first run's model, its card, license and curve to an empty folder: a model in the precision that the
    run sampled in, an adapter in float32, in which the run merged it."""
    run = runs[0]
    policy = policy_of_run(replace(run.config, model=run.base), torch.device("cpu"), run.checkpoint)
    chat = policy.tokenizer.chat_template is not None
    prompt = run.summary.get("prompt") or (policy.tokenizer.decode(policy.prompt(QUESTION)) if chat else QUESTION)
    if is_adapter(run.checkpoint):
        policy.model.peft_config[NAME].base_model_name_or_path = public(run.base)
        save_adapter(policy.model, folder)
    else:
        policy.model = low_precision_copy(policy.model, getattr(torch, run.config.dtype))
        policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    check_model(folder, policy, run.base, prompt)
    terms, license_file = license_of(run.base)
    if license_file is not None:
        shutil.copyfile(license_file, folder / "LICENSE")
    if run.summary:
        shutil.copyfile(run.path / "curve.png", folder / "curve.png")
    model_card(runs, name, prompt, terms).save(folder / "README.md")


@torch.no_grad()
def check_model(folder: Path, policy: Policy, base: str, prompt: str) -> None:
    """Load a folder as its users will. Raise RuntimeError unless logits, bit for bit, ends and chat template are the
    policy's."""
    if is_adapter(folder):
        from peft import PeftModel

        model = PeftModel.from_pretrained(load_policy(base).model, folder)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizers, options = (policy.tokenizer, AutoTokenizer.from_pretrained(folder)), {"add_special_tokens": False}
    ours, theirs = (tokenizer(prompt, return_tensors="pt", **options) for tokenizer in tokenizers)
    same = torch.equal(policy.model(**ours).logits, model(**theirs).logits)
    same_ends = model.generation_config.eos_token_id == policy.eos_ids
    if not (same and same_ends and tokenizers[0].chat_template == tokenizers[1].chat_template):
        raise RuntimeError("The files' logits, ends or chat template are not the checkpoint's: nothing was published.")


def full_name(hub: str) -> str:
    """USER/NAME of a repository called NAME or USER/NAME. Raises ValueError for any other name."""
    validate_repo_id(hub)
    try:
        user = HfApi().whoami()["name"]
    except Exception as error:  # of whichever library makes its requests
        remedy = "run `hf auth login`, check the network, or publish to a folder with --to"
        raise ConnectionError(f"The login to the Hugging Face hub failed: {remedy}.") from error
    return hub if "/" in hub else f"{user}/{hub}"


def save_model(policy: Policy, output: Path) -> None:
    with new_folder(output) as aside:
        policy.model.save_pretrained(aside)
        policy.tokenizer.save_pretrained(aside)


def merge_adapter(place: Path, output: Path) -> Path:
    """Write the model that an adapter makes of its base to `output`. place: the adapter's folder, or that of a run, for
    its last checkpoint. Returns the adapter's folder. Raises FileNotFoundError or ValueError if it can't be read."""
    folder = latest_checkpoint(place) if (place / "checkpoints").is_dir() else place
    if not is_adapter(folder):
        whole = (folder / "config.json").is_file()
        why = "its weights are whole already" if whole else "name a folder with adapter_config.json, or a run"
        raise FileNotFoundError(f"There is no adapter in {folder}: {why}.")
    policy = load_policy(str(folder.resolve()))
    try_folder(output, "choose another --output", 4 * sum(p.numel() for p in policy.model.parameters()))
    save_model(policy, output)
    return folder
