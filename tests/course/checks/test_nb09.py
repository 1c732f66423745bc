"""Checks of lesson 09: right answers written in another way pass, wrong ones do not, usual mistakes are named."""

import importlib.util
import re
import sys
from functools import partial

import pytest
import torch
from answers import common_tests
from thorough import thinned

from rlcourse.course.checks.kernels import Maker
from rlcourse.course.checks.nb09 import KERNELS, QUESTIONS
from rlcourse.course.dev import build

INF = torch.inf


def share_of(logs, sink):
    """Weights of the places and of the sink, not yet divided by their sum."""
    every = torch.cat([logs, sink[None]])
    return (every - every.amax(0).clamp(min=-1e30)).exp()


def merged(outputs, logs, sink, sinks=True, divide=True):
    weights = share_of(logs, sink)
    total = weights.sum(0) if sinks else weights[:-1].sum(0)
    return (weights[:-1, :, None] * outputs).sum(0) / (total.clamp(min=1e-30)[:, None] if divide else 1)


def one_maximum(outputs, logs, sink):
    """One maximum for all heads."""
    every = torch.cat([logs, sink[None]])
    weights = (every - every.max().clamp(min=-1e30)).exp()
    return (weights[:-1, :, None] * outputs).sum(0) / weights.sum(0).clamp(min=1e-30)[:, None]


def in_float64(outputs, logs, sink):
    """No maximum, but float64."""
    weights = torch.cat([logs, sink[None]]).double().exp()
    return ((weights[:-1, :, None] * outputs).sum(0) / weights.sum(0).clamp(min=1e-300)[:, None]).float()


def sequential(outputs, logs, sink):
    """Two at a time, from left to right, beginning with the sink."""
    log, total = sink.double(), torch.zeros_like(outputs[0]).double()
    for o, lse in zip(outputs, logs, strict=True):
        both = torch.logaddexp(log, lse.double())
        old, new = ((x - both.clamp(min=-1e30)).exp() for x in (log, lse.double()))
        log, total = both, total * old[:, None] + o * new[:, None]
    return total.float()


def by_softmax(outputs, logs, sink):
    weights = torch.cat([sink[None], logs]).softmax(0).nan_to_num(0.0)[1:]
    return torch.einsum("ph,phd->hd", weights, outputs)


def lesson_merge(outputs, logs, sink):
    """The lesson's merge, pasted: takes outputs for acc and log-sums for m, with l = 1."""
    m, acc = logs.amax(0).clamp(min=-1e30), 0
    for o, lse in zip(outputs, logs, strict=True):
        acc = acc + o * (lse - m).exp()[:, None]
    return acc / (logs - m).exp().sum(0).clamp(min=1e-30)[:, None]


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


def fill(tokens, at_once, most, fixed):
    splits = max(1, min(most, at_once // len(tokens)))
    return torch.tensor([splits, longest(times(tokens, at_once, splits, fixed)[-1], at_once, fixed)])


def held(values, row=lambda i, g, h: 8 * g + 2 * i + h, column=lambda c, p, f: 2 * c + p + 8 * f, bits=(0, 1, 2),
         lane_of=lambda lane: (lane // 4, lane % 4)):  # fmt: skip
    found = torch.zeros(4, 32, 8)
    for i, lane, number in torch.cartesian_prod(torch.arange(4), torch.arange(32), torch.arange(8)).tolist():
        g, c = lane_of(lane)
        p, h, f = (number >> bit & 1 for bit in bits)
        found[i, lane, number] = values[column(c, p, f), row(i, g, h)]
    return found


def reshaped(values):
    """tokens (f, c, p), dimensions (g, i, h) → product i, lane (g, c), register (f, h, p)."""
    return values.view(2, 4, 2, 8, 4, 2).permute(4, 3, 1, 0, 5, 2).reshape(4, 32, 8)


def changes(data, instructions, way, gb_s, ghz, sms, answer, combine=max, schedulers=4, fixed=False, **wrong):
    def time(i, w):
        waits = answer if fixed else data / way[w].item() * answer
        issue = instructions[i].item() / (schedulers * (1 if wrong.get("one_sm") else sms) * ghz * 1e3)
        return combine([data / (gb_s * (1 if wrong.get("units") else 1e3)), issue, waits])

    old, fewer, more, new = time(0, 0), time(1, 0), time(0, 1), time(1, 1)
    if wrong.get("exchanged"):
        fewer, more = more, fewer
    first = 2 if fewer == more else int(more < fewer)
    return torch.tensor([old, fewer, more, new, 1 - first if wrong.get("swap") and first < 2 else first]).double()


def by_rates(data, instructions, way, gb_s, ghz, sms, answer_us):
    """The slowest of three rates, in bytes a second, for all four kernels at once."""
    issue = data / (instructions / (4 * sms * ghz * 1e9))[torch.tensor([0, 1, 0, 1])]
    waiting = (way / (answer_us * 1e-6))[torch.tensor([0, 0, 1, 1])]
    rates = torch.stack([torch.full((4,), gb_s * 1e9).double(), issue, waiting]).amin(0)
    times = 1e6 * data / rates
    saved = times[0] - times[1:3]
    first = 2 if saved[0] == saved[1] else int(saved.argmax())
    return torch.cat([times, torch.tensor([first]).double()])


def first_of_both(*arguments):
    """Takes 0 for what to do first where neither brings anything."""
    found = changes(*arguments)
    found[4] = found[4] % 2
    return found


RIGHT = {
    "q1": [merged, sequential, by_softmax],
    "q2": [chosen(longest), chosen(lambda waves, a, f: float(f * len(waves) + sum(map(max, waves))))],
    "q3": [held, reshaped],
    "q4": [changes, by_rates],
}
WRONG = {
    "q1": {
        "mean": lambda o, s, k: o.mean(0),
        "added": lambda o, s, k: o.sum(0),
        "no sink": partial(merged, sinks=False),
        "not divided": partial(merged, divide=False),
        "largest": lambda o, s, k: torch.stack([o[p, h] for h, p in enumerate(s.argmax(0).tolist())]),
        "log-sums": lambda o, s, k: (s[..., None] * o).sum(0) / (s.sum(0) + k)[:, None],
        "without a maximum": lambda o, s, k: (s.exp()[..., None] * o).sum(0) / (s.exp().sum(0) + k.exp())[:, None],
        "nan": lambda o, s, k: (torch.cat([s, k[None]]).softmax(0)[:-1, :, None] * o).sum(0),
        "one maximum": one_maximum,
        "in float64": in_float64,
        "from the lesson": lesson_merge,
    },
    "q2": {
        "full waves": chosen(lambda w, a, f: longest([x for x in w if len(x) == a] or w[:1], a, f)),
        "free": chosen(lambda w, a, f: longest(w, a, 0)),
        "tokens": chosen(longest, tile=1),
        "mean": chosen(lambda w, a, f: sum(map(sum, w)) / a + f * len(w)),
        "largest": chosen(longest, last=True),
        "even": chosen(longest, even=True),
        "fill": fill,
        "never": lambda t, a, m, f: torch.tensor([1.0, longest(times(t, a, 1, f)[0], a, f)]),
    },
    "q3": {
        "plain": partial(held, row=lambda i, g, h: 16 * i + g + 8 * h),
        "half": partial(held, row=lambda i, g, h: 8 * g + i + 4 * h),
        "four": partial(held, column=lambda c, p, f: 4 * c + p + 2 * f),
        "exchanged": partial(held, bits=(0, 2, 1)),
        "below": partial(held, bits=(1, 0, 2)),
        "lanes": partial(held, lane_of=lambda lane: (lane % 8, lane // 8)),
        "transposed": lambda values: held(values).transpose(1, 2),
    },
    "q4": {
        "sum": partial(changes, combine=sum),
        "shortest": partial(changes, combine=min),
        "one scheduler": partial(changes, schedulers=1),
        "one SM": partial(changes, one_sm=True),
        "units": partial(changes, units=True),
        "answered once": partial(changes, fixed=True),
        "exchanged": partial(changes, exchanged=True),
        "swap": partial(changes, swap=True),
        "no draw": first_of_both,
    },
}

# The sentence, or a part of it, that a wrong implementation must be told.
NAMED = {
    ("q1", "mean"): "mean of the outputs",
    ("q1", "added"): "as they are",
    ("q1", "no sink"): "takes its share",
    ("q1", "not divided"): "not divided by their sum",
    ("q1", "largest"): "largest log-sum",
    ("q1", "log-sums"): "log-sums themselves",
    ("q1", "without a maximum"): "not finite",
    ("q1", "nan"): "not finite",
    ("q1", "one maximum"): "of its own",
    ("q1", "in float64"): "not finite",
    ("q1", "from the lesson"): "takes its share",
    ("q2", "full waves"): "last wave",
    ("q2", "free"): "has to start and to end",
    ("q2", "tokens"): "whole tiles",
    ("q2", "mean"): "its longest CTA",
    ("q2", "largest"): "smallest number of splits",
    ("q2", "even"): "the last may get none",
    ("q2", "fill"): "every number of splits",
    ("q3", "plain"): "new numbers",
    ("q3", "half"): "odd dimension",
    ("q3", "four"): "four in a row",
    ("q3", "exchanged"): "exchanged",
    ("q3", "below"): "side by side",
    ("q3", "lanes"): "lane // 4",
    ("q4", "sum"): "not their sum",
    ("q4", "shortest"): "not the shortest",
    ("q4", "one scheduler"): "four schedulers",
    ("q4", "one SM"): "All SMs",
    ("q4", "units"): "a thousand bytes",
    ("q4", "answered once"): "more than once",
    ("q4", "exchanged"): "second number",
    ("q4", "swap"): "wrong way round",
}

globals().update(common_tests(QUESTIONS | KERNELS, RIGHT, WRONG, NAMED))


KERNEL = {  # what is put in place of a piece of the solution's source, and a part of the sentence that says so
    "not scaled": ("(math.log2(math.e) / math.sqrt(self.size))", "math.log2(math.e)", "square root"),
    "m begins at 0": ("m, l = Float32(-1e30), Float32(0.0)", "m, l = Float32(0.0), Float32(0.0)", "m begins at 0"),
    "acc not rescaled": ("acc[e] * alpha + weight", "acc[e] + weight", "acc is not rescaled"),
    "l not rescaled": ("l * alpha + weight", "l + weight", "l is not rescaled"),
    "lane's own score": ("score = cute.arch.warp_reduction_sum(score)", "pass", "sum it over all lanes"),
    "no maximum": ("cute.arch.fmax(m, score)", "Float32(0.0)", "taken off first"),
    "power of 2": ("(math.log2(math.e) / math.sqrt(self.size))", "(1 / math.sqrt(self.size))", "log2(e)"),
    "not divided": ("acc[e] / cute.arch.fmax(l, Float32(1e-30))", "acc[e]", "divided by l"),
    "last slot": ("cutlass.range(begin, end)", "cutlass.range(begin, end - 1)", "last - 1"),
    "first slot": ("cutlass.range(begin, end)", "cutlass.range(begin + 1, end)", "first slot"),
    "padding": ("cutlass.range(begin, end)", "cutlass.range(0, end)", "nan"),
    "one further": ("cutlass.range(begin, end)", "cutlass.range(begin, end + 1)", ""),
    "empty row": ("cute.arch.fmax(l, Float32(1e-30))", "l", "nan"),
    "half of it": ("out[pair, lane + 32 * e] =", "out[pair, lane] =", "was not written"),
    "beside": ("out[pair, lane + 32 * e] =", "out[pair, lane + 64 * e] =", ""),
    "first pair": ("out[pair, lane", "out[0, lane", ""),
}


def attention_source(old: str = "", new: str = "") -> str:
    """The solution of q5 from its master, with `new` in place of `old`."""
    source = (build.ROOT / "exercises" / "_src" / "09_decode_attention.py").read_text()
    imports = re.search(r"^import math\n.*?(?=^torch\.manual_seed)", source, re.M | re.S)[0]
    body = re.search(r"^@dataclass.*?# END SOLUTION\n", source, re.M | re.S)[0]
    assert old in body, "this mistake can no longer be made: write another one"
    return imports + body.replace(old, new)


def warp_attention(folder, old: str = "", new: str = ""):
    """The kernel of that source."""
    path = folder / f"{folder.name}.py"
    path.write_text(attention_source(old, new))
    spec = importlib.util.spec_from_file_location(folder.name, path)
    module = sys.modules[folder.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.WarpAttention


@pytest.mark.parametrize(
    "old, new",
    thinned(
        [
            ("", ""),
            ("Float32(-1e30)", "-Float32.inf"),  # no score is -inf here
            ("acc[e] / cute.arch.fmax(l, Float32(1e-30))", "acc[e] / l if end > begin else Float32(0.0)"),
        ],
        every=3,
    ),
)
def test_right_kernels_pass(old, new, tmp_path):
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    result = KERNELS["q5"].run(Maker(warp_attention(tmp_path, old, new)), seed=0)
    assert result.passed, repr(result)


@pytest.mark.parametrize("name", thinned(KERNEL, every=len(KERNEL)))
def test_wrong_kernels_are_killed_and_the_mistake_is_named(name, tmp_path):
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    old, new, sentence = KERNEL[name]
    result = KERNELS["q5"].run(Maker(warp_attention(tmp_path, old, new)), seed=0)
    messages = [case.message for case in result.cases if not case.passed]
    assert messages and any(sentence in message for message in messages), messages
