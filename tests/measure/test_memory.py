"""The memory estimate against real models, real backward passes and sums done by hand."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from policies import DEVICE, make_policy
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlcourse.config import make_config
from rlcourse.logprobs import chunked_logprobs
from rlcourse.measure import memory
from rlcourse.measure.memory import activation_bytes, estimate, exact_activation_bytes
from rlcourse.measure.records import load_record
from rlcourse.measure.shapes import QWEN25, ModelShape, model_shape, parameters
from rlcourse.sampling import Sampling

TINY = ModelShape(2, 32, 4, 2, 8, 96, 160, tied=True)
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
EXACT = "one set of numbers"  # a variant of the record
TOGETHER = 112  # rows of the largest micro-batch there


def qwen2_config(shape: ModelShape) -> Qwen2Config:
    return Qwen2Config(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
    )


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


def test_shape_without_optional_keys_takes_the_usual_values():
    sizes = {"num_hidden_layers": 1, "hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 5}
    shape = ModelShape.from_config(SimpleNamespace(vocab_size=7, head_dim=None, **sizes))
    assert shape == ModelShape(1, 12, 3, 3, 4, 5, 7, tied=False)


def test_a_model_that_is_nowhere_is_said_to_be(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="No folder 'nobody/nothing'"):
        model_shape("nobody/nothing")
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        model_shape(str(tmp_path))
    (tmp_path / "config.json").write_text('{"n_layer": 2}')
    with pytest.raises(ValueError, match=r"not that of a Qwen2-like decoder: .*num_hidden_layers"):
        model_shape(str(tmp_path))


def test_every_part_equals_the_sum_done_by_hand():
    # Qwen2.5-0.5B: n = 494,032,768; 24 layers, 2 KV heads of 64, vocabulary 151,936. 64 rows; 100 + 300 tokens.
    settings = {"max_prompt_tokens": 100, "max_new_tokens": 300, "num_prompts": 8, "num_generations": 8}
    config = make_config("a10g", eval_problems=10, micro_batch_tokens=1201, logprob_chunk=1000, kl_coef=0.1, **settings)
    parts = vars(estimate(config, QWEN25["Qwen/Qwen2.5-0.5B"], "cuda"))
    assert parts == {
        "weights": 1_976_131_072,
        "gradients": 1_976_131_072,
        "optimizer": 3_952_262_144,
        "reference": 1_976_131_072,
        "rollout_weights": 988_065_536,
        "kv_cache": (64 * 400 + 10 * 100) * 24 * 2 * 2 * 64 * 2,
        "kept_cache": (64 * 400 + 10 * 100) * 24 * 2 * 2 * 64 * 2,
        "prefill": 64 * 100 * 4 * 4864 * 2,
        "sampling": 3 * 64 * 151_936 * 4,
        "autocast": 988_065_536,
        "gathered": 0,
        # 1,600 tokens: 24 layer inputs of 896 float32, and one layer's norms, attention with its mask, feed-forward.
        "activations": 1_600 * (24 * 4 * 896 + 26 * 896 + 2 * (4 * 896 + 400) + 8 * 4864),
        "logits": 3 * 1000 * 151_936 * 4,
        "captured": 0,
    }


def test_rows_are_those_of_the_larger_of_step_and_evaluation_and_prompts_are_cached_beside_them():
    sizes = {"num_prompts": 4, "num_generations": 2, "max_prompt_tokens": 30, "max_new_tokens": 20}
    few, many = (estimate(make_config(engine="hf-dynamic", **sizes, eval_problems=n), TINY, "cpu") for n in (2, 1000))
    fast = estimate(make_config(engine="fast", **sizes, eval_problems=2), TINY, "cpu")
    assert many.kv_cache / few.kv_cache == 256 / 8 and fast.kv_cache / few.kv_cache == (8 * 50 + 4 * 30) / (8 * 50)
    long = {"num_prompts": 32, "num_generations": 8, "max_prompt_tokens": 400}  # 256 rows
    at_once, all_at_once = (estimate(make_config(engine=e, **long), TINY, "cpu").prefill for e in ("fast", "hf-static"))
    assert all_at_once / at_once == pytest.approx(256 * 400 / memory.PREFILL_TOKENS)


def test_phases_hold_what_stands_in_them():
    whole = estimate(make_config(kl_coef=0.1), TINY, "cpu")
    kept = whole.weights + whole.optimizer + whole.reference + whole.rollout_weights
    assert whole.rollout == memory.LIBRARIES + kept + whole.kv_cache + max(whole.prefill, whole.sampling)
    in_backward = whole.gradients + whole.autocast + whole.activations + whole.logits
    assert whole.update == memory.LIBRARIES + kept + in_backward and whole.kept_cache == 0
    on_gpu, asleep = (estimate(make_config(sleep=sleep), TINY, "cuda") for sleep in (False, True))
    assert on_gpu.kept_cache == on_gpu.kv_cache == asleep.kv_cache and asleep.kept_cache == 0
    assert on_gpu.update - asleep.update == on_gpu.kv_cache
    paged = estimate(make_config(cache_gb=0.5), TINY, "cuda")
    assert paged.kv_cache == paged.kept_cache == 500_000_000
    dynamic, static = (estimate(make_config(engine=name), TINY, "cpu") for name in ("hf-dynamic", "hf-static"))
    assert dynamic.kept_cache == 0 and static.kept_cache == static.kv_cache == dynamic.kv_cache
    assert whole.peak == pytest.approx(1.1 * max(whole.rollout, whole.update))
    assert whole.fits(whole.peak) and not whole.fits(whole.peak - 1)


def test_vllm_has_weights_and_a_cache_of_its_own_but_not_as_a_server():
    vllm = estimate(make_config(engine="vllm"), TINY, "cuda")
    assert vllm.kv_cache == vllm.kept_cache == 4_000_000_000 and vllm.rollout_weights == 4 * parameters(TINY)
    smaller = estimate(make_config(engine="vllm", cache_gb=0.5, sleep=True), TINY, "cuda")
    assert smaller.kv_cache == 500_000_000 and smaller.kept_cache == 0
    served = estimate(make_config(engine="vllm", vllm_server="http://a:1"), TINY, "cuda")
    assert not any((served.rollout_weights, served.kv_cache, served.kept_cache, served.prefill, served.sampling))
    assert served.weights == vllm.weights and served.logits == vllm.logits


def test_sharded_between_four_a_rank_has_a_quarter_and_what_is_gathered():
    shape = QWEN25["Qwen/Qwen2.5-0.5B"]
    config = make_config("h200", kl_coef=0.1)
    whole, part = estimate(config, shape, "cuda"), estimate(replace(config, shard=True), shape, "cuda", 4)
    for name in ("weights", "gradients", "optimizer", "reference"):
        assert getattr(part, name) == getattr(whole, name) / 4
    for name in ("rollout_weights", "kv_cache", "kept_cache", "prefill", "sampling", "activations", "logits"):
        assert getattr(part, name) == getattr(whole, name)
    # The embedding, 151,936 x 896, with the last norm; two layers of 14,912,384; gradients; the embedding's again.
    around = 151_936 * 896 + 896
    assert part.autocast == 0 and part.gathered == 2 * 2 * (around + 2 * 14_912_384) + 4 * around
    assert whole.update - part.update == 3 * (16 + 4) * 494_032_768 / 4 + whole.autocast - part.gathered
    assert estimate(make_config(shard=True, engine="hf-dynamic"), TINY, "cpu", 2).rollout_weights == 4 * parameters(
        TINY
    )


def test_parts_that_a_config_does_not_need_are_zero():
    plain = estimate(make_config(engine="hf-dynamic"), TINY, "cpu")
    assert (plain.reference, plain.rollout_weights, plain.autocast) == (0, 0, 0)
    assert estimate(make_config(reference=True), TINY, "cpu").reference == 4 * parameters(TINY)
    on_gpu = make_config(engine="hf-dynamic", dtype="bfloat16")
    assert estimate(on_gpu, TINY, "cuda").rollout_weights == 2 * parameters(TINY)


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (50, 1), (51, 2), (10**6, 16)])
def test_a_micro_batch_is_counted_in_tokens_and_has_a_row_at_least_and_a_minibatch_at_most(tokens, rows):
    """Rows of 50 tokens."""
    sizes = {"num_prompts": 4, "num_generations": 4, "max_prompt_tokens": 30, "max_new_tokens": 20}
    config = make_config(**sizes, micro_batch_tokens=tokens, logprob_chunk=10**6)
    found, third = estimate(config, TINY, "cpu"), estimate(replace(config, minibatches=3), TINY, "cpu")
    assert third.activations == activation_bytes(TINY, min(rows, 6), 50, "float32", False)
    assert found.activations == activation_bytes(TINY, rows, 50, "float32", False)
    assert found.logits == 3 * min(rows * 50, 16 * 20) * TINY.vocabulary * 4


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


def test_logit_copies_are_what_a_chunk_really_takes():
    vocabulary, chunk = 4000, 64
    hidden, head = torch.randn(2 * chunk, 8, requires_grad=True), torch.randn(vocabulary, 8, requires_grad=True)
    targets = torch.randint(0, vocabulary, (2 * chunk,))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        chunked_logprobs(hidden, head, targets, Sampling(), chunk).sum().backward()
    copy, now, peak = chunk * vocabulary * 4, 0, 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    assert peak / copy == pytest.approx(memory.LOGIT_COPIES, abs=0.5)


@pytest.mark.parametrize(("rows", "tokens"), [(16, TOGETHER * 264), (256, TOGETHER * 264), (256, 10**6)])
def test_the_exact_pass_needs_what_a_gpu_has_measured(rows, tokens):
    """The record's rows answer with 256 tokens to a prompt of 40 that eight of them share, and not more than `TOGETHER`
    are one micro-batch. A record counts what tensors hold, and so nothing of a captured graph between its replays."""
    rows_of_record = load_record("exact", "nvidia-h200")["results"]
    measured = {r["rows"]: r for r in rows_of_record if r["variant"] == EXACT and r["shape"] == "qwen2.5-0.5b"}
    sizes = {"num_prompts": rows // 8, "max_prompt_tokens": 8, "max_new_tokens": 256, "eval_problems": 1}
    config = make_config("h200", **sizes, num_generations=8, micro_batch_tokens=tokens)
    found = estimate(config, QWEN25["Qwen/Qwen2.5-0.5B"], "cuda", exact=True)
    peak = measured[rows]["peak_memory_bytes"] + memory.LIBRARIES
    held = found.peak - memory.HEADROOM * found.captured
    assert (found.captured > 0) == (rows == 16)
    if tokens == TOGETHER * 264:
        assert held == pytest.approx(peak, rel=0.15)
    else:
        assert (held > 1.5 * peak) == (rows == 256)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_exact_pass_needs_what_a_gpu_has_measured_with_checkpointing_too(checkpointing):
    """Of the record's tokens a prompt's count once for its eight answers."""
    for row in load_record("update", "nvidia-h200")["results"]:
        sizes = {"num_prompts": row["rows"] // 8, "max_prompt_tokens": round((row["tokens"] / row["rows"] - 256) / 8)}
        sizes |= {"max_new_tokens": 256, "eval_problems": 1, "num_generations": 8, "micro_batch_tokens": 10**6}
        config = make_config("h200", **sizes, gradient_checkpointing=checkpointing)
        found = estimate(config, QWEN25["Qwen/Qwen2.5-0.5B"], "cuda", exact=True)
        peak = row["checkpointed_peak_memory_bytes" if checkpointing else "peak_memory_bytes"] + memory.LIBRARIES
        assert found.peak - memory.HEADROOM * found.captured == pytest.approx(peak, rel=0.15)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_beside_activations_are_those_of_earlier_micro_batches(checkpointing):
    sizes = {"num_prompts": 8, "num_generations": 8, "max_prompt_tokens": 100, "max_new_tokens": 100}
    config = make_config("h200", **sizes, gradient_checkpointing=checkpointing)
    shape = QWEN25["Qwen/Qwen2.5-0.5B"]
    one, several = (
        estimate(replace(config, micro_batch_tokens=n), shape, "cuda", exact=True) for n in (64 * 200, 32 * 200)
    )
    assert one.gradients == 0 and several.gradients == 4 * parameters(shape) and one.autocast == 0
    small = estimate(replace(config, num_prompts=1, num_generations=2, max_new_tokens=1), shape, "cuda", exact=True)
    assert small.gradients == 4 * parameters(shape) - small.activations - small.logits > 0


def test_activations_of_the_exact_pass_are_what_a_layer_keeps():
    pytest.importorskip("triton", reason="Triton is there on Linux alone")
    from rlcourse.exact.layers import angles_at, attention, layer_pass
    from rlcourse.exact.sequences import Sequences
    from rlcourse.exact.weights import fused_weights

    shape = ModelShape(1, 64, 4, 2, 32, 128, 300, tied=True, qk_norm=True)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 1}
    policy = make_policy(architecture="qwen3", hidden_size=64, intermediate_size=128, **sizes)
    weights = fused_weights(policy.model, DTYPE)
    sequences = Sequences.equal(3, 8, torch.device(DEVICE))
    angles, x = angles_at(weights, sequences.positions), torch.randn(3 * 8, 64, device=DEVICE)
    _, saved = layer_pass(weights, weights.layers[0], x, angles, partial(attention, sequences=sequences))
    kept = sum(tensor.nbytes for tensor in saved if tensor is not None)
    dtype, two = str(DTYPE).split(".")[1], replace(shape, layers=2)
    assert exact_activation_bytes(shape, 3, 8, dtype, False) == kept
    assert exact_activation_bytes(two, 3, 8, dtype, True) == 2 * kept - saved[-1].nbytes


def test_the_exact_pass_is_counted_for_the_families_that_it_knows_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(memory, "has_exact_pass", lambda config, device: True)
    monkeypatch.setattr(memory, "estimate", lambda *a: asked.append(a[-1]) or estimate(*a[:-1]))
    for kind in ("qwen2", "llama", "mistral"):
        known = SimpleNamespace(**vars(qwen2_config(TINY)) | {"model_type": kind})
        memory.check_memory(make_config(max_prompt_tokens=64), known, torch.device("cpu"))
    assert asked == [True, True, False]
