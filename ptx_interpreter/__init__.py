"""Runs the PTX of a CUDA kernel on a CPU, in NumPy, and finds its mistakes. How to use it, and its limits: README.md.

From text to a report: `parse` (text to instructions), `dataflow` (registers that may be read before they are written),
`registers`, `memory` (bytes and their state), `order` (races), `arithmetic` (with `integers`, `floats`, `conversions`,
`formats`), `access` (loads, stores, atomics, asynchronous copies), `warp` (shuffles, matrix products), `machine` (these
for one launch), `execute` (which threads run next), `report`. `__main__` is the command.
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
