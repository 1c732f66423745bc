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
# - what attention of one query token must read and compute, and why grouped heads raise its intensity;
# - the online softmax: derived, in ten lines, and why its pieces can be put together in any order;
# - why one block a row starves a large GPU, how rows are split, and how the last block to arrive merges the pieces;
# - to read a decode-attention kernel in three steps: CUDA cores, splits, tensor cores whose operands need no shuffling;
# - to count instructions and bytes, and to tell from them which GPU waits for memory and which for its own schedulers;
# - what is gained when RoPE, the cache write and attention are one launch.
#
# You need [lesson 08](08_first_kernels.ipynb): kernels, layouts, copies of 16 bytes, the interpreter. And from
# [lesson 07](07_static_cache.ipynb): the static cache, per-row positions, left padding. Kernels need CuTe DSL (Linux:
# `pip install "rlcourse[kernels]"`), and no GPU: they are compiled, and their PTX is run by an interpreter on this
# processor. It tells what a kernel does, byte by byte and instruction by instruction. It does not tell how long that
# takes.

# %%
import inspect
import math
from collections import Counter
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown, display
from matplotlib.patches import Rectangle

from rlcourse.course import pick
from rlcourse.course.kernels import decode_simple
from rlcourse.course.kernels.decode_simple import SimpleDecode
from rlcourse.course.kernels.decode_split import SplitDecode
from rlcourse.kernels import decode_attention, decode_common, decode_new_token
from rlcourse.kernels.arguments import Argument
from rlcourse.kernels.decode_attention import DecodeAttention
from rlcourse.kernels.decode_common import decode_attention_reference
from rlcourse.kernels.dsl import Float32, Int32, cute, range_constexpr
from rlcourse.kernels.toolchain import compiled, interpreted, simulate
from rlcourse.measure.memory import model_shape
from rlcourse.measure.plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, draw_roofline
from rlcourse.measure.roofline import Machine, Work, decode_step

GREY = "#dddddd"
torch.manual_seed(0)
H, K, D = 14, 2, 64  # query heads, key-value heads, head size: the ones of Qwen2.5-0.5B
G = H // K  # query heads that share a key-value head
print(f"{H} query heads, {K} key-value heads, {G} queries for each, heads of {D}")

# %% [markdown]
# Letters: $R$ rows, $n$ tokens that a row attends to, $H$ query heads, $K$ key-value heads, $G = H/K$, $D$ the head
# size, $S$ slots of the cache. A *pair* is a row and a key-value head. A *CTA* (cooperative thread array) is what
# CUDA also calls a block; a *lane* is a thread of a warp.
#
# ## 1 · What one query token asks for
#
# A pair holds $n$ keys and $n$ values of $D$ numbers. Its $G$ query heads want all of them. Scores take $n D$
# multiplications and as many additions for each head, the mix of values the same. So
#
# $$\text{bytes} = 2 \cdot 2\, n D , \qquad \text{operations} = 4\, G\, n D , \qquad
#   \text{intensity} = \frac{4 G n D}{4 n D} = G \ \text{operations a byte}.$$
#
# (2 bytes a number in bfloat16, keys and values.) Length and head size cancel. **Only $G$ is left**, and that is at
# least 1 and at most 8 here. Small things (the query, the output) are left out of the formula; the function counts
# them.


# %%
def attention_work(rows: int, tokens: int, heads: int = H, kv_heads: int = K, size: int = D) -> Work:
    """Attention of one query token a row, one layer, bfloat16."""
    cache, query = 4.0 * rows * kv_heads * tokens * size, 2.0 * rows * heads * size
    return Work(bytes={"cache": cache, "q and out": 2 * query}, flops={"attention": 4.0 * rows * heads * size * tokens})


MODELS = {"Qwen2.5-0.5B": (14, 2, 64), "Qwen2.5-1.5B": (12, 2, 128), "Qwen3-0.6B": (16, 8, 128)}
for name, (heads, kv_heads, size) in MODELS.items():
    work = attention_work(16, 456, heads, kv_heads, size)
    print(f"{name:13} G = {heads // kv_heads}: {work.total_bytes / 1e6:5.2f} MB a layer,", end=" ")
    print(f"{work.total_flops / 1e6:5.1f} million operations, {work.intensity:.2f} operations a byte")
shape = model_shape("Qwen/Qwen2.5-0.5B")
whole = decode_step(shape, 16, 456)  # lesson 06's count, of all layers
assert math.isclose(attention_work(16, 456).total_flops * shape.layers, whole.flops["attention"])

# %% [markdown]
# Now the other side, the machines. These numbers are the makers' (data sheets; 16-bit products without sparsity).
# Nothing of it was measured here.


# %%
@dataclass(frozen=True)
class GPU:
    """Published: multiprocessors, boost clock in GHz, GB/s of memory, 16-bit tera-operations/s of the tensor cores;
    lanes: float32 units of a multiprocessor."""

    multiprocessors: int
    ghz: float
    gb_per_s: float
    tensor_tflops: float
    lanes: int = 128

    @property
    def cuda_tflops(self) -> float:
        """float32 on CUDA cores, two operations a lane and cycle."""
        return self.multiprocessors * self.lanes * 2 * self.ghz / 1e3


GPUS = {
    "L4": GPU(58, 2.04, 300, 121),
    "A10": GPU(72, 1.695, 600, 125),
    "RTX 4090": GPU(128, 2.52, 1008, 165),
    "A100": GPU(108, 1.41, 1555, 312, lanes=64),
    "H200": GPU(132, 1.98, 4800, 989),
}
for name, gpu in GPUS.items():
    ridges = [1e3 * tflops / gpu.gb_per_s for tflops in (gpu.cuda_tflops, gpu.tensor_tflops)]
    print(f"{name:9} ridge at {ridges[0]:4.0f} operations a byte on CUDA cores, {ridges[1]:4.0f} on tensor cores")

# %% [markdown]
# The *ridge* (lesson 06) is the intensity from which on operations take longer than bytes. **Look for** where $G$
# stands in relation to both ridges.

# %%
fig, ax = plt.subplots(figsize=(7.5, 4))
intensity = [2 ** (i / 4) for i in range(-4, 41)]
for (name, color), style in zip((("A10", ORANGE), ("H200", BLUE)), ("--", "-"), strict=True):
    gpu = GPUS[name]
    for tflops, width, kind in ((gpu.tensor_tflops, 2.5, "tensor cores"), (gpu.cuda_tflops, 1, "CUDA cores")):
        roof = [min(gpu.gb_per_s * x / 1e3, tflops) for x in intensity]
        ax.plot(intensity, roof, color=color, linestyle=style, linewidth=width, label=f"{name}, {kind}")
for g, text in ((1, "G = 1"), (2, "2"), (7, "7")):
    ax.axvline(g, color=BLACK, linestyle=":", linewidth=1)
    ax.text(1.07 * g, 0.4, text, fontsize=10)
ax.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="tera-operations a second")
ax.set_title("Decode attention under the roofs of two GPUs (published numbers)")
ax.legend(frameon=False, fontsize=9, loc="lower right")
ax.grid(alpha=0.25)
plt.show()

# %% [markdown]
# $G$ lies on the slope of every roof. By this count decode attention waits for memory, on any GPU and with either kind
# of cores, and the best kernel is the one that reads the cache once, at full speed. Keep that in mind: section 7 shows
# a kernel that does read it once and is **not** bound by memory, because the roof counts multiplications and a kernel
# executes more than those.
#
# The first consequence is already in the design: all $G$ heads of a pair are computed together. A kernel that does one
# query head a CTA asks for the cache $G$ times.
#
# ## 2 · Softmax in one pass
#
# For one query, scores $x_1, \dots, x_n$ and values $v_1, \dots, v_n$:
#
# $$o = \frac{\sum_s e^{x_s}\, v_s}{\sum_s e^{x_s}} = \frac{\sum_s e^{x_s - m}\, v_s}{\sum_s e^{x_s - m}}
#   \qquad \text{for any } m .$$
#
# The right side is why softmax is computed with $m = \max_s x_s$: no power exceeds 1. But the maximum is known only
# when all scores have been seen. That makes two passes, and the scores would have to be kept, or the keys read again.
#
# So take the maximum **so far**, and repair what was done with an older one (Milakov and Gimelshein 2018). Carry
# three things: the top $m$, the mass $l = \sum e^{x_s - m}$ and the vector $a = \sum e^{x_s - m} v_s$. A new score
# $x$ comes, with its value $v$. The new top is $m' = \max(m, x)$. All old terms have the factor $e^{-m}$ and should
# have $e^{-m'}$:
#
# $$e^{x_s - m'} = e^{x_s - m}\, e^{m - m'} \quad\Longrightarrow\quad
#   l' = l\, e^{m - m'} + e^{x - m'}, \qquad a' = a\, e^{m - m'} + e^{x - m'}\, v .$$
#
# The *shrink* $e^{m - m'}$ is at most 1, and it is 1 unless a new highest score is met. At the end $o = a / l$.


# %%
def online_softmax(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Top, mass and mixed vector of scores [n] and values [n, D], each seen once."""
    top, mass, mixed = torch.tensor(-1e30), torch.tensor(0.0), torch.zeros(values.shape[1])
    for score, value in zip(scores, values, strict=True):
        higher = torch.maximum(top, score)
        shrink, weight = (top - higher).exp(), (score - higher).exp()
        mass = mass * shrink + weight
        mixed = mixed * shrink + weight * value
        top = higher
    return top, mass, mixed


scores, values = torch.randn(6), torch.randn(6, 4)
top, mass, mixed = online_softmax(scores, values)
print("top", round(top.item(), 4), " mass", round(mass.item(), 4))
print("one pass   ", [round(x, 5) for x in (mixed / mass).tolist()])
print("torch      ", [round(x, 5) for x in (scores.softmax(0) @ values).tolist()])

# %% [markdown]
# Does it stand large scores? Against a softmax in float64, for scores of several sizes, beside the formula without any
# top:

# %%
for spread in (1.0, 50.0, 1000.0):
    scores, values = spread * torch.randn(300), torch.randn(300, 8)
    exact = scores.double().softmax(0) @ values.double()
    top, mass, mixed = online_softmax(scores, values)
    plain = (scores.exp()[:, None] * values).sum(0) / scores.exp().sum()
    errors = [(found.double() - exact).abs().max().item() for found in (mixed / mass, plain)]
    print(f"scores up to {scores.max():6.0f}: error in one pass {errors[0]:.0e}, without a top {errors[1]:.0e}")
    assert errors[0] < 1e-5

# %% [markdown]
# Why does the top begin at -1e30 and not at $-\infty$? With $-\infty$ a lane that has seen nothing but masked scores
# ($-\infty$ too) computes $-\infty - (-\infty)$, which is nan, and one nan spoils the row. With -1e30 it gets a weight
# of $e^{-\infty} = 0$.
#
# What the three numbers do on the way. **Look for** the place where the mass falls: there a new top is met, and
# everything before it shrinks. (Where the mass was small, or the new top hardly higher, this is hard to see.)

# %%
torch.manual_seed(4)
scores, values = 2 * torch.randn(40), torch.randn(40, 4)
trail = [online_softmax(scores[:n], values[:n])[:2] for n in range(1, 41)]
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3))
left.bar(range(40), scores, color=SKY, label="score")
left.step(range(40), [t.item() for t, _ in trail], color=VERMILION, where="mid", label="top so far")
left.set(xlabel="token", title="Scores and their running top")
right.plot(range(40), [m.item() for _, m in trail], color=BLUE, marker="o", markersize=3)
right.set(xlabel="token", title="Mass so far", ylim=(0, None))
left.legend(frameon=False)
plt.show()

# %% [markdown]
# On a GPU there is one small change: its hardware has powers of **2**. Since $e^{x} = 2^{x \log_2 e}$, the factor
# $\log_2 e$ goes into the query once, together with $1/\sqrt{D}$, and every `exp` becomes `exp2`.
#
# ## 3 · Pieces
#
# The three numbers are more than a trick for one loop. Call $(m, l, a)$ a **piece**: what somebody knows who has seen
# some of the tokens. Two who have seen different tokens put their pieces together by the same rule:
#
# $$m = \max(m_1, m_2), \qquad l = l_1 e^{m_1 - m} + l_2 e^{m_2 - m}, \qquad a = a_1 e^{m_1 - m} + a_2 e^{m_2 - m} .$$
#
# A single token is the piece $(x, 1, v)$, nothing at all is $(-10^{30}, 0, 0)$. The step of section 2 was the merge
# with a piece of one token. In exact arithmetic the result is the piece of all tokens together, whatever the order
# and the brackets: the merge is associative and commutative. That is the licence for all that follows.


# %%
def merge(one: tuple, other: tuple) -> tuple:
    """The piece of the tokens of both."""
    top = torch.maximum(one[0], other[0])
    first, second = (one[0] - top).exp(), (other[0] - top).exp()
    return top, one[1] * first + other[1] * second, one[2] * first + other[2] * second


scores, values = 5 * torch.randn(64), torch.randn(64, 8)
exact = scores.double().softmax(0) @ values.double()
tokens = [(score, torch.tensor(1.0), value) for score, value in zip(scores, values, strict=True)]
found = []
for _ in range(200):  # merge two of them at random, until one is left
    left = list(tokens)
    while len(left) > 1:
        i, j = torch.randperm(len(left))[:2].tolist()
        both = merge(left[i], left[j])
        left = [piece for k, piece in enumerate(left) if k not in (i, j)] + [both]
    found.append(left[0][2] / left[0][1])
error = torch.stack(found).double().sub(exact).abs().max().item()
print(f"200 random orders of merging 64 tokens: the results differ from float64 by at most {error:.0e}")
nothing = (torch.tensor(-1e30), torch.tensor(0.0), torch.zeros(8))
assert all(torch.equal(a, b) for a, b in zip(merge(nothing, tokens[0]), tokens[0], strict=True)) and error < 1e-5

# %% [markdown]
# So tokens may be handed out at will. Lanes, warps, CTAs and even GPUs each look after some, and somebody merges. The
# same rule at every level, which is drawn here for the first kernel below.

# %%
LEVELS = ["tokens", "pieces of 8 lanes", "block (CTA)", "row and head"]
widths, colors = [32, 16, 4, 1], [GREY, SKY, ORANGE, GREEN]
fig, ax = plt.subplots(figsize=(9, 3))
for y, (count, color) in enumerate(zip(widths, colors, strict=True)):
    for i in range(count):
        x = (i + 0.5) * 32 / count
        ax.add_patch(Rectangle((x - 0.38, y - 0.16), 0.76, 0.32, color=color, zorder=2))
        if y + 1 < len(widths):
            above = i * widths[y + 1] // count if y else i // 8 * 4 + i % 4
            ax.plot([x, (above + 0.5) * 32 / widths[y + 1]], [y, y + 1], color="#999999", linewidth=0.6, zorder=1)
ax.set_yticks(range(4), LEVELS)
ax.set(xlim=(0, 32), ylim=(-0.4, 3.4), xticks=[], title="Who has seen what: pieces of pieces (4 blocks, 4 pieces each)")
ax.spines[["top", "right", "bottom", "left"]].set_visible(False)
plt.show()

# %% [markdown]
# ## 4 · One block a pair starves the card
#
# The natural first kernel gives each pair to a CTA. Count them, for a small group of completions:

# %%
pairs = 16 * K
for name, gpu in GPUS.items():
    busy = min(pairs, gpu.multiprocessors) / gpu.multiprocessors
    print(f"{name:9} {pairs} CTAs on {gpu.multiprocessors:3} multiprocessors: {busy:4.0%} of them have work")

# %% [markdown]
# A multiprocessor can hold several CTAs at once. How many is limited by its 65,536 registers, its shared memory (227 KB
# on the H200) and its threads. The compiler says what a CTA needs; compiling for an H200 needs no H200.


# %%
def resident(kernel, arch: str = "sm_90a", shared: int = 227 * 1024) -> int:
    """CTAs of a kernel that one multiprocessor holds at a time."""
    code = compiled(kernel, arch)
    by_registers = 65536 // (kernel.threads * -(-code.registers // 8) * 8)  # given out in eights
    # of shared memory the system takes 1 KB of each CTA for itself
    return min(by_registers, shared // (code.shared_bytes + 1024), 2048 // kernel.threads)


for kernel in (SimpleDecode(H, K, D), DecodeAttention(H, K, D)):
    code, count = compiled(kernel, "sm_90a"), resident(kernel)
    print(
        f"{type(kernel).__name__:15} {code.registers} registers a thread, {code.shared_bytes:,} bytes shared:", end=" "
    )
    print(f"{count} CTAs a multiprocessor, {132 * count} on an H200; spilled to memory: {code.stack_bytes} bytes")

# %% [markdown]
# CTAs that exceed what the card holds wait for a place: they come in **waves**. **Look for** the two ways to waste a
# card, an empty first wave and a nearly empty last one. Each square is a place for one CTA on an H200 with 2 places a
# multiprocessor, at its time.


# %%
def draw_waves(ax, ctas: int, places: int, title: str) -> None:
    """Places of a card, one column of squares for each wave: orange ones have work."""
    columns, rows = 12, places // 12
    waves = -(-ctas // places)
    for wave in range(max(waves, 2)):
        for place in range(places):
            x, y = wave * (columns + 1.5) + place % columns, place // columns
            working = wave * places + place < ctas
            ax.add_patch(Rectangle((x, y), 0.8, 0.8, color=ORANGE if working else GREY))
        ax.text(wave * (columns + 1.5) + columns / 2, rows + 0.4, f"wave {wave + 1}", ha="center", fontsize=9)
    ax.set(xlim=(-0.5, 26), ylim=(-0.5, rows + 2), xticks=[], yticks=[])
    ax.set_title(f"{title}:\n{ctas} CTAs, {ctas / places / waves:.0%} of {waves} wave{'s' * (waves > 1)}", fontsize=10)
    ax.spines[["top", "right", "bottom", "left"]].set_visible(False)


fig, axes = plt.subplots(1, 3, figsize=(11, 4.4))
cases = ((32, "16 rows, one CTA a pair"), (256, "16 rows, 8 splits"), (288, "144 rows, one CTA a pair"))
for ax, (ctas, title) in zip(axes, cases, strict=True):
    draw_waves(ax, ctas, 264, title)
plt.show()

# %% [markdown]
# There is a second way to see it. Memory does not answer at once. To have a bandwidth $B$ with an answer time $T$, $B
# \cdot T$ bytes must be **on their way** at any time (Little's law). Few CTAs ask for few bytes.

# %%
ANSWER_US = 0.7  # an assumption for all GPUs here: under load memory answers in about half to one microsecond
for name, gpu in GPUS.items():
    needed = gpu.gb_per_s * 1e3 * ANSWER_US
    asked = pairs * 128 * 2 * 16  # each of 128 threads has one key and one value load of 16 bytes under way
    print(f"{name:9} needs {needed / 1e6:4.2f} MB on their way; {pairs} CTAs of the simple kernel ask for", end=" ")
    print(f"{asked / 1e6:.2f} MB: at most {min(1, asked / needed):4.0%} of the bandwidth")

# %% [markdown]
# The bigger the card, the worse. More CTAs are needed; that is step 2. First the kernel itself.
#
# ## 5 · Step 1: the simple kernel
#
# `rlcourse/course/kernels/decode_simple.py`: one CTA of 128 threads a pair, on CUDA cores. We read it in pieces. What
# is shown is cut out of the file as it is.


# %%
def excerpt(module, begin: str, end: str) -> None:
    """Show a module's source from `begin` up to, but without, `end`."""
    source = inspect.getsource(module)
    start = source.index(begin)
    start = source.rindex("\n", 0, start) + 1
    text = inspect.cleandoc("\n" + source[start : source.index(end, start + len(begin))])
    display(Markdown(f"```python\n{text.rstrip()}\n```"))


excerpt(decode_simple, "        kv_head, row, _ = cute.arch.block_idx()", "@cute.jit\ndef attend")

# %% [markdown]
# The kernel: which pair am I; which slots does the row have, from its `start` behind the padding to its newest token
# (`position`), both read on the GPU; the $G$ queries, keys and values of this pair as views; then `attend`, and
# `finish`, which merges the pieces of the block and writes.
#
# **Who holds what.** The best load of a thread is 16 bytes, which are 8 numbers in bfloat16. So 8 lanes hold a token of
# 64 numbers, and a warp brings 4 tokens with one instruction, 512 bytes that lie together. A block of 4 warps brings 16
# tokens.

# %%
lanes, fig_rows = D // 8, 4
fig, ax = plt.subplots(figsize=(10, 2.6))
for token in range(fig_rows):
    for column in range(lanes):
        color = (SKY, ORANGE, GREEN, PURPLE)[token]
        ax.add_patch(Rectangle((8 * column, token), 7.7, 0.85, color=color, alpha=0.35 + 0.4 * (column % 2)))
        ax.text(8 * column + 3.85, token + 0.42, f"lane {token * lanes + column}", ha="center", va="center", fontsize=9)
ax.set(xlim=(0, 64), ylim=(4, -0.1), xlabel="dimension", title="One load of a warp: 4 tokens, 16 bytes a lane")
ax.set_xticks(range(0, 65, 8))
ax.set_yticks([t + 0.42 for t in range(4)], [f"token {t}" for t in range(4)])
plt.show()

# %% [markdown]
# The loop. **Look for** the score: 8 products in a lane, then `warp_reduction_sum` over the 8 lanes of a token; and for
# the online softmax of section 2, for each of the $G$ heads.

# %%
excerpt(decode_simple, "    for base in cutlass.range(first, last, tokens):", "    all_masses, all_mixed = allocate")

# %% [markdown]
# Three details that decide whether it is right.
#
# - **The tail.** 16 tokens at a time, and a row has any number. A lane past the end must not read beyond the cache. It
#   reads the last token again (`cutlass.min(token, last - 1)`), and its score becomes $-\infty$. All lanes stay in the
#   loop, since a shuffle waits for all lanes of its group.
# - **The pieces.** The 8 lanes of a token keep their own piece: top, mass, and 8 numbers of the mixed vector a head.
#   They meet only for the score. So nothing is merged in the loop, and the block has 16 pieces at its end.
# - **Padding** is not masked, it is not visited: the loop begins at `first`.
#
# Does it work? Two rows, one with left padding, everything that a row has no business with **poisoned with nan**. The
# interpreter adds guards around every tensor.


# %%
def inputs(kernel, rows: int, slots: int, position: list[int], start: list[int] | None = None, seed: int = 0) -> dict:
    """Random tensors for a kernel; slots outside a row's own hold nan. Without a workspace where there is no split."""
    torch.manual_seed(seed)
    q = torch.randn(rows, kernel.heads, kernel.head_size).bfloat16()
    keys, values = torch.randn(2, rows, kernel.kv_heads, slots, kernel.head_size).bfloat16().unbind(0)
    at, first = torch.tensor(position), torch.tensor(start or [0] * rows)
    outside = (torch.arange(slots) > at[:, None]) | (torch.arange(slots) < first[:, None])
    keys, values = (x.masked_fill(outside[:, None, :, None], torch.nan) for x in (keys, values))
    pieces = rows * kernel.kv_heads * kernel.splits
    room = torch.zeros(pieces, 8, kernel.head_size), torch.zeros(pieces, 2, 8), torch.zeros(pieces, dtype=torch.int32)
    return {
        "q": q, "keys": keys, "values": values, "position": at, "start": first if kernel.padded else None,
        "out": torch.empty_like(q), "room": room if kernel.splits > 1 else (None,) * 3,
    }  # fmt: skip


def attend(kernel, x: dict, **options):
    """Run a kernel in the interpreter; gives the largest error against float32, and the interpreter's report."""
    new = (None,) * 6 if isinstance(kernel, DecodeAttention) else ()  # of the fused form, section 8
    room = () if isinstance(kernel, SimpleDecode) else x["room"]
    x["out"].fill_(torch.nan)
    report = simulate(
        kernel, x["q"], x["keys"], x["values"], *new, x["position"], x["start"], x["out"], *room, **options
    )
    expected = decode_attention_reference(x["q"].float(), x["keys"], x["values"], x["position"], x["start"])
    return (x["out"].float() - expected).abs().max().item(), report


simple = SimpleDecode(H, K, D, padded=True)
x = inputs(simple, rows=2, slots=128, position=[99, 126], start=[0, 37])
error, report = attend(simple, x)
print(
    f"largest error {error:.0e}; one bit of bfloat16 at 1 is {2**-8:.0e}; nan in the output: {x['out'].isnan().any()}"
)
assert error < 2e-2

# %% [markdown]
# What did it move? The report counts what threads ask for, by tensor, and the *sectors* of 32 bytes that were touched
# each time a warp did so.

# %%
tokens = sum(last - first + 1 for last, first in zip([99, 126], [0, 37], strict=True))
cache = 2 * 2 * K * D * tokens
asked = sum(report.read[name] for name in ("k_cache", "v_cache"))
loads = [a for a in report.accesses.values() if a.text.startswith("ld.global.v4") and a.bytes > 10_000]
for access in loads:
    print(f"{access.text.split()[0]}: {access.sectors:,} sectors, {32 * access.sectors:,} bytes")
print(f"keys and values of {tokens} tokens: {cache:,} bytes; asked for {asked:,}")
assert 32 * sum(access.sectors for access in loads) < 1.05 * cache

# %% [markdown]
# The loads of keys and of values touch the sectors that they must, and a few more: that is the tail, where lanes ask
# for the last token again and do not count it. It is on the chip already. By the roofline of section 1 this kernel
# should be perfect.
#
# ## 6 · Step 2: split the tokens
#
# With $s$ splits, $s$ CTAs share a pair. Each does what the simple kernel does over its part, and ends with a piece of
# the pair. Which part? The number of tokens is known **on the GPU alone**: in a CUDA graph the grid is fixed, while the
# rows grow. So every CTA computes its own share, in whole tiles of 16:

# %%
excerpt(decode_common, "def share(", "@cute.jit\ndef allocate_pieces")
for n in (456, 40, 1):
    part = -(-n // (16 * 8)) * 16
    print(f"{n:3} tokens in 8 splits:", [min(max(n - i * part, 0), part) for i in range(8)])

# %% [markdown]
# Short rows leave some CTAs with nothing. These leave a piece of nothing ($m = -10^{30}$, $l = 0$), which the merge
# does not mind.
#
# **How many splits?** Enough for the card to be full, but every split costs: a piece of $G$ vectors in float32 is
# written and read again, and a CTA must start and end. Below a few hundred tokens there is a cheaper way to occupy a
# multiprocessor: more warps in a CTA, which put their pieces together in shared memory. So the package wants two CTAs a
# multiprocessor, at least 512 tokens of a full cache each, and a power of two, so that few kernels are compiled:

# %%
from rlcourse.kernels.decode_ops import choose_splits

print("splits chosen      " + "".join(f"{rows:>6}" for rows in (1, 4, 16, 64, 256)) + "  rows")
for name in ("A10", "H200"):
    for slots in (512, 2048, 8192):
        chosen = [choose_splits(rows * K, slots, GPUS[name].multiprocessors) for rows in (1, 4, 16, 64, 256)]
        print(f"{name:5} {slots:5} slots  " + "".join(f"{s:6}" for s in chosen))

# %% [markdown]
# ### The last to arrive
#
# Who merges the $s$ pieces? A second kernel would do, at the price of another launch. Instead the CTAs count
# themselves. Each writes its piece to global memory and adds 1 to a counter. The one that finds $s - 1$ there is the
# last, and all pieces are written. It merges.
#
# Are they? This is where GPUs bite. Another multiprocessor may see the counter **before** the piece, unless order is
# asked for. The addition must *release* what its CTA wrote before, and *acquire* what others released. Here it is in
# the package:

# %%
excerpt(decode_common, "    thread, _, _ = cute.arch.thread_idx()\n    seen =", "    return seen[0]")

# %% [markdown]
# One thread counts. The barrier before it makes sure that the writes of its whole block came first, the barrier after
# it that nobody of its block reads too early. And the last one sets the counter back to 0 for the next launch.
#
# Let us take the order away, on purpose, in a kernel small enough to see: every CTA leaves one number, the last adds
# them up. `order` is what the atomic addition promises.


# %%
@dataclass(frozen=True)
class LastAdds:
    """out[0] = the sum of `blocks` numbers, each left by a block."""

    blocks: int
    order: str
    threads = 32

    def arguments(self):
        return (
            Argument("left", "float32", (self.blocks,)),
            Argument("arrived", "int32", (1,), align=4),
            Argument("out", "float32", (1,), output=True),
        )

    def grid(self, *tensors):
        return self.blocks, 1, 1

    @cute.jit
    def __call__(self, left, arrived, out, stream):
        self.kernel(left, arrived, out).launch(grid=self.grid(), block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, left: cute.Tensor, arrived: cute.Tensor, out: cute.Tensor):
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            left[block] = block.to(Float32) + 1
            before = cute.arch.atomic_add(arrived.iterator, Int32(1), sem=self.order, scope="gpu")
            if before == self.blocks - 1:
                total = Float32(0.0)
                for i in range_constexpr(self.blocks):
                    total += left[i]
                out[0] = total


# %%
from rlcourse.ptx import PTXError

for order in ("acq_rel", "relaxed", "release"):
    left, arrived, out = torch.zeros(8), torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    try:
        simulate(LastAdds(8, order), left, arrived, out, order="serial")
        print(f"{order}: the sum is {out.item():g}")
    except PTXError as error:
        print(f"{order}: {type(error).__name__}: {error}")

# %% [markdown]
# With `relaxed` the interpreter ran the very same numbers and got to the same place. It does not wait for the wrong
# sum: it keeps, for every byte, who wrote it and what orders that before the reader, and finds that nothing does. On
# a GPU the sum may be right in every test, and wrong on another card or under load. No test of results finds that.
#
# Now the split kernel, with blocks and warps in several orders. Who comes last differs, the result must not: the merge
# adds pieces in a fixed order, so even the bits are the same. That matters to whoever wants to repeat a run.

# %%
split = SplitDecode(H, K, D, padded=True, splits=4)
x = inputs(split, rows=2, slots=160, position=[155, 40], start=[0, 38])
outputs = []
for order, seed in (("lockstep", 0), ("serial", 1), ("serial", 2), ("random", 3)):
    error, report = attend(split, x, order=order, seed=seed)
    outputs.append(x["out"].clone())
    print(f"{order:9} error {error:.0e}, counters afterwards {x['room'][2].unique().tolist()}", end=", ")
    print(f"read of other blocks: {', '.join(report.cross_block_reads) or 'nothing'}")
assert all(torch.equal(outputs[0], other) for other in outputs)
print("all orders: the same bits")

# %% [markdown]
# ## 7 · Step 3: tensor cores
#
# With enough CTAs the split kernel reads the cache once, in whole sectors, with many loads under way. On a card of
# modest bandwidth that is the end of the story. To see why it is not on a large one, count what the roofline left
# out: **instructions**. The interpreter counts those that each warp executes. The difference between two lengths is
# what one token costs.

# %%
SHORT, LONG = pick((64, 128), (512, 1024))


def per_token(kernel) -> Counter:
    """Instructions of a warp for each token and key-value head, by opcode. Moves are left out: machine code has few."""
    few, many = (
        attend(kernel, inputs(kernel, 1, LONG, [n - 1]))[1].instructions for n in (SHORT, LONG)
    )  # fmt: skip
    return Counter({name: (many[name] - few[name]) / (LONG - SHORT) / K for name in many if name[:3] != "mov"})


KINDS = {
    "matrix products": ("mma",), "fused multiply-adds": ("fma",), "powers of 2": ("ex2",), "shuffles": ("shfl",),
    "conversions": ("cvt",), "loads": ("ld",), "other floating point": ("mul.f", "add.f", "sub.f", "max.f"),
}  # fmt: skip


def by_kind(counts: Counter) -> dict[str, float]:
    """The same by kind of instruction; what is in none of KINDS is addresses, comparisons and branches."""
    found = {kind: sum(n for name, n in counts.items() if name.startswith(start)) for kind, start in KINDS.items()}
    return found | {"addresses and control": counts.total() - sum(found.values())}


executed = {"CUDA cores": per_token(SplitDecode(H, K, D, splits=1 if LONG < 256 else 4))}
for kind, number in sorted(by_kind(executed["CUDA cores"]).items(), key=lambda item: -item[1]):
    print(f"{number:6.1f}  {kind}")
print(f"{executed['CUDA cores'].total():6.1f}  instructions of a warp for each token and key-value head")

# %% [markdown]
# A warp has 4 tokens at a time, so a quarter of each instruction belongs to a token. Products and the mix of values
# are $2 \cdot 8 \cdot 7$ multiply-adds in each lane for its 4 tokens; the online softmax, for every head and in every
# lane of a token alike, comes on top.
#
# How fast can they go? A multiprocessor has four schedulers, each of which can start one instruction of a warp in a
# cycle. That is a bound of its own, whatever the instructions are: **issue**. Compare it with the bytes of a token:
#
# $$t_\text{bytes} = \frac{2 \cdot 2 \cdot D}{\text{bandwidth}} , \qquad
#   t_\text{issue} = \frac{\text{instructions}}{4 \cdot \text{clock} \cdot \text{multiprocessors}} .$$


# %%
def bounds(gpu: GPU, instructions: float) -> tuple[float, float]:
    """Nanoseconds a token and key-value head, on the whole card: of its bytes, and of issuing instructions."""
    return 4 * D / gpu.gb_per_s, instructions / (4 * gpu.ghz * gpu.multiprocessors)


for name, gpu in GPUS.items():
    of_bytes, of_issue = bounds(gpu, executed["CUDA cores"].total())
    print(f"{name:9} bytes {of_bytes:.3f} ns, issue at best {of_issue:.3f} ns: issue / bytes {of_issue / of_bytes:.2f}")

# %% [markdown]
# On a card with little bandwidth for its arithmetic, memory is the longer one by far, and the CUDA-core kernel is as
# good as any. On the one with much bandwidth, the tokens arrive faster than schedulers can deal with them, even if no
# cycle were lost. Both run the same code: **the bound belongs to the pair of kernel and card**. The remedy is not fewer
# bytes but fewer instructions.
#
# ### One instruction for 2,048 multiply-adds
#
# `mma.sync.m16n8k16` multiplies a $16 \times 16$ matrix with a $16 \times 8$ one, in one instruction of a warp. The
# $G \le 8$ queries of a pair make it a matrix product:
#
# - scores: queries `[G, D]` times keys$^T$ `[D, tokens]`;
# - mix: values$^T$ `[D, tokens]` times weights$^T$ `[tokens, G]`.
#
# The queries fill $G$ of 16 rows of the first, and $G$ of 8 columns of the second. What is computed for nothing takes
# no instruction of its own.
#
# Each of the 32 lanes must hold certain elements (*fragments*) of the operands. The instruction prescribes which. Lane
# number is $4g + c$. **Look for** lane 13 ($g = 3$, $c = 1$): what does it hold of each matrix?


# %%
def draw_fragment(ax, rows: int, columns: int, lane_at, title: str, mine: int = 13) -> None:
    """A matrix with the lane that holds each element; those of lane `mine` in colour."""
    for row in range(rows):
        for column in range(columns):
            lane = lane_at(row, column)
            color = ORANGE if lane == mine else "#f2f2f2" if lane // 4 % 2 else "#e2e2e2"
            ax.add_patch(Rectangle((column, row), 0.95, 0.95, color=color))
            ax.text(column + 0.48, row + 0.5, lane, ha="center", va="center", fontsize=6.5)
    ax.set(xlim=(0, columns), ylim=(rows, 0), xticks=[], yticks=[], title=title, aspect="equal")
    ax.spines[["top", "right", "bottom", "left"]].set_visible(False)


fig, axes = plt.subplots(1, 3, figsize=(11, 5), width_ratios=(16, 8, 8))
draw_fragment(axes[0], 16, 16, lambda r, c: 4 * (r % 8) + c % 8 // 2, "left operand, 16 × 16")
draw_fragment(axes[1], 16, 8, lambda r, c: 4 * c + r % 8 // 2, "right, 16 × 8")
draw_fragment(axes[2], 16, 8, lambda r, c: 4 * (r % 8) + c // 2, "result, 16 × 8")
fig.suptitle("mma.m16n8k16: the lane that holds each element")
fig.tight_layout()
plt.show()

# %% [markdown]
# Take the keys as the right operand: a column is a token, rows are dimensions. Lane 13 needs of token 3 the
# dimensions 2, 3, 10, 11, then 18, 19, 26, 27 of the next product: pairs of 4 bytes, scattered. The usual way is to
# load tiles into shared memory and to hand them out from there (`ldmatrix`). Every byte then moves twice more, and
# blocks wait at barriers.
#
# ### New numbers instead of new places
#
# There is a shorter way. A score is a **sum** over dimensions, and a sum does not care about the order of its terms:
#
# $$q \cdot k = \sum_{d} q_d\, k_d = \sum_{j} q_{\pi(j)}\, k_{\pi(j)} \quad\text{for every permutation } \pi .$$
#
# So "row $j$ of the right operand" may be any dimension $\pi(j)$, if the left operand has the same one in column $j$.
# Choose $\pi$ such that the dimensions which a lane must hold lie together. Of 32 dimensions (two products) lane $c$
# gets $8c, \dots, 8c + 7$: one load of 16 bytes.

# %%
order = [0] * D  # order[16 m + j]: the dimension that stands in row j of product m
for c in range(4):
    for i in range(D // 4):  # number i of what a lane holds: 8 of each 32 dimensions
        product, j = i // 4, 2 * c + i % 2 + 8 * (i // 2 % 2)  # where the instruction has this register
        order[16 * product + j] = 32 * (i // 8) + 8 * c + i % 8
assert sorted(order) == list(range(D))
q, keys = torch.randn(G, D, dtype=torch.float64), torch.randn(8, D, dtype=torch.float64)
print("product 0, rows 0 to 15 are the dimensions", order[:16])
same = sum(q[:, order[16 * m :][:16]] @ keys[:, order[16 * m :][:16]].T for m in range(D // 16))
print("largest difference of the scores:", f"{(same - q @ keys.T).abs().max():.0e}")

# %%
fig, ax = plt.subplots(figsize=(9.5, 1.9))
c = 1
plain = [16 * m + 2 * c + p + 8 * f for m in range(4) for f in range(2) for p in range(2)]
mine = [order[16 * m + 2 * c + p + 8 * f] for m in range(4) for f in range(2) for p in range(2)]
for y, (held, color) in enumerate(((plain, VERMILION), (mine, BLUE))):
    for d in range(D):
        ax.add_patch(Rectangle((d, y - 0.35), 0.9, 0.7, color=color if d in held else GREY))
ax.set(xlim=(0, D), ylim=(-0.6, 1.6), xlabel="dimension of the key", title="What lane 13 (c = 1) loads of token 3")
ax.set_xticks(range(0, D + 1, 8))
ax.set_yticks([0, 1], ["plain order:\n8 loads of 4 bytes", "new numbers:\n2 loads of 16"], fontsize=9)
plt.show()

# %% [markdown]
# For the values the sum runs over **tokens**, and dimensions are rows of the result. Rows may have new names too, if
# the result is written where they say; that is an exercise. And the two products fit: the *result* fragment of the
# scores (head $g$, tokens $2c$, $2c+1$) is what the second product wants of its right operand. The weights never
# leave their lane. The loop of `decode_attention.py`:

# %%
excerpt(decode_attention, "        for base in cutlass.range(begin, end, step):", "        own_masses, own_mixed")

# %% [markdown]
# Keys of the next tile are asked for as soon as the product has used the old ones, and travel during the softmax. No
# shared memory, no barrier. The softmax, by the way, runs over 16 tokens of a tile at once: the top is a maximum over
# four scores of a lane and four lanes; the shrink is one for the tile.
#
# Right, and how many instructions?

# %%
kernel = DecodeAttention(H, K, D, padded=True, splits=2)
error, report = attend(kernel, inputs(kernel, rows=2, slots=160, position=[150, 77], start=[5, 70]))
print(
    f"error {error:.0e}; {report.instructions['mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32']} matrix products"
)
assert error < 3e-2
executed["tensor cores"] = per_token(DecodeAttention(H, K, D, splits=1 if LONG < 256 else 4))
table = {name: by_kind(counts) for name, counts in executed.items()}
for kind in table["CUDA cores"]:
    print(f"{kind:24}" + "".join(f"{counts[kind]:8.1f}" for counts in table.values()))
print(f"{'all':24}" + "".join(f"{counts.total():8.1f}" for counts in executed.values()))

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), width_ratios=(1, 1.3))
colors = (BLACK, BLUE, VERMILION, PURPLE, ORANGE, GREEN, SKY, "#999999")
for x_place, counts in enumerate(table.values()):
    bottom = 0.0
    for (kind, number), color in zip(counts.items(), colors, strict=True):
        left.bar(x_place, number, 0.6, bottom=bottom, color=color, label=kind if x_place == 0 else None)
        bottom += number
left.set_xticks([0, 1], [name.replace(" ", "\n") for name in table])
left.set(title="Instructions a token and KV head", ylabel="of a warp", xlim=(-0.6, 3.4))
left.legend(frameon=False, fontsize=8, loc="center right")
for shift, (name, color) in zip((-0.2, 0.2), (("CUDA cores", VERMILION), ("tensor cores", BLUE)), strict=True):
    ratios = [(lambda b: b[1] / b[0])(bounds(gpu, executed[name].total())) for gpu in GPUS.values()]
    bars = right.bar([i + shift for i in range(len(GPUS))], ratios, 0.38, color=color, label=name)
    right.bar_label(bars, fmt="%.2f", fontsize=8)
right.axhline(1, color=BLACK, linestyle=":")
right.text(-0.45, 1.03, "above: issue-bound, below: memory-bound", fontsize=9)
right.set_xticks(range(len(GPUS)), list(GPUS))
right.set(title="Time to issue / time of the bytes (computed)", ylim=(0, 1.7))
right.legend(frameon=False, fontsize=9, loc="upper left")
plt.show()
for name in ("A10", "H200"):
    ratios = [bounds(GPUS[name], counts.total()) for counts in executed.values()]
    print(f"{name}: issue / bytes " + ", then ".join(f"{issue / moved:.2f}" for moved, issue in ratios))

# %% [markdown]
# **Look for** the dotted line. It is crossed by one kind of core on the cards whose bandwidth is large for their
# number of multiprocessors, and by neither on the others. (These are bounds at full clock with no cycle lost; a real
# kernel issues less, so it is issue-bound sooner. The A100 has half the float32 units a multiprocessor, so its CUDA
# cores stand closer to the line than the bar says.) A benchmark on the small card alone would have said that tensor
# cores gain nothing.

# %% [markdown]
# ## 8 · The fused step
#
# Before attention, a decode step turns the new query and key (RoPE) and writes key and value to the cache. In eager
# PyTorch each of these is an operator, or several, and on a GPU each operator is a launch that reads and writes memory.
# Count them, for attention written out as transformers' eager attention has it. The counter below sees every operator
# that PyTorch executes here; views, which move nothing, are left out.

# %%
from torch.utils._python_dispatch import TorchDispatchMode


class CountOperators(TorchDispatchMode):
    """Operators that move data: how often each, and the bytes of the tensors that they read and write."""

    def __enter__(self):
        self.calls, self.bytes = Counter(), 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        views = [r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns]
        if not any(views) and func._schema.name != "aten::_unsafe_view":
            self.calls[func._schema.name.removeprefix("aten::")] += 1
            self.bytes += self.moved(func._schema.name, args, result)
        return result

    def moved(self, name: str, args, result) -> int:
        """Each element once; what is repeated by a stride of 0 is one element. A write into a part moves that part."""
        outputs = [r for r in (result if isinstance(result, tuple) else (result,)) if isinstance(r, torch.Tensor)]
        tensors = [a for group in args for a in (group if isinstance(group, list | tuple) else (group,))]
        tensors = [a for a in tensors if isinstance(a, torch.Tensor)]
        if "index_put" in name:
            return 2 * args[2].nbytes
        sizes = [[n for n, s in zip(t.shape, t.stride(), strict=True) if s] for t in tensors + outputs]
        return sum(math.prod(n) * t.itemsize for n, t in zip(sizes, tensors + outputs, strict=True))


# %%
def rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def eager_step(q, k, v, cos, sin, keys, values, rows, position, mask):
    """RoPE, cache write, repeated heads, attention: q [R, H, D]; k, v [R, K, D]; cos, sin [R, D]."""
    cos, sin = cos[:, None], sin[:, None]
    q = q * cos + rotate_half(q) * sin
    k = k * cos + rotate_half(k) * sin
    keys[rows, :, position] = k
    values[rows, :, position] = v
    shape = len(q), k.shape[1], q.shape[1] // k.shape[1], *keys.shape[2:]
    keys, values = (x[:, :, None].expand(shape).flatten(1, 2) for x in (keys, values))
    scores = q[:, :, None] @ keys.transpose(2, 3) * q.shape[-1] ** -0.5 + mask
    return (scores.float().softmax(-1).to(q.dtype) @ values)[:, :, 0]


R, S = pick(4, 16), 456
step = [torch.randn(R, heads, D).bfloat16() for heads in (H, K, K)]
angle = 6 * torch.rand(R, D // 2)
cos, sin = (torch.cat([f(angle)] * 2, dim=1).bfloat16() for f in (torch.cos, torch.sin))
keys, values = torch.randn(2, R, K, S, D).bfloat16().unbind(0)
rows, position, mask = torch.arange(R), torch.full((R,), S - 1), torch.zeros(R, 1, 1, S).bfloat16()
with CountOperators() as eager:
    found = eager_step(*step, cos, sin, keys.clone(), values.clone(), rows, position, mask)
print(f"{eager.calls.total()} operators, {eager.bytes / 1e6:.1f} MB:")
print(", ".join(f"{count} {name}" for name, count in eager.calls.most_common()))

# %% [markdown]
# The fused kernel does all of it in one launch. Three things make that easy, and one is a trap.
#
# **RoPE stays in a lane.** Dimension $i$ is turned with dimension $i + D/2$. With the numbering of section 7 lane $c$
# holds chunks $c$, $c + 4$, $c + 8, \dots$ of 8 dimensions of a query or key. Half a head is $D/16$ chunks, a
# multiple of 4, so both partners are in the same lane:

# %%
for c in range(4):
    held = [8 * (c + 4 * j) + e for j in range(D // 32) for e in range(8)]
    assert all((d + D // 2) % D in held for d in held)
    print(f"lane c = {c}: dimensions {held[0]} to {held[7]} and their partners {held[8]} to {held[15]}")
excerpt(decode_new_token, "    for j in range_constexpr(n // 2):", "@cute.jit\ndef write_to_cache")

# %% [markdown]
# **The new token never comes from the cache.** The trap is the order: one CTA writes the new key, others read keys. If
# anybody read the new one from memory, it would need the counter of section 6 before and not after. So nobody does. The
# CTA of the last split has it in registers: it writes it **and** begins its softmax with it; all others end before it.

# %%
excerpt(decode_new_token, "def open_softmax(", "    product = Float32(0.0)")
excerpt(
    decode_attention, "            if opens:\n                if const_expr(self.angles)", "        queries, scores"
)

# %% [markdown]
# That also settles the empty row. A first token, or one whose `start` is its own slot, has nothing in the cache, and
# its softmax still has one member. A row that is idle (its position is outside the cache, as in continuous batching)
# writes nothing, and `write_out` divides by at least $10^{-30}$: zeros, no nan.
#
# Everything at once, in the interpreter: every row at another position, nan in all slots that a row may not see.

# %%
from rlcourse.kernels.decode_new_token import fused_decode_attention_reference
from rlcourse.kernels.decode_ops import fused_decode_attention

SLOTS = 160
CASES = {  # position and start of a row
    "middle": (77, 0), "left padding": (120, 31), "one token": (0, 0), "only itself": (50, 50),
    "full cache": (SLOTS - 1, 0), "idle row": (-1, 0), "behind the cache": (SLOTS, 0),
}  # fmt: skip
position, start = (torch.tensor(ends) for ends in zip(*CASES.values(), strict=True))
q, k, v = (torch.randn(len(CASES), heads, D).bfloat16() for heads in (H, K, K))
angle = 6 * torch.rand(len(CASES), D // 2)
slot = torch.arange(SLOTS)
hidden = (slot >= position[:, None]) | (slot < start[:, None]) | (position[:, None] >= SLOTS)
caches = [
    torch.randn(len(CASES), K, SLOTS, D).bfloat16().masked_fill(hidden[:, None, :, None], torch.nan) for _ in "kv"
]
ours, exact = [c.clone() for c in caches], [c.clone() for c in caches]
with interpreted():
    out = fused_decode_attention(q, k, v, angle.cos(), angle.sin(), *ours, position, start)
expected = fused_decode_attention_reference(q.float(), k, v, angle.cos(), angle.sin(), *exact, position, start)
for row, name in enumerate(CASES):
    error = (out[row].float() - expected[row]).abs().max().item()
    changed = [
        int((~torch.isclose(a[row], b[row], equal_nan=True)).any(-1).any(0).sum())
        for a, b in zip(ours, caches, strict=True)
    ]
    print(f"{name:17} error {error:.0e}, nan: {out[row].isnan().any()}, slots written: {changed[0]} of keys", end=", ")
    print(f"{changed[1]} of values")
    assert error < 3e-2 and changed == [int(0 <= position[row] < SLOTS)] * 2

# %% [markdown]
# ### What is saved
#
# The fused kernel reads the cache once and writes one slot. What it asks for is counted by the interpreter, on the same
# shapes as the eager path above.

# %%
splits = 8
fused = DecodeAttention(H, K, D, splits=splits, angles="bfloat16")
pieces = R * K * splits
room = torch.zeros(pieces, 8, D), torch.zeros(pieces, 2, 8), torch.zeros(pieces, dtype=torch.int32)
at, output = torch.full((R,), S - 1), torch.empty(R, H, D).bfloat16()
angles = cos[:, : D // 2].contiguous(), sin[:, : D // 2].contiguous()
ours = keys.clone(), values.clone()
report = simulate(fused, step[0], *ours, *step[1:], *angles, None, None, at, None, output, *room)
needed = 4 * R * K * (S - 1) * D
shares = {
    "keys and values": needed,
    "the last token of a part again": sum(report.read[n] for n in ("k_cache", "v_cache")) - needed,
    "pieces, written and read": sum(report.read[n] + report.written[n] for n in ("mixed", "masses", "arrived")),
}
rest = sum((report.read + report.written).values()) - sum(shares.values())
for name, count in (shares | {"all else (query, angles, new token; output)": rest}).items():
    print(f"{count / 1e6:7.2f} MB  {name}")
print(f"eager: {eager.calls.total()} launches, {eager.bytes / 1e6:.1f} MB; fused: 1 launch;", end=" ")
print(f"the results differ by at most {(found.float() - output.float()).abs().max():.0e}")
assert (found.float() - output.float()).abs().max() < 3e-2

# %% [markdown]
# A warp asks for its next tile before it is done with this one, and where there is none it asks for the last token of
# its part again: that keeps all lanes in step. What is asked for beyond the cache does not have to come from memory.
# A repeated token is on the chip, and the pieces stay in the second cache between the CTA that writes and the one
# that reads them. The eager path moves the cache many times over, because repeated heads are written out, and scores
# in between. And it is that many launches, of which each has its fixed time, whatever it moves.

# %%
parts = {
    "eager: all operators": eager.bytes,
    "fused: all that is asked for": sum((report.read + report.written).values()),
    "cannot be avoided": needed + 2 * R * D * (2 * H + 4 * K + 1),
}
fig, ax = plt.subplots(figsize=(8, 2.3))
bars = ax.barh(list(parts), [n / 1e6 for n in parts.values()], color=(VERMILION, BLUE, BLACK))
ax.bar_label(bars, fmt="%.1f MB", padding=4)
ax.invert_yaxis()
ax.set(xlabel="MB", title=f"Bytes of one layer's attention step, {R} rows, {S} tokens (counted)")
ax.margins(x=0.15)
ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## 9 · How long it takes
#
# An interpreter has no clock. Times come from a GPU, recorded once: the steps of this lesson beside PyTorch's
# attention (`sdpa`: with repeated heads, and with `enable_gqa`), and the fused step beside the eager one and
# `torch.compile` of it. **Look for** the order of the bars at either size, and for what the third step gains over the
# second.

# %%
from rlcourse.measure.records import load_record, provenance

try:
    record = load_record("cute", "NVIDIA H200")
    source, setup = provenance(record), record["setup"]
    measured = [row for row in record["results"] if row["variant"].startswith(("attention-", "fused-"))]
except FileNotFoundError:
    measured = []
    print("Not recorded on an NVIDIA H200 yet: `rlcourse bench cute --record` measures it there.")
sizes = sorted({tuple(row["shape"]) for row in measured})
if measured:
    fig, axes = plt.subplots(1, len(sizes), figsize=(5.6 * len(sizes), 3.8), squeeze=False)
    for ax, size in zip(axes[0], sizes, strict=True):
        rows = [row for row in measured if tuple(row["shape"]) == size]
        names = [row["variant"].removeprefix("attention-").replace("cute", "tensor cores") for row in rows]
        colors = [ORANGE if row["variant"].startswith("fused-") else BLUE for row in rows]
        bars = ax.barh(names, [row["us"] for row in rows], color=colors)
        ax.bar_label(bars, fmt="%.1f", padding=3, fontsize=9)
        ax.axvline(4e-3 * K * D * math.prod(size) / setup["copy_gb_per_s"], color=BLACK, linestyle=":")
        ax.set(xscale="log", xlabel="µs a call (dotted: bytes at the rate of a copy)")
        ax.set_title(f"{size[0]} rows, {size[1]} tokens, {source}", fontsize=10)
        ax.invert_yaxis()
        ax.margins(x=0.2)
    fig.tight_layout()
    plt.show()

# %% [markdown]
# The same as a roofline, for the kernels of this lesson, and in numbers.

# %%
ours = ("attention-simple", "attention-split", "attention-cute", "attention-cute-ahead", "fused-cute")
points = [
    (f"{row['variant']}, {' × '.join(map(str, row['shape']))}", attention_work(*row["shape"]), row["us"] / 1e6)
    for row in measured
    if row["variant"] in ours[:3]
]
if points:
    peak = 1e12 * GPUS["H200"].tensor_tflops
    fig, ax = plt.subplots(figsize=(7, 4))
    draw_roofline(ax, Machine("copy rate measured", "bfloat16", 1e9 * setup["copy_gb_per_s"], peak), points)
    ax.set_title(f"Decode attention under the roof, {source}", fontsize=11)
    ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    plt.show()
for size in sizes:
    us = {row["variant"]: row["us"] for row in measured if tuple(row["shape"]) == size}
    print(
        f"{size[0]} rows, {size[1]} tokens: fused is {us['fused-eager'] / us['fused-cute']:.1f} x as fast as eager",
        end=", ",
    )
    print(f"{us['fused-compiled'] / us['fused-cute']:.1f} x as compiled; tensor cores", end=" ")
    print(f"{us['attention-split'] / us['attention-cute']:.2f} x as fast as splits alone", end=", ")
    print(f"{us['attention-sdpa-gqa'] / us['attention-cute']:.2f} x as sdpa with grouped heads", end=", ")
    print(f"{us['attention-sdpa-gqa'] / us['attention-cute-ahead']:.2f} x if it reads ahead")
    if "attention-flashinfer" in us:
        print(f"    FlashInfer's decode kernel: {us['attention-flashinfer']:.1f} µs, ours {us['attention-cute']:.1f}")
worst = max((row["relative_error"] for row in measured if row["variant"] in ours), default=None)
print(f"largest relative error of our kernels: {worst:.1e}" if worst else "Without a record there is no point to draw.")

# %% [markdown]
# How to read it. With few rows and short texts the bytes need little time; what remains is a
# chain of waits: the position, then keys, the products, the piece, the counter, the merge. There no kernel comes near
# the roof, and the fused one gains because it is **one** chain. With many rows and long texts the chain is hidden,
# and the distance to the roof is what the kernel is worth. That is why a kernel is measured at both ends.
#
# `ahead` is a third way to shorten the chain, on Hopper and later. A kernel may come to the card **before the one
# before it has ended** (*programmatic dependent launch*), and wait there. What is it to do until then? In a loop that
# decodes, all tokens but the newest were written many steps ago, by nobody who still runs. So each warp asks for its
# first tile of them, and only then waits for the query and the newest token. An operation that anybody may call cannot
# know that; our engine can, so it is what the engine calls (`choose_blocks` in `decode_ops.py` says how many warps, and
# when the next kernel may come; each was measured in the whole step, since alone other choices win).

# %% [markdown]
# On your GPU, if it is one for these kernels (Ampere or later), the same bench runs live:

# %% tags=["gpu"]
if torch.cuda.is_available():
    from rlcourse.bench import cute as bench

    for case in (bench.attention(16, 512, 456), bench.fused_attention(16, 512, 456)):
        for row in bench.measure_case(case, repeats=3):
            print(f"{row['variant']:24} {row['us']:8.1f} µs, relative error {row['relative_error']:.1e}")
else:
    print("No GPU here.")

# %% [markdown]
# ### Explorer: rows, tokens, splits
#
# A model of a launch, to play with. A CTA has 16 KB under way (4 warps, a tile of 16 keys and 16 values each), and
# memory answers after the time assumed in section 4; all CTAs together get no more than the bandwidth. A wave begins
# when the one before it has ended. A CTA starts with three waits in a row, and a merge is three more. It knows
# nothing else, so take its shapes seriously and its microseconds not. Try: 16 rows on an H200, from 1 split upwards;
# then 300 rows.

# %%
from rlcourse.course.widgets import explorer


def launch_us(gpu: GPU, rows: int, tokens: int, splits: int) -> tuple[float, int, int]:
    """Microseconds, CTAs and waves, four CTAs a multiprocessor."""
    ctas, places = rows * K * splits, 4 * gpu.multiprocessors
    part = 16 * math.ceil(tokens / (16 * splits)) * 4 * D  # bytes of a CTA
    time, left = 0.0, ctas
    while left > 0:
        running = min(left, places)
        rate = min(16_384 / ANSWER_US, gpu.gb_per_s * 1e3 / running)  # bytes a microsecond of each
        time += 3 * ANSWER_US + part / rate
        left -= running
    return time + (3 * ANSWER_US if splits > 1 else 0), ctas, math.ceil(ctas / places)


def draw_launch(ax, gpu: str, rows: int, tokens: int, splits: int) -> None:
    """Time over splits, the floor of the bytes, and where we are."""
    axis = [1, 2, 4, 8, 16, 32]
    ax.plot(axis, [launch_us(GPUS[gpu], rows, tokens, s)[0] for s in axis], color=BLUE, marker="o", label="model")
    floor = 4 * D * K * rows * tokens / GPUS[gpu].gb_per_s / 1e3
    ax.axhline(floor, color=BLACK, linestyle=":", label=f"bytes / bandwidth: {floor:.1f} µs")
    time, ctas, waves = launch_us(GPUS[gpu], rows, tokens, splits)
    ax.plot(splits, time, marker="o", markersize=11, color=VERMILION, linestyle="")
    ax.set_title(
        f"{gpu}, rows: {rows}, tokens: {tokens}, splits: {splits}\nCTAs: {ctas}, waves: {waves}, {time:.1f} µs"
    )
    ax.set_xscale("log", base=2)
    ax.set(xlabel="splits", ylabel="µs", ylim=(0, None))
    ax.set_xticks(axis, axis)
    ax.legend(frameon=False, fontsize=8)
    ax.grid(alpha=0.25)


# %%
stories = [
    {"gpu": "H200", "rows": 16, "tokens": 2048, "splits": 1},
    {"gpu": "H200", "rows": 16, "tokens": 2048, "splits": 8},
    {"gpu": "A10", "rows": 160, "tokens": 456, "splits": 8},
]
explorer(draw_launch, stories, gpu=list(GPUS), rows=(16, 1, 512, 1), tokens=(2048, 16, 8192, 16), splits=(1, 1, 32, 1))

# %% [markdown]
# ## Check yourself
#
# 1. A model has 32 query heads and 32 key-value heads. What is the intensity of its decode attention, and what do
#    tensor cores gain there?
#
# <details><summary>Answer</summary>
# G = 1: one operation a byte. Of the columns for heads, seven of eight would be empty. They still save instructions,
# since one instruction of a warp does what many multiply-adds do; but the bytes for each query are seven times those
# of G = 7.
# </details>
#
# 2. Two pieces have tops 100 and 3, masses 2 and 1000. Which one decides the result?
#
# <details><summary>Answer</summary>
# The first. The second has the factor e^-97 at the common top of 100: a mass of 1000 at a low top is next to nothing.
# </details>
#
# 3. Somebody replaces `acq_rel` by `relaxed`. All tests of results pass, a thousand times. Is it right?
#
# <details><summary>Answer</summary>
# No. Nothing orders the pieces before the counter any more. It may work for months on one GPU; the interpreter reports
# the race at once, because it looks for the missing order and not for a wrong number.
# </details>
#
# 4. The kernel reads every byte once, in whole sectors, with enough CTAs, and reaches half of the bandwidth. What now?
#
# <details><summary>Answer</summary>
# Count instructions a token and compare with what the schedulers can issue in the time of its bytes. If that is the
# longer one, fewer instructions help: tensor cores, wider loads, less address arithmetic.
# </details>
#
# 5. Why may the dimensions of q and k be numbered anew, but not the dimensions of k alone?
#
# <details><summary>Answer</summary>
# The score is a sum over dimensions of products of partners. A sum does not care about the order, but each term needs
# its partner: both factors must have the same permutation.
# </details>
#
# 6. In the fused kernel one CTA writes the new key to the cache while others read the cache. Why is that no race?
#
# <details><summary>Answer</summary>
# The others end before the new token: no byte is both written and read. The CTA that owns the new token uses it from
# its registers.
# </details>
#
# ## Exercises
#
# [exercises/09_decode_attention.ipynb](../exercises/09_decode_attention.ipynb): merge pieces, choose splits, load an
# operand of a tensor core, count the bytes of a step, and write a decode-attention kernel of one warp.
#
# ## Further reading
#
# - Milakov and Gimelshein 2018, *Online normalizer calculation for softmax*, arXiv:1805.02867: the shrink.
# - Dao et al. 2022, *FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness*, arXiv:2205.14135:
#   attention in tiles, no scores in memory.
# - Dao, Haziza, Massa and Sizov 2023, *Flash-Decoding for long-context inference*: splits for one query token.
# - Shazeer 2019, *Fast Transformer Decoding: One Write-Head is All You Need*, arXiv:1911.02150, and Ainslie et al.
#   2023, *GQA*, arXiv:2305.13245: fewer key-value heads.
# - Ye et al. 2025, *FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving*,
#   arXiv:2501.01005: pieces as an algebra, schedules for rows of differing length.
# - Liu, Zaharia and Abbeel 2023, *Ring Attention with Blockwise Transformers for Near-Infinite Context*,
#   arXiv:2310.01889: the same merge between devices.
# - Williams, Waterman and Patterson 2009, *Roofline*, Communications of the ACM 52(4).
# - NVIDIA, *PTX ISA*: the fragments of `mma.m16n8k16`, and the memory consistency model (acquire, release, scopes).
