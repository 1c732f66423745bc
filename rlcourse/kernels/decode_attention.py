"""Decode attention, third step: tensor cores, and in its fused form RoPE and the cache write in the same launch.

A warp takes 16 tokens, or a few times 16, at a time. With the queries of the G <= 8 heads that share a key-value head,
two products do the work, both mma.sync m16n8k16, which since Ampere computes [16, 16] times [16, 8]:

    scores  [16 heads, 8 tokens]   = q [16 heads, D] times keys^T [D, 8 tokens], twice; heads 8 to 15 are zeros
    acc^T   [D, 8 heads]          += values^T [D, 16 tokens] times weights^T [16 tokens, 8 heads]

An instruction wants certain rows and columns of each lane. But which dimension is "number 3" of a sum over D does not
matter as long as both factors agree, nor which dimension is "row 3" of a result as long as it is written where it
belongs. So numbers are given such that each lane's operands are 16 bytes that lie together in global memory. Lane
4 g + c, with g in 0..7 and c in 0..3, holds

    of q and keys   dimensions 8c..8c+7 of each 32, of head or token g
    of values       dimensions 8g..8g+7 of each 64, of tokens 2c, 2c + 1, 2c + 8, 2c + 9
    of scores       head g, tokens 2c, 2c + 1, 2c + 8, 2c + 9: what the second product wants of the weights
    of acc          dimensions 8g..8g+7 of each 64, of heads 2c and 2c + 1

There is no shared memory in the loop, and registers are loaded again as soon as a product has used them. So PTX has it;
the assembler moves the loads of a round to its end, where they travel together.
"""

import math
from dataclasses import dataclass

from rlcourse.kernels.arguments import Argument
from rlcourse.kernels.decode_common import DecodeKernel, allocate_partials, chunks, finish, share, tokens_of_row
from rlcourse.kernels.decode_new_token import load, open_softmax, rotate, sum_of_four, write_to_cache
from rlcourse.kernels.dsl import Float32, const_expr, cute, cutlass, range_constexpr
from rlcourse.kernels.kernel import LOG2_E, LOWEST, power, registers, tensor_cores

TILE = 16  # tokens that a product takes


@dataclass(frozen=True)
class DecodeAttention(DecodeKernel):
    """The kernel, with the fields of `SplitDecode`. warps: of a block; they share its tokens. angles: dtype of cos and
    sin, for the fused form, in which q and the new token's k and v come as they leave the projection. tiles: products
    of 16 tokens that a warp has under way. Programmatic dependent launch (Hopper and later): with early, blocks may
    start before the previous kernel has ended, and wait. With ahead, that kernel writes nothing of position, start and
    older tokens, as in a decode loop, so blocks read some of these before they wait. release: when the next kernel may
    start, at the "start" of a block or at the "end" of its loop; None: when this one has ended."""

    splits: int = 1
    warps: int = 4
    angles: str | None = None
    early: bool = False
    ahead: bool = False
    tiles: int = 1
    release: str | None = None

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def arguments(self):
        new, turn = ("rows", self.kv_heads, self.head_size), ("rows", self.head_size // 2)
        return super().arguments(
            *(Argument(name, self.dtype, new, free=1) if self.angles else None for name in ("k", "v")),
            *(Argument(name, self.angles, turn, free=1) if self.angles else None for name in ("cos", "sin")),
        )

    @cute.kernel
    def kernel(self, q, k_cache, v_cache, k, v, cos, sin, position, start, out, partial_acc, partial_ml, arrived):
        if const_expr(self.release == "start"):
            cute.arch.griddepcontrol_launch_dependents()
        if const_expr(self.early and not self.ahead):
            cute.arch.griddepcontrol_wait()
        split, kv_head, row = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warp, g, c = thread // 32, thread % 32 // 4, thread % 4
        group, size, dtype = const_expr(self.heads // self.kv_heads), const_expr(self.head_size), q.element_type
        keys, values = chunks(k_cache[row, kv_head, None, None]), chunks(v_cache[row, kv_head, None, None])
        scale, step = const_expr(LOG2_E / math.sqrt(size)), const_expr(TILE * self.tiles * self.warps)
        apart = const_expr(bool(self.angles) or self.ahead)  # the new token does not come with the others

        # A kernel of a few microseconds is a chain of waits: reads are asked for long before they are used.
        newest, first = tokens_of_row(position, start, row, k_cache.shape[2])
        begin, end = share(first, newest + const_expr(0 if apart else 1), split, self.splits)
        begin += TILE * self.tiles * warp
        key = registers(dtype, 8, size // 32, 2 * self.tiles)
        value = registers(dtype, 8, size // 64, 4 * self.tiles)
        if const_expr(self.ahead):
            if begin < end:
                load_keys(key, keys, begin, end, g, c)
                load_values(value, values, begin, end, g, c)
            if const_expr(self.early):
                cute.arch.griddepcontrol_wait()
        query = registers(dtype, 8, size // 32)
        load(query, chunks(q[row, None, None]), kv_head * group + cutlass.min(g, group - 1), c, 4)
        opens = split == self.splits - 1 and warp == self.warps - 1  # of all, one warp begins with the new token
        if const_expr(apart):
            new_key, new_value = registers(dtype, 8, size // 32), registers(dtype, 8, size // 64)
        if const_expr(self.angles):
            cosine, sine = (registers(cos.element_type, 8, size // 64) for _ in range(2))
            load(cosine, chunks(cos), row, c, 4)
            load(sine, chunks(sin), row, c, 4)
            opens = opens and newest >= 0
            if opens:
                load(new_key, chunks(k[row, None, None]), kv_head, c, 4)
                load(new_value, chunks(v[row, None, None]), kv_head, g, 8)
        elif const_expr(self.ahead):
            opens = opens and newest >= first
            if opens:
                load(new_key, keys, newest, c, 4)
                load(new_value, values, newest, g, 8)
        if const_expr(not self.ahead):  # noqa: SIM102
            if begin < end:
                load_keys(key, keys, begin, end, g, c)
        if const_expr(self.angles):
            rotate(query, cosine, sine)
        if const_expr(not self.ahead):  # noqa: SIM102
            if begin < end:
                load_values(value, values, begin, end, g, c)

        m, l, acc = Float32(LOWEST), Float32(0.0), registers(Float32, (2, 2), size // 16)
        if const_expr(apart):  # noqa: SIM102
            if opens:
                if const_expr(self.angles):
                    rotate(new_key, cosine, sine)
                    write_to_cache(new_key, new_value, keys, values, newest, g, c)
                m, l = open_softmax(acc, query, new_key, new_value, c, scale)
        queries, scores = query_operand(query), registers(Float32, (2, 2), 1, 2 * self.tiles)
        for base in cutlass.range(begin, end, step):
            multiply_keys(scores, queries, key)
            load_keys(key, keys, base + step, end, g, c)
            m, l = softmax(scores, acc, m, l, base + 2 * c, end, c, scale)
            multiply_values(acc, scores, value)
            load_values(value, values, base + step, end, g, c)

        if const_expr(self.release == "end"):
            cute.arch.griddepcontrol_launch_dependents()
        own_ml, own_acc = allocate_partials(self.warps, size)
        leave(own_ml, own_acc, acc, m, sum_of_four(l), warp, g, c)
        workspace = (partial_acc, partial_ml, arrived)
        finish(own_ml, own_acc, out, workspace, row, kv_head, split, group, self.splits, self.threads)


@cute.jit
def load_keys(key, keys, base, end, g, c):
    """Keys of the tokens from base on into key [8, D / 32, 2 * tiles]. Past the end the last token is read again."""
    for i in range_constexpr(key.shape[2]):
        load(key[None, None, i], keys, cutlass.min(base + 8 * i + g, end - 1), c, 4)


@cute.jit
def load_values(value, values, base, end, g, c):
    """Values of the tokens from base on into value [8, D / 64, 4 * tiles]."""
    for i in range_constexpr(value.shape[2]):
        load(value[None, None, i], values, cutlass.min(base + 2 * c + i % 2 + i // 2 * 8, end - 1), g, 8)


@cute.jit
def query_operand(query):
    """query [8, D / 32] as left operand of the first product: ((pair, rows 0-7 or 8-15, half of 16), 1, D / 16)."""
    size = const_expr(cute.size(query))
    operand = registers(query.element_type, (2, 2, 2), 1, size // 4)
    for i in range_constexpr(size):
        operand[(i % 2, 0, i // 2 % 2), 0, i // 4] = query[i]
    return operand


@cute.jit
def multiply_keys(scores: cute.Tensor, queries: cute.Tensor, key: cute.Tensor):
    """scores = q times keys^T. The registers of `key` are in the instruction's order as they came."""
    groups = const_expr(key.shape[2])  # of 8 tokens
    n = const_expr(cute.size(key) // (4 * groups))
    layout = cute.make_layout(((2, 2), groups, n), stride=((1, 2), 4 * n, 4))
    operand = cute.make_tensor(key.iterator, layout)
    scores.fill(0.0)
    for i in range_constexpr(n):
        cute.gemm(tensor_cores(key), scores, queries[None, None, i], operand[None, None, i], scores)


@cute.jit
def softmax(scores, acc, m, l, token, end, c, scale: cutlass.Constexpr):
    """One step of the online softmax: scores become weights, acc and l are rescaled where a higher score is met. token:
    that of the lane's first score. m is the same in the four lanes of a head, l is of the lane alone. acc ((head 2c or
    2c + 1, dimension 2i or 2i + 1 of the lane), i)."""
    m_new = m
    for i in range_constexpr(scores.shape[2]):
        for p in range_constexpr(2):
            x = scores[(p, 0), 0, i] * scale
            scores[(p, 0), 0, i] = x if token + 8 * i + p < end else -Float32.inf
            m_new = cute.arch.fmax(m_new, scores[(p, 0), 0, i])
    m_new = cute.arch.fmax(m_new, cute.arch.shuffle_sync_bfly(m_new, offset=1))
    m_new = cute.arch.fmax(m_new, cute.arch.shuffle_sync_bfly(m_new, offset=2))
    alpha = power(m - m_new)
    l *= alpha
    for i in range_constexpr(scores.shape[2]):
        for p in range_constexpr(2):
            scores[(p, 0), 0, i] = power(scores[(p, 0), 0, i] - m_new)
            l += scores[(p, 0), 0, i]
    for p in range_constexpr(2):
        factor = cute.arch.shuffle_sync(alpha, 8 * c + 4 * p)  # that of head 2c + p
        for i in range_constexpr(2 * acc.shape[1]):
            acc[(p, i % 2), i // 2] = acc[(p, i % 2), i // 2] * factor
    return m_new, l


@cute.jit
def multiply_values(acc, weights, value):
    """acc += values^T times weights^T. Each register of the operand holds one dimension of two tokens, those that
    came hold two dimensions of one: the only moves of the loop."""
    n = const_expr(4 * value.shape[1])
    layout = cute.make_layout(((2, 2, 2), n), stride=((2 * n, 1, 4 * n), 2))
    operand, rounded = registers(value.element_type, (2, 2, 2), n), registers(value.element_type, (2, 2), 1)
    sums = cute.make_tensor(acc.iterator, cute.make_layout(((2, 2), n, 1)))
    for tile in range_constexpr(value.shape[2] // 4):
        view = cute.make_tensor(value.iterator + 8 * n * tile, layout)
        for i in range_constexpr(8 * n):
            operand[i] = view[i]
        for i in range_constexpr(4):
            rounded[i] = weights[(i % 2, 0), 0, 2 * tile + i // 2].to(value.element_type)
        cute.gemm(tensor_cores(value), sums, operand, rounded, sums)


@cute.jit
def leave(all_ml, all_acc, acc, m, l, warp, g, c):
    """A warp's partial, into shared memory."""
    if c == 0:
        all_ml[warp, 0, g], all_ml[warp, 1, g] = m, l
    chunk = registers(Float32, 8)
    for p in range_constexpr(2):
        heads = cute.tiled_divide(all_acc[warp, 2 * c + p, None], (8,))
        for j in range_constexpr(acc.shape[1] // 4):
            for e in range_constexpr(8):
                chunk[e] = acc[(p, e % 2), 4 * j + e // 2]
            cute.autovec_copy(chunk, heads[None, g + 8 * j])
