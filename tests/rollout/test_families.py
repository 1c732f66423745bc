"""Llama's shapes and untied heads on the engine's step in PyTorch, in training around it, and what no engine of ours
knows. The same by our kernels: test_triton_step.py, test_paged.py, and in tests/exact."""

import copy
import math

import pytest
import torch
from policies import DEVICE, LLAMA3, make_policy
from reference import assert_logprobs_are_the_models
from transformers import BertConfig, BertLMHeadModel, GPT2Config, GPT2LMHeadModel

from rlcourse.exact.weights import FusedWeights
from rlcourse.llm import LLM
from rlcourse.rollout import make_engine
from rlcourse.rollout.decoder import Decoder
from rlcourse.rollout.fast import FastEngine
from rlcourse.sampling import GREEDY, Sampling

PROMPTS = [[5, 9, 40, 7], [11], [30, 31, 32, 33, 34, 35, 36], [(7 * i) % 200 + 5 for i in range(90)]]
SHAPES = {
    "one kv head": {"tied": True, "head_dim": 64, "num_key_value_heads": 1},
    "untied": {"tied": False, "head_dim": 128},
}


def llama(shape: str = "untied", seed: int = 3, **sizes):
    return make_policy(seed, architecture="llama", **(SHAPES[shape] | sizes))


def scaled_frequencies(size: int, base: float, factor: float, low: float, high: float, positions: int) -> list[float]:
    """RoPE's frequencies as Llama 3.1 changes them, in float64: short waves stay, those of which fewer than `low` fit
    into the first training's positions are `factor` times as long, and in between it is a mix."""
    found = []
    for i in range(0, size, 2):
        frequency = base ** (-i / size)
        waves = positions * frequency / (2 * math.pi)
        mix = min(max((waves - low) / (high - low), 0.0), 1.0)
        found.append(mix * frequency + (1 - mix) * frequency / factor)
    return found


def test_angles_are_those_of_llama_3_and_of_transformers():
    policy = llama()
    weights = FusedWeights(policy.model, torch.float32)
    rope = [LLAMA3[name] for name in ("factor", "low_freq_factor", "high_freq_factor")]
    expected = scaled_frequencies(128, LLAMA3["rope_theta"], *rope, LLAMA3["original_max_position_embeddings"])
    plain = [LLAMA3["rope_theta"] ** (-i / 128) for i in range(0, 128, 2)]
    assert {round(b / a, 3) for a, b in zip(expected, plain, strict=True)} >= {1.0, 8.0}  # and what is between
    angles = torch.arange(256, dtype=torch.float64)[:, None] * torch.tensor(expected, dtype=torch.float64)
    for found, exact in ((weights.cos, angles.cos()), (weights.sin, angles.sin())):
        torch.testing.assert_close(found.double().cpu(), exact, rtol=0, atol=5e-5)
    positions = torch.arange(256, device=DEVICE)[None]
    cos, sin = policy.model.model.rotary_emb(torch.zeros(1, device=DEVICE), positions)
    assert torch.equal(cos[0, :, :64], weights.cos) and torch.equal(sin[0, :, 64:], weights.sin)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_of_prompts_and_of_later_tokens_are_those_of_transformers_in_float64(shape):
    policy = llama(shape)
    decoder, exact = Decoder(policy.model, torch.float32, False), copy.deepcopy(policy.model).double()
    lengths = torch.tensor([len(prompt) for prompt in PROMPTS], device=DEVICE)
    ids = torch.zeros(len(PROMPTS), 95, dtype=torch.long, device=DEVICE)
    for row, prompt in enumerate(PROMPTS):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    cache, rows = decoder.new_cache(len(PROMPTS), 95), torch.arange(len(PROMPTS), device=DEVICE)
    with torch.no_grad():
        found = [decoder.prefill(ids[:, :90], lengths, cache)]
        for _ in range(4):
            tokens = found[-1].argmax(1)
            ids[rows, lengths] = tokens
            found.append(decoder.decode(tokens, lengths, cache, 95))
            lengths = lengths + 1
        for row, prompt in enumerate(PROMPTS):
            logits = exact(ids[row, None, : len(prompt) + 4]).logits[0, len(prompt) - 1 :]
            ours = torch.stack([step[row] for step in found])
            torch.testing.assert_close(ours.double(), logits, rtol=0, atol=1e-5 * logits.abs().max().item())


@pytest.fixture
def folder(tmp_path) -> str:
    """An untied Llama of which every third token ends an answer."""
    policy = llama(head_dim=16)
    policy.model.generation_config.eos_token_id = list(range(0, 300, 3))
    policy.model.save_pretrained(tmp_path / "model")
    policy.tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_a_saved_llama_is_one_for_programs_of_ones_own(folder):
    fast, plain = (LLM(folder, name, device="cpu") for name in ("fast", "hf-dynamic"))
    assert isinstance(fast.engine, FastEngine)
    prompts = ["What is 3+4?", [5, 9, 40, 7], [11]]
    for _ in range(2):
        found, expected = (llm.generate(prompts, GREEDY, 6) for llm in (fast, plain))
        assert [[a.tokens for a in group] for group in found] == [[a.tokens for a in group] for group in expected]
        fast.sleep()


YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ({"architecture": "qwen2", "use_sliding_window": True, "sliding_window": 3}, "a sliding window"),
        ({"architecture": "qwen2", "hidden_act": "gelu"}, "the activation gelu"),
        ({"architecture": "qwen3", "attention_bias": True}, "the biases that attention_bias or mlp_bias adds"),
        ({"architecture": "llama", "mlp_bias": True}, "the biases that attention_bias or mlp_bias adds"),
        ({"architecture": "llama", "rope_parameters": YARN}, "RoPE of the type yarn"),
    ],
)
def test_what_the_fast_engine_does_not_know_is_said_and_sampled_by_hf(kind, part, capsys):
    policy = make_policy(**kind)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    with pytest.raises(ValueError, match=f"^The fast engine does not know {part}: use --engine hf-dynamic.$"):
        FastEngine(policy)
    engine = make_engine(policy, "fast", torch.float32)
    said = capsys.readouterr()
    assert said.err == f"The fast engine does not know {part}: hf-dynamic samples instead.\n" and not said.out
    found = engine.generate(PROMPTS[:3], 2, 6, Sampling())
    assert_logprobs_are_the_models(policy, found, Sampling())
    with pytest.raises(ValueError, match="does not know"):
        make_engine(policy, "fast", torch.float32, cache_gb=1.0)


def test_models_of_other_families_are_refused_by_name():
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2))
    bert = BertLMHeadModel(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    for model, kind in ((gpt2, "gpt2"), (bert, "bert")):
        with pytest.raises(ValueError, match=rf"models of the type {kind} \(but Qwen2, Qwen3 and Llama\)"):
            Decoder(model, torch.float32, False)
