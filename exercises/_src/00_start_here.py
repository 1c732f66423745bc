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
# ## q2 · pass@k for a table of samples
#
# ●●○○○ · 10 minutes
#
# `right` says for each of `n` samples of each problem whether it was right: bool `[problems, n]`. Return pass@k, the
# mean over problems of
#
# $$1 - \binom{n-c}{k} \Big/ \binom{n}{k} ,$$
#
# where $c$ is the number of right samples of the problem. Return a float.
#
# <details><summary>Hint 1: a question</summary>
# One problem is always solved, another never. What is their mean pass@8, and what would the formula give for their mean
# number of right samples?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# The formula is not linear in $c$, so it has to be applied to each problem separately. Binomial coefficients of Python
# integers are exact however large they are; as floats they overflow.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Three steps: a count for each problem, the formula for each count, the mean of the results. One function of the module
# `math` does all the counting of ways, and is 0 where there are none.
# </details>


# %% tags=["exercise"]
def pass_at_k(right: torch.Tensor, k: int) -> float:
    """Mean over problems of the unbiased pass@k. right: bool [problems, n], k from 1 to n."""
    # BEGIN SOLUTION
    n = right.shape[1]
    counts = right.sum(1).tolist()
    of_problems = [1 - math.comb(n - c, k) / math.comb(n, k) for c in counts]
    return sum(of_problems) / len(of_problems)
    # END SOLUTION


# %%
check.q2(pass_at_k)

# %% [markdown]
# Two sets of problems with the **same** pass@1. In one set, every problem is solved half of the time. In the other,
# half of the problems are always solved and half never. **Look for** how much more samples help in each.

# %%
if check.q2.passed:
    mixed = torch.rand(200, 16) < 0.5
    split = (torch.arange(200) % 2 == 0)[:, None].expand(200, 16)
    ks = range(1, 17)
    fig, ax = plt.subplots(figsize=(6, 3.2))
    ax.plot(ks, [pass_at_k(mixed, k) for k in ks], color="#0072B2", marker="o", label="every problem half the time")
    ax.plot(ks, [pass_at_k(split, k) for k in ks], color="#D55E00", marker="s", label="half of the problems always")
    ax.set(xlabel="k", ylabel="pass@k", ylim=(0, 1.05), title="The same pass@1")
    ax.legend(frameon=False, loc="lower right")
    plt.show()

# %% [markdown] tags=["solution"]
# **Why not pool the samples.** One count over all problems would treat the two sets alike, and they are not: what is
# never solved can't be learned from. The lesson's model stayed below the pooled figure at pass@16 for this reason.
# **Why not look at the first k samples.** That's right on average too, but it throws $n-k$ samples away; the formula is
# the average over all ways to choose $k$ of the $n$, which the next cell counts out.

# %% tags=["solution"]
flags = torch.tensor([[True, False, False, True, False]])
ways = [flags[0, list(chosen)].any().item() for chosen in itertools.combinations(range(5), 2)]
print(f"{sum(ways)} of {len(ways)} ways = {sum(ways) / len(ways)}; pass_at_k: {pass_at_k(flags, 2)}")

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
