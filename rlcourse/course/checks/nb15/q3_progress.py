"""q3: how far programs of several ranks get."""

import torch

from rlcourse.course.checks import Question, compare, draw

q3 = Question("q3", "progress", hint="Which rank can take the next step now, and which others must join?", seconds=20)

COMPUTE, SEND, RECEIVE, ALL_REDUCE = range(4)

MISTAKES = {
    "buffered": "Your sends do not wait: here a send ends when its receiver has come to receive.",
    "any receive": "A receive takes from the rank that it names, not from anybody who sends.",
    "some": "An all-reduce waits for all ranks, not for some of them.",
    "all or nothing": "A rank that hangs has still done what stands before.",
}


def reached(kinds: list[list[int]], peers: list[list[int]], mistake: str = "") -> list[int]:
    """Steps done by each rank: a step is done if what it is matched with exists, and all steps before either are done.

    The k-th send of a to b is matched with the k-th receive of b from a, the k-th all-reduce with those of all ranks.
    """
    ranks, met = range(len(kinds)), {}
    for rank in ranks:
        counts: dict[tuple, int] = {}
        for at, (kind, peer) in enumerate(zip(kinds[rank], peers[rank], strict=True)):
            name: tuple = (rank, at)
            if kind in (SEND, RECEIVE):
                pair = (rank, peer) if kind == SEND else (peer, rank)
                if mistake == "any receive":
                    pair = (0, peer if kind == SEND else rank)
                key = (kind, *pair)
                counts[key] = counts.get(key, 0) + 1
                name = ("message", *pair, counts[key])
            elif kind == ALL_REDUCE:
                counts[("all",)] = counts.get(("all",), 0) + 1
                name = ("all", counts[("all",)])
            met.setdefault(name, []).append((rank, at, kind))
    event_of = {(rank, at): name for name, there in met.items() for rank, at, _ in there}
    known: dict[tuple, bool] = {}

    def happens(name: tuple) -> bool:
        if name not in known:
            known[name] = False  # asked for while it is being found out: it waits for itself
            there = met[name]
            complete = {"message": 2, "all": 2 if mistake == "some" else len(kinds)}.get(name[0], 1) <= len(there)
            known[name] = complete and all(at == 0 or done(rank, at - 1) for rank, at, _ in there)
        return known[name]

    def done(rank: int, at: int) -> bool:
        if mistake == "buffered" and kinds[rank][at] == SEND:
            return at == 0 or done(rank, at - 1)
        return happens(event_of[rank, at])

    found = []
    for rank in ranks:
        steps = 0
        while steps < len(kinds[rank]) and done(rank, steps):
            steps += 1
        found.append(steps)
    if mistake == "all or nothing" and min(found) < len(kinds[0]):
        return [0] * len(kinds)
    return found


def check_programs(f, programs: list[list[tuple[int, int]]]) -> None:
    """programs: of each rank (kind, peer) of each step. Ranks get other numbers, and all programs the same length."""
    new = torch.randperm(len(programs)).tolist()
    length = max(map(len, programs)) + draw(0, 2)
    kinds, peers = (torch.zeros(len(programs), length, dtype=torch.long) for _ in range(2))
    for rank, program in enumerate(programs):
        for at, (kind, peer) in enumerate(program):
            kinds[new[rank], at] = kind
            peers[new[rank], at] = new[peer] if kind in (SEND, RECEIVE) else 0
    expected = torch.tensor(reached(kinds.tolist(), peers.tolist()))
    mistakes = {s: torch.tensor(reached(kinds.tolist(), peers.tolist(), m)) for m, s in MISTAKES.items()}
    compare(f(kinds, peers), expected, mistakes, what="the steps done")


def waits(count: int) -> list[tuple[int, int]]:
    return [(COMPUTE, 0)] * count


def random_programs(ranks: int, events: int, swaps: int) -> list[list[tuple[int, int]]]:
    """Programs that end well, but for so many swaps of neighbouring steps."""
    programs: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for _ in range(events):
        what = draw(0, 5)
        if what == 0:
            for program in programs:
                program.append((ALL_REDUCE, 0))
        elif what == 1:
            programs[draw(0, ranks - 1)].append((COMPUTE, 0))
        else:
            a, b = torch.randperm(ranks)[:2].tolist()
            programs[a].append((SEND, b))
            programs[b].append((RECEIVE, a))
    for _ in range(swaps):
        program = programs[draw(0, ranks - 1)]
        if len(program) > 1:
            at = draw(0, len(program) - 2)
            program[at : at + 2] = program[at + 1], program[at]
    return programs


@q3.case("two ranks: a message, and two that both send first")
def _(f):
    check_programs(f, [[*waits(draw(0, 2)), (SEND, 1), (RECEIVE, 1)], [(RECEIVE, 0), *waits(1), (SEND, 0)]])
    both = [[*waits(draw(1, 2)), (SEND, 1), (RECEIVE, 1)], [*waits(draw(1, 2)), (SEND, 0), (RECEIVE, 0)]]
    check_programs(f, both)


@q3.case("a ring in which all send first, and one in which one receives first")
def _(f):
    ranks = draw(3, 5)
    for polite in (0, 1):
        ring = []
        for rank in range(ranks):
            steps = [(SEND, (rank + 1) % ranks), (RECEIVE, (rank - 1) % ranks)]
            ring.append([*waits(draw(1, 2)), *(steps[::-1] if rank < polite else steps)])
        check_programs(f, ring)


@q3.case("an all-reduce that one rank leaves out")
def _(f):
    ranks = draw(3, 4)
    programs = [[*waits(draw(1, 3)), (ALL_REDUCE, 0), *waits(1), (ALL_REDUCE, 0)] for _ in range(ranks)]
    programs[draw(0, ranks - 1)] = waits(draw(1, 3))
    check_programs(f, programs)
    check_programs(f, [[*waits(draw(1, 2)), (ALL_REDUCE, 0), *waits(draw(1, 2)), (ALL_REDUCE, 0)] for _ in range(3)])


@q3.case("programs with two steps swapped")
def _(f):
    swapped = [*waits(draw(0, 2)), (SEND, 0), (SEND, 1)]  # the other way round the first three end well
    others = [[(RECEIVE, 1), (RECEIVE, 2)], [(RECEIVE, 2), (SEND, 0)]]
    check_programs(f, [*others, swapped, *([(SEND, peer), (RECEIVE, peer)] for peer in (4, 3))])
    for _ in range(12):
        check_programs(f, random_programs(draw(3, 5), draw(6, 14), draw(0, 3)))
