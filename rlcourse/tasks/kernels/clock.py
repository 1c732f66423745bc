"""The counted time of a program: what its launches, bytes and operations cost on a GPU. Time is counted, not measured,
so that it is the same on every machine and its minimum can be found by search. For memory-bound operations like these,
it depends on the passes over memory and the number of launches.

The least time is found by exhaustive search, which no GPU benchmark allows. The programs that compute every line once
are the orders of the lines times the cuts into launches. What is kept needs no search: a store only costs time, so a
program keeps everything that no later launch reads.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from rlcourse.tasks.kernels.language import CompileError, Computation, Launch, Line, Statement, compile_program, eager

ELEMENT_BYTES = 4  # float32


@dataclass(frozen=True)
class Card:
    """The cost of a launch, and the data sheet's rates for memory and float32."""

    name: str
    launch_us: float
    bytes_per_us: float
    operations_per_us: float
    rows: int = 1024  # of every matrix
    columns: int = 1024


# Launching from Python usually takes the host 5 us: an assumption, the same for both.
A10G = Card("A10G", launch_us=5.0, bytes_per_us=600e3, operations_per_us=31.2e6)
H200 = Card("H200", launch_us=5.0, bytes_per_us=4800e3, operations_per_us=67e6)


def launch_us(launch: Launch, card: Card = A10G) -> float:
    """Microseconds of one launch: its start, its loads and stores, and an operation per element."""

    def elements(name: str) -> int:
        return card.rows * (1 if name in launch.narrow else card.columns)

    moved = sum(map(elements, (*launch.loads, *launch.stores))) * ELEMENT_BYTES
    operations = sum(max(map(elements, (s.line.name, *s.line.args))) for s in launch.statements)
    return card.launch_us + moved / card.bytes_per_us + operations / card.operations_per_us


def program_us(launches: Iterable[Launch], card: Card = A10G, side_is_timed: bool = True) -> float:
    """Microseconds of all launches; without `side_is_timed`, of those on the main stream alone (a loophole)."""
    return sum(launch_us(launch, card) for launch in launches if side_is_timed or not launch.side)


@lru_cache(maxsize=100_000)
def eager_us(computation: Computation, card: Card = A10G) -> float:
    return program_us(compile_program(eager(computation), computation), card)


@lru_cache(maxsize=100_000)
def optimum(computation: Computation, card: Card = A10G) -> tuple[float, tuple[Statement, ...]]:
    """The least counted microseconds, and the first program found that takes them."""
    best = (eager_us(computation, card), tuple(eager(computation)))
    for order in orders(list(computation.lines)):
        for ends in product((False, True), repeat=len(order) - 1):
            program = kept_where_possible(order, (*ends, True))
            with suppress(CompileError):  # out of registers
                time = program_us(compile_program(program, computation), card)
                if time < best[0] - 1e-9:
                    best = time, tuple(program)
    return best


def orders(lines: list[Line]) -> Iterator[list[Line]]:
    """Every order of the lines in which operands come before they are read."""
    if not lines:
        yield []
    for line in lines:
        others = [other for other in lines if other is not line]
        if not any(other.name in line.args for other in others):
            yield from ([line, *rest] for rest in orders(others))


def kept_where_possible(order: list[Line], ends: tuple[bool, ...]) -> list[Statement]:
    """The program with these lines and launch ends, which puts y and what a later launch reads, and keeps the rest."""
    launch = [sum(ends[:i]) for i in range(len(order))]
    program = []
    for i, line in enumerate(order):
        later = any(line.name in order[j].args and launch[j] > launch[i] for j in range(i + 1, len(order)))
        program.append(Statement(line, ends=ends[i], keeps=not later and line.name != "y"))
    return program


def fits_one_launch(computation: Computation) -> bool:
    """Whether all lines, in the order they are written in, run in one launch without running out of registers."""
    lines = list(computation.lines)
    with suppress(CompileError):
        return bool(compile_program(kept_where_possible(lines, (False,) * len(lines)), computation))
    return False
