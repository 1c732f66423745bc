# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# Five exercises for [lesson 10](../notebooks/10_faster_kernel_slower_loop.ipynb). None of them is a kernel. They are
# what stands around one: what it can gain at most, how many pieces a compiled step falls into, which slots it may read,
# what the compiler must know of it, and how a table of measurements tells where a step is broken. Write your code where
# it says `# YOUR CODE HERE`, then run the cell below it. Use `torch` alone: the functions must stand by themselves.

# %%
import matplotlib.pyplot as plt
import torch

from rlcourse.course.checks import nb10 as check

torch.manual_seed(0)
print("ready")

# %% [markdown]
# ## q1 · A gain for a whole rollout
#
# ●●○○○ · 12 minutes
#
# Step $t$ of a rollout spends `attention_ms[t]` in attention, which grows with the context, and `rest_ms` on everything
# else. A new kernel makes attention `faster` times as fast, and the way in which it is called adds `added_ms` to
# **each** step. Return three numbers as a tensor `[3]`:
#
# 1. time of the whole rollout before, through time after;
# 2. the same if attention were free and nothing were added: the bound that no kernel can pass;
# 3. the `added_ms` at which the rollout would be exactly as long as before, in milliseconds a step.
#
# Shapes: `attention_ms` `[T]`; the others are numbers; result `[3]`.
#
# <details><summary>Hint 1: direction</summary>
# Do not use Amdahl's formula with one share: the share differs from step to step. Add up times.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Before: the sum of `attention_ms + rest_ms`. After: the sum of `attention_ms / faster + rest_ms + added_ms`. What may
# be added is what the kernel saves, on average.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `before = (attention_ms + rest_ms).sum()`; `after = (attention_ms / faster + rest_ms + added_ms).sum()`; the bound is
# `before / (len(attention_ms) * rest_ms)`; the third is `(attention_ms - attention_ms / faster).mean()`.
# </details>


# %% tags=["exercise"]
def rollout_gain(attention_ms: torch.Tensor, rest_ms: float, faster: float, added_ms: float) -> torch.Tensor:
    """Speed-up of a rollout, its bound, and the addition a step that eats the gain: [3]. attention_ms: [T]."""
    # BEGIN SOLUTION
    before = (attention_ms + rest_ms).sum()
    after = (attention_ms / faster + rest_ms + added_ms).sum()
    bound = before / (len(attention_ms) * rest_ms)
    return torch.stack([before / after, bound, (attention_ms - attention_ms / faster).mean()])
    # END SOLUTION


# %%
check.q1(rollout_gain)

# %% [markdown]
# Your function for made-up numbers: attention goes from 0.2 to 1 ms in a step of which the rest takes 2 ms. **Look
# for** the two places where a line meets 1: one kernel is better, and neither may add much.

# %%
if check.q1.passed:
    attention = torch.linspace(0.2, 1.0, 64)
    added = torch.linspace(0, 1, 41)
    fig, ax = plt.subplots(figsize=(6.5, 3.4))
    for faster, color, style in ((2.2, "#0072B2", "-"), (100.0, "#D55E00", "--")):
        results = [rollout_gain(attention, 2.0, faster, a) for a in added.tolist()]
        ax.plot(added, [r[0] for r in results], color=color, linestyle=style, label=f"kernel {faster:g} x as fast")
        ax.plot(results[0][2], 1.0, color=color, marker="o", markersize=8)
    ax.axhline(results[0][1], color="black", linestyle=":", label="bound: attention for free")
    ax.axhline(1.0, color="gray", linewidth=0.8)
    ax.set(xlabel="ms added to a step", ylabel="speed-up of the rollout", title="What a faster kernel may cost")
    ax.legend(frameon=False)
    ax.grid(alpha=0.25)
    plt.show()

# %% [markdown] tags=["solution"]
# **Times add up, speed-ups do not.** The mean of the steps' gains gives a short step as much say as a long one. **The
# third number is the one to know before you write a kernel.** It does not depend on `rest_ms`: whatever the model, a
# kernel that saves 20 µs in each of 24 layers saves half a millisecond a step, and one more launch that the host must
# wait for in each layer can cost that.

# %% [markdown]
# ## q2 · How many pieces a step
#
# ●●●○○ · 20 minutes
#
# Dynamo keeps compiled versions of a *function*, each with a guard: the value (say, the number of a layer) that it was
# compiled for. A step calls functions in order: call $i$ is of function `codes[i]` with value `guards[i]`. At a call
#
# - if there is a version for this function and value, it runs;
# - else, if the function has fewer than `limit` versions, one is compiled, and runs;
# - else the call runs eagerly. The versions that there are stay.
#
# The same step runs again and again. Return `[versions, compiled, eager]`: versions there are in all, and how many
# calls of one **later** step run compiled and eagerly.
#
# Shapes: `codes`, `guards` `[calls]` int64, `limit` a number at least 1; result `[3]`.
#
# <details><summary>Hint 1: direction</summary>
# A dictionary from a function to the set of values that it has versions for. Go through the calls once to fill it.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# After one step nothing is compiled any more: who has no version now was refused, and will be refused again. A second
# pass counts.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `versions = {}`; for each pair: `own = versions.setdefault(code, set())`, and `if len(own) < limit: own.add(guard)`.
# Then `compiled = sum(guard in versions[code] for ...)`, and the lengths of all sets added up.
# </details>


# %% tags=["exercise"]
def pieces_a_step(codes: torch.Tensor, guards: torch.Tensor, limit: int) -> torch.Tensor:
    """Versions in all, and calls of a later step that run compiled and eagerly: [3]. codes, guards: [calls] int64."""
    # BEGIN SOLUTION
    calls = list(zip(codes.tolist(), guards.tolist(), strict=True))
    versions = {}
    for code, guard in calls:
        own = versions.setdefault(code, set())
        if len(own) < limit:
            own.add(guard)
    compiled = sum(guard in versions[code] for code, guard in calls)
    return torch.tensor([sum(map(len, versions.values())), compiled, len(calls) - compiled])
    # END SOLUTION


# %%
check.q2(pieces_a_step)

# %% [markdown]
# Your function for a model whose attention breaks the graph in each layer: one function that looks at the layer's
# number, and three that do not. **Look for** the line that stops, and the one that does not.

# %%
if check.q2.passed:
    layers = list(range(1, 33))
    counts = []
    for depth in layers:
        guards = torch.stack([torch.arange(depth), *torch.zeros(3, depth).long()], dim=1).flatten()
        counts.append(pieces_a_step(torch.arange(4).repeat(depth), guards, 8))
    fig, ax = plt.subplots(figsize=(6.5, 3.4))
    styles = (("versions", "#E69F00", ":"), ("compiled calls", "#0072B2", "-"), ("eager calls", "#D55E00", "--"))
    for (label, color, style), values in zip(styles, zip(*counts, strict=True), strict=True):
        ax.plot(layers, values, color=color, linestyle=style, label=label)
    ax.axvline(8, color="gray", linewidth=0.8)
    ax.set(xlabel="layers", ylabel="count, of one step", title="One break a layer, recompile limit 8")
    ax.legend(frameon=False)
    ax.grid(alpha=0.25)
    plt.show()

# %% [markdown] tags=["solution"]
# **Why the limit is there.** Without it, a function called with another number each time would be compiled for ever.
# **Why it hurts here.** The number that differs is not data but *which layer it is*; after the limit the heaviest part
# of the layer, its projections and its cache write, runs eagerly, and the light parts around it stay compiled. Raising
# the limit gives more compiled pieces, not fewer: the cure is no break.

# %% [markdown]
# ## q3 · Which slots a row may read
#
# ●●○○○ · 12 minutes
#
# A kernel wants two numbers a row, not a mask: the first slot and the last slot that it may attend to. The mask of a
# decode step is `[B, 1, 1, S]`: either truths (True is seen), or numbers that are added to the scores (0 is seen,
# `-inf` hidden). Rows are padded on the left, so what a row sees is one run of slots, never empty. Return them as int64
# `[2, B]`: first slots, last slots. If the mask is `None`, raise `ValueError`: never guess.
#
# <details><summary>Hint 1: direction</summary>
# Make it one kind of mask first, `[B, S]` of truths. Then: where is the first True, and how many are there?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# `argmax` of a tensor of 0 and 1 is the place of the first 1. The last is the first, plus how many, less one.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `seen = mask[:, 0, 0]`; `if seen.dtype != torch.bool: seen = seen == 0`; `first = seen.long().argmax(1)`; `last =
# first + seen.sum(1) - 1`; `torch.stack([first, last])`.
# </details>


# %% tags=["exercise"]
def first_and_last_slot(mask: torch.Tensor | None) -> torch.Tensor:
    """First and last slot that each row sees: int64 [2, B]. mask: [B, 1, 1, S]; raises ValueError without one."""
    # BEGIN SOLUTION
    if mask is None:
        raise ValueError("A decode step needs its mask: without one nobody knows which slots hold tokens.")
    seen = mask[:, 0, 0]
    if seen.dtype != torch.bool:
        seen = seen == 0
    first = seen.long().argmax(1)
    return torch.stack([first, first + seen.sum(1) - 1])
    # END SOLUTION


# %%
check.q3(first_and_last_slot)

# %% [markdown]
# Your function on the mask of three rows. **Look for** the first row's padding and the slots behind the newest token,
# which hold nothing yet.

# %%
if check.q3.passed:
    slots = torch.arange(10)
    starts, ends = torch.tensor([3, 0, 1]), torch.tensor([6, 6, 6])
    mask = (slots >= starts[:, None]) & (slots <= ends[:, None])
    first, last = first_and_last_slot(mask[:, None, None])
    fig, ax = plt.subplots(figsize=(6.5, 2.2))
    ax.imshow(mask, cmap="Blues", vmin=0, vmax=2)
    ax.plot(first, range(3), color="#009E73", marker=">", markersize=10, linestyle="", label="first")
    ax.plot(last, range(3), color="#D55E00", marker="<", markersize=10, linestyle="", label="last")
    ax.set(xlabel="slot", ylabel="row", xticks=range(10), yticks=range(3), title="What a row sees")
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    plt.show()

# %% [markdown] tags=["solution"]
# **Two numbers instead of a mask.** A mask of $S$ entries a row must be made, moved and read; and the kernel would have
# to look at all $S$ slots to find out that most are hidden. With two numbers it never touches them. **Everything on the
# device.** No `.item()`, no `int(...)`: `argmax` and `sum` are operations, and stay in the graph. **Why not guess
# without a mask.** "All slots" is right in a full cache without padding, and wrong everywhere else, without an error.

# %% [markdown]
# ## q4 · What the compiler must know
#
# ●●●○○ · 15 minutes
#
# An attention kernel takes `q` `[R, H, D]`, `keys` `[R, K, S, D]`, `values` `[R, K, S, E]` and gives two tensors: the
# output `[R, H, E]` in the dtype of `q`, written row by row without gaps, and the log of the sum of exponentials `[R,
# H]`, always float32. To keep it in its graph, the compiler needs a **fake**: a function that makes tensors of the same
# shape, dtype and strides, with anything in them, and computes nothing. Write it. Return three things: the output, the
# log-sum, and a list of the output's strides (so that they can be checked).
#
# `q` may be a view: its own strides tell nothing about those of the output.
#
# <details><summary>Hint 1: direction</summary>
# Not `empty_like`: it takes over dtype, shape **and** the order of the strides.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# `q.new_empty(shape)` has the dtype and the device of `q` and no gaps; `dtype=` changes the dtype.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `out = q.new_empty(*q.shape[:2], values.shape[-1])`; `logsum = q.new_empty(q.shape[:2], dtype=torch.float32)`; `return
# out, logsum, list(out.stride())`.
# </details>


# %% tags=["exercise"]
def fake_attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Output [R, H, E] of q's dtype, log-sum [R, H] float32, strides of the output; what is in them does not matter.

    q: [R, H, D], strides free; keys: [R, K, S, D]; values: [R, K, S, E].
    """
    # BEGIN SOLUTION
    out = q.new_empty(*q.shape[:2], values.shape[-1])
    return out, q.new_empty(q.shape[:2], dtype=torch.float32), list(out.stride())
    # END SOLUTION


# %%
check.q4(fake_attend)

# %% [markdown]
# Your fake in use. An operation with a reference in the kernel's place is registered with it, `opcheck` compares the
# two, and `fullgraph=True` accepts a function with it in the middle.

# %%
if check.q4.passed:

    @torch.library.custom_op("exercise10::attend", mutates_args=())
    def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1).float() for x in (keys, values))
        scores = (q.float()[:, :, None] @ keys.transpose(2, 3) / q.shape[-1] ** 0.5)[:, :, 0]
        out = (scores.softmax(-1)[:, :, None] @ values)[:, :, 0]
        return out.to(q.dtype).contiguous(), scores.logsumexp(-1)

    attend.register_fake(lambda q, keys, values: fake_attend(q, keys, values)[:2])
    inputs = torch.randn(6, 3, 8).transpose(0, 1), torch.randn(3, 2, 5, 8), torch.randn(3, 2, 5, 8)
    for name, verdict in torch.library.opcheck(attend, inputs).items():
        print(f"{name:32} {verdict}")
    graphs = []

    def backend(graph, example):
        graphs.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward

    compiled = torch.compile(lambda *x: 2 * attend(*x)[0] + 1, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), 2 * attend(*inputs)[0] + 1)
    print(f"graphs: {len(graphs)}, operations in each: {graphs}")

# %% [markdown] tags=["solution"]
# **Why strides.** The compiler makes code for what comes after from the fake alone. With wrong strides that code reads
# the right memory in the wrong order; nothing fails but, at best, an assertion far away. **Why no computing.** A fake
# is called with tensors that have no data. `q.new_empty(...)` is enough, and is the same on every device.

# %% [markdown]
# ## q5 · Read the table
#
# ●●●○○ · 15 minutes
#
# Each row of `table` is a decode step that somebody measured: `ms`, `floor_ms` (the time its bytes take), `busy` (share
# of the step in which the GPU works), `kernels` and `launches` in it. Name what is wrong, by the **first** rule that
# holds:
#
# | verdict | rule |
# | --- | --- |
# | 0, nothing | `ms` is at most twice the floor |
# | 1, in pieces | busy less than half, and the launches are more than half as many as the kernels |
# | 2, waits for the host | busy less than half |
# | 3, too many kernels | `kernels` times `kernel_us` is more than half of the time in which the GPU works |
# | 4, slow kernels | everything else |
#
# `kernel_us` is the least time of any kernel, in **micro**seconds.
#
# Shapes: `table` `[steps, 5]`; result int64 `[steps]`.
#
# <details><summary>Hint 1: direction</summary>
# A loop over rows with if and elif is fine. Mind the units.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# The time in which the GPU works is `busy * ms`. Launches many or few: beside the kernels of the same step.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `if ms <= 2 * floor: 0`; `elif busy < 0.5: 1 if launches > kernels / 2 else 2`; `elif kernels * kernel_us / 1000 >
# busy * ms / 2: 3`; `else: 4`.
# </details>


# %% tags=["exercise"]
def diagnose(table: torch.Tensor, kernel_us: float) -> torch.Tensor:
    """What is wrong with each decode step, 0 to 4: int64 [steps].

    table: [steps, 5], columns ms, floor_ms, busy, kernels, launches; kernel_us: microseconds of the smallest kernel.
    """
    # BEGIN SOLUTION
    found = []
    for ms, floor, busy, kernels, launches in table.tolist():
        if ms <= 2 * floor:
            found.append(0)
        elif busy < 0.5:
            found.append(1 if launches > kernels / 2 else 2)
        elif kernels * kernel_us / 1000 > busy * ms / 2:
            found.append(3)
        else:
            found.append(4)
    return torch.tensor(found)
    # END SOLUTION


# %%
check.q5(diagnose)

# %% [markdown]
# Your diagnosis of steps that were really measured, if the record is there: the ladder of lesson 07. We assume that no
# kernel takes less than 1.3 µs. **Look for** the rung at which "in pieces" ends, and what is wrong after it.

# %%
if check.q5.passed:
    from rlcourse.measure.records import load_record, provenance

    VERDICTS = ("nothing", "in pieces", "waits for the host", "too many kernels", "slow kernels")
    COLUMNS = ("ms_per_step", "floor_ms", "busy", "kernels_a_step", "launches_a_step")
    try:
        record = load_record("decode", "NVIDIA H200")
        rows = [r for r in record["results"] if all(c in r for c in COLUMNS)]
        verdicts = diagnose(torch.tensor([[r[c] for c in COLUMNS] for r in rows]), 1.3)
        for row, verdict in zip(rows, verdicts.tolist(), strict=True):
            print(f"{row['variant']:20} {row['rows']:4} rows {row['ms_per_step']:8.2f} ms: {VERDICTS[verdict]}")
        print(provenance(record))
    except FileNotFoundError:
        print("Not recorded yet: `rlcourse bench decode --record` makes the record.")

# %% [markdown] tags=["solution"]
# **The order of the rules is the order of repair.** As long as the GPU waits, no kernel is worth working on: a faster
# one makes it wait longer. "In pieces" and "waits for the host" look alike in `ms` and in `busy`; the launches tell
# them apart. In the first case the step must become one graph; in the second it is one, and what stands between two
# steps must go. **The thresholds are rules of thumb**: near to one, look at the trace.
