"""Checks of the exercises of lesson 07: a static cache, a tape without an if, a draw to mend, a number of slots."""

from rlcourse.course.checks.nb07.q1_cache import q1
from rlcourse.course.checks.nb07.q2_tape import q2
from rlcourse.course.checks.nb07.q3_draw import q3
from rlcourse.course.checks.nb07.q4_slots import q4

QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4}
