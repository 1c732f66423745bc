# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# Five exercises for [lesson 13](../notebooks/13_sft_and_lora.ipynb): find the bug in each row of an SFT batch, keep
# packed examples apart, share out ranks by singular values, merge adapters by hand, and predict how long RL waits for
# its first signal. The first, third and fifth are puzzles. Write your code where it says `# YOUR CODE HERE`, then run
# the cell below it. Use only `torch`: the functions must be self-contained.
#
# Each exercise has three hints: a question, the idea, and the shape of the answer.

# %%
import matplotlib.pyplot as plt
import torch

from rlcourse.course.checks import nb13 as check

torch.manual_seed(0)
print("ready")

# %% [markdown]
# ## q1 · What is wrong with this batch?
#
# ●●●○○ · 25 minutes
#
# Five colleagues each wrote a collator. Every loss falls, and every batch has a bug: one model never stops, another has
# a splendid loss and answers no better. Write the test that none of them wrote.
#
# A batch has `ids` and `labels`, both `[rows, L]` int64, as transformers takes them. **The model does the shift**: it
# compares its output at `t - 1` with the label at `t`. So a right row `i` has
#
# | places | what is there | labels |
# | --- | --- | --- |
# | the first `prompts[i]` | the prompt; it may contain `eos`, where an earlier turn ended | -100: not learned |
# | the next ones | the answer | its ids |
# | `lengths[i] - 1` | the answer's end token `eos` | `eos` |
# | from `lengths[i]` on | padding: any token, `eos` too | -100 |
#
# Each row has one fault at most. Return its number for each row, int64 `[rows]`:
#
# | | |
# | --- | --- |
# | 0 | none |
# | 1 | some of the prompt is learned |
# | 2 | some of the padding is learned |
# | 3 | the end is not learned: its label is ignored, or the last token before the padding is not `eos` |
# | 4 | labels were shifted already, so the model shifts them a second time |
# | 5 | the answer's first token is not learned |
#
# Here are two rows of one colleague. `·` is not learned. Which number belongs to the first, and which to the second?

# %%
EOS = 1
hers = torch.tensor([[17, 23, 41, 8, 35, EOS, EOS, EOS], [29, 11, 50, 16, 7, 44, 31, EOS]])
her_labels = torch.where(hers == EOS, -100, hers)
her_labels[0, :3], her_labels[1, :4] = -100, -100
her_prompts, her_lengths = torch.tensor([3, 4]), torch.tensor([6, 8])
for ids, labels in zip(hers.tolist(), her_labels.tolist(), strict=True):
    print("ids   ", *(f"{t:3}" for t in ids))
    print("labels", *("  ·" if t == -100 else f"{t:3}" for t in labels), end="\n\n")

# %% [markdown]
# <details><summary>Hint 1: a question</summary>
# For a row without a fault: which places have a label, and which label?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Most faults show in two sets of places, those that are learned and those that should be. Two need the ids: labels that
# differ from the ids above them (this one takes precedence), and a last token that isn't `eos`.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A row of places `0, 1, 2, ...` to compare with `prompts` and `lengths`. Five bools per row; then numbers where they
# are true. `lengths` says where padding begins; no id does, since a prompt may hold `eos` as well.
# </details>


# %% tags=["exercise"]
def diagnose(
    ids: torch.Tensor, labels: torch.Tensor, prompts: torch.Tensor, lengths: torch.Tensor, eos: int
) -> torch.Tensor:
    """The fault of each row, 0 to 5: int64 [rows]. ids, labels: [rows, L]; prompts, lengths: [rows]; all int64."""
    # BEGIN SOLUTION
    place, learned = torch.arange(ids.shape[1]), labels != -100
    in_prompt, in_padding = place < prompts[:, None], place >= lengths[:, None]
    first, last = place == prompts[:, None], place == lengths[:, None] - 1
    shifted = (learned & (labels != ids)).any(1)
    found = torch.zeros(len(ids), dtype=torch.long)
    found[(learned & in_prompt).any(1)] = 1
    found[(learned & in_padding).any(1)] = 2
    found[(last & (~learned | (ids != eos))).any(1)] = 3
    found[(first & ~learned).any(1)] = 5
    found[shifted] = 4  # these labels also begin and end one place too early: said last
    return found
    # END SOLUTION


# %%
check.q1(diagnose)

# %% [markdown]
# Your verdict on the colleague's two rows.

# %%
if check.q1.passed:
    print(diagnose(hers, her_labels, her_prompts, her_lengths, EOS).tolist())

# %% [markdown] tags=["solution"]
# **3, and 3.** She ignored every label that is the padding token, and her padding token is `eos`: common advice for
# models that ship without one. So every end lost its label too. The loss is fine, the model never stops, and each
# answer runs into the limit. The other faults look like this: **1**, part of each step goes into writing questions,
# which nobody asks for. **2**, nobody sees it in the text, since generation stops at the end token; but most of the
# loss is padding, which is easy, so it looks splendid, and the answers get a smaller share of each step. **4**, the
# model learns to skip a token: its loss falls but never gets near a correct batch's. **5** hardly shows, until the
# first token decides how an answer begins.

# %% [markdown]
# ## q2 · Keep them apart
#
# ●●●○○ · 25 minutes
#
# Several examples share one row of `width` places, in order, followed by padding. Example `i` has `lengths[i]` tokens,
# of which the last `answers[i]` are its answer; without a prompt that is all of them. Return three tensors:
#
# - `positions` `[width]` int64, which rotary embeddings take: from 0 in each example, 0 on padding;
# - `sees` `[width, width]` bool: whether the token at place `row` may look at the one at place `column`. A padding
#   place sees only itself, since the softmax of nothing is nan;
# - `predicts` `[width]` bool: whether the loss counts **the output at that place**, which predicts the next token.
#   Answer tokens are learned, and nothing is learned from another example.
#
# <details><summary>Hint 1: a question</summary>
# An example without a prompt begins at place 7. Which output predicts its first token, and whose output is that?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Give every place two numbers: which example it belongs to, and which token of it. All three answers follow from these
# two.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# `repeat_interleave` makes the first number. A comparison of it with itself, as a column and as a row, makes blocks; a
# triangle makes them causal. Give each place of padding a number of its own.
# </details>


# %% tags=["exercise"]
def keep_apart(lengths: torch.Tensor, answers: torch.Tensor, width: int) -> tuple:
    """positions [width] int64, sees [width, width] bool, predicts [width] bool. lengths, answers: [examples] int64."""
    # BEGIN SOLUTION
    used = int(lengths.sum())
    example = torch.cat(
        [torch.arange(len(lengths)).repeat_interleave(lengths), len(lengths) + torch.arange(width - used)]
    )
    sees = (example[:, None] == example).tril()
    positions = sees.sum(1) - 1  # how many of its own come before it
    from_end = sees.T.sum(1) - 1  # how many of its own come after it
    answer = torch.cat([answers.repeat_interleave(lengths), torch.zeros(width - used, dtype=torch.long)])
    return positions, sees, (from_end > 0) & (from_end <= answer)
    # END SOLUTION


# %%
check.q2(keep_apart)

# %% tags=["hide-input"]
# @title Figure: three examples and padding
if check.q2.passed:
    positions, sees, predicts = keep_apart(torch.tensor([6, 4, 7]), torch.tensor([3, 4, 2]), 20)
    fig, ax = plt.subplots(figsize=(4.6, 4.6), layout="constrained")
    ax.imshow(sees, cmap="Blues", vmax=1.6)
    for place in range(20):
        ax.text(place, place, int(positions[place]), ha="center", va="center", fontsize=7)
    ax.plot(
        [20.3] * int(predicts.sum()), predicts.nonzero()[:, 0], "<", color="#D55E00", label="its output is in the loss"
    )
    ax.set(xlabel="sees the token at", ylabel="token at", xlim=(-0.5, 21), title="numbers: positions")
    ax.set(xticks=range(0, 20, 5), yticks=range(0, 20, 5))
    ax.legend(loc="upper right", fontsize=8)
    plt.show()

# %% [markdown] tags=["solution"]
# **The border.** No attention mask stops one leak: the last token of one example predicts the first of the next. If
# that's a prompt token, it isn't learned anyway. Without a prompt, as in pretraining, it would be. **How many see me**
# and **how many do I see** count places within an example from either end, so one matrix gives all three answers.

# %% [markdown]
# ## q3 · Who gets the ranks?
#
# ●●●○○ · 20 minutes
#
# Full fine-tuning has changed some matrices of one size. You may keep `budget` ranks in all: an approximation of rank
# $r_i$ for matrix $i$, $\sum_i r_i$ = `budget`. `updates` `[matrices, rows, columns]` float32 holds the changes. Return
# the ranks, int64 `[matrices]`, for which **the sum of squares of all entries that are left out** is smallest. `budget`
# is at most `matrices` × the smaller side. No two singular values are equal.
#
# <details><summary>Hint 1: a question</summary>
# A matrix is cut from rank 3 to rank 2. By how much does the sum of squares that is left out grow?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# The best approximation of rank $r$ leaves out the squares of all singular values but the $r$ largest (Eckart and Young
# 1936). So one more rank costs 1 and gains an amount that you can write down, whatever the other matrices get.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# `torch.linalg.svdvals` takes all matrices at once. Then one choice among all of them together, and a count per matrix.
# </details>


# %% tags=["exercise"]
def ranks(updates: torch.Tensor, budget: int) -> torch.Tensor:
    """The ranks that leave out least: int64 [matrices]. updates: [matrices, rows, columns] float32."""
    # BEGIN SOLUTION
    values = torch.linalg.svdvals(updates)
    chosen = values.flatten().topk(budget).indices // values.shape[1]
    return torch.bincount(chosen, minlength=len(updates))
    # END SOLUTION


# %%
check.q3(ranks)

# %% [markdown] tags=["solution"]
# **One list.** The singular values of all matrices compete in one list, and the `budget` largest win. They are sorted
# within a matrix, so none gets its third before its second. The matrix that changed most of all may deserve a single
# rank, if its change is one direction. **What it doesn't say** is whether a direction with a small singular value
# matters to the loss. That's why the lesson measures the loss, too.

# %% [markdown]
# ## q4 · Merge by hand
#
# ●●○○○ · 15 minutes
#
# You get a weight `[rows, columns]`, in float32 or bf16, and some adapters trained for it, each a tuple `(A, B,
# alpha)`: `A` `[r, columns]` and `B` `[rows, r]` float32, with a rank `r` of its own. Return the weight with all of
# them merged: a tensor of the weight's dtype. Some adapters are small. Together they are not.
#
# <details><summary>Hint 1: a question</summary>
# Which numbers can bf16 hold between 1 and 2? What is 1 + 0.003 there, and five times in a row?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Rounding is not linear: a sum of rounded numbers is not the rounded sum.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A copy of the weight in another dtype, a loop with one line in it, and a last line.
# </details>


# %% tags=["exercise"]
def merge(weight: torch.Tensor, adapters: list) -> torch.Tensor:
    """The weight with all adapters merged, in its own dtype. adapters: (A [r, columns], B [rows, r], alpha) each."""
    # BEGIN SOLUTION
    total = weight.float()
    for a, b, alpha in adapters:
        total = total + alpha / a.shape[0] * (b @ a)
    return total.to(weight.dtype)
    # END SOLUTION


# %%
check.q4(merge)

# %% [markdown]
# How much of an adapter survives in bf16? Weights near 1, and adapters of falling size. **Look for** the size below
# which next to nothing is left.

# %% tags=["hide-input"]
# @title Figure: what rounding leaves of an adapter
if check.q4.passed:
    torch.manual_seed(0)
    weight, a, b = 1 + torch.rand(64, 64), torch.randn(4, 64), torch.randn(64, 4)
    weight = weight.bfloat16()
    sizes = [2.0**-i for i in range(4, 16)]
    changed = []
    for size in sizes:
        change = merge(weight, [(a, size * b / 2, 4.0)]).float() - weight.float()  # b @ a: 4 products, deviation 2
        changed.append(100 * (change != 0).float().mean().item())
    fig, ax = plt.subplots(figsize=(7, 2.6))
    ax.semilogx([size for size in sizes], changed, "o-", base=2, color="#0072B2")
    ax.set(xlabel="standard deviation of B A, beside weights of 1 to 2", ylabel="entries that change, %")
    ax.grid()
    plt.show()

# %% [markdown] tags=["solution"]
# **Once, at the end.** bf16 keeps 8 significant bits: between 1 and 2 its numbers are 1/128 apart, and anything below
# half of that, 2⁻⁸, is gone. A small adapter is easily of that size. That's why the package keeps weights in float32,
# adds there, and rounds once for the engine. **Rank and alpha.** Each adapter is scaled by its own `alpha / r`. If you
# join them into one of larger rank, the scale goes into `B`.

# %% [markdown]
# ## q5 · When does RL start?
#
# ●●●○○ · 20 minutes
#
# A step of RL draws `prompts` problems, each uniformly from the training problems, and `group` answers to each. An
# answer to problem $i$ is right with probability `rates[i]`, float64. A group has a signal if its answers are not all
# right and not all wrong. Until some group has one, nothing changes. Return **the expected number of steps up to and
# including the first one in which at least one group has a signal**, as a number or a tensor without dimensions;
# infinity if there will be none. It must be right to within one percent, even for rates of $10^{-18}$.
#
# <details><summary>Hint 1: a question</summary>
# Nine problems are hopeless and one is answered right half of the time. Is that the same as ten problems with a rate of
# 1/20?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# First one group of one problem, then one group of a random problem, then a step, then the wait: each follows from the
# one before. What happens with probability $s$ each time takes $1/s$ tries.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Four lines, with a mean in the second. For small numbers `torch.log1p` and `torch.expm1` keep the digits that
# `1 - (1 - p) ** n` rounds away. Look at what your formula says for 0 and for 1.
# </details>


# %% tags=["exercise"]
def steps_to_start(rates: torch.Tensor, group: int, prompts: int):
    """Expected steps until a group has a signal, infinity if none ever has. rates: [problems] float64."""
    # BEGIN SOLUTION
    signal = -torch.expm1(group * torch.log1p(-rates)) - rates**group  # of a group of each problem
    of_any = signal.mean().clamp(min=0)  # of a group of a problem that is drawn
    of_step = -torch.expm1(prompts * torch.log1p(-of_any))
    return 1 / of_step.abs()  # without a sign of its zero
    # END SOLUTION


# %%
check.q5(steps_to_start)

# %% [markdown]
# One curve for a base whose problems are all alike, one for a base that solves one problem in a hundred and the
# others never. **Look for** the mean rate at which RL starts within ten steps, and for where the curves part.

# %% tags=["hide-input"]
# @title Figure: the wait for a first signal
if check.q5.passed:
    means = torch.logspace(-7, -1.5, 40, dtype=torch.float64)
    fig, ax = plt.subplots(figsize=(7, 3))
    alike = [float(steps_to_start(p.repeat(100), 8, 16)) for p in means]
    ax.loglog(means, alike, color="#0072B2", label="all problems alike")
    few = [
        float(steps_to_start(torch.cat([(100 * p).clamp(max=1 - 1e-9)[None], torch.zeros(99)]), 8, 16))
        for p in means[means < 0.01]
    ]
    ax.loglog(means[means < 0.01], few, "--", color="#D55E00", label="one in a hundred, the others never")
    ax.axhline(10, color="black", linestyle=":")
    ax.set(xlabel="mean rate of right answers", ylabel="steps to a first signal", title="16 problems × 8 answers")
    ax.legend()
    ax.grid()
    plt.show()

# %% [markdown] tags=["solution"]
# **The mean comes after the curve.** A group of a problem that is solved half of the time has a signal almost surely,
# so half the problems at 0 and half at 1/2 give fewer signals than all of them at 1/4. Two models with the same pass@1
# can start in one step or in ten. The dashed curve turns up at its end: there the one problem is solved more often than
# not, and a group in which all are right has no signal either. **What helps**: for tiny rates the wait is 1 / (rate ×
# group × prompts), so it depends only on how many answers there are in all, not on how many are in one group. Ten times
# as many answers buy a factor of ten; a few steps of SFT bought far more in the lesson. **What the formula leaves
# out**: the first signal is one right answer in one group. Learning may start with it and still stall.
