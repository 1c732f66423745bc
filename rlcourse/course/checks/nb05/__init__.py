"""Checks of exercises 05: how kind a verifier may be, the best of several checkpoints, which engine lied, and naming a
failure from its curves."""

from rlcourse.course.checks.nb05.q1_credit import q1
from rlcourse.course.checks.nb05.q2_best import q2
from rlcourse.course.checks.nb05.q3_engine import q3
from rlcourse.course.checks.nb05.q4_diagnosis import q4

QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4}
