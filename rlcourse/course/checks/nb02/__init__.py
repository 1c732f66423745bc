"""Checks of the exercises of lesson 02: a loss to mend, GAE across a tool, a bound, a KL penalty."""

from rlcourse.course.checks.nb02.q1_loss import q1
from rlcourse.course.checks.nb02.q2_gae import q2
from rlcourse.course.checks.nb02.q3_bound import q3
from rlcourse.course.checks.nb02.q4_kl import q4

QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4}
