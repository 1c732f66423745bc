"""Benchmarks that need Triton: on a GPU, or in its interpreter."""

import types

import pytest
import torch

pytest.importorskip("triton", reason="Triton is there on Linux alone")

from policies import DEVICE, make_policy

from rlcourse.bench import kernels, lowered, models, serve
from rlcourse.measure.shapes import OTHERS, QWEN25, ModelShape
from rlcourse.rollout.arrivals import Request
from rlcourse.rollout.decoder import Decoder
from rlcourse.tasks.kernels.clock import H200, program_us
from rlcourse.tasks.kernels.language import compile_program


@pytest.mark.thorough
@torch.no_grad()
def test_every_piece_runs_and_those_with_an_error_compute_what_pytorch_does():
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    policy = make_policy(hidden_size=128, intermediate_size=256, **heads)
    decoder = Decoder(policy.model, torch.bfloat16 if DEVICE == "cuda" else torch.float32, compile=False)
    step = kernels._step(decoder, 3)
    found = {}
    for name, (ours, peer, moved, error, _) in kernels._pieces(decoder, step, 3).items():
        kernels._fill(step)
        found[name] = error()
        ours()
        peer()
        assert moved > 0
    assert {name for name, error in found.items() if error is not None} == {"attention", "gate_up", "down"}
    assert all(error < 0.02 for error in found.values() if error is not None), found


def test_lowered_programs_are_eager_cut_at_random_and_optimal():
    found = lowered.programs(6)
    assert found == lowered.programs(6) and [variant for _, variant, _ in found] == ["eager", "random", "optimum"] * 6
    times, random_cuts = [], set()
    for computation, variant, program in found:
        launches = compile_program(program, computation)
        times.append(program_us(launches, H200))
        if variant == "random":
            random_cuts.add((len(launches), len(computation.lines)))
    for eager, cut, least in zip(times[::3], times[1::3], times[2::3], strict=True):
        assert least <= cut <= eager
    assert any(1 < launches < lines for launches, lines in random_cuts)


def test_the_requests_are_nano_vllms():
    """It says how many tokens its prompts and answers have: 142,827 and 133,966."""
    requests = serve.queued_requests(151_936)
    assert len(requests) == 256 and {request.arrival_s for request in requests} == {0.0}
    assert sum(len(request.prompt) for request in requests) == 142_827
    assert sum(request.max_new_tokens for request in requests) == 133_966
    assert max(max(request.prompt) for request in serve.queued_requests(2048)) == 2047


def test_seconds_to_the_first_token_and_for_each_later_one(monkeypatch):
    """Three runs of which the first does not count. Request 0: 1 token after 2 s, the others 6 s later; request 1 comes
    at 10 s and gets 3 after 4 s, 2 after 9; request 2 all at once after 5 s."""
    runs, clock = [], types.SimpleNamespace(now=100.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(serve, "time", clock)

    def run(requests):
        runs.append(requests)
        clock.now += 50  # to prepare: does not count
        return parts(slow=1 if len(runs) > 1 else 100)

    def parts(slow):
        for after, number, tokens in ((2, 0, 1), (6, 0, 3), (6, 1, 3), (1, 2, 1), (4, 1, 2)):
            clock.now += slow * after
            yield number, tokens

    requests = [Request([1, 2], 4, 0.0), Request([3], 5, 10.0), Request([4, 5], 1, 10.0)]
    row = serve.measure_serving(run, requests, repeats=2)
    assert len(runs) == 3 and row["seconds"] == 19 and row["tokens"] == 10 and row["tokens_per_s"] == 10 / 19
    assert row["first_ms_median"] == 4000 and 4000 < row["first_ms_p99"] <= 5000
    assert row["ms_a_token_median"] == pytest.approx(1e3 * (6 / 3 + 5 / 2) / 2)


def test_the_shapes_are_those_of_the_models():
    known = {name.partition("/")[2].lower(): shape for name, shape in (QWEN25 | OTHERS).items()}
    for name, sizes in models.SHAPES.items():
        if name != "tiny":
            family = models.FAMILIES.get(name, ("qwen2",))[0]
            config = types.SimpleNamespace(**sizes, model_type=family, tie_word_embeddings=True)
            assert ModelShape.from_config(config) == known[name] and name.startswith(family)
