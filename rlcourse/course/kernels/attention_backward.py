"""The gradients of causal attention over packed sequences, in two kernels: of queries, and of keys and values.

The weights are computed again from the scores and the log of each row's sum. With `dweight` = dout times v^T, the
gradient of the scores is weight * (dweight - delta), where delta is a row's sum of dout * out. A warp that has 16
queries goes over their keys, and one that has 16 keys over the queries that see them, of all heads of the group: each
gradient has one writer and one order of addition, so its bits are the same every time.
"""

import math

from torch import Tensor

from rlcourse.course.kernels import attention_tiles as tiles
from rlcourse.course.kernels.attention_tiles import TILE, WARPS, AttentionKernel
from rlcourse.kernels.arguments import Argument, type_name
from rlcourse.kernels.dsl import Float32, const_expr, cute, cutlass, range_constexpr
from rlcourse.kernels.kernel import LOG2_E, operation, power, registers
from rlcourse.kernels.toolchain import launch


class AttentionBackward(AttentionKernel):
    """Base of both kernels: what they read."""

    def inputs(self) -> tuple[Argument, ...]:
        """start, end int32 [tokens]: of each token's sequence; log_sum, delta float32 [H, tokens]: of each row, the
        base-2 logarithm of its sum of powers, and the sum of dout * out."""
        bounds = (Argument(name, "int32", ("tokens",), align=4) for name in ("start", "end"))
        rows = (self.per_row(name) for name in ("log_sum", "delta"))
        return *self.qkv(), *bounds, *rows, self.argument("dout", self.heads)


class AttentionBackwardQueries(AttentionBackward):
    """dq [tokens, H, D]: a warp takes 16 queries of a head."""

    def arguments(self) -> tuple:
        return *self.inputs(), self.argument("dq", self.heads, output=True)

    @cute.kernel
    def kernel(self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, start: cute.Tensor, end: cute.Tensor,
               log_sum: cute.Tensor, delta: cute.Tensor, dout: cute.Tensor, dq: cute.Tensor):  # fmt: skip
        base, g, c = tiles.own_tile()
        _, head, _ = cute.arch.block_idx()
        kv_head, tokens = head // const_expr(self.heads // self.kv_heads), q.shape[0]
        if base < tokens:  # the same for all lanes of a warp
            keys, values = tiles.chunks(k, kv_head), tiles.chunks(v, kv_head)
            queries = tiles.left_operand(tiles.load_rows(tiles.chunks(q, head), base, g, c, self.head))
            slopes = tiles.left_operand(tiles.load_rows(tiles.chunks(dout, head), base, g, c, self.head))
            acc, factors = registers(Float32, (2, 2), 1, self.head // 8), registers(Float32, 2)
            factors.fill(self.head**-0.5)
            for at in cutlass.range(start[base], cutlass.min(base + TILE, tokens), TILE):
                scores = tiles.products(queries, tiles.load_rows(keys, at, g, c, self.head))
                through = tiles.products(slopes, tiles.load_rows(values, at, g, c, self.head))
                for half in range_constexpr(2):
                    query = cutlass.min(base + g + 8 * half, tokens - 1)
                    for i in range_constexpr(4):
                        place, key = ((i % 2, half), 0, i // 2), at + 2 * c + 8 * (i // 2) + i % 2
                        seen = (key <= query) & (key >= start[query])
                        weight = weight_of(scores[place], log_sum[head, query], seen, self.head)
                        through[place] = weight * (through[place] - delta[head, query])
                tiles.accumulate(acc, through, tiles.load_columns(keys, at, g, c, self.head))
            tiles.write_rows(tiles.chunks(dq, head), acc, factors, base, g, c)


class AttentionBackwardKeys(AttentionBackward):
    """dk, dv [tokens, K, D]: a warp takes 16 keys of a key-value head; its tiles of scores lie on their side."""

    def arguments(self) -> tuple:
        return *self.inputs(), *(self.argument(name, self.kv_heads, output=True) for name in ("dk", "dv"))

    def grid(self, q, *_):
        return -(-q.shape[0] // (TILE * WARPS)), self.kv_heads, 1

    @cute.kernel
    def kernel(self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, start: cute.Tensor, end: cute.Tensor,
               log_sum: cute.Tensor, delta: cute.Tensor, dout: cute.Tensor, dk: cute.Tensor,
               dv: cute.Tensor):  # fmt: skip
        base, g, c = tiles.own_tile()
        _, kv_head, _ = cute.arch.block_idx()
        group, tokens = const_expr(self.heads // self.kv_heads), q.shape[0]
        if base < tokens:  # the same for all lanes of a warp
            keys = tiles.left_operand(tiles.load_rows(tiles.chunks(k, kv_head), base, g, c, self.head))
            values = tiles.left_operand(tiles.load_rows(tiles.chunks(v, kv_head), base, g, c, self.head))
            acc_k, acc_v = (registers(Float32, (2, 2), 1, self.head // 8) for _ in range(2))
            factors = registers(Float32, 2)
            last = end[cutlass.min(base + TILE, tokens) - 1]  # one past the last query that sees any of these keys
            for head in cutlass.range(kv_head * group, kv_head * group + group):
                queries, slopes = tiles.chunks(q, head), tiles.chunks(dout, head)
                for at in cutlass.range(base, last, TILE):
                    scores = tiles.products(keys, tiles.load_rows(queries, at, g, c, self.head))
                    for i in range_constexpr(4):
                        query = at + 2 * c + 8 * (i // 2) + i % 2
                        there = cutlass.min(query, tokens - 1)
                        first, mass = start[there], log_sum[head, there]
                        for half in range_constexpr(2):
                            place, key = ((i % 2, half), 0, i // 2), base + g + 8 * half
                            seen = (key <= query) & (key >= first) & (query < tokens)
                            scores[place] = weight_of(scores[place], mass, seen, self.head)
                    tiles.accumulate(acc_v, scores, tiles.load_columns(slopes, at, g, c, self.head))
                    through = tiles.products(values, tiles.load_rows(slopes, at, g, c, self.head))
                    for i in range_constexpr(4):
                        part = delta[head, cutlass.min(at + 2 * c + 8 * (i // 2) + i % 2, tokens - 1)]
                        for half in range_constexpr(2):
                            place = ((i % 2, half), 0, i // 2)
                            through[place] = scores[place] * (through[place] - part)
                    tiles.accumulate(acc_k, through, tiles.load_columns(queries, at, g, c, self.head))
            factors.fill(self.head**-0.5)
            tiles.write_rows(tiles.chunks(dk, kv_head), acc_k, factors, base, g, c)
            factors.fill(1.0)
            tiles.write_rows(tiles.chunks(dv, kv_head), acc_v, factors, base, g, c)


@cute.jit
def weight_of(score: Float32, log_sum: Float32, seen, head: cutlass.Constexpr):
    """The softmax weight behind a score, 0 for a key that the query does not see."""
    weight = power(score * const_expr(LOG2_E / math.sqrt(head)) - log_sum)
    return weight if seen else Float32(0.0)


@operation()
def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, end: Tensor, out: Tensor, log_sum: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv from dout [tokens, H, D] and what `packed_attention` took and gave. start, end int32 [tokens]: of
    each token's sequence. Raises KernelError."""
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    delta = (dout.float() * out.float()).sum(-1).T.contiguous()
    shape = q.shape[1], k.shape[1], q.shape[2], type_name(q)
    given = q, k, v, start, end, log_sum, delta, dout
    launch(AttentionBackwardQueries(*shape), *given, dq)
    launch(AttentionBackwardKeys(*shape), *given, dk, dv)
    return dq, dk, dv
