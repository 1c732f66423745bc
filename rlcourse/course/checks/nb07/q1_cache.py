"""q1: write into a static cache, hide what is not filled, attend."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare

q1 = Question("q1", "attend_with_cache", hint="Write k and v at [row, position], then hide the slots after it.")


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


def attend_masked_wrongly(q: Tensor, keys: Tensor, values: Tensor, lengths: list[int], after: bool) -> Tensor:
    """Scores (or, after the softmax, weights) times a mask of 0 and 1: q [R, G, D], keys, values [R, S, D]."""
    seen = torch.arange(keys.shape[1]) < torch.tensor(lengths)[:, None, None]
    scores = torch.einsum("rgd,rsd->rgs", q.double(), keys.double()) * q.shape[-1] ** -0.5
    weights = scores.softmax(-1) * seen if after else (scores * seen).softmax(-1)
    return torch.einsum("rgs,rsd->rgd", weights, values.double())


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
        "You attend to all slots: hide those after the position.": attend(q, *there, all_slots),
        "The new token must see itself too: slot `positions` counts.": attend(q, *there, [max(p, 1) for p in at]),
        "The new key and value do not stand in slot `positions`: write them first.": attend(q, keys, values, upto),
        "You wrote the value nowhere: only the key arrived.": attend(q, there[0], values, upto),
        "All rows were written at the position of the first: each row has its own.": attend(q, *one_place, upto),
        "Each row was written at all positions: index rows and positions together.": attend(q, *all_rows, upto),
        "You multiplied the scores by the mask: 0 is a score like any other, minus infinity is none.": (
            attend_masked_wrongly(q, *there, upto, after=False)
        ),
        "You hid the slots after the softmax: they have taken their share by then.": attend_masked_wrongly(
            q, *there, upto, after=True
        ),
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
    check_cache(f, *random_cache(4, 3, 8, 6), torch.randperm(7)[:4])
    check_cache(f, *random_cache(2, 2, 5, 4), torch.tensor([4, 2]))


@q1.case("what an earlier answer left in the slots is not seen")
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
