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
# - that the package's training step is the loop you wrote in lesson 01, line for line;
# - what a policy does to a verifier with a hole in it, and how such a run looks while it happens;
# - to read a run from its curves, and to tell five failures apart;
# - whether the program that samples is the policy that trains, and which difference of two accuracies is noise;
# - to price a run before you rent a GPU, to survive its loss, and to use what you have trained.
#
# You need lessons 01 to 04: the loop, the ratio and its clip, the group as a baseline. No new algorithm comes here.

# %%
import inspect
import math
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown, display

from rlcourse.collect import answer_rewards
from rlcourse.config import make_config
from rlcourse.course import pick
from rlcourse.course.lessons.curve_records import load_curve
from rlcourse.course.loop import GROUP, LIMIT, PROMPTS, greedy_accuracy, log_probs, task, verify
from rlcourse.course.widgets import bet
from rlcourse.learner import Learner
from rlcourse.measure.plots import BLACK, BLUE, GREEN, ORANGE, VERMILION
from rlcourse.measure.records import load_record
from rlcourse.policy import load_policy
from rlcourse.rollout import make_engine
from rlcourse.sampling import Sampling
from rlcourse.tasks.prompts import PromptSampler
from rlcourse.train import train_step

SCRATCH = Path(tempfile.mkdtemp())  # runs of this notebook go here

# %% [markdown]
# ## 1 · You have written this already
#
# Here is the loop of lesson 01 once more. The line marked 3 is Dr. GRPO's advantage, the reward less the mean of its
# group. With one update a rollout the ratio is 1, so there is nothing to clip (lesson 02). Two things are new: the loop
# keeps the norm of the gradient, and it draws a permutation that it throws away, because the package shuffles its rows
# at that point and both should roll the same dice.


# %%
def by_hand(steps: int, seed: int = 0) -> list[tuple[float, float]]:
    """Mean reward and norm of the gradient, step by step."""
    torch.manual_seed(seed)
    policy = load_policy("embedded")
    engine = make_engine(policy, "fast", torch.float32)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=4e-5, betas=(0.9, 0.95), weight_decay=0.0)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=4)
    order, log = PromptSampler(task.problems("train"), seed), []
    for _ in range(steps):
        problems = order.sample(PROMPTS)
        prompts = [policy.prompt(problem.question) for problem in problems]
        rollout = engine.generate(prompts, GROUP, LIMIT, Sampling())  # 1 sample
        rewards = verify(problems, rollout, policy)  # 2 verify
        groups = rewards.view(-1, GROUP)
        advantages = (groups - groups.mean(1, keepdim=True)).flatten()  # 3 weigh
        torch.randperm(len(rewards))
        log_pi = log_probs(policy.model, rollout).sum(1)
        loss = -(advantages * log_pi).sum() / (len(rewards) * LIMIT)  # 4 step
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
        log.append((rewards.mean().item(), norm.item()))
    return log


# %% [markdown]
# And this is how you train with the package if you want to keep the loop in your own hands: a `Learner` holds model and
# optimizer, and `train_step` does one step of it. **Your own reward function goes in as the last argument.**


# %%
def with_package(steps: int, reward_function=answer_rewards, policy=None):
    """Train the embedded model. Returns the policy, what each step measured, and the answers of the last step."""
    config = make_config("laptop", num_prompts=PROMPTS, device="cpu")
    torch.manual_seed(config.seed)
    policy = policy or load_policy("embedded")
    engine = make_engine(policy, config.engine, torch.float32)
    learner, order = Learner(policy, config), PromptSampler(task.problems("train"), config.seed)
    log = []
    for step in range(steps):
        greedy = greedy_accuracy(policy, engine, pick(8, 200)) if step % 5 == 0 else None
        metrics, completions = train_step(learner, engine, task, order, step, reward_function)
        log.append(metrics | {"greedy": greedy})
    return policy, log, completions.answers


STEPS = pick(2, 4)
ours, (_, theirs, _) = by_hand(STEPS), with_package(STEPS)
for step, ((reward, norm), m) in enumerate(zip(ours, theirs, strict=True), 1):
    print(f"step {step}: reward {reward:.4f} and {m['reward']:.4f}, gradient {norm:.5f} and {m['grad_norm']:.5f}")
torch.testing.assert_close(
    torch.tensor(ours), torch.tensor([[m["reward"], m["grad_norm"]] for m in theirs]), atol=1e-4, rtol=1e-3
)

# %% [markdown]
# The same rewards and the same gradients, step for step. So `train_step` must be your loop. Here is its body; on the
# left are the marks of the loop above. **Look for** what stands between them.

# %% tags=["hide-input"]
# @title The source of `train_step`
MARKS = {
    "= collect(": "1 sample, 2 verify",
    "make_batch(": "3 weigh",
    "plan_minibatches(": "lesson 02",
    "= old_logprobs(": "lesson 02",
    "logprobs_and_values(": "log_probs",
    "= token_loss(": "4 step: the loss",
    "sampler_correction(": "section 4, below",
    "aggregate(weights": "its mean",
    "= kl_estimate(": "lesson 02",
    "= value_loss(": "lesson 02",
    "loss.backward()": "4 step: backward",
    "update(": "4 step: AdamW",
}
body = (
    inspect.getsource(train_step)
    .split("with without_cudnn_attention()")[1]
    .split("\n", 1)[1]
    .split("    metrics = {")[0]
)
marked = []
for line in textwrap.dedent(body).splitlines():
    mark = next((mark for words, mark in MARKS.items() if words in line), "")
    marked.append(f"{mark:18s}│ {line}".rstrip())
print("\n".join(marked))
assert all(words in body for words in MARKS)

# %% [markdown]
# Nothing is there but your four lines, some measuring (`means.add`) and choices, nearly all of them switched off here:
# several mini-batches with the old log-probs that their ratio needs, a KL term, a value head, an engine that gives its
# memory back (`sleep`). A micro-batch holds as many rows as fit into a given number of tokens, to save memory; the
# gradients of all micro-batches add up.
#
# | in your loop | in the package |
# | --- | --- |
# | `generate`, `verify` | `collect` in `rlcourse/collect.py` |
# | less the group's mean | `make_batch` in `rlcourse/learner.py`, with `rlcourse/advantages.py` |
# | log-probs, loss | `rlcourse/logprobs.py`, `rlcourse/losses.py` |
# | AdamW, warm-up, clip of the gradient | `update` in `rlcourse/train.py` |
# | the `for` | `TrainingLoop` in `rlcourse/train.py`, with evaluation, checkpoints and Ctrl-C: `rlcourse train` |
#
# ## 2 · A verifier with a hole
#
# Now put the last argument to use. A reward function gets the answers of a step and the config, and returns a number
# for each answer. Gold answers are expensive, and much can be checked without them: an answer shows its working, and a
# machine can redo the sums. So a colleague proposes to pay for sound work. An answer earns 1 if it ended, announces a
# number (`answer.formatted` says whether it did both), and **every calculation in it holds**.

# %%
CALCULATION = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)")


def holds(left: str, sign: str, right: str, result: str) -> bool:
    """Whether 6+8=14."""
    a, b, c = int(left), int(right), int(result)
    return {"+": a + b == c, "-": a - b == c, "*": a * b == c, "/": a == b * c}[sign]


def sound(answers, config) -> list[float]:
    """1 for an answer that ended, announces a number and in which every calculation holds."""
    rewards = []
    for answer in answers:
        right = all(holds(*found) for found in CALCULATION.findall(answer.text))
        rewards.append(float(answer.formatted and right))
    return rewards


for text in ("She has 6+8=14 beads.\n#### 14", "She has 6+8=15 beads.\n#### 15"):
    print([holds(*found) for found in CALCULATION.findall(text)], repr(text))

# %% [markdown]
# It has a hole, and the policy will find it. Find it first, if you can.

# %% tags=["hide-input"]
# @title Your bet
RUN = pick(6, 26)
start = 100 * load_curve("lesson05_healthy")["results"][0]["evals"][0]["accuracy"]
hole = bet(
    f"The model starts at {start:.0f} % (greedy, validation problems) and is paid for sound work. Where is it after "
    f"{RUN - 1} steps?",
    (60, 0, 100, 1),
    unit="%",
)

# %%
farmed_policy, farmed, answers = with_package(RUN, sound)

# %% tags=["hide-input"]
# @title Figure: what is paid, and what you want


def greedy_points(log) -> tuple[list[int], list[float]]:
    """Steps at which greedy answers were judged, and the percentage that was right."""
    known = [m for m in log if m["greedy"] is not None]
    return [m["step"] - 1 for m in known], [100 * m["greedy"] for m in known]


fig, axes = plt.subplots(1, 2, figsize=(10, 3), layout="constrained", sharey=True)
axes[0].plot(range(RUN), [100 * m["reward"] for m in farmed], color=ORANGE)
axes[1].plot(*greedy_points(farmed), color=BLUE, marker="o")
hole.line(axes[1])
axes[0].set(title="the reward, mean of a step", xlabel="training step", ylabel="%", ylim=(-2, 102))
axes[1].set(title="greedy accuracy on validation problems", xlabel="training step")
for ax in axes:
    ax.grid()
axes[1].legend()
plt.show()
fell = greedy_points(farmed)[1][-1]
hole.result(fell)
for answer in answers[:: len(answers) // 4]:
    print(f"gold {answer.problem.gold:>3s}   {answer.text!r}")

# %% [markdown]
# The reward climbs to its maximum, and greedy accuracy falls from {{ start:.0f }} to {{ fell:.1f }} %. {{ assert
# fell < start / 4 }} The answers say how. Where there is no calculation, none is wrong: `all([])` is `True`. So a guess
# is paid like a proof, and a guess is shorter and safer. The policy did not look for a bug. Guesses were among its
# samples from the start, they earned more often than work, and so they became more probable.
#
# The curve on the left is all you see if the verifier is your only judge. Keep a second judge that cannot be fooled in
# the same way, and read samples. `train_step` reports `accuracy` by the task's own verifier, whatever you pay for.
#
# ### One line closes it
#
# There must be a calculation, and the number that is announced must be the result of the last one. Gold answers still
# play no part in the reward.


# %%
def sound_and_used(answers, config) -> list[float]:
    """As `sound`, and there is a calculation, and the last one gives the number that is announced."""
    rewards = []
    for answer, right in zip(answers, sound(answers, config), strict=True):
        done = CALCULATION.findall(answer.text)
        rewards.append(right * float(bool(done) and done[-1][3] == answer.verdict.answer))
    return rewards


# %% tags=["hide-input"]
# @title Your bet
closed = bet(
    f"The same run, the hole closed, and still no gold answer. Where is it after {RUN - 1} steps?",
    (40, 0, 100, 1),
    unit="%",
)

# %%
sound_policy, mended, sound_answers = with_package(RUN, sound_and_used)
gold_policy, gold, _ = with_package(RUN)  # for comparison: paid for the right number, as ever

# %% tags=["hide-input"]
# @title Figure: the hole closed, and gold answers for comparison
fig, axes = plt.subplots(1, 2, figsize=(10, 3), layout="constrained", sharey=True)
for log, color, marker, label in (
    (farmed, VERMILION, "s", "sound work"),
    (mended, GREEN, "^", "sound work, hole closed"),
    (gold, BLUE, "o", "the right number"),
):
    axes[0].plot(range(RUN), [100 * (m["reward"] - m["accuracy"]) for m in log], color=color, label=label)
    axes[1].plot(*greedy_points(log), color=color, marker=marker, label=label)
closed.line(axes[1])
axes[0].set(title="reward less accuracy", xlabel="training step", ylabel="%", ylim=(-2, 102))
axes[1].set(title="greedy accuracy on validation problems", xlabel="training step")
for ax in axes:
    ax.grid()
axes[0].legend(loc="center right", bbox_to_anchor=(1, 0.56))
axes[1].legend(axes[1].lines[-1:], [str(closed)], loc="lower right", bbox_to_anchor=(1, 0.12))
plt.show()
reached, with_gold = greedy_points(mended)[1][-1], greedy_points(gold)[1][-1]
closed.result(reached)
early, late = (100 * sum(m["reward"] - m["accuracy"] for m in part) / 5 for part in (mended[:5], mended[-5:]))
fooled = {a.text: a for a in sound_answers if sound_and_used([a], None)[0] and not a.strict}
for answer in list(fooled.values())[:2]:
    print(f"paid and wrong, gold {answer.problem.gold}: {answer.problem.question}\n    {answer.text!r}")

# %% [markdown]
# {{ reached:.1f }} % without a single gold answer, and {{ with_gold:.1f }} % with them. {{ assert start + 20 < reached
# }} Sound work need not be right: the green line on the left is work that is sound, answers another question, and is
# paid. The verifier does its job because soundness and truth go together **in what this policy writes**, and nothing
# obliges a policy to keep it so. In the first five steps {{ early:.0f }} % of the samples were paid and wrong (at
# least: reward less accuracy), in the last five {{ late:.0f }} %. {{ assert late > early }} That is how the next hole
# announces itself, and you can see it only with a judge that is not the reward.
#
# One more thing about holes. The hole is closed now; must you throw the farmed policy away? Go on from it, paid by the
# fixed verifier:

# %%
_, again, _ = with_package(RUN, sound_and_used, policy=farmed_policy)
back = greedy_points(again)
print(
    "training step, greedy accuracy in %:",
    *(f"{step}: {value:.1f}" for step, value in zip(*back, strict=True)),
    sep="  ",
)

# %% [markdown]
# In its first step {{ 100 * again[0]["reward"]:.0f }} % of the samples earn anything, and that little is enough: after
# {{ RUN - 1 }} steps it is at {{ back[1][-1]:.1f }} %, where the fresh start was at {{ reached:.1f }} %. Training grows
# what is still in the samples. A policy with no work left in them would not have come back at all, so go back to a
# checkpoint from before the farming if you have one.
#
# ## 3 · Reading a run
#
# Each line of `metrics.jsonl` is one step, each line of `evals.jsonl` one greedy evaluation on validation problems.
#
# | metric | what it is | a good run | look closer when |
# | --- | --- | --- | --- |
# | `reward` | mean over the answers of a step | rises, then levels off | it rises and `accuracy` does not |
# | `accuracy`, `accuracy_lenient` | right, by the strict and the lenient reading | rise together | they part |
# | `truncated` | share that was cut off | falls to 0 | it stays above 0.05 |
# | `groups_without_signal` | share of groups with equal rewards | falls, rises at the end | it is 1 |
# | `entropy` | nats a token | falls slowly | it is 0 and the reward still low |
# | `kl` (if `kl_coef` is set) | k3 estimate to the start, nats a token | grows slowly | it jumps, or stays below 1e-5 |
# | `clip_fraction` | share of tokens that the clip stopped | below 0.05 | it is large |
# | `grad_norm` | before it is clipped | of one size | it spikes, or is exactly 0 |
# | `mismatch_mean` | next section | as on the first day | it grows |
#
# A group whose answers all earn the same has no gradient: at first because all are wrong, at the end because all are
# right. The loss is missing on purpose. The advantages of a group add up to 0, so its value is a small number of either
# sign and says nothing about progress.
#
# ### Four patients
#
# On the left a healthy run, recorded with three seeds (line: mean, band: least to greatest), with {{
# make_config().num_prompts }} problems a step and {{ load_curve("lesson05_healthy")["setup"]["minibatches"] }} updates
# a rollout. Each of the others has **one** setting changed. One is paid for the wrong thing, one has a learning rate a
# hundred times too large, one a thousand times too small, and one may write no more than {{
# load_curve("lesson05_truncation")["setup"]["max_new_tokens"] }} tokens. All curves are of the samples of a step,
# before its updates, so that KL begins at rounding level. **Look for** which is which. {{ assert
# math.isclose(load_curve("lesson05_collapse")["setup"]["lr"], 100 * make_config().lr) and
# math.isclose(load_curve("lesson05_still")["setup"]["lr"], make_config().lr / 1000) }}

# %% tags=["hide-input"]
# @title Figure: a healthy run and four patients


def by_seed(record, key: str) -> torch.Tensor:
    """A metric [seeds, steps]."""
    return torch.tensor([seed["metrics"][key] for seed in record["results"]])


def band(ax, record, key: str, color: str, width: float = 1.6) -> None:
    """The mean of the seeds as a line, a band from the least to the greatest."""
    values = by_seed(record, key)
    steps = torch.arange(1, values.shape[1] + 1)
    ax.fill_between(steps, values.amin(0), values.amax(0), color=color, alpha=0.25, linewidth=0)
    ax.plot(steps, values.mean(0), color=color, linewidth=width, label=key)


PATIENTS = {"A": "truncation", "B": "still", "C": "format", "D": "collapse"}
healthy = load_curve("lesson05_healthy")
runs = {"healthy": healthy} | {letter: load_curve(f"lesson05_{name}") for letter, name in PATIENTS.items()}
fig, axes = plt.subplots(2, 5, figsize=(13, 4.8), layout="constrained", sharex=True, sharey="row")
for column, (name, record) in zip(axes.T, runs.items(), strict=True):
    band(column[0], record, "reward", ORANGE, 4)
    band(column[0], record, "accuracy", BLUE)
    band(column[0], record, "truncated", BLACK)
    band(column[1], record, "kl", VERMILION)
    column[0].set_title(name)
    column[1].set(xlabel="training step", yscale="log", ylim=(1e-9, 1e2))
axes[0, 0].set(ylabel="share", ylim=(0, 1.02))
axes[1, 0].set_ylabel("KL to the start, nats a token")
axes[0, 2].legend(loc="upper right")
plt.show()
print(f"recorded on {healthy['device']}, {healthy['date']}, with `python -m tools.lessons.lesson05`")

# %% tags=["hide-input"]
# @title Your bet
patient = bet("Which of the four has a learning rate a hundred times too large?", ["C", "A", "B", "D"])

# %% tags=["hide-input"]
# @title Table: what they ended with
patient.result("D")
lines = [
    "| run | changed | reward, last five steps | greedy accuracy on test problems, before | after |",
    "| --- | --- | --- | --- | --- |",
]
after = {}
for name, record in runs.items():
    ends = [seed["summary"] for seed in record["results"]]
    after[name] = [100 * e["after"]["accuracy"] for e in ends]
    reward = by_seed(record, "reward")[:, -5:].mean()
    changed = ", ".join(f"`{k}` {v:g}" for k, v in record["setup"].items() if v != healthy["setup"].get(k)) or "nothing"
    before = 100 * ends[0]["before"]["accuracy"]
    lines.append(
        f"| {name} | {changed} | {reward:.2f} | {before:.1f} % | {min(after[name]):.1f} to {max(after[name]):.1f} % |"
    )
display(Markdown("\n".join(lines)))
before_healthy = healthy["results"][0]["summary"]["before"]
cut = by_seed(runs["A"], "truncated")[:, -5:].mean().item()
still_kl = by_seed(runs["B"], "kl").max().item()

# %% [markdown]
# (The {{ 100 * before_healthy["accuracy"]:.1f }} % before training are of {{ before_healthy["problems"]:, }} test
# problems. The {{ start:.0f }} % of section 2, for the same model, were of 200 validation problems. A starts lower
# because its answers are cut off in the test, too.)
#
# **A, too few tokens.** The reward looks merely slow, and KL looks healthy. `truncated` gives it away: {{ 100 * cut:.0f
# }} % of the answers are cut off. {{ assert cut > 0.25 }} Longer problems cannot be solved at all, and no setting of
# the optimizer will change that. Raise `max_new_tokens`.
#
# **B, nothing happens.** The reward jitters because the problems change, which looks like life. KL tells jitter from
# learning: it stays below {{ 10.0 ** math.ceil(math.log10(still_kl)):.0e }} nats. {{ assert still_kl < 1e-4 }} Raise
# the learning rate, and check that the weights change at all.
#
# **C, paid for the wrong thing.** Any number in the right form earns as much as the right number, and the shortest way
# to a number is a guess. It is section 2 once more, with a "kind" verifier: reward up, test accuracy down to {{
# min(after["C"]):.1f }} to {{ max(after["C"]):.1f }} %. {{ assert max(after["C"]) < 5 }} How kind a verifier may be
# before this happens is an exercise.
#
# **D, the learning rate.** From the third step on KL is {{ by_seed(runs["D"], "kl")[:, 2:].min():.1f }} nats a token or
# more; the healthy runs never reach {{ math.ceil(10 * by_seed(healthy, "kl").max()) / 10:.1f }}. {{ assert
# by_seed(runs["D"], "kl")[:, 2:].min() > 3 * by_seed(healthy, "kl").max() }} Soon all rewards are 0 but for a lucky
# guess, so the groups agree and the gradient is exactly 0: in {{ 100 * (by_seed(runs["D"], "grad_norm")[:, 12:] ==
# 0).float().mean():.0f }} % of the steps from the 13th on. {{ assert by_seed(runs["D"], "reward")[:, 12:].max() < 0.01
# and (by_seed(runs["D"], "grad_norm")[:, 12:] == 0).float().mean() > 0.95 }} In two of the three runs hardly an answer
# stops before the limit in the end. {{ assert (by_seed(runs["D"], "truncated")[:, -5:].mean(1) > 0.9).sum() == 2 }}
# Without a gradient nothing pulls a run back. Go back to the last good checkpoint and lower the learning rate, tenfold
# at a time.
#
# Others, from other lessons: no signal at the start means problems too hard or too easy (03); only wrong answers
# growing longer means a loss divided by the length (04); a large `clip_fraction` means too many updates a rollout (02).
#
# ## 4 · Is the program that samples the policy that trains?
#
# The fifth failure shows in none of these curves. The policy gradient averages over answers **drawn from the policy
# that it differentiates**. But two programs are at work, an engine that samples and a forward pass that trains. They
# may disagree, by rounding, or by a setting that only one of them knows, such as a top-k that a serving library
# switches on by default.
#
# The test costs nothing. The engine keeps the log-prob of each token that it drew, and training computes it again.
# Before any update the two must be equal. Their difference is the **mismatch**; `exp` of it is the importance ratio of
# a loop that takes the engine's word, and should be 1.

# %% tags=["hide-input"]
# @title Your bet
outside_bet = bet(
    "The engine samples with top-k 5, training knows nothing of it. Before the first update: which share of the tokens "
    "has a ratio outside the clip range of 0.8 to 1.2?",
    (1, 0, 100, 1),
    unit="%",
)

# %%
from rlcourse.logprobs import token_logprobs


def gaps(sampled_with: Sampling, trained_with: Sampling, dtype=torch.float32) -> torch.Tensor:
    """Recomputed less sampling log-prob of every token of a rollout of the starting policy."""
    policy = load_policy("embedded")
    engine = make_engine(policy, "fast", dtype)
    torch.manual_seed(0)
    prompts = [policy.prompt(p.question) for p in task.problems("train")[: pick(8, 32)]]
    rollout = engine.generate(prompts, 8, LIMIT, sampled_with)
    with torch.no_grad():
        logprobs, _ = token_logprobs(policy.model, rollout, trained_with, 4096)
    return (logprobs - rollout.logprobs)[rollout.completion_mask]


full, top5 = Sampling(), Sampling(top_k=5)
found = {
    "both the same": gaps(full, full),
    "engine in bfloat16": gaps(full, full, torch.bfloat16),
    "top-k 5 in sampling alone": gaps(top5, full),
    "top-k 5 in both": gaps(top5, top5),
    "temperature 0.8 in sampling alone": gaps(Sampling(temperature=0.8), full),
}
lines = ["| | mean gap | mean size | greatest gap | ratio outside 0.8 to 1.2 |", "| --- " * 5 + "|"]
for name, gap in found.items():
    outside = 100 * ((gap.exp() - 1).abs() > 0.2).float().mean().item()
    if name == "top-k 5 in sampling alone":
        outside_topk = outside
    lines.append(f"| {name} | {gap.mean():+.0e} | {gap.abs().mean():.0e} | {gap.max():+.0e} | {outside:.1f} % |")
outside_bet.result(outside_topk)
display(Markdown("\n".join(lines)))
assert found["both the same"].abs().max() < 1e-3 and found["top-k 5 in both"].abs().max() < 1e-3

# %% [markdown]
# bfloat16 in the engine is off by a little, to both sides: that is what a GPU run looks like where engine and training
# are two programs, and nearly every token is well inside the clip range (lesson 11 asks what harm it does). {{ assert
# 100 * ((found["engine in bfloat16"].exp() - 1).abs() > 0.2).float().mean() < 0.5 }} On an H200 the mean size was {{
# load_record("mismatch", "NVIDIA H200")["results"][2]["mismatch_mean"]:.4f }} nats before both were made to add in one
# order, which leaves no gap at all (lesson 11, too).
#
# Top-k is another matter. It throws the tail away and shares its mass among the tokens that stay, so the engine's
# log-prob is too high by $-\log(\text{mass kept})$ and the gap is **never above 0**. {{ assert found["top-k 5 in
# sampling alone"].max() < 1e-3 }} A loop that takes the engine's log-probs for the old ones begins below 1: to the clip
# that looks like a policy that has moved already, and below $1 - \varepsilon$ wrong answers are no longer made less
# likely. (`rlcourse` takes the trainer's own, so this cannot happen.) And any loop has a biased gradient, since the
# answers come from another distribution than the one that it differentiates.
#
# The remedy is one distribution for both: here `sampling_logits` makes the logits for engine and training alike, as the
# fourth row shows. Where two programs cannot be made to agree, `sampler_correction` weights the loss by the ratio
# between them. Look at `mismatch_mean` first whenever an engine, a precision or a library is new.
#
# ## 5 · The form and the number
#
# The strict reading wants the right number, and the form `#### NUMBER`. The lenient one wants the number. A public
# instruct model can calculate and does not know your form. To see what that does to a curve, a copy of the embedded
# model was taught to end most of its answers in words ("The answer is 12."), and trained with either reading as its
# reward. Hide the orange line on the left and **look for** a miracle. Then take your hand away.

# %% tags=["hide-input"]
# @title Figure: two readings, two rewards
words = {"strict": load_curve("lesson05_words_strict"), "lenient": load_curve("lesson05_words_lenient")}
fig, axes = plt.subplots(1, 2, figsize=(10, 3.3), layout="constrained", sharey=True)
for ax, (parser, record) in zip(axes, words.items(), strict=True):
    for key, color, label, width in (("accuracy_lenient", ORANGE, "lenient", 4), ("accuracy", BLUE, "strict", 1.6)):
        values = 100 * torch.tensor([[e[key] for e in seed["evals"]] for seed in record["results"]])
        steps = [e["step"] for e in record["results"][0]["evals"]]
        ax.fill_between(steps, values.amin(0), values.amax(0), color=color, alpha=0.2, linewidth=0)
        ax.plot(steps, values.mean(0), color=color, marker="o", linewidth=width, label=label)
    ax.set(title=f"the {parser} reading is the reward", xlabel="training step", ylim=(-3, 100))
    ax.grid()
axes[0].set_ylabel("greedy, % of validation right")
axes[1].legend(title="read as", loc="center left")
plt.show()
tests = {  # on the test problems, mean of the seeds
    (when, reading): sum(100 * seed["summary"][when][reading] for seed in words["strict"]["results"]) / 3
    for when in ("before", "after")
    for reading in ("accuracy", "accuracy_lenient")
}
print(f"three seeds, recorded on {words['strict']['device']}, {words['strict']['date']}")

# %% [markdown]
# The figure is of validation problems. On the {{ before_healthy["problems"]:, }} test problems the run on the left
# rises from {{ tests["before", "accuracy"]:.0f }} to {{ tests["after", "accuracy"]:.0f }} %, strictly read. Leniently
# read, the same answers rise from {{ tests["before", "accuracy_lenient"]:.0f }} to {{ tests["after",
# "accuracy_lenient"]:.0f }} %. So most of the miracle is the form, learned in fifteen steps, and {{ tests["after",
# "accuracy_lenient"] - tests["before", "accuracy_lenient"]:.0f }} points are better answers. {{ assert
# all(seed["evals"][3]["accuracy"] > 0.7 for seed in words["strict"]["results"]) }} On the right the answers improve as
# well, and for {{ words["lenient"]["results"][0]["evals"][5]["step"] }} steps the strict score says that nothing
# happened. In one run of three it wakes up then, by chance: nobody pays for the form. {{ assert all(e["accuracy"] <
# 0.01 for seed in words["lenient"]["results"] for e in seed["evals"][:6]) and sorted(seed["evals"][-1]["accuracy"] >
# 0.1 for seed in words["lenient"]["results"]) == [False, False, True] }} Plot both, always, and say which one is paid.
#
# ## 6 · Which difference is noise?
#
# A test poses some problems and counts the right answers. If each is solved with probability $p$, the measured accuracy
# has the standard error $\sqrt{p\,(1-p)/\text{problems}}$, and 95 % of measurements fall within 1.96 standard errors of
# the truth. For the difference of two accuracies, each measured on problems of its own, take the root of the sum of the
# two squares.

# %% tags=["hide-input"]
# @title Your bet
noise_bet = bet(
    "GSM8K's test has 1,319 problems. Two models near 50 %: by how many points must the measured accuracies differ "
    "before chance is a poor explanation?",
    (1.0, 0.0, 10.0, 0.1),
    unit="points",
)


# %%
def standard_error(p: float, n: int) -> float:
    """Of an accuracy p measured on n problems."""
    return math.sqrt(p * (1 - p) / n)


PROBLEMS = 1319
needed = 100 * 1.96 * math.sqrt(2) * standard_error(0.5, PROBLEMS)
noise_bet.result(round(needed, 1))

# %% [markdown]
# Now look at what others report of the very model that section 8 trains. **Look for** pairs that are further apart than
# that. (Not for bars that do not overlap: two bars may overlap a little and still differ by more than chance.)

# %% tags=["hide-input"]
# @title Figure: published results with their error bars
PUBLISHED = {"as released": 49.6, "GRPO with LoRA": 54.3, "PPO": 56.7, "PRIME": 58.7}
fig, ax = plt.subplots(figsize=(7, 2.8))
for row, percent in enumerate(PUBLISHED.values()):
    bar = 100 * 1.96 * standard_error(percent / 100, PROBLEMS)
    ax.errorbar(percent, row, xerr=bar, color=BLUE if row else BLACK, marker="o", capsize=4)
    ax.annotate(f"{percent}", (percent, row), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=9)
ax.set_yticks(range(4), list(PUBLISHED))
ax.set(ylim=(3.6, -0.6), xlabel="accuracy on GSM8K's 1,319 test problems, %", title="Qwen2.5-0.5B-Instruct, ± 1.96 se")
ax.grid(axis="x")
plt.show()
gain = PUBLISHED["GRPO with LoRA"] - PUBLISHED["as released"]
between = PUBLISHED["PRIME"] - PUBLISHED["GRPO with LoRA"]
steps_apart = [PUBLISHED["PPO"] - PUBLISHED["GRPO with LoRA"], PUBLISHED["PRIME"] - PUBLISHED["PPO"]]

# %% [markdown]
# (The first is Qwen's own, arXiv:2412.15115, the others are from verl's documentation, "Algorithm Baselines". Prompts,
# readings and harnesses differ, which alone can be worth some points.)
#
# Taken at face value, training helps: even the smallest gain, {{ gain:.1f }} points, exceeds the {{ needed:.1f }} that
# chance explains. {{ assert gain > needed }} Which of the three methods is better than the next, these totals cannot
# say: {{ steps_apart[0]:.1f }} and {{ steps_apart[1]:.1f }} points are within the noise. {{ assert max(steps_apart) <
# needed < between }} Only the first and the last of them, {{ between:.1f }} points apart, exceed it. And that is the
# noise of the **problems** alone. Another seed is another run: the three seeds of the healthy run above end at {{
# ", ".join(f"{a:.1f}" for a in after["healthy"]) }} % on the same test problems.
#
# All four were tested on the same problems, but only totals were published, so we had to treat them as if the problems
# differed. **With the answers problem by problem** you can do better. Most are solved by both or by neither and say
# nothing about which is better. So take the difference problem by problem, $d = -1$, 0 or 1, with the standard error
# $\mathrm{std}(d) / \sqrt{\text{problems}}$. Here are two policies of section 2 on the same test problems: one was paid
# for sound work, with the hole closed, the other for the right number.

# %%
from rlcourse.evaluation import BATCH_ROWS, PASS_K_PROBLEMS, answer_problems


def right_of(policy) -> torch.Tensor:
    """Which test problems the policy solves, greedily: 0 or 1 [problems]."""
    asked = task.problems("test")[: pick(16, 1000)]
    answers = answer_problems(policy, make_engine(policy, "fast", torch.float32), task, asked, LIMIT)
    return torch.tensor([float(answer.strict) for (answer,) in answers])


a, b = right_of(sound_policy), right_of(gold_policy)
n, d = len(a), b - a
apart = 196 * math.sqrt(standard_error(a.mean(), n) ** 2 + standard_error(b.mean(), n) ** 2)
paired = 196 * d.std(correction=0).item() / math.sqrt(n)
both, neither = int((a * b).sum()), int(((1 - a) * (1 - b)).sum())
ends = {"healthy": after["healthy"]}  # of the seeds, in percent
ends["strict"] = [100 * seed["summary"]["after"]["accuracy"] for seed in words["strict"]["results"]]
spread = {name: max(found) - min(found) for name, found in ends.items()}
print(f"right: {a.mean():.1%} and {b.mean():.1%} of {n}; by both {both}, by neither {neither}")
print(f"difference {100 * d.mean():+.1f} points, ± {apart:.2f} if the problems differed, ± {paired:.2f} paired")

# %% [markdown]
# Pairing shrinks the interval from ± {{ apart:.1f }} to ± {{ paired:.1f }} points. Without it one would need {{ (apart
# / paired) ** 2:.1f }} times the problems for that. {{ assert paired < 0.8 * apart }} So, does the right number pay
# better than sound work? From the totals, nobody could say. Paired, the difference is at the edge of what chance
# explains: as much happens about once in twenty times between equals. {{ assert 0.85 * paired < 100 * d.mean() < 1.2 *
# paired < apart }} And that is still the noise of the problems alone. Each method was run once, and another seed is
# another run: on these problems the three seeds of the healthy run end {{ spread["healthy"]:.1f }} points apart, those
# of the run paid by the strict reading {{ spread["strict"]:.1f }}, more than what we found. {{ assert spread["strict"]
# > 100 * d.mean() > spread["healthy"] }} To rank methods, repeat the runs.
#
# ## 7 · Stop it, kill it, go on
#
# A rented GPU goes away without a word, so a run must survive being killed. A checkpoint holds the model, the
# optimizer's moments, the state of the random numbers and how many prompts were drawn. It is written beside its place
# and renamed, so that none is ever half there. We start a small run as a process of its own, and kill it, hard, once it
# has a checkpoint or two.

# %%
tiny = {"num_prompts": 4, "num_generations": 4, "eval_every": 0, "eval_problems": 1, "pass_k": 0, "save_every": 2}
flags = [word for k, v in tiny.items() for word in (f"--{k.replace('_', '-')}", str(v))]
command = [sys.executable, "-m", "rlcourse.cli", "train", *flags, "--device", "cpu", "--steps", "500"]
log = SCRATCH / "killed.log"
with log.open("w") as file:
    process = subprocess.Popen([*command, "--output", str(SCRATCH), "--name", "killed"], stdout=file, stderr=file)
patience = time.time() + 240
while not (SCRATCH / "killed" / "checkpoints" / "step-000004").exists():
    assert process.poll() is None and time.time() < patience, log.read_text()[-500:]
    time.sleep(0.02)
process.kill()
process.wait()
checkpoints = sorted(path.name for path in (SCRATCH / "killed" / "checkpoints").glob("step-*"))
print("checkpoints:", *checkpoints)

# %% [markdown]
# One function serves the first start and every start after a disconnection: it goes on from the last checkpoint where
# there is one. Steps after it are forgotten and done again. (On the command line: `rlcourse train --resume`.)

# %%
from rlcourse.runs import read_lines
from rlcourse.train import resume, train


def begin_or_go_on(config):
    """Train as the config says, from the last checkpoint of the run of that name if there is one."""
    folder = Path(config.output, config.name)
    if any(folder.glob("checkpoints/step-*")):
        return resume(output=config.output, name=config.name, steps=config.steps)
    shutil.rmtree(folder, ignore_errors=True)  # killed before its first checkpoint: nothing to lose
    return train(config)


until = int(checkpoints[-1][-6:]) + 4
settings = make_config("laptop", **tiny, device="cpu", steps=until, output=str(SCRATCH))
for name in ("killed", "unharmed"):
    begin_or_go_on(replace(settings, name=name))
killed, whole = (read_lines(SCRATCH / name / "metrics.jsonl") for name in ("killed", "unharmed"))
for a, b in list(zip(killed, whole, strict=True))[-5:]:
    print(f"step {a['step']}: reward {a['reward']:.4f} and {b['reward']:.4f},", end=" ")
    print(f"gradient {a['grad_norm']:.6f} and {b['grad_norm']:.6f}")
assert [m["step"] for m in killed] == list(range(1, until + 1))
torch.testing.assert_close(*(torch.tensor([[m["reward"], m["grad_norm"]] for m in run]) for run in (killed, whole)))

# %% [markdown]
# The killed run and one that nobody touched agree in every step. (On a GPU the two may part in the last digits, since
# not every kernel adds in the same order. A step with gradient 0 is one where, in each of its {{ tiny["num_prompts"] }}
# small groups, all answers earned the same.) Ctrl-C is gentler: the step under way is finished and a checkpoint
# written.
#
# ## 8 · Before you rent
#
# The same loop trains Qwen2.5-0.5B-Instruct on GSM8K. Only settings change, and a preset is a dictionary of them: the
# learning rate falls to {{ make_config("a10g").lr:.0e }}, since a pretrained model has more to lose, the arithmetic
# becomes bfloat16, answers may have {{ make_config("a10g").max_new_tokens }} tokens. Three questions before you pay for
# a GPU: does it fit, how long will it take, and what will you be able to see?
#
# ### Does it fit?
#
# The estimate counts what stands in memory at once, every row at its longest. Two things to know before you read it:
#
# - The weights that AdamW changes, their gradients and its moments are float32 everywhere. bfloat16 keeps about three
#   digits of a number, so that a step of {{ make_config("a10g").lr:.0e }} would be rounded away. It is used for the
#   arithmetic, on copies of the weights. (On the H200 engine and update read the same copy, with the training pass of
#   lesson 11.)
# - **Gradient checkpointing** does not keep what the forward pass computed inside a layer, only what went into it, and
#   computes the rest again in the backward pass. That saves most of the memory for activations and costs one more
#   forward pass.
#
# A T4 has 16 GB and no bfloat16, so for it we compute in float32 with shorter answers, and let `generate` of
# transformers sample, which needs no second copy of the weights.

# %%
from rlcourse import memory
from rlcourse.measure import shapes

CARDS = {  # memory by the data sheet, in bytes; a card reports a little less
    "T4": (16e9, {"preset": "a10g", "dtype": "float32", "engine": "hf-static", "compile": False, "num_prompts": 4}),
    "A10G": (24e9, {"preset": "a10g"}),
    "H200": (141e9, {"preset": "h200"}),
}
CARDS["T4"][1].update(examples=1, max_prompt_tokens=240, max_new_tokens=200, micro_batch_tokens=1600)
configs = {card: make_config(**settings) for card, (_, settings) in CARDS.items()}
shape = shapes.model_shape(configs["A10G"].model)
a10g = configs["A10G"]
estimates = {
    card: memory.estimate(config, shape, "cuda", exact=card == "H200")  # lesson 11 has its training pass
    for card, config in configs.items()
}
assert all(estimates[card].fits(size) for card, (size, _) in CARDS.items())

# %% tags=["hide-input"]
# @title Table: what stands in memory, and the settings behind it
AT_ONCE = max(a10g.rows, min(BATCH_ROWS, a10g.eval_problems))  # answers: an evaluation has more than a step
PARTS = {
    "weights, gradients, AdamW's two moments (float32)": ("weights", "gradients", "optimizer"),
    "the engine's own copy of the weights": ("rollout_weights",),
    f"keys and values of {AT_ONCE} answers, as an evaluation samples them": ("kv_cache",),
    "bfloat16 copies of the weights in the update": ("autocast",),
    "activations kept for the backward pass": ("activations",),
    "logits of one chunk of tokens, and what comes of them": ("logits",),
}


def gigabytes(words: str, values) -> str:
    return f"| {words} | " + " | ".join(f"{value / 1e9:.1f}" for value in values) + " |"


lines = [f"| GB, {shapes.parameters(shape):,} parameters | " + " | ".join(CARDS) + " |", "| --- | --- | --- | --- |"]
for text, parts in PARTS.items():
    lines.append(gigabytes(text, [sum(getattr(e, part) for part in parts) for e in estimates.values()]))
lines.append(gigabytes("**the most that is needed, with headroom**", [e.peak for e in estimates.values()]))
lines.append(gigabytes("**the card has**", [size for size, _ in CARDS.values()]))
for name in (
    "num_prompts",
    "num_generations",
    "max_new_tokens",
    "micro_batch_tokens",
    "logprob_chunk",
    "gradient_checkpointing",
):
    lines.append(f"| `{name}` | " + " | ".join(str(getattr(c, name)) for c in configs.values()) + " |")
display(Markdown("\n".join(lines)))
reserved = {}  # GB that the allocator held, by answers
off_peak = {}  # estimate / measured - 1, by answers; the record's answers had 256 tokens, and 8 share a prompt of 40
for row in load_record("exact", "NVIDIA H200")["results"]:
    if row["shape"] != "embedded" and row["variant"] == "one set of numbers":
        sizes = {
            "num_prompts": row["rows"] // 8,
            "num_generations": 8,
            "max_prompt_tokens": 40 // 8,
            "max_new_tokens": 256,
        }
        config = make_config("h200", **sizes, eval_problems=1, micro_batch_tokens=112 * 261)  # 112 of them at once
        peak = row["peak_memory_bytes"] + memory.LIBRARIES
        found = memory.estimate(config, shape, "cuda", exact=True)
        off_peak[row["rows"]] = 100 * found.peak / peak - 100
        reserved[row["rows"]] = row["reserved_memory_bytes"] / 1e9

# %% [markdown]
# The first line is the same everywhere and not negotiable: 16 bytes a parameter. Keys and values are counted for the {{
# AT_ONCE }} answers that an evaluation samples together; a step has {{ configs["T4"].rows }}, {{ a10g.rows }} or {{
# configs["H200"].rows }}. {{ assert all(max(c.rows, min(BATCH_ROWS, c.eval_problems)) == AT_ONCE for c in
# configs.values()) }} The most that is needed includes 0.6 GB for the libraries, and a tenth on top for what the
# allocator wastes. {{ assert memory.LIBRARIES == 6e8 and memory.HEADROOM == 1.1 }} On the H200, with {{
# ", ".join(map(str, off_peak)) }} answers as long as they may be, the estimate was off by {{
# min(off_peak.values()):+.0f }} to {{ max(off_peak.values()):+.0f }} % of the most that tensors held. {{ assert
# max(map(abs, off_peak.values())) < 15 }} (Both leave out what CUDA graphs keep between replays. PyTorch's allocator
# keeps more than tensors hold, with {{ max(reserved) }} answers {{ reserved[max(reserved)]:.0f }} GB. It gives that
# back when a card runs short; how little it could do with was not measured. We have not had the other two cards.) The
# last lines are what you can choose; small micro-batches and chunks keep little at once. `rlcourse train --preset a10g
# --dry-run` prints such an estimate, and `rlcourse doctor` compares it with your machine.
#
# ### How long will it take?

# %% tags=["hide-input"]
# @title Your bet
PRICE = 1.0  # dollars an hour: put your provider's here
cost_bet = bet(
    f"{a10g.steps} steps of {a10g.rows} answers on a rented A10G, with all evaluations, at {PRICE:.0f} dollar an hour: "
    "what will the run cost?",
    (20.0, 0.0, 50.0, 0.5),
    unit="dollars",
)

# %% [markdown]
# It has not been run on an A10G for this page. But a step has been measured on an H200, and we can count what a step
# must do. Sampling reads all weights for one more token of each answer, so it is bound by **bytes**. The update
# multiplies large matrices and is bound by **operations**; AdamW's one pass over all its numbers adds bytes. Divided by
# what the data sheet promises, these counts give a floor in seconds. Real code stays some factor above the floor;
# assume the same factor on the other card:
#
# $$\text{seconds there} = \text{seconds here} \cdot \frac{\text{floor there}}{\text{floor here}} .$$

# %%
from rlcourse.measure import roofline

# NVIDIA's data sheets: bytes a second of the memory, dense bfloat16 operations a second (an A10 without G: 125e12)
SHEETS = {"H200": (4.8e12, 989e12), "A10G": (0.6e12, 70e12)}


def floors(card: str, rows: int, prompt: int, new: int, checkpointing: bool = False, share: int = 1) -> torch.Tensor:
    """Seconds that the rollout and the update of a step take at least, [2], if `share` answers train on one prompt."""
    sheet = roofline.Machine(card, "bfloat16", *SHEETS[card])
    decode = roofline.decode_step(shape, rows, prompt + new / 2)
    work = roofline.update(shape, rows, prompt / share + new, new, checkpointing)
    update = work.total_flops / sheet.flops_per_s + work.total_bytes / sheet.bytes_per_s
    return torch.tensor([new * sheet.floor_seconds(decode), update])


step, update = load_record("step", "NVIDIA H200"), load_record("update", "NVIDIA H200")
NEW = step["setup"]["new_tokens"]
prompt = {row["rows"]: row["tokens"] // row["rows"] - NEW for row in update["results"]}  # mean tokens of a prompt
here = {
    row["rows"]: torch.tensor([row["rollout_s"], row["update_s"]])
    for row in step["results"]
    if row["variant"] == "rlcourse"
}
shared = step["setup"]["num_generations"]  # on an H200 the update reads a prompt once for all its answers: lesson 11
above = {rows: here[rows] / floors("H200", rows, prompt[rows], NEW, share=shared) for rows in here}
tried = above[16] * floors("H200", 64, prompt[64], NEW, share=shared)  # on the H200 itself: from 16 rows to 64
there = above[64] * floors("A10G", a10g.rows, prompt[64], a10g.max_new_tokens, a10g.gradient_checkpointing)

# %% tags=["hide-input"]
# @title Table: measured and predicted
lines = ["| seconds | rollout | update | both |", "| --- | --- | --- | --- |"]
for name, pair in {
    "H200, 16 rows, measured": here[16],
    "H200, 64 rows, **predicted** from 16 rows": tried,
    "H200, 64 rows, measured": here[64],
    f"A10G, {a10g.rows} rows, **predicted** from the H200": there,
}.items():
    lines.append(f"| {name} | {pair[0]:#.3g} | {pair[1]:#.3g} | {pair.sum():#.3g} |")
display(Markdown("\n".join(lines)))
off = 100 * (tried / here[64] - 1)
chunked = {row["variant"]: row["seconds"] for row in load_record("logprobs", "NVIDIA H200")["results"]}
rows = min(BATCH_ROWS, a10g.eval_problems)
batches = 2 * math.ceil(a10g.eval_problems / rows) + 2 * a10g.pass_k * PASS_K_PROBLEMS / rows
batches += (a10g.steps // a10g.eval_every + 1) * a10g.eval_validation / rows
evaluation = above[64][0] * floors("A10G", rows, prompt[64], a10g.max_new_tokens)[0] * batches
hours = ((a10g.steps * there.sum() + evaluation) / 3600).item()
cost_bet.result(round(PRICE * hours, 2))
print(f"{a10g.steps} steps: {a10g.steps * there.sum() / 60:.0f} minutes", end="; ")
print(f"evaluations: {evaluation / 60:.0f} minutes; in all {60 * hours:.0f} minutes")

# %% [markdown]
# How good is it? On the H200 itself, from {{ min(here) }} rows to {{ max(here) }}, the method is off by {{ off[0]:+.0f
# }} % for the rollout. For the update it is off by {{ off[1]:+.0f }} %. {{ assert -40 < off[0] < 0 and 10 < off[1] < 60
# }} Four times the rows take it only {{ here[64][1] / here[16][1]:.1f }} times as long: a part of an update takes as
# long with few rows as with many (lesson 12), and of that the floor knows only AdamW's. {{ assert list(here) == [16,
# 64] }} On an A10G, with {{ a10g.rows }} rows and a fourteenth of the H200's operations a second, that part should
# weigh little. {{ assert 13.5 < SHEETS["H200"][1] / SHEETS["A10G"][1] < 14.5 }} Trust that line to a factor of two.
# (The H200's update reads a prompt once for all its answers; an A10G's is another program, which reads it once for
# each. Each is counted as it is.) It leaves some things out. Small chunks cost time: on the H200, log-probs in chunks
# of {{ a10g.logprob_chunk:, }} take {{ chunked["chunks of 1024"] / chunked["all at once"]:.1f }} times as long as all
# at once. The first steps compile, for minutes. And real answers are shorter than {{ a10g.max_new_tokens }} tokens;
# those of the records come from random weights, which never stop. Even so, it costs less than a coffee. {{ assert 2 *
# hours * PRICE < 3 }} The H200 does {{ a10g.steps }} steps of {{ max(here) }} answers, of {{ NEW }} tokens, in {{
# a10g.steps * here[64].sum() / 60:.1f }} minutes.
#
# ### What will you see?

# %%
from rlcourse.tasks.gsm8k import VALIDATION

GSM8K = 7473  # problems of its train file, of which the last VALIDATION are held out
drawn = {card: config.steps * config.num_prompts for card, config in configs.items()}
for card, problems in drawn.items():
    print(f"{card:5s} draws {problems:5,} of {GSM8K - VALIDATION:,} training problems")

# %% [markdown]
# The A10G's {{ a10g.steps }} steps of {{ a10g.num_prompts }} prompts see {{ 100 * drawn["A10G"] / (GSM8K -
# VALIDATION):.0f }}% of GSM8K's training problems, and none of them twice. {{ assert drawn["A10G"] < GSM8K -
# VALIDATION }} Validation uses {{ a10g.eval_validation }} problems, which is good to ± {{ 196 *
# standard_error(0.5, a10g.eval_validation):.0f }} points: a trend, not a result. The result is the test before and
# after, on all {{ a10g.eval_problems:, }} problems, and by section 6 a gain under {{ needed:.1f }} points proves
# nothing from the two totals alone; before and after share their problems, and compared problem by problem they show
# smaller gains. Others gained {{ gain:.0f }} to {{ gain + between:.0f }} points, with methods and budgets of their own.
# We have no curve to show: Qwen's weights were not trained for this page. And the strict score may begin far below {{
# PUBLISHED["as released"] }} %, for the reason in section 5.
#
# ## 9 · Run it, and then
#
# This cell trains where there is a GPU. It takes the largest settings that fit and goes on by itself when you run it
# again after a disconnection. On Colab set `ON_DRIVE = True` first, so that checkpoints outlive the machine; `TRACKER`
# may be `"tensorboard"` or `"wandb"`. The first run downloads 1 GB of model and 5 MB of data. Settings for the T4 were
# never started on one: if you run them, you know more than this page.

# %%
ON_DRIVE = False  # Colab: keep runs on your Google Drive
TRACKER = "none"

if ON_DRIVE:
    from google.colab import drive

    drive.mount("/content/drive")
FOLDER = Path("/content/drive/MyDrive/rlcourse" if ON_DRIVE else "runs")

# %% tags=["gpu"]
if not torch.cuda.is_available():
    print("No CUDA GPU here, so nothing is trained: open this notebook on a machine with one, or on Colab with a T4.")
else:
    has = torch.cuda.get_device_properties(0).total_memory
    bfloat16 = torch.cuda.get_device_capability() >= (8, 0)  # a V100 or T4 has none: float32 for them
    needs = {  # the table's, but for the training pass, which is that of this GPU
        card: memory.estimate(config, shape, "cuda", exact=memory.has_exact_pass(config, "cuda"))
        for card, config in configs.items()
    }
    fitting = [c for c in ("H200", "A10G", "T4") if needs[c].fits(has) and (bfloat16 or c == "T4")]
    assert fitting, "Even the settings for a T4 need more memory than this GPU has: lower num_prompts, max_new_tokens."
    chosen = replace(configs[fitting[0]], save_every=10, output=str(FOLDER), name=f"gsm8k-{fitting[0]}", log_to=TRACKER)
    chosen = replace(chosen, steps=pick(2, chosen.steps))
    result = begin_or_go_on(chosen)
    for when in ("before", "after"):
        n, p, lenient = (result[when][key] for key in ("problems", "accuracy", "accuracy_lenient"))
        print(f"{when}: strict {p:.1%} ± {1.96 * standard_error(p, n):.1%}, lenient {lenient:.1%}")

# %% [markdown]
# **What you have then** is an ordinary model folder. Any checkpoint loads in transformers, without this package. Two
# things must be as they were in training: the chat template, and the instruction in the system turn
# (`task.instruction`; empty for the embedded task). Here is the checkpoint of the killed run:

# %%
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = sorted((SCRATCH / "killed" / "checkpoints").glob("step-*"))[-1]
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
problem = task.problems("test")[1]
turns = [{"role": "system", "content": task.instruction}] if task.instruction else []
text = tokenizer.apply_chat_template(
    [*turns, {"role": "user", "content": problem.question}], tokenize=False, add_generation_prompt=True
)
inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
torch.manual_seed(0)
answers = model.generate(**inputs, max_new_tokens=LIMIT, do_sample=True, top_k=0, num_return_sequences=3)
print(problem.question, f"(gold {problem.gold})")
for answer in answers:
    print(repr(tokenizer.decode(answer[inputs["input_ids"].shape[1] :], skip_special_tokens=True)))

# %% [markdown]
# `top_k=0` is not decoration: `generate` takes the 50 most probable tokens by default, and Qwen's own
# `generation_config.json` sets a top-k, a top-p, a temperature and a repetition penalty, which our checkpoints leave
# out. Section 4 again: you would measure another policy than the one that you trained.
#
# To share it, log in once (`hf auth login`) and set a name. Model and tokenizer go up; `trainer.pt`, the optimizer's
# state, is twice the size of the weights and stays at home.

# %%
PUSH_TO = ""  # "your-name/qwen2.5-0.5b-gsm8k"

if PUSH_TO:
    model.push_to_hub(PUSH_TO)
    tokenizer.push_to_hub(PUSH_TO)

# %% [markdown]
# ## Check yourself
#
# 1. The reward of your run went from 0.5 to 0.9 and you are pleased. What do you look at before you tell anybody?
#
# <details><summary>Answer</summary>
# Accuracy in both readings, judged by something that is not the reward, on problems held out. Then some samples, with
# your own eyes.
# </details>
#
# 2. You find the hole in your verifier at step 300 and close it. Why not simply go on?
#
# <details><summary>Answer</summary>
# The policy has unlearned what the fixed verifier pays for. It comes back only if some samples still earn, and late. A
# checkpoint from before the farming is cheaper.
# </details>
#
# 3. `clip_fraction` is exactly 0 in every step. Is something broken?
#
# <details><summary>Answer</summary>
# Not with one update a rollout: the ratio is 1 then. With several, a clip that never acts means that the updates are
# small, or that the old log-probs are recomputed after each update by mistake.
# </details>
#
# 4. Your engine samples with top-p 0.95, training takes log-probs of the full softmax. What is the sign of the gap, and
#    how large can it get?
#
# <details><summary>Answer</summary>
# Never above 0, as with top-k. The mass kept is at least 0.95, so the gap's size is at most $-\log 0.95 \approx 0.05$
# nats: inside the clip range, and a bias all the same.
# </details>
#
# 5. `groups_without_signal` is 0.9 at step 1 and 0.9 at step 100. What are the two explanations, and which metric
#    decides?
#
# <details><summary>Answer</summary>
# The problems are too hard (all wrong) or too easy (all right); `accuracy` is near 0 or near 1.
# </details>
#
# ## Exercises
#
# [exercises/05_full_loop.ipynb](../exercises/05_full_loop.ipynb): how kind a verifier may be, what the best of ten
# checkpoints is worth, which of five engines lied, and a program that reads the curves and names the failure. Then go
# on to [06 · Where the time goes](06_where_time_goes.ipynb).
#
# ## Further reading
#
# - Amodei et al. 2016, *Concrete Problems in AI Safety*, arXiv:1606.06565, section 4: reward hacking.
# - Yu et al. 2025, *DAPO: An Open-Source LLM Reinforcement Learning System at Scale*, arXiv:2503.14476: entropy,
#   truncation and groups without signal as practical problems, each with its remedy.
# - Miller 2024, *Adding Error Bars to Evals: A Statistical Approach to Language Model Evaluations*, arXiv:2411.00640.
# - Huang et al. 2022, *The 37 Implementation Details of Proximal Policy Optimization*, ICLR blog track.
# - Cobbe et al. 2021, *Training Verifiers to Solve Math Word Problems* (GSM8K), arXiv:2110.14168.
