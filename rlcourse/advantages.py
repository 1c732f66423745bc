"""From rewards to advantages: how much better than expected each completion, or each token, was.

Rewards are [rows], group-major: row i answers prompt i // num_generations. Functions of groups raise ValueError for
rows that don't divide into groups. `gae` and `whiten` are PPO's, by token: [rows, length], mask bool.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def completion_advantages(rewards: Tensor, kind: str, num_generations: int) -> Tensor:
    """One advantage per completion, [rows], by the setting `advantage`; ValueError for 'gae', which is per token."""
    match kind:
        case "reward":
            return rewards
        case "batch_centered":
            return batch_centered(rewards)
        case "leave_one_out":
            return leave_one_out(rewards, num_generations)
        case "group_centered":
            return group_centered(rewards, num_generations)
        case "group_normalized":
            return group_normalized(rewards, num_generations)
    raise ValueError(f"Advantage {kind!r} is not one per completion.")


def batch_centered(rewards: Tensor) -> Tensor:
    """Rewards minus their mean over the batch, [rows]: REINFORCE with the simplest baseline (Williams 1992)."""
    return rewards - rewards.mean()


def leave_one_out(rewards: Tensor, num_generations: int) -> Tensor:
    """RLOO: each reward minus the mean of the others in its group (Ahmadian et al. 2024, arXiv:2402.14740), [rows]. The
    baseline doesn't contain the reward it is taken from, so the gradient is unbiased. It's `group_centered` times n /
    (n - 1)."""
    return group_centered(rewards, num_generations) * num_generations / (num_generations - 1)


def group_centered(rewards: Tensor, num_generations: int) -> Tensor:
    """Dr. GRPO: each reward minus the mean of its group (Liu et al. 2025, arXiv:2503.20783), [rows]; exactly 0 in a
    group of identical rewards. Raises ValueError for a group of one row."""
    if num_generations < 2:
        raise ValueError(f"A group of {num_generations} has nothing to compare: use num_generations of 2 or more.")
    groups = _groups(rewards, num_generations)
    shifted = groups - groups[:, :1]  # identical rewards are now 0, and stay so: the mean of equal floats may round
    return (shifted - shifted.mean(1, keepdim=True)).flatten()


def group_normalized(rewards: Tensor, num_generations: int, eps: float = 1e-4) -> Tensor:
    """GRPO: `group_centered` divided by the group's standard deviation (Shao et al. 2024, arXiv:2402.03300). The
    deviation has n - 1 in the denominator and `eps` is added to it, both as in TRL."""
    centered = group_centered(rewards, num_generations).view(-1, num_generations)
    return (centered / (centered.std(1, keepdim=True) + eps)).flatten()


def has_signal(rewards: Tensor, num_generations: int) -> Tensor:
    """Which groups can teach something, bool [prompts]: True where rewards differ; elsewhere every group-based
    advantage is 0."""
    groups = _groups(rewards, num_generations)
    return (groups != groups[:, :1]).any(1)


def token_rewards(sequence_rewards: Tensor, mask: Tensor) -> Tensor:
    """Rewards by token, [rows, length]: the whole reward [rows] of a completion on its last real token, 0 elsewhere."""
    last = mask & ~F.pad(mask[:, 1:], (0, 1), value=False)
    return torch.where(last, sequence_rewards[:, None], 0.0)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates (Schulman et al. 2015, arXiv:1506.02438), and the returns the value head learns.

    rewards, values: of each token and of the state before it. From the end backwards, delta_t = r_t + gamma V_{t+1} -
    V_t and A_t = delta_t + gamma lambda A_{t+1} (equation 16); the value after the last real token is 0. Returns
    (advantages, advantages + values), 0 where masked and without gradient.
    """
    rewards = rewards.detach().masked_fill(~mask, 0.0)
    values = values.detach().masked_fill(~mask, 0.0)
    next_values = F.pad(values[:, 1:], (0, 1))
    deltas = rewards + gamma * next_values - values
    advantages = torch.zeros_like(deltas)
    running = deltas.new_zeros(deltas.shape[0])
    for t in reversed(range(deltas.shape[1])):
        running = deltas[:, t] + gamma * gae_lambda * running  # stays 0 through the padding
        advantages[:, t] = running
    return advantages, advantages + values


def whiten(advantages: Tensor, mask: Tensor) -> Tensor:
    """Advantages with mean 0 and variance 1 over the tokens of the mask, 0 elsewhere and for tokens that are all
    alike."""
    count = mask.sum().clamp(min=1)
    centered = advantages.masked_fill(~mask, 0.0)
    centered = (centered - centered.sum() / count).masked_fill(~mask, 0.0)
    variance = centered.square().sum() / count
    return centered * (variance + 1e-8).rsqrt()


def _groups(rewards: Tensor, num_generations: int) -> Tensor:
    """rewards [rows] as [prompts, num_generations]; a row of the result is a group."""
    if num_generations < 1 or rewards.shape[0] % num_generations:
        raise ValueError(
            f"{rewards.shape[0]} rewards do not divide into groups of {num_generations}: "
            "pass every completion of each prompt, group after group."
        )
    return rewards.reshape(-1, num_generations)
