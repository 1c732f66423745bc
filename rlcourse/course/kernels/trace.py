"""A reader's kernel as data: all that the interpreter needs of it. This runs beside the reader's code, in a notebook or
in the process that grades one; the tensors stay elsewhere, with `rlcourse.course.checks.kernels`."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rlcourse.course.calls import CELL, where
from rlcourse.kernels import dsl, toolchain

ARCHITECTURE = "sm_86"  # whose instructions the interpreter knows all of
COLOUR = re.compile(r"\x1b\[\d+m")
IN_CELL = re.compile(rf'(?:{CELL.pattern})[^"\n:]*"?:(\d+)')  # how the compiler names a line


def trace(make: Callable, *arguments, **options) -> tuple[Any, dict]:
    """The kernel that `make(*arguments, **options)` gives, and what is to be known of it. That is `owner`, the name of
    its class; `ptx`; `threads` of a block; `shared_bytes` that a block asks for at launch; `arguments`, for each the
    list [name, dtype, shape, free, align] (`rlcourse.kernels.arguments.Argument`). Raises NotImplementedError for a
    hole, AssertionError with a sentence for whatever else goes wrong."""
    with told():
        kernel = make(*arguments, **options)
        with dsl.line_information():
            code = toolchain.compiled(kernel, ARCHITECTURE)
        listed = [[a.name, a.dtype, list(a.shape), a.free, a.align] for a in kernel.arguments()]
        facts = {"owner": type(kernel).__name__, "ptx": code.ptx, "threads": kernel.threads}
        return kernel, facts | {"shared_bytes": code.shared_bytes, "arguments": listed}


def blocks(kernel, tensors: list) -> list[int]:
    """Blocks in x, y and z for tensors of these shapes and dtypes, [[shape, dtype]]; it gets to see no numbers."""
    with told():
        shaped = [torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for shape, dtype in tensors]
        return [int(size) for size in kernel.grid(*shaped)]


@contextmanager
def told() -> Iterator[None]:
    """Turn what goes wrong, but for a hole, into AssertionError with one line of text."""
    try:
        yield
    except NotImplementedError:
        raise
    except Exception as error:
        raise AssertionError(sentence(error)) from None


def sentence(error: Exception) -> str:
    """What an error of the reader's kernel or of the compiler says, and the line of the cell if it is known."""
    text = COLOUR.sub("", str(error))
    first = next((line for line in text.splitlines() if line.strip()), repr(error))
    line = IN_CELL.search(text)
    place = where(error) or (f" (line {line[1]} of the cell)" if line else "")
    return f"{type(error).__name__[:100]}: {first.strip()[:300]}{place}"
