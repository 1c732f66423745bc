"""The benchmarks that ship: what they measure, in which shape, and what is not good enough to be recorded."""

import contextlib
import types

import pytest
import torch
from policies import DEVICE, make_policy
from transformers import AutoModelForCausalLM

from rlcourse import bench
from rlcourse.bench import Options, cute, decode, layer, learn, models, numerics, peers, run_bench, speed, trace
from rlcourse.config import ALGORITHMS, make_config
from rlcourse.kernels.toolchain import interpreted
from rlcourse.measure import records, traces
from rlcourse.policy import load_policy
from rlcourse.tasks import load_task

TINY = {"num_prompts": 2, "num_generations": 3, "max_new_tokens": 8}
ENGINES = ["hf-dynamic", "hf-static", "fast"]


@pytest.fixture
def recorded(monkeypatch) -> list[tuple]:
    """What would have been written to data/measurements."""
    calls = []
    monkeypatch.setattr(bench, "write_record", lambda *call: calls.append(call) or "a/file.json")
    return calls


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
@pytest.mark.parametrize("name", ["kernels", "cute", "layer", "lowered", "story", "trace", "logprobs", "serve"])
def test_what_needs_a_gpu_says_so(name):
    with pytest.raises(ValueError, match="no CUDA GPU was found"):
        run_bench(name, make_config(), Options(), False)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
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


@pytest.mark.parametrize(("spread", "asked"), [(0.2, True), (0.2, False), (0.21, True)])
def test_what_was_steady_is_recorded_where_asked_for(spread, asked, monkeypatch, tmp_path, capsys):
    rows = [{"variant": f"engine {i}", "tokens_per_s": 1.0, "spread": s} for i, s in enumerate((0.05, spread))]
    monkeypatch.setattr(speed, "rollout", lambda config, repeats: ({"repeats": repeats}, rows))
    write = records.write_record
    monkeypatch.setattr(bench, "write_record", lambda *call: write(*call, folder=tmp_path))
    steady = contextlib.nullcontext()
    if spread > 0.2:
        steady = pytest.raises(ValueError, match="Not recorded: engine 1 varied by over 20% between repetitions")
    with steady:
        run_bench("rollout", make_config(), Options(), record=asked)
    assert "engine 1" in capsys.readouterr().out
    if asked and spread <= 0.2:
        assert records.load_record("rollout", folder=tmp_path)["results"] == rows
    else:
        assert not list(tmp_path.iterdir())


def test_other_shapes_and_lengths_have_records_of_their_own(monkeypatch, recorded):
    for shape, lengths in (("qwen2.5-0.5b", "equal"), ("qwen3-0.6b", "equal"), ("qwen3-0.6b", "skewed")):
        found = {"shape": shape, "lengths": lengths}, [{"variant": "graph"}]
        monkeypatch.setattr(decode, "decode", lambda *a, found=found: found)
        run_bench("decode", make_config(), Options(shape=shape, lengths=lengths), record=True)
    assert [call[0] for call in recorded] == ["decode", "decode-qwen3-0.6b", "decode-skewed-qwen3-0.6b"]


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


def test_trl_has_the_attention_that_is_faster_for_its_cache(monkeypatch):
    pytest.importorskip("trl")
    before, allowed, enabled = True, {}, torch.backends.cuda.cudnn_sdp_enabled

    def run_trl(model, task, completions, new_tokens, steps, variant):
        allowed[variant] = enabled()
        compiling = {"step_s": 90.0, "rollout_s": 1.0}
        return [compiling] * 2 + [{"step_s": 2.0, "rollout_s": 1.0}] * 3

    monkeypatch.setattr(peers, "run_trl", run_trl)
    monkeypatch.setattr(peers, "runs_on", lambda device: True)
    kept = enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(before)
        names = peers.trl_variants()
        updates = [peers.trl_step("model", None, 8, 6, 3, name)["update_s"] for name in names]
        growing = {"trl-default": False, "trl-update-compiled": False}
        assert allowed == growing | {"trl-static-compiled": before, "trl-vllm": before} and enabled() is before
    finally:
        torch.backends.cuda.enable_cudnn_sdp(kept)
    assert names == ["trl-default", "trl-update-compiled", "trl-static-compiled", "trl-vllm"] and updates == [1.0] * 4


@pytest.mark.thorough
def test_an_update_is_timed_beside_what_its_operations_need():
    _setup, [row] = speed.update("tiny", [8], new_tokens=6, repeats=2)
    assert row["rows"] == 8 and row["tokens"] % 8 == 0 and row["tokens"] > 8 * 6
    assert 0 < row["floor_s"] < row["update_s"] and 0 < row["tflops"] < row["peak_tflops"]


@pytest.mark.thorough
def test_every_rung_of_the_ladder_decodes_the_same_rows():
    setup, rows = decode.decode("tiny", [8, 16], prompt_tokens=12, new_tokens=6, repeats=2)
    rungs = list(dict.fromkeys(row["variant"] for row in rows))
    assert DEVICE == "cuda" or rungs == ["hf-none", "hf-dynamic", "hf-static", "fast"]
    assert [(row["variant"], row["rows"]) for row in rows] == [(name, count) for count in (8, 16) for name in rungs]
    for row in rows:
        assert row["tokens_a_row"] == 6  # none ends by itself
        assert row["tokens_per_s"] > 0 and row["spread"] >= 0 and row["floor_ms"] > 0
        assert row["kernels_a_step"] > 10 and (DEVICE == "cuda" or row["busy"] is None)
    assert setup["lengths"] == "equal" and setup["copy_gb_per_s"] > 0


def test_milliseconds_a_step_leave_the_prefill_out(monkeypatch):
    """With a clock that says 5 s for the prompt and 2 s for each token, 1 token takes 7 and 6 take 17."""
    monkeypatch.setattr(decode, "seconds", lambda run, device: run() or 5.0 + 2.0 * limits[-1])
    limits = []

    class Engine:
        def generate(self, prompts, num_generations, max_new_tokens, sampling):
            limits.append(max_new_tokens)
            return type("R", (), {"completion_lengths": torch.full((16,), max_new_tokens)})

        def sleep(self):
            pass

    row, _ = decode._measure_rung(Engine(), [[1], [2]], 2, 6, 3, torch.device("cpu"))
    assert row["ms_per_step"] == 2000 and row["tokens_per_s"] == 16 * 6 / 17 and row["tokens_a_row"] == 6


def test_a_schedule_without_a_pause_takes_as_many_steps_as_its_last_answer_ends_at():
    assert decode.schedule_steps([5] * 8, 4) == 2 * 4  # two rounds, a token of each from its prompt
    assert decode.schedule_steps([1] * 100, 4) == 0
    assert decode.schedule_steps([11, 3, 3, 3, 3, 11], 2) == 2 * 4 + 10  # the last long one begins after four short
    assert decode.schedule_steps([4, 9, 2], 3) == 8  # who has a slot each


@pytest.mark.thorough
def test_skewed_answers_are_more_than_are_decoded_at_once(monkeypatch):
    monkeypatch.setattr(decode, "ROUNDS", 2)
    seeds, seed = [], torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda s: seeds.append(s) or seed(s))
    setup, rows = decode.decode("tiny", [8], prompt_tokens=12, new_tokens=30, lengths="skewed", repeats=2)
    assert set(seeds) == set(range(decode.DRAWS))
    assert setup["lengths"] == "skewed" and setup["rollouts"] == decode.DRAWS
    assert rows[-1]["variant"] == ("fast" if DEVICE == "cpu" else "graph") and len(rows) >= 2
    assert 1 < rows[-1]["tokens_a_row"] < 30 and "floor_ms" not in rows[-1]  # a step has no one size
    tokens = rows[-1]["tokens_a_row"] * 2 * 8 * decode.DRAWS
    assert tokens / 8 - 2 * decode.DRAWS <= rows[-1]["schedule_steps"] < 2 * 30 * decode.DRAWS


def test_skewed_answers_are_distributed_for_vllm_as_for_ours():
    ids = decode.skewed(151_936)
    assert len(set(ids)) == len(ids) and (1 - len(ids) / 151_936) ** 120 == pytest.approx(0.5, abs=0.01)
    assert decode.answer_lengths(3, 70, "equal") == [70] * 3
    lengths = torch.tensor(decode.answer_lengths(20_000, 512, "skewed"))
    assert lengths.min() == 1 and lengths.max() == 512 and lengths.median().item() == pytest.approx(120, rel=0.05)


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


def test_what_is_traced_is_kept_where_records_are(monkeypatch, recorded, tmp_path):
    monkeypatch.setattr(trace, "trace", lambda *_: ({}, [{"variant": "graph"}], {"graph": traced()}))
    monkeypatch.setattr(traces, "trace_path", lambda name: tmp_path / f"{name}.json.gz")
    run_bench("trace", make_config(), Options(), record=False)
    assert not recorded and not list(tmp_path.iterdir())
    run_bench("trace", make_config(), Options(), record=True)
    assert recorded[0][0] == "trace" and traces.read_trace(tmp_path / "graph.json.gz") == traced()


@pytest.mark.parametrize("size", [2, 5])
def test_coin_flips_give_every_group_signal(size):
    torch.manual_seed(0)
    config = make_config(num_prompts=50, num_generations=size)
    rewards = torch.tensor(speed.coin_flips([], config)).view(50, size)
    assert rewards.sum(1).tolist() == [size // 2] * 50
    assert len({tuple(row) for row in rewards.tolist()}) > 1 and set(rewards.flatten().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_a_random_model_has_its_shape_and_loads(kind, tmp_path, monkeypatch):
    monkeypatch.setitem(models.FAMILIES, "tiny", (kind, models.LLAMA if kind == "llama" else models.QWEN))
    models.write_random_model("tiny", load_task("minigsm"), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and model.config.model_type == kind
    assert all(getattr(model.config, name) == value for name, value in models.SHAPES["tiny"].items())
    policy = load_policy(str(tmp_path), DEVICE)
    assert len(policy.tokenizer) <= model.config.vocab_size and policy.prompt("Tom has 3 apples?")


def test_what_is_added_is_kept_row_by_row_and_not_measured_again(monkeypatch, tmp_path, capsys):
    measured, spread = [], {8: 0.1, 16: 0.3, 24: 0.1}

    def our_update(model, task, count, *_):
        measured.append(count)
        if count == 24 and len(measured) == 3:
            raise KeyboardInterrupt
        return {"update_s": 1.0, "spread": spread[count]}

    monkeypatch.setattr(speed, "our_update", our_update)
    monkeypatch.setattr(records, "data_folder", lambda: tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_bench("update", make_config(), Options(shape="tiny", rows=(8, 16, 24)), record=False, add=True)
    assert "Not kept: rlcourse varied by over 20% between repetitions." in capsys.readouterr().out
    folder = tmp_path / "measurements"
    assert [row["rows"] for row in records.load_record("update-tiny", folder=folder)["results"]] == [8]
    spread[16] = 0.1
    run_bench("update", make_config(), Options(shape="tiny", rows=(8, 16, 24)), record=False, add=True)
    assert measured == [8, 16, 24, 16, 24]
    assert [row["rows"] for row in records.load_record("update-tiny", folder=folder)["results"]] == [8, 16, 24]
    run_bench("update", make_config(), Options(shape="tiny", rows=(8,), repeats=2), record=False, add=True)
    assert measured[5:] == [8] and len(records.load_record("update-tiny", folder=folder)["results"]) == 1


@pytest.mark.parametrize("wins", [False, True])
def test_of_other_shapes_our_kernels_alone_are_measured(monkeypatch, wins):
    monkeypatch.setattr(decode, "cute_wins", lambda device: wins)

    def rungs(device: str, kept: str) -> list[str]:
        return list(decode.ladder(types.SimpleNamespace(device=torch.device(device)), torch.float32, 8, kept))

    assert rungs("cuda", "ours") == (["graph-triton", "graph-exact", "graph"] if wins else ["graph"])
    assert rungs("cpu", "ours") == ["fast"] and len(rungs("cuda", "cached")) > 4
    kept = []
    monkeypatch.setattr(decode, "ladder", lambda policy, dtype, rows, which: kept.append(which) or {})
    monkeypatch.setattr(decode, "_policy", lambda *_: make_policy())
    monkeypatch.setattr(decode, "measure_machine", lambda _: types.SimpleNamespace(bytes_per_s=1e9))
    for shape in ("qwen2.5-0.5b", "qwen3-0.6b"):
        decode.decode(shape, [8], prompt_tokens=4, new_tokens=65, repeats=1)
    assert kept == ["cached", "ours"]


@pytest.mark.parametrize(("prefill", "whole", "share"), [(0.1, 0.5, 0.6), (0.4, 0.9, 1.0), (None, None, None)])
def test_busy_is_that_of_decode_steps_without_the_prefill(prefill, whole, share):
    """2 s of prefill, 8 s of steps: busy for 0.2 s, then for 5 in all, so 4.8 in steps; or 0.8 and 9: more than 8."""
    one, more = (decode.Profile(seconds, busy, 1.0, 1.0, []) for seconds, busy in ((2.0, prefill), (10.0, whole)))
    assert decode.busy_between(one, more) == (share if share is None else pytest.approx(share))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_learn_combines_every_engine_and_every_algorithm_and_has_three_seeds_of_two(on_gpu):
    found = learn.combinations(on_gpu)
    assert {c["algorithm"] for c in found} == set(ALGORITHMS) and {c["engine"] for c in found} >= set(ENGINES)
    assert len({tuple(sorted(c.items())) for c in found}) == len(found)
    dtypes = {"float32", "bfloat16"} if on_gpu else {"float32"}
    assert {c["dtype"] for c in found} == dtypes and {c["compile"] for c in found} == {False, on_gpu} | {on_gpu}
    for algorithm in learn.THREE_SEEDS:
        assert {c.get("seed", 0) for c in found if c["algorithm"] == algorithm} == {0, 1, 2}
