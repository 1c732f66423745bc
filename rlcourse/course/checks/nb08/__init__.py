"""Checks of the exercises of lesson 08: six small kernels, the sectors of a warp, a layout without bank conflicts, a
kernel to mend, and one with shared memory.

The kernels are compiled, which needs CuTe DSL, and run in the interpreter; in a notebook then on a GPU as well, where
there is one.
"""

from rlcourse.course.checks.nb08.q1_to_q6_puzzles import q1, q2, q3, q4, q5, q6
from rlcourse.course.checks.nb08.q7_sectors import q7
from rlcourse.course.checks.nb08.q8_banks import q8
from rlcourse.course.checks.nb08.q9_relu import q9
from rlcourse.course.checks.nb08.q10_norm import q10

QUESTIONS = {"q7": q7, "q8": q8}
KERNELS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4, "q5": q5, "q6": q6, "q9": q9, "q10": q10}
