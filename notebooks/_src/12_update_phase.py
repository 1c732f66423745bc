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
# - to add up an update's memory yourself and compare the sum with recorded peaks;
# - to compute log-probs and their gradient without ever holding all logits, and to recompute activations;
# - to waste less of a batch on padding;
# - to write the backward pass of a norm and of attention by hand, the norm's also as a kernel;
# - what happens to small updates when weights are kept in 16 bits.
#
# You need [lesson 06](06_where_time_goes.ipynb) for floors, [lesson 08](08_first_kernels.ipynb) for kernels, and the
# online softmax of [lesson 09](09_decode_attention.ipynb), section 2. Sections 1–5, 6–7 and 8 each stand
# alone.
#
# Lessons 07 to 11 made the rollout fast. Now for the update, and a goal: train a model of half a billion parameters on
# a 24 GB GPU. Done naively, 64 short answers are already too many. With a vocabulary of
# 151,936, one float32 tensor of their logits takes 10 GB, and autograd wants three of that size. The way out is always
# the same question: *do we have to keep this?*

# %%
import importlib.util
import inspect
import itertools
import tempfile
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from IPython.display import Code, Markdown, display
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from ptx_interpreter import PTXError
from rlcourse.batch import micro_batches
from rlcourse.config import make_config
from rlcourse.course import pick
from rlcourse.course.kernels import rms_norm_backward as norm_kernel
from rlcourse.course.kernels.interpret import run
from rlcourse.course.widgets import bet, explorer
from rlcourse.logprobs import chunked_logprobs
from rlcourse.measure.plots import BLACK, BLUE, GREEN, ORANGE, SKY, VERMILION
from rlcourse.measure.records import load_record, provenance
from rlcourse.measure.shapes import model_shape, parameters
from rlcourse.memory import activation_bytes
from rlcourse.policy import load_policy
from rlcourse.sampling import Sampling
from rlcourse.sft.data import Example
from rlcourse.sft.packing import plan_rows
from rlcourse.tasks import load_task

policy = load_policy("embedded")
model = policy.model
qwen = model_shape("Qwen/Qwen2.5-0.5B")
small_gpu, large_gpu = make_config("a10g"), make_config("h200")
record = load_record("update", "NVIDIA H200")
update_16, update_64 = record["results"]

# %% [markdown]
# ## 1 · Where a step's time goes
#
# One step with the shape of Qwen2.5-0.5B on an H200, all answers 256 tokens long: a rollout, then an update. **Look
# for** which part grows faster.

# %% tags=["hide-input"]
# @title Figure: rollout and update
exact = load_record("exact", "NVIDIA H200")
steps = {
    row["rows"]: row for row in exact["results"] if row["variant"] == "bitwise-equal" and row["shape"] == "qwen2.5-0.5b"
}
share = {rows: 100 * row["update_s"] / row["step_s"] for rows, row in steps.items()}
names = [f"{rows} answers" for rows in steps]
fig, ax = plt.subplots(figsize=(8, 2.6), layout="constrained")
left = [0.0] * len(steps)
for phase, color in (("rollout", SKY), ("update", VERMILION)):
    widths = [row[f"{phase}_s"] for row in steps.values()]
    bars = ax.barh(names, widths, left=left, color=color, label=phase)
    ax.bar_label(bars, fmt="%.2f", label_type="center", color="white" if phase == "update" else BLACK)
    left = [a + b for a, b in zip(left, widths, strict=True)]
ax.invert_yaxis()
ax.set(xlabel="seconds", title=f"A step, {provenance(exact)}")
ax.legend(loc="upper right")
plt.show()
growth = {phase: steps[256][f"{phase}_s"] / steps[16][f"{phase}_s"] for phase in ("rollout", "update")}

# %% [markdown]
# With 16 times the answers, the rollout takes {{ growth["rollout"]:.1f }} times as long and the update {{
# growth["update"]:.1f }} times. {{ assert share[16] < share[64] < share[256] and share[256] > 55 }} A decode step reads
# all weights, for few rows or many: it's memory-bound. The update sees all tokens at once: it's compute-bound.
#
# ### 6 FLOPs per weight and token
#
# A linear layer multiplies and adds once per weight and token: 2 FLOPs forward. Its backward pass has two matmuls of
# the same size, one for the gradient of its input and one for that of its weight: 4 more. So a model does about **6 ×
# parameters × tokens** FLOPs. Here's PyTorch's count for the embedded model's linear layers:

# %%
rows, length = 4, 50
ids = torch.randint(5, 500, (rows, length))
with FlopCounterMode(display=False) as counter:
    model(ids, use_cache=False).logits.sum().backward()
model.zero_grad()
by_kind = {str(name).removeprefix("aten."): n for name, n in counter.get_flop_counts()["Global"].items()}
linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
counted = by_kind["mm"] + by_kind["addmm"]
print(f"counted {counted:,}   6 x {linear:,} weights x {rows * length} tokens = {6 * linear * rows * length:,}")
assert counted == 6 * linear * rows * length

# %% [markdown]
# They agree (norms, biases and attention itself aren't counted). Divide by the update's seconds and by the GPU's peak,
# and you get the *model FLOPs utilization* (MFU). PaLM divides by the data sheet's peak, we by the rate of a
# large matmul:

# %% tags=["hide-input"]
# @title The MFU of two updates
for row in record["results"]:
    print(
        f"{row['rows']} answers: {row['tflops'] * row['update_s']:4.1f} TFLOP in {1e3 * row['update_s']:3.0f} ms are "
        f"{row['tflops']:.0f} TFLOP/s, {row['tflops'] / row['peak_tflops']:.0%} of a large matmul's "
        f"{row['peak_tflops']:.0f}"
    )

# %% [markdown]
# <small>{{ provenance(record) }}, GSM8K prompts. A prompt counts for each of its answers, though it's computed once
# (section 5).</small>

# %% [markdown]
# ## 2 · A ledger of gigabytes
#
# Qwen2.5-0.5B has {{ parameters(qwen):,d }} parameters. What must be in memory at the worst moment of an update?
# Training keeps the weights in float32, AdamW keeps two moments for each, and the engine keeps a bf16 copy, which the
# trainer's matmuls use as well.

# %% tags=["hide-input"]
# @title Tokens per answer, and answers per micro-batch
asked = [len(policy.prompt(problem.question)) for problem in load_task("minigsm").problems("train")[:512]]
once = sum(asked) / len(asked) / 8 + 256  # tokens per answer: 8 share a prompt, which is computed once (section 5)
rollouts = [torch.tensor(asked[i : i + 32]).repeat_interleave(8) + 256 for i in range(0, 512, 32)]  # prompt and answer
cut = [micro_batches(torch.arange(256), lengths, large_gpu.micro_batch_tokens) for lengths in rollouts]
most = max(len(rows) for rows in itertools.chain(*cut))
print(f"{once:.0f} tokens per answer; a micro-batch has at most {most} of 256 answers")


# %%
def kept_by_a_layer(shape) -> int:
    """Bytes per token that a layer of `rlcourse/exact/layers.py` keeps for its backward pass. float32: the residual
    stream before attention and before the MLP, a sum of squares per 32 channels of each (for the norms), one number per
    head (section 7); bf16: q, k, v, attention's output, and SwiGLU's gate and up projections."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    stream = 2 * (4 * shape.hidden + 4 * shape.hidden // 32)
    return stream + 2 * (q + 2 * kv + q) + 4 * shape.heads + 2 * 2 * shape.intermediate


def ledger(shape, rows: int, width: float, answer: int, micro_rows: int, chunk: int = 16384) -> dict[str, float]:
    """Bytes at the head's backward pass, when all layers' activations are there. width: tokens computed per answer, its
    share of the prompt included; micro_rows: answers in the largest micro-batch; chunk: tokens with logits at once."""
    n, together = parameters(shape), min(rows, micro_rows)
    return {
        "weights, float32": 4 * n,
        "two moments, float32": 8 * n,
        "engine's weights, bf16": 2 * n,
        "gradients, float32": 4 * n if rows > micro_rows else 0,  # of the micro-batches before
        "engine's cache, bf16": rows * width * 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim,
        "activations": together * width * shape.layers * kept_by_a_layer(shape),
        "logits of a chunk, bf16": 2 * min(chunk, together * answer) * shape.vocabulary,
        "head's gradient, float32": 4 * shape.vocabulary * shape.hidden,
    }


for name, size in ledger(qwen, 64, once, 256, most).items():
    print(f"{name:26} {size / 1e9:5.1f} GB")
print(f"{'together':26} {sum(ledger(qwen, 64, once, 256, most).values()) / 1e9:5.1f} GB")

# %% [markdown]
# Why are the gradients 0? The backward pass starts at the head, and frees a layer's activations once it has that
# layer's gradients. The worst moment is at the head: all activations are there, but only the head's gradient. With
# several micro-batches, the first one's gradients stay, and the next one's activations come on top.
#
# Now the recorded peaks of the runs above. 64 answers are one micro-batch of the `h200` preset, and 256 are three. {{
# assert {len(one) for one in cut} == {3} and max(64 * lengths.max() for lengths in rollouts) <=
# large_gpu.micro_batch_tokens }}

# %% tags=["hide-input"]
# @title Your bet
PEAKS = ["4 times as much", "about 60% more", "about a tenth more"]
peak_bet = bet(f"64 answers peak at {steps[64]['peak_memory_bytes'] / 1e9:.0f} GB. And 256 answers?", PEAKS)

# %% tags=["hide-input"]
# @title Figure: the ledger beside recorded peaks
peaks = {rows: row["peak_memory_bytes"] for rows, row in steps.items()}
grown = peaks[256] / peaks[64]
peak_bet.result(min(zip(PEAKS, (4, 1.6, 1.1), strict=True), key=lambda told: abs(told[1] - grown))[0])
fig, ax = plt.subplots(figsize=(9, 3.2), layout="constrained")
shades = (BLUE, SKY, "#999999", VERMILION, "#555555", GREEN, ORANGE, "#F0E442")
ours = {}
for place, rows in enumerate(steps):
    left, parts = 0.0, ledger(qwen, rows, once, 256, most)
    ours[rows] = sum(parts.values())
    for (name, size), color in zip(parts.items(), shades, strict=True):
        ax.barh(place, size / 1e9, 0.6, left=left, color=color, label=None if place else name)
        left += size / 1e9
    peak = steps[rows]["peak_memory_bytes"] / 1e9
    ax.plot([peak, peak], [place - 0.4, place + 0.4], color=BLACK, linewidth=2.5)
    ax.text(peak + 0.4, place, f"recorded {peak:.1f}", va="center")
ax.set_yticks(range(len(steps)), [f"{rows} answers" for rows in steps])
ax.axvline(24, color=BLACK, linestyle=":", linewidth=1.2)
ax.text(24.4, -0.55, "24 GB", va="center", fontsize=9)
ax.set(xlabel="GB", xlim=(0, 52), ylim=(2.5, -0.7), title=f"Counted, and the peak; {provenance(exact)}")
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
plt.show()
few = ledger(qwen, 64, once, 256, most)
missing = {rows: 100 * (1 - ours[rows] / peaks[rows]) for rows in steps}

# %% [markdown]
# Four times the answers, and {{ grown:.2f }} times the memory, because the largest micro-batch only grew from 64
# answers to {{ most }}. {{ assert grown < 1.75 and most < 128 }} **Peak memory follows the micro-batch, not the
# batch**: only the summed gradients stay between micro-batches.
#
# So 64 answers, at {{ peaks[64] / 1e9:.1f }} GB, just miss our 24 (dotted). {{ assert 24e9 < peaks[64] < 27e9 }} Our
# ledger is at most {{ max(missing.values()):.0f }}% too low, good enough to show where to save: {{ assert 0 <
# min(missing.values()) and max(missing.values()) < 10 }} {{ 100 * few["activations"] / ours[64]:.0f }}% is activations
# and {{ 100 * few["logits of a chunk, bf16"] / ours[64]:.0f }}% logits.
#
# ## 3 · Log-probs without all the logits
#
# All logits of 64 answers would take {{ 4 * 64 * 256 * qwen.vocabulary / 1e9:.0f }} GB in float32, and so would the
# softmax and its gradient. But the loss needs only one number per token, $\log p(y) = z_y - \log \sum_j e^{z_j}$, where
# $z_j$ is the logit of token $j$ of the vocabulary and $y$ the sampled token. With $g$ the gradient of the loss with
# respect to that log-prob,
#
# $$\frac{\partial \mathcal{L}}{\partial z_j} = g \, ([j = y] - p_j),$$
#
# **one-hot minus probability**. So take a chunk of tokens, compute its logits, keep each token's log-prob and its log
# of the sum, and throw the logits away. The backward pass recomputes them.


# %%
class LogProbs(torch.autograd.Function):
    """log p [n] of targets [n], from hidden [n, d] and head [vocabulary, d]; logits of `chunk` tokens at a time."""

    @staticmethod
    def forward(ctx, hidden, head, targets, chunk):
        pieces = []
        for h, y in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            logits = h @ head.T
            pieces.append((logits.gather(1, y[:, None])[:, 0], logits.logsumexp(1)))
        chosen, log_mass = (torch.cat(part) for part in zip(*pieces, strict=True))
        ctx.save_for_backward(hidden, head, targets, log_mass)
        ctx.chunk = chunk
        return chosen - log_mass

    @staticmethod
    def backward(ctx, gradient):
        hidden, head, targets, log_mass = ctx.saved_tensors
        d_hidden, d_head = torch.empty_like(hidden), torch.zeros_like(head)
        for at in torch.arange(len(hidden)).split(ctx.chunk):
            slope = -(hidden[at] @ head.T - log_mass[at, None]).exp_()  # -p, from logits that are computed again
            slope[torch.arange(len(at)), targets[at]] += 1
            slope *= gradient[at, None]
            d_hidden[at] = slope @ head
            d_head += slope.T @ hidden[at]
        return d_hidden, d_head, None, None


# %% [markdown]
# Is it the same loss *and* the same gradient? With a right loss and a wrong gradient, training may look fine and
# just learn more slowly. We compare with plain autograd in float64, so that rounding hides nothing.

# %%
torch.manual_seed(0)
n, d, vocabulary = 50, 8, 300
inputs = torch.randn(n, d).double(), torch.randn(vocabulary, d).double()
targets, advantages = torch.randint(vocabulary, (n,)), torch.randn(n).double()


def loss_and_gradients(logprobs) -> list[torch.Tensor]:
    """REINFORCE's loss, and its gradients for the last hidden states and the head."""
    hidden, head = (t.clone().requires_grad_() for t in inputs)
    loss = -(advantages * logprobs(hidden, head)).mean()
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, head))]


plain = loss_and_gradients(lambda h, w: (h @ w.T).log_softmax(-1)[torch.arange(n), targets])
ways = {f"ours, chunks of {c}": lambda h, w, c=c: LogProbs.apply(h, w, targets, c) for c in (1, 7, 16, 50)}
ways["the package's, 16"] = lambda h, w: chunked_logprobs(h, w, targets, Sampling(), 16)
for name, way in ways.items():
    apart = [(a - b).abs().max().item() for a, b in zip(loss_and_gradients(way), plain, strict=True)]
    print(f"{name:20} loss off by {apart[0]:.0e}, gradients by {apart[1]:.0e} and {apart[2]:.0e}")
    assert max(apart) < (1e-12 if name.startswith("ours") else 1e-5)

# %% [markdown]
# And does it save the memory it promises? A *dispatch mode* sees every tensor that any operation makes.


# %%
class Largest(TorchDispatchMode):
    """Remembers the size in bytes of the largest tensor that any operation made."""

    bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        for t in made if isinstance(made, tuple | list) else [made]:
            if isinstance(t, torch.Tensor):
                self.bytes = max(self.bytes, t.numel() * t.element_size())
        return made


for name, way in {
    "all logits at once": lambda h, w: (h @ w.T).log_softmax(-1)[torch.arange(n), targets],
    **ways,
}.items():
    with Largest() as seen:
        loss_and_gradients(way)
    print(f"{name:20} largest tensor {seen.bytes:7,} bytes")
print(f"{'the head itself':20}                {inputs[1].nbytes:7,} bytes")

# %% [markdown]
# With small chunks the largest tensor is the head's gradient, with larger ones a chunk's logits.
#
# And the time? Forward and backward are three matmuls, and recomputing the logits makes it four: 4/3 of the FLOPs. We
# timed Qwen's head in plain PyTorch on an H200.

# %% tags=["hide-input"]
# @title Your bet
price_bet = bet(
    "32,768 tokens in chunks of 1,024 rather than all at once: "
    "how much longer do the log-probs and their gradient take?",
    (-50, 200, 1), "%",
)  # fmt: skip

# %% tags=["hide-input"]
# @title Figure: log-probs and their gradient in chunks
chunks = load_record("logprobs", "NVIDIA H200")
measured = {row["variant"]: row for row in chunks["results"]}
whole, ours_2048 = measured["all at once"], measured["exact, chunks of 2048"]
price = {name: row["seconds"] / whole["seconds"] for name, row in measured.items()}
less = {name: whole["peak_memory_bytes"] / row["peak_memory_bytes"] for name, row in measured.items()}
price_bet.result(round(100 * (price["chunks of 1024"] - 1)))
fig, ax = plt.subplots(figsize=(7.5, 2.8), layout="constrained")
for exact_ones, color, label in ((False, VERMILION, "plain PyTorch"), (True, BLUE, "the H200 preset's pass")):
    named = {name: row for name, row in measured.items() if name.startswith("exact") == exact_ones}
    points = [(row["peak_memory_bytes"] / 1e9, 1e3 * row["seconds"]) for row in named.values()]
    ax.plot(*zip(*points, strict=True), "o-", color=color, label=label)
    for name, point in zip(named, points, strict=True):
        told = f"{int(name.split()[-1]):,}" if "of" in name else name
        ax.annotate(told, point, (0, 7), textcoords="offset points", ha="center", fontsize=9)
ax.set(xscale="log", xlabel="peak memory, GB", ylabel="ms", ylim=(0, 225), xlim=(0.7, 90))
ax.set_xticks((1, 2, 5, 10, 20, 50), ("1", "2", "5", "10", "20", "50"))
tokens = chunks["setup"]["rows"] * chunks["setup"]["length"]
ax.set_title(f"Each point is a chunk size; {tokens:,} tokens, {provenance(chunks)}", fontsize=11)
ax.legend(loc="lower right")
ax.grid()
plt.show()

# %% [markdown]
# In plain PyTorch, chunks of 1,024 need 1/{{ less["chunks of 1024"]:.0f }} of the memory and {{ 100 * price["chunks of
# 1024"] - 100:.0f }}% more time, not a third more. Recomputed logits are also written and read again, and each chunk
# adds to a gradient of the whole head. So in plain PyTorch take **the largest chunk that fits**. {{ assert 1.4 <
# price["chunks of 4096"] < price["chunks of 1024"] < 3 }}
#
# Better still, move fewer bytes. The H200 preset's pass (blue) leaves its logits in bf16 and overwrites them with the
# gradient. It recomputes as much and still beats plain PyTorch *all at once*: in chunks of 2,048 it takes {{ 100 -
# 100 * price["exact, chunks of 2048"]:.0f }}% less time and 1/{{ less["exact, chunks of 2048"]:.0f }} of the memory.
# {{ assert ours_2048["seconds"] < 0.8 * whole["seconds"] }}
#
# ## 4 · Recomputing activations
#
# In the forward pass each layer keeps what its backward pass will need. The alternative is to keep only each layer's
# input, and to run the layer again when its gradient is due (Chen et al. 2016). This is *gradient checkpointing*;
# PyTorch's `checkpoint` does it for any function, and a *hook* shows us each tensor that's kept.


# %%
def kept_bytes(compute) -> int:
    """Bytes that a forward pass keeps for its backward pass, besides the weights. Shared memory counts once."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def note(t: torch.Tensor) -> torch.Tensor:
        memory = t.untyped_storage()
        if memory.data_ptr() not in weights:
            kept[memory.data_ptr()] = memory.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        result = compute()
    del result
    return sum(kept.values())


# %%
rows, length = 8, pick(64, 128)
ids = torch.randint(5, 500, (rows, length))
trunk, held, gradients = model.get_decoder(), {}, {}
for again in (False, True):
    for layer in trunk.layers if again else []:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    held[again] = kept_bytes(lambda: trunk(input_ids=ids, use_cache=False).last_hidden_state)
    with FlopCounterMode(display=False) as counter:
        trunk(input_ids=ids, use_cache=False).last_hidden_state.square().sum().backward()
    gradients[again] = [p.grad.clone() for p in model.parameters() if p.grad is not None], counter.get_total_flops()
    model.zero_grad()
with set_checkpoint_early_stop(False), FlopCounterMode(display=False) as counter:
    trunk(input_ids=ids, use_cache=False).last_hidden_state.square().sum().backward()
model.zero_grad()
costs = [flops / gradients[False][1] for flops in (gradients[True][1], counter.get_total_flops())]
for layer in trunk.layers:
    del layer.forward  # restores the class's own
same = all(torch.equal(a, b) for a, b in zip(gradients[False][0], gradients[True][0], strict=True))
of_shape = activation_bytes(model_shape("embedded"), rows, length, "float32", False)
print(f"kept {held[False]:,} bytes (the package's formula: {of_shape:,}); with checkpointing {held[True]:,}")
print(f"FLOPs: {costs[0]:.2f} times as many, {costs[1]:.2f} without early stop; gradients with the same bits: {same}")

# %% [markdown]
# Only {{ 100 * held[True] / held[False]:.0f }}% is still kept: each layer's input, where a layer otherwise keeps
# many tensors of that size. The backward pass recomputes one of the four layers at a time, so the peak is about a
# third of what it was. {{ assert same and 0.28 < held[True] / held[False] + 1 / 4 < 0.36 }}
# One more forward pass raises 6 FLOPs to 8, {{ costs[1]:.2f }} times as many. Here it's only {{ costs[0]:.2f }} times:
# PyTorch stops recomputing a layer once it has all it needs, and so skips the layer's final matmul. {{ assert 1.2 <
# costs[0] < 1.3 < costs[1] < 1.34 }}
#
# It needn't be all or nothing. More than half of what a layer keeps is SwiGLU's gate and up projections, which one
# matmul recomputes. {{ assert 4 * qwen.intermediate / kept_by_a_layer(qwen) > 0.5 }} With `--gradient-checkpointing`,
# the H200's pass recomputes just those: with 64 answers, the peak falls from {{ update_64["peak_memory_bytes"] /
# 1e9:.0f }} to {{ update_64["checkpointed_peak_memory_bytes"] / 1e9:.0f }} GB, and the update takes {{ 100 *
# update_64["checkpointed_update_s"] / update_64["update_s"] - 100:.0f }}% longer. {{ assert 1 <
# update_64["checkpointed_update_s"] / update_64["update_s"] < 1.12 and update_64["checkpointed_peak_memory_bytes"] <
# 20e9 }} That fits on 24 GB.<br><small>The prompts are GSM8K's, longer than section 2's: hence {{
# update_64["peak_memory_bytes"] / 1e9:.0f }} GB and not {{ peaks[64] / 1e9:.0f }}.</small>
#
# **Explore** the ledger of 256 answers, where gradients wait between micro-batches. Which saves more, small chunks or
# recomputing? With both, how many answers fit at a time?

# %% tags=["hide-input"]
# @title Explorer: what fits on 24 GB


def fitted(answers: int, chunk: int, recompute: bool) -> dict[str, float]:
    """GB by what for. answers: per micro-batch of 256; recompute: gate and up projections, of all layers but one."""
    parts = {name.split(",")[0]: size / 1e9 for name, size in ledger(qwen, 256, once, 256, answers, chunk).items()}
    if recompute:
        parts["activations"] -= answers * once * (qwen.layers - 1) * 4 * qwen.intermediate / 1e9
    return parts


def draw_ledger(ax, answers: int, chunk: int, recompute: bool) -> None:
    """A bar for each line of the ledger, with the sum in the title."""
    parts = fitted(answers, chunk, recompute)
    bars = ax.barh(list(parts), list(parts.values()), color=shades)
    ax.bar_label(bars, fmt="%.1f", padding=3, fontsize=9)
    ax.invert_yaxis()
    ax.set(xlabel="GB", xlim=(0, max(16, 1.15 * max(parts.values()))))
    told = "gate and up recomputed" if recompute else "all activations kept"
    ax.set_title(
        f"{answers} answers at a time, chunks of {chunk:,},\n{told}: {sum(parts.values()):.1f} GB", fontsize=11
    )


explorer(
    draw_ledger,
    static=[
        {"answers": 64, "chunk": chunk, "recompute": again}
        for chunk, again in ((16384, False), (2048, False), (2048, True))
    ],
    answers=(64, 16, 256, 16),
    chunk=[16384, 8192, 4096, 2048, 1024],
    recompute=False,
)
by_chunk = sum(fitted(64, 16384, False).values()) - sum(fitted(64, 2048, False).values())
by_recomputing = sum(fitted(64, 2048, False).values()) - sum(fitted(64, 2048, True).values())

# %% [markdown]
# At 64 answers, small chunks save {{ by_chunk:.1f }} GB, and recomputing saves {{ by_recomputing:.1f }}. Small chunks
# look free (section 3's blue points). {{ assert price[
# "exact, chunks of 2048"] <= price["exact, chunks of 4096"] and sum(fitted(64, 2048, False).values()) < 24 <
# sum(fitted(64, 16384, False).values()) }} With both, even 128 answers at a time would fit. {{ assert 1.08 *
# sum(fitted(128, 2048, True).values()) < 24 }} Chunked logits and checkpointing are one idea: **don't keep what you can
# recompute**. {{ assert small_gpu.gradient_checkpointing and not large_gpu.gradient_checkpointing }}
#
# ## 5 · Padding
#
# Answers differ in length, and the rows of a tensor don't. How much of a batch is padding? Here are 64 answers of up to
# 512 tokens, half of them shorter than 100:

# %%
torch.manual_seed(1)
lengths = (2 + torch.distributions.Geometric(1 - 0.5 ** (1 / 100)).sample((64,)).long()).clamp(max=512).tolist()


def padding(batches: list[list[int]]) -> float:
    """% of all positions without a token. batches: the row lengths of each."""
    places = sum(len(batch) * max(batch) for batch in batches)
    return 100 * (1 - sum(map(sum, batches)) / places)


def examples(lengths: list[int]) -> list[Example]:
    return [Example(torch.zeros(n, dtype=torch.int32), torch.ones(n, dtype=torch.bool)) for n in lengths]


packed = [sum(len(e.ids) for e in row) for row in plan_rows(examples(lengths), 512)]
shares = {
    "one batch": padding([lengths]),
    "micro-batches of 8, as they come": padding([lengths[i : i + 8] for i in range(0, 64, 8)]),
    "micro-batches of 8, by length": padding([sorted(lengths)[i : i + 8] for i in range(0, 64, 8)]),
    "packed into rows of 512": 100 * (1 - sum(packed) / (512 * len(packed))),
}
for name, value in shares.items():
    print(f"{name:34} {value:4.1f}% padding")

# %% [markdown]
# Our trainer sorts answers by length and cuts micro-batches from that, which alone removes most of the padding. {{
# assert shares["micro-batches of 8, by length"] < 0.5 * shares["one batch"] }} Supervised fine-tuning *packs* several
# examples into a row: the longest first, each into the first row that has room. {{ assert shares["packed into rows of
# 512"] < shares["micro-batches of 8, by length"] }} The fixed-order training pass of lesson 11 goes furthest: a
# micro-batch is a single row, attention is told where each answer begins and ends, and **a prompt is computed once**
# for all answers that share it.
#
# Answers in one row must know nothing about each other. Attention that sees a neighbour is one leak ([lesson
# 13](13_sft_and_lora.ipynb), section 3). Another has nothing to do with attention: answer B's first token follows
# answer A's last. Shift the row by one, take the mean over all its tokens, and you train A to continue with B.
#
# ## 6 · A norm's backward pass, by hand and as a kernel
#
# A fused kernel needs its backward pass from you. How do you derive one, and know that it's right?
#
# RMSNorm is $y = s \, w \odot x$ with $s = (\frac{1}{d}\sum_j x_j^2 + \epsilon)^{-1/2}$. $x$ enters twice: as itself,
# and through $s$. Let $g$ be the gradient of the loss with respect to $y$. With $s$ held constant, $x_i$ gets $s \, g_i
# w_i$. Through $s$: $\partial s / \partial x_i = -\frac{s^3}{d} x_i$, and $s$ is a factor of every $y_j$, so that part
# is $\sum_j g_j w_j x_j \cdot \partial s / \partial x_i$. Together:
#
# $$\frac{\partial \mathcal{L}}{\partial x_i} = s \, g_i w_i \;-\; \frac{s^3}{d} \, x_i \sum_j g_j w_j x_j ,
# \qquad \frac{\partial \mathcal{L}}{\partial w_i} = \sum_\text{rows} s \, g_i x_i .$$


# %%
def norm(x, weight, eps=1e-6):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def norm_backward(x, weight, g, eps=1e-6):
    """Gradients of x [rows, d] and weight [d], from that of the result, g [rows, d]."""
    s = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    through_s = s**3 / x.shape[1] * (g * weight * x).sum(-1, keepdim=True)
    return s * g * weight - x * through_s, (s * g * x).sum(0)


torch.manual_seed(0)
x, weight, g = torch.randn(3, 24).double(), torch.rand(24).double() + 0.5, torch.randn(3, 24).double()

# %% [markdown]
# How do you check a formula? With autograd, where it knows the operation. With **finite differences**, always: move one
# number by $\pm h$ and see what the loss does. How small should $h$ be, and does float32 do? **Look for** the lowest
# point of each curve.

# %%
ours = norm_backward(x, weight, g)[0]
x_auto = x.clone().requires_grad_()
(by_autograd,) = torch.autograd.grad((norm(x_auto, weight) * g).sum(), x_auto)


def finite_differences(f, x: torch.Tensor, h: float) -> torch.Tensor:
    """The gradient of f, a function of x [rows, d] to a number, by central differences."""
    slopes = torch.zeros_like(x)
    for i, j in itertools.product(*map(range, x.shape)):
        step = torch.zeros_like(x)
        step[i, j] = h
        slopes[i, j] = (f(x + step) - f(x - step)) / (2 * h)
    return slopes


sizes = [10.0**-k for k in range(16)]
errors = {}
for dtype in (torch.float64, torch.float32):
    w_, g_ = weight.to(dtype), g.to(dtype)
    found = [finite_differences(lambda x: (norm(x, w_) * g_).sum(), x.to(dtype), h) for h in sizes]  # noqa: B023
    errors[dtype] = [(f.double() - ours).abs().max().item() for f in found]
print(f"autograd and our formula differ by {(ours - by_autograd).abs().max():.0e}")

# %% tags=["hide-input"]
# @title Figure: the error of finite differences
fig, ax = plt.subplots(figsize=(7.5, 3), layout="constrained")
for (dtype, values), color, marker in zip(errors.items(), (BLUE, VERMILION), "os", strict=True):
    ax.plot(sizes, values, color=color, marker=marker, label=str(dtype)[6:])
ax.set(
    xscale="log",
    yscale="log",
    xlabel="step h",
    ylabel="largest error of the gradient",
    title="On the left of each minimum, rounding; on the right, curvature",
)
ax.legend()
ax.grid()
plt.show()
best = {dtype: sizes[values.index(min(values))] for dtype, values in errors.items()}

# %% [markdown]
# As $h$ falls, the rounding error grows as $1/h$, and the error from the function's curvature falls as $h^2$. At the
# best $h$, float64 is off by {{ min(errors[torch.float64]):.0e }} and float32 by {{ min(errors[torch.float32]):.0e }}.
# {{ assert 1e-7 < best[torch.float64] < 1e-3 < best[torch.float32] * 5 and min(errors[torch.float64]) < 1e-8 }} So
# **check gradients in float64**.
#
# A known property also finds mistakes, without any reference. With $\epsilon = 0$ the norm doesn't depend on the length
# of $x$, so the gradient is orthogonal to $x$. Here are three mistakes, each tested both ways (our $\epsilon$ is 1e-6):

# %%
s = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
along = (g * weight * x).sum(-1, keepdim=True)
suspects = {
    "right": ours,
    "s treated as constant": s * g * weight,
    "1/d forgotten": s * g * weight - x * s**3 * along,
    "w forgotten in the sum": s * g * weight - x * s**3 / 24 * (g * x).sum(-1, keepdim=True),
}
differences = finite_differences(lambda x: (norm(x, weight) * g).sum(), x, 1e-5)
for name, found in suspects.items():
    print(f"{name:23} off by {(found - differences).abs().max():.0e}; along x {(found * x).sum(-1).abs().max():.0e}")

# %% [markdown]
# Both tests find all three. {{ assert all((f * x).sum(-1).abs().max() > 1 and (f - differences).abs().max() > 0.01 for
# name, f in suspects.items() if name != "right") }}
#
# ### As a kernel
#
# Forward, the rows of a norm are independent. Backward, the weight's gradient is a **sum over all rows**, and so over
# all blocks. If all blocks added into one vector, they'd race. With atomic additions the order, and so the bits, would
# change from run to run (lesson 11). So launch few blocks, let each take many rows and keep its own sum in registers,
# and add up the blocks' sums at the end.
#
# Read it beside the formula: a block is one warp, `held`, `grad` and `scale` are its parts of $x$, $g$ and $w$,
# `along` is the sum over $j$, `inverse` is $s$, and `pull` is all that multiplies $x_i$.

# %% tags=["hide-input"]
# @title The kernel
text = Path(norm_kernel.__file__).read_text()
body = text[text.index("    @cute.kernel") :]
display(Code(inspect.cleandoc(body), language="python"))

# %% [markdown]
# We run it in lesson 08's interpreter: with rows that don't divide evenly among the blocks, with more blocks than rows,
# and with one of each. Would this test notice a mistake?

# %%
torch.manual_seed(0)


def try_kernel(kernel, rows: int, programs: int, hidden: int = 256, **order):
    """Largest error of both gradients, relative to the largest number, and the interpreter's report."""
    x, weight, g = torch.randn(rows, hidden), 1 + torch.rand(hidden), torch.randn(rows, hidden)
    dx, partial = torch.full_like(x, torch.nan), torch.full((programs, hidden), torch.nan)
    report = run(kernel, x, weight, g, dx, partial, **order)
    right = norm_backward(x.double(), weight.double(), g.double())
    found = dx, partial.sum(0)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, right, strict=True)), report


kernel = norm_kernel.RMSNormBackward(256)
for rows, programs in ((7, 2), (2, 3), (1, 1)):
    error, report = try_kernel(kernel, rows, programs)
    read = report.read["x"] / (4 * rows * 256)  # bytes read over the bytes that there are
    print(f"rows: {rows}, blocks: {programs}, error: {error:.0e}, each number of x is read {read:g} time(s)")
    assert error < 1e-5

# %% [markdown]
# Let's plant seven. Each is one change in the source, and each changed kernel runs on 7 rows, in two blocks and in one.

# %%
PLANTED = {
    "s treated as constant": ("- value * pull)", ")"),
    "a square for a cube": ("along * inverse * inverse * inverse", "along * inverse * inverse"),
    "w forgotten in the sum": ("along += (slope * value)", "along += (grad[None, i].load() * value)"),
    "sum over half a warp": ("along = cute.arch.warp_reduction_sum(along)",
                             "along = cute.arch.warp_reduction_sum(along, threads_in_group=16)"),
    "sums not set to zero": ("        sums.fill(0.0)\n", ""),
    "a row too many": ("range(program, x.shape[0],", "range(program, x.shape[0] + 1,"),
    "all blocks write to one row": ("store(sums, partial[program, None], lane)", "store(sums, partial[0, None], lane)"),
}  # fmt: skip


# %% tags=["hide-input"]
# @title Your bet
planted_bet = bet("Seven mistakes, 7 rows. How many does the test find with one block?", (0, 7, 1), "of 7")


# %% tags=["hide-input"]
# @title What happens to each
def planted(old: str, new: str):
    """The kernel with one change in its source."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "planted_kernel.py"
        path.write_text(text.replace(old, new, 1))
        spec = importlib.util.spec_from_file_location("planted_kernel", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = module.RMSNormBackward(256)
        return kernel, [verdict(kernel, programs) for programs in (2, 1)]


def verdict(kernel, programs: int) -> str:
    try:
        error, _ = try_kernel(kernel, 7, programs)
    except PTXError as caught:
        return type(caught).__name__
    return "nothing" if error < 1e-5 else "wrong numbers"


verdicts = {}
for name, (old, new) in PLANTED.items():
    assert old in text
    verdicts[name] = planted(old, new)[1]
unseen = [name for name, (_, one) in verdicts.items() if one == "nothing"]
planted_bet.result(len(PLANTED) - len(unseen))
display(Markdown("\n".join(["| mistake | two blocks | one block |", "| --- | --- | --- |"]
                           + [f"| {name} | {two} | {one} |" for name, (two, one) in verdicts.items()])))  # fmt: skip

# %% [markdown]
# (`Uninitialised`, `OutOfBounds` and `Race` are the interpreter's reports.) With two blocks the test finds all seven,
# with one block six: there the last isn't even a mistake. {{ assert all(two !=
# "nothing" for two, _ in verdicts.values()) and unseen == ["all blocks write to one row"] }} **Choose the size of a
# test by the mistakes that it should find.**
#
# ## 7 · Attention's backward pass, by hand
#
# For one head with queries $Q$, keys $K$ and values $V$, a row of $D$ numbers per token, attention computes scores $S =
# QK^\top / \sqrt{D}$, probabilities $P = \text{softmax}(S)$ and the output $O = PV$. Write $dX$ for the gradient of the
# loss with respect to $X$. The chain rule goes back step by step:
#
# | back through | gradient |
# | --- | --- |
# | $O = PV$ | $dV = P^\top dO$ and $dP = dO\, V^\top$ |
# | the softmax | $dS = P \odot (dP - \sum_j P_j\, dP_j)$ |
# | $S = QK^\top / \sqrt{D}$ | $dQ = dS\, K / \sqrt{D}$ and $dK = dS^\top Q / \sqrt{D}$ |
#
# Again: do we have to keep $P$, one number per pair of tokens? No: FlashAttention-2 (Dao 2023) keeps one number per
# query, $\text{lse}$, the log of its sum of exponentials, and recomputes $P = e^{S - \text{lse}}$ tile by tile.
#
# The sum over $j$ seems to need a pass over all keys first. It doesn't: $\sum_j P_j\, dP_j = \sum_j P_j\, (dO \cdot
# V_j) = dO \cdot O$, which is known before the first key is read.


# %%
def attend(q, k, v):
    """Causal attention for q [H, L, D], k and v [K, L, D]: (out [H, L, D], lse [H, L])."""
    group, size = len(q) // len(k), q.shape[-1]
    scores = q @ k.repeat_interleave(group, 0).mT / size**0.5
    future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    lse = scores.masked_fill(future, -torch.inf).logsumexp(-1)
    p = (scores - lse[..., None]).masked_fill(future, -torch.inf).exp()
    return p @ v.repeat_interleave(group, 0), lse


def attend_backward(d_out, q, k, v, out, lse, tile: int = 16):
    """Gradients of q, k, v. Scores are computed for `tile` keys at a time."""
    (_, length, size), group = q.shape, len(q) // len(k)
    mean = (d_out * out).sum(-1, keepdim=True)  # of dP, weighted by P
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for keys in torch.arange(length).split(tile):
        k_, v_ = (t[:, keys].repeat_interleave(group, 0) for t in (k, v))  # [H, tile, D]
        scores = q @ k_.mT / size**0.5
        p = (scores - lse[..., None]).masked_fill(keys > torch.arange(length)[:, None], -torch.inf).exp()
        ds = p * (d_out @ v_.mT - mean) / size**0.5
        dq += ds @ k_
        dk[:, keys] = (ds.mT @ q).unflatten(0, (-1, group)).sum(1)
        dv[:, keys] = (p.mT @ d_out).unflatten(0, (-1, group)).sum(1)
    return dq, dk, dv


torch.manual_seed(0)
q, k, v = (torch.randn(heads, 50, 8).double().requires_grad_() for heads in (6, 2, 2))
d_out = torch.randn(6, 50, 8).double()
theirs = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
expected = torch.autograd.grad(theirs, (q, k, v), d_out)
out, lse = attend(q.detach(), k.detach(), v.detach())
for tile in (7, 50):
    found = attend_backward(d_out, q.detach(), k.detach(), v.detach(), out, lse, tile)
    errors = [(a - b).abs().max().item() for a, b in zip(found, expected, strict=True)]
    print(f"tiles of {tile:2}: dq, dk, dv off by {', '.join(f'{e:.0e}' for e in errors)}")
    assert max(errors) < 1e-12

# %% [markdown]
# With grouped queries, several query heads share a key-value head, so its gradient is the sum of theirs. Beware:
# `repeat_interleave` repeats each head in place (0, 0, 0, 1, 1, 1), `repeat` all of them in turn (0, 1, 0, 1, 0, 1).
# The shapes fit either way, but the published weights mean the first.
#
# ### By hand or by the compiler?
#
# Is it worth it? The course has nine operations of a training step as kernels in CuTe DSL, for you to
# read.<br><small>In `rlcourse/course/kernels/`; training uses none of them.</small> On an H200 we raced each against
# `torch.compile`, which had the same formula in PyTorch.

# %% tags=["hide-input"]
# @title Your bet
race_bet = bet("Nine kernels. How many of ours are more than 5% faster than torch.compile's?", (0, 9, 1), "of 9")

# %% [markdown]
# **Look for** the ties, in the grey band.

# %% tags=["hide-input"]
# @title Figure: a layer's kernels against the compiler
layer = load_record("layer", "NVIDIA H200")
LABELS = {
    "swiglu_backward": "SwiGLU's gradient",
    "rotate": "rotary positions",
    "residual_norm": "residual + norm",
    "residual_norm_backward": "the norm's gradients",
    "token_logprob": "log-prob of a token",
    "token_logprob_backward": "the log-prob's gradient",
    "adamw": "AdamW",
    "embedding": "embedding lookup",
    "embedding_backward": "the embedding's gradient",
}
timed = {row["variant"]: row for row in layer["results"]}
lead = {name: timed[f"{name}-compiled"]["us"] / timed[f"{name}-cute"]["us"] for name in LABELS}
won, ties = ([n for n in LABELS if low < lead[n] <= high] for low, high in ((1.05, 99), (0.95, 1.05)))
race_bet.result(len(won))
order = sorted(LABELS, key=lead.get, reverse=True)
fig, ax = plt.subplots(figsize=(8, 3.6), layout="constrained")
ax.axvspan(0.95, 1.05, color="#DDDDDD")
for place, name in enumerate(order):
    color = BLUE if name in won else "#777777" if name in ties else VERMILION
    if name not in ties:
        ax.plot([1, lead[name]], [place, place], color=color, linewidth=2)
    ax.plot(lead[name], place, "o", color=color)
    ax.annotate(f"{lead[name]:.2f}", (lead[name], place), (-9 if lead[name] < 0.95 else 9, 0), va="center",
                textcoords="offset points", ha="right" if lead[name] < 0.95 else "left")  # fmt: skip
ax.set_yticks(range(9), [LABELS[name] for name in order])
ax.invert_yaxis()
ax.set(xscale="log", xlim=(0.33, 3.6), xlabel="torch.compile's time ÷ ours: right of the grey band, ours is faster")
ax.minorticks_off()
ax.set_xticks((0.5, 1, 2, 3), ("0.5", "1", "2", "3"))
ax.set_title(f"A layer's kernels, {provenance(layer)}")
plt.show()
worst = min(lead, key=lead.get)
fused = {name: timed[f"{name}-eager"]["us"] / timed[f"{name}-compiled"]["us"] for name in LABELS if name != "embedding"}
ATTENTION = ("packed_attention", "packed_attention_gradients")
slower = [timed[f"{name}-cute"]["us"] / timed[f"{name}-sdpa"]["us"] for name in ATTENTION]
of_copy = {name: row["gb_per_s"] / layer["setup"]["copy_gb_per_s"] for name, row in timed.items()}
print(f"{'µs':26}{'PyTorch':>8}{'compiled':>10}{'ours':>6}   ours, of a copy's bandwidth")
for name in order:
    eager, compiled, by_hand = (timed[f"{name}-{way}"]["us"] for way in ("eager", "compiled", "cute"))
    print(f"{LABELS[name]:26}{eager:8.0f}{compiled:10.0f}{by_hand:6.0f}{of_copy[f'{name}-cute']:10.0%}")
for name, words in zip(ATTENTION, ("attention", "attention's gradients"), strict=True):
    print(f"{words:26}{timed[f'{name}-sdpa']['us']:8.0f}{'-':>10}{timed[f'{name}-cute']['us']:6.0f}{'-':>10}")

# %% [markdown]
# Four wins, four **ties**, one defeat. {{ assert len(won) == 4 and {"residual_norm", "adamw", "token_logprob_backward",
# "embedding"} == set(ties) }} The compiler does most of the work: all but the embedding lookup are {{
# min(fused.values()):.0f }} to {{ max(fused.values()):.0f }} times as fast compiled as eager. **Ours** wins most at the
# log-prob, {{ lead["token_logprob"]:.1f }} times as fast: with lesson 09's online softmax it reads the logits once, at
# a copy's speed. {{ assert 2 < lead["token_logprob"] == max(lead.values()) and 0.95 < of_copy["token_logprob-cute"] <
# 1.05 }} **The compiler** wins the embedding's gradient, because it adds atomically in any order, while ours makes the
# same bits in every run. {{ assert worst == "embedding_backward" and lead[worst] < 0.8 }} And at attention (last rows),
# which is compute-bound, **PyTorch's** libraries are nearly 3 times as fast as ours. {{ assert 2.7 < min(slower) <
# max(slower) < 3 }} If you write one kernel by hand, write what the compiler doesn't find.<br><small>The lookup beats a
# copy, but not by its memory bandwidth: its {{ timed["embedding-cute"]["shape"][0] *
# timed["embedding-cute"]["shape"][1] * 2 / 1e6:.0f }} MB of output fit in the H200's L2 cache.</small>
#
# ## 8 · Sixteen bits
#
# One large entry of the ledger is left: four bytes for each weight and eight for its two moments. *Do we have to keep
# this?* bf16 would halve it. Its 8 bits of precision are plenty for the factors of a
# matmul, whose sums average out the rounding. But a weight has to add up many small steps. An Adam step moves each
# weight by about the learning rate, {{ make_config("laptop").lr:g }} in the laptop preset.

# %% tags=["hide-input"]
# @title Your bet
moved_bet = bet(
    "Keep the embedded model's weights in bf16, and move each by 4e-5, up or down. What share of them changes?",
    (0, 100, 1), "%",
)  # fmt: skip

# %%
torch.manual_seed(0)
weights = torch.cat([p.detach().flatten() for p in model.parameters() if p.dim() == 2]).bfloat16()
signs = torch.randint(0, 2, weights.shape) * 2 - 1


def moved(lr: float) -> float:
    """% of the bf16 weights that differ after a step of +-lr."""
    return 100 * ((weights.float() + lr * signs).bfloat16() != weights).float().mean().item()


moved_bet.result(round(moved(make_config("laptop").lr)))
for lr in (1e-3, 1e-4, 4e-5, 3e-6, 1e-6):
    print(f"a step of {lr:.0e} changes {moved(lr):5.1f}% of the weights")
w = torch.tensor(0.02).bfloat16()
above = (w.view(torch.int16) + 1).view(torch.bfloat16)
print(f"after {w.item():.6f} comes {above.item():.6f}: bf16 has nothing in between")

# %% [markdown]
# Only {{ moved(4e-5):.0f }}%, the ones nearest to 0, where bf16 is finest. {{ assert make_config("laptop").lr == 4e-5
# and moved(4e-5) < 50 < moved(1e-4) }} All others are rounded back to where they were, in every step. And at the GSM8K
# preset's {{ small_gpu.lr:g }}, {{ 100 - moved(small_gpu.lr):.0f }}% of these weights would stand still. {{ assert
# small_gpu.lr == 3e-6 and moved(3e-6) < 3 }} Here are three ways to store a weight of 0.02 that each step should move
# by {{ small_gpu.lr:g }}. **Look for** which of them arrive.

# %%
torch.manual_seed(0)
count, lr = 150, small_gpu.lr


def stochastic(x: torch.Tensor) -> torch.Tensor:
    """float32 to bf16, up or down at random, so that the mean is right."""
    return ((x.view(torch.int32) + torch.randint(0, 2**16, x.shape, dtype=torch.int32)) & -(2**16)).view(torch.float32)


singles, paths = [], {"float32 master": [], "bf16": [], "bf16, stochastic rounding": []}
master, nearest = torch.tensor(0.02).bfloat16().float(), torch.tensor(0.02).bfloat16()
drawn = torch.full((2000,), master.item())  # 2,000 such weights: the mean
for _ in range(count):
    master, nearest, drawn = master + lr, (nearest.float() + lr).bfloat16(), stochastic(drawn + lr)
    for name, value in zip(paths, (master, nearest, drawn.mean()), strict=True):
        paths[name].append(1e3 * (float(value) - float(w)))
    singles.append(1e3 * (drawn[:5] - w.float()))

# %% tags=["hide-input"]
# @title Figure: a weight that should move a little per step
fig, ax = plt.subplots(figsize=(7.5, 2.8), layout="constrained")
ax.plot(torch.stack(singles), color=GREEN, linewidth=0.8, alpha=0.4)
for (name, path), color, width in zip(paths.items(), (BLUE, VERMILION, GREEN), (5, 2, 1.5), strict=True):
    ax.plot(path, color=color, linewidth=width, label=name.replace("rounding", "rounding: mean of 2,000"))
ax.set(xlabel="step", ylabel="moved by, 10⁻³", title="How far has the weight come? Thin: five single weights")
ax.legend()
ax.grid()
plt.show()

# %% [markdown]
# In bf16 the weight never leaves. {{ assert paths["bf16"][-1] == 0 and abs(paths["bf16, stochastic rounding"][-1] -
# paths["float32 master"][-1]) < 0.05 }} *Stochastic rounding* rounds up or down at random and is right on average, but
# after {{ count }} steps a single weight is typically off by half the distance. {{ assert 0.4 <
# drawn.std() / (count * lr) < 0.65 }} So here's the one thing that you do have to keep: the package holds *master
# weights* in float32, and makes a bf16 copy for the matmuls.
#
# The goal is met without touching them: chunked logits and recomputed activations made room enough.
#
# ## Check yourself
#
# 1. A model has 1.5 billion parameters, an update 20,000 tokens, and the GPU reaches 400 TFLOP/s. How long does the
#    update take, at least?
#
# <details><summary>Answer</summary>
# 6 × 1.5e9 × 20,000 = 1.8e14 FLOPs: 0.45 s at that rate. Recomputation adds to it: up to 8 instead of 6 for the layers
# that are recomputed.
# </details>
#
# 2. A colleague trains in pure bf16 at a learning rate of 1e-3 and it works. At 1e-6 the loss is flat. A bug?
#
# <details><summary>Answer</summary>
# No: rounding. At 1e-3 a step exceeds most weights' distance to the next bf16 number. Keep master weights in float32,
# or round stochastically.
# </details>
#
# 3. Adam's second moment, $v \leftarrow v + (1 - \beta_2)(g^2 - v)$, is kept in bf16, and $v = 1$. Now the gradients
#    are 0.1. Where does $v$ end up with PyTorch's $\beta_2 = 0.999$, and with our 0.95?
#
# <details><summary>Answer</summary>
# It should fall to 0.01. With 0.999 it stays at 1: a step would change it by a thousandth, and bf16's numbers just
# below 1 are four thousandths apart. With 0.95 it falls to 0.0106, where 5% of the rest is too small a step.
# </details>
#
# ## Exercises
#
# [exercises/12_update_phase.ipynb](../exercises/12_update_phase.ipynb): seven, from one wrong gradient among three to a
# kernel with three bugs.
#
# ## Further reading
#
# - Kaplan et al. 2020, *Scaling Laws for Neural Language Models*, arXiv:2001.08361: 6 FLOPs per parameter and token.
# - Chowdhery et al. 2022, *PaLM*, arXiv:2204.02311, appendix B: MFU.
# - Chen et al. 2016, *Training Deep Nets with Sublinear Memory Cost*, arXiv:1604.06174.
# - Wijmans et al. 2024, *Cut Your Losses in Large-Vocabulary Language Models*, arXiv:2411.09009: a loss without logits.
# - Krell et al. 2021, *Efficient Sequence Packing without Cross-contamination*, arXiv:2107.02027.
# - Dao 2023, *FlashAttention-2*, arXiv:2307.08691: attention's backward pass with one number per query.
# - Micikevicius et al. 2017, *Mixed Precision Training*, arXiv:1710.03740: master weights.
# - Zamirai et al. 2020, *Revisiting BFloat16 Training*, arXiv:2010.06192: weights that don't move; stochastic rounding.
