# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# In the first part you write the training loop of [lesson 01](../notebooks/01_policy_gradient.ipynb), one function at a
# time: five short ones, each tested as soon as it's there. Then your loop takes its first steps, and it's saved as
# `my_loop.py`. Lessons 02 to 05 change that file, a function or two each. The second part has three puzzles.
#
# Write your code where it says `# YOUR CODE HERE`, then run the cell below it. Each function must be self-contained:
# use `torch` and Python's own modules. Of the three hints, the first asks a question, the second gives the idea, the
# third outlines the answer.

# %%
import itertools
import json
import re
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from rlcourse.course import pick
from rlcourse.course.checks import nb01 as check
from rlcourse.course.own import load_loop, save_loop
from rlcourse.paths import data_folder

PROMPTS, GROUP, LIMIT = 4, 8, 80  # problems per step, answers to each, tokens per answer at most
torch.manual_seed(0)
problems = []  # of the test: question, answer, gold, level
for line in (data_folder() / "minigsm" / "test.jsonl").read_text().splitlines():
    row = json.loads(line)
    problems.append(SimpleNamespace(**row, gold=row["answer"].split("#### ")[1]))
print(f"{len(problems):,} problems")

# %% [markdown]
# ## Part 1 · Your loop
#
# ## q1 · Sample
#
# ●○○○○ · 5 minutes
#
# The model reads a text and returns a score, a *logit* $z_v$, for every token $v$ that could come next. Their softmax
# is the policy, $\pi(v) = e^{z_v} / \sum_u e^{z_u}$. Draw one token per row with these probabilities. The loop around
# your function calls it once per token, until every answer has ended.
#
# <details><summary>Hint 1: a question</summary>
# What goes wrong if you take the largest logit each time, and sample eight answers to the same prompt?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# PyTorch has a function that draws indices with given weights, row by row.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# One line: probabilities `[rows, vocabulary]`, a draw `[rows, 1]`, and without its last dimension `[rows]`.
# </details>


# %% tags=["exercise"]
def sample(logits: torch.Tensor) -> torch.Tensor:
    """One token per row, drawn from softmax(logits): [rows]. logits: [rows, vocabulary]."""
    # BEGIN SOLUTION
    return torch.multinomial(logits.softmax(-1), 1)[:, 0]
    # END SOLUTION


# %%
check.q1(sample)

# %% [markdown]
# ## q2 · Log-probs
#
# ●●○○○ · 10 minutes
#
# One forward pass over prompt and answer gives the log-prob of every token. The output at position $t$ predicts the
# token at position $t + 1$, so the last output isn't used, and nothing predicts the first token. That leaves
# `width - 1` log-probs. Only those of the answer count, from its first token to the one that ends it, and `mask` says
# which they are.
#
# | position | 0 | 1 | 2 | 3 | 4 | 5 |
# | --- | --- | --- | --- | --- | --- | --- |
# | `ids` | `3+4` | `?` | `####` | `7` | `<end>` | padding |
# | predicted by the output at | | 0 | 1 | 2 | 3 | 4 |
# | `mask`, one column shorter | | False | True | True | True | False |
#
# <details><summary>Hint 1: a question</summary>
# Which column of `logits` do you need for the first token of the answer, and which never?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Cut the last column off the logits and the first off the ids. Now they line up. You know the rest as cross-entropy.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Log-probs of all tokens `[rows, width - 1, vocabulary]`, the ones of the ids picked out of them `[rows, width - 1]`,
# and 0 where `mask` is False.
# </details>


# %% tags=["exercise"]
def log_probs(logits: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """log pi of each token but the first, 0 where mask is False: [rows, width - 1].

    logits: [rows, width, vocabulary]; ids: [rows, width]; mask: bool [rows, width - 1].
    """
    # BEGIN SOLUTION
    found = -F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return found.masked_fill(~mask, 0.0)
    # END SOLUTION


# %%
check.q2(log_probs)

# %% [markdown]
# ## q3 · Verify
#
# ●●○○○ · 10 minutes
#
# The reward: 1.0 for a right answer and 0.0 for any other. Read strictly: the answer is the last number announced by
# `####` and a space. Nothing else is paid, so the model will learn the form, too. Numbers are compared as numbers:
# `1,234` and `1234.0` are the same, `-14` and `14` aren't. (The loop around your function gives 0 to answers that were
# cut off.)
#
# <details><summary>Hint 1: a question</summary>
# Which characters may belong to a number, and where must one begin?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# A regular expression finds all announced numbers; only the last one is compared.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Two lines: a list of texts from `re.findall`, with a group for sign, digits, commas and decimals; and a comparison of
# two floats, if the list isn't empty.
# </details>


# %% tags=["exercise"]
def verify(text: str, gold: str) -> float:
    """1.0 if the last number that is announced by `#### ` is `gold`, else 0.0."""
    # BEGIN SOLUTION
    announced = re.findall(r"#### (-?[0-9][0-9,]*(?:\.[0-9]+)?)", text)
    return float(bool(announced) and float(announced[-1].replace(",", "")) == float(gold))
    # END SOLUTION


# %%
check.q3(verify)

# %% [markdown]
# ## q4 · Weigh
#
# ●●○○○ · 10 minutes
#
# Which answers should become more likely? Those that did better than expected, and the other answers to the same prompt
# tell you what to expect. With $G$ answers per prompt, the weight of answer $i$, its *advantage*, is its reward minus
# the mean of the **others** in its group:
#
# $$A_i = R_i - \frac{1}{G-1} \sum_{j \ne i} R_j .$$
#
# Why not weigh by the reward itself? Sections 3 to 6 of the lesson show you what happens then.
#
# <details><summary>Hint 1: a question</summary>
# Rows 0 to $G - 1$ answer the first prompt, the next $G$ the second. Which `view` puts one group into each row?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# The sum of the others is the sum of all minus one's own.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A matrix `[prompts, group]`, the sum of each row as a column, and the result as a flat `[rows]` again.
# </details>


# %% tags=["exercise"]
def weigh(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """Each reward minus the mean of the others in its group: [rows]. Row i answers prompt i // group."""
    # BEGIN SOLUTION
    groups = rewards.view(-1, group)
    others = (groups.sum(1, keepdim=True) - groups) / (group - 1)
    return (groups - others).flatten()
    # END SOLUTION


# %%
check.q4(weigh)

# %% [markdown]
# ## q5 · Step
#
# ●●○○○ · 10 minutes
#
# Now raise the log-probs of what did well and lower those of what didn't. For $N$ answers, with the mask $m_{i,t}$ and
# the token limit $T$ (`LIMIT`),
#
# $$\mathcal{L} = -\frac{1}{N T} \sum_{i=1}^{N} \sum_t m_{i,t}\, A_i \log \pi_\theta(y_{i,t} \mid s_{i,t}) .$$
#
# PyTorch does the rest: the loop around your function calls `backward()`, clips the gradient and takes a step of AdamW.
# Two arguments are for later: `old` for lesson 02's ratio, `ref` for lesson 03's KL.
#
# <details><summary>Hint 1: a question</summary>
# The optimizer makes the loss small. Which sign makes a well-rewarded answer more likely?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# `A` is a column, so it multiplies all tokens of its answer. A sum, then one division by a constant.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# One line: a product of three tensors `[rows, width - 1]`, its sum, and a number made of `len(mask)` and `LIMIT`.
# </details>


# %% tags=["exercise"]
def loss(new: torch.Tensor, old: torch.Tensor, ref: torch.Tensor, A: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Minus the sum of advantage times log-prob, over rows * LIMIT: a scalar.

    new, old, ref: log-probs under the policy (with gradient), the one that sampled and the one before training,
    [rows, width - 1]; A: advantages, [rows, 1] or [rows, width - 1]; mask: bool [rows, width - 1].
    """
    # BEGIN SOLUTION
    return -(A * new * mask).sum() / (len(mask) * LIMIT)
    # END SOLUTION


# %%
check.q5(loss)

# %% [markdown]
# ## First steps
#
# That's all of it. `save_loop` writes your five functions into `my_loop.py`, beside the notebooks' folder. Open it: the
# code around them is under a hundred lines, and you know what each is for. (On Colab, download the file, or the next
# lesson won't find it.) Here are its first three steps. If the weights move, it trains.

# %%
if all(question.passed for question in (check.q1, check.q2, check.q3, check.q4, check.q5)):
    loop = save_loop(sample=sample, log_probs=log_probs, verify=verify, weigh=weigh, loss=loss)
else:
    loop = load_loop()
policy, log = loop.train(pick(1, 3), problems=8)
for row in log:
    right = row["reward"] * PROMPTS * GROUP
    print(f"step {row['step']}: {right:.0f} of {PROMPTS * GROUP} samples right, {row['length']:.0f} tokens on average")
pairs = zip(loop.load_policy("embedded").model.parameters(), policy.model.parameters(), strict=True)
print(f"the weights moved by up to {max((a - b).abs().max().item() for a, b in pairs):.1e}")

# %% [markdown]
# Now go back to section 3 of the lesson: you bet on how far it gets, and then it trains. The puzzles can wait.
#
# ## Part 2 · Puzzles
#
# ## q6 · Cheat
#
# ●●●○○ · 20 minutes
#
# Somebody rewards answers with this verifier: the right number must appear somewhere in the answer.


# %%
def sloppy(text: str, gold: str) -> bool:
    """Whether the right number is among the numbers of a text."""
    return gold in re.findall(r"[0-9]+", text)


for problem in problems[:2]:
    print(f"{problem.question}  (gold {problem.gold})  {sloppy(problem.answer, problem.gold)=}")

# %% [markdown]
# A policy will find out what this pays for. Find out first: write an answer that earns the reward **without solving the
# problem**. You see only the question, and an answer has at most 120 characters, as the policy has a token limit. No
# result is above 100. To pass, earn the reward on three quarters of the one-step problems and four fifths of the
# two-step ones.
#
# <details><summary>Hint 1: a question</summary>
# How many different numbers fit into 120 characters, and which numbers can the answer to a given question be at all?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# You needn't understand the problem, only do arithmetic: the answer to a problem with one step is one of a handful of
# results of the numbers in the question. For two steps, do it again with each of those results. Some numbers are
# written as words.
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
check.q6(cheat)

# %%
if check.q6.passed:
    problem = problems[1]
    print(f"{problem.question}\n{cheat(problem.question)!r} contains {problem.gold}")

# %% [markdown] tags=["solution"]
# A policy needs no malice to end up here. As soon as some of its samples list a few numbers, and earn more often than
# honest ones, such lists become more probable. Reward rises and accuracy doesn't: the signature of a hacked verifier.
# Note that even a constant list of small numbers earns on half of the problems.

# %% [markdown]
# ## q7 · … and close it
#
# ●●●○○ · 20 minutes
#
# Now the other side. Write a verifier that pays 1.0 for honest answers and 0.0 for everything else. It mustn't insist
# on one format, because the policy hasn't learned one yet. Where 14 is right,
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
# When somebody reads an answer aloud to you, how do you know which of its numbers is their answer?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# An honest answer commits to one number, at the end. Read only the part where it does, and refuse an answer that claims
# several numbers there. And compare numbers as numbers, not as text.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Three steps: cut out the place that counts, find **all** numbers in it, with sign, commas and decimals; return 1.0 if
# there is exactly one and it equals the gold.
# </details>


# %% tags=["exercise"]
def pays(text: str, gold: str) -> float:
    """The reward of an answer: 1.0 if it commits to the right number, else 0.0."""
    # BEGIN SOLUTION
    lines = [line for line in text.split("\n") if line.strip()]
    found = re.findall(r"-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?", lines[-1]) if lines else []
    return float(len(found) == 1 and float(found[0].replace(",", "")) == float(gold))
    # END SOLUTION


# %%
check.q7(pays)

# %%
if check.q6.passed and check.q7.passed:
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
# ## q8 · What a baseline may know
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
# Put $b_i$ into the sum, exchange expectation and sum, and look at each pair $(i, j)$ alone. Two answers that were
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
check.q8(shrinkage)

# %% [markdown] tags=["solution"]
# $$\mathbb{E}[\hat g]
#   = \frac{1}{G} \sum_i \Big( \nabla J - \sum_j W_{ij}\, \mathbb{E}\big[R_j \nabla \log \pi(y_i)\big] \Big)
#   = \frac{1}{G} \sum_i (1 - W_{ii})\, \nabla J = \Big(1 - \frac{\operatorname{tr} W}{G}\Big) \nabla J ,$$
#
# since the expectation is $\nabla J$ for $j = i$ and $\mathbb{E}[R_j] \cdot 0$ otherwise. Whatever the baseline takes
# from the **others** is free; only what it takes from the answer's own reward shortens the gradient. So a baseline can
# be as clever as you like about the other answers. The next cell has one that gives an answer's neighbours more weight.

# %% tags=["solution"]
G = 5
distance = (torch.arange(G)[:, None] - torch.arange(G)).abs().float()
neighbours = torch.where(distance > 0, 0.5**distance, 0.0)
for name, W in (("neighbours", neighbours), ("group mean", torch.full((G, G), 1 / G)), ("oneself", torch.eye(G))):
    print(f"{name:11} c = {shrinkage(W):.2f}")
