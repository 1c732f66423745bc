# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# Five exercises for [lesson 15](../notebooks/15_scale_out.ipynb): find out from a vector what a colleague divided by,
# plan an all-reduce in few rounds, see which rank hangs and where, split a batch until it no longer pays, and compute
# how old every batch is. All but the fourth are puzzles. You need no processes: here ranks are rows of tensors. Write
# your code where it says `# YOUR CODE HERE`, then run the cell below it. Use only `torch`: the functions must be
# self-contained.
#
# Each exercise has three hints: a question, the idea, and the shape of the answer.

# %%
import matplotlib.pyplot as plt
import torch

from rlcourse.course.checks import nb15 as check

torch.manual_seed(0)
print("ready")

# %% [markdown]
# ## q1 · What did they divide by?
#
# ●●○○○ · 15 minutes
#
# The loss is a mean over all tokens of all ranks. Each rank has added up the gradients of its tokens: `sums[rank]`, of
# `tokens[rank]` tokens in `rows[rank]` answers. Each colleague shows you the vector that the optimizer got. Say what
# each of them did:
#
# | | the vector |
# | --- | --- |
# | 0 | right: the sum over all, divided by the tokens of all |
# | 1 | each rank divided by its own tokens, then the mean over ranks |
# | 2 | each rank divided by its own tokens, then the **sum** over ranks |
# | 3 | rank 0's own mean: nothing was sent |
# | 4 | the sum over all, divided by the **rows** of all |
# | 5 | right, then divided by the number of ranks once more |
#
# If several numbers fit, return the lowest: a mistake without effect is none. Vectors are accurate to about 1e-5, since
# sums were taken in another order.
#
# Try it by eye first: two ranks, three colleagues, two numbers of each vector.

# %%
sums = torch.tensor([[60.0, -30.0], [20.0, 50.0]], dtype=torch.float64)
tokens, rows = torch.tensor([300, 100]), torch.tensor([8, 8])
shown = torch.tensor([[0.2, 0.2], [0.1, 0.025], [0.2, 0.05]], dtype=torch.float64)
print("sums  ", sums.tolist(), " tokens", tokens.tolist(), " rows", rows.tolist())
for name, vector in zip(("Ada  ", "Bela ", "Chris"), shown.tolist(), strict=True):
    print(name, vector)

# %% [markdown]
# <details><summary>Hint 1: a question</summary>
# When does way 1 give the right vector?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# You needn't work backwards: six vectors are possible, and you can compute them all. The question is which is nearest,
# and what "near" means for vectors whose size you don't know.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A tensor `[6, d]` of candidates. Distances `[colleagues, 6]`, each relative to its candidate's size; a comparison with
# a tolerance; the first True of each row.
# </details>


# %% tags=["exercise"]
def divided_by(sums: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """The number of each colleague, int64 [colleagues]. sums: [ranks, d] float64; tokens, rows: [ranks] int64; found:
    [colleagues, d] float64."""
    # BEGIN SOLUTION
    total, means = sums.sum(0), sums / tokens[:, None]
    right = total / tokens.sum()
    ways = torch.stack([right, means.mean(0), means.sum(0), means[0], total / rows.sum(), right / len(sums)])
    near = (found[:, None] - ways).norm(dim=2) < 1e-3 * ways.norm(dim=1)
    return near.int().argmax(1)  # the first
    # END SOLUTION


# %%
check.q1(divided_by)

# %% [markdown]
# Your verdict on the three:

# %%
if check.q1.passed:
    print(divided_by(sums, tokens, rows, shown).tolist())

# %% [markdown] tags=["solution"]
# **1, 5, 0.** Ada's second number is four times too large: the 50 of rank 1 was divided by 100 tokens and by two ranks,
# and the -30 of rank 0 by 300 and two, where each should have been divided by 400. It isn't just scale: the vector
# points elsewhere, and no learning rate makes up for it. Ways 4 and 5 point the right way but have the wrong length.
# Adam hardly notices, clipping at a norm does, and so such bugs live long. Way 3 looks healthy on every rank. The
# weights just drift apart; the package checks for that before it saves (`check_alike`).

# %% [markdown]
# ## q2 · Few rounds
#
# ●●●○○ · 25 minutes
#
# The ring sends the fewest bytes and takes $2(P-1)$ steps. A small message, such as a count, costs only latency, so
# what matters is the number of rounds. In a **round** the ranks form pairs, and each pair swaps sums, so that both have
# the sum of both. Plan the rounds so that in the end every rank has every rank's numbers in its sum, **exactly once**,
# in as few rounds as possible, $\log_2 P$.
#
# Ranks run on machines: `machine`, `[P]` int64, names each rank's machine, and a name may be any integer. Every machine
# has equally many ranks, in any order; that number and the number of machines, $m$, are powers of 2. Links between
# machines are slow. So at most $\log_2 m$ of the rounds may have pairs on different machines. Return each rank's
# partner, `[rounds, P]` int64.
#
# <details><summary>Hint 1: a question</summary>
# Four ranks on one machine. After the first round there are two kinds of sums. Who must meet whom in the second?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Number the ranks in binary. In round $k$, ranks meet whose numbers differ only in bit $k$. Which rank has which number
# is up to you: let some of the bits say the machine, and nothing else.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# An order of the ranks, machine by machine, and each rank's place in it. For each bit a row: flip that bit in every
# rank's place, and look up the rank at the new place.
# </details>


# %% tags=["exercise"]
def partners(machine: torch.Tensor) -> torch.Tensor:
    """Each rank's partner in each round, int64 [rounds, P]. machine: [P] int64."""
    # BEGIN SOLUTION
    order = machine.argsort(stable=True)  # rank at each place
    place = order.argsort()
    bits = 2 ** torch.arange(len(machine).bit_length() - 1)
    return order[place ^ bits[:, None]]
    # END SOLUTION


# %%
check.q2(partners)

# %% tags=["hide-input"]
# @title Figure: rounds or bytes
if check.q2.passed:
    latency, rate = 20e-6, 12.5e9  # seconds per message, bytes per second
    sizes = torch.logspace(1, 10, 100)
    fig, ax = plt.subplots(figsize=(6.5, 3))
    for ranks, color in ((8, "#0072B2"), (64, "#D55E00")):
        rounds = len(partners(torch.zeros(ranks, dtype=torch.long)))
        ax.loglog(sizes, rounds * (latency + sizes / rate), "--", color=color, label=f"your rounds, {ranks} ranks")
        steps = 2 * (ranks - 1)
        ax.loglog(sizes, steps * (latency + sizes / ranks / rate), color=color, label=f"ring, {ranks} ranks")
    ax.set(
        xlabel="bytes", ylabel="seconds, by a formula", title=f"{1e6 * latency:g} µs per message, {rate / 1e9:g} GB/s"
    )
    ax.grid()
    ax.legend(fontsize=8)
    plt.show()

# %% [markdown] tags=["solution"]
# **A hypercube.** Each round doubles what a rank knows, since partners have no term in common. This is called recursive
# doubling. Each rank sends its whole vector in every round, $\log_2 P$ times, where the ring sends less than two
# vectors in all. The figure shows the crossing: below it rounds count, above it bytes do. Libraries such as NCCL choose
# by size. In practice you also combine both ideas: add up within a machine, ring between machines, spread again.

# %% [markdown]
# ## q3 · Who hangs?
#
# ●●●○○ · 30 minutes
#
# The most common failure of a distributed program is silence: nothing crashes, nothing goes on. Every rank runs its own
# program, step after step. Here a step is a kind and, for messages, a peer:
#
# | kind | |
# | --- | --- |
# | 0 | computes: always goes on |
# | 1 | sends to `peer`: waits until `peer` is at the step that receives from it (as for a large message) |
# | 2 | receives from `peer`: waits for the send |
# | 3 | all-reduce: waits until **all** ranks are at an all-reduce |
#
# `kinds` and `peers` are `[ranks, steps]` int64. Return how many steps each rank completes, int64 `[ranks]`: for a
# program that ends well, that's `steps` for all.
#
# Here are three programs that you may have written yourself. How far does each rank get?

# %%
WORDS = {0: "compute", 1: "send to", 2: "receive from", 3: "all-reduce"}
PROGRAMS = {
    "swap": ([[0, 1, 2], [0, 1, 2]], [[0, 1, 1], [0, 0, 0]]),
    "rank 0 evaluates, and evaluation has an all-reduce in it": ([[3, 3, 0], [3, 0, 0]], [[0] * 3] * 2),
    "a loss that is zero, so rank 1 skips the update": ([[3, 3, 3], [3, 0, 3]], [[0] * 3] * 2),
}
for name, (kinds, peers) in PROGRAMS.items():
    print(name)
    for rank in range(2):
        steps = [WORDS[k] + (f" {p}" if k in (1, 2) else "") for k, p in zip(kinds[rank], peers[rank], strict=True)]
        print(f"    rank {rank}:", " | ".join(steps))

# %% [markdown]
# <details><summary>Hint 1: a question</summary>
# Two ranks both send first. Which of them could take the next step, and what would have to be true?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Simulate it. Keep each rank's current step. As long as any rank can go on, let it. The order doesn't matter, because
# every rank names the one it waits for.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A list of counters and a loop that ends when a pass changed nothing. In a pass: each rank alone (kind 0), each rank
# that sends together with its peer, and all ranks together. A finished rank is at no step: mind the index.
# </details>


# %% tags=["exercise"]
def progress(kinds: torch.Tensor, peers: torch.Tensor) -> torch.Tensor:
    """Steps that each rank completes, int64 [ranks]. kinds, peers: [ranks, steps] int64."""
    # BEGIN SOLUTION
    kinds, peers = kinds.tolist(), peers.tolist()
    done, steps = [0] * len(kinds), len(kinds[0])

    def at(rank):
        """(kind, peer) of the step that a rank is at."""
        return (kinds[rank][done[rank]], peers[rank][done[rank]]) if done[rank] < steps else (None, None)

    moved = True
    while moved:
        moved = False
        for rank in range(len(kinds)):
            kind, peer = at(rank)
            together = []
            if kind == 0:
                together = [rank]
            elif kind == 1 and at(peer) == (2, rank):
                together = [rank, peer]
            elif kind == 3 and all(at(other)[0] == 3 for other in range(len(kinds))):
                together = list(range(len(kinds)))
            for one in together:
                done[one] += 1
                moved = True
    return torch.tensor(done)
    # END SOLUTION


# %%
check.q3(progress)

# %% [markdown]
# And the three programs:

# %%
if check.q3.passed:
    for name, (kinds, peers) in PROGRAMS.items():
        print(progress(torch.tensor(kinds), torch.tensor(peers)).tolist(), name)

# %% [markdown] tags=["solution"]
# **`[1, 1]`**: both wait in their send. With small messages it works, since they are buffered, and it hangs on the day
# the vector grows: the worst kind of bug. `isend`, or one rank that receives first, fixes it. **`[1, 3]`**: rank 1 has
# finished, and rank 0 waits alone. Every rank must call whatever contains a collective. **`[2, 3]`**: the second
# all-reduce of rank 1 meets another one of rank 0. Here one is left over and it hangs. If both made three, they would
# add up different things and go on, which is worse. So a rank without a gradient must send zeros.

# %% [markdown]
# ## q4 · Split until it no longer pays
#
# ●●○○○ · 15 minutes
#
# One batch of `rows` rows is split over $P$ ranks, equally many each, so $P$ divides `rows`. A rank takes `start_s +
# row_s * (its rows)` seconds. Then a ring adds up the gradients of `gradient_bytes` at `bytes_per_s`, without
# latency. **Efficiency** is the time on one rank, over $P$ times the time on $P$ ranks. Return the largest $P$ whose
# efficiency is at least `least`, as an int. ($P = 1$ has efficiency 1, and `least` is below 1.)
#
# <details><summary>Hint 1: a question</summary>
# If communication is free and `start_s` = 0, what's the answer?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Each rank pays the start. Only the rows get fewer.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A function for the seconds on `P` ranks, and `max` over the divisors that are good enough.
# </details>


# %% tags=["exercise"]
def most_ranks(rows: int, start_s: float, row_s: float, gradient_bytes: int, bytes_per_s: float, least: float) -> int:
    """The largest number of ranks with at least this efficiency."""

    # BEGIN SOLUTION
    def seconds(ranks):
        return start_s + row_s * rows / ranks + 2 * (ranks - 1) / ranks * gradient_bytes / bytes_per_s

    divisors = [n for n in range(1, rows + 1) if rows % n == 0]
    return max(n for n in divisors if seconds(1) >= least * n * seconds(n))
    # END SOLUTION


# %%
check.q4(most_ranks)

# %% [markdown] tags=["solution"]
# **The start kills it.** $P$ ranks pay it $P$ times. A faster link doesn't help there; a larger batch does, and so does
# a cheaper start (lessons 07 and 10: it's mostly decode steps that read all weights for a few rows). That's why "equal
# work in all" (strong scaling) and "equal work per rank" (weak scaling) are two benchmarks, and why you should ask of
# any figure which of the two it is.

# %% [markdown]
# ## q5 · How old?
#
# ●●●○○ · 25 minutes
#
# A sampler and a trainer run side by side. Both take batches in order, one at a time. Batch $i$ takes `sample_s[i]`
# seconds to sample and `train_s[i]` to train on.
#
# - **Sampling** of batch $i$ begins once batch $i - 1$ is sampled and update $i - 1 -$ `ahead` has ended, if there is
#   one. It uses **the newest weights available when it begins**. (With `ahead` = 0 that's the plain loop.)
# - **Update** $i$ begins once batch $i$ is sampled and update $i - 1$ has ended. Its weights are available from its end
#   on, even to a batch that begins at that very moment.
#
# Here sampling takes 2 s, training 3 s, and `ahead` is 1; a column is a second, a number a batch, a dot a pause:
#
#     sampler  0 0 1 1 · 2 2 · 3 3 ·
#     trainer  · · 0 0 0 1 1 1 2 2 2
#
# Batch 1 begins before any update has ended, batch 2 right after update 0, batch 3 right after update 1. So each of
# them misses one update: the ages are 0, 1, 1, 1.
#
# Return each batch's **age**, int64 `[batches]`: of the updates 0 to $i-1$, how many were not yet in the weights that
# sampled batch $i$.
#
# <details><summary>Hint 1: a question</summary>
# Of the four times, begin and end of sampling and of training of batch $i$, which do you need for which?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Each time is a maximum of earlier ones, plus a duration. So one pass over the batches has them all.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A loop with two lists of ends. In it: when sampling may begin (two things to wait for), a count of ends that are not
# later, when training may begin (two things again).
# </details>


# %% tags=["exercise"]
def ages(sample_s: torch.Tensor, train_s: torch.Tensor, ahead: int) -> torch.Tensor:
    """The age of each batch, int64 [batches]. sample_s, train_s: [batches] float64, seconds."""
    # BEGIN SOLUTION
    sampled, trained, found = [], [], []  # when each ended
    for i, (sampling, training) in enumerate(zip(sample_s.tolist(), train_s.tolist(), strict=True)):
        begin = sampled[-1] if sampled else 0.0
        if i - 1 - ahead >= 0:
            begin = max(begin, trained[i - 1 - ahead])
        found.append(i - sum(end <= begin for end in trained))
        sampled.append(begin + sampling)
        trained.append(max([sampled[-1], *trained[-1:]]) + training)
    return torch.tensor(found)
    # END SOLUTION


# %%
check.q5(ages)

# %% [markdown]
# The age over the speed of the sampler. **Look for** what a large `ahead` does with a slow sampler.

# %% tags=["hide-input"]
# @title Figure: the mean age of 60 batches
if check.q5.passed:
    speeds = torch.linspace(0.3, 2.5, 45)
    noise = torch.empty(60, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(0))
    fig, ax = plt.subplots(figsize=(6.5, 3))
    for ahead, color in ((1, "#0072B2"), (2, "#009E73"), (4, "#D55E00")):
        train = torch.ones(60, dtype=torch.float64)
        mean = [ages(s * (0.5 + 0.5 * noise), train, ahead)[10:].double().mean().item() for s in speeds.tolist()]
        ax.plot(speeds, mean, color=color, label=f"ahead {ahead}")
    ax.set(xlabel="seconds of sampling, with a tail; training takes 1", ylabel="mean age, in updates")
    ax.grid()
    ax.legend()
    plt.show()

# %% [markdown] tags=["solution"]
# **`ahead` is a bound, not the age.** If the sampler is the slower one, batches are about one update old whatever you
# allow, and the queue is empty. If the trainer is, each batch is as old as you allow, and being further ahead buys
# nothing but age: one batch ahead keeps the trainer as busy. A larger bound helps when times vary and an occasional
# batch takes long. And if your ages sit at the bound, move a GPU from the sampler to the trainer.
