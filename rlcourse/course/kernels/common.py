"""What several kernels share: which thread loads and stores what."""

import math
from dataclasses import dataclass

from rlcourse.kernels import KernelError
from rlcourse.kernels.arguments import Argument
from rlcourse.kernels.dsl import const_expr, cute, cutlass, range_constexpr
from rlcourse.kernels.kernel import Kernel

VECTOR = 8  # 16-bit numbers in 16 bytes, the most that a thread loads at once
LANES = 32  # threads of a warp


def check_width(kernel, width: int, multiple: int = VECTOR, most: int | None = None) -> None:
    """Raises KernelError for rows that a kernel's threads cannot share."""
    if width % multiple or (most and width > most):
        up_to = f" up to {most}" if most else ""
        name = type(kernel).__name__
        raise KernelError(f"{name} cannot cut rows of {width}: it takes multiples of {multiple}{up_to}.")


@dataclass(frozen=True)
class PerPiece(Kernel):
    """Base of an elementwise kernel: a thread for each piece of a row of `width` numbers, 16 bytes."""

    width: int
    dtype: str

    threads = 256
    vector = VECTOR

    def __post_init__(self):
        super().__post_init__()
        check_width(self, self.width, self.vector)

    def argument(self, name: str, columns: int, **options) -> Argument:
        return Argument(name, self.dtype, ("rows", columns), **options)

    @property
    def pieces(self) -> int:
        return self.width // self.vector

    def grid(self, x, *_):
        return -(-x.shape[0] * self.pieces // self.threads), 1, 1

    @cute.jit
    def place(self):
        """This thread's row and piece."""
        (thread, _, _), (block, _, _) = cute.arch.thread_idx(), cute.arch.block_idx()
        index = block * self.threads + thread
        return index // self.pieces, index % self.pieces


@cute.jit
def load(row, held, lane, lanes: cutlass.Constexpr = LANES, full: cutlass.Constexpr = True):
    """A thread's pieces [numbers in 16 bytes, pieces] of a row; neighbouring threads take neighbouring pieces. full:
    every thread has all of its pieces; without, some of the last ones are past the end, and stay as they are."""
    vector = const_expr(held.shape[0])
    pieces, count = cute.tiled_divide(row, (vector,)), const_expr(row.shape[0] // vector)
    for i in range_constexpr(held.shape[1]):
        if const_expr(full) or i * lanes + lane < count:
            cute.autovec_copy(pieces[None, i * lanes + lane], held[None, i])


@cute.jit
def store(held, row, lane, lanes: cutlass.Constexpr = LANES, full: cutlass.Constexpr = True):
    """The way back of `load`."""
    vector = const_expr(held.shape[0])
    pieces, count = cute.tiled_divide(row, (vector,)), const_expr(row.shape[0] // vector)
    for i in range_constexpr(held.shape[1]):
        if const_expr(full) or i * lanes + lane < count:
            cute.autovec_copy(held[None, i], pieces[None, i * lanes + lane])


@cute.jit
def load_logits(row, piece, held):
    """A 16-byte piece of a row; past the end of a row that isn't a multiple of that, -inf."""
    vector = const_expr(cute.size(held))
    if (piece + 1) * vector <= row.shape[0]:
        cute.autovec_copy(cute.tiled_divide(row, (vector,))[None, piece], held)
    else:
        held.fill(-math.inf)
        for i in range_constexpr(vector):
            if piece * vector + i < row.shape[0]:
                held[i] = row[piece * vector + i]
