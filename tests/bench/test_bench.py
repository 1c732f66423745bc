"""The benchmarks that ship: what they measure, in which shape, and what is not good enough to be recorded."""

import contextlib

import pytest
import torch
from policies import DEVICE
from transformers import AutoModelForCausalLM

from rlcourse.bench import Options, cute, decode, layer, learn, models, numerics, run_bench, scale, speed, trace
from rlcourse.config import make_config
from rlcourse.kernels.toolchain import interpreted
from rlcourse.measure import records
from rlcourse.policy import load_policy
from rlcourse.tasks import load_task

TINY = {"num_prompts": 2, "num_generations": 3, "max_new_tokens": 8}
ENGINES = ["hf-dynamic", "hf-static", "fast"]


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        *((name, Options(), "no CUDA GPU was found") for name in ("kernels", "story", "trace", "logprobs", "serve")),
        ("coffee", Options(), r"Unknown benchmark 'coffee': use learn, decode, kernels, .* or logprobs"),
        ("decode", Options(shape="tiny", rows=(8,), lengths="long"), "Unknown lengths 'long'"),
        ("decode", Options(shape="tiny", rows=(12,)), "multiples of 8"),
        ("update", Options(shape="huge", rows=(8,)), r"Unknown shape 'huge': use one of qwen2\.5-0\.5b, .*, tiny"),
        ("rollout", Options(), "--add is for decode, exact, step and update: use --record"),
    ],
)
def test_what_cannot_be_measured_is_refused(name, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        run_bench(name, make_config(), options, record=False, add=name == "rollout")


@pytest.mark.parametrize("spread", [0.2, 0.21])
def test_what_was_steady_is_recorded(spread, monkeypatch, tmp_path, capsys):
    rows = [{"variant": f"engine {i}", "tokens_per_s": 1.0, "spread": s} for i, s in enumerate((0.05, spread))]
    monkeypatch.setattr(speed, "rollout", lambda config, repeats: ({"repeats": repeats}, rows))
    monkeypatch.setattr(records, "data_folder", lambda: tmp_path)
    if spread > 0.2:
        with pytest.raises(ValueError, match="Not recorded: engine 1 varied by over 20% between repetitions"):
            run_bench("rollout", make_config(), Options(), record=True)
        assert "engine 1" in capsys.readouterr().out and not list(tmp_path.iterdir())
    else:
        run_bench("rollout", make_config(), Options(), record=True)
        assert records.load_record("rollout", folder=tmp_path / "measurements")["results"] == rows


@pytest.mark.thorough
def test_updates_and_every_rung_of_the_ladder_are_timed_on_the_same_rows():
    _, [row] = speed.update("tiny", [8], new_tokens=6, repeats=2)
    assert row["rows"] == 8 and row["tokens"] % 8 == 0 and row["tokens"] > 8 * 6
    assert 0 < row["floor_s"] < row["update_s"] and 0 < row["tflops"] < row["peak_tflops"]
    _, rows = decode.decode("tiny", [8, 16], prompt_tokens=12, new_tokens=6, repeats=2)
    rungs = list(dict.fromkeys(row["variant"] for row in rows))
    assert DEVICE == "cuda" or rungs == ["hf-none", "hf-dynamic", "hf-static", "fast"]
    assert [(row["variant"], row["rows"]) for row in rows] == [(name, count) for count in (8, 16) for name in rungs]
    for row in rows:
        assert row["tokens_a_row"] == 6 and row["tokens_per_s"] > 0 and row["floor_ms"] > 0  # none ends by itself


@pytest.mark.thorough
def test_kernels_of_a_layer_beside_pytorch_compute_the_same():
    pytest.importorskip("cutlass")
    with torch.no_grad(), interpreted() if DEVICE == "cpu" else contextlib.nullcontext():
        for case in layer.cases(tokens=3, rows=2, vocabulary=1000, parameters=1030, device=DEVICE):
            tensors = case.make()
            for way in case.ways.keys() - {"compiled"}:
                assert cute.largest_error(case, case.ways[way], tensors) < 1e-2, (case.name, way)


def test_the_exact_and_the_plain_head_are_measured_on_the_same():
    """Up to the last norm, which is the exact one's first part."""
    pytest.importorskip("triton", reason="Triton is there on Linux alone")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    hidden = torch.randn(7, 64, device=device, requires_grad=True)
    head = (0.02 * torch.randn(3000, 64, device=device)).requires_grad_()
    targets = torch.randint(3000, (7,), device=device)
    normed = torch.nn.functional.rms_norm(hidden, (64,), eps=1e-6).detach().requires_grad_()
    found, gradients = [], []
    for way, states in ((numerics._plain, normed), (numerics._exact, hidden)):
        forward = way(states, head, targets, 4)
        numerics._forward_and_backward(states, head, forward)
        found.append(forward().detach())
        gradients.append(head.grad)
    torch.testing.assert_close(found[1], found[0], atol=0.05, rtol=0)
    assert (gradients[1] - gradients[0]).norm() < 0.02 * gradients[0].norm()


def test_a_step_with_random_weights_and_coin_flips_is_timed_by_phase(monkeypatch):
    norms, step = [], speed.train_step
    monkeypatch.setattr(speed, "train_step", lambda *a: (lambda r: norms.append(r[0]["grad_norm"]) or r)(step(*a)))
    setup, [row] = speed.step("tiny", [8], new_tokens=6, repeats=1, peers=False)
    assert (row["variant"], row["rows"], setup["task"]) == ("rlcourse", 8, "minigsm")
    assert row["rollout_s"] > 0 and row["update_s"] > 0 and row["rollout_s"] + row["update_s"] <= row["step_s"]
    assert row["mismatch_mean"] <= row["mismatch_max"] < 1e-2
    assert len(norms) == speed.WARMUP + 1 and all(norm > 0 for norm in norms)


@pytest.mark.thorough
def test_learn_trains_every_combination_and_says_what_failed(monkeypatch):
    combinations = [
        {"algorithm": "gspo", "dtype": "float32", "compile": False, "engine": "fast", "minibatches": 1},
        {"algorithm": "dr_grpo", "dtype": "float32", "compile": False, "engine": "fast", "seed": 1},
        {"algorithm": "dr_grpo", "dtype": "float32", "compile": False, "engine": "fast", "top_p": 2.0},
    ]
    monkeypatch.setattr(learn, "combinations", lambda on_gpu: combinations)
    small = {"num_prompts": 4, "max_new_tokens": 40, "eval_validation": 2}
    one_run = learn.one_run
    monkeypatch.setattr(learn, "one_run", lambda settings: one_run(small | settings))
    setup, rows = learn.learn(make_config(steps=2, eval_problems=4))
    assert rows[0]["variant"] == "gspo, fast, float32, minibatches 1" and setup["steps"] == 2
    for row in rows[:2]:
        assert 0 <= row["accuracy_after"] <= 1 and row["mismatch_max"] < 1e-4 and row["clip_fraction"] == 0
    assert rows[2]["error"] == "ValueError: top_p must be above 0 and at most 1, not 2.0." and "seconds" not in rows[2]


@pytest.mark.thorough
def test_two_processes_are_measured(tmp_path):
    models.write_random_model("tiny", load_task("minigsm"), tmp_path / "model")
    given = {"folder": str(tmp_path), "task": "minigsm", "new_tokens": 4, "repeats": 1, "rows": 16}
    for variant in scale.VARIANTS[1:]:
        row = scale._on_ranks(2, given | {"variant": variant})
        assert row["rows"] == 16 and row["tokens_per_s"] == pytest.approx(16 * 4 / row["step_s"])
        assert (row.get("sampling_s", 0) > 0) == (variant == scale.VARIANTS[2])
        assert (row["allreduce_s"] is None) == (variant != scale.VARIANTS[1])


def traced(steps=trace.STEPS):
    """Steps of 100 µs, each with a product of 30, attention of 20 and 14 short kernels with names of their own."""
    events = []
    for i in range(steps):
        parts = [("matmul", 0, 30), ("attention", 40, 20), *((f"small_{n}", 70 + n, 1) for n in range(14))]
        for name, after, us in parts:
            event = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": 1000 + 100 * i + after}
            events.append(event | {"dur": us, "args": {"correlation": i}})
        launch = {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "pid": 1, "tid": 1, "args": {"correlation": i}}
        events.append({"ph": "X", "ts": 900 + 100 * i, "dur": 5} | launch)
    return events


def test_the_rows_of_a_traced_step_add_up_to_the_step_without_the_profiler():
    rows, kept = trace.one_engine(traced(), ms_per_step=0.08)
    assert rows[0]["ms_per_step"] == 0.08 and rows[0]["profiled_ms"] == pytest.approx(0.1)
    assert rows[0]["busy_us"] == 64 and rows[0]["launches_a_step"] == 1 and rows[0]["launch_us"] == 5
    assert [row["part"] for row in rows[1:3]] == ["matmul", "attention"]
    assert [row["part"] for row in rows[-2:]] == ["other kernels", "no kernel"] and len(rows) == 1 + trace.NAMED + 2
    assert sum(row["us_a_step"] for row in rows[1:]) == pytest.approx(80) and rows[-1]["us_a_step"] == 16
    assert sum(row["share"] for row in rows[1:]) == pytest.approx(1)
    assert sum(row.get("calls_a_step", 0) for row in rows[1:]) == rows[0]["calls_a_step"] == 16
    from_us = rows[0]["kept_steps_from_us"]
    assert from_us == 100  # the launch of the first comes so much earlier
    late = [event for event in kept if event["ts"] >= from_us]
    assert sum(event["name"] == "matmul" for event in late) == trace.KEPT
    assert sum(event["name"] == "cudaGraphLaunch" for event in kept) == trace.KEPT + 1


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_a_random_model_has_its_shape_and_loads(kind, tmp_path, monkeypatch):
    monkeypatch.setitem(models.FAMILIES, "tiny", (kind, models.LLAMA if kind == "llama" else models.QWEN))
    models.write_random_model("tiny", load_task("minigsm"), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and model.config.model_type == kind
    assert all(getattr(model.config, name) == value for name, value in models.SHAPES["tiny"].items())
    policy = load_policy(str(tmp_path), DEVICE)
    assert len(policy.tokenizer) <= model.config.vocab_size and policy.prompt("Tom has 3 apples?")
