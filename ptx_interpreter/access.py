"""Loads, stores, atomics, fences and asynchronous copies."""

import numpy as np

from ptx_interpreter import floats, integers
from ptx_interpreter.errors import Race, Unsupported
from ptx_interpreter.memory import ATOMIC, PENDING, UNSIGNED, WRITTEN
from ptx_interpreter.parse import size_of
from ptx_interpreter.registers import dtype_of, indices

SPACES = ("global", "shared", "shared::cta", "local", "param", "const")
STRONG = {"volatile", "relaxed", "acquire", "release", "acq_rel"}
CHANGES = {name: integers.SIMPLE[name] for name in ("add", "min", "max", "and", "or", "xor")} | {
    "exch": lambda old, new: new,
    "cas": lambda old, expected, new: np.where(old == expected, new, old),
}  # the new value from the old one and the operands, arrays of one element
NO_OPERATION = {"griddepcontrol", "nanosleep", "prefetch", "prefetchu", "discard", "applypriority", "createpolicy"}


def build(instruction, machine):
    """The function of `threads` that executes a memory instruction, or None for any other."""
    if instruction.name in NO_OPERATION:
        return lambda threads: None
    name = {"red": "atom", "membar": "fence"}.get(instruction.name, instruction.name)
    builder = {"ld": _load, "st": _store, "atom": _atomic, "fence": _fence, "cp": _copy}.get(name)
    return builder and builder(instruction, machine)


def _shape(instruction) -> tuple[str, int, int]:
    """Type, bytes per element and number of elements of a load or store."""
    kind = instruction.modifiers[-1]
    count = next((int(m[1:]) for m in instruction.modifiers if m in ("v2", "v4", "v8")), 1)
    return kind, size_of(kind), count


def _place(instruction, machine, address, size):
    """A function from threads to (space, indices in it, thread numbers) of an access of `size` bytes."""
    named = next((m for m in instruction.modifiers if m in SPACES), None)
    if named in ("const", "param"):
        raise Unsupported(f"{instruction.opcode} to .{named}")
    fixed = machine.spaces[named.split("::")[0]] if named else None

    def place(threads):
        who, where = indices(threads), address(threads)
        space = fixed or machine.space_of(where)
        return space, space.locate(where, machine.owner[space.name][who], size, who), who

    return place


def _load(instruction, machine):
    kind, width, count = _shape(instruction)
    registers, dtype, strong = machine.registers, dtype_of(kind), bool(STRONG & set(instruction.modifiers))
    writes = [registers.writer(text, kind) for text in registers.group(instruction.operands[0])]
    if "param" in instruction.modifiers:
        return _parameter(instruction, machine, writes, dtype)
    place = _place(instruction, machine, registers.address(instruction.operands[1]), width * count)

    def execute(threads):
        space, at, who = place(threads)
        space.check_read(at, width * count, who, machine.order, strong)
        if "nc" in instruction.modifiers and (bad := space.state[at] & WRITTEN != 0).any():
            where, offset, buffer = space.describe(at[bad][0])
            message = f"read of {where} through the cache for constants, though this kernel writes it"
            raise Race(message, buffer=buffer, offset=offset, indices=who[bad])
        if space is machine.memory:
            machine.report.count(instruction, space, at, width * count, who, written=False)
        data, first = space.data.view(UNSIGNED[width]), at // width
        for i, write in enumerate(writes):
            write(threads, data[first + i].view(dtype))
        if strong and space is machine.memory:
            _synchronise(instruction, machine, who, at, reads=True, writes=False)

    return execute


def _parameter(instruction, machine, writes, dtype):
    where = machine.registers.address(instruction.operands[1])(slice(0, 1))[0]
    values = np.frombuffer(machine.params, dtype, count=len(writes), offset=int(where))

    def execute(threads):
        for write, value in zip(writes, values, strict=True):
            write(threads, value)

    return execute


def _store(instruction, machine):
    kind, width, count = _shape(instruction)
    registers, strong = machine.registers, bool(STRONG & set(instruction.modifiers))
    reads = [registers.reader(text, kind) for text in registers.group(instruction.operands[1])]
    place = _place(instruction, machine, registers.address(instruction.operands[0]), width * count)

    def execute(threads):
        space, at, who = place(threads)
        if strong and space is machine.memory:
            _synchronise(instruction, machine, who, at, reads=False, writes=True)
        values = [read(threads).view(UNSIGNED[width]) for read in reads]
        space.check_write(at, width * count, who, machine.order, strong)
        if space is machine.memory:
            machine.report.count(instruction, space, at, width * count, who, written=True)
        data, first = space.data.view(UNSIGNED[width]), at // width
        for i, value in enumerate(values):
            data[first + i] = value

    return execute


def _atomic(instruction, machine):
    """atom and red, one thread after another in a random order, since any order is allowed."""
    *modifiers, kind = instruction.modifiers
    operation = next((m for m in modifiers if m in CHANGES), None)
    if {"v2", "v4", "v8"} & set(modifiers):
        raise Unsupported(instruction.opcode)
    change, width, dtype = CHANGES[operation], size_of(kind), dtype_of(kind)
    if operation == "add" and kind in floats.FLOATS:
        change = floats.plan("add", (kind,), 2).function
    target = int(instruction.name == "atom")
    sources = instruction.operands[target:]
    writes = [machine.registers.writer(text, kind) for text in instruction.operands[:target]]
    reads = [machine.registers.reader(text, kind) for text in sources[1:]]
    place = _place(instruction, machine, machine.registers.address(sources[0]), width)

    def execute(threads):
        space, at, who = place(threads)
        values = [np.broadcast_to(read(threads), at.shape) for read in reads]
        before = np.zeros(len(who), dtype)
        data = space.data.view(dtype)
        for i in machine.random.permutation(len(who)):
            one, thread = slice(at[i] // width, at[i] // width + 1), who[i : i + 1]
            space.check_read(at[i : i + 1], width, thread, machine.order, strong=True)
            if space is machine.memory:
                _synchronise(instruction, machine, thread, at[i : i + 1], reads=bool(writes), writes=True)
            space.check_write(at[i : i + 1], width, thread, machine.order, strong=True)
            before[i] = data[one][0]
            data[one] = change(data[one], *(value[i : i + 1] for value in values))
        if space is machine.memory:
            machine.report.count(instruction, space, at, width, who, written=True)
        for write in writes:
            write(threads, before)

    return execute


def _synchronise(instruction, machine, who, at, reads, writes):
    """Update the clocks for a strong access: release is a fence before it, acquire a fence after it."""
    if "cta" in instruction.modifiers:
        return
    for thread, address in zip(who, at, strict=True):
        warp = int(thread) // 32
        if writes and {"release", "acq_rel"} & set(instruction.modifiers):
            machine.order.fence(warp)
        machine.order.atomic(warp, int(address), reads, writes)
        if reads and {"acquire", "acq_rel"} & set(instruction.modifiers):
            machine.order.fence(warp)


def _fence(instruction, machine):
    """Only fences with GPU scope count: within a block, the clocks require barriers."""
    if {"cta", "proxy", "mbarrier_init"} & {m.split("::")[0] for m in instruction.modifiers}:
        return lambda threads: None

    def execute(threads):
        for warp in np.unique(indices(threads) // 32):
            machine.order.fence(int(warp))

    return execute


def _copy(instruction, machine):
    """cp.async: the bytes are pending, and must not be read, until the thread waits for their group."""
    modifiers, operands, copies = instruction.modifiers, instruction.operands, machine.copies
    if modifiers == ("async", "commit_group"):
        return lambda threads: copies.commit(threads)
    if modifiers == ("async", "wait_all"):
        return lambda threads: copies.wait(indices(threads), -1)
    if modifiers == ("async", "wait_group"):
        return lambda threads: copies.wait(indices(threads), int(operands[0], 0))
    if modifiers[0] != "async" or modifiers[1] not in ("ca", "cg"):
        raise Unsupported(instruction.opcode)
    registers, memory, shared = machine.registers, machine.memory, machine.shared
    size = int(operands[2], 0)
    if size not in (4, 8, 16):
        raise Unsupported(f"{instruction.opcode} of {size} bytes")
    to, source = registers.address(operands[0]), registers.address(operands[1])
    plain = 3 + any("cache_hint" in m for m in modifiers)
    count = registers.reader(operands[3], "u32") if len(operands) > plain else None  # bytes to read

    def execute(threads):
        who = indices(threads)
        into = shared.locate(to(threads), machine.owner["shared"][who], size, who)
        given = np.broadcast_to(count(threads) if count else size, who.shape)
        data = np.zeros((len(who), size), np.uint8)
        some = given > 0  # the others read nothing; zeros fill up to `size`
        start = memory.locate(source(threads)[some], None, size, who[some])
        for length in np.unique(given[some]):
            part, step = given[some] == length, int(length & -length)
            for offset in range(0, int(length), step):
                memory.check_read(start[part] + offset, step, who[some][part], machine.order)
        taken = memory.data[start[:, None] + np.arange(size)]
        data[some] = np.where(np.arange(size) < given[some][:, None], taken, 0)
        if some.any():
            machine.report.count(instruction, memory, start, size, who[some], written=False)
        shared.check_write(into, size, who, machine.order)
        copies.start(who, into[:, None] + np.arange(size), data)

    return execute


class Copies:
    """Pending asynchronous copies, and how many groups each thread has committed."""

    def __init__(self, machine, threads: int):
        self.machine, self.committed, self.open = machine, np.zeros(threads, np.int64), []

    def start(self, who, bytes_at, data):
        self.machine.shared.state[bytes_at] |= PENDING
        self.open.append((who, bytes_at, data, self.committed[who]))

    def commit(self, threads):
        self.committed[threads] += 1

    def wait(self, threads, but: int):
        """Finish each thread's groups except the last `but`; -1 finishes copies without a group, too."""
        shared, still = self.machine.shared, []
        for who, bytes_at, data, group in self.open:
            done = np.isin(who, threads) & (group < self.committed[who] - but)
            shared.data[bytes_at[done]] = data[done]
            shared.state[bytes_at[done]] &= ~np.uint8(PENDING | ATOMIC)
            shared.stamp[bytes_at[done]] = self.machine.order.stamps(who[done])[:, None]
            if not done.all():
                still.append((who[~done], bytes_at[~done], data[~done], group[~done]))
        self.open = still
