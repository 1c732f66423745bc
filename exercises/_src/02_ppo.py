# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# First put [lesson 02](../notebooks/02_ppo.ipynb)'s clip into your loop and train with it. Then two puzzles: carry
# credit across a tool call, and close a hole in the clip. Write your code where it says `# YOUR CODE HERE`, then run
# the cell below it. Use `torch` alone: each function must be self-contained.
#
# `mask` is bool `[rows, length]`. Where it's False, the tensors may hold anything, and that must not matter. If it may
# be `nan` or `-inf`, the question says so.

# %%
import matplotlib.pyplot as plt
import torch

from rlcourse.course import pick
from rlcourse.course.checks import nb02 as check
from rlcourse.course.own import load_loop, save_loop

CLIP, LIMIT = 0.2, 80  # PPO's clip range; tokens per answer at most
torch.manual_seed(0)
print("ready")

# %% [markdown]
# ## q1 · The clip in your loop
#
# ●●○○○ · 15 minutes
#
# Change one function of your loop: `loss`. Lesson 01's multiplies each token's log-prob by its advantage. Now `old`
# comes in, the log-probs before the first of several steps. With $\rho_{i,t} = \pi_\theta / \pi_\text{old}$ at each
# token and $\varepsilon$ = `CLIP`,
#
# $$\mathcal{L} = -\frac{1}{N T} \sum_{i=1}^{N} \sum_t m_{i,t}
#   \min\big(\rho_{i,t} A_{i,t},\ \text{clip}(\rho_{i,t},\ 1 - \varepsilon,\ 1 + \varepsilon)\, A_{i,t}\big) .$$
#
# The divisor is lesson 01's, with $T$ = `LIMIT`. `A` is `[rows, 1]`, or `[rows, length]` from a critic; `ref` still
# isn't needed.
#
# <details><summary>Hint 1: a question</summary>
# You have log-probs. What is the logarithm of the ratio?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Compute both products for every token and take the smaller one. No `if` on the sign of A is needed.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Three lines: the ratio, the minimum of two products, and lesson 01's line with the minimum in place of `A * new`.
# </details>


# %% tags=["exercise"]
def clipped(
    new: torch.Tensor, old: torch.Tensor, ref: torch.Tensor, A: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """PPO's clipped objective, made a loss: a scalar."""
    # BEGIN SOLUTION
    ratio = (new - old).exp()
    gain = torch.minimum(ratio * A, ratio.clamp(1 - CLIP, 1 + CLIP) * A)
    return -(gain * mask).sum() / (len(mask) * LIMIT)
    # END SOLUTION


# %%
check.q1(clipped)

# %% [markdown]
# Your loop with the clip, eight steps on each of six rollouts, beside the loss it had before:

# %%
loop = load_loop()
rollouts, settings = pick(1, 6), {"updates": pick(2, 8), "every": 2, "problems": pick(8, 100)}
logs = {"before": loop.train(rollouts, **settings)[1]}
if check.q1.passed:
    logs["with the clip"] = save_loop(loss=clipped).train(rollouts, **settings)[1]
fig, ax = plt.subplots()
for (label, log), style in zip(logs.items(), ("s--", "o-"), strict=False):
    known = [row for row in log if row["accuracy"] is not None]
    ax.plot([row["step"] for row in known], [100 * row["accuracy"] for row in known], style, label=label)
ax.set(xlabel="rollouts", ylabel="greedy, % right", ylim=(0, 100), title="Eight steps per rollout")
ax.legend()
plt.show()

# %% [markdown]
# ## q2 · Credit across a tool call
#
# ●●●○○ · 20 minutes
#
# An answer calls a calculator. What the calculator writes is part of the answer, but the policy didn't write it:
#
# | token | `12*` | `7=` | `<calc>` | `84` | `</calc>` | `So` | `84` | end |
# | --- | --- | --- | --- | --- | --- | --- | --- | --- |
# | `mask` | True | True | True | **False** | **False** | True | True | True |
#
# For PPO, each of the policy's tokens is one step, whatever the tool writes in between. So the state after `<calc>` is
# the one before `So`, and it includes everything that the tool wrote. Write GAE for such answers. The value after the
# policy's last token is 0.
#
# Shapes: `rewards`, `values`, `mask` `[rows, length]`, with `values[i, t]` of the state before token $t$; `gamma`,
# `lam` numbers. Where `mask` is False (the tool, and padding) rewards and values may be anything, `nan` included.
# Return the advantages `[rows, length]`, 0 where `mask` is False.
#
# <details><summary>Hint 1: a question</summary>
# Two answers differ only in the tool: in one it writes a single token, in the other a thousand. How should the
# advantages of the policy's tokens differ?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Going backwards, GAE carries two things from token to token: the advantage so far, and the value of the next state. A
# token that isn't the policy's must leave both as they are. Beware of `0 * nan`.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# The loop of the lesson, with $\gamma$ back in it. In each column compute what one of the policy's tokens would get.
# Then choose, row by row, between the new and the old value of each thing carried, and between the advantage and 0.
# </details>


# %% tags=["exercise"]
def gae_with_tool(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> torch.Tensor:
    """Advantages of the policy's own tokens: [rows, length]. rewards, values, mask: [rows, length]."""
    # BEGIN SOLUTION
    advantages = torch.zeros_like(values)
    carried = after = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        own = mask[:, t]
        here = rewards[:, t] + gamma * after - values[:, t] + gamma * lam * carried
        advantages[:, t] = torch.where(own, here, 0.0)
        carried, after = torch.where(own, here, carried), torch.where(own, values[:, t], after)
    return advantages
    # END SOLUTION


# %%
check.q2(gae_with_tool)

# %% [markdown]
# Your function on one answer that turns out right. The value jumps from 0.3 to 0.9 while the tool writes (gray): asking
# was a good idea. **Look for** who gets the credit.

# %%
if check.q2.passed:
    values, rewards = torch.where(torch.arange(20) < 12, 0.3, 0.9)[None], torch.zeros(1, 20)
    mask = ((torch.arange(20) < 8) | (torch.arange(20) >= 12))[None]
    rewards[0, -1] = 1.0
    fig, ax = plt.subplots()
    ax.axvspan(7.5, 11.5, color="lightgray", label="the tool")
    for lam, color, marker in ((0.0, "#D55E00", "s"), (0.8, "#E69F00", "^"), (1.0, "#0072B2", "o")):
        advantages = gae_with_tool(rewards, values, mask, 1.0, lam)[0]
        ax.plot(range(20), advantages, color=color, marker=marker, label=f"λ = {lam:g}")
    ax.set(xlabel="token", ylabel="advantage", title="Who gets the credit", xticks=range(0, 20, 4))
    ax.legend()
    plt.show()

# %% [markdown] tags=["solution"]
# At $\lambda = 0$ all of the credit for the jump goes to the token that made the call, as it should: that was the last
# decision before the good news. Paste in the lesson's function, and it takes the gap for the end of an answer: the
# calling token is told that it lost everything ($0 - 0.3$), and what comes after reaches it only through the tool's
# tokens, a bit weaker with each one.

# %% [markdown]
# ## q3 · The hole in the clip
#
# ●●●○○ · 15 minutes
#
# PPO's objective has no floor. A token with $A < 0$ and a large ratio, one that became **more** probable although it
# was bad, keeps its gradient, and rightly so. But its weight is $\rho$. If it was sampled with a probability of 0.001
# and now has 0.5, that is 500 times the weight of a token that hasn't moved.
#
# Close the hole without losing the token: where PPO's gradient is $-\rho A \nabla \log \pi$ with $\rho >$ `most`, make
# it $-$`most`$\, A \nabla \log \pi$. Everywhere else the gradient is PPO's, including where it's zero. The loss is a
# mean over the real tokens of the batch. Only its **gradient** is checked; its value can be anything.
#
# Shapes: `logprobs` (with gradient), `old_logprobs`, `advantages`, `mask` `[rows, length]`; `clip`, `most` numbers,
# `most` > 1 + `clip`. Where `mask` is False the log-probs may be `-inf`.
#
# <details><summary>Hint 1: a question</summary>
# PPO's gradient at a token is a weight times $-A \nabla \log \pi$. What is the weight, in each of the four cases of the
# sign of $A$ and the side of the ratio?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Then PPO is REINFORCE with weights, and you may write it like that: weights without gradient, times the advantage,
# times the log-prob. In this form a bound is easy. Clamping the ratio *inside* PPO's minimum would take the gradient
# away instead.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Pick the real tokens first. Then a ratio without gradient; a bool per token that says whether the clip has silenced
# it; a weight made of both; and the mean of three factors, with a minus.
# </details>


# %% tags=["exercise"]
def bounded_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip: float,
    most: float,
) -> torch.Tensor:
    """A scalar whose gradient is PPO's, with no token's weight above `most`. All tensors are [rows, length]."""
    # BEGIN SOLUTION
    new, old, a = logprobs[mask], old_logprobs[mask], advantages[mask]
    ratio = (new - old).exp().detach()
    silenced = torch.where(a > 0, ratio > 1 + clip, ratio < 1 - clip)
    weight = ratio.clamp(max=most).masked_fill(silenced, 0.0)
    return -(weight * a * new).mean()
    # END SOLUTION


# %%
check.q3(bounded_loss)

# %% [markdown] tags=["solution"]
# What you wrote is close to CISPO (MiniMax 2025, arXiv:2506.13585), which caps the weight and drops the clip. The
# usual repair of PPO, *dual clip* (Ye et al. 2020, arXiv:1912.09729), takes the larger of PPO's objective and
# `most` $\cdot A$ where $A < 0$. That bounds the loss, but makes it **flat**: the worst offenders, bad tokens that
# became far more probable, get no gradient at all.
