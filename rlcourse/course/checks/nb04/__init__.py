"""Checks of the exercises of lesson 04: gradients to identify, groups to weigh, a loss to mend, a drift to compute. The
references are loops over single tokens and answers, in float64."""

from rlcourse.course.checks.nb04.q1_divisions import q1
from rlcourse.course.checks.nb04.q2_weights import q2
from rlcourse.course.checks.nb04.q3_loss import q3
from rlcourse.course.checks.nb04.q4_drift import q4

QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4}
