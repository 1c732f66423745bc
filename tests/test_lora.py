"""Adapters against peft's own merge and the chain rule: what is sampled, learned, saved, loaded and merged."""
# ruff: noqa: F811 (fixtures of adapters.py)

import copy
import json

import pytest
import torch
from adapters import adapted, folder, logits, merged_by_peft, policy  # noqa: F401
from peft import PeftModel
from policies import DEVICE, logprobs_alone, rollout_of
from transformers import AutoModelForCausalLM

from rlcourse import lora as module
from rlcourse.adapters import base_of
from rlcourse.config import make_config
from rlcourse.exact.weights import FusedWeights
from rlcourse.learner import Learner
from rlcourse.lora import add_adapter, merge
from rlcourse.measure.shapes import ModelShape, adapter_parameters, model_shape
from rlcourse.memory import estimate
from rlcourse.model_files import is_adapter
from rlcourse.policy import load_policy, low_precision_copy
from rlcourse.rollout.hf import HFEngine
from rlcourse.train import update

ROWS = [([5, 9, 40, 7], [12, 30, 31]), ([11], [1]), ([3, 4], [60, 61, 62, 63])]
ROLLOUT = rollout_of(ROWS)


def test_a_new_adapter_changes_nothing_and_learns_alone(model_folder):
    policy, base = load_policy(model_folder, DEVICE), load_policy(model_folder, DEVICE)
    add_adapter(policy.model, model_folder, 3, 12.0, "all-linear")
    assert torch.equal(logits(policy.model), logits(base.model))
    learning = {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    assert learning == {name for name, _ in policy.model.named_parameters() if ".lora_" in name}
    assert len(learning) == 2 * 7 * 2  # A and B, seven matrices, two layers


def test_the_saved_adapter_merged_by_peft_is_ours_merged(policy, folder, model_folder):
    theirs, ours = merged_by_peft(model_folder, folder).state_dict(), load_policy(str(folder), DEVICE).model
    assert ours.state_dict().keys() == theirs.keys()
    for name, weight in ours.state_dict().items():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=1e-6)
    changed = load_policy(model_folder, DEVICE).model.state_dict()
    assert sum(not torch.equal(changed[name], weight) for name, weight in ours.state_dict().items()) == 14
    torch.testing.assert_close(logits(ours), logits(policy.model), rtol=1e-4, atol=1e-4)
    assert type(ours.model.layers[0].self_attn.q_proj) is torch.nn.Linear and not hasattr(ours, "peft_config")
    assert all(parameter.requires_grad for parameter in ours.parameters())


def test_peft_and_transformers_load_the_saved_adapter(policy, folder, model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).to(DEVICE)
    assert torch.equal(logits(PeftModel.from_pretrained(model, str(folder))), logits(policy.model))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder).to(DEVICE)), logits(policy.model))
    saved = json.loads((folder / "adapter_config.json").read_text())
    assert (saved["peft_type"], saved["task_type"], saved["r"], saved["lora_alpha"]) == ("LORA", "CAUSAL_LM", 3, 12.0)
    assert base_of(folder) == model_folder and is_adapter(folder) and not (folder / "config.json").exists()
    (folder / "config.json").write_text("{}")
    assert not is_adapter(folder)  # but a model, beside which an adapter lies


def test_the_gradients_of_a_and_b_follow_from_that_of_the_merged_matrix(policy):
    """L(W + s B A): dL/dA = s B^T G and dL/dB = s G A^T, where G is the gradient of the merged matrix."""
    config = make_config(lora_rank=3, warmup_steps=0)
    Learner(policy, config).logprobs_and_values(ROLLOUT)[0].sum().backward()
    plain = copy.deepcopy(policy.model)
    merge(plain)
    plain = plain.double()
    sum(logprobs_alone(plain, prompt, completion).sum() for prompt, completion in ROWS).backward()
    for layer, whole in zip(policy.model.model.layers, plain.model.layers, strict=True):
        for block, name in (("self_attn", "v_proj"), ("mlp", "down_proj")):
            ours, gradient = getattr(getattr(layer, block), name), getattr(getattr(whole, block), name).weight.grad
            a, b = (getattr(ours, f"lora_{x}")["default"].weight for x in "AB")
            torch.testing.assert_close(a.grad.double(), 4 * b.double().T @ gradient, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(b.grad.double(), 4 * gradient @ a.double().T, rtol=1e-3, atol=1e-3)
    assert all(p.grad is None for p in module.base_parameters(policy.model))


def test_the_reference_is_the_base_below_the_adapter(policy, model_folder):
    one = Learner(policy, make_config(lora_rank=3, kl_coef=0.1))
    base, found = load_policy(model_folder, DEVICE).model, one.reference_logprobs(ROLLOUT)
    for row, (prompt, completion) in enumerate(ROWS):
        expected = logprobs_alone(base, prompt, completion)
        torch.testing.assert_close(found[row, : len(completion)], expected, rtol=0, atol=1e-4)
    ours, _ = one.logprobs_and_values(ROLLOUT)
    assert (ours - found).abs().max() > 0.1 and ours.requires_grad
    ours.sum().backward()
    assert all(p.grad is not None for p in policy.model.parameters() if p.requires_grad)
    assert one.reference is policy.model  # no copy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_engines_weights_are_those_of_the_merged_model(dtype, policy):
    plain = copy.deepcopy(policy.model)
    merge(plain)
    ours, theirs = FusedWeights(policy.model, dtype), FusedWeights(plain, dtype)
    assert all(torch.equal(a, b) for a, b in zip(ours.targets, theirs.targets, strict=True))
    engine = HFEngine(policy, torch.bfloat16)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_A" in name:
                parameter.mul_(2)
    ours.sync(policy.model)
    engine._sync()
    plain = copy.deepcopy(policy.model)
    merge(plain)
    theirs.sync(plain)
    assert all(torch.equal(a, b) for a, b in zip(ours.targets, theirs.targets, strict=True))
    for a, b in zip(engine.model.parameters(), low_precision_copy(plain, torch.bfloat16).parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_engine_knows_that_an_adapter_changed(dtype, policy):
    """It keeps what it has computed of prompts until the weights change."""
    weights = FusedWeights(policy.model, dtype)
    assert weights.same_as(policy.model)
    one = Learner(policy, make_config(lora_rank=3, warmup_steps=0, lr=0.1))
    one.logprobs_and_values(ROLLOUT)[0].sum().backward()
    update(one.optimizer, one.config, 0)
    assert not weights.same_as(policy.model)
    weights.sync(policy.model)
    assert weights.same_as(policy.model)


# Memory


def test_the_estimate_counts_the_adapter(model_folder):
    model = adapted(model_folder, rank=5).model
    shape = ModelShape.from_config(model.config)
    learned = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert adapter_parameters(shape, 5) == learned
    small, large = (estimate(make_config(lora_rank=rank, kl_coef=0.1), shape, "cpu") for rank in (5, 0))
    base = sum(p.numel() for p in module.base_parameters(model))
    # Weights and two moments; the base is the reference of an adapter, without which there is a copy.
    assert large.rollout - small.rollout == 4 * base + 8 * base + 4 * base - (4 * (base + learned) + 8 * learned)
    assert large.update - small.update == large.rollout - small.rollout + 4 * (base - learned)


def test_the_shape_of_an_adapter_is_that_of_its_base(folder, model_folder):
    assert model_shape(str(folder)) == model_shape(model_folder)


def test_weights_large_and_small_are_all_copied_those_at_the_limit_too(monkeypatch):
    model = load_policy("embedded").model
    sources = list(model.parameters())
    for alone in {1, *(s.numel() for s in sources), 10**9}:
        monkeypatch.setattr(module, "ALONE", alone)
        targets = [torch.full_like(s, torch.nan, dtype=torch.bfloat16) for s in sources]
        module.copy_merged(targets, sources, model)
        assert all(torch.equal(t, s.bfloat16()) for t, s in zip(targets, sources, strict=True))
