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
from rlcourse.course.grading.student import Remote


def found(question, caller):
    """By case. The line that an error names is known to the grader alone: a test's function stands in no cell."""
    return [(case.name, case.passed, case.message.split(" (line ")[0]) for case in question.run(caller, 0).cases]


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
    calls = {"call": ODD[odd], "gradient": partial(gradient, ODD[odd]), "pieces": partial(pieces, ODD[odd])}
    remote = Remote(SimpleNamespace(worker=Loopback(calls), left=1e9))
    for lesson, name in (("nb01", "q1"), ("nb01", "q2"), ("nb05", "q3"), ("nb08", "q8")):
        question = asked(lesson, name)
        assert found(question, remote) == found(question, Local(ODD[odd]))
