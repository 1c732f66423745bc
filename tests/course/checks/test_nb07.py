"""The checks of lesson 07 pass what is right, kill what is wrong, and name the mistake."""

import heapq

import torch
import torch.nn.functional as F
from answers import common_tests

from rlcourse.course.checks.nb07 import QUESTIONS


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


def folded(q, keys, values, scale=None):
    rows, heads, size = q.shape
    groups = q.view(rows, keys.shape[1], -1, size) * (size**-0.5 if scale is None else scale)
    return ((groups @ keys.transpose(2, 3)).softmax(-1) @ values).view(rows, heads, size)


def repeated(q, keys, values):
    times = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(times, 1), values.repeat_interleave(times, 1)
    return F.scaled_dot_product_attention(q[:, :, None], keys, values)[:, :, 0]


def by_einsum(q, keys, values):
    groups = q.unflatten(1, (keys.shape[1], -1))
    weights = torch.einsum("rkgd,rksd->rkgs", groups, keys).div(q.shape[-1] ** 0.5).softmax(-1)
    return torch.einsum("rkgs,rksd->rkgd", weights, values).flatten(1, 2)


def dealt_in_turn(q, keys, values):
    times = q.shape[1] // keys.shape[1]
    return repeated(q, keys.repeat(1, times, 1, 1), values.repeat(1, times, 1, 1))


def wrong_softmax(q, keys, values):
    rows, heads, size = q.shape
    groups = q.view(rows, keys.shape[1], -1, size) * size**-0.5
    return ((groups @ keys.transpose(2, 3)).softmax(-2) @ values).view(rows, heads, size)


def no_softmax(q, keys, values):
    rows, heads, size = q.shape
    groups = q.view(rows, keys.shape[1], -1, size) * size**-0.5
    return (groups @ keys.transpose(2, 3) @ values).view(rows, heads, size)


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


def summary(steps, total, slots):
    return torch.tensor([steps, total / (slots * steps)])


def with_heap(lengths, slots):
    free = [0] * slots
    for length in lengths.tolist():
        heapq.heapreplace(free, free[0] + length)
    return summary(max(free), int(lengths.sum()), slots)


def with_tensor(lengths, slots):
    free = torch.zeros(slots, dtype=torch.long)
    for length in lengths:
        free[free.argmin()] += length
    return torch.stack([free.max().double(), lengths.sum() / (slots * free.max())])


def in_batches(lengths, slots):
    steps = sum(int(piece.max()) for piece in lengths.split(slots))
    return summary(steps, int(lengths.sum()), slots)


def in_turn(lengths, slots):
    return summary(max(int(lengths[s::slots].sum()) for s in range(slots)), int(lengths.sum()), slots)


def rms(x2, eps):
    return (x2.mean(1, keepdim=True) + eps).sqrt()


def afterwards(y, squares, matrix, eps):
    return (y @ matrix.T) * torch.rsqrt(squares.sum(1, keepdim=True) / y.shape[1] + eps)


def before(y, squares, matrix, eps):
    return F.linear(y / (squares.sum(1)[:, None] / y.shape[1] + eps) ** 0.5, matrix)


def by_rows(y, squares, matrix, eps):
    return torch.stack([matrix @ r / (s.sum() / len(r) + eps).sqrt() for r, s in zip(y, squares, strict=True)])


RIGHT = {
    "q1": [cache_sdpa, cache_row_by_row, cache_with],
    "q2": [folded, repeated, by_einsum],
    "q3": [draw_tiles, draw_flat, draw_row_by_row],
    "q4": [with_heap, with_tensor],
    "q5": [afterwards, before, by_rows],
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
        "longest for all": lambda q, k, v, K, V, p: cache_with(q, k, v, K, V, p, mask=seen(K, p.max().expand_as(p))),
    },
    "q2": {
        "in turn": dealt_in_turn,
        "first head": lambda q, K, V: repeated(q, K[:, :1], V[:, :1]),
        "not scaled": lambda q, K, V: folded(q, K, V, 1.0),
        "by D": lambda q, K, V: folded(q, K, V, 1 / q.shape[-1]),
        "keys mixed": lambda q, K, V: folded(q, K, K),
        "no softmax": no_softmax,
        "softmax over heads": wrong_softmax,
        "as groups": lambda q, K, V: folded(q, K, V).view(len(q), K.shape[1], -1, q.shape[-1]),
    },
    "q3": {
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
        "batches": in_batches,
        "even": lambda n, s: summary(-(-int(n.sum()) // s), int(n.sum()), s),
        "longest first": lambda n, s: with_heap(n.sort(descending=True).values, s),
        "in turn": in_turn,
        "all at once": lambda n, s: summary(int(n.max()), int(n.sum()), len(n)),
        "wrong way round": lambda n, s: with_heap(n, s).flip(0),
        "wasted": lambda n, s: torch.stack([with_heap(n, s)[0], 1 - with_heap(n, s)[1]]),
        "taken slots": lambda n, s: summary(with_heap(n, s)[0].item(), int(n.sum()), min(s, len(n))),
        "steps alone": lambda n, s: with_heap(n, s)[0],
    },
    "q5": {
        "mean over tiles": lambda y, s, m, eps: y @ m.T / rms(s, eps),
        "sum": lambda y, s, m, eps: y @ m.T / (s.sum(1, keepdim=True) + eps).sqrt(),
        "squares of y": lambda y, s, m, eps: y @ m.T / rms(y.square(), eps),
        "no eps": lambda y, s, m, eps: afterwards(y, s, m, 0.0),
        "eps outside": lambda y, s, m, eps: y @ m.T / ((s.sum(1, keepdim=True) / y.shape[1]).sqrt() + eps),
        "eps to the sum": lambda y, s, m, eps: afterwards(y, s, m, eps / y.shape[1]),
        "times the root": lambda y, s, m, eps: y @ m.T * (s.sum(1, keepdim=True) / y.shape[1] + eps).sqrt(),
        "no root": lambda y, s, m, eps: y @ m.T / (s.sum(1, keepdim=True) / y.shape[1] + eps),
        "no norm": lambda y, s, m, eps: y @ m.T,
        "not transposed": lambda y, s, m, eps: m @ afterwards(y, s, torch.eye(y.shape[1]), eps).T,
    },
}

# The sentence, or a part of it, that a wrong implementation must be told.
NAMED = {
    ("q1", "no mask"): "attend to all slots",
    ("q1", "not itself"): "see itself too",
    ("q1", "not written"): "write them first",
    ("q1", "only keys"): "only the key arrived",
    ("q1", "one further"): "write them first",
    ("q1", "first position"): "each row has its own",
    ("q1", "everywhere"): "index rows and positions",
    ("q1", "not scaled"): "not scaled",
    ("q1", "by D"): "square root of D",
    ("q2", "in turn"): "dealt out in turn",
    ("q2", "first head"): "first key-value head",
    ("q2", "not scaled"): "not scaled",
    ("q2", "by D"): "square root of D",
    ("q2", "keys mixed"): "mixed the keys",
    ("q2", "no softmax"): "softmax is missing",
    ("q3", "own scale"): "one scale",
    ("q3", "u not scaled"): "with the total mass",
    ("q3", "nothing taken off"): "mass of the tiles before it",
    ("q3", "place"): "place within the tile",
    ("q3", "tile"): "number of the tile",
    ("q3", "greedy"): "most probable token",
    ("q3", "one too far"): "one token too far",
    ("q3", "reached"): "must exceed u",
    ("q3", "within the tile"): "log-prob within the tile",
    ("q3", "logit"): "log of the sum",
    ("q3", "probability"): "take its logarithm",
    ("q3", "largest left out"): "take that off as well",
    ("q3", "tokens alone"): "return two tensors",
    ("q4", "batches"): "longest of each batch",
    ("q4", "even"): "divided the tokens evenly",
    ("q4", "longest first"): "sorted the longest first",
    ("q4", "in turn"): "dealt the completions out",
    ("q4", "all at once"): "All completions at once",
    ("q4", "wrong way round"): "wrong way round",
    ("q4", "wasted"): "wasted",
    ("q4", "taken slots"): "nobody takes included",
    ("q5", "mean over tiles"): "not over the tiles",
    ("q5", "sum"): "not divided by d",
    ("q5", "squares of y"): "squares of y",
    ("q5", "no eps"): "eps is left out",
    ("q5", "eps outside"): "under the root",
    ("q5", "eps to the sum"): "not to the sum",
    ("q5", "times the root"): "multiplied by the root",
    ("q5", "no root"): "root is missing",
    ("q5", "no norm"): "norm is missing",
}

test_right_answers_pass, test_wrong_answers_are_killed, test_the_mistake_is_named, test_a_hole_shows_the_hint = (
    common_tests(QUESTIONS, RIGHT, WRONG, NAMED, slow=["q3"])
)
