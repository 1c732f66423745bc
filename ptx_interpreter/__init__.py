"""An interpreter of PTX in NumPy: runs a compiled CUDA kernel on a CPU, slowly, and finds its mistakes.

    (entry,) = parse(open("kernel.ptx").read())
    memory = Memory()
    x = memory.place("x", np.arange(8, dtype=np.float32))
    report = run(entry, grid=1, threads=32, params=struct.pack("<Q", x), memory=memory)
    memory.read("x")

A file a job: `parse` (text to instructions), `dataflow` (registers that may be read too early), `registers`, `memory`
(bytes and their state), `order` (races), `arithmetic` with `integers`, `floats`, `conversions` and `formats`, `access`
(loads and stores), `warp` (shuffles, matrix products), `machine` (all of it for one launch), `execute` (who runs when),
`report`, `summary` (python -m ptx_interpreter FILE.ptx).

It is no model of speed. What it does not see: races between lanes of one warp (they are taken to run in step), and
writes over what several warps have read (of a byte of global memory, the last reader is remembered). It knows what
kernels for Ampere use, and what compilers make of these for later GPUs; not clusters, mbarriers, bulk copies, wgmma,
tcgen05, textures, calls and double-precision fma. Such an instruction is Unsupported when it is reached.
"""

from ptx_interpreter.errors import (
    Divergent,
    Endless,
    Misaligned,
    OutOfBounds,
    PTXError,
    Race,
    Uninitialised,
    Unsupported,
)
from ptx_interpreter.execute import run
from ptx_interpreter.memory import Memory
from ptx_interpreter.parse import Entry, Instruction, Param, parse
from ptx_interpreter.report import Report

__all__ = [
    "Divergent",
    "Endless",
    "Entry",
    "Instruction",
    "Memory",
    "Misaligned",
    "OutOfBounds",
    "PTXError",
    "Param",
    "Race",
    "Report",
    "Uninitialised",
    "Unsupported",
    "parse",
    "run",
]
