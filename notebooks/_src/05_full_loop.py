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
# - that the package's training step is the loop you built, line by line;
# - to write a reward function, and to see what a policy makes of it;
# - to read a run from its curves, and to tell failures apart;
# - how to check that sampling and training compute the same policy;
# - how the same loop fares on a real model, in three runs;
# - which differences between accuracies are noise.
#
# You need lessons 01 to 04: your loop, the ratio and its clip, the group as a baseline.

# %%
import inspect
import math
import re
import textwrap

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown, display

from rlcourse.collect import answer_rewards
from rlcourse.config import make_config
from rlcourse.course import changes, pick
from rlcourse.course.lessons.curve_records import load_curve
from rlcourse.course.own import load_loop
from rlcourse.course.widgets import bet
from rlcourse.evaluation import answer_problems
from rlcourse.learner import Learner
from rlcourse.measure.plots import BLACK, BLUE, GREEN, ORANGE, VERMILION
from rlcourse.measure.records import load_record, provenance
from rlcourse.policy import load_policy
from rlcourse.rollout import make_engine
from rlcourse.sampling import Sampling
from rlcourse.tasks.prompts import PromptSampler
from rlcourse.train import train_step

loop = load_loop()
PROMPTS, GROUP, LIMIT, task = loop.PROMPTS, loop.GROUP, loop.LIMIT, loop.task

# %% [markdown]
# ## 1 · You have written this already
#
# Here's your loop as it is after lesson 04: the reward minus the mean of its group, a clipped sum over a constant. One
# more function is replaced. Your `roll_out` samples prompt by prompt; the package's engine samples all prompts at once,
# from the same distribution. Does the rest of the package do anything that your loop doesn't?


# %%
def centered(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """Each reward minus the mean of its group: [rows]."""
    groups = rewards.view(-1, group)
    return (groups - groups.mean(1, keepdim=True)).flatten()


def with_engine(policy, problems):
    """What `roll_out` does, by the package's engine."""
    engine = make_engine(policy, "fast", torch.float32)
    rollout = engine.generate(policy.prompts([p.question for p in problems]), GROUP, LIMIT, Sampling())
    torch.randperm(len(rollout.ids))  # the package shuffles its rows here: both should draw the same random numbers
    return rollout


loop.weigh, loop.loss, loop.roll_out = centered, changes.dr_grpo, with_engine

# %% [markdown]
# Train with both and compare. The package's `Learner` has the model and the optimizer, and `train_step` does one step.
# **Its last argument is your own reward function.**


# %%
def with_package(steps: int, reward_function=answer_rewards, policy=None, seed: int = 0):
    """Train the embedded model. Returns the policy, what each step measured, and the answers of the last step."""
    config = make_config("laptop", num_prompts=PROMPTS, device="cpu", seed=seed)
    torch.manual_seed(config.seed)
    policy = policy or load_policy("embedded")
    engine = make_engine(policy, config.engine, torch.float32)
    learner, order = Learner(policy, config), PromptSampler(task.problems("train"), config.seed)
    log = []
    for step in range(steps):
        greedy = loop.greedy_accuracy(policy, pick(8, 200)) if step % 5 == 0 else None
        metrics, completions = train_step(learner, engine, task, order, step, reward_function)
        log.append(metrics | {"greedy": greedy})
    return policy, log, completions.answers


STEPS = pick(2, 4)
(mine, ours), (packages, theirs, _) = loop.train(STEPS, problems=8), with_package(STEPS)
for step, (a, b) in enumerate(zip(ours, theirs, strict=False), 1):
    print(f"step {step}: reward {a['reward']:.4f} and {b['reward']:.4f}")
weights = [torch.nn.utils.parameters_to_vector(p.model.parameters()).detach() for p in (mine, packages)]
before = torch.nn.utils.parameters_to_vector(load_policy("embedded").model.parameters()).detach()
moved, apart = (weights[0] - before).norm().item(), (weights[0] - weights[1]).norm().item()
print(f"{STEPS} steps moved the weights by {moved:.2g}, and yours end {apart:.0e} from the package's")

# %% [markdown]
# The same rewards, and the same weights but for rounding. {{ assert apart < 0.05 * moved and [row["reward"] for row in
# ours[:STEPS]] == [m["reward"] for m in theirs] }} So `train_step` does what your loop does. Here's its body, with your
# file's names on the left. **Look for** the lines without a name.

# %% tags=["hide-input"]
# @title The source of `train_step`
MARKS = {
    "= collect(": "roll_out, judge",
    "make_batch(": "advantages, weigh",
    "plan_minibatches(": "for update in ...",
    "compute_old_logprobs(": "old",
    "logprobs_and_values(": "log_probs",
    "= token_loss(": "loss",
    "sampler_correction(": "(section 4)",
    "aggregate(sampler_weights": "loss: its sum",
    "= kl_estimate(": "ref (lesson 03)",
    "= value_loss(": "critic (lesson 02)",
    "loss.backward()": "backward",
    "update(": "clip, AdamW",
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
# The lines without a name measure (`means.add`), save memory (a micro-batch has as many rows as fit into a number of
# tokens; their gradients add up), or are switched off here. `collect` is in `rlcourse/collect.py`, `make_batch` in
# `rlcourse/learner.py`, the losses in `rlcourse/losses.py`, the `for` around it all in `rlcourse/train.py`.
#
# ## 2 · Paid for sound work
#
# A reward function, that last argument, gets a step's answers and the config, and returns a number per answer. Gold
# answers are expensive, and you can check a lot without them: an answer shows its working, and a machine can redo the
# sums. So a colleague proposes to pay for sound work. An answer earns 1 if it ended, announces a number
# (`answer.formatted` says whether it did both), and **every calculation in it holds**.

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
# The colleague expects better arithmetic, and with it better answers. What do you expect?

# %% tags=["hide-input"]
# @title Your bet
RUN = pick(6, 26)
start = 100 * load_curve("lesson05_healthy")["results"][0]["evals"][0]["accuracy"]
sound_bet = bet(
    f"The model starts at a greedy accuracy of {start:.0f}% and is paid for sound work. What is the accuracy after "
    f"{RUN - 1} steps?",
    (0, 100, 1),
    unit="%",
)

# %%
sound_policy, paid_sound, answers = with_package(RUN, sound)
again_sound = [with_package(RUN, sound, seed=seed)[1] for seed in pick((1,), (1, 2))]  # the same with other seeds

# %% tags=["hide-input"]
# @title Figure: what is paid, and what you want


def greedy_points(log) -> tuple[list[int], list[float]]:
    """Steps at which greedy answers were judged, and the percentage that was right."""
    known = [m for m in log if m["greedy"] is not None]
    return [m["step"] - 1 for m in known], [100 * m["greedy"] for m in known]


fig, axes = plt.subplots(1, 2, figsize=(10, 3), layout="constrained", sharey=True)
for log, width in ((paid_sound, 2), *((log, 0.8) for log in again_sound)):
    axes[0].plot(range(RUN), [100 * m["reward"] for m in log], color=ORANGE, linewidth=width)
    axes[1].plot(*greedy_points(log), color=BLUE, marker="o", markersize=2 * width, linewidth=width)
sound_bet.line(axes[1])
axes[0].set(title="what is paid (thin: other seeds)", xlabel="training step", ylabel="samples paid, %", ylim=(-2, 102))
axes[1].set(title="what you want, on validation problems", xlabel="training step", ylabel="greedy, % right")
for ax in axes:
    ax.grid()
axes[1].legend()
plt.show()
fell = [greedy_points(log)[1][-1] for log in (paid_sound, *again_sound)]
sound_bet.result(fell)
for answer in answers[:: len(answers) // 4]:
    print(f"gold {answer.problem.gold:>3s}   {answer.text!r}")

# %% [markdown]
# The reward climbs to its maximum, and greedy accuracy falls from {{ start:.0f }} to {{ fell[0]:.1f }}%; with two other
# seeds it ends at {{ max(fell):.1f }}% at most. {{ assert max(fell) < start / 4 }} The verifier has a hole, and the
# answers show it. Where there's no calculation, none is wrong: `all([])` is `True`. So a guess is paid like sound
# working, and it's safer. The policy didn't look for a bug. Guesses were among its samples from the start, they earned
# more often than working did, and so they became more probable.
#
# The curve on the left is all you see if the verifier is your only judge. Keep a second judge that can't be fooled in
# the same way, and read samples. Whatever you pay for, `train_step` also reports `accuracy` by the task's own verifier.
#
# ### One condition closes it
#
# There must be a calculation, and the last one must give the announced number. How close is that to paying for right
# answers?


# %%
def sound_and_used(answers, config) -> list[float]:
    """As `sound`, and there is a calculation, and the last one gives the number that is announced."""
    rewards = []
    for answer, right in zip(answers, sound(answers, config), strict=True):
        done = CALCULATION.findall(answer.text)
        rewards.append(right * float(bool(done) and done[-1][3] == answer.verdict.answer))
    return rewards


# %%
sound_policy, mended, sound_answers = with_package(RUN, sound_and_used)
gold_policy, gold, _ = with_package(RUN)  # for comparison: paid for the right number, as ever

# %% tags=["hide-input"]
# @title Figure: the hole closed, and gold answers for comparison
fig, axes = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained", sharey=True)
for log, color, marker, label in (
    (paid_sound, VERMILION, "s", "sound work"),
    (mended, GREEN, "^", "sound work, hole closed"),
    (gold, BLUE, "o", "the right number"),
):
    axes[0].plot(range(RUN), [100 * (m["reward"] - m["accuracy"]) for m in log], color=color, label=label)
    axes[1].plot(*greedy_points(log), color=color, marker=marker, label=label)
axes[0].set(title="paid but wrong", xlabel="training step", ylabel="reward minus accuracy, %", ylim=(-2, 102))
axes[1].set(title="what you want, on validation problems", xlabel="training step", ylabel="greedy, % right")
for ax in axes:
    ax.grid()
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, title="paid for")
plt.show()
reached, with_gold = greedy_points(mended)[1][-1], greedy_points(gold)[1][-1]
silent = [100 * sum(m["groups_without_signal"] for m in log[:10]) / len(log[:10]) for log in (mended, gold)]
early, late = (100 * sum(m["reward"] - m["accuracy"] for m in part) / 5 for part in (mended[:5], mended[-5:]))
fooled = {a.text: a for a in sound_answers if sound_and_used([a], None)[0] and not a.strict}
for answer in list(fooled.values())[:2]:
    print(f"paid and wrong, gold {answer.problem.gold}: {answer.problem.question}\n    {answer.text!r}")

# %% [markdown]
# {{ reached:.1f }}% without a single gold answer; with gold answers it's {{ with_gold:.1f }}%. {{ assert start + 20 <
# reached }} The green line even leads at first, since more samples earn: in the first ten steps {{ silent[0]:.0f }}% of
# the groups have no signal, against {{ silent[1]:.0f }}%. {{ assert silent[0] < silent[1] }}
#
# But sound work needn't be right. On the left, green is work that's sound, paid, and answers the wrong question. The
# verifier does its job because soundness and truth go together **in what this policy writes**, and nothing keeps it
# that way. On average {{ early:.0f }}% of the samples were paid and wrong in the first five steps, and {{ late:.0f }}%
# in the last five. {{ assert late > early }} That's how the next hole announces itself, and only a second judge shows
# it.
#
# The hole is closed now. Must you throw the spoiled policy away? Train it further, paid by the fixed verifier:

# %%
_, again, _ = with_package(RUN, sound_and_used, policy=sound_policy)
back = greedy_points(again)
print(
    "training step, greedy accuracy in %:",
    *(f"{step}: {value:.1f}" for step, value in zip(*back, strict=True)),
    sep="  ",
)

# %% [markdown]
# In its first step {{ 100 * again[0]["reward"]:.0f }}% of the samples earn anything, and that's enough: after {{ RUN -
# 1 }} steps it's at {{ back[1][-1]:.1f }}%, where the fresh start was at {{ reached:.1f }}%. Training amplifies what is
# still in the samples. With no working left in them, nothing would have brought it back.
#
# ## 3 · Reading a run
#
# `rlcourse train` writes a line per step to `metrics.jsonl`, and one per greedy evaluation on validation problems to
# `evals.jsonl`.
#
# | metric | what it is | a good run | look closer when |
# | --- | --- | --- | --- |
# | `reward` | mean over the answers of a step | rises, then levels off | it rises and `accuracy` does not |
# | `accuracy`, `accuracy_lenient` | right, by the strict and the lenient reading | rise together | they diverge |
# | `truncated` | share that was cut off | falls to 0 | it stays above 0.05 |
# | `groups_without_signal` | share of groups with equal rewards | falls, rises at the end | it is 1 |
# | `entropy` | nats per token | falls slowly | it is 0 and the reward still low |
# | `kl` (with `kl_coef`) | k3 to the start, nats per token | grows slowly | it jumps, or stays below 1e-5 |
# | `clip_fraction` | share of tokens that the clip stopped | below 0.05 | it is large |
# | `grad_norm` | before it is clipped | stays the same size | it spikes, or is exactly 0 |
# | `mismatch_mean` | sampling against training (section 4) | stays as small as at the start | it grows |
#
# The loss is missing on purpose: its value says nothing about progress (lesson 01).
#
# ### Four patients
#
# On the left is a healthy run, recorded with three seeds (line: mean, band: range), with {{ make_config().num_prompts
# }} problems per step and {{ load_curve("lesson05_healthy")["setup"]["minibatches"] }} updates per rollout. Each of the
# others has **one** setting changed. One is paid for the wrong thing, one has a learning rate a hundred times too
# large, one a thousand times too small, and one may write no more than {{
# load_curve("lesson05_truncation")["setup"]["max_new_tokens"] }} tokens. All curves are of a step's samples, before its
# updates, so KL begins at rounding level. **Look for** which is which. Answers can be cut off for more than one reason.
# {{ assert math.isclose(load_curve("lesson05_collapse")["setup"]["lr"], 100 * make_config().lr) and
# math.isclose(load_curve("lesson05_still")["setup"]["lr"], make_config().lr / 1000) }}

# %% tags=["hide-input"]
# @title Figure: a healthy run and four patients


def by_seed(record, key: str) -> torch.Tensor:
    """A metric [seeds, steps]."""
    return torch.tensor([seed["metrics"][key] for seed in record["results"]])


def band(ax, record, key: str, color: str, width: float = 1.6, style: str = "-") -> None:
    """The mean of the seeds as a line, a band from the least to the greatest."""
    values = by_seed(record, key)
    steps = torch.arange(1, values.shape[1] + 1)
    ax.fill_between(steps, values.amin(0), values.amax(0), color=color, alpha=0.25, linewidth=0)
    ax.plot(steps, values.mean(0), color=color, linewidth=width, linestyle=style, label=key)


PATIENTS = {"A": "truncation", "B": "still", "C": "format", "D": "collapse"}
healthy = load_curve("lesson05_healthy")
runs = {"healthy": healthy} | {letter: load_curve(f"lesson05_{name}") for letter, name in PATIENTS.items()}
fig, axes = plt.subplots(2, 5, figsize=(13, 5.2), layout="constrained", sharex=True, sharey="row")
for column, (name, record) in zip(axes.T, runs.items(), strict=True):
    band(column[0], record, "reward", ORANGE, 4)
    band(column[0], record, "accuracy", BLUE, 2, "--")
    band(column[0], record, "truncated", BLACK)
    band(column[1], record, "kl", VERMILION)
    column[0].set_title(name)
    column[1].set(xlabel="training step", yscale="log", ylim=(1e-9, 1e2))
axes[0, 0].set(ylabel="share", ylim=(0, 1.02))
axes[1, 0].set_ylabel("KL to the start, nats per token")
fig.legend(handles=[*axes[0, 0].lines, *axes[1, 0].lines], loc="outside lower center", ncols=4)
plt.show()
print(f"recorded on {healthy['device']}, {healthy['date']}, with `python -m tools.lessons.lesson05`")

# %% tags=["hide-input"]
# @title Your bet
patient_bet = bet(
    f"Which of the four may write no more than {load_curve('lesson05_truncation')['setup']['max_new_tokens']} tokens?",
    list(PATIENTS),
)

# %% tags=["hide-input"]
# @title Table: what they ended with
patient_bet.result(next(letter for letter, name in PATIENTS.items() if name == "truncation"))
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
        f"| {name} | {changed} | {reward:.2f} | {before:.1f}% | {min(after[name]):.1f} to {max(after[name]):.1f}% |"
    )
display(Markdown("\n".join(lines)))
cut = by_seed(runs["A"], "truncated")[:, -5:].mean().item()
still_kl = by_seed(runs["B"], "kl").max().item()

# %% [markdown]
# **A, too few tokens.** (Its tests have the same limit, hence the lower accuracy before.) The reward merely looks slow,
# and the KL looks healthy. `truncated` gives it away: {{ 100 * cut:.0f }}% of the answers are cut off. {{ assert cut >
# 0.25 }} Raise `max_new_tokens`.
#
# **B, nothing happens.** The reward jitters because the problems change, which looks like life. KL tells jitter from
# learning: it stays below {{ 10.0 ** math.ceil(math.log10(still_kl)):.0e }} nats. {{ assert still_kl < 1e-4 }}
#
# **C, paid for the wrong thing.** Any number in the right form earns as much as the right one, and the shortest way to
# a number is a guess. The reward goes up, and test accuracy falls to between {{ min(after["C"]):.1f }} and {{
# max(after["C"]):.1f }}%. {{ assert max(after["C"]) < 5 }}
#
# **D, the learning rate.** From the third step on KL is {{ by_seed(runs["D"], "kl")[:, 2:].min():.1f }} nats per token
# or more; the healthy runs never reach {{ math.ceil(10 * by_seed(healthy, "kl").max()) / 10:.1f }}. {{ assert
# by_seed(runs["D"], "kl")[:, 2:].min() > 3 * by_seed(healthy, "kl").max() }} Soon hardly any answer earns anything, the
# groups are unanimous, and the gradient is exactly 0. {{ assert by_seed(runs["D"], "reward")[:, 12:].max() < 0.01 and
# (by_seed(runs["D"], "grad_norm")[:, 12:] == 0).float().mean() > 0.95 }} Nothing pulls such a run back. Return to the
# last good checkpoint and divide the learning rate by ten.
#
# ## 4 · Is the policy that samples the one that trains?
#
# A fifth failure shows in none of these curves. The policy gradient averages over answers **drawn from the policy that
# it differentiates**. But two programs are at work, one that samples and one that trains. They may disagree because of
# rounding, or because of a setting that only one of them knows, such as a top-k that a serving library switches on by
# default. This is the *train–inference mismatch*.
#
# The test costs next to nothing. The engine keeps the log-prob of each token that it drew, and training computes it
# again. Before any update the two must be equal. Their difference is the **mismatch**; its `exp` is the importance
# ratio in a loop that uses the engine's log-probs as `old`, and should be 1.

# %% tags=["hide-input"]
# @title Your bet
outside_bet = bet(
    "The engine samples with top-k 5, and training doesn't know. Before the first update, what share of the tokens has "
    "a ratio outside the clip range of 0.8 to 1.2?",
    (0, 100, 1),
    unit="%",
)

# %%
from rlcourse.logprobs import token_logprobs


def gaps(sampled_with: Sampling, trained_with: Sampling, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    """Recomputed less sampling log-prob of every token of a rollout of the starting policy."""
    policy = load_policy("embedded")
    engine = make_engine(policy, "fast", dtype)
    torch.manual_seed(seed)
    few = task.problems("train")[pick(8, 32) * seed : pick(8, 32) * (seed + 1)]
    rollout = engine.generate([policy.prompt(p.question) for p in few], 8, LIMIT, sampled_with)
    with torch.no_grad():
        logprobs, _ = token_logprobs(policy.model, rollout, trained_with, 4096)
    return (logprobs - rollout.logprobs)[rollout.completion_mask]


def outside(gap: torch.Tensor) -> float:
    """Percent of the tokens whose ratio PPO would clip."""
    return 100 * ((gap.exp() - 1).abs() > 0.2).float().mean().item()


full, top5 = Sampling(), Sampling(top_k=5)
found = {
    "both the same": gaps(full, full),
    "engine in bfloat16": gaps(full, full, torch.bfloat16),
    "top-k 5 in sampling alone": gaps(top5, full),
    "top-k 5 in both": gaps(top5, top5),
    "temperature 0.8 in sampling alone": gaps(Sampling(temperature=0.8), full),
}
lines = ["| | mean gap | mean absolute gap | largest gap | ratio outside 0.8 to 1.2 |", "| --- " * 5 + "|"]
for name, gap in found.items():
    lines.append(f"| {name} | {gap.mean():+.0e} | {gap.abs().mean():.0e} | {gap.max():+.0e} | {outside(gap):.1f}% |")
outside_bet.result([outside(found["top-k 5 in sampling alone"]), *(outside(gaps(top5, full, seed=s)) for s in (1, 2))])
display(Markdown("\n".join(lines)))
assert found["both the same"].abs().max() < 1e-3 and found["top-k 5 in both"].abs().max() < 1e-3

# %% [markdown]
# With bfloat16 in the engine the log-probs are off a little, in both directions, and nearly every token is well inside
# the clip range. {{ assert 100 * ((found["engine in bfloat16"].exp() - 1).abs() > 0.2).float().mean() < 0.5 }} That's
# what to expect on a GPU where engine and training are two programs. (Lesson 11 makes the gap vanish.)
#
# Top-k is another matter. It throws the tail away and gives its mass to the tokens that stay. So the engine's log-prob
# is too high by $-\log(\text{mass kept})$, and the gap is **never above 0**, but for rounding. {{ assert found["top-k 5
# in sampling alone"].max() < 1e-3 }} That does two kinds of damage:
#
# - **The clip is fooled**, in a loop that uses these log-probs as `old`. Ratios begin below 1, as if the policy had
#   already moved, and below $1 - \varepsilon$ the clip stops making wrong answers less likely. `rlcourse` lets the
#   trainer compute `old`, so it's safe from this one.
# - **The gradient is biased**, in any loop: the answers don't come from the distribution that it differentiates.
#
# The remedy is one distribution for both, as in the fourth row. Where two programs can't be made to agree,
# `sampler_correction` weights the loss by the ratio between them. Look at `mismatch_mean` first whenever you change
# engine, precision or library.
#
# ## 5 · A real model, three endings
#
# Section 2's hole was planted. What happens with a model that nobody prepared for this course?

# %% tags=["hide-input"]
# @title The records
VARIANTS = {"no examples": "no examples", "format bonus": "format bonus", "two examples": "dr_grpo"}
real = {
    name: load_curve(f"gsm8k_{variant.replace(' ', '_')}", "NVIDIA H100 80GB HBM3")
    for name, variant in VARIANTS.items()
}
PROBLEMS = real["two examples"]["results"][0]["summary"]["eval_problems"]
judged = load_record("gsm8k", "NVIDIA H100 80GB HBM3")["results"]


def test_of(name: str, key: str, after: bool) -> list[float]:
    """A metric of the test before or after training, of each seed."""
    rows = [row for row in judged if row["variant"] == VARIANTS[name] and row["split"] == "test"]
    return sorted(row[key] for row in rows if (row["step"] > 0) == after)


# %% [markdown]
# Qwen2.5-Coder-0.5B-Instruct has 0.5 B parameters, and GSM8K has {{ PROBLEMS:, }} test problems in grade-school
# mathematics. The loop is the same, with {{ real["two examples"]["setup"]["num_prompts"] }} × {{ real["two
# examples"]["setup"]["num_generations"] }} answers per step, at most {{ real["two examples"]["setup"]["max_new_tokens"]
# }} tokens each, and a learning rate of {{ real["two examples"]["setup"]["lr"]:.0e }}, because a pretrained model has
# more to lose. What follows was recorded on one {{ real["two examples"]["device"] }}. (The weights were quantized to 5
# and 8 bits and dequantized, so it isn't the original checkpoint.)
#
# In the first of three runs, *no examples*, the system prompt tells the model to end with `#### NUMBER`, and it's paid
# by the strict reading, as in lesson 01. In the second, *format bonus*, it also gets 0.2 for a wrong answer in that
# form, to help it find the form. In the third, *two examples*, there's no bonus, but the prompt shows {{ real["two
# examples"]["setup"]["examples"] }} worked examples.

# %% tags=["hide-input"]
# @title Your bet
ending_bet = bet(
    f"With two examples the model starts at {100 * test_of('two examples', 'accuracy', False)[0]:.1f}%. What's its "
    f"accuracy after {real['two examples']['setup']['steps']} steps, which take less than four minutes?",
    (0.0, 60.0, 0.5),
    unit="%",
)

# %% tags=["hide-input"]
# @title Figure: three endings
fig, axes = plt.subplots(1, 3, figsize=(12, 3.8), sharey=True, layout="constrained")
for ax, (name, record) in zip(axes, real.items(), strict=True):
    rewards = 100 * torch.tensor([seed["rewards"] for seed in record["results"]])  # [seeds, steps]
    width = max(1, rewards.shape[1] // 30)
    near = rewards.unfold(1, width, 1).mean(2)  # of so many steps
    x = [first + (width + 1) / 2 for first in range(near.shape[1])]  # the first step is number 1
    ax.fill_between(x, near.amin(0), near.amax(0), color=ORANGE, alpha=0.25, linewidth=0)
    ax.plot(x, near.mean(0), color=ORANGE, label="100 × reward of the samples")
    rows = [row for row in judged if row["variant"] == VARIANTS[name] and row["split"] == "validation"]
    for key, color, marker in (("accuracy_lenient", GREEN, "^"), ("accuracy", BLUE, "o")):
        steps = sorted({row["step"] for row in rows})
        means = [torch.tensor([100 * row[key] for row in rows if row["step"] == step]).mean() for step in steps]
        label = f"greedy, % right, {'lenient' if '_' in key else 'strict'}"
        ax.plot(steps, means, color=color, marker=marker, linestyle=":", label=label)
    seeds = len(record["results"])
    ax.set(title=f"{name}, {seeds} seed{'s' * (seeds > 1)}", xlabel="training step", ylim=(-2, 55))
    ax.grid()
axes[0].set_ylabel("%")
fig.legend(*axes[2].get_legend_handles_labels(), loc="outside lower center", ncols=3)
learned = test_of("two examples", "accuracy", True)
ending_bet.result([100 * accuracy for accuracy in learned])
plt.show()
print(provenance(real["two examples"]), "and validation on 256 problems")

# %% tags=["hide-input"]
# @title Table: before and after, on all test problems
lines = ["| run | seeds | steps | strict, % | lenient, % | cut off, % | tokens of wrong answers |", "| --- " * 7 + "|"]
for name, record in real.items():
    cells = []
    for key, factor in (("accuracy", 100), ("accuracy_lenient", 100), ("truncated", 100), ("length_wrong", 1)):
        before, after_it = (test_of(name, key, after) for after in (False, True))
        ends = f"{factor * after_it[0]:.1f}" + (f" to {factor * after_it[-1]:.1f}" if len(after_it) > 1 else "")
        cells.append(f"{factor * before[0]:.1f} → {ends}")
    lines.append(f"| {name} | {len(record['results'])} | {record['setup']['steps']} | {' | '.join(cells)} |")
display(Markdown("\n".join(lines)))
seconds = max(seed["summary"]["wall_seconds"] for seed in real["two examples"]["results"])
formed = real["format bonus"]["results"][0]["rewards"]
quickly = next(step for step, reward in enumerate(formed, 1) if reward > 0.18)

# %% tags=["hide-input"]
# @title Transcript: an answer of each run's last step
samples = {name: record["results"][0]["samples"] for name, record in real.items()}  # sampled in the last step
short = min(range(4), key=lambda i: len(samples["no examples"][i]["question"]))
shown = {name: samples[name][short] for name in ("no examples", "format bonus")}
shown["two examples"] = next(answer for answer in samples["two examples"] if answer["reward"] == 1)
assert shown["no examples"]["question"] == shown["format bonus"]["question"]
for name, answer in shown.items():
    step, asked = real[name]["setup"]["steps"], answer["question"] if name != "format bonus" else "(the same question)"
    print(f"{name.upper()}, step {step}: {asked}  (gold {answer['gold']})")
    print(f"{textwrap.indent(answer['text'].strip(), '    ')}\nreward {answer['reward']:.1f}\n")

# %% [markdown]
# **No examples: it earns nothing.** Every reward of all {{ real["no examples"]["setup"]["steps"] }} steps is 0. {{
# assert not any(real["no examples"]["results"][0]["rewards"]) }} Read leniently, {{ 100 * test_of("no examples",
# "accuracy_lenient", False)[0]:.1f }}% of its test answers are right, and so is the one above. {{ assert "boxed{" +
# shown["no examples"]["gold"] + "}" in shown["no examples"]["text"] }} But it never writes `####`, so every group is
# unanimous, and the gradient is 0. RL amplifies what the model already does occasionally, and here there's nothing to
# amplify.
#
# **Format bonus: it collapses.** The reward reaches {{ formed[quickly - 1]:.2f }} at step {{ quickly }}: nearly every
# answer has the form now, and is wrong. The working is gone: from {{ test_of("format bonus", "length_wrong",
# False)[0]:.0f }} tokens, a wrong answer is down to {{ test_of("format bonus", "length_wrong", True)[0]:.0f }}. {{
# assert test_of("format bonus", "length_wrong", True)[0] < 6 and quickly < 20 }} The strict score went **up**, from 0.0
# to {{ 100 * test_of("format bonus", "accuracy", True)[0]:.1f }}%. The lenient one shows what was lost: {{ 100 *
# test_of("format bonus", "accuracy_lenient", False)[0]:.1f }} to {{ 100 * test_of("format bonus", "accuracy_lenient",
# True)[0]:.1f }}%. It's section 2 and patient C again, on a real model, in {{ real["format
# bonus"]["results"][0]["summary"]["seconds"]["steps"]:.0f }} seconds.
#
# **Two examples: it learns.** The examples show the form, so {{ 100 * test_of("two examples", "accuracy", False)[0]:.1f
# }}% of the greedy answers are right from the start, and some samples earn something. Three seeds end at {{ 100 *
# learned[0]:.1f }} to {{ 100 * learned[-1]:.1f }}%, each within {{ seconds / 60:.1f }} minutes. {{ assert seconds < 240
# and len(learned) == 3 }} Strict and lenient rise together, and few answers are still cut off. (The transcript shows a
# right answer; more than half are still wrong.) {{ assert max(learned) < 0.5 }}
#
# The algorithm didn't make the difference. What the first samples could earn did. Before a long run, look at twenty
# samples and at the share of groups with a signal; `rlcourse train` does both, and warns.
#
# ## 6 · Which difference is noise?
#
# A test counts the right answers to a number of problems, so two equally good models hardly ever get the same total.

# %% tags=["hide-input"]
# @title Your bet
noise_bet = bet(
    "GSM8K's test has 1,319 problems. Two models are equally good, near 50%. By how many points do their measured "
    "accuracies differ at most, in 95 of 100 such pairs?",
    (0.0, 6.0, 0.1),
    unit="points",
)

# %% [markdown]
# If each problem is solved with probability $p$, the measured accuracy has the standard error
# $\sqrt{p\,(1-p)/\text{problems}}$, and 95% of measurements fall within 1.96 standard errors of the truth. If two
# totals are all you have, treat them as independent: the standard error of their difference is the root of the sum of
# the two squares.


# %%
def standard_error(p: float, n: int) -> float:
    """Of an accuracy p measured on n problems."""
    return math.sqrt(p * (1 - p) / n)


needed = 100 * 1.96 * math.sqrt(2) * standard_error(0.5, PROBLEMS)
noise_bet.result(round(needed, 1))

# %% [markdown]
# Now look at what others report for a sibling of that model, Qwen2.5-0.5B-Instruct. **Look for** pairs that are further
# apart than the bar marked *chance*. (Black and blue bars may overlap a little and still differ by more than chance.)

# %% tags=["hide-input"]
# @title Figure: published results with their error bars
PUBLISHED = {"as released": 49.6, "GRPO with LoRA": 54.3, "PPO": 56.7, "PRIME": 58.7}
fig, ax = plt.subplots(figsize=(7, 2.8))
for row, percent in enumerate(PUBLISHED.values()):
    bar = 100 * 1.96 * standard_error(percent / 100, PROBLEMS)
    ax.errorbar(percent, row, xerr=bar, color=BLUE if row else BLACK, marker="o", capsize=4)
    ax.annotate(f"{percent}", (percent, row), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=9)
ax.annotate("", (57, 0.5), (57 + needed, 0.5), arrowprops={"arrowstyle": "|-|", "color": VERMILION})
ax.text(57 + needed / 2, 0.3, f"chance: {needed:.1f} points", ha="center", va="bottom", color=VERMILION, fontsize=9)
ax.set_yticks(range(4), list(PUBLISHED))
ax.set(ylim=(3.6, -0.6), xlabel="accuracy on GSM8K's 1,319 test problems, %", title="Qwen2.5-0.5B-Instruct, ± 1.96 se")
ax.grid(axis="x")
plt.show()
gain = PUBLISHED["GRPO with LoRA"] - PUBLISHED["as released"]
between = PUBLISHED["PRIME"] - PUBLISHED["GRPO with LoRA"]
steps_apart = [PUBLISHED["PPO"] - PUBLISHED["GRPO with LoRA"], PUBLISHED["PRIME"] - PUBLISHED["PPO"]]

# %% [markdown]
# (The first is Qwen's own, arXiv:2412.15115, the others are from the documentation of verl, an RL library. LoRA trains
# a small adapter (lesson 13); PRIME also learns a reward per token. Prompts and readings differ.)
#
# Taken at face value, training helps: even the smallest gain, {{ gain:.1f }} points, exceeds the {{ needed:.1f }} that
# chance explains. {{ assert gain > needed }} But these totals can't say which of the three methods is better than the
# next: {{ steps_apart[0]:.1f }} and {{ steps_apart[1]:.1f }} points are within the noise. {{ assert max(steps_apart) <
# needed < between }} Of the three, only the first and the last differ by more, {{ between:.1f }} points. And that's the
# noise of the **problems** alone. The three seeds of the healthy run above end at {{ ", ".join(f"{a:.1f}" for a in
# after["healthy"]) }}% on the same test problems.
#
# **If you have both models' answers** you can do better. Most problems are solved by both or by neither, and can't say
# which is better. So take the difference problem by problem, $d = -1$, 0 or 1, with the standard error $\mathrm{std}(d)
# / \sqrt{\text{problems}}$. Here are section 2's policies, paid for sound work (hole closed) and for the right number,
# on the same test problems.


# %%
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
words = load_curve("lesson05_words_strict")["results"]  # whose answers ended in words at first
ends["strict"] = [100 * seed["summary"]["after"]["accuracy"] for seed in words]
spread = {name: max(found) - min(found) for name, found in ends.items()}
print(f"right: {a.mean():.1%} and {b.mean():.1%} of {n}; by both {both}, by neither {neither}")
print(f"difference {100 * d.mean():+.1f} points, ± {apart:.2f} if the problems differed, ± {paired:.2f} paired")

# %% [markdown]
# Is that difference noise? Hold it against both intervals: pairing shrinks the first from ± {{ apart:.1f }} to ± {{
# paired:.1f }} points. Unpaired, you'd need {{ (apart / paired) ** 2:.1f }} times as many problems for that. {{ assert
# paired < 0.9 * apart }} But each method was run once: on these problems the three seeds of the healthy run end {{
# spread["healthy"]:.1f }} points apart, and three of another recorded run {{ spread["strict"]:.1f }}. To rank methods,
# repeat the runs.
#
# ## 7 · Run it
#
#     rlcourse train --preset h200 --model MODEL --examples 2 --dry-run    # what it needs
#     rlcourse train --preset h200 --model MODEL --examples 2              # train
#     rlcourse train --resume --name RUN                                   # go on after a disconnection
#
# You get an ordinary model folder: any checkpoint loads in transformers, without this package. Two things must be as
# they were in training: the chat template, and the prompt's instruction and examples. And set `top_k=0` when you
# sample: by default, `generate` keeps only the 50 most probable tokens. That's section 4 again: you'd measure a policy
# that you didn't train.
#
# ## Check yourself
#
# 1. The reward of your run went from 0.5 to 0.9 and you're pleased. What do you look at before you tell anyone?
#
# <details><summary>Answer</summary>
# Accuracy in both readings, judged by something other than the reward, on held-out problems. Then read some samples
# yourself.
# </details>
#
# 2. You find the hole in your verifier at step 300 and close it. Why not simply go on?
#
# <details><summary>Answer</summary>
# The policy has unlearned what the fixed verifier pays for. It recovers only if some samples still earn, and late. A
# checkpoint from before the damage is cheaper.
# </details>
#
# 3. `clip_fraction` is exactly 0 in every step. Is something broken?
#
# <details><summary>Answer</summary>
# Not with one update per rollout: the ratio is 1 then. With several, a clip that never acts means that the updates are
# small, or that the old log-probs are recomputed after each update by mistake.
# </details>
#
# 4. `groups_without_signal` is 0.9 at step 1 and 0.9 at step 100. What are the two explanations, and which metric
#    decides?
#
# <details><summary>Answer</summary>
# The problems are too hard (all wrong) or too easy (all right); `accuracy` is near 0 or near 1.
# </details>
#
# ## Exercises
#
# [exercises/05_full_loop.ipynb](../exercises/05_full_loop.ipynb): write the reward that a real model needs, find out
# how kind a verifier may be, what the best of ten checkpoints is worth, what is wrong with an engine, and write a
# program that names the failure from its curves. Then go on to [06 · Where the time goes](06_where_time_goes.ipynb).
#
# ## Further reading
#
# - Amodei et al. 2016, *Concrete Problems in AI Safety*, arXiv:1606.06565, section 4: reward hacking.
# - Yu et al. 2025, *DAPO: An Open-Source LLM Reinforcement Learning System at Scale*, arXiv:2503.14476: entropy,
#   truncation and groups without signal as practical problems, each with its remedy.
# - Miller 2024, *Adding Error Bars to Evals: A Statistical Approach to Language Model Evaluations*, arXiv:2411.00640.
# - Cobbe et al. 2021, *Training Verifiers to Solve Math Word Problems* (GSM8K), arXiv:2110.14168.
