"""The products of a decode step by the kernels in CuTe DSL, where those are faster than Triton's: with the same bits.
They are for Hopper, whose tensor cores give the bits of one accumulator to any kernel (`rlcourse.exact.products`). What
follows a product compilers may round differently: so each kernel is compared with Triton's when it is first met, and is
not used if a bit differs."""

import warnings
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from rlcourse.exact import KEYS
from rlcourse.exact.products import share_of
from rlcourse.exact.weights import FusedWeights
from rlcourse.kernels import KernelError
from rlcourse.kernels.add_product import AddProduct
from rlcourse.kernels.gate_up import GateUp
from rlcourse.kernels.products import DEPTH, Product
from rlcourse.kernels.qkv import QKV
from rlcourse.kernels.toolchain import launch


class CuteTile(NamedTuple):
    """Columns and rows of a block, and tiles of its depth in shared memory. rows_first: as of `GateUp`."""

    columns: int
    rows: int
    stages: int
    rows_first: bool = False


# Columns, rows and stages of each product's tile for up to 16 rows, up to 96, and more, measured in whole steps on an
# H200; None: there the kernel in Triton was faster. With more stages weights are asked for earlier; with fewer, two
# blocks share a processor.
NARROW = {  # Qwen2.5-0.5B
    "qkv": (None, (64, 32, 12), (64, 64, 7)),
    "out": (None, (64, 32, 14), (64, 48, 13)),
    "gate_up": (None, (128, 64, 9), (80, 128, 4, True)),
    "down": (None, (64, 64, 14), (64, 128, 9)),
    "head": ((64, 16, 6), (128, 64, 6), None),
}
NORMED = {  # Qwen3-0.6B, whose queries and keys have a norm
    "qkv": ((128, 16, 8), (128, 32, 11), None),
    "out": ((64, 16, 22), (64, 32, 12), (64, 64, 9)),
    "gate_up": ((128, 16, 12), (64, 32, 6), (192, 64, 7)),
    "down": ((128, 16, 12), (64, 64, 9), (128, 128, 7)),
}
WIDE = {  # Qwen2.5-1.5B
    "qkv": ((64, 16, 22), (64, 64, 9), (64, 64, 9)),
    "out": (None, (64, 32, 18), (64, 64, 9)),
    "gate_up": ((128, 16, 6), (192, 64, 7), None),
    "down": ((64, 16, 22), (64, 64, 14), (128, 128, 7)),
}
WIDEST = {  # Llama-3.2-1B
    "qkv": ((64, 16, 15), None, None),
    "out": ((64, 16, 15), (64, 32, 12), None),
    "gate_up": ((128, 16, 12), None, None),
    "down": ((128, 16, 12), (128, 64, 6), None),
}


def cute_tiles(rows: int, hidden: int, normed: bool) -> dict[str, CuteTile]:
    """The tiles for so many rows of a model with `hidden` features, by product. normed: queries and keys are."""
    table = NORMED if normed else NARROW if hidden < 1024 else WIDE if hidden < 2048 else WIDEST
    number = 0 if rows <= 16 else 1 if rows <= 96 else 2
    return {name: CuteTile(*tiles[number]) for name, tiles in table.items() if tiles[number]}


class CuteProducts:
    """The kernels for a model's products, each chosen for a number of rows."""

    def __init__(self, weights: FusedWeights):
        self.weights = weights
        self.kernel = cache(self._kernel)

    def _kernel(self, name: str, size: int) -> AddProduct | GateUp | Product | QKV | None:
        w, layer = self.weights, self.weights.layers[0]
        hidden, inner = layer.down.shape
        tile = cute_tiles(size, hidden, layer.q_norm is not None).get(name)
        dtype = str(w.dtype).removeprefix("torch.")
        if tile is None:
            return None
        try:
            if name == "head":  # of more rows than a tile's, the weights would be read twice
                return Product(len(w.head), hidden, *tile[:3], dtype) if size <= tile.rows else None
            if name == "gate_up":
                return GateUp(inner, hidden, w.eps, *tile[:3], dtype, tile.rows_first)
            if name == "qkv":
                heads, has = (w.heads, w.kv_heads, w.head_dim), (layer.qkv_bias is not None, layer.q_norm is not None)
                return QKV(*heads, hidden, w.eps, *has, KEYS, *tile[:3], dtype)
            depth = layer.out.shape[1] if name == "out" else inner
            share = -(-depth // DEPTH) * DEPTH if name == "out" else share_of(inner)
            return AddProduct(hidden, depth, share, *tile[:3], dtype)
        except KernelError:
            return None


_agree: dict[object, bool] = {}  # whether a kernel runs here, and its bits are Triton's


def run(
    kernel,
    arguments: tuple,
    other: Callable[[], None],
    look: Callable[[], list[Tensor]],
    added_to: Tensor | None = None,
) -> None:
    """What `kernel` computes from its arguments; or by `other`, which does the same, where the kernel was found to
    differ, or not to run. look: gives what either wrote; added_to: what is both read and written."""
    if kernel in _agree or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return launch(kernel, *arguments) if _agree.get(kernel) else other()  # a graph compares nothing
    before, ours = None if added_to is None else added_to.clone(), None
    try:
        launch(kernel, *arguments)
        ours = [tensor.clone() for tensor in look()]
    except Exception as error:  # as with another CuTe DSL
        warnings.warn(f"{kernel} does not run here, and a slower kernel is used: {error}", stacklevel=2)
    if before is not None:
        added_to.copy_(before)
    other()
    _agree[kernel] = ours is not None and all(same_bits(a, b) for a, b in zip(ours, look(), strict=True))
    if ours is not None and not _agree[kernel]:
        warnings.warn(f"{kernel} rounds otherwise than the training pass: the slower kernel is used.", stacklevel=2)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one dtype have the same bits: also those of nan, and other ones for 0 and -0."""
    integers = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))
