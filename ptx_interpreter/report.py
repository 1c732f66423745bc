"""Counts of a run: instructions, bytes, sectors, barriers."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

SECTOR = 32  # bytes, the least that a GPU moves


@dataclass
class Access:
    """All executions of one load or store of global memory: how many warps, bytes and sectors."""

    text: str
    warps: int = 0
    bytes: int = 0
    sectors: int = 0

    @property
    def efficiency(self) -> float:
        """Bytes requested per byte moved: at most 1 unless lanes share bytes."""
        return self.bytes / (SECTOR * self.sectors) if self.sectors else 1.0


@dataclass
class Report:
    """Counts of one run.

    instructions: executions per warp, by opcode. read, written: bytes that threads requested, by buffer. accesses: by
    line of the PTX. barriers: that opened. cross_block_reads: bytes that another block wrote, with an atomic in between
    (without one, it's a Race), by buffer.
    """

    instructions: Counter = field(default_factory=Counter)
    read: Counter = field(default_factory=Counter)
    written: Counter = field(default_factory=Counter)
    accesses: dict[int, Access] = field(default_factory=dict)
    barriers: int = 0
    cross_block_reads: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Instructions executed by warps."""
        return sum(self.instructions.values())

    @property
    def sectors(self) -> int:
        """Sectors of global memory touched, counted once per instruction and warp."""
        return sum(access.sectors for access in self.accesses.values())

    def count(self, instruction, space, at: np.ndarray, size: int, threads: np.ndarray, written: bool):
        """Add one access to global memory by some threads."""
        names, numbers = space.holders(at)
        for name, number in zip(names, numbers, strict=True):
            (self.written if written else self.read)[name] += int(number) * size
        access = self.accesses.setdefault(instruction.line, Access(instruction.text))
        warp = threads // 32
        access.warps += int(np.count_nonzero(np.diff(warp))) + 1
        access.bytes += len(at) * size
        access.sectors += len(np.unique((warp << 40) + at // SECTOR))
