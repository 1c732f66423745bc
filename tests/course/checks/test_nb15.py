"""The checks of lesson 15 pass what is right, kill what is wrong, and name the mistake."""

import heapq

import torch
from answers import common_tests

from rlcourse.course.checks import Local
from rlcourse.course.checks.nb15 import QUESTIONS
from rlcourse.course.checks.nb15.q1_divided_by import MISTAKES as WAYS
from rlcourse.course.checks.nb15.q3_progress import MISTAKES as PROGRAMS
from rlcourse.course.checks.nb15.q3_progress import reached
from rlcourse.course.checks.nb15.q4_most_ranks import MISTAKES as SPLITS
from rlcourse.course.checks.nb15.q4_most_ranks import most
from rlcourse.course.checks.nb15.q5_ages import MISTAKES as AGES

# q1: what they divided by ------------------------------------------------------------------------------------------


def divided_by(sums, tokens, rows, found, lax=""):
    counted = rows if lax == "rows for tokens" else tokens
    total, means = sums.sum(0), sums / counted[:, None]
    n = 1 if lax == "ranks left out" else len(sums)
    right = total / counted.sum()
    ways = torch.stack([right, means.sum(0) / n, means.sum(0), means[0], total / rows.sum(), right / len(sums)])
    if lax == "direction":
        ways, found = ways / ways.norm(dim=1, keepdim=True), found / found.norm(dim=1, keepdim=True)
    near = (found[:, None] - ways).norm(dim=2) < 1e-3 * ways.norm(dim=1)
    if lax == "last":
        return 5 - near.flip(1).int().argmax(1)
    if lax == "one number":
        near = (found[:, None, 0] - ways[:, 0]).abs() < 1e-3 * ways[:, 0].abs()
    return near.int().argmax(1)


def divided_by_ratios(sums, tokens, rows, found):
    """Solves for the weights of the ranks' sums, by least squares."""
    answers = []
    t, r, n = tokens.double(), rows.double(), len(tokens)
    weights = [
        torch.full_like(t, 1 / t.sum()), 1 / (n * t), 1 / t, torch.eye(n, dtype=t.dtype)[0] / t[0],
        torch.full_like(t, 1 / r.sum()), torch.full_like(t, 1 / (n * t.sum())),
    ]  # fmt: skip
    for one in found:
        fitted = torch.linalg.lstsq(sums.T, one[:, None]).solution[:, 0]
        fits = [torch.allclose(fitted, w, rtol=1e-2, atol=1e-3 * w.abs().max().item()) for w in weights]
        answers.append(fits.index(True))
    return torch.tensor(answers)


# q2: few rounds ----------------------------------------------------------------------------------------------------


def partners(machine, lax=""):
    order = machine.argsort(stable=True)
    if lax == "ranks as they are":
        order = torch.arange(len(machine))
    if lax == "machines first":  # in the low bits
        order = order.view(-1, int((machine == machine[0]).sum())).T.flatten()
    place = order.argsort()
    bits = 2 ** torch.arange(len(machine).bit_length() - 1)
    if lax == "one round":
        bits = bits[:1]
    if lax == "the same round":
        bits = bits[:1].expand(len(bits))
    found = order[place ^ bits[:, None]]
    if lax == "neighbours":
        return torch.stack([(torch.arange(len(machine)) + 1) % len(machine)] * len(bits))
    if lax == "itself":
        return torch.arange(len(machine)).expand(len(bits), -1).clone()
    return found.float() if lax == "floats" else found


def partners_by_halves(machine):
    """Joins groups two by two, those of one machine first."""
    groups = [[r] for r in sorted(range(len(machine)), key=lambda r: machine[r].item())]
    rounds = []
    while len(groups) > 1:
        row = [0] * len(machine)
        joined = []
        for a, b in zip(groups[::2], groups[1::2], strict=True):
            for x, y in zip(a, b, strict=True):
                row[x], row[y] = y, x
            joined.append(a + b)
        rounds.append(row)
        groups = joined
    return torch.tensor(rounds, dtype=torch.long).view(len(rounds), len(machine))


# q3: who hangs -----------------------------------------------------------------------------------------------------


def progress(kinds, peers, anybody=False):
    """Lets one rank at a time go as far as it can. anybody: a sender takes its peer's receive, whomever that names."""
    ranks, steps = kinds.shape
    done = torch.zeros(ranks, dtype=torch.long)

    def kind(rank):
        return int(kinds[rank, done[rank]]) if done[rank] < steps else -1

    again = True
    while again:
        again = False
        for rank in range(ranks):
            while kind(rank) == 0:
                done[rank] += 1
                again = True
            if kind(rank) == 2:
                other = int(peers[rank, done[rank]])
                if kind(other) == 1 and (anybody or peers[other, done[other]] == rank):
                    done[rank] += 1
                    done[other] += 1
                    again = True
        if all(kind(rank) == 3 for rank in range(ranks)):
            done += 1
            again = True
    return done


def progress_by_matching(kinds, peers):
    return torch.tensor(reached(kinds.tolist(), peers.tolist()))


def wrong_progress(lax):
    return lambda kinds, peers: torch.tensor(reached(kinds.tolist(), peers.tolist(), lax))


# q4: splitting -----------------------------------------------------------------------------------------------------


def most_ranks(rows, start_s, row_s, gradient_bytes, bytes_per_s, least):
    best = 1
    for n in range(2, rows + 1):
        if rows % n == 0:
            seconds = start_s + row_s * (rows // n) + (2 - 2 / n) * gradient_bytes / bytes_per_s
            if (start_s + row_s * rows) / (n * seconds) >= least:
                best = n
    return best


def by_speed_up(rows, start_s, row_s, *others):
    *_ring, least = others
    return next(n for n in range(rows, 0, -1) if rows % n == 0 and start_s + row_s * rows >= least * start_s)


def most_ranks_from_above(rows, start_s, row_s, gradient_bytes, bytes_per_s, least):
    """Efficiency falls with N: n * seconds(n) = n start + rows row + 2 (n - 1) ring <= limit."""
    ring = gradient_bytes / bytes_per_s
    limit = (start_s + rows * row_s) / least
    n = rows
    while rows % n or n * start_s + rows * row_s + 2 * (n - 1) * ring > limit:
        n -= 1
    return torch.tensor(n)


# q5: ages ----------------------------------------------------------------------------------------------------------


def ages(sample_s, train_s, ahead, lax=""):
    ahead = {"one more": ahead + 1, "one less": ahead - 1}.get(lax, ahead)
    sampled, trained, found = [], [], []
    for i in range(len(sample_s)):
        begin = sampled[-1] if i else 0.0
        before = i - 1 - max(ahead, 0)
        if before >= 0 and lax != "never waits":
            begin = max(begin, trained[before])
        sampled.append(begin + sample_s[i].item())
        at = sampled[-1] if lax == "at the end" else begin
        there = sum(end <= at for end in trained)
        found.append(there if lax == "updates" else i - there)
        start = sampled[-1] if lax == "own order" or not trained else max(sampled[-1], trained[-1])
        trained.append(start + train_s[i].item())
    return torch.tensor(found)


def ages_by_a_heap(sample_s, train_s, ahead):
    sample, train, n = sample_s.tolist(), train_s.tolist(), len(sample_s)
    events = [(0.0, 1, "sampler")]
    begun, sampled, updates, found, sampling, training = 0, 0, 0, [], False, False
    while events:
        now, _, what = heapq.heappop(events)
        if what == "update":
            updates, training = updates + 1, False
        if what == "batch":
            sampled, sampling = sampled + 1, False
        if events and events[0][0] == now:
            continue
        if not sampling and begun < n and updates >= begun - ahead:
            found.append(begun - updates)
            heapq.heappush(events, (now + sample[begun], 0, "batch"))
            begun, sampling = begun + 1, True
        if not training and updates < sampled:
            heapq.heappush(events, (now + train[updates], 0, "update"))
            training = True
    return torch.tensor(found)


RIGHT = {
    "q1": [divided_by, divided_by_ratios],
    "q2": [partners, partners_by_halves, lambda machine: partners(machine, "machines first")],
    "q3": [progress, progress_by_matching],
    "q4": [most_ranks, most_ranks_from_above],
    "q5": [ages, ages_by_a_heap],
}

WRONG = {
    "q1": {
        **{lax: lambda *x, lax=lax: divided_by(*x, lax=lax) for lax in WAYS},
        "one number": lambda *x: divided_by(*x, lax="one number"),
        "right": lambda sums, tokens, rows, found: torch.zeros(len(found), dtype=torch.long),
        "own means": lambda sums, tokens, rows, found: torch.ones(len(found), dtype=torch.long),
    },
    "q2": {
        lax: lambda machine, lax=lax: partners(machine, lax)
        for lax in (
            "ranks as they are",
            "one round",
            "the same round",
            "neighbours",
            "itself",
            "floats",
        )
    },
    "q3": {
        **{lax: wrong_progress(lax) for lax in PROGRAMS},
        "anybody": lambda kinds, peers: progress(kinds, peers, anybody=True),
        "all": lambda kinds, peers: torch.full((len(kinds),), kinds.shape[1]),
        "none": lambda kinds, peers: torch.zeros(len(kinds), dtype=torch.long),
    },
    "q4": {
        **{lax: lambda *x, lax=lax: most(*x, mistake=lax) for lax in SPLITS},
        "one": lambda *x: 1,
        "speed-up": by_speed_up,
        "all rows": lambda rows, *x: rows,
    },
    "q5": {
        **{lax: lambda *x, lax=lax: ages(*x, lax=lax) for lax in [*AGES, "own order"]},
        "the bound": lambda sample, train, ahead: torch.arange(len(sample)).clamp(max=ahead),
        "none": lambda sample, train, ahead: torch.zeros(len(sample), dtype=torch.long),
    },
}

NAMED = {
    **{("q1", lax): sentence for lax, sentence in WAYS.items()},
    ("q2", "ranks as they are"): "rounds go between machines",
    ("q2", "one round"): "rounds, and the plan has 1",
    ("q2", "the same round"): "more than once",
    ("q2", "neighbours"): "has another partner",
    ("q2", "itself"): "swaps with itself",
    ("q2", "floats"): "an int64 tensor",
    **{("q3", lax): sentence for lax, sentence in PROGRAMS.items()},
    **{("q4", lax): sentence for lax, sentence in SPLITS.items()},
    **{("q5", lax): sentence for lax, sentence in AGES.items()},
}

globals().update(common_tests(QUESTIONS, RIGHT, WRONG, NAMED))


def test_a_receive_from_anybody_fails_in_every_draw():
    for seed in range(40):
        answer = QUESTIONS["q3"].run(Local(WRONG["q3"]["anybody"]), seed)
        assert not all(case.passed for case in answer.cases), seed
