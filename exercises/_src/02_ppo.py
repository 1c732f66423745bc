# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# Four puzzles for [lesson 02](../notebooks/02_ppo.ipynb): find three mistakes in a PPO loss, carry credit across a tool
# call, close a hole in the clip, and build the KL penalty that none of the three estimates is. Write your code where it
# says `# YOUR CODE HERE`, then run the cell below it. Use `torch` alone: the functions must stand by themselves.
#
# `mask` is bool `[rows, length]`. What stands where it is False may be any number and must not matter. Where it may be
# `nan` or `-inf`, the question says so.

# %%
import matplotlib.pyplot as plt
import torch

from rlcourse.course.checks import nb02 as check

torch.manual_seed(0)
print("ready")

# %% [markdown]
# ## q1 · Three mistakes in a PPO loss
#
# ●●●○○ · 20 minutes
#
# A colleague has written PPO's loss, the critic's part included, with $\lambda = 1$. `returns` holds the reward of an
# answer at each of its tokens, so the advantage of a token is its return less its value.


# %%
def colleague(logprobs, old_logprobs, values, returns, mask, clip):
    advantages = returns - values
    ratio = (logprobs - old_logprobs).exp()
    objective = ratio.clamp(1 - clip, 1 + clip) * advantages
    losses = -objective + (values - returns) ** 2 / 2
    return (losses * mask).mean()


# %% [markdown]
# Her curves, on a language with the tokens `a`, `b` and the end. Policy and critic are tables: a distribution, and a
# value, for each position in a text. A text is right if it ends and has exactly two `b`. The verifier errs in one of
# ten cases, either way. Twenty steps on each rollout. **Look for** a curve that is where it cannot be.

# %% tags=["hide-input"]
# @title The curves of a loss: `show(function)`
END, LENGTH = 2, 8


def of_ids(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The log-prob of each token: [rows, length]."""
    return table.log_softmax(-1).expand(len(ids), -1, -1).gather(-1, ids[..., None])[..., 0]


def curves(loss, rollouts: int = 100, updates: int = 20, n: int = 16, rate: float = 3.0) -> torch.Tensor:
    """Share of right texts, mean reward, and mean value of the tokens, rollout by rollout: [rollouts, 3]."""
    torch.manual_seed(0)
    table, critic, rows = torch.zeros(LENGTH, 3), torch.zeros(LENGTH), []  # logits of a, b, end; values, by position
    table[:, END] = -2.0
    for _ in range(rollouts):
        ids = torch.multinomial(table.softmax(-1), n, replacement=True).T
        is_end = (ids == END).long()
        mask = is_end.cumsum(1) - is_end == 0
        right = ((ids == END) & mask).any(1) & (((ids == 1) & mask).sum(1) == 2)
        rewards = (torch.rand(n) < torch.where(right, 0.9, 0.1)).float()
        rows.append([right.float().mean(), rewards.mean(), critic.expand(n, -1)[mask].mean()])
        old, returns = of_ids(table, ids), rewards[:, None].expand(n, LENGTH)
        for _ in range(updates):
            leaves = [x.clone().requires_grad_() for x in (table, critic)]
            found = loss(of_ids(leaves[0], ids), old, leaves[1].expand(n, -1), returns, mask, 0.2)
            steps = torch.autograd.grad(found, leaves, allow_unused=True, materialize_grads=True)
            table, critic = (x - rate * step.clamp(-1, 1) for x, step in zip((table, critic), steps, strict=True))
    return torch.tensor(rows)


def show(loss) -> None:
    """Draw the curves of a loss; a moving mean of ten rollouts."""
    found = curves(loss).unfold(0, 10, 1).mean(-1)
    _, axes = plt.subplots(1, 2, figsize=(10, 3), layout="constrained")
    axes[0].plot(found[:, 0], color="#0072B2", label="right texts")
    axes[1].plot(found[:, 1], color="#009E73", label="mean reward")
    axes[1].plot(found[:, 2], color="#D55E00", linestyle="--", label="mean value")
    axes[0].set(xlabel="rollout", ylabel="share", ylim=(0, 1.05))
    axes[1].set(xlabel="rollout", ylim=(-1.1, 1.05))
    for ax in axes:
        ax.legend()
    plt.show()


show(colleague)

# %% [markdown]
# There are three mistakes. Write the loss without them: minus the mean over **all real tokens** of PPO's clipped
# objective, plus the mean of half the squared error of the values.
#
# <details><summary>Hint 1: a question</summary>
# Which quantity does the critic learn, between which two numbers must it lie, and what in this loss could pull it
# elsewhere?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Go through the loss and ask of every tensor: who should feel a gradient through it? Then take a token with $A > 0$ and
# $\rho = 1.5$, one with $A > 0$ and $\rho = 0.5$, and compare the gradients with section 3 of the lesson. Last, double
# the padding of a batch: does the loss stay the same?
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Five lines like hers. Three of them change by a few characters each; none is added.
# </details>


# %% tags=["exercise"]
def mended_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    clip: float,
) -> torch.Tensor:
    """PPO's loss, a scalar. All tensors are [rows, length]; logprobs and values have gradients."""
    # BEGIN SOLUTION
    advantages = (returns - values).detach()
    ratio = (logprobs - old_logprobs).exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    losses = -objective + (values - returns) ** 2 / 2
    return losses[mask].mean()
    # END SOLUTION


# %%
check.q1(mended_loss)

# %% [markdown]
# The curves of your own version, finished or not.

# %%
try:
    show(mended_loss)
except NotImplementedError:
    print("nothing to show yet")

# %% [markdown] tags=["solution"]
# **The advantage** is a number, not a function. With a gradient in it, the policy's part of the loss, $-\rho\, (R -
# V)$, is made small by making $V$ small, whatever the returns. The critic sinks to about one below them, where the two
# gradients balance. Every advantage is then about one too high: the generous judge of lesson 01, and with the same end.
# The other two are quiet. **Without the minimum** a token that moved the wrong way stays there. **The mean** over all
# positions makes the step depend on how much padding a batch happens to have. No curve of this small task gives them
# away; printing the gradient of four tokens does.

# %% [markdown]
# ## q2 · Credit across a tool call
#
# ●●●○○ · 20 minutes
#
# An answer calls a calculator. What the calculator writes stands in the answer, but the policy did not write it:
#
# | token | `12*` | `7=` | `<calc>` | `84` | `</calc>` | `So` | `84` | end |
# | --- | --- | --- | --- | --- | --- | --- | --- | --- |
# | `mask` | True | True | True | **False** | **False** | True | True | True |
#
# For PPO an action of the policy is one step, whatever the tool says in between. So the state after `<calc>` is the one
# before `So`, with everything that the tool wrote in it. Write GAE for such answers. The value after the last token of
# the policy's own is 0.
#
# Shapes: `rewards`, `values`, `mask` `[rows, length]`, with `values[i, t]` of the state before token $t$; `gamma`,
# `lam` numbers. Where `mask` is False (the tool, and padding) rewards and values may be anything, `nan` included.
# Return the advantages `[rows, length]`, 0 where `mask` is False.
#
# <details><summary>Hint 1: a question</summary>
# Let two answers be the same but for the tool: in one it writes a single token, in the other a thousand. How should the
# advantages of the policy's tokens differ?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Going backwards, GAE carries two things from token to token: the advantage so far, and the value of the next state. A
# token that is not the policy's own must leave both as they are. Beware of `0 * nan`.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# The loop of the lesson, with $\gamma$ back in it. In each column compute what a token of the policy's own would get.
# Then choose, row by row, between the new and the old of each thing that is carried, and between the advantage and 0.
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
# Your function on one answer that turns out right. The value jumps from 0.3 to 0.9 while the tool speaks (gray): it was
# right to ask. **Look for** who gets the credit.

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
# At $\lambda = 0$ all of the credit for the jump goes to the token that made the call. That is as it should be: it was
# the last decision before the good news. The lesson's function, pasted, takes the gap for the end of an answer: the
# calling token is told that it lost everything ($0 - 0.3$), and what comes after reaches it only through the tool's
# words, a bit weaker with each of them.

# %% [markdown]
# ## q3 · The hole in the clip
#
# ●●●○○ · 15 minutes
#
# PPO's objective has no floor. A token with $A < 0$ and a large ratio, one that became **more** probable although it
# was bad, keeps its gradient, and rightly so. But its weight is $\rho$. If it was sampled with a probability of 0.001
# and has 0.5 now, that is 500 times the weight of a token that has not moved.
#
# Close the hole without losing the token: where PPO's gradient is $-\rho A \nabla \log \pi$ with $\rho >$ `most`, make
# it $-$`most`$\, A \nabla \log \pi$. Everywhere else the gradient is PPO's, also where that is zero. The loss is a mean
# over the real tokens of the batch. Only its **gradient** is looked at, so its value may be what you like.
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
# Pick the real tokens first. Then a ratio without gradient; a truth value for each token that says whether the clip has
# silenced it; a weight made of both; and the mean of three factors, with a minus.
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

# %% [markdown]
# ## q4 · The penalty that none of the three is
#
# ●●●●○ · 20 minutes
#
# Section 7 of the lesson has three estimates of $\text{KL}(\pi \,\|\, \pi_\text{ref})$, and none is good for
# everything. Make one that is. For tokens sampled from $\pi$ return a number for each, made of its own two log-probs
# alone, with
#
# - a **value** that is right on average and never negative;
# - a **gradient**, as autograd sees it at the sampled tokens, that is on average the gradient of the same KL.
#
# Shapes: `logprobs` (with gradient), `ref_logprobs` `[tokens]`. Return `[tokens]`.
#
# <details><summary>Hint 1: a question</summary>
# Which of $k_1$, $k_2$ and $k_3$ has the value that is wanted? And which one has the gradient?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# A tensor may have the value of one expression and the gradient of another. What is the value of $x - x$, where only
# one of the two is detached? And what is its gradient?
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Two lines. A difference; then a sum of three terms, two of them detached.
# </details>


# %% tags=["exercise"]
def penalty(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """An estimate of the KL for each token, right in value and in gradient: [tokens]."""
    # BEGIN SOLUTION
    d = logprobs - ref_logprobs
    k2, k3 = d**2 / 2, torch.expm1(-d) + d
    return k3.detach() + k2 - k2.detach()
    # END SOLUTION


# %%
check.q4(penalty)

# %% [markdown]
# Your penalty against $k_1$ and $k_3$, each alone in the loss: a policy over 50 tokens that starts far from its
# reference and samples 64 tokens a step. **Look for** which of them bring it home, and what your logged value scatters
# around.

# %%
if check.q4.passed:
    torch.manual_seed(0)
    ref = torch.randn(50).log_softmax(0)
    begin = (ref + 2 * torch.randn(50)).log_softmax(0)
    fig, ax = plt.subplots()
    losses = {"k1": lambda p, r: p - r, "k3": lambda p, r: (r - p).exp() - 1 + p - r, "yours": penalty}
    for (name, loss), color in zip(losses.items(), ("#D55E00", "#E69F00", "#0072B2"), strict=True):
        logits, path, logged = begin.clone().requires_grad_(), [], []
        for _ in range(200):
            log_pi = logits.log_softmax(0)
            tokens = torch.multinomial(log_pi.exp().detach(), 64, replacement=True)
            value = loss(log_pi[tokens], ref[tokens]).mean()
            path.append((log_pi.exp() * (log_pi - ref)).sum().item())
            logged.append(value.item())
            [gradient] = torch.autograd.grad(value, logits)
            logits = (logits - gradient).detach().requires_grad_()
        ax.plot(path, color=color, label=f"{name}: the KL")
        if name == "yours":
            ax.plot(logged, color=color, linestyle=":", linewidth=1, label="yours: as logged")
    ax.set(xlabel="step", ylabel="nats", ylim=(0, None), title="Three penalties")
    ax.legend()
    plt.show()

# %% [markdown] tags=["solution"]
# $k_1$ has no pull: what is left of its gradient is noise, and the policy wanders off. $k_3$ goes home too, here even
# sooner than yours: $\text{KL}(\pi_\text{ref} \,\|\, \pi)$ has its minimum at the same point. But its path is another:
# its pull on a token is $1 - e^{-d}$, at most 1 where the policy is too sure of a token, and without bound where it has
# given one up. Any term whose mean gradient is zero may be added to yours, such as a constant times the score. The KL
# is of the next token alone: what a token does to the states after it is left out, here and in GRPO's loss.
