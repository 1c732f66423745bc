"""Making the models that ship: the recipes run, and what they write loads."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlcourse.course.lessons.warm_start import draw_programs, kernel_policy, train_on
from rlcourse.policy import load_policy
from rlcourse.tasks.kernels.problems import computations
from tools.embedded import kernels, minigsm

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


@pytest.mark.thorough
def test_the_kernel_recipe_learns_and_is_the_same_each_time():
    Stage = kernels.Stage
    sittings = ((Stage(60, 3e-3, 2, None),), (Stage(40, 3e-3, 3, kernels.Habits()),))
    size = {"hidden_size": 32, "num_hidden_layers": 1}
    recipe = kernels.Recipe(sittings, problems=60, size=size, rows=8)
    first, second = kernels.sft(recipe), kernels.sft(recipe)
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    start = kernel_policy(**size)
    pairs = draw_programs(start, computations(40, "train", 0, (2, 3)), 32, random.Random(5))
    assert train_on(first, pairs) < train_on(start, pairs) - 1
