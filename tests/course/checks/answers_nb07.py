"""Answers to the exercises of lesson 07."""

from rlcourse.course.checks.nb07 import draw_flat


# q1: a tape
def tape_with_choices(eos, pad, limit):
    return [
        ("add", "next", "position", 1),
        ("choose", "position", "ended", "position", "next"),
        ("choose", "token", "ended", pad, "drawn"),
        ("less", "fits", "position", limit),
        ("choose", "full", "fits", 0, 1),
        ("equal", "end", "drawn", eos),
        ("or", "now", "end", "full"),
        ("choose", "ended", "ended", 1, "now"),
    ]


def tape_without(*left_out, **changed):
    """The first tape without some instructions (by number), or with others in their place."""

    def function(eos, pad, limit):
        tape = [changed.get(f"_{i}", line) for i, line in enumerate(tape_with_choices(eos, pad, limit))]
        return [line for i, line in enumerate(tape) if i not in left_out]

    return function


def in_another_order(*order):
    return lambda eos, pad, limit: [tape_with_choices(eos, pad, limit)[i] for i in order]


RIGHT = {"q1": tape_with_choices}
WRONG = {
    "q1": {
        "no padding": (tape_without(_2=("add", "token", "drawn", 0)), "your tape makes"),
        "moves on": tape_without(1, _0=("add", "position", "position", 1)),
        "forgets": tape_without(_7=("add", "ended", "now", 0)),
        "no limit": tape_without(3, 4, _6=("add", "now", "end", 0)),
        "limit too early": in_another_order(3, 4, 0, 1, 2, 5, 6, 7),
        "flag before token": in_another_order(0, 1, 3, 4, 5, 6, 7, 2),
        "no end": tape_without(5, 6, _7=("or", "ended", "ended", "full")),
        "nothing": lambda eos, pad, limit: [],
        "unknown": (lambda eos, pad, limit: [("if", "ended", 0)], "unknown operation"),
        "unwritten": (tape_without(0), "nothing that has been written"),
        "a source too few": (lambda eos, pad, limit: [("add", "position", 1)], "needs 2 sources"),
    },
    "q2": {
        "probability": lambda *a: (draw_flat(*a)[0], draw_flat(*a)[1].exp()),
        "tokens alone": (lambda *a: draw_flat(*a)[0], "should be 2 tensors"),
    },
    "q3": {"the time": (lambda lengths, host, fixed, row, most: 12.5, "whole numbers")},
}
