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
# - what a critic is: a second head that predicts, token by token, how well an answer will end;
# - generalised advantage estimation, as a recursion and as a matrix, and what $\lambda$ trades for what;
# - why a rollout can serve several steps, and how the clip keeps that from going wrong;
# - three estimators of a KL divergence, whose values and whose gradients are two different stories;
# - which of PPO's safeguards matter at this scale, from runs in which one of them is missing.
#
# You need [lesson 01](01_policy_gradient.ipynb): the score, the baseline, the advantage, the mask.

# %%
import copy
import itertools
import math
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

from rlcourse.config import make_config
from rlcourse.course import pick
from rlcourse.evaluation import load_all
from rlcourse.measure.plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION

plt.rcParams["figure.dpi"] = 72  # many figures in a small file
config = make_config("laptop", algorithm="ppo")
policy, engine, task = load_all(config)
print(f"advantage: {config.advantage}, surrogate: {config.surrogate}, clip: {config.clip_low} and {config.clip_high}")

# %% [markdown]
# ## 1 · Where we stand
#
# Lesson 01 left you with a loop. These are the lines of it that change here:
#
# ```python
# weights = weigh(rewards)                                     # 01: one number for an answer
# loss = -(weights * log_pi).sum() / (len(rewards) * LIMIT)    # 01: one step on a rollout
#
# advantages = gae(token_rewards, values)                      # 02: one number for a token, from a learned critic
# for _ in range(updates):                                     # 02: several steps on a rollout
#     ratio = (log_probs(policy.model, rollout) - old).exp()   # 02: the policy moves away from the one that sampled
#     loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages).sum() / tokens
# ```
#
# REINFORCE with a baseline gives every token of an answer the same advantage $A = R - b$. And each rollout serves a
# single step: after it the samples come from an old policy, and the estimator no longer holds. **PPO**, *proximal
# policy optimisation* (Schulman et al. 2017), changes both: a learned baseline **for each token**, and **several
# steps** on each rollout, with a clip that says how far they may go.
#
# ## 2 · A critic: the value head
#
# The natural baseline for token $t$ is the reward to be expected from there on, given the prompt and the tokens before
# $t$. That is the **value** of the state $s_t = (x, y_{<t})$:
#
# $$V(s_t) = \mathbb{E}\big[R \mid s_t\big] .$$
#
# Nobody knows it, so it is learned. The model already has a summary of $s_t$: its last hidden state $h_t$, from which
# the next token is predicted. One linear layer on top, $V(s_t) = w^\top h_t + c$, and we have a **critic**.
#
# What it learns from: answers and their rewards. The reward comes once, at the end, so as *token rewards* $r_t$ it
# stands on the last real token. With rewards 0 and 1, $V(s_t)$ is the probability that this answer ends well.

# %%
from rlcourse.advantages import token_rewards

mask = torch.tensor([[True, True, True, True], [True, True, False, False], [True, False, False, False]])
print(token_rewards(torch.tensor([1.0, 0.0, 1.0]), mask))

# %% [markdown]
# Now frozen rollouts: the policy stays as it is, and only the head learns. Some prompts are kept apart, to see whether
# it has learned anything that carries over to problems it has not seen.

# %%
from rlcourse.collect import collect
from rlcourse.logprobs import hidden_states, token_logprobs
from rlcourse.tasks.prompts import PromptSampler

torch.manual_seed(0)
order = PromptSampler(task.problems("train"), seed=0)
seen, unseen = [], []
for kept, batches in ((seen, pick(2, 10)), (unseen, pick(1, 5))):
    for _ in range(batches):
        batch, _ = collect(policy, engine, task, order, config)  # 16 prompts x 8 answers
        with torch.no_grad():
            hidden = hidden_states(policy.model, batch.rollout)
        kept.append((batch, hidden))
print(f"to learn from: {128 * len(seen)} answers, kept apart: {128 * len(unseen)}; hidden states {list(hidden.shape)}")

# %% [markdown]
# The target of $V(s_t)$ is what came of it: the sum of the token rewards from $t$ on, which is $R$ at every token of
# the answer. Least squares on these targets gives their conditional mean, and that is what a value is.
#
# The package's `ValueHead` has one hidden layer with a tanh in between, and its output starts at 0. We fit both.
# **Look for** how far each falls on the prompts it has not seen.

# %%
from rlcourse.policy import ValueHead


def tokens_of(pairs) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [tokens, d] and the reward that came of each [tokens], of all real tokens."""
    masks = [batch.rollout.completion_mask for batch, _ in pairs]
    h = torch.cat([hidden[m] for (_, hidden), m in zip(pairs, masks, strict=True)])
    return h, torch.cat([b.rewards[:, None].expand_as(m)[m] for (b, _), m in zip(pairs, masks, strict=True)])


class Linear(nn.Linear):
    """hidden [..., d] → values [...]."""

    def forward(self, hidden):
        return super().forward(hidden).squeeze(-1)


(h, target), (h_unseen, target_unseen) = tokens_of(seen), tokens_of(unseen)
constant = (target.mean() - target_unseen).square().mean().item()
print(f"{len(h):,} tokens to learn from; always saying {target.mean():.2f}: squared error {constant:.3f} on the unseen")

# %%
heads = {"linear": Linear(h.shape[1], 1), "one hidden layer": ValueHead(h.shape[1])}
fig, ax = plt.subplots(figsize=(6.5, 3.2))
for (name, head), color, style in zip(heads.items(), (ORANGE, BLUE), ("--", "-"), strict=True):
    optimizer, curve = torch.optim.AdamW(head.parameters(), lr=3e-3, weight_decay=0.0), []
    for step in range(pick(60, 400)):
        if step % 10 == 0:
            with torch.no_grad():
                curve.append((step, (head(h_unseen) - target_unseen).square().mean().item()))
        rows = torch.randint(len(h), (2048,))
        loss = (head(h[rows]) - target[rows]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ax.plot(*zip(*curve, strict=True), color=color, linestyle=style, label=f"{name}: {curve[-1][1]:.3f}")
ax.axhline(constant, color=BLACK, linestyle=":", label=f"a constant: {constant:.3f}")
ax.set(xlabel="step", ylabel="squared error", title="Learning a value, on prompts that were kept apart", ylim=(0, 0.2))
ax.legend(frameon=False)
ax.spines[["top", "right"]].set_visible(False)
plt.show()
left = {name: (head(h_unseen) - target_unseen).square().mean().item() for name, head in heads.items()}
print("explained of the variance:", ", ".join(f"{name} {1 - error / constant:.1%}" for name, error in left.items()))

# %% [markdown]
# That is little: on a frozen model the critic explains only a small part of what becomes of an answer. Some of it
# nobody could know: early in an answer it is still open how it ends. So the better question is **when** the critic
# knows anything. **Look for** where right and wrong answers part.

# %%
head = heads["one hidden layer"]
fig, ax = plt.subplots(figsize=(6.5, 3.4))
parts = {True: [[] for _ in range(10)], False: [[] for _ in range(10)]}
for batch, hidden in unseen:
    with torch.no_grad():
        values = head(hidden)
    for row, length in enumerate(batch.rollout.completion_lengths.tolist()):
        for t in range(length):
            parts[batch.rewards[row].item() == 1][10 * t // length].append(values[row, t].item())
for right, color, marker in ((True, BLUE, "o"), (False, VERMILION, "s")):
    quartiles = torch.stack([torch.tensor(p).quantile(torch.tensor([0.25, 0.5, 0.75])) for p in parts[right]])
    places = [10 * i + 5 for i in range(10)]
    ax.fill_between(places, quartiles[:, 0], quartiles[:, 2], color=color, alpha=0.18, linewidth=0)
    ax.plot(places, quartiles[:, 1], color=color, marker=marker, label=f"{'right' if right else 'wrong'} in the end")
ax.set(xlabel="place in the answer, %", ylabel="V(s)", title="Values along unseen answers: median and quartiles")
ax.set_ylim(-0.1, 0.8)
ax.legend(frameon=False)
ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# And single answers. One problem from the unseen ones that was answered both rightly and wrongly, with $V$ before each
# token.


# %%
def along(batch, hidden, row: int) -> tuple[list[str], torch.Tensor]:
    """The tokens of an answer, and the value before each: [length]."""
    keep = batch.rollout.completion_mask[row]
    with torch.no_grad():
        values = head(hidden[row])[keep]
    return [policy.tokenizer.decode([token]) for token in batch.rollout.completion_ids[row][keep]], values


def longest(batch, group: int, ok: int) -> tuple[int, int]:
    """Length and row of the longest right or wrong answer of a group, up to 45 tokens; (0, 0) if there is none."""
    rows = range(8 * group, 8 * group + 8)
    lengths = [(batch.rollout.completion_lengths[i].item(), i) for i in rows if batch.rewards[i] == ok]
    return max((pair for pair in lengths if pair[0] <= 45), default=(0, 0))


places = [(b, group) for b in range(len(unseen)) for group in range(16)]
b, group = max(places, key=lambda p: min(longest(unseen[p[0]][0], p[1], ok)[0] for ok in (0, 1)))
batch, hidden = unseen[b]
rows = {ok: longest(batch, group, ok)[1] for ok in (1, 0)}
problem = batch.answers[8 * group].problem
print(problem.question, f"(gold {problem.gold})")

# %%
fig, axes = plt.subplots(2, 1, figsize=(9, 5), sharey=True, layout="constrained")
for ax, (ok, row), color in zip(axes, rows.items(), (BLUE, VERMILION), strict=True):
    words, values = along(batch, hidden, row)
    ax.plot(range(len(words)), values, color=color, marker="o" if ok else "s", markersize=4)
    ax.set_xticks(range(len(words)), [repr(word)[1:-1] for word in words], rotation=60, ha="right", fontsize=8)
    ax.set(ylabel="V before the token", ylim=(-0.15, 0.8), title=f"A {'right' if ok else 'wrong'} answer")
    ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# In the first picture the curves are apart from the beginning: some problems are easier than others, and some answers
# begin with a guess. They part a little further towards the end. The single answers show how little that is. The value
# goes up and down in both in the same rhythm, up where a line is done, down in the middle of a sum, and the tokens that
# make the wrong answer wrong hardly move it. What this critic has found out is the *manner* of an answer. It cannot
# check a sum. Keep that in mind: **a critic is a learned guess**, and what follows is about living with one that is
# often wrong.
#
# In PPO, the value loss and the policy loss go through the same network at the same time, so the hidden states learn to
# serve the critic too. That is one more reason why PPO has more parts to tune than REINFORCE.
#
# ## 3 · From values to advantages
#
# ### The TD error
#
# Before token $t$ the critic expected $V_t$ (short for $V(s_t)$). After it, the answer has earned $r_t$ and expects
# $V_{t+1}$. The difference is what this one token changed, the *temporal-difference error*:
#
# $$\delta_t = r_t + \gamma V_{t+1} - V_t .$$
#
# $V$ after the last token is 0: the answer has ended, nothing is to come. $\gamma \le 1$ is the *discount*: it makes
# late rewards count less. For answers that end it is usually 1.
#
# $\delta_t$ trusts the critic with the whole future. The other extreme trusts it with nothing and waits:
# $R - V_t$. **GAE**, *generalised advantage estimation* (Schulman et al. 2015), goes between them with a second number
# $\lambda$:
#
# $$A_t = \delta_t + \gamma\lambda\, A_{t+1} = \sum_{k \ge t} (\gamma\lambda)^{k-t}\, \delta_k .$$
#
# An answer of five tokens, by hand, from the end backwards.

# %%
gamma, lam = 1.0, 0.8
r = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0])
V = torch.tensor([0.4, 0.5, 0.3, 0.6, 0.8])
delta, A = torch.zeros(5), torch.zeros(5)
next_value, next_advantage = 0.0, 0.0
for t in reversed(range(5)):
    delta[t] = r[t] + gamma * next_value - V[t]
    A[t] = delta[t] + gamma * lam * next_advantage
    next_value, next_advantage = V[t], A[t]
    print(f"t = {t}: r {r[t]:.0f}  V {V[t]:.1f}  delta {delta[t]:+.2f}  A {A[t]:+.4f}")

# %% [markdown]
# The third row printed is the token after which the value rose from 0.3 to 0.6. It gets the most credit. The token
# before it made things worse ($\delta = -0.2$), and yet its advantage is positive: it shares in what came later.
#
# The sum says the same without a loop: a matrix with the powers of $\gamma\lambda$ in its upper triangle, times
# $\delta$.

# %%
gap = torch.arange(5)[None, :] - torch.arange(5)[:, None]  # k - t
matrix = torch.where(gap >= 0, (gamma * lam) ** gap.clamp(min=0), 0.0)
print(matrix, matrix @ delta, sep="\n")
assert torch.allclose(matrix @ delta, A)

# %% [markdown]
# `rlcourse.advantages.gae` is the recursion for a batch with padding. A batch of three: our answer with two places of
# padding in which nonsense stands, an answer of one token, and an empty one. **Look for** the zeros.

# %%
from rlcourse.advantages import gae

lengths = torch.tensor([5, 1, 0])
mask = torch.arange(7) < lengths[:, None]
values, rewards = torch.full((3, 7), 9.9), torch.full((3, 7), 9.9)
values[0, :5], rewards[0, :5] = V, r
values[1, 0], rewards[1, 0] = 0.7, 1.0
advantages, returns = gae(rewards, values, mask, gamma, lam)
print(advantages)
assert torch.allclose(advantages[0, :5], A) and torch.isclose(advantages[1, 0], torch.tensor(0.3))
assert not advantages[~mask].any()

# %% [markdown]
# The two ends of the range, checked: $\lambda = 1$ is the return less the value, and $\lambda = 0$ is the TD error. The
# second result, `returns`, is $A_t + V_t$: the target of the value loss. With $\lambda = 1$ it is the reward itself, as
# in our fit above.

# %%
one, zero = gae(rewards, values, mask, 1.0, 1.0), gae(rewards, values, mask, 1.0, 0.0)
for name, found, expected in (("lambda 1", one, 1 - V), ("lambda 0", zero, delta)):
    print(name, [round(v, 3) for v in found[0][0, :5].tolist()], "expected", [round(v, 3) for v in expected.tolist()])
print("returns at lambda 1:", one[1][0].tolist())
assert torch.allclose(one[0][0, :5], 1 - V) and torch.allclose(zero[0][0, :5], delta)

# %% [markdown]
# ### What λ trades
#
# To see bias and variance we need a case in which the truth is known. Eight tokens, each good or bad with probability
# one half, and the answer is right if at least five are good. That is $2^8 = 256$ answers, few enough to go through
# them all. The true value of a state follows from the end backwards, and so does the true advantage of each token.

# %%
T, NEED = 8, 5
good = torch.tensor(list(itertools.product([0.0, 1.0], repeat=T)))  # [256, 8]
count = torch.cat([torch.zeros(256, 1), good.cumsum(1)], dim=1).long()  # good tokens before t: [256, 9]
R = (count[:, T] >= NEED).float()
true = [(torch.arange(T + 2) >= NEED).float()]  # V by number of good tokens, at the end
for _ in range(T):
    after = true[0]
    true.insert(0, 0.5 * (after + torch.cat([after[1:], after[-1:]])))
true_V = torch.stack([true[t][count[:, t]] for t in range(T + 1)], dim=1)  # [256, 9]
true_A = true_V[:, 1:] - true_V[:, :-1]
print("the value before the first token:", true_V[0, 0].item(), "= share of right answers:", R.mean().item())

# %% [markdown]
# Three critics: the true one; one that has learned half of it, and says half the truth and half the mean; and one that
# has learned nothing and says the mean everywhere. For each $\lambda$ we take GAE on all 256 answers. How estimates
# for the same state and token scatter around their mean is **variance**. How far that mean is off is **bias**, with one
# exception: what is off by the same amount for both tokens of a state is a baseline, which cannot bias a gradient
# (lesson 01), so it is taken off first. **Look for** which $\lambda$ has the lowest sum, critic by critic.

# %%
key = (torch.arange(T) * (T + 1) + count[:, :T]) * 2 + good.long()  # one number for each place, state and token
everything = torch.ones(256, T, dtype=torch.bool)
share = {"true": 1.0, "half learned": 0.5, "constant": 0.0}


def bias_and_variance(learned: float, lam: float) -> tuple[float, float]:
    """Mean squared bias, and mean variance, of GAE with a critic that has learned so much of the truth."""
    V = learned * true_V[:, :T] + (1 - learned) * R.mean()
    estimate, _ = gae(token_rewards(R, everything), V, everything, 1.0, lam)
    size = torch.bincount(key.flatten(), minlength=2 * T * (T + 1)).clamp(min=1)
    total = torch.bincount(key.flatten(), estimate.flatten(), minlength=len(size))
    mean = (total / size).view(-1, 2)  # [states, bad or good]
    centered = (mean - mean.mean(1, keepdim=True)).flatten()[key]  # the two tokens are equally probable
    return (centered - true_A).square().mean().item(), (estimate - mean.flatten()[key]).square().mean().item()


for name, learned in share.items():
    for lam in (0.0, 1.0):
        bias, variance = bias_and_variance(learned, lam)
        print(f"{name:13} lambda {lam:.0f}: bias^2 {bias:.4f}  variance {variance:.4f}")

# %%
fig, axes = plt.subplots(1, 3, figsize=(12, 3.2), sharey=True, layout="constrained")
grid = torch.linspace(0, 1, 41).tolist()
for ax, (name, learned) in zip(axes, share.items(), strict=True):
    bias, variance = zip(*[bias_and_variance(learned, lam) for lam in grid], strict=True)
    ax.plot(grid, bias, color=VERMILION, linestyle="--", label="bias²")
    ax.plot(grid, variance, color=BLUE, linestyle="-.", label="variance of one answer")
    for n, color, marker in ((1, BLACK, "o"), (64, GREEN, "s")):
        total = [b + v / n for b, v in zip(bias, variance, strict=True)]
        best = min(range(len(grid)), key=total.__getitem__)
        label = f"bias² + variance / {n}, lowest at {grid[best]:.2f}"
        ax.plot(grid, total, color=color, marker=marker, markevery=[best], label=label)
    ax.set(xlabel="λ", title=f"critic: {name}")
    ax.legend(frameon=False, fontsize=9, loc="upper left")
axes[0].set_ylabel("mean square")
plt.show()

# %% [markdown]
# With the true critic there is no bias at any $\lambda$, and $\lambda = 0$ has no noise at all. The worse the critic,
# the more bias at small $\lambda$. Variance grows with $\lambda$. At $\lambda = 1$ the bias is 0 with **every** critic:
# then $V_t$ is a baseline, no more, and lesson 01 showed that a baseline cannot bias. This is a reason for $\lambda$
# near 1 in language models, whose critics are poor.
#
# Where the sum is lowest depends on how many answers share a state: variance averages out over them, and bias does not
# (green: 64 answers).
#
# Now on a real answer, the right one from above, with our fitted critic. Turn $\lambda$ and $\gamma$. **Look for** how
# far the credit travels back from the end.

# %%
from rlcourse.course.widgets import explorer

words, row_values = along(batch, hidden, rows[1])
row_mask = torch.ones(1, len(words), dtype=torch.bool)
row_rewards = token_rewards(torch.ones(1), row_mask)


def draw(ax, lam: float, gamma: float) -> None:
    """Advantages along one right answer."""
    advantages = gae(row_rewards, row_values[None], row_mask, gamma, lam)[0][0]
    ax.bar(range(len(words)), advantages, color=[BLUE if a > 0 else VERMILION for a in advantages])
    ax.axhline(0, color=BLACK, linewidth=0.8)
    ax.set(xlabel="token", ylabel="advantage", ylim=(-0.6, 1.1))
    ax.set_title(f"λ = {lam:g}, γ = {gamma:g}", fontsize=11)


static = [{"lam": 0.0, "gamma": 1.0}, {"lam": 0.95, "gamma": 1.0}, {"lam": 1.0, "gamma": 0.9}]
explorer(draw, static=static, lam=(0.95, 0.0, 1.0, 0.05), gamma=(1.0, 0.5, 1.0, 0.05))

# %% [markdown]
# Left, each token answers for its own change of the value alone, and the critic's ups and downs are all there is until
# the last token brings the surprise. Middle, PPO's usual setting: the credit reaches far back and fades on the way.
# Right, a discount: early tokens of a long answer hardly hear of its reward, and are told that they did worse than
# expected. Answers here are up to 80 tokens long, so we stay with $\gamma = 1$.

# %% [markdown]
# Last, PPO **whitens** the advantages of a batch: it shifts them to mean 0 and scales them to variance 1, over all real
# tokens. It makes a learning rate mean the same whatever the scale of the rewards. (The shift is one more baseline.)

# %%
from rlcourse.advantages import whiten

white = whiten(advantages, mask)
print(white, f"mean {white[mask].mean():.4f}, variance {white[mask].var(correction=0):.4f}", sep="\n")
assert torch.allclose(white[mask], (advantages[mask] - advantages[mask].mean()) / advantages[mask].std(correction=0))

# %% [markdown]
# ## 4 · Several steps on one rollout
#
# Sampling is slow, a gradient step is not. So we would like to take several steps on the same answers. But after the
# first one they were drawn from an **old** policy $\pi_\text{old}$. Each token is then weighed with how much more
# probable it has become, the *importance ratio*
#
# $$\rho_t = \frac{\pi_\theta(y_t \mid s_t)}{\pi_\text{old}(y_t \mid s_t)}
#   = \exp\big(\log\pi_\theta(y_t \mid s_t) - \log\pi_\text{old}(y_t \mid s_t)\big) ,$$
#
# and the loss of a token is $-\rho_t A_t$. Its gradient is $-\rho_t A_t \nabla \log\pi_\theta$. At the first step
# $\rho_t = 1$, and this is the gradient of lesson 01. Then the ratios run apart. Several steps on one rollout, with and
# without the clip that comes below.

# %%
from rlcourse.losses import importance_ratio

torch.manual_seed(1)
batch, _ = collect(policy, engine, task, order, make_config(algorithm="ppo", num_prompts=8))
rollout, mask, old = batch.rollout, batch.rollout.completion_mask, batch.rollout.logprobs
with torch.no_grad():
    hidden = hidden_states(policy.model, rollout)
    estimate, _ = gae(token_rewards(batch.rewards, mask), head(hidden) * mask, mask, 1.0, 0.95)
advantages = whiten(estimate, mask)
print(f"{len(mask)} answers, {int(mask.sum())} tokens, {batch.rewards.mean():.1%} right")


# %%
def reuse(clip: float, steps: int, lr: float = 4e-5):
    """Steps on the one rollout; the policy after them, and the ratios [tokens] before each step."""
    learner, ratios = copy.deepcopy(policy), []
    optimizer = torch.optim.AdamW(learner.model.parameters(), lr=lr, weight_decay=0.0)
    for _ in range(steps):
        new, _ = token_logprobs(learner.model, rollout, config.sampling, chunk=4096)
        rho = (new - old)[mask].exp()
        ratios.append(rho.detach())
        A = advantages[mask]
        loss = -torch.minimum(rho * A, rho.clamp(1 - clip, 1 + clip) * A).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return learner, ratios


steps = pick(3, 10)
learner, clipped = reuse(0.2, steps)
_, free = reuse(1e9, steps)
print(f"before the first step: largest |ratio - 1| = {(clipped[0] - 1).abs().max().item():.1e}")
assert (clipped[0] - 1).abs().max() < 1e-4

# %% [markdown]
# **Look for** two things: how the heap of ratios spreads (left, without the clip), and what the clip does to the share
# that has left the range 0.8 to 1.2 (right).

# %%
fig, axes = plt.subplots(1, 2, figsize=(11, 3.2), layout="constrained")
for k, color, style in ((1, SKY, "-"), (steps // 2, ORANGE, "--"), (steps - 1, VERMILION, "-.")):
    values = free[k].log().clamp(-1.5, 1.5).tolist()
    how = {"bins": 60, "range": (-1.5, 1.5), "histtype": "step", "log": True, "linewidth": 1.8}
    axes[0].hist(values, color=color, linestyle=style, label=f"after step {k}", **how)
for name, ratios, color, marker in (("no clip", free, VERMILION, "s"), ("clip 0.2", clipped, BLUE, "o")):
    outside = [100 * ((rho - 1).abs() > 0.2).float().mean().item() for rho in ratios]
    axes[1].plot(range(steps), outside, color=color, marker=marker, markersize=4, label=name)
axes[0].set(xlabel="log ratio (ends hold all beyond)", ylabel="tokens", title="Ratios without the clip")
axes[1].set(xlabel="steps on the same rollout", ylabel="% of tokens", title="Ratios below 0.8 or above 1.2")
for ax in axes:
    ax.legend(frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# The clip slows the drift. It does not stop it; the reason comes below.
#
# Weights cost samples. With weights $w_i$, $N$ samples are worth about $(\sum w_i)^2 / \sum w_i^2$ of them, the
# *effective sample size*. The weight that would be exact belongs to the whole answer: the **product** of its ratios.
# **Look for** how fast that product spoils.

# %%
rows = torch.arange(len(mask))[:, None].expand_as(mask)[mask]
for k in (0, 1, steps // 2, steps - 1):
    whole = torch.zeros(len(mask)).index_add(0, rows, free[k].log()).exp()
    for name, w in (("tokens", free[k]), ("whole answers", whole)):
        size = (w.sum() ** 2 / w.square().sum()).item()
        print(f"after {k:2} steps: {len(w):5} {name:13} are worth {size:6.0f} ({size / len(w):4.0%})", end="   ")
    print()

# %% [markdown]
# PPO therefore weighs each token by itself. That leaves out how the probability of the *state* has changed, so it is
# biased, and the bias grows with the distance from $\pi_\text{old}$. Another reason to stay near.
#
# ### The clip
#
# PPO stays near by taking the gradient away from tokens that have moved enough. With
# $\varepsilon_\text{low} = \varepsilon_\text{high} = 0.2$ by default, the objective of a token is
#
# $$\min\big(\rho A,\ \text{clip}(\rho,\ 1 - \varepsilon_\text{low},\ 1 + \varepsilon_\text{high})\, A\big) .$$
#
# **Look for** the flat piece, which has no gradient, and on which side it is. The thin line is the clip without the
# minimum.


# %%
def objective(rho: torch.Tensor, A: float, low: float, high: float) -> torch.Tensor:
    """PPO's objective of a token, to be maximised."""
    return torch.minimum(rho * A, rho.clamp(1 - low, 1 + high) * A)


def draw(ax, advantage: float, low: float, high: float) -> None:
    """The objective over the ratio."""
    rho = torch.linspace(0.3, 1.9, 321)
    flat = (1 + high, 1.9) if advantage > 0 else (0.3, 1 - low)
    ax.axvspan(*flat, color=SKY, alpha=0.2, linewidth=0, label="no gradient")
    ax.plot(rho, rho.clamp(1 - low, 1 + high) * advantage, color=VERMILION, linestyle=":", label="clip alone")
    ax.plot(rho, objective(rho, advantage, low, high), color=BLUE, linewidth=2.5, label="with the minimum")
    ax.plot(1, advantage, color=BLACK, marker="o", linestyle="", label="first step")
    ax.set(xlabel="ratio ρ", ylabel="objective")
    ax.set_title(f"A = {advantage:+g}, ρ from {1 - low:g} to {1 + high:g}", fontsize=11)
    ax.legend(frameon=False, fontsize=8)


shapes = [(1.0, 0.2, 0.2), (-1.0, 0.2, 0.2), (1.0, 0.2, 0.5)]
static = [dict(zip(("advantage", "low", "high"), shape, strict=True)) for shape in shapes]
explorer(draw, static=static, advantage=(1.0, -2.0, 2.0, 0.5), low=(0.2, 0.05, 0.6, 0.05), high=(0.2, 0.05, 0.8, 0.05))

# %% [markdown]
# A good token ($A > 0$) is pushed up until its ratio is $1 + \varepsilon_\text{high}$, then left alone. A bad one is
# pushed down to $1 - \varepsilon_\text{low}$, then left alone. On the **other** side there is no flat piece: a good
# token that has become improbable by accident, through the updates of other tokens, keeps its full gradient and is
# called back. The clip alone (dotted) would leave it there. The minimum is below both lines: a *pessimistic* bound,
# which believes in losses and doubts gains.
#
# The right picture has a wider range above: *clip-higher*, of DAPO (Yu et al. 2025). It gives improbable tokens more
# room to grow. Now the four corners in numbers, with the package's `token_loss`, which is the objective with a minus.

# %%
from rlcourse.losses import token_loss

switches = {"surrogate": "clip", "ratio": "token", "clip_low": 0.2, "clip_high": 0.2}
rho = torch.tensor([[1.5, 0.5, 1.5, 0.5]])
A, four = torch.tensor([[1.0, 1.0, -1.0, -1.0]]), torch.ones(1, 4, dtype=torch.bool)
new = rho.log().requires_grad_()
loss, cut = token_loss(new, torch.zeros(1, 4), A, four, **switches)
[gradient] = torch.autograd.grad(loss.sum(), new)
for i in range(4):
    print(f"A {A[0, i]:+.0f}  ratio {rho[0, i]:.1f}  loss {loss[0, i].item():+.1f}", end="  ")
    print(f"gradient {gradient[0, i].item():+.1f}  clipped {cut[0, i].item()}")
ours = torch.stack([objective(rho[0, i], A[0, i].item(), 0.2, 0.2) for i in range(4)])
assert torch.allclose(loss[0], -ours)

# %% [markdown]
# The share of tokens whose gradient the clip took away is the **clip fraction**, a number worth watching: at 0 the
# clip does nothing, and the larger it is, the more of the later steps is lost. On our rollout, at the policy that the
# clipped steps made:

# %%
with torch.no_grad():
    new, _ = token_logprobs(learner.model, rollout, config.sampling, chunk=4096)
loss, cut = token_loss(new, old, advantages, mask, **switches)
rho = importance_ratio(new, old, mask, "token")
print(f"clip fraction {cut[mask].float().mean():.1%}", end=", ")
print(f"ratios outside the range {((rho - 1).abs() > 0.2)[mask].float().mean():.1%}")

# %% [markdown]
# The second number is larger. The clip takes no ratio back: it only stops pushing. Tokens go on moving because they
# share their weights with others, and those outside on the side that is not flat are not counted as clipped.
#
# ## 5 · How far from the start: the KL divergence
#
# The clip limits one update. Over many updates the policy may still go anywhere. Often one also wants to stay near a
# *reference* $\pi_\text{ref}$, usually the model before RL. Distance is measured as
#
# $$\text{KL}(\pi \,\|\, \pi_\text{ref}) = \mathbb{E}_{y \sim \pi}\big[\log\pi(y) - \log\pi_\text{ref}(y)\big] .$$
#
# For one token that is a sum over the vocabulary. From samples alone there are three common estimators (Schulman 2020).
# With $d = \log\pi - \log\pi_\text{ref}$ of the sampled token:
#
# | | formula | sign |
# | --- | --- | --- |
# | $k_1$ | $d$ | either |
# | $k_2$ | $\tfrac12 d^2$ | not negative |
# | $k_3$ | $e^{-d} - 1 + d$ | not negative |
#
# ### Their values
#
# Two distributions over eight tokens, near each other or far apart. Mean and standard deviation of each estimator, by
# going through the eight. **Look for** which means are off (left), and how much noise each has (right).

# %%
from rlcourse.losses import kl_estimate

torch.manual_seed(0)
ref, direction = torch.randn(8).log_softmax(0), torch.randn(8)
NAMES = {"k1": (VERMILION, "-.", "s"), "k2": (ORANGE, "--", "^"), "k3": (BLUE, "-", "o")}


def at_distance(distance: float) -> tuple[torch.Tensor, float]:
    """A policy so far from the reference: log pi [8], and its KL."""
    pi = (ref + distance * direction).log_softmax(0)
    return pi, (pi.exp() * (pi - ref)).sum().item()


for distance in (0.1, 0.5, 1.5):
    print(f"distance {distance}: KL {at_distance(distance)[1]:.4f} nats")

# %%
fig, axes = plt.subplots(1, 2, figsize=(11, 3.2), layout="constrained")
grid = [0.05 * 1.2**i for i in range(20)]
for name, (color, style, marker) in NAMES.items():
    kls, means, stds = [], [], []
    for pi, kl in map(at_distance, grid):
        k = kl_estimate(pi, ref, name)
        mean = (pi.exp() * k).sum().item()
        spread = math.sqrt((pi.exp() * (k - mean).square()).sum().item())
        kls, means, stds = [*kls, kl], [*means, mean / kl], [*stds, spread / kl]
    for ax, values in zip(axes, (means, stds), strict=True):
        ax.plot(kls, values, color=color, linestyle=style, marker=marker, markersize=4, label=name)
axes[0].set(xscale="log", xlabel="KL (nats)", ylabel="mean / KL", title="Mean: 1 is unbiased", ylim=(0, 2))
axes[1].set(xscale="log", yscale="log", xlabel="KL (nats)", ylabel="std / KL", title="Noise of one sample")
for ax in axes:
    ax.legend(frameon=False)
    ax.grid(alpha=0.25)
plt.show()

# %% [markdown]
# $k_1$ is exact in the mean and very noisy when the policies are near: its noise is of the size of $d$, and the KL of
# the size of $d^2$. $k_3$ is exact in the mean too: what it adds, $e^{-d} - 1 = \pi_\text{ref}/\pi - 1$, has mean 0
# under $\pi$. $k_2$ is a good guess near 0 and biased far out. Now with samples. **Look for** the heaps around the
# dashed line, the true KL.


# %%
def draw(ax, distance: float, samples: int) -> None:
    """Estimates from so many samples, 1,000 times."""
    torch.manual_seed(0)
    pi, kl = at_distance(distance)
    drawn = torch.multinomial(pi.exp(), 1000 * samples, replacement=True).view(1000, samples)
    for name, (color, style, _) in NAMES.items():
        means = kl_estimate(pi[drawn], ref[drawn], name).mean(1)
        how = {"bins": 50, "histtype": "step", "linewidth": 1.8}
        ax.hist((means / kl).clamp(-3, 5).tolist(), range=(-3, 5), color=color, linestyle=style, label=name, **how)
    ax.axvline(1, color=BLACK, linestyle="--", linewidth=1)
    ax.set(xlabel="estimate / KL (ends hold all beyond)", ylabel="of 1,000")
    ax.set_title(f"KL {kl:.3f}, mean of {samples} samples", fontsize=11)
    ax.legend(frameon=False, fontsize=9)


static = [{"distance": 0.2, "samples": 16}, {"distance": 0.2, "samples": 256}, {"distance": 1.0, "samples": 16}]
explorer(draw, static=static, distance=(0.2, 0.1, 1.5, 0.1), samples=(16, 16, 256, 16))

# %% [markdown]
# The same on two real policies: the model at the start, and the one that our clipped steps made of it. It samples; at
# every token it visits, the exact KL is a sum over the vocabulary, and that is what the estimators should average to.

# %%
from rlcourse.rollout import make_engine

torch.manual_seed(2)
prompts = [policy.prompt(p.question) for p in order.sample(pick(4, 16))]
drawn = make_engine(learner, config.engine, torch.float32).generate(prompts, 8, 80, config.sampling)
with torch.no_grad():  # the whole distribution before each token: [rows, length, vocabulary]
    both = [m.model.lm_head(hidden_states(m.model, drawn)).log_softmax(-1) for m in (learner, policy)]
exact = (both[0].exp() * (both[0] - both[1])).sum(-1)[drawn.completion_mask]
chosen = [x.gather(-1, drawn.completion_ids[..., None])[..., 0][drawn.completion_mask] for x in both]
print(f"{len(exact)} tokens: exact KL {exact.mean():.5f} nats a token")
for name in NAMES:
    k = kl_estimate(*chosen, name)
    error = (k - exact).std().item() / math.sqrt(len(k))
    print(f"{name}: {k.mean():.5f} ± {error:.5f} (standard error), std of one token {k.std():.4f}")

# %% [markdown]
# All three are estimates of the same number; compare their errors, and the noise of one token.
#
# ### Their gradients
#
# As a **penalty in the loss** an estimator is differentiated, and then its value does not matter, only its gradient. We
# take the mean gradient over samples from $\pi$, by enumeration over the eight tokens, with the samples held fixed as
# autograd does. And we compare with the gradients of the true divergences, in both directions.

# %%
logits = (ref + 0.8 * direction).requires_grad_()


def mean_gradient(name: str) -> torch.Tensor:
    """The gradient of an estimator as a loss, mean over samples from pi: [8]."""
    pi = logits.log_softmax(0)
    return torch.autograd.grad((pi.exp().detach() * kl_estimate(pi, ref, name)).sum(), logits)[0]


pi = logits.log_softmax(0)
forward, reverse = (pi.exp() * (pi - ref)).sum(), (ref.exp() * (ref - pi)).sum()
[of_policy] = torch.autograd.grad(forward, logits, retain_graph=True)
[of_reference] = torch.autograd.grad(reverse, logits)
rows = {"KL(pi || ref)": of_policy, "KL(ref || pi)": of_reference} | {name: mean_gradient(name) for name in NAMES}
for name, gradient in rows.items():
    print(f"{name:14}", " ".join(f"{v:+.3f}" for v in gradient.tolist()))
assert torch.allclose(rows["k1"], torch.zeros(8), atol=1e-6)
assert torch.allclose(rows["k2"], of_policy, atol=1e-6) and torch.allclose(rows["k3"], of_reference, atol=1e-6)

# %% [markdown]
# Three different things:
#
# - $k_1$ as a loss has mean gradient **zero**. Its gradient is the score, and the score has mean zero. It pulls nowhere
#   and adds noise.
# - $k_2$, biased as a value, has the gradient of $\text{KL}(\pi \,\|\, \pi_\text{ref})$.
# - $k_3$, unbiased as a value, has the gradient of the **other** direction, $\text{KL}(\pi_\text{ref} \,\|\, \pi)$.
#   GRPO uses it so.
#
# **Look for** which bars agree.

# %%
fig, ax = plt.subplots(figsize=(9, 3.2))
styles = ((BLACK, ""), (GREEN, ""), (VERMILION, "xx"), (ORANGE, "//"), (BLUE, ".."))
for i, ((name, gradient), (color, hatch)) in enumerate(zip(rows.items(), styles, strict=True)):
    places = torch.arange(8) + 0.16 * (i - 2)
    ax.bar(places, gradient.tolist(), width=0.15, color=color, hatch=hatch, edgecolor="white", label=name)
ax.axhline(0, color=BLACK, linewidth=0.8)
ax.set(xlabel="token", ylabel="gradient in its logit", title="Mean gradient of each estimator as a loss")
ax.legend(frameon=False, ncols=5, fontsize=9)
plt.show()

# %% [markdown]
# ### In the reward, or in the loss
#
# PPO for language models usually puts the KL **into the reward** (Ziegler et al. 2019; Ouyang et al. 2022): each real
# token pays $\beta\, k_1$, and the answer's reward comes on top of the last one. There an estimator is never
# differentiated. It is a number that the score is multiplied with, so it must be right as a **value**: $k_1$. And GAE
# carries the price back to earlier tokens. **In the loss** only the token itself feels the pull; there take $k_2$ or
# $k_3$.

# %%
pair = torch.tensor([[True, True, True], [True, True, False]])
new, reference = (
    torch.tensor([[-0.5, -1.0, -0.2], [-0.3, -2.0, 0.0]]),
    torch.tensor([[-0.9, -1.0, -0.3], [-0.3, -1.0, 0]]),
)
beta = 0.1
print(token_rewards(torch.tensor([1.0, 0.0]), pair) - beta * kl_estimate(new, reference, "k1").masked_fill(~pair, 0.0))

# %% [markdown]
# ## 6 · PPO whole
#
# All the pieces stand:
#
# $$\mathcal{L} = \text{mean over tokens of}\
#   \Big[-\min\big(\rho_t A_t,\ \text{clip}(\rho_t) A_t\big)\Big]
#   + c_V \cdot \text{mean over tokens of}\ \tfrac12\big(V_\theta(s_t) - \hat R_t\big)^2 ,$$
#
# with $c_V = 0.5$ and the return $\hat R_t = A_t + V_t$ (before whitening). The value loss is clipped as well:
# `value_loss` takes the larger of two squared errors, one of them of a value kept within 0.2 of its old one. First the
# advantages, by hand and by the package, of a small batch that the trained policy samples, with the KL in the reward.

# %%
from rlcourse.learner import Learner
from rlcourse.losses import value_loss
from rlcourse.step import make_batch, train_step

kl = {"kl_coef": 0.05, "kl_in": "reward"}
free = {"warmup_steps": 0, "max_grad_norm": 1e9, "inner_epochs": 2, "minibatches": 1}
small = make_config(algorithm="ppo", num_prompts=4, num_generations=4, **kl, **free)
trainer = Learner(copy.deepcopy(learner), small, start=policy.model)  # the reference is the model at the start
trainer.value_head.load_state_dict(head.state_dict())
torch.manual_seed(0)
completions, _ = collect(learner, make_engine(learner, small.engine, torch.float32), task, order, small)
rollout, mask = completions.rollout, completions.rollout.completion_mask
batch = make_batch(trainer, completions)

with torch.no_grad():
    start, _ = token_logprobs(policy.model, rollout, small.sampling, chunk=4096)
    old_values = head(hidden_states(learner.model, rollout)) * mask
rewards = token_rewards(completions.rewards, mask) - 0.05 * (rollout.logprobs - start) * mask
estimate, returns = gae(rewards, old_values, mask, small.gamma, small.gae_lambda)
A = whiten(estimate, mask)
print(f"largest difference: advantages {(A - batch.advantages).abs().max().item():.0e}", end=", ")
print(f"returns {(returns - batch.returns).abs().max().item():.0e}")
assert torch.allclose(A, batch.advantages, atol=1e-3) and torch.allclose(returns, batch.returns, atol=1e-4)

# %% [markdown]
# Then the loss, and its gradient's norm over the policy and the critic together. Two updates on the same batch: first
# by hand.


# %%
def by_hand(updates: int) -> list[dict[str, float]]:
    """The parts of PPO's loss before each of some updates on the batch, and the norm of its gradient."""
    mine, critic, found = copy.deepcopy(learner), copy.deepcopy(head), []
    rates = {small.lr: list(mine.model.parameters()), small.value_lr: list(critic.parameters())}
    groups = [{"params": parameters, "lr": lr} for lr, parameters in rates.items()]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(updates):
        new, hidden = token_logprobs(mine.model, rollout, small.sampling, chunk=4096)
        rho, a = (new - rollout.logprobs)[mask].exp(), A[mask]
        policy_part = -torch.minimum(rho * a, rho.clamp(0.8, 1.2) * a).mean()
        value_part = value_loss(critic(hidden), old_values, returns, mask, small.value_clip)[mask].mean()
        (policy_part + small.value_coef * value_part).backward()
        norm = math.sqrt(sum(p.grad.square().sum().item() for group in groups for p in group["params"]))
        optimizer.step()
        optimizer.zero_grad()
        fraction = (((rho > 1.2) & (a > 0)) | ((rho < 0.8) & (a < 0))).float().mean().item()
        parts = {"policy_loss": policy_part.item(), "value_loss": value_part.item()}
        found.append(parts | {"clip_fraction": fraction, "grad_norm": norm})
    return found


ours = by_hand(2)
for name in ours[0]:
    print(f"{name:13}", *(f"update {i}: {parts[name]:8.5f}" for i, parts in enumerate(ours, 1)), sep="   ")

# %% [markdown]
# The policy loss of the first update is 0: all ratios are 1, and the mean of whitened advantages is 0. Its **gradient**
# is not. Do not read progress from this number.
#
# Now the package. `train_step` is a whole training step, rollout and all. We give it an engine that hands out our
# rollout, with the rewards that it earned, and let it go over the batch twice. What it reports are means of the two.

# %%
from rlcourse.course.lessons.experiment import Replay

earned = completions.rewards.tolist()
theirs, _ = train_step(trainer, Replay(rollout), task, order, step=0, reward_function=lambda *_: earned)
for name in ours[0]:
    mean = sum(parts[name] for parts in ours) / len(ours)
    print(f"{name:13} by hand {mean:8.5f}   package {theirs[name]:8.5f}")
    assert abs(mean - theirs[name]) < 1e-3 + 1e-3 * abs(mean)

# %% [markdown]
# ### Live
#
# A short run of the whole: 8 prompts × 8 answers a step, and four optimizer steps on each rollout. One run: it shows
# what the metrics look like, not how well PPO does.

# %%
from rlcourse.runs import read_lines
from rlcourse.trainer import train

few = {"num_prompts": pick(4, 8), "num_generations": 8, "steps": pick(2, 14), "inner_epochs": 2, "minibatches": 2}
least = {"eval_every": pick(2, 7), "eval_validation": pick(20, 100), "eval_problems": 1, "pass_k": 0, "save_every": 0}
folder = tempfile.mkdtemp()
result = train(make_config(algorithm="ppo", reference=True, output=folder, **few, **least))
metrics = read_lines(Path(result["folder"]) / "metrics.jsonl")
evals = read_lines(Path(result["folder"]) / "evals.jsonl")
print(f"{result['steps']} steps in {result['wall_seconds']:.0f} s; validation", end=" ")
print(" → ".join(f"{e['accuracy']:.0%}" for e in evals))

# %%
SHOWN = {"accuracy": "right, share of samples", "value_loss": "value loss", "clip_fraction": "clip fraction"}
SHOWN |= {"kl": "KL to the start, nats a token"}
fig, axes = plt.subplots(1, 4, figsize=(13, 2.8), layout="constrained")
for ax, (key, title), color in zip(axes, SHOWN.items(), (BLUE, ORANGE, GREEN, PURPLE), strict=True):
    ax.plot([m["step"] for m in metrics], [m[key] for m in metrics], color=color, marker="o", markersize=4)
    ax.set(title=title, xlabel="training step", ylim=(0, None))
    ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ### The recorded curve
#
# PPO with 16 prompts × 8 answers and one optimizer step a rollout (`minibatches=1`), three seeds, and beside it
# REINFORCE with the mean of the batch as baseline. **Look for** what the critic buys.

# %%
from rlcourse.course.lessons.curve_records import load_curve
from rlcourse.measure.plots import LABELS, STYLES, seed_band


def band(ax, seeds, label: str, color: str, linestyle="-", marker="o") -> None:
    """Mean over seeds, and a band from the worst to the best."""
    steps, low, mean, high = seed_band(seeds)
    ax.fill_between(steps, [100 * v for v in low], [100 * v for v in high], color=color, alpha=0.18, linewidth=0)
    ax.plot(steps, [100 * v for v in mean], color=color, linestyle=linestyle, marker=marker, markersize=4, label=label)


default = {name: load_curve(name) for name in ("ppo", "reinforce_baseline")}
for name, record in default.items():
    final = [seed["summary"]["accuracy_after"] for seed in record["results"]]
    print(f"{name:18} {len(final)} seeds, test accuracy {min(final):.1%} to {max(final):.1%}", end=", ")
    print(f"recorded on {record['device']}, {record['date']}, {record['setup']['steps']} steps")

# %%
fig, ax = plt.subplots(figsize=(7, 3.6))
for name, record in default.items():
    band(ax, record["results"], LABELS.get(name, name.upper()), *STYLES[name])
ax.set(xlabel="training step", ylabel="greedy, % right", ylim=(0, 100), title="One optimizer step a rollout")
ax.legend(frameon=False, loc="lower right")
ax.grid(alpha=0.25)
plt.show()

# %% [markdown]
# It buys nothing here. REINFORCE is ahead on the way, and by a little on the test problems in the end. Mind what this
# setting is: **one** optimizer step for each rollout. All ratios are 1, the clip is idle, and what is left of PPO is a
# critic that starts from nothing, against the mean of the batch, which is right from the first step.
#
# ## 7 · Safeguards, removed one at a time
#
# Now a setting in which there is something to guard against: every rollout serves **eight** optimizer steps (two
# passes, four mini-batches), at the default learning rate, and once more at twice that. Four variants, three seeds
# each:
#
# - **all**: PPO as above;
# - **no clip**: the range of the ratio is without limit;
# - **no critic**: $V = 0$ and $\lambda = 1$, so every token has the advantage $R$, whitened: less the batch's mean;
# - **no norm limit**: the gradient's norm is not limited to 1.
#
# **Look for** bands that do not touch.

# %%
from rlcourse.course.lessons.lesson02 import VARIANTS

records = {name: load_curve(f"lesson02_{name}") for name in VARIANTS}
LOOK = {"all": (BLUE, "-", "o"), "no_clip": (VERMILION, "--", "s"), "no_critic": (GREEN, "-.", "^")}
LOOK |= {"no_norm": (PURPLE, ":", "D")}
PANELS = [("", "no_clip"), ("", "no_critic"), ("", "no_norm"), ("fast_", "no_clip")]
fig, axes = plt.subplots(1, 4, figsize=(15, 3.4), sharey=True, layout="constrained")
for ax, (prefix, name) in zip(axes, PANELS, strict=True):
    for which in ("all", name):
        band(ax, records[prefix + which]["results"], which.replace("_", " "), *LOOK[which])
    rate = ", twice the learning rate" if prefix else ""
    ax.set(title=name.replace("_", " ") + rate, xlabel="training step", ylim=(0, 100), xticks=range(0, 17, 4))
    ax.legend(frameon=False, loc="lower left")
    ax.grid(alpha=0.25)
axes[0].set_ylabel("greedy, % right")
plt.show()
first = records["all"]
print(f"8 prompts x 8 answers, bands from worst to best of {len(first['results'])} seeds", end="; ")
print(f"recorded on {first['device']}, {first['date']}: `python -m rlcourse.course.lessons.lesson02`")

# %%
finals = {}
for name, record in records.items():
    finals[name] = [100 * seed["evals"][-1]["accuracy"] for seed in record["results"]]
    bests = [100 * max(e["accuracy"] for e in seed["evals"]) for seed in record["results"]]
    print(f"{name:13} % right at the end, by seed: {', '.join(f'{v:3.0f}' for v in finals[name])}", end="   ")
    print(f"best on the way: {', '.join(f'{v:.0f}' for v in bests)}")
problems = 150
print(f"standard error of 80 % on {problems} problems: {100 * math.sqrt(0.8 * 0.2 / problems):.1f} points")
assert max(finals["fast_no_clip"]) < min(finals["fast_all"]) < min(finals["all"])
start = 100 * records["all"]["results"][0]["evals"][0]["accuracy"]
assert max(finals["fast_no_clip"]) < start
costs = [a - b for a, b in zip(finals["all"], finals["no_clip"], strict=True)]
assert sum(cost > 9 for cost in costs) == 2
for name in ("no_critic", "no_norm"):  # the ranges overlap
    assert max(min(finals["all"]), min(finals[name])) < min(max(finals["all"]), max(finals[name]))

# %% [markdown]
# What happened inside, at the default learning rate (above) and at twice that (below). **Look for** how far the policy
# went from the start (KL), how far one rollout's eight steps moved it (ratios outside 0.8 to 1.2 **after** them,
# clipped or not), how sure of itself it became (entropy), and where the norm of the gradient lies compared with the
# limit of 1.

# %%
INSIDE = {"kl": "KL to the start, nats a token", "outside": "ratios outside, share", "entropy": "entropy, nats a token"}
INSIDE |= {"grad_norm": "gradient norm, mean of 8"}
fig, axes = plt.subplots(2, 4, figsize=(14, 5.6), sharex=True, layout="constrained")
for (row, prefix), (column, (key, title)) in itertools.product(enumerate(("", "fast_")), enumerate(INSIDE.items())):
    ax = axes[row, column]
    for name, (color, style, marker) in LOOK.items():
        if prefix + name not in records:
            continue
        values = torch.tensor([seed["steps"][key] for seed in records[prefix + name]["results"]])
        steps = range(1, values.shape[1] + 1)
        ax.fill_between(steps, values.amin(0), values.amax(0), color=color, alpha=0.12, linewidth=0)
        mark = {"marker": marker, "markersize": 4, "markevery": 3}
        ax.plot(steps, values.mean(0), color=color, linestyle=style, label=name.replace("_", " "), **mark)
    ax.set(title=title if row == 0 else "", **({"yscale": "log"} if key == "kl" else {"ylim": (0, None)}))
    ax.spines[["top", "right"]].set_visible(False)
    axes[1, column].set(xlabel="training step", xticks=range(0, 17, 4))
axes[0, 0].legend(frameon=False, fontsize=9)
axes[0, 0].set_ylabel("default learning rate")
axes[1, 0].set_ylabel("twice that")
plt.show()

# %% [markdown]
# What three seeds allow us to say:
#
# - **The clip matters.** At the default learning rate its absence costs about ten points or more in two of three seeds,
#   after a start that is no worse. At twice the rate it decides: without it every seed ends below where it began.
# - **It is no insurance.** At twice the rate PPO with everything in place falls from its best as well, just not as far.
#   The clip stops tokens that have moved far enough. It does not stop the policy.
# - **The critic shows nothing that lasts.** With the plain mean of the batch in its place the runs are a little behind
#   at step 8, and level at the end.
# - **The limit on the norm shows nothing.** Its band is a little lower and overlaps; three seeds do not carry that. The
#   norm is above 1 often enough for the limit to act, but AdamW divides each gradient by its usual size and undoes most
#   of it.
#
# The peaks of the KL are $k_3$ at tokens that the policy has all but given up: there $e^{-d}$ explodes. And note that
# the KL tells little by itself: the runs that do well have moved away from the start, too, as they should.
#
# Not tried here: longer runs, larger models, and the KL penalty as a safeguard against drift.
#
# ## 8 · What the critic costs
#
# A critic needs a head, a learning rate, a loss weight, a clip range and a $\lambda$ of its own; in large systems it is
# a second network as big as the policy. In exchange it offers a baseline by token, and how good that is we have seen.
# Lesson 03 asks what is left of PPO if the critic is deleted, and the other answers to the same prompt serve as the
# baseline: that is **GRPO**.
#
# ## Check yourself
#
# 1. Why is the ratio of every token 1 at the first step on a rollout, and what is the clip doing then?
#
# <details><summary>Answer</summary>
# The policy is still the one that sampled. The clip does nothing: the gradient is that of REINFORCE with the same
# advantages. With one optimizer step for each rollout it never does anything.
# </details>
#
# 2. With $\lambda = 1$ and $\gamma = 1$, what is the advantage of the third token of a right answer?
#
# <details><summary>Answer</summary>
# $R - V(s_3) = 1 - V(s_3)$. The critic is a baseline that depends on the state, so however wrong it is, it does not
# bias the gradient.
# </details>
#
# 3. A token has $A > 0$ and $\rho = 0.5$. Is it clipped?
#
# <details><summary>Answer</summary>
# No. The minimum takes the unclipped side, and the full gradient pushes the token up again.
# </details>
#
# 4. You put $k_1$ in the loss with a coefficient of 0.1. What does it do on average?
#
# <details><summary>Answer</summary>
# Nothing but noise, as long as the samples come from the current policy: its mean gradient is the mean score, which is
# zero. In the reward it would work.
# </details>
#
# 5. Your logged KL, measured with $k_1$, is negative in one step. Is something broken?
#
# <details><summary>Answer</summary>
# No. A KL divergence is never negative, but $k_1$ of a sample can be, and so can a mean of few. Log $k_3$.
# </details>
#
# ## Exercises
#
# [exercises/02_ppo.ipynb](../exercises/02_ppo.ipynb): GAE, the clipped loss, the three estimators, the KL in the reward
# and the value loss. Then go on to [03 · GRPO](03_grpo.ipynb).
#
# ## Further reading
#
# - Schulman et al. 2017, *Proximal Policy Optimization Algorithms*, arXiv:1707.06347.
# - Schulman et al. 2015, *High-Dimensional Continuous Control Using Generalized Advantage Estimation*,
#   arXiv:1506.02438.
# - Schulman 2020, *Approximating KL Divergence*, [joschu.net/blog/kl-approx.html](http://joschu.net/blog/kl-approx.html).
# - Tang and Munos 2025, *On a few pitfalls in KL divergence gradient estimation for RL*, arXiv:2506.09477.
# - Huang et al. 2022, *The 37 Implementation Details of Proximal Policy Optimization*, ICLR blog track.
# - Andrychowicz et al. 2020, *What Matters In On-Policy Reinforcement Learning?*, arXiv:2006.05990: many of these
#   details measured, on control tasks.
# - Ziegler et al. 2019, *Fine-Tuning Language Models from Human Preferences*, arXiv:1909.08593: PPO with a KL penalty
#   in the reward; Ouyang et al. 2022, *Training language models to follow instructions with human feedback*,
#   arXiv:2203.02155.
# - Yu et al. 2025, *DAPO: An Open-Source LLM Reinforcement Learning System at Scale*, arXiv:2503.14476: clip-higher.
