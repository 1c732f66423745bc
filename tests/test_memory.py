"""The memory estimate against real models, real backward passes and sums done by hand."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from policies import DEVICE, make_policy
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlcourse import memory
from rlcourse.config import make_config
from rlcourse.measure.records import load_record
from rlcourse.measure.shapes import QWEN25, ModelShape, model_shape, parameters
from rlcourse.memory import activation_bytes, estimate

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
EXACT = "bitwise-equal"  # a variant of the record
TOGETHER = 112  # rows of the largest micro-batch there


def qwen2_config(shape: ModelShape) -> Qwen2Config:
    sizes = {"num_hidden_layers": shape.layers, "hidden_size": shape.hidden, "intermediate_size": shape.intermediate}
    heads = {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim}
    return Qwen2Config(**sizes, **heads, vocab_size=shape.vocabulary, tie_word_embeddings=shape.tied)


@pytest.mark.parametrize(("tied", "head_dim"), [(True, 8), (False, 24)])  # 24: queries wider than the hidden state
def test_parameters_are_those_of_a_real_model(tied, head_dim):
    shape = ModelShape(3, 32, 4, 2, head_dim, 96, 160, tied)
    config = qwen2_config(shape)
    assert ModelShape.from_config(config) == shape
    with torch.device("meta"):
        assert parameters(shape) == sum(parameter.numel() for parameter in Qwen2ForCausalLM(config).parameters())


PUBLISHED = {  # counts that the hub shows beside each checkpoint
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_shapes_have_the_published_number_of_parameters(name):
    """A Llama but for its few biases less."""
    near = pytest.approx(PUBLISHED[name], rel=1e-4 if "Llama" in name else 0)
    assert parameters(model_shape(name)) == parameters(model_shape(name + "-Instruct")) == near


def test_a_model_that_is_nowhere_is_said_to_be(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="nobody/nothing is not a folder here"):
        model_shape("nobody/nothing")
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        model_shape(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match=r"not that of a Qwen2-like decoder: .*intermediate_size"):
        model_shape(str(tmp_path))


def test_every_part_equals_the_sum_done_by_hand():
    # Qwen2.5-0.5B: n = 494,032,768; 24 layers, 2 KV heads of 64, vocabulary 151,936. 64 rows; 100 + 300 tokens.
    settings = {"max_prompt_tokens": 100, "max_new_tokens": 300, "num_prompts": 8, "num_generations": 8}
    config = make_config("a10g", eval_problems=10, micro_batch_tokens=1201, logprob_chunk=1000, kl_coef=0.1, **settings)
    found = estimate(config, QWEN25["Qwen/Qwen2.5-0.5B"], "cuda")
    weights, moments, reference, engine = 1_976_131_072, 3_952_262_144, 1_976_131_072, 988_065_536
    cache = (64 * 400 + 10 * 100) * 24 * 2 * 2 * 64 * 2
    always = memory.LIBRARIES + weights + moments + reference + engine + cache
    gradients, autocast, logits = 1_976_131_072, 988_065_536, 3 * 1000 * 151_936 * 4
    # 1,600 tokens: 24 layer inputs of 896 float32, and one layer's norms, attention with its mask, feed-forward.
    activations = 1_600 * (24 * 4 * 896 + 26 * 896 + 2 * (4 * 896 + 400) + 8 * 4864)
    assert found.rollout == always + 64 * 100 * 4 * 4864 * 2
    assert found.update == always + gradients + autocast + activations + logits


def saved_for_backward(shape: ModelShape, rows: int, length: int, dtype: str, checkpointing: bool) -> int:
    """Bytes of the tensors with a row for every token that a forward pass of a real model keeps."""
    model = Qwen2ForCausalLM(qwen2_config(shape)).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, :5] = 0  # left padding
    saved = {}

    def note(tensor):
        if tensor.dim() > 2 or len(tensor) == rows * length:  # neither weights nor autocast's copies of them
            # Kept in the dictionary, so that no other tensor gets the same address.
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16")
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), autocast:
        output = model.model(input_ids=torch.ones_like(mask), attention_mask=mask, use_cache=False)
    assert output.last_hidden_state.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize(("dtype", "checkpointing"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_activations_of_a_layer_are_what_autograd_really_saves(dtype, checkpointing):
    shallow = ModelShape(2, 64, 4, 2, 16, 192, 160, tied=True)
    deep = replace(shallow, layers=6)
    run = (3, 50, dtype, checkpointing)
    real = saved_for_backward(deep, *run) - saved_for_backward(shallow, *run)  # without what stands outside the layers
    assert activation_bytes(deep, *run) - activation_bytes(shallow, *run) == pytest.approx(real, rel=0.01)


@pytest.mark.parametrize(("rows", "tokens"), [(16, TOGETHER * 264), (256, TOGETHER * 264), (256, 10**6)])
def test_the_exact_pass_needs_what_a_gpu_has_measured(rows, tokens):
    """The record's rows answer with 256 tokens to a prompt of 40 that eight of them share, and not more than `TOGETHER`
    are one micro-batch."""
    rows_of_record = load_record("exact", "nvidia-h200")["results"]
    measured = {r["rows"]: r for r in rows_of_record if r["variant"] == EXACT and r["shape"] == "qwen2.5-0.5b"}
    sizes = {"num_prompts": rows // 8, "max_prompt_tokens": 8, "max_new_tokens": 256, "eval_problems": 1}
    config = make_config("h200", **sizes, num_generations=8, micro_batch_tokens=tokens)
    found = estimate(config, QWEN25["Qwen/Qwen2.5-0.5B"], "cuda", exact=True)
    peak = measured[rows]["peak_memory_bytes"] + memory.LIBRARIES
    held = found.peak
    if tokens == TOGETHER * 264:
        assert held == pytest.approx(peak, rel=0.15)
    else:
        assert (held > 1.5 * peak) == (rows == 256)


def test_activations_of_the_exact_pass_are_what_a_layer_keeps():
    pytest.importorskip("triton", reason="Triton is there on Linux alone")
    from rlcourse.exact.layers import angles_at, attention, layer_pass
    from rlcourse.exact.sequences import Sequences
    from rlcourse.exact.weights import fused_weights

    shape = ModelShape(1, 64, 4, 2, 32, 128, 300, tied=True, qk_norm=True)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 1}
    policy = make_policy(architecture="qwen3", hidden_size=64, intermediate_size=128, **sizes)
    weights = fused_weights(policy.model, DTYPE)
    sequences = Sequences.of(torch.full((3,), 8), torch.zeros(3, dtype=torch.long), 8, torch.device(DEVICE))
    angles, x = angles_at(weights, sequences.positions), torch.randn(3 * 8, 64, device=DEVICE)
    _, saved = layer_pass(weights, weights.layers[0], x, angles, partial(attention, sequences=sequences))
    kept = sum(tensor.nbytes for tensor in saved if tensor is not None)
    dtype, two = str(DTYPE).split(".")[1], replace(shape, layers=2)
    assert activation_bytes(shape, 3, 8, dtype, False, exact=True) == kept
    assert activation_bytes(two, 3, 8, dtype, True, exact=True) == 2 * kept - saved[-1].nbytes
