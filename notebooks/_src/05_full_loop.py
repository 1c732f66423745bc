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
# - to write the whole training loop by hand, and to find every line of it again in `rlcourse.trainer`;
# - to measure whether the policy that samples is the policy that trains, and what top-k does to that;
# - to read a run: what each metric says, and which one speaks first when something is wrong;
# - to tell five failures apart, each shown here on purpose;
# - how sure an accuracy is, how to stop and resume a run, and what the same loop needs on a GPU.
#
# It uses what lessons 01 to 04 built: advantages, the clipped loss and its aggregation. Nothing about them is new here.

# %%
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown, display

from rlcourse.config import make_config
from rlcourse.course import pick
from rlcourse.measure.plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION

plt.rcParams["figure.dpi"] = 72
SCRATCH = Path(tempfile.mkdtemp())  # runs of this notebook go here
print("profile:", pick(smoke="smoke", full="full"))

# %% [markdown]
# ## 1 · One step, stage by stage
#
# A training step is five verbs: **roll out, verify, compare, lose, step**. First we do each once, on two easy problems
# with four answers each, so that everything can be printed.

# %%
from rlcourse.policy import load_policy
from rlcourse.rollout import make_engine
from rlcourse.tasks import load_task

task, policy = load_task("minigsm"), load_policy("embedded")
engine = make_engine(policy, "fast", torch.float32)
small = make_config("laptop", num_prompts=2, num_generations=4, max_new_tokens=48, device="cpu")
problems = [p for p in task.problems("train") if p.level == 1][:2]
for problem in problems:
    print(f"{problem.question}  → {problem.gold}")

# %% [markdown]
# **Roll out.** Each prompt is answered four times. The engine returns the tokens, a mask that is true up
# to and including the end-of-sequence token, and the log-prob with which each token was drawn. Rows are group-major:
# four answers to the first problem, then four to the second.

# %%
torch.manual_seed(5)
prompts = [policy.prompt(p.question, task.instruction) for p in problems]
rollout = engine.generate(prompts, small.num_generations, small.max_new_tokens, small.sampling)
texts = policy.texts(rollout.completion_ids, rollout.completion_mask)
for row, text in enumerate(texts):
    print(f"{row}  {int(rollout.completion_lengths[row]):3d} tokens   {text!r}")

# %% [markdown]
# **Verify.** The strict reading wants a line `#### NUMBER`; the number must equal the gold answer. An
# answer that was cut off at the token limit earns nothing, whatever it says.

# %%
golds = [p.gold for p in problems for _ in range(small.num_generations)]
right = [task.verify(text, gold).strict for text, gold in zip(texts, golds, strict=True)]
rewards = rollout.finished * torch.tensor(right).float()
print(rewards.view(small.num_prompts, small.num_generations))

# %% [markdown]
# **Compare.** Dr. GRPO's advantage: each reward less the mean of its group.

# %%
from rlcourse.advantages import group_centered

advantages = group_centered(rewards, small.num_generations)
print(advantages.view(small.num_prompts, small.num_generations))

# %% [markdown]
# **Lose.** One forward pass gives the log-prob of every sampled token once more, this time with a
# gradient. The clipped surrogate makes a loss of each token, the aggregation one number of all. Before the first update
# the ratio is 1 at each token, so the loss of a token is minus its advantage.

# %%
from rlcourse.logprobs import token_logprobs
from rlcourse.losses import aggregate, token_loss

mask = rollout.completion_mask
logprobs, _ = token_logprobs(policy.model, rollout, small.sampling, small.logprob_chunk)
clip = {"surrogate": "clip", "ratio": "token", "clip_low": 0.2, "clip_high": 0.2}
losses, clipped = token_loss(logprobs, rollout.logprobs, advantages, mask, **clip)
loss = aggregate(losses, mask, "constant", rows=8, tokens=int(mask.sum()), max_new_tokens=48)
torch.testing.assert_close(losses.detach()[mask], (-advantages[:, None] * mask)[mask], atol=1e-4, rtol=0)
print(f"loss {loss.item():+.4f}, clipped tokens {int(clipped.sum())} of {int(mask.sum())}")

# %% [markdown]
# **Step.** Backward, clip the norm of the gradient, AdamW.

# %%
optimizer = torch.optim.AdamW(policy.model.parameters(), lr=small.lr, betas=(0.9, 0.95), weight_decay=0.0)
loss.backward()
norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), small.max_grad_norm)
optimizer.step()
optimizer.zero_grad()
print(f"norm of the gradient {norm:.3f}, over {sum(p.numel() for p in policy.model.parameters()):,} parameters")

# %% [markdown]
# ## 2 · The loop
#
# The same lines, in two functions: one makes data, the other learns from it.

# %%
from rlcourse.tasks.prompts import PromptSampler


def roll_out_and_verify(policy, engine, order, config):
    """The rollout of the next prompts and its rewards [rows]."""
    problems = order.sample(config.num_prompts)
    prompts = [policy.prompt(p.question, task.instruction) for p in problems]
    rollout = engine.generate(prompts, config.num_generations, config.max_new_tokens, config.sampling)
    texts = policy.texts(rollout.completion_ids, rollout.completion_mask)
    golds = [p.gold for p in problems for _ in range(config.num_generations)]
    right = [task.verify(text, gold).strict for text, gold in zip(texts, golds, strict=True)]
    return rollout, rollout.finished * torch.tensor(right).float()


order = PromptSampler(task.problems("train"), seed=0)
_, rewards = roll_out_and_verify(policy, engine, order, small)
print("rewards of one rollout:", rewards.tolist())


# %%
def learn(policy, optimizer, rollout, rewards, config):
    """Advantages, loss, one optimizer step; returns the norm of the gradient."""
    advantages = group_centered(rewards, config.num_generations)
    shuffled = torch.randperm(config.rows)  # as the trainer does before it cuts mini-batches; here there is one
    rollout, advantages = rollout[shuffled], advantages[shuffled]
    mask = rollout.completion_mask
    logprobs, _ = token_logprobs(policy.model, rollout, config.sampling, config.logprob_chunk)
    losses, _ = token_loss(logprobs, rollout.logprobs, advantages, mask, **clip)
    loss = aggregate(losses, mask, "constant", rows=config.rows, tokens=1, max_new_tokens=config.max_new_tokens)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), config.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()


print("gradient norm:", learn(policy, optimizer, *roll_out_and_verify(policy, engine, order, small), small))

# %% [markdown]
# And the loop around them: 16 prompts with 8 answers each, a learning rate that warms up over five steps. (`tokens=1`
# above: the constant aggregation divides by rows × `max_new_tokens` and has no use for the number of tokens.)


# %%
def train_by_hand(config):
    """The reward and the gradient norm of each step."""
    torch.manual_seed(config.seed)
    policy = load_policy("embedded")
    engine = make_engine(policy, "fast", torch.float32)
    order = PromptSampler(task.problems("train"), config.seed)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0)
    history = []
    for step in range(config.steps):
        optimizer.param_groups[0]["lr"] = config.lr * min(1.0, (step + 1) / config.warmup_steps)
        rollout, rewards = roll_out_and_verify(policy, engine, order, config)
        norm = learn(policy, optimizer, rollout, rewards, config)
        history.append((rewards.mean().item(), norm))
    return history


config = make_config("laptop", steps=pick(smoke=2, full=4), device="cpu", eval_every=0, eval_problems=1, pass_k=0)
by_hand = train_by_hand(config)
print("\n".join(f"step {i}: reward {r:.4f}, gradient norm {n:.4f}" for i, (r, n) in enumerate(by_hand, 1)))

# %% [markdown]
# `rlcourse.trainer.train` is this loop with the rest of a run around it: evaluation, metrics, checkpoints, Ctrl-C. From
# the same seed it must see the same rewards and the same gradients.

# %%
from dataclasses import replace

from rlcourse.runs import read_lines
from rlcourse.trainer import resume, train

train(replace(config, output=str(SCRATCH), name="compared", save_every=0))
theirs = [(m["reward"], m["grad_norm"]) for m in read_lines(SCRATCH / "compared" / "metrics.jsonl")]
for step, (ours, other) in enumerate(zip(by_hand, theirs, strict=True), 1):
    print(f"step {step}: by hand {ours[0]:.4f} {ours[1]:.5f}    trainer {other[0]:.4f} {other[1]:.5f}")
torch.testing.assert_close(torch.tensor(by_hand), torch.tensor(theirs), atol=1e-4, rtol=1e-3)

# %% [markdown]
# Where each line lives, in the order in which a step passes through them:
#
# | by hand | in the package |
# | --- | --- |
# | `PromptSampler`, `generate`, `verify` | `collect` in `rlcourse/collect.py` |
# | `group_centered` | `make_batch` in `rlcourse/step.py` |
# | log-probs, loss | `train_step` in `rlcourse/step.py`, in micro-batches that fit the memory |
# | AdamW | `Learner` in `rlcourse/learner.py` |
# | the `for` loop | `Trainer._loop` in `rlcourse/trainer.py` |
#
# Now a run that is worth reading: two optimizer steps a rollout, so that the ratio leaves 1, and a frozen copy of the
# starting policy that does not pull (`kl_coef` is 0) but measures how far we have come. It trains here while you read
# on.

# %%
live = make_config(
    "laptop",
    steps=pick(smoke=3, full=40),
    minibatches=2,
    reference=True,
    eval_every=pick(smoke=3, full=5),
    eval_validation=pick(smoke=16, full=200),
    eval_problems=pick(smoke=32, full=1000),
    save_every=pick(smoke=2, full=20),
    pass_k=0,
    output=str(SCRATCH),
    name="live",
)
summary = train(live)
print(f"accuracy on {summary['eval_problems']} test problems:", end=" ")
print(f"{summary['accuracy_before']:.1%} before, {summary['accuracy_after']:.1%} after {summary['steps']} steps")

# %%
for path in sorted((SCRATCH / "live").rglob("*")):
    if path.is_file() and "checkpoints" not in path.parts:
        print(f"{path.name:15s} {path.stat().st_size:8,} bytes")
print("checkpoints:    ", *sorted(path.name for path in (SCRATCH / "live" / "checkpoints").iterdir()))
metrics = read_lines(SCRATCH / "live" / "metrics.jsonl")
print("\none line of metrics.jsonl, without its timing:")
short = {k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in metrics[-1].items() if k != "timing"}
print(json.dumps(short, indent=1))

# %% [markdown]
# ## 3 · Is the policy that samples the policy that trains?
#
# The policy gradient averages over answers **drawn from the policy it differentiates**. In practice two programs are at
# work: an engine that samples, and a forward pass that trains. They may disagree, because of rounding, and because of
# settings that only one of them knows: a top-k that the serving library has on by default, a temperature, a penalty.
#
# The test costs nothing. The engine keeps the log-prob of each token it draws; training computes it again. Before any
# update the two must be equal, and their difference is the **mismatch**.

# %%
from rlcourse.sampling import Sampling


def gaps(sampled_with, trained_with, dtype=torch.float32):
    """Recomputed less sampling log-prob of a rollout of the starting policy: [rows, length], nan on padding."""
    policy = load_policy("embedded")
    engine = make_engine(policy, "fast", dtype)
    torch.manual_seed(0)
    prompts = [policy.prompt(p.question) for p in task.problems("train")[: pick(smoke=8, full=32)]]
    rollout = engine.generate(prompts, 8, 80, sampled_with)
    with torch.no_grad():
        logprobs, _ = token_logprobs(policy.model, rollout, trained_with, 4096)
    return (logprobs - rollout.logprobs).masked_fill(~rollout.completion_mask, float("nan"))


print("gaps of the first answer, in nats:", gaps(Sampling(), Sampling())[0, :5].tolist())

# %%
full, top5 = Sampling(), Sampling(top_k=5)
cases = {
    "both the same": gaps(full, full),
    "engine in bfloat16": gaps(full, full, torch.bfloat16),
    "top-k 5 in sampling alone": gaps(top5, full),
    "top-k 5 in both": gaps(top5, top5),
    "temperature 0.8 in sampling alone": gaps(Sampling(temperature=0.8), full),
}
rows = [
    "| | mean gap | mean size | largest | ratio outside 0.8 to 1.2 | ratio of an answer, median |",
    "| --- " * 6 + "|",
]
for name, by_row in cases.items():
    gap = by_row[~by_row.isnan()]
    outside, product = ((gap.exp() - 1).abs() > 0.2).float().mean(), by_row.nansum(1).exp().median()
    numbers = f"{gap.mean():+.1e} | {gap.abs().mean():.1e} | {gap.abs().max():.1e} | {outside:.1%} | {product:.2f}"
    rows.append(f"| {name} | {numbers} |")
display(Markdown("\n".join(rows)))
assert max(cases[name].nan_to_num().abs().max() for name in ("both the same", "top-k 5 in both")) < 1e-3

# %% [markdown]
# In float32 the two agree to the last digits. bfloat16 sampling is off by a little, to both sides: that
# is what a GPU run looks like, and it is harmless until it grows. Top-k left on in sampling is another matter. Look at
# the sign.

# %%
fig, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
shown = ["engine in bfloat16", "top-k 5 in sampling alone", "temperature 0.8 in sampling alone"]
for ax, name, color in zip(axes, shown, [GREEN, VERMILION, ORANGE], strict=True):
    ax.hist(cases[name][~cases[name].isnan()].clamp(-1, 1).numpy(), bins=60, range=(-1, 1), color=color)
    ax.axvspan(math.log(0.8), math.log(1.2), color=BLACK, alpha=0.08, label="inside the clip range")
    ax.set(title=name, xlabel="recomputed − sampled log-prob, nats", yscale="log")
axes[0].set_ylabel("tokens")
axes[1].legend(fontsize=8, loc="upper right")
plt.show()

# %% [markdown]
# Top-k throws away the tail and shares its mass among the tokens that stay. So the engine reports a
# log-prob that is too high by $-\log(\text{mass kept})$, and the recomputed one is **never above** it. Three things
# follow:
#
# 1. The ratio starts below 1, at every token, before anything was learned. The clip takes that for a policy that has
#    moved, and stops wrong answers from being made less likely.
# 2. The product of the ratios over an answer, which an importance weight of a whole sequence would use, is far from 1:
#    see the last column.
# 3. The gradient is biased. Under the true policy the mean of $\nabla \log \pi$ is zero, so a constant reward teaches
#    nothing. Under samples from a truncated $q$, with gradients taken through the full $\pi$, it is $q - \pi$ in the
#    logits, and a constant reward sharpens the policy.
#
# (Temperature is a case of its own: sampling at 0.8 favours what is likely anyway, so likely tokens have a negative gap
# and rare ones a positive.) The third point is visible on six tokens. A reward of 1 for everything should not move the
# policy at all.

# %%
logits = torch.tensor([2.0, 1.5, 0.5, 0.0, -0.5, -1.0])
pi = logits.softmax(0)
q = pi * (logits > 1) / pi[:2].sum()  # top-k 2: the first two tokens share all the mass


def mean_gradient(drawn_from):
    """Mean gradient of log pi(token) in the logits, tokens drawn from a distribution: exact, by summing over tokens."""
    x = logits.clone().requires_grad_()
    (drawn_from * x.log_softmax(0)).sum().backward()
    return x.grad


torch.testing.assert_close(mean_gradient(pi), torch.zeros(6), atol=1e-6, rtol=0)
torch.testing.assert_close(mean_gradient(q), q - pi)
print("policy:", pi, "\ntop-k 2:", q)

# %%
fig, ax = plt.subplots(figsize=(6, 3), layout="constrained")
ax.bar(torch.arange(6) - 0.2, mean_gradient(pi), 0.4, color=BLUE, label="sampled from the policy: zero")
ax.bar(torch.arange(6) + 0.2, mean_gradient(q), 0.4, color=VERMILION, label="sampled with top-k 2: q − π")
ax.axhline(0, color=BLACK, linewidth=0.8)
ax.set(title="Mean update of each logit when every answer earns 1", xlabel="token", ylabel="gradient in the logit")
ax.legend()
plt.show()

# %% [markdown]
# **Remedy.** Sample and train under one distribution. `rlcourse` has one function for both,
# `sampling_logits`: the engine draws from its softmax, training takes log-probs from it. With top-k 5 in both, the gap
# in the table is rounding again. The trainer writes the gap of each step as `mismatch_mean` and `mismatch_max`. Look
# there first when a new engine, a new precision or a new library is in the loop. In a learning curve a mismatch may
# stay invisible for long.

# %% [markdown]
# ## 4 · Reading a run
#
# Each line of `metrics.jsonl` is one step, each line of `evals.jsonl` one greedy evaluation on validation problems.
#
# | metric | what it is | a good run | look closer when |
# | --- | --- | --- | --- |
# | `reward` | mean over the answers of a step | rises, then levels off | it rises and `accuracy` does not |
# | `accuracy`, `accuracy_lenient` | right by the strict and the lenient reading, sampled | rise together | they part |
# | `formatted`, `truncated` | could be read strictly; was cut off | to 1; to 0 | `truncated` stays above 0.05 |
# | `length_right`, `length_wrong` | mean tokens of right and of wrong answers | level off | only the wrong ones grow |
# | `groups_without_signal` | share of groups with equal rewards | falls; rises again once most is solved | 1 |
# | `entropy` | nats a token, of the sampling distribution | falls, levels off | at 0 while reward still could rise |
# | `kl` | k3 estimate to the starting policy, nats a token | grows slowly | jumps, or stays at rounding level |
# | `clip_fraction` | share of tokens without gradient, by the clip | below 0.05 | large; always 0 at several updates |
# | `grad_norm` | before it is clipped to `max_grad_norm` | of one size | spikes, or exactly 0 |
# | `mismatch_mean`, `_max` | section 3 | as on day one | grows |
# | `timing` | seconds by phase, tokens a second | constant | rollout time grows with `length` |
#
# `entropy` and `kl` are estimates from all tokens that were sampled: the entropy is the mean of $-\log \pi$ over them.
# `policy_loss`, `clip_fraction` and `mismatch` are means over the completions **that train**: a row with advantage 0
# has no gradient and is not computed. Where no row trains they are missing. (The recorded runs below are older: there
# `entropy` and `kl`, too, are of the completions that train, and `entropy` is a sum over the vocabulary.)
#
# One run is an anecdote. The same settings were recorded with three seeds; the pictures show these (line: mean, band:
# least to greatest), and the run above in black.

# %%
from rlcourse.course.lessons.curve_records import load_curve


def by_seed(record, key):
    """A metric as a tensor [seeds, steps], nan where there was nothing to measure."""
    none = float("nan")
    return torch.tensor([[none if v is None else v for v in seed["metrics"][key]] for seed in record["results"]])


healthy = load_curve("lesson05_healthy")
print(f"three seeds, {healthy['setup']['steps']} steps, recorded on {healthy['device']}, {healthy['date']}")
print("reward of the last step, by seed:", by_seed(healthy, "reward")[:, -1].tolist())

# %% [markdown]
# One metric is missing from the table on purpose: the loss. In supervised learning it falls. Here the advantages of
# every group add up to 0 and the ratio is near 1, so the policy loss is a small number of either sign, and what moves
# it is which answers are the longer ones. Below it **rises** while the policy improves.


# %%
def draw(ax, record, key, color, label=None, width=1.6):
    """The mean of the seeds as a line, a band from the least to the greatest."""
    values = by_seed(record, key)
    steps = torch.arange(1, values.shape[1] + 1)
    ax.fill_between(
        steps, values.nanquantile(0.0, dim=0), values.nanquantile(1.0, dim=0), color=color, alpha=0.25, lw=0
    )
    ax.plot(steps, values.nanmean(0), color=color, lw=width, label=label or key.replace("_", " "))


def draw_live(ax, key):
    """The run of section 2, in black."""
    ax.plot([m["step"] for m in metrics], [m.get(key) for m in metrics], color=BLACK, linewidth=0.9)


fig, ax = plt.subplots(figsize=(6.5, 2.8), layout="constrained")
draw(ax, healthy, "policy_loss", SKY)
draw_live(ax, "policy_loss")
ax.set(title="The loss is no measure of progress", xlabel="training step", ylabel="mean loss of a token")
plt.show()

# %% [markdown]
# **What you pay for, and what you want.** Here the reward is the accuracy, so the two curves are one. Sampled accuracy
# stays under the greedy one: at temperature 1 a slip somewhere in an answer is enough.

# %%
fig, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
draw(axes[0], healthy, "reward", ORANGE)
draw_live(axes[0], "reward")
draw(axes[1], healthy, "accuracy", BLUE, "strict, sampled", width=4)
draw(axes[1], healthy, "accuracy_lenient", SKY, "lenient, sampled")
for seed in healthy["results"]:
    label = "strict, greedy, validation" if seed is healthy["results"][0] else None
    steps, greedy = [e["step"] for e in seed["evals"]], [e["accuracy"] for e in seed["evals"]]
    axes[1].plot(steps, greedy, "o", color=BLACK, ms=3, label=label)
draw(axes[2], healthy, "groups_without_signal", PURPLE)
draw_live(axes[2], "groups_without_signal")
for ax, title in zip(axes, ["Reward", "Accuracy", "Groups without signal"], strict=True):
    ax.set(title=title, xlabel="training step", ylabel="share", ylim=(0, 1))
axes[1].legend(fontsize=9, loc="lower right")
plt.show()

# %% [markdown]
# Groups without signal: at first many groups are all wrong. Later most are mixed, and once a task is nearly solved most
# are all right. Neither extreme teaches anything. The rollout of such a group is paid for and thrown away; other
# problems or DAPO's dynamic sampling are the answer when most are.
#
# **What the policy becomes.** Entropy falls as it makes up its mind. KL says how far it went for that.

# %%
fig, axes = plt.subplots(1, 4, figsize=(13, 3.1), layout="constrained")
draw(axes[0], healthy, "entropy", GREEN)
draw(axes[1], healthy, "kl", VERMILION)
draw(axes[2], healthy, "length_right", BLUE, "right")
draw(axes[2], healthy, "length_wrong", ORANGE, "wrong")
draw(axes[3], healthy, "truncated", BLACK)
draw(axes[3], healthy, "formatted", GREEN)
titles = ["Entropy", "KL to the start", "Length of an answer", "Cut off, and readable"]
for ax, title, unit in zip(axes, titles, ["nats a token", "nats a token", "tokens", "share"], strict=True):
    ax.set(title=title, xlabel="training step", ylabel=unit, ylim=(0, None))
draw_live(axes[0], "entropy")
draw_live(axes[1], "kl")
axes[2].legend(fontsize=9)
axes[3].legend(fontsize=9, loc="center right")
plt.show()

# %% [markdown]
# Both lengths rise while the model learns to work problems out. Wrong answers are soon the longer ones, for an innocent
# reason: long problems are harder. It is a climb of the wrong answers **alone** that would point at the length bias of
# lesson 04.
#
# **What the optimizer does.** The clip is hardly ever at work with two updates a rollout and this learning rate. A
# `clip_fraction` of exactly 0 in every step is what one update a rollout must give: then the ratio is 1.

# %%
fig, axes = plt.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
panels = [
    ("grad_norm", BLUE, "Gradient norm", "norm"),
    ("clip_fraction", VERMILION, "Clip fraction", "share of tokens"),
]
for ax, (key, color, title, unit) in zip(axes, panels, strict=False):
    draw(ax, healthy, key, color)
    draw_live(ax, key)
    ax.set(title=title, xlabel="training step", ylabel=unit, ylim=(0, None))
phases = ["rollout_s", "reward_s", "advantages_s", "update_s"]
bottom = torch.zeros(len(metrics))
for phase, color in zip(phases, [BLUE, BLACK, PURPLE, ORANGE], strict=True):
    seconds = torch.tensor([m["timing"][phase] for m in metrics])
    axes[2].bar(range(1, len(metrics) + 1), seconds, bottom=bottom, color=color, width=1, label=phase[:-2])
    bottom = bottom + seconds
axes[2].set(title="Where the time went, this machine", xlabel="training step", ylabel="seconds")
axes[2].set_ylim(0, 1.6 * float(bottom.max()))
axes[2].legend(fontsize=9, ncols=2, loc="upper left")
plt.show()

# %% [markdown]
# `advantages` holds the forward pass of the frozen reference here. On a CPU, with a small model, the update is no small
# part of a step. On a GPU, with a large model, most of it is the rollout: section 9 has the numbers, lesson 06 the
# reasons.

# %% [markdown]
# ## 5 · How sure is an accuracy?
#
# An evaluation asks $n$ problems and counts. If each is solved with probability $p$, the count is binomial, and the
# measured accuracy has the standard error
#
# $$\mathrm{se} = \sqrt{\frac{p\,(1-p)}{n}}.$$
#
# About 95 % of evaluations fall within 1.96 se of the truth. Here is what that is for a model that solves 85 %.


# %%
def standard_error(p, n):
    """Of an accuracy p measured on n problems."""
    return math.sqrt(p * (1 - p) / n)


for n, what in [
    (64, "a quick look"),
    (200, "our validation"),
    (1000, "our test"),
    (1319, "GSM8K's test"),
    (10_000, ""),
]:
    print(f"{n:6,} problems: 85.0 % ± {196 * standard_error(0.85, n):.1f} points   {what}")

# %%
torch.manual_seed(0)
n, p = 1000, 0.85
measured = torch.distributions.Binomial(n, torch.tensor(p)).sample((20_000,)) / n
low, high = p - 1.96 * standard_error(p, n), p + 1.96 * standard_error(p, n)
inside = ((measured >= low) & (measured <= high)).float().mean()
fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
ax.hist(100 * measured.numpy(), bins=torch.arange(80.95, 89.1, 0.1).tolist(), color=SKY)
ax.axvspan(100 * low, 100 * high, color=BLUE, alpha=0.15, label=f"± 1.96 se holds {inside:.1%}")
ax.set(title="20,000 evaluations of one model on 1,000 problems", xlabel="measured accuracy, %", ylabel="evaluations")
ax.legend()
plt.show()
assert abs(inside - 0.95) < 0.015

# %% [markdown]
# **Is 87 % better than 85 %?** Two accuracies each have their own error; the difference has the root of the sum of the
# squares. To find a difference $\delta$ with a test at the 5 % level in 80 of 100 cases takes
#
# $$n = (1.96 + 0.84)^2 \; \frac{p_1(1-p_1) + p_2(1-p_2)}{\delta^2}$$
#
# problems for each, where $p_1$ and $p_2$ are the true accuracies, $\delta$ is their difference, and a normal variable
# exceeds 1.96 in 2.5 % and 0.84 in 20 % of cases. Drag the sliders: bell curves that overlap cannot be told apart.

# %%
from rlcourse.course.widgets import explorer


def two_models(ax, accuracy=0.85, better=0.02, problems=1000):
    """What two models would measure."""
    x = torch.linspace(0.6, 1, 801)
    for p, color, name in [(accuracy, ORANGE, "A"), (min(accuracy + better, 0.999), BLUE, "B")]:
        bell = torch.exp(-0.5 * ((x - p) / standard_error(p, problems)) ** 2)
        ax.fill_between(100 * x, bell, color=color, alpha=0.4, label=f"{name}: {100 * p:.0f} %")
    ax.set(xlabel="measured accuracy, %", yticks=[], xlim=(100 * accuracy - 6, min(100, 100 * accuracy + 10)))
    ax.set_title(f"{problems:,} problems, {100 * better:.0f} points apart", fontsize=11)
    ax.legend(fontsize=9, loc="upper right")


static = [{"problems": 1000}, {"problems": 5000}, {"problems": 1000, "better": 0.06}]
sliders = {"accuracy": (0.85, 0.7, 0.95, 0.01), "better": (0.02, 0.0, 0.1, 0.01), "problems": (1000, 100, 10000, 100)}
explorer(two_models, static, **sliders)


# %%
def problems_needed(p1, p2):
    """Problems for each of two models to tell p1 from p2: 5 % level, 80 % power."""
    return math.ceil((1.96 + 0.84) ** 2 * (p1 * (1 - p1) + p2 * (1 - p2)) / (p1 - p2) ** 2)


def share_found(p1, p2, n, trials=20_000):
    """By simulation: how often an evaluation on n problems each finds the difference."""
    a, b = (torch.distributions.Binomial(n, torch.tensor(p)).sample((trials,)) / n for p in (p1, p2))
    se = ((a * (1 - a) + b * (1 - b)) / n).sqrt()
    return ((b - a) > 1.96 * se).float().mean()


for pair in [(0.85, 0.87), (0.85, 0.90), (0.30, 0.85)]:
    n = problems_needed(*pair)
    found = share_found(*pair, n)
    print(f"{pair[0]:.0%} from {pair[1]:.0%}: {n:6,} problems each; simulated, found in {found:.1%} of trials")
print(f"85% from 87% with 1,000 problems each: found in {share_found(0.85, 0.87, 1000):.1%}")

# %% [markdown]
# **Ask both the same problems.** Most problems are solved by both models or by neither, and say nothing about which is
# better. Take the difference problem by problem, $d_i \in \{-1, 0, 1\}$; its standard error is
# $\mathrm{std}(d)/\sqrt n$, smaller the more the two agree. Here are two checkpoints of the run above.

# %%
from rlcourse.evaluation import answer_problems

few = task.problems("test")[: pick(smoke=32, full=1000)]
answered = []
for checkpoint in sorted((SCRATCH / "live" / "checkpoints").iterdir()):
    p = load_policy(str(checkpoint))
    answers = answer_problems(p, make_engine(p, "fast", torch.float32), task, few, live.max_new_tokens)
    answered.append(torch.tensor([float(a.strict) for (a,) in answers]))
    print(f"{checkpoint.name}: {answered[-1].mean():.1%}")
first, last = answered
n, d = len(few), last - first
both, neither = int((first * last).sum()), int(((1 - first) * (1 - last)).sum())
apart = math.sqrt(standard_error(first.mean(), n) ** 2 + standard_error(last.mean(), n) ** 2)
paired = d.std(unbiased=False).item() / math.sqrt(n)
print(f"both right {both}, both wrong {neither}, only one right {int(d.abs().sum())}")
print(f"difference {100 * d.mean():+.1f} points, ± {196 * apart:.1f} if problems differed, ± {196 * paired:.1f} paired")

# %% [markdown]
# **And the seed?** An interval of problems says nothing about another run of the same settings. Compare
# the spread of three seeds with the error of one evaluation.

# %%
default = load_curve("dr_grpo")
finals = {
    "the run of section 4": [seed["summary"]["after"]["accuracy"] for seed in healthy["results"]],
    "default settings, 60 steps": [seed["summary"]["accuracy_after"] for seed in default["results"]],
}
for name, values in finals.items():
    after = torch.tensor(values)
    print(f"{name}: {', '.join(f'{a:.1%}' for a in after)}")
    print(f"   standard deviation between seeds {100 * after.std():.1f} points,", end=" ")
    print(f"standard error of each from 1,000 problems {100 * standard_error(after.mean(), 1000):.1f}")

# %% [markdown]
# The spread between seeds is about as large as the error of one evaluation, once a little smaller, once larger; three
# seeds cannot say more. So an interval of problems is not enough: report several seeds, their range, and the number of
# problems. The differences between algorithms at the default settings are of this size too, and so the README says that
# none stands out.

# %% [markdown]
# ## 6 · Strict and lenient, both
#
# The strict reading asks for two things: the right number, and the form `#### NUMBER`. The lenient one asks for the
# number alone. So a rise of the strict accuracy may be arithmetic, or may be obedience.
#
# The embedded model writes the form already. To see the difference we taught a copy of it, for a moment, to end most of
# its answers in words ("The answer is 12."), and trained that copy with each of the two rewards. This is where a public
# instruct model stands on the first day: it can calculate, and does not know your form.

# %%
words = {"strict": load_curve("lesson05_words_strict"), "lenient": load_curve("lesson05_words_lenient")}
fig, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained", sharey=True)
for ax, (parser, record) in zip(axes, words.items(), strict=True):
    for key, color, label, width in [("accuracy_lenient", ORANGE, "lenient", 4), ("accuracy", BLUE, "strict", 1.6)]:
        values = torch.tensor([[e[key] for e in seed["evals"]] for seed in record["results"]])
        steps = [e["step"] for e in record["results"][0]["evals"]]
        ax.fill_between(steps, values.amin(0), values.amax(0), color=color, alpha=0.2, linewidth=0)
        ax.plot(steps, values.mean(0), color=color, marker="o", ms=4, lw=width, label=label)
    ax.set(title=f"Reward by the {parser} reading", xlabel="training step", ylim=(-0.03, 1))
axes[0].set_ylabel("greedy accuracy, validation")
axes[0].legend(title="read as", loc="lower right")
plt.show()
print(f"mean of three seeds, band: min to max; recorded on {record['device']}, {record['date']}")


# %%
def test_row(name, record, keys=("accuracy", "accuracy_lenient")):
    """A row of a table: test accuracies before and after, the least and the greatest of the seeds."""
    cells = []
    for key in keys:
        before = record["results"][0]["summary"]["before"][key]
        values = [seed["summary"]["after"][key] for seed in record["results"]]
        cells += [f"{before:.1%}", f"{min(values):.1%} to {max(values):.1%}"]
    return f"| {name} | " + " | ".join(cells) + " |"


head = "| reward | strict before | strict after | lenient before | lenient after |\n| --- | --- | --- | --- | --- |\n"
display(Markdown(head + "\n".join(test_row(name, record) for name, record in words.items())))

# %% [markdown]
# Read the left picture with the orange line hidden: a miracle. With it: most of the rise is the form,
# learned in a few steps, and a part is arithmetic. On the right the arithmetic rises as well, and the strict score
# would say that nothing happened. Neither score is wrong; each alone misleads. Plot both, always, and say which one is
# the reward.

# %% [markdown]
# ## 7 · Four runs that fail on purpose
#
# Each changes **one** setting of the healthy run. Three seeds each, recorded.

# %%
from rlcourse.course.lessons.lesson05 import RUNS

FAILURES = ["format", "collapse", "truncation", "still"]
runs = {name: load_curve(f"lesson05_{name}") for name in ["healthy", *FAILURES, "half_format"]}
rows = "\n".join(f"| {name} | {RUNS[name] or 'the run of section 4'} | {runs[name]['date']} |" for name in runs)
display(Markdown("| run | what is different | recorded |\n| --- | --- | --- |\n" + rows))

# %% [markdown]
# Before you read on, look at the columns and guess what is wrong in each. A line has a gap where no row trained: there
# was nothing to measure. Reward and accuracy are one line where the reward is the accuracy.

# %%
ROWS = [
    ([("reward", ORANGE), ("accuracy", BLUE)], "share", (0, 1.02), "linear"),
    ([("truncated", BLACK), ("groups_without_signal", PURPLE)], "share", (0, 1.02), "linear"),
    ([("length_right", BLUE), ("length_wrong", ORANGE)], "tokens", (0, 84), "linear"),
    ([("entropy", GREEN)], "nats a token", (0, 1.8), "linear"),
    ([("kl", VERMILION)], "nats a token", (1e-9, 1e5), "log"),
    ([("grad_norm", SKY)], "norm", (0, 0.4), "linear"),
]
columns = ["healthy", *FAILURES]
fig, axes = plt.subplots(len(ROWS), len(columns), figsize=(12, 9.5), layout="constrained", sharex=True, sharey="row")
for (lines, unit, limits, scale), row in zip(ROWS, axes, strict=True):
    for ax, name in zip(row, columns, strict=True):
        for key, color in lines:
            draw(ax, runs[name], key, color, width=3.5 if key == "reward" else 1.5)
        ax.set(ylim=limits, yscale=scale)
    row[0].set_ylabel(unit)
    row[0].legend(fontsize=8)
for top, bottom, name in zip(axes[0], axes[-1], columns, strict=True):
    top.set_title(name)
    bottom.set_xlabel("training step")
plt.show()


# %%
def end(record, key):
    """Mean of the last five steps, of each seed; the text '–' where nothing was measured."""
    values = by_seed(record, key)[:, -5:].nanmean(1)
    values = values[~values.isnan()]
    return f"{values.mean():.2g} ({values.min():.2g} to {values.max():.2g})" if len(values) else "–"


keys = ["reward", "accuracy", "truncated", "length", "groups_without_signal", "entropy", "kl"]
head = "| run | " + " | ".join(key.replace("_", " ") for key in keys) + " |\n" + "| --- " * (len(keys) + 1) + "|\n"
table = "\n".join(f"| {name} | " + " | ".join(end(record, key) for key in keys) + " |" for name, record in runs.items())
display(Markdown("Mean of the last five steps, three seeds (least to greatest):\n\n" + head + table))
head = "| run | strict before | strict after | lenient before | lenient after |\n| --- | --- | --- | --- | --- |\n"
display(Markdown("1,000 test problems, greedy:\n\n" + head + "\n".join(test_row(*item) for item in runs.items())))

# %% [markdown]
# **format: the reward is farmed.** Whoever set `reward_format` to 1 wanted to be kind to answers in the
# right form. Now any number in that form earns as much as the right one, and the shortest way to a number is a guess.
# Reward rises to its maximum while accuracy falls under where it began. The answers of the last step:

# %%
for name in ("format", "truncation", "healthy"):
    for sample in runs[name]["results"][0]["samples"][:3]:
        print(f"{name:10s} gold {sample['gold']:>4s}   reward {sample['reward']:.0f}   {sample['text']!r}")

# %% [markdown]
# A partial reward need not be fatal. In `half_format` a readable wrong answer earns half, so a right one still is worth
# more. Look at the left end: it is slower. Look at the right end and at the tables: it arrives at the same place.

# %%
fig, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained", sharey=True)
shown = [("healthy", BLUE, "0"), ("half_format", GREEN, "0.5"), ("format", VERMILION, "1")]
for name, color, worth in shown:
    draw(axes[0], runs[name], "reward", color, worth)
    values = torch.tensor([[e["accuracy"] for e in seed["evals"]] for seed in runs[name]["results"]])
    steps = [e["step"] for e in runs[name]["results"][0]["evals"]]
    axes[1].fill_between(steps, values.amin(0), values.amax(0), color=color, alpha=0.2, linewidth=0)
    axes[1].plot(steps, values.mean(0), color=color, marker="o", ms=4)
axes[0].set(title="Reward: what the run is told", xlabel="training step", ylabel="share", ylim=(0, 1.02))
axes[1].set(title="Greedy accuracy: what you want", xlabel="training step")
axes[0].legend(title="reward of a readable wrong answer", loc="lower right", fontsize=9)
plt.show()

# %% [markdown]
# **collapse.** The learning rate is a hundred times too large. Within a few steps KL explodes (k3 holds an
# exponential), and soon hardly an answer ends any more. Then all rewards are 0, every group agrees, the gradient is
# exactly 0: the run cannot come back by itself. Clipping the gradient does not help, for AdamW divides by the size of
# the gradient anyway.
#
# **truncation.** With 24 new tokens a worked answer to a longer problem does not fit. Cut off, it earns nothing, so
# one-step problems are all that can be solved. Entropy and KL look healthy; `truncated` gives it away, and so do the
# samples above: they stop in the middle. The levels of difficulty show it too:

# %%
fig, ax = plt.subplots(figsize=(6.5, 3.2), layout="constrained")
for offset, (name, color) in enumerate([("healthy", BLUE), ("truncation", VERMILION)]):
    levels = [f"accuracy_level_{level}" for level in (1, 2, 3, 4)]
    values = torch.tensor([[seed["evals"][-1][key] for key in levels] for seed in runs[name]["results"]])
    mean = values.mean(0)
    error = torch.stack([mean - values.amin(0), values.amax(0) - mean])
    ax.bar(torch.arange(4) + 0.4 * offset, mean, 0.38, yerr=error, capsize=3, color=color, label=name)
ax.set(title="Greedy accuracy by steps of a problem, end of training", ylim=(0, 1.25), ylabel="share, validation")
ax.set_xticks(torch.arange(4) + 0.2, ["1 step", "2 steps", "3 steps", "4 steps"])
ax.legend(loc="upper right", ncols=2)
plt.show()

# %% [markdown]
# **still.** Nothing happens, at a learning rate a thousand times too small. The reward jitters because the problems
# change. KL tells jitter from learning: it stays many orders of magnitude under that of the healthy run.
#
# The fifth failure was in section 3, and is the quiet one: sampling and training under different distributions.
#
# | symptom | cause | remedy |
# | --- | --- | --- |
# | reward up, accuracy not (`format`) | the reward pays for something else | read samples; pay most for right answers |
# | strict far under lenient (section 6) | the form is not known | ask for it in the prompt; some SFT; plot both |
# | KL jumps, no signal, gradient exactly 0 (`collapse`) | learning rate too high | last good checkpoint, lr / 10 |
# | `truncated` high, long problems unsolved (`truncation`) | too few new tokens | raise `max_new_tokens` |
# | reward jitters, KL at rounding level (`still`) | lr too low, or frozen weights | raise it; see that weights change |
# | `mismatch` large at step 1 (section 3) | engine and training draw differently | one distribution for both |
#
# Four more that were not run for this page, from other lessons and from the papers below:
#
# | symptom | cause | remedy |
# | --- | --- | --- |
# | no signal at the start | problems too hard or too easy | other problems; SFT first; larger groups |
# | entropy near 0 early, accuracy stuck | sharpened too fast | fewer epochs; `clip_high` above `clip_low` (DAPO) |
# | only `length_wrong` climbs (lesson 04) | loss divided by the length | Dr. GRPO's constant aggregation |
# | `clip_fraction` large (lesson 02) | updates too many or too large | fewer mini-batches or epochs, lower lr |

# %% [markdown]
# ## 8 · Stop it, kill it, go on
#
# A free GPU goes away without a word. So a run must survive being killed. A checkpoint holds the model, the optimizer's
# moments, the random state, and how many prompts were drawn; it is written beside its place and renamed, so that none
# is ever half there. We start a small run as a process of its own, and kill it, hard, once it has a checkpoint or two.

# %%
tiny = {"num_prompts": 4, "num_generations": 4, "eval_every": 0, "eval_problems": 1, "pass_k": 0, "save_every": 2}
flags = [word for k, v in tiny.items() for word in (f"--{k.replace('_', '-')}", str(v))]
command = [sys.executable, "-m", "rlcourse.cli", "train", *flags, "--device", "cpu", "--steps", "500"]
log = SCRATCH / "victim.log"
with log.open("w") as file:
    process = subprocess.Popen([*command, "--output", str(SCRATCH), "--name", "victim"], stdout=file, stderr=file)
patience = time.time() + 240
while not (SCRATCH / "victim" / "checkpoints" / "step-000004").exists():
    assert process.poll() is None and time.time() < patience, log.read_text()[-500:]
    time.sleep(0.02)
process.kill()
process.wait()
checkpoints = sorted(path.name for path in (SCRATCH / "victim" / "checkpoints").glob("step-*"))
print("steps written down:", len(read_lines(SCRATCH / "victim" / "metrics.jsonl")), "   checkpoints:", *checkpoints)

# %% [markdown]
# `resume` (or `rlcourse train --resume` with the same settings) goes on from the last checkpoint. Steps after
# it are forgotten and done again. The proof is a second run that nobody killed: both must agree in every
# step.

# %%
until = int(checkpoints[-1][-6:]) + 4
settings = make_config("laptop", **tiny, device="cpu", steps=until, output=str(SCRATCH))
resume(**tiny, device="cpu", steps=until, output=str(SCRATCH), name="victim")
train(replace(settings, name="unharmed"))
killed, whole = (read_lines(SCRATCH / name / "metrics.jsonl") for name in ("victim", "unharmed"))
for a, b in list(zip(killed, whole, strict=True))[-6:]:
    print(f"step {a['step']}: reward {a['reward']:.4f} and {b['reward']:.4f},", end=" ")
    print(f"gradient norm {a['grad_norm']:.6f} and {b['grad_norm']:.6f}")
assert [m["step"] for m in killed] == list(range(1, until + 1))
torch.testing.assert_close(*(torch.tensor([[m["reward"], m["grad_norm"]] for m in run]) for run in (killed, whole)))

# %% [markdown]
# Ctrl-C is gentler: the step that is under way is finished and a checkpoint written. On a GPU the two
# runs may part in the last digits, since not every kernel adds in the same order; they stay two runs of the same
# training.

# %% [markdown]
# ## 9 · The same loop on Qwen2.5-0.5B-Instruct and GSM8K
#
# Nothing of the loop changes; settings do. A preset is a dictionary of them. Two ship, for a 24 GB card and for an
# H200. A T4 has 16 GB and no arithmetic in bfloat16, so for it we compute in float32, with fewer rows and shorter
# answers, and let `generate` of transformers sample, which needs no second copy of the weights then.

# %%
from dataclasses import fields

CARDS = {  # memory as on the data sheet, in bytes; a card reports a little less
    "T4": (16e9, {"preset": "a10g", "dtype": "float32", "engine": "hf-static", "compile": False, "num_prompts": 4}),
    "A10G": (24e9, {"preset": "a10g"}),
    "H200": (141e9, {"preset": "h200"}),
}
CARDS["T4"][1].update(max_prompt_tokens=200, max_new_tokens=200, micro_batch_rows=4)
configs = {card: make_config(**settings) for card, (_, settings) in CARDS.items()}
laptop, skipped = make_config("laptop"), ("preset", "model", "task", "eval_problems", "pass_k_problems")
table = ["| setting | laptop | " + " | ".join(CARDS) + " |", "| --- | --- | --- | --- | --- |"]
for name in [f.name for f in fields(laptop) if f.name not in skipped]:
    values = [getattr(laptop, name), *(getattr(c, name) for c in configs.values())]
    if len(set(values)) > 1:
        table.append(f"| {name} | " + " | ".join(map(str, values)) + " |")
display(Markdown("\n".join(table)))

# %% [markdown]
# The learning rate falls from `4e-5` to `1e-6`: a pretrained model has more to lose than ours. Does it
# fit? The estimate counts what must stand in memory at once, every row at its longest. `rlcourse train --preset a10g
# --dry-run` prints it, and `rlcourse doctor` compares it with the machine.

# %%
from rlcourse.measure import memory

shape = memory.model_shape("Qwen/Qwen2.5-0.5B-Instruct")
estimates = {card: memory.estimate(config, shape, "cuda") for card, config in configs.items()}
table = [f"| GB, {memory.parameters(shape):,} parameters | " + " | ".join(CARDS) + " |", "| --- | --- | --- | --- |"]
for part in vars(estimates["T4"]):
    table.append(
        f"| {part.replace('_', ' ')} | "
        + " | ".join(f"{getattr(e, part) / 1e9:.1f}" for e in estimates.values())
        + " |"
    )
for part in ("rollout", "update", "peak"):
    cells = " | ".join(f"**{getattr(e, part) / 1e9:.1f}**" for e in estimates.values())
    table.append(f"| **{part}{' phase' if part != 'peak' else ', with headroom'}** | {cells} |")
table.append("| **the card has** | " + " | ".join(f"**{size / 1e9:.0f}**" for size, _ in CARDS.values()) + " |")
display(Markdown("\n".join(table)))
assert all(estimates[card].fits(size) for card, (size, _) in CARDS.items())

# %% [markdown]
# The next cell trains where there is a GPU: it takes the largest of the three that fits, downloads model
# and data on the first run (1 GB and 5 MB), and **resumes by itself** when you run it again after a disconnection. On
# Colab, point `output` to a folder that outlives the machine.

# %% tags=["gpu"]
if not torch.cuda.is_available():
    print("No CUDA GPU here, so nothing is trained: open this notebook on a machine with one, or on Colab with a T4.")
else:
    card_memory = torch.cuda.get_device_properties(0).total_memory
    card = next((c for c in ("H200", "A10G", "T4") if estimates[c].fits(card_memory)), None)
    assert card, "Even the settings for a T4 need more memory than this GPU has: lower num_prompts and max_new_tokens."
    chosen = replace(configs[card], steps=pick(smoke=2, full=200), save_every=10, output="runs", name=f"gsm8k-{card}")
    begun = any(Path("runs", chosen.name, "checkpoints").glob("step-*"))
    result = train(chosen, resume=begun)
    for when in ("before", "after"):
        n, p, lenient = (result[when][key] for key in ("problems", "accuracy", "accuracy_lenient"))
        print(f"{when}: strict {p:.1%} ± {1.96 * standard_error(p, n):.1%}, lenient {lenient:.1%}")

# %% [markdown]
# **What has been measured.** One training step with the shape of Qwen2.5-0.5B, on GSM8K's prompts, on an
# H200. The weights were random, so every answer ran to its full length, and nothing was learned: these are times, not
# results. `trl-*` is the trainer of TRL on the same step, with the two caches of `generate`.

# %%
from rlcourse.measure.records import load_record, record_markdown

record = load_record("step", "NVIDIA H200")
columns = ["variant", "rows", "step_s", "rollout_s", "update_s", "peak_memory_bytes", "mismatch_mean", "mismatch_max"]
display(Markdown(record_markdown(record, columns)))
[row] = [r for r in record["results"] if r["variant"] == "rlcourse" and r["rows"] == 64]
new_tokens = record["setup"]["new_tokens"]
minutes = 200 * row["step_s"] / 60
print(f"200 steps of {row['rows']} answers of {new_tokens} tokens at that speed: {minutes:.1f} minutes")
print("without the start of the program and without evaluation")

# %% [markdown]
# **What has not been run.** Qwen2.5-0.5B-Instruct's own weights were not trained for this page, neither
# on an H200 nor on an A10G nor on a T4: the settings above rest on the memory estimate and on the times in the table,
# and the settings for the T4 were never started on one. If you run them, you know more than this page.
#
# **What others report** on GSM8K, with their own prompts, readings and harness, so that the last points of difference
# between rows mean little:
#
# | model | before | after | how | source |
# | --- | --- | --- | --- | --- |
# | Qwen2.5-0.5B-Instruct | 49.6 | | as released | Qwen2.5 technical report, 2024, arXiv:2412.15115 |
# | Qwen2.5-0.5B-Instruct | | 56.7 | PPO | verl's documentation, "Algorithm Baselines" |
# | Qwen2.5-0.5B-Instruct | | 54.3 | GRPO with LoRA | verl's documentation, "Algorithm Baselines" |
# | DeepSeekMath-Instruct 7B | 82.9 | 88.2 | GRPO | Shao et al. 2024, arXiv:2402.03300 |
#
# The start of your own run may be lower than the first row, in the strict reading above all: section 6 says why.

# %% [markdown]
# ## Check yourself
#
# 1. The reward of your run went from 0.5 to 0.9 and you are pleased. Which two curves do you look at before you tell
#    anybody?
# 2. `clip_fraction` is exactly 0 in every step. Is something broken?
# 3. Two runs end at 86.1 % and 87.0 % on the same 1,000 problems. What can you say?
# 4. Your engine samples with top-p 0.95, training computes log-probs of the full softmax. What is the sign of the gap?
# 5. `groups_without_signal` is 0.9 at step 1 and 0.9 at step 100. What are the two explanations, and which metric
#    decides?
#
# <details><summary>Answers</summary>
#
# 1. Accuracy in both readings, on problems held out. Then some samples, with your own eyes.
# 2. Not if there is one optimizer step a rollout: the ratio is 1 then. With several, a clip that never acts means that
#    the updates are small, or that old log-probs are recomputed after each update by mistake.
# 3. Nothing from the two numbers: the difference is smaller than the error of the difference. Compare problem by
#    problem, and train more seeds.
# 4. Recomputed less sampled is at most 0 at every token: the engine's distribution has more mass on what it keeps.
# 5. The problems are too hard (all wrong) or too easy (all right); `accuracy` is near 0 or near 1.
# </details>
#
# ## Exercises
#
# [exercises/05_full_loop.ipynb](../exercises/05_full_loop.ipynb): the interval of an accuracy, two models on the same
# problems, the mismatch of a rollout, a learning-rate schedule, and a program that reads metrics and names the failure.
#
# ## Further reading
#
# - Liu et al. 2025, *Understanding R1-Zero-Like Training: A Critical Perspective* (Dr. GRPO), arXiv:2503.20783.
# - Yu et al. 2025, *DAPO: An Open-Source LLM Reinforcement Learning System at Scale*, arXiv:2503.14476: entropy,
#   truncation and groups without signal as practical problems, each with its remedy.
# - Schulman et al. 2017, *Proximal Policy Optimization Algorithms*, arXiv:1707.06347.
# - Huang et al. 2022, *The 37 Implementation Details of Proximal Policy Optimization*, ICLR blog track.
# - Amodei et al. 2016, *Concrete Problems in AI Safety*, arXiv:1606.06565, section 4: reward hacking.
# - Miller 2024, *Adding Error Bars to Evals: A Statistical Approach to Language Model Evaluations*, arXiv:2411.00640.
# - Cobbe et al. 2021, *Training Verifiers to Solve Math Word Problems* (GSM8K), arXiv:2110.14168.
