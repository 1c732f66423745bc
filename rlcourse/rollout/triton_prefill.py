"""Attention of prefill over a paged cache, in Triton: queries of a piece of a sequence, keys in its blocks."""

import triton
import triton.language as tl

from rlcourse.exact.operations import attend, join


@triton.jit
def prefill_attention_kernel(
    q, cache, table, pieces, out, W, L, scale, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    stride_kv, stride_block, stride_head, BM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """BM queries of a head and piece: out [pieces * L, H, D]. They see the keys before their own, and it, in tiles that
    stand where those of a decode step do. pieces [pieces, 4]: completion, prompt, first token, end; table [completions,
    W]: the blocks of each completion."""
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
