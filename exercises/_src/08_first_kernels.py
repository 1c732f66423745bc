# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# Eleven puzzles for [lesson 08](../notebooks/08_first_kernels.ipynb). Six are **kernels of five minutes**, one
# idea each. Then two functions in plain `torch`: what a load moves, and a layout without bank conflicts. Then you mend
# a colleague's kernel, and write two of your own: one with shared memory, and one that copies ahead.
#
# The checks compile your kernel and run it in the interpreter, which finds what is out of bounds, unordered or never
# written and names your line; then on your GPU, if you have one. Kernels need CuTe DSL (Linux: `pip install
# "rlcourse[kernels]"`; in Colab `%pip install "nvidia-cutlass-dsl>=4.8.1,<4.9" "apache-tvm-ffi>=0.1.15,<0.2"`).
# `rlcourse grade` does the same with other inputs.
#
# Write your code where it says `# YOUR CODE HERE`, then run the cell below it. Each puzzle has three hints: a question,
# the idea, and the shape of the answer.

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
# A puzzle says what shapes its tensors have and how many blocks are launched; you write what one thread does. The rest
# is the same for all and is in the folded cell below. What you may need: `a[i]`, `out[i] = ...`, `a[r, c]`,
# `a.shape[0]`, `if`, and `for k in range_constexpr(5)` for a loop that the compiler unrolls. Numbers are float32.

# %% tags=["hide-input"]
# @title The frame of the puzzles


def puzzle(threads: int = 64, **shapes):
    """Decorator: completes a class that has `grid` and `kernel`. shapes: of a, of b if there is one, and of out."""

    def arguments(self) -> tuple:
        return tuple(
            Argument(name, "float32", shape, free=len(shape) - 1, align=4, output=name == "out")
            for name, shape in shapes.items()
        )

    def complete(kernel: type) -> type:
        @cute.jit
        def one(self, a: cute.Tensor, out: cute.Tensor, stream):
            self.kernel(a, out).launch(grid=self.grid(a, out), block=[self.threads, 1, 1], stream=stream)

        @cute.jit
        def two(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, stream):
            self.kernel(a, b, out).launch(grid=self.grid(a, b, out), block=[self.threads, 1, 1], stream=stream)

        kernel.threads, kernel.arguments = threads, arguments
        kernel.__call__ = two if "b" in shapes else one
        return kernel

    return complete


def moved(kernel, *tensors) -> None:
    """Run a kernel in the interpreter and say what it moved."""
    report = simulate(kernel, *tensors)
    print(f"read {dict(report.read)} bytes, wrote {dict(report.written)}, {report.total} warp instructions")


# %% [markdown]
# ## q1 · Map
#
# ●○○○○ · 5 minutes
#
# `out[i] = a[i] + 10` for 64 numbers: one block, 64 threads.
#
# <details><summary>Hint 1: a question</summary>
# Which element is yours, if you are thread number 17?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# There is no loop. All 64 threads run your lines, each with another value of `thread`.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# One line: an element of `out` on the left, the same element of `a` on the right.
# </details>


# %% tags=["exercise"]
@puzzle(a=(64,), out=(64,))
class AddTen:
    """out = a + 10 for 64 numbers."""

    def grid(self, a, out):
        return 1, 1, 1

    @cute.kernel
    def kernel(self, a: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        # BEGIN SOLUTION
        out[thread] = a[thread] + 10.0
        # END SOLUTION


# %%
check.q1(AddTen)

# %% [markdown]
# ## q2 · Guard
#
# ●○○○○ · 5 minutes
#
# The same for any number of elements, in blocks of 64 threads: as many blocks as it takes, rounded up.
#
# <details><summary>Hint 1: a question</summary>
# Block 2, thread 5: which element? And what if there are only 130?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# The blocks before you have done `block * self.threads` elements. The last block has more threads than there are
# elements left, and those threads must not touch anything.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Three lines: the number of your element, a condition on it, and q1's line inside the condition.
# </details>


# %% tags=["exercise"]
@puzzle(a=("n",), out=("n",))
class AddTenAnyLength:
    """out = a + 10 for any number of elements."""

    def grid(self, a, out):
        return -(-a.shape[0] // self.threads), 1, 1

    @cute.kernel
    def kernel(self, a: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        # BEGIN SOLUTION
        i = block * self.threads + thread
        if i < a.shape[0]:
            out[i] = a[i] + 10.0
        # END SOLUTION


# %%
check.q2(AddTenAnyLength)

# %% [markdown]
# ## q3 · Two dimensions
#
# ●●○○○ · 5 minutes
#
# `out[c, r] = a[r, c]`, for matrices of any height and width. The grid covers `a` with tiles of 8 × 8: the block
# (`across`, `down`) has the tile that begins at row `8 * down` and column `8 * across`, and its 64 threads have one
# element each. Neighbouring lanes should read neighbouring elements.
#
# <details><summary>Hint 1: a question</summary>
# Thread 19 of a tile of 8 × 8, counted row by row: where is it in its tile?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# A number is turned into two coordinates by a division and its remainder. The remainder runs fastest, so it belongs to
# the coordinate along which `a` lies in memory: the column.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Two lines for row and column, each with the tile's beginning and the place in the tile; a condition on **both**
# (`and` works); one assignment.
# </details>


# %% tags=["exercise"]
@puzzle(a=("rows", "columns"), out=("columns", "rows"))
class Transpose:
    """out = the transpose of a."""

    def grid(self, a, out):
        return -(-a.shape[1] // 8), -(-a.shape[0] // 8), 1

    @cute.kernel
    def kernel(self, a: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        across, down, _ = cute.arch.block_idx()
        # BEGIN SOLUTION
        r = 8 * down + thread // 8
        c = 8 * across + thread % 8
        if r < a.shape[0] and c < a.shape[1]:
            out[c, r] = a[r, c]
        # END SOLUTION


# %%
check.q3(Transpose)

# %% [markdown] tags=["solution"]
# The reads use all of what they move, 8 floats in a row being one sector. The writes can't, at the same time: a warp
# writes down a column. The remedy is shared memory, the next puzzle's subject: turn the tile around there.

# %% [markdown]
# ## q4 · Shared memory
#
# ●●○○○ · 5 minutes
#
# `out[i] = a[i] + a[i-1] + a[i-2]` for 64 numbers, in one block of 64 threads; in front of `a[0]` there is nothing to
# add. The catch: you may read each number of `a` only **once**, in a thread of its own. `shared` has room for 64
# numbers that all threads of the block see.
#
# <details><summary>Hint 1: a question</summary>
# Every number is needed by three threads, and only one may fetch it. How do the other two get it, and when?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Each thread brings its own number to `shared`. The block has two warps: thread 32 needs what thread 31 has brought,
# and nothing says that the first warp is ahead of the second. `cute.arch.sync_threads()` does.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Write to `shared`; barrier; a sum that begins with one's own number; two conditions that each add one more, for the
# threads that have such a neighbour; write to `out`.
# </details>


# %% tags=["exercise"]
@puzzle(a=(64,), out=(64,))
class SumOfThree:
    """out[i] = a[i] + a[i - 1] + a[i - 2], those that exist; 64 numbers, each read once."""

    def grid(self, a, out):
        return 1, 1, 1

    @cute.kernel
    def kernel(self, a: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        shared = cute.make_tensor(cute.arch.alloc_smem(Float32, 64), cute.make_layout(64))
        # BEGIN SOLUTION
        shared[thread] = a[thread]
        cute.arch.sync_threads()
        total = shared[thread]
        if thread >= 1:
            total += shared[thread - 1]
        if thread >= 2:
            total += shared[thread - 2]
        out[thread] = total
        # END SOLUTION


# %%
check.q4(SumOfThree)

# %% [markdown]
# ## q5 · Reduction
#
# ●●○○○ · 5 minutes
#
# The largest number of each row, for rows of at most 32 numbers of any sign and size. A block is one warp and has one
# row: lane number `lane` has the number in column `lane`, if there is one. `cute.arch.shuffle_sync_bfly(value,
# offset=d)` gives each lane the `value` of lane `lane ^ d`; all 32 lanes must reach it.
#
# <details><summary>Hint 1: a question</summary>
# A row has 20 numbers. What should lane 25 hold, so that it never wins?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# The butterfly of the lesson, with the larger of two instead of their sum: distances 1, 2, 4, 8, 16. The shuffles are
# outside any condition; a condition decides only what a lane begins with.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A value smaller than everything; one condition that replaces it; a loop of five with a shuffle and a choice (`x if x >
# y else y` works); a condition for the one lane that writes.
# </details>


# %% tags=["exercise"]
@puzzle(threads=32, a=("rows", "columns"), out=("rows",))
class RowMax:
    """out[row] = the largest number of a's row."""

    def grid(self, a, out):
        return a.shape[0], 1, 1

    @cute.kernel
    def kernel(self, a: cute.Tensor, out: cute.Tensor):
        lane, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        # BEGIN SOLUTION
        value = -Float32.inf
        if lane < a.shape[1]:
            value = a[row, lane]
        for step in range_constexpr(5):
            other = cute.arch.shuffle_sync_bfly(value, offset=1 << step)
            value = other if other > value else value
        if lane == 0:
            out[row] = value
        # END SOLUTION


# %%
check.q5(RowMax)

# %% [markdown]
# ## q6 · A matrix product
#
# ●●○○○ · 5 minutes
#
# `out = a @ b` for any sizes, tiled as in q3: a thread has one element of `out`. Loops over a size that is not known to
# the compiler are written `for k in range(a.shape[1])`.
#
# <details><summary>Hint 1: a question</summary>
# Which numbers of `a` and of `b` does one element of the product need?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# A row of `a` and a column of `b`, walked along together. Add up in a `Float32` that begins at 0.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# q3's first three lines, with the condition on `out`; in it a total, a loop with one line, and one assignment.
# </details>


# %% tags=["exercise"]
@puzzle(a=("m", "k"), b=("k", "n"), out=("m", "n"))
class Product:
    """out = a @ b."""

    def grid(self, a, b, out):
        return -(-b.shape[1] // 8), -(-a.shape[0] // 8), 1

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        across, down, _ = cute.arch.block_idx()
        # BEGIN SOLUTION
        r = 8 * down + thread // 8
        c = 8 * across + thread % 8
        if r < out.shape[0] and c < out.shape[1]:
            total = Float32(0.0)
            for k in range(a.shape[1]):
                total += a[r, k] * b[k, c]
            out[r, c] = total
        # END SOLUTION


# %%
check.q6(Product)

# %% [markdown]
# It is right. Is it good? A product of 32 × 32 matrices needs 4,096 bytes of `a` and as many of `b`. **Look for** what
# your threads ask for instead.

# %%
if check.q6.passed:
    moved(Product(), torch.randn(32, 32), torch.randn(32, 32), torch.empty(32, 32))

# %% [markdown] tags=["solution"]
# Each number is asked for 32 times, once for each element of `out` that needs it. A good product brings tiles of `a`
# and `b` to shared memory, as in q4, and takes each number from there many times. Tensor cores and libraries build on
# that, and it's why nobody writes matmuls with one thread per element.

# %% [markdown]
# ## q7 · How many sectors?
#
# ●●○○○ · 10 minutes
#
# A warp executes one load. Lane $l$ asks for `size` bytes from `addresses[w, l]` on. Memory moves whole *sectors* of 32
# bytes, and each sector that any lane of the warp asks for is moved once for this load. Count them, warp by warp. Lanes
# that are not `active` ask for nothing. `size` is at most 32 and divides each address, so no access spans two sectors.
#
# Shapes: `addresses` `[W, 32]` int64, `size` an int, `active` `[W, 32]` bool; result `[W]` int64.
#
# <details><summary>Hint 1: a question</summary>
# All 32 lanes read the same float. How many sectors, and which of the obvious formulas says 4?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# An address determines its sector. What counts is how many **different** sectors a warp's active lanes name.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Warp by warp: the active addresses, turned into numbers of sectors; the number of distinct ones; all counts in a
# tensor.
# </details>


# %% tags=["exercise"]
def sectors(addresses: torch.Tensor, size: int, active: torch.Tensor) -> torch.Tensor:
    """Sectors of 32 bytes that a load of `size` bytes per lane moves for each warp: [W] int64.

    addresses: [W, 32] int64, of each lane's first byte; active: [W, 32] bool.
    """
    # BEGIN SOLUTION
    return torch.tensor([len(torch.unique(warp[on] // 32)) for warp, on in zip(addresses, active, strict=True)])
    # END SOLUTION


# %%
check.q7(sectors)

# %% [markdown]
# What your function says of 32 neighbouring floats that begin later and later. **Look for** the first addresses that
# need no fifth sector.

# %% tags=["hide-input"]
# @title Figure: sectors over the first address
if check.q7.passed:
    starts = torch.arange(0, 65, 4)
    found = [int(sectors(s + 4 * torch.arange(32)[None], 4, torch.ones(1, 32, dtype=torch.bool))) for s in starts]
    fig, ax = plt.subplots(figsize=(6.5, 2.8), layout="constrained")
    ax.plot(starts, found, color="#0072B2", marker="o")
    ax.axhline(4, color="black", linestyle=":", label="128 bytes / 32")
    ax.set(xlabel="first address, bytes after a multiple of 32", ylabel="sectors", title="One load of a warp")
    ax.set(ylim=(0, 6), xticks=range(0, 65, 8))
    ax.legend(loc="lower right")
    plt.show()

# %% [markdown] tags=["solution"]
# Bytes / 32 is right for neighbours that begin at a multiple of 32. The same 128 bytes from an address 16 bytes further
# on touch five sectors, not four. With stride 0 all lanes share one sector: a *broadcast*, which is cheap. From stride
# 8 on every lane has a sector of its own. The size of an access does not enter at all: aligned, it never leaves its
# sector.

# %% [markdown]
# ## q8 · No bank conflicts, three ways
#
# ●●●●○ · 20 minutes
#
# A tile of 32 × 32 floats lies in shared memory: 1,024 words of 4 bytes, and word $w$ is in bank $w \bmod 32$. A warp
# takes 32 words in one turn if they lie in 32 different banks. Lay the tile out so that this holds for **every row**,
# **every column**, and **every sub-tile of 4 × 8** (rows $4p$ to $4p + 3$, columns $8q$ to $8q + 7$), which is what a
# warp loads for a matrix product on tensor cores. There is no room for padding.
#
# Shapes: `row`, `column` `[n]` int64, of some elements; result: the word of each, `[n]` int64 from 0 to 1023, no two
# elements in one word. `^` on integer tensors is the exclusive or.
#
# <details><summary>Hint 1: a question</summary>
# The usual swizzle, `32 * row + (column ^ row)`, does rows and columns. Which banks do the four rows of one sub-tile
# get under it, and why are they the same eight?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Look at the five bits of the bank. Within a sub-tile the column changes the lower three, and the row changes its own
# lower two. So the row's lower two bits must reach the bits of the bank that the column leaves alone. And the row's
# other three bits? Down a column all five must count.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# `32 * row + (column ^ f(row))`, where `f` goes through all of 0 to 31 as the row does, in another order: four
# neighbouring rows must differ in its upper two bits.
# </details>


# %% tags=["exercise"]
def place(row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """The word of shared memory in which each element of a tile of 32 x 32 lies: [n] int64."""
    # BEGIN SOLUTION
    return 32 * row + (column ^ (row % 4 * 8 + row // 4))
    # END SOLUTION


# %%
check.q8(place)

# %% [markdown]
# Your layout: the colour is the bank, written out in one sub-tile and in one column. **Look for** numbers that repeat.

# %% tags=["hide-input"]
# @title Figure: banks of the tile
if check.q8.passed:
    element = torch.arange(1024)
    fig, ax = plt.subplots(figsize=(7, 6), layout="constrained")
    banks = (place(element // 32, element % 32) % 32).view(32, 32)
    shown = ax.imshow(banks, cmap="viridis")
    for r, c in [(r, c) for r in range(32) for c in range(32) if c == 27 or (r // 4, c // 8) == (1, 1)]:
        color = "black" if banks[r, c] > 15 else "white"
        ax.text(c, r, banks[r, c].item(), ha="center", va="center", fontsize=6, color=color)
    ax.set_xticks([q * 8 - 0.5 for q in range(5)], [q * 8 for q in range(5)])
    ax.set_yticks([p * 4 - 0.5 for p in range(9)], [p * 4 for p in range(9)])
    ax.hlines([p * 4 - 0.5 for p in range(9)], -0.5, 31.5, color="white", linewidth=2)
    ax.vlines([q * 8 - 0.5 for q in range(5)], -0.5, 31.5, color="white", linewidth=2)
    ax.set(xlabel="column", ylabel="row", title="Each row, column and sub-tile has every bank once")
    fig.colorbar(shown, label="bank")
    plt.show()

# %% [markdown] tags=["solution"]
# **It is a sudoku.** Rows, columns and boxes that have each of 32 numbers once. In a sub-tile, `column` runs through
# the lower three bits of the bank, and `row % 4 * 8` puts the four rows on four values of the upper two. Down a column,
# `row % 4 * 8 + row // 4` takes each of 32 values once, and an exclusive or with a constant keeps them different. A sum
# modulo 32 does as well as `^`. CuTe writes the exclusive or as `Swizzle`: bits of the row, moved onto bits of the
# column.

# %% [markdown]
# ## q9 · Mend it: the squared relu
#
# ●●●○○ · 20 minutes
#
# $\text{out} = \text{relu}(\text{gate})^2 \cdot \text{up}$ for bfloat16 vectors of any length $n$ (So et al. 2021,
# arXiv:2109.08668). A thread has 8 neighbouring elements, 16 bytes. A colleague has written it and tested it: "2,048
# numbers, all within one percent".


# %%
@dataclass(frozen=True)
class Hers:
    """out = relu(gate)^2 * up; bfloat16 [n], any n (so she says)."""

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
        first = (block * self.threads + thread) * 8
        if first < gate.shape[0]:
            g = cute.make_rmem_tensor(8, out.element_type)
            cute.autovec_copy(cute.tiled_divide(gate, (8,))[None, first // 8], g)
            for i in range_constexpr(8):
                wide = g[i].to(Float32)
                wide = wide if wide > 0.0 else Float32(0.0)
                square = (wide * wide).to(out.element_type)
                g[i] = (square.to(Float32) * up[first + i].to(Float32)).to(out.element_type)
            cute.autovec_copy(g, cute.tiled_divide(out, (8,))[None, first // 8])
        else:
            for i in range_constexpr(8):
                if first + i < gate.shape[0]:
                    one = gate[first + i].to(Float32)
                    out[first + i] = (one * one * up[first + i].to(Float32)).to(out.element_type)


# %% [markdown]
# Her test, with numbers on how the data moves.

# %%
gate, up = (torch.randn(2048).to(torch.bfloat16) for _ in range(2))
out = torch.empty_like(gate)
try:
    report = simulate(Hers(), gate, up, out)
    exact = gate.double().clamp(min=0) ** 2 * up.double()
    print(f"largest relative error {((out - exact).abs() / exact.abs().clamp(min=1e-9)).max():.2%}")
    for _, access in sorted(report.accesses.items()):
        if access.warps:
            print(f"  {access.text.split()[0]:20} {access.warps:3} warps, {access.efficiency:4.0%} of the sectors used")
except Exception as error:
    print(error)

# %% [markdown]
# There are **four** mistakes: in the numbers, in what happens for other $n$, and in how the data moves. One of them
# hides behind another. The task: load `gate` and `up` 16 bytes per thread and store `out` likewise; arithmetic in
# `Float32`, rounded **once**, at the end; and for any $n$ nothing beyond the end is touched.
#
# <details><summary>Hint 1: a question</summary>
# Half a unit in the last place of a bfloat16 is 0.4%. Where does "within one percent" come from, then? And which
# threads ever get to the `else`?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Look at the list of accesses: 16 bytes per lane would be a `v4.b32`. Then run her test with 2,050 numbers and see
# which line the interpreter names. Once that is mended, the branch for the rest runs for the first time in its life:
# read it as if it were new.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Her code with four changes: another condition in front of the pieces (a whole piece must exist), a second register
# tensor with its own copy, one conversion fewer, and one more line in the `else`.
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
check.q9(ReluSquared)

# %% [markdown] tags=["solution"]
# **The condition** asked whether the first of 8 elements exists, and not the last. With 2,048 it makes no difference.
# **The tail** had no relu, and nobody noticed: no thread ever went there. **Rounding twice** costs an error of up to
# twice the unavoidable one: a bfloat16 has 8 bits of precision, its square needs 16, the product with `up` 24, which a
# float32 just holds. So the arithmetic is exact, and the one rounding is the store. **`up`** was fetched two bytes at a
# time, eight times: the same sectors, asked for over and over.
#
# A test with one round size found none of the four.

# %% [markdown]
# ## q10 · A kernel with shared memory
#
# ●●●●● · 35 minutes
#
# The norm of each row, $y_r = \sqrt{\sum_j x_{r,j}^2}$, for rows of 512 float32 numbers. A block has 128 threads, four
# warps, and does **two rows, one after the other**: $2b$ and $2b + 1$. All threads work on one row. Loads may be single
# floats here.
#
# A sum over a warp is one call, `cute.arch.warp_reduction_sum(value)`: every lane gets it. From warp to warp it goes
# through shared memory: `shares` has a place for each warp. `cute.arch.sync_threads()` is the barrier. The number of
# rows may be odd.
#
# Shapes: `x` `[rows, 512]`, `y` `[rows]` float32.
#
# <details><summary>Hint 1: a question</summary>
# Three warps have nothing to do while one thread adds up the shares. What will they do next, and whose numbers do they
# overwrite?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Thread $t$ takes the elements $t, t + 128, \dots$. Two barriers per row: one between writing and reading the shares,
# and one between reading them and the next row, which writes them again. Every thread must reach both, so neither may
# be inside `if thread == 0`. A condition on the row is no danger: all threads of a block have the same row.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A loop of two. In it: the row and whether it exists; a sum of four squares; the sum over the warp; one lane of each
# warp writes; barrier; one thread adds four numbers and writes the root; barrier.
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
check.q10(RowNorm)

# %% [markdown]
# Your kernel at work: barriers, shuffles, and bytes for six rows.

# %%
if check.q10.passed:
    x = torch.randn(6, 512)
    y = torch.empty(6)
    report = simulate(RowNorm(), x, y)
    shuffles = sum(n for name, n in report.instructions.items() if name.startswith("shfl"))
    print(f"{report.barriers} barriers of blocks, {shuffles} shuffles of warps, read {dict(report.read)}")
    print("largest error:", f"{(y - x.double().norm(dim=1)).abs().max():.1e}")

# %% [markdown] tags=["solution"]
# **Why a second barrier.** While thread 0 is still adding up the first row's shares, warp 3 goes on to the second row
# and writes its share of it. Without the barrier the result depends on who is faster: a race. It would be right nearly
# always, since warp 3 must first wait for its loads, and that is what makes such a mistake expensive. The interpreter
# needs no luck to find it, because it checks which access is **ordered** before which. The second barrier can be saved
# by using two sets of shares in turn. **And one warp per row** needs neither shared memory nor barriers, which is why
# the lesson's RMSNorm does that for all rows that fit in a warp's registers.

# %% [markdown]
# ## q11 · Copy ahead
#
# ●●●●○ · 25 minutes
#
# A load keeps its thread waiting where the number is needed. `cp.async` doesn't: it copies 16 bytes from global to
# shared memory while the thread goes on. A block that adds up one row can have the next on its way.
#
# Here a block is one warp and adds up **four rows**, $4b$ to $4b + 3$, of 128 float32 numbers. Shared memory has two
# slots of a row each. The frame makes a *tiled copy*, which says who copies what: an *atom* (one `cp.async` of 16
# bytes), a layout of 32 threads, and 4 numbers for each. `mine` is this lane's part of it: `mine.partition_S(row)` are
# its numbers in a source, `mine.partition_D(slot)` their places in a target. The first row is on its way already.
#
# - `cute.copy(atom, mine.partition_S(...), mine.partition_D(...))` starts a copy;
# - `cute.arch.cp_async_commit_group()` closes a group of copies, which may be empty;
# - `cute.arch.cp_async_wait_group(n)` waits until at most the latest $n$ groups are still under way.
#
# A lane reads only what it copied itself, so it needs no barrier. The number of rows may be anything from 1.
#
# Shapes: `x` `[rows, 128]`, `y` `[rows]` float32.
#
# <details><summary>Hint 1: a question</summary>
# You have just asked for the next row. Which of the two groups must have arrived before you add up this one?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Ask first, then wait for all groups but the latest, then add up. Close a group in every turn, even without a copy in
# it: then "all but the latest" is right in the last turn too.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A loop of four. In it: copy the next row into the other slot, if there is one and this isn't the last turn; commit;
# wait; and if the row exists, `mine.partition_D(slot).load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0)`, the sum
# over the warp, and one lane that writes.
# </details>


# %% tags=["exercise"]
@dataclass(frozen=True)
class RowSums:
    """y = the sum of each row; x [rows, 128], y [rows], float32. A block is a warp and does four rows."""

    threads: int = 32

    def arguments(self) -> tuple:
        return Argument("x", "float32", ("rows", 128)), Argument("y", "float32", ("rows",), output=True)

    def grid(self, x, y):
        return -(-x.shape[0] // 4), 1, 1

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        self.kernel(x, y).launch(grid=self.grid(x, y), block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        lane, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        first, rows = 4 * block, x.shape[0]
        slots = cute.make_tensor(cute.arch.alloc_smem(Float32, 256, alignment=16), cute.make_layout((128, 2)))
        atom = cute.make_copy_atom(cute.nvgpu.cpasync.CopyG2SOp(), Float32, num_bits_per_copy=128)
        mine = cute.make_tiled_copy_tv(atom, cute.make_layout(32), cute.make_layout(4)).get_slice(lane)
        cute.copy(atom, mine.partition_S(x[first, None]), mine.partition_D(slots[None, 0]))
        cute.arch.cp_async_commit_group()
        # BEGIN SOLUTION
        for turn in range_constexpr(4):
            row = first + turn
            if turn < 3 and row + 1 < rows:
                cute.copy(atom, mine.partition_S(x[row + 1, None]), mine.partition_D(slots[None, (turn + 1) % 2]))
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(1)
            if row < rows:
                total = mine.partition_D(slots[None, turn % 2]).load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
                total = cute.arch.warp_reduction_sum(total)
                if lane == 0:
                    y[row] = total
        # END SOLUTION


# %%
check.q11(RowSums)

# %% [markdown] tags=["solution"]
# **Why all but the latest.** With `wait_group(0)` each row would arrive before the next is asked for: right, and as
# slow as a load. **Without the wait** the numbers are often there in time on a GPU, and sometimes not. The interpreter
# marks bytes that are still under way. **More slots** keep more rows under way: with three, ask for two ahead and wait
# for all but two. That's how `rlcourse/course/kernels/residual_norm.py` hides its loads.
