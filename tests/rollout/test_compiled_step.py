"""The step in PyTorch, compiled: a few programs serve all numbers of rows, cache lengths and samplings. Dynamo traces
and guards as for a GPU; what it traced is run as it is, since compiling for a CPU takes minutes."""

import pytest
import torch
from policies import make_policy
from reference import assert_logprobs_are_the_models
from torch._dynamo.utils import counters

from rlcourse.rollout.torch_engine import TorchEngine
from rlcourse.sampling import GREEDY, Sampling


@pytest.fixture
def traced(monkeypatch):
    """`torch.compile` that only traces, and fails at a graph break."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **k: compile(f, backend="aot_eager", fullgraph=True, **k))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def test_nothing_is_compiled_for_one_shape_alone_or_dies_at_the_recompile_limit(policy, monkeypatch):
    """The one that follows shows what this is for, in two minutes."""
    options, compile = [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **k: options.append(k) or compile(f, **k))
    TorchEngine(policy, compile=True)
    assert len(options) == 2 and all(o.get("dynamic") is True and not o.get("fullgraph") for o in options)


@pytest.mark.thorough
def test_a_compiled_engine_answers_calls_of_all_sizes_and_samplings(traced):
    """As a run does: training with rows that end one after another, evaluation of other sizes, greedily."""
    policy = make_policy(num_hidden_layers=1)
    policy.eos_ids = list(range(0, len(policy.tokenizer), 12))
    engine = TorchEngine(policy, compile=True)
    for prompts, group, sampling in (
        ([[5, 9, 40, 7], [11]], 20, Sampling()),
        ([[8, 8], [30, 31, 32], [4]], 1, GREEDY),
        ([[50, 51, 52]], 1, Sampling(temperature=0.8)),
        ([[8, 8], [30, 31, 32], [4]], 16, Sampling(top_p=0.9)),
    ):
        rollout = engine.generate(prompts, group, 12, sampling)
        assert_logprobs_are_the_models(policy, rollout, sampling)
    assert counters["stats"]["unique_graphs"] <= 11  # for dozens of sizes
