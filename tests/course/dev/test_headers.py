"""The minutes in the first cell of a notebook: the reader's, and those of its run."""

import nbformat
import pytest

from rlcourse.course.dev.headers import Lesson, measured, reading_minutes, stated_minutes


def notebook(*cells):
    """A notebook with these cells behind its first two, which nobody reads."""
    first = [nbformat.v4.new_markdown_cell("header " * 3000), nbformat.v4.new_code_cell("install\n" * 300)]
    return nbformat.v4.new_notebook(cells=[*first, *cells])


def code(lines: int, folded: bool = False):
    cell = nbformat.v4.new_code_cell("x = 1\n\n" * lines)
    cell.metadata["jupyter"] = {"source_hidden": True} if folded else {}
    return cell


@pytest.mark.parametrize(("seconds", "minutes"), [(0, "under 1"), (59, "under 1"), (60, "1"), (91, "2")])
def test_less_than_a_minute_is_not_rounded_to_none(seconds, minutes):
    run = {"seconds": seconds, "peak_memory_bytes": 1_260_000_000, "device": "CPU Test", "date": "2026-01-31"}
    assert f"| {minutes} | not measured | 1.3 GB |" in measured(Lesson("x", 1, "y"), run, 5, "read")


def test_reading_takes_time_for_words_and_for_code_in_view_but_not_for_what_is_folded():
    words = nbformat.v4.new_markdown_cell("word " * 750)  # five minutes
    assert reading_minutes(notebook(words)) == 5
    assert reading_minutes(notebook(words, code(60))) == 10  # five more; empty lines are no lines
    assert reading_minutes(notebook(words, code(61))) == 15
    assert reading_minutes(notebook(words, code(500, folded=True))) == 5


def test_an_exercise_takes_the_minutes_that_its_questions_state():
    text = nbformat.v4.new_markdown_cell("## q1 · One\n\n●●○○○ · 10 minutes\n\nIt took 99 minutes.")
    other = nbformat.v4.new_markdown_cell("## q2 · Two\n\n●●●●○ · 25 minutes")
    assert stated_minutes(notebook(text, code(900), other)) == 35
