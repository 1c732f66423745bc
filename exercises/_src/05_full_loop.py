# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# First give your loop the reward that a real model needs, after [lesson 05](../notebooks/05_full_loop.ipynb). Then four
# puzzles: how kind a verifier may be before it's exploited, by how much the best of ten checkpoints overstates the
# truth, what is wrong with an engine's log-probs, and a program that reads a run's curves and names the failure. Write
# your code where it says `# YOUR CODE HERE`, then run the cell below it. Use `torch` and Python's own modules: each
# function must be self-contained.

# %%
import math
import re

import matplotlib.pyplot as plt
import torch

from rlcourse.course import pick
from rlcourse.course.checks import nb05 as check
from rlcourse.course.lessons.curve_records import load_curve
from rlcourse.course.own import load_loop, save_loop
from rlcourse.measure.plots import BLACK, BLUE, GREEN, ORANGE, VERMILION

print("ready")

# %% [markdown]
# ## q1 · A real model's reward
#
# ●●○○○ · 15 minutes
#
# A real model has its own ways to end an answer. If you only pay for `#### 18`, you pay nothing at all, as in the first
# ending of lesson 05. So read leniently. The answer is the last number announced by `####` and a space; if there's
# none, the last one in a `\boxed{}`; if there's none, the last number of the text. It may have a dollar sign in front
# (in a box also `\$`), commas and decimals. Pay 1.0 if it equals `gold`, else 0.0.
#
# <details><summary>Hint 1: a question</summary>
# What do the three places have in common, and what differs?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# One pattern for a number, used in three longer patterns. The first of them that finds something decides.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A loop over three patterns with `re.findall` that returns at the first non-empty result; 0.0 after it.
# </details>


# %% tags=["exercise"]
def verify_real(text: str, gold: str) -> float:
    """1.0 if the number that the answer ends with, however it's written, is `gold`, else 0.0."""
    # BEGIN SOLUTION
    number = r"(-?[0-9][0-9,]*(?:\.[0-9]+)?)"
    for pattern in (r"#### \$?" + number, r"\\boxed\{\\?\$?" + number, number):
        found = re.findall(pattern, text)
        if found:
            return float(float(found[-1].replace(",", "")) == float(gold))
    return 0.0
    # END SOLUTION


# %%
check.q1(verify_real)

# %% [markdown]
# Your loop with this reward, on the course's small model. The greedy accuracy is still read strictly: **look for** what
# happens to it now that nobody pays for the form.

# %%
loop = save_loop(verify=verify_real) if check.q1.passed else load_loop()
_, log = loop.train(pick(1, 15), problems=pick(8, 200))
print("greedy, strict:", " → ".join(f"{row['accuracy']:.0%}" for row in log if row["accuracy"] is not None))

# %% [markdown] tags=["solution"]
# It rises all the same. {{ 100 * load_curve("lesson05_healthy")["results"][0]["evals"][0]["formatted"]:.0f }}% of this
# model's greedy answers end in `####` from the start, so the lenient reading pays for hardly anything else. For a model
# that writes `\boxed{}` it's the difference between a signal and none.

# %% [markdown]
# ## q2 · How kind may a verifier be?
#
# ●●○○○ · 15 minutes
#
# Somebody wants to encourage answers that at least have the right form. A right answer earns 1, a wrong one that can be
# read earns a *credit* between 0 and 1, and what cannot be read earns 0. Your policy knows two ways to answer. It can
# **work** the problem out, which is right more often, but so long that sometimes it ends with nothing readable. Or it
# can **guess**: `#### 12`. That's hardly ever right, but nearly always readable.
#
# You have measured, for each way, the share of its answers that is right and the share that can be read (a right answer
# can be read, too). Return the largest credit, 1 at most, at which an answer that works still earns at least as much on
# average as one that guesses. Above it, training will drive the work out.
#
# <details><summary>Hint 1: a question</summary>
# Of a hundred answers that work, how many earn 1, how many earn the credit, and how many nothing?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# What a way of answering earns is a straight line in the credit. Working starts higher, guessing rises more steeply,
# and you are asked where the two lines meet. Do they always?
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A quotient of two differences between working and guessing: where the lines start, over how steeply they rise. Then
# handle the case without a crossing between 0 and 1.
# </details>


# %% tags=["exercise"]
def largest_credit(right_worked: float, readable_worked: float, right_guessed: float, readable_guessed: float) -> float:
    """The largest credit for a readable wrong answer at which working pays. All four are shares from 0 to 1."""
    # BEGIN SOLUTION
    ahead = right_worked - right_guessed
    steeper = (readable_guessed - right_guessed) - (readable_worked - right_worked)
    return 1.0 if steeper <= ahead else ahead / steeper
    # END SOLUTION


# %%
check.q2(largest_credit)

# %%
if check.q2.passed:
    credit = largest_credit(0.38, 0.55, 0.05, 0.98)
    fig, ax = plt.subplots()
    for name, color, worth in (("healthy", BLUE, 0), ("half_format", GREEN, 0.5), ("format", VERMILION, 1)):
        seeds = [[100 * e["accuracy"] for e in seed["evals"]] for seed in load_curve(f"lesson05_{name}")["results"]]
        steps = [e["step"] for e in load_curve(f"lesson05_{name}")["results"][0]["evals"]]
        ax.plot(steps, torch.tensor(seeds).mean(0), color=color, marker="o", label=f"credit {worth}")
    ax.set(xlabel="training step", ylabel="greedy, % right", ylim=(0, 100), title="Three credits, three seeds each")
    ax.legend()
    plt.show()
    print(f"an example: 38% right and 55% readable against 5% and 98%: credit up to {credit:.2f}")

# %% [markdown] tags=["solution"]
# With $p$ for the share that is right and $f$ for the share that can be read, working earns $p_w + \text{credit} \cdot
# (f_w - p_w)$, guessing $p_g + \text{credit} \cdot (f_g - p_g)$. The lines cross at $\text{credit} = (p_w - p_g) /
# \big((f_g - p_g) - (f_w - p_w)\big)$. The figure shows both sides of such a threshold. At credit 1 the work is driven
# out for good. At 0.5 the run first goes **down** and then turns: working has probably become more reliable in the
# meantime, which would lift the threshold over 0.5. A shaped reward is a race, and you choose who has the head start.

# %% [markdown]
# ## q3 · The best of ten
#
# ●●●○○ · 20 minutes
#
# A colleague saves ten checkpoints late in a run, when it has long levelled off: all ten solve a problem with the same
# probability $p$. She measures each on different problems and reports the best of the ten numbers. By how much does
# that number exceed $p$ on average?
#
# Return it exactly, for any number of checkpoints and of problems: no simulation, no bell curve.
#
# <details><summary>Hint 1: a question</summary>
# What is the probability that the best of the ten counts is at most 60?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# The best is at most 60 exactly when each of them is, and they are independent. So you know the distribution function
# of the best count. Its mean follows from it, for instance by summing the probabilities that it exceeds 0, 1, 2 and so
# on.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A table of the binomial probabilities of all counts, in float64 (`math.comb` or `torch.lgamma` help). Its running sum.
# A power. A mean count, divided by the number of problems, minus $p$.
# </details>


# %% tags=["exercise"]
def overstated(p: float, problems: int, checkpoints: int) -> float:
    """Mean of the best measured accuracy of all checkpoints, less p: each problem is solved with probability p."""
    # BEGIN SOLUTION
    chances = [math.comb(problems, c) * p**c * (1 - p) ** (problems - c) for c in range(problems + 1)]
    at_most = torch.tensor(chances, dtype=torch.float64).cumsum(0).clamp(max=1)
    return ((1 - at_most**checkpoints).sum() / problems).item() - p
    # END SOLUTION


# %%
check.q3(overstated)

# %%
if check.q3.passed:
    fig, ax = plt.subplots()
    for n, color in ((100, VERMILION), (200, ORANGE), (1000, BLUE)):
        ax.plot(range(1, 21), [100 * overstated(0.6, n, k) for k in range(1, 21)], color=color, label=f"{n:,} problems")
    ax.set(xlabel="checkpoints to choose from", ylabel="points", title="What choosing the best adds, at 60%")
    ax.set_xticks(range(2, 21, 2))
    ax.legend()
    ax.grid()
    plt.show()

# %% [markdown] tags=["solution"]
# Ten checkpoints on 200 problems: {{ 100 * overstated(0.6, 200, 10):.1f }} points out of nothing. That's why you
# *choose* a run on validation problems and *report* it on test problems, and seeds, prompts and learning rates are no
# different. Checkpoints tested on the **same** problems have correlated luck, so the best of them gains less, but it
# still gains.

# %% [markdown]
# ## q4 · Which engine lied?
#
# ●●●●○ · 25 minutes
#
# Five teams plugged their own engines into the loop. `sampled` is the log-prob with which the engine claims to have
# drawn each token, `recomputed` what training computes for it before the first update, both `[rows, length]`. `mask` is
# true on real tokens; past the end there is nan. Return which of the five this is:
#
# - `ROUNDED`: bfloat16 rounding and nothing else, the best you can expect;
# - `TRUNCATED`: the engine samples with a top-k that training does not know;
# - `TEMPERATURE`: the engine has a temperature, below 1 or above, that training does not know;
# - `STALE`: the engine still has the weights of some steps ago;
# - `SHIFTED`: training looks up the log-probs one position too far, those of the next token.
#
# All of them round. Here is one rollout of each. **Look for** what makes each picture different from all others.

# %% tags=["hide-input"]
# @title Figure: five engines
ENGINES = ("ROUNDED", "TRUNCATED", "TEMPERATURE", "STALE", "SHIFTED")


def rollout_of(engine: str, rows: int = 12, length: int = 24):
    """sampled, recomputed and mask of one rollout, for a policy of random logits."""
    logits = 2.5 * torch.randn(rows, length + 1, 60)
    of_engine = {
        "TRUNCATED": logits.masked_fill(logits < logits.topk(10).values[..., -1:], -math.inf),
        "TEMPERATURE": logits / 0.7,
        "STALE": logits + 0.4 * torch.randn_like(logits),
    }.get(engine, logits)
    tokens = torch.distributions.Categorical(logits=of_engine).sample()[..., None]
    sampled, recomputed = (x.log_softmax(-1).gather(-1, tokens)[..., 0] for x in (of_engine, logits))
    recomputed = recomputed + 0.005 * torch.randn_like(recomputed).clamp(-3, 3)
    recomputed = recomputed[:, 1:] if engine == "SHIFTED" else recomputed[:, :-1]
    mask = torch.arange(length) < torch.randint(length // 2, length + 1, (rows,))[:, None]
    return sampled[:, :-1].masked_fill(~mask, math.nan), recomputed.masked_fill(~mask, math.nan), mask


torch.manual_seed(1)
fig, axes = plt.subplots(1, 5, figsize=(13, 3), sharex=True, sharey=True, layout="constrained")
for ax, engine in zip(axes, ENGINES, strict=True):
    sampled, recomputed, mask = rollout_of(engine)
    ax.plot([-8, 0], [-8, 0], color=BLACK, linewidth=0.8)
    ax.plot(sampled[mask], recomputed[mask], ".", color=BLUE, markersize=4, alpha=0.6)
    ax.set(title=engine, xlabel="sampled, nats", xlim=(-8, 0.3), ylim=(-8, 0.3))
axes[0].set_ylabel("recomputed, nats")
plt.show()

# %% [markdown]
# Any sensible thresholds work. The engines of the check differ in strength, and the temperature may be above 1.
#
# <details><summary>Hint 1: a question</summary>
# Which of the five can never have a recomputed log-prob above the sampled one (but for rounding), and why?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Take the real tokens first. Then ask four questions, each answered by a number: how large are the gaps; is any of them
# positive; are the two log-probs correlated at all; does the gap depend on the log-prob? The last has a trap: if the
# two log-probs are unrelated, their gap goes with both.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Four `if`s in the order of hint 2's questions, with what is left over at the end. The last two need a correlation each
# (`torch.corrcoef`). A gap of bfloat16 stays below 0.02 here.
# </details>

# %% tags=["exercise"]
ROUNDED, TRUNCATED, TEMPERATURE, STALE, SHIFTED = range(5)


def which_engine(sampled: torch.Tensor, recomputed: torch.Tensor, mask: torch.Tensor) -> int:
    """What the engine does: log-probs [rows, length], nan where the mask [rows, length] is false."""
    # BEGIN SOLUTION
    drawn, trained = sampled[mask], recomputed[mask]
    gap = trained - drawn
    if gap.abs().max() < 0.03:
        return ROUNDED
    if gap.max() < 0.03:
        return TRUNCATED
    if torch.corrcoef(torch.stack([drawn, trained]))[0, 1] < 0.5:
        return SHIFTED
    if torch.corrcoef(torch.stack([drawn, gap]))[0, 1].abs() > 0.5:
        return TEMPERATURE
    return STALE
    # END SOLUTION


# %%
check.q4(which_engine)

# %% [markdown] tags=["solution"]
# **Truncated**: the engine shares the mass of the tail among the tokens that it keeps, so its log-probs are too high by
# minus the logarithm of the mass kept, at every token. **Temperature**: the engine's log-prob is training's divided by
# $T$, minus a number that depends on the position, so the gap rises or falls with it. **Stale**: the weights have
# moved, and the gap hardly depends on the log-prob. **Shifted**: the two numbers belong to different tokens. The mean
# gap doesn't tell the first three apart: it's minus a KL divergence, so below zero for each.

# %% [markdown]
# ## q5 · Name the failure
#
# ●●●●○ · 25 minutes
#
# You get four metrics of a run, each a float tensor `[steps]` with at least ten steps: `reward`, `accuracy` (strict),
# `truncated` and `kl`. `kl` is nan where there was nothing to measure. If that's everywhere, the other three must do.
# Return one of the five numbers:
#
# - `STILL`: the policy never moved; its KL stays at rounding level throughout;
# - `COLLAPSED`: the reward ended far below where it began;
# - `CUT_OFF`: it did not collapse, and at the end a large share of the answers is cut off;
# - `HACKED`: answers end, the reward ended no lower, and yet the accuracy did not rise;
# - `HEALTHY`: none of these.
#
# Single steps are noisy: compare the mean of the first five steps with that of the last five. The check uses the
# recorded runs of the lesson, all seeds of them, and some that it makes up. Any sensible threshold works.

# %% tags=["hide-input"]
# @title Figure: one seed of each recorded run
names = {"healthy": "HEALTHY", "format": "HACKED", "collapse": "COLLAPSED", "truncation": "CUT_OFF", "still": "STILL"}
fig, axes = plt.subplots(2, 5, figsize=(13, 4.6), layout="constrained", sharex=True, sharey="row")
for column, (name, verdict) in zip(axes.T, names.items(), strict=True):
    recorded = load_curve(f"lesson05_{name}")["results"][0]["metrics"]
    for key, color in (("reward", ORANGE), ("accuracy", BLUE), ("truncated", BLACK)):
        column[0].plot(recorded[key], color=color, linewidth=3 if key == "reward" else 1.4, label=key)
    column[1].plot([math.nan if v is None else max(v, 1e-9) for v in recorded["kl"]], color=VERMILION)
    column[0].set_title(verdict)
    column[1].set(yscale="log", xlabel="training step")
axes[0, 0].set_ylabel("share")
axes[1, 0].set_ylabel("KL, nats per token")
axes[0, 1].legend(loc="center right")
plt.show()

# %% [markdown]
# <details><summary>Hint 1: a question</summary>
# A collapsed run has most of its answers cut off as well, and a run that stands still has no rise of the accuracy
# either. In which order must you ask?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# From the most special to the most general. And the KL may be missing in any step, even in all of them: look only at
# those that were measured.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Four `if`s. The first looks at the largest KL, on a scale of nats where learning shows from a thousandth on; the
# second compares two means of the reward, as a ratio; the third one mean of `truncated` with a number; the last two
# means of the accuracy, with room for noise.
# </details>

# %% tags=["exercise"]
HEALTHY, STILL, COLLAPSED, CUT_OFF, HACKED = range(5)


def diagnose(reward: torch.Tensor, accuracy: torch.Tensor, truncated: torch.Tensor, kl: torch.Tensor) -> int:
    """What is wrong with a run, one of the numbers above. Each argument: [steps]."""
    # BEGIN SOLUTION
    measured = kl[~kl.isnan()]
    if len(measured) and measured.max() < 1e-4:
        return STILL
    if reward[-5:].mean() < 0.5 * reward[:5].mean():
        return COLLAPSED
    if truncated[-5:].mean() > 0.25:
        return CUT_OFF
    if accuracy[-5:].mean() < accuracy[:5].mean() + 0.03:
        return HACKED
    return HEALTHY
    # END SOLUTION


# %%
check.q5(diagnose)

# %%
if check.q5.passed:
    verdicts = ["HEALTHY", "STILL", "COLLAPSED", "CUT_OFF", "HACKED"]
    for name in (*names, "half_format", "words_strict", "words_lenient"):
        found = []
        for seed in load_curve(f"lesson05_{name}")["results"]:
            columns = (seed["metrics"][key] for key in ("reward", "accuracy", "truncated", "kl"))
            run = (torch.tensor([math.nan if v is None else v for v in column]) for column in columns)
            found.append(verdicts[int(diagnose(*run))])
        print(f"{name:14s}", *found)

# %% [markdown] tags=["solution"]
# Look at `words_lenient`: its reward is the lenient reading, and the strict accuracy hardly moves, by more or less than
# our threshold depending on the seed. By our definition that's a hacked reward, but if you looked at the samples you'd
# disagree: the model got better, in a form that the strict reading can't see. A program can say where to look, but not
# what you wanted.
