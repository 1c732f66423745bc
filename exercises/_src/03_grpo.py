# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# Four exercises for [lesson 03](../notebooks/03_grpo.ipynb): the advantages of GRPO, the groups that say nothing, the
# whole loss, and what the estimator points at. Write your code where it says `# YOUR CODE HERE`, then run the cell
# below it. Use `torch` alone: the functions must stand by themselves.

# %%
import matplotlib.pyplot as plt
import torch

from rlcourse.course.checks import nb03 as check

torch.manual_seed(0)
BLUE, GREEN, VERMILION, PURPLE = "#0072B2", "#009E73", "#D55E00", "#CC79A7"
print("ready")

# %% [markdown]
# ## q1 · Advantages of a group
#
# ●●○○○ · 10 minutes
#
# Each prompt has $G$ answers. The advantage of an answer is its reward less the mean of its group, over the deviation
# of its group:
#
# $$\hat A_i = \frac{R_i - \bar R}{\mathrm{std}(R) + \varepsilon} , \qquad
# \mathrm{std}(R) = \sqrt{\frac{1}{G-1} \sum_{j=1}^{G} (R_j - \bar R)^2} .$$
#
# `rewards` is `[rows]` in float32, group after group: the first `num_generations` rows belong to the first prompt.
# Return `[rows]`. A group of identical rewards must get **exactly** 0, whatever the rewards are: the mean of seven
# times 0.3 is not quite 0.3 in float32, and a tiny difference over a tiny deviation is not tiny.
#
# <details><summary>Hint 1: direction</summary>
# Make groups the rows of a matrix, work along the second dimension, flatten at the end.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Advantages do not change if a constant is taken off all rewards of a group. Take the first reward of each group off
# all of it: identical rewards are now 0, and the mean of zeros does not round. `std` of torch divides by $G-1$ already.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `groups = rewards.view(-1, num_generations)`, `groups = groups - groups[:, :1]`,
# `centered = groups - groups.mean(1, keepdim=True)`, then `centered / (centered.std(1, keepdim=True) + eps)`, and
# `flatten()`.
# </details>


# %% tags=["exercise"]
def group_normalized(rewards: torch.Tensor, num_generations: int, eps: float) -> torch.Tensor:
    """GRPO's advantages, [rows]; exactly 0 in a group of identical rewards. rewards: [rows], group after group."""
    # BEGIN SOLUTION
    groups = rewards.view(-1, num_generations)
    groups = groups - groups[:, :1]
    centered = groups - groups.mean(1, keepdim=True)
    return (centered / (centered.std(1, keepdim=True) + eps)).flatten()
    # END SOLUTION


# %%
check.q1(group_normalized)

# %% [markdown]
# Your function on a group of eight, with 0 to 8 right answers. **Look for** the largest advantage, and for the two
# ends.

# %%
if check.q1.passed:
    found = [group_normalized((torch.arange(8) < right).float(), 8, 1e-4) for right in range(9)]
    fig, ax = plt.subplots(figsize=(6, 3.2))
    ax.plot(range(1, 9), [a[0] for a in found[1:]], color=BLUE, marker="o", label="a right answer")
    ax.plot(range(8), [a[-1] for a in found[:-1]], color=VERMILION, linestyle="--", marker="s", label="a wrong answer")
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set(xlabel="right answers in the group of 8", ylabel="advantage", title="GRPO in one group")
    ax.legend(frameon=False, loc="upper right")
    plt.show()

# %% [markdown] tags=["solution"]
# **Why the shift.** The mean of seven rewards of 0.3 comes out as 0.29999998 or so. With rewards of 0 and 1 this never
# shows, and with an $\varepsilon$ of $10^{-4}$ it is small. But it is a gradient where there should be none, and code
# that skips rows of advantage 0 does not skip them. **Why $G - 1$.** It is the convention of torch and of the usual
# implementations; with `correction=0` all advantages would be larger by $\sqrt{G/(G-1)}$, a constant.

# %% [markdown]
# ## q2 · Groups that say nothing
#
# ●●○○○ · 10 minutes
#
# Two numbers that should agree. `success` `[problems]` holds the probability that one answer to each problem is right.
# `rewards` `[rows]` are those of real groups, group after group. Return a tensor `[2]`:
#
# 1. the **expected** share of groups without signal. A group of $G$ answers to a problem that is solved with
#    probability $p$ is all right or all wrong with probability $p^G + (1-p)^G$; take the mean over the problems;
# 2. the **measured** share: of the groups in `rewards`, those whose rewards are all the same. Rewards may take any
#    values, for instance 0.1 for an answer that can be read.
#
# <details><summary>Hint 1: direction</summary>
# The two numbers have nothing to do with each other in code. Compute each on its own line, then `torch.stack`.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Power first, mean second: the mean of a power is not the power of the mean. For the second, a group is silent if every
# reward equals its first one.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `expected = (success**G + (1 - success) ** G).mean()`; `groups = rewards.view(-1, G)`;
# `measured = (groups == groups[:, :1]).all(1).float().mean()`.
# </details>


# %% tags=["exercise"]
def silent_share(success: torch.Tensor, rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Expected and measured share of groups without signal: [2]. success: [problems]; rewards: [rows]."""
    # BEGIN SOLUTION
    expected = (success**num_generations + (1 - success) ** num_generations).mean()
    groups = rewards.view(-1, num_generations)
    measured = (groups == groups[:, :1]).all(1).float().mean()
    return torch.stack([expected, measured])
    # END SOLUTION


# %%
check.q2(silent_share)

# %% [markdown]
# Your function on simulated problems: half of them hard (solved once in ten tries), half of them easy (nine times in
# ten). **Look for** how far the dotted line is off, which first takes the mean success rate, one half.

# %%
if check.q2.passed:
    success, sizes = torch.tensor([0.1, 0.9]).repeat(200), [2, 4, 8, 16, 32]
    both = []
    for G in sizes:
        rewards = (torch.rand(len(success), G) < success[:, None]).float().flatten()
        both.append(silent_share(success, rewards, G).tolist())
    fig, ax = plt.subplots(figsize=(6, 3.2))
    ax.plot(sizes, [100 * e for e, _ in both], color=BLUE, label="expected")
    ax.plot(sizes, [100 * m for _, m in both], color=VERMILION, marker="o", linestyle="", label="measured, 400 groups")
    ax.plot(sizes, [200 * 0.5**G for G in sizes], color=PURPLE, linestyle=":", label="from the mean success rate")
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, sizes)
    ax.set(xlabel="group size G", ylabel="groups without signal, %", ylim=(0, 100), title="Half hard, half easy")
    ax.legend(frameon=False)
    plt.show()

# %% [markdown] tags=["solution"]
# **Why power first.** $p^G + (1-p)^G$ is convex in $p$, so by Jensen's inequality its mean is at least its value at the
# mean. A data set of half hard and half easy problems has mean one half and few useful groups. So look at the
# distribution of the success rates, not at the accuracy.

# %% [markdown]
# ## q3 · The loss
#
# ●●●○○ · 20 minutes
#
# With the ratio $r_{i,t} = \exp(\log \pi - \log \pi_{\text{old}})$ of each token, the advantage $A_i$ of each row, and
# $d_{i,t} = \log \pi - \log \pi_{\text{ref}}$:
#
# $$\mathcal{L} = \frac{1}{N} \sum_{i=1}^{N} \frac{1}{|o_i|} \sum_{t} \Bigl[
# -\min\bigl(r_{i,t} A_i,\ \mathrm{clip}(r_{i,t}, 1 - c, 1 + c)\, A_i\bigr)
# + \beta \bigl(e^{-d_{i,t}} - 1 + d_{i,t}\bigr) \Bigr] .$$
#
# $N$ is the number of rows and $|o_i|$ the number of real tokens of row $i$, those where `mask` is true. Shapes:
# `logprobs` (with gradient), `old_logprobs`, `ref_logprobs`, `mask` are `[rows, length]`, `advantages` is `[rows]`,
# `clip` and `beta` are numbers. Return a scalar. Two things to guard against: a row without any real token adds 0 and
# **still counts** in $N$; and where `mask` is false, the log-probs may hold anything, `inf` and `nan` included.
#
# <details><summary>Hint 1: direction</summary>
# Clean the three inputs first. Then a matrix of losses by token, then a mean along each row, then a mean over rows.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# `masked_fill(~mask, 0.0)` on every input, before any arithmetic: then the ratio is 1 and the KL is 0 there, and the
# gradient is cut. But $-\min(\dots)$ is $-A_i$ there, not 0, so fill the losses as well.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `new, old, ref = (x.masked_fill(~mask, 0.0) for x in (...))`, `r = (new - old).exp()`, `A = advantages[:, None]`,
# `loss = -torch.minimum(r * A, r.clamp(1 - clip, 1 + clip) * A) + beta * ((-d).exp() - 1 + d)`, then
# `loss.masked_fill(~mask, 0.0).sum(1) / mask.sum(1).clamp(min=1)`, and the mean.
# </details>


# %% tags=["exercise"]
def grpo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip: float,
    beta: float,
) -> torch.Tensor:
    """The loss of GRPO, a scalar. log-probs and mask: [rows, length]; advantages: [rows]."""
    # BEGIN SOLUTION
    new, old, ref = (x.masked_fill(~mask, 0.0) for x in (logprobs, old_logprobs, ref_logprobs))
    ratio, advantage = (new - old).exp(), advantages[:, None]
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    d = new - ref
    per_token = -surrogate + beta * ((-d).exp() - 1 + d)
    of_rows = per_token.masked_fill(~mask, 0.0).sum(1) / mask.sum(1).clamp(min=1)
    return of_rows.mean()
    # END SOLUTION


# %%
check.q3(grpo_loss)

# %% [markdown]
# Your loss of a single token, as the new policy moves away from the old one, which is the reference, too. **Look for**
# where each curve is flat, that is, where it pulls no more.

# %%
if check.q3.passed:
    ratio, zero, one = torch.linspace(0.4, 1.8, 141), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    fig, ax = plt.subplots(figsize=(6, 3.4))
    for A, beta, style, color in ((1, 0, "-", BLUE), (-1, 0, "--", VERMILION), (1, 1, "-.", GREEN)):
        curve = [grpo_loss(r.log().view(1, 1), zero, zero, torch.tensor([float(A)]), one, 0.2, beta) for r in ratio]
        ax.plot(ratio, torch.stack(curve), style, color=color, label=f"A = {A:+d}, β = {beta}")
    ax.set(xlabel="ratio π / π_old of the token", ylabel="loss", title="Your loss of one token, clip 0.2")
    ax.legend(frameon=False)
    plt.show()

# %% [markdown] tags=["solution"]
# **Why the clip holds on one side only.** The smaller of the two is taken, so a token of positive advantage loses its
# gradient above $1 + c$ and keeps it below $1 - c$: there it has moved the wrong way and should come back. **Why fill
# before.** `exp(inf) * 0` is `nan`, and the gradient of `torch.where` carries a `nan` of the branch that was not taken.
# **What the KL does.** Without it the first curve is flat above 1.2. With it the curve has a lowest point: the token
# has somewhere to stop.

# %% [markdown]
# ## q4 · What the estimator points at
#
# ●●●●○ · 20 minutes
#
# A policy with one decision: action $a$ has the probability $\pi_a = \mathrm{softmax}(\text{logits})_a$ and earns
# $R_a$. A group is $G$ actions $a_1, \dots, a_G$, drawn independently. Its estimate of the gradient is
#
# $$g = \frac{1}{G} \sum_{i=1}^{G} A_i\, \nabla_{\text{logits}} \log \pi_{a_i} , \qquad
# \frac{\partial \log \pi_a}{\partial \text{logit}_j} = [a = j] - \pi_j .$$
#
# Compute the **expectation** of $g$ exactly, by going through all `actions ** G` groups with their probabilities, for
# two kinds of advantages. Return `[2, actions]`: in the first row with $A_i = R_{a_i} - \bar R$, the mean being that of
# the whole group; in the second with the same divided by `std + 1e-4` of the group, as in q1.
#
# Shapes: `logits` `[actions]`, `rewards` `[actions]`, `num_generations` a number. At most some thousand groups.
#
# <details><summary>Hint 1: direction</summary>
# A table of groups, `[groups, G]` of action numbers. All else is indexing with it: rewards of groups, scores of groups,
# probabilities of groups.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# `torch.cartesian_prod(*[torch.arange(actions)] * G)` is the table. The probability of a group is the product of its
# `pi[groups]`. The scores are `torch.eye(actions) - pi`, one row for each action, so `scores[groups]` is
# `[groups, G, actions]`.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `weight = pi[groups].prod(1)`, `r = rewards[groups]`, `A = r - r.mean(1, keepdim=True)`,
# `estimate = (A[..., None] * scores[groups]).mean(1)`, `(weight[:, None] * estimate).sum(0)`. The same with
# `A / (A.std(1, keepdim=True) + 1e-4)`.
# </details>


# %% tags=["exercise"]
def expected_gradients(logits: torch.Tensor, rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Expected gradient with centred and with normalised advantages: [2, actions]. logits, rewards: [actions]."""
    # BEGIN SOLUTION
    pi = logits.softmax(0)
    groups = torch.cartesian_prod(*[torch.arange(len(pi))] * num_generations)
    scores = torch.eye(len(pi), dtype=pi.dtype) - pi
    weight, r = pi[groups].prod(1), rewards[groups]
    centered = r - r.mean(1, keepdim=True)
    normalised = centered / (centered.std(1, keepdim=True) + 1e-4)
    estimates = [(a[..., None] * scores[groups]).mean(1) for a in (centered, normalised)]
    return torch.stack([(weight[:, None] * estimate).sum(0) for estimate in estimates])
    # END SOLUTION


# %%
check.q4(expected_gradients)

# %% [markdown]
# Your function for a problem with two answers, a right one with probability $p$ and a wrong one, over the exact
# gradient $p(1-p)$. **Look for** lines that are level, and for one that is not.

# %%
if check.q4.passed:
    grid = torch.linspace(0.03, 0.97, 48)
    fig, ax = plt.subplots(figsize=(6.5, 3.4))
    found = {}  # expected over exact gradient, by group size: [48, 2]
    for G in (2, 4, 8):
        pairs = [expected_gradients(torch.stack([p.logit(), 0 * p]), torch.tensor([1.0, 0]), G)[:, 0] for p in grid]
        found[G] = torch.stack(pairs) / (grid * (1 - grid))[:, None]
    for i, (kind, color) in enumerate((("centred", BLUE), ("normalised", GREEN))):
        for G, style in ((2, ":"), (4, "--"), (8, "-")):
            ax.plot(grid, found[G][:, i], style, color=color, linewidth=2 - i / 2, label=f"{kind}, G = {G}")
    ax.set(xlabel="probability of the right answer", ylabel="expected / exact gradient", ylim=(0, 3.6))
    ax.set_title("How long the expected gradient is")
    ax.legend(frameon=False, ncols=2, fontsize=9, loc="upper center")
    plt.show()

# %% [markdown] tags=["solution"]
# **The centred one is too short, by the same factor everywhere.** $\mathbb{E}[R_i \nabla \log \pi_{a_i}]$ is the
# gradient, and of the baseline only the term with the own reward is left, $\frac{1}{G}$ of it. So the expectation is
# $(1 - 1/G)\,\nabla J$, and RLOO multiplies by $G / (G-1)$. **The normalised one has another factor at
# each $p$**, as soon as a group is larger than a pair. It lifts hard and easy problems over those in the middle, the
# more the larger the group. No constant repairs that: it is another objective, and a topic of lesson 04. (In pairs it
# is a constant still: every pair that differs has the same deviation.)
