"""Answers to the exercises of lesson 11."""

from answers import solved


# q1: an auditor
def free_at_first_drop(trace, number):
    """The manager's own mistake: a block is nobody's once one table has dropped it."""
    held = set()
    for place, (kind, _, blocks) in enumerate(trace):
        if (kind == "give") == bool(held & set(blocks)) and kind != "write":
            return place
        held = held | set(blocks) if kind == "give" else held - set(blocks) if kind == "drop" else held
    return -1


WRONG = {
    "q1": {"free at the first drop": free_at_first_drop},
    "q2": {"one more": solved("nb11", "q2", lambda count: count + 1)},
    "q3": {"three quarters": lambda c, r: 3 * c // 4},
    "q4": {"the call before": solved("nb11", "q4", lambda places: (places - 1).clamp(min=0))},
}
