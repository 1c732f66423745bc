"""The kernels of a decode step, one by one, beside PyTorch doing the same: over all layers, in a CUDA graph."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcourse.exact import KEYS
from rlcourse.exact.weights import FusedWeights, fused_weights, has_kernels
from rlcourse.policy import load_policy
from rlcourse.rollout.slots import Room, Slots
from rlcourse.sampling import Sampling, sample_tokens
from rlcourse.tasks import load_task
from tools.bench.graphs import graph_seconds
from tools.bench.models import write_random_model
from tools.bench.results import Rows

LENGTH = 384  # cache slots, of which `CONTEXT` are used
CONTEXT = 256


def kernels(shape: str, rows: list[int], repeats: int = 5) -> tuple[dict[str, Any], Rows]:
    """Microseconds of each kernel (a mean over the layers), bytes it must move a second, and its error against float32.

    Raises ValueError without a GPU, or for a shape that the kernels cannot do.
    """
    if not torch.cuda.is_available():
        raise ValueError("The kernels need a GPU, and no CUDA GPU was found: `rlcourse doctor` says what runs here.")
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(shape, load_task("minigsm"), Path(folder))
        model = load_policy(folder, "cuda").model
    weights = fused_weights(model, torch.bfloat16)
    if not has_kernels(weights):
        raise ValueError(f"The kernels cannot do {shape}: sizes must be multiples of 128, heads 64 or 128 wide.")
    results: Rows = []
    for count in rows:
        results += _one_size(weights, count, repeats)
    return {"shape": shape, "dtype": "bfloat16", "context": CONTEXT, "repeats": repeats}, results


@torch.no_grad()
def _one_size(weights: FusedWeights, rows: int, repeats: int) -> Rows:
    """Each kernel and its peer at one number of rows."""
    step = _step(weights, rows)
    found: Rows = []
    for name, (ours, peer, moved, error, calls) in _pieces(weights, step, rows).items():
        _fill(step)  # kernels change the numbers that they read
        found_error = error()
        for variant, run in ((name, ours), (f"{name}-pytorch", peer)):
            took, spread = graph_seconds(run, repeats)
            row = {"variant": variant, "shape": [rows], "us": 1e6 * took / calls, "spread": spread}
            row["gb_per_s"] = moved / (took / calls) / 1e9
            found.append(row | ({"relative_error": found_error} if variant == name else {}))
    return found


def _step(weights: FusedWeights, rows: int):
    """A `TritonStep` whose buffers hold numbers of the usual size."""
    from rlcourse.rollout.triton_step import TritonStep  # only where there is Triton

    device, blocks = weights.embedding.device, LENGTH // KEYS  # of each row, one after the other
    slots = Slots.empty(Room(rows, LENGTH, 1, 1, rows, 8), device)
    slots.completion.copy_(torch.arange(rows))
    slots.block_table[:rows] = torch.arange(rows * blocks).view(rows, blocks)
    slots.position.fill_(CONTEXT)
    shape = len(weights.layers), 2, rows * blocks, weights.kv_heads, KEYS, weights.head_dim
    cache = torch.randn(shape, dtype=weights.dtype, device=device)
    step = TritonStep(weights, slots, cache, torch.tensor([0], device=device))
    _fill(step)
    return step


def _fill(step) -> None:
    """Random numbers of the usual size, with an rms of 1."""
    for buffer in (step.y, step.mixed, step.q, step.h, step.x, step.logits):
        buffer.normal_()
    step.squares.fill_(step.hidden / step.squares.shape[1])


def _pieces(weights: FusedWeights, step, rows: int) -> dict[str, tuple]:
    """By name: our kernel, PyTorch's way, bytes that must be moved, the error, and how often a run calls the kernel."""
    tiles = step.tiles(rows)
    layers, caches = weights.layers, list(step.cache)
    x, y, h, mixed = (buffer[:rows] for buffer in (step.x, step.y, step.h, step.mixed))
    first, cache = layers[0], caches[0]
    used = rows * 2 * weights.kv_heads * weights.head_dim * (CONTEXT + 1) * 2
    query = step.q[:rows].view(rows, weights.heads, 1, weights.head_dim)

    def by_rows(layer_cache: Tensor) -> Tensor:
        """Keys and values in the order of a row's tokens: [2, R, K, CONTEXT + 1, D]."""
        together = layer_cache.unflatten(1, (rows, -1)).transpose(2, 3).flatten(3, 4)
        return together[:, :, :, : CONTEXT + 1]

    side_by_side = {id(layer_cache): by_rows(layer_cache) for layer_cache in caches}  # as PyTorch reads them

    def attend(layer_cache: Tensor) -> Tensor:
        keys, values = side_by_side[id(layer_cache)]
        return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    def swiglu(layer) -> Tensor:
        gate, up = F.linear(y, layer.gate_up).chunk(2, -1)
        return F.silu(gate) * up

    def out(layer) -> None:
        step._add("out", step.mixed, layer.out, layer.mlp_norm, rows, tiles.out)

    def down(layer) -> None:
        step._add("down", step.h, layer.down, layer.mlp_norm, rows, tiles.down)

    def attention_error() -> float:
        step._attention(cache, rows, step.attention(rows))
        seen = by_rows(cache)
        exact = F.scaled_dot_product_attention(query.float(), seen[0].float(), seen[1].float(), enable_gqa=True)
        return relative_error(mixed, exact.reshape(rows, -1))

    def gate_up_error() -> float:
        step._gate_up(first, rows, tiles)
        gate, up = F.linear(y.float(), first.gate_up.float()).chunk(2, -1)
        return relative_error(h, F.silu(gate) * up)

    def down_error() -> float:
        before = x.clone()
        down(first)
        return relative_error(x, before + F.linear(h.float(), first.down.float()))

    def each(run: Callable) -> Callable[[], None]:
        def over_layers() -> None:
            for pair in zip(layers, caches, strict=True):
                run(*pair)

        return over_layers

    count = len(layers)
    logits = step.logits[:rows]
    return {
        "attention": (
            each(lambda layer, c: step._attention(c, rows, step.attention(rows))),
            each(lambda layer, c: attend(c)),
            used, attention_error, count,
        ),
        "qkv": (
            each(lambda layer, c: step._qkv(layer, c, rows, tiles)),
            each(lambda layer, c: F.linear(y, layer.qkv, layer.qkv_bias)),
            first.qkv.nbytes, lambda: None, count,
        ),
        "out": (
            each(lambda layer, c: out(layer)),
            each(lambda layer, c: F.linear(mixed, layer.out)),
            first.out.nbytes, lambda: None, count,
        ),
        "gate_up": (
            each(lambda layer, c: step._gate_up(layer, rows, tiles)),
            each(lambda layer, c: swiglu(layer)),
            first.gate_up.nbytes, gate_up_error, count,
        ),
        "down": (
            each(lambda layer, c: down(layer)),
            each(lambda layer, c: F.linear(h, layer.down)),
            first.down.nbytes, down_error, count,
        ),
        "draw": (  # the name that records bear
            lambda: step._sample(step.slots.first(rows), step.logits, step.squares, Sampling()),
            lambda: sample_tokens(logits, Sampling()), logits.nbytes, lambda: None, 1,
        ),
    }  # fmt: skip


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Largest error over the largest value."""
    return ((found.float() - exact).abs().max() / exact.abs().max()).item()
