# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# Five exercises on [lesson 04](../notebooks/04_dr_grpo.ipynb). You will write
#
# - the three ways to make one loss of many tokens, and the weight that each gives to a token;
# - the weight of a prompt with and without the standard deviation;
# - the whole loss of Dr. GRPO;
# - the sequence ratio of GSPO.
#
# Each function takes and returns plain tensors and needs nothing but `torch`. Run the cell below your function: a card
# says what is right and what is not yet. Hints open one by one.

# %%
import matplotlib.pyplot as plt
import torch

from rlcourse.course.checks import nb04 as check
from rlcourse.measure.plots import BLUE, GREEN, VERMILION

# %% [markdown]
# ## q1 · Three aggregations
#
# ●●○○○ · 10 minutes
#
# The losses of single tokens stand in `values`, `[rows, length]`. `mask`, bool `[rows, length]`, is True on the tokens
# that the policy wrote; what stands elsewhere is arbitrary. Return one number:
#
# - `"sequence_mean"`: the mean of each row over its own tokens, then the mean over rows (GRPO);
# - `"token_mean"`: the mean over all tokens of the batch (DAPO);
# - `"constant"`: the sum over all tokens, divided by rows × `max_new_tokens` (Dr. GRPO).
#
# A row without a single token adds 0 and still counts as a row.
#
# <details><summary>Hint 1</summary>The three have the same sum on top where all rows are equally long. What differs is
# what it is divided by.</details>
# <details><summary>Hint 2</summary><code>values.masked_fill(~mask, 0.0)</code> makes the padding add nothing. The
# length of each row is <code>mask.sum(1)</code>; a length of 0 must not divide.</details>
# <details><summary>Hint 3</summary>sequence_mean is <code>(values.sum(1) / mask.sum(1).clamp(min=1)).mean()</code>. The
# other two are <code>values.sum()</code> over <code>mask.sum()</code> and over <code>len(mask) * max_new_tokens</code>.
# </details>


# %% tags=["exercise"]
def aggregate(values, mask, how, max_new_tokens):
    """One number from values by token: values [rows, length], mask bool [rows, length] → scalar."""
    # BEGIN SOLUTION
    values = values.masked_fill(~mask, 0.0)
    if how == "sequence_mean":
        return (values.sum(1) / mask.sum(1).clamp(min=1)).mean()
    if how == "token_mean":
        return values.sum() / mask.sum()
    return values.sum() / (len(mask) * max_new_tokens)
    # END SOLUTION


# %%
check.q1(aggregate)

# %% [markdown] tags=["solution"]
# `masked_fill` and not `values * mask`: a product keeps a nan or an infinity that stands at the padding. The clamp is
# for rows without a token, whose sum is 0 already.

# %% [markdown]
# ## q2 · The weight of one token
#
# ●●●○○ · 10 minutes
#
# The loss is an aggregation of $-A_i \log \pi(o_{i,t})$. What multiplies $-A_i \nabla \log \pi(o_{i,t})$ in its
# gradient is the weight of the token. Return it for every token, `[rows, length]`, 0 on the padding, from `mask`,
# `how` and `max_new_tokens` as in q1.
#
# <details><summary>Hint 1</summary>Each aggregation is a weighted sum of the values. Read the weight of one value off
# the formula; no gradient has to be computed.</details>
# <details><summary>Hint 2</summary>In sequence_mean a value is divided twice: by the length of its row, and by the
# number of rows. In the other two all tokens have the same weight.</details>
# <details><summary>Hint 3</summary>All three are <code>mask / divisor</code>, where the divisor is
# <code>rows * length of the row</code> as a column, <code>mask.sum()</code>, or
# <code>rows * max_new_tokens</code>.</details>


# %% tags=["exercise"]
def token_weights(mask, how, max_new_tokens):
    """The weight of each token in the gradient: mask bool [rows, length] → float [rows, length], 0 where masked."""
    # BEGIN SOLUTION
    if how == "sequence_mean":
        return mask / (len(mask) * mask.sum(1, keepdim=True).clamp(min=1))
    if how == "token_mean":
        return mask / mask.sum()
    return mask / (len(mask) * max_new_tokens)
    # END SOLUTION


# %%
check.q2(token_weights)

# %% [markdown]
# With your function, three answers of 4, 12 and 40 tokens. Look at what the colour of the longest row does.

# %%
if check.q2.passed:
    mask = torch.arange(40) < torch.tensor([4, 12, 40])[:, None]
    fig, axes = plt.subplots(3, 1, figsize=(8, 4), layout="constrained", sharex=True)
    for ax, how in zip(axes, ["sequence_mean", "token_mean", "constant"], strict=True):
        picture = ax.imshow(token_weights(mask, how, 60), aspect="auto", cmap="cividis", vmin=0, vmax=0.085)
        ax.set_title(how, fontsize=11)
        ax.set_yticks(range(3), ["4 tokens", "12 tokens", "40 tokens"])
    axes[-1].set_xlabel("token")
    fig.colorbar(picture, ax=axes, label="weight in the gradient")
    plt.show()

# %% [markdown] tags=["solution"]
# In the first row of the picture the long answer is almost black: each of its tokens weighs a tenth of a token of the
# short one. In the other two all tokens have one colour. The colours of these two differ because 56 tokens and 3 × 60
# places are different divisors; that is a factor of the whole step and no preference for anything.

# %% [markdown]
# ## q3 · The weight of a prompt
#
# ●●●○○ · 15 minutes
#
# A group has `n` answers; `k` of them are right and earn 1, the others earn 0. The total weight of the group in the
# update is $\sum_i |A_i|$. Return it for each group, without a loop over answers, as `[2, groups]`: first for Dr. GRPO
# (the reward less the mean of the group), then for GRPO (that divided by the standard deviation of a sample, with $n -
# 1$). `successes` is `[groups]`, integers from 0 to n. A group of identical rewards weighs 0 in both.
#
# <details><summary>Hint 1</summary>With p = k / n, a right answer has the advantage 1 - p and a wrong one -p. How many
# are there of each?</details>
# <details><summary>Hint 2</summary>The sum is k (1 - p) + (n - k) p = 2 n p (1 - p). The variance of a sample is
# p (1 - p) n / (n - 1).</details>
# <details><summary>Hint 3</summary>Divide the first by the root of the second and simplify before you write it: what is
# left is 2 times the root of n (n - 1) p (1 - p), and it never divides 0 by 0.</details>


# %% tags=["exercise"]
def group_weights(successes, n):
    """Sum of |A| by group: successes int [groups], of n answers each → float [2, groups], Dr. GRPO then GRPO."""
    # BEGIN SOLUTION
    p = successes / n
    centered = 2 * n * p * (1 - p)
    normalized = 2 * (n * (n - 1) * p * (1 - p)).sqrt()
    return torch.stack([centered, normalized])
    # END SOLUTION


# %%
check.q3(group_weights)

# %%
if check.q3.passed:
    counts = torch.arange(17)
    weights = group_weights(counts, 16)
    shares = weights / weights.sum(1, keepdim=True)
    fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
    ax.plot(counts / 16, shares[0], "o-", color=BLUE, label="Dr. GRPO: p (1 - p)")
    ax.plot(counts / 16, shares[1], "v--", color=GREEN, label="GRPO: its root")
    ax.set_xlabel("share of right answers in the group")
    ax.set_ylabel("share of the update")
    ax.set_title("If every success rate were as frequent as any other")
    ax.legend(frameon=False)
    plt.show()

# %% [markdown] tags=["solution"]
# Dividing by the deviation flattens the curve: groups with one right or one wrong answer gain, those in the middle
# lose. It cannot give weight to groups at 0 and 1.

# %% [markdown]
# ## q4 · The loss of Dr. GRPO
#
# ●●●○○ · 20 minutes
#
# Put it together. `logprobs` and `old_logprobs` are `[rows, length]`, `rewards` `[rows]`, `mask` bool `[rows, length]`;
# rows come group after group, `num_generations` to a group.
#
# $$L = -\frac{1}{\text{rows} \cdot \text{max\_new\_tokens}} \sum_i \sum_t
# \min\left(r_{i,t} A_i,\ \mathrm{clip}(r_{i,t}, 1 - \epsilon, 1 + \epsilon) A_i\right)$$
#
# with $r_{i,t} = \pi(o_{i,t}) / \pi_{old}(o_{i,t})$, $\epsilon$ = `clip` and $A_i$ the reward less the mean of its
# group.
#
# <details><summary>Hint 1</summary>Four lines: advantages, ratio, the smaller of two products, the sum over a
# constant.</details>
# <details><summary>Hint 2</summary><code>rewards.view(-1, num_generations)</code> has a group in each row. The
# advantages need a last dimension of 1 to multiply <code>[rows, length]</code>.</details>
# <details><summary>Hint 3</summary><code>gain = torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)</code>,
# then <code>-gain.masked_fill(~mask, 0.0).sum() / (len(mask) * max_new_tokens)</code>.</details>


# %% tags=["exercise"]
def dr_grpo_loss(logprobs, old_logprobs, rewards, mask, num_generations, max_new_tokens, clip=0.2):
    """The loss to be minimised, a scalar with a gradient to `logprobs`."""
    # BEGIN SOLUTION
    groups = rewards.view(-1, num_generations)
    advantages = (groups - groups.mean(1, keepdim=True)).view(-1, 1)
    ratio = (logprobs - old_logprobs).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -gain.masked_fill(~mask, 0.0).sum() / (len(mask) * max_new_tokens)
    # END SOLUTION


# %%
check.q4(dr_grpo_loss)

# %% [markdown] tags=["solution"]
# GRPO differs in two places: `/ (groups.std(1, keepdim=True) + 1e-4)` after the second line, and a mean over each row
# in the last. Both deletions make the code shorter.

# %% [markdown]
# ## q5 · The sequence ratio of GSPO
#
# ●●○○○ · 10 minutes
#
# GSPO gives a whole answer one importance ratio, the geometric mean of those of its tokens:
#
# $$s_i = \left(\frac{\pi(o_i)}{\pi_{old}(o_i)}\right)^{1/|o_i|}
# = \exp\left(\frac{1}{|o_i|} \sum_t \log \frac{\pi(o_{i,t})}{\pi_{old}(o_{i,t})}\right)$$
#
# Return it as `[rows]`, with a gradient to `logprobs`. A row without a token has the ratio 1.
#
# <details><summary>Hint 1</summary>Work with logarithms: the product becomes a sum.</details>
# <details><summary>Hint 2</summary>The mean is over the tokens of the row, not over the width of the tensor.</details>
# <details><summary>Hint 3</summary><code>(logprobs - old_logprobs).masked_fill(~mask, 0.0).sum(1)</code>, divided by
# <code>mask.sum(1).clamp(min=1)</code>, then <code>.exp()</code>.</details>


# %% tags=["exercise"]
def sequence_ratio(logprobs, old_logprobs, mask):
    """One ratio a row: logprobs, old_logprobs [rows, length], mask bool [rows, length] → [rows]."""
    # BEGIN SOLUTION
    difference = (logprobs - old_logprobs).masked_fill(~mask, 0.0)
    return (difference.sum(1) / mask.sum(1).clamp(min=1)).exp()
    # END SOLUTION


# %%
check.q5(sequence_ratio)

# %% [markdown]
# With your function: token ratios scatter around 1 by the same amount in every answer. What happens to the ratio of the
# whole answer as it gets longer, with the root and without?

# %%
if check.q5.passed:
    torch.manual_seed(0)
    lengths = torch.tensor([1, 4, 16, 64, 256]).repeat_interleave(40)
    mask = torch.arange(256) < lengths[:, None]
    new, old = 0.1 * torch.randn(200, 256), torch.zeros(200, 256)
    ratio = sequence_ratio(new, old, mask)
    fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
    ax.scatter(lengths * 1.06, ratio**lengths, s=14, color=VERMILION, alpha=0.6, label="product of the token ratios")
    ax.scatter(lengths / 1.06, ratio, s=14, color=BLUE, alpha=0.6, label="with the root: GSPO")
    ax.set(xscale="log", yscale="log", xlabel="tokens in the answer", ylabel="ratio of the answer")
    ax.set_title("Token ratios exp(0.1 × normal), 40 answers of each length")
    ax.legend(frameon=False)
    plt.show()

# %% [markdown] tags=["solution"]
# The product runs away with the length; no clip range would fit all of them. The root makes it narrower instead, which
# is why GSPO clips at some 0.0003 where PPO clips at 0.2.
