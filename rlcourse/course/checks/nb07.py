"""Checks of the exercises of lesson 07: cache write and attention, folded heads, drawing by inversion, slots, norm."""

import math

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw

q1 = Question("q1", "attend_with_cache", hint="Write k and v at [row, position], then hide the slots behind position.")


def attend(q: Tensor, keys: Tensor, values: Tensor, lengths: list[int], scale: float | None = None) -> Tensor:
    """Attention by a loop over rows, over the first `lengths[r]` slots: q [R, G, D], keys, values [R, S, D] float64."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    found = torch.zeros(q.shape, dtype=torch.float64)
    for r, length in enumerate(lengths):
        for g in range(q.shape[1]):
            scores = scale * (keys[r, :length].double() @ q[r, g].double())
            weights = (scores - scores.logsumexp(0)).exp()
            found[r, g] = (weights[:, None] * values[r, :length].double()).sum(0)
    return found


def check_cache(f, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> None:
    at = positions.tolist()
    upto = [p + 1 for p in at]

    def filled(rows, places, new_k=k, new_v=v) -> tuple[Tensor, Tensor]:
        new_keys, new_values = keys.clone(), values.clone()
        new_keys[rows, places], new_values[rows, places] = new_k, new_v
        return new_keys, new_values

    own = torch.arange(len(at))
    there, all_slots, size = filled(own, positions), [keys.shape[1]] * len(at), q.shape[-1]
    all_rows, one_place = filled(slice(None), at, k[:, None], v[:, None]), filled(own, positions[:1].expand(len(at)))
    mistakes = {
        "You attend to all slots: hide those behind the position.": attend(q, *there, all_slots),
        "The new token must see itself too: slot `positions` counts.": attend(q, *there, [max(p, 1) for p in at]),
        "The new key and value do not stand in slot `positions`: write them first.": attend(q, keys, values, upto),
        "You wrote the value nowhere: only the key arrived.": attend(q, there[0], values, upto),
        "All rows were written at the position of the first: each row has its own.": attend(q, *one_place, upto),
        "Each row was written at all positions: index rows and positions together.": attend(q, *all_rows, upto),
        "The scores are not scaled: divide them by the square root of D.": attend(q, *there, upto, scale=1.0),
        "You divided the scores by D: it is the square root of D.": attend(q, *there, upto, scale=1 / size),
    }
    compare(f(q, k, v, keys, values, positions), attend(q, *there, upto), mistakes, atol=1e-4)


def random_cache(rows: int, group: int, slots: int, size: int, junk: float = 1.0) -> list[Tensor]:
    """q [R, G, D], k, v [R, D], keys, values [R, S, D]; `junk`: how large what stands in the cache is."""
    one = [torch.randn(rows, group, size), torch.randn(rows, size), torch.randn(rows, size)]
    return one + [junk * torch.randn(rows, slots, size) for _ in range(2)]


@q1.case("rows at different positions, the last slot included")
def _(f):
    check_cache(f, *random_cache(4, 3, 8, 6), torch.tensor([2, 5, 0, 6]))
    check_cache(f, *random_cache(2, 2, 5, 4), torch.tensor([4, 2]))


@q1.case("what an earlier completion left in the slots is not seen")
def _(f):
    q, k, v, keys, values = random_cache(3, 2, 9, 4)
    positions = torch.tensor([1, 4, 7])
    for r, p in enumerate(positions.tolist()):
        keys[r, p:] *= 30
        values[r, p:] *= 30
    check_cache(f, q, k, v, keys, values, positions)


@q1.case("an empty cache: the first token sees itself alone")
def _(f):
    q, k, v, keys, values = random_cache(2, 3, 4, 5)
    check_cache(f, q, k, v, keys, values, torch.tensor([0, 0]))
    compare(f(q, k, v, keys, values, torch.tensor([0, 0])), v[:, None].expand(2, 3, 5))


q2 = Question("q2", "grouped_attention", hint="Query heads as a second dimension: [R, K, H / K, D], then two products.")


def by_heads(q: Tensor, keys: Tensor, values: Tensor, head_of, scale: float | None = None) -> Tensor:
    """Attention head by head, head h with the key-value head `head_of(h)`: [R, H, D] float64."""
    lengths = [keys.shape[2]] * len(q)
    heads = [
        attend(q[:, h : h + 1], keys[:, head_of(h)], values[:, head_of(h)], lengths, scale) for h in range(q.shape[1])
    ]
    return torch.cat(heads, dim=1)


def check_grouped(f, rows: int, heads: int, kv_heads: int, slots: int, size: int) -> None:
    q, group = torch.randn(rows, heads, size), heads // kv_heads
    keys, values = torch.randn(2, rows, kv_heads, slots, size).unbind(0)

    def own(h: int) -> int:
        return h // group

    in_turn = "The heads are dealt out in turn: the first H / K heads share the first key-value head, and so on."
    softmax = "The softmax is missing, or over the wrong dimension: the weights of a head add up to 1 over the slots."
    mistakes = {
        in_turn: by_heads(q, keys, values, lambda h: h % kv_heads),
        "All heads use the first key-value head.": by_heads(q, keys, values, lambda h: 0),
        "The scores are not scaled: divide them by the square root of D.": by_heads(q, keys, values, own, 1.0),
        "You divided the scores by D: it is the square root of D.": by_heads(q, keys, values, own, 1 / size),
        "You mixed the keys: the weights are for the values.": by_heads(q, keys, keys, own),
        softmax: _without_softmax(q, keys, values, group),
    }
    compare(f(q, keys, values), by_heads(q, keys, values, own), mistakes, atol=1e-4)


def _without_softmax(q: Tensor, keys: Tensor, values: Tensor, group: int) -> Tensor:
    scores = torch.stack([(keys[:, h // group] * q[:, h, None]).sum(-1) for h in range(q.shape[1])], 1)
    weights = (scores * q.shape[-1] ** -0.5).double()
    return torch.stack([(weights[:, h, :, None] * values[:, h // group]).sum(1) for h in range(q.shape[1])], 1)


@q2.case("six heads in two groups, eight in four")
def _(f):
    check_grouped(f, 3, 6, 2, 7, 4)
    check_grouped(f, 1, 8, 4, 6, 5)


@q2.case("one group of all heads, and as many groups as heads")
def _(f):
    check_grouped(f, 2, 5, 1, 6, 4)
    check_grouped(f, 2, 3, 3, 6, 4)


@q2.case("a cache of one slot: every head gets its value")
def _(f):
    check_grouped(f, 3, 4, 2, 1, 4)


q3 = Question(
    "q3", "draw_by_inversion", hint="Mass of each tile, the tile in which u falls, then the place in that tile."
)


def middles(logits: Tensor, tokens: Tensor) -> Tensor:
    """The uniform number in the middle of each token's piece of [0, 1]: [R]."""
    pi = logits.double().softmax(-1)
    at = tokens[:, None]
    return (pi.cumsum(-1).gather(1, at) - pi.gather(1, at) / 2)[:, 0].float()


def inverted(masses: Tensor, goal: Tensor, tile: int, start_again: bool = False) -> Tensor:
    """The token where the running sum of `masses` [R, V] exceeds `goal` [R]; start_again: mistaken within the tile."""
    found = []
    for row, want in zip(masses.tolist(), goal.tolist(), strict=True):
        tiles = [row[i : i + tile] for i in range(0, len(row), tile)]
        which, before = 0, 0.0
        while which < len(tiles) - 1 and before + sum(tiles[which]) <= want:
            before, which = before + sum(tiles[which]), which + 1
        running, place = 0.0 if start_again else before, 0
        while place < len(tiles[which]) - 1 and running + tiles[which][place] <= want:
            running, place = running + tiles[which][place], place + 1
        found.append(which * tile + place)
    return torch.tensor(found)


def check_draw(f, logits: Tensor, tile: int, tokens: Tensor, uniform: Tensor | None = None) -> None:
    """Token `tokens[r]` is the one that `uniform[r]`, its middle if not given, falls on."""
    uniform = middles(logits, tokens) if uniform is None else uniform
    result = f(logits, tile, uniform)
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise AssertionError("return two tensors: the tokens, and their log-probs.")
    wide, at = logits.double(), tokens[:, None]
    pi, largest = wide.softmax(-1), wide.amax(1)
    own = torch.cat([(piece - piece.amax(1, keepdim=True)).exp() for piece in wide.split(tile, dim=1)], dim=1)
    common = (wide - largest[:, None]).exp()
    mistakes = {
        "A token of probability 0 was drawn: the running sum must exceed u, not reach it.": tokens * (uniform > 0),
        "Bring the masses of all tiles to one scale: each has its own largest logit.": inverted(
            own, uniform * own.sum(1), tile
        ),
        "Multiply u with the total mass, or divide the masses by it.": inverted(common, uniform, tile),
        "Within the tile, look for what is left of u: take off the mass of the tiles before it.": inverted(
            pi, uniform, tile, start_again=True
        ),
        "That is the place within the tile: add the tokens of the tiles before it.": tokens % tile,
        "That is the number of the tile, not the token.": tokens // tile,
        "That is the most probable token: where u falls decides.": logits.argmax(-1),
        "You are one token too far: it is the first at which the running sum exceeds u.": tokens + 1,
    }
    compare(torch.as_tensor(result[0]).long(), tokens, mistakes, what="the token ids")
    chosen = wide.gather(1, at)[:, 0]
    in_tile = [
        row.split(tile)[t // tile].log_softmax(0)[t % tile] for row, t in zip(wide, tokens.tolist(), strict=True)
    ]
    expected = chosen - wide.logsumexp(-1)
    mistakes = {
        "That is the log-prob within the tile: divide by the mass of all tiles.": torch.stack(in_tile),
        "That is the logit of the token: take off the log of the sum of exponentials.": chosen,
        "That is the probability: take its logarithm.": expected.exp(),
        "The total mass is measured from the largest logit: take that off as well.": expected + largest,
    }
    compare(result[1], expected, mistakes, what="the log-probs", atol=1e-4)


def likely(logits: Tensor) -> Tensor:
    """A token of each row that is not too improbable to aim at: [R]."""
    pi = logits.softmax(-1)
    return torch.multinomial((pi > 0.01) * pi, 1)[:, 0]


@q3.case("tiles that divide the vocabulary, of one token and of all")
def _(f):
    logits = 1.5 * torch.randn(16, 24)
    for tile in (6, 1, 24):
        check_draw(f, logits, tile, likely(logits))


@q3.case("a last tile that is not full")
def _(f):
    logits = torch.randn(12, 23)
    tokens = likely(logits)
    tokens[:3] = torch.tensor([22, 21, 20])
    check_draw(f, logits, 5, tokens)


@q3.case("large logits: exp of them is infinite")
def _(f):
    logits = torch.randn(6, 12) + 200.0
    check_draw(f, logits, 4, likely(logits))


@q3.case("tiles of very different size")
def _(f):
    logits = torch.randn(8, 12) - 4.0 * (torch.arange(12) // 4 == 1)
    check_draw(f, logits, 4, likely(logits))


@q3.case("u = 0 falls on the first token that can be drawn")
def _(f):
    logits = torch.randn(3, 8)
    logits[:, 0] = -torch.inf
    logits[1, 1] = -torch.inf
    check_draw(f, logits, 4, torch.tensor([1, 2, 1]), torch.zeros(3))


q4 = Question(
    "q4", "refill_schedule", hint="Keep the step at which each slot becomes free; the next one takes the first."
)


def schedule(lengths: list[int], slots: int) -> list[int]:
    """The step after which each completion has ended, by going through all steps one by one."""
    left, waiting, ends, step = {}, list(enumerate(lengths)), [0] * len(lengths), 0
    while left or waiting:
        while waiting and len(left) < slots:
            i, length = waiting.pop(0)
            left[i] = length
        step += 1
        for i in list(left):
            left[i] -= 1
            if left[i] == 0:
                ends[i] = step
                del left[i]
    return ends


def check_schedule(f, lengths: list[int], slots: int) -> None:
    steps, total = max(schedule(lengths, slots)), sum(lengths)
    batches = sum(max(lengths[i : i + slots]) for i in range(0, len(lengths), slots))
    best = max(schedule(sorted(lengths, reverse=True), slots))

    def both(count: float, places: int = slots) -> Tensor:
        return torch.tensor([count, total / (places * count)])

    in_turn = max(sum(lengths[s::slots]) for s in range(slots))
    wasted = torch.tensor([steps, 1 - total / (slots * steps)])
    mistakes = {
        "You wait for the longest of each batch: a free slot takes the next completion at once.": both(batches),
        "You divided the tokens evenly: a completion stays in its slot until it ends.": both(-(-total // slots)),
        "You sorted the longest first: nobody knows the lengths beforehand, take them in order.": both(best),
        "You dealt the completions out in turn: the next one takes the slot that is free first.": both(in_turn),
        "The share is of all slots, those that nobody takes included.": both(steps, min(slots, len(lengths))),
        "All completions at once need as many slots as there are completions.": both(max(lengths), len(lengths)),
        "The two numbers are the wrong way round: steps first, then the share.": both(steps).flip(0),
        "That is the share of slot-steps that are wasted: take it from 1.": wasted,
    }
    compare(f(torch.tensor(lengths), slots), both(steps), mistakes, atol=1e-4)


def random_lengths(count: int) -> list[int]:
    return (1 + torch.distributions.Geometric(0.1).sample((count,)).long()).tolist()


@q4.case("two slots")
def _(f):
    check_schedule(f, [1, 2, 9, 7, 9], 2)
    check_schedule(f, [5, 1, 2, 4], 2)
    check_schedule(f, random_lengths(12), 2)


@q4.case("many completions of differing lengths")
def _(f):
    for slots in (3, 7):
        check_schedule(f, random_lengths(40), slots)


@q4.case("fewer completions than slots")
def _(f):
    check_schedule(f, [4, 7, 2], 5)
    check_schedule(f, random_lengths(6), 9)


@q4.case("one slot, one completion, equal lengths")
def _(f):
    check_schedule(f, [3, 1, 4], 1)
    check_schedule(f, [draw(3, 900)], 1)
    check_schedule(f, [5, 5, 5, 5, 5], 2)


q5 = Question("q5", "product_of_normed", hint="The product is linear: a number that scales a whole row may come later.")


def check_normed(f, rows: int, size: int, tiles: int, out: int, scale: float = 1.0, eps: float = 1e-6) -> None:
    x, weight = scale * torch.randn(rows, size), 0.5 + torch.rand(size)
    matrix = torch.randn(out, size)
    squares = torch.stack([piece.square().sum(1) for piece in x.split(size // tiles, dim=1)], dim=1)
    y = x * weight
    product = y.double() @ matrix.double().T
    mean, wide = x.double().square().mean(1, keepdim=True), squares.double()
    of_tiles, of_y = wide.mean(1, keepdim=True), y.double().square().mean(1, keepdim=True)
    mistakes = {
        "The mean of the squares is over the d entries of x, not over the tiles.": product / (of_tiles + eps).sqrt(),
        "The sum of the squares is not divided by d.": product / (mean * size + eps).sqrt(),
        "You took the squares of y, in which the weight is already.": product / (of_y + eps).sqrt(),
        "eps is left out.": product / mean.sqrt(),
        "eps belongs under the root, to the mean of the squares.": product / (mean.sqrt() + eps),
        "eps belongs to the mean, not to the sum.": product / (mean + eps / size).sqrt(),
        "You multiplied by the root: divide by it.": product * (mean + eps).sqrt(),
        "The root is missing: divide by the root of the mean square.": product / (mean + eps),
        "The norm is missing: divide by the root of the mean square.": product,
    }
    normed = x.double() / (mean + eps).sqrt() * weight.double()
    compare(f(y, squares, matrix, eps), normed @ matrix.double().T, mistakes, atol=1e-4)


@q5.case("rows of differing size")
def _(f):
    check_normed(f, 5, 12, 3, 7)


@q5.case("one tile, and a tile for each entry")
def _(f):
    check_normed(f, 4, 8, 1, 5)
    check_normed(f, 3, 6, 6, 4, scale=5.0)


@q5.case("small rows, where eps counts")
def _(f):
    check_normed(f, 4, 10, 2, 6, scale=math.sqrt(1e-3), eps=1e-3)


@q5.case("one row, one output")
def _(f):
    check_normed(f, 1, 16, 4, 1)


QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4, "q5": q5}
