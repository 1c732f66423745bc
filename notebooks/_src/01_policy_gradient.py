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
# - to see the writing of a text as a chain of decisions: state, action, policy, return;
# - why a program that checks answers can be the reward, although nobody can differentiate it;
# - the REINFORCE estimator: derived, compared with an exact gradient, and written as a loss;
# - what a baseline does to its variance, and why it does not change its mean;
# - RLOO, the baseline that the other answers give for free, and when any of this matters.
#
# You need [lesson 00](00_start_here.ipynb): the task, the model, and what a sample is.

# %%
import itertools
import math
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown, display

from rlcourse.config import make_config
from rlcourse.course import pick
from rlcourse.evaluation import load_all
from rlcourse.measure.plots import BLACK, BLUE, GREEN, LABELS, ORANGE, PURPLE, SKY, STYLES, VERMILION

config = make_config("laptop")
policy, engine, task = load_all(config)
print(f"{sum(p.numel() for p in policy.model.parameters()):,} parameters")

# %% [markdown]
# ## 1 · A text is a chain of decisions
#
# A model answers a prompt $x$ token by token: $y = (y_1, \dots, y_T)$. In the words of reinforcement learning:
#
# | word | here | symbol |
# | --- | --- | --- |
# | state | the prompt and the tokens so far | $s_t = (x, y_{<t})$ |
# | action | the next token | $y_t$ |
# | policy | the model's distribution over the next token | $\pi_\theta(y_t \mid s_t)$ |
# | transition | append the token; nothing else happens | $s_{t+1} = (x, y_{\le t})$ |
# | end | the token that ends the turn, or the limit | $T$ |
# | reward | one number, once the answer is complete | $R(x, y)$ |
# | return | the sum of the rewards still to come: the same $R$ at every token | $R(x, y)$ |
#
# The letter $\theta$ stands for all parameters. Here is one answer as such a chain.

# %%
torch.manual_seed(28)
problem = [p for p in task.problems("train") if p.level == 1][1]
rollout = engine.generate([policy.prompt(problem.question)], 4, 80, config.sampling)
print(f"{problem.question}  (gold {problem.gold})\n")
row = 0
chain = [policy.tokenizer.decode([token]) for token in rollout.completion_ids[row][rollout.completion_mask[row]]]
lines = ["| t | state: prompt + | action | π(action) |", "| --- | --- | --- | --- |"]
for t, token in enumerate(chain):
    state, probability = "".join(chain[:t])[-30:], rollout.logprobs[row, t].exp().item()
    lines.append(f"| {t + 1} | `{state!r}` | `{token!r}` | {probability:.3f} |")
display(Markdown("\n".join(lines)))

# %% [markdown]
# Most steps are near certain: there is only one way to go on. A few are real decisions. **Look for** the low bars:
# how to begin, and, when the work is done, whether to come to the answer or to write on.

# %%
fig, ax = plt.subplots(figsize=(9, 2.8))
probability = rollout.logprobs[row, : len(chain)].exp()
ax.bar(range(len(chain)), probability, color=[VERMILION if p < 0.9 else SKY for p in probability])
ax.set_xticks(range(len(chain)), [repr(token)[1:-1] for token in chain], rotation=60, ha="right", fontsize=9)
ax.set(ylabel="probability", title="The tokens of one answer; in red those below 0.9", ylim=(0, 1.02))
ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ### The probability of an answer
#
# The probability of the whole answer is the product over its tokens, so its logarithm is a sum:
#
# $$\log \pi_\theta(y \mid x) = \sum_{t=1}^{T} \log \pi_\theta(y_t \mid s_t) .$$
#
# Answers have different lengths, but a batch is a rectangle. So rows are padded after the end, and a *mask* says which
# tokens count: all **up to and including** the first end token. To end is a decision, so the end token is part of the
# answer. What stands behind it was never decided by anyone.

# %%
ids = rollout.completion_ids[:, :8]  # the first columns are enough to see it
is_end = torch.isin(ids, torch.tensor(policy.eos_ids))
ended_before = is_end.cumsum(1) - is_end.long()  # ends strictly before this token
mask = ended_before == 0
for row_ids, row_mask in zip(ids, mask, strict=True):
    print(" ".join(f"{policy.tokenizer.decode([token])!r:>12}" for token in row_ids))
    print(" ".join(f"{bool(keep)!s:>12}" for keep in row_mask))
assert torch.equal(mask, rollout.completion_mask[:, :8])

# %% [markdown]
# The log-probs of the tokens come out of one forward pass over prompt and answer. Mind the shift by one: the output at
# position $t-1$ predicts the token at position $t$.

# %%
with torch.no_grad():
    logits = policy.model(rollout.ids).logits  # [rows, prompt + completion, vocabulary]
before_first = int(rollout.prompt_lengths[0]) - 1  # one prompt, so the same in every row
predictions = logits[:, before_first:-1].log_softmax(-1)
by_hand = predictions.gather(-1, rollout.completion_ids[..., None])[..., 0] * rollout.completion_mask
print("log-prob of each answer:", [round(v, 2) for v in by_hand.sum(1).tolist()])
print("as probability:         ", [f"{v:.1e}" for v in by_hand.sum(1).exp().tolist()])

# %% [markdown]
# `rlcourse.logprobs.token_logprobs` computes the same without holding all logits at once, and the sampler has kept the
# log-probs it drew with. All three agree. From now on we use the package's.

# %%
from rlcourse.logprobs import token_logprobs

with torch.no_grad():
    package, _ = token_logprobs(policy.model, rollout, config.sampling, chunk=4096)
print("largest gap by hand - package:", (by_hand - package).abs().max().item())
print("largest gap sampler - package:", (rollout.logprobs - package).abs().max().item())
assert torch.allclose(by_hand, package, atol=1e-4) and torch.allclose(rollout.logprobs, package, atol=1e-4)

# %% [markdown]
# ## 2 · One prompt, sixteen answers
#
# What the policy can do at a prompt shows in many samples of it. Sixteen answers to the problem above, each with the
# verdict of the verifier in its two readings.

# %%
torch.manual_seed(4)
prompt = policy.prompt(problem.question)
sixteen = engine.generate([prompt], 16, 80, config.sampling)
texts = policy.texts(sixteen.completion_ids, sixteen.completion_mask)
verdicts = [task.verify(text, problem.gold) for text in texts]
print(f"{problem.question}  (gold {problem.gold})\n\nstrict lenient")
for text, verdict in zip(texts, verdicts, strict=True):
    print(f"{verdict.strict:^6} {verdict.lenient:^7} {text.replace(chr(10), ' ⏎ ')}")
rewards = torch.tensor([float(v.strict) for v in verdicts])
print(f"\nmean reward, strict: {rewards.mean():.3f}")

# %% [markdown]
# ## 3 · A program as the reward
#
# We want answers that are right. For problems with one number as the answer, a short program can say whether they
# are. Is that allowed as a reward? It is a step function of text: no gradient flows through it. It turns out that
# none is needed. The estimator below asks for the **value** of the reward of what was sampled, and for nothing else.
# Any function of the finished answer will do: a program, a test suite, a person.
#
# A verifier has two advantages over a learned judge. It does not drift, and it cannot be talked into anything. But it
# pays for what it measures, not for what you meant. Two readings of the same text differ:
#
# - **strict**: the last line `#### NUMBER`, as GSM8K writes it;
# - **lenient**: failing that, "the answer is NUMBER", or the last number in the text.

# %%
TEXTS = [
    "3+4=7\n#### 7",
    "The answer is 7.",
    "3+4=7, so 7 apples",
    "#### 7 apples",
    "####7",
    "It is 5 or 6 or 7",
    "#### 6\nNo, wait.\n#### 7",
    "#### 7 or #### 8",
    "9+9=18\n#### 7",
]
lines = ["| completion (gold: 7) | strict | lenient |", "| --- | --- | --- |"]
for text in TEXTS:
    verdict = task.verify(text, "7")
    marks = ["✓" if ok else "✗" for ok in (verdict.strict, verdict.lenient)]
    lines.append(f"| `{text!r}` | {marks[0]} | {marks[1]} |")
display(Markdown("\n".join(lines)))

# %% [markdown]
# Three things to take from the table. "The answer is 7." is right and earns nothing under the strict reading, so a
# policy paid strictly will learn the format too. "It is 5 or 6 or 7" earns the lenient reward with luck: a loose
# reading can be played. And the last line is right by accident, with working that is nonsense: **both** readings pay
# for it. No reading of the final number sees the working.
#
# In `rlcourse` the readings and the amounts are settings. An answer that was cut off at the limit earns nothing,
# whatever it says: `12` may have been on its way to `125`.

# %%
from rlcourse.tasks.verify import reward

amounts = {"correct": 1.0, "format": 0.0, "neither": 0.0}
for text in ("3+4=7\n#### 7", "The answer is 7."):
    for parser in ("strict", "lenient"):
        earned = [reward(task.verify(text, "7"), finished, parser=parser, **amounts) for finished in (True, False)]
        print(f"{text!r:20} {parser:8} finished: {earned[0]}   cut off: {earned[1]}")

# %% [markdown]
# How far apart are the two readings for the model that ships? **Look for** the gap between the bars of a pair. It is
# the share that a strict score can gain by format alone. If you report one score, report the other beside it.

# %%
from rlcourse.evaluation import answer_problems, summarize

asked = task.problems("test")[: pick(24, 400)]
money = [p for p in asked if "dollars" in p.question]
other = [p for p in asked if "dollars" not in p.question]
fig, ax = plt.subplots(figsize=(6.5, 3))
for place, chosen in enumerate((asked, money, other)):
    summary = summarize(answer_problems(policy, engine, task, chosen, max_new_tokens=80))
    pair = (("accuracy", BLUE, "strict", ""), ("accuracy_lenient", ORANGE, "lenient", "//"))
    for side, (key, color, label, hatch) in enumerate(pair):
        style = {"color": color, "hatch": hatch, "edgecolor": "white", "label": label if place == 0 else None}
        bar = ax.bar(place + 0.38 * side - 0.19, 100 * summary[key], width=0.36, **style)
        ax.bar_label(bar, fmt="%.1f", padding=2, fontsize=9)
ax.set_xticks(range(3), [f"all {len(asked)}", f"about money ({len(money)})", f"other ({len(other)})"])
ax.set(ylabel="greedy, % right", title="The same greedy answers under two readings")
ax.margins(y=0.15)
ax.legend(frameon=False)
ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## 4 · The gradient of something nobody can differentiate
#
# The goal is the expected reward,
#
# $$J(\theta) = \mathbb{E}_{y \sim \pi_\theta}\big[R(y)\big] = \sum_y \pi_\theta(y)\, R(y) ,$$
#
# with the prompt $x$ left out of the notation. Only $\pi_\theta$ depends on $\theta$, so
# $\nabla J = \sum_y \nabla \pi_\theta(y)\, R(y)$. This is a sum over **all** texts, and we can only sample. The way out
# is one line, the *log-derivative trick*: since $\nabla \log \pi = \nabla \pi / \pi$,
#
# $$\nabla J = \sum_y \pi_\theta(y)\, R(y)\, \nabla \log \pi_\theta(y)
#            = \mathbb{E}_{y \sim \pi_\theta}\big[R(y)\, \nabla \log \pi_\theta(y)\big] .$$
#
# That is an expectation again, so a sample estimates it: draw $y$, look up its reward, and take
# $R(y)\, \nabla \log \pi_\theta(y)$. This is **REINFORCE** (Williams 1992). $R$ appears as a plain number. The vector
# $\nabla \log \pi_\theta(y)$ is called the *score* of $y$.
#
# ### A language small enough to write down
#
# To check the claim we need a case in which the sum over all texts can be done. Take three tokens, `a`, `b` and the
# end `■`, at most three of them, and a policy that sees the previous token only: a table of 3 × 3 logits. The
# verifier pays 1 for a finished text with exactly one `b`.

# %%
TOKENS, LIMIT = "ab■", 3


def all_texts(prefix: str = "") -> list[str]:
    """Every text that the policy can write."""
    if prefix.endswith("■") or len(prefix) == LIMIT:
        return [prefix]
    return [text for token in TOKENS for text in all_texts(prefix + token)]


def token_log_probs(text: str, table: torch.Tensor) -> torch.Tensor:
    """log pi of each token of a text: [length]. table: [3 previous (none, a, b), 3 tokens] logits."""
    previous = [0] + [1 + TOKENS.index(token) for token in text[:-1]]
    return table.log_softmax(-1)[previous, [TOKENS.index(token) for token in text]]


def probabilities(table: torch.Tensor) -> torch.Tensor:
    """pi of every text: [texts]."""
    return torch.stack([token_log_probs(y, table).sum() for y in Y]).exp()


Y = all_texts()
R = torch.tensor([float(y.endswith("■") and y.count("b") == 1) for y in Y])
table = torch.tensor([[0.5, -0.3, 0.1], [0.2, 0.0, -0.4], [-0.5, 0.3, 0.6]])
pi = probabilities(table)
print("  ".join(f"{y} {p:.3f}{'*' if r else ''}" for y, p, r in zip(Y, pi, R, strict=True)))
print(f"{len(Y)} texts, probabilities add up to {pi.sum():.6f}; * earns 1; expected reward J = {(pi * R).sum():.4f}")

# %% [markdown]
# Now the gradient of $J$ in the 9 logits, in two ways. First directly: let autograd differentiate the sum over all
# texts. Then by the trick: weigh each text's score by its probability and its reward.


# %%
def scores_of(table: torch.Tensor, end_counts: bool = True) -> torch.Tensor:
    """The score of every text, grad log pi(y): [texts, 9]. With end_counts False the token ■ is left out, wrongly."""
    leaf = table.clone().requires_grad_()
    kept = [torch.tensor([end_counts or token != "■" for token in y]) for y in Y]
    sums = [(token_log_probs(y, leaf) * keep).sum() for y, keep in zip(Y, kept, strict=True)]
    return torch.stack([torch.autograd.grad(log_pi, leaf)[0].flatten() for log_pi in sums])


leaf = table.clone().requires_grad_()
J = (probabilities(leaf) * R).sum()
exact = torch.autograd.grad(J, leaf)[0].flatten()
scores = scores_of(table)
trick = (pi[:, None] * R[:, None] * scores).sum(0)
print("direct", [round(v, 4) for v in exact.tolist()])
print("trick ", [round(v, 4) for v in trick.tolist()])
assert torch.allclose(exact, trick, atol=1e-6)

# %% [markdown]
# ### One sample at a time
#
# A single sample is a wild estimate. Most texts earn 0 and then the estimate is the zero vector; a lucky text gives its
# whole score. Below are single-sample estimates, then the mean of many.

# %%
torch.manual_seed(0)
draws = torch.multinomial(pi, 100_000, replacement=True)
estimates = R[draws, None] * scores[draws]  # [draws, 9]
for i in range(4):
    print(Y[draws[i]].ljust(4), [round(v, 2) for v in estimates[i].tolist()])
print("mean of 100,000:", [round(v, 3) for v in estimates.mean(0).tolist()])
print("exact:          ", [round(v, 3) for v in exact.tolist()])

# %% [markdown]
# *Unbiased* means: the mean over many draws has no error left but chance, and chance shrinks like $1/\sqrt{N}$.
# **Look for** a straight line with the slope of the dotted one. A biased estimator bends and levels off. The red one is
# biased: its mask leaves the end token out, a mistake that is easily made. It never learns when to stop.

# %%
N = [2**i for i in range(2, 17)]
fig, ax = plt.subplots(figsize=(6.5, 3.6))
curves = (("without the end token", scores_of(table, False), VERMILION), ("REINFORCE", scores, BLUE))
for label, vectors, color in curves:
    many = torch.multinomial(pi, 20 * N[-1], replacement=True).view(20, -1)
    errors = []
    for n in N:
        means = (R[many[:, :n], None] * vectors[many[:, :n]]).mean(1)  # [20, 9]
        errors.append((means - exact).norm(dim=1).mean().item())
    ax.loglog(N, errors, color=color, marker="o", markersize=4, label=label)
slope = [errors[0] * math.sqrt(N[0] / n) for n in N]
ax.loglog(N, slope, color=BLACK, linestyle=":", label="slope of $1/\\sqrt{N}$")
ax.set(xlabel="samples averaged, N", ylabel="distance to the exact gradient")
ax.set_title("Unbiased: the error is chance alone")
ax.legend(frameon=False)
ax.grid(alpha=0.25)
plt.show()

# %% [markdown]
# ## 5 · Baselines
#
# REINFORCE with rewards 0 and 1 learns from successes alone. With rewards 1 and 2 it pushes **every** sample up, the
# right ones just harder. The mean of the estimator does not care about that constant. Its spread does.
#
# Why the mean does not care: a score has expectation zero, because probabilities always add up to one:
#
# $$\mathbb{E}_{y}\big[\nabla \log \pi_\theta(y)\big] = \sum_y \nabla \pi_\theta(y) = \nabla \sum_y \pi_\theta(y)
#   = \nabla 1 = 0 .$$
#
# So any number $b$ that does not depend on the sample $y$ can be taken off the reward:
#
# $$\nabla J = \mathbb{E}_y\big[(R(y) - b)\, \nabla \log \pi_\theta(y)\big] .$$
#
# $b$ is called a **baseline**, and $A = R - b$ the **advantage**: how much better than expected. Checked on our 15
# texts, where the expectation is a sum: the mean stays, the variance moves.


# %%
def mean_and_variance(pi, scores, rewards, b: float) -> tuple[torch.Tensor, float]:
    """Mean [9] and total variance of the single-sample estimate (R - b) score, by enumeration."""
    estimate = (rewards - b)[:, None] * scores
    mean = (pi[:, None] * estimate).sum(0)
    return mean, (pi * (estimate - mean).square().sum(1)).sum().item()


for offset in (0.0, 1.0):
    for b in (0.0, (pi * (R + offset)).sum().item()):
        mean, variance = mean_and_variance(pi, scores, R + offset, b)
        print(f"rewards {offset:.0f} and {1 + offset:.0f}, b = {b:.3f}: variance {variance:.3f}", end=", ")
        print(f"mean off by {(mean - exact).abs().max().item():.0e}")
        assert torch.allclose(mean, exact, atol=1e-6)

# %% [markdown]
# The variance is a parabola in $b$. Its lowest point is a weighted mean of the rewards, with the squared length of the
# scores as weights (set the derivative by $b$ to zero):
#
# $$b^* = \mathbb{E}\big[\lVert\nabla\log\pi\rVert^2 R\big] \Big/ \mathbb{E}\big[\lVert\nabla\log\pi\rVert^2\big] .$$
#
# In practice one takes the plain mean reward, which needs no scores. Whether it is near $b^*$ has to be measured. Turn
# the sliders: *offset* is added to every reward, *training* is how far the policy has been trained (by exact gradient
# steps). **Look for** where $b = 0$, no baseline, lies on the curve.

# %%
trained = [table]
for step in range(81):  # gradient ascent on the exact J
    leaf = trained[-1].clone().requires_grad_()
    J = (probabilities(leaf) * R).sum()
    trained.append(trained[-1] + 1.0 * torch.autograd.grad(J, leaf)[0])
    if step % 20 == 0:
        print(f"after {step:2} exact gradient steps J = {J.item():.3f}")

# %%
from rlcourse.course.widgets import explorer


def draw(ax, offset: float, training: int) -> None:
    """Variance over baselines, and the three that have a name."""
    pi = probabilities(trained[training])
    scores, rewards = scores_of(trained[training]), R + offset
    weights = pi * scores.square().sum(1)
    named = {"none": 0.0, "mean reward": (pi * rewards).sum().item()}
    named["best"] = ((weights * rewards).sum() / weights.sum()).item()
    grid = torch.linspace(-2, 3, 101).tolist()
    ax.plot(grid, [mean_and_variance(pi, scores, rewards, b)[1] for b in grid], color=BLACK)
    styles = ((VERMILION, "s"), (BLUE, "o"), (GREEN, "^"))
    for (name, b), (color, marker) in zip(named.items(), styles, strict=True):
        variance = mean_and_variance(pi, scores, rewards, b)[1]
        ax.plot(b, variance, color=color, marker=marker, markersize=9, linestyle="", label=f"{name}: {variance:.3f}")
    ax.set(xlabel="baseline b", ylabel="variance", ylim=(0, None), xlim=(-2, 3))
    ax.set_title(f"offset {offset:g}, mean reward {named['mean reward']:.2f}", fontsize=11)
    ax.legend(frameon=False, fontsize=9)


static = [{"offset": 0.0, "training": 0}, {"offset": 1.0, "training": 0}, {"offset": 0.0, "training": 60}]
explorer(draw, static=static, offset=(0.0, -2.0, 2.0, 0.5), training=(0, 0, 80, 10))

# %% [markdown]
# With rewards 0 and 1 and few successes (left), "no baseline" sits close to the bottom already: 0 **is** close to the
# mean reward. Add 1 to every reward (middle), and it is far up the wall. This is why the effect of a baseline depends
# so much on how the reward happens to be scaled. And once nearly every text earns 1 (right), the mean reward is no
# better than no baseline: the few failures have the long scores, and pull $b^*$ away from the mean.
#
# The same as a histogram. Each entry is the estimate from a **batch of 16**, projected on the exact gradient and
# divided by its length: 1 is perfect, below 0 is a step in the wrong direction. The middle picture is rewards 1 and 2
# without a baseline; the right one the same rewards, each less the mean of the other fifteen. That baseline has a name,
# and section 7 comes to it.

# %%
torch.manual_seed(1)
batches = torch.multinomial(pi, 4000 * 16, replacement=True).view(4000, 16)
r = R[batches]
others = (r.sum(1, keepdim=True) - r) / 15  # mean reward of the other samples in the batch
ADVANTAGES = {
    "rewards 0 and 1, no baseline": (r, ORANGE),
    "rewards 1 and 2, no baseline": (r + 1, VERMILION),
    "rewards 1 and 2, less the others' mean": ((r + 1) - (others + 1), BLUE),
}
fig, axes = plt.subplots(1, 3, figsize=(12, 3), sharex=True, sharey=True, layout="constrained")
for ax, (name, (advantage, color)) in zip(axes, ADVANTAGES.items(), strict=True):
    gradients = (advantage[..., None] * scores[batches]).mean(1)  # [batches, 9]
    along = gradients @ exact / exact.square().sum()
    ax.hist(along.clamp(-4, 6).tolist(), bins=50, range=(-4, 6), color=color)
    ax.axvline(1, color=BLACK, linestyle="--", linewidth=1)
    ax.set(title=name, xlabel="estimate along the exact gradient")
    print(f"{name:40} mean {along.mean():.2f}, std {along.std():.2f}, wrong way {(along < 0).float().mean():.1%}")
axes[0].set_ylabel("batches of 16")
plt.show()

# %% [markdown]
# ## 6 · The same on the embedded model
#
# Now hundreds of thousands of parameters instead of 9, and no exact gradient to compare with. We do what can be done:
# draw many batches of 16 answers to **one** prompt, take each batch's gradient as training would, and look at the
# spread.
#
# As the direction to project on we take the mean gradient of separate batches, so that no batch is compared with
# itself. The three kinds of advantages see the same answers.


# %%
def gradients(rollout, advantages) -> list[torch.Tensor]:
    """The REINFORCE gradient of one batch for each [rows] of advantages: tensors [parameters]."""
    parameters = list(policy.model.parameters())
    logprobs, _ = token_logprobs(policy.model, rollout, config.sampling, chunk=4096)
    of_answers = logprobs.sum(1)  # masked tokens are 0: log pi of each answer
    found = []
    for advantage in advantages:
        goal = (advantage * of_answers).mean()
        pieces = torch.autograd.grad(goal, parameters, retain_graph=True)
        found.append(torch.cat([piece.flatten() for piece in pieces]))
    return found


[example] = gradients(sixteen, [rewards])
print(f"gradient of our sixteen answers: shape {list(example.shape)}, norm {example.norm():.2f}")

# %%
KINDS = ["rewards 0 and 1, no baseline", "rewards 1 and 2, no baseline", "less the others' mean"]


def batch_gradients() -> list[torch.Tensor]:
    """Sixteen new answers to the prompt, and their gradient by each kind of advantage."""
    batch = engine.generate([prompt], 16, 80, config.sampling)
    answers = policy.texts(batch.completion_ids, batch.completion_mask)
    done = batch.finished.tolist()
    r = [float(ok and task.verify(text, problem.gold).strict) for text, ok in zip(answers, done, strict=True)]
    r = torch.tensor(r)
    others = (r.sum() - r) / 15
    return gradients(batch, [r, r + 1, r - others])


torch.manual_seed(0)
direction = sum(batch_gradients()[2] for _ in range(pick(3, 60)))
direction /= direction.norm()
print(f"direction from {pick(3, 60)} batches")

# %%
along, squares, sums = {k: [] for k in KINDS}, dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0)
count = pick(8, 150)
for _ in range(count):
    for kind, gradient in zip(KINDS, batch_gradients(), strict=True):
        along[kind].append((gradient @ direction).item())
        squares[kind] += gradient.square().sum().item() / count
        sums[kind] = sums[kind] + gradient / count
variances = {kind: (squares[kind] - sums[kind].square().sum().item()) * count / (count - 1) for kind in KINDS}
for kind in KINDS:
    values = torch.tensor(along[kind])
    standard_error = values.std() / math.sqrt(count)
    print(
        f"{kind:30} along the direction: mean {values.mean():.2f} ± {standard_error:.2f}, std {values.std():.2f}",
        end="; ",
    )
    print(f"variance in all directions {variances[kind] / variances[KINDS[0]]:.2f} of the first")

# %%
fig, axes = plt.subplots(1, 3, figsize=(12, 3), sharex=True, sharey=True, layout="constrained")
everything = [v for values in along.values() for v in values]
limits = (min(everything), max(everything))
for ax, kind, color in zip(axes, KINDS, (ORANGE, VERMILION, BLUE), strict=True):
    ax.hist(along[kind], bins=30, range=limits, color=color)
    ax.axvline(sum(along[kind]) / count, color=BLACK, linestyle="--", linewidth=1)
    ax.set(title=kind, xlabel="gradient along the mean direction")
axes[0].set_ylabel(f"of {count} batches of 16")
plt.show()

# %% [markdown]
# The dashed lines, the means, agree within about two standard errors: no kind is biased. The shift by 1 costs dearly,
# in the spread along the direction and in all directions together. Between the first and the third the numbers say
# two things at once. **Along** the useful direction the baseline takes noise away. In **all directions together** it
# adds some. So the mean reward is a poor choice of $b$ here? $b^*$ can tell. It needs the length of each answer's
# score.

# %%
torch.manual_seed(2)
pool = engine.generate([prompt], pick(24, 256), 80, config.sampling)
answers = policy.texts(pool.completion_ids, pool.completion_mask)
done = pool.finished.tolist()
r = torch.tensor([float(ok and task.verify(a, problem.gold).strict) for a, ok in zip(answers, done, strict=True)])
squared = []
for row in range(len(r)):
    [score] = gradients(pool[[row]], [torch.ones(1)])
    squared.append(score.square().sum().item())
squared = torch.tensor(squared)
print(f"{len(r)} answers, mean reward {r.mean():.2f}")
print(f"mean squared score of the right answers {squared[r == 1].mean():8,.0f}")
print(f"                  of the wrong answers {squared[r == 0].mean():8,.0f}")
print(f"best baseline {(squared * r).sum() / squared.sum():.2f}")

# %%
grid = torch.linspace(-0.5, 1, 61)
second_moment = torch.stack([((r - b).square() * squared).mean() for b in grid])
fig, ax = plt.subplots(figsize=(6, 3.2))
ax.plot(grid, second_moment / second_moment.min(), color=BLACK)
named = {"none": 0.0, "mean reward": r.mean().item(), "best": ((squared * r).sum() / squared.sum()).item()}
for (name, b), (color, marker) in zip(named.items(), ((VERMILION, "s"), (BLUE, "o"), (GREEN, "^")), strict=True):
    height = ((r - b).square() * squared).mean() / second_moment.min()
    ax.plot(b, height, color=color, marker=marker, markersize=9, linestyle="", label=f"{name}: b = {b:.2f}")
ax.set(xlabel="baseline b", ylabel="mean squared length\n(lowest = 1)", title="One answer's estimate, embedded model")
ax.set_ylim(0, 1.1 * max(1.0, (second_moment[0] / second_moment.min()).item()))
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# The best constant is close to 0, not to the mean reward. The reason is in the printed lengths: wrong answers are
# often wanderings of improbable tokens, and improbable tokens have long scores. With rewards 0 and 1 and no baseline
# they are multiplied by exactly 0. Any other $b$ lets them in. So "subtract the mean, it reduces the variance" is a
# rule of thumb, not a theorem. What always helps is that the baseline moves **with** the rewards when these are
# shifted.
#
# ## 7 · Where the baseline comes from
#
# The expected reward of a prompt is not known. Three usual substitutes:
#
# 1. the **mean reward of the batch**. Simple, but hard prompts and easy ones share it;
# 2. a **value head** that learns to predict it: PPO, lesson 02;
# 3. the **other answers to the same prompt**. They are there anyway. This is RLOO, for *REINFORCE leave-one-out*
#    (Kool et al. 2019; Ahmadian et al. 2024): with $n$ answers to a prompt,
#
# $$A_i = R_i - \frac{1}{n-1} \sum_{j \ne i} R_j .$$
#
# Why leave one's own reward out? Because a baseline must not depend on the sample it is taken from. If it contains
# $R_i$, a success pays part of its own price. With the mean of all $n$ the gradient becomes $(1 - 1/n)\, \nabla J$:
# the right direction, too short. On the toy we can go through **all** groups of two and of three texts.

# %%
for n in (2, 3):
    groups = torch.tensor(list(itertools.product(range(len(Y)), repeat=n)))  # [15^n, n]
    weight = pi[groups].prod(1)
    r = R[groups]
    kinds = {"own reward in": r - r.mean(1, keepdim=True), "left out": r - (r.sum(1, keepdim=True) - r) / (n - 1)}
    for name, advantage in kinds.items():
        mean = (weight[:, None] * (advantage[..., None] * scores[groups]).mean(1)).sum(0)
        ratio = (mean @ exact / exact.square().sum()).item()
        print(f"n = {n}, {len(groups)} groups, {name:14} mean = {ratio:.4f} x the exact gradient", end=", ")
        print(f"farthest from it {(mean - ratio * exact).abs().max().item():.0e}")

# %% [markdown]
# One half, two thirds, and one, one. A factor that is the same for all prompts is no harm: an optimizer such as Adam
# divides by the size of the gradient anyway. So the two are the same up to a constant,
# $A^{\text{RLOO}}_i = \frac{n}{n-1}\,(R_i - \bar R)$, which is also how the package computes it.

# %%
from rlcourse.advantages import batch_centered, group_centered, leave_one_out

r = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0])  # two prompts, four answers each, prompt after prompt
by_hand = torch.stack([r[i] - (r[i // 4 * 4 : i // 4 * 4 + 4].sum() - r[i]) / 3 for i in range(8)])
print("rewards        ", r.tolist())
print("leave one out  ", [round(v, 3) for v in leave_one_out(r, 4).tolist()])
print("less batch mean", [round(v, 3) for v in batch_centered(r).tolist()])
assert torch.allclose(by_hand, leave_one_out(r, 4)) and torch.allclose(by_hand, group_centered(r, 4) * 4 / 3)
assert torch.equal(leave_one_out(r + 1, 4), leave_one_out(r, 4))
print("a constant added to every reward changes nothing:", torch.equal(leave_one_out(r + 1, 4), leave_one_out(r, 4)))

# %% [markdown]
# ## 8 · As a loss
#
# Optimizers minimise, and autograd wants a scalar. So we write down a number whose gradient is minus the estimate:
#
# $$\mathcal{L}(\theta) = -\frac{1}{N} \sum_{i=1}^{N} A_i \sum_{t} m_{i,t}\, \log \pi_\theta(y_{i,t} \mid s_{i,t}) ,$$
#
# with the mask $m$ and the advantages $A_i$ as constants. Its **value** means little: it need not fall while the policy
# gets better. Only its gradient counts. `rlcourse` splits it into two functions: the loss of each token, and the
# aggregation to a number. Its aggregation `constant` divides by $N$ and by the token limit as well, a constant.

# %%
from rlcourse.losses import aggregate, token_loss

mask = sixteen.completion_mask
advantage = leave_one_out(rewards, 16)
logprobs, _ = token_logprobs(policy.model, sixteen, config.sampling, chunk=4096)
ours = -(advantage[:, None] * logprobs * mask).sum() / 16
switches = {"surrogate": "reinforce", "ratio": "token", "clip_low": 0.2, "clip_high": 0.2}
per_token, _ = token_loss(logprobs, sixteen.logprobs, advantage, mask, **switches)
theirs = aggregate(per_token, mask, "constant", rows=16, tokens=int(mask.sum()), max_new_tokens=80)
print(f"by hand {ours.item():.5f}   package x 80 {80 * theirs.item():.5f}")
assert torch.allclose(ours, 80 * theirs, atol=1e-4)
parameters = list(policy.model.parameters())
[a, b] = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in (ours, theirs)]
gap = max((x - 80 * y).abs().max().item() for x, y in zip(a, b, strict=True))
print(f"largest difference of their gradients: {gap:.1e}")

# %% [markdown]
# ## 9 · A short training run
#
# All the pieces stand: sample, verify, compare, lose, step. The trainer of the package strings them together. Here is
# RLOO on few prompts a step, live. It is **one** run: it shows that the thing learns, not how well.

# %%
from rlcourse.runs import read_lines
from rlcourse.trainer import train

folder = tempfile.mkdtemp()
few = {"num_prompts": 4, "num_generations": 8, "steps": pick(4, 40), "eval_every": pick(2, 5)}
least = {"eval_validation": pick(20, 200), "eval_problems": 1, "pass_k": 0}  # the curve is enough here
result = train(make_config(algorithm="rloo", output=folder, **few, **least))
metrics = read_lines(Path(result["folder"]) / "metrics.jsonl")
evals = read_lines(Path(result["folder"]) / "evals.jsonl")
print(f"{result['steps']} steps of 4 x 8 answers in {result['wall_seconds']:.0f} s", end="; ")
print("validation", " → ".join(f"{e['accuracy']:.1%}" for e in (evals[0], evals[-1])))

# %%
fig, ax = plt.subplots(figsize=(7, 3.4))
ax.plot([m["step"] for m in metrics], [100 * m["accuracy"] for m in metrics], color=SKY, label="samples of the step")
both = [(e["step"], 100 * e[key]) for key in ("accuracy", "accuracy_lenient") for e in evals]
ax.plot(*zip(*both[: len(evals)], strict=True), color=BLUE, marker="o", label="validation, greedy, strict")
ax.plot(*zip(*both[len(evals) :], strict=True), color=ORANGE, linestyle="--", marker="s", label="the same, lenient")
ax.set(xlabel="training step", ylabel="% right", ylim=(0, 100), title="RLOO, one run")
ax.legend(frameon=False)
ax.grid(alpha=0.25)
ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# The two readings rise together: here the gain is mathematics and choice, hardly format.
#
# ## 10 · When the baseline matters, and when it does not
#
# The same small setting, now recorded with five seeds for each line. Left: REINFORCE without a baseline, with rewards
# (wrong, right) of (0, 1), then (1, 2), then (−1, 0). All three have the same expected gradient. Right: the rewards
# (1, 2) again, with a baseline. **Look for** the gap between bands.

# %%
from rlcourse.course.lessons.curve_records import load_curve
from rlcourse.course.lessons.lesson01 import VARIANTS
from rlcourse.measure.plots import seed_band

curves = {name: load_curve(f"lesson01_{name}") for name in VARIANTS}
PLAIN, PLUS, MINUS = "reinforce", "reinforce_plus", "reinforce_minus"
MEAN, RLOO = "baseline_plus", "rloo_plus"


def band(ax, seeds, label: str, color: str, linestyle="-", marker="o") -> None:
    """Mean over seeds, and a band from the worst to the best."""
    steps, low, mean, high = seed_band(seeds)
    ax.fill_between(steps, [100 * v for v in low], [100 * v for v in high], color=color, alpha=0.18, linewidth=0)
    ax.plot(steps, [100 * v for v in mean], color=color, linestyle=linestyle, marker=marker, markersize=4, label=label)


for name, record in curves.items():
    print(f"{name:16} {len(record['results'])} seeds, recorded on {record['device']}, {record['date']}")

# %%
fig, axes = plt.subplots(1, 2, figsize=(11, 3.8), sharey=True)
band(axes[0], curves[PLAIN]["results"], "rewards 0, 1", ORANGE)
band(axes[0], curves[PLUS]["results"], "rewards 1, 2", VERMILION, "--", "s")
band(axes[0], curves[MINUS]["results"], "rewards −1, 0", PURPLE, "-.", "^")
band(axes[1], curves[MEAN]["results"], "rewards 1, 2, batch mean off", GREEN, "--", "s")
band(axes[1], curves[RLOO]["results"], "rewards 1, 2, RLOO", BLUE)
for ax, title in zip(axes, ("REINFORCE, no baseline", "with a baseline"), strict=True):
    ax.set(title=title, xlabel="training step", ylim=(0, 100))
    ax.legend(frameon=False, loc="lower right")
    ax.grid(alpha=0.25)
axes[0].set_ylabel("greedy, % right")
plt.show()
print(f"4 prompts x 8 answers a step, band from worst to best; recorded on {record['device']},", end=" ")
print(f"{max(c['date'] for c in curves.values())}, with `python -m rlcourse.course.lessons.lesson01`")

# %%
final = {name: [seed["evals"][-1]["accuracy"] for seed in curve["results"]] for name, curve in curves.items()}
for name, values in final.items():
    print(f"{name:16} after {record['setup']['steps']} steps: {min(values):.1%} to {max(values):.1%}")
assert max(final[PLUS] + final[MINUS]) < min(final[PLAIN] + final[MEAN] + final[RLOO])  # the bands do not touch

# %% [markdown]
# A constant that changes nothing in expectation costs REINFORCE a large part of its progress, whichever its sign. A
# baseline gives it back: both lines on the right do what rewards 0 and 1 did without one. Note what is **not** there,
# too. On the right, batch mean and RLOO cannot be told apart, and neither beats plain REINFORCE with rewards 0 and 1.
#
# And at the default setting, 16 prompts × 8 answers with rewards 0 and 1? **Look for** a difference.

# %%
fig, ax = plt.subplots(figsize=(7, 3.6))
finals = {}
for name in ("reinforce", "reinforce_baseline", "rloo"):
    default = load_curve(name)["results"]
    band(ax, default, LABELS.get(name, name.upper()), *STYLES[name])
    finals[name] = [seed["summary"]["accuracy_after"] for seed in default]
ax.set(xlabel="training step", ylabel="greedy, % right", ylim=(0, 100), title="The default setting, rewards 0 and 1")
ax.legend(frameon=False, loc="lower right")
ax.grid(alpha=0.25)
plt.show()
for name, values in finals.items():
    print(f"{name:20} {len(values)} seeds, test accuracy {min(values):.1%} to {max(values):.1%}")
overlap = max(min(values) for values in finals.values()) <= min(max(values) for values in finals.values())
print("do the ranges overlap?", overlap)

# %% [markdown]
# There is none to be seen. With rewards 0 and 1, **REINFORCE without a baseline does as well here as RLOO**. Section
# 6 said why that is no surprise: a wrong answer counts 0, so its long score does no harm. Take two things along. A
# baseline protects you from the accident of how rewards are scaled, and it costs nothing. And an algorithm that wins
# on one setting may win nothing on another: ask for the setting, the seeds and the spread.
#
# ## Check yourself
#
# 1. Which token of the answer `#### 7■` gets the reward, if the reward comes at the end?
#
# <details><summary>Answer</summary>
# All of them, the end token too. The return of every step is the same R, and the loss multiplies each token's log-prob
# by the same advantage. REINFORCE does not know which token deserved it; averaging over many answers sorts that out.
# </details>
#
# 2. The reward is 1 for every one of your sixteen answers. What is the gradient without a baseline, and with RLOO?
#
# <details><summary>Answer</summary>
# Without: the mean score of the sixteen, not zero, although there is nothing to learn. Its expectation is zero, so it
# is noise. With RLOO: exactly zero.
# </details>
#
# 3. May a baseline depend on the prompt? On the length of the answer?
#
# <details><summary>Answer</summary>
# On the prompt: yes, it is known before anything is sampled. On the length of the answer: no. The length is part of the
# sample, the proof with the sum of probabilities breaks, and the gradient is biased.
# </details>
#
# 4. Your loss went up during training. Is something broken?
#
# <details><summary>Answer</summary>
# Not by that alone. The value of the policy-gradient loss is no measure of progress; look at reward and accuracy.
# </details>
#
# 5. Strict accuracy rose from 2 % to 48 % and lenient accuracy from 38 % to 55 %. What did the training mostly teach?
#
# <details><summary>Answer</summary>
# The format. The gap between the readings shrank from 36 points to 7, which is 29 of the 46 points that the strict
# score gained. (The numbers are made up for this question.)
# </details>
#
# ## Exercises
#
# [exercises/01_policy_gradient.ipynb](../exercises/01_policy_gradient.ipynb): the log-prob of an answer, the loss, the
# mean and variance of the estimator under a baseline, and leave-one-out. Then go on to [02 · PPO](02_ppo.ipynb).
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
