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
# - what GRPO's two divisions do to a run;
# - what a mean over an answer's tokens really rewards: in two lines, on a coin, on a model;
# - which of the two divisions decides the race, and how;
# - exactly which problems the other division prefers, and whether it shows in a curve;
# - nine algorithms as a few switches of one loop.
#
# You need lessons [01](01_policy_gradient.ipynb), [02](02_ppo.ipynb) and [03](03_grpo.ipynb): your loop; the ratio and
# the clip; the group as a baseline.

# %%
import math
from statistics import fmean

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown, display

from rlcourse.course import changes, pick
from rlcourse.course.lessons import lesson04
from rlcourse.course.lessons.curve_records import load_curve
from rlcourse.course.own import load_loop
from rlcourse.course.widgets import bet, explorer
from rlcourse.measure.plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION
from rlcourse.policy import load_policy
from rlcourse.rollout import make_engine
from rlcourse.sampling import Sampling

SETTINGS = lesson04.ISOLATED  # of the runs in section 4
PROMPTS, GROUP, LIMIT = (SETTINGS[name] for name in ("num_prompts", "num_generations", "max_new_tokens"))
loop = load_loop()
task = loop.task

# %% [markdown]
# ## 1 · Two divisions and a race
#
# Your loop became GRPO in lesson 03. Up to a constant factor, it differs from lesson 01's in two places. It divides the
# rewards of a group by their standard deviation, and it takes the mean over the tokens of an answer where lesson 01
# took the sum. With $|y_i|$ for the number of tokens in answer $i$,
#
# $$\mathcal{L} = -\frac1N \sum_{i=1}^{N} \frac{1}{|y_i|} \sum_{t=1}^{|y_i|} A_i \log \pi_\theta(y_{i,t} \mid s_{i,t}),
# \qquad A_i = \frac{R_i - \mathrm{mean}(R)}{\mathrm{std}(R)},$$
#
# with the group's mean and deviation. (With one update per rollout every ratio $\rho$ is 1, so the clip does nothing;
# $\beta = 0$.) **Dr. GRPO** (Liu et al. 2025) drops the deviation and puts a constant in place of the length:
#
# | in your loop | GRPO | Dr. GRPO |
# | --- | --- | --- |
# | `weigh` | `(groups - mean) / (std + 1e-4)` | `groups - mean` |
# | `loss` | `by_token.sum(1) / mask.sum(1)` | `by_token.sum(1) / LIMIT` |
#
# **Make the two deletions** in [the first exercise](../exercises/04_dr_grpo.ipynb).
#
# Both divisions look like harmless scaling, and AdamW divides scale out anyway. Are they? Here is the race: the
# course's small model, {{ lesson04.SLOW["steps"] }} steps at a quarter of the usual learning rate, so that we can
# watch; up to {{ lesson04.SLOW["max_new_tokens"] }} tokens per answer; {{
# len(load_curve("lesson04_slow_grpo")["results"]) }} seeds each. Only the two divisions differ. Bet on the means over
# seeds.

# %% tags=["hide-input"]
# @title Your bet
FATES = {  # by whether GRPO leads at first, and in the end
    (False, False): "Dr. GRPO leads all the way",
    (True, True): "GRPO leads all the way",
    (True, False): "GRPO leads first, then Dr. GRPO",
    (False, True): "Dr. GRPO leads first, then GRPO",
}
race_bet = bet("Greedy accuracy: which of the two is ahead at step 10, and which at the end?", [*FATES.values()])

# %% tags=["hide-input"]
# @title Figure: the race
VARIANTS = {  # of the records: label, colour, line style
    "grpo": ("GRPO", GREEN, "-"),
    "no_std": ("GRPO without the deviation", ORANGE, "--"),
    "no_length": ("GRPO without the length", SKY, "-."),
    "dr_grpo": ("Dr. GRPO", BLUE, "-"),
}


def accuracy(name: str) -> tuple[list[int], torch.Tensor]:
    """Steps, and greedy accuracy in percent of a record: [seeds, evaluations]."""
    seeds = load_curve(name)["results"]
    return [row["step"] for row in seeds[0]["evals"]], torch.tensor(
        [[100 * row["accuracy"] for row in seed["evals"]] for seed in seeds]
    )


def band(ax, x, runs, color, label, style="-"):
    """The mean over seeds and the range from least to most. runs: [seeds, points]."""
    runs = torch.as_tensor(runs)
    ax.fill_between(x, runs.amin(0), runs.amax(0), color=color, alpha=0.18, linewidth=0)
    ax.plot(x, runs.mean(0), style, color=color, label=label)


fig, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
race = {variant: accuracy(f"lesson04_slow_{variant}") for variant in VARIANTS}
for variant, (label, color, style) in VARIANTS.items():
    steps, runs = race[variant]
    if variant in ("grpo", "dr_grpo"):
        band(axes[0], steps, runs, color, label, style)
    axes[1].plot(steps, (runs - race["dr_grpo"][1]).mean(0), style, color=color, marker="o", label=label)
axes[0].set(title="the race", xlabel="training step", ylabel="greedy, % right")
axes[1].set(title="lead over Dr. GRPO's mean", xlabel="training step", ylabel="points")
for ax, title in zip(axes, ("mean of 5 seeds, band: range", "mean of 5 seeds"), strict=True):
    ax.legend(title=title)
    ax.grid()
at = {step: {v: runs[:, steps.index(step)] for v, (steps, runs) in race.items()} for step in race["grpo"][0]}
first, last = steps[1], steps[-1]
ahead = {step: (runs["grpo"] - runs["dr_grpo"]).mean().item() for step, runs in at.items()}  # GRPO, in points
worst = min(ahead, key=ahead.get)
race_bet.result(FATES[ahead[first] > 0, ahead[last] > 0])
plt.show()

# %% [markdown]
# At step {{ first }} GRPO is {{ ahead[first]:.1f }} points ahead, its worst seed ahead of Dr. GRPO's best. {{ assert
# at[first]["grpo"].min() > at[first]["dr_grpo"].max() }} At step {{ worst }} it is {{ -ahead[worst]:.1f }} points
# behind, its best seed behind Dr. GRPO's worst. {{ assert at[worst]["grpo"].max() < at[worst]["dr_grpo"].min() }} At
# the end, after {{ last }} steps, GRPO is {{ -ahead[last]:.1f }} points behind, and its best seed is no better than Dr.
# GRPO's worst. {{ assert ahead[last] < 0 and at[last]["grpo"].max() <= at[last]["dr_grpo"].min() }} (That's on
# validation problems. On the test problems the ranges overlap, {{ assert max(seed["test"]["accuracy"] for seed in
# load_curve("lesson04_slow_grpo")["results"]) > min(seed["test"]["accuracy"] for seed in
# load_curve("lesson04_slow_dr_grpo")["results"]) }} so don't count on a lead of a point or two in a single run.)
#
# The right panel shows which division is to blame. The two variants that divide by the length stay together, and so do
# the two that don't. On average the deviation never makes more than about a point's difference; the length makes up to
# four. {{ assert max(abs((at[s][a] - at[s][b]).mean()) for s in at for a, b in (("grpo", "no_std"), ("no_length",
# "dr_grpo"))) < 1.1 and abs((at[40]["no_std"] - at[40]["dr_grpo"]).mean()) > 3 }} So the riddle is about the length,
# and it has two halves: **why does GRPO lead first, and why does it lose?**
#
# ## 2 · Paid by the token
#
# Read REINFORCE backwards. Lesson 01 showed $\nabla \mathbb{E}[R] = \mathbb{E}[R\, \nabla \log \pi(y)]$ for **any**
# number $R$ that an answer earns. GRPO's gradient for an answer with advantage $A$ is that formula with something else
# in place of $R$:
#
# $$\mathbb{E}\Big[\frac{A}{|y|} \sum_t \nabla \log \pi(y_t \mid s_t)\Big]
#   = \mathbb{E}\Big[\frac{A}{|y|}\, \nabla \log \pi(y)\Big]
#   = \nabla\, \mathbb{E}\Big[\frac{A}{|y|}\Big] \quad (A \text{ a given function of } y).$$
#
# So this loss doesn't maximise what an answer earns but what it earns **per token**. A right answer ($A > 0$) does
# better if it's short. A wrong one ($A < 0$) pays a fine of $|A|/|y|$, and the longer it rambles on, the smaller the
# fine. Three ways to add up the tokens of $N$ answers are common:
#
# | sum of the token losses, divided by | who | weight of one token |
# | --- | --- | --- |
# | its answer's length, then $N$ (`sequence_mean`) | GRPO | $1 / (N\, \lvert y_i\rvert)$ |
# | the tokens of the batch (`token_mean`) | DAPO | $1 / \sum_j \lvert y_j\rvert$ |
# | $N$ × the token limit (`constant`) | Dr. GRPO | $1 / (N \cdot \text{limit})$ |
#
# ## 3 · A coin that knows when to stop
#
# How strong is that pull? Here is the smallest policy whose answers have a length: after each token it stops with
# probability $q = \sigma(\theta)$, else it goes on. An answer of length $L$ has $\log \pi = (L - 1) \log(1 - q) + \log
# q$, and its derivative with respect to $\theta$ is $1 - qL$. Suppose **all** of them have the same advantage $A$, as
# answers do that share a bad opening when others in their group began better. Then no length is better than another, so
# a fair gradient is 0 on average. Without a division it is, since $\mathbb{E}[L] = 1/q$. GRPO's division makes it
#
# $$\mathbb{E}\Big[\frac{A}{L}(1 - qL)\Big] = A \Big(\mathbb{E}\Big[\frac1L\Big] - \frac{1}{\mathbb{E}[L]}\Big).$$
#
# The bracket is positive (Jensen's inequality), so $\theta$ moves with the sign of $A$: answers that are all wrong
# learn to stop less often, answers that are all right more often. And DAPO's mean over the tokens of a batch? There the
# divisor is the sum $S$ of all $N$ lengths, and the bracket becomes $\mathbb{E}[N/S] - q$, which can be added up
# exactly ($S$ is negative binomial). How much of GRPO's bias is left?

# %% tags=["hide-input"]
# @title Table: what token_mean keeps of GRPO's bias


def bias(rows: int, q: float, terms: int = 60_000) -> float:
    """E[rows / S] - q, where S is the sum of the lengths of `rows` answers."""
    s = torch.arange(rows, rows + terms, dtype=torch.float64)
    ways = s.lgamma() - torch.lgamma(s - rows + 1) - math.lgamma(rows)
    chance = (ways + rows * math.log(q) + (s - rows) * math.log1p(-q)).exp()
    return (chance * rows / s).sum().item() - q


MEANS = (2, 20, 40)
table = ["| answers in the batch | " + " | ".join(f"mean length {mean}" for mean in MEANS) + " |", "| --- " * 4 + "|"]
kept = {rows: [bias(rows, 1 / mean) / bias(1, 1 / mean) for mean in MEANS] for rows in (1, 2, 8, 128)}
for rows, shares in kept.items():
    name = "1, the same as GRPO's" if rows == 1 else rows
    table.append(f"| {name} | " + " | ".join(f"{100 * share:.1f}%" for share in shares) + " |")
assert all(abs(bias(1, q) - (-q * math.log(q) / (1 - q) - q)) < 1e-6 for q in (0.5, 0.05, 0.025))  # the closed form
display(Markdown("\n".join(table)))

# %% [markdown]
# The mean over a batch of two answers keeps {{ 100 * kept[2][2]:.0f }} to {{ 100 * kept[2][0]:.0f }}% of GRPO's bias,
# the mean over 128 next to nothing. {{ assert kept[128][0] < 0.02 }} A constant has none. Now let the coin learn, once
# with answers that are all wrong and once with answers that are all right, 16 per step. They start at ten tokens on
# average, and the limit is 80. (Dr. GRPO's constant is 10 here, so that its steps start about as large as
# `token_mean`'s.) **Look for** which lines drift and which stay put.

# %% tags=["hide-input"]
# @title Figure: the coin learns


def learn(advantage: float, how: str, steps=200, rows=16, rate=0.3, seeds=24) -> torch.Tensor:
    """Mean length of the answers at each step, cut off at 80 tokens: [seeds, steps]."""
    torch.manual_seed(0)
    theta, found = torch.full((seeds, 1), -math.log(9)), []
    for _ in range(steps):
        q = theta.sigmoid()
        found.append((1 - (1 - q) ** 80) / q)
        drawn = 1 + (torch.rand(seeds, rows).log() / torch.log1p(-q)).floor()
        lengths, ended = drawn.clamp(max=80), drawn <= 80
        score = ended.float() - q * lengths
        divisor = {
            "GRPO": rows * lengths,
            "DAPO: token_mean": lengths.sum(1, keepdim=True),
            "Dr. GRPO": torch.tensor(10.0 * rows),
        }
        theta = theta + rate * (advantage * score / divisor[how]).sum(1, keepdim=True)
    return torch.cat(found, 1)


HOWS = {"GRPO": (GREEN, "-"), "DAPO: token_mean": (VERMILION, "--"), "Dr. GRPO": (BLUE, "-.")}
fig, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained", sharey=True)
ends = {}
for ax, (advantage, title) in zip(axes, ((-1.0, "answers that are all wrong"), (1.0, "all right")), strict=True):
    for how, (color, style) in HOWS.items():
        runs = learn(advantage, how)
        ends[how, advantage] = runs[:, -1].mean().item()
        middle = runs.quantile(0.1, dim=0), runs.quantile(0.9, dim=0)
        ax.fill_between(range(200), *middle, color=color, alpha=0.18, linewidth=0)
        ax.plot(runs.mean(0), style, color=color, label=how)
    ax.set(title=title, xlabel="step", ylim=(0, 80))
axes[0].set_ylabel("mean length, tokens")
axes[0].legend(title="mean of 24 seeds, band: 10 to 90%", loc="upper left")
plt.show()

# %% [markdown]
# Under GRPO, wrong answers grow to {{ ends["GRPO", -1.0]:.0f }} tokens and right ones shrink to {{ ends["GRPO",
# 1.0]:.1f }}. Under `token_mean` there's a small pull in the same directions, to {{ ends["DAPO: token_mean", -1.0]:.0f
# }} and {{ ends["DAPO: token_mean", 1.0]:.0f }}. {{ assert ends["GRPO", -1.0] > 60 > 20 > ends["DAPO: token_mean",
# -1.0] > 10 > ends["DAPO: token_mean", 1.0] }} Under the constant they stay where they were, up to noise.
#
# ## 4 · The same with a language model
#
# Now we put the model in the coin's place. Of eight answers to a problem, four are made to begin with filler (`{{
# lesson04.THINK }}`), and earn 0; the other four are made to begin with the first line of the working, and earn 1. The
# model writes the rest, and what it writes **doesn't change the reward**. The openings are part of the prompts: they
# aren't trained, and their tokens aren't counted. In your loop, that replaces two more functions, `roll_out` and
# `judge`.

# %%
probes = task.problems("validation")[: pick(4, 32)]  # the same for all measurements of the length
FATED = torch.tensor([0.0] * (GROUP // 2) + [1.0] * (GROUP // 2)).repeat(PROMPTS)


def forced(policy, problems):
    """Two openings to each problem, half a group of answers after each."""
    prompts = lesson04.forced_prompts(policy, problems)  # each problem twice: followed by filler, then by working
    return make_engine(policy, "fast", torch.float32).generate(prompts, GROUP // 2, LIMIT, Sampling())


def fated(policy, problems, rollout):
    """What an answer earns, whatever it says."""
    return FATED


def length_after_filler(policy, problems=None) -> float:
    """Mean tokens of the answers that begin with filler: in this lesson it's logged in the place of accuracy."""
    # `forced_lengths` samples four answers after each opening, and takes the mean of their lengths.
    return lesson04.forced_lengths(policy, make_engine(policy, "fast", torch.float32), probes, LIMIT)["filler"]


def centered(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """Each reward minus the mean of its group: [rows]."""
    groups = rewards.view(-1, group)
    return (groups - groups.mean(1, keepdim=True)).flatten()


def normalized(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """The same over the deviation of the group: [rows]."""
    deviation = rewards.view(-1, group).std(1, keepdim=True)
    return (centered(rewards, group).view(-1, group) / (deviation + 1e-4)).flatten()


def run(weigh, loss, steps: int):
    """The policy, and (step, length after filler) every five steps."""
    loop.roll_out, loop.judge, loop.greedy_accuracy, loop.LR = forced, fated, length_after_filler, SETTINGS["lr"]
    loop.PROMPTS, loop.GROUP, loop.LIMIT = PROMPTS, GROUP, LIMIT
    loop.weigh, loop.loss = weigh, loss
    policy, log = loop.train(steps, seed=7)
    return policy, [(row["step"], row["accuracy"]) for row in log if row["accuracy"] is not None]


policy = load_policy("embedded")
start = length_after_filler(policy)
print(f"before training, an answer goes on for {start:.0f} tokens after the filler, on average (the limit is {LIMIT})")

# %% tags=["hide-input"]
# @title Your bet
STEPS = pick(2, 20)
length_bet = bet(
    f"Answers that begin with filler go on for {start:.0f} tokens on average, and earn 0 whatever they say. How many "
    f"tokens will it be after {STEPS} steps of GRPO?",
    (0, LIMIT, 1),
    unit="tokens",
)

# %%
live = {"GRPO": run(normalized, changes.grpo, STEPS), "Dr. GRPO": run(centered, changes.dr_grpo, STEPS)}

# %% [markdown]
# The figure shows your two runs as black marks, over recorded ones of {{ SETTINGS["steps"] }} steps with {{
# len(load_curve("lesson04_isolated_grpo")["results"]) }} seeds each. On the right is the control. If what an opening
# earns is what matters, then swapping the rewards must reverse the effect. And if each answer's reward is drawn at
# random (orange), GRPO must leave the length alone. (Yours start at {{ start:.0f }} tokens, the records at {{
# load_curve("lesson04_isolated_grpo")["results"][0]["evals"][0]["filler"]:.0f }}: the same policy, other samples.)

# %% tags=["hide-input"]
# @title Figure: answers whose fate is sealed
LEFT = {
    "grpo": ("GRPO", GREEN, "-"),
    "token_mean": ("token_mean, no deviation", VERMILION, "--"),
    "dr_grpo": ("Dr. GRPO", BLUE, "-."),
}
RIGHT = {
    "grpo": ("they earn 0", GREEN, "-"),
    "grpo_swapped": ("they earn 1", PURPLE, "--"),
    "grpo_coin": ("a coin decides", ORANGE, ":"),
}
sealed = {}
fig, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained", sharey=True)
for ax, lines in zip(axes, (LEFT, RIGHT), strict=True):
    for variant, (label, color, style) in lines.items():
        seeds = load_curve(f"lesson04_isolated_{variant}")["results"]
        runs = torch.tensor([[row["filler"] for row in seed["evals"]] for seed in seeds])
        steps, sealed[variant] = [row["step"] for row in seeds[0]["evals"]], runs[:, -1]
        band(ax, steps, runs, color, label, style)
    ax.set(xlabel="training step", ylim=(0, 135), yticks=range(0, 101, 20))
for (name, (_, log)), marker in zip(live.items(), "vo", strict=True):
    axes[0].plot(*zip(*log, strict=True), marker, color=BLACK, label=f"your run: {name}", zorder=3)
length_bet.line(axes[0])
axes[0].set(title="answers that begin with filler and earn 0", ylabel="mean length, tokens")
axes[1].set_title("the same answers under GRPO")
for ax in axes:
    ax.axhline(LIMIT, color=BLACK, linestyle=":", linewidth=1, label=f"limit: {LIMIT}")
    ax.legend(loc="upper left", ncols=2)
ended_at = {name: log[-1][1] for name, (_, log) in live.items()}
seeds = load_curve("lesson04_isolated_grpo")["results"]
length_bet.result([ended_at["GRPO"], *(row["filler"] for seed in seeds for row in seed["evals"] if row["step"] == 20)])
plt.show()

# %% [markdown]
# Within {{ STEPS }} steps GRPO has taught these answers to run towards the limit: they have {{ ended_at["GRPO"]:.0f }}
# tokens, and every recorded seed does the same. {{ assert ended_at["GRPO"] > 55 and min(row["filler"] for seed in
# load_curve("lesson04_isolated_grpo")["results"] for row in seed["evals"] if row["step"] == 20) > 70 }} Under the other
# two they wander, one seed of five far up, most others a little down: noise without bias. {{ assert all((sealed[name] >
# 30).sum() == 1 and (sealed[name] < 17).sum() >= 3 for name in ("dr_grpo", "token_mean")) }} Where the same answers
# earn 1 they shrink to {{ sealed["grpo_swapped"].mean():.0f }} tokens. {{ assert sealed["grpo_swapped"].max() < 10 }}
# What does a model write when it talks itself out of a fine?

# %%
prompt = lesson04.forced_prompts(policy, [task.problems("train")[2]])[0]
for name, (trained, _) in live.items():
    torch.manual_seed(1)
    rollout = make_engine(trained, "fast", torch.float32).generate([prompt], 2, LIMIT, Sampling())
    print(f"\n{name}, after {STEPS} steps")
    for text in trained.texts(rollout.completion_ids, rollout.completion_mask):
        print("  ", repr(text))

# %% [markdown]
# More words, no more thought: under GRPO it stammers and piles up sums, false ones too, before it gets to `####`.
#
# **When is GRPO fair, then?** When the reward has nothing to do with the text. Then $\mathbb{E}[A \mid y] = 0$ for
# every answer $y$, so $\mathbb{E}[A / |y|]$ is 0 for every policy, and there's nothing to climb: the orange line. The
# bias acts in states that do better or worse than average: an opening beyond saving, a derailed line of thought, a
# problem that's nearly solved.
#
# ## 5 · Why it led, and why it lost
#
# Real training forces no openings. But the model gets into such states by itself. It **guesses**, with `####` and a
# number: the shortest wrong answer there is, about five tokens. {{ assert len(policy.tokenizer("#### 12",
# add_special_tokens=False)["input_ids"]) + 1 == 5 }} And it writes **garbage**, which goes on for {{ fmean(v for seed
# in load_curve("lesson04_kinds_grpo")["results"] for v in seed["steps"]["garbage_length"][:5]):.0f }} tokens (lesson 00
# has both). Under GRPO, at the same advantage, one token of a wrong guess is pushed down {{ fmean(v for seed in
# load_curve("lesson04_kinds_grpo")["results"] for v in seed["steps"]["garbage_length"][:5]) / 5:.0f }} times as hard as
# one of garbage. Here are the first {{ lesson04.BEGINNING["steps"] }} steps of the race, rerun with {{
# len(load_curve("lesson04_kinds_grpo")["results"]) }} seeds and every answer sorted by kind. On the right is the length
# of wrong samples, from the race itself. **Look for** what each method gets rid of, and how fast.

# %% tags=["hide-input"]
# @title Figure: what the two get rid of
kinds = {name: load_curve(f"lesson04_kinds_{name}")["results"] for name in ("grpo", "dr_grpo")}


def by_window(values: list, width: int = 5) -> list[float]:
    """Means over windows of steps."""
    return [fmean(v for v in values[i : i + width] if v is not None) for i in range(0, len(values), width)]


fig, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
greedy_guesses, garbage, wrong, right_share = {}, {}, {}, {}
worked, faulty, garbage_length = {}, {}, {}  # greedy answers, by evaluation: [seeds, evals]; samples' garbage, tokens
for name, seeds in kinds.items():
    label, color, style = VARIANTS[name]
    steps = [row["step"] for row in seeds[0]["evals"]]
    greedy_guesses[name] = torch.tensor([[100 * row["guess"] for row in seed["evals"]] for seed in seeds])
    band(axes[0], steps, greedy_guesses[name], color, label, style)
    worked[name] = torch.tensor([[100 * row["worked"] for row in seed["evals"]] for seed in seeds])
    faulty[name] = 100 - worked[name] - greedy_guesses[name]
    garbage_length[name] = torch.tensor([by_window(seed["steps"]["garbage_length"]) for seed in seeds])
    garbage[name] = torch.tensor([by_window([100 * v for v in seed["steps"]["garbage"]]) for seed in seeds])
    band(axes[1], [5 * i + 2.5 for i in range(garbage[name].shape[1])], garbage[name], color, label, style)
    long = load_curve(f"lesson04_slow_{name}")["results"]
    wrong[name] = torch.tensor([by_window(seed["steps"]["length_wrong"], 10) for seed in long])
    right_share[name] = 100 * fmean(fmean(seed["steps"]["reward"][30:60]) for seed in long)
    band(axes[2], [10 * i + 5 for i in range(wrong[name].shape[1])], wrong[name], color, label, style)
axes[0].set(title="greedy answers that guess", ylabel="%", xlabel="training step", ylim=(0, 70))
axes[1].set(title="samples that are garbage", ylabel="%", xlabel="training step", ylim=(0, 70))
axes[2].set(title="length of wrong samples", ylabel="tokens", xlabel="training step", ylim=(0, 60))
axes[0].legend(title="mean of 3 seeds, band: range", loc="lower left")
axes[2].legend(handles=[], title="5 seeds", loc="lower right")
plt.show()

# %% [markdown]
# Both get rid of guesses, and GRPO is faster: it splits an answer's fine among its tokens, and a guess has few. At step
# 15, {{ greedy_guesses["grpo"][:, 3].mean():.0f }}% of its greedy answers are guesses, against {{
# greedy_guesses["dr_grpo"][:, 3].mean():.0f }}% under Dr. GRPO. {{ assert greedy_guesses["grpo"][:, 3].max() <
# greedy_guesses["dr_grpo"][:, 3].min() and all(g[:, -1].max() < g[:, 0].min() for g in greedy_guesses.values()) }} At
# first, working takes their place: at step 10, {{
# worked["grpo"][:, 2].mean():.1f }}% of GRPO's greedy answers show it and end in `####`, against {{
# worked["dr_grpo"][:, 2].mean():.1f }}%. {{ assert worked["grpo"][:, 2].min() > worked["dr_grpo"][:, 2].max() }} **That
# is the lead.** By step 30 it's gone: both show working equally often, and what GRPO has in place of guesses earns no
# more. {{ faulty["grpo"][:, -1].mean():.0f }}% of its greedy answers are garbage or end in words, against {{
# faulty["dr_grpo"][:, -1].mean():.0f }}%. {{ assert abs(worked["grpo"][:, -1].mean()
# - worked["dr_grpo"][:, -1].mean()) < 1 and faulty["grpo"][:, -1].min() > 3 * faulty["dr_grpo"][:, -1].max() }}
#
# The garbage in the samples goes the same way. Dr. GRPO fines every token alike, and most tokens of wrong answers are
# garbage, so garbage gets rarer. Under GRPO a token of a long answer is hardly fined at all: garbage gets **more
# frequent**, and longer. {{ assert garbage["dr_grpo"][:, -1].max() < garbage["grpo"][:, -1].min() and
# garbage["dr_grpo"][:, -1].mean() < garbage["dr_grpo"][:, 0].mean() and garbage["grpo"][:, -1].mean() >
# garbage["grpo"][:, 0].mean() and garbage_length["grpo"][:, -1].min() > garbage_length["grpo"][:, 0].max() + 5 }}
# Garbage hardly ever earns anything, so between steps 30 and 60 of the race {{ right_share["grpo"]:.0f }}% of GRPO's
# samples are right, and {{ right_share["dr_grpo"]:.0f }}% of Dr. GRPO's. {{ assert right_share["dr_grpo"] >
# right_share["grpo"] + 2 and wrong["dr_grpo"].mean(0).max() < wrong["grpo"].mean(0).max() - 8 }} That comes from the
# length alone: with the deviation or without, every seed that divides by the length is behind every seed that doesn't.
# {{ assert max(fmean(seed["steps"]["reward"][30:60]) for name in ("grpo", "no_std") for seed in
# load_curve(f"lesson04_slow_{name}")["results"]) < min(fmean(seed["steps"]["reward"][30:60]) for name in ("dr_grpo",
# "no_length") for seed in load_curve(f"lesson04_slow_{name}")["results"]) }} **That's why GRPO loses**, as far as the
# records can tell.
#
# So the bias does more than cost a point or two at the end: it decides which faults vanish and which grow. On this task
# an answer needs some thirty tokens; with thousands, the bias has more room. There, Liu et al. report what you saw on
# the coin: wrong answers keep growing long after the reward has stopped rising. Dr. GRPO stops that growth, at about
# the same accuracy. A growing length alone is no evidence of deeper reasoning.
#
# ## 6 · The other division: which problems count
#
# Now the standard deviation, without the division by the length. Let a prompt be solved with probability $p$. The plain
# gradient of a prompt is $\nabla p$. Rewards of 0 and 1 have the deviation $\sqrt{p(1-p)}$, so in large groups GRPO
# follows
#
# $$\frac{\nabla p}{\sqrt{p(1-p)}} = \nabla\, 2 \arcsin \sqrt p,$$
#
# and climbs the sum of $2 \arcsin \sqrt p$ over prompts, where Dr. GRPO climbs the sum of $p$, the expected number of
# solved problems (Davis and Recht 2025). Problems near 0 and near 1 count more. How much more, in a group of $G$?

# %% tags=["hide-input"]
# @title Your bet
weight_bet = bet(
    "Divide groups of eight by their deviation. What is the weight of a problem that is hardly ever solved, as a "
    "multiple of the weight of one that is solved half of the time?",
    (0.0, 10.0, 0.1),
)

# %% [markdown]
# If $k$ of the $G$ answers are right, a right one has the advantage $(1 - k/G) / s$ and a wrong one $-(k/G) / s$, with
# the deviation $s = \sqrt{k(G-k) / (G(G-1))}$. On average $\nabla \log \pi$ is $\nabla p / p$ for right answers and
# $-\nabla p / (1-p)$ for wrong ones. Add up the group, average over $k$ (it's binomial), and GRPO's gradient is $c(p)\,
# \nabla p$ with
#
# $$c(p) = \frac{\mathbb{E}\big[\sqrt{k(G-k)}\,\big] \sqrt{G(G-1)}}{G^2\, p(1-p)}.$$

# %% tags=["hide-input"]
# @title Explorer: the weight of a prompt


def prompt_weight(p: torch.Tensor, group: int) -> torch.Tensor:
    """c(p) of the formula: [points]."""
    k = torch.arange(group + 1, dtype=torch.float64)
    chance = torch.distributions.Binomial(group, p[:, None]).log_prob(k).exp()
    return (chance * (k * (group - k)).sqrt()).sum(1) * (group * (group - 1)) ** 0.5 / (group**2 * p * (1 - p))


def draw_weight(ax, group: int) -> None:
    """The weight over p, in groups of this size and in large ones."""
    p = torch.linspace(0.004, 0.996, 249, dtype=torch.float64)
    ax.plot(p, (p * (1 - p)).rsqrt(), color=BLACK, linestyle=":", label="large groups")
    ax.plot(p, prompt_weight(p, group), color=GREEN, label="GRPO")
    ax.axhline(1 - 1 / group, color=BLUE, linestyle="-.", label="Dr. GRPO: 1 − 1/G")
    ax.set(xlabel="success rate p of a prompt", ylabel="weight of its gradient", ylim=(0, 10))
    ax.set_title(f"groups of {group}")
    ax.legend(loc="upper center", fontsize=9)


explorer(draw_weight, static=[{"group": 4}, {"group": 8}, {"group": 64}], group=(8, 2, 64, 1))
ends_of_8 = (prompt_weight(torch.tensor([1e-6, 0.5], dtype=torch.float64), 8)).tolist()
weight_bet.result(ends_of_8[0] / ends_of_8[1])

# %% [markdown]
# The curve for large groups blows up at both ends. A small group's can't: it rarely draws a hard problem's success at
# all. In groups of eight the hardest problems count at most {{ ends_of_8[0] / ends_of_8[1]:.2f }} times as much as one
# that is solved half of the time. Here are sixteen answers to each of {{ pick(8, 96) }} problems, with $\sum_i |A_i|$
# as a group's weight in the update:

# %%
problems = task.problems("train")[: pick(8, 96)]
torch.manual_seed(0)
engine = make_engine(policy, "fast", torch.float32)
rollout = engine.generate([policy.prompt(problem.question) for problem in problems], 16, 80, Sampling())
texts = policy.texts(rollout.completion_ids, rollout.completion_mask)
right = [task.verify(text, problems[row // 16].gold).strict for row, text in enumerate(texts)]
groups = (torch.tensor(right) & rollout.finished).float().view(-1, 16)

centered = groups - groups.mean(1, keepdim=True)
weights = {"Dr. GRPO": centered.abs().sum(1), "GRPO": (centered / (groups.std(1, keepdim=True) + 1e-4)).abs().sum(1)}
success = groups.mean(1)
hard, easy = success <= 0.2, success >= 0.8
share = {name: [100 * (w[ends].sum() / w.sum()).item() for ends in (hard, easy)] for name, w in weights.items()}
for name, (of_hard, of_easy) in share.items():
    print(f"{name:8} solved at most 1 in 5: {of_hard:.0f}% of the update; at least 4 in 5: {of_easy:.0f}%")
print(f"no gradient at all: {(success == 0).sum()} of {len(problems)} never solved, {(success == 1).sum()} always")

# %% [markdown]
# This model finds most problems hard: the share of the hard end grows by {{ share["GRPO"][0] - share["Dr. GRPO"][0]:.0f
# }} points, and there's hardly an easy end. {{ assert share["GRPO"][0] > share["Dr. GRPO"][0] + 5 and share["GRPO"][1]
# < 10 }} Does it show in training? Not in five seeds: with and without the deviation, the ranges of test accuracy
# overlap at each of the task's four levels of difficulty, in our race and at the usual learning rate. {{ assert
# all(max(map(min, pair)) <= min(map(max, pair)) for kind in ("default", "slow") for names in (("grpo", "no_std"),
# ("no_length", "dr_grpo")) for level in (1, 2, 3, 4) for pair in [[[seed["test"][f"accuracy_level_{level}"] for seed in
# load_curve(f"lesson04_{kind}_{name}")["results"]] for name in names]]) }} Expect a difference with large groups,
# problems that stay near 0 or 1, or rewards of very different sizes.
#
# ## 7 · Why a constant
#
# Why divide by the token limit and not by the mean length of the batch? Because rows × mean length **is** the number of
# tokens: that's `token_mean`, whose divisor depends on the answers drawn. Besides the bias of section 3, it goes wrong
# when a batch is processed in parts (micro-batches) and each divides by its own number of tokens. Take an answer of 10
# tokens with loss 1 each, another of 60 with loss 0, and a limit of 80:

# %%
lengths, losses = torch.tensor([10.0, 60.0]), torch.tensor([1.0, 0.0])  # losses: of each token of an answer
sums = losses * lengths
print(
    f"token_mean: whole batch {sums.sum() / lengths.sum():.4f}, mean of two micro-batches {(sums / lengths).mean():.4f}"
)
print(f"constant:   whole batch {sums.sum() / (2 * 80):.4f}, mean of two micro-batches {(sums / 80).mean():.4f}")

# %% [markdown]
# The choice of constant hardly matters: it scales the gradient, and AdamW divides that by its own size. Only the
# threshold for gradient clipping depends on it.
#
# ## 8 · The family
#
# Every algorithm of the package is a set of switches of one trainer, from `rlcourse.config.ALGORITHMS`:

# %% tags=["hide-input"]
# @title Table: nine algorithms
from dataclasses import fields

from rlcourse.config import ALGORITHMS, TrainConfig
from rlcourse.measure.plots import LABELS

DEFAULTS = {f.name: f.default for f in fields(TrainConfig)}
COLUMNS = ("advantage", "surrogate", "ratio", "aggregation")


def table_row(name: str) -> str:
    """One algorithm as a row: its switches, and whatever else it sets that is not the default."""
    switches = ALGORITHMS[name]
    shown = [f"`{switches.get(column, DEFAULTS[column])}`" for column in COLUMNS]
    if switches.get("surrogate") == "reinforce":
        shown[2] = "unused"
    more = [f"`{k}={v}`" for k, v in switches.items() if k not in COLUMNS and v != DEFAULTS[k]]
    return f"| {LABELS.get(name, name.upper())} | {' | '.join(shown)} | {', '.join(more)} |"


head = f"| algorithm | {' | '.join(COLUMNS)} | other switches |\n|{' --- |' * 6}\n"
display(Markdown(head + "\n".join(table_row(name) for name in ALGORITHMS)))

# %% [markdown]
# - **DAPO** (Yu et al. 2025) keeps the deviation, takes the mean over tokens, clips higher above than below, and
#   (`leave_out`) resamples silent groups and drops truncated answers from the loss.
# - **GSPO** (Zheng et al. 2025) has one ratio for the whole answer, the geometric mean of its tokens', and a far
#   narrower clip range, because a mean moves far less than a single ratio.
# - **CISPO** (MiniMax 2025) never drops a token: it caps the ratio as a weight and lets the gradient pass.
#
# GSPO, CISPO and DAPO's wider clip live by the ratio. With **one update per rollout** (`minibatches=1`) every ratio is
# 1, and these switches do nothing. The package's loss on random numbers, for answers of different lengths, at that
# first update:

# %%
from rlcourse.advantages import group_centered, group_normalized, leave_one_out
from rlcourse.losses import aggregate, token_loss

torch.manual_seed(0)
ADVANTAGES = {"group_normalized": group_normalized, "group_centered": group_centered, "leave_one_out": leave_one_out}
old, rewards, mask = -torch.rand(16, 30), torch.rand(16), torch.arange(30) < torch.randint(5, 31, (16, 1))
pushes = {}
for name in ("rloo", "dr_grpo", "grpo", "gspo", "dapo", "cispo"):
    switches = {
        column: ALGORITHMS[name].get(column, DEFAULTS[column]) for column in (*COLUMNS, "clip_low", "clip_high")
    }
    advantages, how = ADVANTAGES[switches.pop("advantage")](rewards, 8), switches.pop("aggregation")
    log_pi = old.clone().requires_grad_()
    loss, _ = token_loss(log_pi, old, advantages, mask, **switches)
    total = aggregate(loss, mask, how, rows=16, tokens=int(mask.sum()), max_new_tokens=30)
    pushes[name] = torch.autograd.grad(total, log_pi)[0].flatten()
for a, b in (("rloo", "dr_grpo"), ("grpo", "gspo"), ("dapo", "cispo"), ("grpo", "dapo"), ("grpo", "dr_grpo")):
    cosine = torch.cosine_similarity(pushes[a], pushes[b], dim=0)
    print(f"{a:5} and {b:8} cosine {cosine:.3f}, size {pushes[a].norm() / pushes[b].norm():.2f} to 1")

# %% [markdown]
# The first three pairs have the same gradient, up to RLOO's factor $G/(G-1)$; DAPO still chooses its rows differently.
# {{ assert all(torch.allclose(pushes[a] * f, pushes[b], atol=1e-7) for a, b, f in (("rloo", "dr_grpo", 7 / 8), ("grpo",
# "gspo", 1), ("dapo", "cispo", 1))) }} At the first update, all that tells these six apart is a deviation and a
# divisor. And Dr. GRPO is this package's default not because of a better curve on an easy task, but because, with two
# divisions deleted, it follows the gradient of the expected reward.
#
# ## Check yourself
#
# 1. Two wrong answers in a group have 10 and 100 tokens. Under GRPO, how do the pushes on one token of each compare,
#    and those on the whole answers?
#
# <details><summary>Answer</summary>
# A token of the long one is pushed down a tenth as hard. Summed over their tokens, the two answers weigh the same, 1/N
# each.
# </details>
#
# 2. Right answers are divided by their length as well. Why does that not cancel the bias?
#
# <details><summary>Answer</summary>
# Because it happens in other states. Where an answer is going wrong, A is negative on average and lengths grow; where
# it is going right, A is positive and they shrink. They cancel only in states where E[A | s] is 0.
# </details>
#
# 3. The lengths of your run grow while accuracy is flat. What do you plot first?
#
# <details><summary>Answer</summary>
# The lengths of right and of wrong answers, separately, and the share that is cut off. The trainer logs `length_right`,
# `length_wrong` and `truncated` for this reason.
# </details>
#
# 4. Which problems does the division by the deviation prefer, and which does it not reach?
#
# <details><summary>Answer</summary>
# Those with success rates near 0 and near 1, by a factor that small groups keep small. It can't reach groups that are
# all right or all wrong: they have no gradient either way.
# </details>
#
# 5. A paper compares GRPO and Dr. GRPO after 20 steps and finds GRPO better. What do you ask?
#
# <details><summary>Answer</summary>
# For more steps, and for the accuracy of samples as well as greedy answers. In our race both the early lead and the
# later loss are real; where you stop decides what you report.
# </details>
#
# ## Exercises
#
# [exercises/04_dr_grpo.ipynb](../exercises/04_dr_grpo.ipynb): make the two deletions in your loop, tell from a gradient
# what a loss divides by, weigh a prompt, mend a step with six mistakes in it, and find which recipes make answers
# longer. Then go on to [05 · The full loop](05_full_loop.ipynb).
#
# ## Further reading
#
# - Liu et al. 2025, *Understanding R1-Zero-Like Training: A Critical Perspective*, arXiv:2503.20783: both biases, and
#   Dr. GRPO.
# - Shao et al. 2024, *DeepSeekMath*, arXiv:2402.03300: GRPO.
# - Davis and Recht 2025, *What is the objective of reasoning with reinforcement learning?*, arXiv:2510.13651: the
#   arcsine.
# - Schulman et al. 2017, arXiv:1707.06347: PPO. Ahmadian et al. 2024, arXiv:2402.14740: RLOO for language models.
# - Yu et al. 2025, *DAPO: An Open-Source LLM Reinforcement Learning System at Scale*, arXiv:2503.14476.
# - Zheng et al. 2025, *Group Sequence Policy Optimization*, arXiv:2507.18071.
# - MiniMax 2025, *MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention*, arXiv:2506.13585: CISPO.
