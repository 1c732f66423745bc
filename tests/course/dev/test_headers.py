"""The first cell of a notebook: title, badge, difficulty, the reader's minutes, and those and the memory of its run."""

import nbformat
import pytest

from rlcourse.course import REPOSITORY, TAG
from rlcourse.course.dev.headers import Lesson, header, measured, reading_minutes, stated_minutes

RUN = {"seconds": 200, "peak_memory_bytes": 1_260_000_000, "device": "CPU Test", "date": "2026-01-31"}


def notebook(*cells, name="01_policy_gradient", kind="notebooks"):
    """A notebook with these cells behind its first two, which nobody reads."""
    first = [nbformat.v4.new_markdown_cell("header " * 3000), nbformat.v4.new_code_cell("install\n" * 300)]
    made = nbformat.v4.new_notebook(cells=[*first, *cells])
    made.metadata["rlcourse"] = {"name": name, "kind": kind}
    return made


def code(lines: int, folded: bool = False):
    cell = nbformat.v4.new_code_cell("x = 1\n\n" * lines)
    cell.metadata["jupyter"] = {"source_hidden": True} if folded else {}
    return cell


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
    lines = header(notebook(kind=kind), RUN).splitlines()
    assert lines[0] == title
    path = f"{kind}/01_policy_gradient.ipynb"
    assert f"](https://colab.research.google.com/github/{REPOSITORY}/blob/{TAG}/{path})" in lines[2]
    assert f"[`{path}`](https://github.com/{REPOSITORY})" in lines[2]


def test_minutes_and_memory_are_those_of_the_run():
    table = measured(Lesson("x", 2, "y"), RUN, 35, "read")
    assert cells(table) == ["●●○○○", "35", "3", "not measured", "1.3 GB"] and "minutes to read" in table
    assert table.endswith("Run time and memory: one run of all cells on CPU Test, 2026-01-31.")


@pytest.mark.parametrize(("seconds", "minutes"), [(0, "under 1"), (59, "under 1"), (60, "1"), (89, "1"), (91, "2")])
def test_less_than_a_minute_is_not_rounded_to_none(seconds, minutes):
    assert cells(measured(Lesson("x", 1, "y"), RUN | {"seconds": seconds}, 5, "read"))[2] == minutes


def test_reading_takes_time_for_words_and_for_code_in_view_but_not_for_what_is_folded():
    words = nbformat.v4.new_markdown_cell("word " * 750)  # five minutes
    assert reading_minutes(notebook(words)) == 5
    assert reading_minutes(notebook(words, code(60))) == 10  # five more; empty lines are no lines
    assert reading_minutes(notebook(words, code(61))) == 15
    assert reading_minutes(notebook(words, code(500, folded=True))) == 5


def test_an_exercise_takes_the_minutes_that_its_questions_state():
    text = nbformat.v4.new_markdown_cell("## q1 · One\n\n●●○○○ · 10 minutes\n\nIt took 99 minutes.")
    other = nbformat.v4.new_markdown_cell("## q2 · Two\n\n●●●●○ · 25 minutes")
    made = notebook(text, code(900), other, kind="exercises")
    assert stated_minutes(made) == 35
    assert cells("\n".join(header(made, RUN).splitlines()[4:]))[1] == "35" and "minutes to solve" in header(made, RUN)


def test_a_notebook_that_is_not_listed_is_refused():
    with pytest.raises(
        ValueError, match=r"99_more is not part of the course yet: add it to COURSE in rlcourse/course/dev"
    ):
        header(notebook(name="99_more"), RUN)
