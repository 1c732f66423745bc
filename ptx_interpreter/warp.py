"""Warp-level instructions: shuffles, votes, reductions and matrix products."""

import numpy as np

from ptx_interpreter.errors import Divergent, Unsupported
from ptx_interpreter.formats import decode
from ptx_interpreter.registers import indices

LANES = np.arange(32)
TOGETHER = {"shfl", "vote", "redux", "elect", "mma", "ldmatrix"}  # and bar.warp


def is_together(instruction) -> bool:
    return instruction.name in TOGETHER or instruction.opcode.startswith("bar.warp")


def whole_warps(who: np.ndarray) -> bool:
    """Whether these threads, in order, are all lanes of some warps."""
    return len(who) % 32 == 0 and bool((who[::32] % 32 == 0).all() and (who[31::32] - who[::32] == 31).all())


def mask_of(instruction, registers):
    """The function of `threads` that gives the mask of participating lanes: the last operand, or all lanes."""
    if instruction.name in ("mma", "ldmatrix"):
        return registers.reader("-1", "u32")
    return registers.reader(instruction.operands[-1], "u32")


def build(instruction, machine):
    """The function of `threads` that executes a warp-level instruction."""
    if instruction.opcode.startswith("bar.warp"):
        return lambda threads: None
    if instruction.name == "ldmatrix":
        return _ldmatrix(instruction, machine)
    builders = {"shfl": _shuffle, "vote": _vote, "elect": _elect, "redux": _reduce, "mma": _mma}
    return builders[instruction.name](instruction, machine.registers)


def _shuffle(instruction, registers):
    mode = instruction.modifiers[1]
    value_target, _, holds_target = instruction.operands[0].partition("|")
    write, write_holds = registers.writer(value_target, "b32"), registers.writer(holds_target or "_", "pred")
    value = registers.reader(instruction.operands[1], "b32")
    by, limits = (registers.reader(text, "u32") for text in instruction.operands[2:4])

    def execute(threads):
        who = indices(threads)
        lane = who % 32
        segment, clamp, offset = limits(threads) >> 8 & 31, limits(threads) & 31, by(threads).astype(np.int64) & 31
        last = (lane & segment) | (clamp & ~segment)
        if mode == "up":
            source = lane - offset
            holds = source >= last
        else:
            ways = {"down": lane + offset, "bfly": lane ^ offset, "idx": (lane & segment) | (offset & ~segment)}
            source = ways[mode]
            holds = source <= last
        thread = who - lane + np.where(holds, source, lane)
        if not whole_warps(who) and (bad := ~np.isin(thread, who)).any():
            raise Divergent(f"reads lane {thread[bad][0] % 32}, which takes no part", indices=who[bad])
        write(threads, value(thread))
        write_holds(threads, holds)

    return execute


def _ballot(who, predicate):
    """For each thread, a bit mask of the lanes in `who`, from its warp, whose predicate holds."""
    warps, row = np.unique(who // 32, return_inverse=True)
    bits = np.zeros(len(warps), np.uint32)
    np.bitwise_or.at(bits, row, predicate.astype(np.uint32) << (who % 32).astype(np.uint32))
    return bits[row]


def _vote(instruction, registers):
    mode = instruction.modifiers[1]
    write = registers.writer(instruction.operands[0], "b32" if mode == "ballot" else "pred")
    predicate, mask = registers.reader(instruction.operands[1], "pred"), mask_of(instruction, registers)

    def execute(threads):
        who, members = indices(threads), mask(threads)
        bits = _ballot(who, np.broadcast_to(predicate(threads), who.shape)) & members
        results = {"ballot": bits, "any": bits != 0, "all": bits == members, "uni": (bits == 0) | (bits == members)}
        write(threads, results[mode])

    return execute


def _elect(instruction, registers):
    """elect.sync: the lowest lane of the mask leads."""
    lane_target, holds_target = instruction.operands[0].split("|")
    write, write_holds = registers.writer(lane_target, "b32"), registers.writer(holds_target, "pred")
    mask = mask_of(instruction, registers)

    def execute(threads):
        members = np.broadcast_to(mask(threads), indices(threads).shape)
        leader = np.bitwise_count((members & -members.view(np.int32).astype(np.int64)) - 1).astype(np.uint32)
        write(threads, leader)
        write_holds(threads, indices(threads) % 32 == leader)

    return execute


def _reduce(instruction, registers):
    """redux.sync: reduce the values of all lanes in the mask."""
    operation, kind = instruction.modifiers[-2:]
    found = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}
    function = (found | {"xor": np.bitwise_xor}).get(operation)
    if function is None:
        raise Unsupported(instruction.opcode)
    write, value = registers.writer(instruction.operands[0], kind), registers.reader(instruction.operands[1], kind)
    mask = mask_of(instruction, registers)

    def execute(threads):
        who = indices(threads)
        values = np.broadcast_to(value(threads), who.shape)
        group = (who // 32 << 32) + mask(threads)
        result = np.empty_like(values)
        for g in np.unique(group):
            result[group == g] = function.reduce(values[group == g], dtype=values.dtype)
        write(threads, result)

    return execute


def _mma(instruction, registers):
    """mma.sync.m16n8k16 and m16n8k8, row.col, of bf16 or f16, with float32 sums.

    Sums in float64 and rounds once; tensor cores truncate intermediate sums.
    """
    *_, shape, rows, columns, result, kind, other, start = instruction.modifiers
    depth = {"m16n8k16": 16, "m16n8k8": 8}.get(shape)
    known = (rows, columns, result, start) == ("row", "col", "f32", "f32") and kind in ("bf16", "f16")
    if depth is None or not known or kind != other:
        raise Unsupported(instruction.opcode)
    groups = [registers.group(text) for text in instruction.operands]
    writes = [registers.writer(text, "f32") for text in groups[0]]
    a, b = ([registers.reader(text, "b32") for text in group] for group in groups[1:3])
    c = [registers.reader(text, "f32") for text in groups[3]]
    a_places = np.argsort(_places(len(a), 16, depth)[0], kind="stable")
    b_places = np.argsort(_places(len(b), 8, depth)[1], kind="stable")

    def matrix(reads, threads, shape, order):
        """Fragments of all lanes to matrices [warps, *shape]."""
        count = len(indices(threads))
        pairs = [decode(np.broadcast_to(read(threads), count), kind + "x2") for read in reads]
        lanes = np.stack(pairs, 1).reshape(count // 32, -1).astype(np.float64)  # [warps, 32 * registers * 2]
        return lanes[:, order].reshape(-1, *shape)

    def execute(threads):
        count = len(indices(threads))
        left, right = matrix(a, threads, (16, depth), a_places), matrix(b, threads, (8, depth), b_places)
        product = left @ right.swapaxes(1, 2)  # [warps, 16, 8]
        lane = product[:, (LANES // 4)[:, None] + [0, 0, 8, 8], (LANES % 4 * 2)[:, None] + [0, 1, 0, 1]]
        for sums, write, read in zip(lane.reshape(count, 4).T, writes, c, strict=True):
            write(threads, (sums + read(threads)).astype(np.float32))

    return execute


def _places(registers: int, rows: int, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Flat index of [lane, register, half] in the matrix A [rows, depth], and in B^T [rows, depth]."""
    lane, register, half = np.meshgrid(LANES, np.arange(registers), np.arange(2), indexing="ij")
    row, column = lane // 4, lane % 4 * 2 + half
    in_a = (row + register % 2 * 8) * depth + column + register // 2 * 8
    in_b = row * depth + column + register * 8
    return in_a.reshape(-1), in_b.reshape(-1)


def _ldmatrix(instruction, machine):
    """ldmatrix.m8n8: 1, 2 or 4 matrices with 8 rows of 16 bytes; lane i addresses row i % 8 of matrix i // 8."""
    if "m8n8" not in instruction.modifiers or instruction.modifiers[-1] != "b16":
        raise Unsupported(instruction.opcode)
    registers, shared = machine.registers, machine.shared
    writes = [registers.writer(text, "b32") for text in registers.group(instruction.operands[0])]
    address, transposed = registers.address(instruction.operands[1]), "trans" in instruction.modifiers

    def execute(threads):
        who = indices(threads)
        giving = who % 32 < 8 * len(writes)
        at = shared.locate(address(threads)[giving], machine.owner["shared"][who[giving]], 16, who[giving])
        shared.check_read(at, 16, who[giving], machine.order)
        rows = shared.data.view(np.uint16)[at[:, None] // 2 + np.arange(8)].reshape(-1, len(writes), 8, 8)
        if transposed:
            rows = rows.swapaxes(2, 3)
        pairs = np.ascontiguousarray(rows).view(np.uint32).reshape(-1, len(writes), 32)
        for i, write in enumerate(writes):
            write(threads, pairs[:, i].reshape(-1))

    return execute
