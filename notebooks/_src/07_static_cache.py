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
# - to climb the ladder of decoding: no cache, dynamic cache, static cache, compiled step, own step, one CUDA graph;
# - why fixed shapes and fixed addresses are slower by themselves, and what they buy;
# - that `generate` may compile your model without telling you, what breaks that, and how to count the pieces;
# - what a step of our own leaves out, and how a token is drawn with one random number and without the host;
# - what answers of differing length cost, and when a step is bound by the host and when by bytes.
#
# You need [lesson 06](06_where_time_goes.ipynb): busy fraction, byte floor, Amdahl's law.

# %%
import dataclasses
import statistics
import time

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from IPython.display import Markdown, display
from transformers.utils import logging as transformers_logging

from rlcourse.course import pick
from rlcourse.measure.memory import model_shape
from rlcourse.measure.plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION
from rlcourse.policy import load_policy
from rlcourse.rollout import make_engine
from rlcourse.rollout.hf import HFEngine
from rlcourse.sampling import GREEDY, Sampling
from rlcourse.tasks import load_task

transformers_logging.set_verbosity_error()
policy, task = load_policy("embedded"), load_task("minigsm")
model, shape = policy.model.eval(), model_shape("embedded")
problems = task.problems("train")[:64]
prompts = [policy.prompt(p.question) for p in problems]
print(shape)

# %% [markdown]
# All that is measured live in this lesson is measured on the CPU, with the model that ships. It has the architecture of
# Qwen2.5 in small, so every rung of the ladder exists for it. What only a GPU can show is taken from records.
#
# Letters: $R$ rows (completions) are decoded at once, $H$ query heads, $K$ key-value heads, head size $D$, $S$ slots in
# a cache, $V$ the vocabulary.
#
# ## 1 · No cache
#
# The model takes a sequence and gives logits for the token after each of its places. So the simplest decoder feeds it
# the whole sequence, takes the last logits, appends a token, and starts again.

# %%
NEW = 24


@torch.no_grad()
def decode_without_cache(prompt: list[int], new_tokens: int) -> tuple[list[int], int]:
    """Greedy tokens, and how many places the model has worked on."""
    ids, places = list(prompt), 0
    for _ in range(new_tokens):
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        places += len(ids)
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :], places


expected, places = decode_without_cache(prompts[0], NEW)
print(repr(policy.tokenizer.decode(expected)))
print(f"a prompt of {len(prompts[0])} tokens and {NEW} new ones: the model worked on {places:,} places")

# %% [markdown]
# All places but the last were worked on before, with the same result. A prompt of $P$ tokens and $T$ new ones cost $TP
# + T(T-1)/2$ places, which grows with the square of $T$. If each place were worked on once, it would be $P + T - 1$.
#
# The same by the clock, with the package's engines: eight rows, no end token, so that every row has its full length.
# **Look for** the shape of the curve, and how far it follows the count.

# %%
endless = dataclasses.replace(policy, eos_ids=[shape.vocabulary])  # an id that is never drawn
ENGINES = {
    "no cache": HFEngine(endless, torch.float32, "none"),
    "dynamic cache": HFEngine(endless, torch.float32, "dynamic"),
    "static cache": HFEngine(endless, torch.float32, "static", compile=False),
    "own step": make_engine(endless, "fast", torch.float32),
}


def rollout_seconds(engine, some_prompts, new_tokens: int, group: int = 8, repeats: int = 3) -> float:
    """Median seconds of a rollout: `group` completions of each prompt."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        engine.generate(some_prompts, group, new_tokens, Sampling())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


for engine in ENGINES.values():
    rollout_seconds(engine, prompts[:1], 4, repeats=1)  # the first call of anything is slow
lengths = pick([4, 8, 16], [10, 20, 40, 80, 160])
took = {name: [rollout_seconds(ENGINES[name], prompts[:1], n) for n in lengths] for name in list(ENGINES)[:2]}
for n, *pair in zip(lengths, *took.values(), strict=True):
    print(f"{n:4} tokens: " + "   ".join(f"{name} {s:6.2f} s" for name, s in zip(took, pair, strict=True)))

# %%
P = len(prompts[0])
fig, axes = plt.subplots(1, 2, figsize=(10, 3.4))
counts = {"no cache": [n * P + n * (n - 1) / 2 for n in lengths], "dynamic cache": [P + n - 1 for n in lengths]}
for (name, values), color, marker in zip(counts.items(), (VERMILION, BLUE), "os", strict=True):
    axes[0].plot(lengths, values, color=color, marker=marker, label=name)
    axes[1].plot(lengths, took[name], color=color, marker=marker, label=name)
axes[0].set(title="Counted", ylabel="places worked on in a row", xlabel="new tokens")
axes[1].set(title="Measured, 8 rows", ylabel="seconds", xlabel="new tokens", ylim=(0, None))
for ax in axes:
    ax.legend(frameon=False)
    ax.grid(alpha=0.25)
plt.show()

# %% [markdown]
# ## 2 · The KV cache
#
# What does a new token need of the old ones? Only attention looks back, and it looks at **keys and values**. Those of a
# place depend on that place and the ones before it, never on what comes later. So they can be kept. For each layer the
# cache holds two tensors `[R, K, length, D]`: the key-value heads only, after the rotary embedding.
#
# The loop below keeps them in transformers' `DynamicCache`. The prompt goes through at once (*prefill*); from then on
# the model gets **one token** a step (*decode*).

# %%
from transformers import DynamicCache


@torch.no_grad()
def decode_with_cache(prompt: list[int], new_tokens: int, cache) -> list[int]:
    """Greedy tokens; the model sees the prompt once, then one token a step."""
    logits = model(torch.tensor([prompt]), past_key_values=cache).logits[0, -1]
    tokens = [int(logits.argmax())]
    while len(tokens) < new_tokens:
        logits = model(torch.tensor([tokens[-1:]]), past_key_values=cache).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens


cache = DynamicCache(config=model.config)
found = decode_with_cache(prompts[0], NEW, cache)
print("the same greedy tokens:", found == expected)
for number, layer in enumerate(cache.layers):
    print(f"layer {number}: keys {list(layer.keys.shape)}, values {list(layer.values.shape)}")
assert found == expected
print(f"{P} + {NEW} tokens, of which the last was drawn and never fed back: {P + NEW - 1} in the cache")

# %% [markdown]
# Now one step of attention by hand, for one row and one layer, with random numbers: the new key and value are appended
# with `torch.cat`, and the one query attends to all of them. A causal mask is not needed: everything in the cache is in
# the past.

# %%
torch.manual_seed(0)
K, D, past = 2, 4, 5
keys, values = torch.randn(2, 1, K, past, D).unbind(0)  # [R, K, length, D] each
k, v, q = torch.randn(3, 1, K, 1, D).unbind(0)  # of the new token; as many query heads as key-value heads, for now
new_keys, new_values = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
weights = (q @ new_keys.transpose(2, 3) / D**0.5).softmax(-1)
by_hand = weights @ new_values
whole = F.scaled_dot_product_attention(q, new_keys, new_values)
print("weights of the first head over 5 + 1 tokens:", [round(w, 3) for w in weights[0, 0, 0].tolist()])
assert torch.allclose(by_hand, whole, atol=1e-6)
print("address of the keys before and after:", keys.data_ptr() == new_keys.data_ptr())

# %% [markdown]
# The last line says `False`, another address: `torch.cat` cannot make a tensor longer. It takes new memory and copies
# the **whole cache** there, in every layer, at every step. One token's keys and values are $2 L K D$ numbers ($L$
# layers). A step with $t$ tokens in the cache writes one of them anew, and copies $t$.


# %%
def token_bytes(shape, element: int) -> int:
    """Bytes of one token's keys and values in all layers."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * element


qwen = model_shape("Qwen/Qwen2.5-0.5B")
for name, sizes, element, rows in (("embedded", shape, 4, 8), ("Qwen2.5-0.5B", qwen, 2, 64)):
    one, steps, prompt_length = token_bytes(sizes, element), 256, 128
    written = rows * one * steps
    copied = rows * one * sum(prompt_length + t for t in range(steps))
    print(f"{name}: {one:,} bytes a token; {rows} rows, {steps} steps after a prompt of {prompt_length}:")
    print(
        f"   new {written / 1e6:,.0f} MB, copied by torch.cat {copied / 1e9:,.1f} GB, {copied / written:.0f} x as much"
    )

# %% [markdown]
# The factor is the mean number of tokens in the cache, so it grows with the length: another square, with a much smaller
# constant than the one we got rid of. And twice the memory is needed for a moment, for the old cache and the new.
#
# ## 3 · The static cache
#
# The remedy is to take the memory at the start: `[R, K, S, D]` with $S$ slots, zeros at first. A step writes into slot
# number `slot` and attends to **all** slots. A mask hides those that hold nothing yet.

# %%
S = 9
static_keys, static_values = torch.zeros(1, K, S, D), torch.zeros(1, K, S, D)
static_keys[:, :, :past], static_values[:, :, :past] = keys, values
before = static_keys.data_ptr()
slot = torch.tensor([past])  # a tensor: which slot it is need not be known to the host
static_keys.index_copy_(2, slot, k)
static_values.index_copy_(2, slot, v)
hidden = torch.arange(S) > slot
scores = (q @ static_keys.transpose(2, 3) / D**0.5).masked_fill(hidden, -torch.inf)
static_weights = scores.softmax(-1)
print("weights of the first head over 9 slots:", [round(w, 3) for w in static_weights[0, 0, 0].tolist()])
print("same output:", torch.allclose(static_weights @ static_values, by_hand, atol=1e-6), end="; ")
print("same address:", static_keys.data_ptr() == before)
assert torch.allclose(static_weights @ static_values, by_hand, atol=1e-6)

# %% [markdown]
# Without the mask, a slot of zeros would get the score 0, which is $e^0 = 1$ before it is normalised: weight for
# nothing. That is an error that no exception tells you about. See what it does here, and that the engines agree on
# whole rollouts, with prompts of differing lengths and padding.

# %%
unmasked = (q @ static_keys.transpose(2, 3) / D**0.5).softmax(-1)
print(f"without the mask, weight on slots that hold nothing: {unmasked[0, :, 0, past + 1 :].sum(-1).mean():.0%}")
rollouts = {n: e.generate(prompts[:3], 1, NEW, GREEDY) for n, e in ENGINES.items()}
reference = rollouts["no cache"]
for name, rollout in rollouts.items():
    same = torch.equal(rollout.completion_ids, reference.completion_ids)
    gap = (rollout.logprobs - reference.logprobs).abs().max().item()
    print(f"{name:14} same greedy tokens: {same}; log-probs differ by at most {gap:.0e}")
    assert same and gap < 1e-3

# %% [markdown]
# Is the static cache faster? It copies nothing, but it attends to all $S$ slots from the first step on. Here is one
# layer's attention for 32 rows: the dynamic cache at its present length, the static one with room for 512. **Look for**
# the place where the lines meet.


# %%
def median_us(run, repeats: int = pick(30, 200)) -> float:
    """Median microseconds of a call."""
    times = []
    for _ in range(repeats + 5):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times[5:])


def dynamic_step(q, keys, values, k, v):
    keys, values = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
    return F.scaled_dot_product_attention(q, keys, values)


def static_step(q, keys, values, k, v, slot, mask):
    keys.index_copy_(2, slot, k)
    values.index_copy_(2, slot, v)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


# %%
R, K, D, S = 32, shape.kv_heads, shape.head_dim, 512
k, v, q = torch.randn(3, R, K, 1, D).unbind(0)
filled = [32, 64, 128, 192, 256, 384, 511]
full_keys, full_values = torch.randn(2, R, K, S, D).unbind(0)
dynamic_us, static_us = [], []
for t in filled:
    part = full_keys[:, :, :t].contiguous(), full_values[:, :, :t].contiguous()
    mask = (torch.arange(S) <= t)[None, None, None]
    dynamic_us.append(median_us(lambda part=part: dynamic_step(q, *part, k, v)))
    at = torch.tensor([t])
    static_us.append(median_us(lambda at=at, mask=mask: static_step(q, full_keys, full_values, k, v, at, mask)))
    print(f"{t:4} tokens: dynamic {dynamic_us[-1]:7,.0f} µs, static {static_us[-1]:7,.0f} µs")

# %%
fig, ax = plt.subplots(figsize=(6.5, 3.3))
ax.plot(filled, dynamic_us, color=BLUE, marker="s", label="dynamic: cat, attend to what is there")
ax.plot(filled, static_us, color=GREEN, linestyle="--", marker="o", label=f"static: write, attend to all {S} slots")
ax.set(xlabel="tokens in the cache", ylabel="µs a layer and step", yscale="log", title="One layer's attention, 32 rows")
ax.legend(frameon=False)
ax.grid(alpha=0.25)
plt.show()

# %% [markdown]
# By itself it is no gain for short contexts, and for most of a rollout the context is shorter than the room for it. (A
# jump of the blue line is the system: large new tensors get fresh memory at every step. On a GPU, where PyTorch keeps
# memory for itself, there is none.) The gain lies elsewhere. **Every step of the static cache is the same program**:
# same shapes, same addresses, and the slot number is data. So somebody may look at the program once, and make it faster
# for all steps: a compiler, or a recorder. With the dynamic cache every step has another shape.
#
# ## 4 · The compile that nobody asked for
#
# In current transformers, `generate` with a static cache on a GPU compiles its decode step by itself. The conditions,
# read from its source (`_valid_auto_compile_criteria`): `disable_compile` is not set, the device is an accelerator, the
# cache can be compiled and is no `DynamicCache`, no quantizer and no offloading stand in the way. It calls
# `torch.compile(model.__call__)`, decode only. It never looks at **what** it compiles: an attention function that
# cannot be compiled in one piece is accepted in many pieces, and nobody is told.
#
# So one must know how to look. `torch.compile` has two halves. *Dynamo* runs through the Python code and collects the
# operations in a graph; a *backend* makes a program of the graph. Where Dynamo meets something that it cannot put into
# a graph, it ends the graph, lets Python do that thing, and begins another: a **graph break**. `explain` shows it, and
# needs no compiler. A small attention layer, whose middle part is exchanged:

# %%
import logging

from torch import nn

torch._logging.set_logs(dynamo=logging.CRITICAL)  # Dynamo warns of breaks; here they are made on purpose


class Attention(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.qkv, self.out, self.mix = nn.Linear(8, 24), nn.Linear(8, 8), mix

    def forward(self, x):
        return x + self.out(self.mix(*self.qkv(x).chunk(3, dim=-1)))


def plain(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def peeks(q, k, v):
    if k.abs().max().item() > 100:  # the host must know a number: nobody can go on without it
        k = k / 2
    return plain(q, k, v)


VARIANTS = {"plain": plain, "dynamo may not look in": torch._dynamo.disable(plain), "reads a number": peeks}
for name, mix in VARIANTS.items():
    torch._dynamo.reset()
    said = torch._dynamo.explain(Attention(mix))(torch.randn(2, 5, 8))
    print(f"{name:24} graphs {said.graph_count}, breaks {said.graph_break_count}, operations {said.op_count}")

# %% [markdown]
# A backend of our own can count while a program runs. This one compiles nothing: it notes each graph that it is given,
# and each time that one is run.


# %%
def counting_backend(seen: dict):
    """A backend that adds to seen["graphs"] for each graph, and to seen["runs"] whenever one runs."""

    def backend(graph, inputs):
        seen["graphs"] += 1

        def run(*arguments):
            seen["runs"] += 1
            return graph(*arguments)

        return run

    return backend


for name, mix in VARIANTS.items():
    torch._dynamo.reset()
    seen = {"graphs": 0, "runs": 0}
    compiled = torch.compile(Attention(mix), backend=counting_backend(seen))
    for _ in range(10):
        compiled(torch.randn(2, 5, 8))
    print(f"{name:24} graphs {seen['graphs']}, run {seen['runs']} times in 10 calls")

# %% [markdown]
# Now the real thing: `generate` and the embedded model. A CPU is not among the devices that it compiles for, but a
# switch that transformers' own tests use lets it. First the attention that ships, then one that Dynamo may not look
# into, as a hand-written kernel would be.

# %%
from transformers import AttentionInterface, AttentionMaskInterface, CompileConfig, GenerationConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask


def count_graphs(attention=None, steps: int = 8) -> dict:
    """`generate` with a static cache and its own compile: graphs, their runs in a step, greedy tokens."""
    fresh = load_policy("embedded").model.eval()
    if attention is not None:
        AttentionInterface.register("ours", attention)
        AttentionMaskInterface.register("ours", sdpa_mask)  # a name without a mask function gets no mask
        fresh.set_attn_implementation("ours")
    seen = {"graphs": 0, "runs": 0}
    compile_config = CompileConfig(backend=counting_backend(seen), fullgraph=False, mode=None)
    compile_config._compile_all_devices = True
    settings = {"max_new_tokens": steps + 1, "do_sample": False, "eos_token_id": shape.vocabulary, "pad_token_id": 0}
    settings |= {"cache_implementation": "static", "compile_config": compile_config}
    ids = torch.tensor([prompts[0]])
    torch._dynamo.reset()
    tokens = fresh.generate(input_ids=ids, attention_mask=ids * 0 + 1, generation_config=GenerationConfig(**settings))
    return {"graphs": seen["graphs"], "runs a step": seen["runs"] / steps, "tokens": tokens[0, ids.shape[1] :].tolist()}


counted = {"that ships": count_graphs()}
print({key: value for key, value in counted["that ships"].items() if key != "tokens"})


# %%
def our_attention(module, query, key, value, attention_mask, **kwargs):
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


hidden_attention = torch._dynamo.disable(our_attention)
counted["dynamo may look in"] = count_graphs(our_attention)
counted["dynamo may not look in"] = count_graphs(hidden_attention)
for name, c in counted.items():
    print(f"attention {name:24} graphs {c['graphs']:3}, runs of a graph in a step {c['runs a step']:5.1f}")
assert len({tuple(c["tokens"]) for c in counted.values()}) == 1  # right in every case: nothing fails
assert counted["that ships"]["graphs"] == 1 < counted["dynamo may not look in"]["graphs"]

# %% [markdown]
# One graph became many. The tokens are right, nothing fails; all you would see is that it is slow, and with luck a line
# in a log. Each run of a graph is guarded (are shapes and types what they were when it was made?), and no piece can be
# fused, or recorded, across a break.
#
# It gets worse with depth. At a break, Dynamo compiles the function with the break in it (here the attention module's
# `forward`) by itself. That function reads its layer's number, a Python integer, so the compiled code is good for **one
# layer only**, and each layer makes Dynamo compile it again. After 8 recompilations (`recompile_limit`) it gives up,
# and later layers run without any compilation. Our model has only four layers, so we lower the limit to see it.

# %%
with torch._dynamo.config.patch(recompile_limit=2):
    limited = count_graphs(hidden_attention)
usual = counted["dynamo may not look in"]
print(f"limit as usual: graphs {usual['graphs']}, runs in a step {usual['runs a step']:.0f}")
print(
    f"limit of 2:     graphs {limited['graphs']}, runs in a step {limited['runs a step']:.0f}: the rest is not compiled"
)
assert limited["tokens"] == usual["tokens"] and limited["runs a step"] < usual["runs a step"]

# %% [markdown]
# Two tripwires for your own work: `fullgraph=True` turns a break into an error, and a counter like the one above tells
# how many pieces there are. Lesson 10 comes back to this with a kernel of its own, registered so that Dynamo takes it
# as one operation.
#
# ## 5 · A step of our own
#
# The compiler makes fewer and better kernels of the step that it is given. We can go further and write **another step**
# with the same result. `rlcourse/rollout/decoder.py` is one, in plain PyTorch. Five things differ.
#
# ### One product instead of three
#
# Queries, keys and values are three matrix products of the same input. Stacked into one matrix they are one product;
# so are gate and up in the MLP. The bytes are the same. The kernels are fewer, and each is larger.

# %%
layer = model.model.layers[0]
attention, mlp = layer.self_attn, layer.mlp
projections = [attention.q_proj, attention.k_proj, attention.v_proj]
qkv_weight = torch.cat([p.weight for p in projections]).detach()
qkv_bias = torch.cat([p.bias for p in projections]).detach()
gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach()
with torch.no_grad():
    for rows in (1, 8, 64):
        x = torch.randn(rows, shape.hidden)
        apart = torch.cat([p(x) for p in projections], dim=-1)
        assert torch.allclose(F.linear(x, qkv_weight, qkv_bias), apart, atol=1e-5)
        both = torch.cat([mlp.gate_proj(x), mlp.up_proj(x)], dim=-1)
        assert torch.allclose(F.linear(x, gate_up), both, atol=1e-5)
        three = median_us(lambda x=x: [p(x) for p in projections])
        one = median_us(lambda x=x: F.linear(x, qkv_weight, qkv_bias))
        print(f"{rows:3} rows: three products {three:5.1f} µs, the same as one {one:5.1f} µs")

# %% [markdown]
# The stacked weights are copies, so they must follow the training: `Decoder.sync` writes the new weights **into the
# same memory** before each rollout. A test in the package proves that no stale weight is ever sampled from.
#
# ### Query heads folded into one product
#
# With grouped-query attention (Ainslie et al. 2023), $H/K$ query heads share one key-value head. The easy way is to
# repeat the cache until every query head has its own: $H/K$ times the bytes. But heads that share keys are nothing but
# **more queries** to the same keys. So make them rows of one matrix product: `[R, H, D]` becomes `[R, K, H/K, D]`.

# %%
torch.manual_seed(0)
R, H, K, D, S = 32, shape.heads, shape.kv_heads, shape.head_dim, 256
q = torch.randn(R, H, D)
keys, values = torch.randn(2, R, K, S, D).unbind(0)


def by_repeating(q, keys, values):
    keys, values = keys.repeat_interleave(H // K, dim=1), values.repeat_interleave(H // K, dim=1)  # [R, H, S, D]
    weights = (q[:, :, None] @ keys.transpose(2, 3) / D**0.5).softmax(-1)
    return (weights @ values)[:, :, 0]


def by_folding(q, keys, values):
    groups = q.view(R, K, H // K, D)
    weights = (groups @ keys.transpose(2, 3) / D**0.5).softmax(-1)  # [R, K, H / K, S]
    return (weights @ values).view(R, H, D)


assert torch.allclose(by_repeating(q, keys, values), by_folding(q, keys, values), atol=1e-5)
cache_bytes = 2 * keys.numel() * keys.element_size()
print(f"cache of one layer {cache_bytes / 1e6:.1f} MB; repeated {H // K} times: written and read again,", end=" ")
print(f"{cache_bytes * (1 + 2 * H // K) / 1e6:.1f} MB in all; folded: {cache_bytes / 1e6:.1f} MB, read once")
repeat_us, fold_us = (median_us(lambda f=f: f(q, keys, values), 50) for f in (by_repeating, by_folding))
print(f"repeated {repeat_us:,.0f} µs, folded {fold_us:,.0f} µs")
print(f"Qwen2.5-0.5B repeats {qwen.heads // qwen.kv_heads} times")

# %% [markdown]
# (On a CPU the gap can be larger than the bytes say: large new tensors get fresh memory from the system each time, as
# in section 3.)
#
# ### Drawing a token without the host
#
# `torch.multinomial` checks its input, and the check ends on the host: a stop in every step. A draw that consists of
# tensor operations alone can be part of the step. On a CPU the package uses the **Gumbel-max** trick: add
# $g = -\log(-\log u)$ to each logit, $u$ uniform on $[0, 1)$, and take the largest. That is a draw from the softmax.
#
# It takes $V$ random numbers for one token, and two logarithms of each. One number is enough, by **inversion**: stretch
# the probabilities out on a line from 0 to 1, one piece for each token, and see into which piece $u$ falls. A running
# sum over the vocabulary is long, so it is done at two levels. The vocabulary is cut into tiles. First the mass of
# every tile, and the tile into which $u$ falls; then the place within that tile alone.
# `rlcourse/rollout/triton_sample.py` does it in two kernels. (They also see to the rare case that rounding leaves no
# place whose running sum exceeds $u$: then it is the last one.) By hand:


# %%
def draw_by_inversion(logits, tile: int, uniform):
    """Tokens [R] and log-probs [R] from logits [R, V] and one uniform number a row."""
    rows = torch.arange(len(logits))
    tiles = F.pad(logits, (0, -logits.shape[1] % tile), value=-torch.inf).unflatten(1, (-1, tile))  # [R, tiles, tile]
    largest = tiles.amax((1, 2))
    mass = (tiles - largest[:, None, None]).exp()  # at most 1: no overflow
    by_tile = mass.sum(2)
    goal = uniform * by_tile.sum(1)
    which = (by_tile.cumsum(1) > goal[:, None]).long().argmax(1)  # the first tile whose running sum exceeds the goal
    left = goal - (by_tile.cumsum(1) - by_tile)[rows, which]
    place = (mass[rows, which].cumsum(1) > left[:, None]).long().argmax(1)
    tokens = which * tile + place
    return tokens, logits[rows, tokens] - largest - by_tile.sum(1).log()


torch.manual_seed(0)
logits, u = torch.randn(1, 10), torch.tensor([0.62])
token, logprob = draw_by_inversion(logits, 4, u)
print(f"token {token.item()}, log-prob {logprob.item():.4f}; by log_softmax", end=" ")
print(f"{logits.log_softmax(-1)[0, token].item():.4f}")

# %%
edges = torch.cat([torch.zeros(1), logits[0].softmax(0).cumsum(0)])
fig, ax = plt.subplots(figsize=(8, 1.5))
for i in range(10):
    ax.barh(0, edges[i + 1] - edges[i], left=edges[i], color=(SKY, ORANGE, GREEN)[i // 4], edgecolor="white")
    ax.text((edges[i] + edges[i + 1]) / 2, 0, str(i), ha="center", va="center")
ax.axvline(u.item(), color=BLACK, linewidth=2)
ax.set(yticks=[], xlim=(0, 1), xlabel="u", title=f"Ten tokens in tiles of 4 (colours): u = {u.item():.2f}")
plt.show()

# %% [markdown]
# Both must give the softmax. The chi-square statistic says whether the counts of many draws are as far from it as
# chance makes them: its mean is the number of tokens less one, its standard deviation the root of twice that.

# %%
from rlcourse.sampling import sample_tokens

torch.manual_seed(1)
draws, pi = 40_000, logits[0].softmax(0)
many = logits.expand(draws, -1)
found = {"Gumbel-max": sample_tokens(many, Sampling())[0]}
found["inversion"] = draw_by_inversion(many, 4, torch.rand(draws))[0]
found["wrong: logits + u"] = (many + torch.rand(many.shape)).argmax(1)  # to see that the test can fail
for name, tokens in found.items():
    counts = torch.bincount(tokens, minlength=10)[:10]
    chi = ((counts - draws * pi).square() / (draws * pi)).sum().item()
    print(f"{name:20} chi-square {chi:9,.1f}, expected 9 ± {18**0.5:.1f}")
    assert (chi < 9 + 5 * 18**0.5) == ("wrong" not in name)
large = torch.randn(32, pick(20_000, 152_000))
gumbel = median_us(lambda: sample_tokens(large, Sampling()), 5)
inversion = median_us(lambda: draw_by_inversion(large, 2048, torch.rand(32)), 5)
print(
    f"32 rows of {large.shape[1]:,} logits here: Gumbel-max {gumbel / 1e3:.0f} ms, inversion {inversion / 1e3:.0f} ms"
)

# %% [markdown]
# The log-prob of the drawn token falls out of the same pass, and is kept for training. It must be the one that training
# recomputes. So it is, for the whole engine:

# %%
from rlcourse.logprobs import token_logprobs

torch.manual_seed(2)
rollout = make_engine(policy, "fast", torch.float32).generate(prompts[:8], 8, 80, Sampling())
with torch.no_grad():
    recomputed, _ = token_logprobs(model, rollout, Sampling(), chunk=4096)
gap = (rollout.logprobs - recomputed).abs().max().item()
print(f"{int(rollout.completion_lengths.sum()):,} tokens: kept and recomputed log-probs differ by at most {gap:.0e}")
assert gap < 1e-3

# %% [markdown]
# ### A look every k steps
#
# Has every row ended? To know, the host must read a flag, and to read it it must wait until the device has caught up.
# On a GPU that takes away its lead: it cannot queue the next step while it waits. The step itself can go on without
# knowing: rows that have ended compute a token that nobody counts. So look only every $k$ steps, and let the last of
# them run while the host reads what was true before it. The price is slots that work for nothing: a completion may end
# at any of the $k$ steps, and the mean of what follows is $(k+1)/2$ steps.
#
# Who is decoded in which slot, and when the host looks, is the business of the package's `Scheduler` (section 7
# explains slots). It is bookkeeping alone, so it can be asked what it would do with answers whose lengths are known.

# %%
from rlcourse.rollout.scheduler import Scheduler, halve


def count_slots(lengths: list[int], available: int, every: int) -> dict[str, int]:
    """Steps, slot-steps and looks for answers of these lengths in `available` slots, a look every `every` steps."""
    scheduler = Scheduler(len(lengths), available, max(lengths) - 1, every, halve)
    count, left = {"steps": 0, "slot-steps": 0, "looks": 0}, {}  # left: steps to go of the answer in each slot
    while plan := scheduler.next_plan():
        left |= {slot: lengths[answer] - 1 for slot, answer in plan.starts}  # the first token is the prefill's
        left |= {target: left[source] for source, target in plan.moves}
        # The host sees what was true before the last step.
        done = [left[slot] <= plan.steps - 1 for slot in range(plan.size)]
        left = {slot: steps - plan.steps for slot, steps in left.items()}
        count["steps"] += plan.steps
        count["slot-steps"] += plan.size * plan.steps
        count["looks"] += 1
        scheduler.report(done, scheduler.next_completion)
    return count


print(count_slots([12, 5, 7, 12], available=4, every=4))

# %%
torch.manual_seed(0)
answers = make_engine(policy, "fast", torch.float32).generate(prompts[: pick(4, 16)], 8, 80, Sampling())
lengths = answers.completion_lengths.tolist()
tokens = sum(lengths) - len(lengths)  # the first token of each answer comes from the prefill
print(" k   looks   steps   slot-steps   decoded tokens   of use")
for every in (1, 4, 16, 64):
    c = count_slots(lengths, 32, every)
    print(f"{every:2} {c['looks']:7} {c['steps']:7} {c['slot-steps']:12,} {tokens:16,} {tokens / c['slot-steps']:8.0%}")

# %% [markdown]
# Even $k = 1$ wastes some: the host learns of an end one step late, a step comes in few sizes only, and at the end
# there are fewer rows than the smallest has. On a GPU the package goes one step further. Its kernels give a free slot
# to the next completion within the same step (`rlcourse/rollout/triton_refill.py`), so nothing is wasted while anybody
# waits, and the host looks only to see whether the batch may become smaller.
#
# And what does a look cost? Here, on a CPU, there is nothing to wait for: the device **is** the host. **Look for** how
# small it is against a step. On a GPU it is the time to drain the queue, a launch, and the way back, at every look; the
# faster the step, the more it weighs.

# %%
flags = torch.zeros(256, dtype=torch.bool)
look_us = median_us(lambda: flags.all().item())
engine = ENGINES["own step"]
short, long = (rollout_seconds(engine, prompts[:4], n) for n in (8, 40))
step_us = 1e6 * (long - short) / 32
print(f"a look {look_us:.1f} µs, a step of 32 rows {step_us:,.0f} µs: {look_us / step_us:.2%} of it")

# %% [markdown]
# ## 6 · A CUDA graph
#
# A step on a GPU is some hundreds of kernels. For each, the host runs Python, checks arguments, picks a kernel and puts
# it into a queue. If a kernel takes the GPU less time than that, the GPU waits: lesson 06 saw it as a low busy
# fraction. What does the host need for the smallest operation, here?

# %%
tiny = torch.zeros(1)
launch_us = median_us(lambda: tiny.add_(1.0), 2000)
print(f"one operation on one number: {launch_us:.2f} µs of host time here")
for count in (30, 300, 1200):
    print(f"   a step of {count:5} operations cannot take less than {count * launch_us / 1e3:5.2f} ms")

# %% [markdown]
# A **CUDA graph** takes the host out. Run the step once in *capture* mode: nothing is computed, the kernels and their
# arguments are written down. Afterwards **one** launch replays them all; the GPU goes from kernel to kernel by itself.
#
# The arguments that were written down are addresses and sizes. So these must hold:
#
# - **fixed addresses**: inputs, outputs, weights, cache. New weights are copied to where the old ones stand;
# - **fixed shapes**: the static cache, a batch size for each graph. What changes (slot, position, flags) is data;
# - **no wait for the device** in the step: no `.item()`, no `if` on a tensor, no `multinomial`;
# - **no new memory**: what the step needs in between comes from a pool that belongs to the graph;
# - random numbers from a state that lives on the device and moves on at each replay.
#
# That is the list of section 3 and section 5, read backwards. The whole program is short. It needs a GPU:

# %% tags=["gpu"]
if torch.cuda.is_available():
    a = torch.randn(64, 512, device="cuda")
    w = torch.randn(512, 512, device="cuda") / 512**0.5

    def small_step():
        for _ in range(100):
            a.copy_(torch.tanh(a @ w))  # in place: the next replay finds its input where this one left its output

    def gpu_ms(run) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            run()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start) / 20

    small_step()  # what is loaded or compiled at the first call must not happen under capture
    eager_ms = gpu_ms(small_step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        small_step()
    print(f"{torch.cuda.get_device_name()}: 300 kernels one by one {eager_ms:.2f} ms,", end=" ")
    print(f"as one graph {gpu_ms(graph.replay):.2f} ms")
else:
    print("No GPU here.")

# %% [markdown]
# `rlcourse/rollout/cuda_graphs.py` does this for each number of rows. What the record of the H200 says about launches:
# **look for** the column of launches, how it falls to one or so a step while the number of kernels
# falls much less, and what that does to the busy share.

# %%
from rlcourse.measure.records import load_record, provenance, record_markdown


def recorded(name: str, command: str, columns: list[str], folder=None) -> dict:
    """Show a record of the H200 as a table, and return it; an empty one, and a sentence, where it has not been made."""
    try:
        record = load_record(name, device="NVIDIA H200", folder=folder)
    except FileNotFoundError:
        print(f"Not recorded on an H200 yet. Where there is a GPU, `{command}` makes the record.")
        return {"results": []}
    display(Markdown(record_markdown(record, columns)))
    return record


COLUMNS = ["variant", "rows", "ms_per_step", "floor_ms", "busy", "kernels_a_step", "launches_a_step", "tokens_per_s"]
h200 = recorded("decode", "rlcourse bench decode --rows 16,64,256 --record", COLUMNS)
fewest = min((row["rows"] for row in h200["results"]), default=0)
few = {row["variant"]: row for row in h200["results"] if row["rows"] == fewest}
if {"hf-dynamic", "graph"} <= few.keys():
    first, last = few["hf-dynamic"], few["graph"]
    print(f"{fewest} rows, first rung to last: launches a step {first['launches_a_step']:,.0f} → ", end="")
    print(f"{last['launches_a_step']:.1f}, busy {first['busy']:.0%} → {last['busy']:.0%},", end=" ")
    print(f"{first['ms_per_step'] / last['ms_per_step']:.1f} times as fast;", end=" ")
    print(f"the last takes {last['ms_per_step'] / last['floor_ms']:.1f} times its byte floor")

# %% [markdown]
# In the table, `graph-eager` is our step in PyTorch as a graph, `graph-compiled` the same step compiled first, and
# `graph` the step of hand-written kernels, five for a layer (`rlcourse/rollout/triton_step.py`). On a Hopper GPU
# with CuTe DSL its attention is that of lesson 09, and `graph-triton` is the same step with attention in Triton. A
# graph makes launches free, not kernels: each still begins, ends, and hands its result to the next through memory. So
# fewer kernels are the last rung. One trick of theirs is an exercise: a norm needs the whole row before it can scale
# it, but a scale that is the same for a whole row can be applied **after** the matrix product that follows.
#
# ## 7 · Answers end at different times
#
# So far all rows had the same length. Real answers do not. Here are those of the embedded model.

# %%
torch.manual_seed(3)
rollout = make_engine(policy, "fast", torch.float32).generate(prompts[: pick(8, 32)], 8, 80, Sampling())
lengths = rollout.completion_lengths
fig, ax = plt.subplots(figsize=(6.5, 2.8))
ax.hist(lengths, bins=range(0, 82, 2), color=SKY)
ax.axvline(lengths.float().mean(), color=BLACK, linestyle="--", label=f"mean {lengths.float().mean():.0f}")
ax.axvline(lengths.max(), color=VERMILION, label=f"longest {lengths.max()}")
ax.set(xlabel="tokens of an answer", ylabel="answers", title=f"{len(lengths)} answers of the embedded model")
ax.legend(frameon=False)
plt.show()
print(f"{(lengths == 80).float().mean():.1%} reach the limit of 80;", end=" ")
print(f"if all wait for the longest, {lengths.float().mean() / lengths.max():.0%} of the slot-steps are of use")

# %% [markdown]
# A *slot-step* is one row of the batch in one step. Three ways to spend them:
#
# - **wait**: a batch goes on until its longest answer has ended;
# - **leave**: rows that have ended leave the batch (*compaction*), and the step becomes smaller;
# - **refill**: more answers wait than there are slots; whoever ends makes room for the next one (*continuous batching*,
#   Yu et al. 2022). The slots stay full until nobody waits, and then rows leave.
#
# A simulator of all three needs no model. Lengths are drawn from a geometric distribution: at each step an answer ends
# with the same chance.


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
answers, places = 512, 64
drawn = (1 + torch.distributions.Geometric(1 - 0.5 ** (1 / 120)).sample((answers,)).long()).clamp(max=512)
print(f"{answers} answers, {places} slots", end="; ")
print(f"median {drawn.median()}, mean {drawn.float().mean():.0f}, longest {drawn.max()}")
runs = {way: simulate(drawn.tolist(), places, way) for way in ("wait", "leave", "refill")}
for way, used in runs.items():
    print(
        f"{way:7} {len(used):5} steps, {sum(used):7,} slot-steps, of use {drawn.sum().item() / sum(used):.0%}", end="; "
    )
    print(f"mean rows in a step {sum(used) / len(used):.0f}")

# %%
fig, axes = plt.subplots(3, 1, figsize=(8, 4.6), sharex=True, sharey=True)
for ax, (way, used), color in zip(axes, runs.items(), (VERMILION, ORANGE, GREEN), strict=True):
    ax.fill_between(range(len(used)), used, step="mid", color=color, alpha=0.6)
    ax.set_title(
        f"{way}: {len(used):,} steps, {drawn.sum().item() / sum(used):.0%} of the slot-steps of use", fontsize=11
    )
    ax.set(ylabel="rows", ylim=(0, places * 1.1))
axes[-1].set_xlabel("step")
fig.tight_layout()
plt.show()
assert len(runs["refill"]) < len(runs["leave"]) == len(runs["wait"])

# %% [markdown]
# *Leave* wastes no slot-step, and needs as many **steps** as *wait*. Whether it helps depends on what a smaller step
# costs. If a step takes the same time with few rows as with many, it saves nothing at all: what counts is the number of
# steps, and only *refill* makes fewer of them. The next section is about that.
#
# The package's scheduler on real answers, beside the simulator. It looks every $k$ steps, and its step comes in a few
# sizes (each needs a graph of its own), so it needs more slot-steps. **Look for** how much of that is due to $k$:
# for answers as short as these, 16 steps are a good part of one.

# %%
torch.manual_seed(5)
answers = make_engine(policy, "fast", torch.float32).generate(prompts[: pick(8, 32)], 8, 80, Sampling())
lengths = answers.completion_lengths.tolist()
decoded = [n - 1 for n in lengths if n > 1]  # the first token comes from the prefill
ideal, useful = simulate(decoded, 32, "refill"), sum(decoded)
for every in (1, 16):
    counted = count_slots(lengths, 32, every)
    print(f"k = {every:2}: scheduler {counted['steps']:4} steps, {counted['slot-steps']:6,} slot-steps,", end=" ")
    print(f"{useful / counted['slot-steps']:.0%} of use;", end=" ")
    print(f"simulator {len(ideal):4} steps, {sum(ideal):6,} slot-steps, {useful / sum(ideal):.0%}")
    assert counted["slot-steps"] >= sum(ideal) and counted["steps"] >= len(ideal)

# %% [markdown]
# On the H200, with a geometric length of median 120 and eight times as many answers as slots. Only tokens up to the end
# of an answer count. With 16 slots, one long answer that begins late decides how well the others are used, so ours is
# the mean of several rollouts with other random numbers. Compare with the rate at equal length in the record above.

# %%
SKEWED = ["variant", "rows", "tokens_per_s", "tokens_a_row"]
skewed = recorded("decode-skewed", "rlcourse bench decode --lengths skewed --record", SKEWED)
equal = {(row["variant"], row["rows"]): row["tokens_per_s"] for row in h200["results"]}
for row in skewed["results"]:
    if (row["variant"], row["rows"]) in equal:
        share = row["tokens_per_s"] / equal[row["variant"], row["rows"]]
        print(f"{row['variant']:20} {row['rows']:4} rows: {share:.0%} of its rate at equal lengths")

# %% [markdown]
# ## 8 · Bound by the host, bound by bytes
#
# A step must move its weights once, however many rows there are, and each row's keys and values. That is its byte floor
# (lesson 06). And the host must launch its kernels, however many rows there are. So a step takes about as long as the
# larger of the two:
#
# $$\text{step} \gtrsim \max\big(\text{launches} \times \text{host time},\;
#   (\text{weights} + R \times \text{context} \times \text{bytes of a token}) / \text{bandwidth}\big) .$$
#
# Both are flat in $R$ at first. There, more rows are free: ms a step stay, tokens/s grow with the rows. Then the step
# grows. Live on the CPU, with the floor of this machine. **Look for** the flat part, and for what happens to tokens/s
# when it ends.

# %%
from rlcourse.measure.roofline import decode_step, measure_machine

machine = measure_machine(torch.device("cpu"))


def step_ms(engine, rows: int, repeats: int = 3) -> float:
    """Milliseconds a decode step: a rollout of 40 tokens less one of 8."""
    some = prompts[: min(rows, 8)]
    short, long = (rollout_seconds(engine, some, n, rows // len(some), repeats) for n in (8, 40))
    return 1e3 * (long - short) / 32


row_counts = pick([1, 8], [1, 2, 4, 8, 16, 32, 64, 128, 256])
on_cpu = {name: [step_ms(ENGINES[name], rows) for rows in row_counts] for name in ("dynamic cache", "own step")}
context = P + 24
floor = [1e3 * machine.floor_seconds(decode_step(shape, rows, context, 4)) for rows in row_counts]
print("rows        " + "".join(f"{rows:9}" for rows in row_counts))
for name, values in (on_cpu | {"floor": floor}).items():
    print(f"{name:12}" + "".join(f"{value:9.3f}" for value in values) + "   ms a step")

# %%
fig, axes = plt.subplots(1, 2, figsize=(11, 3.8))
lines = zip(
    (on_cpu | {"floor of this machine": floor}).items(), (BLUE, GREEN, BLACK), ("-", "-", ":"), "so ", strict=True
)
for (name, values), color, style, marker in lines:
    axes[0].plot(row_counts, values, color=color, linestyle=style, marker=marker, label=name)
    if color != BLACK:
        per_s = [1e3 * rows / ms for rows, ms in zip(row_counts, values, strict=True)]
        axes[1].plot(row_counts, per_s, color=color, linestyle=style, marker=marker, label=name)
axes[0].set(title="Time of a step, embedded model, this CPU", ylabel="ms a step")
axes[1].set(title="Tokens", ylabel="tokens/s")
for ax in axes:
    ax.set(xscale="log", yscale="log", xlabel="rows")
    ax.set_xticks(row_counts, row_counts)
    ax.minorticks_off()
    ax.legend(frameon=False)
    ax.grid(alpha=0.25, which="both")
fig.tight_layout()
plt.show()
more, longer = row_counts[-1] // row_counts[0], on_cpu["own step"][-1] / on_cpu["own step"][0]
print(f"own step, {row_counts[0]} → {row_counts[-1]} rows: {longer:.1f} x the time for {more} x the tokens")

# %% [markdown]
# Where the two lines come together, it is the operations that both must do, and no longer what surrounds them.
#
# (The floor here is that of bytes **or** operations, whichever take longer: a CPU has few operations a byte, so with
# many rows it is operations.) For few rows the step of this small model is bound by the host: Python and the dispatch
# of some hundred operations, far above the floor. That is the regime in which `generate` leaves a GPU, too, and in
# which a CUDA graph helps most. The H200, from the record: each rung over rows, with the byte floor. **Look for** which
# lines are flat, and how the gap to the floor closes.

# %%
RUNGS = {
    "hf-dynamic": ("dynamic cache", BLUE, "s"),
    "hf-static": ("static cache", SKY, "D"),
    "hf-static-compiled": ("static, compiled by generate", ORANGE, "^"),
    "graph-eager": ("own step, CUDA graph", PURPLE, "v"),
    "graph-compiled": ("own step, compiled, graph", VERMILION, "P"),
    "graph-triton": ("own kernels, all in Triton", "#999999", "<"),
    "graph": ("own kernels, graph", GREEN, "o"),
}
RUNGS = {name: style for name, style in RUNGS.items() if any(r["variant"] == name for r in h200["results"])}
if h200["results"]:
    fig, axes = plt.subplots(1, 2, figsize=(11, 4.2))
    for variant, (label, color, marker) in RUNGS.items():
        points = sorted(
            (r["rows"], r["ms_per_step"], r["tokens_per_s"]) for r in h200["results"] if r["variant"] == variant
        )
        for ax, column in zip(axes, (1, 2), strict=True):
            ax.plot([p[0] for p in points], [p[column] for p in points], color=color, marker=marker, label=label)
    floors = sorted({(r["rows"], r["floor_ms"]) for r in h200["results"]})
    axes[0].plot(*zip(*floors, strict=True), color=BLACK, linestyle=":", label="byte floor")
    axes[0].set(title="Time of a step", ylabel="ms a step")
    axes[1].set(title="Tokens of whole rollouts", ylabel="tokens/s")
    for ax in axes:
        ax.set(xscale="log", yscale="log", xlabel="rows")
        ax.set_xticks([r for r, _ in floors], [r for r, _ in floors])
        ax.minorticks_off()
        ax.grid(alpha=0.25, which="both")
    axes[1].legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    fig.suptitle(f"{h200['setup']['shape']}, {h200['setup']['dtype']}, {provenance(h200)}", fontsize=11)
    fig.tight_layout()
    plt.show()
else:
    print("Not recorded on an H200 yet: `rlcourse bench decode --rows 16,64,256 --record` makes the record.")

# %% [markdown]
# ### Explorer: what binds a step
#
# The formula above for the shape of Qwen2.5-0.5B in bfloat16, with a context of 256 tokens. Try: how many rows does it
# take until a step of 1,200 kernels, launched one by one, is bound by bytes? What changes if one launch starts them
# all?

# %%
from rlcourse.course.widgets import explorer


def draw_step(ax, rows: int, launches: int, host_us: float, gb_per_s: int) -> None:
    """Both bounds over rows, and where we are."""
    axis = [2 ** (i / 4) for i in range(45)]
    moved = {r: decode_step(qwen, r, 256).total_bytes for r in [*axis, rows]}
    by_bytes = {r: 1e3 * count / (gb_per_s * 1e9) for r, count in moved.items()}
    by_host = launches * host_us / 1e3
    now = max(by_host, by_bytes[rows])
    ax.plot(axis, [by_host] * len(axis), color=VERMILION, linestyle="--", label="host: launches × time")
    ax.plot(axis, [by_bytes[r] for r in axis], color=BLUE, linestyle="-.", label="bytes / bandwidth")
    ax.plot(axis, [max(by_host, by_bytes[r]) for r in axis], color=BLACK, linewidth=3, alpha=0.3)
    ax.plot(rows, now, marker="o", markersize=10, color=BLACK)
    bound = "host" if by_host > by_bytes[rows] else "bytes"
    settings = f"{rows} rows, {launches} launches of {host_us:g} µs, {gb_per_s:,} GB/s:"
    found = f"bound by {bound}: {now:.2f} ms, {1e3 * rows / now:,.0f} tokens/s"
    ax.set_title(f"{settings}\n{found}", fontsize=10)
    ax.set(yscale="log", xlabel="rows", ylabel="ms a step", ylim=(0.05, 50))
    ax.set_xscale("log", base=2)
    ax.legend(frameon=False, fontsize=8, loc="upper left")
    ax.grid(alpha=0.25)


# %%
usual = {"host_us": 10.0, "gb_per_s": 4000}
stories = [{"rows": 16, "launches": 1200}, {"rows": 16, "launches": 1}, {"rows": 1024, "launches": 100}]
controls = {"rows": (16, 1, 2048, 1), "launches": (1200, 1, 2000, 1), "host_us": (10.0, 1.0, 40.0, 0.5)}
explorer(draw_step, static=[story | usual for story in stories], **controls, gb_per_s=(4000, 50, 8000, 50))

# %% [markdown]
# ## 9 · The whole ladder
#
# Every rung once more, live, in one run: 32 rows, ms a step by the difference of two lengths. (For *no cache* it is the
# mean over these lengths, since each of its steps costs more than the one before.)

# %%
rungs_cpu = {name: step_ms(engine, pick(8, 32), repeats=pick(1, 5)) for name, engine in ENGINES.items()}
rows_cpu = pick(8, 32)
for name, ms in rungs_cpu.items():
    print(f"{name:14} {ms:8.2f} ms a step {1e3 * rows_cpu / ms:10,.0f} tokens/s", end=" ")
    print(f"{rungs_cpu['no cache'] / ms:6.1f} x no cache")

# %%
panels = 2 if few else 1
fig, axes = plt.subplots(1, panels, figsize=(5.5 * panels, 3.6), squeeze=False)
bars = axes[0][0].barh(list(rungs_cpu), [1e3 * rows_cpu / ms for ms in rungs_cpu.values()], color=BLUE)
axes[0][0].bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=9)
axes[0][0].set(title=f"Embedded model, this CPU, {rows_cpu} rows", xlabel="tokens/s")
if few:
    known = {label: few[v]["tokens_per_s"] for v, (label, _, _) in RUNGS.items() if v in few}
    bars = axes[0][1].barh(list(known), list(known.values()), color=GREEN)
    axes[0][1].bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=9)
    axes[0][1].set_title(f"{h200['setup']['shape']}, {fewest} rows,\n{provenance(h200)}", fontsize=10)
    axes[0][1].set_xlabel("tokens/s")
for ax in axes[0]:
    ax.invert_yaxis()
    ax.margins(x=0.2)
    ax.spines[["top", "right"]].set_visible(False)
fig.tight_layout()
plt.show()

# %% [markdown]
# On a CPU the ladder has fewer rungs: there is nothing to capture, and what our own step wins there are fewer
# operations, no repeated cache, a prefill for each prompt instead of each row, and rows that leave. On a reader's GPU,
# the package measures all of them, the embedded model included:

# %% tags=["gpu"]
if torch.cuda.is_available():
    from rlcourse.bench.decode import decode

    setup, measured = decode("embedded", [64], prompt_tokens=64, new_tokens=64, repeats=3)
    for row in measured:
        print(f"{row['variant']:20} {row['ms_per_step']:8.3f} ms a step {row['tokens_per_s']:10,.0f} tokens/s")
else:
    print("No GPU here.")

# %% [markdown]
# ## 10 · What a training step gains
#
# Nobody wants tokens. We want trained models, and a step has an update too. Amdahl's law (lesson 06): if the rollout is
# a share $f$ of a step and becomes $r$ times as fast, the step becomes $1 / (1 - f + f/r)$ times as fast, and never
# more than $1/(1-f)$. A few steps of the same training with two engines, live:

# %%
import tempfile
from pathlib import Path

from rlcourse.config import make_config
from rlcourse.runs import read_lines
from rlcourse.trainer import train

folder = tempfile.mkdtemp()
PHASES = ("rollout_s", "update_s", "rest_s")
phases = {}
for name in ("hf-dynamic", "fast"):
    size = {"num_prompts": pick(2, 16), "steps": pick(2, 6), "eval_every": 0, "eval_problems": 1, "pass_k": 0}
    result = train(make_config(engine=name, name=name, output=folder, device="cpu", **size))
    timings = [m["timing"] for m in read_lines(Path(result["folder"]) / "metrics.jsonl")][1:]  # the first is slow
    mean = {key: statistics.mean(t[key] for t in timings) for key in ("step_s", "rollout_s", "update_s")}
    phases[name] = mean | {"rest_s": mean["step_s"] - mean["rollout_s"] - mean["update_s"]}
    print(
        f"{name:11}" + ", ".join(f"{key.removesuffix('_s')} {seconds:.2f} s" for key, seconds in phases[name].items())
    )
slow, fast = phases["hf-dynamic"], phases["fast"]
share, faster = slow["rollout_s"] / slow["step_s"], slow["rollout_s"] / fast["rollout_s"]
print(
    f"rollout: {share:.0%} of a step, {faster:.1f} x as fast; Amdahl says {1 / (1 - share + share / faster):.2f} x,",
    end=" ",
)
print(f"measured {slow['step_s'] / fast['step_s']:.2f} x; without any rollout it would be {1 / (1 - share):.2f} x")

# %% [markdown]
# And on the H200: a step of this package beside the same step of TRL, with its default (a dynamic cache) and with a
# static cache compiled. It is another program, so the rest of its step differs as well; the rollout is what differs
# most. **Look for** what is left of the step when the rollout has become fast.

# %%
steps = recorded("step", "rlcourse bench step --record", ["variant", "rows", "step_s", "rollout_s", "update_s"])
shown = {f"{r['variant']}, {r['rows']} rows": r for r in steps["results"]}
fig, axes = plt.subplots(1, 2 if shown else 1, figsize=(11, 3.4), squeeze=False)
for ax, table in zip(axes[0], (phases, shown), strict=False):
    left = [0.0] * len(table)
    for key, color, hatch in zip(PHASES, (BLUE, ORANGE, "lightgray"), ("", "//", ""), strict=True):
        values = [r.get(key, r["step_s"] - r["rollout_s"] - r["update_s"]) for r in table.values()]
        ax.barh(
            list(table), values, left=left, color=color, hatch=hatch, edgecolor="white", label=key.removesuffix("_s")
        )
        left = [a + b for a, b in zip(left, values, strict=True)]
    ax.invert_yaxis()
    ax.set(xlabel="seconds a step")
    ax.spines[["top", "right"]].set_visible(False)
axes[0][0].set_title("Embedded model, this CPU")
axes[0][0].legend(frameon=False, loc="lower right")
if shown:
    axes[0][1].set_title(f"{steps['setup']['shape']}, {provenance(steps)}", fontsize=11)
fig.tight_layout()
plt.show()

# %%
for row in steps["results"]:
    print(f"{row['variant']:20} {row['rows']:3} rows: rollout {row['rollout_s'] / row['step_s']:.0%} of the step")
ours = {r["rows"]: r for r in steps["results"] if r["variant"] == "rlcourse"}
for row in steps["results"]:
    if row["variant"] == "trl-default" and row["rows"] in ours:
        mine = ours[row["rows"]]
        print(
            f"{row['rows']} rows: rollout {row['rollout_s'] / mine['rollout_s']:.1f} x as fast as TRL's default,",
            end=" ",
        )
        print(f"the step {row['step_s'] / mine['step_s']:.1f} x;", end=" ")
        print(f"if the rollout were free, {row['step_s'] / mine['update_s']:.1f} x")

# %% [markdown]
# With more rows the update grows with the tokens, while the rollout hardly grows as long as it is bound by the host or
# by the weights. So the share of the rollout falls twice: because it became faster, and because there are more rows.
# What is then the largest part is the next thing to work on. That is the subject of the lessons that follow.
#
# ## Check yourself
#
# 1. The static cache attends to slots that hold nothing, and is slower in eager mode. Why have it?
#
# <details><summary>Answer</summary>
# Every step is the same program at the same addresses: it can be compiled once, and captured in a CUDA graph.
# </details>
#
# 2. You replaced the attention by a fast kernel of your own and the rollout became slower, with the same tokens. What
#    do you look at first?
#
# <details><summary>Answer</summary>
# At the number of graphs a step: if Dynamo cannot look into your kernel's wrapper, each layer breaks the graph.
# Register it as one operation, or leave the compiler out and capture the step yourself.
# </details>
#
# 3. A step takes the same time with 16 rows as with 64. Does *leave* help when answers differ in length? Does *refill*?
#
# <details><summary>Answer</summary>
# Leave does not: it makes steps smaller, not fewer, and a smaller step takes the same time. Refill does: it needs fewer
# steps. With many rows, where a step's time grows with them, leave helps as well.
# </details>
#
# 4. Why may new weights be copied into a captured graph's memory, but not be put in its place?
#
# <details><summary>Answer</summary>
# The graph wrote addresses down, not tensors. It reads whatever stands at the old address; a new tensor elsewhere is
# never seen. The worst of it: nothing fails, and an old policy is sampled from.
# </details>
#
# 5. Your rollout is 90 % of a step. You make it 9 times as fast. How much faster is the step, and how much could it
#    still gain from rollouts?
#
# <details><summary>Answer</summary>
# 1 / (0.1 + 0.9 / 9) = 5 times. If the rollout were free it would be 10 times, so there is one factor of 2 left; the
# update is now half of the step.
# </details>
#
# ## Exercises
#
# [exercises/07_static_cache.ipynb](../exercises/07_static_cache.ipynb): write into a static cache and attend with the
# right mask, fold grouped heads, draw by inversion, schedule slots, and a norm that comes after its product.
#
# ## Further reading
#
# - Shazeer 2019, *Fast Transformer Decoding: One Write-Head is All You Need*, arXiv:1911.02150: why decoding is bound
#   by bytes, and one key-value head for all queries.
# - Ainslie et al. 2023, *GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints*,
#   arXiv:2305.13245.
# - Yu et al. 2022, *Orca: A Distributed Serving System for Transformer-Based Generative Models*, OSDI: continuous
#   batching.
# - Kwon et al. 2023, *Efficient Memory Management for Large Language Model Serving with PagedAttention*,
#   arXiv:2309.06180: a cache in pages, the other answer to differing lengths.
# - Ansel et al. 2024, *PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph
#   Compilation*, ASPLOS: Dynamo, graphs and graph breaks.
# - Williams, Waterman and Patterson 2009, *Roofline: An Insightful Visual Performance Model for Multicore
#   Architectures*, Communications of the ACM 52.
