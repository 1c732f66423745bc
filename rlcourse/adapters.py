"""Adapters in peft's format, read and written. One that is more than W + s B A of linear layers is refused."""

import warnings
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from rlcourse.files import read_json
from rlcourse.lora import NAME, adapted_layers, merge
from rlcourse.trial import silence

ROUNDING = 1e-4  # of logits, relative to the largest, by merging in float32
COPY_ADAPTER = "copy the adapter's files again"


def load_adapter(model: PreTrainedModel, folder: Path) -> nn.Module:
    """Give the base the adapter in `folder`, to the last bit. Returns peft's model around it. Raises FileNotFoundError
    or ValueError for an adapter that can't be read, doesn't fit, or is more than W + s B A."""
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise FileNotFoundError(f"There is no file {file}: {COPY_ADAPTER}.")
    options = read_json(folder / "adapter_config.json", COPY_ADAPTER)
    # peft drops what it doesn't know, with a warning at most, and computes something else.
    if new := [name for name in options.keys() - LoraConfig().to_dict().keys() if options[name]]:
        raise ValueError(f"The adapter in {folder} has {new[0]}, which this peft doesn't know: upgrade peft.")
    try:
        weights = load_file(file)
    except Exception:  # safetensors has an error of its own
        raise ValueError(f"{file} cannot be read or is cut short: {COPY_ADAPTER}.") from None
    if not all(weight.isfinite().all() for weight in weights.values()):
        raise ValueError(f"The weights in {file} are not finite: use an earlier checkpoint.")
    if others := [name for name in weights if not name.endswith((".lora_A.weight", ".lora_B.weight"))]:
        raise ValueError(f"{file} holds {others[0]}, which is neither A nor B: merge it with peft first.")
    try:
        with warnings.catch_warnings(action="ignore"):  # of weights that are missing, see below
            wrapped = PeftModel.from_pretrained(model, str(folder), NAME, is_trainable=True)
        own = {name: parameter.cpu() for name, parameter in _adapter_weights(model).items()}
        fits = own.keys() == weights.keys() and all(torch.equal(own[name], w.float()) for name, w in weights.items())
    except Exception:  # of a library; what is in the files is the user's
        fits = False
    if not fits:
        raise ValueError(f"{file} does not fit its base {base_of(folder)}: {COPY_ADAPTER}.")
    if not all(type(layer.get_base_layer()) is nn.Linear for layer in adapted_layers(model)):
        raise ValueError(f"The adapter in {folder} changes other layers than linear ones: merge it with peft first.")
    silence(model)
    return wrapped.eval()


@torch.no_grad()
def load_merged(model: PreTrainedModel, folder: Path) -> None:
    """Merge the adapter in `folder` into the model. Raises what `load_adapter` does, and ValueError if the logits
    aren't peft's."""
    wrapped, ids = load_adapter(model, folder), torch.arange(1, 9, device=model.device)[None]
    expected = wrapped(input_ids=ids, use_cache=False).logits
    merge(model)
    found = model(input_ids=ids, use_cache=False).logits
    if not (found - expected).abs().max() <= ROUNDING * expected.abs().max():
        raise ValueError(f"The adapter in {folder}, merged into its base, has other logits: merge it with peft first.")


def save_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Write the model's adapter in peft's format, without asking the hub for its base as peft would."""
    weights = {name: parameter.detach().contiguous() for name, parameter in _adapter_weights(model).items()}
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    model.peft_config[NAME].save_pretrained(folder)


def base_of(folder: Path) -> str:
    """The name of the model that an adapter belongs to. Raises ValueError if its config doesn't say it."""
    base = read_json(folder / "adapter_config.json", COPY_ADAPTER).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ValueError(f"{folder / 'adapter_config.json'} does not name the adapter's base: {COPY_ADAPTER}.")
    return base


def _adapter_weights(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Each A and B of the adapter, by peft's names in a file."""
    own = ((name, parameter) for name, parameter in model.named_parameters() if ".lora_" in name)
    return {"base_model.model." + name.replace(f".{NAME}.", "."): parameter for name, parameter in own}
