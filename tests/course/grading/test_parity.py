"""What the card says in a notebook is what the grader says."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from answers import asked
from submissions import Loopback

from rlcourse.course.calls import gradient, pieces
from rlcourse.course.checks import Local
from rlcourse.course.grading.remote import Remote


def graded(question, function, seed=0):
    worker = Loopback({"call": function, "gradient": partial(gradient, function), "pieces": partial(pieces, function)})
    remote = Remote(SimpleNamespace(worker=worker, left=1e9))
    return [(case.name, case.passed, case.message) for case in question.run(remote, seed).cases]


def on_card(question, function, seed=0):
    return [(case.name, case.passed, case.message) for case in question.run(Local(function), seed).cases]


def without_line(found):
    """The line that an error names is known to the grader alone: a test's function stands in no cell."""
    return [(name, passed, message.split(" (line ")[0]) for name, passed, message in found]


ODD = {
    "a number of numpy": lambda *_: np.float64(2.0),
    "an array": lambda *_: np.zeros(5),
    "a tensor with history": lambda *_: torch.ones(5, requires_grad=True) * 2,
    "nothing": lambda *_: None,
    "an object": lambda *_: object(),
    "a set": lambda *_: {1, 2},
    "a generator": lambda *_: (x for x in [1]),
    "a function": lambda *_: len,
    "a complex tensor": lambda *_: torch.zeros(5, dtype=torch.complex64),
    "a sparse tensor": lambda *_: torch.zeros(5).to_sparse(),
    "a deep list": lambda *_: [[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]],
    "a huge number": lambda *_: 10**400,
    "a text": lambda *_: "two",
    "an error": lambda *_: [][1],
    "an assertion": lambda *_: (_ for _ in ()).throw(AssertionError("mine")),
    "an exit": lambda *_: (_ for _ in ()).throw(SystemExit(1)),
    "a hole": lambda *_: (_ for _ in ()).throw(NotImplementedError),
}


@pytest.mark.parametrize("odd", ODD)
def test_card_and_grader_take_odd_results_alike(odd):
    for lesson, name in (("nb01", "q1"), ("nb01", "q2"), ("nb05", "q3"), ("nb08", "q8")):
        question = asked(lesson, name)
        assert without_line(graded(question, ODD[odd])) == without_line(on_card(question, ODD[odd]))
