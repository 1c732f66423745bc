"""The benchmarks of decoding and of a training step: what they measure, and in which shape."""

from dataclasses import replace

import pytest
import torch
from policies import DEVICE
from transformers import AutoModelForCausalLM

from rlcourse.measure.shapes import ModelShape
from rlcourse.policy import load_policy
from rlcourse.tasks import load_task
from tools.bench import decode, models, step


@pytest.mark.thorough
def test_every_rung_of_the_ladder_is_timed_on_the_same_rows():
    _, rows = decode.decode("tiny", [8, 16], prompt_tokens=12, new_tokens=6, repeats=2)
    rungs = list(dict.fromkeys(row["variant"] for row in rows))
    assert DEVICE == "cuda" or rungs == ["hf-none", "hf-dynamic", "hf-static", "fast"]
    assert [(row["variant"], row["rows"]) for row in rows] == [(name, count) for count in (8, 16) for name in rungs]
    for row in rows:
        assert row["tokens_a_row"] == 6 and row["tokens_per_s"] > 0 and row["floor_ms"] > 0  # none ends by itself


def test_a_step_with_random_weights_and_coin_flips_is_timed_by_phase(monkeypatch):
    norms, train_step = [], step.train_step
    monkeypatch.setattr(step, "train_step", lambda *a: (lambda r: norms.append(r[0]["grad_norm"]) or r)(train_step(*a)))
    setup, [row] = step.step("tiny", [8], new_tokens=6, repeats=1)
    assert (row["variant"], row["rows"], setup["task"]) == ("rlcourse", 8, "minigsm")
    assert row["rollout_s"] > 0 and row["update_s"] > 0 and row["rollout_s"] + row["update_s"] <= row["step_s"]
    assert row["mismatch_mean"] <= row["mismatch_max"] < 1e-2
    assert len(norms) == step.WARMUP + 1 and all(norm > 0 for norm in norms)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_a_random_model_has_its_shape_and_loads(kind, tmp_path, monkeypatch):
    monkeypatch.setitem(models.FAMILIES, "tiny", (kind, models.LLAMA if kind == "llama" else models.QWEN))
    models.write_random_model("tiny", load_task("minigsm"), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and model.config.model_type == kind
    assert replace(ModelShape.from_config(model.config), qk_norm=False) == models.SHAPES["tiny"]
    policy = load_policy(str(tmp_path), DEVICE)
    assert len(policy.tokenizer) <= model.config.vocab_size and policy.prompt("Tom has 3 apples?")
