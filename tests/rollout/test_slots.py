"""Continuous batching over fixed slots, run here by the step in PyTorch; on a GPU the engine's own tests run it too."""

import pytest
import torch
from conftest import DEVICE, make_policy

from rlcourse.logprobs import token_logprobs
from rlcourse.rollout import graph, make_engine, slots
from rlcourse.sampling import GREEDY, Sampling

PROMPTS = [[5, 9, 40, 7], [11], [30, 31, 32, 33, 34, 35, 36], [8, 8], [50, 51, 52]]


def by_slots(policy, prompts, num_generations, max_new_tokens, sampling, engine=None):
    engine = engine or make_engine(policy, "graph", torch.float32)
    engine.decoder.sync()
    with torch.no_grad():
        outputs = engine._run_slots(prompts, num_generations, max_new_tokens, sampling)
    ids, mask = graph.left_pad(prompts, policy.pad_id, engine.device)
    return engine._rollout(*outputs, ids, mask, num_generations)


@pytest.mark.parametrize("available", [1, 2, 3, 5, 256])
@pytest.mark.parametrize("every", [1, 3, 16])
def test_greedy_tokens_do_not_depend_on_how_many_slots_there_are(policy, available, every, monkeypatch):
    expected = make_engine(policy, "hf-dynamic", torch.float32).generate(PROMPTS, 2, 21, GREEDY)
    monkeypatch.setattr(graph, "MAX_SLOTS", available)
    monkeypatch.setattr(slots, "STEPS_BETWEEN_LOOKS", every)
    monkeypatch.setattr(slots, "SMALLEST", 1)
    found = by_slots(policy, PROMPTS, 2, 21, GREEDY)
    assert torch.equal(found.completion_ids, expected.completion_ids)
    assert torch.equal(found.completion_mask, expected.completion_mask)
    assert torch.equal(found.finished, expected.finished) and torch.equal(found.prompt_ids, expected.prompt_ids)
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7), Sampling(top_k=5), Sampling(top_p=0.8)])
def test_sampling_logprobs_equal_recomputed_ones_when_slots_are_taken_over(policy, sampling, monkeypatch):
    monkeypatch.setattr(graph, "MAX_SLOTS", 4)
    monkeypatch.setattr(slots, "STEPS_BETWEEN_LOOKS", 2)
    monkeypatch.setattr(slots, "SMALLEST", 1)
    policy.eos_ids = list(range(0, len(policy.tokenizer), 20))
    torch.manual_seed(2)
    rollout = by_slots(policy, PROMPTS, 6, 12, sampling)
    with torch.no_grad():
        recomputed, _, _ = token_logprobs(policy.model, rollout, sampling, chunk=64)
    torch.testing.assert_close(rollout.logprobs, recomputed, atol=1e-4, rtol=0)
    assert len(rollout.lengths.unique()) > 1 and (rollout.lengths >= 1).all()


@pytest.mark.parametrize("completions", [1, 257])
def test_one_completion_and_one_more_than_there_are_slots(policy, completions):
    torch.manual_seed(0)
    rollout = by_slots(policy, [PROMPTS[0]], completions, 9, Sampling())
    with torch.no_grad():
        recomputed, _, _ = token_logprobs(policy.model, rollout, Sampling(), chunk=512)
    torch.testing.assert_close(rollout.logprobs, recomputed, atol=1e-4, rtol=0)
    assert rollout.completion_ids.shape[0] == completions


def test_a_completion_may_end_with_its_first_token_and_another_with_each_later_one(policy, monkeypatch):
    """Every token ends an answer, or none does: each row stops where it should, and no output of another is touched."""
    monkeypatch.setattr(graph, "MAX_SLOTS", 2)
    policy.eos_ids = list(range(len(policy.tokenizer)))
    first = by_slots(policy, PROMPTS, 3, 8, Sampling())
    assert first.lengths.tolist() == [1] * 15 and first.finished.all()
    policy.eos_ids = [len(policy.tokenizer)]
    never = by_slots(policy, PROMPTS, 3, 8, Sampling())
    assert never.lengths.tolist() == [8] * 15 and not never.finished.any()
    policy.eos_ids = list(range(0, len(policy.tokenizer), 9))
    some = by_slots(policy, PROMPTS, 30, 40, Sampling())
    ends = torch.isin(some.completion_ids, torch.tensor(policy.eos_ids, device=DEVICE))
    for row, length in enumerate(some.lengths.tolist()):
        assert not ends[row, : length - 1].any() and (ends[row, length - 1] or length == 40)
    assert len(some.lengths.unique()) > 10


@pytest.mark.parametrize("max_new_tokens", [1, 2])
def test_a_limit_of_one_or_two_tokens(policy, max_new_tokens, monkeypatch):
    monkeypatch.setattr(graph, "MAX_SLOTS", 3)
    rollout = by_slots(policy, PROMPTS, 2, max_new_tokens, Sampling())
    assert rollout.completion_ids.shape == (10, int(rollout.lengths.max())) and rollout.lengths.max() <= max_new_tokens


def test_the_memory_is_used_again_and_grows_only_when_it_must(policy):
    engine = make_engine(policy, "graph", torch.float32)
    by_slots(policy, PROMPTS, 2, 20, GREEDY, engine)
    address = engine.slots.cache.data_ptr()
    smaller = by_slots(policy, PROMPTS[:2], 1, 5, GREEDY, engine)
    assert engine.slots.cache.data_ptr() == address
    assert torch.equal(smaller.completion_ids, by_slots(policy, PROMPTS[:2], 1, 5, GREEDY).completion_ids)
    by_slots(policy, PROMPTS, 2, 140, GREEDY, engine)
    assert engine.slots.cache.shape[4] >= 147 and len(engine.slots.row) == 10
    engine.sleep()
    assert engine.slots is None
    again = by_slots(policy, PROMPTS[:2], 1, 5, GREEDY, engine)
    assert torch.equal(again.completion_ids, smaller.completion_ids)


def test_the_step_becomes_smaller_as_completions_end(policy, monkeypatch):
    sizes = []
    policy.eos_ids = list(range(0, len(policy.tokenizer), 12))
    engine = make_engine(policy, "graph", torch.float32)
    original = engine._step_of
    monkeypatch.setattr(engine, "_step_of", lambda size, *a, **k: sizes.append(size) or original(size, *a, **k))
    monkeypatch.setattr(slots, "STEPS_BETWEEN_LOOKS", 1)
    monkeypatch.setattr(slots, "SMALLEST", 1)
    torch.manual_seed(0)
    by_slots(policy, PROMPTS, 8, 30, Sampling(), engine)
    assert sizes[0] == 40 and sizes == sorted(sizes, reverse=True) and sizes[-1] <= 10


def test_shrink_moves_the_living_and_nothing_else(policy):
    engine = make_engine(policy, "graph", torch.float32)
    held = slots.Slots.empty(engine.decoder, 8, 4, 8, 4, 1, 1)
    held.row.copy_(torch.arange(8))
    held.cache.copy_(torch.arange(8.0)[:, None, None, None].expand(8, *held.cache.shape[3:]))
    free = [0, 2, 4, 5, 6]  # 1, 3 and 7 live
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "SMALLEST", 2)
        assert slots.shrink(held, 8, free) == 4
    assert held.row[:4].tolist() == [7, 1, 2, 3]
    assert held.cache[0, 0, :4, 0, 0, 0].tolist() == [7, 1, 2, 3] and held.cache[-1, 1, :4, -1, -1, -1].tolist() == [
        7,
        1,
        2,
        3,
    ]
    assert slots.shrink(held, 4, [0, 1, 2, 3]) == 0 and slots.shrink(held, 4, [2]) == 4


def test_new_weights_are_sampled_from_in_the_same_memory(policy):
    engine = make_engine(policy, "graph", torch.float32)
    by_slots(policy, PROMPTS, 2, 12, GREEDY, engine)
    addresses = [engine.decoder.layers[0].qkv.data_ptr(), engine.slots.cache.data_ptr()]
    other = make_policy(seed=9)
    with torch.no_grad():
        for mine, its in zip(policy.model.parameters(), other.model.parameters(), strict=True):
            mine.copy_(its)
    expected = make_engine(other, "hf-dynamic", torch.float32).generate(PROMPTS, 2, 12, GREEDY)
    found = by_slots(policy, PROMPTS, 2, 12, GREEDY, engine)
    assert torch.equal(found.completion_ids, expected.completion_ids)
    assert addresses == [engine.decoder.layers[0].qkv.data_ptr(), engine.slots.cache.data_ptr()]


def test_frequencies_match_the_softmax_where_slots_are_taken_over(policy, monkeypatch):
    monkeypatch.setattr(graph, "MAX_SLOTS", 700)
    policy.eos_ids = [len(policy.tokenizer)]
    torch.manual_seed(3)
    with torch.no_grad():
        expected = policy.model(torch.tensor([PROMPTS[0]], device=DEVICE)).logits[0, -1].softmax(-1).cpu()
    draws = 4000
    rollout = by_slots(policy, [PROMPTS[0]], draws, 2, Sampling())
    counts = torch.bincount(rollout.completion_ids[:, 0].cpu(), minlength=len(expected)).float()
    likely = expected * draws > 5
    chi = ((counts - expected * draws).square() / (expected * draws))[likely].sum()
    freedom = int(likely.sum())
    assert chi < freedom + 4 * (2 * freedom) ** 0.5  # mean and four standard deviations of chi-square
