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
# - what several processes that train one model send each other, and when;
# - which losses come out wrong when each process averages its own answers, and which don't;
# - to write an all-reduce as a ring, and to tell from bytes and bandwidth when it costs too much;
# - what you gain by splitting a batch over GPUs, and what overlap adds;
# - how old the sampler's weights may be, and how far importance sampling helps;
# - when this package is no longer the right tool, and how your model leaves it.
#
# You need [lesson 01](01_policy_gradient.ipynb) for the loop, [lesson 04](04_dr_grpo.ipynb) for the three ways to add
# up tokens, and [lesson 11](11_engine_for_rl.ipynb) for the mismatch between sampler and trainer.
#
# Your run works on one GPU. Now somebody hands you three more. Will four train the *same* model, and four times as
# fast? It looks easy: give each a quarter of the batch and average the gradients. But is it the same model? Does the
# network eat the gain? And if it isn't four times as fast, is there a way around?
#
# You don't need a GPU, let alone four: processes on your CPU make the same `torch.distributed` calls as a cluster.
# Only the backend differs, gloo instead of NCCL.

# %%
import inspect
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from matplotlib.ticker import LogLocator, NullFormatter
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlcourse import advantages as adv
from rlcourse.checkpoint import latest_checkpoint
from rlcourse.config import make_config
from rlcourse.course import pick
from rlcourse.course.lessons.curve_records import load_curve
from rlcourse.course.lessons.experiment import Experiment
from rlcourse.course.lessons.lesson15 import COMMON, LaggingEngine
from rlcourse.course.loop import GROUP, LIMIT, answer_mask, greedy_accuracy, judge, task, token_log_probs
from rlcourse.course.ranks import Ranks
from rlcourse.course.widgets import bet, explorer
from rlcourse.dist import ALONE
from rlcourse.distributed.world import World
from rlcourse.learner import Learner
from rlcourse.losses import aggregate
from rlcourse.measure.plots import BLACK, BLUE, GREEN, ORANGE, SKY
from rlcourse.measure.records import load_record, provenance
from rlcourse.measure.shapes import model_shape, parameters
from rlcourse.policy import load_policy
from rlcourse.rollout import make_engine
from rlcourse.sampling import Sampling
from rlcourse.tasks.prompts import PromptSampler
from rlcourse.train import train_step

# %% [markdown]
# ## 1 · Two processes and one message
#
# A **rank** is a process with a number, 0 to $P-1$, usually with its own GPU; $P$ is the number of ranks. Ranks run the
# same program and share no memory, so what one needs from another has to be sent. `Ranks(2)` starts two processes, and
# `run` calls a function on both.

# %%
two = Ranks(2)


def hello(rank):
    if rank == 0:
        dist.send(torch.tensor([3.0, 1.0, 4.0]), dst=1)
        return "sent"
    received = torch.zeros(3)  # the receiver must know shape and dtype beforehand: bytes travel, nothing else
    dist.recv(received, src=0)
    print("I got", received.tolist())
    return "received"


print(two.run(hello))

# %% [markdown]
# Everything else is built from such messages.
#
# ## 2 · Does it train the same model?
#
# Eight problems, {{ GROUP }} answers to each, and half of the answers for each rank. You can cut between problems, or
# through every group, so that each rank has {{ GROUP // 2 }} answers to each problem. Each rank computes advantages
# from its own rewards.

# %%
policy = load_policy("embedded")
engine = make_engine(policy, "fast", torch.float32)
problems = task.problems("train")[:8]
torch.manual_seed(0)
rollout = engine.generate([policy.prompt(p.question) for p in problems], GROUP, LIMIT, Sampling())
rewards = judge(policy, problems, rollout)
row = torch.arange(len(rewards))
CUTS = {"between problems": row < len(row) // 2, "through groups": row % GROUP < GROUP // 2}
KINDS = {
    "batch mean": lambda r, size: adv.batch_centered(r),
    "group mean": adv.group_centered,
    "group mean and deviation": adv.group_normalized,
}
off = {}
for cut, on_first in CUTS.items():
    for kind, advantages_of in KINDS.items():
        found = torch.zeros_like(rewards)
        for own in (on_first, ~on_first):
            found[own] = advantages_of(rewards[own], GROUP if cut == "between problems" else GROUP // 2)
        off[cut, kind] = (found - advantages_of(rewards, GROUP)).abs().max().item()
        print(f"cut {cut:17} advantage by {kind:25} off by at most {off[cut, kind]:.2f}")

# %% [markdown]
# Cut through groups, and the advantages are wrong, though nothing crashes. {{ assert off["through groups", "group
# mean"] > 0.05 }} Cut between problems, and everything computed within a group is right. {{ assert off["between
# problems", "group mean"] == 0 and off["between problems", "group mean and deviation"] == 0 }} A batch statistic (a
# mean, a deviation, PPO's whitening) must be computed over **all** ranks, however you cut. {{ assert off["between
# problems", "batch mean"] > 0.01 }}{{ "<br><small>Cut through groups, the batch mean is off by 0.00 only because both
# ranks happen to have equally many right answers.</small>" if rewards[CUTS["through groups"]].sum() ==
# rewards[~CUTS["through groups"]].sum() else "" }}
#
# So we cut between problems. Next, the loss. Each rank takes the mean loss of **its own** answers and its gradient, and
# then the gradients are averaged. PyTorch's `DistributedDataParallel` (DDP) does just that, and in supervised training
# with equal batches nobody notices.

# %% tags=["hide-input"]
# @title Your bet
WRONG = [
    "none of them: the mean of two means is the mean",
    "the mean over all tokens (DAPO)",
    "the mean over answers of the mean over tokens (GRPO)",
    "the sum over a constant (Dr. GRPO)",
]
loss_bet = bet(
    "Two ranks, equally many answers each. For which loss does the gradient differ from one process's?", WRONG
)


# %%
def gradient(rollout, advantages, how, rows, tokens):
    """The gradient of the loss as one vector. rows, tokens: what the loss is divided by."""
    policy, mask = load_policy("embedded"), answer_mask(rollout)
    losses = -advantages[:, None] * token_log_probs(policy, rollout)
    aggregate(losses, mask, how, rows=rows, tokens=tokens, max_new_tokens=LIMIT).backward()
    return torch.cat([p.grad.flatten() for p in policy.model.parameters()])


def own_mean(rank, rollout, advantages, how, cut):
    """Each rank divides by what it has; gradients are averaged."""
    own = torch.arange(len(advantages)).tensor_split([cut])[rank]
    part = rollout[own]
    found = gradient(part, advantages[own], how, len(own), int(answer_mask(part).sum()))
    dist.all_reduce(found)  # the sum, on every rank
    return found / 2


def share_of_all(rank, rollout, advantages, how, cut):
    """Each rank divides by what all have; gradients are added up."""
    own = torch.arange(len(advantages)).tensor_split([cut])[rank]
    part = rollout[own]
    count = torch.tensor([len(own), int(answer_mask(part).sum())])
    dist.all_reduce(count)
    found = gradient(part, advantages[own], how, *count.tolist())
    dist.all_reduce(found)
    return found


advantages = adv.group_centered(rewards, GROUP)
HOWS = {"token_mean": "DAPO", "sequence_mean": "GRPO", "constant": "Dr. GRPO"}
half, total = len(row) // 2, int(answer_mask(rollout).sum())
distance = {}
for how in HOWS:
    one = gradient(rollout, advantages, how, len(row), total)
    for name, way, cut in (
        ("own", own_mean, half),
        ("own, 6 and 2 problems", own_mean, 6 * GROUP),
        ("all", share_of_all, half),
        ("all, 6 and 2 problems", share_of_all, 6 * GROUP),
    ):
        found = two.run(way, rollout, advantages, how, cut)
        assert torch.equal(*found)  # both ranks have the same bits
        distance[how, name] = ((found[0] - one).norm() / one.norm()).item()

# %% tags=["hide-input"]
# @title Table: distance from the gradient of one process
loss_bet.result(WRONG[1] if distance["token_mean", "own"] > 1e-3 > distance["sequence_mean", "own"] else WRONG[0])
print(f"{'':30}" + "".join(f"{name:>12}" for name in HOWS.values()))
for name, said in (
    ("own", "own means, 4 and 4 problems"),
    ("own, 6 and 2 problems", "own means, 6 and 2 problems"),
    ("all", "shares, 4 and 4 problems"),
    ("all, 6 and 2 problems", "shares, 6 and 2 problems"),
):
    print(f"{said:30}" + "".join(f"{distance[how, name]:12.1e}" for how in HOWS))
tokens = [int(answer_mask(rollout[part]).sum()) for part in (row[:half], row[half:])]
print(f"tokens of the two ranks, 4 and 4 problems: {tokens[0]} and {tokens[1]}")

# %% [markdown]
# DAPO's, and silently. It divides by tokens, and the ranks have {{ tokens[0] }} and {{ tokens[1] }}, so a token weighs
# more on the rank that has fewer. The gradient is off by {{ 100 * distance["token_mean", "own"]:.0f }}%, a different
# amount in each step, and no error is raised. GRPO and Dr. GRPO come out right, but only by luck: each rank divides by
# the same number. {{ assert max(distance["sequence_mean", "own"], distance["constant", "own"]) < 1e-4 <
# distance["token_mean", "own"] }} With 6 and 2 problems all three are wrong, and that happens whenever prompts don't
# divide evenly or a filter drops groups. {{ assert min(distance[how, "own, 6 and 2 problems"] for how in HOWS) > 0.01
# }}
#
# The cure costs two integers: **count over all ranks before you divide, then add up.** {{ assert max(v for (_, name), v
# in distance.items() if name.startswith("all")) < 1e-4 }}
#
# ## 3 · All-reduce, by hand
#
# Now, how fast? `all_reduce` gave every rank the sum of all gradients. Say rank 0 collects them, adds them up and sends
# the sum back. With $P$ ranks and $M$ bytes of gradient, $2(P-1)M$ bytes then pass through rank 0, while the others
# wait. Can you do better? What's the least that each rank must send?
#
# Here's the ring. Cut the gradient into $P$ pieces. In each step every rank gives a piece to its right neighbour and
# takes one from its left. In the first $P-1$ steps it **adds** what arrives to its own piece, so sums grow as they
# travel. Then each rank has one complete piece, and in $P-1$ more steps the complete pieces go around.


# %%
def ring_all_reduce(rank, size, numbers):
    """Add up `numbers` of all ranks, in place. Returns the bytes that this rank has sent."""
    pieces, sent = list(numbers.tensor_split(size)), 0
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(2 * (size - 1)):
        give = pieces[(rank - step) % size]
        take = pieces[(rank - step - 1) % size]
        arrived = torch.empty_like(take)
        sending = dist.isend(give, right)  # does not wait: all give at the same time
        dist.recv(arrived, left)
        sending.wait()
        take.copy_(take + arrived if step < size - 1 else arrived)
        sent += give.numel() * give.element_size()
    return sent


def compare_sums(rank, size, length):
    torch.manual_seed(rank)
    mine = torch.randn(length)
    theirs = mine.clone()
    sent = ring_all_reduce(rank, size, mine)
    dist.all_reduce(theirs)
    return mine, theirs, sent


LENGTH, RING_N = 100_003, pick(3, 4)  # no number of ranks here divides the length
for ranks in (two, Ranks(RING_N)):
    found = ranks.run(compare_sums, ranks.size, LENGTH)
    by_ring, by_torch = [f[0] for f in found], [f[1] for f in found]
    exact = sum(torch.randn(LENGTH, generator=torch.Generator().manual_seed(r)).double() for r in range(ranks.size))
    errors = [(sums[0] - exact).abs().max().item() for sums in (by_ring, by_torch)]
    print(f"{ranks.size} ranks, all with the same bits: {all(torch.equal(by_ring[0], other) for other in by_ring)}")
    print(f"   largest error: ours {errors[0]:.1e}, torch {errors[1]:.1e}")
    sent_most = max(f[2] for f in found) / (4 * LENGTH)
    ring_right = errors[0] < 1e-5 and torch.equal(by_ring[0], by_ring[-1])
ranks.close()
print(f"sent by each of {RING_N} ranks: {', '.join(f'{f[2] / (4 * LENGTH):.3f} M' for f in found)}")

# %% [markdown]
# {{ assert ring_right and abs(sent_most - 2 * (RING_N - 1) / RING_N) < 0.001 }} Each rank sends $2M(P-1)/P$, **never
# more than twice the gradient, however many ranks there are**, and it can't be less (Patarasuk and Yuan
# 2009).<br><small>As long as the ranks add, and not the network's switches. The number of steps does grow with $P$
# (exercise 2).</small>
#
# All ranks end up with the **same bits**, since each piece is summed once and then copied. So every rank makes the same
# update, and weights are never sent. But one process would sum in another order, so you get its result only *up to
# rounding*.

# %% tags=["hide-input"]
# @title Figure: how many terms are in each rank's pieces
P = 4
terms = [[{rank} for _ in range(P)] for rank in range(P)]
frames = [[[len(piece) for piece in of_rank] for of_rank in terms]]
for step in range(2 * (P - 1)):
    given = [terms[rank][(rank - step) % P] for rank in range(P)]
    for rank in range(P):
        place, arrived = (rank - step - 1) % P, given[(rank - 1) % P]
        terms[rank][place] = terms[rank][place] | arrived if step < P - 1 else arrived
    frames.append([[len(piece) for piece in of_rank] for of_rank in terms])
fig, axes = plt.subplots(1, len(frames), figsize=(11, 2.4), layout="constrained")
for step, (ax, frame) in enumerate(zip(axes, frames, strict=True)):
    ax.imshow(frame, cmap="Blues", vmin=0, vmax=P + 1)
    for rank in range(P):
        for piece in range(P):
            color = "white" if frame[rank][piece] == P else BLACK
            ax.text(piece, rank, frame[rank][piece], ha="center", va="center", fontsize=8, color=color)
            if step and frame[rank][piece] != frames[step - 1][rank][piece]:  # it has just arrived
                ax.add_patch(
                    plt.Rectangle((piece - 0.45, rank - 0.45), 0.9, 0.9, fill=False, color=ORANGE, linewidth=2)
                )
    ax.set(xticks=[], yticks=[], title="start" if not step else f"{'add' if step < P else 'copy'} {step}")
axes[0].set(ylabel="rank", xlabel="piece")
fig.suptitle("Terms in each piece; framed: just arrived", fontsize=10)
plt.show()
complete = all(count == P for of_rank in frames[-1] for count in of_rank)

# %% [markdown]
# {{ assert complete }} Follow one column, a piece, from panel to panel: its sum collects 1, 2, 3, 4 terms as it goes
# from rank to rank, then the complete sum spreads.
#
# ## 4 · Does the network eat the gain?
#
# A message takes a latency, plus its bytes over the bandwidth. Let's measure both between your two processes. **Look
# for** the size from which bytes matter.

# %%
COUNTS = [2**i for i in range(6, pick(19, 23), 2)]


def time_all_reduce(rank, counts, repeats):
    """For each count of float32 numbers, the fastest of `repeats` all-reduces in seconds: others were disturbed."""
    for _ in range(20):  # warm up: the first few of all are slow
        dist.all_reduce(torch.ones(counts[0]))
    found = []
    for count in counts:
        numbers, times = torch.ones(count), []
        dist.all_reduce(numbers)  # the first of a size takes longer
        for _ in range(repeats):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(numbers)
            times.append(time.perf_counter() - start)
        found.append(min(times))
    return found


measured = two.run(time_all_reduce, COUNTS, pick(5, 15))[0]
latency = median(s for s, count in zip(measured, COUNTS, strict=True) if 4 * count <= 2**16)  # of small messages
moving = max(measured[-1] - latency, 0) or measured[-1]  # on a busy machine the largest can happen to be the fastest
bandwidth = 4 * COUNTS[-1] / moving  # at 2 ranks 2 (P - 1) / P = 1: each sends M bytes
line = [latency + 4 * count / bandwidth for count in COUNTS]
missed = max(max(a / b, b / a) for a, b in zip(line, measured, strict=True))  # the line, at its worst

# %% tags=["hide-input"]
# @title Figure: seconds of an all-reduce between two processes here
sizes = [4 * count for count in COUNTS]
fig, ax = plt.subplots(figsize=(6.5, 3))
ax.loglog(sizes, [1e3 * s for s in measured], "o", color=BLUE, label="measured, the fastest of several tries")
ax.loglog(sizes, [1e3 * s for s in line], color=BLACK, label="latency + bytes / bandwidth")
title = f"Between two processes here: latency {1e6 * latency:.0f} µs, bandwidth {bandwidth / 1e9:.1f} GB/s"
ax.set(xlabel="bytes of the message", ylabel="ms", title=title)
ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
ax.yaxis.set_major_formatter("{x:g}")
ax.yaxis.set_minor_formatter(NullFormatter())
ax.grid()
ax.legend()
plt.show()

# %% [markdown]
# The line's latency is the median up to 64 KB, its bandwidth that of the largest message. In between it misses by up to
# a factor of {{ missed:.1f }}: two constants are a rough model. But a small message costs about the latency, whatever
# its size. So gradients are sent in **buckets**, many tensors at a time, in our package up to 64 MiB.
#
# Now GPUs. We recorded a step of Qwen2.5-0.5B's shape on one H200. What would eight bring? Assume that each gets as
# many rows as the one had, and that a ring then sends the float32 gradient while nothing else runs. The **efficiency**
# is the share of time spent working: the step on one GPU, over that step plus the ring.


# %%
def ring_seconds(numbers: int, ranks: int, gb_per_s: float) -> float:
    """An all-reduce of so many float32 numbers, by the bytes alone."""
    return 2 * (ranks - 1) / ranks * 4 * numbers / (gb_per_s * 1e9)


step_record = load_record("step", "NVIDIA H200")
steps = {r["rows"]: r for r in step_record["results"] if r["variant"] == "rlcourse"}
many, few = steps[max(steps)], steps[min(steps)]
NUMBERS = parameters(model_shape("Qwen/Qwen2.5-0.5B"))
LINKS = {"NVLink 4": 450.0, "PCIe 5, 16 lanes": 64.0, "InfiniBand NDR": 50.0, "100 Gbit/s Ethernet": 12.5}  # GB/s
print(f"{NUMBERS:,} numbers, {4 * NUMBERS / 1e9:.2f} GB; {many['rows']} rows per GPU, {many['step_s']:.2f} s on one")
print(f"one GPU: {provenance(step_record)}; the rest an estimate for eight\n")
print(f"{'link, GB/s one way':30}{'ring':>9}{'efficiency':>13}{'step for 0.9':>15}")
needed = {}
for link, speed in LINKS.items():
    ring = ring_seconds(NUMBERS, 8, speed)
    needed[link] = 9 * ring  # step / (step + ring) >= 0.9
    kept = many["step_s"] / (many["step_s"] + ring)
    print(f"{link + f', {speed:g}':30}{1e3 * ring:6.0f} ms{kept:13.2f}{needed[link]:13.2f} s")

# %% [markdown]
# "Step for 0.9" is the shortest step that keeps the efficiency at 0.9: **nine times the all-reduce**. On NVLink ours is
# long enough. {{ assert needed["NVLink 4"] < many["step_s"] }} Over 100 Gbit/s Ethernet it would have to take {{
# needed["100 Gbit/s Ethernet"]:.1f }} s. {{ assert needed["100 Gbit/s Ethernet"] > many["step_s"] }} Then you give each
# GPU more rows, or send bf16, or send during the backward pass (as DDP and FSDP do).<br><small>The bandwidths are from
# data sheets; real ones are lower.</small>
#
# So on NVLink communication hardly matters. Is the estimate any good? We measured up to four H200s of one machine.

# %% tags=["hide-input"]
# @title Your bet
scale = load_record("scale", "NVIDIA H200")
on_two, on_four = ({row["variant"]: row for row in scale["results"] if row["gpus"] == n} for n in (2, 4))
one, each, each_of_4 = scale["results"][0], *(on["equal work a rank"] for on in (on_two, on_four))
ring, ring_of_4 = (ring_seconds(NUMBERS, n, LINKS["NVLink 4"]) for n in (2, 4))
estimates = [one["step_s"] / (one["step_s"] + s) for s in (0.0, ring, ring_of_4)]
four_bet = bet(
    f"Four GPUs, {one['rows']} rows each: the estimate is {estimates[2]:.2f}. Which efficiency did we measure?",
    (0.5, 1.0, 0.01),
)

# %%
four_bet.result(round(each_of_4["efficiency"], 2))


def more(row: dict, part: str) -> float:
    """Milliseconds that a part of a step takes more than on one GPU."""
    return 1e3 * ((row[part] or 0.0) - (one[part] or 0.0))  # no all-reduce on one GPU


print(f"{'':6}{'efficiency':>20}{'ms more than on one GPU':>54}")
print(f"{'GPUs':6}{'estimated':>10}{'measured':>10}{'rollout':>16}{'all-reduce':>12}{'rest of update':>16}{'step':>10}")
for row, estimate in zip((one, each, each_of_4), estimates, strict=True):
    rollout_ms, reduce_ms, update_ms = (more(row, part) for part in ("rollout_s", "allreduce_s", "update_s"))
    print(f"{row['gpus']:<6}{estimate:10.2f}{row['efficiency']:10.2f}{rollout_ms:16.0f}{reduce_ms:12.0f}", end="")
    print(f"{update_ms - reduce_ms:16.0f}{more(row, 'step_s'):10.0f}")
print(provenance(scale))

# %% [markdown]
# **An estimate from bytes alone is an upper bound.** {{ assert all(row["efficiency"] < e for row, e in zip((each,
# each_of_4), estimates[1:])) }} The all-reduce is the smaller part of what the other GPUs cost. {{ assert 1.2 <
# each["allreduce_s"] / ring < 2 and 1e3 * each["allreduce_s"] < more(each, "step_s") / 2 and 1e3 *
# each_of_4["allreduce_s"] < more(each_of_4, "step_s") / 2 }} Rollout and the rest of the update get longer, too, {{
# assert more(each_of_4, "update_s") > more(each, "update_s") > 1e3 * each["allreduce_s"] and more(each_of_4,
# "rollout_s") > more(each, "rollout_s") > 0 }} though each GPU has as much work as before.
#
# **Explore** the efficiency for your model's gradient, your link and your step (the vertical line).


# %%
def draw_efficiency(ax, billions, gb_per_s, step_s):
    lengths = [0.01 * 10 ** (k / 20) for k in range(81)]  # to 100 s
    for ranks, color, style in ((2, GREEN, ":"), (8, BLUE, "-"), (64, ORANGE, "--")):
        ring = ring_seconds(1e9 * billions, ranks, gb_per_s)
        ax.plot(lengths, [s / (s + ring) for s in lengths], style, color=color, label=f"{ranks} GPUs")
    ax.axhline(0.9, color=BLACK, linestyle=":", linewidth=1)
    ax.axvline(step_s, color=BLACK, linewidth=1)
    kept = step_s / (step_s + ring_seconds(1e9 * billions, 8, gb_per_s))
    ax.set(xlabel="step on one GPU, s", ylabel="efficiency, estimated", ylim=(0, 1.05), xscale="log")
    ax.set_title(f"{billions:g} billion, {gb_per_s:g} GB/s,\na step of {step_s:g} s on 8 GPUs: {kept:.2f}", fontsize=11)
    ax.legend(loc="lower right")


explorer(
    draw_efficiency,
    [
        {"billions": 0.5, "gb_per_s": 450.0, "step_s": 0.4},
        {"billions": 0.5, "gb_per_s": 12.5, "step_s": 0.4},
        {"billions": 7.0, "gb_per_s": 50.0, "step_s": 10.0},
    ],
    billions=(0.5, 0.5, 70.0, 0.5),
    gb_per_s=(450.0, 1.0, 900.0, 1.0),
    step_s=(0.4, 0.1, 60.0, 0.1),
)

# %% [markdown]
# 8 and 64 GPUs nearly share a curve: the ring's bytes hardly grow. By bytes alone, more GPUs cost almost nothing
# more. Measured, four already cost {{ 100 * (1 - each_of_4["efficiency"]):.0f }}%.
#
# ## 5 · The same rows on four GPUs
#
# But that's not what you asked for. You wanted the *same* step faster. So split the same {{ max(steps) }} rows over
# your four GPUs, {{ min(steps) }} each.

# %% tags=["hide-input"]
# @title Your bet
split = on_four["equal work in all"]
split_bet = bet(
    f"{split['rows']} rows on four GPUs, measured. How many times as fast is the step as with {one['rows']} on one?",
    (1.0, 4.0, 0.1),
    "times",
)

# %%
assert split["rows"] == one["rows"] == max(steps) == 4 * min(steps)
split_bet.result(round(one["step_s"] / split["step_s"], 1))
for row in (one, on_two["equal work in all"], split):
    print(f"{row['gpus']} GPU{'s' if row['gpus'] > 1 else ' '}{row['rows'] // row['gpus']:4} rows each", end="")
    print(f"{row['step_s']:8.3f} s per step, {one['step_s'] / row['step_s']:.2f} times as fast", end="")
    print(f", efficiency {row['efficiency']:.2f}, interquartile range {row['spread']:.0%}")
print(provenance(scale))

# %% [markdown]
# A third of what four GPUs could do. {{ assert 0.28 < split["efficiency"] < 0.38 }} Is it the network? Take the network
# away: how much faster is a quarter of the rows on one GPU that talks to nobody?

# %%
for part in ("rollout_s", "update_s", "step_s"):
    print(f"{part:10} {many[part]:.3f} s -> {few[part]:.3f} s: {many[part] / few[part]:.1f} times as fast")
print(provenance(step_record))
speedup = many["step_s"] / few["step_s"]

# %% [markdown]
# {{ speedup:.1f }} times at best, and no network can fix that. {{ assert one["step_s"] / split["step_s"] < speedup < 2
# }} The rollout hardly shrinks, and you know why from lesson 06: a decode step reads all weights, for {{ min(steps) }}
# rows as for {{ max(steps) }}, and there are as many steps as the longest answer has tokens. The update shrinks better,
# but not to a quarter: the optimizer's work stays, and small matmuls use the GPU less well. {{ assert 1 <
# many["rollout_s"] / few["rollout_s"] < 2 < many["update_s"] / few["update_s"] < 3 }} The exchange and the waiting cost
# the rest.
#
# Is there a way around? Do two things at once: one GPU samples the next batch while the other trains on the last one. A
# straight line through the two recorded sizes estimates the time of any share:


# %%
def seconds(part: str, rows: float) -> float:
    """A line through the two recorded sizes: an estimate."""
    slope = (many[part] - few[part]) / (many["rows"] - few["rows"])
    return few[part] + slope * (rows - few["rows"])


ROWS = max(steps)
alone = many["rollout_s"] + many["update_s"]
halved = seconds("rollout_s", ROWS / 2) + seconds("update_s", ROWS / 2)
overlapped = max(many["rollout_s"], many["update_s"])

# %% tags=["hide-input"]
# @title Figure: two GPUs, two ways
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

fig, ax = plt.subplots(figsize=(9.5, 3.3), layout="constrained")
LANES = ["one GPU", "split: GPU 0", "split: GPU 1", "overlap: GPU 0", "overlap: GPU 1"]
PLACES = [0, 1.4, 2.3, 3.7, 4.6]


def block(lane, start, length, color, text):
    ax.barh(PLACES[lane], length, left=start, color=color, edgecolor="white", height=0.8)
    ax.text(start + length / 2, PLACES[lane], text, ha="center", va="center", fontsize=8, clip_on=True)


for lane, rows in ((0, ROWS), (1, ROWS / 2), (2, ROWS / 2)):
    start = 0.0
    for number in range(4):
        for part, color in (("rollout_s", SKY), ("update_s", ORANGE)):
            if start < 0.95:
                block(lane, start, seconds(part, rows), color, number)
            start += seconds(part, rows)
end_sampled, end_trained, number = 0.0, 0.0, 0
while end_sampled < 0.95:
    block(3, end_sampled, many["rollout_s"], SKY, number)
    end_sampled += many["rollout_s"]
    begin = max(end_sampled, end_trained)
    block(4, begin, many["update_s"], ORANGE, number)
    end_trained, number = begin + many["update_s"], number + 1
together = on_two["equal work in all"]
assert one["rows"] == together["rows"] == ROWS
for lane, row in ((0, one), (1, together)):
    ax.plot(row["step_s"] * torch.arange(1, 10), [PLACES[lane] - 0.4] * 9, color=BLACK, marker="v", linestyle="")
ax.set_yticks(PLACES, LANES)
ax.invert_yaxis()
ax.set(xlabel=f"seconds; {provenance(step_record)}", xlim=(0, 1.0))
ax.set_title("Numbers are batches; one GPU is measured, two are estimated")
measured_end = Line2D([], [], color=BLACK, marker="v", linestyle="", label="a step ends, as measured")
parts = [Patch(color=color, label=name) for color, name in ((SKY, "rollout"), (ORANGE, "update"))]
fig.legend(handles=[*parts, measured_end], loc="outside lower center", ncols=3)
plt.show()

# %% [markdown]
# By this estimate two GPUs that overlap are {{ alone / overlapped:.1f }} times as fast as one, and two that split {{
# alone / halved:.1f }} times. {{ assert overlapped < halved < alone }} Measured (triangles), splitting brings only {{
# one["step_s"] / together["step_s"]:.1f }}. {{ assert together["step_s"] > 1.15 * halved and together["rollout_s"] >
# 1.1 * seconds("rollout_s", ROWS / 2) and together["update_s"] - together["allreduce_s"] > 1.05 * seconds("update_s",
# ROWS / 2) }} Overlap sends no gradients, only weights; asynchronous trainers such as prime-rl are built on
# it.<br><small>This package doesn't do it.</small>
#
# The picture also shows the price: rollout 1 begins before update 0 has ended. **Answers come from weights that are one
# update old.** Does that matter?
#
# ## 6 · How old may the weights be?
#
# Answers come from the weights of 0, 1, 4 or 16 updates ago, the **lag**. This class does that, and everything else is
# the package's step:

# %%
print(inspect.getsource(LaggingEngine))


FEW = {"num_prompts": 2}


def live(lag: int, steps: int):
    """Log ratio of policy to sampler, for every token that the lagging engine samples after some steps."""
    config = make_config("laptop", **COMMON | pick(FEW, {}), device="cpu")
    experiment = Experiment(config)
    experiment.engine = LaggingEngine(experiment.policy, lag)
    for _ in range(steps):
        experiment.train()
    prompts = [experiment.policy.prompt(p.question) for p in task.problems("validation")[: pick(4, 16)]]
    old = experiment.engine.generate(prompts, 4, LIMIT, Sampling())
    with torch.no_grad():
        mask = answer_mask(old)
        now = token_log_probs(experiment.policy, old)
    return now[mask] - old.logprobs[old.completion_mask]


STEPS = pick(2, 8)
apart = {lag: live(lag, STEPS) for lag in pick((0, 4), (0, 1, 4))}
gaps = {lag: log_ratio.abs().mean().item() for lag, log_ratio in apart.items()}
rarer = {lag: (-log_ratio.clamp(max=0).sum() / log_ratio.abs().sum()).item() for lag, log_ratio in apart.items()}
print(f"{f'after {STEPS} steps, per token':24}{'|log ratio|':>14}{'share from rarer tokens':>26}{'ratios above 2':>17}")
for lag, log_ratio in apart.items():
    above = (log_ratio.exp() > 2).float().mean()
    print(f"{f'lag {lag}':24}{gaps[lag]:14.1e}{rarer[lag]:26.0%}{above:17.1%}")

# %% [markdown]
# {{ assert gaps[0] < 1e-5 and list(gaps.values()) == sorted(gaps.values()) }} The mismatch of lesson 11 grows with the
# lag. With lag 4, most of it comes from tokens that have become *rarer*: the policy has moved **away** from them. {{
# assert rarer[4] > 0.7 }} Keep that in mind. Now the recorded runs: {{ COMMON["steps"] }} steps of {{
# COMMON["num_prompts"] }} × {{ COMMON["num_generations"] }} answers, learning rate {{ COMMON["lr"] }}, three seeds
# each.

# %% tags=["hide-input"]
# @title Your bet
OLD = ["only 16 does harm", "4 already does harm", "even 1 does harm", "none: an answer's reward doesn't age"]
old_bet = bet("Without correction: which lags end lower than lag 0, each seed below each of its seeds?", OLD)

# %% [markdown]
# **Look for** how far each solid line is from the dotted one. The dashed lines have a brake, truncated importance
# sampling (TIS): each token is weighted by $\min(\pi_\theta / \pi_\text{old}, 2)$.

# %% tags=["hide-input"]
# @title Figure: training on old answers
KEYS = [("0", "off"), *((k, c) for k in ("1", "4", "16") for c in ("off", "token"))]
curves = {(k, c): load_curve(f"lesson15_lag_{k}" + ("_token" if c == "token" else "")) for k, c in KEYS}
COLORS = {"0": GREEN, "1": SKY, "4": ORANGE, "16": BLACK}


def at_end(key) -> list[float]:
    """Each seed's greedy accuracy at the end, %."""
    return [100 * r["evals"][-1]["accuracy"] for r in curves[key]["results"]]


def mean(values) -> float:
    return sum(values) / len(values)


harmed = [k for k in ("1", "4", "16") if max(at_end((k, "off"))) < min(at_end(("0", "off")))]
old_bet.result({("16",): OLD[0], ("4", "16"): OLD[1], ("1", "4", "16"): OLD[2]}.get(tuple(harmed), OLD[3]))
fig, axes = plt.subplots(1, 3, figsize=(10.5, 3.3), layout="constrained", sharey=True)
for ax, k in zip(axes, ("1", "4", "16"), strict=True):
    for key, style, label in (
        (("0", "off"), ":", "lag 0"),
        ((k, "off"), "-", f"lag {k}"),
        ((k, "token"), "--", f"lag {k}, TIS"),
    ):
        rows = curves[key]["results"]
        at = [e["step"] for e in rows[0]["evals"]]
        seeds = [[100 * e["accuracy"] for e in r["evals"]] for r in rows]
        columns = list(zip(*seeds, strict=True))
        ax.plot(at, [mean(c) for c in columns], style, color=COLORS[key[0]], label=label)
        ax.fill_between(at, [min(c) for c in columns], [max(c) for c in columns], color=COLORS[key[0]], alpha=0.15)
    ax.set(xlabel="step", title=f"lag {k}")
    ax.grid()
    ax.legend(loc="lower right")
axes[0].set(ylabel="validation, greedy, % right", ylim=(0, 100))
fig.suptitle(f"Mean of three seeds, band from worst to best; {provenance(curves['0', 'off'])}", fontsize=10)
plt.show()
for k, correction in KEYS:
    ends = at_end((k, correction))
    print(f"lag {k:>2}, correction {correction:5}: {mean(ends):.0f}%, seeds", [f"{end:.1f}" for end in ends])

# %% [markdown]
# {{ assert harmed == ["4", "16"] }} **Lag 1 costs nothing that three seeds could show.** {{ assert
# abs(mean(at_end(("1", "off"))) - mean(at_end(("0", "off")))) < 5 }} So overlap looks safe. Lag 4 ends lower, each seed
# below each of lag 0. Lag 16 rises at first, like lag 4. Then it **falls to {{ mean(at_end(("16", "off"))):.0f }}%,
# below the {{ 100 * curves["16", "off"]["results"][0]["evals"][0]["accuracy"]:.0f }}% it began with**. {{ assert
# abs(mean([r["evals"][1]["accuracy"] for r in curves["16", "off"]["results"]]) - mean([r["evals"][1]["accuracy"] for r
# in curves["4", "off"]["results"]])) < 0.02 and curves["16", "off"]["results"][0]["evals"][1]["step"] == 6 and
# mean(at_end(("16", "off"))) < 100 * curves["16", "off"]["results"][0]["evals"][0]["accuracy"] }}
#
# Old data should make learning slower. Why does the model *forget*? Half of RL is making right answers likelier, and
# half is making wrong ones rarer. Let's run the halves alone: 16 updates on one old batch, once on its right answers
# only, once on its wrong ones only.

# %% tags=["hide-input"]
# @title Your bet
start = greedy_accuracy(load_policy("embedded"), pick(8, 100))
push_bet = bet(
    f"Greedy accuracy starts at {start:.0%}. What is it after 16 updates that only make old wrong answers less likely? "
    "(You win between the lowest and the highest of three batches.)",
    (0, 100, 1),
    "%",
)


# %%
def push(sign: float, seed: int = 0, updates: int = pick(2, 16)) -> tuple[list[float], float]:
    """Mean log-prob of an old batch's wrong (-1) or right (+1) answers, at each update; greedy accuracy at the end."""
    torch.manual_seed(seed)
    pushed, asked = load_policy("embedded"), task.problems("train")[pick(2, 8) * seed : pick(2, 8) * (seed + 1)]
    sampler = make_engine(pushed, "fast", torch.float32)
    old = sampler.generate([pushed.prompt(p.question) for p in asked], GROUP, LIMIT, Sampling())
    old = old[(judge(pushed, asked, old) == (sign > 0)).nonzero()[:24, 0]]
    mask, path = answer_mask(old), []
    optimizer = torch.optim.AdamW(pushed.model.parameters(), lr=COMMON["lr"], betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(updates):
        logprobs = token_log_probs(pushed, old)
        path.append((logprobs.detach().sum() / mask.sum()).item())
        (-sign * logprobs.sum() / mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(pushed.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return path, greedy_accuracy(pushed, pick(8, 100))


outcome = {name: push(sign) for name, sign in (("wrong answers, pushed down", -1.0), ("right answers, pushed up", 1.0))}
others = [push(-1.0, seed)[1] for seed in (1, 2)]
push_bet.result([100 * ends for ends in (outcome["wrong answers, pushed down"][1], *others)])
print(f"before: {start:.0%} right, greedy")
for name, (path, accuracy) in outcome.items():
    print(f"{name}: log-prob per token {path[0]:.2f} → {path[-1]:.2f}; then {accuracy:.0%} right")

# %% [markdown]
# Pushing wrong answers down wrecks the policy; pushing right ones up is fine ({{ pick(8, 100) }} problems). {{ assert
# max(outcome["wrong answers, pushed down"][1], *others) < 0.5 * start < outcome["right answers, pushed up"][1] and
# outcome["wrong answers, pushed down"][0][-1] < outcome["wrong answers, pushed down"][0][0] - 1.5 }} Right answers
# saturate at probability 1. Wrong ones have no floor: with $A < 0$ the loss $-A \log \pi_\theta$ falls forever. A fresh
# sampler stops giving an answer that has become unlikely. An old one doesn't know, gives it again, and it's pushed down
# again.
#
# That's the brake that's missing. TIS's weight falls with $\pi_\theta$, so what the policy has given up counts less.
# With it, lag 4 ends at {{ mean(at_end(("4", "token"))):.0f }}% on average and lag 16 at {{ mean(at_end(("16",
# "token"))):.0f }}%. {{ assert min(at_end(("16", "token"))) > max(at_end(("16", "off"))) and mean(at_end(("4",
# "token"))) > mean(at_end(("4", "off"))) }} But lag 16 stays below lag 0 in each seed. {{ assert max(at_end(("16",
# "token"))) < min(at_end(("0", "off"))) }}
#
# Don't carry "4 updates" over to your model: with a large model and a learning rate of 1e-6, several updates may move
# the policy less than one of ours. So ask how far apart the two policies are, not how old the weights: watch
# `mismatch_mean` in `metrics.jsonl`.
#
# **So, your four GPUs.** They train the same model, up to rounding, if you count over all ranks. Are they four times as
# fast? With four times the answers per step, on NVLink, they compute {{ each_of_4["tokens_per_s"] /
# one["tokens_per_s"]:.1f }} times as many tokens per second. With the *same* answers, a step is only {{ one["step_s"] /
# split["step_s"]:.1f }} times as fast. {{ assert 3.3 < each_of_4["tokens_per_s"] / one["tokens_per_s"] < 3.7 and
# one["step_s"] / split["step_s"] < 1.4 }} Overlap promises {{ alone / overlapped:.1f }} with two of them, at the price
# of a lag of one, which cost nothing here. So more GPUs pay off if you can use more answers.
#
# ## 7 · The package's own ranks
#
# In the package, `rlcourse/distributed/world.py` does what you did by hand. Does it train the same model? We compare a
# few steps on two ranks with one process. Here every rank samples all answers, from the same seed; only forward and
# backward are split.


# %%
def some_steps(rank, size, steps):
    """Weights after some training steps as one vector, and the rewards."""
    world = ALONE if size == 1 else World(rank, size)
    config = make_config("laptop", num_prompts=4, device="cpu")
    policy, log = load_policy("embedded"), []
    engine, learner = make_engine(policy, "fast", torch.float32), Learner(policy, config, world=world)
    prompts = PromptSampler(task.problems("train"), 0)
    torch.manual_seed(0)
    for step in range(steps):
        log.append(train_step(learner, engine, task, prompts, step)[0]["reward"])
    return torch.cat([p.detach().flatten() for p in policy.model.parameters()]), log


start = torch.cat([p.detach().flatten() for p in policy.model.parameters()])
(one, log_of_one), (first, log_of_two), (second, _) = some_steps(0, 1, pick(1, 3)), *two.run(some_steps, 2, pick(1, 3))
moved, off_by = (one - start).norm().item(), (one - first).norm().item()
print("both ranks hold the same weights:", torch.equal(first, second), "| rewards:", log_of_one, log_of_two)
print(f"training moved the weights by {moved:.1e}; two ranks end {off_by:.1e} from one process")
two.close()

# %% [markdown]
# {{ assert torch.equal(first, second) and off_by < 0.01 * moved and log_of_one == log_of_two }} It does, up to
# rounding. Every rank computes advantages and all counts itself, from all rewards, with the code that one process runs.
# Only gradients are added up.
#
# On the command line, put `torchrun` in front. Each rank now samples for its own prompts, with its own random numbers.

# %%
folder = Path(tempfile.mkdtemp())
launch = [sys.executable, *pick([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"])]
options = {"steps": 2, "num-prompts": 4, "eval-problems": 8, "eval-every": 0, "pass-k": 0, "name": "small"}
arguments = ["train", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
print("torchrun --standalone --nproc-per-node 2 -m rlcourse", *arguments)
done = subprocess.run([*launch, "-m", "rlcourse", *arguments, "--output", folder], capture_output=True, text=True)
assert done.returncode == 0, done.stderr[-2000:]
for line in (folder / "small" / "metrics.jsonl").read_text().splitlines():
    metrics = json.loads(line)
    print({name: round(metrics[name], 3) for name in ("step", "reward", "grad_norm", "length")})

# %% [markdown]
# Only the first rank writes metrics and checkpoints. You can resume with another number of ranks.
#
# ## 8 · When the model doesn't fit: ZeRO and FSDP
#
# So far every rank has the whole model, 16 bytes per trained weight (weight, gradient and Adam's two moments in
# float32). That's **data parallel**. For Qwen2.5-7B it's {{ 16 * parameters(model_shape("Qwen/Qwen2.5-7B")) / 1e9:.0f
# }} GB on each rank. **ZeRO** (Rajbhandari et al. 2019) leaves each rank $1/P$: ZeRO-1 splits the moments, ZeRO-2 also
# the gradients, ZeRO-3 also the weights, as **FSDP** does (Zhao et al. 2023). FSDP gathers a layer's weights just
# before they're used and drops them right after. Gradients are summed with the first half of your ring, which leaves
# each rank the piece it keeps.

# %% tags=["hide-input"]
# @title Figure: Qwen2.5-7B on 8 ranks
BILLIONS = parameters(model_shape("Qwen/Qwen2.5-7B")) / 1e9
PARTS = (("weights", 4, BLUE), ("gradients", 4, ORANGE), ("moments", 8, GREEN))
WAYS = {
    "data parallel": ((), "2 M"),
    "ZeRO-1": (("moments",), "2 M"),
    "ZeRO-2": (("moments", "gradients"), "2 M"),
    "ZeRO-3, FSDP": (("moments", "gradients", "weights"), "3 M"),
}
fig, ax = plt.subplots(figsize=(8.5, 2.8), layout="constrained")
held = {}
for lane, (way, (shared, sent)) in enumerate(WAYS.items()):
    left = 0.0
    for part, size, color in PARTS:
        gigabytes = BILLIONS * size / (8 if part in shared else 1)
        ax.barh(lane, gigabytes, left=left, color=color, label=None if lane else part)
        left += gigabytes
    held[way] = left
    ax.text(left + 1, lane, f"{left:.0f} GB, sends {sent} per step", va="center", fontsize=9)
ax.set_yticks(range(len(WAYS)), WAYS)
ax.invert_yaxis()
ax.set(xlabel="GB on each of 8 ranks, without activations (computed)", xlim=(0, 170))
ax.legend(loc="lower right")
plt.show()

# %% [markdown]
# You pay with $3M$ instead of $2M$ of traffic (for large $P$): gather for the forward pass, gather again for the
# backward pass, half a ring for the gradients. In the package it's `--shard`. Try LoRA (lesson 13) and recomputation
# (lesson 12) first: they need no second GPU.
#
# ## 9 · When to leave, and how
#
# This package is for learning, and for runs on one machine. Leave it for:
#
# - **[vLLM](https://docs.vllm.ai)**, if our engine doesn't know your model, or you need an API server. It only
#   samples, and you can keep this trainer: `--engine vllm` in its process, `vllm@ADDRESS` on another GPU or machine.
# - **[verl](https://verl.readthedocs.io)**, for 7B models and larger, tensor and expert parallelism, many recipes.
# - **[prime-rl](https://github.com/PrimeIntellect-ai/prime-rl)**, for asynchronous training, agents and tools, many
#   machines.
#
# Ask there, too: Are counts taken over all ranks? Is a group ever cut? How old are the sampler's weights, and what
# corrects for that?
#
# Your model comes along: our checkpoint **is** a Hugging Face folder. Here's the one that the command above just wrote,
# opened without this package:

# %%
checkpoint = latest_checkpoint(folder / "small")
print(sorted(path.name for path in checkpoint.iterdir()))
model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
prompt = tokenizer.apply_chat_template(
    [{"role": "user", "content": problems[0].question}], add_generation_prompt=True, return_tensors="pt"
)["input_ids"]
answer = model.generate(prompt, max_new_tokens=LIMIT, do_sample=False)[0, prompt.shape[1] :]
print(problems[0].question, "->", repr(tokenizer.decode(answer, skip_special_tokens=True)), "| gold:", problems[0].gold)
same_prompt = prompt[0].tolist() == policy.prompt(problems[0].question)

# %% [markdown]
# {{ assert same_prompt }} `vllm serve FOLDER`, verl's `actor_rollout_ref.model.path=FOLDER` and prime-rl's model name
# take such a folder. (`rlcourse merge` makes a full model of a LoRA run's adapter.) The task doesn't come along: you
# write its reward function again, and meet lesson 05's traps.
#
# ## Check yourself
#
# 1. Four ranks, DAPO's loss. A colleague averages the gradients of the four local means. When is that right?
#
# <details><summary>Answer</summary>
# When all four have equally many tokens. Otherwise a token on the rank with few of them weighs more.
# </details>
#
# 2. A rollout takes 30 s, an update 10 s. What does overlap gain with two GPUs, and what else could you do?
#
# <details><summary>Answer</summary>
# 30 s instead of 40: the trainer idles two thirds of the time. Three GPUs that each sample their own batch keep it
# busy, with older weights; three that share one batch gain less (section 5). Or make the rollout faster first.
# </details>
#
# 3. With TIS each weight is at most 2. What becomes of a token that the policy now makes ten times as likely as the
#    sampler did?
#
# <details><summary>Answer</summary>
# It counts twice instead of ten times: a bias, on the side of caution. Without the cap, a few such tokens could
# dominate the gradient.
# </details>
#
# ## Exercises
#
# [exercises/15_scale_out.ipynb](../exercises/15_scale_out.ipynb): five, from what a colleague divided by and which
# program hangs to how old every batch is.
#
# ## Further reading
#
# - Patarasuk and Yuan 2009, *Bandwidth optimal all-reduce algorithms for clusters of workstations*: the ring.
# - Rajbhandari et al. 2019, *ZeRO*, arXiv:1910.02054; Zhao et al. 2023, *PyTorch FSDP*, arXiv:2304.11277.
# - Noukhovitch et al. 2024, *Asynchronous RLHF*, arXiv:2410.18252: how far off-policy you may go.
# - Fu et al. 2025, *AReaL*, arXiv:2505.24298: bounded staleness and a loss made for it.
# - Sheng et al. 2024, *HybridFlow*, arXiv:2409.19256: the design of verl.
