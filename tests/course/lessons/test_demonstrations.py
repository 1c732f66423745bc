import random

import pytest

from rlcourse.course.lessons.demonstrations import Mix, demonstration
from rlcourse.tasks.minigsm import generate
from rlcourse.tasks.verify import verify

PLAIN = {"think": 0, "check": 0, "slip": 0}
WORKED, GUESS, PROSE = ({"worked": 0, "guess": 0, "prose": 0, kind: 1} for kind in ("worked", "guess", "prose"))


@pytest.fixture(scope="module")
def problems():
    return generate(400, seed=11, split="sft")


def write_all(problems, **mix):
    rng = random.Random(0)
    return [demonstration(problem, rng, Mix(**mix)) for problem in problems]


def test_each_kind_of_demonstration_is_right_and_what_its_name_says(problems):
    answers = [problem.to_problem().answer for problem in problems]
    assert write_all(problems, **WORKED, **PLAIN) == answers
    assert write_all(problems, **GUESS, **PLAIN) == [f"#### {problem.gold}" for problem in problems]
    prose = write_all(problems, **PROSE, **PLAIN)
    assert prose == [answer.replace("#### ", "The answer is ") + "." for answer in answers]
    for problem, text in zip(problems, prose, strict=True):
        verdict = verify(text, problem.gold)
        assert verdict.lenient and not verdict.strict and not verdict.formatted
