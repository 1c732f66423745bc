"""A model's files: what is missing, broken or read in another way than it is written is named."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast, utils

from rlcourse.chat import write_chats
from rlcourse.files import read_bytes, read_json
from rlcourse.hub import hub_or_cache
from rlcourse.trial import reads_like

COPY_AGAIN = "copy the model's files again"  # the remedy for broken ones
WIDTHS = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_attention_heads", "num_key_value_heads")


def check_model_files(folder: Path) -> None:
    """Raise FileNotFoundError or ValueError, naming the file, for one that is missing or broken."""
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"No model in {folder}: a model folder holds config.json and its weights.")
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{folder} holds an adapter and a model: move one of them to a folder of its own.")
    if not (folder / "tokenizer.json").exists():
        raise FileNotFoundError(
            f"No tokenizer in {folder}: copy the model's tokenizer.json and tokenizer_config.json there."
        )
    sizes = read_json(folder / "config.json", COPY_AGAIN)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (folder / name).exists():
            read_json(folder / name, COPY_AGAIN)
    if (folder / "chat_template.jinja").exists():
        read_bytes(folder / "chat_template.jinja", COPY_AGAIN)
    files, shapes = sorted(folder.glob("*.safetensors")), []
    if not files and not any(folder.glob("*.bin")):
        raise FileNotFoundError(f"No weights in {folder}: copy the model's model.safetensors there.")
    for file in files:
        try:
            with safe_open(file, "pt") as weights:
                shapes += [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118
        except Exception:  # safetensors has an error of its own
            raise ValueError(f"{file} cannot be read, is cut short or holds no weights: {COPY_AGAIN}.") from None
    widest = max((size for shape in shapes for size in shape), default=0)
    largest = {"num_hidden_layers": len(shapes)} | dict.fromkeys(WIDTHS, widest)
    for name, most in largest.items():  # transformers would allocate it before it compares sizes
        size = 0 if sizes.get(name) is None else sizes[name]
        if files and not (type(size) is int and size <= most):
            raise ValueError(f"{folder / 'config.json'} has {name} {size!r}, its weights have less: {COPY_AGAIN}.")


def load_tokenizer(path: str, folder: Path | None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name. Raises what `load_policy` does."""
    tokenizer = loaded(AutoTokenizer, path, folder)
    # As `utils.`, since dill would follow a function's own name into the hub's code when it packs one of a notebook's.
    file = utils.cached_file(path, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
    if file is not None and not reads_like(tokenizer, plain := Tokenizer.from_file(file)):
        # `AutoTokenizer` splits text as the model's type does; this class as the file says.
        tokenizer = loaded(PreTrainedTokenizerFast, path, folder)
        if not reads_like(tokenizer, plain):
            raise ValueError(
                f"The tokenizer of {path} reads text in another way than its tokenizer.json: correct "
                "tokenizer_config.json."
            )
    if tokenizer.eos_token_id is None:
        raise ValueError(f"The tokenizer of {path} has no end-of-sequence token: set eos_token in its config.")
    if not tokenizer("1+1?", add_special_tokens=False)["input_ids"]:
        raise ValueError(f"The tokenizer of {path} leaves text out: {COPY_AGAIN}.")
    if tokenizer.chat_template is not None:
        check_template(tokenizer, path)
    return tokenizer


def check_template(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Raise ValueError for a chat template that cannot ask a question."""
    try:
        write_chats(tokenizer, [[{"role": "user", "content": "1+1?"}]])
    except ValueError as error:
        why = str(error).rpartition(": ")[0]
        raise ValueError(f"The chat template of {path} cannot be used ({why}): {COPY_AGAIN}.") from None


def loaded(kind: type, path: str, folder: Path | None, **options) -> Any:
    """`kind.from_pretrained` of a folder or hub name, with one sentence for whatever goes wrong."""
    what = "tokenizer" if kind is AutoTokenizer else "model"
    try:
        with hub_or_cache() if folder is None else nullcontext():
            return kind.from_pretrained(path, trust_remote_code=False, **options)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        if folder is None and isinstance(error, OSError):
            raise FileNotFoundError(
                f"{path} is not a folder here, and its {what} cannot be fetched from the hub: check the name and the "
                "network."
            ) from error
        if "Unrecognized configuration class" in str(error):
            why = "AutoModelForCausalLM doesn't know the type in its config.json"
            raise ValueError(f"The {what} in {path} cannot be used ({why}): use another one.") from error
        raise ValueError(f"The {what} in {path} cannot be read ({first_line(error)}): {COPY_AGAIN}.") from error


def first_line(error: Exception) -> str:
    """The message of an error, as one line that fits into a sentence."""
    lines = str(error).strip().split("\n")
    line = " ".join(part.strip() for part in lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".")
    return line if len(line) <= 150 else f"{line[:150]}…"
