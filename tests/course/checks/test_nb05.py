"""The checks of exercises 05 pass right solutions however they are written, and kill wrong ones."""

import math

import pytest
import torch

from rlcourse.course.checks.nb05 import QUESTIONS

HEALTHY, STILL, COLLAPSED, CUT_OFF, HACKED = range(5)


def interval_with(variance, width):
    """An accuracy_interval with another variance, (p, n) to number, or width, (se, z) to number."""

    def accuracy_interval(right, z=1.96):
        p, n = right.float().mean(), len(right)
        w = width(variance(p, n) ** 0.5, z)
        return torch.stack([p, p - w, p + w]).clamp(0, 1)

    return accuracy_interval


def interval_by_numbers(right, z=1.96):
    p = sum(right.tolist()) / len(right)
    w = z * math.sqrt(p * (1 - p) / len(right))
    return torch.tensor([p, max(0.0, p - w), min(1.0, p + w)])


def interval_not_cut(right, z=1.96):
    p = right.float().mean()
    w = z * (p * (1 - p) / len(right)).sqrt()
    return torch.stack([p, p - w, p + w])


def interval_without_root(right, z=1.96):
    p = right.float().mean()
    w = z * p * (1 - p) / len(right)
    return torch.stack([p, p - w, p + w]).clamp(0, 1)


def binomial(p, n):
    return p * (1 - p) / n


def times_z(se, z):
    return se * z


def paired_with(correction=0, sign=1, root=True):
    def paired_interval(first, second, z=1.96):
        d = sign * (second.float() - first.float())
        w = z * d.std(correction=correction) / (len(d) ** 0.5 if root else 1)
        return torch.stack([d.mean(), d.mean() - w, d.mean() + w])

    return paired_interval


def paired_by_counts(first, second, z=1.96):
    n, gained, lost = len(first), int((second & ~first).sum()), int((first & ~second).sum())
    mean = (gained - lost) / n
    w = z * math.sqrt(((gained + lost) / n - mean**2) / n)
    return torch.tensor([mean, mean - w, mean + w])


def unpaired(first, second, z=1.96):
    a, b, n = first.float().mean(), second.float().mean(), len(first)
    w = z * ((a * (1 - a) + b * (1 - b)) / n).sqrt()
    return torch.stack([b - a, b - a - w, b - a + w])


def mismatch_by_rows(recomputed, sampled, mask, epsilon=0.2):
    gaps = torch.cat([(r - s)[m] for r, s, m in zip(recomputed, sampled, mask, strict=True)])
    outside = ((gaps.exp() > 1 + epsilon) | (gaps.exp() < 1 - epsilon)).double().mean().float()
    return torch.stack([gaps.abs().mean(), gaps.abs().max(), outside])


def mismatch_filled(recomputed, sampled, mask, epsilon=0.2):
    gap = torch.where(mask, recomputed, 0.0) - torch.where(mask, sampled, 0.0)
    outside = ((gap.exp() - 1).abs() > epsilon).sum() / mask.sum()
    return torch.stack([gap.abs().sum() / mask.sum(), gap.abs().max(), outside])


def mismatch_wrong(how):
    def mismatch(recomputed, sampled, mask, epsilon=0.2):
        gap = (recomputed - sampled)[mask]
        share = ((gap.exp() - 1).abs() > epsilon).float().mean()
        mean, largest = gap.abs().mean(), gap.abs().max()
        if how == "no mask":
            gap = recomputed - sampled
            return torch.stack([gap.abs().mean(), gap.abs().max(), ((gap.exp() - 1).abs() > epsilon).float().mean()])
        if how == "all positions":
            mean, share = mean * mask.sum() / mask.numel(), share * mask.sum() / mask.numel()
        if how == "signs cancel":
            mean = gap.mean()
        if how == "largest positive":
            largest = gap.max()
        if how == "gap against epsilon":
            share = (gap.abs() > epsilon).float().mean()
        if how == "ratio turned over":
            share = (((-gap).exp() - 1).abs() > epsilon).float().mean()
        if how == "mean of rows":
            rows = [(r - s)[m].abs().mean() for r, s, m in zip(recomputed, sampled, mask, strict=True)]
            mean = torch.stack(rows).mean()
        return torch.stack([mean, largest, share])

    return mismatch


def mismatch_times_mask(recomputed, sampled, mask, epsilon=0.2):
    gap = (recomputed - sampled) * mask  # 0 * nan is nan
    share = ((gap.exp() - 1).abs() > epsilon).sum() / mask.sum()
    return torch.stack([gap.abs().sum() / mask.sum(), gap.abs().max(), share])


def schedule_with(rising, falling):
    def learning_rate(step, steps, warmup, peak):
        if step < warmup:
            return peak * rising(step, warmup)
        return peak * falling(step, steps, warmup)

    return learning_rate


def up(step, warmup):
    return (step + 1) / warmup


def half_cosine(step, steps, warmup):
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def rate_by_squares(step, steps, warmup, peak):
    rate = min(1.0, (step + 1) / warmup) if warmup else 1.0
    if step >= warmup and steps > warmup:
        rate *= torch.cos(torch.tensor(math.pi / 2 * (step - warmup) / (steps - warmup))) ** 2
    return peak * rate


def diagnose_with(still=1e-4, order=("still", "collapsed", "cut off", "hacked"), window=5, ignore_nan=True, trend=True):
    """A diagnose that asks its questions in `order`, with other details."""

    def diagnose(reward, accuracy, truncated, kl):
        measured = kl[~kl.isnan()] if ignore_nan else kl
        start, end = accuracy[:window].mean(), accuracy[-window:].mean()
        paid = reward[-window:].mean()
        answers = {
            "still": (len(measured) > 0 and bool(measured.max() < still), STILL),
            "collapsed": (bool(paid < 0.5 * reward[:window].mean()), COLLAPSED),
            "hacked": (bool(end < start + 0.03 if trend else paid > end + 0.1), HACKED),
            "cut off": (bool(truncated[-window:].mean() > 0.25), CUT_OFF),
        }
        return next((answers[name][1] for name in order if answers[name][0]), HEALTHY)

    return diagnose


def diagnose_by_slope(reward, accuracy, truncated, kl):
    def ends(metric):
        return sum(metric[:5].tolist()) / 5, sum(metric[-5:].tolist()) / 5

    if kl.nan_to_num(0).max() < 1e-5 and bool((~kl.isnan()).any()):
        return torch.tensor(STILL)
    (paid_first, paid_last), (first, last) = ends(reward), ends(accuracy)
    if paid_last < paid_first / 3:
        return torch.tensor(COLLAPSED)
    if ends(truncated)[1] > 0.3:
        return torch.tensor(CUT_OFF)
    return torch.tensor(HACKED if last - first <= 0.05 else HEALTHY)


def diagnose_any_truncation(reward, accuracy, truncated, kl):
    found = diagnose_with()(reward, accuracy, truncated, kl)
    return CUT_OFF if found == HEALTHY and truncated.max() > 0.25 else found


RIGHT = {
    "q1": {"tensors": interval_with(binomial, times_z), "numbers": interval_by_numbers},
    "q2": {"tensors": paired_with(), "counts": paired_by_counts},
    "q3": {"rows": mismatch_by_rows, "filled": mismatch_filled},
    "q4": {"cosine": schedule_with(up, half_cosine), "squares": rate_by_squares},
    "q5": {"ifs": diagnose_with(), "other thresholds": diagnose_by_slope},
}

# Each wrong solution, and words of the mistake that the card must name; None where no name is promised.
WRONG = {
    "q1": {
        "no root": (interval_without_root, "root is missing"),
        "no n": (interval_with(lambda p, n: p * (1 - p), times_z), "deviation of one answer"),
        "no z": (interval_with(binomial, lambda se, z: se), "z is missing"),
        "twice": (interval_with(binomial, lambda se, z: 2 * z * se), "whole width on each side"),
        "n - 1": (interval_with(lambda p, n: p * (1 - p) / max(1, n - 1), times_z), "divided by n - 1"),
        "z fixed": (interval_with(binomial, lambda se, z: 1.96 * se), "always used 1.96"),
        "not cut": (interval_not_cut, "cut the ends"),
    },
    "q2": {
        "unpaired": (unpaired, "different problems"),
        "first less second": (paired_with(sign=-1), "sign is turned"),
        "n - 1": (paired_with(correction=1), "divided by n - 1"),
        "no root of n": (paired_with(root=False), "deviation of one problem"),
    },
    "q3": {
        "no mask": (mismatch_wrong("no mask"), "left the mask out"),
        "all positions": (mismatch_wrong("all positions"), "divided by all positions"),
        "signs cancel": (mismatch_wrong("signs cancel"), "both signs cancel"),
        "largest positive": (mismatch_wrong("largest positive"), "largest in size"),
        "gap against epsilon": (mismatch_wrong("gap against epsilon"), "take exp first"),
        "ratio turned over": (mismatch_wrong("ratio turned over"), "turned over"),
        "mean of rows": (mismatch_wrong("mean of rows"), "averaged the rows' means"),
        "times mask": (mismatch_times_mask, None),
    },
    "q4": {
        "first step 0": (schedule_with(lambda s, w: s / w, half_cosine), "first step has rate 0"),
        "cosine over all": (
            schedule_with(up, lambda s, n, w: 0.5 * (1 + math.cos(math.pi * s / n))),
            "begins after warm-up",
        ),
        "divided by all steps": (
            schedule_with(up, lambda s, n, w: 0.5 * (1 + math.cos(math.pi * (s - w) / n))),
            "subtract `warmup` below",
        ),
        "straight": (schedule_with(up, lambda s, n, w: 1 - (s - w) / max(1, n - w)), "straight line"),
        "whole period": (
            schedule_with(up, lambda s, n, w: 0.5 * (1 + math.cos(2 * math.pi * (s - w) / max(1, n - w)))),
            "whole period",
        ),
        "quarter": (
            schedule_with(up, lambda s, n, w: math.cos(math.pi / 2 * (s - w) / max(1, n - w))),
            "Shift the cosine up",
        ),
        "no peak": (lambda s, n, w, peak: schedule_with(up, half_cosine)(s, n, w, 1.0), "peak is missing"),
        "no warm-up": (lambda s, n, w, peak: peak * half_cosine(s, n, 0), "no warm-up"),
        "all warm-up divides by 0": (
            schedule_with(up, lambda s, n, w: 0.5 * (1 + math.cos(math.pi * (s - w) / (n - w)))),
            None,
        ),
    },
    "q5": {
        "always healthy": (lambda *_: HEALTHY, "is HACKED, not HEALTHY"),
        "cut off first": (
            diagnose_with(order=("still", "cut off", "collapsed", "hacked")),
            "is COLLAPSED, not CUT_OFF",
        ),
        "hacked first": (diagnose_with(order=("hacked", "still", "collapsed", "cut off")), "is STILL, not HACKED"),
        "last step only": (diagnose_with(window=1), "is HEALTHY, not"),
        "nan not ignored": (diagnose_with(ignore_nan=False), "is STILL, not"),
        "reward above accuracy": (diagnose_with(trend=False), "is HEALTHY, not HACKED"),
        "truncated anywhere": (diagnose_any_truncation, "is HEALTHY, not CUT_OFF"),
        "kl threshold too high": (diagnose_with(still=10.0), "not STILL"),
        "a name": (lambda *_: "healthy", "return one of the five numbers"),
        "nothing": (lambda *_: None, "every path"),
    },
}


@pytest.mark.parametrize(("question", "name"), [(q, n) for q, solutions in RIGHT.items() for n in solutions])
def test_right_solutions_pass_however_they_are_written(question, name):
    result = QUESTIONS[question](RIGHT[question][name])
    assert result.passed, repr(result)


@pytest.mark.parametrize(("question", "name"), [(q, n) for q, solutions in WRONG.items() for n in solutions])
def test_wrong_solutions_fail_and_the_card_names_the_mistake(question, name):
    function, words = WRONG[question][name]
    result = QUESTIONS[question](function)
    assert not result.passed
    messages = [case.message for case in result.cases if not case.passed]
    assert words is None or any(words in message for message in messages), messages


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_hole_shows_its_hint(question):
    def hole(*_, **__):
        raise NotImplementedError

    result = QUESTIONS[question](hole)
    assert not result.passed and result.hint


def test_every_question_is_tested_by_four_wrong_and_two_right_solutions():
    assert set(WRONG) == set(RIGHT) == set(QUESTIONS)
    assert all(len(solutions) >= 4 for solutions in WRONG.values())
    assert all(len(solutions) >= 2 for solutions in RIGHT.values())
