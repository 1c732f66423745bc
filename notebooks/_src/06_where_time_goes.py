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
# - to time a training step phase by phase, and to say what a faster phase can give the whole;
# - to read a profile and a trace: events, operators, launches, and how busy a GPU was;
# - to compute by hand the bytes and operations of a decode step, and from them the time that no program can beat;
# - why decoding is slow and the update is not, in tokens per weight that is read;
# - what stands in memory when, and how to tell three kinds of slow apart.
#
# You need [lesson 05](05_full_loop.ipynb): the phases of a step. Everything live here runs on the processor, where a
# GPU is there, too, so that every reader sees the same story. What a GPU does is shown from records.

# %%
import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library keeps its messages; read when torch is loaded
import contextlib
import ctypes
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown, display

from rlcourse.config import make_config
from rlcourse.course import pick
from rlcourse.evaluation import load_all
from rlcourse.measure.plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, draw_roofline
from rlcourse.measure.records import load_record, provenance, record_markdown

cpu = torch.device("cpu")
config = make_config("laptop", device="cpu", num_prompts=pick(4, 16), micro_batch_rows=64)
policy, engine, task = load_all(config)
print(f"{config.rows} answers a step, {torch.get_num_threads()} thread(s)")

# %% [markdown]
# ## 1 · Seconds by phase
#
# Before anything is made faster: where does the time go? One Dr. GRPO step has four phases. The *rollout* samples the
# answers. The *reward* reads and verifies them. The *advantages* compare them. The *update* takes the gradient and the
# optimizer step. The package's step adds up the wall seconds of each by `PhaseTimer` of `rlcourse.measure.timing`:
# `with timer("update"): ...`.
#
# On a GPU there is a trap. The host only **asks** for work and goes on at once, so a clock on the host measures the
# asking. `PhaseTimer` waits for the GPU at both ends of a phase. On a processor there is nothing to wait for.

# %%
from rlcourse.learner import Learner
from rlcourse.step import train_step
from rlcourse.tasks.prompts import PromptSampler

PHASES = {"rollout": BLUE, "reward": ORANGE, "advantages": GREEN, "update": VERMILION}
learner, order = Learner(policy, config), PromptSampler(task.problems("train"), config.seed)
torch.manual_seed(0)
steps = [train_step(learner, engine, task, order, step=0)[0]["timing"] for _ in range(pick(3, 9))]
for row in steps:
    print("  ".join(f"{phase} {1e3 * row[f'{phase}_s']:7.1f} ms" for phase in (*PHASES, "step")))

# %% [markdown]
# Two habits. The first step is often the slowest: memory is fetched, code is loaded. Leave such warm-up out. And take
# the **median** of several: on a machine that others use too, a mean follows the one step that was disturbed.

# %%
median = {phase: statistics.median(row[f"{phase}_s"] for row in steps[1:]) for phase in PHASES}
share = {phase: seconds / sum(median.values()) for phase, seconds in median.items()}
for phase in PHASES:
    print(f"{phase:11} {1e3 * median[phase]:8.1f} ms  {share[phase]:6.1%}")

# %% [markdown]
# And on a GPU? The record has whole steps with the shape of Qwen2.5-0.5B on an H200, in three variants. `trl-default`
# is a well-known library with its usual `generate`; `trl-static-compiled` lets it compile the decode step; `rlcourse`
# is our engine. Lesson 07 builds the way from the first to the last.


# %%
def from_record(name: str, show, columns: list[str] | None = None) -> None:
    """Draw `show(record)` from an H200's record and print where it is from; without one, how to measure it."""
    try:
        record = load_record(name, "NVIDIA H200")
    except FileNotFoundError:
        print(f"Not recorded on an NVIDIA H200 yet: `rlcourse bench {name} --record` measures it there.")
        return
    if columns:
        display(Markdown(record_markdown(record, columns)))
    show(record)


from_record("step", lambda record: None, ["variant", "rows", "step_s", "rollout_s", "update_s", "spread"])

# %% [markdown]
# As shares of a step, ours on top. What the record calls neither rollout nor update is `other`. **Look for** who has
# the long blue bar.


# %%
def bar(ax, place: int, parts: dict[str, float]) -> None:
    """One step as a bar of 100 %."""
    left = 0.0
    for phase, seconds in parts.items():
        width = 100 * seconds / sum(parts.values())
        ax.barh(place, width, left=left, color=PHASES.get(phase, "#999999"), edgecolor="white")
        if width > 8:
            ax.text(
                left + width / 2, place, f"{phase}\n{width:.0f} %", ha="center", va="center", fontsize=9, color="white"
            )
        left += width


def draw_steps(record: dict) -> None:
    rows = [row for row in record["results"] if row["rows"] == 64]
    _, ax = plt.subplots(figsize=(9, 3.2))
    bar(ax, 0, median)
    for place, row in enumerate(rows, start=1):
        parts = {"rollout": row["rollout_s"], "update": row["update_s"]}
        bar(ax, place, parts | {"other": max(0.0, row["step_s"] - sum(parts.values()))})
    names = [f"H200, {row['variant']}\n{row['step_s']:.2f} s" for row in rows]
    ax.set_yticks(range(len(rows) + 1), [f"here, embedded\n{sum(median.values()):.2f} s", *names])
    ax.invert_yaxis()
    ax.set(
        xlabel="% of a step", title=f"Where a step goes (64 answers on the H200, {provenance(record)})", xlim=(0, 100)
    )
    ax.spines[["top", "right"]].set_visible(False)
    plt.show()


from_record("step", draw_steps)

# %% [markdown]
# The same algorithm, and the blue bar goes from most of the step to a part of it. So "the rollout is the bottleneck of
# RL" is no law. It depends on the engine and on the machine. On a processor with a tiny model the update weighs more
# than with that library on a GPU; section 4 will say why.
#
# ### Amdahl's law
#
# What can a faster rollout give? Let the rollout have the share $p$ of a step, and make it $s$ times faster. The new
# time is $1 - p + p / s$ of the old, so the whole step becomes faster by
#
# $$S = \frac{1}{1 - p + p / s} \;<\; \frac{1}{1 - p} .$$
#
# The bound on the right is the rollout that takes no time at all (Amdahl 1967). It is known before a line is written.


# %%
def amdahl(p: float, s: float) -> float:
    """Speed-up of the whole from a part with share p that becomes s times faster."""
    return 1 / (1 - p + p / s)


shares = {"here": share["rollout"]}
try:
    for row in load_record("step", "NVIDIA H200")["results"]:
        if row["rows"] == 64:
            shares[f"H200, {row['variant']}"] = row["rollout_s"] / row["step_s"]
except FileNotFoundError:
    print("No record of a GPU's step here.")
for name, p in shares.items():
    print(f"{name:26} rollout {p:6.1%}:  twice as fast gives {amdahl(p, 2):.2f} x,", end=" ")
    print(f"10 times {amdahl(p, 10):5.2f} x, at most {1 / (1 - p):5.1f} x")

# %% [markdown]
# **Look for** where each line bends away from the dotted one. Up to there work on the rollout pays in full.

# %%
speedups = torch.logspace(0, 2, 60)
fig, ax = plt.subplots(figsize=(7, 3.8))
ax.plot(speedups, speedups, color=BLACK, linestyle=":", label="if the rollout were all")
styles = ((BLUE, "-"), (GREEN, "--"), (VERMILION, "-."), (ORANGE, (0, (5, 1))))
for (name, p), (color, linestyle) in zip(shares.items(), styles, strict=False):
    ax.plot(
        speedups, [amdahl(p, s) for s in speedups.tolist()], color=color, linestyle=linestyle, linewidth=2, label=name
    )
    ax.axhline(1 / (1 - p), color=color, linewidth=0.7, alpha=0.6)
ax.set(
    xscale="log", yscale="log", xlabel="the rollout is so many times faster", ylabel="the step is so many times faster"
)
ax.set(title="Amdahl's law, with each one's limit", ylim=(0.9, 100))
ax.legend(frameon=False, fontsize=9)
plt.show()

# %% [markdown]
# A prediction is better when it can fail. The record has the old rollout and the new one. From the library's shares and
# the rollout's speed-up alone we predict the new step, and compare it with the one that was measured.


# %%
def predict(record: dict) -> None:
    for count in sorted({row["rows"] for row in record["results"]}):
        by = {row["variant"]: row for row in record["results"] if row["rows"] == count}
        old, new = by["trl-default"], by["rlcourse"]
        s = old["rollout_s"] / new["rollout_s"]
        predicted = old["step_s"] / amdahl(old["rollout_s"] / old["step_s"], s)
        print(f"{count} answers: rollout {s:.1f} x faster; step predicted {predicted:.3f} s", end=", ")
        print(f"measured {new['step_s']:.3f} s")
        print(f"   what the law does not know: the update went from {old['update_s']:.3f} to {new['update_s']:.3f} s")


from_record("step", predict)

# %% [markdown]
# ## 2 · The profiler
#
# Phases say where. A *profiler* says what. It notes every operator that PyTorch runs, with start and duration.
# `rlcourse.measure.profiling.profile` runs a function, times it **without** the profiler, then looks at it **with** the
# profiler: noting things down takes time as well.

# %%
from rlcourse.batch import Rollout
from rlcourse.collect import collect
from rlcourse.losses import aggregate
from rlcourse.measure.profiling import profile


def update(rollout: Rollout) -> None:
    """The update of a step, all of whose rows train: forward, backward, optimizer."""
    for rows in rollout.completion_lengths.argsort().split(config.micro_batch_rows):  # rows of like length together
        part = rollout[rows]
        logprobs, _ = learner.logprobs_and_values(part)
        signs = torch.where(torch.rand(len(rows), 1) < 0.5, 1.0, -1.0)  # in place of advantages: none is 0
        share = {"rows": config.rows, "tokens": 1, "max_new_tokens": config.max_new_tokens}
        aggregate(-signs * logprobs, part.completion_mask, "constant", **share).backward()
    learner.update(step=0)


prompts = [policy.prompt(problem.question) for problem in order.sample(config.num_prompts)]
short = pick(4, 12)
rollout = collect(policy, engine, task, order, config)[0].rollout
profiles = {
    f"rollout, {short} tokens": profile(lambda: engine.generate(prompts, 8, short, config.sampling), cpu, repeats=1),
    "update": profile(lambda: update(rollout), cpu, repeats=1),
}
for name, p in profiles.items():
    print(
        f"{name:20} {1e3 * p.seconds:7.1f} ms, {p.kernels:5.0f} operators, {1e6 * p.seconds / p.kernels:6.1f} µs each"
    )

# %% [markdown]
# The rollout is many small operators, the update few large ones. That is the first clue. Each operator has a fixed
# price: Python calls PyTorch, PyTorch looks up the code for these types, makes room for the result. On a processor that
# is a few microseconds. On a GPU the host pays it too, and a launch of a kernel on top.
#
# Which operators? Here are the longest of each. Operators are those that Python or the backward pass calls; the time of
# one contains that of the operators it calls itself.

# %%
for name, p in profiles.items():
    lines = [f"| {name}: operator | calls | ms | share |", "| --- | ---: | ---: | ---: |"]
    for operator, calls, seconds in p.top[:6]:
        operator = operator.replace("autograd::engine::evaluate_function: ", "gradient: ").removeprefix("aten::")
        lines.append(f"| `{operator}` | {calls:.0f} | {1e3 * seconds:.1f} | {seconds / p.seconds:.0%} |")
    display(Markdown("\n".join(lines)))

# %% [markdown]
# In both, matrix products lead (`linear`, `matmul`, and in the update the gradients of them). The shares are those of a
# profiled run over the time of one without, so they are a little too large.
#
# ### How many operators has one decode step?
#
# Not to be read off the table: a rollout has a prefill too. Take the difference of two lengths. What both have in
# common drops out. We will use this trick again for times.

# %%
endless = dataclasses.replace(policy, eos_ids=[policy.model.config.vocab_size])  # no token ends an answer


def look(tokens: int, count: int):
    """Profile of a rollout of `count` rows and `tokens` tokens each."""
    from rlcourse.rollout import make_engine

    decoding = make_engine(endless, "fast", torch.float32)
    return profile(lambda: decoding.generate(prompts[:1], count, tokens, config.sampling), cpu, repeats=1)


for count in (1, 16, 64):
    few, more = look(1, count), look(9, count)
    operators, seconds = (more.kernels - few.kernels) / 8, (more.seconds - few.seconds) / 8
    print(f"{count:3} rows: {operators:.0f} operators a step, {1e3 * seconds:.2f} ms", end=", ")
    print(f"{1e6 * seconds / operators:.1f} µs each")

# %% [markdown]
# The number of operators does not depend on the rows. With one row hardly anything is computed, yet the step has its
# price: it is the price of **calling**. A program whose time is that of calls is *host-bound*. More rows then cost
# little: compare the times of 1 and 16. On a GPU the same holds more strongly, because the GPU does the work so much
# faster while the host is no faster at all. A *CUDA graph* records the launches once and replays them with one call;
# lesson 07 does that.
#
# ### A trace
#
# With `trace=` the profiler writes every event into a file, in the JSON format of Chrome. Open it at
# [ui.perfetto.dev](https://ui.perfetto.dev): nothing is uploaded, the page reads it in your browser. Keys `w` and `s`
# zoom, `a` and `d` move. Here we read it in Python, to see that there is no magic in it.

# %%
path = Path(tempfile.mkdtemp()) / "decode.json"
profile(lambda: engine.generate(prompts[:2], 8, 6, config.sampling), cpu, repeats=1, trace=path)
trace = json.loads(path.read_text())["traceEvents"]
operators = [event for event in trace if event["ph"] == "X" and event.get("cat") == "cpu_op"]
operators.sort(key=lambda event: event["ts"])
print(f"{len(trace):,} events, {len(operators):,} of them operators, {path.stat().st_size / 1e6:.1f} MB; one of them:")
print({key: operators[100][key] for key in ("name", "ph", "cat", "ts", "dur")})

# %% [markdown]
# That is all an event is: a `name`; `ph`, its kind (`X` has a beginning and a duration, others are instants or arrows);
# `ts`, when it began, in microseconds; `dur`, how long it took. On a GPU there are events of the category `kernel` too,
# with the stream they ran on, and an arrow from each launch to its kernel.
#
# Events of one thread are nested like the calls they come from. Their depth is how many others hold them. **Look for**
# the pattern that repeats with each layer, and for the white between the bars: there Python is at work.


# %%
def depths(events: list[dict]) -> list[int]:
    """How many other events hold each one. Events of one thread, by start."""
    open_until, found = [], []
    for event in events:
        while open_until and open_until[-1] <= event["ts"]:
            open_until.pop()
        found.append(len(open_until))
        open_until.append(event["ts"] + event["dur"])
    return found


main = max({event["tid"] for event in operators}, key=lambda tid: sum(e["tid"] == tid for e in operators))
events = [event for event in operators if event["tid"] == main]
end = events[-1]["ts"]
window = [(e, d) for e, d in zip(events, depths(events), strict=True) if end - 3000 < e["ts"] < end - 1500]
outer = [e for e, d in window if d == 0]
print(f"{len(window)} operators in 1.5 ms, {len(outer)} of them called by Python itself")

# %%
families = {"linear": BLUE, "matmul": SKY, "rms_norm": GREEN, "softmax": ORANGE, "index": PURPLE}


def color_of(name: str) -> str:
    """The colour of an operator's family, grey for the rest."""
    return next((color for part, color in families.items() if part in name), "#BBBBBB")


fig, ax = plt.subplots(figsize=(11, 3.4))
for event, depth in window:
    ax.broken_barh([(event["ts"] - end + 3000, event["dur"])], (-depth, 0.86), color=color_of(event["name"]))
for name, color in families.items():
    ax.bar(0, 0, color=color, label=name)
ax.bar(0, 0, color="#BBBBBB", label="other")
ax.set(xlim=(0, 1500), xlabel="µs", ylabel="depth", title="A piece of a decode step: every operator, by depth")
ax.set_yticks([0.43 - d for d in range(max(d for _, d in window) + 1)], range(max(d for _, d in window) + 1))
ax.legend(ncols=6, frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.2))
plt.show()

# %% [markdown]
# ### How busy was the GPU?
#
# On a GPU the question behind every trace is: how much of the time was it working at all? The *busy fraction* is the
# time in which **at least one** kernel ran, over the wall time. Kernels can run at the same time, on two streams. Added
# up, their durations could exceed the wall time, and idle time would hide. So one takes the length of the **union** of
# their intervals. Five of them, by hand:

# %%
spans = [(0.0, 3.0), (2.0, 5.0), (2.5, 4.0), (7.0, 9.0), (9.0, 10.0)]  # start and end, in µs
total, until = 0.0, float("-inf")
for start, stop in sorted(spans):
    new = max(0.0, stop - max(start, until))  # what lies behind everything so far
    until = max(until, stop)
    total += new
    print(f"{start:4} to {stop:4}: lasts {stop - start:.1f}, new {new:.1f}, union so far {total:.1f}")
print(f"sum {sum(b - a for a, b in spans):.1f} µs, union {total:.1f} µs: in a window of 12 µs busy {total / 12:.0%}")

# %%
from rlcourse.measure.profiling import covered

assert covered(spans) == total
fig, ax = plt.subplots(figsize=(8, 2.2))
for place, (start, stop) in enumerate(spans):
    ax.broken_barh([(start, stop - start)], (2.2 - place % 3, 0.7), color=(BLUE, ORANGE, GREEN)[place % 3])
for start, stop in ((0, 5), (7, 10)):
    ax.broken_barh([(start, stop - start)], (-1, 0.7), color=BLACK)
ax.set_yticks([2.5, 1.5, 0.5, -0.65], ["stream 1", "stream 2", "stream 3", "busy"])
ax.set(xlim=(0, 12), xlabel="µs", title="Overlap counts once")
plt.show()

# %% [markdown]
# Mind what it does **not** say. A GPU that is busy all the time may still be slow: each kernel may wait for memory, or
# use a fraction of the chip. Low busy means host-bound, for certain. High busy means: look further. For that we need
# something to compare with. Here are the recorded busy fractions of several ways to decode, slowest first. **Look for**
# the row with the most launches a step.

# %%
columns = ["variant", "rows", "tokens_per_s", "ms_per_step", "floor_ms", "busy", "kernels_a_step", "launches_a_step"]
from_record("decode", lambda record: None, columns)

# %% [markdown]
# ## 3 · The floor: bytes
#
# To draw one token, a model must read all its weights once, and all keys and values of the text so far. No program can
# do without. Bytes over the rate at which the machine moves bytes: that is a time below which no program can come. We
# call it the *floor*. First the bytes, by hand, from nothing but the config.

# %%
from rlcourse.measure.memory import model_shape, parameters

small, qwen = model_shape("embedded"), model_shape("Qwen/Qwen2.5-0.5B")
for key, value in dataclasses.asdict(small).items():
    print(f"{key:13} {value!s:>7}   Qwen2.5-0.5B {getattr(qwen, key)!s:>7}")


# %%
def layer_matrices(shape) -> dict[str, int]:
    """Numbers in each part of one layer."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "query, key, value": shape.hidden * (q + 2 * kv) + (q + 2 * kv),  # matrices and biases
        "attention output": q * shape.hidden,
        "gate, up, down": 3 * shape.hidden * shape.intermediate,
        "two norms": 2 * shape.hidden,
    }


for name, shape in (("embedded", small), ("Qwen2.5-0.5B", qwen)):
    of_layer = layer_matrices(shape)
    print(f"{name}: " + ", ".join(f"{part} {numbers:,}" for part, numbers in of_layer.items()))
    total = shape.layers * sum(of_layer.values()) + shape.vocabulary * shape.hidden + shape.hidden
    print(f"   {shape.layers} layers, one matrix for embedding and head, a last norm: {total:,} parameters")
    assert total == parameters(shape)

# %% [markdown]
# Now one decode step of $B$ rows that each attend to $c$ tokens. Let a number have $b$ bytes.
#
# - **Weights** of the layers: read once, whatever $B$ is. That is the whole point of a batch.
# - The **head**, `vocabulary × hidden`: read once. Of the embedding only $B$ rows are looked up.
# - The **cache**: keys and values of $c$ tokens read and of one written, in each layer and row:
#   $B\,(c + 1) \times \text{layers} \times 2 \times \text{kv heads} \times \text{head size}$ numbers.
#
# `rlcourse.measure.roofline.decode_step` counts the same, and the operations.

# %%
from rlcourse.measure.roofline import decode_step

lines = [
    "| model, rows, tokens a row | layers | head | cache | sum | our count |",
    "| --- | ---: | ---: | ---: | ---: | :---: |",
]
for name, shape, size in (("embedded, float32", small, 4), ("Qwen2.5-0.5B, bfloat16", qwen, 2)):
    for rows, context in ((1, 64), (64, 64), (64, 4096)):
        hand = [
            size * shape.layers * sum(layer_matrices(shape).values()),
            size * shape.vocabulary * shape.hidden,
            size * rows * (context + 1) * shape.layers * 2 * shape.kv_heads * shape.head_dim,
        ]
        work = decode_step(shape, rows, context, size)
        assert hand == list(work.bytes.values())
        cells = " | ".join(f"{n / 1e6:,.1f}" for n in (*hand, sum(hand)))
        lines.append(f"| {name}, {rows}, {context} | {cells} | equal |")
display(Markdown("\n".join(lines) + "\n\nin MB"))

# %% [markdown]
# Two things to see. From 1 row to 64 the weights do not grow; only the cache does. And with a long context the cache is
# larger than the model. Then rows are no longer free.
#
# ### How fast are bytes here?
#
# Do not take it from a data sheet, measure: copy a large piece of memory, and count it twice, as it is read and
# written. And multiply two large matrices to see how many operations a second there are.

# %%
from rlcourse.measure.roofline import measure_machine
from rlcourse.measure.timing import median_seconds

machine = measure_machine(cpu)
print(f"copy {machine.bytes_per_s / 1e9:.1f} GB/s", end=", ")
print(f"matrix products {machine.flops_per_s / 1e9:.0f} GFLOP/s in {machine.dtype}")
for rows in (1, 16, 128):
    work = decode_step(small, rows, 64, 4)
    print(f"{rows:4} rows: {work.total_bytes / 1e6:5.1f} MB, floor {1e6 * machine.floor_seconds(work):6.0f} µs a step")

# %% [markdown]
# Stop: is that a floor? "Large" meant far larger than any cache. But a processor keeps what it used last in its caches,
# and the embedded model is a few megabytes. It may never leave them. So measure the rate at **that** size as well.
# **Look for** the steps in the curve, and for where the model lies.

# %%
sizes = [2**i for i in range(14, pick(26, 28))]  # bytes of the source and the target together
rates = []
for size in sizes:
    source = torch.zeros(size // 2, dtype=torch.uint8)
    target = torch.empty_like(source)
    times = max(1, 2**24 // size)  # small copies many times, so that there is something to measure
    seconds = median_seconds(lambda: [target.copy_(source) for _ in range(times)], cpu, pick(3, 9)) / times  # noqa: B023
    rates.append(size / seconds)
model_bytes = decode_step(small, 1, 0, 4).total_bytes
fig, ax = plt.subplots(figsize=(7.5, 3.6))
ax.plot([s / 1e6 for s in sizes], [r / 1e9 for r in rates], color=BLUE, marker="o")
ax.axhline(machine.bytes_per_s / 1e9, color=VERMILION, linestyle="--", label="large copy: main memory")
ax.axvline(model_bytes / 1e6, color=GREEN, linestyle=":", linewidth=2, label="weights of the embedded model")
ax.set(
    xscale="log", xlabel="MB read and written", ylabel="GB/s", title="The rate of a copy by its size", ylim=(0, None)
)
ax.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
plt.show()

# %%
near = min(range(len(sizes)), key=lambda i: abs(sizes[i] - model_bytes))
cached = dataclasses.replace(machine, bytes_per_s=max(rates[near], machine.bytes_per_s))
print(
    f"main memory {machine.bytes_per_s / 1e9:.0f} GB/s; at the size of the model {cached.bytes_per_s / 1e9:.0f} GB/s,",
    end=" ",
)
print(f"{cached.bytes_per_s / machine.bytes_per_s:.1f} times that")

# %% [markdown]
# On the left a copy is so short that the call itself is what we time. In the middle the caches show what they can. On
# the right there is main memory. So for this model on this machine the main-memory floor need not be a floor: a program
# may be faster. We go on with the rate at the model's size, and keep the other for comparison. A GPU has no such doubt
# with a real model: half a billion weights are a gigabyte in bfloat16, its cache holds some tens of megabytes.
#
# ### Predict, then measure
#
# The prediction is printed above: the floor. Now the real step of our engine. As before the difference of two lengths,
# divided by the steps between them, so that prefill drops out. No token may end an answer, or the rows would leave.
# Of each length we take the **least** of several times: whatever disturbs a run adds to it, and a difference of two
# disturbed times is worth nothing.

# %%
from rlcourse.rollout import make_engine
from rlcourse.sampling import Sampling

decoding = make_engine(endless, "fast", torch.float32)
prompt = prompts[0]
FEW, MORE = 4, pick(12, 36)
context = len(prompt) + (FEW + MORE) / 2  # the mean of the steps that are left in the difference


def least_seconds(rows: int, tokens: int, repeats: int) -> float:
    """The least time of a rollout of `rows` rows with `tokens` tokens each."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        decoding.generate([prompt], rows, tokens, Sampling())
        times.append(time.perf_counter() - start)
    return min(times[1:])


def step_seconds(rows: int, repeats: int = pick(3, 5)) -> float:
    """Seconds of one decode step of `rows` rows."""
    return (least_seconds(rows, MORE, repeats) - least_seconds(rows, FEW, repeats)) / (MORE - FEW)


measured = {rows: step_seconds(rows) for rows in pick((1, 16, 64), (1, 4, 16, 64, 256))}
lines = [
    "| rows | main-memory floor, ms | floor with caches, ms | measured, ms | times the floor |",
    "| ---: " * 5 + "|",
]
for rows, seconds in measured.items():
    work = decode_step(small, rows, context, 4)
    floors = [1e3 * m.floor_seconds(work) for m in (machine, cached)]
    cells = f"{floors[0]:.2f} | {floors[1]:.2f} | {1e3 * seconds:.2f} | {1e3 * seconds / floors[1]:.1f}"
    lines.append(f"| {rows} | {cells} |")
display(Markdown("\n".join(lines)))

# %% [markdown]
# With one row we are many times above the floor: the price of calling operators, as section 2 found. With many rows
# the same calls do more work, and the step comes closer. Where the two floors meet, operations take longer than
# bytes, and the rate of memory matters no more. **Look for** the flat beginning of the measured line, and for what it
# does behind.

# %%
fig, ax = plt.subplots(figsize=(7, 3.8))
grid = [2**i for i in range(10)]
for m, color, style, label in (
    (machine, VERMILION, "--", "floor, main memory"),
    (cached, GREEN, "-.", "floor, caches"),
):
    floors = [1e3 * m.floor_seconds(decode_step(small, rows, context, 4)) for rows in grid]
    ax.plot(grid, floors, color=color, linestyle=style, label=label)
ax.plot(list(measured), [1e3 * s for s in measured.values()], color=BLUE, marker="o", linewidth=2, label="measured")
ax.set(xscale="log", yscale="log", xlabel="rows", ylabel="ms a decode step", title="A decode step and its floors")
ax.set_xticks(grid, grid)
ax.legend(frameon=False)
plt.show()
first, last = min(measured), max(measured)
print(f"{last // first} times the rows take {measured[last] / measured[first]:.1f} times as long")
assert measured[last] / measured[first] < 0.9 * last / first  # rows share the price of a step

# %% [markdown]
# **Explore.** The floor of a decode step on any machine, from its bytes alone. What to look for: where the cache
# overtakes the weights; how far a larger model moves that point; and that bandwidth scales everything alike.

# %%
from rlcourse.course.widgets import explorer
from rlcourse.measure.memory import QWEN25

SHAPES = {name.split("/")[1]: shape for name, shape in QWEN25.items()} | {"embedded": small}


def draw_floor(ax, model, rows, context, gb_per_s):
    """Milliseconds a step by part over the number of rows, and the chosen number of rows."""
    grid = [2**i for i in range(9)]
    works = [decode_step(SHAPES[model], r, context, 2).bytes for r in grid]
    parts = [[1e-6 * work[part] / gb_per_s for work in works] for part in ("layers", "head", "keys and values")]
    ax.stackplot(grid, parts, colors=(BLUE, SKY, ORANGE), labels=("layers", "head", "keys and values"))
    chosen = decode_step(SHAPES[model], rows, context, 2).total_bytes / (1e9 * gb_per_s)
    ax.plot([rows], [1e3 * chosen], "o", color=BLACK)
    ax.axvline(rows, color=BLACK, linestyle=":")
    ax.set(xscale="log", xlabel="rows", ylabel="ms a step, at least", xlim=(1, 256))
    first = f"{model}, {context} tokens a row, {gb_per_s} GB/s"
    second = f"{rows} rows: {1e3 * chosen:.3g} ms, {rows / chosen:,.0f} tokens/s"
    ax.set_title(f"{first}\n{second}", fontsize=11)
    ax.legend(frameon=False, fontsize=9, loc="upper left")


explorer(
    draw_floor,
    static=[
        {"model": "Qwen2.5-0.5B", "rows": 64, "context": 256, "gb_per_s": 1000},
        {"model": "Qwen2.5-0.5B", "rows": 64, "context": 2048, "gb_per_s": 1000},
        {"model": "Qwen2.5-7B", "rows": 64, "context": 2048, "gb_per_s": 1000},
    ],
    model=list(SHAPES),
    rows=(64, 1, 256, 1),
    context=(256, 16, 8192, 16),
    gb_per_s=(1000, 10, 5000, 10),
)

# %% [markdown]
# ## 4 · Operations
#
# The other limit: arithmetic. A weight that was read does two operations for each row, a multiplication and an
# addition. *Arithmetic intensity* is operations over bytes. For the weights of a decode step in $b$ bytes it is
# $2 B / b$: in bfloat16 one operation a byte for each row. A machine has an intensity of its own, the *ridge*:
# operations a second over bytes a second. Below the ridge a program waits for bytes, above it for arithmetic.
#
# **Look for** where the lines cross the ridge of this machine, and what a long context does to them.

# %%
ridges = [("this processor", machine.ridge, BLACK, "right")]
try:
    copy = load_record("decode", "NVIDIA H200")["setup"]["copy_gb_per_s"]
    peak = max(row["peak_tflops"] for row in load_record("update", "NVIDIA H200")["results"])
    ridges.append(("an H200, recorded", 1e3 * peak / copy, PURPLE, "left"))
except FileNotFoundError:
    print("A GPU's ridge is not recorded yet: `rlcourse bench decode --record`, `rlcourse bench update --record`.")
grid = [2**i for i in range(10)]
fig, ax = plt.subplots(figsize=(7.5, 4))
for label, shape, size, tokens, color, style in (
    ("embedded, float32, 64 tokens a row", small, 4, 64, BLUE, "-"),
    ("Qwen2.5-0.5B, bfloat16, 64 tokens a row", qwen, 2, 64, GREEN, "--"),
    ("Qwen2.5-0.5B, bfloat16, 4096 tokens a row", qwen, 2, 4096, ORANGE, "-."),
):
    ax.plot(
        grid, [decode_step(shape, r, tokens, size).intensity for r in grid], color=color, linestyle=style, label=label
    )
for name, ridge, color, side in ridges:
    ax.axhline(ridge, color=color, linestyle=":")
    place = grid[0] if side == "left" else grid[-1]
    ax.text(place, 1.08 * ridge, f"ridge of {name}: {ridge:.3g}", color=color, fontsize=9, ha=side)
ax.set(
    xscale="log", yscale="log", xlabel="rows", ylabel="operations a byte", title="Arithmetic intensity of a decode step"
)
ax.legend(frameon=False, fontsize=9, loc="lower right")
plt.show()

# %% [markdown]
# Each row that is added reads a cache of its own, so the lines bend. With long contexts they never get far: attention
# over the cache has a low intensity of its own, and no batch raises it.
#
# ### The roofline
#
# Draw both limits over the intensity, and you get a roof (Williams et al. 2009): on the left it rises with the bytes,
# on the right it is flat. Each program is a point below it. Here are the measured decode steps and the update, all rows
# of which train. **Look for** two ways to go up: to the right along the roof, and straight up to it.

# %%
from rlcourse.measure import roofline

answered = rollout.completion_lengths.float().mean().item()
length = rollout.prompt_lengths.float().mean().item() + answered  # real tokens, padding left out
update_seconds = median_seconds(lambda: update(rollout), cpu, pick(1, 3))
update_work = roofline.update(small, config.rows, length, answered)
points = [
    (f"decode, {r} rows", decode_step(small, r, context, 4), measured[r]) for r in measured if r in (1, 16, 64, 256)
]
points.append((f"update, {config.rows} rows", update_work, update_seconds))
fig, ax = plt.subplots(figsize=(7.5, 4.4))
draw_roofline(ax, machine, points)
ax.set_title("Embedded model, this processor, roof of main memory")
plt.show()
for label, work, seconds in points:
    print(f"{label:18} {work.intensity:8.1f} operations a byte, {work.total_flops / seconds / 1e9:6.1f} GFLOP/s")

# %% [markdown]
# Decode stands on the left. With one row it does few operations a second, because it is called for little work. More
# rows move it right and up. The update stands far to the right: it cannot be limited by its bytes. (They are those of
# weights, gradients and optimizer; what activations move depends on the program and is not counted.)
#
# Why that far? Count **tokens per weight that is read**.

# %%
tokens = config.rows * length
print(
    f"decode: a weight that is read serves 1 token of each row: {config.rows} with {config.rows} rows, 1 with one row"
)
print(f"update: it serves every token of every row at once: {tokens:,.0f}, of {config.rows} rows x {length:.0f} tokens")
generated = int(rollout.completion_lengths.sum())
decode_reads = int(rollout.completion_lengths.max())
print(f"to write {generated:,} tokens all weights were read {decode_reads} times; to learn from them about 3 times")
intensity = [decode_step(small, config.rows, context, 4).intensity, update_work.intensity]
print(f"operations a byte: decode {intensity[0]:.0f}, update {intensity[1]:.0f}; the ridge is at {machine.ridge:.1f}")

# %% [markdown]
# That is the asymmetry of the whole loop. To **write** a text, tokens come one after the other, since each depends on
# the one before. To **learn** from it, they are all there: one pass forward, and about twice that backward. The
# update has more operations. But the rollout has to fetch the weights again for every token, and pays for its calls
# every time. On a GPU arithmetic is so cheap that bytes and calls rule, and the rollout is the long phase. On this
# processor arithmetic is dear and the model is small enough to stay in the caches, so the update weighs much more. Same
# program, other ridge.
#
# The same picture for the recorded H200. **Look for** the distance of the decode points to the roof, and the update's.


# %%
def draw_gpu_roofline(record: dict) -> None:
    updates = load_record("update", record["device"])
    peak = max(row["peak_tflops"] for row in updates["results"])
    gpu = roofline.Machine(
        record["device"], record["setup"]["dtype"], 1e9 * record["setup"]["copy_gb_per_s"], 1e12 * peak
    )
    points = []
    for row in record["results"]:
        if row["variant"] == "graph":
            work = decode_step(qwen, row["rows"], row["prompt_tokens"] + row["new_tokens"] / 2, 2)
            points.append((f"decode, {row['rows']} rows", work, row["ms_per_step"] / 1e3))
    row, new = updates["results"][-1], updates["setup"]["new_tokens"]
    work = roofline.update(qwen, row["rows"], row["tokens"] // row["rows"], new)
    points.append((f"update, {row['rows']} rows", work, row["update_s"]))
    _, ax = plt.subplots(figsize=(7.5, 4.4))
    draw_roofline(ax, gpu, points)
    ax.set_title(f"Qwen2.5-0.5B's shape, {provenance(record)}", fontsize=11)
    plt.show()
    for label, work, seconds in points:
        print(
            f"{label}: {seconds / gpu.floor_seconds(work):.1f} times the floor, {work.intensity:.0f} operations a byte"
        )


try:
    from_record("decode", draw_gpu_roofline)
except FileNotFoundError:
    print("The update is not recorded on an NVIDIA H200 yet: `rlcourse bench update --record` measures it there.")

# %% [markdown]
# ## 5 · Prefill against decode
#
# The cleanest way to see it: the **same tokens** through the **same weights**, all in one pass (*prefill*), or one by
# one over a cache (*decode*). The results must be equal, and are. Only the order of reading differs.

# %%
decoder = engine.decoder
decoder.sync()
COUNT = pick(24, 128)
ids = torch.randint(5, small.vocabulary, (1, COUNT))


@torch.no_grad()
def at_once(count: int) -> torch.Tensor:
    """Logits after `count` tokens, from one pass."""
    return decoder.prefill(ids[:, :count], torch.tensor([count]), decoder.new_cache(1, count))


@torch.no_grad()
def one_by_one(count: int) -> torch.Tensor:
    """The same, a token at a time: it attends to those before it through the cache."""
    cache = decoder.new_cache(1, count)
    for t in range(count):
        logits = decoder.decode(ids[:, t], torch.tensor([t]), cache, t + 1)
    return logits


gap = (at_once(COUNT) - one_by_one(COUNT)).abs().max().item()
assert torch.allclose(at_once(COUNT), one_by_one(COUNT), atol=1e-3)
print(f"{COUNT} tokens: largest difference of the logits {gap:.0e}")

# %%
counts = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n <= COUNT]
prefill = [median_seconds(lambda n=n: at_once(n), cpu, pick(3, 9)) for n in counts]
decode = [median_seconds(lambda n=n: one_by_one(n), cpu, pick(3, 5)) for n in counts]
fig, ax = plt.subplots(figsize=(7, 3.6))
ax.plot(counts, [1e3 * s / n for s, n in zip(decode, counts, strict=True)], color=BLUE, marker="o", label="one by one")
ax.plot(
    counts,
    [1e3 * s / n for s, n in zip(prefill, counts, strict=True)],
    color=ORANGE,
    marker="s",
    linestyle="--",
    label="at once",
)
ax.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms a token", title="The same tokens, one row")
ax.set_xticks(counts, counts)
ax.legend(frameon=False)
plt.show()
print(f"{counts[-1]} tokens: one by one {1e3 * decode[-1]:.1f} ms, at once {1e3 * prefill[-1]:.2f} ms", end=", ")
print(f"{decode[-1] / prefill[-1]:.0f} times as fast")
assert decode[-1] / prefill[-1] > 1.5

# %% [markdown]
# One by one, the price of a token stays where it is: each pays all calls and all weights. At once, they share them. Two
# consequences. A prompt that eight answers share is prefilled **once**, and its keys and values are given to all eight.
# And the update is a prefill of finished texts, with a backward pass behind.
#
# ## 6 · Memory
#
# Time is half of it; the other limit is what must stand in memory at once. `MemoryTimeline` looks at it every few
# milliseconds while a step runs, and notes the phases. Here it is the memory of this process; on a GPU it would be that
# of its allocator. **Look for** what rises within the update, and what is given back.

# %%
from rlcourse.measure.profiling import MemoryTimeline

with contextlib.suppress(AttributeError, TypeError):  # Linux: the C library gives back what it keeps of earlier steps
    ctypes.CDLL(None).malloc_trim(0)
with MemoryTimeline(cpu, every=0.002) as timeline:
    timeline.mark("rollout")
    rollout = collect(policy, engine, task, order, config)[0].rollout
    timeline.mark("update")
    update(rollout)
    timeline.mark("end")
seconds, held = zip(*timeline.samples, strict=True)
print(f"{len(held)} samples; {held[0] / 1e6:.0f} MB at the start, at most {max(held) / 1e6:.0f} MB")

# %%
fig, ax = plt.subplots(figsize=(9, 3.6))
above = [(n - held[0]) / 1e6 for n in held]
ax.fill_between([1e3 * s for s in seconds], above, color=SKY, alpha=0.5)
ax.plot([1e3 * s for s in seconds], above, color=BLUE, linewidth=1)
for start, name in timeline.marks:
    if name in ("rollout", "update"):
        ax.axvline(1e3 * start, color=BLACK, linestyle=":", linewidth=1)
        ax.text(1e3 * start, 1.04 * max(above), f" {name}", fontsize=10)
ax.set(
    xlabel="ms", ylabel="MB above the start", title="Memory over one step", ylim=(min(0, *above), 1.15 * max(above) + 1)
)
plt.show()

# %% [markdown]
# The update goes through the rows in micro-batches of 64. The rise in it is the first forward pass, layer by layer:
# everything that the backward pass needs is kept. The backward pass gives it back on its way, but read falls with
# care. A process keeps memory that its tensors gave back, for the next ones. Rises above all that came before are
# real; what falls late, or not at all, may have been free for long. A GPU's allocator says exactly what is handed
# out.
#
# Which tensors are they? They can be counted before anything is loaded; lesson 05 did it for a GPU. `estimate` takes
# every row at its longest, so it is an upper bound.

# %%
from rlcourse.measure.memory import activation_bytes, estimate

bound = estimate(config, small, "cpu")
WHAT = {
    "weights": "the policy, float32; always",
    "gradients": "from the first backward pass to the optimizer step",
    "optimizer": "AdamW's two moments; from the first step on",
    "rollout_weights": "the engine's own fused copy; always",
    "kv_cache": "keys and values of all rows; during the rollout",
    "activations": "what the backward pass needs; during the update",
    "logits": "one chunk of them at a time; during the update",
}
lines = ["| part | at most, MB | what it is, and when it stands |", "| --- | ---: | --- |"]
lines += [f"| `{part}` | {getattr(bound, part) / 1e6:,.1f} | {text} |" for part, text in WHAT.items()]
display(Markdown("\n".join(lines)))
width = int((rollout.prompt_lengths + rollout.completion_lengths).max())
real = activation_bytes(small, min(config.rows, config.micro_batch_rows), width, "float32", False) + bound.logits
update_start = next(start for start, name in timeline.marks if name == "update")
rise = max(held) - next(n for s, n in timeline.samples if s >= update_start)
print(
    f"activations of {config.micro_batch_rows} rows x {width} tokens and a chunk of logits: {real / 1e6:.0f} MB",
    end="; ",
)
print(f"the update rose by {rise / 1e6:.0f} MB")

# %% [markdown]
# Weights, gradients and moments are small here, and activations are large. In a model of billions it is the other way
# round until rows and texts are long. The measured rise is no exact sum of the parts: operators need room for a
# moment that nobody counted, and a process keeps what it was given back. That is why `estimate` adds headroom. What
# one can do about each part stands in the config: fewer rows a micro-batch or checkpointing (activations), a smaller
# chunk (logits), `sleep` (the cache during the update).
#
# ## 7 · Three kinds of slow
#
# | | host-bound | byte-bound | compute-bound |
# | --- | --- | --- | --- |
# | waits for | the next call | memory | arithmetic |
# | kernels in a trace | short, with gaps between | back to back | back to back, few and large |
# | GPU busy | low | high | high |
# | twice the rows | hardly any more time | what the caches add | twice the time |
# | in the roofline | far below the roof | near the slope | near the flat part |
# | typical | few rows, operator by operator | decoding in one graph | update, long prefill |
#
# What helps:
#
# - **host-bound**: fewer and larger operators, fusing, a CUDA graph, more rows;
# - **byte-bound**: smaller numbers, grouped heads, no copies of the cache, more rows;
# - **compute-bound**: bfloat16 and tensor cores, less padding, less work.
#
# In this order: phases first, then busy, then the floor. Do not tune a kernel while the host is what you wait for. And
# stop when the floor is near, or when Amdahl says that the rest does not matter. What the two engines of the recorded
# step differ in is almost all in the first column. Lesson 07 climbs that ladder, one rung at a time.

# %%
kinds = {"one row": measured[min(measured)], f"{max(measured)} rows": measured[max(measured)]}
for name, seconds in kinds.items():
    rows = min(measured) if name == "one row" else max(measured)
    work = decode_step(small, rows, context, 4)
    of_bytes, of_flops = work.total_bytes / cached.bytes_per_s, work.total_flops / cached.flops_per_s
    print(f"decode here, {name:8}: {1e3 * seconds:6.2f} ms; bytes ask for {1e3 * of_bytes:.2f}", end=", ")
    print(f"operations for {1e3 * of_flops:.2f}")

# %% [markdown]
# ## Check yourself
#
# 1. A rollout is 80 % of a step. A colleague makes it 4 times faster. What does the step gain? What can anyone?
#
# <details><summary>Answer</summary>
# The new time is 0.2 + 0.8 / 4 = 0.4, so 2.5 times. With a rollout that takes no time: 1 / 0.2 = 5 times.
# </details>
#
# 2. You time `model(x)` on a GPU with `time.perf_counter()` and find 2 ms, then 40 ms for `print(loss.item())`. Which
#    of them is slow?
#
# <details><summary>Answer</summary>
# The model. The first line only asked for the work; `.item()` waits for all of it. Synchronise before you read a clock.
# </details>
#
# 3. Two kernels of 1 ms each run at the same time, in a window of 4 ms. How busy is the GPU?
#
# <details><summary>Answer</summary>
# 25 %: their union is 1 ms.
# </details>
#
# 4. Decoding 16 rows takes 3 ms, 32 rows 3.1 ms. Which kind of slow is it, or which can it not be?
#
# <details><summary>Answer</summary>
# Not compute-bound: the operations doubled. Host-bound, or bound by the bytes of the weights; both are the same for 16
# and 32 rows. The busy fraction, or the floor, tells which.
# </details>
#
# 5. A GPU with twice the arithmetic and the same memory comes out. What does it do for decoding with 32 rows?
#
# <details><summary>Answer</summary>
# Next to nothing. Decode with few rows lies below the ridge, and the ridge has moved even farther to the right. The
# update gains.
# </details>
#
# 6. Why is the main-memory floor of the embedded model no floor on your processor, and that of Qwen2.5-0.5B one on a
#    GPU?
#
# <details><summary>Answer</summary>
# The embedded model fits into the processor's caches, from which bytes come several times faster. A gigabyte of weights
# fits into no GPU's cache, so every step fetches it from memory.
# </details>
#
# ## Exercises
#
# [exercises/06_where_time_goes.ipynb](../exercises/06_where_time_goes.ipynb): busy fraction, the bytes of a step,
# Amdahl's law, the bound of a machine, and self time in a trace. Then go on to
# [07 · From generate to one CUDA graph a step](07_static_cache.ipynb).
#
# ## Further reading
#
# - Amdahl 1967, *Validity of the Single Processor Approach to Achieving Large Scale Computing Capabilities*, AFIPS: the
#   law.
# - Williams, Waterman and Patterson 2009, *Roofline: An Insightful Visual Performance Model for Multicore
#   Architectures*, Communications of the ACM 52(4).
# - Pope et al. 2022, *Efficiently Scaling Transformer Inference*, arXiv:2211.05102: bytes and operations of decoding.
# - Kaplan et al. 2020, *Scaling Laws for Neural Language Models*, arXiv:2001.08361: counts training's operations.
# - Ainslie et al. 2023, *GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints*,
#   arXiv:2305.13245: why the cache has fewer heads.
# - Horace He 2022, *Making Deep Learning Go Brrrr From First Principles*: the three kinds of slow, with PyTorch.
