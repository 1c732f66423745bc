"""The checks of exercise 04: right solutions pass, wrong ones do not, and the usual mistakes are named."""

import math

import pytest
import torch
from thorough import thinned

from rlcourse.course.checks import Local
from rlcourse.course.checks.nb04 import QUESTIONS, aggregate_by_loop
from rlcourse.losses import aggregate as packaged
from rlcourse.losses import importance_ratio, token_loss


def count(mask):
    return mask.sum(1, keepdim=True).clamp(min=1)


# q1


def aggregate(values, mask, how, limit):
    values = values.masked_fill(~mask, 0.0)
    if how == "sequence_mean":
        return (values.sum(1) / mask.sum(1).clamp(min=1)).mean()
    return values.sum() / (mask.sum() if how == "token_mean" else len(mask) * limit)


def aggregate_of_package(values, mask, how, limit):
    return packaged(values, mask, how, rows=len(mask), tokens=int(mask.sum()), max_new_tokens=limit)


def with_padding(values, mask, how, limit):
    return aggregate(values, torch.ones_like(mask), how, limit)


def by_width(values, mask, how, limit):
    return aggregate(values, mask, how, mask.shape[1])


def no_rows(values, mask, how, limit):
    return aggregate(values, mask, how, limit) * (len(mask) if how == "constant" else 1)


def always_token_mean(values, mask, how, limit):
    return aggregate(values, mask, "token_mean" if how == "sequence_mean" else how, limit)


def always_sequence_mean(values, mask, how, limit):
    return aggregate(values, mask, "sequence_mean" if how == "token_mean" else how, limit)


def nan_for_empty(values, mask, how, limit):
    if how == "sequence_mean":
        return ((values * mask).sum(1) / mask.sum(1)).mean()
    return aggregate(values, mask, how, limit)


def empty_left_out(values, mask, how, limit):
    return aggregate(values[mask.any(1)], mask[mask.any(1)], how, limit)


# q2


def weights(mask, how, limit):
    by = {"sequence_mean": len(mask) * count(mask), "token_mean": mask.sum(), "constant": len(mask) * limit}[how]
    return mask / by


def weights_by_autograd(mask, how, limit):
    values = torch.zeros(mask.shape, requires_grad=True)
    (gradient,) = torch.autograd.grad(aggregate(values, mask, how, limit), values)
    return gradient


# q3


def group_weights(k, n):
    p = k / n
    return torch.stack([2 * n * p * (1 - p), 2 * (n * (n - 1) * p * (1 - p)).sqrt()])


def group_weights_from_rewards(k, n):
    rewards = (torch.arange(n) < k[:, None]).float()
    centered = rewards - rewards.mean(1, keepdim=True)
    std = rewards.std(1)
    return torch.stack([centered.abs().sum(1), (centered.abs().sum(1) / std).nan_to_num(0.0)])


# q4


def dr_grpo_loss(logprobs, old, rewards, mask, n, limit, clip=0.2, std=False, how="constant", take=torch.minimum):
    groups = rewards.view(-1, n)
    advantages = groups - groups.mean(1, keepdim=True)
    if std:
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-4)
    advantages = advantages.flatten()[:, None]
    ratio = (logprobs - old).exp()
    loss = -take(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return aggregate(loss, mask, how, limit)


def dr_grpo_loss_of_package(logprobs, old, rewards, mask, n, limit, clip=0.2):
    baseline = torch.stack([group.mean() for group in rewards.split(n)]).repeat_interleave(n)
    loss, _ = token_loss(
        logprobs, old, rewards - baseline, mask, surrogate="clip", ratio="token", clip_low=clip, clip_high=clip
    )
    return aggregate_of_package(loss, mask, "constant", limit)


def batch_baseline(logprobs, old, rewards, mask, n, limit, clip=0.2):
    return dr_grpo_loss(logprobs, old, rewards, mask, len(rewards), limit, clip)


def transposed_groups(logprobs, old, rewards, mask, n, limit, clip=0.2):
    groups = rewards.view(n, -1)
    advantages = (groups - groups.mean(1, keepdim=True)).flatten()[:, None]
    ratio = (logprobs - old).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return aggregate(loss, mask, "constant", limit)


def fixed_clip(logprobs, old, rewards, mask, n, limit, clip=0.2):
    return dr_grpo_loss(logprobs, old, rewards, mask, n, limit)


def detached_ratio(logprobs, old, rewards, mask, n, limit, clip=0.2):
    """The right number without a gradient."""
    return dr_grpo_loss(logprobs.detach(), old, rewards, mask, n, limit, clip)


# q5


def sequence_ratio(new, old, mask):
    return ((new - old).masked_fill(~mask, 0.0).sum(1) / mask.sum(1).clamp(min=1)).exp()


def sequence_ratio_row_by_row(new, old, mask):
    rows = [(n[m] - o[m]).sum() / max(1, len(n[m])) for n, o, m in zip(new, old, mask, strict=True)]
    return torch.stack(rows).exp()


RIGHT = {
    "q1": [aggregate, aggregate_of_package, aggregate_by_loop],
    "q2": [weights, weights_by_autograd],
    "q3": [group_weights, group_weights_from_rewards],
    "q4": [dr_grpo_loss, dr_grpo_loss_of_package],
    "q5": [sequence_ratio, sequence_ratio_row_by_row],
}

WRONG = {
    "q1": {
        "You counted the padding": with_padding,
        "You divided by the width of this batch": by_width,
        "You forgot to divide by the number of rows": no_rows,
        "that is token_mean (DAPO)": always_token_mean,
        "that is sequence_mean (GRPO)": always_sequence_mean,
        "not finite": nan_for_empty,
        "A row without a token was left out": empty_left_out,
        "You divided by the padded width": lambda v, m, how, limit: (
            (v * m).mean() if how == "sequence_mean" else aggregate(v, m, how, limit)
        ),
        "You added up the row means": lambda v, m, how, limit: (
            aggregate(v, m, how, limit) * (len(m) if how == "sequence_mean" else 1)
        ),
        "You divided by all places": lambda v, m, how, limit: (
            (v * m).mean() if how == "token_mean" else aggregate(v, m, how, limit)
        ),
        "You forgot to divide by max_new_tokens": lambda v, m, how, limit: (
            aggregate(v, m, how, limit) * (limit if how == "constant" else 1)
        ),
        "You divided by the number of real tokens": lambda v, m, how, limit: aggregate(
            v, m, "token_mean" if how == "constant" else how, limit
        ),
    },
    "q2": {
        "Padding got a weight": lambda m, how, limit: weights(m, how, limit).where(m, weights(m, how, limit).max()),
        "You forgot to divide by the number of rows": lambda m, how, limit: weights(m, how, limit) * len(m),
        "only token_mean does": lambda m, how, limit: m / m.sum(),
        "not the width of the batch": lambda m, how, limit: weights(m, how, m.shape[1]),
        "not finite": lambda m, how, limit: (
            m / (len(m) * m.sum(1, keepdim=True)) if how == "sequence_mean" else weights(m, how, limit)
        ),
    },
    "q3": {
        "that of a sample": lambda k, n: group_weights(k, n) * torch.tensor([[1.0], [math.sqrt(n / (n - 1))]]),
        "in the wrong order": lambda k, n: group_weights(k, n).flip(0),
        "the weight of one answer": lambda k, n: group_weights(k, n) / n,
        "You divided by the variance": lambda k, n: torch.stack(
            [group_weights(k, n)[0], (group_weights(k, n)[0] / (k / n * (1 - k / n) * n / (n - 1))).nan_to_num(0.0)]
        ),
        "not finite": lambda k, n: torch.stack(
            [group_weights(k, n)[0], group_weights(k, n)[0] / (k / n * (1 - k / n) * n / (n - 1)).sqrt()]
        ),
    },
    "q4": {
        "that is GRPO, and the second deletion": lambda *a: dr_grpo_loss(*a, std=True),
        "that is GRPO, and the first deletion": lambda *a: dr_grpo_loss(*a, how="sequence_mean"),
        "Both biases": lambda *a: dr_grpo_loss(*a, std=True, how="sequence_mean"),
        "DAPO's mean": lambda *a: dr_grpo_loss(*a, how="token_mean"),
        "You divided by the width": lambda lp, o, r, m, n, limit, clip=0.2: dr_grpo_loss(
            lp, o, r, m, n, m.shape[1], clip
        ),
        "The baseline is the mean of the batch": batch_baseline,
        "The clipped ratio is used everywhere": lambda *a: dr_grpo_loss(*a, take=lambda free, clipped: clipped),
        "The ratio is upside down": lambda lp, o, *a: dr_grpo_loss(o, lp, *a),
        "The sign is wrong": lambda *a: -dr_grpo_loss(*a),
        "You forgot to divide by the number of rows": lambda lp, *a: dr_grpo_loss(lp, *a) * len(lp),
        "Groups are neighbours": transposed_groups,
        "should be": lambda *a: "a loss",
        "did you detach it": detached_ratio,
        "expected": fixed_clip,
        "No token is clipped": lambda *a: dr_grpo_loss(*a, take=lambda free, clipped: free),
    },
    "q5": {
        "the mean over the padded width": lambda new, old, m: ((new - old) * m).mean(1).exp(),
        "without the root": lambda new, old, m: ((new - old) * m).sum(1).exp(),
        "the arithmetic mean": lambda new, old, m: ((new - old).exp() * m).sum(1) / m.sum(1),
        "You counted the padding": lambda new, old, m: (new - old).mean(1).exp(),
        "The ratio is upside down": lambda new, old, m: sequence_ratio(old, new, m),
        "not finite": lambda new, old, m: (((new - old) * m).sum(1) / m.sum(1)).exp(),
        "did you detach it": lambda new, old, m: sequence_ratio(new.detach(), old, m),
        "the gradient": lambda new, old, m: importance_ratio(new, old, m, "sequence").max(1).values.where(m.any(1), 1),
    },
}


@pytest.mark.parametrize(("name", "right"), [(name, f) for name, functions in RIGHT.items() for f in functions])
@pytest.mark.parametrize("seed", thinned(range(3), every=3))
def test_right_solutions_pass_with_any_random_inputs(name, right, seed):
    result = QUESTIONS[name].run(Local(right), seed)
    assert result.passed, repr(result)


@pytest.mark.parametrize(("name", "said", "wrong"), [(q, s, f) for q, cases in WRONG.items() for s, f in cases.items()])
@pytest.mark.parametrize("seed", thinned(range(3), every=3))
def test_wrong_solutions_fail_and_are_told_why(name, said, wrong, seed):
    result = QUESTIONS[name].run(Local(wrong), seed)
    assert not result.passed
    assert any(said in case.message for case in result.cases), repr(result)


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_hole_says_that_nothing_is_written_and_hints(name):
    def hole(*arguments):
        raise NotImplementedError

    result = QUESTIONS[name].run(Local(hole), 0)
    assert all(case.message == "not implemented yet" for case in result.cases) and result.hint


def test_every_question_has_enough_wrong_and_right_implementations():
    for name in QUESTIONS:
        assert len(WRONG[name]) >= 4 and len(RIGHT[name]) >= 2
