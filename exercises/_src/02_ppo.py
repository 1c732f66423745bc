# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# Five exercises for [lesson 02](../notebooks/02_ppo.ipynb). Together they are the arithmetic of PPO: advantages by
# token, the clipped loss, three estimates of a KL divergence, the KL in the reward, and the value loss. Write your code
# where it says `# YOUR CODE HERE`, then run the cell below it. Use `torch` alone: the functions must stand by
# themselves.
#
# In all of them `mask` is bool `[rows, length]`, True on the real tokens, which come first in a row. Behind them is
# padding, and what stands there may be anything, `nan` and `-inf` included. It must not matter.

# %%
import matplotlib.pyplot as plt
import torch

from rlcourse.course.checks import nb02 as check

torch.manual_seed(0)
print("ready")

# %% [markdown]
# ## q1 · Generalised advantage estimation
#
# ●●●○○ · 15 minutes
#
# From token rewards $r_t$ and values $V_t$ (of the state before token $t$) compute the advantages, from the end of each
# row backwards:
#
# $$\delta_t = r_t + \gamma V_{t+1} - V_t , \qquad A_t = \delta_t + \gamma\lambda\, A_{t+1} .$$
#
# The value and the advantage after the last real token are 0: the answer ends there.
#
# Shapes: `rewards`, `values`, `mask` `[rows, length]`; `gamma`, `lam` numbers. Return the advantages, `[rows, length]`,
# 0 where `mask` is False.
#
# <details><summary>Hint 1: direction</summary>
# All rows at once, one column at a time, from the last column to the first. Carry one number for each row.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Fill rewards and values with 0 in the padding first. Then $\delta$ is 0 there, the carried number stays 0 through the
# padding, and the value after the last real token is 0 by itself.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# After the filling, `carried` and `next_value` start as `torch.zeros(len(values))`. For `t` in
# `reversed(range(length))`: `delta = rewards[:, t] + gamma * next_value - values[:, t]`, then
# `carried = delta + gamma * lam * carried`, write it to column `t`, and `next_value = values[:, t]`.
# </details>


# %% tags=["exercise"]
def gae(rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float) -> torch.Tensor:
    """Generalised advantage estimates: [rows, length]. rewards, values, mask: [rows, length]."""
    # BEGIN SOLUTION
    rewards, values = rewards.masked_fill(~mask, 0.0), values.masked_fill(~mask, 0.0)
    advantages = torch.zeros_like(values)
    carried = next_value = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        carried = delta + gamma * lam * carried
        advantages[:, t], next_value = carried, values[:, t]
    return advantages
    # END SOLUTION


# %%
check.q1(gae)

# %% [markdown]
# Your function on one answer of 20 tokens that turns out right. The critic expects 0.3 at first, and after token 12,
# where the decisive step is made, 0.9. **Look for** which tokens get the credit at each $\lambda$.

# %%
if check.q1.passed:
    values = torch.where(torch.arange(20) <= 12, 0.3, 0.9)[None]
    rewards, mask = torch.zeros(1, 20), torch.ones(1, 20, dtype=torch.bool)
    rewards[0, -1] = 1.0
    fig, ax = plt.subplots(figsize=(7, 3.2))
    for lam, color, marker in (
        (0.0, "#D55E00", "s"),
        (0.8, "#E69F00", "^"),
        (0.95, "#0072B2", "o"),
        (1.0, "black", ""),
    ):
        advantages = gae(rewards, values, mask, 1.0, lam)[0]
        ax.plot(range(20), advantages, color=color, marker=marker, markersize=5, label=f"λ = {lam:g}")
    ax.set(xlabel="token", ylabel="advantage", title="Who gets the credit")
    ax.legend(frameon=False)
    plt.show()

# %% [markdown] tags=["solution"]
# **Why the credit lies where the value jumps.** With $\lambda = 0$ only the token that raised the expectation, and the
# last one that settled the rest, get any. With $\lambda = 1$ every token before the jump gets what was gained from it
# on, deserved or not. In between the credit fades backwards by $\gamma\lambda$ a token. **Why fill first.** `0 * nan`
# is `nan`: multiplying by the mask at the end comes too late.

# %% [markdown]
# ## q2 · The clipped loss
#
# ●●●○○ · 15 minutes
#
# With the ratio $\rho_t = \exp(\log\pi_t - \log\pi_{\text{old},t})$, return the mean over the real tokens of the batch
# of
#
# $$-\min\big(\rho_t A_t,\ \text{clip}(\rho_t,\, 1 - \varepsilon_{\text{low}},\, 1 + \varepsilon_{\text{high}})
#   A_t\big) .$$
#
# Shapes: `logprobs` (with gradient), `old_logprobs`, `advantages`, `mask` `[rows, length]`; `clip_low`, `clip_high` the
# two $\varepsilon$. Return a scalar. In the padding the log-probs may be `-inf`.
#
# <details><summary>Hint 1: direction</summary>
# Two candidates for each token, the smaller of the two, a minus, and a mean over the tokens that count.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# `-inf` less `-inf` is `nan`. So pick out the real tokens, or fill the padding, **before** the subtraction. With
# `x[mask]` only real tokens are left, and the mean is a plain mean.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `ratio = (logprobs[mask] - old_logprobs[mask]).exp()`, `a = advantages[mask]`, then minus the mean of
# `torch.minimum(ratio * a, ratio.clamp(1 - clip_low, 1 + clip_high) * a)`.
# </details>


# %% tags=["exercise"]
def clipped_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> torch.Tensor:
    """PPO's clipped loss, the mean over real tokens: a scalar. All tensors are [rows, length]."""
    # BEGIN SOLUTION
    ratio = (logprobs[mask] - old_logprobs[mask]).exp()
    a = advantages[mask]
    return -torch.minimum(ratio * a, ratio.clamp(1 - clip_low, 1 + clip_high) * a).mean()
    # END SOLUTION


# %%
check.q2(clipped_loss)

# %% [markdown]
# Your function for one token, over a range of ratios. **Look for** the flat pieces, where there is no gradient, and for
# the sides that are **not** flat.

# %%
if check.q2.passed:
    fig, ax = plt.subplots(figsize=(6.5, 3.2))
    ratios, one = torch.linspace(0.4, 1.8, 141), torch.ones(1, 1)
    for a, color, style in ((1.0, "#0072B2", "-"), (-1.0, "#D55E00", "--")):
        losses = [clipped_loss(r.log() * one, 0 * one, a * one, one.bool(), 0.2, 0.2).item() for r in ratios]
        ax.plot(ratios, losses, color=color, linestyle=style, linewidth=2, label=f"A = {a:+.0f}")
    ax.set(xlabel="ratio ρ", ylabel="your loss", title="The loss of one token")
    ax.legend(frameon=False)
    plt.show()

# %% [markdown] tags=["solution"]
# **Why the minimum.** For $A > 0$ and $\rho = 0.4$ the clipped candidate is flat as well. Alone it would leave the
# token there: good, made improbable by another token's update, and without a gradient that brings it back. The minimum
# takes the steep candidate. **Why one mean over all tokens.** It is PPO's usual choice. A mean over each row
# first is another loss, in which a token of a long answer counts less; lesson 04 is about that.

# %% [markdown]
# ## q3 · Three estimators of a KL divergence
#
# ●●○○○ · 10 minutes
#
# For tokens that were sampled from the policy, with $d = \log\pi - \log\pi_\text{ref}$, return
#
# $$k_1 = d, \qquad k_2 = \tfrac12 d^2, \qquad k_3 = e^{-d} - 1 + d .$$
#
# Shapes: `logprobs` (with gradient), `ref_logprobs` `[tokens]`. Return `[3, tokens]`: one row for each estimator.
#
# <details><summary>Hint 1: direction</summary>
# One subtraction, three short expressions, and `torch.stack`.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# $e^{-d} = \pi_\text{ref} / \pi$: the ratio in $k_3$ has the reference on top. Leave the sign of $k_1$ as it is.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `d = logprobs - ref_logprobs`, then `torch.stack([d, d**2 / 2, torch.expm1(-d) + d])`. `expm1(x)` is $e^x - 1$ without
# the rounding error for small $x$.
# </details>


# %% tags=["exercise"]
def kl_estimators(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """k1, k2 and k3 of each token: [3, tokens]. logprobs, ref_logprobs: [tokens]."""
    # BEGIN SOLUTION
    d = logprobs - ref_logprobs
    return torch.stack([d, d**2 / 2, torch.expm1(-d) + d])
    # END SOLUTION


# %%
check.q3(kl_estimators)

# %% [markdown]
# Two policies over 50 tokens, 2,000 estimates from 32 samples each. **Look for** the centre of each heap (bias) and its
# width (variance). The dotted line is the KL itself.

# %%
if check.q3.passed:
    torch.manual_seed(0)
    ref = torch.randn(50).log_softmax(0)
    pi = (ref + 0.5 * torch.randn(50)).log_softmax(0)
    samples = torch.multinomial(pi.exp(), 2000 * 32, replacement=True)
    means = kl_estimators(pi[samples], ref[samples]).view(3, 2000, 32).mean(2)
    fig, ax = plt.subplots(figsize=(7, 3.2))
    styles = (("k1", "#D55E00", "-."), ("k2", "#E69F00", "--"), ("k3", "#0072B2", "-"))
    for (name, color, style), values in zip(styles, means, strict=True):
        how = {"bins": 45, "range": (-0.15, 0.3), "histtype": "step", "linewidth": 2}
        ax.hist(values.tolist(), color=color, linestyle=style, label=name, **how)
    ax.axvline((pi.exp() * (pi - ref)).sum().item(), color="black", linestyle=":", label="the KL")
    ax.set(xlabel="mean of 32 samples", ylabel="of 2,000", title="Three estimates of one number")
    ax.legend(frameon=False)
    plt.show()

# %% [markdown] tags=["solution"]
# **Why $k_3$ is unbiased.** $\mathbb{E}_\pi[e^{-d}] = \sum \pi\, \pi_\text{ref} / \pi = 1$, so what it adds to $k_1$
# has mean 0. And because $e^{-d} \ge 1 - d$ it is never negative. **Beware of its gradient.** As a loss it is
# $1 - e^{-d}$ times the score, whose mean is the gradient of the KL in the **other** direction. The value and the
# gradient of an estimator are two things.

# %% [markdown]
# ## q4 · The KL in the reward
#
# ●●○○○ · 10 minutes
#
# PPO for language models usually pays the reward $R$ of an answer on its last real token, and takes a penalty for
# leaving the reference off **each** real token:
#
# $$r_t = [t = T]\, R - \beta\, (\log\pi_t - \log\pi_{\text{ref},t}) .$$
#
# Shapes: `sequence_rewards` `[rows]`; `logprobs`, `ref_logprobs`, `mask` `[rows, length]`; `beta` a number. Return
# `[rows, length]`, 0 in the padding, where the log-probs may be `-inf`. A row without real tokens gets 0.
#
# <details><summary>Hint 1: direction</summary>
# Two tensors `[rows, length]` that are added: the penalties, and the rewards at their places.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# A real token is the last one if no real token follows. The mask shifted to the left by one says whether one does;
# behind the last column nothing does.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `follows = torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)`, `last = mask & ~follows`. The penalty is
# `beta * (logprobs - ref_logprobs).masked_fill(~mask, 0.0)`, the reward `last * sequence_rewards[:, None]`.
# </details>


# %% tags=["exercise"]
def rewards_with_kl(
    sequence_rewards: torch.Tensor, logprobs: torch.Tensor, ref_logprobs: torch.Tensor, mask: torch.Tensor, beta: float
) -> torch.Tensor:
    """Rewards by token with a KL penalty: [rows, length]. sequence_rewards: [rows], the rest [rows, length]."""
    # BEGIN SOLUTION
    follows = torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)
    last = mask & ~follows
    penalty = (logprobs - ref_logprobs).masked_fill(~mask, 0.0)
    return last * sequence_rewards[:, None] - beta * penalty
    # END SOLUTION


# %%
check.q4(rewards_with_kl)

# %% [markdown] tags=["solution"]
# **Why `masked_fill` after the subtraction is enough here.** There is no gradient: rewards are constants, and
# `masked_fill` throws the `nan` away. In a loss (q2) the gradient of the `nan` would come back as `0 * nan`. **Why a
# token may earn from the penalty.** $k_1$ is negative where the policy finds its token less probable than the reference
# does. Only the mean is a KL divergence. Cutting it off at 0 makes it something else, and pays for nothing.

# %% [markdown]
# ## q5 · The clipped value loss
#
# ●●○○○ · 10 minutes
#
# The critic is trained towards the returns $\hat R_t$, and its step is limited as well. With the value $V$, the value
# at rollout time $V_\text{old}$, and $V_\text{near}$, which is $V$ kept within $c$ of $V_\text{old}$, return the mean
# over all real tokens of
#
# $$\tfrac12 \max\big((V - \hat R)^2,\ (V_\text{near} - \hat R)^2\big) .$$
#
# Shapes: `values` (with gradient), `old_values`, `returns`, `mask` `[rows, length]`; `clip` is $c$. Return a scalar.
#
# <details><summary>Hint 1: direction</summary>
# Two squared errors for each token, the larger one, a half, a mean over real tokens.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Clip the **difference** from the old value, and add it to the old value again.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `near = old_values + (values - old_values).clamp(-clip, clip)`, then `torch.maximum` of the two squared errors, of
# which `[mask]` are real, the mean, and a half.
# </details>


# %% tags=["exercise"]
def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, clip: float
) -> torch.Tensor:
    """PPO's clipped value loss, the mean over real tokens: a scalar. All tensors are [rows, length]."""
    # BEGIN SOLUTION
    near = old_values + (values - old_values).clamp(-clip, clip)
    errors = torch.maximum((values - returns) ** 2, (near - returns) ** 2)
    return 0.5 * errors[mask].mean()
    # END SOLUTION


# %%
check.q5(value_loss)

# %% [markdown]
# Your loss for one token whose old value is 0 and whose return is 1. **Look for** the range of values from which a
# gradient pulls towards the return.

# %%
if check.q5.passed:
    fig, ax = plt.subplots(figsize=(6.5, 3.2))
    grid, one = torch.linspace(-0.6, 1.8, 121), torch.ones(1, 1)
    for clip, color, style in ((0.2, "#0072B2", "-"), (10.0, "#D55E00", "--")):
        losses = [value_loss(v * one, 0 * one, one, one.bool(), clip).item() for v in grid]
        ax.plot(grid, losses, color=color, linestyle=style, linewidth=2, label=f"clip {clip:g}")
    ax.axvline(1, color="black", linestyle=":", label="the return")
    ax.set(xlabel="value V", ylabel="your loss", title="The value loss of one token, old value 0")
    ax.legend(frameon=False)
    plt.show()

# %% [markdown] tags=["solution"]
# **Why the maximum.** The loss is pessimistic, as in q2: a value that moved by more than $c$ towards its return counts
# no better than one that moved by $c$, so there is nothing to gain from going on. A value that moved **away** keeps its
# full gradient and is called back. Whether this helps is disputed: in the large study of Andrychowicz et al. (2020,
# arXiv:2006.05990), on control tasks, it hurt at every threshold.
