"""The first cell of a notebook: title, badge, difficulty, and the minutes and memory of the run that made it."""

import pytest

from rlcourse.course import REPOSITORY, TAG
from rlcourse.course.dev.headers import COURSE, Lesson, header, measured

RUN = {"seconds": 200, "peak_memory_bytes": 1_260_000_000, "device": "CPU Test", "date": "2026-01-31"}


def cells(table: str) -> list[str]:
    return [cell.strip() for cell in table.splitlines()[2].strip("|").split("|")]


@pytest.mark.parametrize(
    ("kind", "title"),
    [
        ("notebooks", "# 01 · The policy gradient"),
        ("exercises", "# 01 · The policy gradient: exercises"),
        ("solutions", "# 01 · The policy gradient: solutions"),
    ],
)
def test_title_and_badge_belong_to_the_notebook(kind, title):
    lines = header("01_policy_gradient", kind, RUN).splitlines()
    assert lines[0] == title
    path = f"{kind}/01_policy_gradient.ipynb"
    assert f"](https://colab.research.google.com/github/{REPOSITORY}/blob/{TAG}/{path})" in lines[2]
    assert f"[`{path}`](https://github.com/{REPOSITORY})" in lines[2]


def test_minutes_and_memory_are_those_of_the_run():
    table = measured(Lesson("x", 2, "y"), RUN)
    assert cells(table) == ["●●○○○", "3", "not measured", "1.3 GB"]
    assert table.endswith("Minutes and memory: one run of all cells on CPU Test, 2026-01-31.")


@pytest.mark.parametrize(("seconds", "minutes"), [(0, "under 1"), (59, "under 1"), (60, "1"), (89, "1"), (91, "2")])
def test_less_than_a_minute_is_not_rounded_to_none(seconds, minutes):
    assert cells(measured(Lesson("x", 1, "y"), RUN | {"seconds": seconds}))[1] == minutes


def test_a_notebook_that_has_not_run_says_so_and_claims_nothing():
    table = measured(Lesson("x", 5, "y"), None)
    assert cells(table) == ["●●●●●", "not run yet", "not measured", "not run yet"] and "Minutes and memory" not in table


def test_a_notebook_that_is_not_listed_is_refused():
    with pytest.raises(
        ValueError, match=r"99_more is not part of the course yet: add it to COURSE in rlcourse/course/dev"
    ):
        header("99_more", "notebooks", RUN)


def test_the_course_is_numbered_from_0_and_its_difficulties_are_1_to_5():
    assert [name[:3] for name in COURSE] == [f"{i:02}_" for i in range(len(COURSE))]
    assert all(1 <= lesson.difficulty <= 5 and lesson.title and lesson.holds for lesson in COURSE.values())
