"""Where the gain of the embedded task comes from.

A sampled answer is right by work if three things hold one after the other. It is **clean**: every line is one that the
demonstrations have. It made the **choice** to work: a calculation, then `#### N`, no guess. And its **arithmetic** is
right. At each level of the problems

    P(right) = P(clean) P(works | clean) P(right | works) + luck,

luck being guesses and garbage that are right all the same. The three factors are measured; `split` says what each
brings of the way from one set of answers to another.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from rlcourse.course.lessons.demonstrations import ANSWER, CHECK, THINK
from rlcourse.tasks.minigsm import BOXES, BOYS, GIRLS, TEMPLATES, THINGS
from rlcourse.tasks.task import Answer

KINDS = ("garbage", "guess", "words", "worked")
FACTORS = ("clean", "choice", "arithmetic")
NAMES = "|".join(BOYS + GIRLS)
WORDS = {"A": NAMES, "B": NAMES, "C": NAMES, "He": "He|She", "things": "|".join(THINGS), "boxes": "|".join(BOXES)}

Counts = dict[str, dict[str, int]]  # by level: answers of each kind, and "worked right", "right"


def kind(answer: Answer) -> str:
    """One of KINDS. garbage: a line that no demonstration has, or no end; guess: no calculation; words: worked, but
    with an end that the strict reading refuses; worked: with the end `#### N`."""
    found = demonstration().fullmatch(answer.text) if answer.finished else None
    if found is None:
        return "garbage"
    if not found["work"]:
        return "guess"
    return "worked" if found["end"].startswith("####") else "words"


@cache
def demonstration() -> re.Pattern:
    """What a demonstration looks like, whatever its numbers say."""
    number, calculation = r"[0-9]+", r"[0-9]+[-+*/][0-9]+=[0-9]+"
    steps = [step for template in TEMPLATES for step in template.steps]
    lines = sorted({f"{_words(step.before)}{calculation}{_words(step.after)}" for step in steps})
    work = "|".join([*lines, rf"{CHECK} {calculation}\."])
    end = rf"#### {number}|{ANSWER} {number}\."
    return re.compile(rf"(?:{re.escape(THINK)}\n)*(?P<work>(?:(?:{work})\n)*)(?P<end>{end})")


def _words(text: str) -> str:
    pieces = re.split(r"\{(\w+)\}", text)
    return "".join(re.escape(p) if i % 2 == 0 else f"(?:{WORDS[p]})" for i, p in enumerate(pieces))


def count(answers: Iterable[Answer]) -> Counts:
    """How many answers of each level are of each kind, and right."""
    counts: Counts = {}
    for answer in answers:
        level = counts.setdefault(str(answer.problem.level), dict.fromkeys((*KINDS, "worked right", "right"), 0))
        level[kind(answer)] += 1
        level["right"] += answer.strict
        level["worked right"] += answer.strict and kind(answer) == "worked"
    return dict(sorted(counts.items()))


@dataclass(frozen=True)
class Level:
    """The three factors of a level, the share that luck adds, and the level's share of all answers."""

    factors: tuple[float, float, float]
    luck: float
    weight: float

    @property
    def accuracy(self) -> float:
        clean, choice, arithmetic = self.factors
        return clean * choice * arithmetic + self.luck


def levels(counts: Counts) -> list[Level]:
    """The factors of each level. A share of nothing is 0."""
    total = sum(c[k] for c in counts.values() for k in KINDS)
    found = []
    for c in counts.values():
        n = sum(c[k] for k in KINDS)
        clean = n - c["garbage"]
        factors = (clean / n, c["worked"] / max(1, clean), c["worked right"] / max(1, c["worked"]))
        found.append(Level(factors, (c["right"] - c["worked right"]) / n, n / total))
    return found


def accuracy(counts: Counts) -> float:
    """The share of all answers that are right."""
    return sum(level.weight * level.accuracy for level in levels(counts))


def factors(counts: Counts) -> dict[str, float]:
    """The three factors over all levels together."""
    [level] = levels({"all": sum(map(Counter, counts.values()), Counter())})
    return dict(zip(FACTORS, level.factors, strict=True))


def exchanged(before: Counts, after: Counts, taken: Iterable[str]) -> float:
    """Accuracy by work, without luck, with the factors in `taken` of `after` and the others of `before`. Raises
    ValueError unless both answer the same problems."""
    total, olds, news = 0.0, levels(before), levels(after)
    if [level.weight for level in olds] != [level.weight for level in news]:
        raise ValueError("Only answers to the same problems can be compared: the levels differ in their share.")
    for old, new in zip(olds, news, strict=True):
        product = new.weight
        for name, was, now in zip(FACTORS, old.factors, new.factors, strict=True):
            product *= now if name in taken else was
        total += product
    return total


def split(before: Counts, after: Counts) -> dict[str, float]:
    """What each factor, and luck, adds to the accuracy on the way from `before` to `after`: the mean over the six
    orders in which the three can change one after the other (the Shapley value)."""
    orders = list(itertools.permutations(FACTORS))
    parts = dict.fromkeys(FACTORS, 0.0)
    for order in orders:
        for place, name in enumerate(order):
            step = exchanged(before, after, order[: place + 1]) - exchanged(before, after, order[:place])
            parts[name] += step / len(orders)
    luck = accuracy(after) - accuracy(before) - (exchanged(before, after, FACTORS) - exchanged(before, after, ()))
    return parts | {"luck": luck}


def summary(record: dict) -> dict[str, dict[str, float]]:
    """Means over the seeds of the record `lesson00_gain`, by factor: before and after (shares), points of the gain
    (percent of the answers); the same for accuracy; for luck the points alone."""
    ends = [(seed["evals"][0]["counts"], seed["evals"][-1]["counts"]) for seed in record["results"]]
    found = {}
    for name in (*FACTORS, "accuracy"):
        of = accuracy if name == "accuracy" else lambda counts, name=name: factors(counts)[name]
        before, after = (sum(of(pair[i]) for pair in ends) / len(ends) for i in (0, 1))
        found[name] = {"before": before, "after": after, "points": 100 * (after - before)}
    for name in (*FACTORS, "luck"):
        found.setdefault(name, {})["points"] = sum(100 * split(*pair)[name] for pair in ends) / len(ends)
    return found
