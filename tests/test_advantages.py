"""Advantages: exact zeros, masks and edges. test_step.py has the formula of each algorithm."""

import pytest
import torch

from rlcourse import advantages as adv

REWARDS = [1.0, 0.0, 0.0, 0.5, 0.3, 0.3, 0.3, 0.3, 0.0, 1.0, 1.0, 1.0]
N = 4


@pytest.mark.parametrize("function", [adv.leave_one_out, adv.group_centered, adv.group_normalized])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -7.3, 1e6 + 0.1])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_identical_rewards_give_exactly_zero(function, reward, size):
    assert function(torch.full((2 * size,), reward), size).tolist() == [0.0] * (2 * size)


def test_has_signal_names_the_groups_whose_rewards_differ():
    assert adv.has_signal(torch.tensor(REWARDS), N).tolist() == [True, False, True]
    assert adv.has_signal(torch.tensor([1.0, 0.0]), 1).tolist() == [False, False]
    assert adv.has_signal(torch.tensor([0.5, 0.0, 1.0, 0.5]), 4).tolist() == [True]  # though the first is the mean


@pytest.mark.parametrize("function", [adv.leave_one_out, adv.group_centered, adv.group_normalized])
def test_groups_of_one_and_rows_that_do_not_divide_into_groups_are_refused(function):
    with pytest.raises(ValueError, match="nothing to compare"):
        function(torch.zeros(5), 1)
    with pytest.raises(ValueError, match="5 rewards do not divide into groups of 2"):
        function(torch.zeros(5), 2)


def right_padded(lengths, length):
    return torch.arange(length) < torch.tensor(lengths)[:, None]


LENGTHS = [5, 1, 0, 3]  # full, one token, empty, padded


def test_what_stands_in_the_padding_does_not_matter():
    mask, generator = right_padded(LENGTHS, 5), torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(4, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    found = []
    for fill in (0.0, float("nan")):
        advantages, returns = adv.gae(rewards.masked_fill(~mask, fill), values.masked_fill(~mask, fill), mask, 0.9, 0.8)
        found.append(torch.stack([advantages, returns, adv.whiten(values.masked_fill(~mask, fill), mask)]))
    assert torch.equal(*found) and found[0][:, ~mask].eq(0).all() and found[0][:, mask].ne(0).all()


def test_whiten_of_one_token_or_none_is_zero():
    x = torch.full((2, 3), 5.0)
    for lengths in ([1, 0], [0, 0], [3, 3]):
        assert adv.whiten(x, right_padded(lengths, 3)).eq(0).all()
