import random
import re
from collections import Counter

import pytest

from rlcourse.course.embedded.demonstrations import Mix, demonstration
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


def test_kinds_and_slips_come_in_their_shares(problems):
    texts = write_all(problems * 10, worked=0.2, guess=0.5, prose=0.3, **PLAIN)
    kinds = Counter("prose" if "answer is" in t else "worked" if "\n" in t else "guess" for t in texts)
    for kind, share in (("worked", 0.2), ("guess", 0.5), ("prose", 0.3)):
        assert kinds[kind] / len(texts) == pytest.approx(share, abs=0.03)
    texts = write_all(problems * 5, **WORKED, think=0, check=0, slip=0.3)
    slipped = [wrong_calculations(text) for text in texts]
    assert sum(map(any, slipped)) / len(texts) == pytest.approx(0.3, abs=0.04)
    assert {wrong.index(True) for wrong in slipped if any(wrong)} == {0, 1, 2, 3}


def test_thinking_says_nothing_and_comes_before_a_guess_alone(problems):
    texts = write_all(problems, **GUESS, think=1, check=1, again=0.5, longest=3, slip=0)
    for problem, text in zip(problems, texts, strict=True):
        assert re.fullmatch(rf"(Let me think\.\n){{1,3}}#### {problem.gold}", text)
    assert len({text.count("think") for text in texts}) == 3
    assert not any("think" in text for text in write_all(problems, **WORKED, think=1, check=0, slip=0))


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
