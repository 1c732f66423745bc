"""Problems of the embedded task: grade-school word problems from templates. `gsm8k.py` loads those that ship. A
problem's identity is its template and its numbers; a hash of it decides its split, so splits never share a problem.
Split `sft` is for the warm start's demonstrations."""

import hashlib
import random
import re
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from rlcourse.files import read_lines
from rlcourse.paths import data_folder
from rlcourse.tasks.task import Problem

LEVELS = (1, 2, 3, 4)  # the number of steps of a problem
SPLITS = {"sft": 45, "train": 35, "validation": 8, "test": 12}  # percent of all problems
LARGEST = 100  # the largest result of a step; the smallest is 2, so that nothing is ever singular

BOYS = ["Tom", "Ben", "Sam", "Leo", "Max", "Omar", "Ravi", "Juan"]
GIRLS = ["Anna", "Mia", "Zoe", "Lily", "Emma", "Nina", "Sara", "Mei"]
THINGS = ["apples", "books", "cards", "coins", "shells", "stamps", "beads", "stickers", "marbles", "pencils"]
BOXES = {"boxes": "box", "bags": "bag", "packs": "pack", "baskets": "basket"}
TIMES = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}
PARTS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth"}


class Step(NamedTuple):
    """A line of a worked answer. `left` and `right` name the problem's numbers or earlier results, r1 and r2."""

    before: str
    left: str
    op: str
    right: str
    after: str


@dataclass(frozen=True)
class Template:
    """One kind of problem. `ranges` bounds each number, ends included; `solve` says which combinations can be used.

    {x} {y} {z} {w} {v} are numbers, k one written as a word: {times} ("three times") or {part} ("a third"). {A} {B} {C}
    are people; {he} {He} {him} stand for {A}; {things} are in {boxes} (one {box}). A step has its calculation in
    brackets; r1 is the first one's result.
    """

    name: str
    question: str
    steps: list[Step]
    ranges: dict[str, tuple[int, int]]


def parse_step(text: str) -> Step:
    """The step that a template writes as "{A} has [x+y] {things}"."""
    return Step(*re.fullmatch(r"(.*)\[(\w+)([-+*/])(\w+)\](.*)", text).groups())


LINES = read_lines(data_folder() / "minigsm" / "templates.jsonl")
TEMPLATES = [Template(**line | {"steps": [*map(parse_step, line["steps"])]}) for line in LINES]


class Calculation(NamedTuple):
    """What a step computes: left op right = result."""

    left: int
    op: str
    right: int
    result: int

    def __str__(self) -> str:
        return f"{self.left}{self.op}{self.right}={self.result}"


@dataclass(frozen=True)
class GeneratedProblem:
    """A problem with its template's name, its numbers by name and its steps."""

    template: str
    numbers: dict[str, int]
    question: str
    steps: list[Step]

    @property
    def identity(self) -> tuple:
        return (self.template, *self.numbers.values())

    @property
    def level(self) -> int:
        return len(self.steps)

    @property
    def gold(self) -> str:
        return str(solve(self.steps, self.numbers)[-1].result)

    def to_problem(self) -> Problem:
        """With a worked answer: a line per step, then `#### NUMBER`."""
        lines = [work(step, done) for step, done in zip(self.steps, solve(self.steps, self.numbers), strict=True)]
        return Problem(self.question, "\n".join([*lines, f"#### {self.gold}"]), self.gold, self.level)


def split_of(identity: tuple) -> str:
    """The split of a problem, by a blake2b hash of its identity, the same on every machine."""
    percent = int.from_bytes(hashlib.blake2b(repr(identity).encode(), digest_size=8).digest(), "big") % 100
    bounds = accumulate(SPLITS.values())
    return next(split for split, bound in zip(SPLITS, bounds, strict=True) if percent < bound)


def calculate(left: int, op: str, right: int) -> int | None:
    """left op right, or None for what no problem asks for: a product of two numbers above 9, a divisor above 9, a
    remainder."""
    if op == "+":
        return left + right
    if op == "-":
        return left - right
    if op == "*":
        return left * right if min(left, right) <= 9 else None
    return left // right if 2 <= right <= 9 and left % right == 0 else None


def solve(steps: list[Step], numbers: dict[str, int], slips: dict[int, int] | None = None) -> list[Calculation] | None:
    """The calculation of each step, or None if one is not asked for (see `calculate`) or leaves 2..LARGEST. slips:
    errors to add to results, by the step's place from 1."""
    values, calculations = dict(numbers), []
    for place, step in enumerate(steps, start=1):
        left, right, slip = values[step.left], values[step.right], (slips or {}).get(place, 0)
        result = calculate(left, step.op, right)
        if result is None or not 2 <= result + slip <= LARGEST:
            return None
        values[f"r{place}"] = result = result + slip
        calculations.append(Calculation(left, step.op, right, result))
    return calculations


def work(step: Step, calculation: Calculation) -> str:
    """The line of a step, as in "Anna has 12+7=19 apples."."""
    return f"{step.before}{calculation}{step.after}"


def sample(rng: random.Random, split: str, levels: tuple[int, ...] = LEVELS) -> GeneratedProblem:
    """One problem of a split: level, then template, then numbers until they can be used and are in the split."""
    level = rng.choice(levels)
    template = rng.choice([t for t in TEMPLATES if len(t.steps) == level])
    while True:
        numbers = {name: rng.randint(low, high) for name, (low, high) in template.ranges.items()}
        if solve(template.steps, numbers) is not None and split_of((template.name, *numbers.values())) == split:
            break
    a, b, c = rng.sample(BOYS + GIRLS, 3)
    boxes = rng.choice(list(BOXES))
    he, him = ("he", "him") if a in BOYS else ("she", "her")
    words = {"A": a, "B": b, "C": c, "he": he, "He": he.capitalize(), "him": him, "things": rng.choice(THINGS)}
    words |= {"boxes": boxes, "box": BOXES[boxes]}
    if "k" in numbers:
        words |= {"times": TIMES[numbers["k"]], "part": PARTS[numbers["k"]]}
    steps = [s._replace(before=s.before.format(**words), after=s.after.format(**words)) for s in template.steps]
    return GeneratedProblem(template.name, numbers, template.question.format(**words, **numbers), steps)


def generate(n: int, seed: int, split: str, levels: tuple[int, ...] = LEVELS) -> list[GeneratedProblem]:
    """n different problems of a split, the levels taking turns; the same for the same arguments. Raises ValueError if
    the split has fewer."""
    rng, found, misses = random.Random(seed), {}, 0
    while len(found) < n:
        level = levels[len(found) % len(levels)]
        problem = sample(rng, split, (level,))
        misses = misses + 1 if problem.identity in found else 0
        found.setdefault(problem.identity, problem)
        if misses == 5000:
            raise ValueError(f"Split {split!r} has hardly more than {len(found)} problems of level {level}: lower n.")
    return list(found.values())
