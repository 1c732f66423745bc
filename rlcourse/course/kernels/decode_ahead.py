"""Decode attention, the second step once more: the arithmetic of `decode_split`, with loads that are ahead of it.

The third step (`rlcourse/kernels/decode_attention.py`) differs from the second in several things: its products run on
tensor cores, more bytes are in flight, the grid is another one, and on some GPUs it starts early. This kernel has more
bytes in flight and changes nothing else, so that a measurement can tell what they bring by themselves. It is there for
that. They have no more time than before: the assembler moves the loads of a round behind most of its arithmetic.
"""

import math
from dataclasses import dataclass

from rlcourse.kernels.decode_common import (
    LOG2_E,
    LOWEST,
    allocate_partials,
    attention_arguments,
    check_shape,
    chunks,
    finish,
    power,
    share,
    tokens_of_row,
)  # fmt: skip
from rlcourse.kernels.dsl import Float32, const_expr, cute, cutlass, range_constexpr


@dataclass(frozen=True)
class AheadDecode:
    """The kernel, with the fields of `SplitDecode`. tiles: of a block that are in flight at a time; a block works on
    one and asks for the one that comes `tiles` later."""

    heads: int
    kv_heads: int
    head_size: int
    dtype: str = "bfloat16"
    padded: bool = False
    splits: int = 4
    tiles: int = 2
    threads = 128

    def __post_init__(self):
        check_shape(self)

    def arguments(self):
        return attention_arguments(self)

    def grid(self, q, *others):
        return self.splits, self.kv_heads, q.shape[0]

    @cute.jit
    def __call__(self, q, k_cache, v_cache, position, start, out, partial_acc, partial_ml, arrived, stream):
        launched = self.kernel(q, k_cache, v_cache, position, start, out, partial_acc, partial_ml, arrived)
        launched.launch(grid=self.grid(q), block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self, q: cute.Tensor, k_cache: cute.Tensor, v_cache: cute.Tensor, position: cute.Tensor, start: cute.Tensor,
        out: cute.Tensor, partial_acc: cute.Tensor, partial_ml: cute.Tensor, arrived: cute.Tensor,
    ):  # fmt: skip
        split, kv_head, row = cute.arch.block_idx()
        group = const_expr(self.heads // self.kv_heads)
        newest, first = tokens_of_row(position, start, row, k_cache.shape[2])
        begin, end = share(first, newest + 1, split, self.splits)
        queries = cute.local_tile(q[row, None, None], (group, self.head_size), (kv_head, 0))
        keys, values = k_cache[row, kv_head, None, None], v_cache[row, kv_head, None, None]
        partials = attend(queries, keys, values, begin, end, self.threads, self.tiles)
        finish(
            *partials, out, (partial_acc, partial_ml, arrived), row, kv_head, split, group, self.splits, self.threads
        )


@cute.jit
def attend(
    queries: cute.Tensor, keys: cute.Tensor, values: cute.Tensor, first, last, threads: cutlass.Constexpr,
    tiles: cutlass.Constexpr,
):  # fmt: skip
    """`decode_simple.attend`, where the loads of a tile of tokens come `tiles` tiles before their use."""
    group, size = queries.shape
    lanes, tokens = const_expr(size // 8), const_expr(threads * 8 // size)
    thread, _, _ = cute.arch.thread_idx()
    partial, column = thread // lanes, thread % lanes

    loaded = cute.make_rmem_tensor((1, 8), queries.element_type)
    query = cute.make_rmem_tensor((8, group), Float32)
    for h in range_constexpr(group):
        cute.autovec_copy(chunks(queries)[None, h, column], loaded)
        for e in range_constexpr(8):
            query[e, h] = loaded[e].to(Float32) * (LOG2_E / math.sqrt(size))

    m, l = cute.make_rmem_tensor(group, Float32), cute.make_rmem_tensor(group, Float32)
    acc = cute.make_rmem_tensor((8, group), Float32)
    m.fill(LOWEST)
    l.fill(0.0)
    acc.fill(0.0)
    key, value = (cute.make_rmem_tensor((1, 8, tiles), keys.element_type) for _ in range(2))
    if first < last:
        for tile in range_constexpr(tiles):
            load(key, value, keys, values, tile, first + tile * tokens + partial, last, column)
    for base in cutlass.range(first, last, tiles * tokens):
        for tile in range_constexpr(tiles):
            token = base + tile * tokens + partial
            for h in range_constexpr(group):
                score = Float32(0.0)
                for e in range_constexpr(8):
                    score += query[e, h] * key[0, e, tile].to(Float32)
                score = cute.arch.warp_reduction_sum(score, threads_in_group=lanes)
                score = score if token < last else -Float32.inf
                m_new = cute.arch.fmax(m[h], score)
                alpha, weight = power(m[h] - m_new), power(score - m_new)
                m[h] = m_new
                l[h] = l[h] * alpha + weight
                for e in range_constexpr(8):
                    acc[e, h] = acc[e, h] * alpha + weight * value[0, e, tile].to(Float32)
            load(key, value, keys, values, tile, token + tiles * tokens, last, column)

    all_ml, all_acc = allocate_partials(tokens, size)
    for h in range_constexpr(group):
        cute.autovec_copy(acc[None, h], cute.tiled_divide(all_acc[partial, h, None], (8,))[None, column])
        if column == 0:
            all_ml[partial, 0, h], all_ml[partial, 1, h] = m[h], l[h]
    return all_ml, all_acc


@cute.jit
def load(key: cute.Tensor, value: cute.Tensor, keys: cute.Tensor, values: cute.Tensor, tile, token, last, column):
    """A lane's 16 bytes of a token's key and value. Past the end it reads the last one again, which does not count."""
    slot = cutlass.min(token, last - 1)
    cute.autovec_copy(chunks(keys)[None, slot, column], key[None, None, tile])
    cute.autovec_copy(chunks(values)[None, slot, column], value[None, None, tile])


EXAMPLES = (AheadDecode(14, 2, 64, padded=True), AheadDecode(16, 8, 128, "float16", splits=8))
