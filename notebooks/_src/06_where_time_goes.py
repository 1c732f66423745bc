# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# In June 2026 somebody wrote a GPU kernel for an RL training loop. Alone, it was 2.2 times as fast as what it replaced.
# In the loop it produced the same tokens, without an error, and each decode step got nearly 3 times *slower* ([*Making
# Dr GRPO go brrr*](https://kyrieblunders.bearblog.dev/making-dr-grpo-go-brrr/)). How can a faster part make the whole
# slower? Lesson 10 closes the case. This one has the first tool: find out where the time goes before you speed anything
# up.
#
# **You will learn**
#
# - to time a training step phase by phase, and to predict what a faster phase does for the whole;
# - to see in five minutes how much a popular remedy can gain at most;
# - to read a trace, and what "the GPU is busy" does and doesn't mean;
# - to compute the time that no program can beat, and how far a real one is from it;
# - to tell three kinds of slow apart, because each has its own cure.
#
# You need [lesson 05](05_full_loop.ipynb): the phases of a step. What runs here runs on the CPU; GPU numbers were
# recorded on an H200.

# %%
import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library keeps quiet; read when torch is loaded
import dataclasses
import json
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown, display

from rlcourse.config import make_config
from rlcourse.course import pick
from rlcourse.course.widgets import bet, explorer
from rlcourse.evaluation import load_all
from rlcourse.measure.plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, draw_roofline
from rlcourse.measure.records import load_record, provenance

cpu = torch.device("cpu")
config = make_config("laptop", device="cpu", num_prompts=pick(4, 16))
policy, engine, task = load_all(config)
print(f"{config.rows} answers per step, {torch.get_num_threads()} thread(s)")

# %% [markdown]
# ## 1 · Where does a step go?
#
# One step of Dr. GRPO has four phases. The *rollout* samples the answers, the *reward* verifies them, the *advantages*
# compare them, and the *update* takes the gradient and moves the weights. Everybody knows which one is slow.

# %% tags=["hide-input"]
# @title Your bet
share_bet = bet("The embedded model on this processor: how much of a step is the rollout?", (0, 100, 1), "%")

# %%
from rlcourse.learner import Learner
from rlcourse.tasks.prompts import PromptSampler
from rlcourse.train import train_step

PHASES = {"rollout": BLUE, "reward": ORANGE, "advantages": GREEN, "update": VERMILION}
learner, order = Learner(policy, config), PromptSampler(task.problems("train"), config.seed)
torch.manual_seed(0)
steps = [train_step(learner, engine, task, order, step=0)[0] for _ in range(pick(3, 9))]
median = {phase: statistics.median(row["timing"][f"{phase}_s"] for row in steps[1:]) for phase in PHASES}
step_s = sum(median.values())
share_bet.result(round(100 * median["rollout"] / step_s))
for phase, seconds in median.items():
    print(f"{phase:11} {1e3 * seconds:8.1f} ms  {seconds / step_s:6.1%}")

# %% [markdown]
# That cell has two habits worth copying. It drops the first step, which allocates memory and loads code that later
# steps reuse. And it reports the **median**, because one disturbed step shifts a mean.
#
# On a GPU there's a trap. The *host*, the CPU that runs Python, only **asks** the GPU for work and moves on, so a host
# clock times the asking. The package's `PhaseTimer` waits for the GPU at both ends of a phase.
#
# Here are the same phases on an H200, with the shape of Qwen2.5-0.5B and 64 answers of {{ load_record("step", "NVIDIA
# H200")["setup"]["new_tokens"] }} tokens. One is a step of TRL, Hugging Face's RL library, which samples with
# transformers' `generate`; the other is this package's. **Look for** how the blue share changes.

# %% tags=["hide-input"]
# @title Figure: where a step goes
from matplotlib.patches import Patch

record = load_record("step", "NVIDIA H200")
STEPS = {(row["variant"], row["rows"]): row for row in record["results"]}
NAMES = {"trl-default": "TRL", "rlcourse": "this package"}


def bar(ax, place: int, parts: dict[str, float], whole: float) -> None:
    """One step as a bar of 100%: its phases, and in gray what is in none of them."""
    left = 0.0
    for phase, seconds in (parts | {"the rest": whole - sum(parts.values())}).items():
        width = 100 * seconds / whole
        ax.barh(place, width, left=left, color=PHASES.get(phase, "#999999"))
        if width > 4:
            words = f"{phase}\n{width:.0f}%" if width > 8 else f"{width:.0f}%"
            ax.text(left + width / 2, place, words, ha="center", va="center", fontsize=9, color="white")
        left += width


fig, ax = plt.subplots(figsize=(9, 3), layout="constrained")
bar(ax, 0, median, step_s)
labels = [f"here, embedded model\n{step_s:.2f} s"]
for place, (variant, name) in enumerate(NAMES.items(), start=1):
    row = STEPS[variant, 64]
    bar(ax, place, {"rollout": row["rollout_s"], "update": row["update_s"]}, row["step_s"])
    labels.append(f"H200, {name}\n{row['step_s']:.2f} s")
ax.set_yticks(range(3), labels)
ax.invert_yaxis()
ax.set(title="Where a step goes", xlim=(0, 100))
ax.set_xlabel(f"% of a step; {provenance(record)}", fontsize=9)
fig.legend(
    handles=[Patch(color=color, label=name) for name, color in (PHASES | {"the rest": "#999999"}).items()],
    loc="outside lower center",
    ncols=5,
)
plt.show()
part = {name: STEPS[name, 64]["rollout_s"] / STEPS[name, 64]["step_s"] for name in NAMES}

# %% [markdown]
# {{ 100 * part["trl-default"]:.0f }}% of TRL's step is the rollout, {{ 100 * part["rlcourse"]:.0f }}% of ours, and {{
# 100 * median["rollout"] / step_s:.0f }}% here. {{ assert part["trl-default"] > 0.9 and part["rlcourse"] < 0.7 and
# row["rollout_s"] + row["update_s"] > 0.995 * row["step_s"] }} "The rollout is the bottleneck of RL" isn't a law. It's
# a fact about one engine on one machine.
#
# ## 2 · How much can you gain?
#
# Suppose a part of the program takes a share $f$ of its time, and you make that part $g$ times as fast. The new time
# is what you didn't touch, $1 - f$, plus $f / g$. So the whole speeds up by a factor of
#
# $$\frac{1}{1 - f + f / g} \;<\; \frac{1}{1 - f} .$$
#
# This is Amdahl's law (1967). The bound on the right, the *ceiling*, is what you'd get if the part took no time.


# %%
def amdahl(share: float, gain: float) -> float:
    """Speed-up of the whole from a part with this share that becomes `gain` times as fast."""
    return 1 / (1 - share + share / gain)


# %% [markdown]
# Now a typical day. Somebody finds the GPU idle for most of a training run, and tries what the guides recommend:
#
# - more *workers*, processes that load and tokenise the next batch while this one trains;
# - *pinned memory* and `non_blocking=True`, so that a batch is copied to the GPU while the host moves on;
# - `torch.compile` on the model that trains: PyTorch turns many operators into few;
# - a *static KV cache*: the keys and values of earlier tokens get fixed memory instead of tensors that grow;
# - a static KV cache **and** a compiled *decode step*, the work for one more token per answer.

# %% tags=["hide-input"]
# @title Your bet
ladder_bet = bet(
    "TRL on the H200, 64 answers: how many of these five, each alone, make a step over 5% faster?", (0, 5, 1), "of five"
)

# %% [markdown]
# Don't try. Divide. What does each speed up, and what share of a step is that? First, loading and copying a batch,
# which hardly anybody measures.

# %%
from rlcourse.measure.timing import median_seconds

loading_s = median_seconds(lambda: [policy.prompt(p.question) for p in order.sample(config.num_prompts)], cpu, 9)
ids = torch.randint(0, 500, (config.rows, 128))
copying_s = median_seconds(lambda: ids.clone(), cpu, 99)
print(f"choose and tokenise {config.num_prompts} prompts {1e3 * loading_s:.2f} ms, {loading_s / step_s:.2%} of a step")
print(f"copy the batch's token ids {1e6 * copying_s:.1f} µs, {copying_s / step_s:.4%} of a step")

# %% tags=["hide-input"]
# @title Table: what people try first
decode = load_record("decode", "NVIDIA H200")
RUNGS = {(row["variant"], row["rows"]): row for row in decode["results"]}
GRAPH = "graph-exact"  # our decode step in that record
slow, ours, fixed = (STEPS[name, 64] for name in ("trl-default", "rlcourse", "trl-static-compiled"))
compiled = STEPS["trl-update-compiled", 64]
outside_s = ours["step_s"] - ours["rollout_s"] - ours["update_s"]  # choosing prompts, rewards and the rest
update_part, rollout_part = slow["update_s"] / slow["step_s"], slow["rollout_s"] / slow["step_s"]
update_gain = slow["update_s"] / compiled["update_s"]
updates = load_record("update", "NVIDIA H200")
copies = next(row for row in updates["results"] if row["rows"] == 64)  # of a batch, from the host to the GPU
alone = {n: RUNGS["hf-static", n]["tokens_per_s"] / RUNGS["hf-dynamic", n]["tokens_per_s"] for n in (16, 256)}
whole = slow["step_s"] / fixed["step_s"]


def ceiling(share: float) -> str:
    """A share of the step, and the most that it can give."""
    return f"{share:.1%} → {1 / (1 - share):.2f}×" if share >= 0.001 else "below 0.1% → 1.00×"


rows = [
    (
        "loader workers",
        "choosing and tokenising",
        loading_s / step_s,
        outside_s / slow["step_s"],
        f"not tried; {1e6 * outside_s:.0f} µs*",
    ),
    (
        "pinned memory, `non_blocking`",
        "copies to the GPU",
        copying_s / step_s,
        copies["copy_s"] / slow["step_s"],
        f"{1e6 * copies['copy_s']:.0f} µs, pinned {1e6 * copies['pinned_copy_s']:.0f} µs*",
    ),
    (
        "compile the model that trains",
        "the update",
        median["update"] / step_s,
        update_part,
        f"update {update_gain:.1f}×: step {slow['step_s'] / compiled['step_s']:.2f}×",
    ),
    (
        "static cache alone",
        "the rollout",
        median["rollout"] / step_s,
        rollout_part,
        f"decoding {alone[16]:.2f}× (16 rows), {alone[256]:.2f}× (256)",
    ),
    (
        "static cache, decode step compiled",
        "the rollout",
        median["rollout"] / step_s,
        rollout_part,
        f"step {whole:.2f}×",
    ),
]
lines = [
    "| tried | speeds up | here: share → ceiling | TRL on the H200: share → ceiling | H200, measured |",
    "|---|---|---|---|---|",
]
lines += [f"| {a} | {b} | {ceiling(c)} | {ceiling(d)} | {e} |" for a, b, c, d, e in rows]
# the first two by their ceilings, since nobody tried them; a slower decoding can't make a faster step
gains = [1 / (1 - row[3]) for row in rows[:2]] + [slow["step_s"] / compiled["step_s"], alone[256], whole]
ladder_bet.result(sum(gain > 1.05 for gain in gains))
note = (
    "<small>* TRL's records don't split off these two. The times are this package's, for the same 64 answers: all that "
    "is neither rollout nor update, and the copy of a batch. The shares divide them by TRL's step.</small>"
)
display(Markdown("\n".join([*lines, "", note])))

# %% [markdown]
# One. {{ assert sum(gain > 1.05 for gain in gains) == 1 }} The ceilings settle the first two lines: a batch of prompts
# is a few kilobytes of text. {{ assert copies["copy_s"] < 1e-3 * slow["step_s"] and outside_s < 1e-3 * slow["step_s"]
# }} Compiling the model that trains can give TRL {{ 1 / (1 - update_part):.2f }}× at most. It made the update {{
# update_gain:.1f }} times as fast, and you wouldn't notice it in the step. {{ assert update_gain > 1.2 and
# abs(slow["step_s"] / compiled["step_s"] - 1) < 0.05 }} In our own step, where the update is {{ 100 * ours["update_s"]
# / ours["step_s"]:.0f }}%, it would pay. **Ceilings move when something else gets faster.**
#
# The last two lines share a ceiling, not a result. A static cache alone makes decoding slower. {{ assert alone[256] < 1
# < whole }} Compile the decode step as well, and the whole training step is {{ whole:.2f }} times as fast. A ceiling
# says what you **can** gain, not how much of it a change delivers. For that you must know what the time is spent on
# (section 3).
#
# **Look for** where each line bends away from the dotted one, and for the star, which was measured.

# %% tags=["hide-input"]
# @title Figure: Amdahl's law, and a measured step
speedups = torch.logspace(0, 2, 60).tolist()
fig, ax = plt.subplots(figsize=(7, 3.6))
ax.plot(speedups, speedups, color=BLACK, linestyle=":", label="if the rollout were all of the step")
shares = {"TRL": part["trl-default"], "this package": part["rlcourse"]}
for (name, p), color, style in zip(shares.items(), (VERMILION, GREEN), ("-", "--"), strict=True):
    label = f"H200, {name}: at most {1 / (1 - p):.1f}×"
    ax.plot(speedups, [amdahl(p, s) for s in speedups], color=color, linestyle=style, label=label)
faster = slow["rollout_s"] / fixed["rollout_s"]
ax.plot(faster, slow["step_s"] / fixed["step_s"], marker="*", markersize=13, color=BLACK, linestyle="")
ax.annotate("measured: TRL, decode step compiled", (faster, slow["step_s"] / fixed["step_s"]), (2 * faster, 1.25),
            arrowprops={"arrowstyle": "-"}, fontsize=9)  # fmt: skip
predicted, found = amdahl(part["trl-default"], faster), slow["step_s"] / fixed["step_s"]
ax.set(xscale="log", yscale="log", ylim=(0.9, 100))
ax.set(xlabel="speed-up of the rollout", ylabel="speed-up of the step", title="A faster rollout, and the step")
ax.set_xticks((1, 10, 100), ("1", "10", "100"))
ax.set_yticks((1, 10, 100), ("1", "10", "100"))
ax.legend()
plt.show()

# %% [markdown]
# The rollout became {{ faster:.1f }} times as fast. The law predicts a step that is {{ predicted:.2f }} times as fast;
# we measured {{ found:.2f }}. {{ assert abs(predicted / found - 1) < 0.03 }}
#
# ## 3 · What is the time spent on?
#
# Phases say where. A *profiler* says what: it records every operator that PyTorch runs, with its start and duration.
#
# How many operators does one decode step have? A rollout first reads its prompts (the *prefill*), so subtract a short
# rollout from a longer one: what they have in common drops out.

# %%
from rlcourse.measure.profiling import profile
from rlcourse.rollout import make_engine

endless = dataclasses.replace(policy, eos_ids=[policy.model.config.vocab_size])  # no token ends an answer
decoding = make_engine(endless, "fast", torch.float32)
prompts = [policy.prompt(problem.question) for problem in order.sample(config.num_prompts)]
FEW, MORE = 4, pick(12, 36)  # tokens of the two lengths


def step_seconds(sizes: tuple[int, ...]) -> dict[int, float]:
    """Seconds per decode step by number of rows: rollouts of MORE tokens less those of FEW, in turn, the median."""
    took = {rows: [] for rows in sizes}
    for rows in sizes * pick(2, 8):
        times = []
        for tokens in (FEW, MORE):
            start = time.perf_counter()
            decoding.generate(prompts[:1], rows, tokens, config.sampling)
            times.append(time.perf_counter() - start)
        took[rows].append((times[1] - times[0]) / (MORE - FEW))
    return {rows: statistics.median(times[1:]) for rows, times in took.items()}  # the first one warms up


decode_s_of = step_seconds(pick((1, 16, 64), (1, 4, 16, 64, 256)))
for rows in (1, 16, 64):
    counts = [profile(lambda n=n, r=rows: decoding.generate(prompts[:1], r, n, config.sampling), cpu, repeats=1).kernels
              for n in (FEW, MORE)]  # fmt: skip
    operators = (counts[1] - counts[0]) / (MORE - FEW)
    print(f"{rows:3} rows: {operators:.0f} operators per step, {1e3 * decode_s_of[rows]:.2f} ms", end=", ")
    print(f"{1e6 * decode_s_of[rows] / operators:.1f} µs each")

# %% [markdown]
# The number of operators hardly depends on the number of rows. With one row there's next to nothing to compute, and
# still the step takes {{ 1e3 * decode_s_of[1]:.1f }} ms. That's the price of **calling**: for each operator Python
# calls PyTorch, which looks up the code for these types and makes room for the result. 16 times as many rows cost only
# {{ decode_s_of[16] / decode_s_of[1]:.1f }} times as much. {{ assert decode_s_of[16] < 8 * decode_s_of[1] }} A program
# that spends its time on calls is *host-bound*. A GPU makes this worse: it computes so much faster, and each call must
# also launch a *kernel*, a program on the GPU.
#
# ### A trace
#
# Pass `trace=PATH` and the profiler writes every event to a file in Chrome's JSON format. Open it at
# [ui.perfetto.dev](https://ui.perfetto.dev); nothing is uploaded. `w` and `s` zoom, `a` and `d` move.

# %%
path = Path(tempfile.mkdtemp()) / "decode.json"
profile(lambda: engine.generate(prompts[:2], 8, 6, config.sampling), cpu, repeats=1, trace=path)
trace = json.loads(path.read_text())["traceEvents"]
operators = [event for event in trace if event["ph"] == "X" and event.get("cat") == "cpu_op"]
operators.sort(key=lambda event: (event["ts"], -event["dur"]))
print(f"{len(operators):,} operators, {path.stat().st_size / 1e6:.1f} MB; one of them:")
print({key: operators[100][key] for key in ("name", "ph", "cat", "ts", "dur")})

# %% [markdown]
# Start `ts` and duration `dur` are in microseconds. Events of one thread are nested like the calls they come from, so
# durations add up to more than the step took; an event's *self time* leaves out the calls directly within it.
# **Look for** the pattern that repeats with each layer, and count the products among its calls.

# %% tags=["hide-input"]
# @title Figure: one decode step


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
nested = list(zip(events, depths(events), strict=True))
draws = [event["ts"] for event, depth in nested if depth == 0 and event["name"] == "aten::argmax"]  # one ends each step
begin, end = min(pairwise(draws), key=lambda step: step[1] - step[0])
LEVELS = 3  # what is deeper makes room for results, and is too short to see
window = [(event, depth) for event, depth in nested if begin <= event["ts"] < end and depth < LEVELS]
families = {"linear": BLUE, "matmul": SKY, "rms_norm": GREEN, "softmax": ORANGE, "index": PURPLE}
fig, ax = plt.subplots(figsize=(11, 2.4))
for event, depth in window:
    color = next((color for part_, color in families.items() if part_ in event["name"]), "#BBBBBB")
    ax.broken_barh([(event["ts"] - begin, event["dur"])], (-depth, 0.86), color=color)
for name, color in (families | {"other": "#BBBBBB"}).items():
    ax.bar(0, 0, color=color, label=name)
norms = [event["ts"] - begin for event, depth in window if depth == 0 and "rms_norm" in event["name"]]
for number, start in enumerate(norms[::2], 1):  # a layer has two
    ax.axvline(start, color=BLACK, linestyle=":", linewidth=1)
    ax.text(start, 1, f" layer {number}" if 2 * number < len(norms) else " logits", va="bottom", fontsize=9)
ax.set(xlim=(0, end - begin), xlabel="µs, from one draw of a token to the next", ylabel="depth")
ax.set_title("One decode step: its operators, by depth", pad=18)
ax.set_yticks([0.43 - d for d in range(LEVELS)], range(LEVELS))
ax.legend(ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.28))
plt.show()

# %% [markdown]
# Six products per layer, in blue; the gray calls move or add a few numbers, and each has its price. Before layer 1 the
# step stores the last token and its log-prob, and prepares positions, angles and mask.
#
# ### How busy was the GPU?
#
# A GPU's trace also has a row of kernels. The *busy fraction* is the time during which **at least one** of them ran,
# over the wall time. Kernels in different *streams*, the GPU's queues, can overlap, so a sum of durations hides idle
# time. What counts is their **union**, in black below.

# %% tags=["hide-input"]
# @title Figure: overlap counts once
from rlcourse.measure.profiling import covered

spans = [(0.0, 3.0), (2.0, 5.0), (2.5, 4.0), (7.0, 9.0), (9.0, 10.0)]  # start and end, in µs
fig, ax = plt.subplots(figsize=(8, 2.2))
for place, (start, stop) in enumerate(spans):
    ax.broken_barh([(start, stop - start)], (2.2 - place % 3, 0.7), color=(BLUE, ORANGE, GREEN)[place % 3])
for start, stop in ((0, 5), (7, 10)):
    ax.broken_barh([(start, stop - start)], (-1, 0.7), color=BLACK)
ax.set_yticks([2.5, 1.5, 0.5, -0.65], ["stream 1", "stream 2", "stream 3", "busy"])
summed = sum(b - a for a, b in spans)
ax.set(xlim=(0, 12), xlabel="µs", title=f"{summed:g} µs of kernels, {covered(spans):g} of 12 µs busy")
plt.show()

# %% [markdown]
# Here's one decode step of `generate` with 16 rows on the H200, three ways: with its usual *dynamic* cache, which grows
# with each token; with a static cache; with a static cache and compiled. **Look for** the launches.

# %% tags=["hide-input"]
# @title Table: three decode steps
WAYS = {
    "hf-dynamic": "dynamic cache",
    "hf-static": "static cache",
    "hf-static-compiled": "static cache, compiled",
}
lines = ["| way | ms per step | kernels | launches |", "| --- | ---: | ---: | ---: |"]
for name in WAYS:
    row = RUNGS[name, 16]
    cells = f"{row['ms_per_step']:.2f} | {row['kernels_a_step']:,.0f} | {row['launches_a_step']:,.0f}"
    lines.append(f"| {WAYS[name]} | {cells} |")
display(Markdown("\n".join([*lines, "", provenance(decode)])))
eager, static, fused = (RUNGS[name, 16] for name in ("hf-dynamic", "hf-static", "hf-static-compiled"))

# %% [markdown]
# That's part of the answer to section 2. A static cache alone adds launches; compiling the step leaves {{
# fused["launches_a_step"]:.0f }} of {{ static["launches_a_step"]:,.0f }}. {{ assert eager["launches_a_step"] <
# static["launches_a_step"] > 10 * fused["launches_a_step"] and static["ms_per_step"] > eager["ms_per_step"] >
# fused["ms_per_step"] }} Lesson 07 shows how. Be careful with the busy fraction, though:
#
# - **A low one** says that the GPU waits, but not for what. Usually it's the host. It may also be a copy, or a line
#   that asks for a number with `.item()`.
# - **A high one** says little. Each kernel may be waiting for memory, or using a fraction of the chip.
# - **It's only as good as its window.** If you include the prefill, you haven't measured a decode step. `nvidia-smi`'s
#   *GPU-Util* averages over all phases.
#
# ### Two traces of a GPU
#
# What does a waiting GPU look like? Two traces of a few decode steps of 16 rows on the H200 are in
# `data/traces/nvidia-h200`, ready for Perfetto. `hf-static-breaks.json.gz` is `generate` with a kernel like the one in
# our mystery plugged in. `graph.json.gz` is this package's step, captured as one *CUDA graph*, which replays many
# launches with one call (lesson 07). Here are 1.5 ms of each. **Look for** the white in the GPU's lanes.

# %% tags=["hide-input"]
# @title Figure: two traces on one time axis
from rlcourse.measure.traces import launches, on_gpu, read_trace, trace_path

traced = load_record("trace", "NVIDIA H200")
STEP = {row["variant"]: row for row in traced["results"] if row["part"] == "step"}
TRACED = {"hf-static-breaks": "`generate` with that kernel", "graph": "this package, a CUDA graph"}
FROM_US = {"hf-static-breaks": 8000, "graph": 0}  # into the step: among its layers
fig, axes = plt.subplots(2, 1, figsize=(10, 3.8), sharex=True, layout="constrained")
for ax, (variant, name) in zip(axes, TRACED.items(), strict=True):
    events, begin = (
        read_trace(trace_path(variant, "NVIDIA H200")),
        STEP[variant]["kept_steps_from_us"] + FROM_US[variant],
    )
    parts = {"launch": [(event["ts"], event["dur"]) for event in launches(events)], "kernel": [], "attention": []}
    until = 0.0
    for event in on_gpu(events):  # of kernels that overlap, the second is drawn from where the first ends
        start, until = max(event["ts"], until), max(event["ts"] + event["dur"], until)
        parts["attention" if "attention" in event["name"] else "kernel"].append((start, until - start))
    for (label, spans), lane, color in zip(parts.items(), (1, 0, 0), (VERMILION, BLUE, GREEN), strict=True):
        spans = [((start - begin) / 1e3, us / 1e3) for start, us in spans]
        ax.broken_barh(spans, (lane - 0.35, 0.7), color=color, linewidth=0, label=label)
    ax.set_yticks([0, 1], ["GPU runs", "host launches"])
    ax.set(title=name.replace("`", ""), xlim=(0, 1.5), ylim=(-0.5, 1.5))
axes[-1].set_xlabel(f"ms, {provenance(traced)}")
axes[0].legend(ncols=3, loc="lower right", bbox_to_anchor=(1, 1))
plt.show()

# %% tags=["hide-input"]
# @title Table: where the two steps go
lines = ["| | calls per step | share of the step |", "| --- | ---: | ---: |"]
gap = {}
for variant, name in TRACED.items():
    lines.append(f"| **{name}** | | |")
    parts = [row for row in traced["results"] if row["variant"] == variant and row["part"] != "step"]
    gap[variant], attention = parts[-1]["share"], next(row for row in parts if "attention" in row["part"])
    named = [row for place, row in enumerate(parts[:-1]) if place < 3 or row is attention]
    rest = [row for row in parts[:-1] if row not in named]
    for row in named:
        lines.append(f"| `{row['part']}` | {row['calls_a_step']:,.0f} | {row['share']:.1%} |")
    calls, share = (sum(row[key] for row in rest) for key in ("calls_a_step", "share"))
    lines.append(f"| all other kernels | {calls:,.0f} | {share:.1%} |")
    lines.append(f"| no kernel runs | | {gap[variant]:.1%} |")
display(Markdown("\n".join([*lines, "", provenance(traced)])))

# %% [markdown]
# In the upper trace each kernel comes when the host gets round to it, and for {{ 100 * gap["hf-static-breaks"]:.0f }}%
# of the step none runs. In the lower one they're back to back, and none runs for {{ 100 * gap["graph"]:.0f }}%. {{
# assert gap["hf-static-breaks"] > 0.8 and gap["graph"] < 0.2 }} A faster kernel makes one line thinner. It does nothing
# about the white.<br><small>`nvjet…` are NVIDIA's matrix products; our `add_kernel` is one that also adds the residual.
# Shares are of a step timed without the profiler.</small>
#
# Neither number says how fast the step **could** be. For that we need a yardstick independent of any program.
#
# ## 4 · The floor
#
# To sample one token for each of $N$ rows, a model must read all its weights, and the keys and values of each row's
# text so far. Bytes over the machine's bandwidth is a time that no program beats: the *floor*. To count the bytes you
# need nothing but the config:
#
# - **layers**: all their weights, read once, whatever $N$ is. That's the whole point of a batch;
# - **head**, which gives the logits: `vocabulary × hidden`, read once;
# - **cache**: in each row and layer, the keys and values of all tokens so far are read, and one token's are written: $N
#   \times (\text{tokens} + 1) \times \text{layers} \times 2 \times \text{kv heads} \times \text{head dim}$ numbers.

# %%
from rlcourse.measure.roofline import decode_step
from rlcourse.measure.shapes import QWEN25, model_shape

small, qwen = model_shape("embedded"), model_shape("Qwen/Qwen2.5-0.5B")
for name, shape, size in (("embedded, float32", small, 4), ("Qwen2.5-0.5B, bfloat16", qwen, 2)):
    for rows, context in ((1, 64), (64, 64), (64, 4096)):
        work = decode_step(shape, rows, context, size)
        cache = size * rows * (context + 1) * shape.layers * 2 * shape.kv_heads * shape.head_dim
        assert cache == work.bytes["keys and values"]
        parts = ", ".join(f"{part} {n / 1e6:,.1f}" for part, n in work.bytes.items())
        print(f"{name:22} {rows:2} rows of {context:4} tokens: {parts} MB")

# %% [markdown]
# From 1 row to 64 only the cache grows. With long texts it's larger than the model, and rows are no longer free.
#
# How fast do bytes move? Don't ask the data sheet. Copy a large piece of memory, and count each byte twice, read and
# written. For FLOP/s, multiply two large matrices. A step must do both, so its floor is the **longer** of the two
# times.

# %%
from rlcourse.measure.roofline import measure_machine

machine = measure_machine(cpu)
print(f"copy {machine.bytes_per_s / 1e9:.1f} GB/s, matrix products {machine.flops_per_s / 1e9:.0f} GFLOP/s")
for rows in (1, 16, 128):
    work = decode_step(small, rows, 64, 4)
    of_bytes, of_flops = work.total_bytes / machine.bytes_per_s, work.total_flops / machine.flops_per_s
    print(f"{rows:4} rows: memory {1e6 * of_bytes:5.0f} µs, compute {1e6 * of_flops:5.0f} µs", end="; ")
    print(f"floor {1e6 * machine.floor_seconds(work):5.0f} µs")

# %% [markdown]
# Stop: is that a floor? "Large" meant far larger than the processor's caches. But the embedded model is a few
# megabytes, and may never leave them. So measure the rate at **that** size as well. **Look for** how far the curve is
# above the dashed line where it crosses the green one.

# %% tags=["hide-input"]
# @title Figure: the rate of a copy by its size
sizes = [2**i for i in range(14, pick(26, 28))]  # bytes of the source and the target together
rates = []
for size in sizes:
    source = torch.zeros(size // 2, dtype=torch.uint8)
    target = torch.empty_like(source)
    times = max(1, 2**24 // size)  # small copies many times, so that there is something to measure
    seconds = min(median_seconds(lambda: [target.copy_(source) for _ in range(times)], cpu, 3) for _ in range(3))  # noqa: B023
    rates.append(size * times / seconds)
model_bytes = decode_step(small, 1, 0, 4).total_bytes
near = min(range(len(sizes)), key=lambda i: abs(sizes[i] - model_bytes))
cached = dataclasses.replace(machine, bytes_per_s=max(rates[near], machine.bytes_per_s))
fig, ax = plt.subplots(figsize=(7.5, 3.2), layout="constrained")
ax.plot([s / 1e6 for s in sizes], [r / 1e9 for r in rates], color=BLUE, marker="o")
ax.axhline(machine.bytes_per_s / 1e9, color=VERMILION, linestyle="--", label="large copy: main memory")
ax.axvline(model_bytes / 1e6, color=GREEN, linestyle=":", label="weights of the embedded model")
ax.set(
    xscale="log", xlabel="MB read and written", ylabel="GB/s", title="The rate of a copy by its size", ylim=(0, None)
)
ax.set_xticks((0.1, 1, 10, 100), ("0.1", "1", "10", "100"))
ax.legend(loc="best")
plt.show()

# %% [markdown]
# At the model's size the rate is {{ cached.bytes_per_s / machine.bytes_per_s:.1f }} times that of main memory, so the
# floor uses it. (The smallest copies pay for calls; a dip after them is the price of a second thread.) On a GPU there's
# no such doubt: a real model is far larger than the L2 cache.
#
# ### Predict, then measure
#
# The floor is the prediction. The measurement is section 3's, for more row counts. **Look for** which of the other two
# the blue line follows as rows are added.

# %%
context = len(prompts[0]) + (FEW + MORE) / 2  # the mean over the steps that are left in the difference
measured = decode_s_of

# %% tags=["hide-input"]
# @title Figure: a decode step and its floor
grid = [2**i for i in range(9)]
works = [decode_step(small, rows, context, 4) for rows in grid]
fig, ax = plt.subplots(figsize=(7, 3.6))
ax.plot(grid, [1e3 * w.total_bytes / cached.bytes_per_s for w in works], color=GREEN, linestyle="-.", label="memory")
ax.plot(grid, [1e3 * w.total_flops / cached.flops_per_s for w in works], color=ORANGE, linestyle="--", label="compute")
ax.plot(list(measured), [1e3 * s for s in measured.values()], color=BLUE, marker="o", label="measured")
ax.set(xscale="log", yscale="log", xlabel="rows", ylabel="ms per step", title="The floor is the higher of the two")
ax.set_xticks(grid, grid)
ax.minorticks_off()
ax.legend()
plt.show()
least, most = min(measured), max(measured)
above = {rows: s / cached.floor_seconds(decode_step(small, rows, context, 4)) for rows, s in measured.items()}

# %% [markdown]
# On the left the blue line follows neither: with one row the step takes {{ above[least]:.0f }} times its floor, section
# 3's price of calling. On the right the same calls do more work, and it bends towards compute: {{ most }} rows take {{
# above[most]:.1f }} times their floor. {{ assert above[most] < above[least] }}
#
# **Explore** the bytes of a step on any machine. Where does the cache overtake the weights, and how far does a larger
# model move that point?

# %% tags=["hide-input"]
# @title Explorer: what a decode step moves
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
    ax.set(xscale="log", xlabel="rows", ylabel="ms per step, at least", xlim=(1, 256))
    first = f"{model}, {context} tokens per row, {gb_per_s} GB/s"
    ax.set_title(f"{first}\n{rows} rows: {1e3 * chosen:.3g} ms, {rows / chosen:,.0f} tokens/s")
    ax.legend(loc="upper left")


explorer(
    draw_floor,
    static=[
        {"model": "Qwen2.5-0.5B", "rows": 64, "context": 256, "gb_per_s": 4000},
        {"model": "Qwen2.5-0.5B", "rows": 64, "context": 2048, "gb_per_s": 4000},
        {"model": "Qwen2.5-7B", "rows": 64, "context": 2048, "gb_per_s": 4000},
    ],
    model=list(SHAPES),
    rows=(64, 1, 256, 1),
    context=(256, 16, 8192, 16),
    gb_per_s=(4000, 10, 8000, 10),
)

# %% [markdown]
# ## 5 · Decode and prefill
#
# Decoding reads all weights to write one token per row. What if the tokens were already there? Send the **same tokens**
# through the **same weights**, one by one over a cache (*decode*) or all in one pass (*prefill*).

# %%
decoder = engine.decoder
decoder.sync()
COUNT = pick(24, 128)
ids = torch.randint(5, small.vocabulary, (1, COUNT))


@torch.no_grad()
def at_once() -> torch.Tensor:
    """Logits after all tokens, from one pass."""
    return decoder.prefill(ids, torch.tensor([COUNT]), decoder.new_cache(1, COUNT))


@torch.no_grad()
def one_by_one() -> torch.Tensor:
    """The same, a token at a time: it attends to those before it through the cache."""
    cache = decoder.new_cache(1, COUNT)
    for t in range(COUNT):
        logits = decoder.decode(ids[:, t], torch.tensor([t]), cache, t + 1)
    return logits


assert torch.allclose(at_once(), one_by_one(), atol=1e-3)

# %% tags=["hide-input"]
# @title Your bet
prefill_bet = bet(f"{COUNT} tokens, one row: how many times as fast is one pass?", (1, 200, 1), "times")

# %%
decode_s, prefill_s = (median_seconds(run, cpu, pick(3, 7)) for run in (one_by_one, at_once))
prefill_bet.result(round(decode_s / prefill_s))
print(f"one by one {1e3 * decode_s:.1f} ms, at once {1e3 * prefill_s:.2f} ms")

# %% [markdown]
# One pass makes its calls once and reads the weights once. That's the asymmetry at the heart of RL. {{ assert decode_s
# > 4 * prefill_s }} When you **write** a text, tokens come one after another, since each depends on those before it.
# When you **learn** from it, or read a prompt, they're all there. A prompt that eight answers share is prefilled once,
# for all eight. And the update is a prefill of finished texts, followed by a backward pass, so each weight it reads
# serves thousands of tokens:

# %%
from rlcourse.collect import collect

rollout = collect(policy, engine, task, order, config)[0].rollout
AT_ONCE = 64  # rows of a micro-batch
passes = -(-config.rows // AT_ONCE)
print(f"to write {int(rollout.completion_lengths.sum()):,} tokens, all weights were read", end=" ")
print(f"{int(rollout.completion_lengths.max())} times; to learn from them about {3 * passes} times:")
print(f"once forward and twice backward for each of {passes} micro-batches")

# %% [markdown]
# *Arithmetic intensity* is FLOP per byte: how much a program computes with each byte it reads or writes. A machine has
# one of its own, FLOP/s over bytes per second, called the *ridge*. If nothing else holds a program up, it's
# *memory-bound* below the ridge and *compute-bound* above it. Draw both limits and you get a roof (Williams et al.
# 2009). **Look for** where decoding and the update are, and for the two ways up: right along the slope, or straight up
# to the roof.

# %% tags=["hide-input"]
# @title Figure: the roofline of the H200
from rlcourse.measure import roofline

peak = max(row["peak_tflops"] for row in updates["results"])
gpu = roofline.Machine("H200", "bfloat16", 1e9 * decode["setup"]["copy_gb_per_s"], 1e12 * peak)
points = []
for rows in (64, 256):
    row = RUNGS[GRAPH, rows]
    work = decode_step(qwen, rows, row["prompt_tokens"] + row["new_tokens"] / 2, 2)
    points.append((f"decode, {rows} rows", work, row["ms_per_step"] / 1e3))
row = updates["results"][-1]
learned = roofline.update(qwen, row["rows"], row["tokens"] // row["rows"], updates["setup"]["new_tokens"])
points.append((f"update, {row['rows']} rows", learned, row["update_s"]))
fig, ax = plt.subplots(figsize=(7.5, 4.2))
draw_roofline(ax, gpu, points)
ax.set(title=f"Qwen2.5-0.5B's shape, {provenance(decode)}", ylabel="TFLOP/s", yticks=[2e4, 5e4, 1e5, 2e5, 5e5, 1e6])
ax.yaxis.set_major_formatter(lambda value, _: f"{value / 1e3:g}")
ax.yaxis.minorticks_off()
plt.show()
intensity = {"decode": points[0][1].intensity, "update": learned.intensity}

# %% [markdown]
# Decoding 64 rows does {{ intensity["decode"]:.0f }} FLOP per byte, the update {{ intensity["update"]:,.0f }}, and the
# ridge lies at {{ gpu.ridge:.0f }}. {{ assert intensity["decode"] < gpu.ridge < intensity["update"] }} The update runs
# at {{ row["tflops"]:.0f }} of the {{ peak:.0f }} TFLOP/s that a large matrix product reaches there. Decoding can go
# both ways: up, by waiting less, or right, with more rows to share each weight it reads.
#
# ## 6 · Three kinds of slow
#
# | | host-bound | memory-bound | compute-bound |
# | --- | --- | --- | --- |
# | waits for | the next call | memory | arithmetic |
# | kernels in a trace | short, with gaps between | back to back | back to back, few and large |
# | twice the rows | hardly any more time | what the caches add | twice the time |
# | in the roofline | far below the roof | near the slope | near the flat part |
# | what helps | fusing, a CUDA graph, more rows | 8-bit weights, grouped heads, more rows | bfloat16, less padding |
#
# Each kind has its own cure: a faster attention kernel does nothing for a step that waits for Python. The line about
# rows needs no tool, so predict with it:

# %% tags=["hide-input"]
# @title Your bets
more_rows, (small_update, large_update) = RUNGS["hf-dynamic", 64], updates["results"]
rows_bet = bet(
    f"`generate`, dynamic cache: 16 rows take {eager['ms_per_step']:.0f} ms per step. And 64 rows?",
    (1, 150, 1),
    "ms",
)
answers_bet = bet(
    f"The update of 64 answers takes {1e3 * large_update['update_s']:.0f} ms. How much of that do 16 answers take?",
    (1, 100, 1),
    "%",
)

# %% tags=["hide-input"]
# @title The answers
rows_bet.result(round(more_rows["ms_per_step"]))
answers_bet.result(round(100 * small_update["update_s"] / large_update["update_s"]))

# %% [markdown]
# The decode step of 16 rows takes {{ eager["ms_per_step"] / eager["floor_ms"]:.0f }} times its floor. {{ assert
# eager["ms_per_step"] > 20 * eager["floor_ms"] }} It waits for its launches, and 64 rows have only {{
# more_rows["launches_a_step"] / eager["launches_a_step"]:.1f }} times as many. So **it's host-bound, and rows are
# free**. (A small difference either way is noise: these are two hosts with the same GPU.) {{ assert
# more_rows["ms_per_step"] < 2 * eager["ms_per_step"] }} The update is close to compute-bound. Pure compute would take
# 25% for a quarter of the answers; we measured {{ 100 * small_update["update_s"] / large_update["update_s"]:.0f }}%,
# partly because the optimizer goes through all weights however many answers there are. {{ assert [r["rows"] for r in
# (small_update, large_update)] == [16, 64] and 0.25 < small_update["update_s"] / large_update["update_s"] < 0.5 }}
#
# So work in this order: phases and Amdahl, the trace, the floor. Stop near the floor, or when Amdahl says the rest
# doesn't matter.
#
# ## Check yourself
#
# 1. A rollout is 80% of a step. A colleague makes it 4 times as fast. How many times as fast is the step? And with a
#    rollout that takes no time?
#
# <details><summary>Answer</summary>
# The new time is 0.2 + 0.8 / 4 = 0.4, so 2.5 times as fast. At most: 1 / 0.2 = 5 times.
# </details>
#
# 2. You time `model(x)` on a GPU with `time.perf_counter()` and find 2 ms, then 40 ms for `print(loss.item())`. Which
#    of them is slow?
#
# <details><summary>Answer</summary>
# The model. The first line only asked for the work; `.item()` waits for all of it. Synchronise before you read a clock.
# </details>
#
# 3. `nvidia-smi` shows 98% during your rollout. Is there anything left to gain?
#
# <details><summary>Answer</summary>
# Maybe nearly everything. 98% says that nearly always some kernel ran, not that it did much. Compare the step with its
# floor.
# </details>
#
# ## Exercises
#
# [exercises/06_where_time_goes.ipynb](../exercises/06_where_time_goes.ipynb): fix a busy fraction of 140%, find out
# how many rows are free, and spend two weeks of work well. Then go on to [07 · From generate to one CUDA graph per
# step](07_static_cache.ipynb).
#
# ## Further reading
#
# - Amdahl 1967, *Validity of the Single Processor Approach to Achieving Large Scale Computing Capabilities*, AFIPS.
# - Williams, Waterman and Patterson 2009, *Roofline: An Insightful Visual Performance Model for Multicore
#   Architectures*, Communications of the ACM 52(4).
# - Pope et al. 2022, *Efficiently Scaling Transformer Inference*, arXiv:2211.05102: bytes and operations of decoding.
# - Horace He 2022, *Making Deep Learning Go Brrrr From First Principles*: the three kinds of slow, with PyTorch.
