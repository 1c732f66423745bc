"""Training on demonstrations: only the answer is learned, and eager programs are copied."""

import random

import pytest
import torch

from rlcourse.course.lessons import warm_start
from rlcourse.course.lessons.warm_start import draw_programs, imitate, kernel_policy, train_on
from tools.embedded.computations import computations

PROBLEMS = computations(40, "train", 11, (2, 6), 0.3)


@pytest.fixture
def policy():
    return kernel_policy(hidden_size=32, num_hidden_layers=1)


@pytest.mark.parametrize("micro_batch_rows", [3, 32])
def test_the_loss_is_the_mean_over_the_tokens_of_all_answers(policy, micro_batch_rows, monkeypatch):
    monkeypatch.setattr(warm_start, "MICRO_BATCH_ROWS", micro_batch_rows)
    pairs = draw_programs(policy, PROBLEMS, 8, random.Random(0))
    losses = []
    for prompt, answer in pairs:  # one row at a time, no padding
        distribution = policy.model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        losses += [-distribution[len(prompt) - 1 + i, token] for i, token in enumerate(answer)]
    expected = torch.stack(losses).mean()
    expected.backward()
    gradients = [p.grad.clone() for p in policy.model.parameters()]
    policy.model.zero_grad()
    assert train_on(policy, pairs) == pytest.approx(expected.item(), abs=1e-5)
    for parameter, gradient in zip(policy.model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=1e-4)


def test_imitation_lowers_the_loss(policy):
    pairs = draw_programs(policy, PROBLEMS, 32, random.Random(9))
    before = train_on(policy, pairs)
    imitate(policy, PROBLEMS, 40, 3e-3, 8, random.Random(0))
    assert train_on(policy, pairs) < before - 0.5
