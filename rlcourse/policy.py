"""The policy: a causal language model with its tokenizer, how a question becomes a prompt, and PPO's value head."""

import copy
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from rlcourse.dist import is_sharded
from rlcourse.files import read_bytes, read_json
from rlcourse.hub import hub_or_cache
from rlcourse.lora import base_of, is_adapter, load_adapter, merge
from rlcourse.paths import model_folder

WIDTHS = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_attention_heads", "num_key_value_heads")
# Qwen3 answers at once; Llama 3 is told the date, which else would be today's. Other templates ignore the words.
TEMPLATE = {"enable_thinking": False, "date_string": "26 Jul 2024"}
COPY_AGAIN = "copy the model's files again"  # the remedy for broken ones

transformers_logging.disable_progress_bar()  # loading and saving would draw bars among ours


@dataclass
class Policy:
    """A causal LM in float32, its tokenizer, and the token ids that end and pad a completion."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    eos_ids: list[int]
    pad_id: int

    @property
    def device(self) -> torch.device:
        return self.model.device

    def prompt(self, question: str, instruction: str = "", examples: Iterable[tuple[str, str]] = ()) -> list[int]:
        """Token ids of a chat: `instruction` as the system turn if given, the examples as earlier turns, the question,
        and the open turn of the answer, without thinking where the template has a switch for it.

        examples: pairs of a question and its answer. Raises ValueError if the tokenizer has no chat template.
        """
        return self.prompts([question], instruction, examples)[0]

    def prompts(
        self, questions: list[str], instruction: str = "", examples: Iterable[tuple[str, str]] = ()
    ) -> list[list[int]]:
        """`prompt` of each question, tokenized together on all cores."""
        if self.tokenizer.chat_template is None:
            raise ValueError("The model's tokenizer has no chat template: use an instruction-tuned model.")
        before = [{"role": "system", "content": instruction}] if instruction else []
        for asked, answered in examples:
            before += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        chats = [[*before, {"role": "user", "content": question}] for question in questions]
        texts = self.tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True, **TEMPLATE)
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"]

    def texts(self, completion_ids: Tensor, completion_mask: Tensor) -> list[str]:
        """The text of each completion, special tokens left out. completion_ids, completion_mask: [rows, T]."""
        known = completion_mask & (completion_ids < len(self.tokenizer))  # a model may have more rows than tokens
        rows = [ids[keep].tolist() for ids, keep in zip(completion_ids.cpu().numpy(), known.cpu().numpy(), strict=True)]
        kind, plain = type(self.tokenizer), PreTrainedTokenizerFast
        own = any(
            getattr(kind, name) is not getattr(plain, name, None) for name in ("batch_decode", "decode", "_decode")
        )
        if own or self.tokenizer.clean_up_tokenization_spaces:
            return self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        # The same on all cores, where the class adds nothing of its own.
        return self.tokenizer.backend_tokenizer.decode_batch(rows, skip_special_tokens=True)


def load_policy(name: str, device: torch.device | str = "cpu") -> Policy:
    """Load `name` in float32: 'embedded', 'embedded-kernels', a folder, or a name on the Hugging Face hub. Of a folder
    with an adapter its base is loaded, and the adapter merged into it.

    Raises FileNotFoundError or ValueError, in one sentence, if model or tokenizer is missing or unreadable, if they do
    not match, or if there is a chat template that cannot be used. Only a task that asks in chats needs one.
    """
    folder = model_folder(name)
    if folder is not None and is_adapter(folder):
        policy = load_policy(base_of(folder), device)
        load_adapter(policy.model, folder)
        merge(policy.model)
        return policy
    path = name if folder is None else str(folder)
    if folder is not None:
        check_model_files(folder)
    options = {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}
    if torch.device(device).type == "cuda":
        options["device_map"] = {"": device}  # no copy in float32 on the CPU first
    model, found = _loaded(AutoModelForCausalLM, path, folder, **options)
    tokenizer = load_tokenizer(path, folder)
    for kind in ("missing", "unexpected", "mismatched"):  # of which transformers only warns
        for key in found[f"{kind}_keys"]:
            name = key if isinstance(key, str) else key[0]
            raise ValueError(f"The weights in {path} do not fit its config.json ({kind}: {name}): {COPY_AGAIN}.")
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        raise ValueError(f"The weights in {path} are not finite: use an earlier checkpoint or another model.")
    rows = model.get_input_embeddings().num_embeddings
    if max(tokenizer.get_vocab().values()) >= rows:
        raise ValueError(f"The tokenizer in {path} has more tokens than its model's {rows}: {COPY_AGAIN}.")
    eos = model.generation_config.eos_token_id
    eos_ids = [eos] if isinstance(eos, int) else list(eos or [tokenizer.eos_token_id])
    if not all(type(token) is int and 0 <= token < rows for token in eos_ids):
        raise ValueError(f"eos_token_id in {path} is not a token of the model, but {eos!r}: {COPY_AGAIN}.")
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_ids[0]
    # Qwen2.5-Instruct ships top-k, top-p and a repetition penalty here, which `generate` would mix into any settings.
    model.generation_config = GenerationConfig(eos_token_id=eos_ids, pad_token_id=pad_id)
    return Policy(model.to(device).eval(), tokenizer, eos_ids, pad_id)


def check_model_files(folder: Path) -> None:
    """Raise FileNotFoundError or ValueError, naming the file, for one that is missing or broken."""
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"No model in {folder}: a model folder holds config.json and its weights.")
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
    tokenizer = _loaded(AutoTokenizer, path, folder)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"The tokenizer of {path} has no end-of-sequence token: set eos_token in its config.")
    if tokenizer.chat_template is None:
        return tokenizer
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": "1+1?"}], tokenize=False)
    except Exception as error:  # whatever a template does
        raise ValueError(f"The chat template of {path} fails ({_first_line(error)}): {COPY_AGAIN}.") from None
    if "1+1?" not in text or not tokenizer("1+1?", add_special_tokens=False)["input_ids"]:
        raise ValueError(f"The chat template of {path} leaves the question out: {COPY_AGAIN}.")
    return tokenizer


def _loaded(kind: type, path: str, folder: Path | None, **options) -> Any:
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
        raise ValueError(f"The {what} in {path} cannot be read ({_first_line(error)}): {COPY_AGAIN}.") from error


def _first_line(error: Exception) -> str:
    """The message of an error, as one line that fits into a sentence."""
    lines = str(error).strip().split("\n")
    line = " ".join(part.strip() for part in lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".")
    return line if len(line) <= 150 else f"{line[:150]}…"


def check_positions(model: PreTrainedModel, tokens: int) -> None:
    """Raise ValueError if the model has fewer positions than `tokens`, those of a prompt and its completion."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and tokens > positions:
        raise ValueError(
            f"A prompt and its completion of {tokens:,} tokens exceed the model's {positions:,} positions: lower "
            "max_prompt_tokens or max_new_tokens."
        )


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model that takes no gradients: the reference of the KL divergence."""
    return copy.deepcopy(model).eval().requires_grad_(False)


def low_precision_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy with parameters in `dtype`, an adapter merged; buffers stay, as `model.to(bfloat16)` would round RoPE's
    frequencies. Of a sharded model it has no weights yet: an engine gathers them before it samples."""
    if is_sharded(model):
        return empty_copy(model, dtype, model.device)
    clone = copy.deepcopy(model).eval()
    merge(clone)
    clone.requires_grad_(False)
    for parameter in clone.parameters():
        parameter.data = parameter.data.to(dtype)
    return clone


def empty_copy(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model as this one was before it was sharded, whole and frozen, its parameters in `dtype` and not filled in."""
    with torch.device("meta"):
        clone = AutoModelForCausalLM.from_config(model.config)
    for parameter in clone.parameters():
        parameter.data = parameter.data.to(dtype)
    clone = clone.to_empty(device=device).eval().requires_grad_(False)
    clone.tie_weights()
    for name, buffer in model.named_buffers(remove_duplicate=False):
        clone.get_buffer(name).copy_(buffer)
    clone.generation_config = model.generation_config
    return clone


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Recompute each layer's activations in the backward pass. transformers does so in training mode only; these models
    have no dropout, so that mode changes nothing else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in 5.23; older releases know this name alone
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each layer's forward and backward pass. All layers share one compiled code, made at the first call."""
    for layer in model.get_decoder().layers:
        layer.compile(dynamic=True)  # the length of a micro-batch changes from step to step


class ValueHead(nn.Module):
    """State value from a hidden state: one hidden layer, tanh, and an output that starts at zero.

    hidden [..., d] → values [...]. Zero at the start means that GAE begins as plain returns.
    """

    def __init__(self, hidden_size: int, width: int = 128):
        super().__init__()
        self.hidden = nn.Linear(hidden_size, width)
        self.output = nn.Linear(width, 1)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.output(torch.tanh(self.hidden(hidden.float()))).squeeze(-1)
