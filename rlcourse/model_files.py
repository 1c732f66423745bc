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

COPY_AGAIN = "copy the model's files again"  # the remedy for broken ones
QUANTIZED = "The model in {} is quantized, and training needs whole weights: use the model that it was made from."
FLOATS = {"F64", "F32", "F16", "BF16"}  # as safetensors names them; transformers takes other numbers for weights, too
NUMBER = "#### -1,234,567.890"
ORDINARY = "Tom has 12 apples and buys 7 more. How many apples does he have?"
PROBES = (  # texts that tokenizers split in different ways
    ORDINARY,
    "1 12 120 1204 12045 120456 1204567 3.14 1,000 $5 50% x=7*8+(9-2)/3 \n\n#### 42",
    "It's WE'LL don't  two   spaces\ttab\r\n\n  indented:\n\tdef f(x): return x**2 - {'a': [1]} # _a_b__c",
    " leading, trailing  \n",
    "Caf\u00e9 Cafe\u0301 \ufb01n \u00bd \uff11\uff12 na\u00efve \u00dcBER \u4f60\u597d\u4e16\u754c",
    "\u0440\u0438 \U0001f600\u200d \u0663\u0664 a\u00a0b",
)


def is_adapter(folder: Path) -> bool:
    """Whether the folder holds an adapter and no model."""
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def check_model_files(folder: Path) -> None:
    """Raise FileNotFoundError or ValueError, naming the file, for one that's missing or broken."""
    if (folder / "checkpoints").is_dir():
        [latest] = sorted((folder / "checkpoints").glob("step-*"))[-1:] or [folder / "checkpoints" / "step-…"]
        raise ValueError(f"{folder} is the folder of a run: name one of its checkpoints, such as {latest}.")
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"No model in {folder}: a model folder holds config.json and its weights.")
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{folder} holds an adapter and a model: move one of them to a folder of its own.")
    if not (folder / "tokenizer.json").exists():
        raise FileNotFoundError(
            f"No tokenizer in {folder}: copy the model's tokenizer.json and tokenizer_config.json there."
        )
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (folder / name).exists() and read_json(folder / name, COPY_AGAIN).get("quantization_config"):
            raise ValueError(QUANTIZED.format(folder))
    if (folder / "chat_template.jinja").exists():
        read_bytes(folder / "chat_template.jinja", COPY_AGAIN)
    files = sorted(folder.glob("*.safetensors"))
    if not files and not any(folder.glob("*.bin")):
        raise FileNotFoundError(f"No weights in {folder}: copy the model's model.safetensors there.")
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                weights = [name for name in opened.keys() if name.endswith(".weight")]  # noqa: SIM118 (it is no dict)
                kinds = {opened.get_slice(name).get_dtype() for name in weights}
        except Exception:  # safetensors has an error of its own
            raise ValueError(f"{file} cannot be read, is cut short or holds no weights: {COPY_AGAIN}.") from None
        if not kinds <= FLOATS:
            raise ValueError(QUANTIZED.format(folder))


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
    written = tokenizer.decode(tokenizer(NUMBER, add_special_tokens=False)["input_ids"])
    if NUMBER not in written:
        raise ValueError(f"The tokenizer of {path} writes {written!r} for {NUMBER!r}: {COPY_AGAIN}.")
    if tokenizer.chat_template is not None:
        check_template(tokenizer, path)
    return tokenizer


def reads_like(tokenizer: PreTrainedTokenizerBase, plain: Tokenizer) -> bool:
    """Whether a tokenizer has the tokens of the plain one, its file's, and reads and writes texts like it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return True  # it is in Python, and needs no such file
    texts = [*PROBES, " x ".join(token.content for token in plain.get_added_tokens_decoder().values())]
    ids, expected = (
        [found.ids for found in of.encode_batch(texts, add_special_tokens=False)] for of in (backend, plain)
    )
    written = [of.decode_batch(expected, skip_special_tokens=False) for of in (backend, plain)]
    return ids == expected and written[0] == written[1] and plain.get_vocab().items() <= backend.get_vocab().items()


def check_template(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Raise ValueError for a chat template that cannot ask a question."""
    try:
        write_chats(tokenizer, [[{"role": "user", "content": "1+1?"}]])
    except ValueError as error:
        why = str(error).rpartition(": ")[0]
        raise ValueError(f"The chat template of {path} cannot be used ({why}): {COPY_AGAIN}.") from None


def loaded(kind: type, path: str, folder: Path | None, **options) -> Any:
    """`kind.from_pretrained`, with one sentence for whatever goes wrong."""
    what, within = "tokenizer" if kind is AutoTokenizer else "model", nullcontext()
    if folder is None:
        from rlcourse.hub import hub_or_cache

        within = hub_or_cache()
    try:
        with within:
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
    """An error's message as one line."""
    lines = str(error).strip().split("\n")
    line = " ".join(part.strip() for part in lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".")
    return line if len(line) <= 150 else f"{line[:150]}…"
