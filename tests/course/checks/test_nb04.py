"""The checks of lesson 04 pass what is right, kill what is wrong, and name the mistake."""

import functools
import itertools
import math

import pytest
import torch
from answers import common_tests

from rlcourse.advantages import group_centered, group_normalized
from rlcourse.course.checks.nb04 import QUESTIONS
from rlcourse.course.checks.nb04.q3_loss import PLANTED
from rlcourse.course.checks.nb04.q4_drift import DRIFTS, drift_by_loop
from rlcourse.losses import aggregate, token_loss

# q1: which divisions a gradient shows -----------------------------------------------------------------------------


def by_cosine(gradient, rewards, mask, n, lengths=True, stds=True):
    """The kind that the gradient points along most; with `lengths` or `stds` off that division is not considered."""
    found = {}
    for by_length, by_std in itertools.product((0, 1), repeat=2):
        advantages = (group_normalized if by_std else group_centered)(rewards, n)
        expected = advantages[:, None] * mask / (mask.sum(1, keepdim=True).clamp(min=1) if by_length else 1)
        found[by_length * lengths, by_std * stds] = -(expected * gradient).sum() / expected.norm() / gradient.norm()
    return torch.tensor(max(found, key=found.get))


def by_spread(gradient, rewards, mask, n):
    """Undo each kind of division: the right one leaves one factor for all rows."""
    first = gradient[:, 0].double()
    groups = rewards.double().view(-1, n)
    centered = (groups - groups.mean(1, keepdim=True)).flatten()
    deviation = groups.std(1).repeat_interleave(n)
    alive = (centered.abs() > 1e-9) & mask.any(1)
    spreads = []
    for kind in itertools.product((0, 1), repeat=2):
        factor = first / centered * (mask.sum(1) if kind[0] else 1) * (deviation if kind[1] else 1)
        factor = factor[alive]
        spreads.append(((factor.max() - factor.min()) / factor.mean().abs(), kind))
    return list(min(spreads)[1])


def sizes_only(gradient, rewards, mask, n):
    """Which kind has a gradient of about this size: blind where the factor is unknown."""
    kinds = list(itertools.product((0, 1), repeat=2))
    size = gradient.abs().max()
    known = [0.75 / (5.0 if length else 1) / (0.5 if std else 1) for length, std in kinds]
    return kinds[min(range(4), key=lambda i: abs(known[i] - size))]


def first_group_alone(gradient, rewards, mask, n):
    """Misses groups without signal, and the deviation, which one group does not show."""
    return by_cosine(gradient[:n], rewards[:n], mask[:n], n)


def by_first_rows(gradient, rewards, mask, n):
    """Compares the first two rows as if they had the same advantage."""
    by_length = (gradient[0, 0] / gradient[1, 0]).abs() != 1
    return torch.tensor([int(by_length), 0])


def row_sums(gradient, rewards, mask, n):
    """Takes the sum of a row for the push of a token."""
    return by_cosine(gradient.sum(1, keepdim=True) * mask, rewards, mask, n)


def with_nan(gradient, rewards, mask, n):
    """Divides by the deviation of a group without signal, and by a length of 0."""
    groups = rewards.view(-1, n)
    centered = groups - groups.mean(1, keepdim=True)
    best, kind = -2.0, (0, 0)
    for by_length, by_std in itertools.product((0, 1), repeat=2):
        advantages = (centered / groups.std(1, keepdim=True) if by_std else centered).view(-1, 1)
        expected = -advantages * mask / (mask.sum(1, keepdim=True) if by_length else 1)
        cosine = (expected * gradient).sum() / expected.norm() / gradient.norm()
        if cosine > best:
            best, kind = cosine, (by_length, by_std)
    return torch.tensor(kind)


# q2: the weight of a prompt ---------------------------------------------------------------------------------------


def group_weights(k, n):
    p = k / n
    return torch.stack([2 * n * p * (1 - p), 2 * (n * (n - 1) * p * (1 - p)).sqrt()])


def group_weights_from_rewards(k, n):
    rewards = (torch.arange(n) < k[:, None]).float()
    centered = rewards - rewards.mean(1, keepdim=True)
    std = rewards.std(1)
    return torch.stack([centered.abs().sum(1), (centered.abs().sum(1) / std).nan_to_num(0.0)])


def variance_of(k, n):
    return k / n * (1 - k / n)


# q3: a loss with five mistakes ------------------------------------------------------------------------------------


def loss_with(logprobs, old, rewards, mask, n, limit, clip=0.2, wrong=()):
    """The loss of the exercise with some of its mistakes left in."""
    if "padding" not in wrong:
        logprobs, old = logprobs.masked_fill(~mask, 0.0), old.masked_fill(~mask, 0.0)
    advantages = rewards - (rewards.mean() if "baseline" in wrong else rewards.view(-1, n).mean(1).repeat_interleave(n))
    if "std" in wrong:
        advantages = advantages / (rewards.std() + 1e-4)
    if "group std" in wrong:
        advantages = advantages / (rewards.view(-1, n).std(1).repeat_interleave(n) + 1e-4)
    a, ratio = advantages[:, None], (logprobs - old).exp()
    gain = ratio.clamp(1 - clip, 1 + clip) * a
    if "clip" not in wrong:
        gain = torch.minimum(gain, ratio * a)
    if "length" in wrong:
        return -((gain * mask).sum(1) / mask.sum(1)).mean()
    return -(gain * mask).sum() / (mask.sum() if "divisor" in wrong else len(mask) * limit)


def loss_of_package(logprobs, old, rewards, mask, n, limit, clip=0.2):
    loss, _ = token_loss(
        logprobs, old, group_centered(rewards, n), mask, surrogate="clip", ratio="token", clip_low=clip, clip_high=clip
    )
    return aggregate(loss, mask, "constant", rows=len(mask), tokens=int(mask.sum()), max_new_tokens=limit)


def loss_by_rows(logprobs, old, rewards, mask, n, limit, clip=0.2):
    """Row by row, on the tokens alone; the clip written as two cases."""
    total = 0.0
    for group in range(0, len(rewards), n):
        mean = rewards[group : group + n].mean()
        for i in range(group, group + n):
            keep = mask[i]
            ratio = (logprobs[i][keep] - old[i][keep]).exp()
            a = rewards[i] - mean
            kept = ratio.clamp(max=1 + clip) if a > 0 else ratio.clamp(min=1 - clip)
            total = total - (kept * a).sum()
    return total / (len(rewards) * limit)


SUBSETS = [wrong for count in range(1, 6) for wrong in itertools.combinations(PLANTED, count)]

# q4: the drift of a recipe ----------------------------------------------------------------------------------------


def by_derivative(weights, cut, q):
    """The derivative of the mean weight."""
    with torch.enable_grad():
        theta = torch.tensor(math.log(q / (1 - q)), dtype=torch.float64, requires_grad=True)
        stop = theta.sigmoid()
        going, total = 1.0, 0.0
        for weight in weights.tolist():
            total = total + going * stop * weight
            going = going * (1 - stop)
        (total + going * cut).backward()
    return theta.grad.item()


def by_sum(weights, cut, q):
    length = torch.arange(1, len(weights) + 1).double()
    ended = (1 - q) ** (length - 1) * q
    return (ended * weights * (1 - q * length)).sum() - (1 - q) ** len(weights) * cut * q * len(weights)


def of_the_lesson(weights, cut, q):
    """The closed form for 1 / L without a limit, as the lesson has it."""
    return -q * math.log(q) / (1 - q) - q


RIGHT = {
    "q1": [by_cosine, by_spread],
    "q2": [group_weights, group_weights_from_rewards],
    "q3": [loss_of_package, loss_by_rows, loss_with],
    "q4": [by_derivative, by_sum],
}
WRONG = {
    "q1": {
        "swapped": lambda *a: by_cosine(*a).flip(0),
        "lengths alone": lambda *a: by_cosine(*a, stds=False),
        "deviations alone": lambda *a: by_cosine(*a, lengths=False),
        "sizes": sizes_only,
        "first group": first_group_alone,
        "first rows": by_first_rows,
        "row sums": row_sums,
        "nan": with_nan,
        "GRPO": lambda *a: torch.tensor([1, 1]),
        "Dr. GRPO": lambda *a: (0, 0),
        "None": lambda *a: None,
        "identity": lambda gradient, *a: gradient,
    },
    "q2": {
        "population": lambda k, n: group_weights(k, n) * torch.tensor([[1.0], [math.sqrt(n / (n - 1))]]),
        "order": lambda k, n: group_weights(k, n).flip(0),
        "one answer": lambda k, n: group_weights(k, n) / n,
        "right ones": lambda k, n: group_weights(k, n) / 2,
        "variance": lambda k, n: torch.stack(
            [group_weights(k, n)[0], (group_weights(k, n)[0] / (variance_of(k, n) * n / (n - 1))).nan_to_num(0.0)]
        ),
        "no scale": lambda k, n: torch.stack([variance_of(k, n), variance_of(k, n).sqrt()]),
        "n of it": lambda k, n: n * torch.stack([variance_of(k, n), variance_of(k, n).sqrt()]),
        "two of it": lambda k, n: 2 * torch.stack([variance_of(k, n), variance_of(k, n).sqrt()]),
        "0 / 0": lambda k, n: torch.stack(
            [group_weights(k, n)[0], group_weights(k, n)[0] / (variance_of(k, n) * n / (n - 1)).sqrt()]
        ),
        "the objective": lambda k, n: torch.stack([k / n, 2 * (k / n).sqrt().asin()]),
        "transposed": lambda k, n: group_weights(k, n).T,
        "zero": lambda k, n: 0.0,
    },
    "q3": {"+".join(wrong): functools.partial(loss_with, wrong=wrong) for wrong in SUBSETS}
    | {
        "GRPO": functools.partial(loss_with, wrong=("group std", "length")),
        "GRPO without the std": functools.partial(loss_with, wrong=("length",)),
        "GRPO without 1/length": functools.partial(loss_with, wrong=("group std",)),
        "width": lambda lp, o, r, m, n, limit, *clip: loss_with(lp, o, r, m, n, m.shape[1], *clip),
        "sign": lambda *a: -loss_with(*a),
        "rows": lambda lp, *a: loss_with(lp, *a) * len(lp),
        "sum": lambda *a: loss_with(*a) * a[5],
        "neither": lambda *a: loss_with(*a) * a[5] * len(a[0]),
        "upside down": lambda lp, o, *a: loss_with(o, lp, *a),
        "no clip": lambda lp, o, r, m, n, limit, clip=0.2: loss_with(lp, o, r, m, n, limit, 1e6),
        "its own clip": lambda lp, o, r, m, n, limit, clip=0.2: loss_with(lp, o, r, m, n, limit),
        "detached": lambda lp, *a: loss_with(lp.detach(), *a),
        "nan to 0": lambda *a: loss_with(*a, wrong=("padding",)).nan_to_num(),
        "zero": lambda lp, *a: 0.0 * lp.nan_to_num(0.0, 0.0, 0.0).sum(),
        "identity": lambda lp, *a: lp,
    },
    "q4": {
        name: functools.partial(lambda name, *a: drift_by_loop(*a, wrong=name), name)
        for name in DRIFTS
    }
    | {
        "sign": lambda *a: -by_sum(*a),
        "the lesson's": of_the_lesson,
        "the mean weight": lambda w, cut, q: sum(
            q * (1 - q) ** t * x for t, x in enumerate(w.tolist())
        ) + cut * (1 - q) ** len(w),
        "zero": lambda *a: 0.0,
        "nan": lambda *a: float("nan"),
        "identity": lambda weights, *a: weights,
    },
}  # fmt: skip

# The sentence, or a part of it, that a wrong implementation must be told.
NAMED = {("q3", "+".join(wrong)): f"({', '.join(wrong)})" for wrong in SUBSETS if len(wrong) == 1}
NAMED |= {
    ("q1", "swapped"): "wrong order",
    ("q1", "lengths alone"): "by the deviation",
    ("q1", "None"): "is None",
    ("q2", "population"): "that of a sample",
    ("q2", "order"): "in the wrong order",
    ("q2", "one answer"): "the weight of one answer",
    ("q2", "right ones"): "the right answers alone",
    ("q2", "variance"): "You divided by the variance",
    ("q2", "no scale"): "You have p (1 - p)",
    ("q2", "n of it"): "You have n p (1 - p)",
    ("q2", "two of it"): "You have 2 p (1 - p)",
    ("q2", "0 / 0"): "not finite",
    ("q3", "GRPO"): "Both of GRPO's divisions",
    ("q3", "GRPO without the std"): "its own length",
    ("q3", "GRPO without 1/length"): "the deviation of the group",
    ("q3", "width"): "the width of the batch",
    ("q3", "sign"): "The sign is wrong",
    ("q3", "rows"): "the number of rows",
    ("q3", "sum"): "forgot to divide by max_new_tokens",
    ("q3", "neither"): "divided by nothing",
    ("q3", "upside down"): "upside down",
    ("q3", "no clip"): "No token is clipped",
    ("q3", "its own clip"): "whatever is asked for",
    ("q3", "detached"): "no gradient flows",
    ("q3", "nan to 0"): "its padding",
    ("q4", "no cut"): "left out the answers that are cut off",
    ("q4", "cut as ended"): "never stopped",
    ("q4", "by q"): "with respect to q",
    ("q4", "one token"): "not only its last",
    ("q4", "mean of tokens"): "by the length once more",
    ("q4", "not weighed by chance"): "by its probability",
    ("q4", "one more"): "one less than the length",
    ("q4", "sign"): "The sign is wrong",
}

globals().update(common_tests(QUESTIONS, RIGHT, WRONG, NAMED))


@pytest.mark.parametrize("wrong", [s for s in SUBSETS if len(s) == 2 and "padding" not in s], ids="+".join)
def test_a_half_mended_loss_is_told_one_mistake_that_is_left(wrong):
    """And none that has been mended."""
    result = QUESTIONS["q3"](functools.partial(loss_with, wrong=wrong))
    messages = " ".join(case.message for case in result.cases[:2])
    assert not any(PLANTED[name] in messages for name in PLANTED if name not in wrong), messages
    assert PLANTED[wrong[0]] in messages


def test_no_question_gives_a_point_for_what_needs_no_thought():
    for question, names in {
        "q1": ("GRPO", "Dr. GRPO", "identity"),
        "q2": ("zero",),
        "q3": ("zero", "identity"),
        "q4": ("zero", "nan", "identity"),
    }.items():
        for name in names:
            assert QUESTIONS[question](WRONG[question][name]).score == 0, (question, name)
