"""The step in PyTorch, compiled: a few programs serve all numbers of rows, cache lengths and samplings.

Dynamo traces and guards as for a GPU; what it traced is run as it is, since compiling for a CPU takes minutes.
"""

import pytest
import torch
from policies import DEVICE, make_policy
from reference import assert_logprobs_are_the_models
from torch._dynamo.utils import counters

from rlcourse.rollout.decoder import Decoder
from rlcourse.rollout.torch_engine import TorchEngine
from rlcourse.sampling import GREEDY, Sampling

SIZES = [(4, 5, 20), (7, 20, 20), (1, 3, 20), (32, 18, 40), (1, 60, 64), (64, 31, 33)]  # rows, length, room
MOST = 4  # programs: one row, a cache that is full, and all others


@pytest.fixture
def traced(monkeypatch):
    """`torch.compile` that only traces, fails at a graph break, and at more programs than a test allows."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **k: compile(f, backend="aot_eager", fullgraph=True, **k))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def programs() -> int:
    return counters["stats"]["unique_graphs"]


def test_nothing_is_compiled_for_one_shape_alone_or_dies_at_the_recompile_limit(policy, monkeypatch):
    """The two that follow show what this is for, in two minutes."""
    options, compile = [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **k: options.append(k) or compile(f, **k))
    TorchEngine(policy, compile=True)
    assert len(options) == 2 and all(o.get("dynamic") is True and not o.get("fullgraph") for o in options)


@torch.no_grad()
@pytest.mark.thorough
def test_a_compiled_layer_serves_more_sizes_than_may_be_recompiled(traced):
    policy = make_policy(num_hidden_layers=1)
    compiled, eager = (Decoder(policy.model, torch.float32, compile) for compile in (True, False))
    with torch._dynamo.config.patch(recompile_limit=MOST):
        for rows, length, room in SIZES:
            torch.manual_seed(rows)
            cache = torch.randn(1, 2, rows, 2, room, 8, device=DEVICE)
            tokens, positions = torch.randint(200, (rows,)).to(DEVICE), torch.randint(length, (rows,)).to(DEVICE)
            written = cache.clone()
            found = compiled.decode(tokens, positions, written, length)
            torch.testing.assert_close(found, eager.decode(tokens, positions, cache, length), atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(written, cache, atol=1e-4, rtol=1e-4)
    assert programs() <= MOST < len(SIZES)


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
