"""Decode attention, second step: several blocks share a row's tokens (split-KV, also called Flash-Decoding). Each of
`splits` blocks does what the block of `decode_simple` does, over its share of the tokens, and the last one to arrive
puts the partials together. The lesson of this version: on a small card it is bound by memory; on an H200 it stays well
below what memory and the CUDA cores allow, probably since each warp, with 80 instructions a token, waits for itself."""

from dataclasses import dataclass

from rlcourse.course.kernels.decode_simple import attend
from rlcourse.kernels.decode_common import DecodeKernel, finish, share, tokens_of_row
from rlcourse.kernels.dsl import const_expr, cute


@dataclass(frozen=True)
class SplitDecode(DecodeKernel):
    """The kernel. splits: blocks that share a row and key-value head. They take equal parts of the slots in use, which
    are known on the device alone, so that one grid serves a CUDA graph at any length."""

    splits: int = 4
    threads = 128

    @cute.kernel
    def kernel(self, q, k_cache, v_cache, position, start, out, partial_acc, partial_ml, arrived):
        split, kv_head, row = cute.arch.block_idx()
        group = const_expr(self.heads // self.kv_heads)
        newest, first = tokens_of_row(position, start, row, k_cache.shape[2])
        begin, end = share(first, newest + 1, split, self.splits)
        queries = cute.local_tile(q[row, None, None], (group, self.head_size), (kv_head, 0))
        keys, values = k_cache[row, kv_head, None, None], v_cache[row, kv_head, None, None]
        partials = self.attend(queries, keys, values, begin, end)
        finish(
            *partials, out, (partial_acc, partial_ml, arrived), row, kv_head, split, group, self.splits, self.threads
        )

    def attend(self, *tokens):
        return attend(*tokens, self.threads)
