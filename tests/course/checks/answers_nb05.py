"""Answers to the exercises of lesson 05."""

import re

import torch

# q1: a real model's reward
NUMBER = r"-?[0-9][0-9,]*(?:\.[0-9]+)?"


def real_reward(text, gold, places=("####", "box", "last")):
    found = {
        "####": re.findall(rf"#### \$?({NUMBER})", text),
        "box": re.findall(rf"boxed{{\\?\$?({NUMBER})", text),
        "last": re.findall(NUMBER, text),
    }
    said = next((found[place][-1] for place in places if found[place]), None)
    return float(said is not None and float(said.replace(",", "")) == float(gold))


# q4: which engine lied
ROUNDED, TRUNCATED, TEMPERATURE, STALE, SHIFTED = range(5)


def correlation(a, b):
    return torch.corrcoef(torch.stack([a, b]))[0, 1]


def engine_with(order="rtshe", truncated="sign", limit=0.03):
    """which_engine with its questions in another order (r t s h), or other details; what is left over is STALE."""

    def which_engine(sampled, recomputed, mask):
        a, b = sampled[mask], recomputed[mask]
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


# q5: name the failure
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


RIGHT = {"q1": real_reward, "q4": engine_with(), "q5": diagnose_with()}

WRONG = {
    "q1": {
        "strict": lambda text, gold: real_reward(text, gold, ("####",)),
        "no box": lambda text, gold: real_reward(text, gold, ("####", "last")),
        "box first": lambda text, gold: real_reward(text, gold, ("box", "####", "last")),
        "the last number": lambda text, gold: real_reward(text, gold, ("last",)),
        "anywhere": lambda text, gold: float(gold in text),
    },
    "q2": {"ahead": lambda pw, fw, pg, fg: pw - pg, "None": (lambda *_: None, "is None")},
    "q4": {
        "sign of the mean": (engine_with(truncated="mean"), "not TRUNCATED"),
        "temperature before shift": (engine_with(order="rths"), "is SHIFTED, not TEMPERATURE"),
        "truncated first": (engine_with(order="trsh"), "is ROUNDED, not TRUNCATED"),
        "limit too narrow": (engine_with(limit=0.001), "is ROUNDED, not"),
        "a name": (lambda *_: "STALE", "a whole number from 0 to 4"),
        "None": (lambda *_: None, "every path"),
    },
    "q5": {
        "always healthy": (lambda *_: HEALTHY, "is HACKED, not HEALTHY"),
        "hacked first": (diagnose_with(order=("hacked", "still", "collapsed", "cut off")), "is STILL, not HACKED"),
        "last step only": (diagnose_with(window=1), "is HEALTHY, not"),
        "nan not ignored": diagnose_with(ignore_nan=False),
        "reward above accuracy": (diagnose_with(trend=False), "is HEALTHY, not HACKED"),
        "kl threshold too high": (diagnose_with(still=10.0), "not STILL"),
        "a name": (lambda *_: "healthy", "a whole number from 0 to 4"),
        "nothing": (lambda *_: None, "every path"),
    },
}
