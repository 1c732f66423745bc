"""Causal attention over packed sequences with grouped queries: sequences of any length lie one after the other, and no
token sees another sequence.

A warp takes 16 query tokens of one head and goes over the keys before them, 16 at a time, with the online softmax of
FlashAttention (Dao et al. 2022, arXiv:2205.14135): scores never reach memory. A tile may span several sequences, since
each token knows where its own begins. `attention_tiles.py` says which lane has what.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcourse.course.kernels import attention_tiles as tiles
from rlcourse.course.kernels.attention_backward import attention_backward
from rlcourse.course.kernels.attention_tiles import TILE, AttentionKernel
from rlcourse.kernels.arguments import Argument, type_name
from rlcourse.kernels.dsl import Float32, const_expr, cute, cutlass, range_constexpr
from rlcourse.kernels.kernel import LOG2_E, LOWEST, operation, power, registers
from rlcourse.kernels.toolchain import launch


def attention_reference(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Attention of each token over its sequence up to itself, scores times D ** -0.5, in float64 and one sequence after
    the other.

    q [tokens, H, D]; k, v [tokens, K, D], each key-value head for H / K query heads; cu_seqlens int32 or int64
    [sequences + 1]: sequence i is tokens cu_seqlens[i]..cu_seqlens[i + 1] - 1. Returns [tokens, H, D] in q's dtype.
    """
    parts = []
    for first, last in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        queries, keys, values = (t[first:last].double().transpose(0, 1) for t in (q, k, v))
        keys, values = (t.repeat_interleave(q.shape[1] // k.shape[1], 0) for t in (keys, values))
        scores = queries @ keys.transpose(1, 2) * q.shape[-1] ** -0.5
        later = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        parts.append((scores.masked_fill(later, -math.inf).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(parts).to(q.dtype)


@dataclass(frozen=True)
class Attention(AttentionKernel):
    """out [tokens, H, D] and log_sum float32 [H, tokens], the base-2 logarithm of each row's sum of powers.

    start int32 [tokens]: the first token of each token's sequence."""

    def arguments(self) -> tuple:
        start = Argument("start", "int32", ("tokens",), align=4)
        out = self.argument("out", self.heads, output=True)
        return *self.qkv(), start, out, self.per_row("log_sum", output=True)

    @cute.kernel
    def kernel(self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, start: cute.Tensor, out: cute.Tensor,
               log_sum: cute.Tensor):  # fmt: skip
        base, g, c = tiles.own_tile()
        _, head, _ = cute.arch.block_idx()
        kv_head, tokens = head // const_expr(self.heads // self.kv_heads), q.shape[0]
        if base < tokens:  # the same for all lanes of a warp
            keys, values = tiles.chunks(k, kv_head), tiles.chunks(v, kv_head)
            queries = tiles.left_operand(tiles.load_rows(tiles.chunks(q, head), base, g, c, self.head))
            first = cute.make_rmem_tensor(2, cutlass.Int32)
            for half in range_constexpr(2):
                first[half] = start[cutlass.min(base + g + 8 * half, tokens - 1)]
            acc = registers(Float32, (2, 2), 1, self.head // 8)
            mass, largest = (registers(Float32, 2) for _ in range(2))
            largest.fill(LOWEST)
            for at in cutlass.range(start[base], cutlass.min(base + TILE, tokens), TILE):
                scores = tiles.products(queries, tiles.load_rows(keys, at, g, c, self.head))
                hide(scores, base + g, first, at + 2 * c, const_expr(LOG2_E / math.sqrt(self.head)))
                soften(scores, acc, largest, mass)
                tiles.accumulate(acc, scores, tiles.load_columns(values, at, g, c, self.head))
            for half in range_constexpr(2):
                for step in range_constexpr(2):
                    mass[half] = mass[half] + cute.arch.shuffle_sync_bfly(mass[half], offset=1 << step)
                row = base + g + 8 * half
                if row < tokens and c == 0:
                    log_sum[head, row] = largest[half] + cute.math.log2(mass[half], fastmath=True)
                mass[half] = cute.arch.rcp_approx(mass[half])
            tiles.write_rows(tiles.chunks(out, head), acc, mass, base, g, c)


@cute.jit
def hide(scores: cute.Tensor, query, first: cute.Tensor, key, scale: cutlass.Constexpr):
    """Scale scores, and hide keys after a query or of another sequence. query, key: of the lane's first score."""
    for i in range_constexpr(2):
        for half in range_constexpr(2):
            for p in range_constexpr(2):
                token, score = key + 8 * i + p, scores[(p, half), 0, i] * scale
                seen = (token <= query + 8 * half) & (token >= first[half])
                scores[(p, half), 0, i] = score if seen else -Float32.inf


@cute.jit
def soften(scores: cute.Tensor, acc: cute.Tensor, largest: cute.Tensor, mass: cute.Tensor):
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
    free. cu_seqlens begins with 0 and ends with the number of tokens. Returns out, and log_sum float32 [H, tokens] for
    the backward pass. Raises KernelError."""
    out, log_sum = q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    launch(Attention(q.shape[1], k.shape[1], q.shape[2], type_name(q)), q, k, v, bounds(q, cu_seqlens)[0], out, log_sum)
    return out, log_sum


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
