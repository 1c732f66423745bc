# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# Four exercises for [lesson 01](../notebooks/01_policy_gradient.ipynb). Together they are REINFORCE: the log-prob of an
# answer, the loss, what a baseline does, and the baseline that costs nothing. Write your code where it says
# `# YOUR CODE HERE`, then run the cell below it. Use `torch` alone: the functions must stand by themselves.

# %%
import matplotlib.pyplot as plt
import torch

from rlcourse.course.checks import nb01 as check

torch.manual_seed(0)
print("ready")

# %% [markdown]
# ## q1 · The log-prob of an answer
#
# ●●○○○ · 10 minutes
#
# A model gave `logits[i, t]` for the token at place `t` of answer `i` (already shifted: they predict `ids[i, t]`).
# Return
#
# $$\log \pi(y_i) = \sum_{t \le T_i} \log \pi(y_{i,t}) ,$$
#
# where $T_i$ is the place of the **first** end token `eos_id` in row `i`, or the last column if there is none. The end
# token counts. What stands behind it does not.
#
# Shapes: `logits` `[rows, length, vocabulary]`, `ids` `[rows, length]`, result `[rows]`.
#
# <details><summary>Hint 1: direction</summary>
# Three steps: log-probs of all tokens of the vocabulary, then those of the tokens that are there, then a masked sum.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# `logits.log_softmax(-1)` and then `gather` along the last dimension. For the mask, count the end tokens that lie
# strictly before each place: `cumsum` counts those up to and including it. A place counts if none lies before it.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `is_eos = ids == eos_id`, `mask = is_eos.cumsum(1) - is_eos.long() == 0`,
# `token = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]`, and the sum of `token` over the places where
# `mask` is true.
# </details>


# %% tags=["exercise"]
def sequence_logprobs(logits: torch.Tensor, ids: torch.Tensor, eos_id: int) -> torch.Tensor:
    """Log-prob of each answer up to and including its first eos_id: [rows].

    logits: [rows, length, vocabulary]; ids: [rows, length] int64.
    """
    # BEGIN SOLUTION
    is_eos = ids == eos_id
    mask = is_eos.cumsum(1) - is_eos.long() == 0
    token_logprobs = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    return token_logprobs.masked_fill(~mask, 0.0).sum(1)
    # END SOLUTION


# %%
check.q1(sequence_logprobs)

# %% [markdown] tags=["solution"]
# **Why not `ids != eos_id` as the mask.** It drops the end token, so the policy would never be taught when to stop, and
# it lets everything behind the end count. **Why `log_softmax` and not `softmax` and `log`.** A probability below about
# $10^{-45}$ is 0 in float32, and its log is minus infinity.

# %% [markdown]
# ## q2 · The loss of REINFORCE
#
# ●●○○○ · 10 minutes
#
# Write the number whose gradient is **minus** the estimate of $\nabla J$ from a batch:
#
# $$\mathcal{L} = -\frac{1}{N} \sum_{i=1}^{N} (R_i - b) \sum_t m_{i,t} \log \pi(y_{i,t}) .$$
#
# Shapes: `logprobs` `[rows, length]` with gradient, `mask` bool of the same shape, `rewards` `[rows]`, `baseline` a
# number. Return a scalar. Be careful: behind the end of an answer, where `mask` is false, `logprobs` may hold anything,
# `-inf` included.
#
# <details><summary>Hint 1: direction</summary>
# First one number for each row, the sum over its real tokens. Then weigh the rows and take the mean over rows.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# `0 * -inf` is `nan`, so multiplying with the mask is not enough. `masked_fill` puts a 0 where the mask is false, and
# no gradient flows there.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `of_rows = logprobs.masked_fill(~mask, 0.0).sum(1)`, then minus the mean of `(rewards - baseline) * of_rows`.
# </details>


# %% tags=["exercise"]
def reinforce_loss(logprobs: torch.Tensor, mask: torch.Tensor, rewards: torch.Tensor, baseline: float) -> torch.Tensor:
    """The REINFORCE loss, a scalar. logprobs, mask: [rows, length]; rewards: [rows]."""
    # BEGIN SOLUTION
    of_rows = logprobs.masked_fill(~mask, 0.0).sum(1)
    return -((rewards - baseline) * of_rows).mean()
    # END SOLUTION


# %%
check.q2(reinforce_loss)

# %% [markdown]
# With your loss, gradient descent on a policy with one token and four choices, of which the third is right. Eight
# samples a step, ten runs. **Look for** the probability of the right choice.

# %%
if check.q2.passed:
    fig, ax = plt.subplots(figsize=(6, 3.2))
    for _ in range(10):
        logits = torch.zeros(4, requires_grad=True)
        curve = []
        for _step in range(60):
            pi = logits.softmax(0)
            curve.append(pi[2].item())
            samples = torch.multinomial(pi.detach(), 8, replacement=True)
            rewards = (samples == 2).float()
            logprobs = logits.log_softmax(0)[samples][:, None]
            loss = reinforce_loss(logprobs, torch.ones(8, 1, dtype=torch.bool), rewards, rewards.mean().item())
            [gradient] = torch.autograd.grad(loss, logits)
            logits = (logits - 0.5 * gradient).detach().requires_grad_()
        ax.plot(curve, color="#0072B2", alpha=0.5)
    ax.set(xlabel="step", ylabel="probability of the right choice", ylim=(0, 1), title="Ten runs of your loss")
    plt.show()

# %% [markdown] tags=["solution"]
# **Why the sum over tokens and not the mean.** The log-prob of an answer **is** the sum. A mean divides each answer's
# gradient by its length, so the estimate is of something else. Lesson 04 is about what that does.

# %% [markdown]
# ## q3 · What a baseline does, exactly
#
# ●●●○○ · 15 minutes
#
# A policy with one decision: action $a$ has probability $\pi_a = \text{softmax}(\text{logits})_a$. The estimate from
# one sample is the vector
#
# $$g(a) = (R_a - b)\, \nabla_{\text{logits}} \log \pi_a , \qquad
# \frac{\partial \log \pi_a}{\partial \text{logit}_j} = [a = j] - \pi_j .$$
#
# Compute its mean and its variance **exactly**, by going through all actions with their probabilities; no sampling.
# Return `[2, actions]`: in the first row the mean of each coordinate of $g$, in the second its variance.
#
# Shapes: `logits` `[actions]`, `rewards` `[actions]`, `baseline` a number.
#
# <details><summary>Hint 1: direction</summary>
# Build the table of all estimates, one row for each action, one column for each coordinate. Then means over rows, with
# the probabilities of the actions as weights.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# The scores are the identity matrix less $\pi$ in every row. The variance is the weighted mean of the squared distance
# from the weighted mean.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `pi = logits.softmax(0)`, `g = (rewards - baseline)[:, None] * (torch.eye(len(pi)) - pi)`,
# `mean = (pi[:, None] * g).sum(0)`, then the same with `(g - mean) ** 2`, and `torch.stack` of both.
# </details>


# %% tags=["exercise"]
def estimator_moments(logits: torch.Tensor, rewards: torch.Tensor, baseline: float) -> torch.Tensor:
    """Mean and variance of the single-sample REINFORCE estimate: [2, actions]. logits, rewards: [actions]."""
    # BEGIN SOLUTION
    pi = logits.softmax(0)
    scores = torch.eye(len(pi), dtype=pi.dtype) - pi
    estimates = (rewards - baseline)[:, None] * scores  # [actions, coordinates]
    mean = (pi[:, None] * estimates).sum(0)
    variance = (pi[:, None] * (estimates - mean) ** 2).sum(0)
    return torch.stack([mean, variance])
    # END SOLUTION


# %%
check.q3(estimator_moments)

# %% [markdown]
# Your function over a range of baselines. **Look for** what moves and what stays.

# %%
if check.q3.passed:
    logits, rewards = torch.tensor([0.8, 0.0, -0.5, 0.3]), torch.tensor([1.0, 0.0, 0.0, 1.0])
    grid = torch.linspace(-1, 2, 61)
    moments = torch.stack([estimator_moments(logits, rewards, b.item()) for b in grid])  # [61, 2, 4]
    fig, axes = plt.subplots(1, 2, figsize=(10, 3.2))
    axes[0].plot(grid, moments[:, 0], linewidth=2)
    axes[1].plot(grid, moments[:, 1].sum(1), color="black")
    mean_reward = (logits.softmax(0) * rewards).sum().item()
    axes[1].axvline(mean_reward, color="#0072B2", linestyle="--", label="mean reward")
    axes[0].set(xlabel="baseline b", title="Mean of each coordinate")
    axes[1].set(xlabel="baseline b", title="Variance, all coordinates", ylim=(0, None))
    axes[1].legend(frameon=False)
    plt.show()

# %% [markdown] tags=["solution"]
# **Why the mean stays.** The baseline adds $-b\,\mathbb{E}[\nabla \log \pi_a]$, and
# $\sum_a \pi_a ([a = j] - \pi_j) = \pi_j - \pi_j = 0$. **Why the lowest point is not at the mean reward.** It is the
# mean of the rewards with $\pi_a \lVert \nabla \log \pi_a \rVert^2$ as weights: rare actions have long scores and count
# more. The plain mean is a good substitute, not the optimum.

# %% [markdown]
# ## q4 · Leave one out
#
# ●●○○○ · 10 minutes
#
# Several answers to each prompt, and the baseline of each is the mean reward of **the others of its prompt**:
#
# $$A_i = R_i - \frac{1}{n-1} \sum_{j \ne i} R_j .$$
#
# `rewards` is `[rows]`, group after group: the first `num_generations` rows belong to the first prompt. Return
# `[rows]`.
#
# <details><summary>Hint 1: direction</summary>
# Make groups the rows of a matrix. The sum of the others is the sum of all less one's own.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# `rewards.view(-1, num_generations)` is `[prompts, num_generations]`; keep the dimension when you sum, and flatten at
# the end.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `groups = rewards.view(-1, num_generations)`, `others = (groups.sum(1, keepdim=True) - groups) / (num_generations -
# 1)`, and the difference of the two, flattened.
# </details>


# %% tags=["exercise"]
def leave_one_out(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """RLOO advantages: each reward less the mean of the others in its group, [rows]."""
    # BEGIN SOLUTION
    groups = rewards.view(-1, num_generations)
    others = (groups.sum(1, keepdim=True) - groups) / (num_generations - 1)
    return (groups - others).flatten()
    # END SOLUTION


# %%
check.q4(leave_one_out)

# %% [markdown]
# A group of eight, with 0 to 8 right answers. **Look for** who gets the largest advantage, and what happens at the
# ends.

# %%
if check.q4.passed:
    fig, ax = plt.subplots(figsize=(6, 3.2))
    counts = range(9)
    tables = [leave_one_out((torch.arange(8) < c).float(), 8) for c in counts]
    ax.plot(counts[1:], [t[0].item() for t in tables[1:]], color="#0072B2", marker="o", label="a right answer")
    ax.plot(counts[:-1], [t[-1].item() for t in tables[:-1]], color="#D55E00", marker="s", label="a wrong answer")
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set(xlabel="right answers in the group of 8", ylabel="advantage", title="RLOO in one group")
    ax.legend(frameon=False)
    plt.show()

# %% [markdown] tags=["solution"]
# The only right answer of its group gets the full 1, the only wrong one the full −1. A group of which all are right
# or all are wrong gets 0: nobody did better than the others. Compare with $R_i - \bar R$, which contains its own
# reward: the only right one of eight would get 7/8.
