"""Where a run's model came from: what it was trained from, under which license, and what strangers may see of names."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, hf_hub_download

from rlcourse.files import read_json
from rlcourse.hub import hub_or_cache
from rlcourse.lora import base_of, is_adapter
from rlcourse.paths import EMBEDDED_MODELS, data_folder, model_folder
from rlcourse.tasks import is_address

LICENSES = {"MIT License": {"license": "mit"}, "Apache License": {"license": "apache-2.0"}}  # by their first line


def lineage(model: str) -> list[str]:
    """The model, what it was trained from if it is another run's checkpoint or an adapter, and so on."""
    models = [model]
    while (folder := model_folder(models[-1])) is not None and models[-1] not in EMBEDDED_MODELS:
        run = folder.resolve().parent.parent / "config.json"
        if is_adapter(folder):
            models.append(base_of(folder))
        elif folder.resolve().parent.name == "checkpoints" and run.is_file():
            models.append(read_json(run, "move it away")["model"])
        else:
            break
    return models


def license_of(base: str) -> tuple[dict[str, str], Path | None]:
    """The license of a model, or of what it was trained from, as metadata of a card, and the file with its text.

    Found in a model card or a LICENSE file, here or on the hub; empty and None where there is neither.
    """
    for model in lineage(base):
        text, card = find_file(model, "LICENSE"), find_file(model, "README.md")
        if model in EMBEDDED_MODELS:
            return LICENSES["MIT License"], text
        with suppress(Exception):  # there is no card, or it can't be read
            data = ModelCard.load(card).data
            if data.license:
                return {key: data[key] for key in ("license", "license_name", "license_link") if data.get(key)}, text
        if text is not None:
            title = text.read_text(encoding="utf-8", errors="replace").strip().partition("\n")[0]
            return LICENSES.get(title, {"license": "other", "license_name": title, "license_link": "LICENSE"}), text
    return {}, None


def find_file(model: str, name: str) -> Path | None:
    """A file of a model, in its folder or on the hub; None if there is none, or no network."""
    folder = data_folder().parent if model in EMBEDDED_MODELS else model_folder(model)
    if folder is not None:
        return folder / name if (folder / name).is_file() else None
    with suppress(Exception), hub_or_cache():  # an error of one of several libraries
        return Path(hf_hub_download(model, name))
    return None


def described(model: str) -> str:
    """A model's name, and where to find it."""
    if model in EMBEDDED_MODELS:
        return f"`{model}`, a small model that ships with rlcourse"
    link = f"[`{model}`](https://huggingface.co/{model})"
    return link if is_on_hub(model) else f"`{public(model)}`, a local folder that isn't on the hub"


def is_on_hub(model: str) -> bool:
    """Whether a model's name is one for the hub: by its form, and because there is no such folder."""
    return model_folder(model) is None and public(model) == model


def public(value: Any, name: str = "model") -> Any:
    """A setting as strangers may see it: of a local path its last part, of an address no host."""
    if not isinstance(value, str) or value in EMBEDDED_MODELS:
        return value
    if is_address(value):
        return "http://HOST:PORT"
    if name == "data_dir" or value.count("/") > 1 or model_folder(value) is not None:
        return Path(value).expanduser().resolve().name
    return value
