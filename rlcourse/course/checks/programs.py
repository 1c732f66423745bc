"""Programs of several ranks: how far each gets, and some that are drawn."""

from collections import Counter

import torch
from torch import Tensor

from rlcourse.course.checks import draw

COMPUTE, SEND, RECEIVE, ALL_REDUCE = range(4)
Program = list[tuple[int, int]]  # of a rank: kind and peer of each step


def reached(kinds: Tensor, peers: Tensor, mistake: str = "") -> list[int]:
    """Steps done by each rank: a step is done if what it is matched with exists, and all steps before either are done.
    The k-th send of a to b is matched with the k-th receive of b from a, the k-th all-reduce with those of all
    ranks."""
    kinds, peers = kinds.tolist(), peers.tolist()
    met: dict[tuple, list[tuple[int, int]]] = {}  # steps that happen together
    for rank, program in enumerate(kinds):
        counts: Counter = Counter()
        for at, (kind, peer) in enumerate(zip(program, peers[rank], strict=True)):
            event: tuple = (rank, at)
            if kind in (SEND, RECEIVE):
                pair = (rank, peer) if kind == SEND else (peer, rank)
                event = ("message", *pair) if mistake != "any receive" else ("message", 0, pair[1])
            elif kind == ALL_REDUCE:
                event = ("all",)
            counts[kind, event] += 1
            met.setdefault((*event, "time", counts[kind, event]), []).append((rank, at))
    event_of = {step: event for event, steps in met.items() for step in steps}
    needed = {"message": 2, "all": 2 if mistake == "some" else len(kinds)}
    known: dict[tuple, bool] = {}

    def happens(event: tuple) -> bool:
        if event not in known:
            known[event] = False  # asked for while it is being found out: it waits for itself
            complete = len(met[event]) >= needed.get(event[0], 1)
            known[event] = complete and all(at == 0 or done(rank, at - 1) for rank, at in met[event])
        return known[event]

    def done(rank: int, at: int) -> bool:
        if mistake == "buffered" and kinds[rank][at] == SEND:
            return at == 0 or done(rank, at - 1)
        return happens(event_of[rank, at])

    length = len(kinds[0])
    found = [next((t for t in range(length) if not done(rank, t)), length) for rank in range(len(kinds))]
    return [0] * len(kinds) if mistake == "all or nothing" and min(found) < length else found


def waits(low: int, high: int) -> Program:
    return [(COMPUTE, 0)] * draw(low, high)


def random_programs(ranks: int, events: int, swaps: int) -> list[Program]:
    """Programs that end well, but for so many swaps of neighbouring steps."""
    programs: list[Program] = [[] for _ in range(ranks)]
    for _ in range(events):
        what = draw(0, 5)
        a, b = torch.randperm(ranks)[:2].tolist()
        if what == 0:
            for program in programs:
                program.append((ALL_REDUCE, 0))
        elif what == 1:
            programs[a].append((COMPUTE, 0))
        else:
            programs[a].append((SEND, b))
            programs[b].append((RECEIVE, a))
    for _ in range(swaps):
        program = programs[draw(0, ranks - 1)]
        at = draw(0, max(len(program) - 2, 0))
        program[at : at + 2] = program[at : at + 2][::-1]
    return programs
