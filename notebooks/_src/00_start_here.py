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
# - what this machine can run, and the command that installs what is missing;
# - the parts of one training step, in order, and the file that implements each;
# - the task and the small model that come with the course, and exactly how the model fails;
# - to tell apart greedy answers, samples and pass@k, and to estimate pass@k without bias;
# - what reinforcement learning changes here: three things at once, and how much each contributes.
#
# You need Python and some PyTorch, but no GPU, network or reinforcement learning.
#
# **This course** teaches a language model to reason, with reinforcement learning, and makes the training fast. It runs
# on a laptop, with a task and a model that come with the package; a GPU makes it bigger, not different. In lesson 01
# you write the training loop, five short functions, and keep it. Lessons 02 to 05 change it, one or two functions at a
# time, into PPO, GRPO and Dr. GRPO. The rest is about speed, down to GPU kernels that you write (lessons 08 to 10).
#
# Run the cells from top to bottom; change the numbers in a cell and run it again as you like. Where a lesson asks for
# **a bet**, place one before you go on: you'll remember what surprised you. Code that only draws is folded away. The
# symbols of the whole course are listed at the end.

# %%
import itertools
import math
import re
import tempfile
from collections import Counter
from pathlib import Path
from statistics import fmean

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown, display

from rlcourse.config import make_config
from rlcourse.course import pick
from rlcourse.course.widgets import bet
from rlcourse.evaluation import load_all
from rlcourse.measure.plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION

torch.manual_seed(0)
print("problems asked below:", pick(smoke=80, full=1000))

# %% [markdown]
# ## 1 · Your machine
#
# `rlcourse doctor`, typed in a terminal, prints what is installed and what is missing. On a CPU you
# need only what's marked *required*.

# %% tags=["hide-input"]
# @title Table: this machine
from rlcourse.doctor import gather
from rlcourse.measure.machine import format_bytes

facts = gather()
this = facts["machine"]
rows = {
    "processor": f"{this['cpu']}, {this['cores']} cores",
    "memory": "unknown" if this["memory_bytes"] is None else format_bytes(this["memory_bytes"]),
    "GPU": ", ".join(gpu["name"] for gpu in this["gpus"]) or "none",
    "versions": ", ".join(f"{name} {version}" for name, version in this["versions"].items()),
}
display(Markdown("| | |\n| --- | --- |\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items())))

# %% tags=["hide-input"]
# @title Table: what is here and what is missing
lines = ["| | what | | found | to get it |", "| --- | --- | --- | --- | --- |"]
for check in facts["checks"]:
    mark, need = "✅" if check["ok"] else "—", "required" if check["required"] else ""
    mend = f"`{check['mend']}`" if check["mend"] else ""
    lines.append(f"| {mark} | {check['name']} | {need} | {check['detail']} | {mend} |")
display(Markdown("\n".join(lines)))
assert all(check["ok"] for check in facts["checks"] if check["required"]), "run the commands of the last column"

# %% [markdown]
# ## 2 · The map
#
# Reinforcement learning (RL) for a language model is one loop. The model answers some problems, each several times. A
# program checks the answers. Those that did better than the others to the same problem become more probable, the rest
# less so. Then it all starts over, with the updated model.
#
# Each box below names the files of `rlcourse` that implement it.

# %% tags=["hide-input"]
# @title Figure: the map
STAGES = ["problems", "answers", "rewards", "advantages", "loss", "new weights"]
FILES = ["tasks/", "rollout/", "tasks/verify.py", "advantages.py", "logprobs.py\nlosses.py", "train.py"]
fig, ax = plt.subplots(figsize=(12, 2.4))
for i, (what, file) in enumerate(zip(STAGES, FILES, strict=True)):
    ax.add_patch(plt.Rectangle((i * 2, 0), 1.65, 1, facecolor=SKY, alpha=0.3, edgecolor=BLUE, linewidth=1.5))
    ax.text(i * 2 + 0.825, 0.68, what, ha="center", va="center", fontsize=11, weight="bold")
    ax.text(i * 2 + 0.825, 0.28, file, ha="center", va="center", fontsize=9, family="monospace")
    if i:
        ax.annotate("", (i * 2, 0.5), (i * 2 - 0.35, 0.5), arrowprops={"arrowstyle": "->", "linewidth": 1.8})
back = {"arrowstyle": "->", "linewidth": 1.8, "color": VERMILION, "connectionstyle": "angle,angleA=-90,angleB=0,rad=8"}
ax.annotate("", (6.4, -0.55), (10.82, 0), arrowprops=back | {"arrowstyle": "-"})
ax.annotate("", (2.82, 0), (6.5, -0.55), arrowprops=back | {"connectionstyle": "angle,angleA=0,angleB=90,rad=8"})
ax.text(6.75, -0.42, "the next step samples with the new weights (train.py)", ha="center", color=VERMILION)
ax.set(xlim=(-0.2, 11.7), ylim=(-0.75, 1.1), title="One training step: train.py")
ax.axis("off")
plt.show()

# %% [markdown]
# Lesson 01 writes this as a loop that fits on a screen. Lessons 02 to 04 change two boxes, advantages and loss. Lessons
# 06 to 11 are about making the box "answers" fast, lesson 12 about the boxes after it.

# %% tags=["hide-input"]
# @title Table: the lessons
from rlcourse.course.contents import COURSE

lines = ["| | lesson | difficulty | what's in it |", "| --- | --- | --- | --- |"]
for name, lesson in COURSE.items():
    dots = "●" * lesson.difficulty + "○" * (5 - lesson.difficulty)
    lines.append(f"| {name[:2]} | [{lesson.title}]({name}.ipynb) | {dots} | {lesson.holds} |")
display(Markdown("\n".join(lines)))

# %% [markdown]
# ## 3 · The task
#
# `minigsm` is a set of word problems that the course makes from templates, in the format of GSM8K (Cobbe et al. 2021).
# Its *level* is the number of calculations that a problem takes, from one to four. Each problem has a worked answer,
# which ends in a line `#### NUMBER`. Here is one of each level.

# %%
from rlcourse.tasks import load_task

task = load_task("minigsm")
test = task.problems("test")
for level in (1, 2, 3, 4):
    problem = next(p for p in test if p.level == level)
    print(f"LEVEL {level}  {problem.question}\n{problem.answer}\n")

# %% [markdown]
# A problem's template and numbers decide which split it belongs to. So no problem is in two splits, not even with the
# names changed: nobody can pass the test by memorizing.

# %%
for split in ("train", "validation", "test"):
    levels = Counter(problem.level for problem in task.problems(split))
    print(f"{split:10} {len(task.problems(split)):5} problems, by level {dict(sorted(levels.items()))}")
questions = [{p.question for p in task.problems(split)} for split in ("train", "validation", "test")]
assert not any(a & b for a, b in itertools.combinations(questions, 2))

# %% [markdown]
# The *verifier* reads the final number of an answer and compares it with the right one, called *gold*. There are two
# readings. The strict one wants the line `#### NUMBER`. The lenient one takes the last number, however it is announced.

# %%
for text in ("2+3=5\n#### 5", "The answer is 5.", "2+3=6\n#### 6", "#### five"):
    verdict = task.verify(text, gold="5")
    print(f"{text!r:24} strict {verdict.strict!s:6} lenient {verdict.lenient!s:6} number read: {verdict.answer}")

# %% [markdown]
# ## 4 · The model
#
# The model that comes with the course is a Qwen2, the architecture of Qwen2.5, made very small. It learned to calculate
# from clean worked answers. Then it was trained briefly on demonstrations of uneven quality, like text from the web.
# Some showed their working, a few of them with a slip in the arithmetic. Some guessed. Some gave the answer in words,
# which the strict reading rejects. And some contained **filler**, lines that say nothing: "Let me think.", or "Let me
# check: 3+4=7." where nothing was in doubt. The model picked up all of these habits, some of them badly.

# %%
config = make_config("laptop")
policy, engine, task = load_all(config)  # the model with its tokenizer; what generates answers; problems and verifier
shape = policy.model.config
print(f"{sum(p.numel() for p in policy.model.parameters()):,} parameters: {shape.num_hidden_layers} layers,", end=" ")
print(f"hidden size {shape.hidden_size}, {shape.vocab_size} tokens in the vocabulary")
prompt = policy.prompt(test[1].question)
print("\nthe prompt as tokens:\n" + " ".join(repr(policy.tokenizer.decode([token])) for token in prompt))

# %% [markdown]
# A number is read and written digit by digit, the leading digit first: in 16+15=31 the model must foresee the carry
# before it writes the 3.
#
# The first token of an answer is a choice. `####` means that the model guesses: the number comes next. A name means
# that it begins to show its working. **Look for** how the probability of `####` grows with the level. The
# demonstrations did the same: the longer the working, the more often they skipped it.


# %%
@torch.no_grad()
def first_token(problem) -> torch.Tensor:
    """Probability of every token as the first of the answer: [vocabulary]."""
    logits = policy.model(torch.tensor([policy.prompt(problem.question)])).logits
    return logits[0, -1].softmax(-1)


[GUESS] = policy.tokenizer("####")["input_ids"]
by_level = {level: [p for p in test if p.level == level][: pick(5, 50)] for level in (1, 2, 3, 4)}
first = {level: torch.stack([first_token(p) for p in problems]) for level, problems in by_level.items()}
guess = [first[level][:, GUESS].mean().item() for level in first]

# %% tags=["hide-input"]
# @title Figure: guesses by level
fig, ax = plt.subplots(figsize=(6, 3))
bars = ax.bar([f"level {level}" for level in first], [100 * g for g in guess], color=ORANGE, width=0.6)
ax.bar_label(bars, fmt="%.0f%%", padding=2)
ax.set(ylim=(0, 100), ylabel="probability of ####, %", title="How likely the model is to guess without working")
plt.show()

# %% [markdown]
# ## 5 · Greedy answers
#
# *Greedy* means: take the most probable token each time. There's no randomness, and it's how a finished model is
# usually measured.

# %%
from rlcourse.evaluation import answer_problems, summarize

problems = test[: pick(80, 1000)]
greedy = [answers[0] for answers in answer_problems(policy, engine, task, problems, max_new_tokens=80)]
summary = summarize([greedy])
print(f"right {summary['accuracy']:.1%}, by the lenient reading {summary['accuracy_lenient']:.1%}\n")
for answer in greedy[:5]:
    print(f"{answer.problem.question}  (gold {answer.problem.gold})\n{answer.text}\n{'✓' if answer.strict else '✗'}\n")

# %% [markdown]
# What goes wrong? Sort the answers into five kinds. Checking a calculation such as
# `155/5=33` on its own tells wrong arithmetic from a wrong plan.

# %%
OPERATIONS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / max(b, 1),
}
KINDS = {
    "right": GREEN,
    "guess, no working": ORANGE,
    "working, wrong arithmetic": VERMILION,
    "working, wrong plan": PURPLE,
    "unreadable": BLACK,
}


def calculations(text: str) -> list[bool]:
    """Each `a+b=c` in a text: is it true?"""
    found = re.findall(r"(\d+)([-+*/])(\d+)=(\d+)", text)
    return [OPERATIONS[op](int(left), int(right)) == int(result) for left, op, right, result in found]


print(calculations("Zoe fills 155/5=33 packs. She has 33+2=35 packs."))


# %%
def kind(answer) -> str:
    """The kind of an answer, a key of KINDS."""
    if answer.strict:
        return "right"
    if not answer.formatted:  # no line "#### NUMBER", or cut off
        return "unreadable"
    checked = calculations(answer.text)
    if not checked:
        return "guess, no working"
    return "working, wrong plan" if all(checked) else "working, wrong arithmetic"


for wanted in KINDS:
    example = next((a for a in greedy if kind(a) == wanted), None)
    if example:
        print(f"{wanted.upper()} (gold {example.problem.gold}): {example.text!r}")


# %% tags=["hide-input"]
# @title Figure: kinds of greedy answers


def stacked(ax, answers, title: str) -> None:
    """Kinds of answers by level, as shares that add up to 100%."""
    for level in (1, 2, 3, 4):
        counts = Counter(kind(a) for a in answers if a.problem.level == level)
        left = 0.0
        for name, color in KINDS.items():
            share = 100 * counts[name] / max(1, sum(counts.values()))
            ax.barh(f"level {level}", share, left=left, color=color, label=name if level == 1 else None)
            if share >= 8:
                ink = BLACK if color in (ORANGE, PURPLE) else "white"
                ax.text(left + share / 2, level - 1, f"{share:.0f}", ha="center", va="center", color=ink)
            left += share
    ax.invert_yaxis()
    ax.set(xlim=(0, 100), xlabel="share of answers, %", title=title)


fig, ax = plt.subplots(figsize=(8, 3.4), layout="constrained")
stacked(ax, greedy, f"Greedy answers to {len(greedy)} test problems")
right_if_working = fmean(a.strict for a in greedy if calculations(a.text))
fig.legend(loc="outside lower center", ncols=3, fontsize=9)
plt.show()

# %% [markdown]
# The greedy answers have one main weakness: on hard problems the model **guesses**. At level 4 `####` was barely
# likelier than not, but greedy takes the likelier branch every time. Where the model shows its working, it's right {{
# 100 * right_if_working:.0f }}% of the time. {{ assert right_if_working > 0.7 }} So it looks as if it only had to stop
# guessing. Remember this picture, and don't believe it yet: {{ 100 * fmean(a.problem.level < 3 for a in greedy if
# calculations(a.text)):.0f }}% of the answers with working are to problems of level 1 or 2, and training never sees a
# greedy answer. {{ assert fmean(a.problem.level < 3 for a in greedy if calculations(a.text)) > 0.6 }}
#
# ## 6 · Samples
#
# Training *samples*: each token is drawn with the probability that the model gives it (at *temperature* 1, that is). So
# one problem gets many different answers, and only where answers differ can one be better than another.

# %% tags=["hide-input"]
# @title Your bet
few = test[: pick(16, 240)]
greedy_share = summarize([greedy[: len(few)]])["accuracy"]
sampled_bet = bet(
    f"{greedy_share:.0%} of the greedy answers to {len(few)} test problems are right. What share of samples is right, "
    "on the same problems? (You win between the lowest and the highest of three runs.)",
    (0, 100, 1),
    unit="%",
)

# %%
runs = [answer_problems(policy, engine, task, few, 80, config.sampling, num_generations=16, seed=s) for s in (0, 1, 2)]
samples = runs[0]
flat = [answer for answers in samples for answer in answers]
sampled_share = summarize(samples)["accuracy"]
sampled_bet.result([100 * summarize(run)["accuracy"] for run in runs])

# %% [markdown]
# {{ assert sampled_share < greedy_share / 2 }} A greedy answer is right {{ greedy_share / sampled_share:.0f }} times as
# often as a sample. What goes wrong? Here are sixteen samples of one problem.

# %%
problem = next(p for p in test if p.level == 2)
[sixteen] = answer_problems(policy, engine, task, [problem], 80, config.sampling, num_generations=16)
print(f"{problem.question}  (gold {problem.gold})\n")
for answer in sixteen:
    print("✓" if answer.strict else "✗", answer.text.replace("\n", " ⏎ "))

# %% [markdown]
# Some of that is **garbage**: text like none of the demonstrations, with words that don't belong together or a token
# that isn't a letter at all (�). Much of it is scrambled filler: the model knows the words but not their order. {{
# assert sum("think" in a.text or "check" in a.text for a in sixteen) > 1 }} A small model never quite
# rules out nonsense. The risk per token is small, but these answers have {{
# fmean(len(policy.tokenizer(a.text)["input_ids"]) for a in sixteen):.0f }} tokens on average, and one slip usually
# spoils the rest. Greedy answers hardly ever show it.
#
# So a sample can go wrong in three ways, and its text tells which:
#
# - it isn't **clean**: one of its lines is garbage, or it never ends;
# - it's clean, and it makes the wrong **choice**: it guesses;
# - it's clean and shows its working, and the **arithmetic** is wrong: a number is off. (A wrong plan counts here, too.)

# %%
from rlcourse.course.lessons.gain import count  # how many samples of each level are of each kind
from rlcourse.course.lessons.gain import kind as kind_of_sample  # "garbage", "guess", "worked"; "words": no end to read
from rlcourse.course.lessons.gain import levels as factors_by_level  # from the counts, the three shares of each level

for answer in sixteen[:8]:
    print(f"{kind_of_sample(answer):8}", "✓" if answer.strict else "✗", answer.text.replace("\n", " ⏎ "))

# %% [markdown]
# Now count these over all {{ len(flat) }} samples. **Look for** how little is green on the left, and on the right for
# why there's hope.

# %% tags=["hide-input"]
# @title Figure: kinds of samples, and working pays
SORTS = {
    "working, right": (GREEN, lambda a: kind_of_sample(a) == "worked" and a.strict),
    "clean, a guess": (ORANGE, lambda a: kind_of_sample(a) in ("guess", "words")),  # hardly any clean one ends in words
    "working, wrong arithmetic": (VERMILION, lambda a: kind_of_sample(a) == "worked" and not a.strict),
    "garbage": (BLACK, lambda a: kind_of_sample(a) == "garbage"),
}
fig, axes = plt.subplots(1, 2, figsize=(11, 3.6), width_ratios=(3, 2), layout="constrained")
accuracy = {}
for level in (1, 2, 3, 4):
    here, left = [a for a in flat if a.problem.level == level], 0.0
    for name, (color, belongs) in SORTS.items():
        part = 100 * fmean(map(belongs, here))
        axes[0].barh(f"level {level}", part, left=left, color=color, label=name if level == 1 else None)
        if part >= 6:
            ink = BLACK if color == ORANGE else "white"
            axes[0].text(left + part / 2, level - 1, f"{part:.0f}", ha="center", va="center", color=ink)
        left += part
    for name, kinds in (("that guess", ("guess",)), ("with clean working", ("worked",))):
        chosen = [a.strict for a in here if kind_of_sample(a) in kinds]
        accuracy[name, level] = sum(chosen) / max(1, len(chosen))
axes[0].invert_yaxis()
axes[0].set(xlim=(0, 100), xlabel="share of samples, %", title=f"{len(flat)} samples at temperature 1")
for offset, (name, color) in enumerate((("that guess", ORANGE), ("with clean working", BLUE))):
    heights = [100 * accuracy[name, level] for level in (1, 2, 3, 4)]
    places = [level + (offset - 0.5) * 0.38 for level in (1, 2, 3, 4)]
    bars = axes[1].bar(places, heights, width=0.36, color=color, label=f"samples {name}")
    axes[1].bar_label(bars, fmt="%.0f", padding=2, fontsize=9)
worked = Counter(a.problem.level for a in flat if kind_of_sample(a) == "worked")
axes[1].set_xticks((1, 2, 3, 4), [f"{level}\n({worked[level]})" for level in (1, 2, 3, 4)])
axes[1].set(ylabel="right, %", xlabel="level (samples with clean working)", title="Working pays", ylim=(0, 100))
axes[1].legend()
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=4, fontsize=9)
plt.show()
garbage_right = fmean(a.strict for a in flat if kind_of_sample(a) == "garbage")
greedy_garbage = fmean(kind_of_sample(a) == "garbage" for a in greedy)
worked_right = fmean(a.strict for a in flat if kind_of_sample(a) == "worked")
levels = factors_by_level(count(flat))
clean_at, choice_at, right_at = zip(*(found.factors for found in levels), strict=True)

# %% [markdown]
# Here is the fact on which the course rests: **working pays**. {{ assert all(accuracy["with clean working", l] >
# accuracy["that guess", l] for l in (1, 2, 3)) }} Reward right answers, and you make working likelier and garbage
# rarer, although the reward mentions neither. (Level 3 beats level 2 on few samples.) {{ assert worked[3] < 100 }}
#
# A sample is right if it passes all three tests, one after the other, so the shares multiply:
#
# $$P(\text{right}) = P(\text{clean}) \cdot P(\text{working} \mid \text{clean}) \cdot
#   P(\text{right} \mid \text{clean working}) + \text{luck} ,$$
#
# where luck is what guesses and garbage get right anyway. At level 1 that's {{ levels[0].factors[0]:.2f }} × {{
# levels[0].factors[1]:.2f }} × {{ levels[0].factors[2]:.2f }} + {{ levels[0].luck:.2f }} = {{ levels[0].accuracy:.2f
# }}, at level 4 {{ levels[3].factors[0]:.2f }} × {{ levels[3].factors[1]:.2f }} × {{ levels[3].factors[2]:.2f }} + {{
# levels[3].luck:.2f }} = {{ levels[3].accuracy:.2f }}: garbage is about as frequent, choice and arithmetic are far
# worse. {{ assert max(clean_at) - min(clean_at) < 0.15 and choice_at[0] > 2 * choice_at[3] and right_at[0] > 2 *
# right_at[3] and sum(kind_of_sample(a) == "words" for a in flat) < 0.01 * len(flat) }}
#
# ## 7 · pass@k: what is within reach
#
# The probability that **at least one** of $k$ samples is right is called pass@$k$. It says what is within reach: a
# problem that no sample ever solves teaches nothing.
#
# You have $n$ samples of a problem, and $c$ of them are right. What is pass@$k$ for $k \le n$? Draw $k$ of the $n$
# without replacement. All $k$ are wrong in $\binom{n-c}{k}$ of $\binom{n}{k}$ ways, so (Chen et al. 2021, equation 1)
#
# $$\text{pass@}k = 1 - \binom{n-c}{k} \Big/ \binom{n}{k} .$$
#
# By hand: six samples, two right, all the ways to draw three.


# %%
def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that one of k samples, drawn from n of which c are right, is right."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


flags = [True, True, False, False, False, False]
draws = [any(draw) for draw in itertools.combinations(flags, 3)]
print(
    f"counted: {sum(draws)} of {len(draws)} draws = {sum(draws) / len(draws):.3f}   formula: {pass_at_k(6, 2, 3):.3f}"
)

# %% [markdown]
# The tempting shortcut is to estimate $\hat p = c/n$ and take $1 - (1-\hat p)^k$. It is **biased**: averaged over the
# possible values of $c$, it's too low. Since $c$ is binomial, we can compute both averages exactly, here for a problem
# whose samples are right with probability 0.1. **Look for** how the gap grows with $k$.


# %%
def mean_over_c(estimate, n: int, p: float) -> float:
    """Mean of estimate(c) when each of n samples is right with probability p."""
    return sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * estimate(c) for c in range(n + 1))


n, p, ks = 16, 0.1, range(1, 17)
truth = [1 - (1 - p) ** k for k in ks]
formula = [mean_over_c(lambda c, k=k: pass_at_k(n, c, k), n, p) for k in ks]
shortcut = [mean_over_c(lambda c, k=k: 1 - (1 - c / n) ** k, n, p) for k in ks]

# %% tags=["hide-input"]
# @title Figure: two estimates of pass@k
fig, ax = plt.subplots(figsize=(6, 3.2))
ax.plot(ks, truth, color=BLACK, linewidth=5, alpha=0.25, label="truth, $1-(1-p)^k$")
ax.plot(ks, formula, color=BLUE, marker="o", markersize=4, label="mean of the formula")
ax.plot(ks, shortcut, color=VERMILION, linestyle="--", marker="s", markersize=4, label="mean of the shortcut")
ax.set(xlabel="k", ylabel="pass@k", ylim=(0, 1), title=f"A problem solved with p = {p}, from n = {n} samples")
ax.legend()
plt.show()
assert torch.allclose(torch.tensor(formula), torch.tensor(truth))

# %% [markdown]
# Now our model. About one in ten of its samples is right, too: {{ 100 * sampled_share:.1f }}% on average. {{
# assert abs(sampled_share - p) < 0.02 }}

# %% tags=["hide-input"]
# @title Your bet
reach_bet = bet(
    f"Each of the {len(few)} problems has sixteen samples. For what share of the problems is at least one right? "
    "(Again, three runs.)",
    (0, 100, 1),
    unit="%",
)

# %%
from rlcourse.evaluation import mean_pass_at_k
from rlcourse.evaluation import pass_at_k as package_pass_at_k

assert all(package_pass_at_k(16, c, k) == pass_at_k(16, c, k) for c in range(17) for k in ks)
reach_bet.result([100 * mean_pass_at_k(run)["pass@16"] for run in runs])
print({k: f"{v:.1%}" for k, v in mean_pass_at_k(samples).items()})

# %% [markdown]
# By level, **look for** the curves that are still climbing at 16.

# %% tags=["hide-input"]
# @title Figure: pass@k by level
fig, ax = plt.subplots(figsize=(6.5, 3.4))
for level, color, marker in zip((1, 2, 3, 4), (BLUE, GREEN, ORANGE, VERMILION), "osD^", strict=True):
    curve = mean_pass_at_k([answers for answers in samples if answers[0].problem.level == level])
    ax.plot([1, 2, 4, 8, 16], [100 * v for v in curve.values()], color=color, marker=marker, label=f"level {level}")
ax.set_xscale("log", base=2)
ax.set_xticks([1, 2, 4, 8, 16], [1, 2, 4, 8, 16])
ax.set(xlabel="k, samples of a problem", ylabel="pass@k, %", ylim=(0, 100), title="At least one of k samples is right")
ax.legend()
plt.show()
right_at_4 = [a for a in flat if a.strict and a.problem.level == 4]
lucky = [a for a in right_at_4 if not calculations(a.text)]

# %% [markdown]
# The curve for $p = 0.1$ said {{ 100 * truth[-1]:.0f }}% at $k = 16$, and the model gets {{ 100 *
# mean_pass_at_k(samples)["pass@16"]:.0f }}%. {{ assert truth[-1] > mean_pass_at_k(samples)["pass@16"] + 0.15 }}
# Problems differ: where half the samples are right, sixteen are more than enough; where hardly any are, they're too
# few. An average hides that.
#
# And a lucky guess counts, too. No right answer is above {{ max(int(p.gold) for p in test) }}, so one of sixteen
# guesses hits it now and then. At level 4, {{ len(lucky) }} of the {{ len(right_at_4) }} right samples contain no
# working at all.
#
# ## 8 · Half a training step
#
# Here's the first half of the map as code: two problems, four answers to each, a reward per answer, and its
# **advantage**: how much better it did than its group's mean.

# %%
from rlcourse import advantages

torch.manual_seed(0)
two = [p for p in task.problems("train") if p.level == 1][:2]  # problems
rollout = engine.generate([policy.prompt(p.question) for p in two], 4, 80, config.sampling)  # answers
texts = policy.texts(rollout.completion_ids, rollout.completion_mask)
gold = [p.gold for p in two for _ in range(4)]
rewards = torch.tensor([float(task.verify(text, g).strict) for text, g in zip(texts, gold, strict=True)])  # rewards
advantage = advantages.group_centered(rewards, num_generations=4)  # advantages
print("answers   ", list(rollout.completion_ids.shape), "tokens,", rollout.completion_lengths.tolist(), "of them real")
print("rewards   ", rewards.tolist())
print("advantages", advantage.tolist())

# %% [markdown]
# ## 9 · What RL changes
#
# The other half, loss and new weights, is lesson 01. First see what the whole loop does: `rlcourse.train.train` with
# the *preset* `laptop`, a named set of settings for this model and task. **One run, one seed**: an illustration.

# %%
from rlcourse.checkpoint import latest_checkpoint
from rlcourse.train import train

quiet = {"eval_every": 0, "eval_problems": 1, "pass_k": 0, "save_every": 0}  # we ask our own questions
run = {"steps": pick(2, 30), "num_prompts": pick(4, 16), "output": tempfile.mkdtemp(), "name": "short"}
result = train(make_config(**run, **quiet))
checkpoint = latest_checkpoint(Path(result["folder"]))
trained, trained_engine, _ = load_all(make_config("laptop", model=str(checkpoint)))
after = [answers[0] for answers in answer_problems(trained, trained_engine, task, problems, max_new_tokens=80)]
share = {
    name: sum(a.strict for a in answers) / len(answers) for name, answers in (("before", greedy), ("after", after))
}
print(f"greedy answers right: {share['before']:.1%} before, {share['after']:.1%} after {run['steps']} steps")

# %% [markdown]
# The same test problems, answered greedily before and after. **Look for** what happened to the guesses.

# %% tags=["hide-input"]
# @title Figure: kinds of greedy answers, before and after
fig, axes = plt.subplots(1, 2, figsize=(11, 3.6), sharey=True, layout="constrained")
stacked(axes[0], greedy, "Before")
stacked(axes[1], after, f"After {run['steps']} steps")
axes[0].invert_yaxis()  # the axes share it, and it was turned twice
handles, labels = axes[0].get_legend_handles_labels()
fig.legend(handles, labels, loc="outside lower center", ncols=5)
plt.show()
guessed = {name: sum(kind(a) == "guess, no working" for a in found) for name, found in (("b", greedy), ("a", after))}

# %% [markdown]
# {{ assert guessed["a"] < guessed["b"] / 5 }} The guesses are gone: {{ guessed["b"] }} of {{ len(problems) }} answers
# were wrong guesses before, {{ guessed["a"] }} after. It's tempting to stop here: the model could do it all along and
# has only learned not to guess. But these are greedy answers. Training rewards **samples**, and of those only about one
# in {{ 1 / sampled_share:.0f }} was right.
#
# In longer runs with the same settings, every sample was sorted as in section 6. The share that is right rises by some
# 60 points. How much of that does each of the three factors contribute? They multiply, so it depends on the order:
# fewer guesses are worth more once garbage is rare. So go through all six orders, level by level. In each, switch the
# factors one by one to their values after training, and note what each switch adds to the product. The mean over the
# orders is a factor's contribution, its *Shapley value*.

# %% tags=["hide-input"]
# @title Your bet
PARTS = {
    "arithmetic": "arithmetic: better numbers",
    "choice": "choice: working instead of guessing",
    "clean": "clean: less garbage",
}
most = bet("Which of the three contributes most to the gain of the samples?", list(PARTS.values()))
without = bet(
    "Suppose it had gone on guessing as often as at the start, and only garbage and arithmetic had improved. "
    "Luck aside, what share of its samples would be right in the end?",
    (0, 100, 1),
    unit="%",
)

# %% [markdown]
# Left, the three factors during training. Right, what each has contributed so far; together with luck, they add up to
# the whole gain. **Look for** the factor that moves first.

# %% tags=["hide-input"]
# @title Figure: where the gain comes from
from rlcourse.course.lessons.curve_records import load_curve

# From counts of samples: `factors`, the three shares; `exchanged`, what is right if only some factors change; `split`,
# what each contributes, the mean over the six orders; `summary`, all of it as means over the seeds.
from rlcourse.course.lessons.gain import FACTORS, exchanged, factors, split, summary
from rlcourse.measure.records import provenance

gains = load_curve("lesson00_gain")
seeds = [[(e["step"], e["counts"]) for e in seed["evals"]] for seed in gains["results"]]
steps = [step for step, _ in seeds[0]]
styles = {"choice": (BLUE, "o"), "clean": (GREEN, "s"), "arithmetic": (VERMILION, "^")}
names = {"choice": "choice: working, if clean", "clean": "clean", "arithmetic": "arithmetic: right, if clean working"}
fig, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
for name, (color, marker) in styles.items():
    lines = [[100 * factors(counts)[name] for _, counts in seed] for seed in seeds]
    low, mean, high = ([f(values) for values in zip(*lines, strict=True)] for f in (min, fmean, max))
    axes[0].fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
    axes[0].plot(steps, mean, color=color, marker=marker, label=names[name])
right = [fmean(100 * seed["evals"][i]["accuracy"] for seed in gains["results"]) for i in range(len(steps))]
axes[0].plot(steps, right, color=BLACK, linestyle=":", linewidth=2.5, label="samples that are right")
axes[0].set(title="The three factors", xlabel="training step", ylabel="%", ylim=(0, 102))
axes[0].legend(loc="lower right")
parts = {
    n: [fmean(100 * split(s[0][1], s[i][1])[n] for s in seeds) for i in range(len(steps))] for n in (*styles, "luck")
}
areas = axes[1].stackplot(steps, [parts[n] for n in parts], colors=[BLUE, GREEN, VERMILION, PURPLE], alpha=0.75)
axes[1].set(
    title="What they have contributed", xlabel="training step", ylabel="points", xlim=(0, steps[-1]), ylim=(0, 80)
)
axes[1].legend(areas[::-1], ["luck", "arithmetic", "clean", "choice"], loc="upper left", ncols=2)
told = summary(gains)
most.result(PARTS[max(FACTORS, key=lambda name: told[name]["points"])])
plt.show()
print(f"mean of {len(seeds)} seeds, {provenance(gains)}")
at_20 = {name: fmean(100 * factors(seed[steps.index(20)][1])[name] for seed in seeds) for name in FACTORS}

# %% tags=["hide-input"]
# @title Table: what each contributes, and how far the others get without it
ends = [(seed[0][1], seed[-1][1]) for seed in seeds]


def right_without_luck(taken) -> float:
    """Samples that are right, luck aside, in percent, if only these factors had changed: mean of the seeds."""
    return fmean(100 * exchanged(before, after, taken) for before, after in ends)


without.result([100 * exchanged(before, after, ["clean", "arithmetic"]) for before, after in ends])
lines = ["| | before | after | contributes, points | right without it, luck aside |", "| --- " * 5 + "|"]
for name in styles:
    f, others = told[name], [n for n in FACTORS if n != name]
    cells = f"{f['before']:.0%} | {f['after']:.0%} | {f['points']:.0f}"
    lines.append(f"| {name} | {cells} | {right_without_luck(others):.0f}% |")
lines.append(f"| luck | | | {told['luck']['points']:.0f} | |")
total = told["accuracy"]
cells = f"{total['before']:.0%} | {total['after']:.0%} | {total['points']:.0f}"
lines.append(f"| **samples that are right** | {cells} | |")
display(Markdown("\n".join(lines)))

# %% [markdown]
# So the story has three parts, and the greedy picture showed one. (These are validation
# problems, so the start differs a little from section 6's.)
#
# 1. **Choice** moves first and contributes most, {{ told["choice"]["points"]:.0f }} of {{
#    told["accuracy"]["points"]:.0f }} points. {{ assert max(FACTORS, key=lambda n: told[n]["points"]) == "choice" }} {{
#    assert 55 < told["accuracy"]["points"] < 65 }} At step 20, {{ at_20["choice"]:.0f }}% of the clean samples already
#    show their working. {{ assert at_20["choice"] > 85 > at_20["clean"] }}
# 2. **Garbage** gets rarer, more slowly: from {{ 100 * (1 - told["clean"]["before"]):.0f }} to {{ 100 * (1 -
#    told["clean"]["after"]):.0f }}% of the samples, {{ told["clean"]["points"]:.0f }} points. In section 6, a sample
#    with garbage in it was right {{ 100 * garbage_right:.0f }}% of the time, so it's rarely rewarded. {{
#    assert garbage_right < worked_right / 3 }}
# 3. **Arithmetic** improves as well, {{ told["arithmetic"]["points"]:.0f }} points: right digits are rewarded, too. Its
#    line on the left understates that, since the model now shows its working on hard problems as well. {{ assert
#    all(b["1"]["worked"] > b["2"]["worked"] + b["3"]["worked"] + b["4"]["worked"] and a["4"]["worked"] > 0.7 *
#    a["1"]["worked"] for b, a in ends) }} At level 4 alone it rises from {{ 100 *
#    fmean(factors_by_level(b)[3].factors[2] for b, _ in ends):.0f }} to {{ 100 *
#    fmean(factors_by_level(a)[3].factors[2] for _, a in ends):.0f }}%.
#
# And they need each other. Luck aside, a better choice alone would have taken the share of right samples from {{
# right_without_luck(()):.0f }} to {{ right_without_luck(["choice"]):.0f }}%, and the other two without it to {{
# right_without_luck(["clean", "arithmetic"]):.0f }}%. {{ assert right_without_luck(["choice"]) < 30 >
# right_without_luck(["clean", "arithmetic"]) }} All three took it to {{ right_without_luck(FACTORS):.0f }}%. Greedy
# answers have hardly any garbage to lose, {{ 100 * greedy_garbage:.1f }}% before training. {{ assert greedy_garbage <
# 0.05 }} That's why they told a story about choice alone.
#
# ### New skill, or better picking?
#
# A common argument: if training only made the model better at picking what it could already do, pass@1 would rise and
# pass@16 wouldn't. **Look for** what the right end does.

# %% tags=["hide-input"]
# @title Figure: pass@k before and after
sampled_after = answer_problems(trained, trained_engine, task, few, 80, config.sampling, num_generations=16)
fig, ax = plt.subplots(figsize=(6, 3.2))
at_16 = {}
for answers, label, color, style in ((samples, "before", BLACK, ":"), (sampled_after, "after", BLUE, "-")):
    curve = mean_pass_at_k(answers)
    at_16[label] = curve["pass@16"]
    ax.plot([1, 2, 4, 8, 16], [100 * v for v in curve.values()], color=color, linestyle=style, marker="o", label=label)
ax.set_xscale("log", base=2)
ax.set_xticks([1, 2, 4, 8, 16], [1, 2, 4, 8, 16])
ax.set(xlabel="k, samples of a problem", ylabel="pass@k, %", ylim=(0, 100))
ax.set_title(f"{len(few)} test problems, {run['steps']} steps apart")
ax.legend()
plt.show()

# %% [markdown]
# Both rose. {{ assert at_16["after"] > at_16["before"] + 0.1 }} That's still no proof of a new skill: a problem that
# goes from one right sample in a hundred to one in two raises pass@16 nearly as much as one that was out of reach.
# Telling them apart takes hundreds of samples per problem (Yue et al. 2025).
#
# ### The learning curve
#
# Finally, what most papers show: greedy accuracy of {{ len(load_curve("dr_grpo")["results"]) }} seeds over {{
# load_curve("dr_grpo")["setup"]["steps"] }} steps, the mean and a band from worst to best. (The preset trains with Dr.
# GRPO, which is lesson 04.)

# %% tags=["hide-input"]
# @title Figure: the recorded curve
from rlcourse.measure.plots import LABELS, seed_band

record = load_curve("dr_grpo")
steps, low, mean, high = ([*values] for values in seed_band(record["results"]))
asked = record["setup"]["eval_validation"]
fig, ax = plt.subplots()
ax.fill_between(steps, [100 * v for v in low], [100 * v for v in high], color=BLUE, alpha=0.2, linewidth=0)
ax.plot(steps, [100 * v for v in mean], color=BLUE, marker="o")
ax.set(xlabel="training step", ylabel="greedy, % right", ylim=(0, 100))
ax.set_title(f"{LABELS['dr_grpo']}, {len(record['results'])} seeds, {asked} validation problems")
ax.grid()
plt.show()
for seed in record["results"]:
    found = seed["summary"]
    print(f"{seed['variant']}: {found['accuracy_before']:.1%} → {found['accuracy_after']:.1%} of", end=" ")
    print(f"{found['eval_problems']} test problems, {found['wall_seconds']:.0f} s")
error = 100 * (mean[0] * (1 - mean[0]) / asked) ** 0.5
tested = [100 * record["results"][0]["summary"][f"accuracy_{when}"] for when in ("before", "after")]

# %% [markdown]
# Why does the curve start at {{ 100 * mean[0]:.1f }}%, and the printed numbers at {{ tested[0]:.1f }}%? The curve is
# measured on {{ asked }} validation problems, which happen to be easier than the {{
# record["results"][0]["summary"]["eval_problems"] }} test problems: its standard error is {{ error:.1f }} points.
# Compare runs only on the same problems.
#
# ## 10 · Notation
#
# What the letters mean, unless a section redefines one.
#
# | symbol | meaning |
# | --- | --- |
# | $x$, $y$, $y_t$ | prompt, answer, its $t$-th token |
# | $s_t = (x, y_{<t})$ | state: prompt and the tokens so far |
# | $\pi_\theta$, $\pi_\text{old}$, $\pi_\text{ref}$ | policy: in training, at sampling, frozen (reference) |
# | $J$, $\mathcal{L}$ | expected reward, to be maximised; loss, to be minimised |
# | $N$, $G$, $i$ | answers in a batch, answers to one prompt (the group), index of an answer |
# | $\lvert y_i \rvert$, $p$ | tokens of answer $i$; success rate of a prompt |
# | $R_i$ | reward of answer $i$, one number |
# | $r_t$ | reward of a token (PPO): $R$ at the last token, 0 before, less KL where that is subtracted |
# | $b$, $A$ | baseline; advantage, $R - b$ or what takes its place |
# | $m_{i,t}$ | mask: 1 on tokens of the answer, its end token included, else 0 |
# | $V(s_t)$, $\delta_t$, $\gamma$, $\lambda$ | value, TD error, discount, GAE's parameter |
# | $\rho_t$ | importance ratio $\pi_\theta(y_t \mid s_t) / \pi_\text{old}(y_t \mid s_t)$ |
# | $\varepsilon$ | clip range of $\rho$ |
# | $\beta$ | weight of the KL divergence to the reference |
# | $d$; $k_1$, $k_2$, $k_3$ | $\log \pi_\theta - \log \pi_\text{ref}$ at a drawn token; estimates of the KL from it |
# | $k$, $n$, $c$ | pass@k: samples asked for, samples there are, right ones among them |
# | $H$, $K$, $D$, $S$ | lessons 07 to 12: query heads, key-value heads, size of a head, slots of a cache |
# | $m$, $l$, acc | lesson 09, online softmax: largest score so far, sum of exponentials, weighted sum of values |
# | `A`, `B`, $r$, `alpha` | lesson 13: an adapter's two matrices, named as in peft, its rank and its scale |
# | $P$, $M$ | lesson 15: processes that train one model (ranks), bytes of a gradient |
#
# ## Check yourself
#
# 1. Why can't a problem help training if no sample ever solves it?
#
# <details><summary>Answer</summary>
# All its samples get the same reward, so none is better than another. There is nothing to make more probable.
# (Lesson 03 counts such groups.)
# </details>
#
# 2. Greedy accuracy is higher than the accuracy of samples. Why train on samples at all?
#
# <details><summary>Answer</summary>
# Greedy answers to a problem are all the same, so there's nothing to compare. Samples try different ways, and comparing
# them is the signal.
# </details>
#
# 3. You have 16 samples of a problem and 2 are right. What is pass@16, and why is that not the chance that 16 *new*
#    samples contain a right one?
#
# <details><summary>Answer</summary>
# The formula says 1: drawing all 16 surely draws a right one. A new set may well have
# none: it's right on average over many sets, not for each.
# </details>
#
# 4. The reward says nothing about working. Where does the working come from?
#
# <details><summary>Answer</summary>
# From the model: some of its samples showed working from the start. Those were right more often, so training made them
# more frequent. A model that never shows any couldn't learn it this way.
# </details>
#
# ## Exercises
#
# [exercises/00_start_here.ipynb](../exercises/00_start_here.ipynb): read a final number strictly, let a score choose
# among `k` samples, and share the credit among factors that multiply. Then go on to [01 · The policy
# gradient](01_policy_gradient.ipynb).
#
# ## Further reading
#
# - Cobbe et al. 2021, *Training Verifiers to Solve Math Word Problems*, arXiv:2110.14168: GSM8K and its `####`.
# - Chen et al. 2021, *Evaluating Large Language Models Trained on Code*, arXiv:2107.03374: pass@k without bias.
# - Yue et al. 2025, *Does Reinforcement Learning Really Incentivize Reasoning Capacity in LLMs Beyond the Base Model?*,
#   arXiv:2504.13837: pass@k before and after RL, on large models.
