"""Checks of lesson 14: cheats for three judges, inputs that no wrong program survives, a reward, optima by hand."""

from rlcourse.course.checks.nb14.q1_cheat import q1
from rlcourse.course.checks.nb14.q2_trial import q2
from rlcourse.course.checks.nb14.q3_reward import q3
from rlcourse.course.checks.nb14.q4_by_hand import q4

QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4}
