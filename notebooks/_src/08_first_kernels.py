# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# **You will learn**
#
# - what a GPU runs: grid, block, warp and lane, told by counting what warps execute;
# - that a layout is a function from coordinates to an offset, and how tiles and threads follow from it;
# - to write kernels in CuTe DSL: a vector sum, RMSNorm, SwiGLU; to read the PTX and the machine code they become;
# - what coalescing, predication, shared memory and barriers are, and what happens where they are missing;
# - the floor of such kernels, bytes over bandwidth, and why fusing them beats tuning them;
# - how a kernel becomes an operation that PyTorch can compile around.
#
# You need [lesson 06](06_where_time_goes.ipynb): floors. No GPU is needed. Kernels are compiled here for GPUs that need
# not be here, and an **interpreter** of their code runs them on the CPU: slowly, on small tensors, counting every byte.
# Where there is a GPU, each run is repeated on it and compared. What only a GPU can show, times, comes from records.
#
# The compiler is a package for Linux: `pip install "rlcourse[kernels]"`; in Colab `%pip install
# "nvidia-cutlass-dsl>=4.8.1,<4.9" "apache-tvm-ffi>=0.1.15,<0.2"`.

# %%
import inspect
import re
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown, display
from matplotlib.colors import ListedColormap

from rlcourse import ptx
from rlcourse.course import pick
from rlcourse.kernels import dsl
from rlcourse.kernels.dsl import Float32, Int32, const_expr, cute, cutlass, range_constexpr
from rlcourse.kernels.toolchain import Argument, compiled, simulate
from rlcourse.measure.plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION
from rlcourse.measure.records import format_cell, load_record, provenance, record_markdown

torch.manual_seed(0)
print("CuTe DSL is here" if dsl.INSTALLED else "CuTe DSL is missing: see the lines above", end="; ")
print("a GPU is here" if torch.cuda.is_available() else "no GPU: kernels run in the interpreter alone")

# %% [markdown]
# ## 1 · What a GPU runs
#
# A *kernel* is one function that many *threads* run at once. Each finds out who it is and takes its part of the work.
# Threads come in *blocks* of up to 1024; the launch says how many blocks there are, the *grid*. A block stays on one of
# the GPU's processors (*SM*, streaming multiprocessor), so its threads can share memory there and wait for each other.
# Within a block, 32 neighbouring threads are a *warp*; a thread's place in its warp is its *lane*. The warp is what the
# hardware executes: **one instruction, 32 lanes**.
#
# Here is the smallest kernel that shows it. In CuTe DSL a kernel is Python that is traced into GPU code. A small class
# holds what belongs together: the arguments, the grid, the host's function (`cute.jit`), which launches, and what each
# thread does (`cute.kernel`). Only the last part will change from kernel to kernel, so the rest is written once.


# %%
@dataclass(frozen=True)
class WhoAmI:
    """out[i] = (block, thread, warp, lane) of the thread that is number i of the grid; int32 [n, 4]."""

    threads: int = 64

    def arguments(self) -> tuple:
        return (Argument("out", "int32", ("n", 4), output=True),)

    def grid(self, out):
        return -(-out.shape[0] // self.threads), 1, 1  # as many blocks as it takes, rounded up

    @cute.jit
    def __call__(self, out: cute.Tensor, stream):
        self.kernel(out).launch(grid=self.grid(out), block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * self.threads + thread
        if i < out.shape[0]:  # the last block may have threads without work
            out[i, 0], out[i, 1] = block, thread
            out[i, 2], out[i, 3] = thread // 32, thread % 32


# %% [markdown]
# `run` executes a kernel in the interpreter, which changes the tensors in place and returns a *report*. If there is a
# GPU, it launches the kernel there too and compares.


# %%
def run(kernel, *tensors, **order) -> ptx.Report:
    """Run a kernel on CPU tensors, in place: in the interpreter, and on a GPU to compare, if there is one."""
    there = [t.cuda() if isinstance(t, torch.Tensor) else t for t in tensors] if torch.cuda.is_available() else None
    report = simulate(kernel, *tensors, **order)
    if there is not None:
        compiled(kernel)(*there)
        for ours, theirs in zip(tensors, there, strict=True):
            if isinstance(ours, torch.Tensor):
                torch.testing.assert_close(theirs.cpu(), ours, equal_nan=True)
    return report


out = torch.zeros(100, 4, dtype=torch.int32)
report = run(WhoAmI(), out)
for i in (0, 1, 31, 32, 63, 64, 99):
    print(f"thread {i:2} of the grid: block {out[i, 0]}, thread {out[i, 1]:2}, warp {out[i, 2]}, lane {out[i, 3]:2}")

# %% [markdown]
# 100 numbers, blocks of 64 threads: two blocks, four warps, 128 threads, of which 28 have nothing to do. The report
# counts **executions by warps**, which is what costs: 32 lanes for the price of one, used or not.

# %%
for name in ("mov.u32", "setp.le.s32", "bra", "st.global.v4.b32", "ret"):
    print(f"{name:18} executed by {report.instructions[name]} warps")
print("bytes written:", report.written["out"], "| sectors touched:", report.sectors)

# %% [markdown]
# The branch is taken lane by lane. What if the lanes of one warp disagree? The warp then executes **both** sides, one
# after the other, each with the other lanes switched off. That is *divergence*. Two kernels that do the same amount of
# work in each lane: in one, odd and even **lanes** part ways, in the other odd and even **warps**.


# %%
@dataclass(frozen=True)
class TwoWays(WhoAmI):
    """Half of the threads do one thing, half another: which half is decided by the lane, or by the warp."""

    by_warp: bool = False

    @cute.kernel
    def kernel(self, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * self.threads + thread
        side = (thread // 32 if const_expr(self.by_warp) else thread) % 2
        if side == 0:
            for j in range_constexpr(4):
                out[i, j] = out[i, j] + Int32(j)
        else:
            for j in range_constexpr(4):
                out[i, j] = out[i, j] * Int32(j)

    def arguments(self) -> tuple:
        return (Argument("out", "int32", ("n", 4)),)  # no pure output: it is read as well


# %%
for by_warp in (False, True):
    report = run(TwoWays(by_warp=by_warp), torch.ones(128, 4, dtype=torch.int32))
    loads = sum(a.warps for a in report.accesses.values() if a.text.startswith("ld"))
    print(f"parting by {'warp' if by_warp else 'lane'}: 4 warps execute {report.total} instructions, {loads} loads")

# %% [markdown]
# (In the kernel before, the four stores of a thread have become one of 16 bytes, `v4`: the compiler saw that they are
# neighbours.) Parting by lanes is dearer: each warp walks both ways. So a condition is cheap where it is the same for
# a whole warp, such as `row < rows` when a warp has one row, and costs both sides otherwise. We will meet one case
# where it is wrong besides.
#
# ## 2 · Layouts
#
# Memory is one long line of bytes. A tensor is a way to find things on it: a function from coordinates to an *offset*.
# CuTe calls it a *layout* and writes it `shape:stride`. The offset of $(i, j)$ in $(M, N) : (d_0, d_1)$ is
# $i\, d_0 + j\, d_1$. Everything else in this section follows from that line.
#
# Two more rules. A coordinate may be a single number: it is cut into coordinates with the **first mode fastest**. And
# shapes may be nested: a mode may itself be a shape with strides. A few lines hold both.


# %%
def count(shape) -> int:
    """How many coordinates a shape has."""
    return shape if isinstance(shape, int) else torch.Size(map(count, shape)).numel()


def offset(coordinate, shape, stride) -> int:
    """Where a layout puts a coordinate. All three are ints, or tuples of the same nesting; a coordinate may be a number
    where the shape is a tuple."""
    if isinstance(shape, int):
        return coordinate * stride
    if isinstance(coordinate, int):
        cut = []
        for size in map(count, shape):
            cut.append(coordinate % size)
            coordinate //= size
        coordinate = cut
    return sum(offset(*mode) for mode in zip(coordinate, shape, stride, strict=True))


LAYOUTS = {
    "row-major": ((4, 8), (8, 1)),
    "column-major": ((4, 8), (1, 4)),
    "padded rows": ((4, 8), (10, 1)),
    "tiles of 2 x 4": (((2, 2), (4, 2)), ((4, 16), (1, 8))),
}
for name, (shape, stride) in LAYOUTS.items():
    print(f"{name:15} {shape}:{stride}".replace(", ", ","), " (1, 2) ->", offset((1, 2), shape, stride))

# %% [markdown]
# The same four as pictures of the matrix. The number is the offset; the colour is the 8 numbers (32 bytes of float32)
# that one *sector* of memory holds, the least that a GPU moves. **Look for** the shape of a colour: whoever reads one
# number pays for all of its colour.


# %%
PALETTE = ListedColormap([SKY, ORANGE, GREEN, VERMILION, PURPLE, BLUE, "#F0E442", "#999999"])


def draw_matrix(ax, text, colour, title: str) -> None:
    """A matrix with a text and a colour in each cell. text, colour: [rows][columns]."""
    ax.imshow(torch.tensor(colour), cmap=PALETTE, vmin=0, vmax=8, alpha=0.6)
    for i, row in enumerate(text):
        for j, cell in enumerate(row):
            ax.text(j, i, cell, ha="center", va="center", fontsize=9)
    ax.set(title=title, xticks=[], yticks=[])


fig, axes = plt.subplots(2, 2, figsize=(9, 4.8))
for ax, (name, (shape, stride)) in zip(axes.flat, LAYOUTS.items(), strict=True):
    found = [[offset((i, j), shape, stride) for j in range(8)] for i in range(4)]
    draw_matrix(ax, found, [[o // 8 for o in row] for row in found], f"{name}  {shape}:{stride}".replace(", ", ","))
fig.tight_layout()
plt.show()

# %% [markdown]
# A tile is cut out of a layout by *dividing* it. Dividing $(M, N) : (d_0, d_1)$ by a tile $(m, n)$ gives two parts: the
# place **within** a tile, and **which** tile. Both are layouts:
#
# $$\big((m, n),\, (M/m, N/n)\big) : \big((d_0, d_1),\, (m\, d_0, n\, d_1)\big) .$$
#
# CuTe calls this `zipped_divide`; `tiled_divide` is the same with the tile numbers not packed in a pair. Nothing is
# moved, only strides are worked out. Let us divide a row-major matrix by hand and ask CuTe for the same.


# %%
def zipped_divide(shape: tuple, stride: tuple, tile: tuple) -> tuple:
    """(within a tile, which tile), for a flat layout."""
    which = tuple(n // t for n, t in zip(shape, tile, strict=True))
    return (tile, which), (stride, tuple(t * d for t, d in zip(tile, stride, strict=True)))


said = {}


@cute.jit
def ask_cute():
    """Runs while it is traced: layouts are known to the compiler, no GPU is asked."""
    layout = cute.make_layout((4, 8), stride=(8, 1))
    said["zipped"] = str(cute.zipped_divide(layout, (2, 4)))
    said["tiled"] = str(cute.tiled_divide(layout, (2, 4)))
    said["number 5"] = cute.crd2idx(5, layout)


ask_cute()
mine = "{}:{}".format(*zipped_divide((4, 8), (8, 1), (2, 4))).replace(" ", "")
print("by hand:      ", mine)
print("zipped_divide:", said["zipped"])
print("tiled_divide: ", said["tiled"])
print("number 5 of (4,8):(8,1):", said["number 5"], "by CuTe,", offset(5, (4, 8), (8, 1)), "by hand")
assert mine == said["zipped"] and said["number 5"] == offset(5, (4, 8), (8, 1))

# %% [markdown]
# ### Threads and values
#
# Now give a tile to threads. A *thread-value layout* has two modes: which thread, and which of the values that it
# holds. It takes $(t, v)$ to the element. Here a row of 64 numbers is shared by 4 threads, each with 16, in two ways:
#
# - *stretches*: `(4,16):(16,1)`. A thread has 16 in a row.
# - *dealt out* in pieces of 4 (16 bytes of float32): `(4,(4,4)):(4,(1,16))`. A thread has 4 in a row, then the next
#   threads have theirs, then it is its turn again.
#
# Each thread loads piece after piece of 4 numbers. The colour is the thread, the number says in which of its loads it
# takes the element. **Look for** where the zeros are: those bytes are asked for at the same moment.

# %%
SHARES = {"stretches": ((4, 16), (16, 1)), "dealt out": ((4, (4, 4)), (4, (1, 16)))}
fig, axes = plt.subplots(2, 1, figsize=(9.5, 3.4))
for ax, (name, (shape, stride)) in zip(axes, SHARES.items(), strict=True):
    thread, load = [0] * 64, [0] * 64
    for t in range(4):
        for v in range(16):
            thread[offset((t, v), shape, stride)], load[offset((t, v), shape, stride)] = t, v // 4
    cut = [slice(0, 32), slice(32, 64)]
    title = f"{name}  {shape}:{stride}".replace(", ", ",")
    draw_matrix(ax, [load[c] for c in cut], [thread[c] for c in cut], title)
fig.tight_layout()
plt.show()

# %% [markdown]
# Dealt out, the first loads of all threads lie side by side. A cache on a CPU likes stretches, since each core runs
# through its own. On a GPU the threads of a warp load **together**, and what they load together should be one piece of
# memory. Section 4 counts what the other way costs.
#
# ## 3 · The first kernel
#
# `c = a + b` for float32 vectors of any length, one element a thread.


# %%
@dataclass(frozen=True)
class Add:
    """c = a + b, one element a thread; float32 [n]. Without `guard` nobody asks whether the element exists."""

    threads: int = 64
    guard: bool = True

    def arguments(self) -> tuple:
        a, b = (Argument(name, "float32", ("n",)) for name in "ab")
        return a, b, Argument("c", "float32", ("n",), output=True)

    def grid(self, a, b, c):
        return -(-a.shape[0] // self.threads), 1, 1

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream):
        self.kernel(a, b, c).launch(grid=self.grid(a, b, c), block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * self.threads + thread
        if const_expr(self.guard):
            if i < a.shape[0]:
                c[i] = a[i] + b[i]
        else:
            c[i] = a[i] + b[i]


# %%
a, b, c = torch.randn(100), torch.randn(100), torch.empty(100)
report = run(Add(), a, b, c)
print("right:", torch.equal(c, a + b), "| read", dict(report.read), "| written", dict(report.written))

# %% [markdown]
# `const_expr` is asked by the compiler, once: the kernel contains one branch or the other. The plain `if` is asked by
# each thread.
#
# This is what the compiler made of it, for an Ampere GPU (`sm_86`). PTX is the assembly language of a GPU that does not
# exist: as many registers as you like, and no real machine's encoding. The driver's assembler turns it into the machine
# code of a real one.

# %%
code = compiled(Add(), "sm_86")
body = code.ptx[code.ptx.index("{\n") :].replace("\t", "  ").splitlines()
print("\n".join(line for line in body if line.strip()))

# %% [markdown]
# Line by line:
#
# - `.reg` declares registers: `%p` hold one bit (predicates), `%r` 32 bits, `%rd` 64 bits, which addresses need.
# - `ld.param`: the kernel's parameters. Of a tensor, CuTe hands over the address and the sizes that are not known at
#   compile time; `+8` is the `n` of `a`.
# - `mov ... %tid.x` and `%ctaid.x`: my thread, my block. A block is a CTA here, a cooperative thread array.
# - `shl` and `or`: `block * 64 + thread`. A product with a power of two is a shift, and since the thread is below 64,
#   the sum needs no carry. That is what constants are good for.
# - `setp.le` and `@%p1 bra`: if `n <= i`, jump to the end. A line with `@%p` in front is executed by the lanes for
#   which the predicate holds. That is *predication*.
# - `mul.wide.s32`: `i * 4`, as 64 bits, the offset in bytes. `add.s64`: plus the address.
# - `ld.global.b32`, twice; `add.f32`; `st.global.b32`. Of all these lines, these four are the work.
#
# What if nobody asks whether the element exists? On a GPU this is often quiet: there is nearly always something behind
# a tensor, another tensor for example, and the last threads write into it. The interpreter puts *guards* around each
# tensor, bytes that nobody may touch.


# %%
def caught(kernel, *tensors, **order) -> str:
    """The mistake that the interpreter finds, in words; on no GPU is it tried."""
    try:
        simulate(kernel, *tensors, **order)
    except ptx.PTXError as error:
        return f"{type(error).__name__}: {error}"
    return "no mistake found"


# %%
print("with the guard:   ", caught(Add(), a, b, c))
print("without it:       ", caught(Add(guard=False), a, b, c))
print("and with n = 128: ", caught(Add(guard=False), *torch.randn(3, 128).unbind()))

# %% [markdown]
# The last line shows why tests with round numbers find nothing. 128 is a multiple of the block, so there is no tail.
# Test with lengths that do not fit.

# %% [markdown]
# ## 4 · Sixteen bytes at once
#
# A thread can load 16 bytes with one instruction (32 on the newest GPUs). So let it have `vector` neighbouring
# elements. `tiled_divide` cuts the vector into pieces, `[None, piece]` takes all of piece number `piece`, and
# `autovec_copy` moves it with the widest instruction that size and alignment allow. A *register tensor*
# (`make_rmem_tensor`) is the thread's own place for it. Behind the last whole piece stand up to `vector - 1` elements,
# for which one thread takes the `else`.


# %%
@dataclass(frozen=True)
class WideAdd(Add):
    """c = a + b, `vector` neighbouring elements a thread."""

    vector: int = 4

    def grid(self, a, b, c):
        return -(-a.shape[0] // (self.vector * self.threads)), 1, 1

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        piece = block * self.threads + thread
        if (piece + 1) * self.vector <= a.shape[0]:
            x, y = (cute.make_rmem_tensor(self.vector, Float32) for _ in range(2))
            cute.autovec_copy(cute.tiled_divide(a, (self.vector,))[None, piece], x)
            cute.autovec_copy(cute.tiled_divide(b, (self.vector,))[None, piece], y)
            x.store(x.load() + y.load())
            cute.autovec_copy(x, cute.tiled_divide(c, (self.vector,))[None, piece])
        else:
            for k in range_constexpr(self.vector):
                if piece * self.vector + k < a.shape[0]:
                    c[piece * self.vector + k] = a[piece * self.vector + k] + b[piece * self.vector + k]


def global_accesses(report: ptx.Report) -> list:
    """Loads and stores of global memory that were executed, in the order of the code."""
    return [access for _, access in sorted(report.accesses.items()) if access.warps]


# %%
n = pick(2048, 8192)
wide = {}
for vector in (1, 2, 4, 8):
    a, b, c = torch.randn(n), torch.randn(n), torch.full((n,), torch.nan)
    wide[vector] = run(WideAdd(vector=vector), a, b, c)
    assert torch.equal(c, a + b)
    first = global_accesses(wide[vector])[0]
    print(
        f"{vector} a thread: {wide[vector].total:5} instructions of warps, {wide[vector].sectors:5} sectors;", end=" "
    )
    print(f"{first.text.split()[0]:19} {first.bytes // first.warps:3} bytes a warp, {first.efficiency:.0%} used")
for m in (1, 5, 1003):  # the tail
    a, b, c = torch.randn(m), torch.randn(m), torch.full((m,), torch.nan)
    run(WideAdd(vector=4), a, b, c)
    assert torch.equal(c, a + b)

# %% [markdown]
# Up to four, the **bytes and sectors stay what they are**; what falls is the number of instructions that move them. An
# SM can start a few instructions a clock, whatever they carry. A load of 16 bytes a lane is 512 bytes a warp for the
# price of one.
#
# With 8 a thread there are two loads of 16 bytes. Each lane then has 32 bytes in a row, so **one** load takes every
# other 16 bytes: half of each sector. The second load takes the other half. The report counts a sector for each load,
# so it counts each twice. On a GPU the cache next to the SM usually saves the second trip, but work for it doubles.
# Dealing pieces out in rounds, as in section 2, avoids the question. **Look for** both in the picture.

# %%
fig, axes = plt.subplots(1, 2, figsize=(9.5, 3))
names = [str(v) for v in wide]
axes[0].bar(names, [1024 * r.total / (12 * n) for r in wide.values()], color=BLUE)
axes[0].set(title="Instructions of warps a KB moved", xlabel="elements a thread")
axes[1].bar(names, [r.sectors * 32 / (12 * n) for r in wide.values()], color=VERMILION)
axes[1].axhline(1, color=BLACK, linestyle=":")
axes[1].set(title="Bytes of touched sectors / bytes asked for", xlabel="elements a thread")
for ax in axes:
    ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ### Coalescing
#
# The memory system looks at the 32 addresses of a load and moves the sectors in which they lie, each once: the accesses
# are *coalesced*. If lanes are neighbours in memory, everything that is moved is used. A kernel that takes every
# `step`-th element shows what it costs if they are not.


# %%
@dataclass(frozen=True)
class Pick:
    """y[i] = x[i * step]; float32 x [m], y [n]."""

    step: int = 1
    threads: int = 64

    def arguments(self) -> tuple:
        return Argument("x", "float32", ("m",)), Argument("y", "float32", ("n",), output=True)

    def grid(self, x, y):
        return -(-y.shape[0] // self.threads), 1, 1

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        self.kernel(x, y).launch(grid=self.grid(x, y), block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * self.threads + thread
        if i < y.shape[0]:
            y[i] = x[i * self.step]


# %%
steps = [1, 2, 3, 4, 6, 8, 12, 16, 32]
used = []
for step in steps:
    x, y = torch.randn(512 * step), torch.empty(512)
    load = global_accesses(run(Pick(step), x, y))[0]
    used.append(load.efficiency)
    assert torch.equal(y, x[::step])
    print(f"step {step:2}: asked for {load.bytes} bytes, moved {32 * load.sectors:5}, used {load.efficiency:4.0%}")

# %%
fig, ax = plt.subplots(figsize=(6.5, 2.8))
ax.plot(steps, [100 * u for u in used], color=BLUE, marker="o")
ax.axhline(12.5, color=BLACK, linestyle=":", label="4 of 32 bytes")
ax.set(xscale="log", xlabel="step between lanes, in float32", ylabel="% used of what is moved", ylim=(0, 105))
ax.set(xticks=[1, 2, 4, 8, 16, 32], xticklabels=[1, 2, 4, 8, 16, 32], title="One load of a warp, counted")
ax.minorticks_off()
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# From step 8 on each lane has a sector of its own, and it gets no worse: 4 bytes of 32. A kernel that is bound by
# memory may run eight times as long for that. A matrix that is read by columns, a row of a transposed view, one field
# of many records: these are the steps one meets.
#
# ## 5 · RMSNorm: threads that need each other
#
# RMSNorm of a row $x$ of $H$ numbers with weights $w$ (Zhang and Sennrich 2019):
#
# $$y_j = w_j\, \frac{x_j}{\sqrt{\frac{1}{H}\sum_k x_k^2 + \varepsilon}} .$$
#
# The sum needs all of the row, so threads must talk. Within a warp they can with *shuffles*: an instruction by which
# each lane reads a register of another lane, no memory involved. In a *butterfly*, lane $l$ adds the value of lane $l
# \oplus 1$, then of $l \oplus 2$, 4, 8, 16 ($\oplus$ is exclusive or). After five steps every lane has the sum of all
# 32. Here it is for 8 lanes, three steps. **Look for** how pairs, fours and eights become equal.

# %%
values = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
rows = [values]
for distance in (1, 2, 4):
    rows.append(rows[-1] + rows[-1][torch.arange(8) ^ distance])
fig, ax = plt.subplots(figsize=(7.5, 2.8))
groups = [[i // size for i in range(8)] for size in (1, 2, 4, 8)]
draw_matrix(ax, [row.tolist() for row in rows], groups, "A butterfly sum: numbers in lanes, colour by equal sums")
ax.set_yticks(range(4), ["values", "+ lane ⊕ 1", "+ lane ⊕ 2", "+ lane ⊕ 4"])
ax.set_xticks(range(8), [f"lane {i}" for i in range(8)])
plt.show()

# %% [markdown]
# A row a warp: each lane holds its pieces of the row in registers, dealt out 16 bytes at a time (8 numbers of 16 bits),
# so the row is read from memory **once**. Sum of squares over the lane's own numbers, butterfly, scale, write. The
# package's `RMSNorm` does that with some extras. This is its core.


# %%
@dataclass(frozen=True)
class WarpNorm:
    """y = RMSNorm(x) * weight, a row a warp; bfloat16 x, y [rows, hidden], hidden a multiple of 256."""

    hidden: int
    eps: float = 1e-6
    threads: int = 128

    def arguments(self) -> tuple:
        x, weight = Argument("x", "bfloat16", ("rows", self.hidden)), Argument("weight", "bfloat16", (self.hidden,))
        return x, weight, Argument("y", "bfloat16", ("rows", self.hidden), output=True)

    def grid(self, x, weight, y):
        return -(-x.shape[0] // (self.threads // 32)), 1, 1

    @cute.jit
    def __call__(self, x: cute.Tensor, weight: cute.Tensor, y: cute.Tensor, stream):
        self.kernel(x, weight, y).launch(grid=self.grid(x, weight, y), block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, weight: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row, lane = block * (self.threads // 32) + thread // 32, thread % 32
        pieces = const_expr(self.hidden // 256)  # of 8 numbers that a lane holds
        if row < x.shape[0]:
            held, scale = (cute.make_rmem_tensor((8, pieces), x.element_type) for _ in range(2))
            for i in range_constexpr(pieces):
                cute.autovec_copy(cute.tiled_divide(x[row, None], (8,))[None, i * 32 + lane], held[None, i])
                cute.autovec_copy(cute.tiled_divide(weight, (8,))[None, i * 32 + lane], scale[None, i])
            wide = held.load().to(Float32)
            squares = (wide * wide).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            squares = cute.arch.warp_reduction_sum(squares)  # the butterfly: every lane has it
            inverse = cute.math.rsqrt(squares / self.hidden + self.eps)
            held.store((wide * inverse * scale.load().to(Float32)).to(x.element_type))
            for i in range_constexpr(pieces):
                cute.autovec_copy(held[None, i], cute.tiled_divide(y[row, None], (8,))[None, i * 32 + lane])


def norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """In float64, rounded once at the end."""
    x64 = x.double()
    return (x64 * torch.rsqrt(x64.square().mean(-1, keepdim=True) + eps) * weight.double()).to(x.dtype)


# %%
H, R = 512, 6
x, weight, y = torch.randn(R, H).bfloat16(), torch.randn(H).bfloat16(), torch.empty(R, H).bfloat16()
report = run(WarpNorm(H), x, weight, y)
same = (y == norm_reference(x, weight)).float().mean()
print(f"equal to the rounded float64 result: {same:.2%}; shuffles of warps:", end=" ")
print(sum(k for name, k in report.instructions.items() if name.startswith("shfl")), "for", R, "rows")
for access in global_accesses(report)[:3]:
    print(f"   {access.text.split()[0]:18} {access.bytes // access.warps} bytes a warp, {access.efficiency:.0%} used")
torch.testing.assert_close(y.float(), norm_reference(x, weight).float(), rtol=2**-7, atol=0)

# %% [markdown]
# Here the shuffle stands inside of `if row < rows`. That is sound only because a row has a whole warp, so all 32 lanes
# agree. The package gives a row of 896 numbers to 16 lanes, since 112 pieces go into 16 without a rest. Then a warp
# has two rows, and with an odd number of rows half of the last warp has none. A shuffle waits for all the lanes in its
# mask: inside the condition it would wait for ever, or take what happens to lie there. A tiny kernel that does it:


# %%
@dataclass(frozen=True)
class HalfWarp(Pick):
    """y[i] = sum of the 16 values of i's row; the shuffle is inside the condition, or not."""

    inside: bool = True

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * self.threads + thread
        value = Float32(0.0)
        if i < x.shape[0]:
            value = x[i]
            if const_expr(self.inside):
                value = cute.arch.warp_reduction_sum(value, threads_in_group=16)
        if const_expr(not self.inside):
            value = cute.arch.warp_reduction_sum(value, threads_in_group=16)
        if i < x.shape[0]:
            y[i] = value


# %%
three_rows = torch.randn(48), torch.empty(48)
print("inside: ", caught(HalfWarp(inside=True), *three_rows))
print("outside:", caught(HalfWarp(inside=False), *three_rows))

# %% [markdown]
# ### Wide rows: shared memory and barriers
#
# A row of many thousands does not fit in the registers of one warp. Then a whole block takes it, and sums must cross
# from warp to warp. That goes through *shared memory*: a small memory in the SM that all threads of a block see. Each
# warp writes its share; after a *barrier* (`sync_threads`) all shares are there and can be read.


# %%
@dataclass(frozen=True)
class BlockNorm:
    """y[row] = mean square of a row, a block a row; float32 x [rows, hidden], hidden a multiple of `threads`."""

    hidden: int
    barrier: bool = True
    threads: int = 128

    def arguments(self) -> tuple:
        return Argument("x", "float32", ("rows", self.hidden)), Argument("y", "float32", ("rows",), output=True)

    def grid(self, x, y):
        return x.shape[0], 1, 1

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        self.kernel(x, y).launch(grid=self.grid(x, y), block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        warps = const_expr(self.threads // 32)
        shares = cute.make_tensor(cute.arch.alloc_smem(Float32, warps), cute.make_layout(warps))
        total = Float32(0.0)
        for i in range_constexpr(self.hidden // self.threads):
            value = x[row, i * self.threads + thread]
            total += value * value
        total = cute.arch.warp_reduction_sum(total)
        if thread % 32 == 0:
            shares[thread // 32] = total
        if const_expr(self.barrier):
            cute.arch.sync_threads()
        if thread == 0:
            everything = Float32(0.0)
            for warp in range_constexpr(warps):
                everything += shares[warp]
            y[row] = everything / self.hidden


# %%
x, y = torch.randn(3, 1024), torch.empty(3)
report = run(BlockNorm(1024), x, y)
torch.testing.assert_close(y, x.square().mean(1))
print(f"{report.barriers} barriers for 3 blocks, mean squares {[round(v, 3) for v in y.tolist()]}")

# %% [markdown]
# Now leave the barrier out. On a GPU the answer would then depend on which warp is faster: a *race*. It could be right
# a million times. The interpreter can let warps take turns in four orders. But it need not be lucky, since it keeps
# book of who is **ordered** before whom: a barrier orders, the accident of being first does not.

# %%
for order in ("lockstep", "warp", "serial", "random"):
    print(f"{order:9}", caught(BlockNorm(1024, barrier=False), x, y, order=order).replace("\n ", "\n          "))
for order in ("lockstep", "warp", "serial", "random"):
    assert caught(BlockNorm(1024), x, y, order=order) == "no mistake found"
print("with the barrier: no mistake found in any order")

# %% [markdown]
# In each order the mistake is found, also in those where the sum would have come out right. (In the random one, the
# share may not be there at all yet when it is read: the message is then another.)
#
# ### Statistics in float32
#
# Inputs and outputs are 16 bits wide, the sum is not. Here is why, on the CPU: the sum of $H$ squares, added one by one
# in bfloat16 and in float32. **Look for** where the lower line stops.

# %%
squares = torch.full((2048,), 1.0)
sums = {}
for dtype in (torch.float32, torch.bfloat16):
    total, sums[dtype] = torch.zeros((), dtype=dtype), []
    for square in squares.to(dtype):
        total = total + square
        sums[dtype].append(float(total))
fig, ax = plt.subplots(figsize=(6.5, 2.8))
ax.plot(sums[torch.float32], color=BLUE, label="float32")
ax.plot(sums[torch.bfloat16], color=VERMILION, linestyle="--", label="bfloat16")
ax.set(xlabel="squares added, each 1", ylabel="sum", title="A running sum")
ax.legend(frameon=False)
plt.show()
print("bfloat16 ends at", sums[torch.bfloat16][-1])

# %% [markdown]
# bfloat16 has 8 bits of precision: from 256 on, adding 1 changes nothing. And float16, which has 11, cannot hold a
# square above 65,504 at all. So: read 16 bits, compute in 32, round once, at the end.
#
# ### What fusing saves
#
# Now the bytes. Eager PyTorch runs RMSNorm as a row of operators. Each reads its inputs from memory and writes its
# output there. A *dispatch mode* sees every operator that is called, so we can count. Views move nothing.

# %%
from torch.utils._python_dispatch import TorchDispatchMode


class Traffic(TorchDispatchMode):
    """Notes (operator, bytes read, bytes written) for every operator that is no view."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if not operator.is_view:
            read = sum(a.nbytes for a in args if isinstance(a, torch.Tensor))
            self.rows.append((operator.name().removeprefix("aten::"), read, result.nbytes))
        return result


def eager_norm(x, weight, eps=1e-6):
    """As transformers writes it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


# %%
R, H = pick(8, 32), 896
x, residual = (torch.randn(R, H).bfloat16() for _ in range(2))
weight = torch.randn(H).bfloat16()
with Traffic() as traffic:
    residual_after = residual + x
    eager_norm(residual_after, weight)
for name, read, written in traffic.rows:
    print(f"{name:22} reads {read:9,}  writes {written:9,}")
eager_bytes = sum(read + written for _, read, written in traffic.rows)
print(f"{len(traffic.rows)} operators, {eager_bytes:,} bytes, {eager_bytes / x.nbytes:.1f} times the size of x")

# %% [markdown]
# And the kernel of the package, alone and fused with the addition to the residual stream that goes before it in every
# layer. The interpreter counts what its threads asked for.

# %%
from rlcourse.course.kernels.rms_norm import RMSNorm, add_rms_norm_reference, rms_norm

y, stream = torch.empty_like(x), residual.clone()
report = run(RMSNorm(H, "bfloat16", add=True), x, stream, weight, y)
expected_stream = residual.clone()
expected = add_rms_norm_reference(x, expected_stream, weight, 1e-6)
torch.testing.assert_close(y.float(), expected.float(), rtol=2**-7, atol=1e-6)
assert torch.equal(stream, expected_stream)
print("read", dict(report.read), "written", dict(report.written))
fused_bytes = sum(report.read[name] for name in ("x", "residual")) + sum(report.written.values()) + weight.nbytes
print(f"fused: {fused_bytes:,} bytes, {fused_bytes / x.nbytes:.1f} x the size of x", end="; ")
print(f"eager moves {eager_bytes / fused_bytes:.1f} x as much")

# %% [markdown]
# Two reads, two writes, and the weight: fewer bytes cannot do it, since both the new stream and its norm are needed
# later. (Each row's threads ask for the weight again, as `read` shows. It is small, and comes from a cache: memory
# gives it once, and so it is counted here.)
#
# Nearly all the other bytes are of tensors that one operator writes only for the next one to read. That is what
# *fusing* removes, and no tuning of the single operators could. It holds for good kernels, too: a kernel of its own
# for the sum would move three tensors and one for the norm two. Fused it is four.
#
# ## 6 · SwiGLU
#
# The middle of a transformer's MLP: $\text{silu}(g) \cdot u$ with $\text{silu}(g) = g / (1 + e^{-g})$, where one matrix
# product has made gate $g$ and up $u$ side by side. Threads share nothing here. Each takes 16 bytes of $g$, and the 16
# bytes of $u$ that belong to them. The body of the package's kernel:

# %%
from rlcourse.course.kernels.swiglu import Swiglu, swiglu

source = inspect.getsource(Swiglu)
print(inspect.cleandoc(source[source.index("        index = block") :]))

# %% [markdown]
# Two things are worth a look. `exp2` with `fastmath` and `rcp_approx` are single instructions of the *special function
# unit*, good to about 22 bits; an exact division would be a small subroutine. And the multiplications before them are
# in float32, rounded once. Bytes, and the errors of both ways against float64:

# %%
inner = 256
gate_up = torch.randn(R, 2 * inner).bfloat16()
out = torch.empty(R, inner).bfloat16()
report = run(Swiglu(inner, "bfloat16"), gate_up, out)


def eager_swiglu(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


with Traffic() as traffic:
    eager_out = eager_swiglu(gate_up)
ours = sum(report.read.values()) + sum(report.written.values())
theirs = sum(read + written for _, read, written in traffic.rows)
print(f"eager {theirs:,} bytes in {len(traffic.rows)} operators, fused {ours:,}: {theirs / ours:.2f} x")
print({name: k for name, k in report.instructions.items() if name.split(".")[0] in ("ex2", "rcp", "div")})

# %% [markdown]
# Even here the second operator reads back what the first has written. In a backward pass and with a norm behind it
# there would be more to gain; the rule is the same: count the tensors that go to memory only to come back.
#
# ## 7 · The floor
#
# What is the least time for this? Lesson 06 had the *roofline*: a program takes at least its bytes over the bandwidth,
# and at least its operations over the rate of operations. Which of them binds follows from operations a byte, the
# *intensity*, against the machine's *ridge*. Intensities of our kernels, counted by hand: an addition for 12 bytes;
# RMSNorm about 4 operations for each number that is read and written with 2 bytes each; SwiGLU about 5 for 6 bytes. The
# ridge is measured here, on this machine's processor.

# %%
from rlcourse.measure.plots import draw_roofline
from rlcourse.measure.roofline import Work, measure_machine
from rlcourse.measure.timing import median_seconds

cpu = torch.device("cpu")
machine = measure_machine(cpu, repeats=pick(3, 7))
N = pick(2**21, 2**24)
big = [torch.randn(N) for _ in range(3)]
wide_x, wide_gate_up = torch.randn(N // 896, 896), torch.randn(N // 1024, 1024)
points = []
for name, element_bytes, operations, size, work in (
    ("a + b", 12, 1, N, lambda: torch.add(big[0], big[1], out=big[2])),
    ("RMSNorm, eager", 8, 4, wide_x.numel(), lambda: eager_norm(wide_x, torch.ones(896))),
    ("SwiGLU, eager", 12, 5, wide_gate_up.numel() // 2, lambda: eager_swiglu(wide_gate_up)),
):
    least = Work({name: float(element_bytes * size)}, {name: float(operations * size)})
    points.append((name, least, median_seconds(work, cpu, pick(3, 7))))
fig, ax = plt.subplots(figsize=(7.5, 4))
draw_roofline(ax, machine, points)
ax.legend(frameon=False, fontsize=9, loc="upper left")
plt.show()
for name, work, took in points:
    print(f"{name:15} {work.intensity:.2f} operations a byte, ridge at {machine.ridge:.0f}; eager takes", end=" ")
    print(f"{took / machine.floor_seconds(work):.1f} x its floor on this processor")

# %% [markdown]
# (In float32, so the bytes here are twice those of bfloat16. The sum may come out a little below its floor: a
# processor reads a line of its cache before it writes to it, in a copy too, and a copy is the yardstick. The others
# are further from their floors than their bytes say: on a processor each large new tensor gets fresh memory from the
# system.) All three stand to the left of the ridge, and a GPU's ridge lies further to the right still, since it
# has more arithmetic for each byte. So their floor is **bytes over bandwidth**, whatever they compute, and the honest
# mark for such a kernel is the share of the *copy* bandwidth it reaches: a copy is the plainest thing that reads and
# writes. Here are the kernels of the package on a GPU. Green is the copy, blue are the kernels, orange what they are
# compared with.


# %%
def from_record(name: str, show) -> None:
    """Draw `show(record)` from an H200's record; without one, say how to make it."""
    try:
        record = load_record(name, "NVIDIA H200")
    except FileNotFoundError:
        print(f"Not recorded on an NVIDIA H200 yet: `rlcourse bench {name} --record` measures it there.")
        return
    show(record)


def draw_bandwidths(record: dict) -> None:
    """GB/s of every kernel of this lesson, one bar for each variant and shape."""
    words = ("copy", "add", "norm", "swiglu")
    rows = [r for r in record["results"] if r.get("gb_per_s") and any(word in r["variant"] for word in words)]
    if not rows:
        print(f"The record has none of these kernels ({provenance(record)}).")
        return
    _, ax = plt.subplots(figsize=(8, 1.2 + 0.27 * len(rows)))
    colours = [GREEN if "copy" in r["variant"] else ORANGE if "-" in r["variant"] else BLUE for r in rows]
    ax.barh(range(len(rows)), [r["gb_per_s"] for r in rows], color=colours)
    ax.set_yticks(range(len(rows)), [f"{r['variant']}  {format_cell(r.get('shape'))}" for r in rows])
    ax.invert_yaxis()
    ax.set(xlabel="GB/s: the bytes that the work must move, over the time it took", title=provenance(record))
    ax.spines[["top", "right"]].set_visible(False)
    plt.show()
    display(Markdown(record_markdown(record | {"results": rows})))


from_record("cute", draw_bandwidths)

# %% [markdown]
# When you read such a figure: the bytes in it are those that the work **must** move, not those that a program did move.
# So a chain of operators that moves three times as much shows a third of the bandwidth. Small shapes stay below large
# ones: the launch has its price, and with few blocks there are not enough bytes under way. That is the next section.
#
# ## 8 · Bytes in flight
#
# A load takes hundreds of nanoseconds. To use a bandwidth of $B$ bytes a second at a latency of $L$ seconds, $B \cdot
# L$ bytes must be **under way at any moment**: Little's law (Little 1961), the same that says how many people stand in
# a shop. They can come from many threads with a little each, or few threads with much.
#
# How many threads an SM holds is limited by what it has: places for warps and for blocks, shared memory, and 65,536
# registers. The share of its warps' places that is filled is the *occupancy*. Limits by architecture are NVIDIA's
# (CUDA C++ Programming Guide, compute capabilities).

# %%
LIMITS = {"sm_86": (48, 16, 100), "sm_90a": (64, 32, 228)}  # warps, blocks, KB of shared memory of an SM


def resident_warps(arch: str, threads: int, registers: int, shared_bytes: int = 0) -> int:
    """Warps that one SM holds at once. registers: of a thread."""
    most_warps, most_blocks, shared = LIMITS[arch]
    warps = threads // 32
    of_a_warp = 32 * (-(-registers // 8) * 8)  # registers are handed out in eights
    by_registers = 65536 // of_a_warp // 4 * 4 // warps  # to four schedulers alike
    by_shared = 1024 * shared // (shared_bytes + 1024)  # each block pays 1 KB to the system
    return warps * min(most_blocks, most_warps // warps, by_registers, by_shared)


for registers in (16, 32, 64, 128, 255):
    warps = {arch: resident_warps(arch, 128, registers) for arch in LIMITS}
    print(
        f"{registers:3} registers: "
        + ", ".join(f"{arch} {n:2} of {LIMITS[arch][0]} warps" for arch, n in warps.items())
    )

# %% [markdown]
# Put together, as a **model** with round numbers: a GPU of 132 SMs and 4.8 TB/s, which is an H200's data sheet, and a
# latency that you choose. Below the needed bytes in flight, the bandwidth reached is bytes in flight over latency.
# **Look for** how the third picture, with half the warps or less, still reaches the roof.

# %%
from rlcourse.course.widgets import explorer

A_SM = 4.8e12 / 132 / 1e9  # bytes a nanosecond


def draw_flight(ax, registers: int, bytes_a_thread: int, latency_ns: int) -> None:
    """Share of the bandwidth over the bytes that each thread has under way."""
    warps = resident_warps("sm_90a", 128, registers)
    sizes = torch.logspace(0, 7, 200, base=2)

    def reached(size):
        return (100 * warps * 32 * size / (latency_ns * A_SM)).clamp(max=100)

    ax.plot(sizes, reached(sizes), color=BLUE, linewidth=2)
    found = reached(torch.tensor(float(bytes_a_thread)))
    ax.plot([bytes_a_thread], [found], color=VERMILION, marker="o", markersize=9)
    ax.set(xscale="log", ylim=(0, 108), xlabel="bytes a thread has under way", ylabel="% of the bandwidth, at most")
    ax.set(xticks=[1, 4, 16, 64, 128], xticklabels=[1, 4, 16, 64, 128])
    ax.minorticks_off()
    ax.set_title(
        f"{registers} registers, {warps} of 64 warps,\n{bytes_a_thread} bytes a thread: {found:.0f} %", fontsize=11
    )
    ax.grid(alpha=0.25)


explorer(
    draw_flight,
    static=[
        {"registers": 32, "bytes_a_thread": 4, "latency_ns": 700},
        {"registers": 32, "bytes_a_thread": 16, "latency_ns": 700},
        {"registers": 80, "bytes_a_thread": 112, "latency_ns": 700},
    ],
    registers=(32, 16, 248, 8),
    bytes_a_thread=(16, 4, 128, 4),
    latency_ns=(700, 300, 1200, 50),
)

# %% [markdown]
# In the first picture each thread has one float under way, at **full** occupancy. It does not get there. With 16 bytes
# it does, and so does a kernel with many registers that has asked for all of its row before it uses any of it.
# Occupancy is a means; bytes in flight are the end (Volkov 2010). For our kernels, with registers read from their
# machine code:

# %%
kernels = {
    "Add, 1 a thread": (Add(), 8),
    "WideAdd, 4 a thread": (WideAdd(vector=4), 32),
    "RMSNorm 896": (RMSNorm(896, "bfloat16"), 2 * 896 // 16),
    "RMSNorm 896, add": (RMSNorm(896, "bfloat16", add=True), 2 * 2 * 896 // 16),
    "RMSNorm 5120": (RMSNorm(5120, "float16"), 2 * 5120 // 32),
    "Swiglu 4864": (Swiglu(4864, "bfloat16"), 32),
}
print(f"{'for sm_90a':22} registers  stack  warps of 64  bytes a thread loads  in flight, KB an SM")
for name, (kernel, loads) in kernels.items():
    code = compiled(kernel, "sm_90a")
    warps = resident_warps("sm_90a", kernel.threads, code.registers, code.shared_bytes)
    print(f"{name:22} {code.registers:9} {code.stack_bytes:6} {warps:12} {loads:21} {warps * 32 * loads / 1024:20.0f}")
print(f"needed at 700 ns by the model above: {700 * A_SM / 1024:.0f} KB")

# %% [markdown]
# The last column is an upper limit: it takes all of a thread's loads to be under way at once. A row of 5120 numbers
# costs many registers, and there its use ends: a warp can hold no wider row. From there on a block takes the row.
#
# ## 9 · Reading the code
#
# Three levels, from far to near. First a summary: `python -m rlcourse.ptx FILE.ptx` says what an entry has, group by
# group. It is what to look at before anything is timed.

# %%
from rlcourse.ptx.summary import summary

(entry,) = ptx.parse(compiled(RMSNorm(896, "bfloat16"), "sm_86").ptx)
print(summary(entry))

# %% [markdown]
# Look at `local`, at the loads and stores, and at the conversions. **Local** memory is a thread's own memory for what
# finds no place in registers. It has a friendly name, and it lies in global memory. Two things lead there:
#
# - registers have no numbers at run time. A register tensor that is indexed with a number unknown to the compiler must
#   lie in memory. This shows in PTX, as `.local`;
# - more values than registers: the assembler *spills* some. PTX knows nothing of it, since it has registers without
#   end. It shows in the machine code only, as a stack.
#
# The first on purpose, and a remedy: to look at all places, each with an index that is known, and keep the right one.


# %%
@dataclass(frozen=True)
class Stroll:
    """y[i] = the sum of 8 of the 16 numbers of row i, taken with a step; x [n, 16], step [n], y [n]. With `select`
    each thread looks at all 16 and keeps the one it wants, so that every index is known."""

    select: bool = False
    threads: int = 64

    def arguments(self) -> tuple:
        x, step = Argument("x", "float32", ("n", 16)), Argument("step", "int32", ("n",))
        return x, step, Argument("y", "float32", ("n",), output=True)

    def grid(self, x, step, y):
        return -(-x.shape[0] // self.threads), 1, 1

    @cute.jit
    def __call__(self, x: cute.Tensor, step: cute.Tensor, y: cute.Tensor, stream):
        self.kernel(x, step, y).launch(grid=self.grid(x, step, y), block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, step: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row = block * self.threads + thread
        if row < x.shape[0]:
            held, total = cute.make_rmem_tensor(16, Float32), Float32(0.0)
            cute.autovec_copy(x[row, None], held)
            for i in cutlass.range(8, unroll=1):  # a loop that stays a loop
                at = i * step[row] % 16
                if const_expr(self.select):
                    for k in range_constexpr(16):
                        total += held[k] if k == at else Float32(0.0)
                else:
                    total += held[at]
            y[row] = total


# %%
x, step = torch.randn(64, 16), torch.randint(1, 16, (64,), dtype=torch.int32)
expected = x.gather(1, step[:, None].long() * torch.arange(8) % 16).sum(1)
for select in (False, True):
    kernel, y = Stroll(select=select), torch.empty(64)
    report = run(kernel, x, step, y)
    torch.testing.assert_close(y, expected)
    code = compiled(kernel, "sm_86")
    local = len(re.findall(r"\b(?:ld|st)\.local", code.ptx))
    print(
        f"{'every index known' if select else 'index unknown':18} {local} accesses of local memory in the PTX,", end=" "
    )
    print(f"stack {code.stack_bytes:2} bytes, {report.total} instructions of 2 warps")

# %% [markdown]
# The remedy has its price, more instructions. Which is faster must be measured; best is to need neither. The second
# kind on purpose: our `WarpNorm` with rows that are too wide for a warp.

# %%
for hidden in (512, 2048, 8192):
    code = compiled(WarpNorm(hidden), "sm_86")
    local = len(re.findall(r"\b(?:ld|st)\.local", code.ptx))
    print(f"rows of {hidden:4}: {code.registers:3} registers, {local} accesses of local memory in the PTX,", end=" ")
    print(f"stack {code.stack_bytes} bytes" + (": spilled" if code.stack_bytes else ""))

# %% [markdown]
# The machine code is a *cubin*, an ELF file with a section that lists what each function needs.
# `rlcourse.kernels.cubin` reads registers and stack from it in forty lines: that is where the numbers above come from,
# and how the tests of the package see to it that no kernel spills. Finally the instructions themselves, *SASS*. There
# is no official description of it, and one needs NVIDIA's disassembler: `nvdisasm`, from the CUDA toolkit, or as a
# part of Triton.

# %%
import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path


def sass(code) -> list[str]:
    """The machine code's instructions as text; an empty list where there is no disassembler."""
    triton = importlib.util.find_spec("triton")
    beside = Path(triton.origin).parent / "backends/nvidia/bin/nvdisasm" if triton and triton.origin else None
    program = shutil.which("nvdisasm") or (beside if beside and beside.exists() else None)
    if program is None:
        return []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(code.cubin)
        text = subprocess.run([program, "-c", path], capture_output=True, text=True).stdout
    found = re.findall(r"/\*[0-9a-f]{4}\*/\s+(.*?)\s*;", text)
    return found[: max((i for i, line in enumerate(found) if "EXIT" in line), default=len(found)) + 1]


# %%
for name, kernel in (("one a thread", Add()), ("four a thread", WideAdd(vector=4))):
    lines = sass(compiled(kernel, "sm_86"))
    shown = lines if len(lines) < 30 else [line for line in lines if re.search(r"LDG|STG|FADD", line)]
    print(f"{name}: {len(lines)} instructions" + ("" if shown == lines else ", of which these move and add:"))
    print("\n".join(f"    {line}" for line in shown) or "    no disassembler here: install the CUDA toolkit, or Triton")

# %% [markdown]
# `S2R` fetches thread and block, `ISETP` compares, `@P0 EXIT` is the guard: the jump has become a predicated exit.
# `IMAD.WIDE` is the address, product and sum in one. `LDG.E` loads 4 bytes, `LDG.E.128` 16. What to look for in SASS:
# the width of loads, whether several stand before the first use, and any `LDL` or `STL`, local memory.
#
# ## 10 · The operation
#
# A kernel is called from Python, through a launcher that PyTorch knows nothing of. In eager mode that is enough. Under
# `torch.compile`, Dynamo cannot look inside, and the graph breaks around it (lesson 07). The remedy is to register it
# as an *operation*: a name with a schema, which says what is read and what is changed, and a *fake*, a function that
# makes an empty output of the right shape and dtype, without data. That is all a compiler needs to plan around it.


# %%
@torch.library.custom_op("lesson08::add", mutates_args=())
def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = torch.empty_like(a)
    run(WideAdd(vector=4), a, b, c)
    return c


@add.register_fake
def _(a, b):
    return torch.empty_like(a)


@torch._dynamo.disable  # a launcher is machine code: Dynamo cannot look in
def launcher(a, b, c):
    run(WideAdd(vector=4), a, b, c)


def bare(a, b):
    c = torch.empty_like(a)
    launcher(a, b, c)
    return c


# %%
import logging

torch._logging.set_logs(dynamo=logging.CRITICAL)  # breaks are made on purpose
a, b = torch.randn(2, 300).unbind()
a, b = a.clone(), b.clone()
for name, function in (("bare launcher", bare), ("operation", add)):
    torch._dynamo.reset()
    said = torch._dynamo.explain(lambda a, b, f=function: f(a * 2, b) + 1)(a, b)
    print(f"{name:14} graphs {said.graph_count}, breaks {said.graph_break_count}")
torch._dynamo.reset()
whole = torch.compile(lambda a, b: add(a * 2, b) + 1, backend="eager", fullgraph=True)
assert torch.equal(whole(a, b), a * 2 + b + 1)
print("fullgraph:", torch.library.opcheck(add, (a, b)))

# %% [markdown]
# `opcheck` tries the operation in the ways in which compilers use it: is the schema true, does the fake give the
# shapes that the kernel gives? A fake that says another dtype, or an operation that changes an argument without saying
# so in `mutates_args`, makes wrong code later, far from here. `add_rms_norm` changes the residual stream in place:
# look at its schema, where `!` marks what it writes. Lesson 10 is about what happens to a fast kernel without all
# this.

# %%
print(torch.ops.rlcourse.rms_norm.default._schema)
print(torch.ops.rlcourse.add_rms_norm.default._schema)
print(torch.ops.rlcourse.swiglu.default._schema)
with torch._subclasses.FakeTensorMode():
    print(
        "a fake of [16384, 896]:", rms_norm(torch.empty(16384, 896, dtype=torch.bfloat16), torch.empty(896), 1e-6).shape
    )

# %% [markdown]
# ## 11 · How wrong is it?
#
# A kernel for 16-bit numbers cannot equal the float64 result. It should equal it **rounded once**: no better is
# possible. Measured here as the largest error in units of the last place (of bfloat16: 1 part in 128 to 1 in 256),
# against what eager PyTorch does with its roundings in between. `interpreted()` lets operations run on CPU tensors.

# %%
from rlcourse.kernels.toolchain import interpreted


def last_places(found: torch.Tensor, exact: torch.Tensor) -> str:
    """Share of numbers that are not the exact one rounded, and the largest error in units of the last place."""
    size = exact.abs().clamp(min=torch.finfo(found.dtype).smallest_normal)
    steps = torch.finfo(found.dtype).eps * 2 ** size.log2().floor()
    wrong = (found != exact.to(found.dtype)).float().mean()
    return f"{wrong:6.2%} not rounded right, at most {((found.double() - exact) / steps).abs().max():.2f} units off"


for dtype in (torch.bfloat16, torch.float16):
    x, weight, gate_up = torch.randn(R, 896).to(dtype), torch.randn(896).to(dtype), torch.randn(R, 512).to(dtype)
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    gate, up = gate_up.double().chunk(2, -1)
    exact_swiglu = torch.nn.functional.silu(gate) * up
    with interpreted():
        ours, ours_swiglu = rms_norm(x, weight, 1e-6), swiglu(gate_up)
    print(str(dtype))
    print("   RMSNorm  kernel", last_places(ours, exact), "| eager", last_places(eager_norm(x, weight), exact))
    print("   SwiGLU   kernel", last_places(ours_swiglu, exact_swiglu), end=" | eager ")
    print(last_places(eager_swiglu(gate_up), exact_swiglu))
    assert (ours.double() - exact).abs().max() <= (eager_norm(x, weight).double() - exact).abs().max() + 1e-9

# %% [markdown]
# Half a unit is the best that rounding can do. The kernel stays at it but for ties that float32 decides otherwise;
# eager rounds two or three times on the way. So the fused kernel moves fewer bytes **and** is closer. Keep that in
# mind when two implementations disagree: neither is the truth, and float64 is at hand.
#
# ## Check yourself
#
# 1. A warp loads 4 bytes a lane, and the first lane's address is 16 bytes behind a multiple of 32. How many sectors?
#
# <details><summary>Answer</summary>
# Five: 128 bytes that begin in the middle of a sector end in the middle of another. 128 of 160 bytes are used.
# </details>
#
# 2. What is the layout of a row-major matrix of 6 × 10, transposed, and what was moved to get it?
#
# <details><summary>Answer</summary>
# `(10,6):(1,10)`. Nothing: shape and strides changed places.
# </details>
#
# 3. A kernel passes all tests with 4096 elements. Name two lengths that you try next, and why.
#
# <details><summary>Answer</summary>
# 1, or another below one piece, and a length that is a multiple of neither the piece nor the block, such as 4099: the
# tail, in a block that is otherwise full and in one that is nearly empty.
# </details>
#
# 4. All results of a kernel are right, and the interpreter reports a race. Who errs?
#
# <details><summary>Answer</summary>
# The kernel. The result was right in this order of events, and nothing makes another order impossible.
# </details>
#
# 5. A kernel has 25 % occupancy and reaches the copy bandwidth. What do you gain by halving its registers?
#
# <details><summary>Answer</summary>
# Nothing. It has enough bytes in flight, and the bandwidth is the floor. If the compiler must spill for it, you lose.
# </details>
#
# 6. RMSNorm reads x twice, once for the sum and once to scale it. How much slower can that be?
#
# <details><summary>Answer</summary>
# Three moves in place of two, so up to 1.5 times, if the row has left the cache in between.
# Hardly at all if it has not.
# </details>
#
# ## Exercises
#
# [exercises/08_first_kernels.ipynb](../exercises/08_first_kernels.ipynb): the offsets of a layout, the sectors of a
# warp, the elements of a lane, and two kernels: one with a tail, one with shared memory.
#
# ## Further reading
#
# - NVIDIA, *CUDA C++ Programming Guide*: the programming model, and the table of compute capabilities.
# - NVIDIA, *Parallel Thread Execution ISA*: every PTX instruction.
# - NVIDIA, CUTLASS documentation, *CuTe* and *CuTe DSL*: layouts, their algebra, and the Python of this lesson.
# - Volkov 2010, *Better Performance at Lower Occupancy*, GPU Technology Conference: bytes in flight against occupancy.
# - Little 1961, *A Proof for the Queuing Formula: L = λW*, Operations Research 9.
# - Williams, Waterman and Patterson 2009, *Roofline: An Insightful Visual Performance Model for Multicore
#   Architectures*, Communications of the ACM 52.
# - Zhang and Sennrich 2019, *Root Mean Square Layer Normalization*, arXiv:1910.07467.
# - Shazeer 2020, *GLU Variants Improve Transformer*, arXiv:2002.05202.
