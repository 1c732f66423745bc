# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# Lesson 06 left a decode step of `generate` far above its byte floor. How close to the floor can we get without
# touching the model? We climb a ladder of six rungs, with the same weights on each. On the way an obvious improvement
# makes things worse, the largest gain comes from code that nobody wrote, and a program turns slow while it stays right:
# a clue to lesson 06's mystery.
#
# **You will learn**
#
# - to climb from a decoder without a cache to one CUDA graph per step;
# - why a static cache alone can be slower, and why you want one anyway;
# - what a CUDA graph is, by writing one in 20 lines;
# - that `generate` compiles itself, what breaks that, and how to count the pieces;
# - what answers of different lengths cost, and how to schedule them.
#
# You need [lesson 06](06_where_time_goes.ipynb): launches, the byte floor, the three kinds of slow.

# %%
import dataclasses
import logging
import statistics
import time

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from IPython.display import Markdown, display
from matplotlib.patches import Patch, Rectangle
from torch import nn
from transformers.utils import logging as transformers_logging

from rlcourse.course import pick
from rlcourse.course.widgets import bet, explorer
from rlcourse.measure.plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION
from rlcourse.measure.records import load_record, provenance
from rlcourse.measure.shapes import model_shape
from rlcourse.policy import load_policy
from rlcourse.rollout import make_engine
from rlcourse.rollout.hf import HFEngine
from rlcourse.sampling import GREEDY, Sampling
from rlcourse.tasks import load_task

transformers_logging.set_verbosity_error()
policy, task = load_policy("embedded"), load_task("minigsm")
model, shape, qwen = policy.model.eval(), model_shape("embedded"), model_shape("Qwen/Qwen2.5-0.5B")
prompts = [policy.prompt(p.question) for p in task.problems("train")[:64]]

# %% [markdown]
# ## 1 · The ladder, from below
#
# Here's a decode step of 16 rows, with the shape of Qwen2.5-0.5B. The first three rungs are those of lesson 06. **Look
# for** the step back, and for how far the third still is from the floor.

# %% tags=["hide-input"]
# @title Figure: the first three rungs
record = load_record("decode", "NVIDIA H200")
RUNGS = {(row["variant"], row["rows"]): row for row in record["results"]}
OURS = "graph-exact"  # the variant with our kernels
NAMES = {
    "hf-dynamic": "generate, dynamic cache",
    "hf-static": "generate, static cache",
    "hf-static-compiled": "… and compiled",
    "graph-eager": "our step, CUDA graph",
    "graph-compiled": "… and compiled",
    OURS: "our kernels, CUDA graph",
}
rungs = [RUNGS[name, 16] for name in NAMES]
bottom, static, fused, own, own_compiled, top = rungs
floor_ms = bottom["floor_ms"]


def draw_ladder(rungs: list[dict]) -> None:
    """The time of each rung on a logarithmic scale, what runs in it, and the floor."""
    _, ax = plt.subplots(figsize=(9, 1.1 + 0.4 * len(rungs)), layout="constrained")
    for place, (row, color) in enumerate(zip(rungs, (BLUE, SKY, ORANGE, PURPLE, VERMILION, GREEN), strict=False)):
        ax.plot(row["ms_per_step"], place, color=color, marker="o", markersize=9)
        each = row["launches_a_step"]
        launches = f"{each:,.{0 if each > 10 else 1}f} launches" if each >= 1 else f"1 launch per {1 / each:.0f} steps"
        words = f"{row['ms_per_step']:.2f} ms: {row['kernels_a_step']:,.0f} kernels, {launches}"
        ax.text(1.2 * row["ms_per_step"], place, words, va="center", fontsize=9)
    ax.axvline(floor_ms, color=BLACK, linestyle=":", label=f"byte floor, {floor_ms:.2f} ms")
    ax.set_yticks(range(len(rungs)), [*NAMES.values()][: len(rungs)])
    ax.set_ylim(len(rungs) - 0.4, -0.6)
    ax.set(
        xscale="log", xlim=(0.2, 2000), xlabel="ms per step", title=f"A decode step of 16 rows, {provenance(record)}"
    )
    ax.set_xticks([0.3, 1, 3, 10, 30, 100], [0.3, 1, 3, 10, 30, 100])
    ax.minorticks_off()
    ax.grid(axis="x")
    ax.legend(loc="lower right")
    plt.show()


draw_ladder(rungs[:3])

# %% [markdown]
# The second rung is the step back. {{ assert static["ms_per_step"] > bottom["ms_per_step"] }} The third is {{
# static["ms_per_step"] / fused["ms_per_step"]:.1f }} times as fast, with {{ fused["launches_a_step"]:.0f }} launches
# instead of {{ static["launches_a_step"]:,.0f }}, and `generate` compiles its step only with the second rung's cache.
# **How can a slower cache buy the largest gain of all?** {{ assert max(range(5), key=lambda i: rungs[i]["ms_per_step"]
# / rungs[i + 1]["ms_per_step"]) == 1 }} That's sections 2 to 4.
#
# And above? Three rungs are left: a decode step of our own in PyTorch, recorded as one CUDA graph; the same, compiled;
# and one with kernels of our own. All six draw their tokens from the same distribution.

# %% tags=["hide-input"]
# @title Your bet
top_bet = bet(
    f"16 rows. The compiled step of `generate` takes {fused['ms_per_step']:.1f} ms, its bytes {floor_ms:.2f} ms. How "
    "long does the step on the last rung take?",
    (0.2, 4.0, 0.05),
    "ms",
)

# %% [markdown]
# Section 5 has the answer. This notebook itself runs on your CPU with the embedded model: the first two rungs, and our
# own step without its graph.
#
# ## 2 · Keys and values
#
# The simplest decoder feeds the model the whole text, takes the last logits, appends a token and starts again. It
# recomputes every old position, with the same result. What does a new token need from them? Only attention looks back,
# at **keys and values**, and those depend on nothing that comes later. So keep them. The prompt goes through at once
# (*prefill*), then **one token** per step (*decode*).

# %%
from transformers import DynamicCache

NEW = 24


@torch.no_grad()
def decode_without_cache(prompt: list[int], new_tokens: int) -> list[int]:
    """Greedy tokens; the model works on the whole text for each of them."""
    ids = list(prompt)
    for _ in range(new_tokens):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@torch.no_grad()
def decode_with_cache(prompt: list[int], new_tokens: int, cache) -> list[int]:
    """The same tokens; the model sees the prompt once, then one token a step."""
    logits = model(torch.tensor([prompt]), past_key_values=cache).logits[0, -1]
    tokens = [int(logits.argmax())]
    while len(tokens) < new_tokens:
        logits = model(torch.tensor([tokens[-1:]]), past_key_values=cache).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens


cache = DynamicCache(config=model.config)
assert decode_with_cache(prompts[0], NEW, cache) == decode_without_cache(prompts[0], NEW)
print(f"{len(prompts[0])} tokens of prompt, {NEW} new ones; keys of the first layer:", end=" ")
print(list(cache.layers[0].keys.shape), "= [rows, kv heads, tokens, head dim]")

# %% [markdown]
# A prompt of 64 tokens with 256 new ones makes the first decoder work on {{ sum(64 + t for t in range(256)):,.0f }}
# positions and the second on {{ 64 + 256 - 1 }}. The first number grows with the square of the length.
#
# ### It grows, and that costs
#
# But a `DynamicCache` grows by `torch.cat`, which takes new memory and copies the **whole cache** there, in every
# layer, at every step. That's quadratic again, with a smaller constant. The remedy is to take the memory at the start.
# A **static cache** has a fixed number of *slots*, zeros at first. A step writes into slot number `slot` and attends to
# **all** slots, with a mask over those that are still empty. **Look for** what each copies.

# %% tags=["hide-input"]
# @title Figure: two caches over three steps
COLORS = {"copied": ORANGE, "stays where it is": SKY, "written": GREEN, "empty, masked": "white"}
fig, axes = plt.subplots(1, 2, figsize=(9.5, 2.1), sharey=True, layout="constrained")
for ax, (name, room) in zip(axes, (("dynamic: a new tensor at each step", 0), ("static: nine slots", 9)), strict=True):
    for y, filled in enumerate((4, 5, 6)):
        for slot in range(room or filled + 1):
            kind = "written" if slot == filled else "empty, masked" if slot > filled else list(COLORS)[bool(room)]
            ax.add_patch(Rectangle((slot, y), 0.9, 0.8, facecolor=COLORS[kind], edgecolor="#999999"))
    ax.set(xlim=(-0.1, 9.1), ylim=(3, -0.2), title=name, xticks=[], yticks=[0.4, 1.4, 2.4])
    ax.set_yticklabels(["a step", "the next", "the next"])
    ax.tick_params(length=0)
    ax.spines[["bottom", "left"]].set_visible(False)
handles = [Patch(facecolor=color, edgecolor="#999999", label=kind) for kind, color in COLORS.items()]
fig.legend(handles=handles, loc="outside lower center", ncols=4)
plt.show()

# %% [markdown]
# By hand, for one row and one head:

# %%
torch.manual_seed(0)
SLOTS, filled, head_dim = 9, 5, 4
k, v, q = torch.randn(3, 1, head_dim).unbind(0)  # of the new token
keys, values = torch.randn(2, filled, head_dim).unbind(0)  # of those before it

grown_keys, grown_values = torch.cat([keys, k]), torch.cat([values, v])
dynamic_out = (q @ grown_keys.T / head_dim**0.5).softmax(-1) @ grown_values

static_keys, static_values = F.pad(keys, (0, 0, 0, SLOTS - filled)), F.pad(values, (0, 0, 0, SLOTS - filled))
address, slot = static_keys.data_ptr(), torch.tensor([filled])  # a tensor: the host need not know which slot it is
static_keys.index_copy_(0, slot, k)
static_values.index_copy_(0, slot, v)
scores = q @ static_keys.T / head_dim**0.5
weights = scores.masked_fill(torch.arange(SLOTS) > slot, -torch.inf).softmax(-1)

print("weights over 9 slots:", [round(w, 3) for w in weights[0].tolist()])
print("same output:", torch.allclose(weights @ static_values, dynamic_out), end="; ")
print("same address:", static_keys.data_ptr() == address, end="; and of the grown keys:")
print(" same address:", grown_keys.data_ptr() == keys.data_ptr())
lost = scores.softmax(-1)[0, filled + 1 :].sum().item()
assert torch.allclose(weights @ static_values, dynamic_out) and static_keys.data_ptr() == address

# %% [markdown]
# Forget the mask, and an empty slot gets the score 0, so a weight of $e^0 = 1$ before normalising. Here {{ 100 *
# lost:.0f }}% of the weight would go to empty slots, without an error. {{ assert lost > 0.1 }}
#
# Is it faster? One layer's attention for 8 rows, the dynamic cache at its length, the static one with room for 512:

# %% tags=["hide-input"]
# @title Table: one layer's attention, by tokens in the cache


def median_us(*runs, repeats: int = pick(30, 200)) -> list[float]:
    """Median microseconds of a call of each. They take turns, so that what disturbs one disturbs the others."""
    times = [[] for _ in runs]
    for _ in range(repeats + 5):
        for run, of_run in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            of_run.append(time.perf_counter() - start)
    return [1e6 * statistics.median(of_run[5:]) for of_run in times]


def grow(q, keys, values, k, v):
    keys, values = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
    return F.scaled_dot_product_attention(q, keys, values)


def write(q, keys, values, k, v, slot, mask):
    keys.index_copy_(2, slot, k)
    values.index_copy_(2, slot, v)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


new_k, new_v, query = torch.randn(3, 8, shape.kv_heads, 1, shape.head_dim).unbind(0)
full = torch.randn(2, 8, shape.kv_heads, 512, shape.head_dim)
took = {}
for t in (32, 128, 511):
    part = [x[:, :, :t].contiguous() for x in full]
    slot, mask = torch.tensor([t]), (torch.arange(512) <= t)[None, None, None]
    took[t] = median_us(
        lambda part=part: grow(query, *part, new_k, new_v),
        lambda slot=slot, mask=mask: write(query, *full, new_k, new_v, slot, mask),
    )
    print(f"{t:4} tokens: dynamic {took[t][0]:7,.0f} µs, static {took[t][1]:7,.0f} µs")

# %% [markdown]
# A short text pays for all 512 slots: {{ took[32][1] / took[32][0]:.1f }} times as long at 32 tokens. {{ assert
# took[32][1] > 1.5 * took[32][0] }} A full cache gains, since nothing is copied any more. {{ assert took[511][0] > 1.1
# * took[511][1] }} On the GPU there's a second price: masks and writes are launches, {{ static["launches_a_step"] -
# bottom["launches_a_step"]:.0f }} more of them, in a step that waits for its launches. {{ assert
# static["launches_a_step"] > 1.1 * bottom["launches_a_step"] }} So that's the step back.
#
# What the static cache buys is something else: **every step is the same program**, with the same shapes and addresses,
# and what changes (the slot, the mask, the token) is data.
#
# ## 3 · A CUDA graph, by hand
#
# A program that's the same at every step can be recorded once and replayed without the host. That's all a CUDA graph
# is: kernels, and the **addresses** they read and write. PyTorch can call us whenever it's about to run an operation,
# so we can build one for the CPU:

# %%
from torch.utils._python_dispatch import TorchDispatchMode


class Tape(TorchDispatchMode):
    """Writes down what a program does, with the tensors that it does it to, and does it again."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is torch.ops.aten._local_scalar_dense.default:  # what .item() and `if tensor:` come down to
            raise RuntimeError("the host asks for a number in the middle of the recording")
        result = operation(*args, **(kwargs or {}))
        if not operation.is_view:  # a view is another name for the same memory: nothing runs
            self.calls.append((operation, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for operation, args, kwargs, result in self.calls:
            again = operation(*args, **kwargs)
            if not operation._schema.is_mutable:  # what was not written in place goes to where it went at first
                pairs = zip(*(x if isinstance(x, tuple | list) else [x] for x in (result, again)), strict=True)
                for old, new in pairs:
                    old.copy_(new)


a = torch.ones(3)
with Tape() as tape:
    doubled = a * 2
a.fill_(10.0)
tape.replay()
print(f"{len(tape.calls)} call; after a.fill_(10) and a replay: {doubled.tolist()}")

# %% [markdown]
# A real one: this package's decode step, with the embedded model. Everything it needs is at fixed addresses: `tokens`,
# `positions` and the cache. It writes new tokens where it read the last ones.

# %%
fast = make_engine(policy, "fast", torch.float32)
decoder = fast.decoder
ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(p) for p in prompts[:4]], batch_first=True)
lengths = torch.tensor([len(p) for p in prompts[:4]])
room = ids.shape[1] + NEW
cache = decoder.new_cache(4, room)
tokens, positions = torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.long)


def step() -> None:
    """One decode step, greedy, in place."""
    logits = decoder.decode(tokens, positions, cache, room)
    tokens.copy_(logits.argmax(-1))
    positions.add_(1)


@torch.no_grad()
def decode_by(run) -> torch.Tensor:
    """NEW - 1 times `run` from the end of the prompts: the tokens [4, NEW]."""
    tokens.copy_(first)
    positions.copy_(lengths)
    found = [tokens.clone()]
    for _ in range(NEW - 1):
        run()
        found.append(tokens.clone())
    return torch.stack(found, dim=1)


with torch.no_grad():
    first = decoder.prefill(ids, lengths, cache).argmax(-1)
by_steps = decode_by(step)
with torch.no_grad(), Tape() as tape:
    step()
by_replay = decode_by(tape.replay)
assert torch.equal(by_steps, by_replay)
print(f"{len(tape.calls)} operations on the tape, replayed {NEW - 1} times: the same tokens")
print(repr(policy.tokenizer.decode(by_replay[0])))

# %% [markdown]
# The decoder's Python ran once, and {{ NEW - 1 }} tokens for each row came out. (It saves no time here: Python plays
# our tape, a GPU its own.) No `if` stops a row at its end: what follows the first `<|im_end|>` is computed and ignored.
# Now update the model, as training does, and give the decoder its weights in **new** tensors:

# %% tags=["hide-input"]
# @title Your bet
FATES = ["it raises an error", "it uses the new weights", "it goes on with the old weights"]
stale_bet = bet("`decoder.norm = new_norm`, then replays. What do they compute?", FATES)

# %%
old_norm, kept, new_norm = decoder.norm, decoder.norm.clone(), -decoder.norm  # the new one writes garbage
decoder.norm = new_norm
swapped, wanted = decode_by(tape.replay), decode_by(step)
decoder.norm = old_norm
old_norm.copy_(new_norm)  # the new numbers in the old place
copied = decode_by(tape.replay)
old_norm.copy_(kept)
stale_bet.result(FATES[2] if torch.equal(swapped, by_steps) else FATES[1])
print("a new tensor: the replay writes the old tokens:", torch.equal(swapped, by_steps))
print("              a step without the tape does:    ", torch.equal(wanted, by_steps))
print("new numbers in the old tensor: the replay writes the new tokens:", torch.equal(copied, wanted))

# %% [markdown]
# The tape has addresses, not names. {{ assert torch.equal(swapped, by_steps) and torch.equal(copied, wanted) and not
# torch.equal(wanted, by_steps) }} It keeps sampling from the old policy, and nothing fails but the training. So the
# package's engine **copies** new weights over the old ones. Three more ways to break a recording:

# %% tags=["hide-input"]
# @title What a tape cannot hold
count, seen = 0, torch.zeros(4)


def counts_in_python() -> None:
    global count
    count += 1
    seen.fill_(count)  # the number goes onto the tape, not the variable


with Tape() as tape_of_count:
    counts_in_python()
tape_of_count.replay()
tape_of_count.replay()
print(f"a Python number: counted {count}, after two replays still {seen[0]:.0f}")
for name, run in (
    ("`.item()`", lambda: tokens.max().item()),
    ("`if` on a tensor", lambda: tokens.fill_(0) if (tokens > 5).all() else None),
):
    try:
        with Tape():
            run()
    except RuntimeError as error:
        print(f"{name}: {error}")

# %% [markdown]
# So the rules of a recording, for the tape as for CUDA:
#
# - **fixed addresses** for inputs, outputs, weights and cache; what's new is copied there;
# - **fixed shapes**: a static cache, and a recording for each number of rows;
# - **nothing decided by the host**: no `.item()`, no `if` on a tensor;
# - **no state in Python**: a number that was recorded stays that number, without an error.
#
# On a GPU:
#
# ```python
# step()                                # once as it is: nothing may be loaded or compiled while recording
# graph = torch.cuda.CUDAGraph()
# with torch.cuda.graph(graph):         # nothing is computed, everything is written down
#     step()
# graph.replay()                        # as often as you like
# ```
#
# A graph makes launches nearly free, not kernels. Each still starts, ends, and passes its result on through memory.
#
# ## 4 · The compile that nobody asked for
#
# And the third rung? Nobody wrote a graph there. With a static cache on a GPU, `generate` compiles its decode step
# **without being asked**: `torch.compile(model.__call__, mode="reduce-overhead")`, unless `disable_compile` is set. The
# compiler fuses operations into fewer kernels, and `reduce-overhead` records each compiled piece as a **CUDA graph**. A
# dynamic cache has new shapes and addresses at every step, so there'd be nothing to replay. That's how a slower cache
# buys the largest gain.
#
# All of it depends on there being **one** piece. `torch.compile` has two halves. *Dynamo* goes through the Python code
# and collects operations in a graph; a *backend* makes a program of it. Where Dynamo meets something that it can't put
# into a graph, it ends the graph, falls back to Python, and starts a new one: a **graph break**. A backend of our own
# can note what it's given:

# %%
torch._logging.set_logs(dynamo=logging.CRITICAL)  # Dynamo warns of breaks; here they are made on purpose


def note_pieces(pieces: list):
    """A backend that compiles nothing and adds the operations of each piece to a list."""

    def backend(graph, inputs):
        pieces.append([node.name for node in graph.graph.nodes if node.op.startswith("call")])
        return graph

    return backend


class Attention(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.qkv, self.out, self.mix = nn.Linear(8, 24), nn.Linear(8, 8), mix

    def forward(self, x):
        return x + self.out(self.mix(*self.qkv(x).chunk(3, dim=-1)))


def plain(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def peeks(q, k, v):
    if k.abs().max().item() > 100:  # the host must know a number
        k = k / 2
    return plain(q, k, v)


VARIANTS = {"as it is": plain, "Dynamo may not look in": torch._dynamo.disable(plain), "reads a number": peeks}
x = torch.randn(2, 5, 8)
for name, mix in VARIANTS.items():
    torch._dynamo.reset()
    pieces = []
    torch.compile(Attention(mix), backend=note_pieces(pieces))(x)
    print(f"{name}: {len(pieces)} piece(s)")
    for piece in pieces:
        print("    ", " → ".join(piece))

# %% [markdown]
# A function that Dynamo may not look into (a hand-written kernel usually is one) cuts its caller in two: what comes
# before and what comes after. A function that reads a number is cut in two as well, where it reads, and so is its
# caller: four pieces.
#
# Now `generate` itself, with the embedded model. On a CPU it compiles only with a switch from transformers' own tests.
# We count twice: with its usual attention, and with the same attention where Dynamo may not look.

# %% tags=["hide-input"]
# @title Your bet
pieces_bet = bet(
    f"{shape.layers} layers, one break in each: how many compiled pieces run in a step?", (1, 30, 1), "pieces"
)

# %% tags=["hide-input"]
# @title `count_pieces(attention)`: `generate` with a backend that counts
from transformers import AttentionInterface, AttentionMaskInterface, CompileConfig, GenerationConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask


def count_pieces(attention=None, steps: int = 8) -> dict:
    """`generate` with a static cache and its own compile: operations in each piece, order in a step, greedy tokens."""
    fresh = load_policy("embedded").model.eval()
    if attention is not None:
        AttentionInterface.register("ours", attention)
        AttentionMaskInterface.register("ours", sdpa_mask)  # a name without a mask function gets no mask
        fresh.set_attn_implementation("ours")
    made, order = [], []

    def backend(graph, inputs):
        number = len(made)
        made.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return lambda *arguments: order.append(number) or graph(*arguments)

    compile_config = CompileConfig(backend=backend, fullgraph=False, mode=None)  # a backend of one's own has no mode
    compile_config._compile_all_devices = True
    settings = {"max_new_tokens": steps + 1, "do_sample": False, "eos_token_id": shape.vocabulary, "pad_token_id": 0}
    settings |= {"cache_implementation": "static", "compile_config": compile_config}
    ids = torch.tensor([prompts[0]])
    torch._dynamo.reset()
    tokens = fresh.generate(input_ids=ids, attention_mask=ids * 0 + 1, generation_config=GenerationConfig(**settings))
    assert len(order) % steps == 0
    return {"made": made, "order": order[-len(order) // steps :], "tokens": tokens[0, ids.shape[1] :].tolist()}


# %%
def our_attention(module, query, key, value, attention_mask, **kwargs):
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


hidden = torch._dynamo.disable(our_attention)
counted = {"may look in": count_pieces(our_attention), "may not look in": count_pieces(hidden)}
whole, broken = counted.values()
pieces_bet.result(len(broken["order"]))
for name, c in counted.items():
    print(f"Dynamo {name}: {len(c['order'])} piece(s) in a step, of", end=" ")
    print(*(c["made"][number] for number in c["order"]), "operations")
assert whole["tokens"] == broken["tokens"]  # nothing fails
of_step = [broken["made"][number] for number in broken["order"]]
of_layer = of_step[1 : 1 + (len(of_step) - 3) // shape.layers]

# %% [markdown]
# One piece became {{ len(broken["order"]) }}. {{ assert len(whole["order"]) == 1 }} Why so many? The cut goes through
# every caller: the attention, its layer, the loop over layers. Dynamo can't resume inside a loop, so it compiles what
# the layers call, function by function. The pattern {{ ", ".join(map(str, of_layer)) }} repeats: a norm; projections
# and cache write, up to the break; the output projection after it; the second norm and the MLP. {{ assert of_step[1:-2]
# == of_layer * shape.layers and len(of_layer) == 4 }} With the rotary angles first, and the last norm and the logits at
# the end, that's 4 × {{ shape.layers }} + 3.
#
# The tokens are right; it's only slow. Sound familiar? It's the clue to lesson 06's mystery. Each piece checks its
# guards (are shapes and types what they were?) and is a graph of its own to launch, and nothing is fused across a
# break. Lesson 10 shows what that costs on a GPU.
#
# ## 5 · A step of our own
#
# The compiled step takes {{ fused["ms_per_step"] / floor_ms:.0f }} times the byte floor. Why {{
# fused["launches_a_step"]:.0f }} launches, if it's one graph? Because `generate` prepares its inputs, draws the token
# and looks for the end outside it. We can write **another step** with the same result: `rlcourse/rollout/decoder.py`,
# in plain PyTorch. Four things differ.
#
# **One product instead of three.** Queries, keys and values are three products of the same input. Stacked into one
# matrix they're one, and so are the MLP's gate and up.
#
# **Heads that share keys are folded.** With grouped-query attention (Ainslie et al. 2023) several query heads share one
# key-value head: {{ qwen.heads // qwen.kv_heads }} in Qwen2.5-0.5B. The compiled step of `generate` repeats the keys
# and values until every query head has its own. But to a key-value head the heads that share it are simply **more
# queries**, rows of one product:

# %%
torch.manual_seed(0)
rows, slots, heads, kv_heads, head_dim = 8, 256, shape.heads, shape.kv_heads, shape.head_dim
q = torch.randn(rows, heads, head_dim)
keys, values = torch.randn(2, rows, kv_heads, slots, head_dim).unbind(0)


def by_repeating(q, keys, values):
    keys, values = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (keys, values))  # [rows, heads, ...]
    weights = (q[:, :, None] @ keys.transpose(2, 3) / head_dim**0.5).softmax(-1)
    return (weights @ values)[:, :, 0]


def by_folding(q, keys, values):
    folded = q.view(rows, kv_heads, heads // kv_heads, head_dim)
    weights = (folded @ keys.transpose(2, 3) / head_dim**0.5).softmax(-1)
    return (weights @ values).view(rows, heads, head_dim)


assert torch.allclose(by_repeating(q, keys, values), by_folding(q, keys, values), atol=1e-5)
repeat_us, fold_us = median_us(*(lambda f=f: f(q, keys, values) for f in (by_repeating, by_folding)), repeats=50)
print(f"{heads} heads on {kv_heads}: repeated {repeat_us:,.0f} µs, folded {fold_us:,.0f} µs")

# %% [markdown]
# Repeating takes {{ repeat_us / fold_us:.1f }} times as long, with {{ heads // kv_heads }} heads to a key-value head:
# the repeated cache has to be written, and then there is more of it to read. {{ assert repeat_us > 1.3 * fold_us }}
#
# **The token is drawn inside the step.** Made of tensor operations, the draw can be recorded with the rest. One way is
# *inversion*: put the probabilities side by side on a line from 0 to 1, draw a number $u$ on that line, and see which
# piece it falls into. The package cuts the vocabulary into *tiles*, and finds the tile first and then the token. In the
# exercises you'll fix such a draw.

# %% tags=["hide-input"]
# @title Figure: a draw by inversion
torch.manual_seed(0)
ten = torch.randn(10)
edges = torch.cat([torch.zeros(1), ten.softmax(0).cumsum(0)])
fig, ax = plt.subplots(figsize=(8, 1.5))
for i in range(10):
    ax.barh(0, edges[i + 1] - edges[i], left=edges[i], color=(SKY, ORANGE, GREEN)[i // 4], edgecolor="white")
    if edges[i + 1] - edges[i] > 0.015:  # else there is no room for its number
        ax.text((edges[i] + edges[i + 1]) / 2, 0, str(i), ha="center", va="center")
ax.axvline(0.62, color=BLACK, linewidth=2)
drawn = int((edges[1:] <= 0.62).sum())
ax.set(yticks=[], xlim=(0, 1), xlabel="u", title=f"Ten tokens in tiles of 4 (colours): u = 0.62 draws token {drawn}")
plt.show()

# %% [markdown]
# **The host looks only every few steps.** Has every row ended? To know, the host must read a flag, and that read blocks
# until the GPU has caught up. Between two looks, finished rows compute tokens that are ignored.
#
# PyTorch still runs a kernel for each operation. Recorded as one CUDA graph, our step has {{ own["kernels_a_step"]:.0f
# }} of them. The compiled step of `generate` has {{ fused["kernels_a_step"]:.0f }}. {{ assert own["kernels_a_step"] >
# 1.5 * fused["kernels_a_step"] }}

# %% tags=["hide-input"]
# @title Your bet
ROUGHLY = ["longer: more kernels", "about as long, within 10%", "less, but more than half", "less than half"]
kernels_bet = bet(
    f"{own['kernels_a_step']:.0f} kernels in one graph, nothing compiled. How long is that step beside the "
    f"{fused['ms_per_step']:.1f} ms of the compiled one, with its {fused['kernels_a_step']:.0f}?",
    ROUGHLY,
)

# %% [markdown]
# Here's the whole ladder, with the answer to your first bet as well. **Look for** what falls from rung to rung:
# launches, or kernels?

# %% tags=["hide-input"]
# @title Figure: the whole ladder
share = own["ms_per_step"] / fused["ms_per_step"]
kernels_bet.result(ROUGHLY[0 if share > 1.1 else 1 if share > 0.9 else 2 if share > 0.5 else 3])
top_bet.result(round(top["ms_per_step"], 2))
draw_ladder(rungs)
SETTINGS = {  # of vLLM: how it ran
    "vllm": "the V1 model runner in our process",
    "vllm-v2": "the V2 model runner in our process",
    "vllm-v2-process": "the V2 model runner in its own process (the default)",
}


def fastest_vllm(rows: list[dict], count: int) -> dict:
    """vLLM's best row of a record at one number of rows."""
    return max((r for r in rows if r["variant"] in SETTINGS and r["rows"] == count), key=lambda r: r["tokens_per_s"])


vllm = {n: fastest_vllm(record["results"], n) for n in (16, 64, 256)}
ahead = [RUNGS[f"{OURS}-again", n]["tokens_per_s"] / row["tokens_per_s"] for n, row in vllm.items()]
trl = {row["variant"]: row for row in load_record("step", "NVIDIA H200")["results"] if row["rows"] == 64}

# %% [markdown]
# Our plain step runs more kernels in {{ 100 * share:.0f }}% of the time. One graph waits for nothing: the GPU is busy
# for {{ 100 * own["busy"]:.0f }}% of our step, and for {{ 100 * fused["busy"]:.0f }}% of `generate`'s. {{ assert share
# < 0.9 and own["busy"] > 2 * fused["busy"] }} With launches out of the way, what's left is kernels. Compiling fuses
# some; our own go further: {{ top["kernels_a_step"]:.0f }} of them instead of {{ own["kernels_a_step"]:.0f }} make the
# step {{ own["ms_per_step"] / top["ms_per_step"]:.1f }} times as fast. {{ assert top["ms_per_step"] <
# own_compiled["ms_per_step"] < own["ms_per_step"] }} It's {{ bottom["ms_per_step"] / top["ms_per_step"]:.0f }} times as
# fast as plain `generate`, and takes {{ top["ms_per_step"] / floor_ms:.1f }} times its floor. Most of its kernels are
# in Triton; lessons 08 and 09 teach such kernels in CuTe DSL.<br><small>Fractions of launches: some come every few
# steps, and a graph may hold several steps.</small>
#
# Is that good? vLLM, the usual choice, decoded the same prompts; we ran our last rung again beside it. Over 16, 64 and
# 256 rows ours makes {{ min(ahead):.1f }} to {{ max(ahead):.1f }} times as many tokens per second. {{ assert min(ahead)
# > 1 }} vLLM knows hundreds of architectures and serves users who come and go; ours knows three, and all its rows are
# there at once.<br><small>vLLM {{ record["versions"]["vllm"] }} ran as a library, compiled, with CUDA graphs, in its
# fastest setting per number of rows: {{ " or ".join(dict.fromkeys(SETTINGS[row["variant"]] for row in vllm.values()))
# }}. Lessons 10 and 11 use other runs, so their factors differ.</small>
#
# None of this is worth anything if the answers differ. Compare the rungs that run on a CPU, first by answers, then by
# time. **Look for** what beats the dynamic cache.

# %%
ENGINES = {
    "no cache": HFEngine(policy, torch.float32, "none"),
    "dynamic cache": HFEngine(policy, torch.float32, "dynamic"),
    "static cache": HFEngine(policy, torch.float32, "static", compile=False),
    "our step": make_engine(policy, "fast", torch.float32),
}
rollouts = {name: engine.generate(prompts[:3], 1, NEW, GREEDY) for name, engine in ENGINES.items()}
reference = rollouts["no cache"]
for name, rollout in rollouts.items():
    gap = (rollout.logprobs - reference.logprobs).abs().max().item()
    assert torch.equal(rollout.completion_ids, reference.completion_ids) and gap < 1e-3
    print(f"{name:14} same tokens; log-probs differ by at most {gap:.0e}")

# %% tags=["hide-input"]
# @title Figure: the live rungs
endless = dataclasses.replace(policy, eos_ids=[shape.vocabulary])  # no token ends an answer


def step_ms(engines: dict, rounds: int) -> dict[str, float]:
    """Milliseconds per decode step of 32 rows: a rollout of 40 tokens less one of 8, the least of several, in turn.
    Of one thread, by the processor's own clock: that doesn't count what else the machine is busy with."""
    times, threads = {name: {8: [], 40: []} for name in engines}, torch.get_num_threads()
    torch.set_num_threads(1)
    for number in range(rounds + 1):
        for name, engine in engines.items():
            for count in (8, 40) if name != "no cache" or number < 2 else ():  # which takes long
                start = time.process_time()
                engine.generate(prompts[:4], 8, count, Sampling())
                times[name][count] += [time.process_time() - start] if number else []
    torch.set_num_threads(threads)
    return {name: 1e3 * (min(took[40]) - min(took[8])) / 32 for name, took in times.items()}


caches = {"no cache": "none", "dynamic cache": "dynamic", "static cache": "static"}
made = {name: HFEngine(endless, torch.float32, cache, compile=False) for name, cache in caches.items()}
live = step_ms(made | {"our step": make_engine(endless, "fast", torch.float32)}, pick(1, 8))
fig, ax = plt.subplots(figsize=(7, 2.4), layout="constrained")
for place, (ms, color) in enumerate(zip(live.values(), (BLACK, BLUE, SKY, PURPLE), strict=True)):
    ax.plot(ms, place, color=color, marker="o", markersize=9)
    ax.annotate(f"{ms:,.1f} ms", (ms, place), (9, 0), textcoords="offset points", va="center")
ax.set_yticks(range(len(live)), live)
ax.set(xscale="log", xlabel="ms per step", title="32 rows of the embedded model, one thread of this CPU")
ax.set_xticks([1, 3, 10, 30, 100, 300], [1, 3, 10, 30, 100, 300])
ax.set_xlim(0.5 * min(live.values()), 3 * max(live.values()))
ax.set_ylim(len(live) - 0.4, -0.6)
ax.grid(axis="x")
plt.show()

# %% [markdown]
# Here our step is {{ live["dynamic cache"] / live["our step"]:.1f }} times as fast as the dynamic cache, even without a
# recording. {{ assert live["our step"] < live["dynamic cache"] < live["no cache"] }} The static cache is no step back
# here: sized for these answers, it has few empty slots. {{ assert live["static cache"] < 1.25 * live["dynamic cache"]
# }}
#
# ## 6 · More rows
#
# Back to the GPU: the compiled and recorded rungs over the number of rows. **Look for** the distance between our
# kernels and the floor.

# %% tags=["hide-input"]
# @title Figure: the rungs over rows
STYLES = {
    "hf-static-compiled": ("generate, static, compiled", ORANGE, "^", "-"),
    "graph-eager": ("our step, CUDA graph", PURPLE, "v", "-"),
    "graph-compiled": ("our step, compiled, CUDA graph", VERMILION, "P", "--"),
    OURS: ("our kernels, CUDA graph", GREEN, "o", "-"),
}
fig, ax = plt.subplots(figsize=(8, 3.8), layout="constrained")
sizes = (16, 64, 256)
for name, (label, color, marker, style) in STYLES.items():
    ms = [RUNGS[name, n]["ms_per_step"] for n in sizes]
    ax.plot(sizes, ms, color=color, marker=marker, linestyle=style, label=label)
ax.plot(sizes, [RUNGS[OURS, n]["floor_ms"] for n in sizes], color=BLACK, linestyle=":", label="byte floor")
ax.set(
    xscale="log", yscale="log", xlabel="rows", ylabel="ms per step", title=f"Qwen2.5-0.5B's shape, {provenance(record)}"
)
ax.set_xticks(sizes, sizes)
ax.set_yticks([0.25, 0.5, 1, 2, 5, 10, 20], ["0.25", "0.5", "1", "2", "5", "10", "20"])
ax.minorticks_off()
ax.grid()
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()
rising, floor_rising = (RUNGS[OURS, 256][what] / RUNGS[OURS, 16][what] for what in ("ms_per_step", "floor_ms"))

# %% [markdown]
# With 16 times as many rows the last rung takes {{ rising:.1f }} times as long, since $N$ rows read $N$ caches. But its
# floor grows only {{ floor_rising:.1f }} times. {{ assert floor_rising < rising < 16 }} The floor leaves out the
# arithmetic, which grows with the rows, and the start and end of each kernel.
#
# **Explore** what binds a step of Qwen2.5-0.5B with 256 tokens per row: the host, memory, or compute. Try 1,200
# launches, then 1. At 256 rows, how far is compute below memory? From how many rows on is the step compute-bound?

# %% tags=["hide-input"]
# @title Explorer: what binds a step
from rlcourse.measure.roofline import decode_step


def draw_step(ax, rows: int, launches: int, host_us: float, gb_per_s: int, tflops: int) -> None:
    """Three times over rows, and where we are."""
    axis = sorted({*(2 ** (i / 2) for i in range(23)), rows})
    works = {n: decode_step(qwen, n, 256) for n in axis}
    lines = {
        "host: launches × time": ([launches * host_us / 1e3] * len(axis), VERMILION, "--"),
        "memory: bytes": ([1e-6 * works[n].total_bytes / gb_per_s for n in axis], BLUE, "-."),
        "compute: FLOP": ([1e-9 * works[n].total_flops / tflops for n in axis], ORANGE, ":"),
    }
    at = axis.index(rows)
    now = {label: values[at] for label, (values, _, _) in lines.items()}
    bound = max(now, key=now.get)
    for label, (values, color, style) in lines.items():
        ax.plot(axis, values, color=color, linestyle=style, label=label)
    longest = [max(values[i] for values, _, _ in lines.values()) for i in range(len(axis))]
    ax.plot(axis, longest, color=BLACK, linewidth=4, alpha=0.25, label="the longest: the step")
    ax.plot(rows, now[bound], marker="o", markersize=9, color=BLACK)
    found = f"{bound.split(':')[0]}-bound: {now[bound]:.2f} ms, {1e3 * rows / now[bound]:,.0f} tokens/s"
    ax.set_title(f"{rows} rows, {launches} launch{'es' * (launches > 1)} of {host_us:g} µs\n{found}")
    ax.set(yscale="log", xlabel="rows", ylabel="ms per step", ylim=(0.005, 600))
    ax.set_xscale("log", base=2)
    ax.legend(loc="upper left", fontsize=8)


machine = {"host_us": 10.0, "gb_per_s": 4000, "tflops": 770}
stories = [{"rows": 16, "launches": 1200}, {"rows": 16, "launches": 1}, {"rows": 1024, "launches": 1}]
controls = {"rows": (16, 1, 2048, 1), "launches": (1200, 1, 2000, 1), "host_us": (10.0, 1.0, 40.0, 0.5)}
controls |= {"gb_per_s": (4000, 50, 8000, 50), "tflops": (770, 1, 2000, 1)}
explorer(draw_step, static=[story | machine for story in stories], **controls)

# %% [markdown]
# ## 7 · Answers end at different times
#
# So far all rows had the same length. Real answers don't. Now a *slot* is a place for one row in the batch, and a
# *slot-step* is one slot for one step. There are three ways to schedule answers:
#
# - **wait**: a batch runs until its longest answer has ended;
# - **leave**: finished rows leave the batch, and the step becomes smaller;
# - **refill**: more answers wait than there are slots, and a free slot takes the next one (*continuous batching*, Yu et
#   al. 2022).
#
# **Look for** how many steps each takes.

# %% tags=["hide-input"]
# @title Your bet
SAVED = ["about half of them", "a few percent", "none at all"]
slots_bet = bet(
    "512 answers, a median of 120 tokens, 64 slots. How many steps does `leave` save, compared with `wait`?", SAVED
)


# %%
def simulate(lengths: list[int], slots: int, way: str) -> list[int]:
    """Slots in use at each step."""
    waiting, left, used = list(lengths), [], []
    while waiting or left:
        if way == "refill" or not left:  # the others begin a new batch when the old one is through
            taken, waiting = waiting[: slots - len(left)], waiting[slots - len(left) :]
            left, size = left + taken, len(left) + len(taken)
        used.append(size if way == "wait" else len(left))
        left = [n - 1 for n in left if n > 1] if way != "wait" else [n - 1 for n in left]
        if max(left, default=0) <= 0:
            left = []
    return used


torch.manual_seed(0)
lengths = (1 + torch.distributions.Geometric(1 - 0.5 ** (1 / 120)).sample((512,)).long()).clamp(max=512)
runs = {way: simulate(lengths.tolist(), 64, way) for way in ("wait", "leave", "refill")}
useful = lengths.sum().item()
print(f"median {lengths.median()} tokens, mean {lengths.float().mean():.0f}, longest {lengths.max()}")

# %% tags=["hide-input"]
# @title Figure: three ways to spend slots
fig, axes = plt.subplots(3, 1, figsize=(8, 4.6), sharex=True, sharey=True, layout="constrained")
for ax, (way, used), color in zip(axes, runs.items(), (VERMILION, ORANGE, GREEN), strict=True):
    ax.fill_between(range(len(used)), used, step="mid", color=color, alpha=0.6)
    shares = f"{useful / sum(used):.0%} of computed rows, {useful / 64 / len(used):.0%} of slot-steps"
    ax.set_title(f"{way}: {len(used):,} steps; useful: {shares}")
    ax.set(ylabel="rows", ylim=(0, 70))
axes[-1].set_xlabel("step")
saved = 1 - len(runs["leave"]) / len(runs["wait"])
slots_bet.result(SAVED[2] if saved == 0 else SAVED[1] if saved < 0.2 else SAVED[0])
plt.show()

# %% [markdown]
# *Leave* never computes a finished row, and takes exactly as many steps as *wait*: each batch goes on until its longest
# answer ends. {{ assert len(runs["refill"]) < 0.6 * len(runs["leave"]) and len(runs["leave"]) == len(runs["wait"]) }}
# On a host-bound step, which fewer rows don't shorten, that saves nothing. Only *refill* makes fewer steps. It still
# loses the tail, when nothing is left to refill with.
#
# On the GPU, `generate` waits; vLLM (measured at 16 and 64 rows) and our engine refill. **Look for** how much of its
# speed each keeps when lengths differ.

# %% tags=["hide-input"]
# @title Table: skewed lengths on the GPU
ROUNDS = 8  # the benchmark asks for this many times the answers that are decoded at once

skewed = load_record("decode-skewed", "NVIDIA H200")
lines = ["| way | rows | tokens/s | share of its rate at equal lengths |", "| --- | ---: | ---: | ---: |"]
WAYS = {
    "hf-static-compiled": "wait: `generate`, compiled",
    "vllm-v2": "refill: vLLM, V2 model runner",
    OURS: "refill: our kernels, CUDA graph",
}
UNEQUAL = {(row["variant"], row["rows"]): row for row in skewed["results"]}
kept_rate, of_schedule = {way: [] for way in WAYS}, []
for way, n in [(way, n) for way in WAYS for n in sizes if way != "vllm-v2" or (way, n) in UNEQUAL]:
    row = UNEQUAL[way, n]
    kept_rate[way].append(row["tokens_per_s"] / RUNGS[row["variant"], n]["tokens_per_s"])
    lines.append(f"| {WAYS[way]} | {n} | {row['tokens_per_s']:,.0f} | {kept_rate[way][-1]:.0%} |")
    if way == OURS:
        full = skewed["setup"]["rollouts"] * ROUNDS * row["tokens_a_row"]  # steps, if no slot were ever empty
        of_schedule.append(full / row["schedule_steps"])
display(Markdown("\n".join([*lines, "", f"{provenance(skewed)}; equal lengths: {provenance(record)}"])))
waits, _, ours = kept_rate.values()

# %% [markdown]
# `generate` keeps at most {{ 100 * max(waits):.0f }}% of its rate, our engine at least {{ 100 * min(ours):.0f }}%; more
# than half of what ours loses is the tail. {{ assert max(waits) < 0.6 < min(ours) and all(1 - most > 0.5 * (1 - kept) >
# 0 for most, kept in zip(of_schedule, ours, strict=True)) }}
#
# So the rollout is fast now. The update, a few percent of TRL's training step, is more than a third of ours: [lesson
# 12](12_update_phase.ipynb). {{ assert trl["trl-default"]["update_s"] < 0.08 * trl["trl-default"]["step_s"] and 1 / 3 <
# trl["rlcourse"]["update_s"] / trl["rlcourse"]["step_s"] < 0.42 }}
#
# ## Check yourself
#
# 1. The static cache attends to empty slots, and alone it can be slower. Why have it?
#
# <details><summary>Answer</summary>
# Every step is the same program at the same addresses: it can be compiled once, and recorded in a CUDA graph.
# </details>
#
# 2. A step takes the same time with 16 rows as with 64. Does *leave* help when answers differ in length? Does *refill*?
#
# <details><summary>Answer</summary>
# *Leave* doesn't: it makes steps smaller, not fewer. *Refill* does. With many rows, *leave* helps too.
# </details>
#
# 3. Your recorded step takes `temperature` as a Python number. You lower it after a hundred steps. What happens?
#
# <details><summary>Answer</summary>
# Nothing, silently: the recorded number is on the tape. Keep it in a tensor and write the new value into it.
# </details>
#
# ## Exercises
#
# [exercises/07_static_cache.ipynb](../exercises/07_static_cache.ipynb): write a step without an `if`, fix a draw, and
# find out how many slots to take. Then go on to
# [08 · First kernels in CuTe DSL](08_first_kernels.ipynb).
#
# ## Further reading
#
# - Ainslie et al. 2023, *GQA*, arXiv:2305.13245.
# - Yu et al. 2022, *Orca*, OSDI: continuous batching.
# - Kwon et al. 2023, *PagedAttention*, arXiv:2309.06180: a cache in pages (lesson 11).
# - Ansel et al. 2024, *PyTorch 2*, ASPLOS: Dynamo, graphs and graph breaks.
