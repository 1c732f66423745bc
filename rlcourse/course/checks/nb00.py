"""Checks of the exercises of lesson 00: the strict reading of a number, pass@k, and the credit of factors."""

import itertools
import math

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw

NAN = math.nan

q1 = Question("q1", "final_number", hint="Go through the lines from the last to the first; re.fullmatch each.")

FIRST = "You took the first line: the last one counts."
ANY = "You took a number that no `####` announces."
COMMA = "You do not read commas: 1,234 is one number."
PLAIN = "Only digits with an optional - before and an optional decimal part are a number: not `+5`, not `.5`."
THREES = "A comma groups by threes, and before the first one there are at most three digits."
BEHIND = "You read a number with something behind it: `#### 5 or 7` must not count."
BEFORE = "A line begins with ####: you read one that has something before it."
NEXT = "The number stands in the line of its ####, not in the next."
HASHES = "Exactly four #, then at least one space."
GAVE_UP = "You gave up at the last line that begins with ####: an earlier one that can be read counts."
TEXTS = {  # case: from two numbers of two digits (text, its number, what a usual mistake reads, that mistake)
    "a single line `#### NUMBER`": lambda a, b: [
        (f"Tom has 3+{a}={a + 3} apples.\n#### {a + 3}", a + 3), (f"####   {a}  ", a), (f"#### {b}\n", b), ("#### 0", 0)
    ],
    "the last line counts, and no other text": lambda a, b: [
        (f"#### {a}\nNo, wait.\n#### {b}", b, a, FIRST), (f"#### {a}\nThat is 7 less than {b}.", a, b, ANY)
    ],
    "without such a line there is no number": lambda a, b: [
        *((text, NAN, a, ANY) for text in (f"The answer is {a}.", "", "####", "#### twelve")), (f"####\n\n#### {b}", b)
    ],
    "signs, decimals and commas": lambda a, b: [
        (f"#### -{a}", -a, a, "You lost the minus sign."),
        (f"#### {a}.50", a + 0.5, a, "You lost the decimal part."),
        (f"#### {a},2{b}", 1000 * a + 200 + b, NAN, COMMA),
        (f"#### {a},3{b},678.5", 1_000_000 * a + 300_678.5 + 1000 * b),
        (f"#### +{a}", NAN, a, PLAIN),
        (f"#### .{a}", NAN, a / 100, PLAIN),
        (f"#### 12{a},3{b}", NAN, 1_200_000 + 1000 * a + 300 + b, THREES),
    ],
    "what follows the number, or the wrong number of #, makes a line unreadable": lambda a, b: [
        *((f"#### {a}{rest}", NAN, a, BEHIND) for rest in (f" or {b}", ".", ". ", " apples")),
        (f"#### {a},{b}", NAN, 100 * a + b, THREES),
        *((text, NAN, a, BEFORE) for text in (f"so #### {a}", f" #### {a}")),
        (f"####\n{a}", NAN, a, NEXT),
        *((text, NAN, a, HASHES) for text in (f"##### {a}", f"### {a}", f"####{a}")),
        (f"#### {b}", b),
    ],
    "an unreadable line is passed over": lambda a, b: [
        (f"#### {a}\n#### five", a, NAN, GAVE_UP), (f"#### {a}\n#### {b}\n#### 6 or 7\n##### 8", b, NAN, GAVE_UP)
    ],
}  # fmt: skip


def check_reading(f, text: str, expected: float, wrong: float | None = None, mistake: str = "") -> None:
    """Fail unless f(text) is `expected`, with the sentence `mistake` if it is `wrong`."""
    found = f(text)
    try:
        found = float(found)
    except (TypeError, ValueError):
        raise AssertionError(f"{text!r} gives {found!r}: return a float, nan where there is no number") from None
    if str(found) != str(float(expected)):
        usual = f"{text!r} gives {found:g}, expected {expected:g}"
        raise AssertionError(mistake if wrong is not None and str(found) == str(float(wrong)) else usual)


for name, texts in TEXTS.items():
    q1.case(name)(lambda f, texts=texts: [check_reading(f, *each) for each in texts(draw(11, 50), draw(51, 99))])

q2 = Question("q2", "pass_at_k", hint="Count the right samples of each problem, then the formula, then the mean.")


def by_counting(right: Tensor, k: int) -> Tensor:
    """pass@k as the share of all ways to choose k samples that hold a right one; mean over problems. A scalar."""
    chosen = torch.tensor(list(itertools.combinations(range(right.shape[1]), k)))
    return right[:, chosen].any(-1).double().mean()


def check_pass(f, right: Tensor, k: int) -> None:
    share, expected = right.double().mean(1), by_counting(right, k)
    mistakes = {
        "You used 1 - (1 - c/n)^k: that is the biased shortcut.": (1 - (1 - share) ** k).mean(),
        "You looked at the first k samples alone: the others know something too.": right[:, :k].any(1).double().mean(),
        "That is pass@1: k makes no difference.": share.mean(),
        "That is the chance that all k are wrong: take it from 1.": 1 - expected,
        "You added up the problems: take their mean.": expected * len(right),
    }
    compare(f(right, k), expected, mistakes, what=f"pass@{k} of {right.shape[1]} samples")


@q2.case("random tables, compared with all ways to choose k samples")
def _(f):
    for problems, n, k in ((3, 6, 2), (5, 8, 3), (4, 7, 5)):
        right = torch.rand(problems, n) < 0.35
        right[0] = torch.arange(n) == n - 1  # one right sample, the last
        check_pass(f, right, k)


@q2.case("fewer than k wrong samples of a problem: surely one is right")
def _(f):
    right = torch.rand(2, 6) < 0.5
    right[0] = torch.arange(6) != draw(0, 5)  # one wrong sample
    for k in (2, 4, 6):
        check_pass(f, right, k)


@q2.case("nothing right gives 0, everything right gives 1")
def _(f):
    for flag, k in itertools.product((False, True), (1, 3, 5)):
        check_pass(f, torch.full((3, 5), flag), k)
    check_pass(f, torch.rand(4, 9) < 0.35, 2)


@q2.case("many samples do not overflow")
def _(f):
    right, k = torch.zeros(2, 4000, dtype=torch.bool), draw(1000, 3000)
    right[0, 7] = True  # of 4000, one is right: it is among k with probability k / 4000
    compare(f(right, k), k / 8000)


q3 = Question(
    "q3", "credit", hint="One order first: change one factor after the other, and note how the product changes."
)


def shares(before: Tensor, after: Tensor) -> Tensor:
    """What each factor brings, by subsets: those that changed before it, weighed by how many orders have them there.
    [k] float64"""
    k, old, new = len(before), before.double(), after.double()
    found = torch.zeros(k, dtype=torch.float64)
    for i in range(k):
        others = [j for j in range(k) if j != i]
        for changed in itertools.chain(*(itertools.combinations(others, count) for count in range(k))):
            weight = math.factorial(len(changed)) * math.factorial(k - len(changed) - 1) / math.factorial(k)
            found[i] += weight * math.prod((new if j in changed else old)[j] for j in others) * (new[i] - old[i])
    return found


def check_credit(f, before: Tensor, after: Tensor) -> None:
    old, new, k, right = before.double(), after.double(), len(before), shares(before, after)
    mistakes = {
        "That is what each brings alone, the others as they were: it does not add up to the gain.": (
            old.prod() / old * (new - old)
        ),
        "That is what would be missing without each: it does not add up to the gain.": new.prod() / new * (new - old),
        "That is a single order: take the mean over all.": torch.stack(
            [new[:i].prod() * old[i + 1 :].prod() * (new[i] - old[i]) for i in range(k)]
        ),
        "You added up the orders: take their mean.": right * math.factorial(k),
        "The sign is wrong: what grew contributes something.": -right,
    }
    compare(f(before, after), right, mistakes, what="the credit", atol=1e-6)


def grown(k: int) -> tuple[Tensor, Tensor]:
    """Factors before and after, each larger after."""
    before = 0.1 + 0.5 * torch.rand(k)
    return before, before + (1 - before) * (0.2 + 0.7 * torch.rand(k))


q3.case("two factors")(lambda f: check_credit(f, *grown(2)))
q3.case("three, four and five factors")(lambda f: [check_credit(f, *grown(k)) for k in (3, 4, 5)])


@q3.case("a factor that fell, and one that stayed")
def _(f):
    before, after = grown(4)
    after[1], after[2] = before[1] / 2, before[2]
    check_credit(f, before, after)
