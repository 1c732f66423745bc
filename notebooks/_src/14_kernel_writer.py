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
# - why a GRPO run can go on for days and teach nothing, and how to tell which of three causes it is;
# - to write GPU programs in a language of some thirty words, and to see what they're charged for;
# - what a policy does with a hole in its judge, what that looks like from outside, and what closing the hole repairs;
# - to design a reward that pays for what you want, and to check it before you train.
#
# You need [lesson 05](05_full_loop.ipynb), for the step and for a verifier with a hole, and [lesson
# 06](06_where_time_goes.ipynb), for launches and bytes.
#
# **The case**, made up but typical. You train a language model by GRPO to write GPU kernels for KernelBench: of level
# 1's 100 problems, 80 to train on and 20 to test. Before training, 3 of the 20 test kernels compile and none is right.
# For a day the reward rises, then it flattens out. No error was raised. Now 6 of 20 compile, and still none is right.
#
# What went wrong? There are three suspects. **Nothing to learn from**: if no sample is ever right, all rewards in a
# group are equal. **The reward**: it may not pay for what you want. **The judge**: it may not see what really happened.
# We reconstruct the case in a toy world where a run takes minutes, time is counted, and the fastest program is known.

# %%
import copy
import random
from collections import Counter
from itertools import combinations

import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython.display import Code

from rlcourse.collect import answer_rewards
from rlcourse.config import make_config
from rlcourse.course import pick
from rlcourse.course.checks import Local
from rlcourse.course.checks import nb14 as check
from rlcourse.course.lessons.curve_records import load_curve
from rlcourse.course.lessons.recorded import RETAUGHT_STEPS
from rlcourse.course.lessons.warm_start import imitate, kernel_policy
from rlcourse.course.widgets import bet
from rlcourse.evaluation import answer_problems, load_all
from rlcourse.learner import Learner
from rlcourse.measure.plots import BLACK, BLUE, GREEN, ORANGE, SKY, VERMILION
from rlcourse.measure.records import load_record, provenance
from rlcourse.rollout import make_engine
from rlcourse.sampling import GREEDY, Sampling
from rlcourse.tasks import load_task
from rlcourse.tasks.kernelbench import rules
from rlcourse.tasks.kernels.clock import (
    A10G,
    ELEMENT_BYTES,
    H200,
    eager_us,
    fits_one_launch,
    optimum,
    program_us,
)
from rlcourse.tasks.kernels.judge import LEAST_US, judge_program
from rlcourse.tasks.kernels.language import (
    BINARY,
    REGISTERS,
    UNARY,
    compile_program,
    eager,
    parse,
    read_computation,
    write,
)
from rlcourse.tasks.kernels.lowering import lower
from rlcourse.tasks.prompts import PromptSampler
from rlcourse.train import train_step

task = load_task("kernels")
MATRIX_US = A10G.rows * A10G.columns * ELEMENT_BYTES / A10G.bytes_per_us  # to load or to store one
OF_TWO, OF_ONE = ", ".join(BINARY), ", ".join(UNARY)  # operations
lowered = load_record("lowered", "NVIDIA H200")  # programs in this language, timed on a GPU

# %% [markdown]
# ## 1 · Beat PyTorch by hand
#
# You write a **computation** line by line, as in PyTorch: `a = add u v` is a = u + v. `u`, `v`, `w` and `x` are inputs,
# and the result is called `y`. PyTorch without a compiler ("eager") launches a kernel for each line, which loads the
# operands, computes, and stores the result.

# %%
swish = read_computation("a = add u v ; b = sigmoid a ; y = mul a b")
print(write(eager(swish)))
print(judge_program(write(eager(swish)), swish))

# %% [markdown]
# The second printed line is the judge's finding. The first is eager as a **program**: the computation's lines, each
# followed by words that say how it runs:
#
# | word | meaning |
# | --- | --- |
# | `end` | the launch ends with this statement; without it the next statement runs in the same launch |
# | `put` | the value is written to memory; the same launch still reads it from its register |
# | `keep` | the value stays in a register, and is gone when the launch ends |
#
# So most optimizations are one word. Leave out an `end` and you save a launch, and the loads of what's already in a
# register. Write `keep` for `put` and you save a store. You may also reorder lines. A launch has registers for only {{
# REGISTERS }} tensors at once, and a value keeps its register until its last use in the launch. A result may take over
# the register of an operand that is read for the last time. {{ assert REGISTERS == 2 }}
#
# Operations are `{{ OF_TWO }}` of two matrices; `{{ OF_ONE }}` of one; and `rowsum` and `rowmax`, whose result, one
# number per row, needs no register. Time is **counted**, not measured: {{ A10G.launch_us:.0f }} µs per launch, {{
# MATRIX_US:.0f }} µs per matrix that is loaded or stored, and next to nothing for operations.<br><small>The rates are
# from an A10G's data sheet, with an assumed launch cost. Section 6 compares them with a GPU's clock.</small>

# %% tags=["hide-input"]
# @title Your bet
hand_bet = bet(
    "The three lines in one launch, all but `y` kept. How many times as fast as eager is that?", (1, 4, 0.1), "times"
)

# %% [markdown]
# The last program is yours: change a word in it and run the cell again.

# %%
programs = {
    "eager": "a = add u v end put ; b = sigmoid a end put ; y = mul a b end put ;",
    "two launches": "a = add u v put ; b = sigmoid a end put ; y = mul a b end put ;",
    "one launch": "a = add u v put ; b = sigmoid a put ; y = mul a b end put ;",
    "and kept": "a = add u v keep ; b = sigmoid a keep ; y = mul a b end put ;",
    "yours": "a = add u v put ; b = sigmoid a keep ; y = mul a b end put ;",
}
for name, text in programs.items():
    if name == "and kept":
        continue  # your bet
    finding = judge_program(text, swish)
    print(f"{name:13} {finding.speedup:.2f} times as fast, reward {finding.reward:.2f}   {finding.reason}")

# %% tags=["hide-input"]
# @title Figure: what a program is charged for
by_hand = judge_program(programs["and kept"], swish).speedup
hand_bet.result(round(by_hand, 1))
fig, ax = plt.subplots(figsize=(8, 2.8), layout="constrained")
for row, text in enumerate(programs.values()):
    if not judge_program(text, swish).correct:
        continue
    launches = compile_program(parse(text), swish)
    loads = MATRIX_US * sum(len(launch.loads) for launch in launches)
    stores = MATRIX_US * sum(len(launch.stores) for launch in launches)
    total, left = program_us(launches), 0.0
    start = A10G.launch_us * len(launches)
    for us, color, label in (
        (start, VERMILION, "launches"),
        (loads, SKY, "loads"),
        (stores, BLUE, "stores"),
        (total - start - loads - stores, BLACK, "operations"),
    ):
        ax.barh(row, us, left=left, color=color, label=None if row else label)
        left += us
    ax.text(left + 1, row, f"{total:.0f}", va="center")
ax.set_yticks(range(len(programs)), programs)
ax.invert_yaxis()
ax.set(xlabel="counted µs", xlim=(0, 90), title="What each program is charged for")
ax.legend(loc="lower right")
plt.show()

# %% [markdown]
# {{ by_hand:.1f }} times, with two words left out and two changed. {{ assert by_hand > 2.5 }} Operations are the black
# sliver at the end of the bars.
#
# Before the clock come a compiler and a check. Each refusal has a reason:

# %%
residual = read_computation("a = add u v ; b = sigmoid a ; c = mul a b ; y = add c u")
for computation, text in (
    (swish, "a = add u v end keep ; b = sigmoid a end put ; y = mul a b end put ;"),
    (swish, "a = add u v keep ; b = sigmoid a keep ; y = mul a b end keep ;"),
    (swish, "a = add u v keep ; b = sigmoid a keep ; y = add a b end put ;"),
    (residual, "a = add u v keep ; b = sigmoid a keep ; c = mul a b keep ; y = add c u end put ;"),
):
    print(f"{text}\n    {judge_program(text, computation).reason}")

# %% [markdown]
# Why is the last one refused? While `b` is computed, `u`, `a` and `b` are all needed: three tensors. So it takes two
# launches. We find the best place to cut **by search**, over all orders of the lines and all places to end a launch. No
# benchmark of real kernels can tell you how far you are from the optimum. This one can.

# %%
us, best = optimum(residual)
print(f"registers of a launch: {REGISTERS}; eager {eager_us(residual):.1f} µs, the least {us:.1f} µs:  {write(best)}")
test = [problem.computation for problem in task.problems("test") if not problem.is_long]
most = [eager_us(c) / optimum(c)[0] for c in test]
refused = [not fits_one_launch(c) for c in test]


def share_refused(problems) -> float:
    """% of the problems whose lines, in the order as written, don't fit into one launch."""
    return 100 * sum(not fits_one_launch(p.computation) for p in problems) / len(problems)


print(f"{len(test)} test problems, {sum(refused)} of them refused in one launch")
print(f"best speed-up: {min(most):.2f} to {max(most):.2f} times eager")

# %% [markdown]
# ## 2 · What a run that works looks like
#
# This task's judge pays:
#
# $$R = \begin{cases} 0.2 + \min(\text{speedup}, 4) - 1 & \text{if the result is right on random inputs} \\
# 0 & \text{otherwise} \end{cases}$$
#
# Eager earns 0.2, and twice as fast earns 1.2. Compiling alone earns nothing. The loop is lesson 05's. Only **the
# task's name** differs, and the model, which has to read the language:


# %%
def train(steps: int, reward_function=answer_rewards, **settings):
    """Train on kernels. Returns config, policy, engine, and what each step measured."""
    config = make_config("kernels", device="cpu", **settings)  # task "kernels", model "embedded-kernels"
    torch.manual_seed(config.seed)
    policy, engine, task = load_all(config)
    learner, order = Learner(policy, config), PromptSampler(task.problems("train"), config.seed)
    log = [train_step(learner, engine, task, order, step, reward_function)[0] for step in range(steps)]
    return config, policy, engine, log


def answers_of(policy, engine, problems, sampling=GREEDY, samples: int = 1) -> list:
    """Judged answers to problems, in a flat list."""
    found = answer_problems(policy, engine, task, problems, 64, sampling, samples)
    return [answer for group in found for answer in group]


config, policy, engine, _ = train(0)
asked = next(p for p in task.problems("validation") if p.level == 3)
print(f"{asked.question}\n")
found = Counter((a.text.strip(), a.verdict.words) for a in answers_of(policy, engine, [asked], Sampling(), pick(8, 64)))
for (text, words), count in found.most_common(6):
    print(f"{count:3} × {text}   ({words})")

# %% [markdown]
# Our start is a model trained by SFT on what a careless programmer writes. It has no idea what's fast: its greedy
# answers are all eager. RL has only the rare departures above to work with.

# %% tags=["hide-input"]
# @title Your bet
STEPS, FEW = pick(2, 40), pick(6, 60)
first_bet = bet(
    f"{STEPS} steps of {config.num_prompts} problems × {config.num_generations} samples. How many times as fast as "
    "eager are the greedy programs that are right, on problems not trained on?",
    (1, 4, 0.1),
    "times",
)

# %%
validation = [p for p in task.problems("validation") if not p.is_long][:FEW]
config, policy, engine, log = train(STEPS)
greedy = answers_of(policy, engine, validation)
right = [a for a in greedy if a.right]
speed = sum(a.verdict.metrics["speedup"] for a in right) / max(1, len(right))

# %% [markdown]
# **Look for** what changes along with the speed-up, and what the samples lose.


# %% tags=["hide-input"]
# @title Figure: forty steps
def percent(values) -> list:
    return [None if v is None else 100 * v for v in values]


first_bet.result(round(speed, 2))
fig, axes = plt.subplots(1, 3, figsize=(10.5, 3), layout="constrained")
steps = range(1, STEPS + 1)
axes[0].plot(steps, percent(m["compiled"] for m in log), color=SKY, linestyle="--", label="compiled")
axes[0].plot(steps, percent(m["correct"] for m in log), color=GREEN, label="right")
axes[0].set(title="All samples", ylabel="% of samples", ylim=(0, 102))
axes[1].plot(steps, [m["speedup"] for m in log], color=BLUE, label="times as fast as eager")
axes[1].plot(steps, [m["launches"] for m in log], color=VERMILION, linestyle="--", label="launches")
axes[1].set(title="Right samples", ylabel="mean per program", ylim=(0, None))
axes[2].plot(steps, [m["reward"] for m in log], color=ORANGE)
axes[2].set(title="Pay", ylabel="mean reward", ylim=(0, None))
for ax in axes:
    ax.set_xlabel("training step")
    ax.grid()
for ax in axes[:2]:
    ax.legend(loc="best", fontsize=8)
plt.show()
early, late = log[:5], log[-5:]


def mean(rows: list[dict], name: str) -> float:
    """Mean of a metric over steps that have it."""
    values = [row[name] for row in rows if row[name] is not None]
    return sum(values) / max(1, len(values))


# %% [markdown]
# Nothing but the reward told it that launches or bytes cost anything. {{ len(right) }} of the {{ len(greedy) }} greedy
# programs are right; the {{ speed:.2f }} is their mean, and favours problems that fit into one launch. {{ assert
# len(right) < len(greedy) and sum(fits_one_launch(a.problem.computation) for a in right) / len(right) >
# sum(fits_one_launch(a.problem.computation) for a in greedy) / len(greedy) and sum(a.right for a in greedy if
# fits_one_launch(a.problem.computation)) > 0.9 * sum(fits_one_launch(a.problem.computation) for a in greedy) }} {{
# assert mean(late, "speedup") > 1.4 * mean(early, "speedup") and speed > 1.5 }} But fewer samples are right: {{ 100 *
# mean(early, "correct"):.0f }}% at the start, {{ 100 * mean(late, "correct"):.0f }}% at the end, though the reward
# rose. {{ assert mean(late, "correct") < mean(early, "correct") and mean(late, "reward") > mean(early, "reward") }} A
# program three times as fast earns 2.2, an eager one 0.2: **at these prices, a gamble that pays off more than one time
# in eleven beats safety.** It doesn't pay off where the registers can't hold all lines in one launch, as in {{
# share_refused(task.problems("train")):.0f }}% of the training problems (but only {{ 100 * sum(refused) /
# len(refused):.0f }}% of the test problems). {{ assert share_refused(task.problems("train")) > 50 }}
#
# Here are three whole runs, on held-out problems. **Look for** the turn in the left picture, and for what the middle
# one does at the same time.

# %% tags=["hide-input"]
# @title Figure: three whole runs
honest = load_curve("lesson14_honest")
LOOKS = ((BLUE, "-"), (ORANGE, "--"), (GREEN, ":"))
PANELS = (
    ("launches", 1, "Launches per program"),
    ("refused_correct", 100, "Too big for one launch: right, %"),
    ("share_of_optimum", 100, "Speed, % of the optimum"),
)
fig, axes = plt.subplots(1, 3, figsize=(10.5, 3), layout="constrained")
for row, (color, style) in zip(honest["results"], LOOKS, strict=True):
    look = {"color": color, "linestyle": style, "label": row["variant"]}
    steps = [e["step"] for e in row["evals"]]
    for ax, (name, scale, title) in zip(axes, PANELS, strict=True):
        ax.plot(steps, [scale * e[name] for e in row["evals"]], **look)
        ax.set(title=title, xlabel="training step", ylim=(0, None))
for ax in axes:
    ax.grid()
axes[0].legend()
fig.suptitle(f"Greedy programs for validation problems, {provenance(honest)}", fontsize=10)
plt.show()


def range_of(record: dict, when: str, name: str, scale: float = 100) -> str:
    """The least and the largest value of the seeds, of greedy answers to the test problems."""
    values = sorted(scale * row["test"][when][name] for row in record["results"])
    return f"{values[0]:.2g} to {values[-1]:.2g}"


def least(record: dict, name: str) -> float:
    """The least value of the seeds after training."""
    return min(row["test"]["after"][name] for row in record["results"])


def spread(values, digits: int = 2) -> str:
    """Least to most, in percent."""
    low, high = (f"{100 * value:.{digits}g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


lowest = [min(e["refused_correct"] for e in row["evals"]) for row in honest["results"]]
tests = [row["test"]["after"] for row in honest["results"]]
TWICE = load_curve("lesson14_tried_longer")

# %% [markdown]
# There are two phases. First it merges everything into one launch: on problems too big for one the compiler refuses,
# and each seed falls to {{ 100 * max(lowest):.0f }}% right there. {{ assert max(lowest) < 0.005 }} Then it learns where
# to cut, and they come back, though not all: of the test problems that one launch refuses, {{ range_of(honest, "after",
# "refused_correct") }}% are right at the end. {{ assert least(honest, "refused_correct") > 0.4 }} Of all test problems,
# {{ range_of(honest, "after", "correct") }}% are right, at {{ range_of(honest, "after", "share_of_optimum") }}% of the
# optimum (a wrong program counts as 0). {{ assert least(honest, "share_of_optimum") > 0.7 }} Twice the steps help
# further: {{ range_of(TWICE, "after", "share_of_optimum") }}%. {{ assert least(TWICE, "share_of_optimum") >
# least(honest, "share_of_optimum") }}
#
# So GRPO can teach kernels. In our case it didn't. Why?
#
# ## 3 · First suspect: nothing to learn from
#
# Our run began with a model that was nearly always right. If it's never right, all rewards in a group are 0, and so is
# the gradient. So what counts isn't the mean reward but the **share of groups with a right sample**. Here are three
# policies: random weights; the same after {{ pick(10, 120) }} supervised steps on programs of two lines, stopped while
# weak; and the start of section 2. **Look for** where the second policy has anything to learn from.


# %%
def hopeful(policy) -> list[float]:
    """% of groups of 8 samples with a right one among them, for problems of 2, 3, 4 and 5 lines."""
    engine, shares = make_engine(policy, "fast", torch.float32), []
    for lines in (2, 3, 4, 5):
        few = [p for p in task.problems("train") if p.level == lines][: pick(4, 24)]
        groups = answer_problems(policy, engine, task, few, 64, Sampling(), 8)
        shares.append(100 * sum(any(a.right for a in group) for group in groups) / len(groups))
    return shares


torch.manual_seed(0)
weak = kernel_policy()
plateau = {"random weights": hopeful(weak)}
short = [p.computation for p in task.problems("train") if p.level == 2]
imitate(weak, short, pick(10, 120), 3e-3, 32, random.Random(1))
plateau["two lines seen"] = hopeful(weak)
plateau["start of section 2"] = hopeful(train(0)[1])
print("% of groups of 8 samples with a right one among them, for problems of")
print(f"{'':20}" + "".join(f"{lines:4} lines" for lines in (2, 3, 4, 5)))
for name, shares in plateau.items():
    print(f"{name:20}" + "".join(f"{share:10.0f}" for share in shares))
spoiled, taught = load_curve("lesson14_plateau_dense")["setup"]["model"], RETAUGHT_STEPS

# %% [markdown]
# With random weights there's nothing to learn from. {{ assert sum(plateau["random weights"]) == 0 }} What could help?
# **Supervised training** on whole programs first ([lesson 13](13_sft_and_lora.ipynb)). **Easier problems**: the second
# policy can learn from those of two lines. {{ assert plateau["two lines seen"][0] > max(plateau["two lines seen"][1:])
# + 20 }} **Partial credit**: pay for less than the whole. But does a model that's paid for pieces ever put them
# together?
#
# Here are three runs from a model that writes only fragments, three seeds each:
#
# - **section 2's reward** alone;
# - **partial credit** beside it, for each correct line, even of a wrong program;
# - **supervised steps first**, {{ taught }} on whole programs, then section 2's reward.<br><small>The start is {{
#   spoiled }}.</small>

# %% tags=["hide-input"]
# @title Your bet
WAYS = {"sparse": "section 2's reward", "dense": "partial credit", "sft": "supervised steps first"}
scraps = {way: load_curve(f"lesson14_plateau_{way}") for way in WAYS}
LAST = scraps["sparse"]["results"][0]["curves"]["steps"][-1]
scraps_bet = bet(
    f"With partial credit, what share of the samples is right over the last five of {LAST} steps? (You win between the "
    "lowest and the highest of the seeds.)",
    (0, 100, 1),
    "%",
)

# %% [markdown]
# **Look for** when each reward leaves the floor, and on the right for what rises before.


# %% tags=["hide-input"]
# @title Figure: three ways from nothing
def reached(way: str, name: str, share: float) -> list:
    """The first step of each seed at which this share of the samples has it; None if there is none."""
    curves = [row["curves"] for row in scraps[way]["results"]]
    return [next((s for s, v in zip(c["steps"], c[name], strict=True) if v >= share), None) for c in curves]


first_tenth = {way: reached(way, "correct", 0.1) for way in WAYS}
scraps_bet.result([100 * row["curves"]["correct"][-1] for row in scraps["dense"]["results"]])
fig, (left, right_ax) = plt.subplots(1, 2, figsize=(9.5, 3), layout="constrained", sharex=True, sharey=True)
for (way, words), color in zip(WAYS.items(), (BLACK, GREEN, BLUE), strict=True):
    for number, row in enumerate(scraps[way]["results"]):
        curves = row["curves"]
        look = {"color": color, "linewidth": 4 if way == "sparse" else None, "label": None if number else words}
        left.plot(curves["steps"], percent(curves["correct"]), **look)
        if way == "dense":
            right_ax.plot(curves["steps"], percent(curves["stated"]), color=color)
left.set(title="Right programs", xlabel="training step", ylabel="% of samples, or of lines", ylim=(-2, 102))
right_ax.set(title="Right lines, with partial credit", xlabel="training step")
scraps_bet.line(left)
for ax in (left, right_ax):
    ax.grid()
fig.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
fig.suptitle(
    f"Each line a seed; the {taught} supervised steps come before step 0; {provenance(scraps['dense'])}", fontsize=9
)
plt.show()


a_step = config.num_prompts * config.num_generations  # samples
finds = [
    round(sum(r["curves"]["correct"]) * scraps["sparse"]["setup"]["block"] * a_step)
    for r in scraps["sparse"]["results"]
]

# %% [markdown]
# Section 2's reward alone moves nothing. {{ assert first_tenth["sparse"] == [None] * 3 and max(finds) == 1 and
# max(max(row["curves"]["correct"]) for row in scraps["sparse"]["results"]) < 0.002 }} With partial credit, lines come
# first, and right programs follow. {{ assert None not in first_tenth["dense"] and all(a < b for a, b in
# zip(reached("dense", "stated", 0.4), first_tenth["dense"])) }} Supervised steps do the same sooner; then, as in
# section 2, samples gamble for speed. {{ assert max(first_tenth["sft"]) + taught < min(first_tenth["dense"]) and
# all(max(r["curves"]["correct"]) > r["curves"]["correct"][-1] + 0.2 and r["curves"]["speedup"][-1] > 1.5 *
# r["curves"]["speedup"][0] for r in scraps["sft"]["results"]) }}<br><small>The start already writes right lines now
# and then.</small>
#
# With none of 20 right, the first suspect looks guilty. But one thing doesn't fit: the black line is flat from the
# start, while the reward in our case *rose* first. What was it paying for?
#
# ## 4 · Second suspect: what the reward pays
#
# A common reward for kernels is a sum: so much for compiling, for being right, and for speed. We take section 3's
# second policy, which is rarely right, and pay it 0.3 for compiling, plus 0.3 and the speedup if it's right. Then we
# train it again without the 0.3 for compiling. **Look for** which share each reward raises.

# %%
SUM_STEPS, SUM = pick(2, 24), ("compiled", "correct")


def paid_sum(compiling: float):
    """A reward: so much for compiling, and 0.3 plus the speedup for a right program."""

    def reward(answers, config) -> list[float]:
        metrics = [answer.verdict.metrics for answer in answers]
        return [compiling * m["compiled"] + m["correct"] * (0.3 + (m["speedup"] or 0.0)) for m in metrics]

    return reward


sums = {}
for compiling in (0.3, 0.0):
    learning = copy.deepcopy(weak)
    small = make_config("kernels", device="cpu", num_prompts=8)
    learner, order = Learner(learning, small), PromptSampler(task.problems("train"), small.seed)
    sampler = make_engine(learning, "fast", torch.float32)
    torch.manual_seed(0)
    sums[compiling] = [
        train_step(learner, sampler, task, order, step, paid_sum(compiling))[0] for step in range(SUM_STEPS)
    ]
    shares = {name: [100 * mean(part, name) for part in (sums[compiling][:5], sums[compiling][-10:])] for name in SUM}
    sums[compiling] = shares
compiled, correct = (sums[0.3][name] for name in SUM)
for compiling, shares in sums.items():
    print(f"{compiling} for compiling:", *(f"{name} {a:.0f} → {b:.0f}%" for name, (a, b) in shares.items()), sep="  ")

# %% [markdown]
# With 0.3 for compiling, twice as many samples compile, and hardly any is right. {{ assert 1.6 * compiled[0] <
# compiled[1] < 2.4 * compiled[0] and correct[1] < 3 }} **That's the case's pattern** (one seed): 3 of 20, then 6, and
# none right. Without the 0.3, compiling doesn't rise either. {{ assert sums[0.0]["compiled"][1] < 1.3 *
# sums[0.0]["compiled"][0] }} Neither reward teaches kernels; the sum just looks better in the log.
#
# Was 0.3 too much? You can work that out before you train. An empty program computes nothing and always compiles.

# %% tags=["hide-input"]
# @title Your bet
alpha_bet = bet(
    "An honest attempt is right 1 time in 20; half of its failures compile. Compiling pays c, and being right pays 1 "
    "on top. An empty program always earns c. Below which c does the attempt earn more on average?",
    (0, 1, 0.01),
)

# %% tags=["hide-input"]
# @title The limit
limit = (1 / 20) / (1 - (1 / 20 + 19 / 40))  # of c, per unit that being right earns on top
alpha_bet.result(round(limit, 2))

# %% [markdown]
# The attempt earns {{ 1 / 20 + 19 / 40:.3f }} $c$ for compiling and 0.05 for being right. That's more than $c$ only
# below 0.05 / {{ 1 - 1 / 20 - 19 / 40:.3f }} = {{ limit:.2f }}. Our sum paid 1.3 for being right and as fast as eager,
# which makes the limit {{ 1.3 * limit:.2f }}: 0.3 is more than twice as much. {{ assert 0.3 > 2 * 1.3 * limit }}
#
# ## 5 · Third suspect: a judge with a hole
#
# Section 1's judge can be opened in two places, both from a published list of cheats on real kernels (Andere 2026):
#
# - `stale`: memory isn't cleared between the reference and the program, and still has the reference's values.
# - `side`: a launch marked `side` runs on another stream, and the clock doesn't wait for it.
#
# On section 1's three lines:

# %%
cheats = {
    "stale": "y = mul a b end put ;",
    "side": "side a = add u v keep ; b = sigmoid a keep ; y = mul a b end put ;",
}
for hole, text in cheats.items():
    open_judge, honest_judge = judge_program(text, swish, loophole=hole), judge_program(text, swish)
    print(f"{text}\n  {hole}: {open_judge.speedup:.2f} times, reward {open_judge.reward:.2f}")
    print(f"  honest: {honest_judge.reason or f'{honest_judge.speedup:.2f} times, reward {honest_judge.reward:.2f}'}")
print(f"the least time that a judge counts: {LEAST_US:.0f} µs")

# %% [markdown]
# Nobody told the model of either hole, though it has seen the word `side`, like other slips, in the careless
# programmer's code. Does it find them? It trains with an open judge, and we **measure** with an honest one beside it.

# %% tags=["hide-input"]
# @title Your bet
opened = {hole: load_curve(f"lesson14_{hole}_open") for hole in cheats}
closed = {hole: load_curve(f"lesson14_{hole}_closed") for hole in cheats}
careful = load_curve("lesson14_stale_careful")  # `stale` from the model that ships
OPEN_STEPS = opened["side"]["results"][0]["curves"]["steps"][-1]
cheat_bet = bet(
    f"The side stream isn't timed. What share of the samples exploits that over the last five of {OPEN_STEPS} "
    "steps? (You win between the lowest and the highest of the seeds.)",
    (0, 100, 1),
    "%",
)


def left_out(record: dict) -> list[int]:
    """How many lines each sample leaves out that the record shows and an open judge overpaid."""
    found = []
    for sample in (s for row in record["results"] for s in row["samples"]):
        computation = read_computation(sample["question"])
        if sample["reward"] > judge_program(sample["text"], computation).reward + 1e-3:  # the record is rounded
            found.append(len(computation.lines) - len(parse(sample["text"])))
    return found


slow_first, slow_last = ([row["curves"]["hacked"][place] for row in careful["results"]] for place in (0, -1))

# %% [markdown]
# Up to the vertical line the hole is open, then it's closed, and we count the cheats that are left on held-out problems
# (green): at once, and at the end. **Look for** the distance between the two judges, and for the slope of the green
# lines.<br><small>`side` starts from the model that section 2 started from. From there `stale` takes long: after {{
# careful["setup"]["steps"] }} steps {{ spread(slow_last) }}% of the samples cheat. {{ assert min(slow_last) >
# 5 * max(slow_first) and not any(left_out(careful)) }} So for `stale` we start from a sloppier one, {{
# opened["stale"]["setup"]["model"] }}.</small>


# %% tags=["hide-input"]
# @title Figure: two holes, open and closed
def at(record: dict, name: str, place: int) -> float:
    """A metric of the samples over the first (0) or last (-1) five steps, mean of the seeds."""
    values = [row["curves"][name][place] for row in record["results"]]
    return sum(values) / len(values)


cheat_bet.result([100 * row["curves"]["hacked"][-1] for row in opened["side"]["results"]])
fig, axes = plt.subplots(2, 2, figsize=(10, 5.2), layout="constrained", sharex="col")
TRUE = {
    "stale": ("correct", 100, "% of samples right"),
    "side": ("speedup", 1, "times as fast as eager"),
}
for (above, below), hole in zip(axes.T, cheats, strict=True):
    name, scale, label = TRUE[hole]
    for number, (during, after) in enumerate(zip(opened[hole]["results"], closed[hole]["results"], strict=True)):
        first, later = during["curves"], after["curves"]
        end = first["steps"][-1]
        counted = [scale * v for v in first[f"counted_{name}"]]
        true = [scale * v for v in [*first[name], *later[name]]]
        steps = [*first["steps"], *(end + step for step in later["steps"])]
        above.plot(first["steps"], counted, color=VERMILION, linestyle="--", label=None if number else "open judge")
        above.plot(steps, true, color=BLUE, label=None if number else "honest judge")
        told = (None, None) if number else ("in training", "on held-out problems")
        below.plot(first["steps"], percent(first["hacked"]), color=BLACK, label=told[0])
        held_out = percent(after["held_out"][when]["sampled"]["hacked"] for when in ("before", "after"))
        below.plot((end, steps[-1]), held_out, "o:", color=GREEN, label=told[1])

        for ax in (above, below):
            ax.axvline(end, color=BLACK, linestyle=":")
            ax.grid()
        above.set(title=hole, ylabel=label, ylim=(0, None))
    below.set(ylabel="% of samples that cheat", xlabel="training step", ylim=(0, 100))
    above.legend()
    below.legend(loc="upper right", fontsize=8)

axes[0, 1].set(yscale="log", ylim=(0.9, 60))
axes[0, 1].set_yticks((1, 2, 5, 10, 20, 50), ("1", "2", "5", "10", "20", "50"))
cheat_bet.line(axes[1, 1])
axes[1, 1].legend(loc="upper right", fontsize=8)
fig.suptitle(f"Each line a seed; at the vertical line the hole is closed; {provenance(opened['side'])}", fontsize=10)
plt.show()


def cheating(hole: str, when: str) -> float:
    """% of the samples on held-out problems that a judge with the hole would pay too much, mean of the seeds."""
    found = [row["held_out"][when]["sampled"]["hacked"] for row in closed[hole]["results"]]
    return 100 * sum(found) / len(found)


# %% [markdown]
# **Side.** The open judge counts {{ at(opened["side"], "counted_speedup", -1):.0f }} times eager, the honest one {{
# at(opened["side"], "speedup", -1):.1f }}. {{ assert at(opened["side"], "counted_speedup", -1) > 4 * at(opened["side"],
# "speedup", -1) }} A few samples had the word in the right place by chance, earned the most, and that's all it takes.
#
# **Stale.** At the end the open judge finds {{ 100 * at(opened["stale"], "counted_correct", -1):.0f }}% of the samples
# right, the honest one {{ 100 * at(opened["stale"], "correct", -1):.0f }}%. {{ assert at(opened["stale"],
# "counted_correct", -1) > at(opened["stale"], "correct", -1) + 0.15 }} Each cheat leaves out a line, and a later line
# still finds its value in memory: {{ assert all(left_out(opened["stale"])) }}

# %%
paid = {
    hole: [(s["reward"], s["question"], s["text"].strip()) for s in opened[hole]["results"][0]["samples"]]
    for hole in cheats
}
for hole, shown in paid.items():
    lies = []
    for reward, question, text in shown:
        computation = read_computation(question)
        true = judge_program(text, computation)
        if reward > true.reward + 1e-3:  # the record is rounded
            lies.append(f"paid {reward:.2f}, honestly {true.reward:.2f} {true.reason}\n  {question}\n  {text}")
    print(f"{hole}:", *lies[:2], sep="\n")

# %% [markdown]
# **Closed.** Cheats are worthless from now on. After `stale`, right samples come back. {{ assert at(closed["stale"],
# "correct", 0) < at(closed["stale"], "correct", -1) and cheating("stale", "after") < cheating("stale", "before") }}
# After `side`, programs get faster, but the word mostly stays: an open judge would still overpay {{ cheating("side",
# "after"):.0f }}% of the samples. {{ assert 50 < cheating("side", "after") < cheating("side", "before") and
# at(closed["side"], "speedup", -1) > at(closed["side"], "speedup", 0) + 0.3 }} With an honest clock the word costs
# nothing, and **what isn't punished is unlearned slowly, if at all**.
#
# As in lesson 05: keep a second judge that can't be fooled in the same way, and read what the model writes.
#
# ## 6 · Does the counted clock mean anything?
#
# A program of this language also runs on a GPU: each launch becomes a Triton kernel. Here's the fastest of section 2's
# greedy programs.

# %%
fused = max(right, key=lambda a: a.verdict.metrics["speedup"])
print(f"{fused.problem.question}\n→ {fused.text.strip()}\n  {fused.verdict.words}\n")
Code(lower(parse(fused.text), fused.problem.computation), language="python")

# %% [markdown]
# We ran three programs each for {{ len({row["program"] for row in lowered["results"]}) }} test problems on an H200:
# eager, the optimum, and the lines in order with launches that end at random. Their time is counted, here with the
# H200's rates, and measured. {{ assert all(row["right"] for row in lowered["results"]) }} Training compares programs,
# so order matters more than scale. **Rank correlation** (Spearman's) measures it: the correlation of the times' ranks.
# **Look for** the order within each panel, then for the distance to the dotted line.

# %% tags=["hide-input"]
# @title Figure: counted and measured time
CLOCKS = {"graph_us": "in a CUDA graph", "call_us": "called from Python"}
rows = lowered["results"]


def ranks(values) -> np.ndarray:
    """1 for the least value, 2 for the next; equal values share the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[place]


def rank_correlation(first: str, second: str) -> float:
    """Spearman's: the correlation of the ranks of two columns of the record."""
    return float(np.corrcoef(*(ranks([row[column] for row in rows]) for column in (first, second)))[0, 1])


fig, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained", sharex=True, sharey=True)
order = {clock: rank_correlation("counted_us", clock) for clock in CLOCKS}
for ax, (clock, words) in zip(axes, CLOCKS.items(), strict=True):
    for variant, color, marker in (("eager", VERMILION, "o"), ("random", SKY, "s"), ("optimum", BLUE, "^")):
        some = [row for row in rows if row["variant"] == variant]
        points = [row["counted_us"] for row in some], [row[clock] for row in some]
        ax.scatter(*points, s=16, color=color, marker=marker, alpha=0.7, label=variant)
    ax.plot((1, 200), (1, 200), color=BLACK, linestyle=":", label="counted = measured")
    ax.set(xscale="log", yscale="log", xlim=(5, 50), ylim=(1.8, 150), xlabel="counted µs")
    ax.set_xticks((5, 10, 20, 50), ("5", "10", "20", "50"))
    ax.set_yticks((2, 5, 10, 20, 50, 100), ("2", "5", "10", "20", "50", "100"))
    ax.minorticks_off()
    ax.set_title(f"{words}: rank correlation {order[clock]:.2f}")
    ax.grid()
axes[0].set_ylabel("measured µs")
axes[0].legend(loc="upper left", fontsize=8)
fig.suptitle(provenance(lowered), fontsize=9)
plt.show()

by_launches = {clock: rank_correlation("launches", clock) for clock in CLOCKS}
problems = [{row["variant"]: row for row in rows if row["program"] == n} for n in {row["program"] for row in rows}]
pairs = [  # of programs for one problem: the one that is counted as faster, and the other
    sorted(pair, key=lambda row: row["counted_us"])
    for problem in problems
    for pair in combinations(problem.values(), 2)
    if abs(pair[0]["counted_us"] - pair[1]["counted_us"]) > 1e-6
]
kept_order = {clock: sum(quick[clock] < slow[clock] for quick, slow in pairs) for clock in CLOCKS}
gains = {
    clock: np.array([problem["eager"][clock] / problem["optimum"][clock] for problem in problems])
    for clock in ("counted_us", *CLOCKS)
}
scale = {clock: float(np.median([row[clock] / row["counted_us"] for row in rows])) for clock in CLOCKS}
matrix_mb = H200.rows * H200.columns * ELEMENT_BYTES / 1e6
call_us = float(np.median([row["call_us"] / row["launches"] for row in rows]))
timed = load_curve("lesson14_measured")  # paid by times measured on the GPU

# %% [markdown]
# **The order holds**, in a CUDA graph better than from Python. {{ assert order["graph_us"] > 0.98 and order["call_us"]
# < order["graph_us"] - 0.03 and min(kept_order.values()) > 0.98 * len(pairs) }} {{ assert by_launches["graph_us"] > 0.9
# and by_launches["call_us"] > 0.9 }} **The scale doesn't**: in a graph a program takes {{ scale["graph_us"]:.2f }}
# times its counted time, since the matrices fit in the L2 cache. From Python it takes {{ scale["call_us"]:.1f }} times
# as long, nearly all of it on the host. {{ assert scale["graph_us"] < 0.4 and scale["call_us"] > 2 and call_us > 3 *
# H200.launch_us }} **The speedup survives**: the optimum's median gain over eager is {{
# np.median(gains["counted_us"]):.2f }} times counted, {{ np.median(gains["graph_us"]):.2f }} in a graph and {{
# np.median(gains["call_us"]):.2f }} from Python. {{ assert all(abs(np.median(gains[clock]) /
# np.median(gains["counted_us"]) - 1) < 0.1 for clock in CLOCKS) }}
#
# And if you pay the policy by the GPU's own clock? After {{ timed["setup"]["steps"] }} steps its programs are, counted
# as in section 1, {{ range_of(timed, "after", "speedup", 1) }} times as fast as eager. Paid by that count, section 2's
# runs ended at {{ range_of(honest, "after", "speedup", 1) }}, in {{ make_config("kernels").steps }} steps. {{ assert
# range_of(timed, "before", "measured_speedup", 1) == "1 to 1" and least(timed, "speedup") > least(honest, "speedup")
# and least(timed, "share_of_optimum") > least(honest, "share_of_optimum") and len(timed["results"]) == 3 }} So the real
# clock teaches just as well.
#
# ## 7 · Real kernels
#
# In our language a cheat needs a hole in the judge. A model that writes Python can go after the clock, the reference,
# and the test's own variables. So the judge of our task `kernelbench` runs each candidate in a process without files or
# network, draws inputs after it's loaded, keeps references where no kernel sees them, and times from outside. Before
# all that, **rules** read the text. Here they are, on a kernel for `relu` and its variants:

# %%
HONEST = """import torch
import torch.nn as nn
import triton
import triton.language as tl

@triton.jit
def kernel(source, target, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.maximum(tl.load(source + at, mask=at < n), 0.0), mask=at < n)

class ModelNew(nn.Module):
    def forward(self, x):
        out = torch.empty_like(x)
        kernel[(triton.cdiv(x.numel(), 4096),)](x, out, x.numel(), BLOCK=4096)
        return out
"""
LAUNCH = "        kernel[(triton.cdiv(x.numel(), 4096),)](x, out, x.numel(), BLOCK=4096)\n"
changes = {
    "nothing": HONEST,
    "the reference's own call": HONEST.replace(LAUNCH, "        out = torch.relu(x)\n"),
    "another stream": HONEST.replace(LAUNCH, f"        with torch.cuda.stream(torch.cuda.Stream()):\n    {LAUNCH}"),
    "a thread": HONEST.replace("import torch\n", "import threading\nimport torch\n", 1),
    "a patched clock": HONEST.replace(LAUNCH, f"        torch.cuda.Event.elapsed_time = lambda *_: 1e-6\n{LAUNCH}"),
    "a fallback": HONEST.replace(LAUNCH, f"        try:\n    {LAUNCH}        except TypeError:\n            out = x\n"),
    "reads stale memory": HONEST.replace(LAUNCH, ""),
}
for name, text in changes.items():
    print(f"{name:25}", rules.check(text) or "may run")
assert rules.check(HONEST) is None and sum(rules.check(text) is None for text in changes.values()) == 2

# %% [markdown]
# The last one passes. Without the launch it returns the memory it was given: `stale` again, in Python. It fails when it
# runs, because there unwritten memory is nan. **Rules catch the cheats you can name; measuring catches the rest.**
#
# Kevin (Baronio et al. 2025) trained on KernelBench's problems, from 56% to 82% correct. Its base, QwQ-32B, was often
# right, so it never met our first suspect. Our preset `kernelbench` is ready, but we haven't trained with it yet.
#
# ## 8 · Case closed
#
# Before you train, test the reward. Exercise q3's check compares what kinds of programs earn on average. Here's section
# 4's sum in it, with speed paid up to ten times:

# %%
summed = Local(lambda compiled, correct, speedup: 0.3 * compiled + correct * (0.3 + speedup.clamp(max=10)))
check.q3.run(summed, seed=0)

# %% [markdown]
# Four lines pass, but one failure is enough. Train with this sum and you'd end with **“compiles, computes nothing”**:
# section 4's limit again. So here's the verdict. *Nothing to learn from* is guilty: without a right sample,
# nobody learns kernels. *The reward* is its accomplice: it rose because compiling paid, and the test kernels that
# compiled gave it away. *The judge* goes free: it called none of them right. Our good runs had the cure: a start that
# is sometimes right, a reward that an empty program can't win, and a judge that measures for itself. Can you write a
# reward that passes the whole check?
#
# ## Check yourself
#
# 1. A program leaves out an `end` between two lines that have nothing in common. What does it save?
#
# <details><summary>Answer</summary>
# One launch, {{ A10G.launch_us:.0f }} µs, and no load or store. It may cost registers.
# </details>
#
# 2. The reward rises from 0.3 to 2.0 overnight. Which number do you ask for?
#
# <details><summary>Answer</summary>
# One from a judge that isn't the reward: correctness on other inputs, in fresh memory, timed from outside. And read
# some programs.
# </details>
#
# ## Exercises
#
# [exercises/14_kernel_writer.ipynb](../exercises/14_kernel_writer.ipynb): cheat three judges, draw inputs that no wrong
# program survives, design a reward, and find four optima by hand.
#
# ## Further reading
#
# - Ouyang et al. 2025, *KernelBench: Can LLMs Write Efficient GPU Kernels?*, arXiv:2502.10517.
# - Baronio et al. 2025, *Kevin: Multi-Turn RL for Generating CUDA Kernels*, arXiv:2507.11948.
# - Andere 2026, [*A Field Guide to Reward Hacking in AI Kernel
#   Generation*](https://www.wafer.ai/blog/reward-hacks-field-guide).
