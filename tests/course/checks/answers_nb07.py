"""Answers to the exercises of lesson 07."""

import heapq

import torch
import torch.nn.functional as F
from answers import half_mended

from rlcourse.course.checks.nb07.q3_draw import PLANTED, wrong_draw


# q1: a static cache
def written(k, v, keys, values, positions):
    rows = torch.arange(len(k))
    keys[rows, positions], values[rows, positions] = k, v
    return keys, values


def seen(keys, positions):
    return torch.arange(keys.shape[1]) <= positions[:, None]


def mixed(q, keys, values, mask, scale=None):
    scores = q @ keys.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1) @ values


def cache_with(q, k, v, keys, values, positions, **change):
    """Right but for one thing: `mask`, `scale` or `old_values`, those that are read."""
    new = written(k, v, keys.clone(), values.clone(), positions)
    mask = change.get("mask", seen(keys, positions))
    return mixed(q, new[0], change.get("old_values", new[1]), mask, change.get("scale"))


def masked_scores(q, k, v, keys, values, positions, add=0.0):
    """The mask as a factor of 0 and 1 on the scores."""
    keys, values = written(k, v, keys, values, positions)
    mask = seen(keys, positions)[:, None]
    scores = q @ keys.transpose(1, 2) / q.shape[-1] ** 0.5
    return (scores * mask + add * ~mask).softmax(-1) @ values


# q2: a tape
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
        tape = tape_with_choices(eos, pad, limit)
        changes = {int(number[1:]): change(eos, pad, limit) for number, change in changed.items()}
        return [changes.get(i, line) for i, line in enumerate(tape) if i not in left_out]

    return function


def in_another_order(*order):
    return lambda eos, pad, limit: [tape_with_choices(eos, pad, limit)[i] for i in order]


# q3: a draw
def logprob(logits, tokens):
    return logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def first_above(mass, goal):
    """First place where the running sum exceeds the goal, and the sum before it."""
    place = ((mass.cumsum(-1) > goal[:, None]) & (mass > 0)).long().argmax(-1)
    before = mass.masked_fill(torch.arange(mass.shape[-1]) >= place[:, None], 0.0).sum(-1)
    return place, before


def draw_tiles(logits, tile, uniform):
    """Two levels, without the total of the masses that u is a share of."""
    short = -logits.shape[1] % tile
    tiles = F.pad(logits, (0, short), value=-torch.inf).unflatten(1, (-1, tile))
    mass = (tiles - tiles.amax((1, 2), keepdim=True)).exp()
    which, before = first_above(mass.sum(2), uniform)
    rows, left = torch.arange(len(logits)), uniform - before
    place, _ = first_above(mass[rows, which], left)
    place = torch.where((mass[rows, which].cumsum(-1) > left[:, None]).any(1), place, tile - 1)
    tokens = which * tile + place
    return tokens, logprob(logits, tokens.clamp(max=logits.shape[1] - 1))


def draw_flat(logits, tile, uniform):
    pi = logits.double().softmax(-1)
    tokens = (pi.cumsum(-1) <= uniform.double()[:, None]).sum(-1)
    return tokens, logprob(logits, tokens)


def draw_changed(tokens_of):
    """A right draw whose tokens are replaced."""

    def function(logits, tile, uniform):
        tokens, logprobs = draw_flat(logits, tile, uniform)
        return tokens_of(logits, tile, uniform, tokens), logprobs

    return function


# q4: a number of slots
def with_heap(lengths, slots):
    free = [0] * slots
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


def step_ms(slots, host, fixed, row):
    return max(host, fixed + row * slots)


def slots_by(steps, time=step_ms, order=lambda lengths: lengths):
    def function(lengths, host, fixed, row, most):
        queue = order(lengths.tolist())
        return min(range(1, most + 1), key=lambda slots: steps(queue, slots) * time(slots, host, fixed, row))

    return function


RIGHT = {"q1": cache_with, "q2": tape_with_choices, "q3": draw_flat, "q4": slots_by(with_heap)}
WRONG = {
    "q1": {
        "no mask": (
            lambda q, k, v, K, V, p: cache_with(q, k, v, K, V, p, mask=torch.ones(K.shape[:2]).bool()),
            "attend to all slots",
        ),
        "nan for the first": lambda q, k, v, K, V, p: cache_with(
            q, k, v, K, V, p, mask=torch.arange(K.shape[1]) < p[:, None]
        ),
        "not written": (lambda q, k, v, K, V, p: mixed(q, K, V, seen(K, p)), "write them first"),
        "only keys": (lambda q, k, v, K, V, p: cache_with(q, k, v, K, V, p, old_values=V), "only the key arrived"),
        "not scaled": (lambda q, k, v, K, V, p: cache_with(q, k, v, K, V, p, scale=1.0), "not scaled"),
        "by D": (lambda q, k, v, K, V, p: cache_with(q, k, v, K, V, p, scale=1 / q.shape[-1]), "square root of D"),
        "scores times the mask": (masked_scores, "a score like any other"),
        "a mask of minus one": lambda q, k, v, K, V, p: masked_scores(q, k, v, K, V, p, add=-1.0),
    },
    "q2": {
        "no padding": (tape_without(_2=lambda eos, pad, limit: ("add", "token", "drawn", 0)), "gets padding"),
        "forgets": (tape_without(_7=lambda eos, pad, limit: ("add", "ended", "now", 0)), "stays so"),
        "limit too early": (in_another_order(3, 4, 0, 1, 2, 5, 6, 7), "one step late"),
        "flag before token": (in_another_order(0, 1, 3, 4, 5, 6, 7, 2), "turned into padding"),
        "no end": tape_without(5, 6, _7=lambda eos, pad, limit: ("or", "ended", "ended", "full")),
        "nothing": lambda eos, pad, limit: [],
        "unknown": (lambda eos, pad, limit: [("if", "ended", 0)], "unknown operation"),
        "unwritten": (tape_without(0), "nothing has written"),
        "a source too few": (lambda eos, pad, limit: [("add", "position", 1)], "needs 2 sources"),
        "a flag": (lambda eos, pad, limit: [("add", "ended", "ended", True)], "neither a name nor a whole number"),
    },
    "q3": half_mended(wrong_draw, PLANTED)
    | {
        "u not scaled": draw_tiles,
        "place": (draw_changed(lambda logits, tile, u, tokens: tokens % tile), "place within the tile"),
        "tile": (draw_changed(lambda logits, tile, u, tokens: tokens // tile), "number of the tile"),
        "greedy": (draw_changed(lambda logits, tile, u, tokens: logits.argmax(-1)), "most probable token"),
        "tokens alone": (lambda *a: draw_flat(*a)[0], "return two tensors"),
    },
    "q4": {
        "even": (slots_by(lambda lengths, slots: -(-sum(lengths) // slots)), "divided the tokens evenly"),
        "shortest first": slots_by(with_heap, order=sorted),
        "no host": (slots_by(with_heap, time=lambda slots, host, fixed, row: fixed + row * slots), "left the host out"),
        "fewest steps": (slots_by(with_heap, time=lambda *_: 1.0), "made the steps few"),
        "most": (lambda lengths, host, fixed, row, most: most, "as long as possible"),
        "the time": (lambda lengths, host, fixed, row, most: 12.5, "whole number"),
    },
}
