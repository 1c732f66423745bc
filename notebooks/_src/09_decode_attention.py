# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# Lesson 06's roofline makes a promise: if a kernel is memory-bound, reading every byte once is as fast as it gets.
# Attention of a new token over its cache is as memory-bound as they come. So we write the kernel that reads every byte
# once, and time it. It takes two more kernels to find out what the roofline left out.
#
# **You will learn**
#
# - what attention of one query token must read and compute;
# - the online softmax, whose partial results merge in any order;
# - to read a decode-attention kernel as it grows: on CUDA cores, with splits, on tensor cores;
# - to predict a kernel's time, and where such predictions fail;
# - what you gain when RoPE, the cache write and attention are one launch.
#
# You need [lesson 08](08_first_kernels.ipynb), and [lesson 07](07_static_cache.ipynb) for the static cache, but no GPU:
# times come from a record. Lesson 10 puts the kernel into `generate`.

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
from rlcourse.course.kernels.decode_ahead import AheadDecode
from rlcourse.course.kernels.decode_simple import SimpleDecode
from rlcourse.course.kernels.decode_split import SplitDecode
from rlcourse.course.widgets import bet
from rlcourse.kernels import decode_attention, decode_common, decode_new_token
from rlcourse.kernels.arguments import Argument
from rlcourse.kernels.decode_attention import DecodeAttention
from rlcourse.kernels.decode_common import decode_attention_reference
from rlcourse.kernels.dsl import Float32, Int32, cute, range_constexpr
from rlcourse.kernels.toolchain import compiled, interpreted, simulate
from rlcourse.measure.plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION
from rlcourse.measure.records import load_record, provenance

GREY = "#dddddd"
H, K, D = 14, 2, 64  # query heads, key-value heads, head size: those of Qwen2.5-0.5B
SHARED = H // K  # query heads that share a key-value head

# %% [markdown]
# ## 1 · Bytes and operations of one query token
#
# A new token's query is compared with the keys of all $n$ tokens of its row; the softmax of these scores weighs their
# values. Qwen2.5-0.5B has $H = 14$ query heads and $K = 2$ key-value heads, of size $D = 64$. Call a row and a
# key-value head a *pair*. It has $n$ keys and $n$ values, and its $H/K$ query heads need all of them. In bfloat16, at 2
# bytes per number,
#
# $$\text{bytes} = 2 \cdot 2\, n D , \qquad \text{FLOP} = 4\, \tfrac{H}{K}\, n D , \qquad
#   \text{intensity} = \frac{H}{K}\ \text{FLOP/byte}.$$
#
# **Only $H/K$ is left**, {{ SHARED }} here. The *ridge* (lesson 06) is the intensity above which a kernel is
# compute-bound. By their data sheets:

# %% tags=["hide-input"]
# @title Five GPUs, as published


@dataclass(frozen=True)
class GPU:
    """Multiprocessors, boost clock in GHz, GB/s of memory, 16-bit tera-operations/s of the tensor cores (without
    sparsity); lanes: float32 units of a multiprocessor."""

    multiprocessors: int
    ghz: float
    gb_per_s: float
    tensor_tflops: float
    lanes: int = 128

    @property
    def cuda_tflops(self) -> float:
        """float32 on CUDA cores, two operations per lane and cycle."""
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
    print(f"{name:9} ridge at {ridges[0]:4.0f} FLOP/byte on CUDA cores, {ridges[1]:4.0f} on tensor cores")

# %% [markdown]
# **Look for** which side of each ridge $H/K$ is on.

# %% tags=["hide-input"]
# @title Figure: decode attention under two roofs
fig, ax = plt.subplots(figsize=(7.5, 3.8))
intensity = [2 ** (i / 4) for i in range(-4, 41)]
for (name, color), style in zip((("A10", ORANGE), ("H200", BLUE)), ("--", "-"), strict=True):
    gpu = GPUS[name]
    for tflops, width, kind in ((gpu.tensor_tflops, 2.5, "tensor cores"), (gpu.cuda_tflops, 1, "CUDA cores")):
        roof = [min(gpu.gb_per_s * x / 1e3, tflops) for x in intensity]
        ax.plot(intensity, roof, color=color, linestyle=style, linewidth=width, label=f"{name}, {kind}")
for ratio, text in ((1, "H/K = 1 (no sharing)"), (2, "H/K = 2"), (7, "H/K = 7")):
    ax.axvline(ratio, color=BLACK, linestyle=":", linewidth=1)
    ax.text(1.05 * ratio, 1200, text, rotation=90, va="top")
ax.set(xscale="log", yscale="log", xlabel="FLOP/byte", ylabel="TFLOP/s")
ax.set_title("Decode attention under the roofs of two GPUs (published numbers)")
ax.legend(loc="lower right")
ax.grid()
plt.show()

# %% [markdown]
# Decode attention is on the slope of every roof. On paper, the best kernel reads the cache once, at full bandwidth.
#
# ## 2 · Softmax in one pass
#
# For one query, scores $x_1, \dots, x_n$ and values $v_1, \dots, v_n$:
#
# $$o = \frac{\sum_s e^{x_s}\, v_s}{\sum_s e^{x_s}} = \frac{\sum_s e^{x_s - m}\, v_s}{\sum_s e^{x_s - m}}
#   \qquad \text{for any } m .$$
#
# With $m = \max_s x_s$ no power exceeds 1. But that's known only after the last score. So take the maximum **so far**,
# and correct what you computed with an older one (Milakov and Gimelshein 2018). Carry the maximum $m$, the sum
# $l = \sum e^{x_s - m}$, and the vector $\text{acc} = \sum e^{x_s - m} v_s$. The next score $x$, with its value $v$,
# makes the maximum $m' = \max(m, x)$. All old terms have the factor $e^{-m}$ and should have $e^{-m'}$:
#
# $$\alpha = e^{m - m'}, \qquad l' = \alpha\, l + e^{x - m'}, \qquad \text{acc}' = \alpha\, \text{acc} + e^{x - m'} v
# .$$
#
# At the end $o = \text{acc} / l$.


# %%
def online_softmax(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """m, l and acc of scores [n] and values [n, D], each seen once."""
    m, l, acc = torch.tensor(-1e30), torch.tensor(0.0), torch.zeros(values.shape[1])
    for score, value in zip(scores, values, strict=True):
        m_new = torch.maximum(m, score)
        alpha, weight = (m - m_new).exp(), (score - m_new).exp()
        l = alpha * l + weight
        acc = alpha * acc + weight * value
        m = m_new
    return m, l, acc


torch.manual_seed(0)
for spread in (1.0, 50.0, 1000.0):
    scores, values = spread * torch.randn(300), torch.randn(300, 8)
    exact = scores.double().softmax(0) @ values.double()
    m, l, acc = online_softmax(scores, values)
    plain = (scores.exp()[:, None] * values).sum(0) / scores.exp().sum()
    errors = [(found.double() - exact).abs().max().item() for found in (acc / l, plain)]
    print(f"scores up to {m:6.0f}: error in one pass {errors[0]:.0e}, without a maximum {errors[1]:.0e}")
    assert errors[0] < 1e-5

# %% [markdown]
# Why does $m$ begin at $-10^{30}$? At $-\infty$, a lane that has seen only masked scores would compute
# $-\infty - (-\infty)$, which is nan. At 0, every weight may underflow, and you get $0/0$. **Look for** the new
# maximum where $l$ drops.

# %% tags=["hide-input"]
# @title Figure: m and l on the way
torch.manual_seed(4)
scores, values = 2 * torch.randn(40), torch.randn(40, 4)
trail = [online_softmax(scores[:n], values[:n])[:2] for n in range(1, 41)]
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 2.8), layout="constrained")
left.bar(range(40), scores, color=SKY, label="score")
left.step(range(40), [m.item() for m, _ in trail], color=VERMILION, where="mid", label="m")
left.set(xlabel="token", title="Scores and their maximum so far, m")
right.plot(range(40), [l.item() for _, l in trail], color=BLUE, marker="o")
jumps = [i for i in range(1, 40) if trail[i][0] > trail[i - 1][0]]
right.plot(jumps, [trail[i][1].item() for i in jumps], color=VERMILION, marker="o", linestyle="", label="a new m")
right.set(xlabel="token", title="Sum so far, l", ylim=(0, None))
left.legend()
right.legend()
plt.show()

# %% [markdown]
# A GPU has powers of **2** in hardware. So the query gets the factor $\log_2 e$, together with $1/\sqrt{D}$, and every
# `exp` becomes `exp2`.
#
# ## 3 · Partial results
#
# Call $(m, l, \text{acc})$ a **partial**: all you need to keep of the tokens seen. Partials merge by the same rule:
#
# $$m = \max(m_1, m_2), \qquad l = l_1 e^{m_1 - m} + l_2 e^{m_2 - m}, \qquad
#   \text{acc} = \text{acc}_1 e^{m_1 - m} + \text{acc}_2 e^{m_2 - m} .$$
#
# In whatever order you merge, that's the partial of all tokens together.


# %%
def merge(one: tuple, other: tuple) -> tuple:
    """The partial of the tokens of both."""
    m = torch.maximum(one[0], other[0])
    first, second = (one[0] - m).exp(), (other[0] - m).exp()
    return m, one[1] * first + other[1] * second, one[2] * first + other[2] * second


scores, values = 5 * torch.randn(64), torch.randn(64, 8)
exact, worst = scores.double().softmax(0) @ values.double(), 0.0
for _ in range(200):  # merge two of them at random, until one is left
    left = [(score, torch.tensor(1.0), value) for score, value in zip(scores, values, strict=True)]
    while len(left) > 1:
        i, j = torch.randperm(len(left))[:2].tolist()
        both = merge(left[i], left[j])
        left = [partial for k, partial in enumerate(left) if k not in (i, j)] + [both]
    worst = max(worst, (left[0][2] / left[0][1] - exact).abs().max().item())
print(f"64 tokens merged in 200 random orders: off by at most {worst:.0e}")
assert worst < 1e-5

# %% [markdown]
# So split the tokens any way you like: among lanes, warps, blocks, even GPUs.
#
# ## 4 · How fast is the first kernel?
#
# The natural first kernel gives each pair a block of its own. From here on we call a block a *CTA*, as CuTe and
# NVIDIA's manuals do. With 16 rows that's {{ 16 * K }} CTAs for the {{ GPUS["H200"].multiprocessors }} SMs of an H200,
# so three quarters of them have nothing to do. How fast does it read, compared with a copy ({{ load_record("cute",
# "NVIDIA H200")["setup"]["copy_gb_per_s"] / 1e3:.1f }} TB/s, measured on large tensors)?

# %% tags=["hide-input"]
# @title Your bet
record = load_record("cute", "NVIDIA H200")
COPY = record["setup"]["copy_gb_per_s"]
SMALL, LARGE = (16, 456), (256, 1024)  # rows and tokens
us = {(r["variant"], tuple(r["shape"])): r["us"] for r in record["results"]}
rate = {(r["variant"], tuple(r["shape"])): r["gb_per_s"] / COPY for r in record["results"]}
first_bet = bet(
    "16 rows of 456 tokens in 32 CTAs on an H200: what share of a copy's bandwidth does the kernel reach?",
    (1, 100, 1),
    unit="%",
)

# %% tags=["hide-input"]
# @title What became of the bet
first_bet.result(100 * rate["attention-simple", SMALL])

# %% [markdown]
# Far less than a quarter, so idle SMs aren't the whole reason. **Little's law** (1961) gives a better one. A byte
# arrives one latency after it's requested. So to use the full bandwidth, bandwidth times latency bytes must be *in
# flight* at any moment.

# %%
LATENCY_US = 0.7  # an assumption for all GPUs here: under load memory takes about half to one microsecond
asked = 16 * K * 128 * 2 * 16  # each of 128 threads has one key load and one value load of 16 bytes in flight
for name, gpu in GPUS.items():
    needed = gpu.gb_per_s * 1e3 * LATENCY_US
    print(f"{name:9} needs {needed / 1e6:4.2f} MB in flight; {16 * K} CTAs of the simple kernel have", end=" ")
    print(f"{asked / 1e6:.2f} MB: at most {min(1, asked / needed):4.0%} of the bandwidth")
little = asked / (GPUS["H200"].gb_per_s * 1e3 * LATENCY_US)

# %% [markdown]
# That's about what we measured. The latency is an assumption, so it's no proof, but it says what to try: more CTAs, or
# more bytes in flight in each.
#
# ## 5 · Step 1: the simple kernel
#
# Each pair gets a CTA of 128 threads, on CUDA cores (`rlcourse/course/kernels/decode_simple.py`). A CTA first finds its
# pair, its queries (a `local_tile`) and the row's slots, from `start`, behind the padding on the left, to the newest
# token, `position`. `attend` goes through the tokens; `finish` merges the CTA's partials.

# %% tags=["hide-input"]
# @title `excerpt(module, begin, end)`: from a module's source


def excerpt(module, begin: str, end: str | None = None, folded: str = "") -> None:
    """Show a module's source from `begin` up to, but without, `end`; without an end, all that follows.

    folded: a summary, on which one clicks to see it."""
    source = inspect.getsource(module)
    start = source.index(begin)
    start = source.rindex("\n", 0, start) + 1
    stop = source.index(end, start + len(begin)) if end else None
    text = f"```python\n{inspect.cleandoc(chr(10) + source[start:stop]).rstrip()}\n```"
    display(Markdown(f"<details><summary>{folded}</summary>\n\n{text}\n\n</details>" if folded else text))


excerpt(decode_simple, "@dataclass(frozen=True)", "@cute.jit\ndef attend")

# %% [markdown]
# A thread's widest load is 16 bytes, or 8 numbers in bfloat16. So a token takes 8 lanes. A warp loads 4 tokens with one
# instruction, and a CTA of 4 warps loads 16. **Look for** the lanes that share token 0.

# %% tags=["hide-input"]
# @title Figure: one load of a warp
fig, ax = plt.subplots(figsize=(10, 2.3))
for token in range(4):
    for column in range(D // 8):
        color = (SKY, ORANGE, GREEN, PURPLE)[token]
        ax.add_patch(Rectangle((8 * column, token), 7.7, 0.85, color=color, alpha=0.35 + 0.4 * (column % 2)))
        ax.text(8 * column + 3.85, token + 0.42, f"lane {token * D // 8 + column}", ha="center", va="center")
ax.set(xlim=(0, 64), ylim=(4, -0.1), xlabel="dimension", title="One load of a warp: 4 tokens, 16 bytes per lane")
ax.set_xticks(range(0, 65, 8))
ax.set_yticks([t + 0.42 for t in range(4)], [f"token {t}" for t in range(4)])
plt.show()

# %% [markdown]
# `attend` is the loop: load a key and a value in `chunks` of 8, then `take` the token. (`begin` loads the query,
# `leave` stores the partials.) A lane past the end reads the last token again and doesn't count it. It must stay in the
# loop, because a shuffle waits for all lanes of its mask.

# %%
excerpt(decode_simple, "@cute.jit\ndef attend", "@cute.jit\ndef take")

# %% [markdown]
# `take` is one step of section 2's online softmax, for each query head. **Look for** the score: 8 products in a lane,
# then a sum over the token's 8 lanes. Otherwise lanes don't communicate: each group of 8 keeps a partial of its own.

# %%
excerpt(decode_simple, "@cute.jit\ndef take", "@cute.jit\ndef begin")
excerpt(
    decode_simple, "@cute.jit\ndef begin", folded="The rest of the kernel: <code>begin</code> and <code>leave</code>"
)
excerpt(decode_common, "@cute.jit\ndef chunks", folded="What all steps share: <code>decode_common.py</code>")

# %% [markdown]
# Two rows, one with left padding, and every slot outside a row's own **poisoned with nan**.

# %% tags=["hide-input"]
# @title `inputs` and `attend`: poisoned tensors, and a run in the interpreter


def inputs(kernel, rows: int, slots: int, position: list[int], start: list[int] | None = None, seed: int = 0) -> dict:
    """Random tensors for a kernel; slots outside a row's own hold nan. Without a workspace where there is no split."""
    torch.manual_seed(seed)
    q = torch.randn(rows, kernel.heads, kernel.head_size).bfloat16()
    keys, values = torch.randn(2, rows, kernel.kv_heads, slots, kernel.head_size).bfloat16().unbind(0)
    at, first = torch.tensor(position), torch.tensor(start or [0] * rows)
    outside = (torch.arange(slots) > at[:, None]) | (torch.arange(slots) < first[:, None])
    keys, values = (x.masked_fill(outside[:, None, :, None], torch.nan) for x in (keys, values))
    blocks = rows * kernel.kv_heads * kernel.splits
    room = torch.zeros(blocks, 8, kernel.head_size), torch.zeros(blocks, 2, 8), torch.zeros(blocks, dtype=torch.int32)
    return {
        "q": q, "keys": keys, "values": values, "position": at, "start": first if kernel.padded else None,
        "out": torch.empty_like(q), "room": room if kernel.splits > 1 else (None,) * 3,
    }  # fmt: skip


def attend(kernel, x: dict, **options):
    """Run a kernel in the interpreter; gives the largest error against float32, and the interpreter's report."""
    new = (None,) * 4 if isinstance(kernel, DecodeAttention) else ()  # of the fused form, section 8
    room = () if isinstance(kernel, SimpleDecode) else x["room"]
    x["out"].fill_(torch.nan)
    report = simulate(
        kernel, x["q"], x["keys"], x["values"], *new, x["position"], x["start"], x["out"], *room, **options
    )
    expected = decode_attention_reference(x["q"].float(), x["keys"], x["values"], x["position"], x["start"])
    return (x["out"].float() - expected).abs().max().item(), report


# %%
simple = SimpleDecode(H, K, D, padded=True)
error, report = attend(simple, inputs(simple, rows=2, slots=128, position=[99, 126], start=[0, 37]))
print(f"largest error {error:.0e}; rounding to bfloat16 at 1 costs up to {2**-8:.0e}")
tokens = 100 + 127 - 37
cache = 2 * 2 * K * D * tokens
loads = [a for a in report.accesses.values() if a.text.startswith("ld.global.v4") and a.bytes > 10_000]
touched = 32 * sum(access.sectors for access in loads)
print(f"keys and values of {tokens} tokens: {cache:,} bytes; sectors of 32 bytes that were touched: {touched:,} bytes")
assert error < 2e-2 and touched < 1.05 * cache

# %% [markdown]
# It touches what it must, once. By the roofline there's nothing left to gain. And yet, at 16 rows of 456 tokens, it
# takes {{ 1 / rate["attention-simple", SMALL]:.0f }} times as long as its {{ 4e-6 * K * D * math.prod(SMALL):.1f }} MB
# would at the rate of a large copy: {{ us["attention-simple", SMALL]:.0f }} µs instead of {{ 4e-3 * K * D *
# math.prod(SMALL) / COPY:.1f }}.
#
# ## 6 · Step 2: split the tokens
#
# With $s$ splits, $s$ CTAs share a pair (split-KV, or Flash-Decoding). Each runs step 1 over its share of the tokens.
# **Look for** the SMs that work.

# %% tags=["hide-input"]
# @title Figure: one pair's tokens, and the SMs that work for 16 rows
SMS = GPUS["H200"].multiprocessors
fig, axes = plt.subplots(2, 2, figsize=(9.5, 3.1), width_ratios=(2, 1), layout="constrained")
for (left, right), splits in zip(axes, (1, 8), strict=True):
    part = -(-456 // (16 * splits)) * 16
    for i in range(splits):
        first, last = i * part, min((i + 1) * part, 456)
        left.add_patch(Rectangle((first + 1, 0), last - first - 2, 1, color=(SKY, ORANGE, GREEN, PURPLE)[i % 4]))
        left.text((first + last) / 2, 0.5, f"CTA {i}" if last - first > 30 else str(i), ha="center", va="center")
    left.set(xlim=(0, 456), yticks=[], title=f"{splits} CTA{'s' * (splits > 1)} per pair")
    left.set_xlabel("token of the pair" if splits > 1 else "")
    for sm in range(SMS):
        right.add_patch(Rectangle((sm % 22, sm // 22), 0.85, 0.85, color=BLUE if sm < 16 * K * splits else GREY))
    right.set(xlim=(0, 22), ylim=(-(-SMS // 22), 0), xticks=[], yticks=[], aspect="equal")
    right.set_title(f"{min(SMS, 16 * K * splits)} of {SMS} SMs work")
    right.spines[["bottom", "left"]].set_visible(False)
plt.show()

# %% [markdown]
# In a CUDA graph the grid is fixed while the rows grow, so every CTA works out its own share, in whole tiles of 16.

# %%
excerpt(decode_common, "def share(", "@cute.jit\ndef allocate_partials")
for n in (456, 40, 1):
    part = -(-n // (16 * 8)) * 16
    print(f"{n:3} tokens in 8 splits:", [min(max(n - i * part, 0), part) for i in range(8)])

# %% tags=["hide-input"]
# @title Your bet
splits_bet = bet(
    "16 rows of 456 tokens, H200: 8 splits have 8 times the bytes in flight. How many times as fast as step 1?",
    (1, 10, 0.1),
    unit="times",
)

# %% tags=["hide-input"]
# @title What became of the bet
faster = us["attention-simple", SMALL] / us["attention-split", SMALL]
splits_bet.result(faster)

# %% [markdown]
# Not 8 times but {{ faster:.1f }}. {{ assert 1.5 < faster < 4 }} The launch, the merge and a first wait for memory
# don't shrink with splits, and {{ us["attention-split", SMALL]:.1f }} µs is short enough for them to count. It's {{ 100
# * rate["attention-split", SMALL]:.0f }}% of a copy, where Little's law would allow 8 × {{ 100 * little:.0f }}%.
#
# ### The last to arrive
#
# Who merges the $s$ partials? Each CTA writes its partial to global memory and adds 1 to a counter. The one that finds
# $s - 1$ there is the last, and merges. But another SM may see the counter **before** the partial, unless you ask for
# an order. The addition must *release* what its CTA wrote before, and *acquire* what others released:

# %%
excerpt(decode_common, "    thread, _, _ = cute.arch.thread_idx()\n    seen =", "    return seen[0]")

# %% [markdown]
# The barriers around it extend that to all threads of the CTA. Now take the order away, in a small kernel: every CTA
# leaves one number, and the last one adds them up.


# %%
@dataclass(frozen=True)
class LastAdds:
    """out[0] = the sum of `blocks` numbers, each left by a CTA."""

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


from ptx_interpreter import PTXError
from rlcourse.course.kernels.interpret import run as interpret

for order in ("acq_rel", "relaxed"):
    left, arrived, out = torch.zeros(8), torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    try:
        interpret(LastAdds(8, order), left, arrived, out, order="serial")
        print(f"{order}: the sum is {out.item():g}")
    except PTXError as error:
        print(f"{order}: {type(error).__name__}: {error}")

# %% [markdown]
# On a GPU the sum may be right in every test, and wrong on another card.
#
# Now step 2, with CTAs and warps in several orders. The merge has a fixed order, so even the bits are the same.

# %%
split = SplitDecode(H, K, D, padded=True, splits=4)
x, outputs = inputs(split, rows=2, slots=160, position=[155, 40], start=[0, 38]), []
for order, seed in (("lockstep", 0), ("serial", 1), ("serial", 2), ("random", 3)):
    error, report = attend(split, x, order=order, seed=seed)
    outputs.append(x["out"].clone())
    print(f"{order:9} error {error:.0e}; read of other blocks: {', '.join(report.cross_block_reads)}")
assert error < 2e-2 and all(torch.equal(outputs[0], other) for other in outputs)
print("all orders: the same bits")

# %% [markdown]
# ## 7 · What holds step 2 back?
#
# Are 16 rows too little work? With 256 rows of 1,024 tokens every SM is full, and step 2 reaches {{
# 100 * rate["attention-split", LARGE]:.0f }}% of a copy. So count what the roofline leaves out, **instructions**.

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


on_cuda_cores = per_token(SplitDecode(H, K, D, splits=1 if LONG < 256 else 4))
for kind, number in sorted(by_kind(on_cuda_cores).items(), key=lambda item: -item[1]):
    print(f"{number:6.1f}  {kind}")
print(f"{on_cuda_cores.total():6.1f}  warp instructions for each token and key-value head")

# %% [markdown]
# An SM has four schedulers, each of which issues one warp instruction per cycle. That gives three lower bounds, none
# of which a kernel can beat:
#
# $$t_\text{bytes} = \frac{\text{bytes}}{\text{bandwidth}} , \qquad
#   t_\text{latency} = \text{latency} \cdot \frac{\text{bytes}}{\text{bytes in flight}} , \qquad
#   t_\text{issue} = \frac{\text{instructions}}{4 \cdot \text{clock} \cdot \text{SMs}} .$$
#
# The second is Little's law again. Which of them is near the measured time?

# %% tags=["hide-input"]
# @title `times`: the three lower bounds of a kernel on an H200
h200 = GPUS["H200"]


def resident(kernel, arch: str = "sm_90a", shared: int = 227 * 1024) -> int:
    """CTAs of a kernel that one multiprocessor holds at a time."""
    code = compiled(kernel, arch)
    by_registers = 65536 // (kernel.threads * -(-code.registers // 8) * 8)  # given out in eights
    # of shared memory the system takes 1 KB of each CTA for itself
    return min(by_registers, shared // (code.shared_bytes + 1024), 2048 // kernel.threads)


def times(kernel, each: int, counts: Counter, rows: int = LARGE[0], tokens: int = LARGE[1]) -> dict[str, float]:
    """MB in flight; three lower bounds in µs. each: bytes that a CTA has in flight; counts: instructions per token."""
    data = 4 * D * rows * K * tokens
    at_once = min(rows * K * kernel.splits, h200.multiprocessors * resident(kernel))
    flying = min(at_once * each, data)  # nothing is requested that isn't there
    return {
        "MB": flying / 1e6,
        "bytes": data / (1e3 * COPY),
        "latency": LATENCY_US * data / flying,
        "issue": counts.total() * rows * K * tokens / (4e3 * h200.ghz * h200.multiprocessors),
    }


step_2 = SplitDecode(H, K, D, splits=2)
of_step_2 = times(step_2, 128 * 32, on_cuda_cores)
print("step 2, 256 rows of 1,024 tokens, in µs:", end=" ")
print(", ".join(f"{name} {of_step_2[name]:.0f}" for name in ("bytes", "latency", "issue")), end="; ")
print(f"measured {us['attention-split', LARGE]:.0f}")

# %% [markdown]
# None of them is near {{ us["attention-split", LARGE]:.0f }}. {{ assert us["attention-split", LARGE] > 1.4 *
# max(of_step_2[part] for part in ("bytes", "latency", "issue")) }} There are two suspects. The larger is latency: a
# thread needs so many registers ({{ compiled(step_2, "sm_90a").registers }}) that only {{ resident(step_2) }} CTAs fit
# on an SM, so too few bytes are in flight. The other is issue. {{ assert of_step_2["latency"] > of_step_2["issue"] >
# of_step_2["bytes"] }} Tensor cores help with both.
#
# ## 8 · Step 3: tensor cores
#
# A tensor core multiplies two small matrices in one warp instruction. A pair's attention over a tile of 16 tokens is
# two such products with a softmax in between:
#
# 1. `multiply_keys`: scores $[H/K, \text{tokens}]$ = queries $[H/K, D]$ times keys$^T$ $[D, \text{tokens}]$;
# 2. `softmax`: section 2's update, for 16 tokens at once, turns scores into weights;
# 3. `multiply_values`: acc$^T$ $[D, H/K]$ += values$^T$ $[D, \text{tokens}]$ times weights$^T$ $[\text{tokens}, H/K]$.
#
# That's the whole loop of step 3. **Look for** the two loads: the next keys are requested once the first product has
# used the old ones, the next values after the second.

# %%
excerpt(
    decode_attention, "        for base in cutlass.range(begin, end, step):", "\n        if const_expr(self.release"
)

# %% [markdown]
# ### What the instruction wants
#
# `mma.sync.m16n8k16` multiplies a $16 \times 16$ matrix by a $16 \times 8$ one: 2,048 multiply-adds. Each lane, number
# $4g + c$, must hold certain elements, its *fragments*. **Look for** lane 13 ($g = 3$, $c = 1$).


# %% tags=["hide-input"]
# @title Figure: the fragments of mma.m16n8k16
def draw_fragment(ax, rows: int, columns: int, lane_at, title: str, mine: int = 13) -> None:
    """A matrix with the lane that holds each element; those of lane `mine` in colour."""
    for row in range(rows):
        for column in range(columns):
            lane = lane_at(row, column)
            color = ORANGE if lane == mine else "#f2f2f2" if lane // 4 % 2 else "#e2e2e2"
            ax.add_patch(Rectangle((column, row), 0.95, 0.95, color=color))
            ax.text(column + 0.48, row + 0.5, lane, ha="center", va="center", fontsize=8)
    ax.set(xlim=(0, columns), ylim=(rows, 0), xticks=[], yticks=[], title=title, aspect="equal")
    ax.spines[["bottom", "left"]].set_visible(False)


fig, axes = plt.subplots(1, 3, figsize=(11, 5.3), width_ratios=(16, 8, 8), layout="constrained")
draw_fragment(axes[0], 16, 16, lambda r, c: 4 * (r % 8) + c % 8 // 2, "left operand, 16 × 16")
draw_fragment(axes[1], 16, 8, lambda r, c: 4 * c + r % 8 // 2, "right, 16 × 8")
draw_fragment(axes[2], 16, 8, lambda r, c: 4 * (r % 8) + c // 2, "result, 16 × 8")
for ax, rows, columns in zip(
    axes, ("heads (7 are used)", "dimensions", "heads (7 are used)"), ("dimensions", "tokens", "tokens"), strict=True
):  # fmt: skip
    ax.set(xlabel=columns, ylabel=rows)
fig.suptitle("mma.m16n8k16: the lane that holds each element, here in the product of queries and keys")
plt.show()

# %% [markdown]
# ### Keys, in 16-byte loads
#
# Column 3 of the right operand is token 3, and lane 13 holds its rows 2, 3, 10 and 11. If row $j$ is dimension $j$,
# those are scattered pairs of 4 bytes. The usual way is to distribute them from shared memory (`ldmatrix`). But a score
# is a **sum** over dimensions, in any order:
#
# $$q \cdot k = \sum_{d} q_d\, k_d = \sum_{j} q_{\pi(j)}\, k_{\pi(j)} \quad\text{for every permutation } \pi .$$
#
# So row $j$ of the right operand may be any dimension, if column $j$ of the left operand is the same one. Let lane
# $4g+c$ load dimensions $8c, \dots, 8c+7$ of each 32, in 16 bytes. **Look for** where lane 13's first four go.

# %% tags=["hide-input"]
# @title Figure: what a lane loads, and where it goes
fig, axes = plt.subplots(2, 1, figsize=(11.5, 4.4), layout="constrained")
c = 1
for ax, renumbered in zip(axes, (False, True), strict=True):
    for x in range(D):
        for y in (0, 1.5):
            ax.add_patch(Rectangle((x + 0.05, y), 0.9, 0.6, facecolor=GREY))
    for element in range(16):  # of those that lane 4g + c holds
        i, row = element // 4, 2 * c + element % 2 + 8 * (element // 2 % 2)
        d = 32 * (element // 8) + 8 * c + element % 8 if renumbered else 16 * i + row
        color = (SKY, ORANGE, GREEN, PURPLE)[i]
        for x, y, text in ((d, 1.5, d), (16 * i + row, 0, row)):
            ax.add_patch(Rectangle((x + 0.05, y), 0.9, 0.6, facecolor=color))
            ax.text(x + 0.5, y + 0.28, text, ha="center", va="center", fontsize=6)
        ax.plot([d + 0.5, 16 * i + row + 0.5], [1.48, 0.62], color=color, linewidth=1.2)
    for edge in (16, 32, 48):
        ax.plot([edge, edge], [-0.15, 0.75], color=BLACK, linewidth=1)
    ax.set(xlim=(0, D), ylim=(-0.2, 2.2))
    ax.set_title("renumbered: 2 loads of 16 bytes" if renumbered else "plain order: 8 loads of 4 bytes")
    ax.set_yticks([0.3, 1.8], ["row of the product", "dimension of token 3"])
    ax.set_xticks([8, 24, 40, 56], [f"product {i}" for i in range(4)])
    ax.tick_params(length=0)
    ax.spines[["bottom", "left"]].set_visible(False)
plt.show()

# %% [markdown]
# The first four go to product 0, the next four to product 1. With bits $p$ and $f$, a lane's element $p + 2f + 4i$ is
# row $2c + p + 8f$ of product $i$. As a *layout* (lesson 08) that's `((2, 2), D/16) : ((1, 2), 4)`. Are the scores the
# same?

# %%
dimension = {}  # (row of a product, product): the dimension that stands there
for c in range(4):
    for i in range(D // 16):
        for f in range(2):
            for p in range(2):
                number = 1 * p + 2 * f + 4 * i  # the layout ((2, 2), D / 16) : ((1, 2), 4)
                dimension[2 * c + p + 8 * f, i] = 32 * (number // 8) + 8 * c + number % 8
order = [dimension[j, i] for i in range(D // 16) for j in range(16)]
assert sorted(order) == list(range(D)) and [order[j] for j in (2, 3, 10, 11)] == [8, 9, 10, 11]
q, keys = torch.randn(SHARED, D, dtype=torch.float64), torch.randn(8, D, dtype=torch.float64)
same = sum(q[:, order[16 * i :][:16]] @ keys[:, order[16 * i :][:16]].T for i in range(D // 16))
print("product 0, rows 0 to 15 are the dimensions", order[:16])
print("largest difference of the scores:", f"{(same - q @ keys.T).abs().max():.0e}")

# %% [markdown]
# `multiply_keys` has that layout in one line. (`n` is $D/16$, and `groups` counts groups of 8 tokens.)

# %%
excerpt(decode_attention, "def multiply_keys(", "@cute.jit\ndef softmax")

# %% [markdown]
# ### Weights that stay in their lane
#
# The scores of 16 tokens come out as two *result* fragments. The second product wants the weights as its *right*
# operand, with a token per row and a head per column. **Look for** lane 13 in both.

# %% tags=["hide-input"]
# @title Figure: scores and weights, in the same lanes
fig, axes = plt.subplots(1, 2, figsize=(9, 4.2), width_ratios=(2, 1), layout="constrained")
draw_fragment(axes[0], 8, 16, lambda r, c: 4 * r + c % 8 // 2, "scores, as they come out")
draw_fragment(axes[1], 16, 8, lambda r, c: 4 * c + r % 8 // 2, "weights, as they go in")
axes[0].set(xlabel="tokens", ylabel="heads (7 are used)")
axes[1].set(xlabel="heads (7 are used)", ylabel="tokens")
axes[0].axvline(7.98, color="white", linewidth=4)
plt.show()

# %% [markdown]
# It has head 3 and tokens 2, 3, 10 and 11 in both. So scores become weights where they are: `scores[(p, 0), 0, i]`, for
# token $2c + p$ of result $i$. What lanes do exchange is a head's maximum, and its factor for acc:

# %%
excerpt(decode_attention, "    m_new = m\n    for i in range_constexpr(scores", "@cute.jit\ndef multiply_values")
excerpt(decode_attention, "@dataclass(frozen=True)", folded="Step 3, the whole kernel")

# %% [markdown]
# (`multiply_values` renumbers too: exercise 3.) Is the kernel right, and how many instructions does it take?

# %%
kernel = DecodeAttention(H, K, D, padded=True, splits=2)
error, report = attend(kernel, inputs(kernel, rows=2, slots=160, position=[150, 77], start=[5, 70]))
on_tensor_cores = per_token(DecodeAttention(H, K, D, splits=1 if LONG < 256 else 4))
print(f"error {error:.0e}")
print(f"{'':24}{'CUDA cores':>14}{'tensor cores':>14}")
for kind, number in (by_kind(on_cuda_cores) | {"all": on_cuda_cores.total()}).items():
    print(f"{kind:24}{number:14.1f}{(by_kind(on_tensor_cores) | {'all': on_tensor_cores.total()})[kind]:14.1f}")
assert error < 3e-2
fewer = on_cuda_cores.total() / on_tensor_cores.total()

# %% tags=["hide-input"]
# @title Your bet
second_bet = bet(
    f"{fewer:.0f} times fewer instructions. At 256 rows with 1,024 tokens, how many times as fast as step 2 is step 3?",
    (1, 15, 0.1),
    unit="times",
)

# %% tags=["hide-input"]
# @title What became of the bet
gain = us["attention-split", LARGE] / us["attention-cute", LARGE]
second_bet.result(gain)

# %% [markdown]
# {{ gain:.1f }} times. There was no more to win: step 2 was at {{ 100 * rate["attention-split", LARGE]:.0f }}% of a
# copy, and step 3 is at {{ 100 * rate["attention-cute", LARGE]:.0f }}%. It **is** memory-bound. {{ assert
# rate["attention-cute", LARGE] > 0.9 }} Seven heads fill seven of the first product's 16 rows, so more than half of its
# work is wasted. It doesn't matter: products are {{ by_kind(on_tensor_cores)["matrix products"]:.1f }} of {{
# on_tensor_cores.total():.1f }} instructions.
#
# ## 9 · What made it faster?
#
# Step 3 has fewer instructions, and it needs so few registers per token that more bytes are in flight. (Its sums are
# spread over all lanes of the warp, where step 2 keeps 7 × 8 of them in each lane.) Which was it? Change one thing at a
# time. *Step 2, two tiles* (`rlcourse/course/kernels/decode_ahead.py`) has twice the bytes in flight. That halves
# $t_\text{latency}$, from {{ of_step_2["latency"]:.0f }} µs to {{ of_step_2["latency"] / 2:.0f }}. Then
# $t_\text{issue}$, still {{ of_step_2["issue"]:.0f }} µs, is the longest.

# %% tags=["hide-input"]
# @title Your bet
third_bet = bet(
    "256 rows with 1,024 tokens: step 2 with twice its bytes in flight, and nothing else. How many times as fast?",
    (0.2, 2, 0.05),
    unit="times",
)

# %% tags=["hide-input"]
# @title What became of the bet
third_bet.result(us["attention-split", LARGE] / us["attention-split-ahead", LARGE])

# %% [markdown]
# Only {{ us["attention-split", LARGE] / us["attention-split-ahead", LARGE]:.2f }} times. So the longest time isn't the
# rule. **Look for** one that turns the middle columns, in µs, into the last.

# %% tags=["hide-input"]
# @title Table: three lower bounds, and the measured time
from rlcourse.kernels.decode_ops import choose_blocks, choose_splits


def chosen(rows: int, slots: int) -> DecodeAttention:
    """The kernel of step 3 as the package calls it on an H200."""
    blocks = choose_blocks(rows * K, slots, h200.multiprocessors, hopper=True)
    return DecodeAttention(H, K, D, splits=choose_splits(rows * K, slots, h200.multiprocessors), **blocks)


two_tiles = per_token(AheadDecode(H, K, D, splits=2 if LONG < 256 else 4))
step_3 = chosen(*LARGE)
NAMES = {
    "attention-simple": "step 1: simple", "attention-split": "step 2: split",
    "attention-split-ahead": "step 2, two tiles", "attention-cute": "step 3: tensor cores",
}  # fmt: skip
seen = {  # step 3: keys and values of a tile, for each warp
    "attention-simple": times(SimpleDecode(H, K, D), 128 * 32, on_cuda_cores),
    "attention-split": of_step_2,
    "attention-split-ahead": times(AheadDecode(H, K, D, splits=2), 128 * 64, two_tiles),
    "attention-cute": times(step_3, 16 * step_3.tiles * step_3.warps * 4 * D, on_tensor_cores),
}
lines = ["| kernel | MB in flight | bytes | latency | issue | measured |", "| --- " * 6 + "|"]
for name, found in seen.items():
    parts = " | ".join(f"{found[part]:.0f}" for part in ("bytes", "latency", "issue"))
    lines.append(f"| {NAMES[name]} | {found['MB']:.1f} | {parts} | {us[name, LARGE]:.0f} |")
display(Markdown("\n".join([*lines, "", provenance(record)])))
longest = {name: max(found["bytes"], found["latency"], found["issue"]) for name, found in seen.items()}
added = {name: max(found["bytes"], found["latency"] + found["issue"]) for name, found in seen.items()}
off = [max(abs(rule[name] / us[name, LARGE] - 1) for name in seen) for rule in (longest, added)]
more = seen["attention-cute"]["MB"] / of_step_2["MB"]
gain_of_sum = added["attention-split"] / added["attention-split-ahead"]
gain_measured = us["attention-split", LARGE] / us["attention-split-ahead", LARGE]

# %% [markdown]
# A roofline takes the longest, and is off by up to {{ 100 * off[0]:.0f }}%. **Add** latency and issue, take the bytes
# if they're longer, and every row is within {{ 100 * off[1]:.0f }}%. {{ assert off[1] < 0.16 and off[0] > 0.4 }} That
# fits section 5's loop: a warp requests a tile, waits for it, then computes, and **while it computes, it requests
# nothing**. Two tiles don't change that: in the machine code a round's loads come after nearly all of its arithmetic.
# <br><small>A test of this kernel disassembles it.</small>
#
# The sum gets the times about right, not the gain: it says {{ gain_of_sum:.2f }} where we measured {{ gain_measured:.2f
# }}. {{ assert gain_of_sum > gain_measured + 0.15 }} So what do the warps spend their time on? Nsight Compute (`ncu`)
# looks: in each cycle, which warps could issue, and what the others wait for, their *stall reasons*. **Look for** what
# the second tile changed.

# %% tags=["hide-input"]
# @title Table: what warps wait for, by Nsight Compute
REASONS = {
    "memory": ["long_scoreboard"],
    "a result": ["wait", "short_scoreboard", "math_pipe_throttle", "dispatch_stall", "mio_throttle"],
    "ready": ["selected", "not_selected"],
}
stalls = load_record("stalls", "NVIDIA H200")
profiled = {row["variant"]: row for row in stalls["results"]}
waits = {}
lines = ["| kernel | a scheduler issues | a warp waits for memory | for a result | is ready |", "| --- " * 5 + "|"]
for name, row in profiled.items():
    whole = sum(
        value
        for key, value in row.items()
        if key not in ("variant", "shape", "us", "issue_active", "warps", "instructions")
    )
    waits[name] = {kind: 100 * sum(row[reason] for reason in reasons) / whole for kind, reasons in REASONS.items()}
    shares = " | ".join(f"{share:.0f}%" for share in waits[name].values())
    lines.append(f"| {NAMES[name]} | in {row['issue_active']:.0f}% of cycles | {shares} |")
display(Markdown("\n".join([*lines, "", f"The rest is mostly barriers; {provenance(stalls)}"])))
one, two, best = (profiled[f"attention-{name}"] for name in ("split", "split-ahead", "cute"))
waits_one, waits_two, waits_best = (waits[row["variant"]] for row in (one, two, best))

# %% [markdown]
# With the second tile, warps wait for memory {{ waits_two["memory"]:.0f }}% of their time instead of {{
# waits_one["memory"]:.0f }}%. But now they wait for results of their own {{ waits_two["a result"]:.0f }}% instead of {{
# waits_one["a result"]:.0f }}%, and a scheduler, with {{ two["warps"]:.1f }} warps to choose from, issues in {{
# two["issue_active"]:.0f }}% of cycles instead of {{ one["issue_active"]:.0f }}%. {{ assert waits_two["a result"] >
# waits_one["a result"] + 8 }} One wait took the other's place, and none of our bounds counts it.
#
# Step 3 waits for memory most, {{ waits_best["memory"]:.0f }}% of its time, and is the fastest. So a stall reason isn't
# a verdict: at {{ 100 * rate["attention-cute", LARGE]:.0f }}% of a copy, memory is all there's left to wait for. Its {{
# fewer:.0f }} times fewer instructions and {{ more:.0f }} times the bytes in flight cut both parts of the sum, which
# now take less time than the bytes. {{ assert seen["attention-cute"]["latency"] + seen["attention-cute"]["issue"] <
# seen["attention-cute"]["bytes"] }}
#
# So that's what the roofline left out: **times overlap only if the program makes them**.
#
# ## 10 · RoPE and the cache write in the same launch
#
# Before attention, a decode step rotates the new query and key (RoPE) and writes key and value to the cache. How many
# operators is that in eager PyTorch?

# %% tags=["hide-input"]
# @title Counting operators of eager PyTorch
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


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def eager_attention(q, k, v, cos, sin, keys, values, rows, position, mask):
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


rows, n = 16, 456
new = [torch.randn(rows, heads, D).bfloat16() for heads in (H, K, K)]
angle = 6 * torch.rand(rows, D // 2)
cos, sin = (torch.cat([f(angle)] * 2, dim=1).bfloat16() for f in (torch.cos, torch.sin))
keys, values = torch.randn(2, rows, K, n, D).bfloat16().unbind(0)
where, mask = torch.full((rows,), n - 1), torch.zeros(rows, 1, 1, n).bfloat16()
each = torch.arange(rows)
with CountOperators() as eager:
    eager_attention(*new, cos, sin, keys, values, each, where, mask)
print(f"{eager.calls.total()} operators: " + ", ".join(f"{count} {name}" for name, count in eager.calls.most_common()))
cannot_be_avoided = 4 * rows * K * (n - 1) * D + 2 * rows * D * (2 * H + 4 * K + 1)
print(f"{eager.bytes / 1e6:.1f} MB; reading the cache once and the new token: {cannot_be_avoided / 1e6:.1f} MB")

# %% [markdown]
# That's {{ eager.bytes / cannot_be_avoided:.0f }} times the bytes it must move, most of them keys and values repeated
# for each query head. {{ assert eager.bytes > 10 * cannot_be_avoided }} The fused kernel does all of it in one launch,
# thanks to two ideas.
#
# **RoPE stays in a lane.** Dimension $i$ is rotated with dimension $i + D/2$. With section 8's numbering both are in
# the same lane.

# %%
excerpt(decode_new_token, "    for j in range_constexpr(n // 2):", "@cute.jit\ndef write_to_cache")

# %% [markdown]
# **The new token never comes from the cache**, since one CTA writes it while others read. One warp of the last split
# has it in registers, writes it **and** begins its softmax with it. Every loop over the cache stops just before it.
# Each lane works for two heads, side by side in `acc`, so two neighbouring entries take the same value.

# %%
excerpt(decode_new_token, "    product = Float32(0.0)")

# %% [markdown]
# Everything at once in the interpreter, each row at another position, with nan in all slots that it must not see:

# %%
from rlcourse.kernels.decode_new_token import fused_decode_attention_reference
from rlcourse.kernels.decode_ops import fused_decode_attention

SLOTS = 160
CASES = {  # position and start of a row
    "middle": (77, 0), "left padding": (120, 31), "one token": (0, 0), "only itself": (50, 50),
    "full cache": (SLOTS - 1, 0), "idle row": (-1, 0), "past the cache": (SLOTS, 0),
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
    print(f"{name:17} error {error:.0e}, slots written: {changed[0]} of keys, {changed[1]} of values")
    assert error < 3e-2 and changed == [int(0 <= position[row] < SLOTS)] * 2

# %% [markdown]
# ## 11 · How long it takes
#
# All kernels at both sizes. `sdpa` is PyTorch's attention, with repeated keys and values or with shared ones
# (`enable_gqa`). *Step 3, reads early* uses a feature of Hopper: a kernel may start before the previous one has ended,
# and waits before it uses that one's results. Old tokens aren't among them, so they're requested before the wait. As in
# lesson 08, neither the host nor the cache helps. **Look for** the distance from the dotted line.

# %% tags=["hide-input"]
# @title Figure: the record
GROUPS = {
    "Attention": {
        "attention-sdpa-repeat": "sdpa, repeated", "attention-sdpa-gqa": "sdpa, enable_gqa",
        "attention-flashinfer": "FlashInfer", **NAMES, "attention-cute-ahead": "step 3, reads early",
    },
    "With RoPE and the cache write": {
        "fused-eager": "eager, repeated", "fused-compiled": "torch.compile, repeated",
        "fused-sdpa-gqa": "eager, enable_gqa", "fused-cute": "step 3, fused",
    },
}  # fmt: skip
fig, axes = plt.subplots(
    2, 1, figsize=(9, 6), sharex=True, layout="constrained", height_ratios=[len(group) for group in GROUPS.values()]
)
for ax, (title, group) in zip(axes, GROUPS.items(), strict=True):
    for size, color, marker, side in ((SMALL, BLUE, "o", -1), (LARGE, ORANGE, "s", 1)):
        for y, variant in enumerate(group):
            value = us[variant, size]
            ax.plot(value, y, color=color, marker=marker, markersize=8, linestyle="")
            label = f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            ax.annotate(label, (value, y), (8 * side, 0), textcoords="offset points", va="center", bbox=box,
                        ha="left" if side > 0 else "right")  # fmt: skip
        label = f"{size[0]} rows × {size[1]:,} tokens; dotted: the same bytes at a copy's rate"
        ax.plot([], [], color=color, marker=marker, linestyle="", label=label)
        ax.axvline(4e-3 * K * D * math.prod(size) / COPY, color=color, linestyle=":")
    ax.set_yticks(range(len(group)), list(group.values()))
    ax.set(xscale="log", xlim=(0.7, 4000), ylim=(len(group) - 0.5, -0.5), title=title)
    ax.grid(axis="x")
axes[-1].set_xlabel(f"µs per call, one layer; {provenance(record)}")
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center")
plt.show()
large_floor = 4e-3 * K * D * math.prod(LARGE) / COPY
best = {
    size: min(us[v, size] for v in ("fused-eager", "fused-compiled", "fused-sdpa-gqa")) for size in (SMALL, LARGE)
}  # fmt: skip

# %% [markdown]
# At the large size, step 3 is within {{ 100 * us["attention-cute", LARGE] / large_floor - 100:.0f }}% of its bytes,
# ahead of FlashInfer and PyTorch. {{ assert us["attention-cute", LARGE] < min(us["attention-flashinfer", LARGE],
# us["attention-sdpa-gqa", LARGE]) }} At the small size, no kernel comes near: a call is a chain of waits. Reading
# early hides some of them, and saves {{ us["attention-cute", SMALL] - us["attention-cute-ahead", SMALL]:.1f }} µs.
#
# RoPE and the cache write add {{ 100 * us["fused-cute", SMALL] / us["attention-cute", SMALL] - 100:.0f }}% at the small
# size and {{ 100 * us["fused-cute", LARGE] / us["attention-cute", LARGE] - 100:.0f }}% at the large one to step 3
# without reading early. The fused kernel is {{ best[SMALL] / us["fused-cute", SMALL]:.1f }} times as fast as the best
# of the three PyTorch versions at the small size, {{ best[LARGE] / us["fused-cute", LARGE]:.1f }} times at the large
# one. The best isn't the same: with few rows it's `torch.compile`, with many `enable_gqa`. {{ assert best[SMALL] ==
# us["fused-compiled", SMALL] and best[LARGE] == us["fused-sdpa-gqa", LARGE] }} Measure at both ends.
#
# ## Check yourself
#
# 1. Somebody replaces `acq_rel` with `relaxed`. All tests of results pass, a thousand times. Is it right?
#
# <details><summary>Answer</summary>
# No. Nothing orders the partials before the counter any more.
# </details>
#
# 2. A kernel reads every byte once, in whole sectors, and reaches half of the bandwidth. What now?
#
# <details><summary>Answer</summary>
# Work out its three lower bounds. If none is near what you measured, ask which of them take turns.
# </details>
#
# ## Exercises
#
# [exercises/09_decode_attention.ipynb](../exercises/09_decode_attention.ipynb): merge what others have normalised,
# choose splits, load an operand of a tensor core, separate two causes, and write a kernel of one warp. Then go on to
# [10 · A faster kernel in a slower loop](10_faster_kernel_slower_loop.ipynb).
#
# ## Further reading
#
# - Milakov and Gimelshein 2018, *Online normalizer calculation for softmax*, arXiv:1805.02867.
# - Dao et al. 2022, *FlashAttention*, arXiv:2205.14135.
# - Dao, Haziza, Massa and Sizov 2023, *Flash-Decoding for long-context inference*.
# - Ye et al. 2025, *FlashInfer*, arXiv:2501.01005.
# - Volkov 2010, *Better Performance at Lower Occupancy*, GTC.
# - NVIDIA, *PTX ISA*: `mma.m16n8k16`, and the memory consistency model.
