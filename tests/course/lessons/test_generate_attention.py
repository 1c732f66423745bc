"""Our kernel inside `generate`: same tokens and log-probs, no break as an operation, and never without a mask."""

import pytest
import torch
from policies import DEVICE
from transformers import AttentionInterface

from rlcourse.course.lessons import generate_attention as attention
from rlcourse.rollout.hf import HFEngine
from rlcourse.sampling import GREEDY

PROMPTS = [[5, 9, 40, 7], [11], [30, 31, 32, 33, 34, 35, 36]]
WAYS = [attention.BREAKS, attention.OPERATION]
on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU the kernel takes 16-bit heads of 64 or 128 alone")


@on_cpu
@pytest.mark.parametrize("way", WAYS)
def test_greedy_tokens_and_logprobs_are_those_of_sdpa_with_left_padding(policy, way):
    expected = HFEngine(policy, torch.float32, "static").generate(PROMPTS, 2, 9, GREEDY)
    found = HFEngine(policy, torch.float32, "static", attention=way).generate(PROMPTS, 2, 9, GREEDY)
    assert torch.equal(found.ids, expected.ids)
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-5, rtol=0)
    assert policy.model.config._attn_implementation == "sdpa"  # training goes on as before


@on_cpu
def test_attention_that_would_be_wrong_is_refused(policy):
    """Without its mask function transformers would attend to slots that hold nothing: wrong, without an error."""
    AttentionInterface.register("no-mask", attention.forward(attention.operation))
    engine = HFEngine(policy, torch.float32, "static", attention="no-mask")
    with pytest.raises(ValueError, match="register its name in AttentionMaskInterface"):
        engine.generate(PROMPTS, 1, 3, GREEDY)
    with pytest.raises(ValueError, match="reads a static cache: use cache='static', not 'dynamic'"):
        HFEngine(policy, torch.float32, "dynamic", attention=attention.OPERATION)
