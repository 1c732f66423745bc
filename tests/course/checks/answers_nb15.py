"""Answers to the exercises of lesson 15."""

import functools

import torch
from answers import ruled

from rlcourse.course.checks.nb15 import AGES, PROGRAMS, SPLITS, WAYS, by_events, judged, most
from rlcourse.course.checks.programs import reached


# q1: what they divided by
def divided_by(sums, tokens, rows, found, first=slice(None)):
    total, means = sums.sum(0), sums / tokens[:, None]
    right = total / tokens.sum()
    ways = torch.stack([right, means.mean(0), means.sum(0), means[0], total / rows.sum(), right / len(sums)])[:, first]
    near = (found[:, None, first] - ways).norm(dim=2) < 1e-3 * ways.norm(dim=1)
    return near.int().argmax(1)


def divided_by_with(sums, tokens, rows, found, mistake):
    return torch.tensor(judged(sums, tokens.tolist(), rows.tolist(), found, mistake))


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
def progress(kinds, peers):
    """Lets one rank at a time go as far as it can."""
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
                if kind(other) == 1 and peers[other, done[other]] == rank:
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
def ages(sample_s, train_s, ahead):
    sampled, trained, found = [], [], []
    for i in range(len(sample_s)):
        begin = sampled[-1] if i else 0.0
        if i - 1 - ahead >= 0:
            begin = max(begin, trained[i - 1 - ahead])
        sampled.append(begin + sample_s[i].item())
        found.append(i - sum(end <= begin for end in trained))
        trained.append(max([sampled[-1], *trained[-1:]]) + train_s[i].item())
    return torch.tensor(found)


RIGHT = {"q1": divided_by, "q2": partners, "q3": progress, "q4": most_ranks, "q5": ages}

WRONG = {
    "q1": {
        **ruled(divided_by_with, WAYS, "mistake"),
        "one number": functools.partial(divided_by, first=slice(1)),
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
        **ruled(by_events, AGES, "mistake"),
        "one less": lambda sample, train, ahead: ages(sample, train, max(0, ahead - 1)),
        "the bound": lambda sample, train, ahead: torch.arange(len(sample)).clamp(max=ahead),
    },
}
