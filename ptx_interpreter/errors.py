"""What can go wrong while PTX runs: one exception for each kind of mistake, with the place where it happened."""


class PTXError(Exception):
    """A mistake of a kernel.

    `buffer` and `offset`: where in memory, or None. `instruction` and `line`: its text and its line in the PTX.
    `block`: (x, y, z) of the first thread that did it. `threads`: which threads of that block.
    """

    def __init__(self, message, *, buffer=None, offset=None, indices=()):
        super().__init__(message)
        self.message, self.buffer, self.offset = message, buffer, offset
        self.indices = indices  # of threads in the grid; `run` turns them into a block and its threads
        self.instruction = self.line = self.block = None
        self.threads: list[int] = []

    def __str__(self):
        text = self.message
        if self.block is not None:
            text += f"\n  block {self.block}, {_ranges(self.threads)}"
        if self.line is not None:
            text += f"\n  PTX line {self.line}: {self.instruction}"
        return text


class OutOfBounds(PTXError):
    """An access outside of every buffer, or outside of the block's shared memory."""


class Misaligned(PTXError):
    """An access whose address is not a multiple of its size."""


class Uninitialised(PTXError):
    """A read of memory, or of a register, that nobody wrote, or of a cp.async that nobody waited for."""


class Divergent(PTXError):
    """Threads that a barrier, a shuffle or a matrix product waits for, and that never come."""


class Race(PTXError):
    """Two warps use the same bytes, at least one writes, and nothing says who comes first."""


class Endless(PTXError):
    """More instructions than `run` was allowed."""


class Unsupported(PTXError):
    """An instruction, or a form of one, that this interpreter does not know."""


def _ranges(numbers) -> str:
    """Sorted numbers in words: "threads 0-3, 8"."""
    runs = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    words = ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs[:8])
    return ("thread " if len(numbers) == 1 else "threads ") + words + (", ..." if len(runs) > 8 else "")
