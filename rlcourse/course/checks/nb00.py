"""Checks of the exercises of lesson 00: the strict reading of a number, pass@k, and the credit of factors."""

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


def draw(count: int) -> list[int]:
    """Different numbers of two digits."""
    return (torch.randperm(89)[:count] + 11).tolist()


@q1.case("a single line `#### NUMBER`")
def _(f):
    for number in draw(5):
        read(f, f"Tom has 3+{number}={number + 3} apples.\n#### {number + 3}", number + 3)
        read(f, f"####   {number}  ", number)
    read(f, "#### 0", 0)


@q1.case("the last line counts, and no other text")
def _(f):
    a, b = draw(2)
    first, last = "You took the first line: the last one counts.", "You took a number that no `####` announces."
    read(f, f"#### {a}\nNo, wait.\n#### {b}", b, {first: a})
    read(f, f"#### {a}\nThat is 7 less than {b}.", a, {last: b})
    read(f, f"#### {b}\n", b)


@q1.case("without such a line there is no number")
def _(f):
    a, b = draw(2)
    lenient = "You read a number that no `####` announces: that is the lenient reading."
    for text in (f"The answer is {a}.", "", "####", "#### twelve"):
        read(f, text, NAN, {lenient: a})
        read(f, f"{text}\n#### {b}", b)


@q1.case("signs, decimals and commas")
def _(f):
    a, b = draw(2)
    read(f, f"#### -{a}", -a, {"You lost the minus sign.": a, "You do not read negative numbers.": NAN})
    cut = {"You lost the decimal part.": a, "You do not read decimals.": NAN}
    read(f, f"#### {a}.50", a + 0.5, cut)
    comma = {"You stopped at the comma: 1,234 is one number.": a, "You do not read commas: 1,234 is one number.": NAN}
    read(f, f"#### {a},2{b}", 1000 * a + 200 + b, comma)
    read(f, f"#### {a},3{b},678.5", 1_000_000 * a + 300_678.5 + 1000 * b)
    whole = "Only digits with an optional - before and an optional decimal part are a number: not `+5`, not `.5`."
    for text, wrong in ((f"+{a}", a), (f".{a}", a / 100), (f"-.{a}", -a / 100)):
        read(f, f"#### {text}", NAN, {whole: wrong})
    groups = f"With commas the first group has at most three digits: 12{a},3{b} is no number."
    read(f, f"#### 12{a},3{b}", NAN, {groups: 1_200_000 + 1000 * a + 300 + b})


@q1.case("what follows the number, or the wrong number of #, makes a line unreadable")
def _(f):
    a, b = draw(2)
    rest = f"You read a number with something behind it: `#### {a} or {b}` must not count."
    last = f"You took the last number of the line: `#### {a} or {b}` must not count."
    read(f, f"#### {a} or {b}", NAN, {rest: a, last: b})
    read(f, f"#### {a},{b}", NAN, {f"A comma groups by threes: {a},{b} is no number.": 100 * a + b, rest: a})
    for text in (f"{a}.", f"{a}. ", f"{a} apples"):
        read(f, f"#### {text}", NAN, {f"You read a number with something behind it: `#### {text}` must not count.": a})
    inside = "A line begins with ####: you read one that has something before it."
    for text in (f"so #### {a}", f" #### {a}"):
        read(f, text, NAN, {inside: a})
    read(f, f"####\n{a}", NAN, {"The number stands in the line of its ####, not in the next.": a})
    hashes = "Exactly four #, then at least one space."
    for text in (f"##### {a}", f"### {a}", f"####{a}"):
        read(f, text, NAN, {hashes: a})
    read(f, f"#### {b}", b)


@q1.case("an unreadable line is passed over")
def _(f):
    a, b = draw(2)
    gave_up = "You gave up at the last line that begins with ####: an earlier one that can be read counts."
    read(f, f"#### {a}\n#### five", a, {gave_up: NAN})
    read(f, f"#### {a}\n#### {b}\n#### 6 or 7\n##### 8", b, {gave_up: NAN})


q2 = Question("q2", "pass_at_k", hint="Count the right samples of each problem, then the formula, then the mean.")


def by_counting(right: torch.Tensor, k: int) -> torch.Tensor:
    """pass@k as the share of all ways to choose k samples that hold a right one; mean over problems. A scalar."""
    chosen = torch.tensor(list(itertools.combinations(range(right.shape[1]), k)))
    return right[:, chosen].any(-1).double().mean()


def usual_mistakes(right: torch.Tensor, k: int) -> dict[str, torch.Tensor]:
    """What usual mistakes give."""
    share = right.double().mean(1)
    c = int(right.sum())
    pooled = 1 - math.comb(right.numel() - c, k) / math.comb(right.numel(), k)
    pot = "You put the samples of all problems into one pot: do each problem by itself, then take the mean."
    first = "You looked at the first k samples alone: the other samples know something too."
    return {
        "You used 1 - (1 - c/n)^k: that is the biased shortcut.": (1 - (1 - share) ** k).mean(),
        first: right[:, :k].any(1).double().mean(),
        "That is pass@1: k makes no difference.": share.mean(),
        pot: torch.tensor(pooled, dtype=torch.float64),
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
    right[0, :2] = torch.tensor([True, False])
    compare(f(right, 1), right.double().mean())


@q2.case("fewer than k wrong samples of a problem: surely one is right")
def _(f):
    right = torch.rand(2, 6) < 0.5
    right[0] = torch.arange(6) != int(torch.randint(6, (1,)))  # one wrong sample
    for k in (2, 4, 6):
        compare(f(right, k), by_counting(right, k), usual_mistakes(right, k))


@q2.case("nothing right gives 0, everything right gives 1")
def _(f):
    for flag in (False, True):
        for k in (1, 3, 5):
            compare(f(torch.full((3, 5), flag), k), torch.tensor(float(flag), dtype=torch.float64))
    right = torch.rand(4, 9) < 0.35
    compare(f(right, 2), by_counting(right, 2), usual_mistakes(right, 2))


@q2.case("many samples do not overflow")
def _(f):
    right = torch.zeros(2, 4000, dtype=torch.bool)
    right[0, 7] = True  # of 4000, one is right: it is among k with probability k / 4000
    k = int(torch.randint(1000, 3000, (1,)))
    compare(f(right, k), torch.tensor(k / 8000, dtype=torch.float64))


q3 = Question(
    "q3", "credit", hint="One order first: change one factor after the other, and note how the product changes."
)


def shares(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """What each factor brings, by subsets: those that changed before it, weighed by how many orders have them there.
    [k] float64"""
    k, old, new = len(before), before.double(), after.double()
    found = torch.zeros(k, dtype=torch.float64)
    for i in range(k):
        others = [j for j in range(k) if j != i]
        for count in range(k):
            weight = math.factorial(count) * math.factorial(k - count - 1) / math.factorial(k)
            for changed in itertools.combinations(others, count):
                rest = math.prod((new if j in changed else old)[j].item() for j in others)
                found[i] += weight * rest * (new[i] - old[i])
    return found


def credit_mistakes(before: torch.Tensor, after: torch.Tensor) -> dict[str, torch.Tensor]:
    """What usual mistakes give: [k]."""
    old, new, k = before.double(), after.double(), len(before)
    alone = torch.stack([old.prod() / old[i] * (new[i] - old[i]) for i in range(k)])
    last = torch.stack([new.prod() / new[i] * (new[i] - old[i]) for i in range(k)])
    forth = torch.stack([new[:i].prod() * old[i + 1 :].prod() * (new[i] - old[i]) for i in range(k)])
    back = torch.stack([old[:i].prod() * new[i + 1 :].prod() * (new[i] - old[i]) for i in range(k)])
    one = "That is a single order: take the mean over all."
    return {
        "That is what each brings alone, the others as they were: it does not add up to the gain.": alone,
        "That is what would be missing without each: it does not add up to the gain.": last,
        one: forth,
        one + " ": back,
        "You took the mean of being first and being last: with three factors one can be in between.": (alone + last)
        / 2,
        "You added up the orders: take their mean.": shares(before, after) * math.factorial(k),
        "The sign is wrong: what grew contributes something.": -shares(before, after),
        "That is how much each factor changed; what it contributes depends on the others.": new - old,
    }


def check_credit(f, before: torch.Tensor, after: torch.Tensor) -> None:
    compare(f(before, after), shares(before, after), credit_mistakes(before, after), what="the credit", atol=1e-6)


def grown(k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors before and after, each larger after."""
    before = 0.1 + 0.5 * torch.rand(k)
    return before, before + (1 - before) * (0.2 + 0.7 * torch.rand(k))


@q3.case("two factors")
def _(f):
    check_credit(f, *grown(2))


@q3.case("three, four and five factors")
def _(f):
    for k in (3, 4, 5):
        check_credit(f, *grown(k))


@q3.case("a factor that fell, and one that stayed")
def _(f):
    before, after = grown(4)
    after[1], after[2] = before[1] / 2, before[2]
    check_credit(f, before, after)


@q3.case("a single factor gets it all")
def _(f):
    check_credit(f, *grown(1))
    check_credit(f, *grown(3))


QUESTIONS = {"q1": q1, "q2": q2, "q3": q3}
