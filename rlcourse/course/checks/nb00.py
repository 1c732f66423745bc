"""Checks of the exercises of lesson 00: the strict reading of a number, and pass@k."""

import itertools
import math

import torch

from rlcourse.course.checks import Question, compare

NAN = math.nan

q1 = Question("q1", "final_number", hint="Go through the lines from the last to the first; re.fullmatch each.")


def read(f, text: str, expected: float, mistakes: dict[str, float] | None = None) -> None:
    """Fail unless f(text) is `expected`; `mistakes` are the numbers that usual mistakes give."""
    found = f(text)
    if found is None:
        raise AssertionError(f"{text!r} gives None: return a float, nan where there is no number")
    try:
        found = float(found)
    except (TypeError, ValueError):
        raise AssertionError(f"{text!r} gives {found!r}: return a float") from None
    if found == expected or (math.isnan(found) and math.isnan(expected)):
        return
    for sentence, wrong in (mistakes or {}).items():
        if found == wrong or (math.isnan(found) and math.isnan(wrong)):
            raise AssertionError(sentence)
    raise AssertionError(f"{text!r} gives {found:g}, expected {expected:g}")


@q1.case("a single line `#### NUMBER`")
def _(f):
    for number in torch.randint(0, 1000, (5,)).tolist():
        read(f, f"Tom has 3+{number}={number + 3} apples.\n#### {number + 3}", number + 3)
    read(f, "####   12  ", 12)
    read(f, "#### 0", 0)


@q1.case("the last line counts, and no other text")
def _(f):
    first, last = "You took the first line: the last one counts.", "You took a number that no `####` announces."
    read(f, "#### 4\nNo, wait.\n#### 5", 5, {first: 4})
    read(f, "#### 5\nThat is 7 less than 12.", 5, {last: 12})
    read(f, "#### 5\n", 5)


@q1.case("no such line gives nan")
def _(f):
    lenient = "You read a number that no `####` announces: that is the lenient reading."
    read(f, "The answer is 7.", NAN, {lenient: 7})
    read(f, "", NAN)
    read(f, "####", NAN)
    read(f, "#### twelve", NAN)


@q1.case("signs, decimals and commas")
def _(f):
    read(f, "#### -3", -3, {"You lost the minus sign.": 3, "You do not read negative numbers.": NAN})
    cut = {"You lost the decimal part.": 3, "You do not read decimals.": NAN}
    read(f, "#### 3.50", 3.5, cut)
    comma = {"You stopped at the comma: 1,234 is one number.": 1, "You do not read commas: 1,234 is one number.": NAN}
    read(f, "#### 1,234", 1234, comma)
    read(f, "#### 12,345,678.5", 12345678.5)


@q1.case("what follows the number, or the wrong number of #, makes a line unreadable")
def _(f):
    rest = "You read a number with something behind it: `#### 5 or 6` must not count."
    read(f, "#### 5 or 6", NAN, {rest: 5, "You took the last number of the line: `#### 5 or 6` must not count.": 6})
    read(f, "#### 1,23", NAN, {"A comma groups by threes: 1,23 is no number.": 123, rest: 1})
    inside = "A line begins with ####: you read one that has something before it."
    read(f, "so #### 5", NAN, {inside: 5})
    hashes = "Exactly four #, then at least one space."
    for text in ("##### 5", "### 5", "####5"):
        read(f, text, NAN, {hashes: 5})


@q1.case("an unreadable line is passed over")
def _(f):
    gave_up = "You gave up at the last line that begins with ####: an earlier one that can be read counts."
    read(f, "#### 5\n#### five", 5, {gave_up: NAN})
    read(f, "#### 4\n#### 5\n#### 6 or 7\n##### 8", 5, {gave_up: NAN})


q2 = Question("q2", "pass_at_k", hint="Count the right samples of each problem, then the formula, then the mean.")


def by_counting(right: torch.Tensor, k: int) -> torch.Tensor:
    """pass@k as the share of all ways to choose k samples that hold a right one; mean over problems. A scalar."""
    chosen = torch.tensor(list(itertools.combinations(range(right.shape[1]), k)))
    return right[:, chosen].any(-1).double().mean()


def usual_mistakes(right: torch.Tensor, k: int) -> dict[str, torch.Tensor]:
    """What usual mistakes give."""
    n, share = right.shape[1], right.double().mean(1)
    c = int(right.sum())
    pooled = 1 - math.comb(right.numel() - c, k) / math.comb(right.numel(), k)
    average = 1 - math.comb(round(n - c / len(right)), k) / math.comb(n, k)
    pot = "You put the samples of all problems into one pot: do each problem by itself, then take the mean."
    first = "You looked at the first k samples alone: the other samples know something too."
    return {
        "You used 1 - (1 - c/n)^k: that is the biased shortcut.": (1 - (1 - share) ** k).mean(),
        first: right[:, :k].any(1).double().mean(),
        "That is pass@1: k makes no difference.": share.mean(),
        pot: torch.tensor(pooled, dtype=torch.float64),
        "You averaged the counts first: the formula comes before the mean.": torch.tensor(average, dtype=torch.float64),
        "That is the chance that all k are wrong: take it from 1.": 1 - by_counting(right, k),
        "You added up the problems: take their mean.": by_counting(right, k) * len(right),
    }


@q2.case("random tables, compared with all ways to choose k samples")
def _(f):
    for problems, n, k in ((3, 6, 2), (5, 8, 3), (4, 7, 5)):
        right = torch.rand(problems, n) < 0.35
        right[0] = False
        right[0, -1] = True  # one right sample, the last
        compare(f(right, k), by_counting(right, k), usual_mistakes(right, k), what=f"pass@{k} of {n} samples")


@q2.case("k = 1 is the share of right samples")
def _(f):
    right = torch.rand(4, 9) < 0.5
    compare(f(right, 1), right.double().mean())


@q2.case("fewer than k wrong samples: surely one is right")
def _(f):
    right = torch.tensor([[True, True, True, False], [False, True, True, True]])
    compare(f(right, 2), torch.tensor(1.0, dtype=torch.float64), usual_mistakes(right, 2))
    compare(f(right, 4), torch.tensor(1.0, dtype=torch.float64), usual_mistakes(right, 4))


@q2.case("nothing right gives 0, everything right gives 1")
def _(f):
    for flag in (False, True):
        for k in (1, 3, 5):
            compare(f(torch.full((3, 5), flag), k), torch.tensor(float(flag), dtype=torch.float64))


@q2.case("many samples do not overflow")
def _(f):
    right = torch.zeros(2, 4000, dtype=torch.bool)
    right[0, 7] = True  # of 4000, one is right: it is among k with probability k / 4000
    compare(f(right, 2000), torch.tensor(0.25, dtype=torch.float64))


QUESTIONS = {"q1": q1, "q2": q2}
