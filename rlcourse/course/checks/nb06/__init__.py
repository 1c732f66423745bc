"""Checks of the exercises of lesson 06: busy fraction, free rows, a plan within a budget, self time."""

from rlcourse.course.checks.nb06.q1_busy import q1
from rlcourse.course.checks.nb06.q2_rows import q2
from rlcourse.course.checks.nb06.q3_plan import q3
from rlcourse.course.checks.nb06.q4_self_time import q4

QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4}
