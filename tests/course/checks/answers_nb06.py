"""Answers to the exercises of lesson 06."""

import functools

from answers import ruled, solved

from rlcourse.course.checks.nb06 import RULES, plan_by


# q4: self times
def by_stack(starts, ends, touching=False):
    """By the starts alone: of events that begin together a child may take its parent for its own child. touching: an
    event that begins where another ends is taken for its child."""
    own, stack = ends - starts, []
    for i in starts.argsort(stable=True).tolist():
        while stack and (ends[stack[-1]] < starts[i] if touching else ends[stack[-1]] <= starts[i]):
            stack.pop()
        if stack:
            own[stack[-1]] -= ends[i] - starts[i]
        stack.append(i)
    return own


WRONG = {
    "q2": {
        "rounded up": solved("nb06", "q2", lambda rows: rows + 1),
        "not rounded": (solved("nb06", "q2", lambda rows: rows + 0.5), "whole numbers"),
    },
    "q3": ruled(plan_by, RULES)
    | {
        "everything": (lambda seconds, phase, speedups, days, budget: days > -1, "days, there are"),
        "numbers": (solved("nb06", "q3", lambda plan: plan.nonzero()[:, 0]), "True or False for each"),
    },
    "q4": {"ties": by_stack, "touching counts as nested": functools.partial(by_stack, touching=True)},
}
