"""Rewards and lengths exactly at a boundary, and what a call leaves behind."""

from dataclasses import replace

import pytest
import torch
from policies import rollout_of

from rlcourse import logprobs
from rlcourse.advantages import gae, whiten
from rlcourse.losses import aggregate, token_loss, value_loss
from rlcourse.rollout.blocks import BlockManager
from rlcourse.rollout.scheduler import Scheduler
from rlcourse.sampling import GREEDY, Sampling, sampling_logits


def test_inputs_of_losses_and_advantages_stay_as_they_are():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    a, b, c = (torch.randn(2, 3) for _ in range(3))
    kept = [tensor.clone() for tensor in (a, b, c)]
    token_loss(a, b, c, mask, surrogate="clip", ratio="sequence", clip_low=0.2, clip_high=0.2)
    value_loss(a, b, c, mask, 0.2)
    aggregate(a, mask, "token_mean", rows=2, tokens=3, max_new_tokens=3)
    whiten(a, mask), gae(a, b, mask, 0.9, 0.9)
    assert all(torch.equal(tensor, before) for tensor, before in zip((a, b, c), kept, strict=True))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7), Sampling(top_k=3), Sampling(top_p=0.5), GREEDY])
def test_logits_that_are_sampled_from_stay_as_they_are(sampling):
    logits = torch.randn(4, 30)
    kept = logits.clone()
    sampling_logits(logits, sampling, keep=torch.tensor([1, 2, 3, 4]))
    assert torch.equal(logits, kept)


@pytest.mark.parametrize(("new", "fits"), [(5, True), (6, False)])
def test_a_completion_that_fills_the_cache_exactly_fits(new, fits):
    """The last token is sampled and never cached."""
    blocks = BlockManager(4, block_tokens=4)  # 12 tokens
    if fits:
        assert Scheduler(blocks, [[1] * 8], 1, new, 1).next_plan() is not None
        return
    with pytest.raises(ValueError, match="needs 4 blocks"):
        Scheduler(blocks, [[1] * 8], 1, new, 1)


class SaysItIsOnAGPU(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize("extra", [0, 1])
def test_sequences_that_are_wider_on_a_gpu_have_the_same_hidden_states(extra, policy, monkeypatch):
    """The padding of `WIDTH_ON_GPU`, which no other test on a CPU runs."""
    rollout = rollout_of([([5, 9, 40], [7, 8, 3]), ([4], [6])])
    width = rollout.ids.shape[1] + extra
    monkeypatch.setattr(logprobs, "WIDTH_ON_GPU", width)
    widths, decoder = [], policy.model.get_decoder()
    decoder.register_forward_pre_hook(
        lambda module, args, inputs: widths.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    expected = logprobs.hidden_states(policy.model, rollout)
    found = logprobs.hidden_states(policy.model, replace(rollout, ids=rollout.ids.as_subclass(SaysItIsOnAGPU)))
    torch.testing.assert_close(found.as_subclass(torch.Tensor), expected)
    assert widths == [rollout.ids.shape[1], width]
