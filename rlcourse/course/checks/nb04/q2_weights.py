"""q2: what a group weighs."""

import math

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw

q2 = Question("q2", "group_weights", hint="With p = k / n: k answers have |A| = 1 - p, the other n - k have |A| = p.")


def weights_by_group(successes: list[int], n: int, ddof: int = 1) -> Tensor:
    """Sum of |A| of a group with k right answers, centered and divided by the std: from the rewards themselves."""
    rows = []
    for k in successes:
        rewards = [1.0] * k + [0.0] * (n - k)
        mean = sum(rewards) / n
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (n - ddof))
        total = sum(abs(r - mean) for r in rewards)
        rows.append([total, total / std if std > 0 else 0.0])
    return torch.tensor(rows).T


def weight_mistakes(successes: list[int], n: int) -> dict[str, Tensor]:
    expected, p = weights_by_group(successes, n), torch.tensor(successes) / n
    variance = p * (1 - p)
    scales = {"p (1 - p)": 1, "n p (1 - p)": n, "2 p (1 - p)": 2}
    unscaled = {
        f"You have {name} and a root like it: the right shapes, but not the sums of |A|.": torch.stack(
            [factor * variance, factor * variance.sqrt()]
        )
        for name, factor in scales.items()
    }
    return unscaled | {
        "The std is that of a sample: n - 1 in its denominator.": weights_by_group(successes, n, ddof=0),
        "The two rows are in the wrong order: Dr. GRPO first.": expected.flip(0),
        "You took the weight of one answer: add up the group.": expected / n,
        "You counted the right answers alone: the wrong ones weigh as much again.": expected / 2,
        "You divided by the variance: GRPO divides by its root.": torch.stack(
            [expected[0], (expected[0] / (variance * n / (n - 1))).nan_to_num(0.0)]
        ),
    }


@q2.case("a group of eight: every number of right answers from 1 to 7")
def _(f):
    k = (1 + torch.randperm(7)).tolist()
    compare(f(torch.tensor(k), 8), weights_by_group(k, 8), weight_mistakes(k, 8))


@q2.case("groups that are all wrong or all right weigh 0 in both")
def _(f):
    n = draw(4, 400)
    k = [0, n, draw(1, n - 1)]
    compare(f(torch.tensor(k), n), weights_by_group(k, n), weight_mistakes(k, n))


@q2.case("other sizes of group")
def _(f):
    for n in (2, 5, draw(64, 400)):
        k = [1, draw(1, n - 1), n - 1]
        compare(f(torch.tensor(k), n), weights_by_group(k, n), what=f"the weight for n = {n}", atol=1e-4)
