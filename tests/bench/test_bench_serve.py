"""The benchmark `serve`: its requests, when they come, what is counted; vLLM by a stand-in for it."""

import sys
import types

import pytest
import torch

pytest.importorskip("triton", reason="Triton is there on Linux alone")

from rlcourse.bench import models, serve, vllm_serve
from rlcourse.measure.shapes import OTHERS, QWEN25, ModelShape
from rlcourse.rollout.arrivals import Request
from rlcourse.sampling import Sampling

THREE = [Request([1, 2], 4, 0.0), Request([3], 5, 10.0), Request([4, 5], 1, 10.0)]


class Clock:
    """It stands still unless somebody sleeps."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    for module in (serve, vllm_serve):
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_the_requests_are_nano_vllms():
    """It says how many tokens its prompts and answers have: 142,827 and 133,966."""
    requests = serve.queued_requests(151_936)
    assert len(requests) == 256 and {request.arrival_s for request in requests} == {0.0}
    assert sum(len(request.prompt) for request in requests) == 142_827
    assert sum(request.max_new_tokens for request in requests) == 133_966
    assert max(max(request.prompt) for request in serve.queued_requests(2048)) == 2047


def test_seconds_to_the_first_token_and_for_each_later_one(clock):
    """Three runs of which the first does not count. Request 0: 1 token after 2 s, the others 6 s later; request 1 comes
    at 10 s and gets 3 after 4 s, 2 after 9; request 2 all at once after 5 s."""
    runs = []

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


@pytest.mark.parametrize("tokens", [3, 5])
def test_who_gets_another_number_of_tokens_is_noticed(tokens):
    with pytest.raises(ValueError, match="more or fewer tokens"):
        serve.measure_serving(lambda requests: iter([(0, tokens)]), THREE[:1], 1)


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


@pytest.fixture
def fake_vllm(monkeypatch, clock):
    """A vLLM that gives each request a token a second, and nothing in its first step."""
    made = []

    class Engine:
        def __init__(self):
            self.waiting, self.steps = {}, 0

        def has_unfinished_requests(self) -> bool:
            return bool(self.waiting)

        def add_request(self, name, prompt, params):
            assert params["ignore_eos"] and params["output_kind"] == "delta" and params["temperature"] == 0.6
            made[-1].added.append((clock.now - 100, prompt["prompt_token_ids"]))
            self.waiting[name] = params["max_tokens"]

        def step(self):
            clock.now += 1
            self.steps += 1
            found = []
            for name in list(self.waiting) if self.steps > 1 else []:
                self.waiting[name] -= 1
                found.append(types.SimpleNamespace(request_id=name, outputs=[types.SimpleNamespace(token_ids=[9])]))
                if not self.waiting[name]:
                    del self.waiting[name]
            return found

    class LLM:
        def __init__(self, **options):
            made.append(self)
            self.options, self.llm_engine, self.added, self.resets = options, Engine(), [], 0

        def reset_prefix_cache(self):
            self.resets += 1

        def generate(self, inputs, params, use_tqdm):
            clock.now += 5
            answers = [types.SimpleNamespace(token_ids=[9] * p["max_tokens"]) for p in params]
            return [types.SimpleNamespace(outputs=[answer]) for answer in answers]

    kinds = types.SimpleNamespace(RequestOutputKind=types.SimpleNamespace(DELTA="delta"))
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(LLM=LLM, SamplingParams=dict))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
    return made


def test_vllm_gets_each_request_when_it_comes(fake_vllm):
    with vllm_serve.vllm_serve("folder", 2048, 256, 0.6) as vllm:
        parts = list(vllm.serve(THREE))
        [llm] = fake_vllm
        assert llm.options["max_model_len"] == 2048 and llm.options["max_num_seqs"] == 256 and llm.resets == 1
        assert llm.added == [(0.0, [1, 2]), (10.0, [3]), (10.0, [4, 5])]
        assert parts == [(0, 1)] * 4 + [(1, 1), (2, 1)] + [(1, 1)] * 4
        assert vllm.steps == 9  # and one without a token
        assert list(vllm.generate(THREE)) == [(0, 4), (1, 5), (2, 1)] and llm.resets == 2
    assert not hasattr(vllm, "llm")


def test_vllms_rows_where_it_is_installed(fake_vllm):
    queued = [Request(request.prompt, request.max_new_tokens) for request in THREE]
    rows = serve.vllm_rows("folder", {"queued": queued, "Poisson": THREE}, repeats=1)
    found = [(row["variant"], row["arrivals"], row["seconds"]) for row in rows]
    assert found == [("vllm", "queued", 5), ("vllm", "Poisson", 15), ("vllm generate", "queued", 5)]
    assert rows[0]["rows_at_once"] == 10 / 5 and "first_ms_median" not in rows[2]
    sys.modules["vllm"] = None
    assert serve.vllm_rows("folder", {"queued": THREE}, 1) == []


def test_the_shapes_are_those_of_the_models():
    known = {name.partition("/")[2].lower(): shape for name, shape in (QWEN25 | OTHERS).items()}
    for name, sizes in models.SHAPES.items():
        if name != "tiny":
            family = models.FAMILIES.get(name, ("qwen2",))[0]
            config = types.SimpleNamespace(**sizes, model_type=family, tie_word_embeddings=True)
            assert ModelShape.from_config(config) == known[name] and name.startswith(family)
