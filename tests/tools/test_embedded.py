"""Making the models that ship: the recipes run, and what they write loads."""

import torch
from transformers import AutoModelForCausalLM

from rlcourse.policy import load_policy
from tools.embedded import minigsm

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


def test_the_minigsm_model_is_written_in_bfloat16_and_loads(tmp_path, monkeypatch):
    texts = minigsm.minigsm_texts
    monkeypatch.setattr(minigsm, "minigsm_texts", lambda: texts(200))
    recipe = minigsm.Recipe(worked_steps=1, uneven_steps=1, rows=8, vocab_size=300, size=SMALL)
    minigsm.sft(recipe, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    policy = load_policy(str(tmp_path / "model"))
    assert policy.tokenizer.get_vocab() == minigsm.new_policy(recipe).tokenizer.get_vocab()
    assert policy.eos_ids == [policy.tokenizer.eos_token_id, policy.tokenizer.pad_token_id]
