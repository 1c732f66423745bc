"""One decode step by the kernels of `triton_*.py`: 5 launches a layer and 4 around them."""

import importlib.util
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlcourse.rollout.decoder import Decoder
from rlcourse.rollout.slots import Slots
from rlcourse.sampling import Sampling

TILE = 2048  # entries of the vocabulary that one program adds up
COPIERS = 8  # programs that share the slots whose caches are to be filled: in most steps there are one or two


def supported(decoder: Decoder) -> bool:
    """Whether the kernels can do this model's step: an NVIDIA GPU since Ampere, 16-bit weights, sizes that fit."""
    weights = decoder.embedding
    if not weights.is_cuda or importlib.util.find_spec("triton") is None or torch.version.hip:
        return False
    if weights.dtype not in (torch.bfloat16, torch.float16) or torch.cuda.get_device_capability(weights.device)[0] < 8:
        return False
    return fits(decoder)


def can_draw(sampling: Sampling) -> bool:
    """Whether the kernels can draw so: they leave nothing out."""
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


@dataclass(frozen=True)
class Product:
    """How a matrix product is cut: rows, columns and depth of a tile, shares of the depth, warps, pipeline stages.

    The weights of the first `held` tiles are loaded before the input is there, where a thread can hold them.
    """

    rows: int
    columns: int
    depth: int
    splits: int = 1
    warps: int = 4
    stages: int = 4
    held: int = 0


@dataclass(frozen=True)
class Tiles:
    """The cuts of a step, measured on an H200 at the shape of Qwen2.5-0.5B."""

    qkv: Product
    out: Product
    gate_up: Product
    down: Product
    splits: int  # of a row's cache in attention
    block: int  # cache slots at a time
    attention_warps: int
    attention_stages: int


FEW = Tiles(
    qkv=Product(16, 32, 128, stages=2, held=7),
    out=Product(16, 32, 128, stages=2, held=7),
    gate_up=Product(16, 32, 128, stages=2, held=7),
    down=Product(16, 64, 128, splits=8, stages=2, held=5),
    splits=2,
    block=128,
    attention_warps=4,
    attention_stages=1,
)
SOME = Tiles(
    qkv=Product(16, 32, 128, stages=2, held=7),
    out=Product(16, 32, 128, stages=2, held=7),
    gate_up=Product(64, 64, 128, warps=8, stages=4),
    down=Product(64, 32, 128, splits=4, stages=5),
    splits=1,
    block=128,
    attention_warps=4,
    attention_stages=4,
)
MANY = Tiles(
    qkv=Product(64, 32, 128, stages=4),
    out=Product(64, 32, 128, stages=5),
    gate_up=Product(128, 32, 64, warps=8, stages=3),
    down=Product(64, 64, 128, splits=2, stages=5),
    splits=1,
    block=128,
    attention_warps=4,
    attention_stages=2,
)
REGISTERS = 900  # bytes of weights that a thread can hold
LEAST_SHARED = 99 * 1024  # bytes of shared memory that a block can have on an A10G, an L4 or a GeForce


def tiles_for(rows: int, shared: int, head_dim: int) -> Tiles:
    """The cuts for so many rows on a GPU whose blocks can have `shared` bytes of shared memory."""
    tiles = FEW if rows <= 16 else SOME if rows <= 96 else MANY
    tiles = replace(tiles, qkv=replace(tiles.qkv, columns=head_dim // 2))
    pairs = {"qkv": 2, "out": 1, "gate_up": 2, "down": 1}  # weight tiles that a program multiplies with
    return replace(tiles, **{name: _fit(getattr(tiles, name), n, 0.9 * shared) for name, n in pairs.items()})


def _fit(product: Product, weights: int, shared: float) -> Product:
    """The product with as many stages, and tiles as deep, as there is room for."""

    def stage_bytes(p: Product) -> int:
        return 2 * p.depth * (p.rows + weights * p.columns)

    while product.stages > 2 and product.stages * stage_bytes(product) > shared:
        product = replace(product, stages=product.stages - 1)
    while product.stages * stage_bytes(product) > shared:
        product = replace(product, depth=product.depth // 2)
    return product


def launch_options(product: Product, depth: int, pair: bool) -> dict:
    """HELD, warps and stages of a product of 16-bit numbers that is `depth` deep for each share."""
    tile_bytes = 2 * product.columns * product.depth * (2 if pair else 1)
    held = min(product.held, -(-depth // product.depth), 32 * product.warps * REGISTERS // tile_bytes)
    return {"HELD": held, "num_warps": product.warps, "num_stages": product.stages}


class FusedStep:
    """Steps of the first slots of `slots`. Buffers are made once, for all of them. `seed` is new for each rollout.
    cute: attention is the kernel in CuTe DSL where that wins, else that in Triton."""

    def __init__(self, decoder: Decoder, slots: Slots, eos: Tensor, cute: bool = True):
        import triton  # only where there is a GPU, or its interpreter

        self.decoder, self.slots, self.eos = decoder, slots, eos
        self.next_power_of_2 = triton.next_power_of_2
        self.hidden, self.inner = decoder.layers[0].down.shape
        self.queries, self.vocabulary = decoder.heads * decoder.head_dim, decoder.head.shape[0]
        device, rows = decoder.embedding.device, len(slots.row)
        self.tiles = -(-self.vocabulary // TILE)

        def empty(*shape, dtype=torch.float32):
            return torch.zeros(shape, dtype=dtype, device=device)

        self.x, self.squares = empty(rows, self.hidden), empty(rows, self.hidden // 32)
        self.y = empty(rows, self.hidden, dtype=decoder.dtype)
        self.q, self.mixed = (empty(rows, self.queries, dtype=decoder.dtype) for _ in range(2))
        self.h = empty(rows, self.inner, dtype=decoder.dtype)
        self.cos, self.sin = (empty(rows, decoder.head_dim // 2) for _ in range(2))
        self.logits = empty(rows, self.vocabulary, dtype=decoder.dtype)
        self.top, self.mass = (empty(rows, self.tiles) for _ in range(2))
        padded = -(-rows // 128) * 128
        self.pieces = empty(padded * self.hidden * 8)  # of products whose depth is split
        self.shares = empty(rows * decoder.kv_heads * 4 * 32 * (decoder.head_dim + 2))  # of attention that is split
        self.arrived = empty(max(rows * decoder.kv_heads, padded * self.hidden // 512), dtype=torch.int32)
        self.seed, self.tick = (empty(1, dtype=torch.long) for _ in range(2))
        self.taken = empty(1 + rows, dtype=torch.long)  # how many slots have just taken a completion, then which
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
        decoder, slots, cut = self.decoder, self.slots, tiles_for(size, self.shared, self.decoder.head_dim)
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
            self._qkv(kernels, layer, cache, size, cut, parts)
            self._attention(cache, size, cut)
            self._add(kernels, self.mixed, layer.out, layer.mlp_norm, size, cut.out)
            self._gate_up(kernels, layer, size, cut, self.hidden // cut.out.columns)
            self._add(kernels, self.h, layer.down, next_norm, size, cut.down)
        torch.matmul(self.y[:size], decoder.head.T, out=self.logits[:size])
        self._draw(size, sampling)
        if refill:
            self._refill(size)

    def _options(self, product: Product, depth: int, pair: bool = False) -> dict:
        """Launch options of a product that is `depth` deep for each share, with one tile of weights or a pair."""
        return launch_options(product, depth, pair) | self.launch

    def _qkv(self, kernels, layer, cache, size: int, cut: Tiles, parts: int) -> None:
        decoder, p = self.decoder, cut.qkv
        heads = decoder.heads + 2 * decoder.kv_heads
        kernels.qkv_kernel[(heads, -(-size // p.rows))](
            self.y, self.squares, layer.qkv, layer.qkv_bias, layer.q_norm, layer.k_norm, self.cos, self.sin,
            self.slots.position, self.q, cache, size, decoder.eps, decoder.heads, decoder.kv_heads, decoder.head_dim,
            self.hidden, cache.stride(0), cache.stride(1), cache.stride(2), layer.qkv_bias is not None,
            layer.q_norm is not None, p.rows, p.depth, parts,
            **self._options(p, self.hidden, pair=True),
        )  # fmt: skip

    def _attention(self, cache, size: int, cut: Tiles) -> None:
        decoder, position = self.decoder, self.slots.position[:size]
        if self.cute:
            from rlcourse.kernels.decode_ops import attend

            q, out = (t[:size].unflatten(1, (-1, decoder.head_dim)) for t in (self.q, self.mixed))
            attend(q, cache[0][:size], cache[1][:size], position, None, out, ahead=True)
            return
        from rlcourse.rollout import triton_attention

        split = self.shares.numel() * decoder.head_dim // (decoder.head_dim + 2)
        triton_attention.attention_kernel[(decoder.kv_heads, size, cut.splits)](
            self.q, cache, position, self.shares, self.shares[split:], self.arrived, self.mixed,
            decoder.head_dim**-0.5, decoder.heads, decoder.kv_heads, decoder.head_dim, cache.stride(0), cache.stride(1),
            cache.stride(2), cut.splits, cut.block, num_warps=cut.attention_warps, num_stages=cut.attention_stages,
            **self.launch,
        )  # fmt: skip

    def _add(self, kernels, inputs: Tensor, weight: Tensor, norm: Tensor, size: int, p: Product) -> None:
        depth = weight.shape[1]
        share = -(-depth // p.depth // p.splits) * p.depth
        kernels.add_kernel[(self.hidden // p.columns, p.splits, -(-size // p.rows))](
            inputs, weight, self.x, norm, self.y, self.squares, self.pieces, self.arrived, size, self.hidden, depth,
            p.splits, p.rows, p.columns, p.depth, **self._options(p, share),
        )  # fmt: skip

    def _gate_up(self, kernels, layer, size: int, cut: Tiles, parts: int) -> None:
        p = cut.gate_up
        kernels.gate_up_kernel[(self.inner // p.columns, -(-size // p.rows))](
            self.y, self.squares, layer.gate_up, self.h, size, self.decoder.eps, self.inner, self.hidden, parts, p.rows,
            p.columns, p.depth, **self._options(p, self.hidden, pair=True),
        )  # fmt: skip

    def _draw(self, size: int, sampling: Sampling) -> None:
        from rlcourse.rollout import triton_draw as draw

        slots, eps = self.slots, self.decoder.eps
        parts = self.parts(size)
        inverse = 1.0 if sampling.greedy else 1.0 / sampling.temperature
        draw.tile_kernel[(self.tiles, size)](
            self.logits, self.squares, self.top, self.mass, self.vocabulary, inverse, eps, self.hidden, parts, TILE,
            self.tiles, **self.launch,
        )  # fmt: skip
        draw.pick_kernel[(size,)](
            self.logits, self.squares, self.top, self.mass, self.seed, self.tick, self.eos, slots.limit, slots.row,
            slots.token, slots.position, slots.count, slots.done, slots.tokens, slots.logprobs, slots.lengths,
            self.vocabulary, slots.tokens.shape[1], inverse, eps, len(self.eos), self.hidden, parts, TILE, self.tiles,
            self.next_power_of_2(self.tiles), self.next_power_of_2(len(self.eos)), sampling.greedy, **self.launch,
        )  # fmt: skip

    def _refill(self, size: int) -> None:
        from rlcourse.rollout import triton_refill

        slots = self.slots
        layers, _, _, heads, width, head_dim = slots.prompt_cache.shape
        triton_refill.take_kernel[(1,)](
            slots.row, slots.token, slots.position, slots.count, slots.done, self.taken, slots.plan, slots.tokens,
            slots.over, slots.prompt_lengths, size, slots.tokens.shape[1], self.next_power_of_2(size), **self.launch,
        )  # fmt: skip
        triton_refill.copy_kernel[(COPIERS, 2 * layers, heads)](
            slots.row, self.taken, slots.plan, slots.prompt_cache, slots.cache, *slots.prompt_cache.stride()[1:4],
            *slots.cache.stride()[1:4], width * head_dim, 2048, **self.launch,
        )  # fmt: skip
