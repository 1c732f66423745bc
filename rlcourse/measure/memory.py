"""How much memory a training run needs, from the config and the model's shape, before anything is loaded.

The tensors that must be in memory at once, with every row at its longest; `LIBRARIES`; and `HEADROOM` for what the
allocator wastes. Measured peaks on an H200 are within 15%: `tests/measure/test_memory.py`.
"""

from dataclasses import asdict, dataclass, replace

import torch

from rlcourse.config import TrainConfig
from rlcourse.evaluation import BATCH_ROWS
from rlcourse.exact import CAPTURED_BYTES
from rlcourse.exact.weights import FAMILIES, may_be_exact
from rlcourse.measure import machine
from rlcourse.measure.machine import format_bytes
from rlcourse.measure.shapes import ModelShape, adapter_parameters, parameters
from rlcourse.rollout.scheduler import MAX_SLOTS, PREFILL_TOKENS
from rlcourse.settings import model_and_address

LIBRARIES = 600_000_000  # bytes of Python, torch, transformers and datasets, or of a CUDA context
HEADROOM = 1.1  # what the allocator takes for what is counted
FAR_TOO_MUCH = 2  # times the memory of the machine: as much is needed only where every row is at its longest
LOGIT_COPIES = 3  # float32 copies of a chunk's logits at the peak of its backward pass: logits, softmax, gradient


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of each part of a run, and of its two phases."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    rollout_weights: int
    kv_cache: int
    kept_cache: int  # what of it stays in the update
    sampling: int
    autocast: int
    activations: int
    logits: int
    captured: int

    @property
    def rollout(self) -> int:
        """All that is in memory while completions are sampled; gradients are freed by then."""
        kept = self.weights + self.optimizer + self.reference + self.rollout_weights + self.captured
        return LIBRARIES + kept + self.kv_cache + self.sampling

    @property
    def update(self) -> int:
        """All that is in memory in the backward pass."""
        return LIBRARIES + sum(asdict(self).values()) - self.kv_cache - self.sampling

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

    ranks: how many split the model, if config.shard says so. config: one rank's (`share_of`). exact: with the training
    pass of `rlcourse.exact`, see `has_exact_pass`.
    """
    b = 2 if config.dtype == "bfloat16" else 4  # bytes of a number in the arithmetic
    n, adapter = parameters(shape), adapter_parameters(shape, config.lora_rank)
    learned, parts = adapter if config.lora_rank else n, ranks if config.shard else 1
    gradients = 4 * learned // parts  # float32, as weights and moments are
    length = config.max_prompt_tokens + config.max_new_tokens
    minibatch = -(-config.rows // config.minibatches)
    micro_rows = min(-(-config.micro_batch_tokens // length), minibatch)
    chunk = min(config.logprob_chunk, micro_rows * length, minibatch * config.max_new_tokens)
    if exact:
        activations = exact_activation_bytes(shape, micro_rows, length, config.dtype, config.gradient_checkpointing)
        # Without an adapter the head's gradient is there twice, in float32.
        logits = (chunk * b + (0 if config.lora_rank else 8 * shape.hidden)) * shape.vocabulary
        if micro_rows == minibatch:  # activations and logits go as the gradients come
            gradients = max(0, gradients - activations - logits)
    else:
        activations = activation_bytes(shape, micro_rows, length, config.dtype, config.gradient_checkpointing)
        logits = LOGIT_COPIES * chunk * shape.vocabulary * 4
    rollout = rollout_bytes(config, shape, device, b)
    copied = 2 * n if b == 2 and not exact else 0  # by autocast
    return MemoryEstimate(
        weights=4 * (n + adapter) // parts,
        gradients=gradients,
        optimizer=8 * learned // parts,
        reference=4 * n // parts if config.needs_reference and not config.lora_rank else 0,  # an adapter has its base
        **rollout,
        autocast=gathered_bytes(shape, b) if config.shard else copied,
        activations=activations,
        logits=logits,
        captured=captured_bytes(shape, micro_rows * length) if exact and not config.gradient_checkpointing else 0,
    )


def rollout_bytes(config: TrainConfig, shape: ModelShape, device: str, b: int) -> dict[str, int]:
    """What the engine has: its copy of the weights, keys and values, and the most that one pass takes."""
    engine, address = model_and_address(config.engine)
    if address:  # another process samples
        return dict.fromkeys(("rollout_weights", "kv_cache", "kept_cache", "sampling"), 0)
    evaluated = min(BATCH_ROWS, config.eval_problems)
    rows, prompts = max(config.rows, evaluated), max(config.num_prompts, evaluated) if engine == "fast" else 0
    slots = min(rows, MAX_SLOTS) if engine == "fast" and device == "cuda" else rows
    tokens = slots * (config.max_prompt_tokens + config.max_new_tokens) + prompts * config.max_prompt_tokens
    cache = tokens * shape.layers * 2 * shape.kv_heads * shape.head_dim * b
    if engine == "vllm" or config.cache_gb:
        from rlcourse.rollout.vllm import CACHE_GB

        cache = int((config.cache_gb or CACHE_GB) * 1e9)
    own = engine in ("fast", "vllm")
    prefilled = min(PREFILL_TOKENS, rows * config.max_prompt_tokens) if own else rows * config.max_prompt_tokens
    prefill = prefilled * 4 * shape.intermediate * b  # SwiGLU, of one layer at a time
    stays = engine == "hf-static" or (own and device == "cuda")
    return {
        "rollout_weights": b * parameters(shape) if own or b == 2 or config.shard else 0,
        "kv_cache": cache,
        "kept_cache": cache if stays and not config.sleep else 0,
        "sampling": max(prefill, 3 * rows * shape.vocabulary * 4),  # logits, noise, and their sum
    }


def has_exact_pass(config: TrainConfig, device: str) -> bool:
    """Whether a Qwen2, Qwen3 or Llama trains with the pass of `rlcourse.exact` on this machine's `device`."""
    plain = config.dtype == "float32" or config.shard
    return device == "cuda" and not plain and torch.cuda.is_available() and may_be_exact(torch.device("cuda"))


def gathered_bytes(shape: ModelShape, b: int) -> int:
    """Bytes that are whole on a rank of a sharded model: what is around the layers, and two layers, the one that
    computes and the next; their gradients; and the largest of these in float32, while ranks add it up."""
    around = parameters(replace(shape, layers=0))
    layer = parameters(replace(shape, layers=1)) - around
    return 2 * b * (around + 2 * layer) + 4 * max(around, layer)


def check_memory(config: TrainConfig, model_config, device: torch.device, ranks: int = 1) -> None:
    """Raise ValueError for a run that needs far more memory than the device has: it would be killed without a word.

    model_config: that of transformers; what is not like Qwen2 passes. ranks: see `estimate`.
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
    """Bytes that one forward pass of `rows` x `length` tokens keeps for its backward pass, output head left out."""
    b = 2 if dtype == "bfloat16" else 4
    # Two norms keep input and normalised form in float32, five linear layers their inputs: bfloat16 copies or the same.
    norms = (26 if b == 2 else 24) * shape.hidden
    attention = b * (4 * shape.heads * shape.head_dim + length)  # q, repeated k and v, the output, a row of the mask
    layer = norms + attention + 4 * b * shape.intermediate  # SwiGLU's two projections, silu and the product
    if gradient_checkpointing:
        return rows * length * (shape.layers * 4 * shape.hidden + layer)
    return rows * length * shape.layers * layer


def exact_activation_bytes(shape: ModelShape, rows: int, length: int, dtype: str, gradient_checkpointing: bool) -> int:
    """As `activation_bytes`, of the pass of `rlcourse.exact`."""
    b, heads, kv_heads = 2 if dtype == "bfloat16" else 4, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # In float32 the residual stream before attention and before SwiGLU, sums of squares of 32 columns of each, and a
    # number per query head; q, k, v and attention's output; what enters a norm of queries and keys.
    kept = 8 * (shape.hidden + shape.hidden // 32) + 4 * shape.heads + b * (2 * heads + 2 * kv_heads)
    kept += b * (heads + 2 * kv_heads) if shape.qk_norm else 0
    projections = 2 * b * shape.intermediate  # SwiGLU's: with checkpointing, of one layer at a time
    if gradient_checkpointing:
        return rows * length * (shape.layers * kept + projections)
    return rows * length * shape.layers * (kept + projections)


def captured_bytes(shape: ModelShape, tokens: int) -> int:
    """Bytes that `rlcourse.exact.captured` holds of layers whose batches have up to so many tokens: a gradient of each
    parameter in float32, and what a forward pass keeps. 0 if that is more than it takes: then nothing is captured."""
    gradients = 4 * (parameters(shape) - parameters(replace(shape, layers=0)))
    held = gradients + exact_activation_bytes(shape, 1, tokens, "bfloat16", False)
    return held if held <= CAPTURED_BYTES else 0
