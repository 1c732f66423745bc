"""The benchmark `serve`: its requests, and what is counted."""

import types

import pytest
import torch

pytest.importorskip("triton", reason="Triton is there on Linux alone")

from rlcourse.bench import models, serve
from rlcourse.measure.shapes import OTHERS, QWEN25, ModelShape
from rlcourse.rollout.arrivals import Request
from rlcourse.sampling import Sampling

THREE = [Request([1, 2], 4, 0.0), Request([3], 5, 10.0), Request([4, 5], 1, 10.0)]


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

    row = serve.measure_serving(run, THREE, repeats=2)
    assert len(runs) == 3 and row["seconds"] == 19 and row["tokens"] == 10 and row["tokens_per_s"] == 10 / 19
    assert row["first_ms_median"] == 4000 and 4000 < row["first_ms_p99"] <= 5000
    assert row["ms_a_token_median"] == pytest.approx(1e3 * (6 / 3 + 5 / 2) / 2)


def test_ours_is_measured_with_nothing_in_its_cache_and_rows_at_once_are_those_of_a_step():
    seeds = []

    class Engine:
        steps, blocks = 99, "of the run before"

        def serve(self, requests, sampling):
            assert self.blocks is None and self.steps == 0 and sampling == Sampling(0.6)
            seeds.append(torch.initial_seed())
            for number, request in enumerate(requests):
                yield number, [7], False
                yield number, [8] * (request.max_new_tokens - 1), True
                self.steps += 1
            self.blocks = "kept"

    row = serve.our_row(Engine(), [Request([1], 5), Request([1], 9)], Sampling(0.6), repeats=2)
    assert row["tokens"] == 14 and row["rows_at_once"] == 12 / 2 and seeds == [0] * 4


def test_the_shapes_are_those_of_the_models():
    known = {name.partition("/")[2].lower(): shape for name, shape in (QWEN25 | OTHERS).items()}
    for name, sizes in models.SHAPES.items():
        if name != "tiny":
            family = models.FAMILIES.get(name, ("qwen2",))[0]
            config = types.SimpleNamespace(**sizes, model_type=family, tie_word_embeddings=True)
            assert ModelShape.from_config(config) == known[name] and name.startswith(family)
