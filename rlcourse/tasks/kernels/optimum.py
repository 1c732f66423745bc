"""The least counted time of a computation, by exhaustive search, which no GPU benchmark allows. The programs that
compute every line once are the orders of the lines times the cuts into launches. What is kept needs no search: a store
only costs time, so a program keeps everything that no later launch reads."""

from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import product

from rlcourse.tasks.kernels.clock import A10G, Card, program_us
from rlcourse.tasks.kernels.language import CompileError, Computation, Line, Statement, compile_program, eager


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
    try:
        compile_program(kept_where_possible(list(computation.lines), (False,) * len(computation.lines)), computation)
    except CompileError:
        return False
    return True
