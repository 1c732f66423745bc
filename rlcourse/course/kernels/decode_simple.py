"""Decode attention, first step: one block for each row and key-value head, on CUDA cores.

A row's newest query token attends to its cached tokens. All G query heads that share a key-value head are computed
together, so keys and values are read once and not G times. The lesson of this version: 16 rows with 2 key-value heads
are 32 blocks of few bytes in flight each, and an H200 waits for them.
"""

import math
from dataclasses import dataclass

from rlcourse.kernels.decode_common import DecodeKernel, allocate_partials, chunks, finish, tokens_of_row
from rlcourse.kernels.dsl import Float32, const_expr, cute, cutlass, range_constexpr
from rlcourse.kernels.kernel import LOG2_E, LOWEST, power


@dataclass(frozen=True)
class SimpleDecode(DecodeKernel):
    """The kernel; its reference is `decode_attention_reference`."""

    splits = 1
    threads = 128

    def arguments(self):
        return super().arguments()[:6]

    def grid(self, q, *others):
        return self.kv_heads, q.shape[0], 1

    @cute.kernel
    def kernel(
        self, q: cute.Tensor, k_cache: cute.Tensor, v_cache: cute.Tensor, position: cute.Tensor, start: cute.Tensor,
        out: cute.Tensor,
    ):  # fmt: skip
        kv_head, row, _ = cute.arch.block_idx()
        group = const_expr(self.heads // self.kv_heads)
        newest, first = tokens_of_row(position, start, row, k_cache.shape[2])
        queries = cute.local_tile(q[row, None, None], (group, self.head_size), (kv_head, 0))
        keys, values = k_cache[row, kv_head, None, None], v_cache[row, kv_head, None, None]
        ml, acc = attend(queries, keys, values, first, newest + 1, self.threads)
        finish(ml, acc, out, None, row, kv_head, 0, group, 1, self.threads)


@cute.jit
def attend(queries: cute.Tensor, keys: cute.Tensor, values: cute.Tensor, first, last, threads: cutlass.Constexpr):
    """Attention of queries [G, D] over slots first..last - 1 of keys and values [S, D]: partials in shared memory.

    D / 8 lanes hold a token, 16 bytes each, so one load of a block brings 16 tokens of size 64. These lanes keep a
    partial of their own for each query head, and share only the scores, by shuffles.
    """
    size = queries.shape[1]
    tokens = const_expr(threads * 8 // size)
    partial, column, query, m, l, acc = begin(queries)
    key, value = cute.make_rmem_tensor((1, 8), keys.element_type), cute.make_rmem_tensor((1, 8), keys.element_type)
    for base in cutlass.range(first, last, tokens):
        token = base + partial
        slot = cutlass.min(token, last - 1)  # past the end a lane reads the last token again, and does not count it
        cute.autovec_copy(chunks(keys)[None, slot, column], key)
        cute.autovec_copy(chunks(values)[None, slot, column], value)
        take(query, key, value, token < last, m, l, acc, size // 8)

    all_ml, all_acc = allocate_partials(tokens, size)
    leave(all_ml, all_acc, m, l, acc, partial, column)
    return all_ml, all_acc


@cute.jit
def take(query: cute.Tensor, key: cute.Tensor, value: cute.Tensor, seen, m: cute.Tensor, l: cute.Tensor,
         acc: cute.Tensor, lanes: cutlass.Constexpr):  # fmt: skip
    """Add one token, which `lanes` lanes hold, to the online softmax of each query head."""
    for h in range_constexpr(acc.shape[1]):
        score = Float32(0.0)
        for e in range_constexpr(8):
            score += query[e, h] * key[e].to(Float32)
        score = cute.arch.warp_reduction_sum(score, threads_in_group=lanes)
        score = score if seen else -Float32.inf
        m_new = cute.arch.fmax(m[h], score)
        alpha, weight = power(m[h] - m_new), power(score - m_new)
        m[h] = m_new
        l[h] = l[h] * alpha + weight
        for e in range_constexpr(8):
            acc[e, h] = acc[e, h] * alpha + weight * value[e].to(Float32)


@cute.jit
def begin(queries: cute.Tensor):
    """Which partial a lane works on, and which 8 dimensions of it; those of the scaled queries; and no tokens yet."""
    group, size = queries.shape
    thread, _, _ = cute.arch.thread_idx()
    partial, column = thread // (size // 8), thread % (size // 8)
    loaded = cute.make_rmem_tensor((1, 8), queries.element_type)
    query, acc = (cute.make_rmem_tensor((8, group), Float32) for _ in range(2))
    for h in range_constexpr(group):
        cute.autovec_copy(chunks(queries)[None, h, column], loaded)
        for e in range_constexpr(8):
            query[e, h] = loaded[e].to(Float32) * (LOG2_E / math.sqrt(size))
    m, l = (cute.make_rmem_tensor(group, Float32) for _ in range(2))
    m.fill(LOWEST)
    l.fill(0.0)
    acc.fill(0.0)
    return partial, column, query, m, l, acc


@cute.jit
def leave(all_ml: cute.Tensor, all_acc: cute.Tensor, m: cute.Tensor, l: cute.Tensor, acc: cute.Tensor, partial, column):
    """Write a lane's part of its partial to shared memory."""
    for h in range_constexpr(acc.shape[1]):
        cute.autovec_copy(acc[None, h], cute.tiled_divide(all_acc[partial, h, None], (8,))[None, column])
        if column == 0:
            all_ml[partial, 0, h], all_ml[partial, 1, h] = m[h], l[h]
