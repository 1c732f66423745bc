"""How much memory a training run needs, from the config and the model's shape, before anything is loaded: the tensors
that must be in memory at once, with every row at its longest; `LIBRARIES`; and `HEADROOM`. Measured peaks on an H200
are within 15%: `tests/test_memory.py`."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from rlcourse.batch import MAX_SLOTS, PREFILL_TOKENS
from rlcourse.config import TrainConfig
from rlcourse.evaluation import BATCH_ROWS
from rlcourse.exact.weights import FAMILIES, may_be_exact
from rlcourse.measure import machine
from rlcourse.measure.machine import format_bytes
from rlcourse.measure.shapes import ModelShape, adapter_parameters, parameters
from rlcourse.settings import model_and_address

LIBRARIES = 600_000_000  # bytes of Python, torch, transformers and datasets, or of a CUDA context
HEADROOM = 1.1  # what the allocator takes for what is counted
FAR_TOO_MUCH = 2  # times the memory of the machine: as much is needed only where every row is at its longest
LOGIT_COPIES = 3  # float32 copies of a chunk's logits at the peak of its backward pass: logits, softmax, gradient


class MemoryEstimate(NamedTuple):
    """Bytes in memory while completions are sampled, and in the backward pass."""

    rollout: int
    update: int

    @property
    def peak(self) -> int:
        """The most that the run needs: the larger phase, with `HEADROOM`."""
        return round(HEADROOM * max(self))


def estimate(
    config: TrainConfig, shape: ModelShape, device: str, ranks: int = 1, exact: bool = False
) -> MemoryEstimate:
    """Bytes that training `shape` with `config`, one rank's (`share_of`), needs on `device`, 'cpu' or 'cuda'. ranks:
    how many split the model, if config.shard says so. exact: with the training pass of `rlcourse.exact`, see
    `has_exact_pass`."""
    b = 2 if config.dtype == "bfloat16" else 4  # bytes of a number in the arithmetic
    n, adapter = parameters(shape), adapter_parameters(shape, config.lora_rank)
    learned, shards = adapter if config.lora_rank else n, ranks if config.shard else 1
    length = config.max_prompt_tokens + config.max_new_tokens
    minibatch = -(-config.rows // config.minibatches)
    micro_rows = min(-(-config.micro_batch_tokens // length), minibatch)
    chunk = min(config.logprob_chunk, micro_rows * length, minibatch * config.max_new_tokens)
    activations = activation_bytes(shape, micro_rows, length, config.dtype, config.gradient_checkpointing, exact)
    gradients, logits = 4 * learned // shards, LOGIT_COPIES * chunk * shape.vocabulary * 4
    if exact:  # without an adapter the head's gradient is there twice, in float32
        logits = (chunk * b + (0 if config.lora_rank else 8 * shape.hidden)) * shape.vocabulary
        if micro_rows == minibatch:  # activations and logits go as the gradients come
            gradients = max(0, gradients - activations - logits)
    autocast = 2 * n if b == 2 and not exact else 0
    if config.shard:  # the embedding and two layers are whole, with their gradients
        layer = (n - parameters(replace(shape, layers=0))) // shape.layers
        autocast = 2 * (b + 2) * (n - (shape.layers - 2) * layer)
    engine, server = model_and_address(config.engine)
    own = engine in ("fast", "vllm") and not server
    weights, optimizer = 4 * (n + adapter) // shards, 8 * learned // shards
    reference = 4 * n // shards if config.needs_reference and not config.lora_rank else 0  # an adapter has its base
    copied = not server and (own or b == 2 or config.shard)  # the engine's own weights
    always = LIBRARIES + weights + optimizer + reference + (b * n if copied else 0)
    cache = 0 if server else cache_bytes(config, shape, engine, device)
    cache_stays = not config.sleep and (engine == "hf-static" or (own and device == "cuda"))
    rollout = cache + (0 if server else sampling_bytes(config, shape, own, b))
    update = (cache if cache_stays else 0) + gradients + autocast + activations + logits
    return MemoryEstimate(always + rollout, always + update)


def check_memory(config: TrainConfig, model_config: Any, device: torch.device, ranks: int = 1) -> None:
    """Raise ValueError for a run that needs far more memory than the device has: on a CPU it'd be killed without a
    word. model_config: transformers'; what isn't like Qwen2 passes."""
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


def cache_bytes(config: TrainConfig, shape: ModelShape, engine: str, device: str) -> int:
    """Keys and values of all rows that an engine samples at once."""
    if engine == "vllm" or config.cache_gb:
        from rlcourse.rollout.vllm import CACHE_GB

        return int((config.cache_gb or CACHE_GB) * 1e9)
    evaluated = min(BATCH_ROWS, config.eval_problems)
    rows, prompts = max(config.rows, evaluated), max(config.num_prompts, evaluated) if engine == "fast" else 0
    slots = min(rows, MAX_SLOTS) if engine == "fast" and device == "cuda" else rows
    tokens = slots * (config.max_prompt_tokens + config.max_new_tokens) + prompts * config.max_prompt_tokens
    return tokens * shape.layers * 2 * shape.kv_heads * shape.head_dim * (2 if config.dtype == "bfloat16" else 4)


def sampling_bytes(config: TrainConfig, shape: ModelShape, own: bool, b: int) -> int:
    """The most that one pass of an engine takes: SwiGLU of a prefill, or logits with their noise."""
    rows = max(config.rows, min(BATCH_ROWS, config.eval_problems))
    prefilled = rows * config.max_prompt_tokens
    prefilled = min(PREFILL_TOKENS, prefilled) if own else prefilled
    return max(prefilled * 4 * shape.intermediate * b, 3 * rows * shape.vocabulary * 4)


def has_exact_pass(config: TrainConfig, device: str) -> bool:
    """Whether a Qwen2, Qwen3 or Llama trains with the pass of `rlcourse.exact` on this machine's `device`."""
    plain = config.dtype == "float32" or config.shard
    return device == "cuda" and not plain and torch.cuda.is_available() and may_be_exact(torch.device("cuda"))


def activation_bytes(
    shape: ModelShape, rows: int, length: int, dtype: str, gradient_checkpointing: bool, exact: bool = False
) -> int:
    """Bytes that one forward pass of `rows` x `length` tokens keeps for its backward pass, output head left out. exact:
    of the pass of `rlcourse.exact`."""
    b, heads, kv_heads = 2 if dtype == "bfloat16" else 4, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if exact:
        # In float32 the residual stream before attention and before SwiGLU, sums of squares of 32 columns of each, and
        # a number per query head; q, k, v and attention's output; what enters a norm of queries and keys.
        kept = 8 * (shape.hidden + shape.hidden // 32) + 4 * shape.heads + b * (2 * heads + 2 * kv_heads)
        kept += b * (heads + 2 * kv_heads) if shape.qk_norm else 0
        again = 2 * b * shape.intermediate  # SwiGLU's projections: with checkpointing, of one layer at a time
        layer = kept + again
    else:
        # Two norms keep input and normalised form in float32, five linear layers their inputs: bfloat16 copies or the
        # same. Attention keeps q, repeated k and v, its output and a row of the mask, SwiGLU two projections, silu and
        # the product.
        norms = (26 if b == 2 else 24) * shape.hidden
        kept, layer = 4 * shape.hidden, norms + b * (4 * heads + length) + 4 * b * shape.intermediate
        again = layer
    return rows * length * (shape.layers * kept + again if gradient_checkpointing else shape.layers * layer)
