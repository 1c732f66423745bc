"""The policy: a causal language model with its tokenizer, how a question becomes a prompt, and PPO's value head."""

import copy
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from rlcourse.chat import ends_of, template_end, write_chats
from rlcourse.dist import full_tensor, is_sharded
from rlcourse.files import read_bytes
from rlcourse.head import trunk_of
from rlcourse.lora import merge
from rlcourse.model_files import (
    COPY_AGAIN,
    ORDINARY,
    QUANTIZED,
    check_model_files,
    check_template,
    first_line,
    is_adapter,
    load_tokenizer,
    loaded,
)
from rlcourse.paths import EMBEDDED_MODELS, model_folder
from rlcourse.settings import MANY

LOOKED_AT = 64  # numbers of a weight: training changes nearly all of them

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

        examples: pairs of a question and its answer. Raises what `write_chats` does.
        """
        return self.prompts([question], instruction, examples)[0]

    def prompts(
        self, questions: list[str], instruction: str = "", examples: Iterable[tuple[str, str]] = ()
    ) -> list[list[int]]:
        """`prompt` of each question, tokenized together on all cores."""
        before = [{"role": "system", "content": instruction}] if instruction else []
        for asked, answered in examples:
            before += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        chats = [[*before, {"role": "user", "content": question}] for question in questions]
        return self.tokenizer(write_chats(self.tokenizer, chats), add_special_tokens=False)["input_ids"]

    @property
    def end(self) -> str:
        """What an answer is taught to end with: the chat template's end, or else the tokenizer's."""
        written = template_end(self.tokenizer)
        return self.tokenizer.eos_token if written is None else self.tokenizer.convert_ids_to_tokens(written)

    @cached_property
    def known(self) -> Tensor:
        """Which ids the tokenizer has, bool, False behind the last: a model may have more of them, also in between."""
        ids = torch.tensor(list(self.tokenizer.get_vocab().values()))
        return torch.zeros(int(ids.max()) + 2, dtype=torch.bool).index_fill(0, ids, True)

    def texts(self, completion_ids: Tensor, completion_mask: Tensor) -> list[str]:
        """The text of each completion, special tokens left out. completion_ids, completion_mask: [rows, T]."""
        ids, mask = completion_ids.cpu(), completion_mask.cpu()
        kept = (mask & self.known[ids.clamp(max=len(self.known) - 1)]).numpy()
        rows = [of_row[keep].tolist() for of_row, keep in zip(ids.numpy(), kept, strict=True)]
        plain, names = PreTrainedTokenizerFast, ("batch_decode", "decode", "_decode")
        own = any(getattr(type(self.tokenizer), name) is not getattr(plain, name) for name in names)
        if own or self.tokenizer.clean_up_tokenization_spaces:
            return self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        # The same on all cores, where the class adds nothing of its own.
        return self.tokenizer.backend_tokenizer.decode_batch(rows, skip_special_tokens=True)


def load_policy(name: str, device: torch.device | str = "cpu") -> Policy:
    """Load `name` in float32: 'embedded', 'embedded-kernels', a folder, or a name on the Hugging Face hub. A folder
    with an adapter gives its base, with the adapter merged.

    Raises FileNotFoundError or ValueError, in one sentence, if model or tokenizer is missing, unreadable or not what it
    should be. Only a task that asks in chats needs a chat template.
    """
    folder = model_folder(name)
    if folder is not None and is_adapter(folder):
        from rlcourse.adapters import base_of, load_merged  # peft takes a second to import

        try:
            policy = load_policy(base_of(folder), device)
        except RecursionError:
            raise ValueError(f"The adapter in {folder} is its own base: name a model in its config.") from None
        load_merged(policy.model, folder)
        return with_words_of(folder, policy)
    path = name if folder is None else str(folder)
    if folder is not None:
        check_model_files(folder)
    options = {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}
    if torch.device(device).type == "cuda":
        options["device_map"] = {"": device}  # no copy in float32 on the CPU first
    model, found = loaded(AutoModelForCausalLM, path, folder, **options)
    tokenizer = load_tokenizer(path, folder)
    for kind in ("missing", "unexpected", "mismatched"):  # of which transformers only warns
        for key in found[f"{kind}_keys"]:
            weight = key if isinstance(key, str) else key[0]
            raise ValueError(f"The weights in {path} do not fit its config.json ({kind}: {weight}): {COPY_AGAIN}.")
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        raise ValueError(f"The weights in {path} are not finite: use an earlier checkpoint or another model.")
    if getattr(model.config, "quantization_config", None):
        raise ValueError(QUANTIZED.format(path))
    head = getattr(model.get_output_embeddings(), "weight", None)
    if head is not None and head is not model.get_input_embeddings().weight:
        model.config.tie_word_embeddings = False  # whatever it says: transformers goes by the file, others may not
    if hasattr(model, "peft_config"):  # of a name on the hub
        raise ValueError(f"{path} is an adapter: `hf download {path} --local-dir FOLDER`, then name that folder.")
    if getattr(model.config, "output_router_logits", False):
        raise ValueError(f"config.json in {path} has output_router_logits, a loss that isn't added: set it to false.")
    if stops := model.generation_config.stop_strings:
        raise ValueError(f"generation_config.json in {path} has stop_strings {stops!r}, and no engine stops there.")
    policy = policy_of(model.to(device).eval(), tokenizer, model.generation_config.eos_token_id, path)
    if name not in EMBEDDED_MODELS:
        from rlcourse.trial import try_model  # of strangers' models alone

        try:
            try_model(policy.model, tokenizer(ORDINARY, add_special_tokens=False)["input_ids"], policy.pad_id)
        except Exception as error:
            raise ValueError(f"The model in {path} cannot be used ({first_line(error)}): use another one.") from error
    return policy


def policy_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, eos: int | list[int] | None, path: str
) -> Policy:
    """The policy of a model and its tokenizer. eos: what generation_config.json names. Raises ValueError if they don't
    fit."""
    if max(tokenizer.get_vocab().values()) >= (rows := model.get_input_embeddings().num_embeddings):
        raise ValueError(f"The tokenizer in {path} has more tokens than its model's {rows}: {COPY_AGAIN}.")
    eos_ids = ends_of(tokenizer, eos, path)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_ids[0]
    # Qwen2.5-Instruct ships top-k, top-p and a repetition penalty here, which `generate` would mix into any settings.
    model.generation_config = GenerationConfig(eos_token_id=eos_ids, pad_token_id=pad_id)
    return Policy(model, tokenizer, eos_ids, pad_id)


def with_words_of(folder: Path, policy: Policy) -> Policy:
    """The policy with the tokenizer, chat template and ends in its adapter's folder, if any."""
    tokenizer, template = policy.tokenizer, folder / "chat_template.jinja"
    if (folder / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(str(folder), folder)
    if template.is_file():
        tokenizer.chat_template = read_bytes(template, COPY_AGAIN).decode()
        check_template(tokenizer, str(folder))
    named = policy.eos_ids
    if (folder / "generation_config.json").is_file():
        named = GenerationConfig.from_pretrained(folder).eos_token_id
    return policy_of(policy.model, tokenizer, named, str(folder))


def digest(model: PreTrainedModel) -> str:
    """The same for the same weights, an adapter's included, on any device. It looks at `LOOKED_AT` numbers of each.
    Ranks with a shard of the model call it together."""
    found = hashlib.blake2b(digest_size=16)
    for parameter in model.parameters():
        flat = full_tensor(parameter.detach()).flatten()
        found.update(flat[:: max(1, len(flat) // LOOKED_AT)].float().cpu().numpy().tobytes())
    return found.hexdigest()


def positions_of(model: PreTrainedModel) -> int:
    """The tokens that the model reads at most; many if its config has no limit."""
    config = model.config.get_text_config()
    found = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # one longer row in a batch changes the frequencies of all
        found = rope.get("original_max_position_embeddings") or found
    return found if found and found > 0 else MANY


def check_positions(model: PreTrainedModel, tokens: int) -> None:
    """Raise ValueError if the model has fewer positions than `tokens`."""
    if tokens > (positions := positions_of(model)):
        raise ValueError(
            f"A prompt and its completion of {tokens:,} tokens exceed the model's {positions:,} positions: lower "
            "max_prompt_tokens or max_new_tokens."
        )


def low_precision_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy with parameters in `dtype`, an adapter merged; buffers stay, as `model.to(bfloat16)` would round RoPE's
    frequencies. A sharded model's copy has no weights yet: an engine gathers them before it samples."""
    if is_sharded(model):
        return empty_copy(model, dtype, model.device)
    clone = copy.deepcopy(model).eval()
    merge(clone)
    clone.requires_grad_(False)
    for parameter in clone.parameters():
        parameter.data = parameter.data.to(dtype)
    return clone


def empty_copy(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A whole, frozen model like this one before it was sharded, its parameters in `dtype` and not filled in."""
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


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each layer's forward and backward pass. All layers share the compiled code, made at the first call."""
    for layer in layers_of(model):
        layer.compile(dynamic=True)  # the length of a micro-batch changes from step to step


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """The model's layers, which are called `layers`, `h`, `blocks` and more. Raises ValueError if there are none."""
    lists = [module for module in trunk_of(model).modules() if isinstance(module, nn.ModuleList)]
    kind, count = model.config.model_type, model.config.get_text_config().num_hidden_layers
    found = next((some for some in lists if len(some) == count), None)
    if found is None:
        raise ValueError(f"A model of the type {kind} has no list of {count} layers: leave out --compile and --shard.")
    return found


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
