"""One decode step by the kernels of `triton_*.py`: 5 launches a layer and 4 around them. Products are those of
`cute_products.py` where CuTe DSL is installed and they are faster: with the same bits."""

import math
from dataclasses import replace
from functools import partial

import torch
import triton
from torch import Tensor

from rlcourse.exact import EXACT, GROUP, KEYS, LOG2_E, VOCABULARY_TILE, pass_kernels
from rlcourse.exact.head import inverse_rms, restricted_logprobs
from rlcourse.exact.layers import normed
from rlcourse.exact.products import SHARES, linear, one_chain, share_of
from rlcourse.exact.weights import FusedWeights
from rlcourse.rollout import triton_attention, triton_sample
from rlcourse.rollout import triton_kernels as kernels
from rlcourse.rollout.slots import Slots
from rlcourse.rollout.tiles import (
    LEAST_SHARED,
    AttentionTile,
    MatmulTile,
    TileConfig,
    attention_tile,
    cute_wins,
    launch_options,
    tiles_for,
)
from rlcourse.sampling import Sampling, sample_tokens

SAMPLED_AT_ONCE = 256  # first tokens sampled at once, for the memory of their logits


class TritonStep:
    """Decode steps of the first slots of `slots` over the engine's cache [layers, 2, num_blocks, K, BLOCK_TOKENS, D]. A
    rollout begins with `new_seed`. cute: products are by the kernels in CuTe DSL where those win."""

    def __init__(self, weights: FusedWeights, slots: Slots, cache: Tensor, eos: Tensor, cute: bool = True):
        self.weights, self.slots, self.cache, self.eos = weights, slots, cache, eos
        assert cache.shape[4] == KEYS, "a block is a tile of attention"
        self.hidden, self.inner = weights.layers[0].down.shape
        self.queries, self.vocabulary = weights.heads * weights.head_dim, weights.head.shape[0]
        device, rows = weights.embedding.device, len(slots.completion)
        self.vocabulary_tiles = -(-self.vocabulary // VOCABULARY_TILE)
        on_gpu = device.type == "cuda"
        properties = torch.cuda.get_device_properties(device) if on_gpu else None
        self.shared = getattr(properties, "shared_memory_per_block_optin", LEAST_SHARED)
        self.processors = getattr(properties, "multi_processor_count", 1)
        self.products = None
        if cute and cute_wins(device):
            from rlcourse.rollout.cute_products import CuteProducts

            self.products = CuteProducts(weights)
        early = on_gpu and properties.major >= 9
        self.launch = ({"PDL": True, "launch_pdl": True} if early else {"PDL": False}) | EXACT

        def empty(*shape, dtype=torch.float32):
            return torch.zeros(shape, dtype=dtype, device=device)

        self.x, self.squares = empty(rows, self.hidden), empty(rows, self.hidden // GROUP)
        self.y = empty(max(rows, 2), self.hidden, dtype=weights.dtype)
        self.q, self.mixed = (empty(rows, self.queries, dtype=weights.dtype) for _ in range(2))
        self.h = empty(rows, self.inner, dtype=weights.dtype)
        self.logits = empty(max(rows, 2), self.vocabulary, dtype=weights.dtype)
        padded = -(-rows // 128) * 128
        self.partial_sums = empty(padded * self.hidden * SHARES)  # of products whose depth is shared
        key_tiles = slots.block_table.shape[1]
        self.owners = slots.block_table, slots.completion, key_tiles
        split = max((size for size in range(1, rows + 1) if self.attention(size).splits > 1), default=0)
        kept = split * weights.kv_heads * key_tiles * 32  # of rows whose attention is split, for each head
        self.partial_acc, self.partial_ml = empty(kept, weights.head_dim), empty(kept, 2)
        self.arrived = empty(max(rows * weights.kv_heads, padded * self.hidden // 512), dtype=torch.int32)
        self.seed = empty(1, dtype=torch.long)

    def new_seed(self) -> None:
        self.seed.random_(0, 2**62)

    def tiles(self, size: int) -> TileConfig:
        normed = self.weights.layers[0].q_norm is not None
        sizes = self.hidden, self.inner, self.weights.head_dim
        return tiles_for(size, self.shared, self.processors, *sizes, normed)

    def attention(self, size: int) -> AttentionTile:
        return attention_tile(size, self.weights.kv_heads, self.weights.head_dim, self.shared)

    def __call__(self, size: int, sampling: Sampling) -> None:
        """One step of the first `size` slots, and then of those that are free some for completions that wait."""
        weights, slots, tiles = self.weights, self.slots, self.tiles(size)
        kernels.embed_kernel[(size,)](
            slots.token, weights.embedding, weights.layers[0].attention_norm, self.x, self.y, self.squares,
            self.hidden, triton.next_power_of_2(self.hidden), **self.launch,
        )  # fmt: skip
        following = [layer.attention_norm for layer in weights.layers[1:]] + [weights.norm]
        for layer, cache, next_norm in zip(weights.layers, self.cache, following, strict=True):
            self._qkv(layer, cache, size, tiles)
            self._attention(cache, size, self.attention(size))
            self._add("out", self.mixed, layer.out, layer.mlp_norm, size, tiles.out)
            self._gate_up(layer, size, tiles)
            self._add("down", self.h, layer.down, next_norm, size, tiles.down)
        y, logits = self.y[:size], self.logits[:size]

        def head() -> None:
            rows = max(size, 2)  # the product of a single row is one of another kind
            with one_chain():
                torch.matmul(self.y[:rows], weights.head.T, out=self.logits[:rows])

        self._product("head", size, (y, weights.head, logits), head, lambda: [logits])
        self._sample(slots.first(size), self.logits, self.squares, sampling)
        self.refill(size)

    def sample_first(self, x: Tensor, completions: Tensor, sampling: Sampling) -> None:
        """The first token of each of these completions [n], all different; x [n, d]: after their prompts."""
        weights = self.weights
        for after, some in zip(x.split(SAMPLED_AT_ONCE), completions.split(SAMPLED_AT_ONCE), strict=True):
            y, squares = normed(after, weights.norm, weights.dtype)
            with one_chain():
                logits = linear(y, weights.head)
            self._sample(self.slots.unstarted(some), logits, squares, sampling)

    def _options(self, tile: MatmulTile, depth: int, pair: bool = False) -> dict:
        """Launch options of a product that is `depth` deep for each share, with one tile of weights or a pair."""
        return launch_options(tile, depth, pair) | self.launch

    def _product(self, name: str, size: int, arguments: tuple, other, look, added_to: Tensor | None = None) -> None:
        """A product by its kernel in CuTe DSL, or by `other`; see `cute_products.run`."""
        kernel = None if self.products is None else self.products.kernel(name, size)
        if kernel is None:
            return other()
        from rlcourse.rollout import cute_products

        cute_products.run(kernel, arguments, other, look, added_to)

    def _qkv(self, layer, cache, size: int, tiles: TileConfig) -> None:
        slots, weights, p = self.slots, self.weights, tiles.qkv
        inputs = layer.qkv, layer.qkv_bias, layer.q_norm, layer.k_norm, weights.cos, weights.sin
        y, squares, q, position, completion = (
            t[:size] for t in (self.y, self.squares, self.q, slots.position, slots.completion)
        )

        def in_triton() -> None:
            half = weights.head_dim // 2
            columns = (weights.heads + 2 * weights.kv_heads) * half
            kernels.qkv_kernel[(columns // p.columns, -(-size // p.rows))](
                self.y, self.squares, *inputs, slots.position, self.q, cache, *self.owners, size, weights.eps,
                weights.heads, weights.kv_heads, weights.head_dim, self.hidden, *cache.stride()[:3],
                layer.qkv_bias is not None, layer.q_norm is not None, half.bit_length() - 1, KEYS,
                p.rows, p.columns, p.depth, **self._options(p, self.hidden, pair=True),
            )  # fmt: skip

        def look() -> list[Tensor]:
            rows = (~slots.done[:size]).nonzero().squeeze(1)  # free slots write to one place, in no order
            block = slots.block_table[completion[rows], position[rows] // KEYS].long()
            return [q, cache[:, block, :, position[rows] % KEYS]]

        arguments = (y, squares, *inputs, position, completion, slots.block_table, q, cache)
        self._product("qkv", size, arguments, in_triton, look)

    def _attention(self, cache, size: int, tile: AttentionTile) -> None:
        weights, position = self.weights, self.slots.position[:size]
        triton_attention.attention_kernel[(weights.kv_heads, size, tile.splits)](
            self.q, cache, *self.owners, position, self.partial_acc, self.partial_ml, self.arrived, self.mixed,
            LOG2_E * weights.head_dim**-0.5, weights.heads, weights.kv_heads, weights.head_dim, *cache.stride()[:3],
            tile.splits, KEYS, num_warps=4, num_stages=tile.stages, **self.launch,
        )  # fmt: skip

    def _add(self, name: str, inputs: Tensor, weight: Tensor, norm: Tensor, size: int, p: MatmulTile) -> None:
        """x += inputs @ weight.T; `down` comes in shares."""
        a, x, y, squares = (t[:size] for t in (inputs, self.x, self.y, self.squares))
        in_triton = partial(self._add_by_triton, inputs, weight, norm, size, p, name == "down")
        self._product(name, size, (a, weight, x, norm, y, squares), in_triton, lambda: [x, y, squares], x)

    def _add_by_triton(self, inputs, weight: Tensor, norm, size: int, p: MatmulTile, shared: bool) -> None:
        depth = weight.shape[1]
        share = share_of(depth) if shared else depth
        p = replace(p, depth=math.gcd(p.depth, share, depth))  # a share is whole tiles
        shares = min(p.shares, -(-depth // share))
        splits = -(-depth // (shares * share))
        kernels.add_kernel[(self.hidden // p.columns, splits, -(-size // p.rows))](
            inputs, weight, self.x, norm, self.y, self.squares, self.partial_sums, self.arrived, size, self.hidden,
            depth, share, splits, shares, p.rows, p.columns, p.depth, **self._options(p, share),
        )  # fmt: skip

    def _gate_up(self, layer, size: int, tiles: TileConfig) -> None:
        p, (y, squares, h) = tiles.gate_up, (t[:size] for t in (self.y, self.squares, self.h))

        def in_triton() -> None:
            kernels.gate_up_kernel[(-(-self.inner // (p.columns + p.more)), -(-size // p.rows))](
                self.y, self.squares, layer.gate_up, self.h, size, self.weights.eps, self.inner, self.hidden,
                p.rows, p.columns, p.more, p.depth, **self._options(p, self.hidden, pair=True),
            )  # fmt: skip

        self._product("gate_up", size, (y, squares, layer.gate_up, h), in_triton, lambda: [h])

    def _sample(self, slots: Slots, logits: Tensor, squares: Tensor, sampling: Sampling) -> None:
        """A token of each of these slots, from logits [slots or more, vocabulary], which still lack their 1 / rms, and
        the squares [slots or more, d / 32] that it comes from."""
        size = len(slots.completion)
        if sampling.restricted:
            scaled = logits[:size].float() * inverse_rms(self.weights, squares[:size])
            tokens, _ = sample_tokens(scaled, sampling)
            slots.record(tokens, restricted_logprobs(scaled, tokens, sampling), self.eos)
            return
        inverse, eps = sampling.inverse_temperature, self.weights.eps
        tile_max, tile_sum = squares.new_empty(2, size, self.vocabulary_tiles)
        pass_kernels.mass_kernel[(self.vocabulary_tiles, size)](
            logits, squares, tile_max, tile_sum, self.vocabulary, inverse, eps, self.hidden, VOCABULARY_TILE,
            self.vocabulary_tiles, num_warps=1, **self.launch,
        )  # fmt: skip
        triton_sample.pick_kernel[(size,)](
            logits, squares, tile_max, tile_sum, self.seed, self.eos, slots.max_new_tokens, slots.completion,
            slots.token, slots.position, slots.num_tokens, slots.done, slots.tokens, slots.logprobs, slots.lengths,
            slots.ended, self.vocabulary, slots.tokens.shape[1], inverse, eps, len(self.eos), self.hidden,
            VOCABULARY_TILE, self.vocabulary_tiles, triton.next_power_of_2(self.vocabulary_tiles),
            triton.next_power_of_2(len(self.eos)), sampling.greedy, **self.launch,
        )  # fmt: skip

    def refill(self, size: int) -> None:
        """The first `size` slots, where free, go to completions that wait."""
        slots = self.slots
        triton_sample.refill_kernel[(1,)](
            slots.completion, slots.token, slots.position, slots.num_tokens, slots.done, slots.next_completion,
            slots.num_completions, slots.num_generations, slots.tokens, slots.lengths, slots.ended,
            slots.prompt_lengths, size, slots.tokens.shape[1], triton.next_power_of_2(size), **self.launch,
        )  # fmt: skip
