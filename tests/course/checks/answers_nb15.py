"""Answers to the exercises of lesson 15."""

import torch
from answers import ruled, solution


# q2: few rounds
def partners(machine, rule=""):
    order = machine.argsort(stable=True)
    if rule == "ranks as they are":
        order = torch.arange(len(machine))
    if rule == "machines first":  # in the low bits
        order = order.view(-1, int((machine == machine[0]).sum())).T.flatten()
    place = order.argsort()
    bits = 2 ** torch.arange(len(machine).bit_length() - 1)
    if rule == "one round":
        bits = bits[:1]
    if rule == "the same round":
        bits = bits[:1].expand(len(bits))
    found = order[place ^ bits[:, None]]
    if rule == "neighbours":
        return torch.stack([(torch.arange(len(machine)) + 1) % len(machine)] * len(bits))
    if rule == "itself":
        return torch.arange(len(machine)).expand(len(bits), -1).clone()
    return found.float() if rule == "floats" else found


RIGHT = {"q2": partners}

WRONG = {
    "q1": {
        "one number": lambda sums, tokens, rows, found: solution("nb15", "q1")(sums[:, :1], tokens, rows, found[:, :1])
    },
    "q2": ruled(
        partners,
        {
            "ranks as they are": "rounds go between machines",
            "one round": "rounds, and the plan has 1",
            "the same round": "more than once",
            "neighbours": "has another partner",
            "itself": "swaps with itself",
            "floats": "an int64 tensor",
        },
    ),
    "q5": {
        "one less": lambda sample, train, ahead: solution("nb15", "q5")(sample, train, max(0, ahead - 1)),
        "the bound": lambda sample, train, ahead: torch.arange(len(sample)).clamp(max=ahead),
    },
}
