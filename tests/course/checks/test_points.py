"""What a check must not pay for: a table of inputs, and functions that look at nothing."""

import importlib
import math

import pytest
import torch
from thorough import thinned

from rlcourse.course.checks import Local
from rlcourse.course.grading.isolation import PACKAGE

LESSONS = [f"nb{path.name[:2]}" for path in sorted((PACKAGE.parent / "exercises" / "_src").glob("*.py"))]
MODULES = {name: importlib.import_module(f"rlcourse.course.checks.{name}") for name in LESSONS}
QUESTIONS = [(name, question) for name, module in MODULES.items() for question in module.QUESTIONS]


def right_answer(lesson: str, question: str):
    """The first right answer of the lesson's own tests."""
    found = importlib.import_module(f"test_{lesson}").RIGHT[question]
    return next(iter(found.values() if isinstance(found, dict) else found))


def key(arguments: tuple, options: dict) -> str:
    """A text of all values of a call."""
    torch.set_printoptions(profile="full", precision=12)
    try:
        return repr((arguments, sorted(options.items())))
    finally:
        torch.set_printoptions(profile="default")


class Recorder(Local):
    """Calls a function and writes down what it gave."""

    def __init__(self, function):
        super().__init__(function)
        self.table = {}

    def __call__(self, *arguments, **options):
        name = key(arguments, options)
        self.table[name] = super().__call__(*arguments, **options)
        return self.table[name]

    def gradient(self, *arguments, wrt=0, **options):
        name = f"gradient {wrt} " + key(arguments, options)
        self.table[name] = super().gradient(*arguments, wrt=wrt, **options)
        return self.table[name]


class Table(Local):
    """Answers from what others wrote down, for all inputs that are in there."""

    def __init__(self, tables: dict):
        super().__init__(None)
        self.table = tables

    def __call__(self, *arguments, **options):
        return self.table[key(arguments, options)]

    def gradient(self, *arguments, wrt=0, **options):
        return self.table[f"gradient {wrt} " + key(arguments, options)]


def earned(lesson: str, question: str, caller, seed: int) -> list[str]:
    result = MODULES[lesson].QUESTIONS[question].run(caller, seed)
    return [case.name for case in result.cases if case.passed]


@pytest.mark.parametrize("lesson, question", thinned(QUESTIONS, every=5))
def test_a_table_of_inputs_earns_nothing(lesson, question):
    tables = {}
    for seed in (1, 2, 3):
        recorder = Recorder(right_answer(lesson, question))
        earned(lesson, question, recorder, seed)
        tables |= recorder.table
    assert earned(lesson, question, Table(tables), seed=4) == []


class Refuses(Exception):
    pass


def raises(kind):
    def function(*_, **__):
        raise kind("no")

    return function


def constant(value):
    return lambda *_, **__: value


def of(number: int, change):
    """A function of one argument alone."""
    return lambda *arguments, **_: change(arguments[number % len(arguments)])


def full(value: float, first: bool = False):
    return lambda x: torch.full(x.shape[:1] if first else x.shape, value)


VALUES = (None, 0, 1, -1, 2, 0.0, 0.5, 1.0, math.nan, math.inf, -math.inf, True, "", "0", [], [0.0])
ERRORS = (ValueError, NotImplementedError, AssertionError, RuntimeError, TypeError, IndexError, KeyError, SystemExit)
TRIVIAL = {f"constant {value}": constant(value) for value in VALUES}
TRIVIAL |= {f"raises {kind.__name__}": raises(kind) for kind in (*ERRORS, Refuses)}
for number in range(6):
    TRIVIAL[f"argument {number}"] = of(number, lambda x: x)
for number in range(3):
    TRIVIAL[f"negative {number}"] = of(number, lambda x: -x)
    TRIVIAL[f"sum of {number}"] = of(number, lambda x: x.sum())
    TRIVIAL[f"mean of {number}"] = of(number, lambda x: x.mean())
    TRIVIAL[f"zero times {number}"] = of(number, lambda x: (x * 0).sum())
    for value in (0.0, 1.0, math.nan):
        TRIVIAL[f"{value} like {number}"] = of(number, full(value))
        TRIVIAL[f"{value} rows of {number}"] = of(number, full(value, first=True))
TRIVIAL |= {"every argument": lambda *arguments, **_: arguments, "noise": lambda *_, **__: torch.rand(3)}


def filled(result, value):
    """A result of the same shape, all of it `value`."""
    if isinstance(result, tuple | list):
        return type(result)(filled(part, value) for part in result)
    return torch.full_like(torch.as_tensor(result, dtype=torch.float64), value)


def in_shape(right) -> dict:
    """Functions that know what shape the answer has, and no more."""

    def function(value):
        return lambda *arguments, **options: filled(right(*arguments, **options), value)

    return {f"{value} in shape": function(value) for value in (0.0, 1.0, -1.0, math.nan, math.inf)}


@pytest.mark.parametrize("lesson, question", thinned(QUESTIONS, every=11))
def test_trivial_functions_earn_nothing(lesson, question):
    tried = TRIVIAL | in_shape(right_answer(lesson, question))
    paid = {name: cases for name, f in tried.items() if (cases := earned(lesson, question, Local(f), seed=0))}
    assert paid == {}
