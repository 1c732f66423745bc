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
# - what RL does to a model that is never right, and how often it must be right for RL to start;
# - to write a step of supervised fine-tuning (SFT): which tokens it learns, and how examples share a row without seeing
#   each other;
# - how much SFT a model needs before RL, and how to judge that before RL begins;
# - what a low-rank adapter (LoRA) keeps of an update, what it leaves out, and what `alpha / r` does;
# - whether sampler and trainer still agree if only the sampler merges the adapter.
#
# You need [lesson 01](01_policy_gradient.ipynb) for the loop and [lesson 03](03_grpo.ipynb) for groups.
#
# RL amplifies what the model already does occasionally. What if it never does? Then you show it worked answers first,
# as a *warm start*. How many does it take?
#
# Our base is the embedded model with a bad habit: it was trained until **all** its answers end in words, most of them
# guesses without a calculation. Right or wrong, it earns nothing, because the strict verifier reads only `#### N`.

# %%
import matplotlib.pyplot as plt
import torch

from rlcourse.config import make_config
from rlcourse.course import pick
from rlcourse.course.lessons import lesson13
from rlcourse.course.lessons.curve_records import load_curve
from rlcourse.course.lessons.experiment import Experiment
from rlcourse.course.lessons.lesson13 import (
    DEMONSTRATIONS,
    RL,
    SFT,
    answer_loss,
    examples,
    fine_tune,
    make_base,
    twin,
    worked,
)
from rlcourse.course.widgets import bet
from rlcourse.logprobs import token_logprobs
from rlcourse.lora import add_adapter, linear_layers, merge
from rlcourse.measure.plots import BLACK, BLUE, GREEN, ORANGE, SKY, VERMILION
from rlcourse.measure.records import provenance
from rlcourse.rollout import make_engine
from rlcourse.sampling import Sampling
from rlcourse.sft.data import Example
from rlcourse.sft.packing import pack, plan_rows, summed_loss
from rlcourse.tasks import load_task

task = load_task("minigsm")
base = make_base(pick(3, 40))
problems = task.problems("validation")
torch.manual_seed(0)
rollout = make_engine(base, "fast", torch.float32).generate(
    [base.prompt(p.question) for p in problems[:4]], 1, 80, Sampling()
)
for problem, text in zip(problems, base.texts(rollout.completion_ids, rollout.completion_mask), strict=False):
    print(f"{problem.question}\n  -> {text!r}, right would be {problem.gold}\n")

# %% [markdown]
# ## 1 · RL without one right answer
#
# Let's try RL first: {{ RL["num_prompts"] }} problems per step, {{ RL["num_generations"] }} answers to each, the
# package's version of lesson 01's loop, without a KL term. Does sampling at least make the weights drift a little?

# %%
alone = Experiment(make_config("laptop", **RL, seed=0), twin(base))
before = [p.detach().clone() for p in alone.policy.model.parameters()]
steps = [alone.train()[0] for _ in range(6)]
moved = sum(int((p != b).sum()) for p, b in zip(alone.policy.model.parameters(), before, strict=True))
print("step   reward   groups without signal   gradient norm")
for step, metrics in enumerate(steps):
    print(f"{step:4}{metrics['reward']:9.2f}{metrics['groups_without_signal']:24.0%}{metrics['grad_norm']:16.2f}")
print(f"{moved} of {sum(b.numel() for b in before):,} weights have changed")

# %% [markdown]
# Not one weight has moved. {{ assert moved == 0 }} If all answers in a group get the same reward, every advantage
# $R-\bar R$ is 0, and so is the gradient. There isn't even drift.<br><small>Weight decay would cause some, so it's
# off.</small>
#
# A problem solved with probability $p$ gives a group of $G$ answers a signal with probability
#
# $$ 1 - (1-p)^G - p^G. $$
#
# For small $p$ that's about $Gp$. **Look for** where the curve of $G = 8$ reaches one group per step (dotted), and on
# which side of that point the base is after 1 and 3 steps of SFT (section 2).

# %% tags=["hide-input"]
# @title Figure: when a group has a signal
starts = {k: load_curve(f"lesson13_start_{k}") for k in (0, 1, 3, 10, 80)}


def mean_of(k: int, when: str, what: str) -> float:
    """The mean over seeds of what was measured `between` SFT and RL, or `after` both."""
    found = [row[when][what] for row in starts[k]["results"]]
    return sum(found) / len(found)


p = torch.logspace(-5, 0, 300, dtype=torch.float64).clamp(max=1 - 1e-9)
fig, ax = plt.subplots(figsize=(9.5, 3.2), layout="constrained")
for group, color, style in ((4, SKY, ":"), (8, BLUE, "-"), (64, GREEN, "--")):
    ax.loglog(p, 1 - (1 - p) ** group - p**group, style, color=color, label=f"G = {group}")
ax.axhline(1 / RL["num_prompts"], color=BLACK, linestyle=":", linewidth=1)
ax.text(1.2e-5, 1.15 / RL["num_prompts"], f"one of the {RL['num_prompts']} groups of a step", fontsize=9)
for k in (1, 3):
    rate = mean_of(k, "between", "pass@1")
    ax.axvline(rate, color=VERMILION)
    ax.text(rate, 1.7, f"{k} step{'s' * (k > 1)}", color=VERMILION, ha="center")
ax.set(xlabel="p, the share of right answers", ylabel="share of groups with a signal", ylim=(1e-4, 1.5))
ax.set_title(f"Red: p after so much SFT; three seeds, {provenance(starts[1])}", fontsize=10, pad=18)
ax.legend(loc="lower center")
plt.show()
right_after_one = round(mean_of(1, "between", "pass@1") * 3 * lesson13.SAMPLED * lesson13.SAMPLES)

# %% [markdown]
# One group per step has a signal when about one of its {{ RL["num_prompts"] * RL["num_generations"] }} answers is
# right. After one step of SFT we're far to the left of that, after three to the right. {{ assert mean_of(1, "between",
# "pass@1") < 0.1 / 64 and 2 / 64 < mean_of(3, "between", "pass@1") }}<br><small>A rough estimate: {{ right_after_one
# }} right answer{{ "s" * (right_after_one != 1) }} in {{ 3 * lesson13.SAMPLED * lesson13.SAMPLES:, }} (3 seeds, {{
# lesson13.SAMPLED }} problems, {{ lesson13.SAMPLES }} answers to each). The curves assume equally hard problems;
# exercise 5 doesn't.</small>
#
# More answers help only in proportion. Where one answer in 10,000 is right, ten times as many still leave most steps
# without a signal. Easier problems help, and so does a partial reward, which can be gamed (lesson 05). But the usual
# cure is to show the model how.
#
# ## 2 · A step of SFT
#
# We take {{ DEMONSTRATIONS }} problems with a worked answer each, none of which RL will meet. The loss is next-token
# cross-entropy, as in pretraining, **on the answer's tokens only**. You know its gradient: it's REINFORCE's, with
# somebody else's samples and an advantage of 1. So SFT can teach a model that gets nothing right. But it never tells
# the model that anything is wrong.

# %%
demos = examples(base, DEMONSTRATIONS, 100, worked)
held_out = examples(base, 64, 99, worked)
one = demos[0]
print("not learned:", repr(base.tokenizer.decode(one.ids[~one.learned])))
print("learned:    ", repr(base.tokenizer.decode(one.ids[one.learned])))


def sft_step(model, optimizer, some, everything=False) -> float:
    """One step on some examples, each in its own row. everything: learn the prompts as well."""
    width = max(len(e.ids) for e in some)
    ids = torch.zeros(len(some), width, dtype=torch.long)  # padding is 0, and never learned
    learned = torch.zeros(len(some), width, dtype=torch.bool)
    for row, e in enumerate(some):
        ids[row, : len(e.ids)] = e.ids
        learned[row, : len(e.ids)] = e.learned | everything
    logits = model(ids).logits[:, :-1]  # the output at t - 1 ...
    targets, mask = ids[:, 1:], learned[:, 1:]  # ... predicts the token at t
    loss = torch.nn.functional.cross_entropy(logits[mask], targets[mask])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# %% [markdown]
# Four details matter. **The shift**: the output at $t-1$ predicts the token at $t$. **The mask**, shifted with it.
# **Padding** is in no loss; it's on the right, where causal attention hides it, so it needs no attention mask. And the
# **end token** *is* learned, or the model never stops. Exercise 1 has batches that get these wrong.
#
# Now we train twice from the base, three seeds each: as above, and with the prompts in the loss as well.

# %%
STEPS = pick(2, 8)
curves = {}
for name in ("answers only", "prompts, too"):
    for seed in range(pick(1, 3)):
        policy = twin(base)
        optimizer = torch.optim.AdamW(policy.model.parameters(), lr=SFT["sft_lr"], betas=(0.9, 0.95), weight_decay=0)
        order = torch.randperm(len(demos), generator=torch.Generator().manual_seed(seed)).tolist()
        line = [answer_loss(policy, held_out[:24])]
        for step in range(STEPS):
            some = [demos[order[i % len(demos)]] for i in range(16 * step, 16 * step + 16)]
            sft_step(policy.model, optimizer, some, everything=name == "prompts, too")
            line.append(answer_loss(policy, held_out[:24]))
        curves[name, seed] = line

last = {name: [line[-1] for (n, _), line in curves.items() if n == name] for name in ("answers only", "prompts, too")}

# %% tags=["hide-input"]
# @title Your bet
share = sum(int((~e.learned).sum()) for e in demos) / sum(len(e.ids) for e in demos)
start, reached = curves["answers only", 0][0], sum(last["answers only"]) / len(last["answers only"])
prompt_bet = bet(
    f"{share:.0%} of the tokens are prompts. Learn only answers, and unseen answers cost {reached:.2f} nats per token "
    f"after {STEPS} steps ({start:.2f} before). With the prompts in the loss as well?",
    (0.0, 0.5, 0.01), "nats",
)  # fmt: skip

# %% tags=["hide-input"]
# @title Figure: loss on unseen answers
prompt_bet.result([round(loss, 3) for loss in last["prompts, too"]])
slower = min(last["prompts, too"]) > max(last["answers only"])
fig, ax = plt.subplots(figsize=(7, 3), layout="constrained")
for (name, seed), line in curves.items():
    color, style = (BLUE, "-") if name == "answers only" else (VERMILION, "--")
    ax.plot(line, style, color=color, label=None if seed else name)
ax.set(xlabel="step", ylabel="nats per token", ylim=(0, None), title="Loss on unseen answers, three seeds each")
ax.grid()
ax.legend()
plt.show()
none = answer_loss(base, held_out)
of_prompts = answer_loss(base, [Example(e.ids, ~e.learned & (torch.arange(len(e.ids)) > 0)) for e in held_out])
uniform = torch.tensor(float(base.model.config.vocab_size)).log().item()
of_the_loss = share * of_prompts / (share * of_prompts + (1 - share) * none)

# %% [markdown]
# With prompts in the loss, the answers are learned more slowly. {{ assert slower }} They even get worse for a while: by
# the fourth step their loss is above the base's. {{ assert all(line[1] < line[0] < line[min(4, STEPS)] for (name, _),
# line in curves.items() if name == "prompts, too") }} Why? At the start an answer token costs {{ none:.2f }} nats and a
# prompt token {{ of_prompts:.1f }}, more than a uniform guess would ({{ uniform:.1f }}): this model has never learned
# to write a question. {{ assert of_prompts > max(3 * none, uniform) }} So {{ 100 * of_the_loss:.0f }}% of the loss is
# prompts. {{ assert of_the_loss > 0.9 }} Clipping and Adam make a step about equally long whatever it learns, so
# little of it is left for the answers. A base pretrained on text knows how questions read: its prompts weigh less in
# the loss.<br><small>With long prompts, short answers and few examples, prompts in the loss can even serve as
# a regulariser (Shi et al. 2024).</small>
#
# Blue hardly falls after step 4, where the 64 demonstrations start over. Remember that. {{ assert DEMONSTRATIONS == 64
# and sum(line[min(4, STEPS)] - line[-1] for (name, _), line in curves.items() if name == "answers only") < 0.06 }}
#
# ## 3 · One row, several examples
#
# Padding is computed and thrown away, so we pack several examples into a row. None of them may notice: a token may see
# only earlier tokens of **its own** example. Here are three ways to call the model on a row of two examples:
#
# | | positions | mask |
# | --- | --- | --- |
# | one text | 0, 1, 2, … through the row | none given |
# | positions restart | from 0 in each example | none given |
# | masked by hand | 0, 1, 2, … through the row | each example sees only itself |

# %% tags=["hide-input"]
# @title Your bet
LEAKS = ["only one text", "one text and positions restart", "one text and masked by hand", "all three"]
leak_bet = bet("In which of these rows does the second example get different log-probs than alone?", LEAKS)

# %%
first, second = demos[1], demos[2]
ids = torch.cat([first.ids, second.ids]).long()[None]
n, m = len(first.ids), len(second.ids)
running = torch.arange(n + m)[None]
restarting = torch.cat([torch.arange(n), torch.arange(m)])[None]
block = torch.ones(n + m, n + m, dtype=torch.bool).tril()
block[n:, :n] = False
additive = torch.zeros(1, 1, n + m, n + m).masked_fill(~block, float("-inf"))
WAYS = {
    "one text": {"position_ids": running},
    "positions restart": {"position_ids": restarting},
    "masked by hand": {"position_ids": running, "attention_mask": additive},
}


@torch.no_grad()
def of_second(**how) -> torch.Tensor:
    """log-probs of the second example's tokens, all but the first: [m - 1]."""
    logits = base.model(ids, use_cache=False, **how).logits[0, n:-1]
    return logits.log_softmax(-1).gather(1, ids[0, n + 1 :, None])[:, 0]


with torch.no_grad():
    logits = base.model(second.ids.long()[None]).logits[0, :-1]
    alone_logprobs = logits.log_softmax(-1).gather(1, second.ids[1:, None].long())[:, 0]
leaks = {name: of_second(**how) - alone_logprobs for name, how in WAYS.items()}
changed = [name for name, leak in leaks.items() if leak.abs().max() > 1e-3]
leak_bet.result({1: "only one text", 3: "all three"}.get(len(changed), " and ".join(changed)))
answer_from = int((~second.learned).sum()) - 1  # the first learned token; the example's first token has no log-prob
print("log-probs of the second answer's tokens in the packed row, minus those alone, in nats:")
for name, leak in leaks.items():
    of_answer = leak[answer_from:]
    print(f"{name:20} mean {of_answer.mean():+.1e}, mean size {of_answer.abs().mean():.1e}")

# %% tags=["hide-input"]
# @title Figure: the leak, token by token
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), width_ratios=(1, 2), layout="constrained")
left.imshow(block.float() + 0.45 * torch.ones(n + m, n + m).tril(), cmap="Blues", vmin=0, vmax=2.2)
for x, y, words, color in (
    (n / 3, 2 * n / 3, "first", "white"),
    (n + m / 3, n + 2 * m / 3, "second", "white"),
    (n / 2, n + m / 2, "the leak", BLACK),
):
    left.text(x, y, words, color=color, ha="center", va="center")
left.set(title="One text: what each token sees", xlabel="token that is seen", ylabel="token that looks")
right.plot(leaks["one text"], "o-", color=VERMILION, label="one text")
right.plot(leaks["positions restart"], "-", color=BLUE, label="positions restart")
right.axvspan(answer_from - 0.5, m - 1.5, color=ORANGE, alpha=0.15, label="the answer")
right.set(xlabel="token of the second example", ylabel="log-prob in the row minus alone, nats")
right.set_title("What it does to the second example")
right.legend(fontsize=8)
plt.show()
leak_answer = (-leaks["one text"][answer_from:]).mean().item()

# %% [markdown]
# Only *one text* leaks. {{ assert leaks["one text"][answer_from:].abs().mean() > 1000 * leaks["positions
# restart"][answer_from:].abs().mean() and leak_answer > 0 and changed == ["one text"] }} There the second
# example follows a stranger's question and answer, and its own answer costs {{ leak_answer:.2f }} nats more per token.
# Nothing crashes, and the loss alone doesn't show it.
#
# **Why may positions run on?** Rotary positions turn queries and keys by angles in proportion to their positions, so
# only the *difference* of two positions counts. With a mask by hand they may begin anywhere. **And why is it enough to
# restart them?** transformers, given positions and no mask, infers where examples begin from the places where positions
# restart, and masks there. Not every architecture does, and learned positions aren't differences. So the package tests
# two short examples on the model before it trains (`check_packing`).
#
# How much does packing save?

# %%
rows = plan_rows(demos, 256)
packed, tokens = pack(rows, base.pad_id, base.device), sum(len(e.ids) for e in demos)
padded = len(demos) * max(len(e.ids) for e in demos)
print(f"{len(demos)} examples with {tokens:,} tokens")
print(f"one in each row: {padded:,} places; packed in {len(rows)} rows: {packed.ids.numel():,}")

# %% [markdown]
# With one row per example, {{ 100 * (padded / tokens - 1):.0f }}% more places are computed than there are tokens;
# packed, {{ 100 * (packed.ids.numel() / tokens - 1):.0f }}% more.
#
# ## 4 · How much is enough?
#
# Now the warm start. We recorded 0, 1, 3, 10 and 80 steps of SFT, three seeds each, then {{ RL["steps"] }} steps of RL.
# Each step of SFT draws {{ SFT["sft_rows"] }} of the {{ DEMONSTRATIONS }} demonstrations at random.

# %% tags=["hide-input"]
# @title Your bet
ENOUGH = ["1 step", "3 steps", "10 steps", "80 steps"]
enough_bet = bet("After how much SFT is greedy accuracy highest, once RL is done? (Mean of three seeds.)", ENOUGH)

# %% [markdown]
# Left, before RL; dots are seeds. pass@1: a single sample is right. pass@16: at least one of 16 is, so RL has something
# to choose from. **Look for** where the green room between it and pass@1 is widest. Right, RL from there: thin lines
# are seeds. {{ assert not any(e["accuracy"] for k in (0, 1) for row in starts[k]["results"] for e in row["evals"]) }}

# %% tags=["hide-input"]
# @title Figure: what SFT leaves for RL
KS = list(starts)
SHADES = dict(zip(KS, (BLACK, ORANGE, GREEN, BLUE, VERMILION), strict=True))
final = {k: mean_of(k, "after", "accuracy") for k in KS}
best = max(final, key=final.get)
enough_bet.result(f"{best} step{'s' * (best > 1)}")
fig, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.6), layout="constrained")
found = {what: [100 * mean_of(k, "between", what) for k in KS] for what in ("pass@16", "accuracy", "pass@1")}
for (what, means), color in zip(found.items(), (GREEN, BLACK, BLUE), strict=True):
    left.plot(range(len(KS)), means, "o-", color=color)
    left.text(len(KS) - 0.85, means[-1], what.replace("accuracy", "greedy"), color=color, va="center")
    for seed in range(3):
        of_seed = [100 * starts[k]["results"][seed]["between"][what] for k in KS]
        left.plot(range(len(KS)), of_seed, ".", color=color, alpha=0.4)
left.fill_between(range(len(KS)), found["pass@1"], found["pass@16"], color=GREEN, alpha=0.12)
left.set_xticks(range(len(KS)), KS)
left.set(xlabel="steps of SFT", ylabel="validation, % right", title="before RL", xlim=(-0.2, 5), ylim=(0, 80))
for k in KS[1:]:  # 0 is like 1: nothing is ever right
    at = [e["step"] for e in starts[k]["results"][0]["evals"]]
    seeds = [[100 * e["accuracy"] for e in row["evals"]] for row in starts[k]["results"]]
    for of_seed in seeds:
        right.plot(at, of_seed, color=SHADES[k], linewidth=1, alpha=0.4)
    means = [sum(column) / len(column) for column in zip(*seeds, strict=True)]
    right.plot(at, means, color=SHADES[k], linewidth=3)
    told = "0 or 1 step" if k == 1 else f"{k} steps"
    right.text(at[-1] + 0.5, means[-1], told, color=SHADES[k], va="center")
right.set(xlabel="steps of RL", ylabel="validation, % right, greedy", title=f"then RL, {provenance(starts[0])}")
right.set(xlim=(-0.5, at[-1] * 1.25), ylim=(-2, 52), xticks=at)
right.grid()
plt.show()
silent = {k: sum(sum(r["steps"]["groups_without_signal"]) for r in starts[k]["results"]) / 3 / RL["steps"] for k in KS}
room = {k: 100 * (mean_of(k, "between", "pass@16") - mean_of(k, "between", "pass@1")) for k in KS}
signals = [sum(share < 1 for share in row["steps"]["groups_without_signal"]) for row in starts[1]["results"]]

# %% [markdown]
# **RL alone learns nothing**, in any seed, and **one step** of SFT isn't enough either: no greedy answer is right after
# RL. {{ assert final[0] == final[1] == 0 and 0 < min(signals) == max(signals) }} **Three steps** reach {{ 100 *
# mean_of(3, "between", "accuracy"):.0f }}%, and RL raises that to {{ 100 * final[3]:.0f }}%. {{ assert final[3] > 2 *
# mean_of(3, "between", "accuracy") }} **Ten steps** reach {{ 100 * mean_of(10, "between", "accuracy"):.0f }}%, and RL
# adds {{ 100 * (final[10] - mean_of(10, "between", "accuracy")):.0f }} points: in each seed they end above three steps.
# {{ assert final[10] > mean_of(10, "between", "accuracy") and all(a["after"]["accuracy"] > b["after"]["accuracy"] for
# a, b in zip(starts[10]["results"], starts[3]["results"], strict=True)) }}
#
# **Eighty steps look as good as ten, and aren't.** Greedy accuracy is about the same, and single samples do even
# better. {{ assert mean_of(80, "between", "pass@1") > mean_of(10, "between", "pass@1") and abs(mean_of(80, "between",
# "accuracy") - mean_of(10, "between", "accuracy")) < 0.03 }} But pass@16 is down in each seed, and the loss on unseen
# answers is up in each, on average from {{ mean_of(10, "between", "held_out"):.3f }} to {{ mean_of(80, "between",
# "held_out"):.3f }}. {{ assert all(a["between"]["held_out"] > b["between"]["held_out"] and a["between"]["pass@16"] <
# b["between"]["pass@16"] for a, b in zip(starts[80]["results"], starts[10]["results"], strict=True)) }} RL then has
# little to choose from: {{ 100 * silent[80]:.0f }}% of the groups have no signal, and accuracy *falls* in each seed, to
# {{ 100 * final[80]:.0f }}% on average. {{ assert all(row["after"]["accuracy"] < row["between"]["accuracy"] for row in
# starts[80]["results"]) }}
#
# Did the steps do the harm, or the repetition? 80 steps show each demonstration {{ 80 * SFT["sft_rows"] /
# DEMONSTRATIONS:.0f }} times. Here are 80 steps of the same size on {{ f"{80 * SFT['sft_rows']:,}" }} demonstrations,
# each seen once on average:

# %%
FRESH = pick(2, 80)
shown, fresh_losses = SFT["sft_rows"] * FRESH, []
for seed in range(pick(1, 3)):
    fresh = twin(base)
    fine_tune(fresh, examples(base, shown, 101 + seed, worked), FRESH, SFT["sft_rows"], SFT["sft_lr"], seed)
    fresh_losses.append(answer_loss(fresh, held_out))
fresh_loss, repeated = sum(fresh_losses) / len(fresh_losses), mean_of(80, "between", "held_out")
print("steps   demonstrations   loss on unseen answers")
print(f"   10{DEMONSTRATIONS:17,}{mean_of(10, 'between', 'held_out'):25.3f} (recorded, three seeds)")
print(f"   80{DEMONSTRATIONS:17,}{repeated:25.3f} (recorded, three seeds)")
print(f"{FRESH:5}{shown:17,}{fresh_loss:25.3f} (here, {len(fresh_losses)} seeds)")

# %% [markdown]
# **It's the repetition**, as the blue curve hinted. With fresh demonstrations, 80 steps give by far the lowest loss, in
# each seed. {{ assert max(fresh_losses) < 0.5 * mean_of(10, "between", "held_out") < repeated }} "Stop early" is advice
# for small data sets.
#
# **So how do you judge a warm start?** Greedy accuracy can't tell eighty steps from ten. Look at the **room** between
# pass@1 and pass@16: what the model can do but rarely does. It's {{ room[3]:.0f }}, {{ room[10]:.0f }} and {{
# room[80]:.0f }} points after 3, 10 and 80 steps. In these three cases the order of the rooms is the order of the
# results. Three points are a hint, not a law. {{ assert sorted(KS, key=room.get)[2:] == sorted(KS, key=final.get)[2:]
# == [80, 3, 10] and max(room[0], room[1]) < 1.5 }}
#
# ## 5 · Is an update of low rank?
#
# Fine-tuning changes a matrix $W$ to $W + \Delta W$. LoRA (Hu et al. 2021) bets that $\Delta W$ nearly has **low
# rank**: it's the product of a tall matrix and a wide one. Is it? We take ten steps of SFT on all weights and look at
# the singular values of the change:

# %%
LINEAR = linear_layers(base.model)
full = twin(base)
lesson13.fine_tune(full, demos, pick(2, 10), SFT["sft_rows"], SFT["sft_lr"], seed=0)
old, new = base.model.state_dict(), full.model.state_dict()
changes = {k: new[k] - old[k] for k in new if k.endswith("weight") and k.split(".")[-2] in LINEAR}
others = [k for k in new if k not in changes and k != "lm_head.weight"]
spectra = {k: torch.linalg.svdvals(change) for k, change in changes.items()}
parts = {k: torch.linalg.svd(change, full_matrices=False) for k, change in changes.items()}


def truncated(rank: int, with_others: bool, known=held_out) -> float:
    """Loss of the base with all changes cut to a rank; with the changes of embedding, norms and biases, or without."""
    policy = twin(base)
    state = policy.model.state_dict()
    with torch.no_grad():
        for k, (u, s, v) in parts.items():
            state[k] += (u[:, :rank] * s[:rank]) @ v[:rank]
        for k in others if with_others else ():
            state[k].copy_(new[k])
    return answer_loss(policy, known)


# %% tags=["hide-input"]
# @title Your bet
FEW_OR_MANY = {1: "1", 4: "2 to 4", 16: "8 to 16", 128: "32 or more"}  # the highest rank of each choice
rank_bet = bet(
    "The matrices are 128 wide. Cut their changes to a rank, and keep those of embedding, norms and biases. "
    "Which rank keeps nine tenths of the gain in held-out loss?",
    list(FEW_OR_MANY.values()),
)

# %% tags=["hide-input"]
# @title Figure: singular values, and the loss that a rank keeps
RANKS = [0, 1, 2, 4, 8, 16, 32, 64, 128]
kept = {which: [truncated(rank, which) for rank in RANKS] for which in (True, False)}
whole = kept[True][-1]
enough, enough_alone = (
    next((rank for rank, loss in zip(RANKS, kept[which], strict=True) if none - loss >= 0.9 * (none - whole)), 128)
    for which in (True, False)
)
rank_bet.result(next(words for highest, words in FEW_OR_MANY.items() if enough <= highest))
fig, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.6), layout="constrained")
chance = torch.Generator().manual_seed(0)
noise = {k: torch.linalg.svdvals(torch.randn(change.shape, generator=chance)) for k, change in changes.items()}
for name, color in (("q_proj", BLUE), ("gate_proj", ORANGE)):
    for k in (k for k in spectra if name in k):
        told = ".0." in k  # the legend has the first layer's
        for s, style, label in ((spectra[k], "-", f"{name}, 4 layers"), (noise[k], ":", f"random, as {name}")):
            left.semilogy(range(1, len(s) + 1), s / s[0], style, color=color, label=label if told else None)
left.set(xlabel="singular value, from the largest", ylabel="size, largest = 1", ylim=(1e-3, 1.5))
left.set_title("The change that ten steps made")
left.legend(fontsize=8)
for which, color, style, label in (
    (True, BLUE, "o-", "with embedding, norms, biases"),
    (False, VERMILION, "s--", "linear layers alone"),
):
    right.plot(range(len(RANKS)), kept[which], style, color=color, label=label)
right.axhline(answer_loss(full, held_out), color=BLACK, linestyle=":", label="the whole update")
right.set_xticks(range(len(RANKS)), RANKS)
right.set(xlabel="rank", ylabel="held-out loss", title="The update, cut to a rank")
right.legend(fontsize=8)
plt.show()
least = RANKS[kept[True].index(min(kept[True]))]
of_demos = [truncated(rank, True, demos) for rank in (least, 128)]


def energy(of: dict) -> float:
    """The eight largest singular values' share of the sum of squares, over all matrices."""
    return sum(float((s[:8] ** 2).sum()) for s in of.values()) / sum(float((s**2).sum()) for s in of.values())


print(f"the 8 largest singular values' share of the sum of squares: {energy(spectra):.0%}, random {energy(noise):.0%}")
for rank, of_known in zip((least, 128), of_demos, strict=True):
    unseen = kept[True][RANKS.index(rank)]
    print(f"rank {rank:3}: loss {unseen:.3f} on unseen answers, {of_known:.3f} on the demonstrations")

# %% [markdown]
# Rank {{ enough }}! {{ assert enough < enough_alone <= 4 }} With the linear layers alone it takes rank {{ enough_alone
# }}. The picture on the left would have misled you: unlike random matrices (dotted), the changes do have a few large
# singular values, but the eight largest make up only {{ 100 * energy(spectra):.0f }}% of the sum of squares.
# {{ assert energy(noise) < 0.5 * energy(spectra) < 0.45 }} Only a loss tells you what you can drop.
#
# Rank {{ least }} even does **better** than the whole update on unseen answers, and worse on the demonstrations
# themselves. {{ assert min(kept[True][:7]) < whole - 0.005 and of_demos[0] > of_demos[1] }} So the long tail mostly
# fits the demonstrations.
#
# **What LoRA leaves out** is more than the tail. Embedding (here also the output head), norms and biases get no
# adapter. Here you don't miss them, but a model that has to learn new tokens would. {{ assert kept[False][-1] < whole +
# 0.005 }} And cutting a finished update isn't training an adapter, which finds its directions as it learns.
#
# ## 6 · `A`, `B` and `alpha / r`
#
# An adapter of rank $r$ turns a layer `W x` into `W x + (alpha / r) B A x`:

# %% tags=["hide-input"]
# @title Figure: an adapter
SHAPES = (  # text, left, bottom, width, height, color: all in units of the layer's width
    ("W\nfrozen", 0, 0, 1, 1, "lightgray"),
    ("B\nzero", 1.9, 0, 0.2, 1, SKY),
    ("A, random", 2.2, 0.8, 1, 0.2, ORANGE),
)
fig, ax = plt.subplots(figsize=(6, 2), layout="constrained")
for text, x, y, width, height, color in SHAPES:
    ax.add_patch(plt.Rectangle((x, y), width, height, facecolor=color, edgecolor=BLACK))
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9)
ax.text(1.45, 0.5, r"$+\;\frac{\alpha}{r}\;\cdot$", ha="center", va="center", fontsize=15)
for text, x, y in (("in", 0.5, -0.13), ("out", -0.15, 0.5), ("r", 2.0, -0.13), ("r", 3.28, 0.9), ("in", 2.7, 0.66)):
    ax.text(x, y, text, ha="center", va="center", style="italic")
ax.set(xlim=(-0.4, 3.6), ylim=(-0.25, 1.05), aspect="equal")
ax.axis("off")
plt.show()

# %% [markdown]
# Since `B` is zero, training begins exactly at the base. If both were zero, neither would move: the gradient of
# each is a product with the other. And `alpha / r`? Without it, every added direction makes each step larger. Here's
# one step of Adam, at four ranks and a learning rate of 0.001:


# %%
def first_step(rank: int, alpha: float = 32.0) -> float:
    """By how much one step on all demonstrations changes their loss."""
    policy = twin(base)
    torch.manual_seed(0)
    add_adapter(policy.model, "embedded", rank, alpha, "all-linear")
    learning = [p for p in policy.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-3, weight_decay=0)
    loss = summed_loss(policy.model, packed, 4096) / packed.learned.sum()
    loss.backward()
    optimizer.step()
    return answer_loss(policy, demos) - loss.item()


print("rank   scale alpha / r, change of the loss   scale 1, change of the loss")
for rank in (1, 4, 16, 64):
    print(f"{rank:4}{first_step(rank):38.4f}{first_step(rank, alpha=rank):30.4f}")

# %% [markdown]
# With `alpha / r` the first step is about equally large at every rank, which is why a learning rate tends to carry
# over. Without it, each rank would need its own.<br><small>For very large ranks rsLoRA divides by $\sqrt r$ instead
# (Kalajdzievski 2023, arXiv:2312.03732).</small> Our rule of thumb below: alpha 32, and ten times the
# learning rate of full fine-tuning.
#
# **Sampler and trainer.** The trainer keeps `A` and `B` apart, since it needs their gradients. The engine wants plain
# matrices, so before each rollout it merges: it computes `W + (alpha / r) B A` in float32 and rounds once (exercise 4).
# Do the two still agree?

# %%
adapted = twin(base)
torch.manual_seed(0)
add_adapter(adapted.model, "embedded", 8, 32.0, "all-linear")
learning = [p for p in adapted.model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(learning, lr=5e-3, weight_decay=0)
for step in range(pick(2, 8)):
    sft_step(adapted.model, optimizer, demos[16 * (step % 4) :][:16])
merged = twin(adapted)
merge(merged.model)
prompts = [base.prompt(p.question) for p in problems[:16]]
torch.manual_seed(0)
rollout = make_engine(adapted, "fast", torch.float32).generate(prompts, 4, 60, Sampling())
scored = {"sampler": rollout.logprobs}
for name, policy in (("unmerged", adapted), ("merged", merged)):
    for dtype in ("float32", "bf16"):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            scored[f"{name} {dtype}"] = token_logprobs(policy.model, rollout, Sampling(), 4096)[0]


def gap(a: str, b: str) -> float:
    """Mean |difference| of the log-probs of the same tokens, in nats."""
    return (scored[a] - scored[b])[rollout.completion_mask].abs().mean().item()


print(f"float32   sampler against unmerged: {gap('sampler', 'unmerged float32'):.1e} nats")
for dtype in ("float32", "bf16"):
    print(f"{dtype:9} merged against unmerged: {gap(f'merged {dtype}', f'unmerged {dtype}'):.1e} nats")
for name in ("unmerged", "merged"):
    print(f"{name:9} bf16 against float32:    {gap(f'{name} bf16', f'{name} float32'):.1e} nats")
by_merging = gap("merged bf16", "unmerged bf16")
by_bf16 = {name: gap(f"{name} bf16", f"{name} float32") for name in ("unmerged", "merged")}

# %% [markdown]
# In float32 they agree, up to rounding. {{ assert gap("merged float32", "unmerged float32") < 1e-5 and gap("sampler",
# "unmerged float32") < 1e-5 }} In bf16, merged and unmerged differ, but that's different rounding, not more of it:
# merged bf16 is no further from float32 than unmerged. {{ assert by_bf16["merged"] < 1.25 * by_bf16["unmerged"] and 0.5
# < by_merging / by_bf16["unmerged"] < 2 }}
#
# What does harm is to **round the merged weights and go on training from there**: an update smaller than half the
# distance to the next bf16 number is then lost for good, every time. So `W` stays in float32 and is never overwritten.
# And an engine that forgets to merge again after an update samples from the old policy. Then lesson 11's
# `mismatch_mean` rises.
#
# ## 7 · Equal seconds
#
# What does an adapter buy? Memory: only the adapter needs a gradient and Adam's two moments, which can decide whether a
# 7B model fits on a GPU. It hardly makes a step faster. You save the gradients of `W`, about half of the
# backward pass, but the forward pass and the whole rollout remain.
#
# The recorded runs start from three steps of SFT on all weights, then do RL for {{
# load_curve("lesson13_lora_full")["setup"]["seconds"] }} seconds on one core each.

# %% tags=["hide-input"]
# @title Your bet
RANK1 = ["within 3 points of all weights", "3 to 15 points behind", "more than 15 points behind"]
lora_bet = bet("Rank 1, ten times the learning rate, equal seconds: where does RL end? (Mean of three seeds.)", RANK1)

# %% tags=["hide-input"]
# @title Figure: adapters and all weights at equal seconds
lora = {rank: load_curve(f"lesson13_lora_{rank}") for rank in (1, "full")}
end = {rank: [100 * row["evals"][-1]["accuracy"] for row in found["results"]] for rank, found in lora.items()}
mean = {rank: sum(values) / len(values) for rank, values in end.items()}
behind = mean["full"] - mean[1]
lora_bet.result(RANK1[2] if behind > 15 else RANK1[1] if behind > 3 else RANK1[0])
fig, ax = plt.subplots(figsize=(8, 3.4), layout="constrained")
speed, numbers = {}, {}
for (rank, found), color, style in zip(lora.items(), (VERMILION, BLUE), ("--", "-"), strict=True):
    ax.plot([], [], style, color=color, label="all weights" if rank == "full" else f"rank {rank}")
    for row, marker in zip(found["results"], ("o", "s", "^"), strict=True):  # a marker for each seed
        points = [(e["seconds"], 100 * e["accuracy"]) for e in row["evals"]]
        ax.plot(*zip(*points, strict=True), style, color=color, marker=marker)
    speed[rank] = sum(row["evals"][-1]["step"] / row["evals"][-1]["seconds"] for row in found["results"]) / 3
    numbers[rank] = found["results"][0]["numbers"]
ax.set(
    xlabel="seconds of one core",
    ylabel="validation, % right, greedy",
    title=f"Three seeds, a marker each, {provenance(found)}",
)
ax.grid()
ax.legend()
plt.show()

# %% [markdown]
# Rank 1 ends lower in each seed, at {{ mean[1]:.0f }}% against {{ mean["full"]:.0f }}%. {{ assert behind > 3 and all(a
# < b for a, b in zip(end[1], end["full"], strict=True)) }} It trains 1/{{ numbers["full"] / numbers[1]:.0f }} of the
# weights, and yet it's hardly faster: {{ speed[1]:.2f }} steps per second instead of {{ speed["full"]:.2f }}. {{ assert
# speed[1] < 1.2 * speed["full"] }} Three seeds are few, and neither learning rate was tuned.
#
# On large models, others found that small ranks do as well as all weights in RL, where a right-or-wrong reward is at
# most one bit per answer (Schulman and Thinking Machines 2025), and less well where much has to be learned from text
# (Biderman et al. 2024). So don't take section 5's rank {{ enough }} as a verdict. There we cut a finished update of
# SFT, and embedding, norms and biases kept theirs. Such a picture tells you where to begin; a run at equal seconds
# decides.
#
# ## Check yourself
#
# 1. A base gets one answer in 5,000 right. You have {{ RL["num_prompts"] }} × {{ RL["num_generations"] }} answers per
#    step. About how many steps until the first signal? And with groups twice as large?
#
# <details><summary>Answer</summary>
# One in 5,000 at 64 answers per step: about 78 steps. Groups twice as large: half as many steps, each twice as
# expensive. You gain nothing.
# </details>
#
# 2. SFT's gradient is REINFORCE's with an advantage of 1. Why doesn't SFT need a baseline?
#
# <details><summary>Answer</summary>
# A baseline removes the noise of sampling from the policy, and leaves the mean alone because the score has mean zero
# under that policy. SFT's samples come from somebody else and are fixed: a baseline $b$ would just multiply every
# gradient by $1 - b$.
# </details>
#
# 3. Training loss is 0.001, held-out loss is rising, greedy accuracy is unchanged. May RL begin?
#
# <details><summary>Answer</summary>
# It may, and it will find little: look at the room between pass@1 and pass@k. Take an earlier checkpoint.
# </details>
#
# 4. You pack examples for a model whose positions are learned vectors, not rotary ones. The mask is right, but
#    positions run on. What goes wrong?
#
# <details><summary>Answer</summary>
# The second example gets other position vectors than alone. If the row is longer than any the model was trained on, the
# last of them were never trained at all. With rotary positions only differences count.
# </details>
#
# 5. Why is one of `A` and `B` random and the other zero, rather than both random or both zero?
#
# <details><summary>Answer</summary>
# One must be zero, so that the policy begins as the base, which may also be the KL reference. Either would do; by
# convention it's `B`. Both zero would never move; both random would begin as another model.
# </details>
#
# ## Exercises
#
# [exercises/13_sft_and_lora.ipynb](../exercises/13_sft_and_lora.ipynb): five, from a batch with a bug in each row to
# the wait until RL starts. Then try it for real: `rlcourse sft --help`, and `rlcourse train --lora-rank 8 --lr 4e-4`:
# ten times the laptop preset's learning rate.
#
# ## Further reading
#
# - Hu et al. 2021, *LoRA: Low-Rank Adaptation of Large Language Models*, arXiv:2106.09685.
# - Schulman and Thinking Machines Lab 2025, *LoRA Without Regret*: ranks, learning rates, SFT against RL.
# - Biderman et al. 2024, *LoRA Learns Less and Forgets Less*, arXiv:2405.09673.
# - Shi et al. 2024, *Instruction Tuning With Loss Over Instructions*, arXiv:2405.14394.
# - Krell et al. 2021, *Efficient Sequence Packing without Cross-contamination*, arXiv:2107.02027.
# - DeepSeek-AI 2025, *DeepSeek-R1*, arXiv:2501.12948: RL with and without a warm start (its "cold-start data").
