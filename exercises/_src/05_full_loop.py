# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# **You will write**
#
# - the interval of an accuracy, and of the difference of two models on the same problems;
# - the test that finds an engine which samples from another policy than the one that trains;
# - a learning-rate schedule with warm-up;
# - a program that reads the metrics of a run and names what went wrong.
#
# Replace `raise NotImplementedError` and run the cell below each exercise. The lesson is
# [notebooks/05_full_loop.ipynb](../notebooks/05_full_loop.ipynb).

# %%
import matplotlib.pyplot as plt
import torch

from rlcourse.course.checks import nb05 as check
from rlcourse.measure.plots import BLACK, BLUE, ORANGE, VERMILION

print("ready")

# %% [markdown]
# ## 1 · The interval of an accuracy
#
# ●○○○○ · 5 minutes
#
# `right` is a bool tensor `[problems]`. Return a tensor `[3]`: the accuracy $p$, and the ends of its interval
# $p \pm z\sqrt{p(1-p)/n}$. An accuracy is never below 0 or above 1, so cut the ends there.
#
# <details><summary>Hint 1</summary>
# Three numbers: the mean, the standard error, and the two sums. `bool` has no mean.
# </details>
# <details><summary>Hint 2</summary>
# `p = right.float().mean()`; n is `len(right)`; `clamp(0, 1)` cuts.
# </details>
# <details><summary>Hint 3</summary>
# `torch.stack([p, p - z * se, p + z * se]).clamp(0, 1)` with `se = (p * (1 - p) / len(right)).sqrt()`.
# </details>


# %% tags=["exercise"]
def accuracy_interval(right, z=1.96):
    """Accuracy and the ends of its interval: right [problems] bool → [3] float."""
    # BEGIN SOLUTION
    p = right.float().mean()
    se = (p * (1 - p) / len(right)).sqrt()
    return torch.stack([p, p - z * se, p + z * se]).clamp(0, 1)
    # END SOLUTION


# %%
check.q1(accuracy_interval)

# %%
if check.q1.passed:
    fig, ax = plt.subplots(figsize=(6.5, 3), layout="constrained")
    sizes = torch.tensor([50, 100, 200, 500, 1000, 2000, 5000, 10_000])
    ends = torch.stack([accuracy_interval(torch.arange(n) < 0.85 * n) for n in sizes.tolist()])
    ax.fill_between(sizes, 100 * ends[:, 1], 100 * ends[:, 2], color=BLUE, alpha=0.25)
    ax.plot(sizes, 100 * ends[:, 0], color=BLUE, marker="o")
    ax.axhline(87, color=ORANGE, linestyle="--", label="another model, 87 %")
    ax.set(xscale="log", title="85 % measured on n problems", xlabel="problems", ylabel="accuracy, %")
    ax.legend(loc="lower right")
    plt.show()

# %% [markdown] tags=["solution"]
# The interval reaches 87 % until there are more than a thousand problems, and the other model has an interval of its
# own. A weakness of this formula: with all answers right it has no width at all. Wilson's interval mends that; for
# accuracies between 10 and 90 % on hundreds of problems the two agree.

# %% [markdown]
# ## 2 · Two models, the same problems
#
# ●●○○○ · 10 minutes
#
# `first` and `second` are bool tensors `[problems]`: which problems each model solved. Return a tensor `[3]`: the mean
# difference $\bar d$ (`second` less `first`) and the ends of its interval $\bar d \pm z\,\mathrm{std}(d)/\sqrt n$,
# where $d_i\in\{-1, 0, 1\}$ is the difference at problem $i$ and std divides by $n$.
#
# <details><summary>Hint 1</summary>
# Subtract first, then take mean and deviation: what both models did alike drops out.
# </details>
# <details><summary>Hint 2</summary>
# bool tensors cannot be subtracted; floats can. torch's `std` divides by n - 1 unless you say otherwise.
# </details>
# <details><summary>Hint 3</summary>
# `d = second.float() - first.float()`, `se = d.std(correction=0) / len(d) ** 0.5`.
# </details>


# %% tags=["exercise"]
def paired_interval(first, second, z=1.96):
    """Mean difference and the ends of its interval: first, second [problems] bool → [3] float."""
    # BEGIN SOLUTION
    d = second.float() - first.float()
    se = d.std(correction=0) / len(d) ** 0.5
    return torch.stack([d.mean(), d.mean() - z * se, d.mean() + z * se])
    # END SOLUTION


# %%
check.q2(paired_interval)

# %%
if check.q2.passed:
    torch.manual_seed(0)
    first = torch.rand(1000) < 0.85
    for name, changes in [("independent models", torch.rand(1000) < 0.87), ("30 answers mended", first.clone())]:
        if name != "independent models":
            changes[(~first).nonzero()[:30, 0]] = True
        print(f"{name:20s}", [f"{100 * v:+.1f} points" for v in paired_interval(first, changes)])

# %% [markdown] tags=["solution"]
# Two checkpoints of one run agree on most problems, so their difference is known far better than either accuracy. For
# models that have nothing to do with each other the pairing gains nothing, and costs nothing.

# %% [markdown]
# ## 3 · Is the engine the policy?
#
# ●●○○○ · 10 minutes
#
# `sampled` `[rows, length]` are the log-probs with which an engine drew its tokens, `recomputed` `[rows, length]` what
# training computes for them, `mask` `[rows, length]` is true on real tokens. Return a tensor `[3]`, over **real
# tokens**: the mean of the absolute gap, the largest absolute gap, and the share of tokens whose ratio
# $\exp(\text{recomputed} - \text{sampled})$ lies outside $[1-\epsilon, 1+\epsilon]$. Where the mask is false there may
# be anything, nan and infinity too.
#
# <details><summary>Hint 1</summary>
# Choose the real tokens before you compute anything with them: 0 · nan is nan.
# </details>
# <details><summary>Hint 2</summary>
# `(recomputed - sampled)[mask]` is a flat tensor of the gaps that count.
# </details>
# <details><summary>Hint 3</summary>
# The share is the mean of `(gap.exp() - 1).abs() > epsilon` as floats.
# </details>


# %% tags=["exercise"]
def mismatch(recomputed, sampled, mask, epsilon=0.2):
    """Mean gap, largest gap, share of ratios outside the clip range: [rows, length] three times → [3]."""
    # BEGIN SOLUTION
    gap = (recomputed - sampled)[mask]
    outside = (gap.exp() - 1).abs() > epsilon
    return torch.stack([gap.abs().mean(), gap.abs().max(), outside.float().mean()])
    # END SOLUTION


# %%
check.q3(mismatch)

# %%
if check.q3.passed:
    torch.manual_seed(0)
    logits = 2 * torch.randn(16, 20, 100)
    names = {0: "no top-k", 50: "top-k 50", 20: "top-k 20", 5: "top-k 5"}
    for k, name in names.items():
        lowest = logits.topk(k).values[..., -1:] if k else torch.tensor(float("-inf"))
        engine = logits.masked_fill(logits < lowest, float("-inf")).log_softmax(-1)
        tokens = torch.distributions.Categorical(logits=engine).sample()[..., None]
        pair = [x.gather(-1, tokens)[..., 0] for x in (logits.log_softmax(-1), engine)]
        mean, largest, outside = mismatch(*pair, torch.ones(16, 20, dtype=torch.bool))
        print(f"{name:9s} mean gap {mean:.3f}, largest {largest:.3f}, ratio outside 0.8 to 1.2: {outside:.0%}")

# %% [markdown] tags=["solution"]
# The ratios leave the clip range before anything was learned. `nan` is why the mask comes first: multiplying by a mask
# of zeros keeps it, and `nanmean` would hide a real one.

# %% [markdown]
# ## 4 · A schedule with warm-up
#
# ●●○○○ · 10 minutes
#
# Return the learning rate of training step `step`, counted from 0, of `steps` in all. In the first `warmup` steps it
# rises in equal parts so that step `warmup - 1` has `peak`; the very first step already learns. Then it follows half a
# cosine from `peak` at step `warmup` to 0 at step `steps`. `warmup` may be 0.
#
# <details><summary>Hint 1</summary>
# Two cases. In the second, ask which share of the steps after warm-up is over.
# </details>
# <details><summary>Hint 2</summary>
# Rising: `(step + 1) / warmup`. Falling: half of `1 + cos(pi * share)`.
# </details>
# <details><summary>Hint 3</summary>
# `share = (step - warmup) / max(1, steps - warmup)`; the `max` is for a run that is all warm-up.
# </details>


# %% tags=["exercise"]
def learning_rate(step, steps, warmup, peak):
    """Learning rate of a step (from 0): linear warm-up, then half a cosine to 0. A number."""
    # BEGIN SOLUTION
    if step < warmup:
        return peak * (step + 1) / warmup
    share = (step - warmup) / max(1, steps - warmup)
    return peak * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * share)).item())
    # END SOLUTION


# %%
check.q4(learning_rate)

# %%
if check.q4.passed:
    fig, ax = plt.subplots(figsize=(6.5, 2.8), layout="constrained")
    for warmup, color in [(0, BLACK), (10, BLUE), (40, ORANGE)]:
        ax.plot([learning_rate(s, 100, warmup, 4e-5) for s in range(100)], color=color, label=f"warm-up {warmup}")
    ax.set(title="Learning rate, peak 4e-5", xlabel="training step", ylabel="learning rate")
    ax.legend()
    plt.show()

# %% [markdown] tags=["solution"]
# Warm-up matters with AdamW because its second moments are estimates of one or two gradients in the first steps. A
# resumed run must get the same number at the same step: a schedule is a function of the step, not of how often it was
# called.

# %% [markdown]
# ## 5 · Name the failure
#
# ●●●●○ · 25 minutes
#
# You get four metrics of a run, each a float tensor `[steps]` with at least ten steps: `reward`, `accuracy` (strict),
# `truncated` and `kl`. `kl` is nan where there was nothing to measure. Return one of the five numbers:
#
# - `STILL`: the policy never moved; its KL stays at rounding level throughout;
# - `COLLAPSED`: the reward ended far below where it began;
# - `CUT_OFF`: it did not collapse, and at the end a large share of the answers is cut off;
# - `HACKED`: answers end, the reward ended no lower, and yet the accuracy did not rise;
# - `HEALTHY`: none of these.
#
# Single steps are noisy: compare the mean of the first five steps with that of the last five. The check uses the
# recorded runs of the lesson, which look like this, and some that it makes up. Any sensible threshold works.

# %%
from rlcourse.course.lessons.curve_records import load_curve

fig, axes = plt.subplots(2, 5, figsize=(15, 5), layout="constrained", sharex=True, sharey="row")
for column, name in zip(axes.T, ["healthy", "format", "collapse", "truncation", "still"], strict=True):
    recorded = load_curve(f"lesson05_{name}")["results"][0]["metrics"]
    for key, color in [("reward", ORANGE), ("accuracy", BLUE), ("truncated", BLACK)]:
        column[0].plot(recorded[key], color=color, label=key)
    column[1].plot([float("nan") if v is None else max(v, 1e-9) for v in recorded["kl"]], color=VERMILION)
    column[0].set_title(name)
    column[1].set(yscale="log", xlabel="training step")
axes[0, 0].set_ylabel("share")
axes[1, 0].set_ylabel("KL, nats a token")
axes[0, 0].legend(fontsize=9)
plt.show()

# %% [markdown]
# <details><summary>Hint 1</summary>
# The order of the questions matters: a collapsed run has most of its answers cut off as well, and a run that stands
# still has no rise of the accuracy either. Ask for the most special thing first.
# </details>
# <details><summary>Hint 2</summary>
# `kl[~kl.isnan()]` are the steps that were measured; there may be none. Thresholds that work: 1e-4 nats for KL at
# rounding level, half the starting reward for a collapse, 0.03 for a rise, 0.25 for a large share.
# </details>
# <details><summary>Hint 3</summary>
# `start = accuracy[:5].mean()`, `end = accuracy[-5:].mean()`, likewise for the reward; then four `if`s in the order
# STILL, COLLAPSED, CUT_OFF, HACKED.
# </details>

# %% tags=["exercise"]
HEALTHY, STILL, COLLAPSED, CUT_OFF, HACKED = 0, 1, 2, 3, 4


def diagnose(reward, accuracy, truncated, kl):
    """What is wrong with a run: reward, accuracy, truncated, kl [steps] float → one of the numbers above."""
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
    named = ["healthy", "still", "collapsed", "cut off", "hacked"]
    for name in [
        "healthy",
        "format",
        "half_format",
        "collapse",
        "truncation",
        "still",
        "words_strict",
        "words_lenient",
    ]:
        verdicts = []
        for seed in load_curve(f"lesson05_{name}")["results"]:
            keys = ("reward", "accuracy", "truncated", "kl")
            columns = ([float("nan") if v is None else v for v in seed["metrics"][key]] for key in keys)
            verdicts.append(named[diagnose(*map(torch.tensor, columns))])
        print(f"{name:14s}", *verdicts)

# %% [markdown] tags=["solution"]
# Look at `words_lenient`: its reward is the lenient reading, and the strict accuracy hardly moves. By our definition
# that is a hacked reward, and a person who looks at the samples would disagree: the model learned arithmetic, in a form
# that the strict reading cannot see. A program can say where to look. It cannot say what you wanted.
