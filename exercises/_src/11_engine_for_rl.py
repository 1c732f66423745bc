# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# Four exercises for [lesson 11](../notebooks/11_engine_for_rl.ipynb): audit a block manager's trace, admit as many
# answers as surely fit, find the request that a scheduler never finishes, and write a probe for operations that depend
# on the number of rows. The first, third and fourth are puzzles. Write your code where it says `# YOUR CODE HERE`, then
# run the cell below it. Use only `torch` and the standard library: the functions must be self-contained.
#
# Each exercise has three hints: a question, the idea, and the shape of the answer.

# %%
import itertools

import matplotlib.pyplot as plt
import torch

from rlcourse.course.checks import nb11 as check

torch.manual_seed(0)
print("ready")

# %% [markdown]
# ## q1 · Convict a block manager
#
# ●●●○○ · 25 minutes
#
# A colleague's engine writes nonsense now and then, always long after the mistake. You have the trace of her block
# manager. An entry is `[what, table, blocks]`:
#
# - `give`: the table gets these blocks at its end, and nobody else may hold them yet. Blocks are numbers from 1 to
#   `number` - 1 (0 is nobody's);
# - `share`: the table gets these blocks, which at least one other table holds, and it does not;
# - `write`: the table writes new tokens into these blocks. It must hold them, and no other table may: a table that
#   shares a block must copy it first;
# - `drop`: the table lets go of these blocks, each of which it must hold. They need not be all of its blocks.
#
# Within an entry, blocks are handled from left to right, so a block that appears twice in a `give`, `share` or `drop`
# is wrong the second time. Tables are empty at first. Return the place of **the first entry that a correct manager
# can't have written**, counted from 0, or -1 if all are fine.
#
# Here is her manager, at work on a request. Can you see it?


# %%
class HerManager:
    """Gives and shares blocks and writes down what it does."""

    def __init__(self, number: int):
        self.free, self.tables, self.trace = list(range(1, number)), {}, []

    def give(self, name: str) -> None:
        self._add("give", name, [self.free.pop(0)])

    def share(self, name: str, other: str) -> None:
        self._add("share", name, self.tables[other][:2])

    def write(self, name: str) -> None:
        self.trace.append(["write", name, self.tables[name][-1:]])

    def drop(self, name: str) -> None:
        blocks = self.tables.pop(name)
        self.free += [block for block in blocks if block not in self.free]
        self.trace.append(["drop", name, blocks])

    def _add(self, what: str, name: str, blocks: list[int]) -> None:
        self.tables[name] = self.tables.get(name, []) + blocks
        self.trace.append([what, name, blocks])


hers = HerManager(8)
for name in "aaa":
    hers.give(name)
hers.share("b", "a")
hers.give("b")
hers.write("b")
hers.drop("a")
for name in "cc":
    hers.give(name)
hers.write("c")
for name in "dd":
    hers.give(name)
hers.write("d")
hers.write("b")
for place, entry in enumerate(hers.trace):
    print(f"{place:2}  {entry[0]:5} {entry[1]} {entry[2]}")

# %% [markdown]
# <details><summary>Hint 1: a question</summary>
# For each of the four kinds: who holds the block just before the entry, if all is well?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Replay the trace with tables of your own. A reference count alone is not enough: it says how many hold a block, and
# `write`, `share` and `drop` also ask whether *this* table does.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A loop over entries, and inside it one over their blocks. For each block two facts, `mine` and `others`; four
# conditions on them, one for each kind; then the change to your own tables.
# </details>


# %% tags=["exercise"]
def audit(trace: list, number: int) -> int:
    """Place of the first entry that a right manager cannot have written, -1 for none."""
    # BEGIN SOLUTION
    tables: dict[str, set[int]] = {}
    for place, (what, name, blocks) in enumerate(trace):
        table = tables.setdefault(name, set())
        for block in blocks:
            mine = block in table
            others = any(block in held for other, held in tables.items() if other != name)
            fine = {
                "give": 0 < block < number and not mine and not others,
                "share": others and not mine,
                "write": mine and not others,
                "drop": mine,
            }[what]
            if not fine:
                return place
            if what in ("give", "share"):
                table.add(block)
            elif what == "drop":
                table.remove(block)
    return -1
    # END SOLUTION


# %%
check.q1(audit)

# %% [markdown]
# Your verdict on her trace. The entry you found is where it shows. The mistake was made earlier.

# %%
if check.q1.passed:
    place = audit(hers.trace, 8)
    print(f"entry {place} is impossible: {hers.trace[place]}")

# %% [markdown] tags=["solution"]
# **The crime and the clue.** Entry 11 gives `d` block 1, which `b` still reads. The mistake was made at entry 6. `drop`
# called the blocks of `a` free although `b` shares two of them: she has no count of holders. Five entries later one of
# them is given away, and one more entry later it's written into; only then are `b`'s tokens garbage. That is why an
# engine is audited entry by entry: the package's tests do so after every plan, with random requests.

# %% [markdown]
# ## q2 · How many may start?
#
# ●●●○○ · 20 minutes
#
# The package's scheduler admits on trust and preempts when blocks run out. Write a cautious one: it starts an answer
# only if there is surely room for the next `steps` steps, even if no answer ends. At each step every row writes one
# token. A block has room for `block` tokens, and `free` blocks belong to nobody.
#
# - **Running answers come first.** `running` `[R]` int64 says how many tokens each has in the cache now. It holds just
#   the blocks for them, all its own. There is always room for them.
# - **Then the queue, in order.** `prompts` `[P]` int64 are the tokens of the waiting prompts, with `group` answers to
#   each. The first answer to a prompt needs blocks for the prompt and its own `steps` tokens. The others share the
#   blocks that the prompt **fills**, and need the rest for themselves.
#
# Say blocks of 8, a prompt of 20 tokens and 5 steps. 25 tokens take 4 blocks; the prompt fills 2 of them. So the first
# answer costs 4 blocks and every other one 2.
#
# Return the largest number of answers that can start now: if one doesn't fit, none after it starts. A part of a group
# may start.
#
# <details><summary>Hint 1: a question</summary>
# A row has 15 tokens, a block 8. How many more blocks does it need for 1 step, for 2 steps? And with 16 tokens?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Count blocks, never tokens: the blocks needed in the end, less those that are there now. For a waiting answer, "there
# now" is what its group already holds, and the first of a group finds nothing.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# First subtract from `free` what the running answers will need. Then two loops, over prompts and over each prompt's
# answers. Inside, the price of one answer, which has two cases, and an early return.
# </details>


# %% tags=["exercise"]
def admit(running: torch.Tensor, prompts: torch.Tensor, group: int, free: int, block: int, steps: int) -> int:
    """How many answers can start now and surely go on for `steps` steps. running: [R], prompts: [P], both int64."""

    # BEGIN SOLUTION
    def blocks_for(tokens: int) -> int:
        return -(-tokens // block)

    free -= sum(blocks_for(tokens + steps) - blocks_for(tokens) for tokens in running.tolist())
    started = 0
    for tokens in prompts.tolist():
        shared = tokens // block
        for number in range(group):
            price = blocks_for(tokens + steps) - (shared if number else 0)
            if price > free:
                return started
            free -= price
            started += 1
    return started
    # END SOLUTION


# %%
check.q2(admit)

# %% [markdown]
# What caution costs: 32 answers with 200 prompt tokens each in 300 blocks of 16, over how far the rule looks ahead.
# **Look for** how fast both lines fall (caution) and the distance between them (what a group of eight saves).

# %% tags=["hide-input"]
# @title Figure: caution and its price
if check.q2.passed:
    ahead = list(range(1, 513, 8))
    fig, ax = plt.subplots(figsize=(7, 2.6))
    for group, color, style in ((1, "#56B4E9", "-"), (8, "#E69F00", "--")):
        prompts = torch.full((32 // group,), 200)
        counts = [admit(torch.empty(0, dtype=torch.long), prompts, group, 300, 16, steps) for steps in ahead]
        ax.plot(ahead, counts, color=color, linestyle=style, label=f"{group} to a prompt")
    ax.set(xlabel="steps that are sure", ylabel="answers that start", ylim=(0, 34))
    ax.legend()
    ax.grid()
    plt.show()

# %% [markdown] tags=["solution"]
# **Rows, not sums.** Each row has a last block of its own, so what counts is rounded up row by row. **Which blocks are
# shared** is rounded *down*: a block that the prompt fills in part gets other tokens after it in each answer. **How far
# to look.** With as many steps as an answer can be long nobody is ever sent back, and only few run. With one step many
# start, and some are sent back. The package looks ahead only until the host checks again, and prefills again when that
# was too bold, since most answers end early.

# %% [markdown]
# ## q3 · The request that never ends
#
# ●●●●○ · 30 minutes
#
# A colleague has an idea. "When memory runs out, send back the answer that **holds most**. That frees most. And let it
# start from nothing, so that nobody has to keep its tokens." It runs well for weeks. Then one request hangs forever,
# although each of its answers alone would fit.
#
# Her rule, with blocks of one token. There are `rows` answers, numbers 0 to `rows` - 1, all of the same length, and the
# memory holds `capacity` tokens. At first all wait. A step:
#
# 1. Waiting answers are considered in the order of their numbers. One starts, with 0 tokens, if afterwards there would
#    be room for one more token for each running answer.
# 2. While there's no room for one more token for each running answer, the one with the most tokens is sent back (on a
#    tie, the lowest number). It loses its tokens and waits.
# 3. Each running answer gets a token.
#
# An answer ends once it has as many tokens as its length. Return **the smallest length at which no answer ever ends**.
# (In the cases we try, one exists that is no greater than `capacity`.)
#
# <details><summary>Hint 1: a question</summary>
# Two answers have grown side by side until the memory is full. One is sent back. How many tokens has the other when the
# memory is full again, and who is sent back then?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Nothing is random. If a state of the memory comes back, all that followed it comes back too. As long as nobody ends,
# lengths don't matter to what happens.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A list with each answer's tokens, and a mark for those that wait. A loop over the three parts of a step, with a set of
# the states seen so far. Either try one length after another, or ask what one run without end says about all of them.
# </details>


# %% tags=["exercise"]
def shortest(capacity: int, rows: int) -> int:
    """The smallest length at which none of `rows` answers ever ends."""
    # BEGIN SOLUTION
    waits = -1
    tokens, most, seen = [waits] * rows, 0, set()
    while tuple(tokens) not in seen:  # a run in which nobody ends, until it repeats itself
        seen.add(tuple(tokens))
        for row in range(rows):
            if tokens[row] == waits and sum(t + 1 for t in tokens if t != waits) + 1 <= capacity:
                tokens[row] = 0
        while sum(t + 1 for t in tokens if t != waits) > capacity:
            tokens[tokens.index(max(tokens))] = waits
        tokens = [t + 1 if t != waits else waits for t in tokens]
        most = max(most, *tokens)
    return most + 1  # nobody ever gets further
    # END SOLUTION


# %%
check.q3(shortest)

# %% [markdown]
# Your function over the memory's size. The dotted line is the memory itself: an answer below it fits alone. **Look
# for** how much of the range below it hangs forever, and what more answers do to it.

# %% tags=["hide-input"]
# @title Figure: lengths that never end
if check.q3.passed:
    fig, ax = plt.subplots(figsize=(7, 3))
    sizes = list(range(12, 81, 4))
    for rows, color, marker in ((2, "#0072B2", "o"), (3, "#E69F00", "s"), (5, "#009E73", "^")):
        lengths = [shortest(capacity, rows) for capacity in sizes]
        ax.plot(sizes, lengths, color=color, marker=marker, label=f"{rows} answers: none ends from here on")
    ax.plot(sizes, sizes, color="black", linestyle=":", label="fits alone")
    ax.set(xlabel="tokens that the memory holds", ylabel="length")
    ax.legend()
    ax.grid()
    plt.show()

# %% [markdown] tags=["solution"]
# **Two answers.** They fill the memory with a half each. One is sent back and starts again, and both grow at the same
# rate: when the memory is full, one has three quarters and the other one quarter. Now the one with three quarters is
# sent back. The next who gets far is sent back at five eighths, the next at eleven sixteenths, and so on. An answer
# that needs more than three quarters never ends. **What's missing** is an answer that is never sent back. With "the
# youngest goes" that is the oldest: it ends, then the next one is the oldest, and fewer are left. A rule that frees
# more at once, or looks fair, proves nothing. **Her second idea**, to throw tokens away, is what makes it hang: an
# answer that keeps its tokens gets further each time it runs, though it may still wait a long time.

# %% [markdown]
# ## q4 · Which operation looks at the number of rows?
#
# ●●●○○ · 20 minutes
#
# Sampler and trainer agree to the last bit only if no operation's result for a row depends on how many rows are beside
# it. Write a probe for that. Each operation was called with the first row of a matrix alone, with the first two, and so
# on. `results[j][i]` is what operation `j` gave for `i + 1` rows: a tensor `[i + 1, n]`, in float32 or bf16. Return for
# each operation **the smallest number of rows at which a row's bits differ from those in the call before**, 0 if there
# is none: int64 `[operations]`. The last row of each call is new and says nothing yet.
#
# Bits, not values: no tolerance, `0.0` and `-0.0` are different, and a `nan` may be the same as before.
#
# <details><summary>Hint 1: a question</summary>
# What does `==` say about two equal nans, and about the two zeros?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# `view(dtype)` reads the same bits as another type, of the same number of bytes.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A small function from a tensor to its bits as integers. A loop over operations, and inside it one over consecutive
# calls; cut the longer one to the rows of the shorter.
# </details>


# %% tags=["exercise"]
def first_to_part(results: list[list[torch.Tensor]]) -> torch.Tensor:
    """For each operation the smallest number of rows at which a row's bits change, 0 for never: int64 [operations]."""

    # BEGIN SOLUTION
    def bits(x: torch.Tensor) -> torch.Tensor:
        return x.view(torch.int16 if x.element_size() == 2 else torch.int32)

    found = torch.zeros(len(results), dtype=torch.long)
    for j, calls in enumerate(results):
        for before, call in itertools.pairwise(calls):
            if not torch.equal(bits(before), bits(call[: len(before)])):
                found[j] = len(call)
                break
    return found
    # END SOLUTION


# %%
check.q4(first_to_part)

# %% [markdown]
# Now five functions that all multiply `x` `[R, k]` with the same `w`, or nearly so. Before you run the probe: which of
# them are right for an engine?


# %%
torch.manual_seed(0)
w = torch.randn(768, 64)


def chain(x, begin=0, end=768):
    total = torch.zeros(len(x), 64)
    for k in range(begin, end):
        total = total + x[:, k, None] * w[k]
    return total


def tiles(x):
    return chain(x, 0, 256) + chain(x, 256, 512) + chain(x, 512, 768)


def busy(x):
    return chain(x) if len(x) >= 6 else chain(x, 0, 384) + chain(x, 384, 768)


def scaled(x):
    largest = x.abs().max()
    return chain(x / largest) * largest


def library(x):
    return x @ w


# %%
if check.q4.passed:
    x = torch.randn(20, 768)
    suspects = (chain, tiles, busy, scaled, library)
    verdicts = first_to_part([[f(x[: r + 1]) for r in range(len(x))] for f in suspects])
    for f, rows in zip(suspects, verdicts.tolist(), strict=True):
        print(f"{f.__name__:8}", f"changes at {rows} rows" if rows else "never changes")

# %% [markdown] tags=["solution"]
# **`chain` and `tiles` never change.** They differ from each other in bits, but each has one order for any number of
# rows, and that's all we ask: sampler and trainer must use the *same* one. **`busy`** splits the sum while there are
# few rows, to give more processors work, and changes its order at 6. **`scaled`** adds in a fixed order and depends on
# the other rows through their largest number, as 8-bit formats with one scale per tensor do: it changes as soon as a
# larger number joins. **`library`** chooses its kernel by the sizes, and each machine's does so differently: a small
# product (96 × 8, say) may never change. Such a probe finds what reading code doesn't, and needs no reference: each
# operation is compared with itself.
