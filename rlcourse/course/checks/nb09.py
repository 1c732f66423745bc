"""Checks of lesson 09: merging outputs, splits, operands of a tensor core, two causes, a decode-attention kernel."""

import itertools
import math

import torch
from torch import Tensor

from rlcourse.course.checks import Question, between, compare, draw
from rlcourse.course.checks.kernels import check_kernel, kernel_question

q1 = Question("q1", "merge_outputs", hint="How much of the weight of all tokens falls to one place? And to the sink?")


@q1.expects(also={
    "You took the mean of the outputs: a place with more weight counts more.": lambda outputs, *_: outputs.mean(0),
    "The sink takes its share of the weight: it belongs into what you divide by.": {"sinks": False},
    "The weights are not divided by their sum.": {"divide": False},
    "Each head has a largest log-sum of its own: you took one for all heads.": {"top": lambda x: x.float().max()},
}, atol=1e-4)  # fmt: skip
def merged(outputs: Tensor, logs: Tensor, sink: Tensor, sinks=True, divide=True, top=lambda x: x.amax(0)):
    """The outputs weighted by their log-sums, in float64, or with a mistake: [heads, size]."""
    every = torch.cat([logs, sink[None]]).double()
    weights = (every - top(every).clamp(min=-1e30)).exp()  # of the places and of the sink
    total = weights.sum(0) if sinks else weights[:-1].sum(0)
    return (weights[:-1, :, None] * outputs).sum(0) / (total.clamp(min=1e-30)[:, None] if divide else 1)


def check_merge(f, heads: int, lengths: list[int], shift=0.0, apart=0.0, sink=True, nan="") -> None:
    """Places with so many random tokens each, against one softmax over all tokens and the sink in float64. apart: how
    much higher the scores of each head are than those of the head before; nan: why a result may be nan or infinite."""
    size, n, height = draw(3, 6), sum(lengths), shift + apart * torch.arange(heads)
    scores, values = 3 * torch.randn(heads, n) + height[:, None], torch.randn(n, size)
    sinks = 3 * torch.randn(heads) + height if sink else torch.full((heads,), -torch.inf)
    places = list(zip(scores.split(lengths, 1), values.split(lengths), strict=True))
    logs = torch.stack([part.logsumexp(1) for part, _ in places])
    outputs = torch.stack([part.softmax(1).nan_to_num() @ value for part, value in places])
    every = torch.cat([scores, sinks[:, None]], 1).double().softmax(1)[:, :-1]
    expected = every @ values.double() if n else torch.zeros(heads, size)  # the sink's value is nothing
    mistakes = {said: wrong(outputs, logs, sinks) for said, wrong in q1.mistakes.items()}
    compare(f(outputs, logs, sinks), expected, mistakes, atol=1e-4, not_finite=nan)


OVERFLOW = "exp(400) is infinite and exp(-400) is 0: take off the head's largest log-sum, or sink, before the exp."
EMPTY = "-inf - (-inf) is nan, and so is 0 / 0: for a head of which nobody saw anything, take off a finite number."
q1.case("places of different lengths, without a sink and with one")(
    lambda f: [check_merge(f, 3, [draw(2, 5), 1, draw(6, 10)], sink=sink) for sink in (False, True)]
)


@q1.case("scores in the hundreds, or heads hundreds apart: exp of a log-sum alone is infinite, or zero")
def _(f):
    for shift in (400.0, -400.0, 800.0, -800.0):  # the latter are too much for float64 as well
        check_merge(f, 2, [draw(3, 6), 5, 5], shift, nan=OVERFLOW)
    own = "nan: each head has a largest log-sum of its own, and next to another head's all its weights are 0."
    check_merge(f, 3, [draw(3, 6), 5, 5], -300.0, apart=300.0, nan=own)


q1.case("a place that saw nothing (log-sum -inf), and a head of which nobody saw anything: zeros")(
    lambda f: [check_merge(f, 3, [0, draw(2, 6), 3], sink=False), check_merge(f, 2, [0, 0], sink=False, nan=EMPTY)]
)

q2 = Question("q2", "best_splits", hint="Write down the tiles of every CTA in order, cut the list into waves.")


def wave_time(tokens: list[int], at_once: int, fixed: int, splits: int, mistake: str = "") -> float:
    """In tiles: waves of `at_once` CTAs, each as long as its longest."""
    tile, ctas = 1 if mistake == "tokens" else 16, []
    for count in tokens:
        tiles = -(-count // tile)
        part = -(-tiles // splits)
        if mistake == "even":
            ctas += [(tiles + splits - 1 - i) // splits for i in range(splits)]
        else:
            ctas += [max(0, min(part, tiles - i * part)) for i in range(splits)]
    waves = [ctas[i : i + at_once] for i in range(0, len(ctas), at_once)]
    if mistake == "full waves":
        waves = waves[: max(1, len(ctas) // at_once)]
    return sum(max(wave) + (0 if mistake == "free" else fixed) for wave in waves)


@q2.expects({
    "full waves": "A last wave that is not full takes time too.",
    "free": "Each wave costs `fixed` once: a CTA has to start and to end.",
    "tokens": "Tokens are counted, not tiles of 16: round up to whole tiles.",
    "even": "Each CTA takes ceil(tiles / s) tiles as long as there are any: the last may get none.",
})  # fmt: skip
def best_by_trying(tokens: Tensor, at_once: int, most: int, fixed: int, mistake: str = "") -> Tensor:
    """The smallest number of splits with the least time, and that time."""
    times = [wave_time(tokens.tolist(), at_once, fixed, splits, mistake) for splits in range(1, most + 1)]
    return torch.tensor([1 + times.index(min(times)), min(times)], dtype=torch.float32)


q2.case("few rows on a large card, and more than it holds")(lambda f: [
    q2.check(f, torch.randint(1, 900, (pairs,)), at_once, draw(8, 12), draw(1, 4))
    for pairs, at_once in ((4, 60), (25, 20))
])  # fmt: skip
q2.case("rows of different lengths, and of one token: nothing to split")(lambda f: [
    q2.check(f, torch.tensor([120, 200, 250, 120]), 7, 10, 3),  # dealt out evenly the tiles would take another time
    q2.check(f, torch.randint(1, 900, (9,)), 7, draw(8, 12), draw(1, 4)),
    q2.check(f, torch.ones(draw(4, 60), dtype=torch.long), draw(3, 12), 8, draw(1, 40)),
])  # fmt: skip

q3 = Question("q3", "value_registers", hint="Registers and lanes say the row and column; the row says the dimension.")


@q3.expects(also={
    "Rows have new numbers: 8 (x mod 8) + 2 i + x div 8.": {"row": lambda i, g, half: 16 * i + g + 8 * half},
    "Rows g + 8 are the odd dimension of a pair, not the next eight.": {"row": lambda i, g, half: 8 * g + i + 4 * half},
    "Columns are 2c, 2c + 1, 2c + 8, 2c + 9, not four in a row.": {"column": lambda c, p, far: 4 * c + p + 2 * far},
    "Registers 2 and 3 are the lower rows, 4 and 5 the farther columns: you exchanged them.": {"order": (0, 2, 1)},
    "Registers 0 and 1 lie side by side in a row, not one below the other.": {"order": (1, 0, 2)},
    "Lane 4 g + c: g is lane // 4 and c is lane % 4.": {"by_g": False},
})  # fmt: skip
def registers(values: Tensor, row=lambda i, g, half: 8 * g + 2 * i + half, column=lambda c, p, far: 2 * c + p + 8 * far,
              order=(0, 1, 2), by_g=True) -> Tensor:  # fmt: skip
    """[4, 32, 8] by the definition; order: which bit of a register's number is pair, row half, column half."""
    found = torch.zeros(4, 32, 8)
    for i, lane, number in itertools.product(range(4), range(32), range(8)):
        g, c = (lane // 4, lane % 4) if by_g else (lane % 8, lane // 8)
        p, half, far = (number >> k & 1 for k in order)
        found[i, lane, number] = values[column(c, p, far), row(i, g, half)]
    return found


q3.case("random values")(lambda f: q3.check(f, torch.randn(16, 64)))

q4 = Question("q4", "two_changes", hint="Write one function for the longest of the three times; call it four times.")


@q4.expects(also={
    "The three do not follow one another: the time is the longest of them, not their sum.": {"combine": sum},
    "An SM has four schedulers.": {"schedulers": 1},
    "The units: a GB/s is a thousand bytes per µs.": {"unit": 1.0},
    "In each latency `flight` bytes arrive, and `data` are wanted: you wait more than once.": {"once": True},
}, atol=1e-3)  # fmt: skip
def two_times(data, instructions, flight, gb_s, ghz, sms, latency, combine=max, schedulers=4, unit=1e3, once=False):
    """The four times in µs and which change to make first: [5] float64."""
    issue = [i / (schedulers * sms * ghz * 1e3) for i in instructions.tolist()]
    waits = [latency if once else data * latency / some for some in flight.tolist()]
    ways = (0, 0), (1, 0), (0, 1), (1, 1)
    times = [combine([data / (gb_s * unit), issue[i], waits[w]]) for i, w in ways]
    first = 2 if math.isclose(times[1], times[2]) else int(times[1] > times[2])
    return torch.tensor([*times, first], dtype=torch.float64)


def check_times(f, moving: tuple, old_issue: tuple, new_issue: tuple, old_wait: tuple, new_wait: tuple) -> None:
    """A card and two kernels whose times in µs are drawn from these spans."""
    bytes_us, issue_us = between(*moving), (between(*old_issue), between(*new_issue))
    waiting_us = between(*old_wait), between(*new_wait)
    data, latency, ghz, sms = 1e6 * draw(1, 200), between(0.4, 1.4), between(1, 2), draw(40, 140)
    instructions = torch.tensor([t * 1e-6 * 4 * sms * ghz * 1e9 for t in issue_us], dtype=torch.float64)
    flight = torch.tensor([data * latency / t for t in waiting_us], dtype=torch.float64)
    q4.check(f, data, instructions, flight, data / bytes_us / 1e3, ghz, sms, latency)


q4.case("the old kernel waits for memory, or is bound by its instructions")(lambda f: [
    check_times(f, (5, 10), (20, 30), (2, 4), (50, 90), (5, 10)),
    check_times(f, (5, 10), (20, 30), (11, 14), (50, 90), (5, 10)),
    check_times(f, (5, 10), (50, 90), (2, 4), (20, 30), (5, 10)),
])  # fmt: skip
q4.case("the bytes take longest, whatever changes")(
    lambda f: check_times(f, (60, 90), (20, 40), (2, 4), (20, 40), (5, 10))
)

q5 = kernel_question("q5", "WarpAttention", "Begin with the score of one slot: products of a lane, a sum over lanes.")


def online(q: Tensor, keys: Tensor, values: Tensor, start=-1e30, rescale_l=True, rescale_acc=True) -> Tensor:
    """Slot by slot in float32, as the kernel does it."""
    m, total, acc = torch.tensor(start), torch.tensor(0.0), torch.zeros(len(q))
    for score, value in zip(keys @ q * (math.log2(math.e) * len(q) ** -0.5), values, strict=True):
        m_new = torch.maximum(m, score)
        alpha, weight = (m - m_new).exp2(), (score - m_new).exp2()
        total = total * (alpha if rescale_l else 1) + weight
        acc = acc * (alpha if rescale_acc else 1) + weight * value
        m = m_new
    return acc / total.clamp(min=1e-30)


def attend(q: Tensor, keys: Tensor, values: Tensor, scale=1.0, divide=True, lanes=1) -> Tensor:
    """In float64. lanes: each takes products of its own elements for the score."""
    found = torch.zeros(len(q), dtype=torch.float64)
    for lane in range(lanes if len(keys) else 0):
        own = slice(lane, None, lanes)
        scores = scale * len(q) ** -0.5 * (keys[:, own].double() @ q[own].double())
        weights = (scores - scores.max()).exp()
        found[own] = weights @ values[:, own].double() / (weights.sum() if divide else 1)
    return found.float()


def check_spans(f, spans: list[tuple[int, int]], slots: int, size: int = 64, scores: Tensor | None = None) -> None:
    """spans: (first, last) of each pair. Slots outside hold nan, so that whoever reads them is found out. scores: what
    the scores shall be, [slots], the same for all pairs; random ones if not given."""
    pairs = len(spans)
    q, keys, values = torch.randn(pairs, size), *torch.randn(2, pairs, slots, size).unbind(0)
    if scores is not None:  # replace the part of the keys that lies along the query
        wanted = scores * math.sqrt(size) - torch.einsum("pd,psd->ps", q, keys)
        keys = keys + wanted[..., None] * (q / q.square().sum(1, keepdim=True))[:, None]
    first, last = (torch.tensor(ends, dtype=torch.int32) for ends in zip(*spans, strict=True))
    outside = (torch.arange(slots) < first[:, None]) | (torch.arange(slots) >= last[:, None])
    poisoned = [x.masked_fill(outside[..., None], torch.nan) for x in (keys, values)]
    inputs = {"q": q, "keys": poisoned[0], "values": poisoned[1], "first": first, "last": last}

    def each(function, cut=slice(None), **mistake) -> Tensor:
        parts = [(q[i], keys[i, a:b][cut], values[i, a:b][cut]) for i, (a, b) in enumerate(spans)]
        return torch.stack([function(*part, **mistake) for part in parts])

    mistakes = {
        "The scores are not scaled: divide by the square root of the head size.": each(attend, scale=size**0.5),
        "A power of 2 needs scores times log2(e).": each(attend, scale=math.log(2)),
        "The sum is not divided by l.": each(attend, divide=False),
        "The last slot, last - 1, is left out.": each(attend, cut=slice(None, -1)),
        "A lane's part of the product is not the score: sum it over all lanes of the warp.": each(attend, lanes=32),
        "m begins at 0, and all scores may be far below it: begin lower than any score.": each(online, start=0.0),
        "acc is not rescaled where a new maximum is met: it has the old one.": each(online, rescale_acc=False),
        "l is not rescaled where a new maximum is met: it has the old one.": each(online, rescale_l=False),
    }
    said = "are nan: you read a slot outside first..last - 1, or divided 0 by 0 for a pair without slots."
    said = said if scores is None else "are nan: a power overflows unless the maximum so far is taken off first."
    check_kernel(lambda: f(size), inputs, each(attend), mistakes, atol=2e-3, nan=said)


q5.case("two pairs, all slots, also heads of 128")(
    lambda f: [check_spans(f, [(0, 12), (0, 12)], 12, size) for size in (64, 128)]
)
q5.case("left padding and unused slots, poisoned with nan; one token, none, and the last slot of the cache")(
    lambda f: [check_spans(f, *spans) for spans in (([(3, 10), (0, 7), (9, 14)], 16), ([(0, 1), (4, 4), (7, 8)], 8))]
)
q5.case("scores that rise, and scores that fall")(
    lambda f: [check_spans(f, [(0, 14)], 14, scores=sign * (6 * torch.rand(14)).cumsum(0) / 8) for sign in (1, -1)]
)
q5.case("scores far above zero, and all of them far below it")(
    lambda f: [check_spans(f, [(0, 10), (2, 9)], 10, scores=height + 4 * torch.rand(10)) for height in (300, -300)]
)
