"""Checks of kernels: a reader's kernel arrives as data, from this process or from that of the grader, and its PTX runs
in the interpreter on tensors that the reader's code never sees. The PTX of somebody else's process may be any text, so
sizes have limits, and whatever goes wrong is the kernel's fault."""

import linecache
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import ptx_interpreter as ptx
from rlcourse.course.checks import Local, Question, compare, received
from rlcourse.course.kernels import interpret, trace
from rlcourse.kernels import arguments, toolchain
from rlcourse.kernels.arguments import Argument

MEANING = {
    ptx.OutOfBounds: "A thread went beyond a tensor: what is not there must not be touched.",
    ptx.Misaligned: "An access begins at an address that its size does not divide.",
    ptx.Uninitialised: "Something was read that nobody had written.",
    ptx.Divergent: "Threads wait for others that never come: all must reach a barrier or a shuffle.",
    ptx.Endless: "The kernel does not end.",
    ptx.Unsupported: "The interpreter does not know what this kernel uses.",
}
# An exercise needs a fraction of each of these; more would take the grader's own memory and time.
MOST_PTX = 100_000  # characters
MOST_THREADS = 1 << 15  # of all blocks
MOST_SHARED = 101_376  # bytes of a block, as the architecture has them
MOST_PARAMETERS = 4096  # bytes, as on a GPU
MOST_REGISTERS = 20_000  # of a thread
MOST_BYTES = 1 << 29  # of the interpreter, for a run
MOST_STEPS = 100_000
SECONDS = 20  # for a case: a kernel compiles in a fraction of one


@dataclass(frozen=True)
class Traced:
    """A reader's kernel: its PTX, and what a launch of it must know. owner: the name of its class; blocks: a function
    of [[shape, dtype]] to the blocks in x, y and z; line: of file and number to a line of the reader's text; launch: of
    GPU tensors, runs it, None where there is none."""

    owner: str
    ptx: str
    threads: int
    shared_bytes: int
    listed: tuple[Argument, ...]
    blocks: Callable[[list], list[int]]
    line: Callable[[str, int], str]
    launch: Callable | None = None

    def arguments(self) -> tuple[Argument, ...]:
        return self.listed

    def run(self, tensors: dict[str, Tensor], order: str = "lockstep", seed: int = 0) -> ptx.Report:
        """Run the kernel in the interpreter on CPU tensors, by name; it changes the last one in place, and no other.
        Raises PTXError for its mistakes, with the line of Python where it's known, AssertionError where it cannot run
        on these tensors."""
        try:
            given, names = tuple(tensors.values()), [argument.name for argument in self.listed]
            if names != list(tensors):
                raise AssertionError(f"arguments() must list {', '.join(tensors)} and lists {', '.join(names)}.")
            listed = tuple(replace(a, output=a is self.listed[-1]) for a in self.listed)
            arguments.check(self, given, "cpu")
            entries = ptx.parse(self.ptx)
            if len(entries) != 1:
                raise AssertionError(f"One kernel is to be launched, and there are {len(entries)}.")
            grid = self.blocks([[list(tensor.shape), arguments.type_name(tensor)] for tensor in given])
            check_size(entries[0], grid, self.threads, self.shared_bytes)
            launch = entries[0], tuple(grid), self.threads, self.shared_bytes
            report = arguments.interpret(*launch, listed, given, order=order, seed=seed, limit=MOST_STEPS)
        except ptx.PTXError as error:
            interpret.name_line(error, self.ptx, self.line)
            raise
        except (AssertionError, NotImplementedError):
            raise
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {str(error)[:300]}") from None
        *inputs, output = tensors
        for name in inputs:
            assert name not in report.written, f"Your kernel writes to {name}: only {output} is to be written."
        return report


def read_facts(facts, blocks: Callable, line: Callable[[str, int], str], launch: Callable | None = None) -> Traced:
    """Raises AssertionError if `trace` says no such facts."""
    match facts:
        case {"owner": str(owner), "ptx": str(text), "threads": int(threads), "shared_bytes": int(shared),
              "arguments": [*listed]}:  # fmt: skip
            if len(text) > MOST_PTX:
                raise AssertionError(f"The kernel compiles to {len(text):,} characters: is a long loop unrolled?")
            return Traced(owner, text, threads, shared, tuple(map(read_argument, listed)), blocks, line, launch)
    raise AssertionError("the kernel could not be read")


def read_argument(facts) -> Argument:
    match facts:
        case [str(name), str(dtype), [*shape], int(free), int(align)] if dtype in arguments.NAMES and align > 0:
            if 0 <= free <= len(shape) <= 5 and all(isinstance(size, int | str) for size in shape):
                return Argument(name, dtype, tuple(shape), free, align)
    raise AssertionError("arguments() must be a tuple of `Argument`")


def check_size(entry: ptx.Entry, grid, threads: int, dynamic: int) -> None:
    """Raise AssertionError for a launch that is larger than an exercise needs."""
    if not (isinstance(grid, list) and 1 <= len(grid) <= 3 and all(type(n) is int and n > 0 for n in grid)):
        raise AssertionError(f"grid() must give one to three numbers above 0, and gives {str(grid)[:100]}.")
    count = math.prod(grid) * threads
    if not 0 < threads <= 1024 or count > MOST_THREADS:
        raise AssertionError(f"{grid} blocks of {threads} threads are too many: {MOST_THREADS:,} threads at most.")
    align = max(entry.dynamic.values(), default=1)
    shared = -(-entry.shared // align) * align + dynamic
    if not 0 <= dynamic <= shared <= MOST_SHARED:
        raise AssertionError(f"A block asks for {shared:,} bytes of shared memory and can have {MOST_SHARED:,}.")
    of_thread = 8 * len(entry.registers) + 16 * entry.local  # bytes of memory hold their state as well
    of_block = shared * (16 + 16 * threads // 32)
    if count * of_thread + math.prod(grid) * of_block > MOST_BYTES or len(entry.registers) > MOST_REGISTERS:
        raise AssertionError(f"The kernel has {len(entry.registers):,} registers and {entry.local:,} bytes a thread.")
    if max((p.offset + p.size for p in entry.params), default=0) > MOST_PARAMETERS:
        raise AssertionError("The kernel takes too many parameters.")


class Maker(Local):
    """A reader's class of kernels, or a function that makes one, in this process."""

    kernels = True

    def __call__(self, *options, **named) -> Traced:
        kernel, facts = trace.trace(self.function, *options, **named)
        return read_facts(
            received(facts), lambda tensors: received(trace.blocks(kernel, tensors)), linecache.getline,
            lambda *tensors: toolchain.compiled(kernel)(*tensors),
        )  # fmt: skip


def meaning(error: ptx.PTXError) -> str:
    if isinstance(error, ptx.Race) and "shared" in error.message:
        return "Two warps use the same shared memory and no barrier stands between: before the reads, or after them."
    return MEANING.get(type(error), "Two warps use the same bytes, at least one writes, and nothing says who is first.")


def kernel_question(name: str, function: str, hint: str) -> Question:
    return Question(name, function, hint, seconds=SECONDS, caller=Maker)


def check_kernel(
    f, inputs: dict[str, Tensor], expected: Tensor, mistakes: dict[str, Tensor], size: str = "", output: str = "out",
    atol: float = 1e-5, nan: str = "are nan", **order,
) -> ptx.Report:  # fmt: skip
    """Run the kernel that `f()` gives on CPU tensors, by name, and compare what it writes, `output`, with what that
    should be. Where there is a GPU it runs there too, and both must agree. nan: what is said of nan in it."""
    out = torch.full(expected.shape, torch.nan, dtype=next(iter(inputs.values())).dtype)
    kernel, given = f(), [tensor.clone() for tensor in (*inputs.values(), out)]
    try:
        report = kernel.run(inputs | {output: out}, **order)
    except ptx.PTXError as error:
        raise AssertionError(f"{meaning(error)} ({error})") from None
    if torch.cuda.is_available() and kernel.launch:  # the interpreter found no mistake: nothing can be harmed there
        there = [tensor.cuda() for tensor in given]
        kernel.launch(*there)
        compare(there[-1].float(), out.float(), what="the GPU's result, beside the interpreter's,", atol=1e-4)
    what = f"{output} for {size}" if size else output
    # The interpreter leaves all bits set where nothing is written, which is nan.
    left = int((out.view({2: torch.int16, 4: torch.int32}[out.element_size()]) == -1).sum())
    assert not left, f"{left} of {out.numel()} elements of {what} were never written"
    assert not out.isnan().any(), f"{int(out.isnan().sum())} of {out.numel()} elements of {what} {nan}"
    infinite = f"{what} has infinite values: is it where a thread begins, or a number that grew too large?"
    named = {said: wrong.float() for said, wrong in mistakes.items()}
    compare(out.float(), expected.float(), named, what, atol, not_finite=infinite)
    return report


def loads(report: ptx.Report) -> int:
    """Of global memory, each counted once for every warp that executes it."""
    return sum(access.warps for access in report.accesses.values() if access.text.startswith("ld"))
