"""Prefill into a paged cache: pieces of sequences, whose tokens before them are in the cache already. The numbers are
those of a pass over the whole sequence (`rlcourse.exact`), as all sums are in the same order."""

import torch
import triton
from torch import Tensor

from rlcourse.exact import EXACT, LOG2_E
from rlcourse.exact.layers import QUERIES, angles_at, layer_pass
from rlcourse.exact.products import one_chain
from rlcourse.exact.weights import FusedWeights
from rlcourse.rollout.blocks import NULL_BLOCK
from rlcourse.rollout.scheduler import Piece
from rlcourse.rollout.slots import Slots
from rlcourse.rollout.triton_attention import prefill_attention_kernel


def passes(pieces: list[Piece], most_tokens: int, most_pieces: int) -> list[list[Piece]]:
    """The pieces in order of their beginning and length, as a piece may read what one that begins before it writes;
    those together that, padded to the longest, have no more than so many tokens."""
    found: list[list[Piece]] = []
    longest = 0
    for piece in sorted(pieces, key=lambda piece: (piece.begin, piece.end)):
        longest = max(longest, piece.end - piece.begin)
        if not found or len(found[-1]) == most_pieces or longest * (len(found[-1]) + 1) > most_tokens:
            found.append([])
            longest = piece.end - piece.begin
        found[-1].append(piece)
    return found


def prefill_pieces(weights: FusedWeights, slots: Slots, cache: Tensor, pieces: Tensor, length: int) -> Tensor:
    """x [pieces, d] after the last token of each piece; keys and values of all their tokens go into the completions'
    blocks of the cache [layers, 2, num_blocks, K, BLOCK_TOKENS, D]. pieces [pieces, 4] int64: completion, prompt, first
    token, end; length: at least that of the longest. A piece may see what another one writes: each layer writes
    everything before it reads."""
    completion, prompt, begin, end = pieces.unbind(1)
    at = begin[:, None] + torch.arange(length, device=pieces.device)  # [pieces, length], padding included
    of_prompt = slots.prompt_ids[prompt[:, None], at.clamp(max=slots.prompt_ids.shape[1] - 1)]
    number = at - slots.prompt_lengths[prompt][:, None]  # of a sampled token
    sampled = slots.tokens[completion[:, None], number.clamp(0, slots.tokens.shape[1] - 1)]
    ids = torch.where(number < 0, of_prompt, sampled)
    block_tokens = cache.shape[4]
    blocks = slots.block_table[completion[:, None], (at // block_tokens).clamp(max=slots.block_table.shape[1] - 1)]
    blocks = torch.where(at < end[:, None], blocks, NULL_BLOCK).flatten()
    places = at.flatten() % block_tokens
    angles = angles_at(weights, at.flatten().clamp(max=len(weights.cos) - 1))
    with one_chain():
        x = weights.embedding[ids.flatten()].float()
        for layer, its_cache in zip(weights.layers, cache, strict=True):

            def attend(q: Tensor, k: Tensor, v: Tensor, cache: Tensor = its_cache) -> tuple[Tensor, None]:
                cache[0][blocks, :, places], cache[1][blocks, :, places] = k, v
                return attention(q, cache, slots.block_table, pieces, length), None

            x, _ = layer_pass(weights, layer, x, angles, attend)
    last = (end - begin - 1).clamp(min=0)
    return x.view(len(pieces), length, -1)[torch.arange(len(pieces), device=pieces.device), last]


def attention(q: Tensor, cache: Tensor, table: Tensor, pieces: Tensor, length: int) -> Tensor:
    """As many as q [pieces * length, H, D]: of keys up to their own in a cache [2, blocks, K, BLOCK_TOKENS, D]."""
    out, (_, heads, size) = torch.empty_like(q), q.shape
    prefill_attention_kernel[(triton.cdiv(length, QUERIES), heads, len(pieces))](
        q, cache, table, pieces, out, table.shape[1], length, LOG2_E * size**-0.5, heads, cache.shape[2], size,
        cache.stride(0), cache.stride(1), cache.stride(2), QUERIES, cache.shape[3],
        num_warps=4 if size <= 64 else 8, num_stages=2, **EXACT,
    )  # fmt: skip
    return out
