import random
import re

import pytest

from rlcourse.course.lessons.demonstrations import Mix, demonstration
from rlcourse.tasks.minigsm import generate
from rlcourse.tasks.verify import verify

CALCULATION = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)")
PLAIN = {"think": 0, "check": 0, "slip": 0}
WORKED, GUESS, PROSE = ({"worked": 0, "guess": 0, "prose": 0, kind: 1} for kind in ("worked", "guess", "prose"))


@pytest.fixture(scope="module")
def problems():
    return generate(400, seed=11, split="sft")


def write_all(problems, **mix):
    rng = random.Random(0)
    return [demonstration(problem, rng, Mix(**mix)) for problem in problems]


def wrong_calculations(text):
    """Whether each calculation of a text is wrong, in order."""
    compute = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__truediv__}
    return [compute[op](int(a), int(b)) != int(result) for a, op, b, result in CALCULATION.findall(text)]


def test_each_kind_of_demonstration_is_right_and_what_its_name_says(problems):
    answers = [problem.to_problem().answer for problem in problems]
    assert write_all(problems, **WORKED, **PLAIN) == answers
    assert write_all(problems, **GUESS, **PLAIN) == [f"#### {problem.gold}" for problem in problems]
    prose = write_all(problems, **PROSE, **PLAIN)
    assert prose == [answer.replace("#### ", "The answer is ") + "." for answer in answers]
    for problem, text in zip(problems, prose, strict=True):
        verdict = verify(text, problem.gold)
        assert verdict.lenient and not verdict.strict and not verdict.formatted


@pytest.mark.parametrize("kind", [WORKED, PROSE])
def test_a_slip_is_one_wrong_calculation_that_the_rest_builds_on(problems, kind):
    misled = 0
    for problem, text in zip(problems, write_all(problems, **kind, think=0, check=0, slip=1), strict=True):
        assert sum(wrong_calculations(text)) == 1
        results = [int(c[3]) for c in CALCULATION.findall(text)]
        assert int(re.search(r"(\d+)\.?$", text)[1]) == results[-1]
        assert min(results) >= 2
        right = [int(c[3]) for c in CALCULATION.findall(problem.to_problem().answer)]
        first = wrong_calculations(text).index(True)
        assert results[:first] == right[:first]
        misled += str(results[-1]) != problem.gold
    assert misled > 0.95 * len(problems)
