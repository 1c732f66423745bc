"""Random computations: elementwise operations and reductions, chained and joined as in a model's layers. A hash of the
structure, without names, decides the split, so no test problem is a renamed training problem."""

import hashlib
import random
from dataclasses import dataclass, field, replace

import numpy as np

from rlcourse.tasks.kernels.clock import fits_one_launch
from rlcourse.tasks.kernels.judge import LARGEST, TEST_INPUTS, TRAINING_INPUTS, agrees, draw_inputs, execute, reference
from rlcourse.tasks.kernels.language import INPUTS, LETTERS, Computation, Line, eager

IDIOMS = (  # lines over the operand X; a number is the result of that line
    (("rowmax", "X"), ("sub", "X", 0), ("exp", 1), ("rowsum", 2), ("div", 2, 3)),  # softmax
    (("square", "X"), ("rowsum", 0), ("sqrt", 1), ("div", "X", 2)),  # a row over its norm
    (("sigmoid", "X"), ("mul", "X", 0)),  # swish
    (("rowmax", "X"), ("sub", "X", 0)),
    (("exp", "X"), ("rowsum", 0), ("div", 0, 1)),
)
JOINS = ("add", "add", "sub", "mul", "mul", "max", "min", "div")
MAPS = ("relu", "neg", "abs", "square", "exp", "sigmoid")
TEST_PERCENT = 20  # of all structures
ORDINARY_ROWS = [0, 1, 3, 5, 6]  # of `draw_inputs`: neither large nor all zero


def computations(
    count: int, split: str, seed: int, lengths: tuple[int, int], at_least_refused: float = 0.0
) -> list[Computation]:
    """`count` distinct computations of a split (train or test), of `lengths[0]` to `lengths[1]` lines.
    at_least_refused: the least share of them that run out of registers in one launch."""
    rng, found = random.Random(f"{split} {seed}"), {}  # computation: whether one launch is refused
    most_fitting = count - round(at_least_refused * count)
    while len(found) < count:
        computation = draw(rng, rng.randint(*lengths))
        if computation is None or computation in found or split_of(computation) != split:
            continue
        refused = not fits_one_launch(computation)
        if (refused or len(found) - sum(found.values()) < most_fitting) and is_posed(computation):
            found[computation] = refused
    drawn = list(found)
    rng.shuffle(drawn)  # else the refused ones would come last
    return drawn


def split_of(computation: Computation) -> str:
    """train or test, by a blake2b hash of the lines with names numbered by first use."""
    numbers: dict[str, int] = {}
    structure = [
        (line.op, *(numbers.setdefault(name, len(numbers)) for name in (*line.args, line.name)))
        for line in computation.lines
    ]
    percent = int.from_bytes(hashlib.blake2b(repr(structure).encode(), digest_size=8).digest(), "big") % 100
    return "test" if percent < TEST_PERCENT else "train"


@dataclass
class Draft:
    inputs: list[str]
    names: list[str]
    lines: list[Line] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    positive: set[str] = field(default_factory=set)

    def add(self, op: str, *args: str) -> str:
        name = self.names[len(self.lines)]
        self.lines.append(Line(name, op, args))
        self.unread = [*(other for other in self.unread if other not in args), name]
        keeps_sign = op in ("rowsum", "rowmax", "add", "mul", "div", "max", "sqrt", "square")
        if op in ("exp", "sigmoid") or (keeps_sign and self.positive.issuperset(args)):
            self.positive.add(name)
        return name

    def operand(self, rng: random.Random) -> str:
        """Mostly one that no line reads yet, so that few are left over."""
        read = [*self.inputs, *(line.name for line in self.lines)]
        return rng.choice(self.unread if rng.random() < 0.8 else read)


def draw(rng: random.Random, length: int) -> Computation | None:
    """A computation of `length` lines; None if a line or an input is never read."""
    inputs = rng.sample(INPUTS, rng.choice([1, 2, 2, 3, 3, 4]))
    first = rng.randint(0, len(LETTERS) + 1 - length)
    draft = Draft(inputs, [*LETTERS[first : first + length - 1], "y"], unread=list(inputs))
    while len(draft.lines) < length:
        kind = rng.random()
        if kind < 0.25:
            idiom = rng.choice(IDIOMS)
            if len(draft.lines) + len(idiom) <= length:
                operand, made = draft.operand(rng), []
                for op, *args in idiom:
                    made.append(draft.add(op, *(operand if arg == "X" else made[arg] for arg in args)))
        elif kind < 0.75:
            op, left, right = rng.choice(JOINS), draft.operand(rng), draft.operand(rng)
            if left != right and not (op == "div" and right not in draft.positive):
                draft.add(op, left, right)
        else:
            draft.add(rng.choice(MAPS), draft.operand(rng))
    return Computation(tuple(draft.lines)) if draft.unread == ["y"] else None


def is_posed(computation: Computation) -> bool:
    """Whether y is a matrix that depends on the inputs, is exact enough in float32, and needs every line: one isn't
    needed if y is the same with its operand in its place, like `abs` before `square`."""
    if "y" in computation.narrow:
        return False
    for seed, columns in (*TEST_INPUTS, *TRAINING_INPUTS):
        inputs = draw_inputs(computation, seed, columns)
        y = reference(computation, inputs)["y"]
        if not agrees(execute(eager(computation), inputs)["y"], y):
            return False
    usable = np.isfinite(y) & (np.abs(y) < LARGEST)
    if usable.mean() < 0.7 or not usable[ORDINARY_ROWS].all() or np.ptp(y[:2]) < 1e-3:
        return False
    return not any(
        agrees(reference(replaced(computation, line.name, operand), inputs)["y"], y)
        for line in computation.lines[:-1]
        for operand in line.args
    )


def replaced(computation: Computation, name: str, by: str) -> Computation:
    others = [line for line in computation.lines if line.name != name]
    return Computation(tuple(replace(x, args=tuple(by if arg == name else arg for arg in x.args)) for x in others))
