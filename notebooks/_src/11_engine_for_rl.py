# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# Sections 1 and 2 build an engine for chat. When it samples for RL, three things are new: many answers share a prompt
# (section 3), the weights change after every rollout (4), and the log-probs go into a loss (5 and 6). One of the three
# is a gift, one is a trap, and one is about the last bit of a float. Which is which?
#
# **You will learn**
#
# - to keep the KV cache of many answers in blocks, with a block table written by hand in 25 lines;
# - to read a schedule: who runs when, and who is preempted when the blocks run out;
# - what the answers to one prompt can share, and what an update of the weights does to a cache;
# - why sampler and trainer give the same token different log-probs, and how to make them bitwise equal;
# - what that mismatch does to training.
#
# You need [lesson 07](07_static_cache.ipynb), sections 5 and 7, [lesson 02](02_ppo.ipynb) for the importance ratio,
# [lesson 04](04_dr_grpo.ipynb) for GSPO, and [lesson 05](05_full_loop.ipynb), section 4.

# %%
import copy
import heapq
import random
from dataclasses import dataclass, field

import matplotlib.pyplot as plt
import torch
from transformers import DynamicCache

from rlcourse.course import pick
from rlcourse.course.widgets import bet, explorer
from rlcourse.logprobs import token_logprobs
from rlcourse.measure.plots import BLACK, BLUE, GREEN, ORANGE, SKY, VERMILION
from rlcourse.measure.records import load_record, provenance
from rlcourse.policy import load_policy
from rlcourse.rollout import make_engine
from rlcourse.rollout.blocks import BlockManager
from rlcourse.rollout.scheduler import Scheduler
from rlcourse.sampling import Sampling
from rlcourse.tasks import load_task

policy, task = load_policy("embedded"), load_task("minigsm")
prompts = [policy.prompt(p.question) for p in task.problems("train")[:16]]

# %% [markdown]
# ## 1 · Paging by hand
#
# The static cache of lesson 07 reserves room for the longest answer in every row. Most answers are short, so most of
# that room stays empty, and memory limits how many answers run at once. *Paging* (Kwon et al. 2023) is the operating
# system's way out. Cut the memory into **blocks** of a few tokens. Give an answer a block when it needs one, wherever
# one is free, and let a **block table** remember where its tokens are. That's the whole bookkeeping:


# %%
class Blocks:
    """Which block is in which tables. A block has room for `size` tokens; `holders` counts the tables it is in."""

    def __init__(self, number: int, size: int):
        self.size, self.free, self.holders = size, list(range(number))[::-1], [0] * number
        self.tables: dict[str, list[int]] = {}

    def grow(self, name: str, tokens: int) -> None:
        """Extend a table until it has room for so many tokens."""
        table = self.tables.setdefault(name, [])
        while len(table) * self.size < tokens:
            table.append(self.free.pop())
            self.holders[table[-1]] = 1

    def share(self, name: str, other: str, tokens: int) -> None:
        """Start a table with the blocks of another table that its first `tokens` tokens fill."""
        self.tables[name] = self.tables[other][: tokens // self.size]
        for block in self.tables[name]:
            self.holders[block] += 1

    def drop(self, name: str) -> None:
        """Drop a table. A block that no other table holds is free again."""
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
# The blocks of `a` and `b` are interleaved, which doesn't matter. `c` shares the one block that its prompt of 6 tokens
# **fills**. The prompt's last two tokens are in a block where `a` also writes its own, so `c` gets its own copy of
# them.
#
# Attention reads through the table. Does that change what it computes?

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
# No. Here the entries are gathered first; a kernel reads each block in place.
#
# **Explore** six answers to two prompts of 11 tokens. Each row is a table, and its numbers are blocks. Full colour is a
# token, pale colour is reserved and empty, orange is shared. The dotted line is what a static cache reserves. Try
# blocks of 1 token, and of 16. What does each cost?

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
    ax.set_title(f"step {step}, blocks of {block_tokens}: {held} blocks, {held * block_tokens} places")
    words = f"static cache: {len(LENGTHS)} × {room} = {len(LENGTHS) * room} places"
    ax.text(room - 0.7, -0.75, words, ha="right", va="center", fontsize=9)
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
# Small blocks waste little room but need long tables. Large ones waste more, since each answer's last block is half
# empty on average, and fewer prompts fill one that can be shared. Ours are as large as a tile of our attention kernel,
# so paging doesn't reorder any sum. That will matter in section 5.
#
# Here's a block's whole life. **Look for** the state that our 25 lines don't have yet.

# %% tags=["hide-input"]
# @title Figure: the life of a cache block
STATES = {  # name: (x, y, color)
    "free": (0, 0, "white"),
    "in one table": (4.4, 0, SKY),
    "in several tables": (8.8, 0, ORANGE),
    "in no table, but findable\n(prefix cache)": (4.4, -1.6, "lightgray"),
}
MOVES = [  # from, to, what happens, bend of the arrow, where the words are
    (0, 1, "an answer needs room", -0.25, (2.1, 0.62)),
    (1, 0, "answer ends,\nor is preempted", -0.25, (2.1, -0.12)),
    (1, 2, "another answer to the prompt", -0.25, (6.6, 0.62)),
    (2, 1, "all but one\nhave ended", -0.25, (6.6, -0.12)),
    (1, 3, "answer ends; the block\nis a prompt's, and full", -0.35, (6.15, -0.95)),
    (3, 1, "the same\nprompt again", -0.35, (3.2, -0.85)),
    (3, 0, "room is needed,\nor the weights change", -0.3, (0.4, -1.4)),
]
fig, ax = plt.subplots(figsize=(9.5, 4), layout="constrained")
boxes = []
for name, (x, y, color) in STATES.items():
    frame = {"boxstyle": "round,pad=0.5", "facecolor": color, "edgecolor": BLACK}
    boxes.append(ax.text(x, y, name, ha="center", va="center", bbox=frame, fontsize=12))
for start, end, words, bend, (x, y) in MOVES:
    (x0, y0, _), (x1, y1, _) = [*STATES.values()][start], [*STATES.values()][end]
    style = {"arrowstyle": "->", "connectionstyle": f"arc3,rad={bend}", "patchA": boxes[start].get_bbox_patch()}
    ax.annotate("", (x1, y1), (x0, y0), arrowprops=style | {"patchB": boxes[end].get_bbox_patch(), "color": BLUE})
    ax.text(x, y, words, ha="center", va="center", fontsize=11, color=BLUE)
ax.set(xlim=(-1, 10.4), ylim=(-2.2, 1))
ax.axis("off")
plt.show()

# %% [markdown]
# The gray state is new. A finished prompt's full blocks are kept until their room is needed, in case somebody sends the
# same prompt again. That's a **prefix cache**. Its arrow back to *free* has two causes, and we'll come to the second.
#
# ## 2 · A schedule
#
# The **scheduler** decides who runs. Answers wait in a queue. One is admitted as soon as there are blocks for its
# prompt and first tokens. Each running answer grows by one token per step, and a finished one frees its blocks. What
# does that gain when most answers are short?

# %% tags=["hide-input"]
# @title Your bet
HOW_MANY = ["about 16", "about 20", "about 40", "about 80"]
fit_bet = bet(
    "Room for 16 answers of full length: 256 tokens, and a prompt of 64. The median answer has a fifth of the 256. "
    "How many run at once on average, with paging, while more are waiting?",
    HOW_MANY,
)

# %% [markdown]
# The package's `Scheduler` only makes plans. Here a fake device carries them out: it samples nothing, and counts.


# %% tags=["hide-input"]
# @title `watch`: a scheduler, and a device that only counts
@dataclass
class Seen:
    """Rows that ran at each step, and which; who was sent back, and when; how many tokens were prefilled."""

    rows: list[int] = field(default_factory=list)
    running: list[list[int]] = field(default_factory=list)
    sent_back: list[tuple[int, int]] = field(default_factory=list)
    prefilled: int = 0


def watch(lengths, budget, prompts, group=1, longest=256, manager=None) -> Seen:
    """Run answers of `lengths` tokens, `group` to each prompt, in `budget` blocks of 16 tokens."""
    manager, seen = manager or BlockManager(budget + 1, 16), Seen()
    scheduler = Scheduler(manager, prompts, group, longest, num_slots=len(lengths))
    got, ended, admitted = [0] * len(lengths), [False] * len(lengths), 0
    while plan := scheduler.schedule():
        seen.sent_back += [(len(seen.rows), i) for i in range(plan.admitted, admitted) if not ended[i]]
        for piece in plan.pieces:
            seen.prefilled += piece.end - piece.begin
            for i in range(piece.completion, piece.completion + group * piece.first_tokens):
                got[i], ended[i] = 1, lengths[i] == 1
        running = [i for i in range(plan.admitted) if not ended[i]]
        for _ in range(plan.steps):
            for i in running:
                got[i], ended[i] = got[i] + 1, got[i] + 1 == lengths[i]
            seen.rows.append(len(running))
            seen.running.append(running)
        scheduler.report(got, ended)
        admitted = plan.admitted
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
# **Look for** the height and the tail of the right picture, beside answers of equal length. What are the ticks at the
# bottom?

# %% tags=["hide-input"]
# @title Figure: how many answers run


def static_steps(lengths: list[int], slots: int = 16) -> int:
    """Steps with a static cache: a free slot takes the next answer, whose first token comes from its prompt."""
    free_at = [0] * slots
    for length in lengths:
        heapq.heapreplace(free_at, free_at[0] + length - 1)
    return max(free_at)


steps = {name: len(seen.rows) for name, seen in runs.items()}
static = {"equal lengths": static_steps([256] * (N // 4)), "skewed lengths": static_steps(skewed)}
busy = runs["skewed lengths"].rows[: 2 * len(runs["skewed lengths"].rows) // 3]
at_once = sum(busy) / len(busy)
fit_bet.result(min(HOW_MANY, key=lambda said: abs(int(said.split()[1]) - at_once)))
fig, axes = plt.subplots(1, 2, figsize=(10, 2.8), sharey=True, layout="constrained")
for (name, seen), ax, color in zip(runs.items(), axes, (VERMILION, GREEN), strict=True):
    ax.fill_between(range(len(seen.rows)), seen.rows, step="mid", color=color, alpha=0.6)
    ax.axhline(16, color=BLACK, linestyle=":", label="a static cache: 16")
    ax.plot([step for step, _ in seen.sent_back], [1] * len(seen.sent_back), "k|")
    ax.set(title=f"{name}: {steps[name]:,} steps, static {static[name]:,}", xlabel="step")
axes[0].set_ylabel("answers that run")
axes[0].legend(loc="upper right")
plt.show()

# %% [markdown]
# On average {{ at_once:.0f }} run in the first two thirds of the time, not five times 16. {{ assert 24 < at_once < 60
# }} Why? The memory has room for {{ 16 * BUDGET:,d }} tokens, {{ 16 * BUDGET / at_once:.0f }} per running answer. Of
# these the prompt takes 64, however short the answer. That's still more than twice a static cache's 16. {{ assert
# at_once > 32 }} The tail remains: the longest answers end last. Even equal lengths gain, since a young answer needs
# little room. {{ assert steps["equal lengths"] < static["equal lengths"] and steps["skewed lengths"] < static["skewed
# lengths"] }}
#
# Each tick is an answer that was admitted and then had to go back. {{ assert all(seen.sent_back for seen in
# runs.values()) }} Both runs start with {{ runs["skewed lengths"].rows[0] }} answers of five blocks, and then all of
# them grow.
#
# ### Preemption
#
# Nobody knows an answer's length when it's admitted. Sooner or later a row needs a block and none is free. Then some
# answer is **preempted**: it gives up its blocks, keeps its tokens, and waits. Once it's readmitted, the engine
# prefills its prompt and tokens in one go.
#
# Which one goes? The **youngest**, which came last in the queue. Here are eight answers in room for two and a half of
# full length. **Look for** the first row, and for the row that's interrupted most often.

# %% tags=["hide-input"]
# @title Figure: eight answers in room for two and a half
few = watch([180, 256, 120, 256, 60, 256, 90, 200], 50, some_prompts(8))
fig, ax = plt.subplots(figsize=(9, 2.8))
for step, running in enumerate(few.running):
    ax.bar([step] * len(running), 0.7, width=1.0, bottom=[i - 0.35 for i in running], color=SKY)
for step, i in few.sent_back:
    ax.plot(step, i, marker="x", color=VERMILION, markersize=8, markeredgewidth=2)
ax.set(xlabel="step", ylabel="answer", yticks=range(8), ylim=(7.6, -0.6), title="Blue: runs. Cross: preempted")
plt.show()
total = sum(map(len, some_prompts(8)))
sent_back = [i for _, i in few.sent_back]
interrupted = sorted(set(sent_back))
most = max(interrupted, key=sent_back.count)

# %% [markdown]
# Answer {{ most }} gives way {{ sent_back.count(most) }} times, whenever it's the youngest that still runs. Answer 0 is
# never interrupted, and that's the point. {{ assert 0 not in interrupted and sent_back.count(most) > 2 }} The oldest
# always runs to its end, then another is the oldest, so every rollout ends. "The one that holds most gives most
# back" looks as good, but in the exercises you find an answer that this rule never finishes. The price of preemption is
# the second prefill. {{ assert few.prefilled > total }}
#
# ## 3 · One prompt, many answers
#
# That was the engine for chat. Now the first difference. GRPO samples a group of answers to each prompt, and a prompt's
# keys and values are the same for all of them. So its full blocks go into all their tables, and it's prefilled once:

# %%
scheduler = Scheduler(BlockManager(BUDGET + 1, 16), some_prompts(1, 70), 8, 256, 8)
plan = scheduler.schedule()
print("prefilled tokens:", [(piece.begin, piece.end) for piece in plan.pieces])
print("copies (from, to):", plan.copies)

# %% [markdown]
# A prompt of 70 tokens fills four blocks of 16. The fifth has its last 6 tokens, and each answer wants to write its own
# after them, so the plan **copies** that block for seven of the eight. Forget the copy, and seven answers read whatever
# was there before. Share the block instead, and eight answers overwrite one another. Neither crashes.
#
# **Explore** the schedule: the budget, the median length (of at most 256), and how many answers share a prompt. What
# does a shared prompt change?

# %% tags=["hide-input"]
# @title Explorer: a schedule
drawn = {}


def draw_schedule(ax, budget: int, median: int, group: int) -> None:
    """Rows over steps of 128 answers in room for `budget` of full length."""
    torch.manual_seed(1)
    lengths = 2 + torch.distributions.Geometric(1 - 0.5 ** (1 / median)).sample((128,)).long()
    lengths = lengths.clamp(max=256).tolist()
    seen = drawn[budget, median, group] = watch(lengths, budget * 20, some_prompts(128 // group), group)
    ax.fill_between(range(len(seen.rows)), seen.rows, step="mid", color=GREEN, alpha=0.6)
    ax.axhline(budget, color=BLACK, linestyle=":", label=f"a static cache: {budget}")
    ax.set_title(f"median {median}, {group} per prompt: {len(seen.rows)} steps, {len(seen.sent_back)} preempted")
    ax.set(xlabel="step", ylabel="answers that run", ylim=(0, 132))
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
# With eight answers per prompt all 128 run at once, and none is preempted. {{ assert drawn[16, 50, 8].rows[0] == 128
# and not drawn[16, 50, 8].sent_back }}
#
# ### The same plans on a GPU
#
# What does paging save in time? {{ load_record("paged", "NVIDIA H200")["results"][0]["rows"]:,d }} skewed answers of up
# to {{ load_record("paged", "NVIDIA H200")["setup"]["longest"]:,d }} tokens, eight to a prompt, with the shape of
# Qwen2.5-0.5B. The unpaged engine has room for 256 at full length, and refills.
# The paged one and vLLM get the same memory and requests.

# %% tags=["hide-input"]
# @title Figure: the paged engine beside the unpaged one
paged = load_record("paged", "NVIDIA H200")
of_skewed = {row["variant"]: row for row in paged["results"] if row["lengths"] == "skewed"}
equal = {(row["rows"], row["variant"]): row for row in paged["results"] if row["lengths"] == "equal"}
colors = {"vllm": ORANGE, "unpaged": SKY, "paged": GREEN}
fig, ax = plt.subplots(figsize=(7, 2.2), layout="constrained")
speeds = [of_skewed[name]["tokens_per_s"] for name in colors]
ax.bar_label(ax.barh(["vLLM", "unpaged", "paged"], speeds, 0.6, color=colors.values()), fmt="{:,.0f}", padding=4)
ax.set(title=f"Tokens per second, skewed lengths, {provenance(paged)}", xlim=(0, 1.15 * max(speeds)))
ax.xaxis.set_major_formatter("{x:,.0f}")
ax.invert_yaxis()
plt.show()
faster = of_skewed["paged"]["tokens_per_s"] / of_skewed["unpaged"]["tokens_per_s"]
times_vllm = of_skewed["paged"]["tokens_per_s"] / of_skewed["vllm"]["tokens_per_s"]
paged_steps = (of_skewed["paged"]["tokens"] - of_skewed["paged"]["rows"]) / of_skewed["paged"]["rows_at_once"]
ladder = {(row["variant"], row["rows"]): row["tokens_per_s"] for row in load_record("decode", "NVIDIA H200")["results"]}
best_vllm = max(rate for (name, rows), rate in ladder.items() if name.startswith("vllm") and rows == 256)
later = [100 * (equal[n, "paged"]["seconds"] / equal[n, "unpaged"]["seconds"] - 1) for n in {n for n, _ in equal}]

# %% [markdown]
# Paging makes the rollout {{ 100 * (faster - 1):.0f }}% faster. {{ assert 1.05 < faster < 1.2 }} Why so little? It now
# takes {{ paged_steps:,.0f }} steps, as many as **the longest answer** alone, and no schedule takes fewer. {{ assert
# of_skewed["paged"]["sent_back"] == 0 and abs(paged_steps - paged["setup"]["longest"]) < 2 }} When all answers are
# equally long and all fit, paging costs at most {{ max(later):.0f }}%. {{ assert 0 < min(later) and max(later) < 3 }}
# Either way the answers are the unpaged engine's, log-probs included, to the last bit. {{ assert not
# any(row.get("differ") for row in paged["results"]) }} On these requests ours makes {{ times_vllm:.1f }} times as many
# tokens per second as vLLM. {{ assert times_vllm > 4 }}<br><small>vLLM {{ load_record("paged", "NVIDIA
# H200")["versions"]["vllm"] }} ran as a library, compiled, with CUDA graphs, in the process that measures; by default
# it has a process of its own. In lesson 07's newer ladder, with 256 rows of equal length, it's {{
# ladder["graph-exact-again", 256] / best_vllm:.1f }} times.</small>
#
# ## 4 · What an update invalidates
#
# The second difference. A chat engine finds yesterday's system prompt in its prefix cache, and is right to use it. An
# engine for RL has new weights after every step. Let's sample, train five steps, and then go on from the prompt's keys
# and values of *before* those steps.

# %% tags=["hide-input"]
# @title Your bet
STALE = ["there is an error", "by rounding, about 0.000001", "by about 0.001 nats", "by about 0.1 nats"]
stale_bet = bet(
    "The prompt's keys and values are five training steps old. How far off is a token's log-prob, on average?", STALE
)

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
stale_bet.result(STALE[3] if stale.mean() > 0.01 else STALE[2] if stale.mean() > 3e-5 else STALE[1])
print(f"fresh prefix: log-probs differ from one pass over all tokens by at most {rounding.max():.1e}")
print(f"stale prefix: by at most {stale.max():.3f}, on average {stale.mean():.3f}")

# %% [markdown]
# No error, just wrong numbers. {{ assert stale.max() > 1000 * rounding.max() }} Keys and values are a function of the
# tokens **and of the weights**. Every token after such a prefix is drawn from a mixture of the old and the new model.
# Its importance ratio in the next step is off by up to {{ 100 * (stale.max().exp() - 1):.0f }}% before anything has
# been trained.
#
# That's the second cause of the arrow back to *free*. The package's `BlockManager` is told which weights are in use,
# and forgets what older ones wrote:

# %%
manager = BlockManager(num_blocks=13, block_tokens=4)  # block 0 belongs to nobody: idle slots write there
manager.use_weights(1)
table = manager.allocate(3)
manager.keep(first_prompt[:12], table)  # the full blocks of a prompt can be found again by their tokens
manager.release(table)
again = manager.find(first_prompt, most=3)
print("the same weights: found", again)
manager.release(again)
manager.use_weights(2)
print("after an update:  found", manager.find(first_prompt, most=3), "· available", manager.available)

# %% [markdown]
# An update must also reach the weights that a CUDA graph reads, at the same addresses (lesson 07), and every fused or
# converted copy of them.
#
# ## 5 · The same token, two numbers
#
# The third difference: the log-probs go into a loss. The sampler processes one token per row, the trainer whole
# sequences. On paper both compute the same log-prob. In floating point **a sum depends on its order**. Below, 4,096
# numbers are added up in 1, 2, 4 and 8 pieces. **Look for** the digits that the four sums share.

# %%
torch.manual_seed(0)
numbers = torch.randn(4096, dtype=torch.float64)


def in_pieces(x: torch.Tensor, pieces: int) -> float:
    """The sum of x in its dtype: each piece from left to right, then the pieces' sums."""
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
# In float32 the sums differ from the fourth decimal on; in bf16 the largest and the smallest are {{ max(found) -
# min(found):.1f }} apart. {{ assert max(found) - min(found) > 5 }}
#
# A matmul is many such sums, over `k`, and the kernel chooses how to cut them. With few rows a library likes to
# **split** `k`, so that more of the GPU has work; the splits' sums are added at the end. Within a split the kernel goes
# through `k` in **tiles**. Either each tile starts its own *accumulator*, or one accumulator runs through all tiles.

# %% tags=["hide-input"]
# @title Your bet
AGREE = ["none of them", "splits into 2, 4 and 8: powers of two", "tiles of 32, 64 and 128 with one accumulator"]
agree_bet = bet("Which of these products agree with one another to the last bit?", AGREE)


# %%
def product(x: torch.Tensor, w: torch.Tensor, tile: int, splits: int = 1, one: bool = True) -> torch.Tensor:
    """x [R, k] times w [k, n] in float32. one: one accumulator per split, which runs through all its tiles; else one
    per tile, which is added to the split's."""
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
agree_bet.result(AGREE[2] if same[:3, :3].min() == 1 else AGREE[0])
fig, ax = plt.subplots(figsize=(6.4, 3.9), layout="constrained")
ax.imshow(same, cmap="Greens", vmin=0, vmax=1.4, aspect="auto")
for (i, j), share in [((i, j), same[i, j].item()) for i in range(9) for j in range(9)]:
    ax.text(j, i, f"{100 * share:.0f}", ha="center", va="center", fontsize=8)
ax.set_yticks(range(9), WAYS)
ax.set_xticks(range(9), [32, 64, 128, 32, 64, 128, 2, 4, 8])
for middle, words in ((1, "one accumulator"), (4, "an accumulator each"), (7, "splits")):
    ax.text(middle, 9.8, words, ha="center", va="center", fontsize=9)
for border in (2.5, 5.5):
    ax.axhline(border, color="white", linewidth=4)
    ax.axvline(border, color="white", linewidth=4)
ax.set_title("Two ways to the same product: % of results with equal bits")
plt.show()

# %% [markdown]
# **If one accumulator runs through all tiles, their size doesn't matter**: it's the same chain of additions, however
# you cut it. With an accumulator per tile, it matters. {{ assert same[:3, :3].min() == 1 and same[0, 3:].max() < 0.5
# and max(same[3, 4], same[3, 5], same[4, 5]) < 0.5 and same[5, 8] == 1 }} (Eight splits of 1,024 *are* tiles of 128
# with an accumulator each.) So a fast kernel may choose its tiles by the number of rows, as long as it doesn't split
# `k`.
#
# Now your processor's own matmul, on the first 1, 2, 3, … rows of one matrix. Row 0 is the same in all calls. Are its
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
# A library chooses its kernel by the shape. Here row 0 keeps its bits in {{ sum(share == 1 for share in library) - 1 }}
# of the {{ len(ROWS) - 1 }} larger calls; your machine may differ. The chain never changes.
#
# Norms, softmax and attention have the same problem and the same cure: one order that doesn't depend on the number of
# rows, known as *batch invariance* (He and Thinking Machines 2025). `rlcourse/exact` has each operation of the model
# once, in a fixed order, and sampler and trainer both call it. **On a Hopper GPU in bf16 the two then agree to the last
# bit on every token.**<br><small>`tests/exact/test_bits.py` asserts it there.</small>
#
# How far apart are they otherwise? Our engine samples on this CPU, and the trainer computes the same tokens' log-probs:

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
    print(f"bitwise equal: {(gap == 0).float().mean():.1%} of {mask.sum().item():,} tokens")
recorded = {row["variant"]: row for row in load_record("mismatch", "NVIDIA H200")["results"]}

# %% [markdown]
# This is the **train–inference mismatch**. In bf16 it's the order *and* where numbers are rounded. Without a fixed
# order, our kernels' mismatch averages {{ recorded["fast"]["mismatch_mean"]:.4f }} nats on an H200, about as much as
# that of `generate`. {{ assert 0.67 < recorded["fast"]["mismatch_mean"] / recorded["hf-dynamic"]["mismatch_mean"] < 1.5
# }}
#
# Can we afford bitwise-equal log-probs? A fixed order needs kernels of its own, so we can't vary the order alone. But
# we can swap the trainer's pass: our fixed-order kernels, or transformers' layers, compiled ("separate"). The sampler
# stays. **Look for** the mismatch, then for the price.

# %% tags=["hide-input"]
# @title Figure: bitwise-equal log-probs, their mismatch and their price
exact = load_record("exact", "NVIDIA H200")
EQUAL, APART = "bitwise-equal", "separate"  # kernels of sampler and trainer
SHAPES = {"embedded": ("embedded model", SKY), "qwen2.5-0.5b": ("Qwen2.5-0.5B's shape", BLUE)}
of = {(row["shape"], row["rows"], row["variant"]): row for row in exact["results"]}
counts = sorted({row["rows"] for row in exact["results"]})


def longer(shape: str, rows: int, what: str = "step_s") -> float:
    """% that a step with bitwise-equal kernels takes longer than with separate ones."""
    return 100 * (of[shape, rows, EQUAL][what] / of[shape, rows, APART][what] - 1)


fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
for number, (shape, (label, color)) in enumerate(SHAPES.items()):
    places = [i + 0.36 * (number - 0.5) for i in range(len(counts))]
    apart, equal = ([of[shape, rows, kind]["mismatch_mean"] for rows in counts] for kind in (APART, EQUAL))
    left.bar_label(left.bar(places, apart, 0.34, color=color, label=f"{label}, separate"), fmt="%.4f", padding=2)
    left.plot(places, equal, "D", color=VERMILION, clip_on=False, label="bitwise-equal" if number else None)
    bars = right.bar(places, [longer(shape, rows) for rows in counts], 0.34, color=color, label=label)
    right.bar_label(bars, fmt="%+.0f%%", padding=2)
left.set(title="Mean train–inference mismatch", ylabel="nats", ylim=(0, 0.015))
right.set(title="A training step: bitwise-equal beside separate", ylabel="change of its time, %", ylim=(-35, 5))
right.axhline(0, color=BLACK, linewidth=0.8)
for ax, corner in ((left, "upper right"), (right, "lower left")):
    ax.set_xticks(range(len(counts)), [f"{rows} rows" for rows in counts])
    ax.legend(loc=corner, fontsize=8)
fig.suptitle(provenance(exact), fontsize=9)
plt.show()

# %% [markdown]
# **With bitwise-equal kernels the mismatch is exactly 0 in every run.** {{ assert len(of) == 12 and
# all((row["mismatch_max"] == 0) == (row["variant"] == EQUAL) for row in exact["results"]) }} And the step gets
# *shorter*. {{ assert all(longer(shape, rows) < -2 for shape in SHAPES for rows in counts) }} Equal bits aren't the
# reason: our pass also has fused kernels, computes each prompt once for its 8 answers, and hardly pads (lesson 12).
# Still, a fixed order needn't be slow.
#
# ## 6 · A ratio that isn't 1
#
# Before the first update the policy *is* the one that sampled, so every importance ratio should be 1. With the
# sampler's log-probs as the old ones, it's the exponential of the mismatch instead. PPO's clip has room for that: 0.2
# on either side. GSPO takes one ratio per answer, the exponential of the **mean** mismatch of its tokens, and clips at
# about 0.0003. Rounding errors have either sign, so in a mean some of them cancel.

# %% tags=["hide-input"]
# @title Your bet
clip_bet = bet(
    "bf16, before any update: what share of these answers has a GSPO ratio outside 1 ± 0.0003?", (0, 100, 1), "%"
)

# %% tags=["hide-input"]
# @title Figure: the ratio of an answer before the first update
ratio = (gaps["bf16"].sum(1) / mask.sum(1)).exp()
outside = 100 * ((ratio - 1).abs() > 3e-4).float().mean().item()
tokens_outside = ((gaps["bf16"][mask].exp() - 1).abs() > 0.2).sum().item()
clip_bet.result(round(outside))
fig, ax = plt.subplots(figsize=(7.5, 2.6))
edges = [3e-4 * i for i in range(-33, 34)]  # the two in the middle are GSPO's clip range
_, _, bars = ax.hist((ratio - 1).clamp(edges[0], edges[-1]), bins=edges, color=BLUE)
for bar in bars[32:34]:
    bar.set_color(ORANGE)
ax.set(xlabel="ratio of the answer, minus 1 (beyond ±0.01: drawn at the edge)", ylabel="answers")
ax.set_title("bf16, no update yet: all should be at 0")
ax.set_xticks([-0.01, -0.005, 0, 0.005, 0.01], ["−0.01", "−0.005", "0", "0.005", "0.01"])
ax.legend([bars[32], bars[0]], ["in GSPO's clip range", "outside"])
plt.show()

# %% [markdown]
# {{ outside:.0f }}%. {{ assert outside > 50 }} What's left after cancelling is larger than GSPO's clip range. PPO's
# clip doesn't notice: no token is outside its range. {{ assert tokens_outside == 0 }} A trainer that recomputes the old
# log-probs gets a ratio of 1 again, for one more forward pass. That hides the mismatch without removing it: the answers
# still come from the sampler's policy.
#
# ### Does it hurt?
#
# On an H200 we trained the embedded model with bitwise-equal log-probs, and again with separate kernels, which puts the
# mismatch back. The old log-probs are then the sampler's ("separate") or the trainer's ("separate, recomputed"). With
# one update per rollout, they always come from the very pass that trains, so every ratio is 1. GSPO also ran in
# float16, which rounds eight times as finely as bf16.

# %% tags=["hide-input"]
# @title Your bet
back = load_record("gap", "NVIDIA H200")
fall_bet = bet(
    f"{back['setup']['steps']} steps, Dr. GRPO with 1 and 8 updates per rollout, GSPO with 2 and 8: by how many points "
    "is the accuracy lower with separate kernels, on average over these four? (You win between the lowest and the "
    "highest of three seeds.)",
    (-5, 30, 0.5),
    "points",
)

# %% tags=["hide-input"]
# @title The result
COLORS = {EQUAL: BLUE, "separate, recomputed": SKY, APART: VERMILION, "separate, float16": ORANGE}
right_of, clip_of = {}, {}  # setting: way: % of each seed
for row in back["results"]:
    algorithm, updates, way = row["variant"].split(", ", 2)
    for table, value in ((right_of, row["accuracy_after"]), (clip_of, row["clip_fraction"])):
        table.setdefault(f"{algorithm}, {updates}", {}).setdefault(way, []).append(100 * value)
falls = [(sum(ways[EQUAL]) - sum(ways[APART])) / 3 for ways in right_of.values()]
by_seed = [sum(ways[EQUAL][k] - ways[APART][k] for ways in right_of.values()) / len(falls) for k in range(3)]
fall = sum(falls) / len(falls)
seeds_vary = torch.cat([torch.tensor(list(ways.values())).var(1) for ways in right_of.values()]).mean().sqrt().item()
fall_error = seeds_vary * (2 / 3 / 4) ** 0.5  # of a mean of 4 differences between means of 3 seeds
fall_bet.result(by_seed)

# %% [markdown]
# **Look for** colours that differ on the right, and whether they also differ on the left.

# %% tags=["hide-input"]
# @title Figure: bitwise-equal log-probs, and with the mismatch put back
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
for i, setting in enumerate(right_of):
    for way, found in right_of[setting].items():
        color, place = COLORS[way], i + 0.2 * ([*COLORS].index(way) - 1.5)
        left.plot([place] * len(found), found, "o", color=color, alpha=0.8)
        left.plot([place - 0.08, place + 0.08], [sum(found) / len(found)] * 2, color=BLACK)
        shares = clip_of[setting][way]
        bar = right.bar(place, sum(shares) / len(shares), 0.19, color=color, label=None if i < 3 else way)
        right.bar_label(bar, fmt="%.1f" if "dr_grpo" in setting else "%.0f", padding=2, fontsize=8)
left.set(title="Accuracy: each seed, and the mean of three", ylabel="test problems, % right")
left.grid(axis="y")
right.set(title=f"Clipped tokens, {provenance(back)}", ylabel="% of tokens that train, all updates", ylim=(0, 65))
fig.legend(*right.get_legend_handles_labels(), loc="outside upper center", ncols=4)
for ax in (left, right):
    names = [name.replace("dr_grpo", "Dr. GRPO").replace("gspo", "GSPO").replace(", ", "\n") for name in right_of]
    ax.set_xticks(range(len(right_of)), names)
plt.show()
share = {name: {way: sum(found) / 3 for way, found in ways.items()} for name, ways in clip_of.items()}
g2, g8, wide = share["gspo, 2 updates"], share["gspo, 8 updates"], share["dr_grpo, 8 updates"]
first2, first8 = 2 * (g2[APART] - g2[EQUAL]), 8 * (g8[APART] - g8[EQUAL])

# %% [markdown]
# **Accuracy can't show it here.** The difference is {{ fall:.1f }} points, with a standard error of {{
# fall_error:.1f }}. {{ assert abs(fall) < 2 * fall_error }}
#
# **The clip shows it.** GSPO with 2 updates clips {{ g2[EQUAL]:.0f }}% of the tokens that train with bitwise-equal
# log-probs, and {{ g2[APART]:.0f }}% with separate kernels. {{ assert abs(g2[EQUAL] - g2["separate, recomputed"]) < 2
# and g2[EQUAL] + 3 < g2["separate, float16"] < g2[APART] - 10 }} With equal bits only the second update clips: before
# the first, nothing has moved. If the second clips as much either way, the first must clip about {{ first2:.0f }}% of
# its tokens. Rounding alone can do that: most ratios are outside the range, and a one-sided clip acts on half of them.
# {{ assert abs(first2 - first8) < 10 and abs(outside / 2 - first2) < 10 }} Dr. GRPO, with a range of 0.2, doesn't
# notice. {{ assert all(abs(other - wide[APART]) < 0.05 for other in wide.values()) }}
#
# So what is bitwise equality good for? **A ratio means what it says**: it's exactly 1 until the policy moves. The
# sampler's log-probs *are* the old ones, so no pass is needed to compute them. And **a bug has nowhere to hide**: any
# nonzero mismatch is one, and you see it in the first step. Section 6 of [lesson 15](15_scale_out.ipynb) has a larger
# mismatch: a sampler with old weights. The trainer logs it as `mismatch_mean`.
#
# You now know which is which: the shared prompt is a gift, stale keys and values are a trap, and the log-probs are
# about the last bit.
#
# ## Check yourself
#
# 1. Blocks of 16 tokens, a prompt of 40, a group of 8. How many blocks hold the prompt once all eight have started?
#
# <details><summary>Answer</summary>
# 2 shared, and 8 that are partly filled, one per answer: 10.
# </details>
#
# 2. Why may the scheduler admit an answer that it couldn't hold at full length?
#
# <details><summary>Answer</summary>
# Most answers end early, and if not, one can be sent back. Every rollout still ends if the oldest answer is never sent
# back and one answer of full length fits.
# </details>
#
# 3. A kernel takes tiles of 64 over `k` for 16 rows and of 128 for 4,096, and one accumulator runs through them. Does
#    a token get two numbers? And if it takes 2 splits for 16 rows?
#
# <details><summary>Answer</summary>
# No: it's one chain in the same order. With 2 splits it's two chains, added at the end, and the bits differ.
# </details>
#
# 4. Sampler and trainer agree to the last bit at step 0. At step 1 the mismatch is 0.05. Where do you look?
#
# <details><summary>Answer</summary>
# At what the update must invalidate: a prefix cache from the old weights, a fused copy that wasn't refreshed, a CUDA
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
# - Kwon et al. 2023, *PagedAttention*, arXiv:2309.06180.
# - He and Thinking Machines Lab 2025, *Defeating Nondeterminism in LLM Inference*.
# - Yao et al. 2025, *Your Efficient RL Framework Secretly Brings You Off-Policy RL Training*.
# - Zheng et al. 2025, *Group Sequence Policy Optimization*, arXiv:2507.18071.
