"""One decode step by the kernels of `triton_*.py`: 5 launches a layer and 4 around them.

Products are those of `cute_products.py` where CuTe DSL is installed and they are faster: with the same bits.
"""

import importlib.util
import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rlcourse.exact import EXACT, GROUP, KEYS, LOG2_E, VOCABULARY_TILE
from rlcourse.exact.products import SHARES, one_chain, share_of
from rlcourse.rollout.decoder import Decoder
from rlcourse.rollout.slots import SAMPLED_AT_ONCE, Slots
from rlcourse.rollout.tiles import (
    LEAST_SHARED,
    AttentionTile,
    MatmulTile,
    TileConfig,
    attention_tile,
    launch_options,
    tiles_for,
)
from rlcourse.sampling import Sampling, sample_tokens

COPIERS = 8  # programs that share the slots whose caches are to be filled: in most steps there are one or two


def cute_wins(device: torch.device) -> bool:
    """Whether CuTe DSL is installed, and the GPU one where its kernels were measured to be faster than Triton's."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return hopper and importlib.util.find_spec("cutlass") is not None


class TritonStep:
    """Decode steps of the first slots of `slots`. Buffers are made once, for all of them.

    cute_attention, cute_products: they are the kernels in CuTe DSL where those win. A rollout begins with `new_seed`.
    """

    def __init__(
        self, decoder: Decoder, slots: Slots, eos: Tensor, cute_attention: bool = True, cute_products: bool = True
    ):
        import triton  # only where there is a GPU, or its interpreter

        self.decoder, self.slots, self.eos = decoder, slots, eos
        self.next_power_of_2 = triton.next_power_of_2
        self.hidden, self.inner = decoder.layers[0].down.shape
        self.queries, self.vocabulary = decoder.heads * decoder.head_dim, decoder.head.shape[0]
        device, rows = decoder.embedding.device, len(slots.completion)
        self.vocabulary_tiles = -(-self.vocabulary // VOCABULARY_TILE)
        on_gpu = device.type == "cuda"
        properties = torch.cuda.get_device_properties(device) if on_gpu else None
        self.shared = getattr(properties, "shared_memory_per_block_optin", LEAST_SHARED)
        self.processors = getattr(properties, "multi_processor_count", 1)
        self.cute = cute_attention and cute_wins(device) and decoder.heads // decoder.kv_heads <= 8
        self.products = None
        if cute_products and cute_wins(device):
            from rlcourse.rollout.cute_products import CuteProducts

            self.products = CuteProducts(decoder, self.cute, slots.block_table is not None)
        early = on_gpu and properties.major >= 9
        self.launch = ({"PDL": True, "launch_pdl": True} if early else {"PDL": False}) | EXACT

        def empty(*shape, dtype=torch.float32):
            return torch.zeros(shape, dtype=dtype, device=device)

        self.x, self.squares = empty(rows, self.hidden), empty(rows, self.hidden // GROUP)
        self.y = empty(max(rows, 2), self.hidden, dtype=decoder.dtype)
        self.q, self.mixed = (empty(rows, self.queries, dtype=decoder.dtype) for _ in range(2))
        self.h = empty(rows, self.inner, dtype=decoder.dtype)
        self.logits = empty(max(rows, 2), self.vocabulary, dtype=decoder.dtype)
        padded = -(-rows // 128) * 128
        self.partial_sums = empty(padded * self.hidden * SHARES)  # of products whose depth is shared
        tokens, table = slots.cache.shape[4], slots.block_table
        self.paged = table is not None
        if self.paged:
            assert tokens == KEYS, "a block is a tile of attention"
            self.key_tiles = table.shape[1]
        else:
            self.key_tiles, table = -(-tokens // KEYS), slots.completion  # which no kernel then reads
        self.owners = (table, slots.completion, self.key_tiles)
        split = max((size for size in range(1, rows + 1) if self.attention(size).splits > 1), default=0)
        kept = split * decoder.kv_heads * self.key_tiles * 32  # of rows whose attention is split, for each head
        self.partial_acc, self.partial_ml = empty(kept, decoder.head_dim), empty(kept, 2)
        self.arrived = empty(max(rows * decoder.kv_heads, padded * self.hidden // 512), dtype=torch.int32)
        self.seed = empty(1, dtype=torch.long)
        self.num_refilled, self.refilled = empty(1, dtype=torch.long), empty(rows, dtype=torch.long)  # slots, and which

    def new_seed(self) -> None:
        """Random numbers of this rollout, from torch's global generator."""
        self.seed.random_(0, 2**62)

    def tiles(self, size: int) -> TileConfig:
        normed = self.decoder.layers[0].q_norm is not None
        sizes = self.hidden, self.inner, self.decoder.head_dim
        return tiles_for(size, self.shared, self.processors, *sizes, normed)

    def attention(self, size: int) -> AttentionTile:
        return attention_tile(size, self.decoder.kv_heads, self.decoder.head_dim, self.shared)

    def __call__(self, size: int, refill: bool, sampling: Sampling) -> None:
        """One step of the first `size` slots. refill: those that are free then go to completions that wait."""
        decoder, slots, tiles = self.decoder, self.slots, self.tiles(size)
        from rlcourse.rollout import triton_kernels as kernels

        kernels.embed_kernel[(size,)](
            slots.token, decoder.embedding, decoder.layers[0].attention_norm, self.x, self.y, self.squares,
            self.hidden, self.next_power_of_2(self.hidden), **self.launch,
        )  # fmt: skip
        following = [layer.attention_norm for layer in decoder.layers[1:]] + [decoder.norm]
        for layer, cache, next_norm in zip(decoder.layers, slots.cache, following, strict=True):
            self._qkv(kernels, layer, cache, size, tiles)
            self._attention(cache, size, self.attention(size))
            self._add(kernels, "out", self.mixed, layer.out, layer.mlp_norm, size, tiles.out)
            self._gate_up(kernels, layer, size, tiles)
            self._add(kernels, "down", self.h, layer.down, next_norm, size, tiles.down)
        y, logits = self.y[:size], self.logits[:size]
        self._either("head", size, (y, decoder.head, logits), partial(self._head_by_torch, size), lambda: [logits])
        self._sample(slots.first(size), self.logits, self.squares, sampling)
        if refill:
            self.refill(size)

    def sample_first(self, x: Tensor, completions: Tensor, sampling: Sampling) -> None:
        """The first token of each of these completions [n], all different; x [n, d]: the residual stream after their
        prompts."""
        from rlcourse.exact.layers import normed
        from rlcourse.exact.products import linear

        weights = self.decoder.weights
        for after, some in zip(x.split(SAMPLED_AT_ONCE), completions.split(SAMPLED_AT_ONCE), strict=True):
            y, squares = normed(after, weights.norm, weights.dtype)
            with one_chain():
                logits = linear(y, weights.head)
            self._sample(self.slots.unstarted(some), logits, squares, sampling)

    def _options(self, tile: MatmulTile, depth: int, pair: bool = False) -> dict:
        """Launch options of a product that is `depth` deep for each share, with one tile of weights or a pair."""
        return launch_options(tile, depth, pair) | self.launch

    def _either(self, name: str, size: int, arguments: tuple, other, look, added_to: Tensor | None = None) -> None:
        """A product by its kernel in CuTe DSL, or by `other`; see `cute_products.run`."""
        kernel = None if self.products is None else self.products.kernel(name, size)
        if kernel is None:
            return other()
        from rlcourse.rollout import cute_products

        cute_products.run(kernel, arguments, other, look, added_to)

    def _qkv(self, kernels, layer, cache, size: int, tiles: TileConfig) -> None:
        slots, weights = self.slots, self.decoder.weights
        y, squares, q, position = (t[:size] for t in (self.y, self.squares, self.q, slots.position))
        owner = (slots.completion[:size], slots.block_table) if self.paged else (None, None)

        def look() -> list[Tensor]:
            rows = (
                (~slots.done[:size]).nonzero().squeeze(1)
            )  # free slots of a paged cache write to one place, in no order
            part, within = rows, position[rows]
            if self.paged:
                part, within = slots.block_table[owner[0][rows], within // KEYS].long(), within % KEYS
            return [q, cache[:, part, :, within]]

        arguments = (layer.qkv, layer.qkv_bias, layer.q_norm, layer.k_norm, weights.cos, weights.sin, position, *owner)
        triton = partial(self._qkv_by_triton, kernels, layer, cache, size, tiles.qkv)
        self._either("qkv", size, (y, squares, *arguments, q, cache), triton, look)

    def _qkv_by_triton(self, kernels, layer, cache, size: int, p: MatmulTile) -> None:
        decoder = self.decoder
        heads = decoder.heads + 2 * decoder.kv_heads
        kernels.qkv_kernel[(heads * decoder.head_dim // 2 // p.columns, -(-size // p.rows))](
            self.y, self.squares, layer.qkv, layer.qkv_bias, layer.q_norm, layer.k_norm, decoder.weights.cos,
            decoder.weights.sin, self.slots.position, self.q, cache, *self.owners, size, decoder.eps, decoder.heads,
            decoder.kv_heads, decoder.head_dim, self.hidden, cache.stride(0), cache.stride(1), cache.stride(2),
            layer.qkv_bias is not None, layer.q_norm is not None, (decoder.head_dim // 2).bit_length() - 1,
            KEYS if self.paged else 0, p.rows, p.columns, p.depth, **self._options(p, self.hidden, pair=True),
        )  # fmt: skip

    def _attention(self, cache, size: int, tile: AttentionTile) -> None:
        decoder, position = self.decoder, self.slots.position[:size]
        if self.cute:
            from rlcourse.kernels.decode_ops import attend

            q, out = (t[:size].unflatten(1, (-1, decoder.head_dim)) for t in (self.q, self.mixed))
            attend(q, cache[0][:size], cache[1][:size], position, None, out, ahead=True)
            return
        from rlcourse.rollout import triton_attention

        triton_attention.attention_kernel[(decoder.kv_heads, size, tile.splits)](
            self.q, cache, *self.owners, position, self.partial_acc, self.partial_ml, self.arrived, self.mixed,
            LOG2_E * decoder.head_dim**-0.5, decoder.heads, decoder.kv_heads, decoder.head_dim, cache.stride(0),
            cache.stride(1), cache.stride(2), tile.splits, self.key_tiles, KEYS, self.paged,
            num_warps=4, num_stages=tile.stages, **self.launch,
        )  # fmt: skip

    def _add(self, kernels, name: str, inputs: Tensor, weight: Tensor, norm: Tensor, size: int, p: MatmulTile) -> None:
        """x += inputs @ weight.T; `down` comes in shares."""
        a, x, y, squares = (t[:size] for t in (inputs, self.x, self.y, self.squares))
        triton = partial(self._add_by_triton, kernels, inputs, weight, norm, size, p, name == "down")
        self._either(name, size, (a, weight, x, norm, y, squares), triton, lambda: [x, y, squares], x)

    def _add_by_triton(self, kernels, inputs, weight: Tensor, norm, size: int, p: MatmulTile, shared: bool) -> None:
        depth = weight.shape[1]
        share = share_of(depth) if shared else depth
        p = replace(p, depth=math.gcd(p.depth, share, depth))  # a share is whole tiles
        shares = min(p.shares, -(-depth // share))
        splits = -(-depth // (shares * share))
        kernels.add_kernel[(self.hidden // p.columns, splits, -(-size // p.rows))](
            inputs, weight, self.x, norm, self.y, self.squares, self.partial_sums, self.arrived, size, self.hidden,
            depth, share, splits, shares, p.rows, p.columns, p.depth, **self._options(p, share),
        )  # fmt: skip

    def _gate_up(self, kernels, layer, size: int, tiles: TileConfig) -> None:
        y, squares, h = (t[:size] for t in (self.y, self.squares, self.h))
        triton = partial(self._gate_up_by_triton, kernels, layer, size, tiles.gate_up)
        self._either("gate_up", size, (y, squares, layer.gate_up, h), triton, lambda: [h])

    def _gate_up_by_triton(self, kernels, layer, size: int, p: MatmulTile) -> None:
        kernels.gate_up_kernel[(-(-self.inner // (p.columns + p.more)), -(-size // p.rows))](
            self.y, self.squares, layer.gate_up, self.h, size, self.decoder.eps, self.inner, self.hidden, p.rows,
            p.columns, p.more, p.depth, **self._options(p, self.hidden, pair=True),
        )  # fmt: skip

    def _head_by_torch(self, size: int) -> None:
        rows = max(size, 2)  # the product of a single row is one of another kind
        with one_chain():
            torch.matmul(self.y[:rows], self.decoder.head.T, out=self.logits[:rows])

    def _sample(self, slots: Slots, logits: Tensor, squares: Tensor, sampling: Sampling) -> None:
        """A token of each of these slots; logits [slots or more, vocabulary], which still lack their 1 / rms, and the
        squares [slots or more, d / 32] that it comes from."""
        size = len(slots.completion)
        if sampling.restricted:
            from rlcourse.exact.head import inverse_rms, restricted_logprobs

            scaled = logits[:size].float() * inverse_rms(self.decoder.weights, squares[:size])
            tokens, _ = sample_tokens(scaled, sampling)
            slots.record(tokens, restricted_logprobs(scaled, tokens, sampling), self.eos)
            return
        from rlcourse.exact import pass_kernels
        from rlcourse.rollout import triton_sample

        inverse, eps = 1.0 if sampling.greedy else 1.0 / sampling.temperature, self.decoder.eps
        tile_max, tile_sum = squares.new_empty(2, size, self.vocabulary_tiles)
        pass_kernels.mass_kernel[(self.vocabulary_tiles, size)](
            logits, squares, tile_max, tile_sum, self.vocabulary, inverse, eps, self.hidden, VOCABULARY_TILE,
            self.vocabulary_tiles, num_warps=1, **self.launch,
        )  # fmt: skip
        triton_sample.pick_kernel[(size,)](
            logits, squares, tile_max, tile_sum, self.seed, self.eos, slots.max_new_tokens, slots.completion,
            slots.token, slots.position, slots.num_tokens, slots.done, slots.tokens, slots.logprobs, slots.lengths,
            slots.ended, self.vocabulary, slots.tokens.shape[1], inverse, eps, len(self.eos), self.hidden,
            VOCABULARY_TILE, self.vocabulary_tiles, self.next_power_of_2(self.vocabulary_tiles),
            self.next_power_of_2(len(self.eos)), sampling.greedy, **self.launch,
        )  # fmt: skip

    def start(self, size: int) -> None:
        """The first `size` slots go to the completions that come first."""
        self.slots.done.fill_(True)
        self.refill(size)

    def refill(self, size: int) -> None:
        """The first `size` slots, where free, go to completions that wait."""
        from rlcourse.rollout import triton_refill

        slots = self.slots
        triton_refill.refill_kernel[(1,)](
            slots.completion, slots.token, slots.position, slots.num_tokens, slots.done, self.num_refilled,
            self.refilled, slots.next_completion, slots.num_completions, slots.num_generations, slots.tokens,
            slots.lengths, slots.ended, slots.prompt_lengths, size, slots.tokens.shape[1], self.next_power_of_2(size),
            **self.launch,
        )  # fmt: skip
        if self.paged:
            return  # the completion's row of the table says where its prompt is
        layers, _, _, heads, width, head_dim = slots.prompt_cache.shape
        triton_refill.copy_kernel[(COPIERS, 2 * layers, heads)](
            slots.completion, self.num_refilled, self.refilled, slots.num_generations, slots.prompt_cache, slots.cache,
            *slots.prompt_cache.stride()[1:4], *slots.cache.stride()[1:4], width * head_dim, 2048, **self.launch,
        )  # fmt: skip
