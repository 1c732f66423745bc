"""The tests that the checks of most lessons share: they pass right answers, kill wrong ones, name the usual mistakes
and show the hint at a hole."""

import functools
import importlib
import sys
from pathlib import Path

import pytest
from thorough import thinned, thorough

from rlcourse.course.checks import Local


def kernel_from(source: str, name: str, folder: Path, monkeypatch) -> type:
    """A kernel's class from its source, which CuTe DSL reads from a file."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    module = f"kernel_{folder.name}"
    (folder / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    try:
        return getattr(importlib.import_module(module), name)
    finally:
        sys.modules.pop(module, None)


def common_tests(questions: dict, right: dict, wrong: dict, named: dict, first: bool = False, slow=()) -> tuple:
    """The four tests for one lesson. pytest finds them under the names that the test module gives them.

    questions: the lesson's questions, {question: Question}
    right: {question: [function, ...]}
    wrong: {question: {mistake: function}}
    named: {(question, mistake): part of the sentence that names this mistake}
    first: the sentence must be that of the first case that fails, not of any
    slow: questions whose checks take long: three of four wrong answers are left to `pytest -m thorough`
    """

    mistakes = [
        case for q, found in wrong.items() for case in thinned([(q, name) for name in found], 4 if q in slow else 1)
    ]

    @functools.cache
    def run(question: str, function, seed: int = 0):
        return questions[question].run(Local(function), seed=seed)

    @pytest.mark.parametrize("seed", thinned(range(3), every=3))
    @pytest.mark.parametrize("question, function", [(q, f) for q, found in right.items() for f in found])
    def test_right_answers_pass(question, function, seed):
        result = run(question, function, seed)
        assert result.passed, repr(result)

    @pytest.mark.parametrize("seed", thinned(range(3), every=3))
    @pytest.mark.parametrize("question, name", mistakes)
    def test_wrong_answers_are_killed(question, name, seed):
        result = run(question, wrong[question][name], seed)
        assert not result.passed, repr(result)

    @pytest.mark.parametrize("question, name", [case if case in mistakes else thorough(case) for case in named])
    def test_the_mistake_is_named(question, name):
        messages = [case.message for case in run(question, wrong[question][name]).cases if not case.passed]
        looked_at = messages[:1] if first else messages
        assert any(named[question, name] in message for message in looked_at), messages

    def test_a_hole_shows_the_hint():
        def hole(*_):
            raise NotImplementedError

        for question in questions:
            result = run(question, hole)
            assert not result.passed and result.hint == questions[question].hint, repr(result)

    return test_right_answers_pass, test_wrong_answers_are_killed, test_the_mistake_is_named, test_a_hole_shows_the_hint
