"""A decode step of our kernels over a cache in which each row has its blocks one after the other."""

import torch

from rlcourse.rollout.blocks import BLOCK_TOKENS
from rlcourse.rollout.slots import Room, Slots
from rlcourse.rollout.triton_step import TritonStep


def new_step(weights, rows: int, tokens: int, new_tokens: int = 1) -> TritonStep:
    """Of `rows` live rows with room for so many tokens, each a completion of `new_tokens`."""
    device = weights.embedding.device
    slots = Slots.empty(Room(rows, tokens, 1, 1, rows, new_tokens), device)
    blocks = slots.block_table.shape[1]
    slots.block_table[:rows] = torch.arange(rows * blocks).view(rows, blocks)
    slots.completion.copy_(torch.arange(rows))
    slots.done.fill_(False)
    slots.max_new_tokens.fill_(new_tokens)
    slots.num_generations.fill_(1)
    shape = len(weights.layers), 2, rows * blocks, weights.kv_heads, BLOCK_TOKENS, weights.head_dim
    cache = torch.zeros(shape, dtype=weights.dtype, device=device)
    return TritonStep(weights, slots, cache, torch.tensor([2], device=device))


def by_rows(cache, rows: int):
    """A copy of the cache as a static one: [layers, 2, rows, K, tokens, D]."""
    return cache.unflatten(2, (rows, -1)).transpose(3, 4).flatten(4, 5)
