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
# - what a microbenchmark measures and what it leaves out, and what a faster kernel can give a step at most;
# - how a kernel gets into somebody else's loop, and how the right tokens can hide a broken program;
# - to find out in how many pieces a compiled step runs, why, and what the recompile limit makes of it;
# - the mask that silently does not come;
# - to close the gap rung by rung, and to predict what the whole training step gains.
#
# You need [lesson 07](07_static_cache.ipynb), section 4, for graph breaks, and [lesson 09](09_decode_attention.ipynb)
# for the kernel.
#
# This is a true story. Somebody wrote a decode attention in one kernel. Alone it was more than twice as fast as
# PyTorch's. In Hugging Face `generate` it gave the same tokens, and the decode step took about three times as long as
# before. Nothing had failed. In this lesson we do the same, on purpose, and look.

# %%
import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library is quiet, if told early
import dataclasses
import logging
import time
from collections import Counter

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown, display
from transformers.utils import logging as transformers_logging

from rlcourse.course import pick
from rlcourse.course.lessons import generate_attention as attention
from rlcourse.measure.memory import model_shape
from rlcourse.measure.plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION
from rlcourse.measure.records import load_record, provenance, record_markdown
from rlcourse.measure.roofline import decode_step
from rlcourse.policy import load_policy
from rlcourse.rollout import make_engine
from rlcourse.rollout.hf import HFEngine
from rlcourse.sampling import GREEDY, Sampling
from rlcourse.tasks import load_task

transformers_logging.set_verbosity_error()
torch._logging.set_logs(dynamo=logging.CRITICAL)  # here graphs are broken on purpose
policy, task = load_policy("embedded"), load_task("minigsm")
prompts = [policy.prompt(p.question) for p in task.problems("train")[:8]]
layers = policy.model.config.num_hidden_layers
print(f"{layers} layers, {len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens")

# %% [markdown]
# What only a GPU can tell comes from a record, `story`: attention alone, each way into the loop, and whole training
# steps, all in **one** run. That matters: numbers of two days are numbers of two machines.


# %%
def from_story(show):
    """`show(record)` for an H200's record of the story; without one, a sentence that says how to measure it."""
    try:
        record = load_record("story", "NVIDIA H200")
    except FileNotFoundError:
        print("Not recorded on an NVIDIA H200 yet: `rlcourse bench story --record` measures it there.")
        return None
    result = show(record)
    print(provenance(record))
    return result


def engine_rows(record: dict, rows: int | None = None) -> dict[str, dict]:
    """The rows of the four engines by name, for the smallest number of rows if not given."""
    rows = rows or min(r["rows"] for r in record["results"])
    return {r["variant"]: r for r in record["results"] if r["rows"] == rows and "ms_per_step" in r}


def alone(record: dict, rows: int) -> dict[str, float]:
    """Microseconds of attention alone, by the name of its kernel."""
    micro = [r for r in record["results"] if r["rows"] == rows and "us" in r]
    return {r["variant"].removeprefix("micro-attention-"): r["us"] for r in micro}


def row_counts(record: dict) -> list[int]:
    """Numbers of rows in the record, the smallest first."""
    return sorted({r["rows"] for r in record["results"]})


from_story(lambda record: print(record["setup"]))

# %% [markdown]
# ## 1 · The microbenchmark
#
# First the kernel alone. On a CPU the interpreter of lesson 08 executes its machine-level program and counts: what the
# warps execute, and how many bytes of the cache they ask for. One row with the heads of Qwen2.5-0.5B and a full cache.
# **Look for** which of the two columns tells the kernels apart.

# %%
from rlcourse.course.kernels.decode_simple import SimpleDecode
from rlcourse.course.kernels.decode_split import SplitDecode
from rlcourse.kernels import dsl
from rlcourse.kernels.decode_attention import DecodeAttention
from rlcourse.kernels.decode_common import decode_attention_reference, workspace_arguments
from rlcourse.kernels.toolchain import simulate

torch.manual_seed(0)
H, K, D, S, SPLITS = 14, 2, 64, pick(256, 512), 2
q, position = torch.randn(1, H, D).bfloat16(), torch.tensor([S - 1])
k_cache, v_cache = (torch.randn(1, K, S, D).bfloat16() for _ in range(2))
exact = decode_attention_reference(q.float(), k_cache, v_cache, position)
reports = {}


def count(name: str, kernel, *more) -> None:
    """Interpret a kernel; keep its report."""
    out, middle = torch.zeros_like(q), (None,) * 6 if isinstance(kernel, DecodeAttention) else ()
    reports[name] = simulate(kernel, q, k_cache, v_cache, *middle, position, None, out, *more)
    error = ((out.float() - exact).norm() / exact.norm()).item()
    asked = reports[name].read["k_cache"] + reports[name].read["v_cache"]
    print(f"{name:22} {reports[name].total:7,} instructions of warps, {asked:9,} bytes of the cache, error {error:.0e}")


def room() -> list[torch.Tensor]:
    """Workspace in which the blocks of a row meet."""
    return [torch.zeros(K * SPLITS, *a.shape[1:], dtype=getattr(torch, a.dtype)) for a in workspace_arguments(D)]


if dsl.INSTALLED:
    count("simple", SimpleDecode(H, K, D))
    count("split", SplitDecode(H, K, D, splits=SPLITS), *room())
    count("split, tensor cores", DecodeAttention(H, K, D, splits=SPLITS), *room())
else:
    print("CuTe DSL is not installed here: pip install 'rlcourse[kernels]'.")
print(f"keys and values: {k_cache.nbytes + v_cache.nbytes:,} bytes;", end=" ")
print(f"repeated for all {H} heads, written and read again: {(1 + 2 * H // K) * (k_cache.nbytes + v_cache.nbytes):,}")

# %% [markdown]
# (A kernel that loads one tile ahead of its use asks for a little more than the cache has.)
#
# All three ask for about the bytes that must be read; `generate` with `sdpa` and a static cache moves many times that,
# since it repeats keys and values for each query head. So one expects a clear win, and on a GPU there is one. The
# record, microseconds of one call, many calls in one CUDA graph, each with a cache of its own. `sdpa` may choose among
# all of PyTorch's kernels, cuDNN's too; `sdpa-gqa` is what it can do if nobody repeats keys and values:


# %%
def show_micro(record: dict) -> None:
    """Bars of attention alone, one panel for each number of rows."""
    sizes = row_counts(record)
    fig, axes = plt.subplots(1, len(sizes), figsize=(5.2 * len(sizes), 3), squeeze=False)
    for ax, rows in zip(axes[0], sizes, strict=True):
        here = alone(record, rows)
        bars = ax.barh(list(here), list(here.values()), color=[SKY if n.startswith("sdpa") else GREEN for n in here])
        ax.bar_label(bars, fmt="{:.1f}", padding=3, fontsize=9)
        ax.set(title=f"{rows} rows", xlabel="µs a call")
        ax.invert_yaxis()
        ax.margins(x=0.18)
        ax.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    plt.show()
    for rows in sizes:
        here = alone(record, rows)
        for peer in ("sdpa-repeat", "sdpa-gqa"):
            print(f"{rows:4} rows: ours is {here[peer] / here['cute']:.1f} x as fast as {peer}")


from_story(show_micro)

# %% [markdown]
# Such a benchmark is honest about one thing: the kernel. It leaves out everything around it. The **host** that launches
# it (in the benchmark one CUDA graph holds all calls). The **mask** that somebody turns into lengths. The **compiler**
# that had a say in the code around. And the **rest of the step**, which is most of it.
#
# ### How much can it give?
#
# Amdahl's law needs the share of attention in a step. There are several shares, and they differ. By **bytes**, from the
# floor of lesson 06: keys and values against all that a step must read.

# %%
qwen = model_shape("Qwen/Qwen2.5-0.5B")


def byte_share(rows: int, context: int) -> float:
    """Keys and values as a share of the bytes of a decode step, in bfloat16."""
    work = decode_step(qwen, rows, context)
    return work.bytes["keys and values"] / work.total_bytes


for rows, context in ((16, 256), (64, 256), (256, 256), (256, 1024)):
    p = byte_share(rows, context)
    print(f"{rows:4} rows, {context:5} tokens: {p:5.1%} of the bytes; attention for free gives", end=" ")
    print(f"at most {1 / (1 - p):.2f} x, twice as fast {1 / (1 - p + p / 2):.2f} x")
assert byte_share(16, 256) < 0.1 < byte_share(256, 1024)

# %% [markdown]
# At the floor, with few rows and short answers, attention hardly matters. A real step is not at the floor, and in it
# the share is larger: `repeat_kv`, the mask. So **measure** it, and the simplest way is to leave attention out. An
# attention function that returns zeros gives nonsense, in the time that a step would take if attention were free. Live,
# on this CPU, eagerly:

# %%
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask


def free_attention(module, query, key, value, attention_mask, **kwargs):
    if query.shape[2] > 1:  # the prompt
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return torch.zeros_like(query).transpose(1, 2), None


AttentionInterface.register("free", free_attention)
AttentionMaskInterface.register("free", sdpa_mask)
endless = dataclasses.replace(policy, eos_ids=[policy.model.config.vocab_size])  # an id that is never drawn


def step_ms(engine, few: int = 8, many: int = pick(24, 72), repeats: int = pick(2, 7)) -> float:
    """Milliseconds of a decode step: the difference of two rollouts, each the fastest of several."""

    def seconds(new_tokens: int) -> float:
        start = time.perf_counter()
        engine.generate(prompts, 4, new_tokens, Sampling())
        return time.perf_counter() - start

    seconds(few)
    least = {n: min(seconds(n) for _ in range(repeats)) for n in (few, many)}  # others may use this machine, too
    return 1e3 * (least[many] - least[few]) / (many - few)


eager = {"sdpa": "sdpa", "attention for free": "free"}
eager_ms = {
    name: step_ms(HFEngine(endless, torch.float32, "static", compile=False, attention=way))
    for name, way in eager.items()
}
for name, ms in eager_ms.items():
    print(f"{name:20} {ms:6.2f} ms a step")
print(f"bound for any attention kernel here: {eager_ms['sdpa'] / eager_ms['attention for free']:.2f} x")

# %% [markdown]
# And on the GPU, from the record: the microbenchmark's time of `sdpa-repeat`, which is what `generate` computes, times
# the number of layers, as a share of the step that `generate` compiled itself.


# %%
def show_share(record: dict) -> None:
    for rows in row_counts(record):
        ms = engine_rows(record, rows)["hf-static"]["ms_per_step"]
        before, after = (qwen.layers * alone(record, rows)[way] / 1e3 for way in ("sdpa-repeat", "cute"))
        there = ms - before + after
        print(f"{rows:4} rows: step {ms:.2f} ms; attention, one call at a time, {before:.2f} ms, ours {after:.2f} ms")
        if before > ms / 1.05:
            print("           more than the whole step: the compiler already computes it better than that")
            continue
        print(f"           so the step should take {there:.2f} ms and be {ms / there:.2f} x as fast;", end=" ")
        print(f"with attention for free {ms / (ms - before):.2f} x")


from_story(show_share)

# %% [markdown]
# That is the **prediction**, made before the kernel is put in. Write yours down: a number is worth more if it can turn
# out wrong.
#
# ## 2 · Put it in
#
# transformers calls attention by name. A function is registered under a name, the model is told the name, and that is
# all. `rlcourse/course/lessons/generate_attention.py` does it: for one query token a row it turns the mask into a first
# and a last slot, and calls the kernel; for a prompt it leaves everything to `sdpa`. It does so in two ways,
#
# - `rlcourse-breaks`: the kernel behind a function that Dynamo may not look into. That is what a launcher written in C,
#   or a compiler of its own such as CuTe DSL's, looks like to Dynamo;
# - `rlcourse-operation`: the same kernel, registered with `torch.library`.
#
# On a CPU the reference in PyTorch stands in the kernel's place. First the question that everybody asks: are the tokens
# right?

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
# They are, for prompts of differing lengths, padding included. Now the question that matters as much: **what runs?** A
# counting backend as in lesson 07, which also notes the order in which the pieces run. One helper for the rest of the
# lesson:

# %%
from transformers import CompileConfig, GenerationConfig


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
    end = model.config.vocab_size
    settings = {"max_new_tokens": steps + 1, "do_sample": False, "eos_token_id": end, "pad_token_id": 0}
    settings |= {"cache_implementation": "static", "compile_config": config}
    ids = torch.arange(1, 13)[None]
    torch._dynamo.reset()
    tokens = model.generate(input_ids=ids, attention_mask=ids * 0 + 1, generation_config=GenerationConfig(**settings))
    assert len(order) % steps == 0
    return Pieces(operations, order[-len(order) // steps :], tokens[0, 12:].tolist(), names)


found = {name: pieces(load_policy("embedded").model.eval(), way) for name, way in WAYS.items()}
for name, f in found.items():
    print(f"{name:10} graphs {len(f.operations):3}, pieces run in a step {len(f.order):4}, largest", end=" ")
    print(f"{max(f.operations):4} operations, smallest {min(f.operations)}")
assert len(found["sdpa"].order) == len(found["operation"].order) == 1 < len(found["breaks"].order)
assert len({tuple(f.tokens) for f in found.values()}) == 1

# %% [markdown]
# One program became many. By the clock of a GPU, from the record. **Look for** two things: what the kernel did alone
# (left), and what the step did (right).


# %%
NAMES = {"hf-static": "sdpa", "hf-static-breaks": "breaks", "hf-static-operation": "operation", "graph": "own step"}
COLORS = {"hf-static": SKY, "hf-static-breaks": VERMILION, "hf-static-operation": ORANGE, "graph": GREEN}


def show_steps(record: dict) -> None:
    """Attention alone beside the step of each engine."""
    rows = min(r["rows"] for r in record["results"])
    us, steps = alone(record, rows), engine_rows(record, rows)
    kernels = {"sdpa-repeat": us["sdpa-repeat"], "ours": us["cute"]}
    whole = {NAMES[name]: row["ms_per_step"] for name, row in steps.items()}
    fig, axes = plt.subplots(1, 2, figsize=(10, 2.9), width_ratios=(1, 1.5))
    for ax, values, unit in ((axes[0], kernels, "µs a call"), (axes[1], whole, "ms a step")):
        colors = [SKY, GREEN] if ax is axes[0] else [COLORS[name] for name in steps]
        bars = ax.barh(list(values), list(values.values()), color=colors)
        ax.bar_label(bars, fmt="{:.2f}", padding=3, fontsize=9)
        ax.set(xlabel=unit)
        ax.invert_yaxis()
        ax.margins(x=0.18)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_title(f"Attention alone, {rows} rows")
    axes[1].set_title("The decode step")
    fig.tight_layout()
    plt.show()
    base = steps["hf-static"]["ms_per_step"]
    for name, row in steps.items():
        print(f"{NAMES[name]:10} {row['ms_per_step'] / base:5.2f} x the time of the step that generate compiled itself")


from_story(show_steps)

# %% [markdown]
# ## 3 · Find out why
#
# The tools are those of lessons 06 and 07, in the order of their price: count the pieces, read the reasons, look at the
# launches.
#
# ### The pieces in their order
#
# A model with more layers tells more. Here is a tiny Qwen2 of twelve layers with random weights. Each mark is one piece
# that ran, in the order of one step; marks at the same height are the same compiled graph. **Look for** the rhythm, and
# where it changes.

# %%
from transformers import Qwen2Config, Qwen2ForCausalLM


def tiny(depth: int):
    """A random Qwen2 with `depth` layers."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 128}
    return Qwen2ForCausalLM(
        Qwen2Config(num_hidden_layers=depth, num_attention_heads=4, num_key_value_heads=2, **sizes)
    ).eval()


deep = {name: pieces(tiny(12), way) for name, way in WAYS.items()}
heaviest = max(deep["breaks"].operations)
for name, f in deep.items():
    print(f"{name:10} graphs {len(f.operations):3}, pieces a step {len(f.order):3}, operations in pieces", end=" ")
    print(sum(f.operations[number] for number in f.order))
assert deep["operation"].tokens == deep["sdpa"].tokens == deep["breaks"].tokens

# %%
order, sizes = deep["breaks"].order, deep["breaks"].operations
fig, ax = plt.subplots(figsize=(10.5, 3.2))
heavy = [i for i, number in enumerate(order) if sizes[number] == heaviest]
light = [i for i, number in enumerate(order) if sizes[number] < heaviest]
ax.scatter(light, [order[i] for i in light], color=SKY, marker="s", s=26, label="small pieces")
label = f"the piece with the projections ({heaviest} operations)"
ax.scatter(heavy, [order[i] for i in heavy], color=VERMILION, marker="D", s=34, label=label)
ax.axvspan(heavy[-1] + 0.5, len(order), color="lightgray", alpha=0.5)
ax.text(heavy[-1] + 2, 0.6 * max(order), "here it runs eagerly", fontsize=10)
ax.set(xlabel="pieces, in the order of one step", ylabel="number of the graph", ylim=(-1, max(order) + 5))
ax.set_title("One decode step of twelve layers, attention that breaks the graph")
ax.legend(frameon=False, loc="upper left", ncols=2)
ax.grid(alpha=0.25)
plt.show()
print(f"the heavy piece ran {len(heavy)} times, in {len({order[i] for i in heavy})} versions; there are 12 layers")
assert len(heavy) == len({order[i] for i in heavy}) == torch._dynamo.config.recompile_limit < 12

# %% [markdown]
# The same few small pieces come again in every layer, compiled once. The heavy piece (the projections, the rotary
# embedding and the cache write, up to the break) is **another graph in each layer**, and after some layers it does not
# come at all.
#
# ### The reasons
#
# Dynamo says why, if it is asked. On the command line `TORCH_LOGS=graph_breaks,recompiles python train.py` is enough.
# In a program its counters, and its log, which a handler can collect:

# %%
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


# %%
counters.clear()
said = dynamo_says(lambda: pieces(tiny(12), attention.BREAKS))
for reason, times in counters["graph_break"].items():
    print(f"{times} x break: {reason.splitlines()[0]}")
for line in dict.fromkeys(said):
    if "layer_idx == 0" in line or "recompile_limit" in line or "last reason" in line:
        print(line.split(" # ")[0])
layer_numbers = {line.split("layer_idx == ")[1].split()[0] for line in said if "layer_idx == " in line}
print("guards on the number of a layer:", ", ".join(sorted(layer_numbers)))
assert counters["graph_break"] and layer_numbers

# %% [markdown]
# There it is. The break is in attention, in every layer. A graph cannot end in the middle
# of a loop over layers and go on, so Dynamo gives up the function with the loop and compiles what is called **inside**
# it, function by function. Attention's `forward` reads `self.layer_idx`, a Python number, to find its part of the
# cache. So each layer fails the guard of the one before it and is compiled again. At the eighth version the **recompile
# limit** is hit: one line in the log, and from that layer on the function runs eagerly.
#
# That is a sentence that can be tested. The number of pieces over the depth should bend at the limit, and bend
# elsewhere with another limit. **Look for** the bends.

# %%
depths, limits = pick([2, 6, 10], [2, 4, 6, 8, 10, 12, 16]), (4, torch._dynamo.config.recompile_limit, 64)
curves = {}
for limit in limits:
    with torch._dynamo.config.patch(recompile_limit=limit):
        curves[limit] = [pieces(tiny(depth), attention.BREAKS, steps=1) for depth in depths]
fig, axes = plt.subplots(1, 2, figsize=(10.5, 3.5))
for (limit, results), color, style, marker in zip(
    curves.items(), (ORANGE, VERMILION, BLUE), (":", "-", "--"), "^os", strict=True
):
    line = {"color": color, "linestyle": style, "marker": marker, "label": f"limit {limit}"}
    axes[0].plot(depths, [len(f.operations) for f in results], **line)
    axes[1].plot(depths, [len(f.order) for f in results], **line)
axes[0].set(title="Graphs compiled", xlabel="layers", ylabel="graphs", ylim=(0, None))
axes[1].set(title="Pieces run in a step", xlabel="layers", ylabel="pieces", ylim=(0, None))
for ax in axes:
    ax.legend(frameon=False)
    ax.grid(alpha=0.25)
fig.tight_layout()
plt.show()
low, _, high = (results[-1] for results in curves.values())
print(
    f"{depths[-1]} layers: limit {limits[0]} gives {len(low.order)} pieces, limit {limits[2]} gives {len(high.order)};"
)
print(f"operations that run in pieces: {sum(low.operations[n] for n in low.order)}", end=" ")
print(f"and {sum(high.operations[n] for n in high.order)}: the rest runs eagerly")
assert len(low.operations) < len(high.operations) and len(low.order) < len(high.order)

# %% [markdown]
# Raising the limit is not the cure. It makes more versions, and **more** pieces; the step still has a break in every
# layer. On a GPU it is worse than it looks here: with the mode that `generate` asks for (`reduce-overhead`) each piece
# becomes a CUDA graph of its own with its checks, and what lies between is launched one by one.
#
# ### The launches
#
# On a GPU the third tool is the profile. From the record, for each way: kernels in a step, how many of them the host
# had to start itself, and how busy the GPU was. **Look for** the way in which the launches come near the kernels.

# %%
COLUMNS = ["variant", "rows", "ms_per_step", "kernels_a_step", "launches_a_step", "busy"]


def show_table(record: dict) -> None:
    engines = [r for r in record["results"] if "ms_per_step" in r]
    display(Markdown(record_markdown(record | {"results": engines}, COLUMNS)))
    for name, row in engine_rows(record).items():
        idle = (1 - row["busy"]) * row["ms_per_step"]
        print(f"{NAMES[name]:10} the GPU works {row['ms_per_step'] - idle:.2f} ms in a step and waits {idle:.2f} ms")


from_story(show_table)

# %% [markdown]
# Time in which the GPU *waits* is time that no kernel can give back. A faster kernel in a step that waits makes it wait
# longer. The record `decode` of lesson 07 has the same columns for other ways:

# %%
try:
    decode_record = load_record("decode", "NVIDIA H200")
    fewest = min(r["rows"] for r in decode_record["results"])
    rungs = {r["variant"]: r for r in decode_record["results"] if r["rows"] == fewest and r.get("busy")}
except FileNotFoundError:
    decode_record, rungs = None, {}
    print("Not recorded on an NVIDIA H200 yet: `rlcourse bench decode --record` measures it there.")
for name, r in rungs.items():
    idle = (1 - r["busy"]) * r["ms_per_step"]
    print(f"{name:20} {r['kernels_a_step']:6.0f} kernels, {r['launches_a_step']:6.0f} launches,", end=" ")
    print(f"works {r['ms_per_step'] - idle:5.2f} ms, waits {idle:5.2f} ms")
if rungs:
    print(f"{fewest} rows, {provenance(decode_record)}")

# %% [markdown]
# ### A tripwire, and what it does not catch
#
# `fullgraph=True` turns a break into an error. In `generate` it is one argument, `CompileConfig(fullgraph=True)`. We
# try it on both ways in and on a third, which does something else that is bad: it asks the host for the longest row, to
# give the kernel a shorter cache.


# %%
def peeking(q, k, v, position, start):
    """The operation, on as many slots as the longest row needs: a number that the host must fetch."""
    longest = position.max().item() + 1
    return attention.operation(q, k[:, :, :longest], v[:, :, :longest], position, start)


AttentionInterface.register("peeks", attention.forward(peeking))
AttentionMaskInterface.register("peeks", sdpa_mask)
for name, way in (WAYS | {"peeks": "peeks"}).items():
    loose = pieces(tiny(4), way)
    print(f"{name:10} fullgraph=False: {len(loose.order):3} pieces a step", end="; ")
    try:
        strict = pieces(tiny(4), way, fullgraph=True)
        fetched = sum("item" in node and "getitem" not in node for nodes in strict.names for node in nodes)
        print(f"fullgraph=True: accepted, {len(strict.order)} piece, numbers fetched in it: {fetched}")
    except torch._dynamo.exc.Unsupported as error:
        print("fullgraph=True refuses:", str(error).splitlines()[0])

# %% [markdown]
# It catches the first kind of trouble. The second it lets through: with `fullgraph=True` Dynamo takes `.item()` into
# the graph as an operation. One graph, and in it, in each layer, the GPU is stopped until the host has read a number. A
# CUDA graph cannot be captured of that at all. So count twice: pieces, **and** reads by the host (below).
#
# ## 4 · The mask that does not come
#
# A second trap lies in the same place, and it is worse: wrong numbers, no error. transformers makes a mask for a name
# only if the name is in `AttentionMaskInterface` as well. Otherwise it hands over `None`. A function that takes `None`
# for "attend to everything", as nearly all do, then attends to padding, and to slots of the static cache that hold
# nothing yet. (The rows here have no end token, so they go on after their end.)

# %%
import torch.nn.functional as F


def naive(module, query, key, value, attention_mask, **kwargs):
    """What one writes first: it hands on whatever mask it is given."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    several = query.shape[2] > 1 and attention_mask is None
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, is_causal=several)
    return out.transpose(1, 2), None


AttentionInterface.register("naive", naive)  # and nothing else
new, wrong = pick(12, 40), {}
for name, some in (("one prompt, no padding", prompts[:1]), ("eight prompts, padded", prompts)):
    expected = HFEngine(endless, torch.float32, "static").generate(some, 1, new, GREEDY)
    got = HFEngine(endless, torch.float32, "static", attention="naive").generate(some, 1, new, GREEDY)
    agree = (got.completion_ids == expected.completion_ids).all(1).float().mean()
    gap = (got.logprobs[:, 1] - expected.logprobs[:, 1]).abs().max()
    wrong[name] = float(agree)
    print(f"{name:24} rows with the right tokens: {agree:4.0%}, log-prob of token 2 off by up to {gap:.3f}")
print("expected:", repr(policy.tokenizer.decode(expected.completion_ids[0])))
print("got:     ", repr(policy.tokenizer.decode(got.completion_ids[0])))
assert min(wrong.values()) < 1

# %% [markdown]
# It ran through, it was fast, it even spoke. In a training loop such a rollout gives rewards that are too low, and
# log-probs that are not those of the model that is trained. The same function with its mask registered, and then
# our own way in, with its mask left out on purpose:

# %%
AttentionMaskInterface.register("naive", sdpa_mask)
got = HFEngine(endless, torch.float32, "static", attention="naive").generate(prompts, 1, new, GREEDY)
print("naive, with a mask: rows with the right tokens:", end=" ")
print(f"{(got.completion_ids == expected.completion_ids).all(1).float().mean():.0%}")
assert torch.equal(got.completion_ids, expected.completion_ids)
AttentionInterface.register("ours, no mask", attention.forward(attention.operation))
try:
    HFEngine(endless, torch.float32, "static", attention="ours, no mask").generate(prompts, 1, 3, GREEDY)
    raise AssertionError("it should have refused")
except ValueError as error:
    print("ours, without:", error)

# %% [markdown]
# `seen_slots` refuses instead of guessing. Without a mask there is no right answer, so there should be no answer.
# Exercise 3 writes that function.
#
# ## 5 · Close the gap
#
# ### Rung 1: an operation with a fake
#
# Dynamo need not look into the kernel. It needs to know what comes out: shape, dtype, strides.
# `torch.library.custom_op` gives a function a name that stays in the graph, and a **fake** answers for it while the
# graph is made. In small:


# %%
@torch.library.custom_op("lesson10::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return torch.from_numpy((x.numpy() * by).sum(-1))  # numpy stands for what Dynamo cannot look into


@scaled.register_fake
def _(x, by):
    return x.new_empty(x.shape[:-1])


def around(x):
    return scaled(x.relu(), 2.0) + 1


x, graphs = torch.randn(3, 5), []
compiled = torch.compile(around, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)
assert torch.allclose(compiled(x), around(x))
print("one graph:", [str(node.target) for node in graphs[0].graph.nodes if node.op.startswith("call")])
for test, verdict in torch.library.opcheck(scaled, (x, 2.0)).items():
    print(f"{test:30} {verdict}")

# %% [markdown]
# `opcheck` compares the operation with its fake, and more: is an input changed that was not declared? A fake that lies
# is found there, and better there than in what is computed from it:


# %%
@torch.library.custom_op("lesson10::lies", mutates_args=())
def lies(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().clone()  # without gaps, whatever x was


lies.register_fake(torch.empty_like)  # but this takes over the order of x's strides
try:
    torch.library.opcheck(lies, (torch.randn(4, 6).T,))
except Exception as error:
    found_out = [line for line in str(error).replace(": ", ":\n").splitlines() if "stride" in line.lower()]
    print(type(error).__name__ + ":", found_out[-1] if found_out else error)

# %% [markdown]
# The way `rlcourse-operation` is nothing but this. We have seen its one graph in section 2. What it gains in `generate`
# is in the record, as the row `operation`; section 1 predicted it. **Look for** how much less the GPU has to do, beside
# what the microbenchmark promised.


# %%
def show_gain(record: dict) -> None:
    """The GPU's work and the time of a step, with sdpa and with the operation."""
    for rows in row_counts(record):
        steps = engine_rows(record, rows)
        before, after = steps["hf-static"], steps["hf-static-operation"]
        us = alone(record, rows)
        works = [row["ms_per_step"] * row["busy"] for row in (before, after)]
        print(f"{rows:4} rows: promised {qwen.layers * (us['sdpa-repeat'] - us['cute']) / 1e3:.2f} ms less;", end=" ")
        print(f"the GPU works {works[0]:.2f} ms, then {works[1]:.2f} ms;", end=" ")
        print(f"the step takes {before['ms_per_step']:.2f} ms, then {after['ms_per_step']:.2f} ms")


from_story(show_gain)

# %% [markdown]
# A faster kernel in one graph is a gain, if a smaller one than promised. The step that `generate` compiles is no row of
# calls, one after the other: the compiler fuses what stands around `sdpa`, so attention costs less in there than alone.
# And through most of the step the GPU **waits** for the host, with our kernel as without it.
#
# ### Rung 2: out of `generate`
#
# One graph a step is not one launch a token. Between two steps `generate` makes a mask, runs logits processors, draws,
# looks whether all rows have ended. Some of this makes the host **read a number**, and a read is a full stop. Counted
# live, for one token: operators, and reads (`aten::_local_scalar_dense`, which is what `.item()` ends in).

# %%
from torch.profiler import profile


def host_work(name: str, few: int = 8, many: int = 24) -> dict[str, float]:
    """Operators that the host starts and numbers that it reads, in one decode step."""
    engine, seen = make_engine(endless, name, torch.float32), {}
    engine.generate(prompts, 2, 4, Sampling())
    for new_tokens in (few, many):
        with profile() as trace:
            engine.generate(prompts, 2, new_tokens, Sampling())
        names = Counter(event.name for event in trace.events() if event.name.startswith("aten::"))
        seen[new_tokens] = names.total(), names["aten::_local_scalar_dense"]
    return {key: (b - a) / (many - few) for key, a, b in zip(("operators", "reads"), *seen.values(), strict=True)}


work = {name: host_work(name) for name in ("hf-static", "fast")}
for name, counts in work.items():
    print(f"{name:10} " + ", ".join(f"{key} {value:6.1f} a step" for key, value in counts.items()))
assert work["fast"]["reads"] < work["hf-static"]["reads"]

# %% [markdown]
# (On a CPU our engine looks at the end flags at each step, which is cheap there; on a GPU only every few steps.)
#
# Whatever the kernel does, `generate` cannot be faster than this work. How much time is it? We stop the clock whenever
# the model itself runs; what is left belongs to the loop.

# %%
engine = HFEngine(endless, torch.float32, "static", compile=False)
inside, calls, forward = [0.0], [0], engine.model.forward


def timed_forward(*arguments, **options):
    start = time.perf_counter()
    result = forward(*arguments, **options)
    inside[0] += time.perf_counter() - start
    calls[0] += 1
    return result


engine.model.forward = timed_forward
engine.generate(prompts[:1], 4, 8, Sampling())
inside[0], calls[0], start = 0.0, 0, time.perf_counter()
engine.generate(prompts[:1], 4, pick(24, 96), Sampling())
whole = time.perf_counter() - start
del engine.model.forward  # the class's own is there again
loop_ms = 1e3 * (whole - inside[0]) / calls[0]
print(f"{1e3 * whole / calls[0]:.2f} ms a token, {loop_ms:.2f} ms of it outside the model, on this CPU, 4 rows")
work_4 = decode_step(qwen, 4, 256)
print(
    f"for comparison: a GPU with 4 TB/s can read Qwen2.5-0.5B in {1e3 * work_4.bytes['layers'] / 4e12:.2f} ms", end=" "
)
print("(its layers)")

# %% [markdown]
# So the last rung is to leave `generate`: a step of our own with the draw in it, everything at fixed addresses, **one**
# CUDA graph a step (lesson 07), and in it the kernel of lesson 09. There the compiler has no say any more, and a custom
# kernel can break nothing. It even gains: its neighbours are known, so it may begin before the one before it has ended,
# and read the old tokens ahead. (Its fused form is not needed there. The kernel of the projection, which is ours too,
# rotates the heads and writes the cache as its last act.)
#
# All rungs of the story, from the record. **Look for** how much of the way each rung is, and what remains above the
# floor.


# %%
def show_ladder(record: dict) -> None:
    """Time of a step by rung, split in working and waiting."""
    rows = engine_rows(record)
    size, setup = min(r["rows"] for r in record["results"]), record["setup"]
    labels = [NAMES[name] for name in rows]
    works = [r["busy"] * r["ms_per_step"] for r in rows.values()]
    waits = [r["ms_per_step"] - w for r, w in zip(rows.values(), works, strict=True)]
    _, ax = plt.subplots(figsize=(8, 3))
    ax.barh(labels, works, color=BLUE, label="the GPU works")
    bars = ax.barh(labels, waits, left=works, color="lightgray", hatch="//", edgecolor="white", label="it waits")
    ax.bar_label(bars, [f"{r['ms_per_step']:.2f} ms" for r in rows.values()], padding=3, fontsize=9)
    if decode_record:
        bytes_read = decode_step(qwen, size, setup["prompt_tokens"] + setup["new_tokens"] / 2).total_bytes
        floor = bytes_read / decode_record["setup"]["copy_gb_per_s"] / 1e6
        ax.axvline(floor, color=BLACK, linestyle=":", label="byte floor")
        print(f"the last rung is {list(rows.values())[-1]['ms_per_step'] / floor:.1f} x the floor")
    ax.set(xlabel="ms a step", title=f"{setup['shape']}, {size} rows")
    ax.invert_yaxis()
    ax.margins(x=0.18)
    ax.legend(frameon=False)
    plt.show()


from_story(show_ladder)

# %% [markdown]
# ### Explorer: when does a faster kernel lose?
#
# A step of `base` milliseconds of which attention is a share. The kernel makes attention faster, and the way it is
# called cuts the step into pieces, each of which costs some microseconds (guards, a launch, and what can no longer be
# fused). The black dot is the **crossover**: the number of pieces at which the gain is gone. Try: how far does it move
# when the kernel becomes ten times as fast? And when a piece becomes cheaper?

# %%
from rlcourse.course.widgets import explorer


def draw_crossover(ax, share: float, faster: float, pieces: int, piece_us: float, base: float = 3.0) -> None:
    """Time of a step over pieces, for the old attention in one piece and the new one in several."""
    least = base * (1 - share + share / faster)
    cross = 1 + (base - least) * 1e3 / piece_us
    now = least + (pieces - 1) * piece_us / 1e3
    axis = [1, max(1.3 * cross, pieces * 1.15, 30)]
    ax.plot(axis, [base, base], color=SKY, linestyle="--", label="old attention, one piece")
    ax.plot(axis, [least + (n - 1) * piece_us / 1e3 for n in axis], color=VERMILION, label="new, in pieces")
    ax.axhline(base * (1 - share), color=BLACK, linestyle=":", label="attention for free, one piece")
    ax.plot(cross, base, marker="o", color=BLACK, markersize=8)
    ax.plot(pieces, now, marker="D", color=PURPLE, markersize=9)
    verdict = f"{base / now:.2f} x as fast" if now <= base else f"{now / base:.2f} x as slow"
    settings = f"share {share:.0%}, kernel {faster:g} x, {pieces} pieces of {piece_us:g} µs:"
    ax.set_title(f"{settings}\n{verdict}; even at {cross:.0f} pieces", fontsize=10)
    ax.set(xlabel="pieces a step", ylabel="ms a step", ylim=(0, 1.15 * max(base, now)))
    ax.legend(frameon=False, fontsize=8, loc="lower right")
    ax.grid(alpha=0.25)


# %%
controls = {"pieces": (67, 1, 200, 1), "piece_us": (80.0, 1.0, 300.0, 1.0)}
controls |= {"share": (0.3, 0.02, 0.9, 0.02), "faster": (2.2, 1.0, 100.0, 0.2)}
stories = [{"pieces": 1, "faster": 2.2}, {"pieces": 67, "faster": 2.2}, {"pieces": 67, "faster": 100.0}]
usual = {"share": 0.3, "piece_us": 80.0}
explorer(draw_crossover, static=[s | usual for s in stories], **controls)

# %% [markdown]
# (The numbers of the explorer are made up, but for the pieces: as many as the twelve layers above.) Beyond the first
# picture the speed of the kernel hardly matters. The pieces decide.
#
# ## 6 · What the training step gains
#
# The rollout is one phase of a step. If the rollout is a share $f$ of the step and becomes $r$ times as fast, the step
# becomes $1 / (1 - f + f / r)$ times as fast. The record of the story has whole Dr. GRPO steps for each way (there
# without cuDNN's attention, which our trainer turns off: it plans anew for each shape). We predict each from **one** of
# them and from the decode steps alone, and compare. **Look for** where the prediction is off, and in which direction.


# %%
def show_training(record: dict) -> None:
    for size in row_counts(record):
        rows = engine_rows(record, size)
        base = rows["hf-static"]
        share = base["rollout_s"] / base["step_s"]
        print(f"{size} rows: with sdpa {base['step_s']:.2f} s a step, the rollout is {share:.0%} of it", end=";")
        print(f" if it were free: {1 / (1 - share):.1f} x")
        for name, row in rows.items():
            faster = base["ms_per_step"] / row["ms_per_step"]
            predicted = 1 / (1 - share + share / faster)
            print(f"   {NAMES[name]:10} decode {faster:5.2f} x: predicted {predicted:5.2f} x,", end=" ")
            print(f"measured {base['step_s'] / row['step_s']:5.2f} x ({row['step_s']:.2f} s)")


from_story(show_training)

# %% [markdown]
# Predictions differ from measurements for reasons worth knowing: a rollout has a prefill, captures and copies of
# weights besides its decode steps, and the first steps of an engine compile.
#
# The same question backwards, with the records of lessons 06 and 07. The record `step` has our training step with the
# fast engine. What would it be if the decode step were that of another rung? Only the rollout is scaled.

# %%
try:
    ours = {r["rows"]: r for r in load_record("step", "NVIDIA H200")["results"] if r["variant"] == "rlcourse"}
except FileNotFoundError:
    ours = {}
RUNGS = {
    "graph": "own step, own kernels",
    "hf-static-compiled": "generate, one graph",
    "hf-static": "generate, not compiled",
}
if ours and rungs:
    fig, ax = plt.subplots(figsize=(8.5, 3.2))
    labels, rollout, rest = [], [], []
    for size in sorted(set(ours) & {r["rows"] for r in decode_record["results"]}):
        ms = {r["variant"]: r["ms_per_step"] for r in decode_record["results"] if r["rows"] == size}
        for rung, label in RUNGS.items():
            labels.append(f"{label}, {size} rows")
            rollout.append(ours[size]["rollout_s"] * ms[rung] / ms["graph"])
            rest.append(ours[size]["step_s"] - ours[size]["rollout_s"])
    ax.barh(labels, rollout, color=BLUE, label="rollout, scaled")
    bars = ax.barh(labels, rest, left=rollout, color=ORANGE, hatch="//", edgecolor="white", label="the rest")
    ax.bar_label(bars, [f"{a + b:.2f} s" for a, b in zip(rollout, rest, strict=True)], padding=3, fontsize=9)
    ax.set(xlabel="seconds a training step", title=f"Predicted from two records ({provenance(decode_record)})")
    ax.invert_yaxis()
    ax.margins(x=0.15)
    ax.legend(frameon=False)
    plt.show()
else:
    print("Not recorded on an NVIDIA H200 yet: `rlcourse bench step --record` measures it there.")

# %% [markdown]
# Two things to take from the bars. A slow decode step swallows everything else: next to it no update is worth tuning.
# And once the decode step is fast, the orange part is what counts, and another kernel for attention changes little.
#
# ## 7 · Before you believe that a kernel is faster
#
# 1. **Write down a prediction.** Share of the step, Amdahl, and attention for free as the bound, measured by leaving it
#    out.
# 2. **Compare results first**: tokens, log-probs, with padding, with rows of differing lengths, with a cache that is
#    not full. Make sure that a mask arrives.
# 3. **Time the loop, not the call**: milliseconds a step in the engine that you will use, by the difference of two
#    lengths, beside its peer in the same run.
# 4. **Count**: graphs, pieces a step, numbers read by the host, launches. One backend of ten lines does it, on a CPU,
#    in a test. That is `tests/course/lessons/test_generate_attention.py` in this package.
# 5. **Set tripwires**: `fullgraph=True`, `opcheck`, and a test that counts.
# 6. **Read the log once** with `TORCH_LOGS=graph_breaks,recompiles`.
# 7. **Look at what waits.** If the GPU is idle half of the time, work on that, not on kernels.
# 8. **End at the training step**: measured, beside the prediction. If they differ, you have learned something; if
#    nobody looks, nobody learns it.
#
# ## Check yourself
#
# 1. A kernel is 10 times as fast as its peer; attention is 10 % of the step. What is the best you can hope for?
#
# <details><summary>Answer</summary>
# 1 / (0.9 + 0.01) = 1.10 times. Attention for free would give 1.11.
# </details>
#
# 2. The tokens are right and the step is slower. Dynamo has made 16 graphs. You raise the recompile limit to 64. What
#    happens?
#
# <details><summary>Answer</summary>
# Every layer gets a version of its own: more graphs, more pieces a step, longer compilation. The break is still there.
# Remove the break: register the kernel as an operation with a fake.
# </details>
#
# 3. Why is the function with the projections compiled anew for each layer, and the MLP not?
#
# <details><summary>Answer</summary>
# It reads the number of its layer, a Python integer, to find its cache. The compiled code is good for that number. The
# MLP's code depends on nothing but shapes and dtypes, which are the same in all layers; weights are inputs.
# </details>
#
# 4. `fullgraph=True` is accepted and there is one graph. Name two things that can still be wrong.
#
# <details><summary>Answer</summary>
# A number that the host reads inside of the graph (`.item()`), which stops the GPU; a fake that lies about strides; a
# mask that never came.
# </details>
#
# 5. Why could the same kernel not break anything in the engine `graph`?
#
# <details><summary>Answer</summary>
# No compiler is asked there. The step is launched once while it is recorded, kernel by kernel, and replayed as a whole.
# What a recorder cannot take (a read by the host, a new allocation) fails loudly when it is recorded.
# </details>
#
# ## Exercises
#
# [exercises/10_faster_kernel_slower_loop.ipynb](../exercises/10_faster_kernel_slower_loop.ipynb): a gain for a whole
# rollout, Dynamo's cache, slots from a mask, a fake, and a diagnosis of measured steps.
#
# ## Further reading
#
# - Amdahl 1967, *Validity of the Single Processor Approach to Achieving Large Scale Computing Capabilities*, AFIPS.
# - Ansel et al. 2024, *PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph
#   Compilation*, ASPLOS: Dynamo, guards, graph breaks.
# - PyTorch's documentation: *Custom Operators* (`torch.library.custom_op`, `opcheck`), *Common Graph Breaks* and
#   *Dealing with Recompilations* in the programming model of `torch.compile`.
# - transformers' documentation: *Attention Interface* and *Attention Mask Interface*.
