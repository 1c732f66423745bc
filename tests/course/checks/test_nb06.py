"""The checks of lesson 06 pass what is right, kill what is wrong, and name the mistake."""

from itertools import pairwise

import torch
from answers import common_tests

from rlcourse.course.checks.nb06 import QUESTIONS


def busy_sweep(starts, ends, begin, end):
    starts, ends = starts.clamp(begin, end), ends.clamp(begin, end)
    order = starts.argsort()
    starts, ends = starts[order], ends[order].cummax(0).values
    before = torch.cat([starts[:1], ends[:-1]])
    return (ends - torch.maximum(starts, before)).clamp(min=0).sum() / (end - begin)


def busy_count(starts, ends, begin, end):
    """Plus one at a start, minus one at an end: busy where the running count is positive."""
    times = torch.cat([starts.clamp(begin, end), ends.clamp(begin, end)])
    change = torch.cat([torch.ones(len(starts)), -torch.ones(len(ends))])
    order = times.argsort()
    running = change[order].cumsum(0)[:-1] > 0.5
    return (times[order].diff() * running).sum() / (end - begin)


def busy_last_end_only(starts, ends, begin, end):
    """Compares with the end of the one before, which may end earlier than one before that."""
    order = starts.argsort()
    starts, ends = starts[order].clamp(begin, end), ends[order].clamp(begin, end)
    before = torch.cat([starts[:1], ends[:-1]])
    return (ends - torch.maximum(starts, before)).clamp(min=0).sum() / (end - begin)


def busy_unsorted(starts, ends, begin, end):
    total, until = 0.0, begin
    for start, stop in zip(starts.tolist(), ends.tolist(), strict=True):
        start, stop = max(start, until), min(stop, end)
        total += max(0.0, stop - start)
        until = max(until, stop)
    return torch.tensor(total / (end - begin))


def summed(starts, ends, begin, end):
    return (ends.clamp(begin, end) - starts.clamp(begin, end)).sum() / (end - begin)


def decode_by_hand(
    layers, hidden, heads, kv_heads, head_dim, intermediate, vocabulary, tied, rows, context, element_bytes,
    biases=True, norms=2, kv=None, mlp=3, all_layers=True, cache=2, times=1, head=1, extra=1, cache_heads=None,
):  # fmt: skip
    q, kv = heads * head_dim, (kv or kv_heads) * head_dim
    layer = hidden * (q + 2 * kv) + (q + 2 * kv) * biases + q * hidden + mlp * hidden * intermediate + norms * hidden
    cached = rows * (context + extra) * layers * cache * (cache_heads or kv_heads) * head_dim
    layer = layer * (layers if all_layers else 1) * times
    return torch.tensor([layer, vocabulary * hidden * head * times, cached], dtype=torch.float64) * element_bytes


def decode_shapes(layers, hidden, heads, kv_heads, head_dim, intermediate, vocabulary, tied, rows, context, size):
    matrices = [(heads, hidden + 1), (kv_heads, hidden + 1), (kv_heads, hidden + 1), (heads, hidden)]
    layer = sum(h * head_dim * n for h, n in matrices) + hidden * (3 * intermediate + 2)
    cached = sum(rows * kv_heads * head_dim * (context + 1) for _ in range(2 * layers))
    return size * torch.tensor([float(layers * layer), float(vocabulary * hidden), float(cached)])


def amdahl_right(shares, speedups):
    whole = 1 / (1 - shares.sum() + (shares / speedups).sum())
    return torch.cat([whole[None], 1 / (1 - shares)])


def amdahl_loop(shares, speedups):
    time = 1.0 - sum(shares.tolist())
    for share, speedup in zip(shares.tolist(), speedups.tolist(), strict=True):
        time += share / speedup
    return torch.tensor([1 / time] + [1 / (1 - share) for share in shares.tolist()])


def with_first(value, shares):
    return torch.cat([value.reshape(1), 1 / (1 - shares)])


def bound_right(rows, weights, cache_bytes, element_bytes, bytes_per_s, flops_per_s):
    moved = element_bytes * weights + rows.double() * cache_bytes
    floor = torch.maximum(moved / bytes_per_s, 2 * weights * rows.double() / flops_per_s)
    return torch.stack([floor, rows / floor])


def bound_where(rows, weights, cache_bytes, element_bytes, bytes_per_s, flops_per_s):
    rows = rows.double()
    moved = (element_bytes * weights + rows * cache_bytes) / bytes_per_s
    done = 2 * weights * rows / flops_per_s
    floor = torch.where(moved > done, moved, done)
    return torch.cat([floor[None], (rows / floor)[None]])


def times_of(combine):
    """A bound that makes its seconds of (rows, seconds for bytes, seconds for operations)."""

    def found(rows, weights, cache_bytes, element_bytes, bytes_per_s, flops_per_s):
        rows = rows.double()
        moved = (element_bytes * weights + rows * cache_bytes) / bytes_per_s
        seconds = combine(rows, moved, 2 * weights * rows / flops_per_s)
        return torch.stack([seconds, rows / seconds])

    return found


def cache_once(rows, weights, cache_bytes, element_bytes, bytes_per_s, flops_per_s):
    moved = (element_bytes * weights + cache_bytes) / bytes_per_s
    seconds = torch.maximum(torch.full((len(rows),), moved), 2 * weights * rows / flops_per_s)
    return torch.stack([seconds, rows / seconds])


def weights_a_row(rows, weights, cache_bytes, element_bytes, bytes_per_s, flops_per_s):
    moved = rows * (element_bytes * weights + cache_bytes) / bytes_per_s
    seconds = torch.maximum(moved, 2 * weights * rows / flops_per_s)
    return torch.stack([seconds, rows / seconds])


def parents(starts, ends):
    """Index of each event's parent, -1 for none: the shortest event that holds it."""
    found = []
    for i in range(len(starts)):
        holding = [
            j for j in range(len(starts)) if j != i and starts[j] <= starts[i] and ends[i] <= ends[j]
        ]  # equal intervals do not occur
        found.append(min(holding, key=lambda j: (ends[j] - starts[j]).item(), default=-1))
    return found


def self_by_parents(starts, ends):
    own = ends - starts
    for i, parent in enumerate(parents(starts, ends)):
        if parent >= 0:
            own[parent] -= ends[i] - starts[i]
    return own


def self_by_pieces(starts, ends):
    """Cut the time at every border; each piece belongs to the shortest event that holds it."""
    borders = torch.cat([starts, ends]).unique()
    own = torch.zeros_like(starts)
    for left, right in pairwise(borders):
        holding = (starts <= left) & (right <= ends)
        if holding.any():
            own[torch.where(holding, ends - starts, torch.inf).argmin()] += right - left
    return own


def held_by(starts, ends):
    """[parent, child] True where an event lies within another."""
    return (starts[:, None] <= starts) & (ends <= ends[:, None]) & ~torch.eye(len(starts), dtype=torch.bool)


def without_sorting(starts, ends):
    own, stack = ends - starts, []
    for i in range(len(starts)):
        while stack and ends[stack[-1]] <= starts[i]:
            stack.pop()
        if stack:
            own[stack[-1]] -= ends[i] - starts[i]
        stack.append(i)
    return own


def start_alone(starts, ends):
    """A child ends with its parent; here the stack is popped where it ends before or with the next start only by <."""
    own, stack = ends - starts, []
    for i in starts.argsort(stable=True).tolist():
        while stack and ends[stack[-1]] < starts[i]:
            stack.pop()
        if stack:
            own[stack[-1]] -= ends[i] - starts[i]
        stack.append(i)
    return own


RIGHT = {
    "q1": [busy_sweep, busy_count],
    "q2": [decode_by_hand, decode_shapes],
    "q3": [amdahl_right, amdahl_loop],
    "q4": [bound_right, bound_where],
    "q5": [self_by_parents, self_by_pieces],
}
WRONG = {
    "q1": {
        "summed": summed,
        "not cut": lambda starts, ends, b, e: busy_sweep(starts, ends, -1e6, 1e6) * 2e6 / (e - b),
        "summed, not cut": lambda starts, ends, b, e: (ends - starts).sum() / (e - b),
        "idle": lambda *a: 1 - busy_sweep(*a),
        "seconds": lambda starts, ends, b, e: busy_sweep(starts, ends, b, e) * (e - b),
        "only inside": lambda s, t, b, e: (
            busy_sweep(s[(s >= b) & (t <= e)], t[(s >= b) & (t <= e)], b, e) if ((s >= b) & (t <= e)).any() else 0.0
        ),
        "last end only": busy_last_end_only,
        "unsorted": busy_unsorted,
        "capped": lambda *a: summed(*a).clamp(max=1.0),
    },
    "q2": {
        "no biases": lambda *a: decode_by_hand(*a, biases=False),
        "no norms": lambda *a: decode_by_hand(*a, norms=0),
        "all heads projected": lambda *a: decode_by_hand(*a, kv=a[2]),
        "two matrices": lambda *a: decode_by_hand(*a, mlp=2),
        "one layer": lambda *a: decode_by_hand(*a, all_layers=False),
        "keys alone": lambda *a: decode_by_hand(*a, cache=1),
        "all heads cached": lambda *a: decode_by_hand(*a, cache_heads=a[2]),
        "weights a row": lambda *a: decode_by_hand(*a, times=a[8]),
        "numbers": lambda *a: decode_by_hand(*a) / a[10],
        "embedding too": lambda *a: decode_by_hand(*a, head=1 if a[7] else 2),
        "no tied head": lambda *a: decode_by_hand(*a, head=0 if a[7] else 1),
        "no new token": lambda *a: decode_by_hand(*a, extra=0),
        "cache of a row": lambda *a: decode_by_hand(*a) / torch.tensor([1.0, 1.0, a[8]]),
        "cache of a layer": lambda *a: decode_by_hand(*a) / torch.tensor([1.0, 1.0, a[0]]),
        "one number": lambda *a: decode_by_hand(*a).sum(),
    },
    "q3": {
        "no rest": lambda s, u: with_first(1 / (s / u).sum(), s),
        "mean": lambda s, u: with_first((s * u).sum() + 1 - s.sum(), s),
        "product": lambda s, u: with_first(u.prod(), s),
        "time": lambda s, u: with_first(1 / amdahl_right(s, u)[0], s),
        "times": lambda s, u: 1 / amdahl_right(s, u),
        "limit of the share": lambda s, u: torch.cat([amdahl_right(s, u)[:1], 1 / s]),
        "limit beside the others": lambda s, u: torch.cat(
            [amdahl_right(s, u)[:1], 1 / (1 / amdahl_right(s, u)[0] - s / u)]
        ),
        "multiplied": lambda s, u: with_first(1 / ((s * u).sum() + 1 - s.sum()), s),
        "whole alone": lambda s, u: amdahl_right(s, u)[:1],
    },
    "q4": {
        "added": times_of(lambda rows, moved, done: moved + done),
        "smaller": times_of(lambda rows, moved, done: torch.minimum(moved, done)),
        "bytes alone": times_of(lambda rows, moved, done: moved),
        "operations alone": times_of(lambda rows, moved, done: done),
        "one operation": times_of(lambda rows, moved, done: torch.maximum(moved, done / 2)),
        "cache once": cache_once,
        "weights a row": weights_a_row,
        "no element size": lambda rows, weights, cache, element, *a: bound_right(rows, weights, cache, 1, *a),
        "steps a second": lambda *a: torch.stack([bound_right(*a)[0], 1 / bound_right(*a)[0]]),
        "flipped": lambda *a: bound_right(*a).flip(0),
        "seconds alone": lambda *a: bound_right(*a)[0],
    },
    "q5": {
        "durations": lambda starts, ends: ends - starts,
        "descendants": lambda starts, ends: ends - starts - held_by(starts, ends).double() @ (ends - starts),
        "children": lambda starts, ends: ends - starts - self_by_parents(starts, ends),
        "float32": lambda starts, ends: self_by_parents(starts.float(), ends.float()),
        "not sorted": without_sorting,
        "touching counts as nested": start_alone,
    },
}

# The sentence, or a part of it, that a wrong implementation must be told.
NAMED = {
    ("q1", "summed"): "time counts once",
    ("q1", "not cut"): "did not cut",
    ("q1", "only inside"): "part inside",
    ("q1", "idle"): "idle share",
    ("q1", "seconds"): "length of the window",
    ("q2", "no biases"): "biases",
    ("q2", "no norms"): "norms",
    ("q2", "all heads projected"): "kv_heads x head_dim outputs",
    ("q2", "two matrices"): "three matrices",
    ("q2", "one layer"): "counted one layer",
    ("q2", "keys alone"): "keys and values: twice",
    ("q2", "all heads cached"): "not of all query heads",
    ("q2", "weights a row"): "read once for all rows",
    ("q2", "numbers"): "multiply by element_bytes",
    ("q2", "embedding too"): "looked up",
    ("q2", "no tied head"): "tied head is read",
    ("q2", "no new token"): "context + 1",
    ("q2", "cache of a row"): "cache is that of one row",
    ("q2", "cache of a layer"): "cache is that of one layer",
    ("q3", "no rest"): "nothing sped up",
    ("q3", "mean"): "times add up",
    ("q3", "product"): "multiplied the speed-ups",
    ("q3", "time"): "old over new",
    ("q3", "limit of the share"): "1 / (1 - its share)",
    ("q3", "limit beside the others"): "each part alone",
    ("q3", "multiplied"): "divide",
    ("q4", "added"): "added both times",
    ("q4", "smaller"): "took the smaller",
    ("q4", "bytes alone"): "bytes alone",
    ("q4", "one operation"): "two operations a row",
    ("q4", "cache once"): "grow with rows",
    ("q4", "weights a row"): "reads them once",
    ("q4", "no element size"): "multiply by element_bytes",
    ("q4", "steps a second"): "one token to every row",
    ("q4", "flipped"): "First the seconds",
    ("q5", "durations"): "whole duration",
    ("q5", "descendants"): "all descendants",
    ("q5", "children"): "time of the children",
    ("q5", "float32"): "keep float64",
}

test_right_answers_pass, test_wrong_answers_are_killed, test_the_mistake_is_named, test_a_hole_shows_the_hint = (
    common_tests(QUESTIONS, RIGHT, WRONG, NAMED, first=True)
)
