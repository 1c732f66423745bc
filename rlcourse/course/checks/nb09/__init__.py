"""Checks of the exercises of lesson 09: merging outputs, splits, operands of a tensor core, two causes, a kernel."""

from rlcourse.course.checks.nb09.q1_merge import q1
from rlcourse.course.checks.nb09.q2_splits import q2
from rlcourse.course.checks.nb09.q3_registers import q3
from rlcourse.course.checks.nb09.q4_two_changes import q4
from rlcourse.course.checks.nb09.q5_attention import q5

QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4}
KERNELS = {"q5": q5}
