"""The new token in fused decode attention: RoPE of its query and key, its place in the cache and softmax. Lanes hold a
head as in `decode_attention`: lane 4 g + c has chunks c, c + 4, ... of 8 elements, so that element i and element i + D
/ 2, which RoPE turns by one angle, are in one lane, at equal places of the halves of its chunks."""

import torch
from torch import Tensor

from rlcourse.kernels.decode_common import decode_attention_reference
from rlcourse.kernels.dsl import Float32, const_expr, cute, cutlass, range_constexpr


def fused_decode_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor,
    start: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """RoPE of q and k, the cache write, and attention of the new token, in float32, rounded once. q [B, H, D] and k, v
    [B, K, D] as they leave the projection; cos, sin [B, D / 2] or, as transformers gives them, [B, D] with equal
    halves. k and v go to slot `position` of k_cache and v_cache [B, K, S, D], in place, but for an idle row; the rest
    as in `decode_attention_reference`, except that the new token sees itself also where start > position."""

    def turned(x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        cosine, sine = (angle[:, None, : first.shape[-1]].float() for angle in (cos, sin))
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)

    position = position.expand(len(q))
    (rows,) = torch.where((position >= 0) & (position < k_cache.shape[2]))
    k_cache[rows, :, position[rows]] = turned(k)[rows].to(k_cache.dtype)
    v_cache[rows, :, position[rows]] = v[rows]
    if start is not None:
        start = torch.minimum(start, position)
    return decode_attention_reference(turned(q), k_cache, v_cache, position, start).to(q.dtype)


@cute.jit
def load(registers, heads, index, lane, lanes: cutlass.Constexpr):
    """Chunks lane, lane + lanes, ... of heads[index] into registers [8, n]; heads as `chunks` gives them."""
    for j in range_constexpr(registers.shape[1]):
        cute.autovec_copy(heads[None, index, lane + lanes * j], registers[None, j])


@cute.jit
def sum_of_four(x: Float32):
    """The sum over the four lanes that hold a head."""
    x += cute.arch.shuffle_sync_bfly(x, offset=1)
    x += cute.arch.shuffle_sync_bfly(x, offset=2)
    return x


@cute.jit
def rotate(x, cos, sin):
    """RoPE of a query or key in place. x [8, n]; cos, sin [8, n / 2]."""
    n = const_expr(x.shape[1])
    scaled = cute.make_rmem_tensor((8, n), Float32)
    for i in range_constexpr(8 * n):
        scaled[i] = x[i].to(Float32)
    for j in range_constexpr(n // 2):
        for e in range_constexpr(8):
            first, second = scaled[e, j], scaled[e, j + n // 2]
            cosine, sine = cos[e, j].to(Float32), sin[e, j].to(Float32)
            x[e, j] = (first * cosine - second * sine).to(x.element_type)
            x[e, j + n // 2] = (second * cosine + first * sine).to(x.element_type)


@cute.jit
def write_to_cache(key, value, keys, values, slot, g, c):
    """Store the new key and value: of the lanes that hold the same, one."""
    if g == 0:
        for j in range_constexpr(key.shape[1]):
            cute.autovec_copy(key[None, j], keys[None, slot, c + 4 * j])
    if c == 0:
        for j in range_constexpr(value.shape[1]):
            cute.autovec_copy(value[None, j], values[None, slot, g + 8 * j])


@cute.jit
def open_softmax(acc, query, key, value, c, scale):
    """The new token as the first of the softmax, from registers: its score is m, its value acc, and nobody
    has to read what was written to the cache. On CUDA cores: one token is not worth a tensor core."""
    product = Float32(0.0)
    for i in range_constexpr(cute.size(key)):
        product += query[i].to(Float32) * key[i].to(Float32)
    for i in range_constexpr(cute.size(acc)):
        acc[i] = value[i % 4 // 2 + i // 4 * 2].to(Float32)  # the same for both of the lane's heads
    l = Float32(1.0) if c == 0 else Float32(0.0)  # four lanes share a head, one counts
    return sum_of_four(product) * scale, l
