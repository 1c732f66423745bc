"""Runs a lesson's kernel in the interpreter and says in which line of Python a mistake of it is."""

import linecache
import re
from collections.abc import Callable

from ptx_interpreter import PTXError, Report
from rlcourse.kernels import dsl, toolchain

PLACE = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)\b")
FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', re.M)


def run(kernel, *tensors, **order) -> Report:
    """`toolchain.simulate`. Where the PTX knows the line of Python from which a mistake of a reader's kernel comes, the
    error names that line in place of the PTX's."""
    if type(kernel).__module__.startswith("rlcourse."):  # kept on disk, as it is
        return toolchain.simulate(kernel, *tensors, **order)
    with dsl.line_information():
        code = toolchain.compiled(kernel, "sm_86")
    try:
        return toolchain.simulate(kernel, *tensors, **order)
    except PTXError as error:
        name_line(error, code.ptx)
        raise


def name_line(error: PTXError, ptx: str, line_of: Callable[[str, int], str] = linecache.getline) -> None:
    """Let the error say the line of Python behind its line of PTX, if the PTX knows it."""
    files = dict(FILE.findall(ptx))
    for text in reversed(ptx.splitlines()[: error.line or 0]):
        place = PLACE.match(text)
        file = files.get(place[1], "") if place else ""
        source = line_of(file, int(place[2])).strip() if file and "cutlass" not in file else ""
        if source:
            error.message += f"\n  Python line {place[2]}: {source}"
            error.line = None
            return
