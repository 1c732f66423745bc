# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# Three short exercises for [lesson 00](../notebooks/00_start_here.ipynb). Write your code where it says
# `# YOUR CODE HERE`, then run the cell below it: a card shows which cases pass and which don't yet.
#
# Each exercise has three hints: the first asks a question, the second gives the idea, the third outlines the answer.
# Open the next one only if you're still stuck.

# %%
import itertools
import math
import re

import matplotlib.pyplot as plt
import torch

from rlcourse.course.checks import nb00 as check

torch.manual_seed(0)
print("ready")

# %% [markdown]
# ## q1 · The final number, read strictly
#
# ●●○○○ · 10 minutes
#
# Every reward in this course begins with reading a number, and the model in training will find any text that's read
# too kindly. Write the strict reading of an answer, a little simpler than the package's. Return the number of the
# **last** line that reads `#### NUMBER`, as a float, and `nan` if there is none.
#
# - Four `#` at the beginning of a line, at least one space, a number, then nothing but spaces.
# - A number is digits with an optional `-` before and an optional decimal part (`3.50`). Commas may group by threes:
#   `1,234` is 1234. Nothing else is a number: not `1,23`, not `1234,567`, not `+5`, `.5` or `5.`, not `twelve`.
# - A line that can't be read is skipped, and an earlier one that can be read counts.
#
# <details><summary>Hint 1: a question</summary>
# Which line of `#### 4⏎#### 5⏎#### 6 or 7` (⏎: a new line) is the one to return, and in which order would you look at
# them to find it soonest?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Judge each line as a whole: a regular expression that must match **all** of it leaves no room for anything after the
# number. The difficult part of the number is the commas: either there are none, or every group after the first has
# three digits.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A loop over the lines, from the last to the first, with one `re.fullmatch` in it. The pattern has four pieces: the
# announcement, an optional sign, the two ways to write an integer as alternatives, an optional decimal part. What is
# matched loses its commas and becomes a float.
# </details>


# %% tags=["exercise"]
def final_number(text: str) -> float:
    """The number of the last line `#### NUMBER` of a text, or nan if there is none."""
    # BEGIN SOLUTION
    pattern = r"#### +(-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?) *"
    for line in reversed(text.split("\n")):
        match = re.fullmatch(pattern, line)
        if match:
            return float(match[1].replace(",", ""))
    return math.nan
    # END SOLUTION


# %%
check.q1(final_number)

# %% [markdown]
# Try it on texts of your own: what would you write if you wanted the reward without solving the problem?

# %%
if check.q1.passed:
    for text in ("2+3=5\n#### 5", "#### 4\nNo.\n#### 5", "The answer is 5.", "#### 5 or 6"):
        print(f"{text!r:28} → {final_number(text)}")

# %% [markdown] tags=["solution"]
# **Why from the end.** A model that corrects itself writes two such lines and means the second. **Why the whole line.**
# With `re.search` instead of `re.fullmatch`, `#### 5 or 6` is read as 5: a policy could hedge. **Why `[0-9]` and not
# `\d`.** In Python `\d` also matches digits of other scripts. A tokenizer can write those, and `float` even accepts
# them, so it is a matter of taste here; the package takes ASCII digits alone.

# %% [markdown]
# ## q2 · Best of k
#
# ●●●○○ · 20 minutes
#
# pass@k counts a problem as solved if *any* of `k` samples is right. But you can only hand in one. Suppose a *score*
# picks it: of `k` samples, the one with the highest score is handed in. How often is it right?
#
# You have `n` samples of each problem: `right`, bool `[problems, n]`, and `score`, float `[problems, n]`, all different
# within a problem. Return the share of right answers when `k` of the `n` samples are drawn (none twice), averaged
# **exactly** over all possible draws, then over the problems. Return a float. `n` goes up to 4,000, so you can't list
# the draws.
#
# <details><summary>Hint 1: a question</summary>
# Take one sample. In which draws is it the one handed in? Which of the other samples may be in such a draw?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# If $r$ samples of the problem score lower, the other $k-1$ in the draw are from those $r$. Count these draws and
# divide by the number of all draws. Binomial coefficients of Python integers are exact however large they are; as
# floats they overflow.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A list of `n` weights, the same for all problems: how often the sample of rank 0, 1, 2, … is handed in. Then sort
# `right` by score, and add up the weights of what's right.
# </details>


# %% tags=["exercise"]
def best_of_k(right: torch.Tensor, score: torch.Tensor, k: int) -> float:
    """How often the best scored of k samples is right. right: bool [problems, n]; score: [problems, n]; k: 1 to n."""
    # BEGIN SOLUTION
    n = right.shape[1]
    weights = torch.tensor([math.comb(rank, k - 1) / math.comb(n, k) for rank in range(n)], dtype=torch.float64)
    by_rank = right.gather(1, score.argsort(1))
    return (by_rank * weights).sum(1).mean().item()
    # END SOLUTION


# %%
check.q2(best_of_k)

# %% [markdown]
# Three scores for the same samples: one is never wrong, one is noisy, and one is as noisy but gives its highest scores
# to one wrong answer in twenty. **Look for** which of the three curves is pass@k, and what more samples do to the
# third.

# %%
if check.q2.passed:
    right = torch.rand(300, 64) < torch.rand(300, 1) ** 2  # a hard problem or an easy one
    noisy = right + 0.7 * torch.randn(300, 64)
    fooled = torch.where(~right & (torch.rand(300, 64) < 0.05), noisy + 5, noisy)
    ks = [1, 2, 4, 8, 16, 32, 64]
    fig, ax = plt.subplots(figsize=(6, 3.2))
    for label, color, marker, score in (
        ("never wrong", "#0072B2", "o", right + 0.1 * torch.rand(300, 64)),
        ("noisy", "#009E73", "^", noisy),
        ("noisy, and can be fooled", "#D55E00", "s", fooled),
    ):
        ax.plot(ks, [best_of_k(right, score, k) for k in ks], color=color, marker=marker, label=label)
    ax.set(xlabel="k", xscale="log", ylabel="right", ylim=(0, 1.05), title="The best scored of k samples")
    ax.set_xticks(ks, ks)
    ax.legend(frameon=False)
    plt.show()

# %% [markdown] tags=["solution"]
# **pass@k is the special case** of a score that's never wrong. No score gets above it: a sample that isn't drawn can't
# be handed in. **More samples can hurt.** With many samples, a rare wrong answer with a very high score is in almost
# every draw. Training on such a score has the same problem: RL finds what scores high, right or not. **Why not look at
# the first k samples?** That's right on average too, but it throws $n-k$ samples away. The next cell counts the draws.

# %% tags=["solution"]
flags, score = torch.tensor([[True, False, False, True, False]]), torch.tensor([[0.1, 0.5, 0.2, 0.9, 0.3]])
ways = [flags[0, max(chosen, key=lambda i: score[0, i])].item() for chosen in itertools.combinations(range(5), 2)]
print(f"{sum(ways)} of {len(ways)} draws = {sum(ways) / len(ways)}; best_of_k: {best_of_k(flags, score, 2):.3g}")

# %% [markdown]
# ## q3 · Who gets the credit?
#
# ●●●○○ · 20 minutes
#
# Lesson 00 takes apart a gain whose factors multiply. Here is the smallest case: an answer is right if it is clean (50%
# before training, 90% after) and shows its working (20%, then 100%). So 10% were right before, and 90% after. How many
# of the 80 points did each of the two contribute? There are two ways to tell the story:
#
# - clean first: 0.5 → 0.9 at 20% working adds 8 points; then working, at 90% clean, adds 72;
# - working first: 0.2 → 1.0 at 50% clean adds 40 points; then clean adds 40.
#
# Neither order is better than the other, so take the **mean over all orders**. Write it for any number of factors:
# `before` and `after` are the factors, `[k]`, with `k` up to 5; return what each contributes, `[k]`, as a share of all
# answers (0.24 for clean and 0.56 for working, here).
#
# <details><summary>Hint 1: a question</summary>
# When a factor's turn comes in some order, what are the other factors worth at that moment: those before it in the
# order, and those after it?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Walk through an order and change one factor at a time, from its old value to its new one. What a factor contributes in
# this order is the change of the product at its step. Do so for all orders and average.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Two loops, over `itertools.permutations` of the indices and over the indices of one order. Inside, a copy of `before`
# in which one more entry becomes that of `after`, and the difference of two products. A test: the parts add up to the
# gain.
# </details>


# %% tags=["exercise"]
def credit(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """What each factor contributes to the change of the product, mean over all orders: [k]. before, after: [k]."""
    # BEGIN SOLUTION
    orders = list(itertools.permutations(range(len(before))))
    brings = torch.zeros_like(before)
    for order in orders:
        now = before.clone()
        for place in order:
            was = now.prod()
            now[place] = after[place]
            brings[place] += (now.prod() - was) / len(orders)
    return brings
    # END SOLUTION


# %%
check.q3(credit)

# %%
if check.q3.passed:  # the lesson's factors, all levels in one; the lesson goes level by level and finds other numbers
    names = ("clean", "choice", "arithmetic")
    brings = credit(torch.tensor([0.55, 0.28, 0.58]), torch.tensor([0.90, 1.00, 0.75]))
    print("  ".join(f"{name} {100 * points:.1f} points" for name, points in zip(names, brings.tolist(), strict=True)))

# %% [markdown] tags=["solution"]
# This is the *Shapley value* of game theory: the only way to share that adds up to the whole, treats equals alike,
# gives nothing to a factor that makes no difference, and shares the sum of two gains as it shares each of them. It's
# still a convention. What choice contributes is neither what it would have gained alone nor what would be missing
# without it: the lesson has all three numbers. When somebody tells you how much of an improvement is due to what, ask
# which of the three it is.
