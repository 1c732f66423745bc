"""Checks of lesson 09: right answers written in another way pass, wrong ones do not, usual mistakes are named."""

import importlib.util
import re
import sys
from functools import partial

import pytest
import torch
from answers import common_tests
from thorough import thinned

from rlcourse.course.checks import Maker
from rlcourse.course.checks.nb09 import KERNELS, QUESTIONS
from rlcourse.course.dev import build

INF = torch.inf


def sequential(tops, masses, mixed):
    """Two at a time, from left to right."""
    top, mass, total = torch.full_like(tops[0], -1e30), torch.zeros_like(tops[0]), torch.zeros_like(mixed[0])
    for t, m, a in zip(tops, masses, mixed, strict=True):
        higher = torch.maximum(top, t)
        old, new = (top - higher).exp(), (t - higher).exp()
        top, mass, total = higher, mass * old + m * new, total * old[:, None] + a * new[:, None]
    return torch.where(mass[:, None] > 0, total / mass[:, None], 0.0)


def by_logs(tops, masses, mixed):
    """Normalised pieces, weighted by a softmax of the logs of their masses."""
    logs = tops + masses.log()
    weights = (logs - logs.logsumexp(0).clamp(min=-1e30)).exp()
    return (weights[..., None] * mixed / masses.clamp(min=1e-30)[..., None]).sum(0)


def scaled(tops):
    return (tops - tops.amax(0).clamp(min=-1e30)).exp()


def times(tokens, at_once, most, fixed, tile=16, start=1, full=False):
    found = []
    for s in range(start, most + 1):
        line = []
        for n in tokens.tolist():
            tiles, left = -(-n // tile), -(-n // tile)
            for _ in range(s):
                line.append(min(left, -(-tiles // s)))
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


def count(lengths, heads, kv_heads, size, splits, cache=1.0, token=1.0, work=1.0, plus=0, per=None, always=False,
          write=1, angles=1, floats=2, pair=None):  # fmt: skip
    rows = len(lengths)
    tokens = int((lengths + plus).sum())
    new = rows * size * (2 * heads + (2 + 2 * write) * kv_heads + angles)
    left = rows * splits * (pair or heads) * (size + floats) if splits > 1 or always else 0
    found = [4 * cache * tokens * (per or kv_heads) * size, 2 * token * new, 8 * work * left]
    return torch.tensor(found, dtype=torch.float64)


def summed(lengths, heads, kv_heads, size, splits):
    """Row by row."""
    total = torch.zeros(3, dtype=torch.float64)
    for length in lengths.tolist():
        total[0] += 2 * kv_heads * length * size * 2
        total[1] += 2 * (heads * size + 2 * kv_heads * size + size // 2 * 2 + 2 * kv_heads * size + heads * size)
        total[2] += 0 if splits == 1 else splits * heads * (size * 4 + 4 + 4) * 2
    return total


RIGHT = {
    "q1": [sequential, by_logs],
    "q2": [chosen(longest), chosen(lambda waves, a, f: float(f * len(waves) + sum(map(max, waves))))],
    "q3": [held, reshaped],
    "q4": [count, summed],
}
WRONG = {
    "q1": {
        "mean": lambda t, m, a: (a / m.clamp(min=1e-30)[..., None]).mean(0),
        "as they are": lambda t, m, a: a.sum(0) / m.sum(0)[:, None],
        "mass not": lambda t, m, a: (scaled(t)[..., None] * a).sum(0) / m.sum(0)[:, None].clamp(min=1e-30),
        "vector not": lambda t, m, a: a.sum(0) / (scaled(t) * m).sum(0)[:, None].clamp(min=1e-30),
        "not divided": lambda t, m, a: (scaled(t)[..., None] * a).sum(0),
        "by factors": lambda t, m, a: (scaled(t)[..., None] * a).sum(0) / scaled(t).sum(0)[:, None],
        "without top": lambda t, m, a: (t.exp()[..., None] * a).sum(0) / (t.exp() * m).sum(0)[:, None],
        "nan": lambda t, m, a: (
            ((t - t.amax(0)).exp()[..., None] * a).sum(0) / ((t - t.amax(0)).exp() * m).sum(0)[:, None]
        ),
    },
    "q2": {
        "full waves": chosen(lambda w, a, f: longest([x for x in w if len(x) == a] or w[:1], a, f)),
        "free": chosen(lambda w, a, f: longest(w, a, 0)),
        "tokens": chosen(longest, tile=1),
        "mean": chosen(lambda w, a, f: sum(map(sum, w)) / a + f * len(w)),
        "largest": chosen(longest, last=True),
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
        "query heads": lambda n, h, k, d, s: count(n, h, k, d, s, per=h),
        "keys": partial(count, cache=0.5),
        "float32": partial(count, cache=2, token=2),
        "not written": partial(count, write=0),
        "itself": partial(count, plus=1),
        "longest": lambda n, *rest: torch.cat([count(n.clone().fill_(n.max()), *rest)[:1], count(n, *rest)[1:]]),
        "no angles": partial(count, angles=0),
        "all angles": partial(count, angles=2),
        "once": partial(count, work=0.5),
        "vector": partial(count, floats=0),
        "pairs": lambda n, h, k, d, s: count(n, h, k, d, s, pair=k),
        "always": partial(count, always=True),
    },
}

# The sentence, or a part of it, that a wrong implementation must be told.
NAMED = {
    ("q1", "mean"): "mean of the pieces",
    ("q1", "as they are"): "as they are",
    ("q1", "mass not"): "the masses are not",
    ("q1", "vector not"): "the vectors are not",
    ("q1", "not divided"): "not divided by the mass",
    ("q1", "by factors"): "sum of the factors",
    ("q1", "without top"): "not finite",
    ("q1", "nan"): "not finite",
    ("q2", "full waves"): "last wave",
    ("q2", "free"): "has to start and to end",
    ("q2", "tokens"): "whole tiles",
    ("q2", "mean"): "its longest CTA",
    ("q2", "largest"): "smallest number of splits",
    ("q2", "fill"): "every number of splits",
    ("q3", "plain"): "new numbers",
    ("q3", "half"): "odd dimension",
    ("q3", "four"): "four in a row",
    ("q3", "exchanged"): "exchanged",
    ("q3", "below"): "side by side",
    ("q3", "lanes"): "lane // 4",
    ("q4", "query heads"): "not query heads",
    ("q4", "keys"): "twice as much",
    ("q4", "float32"): "2 bytes",
    ("q4", "not written"): "written to the cache",
    ("q4", "itself"): "from registers",
    ("q4", "longest"): "only its own",
    ("q4", "no angles"): "cos and sin are missing",
    ("q4", "all angles"): "not D",
    ("q4", "once"): "read again",
    ("q4", "vector"): "D + 2",
    ("q4", "pairs"): "belongs to a query head",
    ("q4", "always"): "With one split",
}

test_right_answers_pass, test_wrong_answers_are_killed, test_the_mistake_is_named, test_a_hole_shows_the_hint = (
    common_tests(QUESTIONS | KERNELS, RIGHT, WRONG, NAMED)
)


KERNEL = {  # what is put in place of a piece of the solution's source, and a part of the sentence that says so
    "not scaled": ("(math.log2(math.e) / math.sqrt(self.size))", "math.log2(math.e)", "square root"),
    "power of 2": ("(math.log2(math.e) / math.sqrt(self.size))", "(1 / math.sqrt(self.size))", "log2(e)"),
    "not divided": ("mixed[e] / cute.arch.fmax(mass, Float32(1e-30))", "mixed[e]", "divided by the mass"),
    "last slot": ("cutlass.range(begin, end)", "cutlass.range(begin, end - 1)", "last - 1"),
    "first slot": ("cutlass.range(begin, end)", "cutlass.range(begin + 1, end)", "first slot"),
    "padding": ("cutlass.range(begin, end)", "cutlass.range(0, end)", "nan"),
    "one further": ("cutlass.range(begin, end)", "cutlass.range(begin, end + 1)", ""),
    "empty row": ("cute.arch.fmax(mass, Float32(1e-30))", "mass", "nan"),
    "vector not shrunk": ("mixed[e] * shrink + weight", "mixed[e] + weight", ""),
    "mass not shrunk": ("mass * shrink + weight", "mass + weight", ""),
    "no maximum": ("cute.arch.fmax(top, score)", "Float32(0.0)", ""),
    "half of it": ("out[pair, lane + 32 * e] =", "out[pair, lane] =", "was not written"),
    "beside": ("out[pair, lane + 32 * e] =", "out[pair, lane + 64 * e] =", ""),
    "first pair": ("out[pair, lane", "out[0, lane", ""),
    "lane's own score": ("score = cute.arch.warp_reduction_sum(score)", "pass", ""),
}


def warp_attention(folder, old: str = "", new: str = ""):
    """The solution of q5 from its master, with `new` in place of `old`."""
    source = (build.ROOT / "exercises" / "_src" / "09_decode_attention.py").read_text()
    imports = re.search(r"^import math\n.*?(?=^torch\.manual_seed)", source, re.M | re.S)[0]
    body = re.search(r"^@dataclass.*?# END SOLUTION\n", source, re.M | re.S)[0]
    assert old in body, "this mistake can no longer be made: write another one"
    path = folder / f"{folder.name}.py"
    path.write_text(imports + body.replace(old, new))
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
            ("mixed[e] / cute.arch.fmax(mass, Float32(1e-30))", "mixed[e] / mass if end > begin else Float32(0.0)"),
        ],
        every=3,
    ),
)
def test_right_kernels_pass(old, new, tmp_path):
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    result = KERNELS["q5"].run(Maker(warp_attention(tmp_path, old, new)), seed=0)
    assert result.passed, repr(result)


@pytest.mark.parametrize("name", thinned(KERNEL, every=8))
def test_wrong_kernels_are_killed_and_the_mistake_is_named(name, tmp_path):
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    old, new, sentence = KERNEL[name]
    result = KERNELS["q5"].run(Maker(warp_attention(tmp_path, old, new)), seed=0)
    messages = [case.message for case in result.cases if not case.passed]
    assert messages and any(sentence in message for message in messages), messages
