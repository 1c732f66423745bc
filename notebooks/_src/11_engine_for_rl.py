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
# - to keep the KV cache of many answers in blocks, with a block table written by hand in 25 lines;
# - to read a schedule: who runs when, and who is preempted when the blocks run out;
# - what the answers to one prompt can share, and what an update of the weights makes worthless;
# - why sampler and trainer give the same token different log-probs, and how to make them bitwise equal;
# - what that mismatch does to training.
#
# You need [lesson 07](07_static_cache.ipynb), sections 5 and 7, [lesson 02](02_ppo.ipynb) for the importance ratio,
# [lesson 04](04_dr_grpo.ipynb) for GSPO, and [lesson 05](05_full_loop.ipynb), section 4. Sections 1 to 6 are about the
# engine, 7 and 8 about its numbers; you can read either half alone.
#
# An engine that serves chats and one that samples for training do the same work under different rules. In training,
# many answers have the same prompt, the weights change after every rollout, and the log-probs go into a loss.

# %%
import copy
import heapq
import random
from collections import Counter
from dataclasses import dataclass, field

import matplotlib.pyplot as plt
import torch
from transformers import DynamicCache

from rlcourse.course import pick
from rlcourse.course.lessons.curve_records import load_curve
from rlcourse.course.lessons.recorded import LAG
from rlcourse.course.widgets import bet, explorer
from rlcourse.logprobs import token_logprobs
from rlcourse.measure.plots import BLACK, BLUE, GREEN, ORANGE, SKY, VERMILION
from rlcourse.measure.records import load_record, provenance
from rlcourse.policy import load_policy
from rlcourse.rollout import make_engine
from rlcourse.rollout.blocks import BLOCK_TOKENS, BlockManager
from rlcourse.rollout.scheduler import Scheduler
from rlcourse.sampling import Sampling
from rlcourse.tasks import load_task

policy, task = load_policy("embedded"), load_task("minigsm")
prompts = [policy.prompt(p.question) for p in task.problems("train")[:16]]

# %% [markdown]
# ## 1 · Paging by hand
#
# The static cache of lesson 07 reserves room for the longest answer in every row. Most answers are short, so most of it
# stays empty, and memory, not arithmetic, limits how many answers run at once. *Paging* (Kwon et al. 2023) takes the
# idea from operating systems. The memory is cut into **blocks** of a few tokens. An answer gets a block when it needs
# one, wherever one is free, and a **block table** says where its tokens are. Here's all the bookkeeping:


# %%
class Blocks:
    """Which block is whose. A block has room for `size` tokens; `holders` counts the tables that a block is in."""

    def __init__(self, number: int, size: int):
        self.size, self.free, self.holders = size, list(range(number))[::-1], [0] * number
        self.tables: dict[str, list[int]] = {}

    def grow(self, name: str, tokens: int) -> None:
        """Give a table the blocks that it still needs for so many tokens."""
        table = self.tables.setdefault(name, [])
        while len(table) * self.size < tokens:
            table.append(self.free.pop())
            self.holders[table[-1]] = 1

    def share(self, name: str, other: str, tokens: int) -> None:
        """Begin a table with those blocks of another that `tokens` tokens fill."""
        self.tables[name] = self.tables[other][: tokens // self.size]
        for block in self.tables[name]:
            self.holders[block] += 1

    def drop(self, name: str) -> None:
        """A table lets go of its blocks. What nobody holds is free."""
        for block in self.tables.pop(name):
            self.holders[block] -= 1
            if self.holders[block] == 0:
                self.free.append(block)


blocks = Blocks(12, 4)
for tokens in range(6, 11):  # two answers that grow in turn
    for name in ("a", "b"):
        blocks.grow(name, tokens)
blocks.share("c", "a", 6)  # a third with the same prompt of 6 tokens
blocks.grow("c", 7)
for name, table in blocks.tables.items():
    print(f"table of {name}: {table}")
print("holders:", blocks.holders, " free:", blocks.free)

# %% [markdown]
# The blocks of `a` and `b` are interleaved, and that doesn't matter. `c` shares the one block that its prompt of 6
# tokens **fills**. The next one is partly filled: `a` writes its own tokens after the prompt's last two, so `c` needs a
# block of its own, and the two tokens are copied there.
#
# Attention reads through the table. Does anything change in what it computes?

# %%
torch.manual_seed(0)
keys, values = torch.zeros(2, 12, 4, 8)  # [blocks, tokens of a block, size of a head]
k, v, q = torch.randn(10, 8), torch.randn(10, 8), torch.randn(1, 8)
for position in range(10):
    block, offset = blocks.tables["b"][position // 4], position % 4
    keys[block, offset], values[block, offset] = k[position], v[position]


def attend(q, k, v):
    return (q @ k.T / 8**0.5).softmax(-1) @ v


found = [memory[blocks.tables["b"]].flatten(0, 1)[:10] for memory in (keys, values)]
print("through the table, the same bits:", torch.equal(attend(q, *found), attend(q, k, v)))
assert torch.equal(attend(q, *found), attend(q, k, v))

# %% [markdown]
# Here the entries are gathered first. A kernel skips that: it looks up each block's number and reads the block in
# place.
#
# **Explore** the blocks of six answers to two prompts of 11 tokens. Each row is a table; its numbers are blocks. Full
# colour holds a token, pale colour is reserved and empty, orange is shared. The dotted line is what a static cache
# reserves. Try blocks of 1 token, and of 16. What does each cost?

# %% tags=["hide-input"]
# @title Explorer: a block table
LENGTHS = (5, 18, 30, 9, 3, 24)  # of the answers, when they have ended


def draw_tables(ax, block_tokens: int, step: int, share_prompts: bool) -> None:
    """The tables after some steps; how much of the reserved room holds a token."""
    prompt, pool = 11, Blocks(400, block_tokens)
    running = [i for i, length in enumerate(LENGTHS) if step < length]
    for i in running:
        first = next(j for j in running if j // 3 == i // 3)
        if share_prompts and i != first:
            pool.share(str(i), str(first), prompt)
        pool.grow(str(i), prompt + step)
    for i in running:
        for place, block in enumerate(pool.tables[str(i)]):
            color = ORANGE if pool.holders[block] > 1 else SKY
            begin, filled = place * block_tokens, min(block_tokens, prompt + step - place * block_tokens)
            ax.barh(i, block_tokens, left=begin, color=color, alpha=0.3, edgecolor="white")
            ax.barh(i, filled, left=begin, color=color, edgecolor="white")
            if block_tokens > 1:
                ax.text(begin + block_tokens / 2, i, str(block), ha="center", va="center", fontsize=8)
    held = sum(count > 0 for count in pool.holders)
    room = prompt + max(LENGTHS)
    ax.axvline(room, color=BLACK, linestyle=":")
    ax.set_title(f"step {step}, blocks of {block_tokens}: {held} blocks, {held * block_tokens} places\n")
    ax.text(0, -0.75, f"static: {len(LENGTHS)} × {room} = {len(LENGTHS) * room} places", fontsize=9)
    ax.set(xlabel="token", ylabel="answer", ylim=(5.6, -1.1), xlim=(0, 50), yticks=range(6))


stories = [{"block_tokens": 4, "step": 2}, {"block_tokens": 4, "step": 16}, {"block_tokens": 16, "step": 16}]
explorer(
    draw_tables,
    static=[story | {"share_prompts": True} for story in stories],
    block_tokens=[4, 1, 2, 8, 16],
    step=(2, 0, 30, 1),
    share_prompts=True,
)

# %% [markdown]
# Small blocks waste little room but need long tables. An answer's last block is half empty on average, so large blocks
# waste more, and fewer prompts fill a block that can be shared. The package's blocks have {{ BLOCK_TOKENS }} tokens
# because that's a tile of its attention kernel. So paging doesn't change the order of any sum, which section 7 needs.
#
# Now the package's own `BlockManager`. It adds three things: block 0 belongs to nobody, so that an idle slot has
# somewhere to write; full prompt blocks can be found again by their tokens; and it knows which weights wrote them.

# %%
manager = BlockManager(num_blocks=13, block_tokens=4)
prompt = list(range(100, 110))  # 10 tokens
table = manager.allocate(manager.blocks_for(len(prompt)))
manager.keep(prompt, table)  # the full ones will be found
other = manager.find([*prompt, 7, 8], most=3)  # another sequence that begins alike
print("table", table, "· found again", other, "· holders", manager.holders, "· available", manager.available)
manager.release(table)
manager.release(other)
print("all let go · still findable", list(manager.unused), "· available", manager.available)
print("tokens of a block in the package:", BLOCK_TOKENS)

# %% [markdown]
# A block that nobody holds but somebody may ask for again is kept until its room is needed. That's a *prefix cache*.
#
# ## 2 · A schedule
#
# The **scheduler** decides who runs. Answers wait in a queue. One is admitted when there are blocks for its prompt;
# each running answer grows by one token per step; a finished one gives its blocks back. What does that gain when most
# answers are short?

# %% tags=["hide-input"]
# @title Your bet
HOW_MANY = ["about 80", "about 16", "about 20", "about 40"]
fit_bet = bet(
    "Room for 16 answers of full length: 256 tokens, and a prompt of 64. The median answer has a fifth of the 256. "
    "How many run at once, with paging, while more are waiting?",
    HOW_MANY,
)

# %% [markdown]
# The package's `Scheduler` makes plans and knows nothing about GPUs. Here a fake device carries them out: it samples
# nothing and counts.


# %%
@dataclass
class Seen:
    """What happened: rows that ran and blocks in use, at each step; who ran; who was sent back, and when; tokens that
    were prefilled, and how many of them `again`, after an answer was sent back."""

    rows: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    running: list[list[int]] = field(default_factory=list)
    sent_back: list[tuple[int, int]] = field(default_factory=list)
    prefilled: int = 0
    again: int = 0


def watch(lengths, budget, prompts, group=1, longest=256, manager=None) -> Seen:
    """Run answers of `lengths` tokens, `group` to each prompt, in `budget` blocks of 16 tokens."""
    manager, seen = manager or BlockManager(budget + 1, 16), Seen()
    scheduler = Scheduler(manager, prompts, group, longest, num_slots=len(lengths))
    got, ended, limit = [0] * len(lengths), [False] * len(lengths), 0
    while plan := scheduler.next_plan():
        seen.sent_back += [(len(seen.rows), i) for i in range(plan.limit, limit) if not ended[i]]
        for piece in plan.pieces:
            seen.prefilled += piece.end - piece.begin
            seen.again += (piece.end - piece.begin) * (got[piece.completion] > 0)
            for i in range(piece.completion, piece.completion + group * piece.first_tokens):
                got[i], ended[i] = 1, lengths[i] == 1
        running = [i for i in range(plan.limit) if not ended[i]]
        for _ in range(plan.steps):
            for i in running:
                got[i], ended[i] = got[i] + 1, got[i] + 1 == lengths[i]
            seen.rows.append(len(running))
            seen.running.append(running)
            seen.used.append(manager.usable - manager.available)
        scheduler.report(got, ended)
        limit = plan.limit
    return seen


def some_prompts(number: int, tokens: int = 64) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(1000) for _ in range(tokens)] for _ in range(number)]


torch.manual_seed(0)
N, BUDGET = pick(96, 512), 16 * -(-(64 + 256 - 1) // 16)  # blocks of 16 tokens
geometric = torch.distributions.Geometric(1 - 0.5 ** (1 / 51)).sample((N,)).long()
skewed = (2 + geometric).clamp(max=256).tolist()
runs = {
    "equal lengths": watch([256] * (N // 4), BUDGET, some_prompts(N // 4)),
    "skewed lengths": watch(skewed, BUDGET, some_prompts(N)),
}
print(f"{BUDGET} blocks; {N} skewed answers, median {sorted(skewed)[N // 2]}, mean {sum(skewed) / N:.0f} tokens")

# %% [markdown]
# Left: {{ N // 4 }} answers of 256 tokens. Right: the {{ N }} skewed ones. **Look for** the height and the tail of the
# right picture, and for how the rows on the left fall while all blocks are in use.

# %% tags=["hide-input"]
# @title Figure: rows that run, blocks in use
fig, axes = plt.subplots(2, 2, figsize=(10, 4.4), sharex="col", sharey="row", layout="constrained")
for (name, seen), (above, below), color in zip(runs.items(), axes.T, (VERMILION, GREEN), strict=True):
    above.fill_between(range(len(seen.rows)), seen.rows, step="mid", color=color, alpha=0.6)
    above.axhline(16, color=BLACK, linestyle=":", label="a static cache: 16")
    above.plot([step for step, _ in seen.sent_back], [1] * len(seen.sent_back), "k|", label="sent back")
    above.set_title(f"{name}: sent back {len(seen.sent_back)} times")
    below.fill_between(range(len(seen.used)), seen.used, step="mid", color=SKY, alpha=0.6)
    below.axhline(BUDGET, color=BLACK, linestyle="--", label="all blocks")
    below.set_xlabel("step")
axes[0, 0].set_ylabel("rows")
axes[1, 0].set_ylabel("blocks in use")
axes[1, 0].set_ylim(0, 1.4 * BUDGET)
for ax in axes[:, 0]:
    ax.legend(loc="upper right")
plt.show()


def static_steps(lengths: list[int], slots: int = 16) -> int:
    """Steps with a static cache: a slot that is free takes the next answer, whose first token comes from its prompt."""
    free_at = [0] * slots
    for length in lengths:
        heapq.heapreplace(free_at, free_at[0] + length - 1)
    return max(free_at)


steps = {name: len(seen.rows) for name, seen in runs.items()}
static = {"equal lengths": static_steps([256] * (N // 4)), "skewed lengths": static_steps(skewed)}
busy = runs["skewed lengths"].rows[: 2 * len(runs["skewed lengths"].rows) // 3]
at_once = sum(busy) / len(busy)
so_far, own = Counter(), 0  # tokens of each answer in the cache: one more at each step that it runs
for running in runs["skewed lengths"].running[: len(busy)]:
    so_far.update(running)
    own += sum(so_far[i] for i in running)
own /= sum(busy)
fit_bet.result(min(HOW_MANY, key=lambda said: abs(int(said.split()[1]) - at_once)))

# %% [markdown]
# On average {{ at_once:.0f }} run at once in the first two thirds of the time, not five times 16. {{ assert 24 <
# at_once < 60 }} Nearly all of the difference is the prompt, which takes 64 places in every row, however short the
# answer. {{ assert abs(own - 16 * BUDGET / 80) < 8 }}
#
# So the skewed answers take {{ steps["skewed lengths"]:, }} steps, against {{ static["skewed lengths"]:, }} with a
# static cache whose 16 slots are refilled. The tail remains, however you cut the memory. {{ assert steps["equal
# lengths"] < static["equal lengths"] and steps["skewed lengths"] < static["skewed lengths"] }} In both pictures too
# many answers are admitted while they're short, and some must be sent back. {{ assert all(seen.sent_back for seen in
# runs.values()) }}
#
# **Explore** the schedule: the budget, how skewed the lengths are (median, of 256), and how many answers share a
# prompt. What does a shared prompt change?

# %% tags=["hide-input"]
# @title Explorer: a schedule


def draw_schedule(ax, budget: int, median: int, group: int) -> None:
    """Rows over steps of 128 answers in room for `budget` of full length."""
    torch.manual_seed(1)
    lengths = 2 + torch.distributions.Geometric(1 - 0.5 ** (1 / median)).sample((128,)).long()
    lengths = lengths.clamp(max=256).tolist()
    seen = watch(lengths, budget * 20, some_prompts(128 // group), group)
    ax.fill_between(range(len(seen.rows)), seen.rows, step="mid", color=GREEN, alpha=0.6)
    ax.axhline(budget, color=BLACK, linestyle=":", label=f"a static cache: {budget}")
    ax.set_title(f"median {median}, {group} a prompt: {len(seen.rows)} steps, {len(seen.sent_back)} sent back")
    ax.set(xlabel="step", ylabel="rows", ylim=(0, 132))
    ax.legend(loc="upper right")


stories = [{"median": 50, "group": 1}, {"median": 200, "group": 1}, {"median": 50, "group": 8}]
explorer(
    draw_schedule,
    static=[{"budget": 16} | story for story in stories],
    budget=(16, 2, 64, 2),
    median=(50, 5, 250, 5),
    group=[1, 2, 4, 8, 16],
)

# %% [markdown]
# ## 3 · Preemption
#
# An answer is admitted before anybody knows how long it will get. So sooner or later a row needs a block and none is
# free. Some answer must give up its blocks: it's **preempted**. It keeps its tokens, loses their keys and values, and
# waits. Once it is admitted again, prompt and tokens are prefilled in one go, not token by token.
#
# Which one? The package sends back the **youngest**, the running answer that came last in the queue. Here are eight
# answers in room for two and a half of full length. **Look for** the first row, and for a row that is interrupted more
# than once.

# %% tags=["hide-input"]
# @title Figure: eight answers in room for two and a half
few = watch([180, 256, 120, 256, 60, 256, 90, 200], 50, some_prompts(8))
fig, ax = plt.subplots(figsize=(9, 2.8))
for step, running in enumerate(few.running):
    ax.bar([step] * len(running), 0.7, width=1.0, bottom=[i - 0.35 for i in running], color=SKY)
for step, i in few.sent_back:
    ax.plot(step, i, marker="x", color=VERMILION, markersize=8, markeredgewidth=2)
ax.set(xlabel="step", ylabel="answer", yticks=range(8), ylim=(7.6, -0.6), title="Blue: runs. Cross: sent back")
plt.show()
total = sum(map(len, some_prompts(8)))
interrupted = sorted({i for _, i in few.sent_back})

# %% [markdown]
# Answer 0 is never interrupted. {{ assert 0 not in interrupted and len(interrupted) > 1 }} The rule never sends the
# oldest back, so every rollout ends: the oldest runs to its end, and then another is the oldest. Other rules look as
# good ("the one that holds most gives most back") but have no such proof; in the exercises you find a request that such
# a rule never finishes. The price is that prompts and tokens are prefilled again. {{ assert few.prefilled > total }}
#
# ## 4 · One prompt, many answers
#
# GRPO samples a group of answers to each prompt. The prompt's keys and values are the same for all of them, so its full
# blocks go into all their tables, and the prompt is prefilled once. The same skewed answers, now eight to a prompt of
# 64 and of 70 tokens:

# %%
for tokens in (64, 70):
    for group in (1, 8):
        seen = watch(skewed, BUDGET, some_prompts(N // group, tokens), group)
        busy = seen.rows[: 2 * len(seen.rows) // 3]
        first = seen.prefilled - seen.again
        print(f"prompt {tokens}, {group} a prompt: {sum(busy) / len(busy):4.1f} rows", end=", ")
        print(f"prefilled {first:6,} tokens once and {seen.again:6,} again")

scheduler = Scheduler(BlockManager(BUDGET + 1, 16), some_prompts(1, 70), 8, 256, 8)
plan = scheduler.next_plan()
print("the first plan copies (from, to):", plan.copies)

# %% [markdown]
# With eight to a prompt, more rows run at once and far fewer tokens are prefilled. {{ assert at_once < sum(busy) /
# len(busy) and seen.prefilled < 0.7 * runs["skewed lengths"].prefilled }}
#
# A prompt of 70 tokens fills four blocks of 16; the fifth holds its last 6 tokens, then each answer's own. So the plan
# **copies** that block, once for each answer but the first. Forget the copy, and seven answers read whatever was in
# their block before. Share the block instead, and eight answers overwrite one another. Neither crashes.
#
# ## 5 · The same plans on a GPU
#
# What does paging save in time? Many skewed answers, eight to a prompt, with the shape of Qwen2.5-0.5B. The unpaged
# engine decodes as many at once as the memory has room for at full length, and refills. The paged one has the same
# memory. vLLM gets the same requests. Then answers of equal length: there paging can only cost.

# %% tags=["hide-input"]
# @title The record
paged = load_record("paged", "NVIDIA H200")
PROMPT, LONGEST = 128, 2048  # tokens of the record's skewed part
PLACE = 24 * 2 * 2 * 64 * 2  # bytes of a token in the cache: layers, keys and values, heads, size of a head, bf16
fits = round(paged["setup"]["budget_gb"] * 1e9 / PLACE / (PROMPT + LONGEST))
of_skewed = {row["variant"]: row for row in paged["results"] if row["lengths"] == "skewed"}
without, with_pages = of_skewed["unpaged"], of_skewed["paged"]

# %% tags=["hide-input"]
# @title Figure: the paged engine beside the unpaged one
equal = {(row["rows"], row["variant"]): row for row in paged["results"] if row["lengths"] == "equal"}
sizes = sorted({rows for rows, _ in equal})
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), width_ratios=(1, 2), layout="constrained")
colors = {"vllm": ORANGE, "unpaged": SKY, "paged": GREEN}
bars = left.bar(["vLLM", "unpaged", "paged"], [of_skewed[name]["tokens_per_s"] for name in colors], 0.6)
for bar, color in zip(bars, colors.values(), strict=True):
    bar.set_color(color)
left.bar_label(bars, fmt="{:,.0f}", padding=2)
left.set(title="Skewed lengths", ylabel="tokens per second", ylim=(0, 1.2 * with_pages["tokens_per_s"]), yticks=[])
for number, (variant, color) in enumerate((("unpaged", SKY), ("paged", GREEN))):
    places = [i + 0.36 * (number - 0.5) for i in range(len(sizes))]
    times = [equal[rows, variant]["ms_per_step"] for rows in sizes]
    bars = right.bar(places, times, 0.34, color=color, label=variant)
    right.bar_label(bars, fmt="%.2f", padding=2, fontsize=9)
right.set_xticks(range(len(sizes)), [f"{rows} rows" for rows in sizes])
right.set(title=f"Equal lengths, {provenance(paged)}", ylabel="ms per step", ylim=(0, 1.15 * max(times)))
right.legend(loc="upper left")
plt.show()
faster = with_pages["tokens_per_s"] / without["tokens_per_s"]
decode_steps = (with_pages["tokens"] - with_pages["rows"]) / with_pages["rows_at_once"]  # first tokens: from prefill
later = [100 * (equal[rows, "paged"]["seconds"] / equal[rows, "unpaged"]["seconds"] - 1) for rows in sizes]
slower = [100 * (equal[rows, "paged"]["ms_per_step"] / equal[rows, "unpaged"]["ms_per_step"] - 1) for rows in sizes]

# %% [markdown]
# **The paged engine's answers are the unpaged one's, log-probs included, to the last bit.** {{ assert not
# any(row.get("differ") for row in paged["results"]) }} A block is one tile of attention, and each token has its own
# random number, so it doesn't matter where in memory a token is.
#
# With skewed lengths it's {{ 100 * (faster - 1):.0f }}% faster. {{ assert 1.05 < faster < 1.2 }} There's little more to
# win: no answer is sent back, and **the longest answer decides**. {{ assert with_pages["sent_back"] == 0 and
# round(decode_steps) == LONGEST - 1 and with_pages["rows_at_once"] < fits }} On the same requests ours makes {{
# with_pages["tokens_per_s"] / of_skewed["vllm"]["tokens_per_s"]:.1f }} times as many tokens per second as vLLM, which
# ran in-process.<br><small>`VLLM_ENABLE_V1_MULTIPROCESSING=0`; this is the paged engine, not the one of lesson 07's
# ladder.</small> {{ assert of_skewed["vllm"]["tokens_per_s"] * 4 < with_pages["tokens_per_s"] }} With equal lengths a
# rollout takes up to {{ max(later):.0f }}% longer. {{ assert max(map(abs, slower)) < 3 and 0 < min(later) and
# max(later) < 3 }}
#
# ## 6 · What an update invalidates
#
# A chat engine finds yesterday's system prompt in its prefix cache, and is right to use it. An engine for RL has new
# weights after every step. Keys and values of a prefix are a function of its tokens **and of the weights**. Let's train
# a few steps and use a prefix from before them.

# %% tags=["hide-input"]
# @title Your bet
STALE = ["an error", "they differ by rounding, about 0.000001", "they differ by 0.01 and more"]
stale_bet = bet("Keys and values of the prompt from before five training steps: what happens to the log-probs?", STALE)

# %%
engine = make_engine(policy, "fast", torch.float32)
torch.manual_seed(0)
rollout = engine.generate(prompts, 4, 40, Sampling())
first_prompt, row = prompts[0], 0
answer = rollout.completion_ids[row][rollout.completion_mask[row]].tolist()


def prefix(model, tokens: list[int]) -> DynamicCache:
    """Keys and values of tokens."""
    cache = DynamicCache(config=model.config)
    model(torch.tensor([tokens]), past_key_values=cache)
    return cache


@torch.no_grad()
def answer_logprobs(model, cache: DynamicCache) -> torch.Tensor:
    """Log-prob of each token of `answer`; the cache holds the prompt but for its last token. Leaves it as it was."""
    logits = model(torch.tensor([first_prompt[-1:] + answer[:-1]]), past_key_values=copy.deepcopy(cache)).logits[0]
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


model = copy.deepcopy(policy.model).eval()
with torch.no_grad():
    old_prefix = prefix(model, first_prompt[:-1])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
texts = policy.texts(rollout.completion_ids, rollout.completion_mask)
asked = [problem for problem in task.problems("train")[:16] for _ in range(4)]
rewards = torch.tensor([float(task.verify(t, p.gold).strict) for t, p in zip(texts, asked, strict=True)])
for _ in range(5):  # REINFORCE with a baseline, on one rollout
    logprobs = token_logprobs(model, rollout, Sampling(), 4096)[0].sum(1)
    (-(rewards - rewards.mean()) * logprobs).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    new_prefix = prefix(model, first_prompt[:-1])
right = answer_logprobs(model, new_prefix)
stale = (answer_logprobs(model, old_prefix) - right).abs()
with torch.no_grad():
    logits = model(torch.tensor([first_prompt + answer])).logits[0, len(first_prompt) - 1 : -1]
    whole = logits.log_softmax(-1)
rounding = (whole.gather(1, torch.tensor(answer)[:, None])[:, 0] - right).abs()
print(f"a prefix of now:    log-probs differ from one pass over all by at most {rounding.max():.1e}")
print(f"a prefix of before: by at most {stale.max():.3f}, on average {stale.mean():.3f}")
stale_bet.result(STALE[2] if stale.max() > 0.01 else STALE[1])

# %% [markdown]
# No error. Every token after such a prefix would be drawn from a mixture of the old and the new model, which is
# neither. {{ assert stale.max() > 1000 * rounding.max() }} In the next step, its importance ratio is off before any
# update, by up to {{ 100 * (stale.max().exp() - 1):.0f }}%. So we tell the manager which weights are in use, and it
# forgets what older ones wrote:

# %%
manager = BlockManager(13, 4)
manager.use_weights(1)
table = manager.allocate(3)
manager.keep(first_prompt[:12], table)
manager.release(table)
again = manager.find(first_prompt, most=3)
print("the same weights: found", again)
manager.release(again)
manager.use_weights(2)
print("after an update:  found", manager.find(first_prompt, most=3), "· available", manager.available)

# %% [markdown]
# An update must also reach the weights that a CUDA graph reads, at the same addresses (lesson 07), and anything made
# from weights, such as a fused or converted copy. An engine that **sleeps** while the trainer uses the memory comes
# back with an empty cache and a new manager.
#
# ## 7 · The same token, two numbers
#
# The sampler processes one token per row, the trainer whole sequences. On paper both compute the same log-prob. In
# floating point they don't: **a sum of floats depends on its order**. Below, 4,096 numbers are added up in 1, 2, 4 and
# 8 pieces. **Look for** the digits that the four sums share, in float32 and in bf16.

# %%
large = torch.tensor(1e8)
print("float32: (1e8 + 1) - 1e8 =", (large + 1 - large).item(), "and (1e8 - 1e8) + 1 =", (large - large + 1).item())
torch.manual_seed(0)
numbers = torch.randn(4096, dtype=torch.float64)


def in_pieces(x: torch.Tensor, pieces: int) -> float:
    """The sum of x: each piece is added up from left to right, then the pieces, in the dtype of x."""
    sums = [torch.zeros((), dtype=x.dtype) for _ in range(pieces)]
    for j, part in enumerate(x.view(pieces, -1)):
        for value in part:
            sums[j] = sums[j] + value
    for other in sums[1:]:
        sums[0] = sums[0] + other
    return sums[0].item()


print(f"exact {numbers.sum():.8f}")
for dtype in (torch.float32, torch.bfloat16):
    found = [in_pieces(numbers.to(dtype), pieces) for pieces in (1, 2, 4, 8)]
    print(f"{str(dtype)[6:]:9} in 1, 2, 4, 8 pieces:", "  ".join(f"{value:.8f}" for value in found))

# %% [markdown]
# In float32 the sums first differ in the fourth decimal; in bf16 the largest and the smallest are {{ max(found) -
# min(found):.1f }} apart. {{ assert max(found) - min(found) > 5 }}
#
# A matrix product is many such sums, over `k`, and a kernel chooses how to cut them. With few rows a library likes to
# **split** `k`, so that more of the GPU has work: two, four or eight sums, added at the end. Inside, each kernel takes
# `k` in **tiles**. Each tile may start a new *accumulator*, which is added to the total at the end, or one accumulator
# may run through all tiles. Here are all three kinds, on the same numbers.

# %% tags=["hide-input"]
# @title Your bet
AGREE = ["none of them", "splits into 2, 4 and 8: powers of two", "tiles of 32, 64 and 128 with one accumulator"]
agree_bet = bet("Which products give the same bits as one another?", AGREE)


# %%
def product(x: torch.Tensor, w: torch.Tensor, tile: int, splits: int = 1, one: bool = True) -> torch.Tensor:
    """x [R, k] times w [k, n] in float32. one: one accumulator runs through all tiles of a split; else each tile starts
    its own, which is added to the split's."""
    chains = []
    for columns in torch.arange(x.shape[1]).chunk(splits):
        chain = torch.zeros(len(x), w.shape[1])
        for tiles in columns.split(tile):
            total = chain if one else torch.zeros_like(chain)
            for k in tiles.tolist():
                total = total + x[:, k, None] * w[k]
            chain = total if one else chain + total
        chains.append(chain)
    return sum(chains[1:], chains[0])


torch.manual_seed(0)
x, w = torch.randn(64, 1024), torch.randn(1024, 64)
WAYS = {f"tiles of {tile}, one accumulator": product(x, w, tile) for tile in (32, 64, 128)}
WAYS |= {f"tiles of {tile}, an accumulator each": product(x, w, tile, one=False) for tile in (32, 64, 128)}
WAYS |= {f"{splits} splits": product(x, w, 64, splits) for splits in (2, 4, 8)}
same = torch.tensor([[(a == b).float().mean() for b in WAYS.values()] for a in WAYS.values()])

# %% tags=["hide-input"]
# @title Figure: share of the results that are equal to the last bit
fig, ax = plt.subplots(figsize=(7, 5.9), layout="constrained")
ax.imshow(same, cmap="Greens", vmin=0, vmax=1.4)
for (i, j), share in [((i, j), same[i, j].item()) for i in range(9) for j in range(9)]:
    ax.text(j, i, f"{100 * share:.0f}", ha="center", va="center", fontsize=8)
ax.set_yticks(range(9), WAYS)
ax.set_xticks(range(9), WAYS, rotation=45, ha="right")
ax.set_title("Two ways of one product: % of results with equal bits")
plt.show()
agree_bet.result(AGREE[2] if same[:3, :3].min() == 1 else AGREE[0])

# %% [markdown]
# **As long as one accumulator runs through all tiles, the size of a tile does not matter.** With an accumulator per
# tile it does. {{ assert same[:3, :3].min() == 1 and same[0, 3:].max() < 0.5 and max(same[3, 4], same[3, 5], same[4,
# 5]) < 0.5 }} One chain over `k`, in order, is the same chain however it is cut into tiles. A fast kernel needs other
# tiles for 16 rows than for 4,096. That's fine, as long as one accumulator runs through and `k` isn't split. (Tiles of
# 128 with an accumulator each *are* 8 splits, since `k` is 1,024.)
#
# Now your processor's own matmul, on the first 1, 2, 3 … rows of one matrix. Row 0 is the same in all calls. Are its
# results?

# %%
ROWS = [1, 2, 3, 4, 5, 8, 16, 17, 64, 128, 257]
torch.manual_seed(0)
x, w = torch.randn(257, 896), torch.randn(896, 64)
library = [((x[:r] @ w)[0] == (x[:1] @ w)[0]).float().mean().item() for r in ROWS]
chain = [torch.equal(product(x[:r], w, 64)[0], product(x[:1], w, 64)[0]) for r in ROWS]
print("rows            ", ROWS)
print("library, % equal", [round(100 * share) for share in library])
print("one chain, equal", chain)
assert all(chain)

# %% [markdown]
# A library chooses its kernel by the shape. On the machine that made this page, row 0 has the same bits as alone in {{
# sum(share == 1 for share in library) }} of {{ len(ROWS) }} calls, and yours may differ. The chain gives the same bits
# in all.
#
# The same goes for norms, the softmax and attention: each needs one order that doesn't depend on the number of rows (He
# and Thinking Machines 2025 call it batch invariance). `rlcourse/exact` has each operation of the model once, with a
# fixed order, and sampler and trainer both call it. **On a Hopper GPU in bf16, with the engine's own kernels, the two
# then agree to the last bit**, for every token; a test asserts it there (`tests/exact/test_bits.py`).
#
# How far apart are they otherwise? Here our engine samples on this CPU, and the trainer computes the same tokens'
# log-probs:

# %%
gaps = {}
for name, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
    torch.manual_seed(0)
    rollout = make_engine(policy, "fast", dtype).generate(prompts, 8, pick(30, 60), Sampling())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=name == "bf16"):
        trained = token_logprobs(policy.model, rollout, Sampling(), 4096)[0]
    mask = rollout.completion_mask
    gaps[name] = (trained - rollout.logprobs) * mask
    gap = gaps[name][mask].abs()
    print(f"{name:8} |log-prob, trainer - sampler|: mean {gap.mean():.1e}, max {gap.max():.1e} nats", end="; ")
    print(f"equal to the last bit: {(gap == 0).float().mean():.1%} of {mask.sum()} tokens")
recorded = {row["variant"]: row for row in load_record("mismatch", "NVIDIA H200")["results"]}

# %% [markdown]
# In bf16 two things differ here: the order, and where numbers are rounded to bf16. On the H200 the **train–inference
# mismatch** of our kernels without a fixed order is {{ recorded["fast"]["mismatch_mean"]:.4f }} nats on average, about
# that of `generate`. {{ assert recorded["fast"]["mismatch_mean"] > 0.001 }}
#
# With bitwise-equal log-probs ("one set of numbers" in the figure), no kernel may choose its order by the number of
# rows. What does that cost against separate kernels ("two")?

# %% tags=["hide-input"]
# @title Figure: one set of numbers, its gap and its price
exact = load_record("exact", "NVIDIA H200")
ONE, TWO = "one set of numbers", "two"
SHAPES = {"embedded": ("embedded model", SKY), "qwen2.5-0.5b": ("Qwen2.5-0.5B's shape", BLUE)}
of = {(row["shape"], row["rows"], row["variant"]): row for row in exact["results"]}
counts = sorted({row["rows"] for row in exact["results"]})


def longer(shape: str, rows: int, what: str = "step_s") -> float:
    """% that one set of numbers takes longer than two."""
    return 100 * (of[shape, rows, ONE][what] / of[shape, rows, TWO][what] - 1)


fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
for number, (shape, (label, color)) in enumerate(SHAPES.items()):
    places = [i + 0.36 * (number - 0.5) for i in range(len(counts))]
    bars = right.bar(places, [longer(shape, rows) for rows in counts], 0.34, color=color, label=label)
    right.bar_label(bars, fmt="%+.0f %%", padding=2, fontsize=9)
    for variant, shade in ((TWO, color), (ONE, VERMILION)):
        places = [i + 0.2 * (2 * number + (variant == ONE) - 1.5) for i in range(len(counts))]
        found = [of[shape, rows, variant]["mismatch_mean"] for rows in counts]
        told = f"{label}, two sets" if variant == TWO else "one set of numbers, both models" if number else None
        bars = left.bar(places, found, 0.19, color=shade, label=told)
        left.bar_label(bars, [f"{nats:.4f}" if nats else "0" for nats in found], padding=2, fontsize=8, color=shade)
left.set(title="Mean gap of sampler and trainer", ylabel="nats", ylim=(0, 0.014))
right.set(title=f"Time of a training step\n{provenance(exact)}", ylabel="one set compared with two, %")
right.set_ylim(-52, 90)
right.axhline(0, color=BLACK, linewidth=0.8)
for ax in (left, right):
    ax.set_xticks(range(len(counts)), [f"{rows} rows" for rows in counts])
    ax.legend(loc="upper right", fontsize=8)
plt.show()

# %% [markdown]
# **With one set the mismatch is exactly 0 in every run.** {{ assert len(of) == 12 and all((row["mismatch_max"] == 0) ==
# (row["variant"] == ONE) for row in exact["results"]) }} With Qwen's shape no price is visible: the rollout takes as
# long as with two sets, and the step is *shorter*. {{ assert all(longer("qwen2.5-0.5b", rows) < -2 for rows in counts)
# and max(abs(longer("qwen2.5-0.5b", rows, "rollout_s")) for rows in counts) < 2.5 }} Bitwise equality isn't the reason:
# the fixed-order trainer also computes each prompt once for its 8 answers and has hardly any padding (lesson 12).
#
# ## 8 · A ratio that isn't 1
#
# Before the first update the policy *is* the one that sampled, so every importance ratio is 1. If the old log-probs are
# the sampler's, the ratio is the exponential of the mismatch. PPO's clip leaves it room: 0.2 on either side. GSPO takes
# one ratio per answer, the exponential of the **mean** mismatch of its tokens, and clips at about 0.0003. Rounding
# errors have signs, and in a mean they should cancel.

# %% tags=["hide-input"]
# @title Your bet
clip_bet = bet(
    "bf16, before any update: what share of the answers has a GSPO ratio outside of 1 ± 0.0003?", (5, 0, 100, 1), "%"
)

# %% tags=["hide-input"]
# @title Figure: the ratio of an answer before the first update
ratio = (gaps["bf16"].sum(1) / mask.sum(1)).exp()
outside = 100 * ((ratio - 1).abs() > 3e-4).float().mean().item()
tokens_outside = ((gaps["bf16"][mask].exp() - 1).abs() > 0.2).sum().item()
fig, ax = plt.subplots(figsize=(7.5, 2.6))
ax.hist((ratio - 1).clamp(-0.01, 0.01), bins=60, color=BLUE)
ax.axvspan(-3e-4, 3e-4, color=ORANGE, alpha=0.4, label="GSPO's clip range")
ax.set(xlabel="ratio of the answer, minus 1 (those beyond ±0.01 stand at the edge)", ylabel="answers")
ax.set_title("bf16, no update yet: all should stand at 0")
ax.set_xticks([-0.01, -0.005, 0, 0.005, 0.01], ["−0.01", "−0.005", "0", "0.005", "0.01"])
ax.legend()
plt.show()
clip_bet.result(round(outside))

# %% [markdown]
# {{ outside:.0f }}%. {{ assert outside > 50 }} They do cancel in part, but what's left is larger than GSPO's clip
# range. PPO's clip doesn't notice: no token is outside its range. {{ assert tokens_outside == 0 }} A trainer that
# recomputes the old log-probs has a ratio of 1 again, at the price of another forward pass. That hides the mismatch
# without removing it: the answers still come from the sampler's policy.
#
# ### Training with the mismatch put back
#
# Does it harm training? On an H200 we trained the embedded model with bitwise-equal log-probs ("one set"), and again
# with transformers' layers in the trainer ("two"), which puts the mismatch back. With several updates per rollout, the
# old log-probs are then the sampler's ("two") or the trainer's ("trainer's own ratio"). With one update, they come from
# the very forward pass that trains, so the ratio is 1 either way. GSPO was also trained in float16, which rounds eight
# times as finely as bf16. **Look for** colours that differ on the right, and whether they also differ on the left.

# %% tags=["hide-input"]
# @title Your bet
back = load_record("gap", "NVIDIA H200")
fall_bet = bet(
    f"{back['setup']['steps']} steps, Dr. GRPO with 1 and 8 updates a rollout, GSPO with 2 and 8: by how many points "
    'does the accuracy fall with the gap put back ("two"), on average over these four?',
    (5, -5, 30, 0.5),
    "points",
)

# %% tags=["hide-input"]
# @title Figure: with one set of numbers, and with the gap put back
OWN = "two, trainer's own ratio"
LOOKS = {"one set": BLUE, OWN: SKY, "two": VERMILION, "two, float16": ORANGE}
right_of, clip_of = {}, {}  # setting: way: % of each seed
for row in back["results"]:
    algorithm, updates, way = row["variant"].split(", ", 2)
    for table, value in ((right_of, row["accuracy_after"]), (clip_of, row["clip_fraction"])):
        table.setdefault(f"{algorithm}, {updates}", {}).setdefault(way, []).append(100 * value)
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
for i, setting in enumerate(right_of):
    for way, found in right_of[setting].items():
        place = i + 0.2 * ([*LOOKS].index(way) - 1.5)
        left.plot([place] * len(found), found, "o", color=LOOKS[way], alpha=0.8)
        left.plot([place - 0.08, place + 0.08], [sum(found) / len(found)] * 2, color=BLACK)
        shares = clip_of[setting][way]
        bar = right.bar(place, sum(shares) / len(shares), 0.19, color=LOOKS[way], label=None if i < 3 else way)
        right.bar_label(bar, fmt="%.1f" if "dr_grpo" in setting else "%.0f", padding=2, fontsize=8)
left.set(title="Each seed, and the mean of three", ylabel="test problems, % right")
left.grid(axis="y")
right.set(title=f"Clipped tokens, {provenance(back)}", ylabel="% of tokens that train, all updates", ylim=(0, 85))
right.legend(loc="upper left", fontsize=8)
for ax in (left, right):
    names = [name.replace("dr_grpo", "Dr. GRPO").replace("gspo", "GSPO").replace(", ", "\n") for name in right_of]
    ax.set_xticks(range(len(right_of)), names)
plt.show()

# %% [markdown]
# Is the left picture more than chance? If the way (the colour) didn't matter, the runs of a setting could swap labels.
# So we shuffle the labels, and count how often the ways' means come out at least as far apart.


# %%
def apart(settings: list[torch.Tensor]) -> float:
    """How far the means of the ways are from each other; a setting is [ways, seeds]."""
    return sum(len(runs) * runs.mean(1).var(correction=0).item() for runs in settings)


def shuffled(settings: list[torch.Tensor]) -> list[torch.Tensor]:
    return [runs.flatten()[torch.randperm(runs.numel())].view_as(runs) for runs in settings]


torch.manual_seed(0)
settings = [torch.tensor(list(ways.values())) for ways in right_of.values()]
by_chance = sum(apart(shuffled(settings)) >= apart(settings) for _ in range(4000)) / 4000
falls = {name: (sum(ways["one set"]) - sum(ways["two"])) / 3 for name, ways in right_of.items()}
fall, seeds_vary = sum(falls.values()) / 4, torch.cat([runs.var(1) for runs in settings]).mean().sqrt().item()
fall_error = seeds_vary * (2 / 3 / 4) ** 0.5  # of a mean of 4 differences between means of 3 seeds
print(f"the gap costs {fall:.1f} points, standard error {fall_error:.1f}")
print(f"labels shuffled, the ways differ as much in {100 * by_chance:.0f}% of the cases")
fall_bet.result(round(fall, 1))

# %% tags=["hide-input"]
# @title Shares of clipped tokens
share = {name: {way: sum(found) / 3 for way, found in ways.items()} for name, ways in clip_of.items()}
g2, g8, wide = share["gspo, 2 updates"], share["gspo, 8 updates"], share["dr_grpo, 8 updates"]
first2, first8 = 2 * (g2["two"] - g2["one set"]), 8 * (g8["two"] - g8["one set"])

# %% [markdown]
# **Accuracy doesn't show the mismatch.** It falls by {{ fall:.1f }} points on average, with a standard error of {{
# fall_error:.1f }}, and with shuffled labels the ways differ as much in {{ 100 * by_chance:.0f }}% of the cases. {{
# assert abs(fall) < 2 * fall_error and by_chance > 0.1 }}
#
# **The clip shows it.** GSPO with 2 updates clips {{ g2["one set"]:.0f }}% of the tokens that train with one set, and
# {{ g2["two"]:.0f }}% with the mismatch. {{ assert abs(g2["one set"] - g2[OWN]) < 2 and g2["one set"] + 3 < g2["two,
# float16"] < g2["two"] - 10 }} The first update of a rollout should clip nothing, since nothing has moved yet. If later
# updates clip equally in both, the whole difference is in the first: there, rounding alone clips {{ first2:.0f }}% of
# these tokens. {{ assert abs(first2 - first8) < 10 and abs(outside / 2 - first2) < 10 }} Dr. GRPO, with a range of 0.2,
# doesn't notice. {{ assert all(abs(other - wide["two"]) < 0.05 for other in wide.values()) }}
#
# So what is bitwise equality good for? **A ratio means what it says**: it's exactly 1 until the policy moves, and the
# sampler's log-probs *are* the old ones, so no pass is needed to compute them. **There's nothing to correct.** And **a
# bug has nowhere to hide**: any nonzero mismatch is a bug, and you see it in the first step.
#
# A mismatch can do harm once it's large. Here's a sampler that gets new weights only every {{ LAG }} steps, without a
# correction ("off") and with truncated importance sampling ("token"), beside one that is always up to date, on the same
# seeds. **Look for** how far the blue lines fall below the others.

# %% tags=["hide-input"]
# @title Figure: a sampler that lags behind
lag = load_curve("sampler_gap")
LINES = {"in step": (BLACK, ":"), "lagging, off": (BLUE, "-"), "lagging, token": (GREEN, "--")}
fig, ax = plt.subplots(figsize=(8, 3.2), layout="constrained")
last = {}
for name, (color, style) in LINES.items():
    of_seeds = [row for row in lag["results"] if row["variant"] == name]
    for number, row in enumerate(of_seeds):
        points = [(e["step"], 100 * e["accuracy"]) for e in row["evals"]]
        ax.plot(*zip(*points, strict=True), color=color, linestyle=style, label=None if number else name)
    late = [e["accuracy"] for row in of_seeds for e in row["evals"][-4:]]
    last[name] = 100 * sum(late) / len(late)
ax.set(xlabel="step", ylabel="validation, % right", title=f"A lag of {LAG} steps, three seeds each, {provenance(lag)}")
ax.grid()
ax.legend()
plt.show()
widest = {n: sorted(r["mismatch_mean"] for r in lag["results"] if r["variant"] == n) for n in LINES}

# %% [markdown]
# The lag costs points, and the correction brings most of them back. {{ assert last["lagging, off"] + 5 < last["lagging,
# token"] }} Without it, the mismatch was more than 20 times that of rounding in bf16. {{ assert widest["lagging,
# off"][0] > 20 * recorded["fast"]["mismatch_mean"] and widest["in step"][-1] < 1e-6 }} So watch `mismatch_mean`, which
# the trainer logs.
#
# ## Check yourself
#
# 1. Blocks of 16 tokens, a prompt of 40, a group of 8. How many blocks hold the prompt once all eight have started?
#
# <details><summary>Answer</summary>
# 2 shared and 8 that are partly filled, one for each: 10. Without sharing it would be 24.
# </details>
#
# 2. Why may the scheduler admit an answer that it couldn't hold at full length?
#
# <details><summary>Answer</summary>
# Most answers end early, and if not, one can be sent back. Every rollout still ends if the oldest answer is never sent
# back and one answer of full length fits.
# </details>
#
# 3. A preempted answer keeps its tokens and loses its keys and values. Could it keep those too?
#
# <details><summary>Answer</summary>
# Yes, in the host's memory (*swapping*). They would have to be copied there and back. Whether that's faster than
# prefilling again depends on model and machine, so measure it.
# </details>
#
# 4. A kernel takes tiles of 64 over `k` for 16 rows and of 128 for 4,096, and one accumulator runs through them. Does
#    a token get two numbers? And if it takes 2 splits for 16 rows?
#
# <details><summary>Answer</summary>
# No: it's one chain in the same order. With 2 splits it's two chains, added at the end, and the bits differ.
# </details>
#
# 5. Sampler and trainer agree to the last bit at step 0. At step 1 the mismatch is 0.05. Where do you look?
#
# <details><summary>Answer</summary>
# At what the update must invalidate: a prefix cache of the old weights, a fused copy that wasn't refreshed, a CUDA
# graph that reads an old address.
# </details>
#
# ## Exercises
#
# [exercises/11_engine_for_rl.ipynb](../exercises/11_engine_for_rl.ipynb): audit a block manager's trace, admit as many
# answers as surely fit, find the request that a scheduler never finishes, and write a probe for operations that depend
# on the number of rows.
#
# ## Further reading
#
# - Kwon et al. 2023, *Efficient Memory Management for Large Language Model Serving with PagedAttention*,
#   arXiv:2309.06180.
# - Yu et al. 2022, *Orca: A Distributed Serving System for Transformer-Based Generative Models*, OSDI.
# - He and Thinking Machines Lab 2025, *Defeating Nondeterminism in LLM Inference*.
# - Yao et al. 2025, *Your Efficient RL Framework Secretly Brings You Off-Policy RL Training*: truncated importance
#   sampling between sampler and trainer.
# - Zheng et al. 2025, *Group Sequence Policy Optimization*, arXiv:2507.18071.
