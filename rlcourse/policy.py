"""The policy: a causal language model with its tokenizer, how a question becomes a prompt, and PPO's value head."""

import copy
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from rlcourse.paths import data_folder

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

    def prompt(self, question: str, instruction: str = "") -> list[int]:
        """Token ids of a chat: `instruction` as system turn if given, the question, and the open turn of the answer."""
        messages = [{"role": "system", "content": instruction}] if instruction else []
        messages.append({"role": "user", "content": question})
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def texts(self, completion_ids: Tensor, completion_mask: Tensor) -> list[str]:
        """The text of each completion, special tokens left out. completion_ids, completion_mask: [rows, T]."""
        known = completion_mask & (completion_ids < len(self.tokenizer))  # a model may have more rows than tokens
        rows = [ids[keep].tolist() for ids, keep in zip(completion_ids.cpu(), known.cpu(), strict=True)]
        return self.tokenizer.batch_decode(rows, skip_special_tokens=True)


def load_policy(name: str, device: torch.device | str = "cpu") -> Policy:
    """Load `name` in float32: 'embedded', a folder, or a name on the Hugging Face hub.

    Raises FileNotFoundError or ValueError in one sentence when the model or its tokenizer is not there, or has no chat
    template.
    """
    path = str(data_folder() / "minigsm" / "model") if name == "embedded" else name
    is_folder = Path(path).exists() or path.startswith((".", "/", "~"))
    if is_folder and not (Path(path) / "config.json").is_file():
        raise FileNotFoundError(f"No model in {path}: a model folder holds config.json and its weights.")
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except OSError as error:
        raise FileNotFoundError(_unreachable(path, is_folder, "model")) from error
    tokenizer = load_tokenizer(path, is_folder)
    eos = model.generation_config.eos_token_id
    eos_ids = [eos] if isinstance(eos, int) else list(eos or [tokenizer.eos_token_id])
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_ids[0]
    # Qwen2.5-Instruct ships top-k, top-p and a repetition penalty here, which `generate` would mix into any settings.
    model.generation_config = GenerationConfig(eos_token_id=eos_ids, pad_token_id=pad_id)
    return Policy(model.to(device).eval(), tokenizer, eos_ids, pad_id)


def load_tokenizer(path: str, is_folder: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name, with a chat template; errors as in `load_policy`."""
    if is_folder and not (Path(path) / "tokenizer.json").is_file():
        raise FileNotFoundError(
            f"No tokenizer in {path}: copy the model's tokenizer.json and tokenizer_config.json there."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except OSError as error:
        raise FileNotFoundError(_unreachable(path, is_folder, "tokenizer")) from error
    if tokenizer.chat_template is None:
        raise ValueError(f"The tokenizer of {path} has no chat template: use an instruction-tuned model.")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"The tokenizer of {path} has no end-of-sequence token: set eos_token in its config.")
    return tokenizer


def _unreachable(path: str, is_folder: bool, what: str) -> str:
    if is_folder:
        return f"The {what} in {path} cannot be read: check that its files are complete."
    return f"{path} is no folder here and its {what} cannot be fetched from the hub: check the name and the network."


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model that takes no gradients: the reference of the KL divergence."""
    return copy.deepcopy(model).eval().requires_grad_(False)


def low_precision_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy with parameters in `dtype`; buffers stay, as `model.to(bfloat16)` would round RoPE's frequencies."""
    clone = frozen_copy(model)
    for parameter in clone.parameters():
        parameter.data = parameter.data.to(dtype)
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
