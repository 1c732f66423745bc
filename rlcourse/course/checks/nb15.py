"""Checks of lesson 15: several ranks, and weights that are some updates old."""

import itertools
import math
from collections import Counter
from fractions import Fraction

import torch
from torch import Tensor

from rlcourse.course.checks import Question, between, draw

q1 = Question("q1", "divided_by", hint="Which six vectors could a colleague have? Which of them is this one's?")
RIGHT, OWN_MEANS, NOT_AVERAGED, NOT_SENT, ROWS, TWICE = range(6)


def vector(way: int, sums: Tensor, tokens: list[int], rows: list[int], mistake: str = "") -> Tensor:
    """What a colleague of that kind has: [d]."""
    counted = rows if mistake == "rows for tokens" else tokens
    total, means = sum(sums), sum(own / count for own, count in zip(sums, counted, strict=True))
    right = total / sum(counted)
    others = means / len(sums), means, sums[0] / counted[0], total / sum(rows), right / len(sums)
    return [right, *others][way]  # in the order of their numbers


@q1.expects({
    "last": "Where two ways give the same vector, the lower number is asked for.",
    "rows for tokens": "You took rows where tokens are meant: the loss is a mean over tokens.",
}, parts={"the list of faults": None})  # fmt: skip
def judged(sums: Tensor, tokens: Tensor, rows: Tensor, found: Tensor, mistake: str = "") -> list[int]:
    """The lowest number that fits, for each row of `found`."""
    vectors, numbers = [vector(way, sums, tokens.tolist(), rows.tolist(), mistake) for way in range(6)], []
    for one in found:
        fits = [way for way, other in enumerate(vectors) if (one - other).norm() < 1e-3 * other.norm()] or [0]
        numbers.append(fits[-1 if mistake == "last" else 0])
    return numbers


def check_ways(f, ranks: int, *ways: int, tokens: list[int] | None = None) -> None:
    tokens = tokens or (100 + 20 * torch.randperm(40)[:ranks] + draw(0, 9)).tolist()
    rows = torch.randperm(30)[:ranks].add(1).tolist()
    sums = torch.randn(ranks, 40, dtype=torch.float64) * 30
    # own means are right in the first number, which by itself does not tell
    sums[:, 0] = torch.tensor(tokens) * draw(20, 40) / max(tokens)
    found = torch.stack([vector(ways[i], sums, tokens, rows) for i in torch.randperm(len(ways))])
    found = found * (1 + 1e-6 * torch.randn(found.shape, dtype=torch.float64))  # sums taken in another order
    q1.check(f, sums, torch.tensor(tokens), torch.tensor(rows), found)


q1.case("own means, and nothing sent, on two ranks")(lambda f: check_ways(f, 2, OWN_MEANS, RIGHT, NOT_SENT, OWN_MEANS))
q1.case("all of them")(lambda f: check_ways(f, draw(3, 6), *range(6), *range(6)))


@q1.case("equally many tokens on each rank")
def _(f):
    ranks = draw(2, 4)
    check_ways(f, ranks, OWN_MEANS, NOT_AVERAGED, OWN_MEANS, TWICE, tokens=[draw(50, 90)] * ranks)


q2 = Question("q2", "partners", hint="With two ranks one round is enough. What do four ranks know after that round?")


def check_plan(f, machines: int, of_each: int) -> None:
    """terms[i, j]: how often rank i has rank j's numbers in its sum."""
    names = torch.randperm(90)[:machines] + 5
    machine = names.repeat_interleave(of_each)[torch.randperm(machines * of_each)]  # of each rank, in no order
    size, rounds = len(machine), (machines * of_each).bit_length() - 1
    plan, own = f(machine), torch.arange(size)
    if not isinstance(plan, Tensor) or plan.dtype != torch.int64 or plan.dim() != 2 or plan.shape[1] != size:
        raise AssertionError(f"the plan should be an int64 tensor [rounds, {size}]")
    assert len(plan) == rounds, f"{size} ranks need {rounds} rounds, and the plan has {len(plan)}"
    assert not ((plan < 0) | (plan >= size)).any(), f"partners are ranks, 0 to {size - 1}"
    terms, across = torch.eye(size, dtype=torch.long), 0
    for number, partner in enumerate(plan):
        assert not (partner == own).any(), f"in round {number} a rank swaps with itself"
        assert torch.equal(partner[partner], own), f"in round {number} a rank's partner has another partner"
        terms = terms + terms[partner]
        across += int((machine[partner] != machine).any())
    for rank, term in (terms != 1).nonzero().tolist():
        how = "more than once in its sum" if terms[rank, term] > 1 else "not in its sum"
        raise AssertionError(f"in the end rank {rank} has the numbers of rank {term} {how}")
    enough = machines.bit_length() - 1
    assert across <= enough, f"{across} rounds go between machines, and {enough} are enough"


PLANS = {  # case: machines and ranks of each
    "two machines with two ranks each": [(2, 2)] * 4,  # a lucky order proves nothing
    "one machine, and machines with one rank each": [(1, 4), (1, 8), (4, 1), (8, 1)],
    "several machines": [(2, 4), (2, 8), (4, 4), (4, 2), (8, 2), (4, 8)],
}
q2.cases_of(PLANS)(lambda f, plans: [check_plan(f, *sizes) for sizes in plans])

q3 = Question("q3", "progress", hint="Which rank can take the next step now, and which others must join?", seconds=20)
COMPUTE, SEND, RECEIVE, ALL_REDUCE = range(4)
Program = list[tuple[int, int]]  # of a rank: kind and peer of each step


@q3.expects({
    "buffered": "Your sends do not wait: here a send ends when its receiver has come to receive.",
    "any receive": "A receive takes from the rank that it names, not from anybody who sends.",
    "some": "An all-reduce waits for all ranks, not for some of them.",
    "all or nothing": "A rank that hangs has still done what comes before.",
}, parts={"the steps done": None})  # fmt: skip
def reached(kinds: Tensor, peers: Tensor, mistake: str = "") -> list[int]:
    """Steps done by each rank: a step is done if what it is matched with exists, and all steps before either are done.
    The k-th send of a to b is matched with the k-th receive of b from a, the k-th all-reduce with those of all
    ranks."""
    ranks, length = kinds.shape
    together: dict[tuple, list[tuple[int, int]]] = {}  # steps that happen at once
    for rank, program in enumerate(kinds.tolist()):
        counts: Counter = Counter()
        for at, kind in enumerate(program):
            event: tuple = {ALL_REDUCE: ("all",)}.get(kind, (rank, at))
            if kind in (SEND, RECEIVE):
                sender, receiver = (rank, int(peers[rank, at]))[:: 1 if kind == SEND else -1]
                event = ("message", 0 if mistake == "any receive" else sender, receiver)
            counts[kind, event] += 1
            together.setdefault((*event, "time", counts[kind, event]), []).append((rank, at))
    needed = {"message": 2, "all": 2 if mistake == "some" else ranks}
    done = [[False] * length for _ in range(ranks)]
    for _ in range(kinds.numel()):
        for event, steps in together.items():
            complete = len(steps) >= needed.get(event[0], 1) and all(all(done[rank][:at]) for rank, at in steps)
            for rank, at in steps:
                own = mistake == "buffered" and kinds[rank, at] == SEND and all(done[rank][:at])
                done[rank][at] |= complete or own
    found = [sum(steps) for steps in done]
    return [0] * ranks if mistake == "all or nothing" and min(found) < length else found


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


def check_programs(f, *programs: Program) -> None:
    """Ranks get other numbers, and all programs the same length."""
    new = torch.randperm(len(programs)).tolist()
    length = max(map(len, programs)) + draw(0, 2)
    kinds, peers = torch.zeros(2, len(programs), length, dtype=torch.long)
    for rank, program in enumerate(programs):
        for at, (kind, peer) in enumerate(program):
            kinds[new[rank], at] = kind
            peers[new[rank], at] = new[peer] if kind in (SEND, RECEIVE) else 0
    q3.check(f, kinds, peers)


q3.case("two ranks: a message, and two that both send first")(lambda f: [
    check_programs(f, [*waits(0, 2), (SEND, 1), (RECEIVE, 1)], [(RECEIVE, 0), (COMPUTE, 0), (SEND, 0)]),
    check_programs(f, *([*waits(1, 2), (SEND, peer), (RECEIVE, peer)] for peer in (1, 0))),
])  # fmt: skip


@q3.case("a ring in which all send first, and one in which one receives first")
def _(f):
    ranks = draw(3, 5)
    for polite in (0, 1):
        steps = [[(SEND, (rank + 1) % ranks), (RECEIVE, (rank - 1) % ranks)] for rank in range(ranks)]
        check_programs(f, *([*waits(1, 2), *(s[::-1] if rank < polite else s)] for rank, s in enumerate(steps)))


@q3.case("an all-reduce that one rank leaves out")
def _(f):
    programs = [[*waits(1, 3), (ALL_REDUCE, 0), *waits(1, 2), (ALL_REDUCE, 0)] for _ in range(draw(3, 4))]
    check_programs(f, *programs)
    check_programs(f, *programs[:-1], waits(1, 3))


@q3.case("programs with two steps swapped")
def _(f):
    swapped = [*waits(0, 2), (SEND, 0), (SEND, 1)]  # the other way round the first three end well
    others = [[(RECEIVE, 1), (RECEIVE, 2)], [(RECEIVE, 2), (SEND, 0)]]
    check_programs(f, *others, swapped, *([(SEND, peer), (RECEIVE, peer)] for peer in (4, 3)))
    for _ in range(12):
        check_programs(f, *random_programs(draw(3, 5), draw(6, 14), draw(0, 3)))


q4 = Question("q4", "most_ranks", hint="How long does a step take on P ranks? How long would it take without a loss?")


@q4.expects({
    "equal work": "You leave every rank all rows: here the rows are split.",
    "one way": "A ring goes round twice: once to add, once to copy.",
    "divisors": "The number of ranks has to divide the rows.",
    "no start": "The seconds that every step takes, however few its rows, do not get shorter.",
}, parts={"the number of ranks": None})  # fmt: skip
def most(rows, start_s, row_s, gradient_bytes, bytes_per_s, least, mistake: str = "") -> int:
    """By trying all, without rounding."""
    start, row, ring = Fraction(start_s), Fraction(row_s), Fraction(gradient_bytes) / Fraction(bytes_per_s)
    good = []
    for n in range(1, rows + 1):
        if rows % n and mistake != "divisors":
            continue
        work = row * (rows if mistake == "equal work" else Fraction(rows, n))
        share = Fraction((1 if mistake == "one way" else 2) * (n - 1), n)
        seconds = (start / n if mistake == "no start" else start) + work + ring * share
        if start + row * rows >= Fraction(least) * seconds * (1 if mistake == "equal work" else n):
            good.append(n)
    return good[-1]


def check_most(f, rows: tuple, start: tuple, ranks: tuple, above: tuple, free: bool = False) -> None:
    """The efficiency that is asked for is so many times that of `ranks` ranks. start, above: from where to where they
    are drawn; free: communication nearly is."""
    for n, size in itertools.product(rows, ranks):
        start_s, row_s = between(*start), between(0.002, 0.01)
        gradient, bytes_per_s = (10**6, 1e12) if free else (draw(10**8, 10**9), between(1e10, 5e10))
        seconds = start_s + row_s * n / size + 2 * (size - 1) / size * gradient / bytes_per_s
        given = n, start_s, row_s, gradient, bytes_per_s, (start_s + row_s * n) / (size * seconds) * between(*above)
        q4.check(f, *given)


q4.case("communication that is nearly free, and a bar that two ranks do not reach")(lambda f: [
    check_most(f, (64,), (0.05, 0.2), (2 ** draw(1, 2), 2 ** draw(3, 5)), (0.98, 0.98), free=True),
    check_most(f, (6 * draw(4, 9),), (0.5, 0.9), (2,), (1.01, 1.01)),
    check_most(f, (6 * draw(4, 9),), (0.5, 0.9), (3,), (0.99, 0.99)),
])  # fmt: skip
q4.case("both, and rows that many numbers divide")(
    lambda f: check_most(f, (96, 120, 180), (0.05, 0.2), (4, 6, 12), (0.9, 0.99))
)

q5 = Question("q5", "ages", hint="When does sampling of batch i begin? Which updates have ended by then?")


@q5.expects({
    "at the end": "Weights are taken when sampling begins, not when it ends.",
    "one more": "Batch i waits for update i - 1 - ahead: with ahead = 0 that is the update just before it.",
    "never waits": "Your sampler never waits for the trainer.",
    "updates": "That counts the updates that the sampler had, not those that it lacks.",
}, parts={"the ages": None})  # fmt: skip
def by_events(sample: Tensor, train: Tensor, ahead: int, mistake: str = "") -> list[int]:
    """By a clock that goes from event to event."""
    sample, train = sample.tolist(), train.tolist()
    ahead += {"one more": 1, "never waits": len(sample)}.get(mistake, 0)
    now, updates = 0.0, 0
    has: list[int] = []  # updates that were in the weights of each batch
    sampling = training = math.inf  # when they end
    queue: list[int] = []
    while updates < len(sample):
        if sampling == math.inf and len(has) < len(sample) and len(has) <= updates + ahead:
            sampling = now + sample[len(has)]
            has.append(updates)
        if training == math.inf and queue:
            training = now + train[queue.pop(0)]
        now = min(sampling, training)
        if training == now:
            updates, training = updates + 1, math.inf
        if sampling == now:
            queue.append(len(has) - 1)
            has[-1] = updates if mistake == "at the end" else has[-1]
            sampling = math.inf
    return has if mistake == "updates" else [i - h for i, h in enumerate(has)]


def check_ages(f, aheads: tuple[int, ...], sample: tuple[float, float], train: tuple[float, float]) -> None:
    """sample, train: from where to where the times are drawn, most of them low."""
    for ahead in aheads:
        times = [low + (high - low) * torch.rand(12, dtype=torch.float64) ** 3 for low, high in (sample, train)]
        q5.check(f, *times, ahead)


q5.case("a slow trainer: the sampler runs ahead as far as it may; a slow sampler")(
    lambda f: [check_ages(f, (1, draw(2, 3)), (1, 2), (4, 6)), check_ages(f, (draw(2, 4),), (6, 9), (4, 8))]
)
q5.case("not ahead at all, then one batch")(lambda f: check_ages(f, (0, 1), (1, 5), (1, 5)))
q5.case("times that vary, some of them long")(lambda f: check_ages(f, (draw(1, 2), draw(3, 5)), (1, 15), (1, 6)))
