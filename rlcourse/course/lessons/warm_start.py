"""Small models trained from random weights on demonstrations: the one of lesson 14, and those that ship."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from rlcourse.paths import data_folder
from rlcourse.policy import Policy
from rlcourse.tasks.kernels.language import Computation, eager, write

Pairs = list[tuple[list[int], list[int]]]  # token ids of prompts and of their answers, EOS included

MICRO_BATCH_ROWS = 32
IGNORED = -100  # label of positions that aren't learned: the question and padding

# The size of the models that ship, as `Qwen2Config` calls it.
SIZE = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZE["intermediate_size"] = 384


def random_policy(tokenizer: PreTrainedTokenizerBase, seed: int, **config: Any) -> Policy:
    """A Qwen2 model with random weights for this tokenizer. config: fields of `Qwen2Config`, before those of `SIZE`."""
    torch.manual_seed(seed)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), tie_word_embeddings=True, **SIZE | ends | config))
    # <|endoftext|> ends an answer too, should the model ever sample it.
    eos_ids = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config = GenerationConfig(eos_token_id=eos_ids, pad_token_id=tokenizer.pad_token_id)
    return Policy(model, tokenizer, eos_ids, tokenizer.pad_token_id)


def as_pair(policy: Policy, question: str, answer: str) -> tuple[list[int], list[int]]:
    """Token ids of the question's prompt, and of the answer with EOS."""
    ids = policy.tokenizer(answer + policy.tokenizer.eos_token, add_special_tokens=False)["input_ids"]
    return policy.prompt(question), ids


def by_length(pairs: Pairs) -> Pairs:  # so that a micro-batch has little padding
    return sorted(pairs, key=lambda pair: len(pair[0]) + len(pair[1]))


def batch(pairs: Pairs, pad_id: int) -> tuple[Tensor, Tensor]:
    """Token ids and labels [rows, length], right-padded; only answers are labelled."""
    ids = [torch.tensor(prompt + answer) for prompt, answer in pairs]
    labels = [torch.tensor([IGNORED] * len(prompt) + answer) for prompt, answer in pairs]
    return pad_sequence(ids, True, pad_id), pad_sequence(labels, True, IGNORED)


def train_on(policy: Policy, pairs: Pairs) -> float:
    """Add the gradient of the mean loss per answer token, and return that loss."""
    tokens = sum(len(answer) for _, answer in pairs)
    total = 0.0
    for start in range(0, len(pairs), MICRO_BATCH_ROWS):
        ids, labels = batch(pairs[start : start + MICRO_BATCH_ROWS], policy.pad_id)
        loss = policy.model(input_ids=ids, labels=labels, use_cache=False, num_items_in_batch=tokens).loss
        loss.backward()
        total += loss.item()
    return total


def kernel_policy(seed: int = 1, **config: Any) -> Policy:
    """A Qwen2 model with random weights and the tokenizer of the kernel language; see `random_policy`."""
    # Positions are below 128: with a theta of 10,000 the model learns to copy much later.
    rope = {"rope_type": "default", "rope_theta": 100.0}
    tokenizer = AutoTokenizer.from_pretrained(data_folder() / "kernels" / "model")
    return random_policy(tokenizer, seed, max_position_embeddings=256, rope_parameters=rope, **config)


def draw_programs(
    policy: Policy, problems: Sequence[Computation], rows: int, rng: random.Random, demonstrate: Callable = eager
) -> Pairs:
    """Prompts drawn from the problems, each with the program that `demonstrate` gives."""
    drawn = rng.choices(problems, k=rows)
    return by_length([as_pair(policy, str(c), " " + write(demonstrate(c))) for c in drawn])


def imitate(
    policy: Policy, problems: Sequence[Computation], steps: int, lr: float, rows: int, rng: random.Random,
    demonstrate: Callable = eager,
) -> float:  # fmt: skip
    """Train on `rows` fresh demonstrations per step with AdamW, the learning rate falling to a twentieth of `lr`; the
    last loss in nats per token. demonstrate: a function of a computation to a program."""
    parameters = list(policy.model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    bar = tqdm(range(steps), desc="sft", unit="step", dynamic_ncols=True)
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 30) * max(0.05, 1.0 - step / steps)
        loss = train_on(policy, draw_programs(policy, problems, rows, rng, demonstrate))
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss:.3f}")
    return loss
