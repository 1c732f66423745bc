"""Every advantage against a float64 loop over its definition."""

import math

import pytest
import torch

from rlcourse import advantages as adv

REWARDS = [1.0, 0.0, 0.0, 0.5, 0.3, 0.3, 0.3, 0.3, 0.0, 1.0, 1.0, 1.0]
N = 4
GROUPS = [REWARDS[i : i + N] for i in range(0, len(REWARDS), N)]


def close(actual, expected):
    torch.testing.assert_close(actual.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-6)


def test_batch_centered_takes_the_mean_of_all_rewards_off():
    mean = sum(REWARDS) / len(REWARDS)
    close(adv.batch_centered(torch.tensor(REWARDS)), [r - mean for r in REWARDS])


def test_leave_one_out_takes_the_mean_of_the_other_rewards_off():
    expected = [group[i] - sum(group[:i] + group[i + 1 :]) / (N - 1) for group in GROUPS for i in range(N)]
    close(adv.leave_one_out(torch.tensor(REWARDS), N), expected)


def test_group_centered_takes_the_mean_of_the_group_off():
    close(adv.group_centered(torch.tensor(REWARDS), N), [r - sum(group) / N for group in GROUPS for r in group])


def test_group_normalized_divides_by_the_sample_deviation_of_the_group():
    expected = []
    for group in GROUPS:
        mean = sum(group) / N
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / (N - 1))
        expected += [(r - mean) / (std + 1e-4) for r in group]
    close(adv.group_normalized(torch.tensor(REWARDS), N), expected)


def test_a_group_is_the_rows_of_one_prompt():
    """Prompt 0 is always solved, prompt 1 never: nobody did better than his group."""
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0])
    assert adv.group_centered(rewards, 2).tolist() == [0, 0, 0, 0]
    assert adv.has_signal(rewards, 2).tolist() == [False, False]
    assert adv.has_signal(torch.tensor([1.0, 0.0, 1.0, 0.0]), 2).tolist() == [True, True]


@pytest.mark.parametrize("function", [adv.leave_one_out, adv.group_centered, adv.group_normalized])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -7.3, 1e6 + 0.1])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_identical_rewards_give_exactly_zero(function, reward, size):
    assert function(torch.full((2 * size,), reward), size).tolist() == [0.0] * (2 * size)


def test_a_better_completion_gets_a_positive_advantage():
    rewards = torch.tensor([0.0, 0.0, 1.0, 0.0])
    for function in (adv.leave_one_out, adv.group_centered, adv.group_normalized):
        assert function(rewards, 4).sign().tolist() == [-1, -1, 1, -1]
    assert adv.batch_centered(rewards).sign().tolist() == [-1, -1, 1, -1]


def test_has_signal_names_the_groups_whose_rewards_differ():
    assert adv.has_signal(torch.tensor(REWARDS), N).tolist() == [True, False, True]
    assert adv.has_signal(torch.tensor([1.0, 0.0]), 1).tolist() == [False, False]


@pytest.mark.parametrize(
    "function", [adv.leave_one_out, adv.group_centered, adv.group_normalized, adv.has_signal], ids=lambda f: f.__name__
)
def test_rows_that_do_not_divide_into_groups_are_refused(function):
    with pytest.raises(ValueError, match="5 rewards do not divide into groups of 2"):
        function(torch.zeros(5), 2)


@pytest.mark.parametrize("function", [adv.leave_one_out, adv.group_centered, adv.group_normalized])
def test_a_group_of_one_is_refused(function):
    with pytest.raises(ValueError, match="nothing to compare"):
        function(torch.zeros(5), 1)


def right_padded(lengths, length):
    return torch.arange(length) < torch.tensor(lengths)[:, None]


LENGTHS = [5, 1, 0, 3]  # full, one token, empty, padded


def test_token_rewards_stand_on_the_last_real_token():
    expected = torch.zeros(4, 5)
    expected[0, 4], expected[1, 0], expected[3, 2] = 1.0, 2.0, 4.0
    assert adv.token_rewards(torch.tensor([1.0, 2.0, 3.0, 4.0]), right_padded(LENGTHS, 5)).equal(expected)


@pytest.mark.parametrize("gamma, gae_lambda", [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.99, 0.0)])
def test_gae_is_the_discounted_sum_of_temporal_differences(gamma, gae_lambda):
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(4, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = right_padded(LENGTHS, 5)
    expected = torch.zeros(4, 5, dtype=torch.float64)
    for row, n in enumerate(LENGTHS):
        v = [*values[row, :n].tolist(), 0.0]
        delta = [rewards[row, t].item() + gamma * v[t + 1] - v[t] for t in range(n)]
        for t in range(n):
            expected[row, t] = sum((gamma * gae_lambda) ** (u - t) * delta[u] for u in range(t, n))
    nan = float("nan")
    advantages, returns = adv.gae(
        rewards.masked_fill(~mask, nan), values.masked_fill(~mask, nan), mask, gamma, gae_lambda
    )
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, (expected + values) * mask)


def test_gae_with_lambda_one_compares_the_return_with_the_value():
    """With gamma = lambda = 1 the returns are the rewards still to come, whatever the values."""
    mask = right_padded(LENGTHS, 5)
    rewards = adv.token_rewards(torch.tensor([1.0, 2.0, 3.0, 4.0]), mask)
    values = torch.randn(4, 5, generator=torch.Generator().manual_seed(1), requires_grad=True)
    advantages, returns = adv.gae(rewards, values, mask, 1.0, 1.0)
    torch.testing.assert_close(returns, torch.tensor([[1.0], [2.0], [0.0], [4.0]]) * mask)
    torch.testing.assert_close(advantages, returns - values.detach() * mask)
    assert not advantages.requires_grad and not returns.requires_grad


def test_whiten_gives_mean_zero_and_variance_one_over_real_tokens():
    mask = right_padded(LENGTHS, 5)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 3 + 7
    real = x[mask].tolist()
    mean = sum(real) / len(real)
    std = math.sqrt(sum((v - mean) ** 2 for v in real) / len(real))
    white = adv.whiten(x.masked_fill(~mask, float("nan")), mask)
    close(white[mask], [(v - mean) / std for v in real])
    assert white[~mask].eq(0).all()


def test_whiten_of_one_token_or_none_is_zero():
    x = torch.full((2, 3), 5.0)
    for lengths in ([1, 0], [0, 0], [3, 3]):
        assert adv.whiten(x, right_padded(lengths, 3)).eq(0).all()
