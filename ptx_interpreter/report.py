"""What a run did: instructions, bytes, sectors, barriers."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

SECTOR = 32  # bytes that a GPU moves at least


@dataclass
class Access:
    """All executions of one load or store of global memory: by how many warps, which bytes, how many sectors."""

    text: str
    warps: int = 0
    bytes: int = 0
    sectors: int = 0

    @property
    def efficiency(self) -> float:
        """Bytes asked for among the bytes moved, at most 1 unless lanes share bytes."""
        return self.bytes / (SECTOR * self.sectors) if self.sectors else 1.0


@dataclass
class Report:
    """`instructions`: executions by warps, by opcode. `read`, `written`: bytes that threads asked for, by buffer.

    `accesses`: by the line in the PTX. `barriers`: of whole blocks. `cross_block_reads`: bytes that one block wrote and
    another read, with an atomic in between (without, it is a Race), by buffer.
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
        """Sectors of global memory touched, each counted once an instruction and warp."""
        return sum(access.sectors for access in self.accesses.values())

    def count(self, instruction, space, at: np.ndarray, size: int, threads: np.ndarray, written: bool):
        """Adds one access to global memory by some threads."""
        names, numbers = space.holders(at)
        for name, number in zip(names, numbers, strict=True):
            (self.written if written else self.read)[name] += int(number) * size
        access = self.accesses.setdefault(instruction.line, Access(instruction.text))
        warp = threads // 32
        access.warps += int(np.count_nonzero(np.diff(warp))) + 1
        access.bytes += len(at) * size
        access.sectors += len(np.unique((warp << 40) + at // SECTOR))
