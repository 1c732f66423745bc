# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# Five exercises for [lesson 07](../notebooks/07_static_cache.ipynb). They are the parts of a fast decode step: the
# write into a static cache, heads that share keys, a draw without the host, a schedule of slots, and a norm that comes
# after the product it belongs before. Write your code where it says `# YOUR CODE HERE`, then run the cell below it. Use
# `torch` alone: the functions must stand by themselves.

# %%
import time

import matplotlib.pyplot as plt
import torch

from rlcourse.course.checks import nb07 as check

torch.manual_seed(0)
print("ready")

# %% [markdown]
# ## q1 · Write, hide, attend
#
# ●●●○○ · 15 minutes
#
# One decode step of one group of heads. Row $r$ has `positions[r]` tokens in its part of the cache, in the slots 0 to
# `positions[r] - 1`. Its new key and value belong into slot `positions[r]`. Write them there, then let each of the $G$
# queries of the row attend to the slots that are filled, the new one included:
#
# $$o_{r,g} = \sum_{s \le p_r} w_s\, v_{r,s} , \qquad
#   w = \text{softmax}_{s \le p_r}\big(q_{r,g} \cdot k_{r,s} / \sqrt{D}\big) .$$
#
# Behind that, the cache holds what an earlier completion left there. Rows are at **different** positions, as in
# continuous batching.
#
# Shapes: `q` `[R, G, D]`; `k`, `v` `[R, D]`; `keys`, `values` `[R, S, D]`; `positions` `[R]` int64; result `[R, G, D]`.
#
# <details><summary>Hint 1: direction</summary>
# Three steps: an assignment into the two caches, a mask of shape [R, S], and attention in which masked scores are minus
# infinity.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# An assignment with two index tensors takes them in pairs: `keys[rows, positions]` with `rows = 0, 1, 2, ...` is `[R,
# D]`. `keys[:, positions]` is something else: every row at every position. A slot is seen if its number is at most
# `positions[r]`.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `rows = torch.arange(len(k))`, `keys[rows, positions] = k`, the same for the values; `seen = torch.arange(S) <=
# positions[:, None]`; `scores = q @ keys.transpose(1, 2) / D ** 0.5`, filled with `-torch.inf` where `~seen[:, None]`;
# then `scores.softmax(-1) @ values`.
# </details>


# %% tags=["exercise"]
def attend_with_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Write k and v at each row's position and attend to the slots up to it: [R, G, D].

    q: [R, G, D]; k, v: [R, D]; keys, values: [R, S, D]; positions: [R] int64.
    """
    # BEGIN SOLUTION
    rows = torch.arange(len(k))
    keys[rows, positions], values[rows, positions] = k, v
    seen = torch.arange(keys.shape[1]) <= positions[:, None]  # [R, S]
    scores = q @ keys.transpose(1, 2) / q.shape[-1] ** 0.5  # [R, G, S]
    return scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ values
    # END SOLUTION


# %%
check.q1(attend_with_cache)

# %% [markdown]
# Your function at work: three rows at positions 2, 7 and 4 of a cache with ten slots. The values are one-hot, so the
# output **is** the weights. **Look for** where each row stops.

# %%
if check.q1.passed:
    S = 10
    q, k, keys = torch.randn(3, 1, S), torch.randn(3, S), torch.randn(3, S, S)
    positions = torch.tensor([2, 7, 4])
    values = torch.eye(S).expand(3, S, S).clone()
    weights = attend_with_cache(q, k, values[torch.arange(3), positions], keys, values, positions)[:, 0]
    fig, ax = plt.subplots(figsize=(6.5, 2.4))
    image = ax.imshow(weights, cmap="Blues", vmin=0)
    ax.set(xlabel="slot", ylabel="row", yticks=range(3), xticks=range(S), title="Attention weights of one query a row")
    fig.colorbar(image, ax=ax)
    plt.show()

# %% [markdown] tags=["solution"]
# **Why a mask and not a slice.** `keys[r, : p + 1]` has another shape for each row and each step: it can be neither
# batched nor captured. A mask has the same shape always, and what it hides is data. **Why $s \le p$ and not $s < p$.**
# A token attends to itself; and without it the first token of an empty cache would see nothing, and the softmax of
# nothing is `nan`. The package writes in the same way in `Decoder._decode_layer_rows`.

# %% [markdown]
# ## q2 · Fold the heads
#
# ●●●○○ · 15 minutes
#
# Grouped-query attention of one query token a row: $H$ query heads, $K$ key-value heads, $H/K$ query heads for each.
# The query heads 0 to $H/K - 1$ share key-value head 0, the next ones head 1, and so on. Compute the attention of all
# heads over all $S$ slots (no mask this time) **without repeating** keys and values.
#
# Shapes: `q` `[R, H, D]`; `keys`, `values` `[R, K, S, D]`; result `[R, H, D]`.
#
# <details><summary>Hint 1: direction</summary>
# To a key-value head, the query heads that share it are simply several queries.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# `q.view(R, K, H // K, D)` puts the queries of a group where a matrix product wants its rows. Then `[R, K, H/K, D]`
# times `[R, K, D, S]` gives all scores.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `groups = q.view(rows, keys.shape[1], -1, size)`; `weights = (groups @ keys.transpose(2, 3) / size **
# 0.5).softmax(-1)`; `weights @ values`, viewed as `[R, H, D]`.
# </details>


# %% tags=["exercise"]
def grouped_attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention of one query token a row, heads that share keys folded into one product: [R, H, D].

    q: [R, H, D]; keys, values: [R, K, S, D].
    """
    # BEGIN SOLUTION
    rows, heads, size = q.shape
    groups = q.view(rows, keys.shape[1], -1, size)
    weights = (groups @ keys.transpose(2, 3) / size**0.5).softmax(-1)  # [R, K, H / K, S]
    return (weights @ values).view(rows, heads, size)
    # END SOLUTION


# %%
check.q2(grouped_attention)

# %% [markdown]
# Your function against the one that repeats the cache, for the heads of Qwen2.5-0.5B: 14 query heads, 2 key-value
# heads. **Look for** the gap, and whether it grows with the context.

# %%
if check.q2.passed:

    def repeated(q, keys, values):
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (keys, values))
        weights = (q[:, :, None] @ keys.transpose(2, 3) / q.shape[-1] ** 0.5).softmax(-1)
        return (weights @ values)[:, :, 0]

    def milliseconds(function, *arguments) -> float:
        times = []
        for _ in range(9):
            start = time.perf_counter()
            function(*arguments)
            times.append(time.perf_counter() - start)
        return 1e3 * sorted(times)[4]

    slots = [64, 128, 256, 512, 1024]
    fig, ax = plt.subplots(figsize=(6, 3.2))
    styles = {"keys and values repeated": (repeated, "#D55E00", "s"), "yours": (grouped_attention, "#0072B2", "o")}
    inputs = [(torch.randn(8, 14, 64), *torch.randn(2, 8, 2, s, 64).unbind(0)) for s in slots]
    for name, (function, color, marker) in styles.items():
        ax.plot(slots, [milliseconds(function, *x) for x in inputs], color=color, marker=marker, label=name)
    ax.set(xlabel="slots attended to", ylabel="ms, 8 rows", ylim=(0, None), title="One layer's attention, this CPU")
    ax.legend(frameon=False)
    ax.grid(alpha=0.25)
    plt.show()

# %% [markdown] tags=["solution"]
# **Bytes.** Repeating reads the cache once, writes it $H/K$ times and reads that again. Folded, it is read once. (On a
# CPU the gap can be larger still: large new tensors get fresh memory from the system at every call.) The results are
# the same but for rounding. **The order of the heads matters**: `q.view(R, -1, K, D)` would deal the query heads out in
# turn. Nothing fails then; the model just talks nonsense.

# %% [markdown]
# ## q3 · Draw by inversion
#
# ●●●●○ · 25 minutes
#
# Draw one token a row from the softmax of `logits`, with **one** uniform number $u_r \in [0, 1)$ a row. Put the
# probabilities of the tokens side by side, in order, from 0 to 1: the token is the one into whose piece $u_r$ falls,
# that is the first one whose running sum **exceeds** $u_r$. Work on two levels, as a GPU would: cut the vocabulary into
# tiles of `tile` tokens (the last may be shorter), add up each tile, find the tile, then the place in it. Return the
# tokens **and** their log-probs under the softmax of the whole row.
#
# Logits can be large (`exp(200)` is infinite in float32), and some can be `-inf`; of each tile at least one is finite.
#
# Shapes: `logits` `[R, V]`, `tile` a number, `uniform` `[R]`; result: two tensors `[R]`, int64 and float.
#
# <details><summary>Hint 1: direction</summary>
# A tensor `[R, tiles, tile]`, padded with logits that can never be drawn. Subtract the largest logit of the **row**
# before you exponentiate; then all tiles have one scale.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# The goal is `u` times the total mass. The tile: the first whose running sum exceeds the goal. Within it, look for the
# goal less the mass of the tiles before. The first place where something is true: `.long().argmax(-1)`.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `tiles = F.pad(logits, (0, -V % tile), value=-inf).unflatten(1, (-1, tile))`; `mass = (tiles - top).exp()`; `by_tile =
# mass.sum(2)`; `goal = uniform * by_tile.sum(1)`; `which = (by_tile.cumsum(1) > goal[:, None]).long().argmax(1)`; `left
# = goal - (by_tile.cumsum(1) - by_tile)[rows, which]`; the same search in `mass[rows, which]`; `token = which * tile +
# place`; its log-prob is its logit, less `top`, less the log of the total mass.
# </details>


# %% tags=["exercise"]
def draw_by_inversion(logits: torch.Tensor, tile: int, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [R] and log-probs [R] of one draw a row, by a running sum over tiles and then within one.

    logits: [R, V]; tile: tokens in a tile; uniform: [R], in [0, 1).
    """
    # BEGIN SOLUTION
    rows, vocabulary = torch.arange(len(logits)), logits.shape[1]
    tiles = torch.nn.functional.pad(logits, (0, -vocabulary % tile), value=-torch.inf).unflatten(1, (-1, tile))
    top = logits.amax(1)
    mass = (tiles - top[:, None, None]).exp()  # [R, tiles, tile], at most 1
    by_tile = mass.sum(2)
    total = by_tile.sum(1)
    goal = uniform * total
    which = (by_tile.cumsum(1) > goal[:, None]).long().argmax(1)
    left = goal - (by_tile.cumsum(1) - by_tile)[rows, which]
    place = (mass[rows, which].cumsum(1) > left[:, None]).long().argmax(1)
    tokens = which * tile + place
    return tokens, logits[rows, tokens] - top - total.log()
    # END SOLUTION


# %%
check.q3(draw_by_inversion)

# %% [markdown]
# Twenty thousand draws with your function. **Look for** bars and dots of one height.

# %%
if check.q3.passed:
    torch.manual_seed(0)
    logits, draws = 1.2 * torch.randn(1, 14), 20_000
    tokens, _ = draw_by_inversion(logits.expand(draws, -1), 4, torch.rand(draws))
    fig, ax = plt.subplots(figsize=(6.5, 3))
    ax.bar(range(14), torch.bincount(tokens, minlength=14) / draws, color="#56B4E9", label="share of the draws")
    ax.plot(range(14), logits[0].softmax(0), color="black", marker="o", linestyle="", label="softmax")
    ax.set(xlabel="token", ylabel="probability", title="Drawn by inversion, tiles of 4")
    ax.legend(frameon=False)
    plt.show()

# %% [markdown] tags=["solution"]
# **Why one scale.** With each tile measured by its own largest logit, a tile of hopeless tokens looks as heavy as the
# best one. The kernel does measure each tile by its own (it cannot know the others yet) and repairs that in the second
# step: times `exp(largest of the tile - largest of all)`. **Why `>` and not `>=`.** With $u = 0$ and a first token of
# probability 0, `>=` draws what cannot be drawn. **Rounding.** For $u$ very near to 1 the running sum may end below the
# goal; `argmax` of no true entry is 0, a wrong token, once in a long while. The kernel takes the last
# place with mass instead; `torch.where` would do it here.

# %% [markdown]
# ## q4 · A schedule of slots
#
# ●●○○○ · 15 minutes
#
# Completions need `lengths[i]` steps each and wait in this order. There are `slots` slots. As soon as a slot is free,
# the next completion takes it, and stays until it ends; a slot that becomes free after step 7 works for the next one in
# step 8. Return two numbers as a tensor `[2]`: the steps until all have ended, and the share of useful slot-steps,
#
# $$\frac{\sum_i \text{lengths}_i}{\text{slots} \times \text{steps}} ,$$
#
# where all slots count, those that nobody ever takes included.
#
# Shapes: `lengths` `[completions]` int64, `slots` a number; result `[2]`.
#
# <details><summary>Hint 1: direction</summary>
# You need not go through the steps. Keep for each slot the step after which it is free.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# The next completion takes the slot that is free first, and moves that slot's time on by its length. The answer is the
# latest time.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `free = torch.zeros(slots)`; for each length `free[free.argmin()] += length`; then `free.max()`, and the sum of the
# lengths divided by `slots * free.max()`.
# </details>


# %% tags=["exercise"]
def refill_schedule(lengths: torch.Tensor, slots: int) -> torch.Tensor:
    """Steps until all completions have ended, and the share of useful slot-steps: [2]. lengths: [completions]."""
    # BEGIN SOLUTION
    free = torch.zeros(slots)
    for length in lengths:
        free[free.argmin()] += length
    steps = free.max()
    return torch.stack([steps, lengths.sum() / (slots * steps)])
    # END SOLUTION


# %%
check.q4(refill_schedule)

# %% [markdown]
# Your schedule beside waiting for the longest of each batch: 64 slots, and more and more completions of a geometric
# length. **Look for** the share of your schedule when everything fits into the slots at once, and when eight times as
# many wait.

# %%
if check.q4.passed:
    torch.manual_seed(0)
    counts = [64, 128, 256, 512, 1024]
    drawn = [(1 + torch.distributions.Geometric(1 / 150).sample((n,)).long()).clamp(max=512) for n in counts]
    waiting = [n.sum().item() / (64 * sum(part.max().item() for part in n.split(64))) for n in drawn]
    fig, ax = plt.subplots(figsize=(6, 3.2))
    yours = [100 * refill_schedule(n, 64)[1].item() for n in drawn]
    ax.plot([n // 64 for n in counts], yours, color="#009E73", marker="o", label="refill: yours")
    waited = [100 * share for share in waiting]
    ax.plot(
        [n // 64 for n in counts], waited, color="#D55E00", marker="s", linestyle="--", label="wait for the longest"
    )
    ax.set(xlabel="completions a slot", ylabel="useful slot-steps, %", ylim=(0, 100), title="64 slots")
    ax.legend(frameon=False)
    ax.grid(alpha=0.25)
    plt.show()

# %% [markdown] tags=["solution"]
# With one completion a slot, refill has nobody to take in: it is as bad as waiting. That is why a rollout should hand
# **all** its prompts to the engine at once, and let the engine have fewer slots than completions. The tail remains: at
# the end nobody waits, and the last ones run alone. Sorting the longest first would shorten it, but a length is only
# known when it has been written.

# %% [markdown]
# ## q5 · The norm after the product
#
# ●●●○○ · 15 minutes
#
# Before each matrix product of a transformer stands an RMSNorm:
#
# $$\text{norm}(x) = \frac{x}{\sqrt{\text{mean}(x^2) + \varepsilon}} \odot w , \qquad z = M\, \text{norm}(x) .$$
#
# A kernel that adds to $x$ works on a tile of columns at a time, so it does not know the mean over the whole row. But
# it can write two things: $y = x \odot w$, and the sum of $x^2$ **of its tile**. The next kernel gets `y` and the sums
# of all tiles, and must give $z$. Do what it does: the product first, the norm afterwards. You never see $x$.
#
# Shapes: `y` `[R, d]`, `squares` `[R, tiles]`, `matrix` `[out, d]`, `eps` a number; result `[R, out]`.
#
# <details><summary>Hint 1: direction</summary>
# The root is one number for each row. A product is linear: a number that scales the whole row can be applied before it
# or after it.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# The mean of the squares is the sum over the tiles, divided by $d$: the number of columns of `y`, not the number of
# tiles.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `inverse = torch.rsqrt(squares.sum(1, keepdim=True) / d + eps)`, and the product `y @ matrix.T` times that.
# </details>


# %% tags=["exercise"]
def product_of_normed(y: torch.Tensor, squares: torch.Tensor, matrix: torch.Tensor, eps: float) -> torch.Tensor:
    """matrix @ rmsnorm(x) for each row, from y = x * w and the sums of x^2 by tile: [R, out].

    y: [R, d]; squares: [R, tiles]; matrix: [out, d].
    """
    # BEGIN SOLUTION
    inverse_rms = torch.rsqrt(squares.sum(1, keepdim=True) / y.shape[1] + eps)  # [R, 1]
    return (y @ matrix.T) * inverse_rms
    # END SOLUTION


# %%
check.q5(product_of_normed)

# %% [markdown] tags=["solution"]
# **What it saves.** A norm of its own is a kernel that reads the row, waits for its whole sum, and writes the row
# again. Here the sum costs a few numbers, and the scaling happens where the product is still in registers. In
# `rlcourse/rollout/triton_kernels.py` it is `inverse_rms`. **What it costs.** `y` is rounded to 16 bits before it is
# normalised; since a float carries its own scale, that is no worse than rounding afterwards.
