"""The checks of lesson 05 pass what is right, kill what is wrong, and name the mistake."""

import functools
import math

import pytest
import torch
from answers import common_tests

from rlcourse.course.checks.nb05 import QUESTIONS
from rlcourse.course.checks.nb05.q1_credit import by_bisection
from rlcourse.course.checks.nb05.q2_best import best_by_pairs
from rlcourse.course.checks.nb05.q3_engine import ENGINES, sample_with

# q1: how kind a verifier may be ----------------------------------------------------------------------------------


def credit_by_lines(right_worked, readable_worked, right_guessed, readable_guessed):
    ahead = right_worked - right_guessed
    steeper = (readable_guessed - right_guessed) - (readable_worked - right_worked)
    return 1.0 if steeper <= ahead else ahead / steeper


def credit_by_halving(right_worked, readable_worked, right_guessed, readable_guessed):
    def works(c):
        worked = right_worked + c * (readable_worked - right_worked)
        return worked >= right_guessed + c * (readable_guessed - right_guessed)

    low, high = 0.0, 1.0
    if works(high):
        return torch.tensor(1.0)
    for _ in range(40):
        low, high = ((low + high) / 2, high) if works((low + high) / 2) else (low, (low + high) / 2)
    return torch.tensor(low)


def credit_with(below, cap=True, upside_down=False):
    """A quotient with another number below."""

    def largest_credit(pw, fw, pg, fg):
        under = below(pw, fw, pg, fg) or 1e-9
        found = under / (pw - pg) if upside_down else (pw - pg) / under
        return min(1.0, found) if cap and found > 0 else 1.0 if cap else found

    return largest_credit


def steeper(pw, fw, pg, fg):
    return (fg - pg) - (fw - pw)


# q2: the best of several checkpoints -----------------------------------------------------------------------------


def overstated_by_tails(p, n, k):
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    at_most = torch.tensor(chances, dtype=torch.float64).cumsum(0).clamp(max=1)
    return ((1 - at_most**k).sum() / n).item() - p


def overstated_by_differences(p, n, k):
    c = torch.arange(n + 1, dtype=torch.float64)
    whole = torch.lgamma(torch.tensor(n + 1.0, dtype=torch.float64))
    log = whole - torch.lgamma(c + 1) - torch.lgamma(n - c + 1) + c * math.log(p) + (n - c) * math.log(1 - p)
    powers = log.exp().cumsum(0) ** k
    best = powers - torch.cat([powers.new_zeros(1), powers[:-1]])
    return (best * c).sum() / n - p


def overstated_with(change):
    """change: (probabilities of at most c [n + 1], p, n, k) to the result."""

    def overstated(p, n, k):
        chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
        return float(change(torch.tensor(chances, dtype=torch.float64).cumsum(0).clamp(max=1), p, n, k))

    return overstated


def by_bell_curve(p, n, k):
    """Blom's approximation of the largest of k normal variables."""
    place = torch.tensor((k - 0.375) / (k + 0.25), dtype=torch.float64)
    return math.sqrt(p * (1 - p) / n) * math.sqrt(2) * torch.erfinv(2 * place - 1).item()


def simulated(p, n, k):
    measured = torch.distributions.Binomial(n, torch.tensor(float(p))).sample((2000, k)) / n
    return measured.amax(1).mean().item() - p


# q3: which engine lied -------------------------------------------------------------------------------------------

ROUNDED, TRUNCATED, TEMPERATURE, STALE, SHIFTED = range(5)


def correlation(a, b):
    return torch.corrcoef(torch.stack([a, b]))[0, 1]


def engine_with(order="rtshe", mask_first=True, truncated="sign", limit=0.03):
    """which_engine with its questions in another order (r t s h), or other details; what is left over is STALE."""

    def which_engine(sampled, recomputed, mask):
        if mask_first:
            a, b = sampled[mask], recomputed[mask]
        else:
            a, b = sampled.flatten(), recomputed.flatten()
        gap = b - a
        below = gap.mean() < -0.01 if truncated == "mean" else gap.max() < limit
        answers = {
            "r": (bool(gap.abs().max() < limit), ROUNDED),
            "t": (bool(below), TRUNCATED),
            "s": (bool(correlation(a, b) < 0.5), SHIFTED),
            "h": (bool(correlation(a, gap).abs() > 0.5), TEMPERATURE),
        }
        return next((answers[key][1] for key in order if key in answers and answers[key][0]), STALE)

    return which_engine


def engine_by_fit(sampled, recomputed, mask):
    """By the slope and the rest of a straight line, and by how often the gap is above 0."""
    a, b = sampled[mask].double(), recomputed[mask].double()
    gap = b - a
    if gap.abs().mean() < 0.012:
        return torch.tensor(ROUNDED)
    if (gap > 0.04).sum() == 0:
        return torch.tensor(TRUNCATED)
    if gap.abs().mean() > 0.9:
        return torch.tensor(SHIFTED)
    slope = ((a - a.mean()) * (gap - gap.mean())).sum() / (a - a.mean()).square().sum()
    return torch.tensor(TEMPERATURE if slope.abs() > 0.12 else STALE)


def hot_only(sampled, recomputed, mask):
    """Knows of temperatures below 1 alone."""
    a, b = sampled[mask], recomputed[mask]
    found = engine_with()(sampled, recomputed, mask)
    return STALE if found == TEMPERATURE and correlation(a, b - a) > 0 else found


def never_shifted(sampled, recomputed, mask):
    return engine_with(order="rth")(sampled, recomputed, mask)


# q4: name the failure --------------------------------------------------------------------------------------------

HEALTHY, STILL, COLLAPSED, CUT_OFF, HACKED = range(5)


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


def diagnose_by_numbers(reward, accuracy, truncated, kl):
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


def diagnose_mean_kl(reward, accuracy, truncated, kl):
    """kl.mean() is nan where one step has none, and no comparison with nan holds."""
    return (
        STILL
        if kl.mean() < 1e-4
        else diagnose_with(order=("collapsed", "cut off", "hacked"))(reward, accuracy, truncated, kl)
    )


def diagnose_some_kl(reward, accuracy, truncated, kl):
    """Has no largest KL where none was measured."""
    if kl[~kl.isnan()].max() < 1e-4:
        return STILL
    return diagnose_with(order=("collapsed", "cut off", "hacked"))(reward, accuracy, truncated, kl)


def diagnose_nan_as_zero(reward, accuracy, truncated, kl):
    return diagnose_with()(reward, accuracy, truncated, kl.nan_to_num(0.0))


RIGHT = {
    "q1": [credit_by_lines, credit_by_halving],
    "q2": [overstated_by_tails, overstated_by_differences],
    "q3": [engine_with(), engine_by_fit],
    "q4": [diagnose_with(), diagnose_by_numbers],
}

WRONG = {
    "q1": {
        "credit on top": credit_with(lambda pw, fw, pg, fg: fg - fw, cap=False),
        "no cap": credit_with(steeper, cap=False),
        "upside down": credit_with(steeper, cap=False, upside_down=True),
        "ahead": lambda pw, fw, pg, fg: pw - pg,
        "guesses all wrong": credit_with(lambda pw, fw, pg, fg: fg - (fw - pw), cap=False),
        "worked all right": credit_with(lambda pw, fw, pg, fg: fg - pg, cap=False),
        "negative": lambda pw, fw, pg, fg: min(1.0, (pw - pg) / (steeper(pw, fw, pg, fg) or 1e-9)),
        "cut to 0": lambda pw, fw, pg, fg: max(0.0, min(1.0, (pw - pg) / (steeper(pw, fw, pg, fg) or 1e-9))),
        "always 1": lambda *_: 1.0,
        "half": lambda *_: 0.5,
        "rest": lambda *shares: 1 - credit_by_lines(*shares),
        "None": lambda *_: None,
    },
    "q2": {
        "not less p": overstated_with(lambda f, p, n, k: (1 - f**k).sum() / n),
        "a count": overstated_with(lambda f, p, n, k: (1 - f**k).sum() - n * p),
        "the worst": overstated_with(lambda f, p, n, k: ((1 - f) ** k).sum() / n - p),
        "below": overstated_with(lambda f, p, n, k: p - ((1 - f) ** k).sum() / n),
        "bell curve": by_bell_curve,
        "simulated": simulated,
        "one se": lambda p, n, k: math.sqrt(p * (1 - p) / n),
        "k se": lambda p, n, k: k * math.sqrt(p * (1 - p) / n),
        "interval": lambda p, n, k: 1.96 * math.sqrt(p * (1 - p) / n),
        "off by one": overstated_with(lambda f, p, n, k: (1 - f[:-1] ** k).sum() / (n + 1) - p),
        "zero": lambda *_: 0.0,
    },
    "q3": {
        "no mask": engine_with(mask_first=False),
        "times mask": lambda a, b, mask: engine_with()(a * mask, b * mask, torch.ones_like(mask)),
        "sign of the mean": engine_with(truncated="mean"),
        "temperature before shift": engine_with(order="rths"),
        "truncated first": engine_with(order="trsh"),
        "never shifted": never_shifted,
        "one side": hot_only,
        "limit too wide": engine_with(limit=0.8),
        "limit too narrow": engine_with(limit=0.001),
        "always rounded": lambda *_: ROUNDED,
        "a name": lambda *_: "STALE",
        "None": lambda *_: None,
    },
    "q4": {
        "always healthy": lambda *_: HEALTHY,
        "cut off first": diagnose_with(order=("still", "cut off", "collapsed", "hacked")),
        "hacked first": diagnose_with(order=("hacked", "still", "collapsed", "cut off")),
        "last step only": diagnose_with(window=1),
        "nan not ignored": diagnose_with(ignore_nan=False),
        "mean of kl": diagnose_mean_kl,
        "largest of no kl": diagnose_some_kl,
        "no kl is no move": diagnose_nan_as_zero,
        "reward above accuracy": diagnose_with(trend=False),
        "truncated anywhere": diagnose_any_truncation,
        "kl threshold too high": diagnose_with(still=10.0),
        "a name": lambda *_: "healthy",
        "nothing": lambda *_: None,
    },
}

# The sentence, or a part of it, that a wrong implementation must be told.
NAMED = {
    ("q1", "credit on top"): "no credit on top",
    ("q1", "no cap"): "at most 1",
    ("q1", "upside down"): "other way up",
    ("q1", "ahead"): "at credit 0",
    ("q1", "guesses all wrong"): "guesses that can be read are right",
    ("q1", "worked all right"): "worked answers are wrong",
    ("q1", "rest"): "1 less the largest",
    ("q1", "None"): "is None",
    ("q2", "not less p"): "take the true one off",
    ("q2", "a count"): "divide by how many",
    ("q2", "the worst"): "worst of them",
    ("q2", "below"): "worst of them",
    ("q2", "one se"): "one standard error",
    ("q2", "k se"): "error for each",
    ("q2", "interval"): "half an interval",
    ("q3", "sign of the mean"): "not TRUNCATED",
    ("q3", "temperature before shift"): "is SHIFTED, not TEMPERATURE",
    ("q3", "truncated first"): "is ROUNDED, not TRUNCATED",
    ("q3", "one side"): "is TEMPERATURE, not STALE",
    ("q3", "limit too narrow"): "is ROUNDED, not",
    ("q3", "a name"): "one of the five numbers",
    ("q3", "None"): "every path",
    ("q4", "always healthy"): "is HACKED, not HEALTHY",
    ("q4", "cut off first"): "is COLLAPSED, not CUT_OFF",
    ("q4", "hacked first"): "is STILL, not HACKED",
    ("q4", "last step only"): "is HEALTHY, not",
    ("q4", "nan not ignored"): "largest KL",
    ("q4", "mean of kl"): "largest KL",
    ("q4", "no kl is no move"): "is HEALTHY, not STILL",
    ("q4", "reward above accuracy"): "is HEALTHY, not HACKED",
    ("q4", "truncated anywhere"): "is HEALTHY, not CUT_OFF",
    ("q4", "kl threshold too high"): "not STILL",
    ("q4", "a name"): "return one of the five numbers",
    ("q4", "nothing"): "every path",
}

globals().update(common_tests(QUESTIONS, RIGHT, WRONG, NAMED))


def test_what_is_right_is_computed_by_another_road():
    assert by_bisection(0.4, 0.5, 0.05, 0.95).item() == pytest.approx(0.35 / 0.8)
    assert by_bisection(0.6, 0.9, 0.05, 0.7).item() == 1
    for p, n, k in ((0.3, 6, 3), (0.8, 20, 5)):
        assert best_by_pairs(p, n, k) / n - p == pytest.approx(overstated_by_tails(p, n, k))


@pytest.mark.parametrize("what", range(5), ids=ENGINES)
def test_every_engine_is_told_apart_whatever_its_strength_and_seed(what):
    for seed in range(60):
        torch.manual_seed(seed)
        inputs = sample_with(what, 12, 24, seed / 59, hot=seed % 2 == 0)
        found = [int(f(*inputs)) for f in (engine_with(), engine_by_fit, engine_with(limit=0.05))]
        assert found == [what] * 3, seed


def test_every_function_is_tried_by_the_shared_tests():
    assert set(WRONG) == set(RIGHT) == set(QUESTIONS)
    assert functools.reduce(min, map(len, WRONG.values())) >= 4
