"""Checks of the exercises of lesson 11: an auditor, an admission rule, a schedule that never ends, a probe of bits."""

from rlcourse.course.checks.nb11.q1_audit import q1
from rlcourse.course.checks.nb11.q2_admit import q2
from rlcourse.course.checks.nb11.q3_shortest import q3
from rlcourse.course.checks.nb11.q4_first_to_part import q4

QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4}
