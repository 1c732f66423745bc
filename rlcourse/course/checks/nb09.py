"""Checks of the exercises of lesson 09: merging pieces, splits, operands of a tensor core, bytes, and a kernel."""

import math

import torch
from torch import Tensor

from rlcourse.course.checks import Maker, Question, compare, draw

q1 = Question("q1", "merge_pieces", hint="Bring all pieces to one top: each counts exp(its top - the highest).")


def pieces(heads: int, size: int, lengths: list[int], spread: float = 1.0) -> tuple[Tensor, ...]:
    """tops, masses, mixed of pieces with so many random tokens each, and the softmax over all of them in float64."""
    scores = spread * torch.randn(heads, sum(lengths))
    values = torch.randn(sum(lengths), size)
    tops, masses, mixed = [], [], []
    for part, value in zip(scores.split(lengths, 1), values.split(lengths), strict=True):
        top = part.amax(1) if part.shape[1] else torch.full((heads,), -torch.inf)
        weights = (part - top[:, None]).exp() if part.shape[1] else part
        tops, masses, mixed = [*tops, top], [*masses, weights.sum(1)], [*mixed, weights @ value]
    whole = scores.double().softmax(1) @ values.double()  # of no token at all: zeros
    return torch.stack(tops), torch.stack(masses), torch.stack(mixed), whole


def check_merge(f, tops: Tensor, masses: Tensor, mixed: Tensor, expected: Tensor) -> None:
    scale = (tops - tops.amax(0).clamp(min=-1e30)).exp()
    own = mixed / masses.clamp(min=1e-30)[..., None]
    total = (scale[..., None] * mixed).sum(0)
    mass = (scale * masses).sum(0)[:, None].clamp(min=1e-30)
    mistakes = {
        "You took the mean of the pieces: one with more mass counts more.": own.mean(0),
        "You added the pieces as they are: each has a top of its own.": mixed.sum(0) / masses.sum(0)[:, None],
        "The vectors are brought to one top, the masses are not.": total / masses.sum(0)[:, None].clamp(min=1e-30),
        "The masses are brought to one top, the vectors are not.": mixed.sum(0) / mass,
        "The sum is not divided by the mass of all pieces.": total,
        "You divided by the sum of the factors: it is the mass that normalises.": total / scale.sum(0)[:, None],
        "You weighted normalised pieces by exp(top): it is exp(top) times the mass.": (
            (scale[..., None] * own).sum(0) / scale.sum(0)[:, None]
        ),
        "You kept the piece with the highest top: the others count too.": own.gather(
            0, tops.argmax(0)[None, :, None].expand(1, *own.shape[1:])
        )[0],
    }
    compare(f(tops, masses, mixed), expected.float(), mistakes, atol=1e-4)


@q1.case("pieces of different lengths")
def _(f):
    check_merge(f, *pieces(3, 5, [4, 1, 9]))
    check_merge(f, *pieces(2, 4, [6, 6]))


@q1.case("one piece alone")
def _(f):
    check_merge(f, *pieces(2, 3, [5]))


@q1.case("scores in the hundreds: exp of a top alone is infinite, or zero")
def _(f):
    tops, masses, mixed, expected = pieces(2, 4, [5, 5, 5], spread=3.0)
    for shift in (400.0, -400.0):
        check_merge(f, tops + shift, masses, mixed, expected)


@q1.case("a piece that saw nothing (top -inf, mass 0)")
def _(f):
    check_merge(f, *pieces(3, 4, [0, 5, 3]))


@q1.case("a row in which nobody saw anything gives zeros")
def _(f):
    check_merge(f, *pieces(2, 4, [0, 0]))
    check_merge(f, *pieces(2, 4, [3, 5]))


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
    "q4", "step_bytes", hint="Cache: keys and values, of key-value heads. Workspace: written once, read once."
)


def check_bytes(f, lengths: list[int], heads: int, kv_heads: int, size: int, splits: int) -> None:
    def count(cached=None, per_head=kv_heads, element=2, write=1, angles=1, work=2, floats=2, pair_heads=heads):
        rows = len(lengths)
        cache = element * 2 * per_head * size * sum(lengths if cached is None else cached)
        token = element * rows * size * (2 * heads + 2 * kv_heads * (1 + write) + angles)
        workspace = work * 4 * splits * rows * pair_heads * (size + floats) if splits > 1 else 0
        return torch.tensor([cache, token, workspace], dtype=torch.float64)

    mistakes = {
        "The cache holds key-value heads, not query heads.": count(per_head=heads),
        "Keys and values: the cache is read twice as much as that.": count() * torch.tensor([0.5, 1, 1]),
        "bfloat16 has 2 bytes an element.": count(element=4),
        "The new key and value are read, and then written to the cache.": count(write=0),
        "The new token comes from registers: it is not read from the cache.": count([n + 1 for n in lengths]),
        "All rows have the length of the longest: each reads only its own.": count([max(lengths)] * len(lengths)),
        "cos and sin are missing: D / 2 numbers each, in every row.": count(angles=0),
        "cos and sin have D / 2 numbers each, not D.": count(angles=2),
        "What is written to the workspace is read again.": count(work=1),
        "A piece is a vector, its top and its mass: D + 2 numbers.": count(floats=0),
        "A piece belongs to a query head: H of them in every row and split.": count(pair_heads=kv_heads),
        "The workspace is float32: 4 bytes a number.": count() * torch.tensor([1, 1, 0.5]),
        "With one split there is no workspace.": torch.cat(
            [count()[:2], torch.tensor([8.0 * splits * len(lengths) * heads * (size + 2)]).double()]
        ),
    }
    found = f(torch.tensor(lengths), heads, kv_heads, size, splits)
    compare(found, count(), mistakes, what="[cache, token, workspace]")


@q4.case("rows of different lengths, four splits")
def _(f):
    check_bytes(f, [draw(80, 999), 30, 7], 14, 2, 64, 4)
    check_bytes(f, [draw(80, 999)] * 16, 16, 8, 128, 2)


@q4.case("one split")
def _(f):
    check_bytes(f, [draw(20, 999), 5], 12, 2, 128, 1)


@q4.case("an empty cache: the first token")
def _(f):
    check_bytes(f, [0, 0, draw(1, 999)], 14, 2, 64, 2)
    check_bytes(f, [0], 4, 4, 64, 1)


q5 = Question(
    "q5",
    "WarpAttention",
    hint="Begin with the score of one slot: products of a lane, then a sum over lanes.",
    seconds=60,
    caller=Maker,
)


def run_kernel(kernel, *tensors) -> None:
    """Run the reader's kernel in the interpreter; where there is a GPU, there too, and both must agree."""
    from rlcourse.kernels import toolchain

    copies = [tensor.clone() for tensor in tensors]
    toolchain.simulate(kernel, *tensors)
    if torch.cuda.is_available():
        on_gpu = [tensor.cuda() for tensor in copies]
        toolchain.compiled(kernel)(*on_gpu)
        compare(on_gpu[-1], tensors[-1], what="the GPU's result, compared with the interpreter's,", atol=1e-4)


def check_kernel(f, spans: list[tuple[int, int]], slots: int, size: int = 64, spread: float = 1.0) -> None:
    """spans: (first, last) of each pair. Slots outside hold nan, so that whoever reads them is found out."""
    from rlcourse.ptx import OutOfBounds, Race, Uninitialised

    pairs, inside = len(spans), torch.zeros(len(spans), slots, dtype=torch.bool)
    for pair, (first, last) in enumerate(spans):
        inside[pair, first:last] = True
    q, keys, values = spread * torch.randn(pairs, size), *torch.randn(2, pairs, slots, size).unbind(0)
    first, last = (torch.tensor(ends, dtype=torch.int32) for ends in zip(*spans, strict=True))
    poisoned = [x.masked_fill(~inside[..., None], torch.nan) for x in (keys, values)]
    out = torch.full((pairs, size), torch.nan)
    try:
        run_kernel(f(size), q, *poisoned, first, last, out)
    except Uninitialised as error:
        raise AssertionError(f"Something is read that was never written: a part of `out`? {error}") from None
    except OutOfBounds as error:
        raise AssertionError(
            f"An access beside its tensor: check first, last and the lane's elements. {error}"
        ) from None
    except Race as error:
        raise AssertionError(f"Two blocks write the same place: each has its own pair. {error}") from None

    def attend(scale=size**-0.5, spans=spans, divide=True, power=math.e) -> Tensor:
        found = torch.zeros(pairs, size, dtype=torch.float64)
        for pair, (a, b) in enumerate(spans):
            if b > a:
                scores = scale * math.log(power) * (keys[pair, a:b].double() @ q[pair].double())
                weights = (scores - scores.max()).exp()
                found[pair] = weights @ values[pair, a:b].double() / (weights.sum() if divide else 1)
        return found.float()

    mistakes = {
        "The scores are not scaled: divide by the square root of the head size.": attend(scale=1.0),
        "A power of 2 needs scores times log2(e).": attend(power=2),
        "The sum is not divided by the mass.": attend(divide=False),
        "The last slot, last - 1, is left out.": attend(spans=[(a, max(a, b - 1)) for a, b in spans]),
        "The first slot is left out.": attend(spans=[(min(a + 1, b), b) for a, b in spans]),
    }
    if torch.as_tensor(out).isnan().any():
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


@q5.case("large scores, in rising and falling order")
def _(f):
    check_kernel(f, [(0, 20), (5, 20)], 20, spread=40.0)


@q5.case("heads of 128")
def _(f):
    check_kernel(f, [(2, 9)], 10, size=128)


QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4}  # what a process without CuTe DSL can grade
KERNELS = {"q5": q5}  # checked in the notebook alone
