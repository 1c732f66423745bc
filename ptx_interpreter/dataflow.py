"""Which registers may be read before they are written, so that only those are checked while running."""

import re

from ptx_interpreter.parse import NAME, Entry, Instruction

NO_DESTINATION = {"st", "red", "bra", "bar", "barrier", "ret", "exit", "cp", "fence", "membar", "stmatrix", "prefetch"}
LEAVES = {"bra", "ret", "exit"}


def perhaps_unwritten(entry: Entry) -> set[str]:
    """Registers that some path through the code reads before it writes them.

    A forward data-flow analysis over basic blocks: `known[start]` has a bit for every register that is written on all
    paths to the block at `start`. Writes by predicated instructions don't count.
    """
    code = entry.instructions
    bit = {name: 1 << i for i, name in enumerate(entry.registers)}
    uses = [_uses(instruction, bit) for instruction in code]
    starts = sorted({0, *entry.labels.values(), *(i + 1 for i, x in enumerate(code) if x.name in LEAVES)})
    end = dict(zip(starts, [*starts[1:], len(code)], strict=True))
    known: dict[int, int] = {0: 0}
    queue = [0]
    while queue:
        start = queue.pop()
        have = known[start]
        for _, writes in uses[start : end[start]]:
            have |= writes
        for following in _followers(entry, start, end[start]):
            both = known.get(following, have) & have
            if known.get(following) != both:
                known[following] = both
                queue.append(following)
    watched = 0
    for start, have in known.items():
        for reads, writes in uses[start : end[start]]:
            watched |= reads & ~have
            have |= writes
    return {name for name in bit if bit[name] & watched}


def destinations(instruction: Instruction) -> list[str]:
    """The registers that an instruction writes."""
    if instruction.name in NO_DESTINATION or not instruction.operands:
        return []
    return [name for name in re.split(r"[{}|,\s]+", instruction.operands[0]) if name]


def _uses(instruction: Instruction, bit: dict[str, int]) -> tuple[int, int]:
    """Bits of the registers that an instruction reads, and of those that it always writes."""
    written = destinations(instruction)
    sources = " ".join((*instruction.operands[1 if written else 0 :], instruction.predicate or ""))
    reads = {bit.get(name, 0) for name in re.findall(NAME, sources)}
    writes = {bit.get(name, 0) for name in written} if instruction.predicate is None else set()
    return sum(reads), sum(writes)


def _followers(entry: Entry, start: int, end: int) -> list[int]:
    """Starts of the blocks that may follow the one from `start` to `end`."""
    last = entry.instructions[end - 1] if end > start else None
    jumps = [entry.labels[last.operands[0]]] if last and last.name == "bra" else []
    falls = last is None or last.name not in LEAVES or last.predicate is not None
    return jumps + ([end] if falls and end < len(entry.instructions) else [])
