"""Checks of the exercises of lesson 12: gradients without autograd, a ledger, a leak, weights that do not move, and a
kernel to mend. The kernel is compiled, which needs CuTe DSL, and runs in the interpreter.
"""

from rlcourse.course.checks.nb12.q1_wrong_gradient import q1
from rlcourse.course.checks.nb12.q2_rows_that_fit import q2
from rlcourse.course.checks.nb12.q3_gradients import q3
from rlcourse.course.checks.nb12.q4_spoiled import q4
from rlcourse.course.checks.nb12.q5_steps_to_move import q5
from rlcourse.course.checks.nb12.q6_mended import q6
from rlcourse.course.checks.nb12.q7_softmax_backward import q7

QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4, "q5": q5, "q6": q6}
KERNELS = {"q7": q7}
