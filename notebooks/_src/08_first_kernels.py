# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# A kernel can be wrong and pass every test you have. It reads past the end of a tensor, where something harmless
# happens to be; or it adds up numbers that another thread is still writing, and wins that race each time you look. Here
# you write kernels, break them on purpose, and see what it takes to notice.
#
# **You will learn**
#
# - to write a whole GPU program in CuTe DSL, in fewer than 30 lines, and what each line is for;
# - what a GPU runs: threads, warps, blocks, and what a branch costs;
# - what a layout is, and why neighbouring threads should read neighbouring bytes;
# - RMSNorm: shuffles, shared memory, barriers, and mistakes that a test on a GPU may never show;
# - what fusing buys;
# - to run a kernel without this course: alignment, streams, Triton.
#
# You need [lesson 06](06_where_time_goes.ipynb), for floors, but no GPU: an **interpreter** runs the compiled code on
# the CPU, on small tensors, counting every byte. If you have a GPU, each run is repeated there.
#
# The compiler is a package for Linux: `pip install "rlcourse[kernels]"`; in Colab `%pip install
# "nvidia-cutlass-dsl>=4.8.1,<4.9" "apache-tvm-ffi>=0.1.15,<0.2"`.

# %%
import os
import struct
import tempfile
from dataclasses import dataclass
from unittest.mock import patch

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown, display
from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle

import ptx_interpreter as ptx
from rlcourse.course import pick
from rlcourse.course.kernels.interpret import run as interpret
from rlcourse.course.widgets import bet
from rlcourse.kernels import dsl
from rlcourse.kernels.dsl import Float32, Int32, const_expr, range_constexpr
from rlcourse.kernels.toolchain import Argument, compiled
from rlcourse.measure.plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION
from rlcourse.measure.records import load_record, provenance

os.environ["TRITON_INTERPRET"] = str(int(not torch.cuda.is_available()))  # for section 9, before Triton is loaded
print("CuTe DSL is here" if dsl.INSTALLED else "CuTe DSL is missing: see the lines above")

# %% [markdown]
# ## 1 · A whole program
#
# A *kernel* is a function that many *threads* run at once. Each thread finds out which one it is and does its part of
# the work. Threads come in *blocks* of up to 1,024; the launch says how many blocks there are, the *grid*. A block
# stays on one of the GPU's processors (an *SM*, streaming multiprocessor), so its threads can share fast memory and
# wait for each other. Blocks share only the GPU's large *global* memory.
#
# In CuTe DSL all of that is Python. This complete program adds two vectors, one element per thread.

# %%
import torch
from cuda.bindings import driver as cuda
from cutlass import cute
from cutlass.cute.runtime import from_dlpack


@cute.kernel
def add_kernel(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()  # which thread of my block am I?
    block, _, _ = cute.arch.block_idx()  # and which block is it?
    i = block * 128 + thread
    if i < c.shape[0]:  # the last block has threads to spare
        c[i] = a[i] + b[i]


@cute.jit
def launch_add(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    blocks = cute.ceil_div(c.shape[0], 128)
    add_kernel(a, b, c).launch(grid=[blocks, 1, 1], block=[128, 1, 1])


device = "cuda" if torch.cuda.is_available() else "cpu"
a, b, c = (torch.randn(1000, device=device) for _ in range(3))
tensors = [from_dlpack(t) for t in (a, b, c)]
program = cute.compile(launch_add, *tensors, options="" if device == "cuda" else "--gpu-arch=sm_86")
if device == "cuda":
    program(*tensors)
    assert torch.equal(c, a + b)

# %% [markdown]
# From the bottom up:
#
# - `from_dlpack` wraps a tensor without a copy. It hides a trap, which section 9 springs.
# - `cute.compile` *traces* `launch_add`: it runs the Python once, with placeholders instead of tensors, and turns what
#   that did into machine code: your GPU's, or without one an A10's (`sm_86`). Each thread must decide `i < c.shape[0]`
#   for itself, so CuTe first turns each `if` on a runtime value into a branch of the GPU's code. Shapes and dtypes are
#   constants of the code; `from_dlpack(t).mark_layout_dynamic()` leaves a length open.
# - `cute.jit` marks what the host does: launch a grid of blocks.
# - `cute.kernel` marks what each thread does.

# %% tags=["hide-input"]
# @title The program's code in the interpreter
with tempfile.TemporaryDirectory() as folder:
    options = f"--gpu-arch=sm_86 --keep-ptx --keep-cubin --dump-dir={folder}"
    (entry,) = ptx.parse(cute.compile(launch_add, *tensors, options=options).__ptx__)
memory = ptx.Memory()
addresses = [memory.place(name, t.cpu().numpy()) for name, t in (("a", a), ("b", b), ("c", torch.zeros(1000)))]
report = ptx.run(entry, grid=8, threads=128, params=struct.pack("<3Q", *addresses), memory=memory)
assert torch.equal(torch.from_numpy(memory.read("c")), (a + b).cpu())
print(f"c = a + b, in the interpreter; read {dict(report.read)} bytes, wrote {dict(report.written)}")

# %% [markdown]
# ### The course's form of it
#
# From here on a kernel is a small class with the same two functions and a description of its arguments, to compile it
# without tensors. An `Argument` has a name, a dtype and a shape, in which `"n"` is a size that's known only
# at launch. `output=True` says that the kernel only writes it. The compiler decides a `const_expr`, once, so the code
# contains one branch or the other; each thread decides a plain `if`.


# %%
@dataclass(frozen=True)
class Add:
    """c = a + b, one element per thread; float32 [n]. Without `guard` nobody asks whether the element exists."""

    threads: int = 64
    guard: bool = True

    def arguments(self) -> tuple:
        a, b = (Argument(name, "float32", ("n",)) for name in "ab")
        return a, b, Argument("c", "float32", ("n",), output=True)

    def grid(self, a, b, c):
        return -(-a.shape[0] // self.threads), 1, 1  # as many blocks as it takes, rounded up

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


# %% [markdown]
# `run` executes a kernel in the interpreter, which changes the tensors in place and returns a *report*.


# %%
def run(kernel, *tensors, **order) -> ptx.Report:
    """Run a kernel on CPU tensors, in place: in the interpreter, and on a GPU to compare, if there is one."""
    there = [t.cuda() for t in tensors] if torch.cuda.is_available() else None
    report = interpret(kernel, *tensors, **order)
    if there is not None:
        compiled(kernel)(*there)
        for ours, theirs in zip(tensors, there, strict=True):
            torch.testing.assert_close(theirs.cpu(), ours, equal_nan=True)
    return report


torch.manual_seed(0)
a, b, c = torch.randn(100), torch.randn(100), torch.empty(100)
report = run(Add(), a, b, c)
print("right:", torch.equal(c, a + b), "| read", dict(report.read), "| written", dict(report.written))
for name in ("ld.global.b32", "add.f32", "st.global.b32"):
    print(f"{name:14} executed {report.instructions[name]} times, each time by a warp")

# %% [markdown]
# ## 2 · What a GPU runs
#
# 32 neighbouring threads of a block are a *warp*; a thread's place in its warp is its *lane*. The warp is what the
# hardware executes: **one instruction, 32 lanes**. 100 numbers in blocks of 64 threads are four warps, so the addition
# was executed {{ report.instructions["add.f32"] }} times, not 100 times. {{ assert report.instructions["add.f32"] == 4
# }} A warp costs the same whether 32 lanes work or 4.
#
# **Look for** where element 453 of section 1's program is.

# %% tags=["hide-input"]
# @title Figure: grid, block, warp, lane
ZOOM = {
    "grid: 8 blocks": (8, 453 // 128),
    "block 3: 4 warps": (4, 453 % 128 // 32),
    "warp 2: 32 lanes": (32, 453 % 32),
}
fig, ax = plt.subplots(figsize=(9.5, 2.8), layout="constrained")
for y, (parts, mine) in enumerate(ZOOM.values()):
    width = 32 / parts
    for part in range(parts):
        color = ORANGE if part == mine else "#dddddd"
        ax.add_patch(Rectangle((part * width, 2 * y), width, 1, facecolor=color, edgecolor="white", linewidth=2))
        ax.text((part + 0.5) * width, 2 * y + 0.5, part, ha="center", va="center", fontsize=9)
    for edge in (0, 1) if parts < 32 else ():
        ax.plot([(mine + edge) * width, 32 * edge], [2 * y + 1, 2 * y + 2], color=BLACK, linestyle=":", linewidth=1)
ax.set_yticks([0.5, 2.5, 4.5], ZOOM)
ax.tick_params(length=0)
ax.set(xlim=(0, 32), ylim=(5.1, -0.1), xticks=[], title="Element 453 = 3 × 128 + 69: thread 69 = 2 × 32 + 5 of block 3")
ax.spines[["bottom", "left"]].set_visible(False)
plt.show()

# %% [markdown]
# But a condition is evaluated lane by lane. If the lanes of a warp disagree, the warp executes **both** sides, one
# after the other, each with the other lanes switched off. That's *divergence*. Below, half of the threads add and half
# multiply: in one version every other lane, in the other every other warp.


# %% tags=["hide-input"]
# @title The frame of a kernel that changes one tensor
@dataclass(frozen=True)
class InPlace:
    """A kernel on one tensor, int32 [n, 4], one thread per row."""

    threads: int = 64

    def arguments(self) -> tuple:
        return (Argument("out", "int32", ("n", 4)),)

    def grid(self, out):
        return -(-out.shape[0] // self.threads), 1, 1

    @cute.jit
    def __call__(self, out: cute.Tensor, stream):
        self.kernel(out).launch(grid=self.grid(out), block=[self.threads, 1, 1], stream=stream)


# %%
@dataclass(frozen=True)
class TwoWays(InPlace):
    """Half of the threads do one thing, half another: which half is decided by the lane, or by the warp."""

    by_warp: bool = False

    @cute.kernel
    def kernel(self, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * self.threads + thread
        side = (thread // 32 if const_expr(self.by_warp) else thread) % 2
        if side == 0:
            for j in range_constexpr(4):  # unrolled by the compiler
                out[i, j] = out[i, j] + Int32(j)
        else:
            for j in range_constexpr(4):
                out[i, j] = out[i, j] * Int32(j)


# %% tags=["hide-input"]
# @title Your bet
divergence = bet(
    "Splitting by lane rather than by warp: how many percent more instructions do the warps execute?",
    (0, 120, 5),
    unit="%",
)

# %%
executed = {
    by_warp: run(TwoWays(by_warp=by_warp), torch.ones(128, 4, dtype=torch.int32)).total for by_warp in (False, True)
}
more = 100 * (executed[False] / executed[True] - 1)
divergence.result(more)
print(f"by lane {executed[False]}, by warp {executed[True]} warp instructions")
(entry,) = ptx.parse(compiled(TwoWays(), "sm_86").ptx)  # the condition, one side, the other side, ret
code = [instruction.opcode for instruction in entry.instructions]
branch, end = code.index("bra"), code.index("bra.uni")
common, side, other = branch + 2, end - branch, len(code) - end - 2
assert executed == {False: 4 * (common + side + other), True: 4 * common + 2 * (side + other)}

# %% [markdown]
# {{ common }} instructions are common to both; the sides have {{ side }} and {{ other }}. By lane every warp executes
# {{ common }} + {{ side }} + {{ other }} = {{ common + side + other }}, by warp {{ common }} + {{ (side + other) /
# 2:.1f }} on average: {{ executed[False] }} and {{ executed[True] }} for four warps. A condition is cheap if the whole
# warp agrees on it.
#
# ## 3 · Mistakes, and who sees them
#
# What if you forget to check that the element exists? On a GPU the last threads write into whatever is behind the
# tensor. The interpreter puts *guards* around each tensor, bytes that nobody may touch, and names your line.


# %%
def caught(kernel, *tensors, **order) -> str:
    """The mistake that the interpreter finds, in words. The GPU is left out of it."""
    try:
        interpret(kernel, *tensors, **order)
    except ptx.PTXError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing found in this run"


# %%
print("with the guard:   ", caught(Add(), a, b, c))
print("without it:       ", caught(Add(guard=False), a, b, c))
print("and with n = 128: ", caught(Add(guard=False), *torch.randn(3, 128).unbind()))

# %% [markdown]
# In the last line the kernel is just as wrong, but no thread is left over. **Test with lengths that don't fit.**
#
# "Nothing found" isn't "correct": the interpreter sees this run alone.
#
# ### What the interpreter reads
#
# *PTX* is the assembly language of a GPU that doesn't exist, with as many registers as you like. This is all of `Add`:

# %% tags=["hide-input"]
# @title The PTX of `Add`
text = compiled(Add(), "sm_86").ptx
body = text[text.index("{\n") :].replace("\t", "  ").splitlines()
print("\n".join(line for line in body if line.strip() and ".loc" not in line))

# %% [markdown]
# `%tid.x` and `%ctaid.x` are the thread and the block. `setp` compares, and `@%p1 bra` jumps in the lanes whose
# predicate `%p1` is true. The two `ld.global.b32`, the `add.f32` and the `st.global.b32` are the work.
#
# ## 4 · Layouts
#
# A kernel can also be right and slow, and nothing warns you. It depends on where in memory things are.
#
# A tensor is a function from coordinates to an *offset*. CuTe calls it a *layout* and writes it `shape:stride`. The
# offset of $(i, j)$ in `(4,8):(8,1)` is $8i + 1j$. Each entry of the shape, with its stride, is a *mode*.
#
# Two more rules. A single number is a coordinate, too, cut up with the **first mode fastest**: in a shape of
# `(4,8)`, number 5 is (1, 1). And a mode may be a layout of its own: `(2,2):(4,16)` puts rows 0 to 3 at 0, 4, 16 and
# 20. The fourth layout below uses two.


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
    "tiles of 2 × 4": (((2, 2), (4, 2)), ((4, 16), (1, 8))),
}
asked = {}


@cute.jit
def ask_cute():
    """Runs while it is traced: layouts are known to the compiler, no GPU is asked."""
    layout = cute.make_layout((4, 8), stride=(8, 1))
    asked["number 5"] = cute.crd2idx(5, layout)
    asked["divided"] = str(cute.zipped_divide(layout, (2, 4)))


ask_cute()
assert asked["number 5"] == offset(5, *LAYOUTS["row-major"])
print("(1, 2) is at", {name: offset((1, 2), *layout) for name, layout in LAYOUTS.items()})

# %% [markdown]
# The same four as pictures. The number is the offset; the colour is the 8 floats (32 bytes) of one *sector*, the least
# that a GPU moves: to read one number you pay for all of it. **Look for** the colours of a column.

# %% tags=["hide-input"]
# @title Figure: four layouts
PALETTE = ListedColormap([SKY, ORANGE, GREEN, VERMILION, PURPLE, BLUE, "#F0E442", "#999999"])


def draw_matrix(ax, text, colour, title: str, fontsize: int = 9) -> None:
    """A matrix with a text and a colour in each cell. text, colour: [rows][columns]."""
    ax.imshow(torch.tensor(colour), cmap=PALETTE, vmin=0, vmax=8, alpha=0.6)
    for i, row in enumerate(text):
        for j, cell in enumerate(row):
            ax.text(j, i, cell, ha="center", va="center", fontsize=fontsize)
    ax.set(title=title, xticks=[], yticks=[])


fig, axes = plt.subplots(2, 2, figsize=(9, 4.8), layout="constrained")
for ax, (name, (shape, stride)) in zip(axes.flat, LAYOUTS.items(), strict=True):
    found = [[offset((i, j), shape, stride) for j in range(8)] for i in range(4)]
    draw_matrix(ax, found, [[o // 8 for o in row] for row in found], f"{name}  {shape}:{stride}".replace(", ", ","))
plt.show()

# %% [markdown]
# Row-major, the four numbers of a column cost four sectors; column-major, one.
#
# *Dividing* a layout cuts it into tiles and leaves memory as it is: `(4,8):(8,1)` in tiles of 2 × 4 is `{{
# asked["divided"] }}`. Its first mode is the place within a tile, its second says which tile.
#
# ### Threads and values
#
# Now give a row of 64 floats to 4 threads, 16 to each. A *thread-value layout* has two modes: which thread, and which
# of its values. In a *blocked* layout, `(4,16):(16,1)`, a thread has 16 in a row. In a *striped* one with vectors of 4,
# `(4,(4,4)):(4,(1,16))`, a thread has 4 in a row, then the others have theirs, then it has its next 4. The colour is
# the thread; the number says in which of its loads, of 4 numbers each, it takes the element. **Look for** the zeros:
# they're loaded at the same moment. (The row is drawn in two lines.)

# %% tags=["hide-input"]
# @title Figure: two ways to share a row
SHARES = {"blocked": ((4, 16), (16, 1)), "striped": ((4, (4, 4)), (4, (1, 16)))}
fig, axes = plt.subplots(2, 1, figsize=(9.5, 2.4), layout="constrained")
for ax, (name, (shape, stride)) in zip(axes, SHARES.items(), strict=True):
    thread, load = [0] * 64, [0] * 64
    for t in range(4):
        for v in range(16):
            thread[offset((t, v), shape, stride)], load[offset((t, v), shape, stride)] = t, v // 4
    cut = [slice(0, 32), slice(32, 64)]
    title = f"{name}  {shape}:{stride}".replace(", ", ",")
    draw_matrix(ax, [load[c] for c in cut], [thread[c] for c in cut], title)
plt.show()

# %% [markdown]
# The threads of a warp load **together**, so what they load should be one piece of memory.
#
# ## 5 · What a load moves
#
# The memory system looks at the 32 addresses of a warp's load and moves the sectors they're in, each once: the accesses
# are *coalesced*. Here's a kernel that takes every `step`-th element. **Look for** the step from which on it gets no
# worse.

# %% tags=["hide-input"]
# @title The frame of a kernel from x to y


@dataclass(frozen=True)
class FromTo:
    """A kernel that reads float32 x [m] and writes y [n], one thread per element of y."""

    threads: int = 64

    def arguments(self) -> tuple:
        return Argument("x", "float32", ("m",)), Argument("y", "float32", ("n",), output=True)

    def grid(self, x, y):
        return -(-y.shape[0] // self.threads), 1, 1

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        self.kernel(x, y).launch(grid=self.grid(x, y), block=[self.threads, 1, 1], stream=stream)


def global_accesses(report: ptx.Report) -> list:
    """Loads and stores of global memory that were executed, in the order of the code."""
    return [access for _, access in sorted(report.accesses.items()) if access.warps]


# %%
@dataclass(frozen=True)
class Pick(FromTo):
    """y[i] = x[i * step]."""

    step: int = 1

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * self.threads + thread
        if i < y.shape[0]:
            y[i] = x[i * self.step]


# %%
steps, used = [1, 2, 3, 4, 6, 8, 12, 16, 32], []
for step in steps:
    x, y = torch.randn(512 * step), torch.empty(512)
    load = global_accesses(run(Pick(step=step), x, y))[0]
    used.append(100 * load.efficiency)
    assert torch.equal(y, x[::step])

# %% tags=["hide-input"]
# @title Figure: how many of the moved bytes are used
fig, ax = plt.subplots(figsize=(6.5, 2.8), layout="constrained")
ax.plot(steps, used, color=BLUE, marker="o")
ax.axhline(12.5, color=BLACK, linestyle=":", label="4 of 32 bytes")
ax.set(xscale="log", xlabel="step between lanes, in float32", ylabel="% of moved bytes used", ylim=(0, 105))
ax.set(xticks=[1, 2, 4, 8, 16, 32], xticklabels=[1, 2, 4, 8, 16, 32], title="One load of a warp, counted")
ax.minorticks_off()
ax.legend()
plt.show()

# %% [markdown]
# From step 8 on, each lane has a sector of its own: a memory-bound kernel should be eight times as slow.
#
# ### Sixteen bytes at once
#
# A thread can load 16 bytes with one instruction, so let it have `vector` neighbouring elements. `tiled_divide` cuts
# the vector into pieces, and `[None, piece]` takes all of one. A *register tensor* (`make_rmem_tensor`) holds a
# thread's own numbers, and `autovec_copy` moves them with the widest instruction that size and **known alignment**
# allow. After the last whole piece up to `vector - 1` elements are left, for the `else`.


# %%
@dataclass(frozen=True)
class WideAdd(Add):
    """c = a + b, `vector` neighbouring elements per thread."""

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


# %%
n = pick(2048, 8192)
wide = {}
for vector in (1, 2, 4, 8):
    kernel = WideAdd(vector=vector)
    for length in (1, 1003, n):  # two that do not fit, and the one that is counted
        a, b, c = torch.randn(length), torch.randn(length), torch.full((length,), torch.nan)
        wide[vector] = run(kernel, a, b, c)
        assert torch.equal(c, a + b)

# %% tags=["hide-input"]
# @title Your bet
touched = bet(
    "With 8 elements per thread instead of 4: how many times as many sectors do the warps' loads and stores touch, for "
    "the same bytes?",
    (0.25, 3, 0.25),
    unit="times",
)

# %% tags=["hide-input"]
# @title Figure: wider loads
fig, axes = plt.subplots(1, 2, figsize=(9.5, 3), layout="constrained")
names = [str(v) for v in wide]
axes[0].bar(names, [1024 * r.total / (12 * n) for r in wide.values()], color=BLUE)
axes[0].set(title="Warp instructions per KB moved", xlabel="elements per thread")
axes[1].bar(names, [r.sectors * 32 / (12 * n) for r in wide.values()], color=VERMILION)
axes[1].axhline(1, color=BLACK, linestyle=":")
axes[1].set(title="Bytes of touched sectors / bytes asked for", xlabel="elements per thread")
narrow, twice = wide[1].total / wide[4].total, wide[8].sectors / wide[4].sectors
touched.result(twice)
plt.show()

# %% [markdown]
# With one element per thread, {{ narrow:.1f }} times as many instructions move the same bytes as with four. With 8
# there are two loads, and **one** load takes every other 16 bytes, half of each sector; the second takes the other
# half. Each sector is asked for twice. {{ assert twice == 2 }} A cache may answer the second time, but the load units
# do the work twice. A striped layout avoids that.
#
# ## 6 · RMSNorm: threads that need each other
#
# RMSNorm of a row $x$ with weights $w$ (Zhang and Sennrich 2019):
#
# $$y_j = w_j\, \frac{x_j}{\sqrt{\text{mean of all } x_i^2 + 10^{-6}}} .$$
#
# The mean needs the whole row, so threads must talk. Within a warp they use *shuffles*: each lane reads a register of
# another lane, without touching memory. In a *butterfly*, lane $l$ adds the value of lane $l \oplus 1$, then of $l
# \oplus 2$, 4, 8, 16 ($\oplus$ is exclusive or). After five steps every lane has the full sum. **Look for** how
# pairs, fours and eights become equal.

# %% tags=["hide-input"]
# @title Figure: a butterfly
rows = [torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])]
for distance in (1, 2, 4):
    rows.append(rows[-1] + rows[-1][torch.arange(8) ^ distance])
fig, ax = plt.subplots(figsize=(7.5, 2.8), layout="constrained")
groups = [[i // size for i in range(8)] for size in (1, 2, 4, 8)]
draw_matrix(ax, [row.tolist() for row in rows], groups, "A butterfly sum: numbers in lanes, colour by equal sums")
ax.set_yticks(range(4), ["values", "+ lane ⊕ 1", "+ lane ⊕ 2", "+ lane ⊕ 4"])
ax.set_xticks(range(8), [f"lane {i}" for i in range(8)])
plt.show()

# %% [markdown]
# One row per warp: each lane holds its part of the row in registers (piece `i * 32 + lane`: striped, as in section 4),
# so the row is read from memory **once**. Then each lane adds up its own squares (`reduce`), the butterfly adds up the
# lanes (`warp_reduction_sum`), and every lane scales and writes what it holds. Inputs and outputs are 16-bit, sums are
# 32-bit.


# %%
@dataclass(frozen=True)
class WarpNorm:
    """y = RMSNorm(x) * weight, one row per warp; bfloat16 x, y [rows, hidden], hidden a multiple of 256."""

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
        pieces = const_expr(self.hidden // 256)  # of 8 numbers, that a lane holds
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


# %%
x, weight, y = torch.randn(6, 512).bfloat16(), torch.randn(512).bfloat16(), torch.empty(6, 512).bfloat16()
report = run(WarpNorm(512), x, weight, y)
exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * weight.double()
torch.testing.assert_close(y.float(), exact.bfloat16().float(), rtol=2**-7, atol=0)
print(f"equal to the rounded float64 result: {(y == exact.bfloat16()).float().mean():.2%}")
print({name: k for name, k in report.instructions.items() if name.startswith("shfl")}, "for", len(x), "rows")

# %% [markdown]
# Five shuffles per row, and no shared memory. They're inside `if row < x.shape[0]`, which is safe only because a row
# has a whole warp, so all 32 lanes agree. Give it to 16 lanes, and with an odd number of rows half of the last warp has
# none. Those lanes skip the shuffle and wait at the *barrier* below (`sync_threads`), which no thread passes
# before all of the block have reached it. The other half waits at the shuffle, since even among 16 lanes its
# *mask*, the lanes that must arrive, names all 32. Each half waits for the other: a *deadlock*. (Line 56 is the
# PTX's.)


# %%
@dataclass(frozen=True)
class HalfWarp(FromTo):
    """y[i] = sum of the 16 values of i's row; the shuffle is inside the condition, or not. A barrier comes after it."""

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
        cute.arch.sync_threads()  # lanes without a row wait here
        if i < x.shape[0]:
            y[i] = value


three_rows = torch.randn(48), torch.empty(48)
print("inside: ", caught(HalfWarp(inside=True), *three_rows))
print("outside:", caught(HalfWarp(inside=False), *three_rows))

# %% [markdown]
# ### Wide rows: shared memory and barriers
#
# A row of many thousands doesn't fit in one warp's registers. Then a whole block takes it, and sums must get from warp
# to warp, through *shared memory*, a small memory in the SM that all threads of a block see (`alloc_smem`). Each warp
# writes its share. Then comes a barrier, and one thread adds up the shares.


# %%
@dataclass(frozen=True)
class BlockSum(FromTo):
    """y[row] = the sum of a row of 1024, one block per row; float32 x [rows * 1024], y [rows]."""

    barrier: bool = True
    threads: int = 128

    def grid(self, x, y):
        return y.shape[0], 1, 1

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        shares = cute.make_tensor(cute.arch.alloc_smem(Float32, 4), cute.make_layout(4))  # one for each warp
        total = Float32(0.0)
        for i in range_constexpr(1024 // 128):
            total += x[row * 1024 + i * 128 + thread]
        total = cute.arch.warp_reduction_sum(total)
        if thread % 32 == 0:
            shares[thread // 32] = total
        if const_expr(self.barrier):
            cute.arch.sync_threads()
        if thread == 0:
            everything = Float32(0.0)
            for warp in range_constexpr(4):
                everything += shares[warp]
            y[row] = everything


x, y = torch.randn(3, 1024), torch.empty(3)
report = run(BlockSum(), x.flatten(), y)
torch.testing.assert_close(y, x.sum(1), rtol=1e-4, atol=1e-4)
print(f"{report.barriers} barriers for {len(y)} blocks, sums {[round(v, 2) for v in y.tolist()]}")

# %% [markdown]
# Now leave the barrier out. On a GPU the answer then depends on which warp is faster: a *race*. The interpreter tries
# three orders: all threads in step, the last warp first, and at random. **In the first two, thread 0 happens to read
# last, and the sums are right.** No comparison of results can object.

# %% tags=["hide-input"]
# @title Your bet
racy, rows = BlockSum(barrier=False), x.flatten()
for order in ("lockstep", "warp"):  # an interpreter that doesn't look at the order
    with patch("ptx_interpreter.order.Order.check"):
        assert caught(racy, rows, y.fill_(torch.nan), order=order) == "nothing found in this run"
    torch.testing.assert_close(y, x.sum(1), rtol=1e-4, atol=1e-4)
races = bet("In how many of the three orders does the interpreter find the missing barrier?", (0, 3, 1), "orders")

# %%
found = {order: caught(racy, rows, y, order=order) for order in ("lockstep", "warp", "random")}
races.result(sum("nothing" not in words for words in found.values()))
for order, words in found.items():
    print(f"{order:9}", words)
    assert caught(BlockSum(), rows, y, order=order) == "nothing found in this run"

# %% [markdown]
# In all three. It needs no luck: it tracks which access is **ordered** before which. {{ assert all("Race" in
# found[order] for order in ("lockstep", "warp")) }}
#
# Shared memory has a trap of its own: 32 *banks*, each of which serves one word per turn. A warp that reads a
# **column** of a 32 × 32 tile of floats finds all of it in one bank: a *bank conflict*, 32 turns. In the exercises you
# design a *swizzle*, `column ^ f(row)`, under which rows, columns and sub-tiles take one turn.
#
# ## 7 · What fusing saves
#
# Eager PyTorch runs RMSNorm as a chain of operators. Each reads its inputs from memory and writes its output there. How
# many bytes is that? A *dispatch mode* sees every operator that's called.

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


def eager_add_norm(x, residual, weight, eps=1e-6):
    """The residual stream and its norm, as transformers writes it."""
    residual = residual + x
    wide = residual.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def eager_swiglu(gate_up):
    """silu(gate) * up, the middle of a transformer's MLP (Shazeer 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


# %% [markdown]
# Now the package's kernels: `RMSNorm`, which also adds to the residual stream, and `Swiglu`:

# %%
from rlcourse.course.kernels.rms_norm import RMSNorm, add_rms_norm_reference
from rlcourse.course.kernels.swiglu import Swiglu, swiglu_reference

ROWS, HIDDEN, INNER = pick(8, 32), 896, 256
x, residual, y = (torch.randn(ROWS, HIDDEN).bfloat16() for _ in range(3))
weight = torch.randn(HIDDEN).bfloat16()
gate_up, out = torch.randn(ROWS, 2 * INNER).bfloat16(), torch.empty(ROWS, INNER).bfloat16()
with Traffic() as of_norm:
    eager_add_norm(x, residual, weight)
with Traffic() as of_swiglu:
    eager_swiglu(gate_up)
stream, expected_stream = residual.clone(), residual.clone()
norm_report = run(RMSNorm(HIDDEN, "bfloat16", add=True), x, stream, weight, y)
expected = add_rms_norm_reference(x, expected_stream, weight, 1e-6)
torch.testing.assert_close(y.float(), expected.float(), rtol=2**-7, atol=1e-6)
assert torch.equal(stream, expected_stream)
swiglu_report = run(Swiglu(INNER, "bfloat16"), gate_up, out)
torch.testing.assert_close(out.float(), swiglu_reference(gate_up).float(), rtol=2**-6, atol=1e-6)

# %% tags=["hide-input"]
# @title Table: bytes moved, per byte of result
norm_bytes = sum(norm_report.read[name] for name in ("x", "residual")) + sum(norm_report.written.values())
norm_bytes += weight.nbytes  # each row's threads ask for it again; memory gives it once, a cache the rest
swiglu_bytes = sum(swiglu_report.read.values()) + sum(swiglu_report.written.values())
eager_bytes = [sum(read + written for _, read, written in t.rows) for t in (of_norm, of_swiglu)]
lines = [
    "| | eager operators | bytes per byte of result: eager | fused | fused / eager |",
    "| --- | --- | ---: | ---: | --- |",
]
for name, traffic, theirs, ours, result in (
    ("residual + RMSNorm", of_norm, eager_bytes[0], norm_bytes, x),
    ("SwiGLU", of_swiglu, eager_bytes[1], swiglu_bytes, out),
):
    lines.append(
        f"| {name} | {len(traffic.rows)}: {', '.join(row[0].split('.')[0] for row in traffic.rows)} "
        f"| {theirs / result.nbytes:.1f} | {ours / result.nbytes:.1f} | {100 * ours / theirs:.0f}% |"
    )
display(Markdown("\n".join(lines)))
units = [round(theirs / result.nbytes) for theirs, result in zip(eager_bytes, (x, out), strict=True)]
least = [round(ours / result.nbytes) for ours, result in ((norm_bytes, x), (swiglu_bytes, out))]
assert (units, least) == ([21, 5], [4, 3])

# %% [markdown]
# Of the {{ units[0] }} bytes that eager moves per byte of the norm's result, {{ units[0] - least[0] }} are intermediate
# results; of SwiGLU's {{ units[1] }}, {{ units[1] - least[1] }}. *Fusing* the chain into one kernel keeps them in
# registers.
#
# ## 8 · On a GPU, against `torch.compile`
#
# On an H200 we timed eager PyTorch, the same function under `torch.compile`, and our kernels. All calls are in one CUDA
# graph, so launches cost no host time, and each has its own tensors, so the cache doesn't help.

# %% tags=["hide-input"]
# @title Your bet
record = load_record("cute", "NVIDIA H200")
FATES = ["ours, by more than 1.5 times", "ours, by 5 to 50%", "neither: within 5%", "torch.compile's"]
fastest = bet("RMSNorm with the residual on an H200: whose kernel is faster, ours or torch.compile's?", FATES)

# %% tags=["hide-input"]
# @title Figure: eager, compiled, ours
timed = {row["variant"]: row for row in record["results"] if row["variant"].split("-")[0] in ("add_rms_norm", "swiglu")}
us = {name: row["us"] for name, row in timed.items()}
copy_speed = record["setup"]["copy_gb_per_s"]
floor = {n: timed[f"{n}-cute"]["gb_per_s"] * us[f"{n}-cute"] / copy_speed for n in ("add_rms_norm", "swiglu")}
fig, axes = plt.subplots(1, 2, figsize=(9.5, 2.9), layout="constrained")
for ax, (name, title) in zip(axes, (("add_rms_norm", "residual + RMSNorm"), ("swiglu", "SwiGLU")), strict=True):
    found = [us[f"{name}-{way}"] for way in ("eager", "compiled", "cute")]
    bars = ax.barh(["eager", "torch.compile", "ours"], found, color=[ORANGE, SKY, BLUE])
    ax.bar_label(bars, fmt="%.1f", padding=12)
    ax.axvline(floor[name], color=BLACK, linestyle=":", label=f"the same bytes, copied: {floor[name]:.1f}")
    ax.set_ylim(3.2, -0.6)  # room for the legend below the bars
    ax.set(xlabel="µs", title=f"{title}, {timed[f'{name}-cute']['shape'][0]:,} × {timed[f'{name}-cute']['shape'][1]:,}")
    ax.set_xlim(0, 1.3 * max(found))
    ax.legend(loc="lower right")
fig.suptitle(provenance(record), fontsize=9)
lead = us["add_rms_norm-compiled"] / us["add_rms_norm-cute"]
swiglu_lead = us["swiglu-compiled"] / us["swiglu-cute"]
errors = {way: timed[f"add_rms_norm-{way}"]["relative_error"] for way in ("compiled", "cute")}
attention = {
    r["variant"]: r["us"] for r in record["results"] if r["variant"].startswith("fused") and r["shape"] == [256, 1024]
}
fastest.result(FATES[0] if lead > 1.5 else FATES[1] if lead > 1.05 else FATES[2] if lead > 0.95 else FATES[3])
plt.show()

# %% [markdown]
# **A tie**, {{ us["add_rms_norm-cute"]:.1f }} µs against {{ us["add_rms_norm-compiled"]:.1f }} for the norm. {{ assert
# 0.95 < lead < 1.05 and 0.95 < swiglu_lead < 1.05 }} Both are within {{ 100 *
# max(us[f"{n}-{way}"] / floor[n] - 1 for n in floor for way in ("compiled", "cute")):.0f }}% of a copy, so there's
# little left to win. {{ assert max(us[f"{n}-{way}"] / floor[n] for n in floor for way in ("compiled", "cute")) < 1.07
# }}
#
# Eager is slower than its bytes explain: SwiGLU takes {{ us["swiglu-eager"] / us["swiglu-cute"]:.1f }} times as
# long for {{ units[1] / least[1]:.1f }} times the bytes. {{ assert us["swiglu-eager"] / us["swiglu-cute"] > 1.5 *
# units[1] / least[1] and us["add_rms_norm-eager"] / us["add_rms_norm-cute"] > 1.1 * units[0] / least[0] }}
#
# SwiGLU even **beats** the copy, by {{ 100 * (floor["swiglu"] / us["swiglu-cute"] - 1):.0f }}%. {{ assert 1.02 <
# floor["swiglu"] / us["swiglu-cute"] < 1.1 and timed["swiglu-cute"]["gb_per_s"] < 4800 }}
# A copy is no hard limit.
#
# So why write kernels at all?
#
# - **For what the compiler can't see.** It fuses chains of elementwise operators and sums. Attention over a cache isn't
#   such a chain: compiled, transformers' version still repeats keys and values for each query head. Eager PyTorch that
#   shares them (`enable_gqa`) is {{ attention["fused-compiled"] / attention["fused-sdpa-gqa"]:.1f }} times as fast, one
#   kernel of our own another {{ attention["fused-sdpa-gqa"] / attention["fused-cute"]:.1f }} times (lesson 09, 256 rows
#   of 1,024 tokens). {{ assert attention["fused-compiled"] > 5 *
#   attention["fused-sdpa-gqa"] > 5 * 1.5 * attention["fused-cute"] }}
# - **For the numbers.** You say where to round, so that two programs agree: sampler and trainer in
#   [lesson 11](11_engine_for_rl.ipynb).
#
# If it's elementwise, or a sum along a row, let the compiler do it.
#
# ## 9 · Without this course
#
# ### Alignment: a puzzle
#
# Here's `WideAdd` as a program of its own. We compile it twice for the same tensors: wrapped as in section 1, and with
# `assumed_align=16`, a promise that each begins at a multiple of 16 bytes.


# %%
@cute.kernel
def wide_kernel(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    piece = block * 128 + thread
    if (piece + 1) * 4 <= c.shape[0]:
        x, y = (cute.make_rmem_tensor(4, Float32) for _ in range(2))
        cute.autovec_copy(cute.tiled_divide(a, (4,))[None, piece], x)
        cute.autovec_copy(cute.tiled_divide(b, (4,))[None, piece], y)
        x.store(x.load() + y.load())
        cute.autovec_copy(x, cute.tiled_divide(c, (4,))[None, piece])


@cute.jit
def launch_wide(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream):
    blocks = cute.ceil_div(c.shape[0], 512)
    wide_kernel(a, b, c).launch(grid=[blocks, 1, 1], block=[128, 1, 1], stream=stream)


def memory_instructions(*tensors) -> list[str]:
    """Loads and stores of global memory in the PTX of `launch_wide` for these tensors."""
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch=sm_86 --keep-ptx --keep-cubin --dump-dir={folder}"
        text = cute.compile(launch_wide, *tensors, cuda.CUstream(0), options=options).__ptx__
    return [line.split()[0] for line in text.splitlines() if "ld.global" in line or "st.global" in line]


# %% tags=["hide-input"]
# @title Your bet
WITHOUT_PROMISE = [
    "it doesn't compile", "wrong numbers", "right, with the same 3 instructions: the tensors are aligned anyway",
    "right, with 12 instructions",
]  # fmt: skip
unaligned = bet(
    "With the promise, a thread needs 3 instructions for its 4 elements: two loads and a store. What happens without?",
    WITHOUT_PROMISE,
)

# %%
abc = [torch.randn(4096) for _ in range(3)]
plain = memory_instructions(*map(from_dlpack, abc))
promised = memory_instructions(*(from_dlpack(t, assumed_align=16) for t in abc))
unaligned.result(WITHOUT_PROMISE[3] if len(plain) == 12 else WITHOUT_PROMISE[2])
print("from_dlpack(t):                  ", *plain)
print("from_dlpack(t, assumed_align=16):", *promised)
assert plain == ["ld.global.b32"] * 8 + ["st.global.b32"] * 4
assert promised == ["ld.global.v4.b32"] * 2 + ["st.global.v4.b32"]
try:
    memory_instructions(*(from_dlpack(t[1:4093], assumed_align=16) for t in abc))
except RuntimeError as error:
    print("a view that begins 4 bytes later:", error)

# %% [markdown]
# Twelve against three. `autovec_copy` may use 16 bytes only if the address is a multiple of 16,
# and all `from_dlpack` knows is that a float32 is aligned to 4. **The kernel is right either way, so no test fails.**
# It just asks for every sector four times. In your project, promise it yourself, and grep the PTX for `v4`.
#
# ### Streams
#
# A launch waits its turn in a queue of the GPU, a *stream*. PyTorch's work is in PyTorch's current stream, so launch
# there too; otherwise your kernel may run before the one that makes its input. Inside `torch.cuda.graph(...)` the
# current stream is the one that's recorded. Launch in another one, and with luck you get an error. Without it, every
# replay leaves your kernel out; PyTorch warns you only if the graph is empty.
#
# ```python
# stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
# program = cute.compile(launch_wide, *tensors, stream)  # once: keep it
# program(*tensors, stream)
# ```
#
# ### The same kernel in Triton

# %%
import triton
import triton.language as tl


@triton.jit
def add_triton(a, b, c, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # all elements of the block at once
    inside = at < n
    tl.store(c + at, tl.load(a + at, mask=inside) + tl.load(b + at, mask=inside), mask=inside)


a, b = (torch.randn(1003, device=device) for _ in range(2))
c = torch.empty_like(a)
add_triton[(triton.cdiv(len(c), 512),)](a, b, c, len(c), BLOCK=512)
print("right:", torch.equal(c, a + b))

# %% [markdown]
# In CuTe you write what a **thread** does: which elements it holds, how wide its loads are, where it waits. In Triton
# you write what a **block** does with a tile, and the compiler chooses threads, load widths, shared memory and
# barriers. Triton is much shorter; CuTe gives you layouts of your own and warps with different jobs.
#
# Under `torch.compile`, register the launcher as an *operation* (`torch.library.custom_op`), or the graph breaks.
# Lesson 10 shows both.
#
# And what does it take to notice that a kernel is wrong? Lengths that don't fit, a look at its PTX, and a referee who
# tracks order instead of comparing results.
#
# ## Check yourself
#
# 1. A warp loads 4 bytes per lane, and the first lane's address is 16 bytes past a multiple of 32. How many sectors?
#
# <details><summary>Answer</summary>
# Five: 128 bytes that begin in mid-sector end in mid-sector.
# </details>
#
# 2. A kernel's results are right, but it asks for each sector four times. What would have noticed?
#
# <details><summary>Answer</summary>
# No test of results: count sectors, or grep the PTX for `v4`.
# </details>
#
# ## Exercises
#
# [exercises/08_first_kernels.ipynb](../exercises/08_first_kernels.ipynb): six kernels of five minutes, a count of
# sectors, a layout without bank conflicts, a kernel to mend, and two to write, one with `cp.async`. Then go on to
# [09 · Decode attention](09_decode_attention.ipynb).
#
# ## Further reading
#
# - NVIDIA, *CUDA C++ Programming Guide* and *Parallel Thread Execution ISA*.
# - NVIDIA, CUTLASS documentation, *CuTe* and *CuTe DSL*.
# - Rush, *GPU Puzzles*.
# - Zhang and Sennrich 2019, *Root Mean Square Layer Normalization*, arXiv:1910.07467.
