"""The benchmarks: each starts, and what runs without a GPU measures what it says, in which shape."""

from dataclasses import replace

import pytest
import torch
from policies import DEVICE
from transformers import AutoModelForCausalLM

from rlcourse.config import make_config
from rlcourse.measure.shapes import ModelShape
from rlcourse.policy import load_policy
from rlcourse.tasks import load_task
from tools.bench import decode, models, numerics, speed, step
from tools.bench.__main__ import BENCHMARKS, measured
from tools.bench.options import Options
from tools.bench.results import Results


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


TINY = {"num_prompts": 2, "num_generations": 3, "max_new_tokens": 8}
ENGINES = ["hf-dynamic", "hf-static", "fast"]
ON_A_CPU = ("decode", "learn", "mismatch", "rollout", "scale", "step", "update")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name not in (*ON_A_CPU, "exact", "gap")])
def test_a_benchmark_of_a_gpu_is_refused_without_one(name):
    with pytest.raises(ValueError, match="GPU"):
        measured(name, make_config(), Options(shape="tiny"), [1], Results())


def test_rollout_measures_each_engine_on_the_same_rows():
    setup, rows = speed.rollout(make_config(**TINY), repeats=3)
    assert [row["variant"] for row in rows][:3] == ENGINES
    assert setup["num_generations"] == 3 and setup["repeats"] == 3
    for row in rows:
        assert row["rows"] == 6 and row["tokens_per_s"] > 0 and row["spread"] >= 0
        assert row["speedup"] == pytest.approx(row["tokens_per_s"] / rows[0]["tokens_per_s"])


def test_the_mismatch_in_float32_is_rounding_alone_and_every_token_is_in_one_group_of_each_kind():
    """By probability, by place, by padding, and digits or not, the tokens of the fast engine add up to all."""
    setup, rows = numerics.mismatch(make_config(**TINY))
    tokens = {row["variant"]: row["tokens"] for row in rows}
    for kind in ("fast, p ", "fast, tokens ", "padding than most", "digits"):
        assert sum(count for variant, count in tokens.items() if kind in variant) == tokens["fast"]
    rows = [row for row in rows if row["variant"] in ENGINES]
    assert [row["variant"] for row in rows] == ENGINES and setup["dtype"] == "float32"
    for row in rows:
        assert 0 < row["mismatch_mean"] <= row["mismatch_max"] < 1e-4
        assert 6 <= row["tokens"] <= 48 and row["trainer_error_mean"] == 0


@pytest.mark.thorough
def test_an_update_is_timed_beside_its_floor():
    _, [row] = speed.update("tiny", [8], new_tokens=6, repeats=2)
    assert row["rows"] == 8 and row["tokens"] % 8 == 0 and row["tokens"] > 8 * 6
    assert 0 < row["floor_s"] < row["update_s"] and 0 < row["tflops"] < row["peak_tflops"]
