"""Models with random weights, which need no download."""

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from rlcourse.measure.shapes import OTHERS, QWEN25, ModelShape
from rlcourse.tasks import Task
from tools.embedded.tokenizer import train_tokenizer

SHAPES = {name.split("/")[1].lower(): shape for name, shape in (QWEN25 | OTHERS).items()}
SHAPES["tiny"] = ModelShape(2, 64, 4, 2, 16, 128, 2048, tied=True)
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
    """Write a model of a known shape with random weights (bfloat16), and a tokenizer trained for the task."""
    tokenizer = train_tokenizer(task_texts(task), vocab_size=2000)
    (family, details), sizes = FAMILIES.get(shape, ("qwen2", QWEN)), SHAPES[shape]
    config = AutoConfig.for_model(
        family,
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        **details,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=sizes.tied,
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
