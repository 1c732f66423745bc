"""What every exercise's check promises: right answers pass however they are written, wrong ones fail and are told their
mistake, and nothing is paid for a stub, for a table of inputs or for a function that looks at nothing."""

import math

import pytest
import torch
from answers import (
    KERNELS,
    QUESTIONS,
    another,
    asked,
    edited,
    given,
    kernel_from,
    solution,
    source,
    tables,
    wrong_answers,
)
from thorough import thinned, thorough
from torch.utils._pytree import tree_map_only

from rlcourse.course.checks import CheckFailed, Local
from rlcourse.course.checks.kernels import Maker
from rlcourse.kernels import dsl

every_question = pytest.mark.parametrize("lesson, question", QUESTIONS)
compiles = pytest.mark.skipif(not dsl.INSTALLED, reason="CuTe DSL is not installed")


def messages(result) -> list[str]:
    return [case.message for case in result.cases if not case.passed]


@pytest.mark.parametrize("seed", [0, *map(thorough, range(1, 6))])
@every_question
def test_the_solution_and_another_right_answer_pass(lesson, question, seed):
    for function in filter(None, (solution(lesson, question), another(lesson, question))):
        result = asked(lesson, question).run(Local(function), seed)
        assert result.passed, repr(result)


WRONG = [(lesson, question, name) for lesson, question in QUESTIONS for name in wrong_answers(lesson, question)]


@pytest.mark.parametrize("lesson, question, name", WRONG)
def test_a_wrong_answer_fails_and_is_told_its_mistake(lesson, question, name):
    function, said = wrong_answers(lesson, question)[name]
    found = messages(asked(lesson, question).run(Local(function), seed=0))
    assert found, "it passes"
    assert any(said in message for message in found), found


@pytest.mark.thorough
@every_question
def test_a_wrong_answer_fails_with_other_inputs(lesson, question):
    for name, (function, *_) in wrong_answers(lesson, question).items():
        assert not asked(lesson, question).run(Local(function), seed=1).passed, name


COLLEAGUES = [("nb04", "q4"), ("nb06", "q1"), ("nb07", "q2"), ("nb10", "q2")]


@pytest.mark.parametrize("lesson, question", COLLEAGUES)
def test_a_colleagues_function_fails_as_it_is(lesson, question):
    assert not asked(lesson, question).run(Local(given(lesson, "colleague")), seed=0).passed


@every_question
def test_a_hole_shows_the_hint(lesson, question):
    def hole(*_):
        raise NotImplementedError

    result = asked(lesson, question).run(Local(hole), seed=0)
    assert not result.passed and result.hint == asked(lesson, question).hint, repr(result)


def test_a_check_shows_its_card_remembers_that_it_passed_and_raises_only_where_it_is_strict(monkeypatch):
    monkeypatch.delenv("RLCOURSE_STRICT", raising=False)
    question, right = asked("nb00", "q2"), solution("nb00", "q2")
    for function, passed in ((right, True), (lambda *_: 0.0, False)):
        assert question(function).passed == question.passed == passed
        assert f"data-passed='{str(passed).lower()}'" in question(function)._repr_html_()
    monkeypatch.setenv("RLCOURSE_STRICT", "1")
    assert question(right).passed
    with pytest.raises(CheckFailed, match="NOT YET  q2 best_of_k"):
        question(lambda *_: 0.0)


def test_a_function_that_writes_into_what_it_is_given_harms_nothing_else():
    given = [torch.ones(3), {"a": torch.ones(2)}]
    assert Local(lambda x: x[0].zero_().sum() + x[1]["a"].zero_().sum())(given) == 0
    assert given[0].sum() == 3 and given[1]["a"].sum() == 2


# Functions that are paid for nothing ------------------------------------------------------------------------------


def key(*call) -> str:
    """A text of all values of a call."""
    return repr(tree_map_only(torch.Tensor, lambda t: (t.shape, t.dtype, t.detach().numpy().tobytes()), call))


class Recorder(Local):
    """Calls a function and writes down what it gave."""

    def __init__(self, function, table: dict):
        super().__init__(function)
        self.table = table

    def __call__(self, *arguments, **options):
        return self.table.setdefault(key(arguments, options), super().__call__(*arguments, **options))

    def gradient(self, *arguments, wrt=0, **options):
        return self.table.setdefault(key(wrt, arguments, options), super().gradient(*arguments, wrt=wrt, **options))


class Table(Recorder):
    """Answers from what others wrote down, for all inputs that are in there."""

    def __call__(self, *arguments, **options):
        return self.table[key(arguments, options)]

    def gradient(self, *arguments, wrt=0, **options):
        return self.table[key(wrt, arguments, options)]


def earned(lesson: str, question: str, caller, seed: int) -> list[str]:
    return [case.name for case in asked(lesson, question).run(caller, seed).cases if case.passed]


@pytest.mark.parametrize("lesson, question", thinned(QUESTIONS, every=3))
def test_a_table_of_inputs_earns_nothing(lesson, question):
    table = {}
    for seed in (1, 2, 3):
        earned(lesson, question, Recorder(solution(lesson, question), table), seed)
    assert earned(lesson, question, Table(None, table), seed=4) == []


def constant(value):
    return lambda *_, **__: value


def of(number: int, change):
    """A function of one argument alone."""
    return lambda *arguments, **_: change(arguments[number % len(arguments)])


def filled(result, value):
    """A result of the same shape, all of it `value`."""
    if isinstance(result, tuple | list):
        return type(result)(filled(part, value) for part in result)
    return torch.full_like(torch.as_tensor(result, dtype=torch.float64), value)


def in_shape(right, value):
    """A function that knows what shape the answer has, and no more."""
    return lambda *arguments, **options: filled(right(*arguments, **options), value)


FEW = {
    f"constant {value}": constant(value) for value in (0.0, 1, -1, math.nan, math.inf, None, "", [0.0], torch.tensor(1))
}
FEW["the argument"] = of(0, lambda x: x)
FEW |= {f"{value} like the first": of(0, lambda x, v=value: torch.full(x.shape, v)) for value in (0.0, 1.0, math.nan)}


@every_question
def test_functions_that_look_at_nothing_earn_nothing(lesson, question):
    right = solution(lesson, question)
    shaped = {f"{value} in shape": in_shape(right, value) for value in (0.0, 1.0, -1.0, math.nan, math.inf)}
    paid = {name: cases for name, f in (FEW | shaped).items() if (cases := earned(lesson, question, Local(f), 0))}
    assert paid == {}


# Kernels ----------------------------------------------------------------------------------------------------------

EDITS = [(*which, name) for which in KERNELS for name in ("", *tables(which[0]).EDITS[which[1]])]


@compiles
@pytest.mark.parametrize("lesson, question, name", thinned(EDITS, every=9))
def test_kernels_with_one_mistake_are_told_it_and_others_pass(lesson, question, name, tmp_path, monkeypatch):
    text, said = edited(lesson, question, name)
    question = KERNELS[lesson, question]
    result = question.run(Maker(kernel_from(text, question.function, tmp_path, monkeypatch)), seed=0)
    assert result.passed == (said is None), repr(result)
    assert said is None or any(said in message for message in messages(result)), repr(result)


@compiles
@pytest.mark.parametrize("line, said", [("raise NotImplementedError", "not implemented"), ("nothing()", "nothing")])
def test_a_kernel_with_a_hole_shows_the_hint_and_one_that_does_not_compile_says_why(line, said, tmp_path, monkeypatch):
    for (lesson, name), question in KERNELS.items():
        head = source(lesson, question.function).rpartition("# BEGIN SOLUTION")[0]
        folder = tmp_path / f"{lesson}_{name}"
        folder.mkdir()
        result = question.run(Maker(kernel_from(head + line, question.function, folder, monkeypatch)), seed=0)
        assert all(said in case.message for case in result.cases), repr(result)
        assert (result.hint == question.hint) == line.startswith("raise")


@compiles
@pytest.mark.parametrize("lesson, question", [("nb08", "q9"), ("nb12", "q7")])
def test_a_colleagues_kernel_does_not_pass_as_it_is(lesson, question, tmp_path, monkeypatch):
    kernel = kernel_from(source(lesson, "Hers"), "Hers", tmp_path, monkeypatch)
    cases = KERNELS[lesson, question].run(Maker(kernel), seed=0).cases
    assert not any(case.passed for case in cases[1:]), cases
