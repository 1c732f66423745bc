"""The least time that work can take: the bytes it must move, the operations it must do, and how fast a machine is at
both (Williams et al. 2009, "Roofline: An Insightful Visual Performance Model"). Counted is what no implementation can
avoid."""

from dataclasses import dataclass

import torch

from rlcourse.measure.shapes import ModelShape, parameters
from rlcourse.measure.timing import median_seconds

ADAMW_BYTES = 28  # a parameter in float32: weight, gradient and two moments read, weight and moments written


@dataclass(frozen=True)
class Work:
    """Bytes moved and floating-point operations done, by part."""

    bytes: dict[str, float]
    flops: dict[str, float]

    @property
    def total_bytes(self) -> float:
        return sum(self.bytes.values())

    @property
    def total_flops(self) -> float:
        return sum(self.flops.values())

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.total_flops / self.total_bytes


@dataclass(frozen=True)
class Machine:
    """What a machine can do: bytes/s of a copy (both read and written), operations/s of a matrix product in `dtype`."""

    name: str
    dtype: str
    bytes_per_s: float
    flops_per_s: float

    def floor_seconds(self, work: Work) -> float:
        """The least time that the work can take: of its bytes or its operations, whichever is longer."""
        return max(work.total_bytes / self.bytes_per_s, work.total_flops / self.flops_per_s)

    @property
    def ridge(self) -> float:
        """Operations a byte above which the operations take longer than the bytes."""
        return self.flops_per_s / self.bytes_per_s


def layer_weights(shape: ModelShape) -> int:
    """Parameters of all layers: everything but embedding, head and final norm."""
    return parameters(shape) - shape.vocabulary * shape.hidden * (1 if shape.tied else 2) - shape.hidden


def decode_step(shape: ModelShape, rows: int, context: float, element_bytes: int = 2) -> Work:
    """One decode step of `rows` rows that attend to `context` tokens each (a mean). Read: every weight of the layers
    and of the head once, keys and values of every row. Written: keys and values of one token. Two operations for each
    weight and row, four for each query head, head dimension and token attended to (scores, then the mix of values)."""
    cache_row = shape.layers * 2 * shape.kv_heads * shape.head_dim
    head = shape.vocabulary * shape.hidden
    weights = layer_weights(shape)
    return Work(
        bytes={
            "layers": element_bytes * weights,
            "head": element_bytes * head,
            "keys and values": element_bytes * cache_row * rows * (context + 1),
        },
        flops={
            "layers": 2.0 * weights * rows,
            "head": 2.0 * head * rows,
            "attention": 4.0 * shape.layers * shape.heads * shape.head_dim * rows * context,
        },
    )


def update(shape: ModelShape, rows: int, length: int, completion: int) -> Work:
    """One optimizer step on `rows` sequences of `length` tokens, of which the last `completion` have log-probs.

    A forward pass has two operations a weight and token, a backward pass twice as many (Kaplan et al. 2020,
    arXiv:2001.08361), causal attention half of all pairs. Bytes are those of weights, gradients and AdamW in float32. A
    prompt counts for each of its answers.
    """
    tokens = rows * length
    attention = 4.0 * shape.layers * shape.heads * shape.head_dim * length / 2 * tokens
    return Work(
        bytes={"optimizer": float(ADAMW_BYTES * parameters(shape))},
        flops={
            "layers": 3.0 * 2.0 * layer_weights(shape) * tokens,
            "attention": 3.0 * attention,
            "head": 3.0 * 2.0 * shape.vocabulary * shape.hidden * rows * completion,
        },
    )


def measure_machine(device: torch.device) -> Machine:
    """The median rate of a large copy, and of a large product in bfloat16 on a GPU and float32 on a CPU. Takes a few
    seconds."""
    from rlcourse.measure.records import device_name

    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    source = torch.zeros(2**30 if on_gpu else 2**26, dtype=torch.uint8, device=device)  # far beyond any cache
    target = torch.empty_like(source)
    copy_s = median_seconds(lambda: target.copy_(source), device, repeats=7)
    size = 8192 if on_gpu else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product_s = median_seconds(lambda: a @ b, device, repeats=7)
    return Machine(device_name(), str(dtype).split(".")[1], 2 * source.numel() / copy_s, 2 * size**3 / product_s)
