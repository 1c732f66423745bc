"""Decode attention in Triton: one query token of a row against its cache. `triton_step.py` launches it."""

import triton
import triton.language as tl

from rlcourse.exact.operations import attend, join
from rlcourse.exact.pdl import gdc_launch_dependents, gdc_wait


@triton.jit
def shift_of(table, tile, tiles, stride_block, D: tl.constexpr, KEYS: tl.constexpr, PAGED: tl.constexpr):
    """How far behind its place in a row of one piece a tile lies. PAGED: it is the block that the row's table names."""
    return (
        tl.load(table + tile, mask=tile < tiles, other=0).to(tl.int64) * stride_block - tile * (KEYS * D)
        if PAGED
        else 0
    )


@triton.jit
def load_tile(keys, values, first, end, D: tl.constexpr, KEYS: tl.constexpr):
    """Keys [D, KEYS] and values [KEYS, D] of the tokens from `first` on, zeros from `end` on."""
    at, ds = first + tl.arange(0, KEYS), tl.arange(0, D)
    k = tl.load(keys + at[None, :] * D + ds[:, None], mask=(at < end)[None, :], other=0.0)
    return k, tl.load(values + at[:, None] * D + ds[None, :], mask=(at < end)[:, None], other=0.0)


@triton.jit
def attention_kernel(
    q, cache, table, completion, W, position, partial_acc, partial_ml, arrived, out, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, stride_kv, stride_row, stride_head,
    SPLITS: tl.constexpr, TILES, KEYS: tl.constexpr, PAGED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One query token of a row against its cache, the query heads of a key-value head together, in the tiles of
    `attend`. SPLITS programs take turns at the tiles, and the last one that arrives joins them (Flash-Decoding). Only
    the newest token waits for the kernel before: all others are from steps before. TILES: of the longest cache.
    PAGED: a tile is a block of the cache, and row `completion` of the table [completions, W] names it; the next one's
    name is asked for a tile ahead."""
    if PDL:
        gdc_launch_dependents()
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = H // K
    G16: tl.constexpr = 16 if G <= 16 else 32
    g, ds = tl.arange(0, G16), tl.arange(0, D)
    newest = tl.load(position + row).to(tl.int32)
    tiles = newest // KEYS + 1
    keys = cache + kv_head * stride_head
    if PAGED:
        table += tl.load(completion + row) * W
    else:
        keys += row.to(tl.int64) * stride_row
    values = keys + stride_kv
    shift = shift_of(table, split, tiles, stride_row, D, KEYS, PAGED)
    following = shift_of(table, split + SPLITS, tiles, stride_row, D, KEYS, PAGED)
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
        last = shift + (tl.minimum(newest, split * KEYS + KEYS - 1) if PAGED else newest) * D + ds
        k = tl.where((here == newest)[None, :], tl.load(keys + last)[:, None], k)
        v = tl.where((here == newest)[:, None], tl.load(values + last)[None, :], v)
        tile_m, tile_l, tile_acc = attend(query, k, v, (here <= newest)[None, :], scale, True)
        if SPLITS > 1:
            keep(partial_acc, partial_ml, place * TILES + split, tile_m, tile_l, tile_acc, G16, D)
        else:
            m, l, acc = join(m, l, acc, tile_m, tile_l, tile_acc, scale)
    for tile in range(split + SPLITS, tiles, SPLITS):
        shift = following
        following = shift_of(table, tile + SPLITS, tiles, stride_row, D, KEYS, PAGED)
        k, v = load_tile(keys + shift, values + shift, tile * KEYS, newest + 1, D, KEYS)
        tile_m, tile_l, tile_acc = attend(query, k, v, (tile * KEYS + at <= newest)[None, :], scale, True)
        if SPLITS > 1:
            keep(partial_acc, partial_ml, place * TILES + tile, tile_m, tile_l, tile_acc, G16, D)
        else:
            m, l, acc = join(m, l, acc, tile_m, tile_l, tile_acc, scale)
    done = True
    if SPLITS > 1:
        tl.debug_barrier()
        done = tl.atomic_add(arrived + place, 1, sem="acq_rel") == SPLITS - 1
        if done:
            for tile in range(tiles):
                its = (place * TILES + tile) * G16 + g
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
