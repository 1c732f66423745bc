"""The checks of lesson 07 pass what is right, kill what is wrong, and name the mistake."""

import functools
import heapq
import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from answers import common_tests

from rlcourse.course.checks.nb07 import QUESTIONS
from rlcourse.course.checks.nb07.q2_tape import next_row, played
from rlcourse.course.checks.nb07.q3_draw import PLANTED, wrong_draw

# q1: a static cache ----------------------------------------------------------------------------------------------


def written(k, v, keys, values, positions):
    rows = torch.arange(len(k))
    keys[rows, positions], values[rows, positions] = k, v
    return keys, values


def seen(keys, positions):
    return torch.arange(keys.shape[1]) <= positions[:, None]


def mixed(q, keys, values, mask, scale=None):
    scores = q @ keys.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1) @ values


def cache_sdpa(q, k, v, keys, values, positions):
    index = positions[:, None, None].expand(-1, 1, q.shape[-1])
    keys, values = keys.scatter(1, index, k[:, None]), values.scatter(1, index, v[:, None])
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen(keys, positions)[:, None])


def cache_row_by_row(q, k, v, keys, values, positions):
    out = []
    for r, p in enumerate(positions.tolist()):
        row_keys, row_values = torch.cat([keys[r, :p], k[r : r + 1]]), torch.cat([values[r, :p], v[r : r + 1]])
        out.append((q[r] @ row_keys.T / q.shape[-1] ** 0.5).softmax(-1) @ row_values)
    return torch.stack(out)


def cache_with(q, k, v, keys, values, positions, **change):
    """Right but for one thing: `at`, where it is written; `mask`; `scale`; `what` is written."""
    at = change.get("at", positions)
    new = written(k, v, keys.clone(), values.clone(), at)
    mask = change.get("mask", seen(keys, positions))
    return mixed(q, new[0], change.get("old_values", new[1]), mask, change.get("scale"))


def cache_everywhere(q, k, v, keys, values, positions):
    keys[:, positions], values[:, positions] = k[:, None], v[:, None]
    return mixed(q, keys, values, seen(keys, positions))


def masked_scores(q, k, v, keys, values, positions, add=0.0):
    """The mask as a factor of 0 and 1 on the scores."""
    keys, values = written(k, v, keys, values, positions)
    mask = seen(keys, positions)[:, None]
    scores = q @ keys.transpose(1, 2) / q.shape[-1] ** 0.5
    return (scores * mask + add * ~mask).softmax(-1) @ values


def masked_weights(q, k, v, keys, values, positions):
    keys, values = written(k, v, keys, values, positions)
    weights = (q @ keys.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1)
    return (weights * seen(keys, positions)[:, None]) @ values


# q2: a tape ------------------------------------------------------------------------------------------------------


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


def tape_with_sums(eos, pad, limit):
    return [
        ["equal", "alive", "ended", 0],
        ["add", "position", "alive", "position"],
        ["choose", "token", "alive", "drawn", pad],
        ["equal", "a", "token", eos],
        ["less", "b", limit - 1, "position"],
        ["or", "c", "a", "b"],
        ["and", "c", "c", "alive"],
        ["add", "ended", "ended", "c"],
    ]


def tape_without(*left_out, **changed):
    """The first tape without some instructions (by number), or with others in their place."""

    def function(eos, pad, limit):
        tape = tape_with_choices(eos, pad, limit)
        changes = {int(number[1:]): change(eos, pad, limit) for number, change in changed.items()}
        return [changes.get(i, line) for i, line in enumerate(tape) if i not in left_out]

    return function


def flag_before_position(eos, pad, limit):
    tape = [tape_with_choices(eos, pad, limit)[i] for i in (2, 0, 3, 4, 5, 6, 7, 1)]
    return [("less", "fits", "next", limit) if line[1] == "fits" else line for line in tape]


def in_another_order(*order):
    return lambda eos, pad, limit: [tape_with_choices(eos, pad, limit)[i] for i in order]


# q3: a draw ------------------------------------------------------------------------------------------------------


def logprob(logits, tokens):
    return logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def first_above(mass, goal):
    """First place where the running sum exceeds the goal, and the sum before it."""
    place = ((mass.cumsum(-1) > goal[:, None]) & (mass > 0)).long().argmax(-1)
    before = mass.masked_fill(torch.arange(mass.shape[-1]) >= place[:, None], 0.0).sum(-1)
    return place, before


def draw_tiles(logits, tile, uniform, **change):
    """Two levels. change: what is done wrongly."""
    short = -logits.shape[1] % tile
    tiles = F.pad(logits, (0, short), value=-torch.inf).unflatten(1, (-1, tile))
    top = tiles.amax((1, 2), keepdim=True) if change.get("scaled", True) else tiles.amax(2, keepdim=True)
    mass = (tiles - top).exp()
    by_tile = mass.sum(2)
    total = by_tile.sum(1)
    goal = uniform * (total if change.get("total", True) else 1.0)
    which, before = first_above(by_tile, goal)
    rows = torch.arange(len(logits))
    left = goal - before if change.get("left", True) else goal
    place, _ = first_above(mass[rows, which], left)
    place = torch.where((mass[rows, which].cumsum(-1) > left[:, None]).any(1), place, tile - 1)
    tokens = which * tile * change.get("offset", 1) + place
    return tokens, logprob(logits, tokens.clamp(max=logits.shape[1] - 1))


def reached_by_tiles(logits, tile, uniform):
    """The colleague's lines, mended but for one `>=`: that of the tiles."""
    rows = torch.arange(len(logits))
    tiles = F.pad(logits, (0, -logits.shape[1] % tile), value=-torch.inf).unflatten(1, (-1, tile))
    mass = (tiles - logits.amax(1)[:, None, None]).exp()
    by_tile = mass.sum(2)
    goal = uniform * by_tile.sum(1)
    which = (by_tile.cumsum(1) >= goal[:, None]).long().argmax(1)
    left = goal - (by_tile.cumsum(1) - by_tile)[rows, which]
    place = (mass[rows, which].cumsum(1) > left[:, None]).long().argmax(1)
    tokens = which * tile + place
    return tokens, logprob(logits, tokens)


def draw_flat(logits, tile, uniform):
    pi = logits.double().softmax(-1)
    tokens = (pi.cumsum(-1) <= uniform.double()[:, None]).sum(-1)
    return tokens, logprob(logits, tokens)


def draw_row_by_row(logits, tile, uniform):
    tokens = []
    for row, u in zip(logits.double().softmax(-1), uniform.tolist(), strict=True):
        for first in range(0, len(row), tile):
            mass = row[first : first + tile].sum().item()
            if u < mass:
                break
            u -= mass
        running = row[first : first + tile].cumsum(0)
        tokens.append(first + int((running <= u).sum()))
    tokens = torch.tensor(tokens)
    return tokens, logprob(logits, tokens)


def draw_changed(tokens_of=None, logprobs_of=None):
    """A right draw whose tokens or log-probs are replaced."""

    def function(logits, tile, uniform):
        tokens, logprobs = draw_flat(logits, tile, uniform)
        if tokens_of is not None:
            tokens = tokens_of(logits, tile, uniform, tokens)
        if logprobs_of is not None:
            logprobs = logprobs_of(logits, tile, tokens)
        return tokens, logprobs

    return function


def within_tile(logits, tile, tokens):
    padded = F.pad(logits, (0, -logits.shape[1] % tile), value=-torch.inf).unflatten(1, (-1, tile))
    return logprob(padded[torch.arange(len(tokens)), tokens // tile], tokens % tile)


def plain_exp(logits, tile, uniform):
    mass = logits.exp()
    tokens = (mass.cumsum(-1) <= (uniform * mass.sum(-1))[:, None]).sum(-1).clamp(max=logits.shape[1] - 1)
    return tokens, (mass.gather(1, tokens[:, None])[:, 0] / mass.sum(-1)).log()


def half_mended(logits, tile, uniform, wrong):
    return wrong_draw(logits, tile, uniform, wrong)


SUBSETS = [wrong for count in (1, 2, 3, 4) for wrong in itertools.combinations(PLANTED, count)]

# q4: a number of slots -------------------------------------------------------------------------------------------


def with_heap(lengths, slots):
    free = [0] * slots
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


def by_steps(lengths, slots):
    waiting, left, steps = list(lengths), [], 0
    while waiting or left:
        while waiting and len(left) < slots:
            left.append(waiting.pop(0))
        steps, left = steps + 1, [n - 1 for n in left if n > 1]
    return steps


def in_batches(lengths, slots):
    return sum(max(lengths[i : i + slots]) for i in range(0, len(lengths), slots))


def step_ms(slots, host, fixed, row):
    return max(host, fixed + row * slots)


def slots_by(steps, time=step_ms, order=lambda lengths: lengths, result=min):
    def function(lengths, host, fixed, row, most):
        queue = order(lengths.tolist())
        return result(range(1, most + 1), key=lambda slots: steps(queue, slots) * time(slots, host, fixed, row))

    return function


def slots_in_turn(lengths, slots):
    return max(sum(lengths[s::slots]) for s in range(slots))


def slots_tensor(lengths, host, fixed, row, most):
    steps = torch.tensor([with_heap(lengths.tolist(), slots) for slots in range(1, most + 1)]).double()
    sizes = torch.arange(1, most + 1).double()
    return (steps * (fixed + row * sizes).clamp(min=host)).argmin() + 1


RIGHT = {
    "q1": [cache_sdpa, cache_row_by_row, cache_with],
    "q2": [tape_with_choices, tape_with_sums],
    "q3": [draw_tiles, draw_flat, draw_row_by_row],
    "q4": [slots_by(with_heap), slots_by(by_steps), slots_tensor],
}
WRONG = {
    "q1": {
        "no mask": lambda q, k, v, K, V, p: cache_with(q, k, v, K, V, p, mask=torch.ones(K.shape[:2]).bool()),
        "not itself": lambda q, k, v, K, V, p: cache_with(
            q, k, v, K, V, p, mask=torch.arange(K.shape[1]) < p.clamp(min=1)[:, None]
        ),
        "nan for the first": lambda q, k, v, K, V, p: cache_with(
            q, k, v, K, V, p, mask=torch.arange(K.shape[1]) < p[:, None]
        ),
        "not written": lambda q, k, v, K, V, p: mixed(q, K, V, seen(K, p)),
        "only keys": lambda q, k, v, K, V, p: cache_with(q, k, v, K, V, p, old_values=V),
        "one further": lambda q, k, v, K, V, p: cache_with(q, k, v, K, V, p, at=(p + 1).clamp(max=K.shape[1] - 1)),
        "first position": lambda q, k, v, K, V, p: cache_with(q, k, v, K, V, p, at=p[:1].expand_as(p)),
        "everywhere": cache_everywhere,
        "not scaled": lambda q, k, v, K, V, p: cache_with(q, k, v, K, V, p, scale=1.0),
        "by D": lambda q, k, v, K, V, p: cache_with(q, k, v, K, V, p, scale=1 / q.shape[-1]),
        "scores times the mask": masked_scores,
        "mask after the softmax": masked_weights,
        "a mask of minus one": lambda q, k, v, K, V, p: masked_scores(q, k, v, K, V, p, add=-1.0),
        "longest for all": lambda q, k, v, K, V, p: cache_with(q, k, v, K, V, p, mask=seen(K, p.max().expand_as(p))),
    },
    "q2": {
        "no padding": tape_without(_2=lambda eos, pad, limit: ("add", "token", "drawn", 0)),
        "everybody moves": tape_without(_1=lambda eos, pad, limit: ("add", "position", "position", 1)),
        "forgets": tape_without(_7=lambda eos, pad, limit: ("add", "ended", "now", 0)),
        "no limit": tape_without(3, 4, 6, _7=lambda eos, pad, limit: ("or", "ended", "ended", "end")),
        "limit too early": in_another_order(3, 4, 0, 1, 2, 5, 6, 7),
        "limit passed": tape_without(_3=lambda eos, pad, limit: ("less", "fits", "position", limit + 1)),
        "flag before token": in_another_order(0, 1, 3, 4, 5, 6, 7, 2),
        "flag before position": flag_before_position,
        "no end": tape_without(5, 6, _7=lambda eos, pad, limit: ("or", "ended", "ended", "full")),
        "pad for the end": tape_without(_5=lambda eos, pad, limit: ("equal", "end", "drawn", pad)),
        "nothing": lambda eos, pad, limit: [],
        "unknown": lambda eos, pad, limit: [("if", "ended", 0)],
        "text": lambda eos, pad, limit: "choose",
        "unwritten": tape_without(0),
        "a source too few": lambda eos, pad, limit: [("add", "position", 1)],
        "a flag": lambda eos, pad, limit: [("add", "ended", "ended", True)],
    },
    "q3": {"+".join(wrong): functools.partial(half_mended, wrong=wrong) for wrong in SUBSETS}
    | {
        "own scale": lambda *a: draw_tiles(*a, scaled=False),
        "u not scaled": lambda *a: draw_tiles(*a, total=False),
        "nothing taken off": lambda *a: draw_tiles(*a, left=False),
        "place": draw_changed(lambda logits, tile, u, tokens: tokens % tile),
        "tile": draw_changed(lambda logits, tile, u, tokens: tokens // tile),
        "greedy": draw_changed(lambda logits, tile, u, tokens: logits.argmax(-1)),
        "one too far": draw_changed(
            lambda logits, tile, u, tokens: (logits.double().softmax(-1).cumsum(-1) <= u[:, None]).sum(-1) + 1
        ),
        "reached": draw_changed(
            lambda logits, tile, u, tokens: (logits.double().softmax(-1).cumsum(-1) < u[:, None]).sum(-1)
        ),
        "reached by tiles": reached_by_tiles,
        "within the tile": draw_changed(logprobs_of=within_tile),
        "logit": draw_changed(logprobs_of=lambda logits, tile, tokens: logits.gather(1, tokens[:, None])[:, 0]),
        "probability": draw_changed(logprobs_of=lambda logits, tile, tokens: logprob(logits, tokens).exp()),
        "largest left out": draw_changed(
            logprobs_of=lambda logits, tile, tokens: logprob(logits, tokens) + logits.amax(-1)
        ),
        "exp of large logits": plain_exp,
        "tokens alone": lambda *a: draw_flat(*a)[0],
        "last tile forgotten": lambda logits, tile, u: draw_tiles(logits[:, : logits.shape[1] // tile * tile], tile, u),
    },
    "q4": {
        "batches": slots_by(in_batches),
        "even": slots_by(lambda lengths, slots: -(-sum(lengths) // slots)),
        "longest first": slots_by(with_heap, order=lambda lengths: sorted(lengths, reverse=True)),
        "shortest first": slots_by(with_heap, order=sorted),
        "in turn": slots_by(slots_in_turn),
        "no host": slots_by(with_heap, time=lambda slots, host, fixed, row: fixed + row * slots),
        "host added": slots_by(with_heap, time=lambda slots, host, fixed, row: host + fixed + row * slots),
        "nothing fixed": slots_by(with_heap, time=lambda slots, host, fixed, row: max(host, row * slots)),
        "fewest steps": slots_by(with_heap, time=lambda *_: 1.0),
        "slowest": slots_by(with_heap, result=max),
        "most": lambda lengths, host, fixed, row, most: most,
        "one": lambda lengths, host, fixed, row, most: 1,
        "one for each answer": lambda lengths, host, fixed, row, most: min(most, len(lengths)),
        "from nought": lambda *a: slots_by(with_heap)(*a) - 1,
        "the time": lambda lengths, host, fixed, row, most: 12.5,
    },
}

# The sentence, or a part of it, that a wrong implementation must be told.
NAMED = {("q3", "+".join(wrong)): f"({', '.join(wrong)})" for wrong in SUBSETS if len(wrong) == 1}
NAMED |= {
    ("q1", "no mask"): "attend to all slots",
    ("q1", "not itself"): "see itself too",
    ("q1", "not written"): "write them first",
    ("q1", "only keys"): "only the key arrived",
    ("q1", "one further"): "write them first",
    ("q1", "first position"): "each row has its own",
    ("q1", "everywhere"): "index rows and positions",
    ("q1", "not scaled"): "not scaled",
    ("q1", "by D"): "square root of D",
    ("q1", "scores times the mask"): "a score like any other",
    ("q1", "mask after the softmax"): "after the softmax",
    ("q2", "no padding"): "gets padding",
    ("q2", "everybody moves"): "stay where it is",
    ("q2", "forgets"): "stays so",
    ("q2", "no limit"): "reached the limit",
    ("q2", "limit too early"): "one step late",
    ("q2", "limit passed"): "one step late",
    ("q2", "flag before token"): "turned into padding",
    ("q2", "flag before position"): "takes a place as well",
    ("q2", "unknown"): "unknown operation",
    ("q2", "unwritten"): "nothing has written",
    ("q2", "a source too few"): "needs 2 sources",
    ("q2", "a flag"): "neither a name nor a whole number",
    ("q3", "own scale"): "one scale",
    ("q3", "place"): "place within the tile",
    ("q3", "tile"): "number of the tile",
    ("q3", "greedy"): "most probable token",
    ("q3", "one too far"): "one token too far",
    ("q3", "reached"): "must exceed the goal",
    ("q3", "reached by tiles"): "must exceed the goal",
    ("q3", "within the tile"): "that within the tile",
    ("q3", "logit"): "log of the sum",
    ("q3", "probability"): "take its logarithm",
    ("q3", "largest left out"): "take that off as well",
    ("q3", "tokens alone"): "return two tensors",
    ("q4", "batches"): "longest of each batch",
    ("q4", "even"): "divided the tokens evenly",
    ("q4", "longest first"): "sorted the longest first",
    ("q4", "in turn"): "dealt the answers out",
    ("q4", "no host"): "left the host out",
    ("q4", "host added"): "added the host",
    ("q4", "nothing fixed"): "fixed in a step",
    ("q4", "fewest steps"): "made the steps few",
    ("q4", "most"): "as long as possible",
    ("q4", "the time"): "whole number",
}

globals().update(common_tests(QUESTIONS, RIGHT, WRONG, NAMED, slow=["q3"]))


@pytest.mark.parametrize("wrong", SUBSETS[4:], ids="+".join)
def test_a_half_mended_draw_is_told_one_mistake_that_is_left(wrong):
    """And none that has been mended."""
    result = QUESTIONS["q3"](functools.partial(half_mended, wrong=wrong))
    messages = " ".join(case.message for case in result.cases)
    assert not any(PLANTED[name] in messages for name in PLANTED if name not in wrong), messages
    assert any(PLANTED[name] in messages for name in wrong), messages


def test_the_tape_does_what_a_row_with_an_if_does():
    generator = random.Random(0)
    for _ in range(200):
        row = (5, generator.randrange(1, 9), generator.randrange(2))
        memory = dict(zip(("token", "position", "ended"), row, strict=True)) | {"drawn": generator.randrange(3)}
        drawn = memory["drawn"]
        played(tape_with_sums(1, 0, 8), memory)
        assert tuple(memory[name] for name in ("token", "position", "ended")) == next_row(row, drawn, 1, 0, 8)
