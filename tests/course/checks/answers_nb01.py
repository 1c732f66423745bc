"""Answers to the exercises of lesson 01."""

import functools
import itertools
import re

import torch
import torch.nn.functional as F
from answers import half_mended

from rlcourse.course.checks.nb01 import PLANTED, reinforce_loss, sloppy


# q1: a loss with four mistakes
def cross_entropy_loss(logits, ids, rewards, n, eos_id):
    losses = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
    alive = torch.cat([torch.ones_like(ids[:, :1]), (ids != eos_id).long().cumprod(1)[:, :-1]], dim=1)
    groups = rewards.split(n)
    advantage = torch.cat([group - group.mean() for group in groups])
    return (advantage * (losses * alive).sum(1)).sum() / len(rewards)


# q2: a cheat
WORDS = {"twice": 2, "three times": 3, "four times": 4, "five times": 5}
WORDS |= {"half": 2, "a third": 3, "a quarter": 4, "a fifth": 5}


def in_question(question):
    return [int(n) for n in re.findall(r"\d+", question)] + [n for word, n in WORDS.items() if word in question]


def fitting(numbers, limit=120):
    text = ""
    for number in dict.fromkeys(numbers):
        if len(text) + len(str(number)) + 1 <= limit:
            text += f",{number}" if text else str(number)
    return text


def results(a, b):
    found = [a + b, abs(a - b), a * b]
    found += [x // y for x, y in ((a, b), (b, a)) if y > 0 and x % y == 0]
    return [n for n in found if 2 <= n <= 100]


def one_step(question):
    return [n for a, b in itertools.combinations(in_question(question), 2) for n in results(a, b)]


def cheat_by_steps(question):
    once = one_step(question)
    return fitting(once + [n for a in once for b in in_question(question) for n in results(a, b)])


# q3: a verifier
NUMBER = r"-?\d+(?:,\d{3})*(?:\.\d+)?"


def last_line(text):
    return text.strip().split("\n")[-1] if text.strip() else ""


def one_claim(text, gold):
    found = re.findall(NUMBER, last_line(text))
    return 1.0 if len(found) == 1 and float(found[0].replace(",", "")) == float(gold) else 0.0


# q4: a factor
def by_sampling_nothing(weights):
    """The mean over answers of what is left of each."""
    return (1 - torch.diagonal(weights)).mean()


RIGHT = {"q1": cross_entropy_loss, "q2": cheat_by_steps, "q3": one_claim, "q4": by_sampling_nothing}
WRONG = {
    "q1": half_mended(reinforce_loss, PLANTED)
    | {
        "no baseline": (functools.partial(reinforce_loss, wrong=("no baseline",)), "no baseline left"),
        "the lesson's line": lambda *a: reinforce_loss(*a, wrong=("no baseline",)) / 80,
        "detached": (lambda logits, *rest: reinforce_loss(logits.detach(), *rest), "no gradient flows"),
    },
    "q2": {
        "one step": (lambda question: fitting(one_step(question)), "it earns on"),
        "no limit": (lambda question: fitting(range(2, 101), limit=1000), "never generated"),
        "a number": (lambda question: 14, "return the text"),
    },
    "q3": {
        "sloppy": (lambda text, gold: float(sloppy(text, gold)), "pay for a list"),
        "any line": (lambda text, gold: float(any(one_claim(line, gold) for line in text.split("\n"))), "took it back"),
        "no minus": (lambda text, gold: one_claim(text.replace("-", ""), gold), "digits inside another number"),
        "text": (lambda text, gold: text, "return 1.0 or 0.0"),
        "None": (lambda text, gold: None, "is None: return"),
    },
    "q4": {
        "all weights": (lambda weights: 1 - weights.sum() / len(weights), "weights of the other answers"),
        "the loss": (lambda weights: weights.trace() / len(weights), "what is lost"),
        "not the mean": (lambda weights: 1 - weights.trace(), "their mean"),
        "others": (lambda weights: 1 - (weights.sum() - weights.trace()) / len(weights), "the other way round"),
    },
}
