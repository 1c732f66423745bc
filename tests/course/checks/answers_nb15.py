"""Answers to the exercises of lesson 15."""

import torch
from answers import ruled

from rlcourse.course.checks.nb15 import AGES, PROGRAMS, SPLITS, WAYS, most
from rlcourse.course.checks.programs import reached


# q1: what they divided by
def divided_by(sums, tokens, rows, found, rule=""):
    counted = rows if rule == "rows for tokens" else tokens
    total, means = sums.sum(0), sums / counted[:, None]
    n = 1 if rule == "ranks left out" else len(sums)
    right = total / counted.sum()
    ways = torch.stack([right, means.sum(0) / n, means.sum(0), means[0], total / rows.sum(), right / len(sums)])
    if rule == "direction":
        ways, found = ways / ways.norm(dim=1, keepdim=True), found / found.norm(dim=1, keepdim=True)
    near = (found[:, None] - ways).norm(dim=2) < 1e-3 * ways.norm(dim=1)
    if rule == "last":
        return 5 - near.flip(1).int().argmax(1)
    if rule == "one number":
        near = (found[:, None, 0] - ways[:, 0]).abs() < 1e-3 * ways[:, 0].abs()
    return near.int().argmax(1)


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


# q3: who hangs
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


def wrong_progress(kinds, peers, rule):
    return torch.tensor(reached(kinds.tolist(), peers.tolist(), rule))


# q4: splitting
def most_ranks(rows, start_s, row_s, gradient_bytes, bytes_per_s, least):
    best = 1
    for n in range(2, rows + 1):
        if rows % n == 0:
            seconds = start_s + row_s * (rows // n) + (2 - 2 / n) * gradient_bytes / bytes_per_s
            if (start_s + row_s * rows) / (n * seconds) >= least:
                best = n
    return best


# q5: ages
def ages(sample_s, train_s, ahead, rule=""):
    ahead = {"one more": ahead + 1, "one less": ahead - 1}.get(rule, ahead)
    sampled, trained, found = [], [], []
    for i in range(len(sample_s)):
        begin = sampled[-1] if i else 0.0
        before = i - 1 - max(ahead, 0)
        if before >= 0 and rule != "never waits":
            begin = max(begin, trained[before])
        sampled.append(begin + sample_s[i].item())
        at = sampled[-1] if rule == "at the end" else begin
        there = sum(end <= at for end in trained)
        found.append(there if rule == "updates" else i - there)
        start = sampled[-1] if rule == "own order" or not trained else max(sampled[-1], trained[-1])
        trained.append(start + train_s[i].item())
    return torch.tensor(found)


RIGHT = {"q1": divided_by, "q2": partners, "q3": progress, "q4": most_ranks, "q5": ages}

WRONG = {
    "q1": {
        **ruled(divided_by, WAYS),
        "own means": lambda sums, tokens, rows, found: torch.ones(len(found), dtype=torch.long),
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
    "q3": {
        **ruled(wrong_progress, PROGRAMS),
        "none": lambda kinds, peers: torch.zeros(len(kinds), dtype=torch.long),
    },
    "q4": {
        **ruled(most, SPLITS, "mistake"),
        "one": lambda *x: 1,
    },
    "q5": {
        **ruled(ages, AGES),
        "the bound": lambda sample, train, ahead: torch.arange(len(sample)).clamp(max=ahead),
    },
}
