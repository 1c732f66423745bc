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
# - to write a program for a GPU in a language of some thirty words, and to see what it is charged for;
# - that the step of lesson 05 trains a model to write such programs, with one word of it changed;
# - what each part of a reward does alone, and why a policy that earns nothing stays where it is;
# - how a policy finds a hole in its judge, what that looks like from outside, and what closing the hole heals;
# - what it takes to judge real kernels, which can fight back.
#
# You need [lesson 05](05_full_loop.ipynb), for the step and for a verifier with a hole, and
# [lesson 06](06_where_time_goes.ipynb), for launches and bytes.
#
# Models of 8 billion parameters and more are trained to write GPU kernels by reinforcement learning. It is worth seeing
# the whole of it once where a run takes minutes, where the fastest program is known, and where nobody can blame the
# clock. The model here has 0.8 million parameters.

# %%
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
from rlcourse.course.lessons.curve_records import load_curve
from rlcourse.course.lessons.recorded import FEWER, RETAUGHT_STEPS, SAMPLES, SLIGHTLY_FEWER
from rlcourse.course.lessons.warm_start import imitate, kernel_policy
from rlcourse.course.widgets import bet
from rlcourse.evaluation import answer_problems, load_all
from rlcourse.learner import Learner
from rlcourse.measure.plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION
from rlcourse.measure.records import load_record, provenance
from rlcourse.rollout import make_engine
from rlcourse.sampling import GREEDY, Sampling
from rlcourse.tasks import load_task
from rlcourse.tasks.kernelbench import rules
from rlcourse.tasks.kernels.clock import A10G, ELEMENT_BYTES, H200, program_us
from rlcourse.tasks.kernels.judge import LEAST_US, judge_program
from rlcourse.tasks.kernels.language import (
    BINARY,
    REGISTERS,
    UNARY,
    CompileError,
    Computation,
    compile_program,
    eager,
    parse,
    read_computation,
    write,
)
from rlcourse.tasks.kernels.lowering import lower
from rlcourse.tasks.kernels.optimum import eager_us, fits_one_launch, optimum, orders
from rlcourse.tasks.kernels.problems import computations
from rlcourse.tasks.prompts import PromptSampler
from rlcourse.train import train_step

task = load_task("kernels")
MATRIX_US = A10G.rows * A10G.columns * ELEMENT_BYTES / A10G.bytes_per_us  # to load or to store one
OF_TWO, OF_ONE = ", ".join(BINARY), ", ".join(UNARY)  # operations
lowered = load_record("lowered", "NVIDIA H200")  # programs in this language, timed on a GPU

# %% [markdown]
# ## 1 · Beat PyTorch by hand
#
# A **computation** is written line by line, as in PyTorch: `a = add u v` is a = u + v. `u`, `v`, `w` and `x` are
# inputs, and the result is called `y`. PyTorch without a compiler ("eager") runs a kernel for each line: it loads the
# operands from memory, computes, stores the result.

# %%
swish = read_computation("a = add u v ; b = sigmoid a ; y = mul a b")
print(write(eager(swish)))
print(judge_program(write(eager(swish)), swish))

# %% [markdown]
# The first printed line is eager as a **program**. A program says the same lines, and how they run:
#
# | word | meaning |
# | --- | --- |
# | `end` | the launch ends with this statement. Without it the next statement runs in the same launch |
# | `put` | the value is written to memory; the same launch still reads it from its register |
# | `keep` | the value stays in a register, and is gone when the launch ends |
#
# So most optimisations are one word. Leave out an `end`: that saves a launch, and the loads of what is in a register
# already. Write `keep` for `put`: that saves a store. The lines may also change places. A launch has registers for {{
# REGISTERS }} tensors at once. Loaded, put or kept, a value holds its register until the last statement of the launch
# that reads it. A result may take the register of an operand that is read for the last time: `a = add u v` needs two,
# not three. {{ assert REGISTERS == 2 }}
#
# Operations are `{{ OF_TWO }}` of two matrices; `{{ OF_ONE }}` of one; and `rowsum` and `rowmax`, whose result, one
# number a row, needs no register and costs next to nothing to move.
#
# Time is **counted**, not measured: {{ A10G.launch_us:.0f }} µs a launch, {{ MATRIX_US:.0f }} µs for each matrix of {{
# A10G.rows }} × {{ A10G.columns }} float32 numbers that is loaded or stored, and next to nothing for the operations.
# Memory and operations have the rates of an A10G's data sheet; the cost of a launch is an assumption. So the time is
# the same on your machine and on ours, and a search can find its minimum. It is no measurement: caches and everything
# else that lessons 06 to 09 dealt with are missing. Section 5 holds it against a GPU.

# %% tags=["hide-input"]
# @title Your bet
hand_bet = bet(
    "The three lines in one launch, all but `y` kept. How many times as fast as eager?", (2, 1, 6, 0.1), "times"
)

# %% [markdown]
# Now write programs. The last is yours: change a word in it and run the cell again. (The reward beside the speed-up is
# section 2's.)

# %%
programs = {
    "eager": "a = add u v end put ; b = sigmoid a end put ; y = mul a b end put ;",
    "two launches": "a = add u v put ; b = sigmoid a end put ; y = mul a b end put ;",
    "one launch": "a = add u v put ; b = sigmoid a put ; y = mul a b end put ;",
    "and kept": "a = add u v keep ; b = sigmoid a keep ; y = mul a b end put ;",
    "yours": "a = add u v put ; b = sigmoid a keep ; y = mul a b end put ;",
}
for name, text in programs.items():
    finding = judge_program(text, swish)
    print(f"{name:13} {finding.speedup:.2f} times as fast, reward {finding.reward:.2f}   {finding.reason}")

# %% tags=["hide-input"]
# @title Figure: what a program is charged for
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
by_hand = judge_program(programs["and kept"], swish).speedup
hand_bet.result(round(by_hand, 1))

# %% [markdown]
# {{ by_hand:.1f }} times, with two words left out and two changed. {{ assert by_hand > 2.5 }} Operations are the black
# sliver at the end of the bars: what costs is to start, and to move.
#
# A compiler and a check stand in front of the clock. Each refusal has a reason:

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
# Look at the last, a program for the four lines of `residual`. Only one thing is wrong with it: `u`, `a` and `b` are
# all needed while `b` is computed, and they are three tensors. So it takes two launches, and there are several places
# to cut. The best is found **by search**: all orders of the lines, times all places to end a launch, and everything
# kept that no later launch reads. No benchmark of real kernels can say exactly how far from the optimum a kernel is.
# This one can.

# %%
us, best = optimum(residual)
print(f"registers of a launch: {REGISTERS}; eager {eager_us(residual):.1f} µs, the least {us:.1f} µs:  {write(best)}")
test = [problem.computation for problem in task.problems("test") if not problem.is_long]
most = [eager_us(c) / optimum(c)[0] for c in test]
refused = [not fits_one_launch(c) for c in test]
in_another_order = sum(
    any(fits_one_launch(Computation(tuple(order))) for order in orders(list(c.lines)))
    for c in test
    if not fits_one_launch(c)
)


def share_refused(problems) -> float:
    """% of the problems whose lines, in the order in which they are written, one launch does not hold."""
    return 100 * sum(not fits_one_launch(p.computation) for p in problems) / len(problems)


print(f"{len(test)} test problems, {sum(refused)} of them refused in one launch")
print(f"best speed-up: {min(most):.2f} to {max(most):.2f} times eager")

# %% [markdown]
# "Refused" always means: in the order in which the lines are written. {{ in_another_order }} of these {{ sum(refused)
# }} fit one launch in another order, which exercise q4 is about. {{ assert 1 < in_another_order < sum(refused) / 2 }}
#
# ## 2 · The same step
#
# A task is prompts and a judge (lesson 05 used the task `minigsm`). The reward of this one:
#
# $$R = \begin{cases} 0.2 + \min(\text{speed-up}, 4) - 1 & \text{if the result is right on random inputs} \\ 0 &
# \text{otherwise} \end{cases}$$
#
# So eager earns 0.2, twice as fast as eager 1.2, and beyond four times as fast there is nothing more to earn. Compiling
# earns nothing by itself: what that would teach is in section 4. The loop is that of lesson 05, line for line. What
# differs is **one word, the task's name**, and the model that can read it:


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
    print(f"{count:3} times: {text}   ({words})")

# %% [markdown]
# This is the start: a model that has been shown what a careless programmer writes (by supervised training, the subject
# of lesson 13). Such programs are mostly eager; here and there a launch goes on for another line. **No clock came into
# it.** So the model copies lines well, and has no idea what is fast. Its greedy answers are all eager. The rare
# departures among the samples are what training has to work with.

# %% tags=["hide-input"]
# @title Your bet
STEPS, FEW = pick(2, 40), pick(6, 60)
first_bet = bet(
    f"{STEPS} steps of {config.num_prompts} problems × {config.num_generations} samples. How many times as fast as "
    "eager are the greedy programs that are right, on problems not trained on?",
    (1.2, 1, 4, 0.1),
    "times",
)

# %%
validation = [p for p in task.problems("validation") if not p.is_long][:FEW]
config, policy, engine, log = train(STEPS)
greedy = answers_of(policy, engine, validation)
right = [a for a in greedy if a.right]
speed = sum(a.verdict.metrics["speedup"] for a in right) / max(1, len(right))

# %% [markdown]
# **Look for** what makes the programs faster, and what that costs.


# %% tags=["hide-input"]
# @title Figure: forty steps
def percent(values) -> list:
    return [None if v is None else 100 * v for v in values]


fig, axes = plt.subplots(1, 3, figsize=(10.5, 3), layout="constrained")
steps = range(1, STEPS + 1)
axes[0].plot(steps, percent(m["compiled"] for m in log), color=SKY, linestyle="--", label="compiled")
axes[0].plot(steps, percent(m["correct"] for m in log), color=GREEN, label="correct")
axes[0].set(title="samples", ylabel="%", ylim=(0, 102))
axes[1].plot(steps, [m["speedup"] for m in log], color=BLUE, label="speed-up, of correct ones")
axes[1].plot(steps, [m["launches"] for m in log], color=VERMILION, linestyle="--", label="launches, of correct ones")
axes[1].set(title="what the correct ones are like", ylim=(0, None))
axes[2].plot(steps, [m["reward"] for m in log], color=ORANGE, label="reward")
axes[2].set(title="what is paid", ylim=(0, None))
for ax in axes:
    ax.set_xlabel("training step")
    ax.grid()
    ax.legend(loc="best", fontsize=8)
plt.show()
first_bet.result(round(speed, 2))
early, late = log[:5], log[-5:]


def mean(rows: list[dict], name: str) -> float:
    """Mean of a metric over steps that have it."""
    values = [row[name] for row in rows if row[name] is not None]
    return sum(values) / max(1, len(values))


# %% [markdown]
# From {{ mean(early, "launches"):.1f }} launches to {{ mean(late, "launches"):.1f }}, and from {{ mean(early,
# "speedup"):.2f }} to {{ mean(late, "speedup"):.2f }} times eager among samples that are right. {{ assert mean(late,
# "speedup") > 1.4 * mean(early, "speedup") }} Of its greedy programs for problems that it was not trained on, those
# that are right are {{ speed:.2f }} times as fast. {{ assert speed > 1.5 }} Nothing but the reward told it that
# launches or bytes cost anything.
#
# And fewer samples are right: {{ 100 * mean(early, "correct"):.0f }} % at the start, {{ 100 * mean(late, "correct"):.0f
# }} % at the end, though the reward rose from {{ mean(early, "reward"):.2f }} to {{ mean(late, "reward"):.2f }}. {{
# assert mean(late, "correct") < mean(early, "correct") and mean(late, "reward") > mean(early, "reward") }} That is no
# accident of this run. A program that is three times as fast earns 2.2, an eager one 0.2: **at these prices a gamble
# that comes off more than one time in eleven is worth more than safety.** In {{
# share_refused(task.problems("train")):.0f }} % of the training problems one launch does not hold the lines, and there
# the gamble is lost: one would have to know where to cut, or how to reorder. (So the speed-ups of samples and of greedy
# programs above cannot be compared. The latter are for other problems, of which only {{ share_refused(validation):.0f
# }} % are refused.) {{ assert share_refused(task.problems("train")) > 50 > 2 * share_refused(validation) }}
#
# Where does this policy fail? The problems that one launch does not hold, apart from the others, each with the three
# most frequent findings of the judge:

# %%
for name, some in (("one launch holds it", False), ("one launch is refused", True)):
    group = [a for a in greedy if fits_one_launch(a.problem.computation) != some]
    good = sum(a.right for a in group)
    print(f"{name}: {good} of {len(group)} right")
    for words, count in Counter(a.verdict.words for a in group).most_common(3):
        print(f"{count:5} times: {words}")

# %% [markdown]
# ## 3 · Whole runs
#
# Three seeds of `rlcourse train --preset kernels`, recorded. The judge of the evaluations is stricter than that of the
# training: other inputs, of three widths. The share of the optimum is the least time over the program's, and 0 for a
# program that is wrong. **Look for** the turn in the left picture, and for what the middle one does at the same time.

# %% tags=["hide-input"]
# @title Figure: three whole runs
honest = load_curve("lesson14_honest")
LOOKS = ((BLUE, "-"), (ORANGE, "--"), (GREEN, ":"))
PANELS = (("launches", 1, "launches"), ("refused_correct", 100, "% right where one launch is refused"))
fig, axes = plt.subplots(1, 3, figsize=(10.5, 3), layout="constrained")
for row, (color, style) in zip(honest["results"], LOOKS, strict=True):
    look = {"color": color, "linestyle": style, "label": row["variant"]}
    steps = [e["step"] for e in row["evals"]]
    for ax, (name, scale, title) in zip(axes, (*PANELS, ("share_of_optimum", 100, "% of the optimum")), strict=True):
        ax.plot(steps, [scale * e[name] for e in row["evals"]], **look)
        ax.set(title=title, xlabel="training step", ylim=(0, None))
for ax in axes:
    ax.grid()
axes[0].legend()
fig.suptitle("greedy programs, validation problems")
plt.show()


def range_of(record: dict, when: str, name: str, scale: float = 100) -> str:
    """The least and the largest value of the seeds, of greedy answers to the test problems."""
    values = sorted(scale * row["test"][when][name] for row in record["results"])
    return f"{values[0]:.3g} to {values[-1]:.3g}"


def least(record: dict, name: str) -> float:
    """The least value of the seeds after training."""
    return min(row["test"]["after"][name] for row in record["results"])


def share_at(step: int) -> float:
    """% of the optimum on validation problems, mean of the seeds."""
    found = [e["share_of_optimum"] for row in honest["results"] for e in row["evals"] if e["step"] == step]
    return 100 * sum(found) / len(found)


def spread(values, digits: int = 2) -> str:
    """Least to most, in percent."""
    low, high = (f"{100 * value:.{digits}g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


lowest = [min(e["refused_correct"] for e in row["evals"]) for row in honest["results"]]
tests = [row["test"]["after"] for row in honest["results"]]
wrong_share = spread([1 - r["correct"] for r in tests])
optimal_launches = sum(len(compile_program(optimum(c)[1], c)) for c in test) / len(test)
slow_share = spread([r["correct"] - r["share_of_optimum"] for r in tests])
starts = load_curve("lesson14_starts")
by_start = sorted((row["test"] for row in starts["results"]), key=lambda t: t["before"]["correct"])
after_start = [100 * t["after"]["share_of_optimum"] for t in by_start]
same_start = [100 * r["share_of_optimum"] for r in tests]
RIGHT, SHARE, TWICE = 90, 85, "twice the steps"
FEW_REFUSED, SOME_REFUSED = 100 * FEWER, 100 * SLIGHTLY_FEWER
NAMES = {"not divided": "centered", "fewer refused": "fewer", TWICE: "longer", "root": "root", "averaged": "averaged"}
tried = {way: load_curve(f"lesson14_tried_{name}") for way, name in NAMES.items()}

# %% [markdown]
# Two phases. First everything is merged into one launch and kept, wherever that leads. It leads to the compiler's
# refusal in those problems that one launch does not hold: the greedy policy could do all of these at the start, slowly,
# and at its lowest each seed gets {{ 100 * max(lowest):.0f }} % of them right. Then it learns where to cut. Launches
# become more again, and the refused problems come back. {{ assert max(lowest) < 0.005 }} The share of the optimum tells
# nothing of that: after 60 steps it was {{ share_at(60):.0f }} %, and is {{ share_at(240):.0f }} % at the end, since
# some of the others have become slower. {{ assert abs(share_at(60) - share_at(240)) < 8 }}
#
# At the end, greedy, on {{ len(test) }} test problems of structures that were not trained on: {{ range_of(honest,
# "after", "correct") }} % right, {{ range_of(honest, "after", "speedup", 1) }} times eager, {{ range_of(honest,
# "after", "share_of_optimum") }} % of the optimum ({{ 100 *
# honest["results"][0]["test"]["before"]["share_of_optimum"]:.0f }} % at the start), in at most {{ max(row["seconds"]
# for row in honest["results"]):.0f }} s on a busy machine. {{ assert least(honest, "share_of_optimum") > 0.7 and
# least(honest, "speedup") > 1.8 }} (The speed-up is a mean over right programs only, and these are not the problems of
# section 2, so its {{ speed:.2f }} cannot be set beside this.) Of the {{ sum(refused) }} problems that one launch does
# not hold, {{ range_of(honest, "after", "refused_correct") }} % are right. And on problems of 6 and 7 lines, longer
# than any in training, {{ range_of(honest, "after", "long_correct") }} %; the start, which wrote eager programs, got {{
# 100 * honest["results"][0]["test"]["before"]["long_correct"]:.0f }} %.
#
# So the optimum is missed in two ways. {{ wrong_share }} points of it are lost to wrong programs, all of them for
# problems that one launch does not hold. {{ assert all(round(len(test) * (1 - r["correct"])) == round(sum(refused) * (1
# - r["refused_correct"])) for r in tests) }} More, {{ slow_share }} points, is lost to right programs that are slower
# than they could be. {{ assert all(r["correct"] - r["share_of_optimum"] > 1 - r["correct"] for r in tests) }} Right
# programs have {{ range_of(honest, "after", "launches", 1) }} launches on average, where the optimum has {{
# optimal_launches:.2f }}: they cut too often. {{ assert least(honest, "launches") > optimal_launches + 0.1 }} One
# launch does not hold {{ share_refused(task.problems("train")):.0f }} % of the training problems and {{
# share_refused([p for p in task.problems("test") if not p.is_long]):.0f }} % of these. The next part changes that
# share: with fewer refused problems the policies stop cutting altogether. So the share matters, but lowering it is no
# cure. {{ assert all(row["test"]["after"]["refused_correct"] == 0 for row in tried["fewer refused"]["results"]) }}
#
# **The start is a matter of luck, too.** All three seeds began with the model that ships. Its recipe, supervised
# training on mostly eager programs, was run three times more with other seeds, and each result trained once. Their
# greedy programs were {{ range_of(starts, "before", "correct") }} % right before, and reached {{ range_of(starts,
# "after", "share_of_optimum") }} % of the optimum: a range of {{ max(after_start) - min(after_start):.0f }} points,
# where seeds of the same start differ by {{ max(same_start) - min(same_start):.0f }}. {{ assert max(after_start) -
# min(after_start) > 3 * (max(same_start) - min(same_start)) }} Of these three, the better a start had learned to copy,
# the further it got; three are too few to say that this is why. {{ assert after_start == sorted(after_start) and
# by_start[0]["before"]["correct"] < by_start[-1]["before"]["correct"] - 0.1 }} On the problems of 6 and 7 lines they
# end at {{ range_of(starts, "after", "long_correct") }} % right, all below the seeds of the model that ships, and the
# best of the three on short problems has {{ 100 * by_start[-1]["after"]["long_correct"]:.0f }} %. {{ assert
# max(t["after"]["long_correct"] for t in by_start) < least(honest, "long_correct") - 0.15 }} A curve from one start,
# with however many seeds of RL, shows none of this. (Each of these runs took {{ min(row["seconds"] for row in
# starts["results"]):.0f }} to {{ max(row["seconds"] for row in starts["results"]):.0f }} s.)
#
# ### What we tried, and did not reach
#
# We wanted {{ RIGHT }} % right and {{ SHARE }} % of the optimum, with every seed. The runs above have the first and
# miss the second. {{ assert 100 * least(honest, "correct") > RIGHT and 100 * least(honest, "share_of_optimum") < SHARE
# }} Four changes, one at a time, and a fifth way that combines longer training, slightly fewer refused problems and
# averaging ({{ provenance(tried["averaged"]) }}; the runs above: {{ provenance(honest) }}; and another processor makes
# another run of the same seed): {{ assert {(t["device"], t["date"]) for t in tried.values()} ==
# {(tried[TWICE]["device"], tried[TWICE]["date"])} }}
#
# - **not divided**: advantages without the division by their group's spread (Dr. GRPO's, lesson 04);
# - **fewer refused**: of the training problems one launch does not hold {{ FEW_REFUSED:.0f }} %, not {{
#   share_refused(task.problems("train")):.0f }} %;
# - **twice the steps**: {{ tried[TWICE]["setup"]["steps"] }};
# - **root**: a right program is paid by the square root of its speed-up, so that a gamble is worth less;
# - **averaged**: {{ tried["averaged"]["setup"]["steps"] }} steps, {{ SOME_REFUSED:.0f }} % refused, and the policy that
#   is judged has the mean weights of the second half's checkpoints.
#
# There are three seeds a way; some points coincide. On the dotted line every right program is as fast as can be. **Look
# for** what the points that lie there have in common, and for the shaded corner.

# %% tags=["hide-input"]
# @title Figure: right and fast
WAYS_TRIED = {"as above": (BLACK, "o"), "not divided": (SKY, "s"), "fewer refused": (ORANGE, "v")}
WAYS_TRIED |= {TWICE: (BLUE, "D"), "root": (VERMILION, "^"), "averaged": (PURPLE, "P")}
fig, ax = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
ends_at = {}
for way, (color, marker) in WAYS_TRIED.items():
    after = [row["test"]["after"] for row in (honest if way == "as above" else tried[way])["results"]]
    ends_at[way] = [(100 * r["correct"], 100 * r["share_of_optimum"]) for r in after]
    size, inside_color = (90, "none") if way == "not divided" else (30, color)  # others lie on these
    look = {"edgecolors": color, "facecolors": inside_color, "marker": marker, "s": size, "zorder": 3}
    ax.scatter(*zip(*ends_at[way], strict=True), label=way, **look)
ax.plot((75, 100), (75, 100), color=BLACK, linestyle=":", linewidth=1)
held = 100 * (1 - sum(refused) / len(test))
ax.axvline(held, color=GREEN, linestyle="--", linewidth=1, label="what one launch holds")
ax.fill_between((RIGHT, 100), SHARE, (RIGHT, 100), color=GREEN, alpha=0.15)
ax.set(xlabel="% right", ylabel="% of the optimum", xlim=(87, 100), ylim=(76, 93), title="greedy, test problems")
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
ax.grid()
plt.show()
inside = {way: sum(r >= RIGHT and s >= SHARE for r, s in points) for way, points in ends_at.items()}
corner = ends_at["not divided"] + ends_at["fewer refused"]
others = ends_at[TWICE] + ends_at["root"]
swing = max(
    abs(a["share_of_optimum"] - b["share_of_optimum"])
    for row in tried[TWICE]["results"]
    for a, b in zip(row["evals"][3:-1], row["evals"][4:], strict=True)
)
some_wrong = len(test) * (held - min(r for r, _ in corner)) / 100  # of the problems that one launch holds
never = [
    row["test"]["after"]["refused_correct"] for way in ("not divided", "fewer refused") for row in tried[way]["results"]
]
cut = [row["test"] for row in tried["averaged"]["results"] if row["test"]["after"]["refused_correct"]]
of_mean, of_last = ([test[when]["share_of_optimum"] for test in cut] for when in ("after", "last"))


# %% [markdown]
# Two changes end in one place: everything in one launch. All but at most one of the problems that a launch holds have
# their optimum, and of the others none is right: {{ spread([r / 100 for r, _ in corner], 3) }} % of both. {{ assert
# max(never) == 0 and some_wrong < 1.5 and all(r - s < 0.05 for r, s in corner) }} With twice the steps {{ inside[TWICE]
# }} of the three seeds reach the corner, and the third is {{ SHARE - min(s for _, s in ends_at[TWICE]):.1g }} points
# below it; no other policy does. {{ assert inside[TWICE] == sum(inside.values()) == 2 }} That is no recipe: from one
# evaluation to the next, {{ tried[TWICE]["setup"]["eval_every"] }} steps later, the share moves by up to {{ 100 *
# swing:.0f }} points, so where a run ends is partly chance. {{ assert swing > 0.03 }} What would teach 0.8 million
# parameters to count registers is open.
#
# <details><summary>More about these runs, and what else we tried</summary>
#
# Why do two changes end in one launch for everything? Perhaps because without the division a group whose only reward is
# one lucky program counts for little, and with fewer refused problems there are fewer such groups; that has not been
# tested. Twice the steps and the root do cut, but not always where they must: {{ spread([r / 100 for r, _ in others],
# 3) }} % right, {{ spread([s / 100 for _, s in others]) }} % of the optimum. {{ assert min(r for r, _ in others) > 94
# and min(r - s for r, s in others) > 5 }}
#
# Averaging (checkpoint averaging, Vaswani et al. 2017, section 6.1; stochastic weight averaging, Izmailov et al. 2018;
# here of a checkpoint every {{ tried["averaged"]["setup"]["save_every"] }} steps) is meant to take out the chance of
# the last step, and cannot take out another: of its three seeds {{ len(cut) }} cut, and {{ 3 - len(cut) }} does
# everything in one launch, as all do with fewer refused problems. {{ assert len(cut) == 2 }} Where they cut, the
# averaged policies have {{ 100 * of_mean[0]:.1f }} and {{ 100 * of_mean[1]:.1f }} % of the optimum, and the last
# checkpoints of the same runs {{ 100 * of_last[0]:.1f }} and {{ 100 * of_last[1]:.1f }} %: closer together, and on
# average no higher. {{ assert np.ptp(of_mean) < np.ptp(of_last) and sum(of_mean) <= sum(of_last) }} Two runs are few
# for such a comparison.
#
# A policy that could tell which problems one launch holds would pay nothing for being right. These seem to know it only
# roughly, and trade one for the other: they cut everywhere a little more, or a little less.
#
# Without a record we also tried other shares of refused problems between {{ FEW_REFUSED:.0f }} and {{
# share_refused(task.problems("train")):.0f }} %, a higher temperature, and more refused problems with advantages that
# are divided less or not at all. With the smaller shares some or all seeds end in one launch for everything; otherwise
# the end swings as above, and nothing brought every seed into the corner.
#
# </details>
#
# ## 4 · What each part of the reward does alone
#
# A common reward for kernels is a sum: something for compiling, something for being right, something for speed. Here
# are the three parts, each as the only thing that is paid, for a few steps from the same start. "Speed" asks no
# questions: it pays for the counted speed of whatever compiles. What is printed: the shares of greedy programs that
# compile, that are right (`correct`), and that are right and faster than eager (`fast_1`); then how many times as fast
# as eager the right samples were in the first and in the last five steps.

# %%
PART_STEPS = pick(2, 25)


def metric(name: str):
    """A reward function that pays one of the task's metrics."""
    return lambda answers, config: [answer.verdict.metrics[name] or 0.0 for answer in answers]


def speed_alone(answers, config) -> list[float]:
    """Counted speed of a program that compiles, right or wrong."""
    rewards = []
    for answer in answers:
        computation = answer.problem.computation
        try:
            us = program_us(compile_program(parse(answer.text), computation))
            rewards.append(min(4.0, eager_us(computation) / us))
        except CompileError:
            rewards.append(0.0)
    return rewards


# %% tags=["hide-input"]
# @title Your bet
part_bet = bet(
    "Speed alone is paid, for all that compiles. What will the programs be like?",
    ["fast and wrong", "fast and right", "eager", "they no longer compile"],
)

# %%
PARTS = {"compiles": metric("compiled"), "is right": metric("correct"), "speed": speed_alone}
alone = {}
for name, part in PARTS.items():
    _, part_policy, part_engine, part_log = train(PART_STEPS, part, num_prompts=8)
    answers = answers_of(part_policy, part_engine, validation)
    alone[name] = {what: mean([a.verdict.metrics for a in answers], what) for what in ("compiled", "correct", "fast_1")}
    alone[name] |= {"first": mean(part_log[:5], "speedup"), "last": mean(part_log[-5:], "speedup")}
    print(f"{name:9} alone:", *(f"{what} {value:.2f}" for what, value in alone[name].items()), sep="  ")
found = alone["speed"]
right_or_wrong = "fast and right" if found["correct"] > 0.8 else "fast and wrong"
fast_or_not = right_or_wrong if found["fast_1"] >= 0.1 else "eager"
part_bet.result(fast_or_not if found["compiled"] >= 0.5 else "they no longer compile")

# %% [markdown]
# None of it is a disaster. Paid for **compiling**, or for **being right**, the policy learns no speed: its greedy
# programs stay eager ({{ 100 * alone["is right"]["fast_1"]:.0f }} % are faster), and the rare departures that section 2
# grew from become rarer: paid for being right, the right samples go from {{ alone["is right"]["first"]:.2f }} to {{
# alone["is right"]["last"]:.2f }} times eager. {{ assert alone["is right"]["last"] < alone["is right"]["first"] and
# alone["compiles"]["fast_1"] == 0 == alone["is right"]["fast_1"] }} Paid for **speed**, right or wrong, it makes
# programs faster, and {{ 100 * alone["speed"]["correct"]:.0f }} % of the greedy ones are still right. {{ assert
# alone["speed"]["fast_1"] > 0.5 and alone["speed"]["correct"] > 0.8 }} Why does it not learn to be wrong? At the start
# only {{ 100 * (mean(early, "compiled") - mean(early, "correct")):.0f }} % of the samples compile and are wrong. {{
# assert mean(early, "compiled") - mean(early, "correct") < 0.05 }} Gambling pays less, too: eager earns 1 here, so a
# program three times as fast must come off more than one time in three; in section 2 it was one in eleven. And the run
# is shorter, with 8 prompts a step instead of {{ config.num_prompts }}. Which of these decides has not been tested. The
# reward of section 2, speed only if right, relies on none of them.
#
# ## 5 · What it found
#
# A program of this language is also a GPU kernel: each launch becomes one in Triton, what is loaded is `tl.load`, what
# is put is `tl.store`, what is kept is a variable. Here is the fastest of section 2's greedy programs, which were
# written for validation problems, as Triton source.

# %%
fused = max(right, key=lambda a: a.verdict.metrics["speedup"])
print(f"{fused.problem.question}\n→ {fused.text.strip()}\n  {fused.verdict.words}\n")
Code(lower(parse(fused.text), fused.problem.computation), language="python")

# %% [markdown]
# One load for each input, one store. The tests run such sources in Triton's own interpreter against PyTorch.
#
# **Does the counted clock rank programs as a GPU does?** For {{ len({row["program"] for row in lowered["results"]}) }}
# test problems, three programs each were lowered and run on an H200: eager, the lines in order with launches that end
# at random, and the optimum. All were right. {{ assert all(row["right"] for row in lowered["results"]) }} Their time is
# counted at the H200's rates and measured twice: replayed as a CUDA graph, where the host has no part, and called from
# Python. Training compares programs, so their order matters more than the scale. **Rank correlation** (Spearman's)
# measures it: number each list of times from the least to the largest, and correlate the numbers. 1 is the same order,
# 0 is none in common. **Look for** the order within each panel, then for the distance to the dotted line.

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
# **The order holds**, better in a graph than from Python. Much of it is just the number of launches, which alone has a
# rank correlation of {{ by_launches["graph_us"]:.2f }} with the time in a graph and {{ by_launches["call_us"]:.2f }}
# with the time from Python. {{ assert order["graph_us"] > 0.98 > 0.96 > by_launches["graph_us"] > 0.9 and
# order["call_us"] < order["graph_us"] - 0.03 and by_launches["call_us"] > 0.9 }} From Python the launches alone rank as
# well as the counted clock, {{ order["call_us"]:.2f }}. {{ assert abs(by_launches["call_us"] - order["call_us"]) < 0.02
# }} Training compares programs for the same problem. In {{ len(pairs) }} pairs of those the counted times differ, and
# the one counted as faster is faster in {{ kept_order["graph_us"] }} of them in a graph, in {{ kept_order["call_us"] }}
# from Python. {{ assert min(kept_order.values()) > 0.98 * len(pairs) }} It also has fewer launches each time, so this
# record cannot say what `keep` is worth by itself. {{ assert all(quick["launches"] < slow["launches"] for quick, slow
# in pairs) }}
#
# **The scale does not.** By the median, a program takes {{ scale["graph_us"]:.2f }} times its counted time in a graph,
# and {{ scale["call_us"]:.1f }} times its counted time from Python. {{ assert scale["graph_us"] < 0.4 and
# scale["call_us"] > 2 }} The matrices, {{ matrix_mb:.0f }} MB each, fit in the L2 cache, and the clock knows no cache.
# From Python a launch takes {{ call_us:.0f }} µs, where the clock charges {{ H200.launch_us:.0f }}: nearly all of it is
# the host's, which allocates the result and starts the kernel. {{ assert call_us > 3 * H200.launch_us and
# scale["call_us"] > 5 * scale["graph_us"] }}
#
# **The speed-up survives.** The optimum is, by the median over problems, {{ np.median(gains["counted_us"]):.1f }} times
# as fast as eager by count, {{ np.median(gains["graph_us"]):.1f }} times in a graph and {{
# np.median(gains["call_us"]):.1f }} times from Python. {{ assert all(abs(np.median(gains[clock]) /
# np.median(gains["counted_us"]) - 1) < 0.1 for clock in CLOCKS) }} The policy was trained on the counted clock alone,
# at an A10G's rates; its own programs are not among those timed here.
#
# A policy can also be paid by the GPU's own clock, in a graph. {{ len(timed["results"]) }} seeds of {{
# timed["setup"]["steps"] }} steps did that ({{ provenance(timed) }}). On the test problems the greedy programs were as
# fast as eager before; after, the right ones, {{ range_of(timed, "after", "correct") }} % of all, are {{
# range_of(timed, "after", "measured_speedup", 1) }} times as fast, measured. {{ assert range_of(timed, "before",
# "measured_speedup", 1) == "1 to 1" }}

# %% [markdown]
# ## 6 · A policy that earns nothing
#
# All of this began with a model that was right nearly always. What if it is never right? Then all rewards of a group
# are 0, the advantages are 0, and so is the gradient: training goes on, and nothing moves. What counts is therefore not
# the mean reward but the **share of groups with a right sample in them**. (A group in which all are right does teach
# something here, as long as some are faster than others.) Three policies: random weights; the same after {{ pick(10,
# 150) }} supervised steps on programs of two lines; and the start of section 2. **Look for** where the second policy
# has anything to learn from.


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
short = computations(pick(50, 500), "train", 1, (2, 2))
imitate(weak, short, pick(10, 150), 3e-3, 32, random.Random(1))
plateau["two lines seen"] = hopeful(weak)
plateau["start of section 2"] = hopeful(train(0)[1])

# %% tags=["hide-input"]
# @title Figure: groups with a right sample
fig, ax = plt.subplots(figsize=(7, 2.8), layout="constrained")
for number, ((name, shares), color) in enumerate(zip(plateau.items(), (BLACK, ORANGE, BLUE), strict=True)):
    places = [lines + 0.27 * (number - 1) for lines in (2, 3, 4, 5)]
    bars = ax.bar(places, shares, 0.25, color=color, label=name)
    ax.bar_label(bars, fmt="%.0f", fontsize=8, padding=3)
    ax.scatter(places, shares, s=14, color=color, zorder=3, clip_on=False)  # a bar of 0 would not be seen
ax.set(xlabel="lines of the problem", ylabel="% of groups", ylim=(0, 112), xticks=(2, 3, 4, 5))
ax.set_title("groups of 8 with a right sample")
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()
spoiled, taught = load_curve("lesson14_plateau_dense")["setup"]["model"], RETAUGHT_STEPS

# %% [markdown]
# With random weights there is nothing to learn from, whatever the problem. {{ assert sum(plateau["random weights"]) ==
# 0 }} There are three ways out. **Supervised training** is the first; [lesson 13](13_sft_and_lora.ipynb) is about how
# much of it. The second is in the orange bars: on problems of 2, 3, 4 and 5 lines, {{ ", ".join(f"{share:.0f}" for
# share in plateau["two lines seen"]) }} % of this policy's groups have a right sample. {{ assert plateau["two lines
# seen"][0] > max(plateau["two lines seen"][1:]) + 20 }} **Easier problems** give it something to learn from (that they
# lead on to the longer ones is not shown here). The third is **partial credit**: pay for less than the whole.
#
# The first and the third are on record, from {{ spoiled }}: it writes scraps. It trains on problems of three lines and
# more with section 2's reward; with partial credit beside it, the share of the lines that a program states in their
# places, even if it is wrong (`rlcourse.tasks.kernels.task:partial`); and with section 2's reward after {{ taught }}
# supervised steps on whole programs.

# %% tags=["hide-input"]
# @title Your bet
WAYS = {"sparse": "section 2's reward", "dense": "partial credit beside it", "sft": "supervised steps first"}
scraps = {way: load_curve(f"lesson14_plateau_{way}") for way in WAYS}
LAST = scraps["sparse"]["results"][0]["curves"]["steps"][-1]
scraps_bet = bet(
    f"With section 2's reward alone: when is one sample in ten right, of {LAST} steps?",
    ["in the second half", "in the first half", "not at all"],
)

# %% [markdown]
# **Look for** when each line leaves the floor, and on the right for what rises before.

# %% tags=["hide-input"]
# @title Figure: three ways from nothing
fig, (left, right_ax) = plt.subplots(1, 2, figsize=(9.5, 3), layout="constrained", sharex=True, sharey=True)
for (way, words), color in zip(WAYS.items(), (BLACK, GREEN, BLUE), strict=True):
    for number, row in enumerate(scraps[way]["results"]):
        curves = row["curves"]
        left.plot(curves["steps"], percent(curves["correct"]), color=color, label=None if number else words)
        if way == "dense":
            right_ax.plot(curves["steps"], percent(curves["stated"]), color=color)
left.set(title="right samples", xlabel="training step", ylabel="%", ylim=(-2, 102))
right_ax.set(title="lines stated, with partial credit", xlabel="training step")
for ax in (left, right_ax):
    ax.grid()
left.legend(fontsize=8)
fig.suptitle(f"each line a seed; {provenance(scraps['dense'])}", fontsize=9)
plt.show()


def reached(way: str, name: str, share: float) -> list:
    """Of each seed the first step at which so large a share of the samples has it; None if there is none."""
    curves = [row["curves"] for row in scraps[way]["results"]]
    return [next((s for s, v in zip(c["steps"], c[name], strict=True) if v >= share), None) for c in curves]


first_tenth = {way: reached(way, "correct", 0.1) for way in WAYS}
scraps_bet.result("not at all" if first_tenth["sparse"] == [None] * 3 else "in the first half")


def ends(way: str) -> str:
    """% of right samples in the last steps, least to most of the seeds."""
    return spread([row["curves"]["correct"][-1] for row in scraps[way]["results"]])


a_step = config.num_prompts * config.num_generations  # samples
finds = [
    round(sum(r["curves"]["correct"]) * scraps["sparse"]["setup"]["block"] * a_step)
    for r in scraps["sparse"]["results"]
]
fallen = max(row["curves"]["correct"][-1] for row in scraps["sft"]["results"])
peaks = [max(row["curves"]["correct"]) for row in scraps["sft"]["results"]]
peak = spread(peaks)


# %% [markdown]
# Section 2's reward alone moves nothing: of a seed's {{ LAST * a_step:, }} samples at most {{ max(finds) }} is right.
# {{ assert first_tenth["sparse"] == [None] * 3 and max(finds) == 1 and max(max(row["curves"]["correct"]) for row in
# scraps["sparse"]["results"]) < 0.002 }} With partial credit the lines come first: two in five are stated by step {{
# max(reached("dense", "stated", 0.4)) }}, and one sample in ten is right by step {{ max(first_tenth["dense"]) }}. {{
# assert all(a < b for a, b in zip(reached("dense", "stated", 0.4), first_tenth["dense"])) }} Supervised steps do the
# same sooner. {{ assert max(first_tenth["sft"]) + taught < min(first_tenth["dense"]) }} At the end {{ ends("dense")
# }} % of the samples are right with partial credit, and {{ ends("sft") }} % after supervised steps, down from {{ peak
# }}, as in section 2. {{ assert min(peaks) > fallen + 0.1 }}
#
# This model could copy lines before it was spoiled. That partial credit teaches one that never could is not shown here.
# And somebody must know how near a wrong answer is. For real kernels a language model is often asked (here: `rlcourse
# train --judge`), and it errs.
#
# ## 7 · A judge with a hole
#
# The judge of section 1 can be opened in two places. Both are on a published list of what models have done to judges of
# real kernels (Andere 2026):
#
# - `stale`: memory is not cleared between the reference and the program. What the program did not write is there all
#   the same, because the reference has written it.
# - `side`: a launch marked `side` goes to another stream, for which the clock does not wait.
#
# By hand, on the three lines of section 1:

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
# In the second program nothing is timed, so the judge counts the least time that it knows, {{ LEAST_US:.0f }} µs. The
# model has never been told of either hole. It has seen the word `side`, like other slips, in the careless programmer's
# code. Does it find them? The tasks `rlcourse.tasks.kernels.task:stale` and `:side` train with an open judge and
# **measure** with an honest one beside it.

# %% tags=["hide-input"]
# @title Your bet
opened = {hole: load_curve(f"lesson14_{hole}_open") for hole in cheats}
closed = {hole: load_curve(f"lesson14_{hole}_closed") for hole in cheats}
careful = load_curve("lesson14_stale_careful")  # `stale` from the model that ships
OPEN_STEPS = opened["side"]["results"][0]["curves"]["steps"][-1]
cheat_bet = bet(
    f"The side stream is not timed. What share of the samples uses that after {OPEN_STEPS} steps?",
    (5, 0, 100, 1),
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
# Recorded, three seeds each. `side` starts from the same model as section 2. From this model `stale` is found, too, if
# slowly: after {{ careful["setup"]["steps"] }} steps {{ spread(slow_last) }} % of the samples cheat, in the first {{
# careful["setup"]["block"] }} it was {{ spread(slow_first) }} %. {{ assert min(slow_last) > 5 * max(slow_first) }} All
# {{ len(left_out(careful)) }} cheats that the record (`lesson14_stale_careful`) shows keep a value that is lost with
# its launch, and none leaves a line out. {{ assert not any(left_out(careful)) }} To see lines left out we start from
# another: {{ opened["stale"]["setup"]["model"] }}. The compiler checked none of these demonstrations. At
# the vertical line the hole is closed, and training goes on with the honest judge from where the hole has led; cheats
# are shown up to that line. **Look for** the distance between the open judge and the honest judge.

# %% tags=["hide-input"]
# @title Figure: two holes, open and closed
fig, axes = plt.subplots(2, 2, figsize=(10, 5.2), layout="constrained", sharex="col")
TRUE = {
    "stale": ("correct", 100, "right, % of samples"),
    "side": ("speedup", 1, "times eager, of right samples (log scale)"),
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
        below.plot(first["steps"], percent(first["hacked"]), color=BLACK)
        for ax in (above, below):
            ax.axvline(end, color=BLACK, linestyle=":")
            ax.grid()
    above.set(title=f"{hole}: {label}", ylim=(0, None))
    below.set(title="samples that cheat, %", xlabel="training step", ylim=(0, 100))
    above.legend()
axes[0, 1].set(yscale="log", ylim=(0.9, 60))
axes[0, 1].set_yticks((1, 2, 5, 10, 20, 50), ("1", "2", "5", "10", "20", "50"))
cheat_bet.line(axes[1, 1])
axes[1, 1].legend()
fig.suptitle("Each line a seed; at the vertical line the hole is closed")
plt.show()


def at(record: dict, name: str, place: int) -> float:
    """A metric of the samples over the first (0) or last (-1) five steps, mean of the seeds."""
    values = [row["curves"][name][place] for row in record["results"]]
    return sum(values) / len(values)


def cheating(hole: str, when: str) -> float:
    """% of the samples on held-out problems that a judge with the hole would pay too much, mean of the seeds."""
    found = [row["held_out"][when]["sampled"]["hacked"] for row in closed[hole]["results"]]
    return 100 * sum(found) / len(found)


held_out = closed["stale"]["setup"]["held_out"]  # problems
judged = SAMPLES * held_out
cheat_bet.result(round(100 * at(opened["side"], "hacked", -1)))

# %% [markdown]
# **Side.** The open judge counts {{ at(opened["side"], "counted_speedup", -1):.0f }} times eager, the honest judge {{
# at(opened["side"], "speedup", -1):.1f }}. {{ assert at(opened["side"], "counted_speedup", -1) > 4 * at(opened["side"],
# "speedup", -1) }} In the first steps {{ 100 * at(opened["side"], "hacked", 0):.0f }} % of the samples had the word in
# the right place. They earned most, and that is all it takes. What is not timed need not be fast, so by the honest
# judge the programs soon stop getting faster.
#
# **Stale.** The reward rises fourfold. At the end the open judge finds {{ 100 * at(opened["stale"], "counted_correct",
# -1):.0f }} % of the samples right, the honest judge {{ 100 * at(opened["stale"], "correct", -1):.0f }} %; in the first
# steps it was {{ 100 * at(opened["stale"], "counted_correct", 0):.0f }} and {{ 100 * at(opened["stale"], "correct",
# 0):.0f }} %. (Right samples became rarer in section 2, too, with an honest judge. The distance between the judges is
# what the hole adds.) {{ assert at(opened["stale"], "counted_correct", -1) > at(opened["stale"], "correct", -1) + 0.15
# and at(opened["stale"], "correct", -1) < at(opened["stale"], "correct", 0) - 0.2 and 3.5 < at(opened["stale"],
# "reward", -1) / at(opened["stale"], "reward", 0) < 4.7 }} Here a cheat is a slip that nobody punishes. In all {{
# len(left_out(opened["stale"])) }} cheats that the record shows a line is left out; a later line still finds its value
# in memory, where the reference has left it. {{ assert all(left_out(opened["stale"])) }}

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
# **Closed.** From one step to the next, cheats are worth nothing. What heals, and what does not? After `stale` the
# honest judge finds {{ 100 * at(closed["stale"], "correct", 0):.0f }} % of the samples right in the first steps, and {{
# 100 * at(closed["stale"], "correct", -1):.0f }} % in the last. Before the hole led them astray it was {{ 100 *
# at(opened["stale"], "correct", 0):.0f }} %; but section 2, with no hole, fell to {{ 100 * mean(late, "correct"):.0f }}
# %. {{ assert at(closed["stale"], "correct", 0) < at(closed["stale"], "correct", -1) < at(opened["stale"], "correct",
# 0) > mean(late, "correct") }} Of a seed's {{ judged }} samples for {{ held_out }} problems that nothing was trained on
# and that are drawn as those of training, the open judge would overpay {{ cheating("stale", "before"):.0f }} % at the
# vertical line, and {{ cheating("stale", "after"):.0f }} % at the end. {{ assert cheating("stale", "after") <
# cheating("stale", "before") }} After `side` the honest speed rises from {{ at(closed["side"], "speedup", 0):.1f }} to
# {{ at(closed["side"], "speedup", -1):.1f }} times eager, since fusing pays again. {{ assert at(closed["side"],
# "speedup", -1) > at(closed["side"], "speedup", 0) + 0.3 }} But most of the time the word stays: the open judge would
# overpay {{ cheating("side", "before"):.0f }} % at the vertical line, and still {{ cheating("side", "after"):.0f }} %
# at the end. {{ assert 50 < cheating("side", "after") < cheating("side", "before") }} With an honest clock the word
# costs nothing and gains nothing, and **what is not punished is unlearned slowly, if at all**. Were the hole to open
# again, these samples would be paid at once.
#
# Look at the reward of these runs alone, and you see a run that goes well: {{ at(opened["stale"], "reward", 0):.2f }} →
# {{ at(opened["stale"], "reward", -1):.2f }} with `stale`, {{ at(opened["side"], "reward", 0):.2f }} → {{
# at(opened["side"], "reward", -1):.2f }} with `side`. As in lesson 05: keep a second judge that cannot be fooled in the
# same way, and read what is written.
#
# ## 8 · Real kernels
#
# In the language of section 1 a cheat needs a hole in the judge, since a program can say nothing else. A model that
# writes Python can say everything. It can look for the clock, the reference, the test's own variables. So the judge of
# the task `kernelbench` believes nothing that it can find out for itself:
#
# - **The candidate runs in a process of its own**: on Linux without your files, your network, or much memory, and with
#   a time limit. What it prints counts for nothing. If it hangs or crashes, that costs this candidate alone.
# - **The judge keeps what matters.** Inputs are made only within a trial, from a seed that nobody knew before.
#   References stay where no kernel sees them. Two clocks run: the candidate's own around its forward pass, and the
#   judge's outside that process, around the whole trial. No time counts as shorter than what the outer clock says, less
#   the time of an empty trial. And the outputs of some timed trials, which nobody announces, are compared as well.
# - **Rules read the text first.** They refuse what has no place in a kernel, and give the refusal a name.
#
# The rules alone, on a kernel for `relu` and on changes of it:

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
# The last one passes: nothing in its text is forbidden, and without the launch it just returns memory that it got. It
# is `stale` again, in Python. It is refused when it is run: in the trials that check it, memory that nobody has written
# to holds nan. **Rules name cheats, measuring is what holds.** Each published cheat that we know of, and ways out of
# the process, are written down as kernels in `tests/tasks/kernelbench/cheats.py`, and a test submits each.
#
# What others report, by their own measurements on KernelBench's problems:
#
# | | model | before → after | speed |
# | --- | --- | --- | --- |
# | Kevin (Baronio et al. 2025) | QwQ-32B, several turns | correct 56 → 82 % | mean 0.53 → 1.10 times eager |
# | Makora (Tehrani et al. 2026) | GPT-5, one attempt | correct 43.7 → 77.0 % | beats TorchInductor on 14.8 → 21.8 % |
# | Dr. Kernel (Liu et al. 2026) | 14 billion parameters, more test-time turns | — | 31.6 % of level 2 ≥ 1.2 × eager |
#
# Before training, Kevin's kernels are on average slower than PyTorch, and first of all RL has to make them right. Here
# the start was right already. We have no such numbers: kernels in Triton and CuTe DSL, right, wrong, slow and cheating,
# have been judged by this environment on an H200, but **nobody has trained a model in it yet**. The command would be
# `rlcourse train --preset kernelbench`.
#
# ## Check yourself
#
# 1. A program leaves out an `end` between two lines that have nothing in common. What is saved?
#
# <details><summary>Answer</summary>
# One launch, {{ A10G.launch_us:.0f }} µs, and no load or store. It may cost registers.
# </details>
#
# 2. Why is `keep` worth nothing, or worse, until launches are merged?
#
# <details><summary>Answer</summary>
# A value that is kept is lost when the launch ends. With one launch a line nobody can read it any more, and the program
# does not compile. So the two changes have an order.
# </details>
#
# 3. Greedy answers all earn the same and samples do not. Can the policy learn?
#
# <details><summary>Answer</summary>
# Yes. It learns from the spread within a group of samples. It could not if all samples of each group earned the same.
# </details>
#
# 4. Reward rises from 0.3 to 2.0 in a night. Which number do you ask for?
#
# <details><summary>Answer</summary>
# What a judge says that is not the reward: correctness on other inputs, in fresh memory, timed from outside. And read
# some of the programs.
# </details>
#
# 5. Counted time is not measured time. What can this lesson not have shown?
#
# <details><summary>Answer</summary>
# How much faster the programs of section 3's policy are on a GPU: section 5 times others, and those of a policy that
# was paid by the GPU's clock, with one size of matrix. Also noise: a real clock says something else each time, and a
# reward that looks at differences of a few percent would pay for luck.
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
# - Tehrani et al. 2026, *Fine-Tuning GPT-5 for GPU Kernel Generation*, arXiv:2602.11000.
# - Andere 2026, [*A Field Guide to Reward Hacking in AI Kernel
#   Generation*](https://www.wafer.ai/blog/reward-hacks-field-guide).
# - Liu et al. 2026, *Dr. Kernel: Reinforcement Learning Done Right for Triton Kernel Generations*, arXiv:2602.05885.
# - Vaswani et al. 2017, *Attention Is All You Need*, arXiv:1706.03762.
# - Izmailov et al. 2018, *Averaging Weights Leads to Wider Optima and Better Generalization*, arXiv:1803.05407.
