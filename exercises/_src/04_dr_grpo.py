# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# First make the two deletions of [lesson 04](../notebooks/04_dr_grpo.ipynb) in your loop. Then four puzzles, one of
# them the debugging project of lessons 01 to 04: a colleague's step with six mistakes in it. Write your code where it
# says `# YOUR CODE HERE`, then run the cell below it. Use `torch` and Python's own modules: each function must be
# self-contained.

# %%
import matplotlib.pyplot as plt
import torch

from rlcourse.course import pick
from rlcourse.course.checks import nb04 as check
from rlcourse.course.own import load_loop, save_loop
from rlcourse.measure.plots import BLUE, GREEN, ORANGE, VERMILION

CLIP, LIMIT = 0.2, 80  # PPO's clip range; tokens per answer at most
torch.manual_seed(0)
print("ready")

# %% [markdown]
# ## q1 · Two deletions in your loop
#
# ●●○○○ · 10 minutes
#
# Here is GRPO, as your loop has it after lesson 03:
#
#     ratio, d = (new - old).exp(), new - ref
#     gain = torch.minimum(ratio * A, ratio.clamp(1 - CLIP, 1 + CLIP) * A)
#     k3 = (-d).exp() - 1 + d
#     by_token = (BETA * k3 - gain) * mask
#     return (by_token.sum(1) / mask.sum(1)).mean()
#
# Make it Dr. GRPO: without the KL and without the answers' lengths. The divisor is $N T$ again, with $T$ = `LIMIT`. The
# other deletion, in `weigh`, is done for you below.
#
# <details><summary>Hint 1: a question</summary>
# Which lines mention a length, which the reference?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Without the row means, the loss is a sum over all tokens, divided by something that doesn't depend on the answers.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Three lines. You've written them before, in lesson 02.
# </details>


# %% tags=["exercise"]
def dr_grpo(
    new: torch.Tensor, old: torch.Tensor, ref: torch.Tensor, A: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """The loss of Dr. GRPO, a scalar. log-probs and mask: [rows, length]; A: [rows, 1]."""
    # BEGIN SOLUTION
    ratio = (new - old).exp()
    gain = torch.minimum(ratio * A, ratio.clamp(1 - CLIP, 1 + CLIP) * A)
    return -(gain * mask).sum() / (len(mask) * LIMIT)
    # END SOLUTION


# %%
check.q1(dr_grpo)


# %%
def centered(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """Each reward minus the mean of its group: [rows]."""
    groups = rewards.view(-1, group)
    return (groups - groups.mean(1, keepdim=True)).flatten()


loop = save_loop(weigh=centered, loss=dr_grpo) if check.q1.passed else load_loop()
_, log = loop.train(pick(1, 15), problems=pick(8, 200))
print("greedy:", " → ".join(f"{row['accuracy']:.0%}" for row in log if row["accuracy"] is not None))

# %% [markdown] tags=["solution"]
# What's left of three lessons is a clip that never acts with one update per rollout, and lesson 01's advantages times
# $1 - 1/G$. That's the point: this loop follows the gradient of the expected reward.

# %% [markdown]
# ## q2 · What does this loss divide by?
#
# ●●●○○ · 15 minutes
#
# A trainer whose code you can't read calls itself "GRPO-style". You can look at one thing: the gradient of its loss
# with respect to the log-prob of each token, `[rows, length]`, at the first update after sampling, when all ratios are
# still 1. Both of GRPO's divisions may be in it, or one, or none, all multiplied by an unknown positive factor.
#
# Return a tensor of two numbers, 0 or 1: does it divide by the length of the answer, and does it divide by the standard
# deviation of the group? `rewards` is `[rows]`, group after group, `mask` bool `[rows, length]`. Some groups may have
# no signal, and some answers no tokens. Here is one of the gradients, the first token of each answer:

# %%
rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 0])
lengths = torch.tensor([6, 3, 12, 4, 10, 5, 8, 2])
secret = torch.tensor([-0.0250, 0.0167, 0.0042, 0.0125, -0.0100, -0.0200, 0.0125, 0.0500])
for row in zip(range(8), rewards, lengths, secret, strict=True):
    print("answer {}: reward {:.0f}, {:2} tokens, gradient of its first token {:+.4f}".format(*row))

# %% [markdown]
# <details><summary>Hint 1: a question</summary>
# An unknown factor cancels in a quotient. Which two answers would you divide by each other to see the length and
# nothing else? And which to see the deviation?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# There are only four suspects. You can compute what each of them would have given, up to the factor, and see which one
# the gradient is proportional to.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A loop over the four combinations. Each gives one table of the shape of the gradient, 0 on padding and nowhere nan.
# Compare directions and not sizes: the largest cosine wins. Return its two flags.
# </details>


# %% tags=["exercise"]
def divisions(gradient: torch.Tensor, rewards: torch.Tensor, mask: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Whether the loss divides by the length and by the deviation: two whole numbers, 0 or 1."""
    # BEGIN SOLUTION
    groups = rewards.view(-1, num_generations)
    centered = groups - groups.mean(1, keepdim=True)
    scaled = centered / groups.std(1, keepdim=True).clamp(min=1e-8)
    found, best = None, -2.0
    for by_length in (0, 1):
        for by_std in (0, 1):
            advantages = (scaled if by_std else centered).view(-1, 1)
            expected = -advantages * mask / (mask.sum(1, keepdim=True).clamp(min=1) if by_length else 1)
            cosine = torch.cosine_similarity(expected.flatten(), gradient.flatten(), dim=0).item()
            if cosine > best:
                found, best = torch.tensor([by_length, by_std]), cosine
    return found
    # END SOLUTION


# %%
check.q2(divisions)

# %%
if check.q2.passed:
    mask = torch.arange(12) < lengths[:, None]
    by_length, by_std = (bool(flag) for flag in divisions(secret[:, None] * mask, rewards, mask, 4))
    print(f"The eight answers above: by length {by_length}, by deviation {by_std}")

# %% [markdown] tags=["solution"]
# Two answers of one group with the same reward have the same advantage: if their gradients differ, it is the length. By
# hand, for the eight above: answers 1 and 2 have 3 and 12 tokens and 0.0167 against 0.0042, four to one, so the length
# is in. For the deviation take the length out first: 0.0167 × 3 = 0.05 for a wrong answer where one of four is right,
# and 0.0125 × 8 = 0.1 where two are. That's 1/4 to 1/2, just the rewards minus their mean. So this is GRPO without the
# deviation. In a library, look for the reduction in its loss, not for its name. The unknown factor itself hardly
# matters: AdamW divides by the size of the gradient, so two losses that differ by a constant train alike.

# %% [markdown]
# ## q3 · The weight of a prompt
#
# ●●●○○ · 15 minutes
#
# A group has `n` answers; `k` of them are right and earn 1, the others earn 0. Take $\sum_i |A_i|$ as the group's
# weight in the update. Return it for many groups at once, without a loop and without making the rewards, as
# `[2, groups]`: first for Dr. GRPO (the reward minus the mean of the group), then for GRPO (that, divided by the
# standard deviation of the group, with $n - 1$). `successes` is `[groups]`, whole numbers from 0 to n. A group of equal
# rewards weighs 0 in both.
#
# <details><summary>Hint 1: a question</summary>
# With p = k / n, what is the advantage of a right answer and of a wrong one, and how many are there of each?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Right answers and wrong ones have the same total weight, so one of the two is enough. For the second row simplify on
# paper: the variance p (1 − p) is in the numerator, and its root in the denominator.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Two lines, in p and n alone. Simplify until neither divides by anything that can be 0.
# </details>


# %% tags=["exercise"]
def group_weights(successes: torch.Tensor, n: int) -> torch.Tensor:
    """Sum of |A| by group: successes [groups], of n answers each; float [2, groups], Dr. GRPO, then GRPO."""
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
    shares = 100 * weights / weights.sum(1, keepdim=True)
    fig, ax = plt.subplots()
    ax.plot(counts / 16, shares[0], "o-", color=BLUE, label="Dr. GRPO")
    ax.plot(counts / 16, shares[1], "v--", color=GREEN, label="GRPO")
    ax.set(xlabel="share of right answers in the group", ylabel="share of the update, %")
    ax.set_title("If every success rate were as frequent as any other")
    ax.legend()
    plt.show()

# %% [markdown] tags=["solution"]
# Dividing by the deviation flattens the curve: groups with one right or one wrong answer gain, those in the middle
# lose. It cannot give weight to groups at 0 and 1.

# %% [markdown]
# ## q4 · The project: six mistakes in a step
#
# ●●●●○ · 40 minutes
#
# A colleague has written the whole step in seven lines. "It's Dr. GRPO with a clip," she says. "It runs, and it hardly
# learns." Each of the four lessons has something to say about it. `logits` `[rows, width, vocabulary]` belong to `ids`
# `[rows, width]`; row `i` answers prompt `i // num_generations`. `starts` and `lengths` `[rows]` say where the answer
# begins and how many tokens it has, its end token included. `old` `[rows, width - 1]` are the log-probs of `ids[:, 1:]`
# under the policy that sampled, and right.


# %%
def colleague(logits, ids, starts, lengths, old, rewards, num_generations, max_new_tokens, clip):
    position = torch.arange(1, ids.shape[1])
    mask = (position >= starts[:, None]) & (position < (starts + lengths)[:, None] - 1)
    new = logits[:, 1:].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    groups = rewards.view(num_generations, -1)
    advantages = ((groups - groups.mean(0)) / (groups.std(0) + 1e-4)).view(-1, 1)
    gain = (new - old).exp().clamp(1 - clip, 1 + clip) * advantages
    return -(gain * mask).sum() / mask.sum()


# %% [markdown]
# She has measured six things. **Look for** the first that's off, find its line, and measure again: one mistake can hide
# another.

# %% tags=["hide-input"]
# @title Six measurements: `measure(function)`


def measure(loss) -> None:
    """Print six numbers of a step, and what each should be."""
    g = torch.Generator().manual_seed(4)
    ids, logits = torch.randint(0, 5, (4, 8), generator=g), torch.randn(4, 8, 5, generator=g)
    starts, lengths = torch.tensor([2, 2, 3, 3]), torch.tensor([3, 6, 4, 5])
    old = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0])  # the second prompt's answers are both right

    def slope(rows=slice(None), factor=1.0, logits=logits):
        """The gradient in the logits, [rows, width, vocabulary]."""
        leaf = logits[rows].clone().requires_grad_()
        parts = (x[rows] for x in (ids, starts, lengths, old, factor * rewards))
        return torch.autograd.grad(loss(leaf, *parts, 2, 8, 0.2), leaf)[0]

    same, risen = slope(), logits.clone()
    risen[1, 1, ids[1, 2]] += 2.0  # the first token of the wrong answer has become more probable
    rows = (
        ("1 gradient at the output that predicts an answer's first token", same[0, 1].abs().sum(), "above 0"),
        ("2 gradient at the output that predicts its end token", same[0, 3].abs().sum(), "above 0"),
        ("3 a prompt whose answers are all right: largest gradient", same[2:].abs().max(), "0"),
        ("4 push on a wrong token that has become more probable", slope(logits=risen)[1, 1].abs().sum(), "above 0"),
        ("5 rewards ten times as large: gradient times", slope(factor=10.0)[1].norm() / same[1].norm(), "10"),
        (
            "6 half of the batch alone: gradient times",
            slope(slice(0, 2))[1].norm() / same[1].norm(),
            "2, half the rows",
        ),
    )
    for text, value, should in rows:
        print(f"{text}: {value:.3g} (should be {should})")


measure(colleague)

# %% [markdown]
# Write the step that she meant:
#
# $$\mathcal{L} = -\frac{1}{\text{rows} \cdot \text{max\_new\_tokens}} \sum_i \sum_t m_{i,t}
# \min\big(\rho_{i,t} A_i,\ \mathrm{clip}(\rho_{i,t}, 1 - \varepsilon, 1 + \varepsilon)\, A_i\big),$$
#
# with $A_i$ the reward minus the mean of its group and $\varepsilon$ = `clip`.
#
# <details><summary>Hint 1: a question</summary>
# Which of the seven lines can be to blame for each measurement? Two of them have two mistakes.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Go through the loop that you built: shift, mask, groups, then lesson 02's minimum and lesson 04's two deletions. Print
# each tensor for two answers that you make up.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Her seven lines and one more. The number of changed characters is small: an end, a slice, a view with its two means, a
# division less, a minimum, a divisor.
# </details>


# %% tags=["exercise"]
def mended_step(
    logits: torch.Tensor,
    ids: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    old: torch.Tensor,
    rewards: torch.Tensor,
    num_generations: int,
    max_new_tokens: int,
    clip: float,
) -> torch.Tensor:
    """The loss of a step, a scalar with a gradient to `logits`."""
    # BEGIN SOLUTION
    position = torch.arange(1, ids.shape[1])
    mask = (position >= starts[:, None]) & (position < (starts + lengths)[:, None])
    new = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    groups = rewards.view(-1, num_generations)
    advantages = (groups - groups.mean(1, keepdim=True)).view(-1, 1)
    ratio = (new - old).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -(gain * mask).sum() / (len(mask) * max_new_tokens)
    # END SOLUTION


# %%
check.q4(mended_step)

# %% [markdown]
# The six measurements with your version, finished or not:

# %%
try:
    measure(mended_step)
except NotImplementedError:
    print("nothing to measure yet")

# %% [markdown] tags=["solution"]
# **1** is the shift: her output at position $t$ is scored by the token at $t$. **2** is the mask that ends one token
# early, so that nobody is ever paid for stopping, and answers run on. **3** is the groups: a prompt without signal got
# one from the other. **4** is the missing minimum: a wrong token that's already more probable is the one that most
# needs to be pushed down. **5** is the deviation: a trainer that divides by it can't tell rewards of 0 and 10 from
# rewards of 0 and 1. **6** is the divisor, drawn with the answers: a library that accumulates gradients this way trains
# another loss with every micro-batch size. None of them crashes, and several can't be seen in a curve. Measure.

# %% [markdown]
# ## q5 · Which recipes make answers longer?
#
# ●●●●○ · 20 minutes
#
# The coin policy of the lesson: after each token an answer ends with probability $q = \sigma(\theta)$, else it goes on.
# But now there is a limit, as there always is: what has not ended after `limit` tokens is cut off. A recipe multiplies
# **every** token of an answer by a weight. `weights[L - 1]` is for answers that end with their token number $L$, so
# `weights` is `[limit]`; `cut` is for those that are cut off. GRPO has `weights` $= 1/L$ and `cut` = 1/limit; Dr. GRPO
# has the same number everywhere; DAPO leaves out answers that were cut off, `cut` = 0.
#
# All answers have $A = 1$. Return the mean of the gradient with respect to $\theta$, $\mathbb{E}\big[w(y)\,
# \frac{d}{d\theta} \log \pi(y)\big]$, as a number. Where it's positive, these right answers learn to stop sooner. With
# $A = -1$ the sign flips: there, wrong answers learn to run on.
#
# <details><summary>Hint 1: a question</summary>
# An answer is cut off after `limit` tokens. Which decisions has it made? How do they differ from those of an answer
# that ends with token number `limit`?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# There are only limit + 1 possible answers. Write down the probability and the score of each. With respect to θ, each
# decision to go on contributes −q to the score, the one to stop 1 − q.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A sum of probability × weight × score over the lengths 1 to limit, plus one term for what is cut off. Try it on a
# constant: then the sum has to be 0, for every q. (There is a shorter way. Can you swap expectation and derivative?)
# </details>


# %% tags=["exercise"]
def drift(weights: torch.Tensor, cut: float, q: float) -> float:
    """The mean gradient with respect to theta, a number. weights: [limit]; q: between 0 and 1."""
    # BEGIN SOLUTION
    length = torch.arange(1, len(weights) + 1, dtype=torch.float64)
    ended = ((1 - q) ** (length - 1) * q * weights * (1 - q * length)).sum().item()
    return ended + (1 - q) ** len(weights) * cut * -q * len(weights)
    # END SOLUTION


# %%
check.q5(drift)

# %% [markdown]
# Your function on four recipes, over the mean length that the policy would have without a limit. Zero is fair; above
# it, wrong answers grow. Each recipe is scaled so that its mean weight is 1.

# %%
if check.q5.passed:
    limit = 40
    L = torch.arange(1, limit + 1, dtype=torch.float64)
    recipes = {
        "GRPO: 1 / L": (1 / L, 1 / limit, GREEN, "-"),
        "1 / √L": (1 / L.sqrt(), 1 / limit**0.5, ORANGE, "--"),
        "Dr. GRPO: 1": (torch.ones(limit), 1.0, BLUE, "-."),
        "1, those cut off left out": (torch.ones(limit), 0.0, VERMILION, ":"),
    }
    fig, ax = plt.subplots()
    mean_lengths = torch.linspace(2, 60, 59)
    for name, (weights, cut, color, style) in recipes.items():
        drifts = []
        for mean_length in mean_lengths.tolist():
            q = 1 / mean_length
            chances = torch.cat([q * (1 - q) ** (L - 1), torch.tensor([(1 - q) ** limit])])
            scale = (chances * torch.cat([weights, torch.tensor([cut])])).sum().item()
            drifts.append(drift(weights / scale, cut / scale, q))
        ax.plot(mean_lengths, drifts, style, color=color, label=name)
    ax.set(xlabel="mean length without a limit, tokens (1 / q)", ylabel="drift", ylim=(-0.05, 1.0))
    ax.set_title("A limit of 40 tokens")
    ax.legend(loc="upper left", ncols=2)
    plt.show()

# %% [markdown] tags=["solution"]
# The shorter way: $\mathbb{E}[w\, \frac{d}{d\theta} \log \pi] = \frac{d}{d\theta} \mathbb{E}[w]$. A recipe has no drift
# for any $q$ only if $\mathbb{E}[w]$ does not depend on $q$, and with `limit` + 1 different answers that means one
# weight for all. **Fair is constant, and nothing else is.** Leaving out what was cut off looks innocent, and is the
# worst of the four once nearly half of the answers are cut off: nothing tells the policy any more that running on was
# bad. DAPO does it on purpose, for answers whose reward is not known, and has a penalty on length to make up for it.

# %% tags=["solution"]
weights = torch.rand(5, dtype=torch.float64)
theta = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
q, length = theta.sigmoid(), torch.arange(1, 6)
mean_weight = (q * (1 - q) ** (length - 1) * weights).sum() + (1 - q) ** 5 * 0.3
[short_way] = torch.autograd.grad(mean_weight, theta)
print(f"the sum {drift(weights, 0.3, q.item()):.6f}, the derivative of the mean weight {short_way:.6f}")
