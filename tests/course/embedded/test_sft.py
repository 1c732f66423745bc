"""Supervised fine-tuning: the answer alone is learned, and the recipe writes a model that loads."""

import math
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlcourse.course.embedded import sft as module
from rlcourse.course.embedded.demonstrations import WORKED, minigsm_texts
from rlcourse.course.embedded.sft import SFTConfig, batch, demonstrations, new_policy, sft, train_on
from rlcourse.policy import load_policy

SMALL = {"rows": 8, "vocab_size": 300, "hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1}


@pytest.fixture(autouse=True)
def few_texts(monkeypatch):
    """A tokenizer of few texts: the full recipe's takes seconds."""
    monkeypatch.setattr(module, "minigsm_texts", lambda: minigsm_texts(200))


@pytest.fixture
def policy():
    return new_policy(SFTConfig(**SMALL))


def drawn(policy, rows=8, seed=0):
    return demonstrations(policy, rows, random.Random(seed), lambda problem: WORKED)


def test_labels_cover_exactly_the_answer_and_its_end(policy):
    pairs = drawn(policy)
    ids, labels = batch(pairs, policy.pad_id)
    for row, (prompt, answer) in enumerate(pairs):
        text = policy.tokenizer.decode(ids[row, : len(prompt) + len(answer)])
        question, _, written = text.partition("<|im_start|>assistant\n")
        assert question.startswith("<|im_start|>user\n") and policy.tokenizer.decode(prompt).endswith("assistant\n")
        labelled = labels[row] != module.IGNORED
        assert policy.tokenizer.decode(ids[row][labelled]) == written
        assert written.endswith("<|im_end|>") and "#### " in written
        assert torch.equal(labels[row][labelled], ids[row][labelled])
        assert (ids[row, len(prompt) + len(answer) :] == policy.pad_id).all()


@pytest.mark.parametrize("micro_batch_rows", [3, 32])
def test_the_loss_is_the_mean_over_the_tokens_of_all_answers(policy, micro_batch_rows, monkeypatch):
    monkeypatch.setattr(module, "MICRO_BATCH_ROWS", micro_batch_rows)
    pairs = drawn(policy)
    losses = []
    for prompt, answer in pairs:  # one row at a time, no padding
        distribution = policy.model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        losses += [-distribution[len(prompt) - 1 + i, token] for i, token in enumerate(answer)]
    expected = torch.stack(losses).mean()
    expected.backward()
    gradients = [p.grad.clone() for p in policy.model.parameters()]
    policy.model.zero_grad()
    assert train_on(policy, pairs) == pytest.approx(expected.item(), abs=1e-5)
    for parameter, gradient in zip(policy.model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.thorough
def test_a_few_steps_lower_the_loss_and_the_model_that_is_written_has_it(policy, tmp_path):
    pairs = drawn(policy, rows=32, seed=99)
    before = train_on(policy, pairs)
    assert before == pytest.approx(math.log(300), abs=0.3)  # as good as guessing
    last = sft(SFTConfig(worked_steps=60, uneven_steps=5, **(SMALL | {"hidden_size": 64})), tmp_path / "model")
    trained = load_policy(str(tmp_path / "model"))
    after = train_on(trained, pairs)
    assert after < before - 1 and last < before - 1


def test_the_folder_that_is_written_loads_and_is_bfloat16(tmp_path):
    config = SFTConfig(worked_steps=1, uneven_steps=1, **SMALL)
    sft(config, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    policy = load_policy(str(tmp_path / "model"))
    assert policy.tokenizer.get_vocab() == new_policy(config).tokenizer.get_vocab()
    assert policy.eos_ids == [policy.tokenizer.eos_token_id, policy.tokenizer.pad_token_id]
    assert not list(tmp_path.glob("*.writing"))


def test_the_same_seed_gives_the_same_weights_and_another_does_not(tmp_path):
    weights = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.manual_seed(ord(name))
        sft(SFTConfig(worked_steps=2, uneven_steps=1, seed=seed, **SMALL), tmp_path / name)
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_ctrl_c_writes_the_model_as_it_is(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "train_on", stop)
    with pytest.raises(KeyboardInterrupt):
        sft(SFTConfig(**SMALL), tmp_path / "model")
    load_policy(str(tmp_path / "model"))
