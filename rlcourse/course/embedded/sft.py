"""Supervised fine-tuning from scratch: how the embedded model that ships in `data/minigsm/model/` was made, in about 12
minutes on two CPU cores: `python -m rlcourse.course.embedded.sft [--output FOLDER]`.

A small Qwen2 learns to continue a question with a demonstration: first worked answers alone, then, for a short while,
uneven ones (`demonstrations.py`). So it knows how to work a problem out, and often does not: what RL starts from.

Its batches are padded, unlike those of `rlcourse sft`: packed ones would round differently, and so make another model.
"""

import argparse
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from rlcourse.checkpoint import save_model
from rlcourse.course.embedded.demonstrations import WORKED, Mix, demonstration, minigsm_texts, uneven_mix
from rlcourse.files import try_empty_folder, try_folder
from rlcourse.policy import Policy
from rlcourse.tasks.minigsm import GeneratedProblem, sample
from rlcourse.tasks.tokenizer import train_tokenizer

MICRO_BATCH_ROWS = 32
TOKENIZER_BYTES = 1_000_000  # more than a tokenizer of this size has
IGNORED = -100  # label of positions that are not learned: the question and padding


@dataclass(frozen=True)
class Stage:
    """A part of the training: steps, peak learning rate, and the mixture of demonstrations for a problem."""

    name: str
    steps: int
    lr: float
    warmup_steps: int
    mix_of: Callable[[GeneratedProblem], Mix]


@dataclass
class SFTConfig:
    """The recipe of the embedded model: learn to calculate from clean answers, then pick up habits from uneven ones."""

    worked_steps: int = 1000
    uneven_steps: int = 100
    rows: int = 128  # demonstrations a step
    seed: int = 1
    vocab_size: int = 576
    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    intermediate_size: int = 384

    @property
    def stages(self) -> list[Stage]:
        return [
            Stage("worked", self.worked_steps, lr=2e-3, warmup_steps=50, mix_of=lambda problem: WORKED),
            Stage("uneven", self.uneven_steps, lr=4e-4, warmup_steps=10, mix_of=uneven_mix),
        ]


def new_policy(config: SFTConfig) -> Policy:
    """A Qwen2 model with random weights, and a tokenizer trained on the task's texts."""
    return random_policy(train_tokenizer(minigsm_texts(), config.vocab_size), config, max_position_embeddings=512)


def random_policy(tokenizer: PreTrainedTokenizerBase, recipe: Any, **others: Any) -> Policy:
    """A Qwen2 model with random weights for this tokenizer. Of the recipe it takes seed, hidden_size, layers, heads,
    kv_heads and intermediate_size; others: more fields of `Qwen2Config`."""
    torch.manual_seed(recipe.seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=recipe.hidden_size,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.kv_heads,
            intermediate_size=recipe.intermediate_size,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **others,
        )
    )
    # <|endoftext|> ends an answer too, should the model ever sample it.
    eos_ids = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config = GenerationConfig(eos_token_id=eos_ids, pad_token_id=tokenizer.pad_token_id)
    return Policy(model, tokenizer, eos_ids, tokenizer.pad_token_id)


def demonstrations(
    policy: Policy, rows: int, rng: random.Random, mix_of: Callable[[GeneratedProblem], Mix]
) -> list[tuple[list[int], list[int]]]:
    """Token ids of fresh prompts and their demonstrations, EOS included, shortest first."""
    pairs = []
    for _ in range(rows):
        problem = sample(rng, "sft")
        answer = demonstration(problem, rng, mix_of(problem)) + policy.tokenizer.eos_token
        pairs.append((policy.prompt(problem.question), policy.tokenizer(answer, add_special_tokens=False)["input_ids"]))
    return sorted(pairs, key=lambda pair: len(pair[0]) + len(pair[1]))


def batch(pairs: list[tuple[list[int], list[int]]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Token ids and labels [rows, length], right-padded; only the answer is labelled."""
    length = max(len(prompt) + len(answer) for prompt, answer in pairs)
    ids = torch.full((len(pairs), length), pad_id)
    labels = torch.full((len(pairs), length), IGNORED)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


def train_on(policy: Policy, pairs: list[tuple[list[int], list[int]]]) -> float:
    """Add the gradient of the mean loss of an answer's token; returns that loss.

    Rows of like length go together, or half of what is computed would be padding.
    """
    tokens = sum(len(answer) for _, answer in pairs)
    total = 0.0
    for start in range(0, len(pairs), MICRO_BATCH_ROWS):
        ids, labels = batch(pairs[start : start + MICRO_BATCH_ROWS], policy.pad_id)
        logits = policy.model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum") / tokens
        loss.backward()
        total += loss.item()
    return total


def sft(config: SFTConfig, output: str | Path) -> float:
    """Train the embedded model by the recipe and write it to `output` in bfloat16; returns the last loss, nats a token.

    Raises ValueError when `output` holds something already, OSError when it cannot be written to, RuntimeError when the
    loss stops being finite. Ctrl-C writes what there is.
    """
    output = Path(output).expanduser()
    try_empty_folder(output, "choose another --output")
    policy = new_policy(config)
    model_bytes = 2 * sum(parameter.numel() for parameter in policy.model.parameters())
    try_folder(output, "choose another --output", model_bytes + TOKENIZER_BYTES)
    try:
        for number, stage in enumerate(config.stages):
            loss = run_stage(policy, stage, config.rows, random.Random(config.seed + number))
    except KeyboardInterrupt:
        save_halved(policy, output)
        tqdm.write(f"Stopped early. The model as it is now is in {output}.")
        raise
    save_halved(policy, output)
    return loss


def run_stage(policy: Policy, stage: Stage, rows: int, rng: random.Random) -> float:
    """Train on `rows` fresh demonstrations a step, AdamW, the learning rate falling to a twentieth; the last loss."""
    parameters = policy.model.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=stage.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    loss = float("nan")
    bar = tqdm(range(stage.steps), desc=stage.name, unit="step", dynamic_ncols=True)
    for step in bar:
        rate = min(1.0, (step + 1) / stage.warmup_steps) * max(0.05, 1.0 - step / stage.steps)
        for group in optimizer.param_groups:
            group["lr"] = stage.lr * rate
        loss = train_on(policy, demonstrations(policy, rows, rng, stage.mix_of))
        if not math.isfinite(loss):
            raise RuntimeError(f"The loss of step {step + 1} is not finite: nothing was saved.")
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss:.3f}")
    return loss


def save_halved(policy: Policy, output: Path) -> None:
    """Write model and tokenizer in bfloat16: half the size, and the weights are noisy far above that."""
    policy.model.to(torch.bfloat16)
    save_model(policy, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="runs/embedded", help="an empty folder, or one that is not there")
    output = parser.parse_args().output
    loss = sft(SFTConfig(), output)
    print(f"Loss {loss:.3f} nats a token. The model is in {output}: `rlcourse eval --model {output}` measures it.")


if __name__ == "__main__":
    main()
