"""Causal attention over packed sequences with grouped queries. A warp takes 16 query tokens of one head and goes over
the keys before them, 16 at a time, with the online softmax of FlashAttention (Dao et al. 2022, arXiv:2205.14135). A
tile may span several sequences, since each token knows where its own begins. `attention_tiles.py` says which lane has
what."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcourse.course.kernels import attention_tiles as tiles
from rlcourse.course.kernels.attention_tiles import HEAD, TILE, WARPS, AttentionKernel
from rlcourse.kernels.arguments import Argument, type_name
from rlcourse.kernels.decode_common import chunks
from rlcourse.kernels.dsl import Float32, const_expr, cute, cutlass, range_constexpr
from rlcourse.kernels.kernel import LOG2_E, LOWEST, operation, power, registers
from rlcourse.kernels.toolchain import launch

SCALE = LOG2_E / math.sqrt(HEAD)  # which makes of scores exponents of 2


def attention_reference(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Attention of each token over its sequence up to itself, scores times D ** -0.5, in float64. q [tokens, H, D]; k,
    v [tokens, K, D], each key-value head for H / K query heads; cu_seqlens int32 or int64 [sequences + 1]: sequence i
    is tokens cu_seqlens[i]..cu_seqlens[i + 1] - 1. Returns [tokens, H, D] in q's dtype."""
    parts = []
    for first, last in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        heads = (t[first:last].double().transpose(0, 1) for t in (q, k, v))
        parts.append(F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(0, 1))
    return torch.cat(parts).to(q.dtype)


@dataclass(frozen=True)
class Attention(AttentionKernel):
    """out [tokens, H, D] and log_sum float32 [H, tokens], base 2; start int32 [tokens]: where a token's sequence
    begins."""

    def arguments(self) -> tuple:
        start = Argument("start", "int32", ("tokens",), align=4)
        out = self.argument("out", self.heads, output=True)
        return *self.qkv(), start, out, self.per_row("log_sum", output=True)

    @cute.kernel
    def kernel(self, q, k, v, start, out, log_sum):
        base, g, c = tiles.own_tile()
        _, head, _ = cute.arch.block_idx()
        kv_head, tokens = head // const_expr(self.heads // self.kv_heads), q.shape[0]
        if base < tokens:  # the same for all lanes of a warp
            keys, values = chunks(k[None, kv_head, None]), chunks(v[None, kv_head, None])
            queries = tiles.left_operand(chunks(q[None, head, None]), base, g, c)
            first = cute.make_rmem_tensor(2, cutlass.Int32)
            for half in range_constexpr(2):
                first[half] = start[cutlass.min(base + g + 8 * half, tokens - 1)]
            acc = registers(Float32, (2, 2), 1, HEAD // 8)
            mass, largest = (registers(Float32, 2) for _ in range(2))
            largest.fill(LOWEST)
            for at in cutlass.range(start[base], cutlass.min(base + TILE, tokens), TILE):
                scores = tiles.products(queries, keys, at, g, c)
                hide(scores, base + g, first, at + 2 * c)
                soften(scores, acc, largest, mass)
                tiles.accumulate(acc, scores, values, at, g, c)
            for half in range_constexpr(2):
                for step in range_constexpr(2):
                    mass[half] = mass[half] + cute.arch.shuffle_sync_bfly(mass[half], offset=1 << step)
                row = base + g + 8 * half
                if row < tokens and c == 0:
                    log_sum[head, row] = largest[half] + cute.math.log2(mass[half], fastmath=True)
                mass[half] = cute.arch.rcp_approx(mass[half])
            tiles.write_rows(chunks(out[None, head, None]), acc, mass, base, g, c)


@cute.jit
def hide(scores, query, first, key):
    """Scale scores, and hide keys after a query or of another sequence. query, key: of the lane's first score."""
    for i in range_constexpr(2):
        for half in range_constexpr(2):
            for p in range_constexpr(2):
                token, score = key + 8 * i + p, scores[(p, half), 0, i] * SCALE
                seen = (token <= query + 8 * half) & (token >= first[half])
                scores[(p, half), 0, i] = score if seen else -Float32.inf


@cute.jit
def soften(scores, acc, largest, mass):
    """One step of the online softmax: scores become weights, acc and mass are told relative to the largest score now.
    largest is the same in the four lanes of a row, mass is of the lane alone."""
    for half in range_constexpr(2):
        above = largest[half]
        for i in range_constexpr(4):
            above = cute.arch.fmax(above, scores[(i % 2, half), 0, i // 2])
        for step in range_constexpr(2):
            above = cute.arch.fmax(above, cute.arch.shuffle_sync_bfly(above, offset=1 << step))
        shrink = power(largest[half] - above)
        largest[half], mass[half] = above, mass[half] * shrink
        for i in range_constexpr(4):
            weight = power(scores[(i % 2, half), 0, i // 2] - above)
            scores[(i % 2, half), 0, i // 2] = weight
            mass[half] = mass[half] + weight
        for i in range_constexpr(2 * acc.shape[2]):
            acc[(i % 2, half), 0, i // 2] = acc[(i % 2, half), 0, i // 2] * shrink


@operation()
def packed_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """`attention_reference` in one launch, with gradients: bfloat16 or float16, heads of 64, the strides of tokens
    free. Returns out, and log_sum float32 [H, tokens] for the backward pass. Raises KernelError."""
    out, log_sum = q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    launch(Attention(q.shape[1], k.shape[1], type_name(q)), q, k, v, bounds(q, cu_seqlens)[0], out, log_sum)
    return out, log_sum


class AttentionBackward(AttentionKernel):
    """Base of the gradients' kernels. Weights are computed again from the scores and the log of each row's sum. With
    `dweight` = dout times v^T, the gradient of the scores is weight * (dweight - delta), where delta is a row's sum of
    dout * out. Each gradient has one writer."""

    def inputs(self) -> tuple[Argument, ...]:
        """start, end int32 [tokens]: of each token's sequence; log_sum, delta float32 [H, tokens]."""
        bounds = (Argument(name, "int32", ("tokens",), align=4) for name in ("start", "end"))
        rows = (self.per_row(name) for name in ("log_sum", "delta"))
        return *self.qkv(), *bounds, *rows, self.argument("dout", self.heads)


class AttentionBackwardQueries(AttentionBackward):
    """dq [tokens, H, D]: a warp takes 16 queries of a head."""

    def arguments(self) -> tuple:
        return *self.inputs(), self.argument("dq", self.heads, output=True)

    @cute.kernel
    def kernel(self, q, k, v, start, end, log_sum, delta, dout, dq):
        base, g, c = tiles.own_tile()
        _, head, _ = cute.arch.block_idx()
        kv_head, tokens = head // const_expr(self.heads // self.kv_heads), q.shape[0]
        if base < tokens:  # the same for all lanes of a warp
            keys, values = chunks(k[None, kv_head, None]), chunks(v[None, kv_head, None])
            queries = tiles.left_operand(chunks(q[None, head, None]), base, g, c)
            slopes = tiles.left_operand(chunks(dout[None, head, None]), base, g, c)
            acc, factors = registers(Float32, (2, 2), 1, HEAD // 8), registers(Float32, 2)
            factors.fill(HEAD**-0.5)
            for at in cutlass.range(start[base], cutlass.min(base + TILE, tokens), TILE):
                scores = tiles.products(queries, keys, at, g, c)
                through = tiles.products(slopes, values, at, g, c)
                for half in range_constexpr(2):
                    query = cutlass.min(base + g + 8 * half, tokens - 1)
                    for i in range_constexpr(4):
                        place, key = ((i % 2, half), 0, i // 2), at + 2 * c + 8 * (i // 2) + i % 2
                        seen = (key <= query) & (key >= start[query])
                        weight = weight_of(scores[place], log_sum[head, query], seen)
                        through[place] = weight * (through[place] - delta[head, query])
                tiles.accumulate(acc, through, keys, at, g, c)
            tiles.write_rows(chunks(dq[None, head, None]), acc, factors, base, g, c)


class AttentionBackwardKeys(AttentionBackward):
    """dk, dv [tokens, K, D]: a warp takes 16 keys of a key-value head; its tiles of scores lie on their side."""

    def arguments(self) -> tuple:
        return *self.inputs(), *(self.argument(name, self.kv_heads, output=True) for name in ("dk", "dv"))

    def grid(self, q, *_):
        return -(-q.shape[0] // (TILE * WARPS)), self.kv_heads, 1

    @cute.kernel
    def kernel(self, q, k, v, start, end, log_sum, delta, dout, dk, dv):
        base, g, c = tiles.own_tile()
        _, kv_head, _ = cute.arch.block_idx()
        group, tokens = const_expr(self.heads // self.kv_heads), q.shape[0]
        if base < tokens:  # the same for all lanes of a warp
            keys = tiles.left_operand(chunks(k[None, kv_head, None]), base, g, c)
            values = tiles.left_operand(chunks(v[None, kv_head, None]), base, g, c)
            acc_k, acc_v = (registers(Float32, (2, 2), 1, HEAD // 8) for _ in range(2))
            factors = registers(Float32, 2)
            last = end[cutlass.min(base + TILE, tokens) - 1]  # one past the last query that sees any of these keys
            for head in cutlass.range(kv_head * group, kv_head * group + group):
                queries, slopes = chunks(q[None, head, None]), chunks(dout[None, head, None])
                for at in cutlass.range(base, last, TILE):
                    scores = tiles.products(keys, queries, at, g, c)
                    for i in range_constexpr(4):
                        query = at + 2 * c + 8 * (i // 2) + i % 2
                        there = cutlass.min(query, tokens - 1)
                        first, mass = start[there], log_sum[head, there]
                        for half in range_constexpr(2):
                            place, key = ((i % 2, half), 0, i // 2), base + g + 8 * half
                            seen = (key <= query) & (key >= first) & (query < tokens)
                            scores[place] = weight_of(scores[place], mass, seen)
                    tiles.accumulate(acc_v, scores, slopes, at, g, c)
                    through = tiles.products(values, slopes, at, g, c)
                    for i in range_constexpr(4):
                        part = delta[head, cutlass.min(at + 2 * c + 8 * (i // 2) + i % 2, tokens - 1)]
                        for half in range_constexpr(2):
                            place = ((i % 2, half), 0, i // 2)
                            through[place] = scores[place] * (through[place] - part)
                    tiles.accumulate(acc_k, through, queries, at, g, c)
            factors.fill(HEAD**-0.5)
            tiles.write_rows(chunks(dk[None, kv_head, None]), acc_k, factors, base, g, c)
            factors.fill(1.0)
            tiles.write_rows(chunks(dv[None, kv_head, None]), acc_v, factors, base, g, c)


@cute.jit
def weight_of(score: Float32, log_sum: Float32, seen):
    """The softmax weight behind a score, 0 for a key that the query does not see."""
    weight = power(score * SCALE - log_sum)
    return weight if seen else Float32(0.0)


@operation()
def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, end: Tensor, out: Tensor, log_sum: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv from dout [tokens, H, D] and what `packed_attention` took and gave. start, end int32 [tokens]: of
    each token's sequence. Raises KernelError."""
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    delta = (dout.float() * out.float()).sum(-1).T.contiguous()
    shape = q.shape[1], k.shape[1], type_name(q)
    given = q, k, v, start, end, log_sum, delta, dout
    launch(AttentionBackwardQueries(*shape), *given, dq)
    launch(AttentionBackwardKeys(*shape), *given, dk, dv)
    return dq, dk, dv


def bounds(q: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Where each token's sequence begins and ends, int32 [tokens] each."""
    token = torch.arange(q.shape[0], dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens, token, right=True)
    return cu_seqlens[sequence - 1].int(), cu_seqlens[sequence].int()


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx, dout, _):
    q, k, v, cu_seqlens, out, log_sum = ctx.saved_tensors
    return *attention_backward(q, k, v, *bounds(q, cu_seqlens), out, log_sum, dout.contiguous()), None


packed_attention.register_autograd(_gradients, setup_context=_keep)
