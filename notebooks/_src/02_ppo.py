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
# - why everybody wants several gradient steps from one rollout, and what that does to lesson 01's loop;
# - two repairs for that, the importance ratio and PPO's clip;
# - the critic and GAE: a baseline for each token, and what $\lambda$ trades for what;
# - PPO whole: the loop of lesson 01 with two changes;
# - the KL divergence to a reference, and which of its estimates to log and which to use as a penalty.
#
# You need [lesson 01](01_policy_gradient.ipynb): the loop, the score, the baseline. `rlcourse.course.loop` holds what
# was written there.

# %%
import copy
import itertools

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from IPython.display import Markdown, display

from rlcourse.course import pick
from rlcourse.course.lessons.curve_records import load_curve
from rlcourse.course.loop import GROUP, LIMIT, PROMPTS, answer_mask, greedy_accuracy, log_probs, task, verify
from rlcourse.course.widgets import bet, explorer
from rlcourse.measure.plots import BLACK, BLUE, GREEN, ORANGE, SKY, VERMILION, seed_band
from rlcourse.measure.records import load_record, provenance
from rlcourse.policy import ValueHead, load_policy
from rlcourse.rollout import make_engine
from rlcourse.sampling import Sampling
from rlcourse.tasks.prompts import PromptSampler

ROLLOUTS, UPDATES = pick(2, 10), pick(2, 8)  # of each run below; gradient steps on each rollout
usual = next(row for row in load_record("step")["results"] if (row["variant"], row["rows"]) == ("trl-default", 64))

# %% [markdown]
# ## 1 · Use a rollout twice
#
# Lesson 01's loop samples {{ PROMPTS * GROUP }} answers, takes one gradient step and throws them away. That hurts where
# sampling is slow. In a training step of TRL, Hugging Face's library for RL, with its default settings, a model of 0.5
# B parameters and {{ usual["rows"] }} answers of {{ load_record("step")["setup"]["new_tokens"] }} tokens on an H200, {{
# 100 * usual["rollout_s"] / usual["step_s"]:.0f }} % of the time goes into sampling. {{ assert "H200" in
# load_record("step")["device"] and load_record("step")["setup"]["shape"].endswith("-0.5b") }} So why not take
# {{ UPDATES }} steps on each rollout and learn {{ UPDATES }} times as much from it?
#
# (The model of this course is so small that on a laptop {{ UPDATES }} steps cost more than the samples. We count
# rollouts, not seconds.)
#
# Here is the loop again, with the leave-one-out baseline. The lines that changed are marked. `objective` is what one
# token contributes, to be made large; lesson 01's is its log-prob times the advantage of its answer.


# %%
def leave_one_out(rewards: torch.Tensor) -> torch.Tensor:
    """Each reward minus the mean of the others in its group: [rows]."""
    groups = rewards.view(-1, GROUP)
    return (groups - (groups.sum(1, keepdim=True) - groups) / (GROUP - 1)).flatten()


def weighted_log_prob(new, old, A):
    """The objective of lesson 01. new, old: log-probs of the tokens; A: advantages."""
    return A * new


def train(objective, updates: int, seed: int = 0) -> list[dict]:
    """Lesson 01's loop, with `updates` steps on each rollout. Returns the accuracy at every other rollout."""
    torch.manual_seed(seed)
    policy = load_policy("embedded")
    engine = make_engine(policy, "fast", torch.float32)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=4e-5, betas=(0.9, 0.95), weight_decay=0.0)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=4)
    order, log = PromptSampler(task.problems("train"), seed), []
    for step in range(ROLLOUTS + 1):
        if step % 2 == 0:
            log.append({"step": step, "accuracy": greedy_accuracy(policy, engine, pick(8, 100))})
        if step == ROLLOUTS:
            return log
        problems = order.sample(PROMPTS)
        rollout = engine.generate([policy.prompt(p.question) for p in problems], GROUP, LIMIT, Sampling())
        A = leave_one_out(verify(problems, rollout, policy))[:, None]
        for update in range(updates):  # new: several steps on a rollout
            new = log_probs(policy.model, rollout)
            if update == 0:
                old = new.detach()  # new: the log-probs under the policy that sampled
            loss = -objective(new, old, A).sum() / (len(A) * LIMIT)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
            optimizer.step()
        warm_up.step()


one_step = train(weighted_log_prob, updates=1)
print("one step on each rollout:", " → ".join(f"{row['accuracy']:.0%}" for row in one_step))

# %% [markdown]
# One step on each rollout takes the greedy accuracy, here on {{ pick(8, 100) }} validation problems, from {{ 100 *
# one_step[0]["accuracy"]:.0f }} % to {{ 100 * one_step[-1]["accuracy"]:.0f }} %. Now {{ UPDATES }} on each, everything
# else as it is.

# %% tags=["hide-input"]
# @title Your bet
first_bet = bet(
    f"{UPDATES} steps on each rollout instead of one. What is the greedy accuracy after {ROLLOUTS} rollouts?",
    (85, 0, 100, 1),
    unit="%",
)

# %%
unclipped = train(weighted_log_prob, UPDATES)

# %% tags=["hide-input"]
# @title Figure: several steps on each rollout


def draw_runs(ax, runs: dict) -> None:
    """Greedy accuracy of runs over rollouts, {label: (log, colour, marker)}."""
    for label, (log, color, marker) in runs.items():
        steps, values = [row["step"] for row in log], [100 * row["accuracy"] for row in log]
        ax.plot(steps, values, color=color, marker=marker, label=label)
    ax.set(xlabel="rollouts", ylabel="greedy, % right", ylim=(0, 100))
    ax.grid()


RUNS = {"1 step": (one_step, BLACK, "o"), f"{UPDATES} steps": (unclipped, VERMILION, "s")}
fig, ax = plt.subplots()
draw_runs(ax, RUNS)
first_bet.line(ax)
ax.set_title("The loop of lesson 01, and more steps on each rollout")
ax.legend(loc="lower left")
plt.show()
found = [100 * row["accuracy"] for row in unclipped]
peak = found.index(max(found))
first_bet.result(found[-1])

# %% [markdown]
# A splendid start: {{ max(found):.0f }} % after {{ 2 * peak }} rollouts, where single steps have got to {{ 100 *
# one_step[peak]["accuracy"]:.0f }} %. {{ assert max(found) > 100 * one_step[peak]["accuracy"] + 15 }} Then it falls to
# {{ found[-1]:.0f }} %. {{ assert found[-1] < max(found) - 15 and found[-1] < 100 * one_step[-1]["accuracy"] }} The
# start is what we came for. Let us find out what kills the run, and keep as much of the start as we can.
#
# ## 2 · What the later steps do
#
# The derivation in lesson 01 needs $y \sim \pi_\theta$: samples of the policy that is being trained. From the second
# step on that is no longer so. The answers came from an older policy $\pi_\text{old}$.
#
# See what this does to a single rollout. We take many steps on it and follow two kinds of tokens: those of answers that
# did better than the others of their group, and those of answers that did worse.

# %%
torch.manual_seed(1)
start = load_policy("embedded")
problems = PromptSampler(task.problems("train"), 1).sample(8)
engine = make_engine(start, "fast", torch.float32)
rollout = engine.generate([start.prompt(p.question) for p in problems], GROUP, LIMIT, Sampling())
A = leave_one_out(verify(problems, rollout, start))
rollout, A = rollout[A != 0], A[A != 0][:, None]  # an answer as good as the others of its group has no gradient
mask = answer_mask(rollout)


def reuse(objective, steps: int = pick(3, 16)) -> list[torch.Tensor]:
    """Many steps on the one rollout: log(pi / pi_old) of every token before each of them, and after the last."""
    model, moved = copy.deepcopy(start.model), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-5, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(steps + 1):
        new = log_probs(model, rollout)
        if not moved:
            old = new.detach()
        moved.append((new - old).detach())
        optimizer.zero_grad()
        (-objective(new, old, A).sum() / (len(A) * LIMIT)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return moved


def weighted_ratio(new, old, A):
    """The advantage, weighted by how much more probable the token has become."""
    return (new - old).exp() * A


moved = {"log-prob": reuse(weighted_log_prob), "ratio": reuse(weighted_ratio)}

# %% [markdown]
# The second run, `weighted_ratio`, has the textbook repair in it. Where a token was drawn from $\pi_\text{old}$ and you
# want the mean under $\pi_\theta$, weight it by how much more probable it has become, the **importance ratio**
#
# $$\rho_t = \frac{\pi_\theta(y_t \mid s_t)}{\pi_\text{old}(y_t \mid s_t)}
#   = \exp\big(\log\pi_\theta(y_t \mid s_t) - \log\pi_\text{old}(y_t \mid s_t)\big) .$$
#
# So the objective of a token becomes $\rho_t A$. Its gradient is $\rho_t A\, \nabla \log \pi_\theta$. On the first step
# all ratios are 1, and that is the gradient of lesson 01. **Look for** the line that never slows down (left), and mind
# that the two axes have different scales.

# %% tags=["hide-input"]
# @title Figure: one rollout, used again and again


def draw_moved(moved: dict, styles: dict) -> None:
    """How far tokens have moved, by the sign of their advantage."""
    _, axes = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
    for (name, logs), (color, style) in zip(moved.items(), styles.values(), strict=True):
        for ax, kind in zip(axes, (A < 0, A > 0), strict=True):
            chosen = mask & kind
            ax.plot([x[chosen].mean() for x in logs], color=color, linestyle=style, label=name)
    for ax, title in zip(axes, ("worse than the others (A < 0)", "better than the others (A > 0)"), strict=True):
        ax.set(title=title, xlabel="steps on the rollout", ylabel=r"mean of log($\pi$ / $\pi_{old}$)")
        ax.axhline(0, color=BLACK, linewidth=0.8)
        ax.legend(loc="best")
    plt.show()


LOOKS = {"log-prob": (VERMILION, "-"), "ratio": (ORANGE, "--"), "clip": (BLUE, "-.")}
draw_moved(moved, {name: LOOKS[name] for name in moved})
fell = {name: logs[-1][mask & (A < 0)].mean().item() for name, logs in moved.items()}
rose = {name: [x[mask & (A > 0)].mean().item() for x in logs] for name, logs in moved.items()}

# %% [markdown]
# With the plain log-prob a bad token is pushed down no less hard when its probability is a millionth than when it was
# one half. There is no bottom: after {{ len(moved["ratio"]) - 1 }} steps the mean is {{ fell["log-prob"]:.1f }} and
# falling as fast as ever. {{ assert (moved["log-prob"][-2] - moved["log-prob"][-1])[mask & (A < 0)].mean() *
# (len(moved["log-prob"]) - 1) > -fell["log-prob"] }} On the right even the good tokens begin to lose, since all tokens
# share the weights. {{ assert rose["log-prob"][-1] < max(rose["log-prob"]) }} The ratio has a brake. As $\rho$ shrinks,
# so does the push, and the mean is at {{ fell["ratio"]:.1f }}. {{ assert fell["log-prob"] < fell["ratio"] < 0 }}

# %% tags=["hide-input"]
# @title Your bet
HOPES = ["it is fixed: the weights are right now", "better, but not fixed", "no better than before"]
second_bet = bet(f"{UPDATES} steps on each rollout, with the ratio. What happens to the run?", HOPES)

# %%
with_ratio = train(weighted_ratio, UPDATES)

# %% tags=["hide-input"]
# @title Figure: with the ratio
RUNS[f"{UPDATES} steps, ratio"] = (with_ratio, ORANGE, "^")
fig, ax = plt.subplots()
draw_runs(ax, RUNS)
ax.set_title("Importance weights, one run")
ax.legend(loc="lower left")
plt.show()
ends = {name: 100 * log[-1]["accuracy"] for name, (log, _, _) in RUNS.items()}
single, plain, weighed = ends.values()
second_bet.result(HOPES[0] if weighed > single else HOPES[1] if weighed > plain else HOPES[2])

# %% [markdown]
# It ends at {{ weighed:.0f }} %, where single steps end at {{ single:.0f }} %. {{ assert weighed < single }} Even in
# theory the ratio is only half of the repair. Given its state, a token has the right weight now. But the state was
# reached by the old policy, too. The weight that is exact belongs to the whole answer: the **product** of the ratios of
# its tokens. And that product is hopelessly noisy. With weights $w_i$, $N$ samples are worth only about $(\sum w_i)^2 /
# \sum w_i^2$ of them:

# %%
for step in (0, 2, 8):
    logs = moved["ratio"][min(step, len(moved["ratio"]) - 1)]
    w = logs.sum(1).exp()
    off = ((logs.exp() - 1).abs() > 0.2)[mask].float().mean()
    print(f"after {step} steps {len(w)} answers are worth {w.sum() ** 2 / w.square().sum():4.1f};", end=" ")
    print(f"{off:.0%} of the tokens have ratios below 0.8 or above 1.2, the largest is {logs.exp().max():.1f}")

# %% [markdown]
# So PPO does not take the product. (TRL's RLOO does, with a clip on it.) One ratio for each token is calmer and a
# little wrong, and the further the new policy is from the old, the more. Either way, the moral is the same: **stay
# near**.
#
# ## 3 · The clip
#
# *Proximal* policy optimisation, **PPO** (Schulman et al. 2017), stays near in the simplest way: a token that has moved
# far enough gets no gradient any more. Its objective is
#
# $$\min\big(\rho A,\ \text{clip}(\rho,\ 1 - \varepsilon,\ 1 + \varepsilon)\, A\big) , \qquad \varepsilon = 0.2 .$$
#
# **Look for** the flat piece, where there is no gradient, and for which side it is on. The dotted line is the clip
# without the minimum.

# %% tags=["hide-input"]
# @title Explorer: the objective of one token


def draw(ax, advantage: float, low: float, high: float) -> None:
    """The objective over the ratio."""
    rho = torch.linspace(0.3, 1.9, 321)
    limited = rho.clamp(1 - low, 1 + high) * advantage
    flat = (1 + high, 1.9) if advantage > 0 else (0.3, 1 - low)
    ax.axvspan(*flat, color=SKY, alpha=0.2, linewidth=0, label="no gradient")
    ax.plot(rho, limited, color=VERMILION, linestyle=":", label="clip alone")
    ax.plot(rho, torch.minimum(rho * advantage, limited), color=BLUE, linewidth=2.5, label="with the minimum")
    ax.plot(1, advantage, color=BLACK, marker="o", linestyle="", label="first step")
    ax.set(xlabel="ratio ρ", ylabel="objective")
    ax.set_title(f"A = {advantage:+g}, ρ from {1 - low:g} to {1 + high:g}", fontsize=11)
    ax.legend(loc="upper left" if advantage > 0 else "lower left")


shapes = [(1.0, 0.2, 0.2), (-1.0, 0.2, 0.2), (1.0, 0.2, 0.5)]
static = [dict(zip(("advantage", "low", "high"), shape, strict=True)) for shape in shapes]
explorer(draw, static=static, advantage=(1.0, -2.0, 2.0, 0.5), low=(0.2, 0.05, 0.6, 0.05), high=(0.2, 0.05, 0.8, 0.05))

# %% [markdown]
# A good token is pushed up until its ratio is $1 + \varepsilon$, a bad one down to $1 - \varepsilon$; then they are
# left alone. On the **other** side nothing is flat. A good token that has become improbable, because other tokens moved
# the weights that it shares with them, keeps its gradient and is called back. The clip without the minimum would leave
# it there. (More room above, as in the right picture or by the slider `high`, is DAPO's *clip-higher*: tokens that
# start out improbable may rise further.)
#
# One function fixes the loop:


# %%
def clipped(new, old, A, clip: float = 0.2):
    """PPO's objective."""
    rho = (new - old).exp()
    return torch.minimum(rho * A, rho.clamp(1 - clip, 1 + clip) * A)


with_clip = train(clipped, UPDATES)

# %% tags=["hide-input"]
# @title Figure: with the clip
RUNS[f"{UPDATES} steps, clip"] = (with_clip, BLUE, "D")
fig, ax = plt.subplots()
draw_runs(ax, RUNS)
ax.set_title("Four runs, the same seed")
ax.legend(loc="lower right", ncols=2)
plt.show()
late = [100 * row["accuracy"] for row in with_clip]
there = 2 * len(late) // 3

# %% [markdown]
# There it is. The clipped run starts more slowly than the unclipped one, with {{ late[peak]:.0f }} against {{
# max(found):.0f }} % after {{ 2 * peak }} rollouts. {{ assert 100 * one_step[peak]["accuracy"] < late[peak] <
# max(found) }} But it goes on to {{ late[there]:.0f }} % after {{ with_clip[there]["step"] }}, where single steps are
# at {{ 100 * one_step[there]["accuracy"]:.0f }} %, and it stays there: {{ late[-1]:.0f }} % at the end. {{ assert
# late[there] > 100 * one_step[there]["accuracy"] + 5 and late[-1] > max(late) - 6 }}
#
# These are single runs, and with another seed the ratio alone may end above the single steps. Section 6 has three seeds
# of what matters, the ratio with the clip and without it.
#
# Does the clip hold the ratios in its range? Back to the single rollout:

# %%
moved["clip"] = reuse(clipped)
outside_of = {}
for name, logs in moved.items():
    rho = logs[-1].exp()
    outside = ((rho - 1).abs() > 0.2)[mask].float().mean()
    cut = (((rho > 1.2) & (A > 0)) | ((rho < 0.8) & (A < 0)))[mask].float().mean()
    print(f"{name:8} after {len(logs) - 1} steps: {outside:5.1%} of the ratios outside of the range", end="")
    print(f", {cut:.1%} have no gradient" if name == "clip" else "")
    outside_of[name] = outside.item()

# %% [markdown]
# No: {{ 100 * outside_of["clip"]:.0f }} % are outside, nearly as many as without it. {{ assert 0.05 <
# outside_of["clip"] < outside_of["ratio"] < outside_of["clip"] + 0.1 }} The clip takes no ratio back. It stops pushing,
# and tokens go on moving, with the weights that they share and with AdamW's momentum, which outlasts their gradient.
# But they do not get as far: the largest ratio is {{ moved["clip"][-1].exp().max():.1f }}, against {{
# moved["ratio"][-1].exp().max():.1f }} with the ratio alone. {{ assert moved["clip"][-1].max() + 1 <
# moved["ratio"][-1].max() }} The share of tokens without a gradient, as a mean over the steps, is the **clip
# fraction**, a number that every PPO run logs. At 0 the clip is idle; when it is large, the later steps train on few
# tokens.
#
# ## 4 · A baseline for each token
#
# The clip was PPO's first change to the loop; this is the second. RLOO gives all tokens of an answer the same
# advantage, the brilliant step and the blunder alike. The natural baseline for token $t$ is the reward to be expected
# from its state $s_t = (x, y_{<t})$, the **value**
#
# $$V(s_t) = \mathbb{E}\big[R \mid s_t\big] .$$
#
# With rewards 0 and 1 it is the probability that this answer will turn out right. Nobody knows it, so a **critic**
# learns it: a small head on the model's last hidden state, from which the next token is predicted too. Its target at
# every token is what came of the answer, $R$; least squares makes it the conditional mean.
#
# How good is that? Freeze the policy, let it answer, and fit the head; then test it on problems that it has not seen.

# %% tags=["hide-input"]
# @title Your bet
third_bet = bet(
    "How much of the variance of the reward does a critic explain, over all tokens of answers to new problems?",
    (50, 0, 100, 1),
    unit="%",
)

# %%
torch.manual_seed(0)
order = PromptSampler(task.problems("train"), 0)


@torch.no_grad()
def sample_states(prompts: int):
    """Answers of the start policy: hidden state before each token [rows, width - 1, d], mask, rewards."""
    problems = order.sample(prompts)
    rollout = engine.generate([start.prompt(p.question) for p in problems], GROUP, LIMIT, Sampling())
    hidden = start.model.get_decoder()(rollout.ids).last_hidden_state[:, :-1]
    return hidden, answer_mask(rollout), verify(problems, rollout, start)


seen, unseen = sample_states(pick(8, 160)), sample_states(pick(8, 80))
h, target = seen[0][seen[1]], seen[2][:, None].expand_as(seen[1])[seen[1]]  # of all tokens
head = ValueHead(h.shape[1])
optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3, weight_decay=0.0)
for _ in range(pick(20, 200)):
    rows = torch.randint(len(h), (2048,))
    optimizer.zero_grad()
    (head(h[rows]) - target[rows]).square().mean().backward()
    optimizer.step()
with torch.no_grad():
    V = head(unseen[0])
outcome = unseen[2][:, None].expand_as(V)
explained = 1 - ((V - outcome)[unseen[1]].square().mean() / (target.mean() - outcome)[unseen[1]].square().mean()).item()
third_bet.result(100 * explained)

# %% [markdown]
# It explains {{ 100 * explained:.0f }} %, after {{ len(h):, }} tokens of {{ len(seen[2]):, }} answers. {{ assert 0 <
# explained < 0.2 }} Part of the rest nobody could know: early in an answer it is still open how it will end. So **look
# for** where in an answer the critic begins to tell right from wrong. The first point of a line is the value before the
# first token; the others are means over a fifth of the answer each. (Answers of fewer than ten tokens, nearly all of
# them bare guesses, are left out, so that all points of a line are of the same answers.)

# %% tags=["hide-input"]
# @title Figure: what the critic knows, and when
fig, ax = plt.subplots()
length = unseen[1].sum(1)
number = unseen[1].cumsum(1)  # 1 at the first token of an answer
fifth = (5 * (number - 1) / length[:, None]).long()
places = [number == 1, *(fifth == i for i in range(5))]  # before the first token; then the mean of each fifth
means = [(V * (unseen[1] & place)).sum(1) / (unseen[1] & place).sum(1).clamp(min=1) for place in places]
means = torch.stack(means, dim=1)[length >= 10]  # [answers, 6]
medians = {}
for right, color, marker in ((1, BLUE, "o"), (0, VERMILION, "s")):
    chosen = means[unseen[2][length >= 10] == right]
    chosen = chosen if len(chosen) else torch.zeros(1, 6)  # the smallest runs have no such answer
    low, middle, high = chosen.quantile(torch.tensor([0.25, 0.5, 0.75]), dim=0)
    ax.fill_between((0, *range(10, 100, 20)), low, high, color=color, alpha=0.18, linewidth=0)
    label = f"{'right' if right else 'wrong'} in the end"
    ax.plot((0, *range(10, 100, 20)), middle, color=color, marker=marker, label=label)
    medians[right] = middle.tolist()
ax.set(xlabel="position in the answer, %", ylabel="V(s)", ylim=(-0.1, 0.6))
ax.set_title("Values along unseen answers: median and quartiles")
ax.legend()
plt.show()
gap = [a - b for a, b in zip(medians[1], medians[0], strict=True)]

# %% [markdown]
# Before the first token the critic knows the problem alone, and the medians are {{ medians[1][0]:.2f }} and {{
# medians[0][0]:.2f }}: some problems are easier than others. In the first fifth they part: how an answer begins says
# more than the problem does. From there on they drift apart slowly, to {{ medians[1][-1]:.2f }} and {{
# medians[0][-1]:.2f }} when the whole sum is on the page. {{ assert 0 < gap[0] < 0.08 and gap[1] > gap[0] + 0.08 and
# gap[1] < gap[-1] < gap[1] + 0.16 }} The critic has learned what a promising answer looks like; nothing here suggests
# that it checks the sum. Keep that in mind: **a critic is a learned guess**, and what follows is about how far to trust
# one.
#
# ## 5 · How far to trust the critic: GAE
#
# Before token $t$ the critic expected $V_t$ (short for $V(s_t)$). After it the answer has earned $r_t$ and expects
# $V_{t+1}$. The difference is what this one token changed, the *temporal-difference error*:
#
# $$\delta_t = r_t + \gamma V_{t+1} - V_t .$$
#
# After the last token $V = 0$, since nothing is to come. The token reward $r_t$ is $R$ at the last token and 0 before
# it. The discount $\gamma$ makes late rewards count less; answers end, so it is usually 1, and we leave it out.
#
# $\delta_t$ as the advantage trusts the critic with the whole future. $R - V_t$ trusts it with nothing: it waits for
# the end, and $V_t$ is a plain baseline. **GAE**, *generalised advantage estimation* (Schulman et al. 2015), has a dial
# $\lambda$ between the two:
#
# $$A_t = \delta_t + \lambda A_{t+1} = \delta_t + \lambda \delta_{t+1} + \lambda^2 \delta_{t+2} + \dots$$
#
# From the end backwards that is a short loop. An answer of five tokens, which turned out right:


# %%
def gae(r: torch.Tensor, V: torch.Tensor, mask: torch.Tensor, lam: float) -> torch.Tensor:
    """Advantages by token, 0 where nothing counts. All [rows, width]; r and V must be 0 where mask is False."""
    A, carried, after = torch.zeros_like(V), 0.0, 0.0
    for t in reversed(range(V.shape[1])):
        carried = r[:, t] + after - V[:, t] + lam * carried
        A[:, t], after = carried, V[:, t]
    return A * mask


r = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0]])
V = torch.tensor([[0.4, 0.5, 0.3, 0.6, 0.8]])
for lam in (0.0, 0.8, 1.0):
    print(f"λ = {lam:.1f}:", [round(v, 2) for v in gae(r, V, torch.ones_like(V), lam)[0].tolist()])

# %% [markdown]
# The third token, after which the value rose from 0.3 to 0.6, gets the most credit at $\lambda = 0$. The second made
# things worse. At $\lambda = 0.8$ it is forgiven: it shares in what came later. At $\lambda = 1$ the list is $1 - V_t$.
#
# ### What λ trades
#
# To see it exactly, a case whose truth we know. Eight tokens, each good or bad with probability one half; the answer is
# right if at least five are good. Over all $2^8$ answers we can sum. Three critics: one knows the truth, one is halfway
# between the truth and the mean, and one has learned nothing and says the mean everywhere. An advantage can be off in
# two ways:
#
# - **bias**: its mean for a given state and token is off, other than by a baseline, which does no harm on average;
# - **noise**: single answers scatter around that mean, and a poor baseline adds to the scatter (lesson 01).
#
# If 64 answers shared a state, the noise would average out over them, and the bias would not. **Look for** the lowest
# point of each line.

# %% tags=["hide-input"]
# @title Your bet
fourth_bet = bet(
    "The critic has learned nothing, and you have one answer. Which λ has the smallest error?", (1.0, 0.0, 1.0, 0.05)
)

# %% tags=["hide-input"]
# @title Figure: error over λ, on the eight tokens
T, NEED = 8, 5
good = torch.tensor(list(itertools.product([0.0, 1.0], repeat=T)))  # [256, 8]
count = torch.cat([torch.zeros(256, 1), good.cumsum(1)], dim=1).long()  # good tokens before t: [256, 9]
R = (count[:, T] >= NEED).float()
true = [(torch.arange(T + 2) >= NEED).float()]  # V by number of good tokens, from the end backwards
for _ in range(T):
    true.insert(0, 0.5 * (true[0] + torch.cat([true[0][1:], true[0][-1:]])))
true_V = torch.stack([true[t][count[:, t]] for t in range(T + 1)], dim=1)  # [256, 9]
true_A = true_V[:, 1:] - true_V[:, :-1]
key = (torch.arange(T) * (T + 1) + count[:, :T]) * 2 + good.long()  # a number for each position, state and token
at_end = torch.zeros(256, T).index_fill(1, torch.tensor([T - 1]), 1.0) * R[:, None]


def bias_and_noise(learned: float, lam: float) -> tuple[float, float]:
    """Mean squared bias, and noise of one answer, of GAE with a critic that has learned so much of the truth."""
    V = learned * true_V[:, :T] + (1 - learned) * R.mean()
    estimate = gae(at_end, V, torch.ones(256, T), lam)
    size = torch.bincount(key.flatten(), minlength=2 * T * (T + 1)).clamp(min=1)
    mean = (torch.bincount(key.flatten(), estimate.flatten(), minlength=len(size)) / size).view(-1, 2)
    without_baseline = (mean - mean.mean(1, keepdim=True)).flatten()[key]  # bad and good are equally probable
    bias = (without_baseline - true_A).square().mean().item()
    return bias, (estimate - without_baseline).square().mean().item()


CRITICS = {"true": (1.0, GREEN, "-."), "half learned": (0.5, BLUE, "-"), "nothing learned": (0.0, VERMILION, "--")}
grid = [i / 40 for i in range(41)]
best = {}
fig, axes = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
for ax, answers in zip(axes, (1, 64), strict=True):
    for name, (learned, color, style) in CRITICS.items():
        errors = [bias + noise / answers for bias, noise in (bias_and_noise(learned, lam) for lam in grid)]
        lowest = min(range(41), key=errors.__getitem__)
        best[name, answers] = grid[lowest]
        label = f"{name}: lowest at {grid[lowest]:.2f}"
        ax.plot(grid, errors, color=color, linestyle=style, marker="o", markevery=[lowest], label=label)
    ax.set(xlabel="λ", title=f"{answers} answer{'s' * (answers > 1)} from each state", ylim=(0, None))
    ax.legend(loc="upper left" if answers == 1 else "upper right")
axes[0].set_ylabel("bias² + noise / answers")
plt.show()
fourth_bet.result(best["nothing learned", 1])
at_one = {name: bias_and_noise(learned, 1.0) for name, (learned, _, _) in CRITICS.items()}

# %% [markdown]
# With the true critic $\lambda = 0$ is perfect: no bias, no noise. With a critic that knows nothing there is no bias at
# $\lambda = 1$, because there any $V$ is only a baseline. {{ assert max(bias for bias, _ in at_one.values()) < 1e-6 }}
# But a bad baseline is paid for in noise, {{ at_one["nothing learned"][1]:.2f }} against {{ at_one["true"][1]:.2f }}
# with the true one. With one answer from each state noise is the larger evil, so a small $\lambda$ wins, bias and all.
# With 64 the bias decides, and the best $\lambda$ moves up to {{ best["nothing learned", 64]:.2f }}. {{ assert
# best["nothing learned", 64] > best["nothing learned", 1] + 0.2 }}
#
# A batch for a language model has few answers from any one state. But its tokens share the weights, so the noise of
# thousands of them averages out in a step, and the bias of a poor critic may not. So $\lambda$ is set near 1: 0.95 is
# the usual choice, and many take 1.
#
# ## 6 · PPO, whole
#
# Both changes in one loop. `look` gives log-probs and values from one pass, since the critic sits on the same hidden
# states. What the critic is trained towards is $A_t + V_t$, GAE's own estimate of the return.


# %%
def look(policy, critic, rollout):
    """log pi of every token of every answer, and the value of the state before it: [rows, width - 1] each."""
    hidden = policy.model.get_decoder()(rollout.ids).last_hidden_state[:, :-1]
    logits = policy.model.lm_head(hidden)
    log_pi = -F.cross_entropy(logits.transpose(1, 2), rollout.ids[:, 1:], reduction="none")
    return log_pi * answer_mask(rollout), critic(hidden) * answer_mask(rollout)


def train_ppo(rollouts: int, lam: float = 0.95, seed: int = 0):
    """PPO. Returns the policy and a row of numbers for each rollout."""
    torch.manual_seed(seed)
    policy = load_policy("embedded")
    engine = make_engine(policy, "fast", torch.float32)
    critic = ValueHead(policy.model.config.hidden_size)  # V is 0 everywhere at the start
    groups = [{"params": policy.model.parameters(), "lr": 4e-5}, {"params": critic.parameters(), "lr": 1e-3}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=4)
    order, log = PromptSampler(task.problems("train"), seed), []
    for step in range(rollouts + 1):
        accuracy = greedy_accuracy(policy, engine, pick(8, 100)) if step % 2 == 0 else None
        log.append({"step": step, "accuracy": accuracy})
        if step == rollouts:
            return policy, log
        problems = order.sample(PROMPTS)
        rollout = engine.generate([policy.prompt(p.question) for p in problems], GROUP, LIMIT, Sampling())  # sample
        mask = answer_mask(rollout)
        last = mask & ~F.pad(mask[:, 1:], (0, 1))
        R = verify(problems, rollout, policy)[:, None].expand_as(mask)  # verify
        r = R * last  # the reward stands on the last token
        with torch.no_grad():
            old, V_old = look(policy, critic, rollout)
        A = gae(r, V_old, mask, lam)  # weigh: token by token, with a critic
        returns = A + V_old
        A = (A - A[mask].mean()) / (A[mask].std() + 1e-4)  # "whitened"
        for _ in range(UPDATES):  # step, several times
            new, V = look(policy, critic, rollout)
            loss = (-clipped(new, old, A) + 0.25 * (V - returns) ** 2)[mask].mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
            optimizer.step()
        warm_up.step()
        log[-1] |= {"error": (V_old - R)[mask].square().mean().item(), "variance": R[mask].var().item()}


_, ppo = train_ppo(ROLLOUTS)

# %% [markdown]
# *Whitening* shifts and scales the advantages of the batch to mean 0 and variance 1, so that one learning rate fits
# rewards of any scale. The mean over the tokens of the batch, not over answers, is PPO's usual one; lesson 04 is about
# that choice. Many implementations also clip the value loss: the larger of two squared errors counts, one of them that
# of a value which may move only 0.2 from $V_\text{old}$. Whether it helps is disputed, so we leave it out.

# %% tags=["hide-input"]
# @title Figure: PPO
fig, ax = plt.subplots()
shown = {"1 step, RLOO": (one_step, BLACK, "o"), f"{UPDATES} steps, clip, RLOO": (with_clip, BLUE, "D")}
checked = [row for row in ppo if row["accuracy"] is not None]
draw_runs(ax, shown | {f"{UPDATES} steps, clip, critic (PPO)": (checked, GREEN, "s")})
ax.set_title("PPO, and the same with the other answers as baseline")
ax.legend(loc="lower right")
plt.show()
second_half = ppo[ROLLOUTS // 2 : ROLLOUTS]
unexplained = sum(row["error"] for row in second_half) / sum(row["variance"] for row in second_half)

# %% [markdown]
# PPO learns as RLOO with a clip does; one run each cannot tell them apart. And the critic? In the second half of the
# run its mean squared error on a fresh rollout is {{ unexplained:.2f }} times the variance of the reward. {{ assert
# 1.02 < unexplained }} A constant, the mean of that rollout, would have done better. It started from nothing,
# with {{ ROLLOUTS * PROMPTS }} problems to learn from, and chases a policy that moves.
#
# ### On record
#
# More seeds, more answers (8 × 8 a rollout, eight steps on each in two passes over four mini-batches), the value loss
# clipped too, at the learning rate above and at twice that; band from worst to best of three. {{ assert
# [load_curve("lesson02_all")["setup"][k] for k in ("num_prompts", "num_generations", "inner_epochs", "minibatches",
# "lr")] == [8, 8, 2, 4, 4e-5] }} **Look for** bands that do not touch.

# %% tags=["hide-input"]
# @title Figure: with and without the clip, three seeds each
NAMES = ("all", "no_clip", "no_critic", "no_norm", "fast_all", "fast_no_clip")
records = {name: load_curve(f"lesson02_{name}") for name in NAMES}
fig, axes = plt.subplots(1, 2, figsize=(10, 3.4), sharey=True, layout="constrained")
for ax, prefix in zip(axes, ("", "fast_"), strict=True):
    for name, label, color, marker in (("all", "PPO", BLUE, "D"), ("no_clip", "ratio, no clip", ORANGE, "^")):
        steps, low, mean, high = ([*v] for v in seed_band(records[prefix + name]["results"]))
        ax.fill_between(steps, [100 * v for v in low], [100 * v for v in high], color=color, alpha=0.18, linewidth=0)
        ax.plot(steps, [100 * v for v in mean], color=color, marker=marker, label=label)
    ax.set(title="twice the learning rate" if prefix else "the same learning rate", xlabel="rollouts", ylim=(0, 100))
    ax.legend(loc="lower left")
    ax.grid()
axes[0].set_ylabel("greedy, % right")
plt.show()
final = {name: [100 * seed["evals"][-1]["accuracy"] for seed in record["results"]] for name, record in records.items()}
begin = 100 * records["all"]["results"][0]["evals"][0]["accuracy"]
peak = {n: max(100 * e["accuracy"] for s in record["results"] for e in s["evals"]) for n, record in records.items()}
tested = {
    n: [100 * s["summary"]["accuracy_after"] for s in load_curve(n)["results"]] for n in ("ppo", "reinforce_baseline")
}
print(provenance(records["all"]), "with `python -m tools.lessons.lesson02`")

# %% [markdown]
# - **The clip matters.** At the same rate two of three seeds end ten points or more lower without it. {{ assert sum(a -
#   b > 9.9 for a, b in zip(final["all"], final["no_clip"])) == 2 }} At twice the rate every seed without it ends below
#   the {{ begin:.0f }} % where it began. {{ assert max(final["fast_no_clip"]) < begin }} It does so with a light hand:
#   the clip fraction never exceeds {{ -(-100 * max(x for n in ("all", "fast_all") for s in records[n]["results"] for x
#   in s["steps"]["clip_fraction"]) // 1):.0f }} %.
# - **It is no insurance.** At twice the rate full PPO falls too, from {{ peak["fast_all"]:.0f }} % in its best seed to
#   between {{ min(final["fast_all"]):.0f }} and {{ max(final["fast_all"]):.0f }}. {{ assert max(final["fast_all"]) <
#   min(final["all"]) }}
# - **Nothing else shows.** Without the critic (the batch's mean in its place) or without the limit on the gradient's
# norm the end ranges overlap with PPO's. {{ assert all(min(final["all"]) <= max(final[n]) and min(final[n]) <=
# max(final["all"]) for n in ("no_critic", "no_norm")) }} With 16 × 8 answers, each used **once**, PPO (two
# mini-batches, a step on each) ends at {{ min(tested["ppo"]):.0f }} to {{ max(tested["ppo"]):.0f }} % of the test
# problems and REINFORCE with the batch's mean (one step on all) at {{ min(tested["reinforce_baseline"]):.0f }} to {{
# max(tested["reinforce_baseline"]):.0f }} %: there the clip has next to nothing to do, and the critic buys nothing. {{
# assert [[load_curve(n)["setup"][k] for k in ("num_prompts", "num_generations", "inner_epochs", "minibatches")] for n
# in ("ppo", "reinforce_baseline")] == [[16, 8, 1, 2], [16, 8, 1, 1]] and max(tested["ppo"]) <=
# max(tested["reinforce_baseline"]) }}
#
# That is a statement about short answers with one reward at the end. Where rewards come on the way, or answers run to
# thousands of tokens, a baseline for each token may offer more, to those who have a better critic.
#
# ### Nothing else is hidden
#
# One rollout with the package's `train_step`, with the same seed, and one with ours:

# %%
from rlcourse.config import make_config
from rlcourse.course.lessons.experiment import Experiment

settings = {"num_prompts": PROMPTS, "num_generations": GROUP, "inner_epochs": UPDATES, "minibatches": 1}
theirs = Experiment(make_config(algorithm="ppo", **settings, seed=0))
theirs.train(step=0)
ours, _ = train_ppo(rollouts=1)
trios = zip(start.model.parameters(), ours.model.parameters(), theirs.policy.model.parameters(), strict=True)
trios = [(before.detach(), a.detach(), b.detach()) for before, a, b in trios]
travelled = sum((a - before).abs().sum().item() for before, a, _ in trios)
apart = sum((a - b).abs().sum().item() for _, a, b in trios)
print(f"{UPDATES} steps moved the weights by {travelled:.3f} in all; theirs and ours are {apart / travelled:.2%} apart")
assert apart < 0.05 * travelled

# %% [markdown]
# ## 7 · How far from the start: the KL divergence
#
# The clip limits what one rollout may do. Over a hundred rollouts the policy may still go anywhere. To keep it near a
# *reference* $\pi_\text{ref}$, usually the model before RL, one charges for the distance
#
# $$\text{KL}(\pi \,\|\, \pi_\text{ref}) = \mathbb{E}_{y \sim \pi}\big[\log\pi(y) - \log\pi_\text{ref}(y)\big] ,$$
#
# with a weight $\beta$. From a sampled token, with $d = \log\pi - \log\pi_\text{ref}$, there are three common estimates
# (Schulman 2020): $k_1 = d$, $k_2 = \tfrac12 d^2$, and $k_3 = e^{-d} - 1 + d$. Their means and their noise, exactly,
# for two policies over eight tokens:


# %%
def estimates(log_pi: torch.Tensor, log_ref: torch.Tensor) -> dict[str, torch.Tensor]:
    """The three estimates of KL(pi || ref) from sampled tokens."""
    d = log_pi - log_ref
    return {"k1": d, "k2": d**2 / 2, "k3": torch.expm1(-d) + d}


# %% tags=["hide-input"]
# @title Table: what the three say
torch.manual_seed(0)
ref, direction = torch.randn(8).log_softmax(0), torch.randn(8)
lines = ["| policies | KL | " + " | ".join(f"{k}: mean, std" for k in ("k1", "k2", "k3")) + " |", "| --- " * 5 + "|"]
for name, distance in (("near", 0.2), ("far apart", 1.5)):
    pi = (ref + distance * direction).log_softmax(0)
    cells = []
    for k in estimates(pi, ref).values():
        mean = (pi.exp() * k).sum()
        cells.append(f"{mean:.4f}, {(pi.exp() * (k - mean).square()).sum().sqrt():.4f}")
    lines.append(f"| {name} | {(pi.exp() * (pi - ref)).sum():.4f} | {' | '.join(cells)} |")
display(Markdown("\n".join(lines)))

# %% [markdown]
# $k_1$ is right on average, may be negative, and is very noisy. $k_2$ is biased. $k_3$ is right on average, never
# negative, and calm when the policies are near: it is the one to log.
#
# Now use one as a **penalty**: add it to the loss, and let autograd pull the policy home. Nothing else is in the loss;
# a policy over eight tokens starts far from its reference, and each step samples 32 tokens.

# %% tags=["hide-input"]
# @title Your bet
PULLS = ["all three: they estimate the same thing", "k1 and k3, which are right on average", "k2 and k3", "k3 alone"]
fifth_bet = bet("Which of the three, as a loss, bring the policy back to its reference?", PULLS)

# %%
torch.manual_seed(0)
paths = {}
for name in ("k1", "k2", "k3"):
    logits = (ref + 1.5 * direction).repeat(20, 1).requires_grad_()  # 20 runs at once
    optimizer, paths[name] = torch.optim.SGD([logits], lr=20 * 0.05), []  # the mean below is over 20 runs
    for _ in range(pick(20, 300)):
        log_pi = logits.log_softmax(-1)
        paths[name].append((log_pi.exp() * (log_pi - ref)).sum(-1).detach())  # the exact KL
        tokens = torch.multinomial(log_pi.exp().detach(), 32, replacement=True)
        loss = estimates(log_pi.gather(1, tokens), ref[tokens])[name].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

# %% tags=["hide-input"]
# @title Figure: the pull of each penalty
fig, ax = plt.subplots()
for (name, path), (color, style) in zip(paths.items(), ((VERMILION, "-."), (ORANGE, "--"), (BLUE, "-")), strict=True):
    path = torch.stack(path)
    ax.fill_between(range(len(path)), path.amin(1), path.amax(1), color=color, alpha=0.15, linewidth=0)
    ax.plot(path.mean(1), color=color, linestyle=style, label=f"{name} as the loss")
ax.set(xlabel="step", ylabel="KL to the reference, nats", ylim=(0, None))
ax.set_title("20 runs each: mean, and from lowest to highest")
ax.legend()
plt.show()
left = {name: path[-1].mean().item() / path[0].mean().item() for name, path in paths.items()}
fifth_bet.result(PULLS[2] if left["k1"] > 0.5 > max(left["k2"], left["k3"]) else PULLS[0])

# %% [markdown]
# {{ assert left["k1"] > 0.7 and max(left["k2"], left["k3"]) < 0.1 }} $k_1$, right on average, pulls nowhere. The reason
# is in lesson 01. Autograd differentiates the estimate at the tokens that were drawn, and $\nabla k_1 = \nabla \log
# \pi$ is the score, whose mean is zero. That $\theta$ also decides *which* tokens are drawn is lost on autograd. **The
# value of an estimator and its gradient are two things:**
#
# | | as a value | mean gradient as a loss |
# | --- | --- | --- |
# | $k_1$ | right on average, noisy | none |
# | $k_2$ | biased | that of $\text{KL}(\pi \,\Vert\, \pi_\text{ref})$ |
# | $k_3$ | right on average | that of the other direction, $\text{KL}(\pi_\text{ref} \,\Vert\, \pi)$ |

# %%
logits = (ref + 0.8 * direction).requires_grad_()
pi = logits.log_softmax(0)
kls = {"k2": (pi.exp() * (pi - ref)).sum(), "k3": (ref.exp() * (ref - pi)).sum(), "k1": 0 * logits.sum()}
for name, kl in kls.items():  # the table's last column, summed over all tokens
    on_average = (pi.exp().detach() * estimates(pi, ref)[name]).sum()
    pair = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (on_average, kl)]
    assert torch.allclose(*pair, atol=1e-6), name

# %% [markdown]
# Hence two places for a KL. **In the reward**, as PPO for language models usually has it: each token pays, $r_t = R
# \text{ at the last token} - \beta\, k_1$. There it is a number and never differentiated, so it must be right as a
# value, and GAE passes the price on to the tokens before. **In the loss**, as GRPO has it: $\beta k_3$, or $k_2$.
#
# ## 8 · What the critic costs
#
# A critic needs a head, a learning rate, a loss weight, and a $\lambda$; in large systems it is a second network as big
# as the policy. In return it offers a baseline for each token, and you have seen how good that is. Lesson 03 deletes it
# and keeps the clip: that is **GRPO**.
#
# ## Check yourself
#
# 1. What does the clip do on the first step on a rollout?
#
# <details><summary>Answer</summary>
# Nothing. All ratios are 1, and the gradient is that of REINFORCE with the same advantages. With one step on each
# rollout PPO's clip never acts.
# </details>
#
# 2. A token has $A > 0$ and $\rho = 0.5$. Does it have a gradient?
#
# <details><summary>Answer</summary>
# Yes: the minimum takes the unclipped side, and the token is pushed up again.
# </details>
#
# 3. With $\lambda = 1$, what is the advantage of the third token of a right answer, and what does a wrong critic do to
#    the gradient?
#
# <details><summary>Answer</summary>
# $1 - V(s_3)$. The critic is then a baseline that depends on the state alone. However wrong it is, it adds no bias,
# only noise.
# </details>
#
# 4. Your run logs a KL of −0.002 at one step. Is something broken?
#
# <details><summary>Answer</summary>
# Not if it is the mean of $k_1$ over a batch: that can be negative, although a KL divergence cannot. Log $k_3$.
# </details>
#
# 5. The clip fraction of your run is 0.6. What does that tell you, and what would you change?
#
# <details><summary>Answer</summary>
# Most tokens have no gradient any more by the later steps, so these are nearly wasted. Take fewer steps on each
# rollout, or smaller ones.
# </details>
#
# ## Exercises
#
# [exercises/02_ppo.ipynb](../exercises/02_ppo.ipynb): find three mistakes in a PPO loss from its curves, carry credit
# across a tool call, close a hole in the clip, and build the KL penalty that none of the three estimates is. Then go on
# to [03 · GRPO](03_grpo.ipynb).
#
# ## Further reading
#
# - Schulman et al. 2017, *Proximal Policy Optimization Algorithms*, arXiv:1707.06347.
# - Schulman et al. 2015, *High-Dimensional Continuous Control Using Generalized Advantage Estimation*,
#   arXiv:1506.02438.
# - Schulman 2020, *Approximating KL Divergence*,
#   [joschu.net/blog/kl-approx.html](http://joschu.net/blog/kl-approx.html).
# - Tang and Munos 2025, *On a few pitfalls in KL divergence gradient estimation for RL*, arXiv:2506.09477.
# - Huang et al. 2022, *The 37 Implementation Details of Proximal Policy Optimization*, ICLR blog track.
# - Andrychowicz et al. 2020, *What Matters In On-Policy Reinforcement Learning?*, arXiv:2006.05990: these details
#   measured on control tasks; clipping the value loss did not help there.
# - Ziegler et al. 2019, *Fine-Tuning Language Models from Human Preferences*, arXiv:1909.08593: the KL in the reward.
# - Yu et al. 2025, *DAPO: An Open-Source LLM Reinforcement Learning System at Scale*, arXiv:2503.14476: clip-higher.
