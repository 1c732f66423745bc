# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# Five exercises for [lesson 06](../notebooks/06_where_time_goes.ipynb). They are the tools of the trade: how busy a
# device was, how many bytes a step must move, what a faster part gives the whole, the bound of a machine, and how to
# read nested events. Write your code where it says `# YOUR CODE HERE`, then run the cell below it. Use `torch` alone:
# the functions must stand by themselves.

# %%
import matplotlib.pyplot as plt
import torch

from rlcourse.course.checks import nb06 as check

torch.manual_seed(0)
print("ready")

# %% [markdown]
# ## q1 · How busy was it?
#
# ●●○○○ · 15 minutes
#
# A trace has a device's intervals of work, `starts[i]` to `ends[i]`, in any order. Some overlap: two kernels ran at
# the same time. Return the share of the window from `begin` to `end` in which **at least one** interval was running.
# Intervals may reach over an edge of the window, or lie outside it.
#
# Shapes: `starts`, `ends` `[n]` float64, `begin`, `end` numbers; a scalar.
#
# <details><summary>Hint 1: direction</summary>
# Cut every interval to the window first. Then go through them in the order of their starts.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Remember how far time is covered already: the **latest** end seen so far, not the last one. Of each interval only what
# lies behind that is new.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `starts.clamp(begin, end)`, the same for `ends`; `order = starts.argsort()`; then a loop: `total += max(0, stop -
# max(start, until))`, `until = max(until, stop)`. At the end divide by `end - begin`.
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
# the durations would be above 100 %.

# %%
if check.q1.passed:
    torch.manual_seed(1)
    starts = 100 * torch.rand(40, dtype=torch.float64)
    ends = starts + 4 * torch.rand(40, dtype=torch.float64)
    fig, axes = plt.subplots(2, 1, figsize=(8, 3.6), sharex=True)
    kernels = torch.stack([starts, ends - starts], dim=1).tolist()
    axes[0].broken_barh(kernels[:20], (1, 0.8), color="#0072B2")
    axes[0].broken_barh(kernels[20:], (0, 0.8), color="#E69F00")
    axes[0].set(yticks=[0.4, 1.4], yticklabels=["stream 2", "stream 1"], title="Kernels, and how busy the device was")
    edges = range(0, 100, 10)
    busy = [100 * busy_fraction(starts, ends, edge, edge + 10).item() for edge in edges]
    summed = [10 * (ends.clamp(edge, edge + 10) - starts.clamp(edge, edge + 10)).sum().item() for edge in edges]
    axes[1].bar([edge + 5 for edge in edges], busy, width=9, color="#009E73", label="busy: the union")
    axes[1].step([*edges, 100], [*summed, summed[-1]], where="post", color="black", label="sum of durations")
    axes[1].set(xlabel="time, µs", ylabel="% of the window", ylim=(0, 1.5 * max(summed)))
    axes[1].legend(frameon=False, fontsize=9, ncols=2, loc="upper right")
    plt.show()

# %% [markdown] tags=["solution"]
# **Why the latest end and not the last.** A short interval within a long one ends before it. If the next one is
# compared with the short one's end, time that the long one covers counts twice. **Why the union.** A fraction above 1
# would say nothing about idle time, and idle time is what one looks for.

# %% [markdown]
# ## q2 · The bytes of one decode step
#
# ●●●○○ · 20 minutes
#
# One decode step of a Qwen2 model gives one token to each of `rows` rows. Return three numbers, in bytes:
#
# 1. the weights of **all layers**, read once. A layer has the projections of query (`heads × head_dim` outputs), key
#    and value (`kv_heads × head_dim` each), these three with a bias; the output projection back to `hidden`, no bias;
#    three MLP matrices between `hidden` and `intermediate`; and two norms of `hidden` weights;
# 2. the **head**, `vocabulary × hidden`, read once;
# 3. the **cache**: in each layer and row, keys and values of `context` tokens are read and those of one are written.
#
# Leave the final norm aside. A number has `element_bytes` bytes. `tied` says whether embedding and head are one matrix:
# decide what it changes.
#
# Return `[3]`, float64 (in int32 or float32 large models do not fit).
#
# <details><summary>Hint 1: direction</summary>
# Count numbers first, bytes last. Write `q = heads * head_dim` and `kv = kv_heads * head_dim`.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# A matrix from $a$ to $b$ has $a\,b$ numbers, and its bias $b$. Of an embedding, a step looks up `rows` rows; that is
# next to nothing. The head is needed in full for every token.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# A layer: `hidden * (q + 2 * kv) + (q + 2 * kv) + q * hidden + 3 * hidden * intermediate + 2 * hidden`. The cache:
# `rows * (context + 1) * layers * 2 * kv`.
# </details>


# %% tags=["exercise"]
def decode_bytes(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate: int,
    vocabulary: int,
    tied: bool,
    rows: int,
    context: int,
    element_bytes: int,
) -> torch.Tensor:
    """Bytes of one decode step: [3] float64, the layers' weights, the head, the cache."""
    # BEGIN SOLUTION
    q, kv = heads * head_dim, kv_heads * head_dim
    attention = hidden * (q + 2 * kv) + (q + 2 * kv) + q * hidden
    layer = attention + 3 * hidden * intermediate + 2 * hidden
    cache = rows * (context + 1) * layers * 2 * kv
    return element_bytes * torch.tensor([layers * layer, vocabulary * hidden, cache], dtype=torch.float64)
    # END SOLUTION


# %%
check.q2(decode_bytes)

# %% [markdown]
# Your function for the shape of Qwen2.5-0.5B in bfloat16, over the number of rows. **Look for** the point where the
# cache overtakes the weights, and for what a longer context does to it.

# %%
if check.q2.passed:
    rows = [2**i for i in range(12)]
    fig, ax = plt.subplots(figsize=(6.5, 3.4))
    for context, color, style in ((256, "#56B4E9", "--"), (4096, "#0072B2", "-")):
        cache = [decode_bytes(24, 896, 14, 2, 64, 4864, 151936, True, r, context, 2)[2].item() / 1e9 for r in rows]
        ax.plot(rows, cache, color=color, linestyle=style, marker="o", label=f"cache, {context} tokens a row")
    weights = decode_bytes(24, 896, 14, 2, 64, 4864, 151936, True, 1, 0, 2)[:2].sum().item() / 1e9
    ax.axhline(weights, color="#D55E00", linewidth=2, label="weights of layers and head")
    ax.set(xscale="log", yscale="log", xlabel="rows", ylabel="GB a step", title="What a decode step moves")
    ax.legend(frameon=False, fontsize=9)
    plt.show()

# %% [markdown] tags=["solution"]
# **What `tied` changes.** The number of parameters, not the bytes of a step. Untied, there are two matrices of
# `vocabulary × hidden`, but the embedding is a table in which `rows` rows are looked up. Tied, the one matrix is read
# in full as the head. **Why `kv_heads`.** Grouped-query attention shares keys and values among query heads. The cache
# shrinks by `heads / kv_heads`, and that is what it is for.

# %% [markdown]
# ## q3 · Amdahl's law
#
# ●●○○○ · 10 minutes
#
# A program's time has parts with `shares[i]` of the whole; together they are at most 1, and the rest is as slow as it
# ever was. Part `i` becomes `speedups[i]` times faster. Return `[1 + parts]`:
#
# - first the speed-up of the **whole** program with all of these at once;
# - then, for each part, the **limit**: the speed-up of the whole if that part alone took no time at all and all others
#   took as long as before.
#
# Shapes: `shares`, `speedups` `[parts]`. A speed-up may be infinite, or below 1.
#
# <details><summary>Hint 1: direction</summary>
# Let the old time be 1. Write down the new time, then old over new.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# The new time is what nobody touched, $1 - \sum_i p_i$, plus $\sum_i p_i / s_i$.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `new = 1 - shares.sum() + (shares / speedups).sum()`, `limits = 1 / (1 - shares)`, and `torch.cat` of
# `(1 / new)[None]` and the limits.
# </details>


# %% tags=["exercise"]
def amdahl(shares: torch.Tensor, speedups: torch.Tensor) -> torch.Tensor:
    """Speed-up of the whole, then the limit of each part alone: [1 + parts]. shares, speedups: [parts]."""
    # BEGIN SOLUTION
    new = 1 - shares.sum() + (shares / speedups).sum()
    limits = 1 / (1 - shares)
    return torch.cat([(1 / new)[None], limits])
    # END SOLUTION


# %%
check.q3(amdahl)

# %% [markdown] tags=["solution"]
# **Why not the mean of the speed-ups.** Times add up, speed-ups do not. A part with 90 % of the time that becomes 10
# times faster leaves $0.1 + 0.09$: about 5 times, not 9. **What the limits are for.** They say where to look first,
# before anything is written.

# %% [markdown]
# ## q4 · The bound of a machine
#
# ●●●○○ · 15 minutes
#
# A machine copies `bytes_per_s` bytes and does `flops_per_s` operations a second. A decode step of `rows` rows
#
# - reads `weights` numbers of `element_bytes` bytes **once**, and `cache_bytes` bytes for **every row**;
# - does two operations, a multiplication and an addition, for each weight and row (leave attention's aside).
#
# Bytes move while operations are done, so the step takes **at least** the longer of the two times. Return `[2, sizes]`
# for the vector `rows`: the floor of the step in seconds, and the tokens a second at that floor.
#
# Shapes: `rows` `[sizes]` int64, the others numbers; result `[2, sizes]`.
#
# <details><summary>Hint 1: direction</summary>
# Two vectors of seconds, one for bytes and one for operations. Then the larger, element by element.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# `torch.maximum`. A step gives one token to each row.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `moved = (element_bytes * weights + rows * cache_bytes) / bytes_per_s`, `done = 2 * weights * rows / flops_per_s`,
# `floor = torch.maximum(moved, done)`, and `torch.stack([floor, rows / floor])`.
# </details>


# %% tags=["exercise"]
def decode_bound(
    rows: torch.Tensor,
    weights: float,
    cache_bytes: float,
    element_bytes: int,
    bytes_per_s: float,
    flops_per_s: float,
) -> torch.Tensor:
    """Floor of a decode step in seconds, and tokens/s at that floor: [2, sizes]. rows: [sizes] int64."""
    # BEGIN SOLUTION
    rows = rows.double()
    moved = (element_bytes * weights + rows * cache_bytes) / bytes_per_s
    done = 2 * weights * rows / flops_per_s
    floor = torch.maximum(moved, done)
    return torch.stack([floor, rows / floor])
    # END SOLUTION


# %%
check.q4(decode_bound)

# %% [markdown]
# Your bound for half a billion weights in bfloat16 on a made-up accelerator, 1 TB/s and 200 TFLOP/s. **Look for** the
# stretch in which more rows cost hardly any time, and for what ends it with a short and with a long cache.

# %%
if check.q4.passed:
    rows = torch.tensor([2**i for i in range(13)])
    fig, axes = plt.subplots(1, 2, figsize=(10, 3.4))
    for tokens, color, style in ((0, "#0072B2", "-"), (256, "#009E73", "--"), (4096, "#D55E00", ":")):
        seconds, tokens_per_s = decode_bound(rows, 5e8, 12288 * tokens, 2, 1e12, 2e14)
        look = {"color": color, "linestyle": style, "linewidth": 2, "label": f"{tokens} tokens in a row's cache"}
        axes[0].plot(rows, 1e3 * seconds, **look)
        axes[1].plot(rows, tokens_per_s, **look)
    axes[0].set(xscale="log", yscale="log", xlabel="rows", ylabel="ms a step", title="The floor of a step")
    axes[1].set(xscale="log", yscale="log", xlabel="rows", ylabel="tokens/s", title="The most tokens a second")
    axes[0].legend(frameon=False, fontsize=9)
    plt.show()

# %% [markdown] tags=["solution"]
# **Why rows are nearly free at first.** The weights are read once whoever uses them, so the floor hardly moves while
# tokens/s doubles with the rows. Without a cache this ends at the ridge, where operations take longer than bytes. With
# a long cache it ends much earlier: every row reads its own keys and values, and no number of rows shares them.

# %% [markdown]
# ## q5 · Self time
#
# ●●●●○ · 20 minutes
#
# The events of **one thread** in a trace are nested like function calls: two of them either do not overlap, or one
# lies within the other. The *self time* of an event is its duration less the durations of its **direct** children: the
# events within it that lie within no smaller event within it. It is the time that an operator spent itself.
#
# Events come in any order, no two are equal. A child may begin or end together with its parent, and one event may
# begin where another ends. Times are microseconds since the machine was started: large numbers, so keep float64.
#
# Shapes: `starts`, `ends` `[n]` float64; result `[n]`, in the order of the input.
#
# <details><summary>Hint 1: direction</summary>
# Take each event's duration off its parent. So the question is who the parent is.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Go through the events by start, of equal starts the longer first. Keep a stack of those that are still open. Events
# that ended by the new one's start leave the stack. What is on top then is the parent.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `order = sorted(range(n), key=lambda i: (starts[i].item(), -ends[i].item()))`; for each `i` of it: `while stack and
# ends[stack[-1]] <= starts[i]: stack.pop()`; `if stack: own[stack[-1]] -= ends[i] - starts[i]`; `stack.append(i)`.
# </details>


# %% tags=["exercise"]
def self_times(starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Duration of each event less that of its direct children: [n]. starts, ends: [n] float64, one thread."""
    # BEGIN SOLUTION
    own = ends - starts
    stack = []
    for i in sorted(range(len(starts)), key=lambda i: (starts[i].item(), -ends[i].item())):
        while stack and ends[stack[-1]] <= starts[i]:
            stack.pop()
        if stack:
            own[stack[-1]] -= ends[i] - starts[i]
        stack.append(i)
    return own
    # END SOLUTION


# %%
check.q5(self_times)

# %% [markdown]
# A small made-up trace, and your self times beside the durations. **Look for** the event that lasts longest, and the
# one that does the work.

# %%
if check.q5.passed:
    names = ["layer", "attention", "matmul", "softmax", "matmul ", "mlp", "linear", "silu", "linear "]
    starts = torch.tensor([0, 3, 5, 16, 21, 34, 36, 61, 66], dtype=torch.float64)
    ends = torch.tensor([96, 33, 15, 19, 31, 94, 60, 65, 92], dtype=torch.float64)
    depth = [0, 1, 2, 2, 2, 1, 2, 2, 2]
    own = self_times(starts, ends)
    fig, axes = plt.subplots(1, 2, figsize=(11, 3.2))
    for name, start, end, level in zip(names, starts.tolist(), ends.tolist(), depth, strict=True):
        axes[0].broken_barh([(start, end - start)], (-level, 0.9), color="#56B4E9", edgecolor="white")
        text = {"ha": "center", "va": "center", "fontsize": 8, "rotation": 0 if end - start > 12 else 90}
        axes[0].text((start + end) / 2, 0.45 - level, name, **text)
    axes[0].set(xlabel="time, µs", yticks=[], title="The trace")
    axes[1].barh(range(9), ends - starts, color="#56B4E9", label="duration")
    axes[1].barh(range(9), own, height=0.4, color="#D55E00", label="self time")
    axes[1].set_yticks(range(9), names)
    axes[1].invert_yaxis()
    axes[1].set(xlabel="µs", title="Duration and self time")
    axes[1].legend(frameon=False)
    plt.show()
    print(f"sum of durations {(ends - starts).sum():.0f} µs, of self times {own.sum():.0f} µs, the trace lasts 96 µs")

# %% [markdown] tags=["solution"]
# **Why direct children alone.** A grandchild's time is part of its parent's duration already; to take it off twice
# would give negative times. **A check for free.** Self times add up to the time that the outermost events cover. No
# moment is lost and none counts twice. Durations add up to more, so a table of durations cannot be read as shares.
