"""Shared by the decode-attention kernels: which tokens a row attends to, and merging partial results. A partial keeps,
for each query head, its highest score `m`, the sum `l` of 2^(score - m) and the vector `acc`, the sum of 2^(score - m)
* value; scores carry the factor log2(e). Partials merge as parts of one softmax (Milakov and Gimelshein 2018,
arXiv:1805.02867): first those of a block's warps or lanes, then the blocks'. B rows, H query heads, K key-value heads,
G = H / K query heads that share one, D head size, S cache slots."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlcourse.kernels import KernelError
from rlcourse.kernels.arguments import Argument
from rlcourse.kernels.dsl import Float32, Int32, const_expr, cute, cutlass, range_constexpr
from rlcourse.kernels.kernel import LOWEST, Kernel, power

MOST_HEADS = 8  # query heads of a key-value head


def decode_attention_reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor, start: Tensor | None = None
) -> Tensor:
    """Attention of one query token a row over slots start..position of its cache, scores times D ** -0.5. q [B, H, D];
    k_cache, v_cache [B, K, S, D]; position int64 [1], the same slot for all rows, or [B]; start int64 [B] or None for
    0. Returns [B, H, D] in q's dtype, computed in float32. Zeros for a row with no slots (start > position) and for an
    idle one (position outside the cache)."""
    slots = torch.arange(k_cache.shape[2], device=q.device)
    position = position.expand(len(q))[:, None]
    seen = (slots <= position) & (position < len(slots))
    if start is not None:
        seen &= slots >= start[:, None]
    group = q.shape[1] // k_cache.shape[1]
    keys, values = (
        torch.where(seen[:, None, :, None], cache.float(), 0.0).repeat_interleave(group, dim=1)
        for cache in (k_cache, v_cache)
    )
    scores = torch.einsum("bhd,bhsd->bhs", q.float(), keys) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhs,bhsd->bhd", weights, values).to(q.dtype)


@dataclass(frozen=True)
class DecodeKernel(Kernel):
    """Base of a decode-attention kernel. padded: a row begins at a slot of its own, its `start`, behind the padding."""

    heads: int
    kv_heads: int
    head_size: int
    dtype: str = "bfloat16"
    padded: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.head_size not in (64, 128) or self.heads % self.kv_heads or self.heads > 8 * self.kv_heads:
            raise KernelError(
                f"Decode attention takes heads of size 64 or 128 and 1 to 8 query heads for each key-value head, not "
                f"{self.heads} and {self.kv_heads} heads of size {self.head_size}: use PyTorch's attention."
            )

    def arguments(self, *new: Argument | None) -> tuple:
        """q [B, H, D]; k_cache, v_cache [B, K, S, D]; `new`, of the new token in the fused form; position int64 [B],
        may be expanded; start int64 [B] or None; out [B, H, D]; and, where several blocks share a row, zeros."""
        size, cache = self.head_size, ("rows", self.kv_heads, "slots", self.head_size)
        return (
            Argument("q", self.dtype, ("rows", self.heads, size), free=1),
            Argument("k_cache", self.dtype, cache, free=2),
            Argument("v_cache", self.dtype, cache, free=2),
            *new,
            Argument("position", "int64", ("rows",), free=1, align=8),
            Argument("start", "int64", ("rows",), align=8) if self.padded else None,
            Argument("out", self.dtype, ("rows", self.heads, size), output=True),
            *(workspace_arguments(size) if self.splits > 1 else (None,) * 3),
        )

    def grid(self, q, *_):
        return self.splits, self.kv_heads, q.shape[0]


def workspace_arguments(size: int) -> tuple[Argument, ...]:
    """Room for a partial of every block of a launch, and a counter of at least every row and key-value head."""
    return (
        Argument("partial_acc", "float32", ("partials", MOST_HEADS, size)),
        Argument("partial_ml", "float32", ("partials", 2, MOST_HEADS)),
        Argument("arrived", "int32", ("partials",)),
    )


@cute.jit
def chunks(heads):
    """[n, D] seen as chunks of 8 elements, which is what one 16-byte load brings: [(1, 8), n, D / 8]."""
    return cute.tiled_divide(heads, (1, 8))


@cute.jit
def tokens_of_row(position, start, row, slots):
    """Where a row's newest token is (-1 where that is not in the cache: an idle row), and its first slot."""
    at, first = position[row], Int32(0)
    if const_expr(start is not None):
        first = cutlass.max(start[row].to(Int32), 0)
    newest = at.to(Int32)
    if at < 0 or at >= slots:
        newest = Int32(-1)
    return newest, first


@cute.jit
def share(first, last, split, splits: cutlass.Constexpr):
    """The part of slots first..last - 1 of block `split`: equal parts, in whole tiles of 16 tokens."""
    part = cute.ceil_div(cutlass.max(last - first, 0), 16 * splits) * 16
    begin = cutlass.min(first + split * part, last)
    return begin, cutlass.min(begin + part, last)


@cute.jit
def allocate_partials(partials: cutlass.Constexpr, size: cutlass.Constexpr):
    """Shared memory for partials: ml [partials, (m, l), heads], acc [partials, heads, D], rows in different banks."""
    memory = cutlass.memory.SmemAllocator()
    ml = memory.allocate_tensor(Float32, cute.make_ordered_layout((partials, 2, MOST_HEADS), (2, 1, 0)), 16)
    stride = (MOST_HEADS * (size + 4), size + 4, 1)
    acc = memory.allocate_tensor(Float32, cute.make_layout((partials, MOST_HEADS, size), stride=stride), 16)
    return ml, acc


@cute.jit
def finish(
    ml, acc, out, workspace, row, kv_head, split,
    group: cutlass.Constexpr, splits: cutlass.Constexpr, threads: cutlass.Constexpr,
):  # fmt: skip
    """Merge a block's partials in shared memory, and write the output of its `group` query heads. Of `splits` blocks
    each leaves its partial in the workspace (partial_acc, partial_ml, arrived), and the last one to arrive merges them.
    """
    partials, heads, size = acc.shape
    width = const_expr(heads * size // threads)  # elements of a head's vector that a thread looks after
    thread, _, _ = cute.arch.thread_idx()
    head, place = thread // (size // width), thread % (size // width)
    query_head = kv_head * group + head
    total = cute.make_rmem_tensor(width, Float32)
    cute.arch.sync_threads()
    if const_expr(splits == 1):
        if head < group:
            _, l = put_together(ml, acc, 0, partials, head, place, total)
            write_out(out, row, query_head, place, total, l)
    else:
        all_acc, all_ml, arrived = workspace
        pair = row * const_expr(out.shape[1] // group) + kv_head
        if head < group:
            m, l = put_together(ml, acc, 0, partials, head, place, total)
            mine = pair * splits + split
            cute.autovec_copy(total, cute.tiled_divide(all_acc[mine, head, None], (width,))[None, place])
            if place == 0:
                all_ml[mine, 0, head], all_ml[mine, 1, head] = m, l
        last = last_to_arrive(arrived, pair, splits)
        if last and head < group:
            _, l = put_together(all_ml, all_acc, pair * splits, splits, head, place, total)
            write_out(out, row, query_head, place, total, l)


@cute.jit
def put_together(ml, acc, first, partials: cutlass.Constexpr, head, place, total):
    """Add up partials first..first + partials - 1 of one head, in a fixed order; returns their m and l. total [V]
    becomes elements V * place and on of their acc. All reads are on their way before one is used."""
    width = const_expr(cute.size(total))
    parts = cute.make_rmem_tensor((width, partials), Float32)
    ms, ls = cute.make_rmem_tensor(partials, Float32), cute.make_rmem_tensor(partials, Float32)
    for i in range_constexpr(partials):
        ms[i], ls[i] = ml[first + i, 0, head], ml[first + i, 1, head]
        cute.autovec_copy(cute.tiled_divide(acc[first + i, head, None], (width,))[None, place], parts[None, i])
    m, l = Float32(LOWEST), Float32(0.0)
    for i in range_constexpr(partials):
        m = cute.arch.fmax(m, ms[i])
    total.fill(0.0)
    for i in range_constexpr(partials):
        weight = power(ms[i] - m)
        l += ls[i] * weight
        for e in range_constexpr(width):
            total[e] += parts[e, i] * weight
    return m, l


@cute.jit
def write_out(out, row, head, place, total, l):
    """total / l in the output's dtype; zeros where nothing was attended to."""
    inverse = cute.arch.rcp_approx(cute.arch.fmax(l, Float32(1e-30)))
    width = const_expr(cute.size(total))
    rounded = cute.make_rmem_tensor(width, out.element_type)
    for e in range_constexpr(width):
        rounded[e] = (total[e] * inverse).to(out.element_type)
    cute.autovec_copy(rounded, cute.tiled_divide(out[row, head, None], (width,))[None, place])


@cute.jit
def last_to_arrive(arrived, pair, splits: cutlass.Constexpr):
    """Whether this block is the last of the `splits` that share row and head number `pair`. What the others wrote
    before they arrived may then be read. The counter is 0 again for the next launch. One thread counts, with acquire
    and release semantics; the barriers on both sides extend that to its block."""
    thread, _, _ = cute.arch.thread_idx()
    seen = cutlass.memory.SmemAllocator().allocate_tensor(Int32, cute.make_layout(1), 4)
    cute.arch.sync_threads()
    if thread == 0:
        before = cute.arch.atomic_add(arrived.iterator + pair, Int32(1), sem="acq_rel", scope="gpu")
        if before == splits - 1:
            arrived[pair] = Int32(0)
        seen[0] = before
    cute.arch.sync_threads()
    return seen[0] == splits - 1
