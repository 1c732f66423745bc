"""The engine in PyTorch: rows leave the batch as they end, its room, and an attention that is plugged in."""

import pytest
import torch
from policies import DEVICE
from reference import assert_logprobs_are_the_models

from rlcourse import cuda_graphs
from rlcourse.rollout import make_engine, torch_engine
from rlcourse.rollout.torch_engine import TorchEngine, without_ended
from rlcourse.sampling import GREEDY, Sampling

PROMPTS = [[5, 9, 40, 7], [11], [30, 31, 32, 33, 34, 35, 36], [8, 8], [50, 51, 52]]


@pytest.mark.parametrize("every", [3, 16])
def test_greedy_tokens_are_those_of_generate_however_often_the_host_looks(policy, every, monkeypatch):
    expected = make_engine(policy, "hf-dynamic", torch.float32).generate(PROMPTS, 2, 21, GREEDY)
    monkeypatch.setattr(cuda_graphs, "SMALLEST", 1)
    engine = TorchEngine(policy)
    engine.steps_between_looks = every
    found = engine.generate(PROMPTS, 2, 21, GREEDY)
    assert torch.equal(found.ids, expected.ids) and torch.equal(found.prompt_lengths, expected.prompt_lengths)
    assert torch.equal(found.completion_lengths, expected.completion_lengths)
    assert torch.equal(found.finished, expected.finished)
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("resize", [cuda_graphs.halve, without_ended])
@pytest.mark.parametrize("sampling", [Sampling(temperature=0.7), Sampling(top_k=5), Sampling(top_p=0.8)])
def test_the_step_becomes_smaller_as_completions_end(policy, sampling, resize, monkeypatch):
    monkeypatch.setattr(torch_engine, "halve" if DEVICE == "cuda" else "without_ended", resize)
    monkeypatch.setattr(cuda_graphs, "SMALLEST", 1)
    policy.eos_ids = list(range(0, len(policy.tokenizer), 12))
    engine, sizes, record = TorchEngine(policy), [], TorchEngine._record
    engine.steps_between_looks = 2
    monkeypatch.setattr(TorchEngine, "_record", lambda self, size, *a: sizes.append(size) or record(self, size, *a))
    torch.manual_seed(0)
    rollout = engine.generate(PROMPTS, 8, 30, sampling)
    assert_logprobs_are_the_models(policy, rollout, sampling)  # those that stay take all of a row along
    assert sizes[0] == 40 and sizes == sorted(sizes, reverse=True) and sizes[-1] < 40
    assert len(rollout.completion_lengths.unique()) > 1 and (rollout.completion_lengths >= 1).all()


def test_a_batch_becomes_smaller_when_a_quarter_has_ended():
    assert [without_ended(64, live) for live in (64, 49, 48, 47, 1)] == [64, 64, 48, 47, 1]
    assert [without_ended(8, live) for live in (7, 1)] == [8, 8]


def test_room_is_used_again_on_a_gpu_grows_only_when_it_must_and_is_given_back(policy):
    engine = TorchEngine(policy)
    engine.generate(PROMPTS, 2, 20, GREEDY)
    if DEVICE == "cpu":
        assert engine.cache is None  # training wants the memory
    else:
        address = engine.cache.data_ptr()
        engine.generate(PROMPTS[:2], 1, 5, GREEDY)
        assert engine.cache.data_ptr() == address
        engine.generate(PROMPTS, 2, 140, GREEDY)
        assert engine.room == (10, 256, 140)
    found = engine.generate(PROMPTS[:2], 1, 5, GREEDY)
    assert torch.equal(found.ids, TorchEngine(policy).generate(PROMPTS[:2], 1, 5, GREEDY).ids)
    engine.sleep()
    assert engine.cache is None


def test_an_attention_plugs_in(policy):
    """By a loop over rows and heads, where each sees its own tokens alone."""
    calls = []

    def attention(q, keys, values, positions):
        calls.append(q.shape)
        out = torch.empty_like(q)
        shared = q.shape[1] // keys.shape[1]
        for row, newest in enumerate(positions.tolist()):
            for head in range(q.shape[1]):
                k, v = (t[row, head // shared, : newest + 1] for t in (keys, values))
                out[row, head] = (k @ q[row, head] / q.shape[-1] ** 0.5).softmax(0) @ v
        return out

    expected = TorchEngine(policy).generate(PROMPTS, 1, 6, GREEDY)
    engine = TorchEngine(policy, attention=attention)
    engine.on_gpu = False  # what looks at positions cannot be captured
    found = engine.generate(PROMPTS, 1, 6, GREEDY)
    assert torch.equal(found.ids, expected.ids) and len(calls) == 5 * policy.model.config.num_hidden_layers
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-4, rtol=0)
