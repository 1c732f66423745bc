"""Checks of the exercises of lesson 09: merging outputs, splits, operands of a tensor core, two causes, a kernel."""

import math

import torch
from torch import Tensor

from rlcourse import ptx
from rlcourse.course.checks import Question, compare, draw
from rlcourse.course.checks.kernels import SECONDS, Maker, execute, meaning

q1 = Question("q1", "merge_outputs", hint="How much of the weight of all tokens falls to one place? And to the sink?")


def check_merge(f, heads: int, lengths: list[int], spread: float = 1.0, shift: float = 0.0, sink: bool = True) -> None:
    """Places with so many random tokens each, against one softmax over all tokens and the sink in float64."""
    size, n = draw(3, 6), sum(lengths)
    scores, values = spread * torch.randn(heads, n) + shift, torch.randn(n, size)
    sinks = spread * torch.randn(heads) + shift if sink else torch.full((heads,), -torch.inf)
    logs = torch.stack([part.logsumexp(1) for part in scores.split(lengths, 1)])
    outputs = torch.stack(
        [
            part.softmax(1) @ value if len(value) else torch.zeros(heads, size)
            for part, value in zip(scores.split(lengths, 1), values.split(lengths), strict=True)
        ]
    )
    expected = torch.zeros(heads, size, dtype=torch.float64)
    for head in range(heads):  # one softmax over all tokens and the sink, whose value is nothing
        if n:
            weights = torch.cat([scores[head], sinks[head, None]]).double().softmax(0)
            expected[head] = weights[:-1] @ values.double()

    with_sink = torch.cat([logs, sinks[None]]).double()
    weights = (with_sink - with_sink.amax(0).clamp(min=-1e30)).exp()
    parts = weights[:-1, :, None] * outputs
    shares = weights[:-1].sum(0).clamp(min=1e-30)
    mistakes = {
        "You took the mean of the outputs: a place with more weight counts more.": outputs.mean(0),
        "You added the outputs as they are: each is normalised by itself.": outputs.sum(0),
        "The sink takes its share of the weight: it belongs into what you divide by.": parts.sum(0) / shares[:, None],
        "The weights are not divided by their sum.": parts.sum(0),
        "You kept the place with the largest log-sum: the others count too.": outputs.gather(
            0, logs.argmax(0)[None, :, None].expand(1, *outputs.shape[1:])
        )[0],
        "You weighted by the log-sums themselves: the weight of a place is the exponential of its log-sum.": (
            (logs.double()[..., None] * outputs).sum(0) / with_sink.sum(0)[:, None]
        ),
        "The sink is a score like others, not a number of tokens: take its exponential, too.": (
            parts.sum(0) / (shares + sinks.double())[:, None]
        ),
    }
    compare(f(outputs, logs, sinks), expected.float(), mistakes, atol=1e-4)


@q1.case("places of different lengths, no sink")
def _(f):
    check_merge(f, 3, [draw(2, 5), 1, draw(6, 10)], sink=False)
    check_merge(f, 2, [draw(3, 9)], sink=False)


@q1.case("a sink")
def _(f):
    check_merge(f, 3, [draw(2, 5), 1, draw(6, 10)])
    check_merge(f, 2, [6, 6], spread=3.0)


@q1.case("scores in the hundreds: exp of a log-sum alone is infinite, or zero")
def _(f):
    for shift in (400.0, -400.0):
        check_merge(f, 2, [draw(3, 6), 5, 5], spread=3.0, shift=shift)


@q1.case("a place that saw nothing (log-sum -inf)")
def _(f):
    check_merge(f, 3, [0, draw(2, 6), 3], sink=False)
    check_merge(f, 3, [draw(2, 6), 0])


@q1.case("a head of which nobody saw anything gives zeros")
def _(f):
    check_merge(f, 2, [0, 0], sink=False)
    check_merge(f, 2, [0, 0])
    check_merge(f, 2, [draw(2, 4), 5])


q2 = Question("q2", "best_splits", hint="Write down the tiles of every CTA in order, cut the list into waves.")


def wave_time(tokens: list[int], at_once: int, fixed: int, splits: int, mistake: str = "") -> int:
    """Time of the launch in tiles: waves of `at_once` CTAs, each as long as its longest."""
    tile = 1 if mistake == "tokens" else 16
    ctas = []
    for count in tokens:
        tiles = -(-count // tile)
        part = -(-tiles // splits)
        ctas += [max(0, min(part, tiles - i * part)) for i in range(splits)]
    if mistake == "by split":
        ctas = [ctas[r * splits + i] for i in range(splits) for r in range(len(tokens))]
    if mistake == "mean":
        return sum(ctas) / at_once + fixed * -(-len(ctas) // at_once)
    waves = [ctas[i : i + at_once] for i in range(0, len(ctas), at_once)]
    if mistake == "full waves":
        waves = waves[: max(1, len(ctas) // at_once)]
    return sum(max(wave) + (0 if mistake == "free" else fixed) for wave in waves)


def check_splits(f, tokens: list[int], at_once: int, most: int, fixed: int) -> None:
    def best(mistake="", last=False) -> Tensor:
        times = {s: wave_time(tokens, at_once, fixed, s, mistake) for s in range(1, most + 1)}
        least = min(times.values())
        found = [s for s, time in times.items() if time == least]
        return torch.tensor([found[-1 if last else 0], least], dtype=torch.float32)

    whole = best("full waves")
    filled = max(1, min(most, at_once // len(tokens)))
    mistakes = {
        "A last wave that is not full takes time too.": whole,
        "Each wave costs `fixed` once: a CTA has to start and to end.": best("free"),
        "Tokens are counted, not tiles of 16: round up to whole tiles.": best("tokens"),
        "CTAs start pair by pair: all splits of the first pair, then those of the second.": best("by split"),
        "A wave takes as long as its longest CTA, not the mean.": best("mean"),
        "Of several that take the same time, the smallest number of splits is wanted.": best(last=True),
        "Filling the card is not always best: try every number of splits.": torch.tensor(
            [float(filled), float(wave_time(tokens, at_once, fixed, filled))]
        ),
    }
    compare(f(torch.tensor(tokens), at_once, most, fixed), best(), mistakes)


def check_random(f, pairs: int, at_once: int) -> None:
    check_splits(f, torch.randint(1, 900, (pairs,)).tolist(), at_once, draw(8, 12), draw(1, 4))


@q2.case("few rows on a large card")
def _(f):
    check_splits(f, [450] * 8, 132, 16, 2)
    check_splits(f, [512] * 4, 40, 16, 8)
    check_random(f, 4, 60)


@q2.case("as many pairs as the card holds, or more")
def _(f):
    check_splits(f, [300] * 20, 20, 8, 3)
    check_splits(f, [1000] * 21, 20, 12, 1)
    check_random(f, 25, 20)


@q2.case("rows of different lengths")
def _(f):
    check_splits(f, [16, 1000, 40, 40, 500, 1], 8, 12, 2)
    check_splits(f, [700, 33, 120, 900, 15, 16, 17], 5, 10, 1)
    check_random(f, 9, 7)


@q2.case("one token a row: nothing to split")
def _(f):
    check_splits(f, [1, 1, 1], 10, 8, 2)
    check_splits(f, [1] * draw(4, 60), draw(3, 12), 8, draw(1, 40))


q3 = Question("q3", "value_registers", hint="Registers and lanes say the row and column; the row says the dimension.")


def registers(values: Tensor, row=lambda i, g, half: 8 * g + 2 * i + half, column=lambda c, p, far: 2 * c + p + 8 * far,
              order=(0, 1, 2), by_g=True) -> Tensor:  # fmt: skip
    """[4, 32, 8] by the definition; order: which bit of a register's number is pair, row half, column half."""
    found = torch.zeros(4, 32, 8)
    for i in range(4):
        for lane in range(32):
            g, c = (lane // 4, lane % 4) if by_g else (lane % 8, lane // 8)
            for number in range(8):
                bits = [number >> k & 1 for k in range(3)]
                p, half, far = (bits[k] for k in order)
                found[i, lane, number] = values[column(c, p, far), row(i, g, half)]
    return found


def check_registers(f, values: Tensor) -> None:
    mistakes = {
        "Rows are not given new numbers: row x of product i is dimension 8 (x mod 8) + 2 i + x div 8.": registers(
            values, row=lambda i, g, half: 16 * i + g + 8 * half
        ),
        "The second half of the rows (g + 8) belongs to the odd dimension of a pair, not to the next eight.": registers(
            values, row=lambda i, g, half: 8 * g + i + 4 * half
        ),
        "A lane's columns are 2c, 2c + 1, 2c + 8 and 2c + 9, not four in a row.": registers(
            values, column=lambda c, p, far: 4 * c + p + 2 * far
        ),
        "Registers 2 and 3 are the lower rows, 4 and 5 the farther columns: you have them exchanged.": registers(
            values, order=(0, 2, 1)
        ),
        "Registers 0 and 1 lie side by side in a row, not one below the other.": registers(values, order=(1, 0, 2)),
        "Lane 4 g + c: g is lane // 4 and c is lane % 4.": registers(values, by_g=False),
    }
    compare(f(values), registers(values), mistakes)


@q3.case("numbered values: token + dimension / 100")
def _(f):
    check_registers(f, torch.arange(16.0)[:, None] + torch.arange(64.0) / 100)
    check_registers(f, torch.randn(16, 64))


@q3.case("random values")
def _(f):
    check_registers(f, torch.randn(16, 64))


@q3.case("every value is held once")
def _(f):
    values = torch.randperm(1024).float().view(16, 64)
    found = torch.as_tensor(f(values))
    held = torch.bincount(found.flatten().long().clamp(0, 1023), minlength=1024)
    assert (held == 1).all(), (
        f"{int((held == 0).sum())} values are held by no lane, {int((held > 1).sum())} several times"
    )
    check_registers(f, values)


q4 = Question(
    "q4", "two_changes", hint="Write one function for the longest of the three times, and call it four times."
)


def check_changes(f, bytes_us: float, issue_us: tuple[float, float], waiting_us: tuple[float, float]) -> None:
    """A card and two kernels of which each of the three times is known, and what the function makes of them."""
    data, answer = 1e6 * draw(1, 200), 0.4 + torch.rand(()).item()
    ghz, sms = 1 + torch.rand(()).item(), draw(40, 140)
    gb_s = data / 1e9 / (bytes_us * 1e-6)
    issue_a_second = 4 * sms * ghz * 1e9
    instructions = torch.tensor([t * 1e-6 * issue_a_second for t in issue_us], dtype=torch.float64)
    way = torch.tensor([data * answer / t for t in waiting_us], dtype=torch.float64)

    def answers(combine=max, of=((0, 0), (1, 0), (0, 1), (1, 1)), swap=False, issue=1.0, memory=1.0, fixed=False):
        waits = [answer, answer] if fixed else waiting_us
        times = [combine([memory * bytes_us, issue * issue_us[i], waits[w]]) for i, w in of]
        verdict = 2 if math.isclose(times[1], times[2]) else int(times[1] > times[2])
        return torch.tensor([*times, 1 - verdict if swap and verdict < 2 else verdict], dtype=torch.float64)

    mistakes = {
        "The three do not follow one another: the time is the longest of them, not their sum.": answers(sum),
        "The time is the longest of the three, not the shortest.": answers(min),
        "An SM has four schedulers.": answers(issue=4.0),
        "All SMs issue instructions at the same time.": answers(issue=float(sms)),
        "The units: a GB/s is a thousand bytes a µs.": answers(memory=1e3),
        "The units: a GHz is a thousand cycles a µs.": answers(issue=1e3),
        "In each answer time `way` bytes arrive, and `data` are wanted: it is waited for more than once.": answers(
            fixed=True
        ),
        "The second number is with the new instructions, the third with the new bytes on their way.": answers(
            of=((0, 0), (0, 1), (1, 0), (1, 1))
        ),
        "The times are right, the verdict is the wrong way round: first what saves more.": answers(swap=True),
    }
    arguments = instructions, way, gb_s, ghz, sms, answer
    compare(f(data, *arguments), answers(), mistakes, atol=1e-3)


def times(low: float, high: float) -> float:
    return low + (high - low) * torch.rand(()).item()


@q4.case("the old kernel waits for answers")
def _(f):
    check_changes(f, times(5, 10), (times(20, 30), times(2, 4)), (times(50, 90), times(5, 10)))
    check_changes(f, times(5, 10), (times(20, 30), times(11, 14)), (times(50, 90), times(5, 10)))


@q4.case("the old kernel is bound by its instructions")
def _(f):
    check_changes(f, times(5, 10), (times(50, 90), times(2, 4)), (times(20, 30), times(5, 10)))


@q4.case("the bytes take longest, whatever changes")
def _(f):
    check_changes(f, times(60, 90), (times(20, 40), times(2, 4)), (times(20, 40), times(5, 10)))


@q4.case("any card and any kernel")
def _(f):
    for _ in range(5):
        check_changes(f, times(1, 60), (times(30, 90), times(1, 30)), (times(30, 90), times(1, 30)))


q5 = Question(
    "q5",
    "WarpAttention",
    hint="Begin with the score of one slot: products of a lane, then a sum over lanes.",
    seconds=SECONDS,
    caller=Maker,
)


MEANING = {
    ptx.Uninitialised: "Something is read that was never written: a part of `out`?",
    ptx.OutOfBounds: "An access beside its tensor: check first, last and the lane's elements.",
    ptx.Race: "Two blocks write the same place: each has its own pair.",
}


def check_kernel(f, spans: list[tuple[int, int]], slots: int, size: int = 64, scores=None) -> None:
    """spans: (first, last) of each pair. Slots outside hold nan, so that whoever reads them is found out. scores: what
    the scores shall be, [slots], the same for all pairs; random ones if not given."""
    pairs, inside = len(spans), torch.zeros(len(spans), slots, dtype=torch.bool)
    for pair, (first, last) in enumerate(spans):
        inside[pair, first:last] = True
    q, keys, values = torch.randn(pairs, size), *torch.randn(2, pairs, slots, size).unbind(0)
    if scores is not None:  # replace the part of the keys that lies along the query
        along = q / q.square().sum(1, keepdim=True)
        wanted = scores * math.sqrt(size) - torch.einsum("pd,psd->ps", q, keys)
        keys = keys + wanted[..., None] * along[:, None]
    first, last = (torch.tensor(ends, dtype=torch.int32) for ends in zip(*spans, strict=True))
    poisoned = [x.masked_fill(~inside[..., None], torch.nan) for x in (keys, values)]
    out = torch.full((pairs, size), torch.nan)
    tensors = {"q": q, "keys": poisoned[0], "values": poisoned[1], "first": first, "last": last, "out": out}
    execute(lambda: f(size), tensors, says=lambda error: MEANING.get(type(error)) or meaning(error))

    def attend(scale=size**-0.5, spans=spans, divide=True, power=math.e, lane=slice(None)) -> Tensor:
        found = torch.zeros(pairs, size, dtype=torch.float64)
        for pair, (a, b) in enumerate(spans):
            if b > a:
                products = keys[pair, a:b, lane].double() @ q[pair, lane].double()
                weights = (scale * math.log(power) * (products - products.max())).exp()
                found[pair] = weights @ values[pair, a:b].double() / (weights.sum() if divide else 1)
        return found.float()

    def online(start=-1e30, rescale_l=True, rescale_acc=True) -> Tensor:
        """Slot by slot in float32, as the kernel does it, with a mistake in it."""
        found = torch.zeros(pairs, size)
        for pair, (a, b) in enumerate(spans):
            m, total, acc = torch.tensor(start), torch.tensor(0.0), torch.zeros(size)
            for slot in range(a, b):
                score = keys[pair, slot] @ q[pair] * (math.log2(math.e) * size**-0.5)
                m_new = torch.maximum(m, score)
                alpha, weight = (m - m_new).exp2(), (score - m_new).exp2()
                total = total * (alpha if rescale_l else 1) + weight
                acc = acc * (alpha if rescale_acc else 1) + weight * values[pair, slot]
                m = m_new
            found[pair] = acc / total.clamp(min=1e-30)
        return found

    own = torch.cat([attend(lane=slice(d, None, 32))[:, d::32, None] for d in range(32)], dim=2).flatten(1)
    mistakes = {
        "The scores are not scaled: divide by the square root of the head size.": attend(scale=1.0),
        "A power of 2 needs scores times log2(e).": attend(power=2),
        "The sum is not divided by l.": attend(divide=False),
        "The last slot, last - 1, is left out.": attend(spans=[(a, max(a, b - 1)) for a, b in spans]),
        "The first slot is left out.": attend(spans=[(min(a + 1, b), b) for a, b in spans]),
        "A lane's part of the product is not the score: sum it over all lanes of the warp.": own,
        "m begins at 0, and all scores may be far below it: begin with a number that is lower than any score.": (
            online(start=0.0)
        ),
        "acc is not rescaled where a new maximum is met: what it holds has the old one.": online(rescale_acc=False),
        "l is not rescaled where a new maximum is met: what it holds has the old one.": online(rescale_l=False),
        "Neither l nor acc is rescaled where a new maximum is met: what they hold has the old one.": (
            online(rescale_l=False, rescale_acc=False)
        ),
    }
    if torch.as_tensor(out).isnan().any():
        if scores is not None:
            raise AssertionError(
                "The result has nan where scores are large: a power of a score is infinite unless the maximum so far "
                "is taken off first."
            )
        raise AssertionError(
            "The result has nan: a slot outside first..last - 1 was read (they hold nan here), an element of `out` was "
            "not written, or 0 / 0 in a row without slots."
        )
    compare(out, attend(), mistakes, atol=2e-3)


@q5.case("two pairs, all slots")
def _(f):
    check_kernel(f, [(0, 12), (0, 12)], 12)


@q5.case("left padding and unused slots, poisoned with nan")
def _(f):
    check_kernel(f, [(3, 10), (0, 7), (9, 14)], 16)


@q5.case("one token, a row without any, and the last slot of the cache")
def _(f):
    check_kernel(f, [(0, 1), (4, 4), (7, 8)], 8)


@q5.case("scores that rise, and scores that fall")
def _(f):
    rising = (6 * torch.rand(14)).cumsum(0) / 8
    check_kernel(f, [(0, 14)], 14, scores=rising)
    check_kernel(f, [(0, 14)], 14, scores=-rising)


@q5.case("scores far above zero, and all of them far below it")
def _(f):
    check_kernel(f, [(0, 10), (2, 9)], 10, scores=300 + 4 * torch.rand(10))
    check_kernel(f, [(0, 10), (2, 9)], 10, scores=-300 - 4 * torch.rand(10))


@q5.case("heads of 128")
def _(f):
    check_kernel(f, [(2, 9)], 10, size=128)


QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4}
KERNELS = {"q5": q5}
