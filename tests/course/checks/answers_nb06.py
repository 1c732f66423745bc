"""Answers to the exercises of lesson 06."""

from answers import solved

WRONG = {
    "q2": {
        "rounded up": solved("nb06", "q2", lambda rows: rows + 1),
        "not rounded": (solved("nb06", "q2", lambda rows: rows + 0.5), "whole numbers"),
    },
    "q3": {
        "everything": (lambda seconds, phase, speedups, days, budget: days > -1, "days, there are"),
        "numbers": (solved("nb06", "q3", lambda plan: plan.nonzero()[:, 0]), "True or False for each"),
    },
}
