"""Shapes of Llama and Qwen3 on the engine's step in PyTorch, and what no engine of ours knows. The same by our kernels:
test_triton_step.py, test_gpu_engine.py, and in tests/exact."""

import copy

import pytest
import torch
from policies import DEVICE, make_policy
from reference import assert_logprobs_are_the_models
from transformers import BertConfig, BertLMHeadModel, GPT2Config, GPT2LMHeadModel

from rlcourse.rollout import make_engine
from rlcourse.rollout.decoder import Decoder
from rlcourse.rollout.torch_engine import TorchEngine
from rlcourse.sampling import Sampling

PROMPTS = [[5, 9, 40, 7], [11], [30, 31, 32, 33, 34, 35, 36], [(7 * i) % 200 + 5 for i in range(90)]]
SHAPES = {
    "one kv head": {"architecture": "llama", "head_dim": 64, "num_key_value_heads": 1},
    "untied": {"architecture": "llama", "tied": False, "head_dim": 128},
    "queries wider than the hidden state": {"architecture": "qwen3", "head_dim": 16},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_of_prompts_and_of_later_tokens_are_those_of_transformers_in_float64(shape):
    policy = make_policy(3, **SHAPES[shape])
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
        TorchEngine(policy)
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
