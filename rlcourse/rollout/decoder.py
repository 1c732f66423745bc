"""The forward pass of Qwen2, Qwen3 and Llama over fused copies of the weights and a static cache, in PyTorch. As in
transformers, but: queries, keys and values are one product, as are gate and up; the query heads that share a key-value
head are folded into one batched product, so the cache is never repeated; the residual stream is float32. R rows, H
query and K key-value heads of size D, S tokens that a row's cache has room for."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from rlcourse.exact.weights import Layer, fused_weights

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Decoder:
    """The two passes over a model's fused weights: `prefill` and `decode`. attention: what `decode` has in place of its
    own: of q [R, H, D], keys and values [R, K, S, D] and positions [R] it returns [R, H, D], where the query of row r
    attends to keys 0 to positions[r]. Raises ValueError for what `FusedWeights` does not know."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, compile: bool, attention: Attention | None = None):
        self.model, self.dtype, self.attention = model, dtype, attention
        self.weights = fused_weights(model, dtype)
        self.heads, self.kv_heads, self.head_dim = self.weights.heads, self.weights.kv_heads, self.weights.head_dim
        self.layers, self.eps = self.weights.layers, self.weights.eps
        self.embedding, self.norm, self.head = self.weights.embedding, self.weights.norm, self.weights.head
        self.sync()
        self.decode_layer = self._decode_layer
        if compile:  # one program for all numbers of rows and tokens; only the weights' sizes are built in
            for weight in (weight for layer in self.layers for weight in vars(layer).values() if weight is not None):
                torch._dynamo.mark_static(weight)
            self.decode_layer = torch.compile(self._decode_layer, dynamic=True)

    def sync(self) -> None:
        """Take over the model's weights as they are now."""
        self.weights.sync(self.model)

    def new_cache(self, rows: int, tokens: int) -> Tensor:
        """An empty cache [layers, 2, R, K, S, D]: keys and values. Zeros, as 0 x garbage could be nan."""
        shape = (len(self.layers), 2, rows, self.kv_heads, tokens, self.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.embedding.device)

    def prefill(self, ids: Tensor, lengths: Tensor, cache: Tensor) -> Tensor:
        """Logits [prompts, vocabulary] after the last token of each prompt, ids [prompts, P] padded on the right; keys
        and values go to the front of `cache` [layers, 2, prompts, K, P or more, D]. lengths [prompts]."""
        prompts, width = ids.shape
        x = self.embedding[ids].float()
        rope = self.rope(torch.arange(width, device=ids.device)[None])
        for layer, (keys, values) in zip(self.layers, cache, strict=True):
            q, k, v = self._heads(x, layer, rope)
            keys[:, :, :width], values[:, :, :width] = k, v
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = self._add(x, mixed, layer)
        return self.logits(x[torch.arange(prompts, device=ids.device), lengths - 1])

    def decode(self, tokens: Tensor, positions: Tensor, cache: Tensor, length: int) -> Tensor:
        """Logits [R, vocabulary] after one more token of each row, which has `positions` tokens in its own cache.
        tokens, positions [R] int64; cache [layers, 2, R, K, S, D], filled from the front; the new keys and values go to
        place `positions`. length: so many tokens of the cache are read; the logits of a row with more mean nothing."""
        rows, room = cache.shape[2], cache.shape[4]
        heads = torch.arange(rows * self.kv_heads, device=tokens.device).view(rows, -1)
        places = (heads * room + positions[:, None]).flatten()  # of each row and head in a layer's keys, one a token
        x = self.embedding[tokens[:, None]].float()
        rope = self.rope(positions[:, None])
        unseen = torch.arange(length, device=tokens.device) > positions[:, None]
        bias = torch.zeros(unseen.shape, device=tokens.device).masked_fill_(unseen, float("-inf"))[:, None, None]
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            keys, values = (part.view(-1, self.head_dim) for part in layer_cache)
            x = self.decode_layer(x, layer, keys, values, rope, positions, places, bias, room)
        return self.logits(x[:, 0])

    def _decode_layer(self, x, layer: Layer, keys, values, rope, positions, places, bias, room: int) -> Tensor:
        """One layer of `decode`. keys, values [R * K * room, D] are flat: one indexed copy writes the new ones in
        place."""
        q, k, v = self._heads(x, layer, rope)
        keys.index_copy_(0, places, k.reshape(-1, self.head_dim))
        values.index_copy_(0, places, v.reshape(-1, self.head_dim))
        keys, values = (part.view(len(x), self.kv_heads, room, self.head_dim) for part in (keys, values))
        if self.attention is not None:
            return self._add(x, self.attention(q[:, :, 0], keys, values, positions)[:, :, None], layer)
        return self._add(x, self._attend(q, keys, values, bias), layer)

    def _attend(self, q, keys, values, bias) -> Tensor:
        """[R, H, 1, D] of one query token a row, the query heads of a key-value head in one product."""
        rows, length = q.shape[0], bias.shape[-1]
        folded = q.reshape(rows, self.kv_heads, -1, self.head_dim) * self.head_dim**-0.5
        scores = torch.matmul(folded, keys[:, :, :length].transpose(2, 3)).float() + bias
        mixed = torch.matmul(scores.softmax(-1).to(values.dtype), values[:, :, :length])
        return mixed.view(rows, self.heads, 1, self.head_dim)

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(self._norm(x, self.norm), self.head)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [R, 1, T, D] of the rotary embedding; positions [R, T]. Angles in float32."""
        angles = positions[:, None, :, None].float() * self.weights.inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], weight, self.eps).to(self.dtype)

    def _heads(self, x: Tensor, layer: Layer, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Norm, projections and rotation: x [R, T, d] float32 → q [R, H, T, D], k and v [R, K, T, D]."""
        qkv = F.linear(self._norm(x, layer.attention_norm), layer.qkv, layer.qkv_bias)
        qkv = qkv.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if layer.q_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        return rotate(q, *rope), rotate(k, *rope), v

    def _add(self, x: Tensor, mixed: Tensor, layer: Layer) -> Tensor:
        """Add the attention's output and then the MLP's to the residual: x [R, T, d], mixed [R, H, T, D]."""
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), layer.out)
        gate, up = F.linear(self._norm(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, layer.down)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021), halves paired as in Llama and Qwen: x [R, heads, T, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
