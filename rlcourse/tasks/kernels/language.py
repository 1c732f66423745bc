"""The tile language: what a computation is, what a program for it may say, and what the compiler refuses.

The policy is asked for a computation, lines as in PyTorch: `a = add u v ; y = relu a`. A program has the same lines and
says how they run. Each statement is

    [side] NAME = OP ARGS [end] KIND ;

    side  at the first statement of a launch: the launch goes to another stream
    end   the launch ends with this statement; without it the next statement runs in the same launch
    put   the value is written to memory
    keep  it stays in a register, and is gone when the launch ends

Eager PyTorch launches a kernel per line and puts every value in memory:

    a = add u v end put ; y = relu a end put ;

Each omitted `end` and each `keep` saves time, and each is one token.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.maximum, "min": np.minimum}
UNARY = {
    "relu": lambda v: np.maximum(v, 0),
    "neg": np.negative,
    "abs": np.abs,
    "square": np.square,
    "exp": np.exp,
    "sigmoid": lambda v: 1 / (1 + np.exp(-v)),
    "sqrt": np.sqrt,
}
REDUCTIONS = {"rowsum": lambda v: v.sum(1, keepdims=True), "rowmax": lambda v: v.max(1, keepdims=True)}
OPERATIONS = BINARY | UNARY | REDUCTIONS
ARITY = {op: 2 if op in BINARY else 1 for op in OPERATIONS}

INPUTS = ("u", "v", "w", "x")
LETTERS = ("a", "b", "c", "d", "e", "f")  # results but the last, which is y
NAMES = (*INPUTS, *LETTERS, "y")
WORDS = (*NAMES, *OPERATIONS, "=", ";", "=>", "end", "put", "keep", "side")

REGISTERS = 2  # matrices whose rows a launch can hold at once; one number per row costs nothing


class CompileError(ValueError):
    """Why a program or a computation is refused, in one sentence."""


@dataclass(frozen=True)
class Line:
    """name = op(args)."""

    name: str
    op: str
    args: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} = {self.op} {' '.join(self.args)}"


@dataclass(frozen=True)
class Computation:
    """Lines in the order they are written in, the last one called y. Inputs are float32 matrices of one shape."""

    lines: tuple[Line, ...]

    def __str__(self) -> str:
        return " ; ".join(map(str, self.lines))

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        return tuple(x for x in INPUTS if any(x in line.args for line in self.lines))

    @cached_property
    def narrow(self) -> frozenset[str]:
        """The values that are [rows, 1]."""
        narrow: set[str] = set()
        for line in self.lines:
            update_narrow(narrow, line)
        return frozenset(narrow)


@dataclass(frozen=True)
class Statement:
    """A line and how it runs."""

    line: Line
    ends: bool = True
    keeps: bool = False
    side: bool = False

    def __str__(self) -> str:
        words = ["side"] * self.side + [str(self.line)] + ["end"] * self.ends + ["keep" if self.keeps else "put", ";"]
        return " ".join(words)


@dataclass(frozen=True)
class Launch:
    """Statements that run together, and the values that they load, in the order of their first use."""

    statements: tuple[Statement, ...]
    loads: tuple[str, ...]
    narrow: frozenset[str]  # values with one number per row

    @property
    def stores(self) -> tuple[str, ...]:
        return tuple(s.line.name for s in self.statements if not s.keeps)

    @property
    def side(self) -> bool:
        return self.statements[0].side


def read_computation(text: str) -> Computation:
    """The computation that `str` wrote as this text. Raises CompileError for another text."""
    lines: list[Line] = []
    for part in text.split(" ; "):
        line, rest = parse_line(part.split())
        known = {*INPUTS, *(line.name for line in lines)}
        if rest or line.name in known:
            raise CompileError(f"{part!r} is not of the form NAME = OP ARGS with a new name")
        if not known.issuperset(line.args):
            raise CompileError(f"{part!r} reads what is not computed yet")
        lines.append(line)
    if lines[-1].name != "y":
        raise CompileError("the last line does not compute y")
    return Computation(tuple(lines))


def parse(text: str) -> list[Statement]:
    """The statements of a program. Raises CompileError for any other text."""
    *parts, rest = text.split(";")
    if rest.strip() or not parts:
        raise CompileError(f"a statement does not end in ';': {rest.strip() or 'nothing is written'}")
    return [parse_statement(part.split()) for part in parts]


def parse_statement(words: list[str]) -> Statement:
    side = words[:1] == ["side"]
    line, how = parse_line(words[side:])
    ends = how[:1] == ["end"]
    if how[ends:] not in (["put"], ["keep"]):
        raise CompileError(f"after the operands come 'end' or nothing, then 'put' or 'keep': {' '.join(words)}")
    return Statement(line, ends, how[-1] == "keep", side)


def parse_line(words: list[str]) -> tuple[Line, list[str]]:
    """The line that the words begin with, and the words after it."""
    shown, (name, equals, op) = " ".join(words), [*words, "", "", ""][:3]
    if name not in NAMES or equals != "=":
        raise CompileError(f"a statement begins with NAME = , not: {shown}")
    if op not in OPERATIONS:
        raise CompileError(f"there is no such operation: {shown}")
    args = tuple(words[3 : 3 + ARITY[op]])
    if len(args) < ARITY[op] or not set(args) <= set(NAMES):
        raise CompileError(f"{op} takes {ARITY[op]} operand{'s' * (ARITY[op] > 1)}: {shown}")
    return Line(name, op, args), words[3 + ARITY[op] :]


def write(program) -> str:
    """The text of a program, which `parse` reads."""
    return " ".join(map(str, program))


def eager(computation: Computation) -> list[Statement]:
    """A launch per line and every value put, like PyTorch without a compiler."""
    return [Statement(line) for line in computation.lines]


def compile_program(program: list[Statement], computation: Computation, stale: bool = False) -> list[Launch]:
    """The program's launches. Refused, with the reason in a CompileError, are: a name that is not a value of the
    computation, or is computed twice; an operand that is neither in memory nor in a register; more tensors at once than
    the registers hold; `side` inside a launch; a y that is not put. stale: memory holds every value already (a
    loophole)."""
    values = {line.name for line in computation.lines}
    memory = set(computation.inputs) | (values if stale else set())
    narrow = set(computation.narrow)  # as stale memory has them; then by what the program computes under the name
    computed: set[str] = set()
    launches = []
    for statements in split_launches(program):
        for name in (statement.line.name for statement in statements):
            if name not in values:
                raise CompileError(f"{name} is not a value of the computation")
            if name in computed:
                raise CompileError(f"{name} is computed twice")
            computed.add(name)
        launch = compile_launch(statements, memory, narrow)
        memory.update(launch.stores)
        launches.append(launch)
    if not any("y" in launch.stores for launch in launches):
        raise CompileError("y is never put")
    return launches


def split_launches(program: list[Statement]) -> list[tuple[Statement, ...]]:
    """The statements of each launch. The last one ends with the program, with or without `end`."""
    groups: list[list[Statement]] = [[]]
    for statement in program:
        groups[-1].append(statement)
        if statement.ends:
            groups.append([])
    return [tuple(group) for group in groups if group]


def compile_launch(statements: tuple[Statement, ...], memory: set[str], narrow: set[str]) -> Launch:
    """What the launch loads, checked against memory and registers; `narrow` is brought up to date. A value is held up
    to the last statement that reads it, whose result may take its place."""
    last_read = {name: i for i, statement in enumerate(statements) for name in statement.line.args}
    loads, held = [], set()
    for i, statement in enumerate(statements):
        if statement.side and i:
            raise CompileError("'side' stands inside a launch")
        line = statement.line
        for name in dict.fromkeys(line.args):
            if name not in held and name not in memory:
                raise CompileError(f"{name} is neither in memory nor in a register")
            if name not in held:
                loads.append(name)
        held.update(line.args)
        too_many = len(held - narrow) > REGISTERS
        update_narrow(narrow, line)
        held = {name for name in held if last_read[name] > i}
        if too_many or len((held | {line.name}) - narrow) > REGISTERS:
            raise CompileError(f"out of registers at {line.name}")
        if last_read.get(line.name, -1) > i:
            held.add(line.name)
    return Launch(statements, tuple(loads), frozenset(narrow))


def update_narrow(narrow: set[str], line: Line) -> None:
    """Note whether the line's result is one number per row: a reduction's, or one of such operands alone."""
    narrow.discard(line.name)
    if line.op in REDUCTIONS or narrow.issuperset(line.args):
        narrow.add(line.name)
