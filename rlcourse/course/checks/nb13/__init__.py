"""Checks for lesson 13: SFT and LoRA before RL."""

from rlcourse.course.checks.nb13.q1_diagnose import q1
from rlcourse.course.checks.nb13.q2_keep_apart import q2
from rlcourse.course.checks.nb13.q3_ranks import q3
from rlcourse.course.checks.nb13.q4_merge import q4
from rlcourse.course.checks.nb13.q5_steps_to_start import q5

QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4, "q5": q5}
