"""Models with random weights, which need no download."""

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from rlcourse.tasks import Task
from rlcourse.tasks.tokenizer import train_tokenizer

# The config.json of each model on the hub, https://huggingface.co/Qwen and https://huggingface.co/meta-llama
SHAPES = {
    "qwen2.5-0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "qwen2.5-1.5b": {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "qwen3-0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "llama-3.2-1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "tiny": {
        "vocab_size": 2048,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
QWEN = {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}
LLAMA = {
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
FAMILIES = {"qwen3-0.6b": ("qwen3", QWEN), "llama-3.2-1b": ("llama", LLAMA)}  # the others are a Qwen2
POSITIONS = 32768  # of every shape


def task_texts(task: Task, count: int = 2000) -> Iterable[str]:
    """Texts to train a tokenizer on, so that prompts are about as long as with a real one."""
    for problem in task.problems("train")[:count]:
        yield problem.question
        yield problem.answer
    yield from ["system\nuser\nassistant\n", task.instruction] * 20


def write_random_model(shape: str, task: Task, folder: Path) -> None:
    """Write a model of a known shape with random weights (bfloat16), and a tokenizer trained for the task.

    Raises ValueError for an unknown shape.
    """
    if shape not in SHAPES:
        raise ValueError(f"Unknown shape {shape!r}: use one of {', '.join(SHAPES)}.")
    tokenizer = train_tokenizer(task_texts(task), vocab_size=2000)
    family, details = FAMILIES.get(shape, ("qwen2", QWEN))
    config = AutoConfig.for_model(
        family,
        **SHAPES[shape],
        **details,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # a GPU draws the numbers in no time
        model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
