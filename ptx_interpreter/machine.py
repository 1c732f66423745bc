"""The state of one launch: memories, registers, clocks, and a function for each instruction."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ptx_interpreter import access, arithmetic, warp
from ptx_interpreter.errors import PTXError, Unsupported
from ptx_interpreter.memory import Memory, private
from ptx_interpreter.order import Order
from ptx_interpreter.parse import Entry, Instruction
from ptx_interpreter.registers import Registers, indices
from ptx_interpreter.report import Report

SHARED, LOCAL = 0x400, 0x4000_0000  # first addresses; a null pointer is below both
JUMPS = {"bra", "ret", "exit", "trap"}


@dataclass
class Step:
    """An instruction as functions of `threads`: `execute` runs it, `predicate` says for which of them.

    kind: "plain", "jump", "barrier" (for a block) or "together" (for the lanes in `mask(threads)`).
    """

    instruction: Instruction
    kind: str
    execute: Callable
    predicate: Callable | None
    mask: Callable | None


class Machine:
    """grid, block: (x, y, z). Threads are numbered over the whole grid, block by block."""

    def __init__(self, entry: Entry, grid, block, params: bytes, memory: Memory, dynamic: int, seed: int):
        self.entry, self.grid, self.params, self.memory = entry, grid, params, memory
        self.blocks, self.block_size = int(np.prod(grid)), int(np.prod(block))
        count = self.blocks * self.block_size
        self.report, self.random = Report(), np.random.default_rng(seed)
        self.order = Order(self.blocks, self.block_size // 32)
        align = max(entry.dynamic.values(), default=1)
        static = -(-entry.shared // align) * align
        self.shared = private("shared", SHARED, static + dynamic, self.blocks)
        self.shared.readers = self.block_size // 32
        local = private("local", LOCAL, entry.local, count if entry.local else 0)
        self.spaces = {"global": memory, "shared": self.shared, "local": local}
        thread = np.arange(count)
        self.owner = {"global": np.zeros(count, np.int8), "shared": thread // self.block_size, "local": thread}
        self.copies = access.Copies(self, count)
        symbols = {param.name: param.offset for param in entry.params}
        symbols |= {v.name: SHARED + v.offset for v in entry.variables["shared"]}
        symbols |= {v.name: LOCAL + v.offset for v in entry.variables["local"]}
        symbols |= dict.fromkeys(entry.dynamic, SHARED + static)
        self.registers = Registers(entry, count, self._special(block, static + dynamic), symbols)
        memory.begin()
        self.steps = [self._step(instruction) for instruction in entry.instructions]

    def space_of(self, addresses: np.ndarray):
        """The space of generic addresses."""
        first = np.array([SHARED, LOCAL, self.memory.base])
        found = np.unique(np.searchsorted(first, addresses, "right"))
        if len(found) > 1:
            raise Unsupported("generic addresses in several spaces at once")
        return (self.shared, self.shared, self.spaces["local"], self.memory)[found[0]]

    def place(self, error: PTXError, instruction: Instruction):
        """Record in an error where it happened."""
        error.instruction, error.line = instruction.text, instruction.line
        who = np.unique(np.asarray(error.indices, np.int64))
        if len(who):
            block = int(who[0]) // self.block_size
            error.block = tuple(int(i) for i in self._block_index(block))
            error.threads = [int(t) % self.block_size for t in who if t // self.block_size == block]

    def _step(self, instruction: Instruction) -> Step:
        registers = self.registers
        predicate, mask = None, None
        if instruction.predicate:
            predicate = registers.reader("!" * instruction.negated + instruction.predicate, "pred")
        kind = "plain"
        if instruction.name in JUMPS:
            kind = "jump"
        elif warp.is_together(instruction):
            kind, mask = "together", warp.mask_of(instruction, registers)
        elif instruction.name in ("bar", "barrier"):
            kind = "barrier"
        return Step(instruction, kind, self._function(instruction, kind), predicate, mask)

    def _function(self, instruction: Instruction, kind: str) -> Callable:
        """The function that executes an instruction; for an unknown one, a function that raises Unsupported."""
        try:
            if kind == "barrier":
                return self._barrier(instruction)
            if kind == "together":
                return warp.build(instruction, self)
            if kind == "jump":
                return None
            return access.build(instruction, self) or arithmetic.build(instruction, self.registers)
        except (Unsupported, KeyError, IndexError, ValueError, TypeError) as problem:
            what = f"{problem.message}: " if isinstance(problem, Unsupported) else ""
            message, cause = f"{what}this form of {instruction.name} is not known to the interpreter", problem

            def refuse(threads):
                raise Unsupported(message, indices=indices(threads)) from cause

            return refuse

    def _barrier(self, instruction: Instruction) -> Callable:
        """bar.sync and barrier.sync: returns the barrier's number and how many threads it waits for."""
        words = [m for m in instruction.modifiers if m not in ("cta", "aligned")]
        if words != ["sync"]:
            raise Unsupported(instruction.opcode)
        reads = [self.registers.reader(text, "u32") for text in instruction.operands]
        size = np.array([self.block_size])
        return lambda threads: (reads[0](threads), reads[1](threads) if len(reads) > 1 else size)

    def _block_index(self, number):
        x, y, _ = self.grid
        return number % x, number // x % y, number // (x * y)

    def _special(self, block, shared_bytes: int) -> dict[str, np.ndarray]:
        """The special registers, as uint32. Clocks read 0."""
        thread = np.arange(self.blocks * self.block_size)
        inside, number, lane = thread % self.block_size, thread // self.block_size, thread % 32
        places = {
            "%tid": (inside % block[0], inside // block[0] % block[1], inside // (block[0] * block[1])),
            "%ctaid": self._block_index(number),
            "%ntid": block,
            "%nctaid": self.grid,
        }
        bit = 1 << lane
        values = {f"{name}.{axis}": v for name, triple in places.items() for axis, v in zip("xyz", triple, strict=True)}
        values |= {"%laneid": lane, "%warpid": inside // 32, "%nwarpid": self.block_size // 32, "WARP_SZ": 32}
        values |= {"%lanemask_lt": bit - 1, "%lanemask_le": 2 * bit - 1, "%lanemask_eq": bit}
        values |= {"%lanemask_gt": -2 * bit, "%lanemask_ge": -bit}
        values |= {"%smid": number, "%nsmid": self.blocks, "%dynamic_smem_size": shared_bytes}
        values |= dict.fromkeys(("%gridid", "%clock", "%clock64", "%globaltimer"), 0)
        return {name: np.broadcast_to(v, thread.shape).astype(np.uint32) for name, v in values.items()}
