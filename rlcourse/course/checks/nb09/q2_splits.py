"""q2: how many splits."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw

q2 = Question("q2", "best_splits", hint="Write down the tiles of every CTA in order, cut the list into waves.")


def wave_time(tokens: list[int], at_once: int, fixed: int, splits: int, mistake: str = "") -> int:
    """Time of the launch in tiles: waves of `at_once` CTAs, each as long as its longest."""
    tile = 1 if mistake == "tokens" else 16
    ctas = []
    for count in tokens:
        tiles = -(-count // tile)
        part = -(-tiles // splits)
        if mistake == "even":
            ctas += [(tiles + splits - 1 - i) // splits for i in range(splits)]
        else:
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
        "Each CTA takes ceil(tiles / s) tiles as long as there are any: the last may get none.": best("even"),
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
    check_splits(f, [120, 200, 250, 120], 7, 10, 3)  # here tiles dealt out evenly would take another time
    check_random(f, 9, 7)


@q2.case("one token a row: nothing to split")
def _(f):
    check_splits(f, [1, 1, 1], 10, 8, 2)
    check_splits(f, [1] * draw(4, 60), draw(3, 12), 8, draw(1, 40))
