"""The embedding: a row of a table for each token, and the gradient of the table. Backward, a row of the table gets the
sum of its tokens' gradients. Atomic additions would change the order of that sum from run to run. So a stable sort puts
equal tokens next to each other, in runs, and one thread adds up a piece of a run in order. Runs are cut into chunks of
32, as text repeats a few tokens very often, and a second launch adds up the chunks of longer runs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlcourse.course.kernels.common import VECTOR, PerPiece
from rlcourse.kernels.arguments import Argument, type_name
from rlcourse.kernels.dsl import Float32, const_expr, cute, cutlass, range_constexpr
from rlcourse.kernels.kernel import operation
from rlcourse.kernels.toolchain import launch

CHUNK = 32  # equal tokens that a thread adds up
AHEAD = 8  # rows that are on their way to a thread


class Embedding(PerPiece):
    """y [tokens, hidden]: each thread copies 16 bytes."""

    def arguments(self) -> tuple:
        token = Argument("token", "int64", ("rows",), align=8)
        y = self.argument("y", self.width, free=1, output=True)
        return Argument("table", self.dtype, ("vocabulary", self.width)), token, y

    def grid(self, table, token, y):
        return -(-token.shape[0] * self.pieces // self.threads), 1, 1

    @cute.kernel
    def kernel(self, table, token, y):
        row, piece = self.place()
        if row < token.shape[0]:
            held = cute.make_rmem_tensor(VECTOR, table.element_type)
            cute.autovec_copy(cute.tiled_divide(table[token[row], None], (VECTOR,))[None, piece], held)
            cute.autovec_copy(held, cute.tiled_divide(y[row, None], (VECTOR,))[None, piece])


class EmbeddingBackward(PerPiece):
    """dtable [vocabulary, hidden] float32 += sums of dy [tokens, hidden], for runs of one chunk; of longer runs, each
    chunk's sum goes into sums [windows, 2, hidden]. The four lists [tokens] are those of `runs`. A window is 32 places.
    Of longer runs, no two first chunks begin in the same window, whose sums are at [window, 0], and no two others,
    whose sums are at [window, 1]."""

    threads = 128

    def arguments(self) -> tuple:
        source, dy = Argument("source", "int64", ("rows",), align=8), self.argument("dy", self.width, free=1)
        sums = Argument("sums", "float32", ("windows", 2, self.width), output=True)
        return *of_runs(), source, dy, Argument("dtable", "float32", ("vocabulary", self.width)), sums

    @cute.kernel
    def kernel(self, token, begin, end, source, dy, dtable, sums):
        place, piece = self.place()
        room = room_for_rows(dy.element_type, self.threads)
        if place < token.shape[0]:
            before, last = place - begin[place], end[place]
            if before % CHUNK == 0:
                added = add_rows(dy, source, place, cutlass.min(place + CHUNK, last), piece, room)
                if last - begin[place] <= CHUNK:
                    add_to(dtable[token[place], None], added, piece)
                else:
                    row = sums[place // CHUNK, cutlass.min(before, 1), None]
                    cute.autovec_copy(added, cute.tiled_divide(row, (VECTOR,))[None, piece])


@dataclass(frozen=True)
class LongRuns(PerPiece):
    """dtable [vocabulary, hidden] float32 += what `EmbeddingBackward` left in sums [windows, 2, hidden]."""

    dtype: str = "float32"

    threads = 128
    vector = 4  # float32 numbers in 16 bytes
    dtypes = ("float32",)

    def arguments(self) -> tuple:
        sums = Argument("sums", "float32", ("windows", 2, self.width))
        return *of_runs(), sums, Argument("dtable", "float32", ("vocabulary", self.width))

    def grid(self, token, begin, end, sums, dtable):
        return -(-sums.shape[0] * self.pieces // self.threads), 1, 1

    @cute.kernel
    def kernel(self, token, begin, end, sums, dtable):
        window, piece = self.place()
        room = room_for_rows(Float32, self.threads)
        # Where the next window begins, a longer run that begins in this one is still there.
        place = (window + 1) * CHUNK
        if place < token.shape[0]:
            first, last = begin[place], end[place]
            if first // CHUNK == window and last - first > CHUNK:
                added = cute.make_rmem_tensor(self.vector, Float32)
                cute.autovec_copy(cute.tiled_divide(sums[window, 0, None], (self.vector,))[None, piece], added)
                ends = window + cute.ceil_div(last - first, CHUNK)
                others = add_rows(sums[None, 1, None], None, window + 1, ends, piece, room)
                added.store(added.load() + others.load())
                add_to(dtable[token[place], None], added, piece)


@cute.jit
def room_for_rows(dtype: cutlass.Constexpr, threads: cutlass.Constexpr):
    """16 bytes of AHEAD rows for each thread, in shared memory; those of a thread."""
    thread, _, _ = cute.arch.thread_idx()
    layout = cute.make_layout((128 // dtype.width, threads, AHEAD))
    return cutlass.memory.SmemAllocator().allocate_tensor(dtype, layout, 16)[None, thread, None]


@cute.jit
def add_rows(rows, which, first, last, piece, room):
    """The float32 sum of a piece of rows[which[first : last]]; of rows[first : last] where which is None. AHEAD rows
    are on their way at a time, into shared memory: into registers the compiler would load one after the other."""
    copy = cute.make_copy_atom(cute.nvgpu.cpasync.CopyG2SOp(), rows.element_type, num_bits_per_copy=128)
    added, held = (cute.make_rmem_tensor(room.shape[0], dtype) for dtype in (Float32, rows.element_type))
    added.fill(0.0)
    for base in range(first, last, AHEAD):
        for i in range_constexpr(AHEAD):
            if base + i < last:
                row = rows[base + i if const_expr(which is None) else which[base + i], None]
                cute.copy_atom_call(copy, cute.tiled_divide(row, (room.shape[0],))[None, piece], room[None, i])
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        for i in range_constexpr(AHEAD):
            if base + i < last:
                cute.autovec_copy(room[None, i], held)
                added.store(added.load() + held.load().to(Float32))
    return added


@cute.jit
def add_to(row, added, piece):
    """A piece of the row += added, as many numbers."""
    size = const_expr(cute.size(added))
    held, target = cute.make_rmem_tensor(size, Float32), cute.tiled_divide(row, (size,))[None, piece]
    cute.autovec_copy(target, held)
    held.store(held.load() + added.load())
    cute.autovec_copy(held, target)


def runs(token: Tensor) -> tuple[Tensor, ...]:
    """Tokens [tokens] int64, sorted: the tokens, the places where the run of each begins and ends (one past its last
    place), all int32, and the places from which they came, int64. In 32 bits a sort takes half as many passes."""
    ordered, source = torch.sort(token.int(), stable=True)
    begin, end = (torch.searchsorted(ordered, ordered, right=right, out_int32=True) for right in (False, True))
    return ordered, begin, end, source


def of_runs() -> tuple:
    return tuple(Argument(name, "int32", ("rows",), align=4) for name in ("token", "begin", "end"))


@operation()
def embedding(table: Tensor, token: Tensor) -> Tensor:
    """Rows [tokens, hidden] of table [vocabulary, hidden], bfloat16 or float16, for token int64 [tokens], which must be
    within the table. Raises KernelError."""
    y = table.new_empty(token.shape[0], table.shape[1])
    launch(Embedding(table.shape[1], type_name(table)), table, token, y)
    return y


@operation(mutates=("dtable",))
def embedding_backward(token: Tensor, dy: Tensor, dtable: Tensor) -> None:
    """dtable [vocabulary, hidden] float32 += the sum of dy [tokens, hidden] over each row's tokens, with the same bits
    every time. dy bfloat16 or float16, the stride of rows free. Raises KernelError."""
    *lists, source = runs(token)
    sums = dtable.new_empty(-(-token.shape[0] // CHUNK), 2, dtable.shape[1])
    launch(EmbeddingBackward(dy.shape[1], type_name(dy)), *lists, source, dy, dtable, sums)
    launch(LongRuns(dy.shape[1]), *lists, sums, dtable)
