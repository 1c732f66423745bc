"""Checks for lesson 15: several ranks, and weights that are some updates old."""

from rlcourse.course.checks.nb15.q1_divided_by import q1
from rlcourse.course.checks.nb15.q2_partners import q2
from rlcourse.course.checks.nb15.q3_progress import q3
from rlcourse.course.checks.nb15.q4_most_ranks import q4
from rlcourse.course.checks.nb15.q5_ages import q5

QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4, "q5": q5}
