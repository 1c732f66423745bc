"""Answers to the exercises of lesson 06."""

import functools

from answers import half_mended, ruled, solution, solved

from rlcourse.course.checks.nb06 import (
    FREE_MISTAKES,
    PLANTED,
    RULES,
    SELF_MISTAKES,
    most_rows,
    own_times,
    plan_by,
    wrong_busy,
)


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
    "q1": half_mended(wrong_busy, PLANTED)
    | {
        "idle": (solved("nb06", "q1", lambda busy: 1 - busy), "idle share"),
        "seconds": (lambda *a: solution("nb06", "q1")(*a) * (a[3] - a[2]), "length of the window"),
        "summed": (
            lambda starts, ends, b, e: (ends.clamp(b, e) - starts.clamp(b, e)).sum() / (e - b),
            "added up the durations",
        ),
    },
    "q2": ruled(most_rows, FREE_MISTAKES, "wrong")
    | {
        "rounded up": solved("nb06", "q2", lambda rows: rows + 1),
        "not rounded": (solved("nb06", "q2", lambda rows: rows + 0.5), "a whole number"),
    },
    "q3": ruled(plan_by, RULES)
    | {
        "everything": (lambda seconds, phase, speedups, days, budget: days > -1, "days, there are"),
        "numbers": (solved("nb06", "q3", lambda plan: plan.nonzero()[:, 0]), "True or False for each"),
    },
    "q4": ruled(own_times, SELF_MISTAKES, "wrong")
    | {"ties": by_stack, "touching counts as nested": functools.partial(by_stack, touching=True)},
}
