"""Continuous batching: what is sampled does not depend on how many slots there are, nor on who took which over when."""

import pytest
import torch
from policies import DEVICE
from reference import assert_logprobs_are_the_models

from rlcourse.rollout import fast, make_engine, scheduler
from rlcourse.rollout.decoder import Decoder
from rlcourse.rollout.fast import FastEngine
from rlcourse.rollout.slots import Room, Slots
from rlcourse.sampling import GREEDY, Sampling

PROMPTS = [[5, 9, 40, 7], [11], [30, 31, 32, 33, 34, 35, 36], [8, 8], [50, 51, 52]]


@pytest.mark.parametrize(("available", "every"), [(1, 1), (3, 3), (3, 16), (256, 3)])
def test_greedy_tokens_do_not_depend_on_how_many_slots_there_are(policy, available, every, monkeypatch):
    expected = make_engine(policy, "hf-dynamic", torch.float32).generate(PROMPTS, 2, 21, GREEDY)
    monkeypatch.setitem(fast.STEPS_BETWEEN_LOOKS, DEVICE, every)
    monkeypatch.setattr(scheduler, "SMALLEST", 1)
    found = FastEngine(policy, max_slots=available).generate(PROMPTS, 2, 21, GREEDY)
    assert torch.equal(found.ids, expected.ids) and torch.equal(found.prompt_lengths, expected.prompt_lengths)
    assert torch.equal(found.completion_lengths, expected.completion_lengths)
    assert torch.equal(found.finished, expected.finished)
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.7), Sampling(top_k=5), Sampling(top_p=0.8)])
def test_sampling_logprobs_equal_recomputed_ones_when_slots_are_taken_over(policy, sampling, monkeypatch):
    monkeypatch.setitem(fast.STEPS_BETWEEN_LOOKS, DEVICE, 2)
    monkeypatch.setattr(scheduler, "SMALLEST", 1)
    policy.eos_ids = list(range(0, len(policy.tokenizer), 20))
    torch.manual_seed(2)
    rollout = FastEngine(policy, max_slots=4).generate(PROMPTS, 6, 12, sampling)
    assert_logprobs_are_the_models(policy, rollout, sampling)
    assert len(rollout.completion_lengths.unique()) > 1 and (rollout.completion_lengths >= 1).all()


@pytest.mark.parametrize("completions", [1, 257])
def test_one_completion_and_one_more_than_there_are_slots(policy, completions):
    torch.manual_seed(0)
    rollout = FastEngine(policy, max_slots=256).generate([PROMPTS[0]], completions, 9, Sampling())
    assert_logprobs_are_the_models(policy, rollout, Sampling())
    assert len(rollout.ids) == completions


def test_a_completion_may_end_with_its_first_token_and_another_with_each_later_one(policy):
    """Every token ends an answer, or none does: each row stops where it should, and no output of another is touched."""
    policy.eos_ids = list(range(len(policy.tokenizer)))
    first = FastEngine(policy, max_slots=2).generate(PROMPTS, 3, 8, Sampling())
    assert first.completion_lengths.tolist() == [1] * 15 and first.finished.all()
    policy.eos_ids = [len(policy.tokenizer)]
    for limit in (1, 2, 8):
        never = FastEngine(policy, max_slots=2).generate(PROMPTS, 3, limit, Sampling())
        assert never.completion_lengths.tolist() == [limit] * 15 and not never.finished.any()
    policy.eos_ids = list(range(0, len(policy.tokenizer), 9))
    some = FastEngine(policy, max_slots=2).generate(PROMPTS, 30, 40, Sampling())
    ends = torch.isin(some.completion_ids, torch.tensor(policy.eos_ids, device=DEVICE))
    for row, length in enumerate(some.completion_lengths.tolist()):
        assert not ends[row, : length - 1].any() and (ends[row, length - 1] or length == 40)
    assert len(some.completion_lengths.unique()) > 10


def test_room_is_used_again_on_a_gpu_grows_only_when_it_must_and_is_given_back(policy):
    engine = FastEngine(policy)
    engine.generate(PROMPTS, 2, 20, GREEDY)
    if DEVICE == "cpu":
        assert engine.slots is None  # training wants the memory
    else:
        address = engine.slots.cache.data_ptr()
        engine.generate(PROMPTS[:2], 1, 5, GREEDY)
        assert engine.slots.cache.data_ptr() == address
        engine.generate(PROMPTS, 2, 140, GREEDY)
        assert engine.room.tokens >= 147 and engine.room.slots == 10
    found = engine.generate(PROMPTS[:2], 1, 5, GREEDY)
    assert torch.equal(found.ids, FastEngine(policy).generate(PROMPTS[:2], 1, 5, GREEDY).ids)
    engine.sleep()
    assert engine.slots is None


def test_the_step_becomes_smaller_as_completions_end(policy, monkeypatch):
    policy.eos_ids = list(range(0, len(policy.tokenizer), 12))
    engine, sizes, original = FastEngine(policy), [], FastEngine._run
    monkeypatch.setattr(
        FastEngine, "_run", lambda self, plan, step: sizes.append(plan.size) or original(self, plan, step)
    )
    monkeypatch.setitem(fast.STEPS_BETWEEN_LOOKS, DEVICE, 1)
    torch.manual_seed(0)
    engine.generate(PROMPTS, 8, 30, Sampling())
    assert sizes[0] == 40 and sizes == sorted(sizes, reverse=True) and sizes[-1] <= 10


def test_a_move_takes_everything_of_a_slot_along_and_touches_no_other(policy):
    decoder = Decoder(policy.model, torch.float32, False)
    slots = Slots.empty(decoder, Room(slots=8, tokens=4, prompts=1, prompt_tokens=1, completions=8, new_tokens=4))
    slots.completion.copy_(torch.arange(8))
    slots.cache.copy_(torch.arange(8.0)[:, None, None, None].expand(8, *slots.cache.shape[3:]))
    slots.move([(7, 0), (5, 2)], 3)
    assert slots.completion.tolist() == [7, 1, 5, 3, 4, 5, 6, 7]
    assert (
        slots.cache[0, 0, :, 0, 2, 0].tolist() == slots.cache[-1, 1, :, -1, 0, -1].tolist() == [7, 1, 5, 3, 4, 5, 6, 7]
    )
    assert slots.cache[0, 0, :, 0, 3, 0].tolist() == list(range(8))  # beyond the length nothing moves


def test_frequencies_match_the_softmax_where_slots_are_taken_over(policy):
    policy.eos_ids = [len(policy.tokenizer)]
    torch.manual_seed(3)
    with torch.no_grad():
        expected = policy.model(torch.tensor([PROMPTS[0]], device=DEVICE)).logits[0, -1].softmax(-1).cpu()
    draws = 2000
    rollout = FastEngine(policy, max_slots=700).generate([PROMPTS[0]], draws, 2, Sampling())
    counts = torch.bincount(rollout.completion_ids[:, 0].cpu(), minlength=len(expected)).float()
    likely = expected * draws > 5
    chi = ((counts - expected * draws).square() / (expected * draws))[likely].sum()
    freedom = int(likely.sum())
    assert chi < freedom + 4 * (2 * freedom) ** 0.5  # mean and four standard deviations of chi-square
