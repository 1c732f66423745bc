"""Models written out whole: what an adapter makes of its base."""

from pathlib import Path

from rlcourse.checkpoint import latest_checkpoint
from rlcourse.files import new_folder, try_folder
from rlcourse.model_files import is_adapter
from rlcourse.policy import Policy, load_policy


def save_model(policy: Policy, output: Path) -> None:
    """Write model and tokenizer to `output`, which is empty or not there."""
    with new_folder(output) as aside:
        policy.model.save_pretrained(aside)
        policy.tokenizer.save_pretrained(aside)


def merge_adapter(place: Path, output: Path) -> Path:
    """Write the model that an adapter makes of its base to `output`.

    place: the adapter's folder, or that of a run: then it is the last checkpoint. Returns the adapter's folder. Raises
    FileNotFoundError or ValueError, in one sentence, if there is no adapter or it cannot be read.
    """
    folder = latest_checkpoint(place) if (place / "checkpoints").is_dir() else place
    if not is_adapter(folder):
        whole = (folder / "config.json").is_file()
        why = "its weights are whole already" if whole else "name a folder with adapter_config.json, or a run"
        raise FileNotFoundError(f"There is no adapter in {folder}: {why}.")
    policy = load_policy(str(folder.resolve()))
    try_folder(output, "choose another --output", 4 * sum(p.numel() for p in policy.model.parameters()))
    save_model(policy, output)
    return folder
