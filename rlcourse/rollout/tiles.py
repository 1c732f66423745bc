"""How the kernels of a decode step cut their work into tiles, by the number of rows and the GPU's shared memory."""

import importlib.util
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from rlcourse.exact import KEYS


@dataclass(frozen=True)
class MatmulTile:
    """How a matrix product is cut: rows, columns and depth of a tile, warps, pipeline stages, and of a product that
    comes in shares (`rlcourse.exact.products`) how many a program has. None of it changes a bit. preloaded: tiles of
    weights that are loaded before the input is there, where a thread can hold them. more: columns beside those of the
    tile, so that they need not be a power of two (gate and up alone)."""

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 4
    preloaded: int = 0
    shares: int = 1
    more: int = 0


@dataclass(frozen=True)
class TileConfig:
    """The tiles of a step's products."""

    qkv: MatmulTile
    out: MatmulTile
    gate_up: MatmulTile
    down: MatmulTile


class AttentionTile(NamedTuple):
    """Programs that share a row's cache for a key-value head, and pipeline stages."""

    splits: int
    stages: int


TILES_UP_TO_16_ROWS = TileConfig(  # measured on an H200 at the shape of Qwen2.5-0.5B, as all without another word
    qkv=MatmulTile(16, 16, 256, stages=2, preloaded=4),
    out=MatmulTile(16, 32, 128, warps=8, stages=2, preloaded=7),
    gate_up=MatmulTile(16, 32, 128, stages=2, preloaded=7),
    down=MatmulTile(16, 32, 256, stages=2, preloaded=5),
)
TILES_UP_TO_96_ROWS = TileConfig(
    qkv=MatmulTile(16, 16, 128, stages=2, preloaded=7),
    out=MatmulTile(64, 32, 128, stages=5),
    gate_up=MatmulTile(64, 64, 64, warps=8, stages=6),
    down=MatmulTile(64, 32, 128, stages=5),
)
TILES_FOR_MORE_ROWS = TileConfig(
    qkv=MatmulTile(64, 32, 128, stages=4),
    out=MatmulTile(64, 32, 128, stages=5),
    gate_up=MatmulTile(128, 32, 64, warps=8, stages=3),
    down=MatmulTile(64, 64, 128, stages=5, shares=2),
)
WIDE = 1024  # features of the residual stream from which on products are deeper, and there are more of them
WIDE_TILES = {  # measured at the shapes of Qwen2.5-1.5B and Qwen3-0.6B
    TILES_UP_TO_16_ROWS: {
        "qkv": MatmulTile(16, 32, 128, warps=8, stages=3, preloaded=4),
        "out": MatmulTile(16, 32, 256, warps=8, stages=4, preloaded=6),
        "gate_up": MatmulTile(16, 16, 128, stages=5, preloaded=7),
    },
    TILES_UP_TO_96_ROWS: {
        "qkv": MatmulTile(64, 16, 128, stages=6),
        "gate_up": MatmulTile(64, 64, 64, warps=8, stages=4),
        "down": MatmulTile(64, 64, 128, stages=4),
    },
    TILES_FOR_MORE_ROWS: {
        "out": MatmulTile(64, 64, 128, stages=5),
        "down": MatmulTile(128, 64, 64, warps=8, stages=6, shares=2),
    },
}
NORMED_QKV = {  # of a model with norms of queries and keys, measured at the shape of Qwen3-0.6B
    TILES_UP_TO_16_ROWS: MatmulTile(16, 64, 128, warps=8, stages=3, preloaded=3),
    TILES_UP_TO_96_ROWS: MatmulTile(16, 64, 64, warps=8, stages=4, preloaded=4),
    TILES_FOR_MORE_ROWS: MatmulTile(64, 64, 128, stages=4),
}
EVEN_GATE_UP = {  # but for the columns, which are shared out evenly: of narrow models, and of `WIDE` ones
    TILES_UP_TO_96_ROWS: (MatmulTile(64, 0, 128, stages=4), MatmulTile(64, 0, 64, warps=8, stages=6)),
    TILES_FOR_MORE_ROWS: (MatmulTile(128, 0, 64, warps=8, stages=4),) * 2,
}
MOST_COLUMNS = 144  # of a program: of more, the sums of 128 rows do not fit a thread's registers
LARGE = 200 * 1024  # bytes of shared memory of a block that such tiles take: those of Hopper, and of Blackwell's B200
REGISTERS = 900  # bytes of weights that a thread can hold
LEAST_SHARED = 99 * 1024  # bytes of shared memory that a block can have on an A10G, an L4 or a GeForce


def tiles_for(
    rows: int, shared: int, processors: int, hidden: int, inner: int, head_dim: int, normed: bool
) -> TileConfig:
    """The tiles for so many rows of a model with `hidden` features, of which SwiGLU makes `inner`, on a GPU with so
    many processors, whose blocks can have `shared` bytes of shared memory. normed: queries and keys are, so that a
    program has a whole head of them."""
    tiles = TILES_UP_TO_16_ROWS if rows <= 16 else TILES_UP_TO_96_ROWS if rows <= 96 else TILES_FOR_MORE_ROWS
    wide, qkv, even = WIDE_TILES[tiles] if hidden >= WIDE else {}, NORMED_QKV[tiles], EVEN_GATE_UP.get(tiles)
    tiles = replace(tiles, **wide)
    if even and shared >= LARGE:
        tile = even[hidden >= WIDE]
        tiles = replace(tiles, gate_up=_shared_out(tile, inner, processors // -(-rows // tile.rows)))
    half = head_dim // 2
    qkv = replace(qkv, columns=half) if normed else replace(tiles.qkv, columns=min(half, tiles.qkv.columns))
    tiles = replace(tiles, qkv=qkv)
    pairs = {"qkv": 2, "out": 1, "gate_up": 2, "down": 1}  # weight tiles that a program multiplies with
    return replace(tiles, **{name: _fit(getattr(tiles, name), n, 0.9 * shared) for name, n in pairs.items()})


def _shared_out(tile: MatmulTile, inner: int, programs: int) -> MatmulTile:
    """The tile with so many columns, a power of two and a smaller one, that the programs are about so many."""
    columns = max(16, -(-inner // max(1, programs)))
    if columns > MOST_COLUMNS:
        return replace(tile, columns=128)
    power = 1 << (columns.bit_length() - 1)
    more = max(8, 1 << (columns - power - 1).bit_length()) if columns > power else 0
    return replace(tile, columns=2 * power) if more == power else replace(tile, columns=power, more=more)


def attention_tile(rows: int, kv_heads: int, head_dim: int, shared: int) -> AttentionTile:
    """The attention of so many rows, measured on an H200 at the shapes of four models: a processor with one program
    waits for memory, unless the program asks for several tiles ahead; one with many needs the room for them."""
    if rows * kv_heads <= 64:  # programs: less than half the GPU's processors would have one
        return AttentionTile(splits=4, stages=1)
    stages = 2 if head_dim > 64 else 4 if rows <= 96 else 1
    return AttentionTile(splits=1, stages=min(stages, 1 + int(0.9 * shared) // (4 * KEYS * head_dim)))


def _fit(tile: MatmulTile, weights: int, shared: float) -> MatmulTile:
    def stage_bytes(t: MatmulTile) -> int:
        return 2 * t.depth * (t.rows + weights * (t.columns + t.more))

    while tile.stages > 2 and tile.stages * stage_bytes(tile) > shared:
        tile = replace(tile, stages=tile.stages - 1)
    while tile.stages * stage_bytes(tile) > shared:
        tile = replace(tile, depth=tile.depth // 2)
    return tile


def launch_options(tile: MatmulTile, depth: int, pair: bool) -> dict:
    """PRELOADED, warps and stages of a product of 16-bit numbers that is `depth` deep for each share."""
    weight_bytes = 2 * (tile.columns + tile.more) * tile.depth * (2 if pair else 1)
    preloaded = min(tile.preloaded, -(-depth // tile.depth), 32 * tile.warps * REGISTERS // weight_bytes)
    return {"PRELOADED": preloaded, "num_warps": tile.warps, "num_stages": tile.stages}


def cute_wins(device: torch.device) -> bool:
    """Whether CuTe DSL is installed, and the GPU one where its kernels were measured to be faster than Triton's."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return hopper and importlib.util.find_spec("cutlass") is not None
