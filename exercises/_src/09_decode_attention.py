# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# Five exercises for [lesson 09](../notebooks/09_decode_attention.ipynb): merge what others have normalised already,
# choose the number of splits, load a tensor core's operand, separate two causes, and write a kernel. Four are functions
# that need only `torch`. The fifth is a kernel: the check compiles it and runs it in the interpreter, then on your GPU,
# if you have one. For it, you and `rlcourse grade` need CuTe DSL (Linux: `pip install "rlcourse[kernels]"`).
#
# Write your code where it says `# YOUR CODE HERE`, then run the cell below it. Each exercise has three hints: a
# question, the idea, and the shape of the answer.

# %%
import math
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch

from rlcourse.course.checks import nb09 as check
from rlcourse.kernels.arguments import Argument
from rlcourse.kernels.dsl import Float32, const_expr, cute, cutlass, range_constexpr
from rlcourse.measure.records import load_record

torch.manual_seed(0)
print("ready")

# %% [markdown]
# ## q1 · Merge what is normalised already
#
# ●●●○○ · 20 minutes
#
# A row's tokens were split over $P$ places. You asked each for its partial $(m_p, l_p, \text{acc}_p)$, and this is what
# you got from a library: the finished output of each place, $o_p = \text{acc}_p / l_p$, and **one** number beside it,
# $L_p = m_p + \log l_p$, the log of the sum of exponentials of its scores. Is that enough? It is. Return the attention
# over **all** tokens.
#
# There is also a **sink**: one more score per head, which takes part in the softmax but has no token and no value, so
# that a head can look away. A sink of $-\infty$ means no sink.
#
# A place that saw no token has $L_p = -\infty$ and an output of zeros. A head for which no place saw anything gets
# zeros. Scores can be in the hundreds, positive or negative, and differ as much from head to head.
#
# Shapes: `outputs` `[P, H, D]`, `logsums` `[P, H]`, `sink` `[H]`; result `[H, D]`.
#
# <details><summary>Hint 1: a question</summary>
# In the softmax over all tokens, how much of the total weight falls to the tokens of place $p$? And how much to the
# sink?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# $e^{L_p}$ is the sum of the exponentials of one place. The answer is a weighted mean of the $P$ outputs, in which the
# sink takes its share of the weight and adds nothing.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Stack the sink below the log-sums, subtract the largest of them (a finite number for a head without anything), make
# weights, and leave the sink out of the sum of outputs, but not out of the divisor.
# </details>


# %% tags=["exercise"]
def merge_outputs(outputs: torch.Tensor, logsums: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """Attention over the tokens of all places: [H, D]. outputs: [P, H, D]; logsums: [P, H]; sink: [H]."""
    # BEGIN SOLUTION
    logs = torch.cat([logsums, sink[None]])  # [P + 1, H]
    weights = (logs - logs.amax(0).clamp(min=-1e30)).exp()
    weights = weights / weights.sum(0).clamp(min=1e-30)
    return (weights[:-1, :, None] * outputs).sum(0)
    # END SOLUTION


# %%
check.q1(merge_outputs)

# %% [markdown]
# Your function at work: 256 tokens in 1 to 64 places, against a softmax in float64. **Look for** whether the error
# grows with the number of places.

# %% tags=["hide-input"]
# @title Figure: the error of merging
if check.q1.passed:
    scores, values = 3 * torch.randn(1, 256), torch.randn(256, 8)
    exact = scores.double().softmax(1) @ values.double()
    counts, errors = [2**i for i in range(7)], []
    for count in counts:
        parts = scores.view(count, 1, -1)
        outputs = torch.einsum("phs,psd->phd", parts.softmax(2), values.view(count, -1, 8))
        merged = merge_outputs(outputs, parts.logsumexp(2), torch.tensor([-torch.inf]))
        errors.append((merged - exact).abs().max().item())
    fig, ax = plt.subplots(figsize=(6, 2.8))
    ax.plot(counts, errors, color="#0072B2", marker="o")
    ax.axhline(torch.finfo(torch.float32).eps, color="black", linestyle=":", label="one bit of float32")
    ax.set(xlabel="places", ylabel="largest error", ylim=(0, 2 * max(errors)))
    ax.set_title("256 tokens, put together from several places")
    ax.set_xscale("log", base=2)
    ax.set_xticks(counts, counts)
    ax.legend()
    plt.show()

# %% [markdown] tags=["solution"]
# **It does not grow**: no weight exceeds 1, so nothing is made larger than it was. (With one place nothing is merged:
# that's the error of a softmax over 256 tokens in float32.) **Two numbers become one**, because $m$ and $l$ are never
# needed apart: only $l\, e^{m}$ counts, and its log is safe to keep. Libraries for serving (and GPUs that share one
# long text) exchange outputs and log-sums for that reason. **The sink** is one more place with an output of zeros.

# %% [markdown]
# ## q2 · How many splits?
#
# ●●●○○ · 20 minutes
#
# One launch does `tokens.numel()` pairs (a row and a key-value head each). Pair number $i$ attends to `tokens[i]`
# tokens, at least 1, which are `ceil(tokens[i] / 16)` tiles. With $s$ splits it becomes $s$ CTAs: each takes
# `ceil(tiles / s)` tiles as long as there are any, so the last ones may get fewer, or none. All CTAs of the launch
# queue up, pair by pair, and the card takes `at_once` of them at a time: a *wave*. A wave lasts as long as its longest
# CTA, and a CTA with $n$ tiles lasts `fixed + n`, also if $n$ is 0. The next wave begins when it has ended.
#
# Try every number of splits from 1 to `most`. Return the one with the least time, the smallest if several tie, **and**
# that time, as a tensor `[2]`.
#
# Shapes: `tokens` `[pairs]` int64; `at_once`, `most`, `fixed` numbers; result `[2]`.
#
# <details><summary>Hint 1: a question</summary>
# If you had the tiles of every CTA in a list, in queue order, where would you read off the time?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# For one number of splits: each pair's tiles are cut into equal parts, the last of which are smaller or empty. Write
# the parts of all pairs into one line, cut the line into waves, and add up what each wave costs. Then try all numbers.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A loop over numbers of splits. In it a tensor `[pairs, s]` that is clamped at both ends and flattened, and a sum over
# its pieces of `at_once`. At the end the first of the least times.
# </details>


# %% tags=["exercise"]
def best_splits(tokens: torch.Tensor, at_once: int, most: int, fixed: int) -> torch.Tensor:
    """The number of splits with the least time, and that time: [2]. tokens: [pairs] int64."""
    # BEGIN SOLUTION
    tiles, times = (tokens + 15) // 16, []
    for s in range(1, most + 1):
        part = ((tiles + s - 1) // s)[:, None]
        line = (tiles[:, None] - part * torch.arange(s)).clamp(min=0).minimum(part).flatten()
        times.append(sum(fixed + wave.max() for wave in line.split(at_once)))
    best = int(torch.stack(times).argmin())  # the first of equals
    return torch.stack([torch.tensor(best + 1.0), times[best].float()])
    # END SOLUTION


# %%
check.q2(best_splits)

# %% [markdown]
# What your function chooses for a card that takes 132 CTAs at once, two key-value heads per row, over rows and tokens.
# **Look for** the row count at which there is nothing left to split for.

# %% tags=["hide-input"]
# @title Figure: the best number of splits
if check.q2.passed:
    row_counts, lengths = [1, 4, 16, 32, 64, 128, 256], [64, 256, 1024, 4096]
    table = [[int(best_splits(torch.full((2 * r,), n), 132, 64, 4)[0]) for r in row_counts] for n in lengths]
    fig, ax = plt.subplots(figsize=(6.5, 2.8))
    ax.imshow([[math.log2(v) for v in line] for line in table], cmap="Blues", aspect="auto", vmax=8)
    for y, line in enumerate(table):
        for x, value in enumerate(line):
            ax.text(x, y, value, ha="center", va="center")
    ax.set_xticks(range(len(row_counts)), row_counts)
    ax.set_yticks(range(len(lengths)), lengths)
    ax.set(xlabel="rows", ylabel="tokens", title="Best number of splits, 132 CTAs at once")
    plt.show()

# %% [markdown] tags=["solution"]
# **Waves are steps.** With 133 CTAs on 132 places one of them runs alone. That is why the best number jumps. **The
# package is coarser**: `choose_splits` takes a power of two from shapes alone, and no split with fewer than 512 slots
# of the cache. The lengths are on the device, and a CUDA graph needs one grid for all of them. **The model is coarse,
# too**: it knows waves and nothing of bytes in flight. Lesson 09 shows a kernel that is fast with few CTAs, each of
# which has many bytes in flight. For the lesson's 16 rows of 456 tokens it chooses {{
# int(best_splits(torch.full((32,), 456), 132, 64, 4)[0]) }} splits, one wave of 128 CTAs, and the lesson has 8: an SM
# takes several of its CTAs at a time, so that 256 still are one wave.

# %% [markdown]
# ## q3 · The operand of a tensor core
#
# ●●●●○ · 20 minutes
#
# The left operand of `mma.m16n8k16` is a 16 × 16 matrix. Lane $4g + c$ ($g$ from 0 to 7, $c$ from 0 to 3) holds eight
# of its numbers, one per register (the hardware's registers hold two). Write a register's number as $p + 2h + 4f$ with
# bits $p$, $h$, $f$: it is the element in
#
# $$\text{row } g + 8h, \qquad \text{column } 2c + p + 8f .$$
#
# In the second product of attention the columns are 16 tokens, and the rows are dimensions of the values: 64 of them
# are four products $i$ of 16 rows. So that a lane can load 16 bytes that lie together, rows get new numbers: **row $g +
# 8h$ of product $i$ is dimension $8g + 2i + h$**. Return what every lane holds.
#
# Shapes: `values` `[16 tokens, 64 dimensions]`; result `[4 products, 32 lanes, 8 registers]`.
#
# <details><summary>Hint 1: a question</summary>
# For one product, one lane and one register: which token and which dimension is it? Say it for lane 13 and register 6.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Turn the formulas into index tensors for products, lanes and registers that broadcast against one another, and index
# `values` once. A lane's number gives $g$ and $c$, a register's number three bits.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Two lines that take numbers apart, with `//` and `%`, and one that indexes `values` with two expressions whose shapes
# broadcast to `[4, 32, 8]`: tokens from one formula, dimensions from the other.
# </details>


# %% tags=["exercise"]
def value_registers(values: torch.Tensor) -> torch.Tensor:
    """Registers of every lane for four products: [4, 32, 8]. values: [16 tokens, 64]."""
    # BEGIN SOLUTION
    i, lane, register = torch.arange(4)[:, None, None], torch.arange(32)[:, None], torch.arange(8)
    g, c = lane // 4, lane % 4
    p, h, f = register % 2, register // 2 % 2, register // 4
    return values[2 * c + p + 8 * f, 8 * g + 2 * i + h]
    # END SOLUTION


# %%
check.q3(value_registers)

# %% [markdown]
# Which dimensions does a lane need of one token? In the plain order, and in yours. **Look for** what lies together.

# %% tags=["hide-input"]
# @title Figure: what a lane needs of a token
if check.q3.passed:
    where = torch.arange(64.0).expand(16, 64)  # each value is its dimension
    yours = value_registers(where)[:, 4 * 3 + 1].unique().tolist()  # lane 13: g = 3, c = 1
    plain = [16 * i + 3 + 8 * h for i in range(4) for h in range(2)]
    fig, ax = plt.subplots(figsize=(9, 1.7))
    for y, (held, color) in enumerate(((plain, "#D55E00"), (yours, "#0072B2"))):
        ax.bar([d + 0.5 for d in range(64)], 0.7, bottom=y - 0.35, color="#eeeeee", width=0.9)
        ax.bar([d + 0.5 for d in held], 0.7, bottom=y - 0.35, color=color, width=0.9)
    ax.set_yticks([0, 1], ["plain order", "renumbered"])
    ax.set(xlabel="dimension", xlim=(0, 64), title="What lane 13 needs of token 2")
    ax.set_xticks(range(0, 65, 8))
    plt.show()

# %% [markdown] tags=["solution"]
# **Why it is allowed.** Row $x$ of a result depends on row $x$ of the left operand alone, so rows may have any names,
# as long as they end up where they belong. **What it buys.** In the plain order a lane would load eight single numbers
# of 2 bytes for each token, now it is one load of 16 bytes. `decode_attention.py` does this; within a lane the numbers
# of two tokens must still be paired up in the hardware's registers. These are the only moves in its loop.

# %% [markdown]
# ## q4 · Two changes at once
#
# ●●●○○ · 20 minutes
#
# Lesson 09 has a faster kernel in which several things changed, the instructions and the bytes in flight among them,
# and one that was written to tell these two apart. What would a model have predicted? Suppose a kernel took the
# longest of three times:
#
# - **bytes**: `data` bytes at the card's bandwidth, `gb_s` GB/s;
# - **issue**: `instructions` warp instructions in all; each of the `sms` SMs has four schedulers, each of which issues
#   one instruction per cycle, `ghz` billion cycles per second;
# - **waiting**: memory has a latency of `latency_us` µs, so with `flight` bytes in flight on the whole card no more
#   than `flight` bytes arrive in that time.
#
# The old kernel has (`instructions[0]`, `flight[0]`), the new one fewer instructions and more bytes in flight
# (`instructions[1]`, `flight[1]`); both read the same `data`. Return five numbers: the time of the old kernel, of the
# old one with the **instructions** of the new one, of the old one with the **bytes in flight** of the new one, of the
# new kernel, all in µs; and then what you should have changed first: 0 for instructions, 1 for bytes in flight, 2 if
# neither change alone brings anything.
#
# Shapes: `instructions`, `flight` `[2]` float64; the others are numbers; result `[5]` float64.
#
# <details><summary>Hint 1: a question</summary>
# What are the units of each of the three times? How many bytes per µs is one GB/s?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# One function that gives the longest of the three for some number of instructions and some bytes in flight. The four
# kernels are its four combinations.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A `max` of three quotients, called four times, and a comparison of the second and third result. The numerator is the
# work, in bytes or instructions; the denominator is the rate per µs.
# </details>


# %% tags=["exercise"]
def two_changes(
    data: float, instructions: torch.Tensor, flight: torch.Tensor, gb_s: float, ghz: float, sms: int, latency_us: float
) -> torch.Tensor:
    """µs: the old kernel, with new instructions, with new bytes in flight, the new one; and what to do first."""

    # BEGIN SOLUTION
    def time(i: int, w: int) -> float:
        bytes_us, issue_us = data / (1e3 * gb_s), float(instructions[i]) / (4e3 * ghz * sms)
        return max(bytes_us, issue_us, latency_us * data / float(flight[w]))

    times = [time(0, 0), time(1, 0), time(0, 1), time(1, 1)]
    first = 2 if times[1] == times[2] else 0 if times[1] < times[2] else 1
    return torch.tensor([*times, first], dtype=torch.float64)
    # END SOLUTION


# %%
check.q4(two_changes)

# %% [markdown]
# Your model for kernels like those of the lesson (75 and 7 instructions per token and head; 12 and 127 KB in flight in
# each SM) on two cards, with a latency of 0.7 µs. **Look for** what each change brings alone. This is the rule that
# lesson 09 found wanting. The diamonds are what it measured on the H200, in the third row with *twice* the bytes in
# flight.

# %% tags=["hide-input"]
# @title Figure: one change at a time
if check.q4.passed:
    pairs_tokens = 256 * 2 * 1024
    cards = {"A10": (600, 1.695, 72), "H200": (4800, 1.98, 132)}
    fig, axes = plt.subplots(1, 2, figsize=(12, 2.4), layout="constrained", sharey=True)
    for ax, (card, (gb_s, ghz, sms)) in zip(axes, cards.items(), strict=True):
        counts = pairs_tokens * torch.tensor([75.0, 7.0]).double()
        found = two_changes(
            256.0 * pairs_tokens, counts, sms * torch.tensor([12e3, 127e3]).double(), gb_s, ghz, sms, 0.7
        )
        names = ["old", "fewer instructions", "more in flight", "both"]
        bars = ax.barh(names, found[:4], color=["#999999", "#E69F00", "#56B4E9", "#009E73"])
        ax.bar_label(bars, fmt="%.0f", label_type="center")
        ax.set(title=card, xlabel="µs, by the model")
        ax.margins(x=0.15)
    record = load_record("cute", "NVIDIA H200")
    measured = {row["variant"]: row["us"] for row in record["results"] if row["shape"] == [256, 1024]}
    rows = (0, "split", ""), (2, "split-ahead", " (twice)"), (3, "cute", "")
    for y, kernel, note in rows:
        us = measured[f"attention-{kernel}"]
        axes[1].plot(us, y, "kD", label=None if y else "measured")
        axes[1].annotate(f"{us:.0f}{note}", (us, y), (8, 0), textcoords="offset points", va="center")
    axes[1].margins(x=0.3)
    axes[1].legend(loc="upper left", bbox_to_anchor=(1, 1))
    axes[0].invert_yaxis()
    plt.show()

# %% [markdown] tags=["solution"]
# **By this model** fewer instructions alone bring nothing on either card. On the A10 neither change helps, since the
# kernel is memory-bound. On the H200 more bytes in flight take the kernel to its next bound, and only then do
# instructions matter: the second change is worth something *after* the first. That's why "which of the two was it?" has
# no answer from before and after alone. And the model isn't a measurement. Lesson 09 has the experiment: twice the
# bytes in flight brought less than this model says, probably because a warp requests nothing while it computes. Adding
# latency and issue, instead of taking the longer, comes closer. A model tells you what to try, not what you'll get.

# %% [markdown]
# ## q5 · A decode-attention kernel
#
# ●●●●● · 40 minutes
#
# Write the loop of a decode-attention kernel, in its smallest form. One warp (32 threads) does one pair: a query
# `q[pair]` over slots `first[pair]` to `last[pair] - 1` of `keys[pair]` and `values[pair]`, all float32. Don't read
# outside these slots: it's poison. A pair with no slots gets zeros.
#
# Lane number $\ell$ handles dimensions $\ell$, $\ell + 32$, ... That is `n` elements: `query[e]` is the query's element
# $\ell + 32 e$ with the factor $\log_2(e)/\sqrt{D}$, already loaded, and `acc[e]` is 0. You write the rest: for every
# slot the score (which needs all lanes), one step of the online softmax, and at the end the result into `out`.
#
# What you need: `cutlass.range(a, b)` for a loop whose ends are known at run time, `range_constexpr(n)` for one that is
# unrolled; `cute.arch.warp_reduction_sum(x)` is the sum of `x` over the lanes, for every lane; `cute.arch.fmax(x, y)`;
# `cute.math.exp2(x)`; `Float32(0.0)`; tensors are indexed as `keys[pair, slot, element]`. A variable that changes in a
# `cutlass.range` loop must have its type before the loop.
#
# Shapes: `q`, `out` `[pairs, D]`; `keys`, `values` `[pairs, slots, D]`; `first`, `last` `[pairs]` int32.
#
# <details><summary>Hint 1: a question</summary>
# What must a lane remember from one slot to the next, and what do all lanes have to agree on?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Carry $m$, $l$ and the `n` elements of acc. For each slot add up the lane's part of the product and sum it over the
# lanes, find the new maximum, rescale the old sums, add the new term. Where should $m$ begin, if all scores may be far
# below 0? And what do you divide by in a pair without slots?
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Before the loop, two typed numbers. In it seven steps: score, sum over lanes, new maximum, factor, weight, $l$, acc in
# a loop over elements; then replace the maximum. After it, one loop that divides and writes.
# </details>


# %% tags=["exercise"]
@dataclass(frozen=True)
class WarpAttention:
    """Attention of one query over slots first..last - 1, one warp per pair. size: D, a multiple of 32."""

    size: int
    threads = 32

    def arguments(self):
        row, cache = ("pairs", self.size), ("pairs", "slots", self.size)
        span = [Argument(name, "int32", ("pairs",)) for name in ("first", "last")]
        caches = [Argument(name, "float32", cache, free=1) for name in ("keys", "values")]
        return Argument("q", "float32", row), *caches, *span, Argument("out", "float32", row, output=True)

    def grid(self, q, *others):
        return q.shape[0], 1, 1

    @cute.jit
    def __call__(self, q, keys, values, first, last, out, stream):
        self.kernel(q, keys, values, first, last, out).launch(grid=self.grid(q), block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self, q: cute.Tensor, keys: cute.Tensor, values: cute.Tensor, first: cute.Tensor, last: cute.Tensor,
        out: cute.Tensor,
    ):  # fmt: skip
        pair, _, _ = cute.arch.block_idx()
        lane, _, _ = cute.arch.thread_idx()
        begin, end, n = first[pair], last[pair], const_expr(self.size // 32)
        query, acc = cute.make_rmem_tensor(n, Float32), cute.make_rmem_tensor(n, Float32)
        for e in range_constexpr(n):
            query[e] = q[pair, lane + 32 * e] * (math.log2(math.e) / math.sqrt(self.size))
            acc[e] = Float32(0.0)
        # BEGIN SOLUTION
        m, l = Float32(-1e30), Float32(0.0)
        for slot in cutlass.range(begin, end):
            score = Float32(0.0)
            for e in range_constexpr(n):
                score += query[e] * keys[pair, slot, lane + 32 * e]
            score = cute.arch.warp_reduction_sum(score)
            m_new = cute.arch.fmax(m, score)
            alpha, weight = cute.math.exp2(m - m_new), cute.math.exp2(score - m_new)
            l = l * alpha + weight
            for e in range_constexpr(n):
                acc[e] = acc[e] * alpha + weight * values[pair, slot, lane + 32 * e]
            m = m_new
        for e in range_constexpr(n):
            out[pair, lane + 32 * e] = acc[e] / cute.arch.fmax(l, Float32(1e-30))
        # END SOLUTION


# %%
check.q5(WarpAttention)

# %% [markdown]
# What your kernel does for each slot, counted by the interpreter: the difference of two lengths.

# %%
if check.q5.passed:
    from rlcourse.kernels.toolchain import simulate

    def executed(tokens: int):
        numbers = [torch.zeros(1, dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)]
        q, keys, values = torch.randn(1, 64), torch.randn(1, 64, 64), torch.randn(1, 64, 64)
        return simulate(WarpAttention(64), q, keys, values, *numbers, torch.zeros(1, 64))

    few, many = executed(16), executed(48)
    print(f"{(many.total - few.total) / 32:.1f} instructions of the warp for each slot, of these")
    for name, count in (many.instructions - few.instructions).most_common(8):
        print(f"  {count / 32:5.1f}  {name}")

# %% [markdown] tags=["solution"]
# **What is slow in it.** Each slot costs five shuffles and as many additions to sum up one score. The loads are 4 bytes
# per lane, and a warp has few of them in flight: the compiler loads four slots at once, and no more until their scores
# are done. The lesson's simple kernel gives a token to 8 lanes instead of 32, loads 16 bytes per lane, does all query
# heads of a key-value head with one load, and has four warps per block. **The poison** is why the loop is
# `cutlass.range(begin, end)`, and not over all slots with a weight of 0 for those outside: 0 times nan is nan.
