"""Checks of the exercises of lesson 03: whose log it is, a silent data set, a loss to mend, the mean of an estimate."""

from rlcourse.course.checks.nb03.q1_whose_log import q1
from rlcourse.course.checks.nb03.q2_silence import q2
from rlcourse.course.checks.nb03.q3_loss import q3
from rlcourse.course.checks.nb03.q4_gradients import q4

QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4}
