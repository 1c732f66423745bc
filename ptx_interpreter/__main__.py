"""`ptx-interpreter FILE.ptx`: list what a kernel consists of or, with --grid, run it and report what it did."""

import argparse
import signal
import struct
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ptx_interpreter.errors import PTXError
from ptx_interpreter.execute import ORDERS, run
from ptx_interpreter.memory import Memory
from ptx_interpreter.parse import Entry, parse
from ptx_interpreter.report import Report


def main(words: Sequence[str] | None = None) -> None:
    if words is None and hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    options = parser().parse_intermixed_args(words)
    try:
        entries = parse(options.file.read_text())
        if options.grid is None:
            print("\n\n".join(map(summary, entries)))
            return
        entry, memory = choose(entries, options.kernel), Memory()
        params = pack(entry, options.arguments, memory)
        threads = options.threads or entry.threads or 32
        report = run(entry, options.grid, threads, params, memory, options.shared_bytes, options.order, options.seed)
    except (PTXError, OSError, ValueError, TypeError, OverflowError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(describe(report))
    for name in report.written:
        print(f"{name} = {memory.read(name)}")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser("ptx-interpreter", description=__doc__.replace("`", ""))
    found.add_argument("file", type=Path, help="PTX text")
    found.add_argument(
        "arguments",
        nargs="*",
        metavar="NAME=VALUE",
        help="one per parameter, in order: an array (x=x.npy), an array without values (y=float32:64,8), or a number",
    )
    found.add_argument("--kernel", help="name of the kernel, if the file has several")
    found.add_argument("--grid", type=sizes, help="blocks in x, y and z: 8 or 8,2,1")
    found.add_argument("--threads", type=sizes, help="threads per block (default: what the PTX requires, or 32)")
    found.add_argument("--shared-bytes", type=int, default=0, help="dynamic shared memory per block")
    found.add_argument("--order", choices=ORDERS, default="lockstep", help="how threads take turns")
    found.add_argument("--seed", type=int, default=0, help="for a random order")
    return found


def sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def choose(entries: list[Entry], name: str | None) -> Entry:
    found = [entry for entry in entries if name in (None, entry.name)]
    if len(found) != 1:
        raise ValueError(f"name one of these with --kernel: {', '.join(entry.name for entry in entries)}")
    return found[0]


def pack(entry: Entry, arguments: list[str], memory: Memory) -> bytes:
    """The bytes of a kernel's parameters, with its arrays placed in `memory`."""
    if len(arguments) != len(entry.params):
        raise ValueError(f"{entry.name} takes {len(entry.params)} arguments, not {len(arguments)}")
    packed = bytearray()
    for param, argument in zip(entry.params, arguments, strict=True):
        if param.size > 8:
            raise ValueError(f"{param.name} is a struct of {param.size} bytes: call run() from Python")
        packed = packed.ljust(param.offset, b"\0") + value_bytes(argument, param.size, memory)
    return bytes(packed)


def value_bytes(argument: str, size: int, memory: Memory) -> bytes:
    """A parameter's bytes: a number, or the address of an array, which is placed in `memory`."""
    name, _, value = argument.partition("=")
    if value.endswith(".npy"):
        number = memory.place(name, np.load(value))
    elif ":" in value:
        dtype, _, shape = value.partition(":")
        number = memory.place(name, np.zeros(sizes(shape), dtype), initialised=False)
    elif "." in value:
        return struct.pack({2: "<e", 4: "<f"}.get(size, "<d"), float(value))
    else:
        number = int(value, 0)
    return number.to_bytes(size, "little", signed=number < 0)


def summary(entry: Entry) -> str:
    """A kernel in a few lines; instructions are counted in the text, not as executed."""
    registers = ", ".join(f"{n} .{kind}" for kind, n in Counter(entry.registers.values()).items())
    lines = [
        f"entry {entry.name}: {len(entry.instructions)} instructions",
        f"  threads       {' × '.join(map(str, entry.threads)) if entry.threads else 'any number per block'}",
        f"  parameters    {', '.join(f'{p.size} B at {p.offset}' for p in entry.params) or 'none'}",
        f"  registers     {registers} (before allocation)",
        f"  shared        {entry.shared} B{', more at launch' if entry.dynamic else ''}",
        f"  local         {entry.local} B" + (" (slow: it is in global memory)" if entry.local else ""),
    ]
    opcodes = Counter(instruction.opcode for instruction in entry.instructions)
    return "\n".join(lines + [f"{count:8,}  {opcode}" for opcode, count in opcodes.most_common()])


def describe(report: Report) -> str:
    """A report in a few lines, with the instructions that warps executed most."""
    lines = [f"{report.total:,} warp instructions, {report.barriers} barriers, {report.sectors:,} sectors"]
    for verb, counts in (("read", report.read), ("wrote", report.written)):
        lines += [f"{verb} {count:,} bytes of {name}" for name, count in counts.items()]
    return "\n".join(lines + [f"{count:8,}  {opcode}" for opcode, count in report.instructions.most_common(10)])


if __name__ == "__main__":
    main()
