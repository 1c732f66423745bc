"""Answers of weights that are so many updates old."""

import itertools

import pytest
import torch

from rlcourse.course.lessons import lesson15
from rlcourse.policy import load_policy
from rlcourse.rollout import make_engine
from rlcourse.sampling import Sampling


@pytest.mark.parametrize("lag", [0, 2])
def test_the_sampler_has_the_weights_of_so_many_updates_ago(lag):
    policy = load_policy("embedded")
    engine, sampled = lesson15.LaggingEngine(policy, lag), []
    versions = []
    prompts = [policy.prompt("Emma has 3 apples. She buys 4 more. How many apples does Emma have?")]
    for update in range(5):
        with torch.no_grad():
            for p in policy.model.parameters():
                p.mul_(1.0 if update == 0 else 0.97)
        torch.manual_seed(0)
        versions.append(make_engine(policy, "fast", torch.float32).generate(prompts, 2, 6, Sampling()))
        torch.manual_seed(0)
        sampled.append(engine.generate(prompts, 2, 6, Sampling()))
    for update, found in enumerate(sampled):
        expected = versions[max(0, update - lag)]
        assert torch.equal(found.ids, expected.ids) and torch.equal(found.logprobs, expected.logprobs)
    different = [not torch.equal(a.logprobs, b.logprobs) for a, b in itertools.pairwise(versions)]
    assert all(different)
