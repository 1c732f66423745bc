"""How much memory a training run needs, computed from the config and the model's shape before anything is loaded.

The estimate adds up what can be counted: the tensors that must be in memory at once, every row at its longest, and a
fixed sum for the libraries. `HEADROOM` allows for the allocator's fragments.
"""

import math
from dataclasses import asdict, dataclass, replace

import torch

from rlcourse.config import TrainConfig
from rlcourse.evaluation import BATCH_ROWS
from rlcourse.exact import CAPTURED_BYTES
from rlcourse.exact.weights import FAMILIES, may_be_exact
from rlcourse.measure import machine
from rlcourse.measure.machine import format_bytes
from rlcourse.measure.shapes import ModelShape, adapter_parameters, parameters
from rlcourse.rollout.fast import MAX_SLOTS, PREFILL_TOKENS
from rlcourse.rollout.vllm import CACHE_GB
from rlcourse.settings import model_and_address

LIBRARIES = 600_000_000  # bytes of Python, torch, transformers and datasets, or of a CUDA context
HEADROOM = 1.1  # what the allocator takes for what is counted
FAR_TOO_MUCH = 2  # times the memory of the machine: as much is needed only where every row is at its longest
LOGIT_COPIES = 3  # float32 copies of a chunk's logits at the peak of its backward pass: logits, softmax, gradient


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of each part of a run, and of its two phases. The formulas are those of `estimate`."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    rollout_weights: int
    kv_cache: int
    kept_cache: int
    prefill: int
    sampling: int
    autocast: int
    gathered: int
    activations: int
    logits: int
    captured: int

    @property
    def rollout(self) -> int:
        """All that is in memory while completions are sampled; gradients are freed by then."""
        kept = self.weights + self.optimizer + self.reference + self.rollout_weights + self.captured
        return LIBRARIES + kept + self.kv_cache + max(self.prefill, self.sampling)

    @property
    def update(self) -> int:
        """All that is in memory in the backward pass; the engine keeps its weights and, on a GPU, its cache."""
        return LIBRARIES + sum(asdict(self).values()) - self.prefill - self.sampling - self.kv_cache

    @property
    def peak(self) -> int:
        """The most that the run needs: the larger phase, with `HEADROOM`."""
        return round(HEADROOM * max(self.rollout, self.update))

    def fits(self, memory_bytes: int) -> bool:
        return self.peak <= memory_bytes


def estimate(
    config: TrainConfig, shape: ModelShape, device: str, ranks: int = 1, exact: bool = False
) -> MemoryEstimate:
    """Bytes that training `shape` with `config` needs on `device`, 'cpu' or 'cuda'.

    ranks: between how many the model is split, if config.shard says so. config: that of one rank (`share_of`). exact:
    with the training pass of `rlcourse.exact`, see `has_exact_pass`.

    n = parameters, b = bytes of a number in config.dtype, L = max_prompt_tokens + max_new_tokens, m = rows of a
    micro-batch if all have L tokens: m x L is micro_batch_tokens, rounded up, or the tokens of a whole mini-batch; rows
    = those of a step or of an evaluation's batch, whichever are more:

    - weights 4 n, gradients 4 n, AdamW's two moments 8 n, all float32; a frozen reference 4 n if there is one; with an
      adapter of a parameters weights 4 (n + a), gradients 4 a, moments 8 a, and the reference is the base
    - rollout weights: b n for the engine's own copy; the hf engines need none in float32. Where a vLLM server
      samples these, cache, prefill and sampling are nothing here
    - KV cache: tokens x layers x 2 x kv_heads x head_dim x b, of rows x L tokens; the fast engine has the prompts' own
      cache beside them, and on a GPU MAX_SLOTS rows at most; with config.cache_gb as much in all, vllm without it
      CACHE_GB; kept: what is still there in the update, that of hf-static and, on a GPU, that of fast and vllm
    - prefill: of t tokens, with fast and vllm PREFILL_TOKENS at most, one layer at a time: t x heads x
      max_prompt_tokens x 3 x 4 for the scores of attention, their softmax and a bias, or t x 4 x intermediate x b for
      SwiGLU, whichever is more
    - sampling: 3 x rows x vocabulary x 4: the logits of one position, their noise, and their sum
    - autocast: 2 n for the bfloat16 copies of the weights that autocast keeps, 0 in float32 and with config.shard
    - config.shard: weights, gradients, moments and reference are divided by `ranks`, the engine has a copy of its own;
      gathered: see `gathered_bytes`
    - activations: see `activation_bytes`
    - logits: LOGIT_COPIES x chunk x vocabulary x 4, chunk = min(logprob_chunk, m x L, mini-batch x max_new_tokens)
    - exact: no copies by autocast; logits chunk x vocabulary x b, and without an adapter twice the head's gradient in
      float32; when other layers' gradients are made the logits are gone, and activations go, so that of one micro-batch
      only those count that are more; see `captured_bytes`
    """
    n = parameters(shape)
    adapter = adapter_parameters(shape, config.lora_rank)
    learned = adapter if config.lora_rank else n
    own_weights = config.engine in ("fast", "vllm") or config.dtype == "bfloat16" or config.shard
    parts = ranks if config.shard else 1
    b = 2 if config.dtype == "bfloat16" else 4
    length = config.max_prompt_tokens + config.max_new_tokens
    rows = max(config.rows, min(BATCH_ROWS, config.eval_problems))
    minibatch = -(-config.rows // config.minibatches)
    micro_rows = min(-(-config.micro_batch_tokens // length), minibatch)
    chunk = min(config.logprob_chunk, micro_rows * length, minibatch * config.max_new_tokens)
    fast, on_gpu = config.engine == "fast", device == "cuda"
    own_cache = on_gpu and config.engine in ("fast", "vllm")
    prompts = max(config.num_prompts, min(BATCH_ROWS, config.eval_problems)) if fast else 0
    slots = min(rows, MAX_SLOTS) if fast and on_gpu else rows
    cache = (
        (slots * length + prompts * config.max_prompt_tokens) * shape.layers * 2 * shape.kv_heads * shape.head_dim * b
    )
    if config.cache_gb or config.engine == "vllm":
        cache = int((config.cache_gb or CACHE_GB) * 1e9)
    at_once = PREFILL_TOKENS if fast or config.engine == "vllm" else math.inf
    prefill_tokens = min(at_once, rows * config.max_prompt_tokens)
    gradients, kept = 4 * learned // parts, exact_activation_bytes if exact else activation_bytes
    activations = kept(shape, micro_rows, length, config.dtype, config.gradient_checkpointing)
    logits = LOGIT_COPIES * chunk * shape.vocabulary * 4
    if exact:
        logits = (chunk * b + (0 if config.lora_rank else 8 * shape.hidden)) * shape.vocabulary
        gradients = max(0, gradients - activations - logits) if micro_rows == minibatch else gradients
    found = MemoryEstimate(
        weights=4 * (n + adapter) // parts,
        gradients=gradients,
        optimizer=8 * learned // parts,
        reference=4 * n // parts if config.needs_reference and not config.lora_rank else 0,
        rollout_weights=b * n if own_weights else 0,
        kv_cache=cache,
        kept_cache=cache if (own_cache or config.engine == "hf-static") and not config.sleep else 0,
        prefill=prefill_tokens * max(12 * shape.heads * config.max_prompt_tokens, 4 * shape.intermediate * b),
        sampling=3 * rows * shape.vocabulary * 4,
        autocast=2 * n if b == 2 and not config.shard and not exact else 0,
        gathered=gathered_bytes(shape, b) if config.shard else 0,
        activations=activations,
        logits=logits,
        captured=captured_bytes(shape, micro_rows * length) if exact and not config.gradient_checkpointing else 0,
    )
    if not model_and_address(config.engine)[1]:  # of a vLLM server
        return found
    return replace(found, rollout_weights=0, kv_cache=0, kept_cache=0, prefill=0, sampling=0)


def has_exact_pass(config: TrainConfig, device: str) -> bool:
    """Whether a Qwen2, Qwen3 or Llama trains with the pass of `rlcourse.exact` on this machine's `device`."""
    plain = config.dtype == "float32" or config.shard
    return device == "cuda" and not plain and torch.cuda.is_available() and may_be_exact(torch.device("cuda"))


def gathered_bytes(shape: ModelShape, b: int) -> int:
    """Bytes that are whole on a rank of a sharded model at the peak of its backward pass.

    What is around the layers and two layers, one that computes and the next, as b bytes a number; their gradients, as
    many again; and of what is being added up over ranks a copy in float32, that of the largest of these.
    """
    around = parameters(replace(shape, layers=0))
    layer = parameters(replace(shape, layers=1)) - around
    return 2 * b * (around + 2 * layer) + 4 * max(around, layer)


def check_memory(config: TrainConfig, model_config, device: torch.device, ranks: int = 1) -> None:
    """Raise ValueError for a run that needs far more memory than the device has: it would be killed without a word.

    model_config: transformers' config of the model; models that are not Qwen2-like pass, as their needs are not known.
    ranks: see `estimate`.
    """
    try:
        shape = ModelShape.from_config(model_config)
    except ValueError:
        return
    longest = min(config.max_prompt_tokens, model_config.max_position_embeddings)
    exact = has_exact_pass(config, device.type) and model_config.model_type in FAMILIES
    needs = estimate(replace(config, max_prompt_tokens=longest), shape, device.type, ranks, exact).peak
    on_gpu = device.type == "cuda"
    has = torch.cuda.get_device_properties(device).total_memory if on_gpu else machine.memory_bytes()
    if has is not None and needs > FAR_TOO_MUCH * has:
        raise ValueError(
            f"This run needs up to {format_bytes(needs)} of memory, and there are {format_bytes(has)}: lower "
            "--num-prompts, --num-generations, --max-new-tokens, --max-prompt-tokens or --micro-batch-tokens."
        )


def activation_bytes(shape: ModelShape, rows: int, length: int, dtype: str, gradient_checkpointing: bool) -> int:
    """Bytes that one forward pass of `rows` x `length` tokens keeps for its backward pass, output head left out.

    Per token and layer, with H = hidden, A = heads x head_dim, I = intermediate, b = bytes of a number in `dtype`:
    two RMSNorms keep their input and its normalised form, and five linear layers keep their input, 24 H bytes in
    float32 (the inputs of a norm's readers are one tensor) and 26 H under bfloat16 autocast (the norms in float32, a
    bfloat16 copy for each reader); attention keeps q, repeated k and v, its output and a row of its mask,
    b (4 A + length); SwiGLU keeps both projections, silu and the product, 4 b I. Checkpointing keeps the float32 input
    of each layer, 4 H, and the whole of one layer at a time.
    """
    b = 2 if dtype == "bfloat16" else 4
    norms = (26 if b == 2 else 24) * shape.hidden
    layer = norms + b * (4 * shape.heads * shape.head_dim + length) + 4 * b * shape.intermediate
    if gradient_checkpointing:
        return rows * length * (shape.layers * 4 * shape.hidden + layer)
    return rows * length * shape.layers * layer


def exact_activation_bytes(shape: ModelShape, rows: int, length: int, dtype: str, gradient_checkpointing: bool) -> int:
    """As `activation_bytes`, of the pass of `rlcourse.exact`.

    Per token and layer: in float32 the residual stream before attention and before SwiGLU, sums of squares of 32
    columns of each, and a number a query head; q, k, v, attention's output, and SwiGLU's two projections in `dtype`;
    with a norm of queries and keys what enters it, too.
    Checkpointing keeps SwiGLU's projections of one layer at a time.
    """
    b, heads, kv_heads = 2 if dtype == "bfloat16" else 4, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    kept = 8 * (shape.hidden + shape.hidden // 32) + 4 * shape.heads + b * (2 * heads + 2 * kv_heads)
    kept += b * (heads + 2 * kv_heads) if shape.qk_norm else 0
    projections = 2 * b * shape.intermediate
    if gradient_checkpointing:
        return rows * length * (shape.layers * kept + projections)
    return rows * length * shape.layers * (kept + projections)


def captured_bytes(shape: ModelShape, tokens: int) -> int:
    """Bytes that `rlcourse.exact.captured` holds of layers whose batches have up to so many tokens: a gradient of each
    parameter in float32, and what a forward pass keeps. 0 if that is more than it takes: then nothing is captured."""
    gradients = 4 * (parameters(shape) - parameters(replace(shape, layers=0)))
    held = gradients + exact_activation_bytes(shape, 1, tokens, "bfloat16", False)
    return held if held <= CAPTURED_BYTES else 0
