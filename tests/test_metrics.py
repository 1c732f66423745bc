"""What a step measures, against means in plain Python."""

import math

import pytest
import torch
from policies import DEVICE, rollout_of
from test_collect import answer

from rlcourse.collect import Completions
from rlcourse.config import make_config
from rlcourse.metrics import Means, rollout_metrics


def test_a_mean_over_parts_is_that_of_all_their_tokens():
    means, mask = Means(), torch.tensor([[True, True], [True, False]])
    means.add("a", torch.tensor([[1.0, 2.0], [6.0, math.nan]]), mask)
    means.add("a", torch.tensor([[11.0]]), torch.tensor([[True]]))
    means.add("b", torch.tensor([[-3.0]]), torch.tensor([[True]]))
    means.add("c", torch.tensor([[5.0]]), torch.tensor([[False]]))
    means.add("d", torch.tensor([[True, False]]), torch.tensor([[True, True]]))
    assert (means.mean("a"), means.max("a")) == (5.0, 11.0)
    assert (means.mean("b"), means.max("b")) == (-3.0, 0.0)
    assert means.mean("c") is None and means.max("c") is None and means.mean("e") is None
    assert means.mean("d") == 0.5


def sampled(answers, rewards, logprobs) -> Completions:
    rollout = rollout_of([([5], [3] * len(x)) for x in logprobs], logprobs, [a.finished for a in answers])
    return Completions(rollout, answers, torch.tensor(rewards, device=DEVICE))


def test_metrics_are_means_over_all_that_was_sampled():
    texts = ["#### 7", "is 7", "#### 8", "#### 7", "#### 7", "is it 7"]
    answers = [answer(text, tokens, tokens < 10) for text, tokens in zip(texts, [3, 5, 4, 10, 1, 7], strict=True)]
    logprobs = [[-1.0, -2.0, -4.0], [-8.0], [-0.5], [-0.25, -16.0], [0.0], [-32.0]]
    rewards = [1.0, 0.0, 0.5, 0.5, 0.25, 0.25]
    std = (sum(r * r for r in rewards) / 6 - (2.5 / 6) ** 2) ** 0.5
    expected = {"reward": 2.5 / 6, "reward_std": std, "groups_without_signal": 2 / 3, "entropy": 63.75 / 9}
    expected |= {"accuracy": 2 / 6, "accuracy_lenient": 4 / 6, "formatted": 3 / 6, "truncated": 1 / 6}
    expected |= {"length": 30 / 6, "length_right": (3 + 1) / 2, "length_wrong": (5 + 4 + 10 + 7) / 4}
    metrics = rollout_metrics(sampled(answers, rewards, logprobs), make_config(num_generations=2))
    assert metrics == pytest.approx(expected)


@pytest.mark.parametrize(("text", "missing"), [("#### 7", "length_wrong"), ("#### 8", "length_right")])
def test_the_length_of_nothing_is_none(text, missing):
    answers = [answer(text, 3), answer(text, 4)]
    metrics = rollout_metrics(sampled(answers, [1.0, 1.0], [[-1.0], [-2.0]]), make_config(num_generations=2))
    assert metrics[missing] is None and metrics["length"] == 3.5
    assert sum(value is None for value in metrics.values()) == 1
