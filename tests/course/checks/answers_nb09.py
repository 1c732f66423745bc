"""Answers to the exercises of lesson 09."""

from functools import partial

import torch
from answers import ruled

from rlcourse.course.checks.nb09 import REGISTERS, SPLITS, best_by_trying, registers


def merged(outputs, logs, sink, sinks=True, divide=True, top=lambda every: every.amax(0)):
    every = torch.cat([logs, sink[None]])
    weights = (every - top(every).clamp(min=-1e30)).exp()  # of the places and of the sink
    total = weights.sum(0) if sinks else weights[:-1].sum(0)
    return (weights[:-1, :, None] * outputs).sum(0) / (total.clamp(min=1e-30)[:, None] if divide else 1)


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


RIGHT = {"q1": merged, "q4": changes}
WRONG = {
    "q1": {
        "mean": (lambda o, s, k: o.mean(0), "mean of the outputs"),
        "no sink": (partial(merged, sinks=False), "takes its share"),
        "one top": (partial(merged, top=torch.max), "one for all heads"),
        "not divided": (partial(merged, divide=False), "not divided by their sum"),
    },
    "q2": ruled(best_by_trying, SPLITS, "mistake")
    | {"never": lambda tokens, at_once, most, fixed: best_by_trying(tokens, at_once, 1, fixed)},
    "q3": {said: (partial(registers, **mistake), said) for said, mistake in REGISTERS.items()}
    | {"transposed": lambda values: registers(values).transpose(1, 2)},
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
        "half of it": ("out[pair, lane + 32 * e] =", "out[pair, lane] =", "were never written"),
    }
}
