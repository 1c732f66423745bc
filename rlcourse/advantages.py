"""From rewards to advantages: how much better than expected each completion, or each token, was.

Rewards come as [rows], group-major: row i answers prompt i // num_generations. `gae` and `whiten` are PPO's and work on
tokens, [rows, length], with completions padded on the right; the rest give one number to a whole completion.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def completion_advantages(rewards: Tensor, kind: str, num_generations: int) -> Tensor:
    """One advantage per completion from one reward per completion: [rows] → [rows].

    kind: the setting `advantage`; ValueError for 'gae', which is per token.
    """
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
    """RLOO: each reward minus the mean of the others in its group (Ahmadian et al. 2024, arXiv:2402.14740).

    rewards: [rows] float, group-major. Returns [rows]. The baseline does not contain the reward it is taken from, so
    the gradient is unbiased. It equals `group_centered` times n / (n - 1), which is how it is computed. Raises
    ValueError when the rows do not divide into groups of `num_generations`, or a group is one row.
    """
    return group_centered(rewards, num_generations) * num_generations / (num_generations - 1)


def group_centered(rewards: Tensor, num_generations: int) -> Tensor:
    """Dr. GRPO: each reward minus the mean of its group (Liu et al. 2025, arXiv:2503.20783).

    rewards: [rows] float, group-major. Returns [rows], exactly 0 in a group of identical rewards. Raises ValueError
    when the rows do not divide into groups of `num_generations`, or a group is one row.
    """
    if num_generations < 2:
        raise ValueError(f"A group of {num_generations} has nothing to compare: use num_generations of 2 or more.")
    groups = _groups(rewards, num_generations)
    shifted = groups - groups[:, :1]  # identical rewards are now 0, and stay so: the mean of equal floats may round
    return (shifted - shifted.mean(1, keepdim=True)).flatten()


def group_normalized(rewards: Tensor, num_generations: int, eps: float = 1e-4) -> Tensor:
    """GRPO: `group_centered` divided by the standard deviation of the group (Shao et al. 2024, arXiv:2402.03300).

    rewards: [rows] float, group-major. Returns [rows], exactly 0 in a group of identical rewards. The deviation is that
    of a sample (n - 1 in the denominator) and `eps` is added to it, both as in TRL. Raises ValueError as
    `group_centered` does.
    """
    centered = group_centered(rewards, num_generations).view(-1, num_generations)
    return (centered / (centered.std(1, keepdim=True) + eps)).flatten()


def has_signal(rewards: Tensor, num_generations: int) -> Tensor:
    """Which groups can teach something: True where the rewards of a group differ.

    rewards: [rows], group-major. Returns bool [prompts]. Where it is False every group-based advantage is 0. Raises
    ValueError when the rows do not divide into groups of `num_generations`.
    """
    groups = _groups(rewards, num_generations)
    return (groups != groups[:, :1]).any(1)


def token_rewards(sequence_rewards: Tensor, mask: Tensor) -> Tensor:
    """Rewards by token: the whole reward of a completion on its last real token, 0 elsewhere.

    sequence_rewards: [rows]; mask: bool [rows, length], True on real tokens. Returns [rows, length]. A row without a
    real token gets no reward.
    """
    last = mask & ~F.pad(mask[:, 1:], (0, 1), value=False)
    return torch.where(last, sequence_rewards[:, None], 0.0)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates (Schulman et al. 2015, arXiv:1506.02438), and the returns the value head learns.

    rewards, values: [rows, length], of each token and of the state before it; mask: bool [rows, length]. From the end
    backwards, delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lambda A_{t+1} (equation 16); the value
    after the last real token is 0, because the completion ends there. Returns (advantages, returns), both
    [rows, length], returns = advantages + values, 0 where masked and without gradient.
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
    """Advantages shifted and scaled to mean 0 and variance 1 over the real tokens, as PPO does before its update.

    advantages: [rows, length]; mask: bool [rows, length]. Returns [rows, length], 0 where masked. A single token, or
    tokens that are all alike, give 0.
    """
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
