# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# Three puzzles for [lesson 07](../notebooks/07_static_cache.ipynb): a step without an `if`, a draw that goes wrong, and
# how many slots to take. Write your code where it says `# YOUR CODE HERE`, then run the cell below it. Use only `torch`
# and Python's own modules: the functions must be self-contained.
#
# Each puzzle has three hints: a question, the idea, and the shape of the answer.

# %%
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from rlcourse.course.checks import nb07 as check

torch.manual_seed(0)
print("ready")

# %% [markdown]
# ## q1 · A step without an if
#
# ●●●●○ · 30 minutes
#
# A recording has no `if`. What a finished row does must be decided by the same operations on the same memory at every
# replay. Here is a machine that replays. Its memory holds tensors `[rows]` by name; an instruction is `(operation,
# target, a, b)` or `(operation, target, a, b, c)`, and `a`, `b`, `c` are names, or whole numbers that stay what they
# were when the tape was written. A target that has no memory yet gets some.

# %%
OPERATIONS = {
    "add": lambda a, b: a + b,
    "equal": lambda a, b: (a == b).long(),
    "less": lambda a, b: (a < b).long(),
    "and": lambda a, b: a * b,
    "or": lambda a, b: torch.maximum(a, b),
    "choose": lambda a, b, c: torch.where(a > 0, b, c),  # b where a is true, else c
}


def replay(tape: list, memory: dict) -> None:
    """Go through a tape once. memory: tensors [rows] int64 by name; truth is 1 or 0."""
    for operation, target, *sources in tape:
        values = [memory[s] if isinstance(s, str) else torch.tensor(s) for s in sources]
        memory[target] = OPERATIONS[operation](*values) + torch.zeros_like(memory["drawn"])


# %% [markdown]
# Before each replay the model has written a token for every row into `drawn`, for ended rows as well. Write the tape of
# what comes after. Memory from the start: `drawn`; `token`, what the model sees next; `position`, where it goes;
# `ended`, 1 for rows whose answer has ended. After the replay:
#
# - a row that had **not** ended has its drawn token in `token`, its position is one higher, and it has ended if that
#   token is `eos` or its position has reached `limit`;
# - a row that had ended has `pad` in `token`, and its position and its flag are as they were.
#
# <details><summary>Hint 1: a question</summary>
# Which of the three do you still need as it was, once the others are written?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Whatever looks at "had ended" must come before "has ended" is written. And a position that goes up by one only for
# live rows needs no choice if truth is a number.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# About seven tuples: one for the token, two for the position (one of them makes "had not ended" a number), and four for
# the flag, of which the last writes it. The flag only ever goes from 0 to 1, so it needs no choice.
# </details>


# %% tags=["exercise"]
def tape_of_the_end(eos: int, pad: int, limit: int) -> list:
    """Instructions (operation, target, sources...) that bring token, position and ended up to date."""
    # BEGIN SOLUTION
    return [
        ("choose", "token", "ended", pad, "drawn"),
        ("equal", "alive", "ended", 0),
        ("add", "position", "position", "alive"),
        ("equal", "stop", "token", eos),
        ("less", "full", limit - 1, "position"),
        ("or", "stop", "stop", "full"),
        ("or", "ended", "ended", "stop"),  # a row that had ended stays so, whatever `stop` is
    ]
    # END SOLUTION


# %%
check.q1(tape_of_the_end)

# %% [markdown]
# Your tape, replayed on made-up draws of four rows, with 1 as the end, 0 as padding and 8 as the limit.

# %% tags=["hide-input"]
# @title Table: eight replays
if check.q1.passed:
    torch.manual_seed(2)
    tape, names = tape_of_the_end(1, 0, 8), ("token", "position", "ended")
    memory = {"token": torch.full((4,), 5), "position": torch.tensor([2, 3, 1, 4]), "ended": torch.zeros(4).long()}
    for number in range(8):
        memory["drawn"] = torch.randint(1, 9, (4,))
        replay(tape, memory)
        print(f"{number}: drawn {memory['drawn'].tolist()}  ", end="")
        print("  ".join(f"{name} {memory[name].tolist()}" for name in names))

# %% [markdown] tags=["solution"]
# **The order is the program.** If the flag is written first, the end token itself turns into padding, and the policy is
# never trained to stop. **The limit** is a number on the tape: a rollout with another limit needs another recording, or
# the limit in memory. **What it costs.** Ended rows are computed like all others. That's the price of not asking the
# host, and the reason it looks every few steps.

# %% [markdown]
# ## q2 · Four mistakes in a draw
#
# ●●●●○ · 25 minutes
#
# Draw one token per row from the softmax of `logits`, with **one** uniform number $u \in [0, 1)$ per row. Put the
# probabilities of the tokens side by side from 0 to 1, in order: the token is the first one whose running sum
# **exceeds** $u$. As on a GPU, it's done at two levels. The vocabulary is cut into tiles of `tile` tokens (the last may
# be shorter); first the tile, then the place in it. The log-prob of the token under the softmax of the whole row is
# returned as well. A colleague has written it:


# %%
def colleague(logits, tile, uniform):
    rows = torch.arange(len(logits))
    tiles = F.pad(logits, (0, -logits.shape[1] % tile), value=-torch.inf).unflatten(
        1, (-1, tile)
    )  # [rows, tiles, tile]
    mass = (tiles - tiles.amax(2, keepdim=True)).exp()
    by_tile = mass.sum(2)
    goal = uniform * by_tile.sum(1)
    which = (by_tile.cumsum(1) >= goal[:, None]).long().argmax(1)  # the first tile that gets there
    place = (mass[rows, which].cumsum(1) >= goal[:, None]).long().argmax(1)
    return which * tile + place, (mass[rows, which, place] / by_tile[rows, which]).log()


# %% tags=["hide-input"]
# @title Twenty thousand draws: `show(function)`


def show(draw) -> None:
    """Shares of draws beside the softmax, and the log-probs that come with them."""
    torch.manual_seed(0)
    logits, draws = 1.2 * torch.randn(1, 14), 20_000
    logits[:, 0] = -torch.inf
    tokens, logprobs = draw(logits.expand(draws, -1), 4, torch.rand(draws))
    pi = logits[0].softmax(0)
    claimed = torch.zeros(14).index_copy_(0, tokens, logprobs.exp().float())
    _, ax = plt.subplots(figsize=(7, 3), layout="constrained")
    ax.bar(range(14), torch.bincount(tokens, minlength=14) / draws, color="#56B4E9", label="share of the draws")
    ax.plot(range(14), pi, color="black", marker="o", linestyle="", label="softmax")
    ax.plot(range(14), claimed, color="#D55E00", marker="x", linestyle="", label="exp of the log-prob returned")
    ax.set(xlabel="token", ylabel="probability", title="Tiles of 4; token 0 is impossible")
    ax.set_xticks(range(14))
    ax.legend()
    plt.show()
    at_zero = draw(logits, 4, torch.zeros(1))[0].item()
    print(f"u = 0 draws token {at_zero}, whose probability is {pi[at_zero]:.2f}")


show(colleague)

# %% [markdown]
# There are four mistakes. Write the draw without them. Logits can be large (`exp(200)` is infinite in float32), and
# some can be `-inf`; in each tile at least one is finite. It can be so low that the whole tile's mass rounds to 0, and
# then none of its tokens is drawn.
#
# Shapes: `logits` `[rows, vocabulary]`, `uniform` `[rows]`; result: two tensors `[rows]`, int64 and float.
#
# <details><summary>Hint 1: a question</summary>
# Two tiles, one of likely tokens and one of hopeless ones: what are their masses in the line that computes `mass`?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# One scale for the whole row. Then follow $u$ by hand on four tokens in two tiles: what is left of the goal once you
# know the tile, what happens at $u = 0$, and which sum divides the mass of the token?
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Her lines with four of them changed, and one more, which subtracts from the goal the mass of the tiles before the one
# that was found.
# </details>


# %% tags=["exercise"]
def mended_draw(logits: torch.Tensor, tile: int, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [rows] and log-probs [rows] of one draw per row, by a running sum over tiles and then within one.

    logits: [rows, vocabulary]; tile: tokens in a tile; uniform: [rows], in [0, 1).
    """
    # BEGIN SOLUTION
    rows = torch.arange(len(logits))
    tiles = F.pad(logits, (0, -logits.shape[1] % tile), value=-torch.inf).unflatten(1, (-1, tile))
    mass = (tiles - logits.amax(1)[:, None, None]).exp()
    by_tile = mass.sum(2)
    goal = uniform * by_tile.sum(1)
    which = (by_tile.cumsum(1) > goal[:, None]).long().argmax(1)
    left = goal - (by_tile.cumsum(1) - by_tile)[rows, which]
    place = (mass[rows, which].cumsum(1) > left[:, None]).long().argmax(1)
    tokens = which * tile + place
    return tokens, logits.log_softmax(1)[rows, tokens]
    # END SOLUTION


# %%
check.q2(mended_draw)

# %%
try:
    show(mended_draw)
except NotImplementedError:
    print("nothing to show yet")

# %% [markdown] tags=["solution"]
# **One scale.** Measured by its own largest logit, a tile of hopeless tokens looks as heavy as the best one. The
# package's kernel does measure each tile by its own, since it can't know the others yet, and repairs that afterwards.
# **What is left.** Within a tile the running sum starts again at 0, so the goal must as well. **Exceeds, not reaches.**
# With $u = 0$ and an impossible first token, `>=` draws what can't be drawn: rare, and fatal, as its log-prob is minus
# infinity. **Which sum.** The log-prob within the tile is too high, so every importance ratio is wrong, and nothing
# looks odd. (For $u$ very near to 1, rounding may leave no place whose running sum exceeds the goal, and `argmax` of no
# true entry is 0. The kernel takes the last place then.)

# %% [markdown]
# ## q3 · How many slots?
#
# ●●●○○ · 25 minutes
#
# Answers wait in a given order and need `lengths[i]` steps each. You choose the number of slots once, from 1 to `most`.
# As soon as a slot is free, the next answer takes it and stays until it ends. A slot that becomes free after step 7
# works on the next answer in step 8. A recording has a fixed size, so **every** step takes $\max(\text{host ms},\
# \text{fixed ms} + \text{row ms} \times \text{slots})$, however many slots are in use. Steps go on until all answers
# have ended.
#
# Return the number of slots with which everything is done soonest, the smallest if several tie. (Here you may know the
# lengths.)
#
# Shapes: `lengths` `[answers]` int64; the others numbers.
#
# <details><summary>Hint 1: a question</summary>
# With a given number of slots, after how many steps has the last answer ended? You needn't simulate every step for
# that.
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Keep for each slot the step after which it is free. The next answer takes the slot that is free first. Then try every
# number of slots: no formula knows where the last long answer begins.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A loop over the number of slots; in it a loop over the lengths that moves one slot's time on; the latest of those
# times, multiplied by what a step takes; and the number of slots with the smallest product.
# </details>


# %% tags=["exercise"]
def best_slots(lengths: torch.Tensor, host_ms: float, fixed_ms: float, row_ms: float, most: int) -> int:
    """The number of slots, 1 to `most`, for which all answers are done soonest. lengths: [answers]."""
    # BEGIN SOLUTION
    times = []
    for slots in range(1, most + 1):
        free = [0] * slots
        for length in lengths.tolist():
            first = free.index(min(free))
            free[first] += length
        times.append(max(free) * max(host_ms, fixed_ms + row_ms * slots))
    return 1 + times.index(min(times))
    # END SOLUTION


# %%
check.q3(best_slots)

# %% [markdown]
# The best number of slots for 48 answers of geometric length, by what a row costs. **Look for** when it pays to have
# fewer slots than answers.

# %% tags=["hide-input"]
# @title Figure: slots, by the price of a row
if check.q3.passed:
    torch.manual_seed(0)
    lengths = (1 + torch.distributions.Geometric(1 / 60).sample((48,)).long()).clamp(max=256)
    prices = [0.0, 0.005, 0.01, 0.02, 0.05, 0.1]
    fig, ax = plt.subplots()
    for host, color, style in ((0.0, "#009E73", "-"), (2.0, "#D55E00", "--")):
        found = [best_slots(lengths, host, 0.5, price, 48) for price in prices]
        ax.plot(prices, found, color=color, linestyle=style, marker="o", label=f"host {host:g} ms per step")
    ax.set(
        xlabel="ms for each row", ylabel="best number of slots", title="48 answers, 0.5 ms per step fixed", ylim=(0, 50)
    )
    ax.legend()
    plt.show()

# %% [markdown] tags=["solution"]
# On a host-bound step rows are free: take so many slots that only the longest answer matters. As rows get dearer, you
# pay for slots that are empty while the last answers run, so fewer slots, refilled, are better. That is why a rollout
# should hand **all** its prompts to the engine at once and let it take fewer slots. The lengths are unknown before they
# are written, so an engine decides by their distribution.
