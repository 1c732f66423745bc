# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# Four puzzles for [lesson 03](../notebooks/03_grpo.ipynb): tell from a log which trainer wrote it, make a data set as
# silent as you are asked to, find four mistakes in a loss, and compute what GRPO's estimate points at. Write your code
# where it says `# YOUR CODE HERE`, then run the cell below it. Use `torch` and Python's own modules: the functions must
# stand by themselves.
#
# Of the three hints the first asks a question, the second has the idea, the third the shape of the answer.

# %%
import matplotlib.pyplot as plt
import torch

from rlcourse.course.checks import nb03 as check

torch.manual_seed(0)
BLUE, GREEN, VERMILION, PURPLE, SKY = "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
print("ready")

# %% [markdown]
# ## q1 · Whose log is it?
#
# ●●○○○ · 15 minutes
#
# Libraries that all say "GRPO" do not compute the same thing. You are given a log: the reward of each answer, and the
# number by which its log-prob was multiplied in the loss. Five trainers may have written it. Row `i` answers prompt
# `i // num_generations`.
#
# | number | the weight of an answer |
# | --- | --- |
# | 0 | its reward |
# | 1 | its reward less the mean of the batch |
# | 2 | its reward less the mean of its group |
# | 3 | GRPO: the same, over the deviation of the group plus 0.0001 |
# | 4 | GRPO with the wrong groups: it takes every `rows / num_generations`-th row for one |
#
# Two difficulties. Everybody scales the loss in a way of their own, so the weights are multiplied by an **unknown
# positive factor**. And the log was written to three digits. Return the number of the trainer.

# %%
rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 1, 0.5, 0, 0, 1])
weights = torch.tensor([1.29, -0.43, -0.43, -0.43, 0.43, 0.43, -1.29, 0.43, 0.225, -0.674, -0.674, 1.12])
print(torch.stack([rewards, weights]).view(2, 3, 4))

# %% [markdown]
# <details><summary>Hint 1: a question</summary>
# If you did not know the factor and had to say by hand which of 2 and 3 wrote the log above: which two numbers would
# you compare?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# You can compute what each of the five would have written for these rewards. What remains is to say which of five
# vectors points in the same direction as the log, nearly.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A list of five vectors `[rows]`, each made to have length 1, and a number that says how well each agrees with the log.
# No threshold is needed: take the best.
# </details>


# %% tags=["exercise"]
def whose_log(rewards: torch.Tensor, weights: torch.Tensor, num_generations: int) -> int:
    """The number of the trainer that wrote the log, 0 to 4. rewards, weights: [rows]."""
    # BEGIN SOLUTION
    groups, wrong = rewards.view(-1, num_generations), rewards.view(num_generations, -1)
    centered = groups - groups.mean(1, keepdim=True)
    mixed = wrong - wrong.mean(0)
    candidates = [
        rewards,
        rewards - rewards.mean(),
        centered.flatten(),
        (centered / (groups.std(1, keepdim=True) + 1e-4)).flatten(),
        (mixed / (wrong.std(0) + 1e-4)).flatten(),
    ]
    agreement = [torch.cosine_similarity(weights, candidate, dim=0) for candidate in candidates]
    return int(torch.stack(agreement).argmax())
    # END SOLUTION


# %%
check.q1(whose_log)

# %%
if check.q1.passed:
    print(f"the log above was written by trainer {whose_log(rewards, weights, 4)}")

# %% [markdown] tags=["solution"]
# **Two trainers that differ by a factor are one trainer**, for AdamW at least, which divides by the size of the
# gradient. That is why RLOO and a constant divisor are not in the table: no log could tell them from number 2. What can
# be told is what changes the **direction**: a baseline that is shared by prompts, groups that are not groups, and the
# deviation, which gives each group a scale of its own. In real code look at these three places first.

# %% [markdown]
# ## q2 · As silent as you like
#
# ●●●○○ · 20 minutes
#
# "Our model solves 40 % of the problems, so with groups of eight hardly any group will be silent." Show that this does
# not follow: make a data set with a given mean success rate **and** a given share of silent groups.
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
# Three data sets of yours that a report on accuracy could not tell apart.

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
# ## q3 · Four mistakes in a loss
#
# ●●●○○ · 25 minutes
#
# A colleague has written the loss of GRPO. Log-probs and `mask` are `[rows, length]`, `advantages` is `[rows]`.


# %%
def colleague(logprobs, old_logprobs, ref_logprobs, advantages, mask, clip, beta):
    ratio = (logprobs - old_logprobs).exp()
    surrogate = ratio.clamp(1 - clip, 1 + clip) * advantages[:, None]
    apart = logprobs - ref_logprobs
    kl = apart.exp() - 1 - apart
    return ((beta * kl - surrogate) * mask).sum() / mask.sum()


# %% [markdown]
# Training with it does not crash; it is only worse than it should be, and now and then all weights are nan. So she has
# built a bench: it pulls at one token at a time. **Look for** places that are flat and should not be, for the side on
# which the KL is steep, and for who pulls hardest.

# %% tags=["hide-input"]
# @title The bench: `bench(function)`


def bench(loss) -> None:
    """Draw how a loss pulls at tokens, and try padding."""
    one = torch.ones(1, 1, dtype=torch.bool)

    def pull(new: float, advantage: float, beta: float) -> float:
        """Minus the gradient in the log-prob of a single token; the old and the reference log-prob are 0."""
        leaf = torch.full((1, 1), new, requires_grad=True)
        zero = torch.zeros(1, 1)
        [slope] = torch.autograd.grad(loss(leaf, zero, zero, torch.tensor([advantage]), one, 0.2, beta), leaf)
        return -slope.item()

    _, axes = plt.subplots(1, 3, figsize=(12, 3), layout="constrained")
    apart = torch.linspace(-0.8, 0.8, 161).tolist()
    for advantage, color, style in ((1.0, BLUE, "-"), (-1.0, VERMILION, "--")):
        axes[0].plot(apart, [pull(d, advantage, 0.0) for d in apart], style, color=color, label=f"A = {advantage:+.0f}")
    axes[0].set(title="pull of one token, no KL", xlabel="log-prob, new minus old")
    axes[1].plot(apart, [pull(d, 0.0, 1.0) for d in apart], color=GREEN)
    axes[1].set(title="pull of the KL, advantage 0", xlabel="log-prob, new minus reference")
    lengths = torch.tensor([2, 4, 8, 16])
    mask = torch.arange(16) < lengths[:, None]
    leaf = torch.zeros(4, 16, requires_grad=True)
    [slope] = torch.autograd.grad(
        loss(leaf, torch.zeros(4, 16), torch.zeros(4, 16), torch.ones(4), mask, 0.2, 0.0), leaf
    )
    axes[2].bar([str(n) for n in lengths.tolist()], -slope.sum(1), color=PURPLE)
    axes[2].set(title="pull of a whole answer, A = +1", xlabel="its tokens")
    for ax in axes:
        ax.axhline(0, color="black", linewidth=0.8)
    axes[0].legend()
    plt.show()
    padding = torch.zeros(4, 16).masked_fill(~mask, -torch.inf)
    print(f"with padding of log-prob -inf the loss is {loss(padding, padding, padding, torch.ones(4), mask, 0.2, 0.1)}")


bench(colleague)

# %% [markdown]
# Write the loss without the four mistakes. What GRPO wants is in section 3 of the lesson. Two things the lesson's loop
# never met: where `mask` is false the log-probs may hold anything, `inf` and `nan` included; and a row without any real
# token adds 0 and **still counts** in the number of rows.
#
# <details><summary>Hint 1: a question</summary>
# A token with a positive advantage has become much less probable. Which way should the loss pull it, and does hers?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# One mistake for each picture and one for the line below. The first: what is taken the minimum of? The second: put a
# token into her KL that the new policy hardly ever writes, and one that the reference hardly ever writes. The third: in
# which order are the means taken? The last: 0 times inf is not 0, and neither is its gradient.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# The three inputs are cleaned before any arithmetic, so that masked places can do no harm in the backward pass either.
# Then a matrix of losses by token, 0 where masked; a mean along each row that survives a row of no tokens; a mean over
# rows.
# </details>


# %% tags=["exercise"]
def mended_loss(
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
    kl = (ref - new).exp() - 1 - (ref - new)
    by_token = (beta * kl - surrogate).masked_fill(~mask, 0.0)
    return (by_token.sum(1) / mask.sum(1).clamp(min=1)).mean()
    # END SOLUTION


# %%
check.q3(mended_loss)

# %% [markdown]
# The bench with your own version, finished or not.

# %%
try:
    bench(mended_loss)
except NotImplementedError:
    print("nothing to show yet")

# %% [markdown] tags=["solution"]
# **The clip alone** is flat on both sides. A token that has moved the wrong way, down at a positive advantage, gets no
# gradient and is never called back. The minimum keeps that side open. **The KL** was mirrored: hers is steep where the
# new policy writes a token more often than the reference and flat where it has given one up. k3 is the other way round.
# (Its mean over samples of the new policy is the KL; that of hers is not.) **The mean over all tokens** is DAPO's: long
# answers pull in proportion to their length. In GRPO each answer has the same share. **The padding** is multiplied by 0
# too late: `exp(inf - inf)` is nan already, and 0 times nan is nan. `torch.where` at the end would fix the value and
# leave the nan in the gradient.

# %% [markdown]
# ## q4 · What the estimate points at
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
# group; in the second with the same divided by the deviation of the group (with $G - 1$, as `torch.std` has it) plus
# `1e-4`.
#
# Shapes: `logits` `[actions]`, `rewards` `[actions]`, `num_generations` a number. At most some thousand groups.
#
# <details><summary>Hint 1: a question</summary>
# How many different groups are there, if the order of the draws counts and an action may come twice? And what is the
# probability of one of them?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Make a table of all groups, a row for each, of action numbers. All else is indexing with that table: the rewards of
# the groups, their scores, their probabilities.
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
# Your function for a problem with two answers, a right one with probability $p$ and a wrong one, over the exact
# gradient $p(1-p)$. **Look for** lines that are level, and for lines that are not.

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
# gradient, and of the baseline only the term with an answer's own reward is left, $\frac{1}{G}$ of it. So the
# expectation is $(1 - 1/G)\,\nabla J$, and RLOO multiplies by $G / (G-1)$. **The normalised one has another factor at
# each $p$**, as soon as a group has more than three answers. It lifts hard and easy problems over those in the middle,
# the more the larger the group. No constant repairs that: it is another objective, and a topic of lesson 04. (In groups
# of two or three it is a constant still: all that do not agree have the same deviation.)
