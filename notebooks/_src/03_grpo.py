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
# - what a separate critic costs, and what replaces it in GRPO: the other answers to the same prompt;
# - GRPO (Shao et al. 2024) as two changes to your loop, and its whole loss;
# - what a bonus of a thousandth of a point does to a run;
# - the KL divergence to a reference: which of its estimates to log, which to use as a penalty, and whether it helps;
# - which groups teach nothing, and how to split a step into prompts and answers.
#
# You need lessons [01](01_policy_gradient.ipynb) and [02](02_ppo.ipynb): your loop, the baseline; the ratio, the clip.

# %%
import math

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown, display

from rlcourse import advantages
from rlcourse.config import make_config
from rlcourse.course import pick
from rlcourse.course.changes import BETA, grpo
from rlcourse.course.lessons.curve_records import load_curve
from rlcourse.course.own import load_loop
from rlcourse.course.widgets import bet, explorer
from rlcourse.evaluation import answer_problems
from rlcourse.measure.plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION
from rlcourse.measure.shapes import QWEN25, parameters
from rlcourse.policy import load_policy
from rlcourse.rollout import make_engine
from rlcourse.sampling import Sampling

loop = load_loop()
PROMPTS, GROUP, LIMIT, task = loop.PROMPTS, loop.GROUP, loop.LIMIT, loop.task

# %% [markdown]
# ## 1 · What the critic costs
#
# PPO wants to know how good an answer is **compared with what was expected**, so it trains a critic to say what to
# expect. In lesson 02 the critic was a small head. For large models the usual recipe is a second network of the
# policy's size, with its own gradients and optimizer states. In float32 a parameter trained with AdamW takes 4 bytes
# for itself, 4 for its gradient and 8 for the two moments. A frozen one, as in a reference model (section 4), takes 4.
# **Look for** the largest model that fits on one GPU, with a critic and without.

# %% tags=["hide-input"]
# @title Figure: what is in memory
TRAINED, FROZEN = 16, 4  # bytes per parameter
gb = {name.split("/")[1]: parameters(shape) / 1e9 for name, shape in QWEN25.items()}
largest = list(gb)[-1]
parts = {"policy": (TRAINED, BLUE), "frozen reference": (FROZEN, SKY), "separate critic": (TRAINED, VERMILION)}
fig, ax = plt.subplots(figsize=(8, 2.6))
left = [0.0] * len(gb)
for part, (each, color) in parts.items():
    width = [each * n for n in gb.values()]
    ax.barh(list(gb), width, left=left, color=color, edgecolor="white", label=part)
    left = [a + b for a, b in zip(left, width, strict=True)]
ax.axvline(80, color=BLACK, linestyle="--", linewidth=1, label="a GPU of 80 GB")
ax.invert_yaxis()
ax.set(xlabel="GB, computed; activations come on top", title="Weights, gradients and AdamW in float32")
ax.legend()
plt.show()
fits = {each: [name for name in gb if each * gb[name] < 80][-1] for each in (TRAINED + FROZEN, 2 * TRAINED + FROZEN)}

# %% [markdown]
# With a critic, {{ fits[2 * TRAINED + FROZEN] }} is the largest that fits; without one, {{ fits[TRAINED + FROZEN] }}.
# For {{ largest }} the critic is {{ TRAINED * gb[largest]:.0f }} of {{ left[-1]:.0f }} GB, and it roughly doubles the
# work of the update. (Dropping a mere value head saves almost nothing.) What takes the critic's place?
#
# ## 2 · The group says what to expect
#
# RLOO (lesson 01) has the answer already. Sample $G$ answers to each prompt; their mean reward $\bar R$ estimates
# $V(x)$, and nothing has to be learned. GRPO, *group relative policy optimisation*, subtracts that mean and then
# divides by the standard deviation of the group:
#
# $$A_i = \frac{R_i - \bar R}{\mathrm{std}(R_1, \dots, R_G) + 10^{-4}} .$$
#
# The small constant keeps $0/0$ away. In your loop, `normalized` takes the place of `weigh`:


# %%
def normalized(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """GRPO: each reward minus the mean of its group, divided by the group's standard deviation: [rows]."""
    groups = rewards.view(-1, group)  # a row of this matrix is a group; view(group, -1) would run too, and mix prompts
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def centered(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """The same without the division: [rows]."""
    groups = rewards.view(-1, group)
    return (groups - groups.mean(1, keepdim=True)).flatten()


r = torch.randint(0, 2, (PROMPTS * GROUP,)).float()
assert torch.allclose(normalized(r, GROUP), advantages.group_normalized(r, GROUP), atol=1e-5)
assert torch.allclose(
    normalized(10 * r + 5, GROUP), normalized(r, GROUP), atol=1e-2
)  # the scale of the rewards is gone

# %% tags=["hide-input"]
# @title Figure: four groups, prompts x answers
torch.manual_seed(0)
example = (torch.rand(4, GROUP).argsort(1) < torch.tensor([[1], [4], [7], [8]])).float()  # right answers in each row
fig, axes = plt.subplots(1, 2, figsize=(10.5, 2.3), layout="constrained")
for ax, values, title in (
    (axes[0], example, "rewards: a row is a prompt, a column an answer"),
    (axes[1], normalized(example.flatten(), GROUP).view(4, GROUP), "advantages: each row minus its mean, over its std"),
):
    ax.imshow(values, cmap="RdBu", vmin=-4, vmax=4, aspect="auto")  # pale enough for black numbers
    for place in [(y, x) for y in range(4) for x in range(GROUP)]:
        ax.text(place[1], place[0], f"{values[place]:.1f}".replace("-0.0", "0.0"), ha="center", va="center", fontsize=9)
    ax.set(title=title, xticks=[], yticks=range(4), yticklabels=[f"prompt {k}" for k in range(1, 5)])
plt.show()

# %% [markdown]
# What does the division do? Below is every group of {{ GROUP }} that rewards of 0 and 1 allow. **Look for** the rare
# events: one success in a hard group, one failure in an easy one.

# %% tags=["hide-input"]
# @title Figure: the advantages of a group
fig, axes = plt.subplots(1, 2, figsize=(10, 3.2), sharey=True, layout="constrained")
ranks = torch.arange(GROUP)
for ax, weigh, title in zip(axes, (centered, normalized), ("only centered", "GRPO: with the division"), strict=True):
    table = torch.stack([weigh((ranks < right).float(), GROUP) for right in range(GROUP + 1)])  # [right, GROUP]
    ax.plot(range(1, GROUP + 1), table[1:, 0], color=BLUE, marker="o", label="a right answer")
    ax.plot(range(GROUP), table[:-1, -1], color=VERMILION, linestyle="--", marker="s", label="a wrong answer")
    ax.axhline(0, color=BLACK, linewidth=0.8)
    ax.set(title=title, xlabel=f"right answers in the group of {GROUP}")
    ax.grid()
axes[0].set_ylabel("advantage")
axes[0].legend()
plt.show()
rare = table[1, 0].item()

# %% [markdown]
# A lone success counts {{ rare:.2f }} instead of {{ 1 - 1 / GROUP:.2f }}, {{ rare / (1 - 1 / GROUP):.1f }} times as
# much; a right answer in a group that is evenly split only {{ 2 * table[GROUP // 2, 0].item():.1f }} times as much. {{
# assert rare / (1 - 1 / GROUP) > 1.3 * 2 * table[GROUP // 2, 0].item() }} So hard prompts, and very easy ones, count
# for more. A unanimous group contributes nothing. And the advantages don't depend on the unit of the rewards: a problem
# that pays 100 can't drown out those that pay 1. That sounds like pure gain.
#
# ## 3 · Your loop with two functions changed
#
# `weigh` is one of the two. The other is `loss`. The rest of GRPO is PPO, with a few choices. For $N$ answers $y_i$ of
# $|y_i|$ tokens, with the mask $m_{i,t}$ and $\rho_{i,t} = \pi_\theta(y_{i,t} \mid s_{i,t}) / \pi_\text{old}(y_{i,t}
# \mid s_{i,t})$, it minimises
#
# $$\mathcal{L} = \frac{1}{N} \sum_{i=1}^{N} \frac{1}{|y_i|} \sum_{t} m_{i,t} \Bigl[
# -\min\bigl(\rho_{i,t} A_i,\ \mathrm{clip}(\rho_{i,t}, 1-\varepsilon, 1+\varepsilon)\, A_i\bigr) +
# \beta\, k_{3,i,t} \Bigr] .$$
#
# 1. One advantage for the whole answer, the same at each of its tokens: no $V(s_t)$, no GAE.
# 2. Ratio and clip of each token, as in PPO.
# 3. The mean over the tokens of an answer **first**, then the mean over answers.
# 4. The KL divergence to the reference is a term of the loss, with weight $\beta$. Section 4 is about it; until then
#    $\beta = 0$.
#
# **Put it into your loop**: it's [the first exercise](../exercises/03_grpo.ipynb). Here ours runs, with one step per
# rollout, this course's default for GRPO. So the ratio is 1, and the clip has nothing to do.

# %%
STEPS, ASKED = pick(5, 25), pick(8, 200)
honest = loop.judge


def run(weigh, judge=honest, reference: bool = False):
    """Train your loop with GRPO's loss. Returns the policy and a row of numbers per step."""
    loop.weigh, loop.judge, loop.loss, loop.REFERENCE = weigh, judge, grpo, reference
    return loop.train(STEPS, problems=ASKED)


plain_policy, plain = run(normalized)
print("greedy accuracy:", " → ".join(f"{row['accuracy']:.1%}" for row in plain if row["accuracy"] is not None))

# %% [markdown]
# It learns. Now somebody wants slightly shorter answers and adds a bonus for brevity. They're careful: a right answer
# earns 1, and the bonus is at most a **thousandth** of that. So a short wrong answer can never earn more than a long
# right one.


# %%
def brief(policy, problems, rollout):
    """Up to a thousandth of a point for brevity, to right and wrong answers alike."""
    return honest(policy, problems, rollout) + 0.001 * (1 - rollout.completion_lengths / LIMIT)


# %% tags=["hide-input"]
# @title Your bet
reached = 100 * plain[-1]["accuracy"]
bonus_bet = bet(
    f"Without the bonus, {STEPS} steps of GRPO end at a greedy accuracy of {reached:.3g}%. Where do they end with it? "
    "(You win if you land between the worst and the best of your run and "
    f"{len(load_curve('lesson03_bonus_normalized')['results'])} recorded seeds.)",
    (0, 100, 1),
    unit="%",
)

# %%
bonus_policy, bonus = run(normalized, judge=brief)

# %% tags=["hide-input"]
# @title Figure: a thousandth of a point


def draw_runs(runs: dict, ends: dict | None = None) -> None:
    """Greedy accuracy, and the mean length of the samples, of runs {label: (log, colour, marker)}.

    ends: where the runs end, {name: (of this page, of recorded seeds, colour, marker)}.
    """
    fig, axes = plt.subplots(1, 3 if ends else 2, figsize=(13 if ends else 10.5, 3.8), layout="constrained")
    for label, (log, color, marker) in runs.items():
        seen = [row for row in log if row["accuracy"] is not None]
        accuracy = [100 * row["accuracy"] for row in seen]
        axes[0].plot([row["step"] for row in seen], accuracy, color=color, marker=marker, label=label)
        lengths = torch.tensor([row["length"] for row in log])
        near = [lengths[max(0, i - 2) : i + 3].mean() for i in range(len(log))]
        axes[1].plot(near, color=color, linestyle={"o": "-", "s": "--", "^": "-.", "D": ":"}[marker])
    axes[0].set(title="greedy answers", xlabel="training step", ylabel="% right", ylim=(0, 100))
    axes[1].set(title="samples, mean of five steps", xlabel="training step", ylabel="tokens per answer", ylim=(0, None))
    for place, (here, seeds, color, marker) in enumerate((ends or {}).values()):
        axes[2].plot([place - 0.12] * len(here), here, color=color, marker=marker, linestyle="", markersize=8)
        hollow = {"linestyle": "", "fillstyle": "none", "markersize": 8, "markeredgewidth": 1.6}
        axes[2].plot([place + 0.12] * len(seeds), seeds, color=color, marker=marker, **hollow)
    if ends:
        axes[2].set(title="at the end: this page (filled), recorded seeds", ylim=(0, 100), xlim=(-0.5, len(ends) - 0.5))
        axes[2].set_xticks(range(len(ends)), list(ends), fontsize=9)
    for ax in axes:
        ax.grid()
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    plt.show()


drawn = {"GRPO": (plain, BLUE, "o"), "GRPO, bonus of 0.001": (bonus, VERMILION, "s")}
draw_runs(drawn)
spoiled = 100 * bonus[-1]["accuracy"]
late_length = {name: sum(row["length"] for row in log[-10:]) / len(log[-10:]) for name, (log, *_) in drawn.items()}
asked = task.problems("validation")[:ASKED]
works = {}  # the share of greedy answers that have a calculation, in percent
for name, policy in (("GRPO", plain_policy), ("bonus", bonus_policy)):
    answers = answer_problems(policy, make_engine(policy, "fast", torch.float32), task, asked, LIMIT)
    works[name] = 100 * sum("=" in answer.text for [answer] in answers) / len(answers)
seeds = load_curve("lesson03_bonus_normalized")["results"]
with_bonus = [100 * seed["evals"][-1]["accuracy"] for seed in seeds]
bonus_bet.result([spoiled, *with_bonus])

# %% [markdown]
# {{ spoiled:.3g }}% instead of {{ reached:.3g }}%. {{ assert reached - 10 > spoiled }} (Three recorded seeds with the
# bonus end at {{ min(with_bonus):.3g }} to {{ max(with_bonus):.3g }}%.) In the last ten steps an answer has {{
# late_length["GRPO, bonus of 0.001"]:.0f }} tokens on average, against {{ late_length["GRPO"]:.0f }}. {{ assert
# late_length["GRPO, bonus of 0.001"] < 0.8 * late_length["GRPO"] }} At the end, {{ works["bonus"]:.0f }}% of its greedy
# answers show working, against {{ works["GRPO"]:.0f }}%, {{ assert works["bonus"] < works["GRPO"] - 10 }} and
# in lesson 00 working instead of guessing was the largest part of the gain. How can a thousandth outvote a whole point?
#
# Look at a hard problem. All of its answers are wrong, so without the bonus its group contributes nothing. With the
# bonus the rewards differ by a few ten-thousandths. And GRPO divides by their deviation, which is just as small:

# %% tags=["hide-input"]
# @title Table: a group of wrong answers
torch.manual_seed(0)
start = load_policy("embedded")
hard = [problem for problem in task.problems("train") if problem.level == 4][:1]
group = make_engine(start, "fast", torch.float32).generate([start.prompt(hard[0].question)], GROUP, LIMIT, Sampling())
paid = brief(start, hard, group)
loud = normalized(paid, GROUP)
rows = {
    "tokens": [f"{length}" for length in group.completion_lengths],
    "reward": [f"{reward:.4f}" for reward in paid],
    "advantage, centered": [f"{a:+.4f}" for a in centered(paid, GROUP)],
    "advantage, GRPO": [f"{a:+.2f}" for a in loud],
}
lines = ["| answer | " + " | ".join(map(str, range(1, GROUP + 1))) + " |", "| --- " * (GROUP + 1) + "|"]
lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
display(Markdown("\n".join(lines)))
all_wrong = honest(start, hard, group).sum().item() == 0
bare = int(group.completion_lengths.min())
silent_seeds = [seed["steps"]["groups_without_signal"] for seed in load_curve("lesson03_16x8")["results"]]
silent_at_first = sum(sum(steps[:5]) / 5 for steps in silent_seeds) / len(silent_seeds)

# %% [markdown]
# {{ assert all_wrong and loud.std() > 0.6 }} Nothing was at stake in this group, and yet its advantages are nearly as
# large as in a group with both right and wrong answers. They push up the bare guesses of {{ bare }} tokens, and push
# down the longer attempts. The division that amplifies hard prompts amplifies **every** difference within a group. At
# the start of training {{ 100 * silent_at_first:.0f }}% of the groups are unanimous, and with the bonus these shout
# "shorter!". Any meaningless tie-breaker gets amplified the same way: the noise of a reward model, a score for format.
#
# ## 4 · A leash: the KL divergence
#
# Could you keep the policy from drifting off like this? The clip limits what one rollout can do, but over a hundred
# rollouts the policy can still go anywhere. So tie it to a *reference* $\pi_\text{ref}$, usually the model before RL:
# charge it for the distance
#
# $$\text{KL}(\pi \,\|\, \pi_\text{ref}) = \mathbb{E}_{y \sim \pi}\big[\log\pi(y) - \log\pi_\text{ref}(y)\big] ,$$
#
# with a weight $\beta$. From a sampled token, with $d = \log\pi - \log\pi_\text{ref}$, there are three common estimates
# (Schulman 2020): $k_1 = d$, $k_2 = \tfrac12 d^2$, and $k_3 = e^{-d} - 1 + d$. Here are their exact means and noise for
# a policy over eight tokens, near its reference and far from it:


# %%
def estimates(log_pi: torch.Tensor, log_ref: torch.Tensor) -> dict[str, torch.Tensor]:
    """The three estimates of KL(pi || ref) from sampled tokens."""
    d = log_pi - log_ref
    return {"k1": d, "k2": d**2 / 2, "k3": torch.expm1(-d) + d}


# %% tags=["hide-input"]
# @title Table: what the three say
torch.manual_seed(0)
ref, direction = torch.randn(8).log_softmax(0), torch.randn(8)
lines = ["| policies | KL | " + " | ".join(f"{k}: mean ± std" for k in ("k1", "k2", "k3")) + " |", "| --- " * 5 + "|"]
for name, distance in (("near", 0.2), ("far apart", 1.5)):
    pi = (ref + distance * direction).log_softmax(0)
    cells = []
    for k in estimates(pi, ref).values():
        mean = (pi.exp() * k).sum()
        cells.append(f"{mean:.3g} ± {(pi.exp() * (k - mean).square()).sum().sqrt():.3g}")
    lines.append(f"| {name} | {(pi.exp() * (pi - ref)).sum():.3g} | {' | '.join(cells)} |")
display(Markdown("\n".join(lines)))

# %% [markdown]
# $k_1$ is right on average, may be negative, and is very noisy. $k_2$ is biased. $k_3$ is right on average, never
# negative, and much less noisy: it's the one to log.
#
# Now use each as a **penalty**: let autograd pull the policy back to its reference. Nothing else is in the loss here.
# The policy over eight tokens starts far from its reference, and each step samples 32 tokens.

# %% tags=["hide-input"]
# @title Your bet
PULLS = ["all three: they estimate the same thing", "k1 and k3, which are right on average", "k2 and k3", "k3 alone"]
pull_bet = bet("Which of the three, as a loss, bring the policy back to its reference?", PULLS)

# %%
torch.manual_seed(0)
paths = {}
for name in ("k1", "k2", "k3"):
    logits = (ref + 1.5 * direction).repeat(20, 1).requires_grad_()  # 20 runs at once
    optimizer, paths[name] = torch.optim.SGD([logits], lr=20 * 0.05), []  # the mean below is over 20 runs
    for _ in range(pick(20, 300)):
        log_pi = logits.log_softmax(-1)
        paths[name].append((log_pi.exp() * (log_pi - ref)).sum(-1).detach())  # the exact KL
        tokens = torch.multinomial(log_pi.exp().detach(), 32, replacement=True)
        loss = estimates(log_pi.gather(1, tokens), ref[tokens])[name].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

# %% tags=["hide-input"]
# @title Figure: the pull of each penalty
fig, ax = plt.subplots()
for (name, path), (color, style) in zip(paths.items(), ((VERMILION, "-."), (ORANGE, "--"), (BLUE, "-")), strict=True):
    path = torch.stack(path)
    ax.fill_between(range(len(path)), path.amin(1), path.amax(1), color=color, alpha=0.15, linewidth=0)
    ax.plot(path.mean(1), color=color, linestyle=style, label=f"{name} as the loss")
ax.set(xlabel="step", ylabel="KL to the reference, nats", ylim=(0, None))
ax.set_title("20 runs each: mean, and from lowest to highest")
ax.legend()
plt.show()
left = {name: path[-1].mean().item() / path[0].mean().item() for name, path in paths.items()}
pull_bet.result(PULLS[2] if left["k1"] > 0.5 > max(left["k2"], left["k3"]) else PULLS[0])

# %% [markdown]
# {{ assert left["k1"] > 0.7 and max(left["k2"], left["k3"]) < 0.1 }} $k_1$, right on average, pulls nowhere. The reason
# is in lesson 01. Autograd differentiates the estimate at the tokens that were drawn, and $\nabla k_1 = \nabla \log
# \pi$ is the score, whose mean is zero. Autograd doesn't see that $\theta$ also decides *which* tokens are drawn. For
# $k_3$ it finds $(1 - e^{-d})\, \nabla\log\pi$: the 1 averages out as well, and $\pi e^{-d}$ is $\pi_\text{ref}$. **A
# good value doesn't make a good gradient** (checked below the table):
#
# | | as a value | mean gradient as a loss |
# | --- | --- | --- |
# | $k_1$ | right on average, noisy | none |
# | $k_2$ | biased | that of $\text{KL}(\pi \,\Vert\, \pi_\text{ref})$ |
# | $k_3$ | right on average | that of the other direction, $\text{KL}(\pi_\text{ref} \,\Vert\, \pi)$ |

# %%
logits = (ref + 0.8 * direction).requires_grad_()
pi = logits.log_softmax(0)
kls = {"k2": (pi.exp() * (pi - ref)).sum(), "k3": (ref.exp() * (ref - pi)).sum(), "k1": 0 * logits.sum()}
for name, kl in kls.items():  # the table's last column, summed over all tokens
    on_average = (pi.exp().detach() * estimates(pi, ref)[name]).sum()
    pair = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (on_average, kl)]
    assert torch.allclose(*pair, atol=1e-6), name

# %% [markdown]
# So a KL can go in two places. **In the reward**, as PPO for language models usually has it: each token pays $\beta
# k_1$, and the last one also earns $R$. There it's a number that is never differentiated, so its value must be right,
# and GAE passes the price on to earlier tokens. **In the loss**, as GRPO has it: $\beta k_3$, or $\beta k_2$.
#
# ### Does the leash help?
#
# DeepSeekMath (Shao et al. 2024) used $\beta = 0.04$. So let's put that on the run with the bonus. One run can't tell
# whether it helps, so the bet is about four: yours and three recorded seeds.

# %% tags=["hide-input"]
# @title Your bet
leash_bet = bet(
    f"How many points does a KL with β = {BETA} win back? (You win between the lowest and the highest of the four.)",
    (-20, 60, 1),
    unit="points",
)

# %%
_, leashed = run(normalized, judge=brief, reference=True)
_, undivided = run(centered, judge=brief)

# %% tags=["hide-input"]
# @title Figure: two remedies
drawn |= {f"bonus, and a KL with β = {BETA}": (leashed, ORANGE, "^"), "bonus, only centered": (undivided, GREEN, "D")}
live = {"normalized": [bonus], "leashed": [leashed], "short_leash": [], "centered": [undivided]}
live = {n: [100 * log[-1]["accuracy"] for log in logs] for n, logs in live.items()}  # where they end, in percent
records = {n: load_curve(f"lesson03_bonus_{n}") for n in live}
seeds = {n: [100 * seed["evals"][-1]["accuracy"] for seed in record["results"]] for n, record in records.items()}
final = {n: live[n] + seeds[n] for n in live}
names = ("bonus", f"β = {BETA}", f"β = {records['short_leash']['setup']['kl_coef']}", "only\ncentered")
looks = ((VERMILION, "s"), (ORANGE, "^"), (PURPLE, "v"), (GREEN, "D"))
draw_runs(drawn, {name: (live[n], seeds[n], *look) for name, n, look in zip(names, final, looks, strict=True)})
mean = {n: sum(ends) / len(ends) for n, ends in final.items()}
gains = [a - b for a, b in zip(final["leashed"], final["normalized"], strict=True)]  # seed by seed
saved = (mean["leashed"] - mean["normalized"]) / (reached - mean["normalized"])
leash_bet.result(gains)

# %% [markdown]
# Your run with the KL looks like a rescue. But on the right, each mark is a run. The bonus alone ends at
# {{ mean["normalized"]:.0f }}% on average, with the KL at {{ mean["leashed"]:.0f }}%, and two of three recorded seeds
# lose by it. {{ assert abs(saved) < 0.25 and min(gains) < 0 < max(gains) }} Ten times the weight, β = {{
# records["short_leash"]["setup"]["kl_coef"] }}, does no better. {{ assert records["short_leash"]["setup"]["kl_coef"] ==
# 0.4 and mean["short_leash"] < mean["leashed"] + 5 }} Why? The KL is zero at the reference, and so is its gradient. It
# begins to pull only once the policy has moved, and then it pulls back from everything that was learned, good and bad
# alike. It limits how **far** a policy goes and not **where**. And it costs a frozen copy in memory and one more
# forward pass over every answer. DAPO and Dr. GRPO leave it out.
#
# Without the division (green), the runs with the bonus end at {{ min(final["centered"]):.0f }} to {{
# max(final["centered"]):.0f }}%: there, a thousandth of a point has a thousandth of the weight. {{ assert
# max(final["normalized"]) < min(final["centered"]) - 10 }} If you want the division and the bonus, pay the bonus only
# in groups that have both right and wrong answers.
#
# ## 5 · Groups that say nothing
#
# A group whose answers are all right or all wrong has no gradient, unless there's a KL in the loss. You paid for it and
# it teaches nothing: it is **silent**, or of *zero advantage*. A group of $G$ answers to a problem that is solved with
# probability $p$ is silent with probability
#
# $$P(\text{silent}) = p^G + (1-p)^G .$$

# %% tags=["hide-input"]
# @title Explorer: how silent a group is


def draw_silent(ax, group: int) -> None:
    """The probability that a group of this size says nothing, over the success rate."""
    p = torch.linspace(0, 1, 201)
    ax.plot(p, 100 * (p**group + (1 - p) ** group), color=BLUE)
    ax.set(xlabel="success rate p", ylabel="silent, %", ylim=(0, 102), title=f"groups of {group}")
    ax.grid()


explorer(draw_silent, static=[{"group": 2}, {"group": 8}, {"group": 32}], group=(8, 2, 64, 1))

# %% [markdown]
# How many groups are silent in training? We recorded five runs of GRPO with groups of eight.

# %% tags=["hide-input"]
# @title Your bet
record = load_curve("lesson04_default_grpo")
signal = {  # in percent, mean of every five steps: [seeds, steps / 5]
    key: (100 * torch.tensor([seed["steps"][key] for seed in record["results"]])).unfold(1, 5, 5).mean(2)
    for key in ("reward", "groups_without_signal")
}
AT = 3  # steps 16 to 20
share_then = signal["reward"][:, AT].mean().item() / 100
at_mean = 100 * (share_then**GROUP + (1 - share_then) ** GROUP)
silent_bet = bet(
    f"In steps {5 * AT + 1} to {5 * AT + 5} of these runs, {share_then:.0%} of the samples are right. What share of "
    f"their groups of {GROUP} is silent? (You win between the lowest and the highest of the {len(record['results'])} "
    "runs.)",
    (0, 100, 1),
    unit="%",
)

# %%
silent_bet.result(signal["groups_without_signal"][:, AT].tolist())

# %% [markdown]
# Put {{ share_then:.2f }} into the formula and you get {{ at_mean:.0f }}%. {{ assert signal["groups_without_signal"][:,
# AT].min() > 5 + at_mean }} Why is it so far off? Ask the policy that you've just trained without the bonus: sample
# some training problems many times.

# %%
MANY, asked = 64, task.problems("train")[: pick(8, 64)]
engine, found = make_engine(plain_policy, "fast", torch.float32), []
torch.manual_seed(1)
for few in (asked[i : i + 8] for i in range(0, len(asked), 8)):
    rollout = engine.generate([plain_policy.prompt(p.question) for p in few], MANY, LIMIT, Sampling())
    texts, ended = plain_policy.texts(rollout.completion_ids, rollout.completion_mask), rollout.finished.tolist()
    golds = [problem.gold for problem in few for _ in range(MANY)]
    paid = [float(end and loop.verify(*pair)) for end, *pair in zip(ended, texts, golds, strict=True)]
    found.append(torch.tensor(paid).view(-1, MANY))
right = torch.cat(found).sum(1).int().tolist()  # of MANY, for each problem
share = sum(right) / (MANY * len(asked))
print(f"{len(asked)} training problems, {MANY} samples for each: {share:.0%} of the samples are right")

# %% [markdown]
# Of all groups of $G$ that could be drawn from a problem's {{ MANY }} answers, these are unanimous: $\binom{c}{G} +
# \binom{n-c}{G}$ of $\binom{n}{G}$, where $c$ of $n$ are right. **Look for** the reason in the middle.

# %% tags=["hide-input"]
# @title Figure: silent groups
sizes = [2, 4, 8, 16, 32]


def silent_share(G: int) -> float:
    """The share of silent groups of G, in percent, over all problems."""
    silent = [(math.comb(c, G) + math.comb(MANY - c, G)) / math.comb(MANY, G) for c in right]
    return 100 * sum(silent) / len(silent)


fig, axes = plt.subplots(1, 3, figsize=(12, 3.3), layout="constrained")
for each, label, color, style in zip(
    signal.values(), ("right answers", "silent groups"), (ORANGE, BLUE), ("--", "-"), strict=True
):
    x = [5 * i + 2.5 for i in range(each.shape[1])]
    axes[0].fill_between(x, each.amin(0), each.amax(0), color=color, alpha=0.15, linewidth=0)
    axes[0].plot(x, each.mean(0), style, color=color, label=label)
axes[0].axvline(5 * AT + 2.5, color=BLACK, linewidth=0.8, linestyle=":")
axes[0].set(xlabel="training step", ylabel="%", ylim=(0, 100))
axes[0].set_title(f"On record, groups of {record['setup'].get('num_generations', GROUP)}")
axes[1].hist([c / MANY for c in right], bins=16, range=(0, 1), color=SKY, edgecolor="white")
axes[1].axvline(share, color=BLACK, linestyle="--", label=f"mean {share:.2f}")
axes[1].set(xlabel="share of its answers that is right", ylabel="problems", title="Your policy: problems differ")
axes[2].plot(sizes, [silent_share(G) for G in sizes], color=BLUE, marker="o", label="counted")
from_mean = [100 * (share**G + (1 - share) ** G) for G in sizes]
axes[2].plot(sizes, from_mean, color=PURPLE, linestyle=":", label="formula, at the mean")
axes[2].set_xscale("log", base=2)
axes[2].set_xticks(sizes, sizes)
axes[2].set(xlabel="group size G", ylabel="silent groups, %", ylim=(0, 100), title="Your policy")
for ax in axes:
    ax.legend()
plt.show()
counted, curve = silent_share(GROUP), signal["groups_without_signal"].mean(0)

# %% [markdown]
# {{ curve[AT]:.0f }}% on record, and {{ counted:.0f }}% for your policy. {{ assert counted > 5 +
# from_mean[sizes.index(GROUP)] }} The formula is right for **one** problem. But problems differ. Groups of very hard or
# very easy ones are nearly always silent, and the problems in between can't make up for it. So your accuracy doesn't
# tell you how many groups teach something; the spread of the problems does.
#
# On the left, the silent share starts at {{ curve[0]:.0f }}%, falls to {{ curve.min():.0f }}% as hard problems come
# within reach, and rises again as more and more problems are always solved. {{ assert curve.argmin() not in (0,
# len(curve) - 1) }}
#
# **Dynamic sampling** (DAPO, Yu et al. 2025) throws silent groups away and samples other prompts until the batch is
# full. So every step learns from a full batch, at the price of more samples. Is it worth that? Below are runs with and
# without it, {{ load_curve("lesson03_dynamic")["setup"]["num_prompts"] }} prompts × {{
# load_curve("lesson03_dynamic")["setup"]["num_generations"] }} answers per step. **Look for** which is ahead by steps,
# and by answers.

# %% tags=["hide-input"]
# @title Figure: dynamic sampling, by steps and by answers


def runs_of(name: str) -> tuple[list[int], torch.Tensor]:
    """Steps and greedy accuracy in percent, [seeds, evaluations], of a recorded run."""
    seeds = load_curve(name)["results"]
    accuracy = [[100 * row["accuracy"] for row in seed["evals"]] for seed in seeds]
    return [row["step"] for row in seeds[0]["evals"]], torch.tensor(accuracy)


def sampled(name: str) -> torch.Tensor:
    """Answers sampled before each evaluation, mean of the seeds: [evaluations]."""
    rows = torch.tensor([seed["steps"]["rows_sampled"] for seed in load_curve(name)["results"]]).float().mean(0)
    return torch.cat([torch.zeros(1), rows.cumsum(0)])[runs_of(name)[0]]


fig, axes = plt.subplots(1, 2, figsize=(10.5, 3.4), sharey=True, layout="constrained")
price, mean_of = {}, {}
for name, label, color, style in (("16x8", "silent groups stay", BLUE, "-"), ("dynamic", "dynamic", ORANGE, "--")):
    steps, accuracy = runs_of(f"lesson03_{name}")
    price[name], mean_of[name] = sampled(f"lesson03_{name}"), accuracy.mean(0)
    for ax, x in zip(axes, (steps, price[name]), strict=True):
        ax.fill_between(x, accuracy.amin(0), accuracy.amax(0), color=color, alpha=0.15, linewidth=0)
        ax.plot(x, mean_of[name], style, color=color, label=label)
axes[0].set(xlabel="training step", ylabel="greedy, % right", ylim=(35, 92), title="by steps")
axes[1].set(xlabel="answers sampled so far", title="by answers")
axes[0].legend(title="mean of three seeds, band: range", loc="lower right")
for ax in axes:
    ax.grid()
plt.show()
at_30 = steps.index(30)
dear = int((price["dynamic"] >= price["16x8"][-1]).int().argmax())  # when it has sampled as much as the other ever did

# %% [markdown]
# **By steps** it's a little ahead, {{ mean_of["dynamic"][at_30]:.1f }} to {{ mean_of["16x8"][at_30]:.1f }}% at step 30.
# {{ assert mean_of["dynamic"][at_30] > mean_of["16x8"][at_30] + 1 }} **By answers** it's far behind: {{
# price["dynamic"][dear]:,.0f }} take it to {{ mean_of["dynamic"][dear]:.1f }}%, and {{ price["16x8"][-1]:,.0f }} take
# the run that keeps its silent groups to {{ mean_of["16x8"][-1]:.1f }}%. {{ assert mean_of["dynamic"][dear] <
# mean_of["16x8"][-1] - 5 }} Where sampling is most of the cost, as at the top of lesson 02, that's a bad bargain. It
# pays off only where updates are expensive: what it reaches at step 30, the other run reaches at step 35, with {{
# price["dynamic"][at_30] - price["16x8"][at_30 + 1]:,.0f }} fewer answers. {{ assert steps[at_30 + 1] == 35 and
# abs(mean_of["dynamic"][at_30] - mean_of["16x8"][at_30 + 1]) < 0.5 }}
#
# ## 6 · Many prompts or large groups?
#
# A step has room for {{ make_config().num_prompts * make_config().num_generations }} answers. Large groups have a
# better baseline and are less often silent. Many prompts make the gradient that of the task, not of a few problems.
# Below are five splits, {{ len(load_curve("lesson03_16x8")["results"]) }} seeds each, at half the default learning rate
# so that they have time to come apart. {{ assert load_curve("lesson03_16x8")["setup"]["lr"] == make_config().lr / 2 }}

# %% tags=["hide-input"]
# @title Your bet
SHAPES = ["64 x 2", "32 x 4", "16 x 8", "8 x 16", "2 x 64"]
rows = make_config().num_prompts * make_config().num_generations
split_bet = bet(
    f"{rows} answers per step, prompts x answers to each. Which split has the lowest greedy accuracy from step 30 on?",
    SHAPES,
)

# %% tags=["hide-input"]
# @title Figure: five splits
looks = zip((ORANGE, GREEN, BLUE, PURPLE, BLACK), ("-", "--", "-.", ":", (0, (5, 1))), strict=True)
fig, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
whole, ends, quiet = {}, {}, {}
for shape, (color, style) in zip(SHAPES, looks, strict=True):
    name = "lesson03_" + shape.replace(" ", "")
    steps, accuracy = runs_of(name)
    whole[shape], ends[shape] = accuracy.mean(0), accuracy[:, steps.index(30) :]
    silent = 100 * torch.tensor([seed["steps"]["groups_without_signal"] for seed in load_curve(name)["results"]])
    silent = silent.unfold(1, 5, 5).mean(2)
    quiet[shape] = silent[:, 0].mean().item()
    middles = [5 * i + 2.5 for i in range(silent.shape[1])]
    for ax, x, runs in ((axes[0], steps, accuracy), (axes[1], middles, silent)):
        ax.fill_between(x, runs.amin(0), runs.amax(0), color=color, alpha=0.12, linewidth=0)
        ax.plot(x, runs.mean(0), color=color, linestyle=style, label=shape)
axes[0].set(xlabel="training step", ylabel="greedy, % right", ylim=(35, 92), title="mean of the seeds, band: range")
axes[1].set(xlabel="training step", ylabel="silent groups, %", ylim=(0, 100), title="groups that say nothing")
axes[0].legend(loc="lower right", ncols=2, title="prompts x answers")
plt.show()
lead = dict(zip(steps, (whole["64 x 2"] - whole["2 x 64"]).tolist(), strict=True))  # in points
worst = min(ends, key=lambda shape: ends[shape].mean())
split_bet.result(worst)
middle = [ends[shape] for shape in SHAPES[1:4]]
means = torch.stack([whole[shape] for shape in SHAPES[1:4]])  # [3, evaluations]
apart_at_most = (means.amax(0) - means.amin(0)).max().item()


def final_of(name: str) -> list[float]:
    """Greedy accuracy at the end of each recorded seed, in percent, lowest first."""
    return sorted(runs_of(name)[1][:, -1].tolist())


# %% [markdown]
# {{ assert worst == "2 x 64" }} If you bet on `64 x 2`, you had a reason: {{ quiet["64 x 2"]:.0f }}% of
# its 64 pairs are silent at first. But the other {{ 64 * (1 - quiet["64 x 2"] / 100):.0f }} pairs are as many different
# problems. Up to step 20 their accuracy stays within {{ max(abs(lead[s]) for s in lead if s <= 20):.1f }} points of the
# run on two problems, whose baseline is almost exact; from step 25 on it's higher. {{ assert all(lead[s] > 1 if s >= 25
# else abs(lead[s]) < 3 for s in lead) }} From step 30 on the best seed of `2 x 64` is below the worst of the three
# splits in the middle. {{ assert all((ends["2 x 64"].amax(0) < other.amin(0)).all() for other in middle) }} Between
# those three it hardly matters: all along, their means stay within {{ apart_at_most:.1f }} points of each other. (One
# learning rate for all, tuned for none.)
#
# So don't minimise silence for its own sake. On this task 4, 8 or 16 answers per prompt do about equally well. With 64,
# only two problems fit into a step, and that's too few.
#
# ## 7 · GRPO against RLOO
#
# At the default setting, lesson 01 couldn't tell plain REINFORCE, the batch mean and RLOO apart. GRPO doesn't stand out
# at the end either: after {{ load_curve("grpo")["setup"]["steps"] }} steps its {{
# len(load_curve("grpo")["results"]) }} seeds are at {{ final_of("grpo")[0]:.1f }} to {{ final_of("grpo")[-1]:.1f }}%,
# those of RLOO at {{ final_of("rloo")[0]:.1f }} to {{ final_of("rloo")[-1]:.1f }}%. {{ assert final_of("grpo")[0] <
# final_of("rloo")[-1] and final_of("rloo")[0] < final_of("grpo")[-1] }} Does it get there sooner, or by another way?
# GRPO differs from RLOO in two divisions, by the deviation of the group and by the length of the answer. [Lesson
# 04](04_dr_grpo.ipynb) deletes them one at a time, slowly enough to watch.
#
# ## Check yourself
#
# 1. A group has rewards 1, 0, 0, 0. What are its advantages, roughly, in GRPO, and without the division?
#
# <details><summary>Answer</summary>
# Mean 0.25, deviation 0.5. GRPO: 1.5 and three times −0.5. Without the division: 0.75 and three times −0.25.
# </details>
#
# 2. Would a larger constant than $10^{-4}$ beside the deviation have saved the run with the bonus?
#
# <details><summary>Answer</summary>
# Yes. With 0.1 the group of wrong answers gets advantages of a few thousandths, since its deviation is a few
# ten-thousandths, while a group with rewards of 0 and 1 keeps most of its own. The constant says how large a difference
# must be to mean something.
# </details>
#
# 3. The share of silent groups rises from 30 to 70% during training. Is that bad news?
#
# <details><summary>Answer</summary>
# Look at the accuracy. If it has risen, the problems have become easy, and the data set is nearly used up. If it
# hasn't, the policy may have collapsed to one answer per problem.
# </details>
#
# 4. Each answer is used once, but the rollout is cut into two mini-batches with an optimizer step each. Do ratio and
#    clip still do nothing?
#
# <details><summary>Answer</summary>
# In the first they do nothing. The second meets a policy that has moved by a step: its ratios are no longer 1, and
# tokens may be clipped.
# </details>
#
# 5. Rows of advantage 0 need no forward pass in the update. Always?
#
# <details><summary>Answer</summary>
# Not with a KL in the loss, or with a critic to train: then such a row has a gradient all the same.
# </details>
#
# 6. Does the mean of the group, an answer's own reward included, bias the gradient?
#
# <details><summary>Answer</summary>
# It shortens it by the factor $1 - 1/G$, everywhere (lesson 01). A constant factor does no harm. The division by the
# deviation is another matter: exercise 4.
# </details>
#
# ## Exercises
#
# [exercises/03_grpo.ipynb](../exercises/03_grpo.ipynb): make your loop GRPO, make a data set as silent as you're
# asked to, build a better KL penalty, and work out where GRPO's estimate points. Then go on to
# [04 · Dr. GRPO](04_dr_grpo.ipynb).
#
# ## Further reading
#
# - Z. Shao et al. 2024, *DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models*,
#   arXiv:2402.03300: GRPO, section 4.
# - DeepSeek-AI 2025, *DeepSeek-R1: Incentivizing Reasoning Capability in LLMs via Reinforcement Learning*,
#   arXiv:2501.12948: GRPO with rewards from a program.
# - Q. Yu et al. 2025, *DAPO: An Open-Source LLM Reinforcement Learning System at Scale*, arXiv:2503.14476: dynamic
#   sampling, section 3.2.
# - A. Ahmadian et al. 2024, *Back to Basics*, arXiv:2402.14740: RLOO for language models.
# - J. Schulman 2020, *Approximating KL Divergence*, joschu.net/blog/kl-approx.html: k1, k2, k3. Tang and Munos 2025,
#   *On a few pitfalls in KL divergence gradient estimation for RL*, arXiv:2506.09477.
