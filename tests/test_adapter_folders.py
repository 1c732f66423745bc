"""Folders of adapters, ours and other people's: what peft means by them, or a refusal."""
# ruff: noqa: F811 (fixtures of adapters.py)

import json

import pytest
import torch
from adapters import adapted, folder, logits, merged_by_peft, policy, saved  # noqa: F401
from peft import LoraConfig, get_peft_model
from policies import DEVICE
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rlcourse.adapters import load_adapter
from rlcourse.checkpoint import latest_checkpoint, save_checkpoint
from rlcourse.policy import load_policy
from rlcourse.publish import merge_adapter
from tools.embedded.tokenizer import train_tokenizer


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
    "of tomorrow": (lambda f: rewrite(f, use_new_thing=0.5), "has use_new_thing, which this peft doesn't know"),
    "another kind": (lambda f: rewrite(f, peft_type="IA3"), "does not fit its base"),
    "ranks by layer": (lambda f: rewrite(f, rank_pattern={"q_proj": 1}), "does not fit its base"),
    "a list": (lambda f: (f / "adapter_config.json").write_text("[]"), "adapter_config.json"),
    "beside a model": (lambda f: (f / "config.json").write_text("{}"), "holds an adapter and a model: move one"),
    "no base": (lambda f: rewrite(f, base_model_name_or_path=None), "does not name the adapter's base"),
    "its own base": (lambda f: rewrite(f, base_model_name_or_path=str(f)), "is its own base: name a model in its conf"),
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
    found = load_policy(str(saved(second, tmp_path / "second")), DEVICE)
    torch.testing.assert_close(logits(found.model), logits(second.model), rtol=0, atol=1e-3)


def by_peft(model_folder, folder, embeddings="auto", **options):
    """An adapter that peft makes with these options and random numbers; returns its model."""
    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=3, **({"init_lora_weights": False} | options)))
    model.peft_config["default"].base_model_name_or_path = model_folder
    model.save_pretrained(folder, save_embedding_layers=embeddings)
    return model.eval().to(DEVICE)


LINEAR = ["q_proj", "v_proj", "down_proj"]
OPTIONS = {
    "rslora": {"use_rslora": True, "target_modules": LINEAR},
    "patterns": {"rank_pattern": {"q_proj": 5}, "alpha_pattern": {"v_proj": 40}, "target_modules": LINEAR},
    "one layer": {"layers_to_transform": [1], "target_modules": LINEAR, "lora_dropout": 0.5},
    "PiSSA": {"init_lora_weights": "pissa", "target_modules": LINEAR},
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


NEITHER = r"holds base_model\.model\..*, which is neither A nor B: merge it with peft first"
REFUSED = {
    "a tied head": ({"target_modules": ["lm_head"], "embeddings": False}, "merged into its base, has other logits"),
    "a head and its copy": ({"target_modules": ["lm_head"]}, NEITHER),
    "the embedding": ({"target_modules": ["embed_tokens"], "embeddings": False}, NEITHER),
    "a saved module": ({"target_modules": LINEAR, "modules_to_save": ["norm"]}, NEITHER),
    "DoRA": ({"target_modules": LINEAR, "use_dora": True}, NEITHER),
    "lora_bias": ({"target_modules": ["q_proj"], "lora_bias": True}, NEITHER),
    "tokens": ({"target_modules": LINEAR, "trainable_token_indices": [3]}, NEITHER),
    "for some tokens": ({"target_modules": LINEAR, "alora_invocation_tokens": [5]}, "into its base, has other logits"),
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
