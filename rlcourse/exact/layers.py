"""A model's layers over whole sequences, forward and backward, as autograd knows them. The residual stream x [N, d] is
float32: N tokens of several sequences (`sequences.py`). Sums are in the order of a decode step's (`operations.py`)."""

from collections.abc import Callable
from functools import partial

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlcourse.exact import EXACT, KEYS, LOG2_E, backward_kernels, pass_kernels
from rlcourse.exact.products import add_product, add_shares, linear, one_chain, product_float32
from rlcourse.exact.sequences import Sequences
from rlcourse.exact.weights import FusedWeights, Layer
from rlcourse.lora import merged_weights

QUERIES = 64  # of a program in attention
COLUMNS = 1024  # of a program in SwiGLU
# Of attention's gradients: queries and keys of a program, or of its turn. The fastest on an H200, heads of 64 or 128.
OF_QUERIES = {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2}
OF_KEYS = {"BM": 32, "BN": 64, "num_warps": 4, "num_stages": 3}
PROGRAMS = 528  # of a kernel that adds over tokens: four for each processor of an H200
Angles = tuple[Tensor, Tensor]  # cosines and sines [N, D / 2] by which RoPE turns each token


def normed(x: Tensor, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(y [N, d], squares [N, d / 32] float32) of a norm whose 1 / rms comes after the product that follows."""
    n, d = x.shape
    y, squares = x.new_empty(n, d, dtype=dtype), x.new_empty(n, d // 32)
    pass_kernels.norm_kernel[(n,)](x, weight, y, squares, d, triton.next_power_of_2(d), **EXACT)
    return y, squares


def heads(weights: FusedWeights, layer: Layer, raw: Tensor, squares: Tensor, angles: Angles) -> tuple[Tensor, ...]:
    """q [N, H, D], k and v [N, K, D] from the projection raw [N, (H + 2 K) D]."""
    h, k, d = weights.heads, weights.kv_heads, weights.head_dim
    q, keys, values = (raw.new_empty(len(raw), count, d) for count in (h, k, k))
    pass_kernels.rope_kernel[(len(raw),)](
        raw, squares, layer.qkv_bias, layer.q_norm, layer.k_norm, *angles, q, keys, values,
        weights.eps, h, k, d, 32 * squares.shape[1], triton.next_power_of_2(h + 2 * k), (d // 2).bit_length() - 1,
        layer.qkv_bias is not None, layer.q_norm is not None, **EXACT,
    )  # fmt: skip
    return q, keys, values


def attention(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Causal attention within each sequence: (out [N, H, D], lse [S, H, sequences.length] float32, 0 for padding and
    for tokens that a sequence shares)."""
    (_, h, d), length = q.shape, sequences.length
    out, lse = torch.empty_like(q), q.new_zeros(len(sequences), h, length, dtype=torch.float32)
    pass_kernels.attention_kernel[(triton.cdiv(length, QUERIES), h, len(sequences))](
        q, k, v, out, lse, sequences.table, length, LOG2_E * d**-0.5, h, k.shape[1], d, QUERIES, KEYS,
        num_warps=4 if d <= 64 else 8, num_stages=2, **EXACT,
    )  # fmt: skip
    return out, lse


def inner(weights: FusedWeights, raw: Tensor, squares: Tensor) -> Tensor:
    """silu(gate) * up [N, inner] from the projection raw [N, 2 inner]."""
    n, size = len(raw), raw.shape[1] // 2
    h = raw.new_empty(n, size)
    grid = (n, triton.cdiv(size, COLUMNS))
    pass_kernels.swiglu_kernel[grid](raw, squares, h, weights.eps, size, 32 * squares.shape[1], COLUMNS, **EXACT)
    return h


def layer_pass(
    weights: FusedWeights, layer: Layer, x: Tensor, angles: Angles, attend: Callable
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """x after a layer, and what its backward pass and a cache want of it. attend: `attention` of q, k and v."""
    y, squares = normed(x, layer.attention_norm, weights.dtype)
    raw = linear(y, layer.qkv)
    q, k, v = heads(weights, layer, raw, squares, angles)
    mixed, lse = attend(q, k, v)
    x2 = add_product(x, mixed.flatten(1), layer.out)
    y2, squares2 = normed(x2, layer.mlp_norm, weights.dtype)
    raw2 = linear(y2, layer.gate_up)
    h = inner(weights, raw2, squares2)
    after = add_shares(x2, h, layer.down)
    raw = raw if layer.q_norm is not None else None  # the backward pass of a norm of heads wants them as they came
    return after, (x, squares, raw, q, k, v, mixed, lse, x2, squares2, raw2)


class LayerFunction(torch.autograd.Function):
    """`layer_pass` with its gradients: of x, and in float32 of the model's own parameters, `Layer.sources` in order.
    recompute: keep all but SwiGLU's two projections, which are most of it, and compute these again."""

    @staticmethod
    def forward(
        ctx, x, weights: FusedWeights, layer: Layer, sequences: Sequences, angles: Angles, recompute: bool, *parameters
    ) -> Tensor:
        after, saved = layer_pass(weights, layer, x, angles, partial(attention, sequences=sequences))
        ctx.save_for_backward(*saved[:-1], None if recompute else saved[-1])
        ctx.settings, ctx.sizes = (weights, layer, sequences, angles), [len(p) for p in parameters]
        return after

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        weights, layer, sequences, angles = ctx.settings
        *saved, raw = ctx.saved_tensors
        if raw is None:
            x2 = saved[-2]
            with one_chain():
                raw = linear(normed(x2, layer.mlp_norm, weights.dtype)[0], layer.gate_up)
        dx, gradients = layer_backward(weights, layer, (*saved, raw), gradient, sequences, angles)
        return dx, None, None, None, None, None, *parameter_gradients(gradients, ctx.sizes)


def layer_backward(
    weights, layer: Layer, saved, gradient: Tensor, sequences, angles, into: list[Tensor | None] | None = None
) -> tuple[Tensor, list[Tensor | None]]:
    """Gradients of x before a layer, and in float32 of the layer's weights as they are fused, None for those that it
    lacks; from that of x after it, and what `layer_pass` saved. into: where those of matrices are to be."""
    _, to_qkv, _, _, _, to_out, _, to_gate_up, to_down = into or [None] * 9
    x, squares, raw, q, k, v, mixed, lse, x2, squares2, raw2 = saved
    rounded = gradient.to(weights.dtype)
    draw, h = inner_backward(weights, raw2, squares2, rounded @ layer.down)
    d_down = product_float32(rounded.T, h, to_down)
    through = draw @ layer.gate_up
    dx, rounded, y, d_mlp_norm = norm_backward(weights, x2, layer.mlp_norm, squares2, through, gradient)
    d_gate_up = product_float32(draw.T, y, to_gate_up)
    d_out = product_float32(rounded.T, mixed.flatten(1), to_out)
    dq, dk, dv = attention_backward((rounded @ layer.out).view_as(q), q, k, v, mixed, lse, sequences)
    draw, d_bias, d_q_norm, d_k_norm = heads_backward(weights, layer, raw, squares, dq, dk, dv, sequences, angles)
    dx, _, y, d_norm = norm_backward(weights, x, layer.attention_norm, squares, draw @ layer.qkv, dx)
    d_qkv = product_float32(draw.T, y, to_qkv)
    return dx, [d_norm, d_qkv, d_bias, d_q_norm, d_k_norm, d_out, d_mlp_norm, d_gate_up, d_down]


def parameter_gradients(fused: list[Tensor | None], sizes: list[int]) -> list[Tensor]:
    """Of a layer's parameters, `Layer.sources` in order, which have so many rows: parts of the fused weights'."""
    parts, left = [], iter(sizes)
    for whole in fused:
        at = 0
        while whole is not None and at < len(whole):
            size = next(left)
            parts.append(whole[at : at + size])
            at += size
    return parts


def norm_backward(weights, x, weight, squares, dy, beside: Tensor | None = None) -> tuple[Tensor, ...]:
    """(gradient of x, with `beside` added; the same rounded; the norm's y again; the weight's gradient)."""
    n, d = x.shape
    dx, parts = torch.empty_like(x), x.new_empty(min(PROGRAMS, n), d)
    rounded, y = x.new_empty(2, n, d, dtype=weights.dtype)
    backward_kernels.norm_backward_kernel[(len(parts),)](
        x, weight, squares, dy, beside, dx, rounded, y, parts, n, weights.eps, d, triton.next_power_of_2(d)
    )
    return dx, rounded, y, parts.sum(0)


def inner_backward(weights, raw: Tensor, squares: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of raw [N, 2 inner], h [N, inner])."""
    draw, h = torch.empty_like(raw), torch.empty_like(dh)
    grid = (len(raw), triton.cdiv(dh.shape[1], COLUMNS))
    backward_kernels.swiglu_backward_kernel[grid](
        raw, squares, dh, draw, h, weights.eps, dh.shape[1], 32 * squares.shape[1], COLUMNS
    )
    return draw, h


def heads_backward(weights, layer, raw, squares, dq, dk, dv, sequences, angles) -> tuple[Tensor | None, ...]:
    """Gradients of the projection [N, (H + 2 K) D], its bias, and the norms of heads, from `attention_backward`'s."""
    h, k, d = weights.heads, weights.kv_heads, weights.head_dim
    n, programs = len(squares), min(PROGRAMS, len(squares))
    has_bias, has_norm = layer.qkv_bias is not None, layer.q_norm is not None
    draw = dq.new_empty(n, (h + 2 * k) * d)
    bias = squares.new_empty(programs, (h + 2 * k) * d) if has_bias else None
    q_norm, k_norm = (squares.new_empty(programs, d) if has_norm else None for _ in range(2))
    backward_kernels.rope_backward_kernel[(programs,)](
        dq, dk, dv, sequences.places, sequences.copies, sequences.length, raw, squares, layer.q_norm, layer.k_norm,
        *angles, draw, bias, q_norm, k_norm, n, weights.eps, h, k, d, 32 * squares.shape[1],
        triton.next_power_of_2(h + 2 * k), has_bias, has_norm,
    )  # fmt: skip
    return draw, *(part if part is None else part.sum(0) for part in (bias, q_norm, k_norm))


def attention_backward(gradient, q, k, v, out, lse, sequences: Sequences) -> tuple[Tensor, ...]:
    """Gradients of q [N, H, D], and for each sequence of k and v [S, sequences.length, K, D], from that of `out`."""
    (_, h, d), kv_heads, count, length = q.shape, k.shape[1], len(sequences), sequences.length
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    dk, dv = k.new_empty(2, count, length, kv_heads, d)
    sizes = length, d**-0.5, h, kv_heads, d
    backward_kernels.query_gradient_kernel[(triton.cdiv(length, OF_QUERIES["BM"]), h, count)](
        gradient, q, k, v, out, lse, delta, dq, sequences.table, *sizes, **OF_QUERIES
    )
    backward_kernels.key_gradient_kernel[(triton.cdiv(length, OF_KEYS["BN"]), kv_heads, count)](
        gradient, q, k, v, lse, delta, dk, dv, sequences.table, *sizes, **OF_KEYS
    )
    return dq, dk, dv


class Embed(torch.autograd.Function):
    """x [N, d] float32: the embeddings of ids [N], as the engine has them. untrained: an id whose embedding has no
    gradient, as the padding of `nn.Embedding`, or -1."""

    @staticmethod
    def forward(ctx, ids: Tensor, weights: FusedWeights, untrained: int, parameter: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.settings = len(parameter), untrained
        return weights.embedding[ids].float()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        (ids,) = ctx.saved_tensors
        return None, None, None, torch.ops.aten.embedding_dense_backward(gradient, ids, *ctx.settings, False)


def trunk(
    model, weights: FusedWeights, ids: Tensor, sequences: Sequences, recompute: bool = False, captured=None
) -> Tensor:
    """x [N, d] after the last layer, before the last norm; ids [N]. Differentiable in the parameters of `model`, whose
    fused copies `weights` are; with an adapter, the gradient of W + s B A goes on to A and B. recompute: see
    `LayerFunction`. captured: `CapturedLayers` of them, if there are any."""
    table = model.model.embed_tokens
    untrained = -1 if table.padding_idx is None else table.padding_idx
    x = Embed.apply(ids, weights, untrained, table.weight)
    merged = merged_weights(model)
    # One layer at a time: merged matrices are only what their gradients go through, their values are in `weights`.
    own = ([merged(p) for parts in Layer.sources(layer) for p in parts] for layer in model.model.layers)
    if captured is not None and captured.ready(len(x), sequences):
        return captured(x, sequences, [p for parameters in own for p in parameters])
    angles = angles_at(weights, sequences.positions)
    with one_chain():
        for layer, parameters in zip(weights.layers, own, strict=True):
            x = LayerFunction.apply(x, weights, layer, sequences, angles, recompute, *parameters)
    return x


def angles_at(weights: FusedWeights, positions: Tensor) -> Angles:
    return weights.cos[positions], weights.sin[positions]
