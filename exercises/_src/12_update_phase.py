# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# Seven exercises for [lesson 12](../notebooks/12_update_phase.ipynb): find the wrong gradient among three and the
# largest micro-batch that fits, compute log-prob and entropy without all logits, trace a leak in a packed row, count
# the steps until a bf16 weight moves, and fix a norm and a kernel. The first and the last four are puzzles. Write your
# code where it says `# YOUR CODE HERE`, then run the cell below it. Six are functions that need `torch` alone. The
# seventh is a kernel: the check compiles it and runs it in the interpreter, then on your GPU, if there is one. It needs
# CuTe DSL (Linux: `pip install "rlcourse[kernels]"`).
#
# Each exercise has three hints: a question, the idea, and the shape of the answer.

# %%
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlcourse.course.checks import nb12 as check
from rlcourse.kernels.arguments import Argument
from rlcourse.kernels.dsl import Float32, cute
from rlcourse.kernels.toolchain import simulate

torch.manual_seed(0)
print("ready")

# %% [markdown]
# ## q1 · One wrong gradient among three
#
# ●●○○○ · 15 minutes
#
# Three colleagues each wrote a function of `n` numbers and its backward pass. One of the three gradients is wrong in
# one number, by at least 6% of that gradient's largest number. You don't have the code, only measurements: values of
# the functions around the point, in float32.
#
# - `steps` `[S]` float64: step sizes $h$, from large to small;
# - `plus`, `minus` `[3, S, n]` float32: for each function, each step $h$ and each number $i$, the function's value when
#   number $i$ is moved by $+h$, and by $-h$;
# - `claims` `[3, n]` float32: the gradients that the colleagues' code returned.
#
# Return which one is wrong: 0, 1 or 2. The functions may differ greatly in size, be curved, or be far from zero, each
# in its own way.
#
# <details><summary>Hint 1: a question</summary>
# Print one number's finite differences for all steps. Which of them would you believe, and why not the others?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# A right gradient fits the differences at *some* step, where neither curvature nor rounding is large. A wrong one fits
# at none. Which step that is differs from function to function, and you need not know it.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Differences `[3, S, n]`; from them, for each function and step, one number that says how bad the worst place is,
# relative to that gradient's size; then two reductions of different kinds.
# </details>


# %% tags=["exercise"]
def wrong_gradient(steps: torch.Tensor, plus: torch.Tensor, minus: torch.Tensor, claims: torch.Tensor) -> int:
    """Which of three claims [3, n] is not the gradient. steps: [S]; plus, minus: [3, S, n]."""
    # BEGIN SOLUTION
    slopes = (plus.double() - minus.double()) / (2 * steps[:, None])
    off = (slopes - claims[:, None]).abs().amax(2) / claims.abs().amax(1, keepdim=True)
    return int(off.amin(1).argmax())
    # END SOLUTION


# %%
check.q1(wrong_gradient)

# %% [markdown] tags=["solution"]
# **The best step is not known, and need not be.** At its best step each right gradient is off by rounding and curvature
# alone, much less than the mistake; the wrong one is off by its mistake at every step. So take the *worst* number (a
# mistake may be in one place), at the *best* step, relative to the gradient's *size*. With more numbers than these, a
# mean would hide a single wrong one.

# %% [markdown]
# ## q2 · What fits?
#
# ●●●○○ · 20 minutes
#
# A GPU with 24 GB. How many rows may a micro-batch have? Count the bytes like this:
#
# - for each of `n` parameters: its weight, its gradient (which waits from earlier micro-batches) and AdamW's two
#   moments, all float32, and the engine's copy in bf16;
# - activations: a row has `prompt` + `answer` tokens, and each token keeps `kept` bytes in each of `layers` layers.
#   With `again` (checkpointing) each token keeps 4 × `hidden` bytes in each layer, plus `kept` bytes for **one** layer,
#   the one being recomputed;
# - logits: only the answers' tokens have them, at most `chunk` tokens at a time: `vocabulary` numbers per token, in
#   float32, in three copies.
#
# Return the largest number of rows that need at most `budget` bytes, or 0 if not even one fits. `budget` always covers
# what doesn't depend on the rows.
#
# <details><summary>Hint 1: a question</summary>
# Which part stops growing at some number of rows? What does one row cost before, what after?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Write the bytes as a function of the rows first. It only grows with the rows, so you can search. Or solve it on both
# sides of the bend.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# An inner function from rows to bytes, with three summands, one of which has two cases and one a `min`; then a loop.
# </details>


# %% tags=["exercise"]
def rows_that_fit(
    budget: int, n: int, layers: int, kept: int, hidden: int, vocabulary: int, prompt: int, answer: int, chunk: int,
    again: bool,
) -> int:  # fmt: skip
    """The largest number of rows of a micro-batch that needs at most `budget` bytes."""

    # BEGIN SOLUTION
    def needed(rows: int) -> int:
        tokens = rows * (prompt + answer)
        activations = tokens * (4 * hidden * layers + kept) if again else tokens * kept * layers
        return (4 + 4 + 8 + 2) * n + activations + 3 * 4 * vocabulary * min(chunk, rows * answer)

    rows = 0
    while needed(rows + 1) <= budget:
        rows += 1
    return rows
    # END SOLUTION


# %%
check.q2(rows_that_fit)

# %% [markdown]
# Your function for Qwen2.5-0.5B's shape on 24 GB, over the chunk: with and without checkpointing. **Look for** where
# the chunk matters, and where it doesn't.

# %% tags=["hide-input"]
# @title Figure: rows of a micro-batch on 24 GB
if check.q2.passed:
    chunks = [2**k for k in range(6, 15)]
    fig, ax = plt.subplots(figsize=(7, 2.8))
    for again, color, style in ((False, "#56B4E9", "-"), (True, "#E69F00", "--")):
        sizes = 494_032_768, 24, 70_000, 896, 151_936, 150, 300
        rows = [rows_that_fit(24 * 10**9, *sizes, chunk, again) for chunk in chunks]
        ax.plot(chunks, rows, color=color, linestyle=style, marker="o", label="recomputed" if again else "kept")
    ax.set(xscale="log", yscale="log", xlabel="chunk of the head, tokens", ylabel="rows")
    ax.legend()
    ax.grid()
    plt.show()

# %% [markdown] tags=["solution"]
# **A bend.** Until there are `chunk` answer tokens, each row adds its own logits; beyond, none. So with a small chunk a
# row costs its activations only, and checkpointing allows about ten times the rows. With a large chunk the logits take
# the room, and checkpointing only about doubles the rows. The two work best together, and the `a10g` preset uses both.

# %% [markdown]
# ## q3 · Log-prob and entropy without logits
#
# ●●●●○ · 30 minutes
#
# Many losses have a term for the entropy, and sampling has a temperature $\tau$. Let $p = \text{softmax}(\text{hidden}
# \cdot \text{head}^\top / \tau)$ and
#
# $$\mathcal{L} = \sum_t a_t \log p_t(y_t) + b \sum_t H_t , \qquad H_t = -\sum_j p_{t,j} \log p_{t,j} .$$
#
# Return the gradients of $\mathcal{L}$ with respect to `hidden` `[n, d]` and `head` `[V, d]`, in float32 or better,
# without autograd, and with logits for at most `chunk` tokens at a time. The check tests the numbers and looks at the
# tensors that you make; the cell after it shows the largest.
#
# <details><summary>Hint 1: a question</summary>
# What is the sum of the gradient over all logits of one token, and why must it be that?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Leave $\tau$ aside at first. The slope of $\log p(y)$ with respect to the logits is one-hot minus $p$. That of $H$
# with respect to logit $j$ is $-p_j (\log p_j + H)$: all probabilities depend on each logit, which brings in the $H$.
# At the end divide by $\tau$.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A loop over chunks that computes log-probs, probabilities and entropies; one tensor of slopes, a sum of two terms; two
# products, one of which fills in rows while the other adds up.
# </details>


# %% tags=["exercise"]
def gradients(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, a: torch.Tensor, b: float, temperature: float,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of hidden [n, d] and head [V, d]. targets: [n] int64; a: [n]."""
    # BEGIN SOLUTION
    d_hidden, d_head = torch.zeros_like(hidden), torch.zeros_like(head)
    for at in torch.arange(len(hidden)).split(chunk):
        logp = (hidden[at] @ head.T / temperature).log_softmax(1)
        p = logp.exp()
        entropy = -(p * logp).sum(1, keepdim=True)
        slope = -a[at, None] * p - b * p * (logp + entropy)
        slope[torch.arange(len(at)), targets[at]] += a[at]
        slope /= temperature
        d_hidden[at] = slope @ head
        d_head += slope.T @ hidden[at]
    return d_hidden, d_head
    # END SOLUTION


# %%
check.q3(gradients)


# %%
class Largest(TorchDispatchMode):
    """Remembers the most numbers of one tensor that was made."""

    numbers = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        for t in made if isinstance(made, tuple | list) else [made]:
            if isinstance(t, torch.Tensor):
                self.numbers = max(self.numbers, t.numel())
        return made


if check.q3.passed:
    hidden, head, targets = torch.randn(400, 8), torch.randn(1000, 8), torch.randint(1000, (400,))
    with Largest() as seen:
        gradients(hidden, head, targets, torch.randn(400), 0.1, 0.9, 20)
    print(f"largest tensor: {seen.numbers:,} numbers; a chunk's logits {20 * 1000:,}; all logits {400 * 1000:,}")

# %% [markdown] tags=["solution"]
# **One tensor of slopes.** For each token, its sum over the vocabulary is 0 for both terms, since adding a number to
# all logits changes no probability. That's a test without a reference. **The forgotten half.** If you take the factor
# $p$ in $-\sum p \log p$ for a constant, you get a slope of exactly 0: an entropy bonus that does nothing, and no
# error.

# %% [markdown]
# ## q4 · What leaks?
#
# ●●●●○ · 25 minutes
#
# A packed row holds several answers, and its attention mask is wrong in a few places. Which log-probs are spoiled? What
# a token has seen in one layer, others see through it in the next, so a leak spreads, but only so far.
#
# - `positions` `[L]` int64: an answer begins wherever this is 0; the first token of the row has position 0;
# - `seen` `[L, L]` bool: in each layer token $i$ sees token $j$. Each sees itself;
# - `learned` `[L]` bool: the tokens whose log-probs are in the loss;
# - `layers`: how many layers there are.
#
# A layer spoils a token's state if in it the token sees a token of another answer, or a state that was spoiled before
# that layer. Once spoiled, a state stays spoiled. The log-prob of token $t$ is computed from the last state of token
# $t-1$: it's spoiled if that state is, or if token $t-1$ belongs to another answer. Return bool `[L]`: the learned
# tokens whose log-probs are spoiled. Nothing predicts token 0, so it's never among them.
#
# <details><summary>Hint 1: a question</summary>
# Each token sees itself and the one before, token 3 also sees another answer, and there are two layers: how far does
# the leak get?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Number the answers first. A layer is a product of a boolean matrix with the vector of spoiled states, plus what comes
# in from other answers. Update all states at once: what a layer spoils is seen only in the next one.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Owners by one running sum; a matrix of "sees a foreign token"; a loop over layers with one line; at the end a shift by
# one with an `or` and an `and`.
# </details>


# %% tags=["exercise"]
def spoiled(positions: torch.Tensor, seen: torch.Tensor, learned: torch.Tensor, layers: int) -> torch.Tensor:
    """Which learned tokens' log-probs are spoiled, bool [L]. positions: [L]; seen: bool [L, L]; learned: bool [L]."""
    # BEGIN SOLUTION
    owner = (positions == 0).cumsum(0)
    foreign = (seen & (owner[:, None] != owner)).any(1)
    bad = torch.zeros_like(learned)
    for _ in range(layers):
        bad = foreign | (seen & bad).any(1)
    result = torch.zeros_like(learned)
    result[1:] = (bad[:-1] | (owner[1:] != owner[:-1])) & learned[1:]
    return result
    # END SOLUTION


# %%
check.q4(spoiled)

# %% [markdown]
# Two answers of 40 tokens each; each token sees itself and the two before; and there is one leak into the second
# answer. **Look for** how far each layer carries it.

# %% tags=["hide-input"]
# @title Figure: one leak, layer by layer
if check.q4.passed:
    place = torch.arange(80)
    back = place[:, None] - place
    seen = (back >= 0) & (back < 3) & (place[:, None] // 40 == place // 40)
    seen[45, 10] = True
    picture = torch.stack([spoiled(place % 40, seen, torch.ones(80, dtype=torch.bool), n) for n in range(1, 17)])
    fig, ax = plt.subplots(figsize=(8, 2.6))
    ax.imshow(picture, aspect="auto", cmap="Oranges", vmax=1.5, extent=(0, 80, 16.5, 0.5))
    ax.set(
        xlabel="token",
        ylabel="layers",
        yticks=range(1, 17, 3),
        title="Spoiled log-probs: the leak, and B's first token in any case",
    )
    plt.show()

# %% [markdown] tags=["solution"]
# **A front that moves.** With a window of three tokens a leak gets two tokens further in each layer; with full causal
# attention two layers carry it to the rest of the answer. **Two traps.** The shift: a token that sees too much spoils
# the prediction of the *next* one. And a text's first token, which no mask protects: it must not be learned in a packed
# row. If it's a prompt's, it isn't learned anyway.

# %% [markdown]
# ## q5 · How many steps until this weight moves?
#
# ●●●○○ · 25 minutes
#
# A colleague keeps weights in bf16 and wants to do without the float32 master. "I add up the steps exactly, beside each
# weight, and apply their sum as soon as it's enough to move the weight." How many steps must she collect?
#
# `weights` `[n]` bf16, not 0; `step`: what each optimizer step adds, of either sign. Return int64 `[n]`: the least $k
# \ge 1$ for which $w + k \cdot \text{step}$, rounded to bf16, is not $w$. Rounding is to the nearest number, and on a
# tie to the one whose last bit is 0.
#
# One tip: `weights.view(torch.int16)` gives each weight's bits as an integer. Add one to it, and the weight becomes the
# next bf16 number away from 0, whatever its sign.
#
# <details><summary>Hint 1: a question</summary>
# How far is it from 1 to the next bf16 number above it, and how far to the next below?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# A weight moves when the sum passes halfway to its neighbour in the direction of the step. At exactly halfway it moves
# only if its own last bit is 1.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# The neighbour by whole numbers, plus or minus one by two signs; half of the distance in float64, over the size of the
# step; rounded up in one case, and down plus one in the other. Or a search, with the rounding left to torch.
# </details>


# %% tags=["exercise"]
def steps_to_move(weights: torch.Tensor, step: float) -> torch.Tensor:
    """Least number of steps, int64 [n], whose sum moves a weight. weights: bf16 [n]; step: float, not 0."""
    # BEGIN SOLUTION
    bits = weights.view(torch.int16)
    outwards = (weights > 0) == (step > 0)
    neighbour = torch.where(outwards, bits + 1, bits - 1).view(torch.bfloat16)
    half = (neighbour.double() - weights.double()).abs() / 2 / abs(step)
    return torch.where(bits % 2 == 0, half.floor() + 1, half.ceil()).long()
    # END SOLUTION


# %%
check.q5(steps_to_move)

# %% [markdown]
# Steps of 1e-6 and weights of every size. **Look for** the weights that move at every step, and for those that don't
# move once in 200 steps.

# %% tags=["hide-input"]
# @title Figure: steps until a bf16 weight moves
if check.q5.passed:
    sizes = torch.logspace(-5, 0, 400).bfloat16()
    fig, ax = plt.subplots(figsize=(7, 2.8))
    ax.plot(sizes.float(), steps_to_move(sizes, 1e-6), color="#0072B2")
    ax.axhline(200, color="black", linestyle=":", label="200 steps")
    ax.set(xscale="log", yscale="log", xlabel="weight", ylabel="steps")
    ax.legend()
    ax.grid()
    plt.show()

# %% [markdown] tags=["solution"]
# **Half of the distance, in the direction of the step.** Numbers are twice as dense below a power of two as above it,
# so there the two directions differ. **Ties** go to the even number: an even weight stays, an odd one moves. **Her
# idea** needs the collected sum in more than bf16, for each weight: with a bf16 weight and 16 bits of remainder beside
# it she has the float32 master again, cut in two. That is how some optimizers store it.

# %% [markdown]
# ## q6 · A norm to mend
#
# ●●●○○ · 20 minutes
#
# Some models scale by 1 + weight in a norm, so that weights begin at 0, and normalise each head separately. This is a
# colleague's backward pass, for `x` `[rows, heads, d]` and one `weight` `[d]` for all heads:


# %%
def hers(x, weight, g, eps):
    s = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    along = (g * x).sum(-1, keepdim=True)
    dx = s * g * (1 + weight) - x * s**3 * along / x.shape[-1]
    return dx, (s * g * x).sum((0, 1))


x, weight, g = torch.randn(4, 2, 8).double().requires_grad_(), torch.zeros(8).double(), torch.randn(4, 2, 8).double()
y = x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * (1 + weight)
(expected,) = torch.autograd.grad(y, x, g)
print("her test, with the weights of a new model:", torch.allclose(hers(x.detach(), weight, g, 1e-3)[0], expected))

# %% [markdown]
# Her test passes, but fine-tuning improves less than it should. Find the bug, and write a correct version: the
# gradients of `x` and of `weight`, from `g` `[rows, heads, d]`, the gradient of the loss with respect to $y = s \, (1 +
# w) \odot x$.
#
# <details><summary>Hint 1: a question</summary>
# For which weights is her test blind?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# The loss reaches $s$ through every number of $y$. What is the slope of $y_j$ with
# respect to $s$?
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Her lines, one of which has one more factor.
# </details>


# %% tags=["exercise"]
def mended(x: torch.Tensor, weight: torch.Tensor, g: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x [rows, heads, d] and weight [d]."""
    # BEGIN SOLUTION
    s = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    slope = g * (1 + weight)
    along = (slope * x).sum(-1, keepdim=True)
    return s * slope - x * s**3 * along / x.shape[-1], (s * g * x).sum((0, 1))
    # END SOLUTION


# %%
check.q6(mended)

# %% [markdown]
# How wrong was hers, as the weights leave 0?

# %%
if check.q6.passed:
    x, g = torch.randn(64, 2, 32), torch.randn(64, 2, 32)
    for size in (0.0, 0.01, 0.1, 1.0):
        weight = size * torch.randn(32)
        right, wrong = mended(x, weight, g, 1e-6)[0], hers(x, weight, g, 1e-6)[0]
        print(f"weights of size {size:4}: off by {(wrong - right).norm() / right.norm():.2%}")

# %% [markdown] tags=["solution"]
# **A test that cannot see the fault.** With weights of 0 the missing factor is 1. Test with numbers that are neither 0
# nor 1, and all different. The error is small for small weights, so the loss still falls, just less than it could. Only
# a test of the gradient finds such a bug.

# %% [markdown]
# ## q7 · A kernel to mend
#
# ●●●●○ · 25 minutes
#
# A loss over all tokens of the vocabulary, such as an entropy or a distance to another model's probabilities, has a
# gradient $g_j$ with respect to each probability $p_j$. For the logits $z$ this gives, like $dS$ in section 7 of the
# lesson,
#
# $$\frac{\partial \mathcal{L}}{\partial z_j} = p_j \, \Bigl(g_j - \sum_k p_k \, g_k\Bigr) , \qquad p_j = e^{z_j -
# \text{log\_sum}} .$$
#
# The forward pass has left `log_sum` for each row. A colleague's kernel gives each row to a warp:


# %%
@dataclass(frozen=True)
class Hers:
    """dz [rows, n] from z [rows, n], log_sum [rows] and g [rows, n]; float32. A warp does a row, a block two."""

    threads: int = 64

    def arguments(self) -> tuple:
        z, g, dz = (
            Argument(name, "float32", ("rows", "n"), free=1, align=4, output=name == "dz") for name in ("z", "g", "dz")
        )
        return z, Argument("log_sum", "float32", ("rows",), align=4), g, dz

    def grid(self, z, log_sum, g, dz):
        return -(-z.shape[0] // 2), 1, 1

    @cute.jit
    def __call__(self, z: cute.Tensor, log_sum: cute.Tensor, g: cute.Tensor, dz: cute.Tensor, stream):
        launched = self.kernel(z, log_sum, g, dz)
        launched.launch(grid=self.grid(z, log_sum, g, dz), block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, z: cute.Tensor, log_sum: cute.Tensor, g: cute.Tensor, dz: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row, lane = 2 * block + thread // 32, thread % 32
        mean, mass = Float32(0.0), cute.math.exp(log_sum[row])
        for j in range(lane, z.shape[1], 32):
            p = cute.math.exp(z[row, j]) / mass
            mean += cute.arch.warp_reduction_sum(p * g[row, j])
        for j in range(lane, z.shape[1], 32):
            p = cute.math.exp(z[row, j]) / mass
            dz[row, j] = p * (g[row, j] - mean)


def her_test(rows: int, n: int) -> str:
    z, g = torch.randn(rows, n), torch.randn(rows, n)
    dz, wide = torch.full_like(z, torch.nan), z.double().requires_grad_()
    (expected,) = torch.autograd.grad(wide.softmax(1), wide, g.double())
    try:
        simulate(Hers(), z, z.logsumexp(1), g, dz)
    except Exception as error:
        return str(error)
    return f"off by {(dz - expected).abs().max():.0e}"


print("her test, 4 rows of 64:", her_test(4, 64))

# %% [markdown]
# Her test passes, yet her kernel has **three** bugs. Fix them: it should work for any number of rows, any `n`, and
# logits of any size. Call `her_test` with other numbers; if the interpreter stops, it says why.
#
# <details><summary>Hint 1: a question</summary>
# Which two properties do 4 rows of 64 have that 3 rows of 70 lack? And how large is $e^{z}$ for $z = 100$ in float32?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# A sum over a warp is a shuffle: all 32 lanes must reach it, equally often. How often does lane 31 run through her loop
# if `n` is 70? The second warp of the last block may have no row. And you can subtract two large numbers before you
# exponentiate.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# One condition around everything; a first loop that sums a lane's own part, and one line after it that sums over lanes;
# the exponential of a difference, and no division.
# </details>


# %% tags=["exercise"]
@dataclass(frozen=True)
class SoftmaxBackward:
    """dz [rows, n] from z [rows, n], log_sum [rows] and g [rows, n]; float32. A warp does a row, a block two."""

    threads: int = 64

    def arguments(self) -> tuple:
        z, g, dz = (
            Argument(name, "float32", ("rows", "n"), free=1, align=4, output=name == "dz") for name in ("z", "g", "dz")
        )
        return z, Argument("log_sum", "float32", ("rows",), align=4), g, dz

    def grid(self, z, log_sum, g, dz):
        return -(-z.shape[0] // 2), 1, 1

    @cute.jit
    def __call__(self, z: cute.Tensor, log_sum: cute.Tensor, g: cute.Tensor, dz: cute.Tensor, stream):
        launched = self.kernel(z, log_sum, g, dz)
        launched.launch(grid=self.grid(z, log_sum, g, dz), block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, z: cute.Tensor, log_sum: cute.Tensor, g: cute.Tensor, dz: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row, lane = 2 * block + thread // 32, thread % 32
        # BEGIN SOLUTION
        if row < z.shape[0]:
            mean = Float32(0.0)
            for j in range(lane, z.shape[1], 32):
                mean += cute.math.exp(z[row, j] - log_sum[row]) * g[row, j]
            mean = cute.arch.warp_reduction_sum(mean)
            for j in range(lane, z.shape[1], 32):
                dz[row, j] = cute.math.exp(z[row, j] - log_sum[row]) * (g[row, j] - mean)
        # END SOLUTION


# %%
check.q7(SoftmaxBackward)

# %% [markdown] tags=["solution"]
# **The shuffle in the loop.** With 64 numbers each lane runs through it twice, and adding two warp sums is right. With
# 70, six lanes come a third time and wait for 26 that never come: the interpreter says so, while on a GPU the result is
# undefined. The condition on the row is safe, since all lanes of a warp have the same row. **The missing row.** An odd
# number of rows leaves the last block with one warp too many. **The exponential.** $e^{z}$ is infinite in float32 from
# $z = 89$ on, and infinity over infinity is nan; far below 0 it's 0 over 0. Subtract first, and no exponential exceeds
# 1.
#
# Her one test size found none of the three.
