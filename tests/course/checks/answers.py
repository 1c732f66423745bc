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


def common_tests(questions: dict, right: dict, wrong: dict, named: dict, first: bool = False, slow=()) -> dict:
    """The tests for one lesson. The test module adds them to its `globals()`, where pytest finds them.

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

    @pytest.mark.parametrize("seed", [0, thorough(1)])
    @pytest.mark.parametrize("question, function", [(q, f) for q, found in right.items() for f in found])
    def test_right_answers_pass(question, function, seed):
        result = run(question, function, seed)
        assert result.passed, repr(result)

    @pytest.mark.parametrize("seed", [0, thorough(1)])
    @pytest.mark.parametrize("question, name", mistakes)
    def test_wrong_answers_are_killed_and_the_mistake_is_named(question, name, seed):
        result = run(question, wrong[question][name], seed)
        assert not result.passed, repr(result)
        if seed == 0 and (question, name) in named:
            messages = [case.message for case in result.cases if not case.passed]
            looked_at = messages[:1] if first else messages
            assert any(named[question, name] in message for message in looked_at), messages

    def test_every_mistake_that_is_to_be_named_is_tried():
        assert named.keys() <= {(q, name) for q, found in wrong.items() for name in found}

    def test_a_hole_shows_the_hint():
        def hole(*_):
            raise NotImplementedError

        for question in questions:
            result = run(question, hole)
            assert not result.passed and result.hint == questions[question].hint, repr(result)

    return {name: test for name, test in locals().items() if name.startswith("test_")}
