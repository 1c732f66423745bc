"""Small policies with random weights, made here: nothing is downloaded."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run in Triton's interpreter; looked at when Triton is imported

from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rlcourse.policy import Policy
from rlcourse.tasks.tokenizer import train_tokenizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # engines and trainer are tested on a GPU where there is one
TEXTS = ["user\nassistant\n", "Tom has 3 apples and buys 12 more. #### 15", "Anna has 7+8=15 cards left."] * 20


def make_policy(seed: int = 0, tied: bool = True, architecture: str = "qwen2", **shape) -> Policy:
    """A Qwen2 or Qwen3 of two layers whose next-token distribution is far from uniform, so that mistakes show."""
    tokenizer = train_tokenizer(TEXTS, 300)
    torch.manual_seed(seed)
    sizes = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    kinds = {"qwen2": (Qwen2ForCausalLM, Qwen2Config), "qwen3": (Qwen3ForCausalLM, Qwen3Config)}
    causal_lm, config = kinds[architecture]
    model = causal_lm(
        config(
            vocab_size=len(tokenizer),
            max_position_embeddings=256,
            tie_word_embeddings=tied,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **(sizes | shape),
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    eos_ids = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config = GenerationConfig(eos_token_id=eos_ids, pad_token_id=tokenizer.pad_token_id)
    return Policy(model.eval().to(DEVICE), tokenizer, eos_ids, tokenizer.pad_token_id)


@pytest.fixture
def policy() -> Policy:
    return make_policy()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> str:
    """A model folder as `load_policy` takes it."""
    folder = tmp_path_factory.mktemp("model")
    policy = make_policy()
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return str(folder)
