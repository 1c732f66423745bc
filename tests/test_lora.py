"""Adapters against peft's own merge and the chain rule: what is sampled, learned, saved, loaded and merged."""

import copy
import json
import weakref

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from policies import DEVICE, logprobs_alone, rollout_of
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rlcourse import learner as learner_module
from rlcourse import lora as module
from rlcourse.checkpoint import latest_checkpoint, save_checkpoint
from rlcourse.config import make_config
from rlcourse.exact.weights import FusedWeights
from rlcourse.learner import Learner
from rlcourse.lora import add_adapter, base_of, is_adapter, load_adapter, merge, save_adapter, without_adapter
from rlcourse.measure.shapes import ModelShape, adapter_parameters, model_shape
from rlcourse.memory import estimate
from rlcourse.merge import merge_adapter
from rlcourse.policy import load_policy, low_precision_copy
from rlcourse.rollout.hf import HFEngine
from rlcourse.rollout.torch_engine import TorchEngine
from rlcourse.sampling import Sampling
from rlcourse.tasks.tokenizer import train_tokenizer
from rlcourse.train import update

IDS = torch.tensor([[5, 9, 40, 7, 12, 30, 31, 44, 9]], device=DEVICE)
ROWS = [([5, 9, 40, 7], [12, 30, 31]), ([11], [1]), ([3, 4], [60, 61, 62, 63])]
ROLLOUT = rollout_of(ROWS)


def adapted(base: str, seed: int = 1, targets: str = "all-linear", rank: int = 3, alpha: float = 12.0):
    """A policy with an adapter that changes what it says."""
    policy = load_policy(base, DEVICE)
    torch.manual_seed(seed)
    add_adapter(policy.model, base, rank, alpha, targets)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return policy


@pytest.fixture
def policy(model_folder):
    return adapted(model_folder)


@pytest.fixture
def folder(policy, tmp_path):
    """A folder with the adapter."""
    (tmp_path / "adapter").mkdir()
    save_adapter(policy.model, tmp_path / "adapter")
    return tmp_path / "adapter"


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def merged_by_peft(base: str, folder) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).to(DEVICE)
    return PeftModel.from_pretrained(model, str(folder)).merge_and_unload()


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


def test_the_loaded_adapter_is_the_saved_one_to_the_last_bit_and_learns(policy, folder, model_folder):
    other = load_policy(model_folder, DEVICE)
    load_adapter(other.model, folder)
    for (name, ours), theirs in zip(other.model.named_parameters(), policy.model.parameters(), strict=True):
        assert torch.equal(ours, theirs) and ours.requires_grad == (".lora_" in name), name
    save_adapter(other.model, folder)
    assert base_of(folder) == model_folder


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


def test_an_update_changes_the_adapter_and_no_bit_of_the_base(policy):
    before = {name: p.clone() for name, p in policy.model.named_parameters()}
    one = Learner(policy, make_config(lora_rank=3, warmup_steps=0))
    assert sum(len(group["params"]) for group in one.optimizer.param_groups) == 28  # for no others there are moments
    one.logprobs_and_values(ROLLOUT)[0].sum().backward()
    update(one.optimizer, one.config, 0)
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter, before[name]) == (".lora_" not in name), name


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


def test_without_an_adapter_there_is_nothing_to_leave_out(model_folder):
    model = load_policy(model_folder, DEVICE).model
    with without_adapter(model):
        assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


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


@pytest.mark.parametrize("make", [TorchEngine, HFEngine])
def test_the_engines_sample_from_the_policy_with_its_adapter(make, policy):
    engine = make(policy, torch.float32)
    rollout = engine.generate([[5, 9, 40, 7]], 4, 6, Sampling())
    expected = Learner(policy, make_config(lora_rank=3)).logprobs_and_values(rollout)[0]
    torch.testing.assert_close(rollout.logprobs, expected.detach(), rtol=0, atol=1e-3)
    with without_adapter(policy.model):
        base = Learner(policy, make_config(lora_rank=3)).logprobs_and_values(rollout)[0]
    assert (rollout.logprobs - base).abs().max() > 0.1


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


def test_one_merged_matrix_stands_in_memory_at_a_time(policy, monkeypatch):
    weights, most, original = weakref.WeakSet(), [], module._merged_weight

    def counted(layer):
        found = original(layer)
        weights.add(found)
        most.append(len(weights))
        return found

    monkeypatch.setattr(module, "_merged_weight", counted)
    FusedWeights(policy.model, torch.bfloat16)
    assert len(most) == 14 and max(most) <= 2  # that which is being replaced included


def test_the_exact_pass_is_of_the_adapted_model_and_not_of_its_base(policy, monkeypatch):
    config = make_config(lora_rank=3, dtype="bfloat16")
    monkeypatch.setattr(learner_module, "may_be_exact", lambda device: True)
    monkeypatch.setattr(learner_module, "is_exact", lambda weights: True)
    assert learner_module.model_pass(policy.model, config).exact
    assert not learner_module.model_pass(policy.model, config, as_base=True).exact


@pytest.mark.parametrize("targets", ["q_proj,q", "lm_head", "embed_tokens", ""])
def test_what_is_no_linear_layer_below_the_head_is_refused(targets, model_folder):
    with pytest.raises(ValueError, match=r"is not a linear layer here; the model has q_proj, k_proj, .*, down_proj"):
        adapted(model_folder, targets=targets)


# Folders


def rewrite(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def poison(folder, change):
    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file)


SPOILT = {
    "cut short": (lambda f: (f / "adapter_model.safetensors").write_bytes(b"12345678"), "cannot be read or is cut"),
    "one weight less": (lambda f: poison(f, lambda w: w.pop(min(w))), "does not fit its base"),
    "not finite": (lambda f: poison(f, lambda w: w[min(w)].view(-1)[:1].fill_(torch.nan)), "are not finite"),
    "another rank": (lambda f: rewrite(f, r=5), "does not fit its base"),
    "DoRA": (lambda f: rewrite(f, use_dora=True), "has use_dora True, which is not plain LoRA: merge it with peft fir"),
    "biases": (lambda f: rewrite(f, lora_bias=True), "has lora_bias True, which is not plain LoRA"),
    "PiSSA": (lambda f: rewrite(f, init_lora_weights="pissa"), "has init_lora_weights 'pissa', which is not plain"),
    "of tomorrow": (lambda f: rewrite(f, use_new_thing=0.5), "has use_new_thing 0.5, which is not plain LoRA"),
    "another kind": (lambda f: rewrite(f, peft_type="IA3"), "has peft_type 'IA3', which is not plain LoRA"),
    "ranks by layer": (lambda f: rewrite(f, rank_pattern={"q_proj": 1}), "does not fit its base"),
    "a list": (lambda f: (f / "adapter_config.json").write_text("[]"), "adapter_config.json"),
    "beside a model": (lambda f: (f / "config.json").write_text("{}"), "holds an adapter and a model: move one"),
    "no base": (lambda f: rewrite(f, base_model_name_or_path=None), "does not name the adapter's base"),
    "a base that is gone": (lambda f: rewrite(f, base_model_name_or_path="/nowhere/x"), "No model in /nowhere/x"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_folder_that_cannot_be_used_is_refused_in_one_sentence(what, folder):
    spoil, sentence = SPOILT[what]
    spoil(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=sentence) as refusal:
        load_policy(str(folder), DEVICE)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("place", ["adapter", "run"])
def test_merge_writes_a_plain_model_of_an_adapter_or_a_runs_last_one(place, policy, folder, model_folder, tmp_path):
    if place == "run":
        save_checkpoint(tmp_path / "run", 1, adapted(model_folder, seed=5), {})
        save_checkpoint(tmp_path / "run", 2, policy, {})
    output = tmp_path / "merged"
    found = merge_adapter(tmp_path / place, output)
    assert found == (latest_checkpoint(tmp_path / "run") if place == "run" else folder)
    model = AutoModelForCausalLM.from_pretrained(output)
    theirs = merged_by_peft(model_folder, folder)
    assert model.dtype == torch.float32 and not (output / "adapter_config.json").exists()
    torch.testing.assert_close(logits(model.to(DEVICE)), logits(theirs), rtol=1e-5, atol=1e-4)
    assert torch.equal(logits(load_policy(str(output), DEVICE).model), logits(model))


def test_a_base_that_is_an_adapter_itself_is_merged_first(policy, folder, tmp_path):
    second = adapted(str(folder), seed=7)
    (tmp_path / "second").mkdir()
    save_adapter(second.model, tmp_path / "second")
    expected = logits(second.model)
    torch.testing.assert_close(logits(load_policy(str(tmp_path / "second"), DEVICE).model), expected, rtol=0, atol=1e-3)


def by_peft(model_folder, folder, embeddings="auto", **options):
    """An adapter that peft makes with these options and random numbers; returns its model."""
    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=3, init_lora_weights=False, **options))
    model.peft_config["default"].base_model_name_or_path = model_folder
    model.save_pretrained(folder, save_embedding_layers=embeddings)
    return model.eval().to(DEVICE)


LINEAR = ["q_proj", "v_proj", "down_proj"]
OPTIONS = {
    "rslora": {"use_rslora": True, "target_modules": LINEAR},
    "patterns": {"rank_pattern": {"q_proj": 5}, "alpha_pattern": {"v_proj": 40}, "target_modules": LINEAR},
    "one layer": {"layers_to_transform": [1], "target_modules": LINEAR, "lora_dropout": 0.5},
    "all but": {"exclude_modules": ["down_proj"], "target_modules": LINEAR},
}


@pytest.mark.parametrize("what", OPTIONS)
def test_an_adapter_means_what_peft_says(what, model_folder, tmp_path):
    expected = logits(by_peft(model_folder, tmp_path, **OPTIONS[what]))
    torch.testing.assert_close(logits(load_policy(str(tmp_path), DEVICE).model), expected, rtol=1e-4, atol=1e-4)
    policy = load_policy(model_folder, DEVICE)
    load_adapter(policy.model, tmp_path)
    policy.model.train()
    assert torch.equal(logits(policy.model), expected)


REFUSED = {
    "a tied head": ({"target_modules": ["lm_head"], "embeddings": False}, "merged into its base, has other logits"),
    "a head and its copy": ({"target_modules": ["lm_head"]}, r"holds base_model\.model\..*, which is neither A nor B"),
    "the embedding": ({"target_modules": ["embed_tokens"], "embeddings": False}, "does not fit its base"),
    "a saved module": ({"target_modules": LINEAR, "modules_to_save": ["norm"]}, "has modules_to_save"),
    "lora_bias": ({"target_modules": ["q_proj"], "lora_bias": True}, "has lora_bias True"),
    "tokens": ({"target_modules": LINEAR, "trainable_token_indices": [3]}, "has trainable_token_indices"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_adapter_that_is_more_is_refused(what, model_folder, tmp_path):
    options, sentence = REFUSED[what]
    by_peft(model_folder, tmp_path / "adapter", **options)
    with pytest.raises(ValueError, match=sentence):
        merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_an_adapter_of_other_than_linear_layers_is_refused(policy, tmp_path):
    torch.manual_seed(0)
    shape = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 300, "bos_token_id": 2, "eos_token_id": 2}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **shape)).save_pretrained(tmp_path / "base")
    policy.tokenizer.save_pretrained(tmp_path / "base")
    by_peft(str(tmp_path / "base"), tmp_path / "adapter", target_modules=["attn.c_proj"])
    rewrite(tmp_path / "adapter", fan_in_fan_out=False)
    with pytest.raises(ValueError, match="changes other layers than linear ones: merge it with peft first"):
        load_policy(str(tmp_path / "adapter"))


def test_an_adapter_has_its_own_tokenizer_template_and_ends(policy, folder, model_folder):
    template = "{% for m in messages %}Q: {{ m.content }}\n{% endfor %}A:"
    (folder / "chat_template.jinja").write_text(template)
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    found = load_policy(str(folder))
    assert found.tokenizer.decode(found.prompt("1+1?")) == "Q: 1+1?\nA:" and found.eos_ids == [1, 2]
    train_tokenizer(["Tom Tom"], 290).save_pretrained(folder)
    assert len(load_policy(str(folder)).tokenizer) < 290 < len(load_policy(model_folder).tokenizer)
    (folder / "chat_template.jinja").write_text("{{ nothing")
    with pytest.raises(ValueError, match=r"The chat template of .* cannot be used"):
        load_policy(str(folder))


# Memory


def test_the_estimate_counts_the_adapter(model_folder):
    model = adapted(model_folder, rank=5).model
    shape = ModelShape.from_config(model.config)
    learned = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert adapter_parameters(shape, 5) == learned
    small, large = (estimate(make_config(lora_rank=rank, kl_coef=0.1), shape, "cpu") for rank in (5, 0))
    base = sum(p.numel() for p in module.base_parameters(model))
    assert (small.weights, small.gradients, small.optimizer) == (4 * (base + learned), 4 * learned, 8 * learned)
    assert (large.weights, large.gradients, large.optimizer) == (4 * base, 4 * base, 8 * base)
    assert (small.reference, large.reference) == (0, 4 * base)


def test_the_shape_of_an_adapter_is_that_of_its_base(folder, model_folder):
    assert model_shape(str(folder)) == model_shape(model_folder)


@pytest.mark.parametrize("alone", [1, 4096, 10**9])
def test_weights_large_and_small_are_all_copied(alone, monkeypatch):
    monkeypatch.setattr(module, "ALONE", alone)
    model = load_policy("embedded").model
    sources = list(model.parameters())
    assert min(s.numel() for s in sources) < 4096 < max(s.numel() for s in sources)
    targets = [torch.full_like(s, torch.nan, dtype=torch.bfloat16) for s in sources]
    module.copy_merged(targets, sources, model)
    assert all(torch.equal(t, s.bfloat16()) for t, s in zip(targets, sources, strict=True))
