"""One exception per kind of mistake, with the place where it happened."""


class PTXError(Exception):
    """A kernel's mistake.

    buffer, offset: where in memory, or None. instruction, line: its text, and its line in the PTX. block: (x, y, z) of
    the first thread involved. threads: those involved, within that block.
    """

    def __init__(self, message, *, buffer=None, offset=None, indices=()):
        super().__init__(message)
        self.message, self.buffer, self.offset = message, buffer, offset
        self.indices = indices  # threads in the grid, which `Machine.place` turns into a block and its threads
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
    """An access outside every buffer, or outside the block's shared memory."""


class Misaligned(PTXError):
    """An access whose address is not a multiple of its size."""


class Uninitialised(PTXError):
    """A read of memory or a register that was never written, or of a cp.async before waiting for it."""


class Divergent(PTXError):
    """A barrier, shuffle or matrix product that some of its threads never reach."""


class Race(PTXError):
    """Two warps use the same bytes, at least one writes, and nothing orders them."""


class Endless(PTXError):
    """More instructions than `run`'s limit."""


class Unsupported(PTXError):
    """An instruction, or a form of one, that this interpreter doesn't know."""


def _ranges(numbers) -> str:
    """Sorted numbers as text: "threads 0-3, 8"."""
    runs = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    words = ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs[:8])
    return ("thread " if len(numbers) == 1 else "threads ") + words + (", ..." if len(runs) > 8 else "")
