"""Instructions that compute registers from registers, thread by thread."""

import numpy as np

from ptx_interpreter import conversions, floats, integers
from ptx_interpreter.errors import Unsupported
from ptx_interpreter.floats import FLOATS, Plan
from ptx_interpreter.formats import decode, flush
from ptx_interpreter.parse import Instruction, size_of
from ptx_interpreter.registers import Registers

COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}
BOOLEAN = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def build(instruction: Instruction, registers: Registers):
    """The function of `threads` that executes an instruction. Raises Unsupported."""
    if instruction.name in ("mov", "cvta"):  # spaces don't overlap, so an address is the same in each
        return _move(instruction, registers)
    if instruction.name == "setp":
        return _compare(instruction, registers)
    return _connect(_plan(instruction), instruction, registers)


def _plan(instruction: Instruction) -> Plan:
    name, modifiers, count = instruction.name, instruction.modifiers, len(instruction.operands) - 1
    kind = modifiers[-1] if modifiers else ""
    if name == "selp":
        return Plan(lambda a, b, chosen: np.where(chosen, a, b), (kind, kind, "pred"), kind)
    if name == "cvt":
        return conversions.plan(modifiers, count)
    if kind in FLOATS and name in floats.NATIVE:
        return floats.plan(name, modifiers, count)
    if kind and kind[0] in "subp":
        return integers.plan(name, modifiers, count)
    raise Unsupported(instruction.opcode)


def _connect(plan: Plan, instruction: Instruction, registers: Registers):
    """A function of `threads` that reads the operands, computes and writes the result."""
    function, write = plan.function, registers.writer(instruction.operands[0], plan.destination)
    reads = [registers.reader(text, kind) for text, kind in zip(instruction.operands[1:], plan.sources, strict=True)]
    return lambda threads: write(threads, function(*[read(threads) for read in reads]))


def _move(instruction, registers):
    """A copy, or registers packed into one or unpacked: mov.b32 {%rs1, %rs2}, %r1."""
    kind = instruction.modifiers[-1]
    left, right = (registers.group(text) for text in instruction.operands)
    if len(left) == len(right) == 1:
        return _connect(Plan(lambda x: x, (kind,), kind), instruction, registers)
    part = f"b{8 * size_of(kind) // max(len(left), len(right))}"
    if len(left) == 1:
        write, reads = registers.writer(left[0], kind), [registers.reader(text, part) for text in right]

        def pack(threads):
            parts = np.stack(np.broadcast_arrays(*(read(threads) for read in reads)), -1)
            write(threads, parts.view(f"uint{8 * size_of(kind)}")[..., 0])

        return pack
    read, writes = registers.reader(right[0], kind), [registers.writer(text, part) for text in left]

    def unpack(threads):
        parts = np.ascontiguousarray(read(threads))[..., None].view(f"uint{8 * size_of(part)}")
        for i, write in enumerate(writes):
            write(threads, parts[..., i])

    return unpack


def _comparison(name: str, kind: str, flushed: bool):
    """A comparison of raw operands. Those that end in u hold for NaNs too."""
    function = COMPARE.get(name)
    if function is None and name.endswith("u") and name[:-1] in COMPARE:
        ordered = COMPARE[name[:-1]]
        function = lambda a, b: ordered(a, b) | np.isnan(a) | np.isnan(b)  # noqa: E731
    elif name == "ne" and kind in FLOATS:
        function = lambda a, b: (a != b) & ~(np.isnan(a) | np.isnan(b))  # noqa: E731
    if function is None:
        raise Unsupported(f"the comparison .{name}")
    if flushed:
        return lambda a, b: function(flush(a), flush(b))
    if kind in ("bf16", "f16"):
        return lambda a, b: function(decode(a, kind), decode(b, kind))
    return function


def _compare(instruction, registers):
    """setp.lt.s32 p, a, b; setp.lt.and.s32 p, a, b, c; p|q also writes the opposite."""
    name, *others, kind = instruction.modifiers
    compare = _comparison(name, kind, "ftz" in others)
    combine = next((BOOLEAN[other] for other in others if other in BOOLEAN), None)
    targets = [registers.writer(text.strip(), "pred") for text in instruction.operands[0].split("|")]
    a, b = (registers.reader(text, kind) for text in instruction.operands[1:3])
    c = registers.reader(instruction.operands[3], "pred") if combine else None

    def execute(threads):
        holds = compare(a(threads), b(threads))
        results = [holds, ~holds][: len(targets)]
        for write, result in zip(targets, results, strict=True):
            write(threads, combine(result, c(threads)) if combine else result)

    return execute
