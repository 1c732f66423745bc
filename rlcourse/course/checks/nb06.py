"""Checks of the exercises of lesson 06: busy fraction, bytes of a decode step, Amdahl's law, a bound, self time."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw

q1 = Question(
    "q1", "busy_fraction", hint="Cut the intervals to the window, sort them by start, add what is new of each."
)


def busy(starts: Tensor, ends: Tensor, begin: float, end: float) -> Tensor:
    """Share of the window that some interval covers: cut at every border, look at the middle of each piece."""
    borders = torch.cat([starts.double(), ends.double(), torch.tensor([begin, end], dtype=torch.float64)])
    borders = borders.clamp(begin, end).unique()
    total = 0.0
    for left, right in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        middle = (left + right) / 2
        total += (right - left) * bool(((starts < middle) & (middle < ends)).any())
    return torch.tensor(total / (end - begin), dtype=torch.float64)


def busy_mistakes(starts: Tensor, ends: Tensor, begin: float, end: float) -> dict[str, Tensor]:
    """What usual mistakes give: scalars."""
    starts, ends, window = starts.double(), ends.double(), end - begin
    right = busy(starts, ends, begin, end)
    cut = (ends.clamp(begin, end) - starts.clamp(begin, end)).sum()
    everywhere = busy(starts, ends, starts.min().item(), ends.max().item()) * (ends.max() - starts.min())
    inside = (starts >= begin) & (ends <= end)
    held = busy(starts[inside], ends[inside], begin, end) if inside.any() else torch.zeros(())
    return {
        "You added up the durations: where intervals overlap, time counts once.": cut / window,
        "You added up the durations and did not cut them to the window.": (ends - starts).sum() / window,
        "You did not cut the intervals to the window.": everywhere / window,
        "An interval that reaches over an edge of the window counts with the part inside.": held,
        "That is the idle share: take it from 1.": 1 - right,
        "Divide by the length of the window.": right * window,
    }


def check_busy(f, starts: list[float] | Tensor, ends: list[float] | Tensor, begin: float, end: float) -> None:
    starts, ends = torch.as_tensor(starts, dtype=torch.float64), torch.as_tensor(ends, dtype=torch.float64)
    mistakes = busy_mistakes(starts, ends, begin, end)
    compare(f(starts, ends, begin, end), busy(starts, ends, begin, end), mistakes, atol=1e-6)


def check_random(f, begin: float = 105.0, end: float = 127.0) -> None:
    """Twelve random intervals around a window."""
    starts = begin - 5 + 30 * torch.rand(12, dtype=torch.float64)
    check_busy(f, starts, starts + 3 * torch.rand(12, dtype=torch.float64), begin, end)


@q1.case("some overlap, with a gap, not in order")
def _(f):
    check_busy(f, [6.0, 1.0, 2.5], [8.0, 3.0, 4.5], 0.0, 10.0)
    check_random(f)


@q1.case("two lie within another, the first of them ends earlier")
def _(f):
    check_busy(f, [1.0, 2.0, 4.0, 7.0], [6.0, 3.0, 5.5, 9.0], 0.0, 12.0)
    check_busy(f, [1.0, *(2 + 3 * torch.rand(5)).tolist()], [6.0] * 6, 0.0, 12.0 + torch.rand(()).item())


@q1.case("intervals over the edges of the window, and outside it")
def _(f):
    check_busy(f, [-3.0, -1.0, 4.0, 8.0, 12.0], [-2.0, 1.5, 6.0, 11.0, 14.0], 0.0, 10.0)
    check_random(f, begin=0.0, end=10.0)


@q1.case("a window that does not begin at 0, random intervals")
def _(f):
    check_random(f)


@q1.case("all idle, all busy, touching")
def _(f):
    check_busy(f, [20.0], [30.0], 0.0, 10.0)
    check_busy(f, [-1.0], [30.0], 0.0, 10.0)
    check_busy(f, [0.0, 5.0], [5.0, 7.5], 0.0, 10.0)
    middle = 8 * torch.rand(()).item()
    check_busy(f, [0.0, middle], [middle, middle + 1], 0.0, 10.0)


q2 = Question("q2", "decode_bytes", hint="Count the numbers of one layer, of the head, and of the cache of one token.")

TINY: tuple = (4, 128, 4, 2, 32, 384, 576, True)
WIDE: tuple = (3, 160, 6, 3, 16, 400, 1000, False)  # heads x head_dim is not hidden


def step_bytes(shape: tuple, rows: int, context: int, element: int) -> Tensor:
    """Bytes of layers, head, cache: [3], from a list of the matrices of one layer."""
    layers, hidden, heads, kv_heads, head_dim, intermediate, vocabulary, _ = shape
    q, kv = heads * head_dim, kv_heads * head_dim
    matrices = [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q), *[(intermediate, hidden)] * 3]
    vectors = [q, kv, kv, hidden, hidden]
    of_layer = sum(rows * columns for rows, columns in matrices) + sum(vectors)
    cache = rows * (context + 1) * layers * 2 * kv
    return element * torch.tensor([layers * of_layer, vocabulary * hidden, cache], dtype=torch.float64)


def bytes_mistakes(shape: tuple, rows: int, context: int, element: int) -> dict[str, Tensor]:
    """What usual mistakes give: [3]."""
    layers, hidden, heads, kv_heads, head_dim, intermediate, _, tied = shape
    q, kv = heads * head_dim, kv_heads * head_dim
    right = step_bytes(shape, rows, context, element)

    def changed(layer: float = 0, head: float = 1, cache: float = 1) -> Tensor:
        """`layer` numbers more in every layer, the others times a factor."""
        return torch.stack([right[0] + element * layers * layer, right[1] * head, right[2] * cache])

    biases, norms = q + 2 * kv, 2 * hidden
    return {
        "You left out the biases of query, key and value.": changed(-biases),
        "You left out the two norms of a layer.": changed(-norms),
        "Key and value projections have kv_heads x head_dim outputs.": changed(2 * (q - kv) * (hidden + 1)),
        "The MLP has three matrices: gate, up and down.": changed(-hidden * intermediate),
        "You counted one layer: there are more.": torch.stack([right[0] / layers, right[1], right[2]]),
        "The cache is that of one layer: every layer has its own.": changed(cache=1 / layers),
        "The cache holds those of kv_heads, not of all query heads.": changed(cache=heads / kv_heads),
        "The cache holds keys and values: twice as much.": changed(cache=0.5),
        "The cache is that of one row: each row has its own.": changed(cache=1 / rows),
        "The new token is written too: context + 1 tokens a row.": changed(cache=context / (context + 1)),
        "You multiplied the weights by rows: they are read once for all rows.": right * torch.tensor([rows, rows, 1]),
        "These are numbers, not bytes: multiply by element_bytes.": right / element,
        "An embedding of its own is not read: some rows are looked up.": changed(head=1 if tied else 2),
        "A tied head is read as well: each token needs all its logits.": changed(head=0 if tied else 1),
    }


def check_bytes(f, shape: tuple, rows: int, context: int, element: int) -> None:
    found = f(*shape, rows, context, element)
    expected = step_bytes(shape, rows, context, element)
    compare(found, expected, bytes_mistakes(shape, rows, context, element), atol=1e-3)


@q2.case("a head of its own, heads x head_dim other than hidden, bfloat16")
def _(f):
    check_bytes(f, WIDE, rows=draw(2, 90), context=draw(30, 900), element=2)


@q2.case("the embedded model, float32")
def _(f):
    check_bytes(f, TINY, rows=draw(2, 90), context=draw(30, 900), element=4)


@q2.case("one row without context, and a large model with many rows")
def _(f):
    check_bytes(f, TINY, rows=1, context=0, element=2)
    large = (24, 896, 14, 2, 64, 4864, 151936, True)
    check_bytes(f, large, rows=draw(200, 300), context=draw(300, 400), element=2)


q3 = Question("q3", "amdahl", hint="The new time is the sum of share / speed-up, plus the share that nothing sped up.")


def sped_up(shares: Tensor, speedups: Tensor) -> Tensor:
    """Speed-up of the whole, then the most each part alone can give: [1 + parts], by loops."""
    total = 1.0
    for share, speedup in zip(shares.tolist(), speedups.tolist(), strict=True):
        total += share / speedup - share
    return torch.tensor([1 / total, *(1 / (1 - share) for share in shares.tolist())], dtype=torch.float64)


def amdahl_mistakes(shares: Tensor, speedups: Tensor) -> dict[str, Tensor]:
    """What usual mistakes give: [1 + parts]."""
    right = sped_up(shares, speedups)
    shares, speedups = shares.double(), speedups.double()
    rest = 1 - shares.sum()
    beside = torch.cat([right[:1], 1 / (1 / right[0] - shares / speedups)])

    def first(value: Tensor) -> Tensor:
        return torch.cat([value.reshape(1), right[1:]])

    return {
        "You forgot the share that nothing sped up: it still takes its time.": first(1 / (shares / speedups).sum()),
        "You took the mean of the speed-ups: times add up, speed-ups do not.": first((shares * speedups).sum() + rest),
        "You multiplied the speed-ups: each holds for its own share alone.": first(speedups.prod()),
        "That is the new time: the speed-up is old over new.": first(1 / right[0]),
        "The limit of a part is 1 / (1 - its share).": torch.cat([right[:1], 1 / shares]),
        "The limit is asked for each part alone: the others as slow as before.": beside,
        "You multiplied a part's time by its speed-up: divide.": first(1 / ((shares * speedups).sum() + rest)),
    }


def check_amdahl(f, shares: Tensor | list[float], speedups: Tensor | list[float]) -> None:
    shares, speedups = torch.as_tensor(shares), torch.as_tensor(speedups)
    mistakes = amdahl_mistakes(shares, speedups)
    compare(f(shares, speedups), sped_up(shares, speedups), mistakes, atol=1e-4)


@q3.case("three parts and a rest; one part")
def _(f):
    check_amdahl(f, [0.6, 0.1, 0.2], torch.tensor([3.0, 2.0, 5.0]) + torch.rand(3))
    check_amdahl(f, [0.9], [10.0])


@q3.case("random shares; one part becomes slower")
def _(f):
    shares = torch.rand(4)
    check_amdahl(f, 0.9 * shares / shares.sum(), torch.tensor([0.5, 1.0, 4.0, 30.0]))


@q3.case("a part that takes no time any more: speed-up infinity")
def _(f):
    check_amdahl(f, [0.75, 0.2], [float("inf"), 2.0 + torch.rand(()).item()])


q4 = Question("q4", "decode_bound", hint="Seconds for the bytes, seconds for the operations, the larger of the two.")


def bound(rows: Tensor, weights: float, cache: float, element: int, copy: float, compute: float) -> Tensor:
    """Floor seconds and tokens/s: [2, sizes], one size after the other."""
    seconds = []
    for count in rows.tolist():
        of_bytes, of_flops = (element * weights + cache * count) / copy, 2 * weights * count / compute
        seconds.append(of_bytes if of_bytes > of_flops else of_flops)
    return torch.tensor([seconds, [c / s for c, s in zip(rows.tolist(), seconds, strict=True)]], dtype=torch.float64)


def bound_mistakes(rows: Tensor, weights: float, cache: float, element: int, copy: float, compute: float) -> dict:
    """What usual mistakes give: [2, sizes]."""
    count = rows.double()
    of_bytes, of_flops = (element * weights + cache * count) / copy, 2 * weights * count / compute
    floor = torch.maximum(of_bytes, of_flops)

    def table(seconds: Tensor) -> Tensor:
        return torch.stack([seconds, count / seconds])

    def moves(bytes_moved) -> Tensor:
        return table(torch.maximum(bytes_moved / copy + 0 * count, of_flops))

    weighed = "A weight costs two operations a row: a multiplication and an addition."
    return {
        "You added both times: bytes move while operations are done, so the larger counts.": table(of_bytes + of_flops),
        "You took the smaller time: a step waits for the slower of the two.": table(torch.minimum(of_bytes, of_flops)),
        "You looked at bytes alone: with many rows the operations take longer.": table(of_bytes),
        weighed: table(torch.maximum(of_bytes, of_flops / 2)),
        "Every row reads its own keys and values: they grow with rows.": moves(element * weights + cache),
        "You read the weights once a row: a step reads them once.": moves((element * weights + cache) * count),
        "Weights are numbers: multiply by element_bytes.": moves(weights + cache * count),
        "A step gives one token to every row: tokens/s is rows over seconds.": torch.stack([floor, 1 / floor]),
        "First the seconds, then the tokens a second.": table(floor).flip(0),
    }


def check_bound(f, rows: list[int], *numbers) -> None:
    sizes = torch.tensor(rows)
    mistakes = bound_mistakes(sizes, *numbers)
    found, expected = f(sizes, *numbers), bound(sizes, *numbers)
    scale = expected.amax(1, keepdim=True)  # so that microseconds are not all alike
    if isinstance(found, Tensor) and found.shape == expected.shape:
        found, expected = found / scale, expected / scale
        mistakes = {said: value / scale for said, value in mistakes.items()}
    compare(found, expected, mistakes, atol=1e-6, what="the result, each row over its largest value,")


@q4.case("from bytes to operations, on a slow machine in float32")
def _(f):
    check_bound(f, [1, 2, 8, 32, 128], 9e5 + draw(0, 10**5), 3e4, 4, 2e10, 1e11)


@q4.case("few rows on a fast machine: bytes; many: operations")
def _(f):
    weights = 5e8 + draw(0, 10**8)
    check_bound(f, [1, 4, 16], weights, 5e6, 2, 4e12, 8e14)
    check_bound(f, [512, 2048, 8192], weights, 1e3, 2, 4e12, 8e14)


q5 = Question(
    "q5", "self_times", hint="The parent of an event is the shortest one that holds it; take its time off there."
)


def own_times(starts: Tensor, ends: Tensor) -> Tensor:
    """Duration less that of the direct children, with a stack over the events in order: [events], float64."""
    found = (ends - starts).double()
    stack: list[int] = []
    for i in sorted(range(len(starts)), key=lambda i: (starts[i].item(), -ends[i].item())):
        while stack and ends[stack[-1]] <= starts[i]:
            stack.pop()
        if stack:
            found[stack[-1]] -= (ends[i] - starts[i]).double()
        stack.append(i)
    return found


def own_mistakes(starts: Tensor, ends: Tensor) -> dict[str, Tensor]:
    """What usual mistakes give: [events]."""
    starts, ends = starts.double(), ends.double()
    duration = ends - starts
    holds = (starts[:, None] <= starts) & (ends <= ends[:, None]) & ~torch.eye(len(starts), dtype=torch.bool)
    right = own_times(starts, ends)
    children = duration - right
    return {
        "That is the whole duration: take the children's off.": duration,
        "You took all descendants off: a grandchild is within a child already.": duration - holds.double() @ duration,
        "That is the time of the children: take it off the duration.": children,
        "Times of a trace are large: keep float64, float32 rounds them.": own_times(starts.float(), ends.float()),
    }


def check_own(f, starts: Tensor, ends: Tensor) -> None:
    compare(f(starts, ends), own_times(starts, ends), own_mistakes(starts, ends), atol=1e-4)


def tree(depth: int, begin: float, end: float) -> list[tuple[float, float]]:
    """Nested events: a few children with gaps between them, down to `depth`."""
    found = [(begin, end)]
    cuts = (begin + (end - begin) * torch.rand(4, dtype=torch.float64).sort().values).tolist()
    for left, right in (cuts[:2], cuts[2:]) if depth else ():
        found += tree(depth - 1, left, right)
    return found


def events(pairs: list[tuple[float, float]], shuffled: bool = False) -> tuple[Tensor, Tensor]:
    table = torch.tensor(pairs, dtype=torch.float64)
    table = table[torch.randperm(len(table))] if shuffled else table
    return table[:, 0].clone(), table[:, 1].clone()


@q5.case("a grandchild; siblings that touch; a child that begins or ends with its parent")
def _(f):
    a, b = (4 * torch.rand(2)).tolist()
    check_own(f, *events([(0.0, 100.0), (10.0, 40.0 + a), (15.0, 25.0 + b), (50.0, 90.0)]))
    check_own(f, *events([(0.0, 10.0), (0.0, 4.0), (4.0, 10.0), (4.0, 5.0 + a), (10.0, 12.0)]))


@q5.case("a deep random tree, shuffled: events come in any order")
def _(f):
    check_own(f, *events(tree(3, 0.0, 1000.0) + tree(2, 1000.0, 1500.0), shuffled=True))


@q5.case("times as in a trace: microseconds since the machine was started")
def _(f):
    starts, ends = events(tree(2, 0.0, 50.0), shuffled=True)
    check_own(f, starts + 6_839_553_812.0, ends + 6_839_553_812.0)


QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4, "q5": q5}
