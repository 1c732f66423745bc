"""q1: programs that three careless judges count as faster than any honest one."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from rlcourse.course.checks import Question, draw
from rlcourse.tasks.kernels.clock import A10G, launch_us
from rlcourse.tasks.kernels.interpret import TEST_INPUTS, agrees, draw_inputs, execute, reference
from rlcourse.tasks.kernels.judge import case, judge_program
from rlcourse.tasks.kernels.language import REDUCTIONS, CompileError, Computation, Line, compile_program, parse
from rlcourse.tasks.kernels.optimum import kept_where_possible, optimum
from rlcourse.tasks.kernels.problems import computations

q1 = Question("q1", "cheat", hint="Begin with level 1. Of which values does memory hold a copy before you start?")

COPY_US = A10G.launch_us + 2 * 4 * A10G.rows * A10G.columns / A10G.bytes_per_us  # a matrix read and written
SEEN_COLUMNS = 1  # of the inputs of level 3


def counted_us(text: str, computation: Computation, level: int) -> float:
    """Microseconds that the judge of a level counts for a program. Raises AssertionError for one that it refuses."""
    try:
        program = parse(text)
        launches = compile_program(program, computation, stale=level == 1)
    except CompileError as error:
        raise AssertionError(f"the judge refuses it: {error}") from None
    for inputs, values in trials(computation, level):
        memory = inputs
        if level == 1:
            with np.errstate(over="ignore"):
                memory = {name: value.astype(np.float32) for name, value in values.items()} | inputs
            memory["y"] = np.full_like(memory["y"], np.nan)
        if not agrees(execute(program, memory)["y"], values["y"]):
            raise AssertionError("the judge says: y is wrong")
    us = sum(launch_us(launch) for launch in launches if not (level == 2 and launch.side))
    if us < COPY_US - 1e-9:
        raise AssertionError(f"the judge does not believe {us:.1f} µs: to copy a matrix takes {COPY_US:.1f}")
    return us


def trials(computation: Computation, level: int) -> list[tuple[dict, dict]]:
    """Inputs that a level tries a program on, with the values that it should have."""
    if level < 3:
        return [case(computation, *tried) for tried in TEST_INPUTS]
    found = []
    for seed in range(3):
        inputs = {name: np.abs(x) + 0.01 for name, x in draw_inputs(computation, seed, SEEN_COLUMNS).items()}
        found.append((inputs, reference(computation, inputs)))
    return found


def left_out(computation: Computation) -> list[Line]:
    """The lines that matter on positive inputs of one column."""
    alias: dict[str, str] = {}
    lines = []
    for line in computation.lines:
        args = tuple(alias.get(arg, arg) for arg in line.args)
        idle = line.op in REDUCTIONS or (line.op in ("relu", "abs") and args[0] in computation.inputs)
        if idle and line.name != "y":
            alias[line.name] = args[0]
        else:
            lines.append(Line(line.name, line.op, args))
    return lines


def known_cheat(computation: Computation, level: int) -> str:
    """A cheat, from which the computations that can be cheated are found."""
    *before, last = computation.lines
    if level == 3:
        lines = left_out(computation)
        return " ".join(map(str, kept_where_possible(lines, (False,) * (len(lines) - 1) + (True,))))
    aside = "".join(f"side {line} end put ; " for line in before) if level == 2 else ""
    return f"{aside}{last} end put ;"


def succeeds(text: str, computation: Computation, level: int) -> str:
    """Why a program is no cheat of the level, "" for one."""
    try:
        us = counted_us(text, computation, level)
    except AssertionError as refused:
        return str(refused)
    least = optimum(computation)[0]
    if us > least - 1e-9:
        return f"counted {us:.1f} µs, and an honest program takes {least:.1f}: no cheat yet"
    honest = judge_program(text, computation)
    if honest.correct and honest.speedup > optimum_speedup(computation):
        return "that is honest"
    return ""


def optimum_speedup(computation: Computation) -> float:
    return judge_program(" ".join(map(str, optimum(computation)[1])), computation).speedup * (1 + 1e-6)


def victims(level: int, count: int, wanted: Callable[[Computation], bool] = lambda _: True) -> list[Computation]:
    """Computations that the level's judge can be cheated on, drawn."""
    found: list[Computation] = []
    while len(found) < count:
        found += [c for c in that_can_be_cheated(level, draw(0, 10**9)) if wanted(c)]
    return found[:count]


@lru_cache(100)
def that_can_be_cheated(level: int, seed: int) -> list[Computation]:
    """Some of a dozen computations."""
    some = computations(12, "train", seed, (3, 5))
    return [c for c in some if succeeds(known_cheat(c, level), c, level) == ""]


def check_cheat(f, level: int, **options) -> None:
    for computation in victims(level, 3, **options):
        lines = [[line.name, line.op, *line.args] for line in computation.lines]
        text = f(lines, level)
        if not isinstance(text, str):
            raise AssertionError(f"the program should be a text, not {type(text).__name__}")
        why = succeeds(text, computation, level)
        assert not why, f"{computation}: {why}"


@q1.case("level 1: memory is not cleared, but for y")
def _(f):
    check_cheat(f, 1)


@q1.case("level 2: the side stream is not timed, and nobody is faster than a copy")
def _(f):
    check_cheat(f, 2)


@q1.case("level 3: positive inputs of one column, where a reduction says nothing")
def _(f):
    check_cheat(f, 3, wanted=lambda c: any(line.op in REDUCTIONS for line in c.lines))


@q1.case("level 3: positive inputs of one column, where a sign says nothing")
def _(f):
    check_cheat(f, 3, wanted=lambda c: any(line.op in ("relu", "abs") for line in c.lines))
