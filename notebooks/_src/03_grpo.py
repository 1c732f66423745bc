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
# - what a critic costs in time and memory, and what is left of PPO when it is deleted;
# - the group as a baseline: advantages from the rewards of several answers to one prompt, and how good they are;
# - the loss of GRPO (Shao et al. 2024) whole: ratio, clip, mean over a sequence, KL;
# - why many groups teach nothing, how many, and what it costs to replace them;
# - how to split a batch into prompts and answers: what that changes and what it does not.
#
# You need lessons [01](01_policy_gradient.ipynb) and [02](02_ppo.ipynb): baselines and leave-one-out; value head,
# ratio, clip, and the KL to a reference.

# %%
import copy
import statistics
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown, display

from rlcourse.config import make_config
from rlcourse.course import pick
from rlcourse.course.lessons import lesson03
from rlcourse.course.lessons.curve_records import load_curve
from rlcourse.course.widgets import explorer
from rlcourse.evaluation import load_all
from rlcourse.measure.plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, STYLES, VERMILION

plt.rcParams["figure.dpi"] = 80
config = make_config(algorithm="grpo", num_prompts=pick(4, 16), micro_batch_rows=32)
policy, engine, task = load_all(config)
print(
    f"{sum(p.numel() for p in policy.model.parameters()):,} parameters; a step is {config.num_prompts} prompts", end=""
)
print(f" x {config.num_generations} answers, advantage {config.advantage}, aggregation {config.aggregation}")

# %% [markdown]
# ## 1 · What a critic costs
#
# PPO needs to know how good an answer is **compared with what was to be expected**. Its critic learns that expectation:
# $V(s_t)$, the mean reward from here on. Where the only reward comes at the end of a short answer, that is a lot of
# machinery for a baseline.
#
# In lesson 02 the critic was a small head on the policy's own hidden states. The usual recipe for large models is a
# second network as large as the policy, with gradients and optimizer states of its own. We measure three updates on the
# **same** rollout: GRPO, PPO with a value head, and a separate critic beside the policy.

# %%
from rlcourse.advantages import has_signal
from rlcourse.collect import collect
from rlcourse.course.lessons.experiment import Replay
from rlcourse.learner import Learner
from rlcourse.policy import ValueHead
from rlcourse.step import make_batch, train_step
from rlcourse.tasks.prompts import PromptSampler

torch.manual_seed(0)
order = PromptSampler(task.problems("train"), 0)
batch, _ = collect(policy, engine, task, order, config)
tokens, signal = int(batch.rollout.completion_lengths.sum()), has_signal(batch.rewards, config.num_generations)
print(f"{len(batch.rewards)} answers, {tokens} tokens, mean reward {batch.rewards.mean():.2f}")
print(f"groups whose rewards differ: {signal.float().mean():.0%}")

# %% [markdown]
# One thing must be fair. A group whose rewards are all the same gives GRPO no gradient, and `rlcourse` does not compute
# such rows at all. That is a gain of its own (section 4). So GRPO is timed twice: with the real rewards, and with
# rewards that differ in every group, so that every row is computed, as in PPO. `train_step` is the package's training
# step and times its phases; `Replay` is an engine that hands it our rollout instead of a new one.


# %%
def update_seconds(algorithm: str, rewards: torch.Tensor) -> tuple[float, float]:
    """Median seconds of computing advantages, values included, and of the update, with a fresh copy of the policy."""
    one = {"minibatches": 1, "micro_batch_rows": 32}  # one optimizer step
    settings = make_config(algorithm=algorithm, num_prompts=config.num_prompts, **one)
    learner, again, seconds = Learner(copy.deepcopy(policy), settings), Replay(batch.rollout), []
    for _ in range(pick(1, 5)):
        metrics, _ = train_step(learner, again, task, order, 0, reward_function=lambda *_: rewards.tolist())
        seconds.append((metrics["timing"]["advantages_s"], metrics["timing"]["update_s"]))
    return tuple(statistics.median(column) for column in zip(*seconds, strict=True))


mixed = torch.arange(len(batch.rewards)).remainder(2).float()
times = {
    "GRPO, real rewards": update_seconds("grpo", batch.rewards),
    "GRPO, every row": update_seconds("grpo", mixed),
    "PPO, value head": update_seconds("ppo", batch.rewards),
}
for name, (before, after) in times.items():
    print(f"{name:20} values {before:.2f} s, update {after:.2f} s")

# %% [markdown]
# A separate critic has a trunk of its own: one forward pass for the values, then a forward and a backward pass and an
# optimizer step for its loss.

# %%
critic, head = copy.deepcopy(policy.model), ValueHead(policy.model.config.hidden_size)
own = [*critic.parameters(), *head.parameters()]
optimizer = torch.optim.AdamW(own, lr=1e-4, fused=True)


def values_of(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The critic's value of every state of some rows and which are real, [rows, prompt + completion]."""
    piece = batch.rollout[rows]  # without columns of padding, as the policy's update does
    lengths = piece.prompt_lengths + piece.completion_lengths
    real = torch.arange(piece.ids.shape[1]) < lengths[:, None]
    return head(critic.get_decoder()(input_ids=piece.ids, use_cache=False).last_hidden_state), real


seconds, micro_batches = [], batch.rollout.completion_lengths.argsort().split(32)  # rows of like length
for _ in range(pick(1, 5)):
    start = time.perf_counter()
    with torch.no_grad():
        [values_of(rows) for rows in micro_batches]
    middle = time.perf_counter()
    for rows in micro_batches:
        values, real = values_of(rows)
        ((values - batch.rewards[rows, None]).square()[real].sum() / tokens).backward()
    optimizer.step()
    seconds.append((middle - start, time.perf_counter() - middle))
    last_gradients = [p.grad for p in own]
    optimizer.zero_grad()
forward, learn = (statistics.median(column) for column in zip(*seconds, strict=True))
print(f"the critic alone: values {forward:.2f} s, its update {learn:.2f} s")

# %%
bars = {name: (update, values, 0.0) for name, (values, update) in times.items()}
bars["PPO, separate critic"] = (times["GRPO, every row"][1], forward, learn)
fig, ax = plt.subplots(figsize=(8, 2.8))
left = torch.zeros(len(bars))
parts = {"policy update": (BLUE, ""), "values": (ORANGE, "//"), "the critic's own update": (VERMILION, "..")}
for i, (part, (color, hatch)) in enumerate(parts.items()):
    width = torch.tensor([bar[i] for bar in bars.values()])
    ax.barh(list(bars), width, left=left, color=color, hatch=hatch, edgecolor="white", label=part)
    left += width
ax.invert_yaxis()
ax.set(xlabel="seconds, median of the repetitions", title="One step after the rollout, measured just now")
ax.legend(frameon=False, fontsize=9)
ax.spines[["top", "right"]].set_visible(False)
plt.show()
whole = {name: sum(bar) for name, bar in bars.items()}
for name in ("PPO, value head", "PPO, separate critic"):
    print(f"{name}: {whole[name] / whole['GRPO, every row']:.2f} x GRPO on every row", end="; ")

# %% [markdown]
# Now the memory. **Measured** on the embedded model, by adding up the tensors that are there after a step:


# %%
def size(tensors) -> int:
    """Bytes of the tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


moments = [t for state in optimizer.state.values() for t in state.values()]
of_head = set(head.parameters())
print(f"{'':22}{'weights':>12}{'gradients':>12}{'AdamW':>12}  bytes")
for name, chosen in (("value head", [p in of_head for p in own]), ("separate critic", [True] * len(own))):
    kept = [p for p, keep in zip(own, chosen, strict=True) if keep]
    slopes = [g for g, keep in zip(last_gradients, chosen, strict=True) if keep and g is not None]
    states = [t for p in kept for t in optimizer.state[p].values()]
    print(f"{name:22}{size(kept):12,}{size(slopes):12,}{size(states):12,}")
together = size(own) + size(g for g in last_gradients if g is not None) + size(moments)
bytes_each = together / sum(p.numel() for p in own)
print(f"{bytes_each:.1f} bytes a parameter")
assert abs(bytes_each - 16) < 0.1

# %% [markdown]
# Sixteen bytes a parameter: four for the weight, four for its gradient, eight for the two moments of AdamW, all in
# float32. The formula needs nothing but the number of parameters, so it can be **computed** for models that do not fit
# here. The picture shows what stands in memory whatever the batch is; activations come on top, for the critic as for
# the policy.

# %%
from rlcourse.measure.memory import QWEN25, parameters

fig, ax = plt.subplots(figsize=(8, 3))
names = [name.split("/")[1] for name in QWEN25]
n = torch.tensor([parameters(shape) for shape in QWEN25.values()], dtype=torch.float64)
sizes = {"policy: weights, gradients, AdamW": 16 * n, "frozen reference": 4 * n, "separate critic": 16 * n}
left = torch.zeros(len(n), dtype=torch.float64)
for (part, width), color, hatch in zip(sizes.items(), (BLUE, SKY, VERMILION), ("", "//", ".."), strict=True):
    ax.barh(names, width / 1e9, left=left / 1e9, color=color, hatch=hatch, edgecolor="white", label=part)
    left += width
ax.axvline(80, color=BLACK, linestyle="--", linewidth=1, label="a GPU with 80 GB")
ax.invert_yaxis()
ax.set(xlabel="GB, computed", title="Training in float32 with AdamW, activations left out")
ax.legend(frameon=False, fontsize=9)
ax.spines[["top", "right"]].set_visible(False)
plt.show()
for name, count in zip(names, n.tolist(), strict=True):
    print(f"{name:14} {count / 1e9:5.2f} billion parameters: a critic of its size {16 * count / 1e9:6.1f} GB")

# %% [markdown]
# Be careful with what this says. A separate critic doubles the memory that stands and about doubles the time. A value
# head on the policy's trunk costs next to no memory; its price is the extra forward pass for the values, and all rows
# must be computed. So "GRPO halves the memory" is a statement against the first recipe, not against the second.
#
# And there is a price that is not in these pictures: a critic starts knowing nothing. Until it has learned something,
# its values are a poor baseline.
#
# ## 2 · The group as a baseline
#
# Lesson 01 ended with RLOO: the other answers to the same prompt say what was to be expected. GRPO builds on that. For
# each prompt $x$ it samples a *group* of $G$ answers with rewards $R_1, \dots, R_G$ and takes their mean $\bar R$ as
# the estimate of $V(x)$. Then it divides by their standard deviation:
#
# $$\hat A_i = \frac{R_i - \bar R}{\mathrm{std}(R) + \varepsilon} ,$$
#
# the same at every token of answer $i$. The small $\varepsilon$ keeps the division defined.
#
# First the order of the rows. They are *group-major*: all answers to the first prompt, then all to the second. So a
# `view` with the group last makes groups rows of a matrix. The other order of the same numbers runs as well, and mixes
# prompts.

# %%
rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 1, 1, 1, 1, 1])  # three prompts, four answers each
G = 4
print("prompt of each row ", (torch.arange(12) // G).tolist())
print("rewards            ", rewards.int().tolist())
groups = rewards.view(-1, G)  # [prompts, G]
print("\nview(-1, G): a group is a row\n", groups.int())
print("\nview(G, -1): WRONG, a column holds answers to different prompts\n", (torch.arange(12) // G).view(G, -1))

# %% [markdown]
# Then mean, deviation, division. The deviation is that of a *sample*, with $G - 1$ in the denominator, as `torch.std`
# has it. With $G$ instead, all advantages would be larger by $\sqrt{G/(G-1)}$: a constant, so it hardly matters which
# one you take, but code that is compared must agree.

# %%
from rlcourse.advantages import group_centered, group_normalized

mean = groups.mean(1, keepdim=True)
std = ((groups - mean).square().sum(1, keepdim=True) / (G - 1)).sqrt()
advantages = (groups - mean) / (std + 1e-4)
print("mean of each group  ", mean.flatten().tolist())
print("deviation           ", [round(v, 4) for v in std.flatten().tolist()])
print("advantages\n", advantages)
assert torch.allclose(advantages.flatten(), group_normalized(rewards, G))
population = groups.std(1, correction=0, keepdim=True)
print("sample over population deviation:", [round(v, 4) for v in (std / population)[:2, 0].tolist()], end=" ")
print(f"= √(4/3) = {(4 / 3) ** 0.5:.4f}")

# %% [markdown]
# Three groups, three lessons. **Look for** the single success in the first, the single failure in the second, and the
# third.

# %%
fig, axes = plt.subplots(2, 3, figsize=(9, 3.6), sharex=True, sharey="row", layout="constrained")
titles = ("hard: one of four", "easier: three of four", "all right")
for column, title in enumerate(titles):
    colors = [BLUE if r else VERMILION for r in groups[column]]
    axes[0, column].bar(range(1, 5), groups[column], color=colors, width=0.6)
    axes[1, column].bar(range(1, 5), advantages[column], color=colors, width=0.6)
    axes[1, column].axhline(0, color=BLACK, linewidth=0.8)
    axes[0, column].set_title(title)
    axes[1, column].set(xlabel="answer", xticks=range(1, 5))
axes[0, 0].set(ylabel="reward", ylim=(0, 1.1))
axes[1, 0].set(ylabel="advantage", ylim=(-1.8, 1.8))
plt.show()

# %% [markdown]
# A success on a hard problem counts more than one on an easy problem; so does a failure on an easy one. A group that
# agrees counts nothing: everything went as expected. And because of the division, the scale of the rewards is lost:

# %%
print("rewards x 10, plus 5:", [round(v, 3) for v in group_normalized(10 * rewards + 5, G)[:8].tolist()])
print("as they were:        ", [round(v, 3) for v in group_normalized(rewards, G)[:8].tolist()])
assert torch.allclose(group_normalized(10 * rewards + 5, G), group_normalized(rewards, G), atol=1e-3)

# %% [markdown]
# ### How good a baseline is it?
#
# $V(x)$ is the mean reward of all answers the policy might give to $x$. For a reward of 0 or 1 it is the success rate
# $p$, and the mean of $G$ answers misses it with the variance $p(1-p)/G$. We can check that. The embedded model answers
# problems very often; the mean over these answers stands for $V(x)$. Then it answers anew, and we look at the new
# answers through groups.

# %%
problems = task.problems("train")[: pick(6, 72)]
many = pick(32, 128)


@torch.no_grad()
def sample_rewards(problems, answers: int) -> torch.Tensor:
    """Rewards of `answers` samples of each problem: [problems, answers]."""
    found = []
    for part in range(0, len(problems), 8):
        few = problems[part : part + 8]
        rollout = engine.generate([policy.prompt(p.question) for p in few], answers, 80, config.sampling)
        texts = policy.texts(rollout.completion_ids, rollout.completion_mask)
        right = [task.verify(text, few[i // answers].gold).strict for i, text in enumerate(texts)]
        found.append((torch.tensor(right) & rollout.finished).float().view(-1, answers))
    return torch.cat(found)


torch.manual_seed(1)
success = sample_rewards(problems, many).mean(1)  # stands for V(x)
fresh = sample_rewards(problems, 64)  # [problems, 64], for groups
print(f"{len(problems)} problems x {many} answers, mean success rate {success.mean():.3f}")
print("success rates, sorted:", [round(v, 2) for v in success.sort().values[:: max(1, len(problems) // 12)].tolist()])

# %%
sizes = [2, 4, 8, 16, 32]
error = [(fresh.view(len(fresh), -1, size).mean(2) - success[:, None]).square().mean().item() for size in sizes]
variance = (success * (1 - success)).mean().item()
fig, ax = plt.subplots(figsize=(6, 3.2))
expected = [variance * (1 / size + 1 / many) for size in sizes]  # V(x) itself is a mean of `many` answers
ax.plot(sizes, expected, color=BLACK, label=f"mean of p (1 − p) × (1/G + 1/{many})")
ax.plot(sizes, error, color=BLUE, marker="o", linestyle="", label="measured")
ax.set_xscale("log", base=2)
ax.set_yscale("log")
ax.set_xticks(sizes, sizes)
ax.set(xlabel="group size G", ylabel="squared error", title="The mean of a group as an estimate of V(x)")
ax.legend(frameon=False)
ax.grid(alpha=0.25)
plt.show()

# %% [markdown]
# A group of eight is still a rough estimate. But does it matter? A baseline need not be right; it has to take noise out
# of the gradient. So we measure that: the noise of the gradient of lesson 01, with the baseline of a group against the
# noise with the exact $V(x)$.
#
# To make "exact" exact, 64 answers to a problem are taken as **all there are**, each with the probability 1/64. Then
# $V(x)$ is their mean reward, and groups are drawn from them. The noise of any weighted sum of their scores
# $s_i = \nabla \log \pi(y_i)$ needs nothing but the table of products $s_i \cdot s_j$.

# %%
from rlcourse.logprobs import token_logprobs


def score_products(policy, engine, problem, answers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards [answers] of samples to a problem, and the products of their scores [answers, answers]; mean score 0."""
    rollout = engine.generate([policy.prompt(problem.question)], answers, 80, config.sampling)
    texts = policy.texts(rollout.completion_ids, rollout.completion_mask)
    rewards = torch.tensor([float(task.verify(text, problem.gold).strict) for text in texts]) * rollout.finished
    scores = torch.empty(answers, sum(p.numel() for p in policy.model.parameters()))
    for row in range(answers):
        logprobs, _ = token_logprobs(policy.model, rollout[row : row + 1], config.sampling, chunk=4096)
        gradient = torch.autograd.grad(logprobs.sum(), list(policy.model.parameters()))
        torch.cat([g.flatten() for g in gradient], out=scores[row])
    scores -= scores.mean(0)  # over all answers there are, the mean score is 0
    return rewards, (scores @ scores.T).double()


def noise(weights: torch.Tensor, products: torch.Tensor, target: torch.Tensor) -> float:
    """Mean squared distance of the sums of weighted scores from the one with weights `target`. weights: [draws, n]."""
    off = weights - target
    return ((off @ products) * off).sum(1).mean().item()


middle = ((success > 0.15) & (success < 0.85)).nonzero()[:, 0].tolist()[: pick(1, 8)]
tables = [score_products(policy, engine, problems[i], pick(16, 64)) for i in middle]
print(f"{len(tables)} problems, success rates {[round(rewards.mean().item(), 2) for rewards, _ in tables]}")


# %%
def group_noise(rewards: torch.Tensor, products: torch.Tensor, G: int, draws: int = 4000) -> float:
    """Noise of an answer's share in the gradient, groups of G with leave-one-out over that with the exact V(x)."""
    n = len(rewards)
    exact = (rewards - rewards.mean()).double()
    drawn = torch.randint(n, (draws, G))
    r = rewards[drawn].double()
    advantage = (r - r.mean(1, keepdim=True)) * G / (G - 1)
    weights = torch.zeros(draws, n, dtype=torch.float64).scatter_add(1, drawn, advantage / G)
    return G * noise(weights, products, exact / n) / noise(exact.diag(), products, exact / n)


def plain_noise(rewards: torch.Tensor, products: torch.Tensor) -> float:
    """The same without any baseline."""
    exact, n = (rewards - rewards.mean()).double(), len(rewards)
    return noise(rewards.double().diag(), products, exact / n) / noise(exact.diag(), products, exact / n)


def all_noise(tables) -> tuple[torch.Tensor, torch.Tensor]:
    """`group_noise` [problems, sizes] and `plain_noise` [problems] of the tables; prints their means."""
    torch.manual_seed(2)
    ratios = torch.tensor([[group_noise(r, k, size) for size in sizes] for r, k in tables])
    without, shifted = (torch.tensor([plain_noise(r - c, k) for r, k in tables]) for c in (0, 1))
    groups = ", ".join(f"{size}: {v:.2f}" for size, v in zip(sizes, ratios.mean(0), strict=True))
    print(f"exact V(x) 1.00; groups of {groups}; no baseline, rewards 0 and 1: {without.mean():.2f},", end=" ")
    print(f"rewards -1 and 0: {shifted.mean():.2f}")
    return ratios, without


ratios, without = all_noise(tables)


# %%
def draw_noise(ax, ratios: torch.Tensor, without: torch.Tensor, title: str) -> None:
    """Noise against group size, a thin line for each problem."""
    ax.plot(sizes, ratios.T, color=SKY, linewidth=1)
    ax.plot(sizes, ratios.mean(0), color=BLUE, marker="o", linewidth=2, label="baseline: the others of the group")
    ax.axhline(1, color=BLACK, linewidth=1, label="baseline: the exact V(x)")
    ax.axhline(without.mean(), color=VERMILION, linestyle="--", label="no baseline, rewards 0 and 1")
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, sizes)
    ax.set(xlabel="group size G", ylabel="noise, exact V(x) = 1", title=title, ylim=(0, None))
    ax.legend(frameon=False, fontsize=9, title=f"mean of {len(ratios)} problems, thin: each")


fig, ax = plt.subplots(figsize=(6.5, 3.4))
draw_noise(ax, ratios, without, "Gradient noise of an answer, before training")
plt.show()

# %% [markdown]
# Read it from the left. In pairs the baseline is so poor that it adds far more noise than it takes out. The larger the
# group, the nearer it comes to the exact value, and the last point is within a tenth of it: in this sense the
# critic can go, if the group is large enough.
#
# And the dashed line: with rewards 0 and 1, **no baseline is better still**. Lesson 01 found the same, and why: wrong
# answers have long scores, and a reward of 0 drops them. The last number printed is the other side of that luck. Pay −1
# and 0 instead, which changes nothing in what is asked for, and the noise is a multiple. A group does not care: a
# constant added to all rewards goes out with the mean.
#
# ### The own reward in the mean
#
# $\bar R$ contains $R_i$, so a success pays part of its own price. Lesson 01 went through all groups of a toy to show
# what that does. Here once more on the smallest case, a *bandit*: one decision, three actions with rewards, all groups
# of $G$ with their probabilities.

# %%
pi, r_of = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.0, 1.0, 0.4], dtype=torch.float64)
scores = torch.eye(3, dtype=torch.float64) - pi  # gradient of log pi in the logits, a row for each action
exact = pi * (r_of - pi @ r_of)
for G in (2, 4, 8):
    drawn = torch.cartesian_prod(*[torch.arange(3)] * G)  # [3^G, G]
    chance, r = pi[drawn].prod(1), r_of[drawn]
    expected = {}
    for name, scale in (("mean of the group", 1.0), ("leave one out", G / (G - 1))):
        advantage = scale * (r - r.mean(1, keepdim=True))
        expected[name] = (chance[:, None] * (advantage[..., None] * scores[drawn]).mean(1)).sum(0)
    torch.testing.assert_close(expected["mean of the group"], (1 - 1 / G) * exact)
    torch.testing.assert_close(expected["leave one out"], exact)
    factors = [f"{name} {(v / exact).mean():.4f}" for name, v in expected.items()]
    print(f"G = {G}, {len(drawn):4} groups, expected over exact gradient:", ", ".join(factors))

# %% [markdown]
# Exactly $1 - 1/G$, at every action. RLOO repairs it by the factor $G/(G-1)$. GRPO does not bother, and a constant
# factor is no harm. What is **not** a constant factor is its division by the deviation: exercise q4 computes what that
# does to the expected gradient, and lesson 04 what to think of it.
#
# ## 3 · The loss, whole
#
# Everything else is PPO, with four choices:
#
# $$\mathcal{L} = \frac{1}{N} \sum_{i=1}^{N} \frac{1}{|o_i|} \sum_{t=1}^{|o_i|} \Bigl[
# -\min\bigl(r_{i,t} \hat A_i,\ \mathrm{clip}(r_{i,t}, 1-\epsilon, 1+\epsilon)\, \hat A_i\bigr)
# + \beta \bigl(e^{-d_{i,t}} - 1 + d_{i,t}\bigr) \Bigr] ,$$
#
# with $N$ rows, $|o_i|$ tokens in answer $i$, the ratio $r_{i,t} = \pi(o_{i,t}) / \pi_{\text{old}}(o_{i,t})$ and
# $d_{i,t} = \log \pi(o_{i,t}) - \log \pi_{\text{ref}}(o_{i,t})$.
#
# 1. One advantage for the whole answer, the same at each of its tokens. No $V(s_t)$, no GAE.
# 2. The ratio and the clip of each token, as in PPO.
# 3. Mean over the tokens of an answer **first**, then over answers: a *sequence mean*.
# 4. The KL to the reference as a term of the loss, by the estimator k3 of lesson 02, with the weight $\beta$. PPO for
#    language models takes it off the reward instead.
#
# Two answers, four places, small enough to print. The first answer was better than its group, the second worse and is
# one token shorter.

# %%
old = torch.tensor([[-1.0, -0.5, -2.0, -0.7], [-0.8, -1.5, -0.4, 0.0]])
new = old + torch.tensor([[0.3, 0.0, -0.3, 0.1], [0.3, -0.3, 0.05, 0.0]])
ref, A = old - 0.1, torch.tensor([1.0, -1.0])
mask = torch.tensor([[True, True, True, True], [True, True, True, False]])
ratio = (new - old).exp()
clipped = ratio.clamp(0.8, 1.2)
surrogate = torch.minimum(ratio * A[:, None], clipped * A[:, None])
d = new - ref
k3 = (-d).exp() - 1 + d
for name, value in {"ratio": ratio, "clipped": clipped, "surrogate": surrogate, "k3": k3}.items():
    print(f"{name:10}", [[round(v, 3) for v in row] for row in value.tolist()])

# %% [markdown]
# Follow the ratios 1.35 and 0.741 through the table. Where the ratio has moved **with** the advantage and beyond the
# clip (1.35 at $A = 1$, 0.741 at $A = -1$), the surrogate is the clipped one, and flat. Where it has moved against it,
# the smaller of the two is the unclipped one, and the gradient stays. Now the means:


# %%
def grpo_loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, clip: float, beta: float) -> torch.Tensor:
    """The loss of GRPO. log-probs and mask: [rows, length]; advantages: [rows]. What is masked is filled first."""
    new, old, ref = (x.masked_fill(~mask, 0.0) for x in (logprobs, old_logprobs, ref_logprobs))
    ratio, advantage, d = (new - old).exp(), advantages[:, None], new - ref
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    by_token = (beta * ((-d).exp() - 1 + d) - surrogate).masked_fill(~mask, 0.0)
    return (by_token.sum(1) / mask.sum(1).clamp(min=1)).mean()


from rlcourse.losses import aggregate, kl_estimate, token_loss

by_row = ((0.04 * k3 - surrogate) * mask).sum(1) / mask.sum(1)
print("each answer:", [round(v, 4) for v in by_row.tolist()], f"their mean: {by_row.mean():.4f}")
by_token, was_clipped = token_loss(new, old, A, mask, surrogate="clip", ratio="token", clip_low=0.2, clip_high=0.2)
share = {"rows": 2, "tokens": int(mask.sum()), "max_new_tokens": 4}
package = aggregate(by_token + 0.04 * kl_estimate(new, ref, "k3"), mask, "sequence_mean", **share)
ours = grpo_loss(new, old, ref, A, mask, clip=0.2, beta=0.04)
print(f"grpo_loss {ours:.4f}, rlcourse {package:.4f}; the clip holds", was_clipped.int().tolist())
assert torch.allclose(ours, package) and torch.allclose(ours, by_row.mean())

# %% [markdown]
# Does the trainer do the same on a real batch? We let it make one update on the batch of section 1, so that ratio and
# KL are not trivial. Then we compute the gradient of our loss at the new policy, and compare its norm with that of the
# trainer's second update on the batch. A step of two updates reports the mean of their norms.

# %%
settings = {"kl_coef": 0.04, "lr": 2e-4, "warmup_steps": 0, "max_grad_norm": 1e9, "micro_batch_rows": 32}


def updated(times: int) -> tuple[Learner, dict]:
    """The policy after some updates on the batch, beside its start as the reference; the metrics of these updates."""
    with_kl = make_config(algorithm="grpo", num_prompts=config.num_prompts, inner_epochs=times, **settings)
    learner, earned = Learner(copy.deepcopy(policy), with_kl), batch.rewards.tolist()
    torch.manual_seed(0)
    metrics, _ = train_step(learner, Replay(batch.rollout), task, order, step=0, reward_function=lambda *_: earned)
    return learner, metrics


(learner, once), (_, twice) = updated(1), updated(2)
logprobs, _ = learner.logprobs_and_values(batch.rollout)
ref_logprobs, mask = make_batch(learner, batch).ref_logprobs, batch.rollout.completion_mask
A = group_normalized(batch.rewards, config.num_generations)
loss = grpo_loss(logprobs, batch.rollout.logprobs, ref_logprobs, A, mask, 0.2, 0.04)
ours = torch.autograd.grad(loss, list(learner.policy.model.parameters()))
ours = torch.stack([g.square().sum() for g in ours]).sum().sqrt().item()
theirs = 2 * twice["grad_norm"] - once["grad_norm"]
print(f"gradient norm: ours {ours:.5f}, the trainer's {theirs:.5f}")
print(f"at this point KL {kl_estimate(logprobs, ref_logprobs, 'k3')[mask].mean():.4f},", end=" ")
print(f"tokens whose gradient the clip took away {2 * twice['clip_fraction'] - once['clip_fraction']:.1%}")
assert abs(ours / theirs - 1) < 1e-3

# %% [markdown]
# The same. Note what the first update of a rollout looks like: ratio 1 everywhere, nothing to clip, and without a
# reference no KL. Then GRPO's gradient is that of $\hat A_i \log \pi$ with sequence means: REINFORCE with a baseline
# from the group. The default here is one update a rollout and $\beta = 0$; DAPO and Dr. GRPO leave the KL out, too.
#
# ## 4 · Groups that say nothing
#
# A group in which all answers are right, or all wrong, has advantage exactly 0 at every token. It was paid for, and
# teaches nothing. How often does that happen? If a problem is solved with probability $p$,
#
# $$P(\text{no signal}) = p^G + (1-p)^G .$$

# %%
print("signal?", has_signal(rewards, 4).tolist(), "; last group:", group_normalized(rewards, 4)[8:].tolist())
p = torch.linspace(0, 1, 201)
fig, ax = plt.subplots(figsize=(6.5, 3.4))
for size, color, style in ((2, ORANGE, "-"), (4, GREEN, "--"), (8, BLUE, "-."), (16, PURPLE, ":"), (64, BLACK, "-")):
    ax.plot(p, 100 * (p**size + (1 - p) ** size), style, color=color, linewidth=2, label=f"G = {size}")
ax.set(xlabel="success rate p of the problem", ylabel="groups without signal, %", title="Too easy and too hard")
ax.legend(frameon=False, loc="upper center")
plt.show()

# %% [markdown]
# The valley is wide for large groups and narrow for small ones. What counts is where the problems of a data set lie
# in it. Above we have estimated the success rate of each problem; now the new answers are put into groups, and we
# count.


# %%
def no_signal(p: torch.Tensor, G: int) -> torch.Tensor:
    """Probability that a group of G has no signal."""
    return p**G + (1 - p) ** G


fig, axes = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
axes[0].hist(success, bins=20, range=(0, 1), color=SKY, edgecolor="white")
axes[0].axvline(success.mean(), color=BLACK, linestyle="--", label=f"mean {success.mean():.2f}")
axes[0].set(xlabel="success rate, sampled", ylabel="problems", title=f"{len(problems)} problems, embedded model")
axes[0].legend(frameon=False)
silent = [(~has_signal(fresh.flatten(), size)).float().view(len(fresh), -1).mean(1) for size in sizes]  # by problem
counted = [100 * found.mean() for found in silent]
by_problem = [100 * no_signal(success, size).mean() for size in sizes]
by_mean = [100 * no_signal(success.mean(), size) for size in sizes]
axes[1].plot(sizes, by_problem, color=BLUE, label="formula, mean over problems")
axes[1].plot(sizes, counted, color=VERMILION, marker="o", linestyle="", label="counted")
axes[1].plot(sizes, by_mean, color=PURPLE, linestyle=":", label="formula of the mean success rate")
axes[1].set_xscale("log", base=2)
axes[1].set_xticks(sizes, sizes)
axes[1].set(xlabel="group size G", ylabel="groups without signal, %", ylim=(0, 100), title="Formula and count")
axes[1].legend(frameon=False, fontsize=9)
plt.show()
for size, found in zip(sizes, silent, strict=True):
    gap = no_signal(success, size) - found
    error = gap.std() / len(gap) ** 0.5
    print(f"G = {size:2}: formula {no_signal(success, size).mean():5.1%}, counted {found.mean():5.1%};", end=" ")
    print(f"difference {100 * gap.mean():+.1f} ± {100 * error:.1f} points (standard error over problems)")

# %% [markdown]
# Formula and count agree as far as the standard error says; for large groups the formula is a little high, because it
# is bent and the success rates in it are themselves estimates. The dotted line is far off: it puts the mean success
# rate into the formula. Problems differ, and those at the ends make more silent groups than the middle makes up for.
#
# ### During training
#
# As the policy improves, problems move from the left end of the valley to the right one: at first silence is failure,
# later it is success. **Look for** where the fall ends.

# %%
colors = {"64x2": ORANGE, "32x4": GREEN, "16x8": BLUE, "8x16": PURPLE, "2x64": BLACK}
styles = {"64x2": "-", "32x4": "--", "16x8": "-.", "8x16": ":", "2x64": (0, (5, 1))}


def over_steps(record: dict, key: str) -> tuple[list[float], torch.Tensor]:
    """A recorded metric as means over windows of five steps: their middles, and [seeds, windows]."""
    rows = torch.tensor([seed["steps"][key] for seed in record["results"]])
    return [step + 2.5 for step in range(0, rows.shape[1], 5)], rows.view(len(rows), -1, 5).mean(2)


def band(ax, x, runs: torch.Tensor, color: str, style, label: str) -> None:
    """Mean over seeds, and a band from least to most. runs: [seeds, points]."""
    ax.fill_between(x, runs.amin(0), runs.amax(0), color=color, alpha=0.15, linewidth=0)
    ax.plot(x, runs.mean(0), linestyle=style, color=color, linewidth=2, label=label)


record = load_curve("lesson04_default_grpo")
fig, ax = plt.subplots(figsize=(6.5, 3.4))
for key, label, color, style in (
    ("reward", "answers that are right", ORANGE, "--"),
    ("groups_without_signal", "groups without signal", BLUE, "-"),
):
    x, runs = over_steps(record, key)
    band(ax, x, 100 * runs, color, style, label)
ax.set(xlabel="training step", ylabel="%", ylim=(0, 100), title="GRPO at the default settings, 16 prompts x 8 answers")
ax.legend(frameon=False, title=f"mean of {len(record['results'])} seeds, band: range", loc="upper left")
plt.show()
print("silent, mean over seeds, by five steps:", [f"{v:.0%}" for v in runs.mean(0).tolist()])
print(f"recorded on {record['device']}, {record['date']}, with `{record['command']}`")

# %% [markdown]
# The share falls while hard problems come within reach. Then it turns: problems that have become easy arrive at the
# right end. On a data set that the policy masters, it goes all the way to one.
#
# ### Dynamic sampling
#
# DAPO (Yu et al. 2025) takes the obvious way out: throw silent groups away and sample other prompts, until the batch is
# full of groups that differ. In `rlcourse` that is the switch `dynamic_sampling`, with four rollouts a step at most.
# What does it cost? We count the prompts it draws.

# %%
lines = ["| dynamic sampling | answers sampled | answers in the batch | groups with signal in it | seconds |",
         "| --- | --- | --- | --- | --- |"]  # fmt: skip
for dynamic in (False, True):
    torch.manual_seed(3)
    trial = make_config(algorithm="grpo", num_prompts=config.num_prompts, dynamic_sampling=dynamic)
    order, start = PromptSampler(task.problems("train"), 0), time.perf_counter()
    found, _ = collect(policy, engine, task, order, trial)
    seconds, groups = time.perf_counter() - start, has_signal(found.rewards, trial.num_generations)
    sampled, share = order.position * trial.num_generations, groups.float().mean()
    lines.append(f"| {dynamic} | {sampled} | {len(found.rewards)} | {share:.0%} | {seconds:.1f} |")
display(Markdown("\n".join(lines)))

# %% [markdown]
# The batch is full, and the rollout costs a multiple. Is it worth it? The same training as above, recorded with the
# switch. Left over training steps, right over answers **sampled**: the price of a step is mostly there on large models.


# %%
def accuracy(name: str) -> tuple[list[int], torch.Tensor]:
    """Steps and validation accuracy in percent [seeds, evaluations] of a recorded variant."""
    seeds = load_curve(f"lesson03_{name}")["results"]
    return [row["step"] for row in seeds[0]["evals"]], torch.tensor(
        [[100 * row["accuracy"] for row in seed["evals"]] for seed in seeds]
    )


fig, axes = plt.subplots(1, 2, figsize=(10, 3.4), sharey=True, layout="constrained")
both = {"16x8": ("16 x 8", BLUE, "-"), "dynamic": ("16 x 8, dynamic sampling", VERMILION, "--")}
for name, (label, color, style) in both.items():
    steps, runs = accuracy(name)
    record = load_curve(f"lesson03_{name}")
    rows = torch.tensor([seed["steps"]["rows_sampled"] for seed in record["results"]]).float().mean(0)
    sampled = torch.cat([torch.zeros(1), rows.cumsum(0)])[steps]
    band(axes[0], steps, runs, color, style, label)
    band(axes[1], sampled, runs, color, style, label)
    print(f"{label:25} {sampled[-1]:6,.0f} answers sampled in {steps[-1]} steps, mean of the seeds")
axes[0].set(xlabel="training step", ylabel="validation, greedy, % right", ylim=(30, 100))
axes[1].set(xlabel="answers sampled")
axes[1].legend(frameon=False, loc="lower right", title=f"mean of {len(runs)} seeds, band: range")
plt.show()
plain_runs, dynamic_runs = accuracy("16x8")[1], accuracy("dynamic")[1]
above = [step for step, a, b in zip(steps, plain_runs.amax(0), dynamic_runs.amin(0), strict=True) if b > a]
print("every seed with dynamic sampling is above every seed without at step", above)

# %% [markdown]
# Per step it helps a little in the middle of training, and the end is the same within the spread. Per answer sampled it
# is behind all the way: it samples about twice as many. Part of that is the way it is done here, by whole rounds of
# prompts whose surplus is thrown away. So dynamic sampling does not save anything. It keeps the batch, and with it the
# noise of the gradient, the same throughout; that is worth its price where the update is what costs, or where nearly
# all groups have gone silent.
#
# ## 5 · Group size against batch size
#
# A step has room for 128 answers. Are they 64 prompts with two answers each, or two prompts with 64 each? Large groups
# have the better baseline and are rarely silent. Many prompts make the gradient that of the data set, not that of a few
# problems. Two quantities pull in opposite directions, so there should be a middle.
#
# First the gradient itself. How much of it is signal? Take the gradients $g_1, g_2, \dots$ of independent batches at
# one and the same policy. What they have in common is their mean. So the share of signal in the squared length is
#
# $$\frac{\mathbb{E}[g_i \cdot g_j]}{\mathbb{E}[g_i \cdot g_i]}, \quad i \ne j ,$$
#
# which is 1 without noise and 0 for noise alone. Recorded at the start and after 20 steps of training.

# %%
shapes = list(lesson03.SHAPES)
record = load_curve("lesson03_noise")
fig, axes = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
for step, color, marker, shift in ((0, BLUE, "o", -0.08), (20, VERMILION, "s", 0.08)):
    for ax, key in zip(axes, ("signal", "silent"), strict=True):
        runs = torch.tensor([[row[key] for row in seed["shapes"] if row["step"] == step] for seed in record["results"]])
        x = torch.arange(len(shapes)) + shift
        ax.vlines(x, 100 * runs.amin(0), 100 * runs.amax(0), color=color, alpha=0.5, linewidth=3)
        ax.plot(x, 100 * runs.mean(0), color=color, marker=marker, linestyle="", label=f"after {step} steps")
titles = ("Signal in the gradient of a step", "Groups without signal")
for ax, title in zip(axes, titles, strict=True):
    ax.set_xticks(range(len(shapes)), shapes)
    ax.set(xlabel="prompts x answers", ylabel="%", ylim=(-3, None), title=title)
axes[1].legend(frameon=False, title=f"mean of {len(record['results'])} seeds, line: range")
plt.show()
print(f"{record['setup']['batches']} batches each; recorded on {record['device']}, {record['date']},", end=" ")
print(f"with `{record['command']}`")

# %% [markdown]
# Most of a gradient is noise at every split. After 20 steps `2x64` has the least signal on average, although none of
# its groups is silent, or hardly any: two problems do not speak for all, and a better baseline does not change that.
# Among the other four most ranges overlap, and no order of the means holds at both times, so we do not rank them. In
# particular `64x2` is not behind at the start, where four out of five of its groups are silent: those that are left
# come from many problems.
#
# Now training, with small steps so that there is a difference to see: half the default learning rate, three seeds each.
# **Look for** the order of the lines in the first half.

# %%
fig, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
for name in shapes:
    steps, runs = accuracy(name)
    band(axes[0], steps, runs, colors[name], styles[name], name)
    x, silent = over_steps(load_curve(f"lesson03_{name}"), "groups_without_signal")
    band(axes[1], x, 100 * silent, colors[name], styles[name], name)
axes[0].set(xlabel="training step", ylabel="validation, greedy, % right", ylim=(35, 92), title="128 answers a step")
axes[1].set(xlabel="training step", ylabel="groups without signal, %", ylim=(0, 100), title="Silent groups")
axes[0].legend(frameon=False, loc="lower right", fontsize=9, ncols=2, title="mean of 3 seeds, band: range")
plt.show()
record = load_curve("lesson03_16x8")
print(f"recorded on {record['device']}, {record['date']}, with `python -m rlcourse.course.lessons.lesson03`")

# %%
lines = ["| prompts x answers | at step 10 | step 20 | step 30 | step 40 | gradient norm, first steps | tokens |",
         "| --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
for name in shapes:
    steps, runs = accuracy(name)
    columns = [runs[:, steps.index(step)] for step in (10, 20, 30, 40)]
    cells = [f"{column.min():.1f} to {column.max():.1f} %" for column in columns]
    norm, length = (over_steps(load_curve(f"lesson03_{name}"), key)[1] for key in ("grad_norm", "length"))
    norm, length = norm[:, 0], length.mean(1)
    cells += [f"{norm.min():.2f} to {norm.max():.2f}", f"{length.min():.1f} to {length.max():.1f}"]
    lines.append(f"| {name} | {' | '.join(cells)} |")
display(Markdown("\n".join(lines)))
curves = {name: accuracy(name)[1] for name in shapes}
late = steps.index(25)
worst = torch.stack([curves[name].amin(0) for name in ("32x4", "16x8", "8x16")])  # [3, evaluations]
best = torch.stack([curves[name].amax(0) for name in ("32x4", "16x8", "8x16")])
assert (curves["2x64"].amax(0)[late:] < worst.amin(0)[late:]).all()  # its best seed, below the worst of the middle
assert all((curves["64x2"].mean(0) < curves[name].mean(0))[1:].all() for name in ("32x4", "16x8", "8x16"))
apart = [step for step, low, high in zip(steps, worst.amax(0), best.amin(0), strict=True) if low > high]
print("evaluations at which the ranges of 32x4, 16x8 and 8x16 do not all overlap: step", apart)

# %% [markdown]
# **The ends lose.** From step 25 on the best seed of `2x64` is below the worst seed of the three in the middle, at
# every evaluation. Two problems a step say little about the others, however exactly their baseline is known. `64x2`
# is behind the three on average at every evaluation, but its range mostly touches theirs: it goes on learning from
# the few groups that differ.
#
# **The middle is flat.** Between 4, 8 and 16 answers to a prompt there is no difference that three seeds could show. So
# the group size is no delicate choice. Take 8, and change it if groups are mostly silent (larger, or better chosen
# problems) or if a step sees too few problems (smaller).
#
# Two cautions. All splits ran with one learning rate, tuned for none of them. And the gradient norm in the table, which
# grows with the group size because fewer rows are zero and fewer problems average out, says nothing about progress:
# AdamW divides the size out, and the direction is what counts.
#
# ## 6 · Train
#
# A short run of GRPO with the trainer of the package, at its default settings. It is one run.

# %%
from rlcourse.measure.plots import seed_band
from rlcourse.runs import read_lines
from rlcourse.trainer import train

few = {"steps": pick(2, 15), "eval_every": pick(2, 5), "num_prompts": config.num_prompts, "micro_batch_rows": 32}
least = {"eval_validation": pick(20, 200), "eval_problems": 1, "pass_k": 0, "save_every": 0}
result = train(make_config(algorithm="grpo", seed=7, output=tempfile.mkdtemp(), **few, **least))
metrics = read_lines(Path(result["folder"]) / "metrics.jsonl")
evals = read_lines(Path(result["folder"]) / "evals.jsonl")
for row in metrics[:: pick(1, 3)]:
    print(
        f"step {row['step']:2}: reward {row['reward']:.2f}, silent groups {row['groups_without_signal']:.0%},", end=" "
    )
    print(f"length {row['length']:.0f}, entropy {row['entropy']:.2f}, gradient norm {row['grad_norm']:.2f}")
print("validation", " → ".join(f"{e['accuracy']:.1%}" for e in evals))

# %% [markdown]
# Now the measurement of section 2 again, with the policy that has just been trained. Its answers to the same problems
# are right more often. **Look for** the small groups, and for the dashed line.

# %%
from rlcourse.checkpoint import latest_checkpoint
from rlcourse.policy import load_policy
from rlcourse.rollout import make_engine

trained = load_policy(str(latest_checkpoint(Path(result["folder"]))))
trained_engine = make_engine(trained, "fast", torch.float32)
torch.manual_seed(4)
later = [score_products(trained, trained_engine, problems[i], pick(16, 64)) for i in middle]
later = [(r, k) for r, k in later if 0.05 < r.mean() < 0.95] or tables[:1]  # a group that always agrees has no noise
print(f"success rates of the same problems {[round(r.mean().item(), 2) for r, _ in later]}")
fig, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained", sharey=True)
draw_noise(axes[0], ratios, without, "before training")
draw_noise(axes[1], *all_noise(later), "after training")
plt.show()

# %% [markdown]
# The groups have become a better baseline: with success rates nearer the middle, less depends on getting the mean
# exactly right. The dashed line has not come up. It has gone further down: what a trained policy gets right, it writes
# with probable tokens, so the right answers have the short scores. With these rewards no baseline at all has the least
# noise, before and after; with rewards −1 and 0 it has more than any group, pairs included. The group is not the best
# baseline. It is a decent one that costs nothing and does not depend on luck.

# %% [markdown]
# Against PPO, from the record: the same 128 answers a step, the same settings, three seeds each. On the left over
# steps, on the right over wall seconds of the whole run, evaluations included.

# %%
fig, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
for name in ("grpo", "ppo"):
    record = load_curve(name)
    color, style, marker = STYLES[name]
    steps, low, mean, high = seed_band(record["results"])
    wall = [seed["summary"]["wall_seconds"] for seed in record["results"]]
    seconds = [step / steps[-1] * statistics.mean(wall) for step in steps]
    for ax, x in zip(axes, (steps, seconds), strict=True):
        ax.fill_between(x, [100 * v for v in low], [100 * v for v in high], color=color, alpha=0.18, linewidth=0)
        ax.plot(x, [100 * v for v in mean], color=color, linestyle=style, marker=marker, label=name.upper())
    after = [seed["summary"]["accuracy_after"] for seed in record["results"]]
    print(f"{name.upper():4} {record['date']}, {record['device']}: {min(wall):.0f} to {max(wall):.0f} s,", end=" ")
    print(f"test accuracy {min(after):.1%} to {max(after):.1%}, {len(after)} seeds")
axes[0].scatter([e["step"] for e in evals], [100 * e["accuracy"] for e in evals], color=BLACK, s=24, zorder=3,
                label="your run just now: GRPO")  # fmt: skip
axes[0].set(xlabel="training step", ylabel="validation, greedy, % right", ylim=(30, 100))
axes[1].set(xlabel="seconds, spread evenly over the steps")
axes[0].legend(frameon=False, loc="lower right", title="mean of 3 seeds, band: range")
plt.show()

# %% [markdown]
# The end is the same within the spread. The beginning is not: PPO's critic has to learn first, and the first
# evaluations are below those of GRPO. And each step of PPO takes longer. So on a task with one reward at the end, the
# critic bought nothing here. Where rewards come along the way, or an answer is thousands of tokens long, a good critic
# can say **which part** was good. A group cannot.
#
# ## 7 · Two divisions to think about
#
# GRPO divides twice where the policy gradient does not: each advantage by the deviation of its group, and each answer
# by its length. In the batch of section 1, every point below is an answer: its length, and the weight of each of its
# tokens in the loss. **Look for** the wrong answers that are long.

# %%
lengths = batch.rollout.completion_lengths
A = group_normalized(batch.rewards, config.num_generations)
plain = group_centered(batch.rewards, config.num_generations)
weights = {"GRPO: advantage / length": A / lengths, "Dr. GRPO: centred reward / limit": plain / config.max_new_tokens}
fig, axes = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
for ax, (title, weight) in zip(axes, weights.items(), strict=True):
    for kind, color, marker in ((1, BLUE, "o"), (0, VERMILION, "x")):
        shown = (batch.rewards == kind) & (A != 0)
        ax.scatter(lengths[shown], weight[shown], color=color, marker=marker, s=22, label=("wrong", "right")[kind])
    ax.axhline(0, color=BLACK, linewidth=0.8)
    ax.set(title=title, xlabel="tokens of the answer", ylabel="weight of each token")
axes[0].legend(frameon=False)
plt.show()

# %% [markdown]
# On the left a token of a long wrong answer is hardly pushed at all, and the same mistake in a short answer is pushed
# hard. On the right the length plays no part. Nobody asked for the difference, and lesson 04 derives where it leads.
# The other division you can play with here.
#
# **Explore.** Toggle the rewards of a group of eight, and change what a right answer earns. What to look for: GRPO's
# advantages do not know how much there was to win; Dr. GRPO's, which only subtract the mean, do.


# %%
def draw_group(ax, right_earns: float, **right: bool) -> None:
    """Advantages of GRPO and Dr. GRPO side by side; one check box for each of eight answers."""
    rewards = right_earns * torch.tensor([float(value) for value in right.values()])
    x = torch.arange(len(rewards))
    ax.bar(x - 0.2, group_normalized(rewards, len(rewards)), 0.4, color=GREEN, label="GRPO")
    centred = group_centered(rewards, len(rewards))
    ax.bar(x + 0.2, centred, 0.4, color=BLUE, hatch="//", edgecolor="white", label="Dr. GRPO")
    ax.axhline(0, color=BLACK, linewidth=0.8)
    ax.set_xticks(x, ["right" if value else "wrong" for value in right.values()], fontsize=8)
    ax.set(ylabel="advantage", ylim=(-2.6, 2.6))
    ax.set_title(f"{sum(right.values())} of 8 right, a right answer earns {right_earns:g}", fontsize=11)
    ax.legend(frameon=False, fontsize=9, loc="lower right")


def toggles(*chosen: int) -> dict[str, bool]:
    """The check boxes, with those in `chosen` (1 to 8) on."""
    return {f"answer_{i}": i in chosen for i in range(1, 9)}


HALF, ALL_BUT_4 = (1, 2, 5, 6), (1, 2, 3, 5, 6, 7, 8)
cases = [(1.0, (2,)), (1.0, HALF), (1.0, ALL_BUT_4), (0.1, (2,)), (2.0, HALF), (1.0, range(1, 9))]
explorer(
    draw_group,
    static=[{"right_earns": earns} | toggles(*chosen) for earns, chosen in cases],
    right_earns=(1.0, 0.1, 2.0, 0.1),
    **toggles(2),
)

# %% [markdown]
# ## Check yourself
#
# <details><summary>1. A group has rewards 1, 0, 0, 0. What are its advantages in GRPO, roughly, and in Dr.
# GRPO?</summary>Mean 0.25, deviation 0.5. GRPO: 1.5 and three times −0.5. Dr. GRPO: 0.75 and three times
# −0.25.</details>
#
# <details><summary>2. Your model solves half of your problems. Does that mean few silent groups?</summary>Not by
# itself. If it always solves one half and never the other, all groups are silent. The distribution of the success
# rates counts, not their mean.</details>
#
# <details><summary>3. Somebody reshapes rewards with view(G, -1) and takes means along the first dimension. The code
# runs. What has been computed?</summary>Answers to different prompts are compared with each other. Easy prompts look
# good and hard ones bad, whatever the policy did: the baseline is no longer that of the prompt.</details>
#
# <details><summary>4. One update a rollout, β = 0. What do the ratio and the clip do in GRPO?</summary>Nothing. The
# ratio is 1 everywhere, its gradient is that of the log-prob, and nothing is clipped.</details>
#
# <details><summary>5. The share of groups without signal rises from 30 % to 70 % in training. Is that bad
# news?</summary>Look at the accuracy. If it has risen, the problems have become easy: fewer answers teach something,
# and the data set is nearly used up. If it has not, the policy may have collapsed to one answer for each
# problem.</details>
#
# <details><summary>6. Why may a row whose advantage is 0 be left out of the forward pass, and when not?</summary>Its
# gradient is exactly 0. With a KL term in the loss, or a critic to train, the row still counts.</details>
#
# ## Exercises
#
# [exercises/03_grpo.ipynb](../exercises/03_grpo.ipynb): the advantages, silent groups expected and counted, the whole
# loss, and the expected gradient by enumeration. Then go on to [04 · Dr. GRPO](04_dr_grpo.ipynb).
#
# ## Further reading
#
# - Z. Shao et al. 2024, *DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models*,
#   arXiv:2402.03300: GRPO, section 4.
# - DeepSeek-AI 2025, *DeepSeek-R1: Incentivizing Reasoning Capability in LLMs via Reinforcement Learning*,
#   arXiv:2501.12948: GRPO with rewards from a program.
# - W. Kool, H. van Hoof and M. Welling 2019, *Buy 4 REINFORCE Samples, Get a Baseline for Free!*, ICLR workshop.
# - A. Ahmadian et al. 2024, *Back to Basics*, arXiv:2402.14740: RLOO for language models.
# - Q. Yu et al. 2025, *DAPO: An Open-Source LLM Reinforcement Learning System at Scale*, arXiv:2503.14476: dynamic
#   sampling, section 3.2.
# - J. Schulman et al. 2017, *Proximal Policy Optimization Algorithms*, arXiv:1707.06347.
# - J. Schulman 2020, *Approximating KL Divergence*, joschu.net/blog/kl-approx.html: k1, k2, k3.
