"""The split of the gain: kinds of answers told apart by their text, factors whose product is the accuracy, parts that
add up to the gain."""

import itertools
import random

import pytest

from rlcourse.course.lessons import gain
from rlcourse.course.lessons.demonstrations import Mix, demonstration
from rlcourse.tasks.minigsm import generate
from rlcourse.tasks.task import Answer, Problem
from rlcourse.tasks.verify import CUT_OFF, verify


def answer(text: str, gold: str = "14", level: int = 1, finished: bool = True) -> Answer:
    return Answer(Problem("?", "", gold, level), text, 9, finished, verify(text, gold) if finished else CUT_OFF)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Tom has 6+8=14 beads.\n#### 14", "worked"),
        ("Tom has 6+8=15 beads.\n#### 15", "worked"),  # wrong, but it makes sense
        ("Let me think.\nTom has 6+8=14 beads.\nLet me check: 6+8=14.\n#### 14", "worked"),
        ("Tom has 6+8=14 beads.\nThe answer is 14.", "words"),
        ("#### 14", "guess"),
        ("Let me think.\nLet me think.\n#### 3", "guess"),
        ("Tom has 6+8=14 beads.\nThe� me think\n#### 14", "garbage"),
        ("Tom has 6+8=14 bread.\n#### 14", "garbage"),
        ("Tom has 6+8=14 beads.\n#### 14\nLet me think.", "garbage"),
        ("", "garbage"),
    ],
)
def test_the_kind_of_an_answer(text, kind):
    assert gain.kind(answer(text)) == kind
    assert gain.kind(answer(text, finished=False)) == "garbage"  # it was cut off


def test_no_demonstration_is_garbage_and_each_is_of_the_kind_it_was_made_as():
    rng = random.Random(0)
    mixes = {
        "worked": Mix(worked=1, guess=0, prose=0),
        "words": Mix(worked=0, guess=0, prose=1, slip=0),
        "guess": Mix(worked=0, guess=1, prose=0, slip=0),
    }
    for problem in generate(400, 3, "test"):
        for kind, mix in mixes.items():
            text = demonstration(problem, rng, mix)
            assert gain.kind(answer(text, problem.gold, problem.level)) == kind, text
            verdict = verify(text, problem.gold)
            assert mix.slip or (verdict.lenient and verdict.strict == (kind == "guess")), text


def made_up(seed: int) -> gain.Counts:
    rng, counts = random.Random(seed), {}
    for level in "1234":
        cuts = sorted(rng.sample(range(1, 200), 3))
        c = dict(zip(gain.KINDS, (b - a for a, b in itertools.pairwise([0, *cuts, 200])), strict=True))
        c["worked right"] = rng.randint(0, c["worked"])
        counts[level] = c | {"right": c["worked right"] + rng.randint(0, c["guess"])}
    return counts


def test_the_parts_add_up_to_the_gain():
    for seed in range(5):
        before, after = made_up(seed), made_up(seed + 100)
        parts = gain.split(before, after)
        assert sum(parts.values()) == pytest.approx(gain.accuracy(after) - gain.accuracy(before))
        assert gain.split(after, before) == pytest.approx({name: -part for name, part in parts.items()})
    totals = [sum(c[k] for c in before.values()) for k in ("garbage", "worked", "worked right")]
    clean = 800 - totals[0]
    expected = {"clean": clean / 800, "choice": totals[1] / clean, "arithmetic": totals[2] / totals[1]}
    assert gain.factors(before) == pytest.approx(expected)
    assert gain.split(before, before) == pytest.approx(dict.fromkeys((*gain.FACTORS, "luck"), 0.0))


def test_a_part_is_the_mean_over_the_orders_of_change():
    """For one level against the closed form for three factors."""
    before = {"1": {"garbage": 50, "guess": 40, "words": 0, "worked": 10, "worked right": 5, "right": 5}}
    after = {"1": {"garbage": 10, "guess": 0, "words": 0, "worked": 90, "worked right": 72, "right": 72}}
    old, new = (0.5, 0.2, 0.5), (0.9, 1.0, 0.8)
    for i, name in enumerate(gain.FACTORS):
        j, k = (x for x in range(3) if x != i)
        alone, last = old[j] * old[k], new[j] * new[k]
        between = (new[j] * old[k] + old[j] * new[k]) / 2
        expected = (new[i] - old[i]) * (alone + last + between) / 3
        assert gain.split(before, after)[name] == pytest.approx(expected)
    assert gain.split(before, after)["luck"] == pytest.approx(0)
