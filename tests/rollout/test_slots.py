"""Continuous batching: what is sampled does not depend on how many slots there are, nor on who took which over when."""

import pytest
import torch
from policies import DEVICE
from reference import assert_logprobs_are_the_models

from rlcourse.rollout import fast, make_engine, scheduler
from rlcourse.rollout.fast import FastEngine
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
    rollout = engine.generate(PROMPTS, 8, 30, Sampling())
    assert_logprobs_are_the_models(policy, rollout, Sampling())  # those that stay take all of a slot along
    assert sizes[0] == 40 and sizes == sorted(sizes, reverse=True) and sizes[-1] <= 10
