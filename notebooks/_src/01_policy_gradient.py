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
# - to write the training loop of this course yourself: sample, log-probs, verify, weigh, step;
# - why it is cross-entropy on your own samples, weighted by how good each one was;
# - why that works although nobody can differentiate the reward, checked against an exact gradient;
# - what a baseline is for, by taking it out of a run;
# - RLOO, the baseline that the other answers give you for free, and when any of this matters.
#
# You need [lesson 00](00_start_here.ipynb): the task, the model, what a sample is. The end of it lists the symbols.

# %%
import inspect
import itertools
import math
from statistics import fmean

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown, display

from rlcourse.course import pick
from rlcourse.course.lessons.curve_records import load_curve
from rlcourse.course.own import load_loop
from rlcourse.course.widgets import bet, explorer
from rlcourse.measure.plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, seed_band
from rlcourse.measure.records import provenance
from rlcourse.policy import load_policy
from rlcourse.rollout import make_engine
from rlcourse.sampling import Sampling
from rlcourse.tasks import load_task

task = load_task("minigsm")
policy = load_policy("embedded")
engine = make_engine(policy, "fast", torch.float32)

# %% [markdown]
# ## 1 · Be your own teacher
#
# You know how to fine-tune a language model: take good answers and lower the cross-entropy of their tokens. Now suppose
# you have no good answers, only a program that checks whether an answer is right.
#
# Then let the model write its own. Sample a few answers, keep those that the program accepts, and train on them as you
# would on anyone's. That's already reinforcement learning. **REINFORCE** (Williams 1992) is *cross-entropy on your own
# samples, weighted by how good each one was*. The rest of the course is about doing it well.
#
# Here are four answers to one question, as the model gives them before any training. `generate` returns a `Rollout`,
# whose rows are prompt, answer and padding.

# %%
problem = [p for p in task.problems("train") if p.level == 1][1]
prompt = policy.prompt(problem.question)
torch.manual_seed(28)
rollout = engine.generate([prompt], 4, 80, Sampling())
print(f"{problem.question}  (gold {problem.gold})\n")
for row, (start, length) in enumerate(zip(rollout.prompt_lengths, rollout.completion_lengths, strict=True)):
    print(f"{length:2} tokens: {policy.tokenizer.decode(rollout.ids[row, start : start + length])!r}")

# %% [markdown]
# `<|im_end|>` is the token that ends a turn. An answer is its tokens up to **and including** the first one of these.
# Stopping is a decision like any other. Leave that token out of the loss, and nothing teaches the model to stop.
#
# Two things are easy to get wrong when you train on such rows. The **shift**: the output at position $t$ predicts the
# token at $t + 1$. The **mask**: only the answer's own tokens count. Here is one row. **Look for** the first arrow that
# counts: it starts at the last token of the prompt.

# %% tags=["hide-input"]
# @title Figure: one row, its shift and its mask


def visible(token: str) -> str:
    """A token as a label: a space of its own as ␣, a new line as \\n."""
    return repr(token)[1:-1].strip() or "␣"


row, first = 1, int(rollout.prompt_lengths[1]) - 3
end = int(rollout.lengths[row])
shown = [policy.tokenizer.decode([i]) for i in rollout.ids[row, first : end + 2]]
fig, ax = plt.subplots(figsize=(10, 1.8))
for i, token in enumerate(shown):
    color = SKY if 3 <= i < end - first else "white"
    ax.add_patch(plt.Rectangle((i, 0), 0.94, 0.5, facecolor=color, edgecolor=BLACK, linewidth=0.8))
    ax.text(i + 0.47, 0.25, "pad" if i >= end - first else visible(token), ha="center", va="center", fontsize=8)
    if i + 1 < len(shown):
        counts = color == SKY if i < 2 else 2 <= i < end - first - 1
        style = {"arrowstyle": "->", "color": BLUE if counts else "lightgray", "connectionstyle": "arc3,rad=-0.5"}
        ax.annotate("", (i + 1.47, 0.52), (i + 0.47, 0.52), arrowprops=style)
ax.text(
    0, -0.3, "the prompt's last tokens, the answer in blue, padding; blue arrows: predictions that count", fontsize=9
)
ax.set(xlim=(-0.1, len(shown)), ylim=(-0.45, 0.85))
ax.axis("off")
plt.show()

# %% [markdown]
# The log-probability of an answer is the **sum** over its tokens, since the probability is their product. Here it is
# token by token, for the first of the four. Most tokens are near certain: there's only one way to go on. A few are real
# decisions. **Look for** them.

# %% tags=["hide-input"]
# @title Figure: the tokens of one answer
start, length = int(rollout.prompt_lengths[0]), int(rollout.completion_lengths[0])
tokens = [policy.tokenizer.decode([i]) for i in rollout.ids[0, start : start + length]]
probability = rollout.logprobs[0, :length].exp()
fig, ax = plt.subplots(figsize=(9, 2.8))
ax.bar(range(length), probability, color=[VERMILION if p < 0.9 else SKY for p in probability])
ax.set_xticks(range(length), [visible(token) for token in tokens], rotation=60, ha="right")
ax.set(ylabel="probability", title="The tokens of one answer; in red those below 0.9", ylim=(0, 1.02))
plt.show()

# %% [markdown]
# ## 2 · Build it
#
# The loop has five pieces. You write them, in [the first part of the exercises](../exercises/01_policy_gradient.ipynb).
# Each is one to three lines, tested as soon as you've written it ($z$: logits; $T$: token limit):
#
# | function | what it does | formula |
# | --- | --- | --- |
# | `sample` | draws the next token | $y_t \sim \text{softmax}(z)$ |
# | `log_probs` | log-prob of each answer's tokens | $\log \pi_\theta(y_t \mid s_t) = z_{y_t} - \log \sum_v e^{z_v}$ |
# | `verify` | pays 1 for a right answer, 0 for others | $R(x, y)$ |
# | `weigh` | compares an answer with the others to its prompt | $A_i = R_i - \frac{1}{G-1} \sum_{j \ne i} R_j$ |
# | `loss` | cross-entropy, weighted | $-\frac{1}{NT} \sum_i A_i \sum_t \log \pi_\theta(y_{i,t} \mid s_{i,t})$ |
#
# **Do that now**; it takes about 45 minutes. Your functions are saved as `my_loop.py`, and from here on we train with
# that file. Lessons 02 to 05 change it, a function or two at a time. If you'd rather read on, you get ours.

# %%
loop = load_loop()
start_accuracy = loop.greedy_accuracy(policy, pick(8, 200))
print(inspect.getsource(loop.train))

# %% [markdown]
# That's the whole of `train`: roll out, judge, weigh (inside `advantages`), step. A step samples {{ loop.GROUP }}
# answers to each of {{ loop.PROMPTS }} problems. Take away the weights, and the loss is fine-tuning. An answer with
# weight 0 is left out; one with a negative weight becomes less likely. The constant divisor only sets the scale;
# warm-up and gradient clipping are routine; `updates` and `REFERENCE` wait for lessons 02 and 03.
#
# ## 3 · Train, then take a piece out
#
# The model starts at a greedy accuracy of about {{ 100 * start_accuracy:.0f }}%. In lesson 00 you saw how far {{
# load_curve("dr_grpo")["setup"]["num_prompts"] }} × {{ load_curve("dr_grpo")["setup"]["num_generations"] }} answers per
# step take it. Your loop samples a quarter as many.

# %% tags=["hide-input"]
# @title Your bet
STEPS, ASKED = pick(2, 30), pick(8, 200)
larger = [e["accuracy"] for seed in load_curve("dr_grpo")["results"] for e in seed["evals"] if e["step"] == 30]
first_bet = bet(
    f"After 30 steps lesson 00's recorded runs were at {100 * min(larger):.0f} to {100 * max(larger):.0f}%. Where is "
    f"your loop after {STEPS} steps of {loop.PROMPTS} × {loop.GROUP} answers, in greedy accuracy? (You win if "
    f"you land between the worst and the best of your run and {len(load_curve('lesson01_rloo_plus')['results'])} "
    "recorded seeds.)",
    (0, 100, 1),
    unit="%",
)

# %%
trained, built = loop.train(STEPS, problems=ASKED)

# %% tags=["hide-input"]
# @title Figure: the first run


def validation(log) -> tuple[list[int], list[float]]:
    """Steps and greedy accuracy in percent."""
    rows = [row for row in log if row["accuracy"] is not None]
    return [row["step"] for row in rows], [100 * row["accuracy"] for row in rows]


def draw_runs(ax, runs: dict) -> None:
    """Greedy accuracy of runs, {label: (log, colour, marker)}."""
    for label, (log, color, marker) in runs.items():
        ax.plot(*validation(log), color=color, marker=marker, label=label)
    ax.set(xlabel="training step", ylabel="% right", ylim=(0, 100))
    ax.grid()


def recorded(name: str, step: int = 30) -> list[float]:
    """Greedy accuracy of each recorded seed at a step, in percent, lowest first."""
    evals = [{e["step"]: e["accuracy"] for e in seed["evals"]} for seed in load_curve(f"lesson01_{name}")["results"]]
    return sorted(100 * seed[step] for seed in evals)


def draw_recorded(ax, name: str, color: str) -> None:
    """Thin lines: greedy accuracy of the recorded seeds, up to step 30."""
    for seed in load_curve(f"lesson01_{name}")["results"]:
        points = [(e["step"], 100 * e["accuracy"]) for e in seed["evals"] if e["step"] <= 30]
        ax.plot(*zip(*points, strict=True), color=color, linewidth=0.8, alpha=0.5)


fig, ax = plt.subplots()
ax.plot([r["step"] for r in built], [100 * r["reward"] for r in built], color=SKY, label="samples of the step")
draw_runs(ax, {"greedy, on validation problems": (built, BLUE, "o")})
draw_recorded(ax, "rloo_plus", BLUE)
first_bet.line(ax)
ax.set_title("Five functions, one run (thin: recorded seeds)")
ax.legend()
plt.show()
reached = validation(built)[1][-1]
first_bet.result([reached, *recorded("rloo_plus")])

# %% [markdown]
# From {{ validation(built)[1][0]:.3g }}% to {{ reached:.3g }}%, {{ assert reached > 70 }} on nothing but the model's
# own answers and a program that reads their final number. Training used no worked examples. A quarter of the answers
# buys most of the gain; the rest buys the last few points. {{ assert max(recorded("rloo_plus")) < 100 * min(larger) }}
# (Five recorded seeds are at {{ recorded("rloo_plus")[0]:.0f }} to {{ recorded("rloo_plus")[-1]:.0f }}% after 30
# steps.) The light line is lower because those answers are sampled, not greedy. It jumps because a step has only {{
# loop.PROMPTS * loop.GROUP }} of them. {{ assert 100 * max(row["reward"] for row in built) < reached }}
#
# Now take `weigh` out, so that the weight of an answer is its reward, 0 or 1. Then do the same with a generous judge:
# everyone gets 5 points for taking part, so a wrong answer earns 5 and a right one 6. The difference between them is
# the same as before.


# %%
def as_it_is(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """Rewards 0 and 1, no baseline."""
    return rewards


def generous(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """Rewards 5 and 6, no baseline."""
    return rewards + 5


# %% tags=["hide-input"]
# @title Your bet
second_bet = bet(
    f"No baseline, and every reward is 5 higher. What is the greedy accuracy after {STEPS} steps? (Again you win "
    "between the worst and the best of your run and "
    f"{len(load_curve('lesson01_reinforce_plus_5')['results'])} recorded seeds.)",
    (0, 100, 1),
    unit="%",
)

# %%
logs = {}
for weigh in (as_it_is, generous):
    loop.weigh = weigh
    _, logs[weigh] = loop.train(STEPS, problems=ASKED)
plain, shifted = logs.values()

# %% tags=["hide-input"]
# @title Figure: without a baseline
fig, ax = plt.subplots()
runs = {
    "with weigh": (built, GREEN, "^"),
    "without, rewards 0 and 1": (plain, BLUE, "o"),
    "without, rewards 5 and 6": (shifted, VERMILION, "s"),
}
draw_runs(ax, runs)
draw_recorded(ax, "reinforce_plus_5", VERMILION)
second_bet.line(ax)
ax.set_title("With a baseline and without (thin: rewards 5 and 6, recorded)", fontsize=11)
ax.legend(loc="upper left", fontsize=9)
plt.show()
before, after = validation(shifted)[1][0], validation(shifted)[1][-1]
second_bet.result([after, *recorded("reinforce_plus_5")])

# %% [markdown]
# {{ assert after < reached - 20 and validation(plain)[1][-1] > after + 20 }} Rewards 0 and 1 do well even without a
# baseline. Add 5, and the run ends at {{ after:.3g }}%. A single run proves little, so look at the five thin lines:
# they end between {{ recorded("reinforce_plus_5")[0]:.0f }} and {{ recorded("reinforce_plus_5")[-1]:.0f }}%, four of
# them below the model they started from. {{ assert sum(value < 37 for value in recorded("reinforce_plus_5")) == 4 }}
# (With rewards 0 and 1 the recorded seeds end at {{ recorded("reinforce")[0]:.0f }} to {{ recorded("reinforce")[-1]:.0f
# }}%.)
#
# Yet the code is right, and so is the mathematics: **in expectation**, both judges give the same gradient. So what went
# wrong? Ask what the loop estimates.
#
# ## 4 · What the loop estimates
#
# First the vocabulary of reinforcement learning:
#
# | word | here | symbol |
# | --- | --- | --- |
# | state | the prompt and the tokens so far | $s_t = (x, y_{<t})$ |
# | action | the next token | $y_t$ |
# | policy | the model's distribution over the next token | $\pi_\theta(y_t \mid s_t)$ |
# | reward | one number, once the answer is complete | $R(x, y)$ |
# | goal | the expected reward | $J(\theta) = \mathbb{E}_{y \sim \pi_\theta}[R(x, y)]$ |
#
# Leave out the prompt for a moment. $J = \sum_y \pi_\theta(y)\, R(y)$, a sum over all texts, and only $\pi_\theta$
# depends on the parameters $\theta$. So $\nabla J = \sum_y \nabla\pi_\theta(y)\, R(y)$, and the reward itself is never
# differentiated. We can't sum over all texts, but we can sample. The bridge is one line, since $\nabla \log \pi =
# \nabla \pi / \pi$:
#
# $$\nabla J = \sum_y \pi_\theta(y)\, R(y)\, \nabla \log \pi_\theta(y)
#            = \mathbb{E}_{y \sim \pi_\theta}\big[R(y)\, \nabla \log \pi_\theta(y)\big] .$$
#
# That's what the loop computes: draw $y$, look up $R(y)$, take $R(y)\,\nabla\log\pi_\theta(y)$. The vector
# $\nabla\log\pi_\theta(y)$ is called the **score** of $y$: the direction that makes $y$ more probable.
#
# ### A language small enough to check it
#
# A text has at most three tokens out of `a`, `b` and the end `■`. The policy sees only the previous token, so it's a
# table of 3 × 3 logits. The verifier pays 1 for a text that ends and has exactly one `b`. There are only 15 texts, so
# we can sum over them all.

# %%
TOKENS, LONGEST = "ab■", 3


def all_texts(prefix: str = "") -> list[str]:
    """Every text that the policy can write."""
    if prefix.endswith("■") or len(prefix) == LONGEST:
        return [prefix]
    return [text for token in TOKENS for text in all_texts(prefix + token)]


def log_pi_of(table: torch.Tensor, text: str, end_counts: bool = True) -> torch.Tensor:
    """log pi of a text. table: logits [3 previous (none, a, b), 3 tokens]. end_counts False forgets the token ■."""
    previous = [0] + [1 + TOKENS.index(token) for token in text[:-1]]
    of_tokens = table.log_softmax(-1)[previous, [TOKENS.index(token) for token in text]]
    return sum(p for p, token in zip(of_tokens, text, strict=True) if end_counts or token != "■")


Y = all_texts()
R = torch.tensor([float(y.endswith("■") and y.count("b") == 1) for y in Y])
table = torch.tensor([[0.5, -0.3, 0.1], [0.2, 0.0, -0.4], [-0.5, 0.3, 0.6]], requires_grad=True)
pi = torch.stack([log_pi_of(table, y) for y in Y]).exp()  # [15], with gradient
J = (pi * R).sum()
print("  ".join(f"{y} {p:.3f}{'*' if r else ''}" for y, p, r in zip(Y, pi, R, strict=True)), "  (* earns 1)")
print(f"the probabilities add up to {pi.sum():.4f}; expected reward J = {J:.4f}")

# %% [markdown]
# The gradient of $J$ two ways: autograd through the sum over all texts, and the formula with scores.

# %%
[exact] = torch.autograd.grad(J, table, retain_graph=True)


def scores_of(table: torch.Tensor, end_counts: bool = True) -> torch.Tensor:
    """grad log pi of every text: [15, 9]."""
    # + 0 * table.sum(): the text ■ has a gradient, 0, even where its only token doesn't count
    return torch.stack([torch.autograd.grad(log_pi_of(table, y, end_counts) + 0 * table.sum(), table)[0] for y in Y])


scores, pi, exact = scores_of(table).flatten(1), pi.detach(), exact.flatten()
trick = ((pi * R)[:, None] * scores).sum(0)
print("autograd", [round(v, 4) for v in exact.tolist()])
print("scores  ", [round(v, 4) for v in trick.tolist()])
assert torch.allclose(exact, trick, atol=1e-6)

# %% [markdown]
# So the estimator is right **on average**. A single sample is a wild guess. Averaging $N$ of them shrinks the error
# like $1/\sqrt{N}$, a straight line on the logarithmic axes below. The error of an estimator that's wrong on average
# levels off: the red one forgets the end token. **Look for** the bend.

# %% tags=["hide-input"]
# @title Figure: unbiased, and not
torch.manual_seed(0)
N = [2**i for i in range(2, pick(12, 17))]
many = torch.multinomial(pi, 20 * N[-1], replacement=True).view(20, -1)
fig, ax = plt.subplots()
forgetful = scores_of(table, end_counts=False).flatten(1)
estimators = {"without the end token": (forgetful, VERMILION, "s"), "REINFORCE": (scores, BLUE, "o")}
for label, (vectors, color, marker) in estimators.items():
    errors = []
    for n in N:
        means = (R[many[:, :n], None] * vectors[many[:, :n]]).mean(1)  # [20, 9]
        errors.append((means - exact).norm(dim=1).mean().item())
    ax.loglog(N, errors, color=color, marker=marker, label=label)
ax.loglog(N, [errors[0] * math.sqrt(N[0] / n) for n in N], color=BLACK, linestyle=":", label="slope of $1/\\sqrt{N}$")
ax.set(xlabel="samples averaged, N", ylabel="distance to the exact gradient")
ax.set_title("Noise averages out, bias doesn't")
ax.legend()
ax.grid()
plt.show()

# %% [markdown]
# ## 5 · Why the generous judge spoils the run
#
# Add a constant to every reward. Does the average change? A score has expectation zero, because probabilities always
# add up to one:
#
# $$\mathbb{E}_{y}\big[\nabla \log \pi_\theta(y)\big] = \sum_y \nabla \pi_\theta(y) = \nabla \sum_y \pi_\theta(y)
#   = \nabla 1 = 0 .$$
#
# So you may add a constant to the reward, or subtract any **baseline** $b$ that doesn't depend on the answer, and the
# average stays: $\nabla J = \mathbb{E}_y[(R(y) - b)\,\nabla\log\pi_\theta(y)]$. What is left, $A = R - b$, is called
# the **advantage**: how much better than expected. The average doesn't care about $b$. The **noise** does. With
# rewards 5 and 6 every sample is pushed up, nonsense nearly as hard as sense. Averaged over all texts, the 5 that they
# have in common cancels. Over {{ loop.PROMPTS * loop.GROUP }} samples it doesn't.
#
# On the toy language, exactly:


# %%
def mean_and_variance(rewards: torch.Tensor, b: float, pi=pi, scores=scores) -> tuple[torch.Tensor, float]:
    """Mean [9] and variance, all coordinates together, of the estimate from one sample, (R - b) score."""
    estimate = (rewards - b)[:, None] * scores
    mean = (pi[:, None] * estimate).sum(0)
    return mean, (pi * (estimate - mean).square().sum(1)).sum().item()


lines = ["| rewards | baseline | mean gradient off by | variance |", "| --- | --- | --- | --- |"]
for shift in (0, 5):
    for name, b in (("none", 0.0), ("mean reward", (pi * (R + shift)).sum().item())):
        mean, variance = mean_and_variance(R + shift, b)
        off = round((mean - exact).abs().max().item(), 5)  # without float32's rounding
        lines.append(f"| {shift} and {shift + 1} | {name} | {off:g} | {variance:.3g} |")
display(Markdown("\n".join(lines)))
noise_ratio = mean_and_variance(R + 5, 0.0)[1] / mean_and_variance(R, 0.0)[1]

# %% [markdown]
# The same expected gradient with {{ noise_ratio:.0f }} times the variance. That's on the toy, but the red run had to
# learn through noise of this kind.
#
# The variance is a parabola in $b$. Setting its derivative to zero gives its lowest point, a mean of the rewards that
# gives more weight to texts with large scores:
#
# $$b^* = \mathbb{E}\big[\lVert\nabla\log\pi\rVert^2 R\big] \Big/ \mathbb{E}\big[\lVert\nabla\log\pi\rVert^2\big] .$$
#
# In practice you take the plain mean reward, which needs no scores. Below, *shift* is added to every reward, and
# *training* is how far the policy has come, in exact gradient steps; run the notebook, and both are sliders. **Look
# for** where the red square, no baseline, and the blue dot lie on the curve; the green triangle, $b^*$, is its lowest
# point. (The axis is logarithmic.)

# %% tags=["hide-input"]
# @title Explorer: the variance over the baseline
tables = [table.detach()]
for _ in range(80):  # gradient ascent on the exact J
    leaf = tables[-1].clone().requires_grad_()
    goal = (torch.stack([log_pi_of(leaf, y) for y in Y]).exp() * R).sum()
    tables.append(tables[-1] + torch.autograd.grad(goal, leaf)[0])


def draw(ax, shift: float, training: int) -> None:
    """Variance over baselines, as a multiple of the smallest, and the three baselines that have a name."""
    leaf = tables[training].clone().requires_grad_()
    pi, scores = torch.stack([log_pi_of(leaf, y) for y in Y]).exp().detach(), scores_of(leaf).flatten(1)
    rewards, weights = R + shift, pi * scores.square().sum(1)
    named = {"none": 0.0, "mean reward": (pi * rewards).sum().item()}
    named["best"] = ((weights * rewards).sum() / weights.sum()).item()
    smallest = mean_and_variance(rewards, named["best"], pi, scores)[1]
    grid = torch.linspace(-1, 3, 81).tolist()
    ax.plot(grid, [mean_and_variance(rewards, b, pi, scores)[1] / smallest for b in grid], color=BLACK)
    for (name, b), (color, marker) in zip(named.items(), ((VERMILION, "s"), (BLUE, "o"), (GREEN, "^")), strict=True):
        times = mean_and_variance(rewards, b, pi, scores)[1] / smallest
        ax.plot(b, times, color=color, marker=marker, markersize=9, linestyle="", label=f"{name}: {times:.1f}")
    ax.set(xlabel="baseline b", ylabel="variance, smallest = 1", yscale="log", ylim=(0.8, 200), xlim=(-1, 3))
    ax.set_title(f"rewards {shift:g} and {1 + shift:g}, {training} steps of training", fontsize=11)
    ax.legend(loc="upper center")


static = [{"shift": 0.0, "training": 0}, {"shift": 1.0, "training": 0}, {"shift": 0.0, "training": 60}]
explorer(draw, static=static, shift=(0.0, -1.0, 2.0, 0.5), training=(0, 0, 80, 10))

# %% [markdown]
# Left: with rewards 0 and 1 and few successes, doing without a baseline costs little, since 0 **is** close to the mean
# reward. Middle: add 1, and the red square sits far up the wall. Right: once nearly every text earns 1, the mean reward
# is no better than none. The few failures have large scores, and they pull $b^*$ away from the mean. How much a
# baseline gains you depends on where the rewards happen to lie.
#
# ## 6 · Fix it with one line
#
# Subtract the mean reward of the batch, and a run with a constant in its rewards recovers, as section 8 shows. A
# baseline is insurance against any constant that happens to be in all rewards. It has a price, too: section 7.
#
# The batch mean has two flaws. Easy problems and hard ones share it, so an average answer to an easy problem looks like
# an achievement. And it contains the very reward that it's subtracted from: a success raises its own bar. But we have
# several answers to each prompt anyway, so compare an answer with the **others of its group**. That is RLOO, *REINFORCE
# leave-one-out* (Kool et al. 2019; Ahmadian et al. 2024), and it's the `weigh` that you wrote:
#
# $$A_i = R_i - \frac{1}{G-1} \sum_{j \ne i} R_j .$$
#
# No constant gets past it. The generous judge's advantages are those of rewards 0 and 1, and so is the whole run.

# %%
loop = load_loop()  # with its own `weigh` again
r = torch.randint(0, 2, (loop.PROMPTS * loop.GROUP,)).float()
moved = (loop.weigh(r + 5, loop.GROUP) - loop.weigh(r, loop.GROUP)).abs().max()
print(f"adding 5 to all rewards moves the advantages by {moved:.6f}")

# %% [markdown]
# What happens if your own reward stays in? On the toy we can go through **all** groups of two and of three texts.

# %%
for G in (2, 3):
    groups = torch.tensor(list(itertools.product(range(len(Y)), repeat=G)))  # [15^G, G]
    probability, r = pi[groups].prod(1), R[groups]
    others = (r.sum(1, keepdim=True) - r) / (G - 1)
    for name, advantage in (("own reward in", r - r.mean(1, keepdim=True)), ("left out", r - others)):
        mean = (probability[:, None] * (advantage[..., None] * scores[groups]).mean(1)).sum(0)
        print(f"G = {G}, {name:13}: {(mean @ exact / exact.square().sum()).item():.4f} x the exact gradient")

# %% [markdown]
# With your own reward in, the gradient shrinks by the factor $1 - 1/G$ but points the right way. A factor that's the
# same everywhere does no harm, since Adam divides by the size of the gradient anyway. So a group's two baselines, with
# your own reward and without it, give the same advantages up to a constant factor. GRPO will build on the first.
#
# ## 7 · Why did it do so well without?
#
# With rewards 0 and 1 the run without a baseline did well. A mean reward near 0 explains only the
# beginning: later come steps in which most answers earn 1. {{ assert max(row["reward"] for row in plain) > 0.5 }} So
# take one prompt and the model as it started, and find $b^*$ from its answers.

# %%
torch.manual_seed(2)
pool = engine.generate([prompt], pick(16, 128), loop.LIMIT, Sampling())
texts, ended = policy.texts(pool.completion_ids, pool.completion_mask), pool.finished.tolist()
r = torch.tensor([float(e and task.verify(t, problem.gold).strict) for t, e in zip(texts, ended, strict=True)])
mean_reward = r.mean().item()

# %% tags=["hide-input"]
# @title Your bet
third_bet = bet(
    f"{mean_reward:.0%} of {len(r)} answers to this prompt are right. They earn 1, the others 0. Which constant "
    "baseline gives these answers' gradient the lowest variance?",
    (0.0, 1.0, 0.01),
)

# %%
squared = []  # the squared norm of each answer's score
for row in range(len(r)):
    grads = torch.autograd.grad(loop.token_log_probs(policy, pool[[row]]).sum(), list(policy.model.parameters()))
    squared.append(sum(g.square().sum().item() for g in grads))
squared = torch.tensor(squared)
best = ((squared * r).sum() / squared.sum()).item()
right, wrong = squared[r == 1].mean().item(), squared[r == 0].mean().item()
third_bet.result(best)
print(f"mean squared norm of the score: right answers {right:,.0f}, wrong {wrong:,.0f}")

# %% [markdown]
# Where does that come from? **Look for** the colour of the large scores.

# %% tags=["hide-input"]
# @title Figure: how large the scores are
fig, ax = plt.subplots(figsize=(6.5, 2.8))
bins = torch.logspace(1.4, 3.2, 31).tolist()
for flag, color, label in ((0, VERMILION, "wrong"), (1, BLUE, "right")):
    chosen = squared[r == flag].sqrt().tolist()
    ax.hist(chosen, bins=bins, color=color, alpha=0.7, label=f"{label} ({len(chosen)})")
ax.set(xscale="log", xlabel="norm of the score", ylabel="answers", title=f"{len(r)} answers to one prompt")
ax.legend()
plt.show()

# %% [markdown]
# $b^*$ weights each reward by the squared norm of its score, and a wrong answer's is {{ wrong / right:.0f
# }} times a right one's, on average. {{ assert wrong > 3 * right }} A wrong answer here is often the garbage of lesson
# 00, and each improbable token in it adds a lot to the score. With rewards 0 and 1 and no baseline, all of that is
# multiplied by exactly 0. Subtract the mean reward, and it gets a weight of {{ -mean_reward:.2f }}. So the best
# constant here is {{ best:.2f }}, far below the mean reward of {{ mean_reward:.2f }}. {{ assert best < mean_reward / 2
# }}
#
# Take this with a grain of salt: it's about one prompt and a model of 0.9M parameters that writes garbage, not about
# language models in general, and it was measured only at the start of the run. Two things carry over. "Subtract the
# mean, it reduces the variance" is a rule of thumb that can fail. And a baseline that moves **with** the rewards
# protects you from any constant in them, however large.
#
# ## 8 · On record
#
# Here is the same loop with {{ len(load_curve("lesson01_reinforce")["results"]) }} seeds per line. The line is their
# mean; the band goes from worst to best. **Look for** the one line on the left that keeps up with those on the right.

# %% tags=["hide-input"]
# @title Figure: five seeds each
LINES = {  # record: label, colour, line style, marker
    "reinforce": ("rewards 0, 1", BLUE, "-", "o"),
    "reinforce_plus": ("rewards 1, 2", VERMILION, "--", "s"),
    "reinforce_minus": ("rewards −1, 0", PURPLE, "-.", "^"),
    "reinforce_plus_5": ("rewards 5, 6", BLACK, ":", "D"),
    "baseline_plus": ("rewards 1, 2, less the batch mean", GREEN, "--", "s"),
    "rloo_plus": ("rewards 1, 2, RLOO", ORANGE, "-", "o"),
}
curves = {name: load_curve(f"lesson01_{name}") for name in LINES}
fig, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
for name, (label, color, style, marker) in LINES.items():
    ax = axes[int(name in ("baseline_plus", "rloo_plus"))]
    steps, low, mean, high = ([*v] for v in seed_band(curves[name]["results"]))
    ax.fill_between(steps, [100 * v for v in low], [100 * v for v in high], color=color, alpha=0.12, linewidth=0)
    ax.plot(steps, [100 * v for v in mean], color=color, linestyle=style, marker=marker, label=label)
for ax, title in zip(axes, ("no baseline", "with a baseline"), strict=True):
    ax.set(title=title, xlabel="training step", ylim=(0, 100))
    ax.grid()
axes[0].set_ylabel("greedy, % right")
fig.legend(loc="outside lower center", ncols=3, fontsize=9)
plt.show()
final = {name: [100 * seed["evals"][-1]["accuracy"] for seed in curve["results"]] for name, curve in curves.items()}
ends = [[seed["summary"]["accuracy_after"] for seed in load_curve(n)["results"]] for n in ("reinforce", "rloo")]
ends.append([seed["summary"]["accuracy_after"] for seed in load_curve("reinforce_baseline")["results"]])
lost = {n: fmean(final["reinforce"]) - fmean(final[n]) for n in ("reinforce_plus", "reinforce_minus")}
default_overlaps = max(map(min, ends)) <= min(map(max, ends))
print(provenance(curves["reinforce"]), "with `python -m tools.lessons.lesson01`")

# %% [markdown]
# A shift of 1 doesn't change the expected gradient, and yet it costs {{ lost["reinforce_plus"]:.0f }}
# points on average when it's up, and {{ lost["reinforce_minus"]:.0f }} when it's down: section 5's curve has two walls.
# From step 15 on, every seed of the blue line is above all of theirs. {{ assert all(max(seed["evals"][i]["accuracy"]
# for n in ("reinforce_plus", "reinforce_minus") for seed in curves[n]["results"]) < min(seed["evals"][i]["accuracy"]
# for seed in curves["reinforce"]["results"]) for i, e in enumerate(curves["reinforce"]["results"][0]["evals"]) if
# e["step"] >= 15) }} Either baseline gives it all back, to within less than the spread of the seeds. {{ assert
# max(fmean(final["reinforce"]) - fmean(final[n]) for n in ("baseline_plus", "rloo_plus")) < min(max(final[n]) -
# min(final[n]) for n in ("reinforce", "baseline_plus", "rloo_plus")) }} {{ assert min(final["baseline_plus"] +
# final["rloo_plus"]) > max(final["reinforce_plus"] + final["reinforce_minus"]) }}
#
# When does none of this matter? At the package's default of {{ load_curve("reinforce")["setup"]["num_prompts"] }} × {{
# load_curve("reinforce")["setup"]["num_generations"] }} answers and rewards 0 and 1, plain REINFORCE, the batch mean
# and RLOO end with ranges over their {{ len(ends[0]) }} seeds that overlap. {{ assert default_overlaps }} {{ assert
# len({len(end) for end in ends}) == 1 }} If somebody claims that one of them wins, ask for the setting, the seeds and
# the spread.
#
# ## 9 · What is being paid
#
# The loop pays for whatever `verify` says, not for what you meant. Two readings of the same text: yours, the **strict**
# one, and a **lenient** one that also takes "the answer is NUMBER" or, failing that, the last number in the text.

# %% tags=["hide-input"]
# @title Table: two readings
TEXTS = ["3+4=7\n#### 7", "#### 7 apples", "####7", "The answer is 7.", "3+4=7, so 7 apples", "It is 5 or 6 or 7"]
TEXTS += ["#### 6\nNo, wait.\n#### 7", "9+9=18\n#### 7"]
lines = ["| answer (gold: 7) | strict | lenient |", "| --- | --- | --- |"]
for text in TEXTS:
    verdict = task.verify(text, "7")
    marks = ["✓" if ok else "✗" for ok in (verdict.strict, verdict.lenient)]
    lines.append(f"| `{text!r}` | {marks[0]} | {marks[1]} |")
display(Markdown("\n".join(lines)))

# %% [markdown]
# "The answer is 7." is right and earns nothing strictly, so a policy that's paid strictly learns the form, too.
# (`#### 7 apples` passes: even the strict reading allows a unit.) Report both numbers, or a gain in form will look like
# a gain in mathematics. "It is 5 or 6 or 7" earns the lenient reward by hedging. And the last line is right by
# accident: **both** pay for it. A verifier that reads only the final number never sees the working.
#
# ## Check yourself
#
# 1. Which token of the answer `#### 7■` gets the reward, if the reward comes at the end?
#
# <details><summary>Answer</summary>
# All of them, the end token too: the loss multiplies each token's log-prob by the same weight. REINFORCE doesn't know
# which token deserved it; only the average over many answers sorts that out.
# </details>
#
# 2. The reward is 1 for all of your sixteen answers. What is the gradient without a baseline, and with RLOO?
#
# <details><summary>Answer</summary>
# Without: the mean score of the sixteen. It isn't zero, although there's nothing to learn; its expectation is zero, so
# it's noise. With RLOO: exactly zero.
# </details>
#
# 3. May a baseline depend on the prompt? On the length of the answer?
#
# <details><summary>Answer</summary>
# On the prompt: yes, it's known before anything is sampled. On the length of the answer: no. The length is part of the
# sample, so the proof of section 5 breaks and the gradient is biased.
# </details>
#
# 4. Your loss went up during training. Is something broken?
#
# <details><summary>Answer</summary>
# Not necessarily. The value of this loss doesn't measure progress; only its gradient means something. Look at reward
# and accuracy.
# </details>
#
# 5. A colleague trains on the right samples only and calls it rejection sampling. How does that differ from our run
#    with rewards 0 and 1 and no baseline?
#
# <details><summary>Answer</summary>
# With fresh samples at every step, only in scale: weights of 0 and 1 **are** a choice of the right samples. The
# difference begins when wrong answers get a negative weight, which is what a baseline does.
# </details>
#
# ## Exercises
#
# [exercises/01_policy_gradient.ipynb](../exercises/01_policy_gradient.ipynb): the five functions of section 2, then
# cheat a verifier and fix it, and find out what a baseline may know. Then go on to [02 · PPO](02_ppo.ipynb).
#
# ## Further reading
#
# - Williams 1992, *Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning*, Machine
#   Learning 8: REINFORCE and the baseline.
# - Sutton and Barto 2018, *Reinforcement Learning: An Introduction*, 2nd edition, chapter 13: policy gradients.
# - Weaver and Tao 2001, *The Optimal Reward Baseline for Gradient-Based Reinforcement Learning*, arXiv:1301.2315.
# - Greensmith, Bartlett and Baxter 2004, *Variance Reduction Techniques for Gradient Estimates in Reinforcement
#   Learning*, Journal of Machine Learning Research 5: $b^*$ and more.
# - Kool, van Hoof and Welling 2019, *Buy 4 REINFORCE Samples, Get a Baseline for Free!*, ICLR workshop: leave-one-out.
# - Ahmadian et al. 2024, *Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in
#   LLMs*, arXiv:2402.14740: RLOO for language models.
