# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# First make your loop GRPO, as [lesson 03](../notebooks/03_grpo.ipynb) has it. Then three puzzles: make a data set as
# silent as you're asked to, build a better KL penalty, and work out where GRPO's estimate points. Write your code where
# it says `# YOUR CODE HERE`, then run the cell below it. Use `torch` and Python's own modules: each function must be
# self-contained.

# %%
import matplotlib.pyplot as plt
import torch

from rlcourse.course import pick
from rlcourse.course.checks import nb03 as check
from rlcourse.course.own import load_loop, save_loop

CLIP, BETA = 0.2, 0.04  # PPO's clip range; the weight of the KL
torch.manual_seed(0)
BLUE, GREEN, SKY = "#0072B2", "#009E73", "#56B4E9"
print("ready")

# %% [markdown]
# ## q1 · GRPO in your loop
#
# ●●●○○ · 20 minutes
#
# Two functions change. `weigh` divides by the deviation of the group:


# %%
def normalized(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """GRPO: each reward minus the mean of its group, divided by the group's standard deviation: [rows]."""
    groups = rewards.view(-1, group)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


# %% [markdown]
# You write the other, `loss`. It's the formula of section 3, with $\varepsilon$ = `CLIP` and $\beta$ = `BETA`: at each
# token PPO's clipped objective and the KL estimate $k_3$; the mean over the tokens of an answer first, then the mean
# over answers. `A` is `[rows, 1]`, and every answer has at least one token.
#
# <details><summary>Hint 1: a question</summary>
# Which of the three policies does the ratio compare, and which the KL?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# What you maximise has a minus in the loss, what you pay for a plus. With $d = \log\pi - \log\pi_\text{ref}$, $k_3 =
# e^{-d} - 1 + d$.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Lesson 02's ratio and minimum; $k_3$, one line; a matrix of losses by token, 0 outside the answers; its row sums over
# the lengths; the mean of those.
# </details>


# %% tags=["exercise"]
def grpo(new: torch.Tensor, old: torch.Tensor, ref: torch.Tensor, A: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The loss of GRPO, a scalar. log-probs and mask: [rows, length]; A: [rows, 1]."""
    # BEGIN SOLUTION
    ratio, d = (new - old).exp(), new - ref
    gain = torch.minimum(ratio * A, ratio.clamp(1 - CLIP, 1 + CLIP) * A)
    k3 = (-d).exp() - 1 + d
    by_token = (BETA * k3 - gain) * mask
    return (by_token.sum(1) / mask.sum(1)).mean()
    # END SOLUTION


# %%
check.q1(grpo)

# %% [markdown]
# Train with both. `REFERENCE = True` asks your loop for the log-probs of the model before training, so that the KL has
# something to pull towards.

# %%
loop = save_loop(weigh=normalized, loss=grpo) if check.q1.passed else load_loop()
loop.REFERENCE = True
_, log = loop.train(pick(1, 15), problems=pick(8, 200))
print("greedy:", " → ".join(f"{row['accuracy']:.0%}" for row in log if row["accuracy"] is not None))

# %% [markdown]
# ## q2 · As silent as you like
#
# ●●●○○ · 20 minutes
#
# "Our model solves 40% of the problems, so with groups of eight hardly any group will be silent." Show that this
# doesn't follow: make a data set with a given mean success rate **and** a given share of silent groups.
#
# A group of $G$ answers to a problem that is solved with probability $p$ is silent with probability $p^G + (1-p)^G$.
# You get the `mean` of the success rates, the expected `share` of silent groups (between what is possible with that
# mean and 1), and $G$. Return success rates `[problems]`, at most 1000 of them, that have both, each to within 0.01.
#
# <details><summary>Hint 1: a question</summary>
# With this mean, which data set has the fewest silent groups? And which has nothing else?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Mix the two extremes. Mean and expected share are both averages over problems, so they mix like paint: the mean of
# both parts is the same, and the share lies in between, wherever you want it.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Three kinds of problems in one tensor: some of rate 0, some of rate 1, the rest alike. One line for the share of the
# extreme problems in it, which solves a linear equation; one for how many of those are solved; one to join.
# </details>


# %% tags=["exercise"]
def data_set(mean: float, share: float, num_generations: int) -> torch.Tensor:
    """Success rates with this mean and this expected share of silent groups: [problems], at most 1000."""
    # BEGIN SOLUTION
    problems = 1000
    least = mean**num_generations + (1 - mean) ** num_generations  # when all problems are alike
    extreme = round(problems * (share - least) / (1 - least))
    solved = round(extreme * mean)
    alike = torch.full((problems - extreme,), mean)
    return torch.cat([torch.ones(solved), torch.zeros(extreme - solved), alike])
    # END SOLUTION


# %%
check.q2(data_set)

# %% [markdown]
# Here are three of your data sets. A report on accuracy couldn't tell them apart.

# %%
if check.q2.passed:
    _, axes = plt.subplots(1, 3, figsize=(10, 2.6), sharey=True, layout="constrained")
    for ax, share in zip(axes, (0.1, 0.5, 0.9), strict=True):
        success = data_set(0.4, share, 8)
        rewards = torch.rand(len(success), 8) < success[:, None]
        silent = (rewards == rewards[:, :1]).all(1).float().mean()
        ax.hist(success, bins=20, range=(0, 1), color=SKY, edgecolor="white")
        ax.set(xlabel="success rate", title=f"mean {success.mean():.2f}, drawn: {silent:.0%} silent")
    axes[0].set_ylabel("problems")
    plt.show()

# %% [markdown] tags=["solution"]
# The lowest share comes from problems that are all alike, because $p^G + (1-p)^G$ is convex in $p$: spreading the
# success rates around the same mean can only raise its average (Jensen's inequality). The highest comes from problems
# that are all solved always or never. So ask for the distribution of the success rates, never for the mean alone.

# %% [markdown]
# ## q3 · A penalty with the right gradient
#
# ●●●●○ · 20 minutes
#
# Section 4 of the lesson has three estimates of $\text{KL}(\pi \,\|\, \pi_\text{ref})$, and none is good for
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
check.q3(penalty)

# %% [markdown]
# Your penalty against $k_1$ and $k_3$, each alone in the loss: a policy over 50 tokens that starts far from its
# reference and samples 64 tokens per step. **Look for** which of them bring it back, and what your logged value
# scatters around.

# %%
if check.q3.passed:
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
# $k_1$ has no pull: its gradient is pure noise, and the policy wanders off. $k_3$ gets back too, here even sooner than
# yours: $\text{KL}(\pi_\text{ref} \,\|\, \pi)$ has its minimum at the same point. But its path is another: its pull on
# a token is $1 - e^{-d}$, at most 1 where the policy is too sure of a token, and without bound where it has given one
# up. Any term whose mean gradient is zero may be added to yours, such as a constant times the score. The KL is of the
# next token alone: what a token does to the states after it is left out, here and in GRPO's loss.

# %% [markdown]
# ## q4 · Where the estimate points
#
# ●●●●○ · 20 minutes
#
# A policy with one decision: action $y$ has the probability $\pi_y = \mathrm{softmax}(\text{logits})_y$ and earns
# $R_y$. A group is $G$ actions $y_1, \dots, y_G$, drawn independently. Its estimate of the gradient is
#
# $$\hat g = \frac{1}{G} \sum_{i=1}^{G} A_i\, \nabla_{\text{logits}} \log \pi_{y_i} , \qquad
# \frac{\partial \log \pi_y}{\partial \text{logit}_j} = [y = j] - \pi_j .$$
#
# Compute the **expectation** of $\hat g$ exactly, by going through all groups with their probabilities, for two kinds
# of advantages. Return `[2, actions]`: in the first row with $A_i = R_{y_i} - \bar R$, the mean being that of the whole
# group; in the second with the same divided by the deviation of the group (with $G - 1$, as in `torch.std`) plus
# `1e-4`.
#
# Shapes: `logits` `[actions]`, `rewards` `[actions]`, `num_generations` a number. At most a few thousand groups.
#
# <details><summary>Hint 1: a question</summary>
# How many different groups are there, if the order of the draws counts and an action may come twice? And what is the
# probability of one of them?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Make a table of all groups, one row of action numbers per group. The rest is indexing with that table: the groups'
# rewards, scores and probabilities.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# The table is `[groups, G]`. A matrix of scores has one row for each action; indexed with the table it is `[groups, G,
# actions]`. Average over the group, then add up over the groups with their probabilities as weights. Only the
# advantages differ between the two rows of the result.
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
# Your result, divided by the exact gradient $p(1-p)$, for a problem with two answers, a right one with probability $p$
# and a wrong one. **Look for** which lines are flat, and which aren't.

# %%
if check.q4.passed:
    grid = torch.linspace(0.03, 0.97, 48)
    fig, ax = plt.subplots(figsize=(7, 5))
    found = {}  # expected over exact gradient, by group size: [48, 2]
    for G in (2, 4, 8):
        pairs = [expected_gradients(torch.stack([p.logit(), 0 * p]), torch.tensor([1.0, 0]), G)[:, 0] for p in grid]
        found[G] = torch.stack(pairs) / (grid * (1 - grid))[:, None]
    for i, (kind, color) in enumerate((("centred", BLUE), ("normalised", GREEN))):
        for G, style in ((2, ":"), (4, "--"), (8, "-")):
            ax.plot(grid, found[G][:, i], style, color=color, label=f"{kind}, G = {G}")
    ax.set(xlabel="probability of the right answer", ylabel="expected / exact gradient", ylim=(0.4, 3.2))
    ax.set_title("How long the expected gradient is")
    ax.legend(ncols=2, loc="upper center")
    plt.show()

# %% [markdown] tags=["solution"]
# **The centred one is too short, by the same factor everywhere.** $\mathbb{E}[R_i \nabla \log \pi_{y_i}]$ is the
# gradient, and the baseline leaves only the term with the answer's own reward, $\frac{1}{G}$ of it. So the expectation
# is $(1 - 1/G)\,\nabla J$, and RLOO multiplies by $G / (G-1)$. **The normalised one has another factor at each $p$**,
# as soon as a group has more than three answers. It lifts hard and easy problems over those in the middle, the more the
# larger the group. No constant repairs that: it is another objective, and a topic of lesson 04. (In groups of two or
# three it's still a constant: all groups that disagree have the same deviation.)
