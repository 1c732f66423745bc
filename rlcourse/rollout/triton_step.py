"""One decode step by the kernels of `triton_*.py`: 5 launches a layer and 4 around them."""

import importlib.util

import torch
from torch import Tensor

from rlcourse.rollout.decoder import Decoder
from rlcourse.rollout.slots import Slots
from rlcourse.rollout.tiles import LEAST_SHARED, MatmulTile, TileConfig, launch_options, tiles_for
from rlcourse.sampling import Sampling

VOCABULARY_TILE = 2048  # entries of the vocabulary that one program adds up
COPIERS = 8  # programs that share the slots whose caches are to be filled: in most steps there are one or two


def supported(decoder: Decoder) -> bool:
    """Whether the kernels can do this model's step: an NVIDIA GPU since Ampere, 16-bit weights, sizes that fit."""
    weights = decoder.embedding
    if not weights.is_cuda or importlib.util.find_spec("triton") is None or torch.version.hip:
        return False
    if weights.dtype not in (torch.bfloat16, torch.float16) or torch.cuda.get_device_capability(weights.device)[0] < 8:
        return False
    return fits(decoder)


def can_sample(sampling: Sampling) -> bool:
    """Whether the kernels can sample so: they leave no token out."""
    return sampling.top_k == 0 and sampling.top_p == 1.0


def cute_wins(device: torch.device) -> bool:
    """Whether CuTe DSL is installed, and the GPU one where its attention was measured to be faster than Triton's."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return hopper and importlib.util.find_spec("cutlass") is not None


def fits(decoder: Decoder) -> bool:
    """Whether the tiles divide the model's sizes."""
    hidden, inner = decoder.layers[0].down.shape
    queries = decoder.heads * decoder.head_dim
    whole = all(size % 128 == 0 for size in (hidden, inner, queries)) and hidden <= 8192
    return whole and decoder.head_dim in (64, 128) and decoder.heads // decoder.kv_heads <= 32


class TritonStep:
    """Decode steps of the first slots of `slots`. Buffers are made once, for all of them.

    cute: attention is the kernel in CuTe DSL where that wins, else that in Triton. A rollout begins with `new_seed`.
    """

    def __init__(self, decoder: Decoder, slots: Slots, eos: Tensor, cute: bool = True):
        import triton  # only where there is a GPU, or its interpreter

        self.decoder, self.slots, self.eos = decoder, slots, eos
        self.next_power_of_2 = triton.next_power_of_2
        self.hidden, self.inner = decoder.layers[0].down.shape
        self.queries, self.vocabulary = decoder.heads * decoder.head_dim, decoder.head.shape[0]
        device, rows = decoder.embedding.device, len(slots.completion)
        self.vocabulary_tiles = -(-self.vocabulary // VOCABULARY_TILE)

        def empty(*shape, dtype=torch.float32):
            return torch.zeros(shape, dtype=dtype, device=device)

        self.x, self.squares = empty(rows, self.hidden), empty(rows, self.hidden // 32)
        self.y = empty(rows, self.hidden, dtype=decoder.dtype)
        self.q, self.mixed = (empty(rows, self.queries, dtype=decoder.dtype) for _ in range(2))
        self.h = empty(rows, self.inner, dtype=decoder.dtype)
        self.cos, self.sin = (empty(rows, decoder.head_dim // 2) for _ in range(2))
        self.logits = empty(rows, self.vocabulary, dtype=decoder.dtype)
        self.tile_max, self.tile_sum = (empty(rows, self.vocabulary_tiles) for _ in range(2))
        padded = -(-rows // 128) * 128
        self.partial_sums = empty(padded * self.hidden * 8)  # of products whose depth is split
        self.partial_attention = empty(rows * decoder.kv_heads * 4 * 32 * (decoder.head_dim + 2))  # where it is split
        self.arrived = empty(max(rows * decoder.kv_heads, padded * self.hidden // 512), dtype=torch.int32)
        self.seed, self.tick = (empty(1, dtype=torch.long) for _ in range(2))
        self.num_refilled, self.refilled = empty(1, dtype=torch.long), empty(rows, dtype=torch.long)  # slots, and which
        on_gpu = device.type == "cuda"
        properties = torch.cuda.get_device_properties(device) if on_gpu else None
        self.shared = getattr(properties, "shared_memory_per_block_optin", LEAST_SHARED)
        self.cute = cute and cute_wins(device) and decoder.heads // decoder.kv_heads <= 8
        early = on_gpu and properties.major >= 9
        self.launch = {"PDL": True, "launch_pdl": True} if early else {"PDL": False}

    def new_seed(self) -> None:
        """Random numbers of this rollout, from torch's global generator."""
        self.seed.random_(0, 2**62)
        self.tick.zero_()

    def parts(self, size: int) -> int:
        """Sums of squares of a row that the last product of a layer leaves for the next norm."""
        return self.hidden // tiles_for(size, self.shared, self.decoder.head_dim).down.columns

    def __call__(self, size: int, refill: bool, sampling: Sampling) -> None:
        """One step of the first `size` slots. refill: those that are free then go to completions that wait."""
        decoder, slots, tiles = self.decoder, self.slots, tiles_for(size, self.shared, self.decoder.head_dim)
        from rlcourse.rollout import triton_kernels as kernels

        block, half = self.next_power_of_2(self.hidden), decoder.head_dim // 2
        parts = self.parts(size)
        kernels.embed_kernel[(size,)](
            slots.token, slots.position, self.tick, decoder.embedding, decoder.layers[0].attention_norm,
            decoder.model.model.rotary_emb.inv_freq, self.x, self.y, self.squares, self.cos, self.sin,
            self.hidden, block, parts, half,
        )  # fmt: skip
        following = [layer.attention_norm for layer in decoder.layers[1:]] + [decoder.norm]
        for layer, cache, next_norm in zip(decoder.layers, slots.cache, following, strict=True):
            self._qkv(kernels, layer, cache, size, tiles, parts)
            self._attention(cache, size, tiles)
            self._add(kernels, self.mixed, layer.out, layer.mlp_norm, size, tiles.out)
            self._gate_up(kernels, layer, size, tiles, self.hidden // tiles.out.columns)
            self._add(kernels, self.h, layer.down, next_norm, size, tiles.down)
        torch.matmul(self.y[:size], decoder.head.T, out=self.logits[:size])
        self._sample(size, sampling)
        if refill:
            self._refill(size)

    def _options(self, tile: MatmulTile, depth: int, pair: bool = False) -> dict:
        """Launch options of a product that is `depth` deep for each share, with one tile of weights or a pair."""
        return launch_options(tile, depth, pair) | self.launch

    def _qkv(self, kernels, layer, cache, size: int, tiles: TileConfig, parts: int) -> None:
        decoder, p = self.decoder, tiles.qkv
        heads = decoder.heads + 2 * decoder.kv_heads
        kernels.qkv_kernel[(heads, -(-size // p.rows))](
            self.y, self.squares, layer.qkv, layer.qkv_bias, layer.q_norm, layer.k_norm, self.cos, self.sin,
            self.slots.position, self.q, cache, size, decoder.eps, decoder.heads, decoder.kv_heads, decoder.head_dim,
            self.hidden, cache.stride(0), cache.stride(1), cache.stride(2), layer.qkv_bias is not None,
            layer.q_norm is not None, p.rows, p.depth, parts,
            **self._options(p, self.hidden, pair=True),
        )  # fmt: skip

    def _attention(self, cache, size: int, tiles: TileConfig) -> None:
        decoder, position = self.decoder, self.slots.position[:size]
        if self.cute:
            from rlcourse.kernels.decode_ops import attend

            q, out = (t[:size].unflatten(1, (-1, decoder.head_dim)) for t in (self.q, self.mixed))
            attend(q, cache[0][:size], cache[1][:size], position, None, out, ahead=True)
            return
        from rlcourse.rollout import triton_attention

        split = self.partial_attention.numel() * decoder.head_dim // (decoder.head_dim + 2)
        triton_attention.attention_kernel[(decoder.kv_heads, size, tiles.attention_splits)](
            self.q, cache, position, self.partial_attention, self.partial_attention[split:], self.arrived, self.mixed,
            decoder.head_dim**-0.5, decoder.heads, decoder.kv_heads, decoder.head_dim, cache.stride(0), cache.stride(1),
            cache.stride(2), tiles.attention_splits, tiles.attention_block, num_warps=tiles.attention_warps,
            num_stages=tiles.attention_stages, **self.launch,
        )  # fmt: skip

    def _add(self, kernels, inputs: Tensor, weight: Tensor, norm: Tensor, size: int, p: MatmulTile) -> None:
        depth = weight.shape[1]
        share = -(-depth // p.depth // p.splits) * p.depth
        kernels.add_kernel[(self.hidden // p.columns, p.splits, -(-size // p.rows))](
            inputs, weight, self.x, norm, self.y, self.squares, self.partial_sums, self.arrived, size, self.hidden,
            depth, p.splits, p.rows, p.columns, p.depth, **self._options(p, share),
        )  # fmt: skip

    def _gate_up(self, kernels, layer, size: int, tiles: TileConfig, parts: int) -> None:
        p = tiles.gate_up
        kernels.gate_up_kernel[(self.inner // p.columns, -(-size // p.rows))](
            self.y, self.squares, layer.gate_up, self.h, size, self.decoder.eps, self.inner, self.hidden, parts, p.rows,
            p.columns, p.depth, **self._options(p, self.hidden, pair=True),
        )  # fmt: skip

    def _sample(self, size: int, sampling: Sampling) -> None:
        from rlcourse.rollout import triton_sample

        slots, eps = self.slots, self.decoder.eps
        parts = self.parts(size)
        inverse = 1.0 if sampling.greedy else 1.0 / sampling.temperature
        triton_sample.tile_kernel[(self.vocabulary_tiles, size)](
            self.logits, self.squares, self.tile_max, self.tile_sum, self.vocabulary, inverse, eps, self.hidden, parts,
            VOCABULARY_TILE, self.vocabulary_tiles, **self.launch,
        )  # fmt: skip
        triton_sample.pick_kernel[(size,)](
            self.logits, self.squares, self.tile_max, self.tile_sum, self.seed, self.tick, self.eos,
            slots.max_new_tokens, slots.completion, slots.token, slots.position, slots.num_tokens, slots.done,
            slots.tokens, slots.logprobs, slots.lengths, self.vocabulary, slots.tokens.shape[1], inverse, eps,
            len(self.eos), self.hidden, parts, VOCABULARY_TILE, self.vocabulary_tiles,
            self.next_power_of_2(self.vocabulary_tiles), self.next_power_of_2(len(self.eos)), sampling.greedy,
            **self.launch,
        )  # fmt: skip

    def _refill(self, size: int) -> None:
        from rlcourse.rollout import triton_refill

        slots = self.slots
        layers, _, _, heads, width, head_dim = slots.prompt_cache.shape
        triton_refill.refill_kernel[(1,)](
            slots.completion, slots.token, slots.position, slots.num_tokens, slots.done, self.num_refilled,
            self.refilled, slots.next_completion, slots.num_completions, slots.num_generations, slots.tokens,
            slots.ends_at_once, slots.prompt_lengths, size, slots.tokens.shape[1], self.next_power_of_2(size),
            **self.launch,
        )  # fmt: skip
        triton_refill.copy_kernel[(COPIERS, 2 * layers, heads)](
            slots.completion, self.num_refilled, self.refilled, slots.num_generations, slots.prompt_cache, slots.cache,
            *slots.prompt_cache.stride()[1:4], *slots.cache.stride()[1:4], width * head_dim, 2048, **self.launch,
        )  # fmt: skip
