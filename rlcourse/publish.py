"""Publishing: a run's model as a folder, or a repository on the hub, that transformers, peft and vLLM load."""

import shlex
import shutil
import tempfile
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from rlcourse.checkpoint import latest_checkpoint, policy_of_run, step_of
from rlcourse.config import TrainConfig
from rlcourse.files import read_json, try_empty_folder
from rlcourse.lora import NAME, base_of, is_adapter, save_adapter
from rlcourse.model_card import FREE, QUESTION, model_card
from rlcourse.origins import license_of, public
from rlcourse.policy import TEMPLATE, Policy, load_policy, low_precision_copy
from rlcourse.sft.config import SFTConfig

OR_A_FOLDER = "or publish to a folder with --to"


@dataclass(frozen=True)
class Run:
    """A run's folder, settings and last checkpoint. summary: summary.json, None if the run stopped before its end."""

    path: Path
    config: TrainConfig | SFTConfig
    checkpoint: Path
    summary: dict[str, Any] | None

    @property
    def command(self) -> str:
        return "train" if isinstance(self.config, TrainConfig) else "sft"

    @property
    def task(self) -> str | None:
        return self.config.task if self.command == "train" else self.config.evaluated_task

    @property
    def base(self) -> str:
        """The model that was trained. An adapter has its absolute path, the settings may have a relative one."""
        return base_of(self.checkpoint) if is_adapter(self.checkpoint) else self.config.model

    @property
    def steps(self) -> str:
        """Where the last checkpoint is, such as "step 20 of 30"."""
        return f"step {step_of(self.checkpoint)}" + (f" of {self.config.steps}" if self.config.steps else "")


def publish(paths: list[Path], to: Path | None, hub: str | None) -> list[str]:
    """Publish the first run's last checkpoint, and return what to tell the user. The other runs are other seeds of it.

    Raises ValueError, FileNotFoundError or OSError, in one sentence, for runs that can't be published, a place that
    can't be written to, or a hub that can't be reached; RuntimeError if what was written doesn't match the checkpoint.
    """
    if to is None and hub is None:
        raise ValueError("Say where to publish: --to FOLDER, --hub NAME, or both.")
    run, *_ = runs = [read_run(path) for path in paths]
    check_seeds(runs)
    hub, to = hub and full_name(hub), to and to.expanduser().resolve()
    if to:
        try_empty_folder(to, "choose another --to")
        to.rmdir()  # the rename below makes it again
    with tempfile.TemporaryDirectory(prefix=".publishing-", dir=to and to.parent) as aside:
        folder = Path(aside) / "model"
        policy = write_model(run, folder)
        terms, license_file = license_of(run.base)
        if license_file is not None:
            shutil.copyfile(license_file, folder / "LICENSE")
        if run.summary is not None:
            shutil.copyfile(run.path / "curve.png", folder / "curve.png")
        model_card(runs, hub or to.name, terms, policy.tokenizer).save(folder / "README.md")
        if to:
            folder = folder.replace(to)
        if hub:
            upload(folder, hub, f"`hf upload {hub} {shlex.quote(str(to))}` tries again" if to else "try again")
    said = [f"The model of {run.path.name}, {run.steps}, is in {' and '.join(map(str, filter(None, (to, hub))))}."]
    if run.summary is None:
        words = ["rlcourse", run.command, "--resume", "--output", str(run.path.parent), "--name", run.path.name]
        said.append(f"That run stopped before its end: `{shlex.join(words)}` goes on.")
    return said


def read_run(path: Path) -> Run:
    """What a run's folder holds. Raises FileNotFoundError or ValueError if it isn't one or has no checkpoint."""
    path = path.expanduser().resolve()
    saved = read_json(path / "config.json", "name the folder of a run, such as runs/laptop-dr_grpo-seed0")
    kind = TrainConfig if "algorithm" in saved else SFTConfig if "batch_size" in saved else None
    if kind is None:
        raise ValueError(f"{path} isn't the folder of a run: name the one that holds metrics.jsonl and checkpoints.")
    try:
        checkpoint = latest_checkpoint(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} has no checkpoint: publish a run that has saved one.") from None
    summary = None
    if (path / "summary.json").exists():
        summary = read_json(path / "summary.json", "finish the run again with --resume")
    if summary is not None and summary.get("steps") != step_of(checkpoint):  # the run went on from there, and stopped
        summary = None
    config = kind(**{f.name: saved[f.name] for f in fields(kind) if f.name in saved})  # other versions have others
    return Run(path, config, checkpoint, summary)


def check_seeds(runs: list[Run]) -> None:
    """Raise ValueError unless several runs are all finished and differ in their seeds alone."""
    first, *others = runs
    for run in runs if others else ():
        if run.summary is None:
            raise ValueError(f"{run.path} isn't finished, it stopped at {run.steps}: finish it, or leave it out.")
    for run in others:
        ours, theirs = (r.config.to_dict() | dict.fromkeys(FREE) for r in (first, run))
        for name in (name for name in ours | theirs if ours.get(name) != theirs.get(name)):
            raise ValueError(f"{run.path} differs from {first.path} in {name}: only seeds may differ.")
    if len({run.config.seed for run in runs}) < len(runs):
        raise ValueError("Two of these runs have the same seed: name runs with different seeds.")


def write_model(run: Run, folder: Path) -> Policy:
    """Write weights and tokenizer to a new folder, check that they load, and return what was written.

    A model is in the precision that the run sampled in. An adapter is in float32, in which the run merged it.
    """
    policy = policy_of_run(replace(run.config, model=run.base), torch.device("cpu"), run.checkpoint)
    folder.mkdir()
    if is_adapter(run.checkpoint):
        policy.model.peft_config[NAME].base_model_name_or_path = public(run.base)
        save_adapter(policy.model, folder)
    else:
        policy.model = low_precision_copy(policy.model, getattr(torch, run.config.dtype))
        policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    check_model(folder, policy, run.base)
    return policy


@torch.no_grad()
def check_model(folder: Path, policy: Policy, base: str) -> None:
    """Load a folder as its users will. Raise RuntimeError unless prompt, end tokens and logits are the policy's, to the
    last bit."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if is_adapter(folder):
        from peft import PeftModel

        model = PeftModel.from_pretrained(load_policy(base).model, folder)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
    texts = [prompt_text(which) for which in (policy.tokenizer, tokenizer)]
    ours = policy.model(**policy.tokenizer(texts[0], return_tensors="pt")).logits.float()
    theirs = model(**tokenizer(texts[0], return_tensors="pt")).logits.float()
    same = {
        "chat template": texts[0] == texts[1],
        "list of end tokens": model.generation_config.eos_token_id == policy.eos_ids,
        "logits": torch.equal(ours, theirs),
    }
    for what in (what for what, equal in same.items() if not equal):
        raise RuntimeError(
            f"What was written doesn't load as the checkpoint (different {what}): nothing was published."
        )


def prompt_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """A question in the tokenizer's chat template; the question alone if it has none."""
    if tokenizer.chat_template is None:
        return QUESTION
    messages = [{"role": "user", "content": QUESTION}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **TEMPLATE)


def full_name(hub: str) -> str:
    """USER/NAME of a repository called NAME or USER/NAME. Raises ValueError for another name or without a login,
    ConnectionError if the hub doesn't answer."""
    try:
        validate_repo_id(hub)
        user = HfApi().whoami()["name"]
    except HFValidationError:
        raise ValueError(f"--hub takes NAME or USER/NAME, not {hub!r}.") from None
    except LocalTokenNotFoundError:
        raise ValueError(f"You aren't logged in to the Hugging Face hub: run `hf auth login`, {OR_A_FOLDER}.") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        raise ValueError(f"The hub refuses your login ({status}): run `hf auth login` again, {OR_A_FOLDER}.") from None
    except Exception:  # of whichever library makes its requests
        raise ConnectionError(f"The Hugging Face hub doesn't answer: check the network, {OR_A_FOLDER}.") from None
    return hub if "/" in hub else f"{user}/{hub}"


def upload(folder: Path, hub: str, remedy: str) -> None:
    """Make the repository if there is none, and upload the folder in one commit. Raises OSError if that fails."""
    try:
        HfApi().create_repo(hub, exist_ok=True)
        HfApi().upload_folder(repo_id=hub, folder_path=folder, commit_message="Publish with rlcourse")
    except Exception as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise OSError(f"The upload to {hub} failed ({why}): {remedy}.") from error
