"""Checks of the exercises of lesson 00: the strict reading of a number, the best of k samples, credit."""

import itertools
import math

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw

NAN = math.nan

q1 = Question("q1", "final_number", hint="Go through the lines from the last to the first; re.fullmatch each.")


@q1.cases_of({  # case: from two numbers of two digits, (text, its number)
    "a single line `#### NUMBER`": lambda a, b: [
        (f"Tom has 3+{a}={a + 3} apples.\n#### {a + 3}", a + 3), (f"####   {a}  ", a), (f"#### {b}\n", b), ("#### 0", 0)
    ],
    "the last line counts, and no other text": lambda a, b: [
        (f"#### {a}\nNo, wait.\n#### {b}", b), (f"#### {a}\nThat is 7 less than {b}.", a)
    ],
    "without such a line there is no number": lambda a, b: [
        *((text, NAN) for text in (f"The answer is {a}.", "", "####", "#### twelve")), (f"####\n\n#### {b}", b)
    ],
    "signs, decimals and commas": lambda a, b: [
        (f"#### -{a}", -a), (f"#### {a}.50", a + 0.5), (f"#### {a},2{b}", 1000 * a + 200 + b),
        (f"#### {a},3{b},678.5", 1_000_000 * a + 300_678.5 + 1000 * b),
        *((text, NAN) for text in (f"#### +{a}", f"#### .{a}", f"#### 12{a},3{b}")),
    ],
    "what follows the number, or the wrong number of #, makes a line unreadable": lambda a, b: [
        *((f"#### {a}{rest}", NAN) for rest in (f" or {b}", ".", ". ", " apples", f",{b}")),
        *((text, NAN) for text in (f"so #### {a}", f" #### {a}", f"####\n{a}", f"##### {a}", f"### {a}", f"####{a}")),
        (f"#### {b}", b),
    ],
    "an unreadable line is passed over": lambda a, b: [
        (f"#### {a}\n#### five", a), (f"#### {a}\n#### {b}\n#### 6 or 7\n##### 8", b)
    ],
})  # fmt: skip
def _(f, texts):
    for text, expected in texts(draw(11, 50), draw(51, 99)):
        found = f(text)
        try:
            right = str(float(found)) == str(float(expected))
        except (TypeError, ValueError):
            raise AssertionError(f"{text!r} gives {found!r}: return a float, nan where there is no number") from None
        assert right, f"{text!r} gives {found:g}, expected {expected:g}"


q2 = Question("q2", "best_of_k", hint="When is a sample handed in? Count the draws in which it is.")


@q2.expects(also={
    "That is pass@k: it would need a score that's never wrong.": lambda right, _, k: counted(right, right.double(), k),
    "You hand in the sample with the lowest score.": lambda right, score, k: counted(right, -score, k),
    "You looked at the first k samples alone.": lambda right, score, k: handed_in(right[:, :k], score[:, :k]),
    "That is the best of all samples: k makes no difference.": lambda right, score, k: handed_in(right, score),
    "That is pass@1: the score makes no difference.": lambda right, score, k: right.double().mean(),
    "Your draws may take the same sample twice.": lambda right, score, k: counted(right, score, k, twice=True),
    "You added up the problems: take their mean.": lambda right, score, k: len(right) * counted(right, score, k),
})  # fmt: skip
def by_drawing(right: Tensor, score: Tensor, k: int) -> Tensor:
    """The share of all ways to choose k samples whose highest score is of a right one; mean over problems. A scalar."""
    chosen = torch.tensor(list(itertools.combinations(range(right.shape[1]), k)))
    return handed_in(right[:, chosen], score[:, chosen])  # of [problems, ways, k]


def handed_in(right: Tensor, score: Tensor) -> Tensor:
    """How often the highest score of the last dimension is a right sample's. A scalar."""
    return right.gather(-1, score.argmax(-1, keepdim=True)).double().mean()


def counted(right: Tensor, score: Tensor, k: int, twice: bool = False) -> Tensor:
    """The same from the ranks. twice: as if each draw were from all samples."""
    n = right.shape[1]
    if twice:
        weights = [((rank + 1) / n) ** k - (rank / n) ** k for rank in range(n)]
    else:
        weights = [math.comb(rank, k - 1) / math.comb(n, k) for rank in range(n)]
    return (right.gather(1, score.argsort(1)) * torch.tensor(weights, dtype=torch.float64)).sum(1).mean()


@q2.case("random tables, compared with all ways to choose k samples; nothing right, everything right")
def _(f):
    for problems, n, k in ((3, 6, 2), (5, 8, 3), (4, 7, 5)):
        right, score = torch.rand(problems, n) < 0.5, torch.randn(problems, n)
        score[0] = torch.arange(n).flip(0) - 3.0  # the first is always handed in where it's drawn
        right[0] = torch.arange(n) == 1
        q2.check(f, right, score, k)
        for flag in (False, True):
            q2.check(f, torch.full((problems, n), flag), score, k)


@q2.case("many samples do not overflow")
def _(f):
    right, score, k = torch.zeros(2, 4000, dtype=torch.bool), torch.stack([torch.randperm(4000)] * 2), draw(1000, 3000)
    right[0] = score[0] == 3998  # second best: handed in where it's drawn and the best isn't
    compare(f(right, score.float(), k), k / 4000 * (4000 - k) / 3999 / 2)


q3 = Question("q3", "credit", hint="One order first: change one factor after another. How does the product change?")


@q3.expects(also={
    "That is what each brings alone: it does not add up to the gain.": lambda a, b: product_of(b - a, a),
    "That is what would be missing without each: it does not add up to the gain.": lambda a, b: product_of(b - a, b),
    "That is a single order: take the mean over all.": lambda a, b: torch.stack(
        [b[:i].prod() * a[i + 1 :].prod() * (b[i] - a[i]) for i in range(len(a))]
    ),
    "You added up the orders: take their mean.": lambda a, b: shares(a, b) * math.factorial(len(a)),
}, parts={"the credit": None}, atol=1e-6)  # fmt: skip
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


def product_of(changed: Tensor, others: Tensor) -> Tensor:  # with each factor in turn changed
    return changed * others.prod() / others


def grown(k: int) -> tuple[Tensor, Tensor]:
    before = 0.1 + 0.5 * torch.rand(k)
    return before, before + (1 - before) * (0.2 + 0.7 * torch.rand(k))


q3.case("two to five factors")(lambda f: [q3.check(f, *grown(k)) for k in (2, 3, 4, 5)])


@q3.case("a factor that fell, and one that stayed")
def _(f):
    before, after = grown(4)
    after[1], after[2] = before[1] / 2, before[2]
    q3.check(f, before, after)
