"""Attention over a paged cache in Triton: of a decode step, one query token of a row (`triton_step.py` launches it),
and of prefill, the queries of a piece of a sequence (`prefill.py`)."""

import triton
import triton.language as tl

from rlcourse.exact.operations import attend, gdc_launch_dependents, gdc_wait, join


@triton.jit
def shift_of(table, tile, tiles, stride_block, D: tl.constexpr, KEYS: tl.constexpr):
    """How far the block that the row's table names lies behind the tile's place in a row of one piece."""
    return tl.load(table + tile, mask=tile < tiles, other=0).to(tl.int64) * stride_block - tile * (KEYS * D)


@triton.jit
def load_tile(keys, values, first, end, D: tl.constexpr, KEYS: tl.constexpr):
    """Keys [D, KEYS] and values [KEYS, D] of the tokens from `first` on, zeros from `end` on."""
    at, ds = first + tl.arange(0, KEYS), tl.arange(0, D)
    k = tl.load(keys + at[None, :] * D + ds[:, None], mask=(at < end)[None, :], other=0.0)
    return k, tl.load(values + at[:, None] * D + ds[None, :], mask=(at < end)[:, None], other=0.0)


@triton.jit
def attention_kernel(
    q, cache, table, completion, W, position, partial_acc, partial_ml, arrived, out, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, stride_kv, stride_block, stride_head,
    SPLITS: tl.constexpr, KEYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One query token of a row against its cache, the query heads of a key-value head together, in the tiles of
    `attend`. A tile is a block of the cache, and row `completion` of the table [completions, W] names it; the next
    one's name is asked for a tile ahead. SPLITS programs take turns at the tiles, and the last one that arrives joins
    them (Flash-Decoding). Only the newest token waits for the kernel before: all others are from steps before."""
    if PDL:
        gdc_launch_dependents()
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = H // K
    G16: tl.constexpr = 16 if G <= 16 else 32
    g, ds = tl.arange(0, G16), tl.arange(0, D)
    newest = tl.load(position + row).to(tl.int32)
    tiles = newest // KEYS + 1
    keys = cache + kv_head * stride_head
    table += tl.load(completion + row) * W
    values = keys + stride_kv
    shift = shift_of(table, split, tiles, stride_block, D, KEYS)
    following = shift_of(table, split + SPLITS, tiles, stride_block, D, KEYS)
    k, v = load_tile(keys + shift, values + shift, split * KEYS, newest, D, KEYS)
    if PDL:
        gdc_wait()
    heads = row * (H * D) + (kv_head * G + g)[:, None] * D + ds[None, :]
    query = tl.load(q + heads, mask=(g < G)[:, None], other=0.0)
    place = row * K + kv_head
    m = tl.full((G16,), float("-inf"), tl.float32)
    l = tl.zeros((G16,), tl.float32)
    acc = tl.zeros((G16, D), tl.float32)
    at = tl.arange(0, KEYS)
    if split < tiles:
        here = split * KEYS + at
        # Where it is in another tile, no key of this one is it.
        last = shift + tl.minimum(newest, split * KEYS + KEYS - 1) * D + ds
        k = tl.where((here == newest)[None, :], tl.load(keys + last)[:, None], k)
        v = tl.where((here == newest)[:, None], tl.load(values + last)[None, :], v)
        tile_m, tile_l, tile_acc = attend(query, k, v, (here <= newest)[None, :], scale, True)
        if SPLITS > 1:
            keep(partial_acc, partial_ml, place * W + split, tile_m, tile_l, tile_acc, G16, D)
        else:
            m, l, acc = join(m, l, acc, tile_m, tile_l, tile_acc, scale)
    for tile in range(split + SPLITS, tiles, SPLITS):
        shift = following
        following = shift_of(table, tile + SPLITS, tiles, stride_block, D, KEYS)
        k, v = load_tile(keys + shift, values + shift, tile * KEYS, newest + 1, D, KEYS)
        tile_m, tile_l, tile_acc = attend(query, k, v, (tile * KEYS + at <= newest)[None, :], scale, True)
        if SPLITS > 1:
            keep(partial_acc, partial_ml, place * W + tile, tile_m, tile_l, tile_acc, G16, D)
        else:
            m, l, acc = join(m, l, acc, tile_m, tile_l, tile_acc, scale)
    done = True
    if SPLITS > 1:
        tl.debug_barrier()
        done = tl.atomic_add(arrived + place, 1, sem="acq_rel") == SPLITS - 1
        if done:
            for tile in range(tiles):
                its = (place * W + tile) * G16 + g
                tile_m = tl.load(partial_ml + 2 * its, cache_modifier=".cg")
                tile_l = tl.load(partial_ml + 2 * its + 1, cache_modifier=".cg")
                tile_acc = tl.load(partial_acc + its[:, None] * D + ds[None, :], cache_modifier=".cg")
                m, l, acc = join(m, l, acc, tile_m, tile_l, tile_acc, scale)
            tl.store(arrived + place, 0)
    if done:
        tl.store(out + heads, (acc / l[:, None]).to(out.dtype.element_ty), mask=(g < G)[:, None])


@triton.jit
def keep(partial_acc, partial_ml, number, m, l, acc, G16: tl.constexpr, D: tl.constexpr):
    """A tile's attention, for the program that joins all."""
    its = number * G16 + tl.arange(0, G16)
    tl.store(partial_acc + its[:, None] * D + tl.arange(0, D)[None, :], acc)
    tl.store(partial_ml + 2 * its, m)
    tl.store(partial_ml + 2 * its + 1, l)


@triton.jit
def prefill_attention_kernel(
    q, cache, table, pieces, out, W, L, scale, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    stride_kv, stride_block, stride_head, BM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """BM queries of a head and piece, which see the keys up to their own in the tiles of a decode step: out [pieces *
    L, H, D]. pieces [pieces, 4]: completion, prompt, first token, end; table [completions, W]: their blocks."""
    block, head, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    owner, begin = tl.load(pieces + 4 * piece), tl.load(pieces + 4 * piece + 2).to(tl.int32)
    end = tl.load(pieces + 4 * piece + 3).to(tl.int32)
    rows, at, ds = block * BM + tl.arange(0, BM), tl.arange(0, KEYS), tl.arange(0, D)
    its = (piece * L + rows)[:, None] * (H * D) + head * D + ds[None, :]
    query = tl.load(q + its, mask=(rows < L)[:, None], other=0.0)
    keys = cache + head // (H // K) * stride_head
    table += owner * W
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    last = tl.minimum(begin + block * BM + BM, end)
    for first in range(0, last, KEYS):
        tile = keys + tl.load(table + first // KEYS).to(tl.int64) * stride_block
        here = first + at
        k = tl.load(tile + at[None, :] * D + ds[:, None], mask=(here < last)[None, :], other=0.0)
        v = tl.load(tile + stride_kv + at[:, None] * D + ds[None, :], mask=(here < last)[:, None], other=0.0)
        seen = here[None, :] <= begin + rows[:, None]
        tile_m, tile_l, tile_acc = attend(query, k, v, seen, scale, True)
        m, l, acc = join(m, l, acc, tile_m, tile_l, tile_acc, scale)
    tl.store(out + its, (acc / l[:, None]).to(out.dtype.element_ty), mask=(rows < L)[:, None])
