# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# Two short exercises for [lesson 00](../notebooks/00_start_here.ipynb). Write your code where it says
# `# YOUR CODE HERE`, then run the cell below it: a card says what is right and what is not yet.
#
# Hints come in three steps. Open one, try, and open the next only if you are still stuck.

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
# The reward of this course begins with reading a number. Write the strict reading of a completion, a little simpler
# than the package's. Return the number of the **last** line that reads `#### NUMBER`, as a float, and `nan` if there
# is none.
#
# - Four `#` at the beginning of a line, at least one space, a number, then at most spaces up to the end of the line.
# - A number is digits with an optional `-` before and an optional decimal part (`3.50`). Commas may group by threes:
#   `1,234` is 1234. Nothing else is a number: not `1,23`, not `twelve`.
# - A line that cannot be read is passed over. An earlier one that can be read counts then.
#
# <details><summary>Hint 1: direction</summary>
# Go through the lines, from the last to the first, and return at the first one that fits a pattern. A regular
# expression says the pattern best.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# `re.fullmatch(pattern, line)` must match the whole line, so nothing can follow the number. Write the integer part as
# two cases: one to three digits with groups `,ddd` after them, or plain digits.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# The pattern is `r"#### +(-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?) *"`. For a match, take group 1, remove the commas and
# call `float`. After the loop, return `math.nan`.
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
# Try it on text of your own: what would you write if you wanted the reward without the work?

# %%
if check.q1.passed:
    for text in ("2+3=5\n#### 5", "#### 4\nNo.\n#### 5", "The answer is 5.", "#### 5 or 6"):
        print(f"{text!r:28} → {final_number(text)}")

# %% [markdown] tags=["solution"]
# **Why from the end.** A model that corrects itself writes two lines, and means the second. **Why the whole line.**
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
# <details><summary>Hint 1: direction</summary>
# First the number of right samples of each problem, then the formula for each problem, and only then the mean. The
# order matters: the formula is not linear.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# `math.comb(n, k)` takes Python integers and is 0 where `k > n`. That is just what the formula needs when fewer than
# `k` samples are wrong.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `counts = right.sum(1).tolist()`, then a list of `1 - math.comb(n - c, k) / math.comb(n, k)` over the counts, then its
# sum divided by its length.
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
# Two sets of problems with the **same** pass@1. In one all problems are solved now and then; in the other half of them
# always and half never. **Look for** how differently more samples help.

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
# solved never cannot be learned from. **Why not look at the first k samples.** Their mean is right too, but it throws
# $n-k$ samples away; the formula is the average over all ways to choose $k$ of the $n$, which the next cell counts out.

# %% tags=["solution"]
flags = torch.tensor([[True, False, False, True, False]])
ways = [flags[0, list(chosen)].any().item() for chosen in itertools.combinations(range(5), 2)]
print(f"{sum(ways)} of {len(ways)} ways = {sum(ways) / len(ways)}; pass_at_k: {pass_at_k(flags, 2)}")
