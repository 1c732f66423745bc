# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# Four puzzles for [lesson 01](../notebooks/01_policy_gradient.ipynb): find the mistakes in a loss from what it does,
# cheat a verifier, close it, and find out what a baseline may know. Write your code where it says `# YOUR CODE HERE`,
# then run the cell below it. Use `torch` and Python's own modules: the functions must stand by themselves.
#
# Of the three hints the first asks a question, the second has the idea, the third the shape of the answer.

# %%
import itertools
import json
import re
from types import SimpleNamespace

import matplotlib.pyplot as plt
import torch

from rlcourse.course.checks import nb01 as check
from rlcourse.paths import data_folder

torch.manual_seed(0)
EOS = 2
problems = []  # of the test: question, answer, gold, level
for line in (data_folder() / "minigsm" / "test.jsonl").read_text().splitlines():
    row = json.loads(line)
    problems.append(SimpleNamespace(**row, gold=row["answer"].split("#### ")[1]))
print(f"{len(problems):,} problems")

# %% [markdown]
# ## q1 · Four mistakes in a loss
#
# ●●●○○ · 20 minutes
#
# A colleague has written the loss of REINFORCE with the mean of each prompt's group as its baseline. "It runs", she
# says, "but look at the curves." The batch holds `num_generations` answers to the first prompt, then as many to the
# second, and so on. `logits[i, t]` already predict `ids[i, t]`.


# %%
def colleague(logits, ids, rewards, num_generations, eos_id):
    mask = ids != eos_id
    token = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    of_answers = (token * mask).sum(1) / mask.sum(1).clamp(min=1)
    baseline = rewards.view(num_generations, -1).mean(0).repeat(num_generations)
    return ((rewards - baseline) * of_answers).mean()


# %% [markdown]
# Here are the curves, on a language with the tokens `a`, `b` and the end `■`, and a policy that has a distribution for
# each position in a text. Two prompts, eight answers to each, eight tokens at most. At first the end is improbable, and
# a text that does not end earns nothing. To the first prompt a text earns 1 if it ends and has a `b`. The second is
# harder: exactly two `b`, then the end. **Look for** what each prompt learns, and how long the answers are.

# %% tags=["hide-input"]
# @title The curves of a loss: `show(function)`
LENGTH = 8


def write(tables: torch.Tensor, n: int):
    """n sampled answers to each prompt: ids [2n, length], and which of their tokens are part of the answer."""
    probabilities = tables.repeat_interleave(n, 0).softmax(-1)
    ids = torch.multinomial(probabilities.flatten(0, 1), 1).view(2 * n, LENGTH)
    is_end = (ids == EOS).long()
    return ids, is_end.cumsum(1) - is_end == 0


def curves(loss, steps: int = 200, n: int = 8) -> torch.Tensor:
    """Share of right answers of each prompt, and mean length, at each step: [steps, 3]."""
    torch.manual_seed(0)
    tables, rows = torch.zeros(2, LENGTH, 3), []  # logits of the tokens a, b and the end, by prompt and place
    tables[..., EOS] = -2.0
    for _ in range(steps):
        ids, answer = write(tables, n)
        ended, count = ((ids == EOS) & answer).any(1), ((ids == 1) & answer).sum(1)
        easy = torch.arange(2 * n) < n
        rewards = (ended & torch.where(easy, count >= 1, count == 2)).float()
        leaf = tables.clone().requires_grad_()
        [gradient] = torch.autograd.grad(loss(leaf.repeat_interleave(n, 0), ids, rewards, n, EOS), leaf)
        tables = tables - 4.0 * gradient
        rows.append([rewards[easy].mean(), rewards[~easy].mean(), answer.sum(1).float().mean()])
    return torch.tensor(rows)


def show(loss) -> None:
    """Draw the curves of a loss; a moving mean of ten steps."""
    found = curves(loss).unfold(0, 10, 1).mean(-1)
    _, axes = plt.subplots(1, 2, figsize=(10, 3), layout="constrained")
    axes[0].plot(found[:, 0], color="#0072B2", label="easy prompt")
    axes[0].plot(found[:, 1], color="#D55E00", linestyle="--", label="hard prompt")
    axes[1].plot(found[:, 2], color="#009E73", label="tokens of an answer")
    axes[0].set(xlabel="step", ylabel="share right", ylim=(0, 1.05))
    axes[1].set(xlabel="step", ylabel="tokens", ylim=(0, LENGTH + 0.5))
    for ax in axes:
        ax.legend()
    plt.show()


show(colleague)

# %% [markdown]
# There are four mistakes. Write the loss without them: minus the mean over answers of advantage times log-prob, where
# the advantage is the reward less the mean reward of the answers to the same prompt, its own included. The end token of
# an answer counts, what comes after it doesn't.
#
# <details><summary>Hint 1: a question</summary>
# Which of the four could make success fall where it should rise? And once that one is fixed: who tells the policy that
# it was right to stop?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Print each intermediate tensor for a batch of two prompts and two answers that you make up, one of which ends early.
# For each row ask: which tokens are in the sum, what is it divided by, and whose rewards are in its baseline? Lesson 01
# has a sentence on each: a loss and its sign, an end that counts, a sum and not a mean, a group that is one prompt's.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Five lines like hers. The mask is made of the number of end tokens strictly before each position. The groups are the
# rows of a matrix, and their means are repeated so that neighbours share one. Nothing is divided by a length.
# </details>


# %% tags=["exercise"]
def mended_loss(
    logits: torch.Tensor, ids: torch.Tensor, rewards: torch.Tensor, num_generations: int, eos_id: int
) -> torch.Tensor:
    """The loss, a scalar. logits: [rows, length, vocabulary]; ids: [rows, length]; rewards: [rows]."""
    # BEGIN SOLUTION
    is_end = (ids == eos_id).long()
    mask = is_end.cumsum(1) - is_end == 0
    token = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    groups = rewards.view(-1, num_generations)
    advantage = (groups - groups.mean(1, keepdim=True)).flatten()
    return -(advantage * (token * mask).sum(1)).mean()
    # END SOLUTION


# %%
check.q1(mended_loss)

# %% [markdown]
# The curves of your own version, finished or not. They tell you more than the card does.

# %%
try:
    show(mended_loss)
except NotImplementedError:
    print("nothing to show yet")

# %% [markdown] tags=["solution"]
# **The sign** is the loud one: alone, it makes success fall to nothing. **The end token** comes next. With it out of
# the sum nobody is ever told that stopping was right, so answers run on, and those that run out of room earn nothing.
# The easy prompt gets there late all the same, since failures make the other tokens less probable. **The mean over
# tokens** slows everything down, here by the length of the answers (lesson 04 is about what else it does). **The
# groups** are quiet: alone they can hardly be seen, because what a baseline takes from other answers, of whatever
# prompt, costs nothing on average (q4). On top of the mean over tokens they make the hard prompt learn more slowly
# still. Quiet mistakes are found by printing, not by looking at curves.

# %% tags=["solution", "hide-input"]
# @title Figure: each mistake alone


def with_one(mistake: str):
    """The loss with one of the four mistakes in it."""

    def loss(logits, ids, rewards, n, eos_id):
        is_end = (ids == eos_id).long()
        mask = ids != eos_id if mistake == "the end left out" else is_end.cumsum(1) - is_end == 0
        of_answers = (logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0] * mask).sum(1)
        if mistake == "mean over tokens":
            of_answers = of_answers / mask.sum(1).clamp(min=1)
        baseline = rewards.view(-1, n).mean(1).repeat_interleave(n)
        if mistake == "wrong groups":
            baseline = rewards.view(n, -1).mean(0).repeat(n)
        return ((rewards - baseline) * of_answers).mean() * (1 if mistake == "sign" else -1)

    return loss


names = ("none", "sign", "the end left out", "mean over tokens", "wrong groups")
_, axes = plt.subplots(1, 5, figsize=(13, 2.6), sharey=True, layout="constrained")
for ax, name in zip(axes, names, strict=True):
    found = curves(with_one(name)).unfold(0, 10, 1).mean(-1)
    ax.plot(found[:, 0], color="#0072B2", label="easy")
    ax.plot(found[:, 1], color="#D55E00", linestyle="--", label="hard")
    ax.set(title=name, xlabel="step", ylim=(0, 1.05))
axes[0].set_ylabel("share right")
axes[0].legend(loc="lower right")
plt.show()

# %% [markdown]
# ## q2 · Cheat
#
# ●●●○○ · 20 minutes
#
# Somebody rewards answers with this verifier: the right number must appear among the numbers of the answer.


# %%
def sloppy(text: str, gold: str) -> bool:
    """Whether the right number is among the numbers of a text."""
    return gold in re.findall(r"[0-9]+", text)


for problem in problems[:2]:
    print(f"{problem.question}  (gold {problem.gold})  {sloppy(problem.answer, problem.gold)=}")

# %% [markdown]
# A policy will find out what this pays for. Find it out first: write an answer that earns the reward **without solving
# the problem**. You see the question only, and an answer has at most 120 characters, as the policy's has a token limit.
# Results are at most 100. Three of four problems with one step are asked for, and four of five with two steps.
#
# <details><summary>Hint 1: a question</summary>
# How many different numbers fit into 120 characters, and which numbers can the answer to a given question be at all?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# You need no understanding, only arithmetic: the answer to a problem with one step is one of a handful of results of
# the numbers in the question. For two steps, do it again with each of those results. Some numbers are written as words.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A list of the numbers in the question, with the words `twice`, `half` and the like as numbers. All results of pairs,
# then all results of those with each number, in an order in which the likely ones come first; only whole numbers from 2
# to 100, each once. Then join them until 120 characters are full.
# </details>


# %% tags=["exercise"]
def cheat(question: str) -> str:
    """An answer of at most 120 characters that the sloppy verifier will probably accept."""
    # BEGIN SOLUTION
    words = {"twice": 2, "three times": 3, "four times": 4, "five times": 5}
    words |= {"half": 2, "a third": 3, "a quarter": 4, "a fifth": 5}
    numbers = [int(n) for n in re.findall(r"[0-9]+", question)] + [n for w, n in words.items() if w in question]

    def results(a: int, b: int) -> list[int]:
        quotients = [x // y for x, y in ((a, b), (b, a)) if y and x % y == 0]
        return [n for n in (a + b, abs(a - b), a * b, *quotients) if 2 <= n <= 100]

    one_step = [n for a, b in itertools.combinations(numbers, 2) for n in results(a, b)]
    two_steps = [n for a in one_step for b in numbers for n in results(a, b)]
    text = ""
    for number in dict.fromkeys(one_step + two_steps):
        if len(text) + len(f"{number} ") <= 120:
            text += f"{number} "
    return text
    # END SOLUTION


# %%
check.q2(cheat)

# %%
if check.q2.passed:
    problem = problems[1]
    print(f"{problem.question}\n{cheat(problem.question)!r} contains {problem.gold}")

# %% [markdown] tags=["solution"]
# A policy needs no malice to end up here. As soon as some of its samples list a few numbers, and earn more often than
# honest ones, such lists become more probable. Reward rises and accuracy doesn't: the signature of a hacked verifier.
# Note that even a constant list of small numbers earns on half of the problems.

# %% [markdown]
# ## q3 · … and close it
#
# ●●●○○ · 20 minutes
#
# Now the other side. Write a verifier that pays 1.0 for honest answers and 0.0 for everything else. It must not insist
# on one format, because the policy has not learned one yet. Where 14 is right,
#
# | pay | don't pay |
# | --- | --- |
# | `Tom has 6+8=14 beads.⏎#### 14` | `2 3 4 5 6 7 8 9 10 11 12 13 14 15` |
# | `Tom has 6+8=14 beads.⏎The answer is 14.` | `It is 14, or maybe 15.` |
# | `So he has 14 beads.` | `Tom has 6+8=14 beads.⏎#### 15` |
# | `#### 12⏎No, wait.⏎#### 14` | `#### 14⏎No, wait.⏎#### 12` |
# | `14.0`, and `1,234` for 1234 | `140`, `-14`, `14.5` |
#
# Find the rule behind the table (⏎ is a new line). `gold` is digits alone.
#
# <details><summary>Hint 1: a question</summary>
# When somebody reads an answer aloud to you, how do you know which of its numbers is the one that they stand by?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# An honest answer commits itself once, at the end. Read only the part where it does, and refuse an answer that claims
# several things there. And compare numbers as numbers, not as text.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Three steps: cut out the place that counts, find **all** numbers in it, with sign, commas and decimals; return 1.0 if
# there is exactly one and it equals the gold.
# </details>


# %% tags=["exercise"]
def pays(text: str, gold: str) -> float:
    """The reward of an answer: 1.0 if it commits itself to the right number, else 0.0."""
    # BEGIN SOLUTION
    lines = [line for line in text.split("\n") if line.strip()]
    found = re.findall(r"-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?", lines[-1]) if lines else []
    return float(len(found) == 1 and float(found[0].replace(",", "")) == float(gold))
    # END SOLUTION


# %%
check.q3(pays)

# %%
if check.q2.passed and check.q3.passed:
    asked = [p for p in problems if p.level <= 2][:200]
    cheats = [cheat(problem.question) for problem in asked]
    before = sum(sloppy(text, p.gold) for text, p in zip(cheats, asked, strict=True))
    after = sum(pays(text, p.gold) for text, p in zip(cheats, asked, strict=True))
    print(f"your cheat earned on {before} of {len(asked)} problems; with your verifier it earns on {after:.0f}")

# %% [markdown] tags=["solution"]
# **Why the last line.** A rule that looks anywhere else pays for the working of a wrong answer. **Why exactly one
# number.** Two claims are a hedge, and a policy that may hedge twice will hedge ten times. It has a price:
# `2+3=5, so 5` on one line is honest and gets nothing. A verifier is a contract, and the policy will learn whatever its
# terms are. This one still pays for a lucky guess, as all verifiers of final numbers do.

# %% [markdown]
# ## q4 · What a baseline may know
#
# ●●●●○ · 20 minutes
#
# You have $G$ answers to a prompt, and the baseline of each is some weighted sum of all their rewards,
#
# $$b_i = \sum_{j=1}^{G} W_{ij} R_j , \qquad \hat g = \frac{1}{G} \sum_{i=1}^{G} (R_i - b_i)\, \nabla \log \pi(y_i) .$$
#
# The group's mean is $W_{ij} = 1/G$. Leave-one-out is $1/(G-1)$ off the diagonal and 0 on it. People have tried others.
# The answers are drawn independently from the policy. Whatever $W$ is, it turns out that
# $\mathbb{E}[\hat g] = c\, \nabla J$ with a number $c$ that depends on $W$ alone. Return $c$.
#
# <details><summary>Hint 1: a question</summary>
# What is the mean of $R_j\, \nabla \log \pi(y_i)$ when $j \ne i$, and what is it when $j = i$?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Put $b_i$ into the sum, exchange expectation and sum, and look at each pair $(i, j)$ by itself. Two answers that were
# drawn independently: the expectation of a product is the product of the expectations, and a score has expectation
# zero.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# One line. It uses only some of the entries of $W$, is 1 for leave-one-out, $1 - 1/G$ for the group's mean, and 0 for
# the baseline that is one's own reward.
# </details>


# %% tags=["exercise"]
def shrinkage(weights: torch.Tensor) -> torch.Tensor:
    """The factor c for a baseline with these weights, a scalar. weights: [G, G]."""
    # BEGIN SOLUTION
    return 1 - weights.trace() / len(weights)
    # END SOLUTION


# %%
check.q4(shrinkage)

# %% [markdown] tags=["solution"]
# $$\mathbb{E}[\hat g]
#   = \frac{1}{G} \sum_i \Big( \nabla J - \sum_j W_{ij}\, \mathbb{E}\big[R_j \nabla \log \pi(y_i)\big] \Big)
#   = \frac{1}{G} \sum_i (1 - W_{ii})\, \nabla J = \Big(1 - \frac{\operatorname{tr} W}{G}\Big) \nabla J ,$$
#
# since the expectation is $\nabla J$ for $j = i$ and $\mathbb{E}[R_j] \cdot 0$ otherwise. What the baseline takes from
# the **others** is free, whatever it is; only what it takes from the answer itself shortens the gradient. So a baseline
# can be as clever as you like about the other answers. The next cell has one that gives an answer's neighbours more
# weight.

# %% tags=["solution"]
G = 5
distance = (torch.arange(G)[:, None] - torch.arange(G)).abs().float()
neighbours = torch.where(distance > 0, 0.5**distance, 0.0)
for name, W in (("neighbours", neighbours), ("group mean", torch.full((G, G), 1 / G)), ("oneself", torch.eye(G))):
    print(f"{name:11} c = {shrinkage(W):.2f}")
