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
# - to read a run from five curves, and to tell five failures apart;
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
from dataclasses import fields, replace
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
from rlcourse.measure.plots import BLACK, BLUE, GREEN, ORANGE, SKY, VERMILION
from rlcourse.policy import load_policy
from rlcourse.rollout import make_engine
from rlcourse.sampling import Sampling
from rlcourse.step import train_step
from rlcourse.tasks.prompts import PromptSampler

SCRATCH = Path(tempfile.mkdtemp())  # runs of this notebook go here

# %% [markdown]
# ## 1 · You have written this already
#
# Here is the loop of lesson 01 once more. The third line is Dr. GRPO's advantage, the reward less the mean of its
# group; with one update a rollout the ratio is 1 and the clip has nothing to do (lesson 02). Two things are new: it
# keeps the norm of the gradient, and it draws a permutation that it throws away. The package shuffles its rows at that
# point, and we want both to throw the same dice.


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
def with_package(steps: int, reward_function=answer_rewards, **settings):
    """Train the embedded model. Returns the policy, what each step measured, and the answers of the last step."""
    config = make_config("laptop", num_prompts=PROMPTS, device="cpu", **settings)
    torch.manual_seed(config.seed)
    policy = load_policy("embedded")
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
    "sampler_correction(": "lesson 03",
    "aggregate(weights": "its mean",
    "= kl_estimate(": "lesson 02",
    "= value_loss(": "lesson 02",
    "loss.backward()": "4 step: backward",
    "learner.update(": "4 step: AdamW",
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
# Nothing else is there but choices, nearly all of them switched off here: several mini-batches and what they need (the
# old log-probs of the ratio), a KL term, a value head. A micro-batch is a part of the rows that fits the memory; their
# gradients add up.
#
# | in your loop | in the package |
# | --- | --- |
# | `generate`, `verify` | `collect` in `rlcourse/collect.py` |
# | less the group's mean | `make_batch` in `rlcourse/step.py`, with `rlcourse/advantages.py` |
# | log-probs, loss | `rlcourse/logprobs.py`, `rlcourse/losses.py` |
# | AdamW, warm-up, clip of the gradient | `Learner` in `rlcourse/learner.py` |
# | the `for` | `Trainer` in `rlcourse/trainer.py`, with evaluation, checkpoints and Ctrl-C: `rlcourse train` |
#
# ## 2 · A verifier with a hole
#
# Now put the last argument to use. Gold answers are expensive, but here much can be checked without them: an answer
# shows its working, and a machine can recompute it. So a colleague proposes to pay for sound work. An answer earns 1 if
# it ended, announces a number, and **every calculation in it holds**.

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
    f"The model starts at {start:.0f} % (greedy, validation) and is paid for sound work. Where is it after {RUN - 1} steps?",
    (60, 0, 100, 1),
    unit="%",
)

# %%
_, farmed, answers = with_package(RUN, sound)

# %% tags=["hide-input"]
# @title Figure: what is paid, and what you want


def draw_paid(axes, log, title: str) -> None:
    """Reward on the left, greedy accuracy on the right, of one run."""
    steps = [m["step"] - 1 for m in log]
    axes[0].plot(steps, [100 * m["reward"] for m in log], color=ORANGE)
    known = [(m["step"] - 1, 100 * m["greedy"]) for m in log if m["greedy"] is not None]
    axes[1].plot(*zip(*known, strict=True), color=BLUE, marker="o")
    axes[0].set(title=f"{title}: the reward", xlabel="training step", ylabel="%", ylim=(0, 102))
    axes[1].set(title="greedy accuracy on validation problems", xlabel="training step", ylim=(0, 102))
    for ax in axes:
        ax.grid()


fig, axes = plt.subplots(1, 2, figsize=(10, 3), layout="constrained", sharey=True)
draw_paid(axes, farmed, "Paid for sound work")
hole.line(axes[1])
axes[1].legend()
plt.show()
fell = 100 * [m["greedy"] for m in farmed if m["greedy"] is not None][-1]
hole.result(fell)
for answer in answers[:: len(answers) // 4]:
    print(f"gold {answer.problem.gold:>3s}   {answer.text!r}")
