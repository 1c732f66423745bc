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
# - why a token of a long wrong answer weighs less in GRPO, and what that does to the policy: derived in three lines,
#   shown exactly on small tensors, then in training;
# - why dividing by the standard deviation of a group prefers the easiest and the hardest problems, and how much;
# - the two deletions that make GRPO Dr. GRPO (Liu et al. 2025), and why the constant that stays is `max_new_tokens`;
# - how the algorithms of this family differ: one table, a few switches.
#
# You need lessons 01 and 03: the policy gradient, the clipped loss, the group as a baseline.

# %%
import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown

from rlcourse import advantages as adv
from rlcourse.config import ALGORITHMS, TrainConfig, make_config
from rlcourse.course import pick
from rlcourse.course.lessons import lesson04
from rlcourse.course.lessons.curve_records import load_curve
from rlcourse.course.widgets import explorer
from rlcourse.losses import aggregate, importance_ratio, token_loss
from rlcourse.measure.plots import BLACK, BLUE, GREEN, LABELS, ORANGE, PURPLE, SKY, STYLES, VERMILION

torch.manual_seed(0)
plt.rcParams["figure.dpi"] = 70

# %% [markdown]
# ## Two divisions
#
# GRPO samples a group of $G$ answers $o_1, \dots, o_G$ to a prompt, with rewards $R_i$, and minimises
#
# $$L = -\frac{1}{G}\sum_{i=1}^{G} \frac{1}{\underbrace{|o_i|}_{\text{length}}} \sum_{t=1}^{|o_i|}
# \min\left(r_{i,t} \hat A_i,\ \mathrm{clip}(r_{i,t}, 1-\epsilon, 1+\epsilon) \hat A_i\right),
# \qquad
# \hat A_i = \frac{R_i - \mathrm{mean}(R)}{\underbrace{\mathrm{std}(R)}_{\text{difficulty}}}$$
#
# where $|o_i|$ is the length of answer $i$ in tokens and $r_{i,t} = \pi(o_{i,t}) / \pi_{old}(o_{i,t})$ the importance
# ratio of its token $t$.
#
# Two divisions carry a brace. The policy gradient of lesson 01 has neither: it is the sum over the tokens of
# $-A_i \nabla \log \pi(o_{i,t})$, with any baseline that does not depend on the answer itself. Both divisions look like
# harmless scaling. Each depends on what was sampled, so each changes what is learned.
#
# ## 1 · Length
#
# Four answers of one group: short and long, right and wrong. The ratio is 1, since nothing has been updated yet.

# %%
lengths, rewards = torch.tensor([3, 12, 3, 12]), torch.tensor([1.0, 1.0, 0.0, 0.0])
mask = torch.arange(12) < lengths[:, None]  # [rows, length]
advantages = adv.group_centered(rewards, num_generations=4)
print("advantages", advantages.tolist())
print(mask.int())

# %% [markdown]
# The gradient of the loss with respect to each token's log-prob says how hard that token is pushed. We compute it
# through the loss of the package, with each of its three aggregations: `sequence_mean` is GRPO's (a mean over each
# answer, then over answers), `token_mean` is DAPO's (one mean over all tokens), `constant` is Dr. GRPO's (a sum,
# divided by rows × `max_new_tokens`).


# %%
def push(advantages, mask, how, max_new_tokens):
    """Minus the gradient of the loss by token, [rows, length]: positive where a token becomes more probable."""
    old = torch.zeros(mask.shape)
    logprobs = old.clone().requires_grad_()
    switches = {"surrogate": "clip", "ratio": "token", "clip_low": 0.2, "clip_high": 0.2}
    loss, _ = token_loss(logprobs, old, advantages, mask, **switches)
    counts = {"rows": len(mask), "tokens": int(mask.sum()), "max_new_tokens": max_new_tokens}
    aggregate(loss, mask, how, **counts).backward()
    return -logprobs.grad


HOWS = {"sequence_mean": "GRPO: sequence_mean", "token_mean": "DAPO: token_mean", "constant": "Dr. GRPO: constant"}
pushes = {how: push(advantages, mask, how, max_new_tokens=16) for how in HOWS}
for how, each in pushes.items():
    print(f"{how:14} first token of each answer: {[round(value, 4) for value in each[:, 0].tolist()]}")

# %% [markdown]
# Look at the two wrong answers, the last two numbers of each line. Under `sequence_mean` a token of the long one is
# pushed down a quarter as hard as a token of the short one, because it is four times as long. Under the other two they
# are pushed alike.

# %%
fig, axes = plt.subplots(1, 3, figsize=(12, 2.6), layout="constrained", sharey=True)
for ax, (how, each) in zip(axes, pushes.items(), strict=True):
    shown = each.masked_fill(~mask, float("nan")) / each.abs().max()
    picture = ax.imshow(shown, cmap="PuOr", vmin=-1, vmax=1, aspect="auto")
    ax.set_title(HOWS[how])
    ax.set_xlabel("token")
axes[0].set_yticks(range(4), ["short, right", "long, right", "short, wrong", "long, wrong"])
fig.colorbar(picture, ax=axes, label="push, largest = 1")
plt.show()

# %% [markdown]
# In formulas. Let $N$ be the number of rows of a batch. A token of answer $i$ is weighted by
#
# | aggregation | weight of a token |
# | --- | --- |
# | `sequence_mean` | $1 / (N \cdot \lvert o_i\rvert)$ |
# | `token_mean` | $1 / \sum_j \lvert o_j\rvert$ |
# | `constant` | $1 / (N \cdot \text{max\_new\_tokens})$ |

# %%
by_hand = {
    "sequence_mean": mask / (len(mask) * lengths[:, None]),
    "token_mean": mask / lengths.sum(),
    "constant": mask / (len(mask) * 16),
}
for how, weights in by_hand.items():
    torch.testing.assert_close(pushes[how], advantages[:, None] * weights)
    print(f"{how:14} the gradient through the loss is advantage x weight")

# %% [markdown]
# **Explore.** The weight of a token by the length of its answer, while the other rows of the batch keep theirs. What to
# look for: `token_mean` bends, too, when the batch has few rows, because the answer itself is in the sum.


# %%
def draw_weights(ax, rows, other_length, max_new_tokens):
    """Weight of a token against the length of its answer, for the three aggregations."""
    length = torch.arange(1, max_new_tokens + 1)
    total = (rows - 1) * other_length + length
    ax.plot(length, 1 / (rows * length), color=STYLES["grpo"][0], label="sequence_mean (GRPO)")
    ax.plot(length, 1 / total, "--", color=STYLES["dapo"][0], label="token_mean (DAPO)")
    ax.plot(length, torch.full_like(total, 1, dtype=torch.float) / (rows * max_new_tokens), "-.", color=BLUE)
    ax.plot([], [], "-.", color=BLUE, label="constant (Dr. GRPO)")
    ax.set(yscale="log", xlabel="tokens in the answer", ylabel="weight of each of them")
    ax.set_title(f"{rows} rows, the others {other_length} tokens", fontsize=11)
    ax.legend(fontsize=8, frameon=False)


explorer(
    draw_weights,
    static=[
        {"rows": 2, "other_length": 40, "max_new_tokens": 80},
        {"rows": 8, "other_length": 40, "max_new_tokens": 80},
        {"rows": 128, "other_length": 40, "max_new_tokens": 80},
    ],
    rows=(8, 1, 128, 1),
    other_length=(40, 1, 80, 1),
    max_new_tokens=(80, 20, 320, 20),
)

# %% [markdown]
# ### Why weighing tokens by length makes wrong answers longer
#
# One could object: a right answer is divided by its length as well, so perhaps it cancels. It does not. Take the
# smallest policy that has a length at all. After each token it stops with probability $q = \sigma(\theta)$ and else
# goes on. An answer of length $L$ has $\log \pi = (L-1) \log(1-q) + \log q$, and the derivative of that is
#
# $$\frac{d \log \pi}{d\theta} = 1 - qL .$$
#
# Now let something outside the policy's reach decide that all these answers earn the same advantage $A$. No length is
# better than another, so a gradient that is not biased has to be 0 on average. Since $E[L] = 1/q$, the plain policy
# gradient is: $E[A\,(1 - qL)] = 0$. With GRPO's division it becomes
#
# $$E\left[\frac{A}{L}\,(1 - qL)\right] = A\left(E\left[\frac 1L\right] - q\right)
# = A \left(E\left[\frac 1L\right] - \frac{1}{E[L]}\right).$$
#
# The bracket is never negative: that is Jensen's inequality. So $\theta$ moves **with the sign of $A$**. Where answers
# are wrong ($A < 0$) the policy learns to stop less often, and they get longer. Where they are right they get shorter.
# Nobody asked for either.
#
# The same, simulated: batches of answers of this policy, all with $A = -1$, weighted as in the table.


# %%
def theta_gradient(theta, advantage, how, rows, limit, batches=1):
    """Ascent direction for theta, [batches], each from `rows` sampled answers of `limit` tokens at most."""
    theta = torch.full((batches, 1), theta, requires_grad=True)
    drawn = torch.distributions.Geometric(theta.detach().sigmoid()).sample((rows,))[..., 0].T + 1  # [batches, rows]
    lengths, finished = drawn.clamp(max=limit), drawn <= limit
    go_on, stop = torch.nn.functional.logsigmoid(-theta), torch.nn.functional.logsigmoid(theta)
    logprob = (lengths - finished.float()) * go_on + finished * stop  # sum over the tokens of each answer
    weight = {
        "sequence_mean": 1 / (rows * lengths),
        "token_mean": 1 / lengths.sum(1, keepdim=True),
        "constant": torch.tensor(1 / (rows * 10.0)),
    }[how]
    (advantage * weight * logprob).sum().backward()
    return theta.grad[:, 0]


def bias(q):
    """-(E[1/L] - q) for a geometric length, in closed form."""
    return q * q.log() / (1 - q) + q


CASES = [("sequence_mean", 8), ("token_mean", 1), ("token_mean", 8), ("token_mean", 64), ("constant", 8)]
stops = torch.tensor([0.05, 0.1, 0.2, 0.4, 0.7])
found = {}
for how, rows in CASES:
    each = [theta_gradient(theta, -1.0, how, rows, 10_000, batches=20_000).mean() for theta in stops.logit().tolist()]
    found[how, rows] = torch.stack(each)
    print(f"{how:14}{rows:4} rows  ", "  ".join(f"{value:+.4f}" for value in found[how, rows].tolist()))
print(f"{'closed form':24} ", "  ".join(f"{value:+.4f}" for value in bias(stops).tolist()))
torch.testing.assert_close(found["sequence_mean", 8], bias(stops), atol=0.004, rtol=0)

# %% [markdown]
# The first line agrees with the closed form, and so does `token_mean` over a single row, which is the same thing. With
# more rows `token_mean` loses its bias in proportion. The constant has none.
#
# Now let the two kinds of answers live side by side and follow the gradient: one $\theta$ for answers that are all
# wrong ($A = -1$), one for answers that are all right ($A = +1$). Both start at ten tokens on average. The limit is 80
# tokens.


# %%
def lengths_in_training(advantage, how, seed, steps=200, rows=16, rate=0.3):
    """Mean length of the answers, step by step, of a policy whose answers all have the same advantage."""
    torch.manual_seed(seed)
    theta, found = torch.logit(torch.tensor(0.1)).item(), []
    for _ in range(steps):
        q = torch.sigmoid(torch.tensor(theta))
        found.append(((1 - (1 - q) ** 80) / q).item())  # E[min(L, 80)]
        theta += rate * theta_gradient(theta, advantage, how, rows, limit=80).item()
    return found


def band(ax, x, runs, color, label, style="-"):
    """Mean over seeds and the range from least to most. runs: [seeds, points]."""
    runs = torch.tensor(runs)
    ax.fill_between(x, runs.amin(0), runs.amax(0), color=color, alpha=0.18, linewidth=0)
    ax.plot(x, runs.mean(0), style, color=color, linewidth=2, label=label)


COLORS = {"sequence_mean": STYLES["grpo"][0], "token_mean": STYLES["dapo"][0], "constant": STYLES["dr_grpo"][0]}
LINES = {"sequence_mean": "-", "token_mean": "--", "constant": "-."}
fig, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained", sharey=True)
for ax, (advantage, title) in zip(axes, [(-1.0, "answers that are all wrong"), (1.0, "all right")], strict=True):
    for how in HOWS:
        runs = [lengths_in_training(advantage, how, seed) for seed in range(5)]
        band(ax, range(200), runs, COLORS[how], HOWS[how], LINES[how])
    ax.set(title=title, xlabel="step", ylim=(0, 80))
axes[0].set_ylabel("mean length, tokens")
axes[0].legend(frameon=False, title="mean of 5 seeds, band: range", loc="upper left")
plt.show()

# %% [markdown]
# Under `sequence_mean` wrong answers grow until the limit stops them, and right ones shrink. Under the other two the
# lengths only diffuse. Expectation zero does not mean standing still.
#
# One thing can be read off the derivation that is easy to overlook. The bias needs a **state in which the advantage is
# already decided**: an opening that cannot be saved, a derailed line of thought. If a right end were as likely from
# every state, $A$ would average to 0 in each of them, and nothing would drift.
#
# ### The same with a language model
#
# We build that state on purpose. Every group has eight answers; four are forced to begin with filler and earn 0, four
# with the first line of the working and earn 1. Whatever the model writes afterwards changes nothing. An unbiased
# gradient has expectation zero, so lengths should stay about where they are.

# %%
from rlcourse.policy import load_policy
from rlcourse.rollout import make_engine
from rlcourse.tasks import load_task

policy, task = load_policy("embedded"), load_task("minigsm")
engine = make_engine(policy, "fast", torch.float32)
problem = task.problems("train")[2]
prompts = [policy.prompt(problem.question) + policy.tokenizer(opening + "\n", add_special_tokens=False)["input_ids"]
           for opening in ("Let me think.", problem.answer.split("\n")[0])]  # fmt: skip
assert prompts == lesson04.forced_prompts(policy, [problem])

rollout = engine.generate(prompts, num_generations=4, max_new_tokens=96, sampling=make_config().sampling)
for row, text in enumerate(policy.texts(rollout.completion_ids, rollout.completion_mask)):
    if row % 4 == 0:
        print("\nPROMPT", policy.tokenizer.decode(prompts[row // 4]).split("assistant\n")[1])
    print(f"  {rollout.completion_lengths[row]:3} tokens: {text!r}")

# %% [markdown]
# The training step is the usual one, the package's `train_step`. Only two things are fixed beforehand: an engine that
# forces the openings, half of each group with either, and rewards that look at nothing else. The openings belong to the
# prompts, so their tokens are not trained.

# %%
from rlcourse.learner import Learner
from rlcourse.step import make_batch, train_step
from rlcourse.tasks.prompts import PromptSampler


def train_forced(algorithm, steps, seed=7):
    """Mean lengths after each opening, every second step, of a model trained with fated rewards; and that model."""
    config = make_config(**lesson04.ISOLATED, algorithm=algorithm, seed=seed, micro_batch_rows=32)
    torch.manual_seed(seed)
    policy = load_policy("embedded")
    engine, learner = make_engine(policy, "fast", torch.float32), Learner(policy, config)
    forced = lesson04.ForcedOpenings(policy, engine, task.problems("train"))
    order, probes, lengths = PromptSampler(task.problems("train"), seed), task.problems("validation")[:32], []
    for step in range(steps + 1):
        if step % 2 == 0:
            lengths.append({"step": step} | lesson04.forced_lengths(policy, engine, probes, config.max_new_tokens))
        train_step(learner, forced, task, order, step, reward_function=lesson04.fated_rewards("worked earns 1"))
    return policy, lengths


live = {name: train_forced(name, pick(smoke=2, full=12)) for name in ("grpo", "dr_grpo")}
for name, (_, lengths) in live.items():
    print(f"{name:8} tokens after filler:", [round(row["filler"], 1) for row in lengths])

# %% [markdown]
# Twelve steps show where this goes. The figure adds recorded runs of 60 steps with five seeds each to what you have
# just run. Left the answers that earn 0, right those that earn 1.


# %%
def forced_panel(ax, names, mode):
    """Recorded lengths after the opening `mode`, one band for each of `names`: {variant: (label, color, style)}."""
    for variant, (label, color, style) in names.items():
        record = load_curve(f"lesson04_isolated_{variant}")
        runs = [[row[mode] for row in seed["evals"]] for seed in record["results"]]
        band(ax, [row["step"] for row in record["results"][0]["evals"]], runs, color, label, style)
    ax.set(xlabel="step", ylim=(0, 96))
    return record


names = {
    "grpo": ("GRPO", GREEN, "-"),
    "token_mean": ("token_mean, no std", VERMILION, "--"),
    "dr_grpo": ("Dr. GRPO", BLUE, "-."),
}
fig, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained", sharey=True)
for ax, mode, title in zip(
    axes, ("filler", "worked"), ("begin with filler, earn 0", "begin worked, earn 1"), strict=True
):
    record = forced_panel(ax, names, mode)
    for name, marker in (("grpo", "v"), ("dr_grpo", "o")):
        rows = live[name][1]
        ax.scatter([r["step"] for r in rows], [r[mode] for r in rows], marker=marker, color=BLACK, s=18, zorder=3)
    ax.set_title(f"answers that {title}")
axes[0].set_ylabel("mean length, tokens (limit 96)")
axes[0].scatter([], [], color=BLACK, s=18, label="your run just now")
axes[0].legend(frameon=False, title="mean of 5 seeds, band: range")
plt.show()
print(f"recorded on {record['device']}, {record['date']}, {', '.join(seed['variant'] for seed in record['results'])}")

# %%
for variant in names:
    last = [seed["evals"][-1] for seed in load_curve(f"lesson04_isolated_{variant}")["results"]]
    for mode, earns in (("filler", 0), ("worked", 1)):
        tokens, cut = [row[mode] for row in last], [row[f"{mode}_cut"] for row in last]
        print(f"{variant:11} earn {earns}: {min(tokens):5.1f} to {max(tokens):5.1f} tokens at step {last[0]['step']}, "
              f"cut off {min(cut):4.0%} to {max(cut):4.0%}")  # fmt: skip

# %% [markdown]
# Under GRPO the answers that earn 0 run towards the limit with every seed, and most are cut off. Under a constant, and
# under `token_mean` over 128 rows, they drift without a common direction: a gradient that is 0 in expectation is still
# noise in every step, and AdamW makes steps of full size out of noise.
#
# The right panel is less tidy. Answers that earn 1 should shrink under GRPO, and first they grow. Both openings share
# one model, so they pull at the same weights, and the stronger pull wins. The derivation says how strong each is:
# $E[1/L] - 1/E[L]$, large where some answers are very short. Measured on the model before training:

# %%
engine = make_engine(policy, "fast", torch.float32)
forced = lesson04.forced_prompts(policy, task.problems("validation")[: pick(smoke=4, full=64)])
lengths = engine.generate(forced, 8, 96, make_config().sampling).completion_lengths.view(-1, 2, 8).float()
for i, opening in enumerate(("filler", "worked")):
    n = lengths[:, i].flatten()
    print(f"{opening}: E[1/L] - 1/E[L] = {(1 / n).mean() - 1 / n.mean():.3f}, mean length {n.mean():.1f}")

# %% [markdown]
# The pull on answers that begin with filler is the stronger one. It drags the others along, until the filler is at the
# limit and has no pull left; then they turn.
#
# What do these long answers look like? Both models continue the same openings:

# %%
for name, (trained, lengths) in live.items():
    engine = make_engine(trained, "fast", torch.float32)
    torch.manual_seed(1)
    rollout = engine.generate(prompts[:1], 3, 96, make_config().sampling)
    print(f"\n{LABELS.get(name, name.upper())}, after {lengths[-1]['step']} steps")
    for text in trained.texts(rollout.completion_ids, rollout.completion_mask):
        print("  ", repr(text))

# %% [markdown]
# Two controls, recorded in the same way. If it is the fate of an opening that counts, then swapping the rewards must
# swap the curves; and if a coin decides the reward, GRPO must not drift in any direction.

# %%
names = {
    "grpo": ("filler earns 0, worked earns 1", GREEN, "-"),
    "grpo_swapped": ("filler earns 1, worked earns 0", PURPLE, "--"),
    "grpo_coin": ("a coin decides", BLACK, ":"),
}
fig, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained", sharey=True)
for ax, mode in zip(axes, ("filler", "worked"), strict=True):
    record = forced_panel(ax, names, mode)
    ax.set_title(f"GRPO: answers that begin {'with filler' if mode == 'filler' else 'worked'}")
axes[0].set_ylabel("mean length, tokens (limit 96)")
axes[1].legend(frameon=False, loc="upper left", title="mean of 5 seeds, band: range")
plt.show()
print(f"recorded on {record['device']}, {record['date']}, {', '.join(seed['variant'] for seed in record['results'])}")

# %% [markdown]
# Both hold. With the rewards swapped, answers that begin with filler now earn 1 and shrink, with every seed; those that
# begin worked earn 0 and, once the stronger pull of the filler is spent, grow. The coin moves nothing beyond the drift
# that Dr. GRPO shows as well: an advantage that is decided after the last token cannot bias the ones before.
#
# ### In ordinary training
#
# Nobody forces openings in practice. Does the bias matter then? We trained the embedded model as usual, with neither,
# one, or both deletions, five seeds each, at two settings: the default one, and `slow`, with a quarter of the learning
# rate, twice the steps and twice the limit on tokens. Look at the answers that were wrong, then at those that were
# right.

# %%
FOUR = {
    "grpo": ("GRPO", GREEN, "-"),
    "no_std": ("GRPO without the std", ORANGE, "--"),
    "no_length": ("GRPO without 1/length", SKY, "-"),
    "dr_grpo": ("Dr. GRPO: without both", BLUE, "--"),
}
WINDOW = 5  # training steps in a point


def by_window(values):
    """Means over windows of steps; steps without such an answer are left out."""
    windows = [[v for v in values[i : i + WINDOW] if v is not None] for i in range(0, len(values), WINDOW)]
    return [sum(window) / len(window) if window else float("nan") for window in windows]


fig, axes = plt.subplots(2, 2, figsize=(11, 6.4), layout="constrained", sharey=True)
for row, kind in zip(axes, ("default", "slow"), strict=True):
    for ax, key in zip(row, ("length_wrong", "length_right"), strict=True):
        for variant, (label, color, style) in FOUR.items():
            record = load_curve(f"lesson04_{kind}_{variant}")
            runs = [by_window(seed["steps"][key]) for seed in record["results"]]
            band(ax, [WINDOW * (i + 0.5) for i in range(len(runs[0]))], runs, color, label, style)
        ax.set(title=f"{kind} setting: {key.split('_')[1]} answers", xlabel="training step", ylim=(20, 60))
    row[0].set_ylabel("mean length, tokens")
axes[0, 1].legend(frameon=False, title="mean of 5 seeds, band: range")
plt.show()
print(f"recorded on {record['device']}, {record['date']}, {', '.join(seed['variant'] for seed in record['results'])}")

# %% [markdown]
# The four curves are two: what matters is the division by the length, and the division by the std does nothing to
# lengths. Wrong answers are longer with it, right answers are not. The same as numbers, with the accuracy on test
# problems after training:


# %%
def span(values, form="{:.1f}"):
    return f"{form.format(min(values))} to {form.format(max(values))}"


rows = ["| setting | variant | longest wrong answers, tokens | wrong answers at the end, tokens | test accuracy |",
        "| --- | --- | --- | --- | --- |"]  # fmt: skip
for kind in ("default", "slow"):
    for variant, (label, *_) in FOUR.items():
        seeds = load_curve(f"lesson04_{kind}_{variant}")["results"]
        wrong = [by_window(seed["steps"]["length_wrong"]) for seed in seeds]
        accuracy = [seed["test"]["accuracy"] for seed in seeds]
        cells = [span([max(w) for w in wrong]), span([w[-1] for w in wrong]), span(accuracy, "{:.1%}")]
        rows.append(f"| {kind} | {label} | {' | '.join(cells)} |")
Markdown("\n".join(rows))

# %% [markdown]
# And the greedy accuracy on validation problems during training:

# %%
fig, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained", sharey=True)
for ax, kind in zip(axes, ("default", "slow"), strict=True):
    for variant, (label, color, style) in FOUR.items():
        seeds = load_curve(f"lesson04_{kind}_{variant}")["results"]
        runs = [[100 * row["accuracy"] for row in seed["evals"]] for seed in seeds]
        band(ax, [row["step"] for row in seeds[0]["evals"]], runs, color, label, style)
    ax.set(title=f"{kind} setting", xlabel="training step", ylim=(30, 100))
axes[0].set_ylabel("validation problems right, %")
axes[1].legend(frameon=False, loc="lower right", title="mean of 5 seeds, band: range")
plt.show()

# %% [markdown]
# Read it honestly.
#
# - **Where it shows.** In the middle of training, wrong answers are clearly longer under the division by length; in the
#   slow setting the ranges of the seeds do not touch. These are answers that have lost their way and ramble on: what
#   follows the wrong turn is decided already, so its tokens are in the state of our experiment.
# - **Where it does not.** At the default setting the gap has mostly closed at the end, because few answers lose their
#   way by then. And the accuracy after training hardly differs: the ranges overlap.
# - On this task an answer needs some 30 tokens and may have 80 or 160. A model that may write thousands, on problems
#   that stay hard, gives the bias far more room. Liu et al. report there what the toy shows here: the lengths of wrong
#   answers grow under GRPO long after the reward has stopped to, and Dr. GRPO stops that at about the same accuracy.
#
# So a growing length is no evidence of deeper reasoning by itself. Look at the lengths of right and wrong answers
# apart: the trainer logs `length_right` and `length_wrong` for this reason.
#
# ## 2 · Difficulty
#
# The second division is by the standard deviation of the rewards of a group. Let a prompt be solved with probability
# $p$. Rewards of 0 and 1 have the deviation $\sqrt{p(1-p)}$, so GRPO weighs the prompt's gradient by
#
# $$\frac{1}{\sqrt{p(1-p)}} ,$$
#
# which is least at $p = 1/2$ and grows towards both ends. Problems that are almost always or almost never solved count
# more than they would. A group without any difference has no gradient with or without it: 0 divided by something is 0.
#
# What objective does that follow? The plain policy gradient of a prompt is $\nabla p$. Divided by the deviation it is
# $\nabla p / \sqrt{p(1-p)}$, and that is the gradient of $2 \arcsin \sqrt p$. GRPO climbs the sum of those instead of
# the expected number of solved problems (Davis and Recht 2025).

# %%
p = torch.linspace(0.005, 0.995, 199, dtype=torch.float64, requires_grad=True)
slope = torch.autograd.grad((2 * p.sqrt().asin()).sum(), p)[0]
torch.testing.assert_close(slope, 1 / (p * (1 - p)).sqrt())
p = p.detach()
fig, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
axes[0].plot(p, slope, color=GREEN, label="limit of large groups")
for n, style, color in ((64, "--", PURPLE), (8, "o", ORANGE)):
    k = torch.arange(1, n) / n
    axes[0].plot(k, 1 / (k * (1 - k) * n / (n - 1)).sqrt(), style, color=color, label=f"possible in groups of {n}")
axes[0].set(title="1 / std, the weight of a prompt in GRPO", xlabel="success rate p", ylabel="weight", ylim=(0, 10))
axes[0].legend(frameon=False)
axes[1].plot(p, p, "-.", color=BLUE, label="p: Dr. GRPO, RLOO")
axes[1].plot(p, 2 * p.sqrt().asin() / torch.pi, color=GREEN, label="2 arcsin(√p) / π: GRPO")
axes[1].set(title="what is climbed, scaled to end at 1", xlabel="success rate p", ylabel="objective of one prompt")
axes[1].legend(frameon=False)
plt.show()

# %% [markdown]
# Note how little room a small group leaves. In groups of $n$ the extreme success rates are $1/n$ and $1 - 1/n$:

# %%
for n in (4, 8, 16, 64):
    rewards = (torch.arange(n) < torch.tensor([1, n // 2])[:, None]).float().flatten()  # one right, and half right
    by_std, plain = (f(rewards, n).view(2, n) for f in (adv.group_normalized, adv.group_centered))
    weight = by_std[:, 0] / plain[:, 0]
    print(f"groups of {n:2}: one right answer weighs {weight[0] / weight[1]:.2f} times what it would beside half right")

# %% [markdown]
# **Explore.** The advantages of right and wrong answers, group by group. What to look for: in a group with one right
# answer, GRPO's advantage for it grows with the size of the group without bound, Dr. GRPO's never exceeds 1.


# %%
def draw_advantages(ax, right, num_generations):
    """Advantage of each answer of a group in which `right` answers earn 1, under GRPO and Dr. GRPO."""
    right = min(right, num_generations)
    rewards = (torch.arange(num_generations) < right).float()
    x = torch.arange(num_generations)
    ax.bar(x - 0.2, adv.group_normalized(rewards, num_generations), 0.4, color=GREEN, label="GRPO")
    ax.bar(x + 0.2, adv.group_centered(rewards, num_generations), 0.4, color=BLUE, label="Dr. GRPO")
    ax.axhline(0, color=BLACK, linewidth=0.8)
    ax.set(xlabel="answer, the right ones first", ylabel="advantage", ylim=(-4, 4))
    ax.set_title(f"{right} of {num_generations} answers right", fontsize=11)
    ax.legend(frameon=False, fontsize=9)


explorer(
    draw_advantages,
    static=[{"right": right, "num_generations": 8} for right in (1, 4, 7)]
    + [{"right": right, "num_generations": 16} for right in (1, 8, 16)],
    right=(1, 0, 32, 1),
    num_generations=(8, 2, 32, 1),
)

# %% [markdown]
# ### On real rollouts
#
# The embedded model answers training problems 16 times each. For every problem we take the gradient of its group, with
# Dr. GRPO's advantages and with GRPO's, both summed over a constant so that only the std differs, and look at its norm.

# %%
from rlcourse.logprobs import token_logprobs

problems = task.problems("train")[: pick(smoke=8, full=96)]
torch.manual_seed(0)
engine = make_engine(policy, "fast", torch.float32)
rollout = engine.generate([policy.prompt(problem.question) for problem in problems], 16, 80, make_config().sampling)
texts = policy.texts(rollout.completion_ids, rollout.completion_mask)
judged = [task.verify(text, problems[row // 16].gold).strict for row, text in enumerate(texts)]
rewards = torch.tensor(judged).float() * rollout.finished
success = rewards.view(-1, 16).mean(1)
print(f"{len(problems)} problems: {(success == 0).sum()} never solved, {(success == 1).sum()} always, the rest between")


# %%
def gradient_norm(rollout, advantages):
    """Norm of the gradient of the loss of some rows, summed over a constant, over all weights of the model."""
    logprobs, _ = token_logprobs(policy.model, rollout, make_config().sampling, chunk=4096)
    loss, _ = token_loss(logprobs, rollout.logprobs, advantages, rollout.completion_mask,
                         surrogate="clip", ratio="token", clip_low=0.2, clip_high=0.2)  # fmt: skip
    total = aggregate(loss, rollout.completion_mask, "constant", rows=16, tokens=1, max_new_tokens=80)
    gradients = torch.autograd.grad(total, list(policy.model.parameters()))
    return torch.stack([g.square().sum() for g in gradients]).sum().sqrt().item()


norms = []  # success rate, norm under Dr. GRPO, norm under GRPO
for group in ((success > 0) & (success < 1)).nonzero()[:, 0].tolist():
    rows = slice(16 * group, 16 * group + 16)
    pair = [gradient_norm(rollout[rows], f(rewards[rows], 16)) for f in (adv.group_centered, adv.group_normalized)]
    norms.append([success[group].item(), *pair])
norms = torch.tensor(norms)
expected = 1 / (norms[:, 0] * (1 - norms[:, 0]) * 16 / 15).sqrt()
torch.testing.assert_close(norms[:, 2] / norms[:, 1], expected, rtol=2e-3, atol=0)
print(f"{len(norms)} groups with signal: the measured ratio of the norms is 1 / std to within 0.2%")

# %%
fig, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
axes[0].scatter(norms[:, 0], norms[:, 2] / norms[:, 1], color=GREEN, s=22, label="measured, one point a problem")
axes[0].plot(p, slope * (15 / 16) ** 0.5, color=BLACK, linewidth=1, label="1 / std in groups of 16")
axes[0].set(title="gradient norm with the std over that without", xlabel="success rate of the group",
            ylabel="ratio", ylim=(0, 5))  # fmt: skip
edges = torch.tensor([0, 0.2, 0.4, 0.6, 0.8, 1.0])
bins = torch.bucketize(norms[:, 0].contiguous(), edges[1:-1])
for column, color, label, shift in ((1, BLUE, "Dr. GRPO", -0.035), (2, GREEN, "GRPO", 0.035)):
    share = torch.zeros(5).index_add(0, bins, norms[:, column]) / norms[:, column].sum()
    axes[1].bar((edges[:-1] + edges[1:]) / 2 + shift, 100 * share, 0.065, color=color, label=label)
axes[1].set(title="who gets the update", xlabel="success rate of the group", ylabel="share of all norms, %")
for ax in axes:
    ax.legend(frameon=False)
plt.show()

# %% [markdown]
# The left picture is the formula. The right one is its price: the groups at the two ends gain a few percent of the
# update from those in the middle.
#
# ### In training
#
# Does it change what is learned? Our recorded runs have the std with and without the division by length, so there are
# two pairs to compare. Accuracy on the test problems by level, after training at both settings:

# %%
levels = [f"accuracy_level_{level}" for level in (1, 2, 3, 4)]
fig, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained", sharey=True)
for ax, kind in zip(axes, ("default", "slow"), strict=True):
    for i, (variant, (label, color, _)) in enumerate(FOUR.items()):
        runs = torch.tensor(
            [[seed["test"][level] for level in levels] for seed in load_curve(f"lesson04_{kind}_{variant}")["results"]]
        )
        x = torch.arange(4) + 0.18 * (i - 1.5)
        ax.vlines(x, 100 * runs.amin(0), 100 * runs.amax(0), color=color, linewidth=3, alpha=0.45)
        ax.scatter(x, 100 * runs.mean(0), color=color, s=28, label=label)
    ax.set_xticks(range(4), [f"level {level}" for level in (1, 2, 3, 4)])
    ax.set(title=f"{kind} setting", ylim=(60, 100))
axes[0].set_ylabel("test problems right, %")
axes[0].legend(frameon=False, loc="lower left", fontsize=9, title="mean of 5 seeds, line: range")
plt.show()

# %% [markdown]
# No difference: in each pair with and without the std the ranges overlap at every level. In groups of eight the weights
# differ by half at most, and AdamW takes the overall size of the gradient out again. What would make it matter is large
# groups, prompts that stay near 0 or near 1, and rewards of many sizes. That is a reason to leave the std out, not a
# reason to expect better curves.
#
# ## 3 · The constant
#
# Dr. GRPO's sum is divided by rows × `max_new_tokens`. Why not by the mean length of the batch, which would keep the
# loss at a readable size? Because that **is** `token_mean`: rows × mean length is the number of tokens.

# %%
values, mask = torch.randn(4, 12), torch.arange(12) < torch.tensor([2, 12, 5, 9])[:, None]
counts = {"rows": 4, "tokens": int(mask.sum()), "max_new_tokens": 16}
mean_length = mask.sum() / 4
by_mean_length = (values * mask).sum() / (4 * mean_length)
torch.testing.assert_close(by_mean_length, aggregate(values, mask, "token_mean", **counts))
print(f"sum / (rows x mean length) = {by_mean_length:.4f} = token_mean")

# %% [markdown]
# That has three consequences, all because the divisor is drawn together with the answers.
#
# 1. A bias is left, as large as one over the number of rows: the table of section 1. With 128 rows it is nothing, with
#    two it is half of GRPO's.
# 2. The size of a step depends on the company: the same answer counts less in a batch of long ones.
# 3. Gradient accumulation changes the result, if every micro-batch divides by its own mean.

# %%
for company in (5, 20, 60):
    mask = torch.arange(60) < torch.tensor([10] + [company] * 7)[:, None]
    weight = {how: push(torch.ones(8), mask, how, max_new_tokens=80)[0, 0] for how in HOWS}
    print(f"beside seven answers of {company:2} tokens, a token of an answer of 10 weighs",
          ", ".join(f"{value:.5f} ({how})" for how, value in weight.items()))  # fmt: skip

values, mask = torch.ones(2, 60), torch.arange(60) < torch.tensor([10, 60])[:, None]
values[1] = 0.0
for how in ("token_mean", "constant"):
    whole = aggregate(values, mask, how, rows=2, tokens=70, max_new_tokens=80)
    halves = [aggregate(values[i : i + 1], mask[i : i + 1], how, rows=1, tokens=int(mask[i].sum()), max_new_tokens=80)
              for i in range(2)]  # fmt: skip
    print(
        f"{how:10} of the batch {whole:.4f}, mean of two micro-batches that count for themselves {sum(halves) / 2:.4f}"
    )

# %% [markdown]
# `rlcourse.losses.aggregate` takes `rows` and `tokens` of the whole mini-batch for that reason.
#
# Which constant it is matters little. A factor on the loss is a factor on the learning rate, and AdamW divides the
# gradient by its own size, so it nearly vanishes. What does feel it is the threshold of gradient clipping: with a large
# constant the norm rarely reaches it. `max_new_tokens` is a natural choice because it is known before anything is
# sampled.

# %%
for factor in (1.0, 1 / 80):
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = torch.optim.AdamW([weight], lr=0.01, weight_decay=0.0)
    (factor * (weight**2).sum()).backward()
    optimizer.step()
    print(f"loss x {factor:.4f}: gradient {weight.grad.tolist()}, weights after one step {weight.tolist()}")

# %% [markdown]
# ## 4 · The family
#
# Every algorithm of the package is a set of switches of one trainer. This table is made from
# `rlcourse.config.ALGORITHMS`; what is not named stays at its default.

# %%
from dataclasses import fields

DEFAULTS = {f.name: f.default for f in fields(TrainConfig)}
COLUMNS = ("advantage", "surrogate", "ratio", "aggregation")


def table_row(name):
    """One algorithm as a row: its switches, and whatever else it sets that is not the default."""
    switches = ALGORITHMS[name]
    shown = [f"`{switches.get(column, DEFAULTS[column])}`" for column in COLUMNS]
    if switches.get("surrogate") == "reinforce":
        shown[2] = "unused"
    more = [f"`{k}={v}`" for k, v in switches.items() if k not in COLUMNS and v != DEFAULTS[k]]
    return f"| {LABELS.get(name, name.upper())} | {' | '.join(shown)} | {', '.join(more)} |"


head = f"| algorithm | {' | '.join(COLUMNS)} | and |\n|{' --- |' * 6}\n"
Markdown(head + "\n".join(table_row(name) for name in ALGORITHMS))

# %% [markdown]
# - **REINFORCE** (Williams 1992): the reward times the gradient of the log-prob. With the mean of the batch as a
#   baseline it is the simplest thing that works well.
# - **RLOO** (Kool et al. 2019 for the estimator, Ahmadian et al. 2024, arXiv:2402.14740, for language models): the
#   baseline of an answer is the mean reward of the others in its group. It is Dr. GRPO without the ratio, times
#   $n/(n-1)$.
# - **PPO** (Schulman et al. 2017, arXiv:1707.06347): ratio and clip, so that a rollout can be used for several updates;
#   a critic gives each token its own advantage.
# - **GRPO** (Shao et al. 2024, arXiv:2402.03300): the group in place of the critic; the two divisions of this lesson.
# - **Dr. GRPO** (Liu et al. 2025, arXiv:2503.20783): GRPO done right, by deleting both.
# - **DAPO** (Yu et al. 2025, arXiv:2503.14476): keeps the std, takes the mean over tokens, clips higher above than
#   below so that rare tokens can grow, samples again where a group has no signal, and leaves out answers that were cut
#   off (the paper also has a softer penalty on length).
# - **GSPO** (Zheng et al. 2025, arXiv:2507.18071): one ratio for the whole answer, the geometric mean of its tokens'
#   ratios, and a clip range a thousand times narrower for it.
# - **CISPO** (MiniMax 2025, arXiv:2506.13585): never drops a token. It caps the ratio as a weight and lets the gradient
#   pass through the log-prob.
#
# ### The family on one batch
#
# How different are they really? We take one batch of the embedded model and compute the gradient of each algorithm. The
# cosine between two gradients says whether they point the same way. First at the policy that sampled the batch, where
# every ratio is 1; then after some updates on that same batch, as in several inner epochs. PPO is left out, since it
# needs a critic.

# %%
import copy

from rlcourse.collect import collect
from rlcourse.course.lessons.experiment import Replay

FAMILY = [name for name in ALGORITHMS if name != "ppo"]
torch.manual_seed(0)
config = make_config(num_prompts=pick(smoke=2, full=8))
answered, _ = collect(policy, engine, task, PromptSampler(task.problems("train"), 0), config)


def gradient(model, name):
    """The gradient of an algorithm's loss on the batch, as one long vector."""
    config, rollout = make_config(algorithm=name), answered.rollout
    batch = make_batch(Learner(policy, config), answered)
    logprobs, _ = token_logprobs(model, rollout, config.sampling, chunk=4096)
    loss, _ = token_loss(logprobs, rollout.logprobs, batch.advantages, batch.loss_mask, surrogate=config.surrogate,
                         ratio=config.ratio, clip_low=config.clip_low, clip_high=config.clip_high)  # fmt: skip
    counts = {"rows": len(loss), "tokens": int(batch.loss_mask.sum()), "max_new_tokens": config.max_new_tokens}
    total = aggregate(loss, batch.loss_mask, config.aggregation, **counts)
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, list(model.parameters()))])


def cosines(model):
    vectors = torch.stack([gradient(model, name) for name in FAMILY])
    vectors = vectors / vectors.norm(dim=1, keepdim=True).clamp(min=1e-30)  # no gradient: its cosines are 0
    return vectors @ vectors.T


at_start = cosines(policy.model)
rloo, dr_grpo = gradient(policy.model, "rloo"), gradient(policy.model, "dr_grpo")
print(f"RLOO over Dr. GRPO, first update: {(rloo @ dr_grpo / dr_grpo.square().sum()):.4f}, and 8/7 = {8 / 7:.4f}")

# %%
moved, rollout, earned = copy.deepcopy(policy), answered.rollout, answered.rewards.tolist()
config = make_config(num_prompts=config.num_prompts, inner_epochs=6, lr=1e-4, warmup_steps=0, micro_batch_rows=32)
order = PromptSampler(task.problems("train"), 0)
train_step(Learner(moved, config), Replay(rollout), task, order, step=0, reward_function=lambda *_: earned)
later = cosines(moved.model)
with torch.no_grad():
    new, _ = token_logprobs(moved.model, rollout, config.sampling, chunk=4096)
switches = ALGORITHMS["gspo"]
kept = {}
for level, low, high in (("token", 0.2, 0.2), ("sequence", switches["clip_low"], switches["clip_high"])):
    mask = rollout.completion_mask
    ratio = importance_ratio(new, rollout.logprobs, mask, level)[mask]
    kept[level] = ((ratio > 1 - low) & (ratio < 1 + high)).float().mean().item()
print(f"tokens whose own ratio is within 20% of 1 (GRPO): {kept['token']:.1%}")
print(f"tokens whose answer's ratio is within GSPO's range: {kept['sequence']:.1%}")

# %%
fig, axes = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
labels = [LABELS.get(name, name.upper()).replace(", ", ",\n") for name in FAMILY]
for ax, found, title in zip(axes, (at_start, later), ("first update: every ratio is 1", "after 6 updates on the batch"),
                            strict=True):  # fmt: skip
    picture = ax.imshow(found, cmap="cividis", vmin=-1, vmax=1)
    for i in range(len(FAMILY)):
        for j in range(len(FAMILY)):
            ax.text(j, i, f"{found[i, j]:.2f}", ha="center", va="center", fontsize=8,
                    color="black" if found[i, j] > 0.2 else "white")  # fmt: skip
    ax.set_xticks(range(len(FAMILY)), labels, rotation=50, ha="right", fontsize=9)
    ax.set_yticks(range(len(FAMILY)), labels, fontsize=9)
    ax.set_title(title)
fig.colorbar(picture, ax=axes, label="cosine of two gradients", shrink=0.8)
plt.show()

# %% [markdown]
# On the left Dr. GRPO and RLOO are one algorithm, and so are GRPO and GSPO: without a second update from the same
# rollout there is nothing to clip. What is left are baseline, std and aggregation. On the right the clips are at work,
# and the algorithms part. GSPO's cosines are 0 there because its gradient is: six large updates have taken the ratio of
# the answers out of its narrow range, and an answer that is clipped teaches nothing more. So **if you do one update a
# rollout, half of the switches do nothing**. That is why PPO, GSPO and CISPO, which live by the ratio, set two
# mini-batches in the table; the others make one update.
#
# ## 5 · Train
#
# A short run of Dr. GRPO with the trainer of the package, over the recorded curves of three algorithms at the same
# default settings.

# %%
import tempfile
from pathlib import Path

from rlcourse.measure.plots import seed_band
from rlcourse.runs import read_lines
from rlcourse.trainer import train

steps = pick(smoke=2, full=20)
settings = {"steps": steps, "seed": 11, "eval_every": pick(smoke=2, full=5), "pass_k": 0, "micro_batch_rows": 32}
with tempfile.TemporaryDirectory() as folder:
    train(make_config(algorithm="dr_grpo", output=folder, eval_problems=pick(smoke=10, full=200),
                      eval_validation=pick(smoke=10, full=200), **settings))  # fmt: skip
    [run] = Path(folder).iterdir()
    evals = read_lines(run / "evals.jsonl")
print([f"step {row['step']}: {row['accuracy']:.1%}" for row in evals])

# %%
fig, ax = plt.subplots(figsize=(8, 4), layout="constrained")
for name in ("grpo", "dr_grpo", "rloo"):
    record = load_curve(name)
    color, style, marker = STYLES[name]
    steps, low, mean, high = seed_band(record["results"])
    low, mean, high = ([100 * value for value in values] for values in (low, mean, high))
    ax.fill_between(steps, low, high, color=color, alpha=0.18, linewidth=0)
    ax.plot(
        steps, mean, color=color, linestyle=style, marker=marker, markersize=4, label=LABELS.get(name, name.upper())
    )
ax.scatter([row["step"] for row in evals], [100 * row["accuracy"] for row in evals], color=BLACK, zorder=3, s=30,
           label="your run just now: Dr. GRPO")  # fmt: skip
ax.set(xlabel="training step", ylabel="validation problems right, %", ylim=(30, 100))
ax.set_title("Default settings: no algorithm stands out")
ax.legend(frameon=False, title=f"mean of {len(record['results'])} seeds, band: range", loc="lower right")
plt.show()

# %% [markdown]
# The bands lie on each other. After two deletions the algorithm is simpler, its gradient is that of what we want, and
# it learns as well. That is the case for Dr. GRPO, and it is why it is the default of this package. It is not a better
# curve on an easy task.
#
# ## Check yourself
#
# <details><summary>1. Two wrong answers in a group have 10 and 100 tokens. How do their total pushes compare under
# GRPO, and those of a single token?</summary>The total pushes are alike: each answer has 1 / N. A token of the long one
# is pushed a tenth as hard.</details>
#
# <details><summary>2. Right answers are divided by their length as well. Why does that not cancel the bias?</summary>
# Because it is another state. From where an answer is going wrong, A is negative and lengths grow; from where it is
# going right, A is positive and lengths shrink. They cancel only where both ends are equally likely.</details>
#
# <details><summary>3. DAPO's mean over tokens weighs all tokens of a batch alike. Is it unbiased?</summary>Not quite:
# the number of tokens in the divisor is drawn with the answers. What is left of the bias goes with one over the number
# of rows.</details>
#
# <details><summary>4. Which problems does the division by the std prefer, and which does it not reach?</summary>Those
# with success rates near 0 and near 1. Groups that are all right or all wrong have no gradient either way.</details>
#
# <details><summary>5. With one update a rollout, what do clip-higher, GSPO's ratio and CISPO's cap
# change?</summary>Nothing. Every ratio is 1 (up to rounding), so nothing is clipped or capped.</details>
#
# <details><summary>6. The lengths of your run grow while accuracy is flat. What do you plot first?</summary>The lengths
# of right and wrong answers apart, and the share that is cut off.</details>
#
# ## Exercises
#
# [Exercises 04](../exercises/04_dr_grpo.ipynb): the three aggregations, the weight of a token, the weight of a prompt,
# the loss of Dr. GRPO, and GSPO's ratio.
#
# ## Further reading
#
# - Z. Liu et al. 2025, *Understanding R1-Zero-Like Training: A Critical Perspective*, arXiv:2503.20783: the two biases
#   and Dr. GRPO.
# - Z. Shao et al. 2024, *DeepSeekMath*, arXiv:2402.03300: GRPO.
# - A. Ahmadian et al. 2024, *Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback
#   in LLMs*, arXiv:2402.14740: RLOO.
# - Q. Yu et al. 2025, *DAPO: An Open-Source LLM Reinforcement Learning System at Scale*, arXiv:2503.14476.
# - C. Zheng et al. 2025, *Group Sequence Policy Optimization*, arXiv:2507.18071.
# - MiniMax 2025, *MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention*, arXiv:2506.13585: CISPO.
# - D. Davis and B. Recht 2025, *What is the objective of reasoning with reinforcement learning?*, arXiv:2510.13651: the
#   arcsine.
