"""Rotary positions of a decode step: q and k are turned, k and v written to the cache, all from one packed row.

Half a head is turned against the other half, so a thread takes 16 bytes of each and needs nothing from its neighbours.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlcourse.kernels import KernelError
from rlcourse.kernels.arguments import Argument, need_dtype, type_name
from rlcourse.kernels.dsl import Float32, cute
from rlcourse.kernels.toolchain import launch

VECTOR = 8  # 16-bit numbers in 16 bytes


def rope_reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, position: Tensor, slot: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """Turn q and k by their row's position and write k and v to the cache, in float32, rounded once, at the end.

    qkv [rows, (heads + 2 * kv_heads) * head]: a row's query heads, then its key heads, then its value heads. cos, sin
    float32 [positions, head / 2]: of the angles position / base^(2 i / head) (Su et al. 2021, arXiv:2104.09864;
    element i turns with element i + head / 2, as in Qwen). position, slot int64 [rows]: where in the text a row is, and
    where in its cache. k_cache, v_cache [rows, kv_heads, length, head]: written at slot; a row whose slot is negative
    is left alone. Returns q [rows, heads, head].
    """
    rows, kv_heads, _, head = k_cache.shape
    qkv = qkv.view(rows, -1, head)
    first, second = qkv[:, :-kv_heads].float().chunk(2, -1)
    c, s = cos[position][:, None], sin[position][:, None]
    turned = torch.cat([first * c - second * s, second * c + first * s], -1).to(qkv.dtype)
    there = torch.nonzero(slot >= 0)[:, 0]
    k_cache[there, :, slot[there]] = turned[there, -kv_heads:]
    v_cache[there, :, slot[there]] = qkv[there, -kv_heads:]
    return turned[:, :-kv_heads].contiguous()


@dataclass(frozen=True)
class Rope:
    """`rope_reference` for a number of query heads, of key-value heads, and a head size."""

    heads: int
    kv_heads: int
    head: int
    dtype: str
    threads: int = 128

    def __post_init__(self):
        need_dtype(self)
        if self.head % (2 * VECTOR):
            raise KernelError(f"Rope cannot cut heads of {self.head}: it takes multiples of {2 * VECTOR}.")

    @property
    def pieces(self) -> int:
        """Pairs of 16-byte pieces in a head."""
        return self.head // (2 * VECTOR)

    @property
    def row_threads(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.pieces

    def arguments(self) -> tuple:
        table, cache = ("positions", self.head // 2), ("rows", self.kv_heads, "length", self.head)
        return (
            Argument("qkv", self.dtype, ("rows", (self.heads + 2 * self.kv_heads) * self.head), free=1),
            Argument("cos", "float32", table),
            Argument("sin", "float32", table),
            Argument("position", "int64", ("rows",), align=8),
            Argument("slot", "int64", ("rows",), align=8),
            Argument("k_cache", self.dtype, cache, free=2),
            Argument("v_cache", self.dtype, cache, free=2),
            Argument("q", self.dtype, ("rows", self.heads, self.head), output=True),
        )

    def grid(self, qkv, *_):
        return -(-qkv.shape[0] * self.row_threads // self.threads), 1, 1

    @cute.jit
    def __call__(self, qkv: cute.Tensor, cos, sin, position, slot, k_cache, v_cache, q, stream):
        self.kernel(qkv, cos, sin, position, slot, k_cache, v_cache, q).launch(
            grid=self.grid(qkv), block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        qkv: cute.Tensor,
        cos: cute.Tensor,
        sin: cute.Tensor,
        position: cute.Tensor,
        slot: cute.Tensor,
        k_cache: cute.Tensor,
        v_cache: cute.Tensor,
        q: cute.Tensor,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        index = block * self.threads + thread
        row, head, piece = index // self.row_threads, index % self.row_threads // self.pieces, index % self.pieces
        if row < qkv.shape[0]:
            first, second = (cute.make_rmem_tensor(VECTOR, q.element_type) for _ in range(2))
            whole = cute.tiled_divide(qkv[row, None], (VECTOR,))
            cute.autovec_copy(whole[None, head * 2 * self.pieces + piece], first)
            cute.autovec_copy(whole[None, (head * 2 + 1) * self.pieces + piece], second)
            if head < self.heads + self.kv_heads:
                turn(first, second, cos[position[row], None], sin[position[row], None], piece)
            if head < self.heads:
                put(first, second, q[row, head, None], piece, self.pieces)
            elif slot[row] >= 0:
                if head < self.heads + self.kv_heads:
                    put(first, second, k_cache[row, head - self.heads, slot[row], None], piece, self.pieces)
                else:
                    kv_head = head - self.heads - self.kv_heads
                    put(first, second, v_cache[row, kv_head, slot[row], None], piece, self.pieces)


@cute.jit
def turn(first: cute.Tensor, second: cute.Tensor, cos: cute.Tensor, sin: cute.Tensor, piece):
    """Turn the points (first, second) by the angles of this piece of the head."""
    c, s = (cute.make_rmem_tensor(VECTOR, Float32) for _ in range(2))
    cute.autovec_copy(cute.tiled_divide(cos, (VECTOR,))[None, piece], c)
    cute.autovec_copy(cute.tiled_divide(sin, (VECTOR,))[None, piece], s)
    x, y = first.load().to(Float32), second.load().to(Float32)
    first.store((x * c.load() - y * s.load()).to(first.element_type))
    second.store((y * c.load() + x * s.load()).to(first.element_type))


@cute.jit
def put(first: cute.Tensor, second: cute.Tensor, head: cute.Tensor, piece, pieces):
    """Write both halves of a piece to a head [size]."""
    places = cute.tiled_divide(head, (VECTOR,))
    cute.autovec_copy(first, places[None, piece])
    cute.autovec_copy(second, places[None, pieces + piece])


@torch.library.custom_op("rlcourse::rope", mutates_args=("k_cache", "v_cache"))
def rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, position: Tensor, slot: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """`rope_reference` in one launch; qkv and caches bfloat16 or float16, their rows' strides free, and the strides of
    the caches' heads. Positions must be within the tables and slots below the caches' length. Raises KernelError."""
    rows, kv_heads, _, head = k_cache.shape
    heads = qkv.shape[-1] // head - 2 * kv_heads
    q = qkv.new_empty(rows, heads, head)
    if rows:
        launch(Rope(heads, kv_heads, head, type_name(qkv)), qkv, cos, sin, position, slot, k_cache, v_cache, q)
    return q


@rope.register_fake
def _(qkv, cos, sin, position, slot, k_cache, v_cache):
    rows, kv_heads, _, head = k_cache.shape
    return qkv.new_empty(rows, qkv.shape[-1] // head - 2 * kv_heads, head)


EXAMPLES = (
    Rope(14, 2, 64, "bfloat16"),  # Qwen2.5-0.5B
    Rope(14, 2, 64, "float16"),
    Rope(12, 2, 128, "bfloat16"),  # Qwen2.5-1.5B
    Rope(16, 8, 128, "bfloat16"),  # Qwen3-0.6B
)
