# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# Lesson 06 opened with a mystery, and here's the answer. In June 2026 somebody trained Qwen2.5-0.5B on an A10G and
# wrote decode attention in one kernel. Alone, it was 2.2 times as fast as the attention it replaced. Inside Hugging
# Face's `generate` it produced the same tokens, and the decode step got nearly 3 times slower ([*Making Dr GRPO go
# brrr*](https://kyrieblunders.bearblog.dev/making-dr-grpo-go-brrr/)). Nothing had failed.
#
# We don't have that kernel or that card, so we can't reproduce those factors. We stage the same accident with the
# kernel of lesson 09 on an H200, and this time we look inside.
#
# **You will learn**
#
# - what a microbenchmark leaves out, and how to predict a step's gain from a faster kernel;
# - how right tokens can hide a wrecked program;
# - to count the pieces of a compiled step, and to find out why there are so many;
# - how a mask can go missing without an error;
# - to get a kernel in without breaking anything.
#
# You need [lesson 07](07_static_cache.ipynb), section 4, for graph breaks and CUDA graphs, and [lesson
# 09](09_decode_attention.ipynb) for the kernel.

# %%
import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library is quiet, if told early
import dataclasses
import inspect
import logging
import time

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from IPython.display import Markdown, display
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    CompileConfig,
    GenerationConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging as transformers_logging

from rlcourse.course import pick
from rlcourse.course.lessons import generate_attention as attention
from rlcourse.course.widgets import bet
from rlcourse.measure.plots import BLACK, GREEN, SKY, VERMILION
from rlcourse.measure.records import load_record, provenance
from rlcourse.measure.shapes import model_shape
from rlcourse.policy import load_policy
from rlcourse.rollout import make_engine
from rlcourse.rollout.hf import HFEngine
from rlcourse.sampling import GREEDY, Sampling
from rlcourse.tasks import load_task

transformers_logging.set_verbosity_error()
torch._logging.set_logs(dynamo=logging.CRITICAL)  # here graphs are broken on purpose
policy, task = load_policy("embedded"), load_task("minigsm")
prompts = [policy.prompt(p.question) for p in task.problems("train")[:8]]
qwen = model_shape("Qwen/Qwen2.5-0.5B")

# %% [markdown]
# Nearly all GPU numbers come from one recorded run, `story`: the kernel alone, the decode step with each way to plug it
# in, and whole training steps.
#
# <small>{{ load_record("story", "NVIDIA H200")["results"][0]["rows"] }} rows, prompts of {{ load_record("story",
# "NVIDIA H200")["setup"]["prompt_tokens"] }} tokens, answers of {{ load_record("story", "NVIDIA
# H200")["setup"]["new_tokens"] }}. Repetitions of a decode step differ by {{ 100 * max(r.get("spread", 0) for r in
# load_record("story", "NVIDIA H200")["results"]):.0f }}% at most (interquartile range). The byte floor is from
# `decode`, the idle shares from `trace`, which are other runs.</small>

# %% tags=["hide-input"]
# @title The records of this lesson
story, decode = load_record("story", "NVIDIA H200"), load_record("decode", "NVIDIA H200")
ROWS = story["results"][0]["rows"]
alone = {r["variant"].removeprefix("micro-attention-"): r["us"] for r in story["results"] if "us" in r}
ladder = {r["variant"]: r for r in decode["results"] if r["rows"] == ROWS}
OURS = "graph-exact"  # lesson 07's last rung
products = {r["variant"]: r["ms_per_step"] for r in decode["results"] if r["rows"] == 64 and "ms_per_step" in r}
ways = {r["variant"]: r for r in story["results"] if "ms_per_step" in r}
STEPS = {  # every decode step of this lesson, by the name it has in the text
    "eager, dynamic cache": ways["hf-dynamic"],
    "eager, static cache": ways["hf-static-eager"],
    "our kernel, breaks": ways["hf-static-breaks"],
    "compiled": ways["hf-static"],
    "our kernel, operation": ways["hf-static-operation"],
    "our own step": ways["graph"],
}
ms = {name: row["ms_per_step"] for name, row in STEPS.items()}
trace = load_record("trace", "NVIDIA H200")
traced = {r["variant"]: r for r in trace["results"] if r["part"] == "step"}
idle = {
    name: 1 - traced[v]["busy_us"] / traced[v]["us_a_step"]
    for name, v in (("breaks", "hf-static-breaks"), ("own", "graph"))
}
(kernel_row,) = (r for r in trace["results"] if r["variant"] == "hf-static-breaks" and "decode_" in r["part"])
of_kernel, traced_us = kernel_row["share"], kernel_row["us_a_step"] / kernel_row["calls_a_step"]
launching = traced["hf-static-breaks"]["launch_us"] / 1e3 / traced["hf-static-breaks"]["profiled_ms"]
print(story["setup"]["shape"], "rows:", ROWS, "·", "; ".join(map(provenance, (story, decode))))

# %% [markdown]
# ## 1 · A promise
#
# The kernel alone, in microseconds per call. `sdpa-repeat` is what `generate` computes: it repeats keys and values for
# each query head and then calls PyTorch's attention. `sdpa-gqa` lets PyTorch's attention share the heads. The green
# bars are the three kernels of lesson 09. **Look for** how much shorter `ours` is than the first bar and the second.

# %% tags=["hide-input"]
# @title Figure: attention alone
LABELS = {"sdpa-repeat": "sdpa-repeat", "sdpa-gqa": "sdpa-gqa", "simple": "09, step 1", "split": "09, step 2"}
LABELS |= {"cute": "ours (09, step 3)"}
fig, ax = plt.subplots(figsize=(7.5, 2.5))
colors = [SKY if name.startswith("sdpa") else GREEN for name in LABELS]
bars = ax.barh(list(LABELS.values()), [alone[name] for name in LABELS], color=colors)
ax.bar_label(bars, fmt="%.1f", padding=3)
tokens = next(r["shape"][1] for r in story["results"] if "us" in r)
ax.set(xlabel="µs per call", title=f"Attention of one layer, {ROWS} rows of {tokens} tokens, {provenance(story)}")
ax.margins(x=0.1)
ax.invert_yaxis()
plt.show()
times_repeat, times_gqa = alone["sdpa-repeat"] / alone["cute"], alone["sdpa-gqa"] / alone["cute"]

# %% [markdown]
# {{ times_repeat:.1f }} times as fast as what it replaces, and only {{ times_gqa:.1f }} times as fast as the stronger
# competitor. A speedup without its baseline means nothing.
#
# What will the step gain? Take the {{ qwen.layers }} calls in a step, at the time that each takes alone, and apply
# Amdahl's law.


# %%
def amdahl(share: float, faster: float) -> float:
    """Speed-up of a whole of which a share becomes `faster` times as fast."""
    return 1 / (1 - share + share / faster)


by_time = qwen.layers * alone["sdpa-repeat"] / 1e3 / ms["compiled"]
print(f"{qwen.layers} calls of the old attention: {by_time:.0%} of the step")
print(f"our kernel: {amdahl(by_time, times_repeat):.2f}×, attention for free: {amdahl(by_time, 1e9):.2f}×")
promised = ms["compiled"] / amdahl(by_time, times_repeat)

# %% [markdown]
# The promise: the step takes {{ promised:.2f }} ms instead of {{ ms["compiled"]:.2f }}.

# %% tags=["hide-input"]
# @title Your bet
first_bet = bet(
    f"The step that `generate` compiles takes {ms['compiled']:.1f} ms. How long will it take with our kernel in it?",
    (0.5, 40.0, 0.5),
    unit="ms",
)

# %% [markdown]
# ## 2 · Put it in
#
# transformers calls attention by name: you register a function under a name, and tell the model the name. Here's ours.
# It leaves prompts to `sdpa`. For one token per row it turns the mask into a first and a last slot and calls the
# kernel.

# %%
display(Markdown(f"```python\n{inspect.getsource(attention.forward)}```"))

# %% [markdown]
# `attend` is the kernel, in one of two wrappings. **`breaks`** is a function that Dynamo may not look into, which is
# how a launcher written in C, or CuTe DSL's own compiler, looks to Dynamo. **`operation`** is the same kernel
# registered with `torch.library`. On a CPU a reference in PyTorch takes the kernel's place, so we can try both. First:
# are the tokens right?

# %%
WAYS = {"sdpa": "sdpa", "breaks": attention.BREAKS, "operation": attention.OPERATION}
rollouts = {
    name: HFEngine(policy, torch.float32, "static", attention=way).generate(prompts, 2, pick(12, 40), GREEDY)
    for name, way in WAYS.items()
}
for name, rollout in rollouts.items():
    same = torch.equal(rollout.completion_ids, rollouts["sdpa"].completion_ids)
    gap = (rollout.logprobs - rollouts["sdpa"].logprobs).abs().max().item()
    print(f"{name:10} the same greedy tokens: {same}, log-probs differ by at most {gap:.0e}")
    assert same and gap < 1e-3

# %% [markdown]
# They are, padding included. And the time on the H200, with the wrapping `breaks`?

# %% tags=["hide-input"]
# @title What became of the bet
first_bet.result(ms["our kernel, breaks"])
slower = ms["our kernel, breaks"] / ms["compiled"]

# %% [markdown]
# {{ slower:.1f }} times as long, with a kernel that is {{ times_repeat:.1f }} times as fast. {{ assert slower > 5 }}
#
# ## 3 · Three suspects
#
# **The kernel itself.** Is it slow in here? In lesson 06's trace of this step, all its calls together take {{ 100 *
# of_kernel:.1f }}% of the time. {{ assert 0 < of_kernel < 0.02 }} Acquitted.
#
# **The launches.** In eager mode, the host launches every kernel of a step itself. With a static cache, `generate`
# compiles the step without being asked and packs most kernels into CUDA graphs. Our kernel breaks that compiled step.
# How far back does it throw us?

# %% tags=["hide-input"]
# @title Your bet
launched = {name: STEPS[name]["launches_a_step"] for name in STEPS}
second_bet = bet(
    f"{launched['compiled']:.0f} launches per step compiled, {launched['eager, static cache']:,.0f} eager. How many "
    f"with our kernel and its breaks? (The model has {qwen.layers} layers.)",
    (0, 1500, 10),
    unit="launches",
)

# %% tags=["hide-input"]
# @title Table: kernels and launches
SO_FAR = ["eager, dynamic cache", "eager, static cache", "our kernel, breaks", "compiled"]
second_bet.result(round(launched["our kernel, breaks"]))
lines = ["| step | kernels | launches by the host |", "| --- | ---: | ---: |"]
lines += [f"| {name} | {STEPS[name]['kernels_a_step']:,.0f} | {launched[name]:,.0f} |" for name in SO_FAR]
display(Markdown("\n".join(lines)))
fewer = launched["our kernel, breaks"] / launched["eager, static cache"]

# %% [markdown]
# Fewer than half of eager's: much of the step is still compiled. {{ assert 0.3 < fewer < 0.5 }} If only launches
# counted, it would take {{ 100 * fewer:.0f }}% of the time of an eager step. Does it? **Look for** where it is beside
# the two eager steps. The scale is logarithmic.

# %% tags=["hide-input"]
# @title Figure: the steps


def draw_steps(names: list[str], floor: float | None = None) -> None:
    """The time of each step on a logarithmic scale, and the floor."""
    _, ax = plt.subplots(figsize=(8.5, 0.8 + 0.42 * len(names)))
    for y, name in enumerate(names):
        color = VERMILION if "breaks" in name else GREEN if name.startswith("our") else SKY
        ax.plot(ms[name], y, marker="o", color=color, markersize=9, linestyle="")
        ax.annotate(f"{ms[name]:.2f} ms", (ms[name], y), (9, 0), textcoords="offset points", va="center")
    ax.set_yticks(range(len(names)), names)
    if floor:
        ax.axvline(floor, color=BLACK, linestyle=":", label="its bytes, at the rate of a copy")
        ax.legend(loc="lower right")
    ax.set(xscale="log", xlim=(0.2, 60), ylim=(len(names) - 0.5, -0.5), xlabel="ms per step")
    ax.set_xticks([0.3, 1, 3, 10, 30], [0.3, 1, 3, 10, 30])
    ax.set_title(f"One decode step of {ROWS} rows, {provenance(story)}")
    ax.grid(axis="x")
    plt.show()


draw_steps(SO_FAR)
worth = ms["eager, static cache"] / ms["compiled"]
raised_ms = ways["hf-static-breaks-raised"]["ms_per_step"]

# %% [markdown]
# No: **`breaks` runs at eager speed**, with fewer than half the launches. {{ assert ms["eager, dynamic cache"] <
# ms["our kernel, breaks"] < ms["eager, static cache"] }} So launches alone don't explain it, either.<br><small>Lesson
# 07's eager steps are from another run, with a slower host.</small>
#
# **The host's Python.** In the trace the GPU is idle for {{ 100 * idle["breaks"]:.0f }}% of the step, so it waits for
# the host. Yet the calls that launch take only {{ 100 * launching:.0f }}% of the traced step. {{ assert idle["breaks"]
# > 0.85 and launching < 0.3 }} The rest goes to what's between the launches: before each piece the compiled code checks
# its guards, and what Dynamo left out runs as ordinary Python, operation by operation. No kernel, however fast, gives
# back time in which the GPU waits.
#
# **We lost nearly all that compiling was worth**, here a factor of {{ worth:.1f }}, and without an error. On another
# machine that's another factor, which is why the story's 3 and our {{ slower:.0f }} needn't agree.
#
# ## 4 · Find out why
#
# First count the pieces. A *backend* is what Dynamo hands its graphs to; this one compiles nothing and takes notes.


# %% tags=["hide-input"]
# @title `pieces(model, way)`: `generate` with a backend that counts
@dataclasses.dataclass
class Pieces:
    """What Dynamo made of a decode step. operations: of each graph; order: which graphs ran, in one step."""

    operations: list[int]
    order: list[int]
    tokens: list[int]
    names: list[list[str]]


def pieces(model, way: str, steps: int = 4, **options) -> Pieces:
    """`generate` with a static cache, compiling itself, with a backend that counts."""
    operations, names, order = [], [], []

    def backend(graph, inputs):
        number = len(operations)
        names.append([node.name for node in graph.graph.nodes if node.op.startswith("call")])
        operations.append(len(names[-1]))
        return lambda *arguments: order.append(number) or graph(*arguments)

    attention.use(model, way)
    config = CompileConfig(backend=backend, mode=None, **{"fullgraph": False} | options)
    config._compile_all_devices = True  # a switch of transformers' own tests: compile on a CPU as well
    settings = {"max_new_tokens": steps + 1, "do_sample": False, "eos_token_id": model.config.vocab_size}
    settings |= {"pad_token_id": 0, "cache_implementation": "static", "compile_config": config}
    ids = torch.arange(1, 13)[None]
    torch._dynamo.reset()
    tokens = model.generate(input_ids=ids, attention_mask=ids * 0 + 1, generation_config=GenerationConfig(**settings))
    assert len(order) % steps == 0
    return Pieces(operations, order[-len(order) // steps :], tokens[0, 12:].tolist(), names)


def tiny(depth: int):
    """A random Qwen2 with `depth` layers."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 128}
    return Qwen2ForCausalLM(
        Qwen2Config(num_hidden_layers=depth, num_attention_heads=4, num_key_value_heads=2, **sizes)
    ).eval()


# %%
deep = {name: pieces(tiny(12), way) for name, way in WAYS.items()}
for name, f in deep.items():
    print(f"{name:10} graphs {len(f.operations):3}, pieces that run in a step {len(f.order):3}", end=", ")
    print(f"operations in them {sum(f.operations[number] for number in f.order)}")
assert len(deep["sdpa"].order) == len(deep["operation"].order) == 1 < len(deep["breaks"].order)
assert deep["operation"].tokens == deep["sdpa"].tokens == deep["breaks"].tokens

# %% [markdown]
# One program became {{ len(deep["breaks"].order) }} pieces (twelve layers, random weights), and some operations aren't
# in any piece. Each mark below is a piece that ran, from left to right; marks at the same height are the same compiled
# graph. **Look for** the rhythm, and where it changes.

# %% tags=["hide-input"]
# @title Figure: the rhythm of a broken step
order, sizes = deep["breaks"].order, deep["breaks"].operations
heaviest = max(sizes)
heavy = [i for i, number in enumerate(order) if sizes[number] == heaviest]
light = [i for i, number in enumerate(order) if sizes[number] < heaviest]
fig, ax = plt.subplots(figsize=(10, 3.2))
ax.scatter(light, [order[i] for i in light], color=SKY, marker="s", s=26, label="small pieces")
label = f"up to the break ({heaviest} operations)"
ax.scatter(heavy, [order[i] for i in heavy], color=VERMILION, marker="D", s=34, label=label)
layer = heavy[1] - heavy[0]  # pieces of a layer; the norm of the next one stands before its attention
ax.axvspan(heavy[-1] + layer - 1.5, len(order), color="#eeeeee", zorder=0)
ax.text(heavy[-1] + layer - 1, 0.62 * max(order), "from here on attention's\nforward runs eagerly")
ax.set(xlabel="pieces, in the order of one step", ylabel="number of the graph", ylim=(-1, max(order) + 5))
ax.set_title("One decode step of twelve layers, attention that breaks the graph")
ax.legend(loc="upper left", ncols=2)
ax.grid()
plt.show()
versions, limit = len({order[i] for i in heavy}), torch._dynamo.config.recompile_limit
missing = set(order[heavy[0] : heavy[1]]) - set(order[heavy[-1] + layer - 1 :])  # of a layer's pieces, from then on

# %% [markdown]
# Small pieces come back, compiled once. The heavy one (projections, rotary embedding and cache write, up to the break)
# is **another graph in each layer**, {{ versions }} times, and then it stops coming: {{ assert versions == limit ==
# len(heavy) < 12 }} in the other {{ 12 - versions }} layers attention's `forward` runs eagerly. {{ assert len(missing)
# == 2 and heavy[0] + 3 == order.index(max(missing - {order[heavy[0]]})) }} Dynamo says why if you ask it. On the
# command line that's `TORCH_LOGS=graph_breaks,recompiles python train.py`; here we collect the log.

# %% tags=["hide-input"]
# @title What Dynamo says
from torch._dynamo.utils import counters


class Collect(logging.Handler):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record) -> None:
        self.lines.append(record.getMessage())


def dynamo_says(run) -> list[str]:
    """The lines that Dynamo logs while `run()` runs: breaks are counted elsewhere, these are of recompilations."""
    handler, logger = Collect(), logging.getLogger("torch._dynamo")
    torch._logging.set_logs(dynamo=logging.WARNING, recompiles=True)
    noisy = [child for name, child in logging.Logger.manager.loggerDict.items() if name.startswith(logger.name)]
    noisy = [(child, list(child.handlers)) for child in noisy if isinstance(child, logging.Logger) and child.handlers]
    for child, _ in noisy:
        child.handlers = [handler]
    run()
    for child, handlers in noisy:
        child.handlers = handlers
    torch._logging.set_logs(dynamo=logging.CRITICAL)
    return [" ".join(line.split()) for text in handler.lines for line in text.splitlines()]


counters.clear()
said = dynamo_says(lambda: pieces(tiny(12), attention.BREAKS))
for reason in counters["graph_break"]:
    print(f"graph break: {reason.splitlines()[0]}")
for line in dict.fromkeys(said):
    if "layer_idx == 0" in line or "recompile_limit" in line or "last reason" in line:
        print(line.split(" # ")[0])
breaks = sum(counters["graph_break"].values())
assert breaks and any("layer_idx == " in line for line in said)

# %% [markdown]
# Dynamo can't end a graph in the middle of a loop over layers and resume there, so it gives up on the function with the
# loop and compiles the functions that this one calls, one by one. Attention's `forward` reads `self.layer_idx`, a
# Python number, to find its part of the cache. The compiled code is valid for that number only, so the next layer fails
# the guard and is compiled again. At version {{ limit }} the **recompile limit** is reached. Dynamo logs one warning
# and runs the function eagerly from then on.
#
# So raise the limit! Every layer gets its own version, and no layer falls back to eager.

# %% tags=["hide-input"]
# @title Your bet
NUMBERS = ["fewer pieces: all layers are compiled now", "as many pieces as before", "more pieces"]
third_bet = bet(f"Recompile limit 64 instead of {limit}. What becomes of the {len(order)} pieces per step?", NUMBERS)

# %%
with torch._dynamo.config.patch(recompile_limit=64):
    raised = pieces(tiny(12), attention.BREAKS)
third_bet.result(NUMBERS[(len(raised.order) >= len(order)) + (len(raised.order) > len(order))])
print(f"graphs {len(raised.operations)}, pieces that run in a step {len(raised.order)}")

# %% [markdown]
# More: what ran eagerly now runs in pieces, and the break is still there in every layer. A compiled layer is {{ layer
# }} pieces (lesson 07's four, and two around the kernel), one with eager attention {{ layer - len(missing) }}, and
# three belong to no layer. So it was {{ versions }} × {{ layer }} + {{ 12 - versions }} × {{ layer - len(missing) }} +
# 3, and is 12 × {{ layer }} + 3. {{ assert len(order) == versions * layer + (12 - versions) * (layer - len(missing)) +
# 3 and len(raised.order) == 12 * layer + 3 }} On the H200 the step is still no faster than an eager one. {{ assert
# raised_ms > ms["eager, dynamic cache"] }} The only cure is to have no break.
#
# ### A tripwire, and what it misses
#
# `CompileConfig(fullgraph=True)` turns a break into an error. We try it on both wrappings, and on a third that has the
# host read how long the longest row is, to give the kernel a shorter cache.


# %%
def peeking(q, k, v, position, start):
    """The operation, on as many slots as the longest row needs: a number that the host must fetch."""
    longest = position.max().item() + 1
    return attention.operation(q, k[:, :, :longest], v[:, :, :longest], position, start)


AttentionInterface.register("peeks", attention.forward(peeking))
AttentionMaskInterface.register("peeks", sdpa_mask)
for name, way in (WAYS | {"peeks": "peeks"}).items():
    print(f"{name:10} pieces per step without fullgraph {len(pieces(tiny(4), way).order):3}", end="; ")
    try:
        strict = pieces(tiny(4), way, fullgraph=True)
        fetched = sum("item" in node and "getitem" not in node for nodes in strict.names for node in nodes)
        print(f"with it accepted: {len(strict.order)} piece, in which the host reads {fetched} numbers")
    except torch._dynamo.exc.Unsupported as error:
        print("with it refused:", str(error).splitlines()[0])

# %% [markdown]
# It catches the break. The `.item()` passes: with `fullgraph=True` Dynamo takes it into the graph as an operation.
# That's one graph, and in every layer of it the GPU must finish before the host can go on. So count both: pieces,
# **and** numbers that the host reads.
#
# ## 5 · The mask that never arrives
#
# There's a second trap here, and this one corrupts results. transformers makes a mask for a name only if the name is in
# `AttentionMaskInterface` as well. Otherwise it passes `None`, and a function that takes `None` to mean "attend to
# everything", as nearly all do, attends to padding and to slots of the static cache that hold nothing yet.


# %%
def naive(module, query, key, value, attention_mask, **kwargs):
    """What one writes first: it passes on whatever mask it is given."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    prompt = query.shape[2] > 1 and attention_mask is None
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, is_causal=prompt)
    return out.transpose(1, 2), None


AttentionInterface.register("naive", naive)  # and nothing else
endless = dataclasses.replace(policy, eos_ids=[policy.model.config.vocab_size])  # an id that is never drawn
new = pick(12, 40)
for name, some in (("one prompt, no padding", prompts[:1]), ("eight prompts, padded", prompts)):
    expected = HFEngine(endless, torch.float32, "static").generate(some, 1, new, GREEDY)
    got = HFEngine(endless, torch.float32, "static", attention="naive").generate(some, 1, new, GREEDY)
    agree = (got.completion_ids == expected.completion_ids).all(1).float().mean()
    print(f"{name:23} answers with the right tokens: {agree:.0%}")
assert agree < 1
for label, rollout in (("expected", expected), ("got", got)):
    text = policy.tokenizer.decode(rollout.completion_ids[0])
    print(f"{label:9}", repr(text.split("<|im_end|>")[0]))

# %% [markdown]
# It ran without an error, and its output even looks like an answer. In a training loop these answers, and their
# log-probs, wouldn't be the model's. One line fixes it. Our own function refuses to guess:

# %%
AttentionMaskInterface.register("naive", sdpa_mask)
mended = HFEngine(endless, torch.float32, "static", attention="naive").generate(prompts, 1, new, GREEDY)
print("naive, with a mask: the right tokens:", torch.equal(mended.completion_ids, expected.completion_ids))
assert torch.equal(mended.completion_ids, expected.completion_ids)
AttentionInterface.register("ours, no mask", attention.forward(attention.operation))
try:
    HFEngine(endless, torch.float32, "static", attention="ours, no mask").generate(prompts, 1, 3, GREEDY)
    raise AssertionError("it should have refused")
except ValueError as error:
    print("ours, without one:", error)

# %% [markdown]
# ## 6 · Close the gap
#
# ### An operation with a fake
#
# Dynamo needn't look into the kernel. It only needs to know the output's shape, dtype and strides.
# `torch.library.custom_op` gives a function a name that stays in the graph, and a **fake** replaces it while Dynamo
# builds the graph. `opcheck` compares the two. Here's a fake that lies:


# %%
@torch.library.custom_op("lesson10::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(2 * x.numpy().copy(order="C"))  # without gaps, whatever x was; Dynamo stays out


doubled.register_fake(torch.empty_like)  # but this takes over the order of x's strides
graphs = []
compiled = torch.compile(lambda x: doubled(x) + 1, fullgraph=True, backend=lambda g, _: graphs.append(g) or g.forward)
compiled(torch.randn(3, 5))
print("one graph:", [str(node.target) for node in graphs[0].graph.nodes if node.op.startswith("call")])
try:
    torch.library.opcheck(doubled, (torch.randn(4, 6).T,))
except Exception as error:
    found = [line for line in str(error).replace(": ", ":\n").splitlines() if "stride" in line.lower()]
    print(type(error).__name__ + ":", found[-1] if found else error)

# %% [markdown]
# The wrapping `operation` is registered this way, with a correct fake, and section 4 showed its single graph. Back to
# the promise of section 1. **Look for** how far `our kernel, operation` is from `compiled`, and from the last step.

# %% tags=["hide-input"]
# @title Figure: all steps
floor = ladder["hf-static-compiled"]["floor_ms"]
draw_steps(list(STEPS), floor)
gain = ms["compiled"] / ms["our kernel, operation"]
saved_us = 1e3 * (ms["compiled"] - ms["our kernel, operation"]) / qwen.layers  # per call
hoped_us = alone["sdpa-repeat"] - alone["cute"]
noise = max(ways[name]["spread"] for name in ("hf-static", "hf-static-operation"))

# %% [markdown]
# A faster kernel in one graph *is* a gain, {{ gain:.2f }} times, where repetitions differ by {{ 100 * noise:.0f }}%.
# It's smaller than the promised {{ amdahl(by_time, times_repeat):.2f }} times. {{ assert 1 + 3 * noise < gain <
# amdahl(by_time, times_repeat) }} Each call saved {{ saved_us:.0f }} µs instead of {{ hoped_us:.0f }}. Ours isn't
# slower in a step: in lesson 06's trace a call takes {{ traced_us:.1f }} µs. {{ assert traced_us < alone["cute"] }} So
# the old one must cost less in here, about {{ saved_us + traced_us:.0f }} µs instead of {{
# alone["sdpa-repeat"]:.0f }}: the compiler had made it faster already.
#
# ### Out of `generate`
#
# Why is this step still so far from the floor? One graph per step isn't one launch per token. Between two steps
# `generate` makes a mask, runs logits processors, samples, and asks whether all rows have ended. Some of that makes the
# host **read a number** off the GPU, and a read is a full stop. We count reads (`.item()` ends in
# `aten::_local_scalar_dense`) and, with a clock around the model, the time spent outside of it.

# %%
from torch.profiler import profile


def reads(name: str, few: int = 8, many: int = 24) -> float:
    """Numbers that the host reads in one decode step."""
    engine, seen = make_engine(endless, name, torch.float32), []
    engine.generate(prompts, 2, 4, Sampling())
    for new_tokens in (few, many):
        with profile() as trace:
            engine.generate(prompts, 2, new_tokens, Sampling())
        seen.append(sum(event.name == "aten::_local_scalar_dense" for event in trace.events()))
    return (seen[1] - seen[0]) / (many - few)


def outside_the_model() -> tuple[float, float]:
    """Milliseconds of a step of `generate`, and how many of them the model itself does not run."""
    engine = HFEngine(endless, torch.float32, "static", compile=False)
    inside, forward = [], engine.model.forward

    def timed(*arguments, **options):
        start = time.perf_counter()
        result = forward(*arguments, **options)
        inside.append(time.perf_counter() - start)
        return result

    engine.model.forward = timed
    engine.generate(prompts[:1], 4, 8, Sampling())
    inside.clear()
    start = time.perf_counter()
    engine.generate(prompts[:1], 4, pick(24, 96), Sampling())
    whole = time.perf_counter() - start
    del engine.model.forward  # the class's own is there again
    return 1e3 * whole / len(inside), 1e3 * (whole - sum(inside)) / len(inside)


step_ms, loop_ms = outside_the_model()
print(f"numbers read in a step: generate {reads('hf-static'):.0f}, our engine {reads('fast'):.0f}")
print(f"generate on this CPU: {step_ms:.2f} ms per step, {loop_ms:.2f} of them outside the model")

# %% [markdown]
# A better kernel doesn't touch this work. So the last step leaves `generate`: a decode step of our own that includes
# sampling, with everything at fixed addresses, recorded as **one** CUDA graph (lesson 07), with lesson 09's kernel. No
# compiler is involved, so a custom kernel can't break a compiled graph. It's {{ ms["compiled"] / ms["our own step"]:.1f
# }} times as fast as the step that `generate` compiles, and its GPU is idle for {{ 100 * idle["own"]:.0f }}% of the
# time. {{ assert idle["own"] < 0.05 }}
#
# The graph isn't the whole reason: nearly everything else in this step runs in fused kernels of our own, too. Lesson
# 07's ladder separates the two: compiled `generate` → our step in plain PyTorch, as a graph → the same with our
# kernels. The second arrow gains more than the first. {{ assert ladder["graph-eager"]["ms_per_step"] /
# ladder[OURS]["ms_per_step"] > ladder["hf-static-compiled"]["ms_per_step"] / ladder["graph-eager"]["ms_per_step"] > 1
# }}
#
# **What runs today.** The engine's default step has its attention, norms and sampler in Triton, because those add up in
# the trainer's order (lesson 11). On Hopper its matmuls are in CuTe DSL, with the same bits, and from 64 rows on faster
# than Triton's. {{ assert products["graph-exact"] < products["graph-triton"] }} The kernel of lesson 09 is an option:
# `TorchEngine(policy, torch.bfloat16, attention=decode_attention)` plugs it, or one of yours, into our step in plain
# PyTorch, and takes that one from {{ ladder["graph-eager"]["ms_per_step"]:.2f }} to {{
# ladder["graph-attention"]["ms_per_step"]:.2f }} ms. {{ assert ladder["graph-attention"]["ms_per_step"] < 0.95 *
# ladder["graph-eager"]["ms_per_step"] }}
#
# <small>On a GPU our engine reads the end flags only every few steps.</small>
#
# ## 7 · What the training step gains
#
# The rollout is one phase of a training step. Amdahl's law again: if the rollout is a share $f$ and becomes $g$ times
# as fast, the step becomes $1 / (1 - f + f / g)$ times as fast. Will it hold?

# %% tags=["hide-input"]
# @title Your bet
base = ways["hf-static"]
f, faster = base["rollout_s"] / base["step_s"], ms["compiled"] / ms["our own step"]
fourth_bet = bet(
    f"With compiled `generate` the rollout is {f:.0%} of a training step. Our own decode step is {faster:.1f} times as "
    "fast. How many times as fast is the whole training step, measured?",
    (1.0, 6.0, 0.1),
    unit="times",
)

# %%
errors = {}
lines = [f"compiled generate: {base['step_s']:.2f} s per training step, the rollout is {f:.0%} of it"]
for name in ("our kernel, breaks", "our kernel, operation", "our own step"):
    predicted, measured = amdahl(f, ms["compiled"] / ms[name]), base["step_s"] / STEPS[name]["step_s"]
    errors[name] = predicted / measured - 1
    lines.append(f"{name:22} predicted {predicted:.2f}×, measured {measured:.2f}× ({STEPS[name]['step_s']:.2f} s)")
fourth_bet.result(measured)
print("\n".join(lines))
own, operation = STEPS["our own step"], STEPS["our kernel, operation"]
update_ms = [1e3 * row["update_s"] for row in ways.values() if "update_s" in row]
range_ms, gain_ms = max(update_ms) - min(update_ms), 1e3 * (base["step_s"] - operation["step_s"])
attention_free = amdahl(
    own["rollout_s"] / own["step_s"] * qwen.layers * alone["cute-ahead"] / 1e3 / ms["our own step"], 1e9
)

# %% [markdown]
# With a share and a gain **measured in the loop itself**, Amdahl's law is off by at most {{ 100 *
# max(errors.values()):.0f }}%. {{ assert max(map(abs, errors.values())) == max(errors.values()) < 0.15 }} Part of that
# is noise: each number is a median of {{ story["setup"]["repeats"] }} steps, and the update, the same program in all of
# them, took {{ min(update_ms):.0f }} to {{ max(update_ms):.0f }} ms. So read the operation's gain with care: {{
# gain_ms:.0f }} ms, where noise alone makes {{ range_ms:.0f }}. {{ assert 1.5 < gain_ms / range_ms < 2.5 }} The sum of
# microbenchmarks in section 1 was off by {{ 100 * ms["our kernel, operation"] / promised - 100:.0f }}%. {{ assert
# ms["our kernel, operation"] / promised - 1 > 2 * max(errors.values()) }}
#
# Attention for free would make our training step {{ attention_free:.2f }} times as fast. {{ assert attention_free <
# 1.15 }} It's time to stop writing attention kernels.
#
# ## 8 · The mystery in ten numbers

# %% tags=["hide-input"]
# @title Table: ten numbers
broken = STEPS["our kernel, breaks"]
TEN = [
    ("the kernel alone, against what it replaces", f"{times_repeat:.1f}× faster"),
    ("the decode step that `generate` compiles", f"{ms['compiled']:.1f} ms"),
    ("with our kernel, in a wrapping that breaks the graph", f"{ms['our kernel, breaks']:.1f} ms"),
    ("nothing compiled at all, static cache", f"{ms['eager, static cache']:.1f} ms"),
    ("launches per step, compiled", f"{STEPS['compiled']['launches_a_step']:.0f}"),
    ("launches per step, broken", f"{broken['launches_a_step']:.0f}"),
    ("of the broken step, the GPU is idle", f"{idle['breaks']:.0%}"),
    ("the same kernel as an operation, one graph", f"{ms['our kernel, operation']:.1f} ms"),
    ("our own step, one CUDA graph", f"{ms['our own step']:.2f} ms"),
    ("the whole training step, `generate` compiled → our own", f"{measured:.1f}× faster"),
]
lines = ["| | |", "| --- | ---: |", *(f"| {what} | {number} |" for what, number in TEN)]
display(Markdown("\n".join([*lines, "", provenance(story)])))

# %% [markdown]
# Case closed, at least for our staging of it. The kernel was never slow. It ended the compiled graph in every layer, so
# the step lost what compiling was worth, and the GPU spent the difference waiting for the host. Registered as an
# operation, the kernel keeps the graph whole, and the gain is real but small. The large gains came from a step of our
# own: one graph, and fused kernels all the way through.
#
# ## 9 · Before you believe that a kernel is faster
#
# 1. **Write down a prediction**, with the share measured in the step, and free attention as the bound. (Register an
#    attention that returns zeros, and time that.)
# 2. **Compare results**: tokens and log-probs, with padding, rows of different lengths, a cache that is not full. Make
#    sure that a mask arrives.
# 3. **Time the loop, not the call**, against its baseline in the same run, and against the **eager** loop: if you are
#    near that, look for what switched the compiler off.
# 4. **Count** graphs, pieces per step and numbers that the host reads. A backend of a few lines does it, on a CPU, in a
#    test. Set tripwires: `fullgraph=True`, `opcheck`.
# 5. **Look at what waits.** If the GPU is idle half of the time, work on that and not on kernels.
# 6. **End at the training step**, measured, against the prediction.
#
# ## Check yourself
#
# 1. A kernel is 10 times as fast as its baseline; attention is 10% of the step. What is the best you can hope for?
#
# <details><summary>Answer</summary>
# 1 / (0.9 + 0.01) = 1.10 times. Attention for free would give 1.11.
# </details>
#
# 2. The same broken attention, in a model of six layers. You raise the recompile limit from 8 to 64. What becomes of
#    the pieces?
#
# <details><summary>Answer</summary>
# Nothing. Six layers need only six versions, below the limit, so no layer had fallen back to eager. The break is still
# there in every layer: register the kernel as an operation with a fake.
# </details>
#
# 3. Why is the function with the projections compiled anew for each layer, and the MLP not?
#
# <details><summary>Answer</summary>
# It reads the number of its layer, a Python integer, to find its cache, and the compiled code is valid only for that
# number. The MLP's code depends on shapes and dtypes alone, which are the same in all layers; weights are inputs.
# </details>
#
# 4. `fullgraph=True` is accepted and there is one graph. Name two things that can still be wrong.
#
# <details><summary>Answer</summary>
# The host reads a number inside the graph (`.item()`), which stops the GPU; a fake lies about strides; a mask never
# came.
# </details>
#
# 5. Why can't the same kernel break anything in a step that we record as a CUDA graph ourselves? And what can go wrong
#    there without an error?
#
# <details><summary>Answer</summary>
# No compiler is involved: whatever is launched while recording is replayed. A read by the host is refused while
# recording. A Python value is **not** refused: it's baked in. A position passed as a number, or a branch taken while
# recording, stays the same in every replay. (New tensors come from the graph's own pool, so the next replay overwrites
# a result that you kept.)
# </details>
#
# ## Exercises
#
# [exercises/10_faster_kernel_slower_loop.ipynb](../exercises/10_faster_kernel_slower_loop.ipynb): the two clocks of a
# step, a colleague's attention with four mistakes in it, the slots that a row may read, a fake, and a step in sixteen
# pieces that you bring to one. Then go on to [11 · An engine for RL](11_engine_for_rl.ipynb).
#
# ## Further reading
#
# - *Making Dr GRPO go brrr*, June 2026, kyrieblunders.bearblog.dev: the story, told by its author.
# - Ansel et al. 2024, *PyTorch 2*, ASPLOS: Dynamo, guards, graph breaks.
# - PyTorch's documentation: *Custom Operators*, *Common Graph Breaks* and *Dealing with Recompilations*.
# - transformers' documentation: *Attention Interface* and *Attention Mask Interface*.
