"""Answers to the exercises of lesson 09."""

from functools import partial

import torch


def merged(outputs, logs, sink, sinks=True, divide=True, top=lambda every: every.amax(0)):
    every = torch.cat([logs, sink[None]])
    weights = (every - top(every).clamp(min=-1e30)).exp()  # of the places and of the sink
    total = weights.sum(0) if sinks else weights[:-1].sum(0)
    return (weights[:-1, :, None] * outputs).sum(0) / (total.clamp(min=1e-30)[:, None] if divide else 1)


def times(tokens, at_once, most, fixed, tile=16, start=1, even=False):
    found = []
    for s in range(start, most + 1):
        line = []
        for n in tokens.tolist():
            tiles, left = -(-n // tile), -(-n // tile)
            for i in range(s):
                line.append((tiles + s - 1 - i) // s if even else min(left, -(-tiles // s)))
                left -= line[-1]
        found.append([line[i : i + at_once] for i in range(0, len(line), at_once)])
    return found


def chosen(cost, last=False, **options):
    def f(tokens, at_once, most, fixed):
        found = [cost(waves, at_once, fixed) for waves in times(tokens, at_once, most, fixed, **options)]
        splits = [s for s, time in enumerate(found, 1) if time == min(found)][-1 if last else 0]
        return torch.tensor([splits, min(found)], dtype=torch.float32)

    return f


def longest(waves, at_once, fixed):
    return float(sum(max(wave) + fixed for wave in waves))


def held(values, row=lambda i, g, h: 8 * g + 2 * i + h, column=lambda c, p, f: 2 * c + p + 8 * f, bits=(0, 1, 2),
         lane_of=lambda lane: (lane // 4, lane % 4)):  # fmt: skip
    found = torch.zeros(4, 32, 8)
    for i, lane, number in torch.cartesian_prod(torch.arange(4), torch.arange(32), torch.arange(8)).tolist():
        g, c = lane_of(lane)
        p, h, f = (number >> bit & 1 for bit in bits)
        found[i, lane, number] = values[column(c, p, f), row(i, g, h)]
    return found


def changes(data, instructions, way, gb_s, ghz, sms, answer, combine=max, schedulers=4, fixed=False, **wrong):
    def time(i, w):
        waits = answer if fixed else data / way[w].item() * answer
        issue = instructions[i].item() / (schedulers * sms * ghz * 1e3)
        return combine([data / (gb_s * (1 if wrong.get("units") else 1e3)), issue, waits])

    old, fewer, more, new = time(0, 0), time(1, 0), time(0, 1), time(1, 1)
    if wrong.get("exchanged"):
        fewer, more = more, fewer
    first = 2 if fewer == more else int(more < fewer)
    return torch.tensor([old, fewer, more, new, 1 - first if wrong.get("swap") and first < 2 else first]).double()


def first_of_both(*arguments):
    """Takes 0 for what to do first where neither brings anything."""
    found = changes(*arguments)
    found[4] = found[4] % 2
    return found


RIGHT = {"q1": merged, "q2": chosen(longest), "q3": held, "q4": changes}
WRONG = {
    "q1": {
        "mean": (lambda o, s, k: o.mean(0), "mean of the outputs"),
        "no sink": (partial(merged, sinks=False), "takes its share"),
        "one top": (partial(merged, top=torch.max), "one for all heads"),
        "not divided": (partial(merged, divide=False), "not divided by their sum"),
    },
    "q2": {
        "full waves": (chosen(lambda w, a, f: longest([x for x in w if len(x) == a] or w[:1], a, f)), "last wave"),
        "free": (chosen(lambda w, a, f: longest(w, a, 0)), "has to start and to end"),
        "tokens": (chosen(longest, tile=1), "whole tiles"),
        "mean": (chosen(lambda w, a, f: sum(map(sum, w)) / a + f * len(w)), "its longest CTA"),
        "largest": chosen(longest, last=True),
        "even": (chosen(longest, even=True), "the last may get none"),
        "never": lambda t, a, m, f: torch.tensor([1.0, longest(times(t, a, 1, f)[0], a, f)]),
    },
    "q3": {
        "plain": (partial(held, row=lambda i, g, h: 16 * i + g + 8 * h), "new numbers"),
        "half": (partial(held, row=lambda i, g, h: 8 * g + i + 4 * h), "odd dimension"),
        "four": (partial(held, column=lambda c, p, f: 4 * c + p + 2 * f), "four in a row"),
        "exchanged": (partial(held, bits=(0, 2, 1)), "exchanged"),
        "below": (partial(held, bits=(1, 0, 2)), "side by side"),
        "lanes": (partial(held, lane_of=lambda lane: (lane % 8, lane // 8)), "lane // 4"),
        "transposed": lambda values: held(values).transpose(1, 2),
    },
    "q4": {
        "sum": (partial(changes, combine=sum), "not their sum"),
        "one scheduler": (partial(changes, schedulers=1), "four schedulers"),
        "units": (partial(changes, units=True), "a thousand bytes"),
        "answered once": (partial(changes, fixed=True), "more than once"),
        "exchanged": (partial(changes, exchanged=True), "second number"),
        "swap": partial(changes, swap=True),
        "no draw": first_of_both,
    },
}

EDITS = {
    "q5": {
        "no score is -inf here": ("Float32(-1e30)", "-Float32.inf", None),
        "a condition": (
            "acc[e] / cute.arch.fmax(l, Float32(1e-30))",
            "acc[e] / l if end > begin else Float32(0.0)",
            None,
        ),
        "not scaled": ("(math.log2(math.e) / math.sqrt(self.size))", "math.log2(math.e)", "square root"),
        "m begins at 0": ("m, l = Float32(-1e30), Float32(0.0)", "m, l = Float32(0.0), Float32(0.0)", "m begins at 0"),
        "acc not rescaled": ("acc[e] * alpha + weight", "acc[e] + weight", "acc is not rescaled"),
        "l not rescaled": ("l * alpha + weight", "l + weight", "l is not rescaled"),
        "lane's own score": ("score = cute.arch.warp_reduction_sum(score)", "pass", "sum it over all lanes"),
        "no maximum": ("cute.arch.fmax(m, score)", "Float32(0.0)", "taken off first"),
        "power of 2": ("(math.log2(math.e) / math.sqrt(self.size))", "(1 / math.sqrt(self.size))", "log2(e)"),
        "not divided": ("acc[e] / cute.arch.fmax(l, Float32(1e-30))", "acc[e]", "divided by l"),
        "last slot": ("cutlass.range(begin, end)", "cutlass.range(begin, end - 1)", "last - 1"),
        "padding": ("cutlass.range(begin, end)", "cutlass.range(0, end)", "nan"),
        "half of it": ("out[pair, lane + 32 * e] =", "out[pair, lane] =", "was not written"),
    }
}
