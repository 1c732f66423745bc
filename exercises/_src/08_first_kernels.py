# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# Five exercises for [lesson 08](../notebooks/08_first_kernels.ipynb). Three are functions on plain numbers: the offsets
# of a layout, the sectors of a warp, the elements of a lane. They need `torch` alone. Two are **kernels**: the checks
# compile them and run them in the interpreter, which finds what is out of bounds, unordered or never written; then on
# your GPU, if there is one. Kernels need CuTe DSL (Linux: `pip install "rlcourse[kernels]"`; in Colab `%pip install
# "nvidia-cutlass-dsl>=4.8.1,<4.9" "apache-tvm-ffi>=0.1.15,<0.2"`). `rlcourse grade` grades the first three.
#
# Write your code where it says `# YOUR CODE HERE`, then run the cell below it.

# %%
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch

from rlcourse.course.checks import nb08 as check
from rlcourse.kernels.dsl import Float32, cute, range_constexpr
from rlcourse.kernels.toolchain import Argument, simulate

torch.manual_seed(0)
print("ready")

# %% [markdown]
# ## q1 · The offsets of a layout
#
# ●●○○○ · 10 minutes
#
# A layout is written `shape:stride`. It takes coordinates $(i_0, i_1, \dots)$ to the offset $\sum_m i_m\, d_m$. It also
# takes a single number $k$: the coordinates are then counted with the **first mode fastest**, so in a layout of shape
# $(4, 8)$ the number 5 is the coordinate $(1, 1)$. List the offsets of $k = 0, 1, 2, \dots$ up to the last.
#
# Shapes: `shape`, `stride` lists of as many ints; result `[product of shape]` int64.
#
# <details><summary>Hint 1: direction</summary>
# First turn k into coordinates, then the coordinates into an offset. The shape is needed for the first step alone, the
# stride for the second alone.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# $i_0 = k \bmod n_0$. What is left is $\lfloor k / n_0 \rfloor$, from which $i_1$ is taken in the same way.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `k = torch.arange(math.prod(shape))`, `total = torch.zeros_like(k)`; for each `size, step`: `total += k % size *
# step`, then `k = k // size`.
# </details>


# %% tags=["exercise"]
def offsets(shape: list[int], stride: list[int]) -> torch.Tensor:
    """Offsets of the coordinates number 0, 1, 2, ..., first mode fastest: [product of shape] int64."""
    # BEGIN SOLUTION
    k = torch.arange(torch.tensor(shape).prod())
    total = torch.zeros_like(k)
    for size, step in zip(shape, stride, strict=True):
        total += k % size * step
        k = k // size
    return total
    # END SOLUTION


# %%
check.q1(offsets)

# %% [markdown]
# Your function draws three layouts of a matrix of 4 × 8. The number in a cell is its offset. **Look for** where 0, 1, 2
# and 3 lie: these stand side by side in memory.

# %%
if check.q1.passed:
    drawn = {
        "row-major": ([4, 8], [8, 1]),
        "column-major": ([4, 8], [1, 4]),
        "tiles of 2 x 4": ([2, 2, 4, 2], [4, 16, 1, 8]),  # row in a tile, tile's row, column in a tile, tile's column
    }
    fig, axes = plt.subplots(1, 3, figsize=(11, 2.3))
    for ax, (name, layout) in zip(axes, drawn.items(), strict=True):
        found = offsets(*layout).view(8, 4).T
        ax.imshow(found, cmap="Blues", vmax=45)
        for i in range(4):
            for j in range(8):
                ax.text(j, i, int(found[i, j]), ha="center", va="center", fontsize=9)
        ax.set(title=name, xticks=[], yticks=[])
    plt.show()

# %% [markdown] tags=["solution"]
# **One function, all layouts.** Row-major, column-major, padded, broadcast (stride 0), transposed, tiled: they differ
# in numbers, never in code. The tiled one has four modes where the matrix has two. CuTe writes them as nested pairs,
# `((2,2),(4,2)):((4,16),(1,8))`, so that it still has two modes and can be indexed with `(row, column)`.

# %% [markdown]
# ## q2 · How many sectors?
#
# ●●○○○ · 10 minutes
#
# A warp executes one load. Lane $l$ asks for `size` bytes from `addresses[w, l]` on. The memory moves whole *sectors*
# of 32 bytes, and each sector that somebody in the warp asks for is moved once for this load. Count them, warp by
# warp. Lanes that are not `active` ask for nothing. `size` is at most 32 and divides each address, so no access
# reaches into two sectors.
#
# Shapes: `addresses` `[W, 32]` int64, `size` an int, `active` `[W, 32]` bool; result `[W]` int64.
#
# <details><summary>Hint 1: direction</summary>
# The number of a sector is the address divided by 32. How many **different** numbers has a warp?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Different numbers are easily counted in a sorted list: each place that differs from the one before it begins a new
# one. Or use a loop over the warps and `torch.unique`.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `[len(torch.unique(warp[on] // 32)) for warp, on in zip(addresses, active)]`, made a tensor.
# </details>


# %% tags=["exercise"]
def sectors(addresses: torch.Tensor, size: int, active: torch.Tensor) -> torch.Tensor:
    """Sectors of 32 bytes that a load of `size` bytes a lane moves for each warp: [W] int64.

    addresses: [W, 32] int64, of each lane's first byte; active: [W, 32] bool.
    """
    # BEGIN SOLUTION
    return torch.tensor([len(torch.unique(warp[on] // 32)) for warp, on in zip(addresses, active, strict=True)])
    # END SOLUTION


# %%
check.q2(sectors)

# %% [markdown]
# What your function says of a load of 4 bytes a lane, with more and more distance between neighbours. **Look for** the
# stride from which on it gets no worse.

# %%
if check.q2.passed:
    strides = torch.arange(33)  # in elements of 4 bytes
    moved = [32 * int(sectors(4 * s * torch.arange(32)[None], 4, torch.ones(1, 32, dtype=torch.bool))) for s in strides]
    fig, ax = plt.subplots(figsize=(6.5, 2.8))
    ax.plot(strides, moved, color="#0072B2", marker="o", markersize=4)
    ax.axhline(128, color="black", linestyle=":", label="what the 32 lanes use: 128 bytes")
    ax.set(xlabel="stride in elements of 4 bytes", ylabel="bytes moved", title="One load of a warp", ylim=(0, None))
    ax.legend(frameon=False)
    plt.show()

# %% [markdown] tags=["solution"]
# **Why `unique` and not a division.** Bytes / 32 is right for neighbours that begin at a multiple of 32. The same 128
# bytes from an address 16 bytes further on touch five sectors, not four. With stride 0 all lanes share one sector: a
# *broadcast*, which is cheap. From stride 8 on every lane has a sector of its own, and 7 of 8 bytes are moved for
# nothing. The size of an access does not enter at all: aligned, it never leaves its sector.

# %% [markdown]
# ## q3 · Which lane holds what
#
# ●●●○○ · 15 minutes
#
# A row of `hidden` elements is shared by `lanes` threads. A piece is `vector` elements in a row, what a lane loads at
# once. Neighbouring lanes take neighbouring pieces; when all have one, the next round begins. So lane $l$'s piece
# number $i$ begins at element $(i \cdot \text{lanes} + l) \cdot \text{vector}$. List the elements that each lane
# holds, in the order in which it holds them: a *thread-value layout* as a table. Each lane takes part in as many
# rounds as are needed for the whole row. What lies behind the end is -1.
#
# Shapes: three ints; result `[lanes, rounds * vector]` int64.
#
# <details><summary>Hint 1: direction</summary>
# Three coordinates: lane, piece, and place in the piece. Each has its own stride.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# A sum of three `arange`s of shapes `[lanes, 1, 1]`, `[1, rounds, 1]` and `[1, 1, vector]`; `rounds` is
# $\lceil \text{hidden} / (\text{lanes} \cdot \text{vector}) \rceil$.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `rounds = -(-hidden // (lanes * vector))`; `lane = torch.arange(lanes)[:, None, None] * vector`; `piece =
# torch.arange(rounds)[:, None] * lanes * vector`; add `torch.arange(vector)`, flatten the last two dimensions, then
# `torch.where(held < hidden, held, -1)`.
# </details>


# %% tags=["exercise"]
def thread_values(hidden: int, lanes: int, vector: int) -> torch.Tensor:
    """The elements that each lane holds, -1 behind the end: [lanes, rounds * vector] int64."""
    # BEGIN SOLUTION
    rounds = -(-hidden // (lanes * vector))
    lane = torch.arange(lanes)[:, None, None] * vector
    piece = torch.arange(rounds)[:, None] * lanes * vector
    held = (lane + piece + torch.arange(vector)).flatten(1)
    return torch.where(held < hidden, held, -1)
    # END SOLUTION


# %%
check.q3(thread_values)

# %% [markdown]
# Your table as a picture: a row of 48 elements, 4 lanes, pieces of 8. The colour is the lane. The second line is the
# other way to share, a long stretch for each lane. **Look for** what the four lanes ask for in their first load.

# %%
if check.q3.passed:
    owner = torch.full((2, 64), -1)
    for lane, held in enumerate(thread_values(48, 4, 8)):
        owner[0, held[held >= 0]] = lane
    owner[1, :48] = torch.arange(48) // 12
    fig, ax = plt.subplots(figsize=(9, 1.6))
    ax.imshow(owner[:, :48], cmap="viridis", aspect="auto")
    ax.set(yticks=[0, 1], yticklabels=["dealt out", "stretches"], xticks=range(0, 48, 8), xlabel="element")
    plt.show()

# %% [markdown] tags=["solution"]
# **Dealt out** is the coalesced way: in each round the warp loads one unbroken stretch. With stretches, each lane's
# piece lies far from its neighbour's, and one load touches one sector a lane. **Behind the end**: a row of 896
# elements has 112 pieces of 8; 32 lanes need four rounds, and in the last only half of them have work. The lesson's
# RMSNorm takes 16 lanes a row instead, where the rounds come out even.

# %% [markdown]
# ## q4 · A kernel: the squared relu
#
# ●●●●○ · 25 minutes · needs CuTe DSL
#
# $\text{out} = \text{relu}(\text{gate})^2 \cdot \text{up}$, for bfloat16 vectors of any length $n$ (So et al. 2021,
# arXiv:2109.08668, use the squared relu). The host's part is given. Write the kernel, what each thread does:
#
# - a thread has 8 neighbouring elements: 16 bytes, in **one** load of `gate` and one of `up`, and one store;
# - arithmetic in `Float32`, rounded to bfloat16 once, at the end;
# - $n$ need not be a multiple of 8. No thread may touch anything behind the end, not even to read it.
#
# Shapes: `gate`, `up`, `out` `[n]` bfloat16.
#
# <details><summary>Hint 1: direction</summary>
# It is `WideAdd` of the lesson with other arithmetic and 8 values of 16 bits. One branch for threads whose 8 elements
# are all there, one for the rest.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# `held = cute.make_rmem_tensor(8, out.element_type)` is a thread's own place for 8 values;
# `cute.tiled_divide(gate, (8,))[None, piece]` is piece number `piece` of a tensor; `cute.autovec_copy(source, target)`
# copies 16 bytes at once. `gate[i].to(Float32)` converts, `.to(out.element_type)` converts back. Loops over a constant
# number of values are `for i in range_constexpr(8)`.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `first = (block * self.threads + thread) * 8`; `if first + 8 <= gate.shape[0]:` two `autovec_copy`s into `g` and `u`,
# then for each `i`: `wide = g[i].to(Float32)`, `wide = wide if wide > 0.0 else Float32(0.0)`, `g[i] = (wide * wide *
# u[i].to(Float32)).to(out.element_type)`, then `autovec_copy(g, ...)` to `out`. `else:` the same for `gate[first + i]`
# under `if first + i < gate.shape[0]`.
# </details>


# %% tags=["exercise"]
@dataclass(frozen=True)
class ReluSquared:
    """out = relu(gate)^2 * up; bfloat16 [n], any n."""

    threads: int = 128

    def arguments(self) -> tuple:
        gate, up = (Argument(name, "bfloat16", ("n",)) for name in ("gate", "up"))
        return gate, up, Argument("out", "bfloat16", ("n",), output=True)

    def grid(self, gate, up, out):
        return -(-gate.shape[0] // (8 * self.threads)), 1, 1

    @cute.jit
    def __call__(self, gate: cute.Tensor, up: cute.Tensor, out: cute.Tensor, stream):
        self.kernel(gate, up, out).launch(grid=self.grid(gate, up, out), block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, gate: cute.Tensor, up: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        # BEGIN SOLUTION
        first = (block * self.threads + thread) * 8
        if first + 8 <= gate.shape[0]:
            g, u = (cute.make_rmem_tensor(8, out.element_type) for _ in range(2))
            cute.autovec_copy(cute.tiled_divide(gate, (8,))[None, first // 8], g)
            cute.autovec_copy(cute.tiled_divide(up, (8,))[None, first // 8], u)
            for i in range_constexpr(8):
                wide = g[i].to(Float32)
                wide = wide if wide > 0.0 else Float32(0.0)
                g[i] = (wide * wide * u[i].to(Float32)).to(out.element_type)
            cute.autovec_copy(g, cute.tiled_divide(out, (8,))[None, first // 8])
        else:
            for i in range_constexpr(8):
                if first + i < gate.shape[0]:
                    one = gate[first + i].to(Float32)
                    one = one if one > 0.0 else Float32(0.0)
                    out[first + i] = (one * one * up[first + i].to(Float32)).to(out.element_type)
        # END SOLUTION


# %%
check.q4(ReluSquared)

# %% [markdown]
# What your kernel moves for a vector of 4096 elements, as the interpreter counted it.

# %%
if check.q4.passed:
    gate, up = (torch.randn(4096).to(torch.bfloat16) for _ in range(2))
    report = simulate(ReluSquared(), gate, up, torch.empty_like(gate))
    print(f"read {dict(report.read)}, written {dict(report.written)}, {report.total} instructions of warps")
    for access in report.accesses.values():
        if access.warps:
            lane = access.bytes / access.warps / 32
            print(f"{lane:3.0f} bytes a lane, {access.efficiency:4.0%} of what the sectors hold is used")

# %% [markdown] tags=["solution"]
# **Two branches for one sum.** Nearly all threads take the first; the second is for the thread at the end, which has up
# to 7 elements. Its loads are of 2 bytes, and there are at most 14 of them, which nobody notices. **Rounding once**: a
# bfloat16 has 8 bits of precision, its square needs 16, the product with `up` 24, which a float32 just holds. So the
# arithmetic here is exact, and the one rounding is the store.

# %% [markdown]
# ## q5 · A kernel with shared memory
#
# ●●●●● · 35 minutes · needs CuTe DSL
#
# The norm of each row, $y_r = \sqrt{\sum_j x_{r,j}^2}$, for rows of 512 float32 numbers. A block has 128 threads, four
# warps, and does **two rows, one after the other**: $2b$ and $2b + 1$. All threads work on one row. Loads may be single
# floats here.
#
# A sum over a warp is one call, `cute.arch.warp_reduction_sum(value)`: every lane gets it. From warp to warp it goes
# through shared memory: `shares` has a place for each warp. `cute.arch.sync_threads()` is the barrier: nobody passes it
# before all threads of the block are there. The number of rows may be odd.
#
# Shapes: `x` `[rows, 512]`, `y` `[rows]` float32.
#
# <details><summary>Hint 1: direction</summary>
# A row: sum over the thread's own elements, sum over the warp, one lane of each warp writes its share, barrier, one
# thread adds the four shares and writes y. What could go wrong if the fast warps begin the second row at once?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Thread $t$ takes the elements $t, t + 128, \dots$. Two barriers a row: one between writing and reading the shares, and
# one between reading them and the next row, which writes them again. Every thread must come to both, so neither may
# stand within `if thread == 0`. `if row < x.shape[0]` is no danger: all threads of a block have the same row.
# </details>
# <details><summary>Hint 3: nearly the code</summary>
#
# `for turn in range_constexpr(2):` `row = 2 * block + turn`, `if row < x.shape[0]:` `total = Float32(0.0)`, `for i in
# range_constexpr(4):` `value = x[row, i * 128 + thread]`, `total += value * value`; `total =
# cute.arch.warp_reduction_sum(total)`; `if thread % 32 == 0: shares[thread // 32] = total`; barrier; `if thread == 0:`
# add the four in a `Float32`, `y[row] = cute.math.sqrt(all)`; barrier.
# </details>


# %% tags=["exercise"]
@dataclass(frozen=True)
class RowNorm:
    """y = the root of the sum of squares of each row; x [rows, 512], y [rows], float32. A block does two rows."""

    threads: int = 128

    def arguments(self) -> tuple:
        return Argument("x", "float32", ("rows", 512)), Argument("y", "float32", ("rows",), output=True)

    def grid(self, x, y):
        return -(-x.shape[0] // 2), 1, 1

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        self.kernel(x, y).launch(grid=self.grid(x, y), block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        shares = cute.make_tensor(cute.arch.alloc_smem(Float32, 4), cute.make_layout(4))  # one for each warp
        # BEGIN SOLUTION
        for turn in range_constexpr(2):
            row = 2 * block + turn
            if row < x.shape[0]:
                total = Float32(0.0)
                for i in range_constexpr(4):
                    value = x[row, i * self.threads + thread]
                    total += value * value
                total = cute.arch.warp_reduction_sum(total)
                if thread % 32 == 0:
                    shares[thread // 32] = total
                cute.arch.sync_threads()
                if thread == 0:
                    everything = Float32(0.0)
                    for warp in range_constexpr(4):
                        everything += shares[warp]
                    y[row] = cute.math.sqrt(everything)
                cute.arch.sync_threads()  # the next row writes shares again
        # END SOLUTION


# %%
check.q5(RowNorm)

# %% [markdown]
# Your kernel at work: barriers, shuffles, and bytes for six rows.

# %%
if check.q5.passed:
    x = torch.randn(6, 512)
    y = torch.empty(6)
    report = simulate(RowNorm(), x, y)
    shuffles = sum(n for name, n in report.instructions.items() if name.startswith("shfl"))
    print(f"{report.barriers} barriers of blocks, {shuffles} shuffles of warps, read {dict(report.read)}")
    print("largest error:", f"{(y - x.double().norm(dim=1)).abs().max():.1e}")

# %% [markdown] tags=["solution"]
# **Why a second barrier.** Thread 0 is still adding up the first row's shares while warp 3 has nothing to do but begin
# the second row, and write its share of it. Without the barrier the result depends on who is faster: a race. It would
# be right nearly always, since warp 3 must first wait for its loads. That is what makes such a mistake expensive; the
# interpreter needs no luck to find it, since it asks who is **ordered** before whom. One barrier can be saved by using
# two sets of shares in turn. **And a warp a row** needs neither shared memory nor barriers, which is why the lesson's
# RMSNorm does that for all rows that fit in a warp's registers.
