"""Decode attention as PyTorch sees it: two operations, and which kernel they launch. What is chosen depends on shapes
and the GPU alone, so a call can be captured in a CUDA graph, after a first one, which makes kernels and workspaces."""

import functools

import torch
from torch import Tensor

from rlcourse.kernels.arguments import type_name
from rlcourse.kernels.decode_attention import DecodeAttention
from rlcourse.kernels.decode_common import workspace_arguments
from rlcourse.kernels.kernel import operation
from rlcourse.kernels.toolchain import can_begin_early, launch, workspace

MOST_SPLITS = 16
MOST_PIECES = 1024  # blocks of a launch in which some share a row
LEAST_TOKENS = 512  # of a full cache, for each block that shares a row: fewer are not worth putting together


@operation(fake=lambda q, *_: q.new_empty(q.shape))
def decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor, start: Tensor | None = None
) -> Tensor:
    """`decode_attention_reference` in one launch. q [B, H, D], bfloat16 or float16; k_cache, v_cache [B, K, S, D] of
    q's dtype; position int64 [1] or [B], start int64 [B] or None for 0. Strides of rows are free, and of the caches'
    heads. D is 64 or 128, H / K at most 8. Raises KernelError. The workspace is shared, so don't launch on two streams
    at once."""
    out = q.new_empty(q.shape)
    attend(q, k_cache, v_cache, position, start, out)
    return out


@operation(mutates=("k_cache", "v_cache"), fake=lambda q, *_: q.new_empty(q.shape))
def fused_decode_attention(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor,
    start: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`fused_decode_attention_reference` in one launch. As `decode_attention`, and: k, v [B, K, D] of q's dtype, the
    stride of rows free; cos, sin [B, D / 2], or [B, D] with equal halves, bfloat16, float16 or float32."""
    out, half = q.new_empty(q.shape), q.shape[-1] // 2
    attend(q, k_cache, v_cache, position, start, out, (k, v, cos[:, :half], sin[:, :half]))
    return out


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor, start: Tensor | None, out: Tensor,
    new: tuple = (None,) * 4, ahead: bool = False,
) -> None:  # fmt: skip
    """`decode_attention` into `out`, or the fused form with `new`: k, v, cos and sin. ahead: see `DecodeAttention`."""
    if len(q):
        angles = type_name(new[2]) if new[2] is not None else None
        kernel = choose(q.shape, k_cache.shape, type_name(q), q.device, start is not None, angles, ahead)
        room = (None,) * 3
        if kernel.splits > 1:
            room = (
                workspace((MOST_PIECES, *a.shape[1:]), getattr(torch, a.dtype), q.device, f"decode attention, {a.name}")
                for a in workspace_arguments(kernel.head_size)
            )
        launch(kernel, q, k_cache, v_cache, *new, position.expand(len(q)), start, out, *room)


@functools.cache
def choose(
    q_shape: tuple, cache_shape: tuple, dtype: str, device: torch.device, padded: bool, angles: str | None,
    ahead: bool,
) -> DecodeAttention:  # fmt: skip
    """The kernel for these shapes on this GPU."""
    (rows, heads, size), (_, kv_heads, slots, _) = q_shape, cache_shape
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16
    blocks = choose_blocks(rows * kv_heads, slots, multiprocessors, can_begin_early(device))
    if size > 64 or angles:  # there are not registers enough for two tiles,
        blocks["tiles"] = 1
    if size > 64:  # nor, with 16 warps, for one
        blocks["warps"] = min(blocks["warps"], 8)
    blocks |= {"ahead": ahead and blocks["early"], "splits": choose_splits(rows * kv_heads, slots, multiprocessors)}
    return DecodeAttention(heads, kv_heads, size, dtype, padded, angles=angles, **blocks)


def choose_splits(pairs: int, slots: int, multiprocessors: int) -> int:
    """How many blocks share each of `pairs` rows and heads: a power of two (few kernels to compile), two blocks for
    each multiprocessor if every block of a full cache still has LEAST_TOKENS."""
    most = min(MOST_SPLITS, 2 * multiprocessors // pairs, slots // LEAST_TOKENS, MOST_PIECES // pairs)
    return 1 << max(0, most.bit_length() - 1)


def choose_blocks(pairs: int, slots: int, multiprocessors: int, hopper: bool) -> dict:
    """Warps, tiles, early and release (see `DecodeAttention`) that were fastest on an H200 in a whole decode step."""
    # Few blocks need many warps each to occupy the card, and two tiles per warp, so that a long row takes no second
    # round. With more blocks than multiprocessors the next kernel would take their room, so it comes late; many short
    # blocks come themselves only when there is room.
    if pairs <= multiprocessors // 2:
        best = {"warps": 16, "tiles": 2, "early": True, "release": "start"}
    elif pairs <= 2 * multiprocessors:
        best = {"warps": 8, "tiles": 2, "early": True, "release": "start" if pairs <= multiprocessors else "end"}
    elif slots < 1024:
        best = {"warps": 4, "tiles": 1 if slots <= 512 else 2, "early": False, "release": "start"}
    else:
        best = {"warps": 4, "tiles": 2, "early": True, "release": "start"}
    return best if hopper else best | {"early": False, "release": None}
