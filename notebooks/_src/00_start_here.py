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
# - what this machine can run, and the command that brings what is missing;
# - the parts of one training step, in order, and the file that holds each;
# - the task and the small model that ship with the course, and exactly how the model fails;
# - to tell apart greedy answers, samples and pass@k, and to estimate pass@k without bias;
# - what reinforcement learning has to work with here, and what it will change.
#
# You need Python and some PyTorch. You need no GPU, no network and no reinforcement learning.
#
# Each lesson builds its functions in front of you, checks them against the package `rlcourse`, and then uses the
# package's. Run the cells from top to bottom. A change of the numbers in a cell breaks nothing: try it.

# %%
import itertools
import math
import re
import tempfile
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown, display

from rlcourse.course import pick
from rlcourse.measure.plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION

torch.manual_seed(0)
print("problems asked below:", pick(smoke=80, full=1000))

# %% [markdown]
# ## 1 · Your machine
#
# `rlcourse doctor`, typed in a terminal, says what is here and what is missing. The same facts as tables: first the
# machine, then each thing looked for. Only what is marked *required* is needed for the course on a CPU.

# %%
from rlcourse.measure.doctor import gather
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

# %%
lines = ["| | what | | found | to get it |", "| --- | --- | --- | --- | --- |"]
for check in facts["checks"]:
    mark, need = "✅" if check["ok"] else "—", "required" if check["required"] else ""
    mend = f"`{check['mend']}`" if check["mend"] else ""
    lines.append(f"| {mark} | {check['name']} | {need} | {check['detail']} | {mend} |")
display(Markdown("\n".join(lines)))
assert all(check["ok"] for check in facts["checks"] if check["required"]), "run the commands of the last column"

# %% [markdown]
# A *preset* is a named set of training settings. `laptop` trains the model that ships on the task that ships. The other
# two train Qwen2.5-0.5B-Instruct on GSM8K, and lesson 05 comes to them.

# %%
lines = ["| preset | runs on | needs at most | fits here |", "| --- | --- | --- | --- |"]
for row in facts["presets"]:
    needs = "unknown" if row["needs_bytes"] is None else format_bytes(row["needs_bytes"])
    fits = {True: "yes", False: "no", None: "unknown"}[row["fits"]]
    lines.append(f"| {row['preset']} | {row['device']} | {needs} | {fits} |")
display(Markdown("\n".join(lines)))

# %% [markdown]
# ## 2 · The map
#
# Reinforcement learning of a language model is one loop. The model answers some problems, each several times. A program
# checks the answers. Answers that did better than the others of their problem are made more probable, the others less.
# Then the same again, with the changed model.
#
# Each arrow below is a function call, and each box is one file of `rlcourse`.

# %%
STAGES = ["problems", "answers", "rewards", "advantages", "loss", "new weights"]
FILES = ["tasks/", "rollout/", "tasks/verify.py", "advantages.py", "logprobs.py\nlosses.py", "learner.py"]
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
ax.text(6.75, -0.42, "the next step samples with the new weights (trainer.py)", ha="center", color=VERMILION)
ax.set(xlim=(-0.2, 11.7), ylim=(-0.75, 1.1), title="One training step: step.py")
ax.axis("off")
plt.show()

# %% [markdown]
# The lessons go through the boxes again and again. What changes from lesson to lesson is mostly one box: how rewards
# become advantages.

# %%
from rlcourse.course.dev.headers import COURSE

lines = ["| | lesson | difficulty | what you hold at the end |", "| --- | --- | --- | --- |"]
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
# The three lists of problems share no numbers within a template, so a model cannot pass the test by remembering.

# %%
for split in ("train", "validation", "test"):
    levels = Counter(problem.level for problem in task.problems(split))
    print(f"{split:10} {len(task.problems(split)):5} problems, by level {dict(sorted(levels.items()))}")
questions = [{p.question for p in task.problems(split)} for split in ("train", "validation", "test")]
assert not any(a & b for a, b in itertools.combinations(questions, 2))

# %% [markdown]
# The *verifier* reads the final number of an answer and compares it with the right one, called *gold*. It has two
# readings. The strict one wants the line `#### NUMBER`. The lenient one takes the last number, however it is announced.

# %%
for text in ("2+3=5\n#### 5", "The answer is 5.", "2+3=6\n#### 6", "#### five"):
    verdict = task.verify(text, gold="5")
    print(f"{text!r:24} strict {verdict.strict!s:6} lenient {verdict.lenient!s:6} number read: {verdict.answer}")

# %% [markdown]
# ## 4 · The model
#
# The model that ships is a Qwen2, the architecture of Qwen2.5, made very small. It saw demonstrations of uneven
# quality: some worked the problem out, some guessed, some ended in words that the strict reading does not accept. It
# imitates all of them.

# %%
from rlcourse.config import make_config
from rlcourse.evaluation import load_all

config = make_config("laptop")
policy, engine, task = load_all(config)
shape = policy.model.config
print(f"{sum(p.numel() for p in policy.model.parameters()):,} parameters: {shape.num_hidden_layers} layers,", end=" ")
print(f"hidden size {shape.hidden_size}, {shape.vocab_size} tokens in the vocabulary")
prompt = policy.prompt(test[1].question)
print("\nthe prompt as tokens:\n" + " ".join(repr(policy.tokenizer.decode([token])) for token in prompt))

# %% [markdown]
# A number is read digit by digit: the model has to do arithmetic the way you do on paper.
#
# The first token of the answer decides nearly everything. `####` means that the model guesses: the number comes next. A
# name means that it starts to work. **Look for** how the mass on `####` grows with the level, because that is how the
# demonstrations were: the longer the working, the more people skipped it.


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
fig, ax = plt.subplots(figsize=(6, 3))
bars = ax.bar([f"level {level}" for level in first], [100 * g for g in guess], color=ORANGE, width=0.6)
ax.bar_label(bars, fmt="%.0f %%", padding=2)
ax.set(ylim=(0, 100), ylabel="probability of ####, %", title="How likely the model is to guess without working")
ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## 5 · Greedy answers
#
# *Greedy* means: take the most probable token each time. It is how a finished model is usually measured, and it has no
# randomness. We put the test problems to the model.

# %%
from rlcourse.evaluation import answer_problems, summarize

problems = test[: pick(80, 1000)]
greedy = [answers[0] for answers in answer_problems(policy, engine, task, problems, max_new_tokens=80)]
summary = summarize([greedy])
print(f"right {summary['accuracy']:.1%}, by the lenient reading {summary['accuracy_lenient']:.1%}\n")
for answer in greedy[:5]:
    print(f"{answer.problem.question}  (gold {answer.problem.gold})\n{answer.text}\n{'✓' if answer.strict else '✗'}\n")

# %% [markdown]
# One number hides why. We sort the answers into five kinds. A calculation such as `155/5=33` can be checked by itself,
# so wrong arithmetic can be told from a wrong plan.

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


# %%
def stacked(ax, answers, title: str) -> None:
    """Kinds of answers by level, as shares that add up to 100 %."""
    for level in (1, 2, 3, 4):
        counts = Counter(kind(a) for a in answers if a.problem.level == level)
        left = 0.0
        for name, color in KINDS.items():
            share = 100 * counts[name] / max(1, sum(counts.values()))
            ax.barh(f"level {level}", share, left=left, color=color, label=name if level == 1 else None)
            if share >= 8:
                ax.text(left + share / 2, level - 1, f"{share:.0f}", ha="center", va="center", color="white")
            left += share
    ax.invert_yaxis()
    ax.set(xlim=(0, 100), xlabel="share of answers, %", title=title)
    ax.spines[["top", "right"]].set_visible(False)


fig, ax = plt.subplots(figsize=(8, 3.4))
stacked(ax, greedy, f"Greedy answers to {len(greedy)} test problems")
fig.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
fig.set_layout_engine("constrained")
plt.show()

# %% [markdown]
# Two different weaknesses. On hard problems the model **guesses**. Where it works, its **arithmetic** slips. The first
# is a matter of choice: the model can work, and often does not. Remember this picture.
#
# ## 6 · Samples
#
# Training does not use greedy answers. It *samples*: each token is drawn with the probability that the model gives it.
# So one problem gets many different answers, and only where answers differ can one be better than another.

# %%
torch.manual_seed(1)
problem = next(p for p in test if p.level == 2)
[sixteen] = answer_problems(policy, engine, task, [problem], 80, config.sampling, num_generations=16)
print(f"{problem.question}  (gold {problem.gold})\n")
for answer in sixteen:
    print("✓" if answer.strict else "✗", answer.text.replace("\n", " ⏎ "))

# %% [markdown]
# Some are nonsense. A small model spreads a little probability over tokens that make no sense; over twenty tokens that
# adds up. So samples are right less often than greedy answers, as the next cell counts.
#
# Now the fact on which this whole course rests. Sort the samples by whether they contain any working, and ask how often
# each sort is right.

# %%
few = test[: pick(16, 240)]
samples = answer_problems(policy, engine, task, few, 80, config.sampling, num_generations=16)
flat = [answer for answers in samples for answer in answers]
print(f"{len(few)} problems: greedy {summarize([greedy[: len(few)]])['accuracy']:.1%} right", end=", ")
print(f"{len(flat)} samples {summarize(samples)['accuracy']:.1%} right")
accuracy = {}
for level in (1, 2, 3, 4):
    for name, works in (("guessed", False), ("worked", True)):
        chosen = [a.strict for a in flat if a.problem.level == level and bool(calculations(a.text)) == works]
        accuracy[name, level] = sum(chosen) / max(1, len(chosen))
        print(f"level {level}: {name} {len(chosen):4}, right {accuracy[name, level]:6.1%}")

# %%
fig, ax = plt.subplots(figsize=(7, 3.2))
for offset, (name, color, hatch) in enumerate((("guessed", ORANGE, "//"), ("worked", BLUE, ""))):
    heights = [100 * accuracy[name, level] for level in (1, 2, 3, 4)]
    places = [level + (offset - 0.5) * 0.38 for level in (1, 2, 3, 4)]
    bars = ax.bar(
        places, heights, width=0.36, color=color, hatch=hatch, edgecolor="white", label=f"samples that {name}"
    )
    ax.bar_label(bars, fmt="%.0f", padding=2, fontsize=9)
ax.set_xticks((1, 2, 3, 4), [f"level {level}" for level in (1, 2, 3, 4)])
ax.set(ylabel="right, %", title=f"Working pays: {len(flat)} samples at temperature 1")
ax.margins(y=0.12)
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# Nobody told the model that working pays. But whoever rewards right answers, and makes what was rewarded more probable,
# will make working more probable. The reward never mentions working.
#
# It pays much less where problems are long: a slip in one of four calculations is enough to be wrong.
#
# ## 7 · pass@k: what is within reach
#
# If each of $k$ samples has some chance, the chance that **at least one** is right is called pass@$k$. It says what is
# within reach of the sampler: a problem that no sample ever solves teaches nothing.
#
# We have $n$ samples of a problem and $c$ of them are right. What is pass@$k$ for $k \le n$? Draw $k$ of the $n$,
# without putting any back. All $k$ are wrong in $\binom{n-c}{k}$ of $\binom{n}{k}$ ways, so (Chen et al. 2021,
# equation 1)
#
# $$\text{pass@}k = 1 - \binom{n-c}{k} \Big/ \binom{n}{k} .$$
#
# Small enough to count by hand: six samples, two right, all the ways to draw three.


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
# The tempting shortcut is to take $\hat p = c/n$ and say $1 - (1-\hat p)^k$. It is **biased**: on average over what $c$
# may come out as, it is too low. We can compute both averages exactly, for a problem that is solved with probability
# 0.1 a sample, since $c$ is binomial. **Look for** which of the two lies on the truth.


# %%
def mean_over_c(estimate, n: int, p: float) -> float:
    """Mean of estimate(c) when each of n samples is right with probability p."""
    return sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * estimate(c) for c in range(n + 1))


n, p, ks = 16, 0.1, range(1, 17)
truth = [1 - (1 - p) ** k for k in ks]
formula = [mean_over_c(lambda c, k=k: pass_at_k(n, c, k), n, p) for k in ks]
shortcut = [mean_over_c(lambda c, k=k: 1 - (1 - c / n) ** k, n, p) for k in ks]
fig, ax = plt.subplots(figsize=(6, 3.2))
ax.plot(ks, truth, color=BLACK, linewidth=5, alpha=0.25, label="truth, $1-(1-p)^k$")
ax.plot(ks, formula, color=BLUE, marker="o", markersize=4, label="mean of the formula")
ax.plot(ks, shortcut, color=VERMILION, linestyle="--", marker="s", markersize=4, label="mean of the shortcut")
ax.set(xlabel="k", ylabel="pass@k", ylim=(0, 1), title=f"A problem solved with p = {p}, from n = {n} samples")
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False)
plt.show()
assert torch.allclose(torch.tensor(formula), torch.tensor(truth))

# %% [markdown]
# The package has the same function. From here on we use its. The model's pass@k, by level:

# %%
from rlcourse.evaluation import mean_pass_at_k
from rlcourse.evaluation import pass_at_k as package_pass_at_k

assert all(package_pass_at_k(16, c, k) == pass_at_k(16, c, k) for c in range(17) for k in ks)
fig, ax = plt.subplots(figsize=(6.5, 3.4))
for level, color, marker in zip((1, 2, 3, 4), (BLUE, GREEN, ORANGE, VERMILION), "osD^", strict=True):
    curve = mean_pass_at_k([answers for answers in samples if answers[0].problem.level == level])
    ax.plot([1, 2, 4, 8, 16], [100 * v for v in curve.values()], color=color, marker=marker, label=f"level {level}")
ax.set_xscale("log", base=2)
ax.set_xticks([1, 2, 4, 8, 16], [1, 2, 4, 8, 16])
ax.set(xlabel="k, samples of a problem", ylabel="pass@k, %", ylim=(0, 100), title="At least one of k samples is right")
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False)
plt.show()
print({k: f"{v:.1%}" for k, v in mean_pass_at_k(samples).items()})

# %% [markdown]
# Read it with care: a lucky guess counts, too. Among answers below 100, sixteen different guesses hit the right one now
# and then. Below is the share of right samples that contain working, by level.

# %%
for level in (1, 2, 3, 4):
    right = [a for a in flat if a.strict and a.problem.level == level]
    worked = sum(bool(calculations(a.text)) for a in right)
    print(f"level {level}: {len(right):4} right samples, {worked} of them with working")

# %% [markdown]
# ## 8 · One training step, seen once from above
#
# Here is the map as code: every box, in order, on two problems with four answers each. You need not understand it yet.
# Look at the shapes: rows are answers, columns are tokens. Lessons 01 to 04 take every line apart.

# %%
from rlcourse import advantages, losses
from rlcourse.logprobs import token_logprobs

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

# %%
model, mask = policy.model, rollout.completion_mask
logprobs, _ = token_logprobs(model, rollout, config.sampling, chunk=4096)
loss_of_token, _ = losses.token_loss(
    logprobs, rollout.logprobs, advantage, mask, surrogate="reinforce", ratio="token", clip_low=0.2, clip_high=0.2
)
loss = losses.aggregate(loss_of_token, mask, "constant", rows=8, tokens=int(mask.sum()), max_new_tokens=80)
loss.backward()
norm = torch.sqrt(sum(parameter.grad.square().sum() for parameter in model.parameters()))
print(f"log-probs  {list(logprobs.shape)}\nloss       {loss.item():.4f}\ngradient   of norm {norm:.3f}")
model.zero_grad(set_to_none=True)  # the optimizer's step would come here; this was only a look

# %% [markdown]
# ## 9 · What RL will change
#
# Now the loop for real: `rlcourse.trainer.train` with the settings of the `laptop` preset, for a short run, in
# slices: it stops, answers some test problems, and goes on from its checkpoint. This is **one run with one seed**: an
# illustration. The record at the end has three seeds and is the evidence.

# %%
from rlcourse.checkpoint import latest_checkpoint
from rlcourse.trainer import resume, train

least = {"eval_every": 0, "eval_problems": 1, "pass_k": 0, "save_every": 0}  # we ask our own questions
short = {"output": tempfile.mkdtemp(), "name": "short", "num_prompts": pick(4, 16)} | least
watched = problems[: pick(20, 200)]
points = [(0, greedy[: len(watched)])]
stops = pick([1, 2], [5, 10, 15, 20, 25, 30])
for steps in stops:
    result = train(make_config(steps=steps, **short)) if steps == stops[0] else resume(steps=steps, **short)
    checkpoint = latest_checkpoint(Path(result["folder"]))
    trained, trained_engine, _ = load_all(make_config("laptop", model=str(checkpoint)))
    answers = answer_problems(trained, trained_engine, task, watched, max_new_tokens=80)
    points.append((steps, [answer for (answer,) in answers]))
for steps, answers in points:
    print(f"step {steps:2}: {sum(a.strict for a in answers) / len(answers):.1%} of {len(answers)} problems right")

# %% [markdown]
# The same problems as before, answered by the model before and after. **Look for** what became of the guesses, and of
# the wrong arithmetic.

# %%
after = [answers[0] for answers in answer_problems(trained, trained_engine, task, problems, max_new_tokens=80)]
fig, axes = plt.subplots(1, 2, figsize=(11, 3.6), sharey=True)
stacked(axes[0], greedy, "Before")
stacked(axes[1], after, f"After {points[-1][0]} steps")
axes[0].invert_yaxis()  # the axes share it, and it was turned twice
handles, labels = axes[0].get_legend_handles_labels()
fig.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
fig.set_layout_engine("constrained")
plt.show()
for when, answers in (("before", greedy), ("after", after)):
    print(f"{when}: {sum(bool(calculations(a.text)) for a in answers) / len(answers):.0%} of the greedy answers work")

# %% [markdown]
# The guesses are gone. What is left is mostly wrong arithmetic, on every level. Which of the two went first? Take the
# slices apart: the share of greedy answers that work, and how often those that work are right.

# %%
at = [step for step, _ in points]
working = [[a for a in answers if calculations(a.text)] for _, answers in points]
share = [100 * len(w) / len(answers) for w, (_, answers) in zip(working, points, strict=True)]
right = [100 * sum(a.strict for a in w) / max(1, len(w)) for w in working]
fig, ax = plt.subplots(figsize=(6.5, 3.2))
ax.plot(at, share, color=BLUE, marker="o", label="answers that work, of all")
ax.plot(at, right, color=GREEN, linestyle="--", marker="s", label="answers that are right, of those that work")
ax.set(xlabel="training step", ylabel="%", ylim=(0, 105), title="Choice and arithmetic, one run")
ax.legend(frameon=False, loc="lower right")
ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# The choice went first, and fast. The arithmetic moved much less. (The second line even flatters the start: at first
# mostly the easy problems were worked.)
#
# And the samples: what the model does at temperature 1, before and after the same short run. If training only made the
# model pick better among what it could do already, pass@1 would rise and pass@16 would not. If it learned something
# new, both would.

# %%
sampled_after = answer_problems(trained, trained_engine, task, few, 80, config.sampling, num_generations=16)
fig, ax = plt.subplots(figsize=(6, 3.2))
for answers, label, color, style in ((samples, "before", BLACK, ":"), (sampled_after, "after", BLUE, "-")):
    curve = mean_pass_at_k(answers)
    ax.plot([1, 2, 4, 8, 16], [100 * v for v in curve.values()], color=color, linestyle=style, marker="o", label=label)
    print(label, {k: f"{v:.1%}" for k, v in curve.items()})
ax.set_xscale("log", base=2)
ax.set_xticks([1, 2, 4, 8, 16], [1, 2, 4, 8, 16])
ax.set(
    xlabel="k, samples of a problem", ylabel="pass@k, %", ylim=(0, 100), title=f"{len(few)} test problems, all levels"
)
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# Both rose. That alone is no proof of a new skill: a chance of one in a hundred, made one in two, looks the same at 16
# samples.
#
# Finally the record: full runs of the same preset with three seeds, made with
# `python -m rlcourse.course.lessons.curves dr_grpo`. The line is the mean, the band reaches from the worst seed to the
# best.

# %%
from rlcourse.course.lessons.curve_records import load_curve
from rlcourse.measure.plots import LABELS, seed_band

record = load_curve("dr_grpo")
steps, low, mean, high = ([*values] for values in seed_band(record["results"]))
fig, ax = plt.subplots(figsize=(6.5, 3.4))
ax.fill_between(steps, [100 * v for v in low], [100 * v for v in high], color=BLUE, alpha=0.2, linewidth=0)
ax.plot(steps, [100 * v for v in mean], color=BLUE, marker="o", markersize=4)
ax.set(xlabel="training step", ylabel="greedy, % right", ylim=(0, 100))
ax.set_title(
    f"{LABELS['dr_grpo']}, {len(record['results'])} seeds, {record['setup']['eval_validation']} validation problems"
)
ax.grid(alpha=0.25)
ax.spines[["top", "right"]].set_visible(False)
plt.show()
for seed in record["results"]:
    summary = seed["summary"]
    print(f"{seed['variant']}: {summary['accuracy_before']:.1%} → {summary['accuracy_after']:.1%} of", end=" ")
    print(f"{summary['eval_problems']} test problems, {summary['wall_seconds']:.0f} s")

# %% [markdown]
# A steep part, then a flat one, for every seed. By the picture above the steep part is mostly the choice to work; the
# flat one is fewer slips in the arithmetic. That shape is worth knowing before you compare algorithms: most of the rise
# is easy, and the lessons that follow show that every algorithm finds it.
#
# ## Check yourself
#
# 1. Why can a problem that the model never solves in any sample not help training?
#
# <details><summary>Answer</summary>
# All its samples get the same reward, so none is better than another. There is nothing to make more probable.
# (Lesson 03 counts such groups.)
# </details>
#
# 2. Greedy accuracy is higher than the accuracy of samples. Why train on samples at all?
#
# <details><summary>Answer</summary>
# Greedy answers of one problem are all the same, so there is nothing to compare. Sampling tries different ways, and the
# comparison of ways is the signal.
# </details>
#
# 3. You have 16 samples of a problem and 2 are right. What is pass@16, and why is that not the chance that 16 *new*
#    samples contain a right one?
#
# <details><summary>Answer</summary>
# The formula says 1: drawing all 16 surely draws a right one. It is right on average over many sets of 16 samples, not
# for each set. A single estimate with k close to n is noisy.
# </details>
#
# 4. Which reading of the verifier would you reward, if "The answer is 5." is common and right?
#
# <details><summary>Answer</summary>
# It depends on what you want. The strict one also teaches the format. Then a rise of the strict score may be format
# alone, so watch both: lesson 01 puts them side by side.
# </details>
#
# 5. The reward says nothing about working. Where does the working come from?
#
# <details><summary>Answer</summary>
# From the model: it worked in part of its samples from the start. Those samples were right more often, so training made
# them more frequent. A model that never works could not learn it this way.
# </details>
#
# ## Exercises
#
# [exercises/00_start_here.ipynb](../exercises/00_start_here.ipynb): a strict reader of final numbers, and pass@k for a
# whole table of samples. Then go on to [01 · The policy gradient](01_policy_gradient.ipynb).
#
# ## Further reading
#
# - Cobbe et al. 2021, *Training Verifiers to Solve Math Word Problems*, arXiv:2110.14168: GSM8K and its `####`.
# - Chen et al. 2021, *Evaluating Large Language Models Trained on Code*, arXiv:2107.03374: pass@k without bias.
# - Yue et al. 2025, *Does Reinforcement Learning Really Incentivize Reasoning Capacity in LLMs Beyond the Base Model?*,
#   arXiv:2504.13837: pass@k before and after RL, on large models.
