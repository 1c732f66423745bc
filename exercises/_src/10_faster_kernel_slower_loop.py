# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# Five exercises for [lesson 10](../notebooks/10_faster_kernel_slower_loop.ipynb), none of them a kernel. They're about
# what surrounds one: who waits for whom in a step, a colleague's attention with four mistakes in it, the slots that a
# row may read, what the compiler must know, and finally the lesson itself: you turn a step in sixteen pieces into one.
# The first two and the last are puzzles. Write your code where it says `# YOUR CODE HERE`, then run the cell below it.
# Use only `torch`: the functions must be self-contained.
#
# Each exercise has three hints: a question, the idea, and the shape of the answer.

# %%
import math

import matplotlib.pyplot as plt
import torch

from rlcourse.course.checks import nb10 as check

torch.manual_seed(0)
print("ready")

# %% [markdown]
# ## q1 · What is a kernel worth?
#
# ●●●○○ · 20 minutes
#
# A step is $n$ kernels. The host launches them in order, and launching number $i$ takes `launch[i]` µs of its time. It
# does not wait for kernels: it goes on with the next launch at once. The GPU runs the kernels in the same order, one at
# a time. Number $i$ takes `kernel[i]` µs, and begins when it has been launched and the one before it has ended. There
# is one exception: where `reads[i]` is true, the host reads a number that kernel $i$ has computed, and can launch
# nothing more until kernel $i$ has ended. The step is over when the last kernel has ended.
#
# For each kernel: **how much earlier would the step end if only this kernel took no time?** It's still launched, and
# still read. That's the most that work on this kernel can gain.
#
# Shapes: `launch`, `kernel` `[n]` float, `reads` `[n]` bool; result `[n]`, in µs.
#
# <details><summary>Hint 1: a question</summary>
# Two workers, each with a watch: what does each wait for? Whose watch says how long the step took?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# First write a function for the time of a whole step. Go through the kernels once and keep two numbers, the time on the
# host's watch and the time on the GPU's. Sometimes one watch must be moved forward to the other.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A loop of three lines over the kernels, with a `max` for one kind of waiting and an `if` for the other. Then a loop
# around it that sets one kernel at a time to zero and subtracts.
# </details>


# %% tags=["exercise"]
def worth(launch: torch.Tensor, kernel: torch.Tensor, reads: torch.Tensor) -> torch.Tensor:
    """Microseconds that the step would save if kernel i took no time: [n]. launch, kernel: [n]; reads: [n] bool."""

    # BEGIN SOLUTION
    def step(kernel: list[float]) -> float:
        host = gpu = 0.0
        for launching, running, read in zip(launch.tolist(), kernel, reads.tolist(), strict=True):
            host += launching
            gpu = max(gpu, host) + running
            host = max(host, gpu) if read else host
        return gpu

    times = kernel.tolist()
    whole = step(times)
    return torch.tensor([whole - step([*times[:i], 0.0, *times[i + 1 :]]) for i in range(len(times))])
    # END SOLUTION


# %%
check.q1(worth)

# %% [markdown]
# Your function on four ways to run the same sixteen kernels. Number 8 is an attention of 20 µs, the others take 4. The
# gray bars are the times of the kernels, the blue ones what they are worth. **Look for** the panels in which making
# attention faster brings nothing, or hardly anything.

# %% tags=["hide-input"]
# @title Figure: what the kernels are worth
if check.q1.passed:
    kernel = torch.full((16,), 4.0)
    kernel[8] = 20.0
    never, graph = torch.zeros(16, dtype=torch.bool), torch.zeros(16)
    graph[0] = 10.0
    pieces = torch.where(torch.arange(16) % 4 == 0, 30.0, 0.0)
    ways = {
        "eager: 10 µs per launch": (torch.full((16,), 10.0), never),
        "four pieces, 30 µs per launch": (pieces, never),
        "one graph": (graph, never),
        "eager: 3 µs, a read after every 4th": (torch.full((16,), 3.0), torch.arange(16) % 4 == 3),
    }
    fig, axes = plt.subplots(1, 4, figsize=(13, 2.8), sharey=True, layout="constrained")
    for ax, (title, (launch, reads)) in zip(axes, ways.items(), strict=True):
        ax.bar(range(16), kernel, color="#dddddd", label="time of the kernel")
        ax.bar(range(16), worth(launch, kernel, reads), 0.5, color="#0072B2", label="what it is worth")
        ax.set(title=title, xlabel="kernel", xticks=range(0, 16, 4))
    axes[0].set_ylabel("µs")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    plt.show()

# %% [markdown] tags=["solution"]
# **Eagerly**, the host is the slower worker, and all kernels but the last are worth nothing: a faster one makes the GPU
# wait longer. **In one graph** every kernel is worth its full time. With **four pieces** attention takes 20 µs and is
# worth 2: the next piece comes late anyway. **A read** ties the two watches together: after it the GPU waits for the
# next launch. Without the reads attention would be worth its 20 µs, with them it is worth 17, and the step takes
# longer. That is why lesson 10 counts launches and reads before it looks at any kernel.

# %% [markdown]
# ## q2 · Four mistakes in an attention
#
# ●●●○○ · 25 minutes
#
# A colleague brings an attention for one token per row. Query heads share the heads of the cache: with $H$ query heads
# and $K$ key-value heads, the first $H/K$ query heads belong to the first key-value head, and so on. Her test model has
# one head and full caches, and there the tokens are nearly right.


# %%
def colleague(query, keys, values, mask):
    shared = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat(1, shared, 1, 1), values.repeat(1, shared, 1, 1)
    scores = query[:, :, None] @ keys.transpose(2, 3) / query.shape[-1]
    if mask is not None:
        scores = scores + mask
    return (scores.softmax(-1) @ values)[:, :, 0]


# %% [markdown]
# You have no reference, and you don't need one. Some inputs are so simple that you know what must come out. Here are
# four probes, each with one question.

# %% tags=["hide-input"]
# @title Four probes: `probe(function)`


def probe(attend) -> None:
    """Ask four questions whose answers need no reference."""
    torch.manual_seed(0)
    rows, heads, kv_heads, slots, size = 2, 6, 3, 7, 16
    query, (keys, values) = torch.randn(rows, heads, size), torch.randn(2, rows, kv_heads, slots, size)
    seen = torch.arange(slots).expand(rows, slots) < torch.tensor([[4], [6]])
    truths, numbers = seen[:, None, None], torch.zeros(rows, 1, 1, slots).masked_fill(~seen[:, None, None], -torch.inf)
    other = torch.where(seen[:, None, :, None], values, values + 100)
    changes = [(attend(query, keys, other, x) - attend(query, keys, values, x)).abs().max() for x in (truths, numbers)]
    print("1. What the mask hides changes by 100. The output changes by at most", end=" ")
    for name, change in zip(("truths", "numbers"), changes, strict=True):
        print(f"{change:.1f} with a mask of {name}", end=", " if name == "truths" else ".\n")
    named = torch.arange(kv_heads).float()[:, None, None].expand(rows, kv_heads, slots, size)
    print("2. All values of a key-value head are its number. The query heads give", end=" ")
    print([round(v, 2) for v in attend(query, keys, named, numbers)[0, :, 0].tolist()])
    keys = torch.zeros(1, 1, 2, size)
    keys[..., 0, :] = 1.0
    values = torch.tensor([1.0, 0.0])[None, None, :, None].expand(1, 1, 2, size)
    weight = attend(torch.full((1, 1, size), 0.25), keys, values, torch.zeros(1, 1, 1, 2))[0, 0, 0]
    print(
        f"3. Two slots: q.k is 4 and 0, heads have size 16. The first has {(weight / (1 - weight)).item():.2f}", end=" "
    )
    print("times the weight of the second.")
    try:
        attend(query, keys, values, None)
        print("4. Without a mask it returns something.")
    except Exception as error:
        print(f"4. Without a mask: {type(error).__name__}.")


probe(colleague)

# %% [markdown]
# Write the attention without the mistakes: `softmax` of query times key over the root of the head size, over the slots
# that the mask lets a row see. A mask is boolean (True is seen), or has numbers that are added to the scores (0 is
# seen, `-inf` hidden). If it's `None`, raise `ValueError`.
#
# Shapes: `query` `[B, H, D]`; `keys`, `values` `[B, K, S, D]`; `mask` `[B, 1, 1, S]` or None; result `[B, H, D]`.
#
# <details><summary>Hint 1: a question</summary>
# For each probe: what would correct attention have printed? Work it out on paper before you look at the code again.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Each probe finds one mistake. What is `True` as a number? In which of `[a, b, a, b]` and `[a, a, b, b]` are equal
# heads side by side? Two scores are $4 x$ and 0: how many times the second's weight does the first have?
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Her five lines, another method in the second, another divisor in the third, and instead of her `if` two of your own:
# one that refuses, and one that tells the two kinds of mask apart by their dtype.
# </details>


# %% tags=["exercise"]
def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Attention of one token per row: [B, H, D]. query: [B, H, D]; keys, values: [B, K, S, D]; mask: [B, 1, 1, S]."""
    # BEGIN SOLUTION
    if mask is None:
        raise ValueError("A decode step needs its mask: without one nobody knows which slots hold tokens.")
    shared = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(shared, dim=1), values.repeat_interleave(shared, dim=1)
    scores = query[:, :, None] @ keys.transpose(2, 3) / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return (scores.softmax(-1) @ values)[:, :, 0]
    # END SOLUTION


# %%
check.q2(attend)

# %% [markdown]
# The probes of your own version, finished or not. They tell you more than the card does.

# %%
try:
    probe(attend)
except NotImplementedError:
    print("nothing to probe yet")

# %% [markdown] tags=["solution"]
# **The mask**: `True` is 1, so what is seen gets a score that is 1 higher and nothing is hidden. **The heads**:
# `repeat` repeats the whole block of heads, `repeat_interleave` puts each head beside its copy; a model with one head
# can't tell. **The scale**: 1.28 is $e^{4/16}$, correct attention gives $e^{4/4} = 2.72$. Weights that are too flat
# raise no error. **The missing mask**: the only mistake that ought to be loud. Probes like these need no reference, no
# GPU and no tolerance to argue about, and each of them is a test that you can leave in place.

# %% [markdown]
# ## q3 · Which slots a row may read
#
# ●●○○○ · 12 minutes
#
# A kernel wants two numbers per row, not a mask: the first slot and the last slot that it may attend to. A decode
# step's mask is `[B, 1, 1, S]`: either booleans (True is seen), or numbers that are added to the scores (0 is seen,
# `-inf` hidden). Rows are padded on the left, so what a row sees is one run of slots, never empty. Return them as int64
# `[2, B]`: first slots, last slots. If the mask is `None`, raise `ValueError`: never guess.
#
# <details><summary>Hint 1: a question</summary>
# If you had a row's mask in front of you as a list of booleans, which two things would you look for?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# First bring both kinds of mask to one. What a row sees is one run, so its beginning and length say everything. If
# several entries tie, `argmax` gives the first.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Four steps: refuse; `[B, S]` booleans; the place where each row's run begins; from its length, where it ends. Stack
# the two. No loop, and nothing that asks the device for a number.
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
# Your function on the mask of three rows. **Look for** the first row's padding, and the slots after the newest token:
# they hold nothing yet.

# %% tags=["hide-input"]
# @title Figure: what a row sees
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
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    plt.show()

# %% [markdown] tags=["solution"]
# **Two numbers instead of a mask.** A mask has $S$ entries per row, which must be made, moved and read, and the kernel
# would have to look at all of them to find out that most slots are hidden. **Everything on the device.** No `.item()`,
# no `int(...)`: `argmax` and `sum` are operations and stay in the graph. **Why not guess without a mask.** "All slots"
# is right in a full cache without padding, and wrong everywhere else, without an error.

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
# <details><summary>Hint 1: a question</summary>
# Which three properties of each result does the code after it depend on, and which of them does `q` share?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# `empty_like` takes over too much: dtype, shape **and** the order of the strides. Tensors have a method that takes over
# only dtype and device.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Two tensors made from `q` and one list. Sizes come from `q` and from `values`; one dtype is inherited, one is given.
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
# **Why strides.** The compiler generates the code that comes after from the fake alone. With wrong strides that code
# reads the right memory in the wrong order, and at best an assertion fails somewhere far away. **Why no computing.** A
# fake is called with tensors that have no data. `q.new_empty(...)` is enough, and is the same on every device.

# %% [markdown]
# ## q5 · From sixteen pieces to one
#
# ●●●●○ · 30 minutes
#
# A colleague's decode step has four layers. `launch` starts her kernel. Here it's a few lines of PyTorch that Dynamo
# may not look into, which is how a launcher written in C looks to Dynamo.


# %%
@torch.compiler.disable
def launch(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Attention of one token per row to the slots up to its position. q: [B, D]; keys, values: [B, S, D]."""
    seen = torch.arange(keys.shape[1]) <= position[:, None]
    scores = (keys @ q[:, :, None])[..., 0] / q.shape[1] ** 0.5
    return (scores.masked_fill(~seen, -torch.inf).softmax(1)[:, None] @ values)[:, 0]


def her_layer(x, weight, keys, values, position):
    longest = position.max().item() + 1  # nobody needs the slots after it
    out = launch(x @ weight, keys[:, :longest], values[:, :longest], position)
    if out.abs().max() > 1e4:
        raise ValueError("The attention overflowed.")
    return x + out


def hers(x, weights, keys, values, position):
    for weight, k, v in zip(weights, keys, values, strict=True):
        x = her_layer(x, weight, k, v, position)
    return x


# %% tags=["hide-input"]
# @title Count pieces: `show_pieces(step)`
def example() -> tuple:
    """Inputs of a step: four layers, three rows, a cache of six slots."""
    torch.manual_seed(0)
    x, weights = torch.randn(3, 8), 0.3 * torch.randn(4, 8, 8)
    return x, weights, *torch.randn(2, 4, 3, 6, 8).unbind(0), torch.tensor([1, 4, 2])


def made(make):
    """What `make` makes; None as long as it's a hole."""
    try:
        return make()
    except NotImplementedError:
        return None


def show_pieces(step) -> None:
    """Print the graphs that Dynamo makes of a step, in the order in which they run."""
    from rlcourse.course.calls import pieces

    ran = pieces(step, *example())
    print(f"{step.__name__}: {len(ran)} pieces, operations in each: {[len(piece) for piece in ran]}")


show_pieces(hers)

# %% [markdown]
# Four pieces per layer, and the kernel in none of them. Write a step with the same result that Dynamo captures as
# **one** graph, in which the host reads no number. The kernel must stay what it is: call `launch`, as an operation. You
# may write helpers in the cell, and you may drop what the result doesn't depend on.
#
# Shapes: `x` `[B, D]`; `weights` `[L, D, D]`; `keys`, `values` `[L, B, S, D]`; `position` `[B]` int64; result `[B, D]`.
#
# <details><summary>Hint 1: a question</summary>
# Three lines of her layer end a graph. Which of them does the result depend on?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# The compiler needn't look into the kernel if it knows what comes out: `torch.library.custom_op(name, function,
# mutates_args=())` makes an operation of a function with types, and `.register_fake` says what comes out. The other two
# lines ask the GPU for a number. `launch` takes the whole cache, since it hides the slots after each position.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# An operation with its fake, made once, outside of the step. Then a loop over layers with one line in it. You can check
# for overflow once, outside the step.
# </details>


# %% tags=["exercise"]
def registered():
    """`launch` as an operation that stays in the graph."""
    # BEGIN SOLUTION
    operation = torch.library.custom_op("exercise10::launch", launch, mutates_args=())
    operation.register_fake(lambda q, keys, values, position: q.new_empty(q.shape))
    return operation
    # END SOLUTION


def one_graph(x, weights, keys, values, position):  # call `kernel`, which the line at the end makes
    """The step in one graph: [B, D]. x: [B, D]; weights: [L, D, D]; keys, values: [L, B, S, D]; position: [B]."""
    # BEGIN SOLUTION
    for weight, k, v in zip(weights, keys, values, strict=True):
        x = x + kernel(x @ weight, k, v, position)
    return x
    # END SOLUTION


kernel = made(registered)

# %%
check.q5(one_graph)

# %%
if check.q5.passed:
    show_pieces(one_graph)

# %% [markdown] tags=["solution"]
# **The kernel** ends a graph because Dynamo can't see what it does; as an operation with a fake it's one node among
# others. **`.item()`** saves the kernel a few slots and makes the host wait for the GPU in every layer: a kernel that
# reads `position` on the device needs no slice. **The check** is an `if` on a number from the GPU, so it makes the host
# wait as well. Keep the largest value in a tensor and look at it when the step is over. Fix one of the three and you
# have fewer pieces, but still pieces. Only a step without breaks and without reads can be recorded as one CUDA graph.
