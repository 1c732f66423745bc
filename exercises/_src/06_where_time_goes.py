# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# Three puzzles for [lesson 06](../notebooks/06_where_time_goes.ipynb): a GPU that was busy 140% of the time, the rows
# that cost nothing, and two weeks of work to spend. Write your code where it says `# YOUR CODE HERE`, then run the cell
# below it. Use only `torch` and Python's own modules: the functions must be self-contained.
#
# Each puzzle has three hints: a question, the idea, and the shape of the answer.

# %%
import itertools

import matplotlib.pyplot as plt
import torch

from rlcourse.course.checks import nb06 as check

torch.manual_seed(0)
print("ready")

# %% [markdown]
# ## q1 · Busy 140% of the time
#
# ●●○○○ · 20 minutes
#
# A trace has the intervals in which a kernel ran, `starts[i]` to `ends[i]`, in any order and in microseconds since the
# machine was started. A colleague wants the share of the window from `begin` to `end` in which **at least one** kernel
# was running. Kernels may overlap, reach over an edge of the window, or lie outside it.


# %%
def colleague(starts, ends, begin, end):
    starts, ends = starts.float(), ends.float()
    total, until = 0.0, begin
    for i in starts.argsort().tolist():
        start, stop = starts[i].item(), ends[i].item()
        total += max(0.0, stop - max(start, until))
        until = stop
    return total / (end - begin)


# %% [markdown]
# Her number for a short trace, then for the same trace on a machine that has been up for two hours, and for a long
# kernel with short ones beside it.

# %%
starts, ends = torch.tensor([1.0, 4.0, 9.0]).double(), torch.tensor([3.0, 6.0, 19.0]).double()
print(f"a kernel reaches over the end:   {colleague(starts, ends, 0.0, 10.0):.0%} busy, by eye 50%")
later = 7.2e9
found = colleague(starts + later, ends.clamp(max=10) + later, later, later + 10)
print(f"two hours later, cut by hand:    {found:.0%} busy, by eye 50%")
starts, ends = torch.tensor([0.0, 1.0, 3.0]).double(), torch.tensor([6.0, 2.0, 4.0]).double()
print(f"short kernels beside a long one: {colleague(starts, ends, 0.0, 10.0):.0%} busy, by eye 60%")

# %% [markdown]
# Write the function without her mistakes. Return a number or a scalar tensor.
#
# <details><summary>Hint 1: a question</summary>
# Take the third example by hand, kernel by kernel. After the second one, from where on does time count as new?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# There is one mistake for each of the three examples: what lies outside the window, what a float32 can tell apart at
# seven billion, and what has been covered **so far**, which is not what was covered last.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Her seven lines, of which two change: the two tensors are prepared differently before the loop, and the last line of
# the loop remembers something else.
# </details>


# %% tags=["exercise"]
def busy_fraction(starts: torch.Tensor, ends: torch.Tensor, begin: float, end: float) -> torch.Tensor:
    """Share of the window that the union of the intervals covers, a scalar. starts, ends: [n] float64."""
    # BEGIN SOLUTION
    starts, ends = starts.clamp(begin, end), ends.clamp(begin, end)
    total, until = 0.0, begin
    for i in starts.argsort().tolist():
        start, stop = starts[i].item(), ends[i].item()
        total += max(0.0, stop - max(start, until))
        until = max(until, stop)
    return torch.tensor(total / (end - begin), dtype=torch.float64)
    # END SOLUTION


# %%
check.q1(busy_fraction)

# %% [markdown]
# Your function on a made-up device with two streams, window by window. **Look for** the windows in which the sum of
# the durations is above 100%.

# %% tags=["hide-input"]
# @title Figure: busy, and the sum of durations
if check.q1.passed:
    torch.manual_seed(1)
    starts = 100 * torch.rand(40, dtype=torch.float64)
    ends = starts + 4 * torch.rand(40, dtype=torch.float64)
    fig, axes = plt.subplots(2, 1, figsize=(8, 3.6), sharex=True, layout="constrained")
    kernels = torch.stack([starts, ends - starts], dim=1).tolist()
    axes[0].broken_barh(kernels[:20], (1, 0.8), color="#0072B2")
    axes[0].broken_barh(kernels[20:], (0, 0.8), color="#E69F00")
    axes[0].set(yticks=[0.4, 1.4], yticklabels=["stream 2", "stream 1"], title="Kernels, and how busy the device was")
    edges = range(0, 100, 10)
    busy = [100 * float(busy_fraction(starts, ends, edge, edge + 10)) for edge in edges]
    summed = [10 * (ends.clamp(edge, edge + 10) - starts.clamp(edge, edge + 10)).sum().item() for edge in edges]
    axes[1].bar([edge + 5 for edge in edges], busy, width=9, color="#009E73", label="busy: the union")
    axes[1].step([*edges, 100], [*summed, summed[-1]], where="post", color="black", label="sum of durations")
    axes[1].set(xlabel="time, µs", ylabel="% of the window", ylim=(0, 1.5 * max(summed)))
    axes[1].legend(ncols=2, loc="upper right")
    plt.show()

# %% [markdown] tags=["solution"]
# **The window.** A kernel counts with its part inside, at both edges. **The clock.** A float32 has 24 bits: at seven
# billion microseconds it can't tell two moments apart that are half a millisecond from each other. **The latest end.**
# A short kernel within a long one ends before it; if the next one is compared with the short one's end, time that the
# long one covers counts twice. This one is quiet: 70% looks as plausible as 60%.

# %% [markdown]
# ## q2 · How many rows are free?
#
# ●●●○○ · 20 minutes
#
# You may decode as many rows at once as you like, and the first ones cost nothing: the step takes as long as before.
# How many? A decode step of $N$ rows needs
#
# - `launches` calls of the host, `host_s` seconds each, whatever $N$ is;
# - to read `weights` numbers of `element_bytes` bytes **once**, and `cache_bytes` bytes for **each row** (0 at the
#   start of a text), at `bytes_per_s`;
# - two operations, a multiplication and an addition, for each weight **and row**, at `flops_per_s`.
#
# All three go on at the same time, so the step takes the longest of them. Return the largest $N$ whose step takes at
# most `slack` times as long as that of a single row, as a whole number. `slack` is 1 or more.
#
# <details><summary>Hint 1: a question</summary>
# How long may the step take? And which of the three times can break that limit as rows are added?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# The limit is `slack` times the **longest** of the three times of one row. Each of the two times that grow with $N$
# gives an $N$ of its own. You need no formula if you don't want one: the step's time never falls, so you can search.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# The seconds of one row as a maximum of three; the limit; two bounds on $N$, of which one is infinite without a cache;
# the smaller of them, rounded down.
# </details>


# %% tags=["exercise"]
def free_rows(
    weights: float,
    cache_bytes: float,
    element_bytes: int,
    launches: int,
    host_s: float,
    bytes_per_s: float,
    flops_per_s: float,
    slack: float,
) -> int:
    """The most rows whose decode step takes at most `slack` times as long as that of one row."""
    # BEGIN SOLUTION
    one_row = max(
        launches * host_s,
        (element_bytes * weights + cache_bytes) / bytes_per_s,
        2 * weights / flops_per_s,
    )
    limit = slack * one_row
    by_flops = limit * flops_per_s / (2 * weights)
    if cache_bytes == 0:
        return int(by_flops)
    by_bytes = (limit * bytes_per_s - element_bytes * weights) / cache_bytes
    return int(min(by_bytes, by_flops))
    # END SOLUTION


# %%
check.q2(free_rows)

# %% [markdown]
# Your function for half a billion weights in bfloat16 on a GPU with 4 TB/s and 800 TFLOP/s, where a row is free if the
# step takes at most 5% longer. **Look for** what a CUDA graph does to the number of free rows, and why that is no
# argument against it.

# %% tags=["hide-input"]
# @title Figure: free rows
if check.q2.passed:
    tokens = [64 * 2**i for i in range(9)]
    fig, ax = plt.subplots(figsize=(6.5, 3.4))
    for launches, color, style in ((1200, "#D55E00", "--"), (1, "#009E73", "-")):
        found = [free_rows(5e8, 12288 * t, 2, launches, 1e-5, 4e12, 8e14, 1.05) for t in tokens]
        ax.plot(tokens, found, color=color, linestyle=style, marker="o", label=f"{launches} × 10 µs of launches")
    ax.set(xscale="log", yscale="log", xlabel="tokens in a row's cache", ylabel="free rows", title="Rows that cost 5%")
    ax.legend()
    plt.show()

# %% [markdown] tags=["solution"]
# **What a slow host does.** It makes thousands of rows free: it wastes so much time that the GPU could have done them
# all. Remove the launches, and the step is many times as fast, but few rows are free any more. Free rows are a sign of
# waste somewhere else. **What the cache does.** The weights are shared by all rows, keys and values by none. With long
# texts and one launch, not even a second row is free.

# %% [markdown]
# ## q3 · Two weeks
#
# ●●●○○ · 25 minutes
#
# You have `budget` days and a list of changes. A step has phases that take `seconds[j]` each. Change `i` makes phase
# `phase[i]` `speedups[i]` times as fast and takes `days[i]` days. Changes to the same phase multiply: 2 times and 3
# times make 6. A "speed-up" below 1 makes its phase slower, and nobody has to make that change.
#
# Return which changes to make, `[changes]` bool, so that the step becomes as short as it can within the budget. Of
# several plans that are equally good any will do. There are at most ten changes.
#
# Shapes: `seconds` `[phases]` float, `phase` `[changes]` int64, `speedups` `[changes]` float, `days` `[changes]` int64.
#
# <details><summary>Hint 1: a question</summary>
# You have made the rollout twice as fast. Is a second change to the rollout still worth what it was worth yesterday?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# It isn't, so no change has a worth of its own, and every rule that takes the best one first can be fooled. But there
# are few changes, and a computer is patient.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A loop over all choices of yes and no; one `continue` for those that take too long; the new time of a step, phase by
# phase; and the best so far.
# </details>


# %% tags=["exercise"]
def best_plan(
    seconds: torch.Tensor, phase: torch.Tensor, speedups: torch.Tensor, days: torch.Tensor, budget: int
) -> torch.Tensor:
    """Which changes to make within the budget so that the step is shortest: [changes] bool."""
    # BEGIN SOLUTION
    best, least = None, float("inf")
    for choice in itertools.product((False, True), repeat=len(days)):
        plan = torch.tensor(choice)
        if days[plan].sum() > budget:
            continue
        parts = seconds.clone()
        for i in plan.nonzero()[:, 0].tolist():
            parts[phase[i]] /= speedups[i]
        if parts.sum() < least:
            best, least = plan, parts.sum()
    return best
    # END SOLUTION


# %%
check.q3(best_plan)

# %% [markdown]
# Your plan for a step of 6 seconds, of which 95% are the rollout. The days are made up. **Look for** what a
# single day buys, and for what is never bought.

# %% tags=["hide-input"]
# @title Table: what to do with so many days
if check.q3.passed:
    changes = [("loader workers", 2, 4.0, 1), ("compile the update", 1, 1.7, 2), ("compile the decode step", 0, 3.4, 2)]
    changes += [("an engine of one's own", 0, 7.8, 9), ("less padding", 1, 1.3, 1), ("pinned memory", 2, 2.0, 1)]
    names, phase, speedups, days = zip(*changes, strict=True)
    seconds = torch.tensor([5.7, 0.28, 0.02])
    for budget in (1, 2, 3, 5, 9, 12):
        plan = best_plan(seconds, torch.tensor(phase), torch.tensor(speedups), torch.tensor(days), budget)
        parts = seconds.clone()
        for i, chosen in enumerate(plan):
            parts[phase[i]] /= speedups[i] if chosen else 1.0
        made = ", ".join(name for name, chosen in zip(names, plan, strict=True) if chosen)
        print(f"{budget:2} days: {seconds.sum() / parts.sum():5.1f}×  {made}")

# %% [markdown] tags=["solution"]
# **Why no order works.** Amdahl's ceilings move with every change. Two changes that each halve the rollout don't remove
# it; and once it's fast, the update that nobody looked at is half of the step. **What is never bought.** Loader workers
# and pinned memory, however large their speed-ups: their phase is a few thousandths of the step. They get a day only if
# one is left over, with nothing else to do.
